"""The port through which an agent uses the index.

An index answers which nodes claim to hold a chunk. Its answers are hints: bounds-checked here, confirmed by the owner
before any byte moves. Every call returns within the index's time-out (default 20 ms for `lookup` and `nodes`, 1 s for
the rest) or raises `IndexUnavailable`, whose message says what is wrong and what to do; nothing else is raised, except
where a method says so. Thread-safe.

What a call that raised has done is not known: it may have happened, or may still happen. Every call can be repeated
with the effect of one.

Called by: the agent's lookup path (`lookup`, `nodes`) and its announcer thread (everything else).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from cacheservice.core.keys import ChunkKey, NamespaceDigest


@dataclass(frozen=True, slots=True)
class Node:
    """A live agent in the node table."""

    number: int
    """1 to 65535."""
    epoch: int
    """u32, never 0; compared for equality only."""
    name: str
    address: str
    """host:port of its gRPC listener for peers; empty when it has none (nothing can be pulled from it)."""


@dataclass(frozen=True, slots=True)
class Holder:
    """One node's claim to hold shards of one chunk."""

    node: int
    tier: int
    """1 = cpu, 2 = gpu, 3 = disk."""
    epoch: int
    bitmap: int
    """Bit `NamespaceSpec.shard_bit(group, shard)` is set when that shard is ready there."""


@dataclass(frozen=True, slots=True)
class Announcement:
    """What one agent now holds of one chunk; an empty bitmap withdraws it."""

    namespace: NamespaceDigest
    chunk: ChunkKey
    bitmap: int
    """As `Holder.bitmap`; below 2^2040, which is what an entry can hold."""


class IndexHealth(enum.Enum):
    """How the index is, for status, metrics and health pages."""

    READY = "ready"
    UNREACHABLE = "unreachable"
    REFUSING = "refusing"
    """Reached, but wrong password, no permission, or full: the message tells them apart."""
    MEMORY = "memory"


class IndexReason(enum.Enum):
    """What is wrong with the index, for programs: the operator's condition RedisReady has these words."""

    UNREACHABLE = "Unreachable"
    """Nobody answers there, or not in time."""
    AUTH_FAILED = "AuthFailed"
    """Wrong, missing or superfluous user or password, or their file can't be read."""
    PERMISSION_DENIED = "PermissionDenied"
    """The user may not do what an agent needs; the message has the ACL line."""
    FULL = "Full"
    """Out of memory under a policy that evicts nothing."""
    TLS_FAILED = "TlsFailed"
    """The handshake failed, or a TLS file can't be used."""
    REFUSED = "Refused"
    """Anything else that it says no to: a replica, a cluster, no node number, too old."""


@dataclass(frozen=True, slots=True)
class IndexStatus:
    """Health with one sentence that names the remedy. Empty message and no reason when ready, unreachable without a
    reason before the first call: nothing is known to be wrong then."""

    health: IndexHealth
    message: str = ""
    reason: IndexReason | None = None


class Index(Protocol):
    """Who holds what. See the module's docstring for errors and threads."""

    def join(self, *, name: str, address: str, epoch: int) -> int:
        """Take or renew the node number of `name` for this incarnation; returns it (1 to 65535).

        The same name keeps its number across restarts, for a day. Two live agents of one name: the later one gets
        another number; one that comes back at the same non-empty `address` counts as the same agent restarted. Asked
        again by the same incarnation, it answers with the number that it has now. ConfigError: a name or address that
        can't be stored, or an epoch outside 1 to 2^32 - 1.
        """

    def heartbeat(self) -> bool:
        """Renew the lease of the joined node (TTL 10 s, call every 3 s), or take it again when it was lost or `join`
        had failed. True = announce everything again: the index lost our entries (it was restarted or flushed, or our
        node entry had expired or belonged to another incarnation), or they would expire soon.

        After True our number may be another one: `join` tells.
        """

    def leave(self) -> None:
        """Remove the node entry; its remaining entries are dead from then on. Does nothing when not joined."""

    def announce(self, announcements: Sequence[Announcement]) -> None:
        """Replace this node's entry of each chunk (at most 1000 a call); an empty bitmap removes it.

        Fenced: does nothing and raises `IndexUnavailable` when the node table names another epoch for our number, or
        none; the next heartbeat then answers True. ValueError: a bitmap out of range. Entries last as long as the
        index's TTL, from their last announcement.
        """

    def lookup(
        self, namespace: NamespaceDigest, chunks: Sequence[ChunkKey]
    ) -> list[tuple[Holder, ...]]:
        """Claims per chunk, one round trip for at most 4096 chunks; entries of dead epochs and of this node are left
        out, malformed ones are counted and ignored. Only the namespace's first 8 bytes are compared: the owner confirms
        all 32. ValueError: a chunk key of another length than 32 bytes."""

    def nodes(self) -> Mapping[int, Node]:
        """Live nodes by number, at most 1 s old; read-only."""

    def status(self) -> IndexStatus:
        """Health as of the last call; never blocks."""

    def is_alone(self) -> bool:
        """True when nobody else can have announced anything, so that asking is waste. Cheap; never blocks or raises."""

    def counters(self) -> Mapping[str, int]:
        """Counts since start, monotonic: lookups, lookup_errors, malformed_entries, stale_entries, announcements,
        reannouncements."""

    def close(self) -> None:
        """Close connections; idempotent."""
