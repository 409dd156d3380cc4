"""What the cluster holds of ours, kept up to date by kopf; changes put KVCaches into the queue.

kopf is embedded and only watches: `on.event` and `index` handlers, which write nothing (no finalizer, no annotation),
with server-side label selectors (`settings.watching.label_selectors`, kopf ≥ 1.45), so that foreign pods never come
over the wire. scanning is off: the kinds are known, and a namespaced install may not look at the cluster.

Invariants: objects are kept packed (a cluster of 200 KVCaches has 5,000 children, whose dicts would take hundreds of
MB); Secrets are never watched; kinds that may not be listed are in `unwatched`, and callers get them one by one. So is
PodMonitor, as its CRD comes and goes with another product: a watch that kopf has begun ends with its kind, and all of
kopf with it.

kopf lists anew after a long interruption and says nothing of what was deleted meanwhile, so each full pass compares
the index with a list of names (`forget_deleted`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import kopf

from cacheoperator import observe
from cacheoperator.cluster import Cluster
from cacheoperator.errors import Forbidden, NotFound
from cacheoperator.kinds import KVCACHE, NODE, POD, POD_MONITOR, Kind, watched_children
from cacheoperator.names import (
    APP_NAME,
    FIELD_MANAGER,
    INSTANCE_LABEL,
    MANAGED_BY,
    MANAGED_BY_LABEL,
    NAME_LABEL,
)
from cacheoperator.observed import Pod

log = logging.getLogger(__name__)

ours = f"{MANAGED_BY_LABEL}={MANAGED_BY}"
our_pods = f"{NAME_LABEL}={APP_NAME}"

most_deleted = 8192

Key = tuple[str, str]
"""Namespace and name of a KVCache."""


@dataclass(frozen=True, slots=True)
class Stored:
    """One object, packed. `version` grows with each change (resourceVersion); `owner_uid` is its controller's."""

    kind: Kind
    namespace: str
    name: str
    uid: str
    version: int
    owner_uid: str
    packed: bytes

    def load(self) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(zlib.decompress(self.packed))
        return value


def store(kind: Kind, body: Mapping[str, Any]) -> Stored:
    """Pack `body`. Of managedFields only our own entry stays: `difference` needs no other."""
    metadata = dict(body["metadata"])
    metadata["managedFields"] = [
        entry
        for entry in metadata.get("managedFields") or ()
        if entry.get("manager") == FIELD_MANAGER
    ]
    value = {**body, "apiVersion": kind.api_version, "kind": kind.kind, "metadata": metadata}
    return Stored(
        kind=kind,
        namespace=str(metadata.get("namespace", "")),
        name=str(metadata["name"]),
        uid=str(metadata["uid"]),
        version=int(metadata["resourceVersion"]),
        owner_uid=controller_uid(body),
        packed=zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 1),
    )


def controller_uid(body: Mapping[str, Any]) -> str:
    """UID of the object's controller, "" when it has none."""
    for owner in body["metadata"].get("ownerReferences") or ():
        if owner.get("controller"):
            return str(owner["uid"])
    return ""


