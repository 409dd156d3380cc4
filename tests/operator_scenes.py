"""Observations of a KVCache named demo in namespace serving: a healthy one, and ways to spoil it."""

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import jsonschema
from cacheoperator.names import KIND
from cacheoperator.observed import (
    AgentReport,
    Container,
    EngineSession,
    Flow,
    NamespaceView,
    NodeView,
    Observed,
    Pod,
    Workload,
)
from cacheoperator.status import CONDITIONS, ORDER

from cacheservice.manifest import KVCacheManifest, parse_manifest
from cacheservice.manifest.schema import root_schema

NOW = datetime(2026, 11, 21, 12, 4, 5, 678_000, tzinfo=UTC)
EARLIER = NOW - timedelta(hours=1)
GIB = 1 << 30
D1, D2 = "1a" * 32, "2b" * 32
IMAGE = "docker.io/vllm/vllm-openai:v0.23.0"
MINUTE = timedelta(minutes=1)

ENGINES_SPEC = """
model: {name: org/model, tokenSecretRef: {name: hf}}
prefill: {replicas: 1}
decode: {replicas: 2}
cache: {nodeSelector: {gpu: a100}}
"""


def manifest(spec: str = ENGINES_SPEC, more: str = "") -> KVCacheManifest:
    lines = "\n".join(f"  {line}" for line in (spec.strip("\n") + "\n" + more).splitlines())
    head = f"apiVersion: larder.dev/v1alpha1\nkind: {KIND}\nmetadata: {{name: demo, namespace: serving}}"
    return parse_manifest(f"{head}\nspec:\n{lines}\n", source="test")


EXTERNAL = "redis: {external: {address: 'valkey.infra.svc:6380', credentialsSecretRef: {name: kv}, tls: {}}}"
CONTAINERS = {
    "redis": "redis",
    "cache": "agent",
    "prefill": "vllm",
    "decode": "vllm",
    "router": "router",
}
KINDS = {"redis": "StatefulSet", "cache": "DaemonSet"}


def pod(component: str, name: str, node: str = "n1", **changes) -> Pod:
    made = Pod(
        component=component, name=name, uid=name, node=node, ip="10.0.0.1", phase="Running", is_ready=True,
        is_deleting=False, created_at=EARLIER, template_hash="new", ready_since=EARLIER + MINUTE,
        containers=(container(component),),
    )  # fmt: skip
    return replace(made, **changes)


def container(component: str, **changes) -> Container:
    made = Container(
        name=CONTAINERS[component],
        image=IMAGE if component in ("prefill", "decode") else f"larder/{component}:1",
        is_init=False,
        is_ready=True,
        restarts=0,
        running_since=EARLIER,
        memory_limit_bytes=9 * GIB,
    )
    return replace(made, **changes)


def workload(component: str, number: int, **changes) -> Workload:
    made = Workload(
        component=component, kind=KINDS.get(component, "Deployment"), name=f"demo-{component}", generation=2,
        observed_generation=2, wanted=number, ready=number, updated=number, available=number, changed_at=EARLIER,
        newest_template_hash="new",
    )  # fmt: skip
    return replace(made, **changes)


def sessions(
    engine: str, role: str, namespace: str = D1, transport: str = "SharedMemory"
) -> tuple[EngineSession, ...]:
    return tuple(
        EngineSession(
            engine=engine, role=role, half=half, rank=0, transport=transport, namespace=namespace,
            larder_version="0.1.0", vllm_version="0.23.0", protocol=2,
        )
        for half in ("scheduler", "worker")
    )  # fmt: skip


FACTS = {
    "vllm": "0.23", "model": {"name": "org/model", "files": "77"}, "dtype": "bfloat16", "kv_cache_dtype": "auto",
    "groups": [{"kind": "full", "block_tokens": 16, "layers": ["l0", "l1"]}],
}  # fmt: skip


def view(digest: str = D1, tokens_per_chunk: int = 256, **facts) -> NamespaceView:
    return NamespaceView(digest, {**FACTS, **facts}, tokens_per_chunk, 70_272)


def agent(node: str, engines: tuple[EngineSession, ...] = (), **changes) -> AgentReport:
    made = AgentReport(
        pod=f"demo-cache-{node}", node=node, epoch=7, version="0.1.0", protocol=2, index_health="ready",
        arena_bytes=8 * GIB, sessions=engines, namespaces=(view(),),
    )  # fmt: skip
    return replace(made, **changes)


