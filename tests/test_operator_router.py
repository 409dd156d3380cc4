"""The router's Deployment: which engines it finds, how long it waits for them, where its keys come from."""

from __future__ import annotations

import dataclasses
import importlib.util
import subprocess
import sys
from typing import Any

import pytest
from cacheoperator.names import Component
from operator_world import REFS, SETTINGS, manifest, one, pod_spec, rendered

from cacheservice.commands.router import CONTROL_KEY_ENV, PRE_STOP_S, SHUTDOWN_GRACE_S
from cacheservice.manifest import KVCacheManifest

VLLM_ROUTER = "  router: {type: VLLMRouter}\n"


def router_pod(parsed: KVCacheManifest, refs: Any = REFS) -> dict[str, Any]:
    return pod_spec(one(rendered(parsed, refs), "Deployment", "demo-router"))


def flag_values(args: list[str], flag: str) -> list[str]:
    rest = args[args.index(flag) + 1 :]
    ends = [index for index, word in enumerate(rest) if word.startswith("--")]
    return rest[: ends[0]] if ends else rest


@pytest.mark.parametrize("spec", ["", VLLM_ROUTER])
def test_it_finds_engines_by_the_labels_of_their_pods(spec: str) -> None:
    result = rendered(manifest(spec))
    args = pod_spec(one(result, "Deployment", "demo-router"))["containers"][0]["args"]
    assert flag_values(args, "--service-discovery-namespace") == ["serving"]
    assert flag_values(args, "--service-discovery-port") == ["8000"]
    for role in ("prefill", "decode"):
        chosen = dict(word.split("=") for word in flag_values(args, f"--{role}-selector"))
        engine = one(result, "Deployment", f"demo-{role}")["spec"]["template"]
        assert chosen.items() <= engine["metadata"]["labels"].items()
        assert pod_spec(one(result, "Deployment", f"demo-{role}"))["containers"][0]["ports"][0] == {
            "name": "http", "containerPort": 8000, "protocol": "TCP",
        }  # fmt: skip


@pytest.mark.parametrize("spec", ["", VLLM_ROUTER])
def test_without_prefill_it_routes_plainly(spec: str) -> None:
    args = router_pod(manifest(spec, prefill=None))["containers"][0]["args"]
    assert "app.kubernetes.io/component=decode" in flag_values(args, "--selector")
    assert not [word for word in args if "prefill" in word]


def test_it_may_read_pods_of_its_namespace_and_nothing_else() -> None:
    result = rendered(manifest())
    role = one(result, "Role", "demo-router")
    assert role["rules"] == [
        {"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}
    ]
    binding = one(result, "RoleBinding", "demo-router")
    assert binding["roleRef"]["name"] == "demo-router"
    account = one(result, "ServiceAccount", "demo-router")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
    ]
    assert router_pod(manifest())["serviceAccountName"] == account["name"]


def test_it_ends_by_itself_before_it_is_killed() -> None:
    assert router_pod(manifest())["terminationGracePeriodSeconds"] > PRE_STOP_S + SHUTDOWN_GRACE_S


def test_it_stays_in_its_service_when_no_engine_is_healthy() -> None:
    """Its own 503 is an answer; a Service without endpoints is a refused connection."""
    container = router_pod(manifest())["containers"][0]
    assert container["startupProbe"]["httpGet"]["path"] == "/readiness"
    assert container["readinessProbe"]["httpGet"]["path"] == "/liveness"
    assert container["livenessProbe"]["httpGet"]["path"] == "/liveness"
    slow = manifest("  engine: {startupTimeoutSeconds: 3600}\n")
    startup = router_pod(slow)["containers"][0]["startupProbe"]
    assert startup["failureThreshold"] * startup["periodSeconds"] > 3600


def test_keys_come_from_secrets() -> None:
    def env(spec: str) -> dict[str, Any]:
        return {v["name"]: v for v in router_pod(manifest(spec))["containers"][0]["env"]}

    key = "  engine: {apiKeySecretRef: {name: keys, key: k}}\n"
    smg = env(key)
    assert smg[CONTROL_KEY_ENV]["valueFrom"]["secretKeyRef"] == {
        "name": "demo-router-key", "key": "control-plane-key",
    }  # fmt: skip
    assert smg["LARDER_ENGINE_KEY"]["valueFrom"]["secretKeyRef"] == {"name": "keys", "key": "k"}
    assert "LARDER_ENGINE_KEY" not in env("")
    other = env(key + VLLM_ROUTER)
    assert "OPENAI_API_KEY" in other
    assert CONTROL_KEY_ENV not in other
    with pytest.raises(AssertionError, match="0 times"):
        one(rendered(manifest(VLLM_ROUTER)), "Secret", "demo-router-key")


def test_replicas_that_nobody_wrote_are_left_out_or_handed_over() -> None:
    def replicas(spec: str, live: dict[str, int]) -> Any:
        refs = dataclasses.replace(REFS, live_replicas=live)
        deployment = one(rendered(manifest(spec), refs), "Deployment", "demo-router")
        return deployment["spec"].get("replicas")

    assert replicas("", {}) is None
    assert replicas("", {Component.ROUTER: 4}) == 4
    assert replicas("  router: {replicas: 2}\n", {Component.ROUTER: 4}) == 2


def test_each_type_has_its_image() -> None:
    assert router_pod(manifest())["containers"][0]["image"] == SETTINGS.images.router_smg
    other = router_pod(manifest(VLLM_ROUTER))["containers"][0]
    assert other["image"] == SETTINGS.images.router_vllm
    assert other["command"] == ["vllm-router"]


def test_smg_takes_every_flag() -> None:
    """The real parser of smg; it would end with 2 at a flag that it does not know."""
    if importlib.util.find_spec("smg") is None:
        pytest.skip("smg is not installed: pip install smg")
    check = (
        "import sys\nfrom smg.router_args import RouterArgs\nimport argparse\n"
        "parser = argparse.ArgumentParser()\nRouterArgs.add_cli_args(parser)\nparser.parse_args(sys.argv[1:])\n"
    )
    for parsed in (manifest(), manifest(prefill=None)):
        args = router_pod(parsed)["containers"][0]["args"]
        assert args[0] == "launch"
        ended = subprocess.run(
            [sys.executable, "-c", check, *args[1:]], capture_output=True, text=True, check=False
        )
        assert ended.returncode == 0, ended.stderr
