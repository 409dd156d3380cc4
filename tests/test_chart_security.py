"""docs/security.md says what is: its tables against what `render` and the chart make. And kinds against permissions."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cacheoperator import names
from cacheoperator.install_check import NEEDED
from cacheoperator.kinds import child_kinds, kind_of, watched_children
from cacheoperator.objects import connection
from cacheoperator.probe import Question, probe_pod
from cacheoperator.refs import KeyPair, Refs, SharedMemoryVerdict, TlsMaterial
from cacheoperator.render import render
from cacheoperator.settings import Images, Settings

from cacheservice.manifest import KVCacheManifest, load_manifest, parse_manifest

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "security.md").read_text()
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
SETTINGS = Settings(
    operator_version="1.2.3",
    images=Images(**{f.name: f"registry/{f.name}:1" for f in dataclasses.fields(Images)}),
)

Object = dict[str, Any]

WHOLE = """
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {name: demo, namespace: team}
spec:
  model: {name: m}
  prefill: {}
  decode: {}
  podMonitor: {}
"""


def _manifest(more: str = "") -> KVCacheManifest:
    return parse_manifest(WHOLE + more, source="test")


def _refs(*, shared_memory: bool = True) -> Refs:
    pair = KeyPair("certificate", "key")
    return Refs(
        uid="0a1b2c3d-0000-4000-8000-000000000000",
        generation=1,
        shared_memory=SharedMemoryVerdict(shared_memory, "said by the test"),
        pod_monitor_known=True,
        redis_password="p",
        router_key="k",
        tls=TlsMaterial({"key": "a"}, "bundle", dict.fromkeys(("agent", "engine"), pair)),
    )


def _objects(manifest: KVCacheManifest, *, shared_memory: bool = True) -> tuple[Object, ...]:
    rendered = render(manifest, _refs(shared_memory=shared_memory), SETTINGS)
    assert rendered.refusals == ()
    return rendered.objects


def _rows(heading: str) -> list[dict[str, str]]:
    """The first table after `heading`, by column."""
    lines = iter(PAGE.split(heading, 1)[1].splitlines())
    table = list(_first_table(lines))
    columns = [cell.strip() for cell in table[0].strip("|").split("|")]
    return [
        dict(zip(columns, (cell.strip() for cell in row.strip("|").split("|")), strict=True))
        for row in table[2:]
    ]


def _first_table(lines: Iterator[str]) -> Iterator[str]:
    began = False
    for line in lines:
        if line.startswith("|"):
            began = True
            yield line
        elif began:
            return


def _word(cell: str) -> str:
    found = re.search(r"`([^`]+)`", cell)
    assert found is not None, cell
    return found[1]


def _named(cell: str) -> list[str]:
    """Names of the KVCache `demo` in the namespace `team`."""
    if cell == "none":
        return []
    names_there = cell.replace("NAMESPACE", "team").replace("NAME", "demo")
    return [part.strip() for part in names_there.split(",")]


def _pods(objects: tuple[Object, ...]) -> dict[str, Object]:
    return {
        o["metadata"]["name"]: o["spec"]["template"]["spec"]
        for o in objects
        if "template" in o.get("spec", {})
    }


def _containers(pod: Object) -> list[tuple[Object, bool]]:
    return [
        *((c, True) for c in pod.get("initContainers", [])),
        *((c, False) for c in pod["containers"]),
    ]


def _operator_pod() -> Object:
    """The chart's Deployment as far as it needs no helm: what docs say of the operator."""
    text = (ROOT / "charts/larder/templates/deployment.yaml").read_text()
    values = yaml.safe_load((ROOT / "charts/larder/values.yaml").read_text())
    ports = re.findall(r"\{name: (\w+), containerPort: (\d+)", text)
    return {"ports": {int(port) for _, port in ports}, "uid": values["operator"]["runAsUser"]}


@pytest.fixture(scope="module")
def whole() -> tuple[Object, ...]:
    return _objects(_manifest())


def test_page_lists_every_port_that_is_open(whole: tuple[Object, ...]) -> None:
    said = {
        (pod, _word(row["container"]), int(row["port"]))
        for row in _rows("## On Kubernetes: what listens where")
        for pod in _named(row["pods"])
    }
    there = {
        (name, container["name"], port["containerPort"])
        for name, pod in _pods(whole).items()
        for container, _ in _containers(pod)
        for port in container.get("ports", [])
    }
    there |= {("larder-operator", "operator", port) for port in _operator_pod()["ports"]}
    assert said == there


