"""The objects of a KVCache in the cluster: what is there, applying what differs, deleting what is not wanted.

Invariants: an object that this KVCache does not control is never written (NameConflict); an apply of something that
exists carries its UID, so it can't create or meet another one; nothing is sent that would change nothing; a write's
answer counts until the watch has caught up, so a second look right after a write sees it.

`reconcile` decides what is wanted. A refusal of the API server is a value (`ApplyError`); only a server that does not
answer is an exception (Unreachable).
"""

from __future__ import annotations

import base64
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from cacheoperator import metrics
from cacheoperator.cluster import Cluster, Json
from cacheoperator.contests import History
from cacheoperator.difference import difference, owned_fields, unowned
from cacheoperator.errors import (
    Broken,
    ClusterError,
    Conflict,
    Forbidden,
    Invalid,
    NotFound,
    Unreachable,
)
from cacheoperator.kinds import (
    DEPLOYMENT,
    POD_MONITOR,
    SECRET,
    Kind,
    kind_of,
    watched_children,
    workloads,
)
from cacheoperator.names import (
    COMPONENT_LABEL,
    FIELD_MANAGER,
    KIND,
    authority_name,
    pod_monitor_names,
)
from cacheoperator.observed import ApplyError, Contest
from cacheoperator.owners import owners
from cacheoperator.watch import Key, Stored, Watched, controller_uid, store

log = logging.getLogger(__name__)

REPLICAS_MANAGER = f"{FIELD_MANAGER}-replicas"
"""Field manager that keeps `replicas` where the manifest no longer says a number, until an autoscaler takes it."""

ObjectName = tuple[Kind, str]


