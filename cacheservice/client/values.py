"""What callers of the client give and get: plain values without behaviour.

Invariant: nothing here knows gRPC, sockets or threads, so that the connector's scheduler half can build and compare
these freely. Called by everyone who uses the client.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from cacheservice.core.keys import ChunkKey
from cacheservice.core.outcomes import Presence, Reason
from cacheservice.errors import ConfigError

DataPlane = Literal["auto", "shared_memory", "stream", "none"]
"""How bytes may travel; `auto` takes shared memory when it can be had, `none` is for clients that move no bytes."""

ChecksumPolicy = Literal["always", "remote"]
"""Which bytes are verified when read: all, or only those that crossed a machine. Writers always make checksums."""

MAX_SOCKET_PATH_BYTES = 107


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files for mutual TLS; read again whenever a connection is made, and that is when they changed."""

    certificate: Path
    """Certificate chain of this client, leaf first."""
    key: Path
    """Private key of the leaf."""
    ca: Path
    """Certificates that the agent's chain must end in."""
    server_name: str | None = None
    """DNS name that the agent's certificate must carry; None = the host of the address."""


@dataclass(frozen=True, slots=True)
class AgentTarget:
    """Where the agent is: a directory with its sockets, or host:port. Exactly one of the two."""

    socket_dir: Path | None = None
    address: str | None = None
    tls: TlsFiles | None = None
    """For `address` only; None = plain TCP, which the agent serves only with --insecure."""

    def __post_init__(self) -> None:
        """Raise ConfigError when the target can't be one."""
        if (self.socket_dir is None) == (self.address is None):
            raise ConfigError(
                "an agent is named by its socket directory or by host:port: give exactly one of them"
            )
        if self.socket_dir is None:
            return
        if self.tls is not None:
            raise ConfigError(
                "TLS files make no sense with a socket directory; leave them out or give an address"
            )
        longest = self.socket_dir.absolute() / "arena.sock"
        if len(bytes(longest)) > MAX_SOCKET_PATH_BYTES:
            raise ConfigError(
                f"{longest} is longer than the {MAX_SOCKET_PATH_BYTES} bytes of a socket path; choose a shorter one"
            )

    @property
    def grpc_target(self) -> str:
        """What gRPC calls it."""
        if self.socket_dir is not None:
            return f"unix:{self.socket_dir.absolute() / 'agent.sock'}"
        assert self.address is not None
        return self.address

    def __str__(self) -> str:
        """For messages to people."""
        return str(
            self.address if self.socket_dir is None else self.socket_dir.absolute() / "agent.sock"
        )


class Role(enum.IntEnum):
    """What a client is to the cache; numbers of `ClientRole` on the wire."""

    PREFILL = 1
    DECODE = 2
    BOTH = 3
    PEER = 4
    TOOL = 5


class Half(enum.IntEnum):
    """Which half of an engine; numbers of `ClientHalf` on the wire."""

    SCHEDULER = 1
    WORKER = 2


class LookupWait(enum.IntEnum):
    """What a lookup may wait for; numbers of the same enum on the wire."""

    NONE = 0
    PENDING = 1
    HAND_OVER = 2


@dataclass(frozen=True, slots=True)
class ClientIdentity:
    """What the client says of itself; shown in status pages."""

    role: Role
    half: Half | None = None
    engine_name: str = ""
    host: str = ""
    rank: int = 0
    vllm_version: str = ""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long each thing may take, in seconds; defaults of the design, section 5."""

    lookup_s: float = 0.1
    """A lookup that waits for nothing."""
    pending_s: float = 1.0
    """How long a lookup waits for chunks that somebody is storing, without a hand-over. Used by the connector."""
    acquire_s: float = 2.0
    """How long the agent may take until each shard of an acquire is ready or given up."""
    reserve_s: float = 2.0
    """A reserve, or opening a namespace."""
    commit_s: float = 2.0
    """A commit, abort or release."""
    load_s: float = 10.0
    """A whole store or retrieve that names no deadline."""
    hand_over_s: float = 5.0
    """How long a lookup waits for a hand-over at most. Used by the connector."""
    reconnect_s: float = 2.0
    """Longest pause between two attempts to reach the agent, and how long one attempt may take."""


@dataclass(frozen=True, slots=True)
class ClientState:
    """How the client is connected."""

    connected: bool
    epoch: int | None
    data_plane: Literal["shared_memory", "stream"] | None
    """How bytes travel; None while not connected, and for clients that move none."""
    node_number: int
    """Number of the agent's node in the index; 0 while unknown."""
    message: str
    """Why it is not connected, or why it streams although it might share memory; empty when all is well."""