READ = Flow(D1, "prefill", "decode", committed=30, looked_up=25, loaded=25)
UNREAD = replace(READ, loaded=0)


def healthy(**changes) -> Observed:
    """One prefill, two decode, two nodes, everything read."""
    made = Observed(
        now=NOW,
        generation=3,
        operator_version="0.1.0",
        workloads={
            "redis": workload("redis", 1),
            "cache": workload("cache", 2),
            "prefill": workload("prefill", 1),
            "decode": workload("decode", 2),
            "router": workload("router", 1),
        },
        pods=(
            pod("redis", "demo-redis-0"),
            pod("cache", "demo-cache-n1", "n1"),
            pod("cache", "demo-cache-n2", "n2"),
            pod("prefill", "demo-prefill-a", "n1"),
            pod("decode", "demo-decode-a", "n1"),
            pod("decode", "demo-decode-b", "n2"),
            pod("router", "demo-router-a"),
        ),
        nodes=(NodeView("n1", True, True, True), NodeView("n2", True, True, True)),
        agents=(
            agent("n1", (*sessions("demo-prefill-a", "prefill"), *sessions("demo-decode-a", "decode")), flows=(READ,)),
            agent("n2", sessions("demo-decode-b", "decode")),
        ),
        transport="SharedMemory",
        transport_reason="the namespace allows hostPath volumes",
    )  # fmt: skip
    return replace(made, **changes)


def with_pod(observed: Observed, name: str, **changes) -> Observed:
    assert any(found.name == name for found in observed.pods)
    return replace(
        observed,
        pods=tuple(replace(p, **changes) if p.name == name else p for p in observed.pods),
    )


def without_pods(observed: Observed, component: str) -> Observed:
    return replace(observed, pods=tuple(p for p in observed.pods if p.component != component))


def with_workload(observed: Observed, component: str, **changes) -> Observed:
    found = replace(observed.workloads[component], **changes)
    return replace(observed, workloads={**observed.workloads, component: found})


def with_agents(observed: Observed, **changes) -> Observed:
    return replace(observed, agents=tuple(replace(a, **changes) for a in observed.agents))


def broken_decode(container_changes: dict, pod_changes: dict | None = None) -> Observed:
    """demo-decode-b on n2 not ready, by its container."""
    shown = with_pod(
        healthy(), "demo-decode-b", is_ready=False, ready_since=None,
        containers=(container("decode", is_ready=False, **container_changes),), **(pod_changes or {}),
    )  # fmt: skip
    return with_workload(shown, "decode", ready=1, available=1)


def condition(found: dict, name: str) -> dict:
    return next(c for c in found["conditions"] if c["type"] == name)


def short(found: dict, name: str) -> tuple[str, str]:
    shown = condition(found, name)
    return shown["status"], shown["reason"]


SCHEMA = root_schema()["properties"]["status"]


def check_invariants(found: dict) -> None:
    """What holds for every status."""
    jsonschema.validate(found, {**SCHEMA, "additionalProperties": False})
    assert set(found) <= set(SCHEMA["properties"])
    assert tuple(c["type"] for c in found["conditions"]) == CONDITIONS
    assert all(c["observedGeneration"] == found["observedGeneration"] for c in found["conditions"])
    assert all(c["message"] for c in found["conditions"])
    assert len(found["problems"]) <= 8
    first = next(
        (condition(found, name) for name in ORDER if condition(found, name)["status"] != "True"),
        None,
    )
    ready = condition(found, "Ready")
    if ready["reason"] == "Paused":
        return
    if first is None:
        assert (ready["status"], ready["reason"]) == ("True", "Ready")
    else:
        assert all(ready[part] == first[part] for part in ("status", "reason", "message"))
    json.dumps(found)


def old_and_new(new_pod: dict, **changes) -> Observed:
    """decode-b is replaced by decode-c of the newest revision, which is not ready; decode-a is still of the old one."""
    shown = with_pod(healthy(), "demo-decode-a", template_hash="old")
    pods = (
        *(p for p in shown.pods if p.name != "demo-decode-b"),
        pod(
            "decode", "demo-decode-c", "n2", is_ready=False, ready_since=None,
            **{"containers": (container("decode", is_ready=False, running_since=NOW - MINUTE),), **new_pod},
        ),
    )  # fmt: skip
    return with_workload(
        replace(shown, pods=pods), "decode", ready=1, available=1, updated=1, **changes
    )