class Watched:
    """The indexes. `changed` is told each key that may need a reconcile.

    Owned by one event loop. Reads give what kopf has seen so far; it lags behind the API server by milliseconds.
    """

    def __init__(
        self,
        *,
        changed: Callable[[Key], None],
        namespaces: tuple[str, ...],
        cluster: Cluster,
    ) -> None:
        self._changed = changed
        self._namespaces = namespaces
        self._cluster = cluster
        self._indexes: Mapping[str, Mapping[Any, Iterable[Any]]] = {}
        self._deleted: set[str] = set()
        self._nodes: dict[str, observe.NodeFacts] = {}
        self._kinds: tuple[Kind, ...] = ()
        self.unwatched: frozenset[Kind] = frozenset()
        self.has_nodes = False
        self.deleted: dict[str, float] = {}
        """UIDs of objects that went, or that we deleted; the newest last, not all. With each the version that it went
        at, infinite until the watch has told: an event of a later version shows that it is there again, as after a
        label that we select by was taken away and put back."""
        self._started = asyncio.Event()
        self._indexed = asyncio.Event()

    def kvcache(self, key: Key) -> Stored | None:
        return next((found for found in self._index(KVCACHE, key) if found.uid not in self._deleted), None)  # fmt: skip

    def keys(self) -> list[Key]:
        """All KVCaches."""
        index = self._indexes.get(KVCACHE.plural, {})
        return [key for key in index if self.kvcache(key) is not None]

    def children(self, key: Key) -> Iterator[Stored]:
        """All watched objects with our labels for this KVCache, whoever owns them."""
        for kind in self._kinds:
            if kind not in (KVCACHE, POD, NODE):
                for found in self._index(kind, key):
                    if found.uid not in self._deleted:
                        yield found

    def pods(self, key: Key) -> tuple[Pod, ...]:
        found = [pod for pod in self._index(POD, key) if pod.uid not in self._deleted]
        return tuple(sorted(found, key=lambda pod: pod.name))

    def note_deleted(self, uid: str, version: float = math.inf) -> None:
        """The object is gone, or will be as soon as its finalizers let it."""
        self.deleted[uid] = version
        if len(self.deleted) > most_deleted:
            del self.deleted[next(iter(self.deleted))]

    def is_served(self, kind: Kind) -> bool:
        """Whether the API server knew `kind` when it was last asked."""
        return kind in self._kinds or kind in self.unwatched

    def nodes(self) -> tuple[observe.NodeFacts, ...] | None:
        """None when nodes may not be watched."""
        if not self.has_nodes:
            return None
        return tuple(self._nodes[name] for name in sorted(self._nodes))

    async def look_around(self) -> None:
        """Find out which kinds are served and may be listed. Raises NotFound when the CRD is not installed."""
        places: tuple[str | None, ...] = self._namespaces or (None,)
        if not await self._cluster.serves(KVCACHE):
            raise NotFound(
                "the API server does not serve kvcaches.larder.dev: install the CRD (crds.enabled=true, or kubectl"
                " apply --server-side -f charts/larder/files/kvcaches.yaml)"
            )
        allowed: list[Kind] = [KVCACHE]
        unwatched: list[Kind] = []
        for kind in (POD, *watched_children):
            if not await self._cluster.serves(kind):
                continue
            try:
                for place in places:
                    await self._cluster.list(kind, place, labels=ours, limit=1)
            except Forbidden as error:
                log.warning(
                    "cannot watch kind=%s, gets its objects one by one: %s",
                    kind.kind,
                    error.message,
                )
                unwatched.append(kind)
            else:
                allowed.append(kind)
        if not self._namespaces:
            try:
                await self._cluster.list(NODE, limit=1)
                allowed.append(NODE)
                self.has_nodes = True
            except Forbidden:
                log.info("nodes may not be listed: what depends on them is left out of status")
        self._kinds = tuple(allowed)
        self.unwatched = frozenset(unwatched)
        await self.look_for_pod_monitors()

    async def forget_deleted(self) -> None:
        """Compare the indexes with lists of names and forget what is there no more."""
        places: tuple[str | None, ...] = self._namespaces or (None,)
        for kind in self._kinds:
            if kind is NODE:
                await self._forget_deleted_nodes()
                continue
            known = {
                found.uid
                for values in list(self._indexes.get(kind.plural, {}).values())
                for found in values
            }
            if not known:
                continue
            labels = {KVCACHE: "", POD: our_pods}.get(kind, ours)
            there: set[str] = set()
            for place in places:
                listed = await self._cluster.list(kind, place, labels=labels, metadata_only=True)
                there |= {found["metadata"]["uid"] for found in listed}
            lost = known - there - self._deleted
            if lost:
                log.info("missed deletions kind=%s count=%d", kind.kind, len(lost))
                self._deleted |= lost
        await self.look_for_pod_monitors()

    async def look_for_pod_monitors(self) -> None:
        """Find out whether their kind is served now."""
        is_served = await self._cluster.serves(POD_MONITOR)
        others = self.unwatched - {POD_MONITOR}
        self.unwatched = others | {POD_MONITOR} if is_served else others

    async def _forget_deleted_nodes(self) -> None:
        listed = await self._cluster.list(NODE, metadata_only=True)
        there = {found["metadata"]["name"] for found in listed}
        for name in [name for name in self._nodes if name not in there]:
            log.info("missed the deletion of a node name=%s", name)
            del self._nodes[name]

    async def wait_until_read(self) -> None:
        """Returns when the indexes hold what was in the cluster at the start.

        kopf handles the first event when all first lists are indexed; without a KVCache there need not be one.
        """
        await self._started.wait()
        for place in self._namespaces or (None,):
            if await self._cluster.list(KVCACHE, place, limit=1, metadata_only=True):
                await self._indexed.wait()
                return

    async def run(self, stop: asyncio.Event) -> None:
        """Watch until `stop` is set. Call `look_around` before. Ends early, with an exception, when kopf gives up."""
        registry = kopf.OperatorRegistry()
        settings = kopf.OperatorSettings()
        settings.scanning.disabled = True
        settings.posting.enabled = False
        settings.watching.chunk_size = 200
        settings.queueing.idle_timeout = 1.0
        settings.networking.request_timeout = 30.0

        @kopf.on.login(registry=registry)
        async def log_in(**_: Any) -> kopf.ConnectionInfo:
            return await self._connection()

        @kopf.on.startup(registry=registry)
        async def take_indexes(**arguments: Any) -> None:
            self._indexes = {kind.plural: arguments[kind.plural] for kind in self._kinds}

        for kind in self._kinds:
            if kind is POD:
                settings.watching.label_selectors["", "v1", "pods"] = our_pods
            elif kind not in (KVCACHE, NODE):
                settings.watching.label_selectors[kind.group, kind.version, kind.plural] = ours
            self._register(registry, kind)

        await kopf.operator(
            registry=registry,
            settings=settings,
            standalone=True,
            clusterwide=not self._namespaces,
            namespaces=self._namespaces,
            stop_flag=stop,
            ready_flag=self._started,
            # Only peering uses it, which is off; by default kopf asks for the user's name, which a pod may not have.
            identity=FIELD_MANAGER,  # type: ignore[arg-type]
        )

    def _register(self, registry: kopf.OperatorRegistry, kind: Kind) -> None:
        names = (kind.group, kind.version, kind.plural)

        @kopf.index(*names, id=kind.plural, registry=registry)
        async def remember(body: kopf.Body, **_: Any) -> Mapping[Any, Any] | None:
            raw = dict(body)
            metadata = raw["metadata"]
            namespace = str(metadata.get("namespace", ""))
            if kind is KVCACHE:
                return {(namespace, metadata["name"]): store(kind, raw)}
            if kind is NODE:
                return {metadata["name"]: observe.node_facts(raw)}
            instance = (metadata.get("labels") or {}).get(INSTANCE_LABEL)
            if not instance:
                return None
            value = observe.pod_seen(raw) if kind is POD else store(kind, raw)
            return {(namespace, instance): value}

        @kopf.on.event(*names, id=f"{kind.plural}-event", registry=registry)
        async def notice(type: str | None, body: kopf.Body, **_: Any) -> None:  # noqa: A002 - kopf's name
            self._indexed.set()
            self.notice(kind, type, dict(body))

    def notice(self, kind: Kind, change: str | None, body: Mapping[str, Any]) -> None:
        """One event of the watch. `change` is ADDED, MODIFIED or DELETED; None for what a list brought."""
        metadata = body["metadata"]
        if kind is NODE:
            self._notice_node(change, body)
            return
        uid, version = metadata["uid"], int(metadata["resourceVersion"])
        self._deleted.discard(uid)
        if change == "DELETED":
            self.note_deleted(uid, version)
        elif version > self.deleted.get(uid, version):
            del self.deleted[uid]
        labels = metadata.get("labels") or {}
        name = metadata["name"] if kind is KVCACHE else labels.get(INSTANCE_LABEL)
        if name:
            self._changed((str(metadata.get("namespace", "")), str(name)))

    def _notice_node(self, change: str | None, body: Mapping[str, Any]) -> None:
        """Nodes report themselves every few minutes; only what agents care about is a change."""
        name = body["metadata"]["name"]
        facts = None if change == "DELETED" else observe.node_facts(body)
        if self._nodes.get(name) == facts:
            return
        if facts is None:
            del self._nodes[name]
        else:
            self._nodes[name] = facts
        for key in self.keys():
            self._changed(key)

    def _index(self, kind: Kind, key: Any) -> list[Any]:
        index = self._indexes.get(kind.plural, {})
        return list(index[key]) if key in index else []

    async def _connection(self) -> kopf.ConnectionInfo:
        """Our own login in kopf's words; asked for again when the API server refuses the token."""
        configuration = self._cluster.configuration
        if configuration.refresh_api_key_hook is not None:
            configuration.refresh_api_key_hook(configuration)
        scheme, _, token = (configuration.api_key.get("BearerToken") or "").partition(" ")
        return kopf.ConnectionInfo(
            server=configuration.host,
            ca_path=configuration.ssl_ca_cert,
            insecure=not configuration.verify_ssl,
            scheme=scheme.capitalize() or None,
            token=token or None,
            certificate_path=configuration.cert_file,
            private_key_path=configuration.key_file,
        )