class PageSource(Protocol):
    """The caller's memory that a shard is stored from."""

    def gather(self, start: int, stop: int, destination: int) -> None:
        """Copy bytes [start, stop) of the shard to the address `destination`, which has room for just these.

        With shared memory two threads may call at once, for other ranges, in any order; on the stream plane one thread
        calls, in order, though not the one that called `store`.
        """


class PageSink(Protocol):
    """The caller's memory that a shard is retrieved into."""

    def scatter(self, start: int, stop: int, source: int) -> None:
        """Copy bytes [start, stop) of the shard from the address `source`, which is valid during the call only.

        Threads and order are those of `PageSource.gather`; on the stream plane the thread that called `retrieve` calls.
        """


class MappedArena(Protocol):
    """The agent's arena as it lies in this process; it goes when the session does, after the last use."""

    address: int
    num_bytes: int

    def enter(self) -> bool:
        """Start a use of the memory; False when it is going: do not touch it then."""

    def leave(self) -> None:
        """End a use that `enter` began."""


class ArenaUser(Protocol):
    """Whoever copies between the arena and memory of another kind, a GPU's, and prepares the arena for that."""

    span_bytes: int
    """How many bytes one gather or scatter should move at least, of shards that have so many; 0 = piece by piece."""

    def arena_mapped(self, arena: MappedArena) -> None:
        """Memory to copy from and to; it may differ from session to session, and two may be there for a while.

        Called before the session's first copy, in the thread that keeps the session: what takes time belongs on another
        thread, in slices between `enter` and `leave`.
        """

    def arena_unmapping(self, arena: MappedArena) -> None:
        """Nobody uses this memory any more, and it is unmapped when this returns. Called in any thread."""


@dataclass(frozen=True, slots=True)
class ShardWrite:
    """One shard to store."""

    chunk: ChunkKey
    parent: ChunkKey | None
    """Key of the chunk before; None for the first of a chain."""
    number: int
    """Position of the chunk in its chain, from 0."""
    group: int
    shard: int
    size_bytes: int
    """Must equal the namespace's."""
    source: PageSource


@dataclass(frozen=True, slots=True)
class ShardRead:
    """A range of one shard to retrieve."""

    chunk: ChunkKey
    group: int
    shard: int
    size_bytes: int
    """Size of the whole shard; must equal the namespace's."""
    start: int
    """First byte wanted."""
    stop: int
    """Byte after the last one wanted."""
    sink: PageSink


@dataclass(frozen=True, slots=True)
class LookupAnswer:
    """What is there, as far as the agent knows."""

    reason: Reason | None
    """Why there is no answer; None = answered."""
    presence: bytes
    """One `Presence` per chunk and group, chunk by chunk; empty without an answer."""
    num_groups: int
    lease_id: int
    """0 = no lease."""
    lease_expires_at: float
    """On the client's clock, never later than the agent thinks; 0.0 without a lease."""
    epoch: int
    """Incarnation of the agent; 0 without an answer."""

    def of(self, chunk: int, group: int) -> Presence:
        """State of one group of the chunk at this position of the lookup."""
        return Presence(self.presence[chunk * self.num_groups + group])


@dataclass(frozen=True, slots=True)
class StoreResult:
    """What became of one `ShardWrite`: HIT = stored, DUPLICATE = was or is being stored by another, else not stored."""

    reason: Reason
    num_bytes: int
    """Bytes stored by this call."""


@dataclass(frozen=True, slots=True)
class RetrieveResult:
    """What became of one `ShardRead`: HIT = the sink has the bytes, else what the sink got is worthless."""

    reason: Reason
    num_bytes: int
    writer_role: str = ""
    """Role of the client that stored the shard, for clients with the role peer; "" where the agent did not say."""
