"""A KVCache as kubectl sees it, for tests of what is made of it: fixed JSON, cut from a real cluster."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from cacheservice.kubectl.agents import AgentAnswer
from cacheservice.kubectl.seen import Seen

ONE, OTHER = "3f9a01bc" + "0" * 56, "77d2e4aa" + "1" * 56
FACTS = {
    "model": "org/model@abc", "dtype": "bfloat16", "kv_cache_dtype": "auto", "salt": "sha256:0011",
    "groups": [{"kind": "full_attention", "block_tokens": 16}],
}  # fmt: skip


def labels(component: str) -> dict[str, str]:
    return {
        "app.kubernetes.io/name": "larder",
        "app.kubernetes.io/instance": "demo",
        "app.kubernetes.io/component": component,
    }


def condition(type_: str, status: str, reason: str, message: str = "") -> dict[str, Any]:
    return {
        "type": type_, "status": status, "reason": reason, "message": message or f"about {type_}",
        "lastTransitionTime": "2026-11-22T00:24:48Z", "observedGeneration": 2,
    }  # fmt: skip


def pod(name: str, component: str, **status: Any) -> dict[str, Any]:
    return {
        "metadata": {"name": name, "namespace": "team", "labels": labels(component)},
        "spec": {"nodeName": "node1", "containers": []},
        "status": {
            "phase": "Running", "conditions": [{"type": "Ready", "status": "True"}], "containerStatuses": [], **status
        },
    }  # fmt: skip


def workload(
    kind: str, name: str, component: str, *, ready: int, replicas: int = 1
) -> dict[str, Any]:
    return {
        "kind": kind, "metadata": {"name": name, "namespace": "team", "labels": labels(component)},
        "spec": {"replicas": replicas, "template": {"spec": {
            "initContainers": [{"name": "larder-payload", "image": "larder-payload:1"}],
            "containers": [{"name": "vllm", "image": "vllm:1"}],
        }}, "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}},
        "status": {"readyReplicas": ready},
    }  # fmt: skip


def session(engine: str, role: str, half: str = "scheduler", **more: Any) -> dict[str, Any]:
    return {
        "engine": engine, "role": role, "half": half, "rank": 0, "host": "node1", "transport": "SharedMemory",
        "namespace": ONE, "larder_version": "0.1.0", "vllm_version": "0.32.0", "protocol": 2, "age_s": 60.0,
        "asked_tokens": 0, "hit_tokens": 0, "outcomes": {}, "dropped_outcomes": 0, **more,
    }  # fmt: skip


def namespace(digest: str, **facts: Any) -> dict[str, Any]:
    return {
        "digest": digest, "facts": {**FACTS, **facts}, "tokens_per_chunk": 256, "bytes_per_token": 1024,
        "num_chunks": 3, "num_bytes": 1 << 20,
    }  # fmt: skip


def page(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = {
        "node": "node1", "node_number": 1, "epoch": 5, "version": "0.1.0", "protocol": 2, "uptime_s": 60.0,
        "draining": False, "eviction": "S3FIFO", "arena_bytes": 256 << 20, "used_bytes": 64 << 20, "num_chunks": 12,
        "num_shards": 24, "num_leases": 0, "num_sessions": 4, "index": {"health": "ready", "reason": "", "message": ""},
        "counters": {}, "namespaces": [namespace(ONE)], "flows": [], "refused_hellos": [],
        "sessions": [
            session("demo-prefill-a", "prefill", asked_tokens=1000, outcomes={"lookup.absent": 3, "lookup.hit": 1}),
            session("demo-prefill-a", "prefill", "worker", outcomes={"save.hit": 4}),
            session("demo-decode-a", "decode", asked_tokens=1000, hit_tokens=896, outcomes={"lookup.hit": 4}),
            session("demo-decode-a", "decode", "worker", outcomes={"load.hit": 3, "load.evicted": 1}),
        ],
    }  # fmt: skip
    return {**found, **changes}


def outcome(
    request: str, role: str, kind: str, reason: str, age_s: float, **more: Any
) -> dict[str, Any]:
    return {
        "age_s": age_s, "engine": f"demo-{role}-a", "role": role, "rank": 0, "kind": kind, "reason": reason,
        "request_id": request, "asked_tokens": 896, "served_tokens": 0, "duration_ms": 3, "num_bytes": 0,
        "namespace": ONE, **more,
    }  # fmt: skip


RESOURCE: dict[str, Any] = {
    "apiVersion": "larder.dev/v1alpha1", "kind": "KVCache",
    "metadata": {"name": "demo", "namespace": "team", "generation": 2, "uid": "u"},
    "spec": {"router": {"type": "SMG"}, "redis": {"embedded": {}}, "engine": {}},
    "status": {
        "observedGeneration": 2, "endpoint": "http://demo.team.svc:8000", "transport": "SharedMemory",
        "transportReason": "hostPath is allowed here", "model": {"chunkTokens": 256, "kvBytesPerToken": 1024},
        "versions": {"operator": "0.1.0", "agent": "0.1.0"}, "problems": [],
        "conditions": [
            condition("Ready", "True", "Ready"), condition("Accepted", "True", "Accepted"),
            condition("RedisReady", "True", "Ready"), condition("TransferVerified", "True", "Verified"),
        ],
    },
}  # fmt: skip


def seen(
    *, pages: Mapping[str, Any] | list[Any] | None = None, unread: tuple[str, ...] = (), **changes: Any
) -> Seen:  # fmt: skip
    """A KVCache that is well. `changes` replace parts of its status; `pages` are what its agents said, by pod."""
    resource = copy.deepcopy(RESOURCE)
    resource["status"].update(changes)
    said = {"demo-cache-a": page()} if pages is None else dict(pages)
    return Seen(
        resource,
        pods=(
            pod("demo-cache-a", "cache"), pod("demo-prefill-a", "prefill"), pod("demo-decode-a", "decode"),
            pod("demo-router-a", "router"),
        ),
        workloads=(
            workload("Deployment", "demo-prefill", "prefill", ready=1),
            workload("Deployment", "demo-decode", "decode", ready=1),
            workload("Deployment", "demo-router", "router", ready=1),
            workload("StatefulSet", "demo-redis", "redis", ready=1),
        ),
        agents=tuple(
            AgentAnswer(name, "node1", None if isinstance(one, str) else one, one if isinstance(one, str) else "")
            for name, one in said.items()
        ),
        unread=unread,
    )  # fmt: skip
