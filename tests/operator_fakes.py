"""An API server in memory, as far as the operator's edge needs one, and a clock. Applies are `apply_model`'s."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from apply_model import Server, values_of
from cacheoperator.cluster import Applied
from cacheoperator.errors import ClusterError, Conflict
from cacheoperator.kinds import LEASE, POD, POD_MONITOR, Kind, child_kinds, watched_children
from cacheoperator.names import FIELD_MANAGER
from cacheoperator.watch import Key, Stored, store

Json = dict[str, Any]
Id = tuple[str, str, str]
"""Kind, namespace, name."""


class Clock:
    """Aware time that tests move."""

    def __init__(self) -> None:
        self.at = datetime(2026, 11, 22, tzinfo=UTC)

    def __call__(self) -> datetime:
        return self.at

    def pass_s(self, seconds: float) -> None:
        self.at += timedelta(seconds=seconds)


class FakeCluster:
    """`writes` has every write as "verb kind/name manager"; `refuse` may raise instead of one."""

    def __init__(self) -> None:
        self.servers: dict[Id, Server] = {}
        self.uids: dict[Id, str] = {}
        self.versions: dict[Id, int] = {}
        self.writes: list[str] = []
        self.refuse: Callable[[str, Mapping[str, Any]], ClusterError | None] = lambda verb, obj: (
            None
        )
        self.webhook: Callable[[Json], Json] = lambda obj: obj
        self.has_pod_monitors = True
        self._count = itertools.count(1)

    def body(self, id_: Id) -> Json | None:
        server = self.servers.get(id_)
        if server is None:
            return None
        body = server.live
        body["metadata"] |= {
            "name": id_[2], "namespace": id_[1], "uid": self.uids[id_], "resourceVersion": str(self.versions[id_]),
        }  # fmt: skip
        return body

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json | None:
        body = self.body((kind.kind, namespace or "", name))
        return None if body is None else {"apiVersion": kind.api_version, "kind": kind.kind, **body}

    async def apply(
        self,
        obj: Mapping[str, Any],
        *,
        is_dry_run: bool = False,
        manager: str = FIELD_MANAGER,
        is_forced: bool = True,
    ) -> Applied:
        self._check("apply", obj, manager)
        id_ = id_of(obj)
        uid = obj["metadata"].get("uid")
        if uid is not None and uid != self.uids.get(id_):
            raise Conflict("uid mismatch", code=409)
        wanted = copy.deepcopy(dict(obj))
        wanted["metadata"] = {
            k: v for k, v in wanted["metadata"].items() if k not in ("uid", "namespace")
        }
        is_created = id_ not in self.servers
        if not is_forced and not is_created and conflicts(self.servers[id_], manager, wanted):
            raise Conflict("another manager owns a field", code=409, reason="Conflict")
        self._touch(id_)
        server = self.servers.setdefault(id_, Server())
        server.apply(manager, self.webhook(wanted))
        body = self.body(id_)
        assert body is not None
        found = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], **body}
        return Applied(found, (), is_created)

    async def create(self, obj: Mapping[str, Any], *, is_dry_run: bool = False) -> Applied:
        self._check("dry-run" if is_dry_run else "create", obj, "")
        id_ = id_of(obj)
        if not is_dry_run:
            if id_ in self.servers:
                raise Conflict("exists", code=409, reason="AlreadyExists")
            self.put(dict(obj))
        return Applied(dict(obj), (), is_created=True)

    async def replace(self, obj: Mapping[str, Any]) -> Json:
        self._check("replace", obj, "")
        id_ = id_of(obj)
        if obj["metadata"].get("resourceVersion") != str(self.versions.get(id_)):
            raise Conflict("newer", code=409)
        self.put(dict(obj))
        return self.body(id_) or {}

    async def replace_template(self, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        self._check("replace-template", wanted, "")
        id_ = id_of({**wanted, "metadata": {**wanted["metadata"]}})
        live = self.servers[id_].live
        live["spec"]["template"] = wanted["spec"]["template"]
        self._touch(id_)
        self.servers[id_].update(f"{FIELD_MANAGER}-replace", live)

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        id_ = (kind.kind, namespace or "", name)
        self._check("delete", {"kind": kind.kind, "metadata": {"name": name}}, "")
        if self.uids.get(id_) != uid:
            raise Conflict("uid", code=409)
        del self.servers[id_], self.uids[id_]

    def put(self, obj: Json, who: str = "someone") -> None:
        """As another client would write it, whole."""
        id_ = id_of(obj)
        self._touch(id_)
        server = self.servers.setdefault(id_, Server())
        server.update(who, {k: v for k, v in obj.items() if k not in ("apiVersion", "kind")})

    def change(self, id_: Id, edit: Callable[[Json], None], who: str = "someone") -> None:
        """A foreign edit of what is there."""
        live = self.servers[id_].live
        edit(live)
        self._touch(id_)
        self.servers[id_].update(who, live)

    def lose(self, id_: Id) -> None:
        """Someone deletes it."""
        del self.servers[id_], self.uids[id_]

    def _touch(self, id_: Id) -> None:
        self.uids.setdefault(id_, f"uid-{next(self._count)}")
        self.versions[id_] = next(self._count)

    def _check(self, verb: str, obj: Mapping[str, Any], manager: str) -> None:
        self.writes.append(
            " ".join([verb, f"{obj['kind']}/{obj['metadata']['name']}", manager]).strip()
        )
        problem = self.refuse(verb, obj)
        if problem is not None:
            raise problem


def conflicts(server: Server, manager: str, wanted: Mapping[str, Any]) -> bool:
    """Whether an apply of `wanted` would change what another manager owns."""
    assert server.stored is not None
    metadata = {k: v for k, v in wanted["metadata"].items() if k != "name"}
    body = {k: v for k, v in wanted.items() if k not in ("apiVersion", "kind", "metadata")}
    theirs = {
        path
        for who, paths in server.managers.items()
        if who != (manager, "Apply")
        for path in paths
    }
    there = values_of(server.stored)
    return any(
        path in theirs and there.get(path) != value
        for path, value in values_of({**body, "metadata": metadata}).items()
    )


class FakeWatched:
    """What kopf would have seen: all but Secrets and PodMonitors, as of the last `look`."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self._seen: list[Stored] = []
        self.deleted: dict[str, None] = {}
        self.unwatched: frozenset[Kind] = frozenset()

    def look(self) -> None:
        before = {child.uid for child in self._seen}
        self._seen = []
        for id_ in self._cluster.servers:
            body = self._cluster.body(id_)
            kind = kinds_by_name[id_[0]]
            if body is not None and kind in (*watched_children, POD, LEASE):
                self._seen.append(store(kind, body))
        for uid in before - {child.uid for child in self._seen}:
            self.note_deleted(uid)

    def note_deleted(self, uid: str) -> None:
        self.deleted[uid] = None

    def is_served(self, kind: Kind) -> bool:
        return kind in self.unwatched

    async def look_for_pod_monitors(self) -> None:
        if not self._cluster.has_pod_monitors:
            self.unwatched -= {POD_MONITOR}

    def children(self, key: Key) -> Iterator[Stored]:
        yield from (child for child in self._seen if child.namespace == key[0])


kinds_by_name = {kind.kind: kind for kind in (*child_kinds, POD, LEASE)}


def id_of(obj: Mapping[str, Any]) -> Id:
    return (
        str(obj["kind"]),
        str(obj["metadata"].get("namespace", "ns")),
        str(obj["metadata"]["name"]),
    )
