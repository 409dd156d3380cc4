"""The index inside one process: for a single node, and to hold the shared tests to the port and not to Redis.

Several `MemoryIndex` objects on one `MemoryIndexStore` are several agents on one Redis: the same leases, fences,
numbers and formats, on a clock that is given. It never fails unless it was told to (`MemoryIndexStore.unavailable`),
and `erase` loses everything as FLUSHALL does.

Used by: `--index memory`, tests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cacheservice.core.keys import DIGEST_BYTES, ChunkKey, NamespaceDigest
from cacheservice.errors import IndexUnavailable
from cacheservice.index.entry import parse_entries, replace_entry
from cacheservice.index.node_record import MAX_NODES, pack_node
from cacheservice.index.port import (
    Announcement,
    Holder,
    IndexHealth,
    IndexStatus,
    Node,
)
from cacheservice.index.scripts import MAX_NAMESAKES, NAME_TTL_S, NODE_TTL_MS

NODE_TTL_S = NODE_TTL_MS / 1000
CPU_TIER = 1


@dataclass(slots=True)
class _Value:
    packed: bytes
    expires_at: float


@dataclass(slots=True)
class _Lease:
    node: Node
    expires_at: float


@dataclass(slots=True)
class MemoryIndexStore:
    """What Redis would hold. Thread-safe; share one between the agents of a process."""

    clock: Callable[[], float] = time.monotonic
    entry_ttl_s: float | None = None
    """None: entries stay until withdrawn, since no process outlives this one to clean up after."""
    unavailable: str = ""
    """When not empty, every call raises IndexUnavailable with it."""
    generation: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    values: dict[tuple[NamespaceDigest, ChunkKey], _Value] = field(default_factory=dict)
    """In order of their last announcement, so the first ones expire first."""
    leases: dict[int, _Lease] = field(default_factory=dict)
    names: dict[int, tuple[tuple[int, str], float]] = field(default_factory=dict)
    """Number -> (namesake, expiry): whom the number is kept for."""

    def erase(self) -> None:
        """Forget everything, as FLUSHALL or a restart without persistence."""
        with self.lock:
            self.values.clear()
            self.leases.clear()
            self.names.clear()
            self.generation += 1

    def check_invariants(self) -> None:
        """Every value parses, within its limits; every lease has a number in range."""
        with self.lock:
            for value in self.values.values():
                parsed = parse_entries(value.packed)
                assert parsed.holders, "an empty value was kept"
                assert not parsed.malformed, value.packed
            assert all(
                1 <= n <= MAX_NODES and lease.node.number == n for n, lease in self.leases.items()
            )

    def live_nodes(self) -> dict[int, Node]:
        """Nodes whose lease lasts; the caller holds `lock`."""
        now = self.clock()
        for number in [n for n, lease in self.leases.items() if lease.expires_at <= now]:
            del self.leases[number]
        return {number: lease.node for number, lease in self.leases.items()}

    def drop_expired(self) -> None:
        """Drop values past their TTL; the caller holds `lock`."""
        now = self.clock()
        while self.values:
            first = next(iter(self.values))
            if self.values[first].expires_at > now:
                return
            del self.values[first]

    def take_number(
        self, name: str, address: str, epoch: int, preferred: int, *, may_replace: bool
    ) -> int:
        """The number for an incarnation, leased; 0 when there is none. The caller holds `lock`."""
        nodes = self.live_nodes()
        now = self.clock()
        for number in [n for n, (_, expires_at) in self.names.items() if expires_at <= now]:
            del self.names[number]
        number, namesake = self._choose(
            name, address, epoch, preferred, nodes, may_replace=may_replace
        )
        if number:
            self.leases[number] = _Lease(Node(number, epoch, name, address), now + NODE_TTL_S)
            self.names[number] = (namesake, now + NAME_TTL_S)
        return number

    def _choose(
        self,
        name: str,
        address: str,
        epoch: int,
        preferred: int,
        nodes: Mapping[int, Node],
        *,
        may_replace: bool,
    ) -> tuple[int, tuple[int, str]]:
        if preferred in nodes and nodes[preferred].epoch == epoch and preferred in self.names:
            return preferred, self.names[preferred][0]
        numbers = {namesake: number for number, (namesake, _) in self.names.items()}
        for nth in range(1, MAX_NAMESAKES + 1):
            number = numbers.get((nth, name), 0)
            if not number:
                taken = self.names.keys() | nodes.keys()
                if preferred and preferred not in taken:
                    return preferred, (nth, name)
                free = (n for n in range(1, MAX_NODES + 1) if n not in taken)
                return next(free, 0), (nth, name)
            holder = nodes.get(number)
            if holder is None or holder.epoch == epoch:
                return number, (nth, name)
            if may_replace and address and (holder.name, holder.address) == (name, address):
                return number, (nth, name)
        return 0, (0, name)


class MemoryIndex:
    """One agent's `Index` on a store. Thread-safe."""

    def __init__(self, store: MemoryIndexStore | None = None) -> None:
        """A store of its own when none is given."""
        self._store = store or MemoryIndexStore()
        self._identity: tuple[str, str, int] | None = None
        self._number = 0
        self._generation = 0
        self._has_failed_to_join = False
        self._must_announce_again = False
        self._renew_at = float("inf")
        self._counts = dict.fromkeys(
            (
                "lookups",
                "lookup_errors",
                "malformed_entries",
                "stale_entries",
                "announcements",
                "reannouncements",
            ),
            0,
        )

    def join(self, *, name: str, address: str, epoch: int) -> int:
        """See `Index.join`. ConfigError for a name or address that can't be stored."""
        pack_node(epoch=epoch, name=name, address=address)
        with self._store.lock:
            is_restart = self._identity is None or self._identity[2] != epoch
            self._identity = (name, address, epoch)
            return self._join(may_replace=is_restart)

    def heartbeat(self) -> bool:
        """See `Index.heartbeat`."""
        with self._store.lock:
            if self._identity is None:
                raise IndexUnavailable("this agent has not joined the index yet: call join first")
            self._check_available()
            node = self._store.live_nodes().get(self._number)
            if not self._number:
                self._join(may_replace=True)
            elif node is None or node.epoch != self._identity[2]:
                self._must_announce_again = True
                self._join(may_replace=False)
            else:
                now = self._store.clock()
                self._store.leases[self._number].expires_at = now + NODE_TTL_S
                namesake, _ = self._store.names[self._number]
                self._store.names[self._number] = (namesake, now + NAME_TTL_S)
            is_due = self._must_announce_again or self._store.clock() >= self._renew_at
            if is_due:
                self._must_announce_again = False
                self._renew_at = self._next_renewal()
                self._counts["reannouncements"] += 1
            return is_due

    def leave(self) -> None:
        """See `Index.leave`."""
        with self._store.lock:
            identity, number = self._identity, self._number
            self._identity, self._number = None, 0
            self._check_available()
            lease = self._store.leases.get(number)
            if identity is not None and lease is not None and lease.node.epoch == identity[2]:
                del self._store.leases[number]

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """See `Index.announce`."""
        with self._store.lock:
            self._check_available()
            if self._identity is None or not self._number:
                raise IndexUnavailable(
                    "this agent has not joined the index yet: the next heartbeat tries again"
                )
            store, epoch = self._store, self._identity[2]
            nodes = store.live_nodes()
            fence = nodes.get(self._number)
            if fence is None or fence.epoch != epoch:
                why = (
                    "has lost us (its entry expired)"
                    if fence is None
                    else "names another incarnation of us"
                )
                raise IndexUnavailable(
                    f"nothing was announced: the node table {why} for number {self._number}; the next heartbeat joins "
                    "again and then everything is announced"
                )
            store.drop_expired()
            expires_at = (
                float("inf") if store.entry_ttl_s is None else store.clock() + store.entry_ttl_s
            )
            for announcement in announcements:
                self._announce_one(announcement, epoch, expires_at, nodes)
            self._counts["announcements"] += len({(a.namespace, a.chunk) for a in announcements})

    def lookup(
        self, namespace: NamespaceDigest, chunks: Sequence[ChunkKey]
    ) -> list[tuple[Holder, ...]]:
        """See `Index.lookup`."""
        if any(len(chunk) != DIGEST_BYTES for chunk in chunks):
            raise ValueError(f"a chunk key has {DIGEST_BYTES} bytes")
        with self._store.lock:
            self._check_available(is_lookup=True)
            self._counts["lookups"] += 1
            self._store.drop_expired()
            nodes = self._store.live_nodes()
            answer: list[tuple[Holder, ...]] = []
            for chunk in chunks:
                value = self._store.values.get((namespace, chunk))
                is_gone = value is None or value.expires_at <= self._store.clock()
                answer.append(
                    () if value is None or is_gone else self._live_holders(value.packed, nodes)
                )
            return answer

    def nodes(self) -> Mapping[int, Node]:
        """See `Index.nodes`; always as of now."""
        with self._store.lock:
            self._check_available()
            return MappingProxyType(self._store.live_nodes())

    def status(self) -> IndexStatus:
        """See `Index.status`."""
        if self._store.unavailable:
            return IndexStatus(IndexHealth.UNREACHABLE, self._store.unavailable)
        return IndexStatus(IndexHealth.MEMORY)

    def is_alone(self) -> bool:
        """See `Index.is_alone`: leases that ran out count too, so a lonely agent asks now and then for nothing."""
        others = self._store.leases.keys() - {self._number}
        return not others and not self._store.unavailable

    def counters(self) -> Mapping[str, int]:
        """See `Index.counters`."""
        with self._store.lock:
            return dict(self._counts)

    def close(self) -> None:
        """See `Index.close`; there is nothing to close."""

    def _join(self, *, may_replace: bool) -> int:
        assert self._identity is not None
        name, address, epoch = self._identity
        try:
            self._check_available()
            number = self._store.take_number(
                name, address, epoch, self._number, may_replace=may_replace
            )
            if not number:
                raise IndexUnavailable(
                    f"there is no node number for {name!r}: give each node its own name (--node); {MAX_NODES} names or "
                    f"{MAX_NAMESAKES} live agents of one name are the limit"
                )
        except IndexUnavailable:
            self._has_failed_to_join = True
            raise
        if self._number == 0 and not self._has_failed_to_join:
            self._generation = self._store.generation
        is_other = self._generation != self._store.generation
        if self._number != number or is_other or self._has_failed_to_join:
            self._must_announce_again |= self._number != 0 or self._has_failed_to_join
            self._renew_at = self._next_renewal()
        self._generation = self._store.generation
        self._has_failed_to_join = False
        self._number = number
        return number

    def _announce_one(
        self, announcement: Announcement, epoch: int, expires_at: float, nodes: Mapping[int, Node]
    ) -> None:
        key = (announcement.namespace, announcement.chunk)
        found = self._store.values.pop(key, None)
        own = Holder(self._number, CPU_TIER, epoch, announcement.bitmap)
        packed, dropped = replace_entry(
            b"" if found is None else found.packed, own,
            lambda node, epoch: node in nodes and nodes[node].epoch == epoch,
        )  # fmt: skip
        self._counts["stale_entries"] += dropped
        if packed:
            # A withdrawal leaves the others' time as it was, but moves the value to the end: it is freed a little late.
            keeps = found is not None and not announcement.bitmap
            self._store.values[key] = _Value(
                packed, found.expires_at if found and keeps else expires_at
            )

    def _live_holders(self, packed: bytes, nodes: Mapping[int, Node]) -> tuple[Holder, ...]:
        parsed = parse_entries(packed)
        self._counts["malformed_entries"] += parsed.malformed
        live = []
        for holder in parsed.holders:
            node = nodes.get(holder.node)
            if holder.node == self._number:
                continue
            if node is None or node.epoch != holder.epoch:
                self._counts["stale_entries"] += 1
            else:
                live.append(holder)
        return tuple(live)

    def _next_renewal(self) -> float:
        ttl_s = self._store.entry_ttl_s
        return float("inf") if ttl_s is None else self._store.clock() + ttl_s / 2

    def _check_available(self, *, is_lookup: bool = False) -> None:
        if self._store.unavailable:
            self._counts["lookup_errors"] += is_lookup
            raise IndexUnavailable(self._store.unavailable)
