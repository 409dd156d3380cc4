"""The records that a store is made of: namespaces, chunks, shards, sessions, leases, reservations.

They hold state and answer small questions about themselves; what happens to them is decided in
`cacheservice.core.store`. Millions of chunks and shards live at once, so their records are slotted and share what
they can (presence codes, writers, sizes). Thread rule: as the store.
"""

from __future__ import annotations

import struct
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from cacheservice.core.allocator import Extent
from cacheservice.core.eviction import Evictable
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.lineage import Lineage
from cacheservice.core.outcomes import Presence

MAX_CODE_MEMOS = 4096


class Writer(NamedTuple):
    """Who wrote a shard."""

    role: str
    name: str


class Shard:
    """One readable shard and where its bytes lie."""

    __slots__ = ("checksums", "extent", "is_remote", "writer")

    def __init__(
        self, extent: Extent, checksums: Sequence[int], writer: Writer, *, is_remote: bool
    ) -> None:
        self.extent = extent
        self.checksums = struct.pack(f"<{len(checksums)}Q", *checksums)
        """xxh3-64 of each piece, packed: tuples of integers would cost five times as much."""
        self.writer = writer
        self.is_remote = is_remote

    def piece_checksums(self) -> tuple[int, ...]:
        """xxh3-64 of each piece, first to last."""
        return struct.unpack(f"<{len(self.checksums) // 8}Q", self.checksums)


class Namespace:
    """One open namespace: its shape, and its chunks by key."""

    __slots__ = ("_codes", "absent", "bases", "chunks", "groups", "lineage", "num_bytes", "num_found",
        "num_read", "num_ready", "num_stored", "spec", "used_at", "was_used")  # fmt: skip

    def __init__(self, spec: NamespaceSpec) -> None:
        self.spec = spec
        self.chunks: dict[ChunkKey, Chunk] = {}
        self.lineage = Lineage()
        self.num_ready = 0
        """Chunks with at least one ready shard."""
        self.num_bytes = 0
        """Bytes of ready shards, without padding."""
        self.used_at = 0
        """Order of the last use among all namespaces."""
        self.was_used = False
        """True once a chunk was stored."""
        self.num_stored: dict[str, int] = {}
        """Chunks by role of their writer, see `Flow`."""
        self.num_found: dict[tuple[str, str], int] = {}
        """Chunks by roles of writer and reader, see `Flow`."""
        self.num_read: dict[tuple[str, str], int] = {}
        """Chunks by roles of writer and reader, see `Flow`."""
        self.bases: list[int] = []
        """First bit of each group."""
        self.groups: list[int] = []
        """Bits of each group."""
        bit = 0
        for group in spec.groups:
            self.bases.append(bit)
            self.groups.append(((1 << group.num_shards) - 1) << bit)
            bit += group.num_shards
        self._codes: dict[tuple[int, int], bytes] = {}
        self.absent = Chunk(self, ChunkKey(b""), None, 0)
        """Stands for every chunk that is not here, so that a lookup needs no branch per key."""

    def codes(self, ready: int, pending: int) -> bytes:
        """Presence of a chunk, one code per group; equal answers are one object."""
        found = self._codes.get((ready, pending))
        if found is None:
            if len(self._codes) >= MAX_CODE_MEMOS:
                self._codes.clear()
            found = bytes(
                Presence.READY_HERE
                if ready & mask == mask
                else Presence.PENDING
                if pending & mask
                else Presence.ABSENT
                for mask in self.groups
            )
            self._codes[ready, pending] = found
        return found

    def shape_of(self, bit: int) -> tuple[int, int]:
        """Group and shard of a bit."""
        for group, base in reversed(list(enumerate(self.bases))):
            if bit >= base:
                return group, bit - base
        raise AssertionError(f"bit {bit} is of no group")


