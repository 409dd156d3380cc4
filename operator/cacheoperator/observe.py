"""From API objects to `observed`: one function per kind of object. No I/O of its own, no judgement.

`watch` calls `pod_seen` and `node_facts` as objects arrive, `reconcile` the others. What an object does not say is left
at its default; times are aware (UTC).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Any

from cacheoperator.difference import quantity
from cacheoperator.names import COMPONENT_LABEL, INSTANCE_LABEL
from cacheoperator.observed import (
    AgentReport,
    Container,
    NodeView,
    Pod,
    Warning,  # noqa: A004 - Kubernetes' word
    Window,
    Workload,
)

Json = Mapping[str, Any]

_hash_labels = ("pod-template-hash", "controller-revision-hash")
_pod_reasons = {"FailedMount", "FailedAttachVolume", "FailedCreatePodSandBox", "InspectFailed"}
"""Warnings of a pod that its status does not show."""
window_s = 600.0


def parse_time(text: object) -> datetime | None:
    """RFC 3339 as Kubernetes writes it, with or without microseconds; None for anything else."""
    if not isinstance(text, str) or not text:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        return None


def pod_seen(body: Json) -> Pod:
    """A pod with its containers."""
    metadata, spec, status = body["metadata"], body.get("spec") or {}, body.get("status") or {}
    labels = metadata.get("labels") or {}
    conditions = {found.get("type"): found for found in status.get("conditions") or ()}
    scheduled = conditions.get("PodScheduled") or {}
    ready = conditions.get("Ready") or {}
    is_ready = ready.get("status") == "True"
    containers = [
        _container(wanted, status.get(statuses) or (), is_init=is_init)
        for field, statuses, is_init in (
            ("initContainers", "initContainerStatuses", True),
            ("containers", "containerStatuses", False),
        )
        for wanted in spec.get(field) or ()
    ]
    failed = ""
    if status.get("phase") == "Failed":
        failed = ": ".join(str(status[part]) for part in ("reason", "message") if status.get(part))
    return Pod(
        component=str(labels.get(COMPONENT_LABEL, "")),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        node=str(spec.get("nodeName", "")),
        ip=str(status.get("podIP", "")),
        phase=str(status.get("phase", "")),
        is_ready=is_ready,
        is_deleting="deletionTimestamp" in metadata,
        created_at=_time(metadata.get("creationTimestamp")),
        template_hash=next((str(labels[name]) for name in _hash_labels if name in labels), ""),
        unschedulable=str(scheduled.get("message", ""))
        if scheduled.get("status") == "False"
        else "",
        ready_since=parse_time(ready.get("lastTransitionTime")) if is_ready else None,
        containers=tuple(containers),
        gpu_request=_gpus(spec),
        failed=failed,
    )


def _container(wanted: Json, statuses: Iterable[Json], *, is_init: bool) -> Container:
    status = next((found for found in statuses if found.get("name") == wanted["name"]), {})
    state = status.get("state") or {}
    waiting, running = state.get("waiting") or {}, state.get("running") or {}
    ended = state.get("terminated") or (status.get("lastState") or {}).get("terminated") or {}
    limit = quantity(((wanted.get("resources") or {}).get("limits") or {}).get("memory"))
    exit_code = ended.get("exitCode")
    return Container(
        name=str(wanted["name"]),
        image=str(wanted.get("image", "")),
        is_init=is_init,
        is_ready=bool(status.get("ready", False)),
        restarts=int(status.get("restartCount", 0)),
        waiting_reason=str(waiting.get("reason", "")),
        waiting_message=str(waiting.get("message", "")),
        ended_reason=str(ended.get("reason", "")),
        ended_exit_code=None if exit_code is None else int(exit_code),
        ended_message=str(ended.get("message", "")),
        ended_started_at=parse_time(ended.get("startedAt")),
        ended_at=parse_time(ended.get("finishedAt")),
        running_since=parse_time(running.get("startedAt")),
        memory_limit_bytes=None if limit is None else int(limit),
    )


def _gpus(spec: Json) -> int:
    """GPUs that the pod asks for, of whatever vendor: extended resources, which have a domain in their name."""
    return sum(
        int(quantity(amount) or 0)
        for container in spec.get("containers") or ()
        for name, amount in ((container.get("resources") or {}).get("limits") or {}).items()
        if "/" in name and not name.startswith("hugepages-")
    )


@dataclass(frozen=True, slots=True)
class Revision:
    """The newest revision of a workload: a ReplicaSet or a ControllerRevision."""

    template_hash: str
    made_at: datetime | None


def newest_revision(workload: Json, revisions: Iterable[Json]) -> Revision | None:
    """Of `revisions` (ReplicaSets or ControllerRevisions) the newest that `workload` controls."""
    uid = workload["metadata"]["uid"]
    owned = [
        found
        for found in revisions
        if any(owner.get("uid") == uid for owner in found["metadata"].get("ownerReferences") or ())
    ]
    if not owned:
        return None
    newest = max(owned, key=_revision_number)
    metadata = newest["metadata"]
    labels = metadata.get("labels") or {}
    if workload["kind"] == "StatefulSet":
        template_hash = str(metadata["name"])  # the label of its pods is the whole name
    else:
        template_hash = next((str(labels[name]) for name in _hash_labels if name in labels), "")
    return Revision(template_hash, parse_time(metadata.get("creationTimestamp")))


def _revision_number(revision: Json) -> int:
    annotations = revision["metadata"].get("annotations") or {}
    number = revision.get("revision", annotations.get("deployment.kubernetes.io/revision", 0))
    return int(number or 0)


def workload_seen(body: Json, revision: Revision | None) -> Workload:
    """A Deployment, DaemonSet or StatefulSet as its controller sees it."""
    metadata, spec, status = body["metadata"], body["spec"], body.get("status") or {}
    is_daemon_set = body["kind"] == "DaemonSet"
    if is_daemon_set:
        wanted = int(status.get("desiredNumberScheduled", 0))
        ready = int(status.get("numberReady", 0))
        updated = int(status.get("updatedNumberScheduled", 0))
        available = int(status.get("numberAvailable", 0))
    else:
        replicas = spec.get("replicas")
        wanted = 1 if replicas is None else int(replicas)
        ready = int(status.get("readyReplicas", 0))
        updated = int(status.get("updatedReplicas", 0))
        available = int(status.get("availableReplicas", 0))
    good = {"Available": "True", "Progressing": "True", "ReplicaFailure": "False"}
    messages = {
        str(found["type"]): str(found.get("message") or found.get("reason") or "")
        for found in status.get("conditions") or ()
        if found.get("type") in good and found.get("status") != good[found["type"]]
    }
    labels = metadata.get("labels") or {}
    return Workload(
        component=str(labels.get(COMPONENT_LABEL, "")),
        kind=str(body["kind"]),
        name=str(metadata["name"]),
        generation=int(metadata.get("generation", 0)),
        observed_generation=int(status.get("observedGeneration", 0)),
        wanted=wanted,
        ready=ready,
        updated=updated,
        available=available,
        changed_at=revision.made_at if revision else None,
        newest_template_hash=revision.template_hash if revision else "",
        condition_messages=messages,
    )


def warnings_seen(
    events: Iterable[Json], objects: Mapping[tuple[str, str], str], *, since: datetime
) -> tuple[Warning, ...]:
    """Warning events on `objects` ((kind, name) in lower case → component), last seen after `since`, newest first."""
    found = []
    for event in events:
        about = event.get("involvedObject") or {}
        key = (str(about.get("kind", "")).lower(), str(about.get("name", "")).lower())
        if key not in objects:
            continue
        made = parse_time(event["metadata"].get("creationTimestamp"))
        series = event.get("series") or {}
        last = (
            parse_time(series.get("lastObservedTime"))
            or parse_time(event.get("lastTimestamp"))
            or parse_time(event.get("eventTime"))
            or made
        )
        first = (
            parse_time(event.get("firstTimestamp")) or parse_time(event.get("eventTime")) or made
        )
        if last is None or first is None or last < since:
            continue
        found.append(
            Warning(
                object="/".join(key),
                component=objects[key],
                reason=str(event.get("reason", "")),
                message=str(event.get("message", "")),
                first_seen=first,
                last_seen=last,
            )
        )
    found.sort(
        key=lambda warning: (warning.last_seen, warning.object, warning.reason), reverse=True
    )
    return tuple(found)


def with_problems(pods: Sequence[Pod], warnings: Iterable[Warning]) -> tuple[Pod, ...]:
    """Pods that are not ready yet, each with the newest Warning that its status does not show."""
    problems: dict[str, str] = {}
    for warning in warnings:
        kind, _, name = warning.object.partition("/")
        if kind == "pod" and warning.reason in _pod_reasons:
            problems.setdefault(name, f"{warning.reason}: {warning.message}")
    return tuple(
        replace(pod, supplemental_problem=problems[pod.name])
        if not pod.is_ready and pod.name in problems
        else pod
        for pod in pods
    )


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """What agents and engines care about in a node."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...]
    is_ready: bool


