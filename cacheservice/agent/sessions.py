"""Who is connected: one `Session` per client stream, its token, its arena connection, what it reported.

Invariants: a session that ended owns nothing in the store; memory that it may still write to stays quarantined until
its arena connection closed; a token is good from welcome to end. All changes happen under the core lock, so that the
end of a session and the EOF of its arena connection can't pass each other. Called by `service.py`, `arena_socket.py`,
the ticker in `serve.py`, and the admin service.
"""

from __future__ import annotations

import enum
import itertools
import secrets
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import xxhash

from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.layout import CHECKSUM_PIECE_BYTES
from cacheservice.core.outcomes import Outcome, OutcomeKind
from cacheservice.core.store import SessionId
from cacheservice.errors import LimitReached, UnknownSession

TOKEN_BYTES = 16
MAX_OUTCOMES_KEPT = 4096
MAX_REFUSED_KEPT = 16
REFUSED_KEPT_S = 60.0
"""A client that is refused tries again within seconds, so what is older is over."""
MAX_SHOWN_NAME = 128
_MAX_LEASES_NOTED = 64


class ArenaState(enum.Enum):
    """Where a session is with the arena."""

    NOT_WANTED = "not_wanted"
    EXPECTED = "expected"
    CONNECTED = "connected"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class Hello:
    """What a client said of itself, checked."""

    role: str
    half: str
    engine_name: str
    host: str
    rank: int
    vllm_version: str
    larder_version: str
    maps_arena: bool
    protocol: int


class StreamedShard:
    """What came of one reservation through Write: its checksums, made while the bytes were in cache."""

    __slots__ = ("_hasher", "_shard_bytes", "in_call", "num_bytes", "piece_checksums")

    def __init__(self, shard_bytes: int) -> None:
        self._shard_bytes = shard_bytes
        self.num_bytes = 0
        self.piece_checksums: list[int] = []
        self.in_call = False
        """True while a Write call that names the reservation is open."""
        self._hasher = xxhash.xxh3_64()

    def add(self, payload: memoryview) -> None:
        """Take the next bytes, in order."""
        while len(payload):
            room = CHECKSUM_PIECE_BYTES - self.num_bytes % CHECKSUM_PIECE_BYTES
            taken, payload = payload[:room], payload[room:]
            self._hasher.update(taken)
            self.num_bytes += len(taken)
            if self.num_bytes % CHECKSUM_PIECE_BYTES == 0:
                self.piece_checksums.append(self._hasher.intdigest())
                self._hasher.reset()

    def matches(self, checksums: Sequence[int]) -> bool:
        """Whether the whole shard came, with these checksums."""
        seen = list(self.piece_checksums)
        if self.num_bytes % CHECKSUM_PIECE_BYTES:
            seen.append(self._hasher.intdigest())
        return not self.in_call and self.num_bytes == self._shard_bytes and seen == list(checksums)


class StreamedRead(NamedTuple):
    """One shard that a session may read by stream, and what its bytes must be."""

    namespace: NamespaceDigest
    chunk: ChunkKey
    checksums: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Session:
    """One live client."""

    id: SessionId
    token: bytes
    hello: Hello
    started_s: float
    last_ping_s: float
    cancel: Callable[[], object]
    """Ends the client's stream; may be called from any thread."""
    arena: ArenaState
    data_plane: str = "none"
    namespace: NamespaceDigest | None = None
    """The one that it opened last."""
    outcomes: Counter[str] = field(default_factory=Counter)
    asked_tokens: int = 0
    hit_tokens: int = 0
    num_dropped_outcomes: int = 0
    streamed: dict[int, StreamedShard] = field(default_factory=dict)
    """By reservation; an entry lives no longer than the reservation's session."""
    reads: OrderedDict[int, dict[int, StreamedRead]] = field(default_factory=OrderedDict)
    """By lease and position, of sessions without the arena; the oldest leases are forgotten."""

    def note_read(self, lease_id: int, position: int, read: StreamedRead) -> None:
        """Remember what a shard's bytes must be, so that Read can look at what it sends."""
        self.reads.setdefault(lease_id, {})[position] = read
        if len(self.reads) > _MAX_LEASES_NOTED:
            self.reads.popitem(last=False)