def test_page_says_who_is_let_in(whole: tuple[Object, ...]) -> None:
    rows = _rows("## On Kubernetes: what listens where")
    said = {
        (pod, int(row["port"])): row["from"]
        for row in rows
        for pod in _named(row["pods"])
        if pod != "larder-operator"
    }
    words = {
        names.APP_NAME: lambda labels: {
            "cache": "agents", "prefill": "engines", "decode": "engines", "router": "router", "probe": "probe",
        }[labels["app.kubernetes.io/component"]],
        "larder-operator": lambda _: "operator",
        "prometheus": lambda _: "Prometheus",
    }  # fmt: skip
    seen = set()
    for policy in (o for o in whole if o["kind"] == "NetworkPolicy"):
        for rule in policy["spec"]["ingress"]:
            for port in rule["ports"]:
                key = (policy["metadata"]["name"], port["port"])
                seen.add(key)
                if "from" not in rule:
                    assert said[key] == "everybody", key
                for peer in rule.get("from", []):
                    labels = peer["podSelector"]["matchLabels"]
                    if "larder.dev/engine-of" in labels:
                        word = "larder.dev/engine-of"
                    else:
                        # The probe has no name, so that nothing takes it for a pod of a component.
                        name = labels.get("app.kubernetes.io/name", names.APP_NAME)
                        word = words[name](labels)
                    assert word in said[key], f"{key}: the page does not say {word}"
    assert seen == set(said)


@pytest.mark.parametrize("mode", ["Auto", "Off"])
def test_agents_speak_tls_unless_told_otherwise(mode: str) -> None:
    manifest = _manifest(f"  tls: {{mode: '{mode}'}}\n")
    (agent,) = _pods(_objects(manifest))["demo-cache"]["containers"]
    assert ("--insecure" in agent["args"]) == (mode == "Off")
    assert ("--tls-cert" in agent["args"]) == (mode == "Auto")


def test_page_says_what_each_container_may_do(whole: tuple[Object, ...]) -> None:
    said = {}
    for row in _rows("## What each pod may do"):
        for pod in _named(row["pods"]):
            said[pod, _word(row["container"]), "(init)" in row["container"]] = (
                int(row["user"]),
                _named(row["capabilities"]),
                sorted(_named(row["Secrets"])),
                _named(row["host paths"]),
                _named(row["API token"]),
            )
    there = {}
    for name, pod in _pods(whole).items():
        for container, is_init in _containers(pod):
            there[name, container["name"], is_init] = _abilities(pod, container)
    probe = _probe_pod()["spec"]
    there["demo-probe", "probe", False] = _abilities(probe, probe["containers"][0])
    there["larder-operator", "operator", False] = (
        _operator_pod()["uid"], [], [], [], ["larder-operator"],
    )  # fmt: skip
    assert said == there


def _abilities(
    pod: Object, container: Object
) -> tuple[int, list[str], list[str], list[str], list[str]]:
    security = {**pod["securityContext"], **container["securityContext"]}
    assert security["allowPrivilegeEscalation"] is False
    assert security["readOnlyRootFilesystem"] is True
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    assert security["capabilities"]["drop"] == ["ALL"]
    assert security.get("runAsNonRoot") is (security["runAsUser"] != 0)
    assert not security.get("privileged")
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
    mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
    assert not any("subPath" in mount for mount in container.get("volumeMounts", []))
    secrets, host_paths = set(), []
    for volume in pod.get("volumes", []):
        if volume["name"] not in mounted:
            continue
        if "secret" in volume:
            assert volume["secret"]["defaultMode"] == 0o440
            secrets.add(volume["secret"]["secretName"])
        if "hostPath" in volume:
            host_paths.append(volume["hostPath"]["path"])
    for variable in container.get("env", []):
        if "secretKeyRef" in variable.get("valueFrom", {}):
            secrets.add(variable["valueFrom"]["secretKeyRef"]["name"])
    account = [pod["serviceAccountName"]] if "serviceAccountName" in pod else []
    if not account:
        assert pod["automountServiceAccountToken"] is False
    capabilities = security["capabilities"].get("add", [])
    return security["runAsUser"], capabilities, sorted(secrets), host_paths, account


def _probe_pod() -> Object:
    manifest = _manifest("  engine: {apiKeySecretRef: {name: demo-api}}\n")
    question = Question(
        prefill="10.0.0.1:8000", decode="10.0.0.2:8000", model="m", num_tokens=513, salt="s"
    )
    return probe_pod(manifest, SETTINGS, _refs().uid, question)


def test_engines_let_the_probe_in(whole: tuple[Object, ...]) -> None:
    labels = _probe_pod()["metadata"]["labels"]
    for name in ("demo-prefill", "demo-decode"):
        (policy,) = [
            o for o in whole if (o["kind"], o["metadata"]["name"]) == ("NetworkPolicy", name)
        ]
        peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
        wanted = [peer["podSelector"]["matchLabels"] for peer in peers if "podSelector" in peer]
        assert any(selector.items() <= labels.items() for selector in wanted), name


