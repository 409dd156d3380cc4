"""One KVCache, level-triggered: read → gather → render → apply what differs → prune → observe → status → events.

Called by workers for a key from the queue, never twice at once for the same key. What it does depends only on what is
in the cluster now; memory between two calls serves telling (since when, drift or wish) and sparing (agents are not
asked more often than needed). Nothing is done on deletion: owner references let Kubernetes collect the children.

A refusal by the API server is part of what is observed and ends in a condition. Unreachable goes to the caller, who
tries again later.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from cacheoperator import metrics, names, observe, render, shared_memory, status
from cacheoperator.children import Children, Memory, ObjectName, Outcome
from cacheoperator.cluster import Cluster, Json
from cacheoperator.conditions import transfer
from cacheoperator.conditions.finding import Scene
from cacheoperator.errors import Broken, ClusterError, Invalid, NotFound, Unreachable
from cacheoperator.events import Teller
from cacheoperator.gather import Gathered, gather
from cacheoperator.kinds import (
    CONTROLLER_REVISION,
    DAEMON_SET,
    DEPLOYMENT,
    EVENT,
    KVCACHE,
    REPLICA_SET,
    kind_of,
    workloads,
)
from cacheoperator.lease import Others
from cacheoperator.names import Component
from cacheoperator.observed import (
    AgentReport,
    ApplyError,
    Observed,
    Pod,
    Warning,  # noqa: A004 - Kubernetes' word
    Workload,
)
from cacheoperator.probe import Prober
from cacheoperator.refs import SharedMemoryVerdict, uses_shared_memory
from cacheoperator.settings import Settings
from cacheoperator.statusz import Agents
from cacheoperator.watch import Key, Stored, Watched
from cacheservice.manifest import KVCacheManifest, ManifestRefused, Verify, manifest_from_object

log = logging.getLogger(__name__)

summary_every_s = 10.0
"""Status patches that change no condition are at least this far apart."""
look_for_others_s = 15.0
"""Until we see that the operator of a namespace went, and take over."""
warnings_within_s = 900.0
"""Older Warning events no longer count."""
busy_look_s, calm_look_s, idle_look_s = 5.0, 30.0, 120.0
"""Until the next look at what no watch tells (agents, events): while something changes, when all is well, and while
there are no pods at all."""


@dataclass(frozen=True, slots=True)
class Look:
    """How a reconcile ended: whether it must be tried again with backoff, else when to look again (None: on change)."""

    has_failed: bool = False
    again_s: float | None = None


@dataclass(slots=True)
class Known:
    """What is remembered of one KVCache, by its UID."""

    uid: str
    applied: Memory = field(default_factory=Memory)
    window: observe.FlowWindow = field(default_factory=observe.FlowWindow)
    reports: tuple[AgentReport, ...] = ()
    reports_at: datetime | None = None
    warnings: tuple[Warning, ...] = ()
    warnings_at: datetime | None = None
    revisions: dict[str, tuple[int, observe.Revision]] = field(default_factory=dict)
    """Newest revision by workload UID, and the workload's generation that it was looked up for."""
    unstored: dict[str, dict[str, str]] = field(default_factory=dict)
    """What was made for Secrets of ours that are not there, by name: see `gather`."""
    denial: SharedMemoryVerdict | None = None
    """Pods with the socket folder were rejected although the dry run went through."""
    denial_label: str = ""
    status: dict[str, Any] | None = None
    """What was last written, and the version of the KVCache that came of it."""
    status_version: int = 0
    status_at: datetime | None = None
    changed_at: datetime | None = None
    """When a condition last changed: looks become rarer from then on."""


