"""Everything that a KVCache becomes: as it was agreed, valid for Kubernetes, harmless, and the same each time."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from cacheoperator import kinds, names
from cacheoperator.objects import pods
from cacheoperator.render import APPLY_ORDER
from operator_world import (
    EXAMPLES,
    GOLDENS,
    REFS,
    SETTINGS,
    STREAM_REFS,
    golden_text,
    manifest,
    one,
    pod_templates,
    rendered,
)

from cacheservice.manifest import KVCacheManifest, load_manifest

WORLDS: dict[str, KVCacheManifest] = {
    **{example.stem: load_manifest(example) for example in EXAMPLES},
    "aggregated": manifest(prefill=None),
    "no router": manifest("  router: {type: None}\n"),
    "other router": manifest(
        "  router: {type: VLLMRouter}\n  engine: {apiKeySecretRef: {name: k}}\n"
    ),
    "plain": manifest("  tls: {mode: 'Off'}\n  redis: {external: {address: 'r:6379'}}\n"),
    "external": manifest(
        "  redis: {external: {address: 'r:6379', credentialsSecretRef: {name: c},"
        " tls: {serverName: s, caSecretRef: {name: ca, key: k}, clientSecretRef: {name: cc}}}}\n"
        "  podMonitor: {labels: {release: prom}}\n"
    ),
    "stream": manifest("  cache: {transport: Stream}\n"),
}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_examples_become_what_was_agreed(example: Path) -> None:
    """After a change that is meant: `python tests/operator_world.py`, and read the difference."""
    assert (GOLDENS / example.name).read_text() == golden_text(example)


def test_there_is_no_golden_file_without_example() -> None:
    assert {path.name for path in GOLDENS.iterdir()} == {path.name for path in EXAMPLES}


@pytest.mark.parametrize("world", WORLDS)
def test_kubernetes_takes_every_field(world: str) -> None:
    for item in rendered(WORLDS[world]).objects:
        if item["kind"] != "PodMonitor":
            kubernetes_validate.validate(item, "1.35", strict=True)


@pytest.mark.parametrize("world", WORLDS)
def test_every_object_belongs_to_its_kvcache_and_says_so(world: str) -> None:
    parsed = WORLDS[world]
    result = rendered(parsed)
    assert not result.refusals
    seen = set()
    known = {kind.kind for kind in kinds.watched_children} | {"Secret", "PodMonitor"}
    for item in result.objects:
        metadata = item["metadata"]
        assert metadata["ownerReferences"] == [names.owner_reference(parsed.name, REFS.uid)]
        assert metadata["namespace"] == parsed.namespace
        assert metadata["labels"][names.INSTANCE_LABEL] == parsed.name
        assert metadata["labels"][names.MANAGED_BY_LABEL] == names.MANAGED_BY
        assert len(metadata["name"]) <= 63
        assert item["kind"] in known, "a kind that the operator does not watch is never repaired"
        assert (item["kind"], metadata["name"]) not in seen
        seen.add((item["kind"], metadata["name"]))


@pytest.mark.parametrize("world", WORLDS)
def test_what_pods_need_is_applied_before_them(world: str) -> None:
    order = [APPLY_ORDER.index(item["kind"]) for item in rendered(WORLDS[world]).objects]
    assert order == sorted(order)


@pytest.mark.parametrize("world", WORLDS)
def test_no_two_objects_share_a_part(world: str) -> None:
    """Who changes one of them, as the one that fills in a resourceVersion, would change the other."""
    seen: dict[int, str] = {}
    for item in rendered(WORLDS[world]).objects:
        title = f"{item['kind']} {item['metadata']['name']}"
        for part in _containers_in(item):
            assert seen.setdefault(id(part), title) == title
        json.dumps(item)


def _containers_in(value: Any) -> Iterator[Any]:
    if isinstance(value, dict | list):
        yield value
        for item in value.values() if isinstance(value, dict) else value:
            yield from _containers_in(item)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("refs", [REFS, STREAM_REFS], ids=["shared", "stream"])
def test_no_pod_gets_more_than_it_needs(world: str, refs: Any) -> None:
    """Pod Security `restricted`, but for the socket folder of shared memory and the container that prepares it."""
    parsed = WORLDS[world]
    for template in pod_templates(rendered(parsed, refs)):
        spec = template["spec"]
        assert not {"hostIPC", "hostNetwork", "hostPID"} & spec.keys()
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        is_router = template["metadata"]["labels"][names.COMPONENT_LABEL] == "router"
        assert spec.get("automountServiceAccountToken", True) is is_router
        assert len(spec.get("imagePullSecrets", [])) == len(parsed.image_pull_secrets)
        paths = [v["hostPath"]["path"] for v in spec["volumes"] if "hostPath" in v]
        folder = f"/run/larder/{parsed.namespace}/{parsed.name}"
        assert paths in ([], [folder])
        may_share = refs is REFS and parsed.cache.transport != "Stream"
        assert may_share or not paths
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            security = {**spec["securityContext"], **container["securityContext"]}
            assert security["allowPrivilegeEscalation"] is False
            assert security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
            assert all("subPath" not in mount for mount in container.get("volumeMounts", []))
            if container["name"] == "socket-dir":
                assert paths
                assert security["capabilities"]["add"] == ["CHOWN"]
            else:
                assert "add" not in security["capabilities"]
                assert security["runAsNonRoot"] is True
                assert security.get("runAsUser") != 0
            assert "privileged" not in security


@pytest.mark.parametrize("world", WORLDS)
def test_no_secret_value_is_outside_of_secrets(world: str) -> None:
    secrets = (REFS.redis_password, REFS.router_key, "a key")
    for item in rendered(WORLDS[world]).objects:
        if item["kind"] != "Secret":
            text = json.dumps(item)
            assert not [value for value in secrets if f'"{value}' in text or f" {value}" in text]


def test_no_secret_is_made_that_no_pod_reads() -> None:
    made: set[str] = set()
    pods_text = ""
    for refs in (REFS, STREAM_REFS):
        result = rendered(manifest(), refs)
        made |= {o["metadata"]["name"] for o in result.objects if o["kind"] == "Secret"}
        pods_text += json.dumps(list(pod_templates(result)))
    assert {name for name in made if f'"{name}"' not in pods_text} == {names.authority_name("demo")}
    assert len(made) == 5


@pytest.mark.parametrize("world", WORLDS)
def test_another_operator_changes_no_pod(world: str) -> None:
    newer = dataclasses.replace(
        SETTINGS, operator_version="2.0.0", operator_namespace="elsewhere", operator_name="other",
        certificate_lifetime_s=1, secret_refresh_s=1, resync_s=1.0, num_workers=1, http_port=1,
        cluster_domain="other.local", watch_namespaces=("a",),
    )  # fmt: skip
    before = rendered(WORLDS[world])
    after = rendered(WORLDS[world], settings=newer)
    assert list(pod_templates(before)) == list(pod_templates(after))


@pytest.mark.parametrize("world", WORLDS)
def test_rendering_twice_gives_the_same_bytes(world: str) -> None:
    texts = {json.dumps(rendered(WORLDS[world]).objects) for _ in range(2)}
    assert len(texts) == 1


def test_selectors_find_their_own_pods_and_no_others() -> None:
    templates = {
        t["metadata"]["labels"][names.COMPONENT_LABEL]: t["metadata"]["labels"]
        for t in pod_templates(rendered(manifest()))
    }
    assert set(templates) == {"redis", "cache", "prefill", "decode", "router"}
    for item in rendered(manifest()).objects:
        component = item["metadata"]["labels"].get(names.COMPONENT_LABEL)
        selector = item["spec"].get("selector") if "spec" in item else None
        if item["kind"] == "NetworkPolicy":
            selector = item["spec"]["podSelector"]
        if selector is None:
            continue
        wanted = selector.get("matchLabels", selector)
        found = {role for role, labels in templates.items() if wanted.items() <= labels.items()}
        assert found == {component or "router"}, item["metadata"]["name"]


def test_a_refused_template_leaves_out_its_own_objects_alone() -> None:
    bad = "{template: {spec: {containers: [{args: [x]}]}}}"
    result = rendered(manifest(prefill=bad))
    assert [reason for reason, _ in result.refusals] == ["InvalidTemplate"]
    assert "spec.prefill.template" in result.refusals[0][1]
    kept = {
        item["metadata"]["name"]
        for item in result.objects
        if item["kind"] in ("Deployment", "DaemonSet", "StatefulSet")
    }
    assert kept == {"demo-redis", "demo-cache", "demo-decode", "demo-router"}


@pytest.mark.parametrize(
    ("spec", "where"),
    [
        ("  cache: {template: {spec: {containers: [{name: agent, args: [--cpu, 1Gi]}]}}}\n", "spec.cache.template"),
        ("  cache: {template: {metadata: {labels: {app.kubernetes.io/instance: x}}}}\n", "spec.cache.template"),
        ("  redis: {embedded: {template: {spec: {volumes: [{emptyDir: {}}]}}}}\n", "spec.redis.embedded.template"),
        ("  router: {template: {spec: {containers: {}}}}\n", "spec.router.template"),
    ],
)  # fmt: skip
def test_each_template_of_ours_can_be_refused(spec: str, where: str) -> None:
    (refusal,) = rendered(manifest(spec)).refusals
    assert refusal[0] == "InvalidTemplate"
    assert refusal[1].startswith(where)


def test_templates_reach_their_pods() -> None:
    overlay = "template: {metadata: {annotations: {a: b}}, spec: {priorityClassName: high}}"
    spec = (
        f"  cache: {{{overlay}}}\n  router: {{{overlay}}}\n  redis: {{embedded: {{{overlay}}}}}\n"
    )
    result = rendered(manifest(spec, prefill=f"{{{overlay}}}", decode=f"{{{overlay}}}"))
    assert not result.refusals
    for template in pod_templates(result):
        assert template["spec"]["priorityClassName"] == "high"
        assert template["metadata"]["annotations"]["a"] == "b"


def test_every_pod_takes_the_pull_policy_and_its_own_image() -> None:
    always = dataclasses.replace(SETTINGS, image_pull_policy="Always")
    own = (
        "  cache: {image: mine/agent:1}\n  router: {image: mine/router:1}\n"
        "  redis: {embedded: {image: mine/redis:1}}\n"
    )
    images = set()
    for template in pod_templates(rendered(manifest(own), settings=always)):
        spec = template["spec"]
        for container in [*spec["containers"], *spec.get("initContainers", [])]:
            assert container["imagePullPolicy"] == "Always"
            images.add(container["image"])
    assert {"mine/agent:1", "mine/router:1", "mine/redis:1"} < images
    assert not images & {SETTINGS.images.agent, SETTINGS.images.redis, SETTINGS.images.router_smg}


def test_a_cache_alone_has_no_router_and_no_endpoint() -> None:
    result = rendered(manifest("  cache: {nodeSelector: {a: b}}\n", prefill=None, decode=None))
    found = {item["metadata"]["name"] for item in result.objects}
    assert {"demo-cache", "demo-redis", "demo-connection"} < found
    assert not found & {"demo", "demo-router", "demo-prefill", "demo-decode"}


def test_the_endpoint_leads_to_the_router_or_to_decode() -> None:
    def selected(spec: str) -> str:
        service = one(rendered(manifest(spec)), "Service", "demo")
        return str(service["spec"]["selector"][names.COMPONENT_LABEL])

    assert selected("") == "router"
    assert selected("  router: {type: None}\n") == "decode"
    service = one(
        rendered(manifest("  service: {type: NodePort, annotations: {a: b}}\n")), "Service", "demo"
    )
    assert service["spec"]["type"] == "NodePort"
    assert service["metadata"]["annotations"] == {"a": "b"}


def test_monitors_come_only_when_asked_for_and_known() -> None:
    spec = "  podMonitor: {labels: {release: prom, app.kubernetes.io/instance: stolen}}\n"
    monitors = [o for o in rendered(manifest(spec)).objects if o["kind"] == "PodMonitor"]
    assert [m["metadata"]["name"] for m in monitors] == ["demo", "demo-router"]
    assert monitors[0]["metadata"]["labels"]["release"] == "prom"
    assert monitors[0]["metadata"]["labels"][names.INSTANCE_LABEL] == "demo"
    ports = {
        (m["spec"]["podMetricsEndpoints"][0]["port"]) for m in monitors
    }  # named as in the pods
    named = {
        port["name"]
        for template in pod_templates(rendered(manifest(spec)))
        for port in template["spec"]["containers"][0].get("ports", [])
    }
    assert ports <= named
    unknown = dataclasses.replace(REFS, pod_monitor_known=False)
    for parsed, refs in ((manifest(spec), unknown), (manifest(), REFS)):
        assert not [o for o in rendered(parsed, refs).objects if o["kind"] == "PodMonitor"]


def test_budgets_are_for_pods_that_a_drain_evicts() -> None:
    budgets = {
        o["metadata"]["name"]: o["spec"]["maxUnavailable"]
        for o in rendered(manifest()).objects
        if o["kind"] == "PodDisruptionBudget"
    }
    assert budgets == {"demo-prefill": 1, "demo-decode": 1, "demo-router": 1}


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(1, "1Mi"), (1 << 20, "1Mi"), ((1 << 20) + 1, "2Mi"), (1 << 30, "1Gi"), (1536 << 20, "1536Mi")],
)  # fmt: skip
def test_quantities_are_written_as_the_api_server_writes_them(num_bytes: int, text: str) -> None:
    assert pods.quantity(num_bytes) == text
