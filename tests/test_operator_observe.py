"""From API objects to observed values, and the window of flows."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from cacheoperator import observe, statusz
from cacheoperator.observed import AgentReport, Flow

NOW = datetime(2026, 11, 22, 1, 0, tzinfo=UTC)
BEGIN = "2026-11-22T00:00:00Z"
Json = dict[str, Any]


def pod(**status: Any) -> Json:
    return {
        "metadata": {
            "name": "demo-decode-1",
            "uid": "u",
            "creationTimestamp": BEGIN,
            "labels": {"app.kubernetes.io/component": "decode", "pod-template-hash": "abc"},
        },
        "spec": {
            "nodeName": "gpu-1",
            "initContainers": [{"name": "larder-payload", "image": "p:1"}],
            "containers": [
                {
                    "name": "vllm",
                    "image": "e:1",
                    "resources": {"limits": {"memory": "2Gi", "nvidia.com/gpu": "2", "hugepages-2Mi": "4Mi"}},
                }
            ],
        },
        "status": status,
    }  # fmt: skip


def test_a_running_pod() -> None:
    seen = observe.pod_seen(
        pod(
            phase="Running",
            podIP="10.0.0.1",
            conditions=[{"type": "Ready", "status": "True", "lastTransitionTime": BEGIN}],
            containerStatuses=[
                {"name": "vllm", "ready": True, "restartCount": 2, "state": {"running": {"startedAt": BEGIN}}}
            ],
        )
    )  # fmt: skip
    assert (seen.component, seen.node, seen.ip, seen.template_hash) == (
        "decode",
        "gpu-1",
        "10.0.0.1",
        "abc",
    )
    assert seen.is_ready
    assert seen.ready_since == NOW - timedelta(hours=1)
    assert seen.gpu_request == 2
    payload, engine = seen.containers
    assert (payload.name, payload.is_init, engine.is_init) == ("larder-payload", True, False)
    assert (engine.restarts, engine.memory_limit_bytes) == (2, 2 << 30)
    assert engine.running_since == NOW - timedelta(hours=1)


def test_a_pod_that_waits_after_it_was_killed() -> None:
    seen = observe.pod_seen(
        pod(
            phase="Running",
            containerStatuses=[
                {
                    "name": "vllm",
                    "ready": False,
                    "restartCount": 1,
                    "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off"}},
                    "lastState": {
                        "terminated": {
                            "reason": "OOMKilled", "exitCode": 137, "message": "m", "startedAt": BEGIN,
                            "finishedAt": "2026-11-22T00:30:00.25Z",
                        }
                    },
                }
            ],
        )
    )  # fmt: skip
    engine = seen.containers[1]
    assert (engine.waiting_reason, engine.ended_reason, engine.ended_exit_code) == (
        "CrashLoopBackOff",
        "OOMKilled",
        137,
    )
    assert engine.ended_started_at == NOW - timedelta(hours=1)
    assert engine.ended_at is not None
    assert engine.ended_at > engine.ended_started_at


def test_a_pod_without_a_place_and_one_that_was_evicted() -> None:
    waiting = observe.pod_seen(
        pod(
            phase="Pending",
            conditions=[{"type": "PodScheduled", "status": "False", "message": "0/2 nodes"}],
        )
    )
    assert waiting.unschedulable == "0/2 nodes"
    evicted = observe.pod_seen(pod(phase="Failed", reason="Evicted", message="low on memory"))
    assert evicted.failed == "Evicted: low on memory"


def workload(kind: str, spec: Json, status: Json) -> Json:
    labels = {"app.kubernetes.io/component": "cache"}
    return {
        "kind": kind,
        "metadata": {"name": "demo-cache", "uid": "w", "generation": 4, "labels": labels},
        "spec": spec,
        "status": {"observedGeneration": 3, **status},
    }


def test_a_daemon_set_wants_what_its_controller_says_and_a_deployment_what_it_says_itself() -> None:
    numbers = {
        "desiredNumberScheduled": 3,
        "numberReady": 2,
        "updatedNumberScheduled": 1,
        "numberAvailable": 2,
    }
    agents = observe.workload_seen(workload("DaemonSet", {}, numbers), None)
    assert (agents.wanted, agents.ready, agents.updated, agents.available) == (3, 2, 1, 2)
    assert (agents.generation, agents.observed_generation) == (4, 3)
    conditions = [
        {"type": "Available", "status": "False", "message": "minimum"},
        {"type": "Progressing", "status": "True", "message": "fine"},
        {"type": "ReplicaFailure", "status": "True", "message": "exceeded quota"},
    ]
    engine = observe.workload_seen(
        workload("Deployment", {"replicas": 0}, {"conditions": conditions}), None
    )
    assert (engine.wanted, engine.ready) == (0, 0)
    assert engine.condition_messages == {"Available": "minimum", "ReplicaFailure": "exceeded quota"}
    assert observe.workload_seen(workload("Deployment", {}, {}), None).wanted == 1


def test_the_newest_revision_is_the_one_with_the_highest_number() -> None:
    def replica_set(name: str, number: str, owner: str = "w") -> Json:
        return {
            "metadata": {
                "name": name,
                "creationTimestamp": BEGIN,
                "labels": {"pod-template-hash": name[-1]},
                "annotations": {"deployment.kubernetes.io/revision": number},
                "ownerReferences": [{"uid": owner}],
            }
        }

    found = [
        replica_set("x-a", "9"),
        replica_set("x-b", "10"),
        replica_set("x-c", "11", owner="other"),
    ]
    newest = observe.newest_revision(workload("Deployment", {}, {}), found)
    assert newest is not None
    assert newest.template_hash == "b"
    assert observe.newest_revision(workload("Deployment", {}, {}), []) is None
    revision = {
        "revision": 2,
        "metadata": {
            "name": "demo-redis-77",
            "creationTimestamp": BEGIN,
            "ownerReferences": [{"uid": "w"}],
        },
    }
    newest = observe.newest_revision(workload("StatefulSet", {}, {}), [revision])
    assert newest is not None
    assert newest.template_hash == "demo-redis-77", "pods of a StatefulSet carry the whole name"


def event(name: str, reason: str, at: str, **more: Any) -> Json:
    return {
        "metadata": {"creationTimestamp": BEGIN},
        "involvedObject": {"kind": "Pod", "name": name},
        "reason": reason,
        "message": f"{reason} of {name}",
        "firstTimestamp": BEGIN,
        "lastTimestamp": at,
        **more,
    }


def test_warnings_are_ours_recent_and_newest_first() -> None:
    objects = {("pod", "demo-decode-1"): "decode"}
    events = [
        event("demo-decode-1", "FailedMount", "2026-11-22T00:50:00Z"),
        event("demo-decode-1", "Unhealthy", "2026-11-22T00:55:00Z"),
        event("demo-decode-1", "Old", "2026-11-22T00:10:00Z"),
        event("another", "FailedMount", "2026-11-22T00:55:00Z"),
        event(
            "demo-decode-1",
            "Repeated",
            "2026-11-22T00:10:00Z",
            series={"lastObservedTime": "2026-11-22T00:59:00.5Z"},
        ),
    ]
    found = observe.warnings_seen(events, objects, since=NOW - timedelta(minutes=15))
    assert [warning.reason for warning in found] == ["Repeated", "Unhealthy", "FailedMount"]
    assert (found[0].object, found[0].component) == ("pod/demo-decode-1", "decode")
    pods = observe.with_problems([observe.pod_seen(pod(phase="Pending"))], found)
    assert pods[0].supplemental_problem == "FailedMount: FailedMount of demo-decode-1"


# The window


def report(
    loaded: int, *, epoch: int = 1, committed: int = 0, looked_up: int = 0, elsewhere: int = 0
) -> AgentReport:
    flows = (
        Flow("ns", "prefill", "decode", committed, looked_up, loaded),
        Flow("ns", "prefill", "prefill", committed, 7, 7),
        Flow("ns", "elsewhere", "decode", 0, elsewhere, 0),
    )
    return AgentReport("agent-1", "node-1", epoch=epoch, flows=flows)


def test_the_window_counts_growth_and_forgets_after_ten_minutes() -> None:
    window = observe.FlowWindow()
    assert window.add([report(5, committed=50)], NOW).loaded == 0, (
        "what was before is not of this window"
    )
    later = window.add(
        [report(8, committed=60, looked_up=4, elsewhere=3)], NOW + timedelta(minutes=1)
    )
    assert (later.committed, later.looked_up, later.loaded) == (10, 7, 3)
    assert later.since == NOW
    much_later = window.add(
        [report(8, committed=60, looked_up=4, elsewhere=3)], NOW + timedelta(minutes=12)
    )
    assert (much_later.committed, much_later.looked_up, much_later.loaded) == (0, 0, 0)
    assert much_later.since == NOW + timedelta(minutes=2)


def test_an_agent_that_starts_anew_counts_from_zero() -> None:
    window = observe.FlowWindow()
    window.add([report(100)], NOW)
    assert window.add([report(2, epoch=2)], NOW + timedelta(seconds=5)).loaded == 2
    assert window.add([report(1, epoch=2)], NOW + timedelta(seconds=9)).loaded == 3, (
        "a fall is a start, too"
    )


def test_reports_that_failed_count_nothing() -> None:
    window = observe.FlowWindow()
    window.add([report(1)], NOW)
    assert window.add([AgentReport("agent-1", "node-1", problem="away")], NOW).loaded == 0
    assert window.add([report(4)], NOW).loaded == 3


# /statusz


def test_a_report_is_read_and_nonsense_is_refused() -> None:
    answer = {
        "node": "n", "epoch": 7, "version": "1", "protocol": 2, "draining": True, "arena_bytes": 9, "used_bytes": 3,
        "index": {"health": "unreachable", "reason": "AuthFailed", "message": "no"},
        "sessions": [{"engine": "e", "role": "decode", "half": "worker", "rank": 0, "transport": "Stream",
                      "namespace": "ab", "larder_version": "1", "vllm_version": "2", "protocol": 2}],
        "namespaces": [{"digest": "ab", "facts": {"model": "m"}, "tokens_per_chunk": 256, "bytes_per_token": 8}],
        "flows": [{"namespace": "ab", "writer_role": "prefill", "reader_role": "decode", "committed": 1, "looked_up": 2,
                   "loaded": 3}],
        "refused_hellos": ["engine e speaks protocol 9"],
    }  # fmt: skip
    read = statusz.parse_report("agent-1", "", answer)
    assert (read.node, read.epoch, read.is_draining, read.index_reason) == (
        "n",
        7,
        True,
        "AuthFailed",
    )
    assert read.sessions[0].transport == "Stream"
    assert read.namespaces[0].facts == {"model": "m"}
    assert read.flows[0].loaded == 3
    with pytest.raises((TypeError, ValueError, KeyError, AttributeError)):
        statusz.parse_report("agent-1", "", {"sessions": [3]})