class Reconciler:
    """Owned by one event loop. `now` is aware (UTC); `others` keeps us out of namespaces with an operator of their
    own."""

    def __init__(
        self,
        *,
        cluster: Cluster,
        watched: Watched,
        children: Children,
        agents: Agents,
        teller: Teller,
        settings: Settings,
        now: Callable[[], datetime],
        prober: Prober,
        others: Others | None = None,
    ) -> None:
        self._cluster = cluster
        self._watched = watched
        self._children = children
        self._agents = agents
        self._teller = teller
        self._settings = settings
        self._now = now
        self._prober = prober
        self._others = others
        self._known: dict[Key, Known] = {}
        self.ready: set[Key] = set()
        """KVCaches whose newest status is Ready."""

    def forget(self, key: Key) -> None:
        """The KVCache is gone."""
        self._known.pop(key, None)
        self._children.forget(key)
        self._prober.forget(key)
        self.ready.discard(key)

    async def reconcile(self, key: Key) -> Look:
        """One round for `key`."""
        stored = self._watched.kvcache(key)
        if stored is None:
            self.forget(key)
            return Look()
        resource = stored.load()
        if "deletionTimestamp" in resource["metadata"]:
            return Look()
        if self._others is not None and await self._others.holder(key[0]):
            self.forget(key)
            return Look(again_s=look_for_others_s)
        known = self._known.get(key)
        if known is None or known.uid != stored.uid:
            self.forget(key)
            known = self._known[key] = Known(stored.uid)
        if known.status is not None and known.status_version > stored.version:
            resource["status"] = known.status

        try:
            manifest = manifest_from_object(
                {part: value for part, value in resource.items() if part != "status"},
                source=f"kvcache/{stored.name}",
            )
        except ManifestRefused as refused:
            problems = "; ".join(str(problem) for problem in refused.problems)
            observed = self._observed_bare(resource, is_refused=problems)
            return await self._tell(key, known, resource, None, observed, Outcome())

        live = self._children.live(key)
        now = self._now()
        try:
            gathered = await gather(
                self._cluster, self._watched, self._settings, manifest, resource, live, now,
                known.denial, known.unstored,
            )  # fmt: skip
        except ClusterError as error:
            if isinstance(error, Unreachable) and not isinstance(error, Broken):
                raise
            return await self._tell_unread(key, known, resource, manifest, error)
        rendered = render.render(manifest, gathered.refs, self._settings)
        objects = [annotated(obj, manifest, gathered) for obj in rendered.objects]
        outcome = Outcome()
        if not manifest.paused:
            status_before = resource.get("status") or {}
            outcome = await self._children.apply(
                key, stored.uid, objects, known.applied,
                is_wish_known=status_before.get("observedGeneration") == gathered.refs.generation,
            )  # fmt: skip
            if not rendered.refusals:
                pruned = await self._children.prune(
                    key, stored.uid, objects, known.applied,
                    are_monitors_known=gathered.refs.pod_monitor_known,
                )  # fmt: skip
                outcome.errors += pruned.errors
                outcome.num_writes += pruned.num_writes
                outcome.must_wait |= pruned.must_wait
        observed = await self._observe(
            key, known, resource, manifest, gathered, objects, rendered.refusals, outcome
        )
        look = await self._tell(key, known, resource, manifest, observed, outcome)
        if manifest.verify is Verify.PROBE and manifest.prefill is not None and not manifest.paused:
            pairs = transfer.unproven_pairs(Scene(manifest, observed, resource.get("status") or {}))
            due_s = self._prober.consider(key, known.uid, manifest, observed, pairs)
            if due_s is not None:
                look = replace(look, again_s=min(due_s, look.again_s or due_s))
        if outcome.due is not None:
            due_s = max(1.0, (outcome.due - now).total_seconds())
            look = replace(look, again_s=min(due_s, look.again_s or due_s))
        if gathered.certificates_due is not None and not manifest.paused:
            due_s = max(1.0, (gathered.certificates_due - now).total_seconds())
            look = replace(look, again_s=min(due_s, look.again_s or due_s))
        return look

    async def _tell_unread(
        self,
        key: Key,
        known: Known,
        resource: Json,
        manifest: KVCacheManifest,
        error: ClusterError,
    ) -> Look:
        """What rendering needs may not be read: nothing can be applied, and that is what status says."""
        outcome = Outcome(
            errors=[
                ApplyError(
                    object=f"namespace/{key[0]}",
                    component="",
                    verb="get",
                    code=error.code,
                    reason=error.reason or type(error).__name__,
                    message=error.message,
                    since=known.applied.errors.setdefault((key[0], error.reason), self._now()),
                )
            ]
        )
        observed = replace(
            self._observed_bare(resource),
            apply_errors=tuple(outcome.errors),
            pods=self._watched.pods(key),
        )
        return await self._tell(key, known, resource, manifest, observed, outcome)

    def _observed_bare(self, resource: Json, *, is_refused: str = "") -> Observed:
        return Observed(
            now=self._now(),
            generation=int(resource["metadata"]["generation"]),
            operator_version=self._settings.operator_version,
            is_refused=is_refused,
        )

    async def _observe(
        self,
        key: Key,
        known: Known,
        resource: Json,
        manifest: KVCacheManifest,
        gathered: Gathered,
        objects: Sequence[Json],
        refusals: tuple[tuple[str, str], ...],
        outcome: Outcome,
    ) -> Observed:
        live = {
            name: child
            for name, child in self._children.live(key).items()
            if child.owner_uid == known.uid
        }
        pods = self._watched.pods(key)
        seen = await self._workloads(key, known, live)
        warnings = await self._warnings(key, known, live, seen, pods)
        self._watch_for_denial(known, gathered, manifest, warnings)
        reports = await self._reports(known, pods)
        nodes = None
        facts = self._watched.nodes()
        agents = next((obj for obj in objects if obj["kind"] == DAEMON_SET.kind), None)
        if facts is not None and agents is not None:
            nodes = observe.node_views(facts, agents)
        shares = uses_shared_memory(manifest, gathered.refs)
        observed = replace(
            self._observed_bare(resource),
            refusals=refusals,
            workloads=seen,
            pods=observe.with_problems(pods, warnings),
            warnings=warnings,
            apply_errors=tuple(outcome.errors),
            contests=tuple(outcome.contests),
            is_pod_monitor_served=gathered.refs.pod_monitor_known,
            nodes=nodes,
            agents=reports,
            transport="SharedMemory" if shares else "Stream",
            transport_reason=gathered.refs.shared_memory.reason,
            flow_window=known.window.add(reports, self._now()) if reports else None,
        )
        return replace(observed, probes=self._prober.results(key))

    async def _workloads(
        self, key: Key, known: Known, live: Mapping[ObjectName, Stored]
    ) -> dict[str, Workload]:
        """By component. The newest revision is looked up once per generation that its controller has seen."""
        seen: dict[str, Workload] = {}
        lists: dict[str, list[Json]] = {}
        for (kind, _), child in live.items():
            if kind not in workloads:
                continue
            body = child.load()
            generation = int((body.get("status") or {}).get("observedGeneration", 0))
            cached = known.revisions.get(child.uid)
            revision = cached[1] if cached is not None and cached[0] == generation else None
            if revision is None and generation:
                source = REPLICA_SET if kind == DEPLOYMENT else CONTROLLER_REVISION
                if source.kind not in lists:
                    lists[source.kind] = await self._list(source, key[0], names.selector(key[1]))
                revision = observe.newest_revision(body, lists[source.kind])
                if revision is not None:
                    known.revisions[child.uid] = (generation, revision)
            workload = observe.workload_seen(body, revision)
            seen[workload.component] = workload
        return seen

    async def _warnings(
        self,
        key: Key,
        known: Known,
        live: Mapping[ObjectName, Stored],
        seen: Mapping[str, Workload],
        pods: Sequence[Pod],
    ) -> tuple[Warning, ...]:
        """Warning events of our objects, asked for only while something is not as it should be."""
        is_well = all(
            workload.ready >= workload.wanted and workload.updated >= workload.wanted
            for workload in seen.values()
        ) and all(pod.is_ready for pod in pods)
        now = self._now()
        if is_well:
            known.warnings, known.warnings_at = (), None
            return ()
        if known.warnings_at is None or (now - known.warnings_at).total_seconds() >= busy_look_s:
            events = await self._list(EVENT, key[0], fields="type=Warning")
            objects = {("pod", pod.name): pod.component for pod in pods}
            for (kind, name), child in live.items():
                component = name.removeprefix(f"{key[1]}-")
                objects[kind.kind.lower(), child.name] = component
            for workload in seen.values():
                if workload.kind == DEPLOYMENT.kind and workload.newest_template_hash:
                    replica_set = f"{workload.name}-{workload.newest_template_hash}"
                    objects["replicaset", replica_set] = workload.component
            since = now - timedelta(seconds=warnings_within_s)
            known.warnings = observe.warnings_seen(events, objects, since=since)
            known.warnings_at = now
        return known.warnings

    async def _list(
        self, kind: Any, namespace: str, labels: str = "", fields: str = ""
    ) -> list[Json]:
        """A list that is worth having but not worth failing for."""
        try:
            return await self._cluster.list(
                kind, namespace, labels=labels, fields=fields, limit=1000
            )
        except Unreachable:
            raise
        except ClusterError as error:
            log.warning("cannot list kind=%s namespace=%s: %s", kind.kind, namespace, error.message)
            return []

    async def _reports(self, known: Known, pods: Sequence[Pod]) -> tuple[AgentReport, ...]:
        """What running agents say; asked at most once per `busy_look_s`."""
        running = [
            pod
            for pod in pods
            if pod.component == Component.CACHE and pod.phase == "Running" and not pod.is_deleting
        ]
        now = self._now()
        age_s = (
            busy_look_s if known.reports_at is None else (now - known.reports_at).total_seconds()
        )
        if age_s >= busy_look_s or {pod.name for pod in running} != {r.pod for r in known.reports}:
            known.reports = await self._agents.ask(running)
            known.reports_at = now
        return known.reports

    def _watch_for_denial(
        self,
        known: Known,
        gathered: Gathered,
        manifest: KVCacheManifest,
        warnings: Sequence[Warning],
    ) -> None:
        """Pods may be rejected for their hostPath although the dry run was not; then the stream path it is."""
        if known.denial is not None and known.denial_label != gathered.enforce_label:
            known.denial = None
        if not gathered.refs.shared_memory.is_allowed:
            return
        agents = f"daemonset/{names.workload_name(manifest.name, Component.CACHE)}"
        for warning in warnings:
            is_about_folder = "hostPath" in warning.message and "forbidden" in warning.message
            if warning.object == agents and warning.reason == "FailedCreate" and is_about_folder:
                known.denial = SharedMemoryVerdict(is_allowed=False, reason=warning.message)
                known.denial_label = gathered.enforce_label
                return

    async def _tell(
        self,
        key: Key,
        known: Known,
        resource: Json,
        manifest: KVCacheManifest | None,
        observed: Observed,
        outcome: Outcome,
    ) -> Look:
        """Status and events."""
        previous = resource.get("status") or {}
        new = status.status(manifest, observed, previous)
        is_ready = condition(new, "Ready") == "True"
        (self.ready.add if is_ready else self.ready.discard)(key)
        has_failed = outcome.must_wait or bool(outcome.errors)
        wait_s = await self._write_status(key, known, previous, new)
        for repair in outcome.repairs:
            who = " and ".join(repair.managers) or "someone else"
            message = f"{repair.object}: {paths_text(repair.paths)} put right; {who} had changed it"
            await self._teller.tell(*key, known.uid, "Normal", "DriftRepaired", message)
        looks = [wait_s, status.recheck_after_s(new, observed)]
        if not has_failed:
            # Else each look would send the refused apply again: the queue's backoff says when.
            looks.append(self._next_look(known, observed, is_ready=is_ready))
        times = [time for time in looks if time is not None]
        return Look(has_failed, min(times) if times else None)

    async def _write_status(
        self, key: Key, known: Known, previous: Mapping[str, Any], new: dict[str, Any]
    ) -> float | None:
        """Patch when it differs, and tell transitions. Returns in how many seconds a held back patch is due."""
        if new == previous:
            return None
        now = self._now()
        is_urgent = conditions_of(new) != conditions_of(previous) or not previous
        if not is_urgent and known.status_at is not None:
            age_s = (now - known.status_at).total_seconds()
            if age_s < summary_every_s:
                return summary_every_s - age_s
        try:
            written = await self._cluster.write_status(KVCACHE, *key, known.uid, new)
        except (NotFound, Invalid) as error:
            if self._watched.kvcache(key) is None or isinstance(error, NotFound):
                return None  # it went meanwhile
            raise
        metrics.status_writes.inc()
        known.status = new
        known.status_version = int(written["metadata"]["resourceVersion"])
        known.status_at = now
        if is_urgent:
            known.changed_at = now
        for event in status.transitions(previous, new):
            await self._teller.tell(*key, known.uid, event.type, event.reason, event.message)
        return None

    def _next_look(self, known: Known, observed: Observed, *, is_ready: bool) -> float | None:
        """Agents and events have no watch. Looks become rarer the longer nothing changes."""
        if is_ready:
            return calm_look_s
        if not observed.pods and not observed.workloads:
            return None
        longest_s = calm_look_s if observed.pods else idle_look_s
        if known.changed_at is None:
            known.changed_at = self._now()
        still_s = (self._now() - known.changed_at).total_seconds()
        return min(longest_s, max(busy_look_s, still_s / 4))


def annotated(obj: Mapping[str, Any], manifest: KVCacheManifest, gathered: Gathered) -> Json:
    """The agents' DaemonSet with the verdict about shared memory; every other object as it is."""
    wanted = dict(obj)
    agents = names.workload_name(manifest.name, Component.CACHE)
    if kind_of(obj) == DAEMON_SET and obj["metadata"]["name"] == agents:
        value = shared_memory.write_annotation(gathered.enforce_label, gathered.refs.shared_memory)
        annotations = {
            **(obj["metadata"].get("annotations") or {}),
            shared_memory.ANNOTATION: value,
        }
        wanted["metadata"] = {**obj["metadata"], "annotations": annotations}
    return wanted


def conditions_of(value: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Type → (status, reason)."""
    return {
        str(found["type"]): (str(found["status"]), str(found.get("reason", "")))
        for found in value.get("conditions") or ()
    }


def condition(value: Mapping[str, Any], type_: str) -> str:
    return conditions_of(value).get(type_, ("", ""))[0]


def paths_text(paths: Sequence[str]) -> str:
    """The first few paths."""
    shown = ", ".join(paths[:5])
    return f"{shown} and {len(paths) - 5} more" if len(paths) > 5 else shown