def node_facts(body: Json) -> NodeFacts:
    """Of a Node object."""
    conditions = (body.get("status") or {}).get("conditions") or ()
    return NodeFacts(
        name=str(body["metadata"]["name"]),
        labels=dict(body["metadata"].get("labels") or {}),
        taints=tuple(
            {part: str(taint.get(part, "")) for part in ("key", "value", "effect")}
            for taint in (body.get("spec") or {}).get("taints") or ()
        ),
        is_ready=any(
            found.get("type") == "Ready" and found.get("status") == "True" for found in conditions
        ),
    )


def node_views(facts: Sequence[NodeFacts], agents: Json) -> tuple[NodeView, ...]:
    """The nodes as the agents' DaemonSet `agents` (rendered) would see them."""
    from cacheoperator.objects import placement

    pod_spec = agents["spec"]["template"]["spec"]
    views = []
    for node in facts:
        taint = placement.untolerated_taint(pod_spec, node.taints)
        views.append(
            NodeView(
                name=node.name,
                matches_cache=placement.matches_node(pod_spec, node.labels, node.name),
                tolerated=not taint,
                is_ready=node.is_ready,
                untolerated_taint=taint,
            )
        )
    return tuple(views)


class FlowWindow:
    """Chunks from prefill to decode over the last ten minutes, summed over agents.

    Agents count since they began; a new epoch (or a fall) begins at zero, so growth is taken within one life. A chunk
    that decode knows from another agent's index is looked up under the writer `elsewhere`. Kept in memory: after a
    restart of the operator the window begins anew, and says so by `since`.
    """

    def __init__(self) -> None:
        self._last: dict[str, tuple[int, tuple[int, int, int]]] = {}
        self._steps: deque[tuple[datetime, tuple[int, int, int]]] = deque()
        self._since: datetime | None = None

    def add(self, reports: Iterable[AgentReport], now: datetime) -> Window:
        """Take in reports that were fetched `now` and give the sums. Reports with a problem count nothing."""
        if self._since is None:
            self._since = now
        growth = (0, 0, 0)
        for report in reports:
            if report.problem:
                continue
            total = (0, 0, 0)
            for flow in report.flows:
                if flow.reader_role == "decode" and flow.writer_role == "prefill":
                    total = _sum(total, (flow.committed, flow.looked_up, flow.loaded))
                elif flow.reader_role == "decode" and flow.writer_role == "elsewhere":
                    total = _sum(total, (0, flow.looked_up, 0))
            epoch, before = self._last.get(report.pod, (report.epoch, total))
            if epoch != report.epoch or any(a < b for a, b in zip(total, before, strict=True)):
                before = (0, 0, 0)
            growth = _sum(growth, [a - b for a, b in zip(total, before, strict=True)])
            self._last[report.pod] = (report.epoch, total)
        if any(growth):
            self._steps.append((now, growth))
        oldest = now - timedelta(seconds=window_s)
        while self._steps and self._steps[0][0] < oldest:
            self._steps.popleft()
        self._since = max(self._since, oldest)
        sums = (0, 0, 0)
        for _, step in self._steps:
            sums = _sum(sums, step)
        return Window(since=self._since, committed=sums[0], looked_up=sums[1], loaded=sums[2])


def _sum(one: Sequence[int], other: Sequence[int]) -> tuple[int, int, int]:
    return (one[0] + other[0], one[1] + other[1], one[2] + other[2])


def instance_of(body: Json) -> str:
    """The KVCache that the object's labels name, "" for none."""
    return str((body["metadata"].get("labels") or {}).get(INSTANCE_LABEL, ""))


def _time(text: object) -> datetime:
    found = parse_time(text)
    assert found is not None, f"the API server always writes this time, not {text!r}"
    return found
