"""Decides what the arena holds: who may write where, who may read what, and what goes when room is needed.

Kept at all times (`check_invariants`): a ready shard under a lease that holds is neither evicted nor overwritten;
bytes become readable only by the commit of the reservation that they were written under, the first one for a shard;
an extent that somebody may still write to is not given out again; everything that a session owns ends with it; every
limit is hard.

The unit of eviction is the chunk (all groups, all shards), suffix before prefix. The unit of bytes is the shard: one
contiguous extent. Called by the agent only, under its one core lock: nothing here blocks, logs or reads a clock
(`now_s` comes in, monotonic seconds, never falling). It leaves to the agent to copy bytes, to wake who waits, and to
announce what `take_changes` returns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from operator import attrgetter
from typing import NamedTuple, NewType

from cacheservice.core.allocator import Allocator, Extent, aligned
from cacheservice.core.chunks import (
    Chunk,
    Lease,
    Leases,
    Namespace,
    Reservation,
    Reservations,
    Session,
    Shard,
    Writer,
)
from cacheservice.core.eviction import Evictable, EvictionPolicy
from cacheservice.core.keys import DIGEST_BYTES, ChunkKey, NamespaceDigest, short_hex
from cacheservice.core.layout import NamespaceSpec, num_pieces
from cacheservice.core.runs import cheapest_run, next_run
from cacheservice.errors import (
    Conflict,
    InvalidRequest,
    LimitReached,
    TooManyLeases,
    UnknownObject,
    UnknownSession,
)

SessionId = NewType("SessionId", int)
"""Number that the agent gives a session; never used twice."""

ELSEWHERE = "elsewhere"
"""Stands for the writer's role in flows of what other agents hold."""
EXPIRE_ENTRIES = 20_000
"""What one `expire` ends: some 20 ms under the lock."""
RUN_SEEDS = 16
"""Holes and cold chunks from which a run is grown, each."""
SWEEP_EXTENTS = 8192
"""Extents that one sweep looks at: a few milliseconds under the lock."""
MAX_SUBTREE = 64
"""A chunk with more cached chunks behind it is given up for a run only when nothing else will do."""
FRAGMENTED_FRACTION = 0.02
"""From this share of free bytes on, a run is looked for instead of evicting by coldness alone."""
STRANDED_FRACTION = 0.03
"""From this share on, the run grows from the longest hole, however hot its neighbours are. New shards go to the low
end of a run, so that the hole moves up, joins the next one, and ends as room for a shard: fragmentation can't stay."""


@dataclass(frozen=True, slots=True)
class StoreLimits:
    """Times in seconds and hard limits of one store."""

    reservation_ttl_s: float = 60.0
    """After it others may store the same shard."""
    lease_ttl_s: float = 30.0
    """Lease of an acquire, renewed when it is extended."""
    lookup_lease_ttl_s: float = 5.0
    max_lookup_lease_fraction: float = 0.25
    """Share of the arena that lookup leases may cover together, counted in distinct bytes. A lease that would exceed it
    is not given; when shards come to leased chunks, the oldest leases end early."""
    high_watermark: float = 0.95
    """Used share of the arena from which `evict_to_low_watermark` evicts."""
    low_watermark: float = 0.90
    """Used share at which it stops."""
    max_shards: int = 1_000_000
    """Shards with an extent: ready, pending, or waiting for their writer."""
    max_namespaces: int = 64
    max_released_leases: int = 4096
    """Expired leases that `release` still knows."""
    max_expired_reservations: int = 32_768
    """Reservations that ran out and were freed, but that `commit` and `abort` still know."""
    max_leases: int = 65_536
    max_lease_entries: int = 2_000_000
    """Chunks and shards of all leases together, each counted once per lease: some 100 MB of records."""
    max_changes: int = 262_144
    """Changed chunks kept for `take_changes`; above it the oldest is forgotten (the index is a hint)."""


class ReserveResult(IntEnum):
    """How a reservation is answered; numbers as on the wire."""

    RESERVED = 1
    READY = 2
    PENDING = 3
    NO_SPACE = 4


class CommitResult(IntEnum):
    """How a commit is answered; numbers as on the wire."""

    COMMITTED = 1
    LOST_RACE = 2
    EXPIRED = 3
    CHECKSUM_MISMATCH = 4


class ReserveRequestItem(NamedTuple):
    """One shard to store."""

    chunk: ChunkKey
    parent: ChunkKey | None
    number: int
    group: int
    shard: int
    size_bytes: int


class ReserveAnswer(NamedTuple):
    """Room, or why there is none; id, offset and length are 0 unless reserved."""

    result: ReserveResult
    reservation_id: int
    offset: int
    length: int


class CommitItem(NamedTuple):
    """One written shard."""

    reservation_id: int
    checksums: Sequence[int]
    """xxh3-64 of each 1 MiB piece, first to last."""
    is_remote: bool
    """True when the bytes crossed a machine."""


class ReadyShard(NamedTuple):
    """Where a leased shard lies in the arena."""

    offset: int
    length: int
    checksums: tuple[int, ...]
    is_remote: bool
    writer_role: str


class AcquireAnswer(NamedTuple):
    """A lease, and the state of each asked shard by its position."""

    lease_id: int
    ready: list[tuple[int, ReadyShard]]
    pending: list[int]
    absent: list[int]


class LookupLease(NamedTuple):
    """A lease on chunks that a lookup found."""

    lease_id: int
    expires_at_s: float
    num_chunks: int


class EvictAnswer(NamedTuple):
    """What an explicit eviction did."""

    num_chunks: int
    num_bytes: int
    num_leased: int
    """Left because a lease holds them."""


class HeldChunk(NamedTuple):
    """What is ready here of one chunk; bit `NamespaceSpec.shard_bit`. 0 = nothing any more."""

    namespace: NamespaceDigest
    chunk: ChunkKey
    bitmap: int


class NamespaceSummary(NamedTuple):
    """One open namespace."""

    spec: NamespaceSpec
    num_chunks: int
    num_bytes: int


class Flow(NamedTuple):
    """Chunks of one namespace that came and were asked for here since it was opened, by who wrote and who read them.

    A chunk's writer is that of its first shard, also when that one was pulled from another agent; `writer_role` is ""
    where that agent did not say it, and `ELSEWHERE` for chunks that lookups saw only at other agents, in the index,
    which does not know the writer (each such lookup counts).
    """

    namespace: NamespaceDigest
    writer_role: str
    reader_role: str
    num_stored: int
    """Chunks that clients of `writer_role` stored here themselves, each counted when its first shard is committed: that
    is whatever the groups are, as chunks of windows and states may never be complete. Stored again after an
    eviction counts again; pulled from another agent does not count. The same in all rows of a writer."""
    num_found: int
    """Chunks that lookups of `reader_role` took a lease on, or would have but for a limit of leases. A lookup that
    renews the lease of the one before on just these chunks does not count again."""
    num_read: int
    """Chunks of which readers gave leases of acquires back that held, and under which all was read, as far as they
    say. Counted once per lease that `release` was told to count."""


class ShardSummary(NamedTuple):
    """One shard that is here, ready or pending."""

    group: int
    shard: int
    is_ready: bool
    offset: int
    length: int
    num_leases: int
    writer_role: str
    writer_name: str


class _FreedReservation(NamedTuple):
    """What stays of a reservation that ran out when nobody could write to its extent any more."""

    session: int
    namespace: NamespaceDigest
    chunk: ChunkKey
    bit: int
    length: int


@dataclass(slots=True)
class StoreTotals:
    """Counts since the start; they never fall."""

    num_commits: int = 0
    num_committed_bytes: int = 0
    num_lost_races: int = 0
    num_mismatched_commits: int = 0
    """Lost races whose bytes differed from those that stayed."""
    num_late_commits: int = 0
    num_duplicate_reserves: int = 0
    num_no_space: int = 0
    num_evicted_chunks: int = 0
    num_evicted_bytes: int = 0
    num_run_evictions: int = 0
    """Times that neighbours were evicted to make one long extent."""
    num_expired_leases: int = 0
    num_expired_reservations: int = 0
    num_refused_lookup_leases: int = 0
    num_corrupt_chunks: int = 0
    num_forgotten_changes: int = 0