@dataclass(frozen=True, slots=True)
class KeptOutcome:
    """One entry of the ring."""

    at_s: float
    engine_name: str
    role: str
    rank: int
    outcome: Outcome
    namespace: NamespaceDigest | None
    """The one that the client had opened last when it reported."""


MAX_PING_INTERVAL_MS = 3000


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Bounds of the registry; times in seconds."""

    max_sessions: int
    ping_timeout_s: float
    arena_connect_s: float


class SessionRegistry:
    """All live sessions. Thread-safe: shares the core lock."""

    def __init__(self, guarded: GuardedStore, limits: SessionLimits) -> None:
        self._guarded = guarded
        self._limits = limits
        self._by_token: dict[bytes, Session] = {}
        self._mapped_after_end: set[SessionId] = set()
        """Sessions that ended while their arena connection was open."""
        self._greeting: dict[int, tuple[float, Callable[[], object]]] = {}
        """Streams that did not send their hello yet: when they came, how to end them."""
        self._numbers = itertools.count(1)
        self._refused: OrderedDict[str, float] = OrderedDict()
        """Sentences about clients whose hello was refused, last heard last, and when that was."""
        self.kept_outcomes: deque[KeptOutcome] = deque(maxlen=MAX_OUTCOMES_KEPT)
        self.outcome_totals: Counter[tuple[str, str, str]] = Counter()
        """By kind, reason and role, since the agent started."""

    @property
    def ping_interval_ms(self) -> int:
        """How often clients are to ping: three times within the time-out, and at least every 3 s."""
        return min(MAX_PING_INTERVAL_MS, int(1000 * self._limits.ping_timeout_s / 3))

    def expect_hello(self, cancel: Callable[[], object]) -> int:
        """Count a stream that just opened; `begin` or `forget_stream` must follow. LimitReached when too many are."""
        now_s = self._guarded.clock()
        with self._guarded.reading():
            if len(self._by_token) + len(self._greeting) >= self._limits.max_sessions:
                raise LimitReached(
                    f"this agent has its maximum of {self._limits.max_sessions} sessions; close one, or start the "
                    "agent with a larger --max-sessions"
                )
            number = next(self._numbers)
            self._greeting[number] = (now_s, cancel)
            return number

    def forget_stream(self, number: int) -> None:
        """The stream closed before its hello was accepted."""
        with self._guarded.reading():
            self._greeting.pop(number, None)

    def note_refused(self, who: str, why: str) -> None:
        """Keep what people should know of a client that got no session; it tries again and again."""
        shown = "".join(c for c in who[:MAX_SHOWN_NAME] if c.isprintable())
        now_s = self._guarded.clock()
        with self._guarded.reading():
            self._refused[f"{shown}: {why}"] = now_s
            self._refused.move_to_end(f"{shown}: {why}")
            if len(self._refused) > MAX_REFUSED_KEPT:
                self._refused.popitem(last=False)

    def refused_hellos(self) -> list[str]:
        """Sentences about clients that were refused in the last minute, newest first."""
        before_s = self._guarded.clock() - REFUSED_KEPT_S
        with self._guarded.reading():
            return [what for what, at_s in reversed(self._refused.items()) if at_s >= before_s]

    def begin(self, number: int, hello: Hello, cancel: Callable[[], object]) -> Session:
        """Make a session of the stream `number`."""
        now_s = self._guarded.clock()
        session = Session(
            id=SessionId(number), token=secrets.token_bytes(TOKEN_BYTES), hello=hello, started_s=now_s,
            last_ping_s=now_s, cancel=cancel,
            arena=ArenaState.EXPECTED if hello.maps_arena else ArenaState.NOT_WANTED,
        )  # fmt: skip
        with self._guarded.changing() as store:
            self._greeting.pop(number, None)
            store.open_session(
                session.id, maps_arena=hello.maps_arena, role=hello.role, name=hello.engine_name
            )
            self._by_token[session.token] = session
        return session

    def end(self, session: Session) -> bool:
        """Release all that the session holds. False when it had ended before."""
        with self._guarded.changing() as store:
            if self._by_token.pop(session.token, None) is None:
                return False
            store.end_session(session.id)
            if session.arena is ArenaState.CONNECTED:
                self._mapped_after_end.add(session.id)
            elif session.arena is not ArenaState.NOT_WANTED:
                # It never came for the arena, or unmapped it already: nobody can write there.
                store.mapping_closed(session.id)
        session.streamed.clear()
        return True

    def live(self, token: bytes) -> Session:
        """The session of a token, or UnknownSession. Takes no lock."""
        session = self._by_token.get(token)
        if session is None:
            raise UnknownSession(
                "session_token is not of a live session; open a session (CacheService.Session) and use its token"
            )
        return session

    def is_live(self, session: Session) -> bool:
        """Whether a session still owns things in the store; meaningful under the core lock."""
        return session.token in self._by_token

    def sessions(self) -> list[Session]:
        """Live sessions, oldest first."""
        return sorted(self._by_token.copy().values(), key=lambda s: s.id)

    def arena_connected(self, token: bytes) -> Session | None:
        """Note that the arena goes to the session of `token`; None when it is not live, wants none or has it."""
        with self._guarded.reading():
            session = self._by_token.get(token)
            if session is None or session.arena is not ArenaState.EXPECTED:
                return None
            session.arena = ArenaState.CONNECTED
            session.data_plane = "shared_memory"
            return session

    def arena_closed(self, session: Session) -> None:
        """The arena connection of a session closed: it unmapped. A session that still lives ends with it."""
        with self._guarded.changing() as store:
            session.arena = ArenaState.CLOSED
            if session.id in self._mapped_after_end:
                self._mapped_after_end.remove(session.id)
                store.mapping_closed(session.id)
                return
        self.dismiss(session)

    def dismiss(self, session: Session) -> None:
        """End a session that broke the protocol, and its stream."""
        self.end(session)
        session.cancel()

    def note_ping(self, session: Session, outcomes: Sequence[Outcome], num_dropped: int) -> None:
        """Keep the session, and what it says became of its lookups, loads and saves."""
        now_s = self._guarded.clock()
        session.last_ping_s = now_s
        session.num_dropped_outcomes = num_dropped
        hello = session.hello
        for outcome in outcomes:
            kind = outcome.kind.name.lower()
            session.outcomes[f"{kind}.{outcome.reason.label}"] += 1
            if outcome.kind is OutcomeKind.LOOKUP:
                session.asked_tokens += outcome.asked_tokens
                session.hit_tokens += outcome.served_tokens
            self.outcome_totals[kind, outcome.reason.label, hello.role] += 1
            self.kept_outcomes.append(
                KeptOutcome(
                    now_s, hello.engine_name, hello.role, hello.rank, outcome, session.namespace
                )
            )

    def end_silent(self) -> list[tuple[Session, str]]:
        """End sessions without a ping, and those that never came for the arena; returns them with the reason."""
        now_s = self._guarded.clock()
        silent = []
        for session in self.sessions():
            if now_s - session.last_ping_s > self._limits.ping_timeout_s:
                silent.append((session, "no ping"))
            elif (
                session.arena is ArenaState.EXPECTED
                and now_s - session.started_s > self._limits.arena_connect_s
            ):
                silent.append((session, "did not come for the arena"))
        for session, _ in silent:
            self.dismiss(session)
        with self._guarded.reading():
            overdue = [
                c
                for came_s, c in self._greeting.values()
                if now_s - came_s > self._limits.ping_timeout_s
            ]
        for cancel in overdue:
            cancel()
        return silent