def test_without_shared_memory_nothing_is_root_or_on_the_host() -> None:
    pods = _pods(_objects(_manifest(), shared_memory=False))
    for name, pod in pods.items():
        for container, _ in _containers(pod):
            uid, capabilities, secrets, host_paths, _ = _abilities(pod, container)
            assert (uid != 0, capabilities, host_paths) == (True, [], []), name
            if container["name"] == "vllm":
                assert secrets == ["demo-engine-tls"]


def test_page_lists_every_secret_that_is_made(whole: tuple[Object, ...]) -> None:
    rows = [row for row in _rows("## Secrets") if row["made by"] == "operator"]
    said = {_word(row["Secret"]).replace("NAME", "demo"): row["keys"] for row in rows}
    there = {o["metadata"]["name"]: o["data"] for o in whole if o["kind"] == "Secret"}
    assert set(said) == set(there)
    for name, data in there.items():
        if name != "demo-authority":
            assert set(re.findall(r"`([^`]+)`", said[name])) == set(data)


def test_page_lists_every_reference_to_a_secret_of_yours() -> None:
    said = PAGE.split("## Secrets", 1)[1].split("\n## ", 1)[0]
    crd = yaml.safe_load((ROOT / "charts/larder/files/kvcaches.yaml").read_text())
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]

    def references(node: Object, path: str) -> Iterator[str]:
        for name, child in node.get("properties", {}).items():
            if name.lower().endswith("secretref"):
                yield f"{path}.{name}"
            yield from references(child, f"{path}.{name}")

    found = list(references(spec, "spec"))
    assert len(found) >= 6
    for path in found:
        short = "." + path.rpartition(".")[2]
        assert f"`{path}`" in said or f"`{short}`" in said, path


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.parametrize("shared_memory", [True, False])
def test_every_kind_that_is_made_may_be_made(path: Path, *, shared_memory: bool) -> None:
    may = {(need.group, need.resource): set(need.verbs) for need in NEEDED}
    for item in _objects(load_manifest(path), shared_memory=shared_memory):
        kind = kind_of(item)
        assert kind in child_kinds
        wanted = {"get", "create", "patch"}
        if kind.kind != "Secret":
            wanted |= {"delete"}
        if kind in watched_children:
            wanted |= {"list", "watch"}
        assert may[kind.group, kind.plural] == wanted, kind.kind


def test_oldest_kubernetes_of_the_chart_knows_every_field() -> None:
    """Fields behind a gate that was closed then are in its schema too: Chart.yaml says which matters."""
    chart = yaml.safe_load((ROOT / "charts" / "larder" / "Chart.yaml").read_text())
    oldest = chart["kubeVersion"].removeprefix(">=").removesuffix(".0-0")
    checked = 0
    for name in ("byo-engines", "cpu-cluster", "production"):
        for item in _objects(load_manifest(ROOT / "examples" / f"{name}.yaml")):
            if not item["apiVersion"].startswith("monitoring.coreos.com/"):
                kubernetes_validate.validate(item, oldest, strict=True)
                checked += 1
    assert checked > 50


def test_every_kind_that_may_be_made_is_made_for_some_example() -> None:
    made = {kind_of(item) for path in EXAMPLES for item in _objects(load_manifest(path))}
    assert made == set(child_kinds)
    # Beside them it makes pods (dry runs, the probe), events and its lease.
    others = {
        need.resource
        for need in NEEDED
        if "create" in need.verbs
        and (need.group, need.resource) not in {(kind.group, kind.plural) for kind in made}
    }
    assert others == {"pods", "events", "leases"}


def test_page_lists_every_verb_of_the_operator() -> None:
    there: dict[str, set[str]] = {}
    for need in NEEDED:
        there.setdefault(need.resource, set()).update(need.verbs)
    said = {
        resource: set(row["verbs"].split(", "))
        for row in _rows("## What the operator may do")
        for resource in re.findall(r"`([^`]+)`", row["resources"])
    }
    assert said == there


def test_routers_role_gives_no_more_than_the_operator_has(whole: tuple[Object, ...]) -> None:
    """Else the API server refuses the Role: nobody may give what he has not."""
    may = {(n.group, n.resource, verb) for n in NEEDED for verb in n.verbs}
    (role,) = [o for o in whole if o["kind"] == "Role"]
    for rule in role["rules"]:
        for group in rule["apiGroups"]:
            for resource in rule["resources"]:
                assert {(group, resource, verb) for verb in rule["verbs"]} <= may


def test_label_that_lets_foreign_engines_in_is_the_one_on_the_page() -> None:
    assert f"`{connection.ENGINE_OF_LABEL}: NAME`" in PAGE