@dataclass(frozen=True, slots=True)
class StoreCounts:
    """Gauges now, and totals. Bytes of extents include padding to pages.

    A shard costs at most about 1 KB of the agent's memory, all records, the policy and its ghosts included
    (`bench/agent.py` measures it).
    """

    arena_bytes: int
    used_bytes: int
    """Ready, pending and quarantined."""
    free_bytes: int
    largest_free_bytes: int
    ready_bytes: int
    pending_bytes: int
    quarantined_bytes: int
    """Ended or expired reservations that may still be written to, and dropped chunks that may still be read."""
    num_namespaces: int
    num_chunks: int
    """With at least one ready shard."""
    num_shards: int
    """Ready."""
    num_leases: int
    """Lookup leases included."""
    num_lookup_leases: int
    lookup_lease_bytes: int
    num_reservations: int
    """Open and in time."""
    num_sessions: int
    num_waiting_changes: int
    totals: StoreTotals


_CODES_OF = attrgetter("codes")
_WRITER_ROLE_OF = attrgetter("writer_role")


class Store:
    """All state of one arena but its bytes. Not thread-safe: the caller holds the agent's core lock.

    Unless a method says otherwise it raises `UnknownSession` for a session that is not live, `UnknownObject` for a
    namespace that is not open and for a lease or reservation that is not the session's, and `InvalidRequest` for
    fields out of bounds. A call that raises has changed nothing.
    """

    def __init__(
        self,
        *,
        arena_bytes: int,
        policy: EvictionPolicy,
        limits: StoreLimits,
        new_id: Callable[[], int],
    ) -> None:
        """`new_id` gives positive random numbers for leases and reservations; taken ones are asked for again."""
        self._limits = limits
        self._policy = policy
        self._new_id = new_id
        self._arena_bytes = arena_bytes
        self._allocator = Allocator(arena_bytes)
        self._fragmented_bytes = int(self._allocator.usable_bytes * FRAGMENTED_FRACTION)
        self._stranded_bytes = int(self._allocator.usable_bytes * STRANDED_FRACTION)
        self._max_lookup_bytes = int(arena_bytes * limits.max_lookup_lease_fraction)
        self._namespaces: dict[NamespaceDigest, Namespace] = {}
        self._sessions: dict[int, Session] = {}
        self._num_live_sessions = 0
        # One time to live per table, so that insertion order is the order of expiry.
        self._leases = Leases()
        self._lookup_leases = Leases()
        self._expired_leases: OrderedDict[int, int] = OrderedDict()
        self._reservations = Reservations()
        self._freed_reservations: OrderedDict[int, _FreedReservation] = OrderedDict()
        # Ordered dictionaries wherever the oldest goes first: finding it in a plain one gets slow once many have
        # gone.
        self._changes: OrderedDict[tuple[NamespaceDigest, ChunkKey], None] = OrderedDict()
        self._num_extents = 0
        self._num_ready_shards = 0
        self._num_ready_chunks = 0
        self._ready_bytes = 0
        self._pending_bytes = 0
        self._lookup_bytes = 0
        self._num_lease_entries = 0
        self._uses = 0
        self._hopeless_span: int | None = None
        self._sweep_from = self._allocator.first
        self._totals = StoreTotals()

    @property
    def limits(self) -> StoreLimits:
        """As given."""
        return self._limits

    # Sessions

    def open_session(self, session: SessionId, *, maps_arena: bool, role: str, name: str) -> None:
        """Begin a session; `role` and `name` are kept with the shards that it writes."""
        assert session not in self._sessions, f"session {session} is opened twice"
        self._sessions[session] = Session(session, Writer(role, name), is_mapped=maps_arena)
        self._num_live_sessions += 1

    def end_session(self, session: SessionId) -> None:
        """Drop its leases and abort its reservations. Does nothing for a session that has ended.

        Extents of a session that maps the arena stay quarantined until `mapping_closed`.
        """
        owner = self._sessions.get(session)
        if owner is None or not owner.is_live:
            return
        owner.is_live = False
        self._num_live_sessions -= 1
        for lease in list(owner.leases.values()):
            self._drop_lease(lease)
        for reservation in list(owner.reservations.values()):
            self._end_reservation(reservation, may_be_written=owner.is_mapped)
        self._forget_session(owner)

    def mapping_closed(self, session: SessionId) -> None:
        """The session's mapping is gone: what only waited for that is free. Unknown sessions are ignored.

        Reservations of a live session that are in time stay open; those whose time ran out end here.
        """
        owner = self._sessions.get(session)
        if owner is None or not owner.is_mapped:
            return
        owner.is_mapped = False
        for reservation in list(owner.reservations.values()):
            if reservation.has_expired:
                self._end_reservation(reservation, may_be_written=False)
        for reservation in list(owner.retired.values()):
            self._free_retired(reservation)
        self._forget_session(owner)

    def session_holdings(self, session: SessionId) -> tuple[int, int]:
        """Leases and reservations that a live session holds."""
        owner = self._live_session(session)
        return len(owner.leases), len(owner.reservations)

    # Namespaces

    def open_namespace(self, spec: NamespaceSpec) -> None:
        """Declare a namespace; again with the same shape does nothing.

        At `max_namespaces` the least recently used one that was used and is empty now is closed. Raises `Conflict`
        for another shape under the same digest, `LimitReached` when no namespace can be closed.
        """
        found = self._namespaces.get(spec.digest)
        if found is not None:
            if found.spec.groups != spec.groups:
                raise Conflict(
                    f"namespace {short_hex(spec.digest)} is open with shards {found.spec.groups}, not {spec.groups}: "
                    "two engines disagree on the layout under one digest; run the same version of Larder everywhere"
                )
            self._touch(found)
            return
        if len(self._namespaces) >= self._limits.max_namespaces:
            empty = [n for n in self._namespaces.values() if n.was_used and not n.chunks]
            if not empty:
                raise LimitReached(
                    f"{len(self._namespaces)} namespaces are open, the limit is {self._limits.max_namespaces}; "
                    "evict one that is not used any more, or raise the limit"
                )
            del self._namespaces[min(empty, key=attrgetter("used_at")).spec.digest]
        opened = Namespace(spec)
        self._touch(opened)
        self._namespaces[spec.digest] = opened

    def namespace(self, digest: NamespaceDigest) -> NamespaceSpec:
        """Shape of an open namespace."""
        return self._open_namespace(digest).spec

    # Lookups

    def presence(self, ns: NamespaceDigest, chunks: Sequence[ChunkKey]) -> bytearray:
        """One `Presence` code per chunk and group, chunk by chunk: ABSENT, READY_HERE or PENDING. Changes nothing."""
        namespace = self._open_namespace(ns)
        found = map(namespace.chunks.get, chunks, repeat(namespace.absent))
        return bytearray().join(map(_CODES_OF, found))

    def look_up(
        self,
        session: SessionId,
        ns: NamespaceDigest,
        chunks: Sequence[ChunkKey],
        now_s: float,
        *,
        takes_lease: bool,
        superseded: int = 0,
    ) -> tuple[bytearray, LookupLease | None]:
        """`presence`, and a lease on those of `chunks` (prefix first) that have a ready shard; it counts as an access
        where no lease held before.

        No lease when no shard is ready, or when lookup leases would cover more than their share of the arena.
        `superseded`, a lease of the session, is given back: if it is on just these chunks it becomes the new one, under
        another id. An unknown one is ignored.
        """
        owner = self._live_session(session)
        namespace = self._open_namespace(ns)
        found = list(map(namespace.chunks.get, chunks, repeat(namespace.absent)))
        lease = None
        if takes_lease:
            lease = self._lease_found(owner, namespace, found, now_s, superseded)
        # After the new one is taken: chunks that stay leased are neither let go nor counted as asked for again.
        if superseded in owner.leases or self._expired_leases.get(superseded) == session:
            self.release(session, [superseded], now_s)
        return bytearray().join(map(_CODES_OF, found)), lease

    def count_found_elsewhere(
        self, session: SessionId, ns: NamespaceDigest, num_chunks: int
    ) -> None:
        """Count chunks that a lookup of `session` was told to be at other agents, see `Flow`."""
        key = (ELSEWHERE, self._live_session(session).writer.role)
        found = self._open_namespace(ns).num_found
        found[key] = found.get(key, 0) + num_chunks

    def acquire(
        self,
        session: SessionId,
        ns: NamespaceDigest,
        shards: Sequence[tuple[ChunkKey, int, int]],
        now_s: float,
    ) -> AcquireAnswer:
        """Take a lease on those of `shards` (chunk, group, shard; prefix first) that are ready.

        The lease exists even when nothing is ready, so that it can be extended. Counts as an access of chunks that no
        lease held before, so that lookup and load of one request count once. Raises `TooManyLeases` above
        `max_leases` and `max_lease_entries`.
        """
        owner = self._live_session(session)
        namespace = self._open_namespace(ns)
        bits = self._bits_of(namespace, shards)
        if not self._has_lease_room(2 * len(shards)):
            raise self._too_many_leases()
        self._touch(namespace)
        lease = Lease(self._fresh_id(), owner, {}, 0.0, is_lookup=False)
        owner.leases[lease.lease_id] = self._leases[lease.lease_id] = lease
        return self._lease_shards(lease, namespace, range(len(shards)), shards, bits, now_s)

    def extend_lease(
        self,
        session: SessionId,
        lease_id: int,
        ns: NamespaceDigest,
        positions: Sequence[int],
        shards: Sequence[tuple[ChunkKey, int, int]],
        now_s: float,
    ) -> AcquireAnswer:
        """Add shards to a lease of `acquire`, e.g. because they became ready; the answer names them by `positions`.

        Renews the lease. Raises `UnknownObject` when it ran out: what was read under it is worthless; `TooManyLeases`
        above `max_lease_entries`.
        """
        owner = self._live_session(session)
        namespace = self._open_namespace(ns)
        bits = self._bits_of(namespace, shards)
        lease = owner.leases.get(lease_id)
        if lease is None or lease.is_lookup or lease.expires_at_s <= now_s:
            raise UnknownObject(f"lease {lease_id} ran out or was never taken; acquire again")
        if self._num_lease_entries + 2 * len(shards) > self._limits.max_lease_entries:
            raise self._too_many_leases()
        return self._lease_shards(lease, namespace, positions, shards, bits, now_s)

    def release(
        self,
        session: SessionId,
        lease_ids: Sequence[int],
        now_s: float,
        *,
        read: Container[int] = (),
    ) -> list[bool]:
        """Give leases back; per lease whether it held until now.

        Chunks under leases of acquires that held and are in `read` count as read. Raises `UnknownObject`, and
        releases nothing, when one is not the session's or was released before.
        """
        owner = self._live_session(session)
        seen: set[int] = set()
        for lease_id in lease_ids:
            known = lease_id in owner.leases or self._expired_leases.get(lease_id) == session
            if not known or lease_id in seen:
                raise UnknownObject(
                    f"lease {lease_id} is not this session's, or was released before; nothing was released"
                )
            seen.add(lease_id)
        held = []
        for lease_id in lease_ids:
            lease = owner.leases.get(lease_id)
            if lease is None:
                del self._expired_leases[lease_id]
                held.append(False)
                continue
            held.append(lease.expires_at_s > now_s)
            if not held[-1]:
                self._totals.num_expired_leases += 1
            elif lease_id in read and not lease.is_lookup and lease.chunks:
                self._count_read(owner, lease)
            self._drop_lease(lease)
        return held

    def lease_holds(self, session: SessionId, lease_id: int, now_s: float) -> bool:
        """Whether the lease is the session's and has not run out."""
        owner = self._sessions.get(session)
        lease = owner.leases.get(lease_id) if owner is not None else None
        return lease is not None and lease.expires_at_s > now_s

    def leased_extent(self, session: SessionId, lease_id: int, position: int) -> tuple[int, int]:
        """Offset and length of the shard that `acquire` answered as ready at `position`."""
        lease = self._live_session(session).leases.get(lease_id)
        if lease is None:
            raise UnknownObject(f"lease {lease_id} ran out or is not this session's; acquire again")
        found = lease.shards.get(position)
        if found is None:
            raise UnknownObject(f"lease {lease_id} has no ready shard at position {position}")
        return found[:2]

    def leased_shard(self, session: SessionId, lease_id: int, position: int) -> ReadyShard | None:
        """What `acquire` answered at `position`; None when there was nothing, or the lease is gone."""
        found = self._leased(session, lease_id, position)
        if found is None:
            return None
        offset, length, chunk, bit = found
        slot = chunk.slots[bit]
        assert isinstance(slot, Shard), "a leased shard is gone"
        return ReadyShard(offset, length, slot.piece_checksums(), slot.is_remote, slot.writer.role)

    def drop_corrupt_leased(
        self, session: SessionId, lease_id: int, position: int
    ) -> ChunkKey | None:
        """As `drop_corrupt`, for a chunk whose bytes the caller saw to be wrong while the lease kept them in place.

        Returns the chunk; None when the lease is gone meanwhile (then others may have written there) or the chunk was
        dropped before.
        """
        found = self._leased(session, lease_id, position)
        if found is None or found[2].is_doomed:
            return None
        chunk = found[2]
        key = ChunkKey(chunk.key)
        self.drop_corrupt(chunk.namespace.spec.digest, key)
        return key

    # Stores

    def reserve(
        self,
        session: SessionId,
        ns: NamespaceDigest,
        items: Sequence[ReserveRequestItem],
        now_s: float,
    ) -> list[ReserveAnswer]:
        """Give room for shards, evicting what is coldest and held by nobody. Give chunks prefix first.

        READY and PENDING (whoever writes it, this session included) get no room. NO_SPACE when too much is held.
        """
        owner = self._live_session(session)
        namespace = self._open_namespace(ns)
        bits = self._bits_of(namespace, [(i.chunk, i.group, i.shard) for i in items])
        groups = namespace.spec.groups
        for position, item in enumerate(items):
            expected = groups[item.group].shard_bytes
            if item.size_bytes != expected:
                raise InvalidRequest(
                    f"items[{position}].size_bytes is {item.size_bytes}; shards of group {item.group} in namespace "
                    f"{short_hex(ns)} have {expected} bytes"
                )
            if item.parent is not None and len(item.parent) != DIGEST_BYTES:
                raise InvalidRequest(
                    f"items[{position}].parent_key has {len(item.parent)} bytes; a key has {DIGEST_BYTES}"
                )
            if item.number < 0:
                raise InvalidRequest(
                    f"items[{position}].chunk_number is {item.number}; it counts from 0"
                )
        self._touch(namespace)
        expires_at_s = now_s + self._limits.reservation_ttl_s
        return [
            self._reserve_one(owner, namespace, item, bit, expires_at_s)
            for item, bit in zip(items, bits, strict=True)
        ]

    def commit(
        self,
        session: SessionId,
        items: Sequence[tuple[int, Sequence[int], bool]],
        now_s: float,
        *,
        writers: Mapping[int, Writer] | None = None,
    ) -> list[CommitResult]:
        """Make written shards readable; items are `CommitItem` or equal tuples. Each reservation ends, whatever its
        result.

        `writers`, by reservation, says of shards that the session only brings who wrote them.

        LOST_RACE when the reservation's time ran out and another one was committed, EXPIRED when it ran out,
        CHECKSUM_MISMATCH when a copy into the extent is still in flight. Raises `UnknownObject` for a reservation
        that is not the session's or has ended, `InvalidRequest` for a wrong number of checksums; nothing is committed
        then.
        """
        owner = self._live_session(session)
        batch = []
        seen: set[int] = set()
        for reservation_id, checksums, is_remote in items:
            reservation = self._known_reservation(owner, reservation_id)
            if reservation_id in seen:
                raise UnknownObject(
                    f"reservation {reservation_id} is committed twice in one call; nothing was committed"
                )
            seen.add(reservation_id)
            pieces = num_pieces(reservation.length)
            if len(checksums) != pieces or not all(0 <= c < 1 << 64 for c in checksums):
                raise InvalidRequest(
                    f"reservation {reservation_id} has {len(checksums)} piece_checksums; its "
                    f"{reservation.length} bytes have {pieces} pieces of 1 MiB, each with one xxh3-64"
                )
            batch.append((reservation_id, reservation, checksums, is_remote))
        fresh: list[Chunk] = []
        results = []
        for reservation_id, reservation, checksums, is_remote in batch:
            if isinstance(reservation, Reservation):
                writer = owner.writer if writers is None else writers[reservation_id]
                result = self._commit_one(
                    reservation, checksums, now_s, fresh, writer, is_remote=is_remote
                )
            else:
                del self._freed_reservations[reservation_id]
                result = self._late_commit(
                    self._namespaces.get(reservation.namespace),
                    reservation.chunk,
                    reservation.bit,
                    checksums,
                )
            results.append(result)
        fresh.sort(key=attrgetter("number"), reverse=True)
        for chunk in fresh:
            self._enter_policy(chunk)
            if writers is None:
                stored = chunk.namespace.num_stored
                stored[chunk.writer_role] = stored.get(chunk.writer_role, 0) + 1
        # Shards that come to a chunk under a lookup lease make it cover more; the oldest leases end for that.
        while self._lookup_bytes > self._max_lookup_bytes:
            self._expire_lease(next(iter(self._lookup_leases.values())))
        return results

    def abort(self, session: SessionId, reservation_ids: Sequence[int], now_s: float) -> None:  # noqa: ARG002
        """End reservations; the caller writes to their extents no more. Raises `UnknownObject` as `commit` does."""
        owner = self._live_session(session)
        if len(set(reservation_ids)) != len(reservation_ids):
            raise UnknownObject("a reservation is aborted twice in one call; nothing was aborted")
        known = [(i, self._known_reservation(owner, i)) for i in reservation_ids]
        for reservation_id, reservation in known:
            if isinstance(reservation, Reservation):
                self._end_reservation(reservation, may_be_written=False)
            else:
                del self._freed_reservations[reservation_id]

    def begin_agent_copy(self, session: SessionId, reservation_id: int) -> tuple[int, int]:
        """Offset and length to copy into; until `end_agent_copy` the extent is not given out again, whatever
        happens.
        """
        reservation = self._known_reservation(self._live_session(session), reservation_id)
        if not isinstance(reservation, Reservation) or reservation.has_expired:
            raise UnknownObject(f"reservation {reservation_id} ran out; reserve again")
        reservation.num_copies += 1
        return reservation.extent.offset, reservation.length

    def end_agent_copy(self, session: SessionId, reservation_id: int) -> None:
        """The copy is over, even when session or reservation ended meanwhile."""
        owner = self._sessions.get(session)
        assert owner is not None, f"session {session} is gone while a copy of it is in flight"
        reservation = owner.reservations.get(reservation_id) or owner.retired.get(reservation_id)
        assert reservation is not None, f"no copy is in flight for reservation {reservation_id}"
        assert reservation.num_copies > 0, f"no copy is in flight for reservation {reservation_id}"
        reservation.num_copies -= 1
        if reservation_id in owner.retired:
            self._free_retired(reservation)
            self._forget_session(owner)

    # Time, pressure, admin

    def expire(self, now_s: float, *, max_entries: int = EXPIRE_ENTRIES) -> bool:
        """End what ran out: leases, and reservations, whose shards others may store from now on.

        Stops after about `max_entries` chunks, shards and reservations; True when more is due, so that the caller can
        let others have the lock in between.
        """
        left = max_entries
        for table in (self._leases, self._lookup_leases):
            while table:
                lease = next(iter(table.values()))
                if lease.expires_at_s > now_s:
                    break
                if left <= 0:
                    return True
                left -= 1 + lease.num_entries()
                self._expire_lease(lease)
        while self._reservations:
            reservation = next(iter(self._reservations.values()))
            if reservation.expires_at_s > now_s:
                break
            if left <= 0:
                return True
            left -= 1
            self._expire_reservation(reservation)
        return False

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do; None while nothing can run out."""
        fronts = [
            next(iter(t.values())).expires_at_s for t in (self._leases, self._lookup_leases) if t
        ]
        if self._reservations:
            fronts.append(next(iter(self._reservations.values())).expires_at_s)
        return min(fronts, default=None)

    def evict(self, ns: NamespaceDigest | None, chunks: Sequence[ChunkKey] | None) -> EvictAnswer:
        """Evict chunks that no lease holds: those named, all of a namespace, or all. Shards being written stay."""
        namespaces = self._namespaces.values() if ns is None else [self._open_namespace(ns)]
        num_chunks = num_bytes = num_leased = 0
        for namespace in namespaces:
            if chunks is None:
                found = list(namespace.chunks.values())
            else:
                found = [c for k in dict.fromkeys(chunks) if (c := namespace.chunks.get(k))]
            for chunk in sorted(found, key=attrgetter("number"), reverse=True):
                if chunk.is_leased():
                    num_leased += 1
                elif chunk.ready:
                    num_chunks += 1
                    num_bytes += chunk.num_bytes
                    self._evict(chunk)
        return EvictAnswer(num_chunks, num_bytes, num_leased)

    def evict_to_low_watermark(self, max_chunks: int) -> int:
        """When the arena is above the high watermark, evict down to the low one, at most `max_chunks`; how many
        went.
        """
        usable = self._allocator.usable_bytes
        if self._allocator.used_bytes <= usable * self._limits.high_watermark:
            return 0
        evicted = 0
        while evicted < max_chunks:
            if self._allocator.used_bytes <= usable * self._limits.low_watermark:
                break
            victim = self._policy.next_victim()
            if victim is None:
                break
            assert isinstance(victim, Chunk)
            self._evict(victim)
            evicted += 1
        return evicted

    def drop_corrupt(self, ns: NamespaceDigest, chunk: ChunkKey) -> None:
        """Never serve what is ready of this chunk again: its bytes are wrong. Extents that leases hold go with the
        leases.

        Shards of it that are being written stay. Does nothing for a chunk that is not here.
        """
        namespace = self._open_namespace(ns)
        found = namespace.chunks.get(chunk)
        if found is None or not found.ready:
            return
        self._totals.num_corrupt_chunks += 1
        if not found.is_leased():
            self._retire(found, evicted=False)
            return
        self._leave_policy(found, evicted=False)
        self._count_gone(found)
        self._changed(found)
        del namespace.chunks[chunk]
        found.is_doomed = True
        if found.pending:
            heir = Chunk(namespace, chunk, found.parent_key, found.number)
            for bit, slot in enumerate(found.slots):
                if isinstance(slot, Reservation):
                    slot.chunk = heir
                    heir.slots[bit] = slot
                    found.slots[bit] = None
            heir.pending, found.pending = found.pending, 0
            heir.refresh_codes()
            namespace.chunks[chunk] = heir

    def take_changes(self, max_changes: int | None = None) -> list[HeldChunk]:
        """Chunks whose ready shards changed since they were last taken, oldest change first, with what is ready
        now.
        """
        if not self._changes:
            return []
        if max_changes is None or max_changes >= len(self._changes):
            keys = list(self._changes)
            self._changes.clear()
        else:
            keys = [key for key, _ in zip(self._changes, range(max_changes), strict=False)]
            for key in keys:
                del self._changes[key]
        return [HeldChunk(ns, chunk, self._bitmap(ns, chunk)) for ns, chunk in keys]

    def counts(self) -> StoreCounts:
        """Gauges and totals; O(1)."""
        used = self._allocator.used_bytes
        return StoreCounts(
            arena_bytes=self._arena_bytes,
            used_bytes=used,
            free_bytes=self._allocator.free_bytes,
            largest_free_bytes=self._allocator.largest_free_bytes,
            ready_bytes=self._ready_bytes,
            pending_bytes=self._pending_bytes,
            quarantined_bytes=used - self._ready_bytes - self._pending_bytes,
            num_namespaces=len(self._namespaces),
            num_chunks=self._num_ready_chunks,
            num_shards=self._num_ready_shards,
            num_leases=len(self._leases) + len(self._lookup_leases),
            num_lookup_leases=len(self._lookup_leases),
            lookup_lease_bytes=self._lookup_bytes,
            num_reservations=len(self._reservations),
            num_sessions=self._num_live_sessions,
            num_waiting_changes=len(self._changes),
            totals=StoreTotals(
                **{name: getattr(self._totals, name) for name in StoreTotals.__slots__}
            ),
        )

    def held(self, ns: NamespaceDigest, chunks: Sequence[ChunkKey]) -> list[HeldChunk]:
        """What is ready of these chunks; those of which nothing is, and a namespace that is not open, are left out."""
        namespace = self._namespaces.get(ns)
        if namespace is None:
            return []
        found = map(namespace.chunks.get, chunks, repeat(namespace.absent))
        return [
            HeldChunk(ns, key, chunk.ready)
            for key, chunk in zip(chunks, found, strict=True)
            if chunk.ready
        ]

    def chunk_keys(
        self, ns: NamespaceDigest | None
    ) -> list[tuple[NamespaceDigest, list[ChunkKey]]]:
        """Keys of all chunks of a namespace, or of all namespaces, those stored first first: a copy, quick to make, so
        that everything can be gone through in slices, with the lock let go in between.
        """
        namespaces = self._namespaces.values() if ns is None else [self._open_namespace(ns)]
        return [(n.spec.digest, list(n.chunks)) for n in namespaces]

    def list_namespaces(self) -> list[NamespaceSummary]:
        """Open namespaces, most recently used first; bytes without padding."""
        used = sorted(self._namespaces.values(), key=attrgetter("used_at"), reverse=True)
        return [NamespaceSummary(n.spec, n.num_ready, n.num_bytes) for n in used]

    def flows(self, readers: Collection[str] = ()) -> list[Flow]:
        """One per namespace, role that wrote, and role that read or is one of `readers`."""
        rows = []
        for digest, namespace in self._namespaces.items():
            pairs = {*namespace.num_found, *namespace.num_read}
            writers = {*namespace.num_stored, *(writer for writer, _ in pairs)}
            pairs |= {(writer, reader) for writer in writers for reader in readers}
            rows += [
                Flow(
                    digest, writer, reader, namespace.num_stored.get(writer, 0),
                    namespace.num_found.get((writer, reader), 0), namespace.num_read.get((writer, reader), 0),
                )
                for writer, reader in sorted(pairs)
            ]  # fmt: skip
        return rows

    def list_shards(self, ns: NamespaceDigest, chunk: ChunkKey) -> list[ShardSummary]:
        """Shards of a chunk, ready or pending, by group and shard; empty for a chunk that is not here."""
        namespace = self._open_namespace(ns)
        found = namespace.chunks.get(chunk)
        summaries = []
        for bit, slot in enumerate(found.slots if found is not None else ()):
            if found is None or slot is None:
                continue
            group, shard = namespace.shape_of(bit)
            is_ready = isinstance(slot, Shard)
            writer = slot.writer if isinstance(slot, Shard) else slot.session.writer
            summaries.append(
                ShardSummary(
                    group=group,
                    shard=shard,
                    is_ready=is_ready,
                    offset=slot.extent.offset,
                    length=namespace.spec.groups[group].shard_bytes,
                    num_leases=found.pins + found.lookup_pins if is_ready else 0,
                    writer_role=writer.role,
                    writer_name=writer.name,
                )
            )
        return summaries

    def check_invariants(self) -> None:
        """Raise AssertionError when any part of the state contradicts another. O(everything): for tests."""
        try:
            self._check()
        except AssertionError as problem:
            raise AssertionError(f"{problem}\n{self._dump()}") from problem

    # What the public part uses: names and checks

    def _live_session(self, session: int) -> Session:
        found = self._sessions.get(session)
        if found is None or not found.is_live:
            raise UnknownSession(f"session {session} is not live; open a session")
        return found

    def _open_namespace(self, digest: NamespaceDigest) -> Namespace:
        found = self._namespaces.get(digest)
        if found is None:
            raise UnknownObject(
                f"namespace {short_hex(digest)} is not open on this agent; call OpenNamespace first"
            )
        return found

    def _known_reservation(
        self, owner: Session, reservation_id: int
    ) -> Reservation | _FreedReservation:
        found = owner.reservations.get(reservation_id)
        if found is not None:
            return found
        freed = self._freed_reservations.get(reservation_id)
        if freed is None or freed.session != owner.number:
            raise UnknownObject(
                f"reservation {reservation_id} is not this session's, or has ended; nothing was done"
            )
        return freed

    @staticmethod
    def _bits_of(namespace: Namespace, shards: Sequence[tuple[ChunkKey, int, int]]) -> list[int]:
        bases = namespace.bases
        groups = namespace.spec.groups
        bits = []
        for position, (chunk, group, shard) in enumerate(shards):
            if len(chunk) != DIGEST_BYTES:
                raise InvalidRequest(
                    f"chunk_key of shard {position} has {len(chunk)} bytes; a key has {DIGEST_BYTES}"
                )
            if not 0 <= group < len(groups):
                raise InvalidRequest(
                    f"group of shard {position} is {group}; the namespace has groups 0 to {len(groups) - 1}"
                )
            if not 0 <= shard < groups[group].num_shards:
                raise InvalidRequest(
                    f"shard {position} is number {shard} of group {group}, which has {groups[group].num_shards}"
                )
            bits.append(bases[group] + shard)
        return bits

    def _has_lease_room(self, num_entries: int) -> bool:
        num_leases = len(self._leases) + len(self._lookup_leases)
        return (
            num_leases < self._limits.max_leases
            and self._num_lease_entries + num_entries <= self._limits.max_lease_entries
        )

    def _too_many_leases(self) -> TooManyLeases:
        num_leases = len(self._leases) + len(self._lookup_leases)
        return TooManyLeases(
            f"{num_leases} leases are open on {self._num_lease_entries} chunks and shards, the limits are "
            f"{self._limits.max_leases} and {self._limits.max_lease_entries}; release leases that are not needed "
            "any more"
        )

    def _fresh_id(self) -> int:
        while True:
            found = self._new_id()
            if (
                found > 0
                and found not in self._leases
                and found not in self._lookup_leases
                and found not in self._expired_leases
                and found not in self._reservations
                and found not in self._freed_reservations
            ):
                return found

    def _leased(
        self, session: SessionId, lease_id: int, position: int
    ) -> tuple[int, int, Chunk, int] | None:
        owner = self._sessions.get(session)
        lease = owner.leases.get(lease_id) if owner is not None else None
        return None if lease is None else lease.shards.get(position)

    def _touch(self, namespace: Namespace) -> None:
        self._uses += 1
        namespace.used_at = self._uses

    def _forget_session(self, owner: Session) -> None:
        if not owner.is_live and not owner.retired:
            del self._sessions[owner.number]

    # Leases

    def _lease_shards(
        self,
        lease: Lease,
        namespace: Namespace,
        positions: Iterable[int],
        shards: Sequence[tuple[ChunkKey, int, int]],
        bits: Sequence[int],
        now_s: float,
    ) -> AcquireAnswer:
        ready: list[tuple[int, ReadyShard]] = []
        pending: list[int] = []
        absent: list[int] = []
        accessed: list[Evictable] = []
        leased = lease.chunks
        assert isinstance(leased, dict), "only leases of acquires grow"
        num_entries = lease.num_entries()
        get = namespace.chunks.get
        groups = namespace.spec.groups
        for position, (key, group, _), bit in zip(positions, shards, bits, strict=True):
            chunk = get(key)
            slot = None if chunk is None else chunk.slots[bit]
            if chunk is None or slot is None:
                absent.append(position)
            elif isinstance(slot, Shard):
                if chunk not in leased:
                    if not chunk.is_leased():
                        accessed.append(chunk)
                    leased[chunk] = None
                    chunk.pins += 1
                offset, length = slot.extent.offset, groups[group].shard_bytes
                lease.shards[position] = (offset, length, chunk, bit)
                found = ReadyShard(
                    offset, length, slot.piece_checksums(), slot.is_remote, slot.writer.role
                )
                ready.append((position, found))
            else:
                pending.append(position)
        self._policy.access(accessed)
        self._num_lease_entries += lease.num_entries() - num_entries
        lease.expires_at_s = now_s + self._limits.lease_ttl_s
        self._leases.move_to_end(lease.lease_id)
        return AcquireAnswer(lease.lease_id, ready, pending, absent)

    def _lease_found(
        self,
        owner: Session,
        namespace: Namespace,
        found: list[Chunk],
        now_s: float,
        superseded: int,
    ) -> LookupLease | None:
        self._touch(namespace)
        if found.count(namespace.absent) == len(found):
            return None
        former = owner.leases.get(superseded)
        # What a lease holds stays ready, so that equal lists need no second look.
        is_same = former is not None and former.chunks == found
        leased = found if is_same else [chunk for chunk in found if chunk.ready]
        if not leased:
            return None
        if (
            former is not None
            and former.is_lookup
            and former.expires_at_s > now_s
            and former.chunks == leased
        ):
            return self._renew(former, now_s)
        _count_by_writer(namespace.num_found, leased, owner.writer.role)
        # One pass that pins at once and is undone when refused: this loop is most of a lookup's time under the lock.
        accessed: list[Evictable] = []
        num_bytes = self._lookup_bytes
        for chunk in leased:
            pins = chunk.lookup_pins
            chunk.lookup_pins = pins + 1
            if not pins:
                num_bytes += chunk.num_bytes
                if not chunk.pins:
                    accessed.append(chunk)
        self._policy.access(accessed)
        if num_bytes > self._max_lookup_bytes or not self._has_lease_room(len(leased)):
            for chunk in leased:
                chunk.lookup_pins -= 1
            self._totals.num_refused_lookup_leases += 1
            return None
        self._lookup_bytes = num_bytes
        self._num_lease_entries += len(leased)
        lease = Lease(
            self._fresh_id(),
            owner,
            leased,
            now_s + self._limits.lookup_lease_ttl_s,
            is_lookup=True,
        )
        owner.leases[lease.lease_id] = self._lookup_leases[lease.lease_id] = lease
        return LookupLease(lease.lease_id, lease.expires_at_s, len(leased))

    def _renew(self, lease: Lease, now_s: float) -> LookupLease:
        """Give a lookup lease a new id and a new time; its pins stay as they are."""
        leases = lease.session.leases
        del leases[lease.lease_id], self._lookup_leases[lease.lease_id]
        lease.lease_id = self._fresh_id()
        lease.expires_at_s = now_s + self._limits.lookup_lease_ttl_s
        # At the end: lookup leases lie in the order in which they expire.
        leases[lease.lease_id] = self._lookup_leases[lease.lease_id] = lease
        return LookupLease(lease.lease_id, lease.expires_at_s, len(lease.chunks))

    def _drop_lease(self, lease: Lease) -> None:
        del lease.session.leases[lease.lease_id]
        self._num_lease_entries -= lease.num_entries()
        # Suffix first: chunks that come back to the policy keep the order of their prompt.
        if lease.is_lookup:
            del self._lookup_leases[lease.lease_id]
            for chunk in reversed(lease.chunks):
                pins = chunk.lookup_pins = chunk.lookup_pins - 1
                if not pins:
                    self._lookup_bytes -= chunk.num_bytes
                    if not chunk.is_held():
                        self._let_go(chunk)
        else:
            del self._leases[lease.lease_id]
            for chunk in reversed(lease.chunks):
                pins = chunk.pins = chunk.pins - 1
                if not pins and not chunk.is_held():
                    self._let_go(chunk)

    def _count_read(self, owner: Session, lease: Lease) -> None:
        chunks = list(lease.chunks)
        _count_by_writer(chunks[0].namespace.num_read, chunks, owner.writer.role)

    def _expire_lease(self, lease: Lease) -> None:
        self._drop_lease(lease)
        self._totals.num_expired_leases += 1
        self._expired_leases[lease.lease_id] = lease.session.number
        if len(self._expired_leases) > self._limits.max_released_leases:
            self._expired_leases.popitem(last=False)

    def _let_go(self, chunk: Chunk) -> None:
        self._hopeless_span = None
        if chunk.is_doomed:
            for shard in chunk.shards():
                self._free(shard.extent)
        elif chunk.ready:
            self._policy.let_go(chunk)

    # Reservations

    def _reserve_one(
        self,
        owner: Session,
        namespace: Namespace,
        item: ReserveRequestItem,
        bit: int,
        expires_at_s: float,
    ) -> ReserveAnswer:
        chunk = namespace.chunks.get(item.chunk)
        if chunk is not None and chunk.slots[bit] is not None:
            self._totals.num_duplicate_reserves += 1
            is_ready = chunk.ready >> bit & 1
            return ReserveAnswer(
                ReserveResult.READY if is_ready else ReserveResult.PENDING, 0, 0, 0
            )
        # Room for a chunk must not be made by evicting its other shards.
        if chunk is not None:
            chunk.pins += 1
        extent = self._make_extent(item.size_bytes)
        if chunk is not None:
            chunk.pins -= 1
        if extent is None:
            if chunk is not None and not chunk.is_held():
                self._policy.let_go(chunk)
            self._totals.num_no_space += 1
            return ReserveAnswer(ReserveResult.NO_SPACE, 0, 0, 0)
        if chunk is None:
            chunk = Chunk(namespace, item.chunk, item.parent, item.number)
            namespace.chunks[item.chunk] = chunk
            namespace.was_used = True
        reservation = Reservation(
            self._fresh_id(), owner, chunk, bit, extent, item.size_bytes, expires_at_s
        )
        extent.owner = reservation
        self._num_extents += 1
        self._pending_bytes += extent.length
        chunk.slots[bit] = reservation
        chunk.pending |= 1 << bit
        chunk.refresh_codes()
        owner.reservations[reservation.reservation_id] = reservation
        self._reservations[reservation.reservation_id] = reservation
        return ReserveAnswer(
            ReserveResult.RESERVED, reservation.reservation_id, extent.offset, item.size_bytes
        )

    def _commit_one(
        self,
        reservation: Reservation,
        checksums: Sequence[int],
        now_s: float,
        fresh: list[Chunk],
        writer: Writer,
        *,
        is_remote: bool,
    ) -> CommitResult:
        if not reservation.has_expired and reservation.expires_at_s <= now_s:
            self._run_out(reservation)
        if reservation.has_expired:
            chunk = reservation.chunk
            result = self._late_commit(
                chunk.namespace, ChunkKey(chunk.key), reservation.bit, checksums
            )
            self._end_reservation(reservation, may_be_written=False)
            return result
        if reservation.num_copies:
            self._end_reservation(reservation, may_be_written=False)
            return CommitResult.CHECKSUM_MISMATCH
        chunk, bit, extent = reservation.chunk, reservation.bit, reservation.extent
        owner = reservation.session
        del owner.reservations[reservation.reservation_id]
        del self._reservations[reservation.reservation_id]
        chunk.slots[bit] = Shard(extent, checksums, writer, is_remote=is_remote)
        chunk.pending &= ~(1 << bit)
        if not chunk.ready:
            fresh.append(chunk)
            chunk.writer_role = writer.role
            self._num_ready_chunks += 1
            chunk.namespace.num_ready += 1
        chunk.ready |= 1 << bit
        chunk.refresh_codes()
        extent.owner = chunk
        self._pending_bytes -= extent.length
        self._ready_bytes += extent.length
        chunk.namespace.num_bytes += reservation.length
        self._num_ready_shards += 1
        if chunk.lookup_pins:
            self._lookup_bytes += extent.length
        if chunk.queue is None:
            chunk.num_bytes += extent.length
        else:
            self._policy.resize(chunk, chunk.num_bytes + extent.length)
            if not chunk.is_held():
                self._let_go(chunk)
        self._totals.num_commits += 1
        self._totals.num_committed_bytes += reservation.length
        self._changed(chunk)
        return CommitResult.COMMITTED

    def _late_commit(
        self, namespace: Namespace | None, key: ChunkKey, bit: int, checksums: Sequence[int]
    ) -> CommitResult:
        chunk = None if namespace is None else namespace.chunks.get(key)
        slot = None if chunk is None else chunk.slots[bit]
        if not isinstance(slot, Shard):
            self._totals.num_late_commits += 1
            return CommitResult.EXPIRED
        self._totals.num_lost_races += 1
        if slot.piece_checksums() != tuple(checksums):
            self._totals.num_mismatched_commits += 1
        return CommitResult.LOST_RACE

    def _expire_reservation(self, reservation: Reservation) -> None:
        """The shard is not pending any more. The extent stays while its writer, who may only have been stopped, can
        write to it: the owner of a mapping until it says that it is done, the agent until its copies end. A client that
        never learned of the reservation will never say so, hence nothing waits for the word of one without a mapping.
        """
        self._run_out(reservation)
        owner, chunk = reservation.session, reservation.chunk
        if owner.is_mapped:
            return
        self._freed_reservations[reservation.reservation_id] = _FreedReservation(
            owner.number,
            chunk.namespace.spec.digest,
            ChunkKey(chunk.key),
            reservation.bit,
            reservation.length,
        )
        if len(self._freed_reservations) > self._limits.max_expired_reservations:
            self._freed_reservations.popitem(last=False)
        self._end_reservation(reservation, may_be_written=False)

    def _run_out(self, reservation: Reservation) -> None:
        reservation.has_expired = True
        self._totals.num_expired_reservations += 1
        self._withdraw(reservation)

    def _withdraw(self, reservation: Reservation) -> None:
        del self._reservations[reservation.reservation_id]
        self._pending_bytes -= reservation.extent.length
        chunk = reservation.chunk
        chunk.slots[reservation.bit] = None
        chunk.pending &= ~(1 << reservation.bit)
        chunk.refresh_codes()
        if chunk.ready:
            if not chunk.is_held():
                self._let_go(chunk)
        elif not chunk.pending:
            del chunk.namespace.chunks[ChunkKey(chunk.key)]

    def _end_reservation(self, reservation: Reservation, *, may_be_written: bool) -> None:
        owner = reservation.session
        del owner.reservations[reservation.reservation_id]
        if not reservation.has_expired:
            self._withdraw(reservation)
        if may_be_written or reservation.num_copies:
            reservation.has_expired = True
            owner.retired[reservation.reservation_id] = reservation
        else:
            self._free(reservation.extent)

    def _free_retired(self, reservation: Reservation) -> None:
        """Free the extent when nothing can write to it any more.

        A live session ended it by its own word (abort, commit): only copies of the agent are waited for. A session
        that ended without that may write as long as its mapping is open.
        """
        owner = reservation.session
        if reservation.num_copies or (owner.is_mapped and not owner.is_live):
            return
        del owner.retired[reservation.reservation_id]
        self._free(reservation.extent)

    # Room

    def _free(self, extent: Extent) -> None:
        self._hopeless_span = None
        self._num_extents -= 1
        self._allocator.free(extent)

    def _make_extent(self, length: int) -> Extent | None:
        """An extent, evicting as needed; None when what is held leaves no room."""
        span = aligned(length)
        if self._hopeless_span is not None and span >= self._hopeless_span:
            return None
        while self._num_extents >= self._limits.max_shards:
            if not self._evict_coldest():
                self._hopeless_span = 0
                return None
        while True:
            extent = self._allocator.allocate(length)
            if extent is not None:
                return extent
            is_fragmented = self._allocator.free_bytes >= max(span, self._fragmented_bytes)
            if not is_fragmented and self._evict_coldest():
                continue
            if not self._evict_run(span):
                self._hopeless_span = span
                return None

    def _evict_coldest(self) -> bool:
        victim = self._policy.next_victim()
        if victim is None:
            return False
        assert isinstance(victim, Chunk)
        self._evict(victim)
        return True

    def _evict_run(self, span: int) -> bool:
        """Evict neighbours that make `span` contiguous bytes; False when held extents leave no such run."""
        seeds = self._allocator.largest_holes(RUN_SEEDS)
        worst = seeds[:1]
        for entry in self._policy.coldest(RUN_SEEDS):
            assert isinstance(entry, Chunk)
            seeds.extend(shard.extent for shard in entry.shards())
        prices: dict[object, float | None] = {}

        def price(extent: Extent) -> float | None:
            # Runs that grow from neighbouring seeds ask for the same chunks again.
            if extent.owner not in prices:
                prices[extent.owner] = self._price(extent)
            return prices[extent.owner]

        run = None
        if self._allocator.free_bytes > self._stranded_bytes:
            run = cheapest_run(worst, span, price)
        if run is None:
            run = cheapest_run(seeds, span, price)
        if run is None:
            run = self._sweep(span)
        if run is None:
            return False
        self._totals.num_run_evictions += 1
        # Evicting merges extents, so the chunks are collected before the first one goes.
        for chunk in [e.owner for e in run if not e.is_free]:
            assert isinstance(chunk, Chunk)
            for member in self._subtree(chunk, None):
                self._evict(member)
        return True

    def _sweep(self, span: int) -> list[Extent] | None:
        """A run of anything that is not held, from where the last sweep ended on, then from the start of the
        arena.
        """
        start = self._sweep_from
        if not start.length:  # absorbed by a neighbour meanwhile
            start = self._allocator.first
        run = next_run(start, span, self._last_price, SWEEP_EXTENTS)
        if run is None and start is not self._allocator.first:
            run = next_run(self._allocator.first, span, self._last_price, SWEEP_EXTENTS)
        extent: Extent | None = run[-1] if run else start
        for _ in range(0 if run else SWEEP_EXTENTS):
            extent = extent.following if extent is not None else None
        self._sweep_from = extent or self._allocator.first
        return run

    def _price(self, extent: Extent) -> float | None:
        chunk = extent.owner
        if not isinstance(chunk, Chunk) or chunk.queue is None or chunk.is_held():
            return None
        if chunk.first_child is None:
            return chunk.num_bytes * (1.0 + self._policy.heat(chunk))
        subtree = self._subtree(chunk, MAX_SUBTREE)
        if not subtree or subtree[-1] is not chunk:
            return None
        return sum(c.num_bytes * (1.0 + self._policy.heat(c)) for c in subtree)

    def _last_price(self, extent: Extent) -> float | None:
        chunk = extent.owner
        if not isinstance(chunk, Chunk) or chunk.queue is None or chunk.is_held():
            return None
        return 1.0

    def _subtree(self, chunk: Chunk, limit: int | None) -> list[Chunk]:
        """`chunk` and the cached chunks behind it that are not held, suffixes first.

        With a limit: empty when there are more, or when one of them is held.
        """
        found: list[Chunk] = []
        waiting: list[Evictable] = [chunk]
        while waiting:
            member = waiting.pop()
            assert isinstance(member, Chunk)
            if member.is_held():
                if limit is not None:
                    return []
            elif member.queue is not None:
                found.append(member)
                if limit is not None and len(found) > limit:
                    return []
            child = member.first_child
            while child is not None:
                waiting.append(child)
                child = child.next_sibling
        found.reverse()
        return found

    def _evict(self, chunk: Chunk) -> None:
        self._totals.num_evicted_chunks += 1
        self._totals.num_evicted_bytes += chunk.num_bytes
        self._retire(chunk, evicted=True)

    def _retire(self, chunk: Chunk, *, evicted: bool) -> None:
        """Free what is ready of a chunk that no lease holds; what is pending stays."""
        self._leave_policy(chunk, evicted=evicted)
        self._count_gone(chunk)
        for bit, slot in enumerate(chunk.slots):
            if isinstance(slot, Shard):
                chunk.slots[bit] = None
                self._free(slot.extent)
        chunk.ready = chunk.num_bytes = 0
        chunk.refresh_codes()
        if not chunk.pending:
            del chunk.namespace.chunks[ChunkKey(chunk.key)]
        self._changed(chunk)

    def _count_gone(self, chunk: Chunk) -> None:
        namespace = chunk.namespace
        self._num_ready_chunks -= 1
        namespace.num_ready -= 1
        self._ready_bytes -= chunk.num_bytes
        for bit, slot in enumerate(chunk.slots):
            if isinstance(slot, Shard):
                self._num_ready_shards -= 1
                namespace.num_bytes -= namespace.spec.groups[namespace.shape_of(bit)[0]].shard_bytes

    def _enter_policy(self, chunk: Chunk) -> None:
        self._hopeless_span = None
        parent = None
        if chunk.parent_key is not None:
            parent = chunk.namespace.chunks.get(chunk.parent_key)
            if parent is not None and parent.queue is None:
                parent = None
        chunk.namespace.lineage.enter(chunk, chunk.parent_key, parent)
        self._policy.insert(chunk)

    def _leave_policy(self, chunk: Chunk, *, evicted: bool) -> None:
        self._policy.remove(chunk, evicted=evicted)
        chunk.namespace.lineage.leave(chunk, chunk.parent_key)

    # Changes

    def _changed(self, chunk: Chunk) -> None:
        key = (chunk.namespace.spec.digest, ChunkKey(chunk.key))
        # A change of what already waits keeps its place: its bitmap is read when it is taken.
        self._changes[key] = None
        if len(self._changes) > self._limits.max_changes:
            self._changes.popitem(last=False)
            self._totals.num_forgotten_changes += 1

    def _bitmap(self, ns: NamespaceDigest, chunk: ChunkKey) -> int:
        namespace = self._namespaces.get(ns)
        found = namespace.chunks.get(chunk) if namespace is not None else None
        return found.ready if found is not None else 0

    # Invariants

    def _check(self) -> None:
        self._allocator.check_invariants()
        self._policy.check_invariants()
        pins: dict[Chunk, int] = {}
        lookup_pins: dict[Chunk, int] = {}
        for table, counted in ((self._leases, pins), (self._lookup_leases, lookup_pins)):
            expiry = [lease.expires_at_s for lease in table.values()]
            assert expiry == sorted(expiry), "leases are not in the order of their expiry"
            for lease_id, lease in table.items():
                assert lease.session.is_live, f"lease {lease_id} outlives its session"
                assert lease.session.leases.get(lease_id) is lease, f"lease {lease_id} is lost"
                for chunk in lease.chunks:
                    counted[chunk] = counted.get(chunk, 0) + 1
        every = (*self._leases.values(), *self._lookup_leases.values())
        num_entries = sum(lease.num_entries() for lease in every)
        assert self._num_lease_entries == num_entries, "entries of leases"
        assert num_entries <= self._limits.max_lease_entries, "too many entries of leases"
        assert self._lookup_bytes == sum(c.num_bytes for c in lookup_pins), "lookup lease bytes"
        assert self._lookup_bytes <= self._max_lookup_bytes, "too much under lookup leases"
        assert len(self._expired_leases) <= self._limits.max_released_leases, (
            "too many expired leases"
        )
        self._check_chunks(pins, lookup_pins)
        self._check_extents(pins, lookup_pins)
        self._check_sessions()
        assert len(self._changes) <= self._limits.max_changes, "too many changes"
        assert len(self._freed_reservations) <= self._limits.max_expired_reservations, (
            "too many freed reservations"
        )
        assert self._num_extents <= self._limits.max_shards, "too many shards"

    def _check_chunks(self, pins: dict[Chunk, int], lookup_pins: dict[Chunk, int]) -> None:
        ready_chunks: set[Evictable] = set()
        ready_shards = ready_bytes = pending_bytes = 0
        for namespace in self._namespaces.values():
            namespace.lineage.check_invariants()
            num_ready = num_bytes = 0
            for key, chunk in namespace.chunks.items():
                assert chunk.key == key, "a chunk lies under another key"
                assert chunk.ready or chunk.pending, "an empty chunk"
                assert not chunk.is_doomed, "a dropped chunk is served"
                assert chunk.pins == pins.get(chunk, 0), "pins without leases"
                assert chunk.lookup_pins == lookup_pins.get(chunk, 0), "lookup pins without leases"
                assert chunk.codes == namespace.codes(chunk.ready, chunk.pending), "stale presence"
                chunk_bytes = 0
                for bit, slot in enumerate(chunk.slots):
                    is_ready, is_pending = chunk.ready >> bit & 1, chunk.pending >> bit & 1
                    assert is_ready == isinstance(slot, Shard), "ready bitmap"
                    assert is_pending == isinstance(slot, Reservation), "pending bitmap"
                    if isinstance(slot, Shard):
                        assert slot.extent.owner is chunk, "a shard's extent is another's"
                        chunk_bytes += slot.extent.length
                        ready_shards += 1
                        num_bytes += namespace.spec.groups[namespace.shape_of(bit)[0]].shard_bytes
                    elif isinstance(slot, Reservation):
                        live = self._reservations.get(slot.reservation_id)
                        assert live is slot, "pending without an open reservation"
                        assert (slot.chunk, slot.bit) == (chunk, bit), "a reservation of another"
                        pending_bytes += slot.extent.length
                assert chunk.num_bytes == chunk_bytes, "bytes of a chunk"
                ready_bytes += chunk_bytes
                if chunk.ready:
                    num_ready += 1
                    ready_chunks.add(chunk)
                else:
                    assert chunk.queue is None, "the policy holds a chunk with nothing ready"
                self._check_family(chunk)
            assert (num_ready, num_bytes) == (namespace.num_ready, namespace.num_bytes), (
                "counts of a namespace"
            )
        members = self._policy.members()
        assert len(members) == len(set(members)), "the policy holds a chunk twice"
        assert set(members) == ready_chunks, "the policy does not hold exactly what is ready"
        assert self._num_ready_chunks == len(ready_chunks), "number of ready chunks"
        assert self._num_ready_shards == ready_shards, "number of ready shards"
        assert self._ready_bytes == ready_bytes, "ready bytes"
        assert self._pending_bytes == pending_bytes, "pending bytes"

    @staticmethod
    def _check_family(chunk: Chunk) -> None:
        assert chunk.parent is None or chunk.parent.queue is not None, "the parent is not cached"
        child = chunk.first_child
        preceding: Evictable | None = None
        while child is not None:
            assert child.parent is chunk, "a child has another parent"
            assert child.number > chunk.number, "a child comes before its parent"
            assert child.preceding_sibling is preceding, "broken link between siblings"
            preceding, child = child, child.next_sibling

    def _check_extents(self, pins: dict[Chunk, int], lookup_pins: dict[Chunk, int]) -> None:
        num_extents = 0
        for extent in self._allocator.extents():
            if extent.is_free:
                continue
            num_extents += 1
            owner = extent.owner
            if isinstance(owner, Chunk):
                assert any(s.extent is extent for s in owner.shards()), f"{extent} is of no shard"
                if owner.is_doomed:
                    held = pins.get(owner, 0) + lookup_pins.get(owner, 0)
                    assert held == owner.pins + owner.lookup_pins > 0, (
                        "a dropped chunk stays for nobody"
                    )
                else:
                    assert owner.namespace.chunks.get(ChunkKey(owner.key)) is owner, "a lost chunk"
            else:
                assert isinstance(owner, Reservation), f"{extent} has no owner"
                assert owner.extent is extent, "a reservation has another extent"
                held_by = owner.session
                found = held_by.reservations.get(owner.reservation_id)
                found = found or held_by.retired.get(owner.reservation_id)
                assert found is owner, "a lost reservation"
        assert num_extents == self._num_extents, "number of extents"

    def _check_sessions(self) -> None:
        assert self._num_live_sessions == sum(s.is_live for s in self._sessions.values())
        for number, session in self._sessions.items():
            assert session.number == number, "a session under another number"
            assert session.is_live or session.retired, "an ended session is kept for nothing"
            assert session.is_live or not (session.leases or session.reservations), (
                "owned by the dead"
            )
            for reservation in session.reservations.values():
                is_open = reservation.reservation_id in self._reservations
                assert is_open != reservation.has_expired, "an open reservation has expired"
                assert is_open or session.is_mapped, "an expired reservation waits for nobody"
            for reservation in session.retired.values():
                assert reservation.num_copies or (session.is_mapped and not session.is_live), (
                    "an extent stays quarantined though nobody can write to it"
                )

    def _dump(self) -> str:
        lines = [str(self.counts())]
        lines += [f"  {extent} {extent.owner!r}" for extent in self._allocator.extents()]
        return "\n".join(lines[:200])


def _count_by_writer(
    counts: dict[tuple[str, str], int], chunks: list[Chunk], reader_role: str
) -> None:
    """Count each chunk under (role of its writer, `reader_role`)."""
    roles = list(map(_WRITER_ROLE_OF, chunks))
    while roles:
        # Nearly always all of a prompt have one writer; counting equal strings takes no time beside the rest.
        role = roles[0]
        num = roles.count(role)
        counts[role, reader_role] = counts.get((role, reader_role), 0) + num
        roles = [] if num == len(roles) else [r for r in roles if r != role]