class Chunk(Evictable):
    """One chunk of one namespace: per bit nothing, a reservation (pending) or a shard (ready).

    `key`, `number` and `num_bytes` (of the ready extents) are in `Evictable`.
    """

    __slots__ = ("codes", "is_doomed", "lookup_pins", "namespace", "parent_key", "pending", "pins",
        "ready", "slots", "writer_role")  # fmt: skip

    def __init__(
        self, namespace: Namespace, key: ChunkKey, parent_key: ChunkKey | None, number: int
    ) -> None:
        super().__init__(key, number, 0)
        self.namespace = namespace
        self.parent_key = parent_key
        self.slots: list[Shard | Reservation | None] = [None] * namespace.spec.num_shards
        self.ready = 0
        self.pending = 0
        self.codes = namespace.codes(0, 0)
        """What a lookup answers."""
        self.pins = 0
        """Leases of acquires that hold it."""
        self.lookup_pins = 0
        """Leases of lookups that hold it."""
        self.is_doomed = False
        """True when it was dropped and only leases keep its bytes."""
        self.writer_role = ""
        """Who wrote the first of its ready shards."""

    def is_held(self) -> bool:
        """True while a lease holds it or a shard of it is being written."""
        return bool(self.lookup_pins or self.pins or self.pending)

    def is_leased(self) -> bool:
        """True while a lease holds it."""
        return bool(self.lookup_pins or self.pins)

    def refresh_codes(self) -> None:
        """Must follow every change of `ready` or `pending`."""
        self.codes = self.namespace.codes(self.ready, self.pending)

    def shards(self) -> list[Shard]:
        """The ready ones."""
        return [slot for slot in self.slots if isinstance(slot, Shard)]


class Session:
    """One client, and what it owns."""

    __slots__ = ("is_live", "is_mapped", "leases", "number", "reservations", "retired", "writer")

    def __init__(self, number: int, writer: Writer, *, is_mapped: bool) -> None:
        self.number = number
        self.writer = writer
        self.is_live = True
        self.is_mapped = is_mapped
        """True while the client can write to the arena behind the agent's back."""
        self.leases: dict[int, Lease] = {}
        self.reservations: dict[int, Reservation] = {}
        """Not committed or aborted; with those whose time ran out."""
        self.retired: dict[int, Reservation] = {}
        """Ended, but something may still write to their extents."""


class Lease:
    """Permission to read chunks until a time."""

    __slots__ = ("chunks", "expires_at_s", "is_lookup", "lease_id", "session", "shards")

    def __init__(
        self,
        lease_id: int,
        session: Session,
        chunks: list[Chunk] | dict[Chunk, None],
        expires_at_s: float,
        *,
        is_lookup: bool,
    ) -> None:
        self.lease_id = lease_id
        self.session = session
        self.chunks = chunks
        """Each entry is pinned once by this lease: a list for lookups (quick to make), a dictionary for acquires
        (they grow).
        """
        self.shards: dict[int, tuple[int, int, Chunk, int]] = {}
        """Offset, length, chunk and bit by position in the acquire."""
        self.expires_at_s = expires_at_s
        self.is_lookup = is_lookup

    def num_entries(self) -> int:
        """What it holds, as a measure of memory."""
        return len(self.chunks) + len(self.shards)


class Reservation:
    """Room for one shard of one chunk."""

    __slots__ = ("bit", "chunk", "expires_at_s", "extent", "has_expired", "length", "num_copies",
        "reservation_id", "session")  # fmt: skip

    def __init__(
        self,
        reservation_id: int,
        session: Session,
        chunk: Chunk,
        bit: int,
        extent: Extent,
        length: int,
        expires_at_s: float,
    ) -> None:
        self.reservation_id = reservation_id
        self.session = session
        self.chunk = chunk
        self.bit = bit
        self.extent = extent
        self.length = length
        self.expires_at_s = expires_at_s
        self.has_expired = False
        self.num_copies = 0
        """Copies of the agent into the extent that are in flight."""


Leases = OrderedDict[int, Lease]
Reservations = OrderedDict[int, Reservation]