@dataclass(slots=True)
class Memory:
    """What is remembered of one KVCache between reconciles. Lost with the operator, and nothing depends on it but how
    things are told and what is asked again."""

    wanted: dict[ObjectName, str] = field(default_factory=dict)
    """Digest of what was last wanted: when live differs from the same wish again, someone else changed it."""
    settled: dict[ObjectName, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Differences that an apply did not remove: an admission webhook insists. Not tried again for the same wish."""
    errors: dict[tuple[str, str], datetime] = field(default_factory=dict)
    """Since when an apply is refused, by object and reason."""
    kept: dict[tuple[str, str], datetime] = field(default_factory=dict)
    """Since when a deletion is refused, by object and reason."""
    histories: dict[ObjectName, History] = field(default_factory=dict)
    """Of objects that someone else changed."""
    contests: dict[ObjectName, Contest] = field(default_factory=dict)
    """Of those in `histories` that are contested, what is contested."""
    absent: set[ObjectName] = field(default_factory=set)
    """Of what is not watched, what was not wanted and not there, or not ours: not looked for again."""


@dataclass(frozen=True, slots=True)
class Repair:
    """An object that someone else had changed, the paths that were put right, and who it was as far as it tells."""

    object: str
    paths: tuple[str, ...]
    managers: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """Of one round of applies: what was refused, what was repaired, whether something must be waited for."""

    errors: list[ApplyError] = field(default_factory=list)
    repairs: list[Repair] = field(default_factory=list)
    num_writes: int = 0
    must_wait: bool = False
    """An object of an earlier KVCache of this name, or one that is being deleted, is still there."""
    contests: list[Contest] = field(default_factory=list)
    due: datetime | None = None
    """When to come again for them."""


class Children:
    """Reads from `watched`, writes through `cluster`. One reconcile at a time per KVCache."""

    def __init__(self, cluster: Cluster, watched: Watched, now: Callable[[], datetime]) -> None:
        self._cluster = cluster
        self._watched = watched
        self._now = now
        self._written: dict[Key, dict[ObjectName, Stored]] = {}

    def live(self, key: Key) -> dict[ObjectName, Stored]:
        """All watched objects with the labels of this KVCache, whoever controls them."""
        deleted = self._watched.deleted
        found = {
            (child.kind, child.name): child
            for child in self._watched.children(key)
            if child.uid not in deleted
        }
        written = self._written.get(key, {})
        for name, child in list(written.items()):
            seen = found.get(name)
            if child.uid in deleted or (seen is not None and seen.version >= child.version):
                del written[name]
            else:
                found[name] = child
        return found

    def forget(self, key: Key) -> None:
        """The KVCache is gone."""
        self._written.pop(key, None)

    async def apply(
        self,
        key: Key,
        uid: str,
        wanted: Iterable[Mapping[str, Any]],
        memory: Memory,
        *,
        is_wish_known: bool = False,
    ) -> Outcome:
        """Bring the objects `wanted` about, in this order, each as far as it differs.

        `is_wish_known`: an operator brought this version of the KVCache about before. Then also what differs from a
        wish that `memory` does not know, as after a restart, is a repair where it has another owner now.
        """
        outcome = Outcome()
        live = self.live(key)
        authority = authority_name(key[1])
        for obj in wanted:
            # The authority's Secret comes after its leaves: a step counts as done only when every leaf has it.
            is_authority = kind_of(obj) == SECRET and obj["metadata"]["name"] == authority
            if is_authority and (outcome.errors or outcome.must_wait):
                continue
            await self._apply_one(
                key, uid, normal(obj), live, memory, outcome, is_wish_known=is_wish_known
            )
        self._tell_contests(memory, outcome)
        memory.errors = _still(memory.errors, outcome)
        return outcome

    async def prune(
        self,
        key: Key,
        uid: str,
        wanted: Iterable[Mapping[str, Any]],
        memory: Memory,
        *,
        are_monitors_known: bool = False,
    ) -> Outcome:
        """Delete what this KVCache controls and does not want any more. Secrets are left to the owner's end.

        `are_monitors_known`: whether `wanted` was made for a cluster that knows PodMonitors.
        """
        outcome = Outcome()
        names = {(kind_of(obj), obj["metadata"]["name"]) for obj in wanted}
        monitors = []
        if are_monitors_known:
            monitors = await self._unwanted_pod_monitors(key, uid, names, memory)
        for (kind, name), child in (*self.live(key).items(), *monitors):
            if child.owner_uid != uid or (kind, name) in names:
                continue
            if "deletionTimestamp" in child.load()["metadata"]:
                continue
            log.info("delete namespace=%s kind=%s name=%s", key[0], kind.kind, name)
            title = f"{kind.kind.lower()}/{name}"
            try:
                await self._cluster.delete(kind, key[0], name, child.uid)
            except Conflict as error:
                log.info("conflict object=%s namespace=%s: %s", title, key[0], error.message)
                outcome.must_wait = True  # made anew meanwhile: the watch brings what is true now
            except Unreachable as error:
                if not isinstance(error, Broken):
                    raise
                outcome.errors.append(self._error(title, "", "delete", error, memory.kept))
            except ClusterError as error:
                outcome.errors.append(self._error(title, "", "delete", error, memory.kept))
            else:
                metrics.deletions.labels(kind.kind).inc()
                memory.wanted.pop((kind, name), None)
                self._watched.note_deleted(child.uid)
                outcome.num_writes += 1
        memory.kept = _still(memory.kept, outcome)
        return outcome

    async def _unwanted_pod_monitors(
        self, key: Key, uid: str, wanted: set[ObjectName], memory: Memory
    ) -> list[tuple[ObjectName, Stored]]:
        """Ours that are there: an operator of before, or an earlier wish, may have made them."""
        found = []
        memory.absent -= wanted
        for name in pod_monitor_names(key[1]):
            title = (POD_MONITOR, name)
            if title in wanted | memory.absent:
                continue
            try:
                there = await self._cluster.get(POD_MONITOR, key[0], name)
            except ClusterError as error:
                # Nothing is lost: the next reconcile asks again.
                log.info("cannot see podmonitor/%s namespace=%s: %s", name, key[0], error.message)
                continue
            if there is None or controller_uid(there) != uid:
                memory.absent.add(title)
            else:
                found.append((title, store(POD_MONITOR, there)))
        return found

    async def find(
        self, key: Key, kind: Kind, name: str, live: Mapping[ObjectName, Stored]
    ) -> Json | None:
        """One object as it is now. What is not watched, or not known yet, is asked for."""
        child = live.get((kind, name))
        if child is not None:
            return child.load()
        return await self._cluster.get(kind, key[0], name)

    async def _apply_one(
        self,
        key: Key,
        uid: str,
        wanted: Json,
        live: Mapping[ObjectName, Stored],
        memory: Memory,
        outcome: Outcome,
        *,
        is_wish_known: bool,
    ) -> None:
        kind, name = kind_of(wanted), str(wanted["metadata"]["name"])
        title = f"{kind.kind.lower()}/{name}"
        component = str((wanted["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))
        verb = "get"
        try:
            there = await self.find(key, kind, name, live)
            if there is None:
                verb = "create"
                wish = digest(wanted)
                was_deleted = memory.wanted.get((kind, name)) == wish
                if was_deleted and self._must_wait((kind, name), memory):
                    return
                outcome.num_writes += 1
                if not await self._create(key, kind, wanted):
                    outcome.must_wait = True
                    return
                memory.wanted[kind, name] = wish
                if was_deleted:
                    self._remember_repair((kind, name), component, Repair(title, ()), memory)
                return
            if not self._is_ours(there, key, uid, title, component, memory, outcome):
                return
            verb = "patch"
            await self._change(
                key, kind, wanted, there, title, memory, outcome, is_wish_known=is_wish_known
            )
        except Broken as error:
            # Also an apply of a field that the schema does not know is answered with 500 (seen on 1.35).
            metrics.applies.labels(kind.kind, "refused").inc()
            outcome.errors.append(self._error(title, component, verb, error, memory.errors))
        except Unreachable:
            raise
        except Conflict as error:
            # Another object or another number of replicas than we saw: the watch brings what is true now.
            log.info("conflict object=%s namespace=%s: %s", title, key[0], error.message)
            outcome.must_wait = True
        except ClusterError as error:
            if isinstance(error, NotFound) and await self._is_gone(kind):
                outcome.must_wait = True  # the next look wants none, and tells what is missing
                return
            metrics.applies.labels(kind.kind, "refused").inc()
            outcome.errors.append(self._error(title, component, verb, error, memory.errors))

    async def _is_gone(self, kind: Kind) -> bool:
        """Whether the API server no longer serves this kind, of which only PodMonitor's comes and goes."""
        if kind != POD_MONITOR:
            return False
        await self._watched.look_for_pod_monitors()
        return not self._watched.is_served(POD_MONITOR)

    async def _create(self, key: Key, kind: Kind, wanted: Json) -> bool:
        """Make what was not there a moment ago; False when someone else was faster.

        An apply creates or changes, and can't be told to create alone; a POST could, but then the fields are those of
        an update, which no later apply removes. So:

            1 we look: nothing there      2 someone makes an object of this name      3 our apply meets it

        Not forced, it is a Conflict when the two disagree, and nothing is written. Where they agree, or have no field
        in common, the answer says that it created nothing: an apply of nothing then gives back what it added, since it
        did not change what others own (seen on 1.35). Either way the next look sees a foreign object. What is left is
        an operator that ends between these two applies.
        """
        log.info(
            "create namespace=%s kind=%s name=%s", key[0], kind.kind, wanted["metadata"]["name"]
        )
        applied = await self._cluster.apply(wanted, is_forced=False)
        if not applied.is_created:
            found = applied.object["metadata"]
            bare = {part: found[part] for part in ("name", "namespace", "uid")}
            await self._cluster.apply(
                {"apiVersion": kind.api_version, "kind": kind.kind, "metadata": bare}
            )
            return False
        self._note(key, kind, applied.object)
        metrics.applies.labels(kind.kind, "created").inc()
        return True

    def _is_ours(
        self,
        there: Json,
        key: Key,
        uid: str,
        title: str,
        component: str,
        memory: Memory,
        outcome: Outcome,
    ) -> bool:
        """Whether this KVCache controls the object; if not, says why in `outcome`."""
        if controller_uid(there) == uid:
            if "deletionTimestamp" in there["metadata"]:
                outcome.must_wait = True
                return False
            return True
        owners = there["metadata"].get("ownerReferences") or ()
        if any(owner.get("kind") == KIND and owner.get("name") == key[1] for owner in owners):
            outcome.must_wait = (
                True  # of an earlier KVCache of this name: Kubernetes is collecting it
            )
            return False
        controller = next((owner for owner in owners if owner.get("controller")), None)
        owner = (
            f"belongs to {controller['kind']} {controller['name']}" if controller else "is not ours"
        )
        message = (
            f"{title} in namespace {key[0]} exists and {owner}: delete it, or rename the KVCache"
        )
        error = ClusterError(message, code=409, reason="NameConflict")
        outcome.errors.append(self._error(title, component, "patch", error, memory.errors))
        return False

    async def _change(
        self,
        key: Key,
        kind: Kind,
        wanted: Json,
        there: Json,
        title: str,
        memory: Memory,
        outcome: Outcome,
        *,
        is_wish_known: bool,
    ) -> None:
        name: ObjectName = (kind, wanted["metadata"]["name"])
        paths = difference(wanted, there)
        wish = digest(wanted)
        known_wish = memory.wanted.get(name)
        is_same_wish = known_wish == wish
        memory.wanted[name] = wish
        if not paths or memory.settled.get(name) == (wish, paths):
            return
        if is_same_wish and self._must_wait(name, memory):
            return
        memory.settled.pop(name, None)
        whose: Mapping[str, str] = {}
        if is_same_wish or (is_wish_known and known_wish is None):
            whose = await self._whose(key, kind, there, paths)
        log.info("apply namespace=%s object=%s paths=%s", key[0], title, ",".join(paths))
        if kind == DEPLOYMENT and "replicas" not in wanted["spec"] and "spec.replicas" in paths:
            await self._hand_over_replicas(there)
            outcome.num_writes += 1
        metadata = {**wanted["metadata"], "uid": there["metadata"]["uid"]}
        request = {**wanted, "metadata": metadata}
        try:
            changed = (await self._cluster.apply(request)).object
        except Invalid:
            if kind not in workloads or not is_same_wish:
                raise
            # A foreign edit can be one that an apply can't undo: emptyDir made a hostPath is two sources in one volume.
            await self._cluster.replace_template(there, wanted)
            changed = (await self._cluster.apply(request)).object
        outcome.num_writes += 1
        metrics.applies.labels(kind.kind, "changed").inc()
        self._note(key, kind, changed)
        left = difference(wanted, changed)
        if left:
            log.warning(
                "an apply does not stick namespace=%s object=%s paths=%s",
                key[0],
                title,
                ",".join(left),
            )
            memory.settled[name] = (wish, left)
        repaired = tuple(path for path in paths if path not in left and path != unowned)
        if not is_same_wish:
            repaired = tuple(path for path in repaired if path in whose)
        if repaired:
            metrics.drift_repairs.labels(kind.kind).inc()
            managers = tuple(sorted({whose[path] for path in repaired if path in whose}))
            repair = Repair(title, repaired, managers)
            outcome.repairs.append(repair)
            component = str((wanted["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))
            self._remember_repair(name, component, repair, memory)

    async def _whose(
        self, key: Key, kind: Kind, there: Json, paths: tuple[str, ...]
    ) -> Mapping[str, str]:
        """Who owns `paths` now. The watch keeps our own entry of managedFields alone, so the object is got."""
        try:
            found = await self._cluster.get(kind, key[0], there["metadata"]["name"])
        except ClusterError as error:
            log.debug("cannot see who changed kind=%s: %s", kind.kind, error.message)
            return {}
        return {} if found is None else owners(found, paths)

    def _must_wait(self, name: ObjectName, memory: Memory) -> bool:
        """Whether putting the object right again has to wait: someone fights us."""
        now = self._now()
        return memory.histories.get(name, History()).next_repair(now) > now

    def _remember_repair(
        self, name: ObjectName, component: str, repair: Repair, memory: Memory
    ) -> None:
        now = self._now()
        history = memory.histories.get(name, History()).repaired(now)
        memory.histories[name] = history
        if history.is_contested(now):
            memory.contests[name] = Contest(repair.object, component, repair.paths, repair.managers)

    def _tell_contests(self, memory: Memory, outcome: Outcome) -> None:
        """Also between two repairs, when for a moment all is as we want it."""
        now = self._now()
        for name, history in list(memory.histories.items()):
            if not history.is_known(now):
                del memory.histories[name]
                memory.contests.pop(name, None)
            elif name in memory.contests:
                outcome.contests.append(memory.contests[name])
                due = history.next_repair(now)
                due = due if due > now else history.calm_at()
                outcome.due = due if outcome.due is None else min(due, outcome.due)

    async def _hand_over_replicas(self, there: Json) -> None:
        """Have another field manager own the number of replicas that runs now. Without it, an apply that leaves the
        field out makes it 1. Not forced: when the number has changed meanwhile this is a Conflict, and tried again."""
        owned = owned_fields(there) or {}
        if "f:replicas" not in (owned.get("f:spec") or {}):
            return
        metadata = there["metadata"]
        await self._cluster.apply(
            {
                "apiVersion": there["apiVersion"],
                "kind": there["kind"],
                "metadata": {part: metadata[part] for part in ("name", "namespace", "uid")},
                "spec": {"replicas": there["spec"]["replicas"]},
            },
            manager=REPLICAS_MANAGER,
            is_forced=False,
        )

    def _note(self, key: Key, kind: Kind, body: Json) -> None:
        if kind in watched_children and kind not in self._watched.unwatched:
            child = store(kind, body)
            self._written.setdefault(key, {})[kind, child.name] = child

    def _error(
        self,
        title: str,
        component: str,
        verb: str,
        error: ClusterError,
        since_when: dict[tuple[str, str], datetime],
    ) -> ApplyError:
        reason = error.reason or type(error).__name__
        if isinstance(error, Forbidden) and "exceeded quota" in error.message:
            reason = "QuotaExceeded"
        elif isinstance(error, Invalid) or "field not declared in schema" in error.message:
            reason = "Invalid"
        since = since_when.setdefault((title, reason), self._now())
        return ApplyError(
            object=title,
            component=component,
            verb=verb,
            code=error.code,
            reason=reason,
            message=error.message,
            since=since,
            field_path=error.causes[0][0] if error.causes else "",
        )


def _still(
    since_when: Mapping[tuple[str, str], datetime], outcome: Outcome
) -> dict[tuple[str, str], datetime]:
    """Of what is remembered, that which was refused again."""
    known = {(error.object, error.reason) for error in outcome.errors}
    return {name: since for name, since in since_when.items() if name in known}


def normal(obj: Mapping[str, Any]) -> Json:
    """The object as the API server keeps it: a Secret's stringData is in data."""
    wanted = dict(obj)
    if wanted["kind"] == SECRET.kind and "stringData" in wanted:
        texts = wanted.pop("stringData")
        wanted["data"] = {
            **(wanted.get("data") or {}),
            **{name: base64.b64encode(text.encode()).decode() for name, text in texts.items()},
        }
    return wanted


def digest(obj: Mapping[str, Any]) -> str:
    """Of what is wanted; not stored anywhere."""
    return hashlib.sha256(json.dumps(obj, sort_keys=True).encode()).hexdigest()
