"""The client's connection to its agent: one thread that connects, keeps the session, and connects again.

Invariants: a session becomes visible to other calls only when its data plane stands and the agent was asked to open
every namespace in it; what it refused then, or closed since, is asked for again with every ping. A session is never
used again once it ended; everything that is queued (releases, aborts, outcomes) is bounded. The thread's inbox is the
only way into it, so nothing here needs more than one lock. Called by `CacheClient`; moving bytes is left to the planes.

Certificates: TLS looks at them at the handshake only, so a session would outlive them. When the files changed, a
session with the new ones takes the place of the old one within a minute (at random, so that not all engines come at
once). Calls in flight end in the old one, which closes after them; where the new files don't get in, the old one stays.

Threads: the keeper's own; one reader per connection, since a synchronous gRPC stream can only be read by blocking;
gRPC's.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from cacheservice import __version__
from cacheservice.client.channel import open_channel
from cacheservice.client.deadlines import Deadline
from cacheservice.client.lookup_request import lookup_call
from cacheservice.client.plane import Plane
from cacheservice.client.shared_memory import ArenaMapping, SharedMemoryPlane, map_arena
from cacheservice.client.stream import StreamPlane
from cacheservice.client.tls import stamps_of
from cacheservice.client.values import (
    AgentTarget,
    ArenaUser,
    ClientIdentity,
    ClientState,
    DataPlane,
    Deadlines,
)
from cacheservice.core.keys import NamespaceDigest, short_hex
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.outcomes import Outcome, Reason
from cacheservice.core.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_VERSION,
    REFUSAL,
    SPOKEN,
    TOO_MANY_LEASES,
)
from cacheservice.errors import AgentRejected, AgentUnavailable, LarderError
from cacheservice.v1 import cache_pb2, cache_pb2_grpc

_log = logging.getLogger(__name__)

MAX_QUEUED_OUTCOMES = 1024
MAX_OUTCOMES_PER_PING = 256
MAX_QUEUED_IDS = 65_536
MAX_IDS_PER_CALL = 4096
# Bounds of the wire contract; longer texts are cut.
MAX_ENGINE_NAME_BYTES = 128
MAX_HOST_BYTES = 256
MAX_VERSION_BYTES = 64
MAX_REQUEST_ID_BYTES = 256
FIRST_PAUSE_S = 0.05
MAX_PING_INTERVAL_S = 3.0
SILENCE_S = 10.0
"""An agent that leaves a ping unanswered for so long is taken for dead."""
RENEW_WITHIN_S = 60.0
"""How long after TLS files changed a session with the new ones is there at the latest, if the agent takes them."""
RENEW_AGAIN_S = 10.0
"""Pause after a try with new files that failed: the agent may trust them only later, or they are written one by one."""
RETIRE_S = 0.2
"""How long a session that was succeeded stays at least: for calls that took it and did not start yet."""
GOODBYE_S = 0.5
"""How long a close waits at most for the agent's word on outcomes that no ping carried before."""

_Answer = TypeVar("_Answer")

_REASONS = {
    grpc.StatusCode.DEADLINE_EXCEEDED: Reason.DEADLINE,
    grpc.StatusCode.UNAVAILABLE: Reason.AGENT_DOWN,
    grpc.StatusCode.CANCELLED: Reason.AGENT_DOWN,
    grpc.StatusCode.UNAUTHENTICATED: Reason.LEASE_LOST,
    grpc.StatusCode.ABORTED: Reason.LEASE_LOST,
}
_STORING = frozenset({"OpenNamespace", "Reserve", "Write", "Commit", "Abort"})
"""Calls for which RESOURCE_EXHAUSTED is NO_SPACE: nothing can be taken now. For all others it is DEADLINE, unless the
agent says that it has too many leases: an agent out of call slots holds what is asked for as before, and only can't
serve it in time. Not AGENT_DOWN, because the session lives."""


_UNANSWERED = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


class Session:
    """One live session: how to call the agent, and how bytes travel. Thread-safe; never reused once it ended."""

    def __init__(
        self, link: _Link, welcome: cache_pb2.SessionWelcome, mapping_plane: Plane | None
    ) -> None:
        """`mapping_plane` is None where bytes are streamed."""
        self.link = link
        self.stub: Any = cache_pb2_grpc.CacheServiceStub(link.channel)
        self.stub.Lookup = lookup_call(link.channel)
        self.token = welcome.session_token
        self.epoch = welcome.epoch
        self.piece_bytes = welcome.checksum_piece_bytes
        self.plane: Plane = mapping_plane or self._stream_plane()
        self.opened: set[NamespaceDigest] = set()
        """Namespaces that the agent has open, as far as this client knows."""
        self.refused: set[NamespaceDigest] = set()
        """Namespaces that it did not open when it was asked last."""
        self._ended: Reason | None = None
        self._num_users = 0
        self._users = threading.Lock()
        self._faults_logged: set[tuple[str, grpc.StatusCode]] = set()

    def _stream_plane(self) -> Plane:
        return StreamPlane(
            self.link.channel,
            session_token=self.token,
            piece_bytes=self.piece_bytes,
            reason_of=self.reason_of,
        )

    def __enter__(self) -> None:
        """Start a call of several steps."""
        with self._users:
            self._num_users += 1

    def __exit__(self, *_: object) -> None:
        """That call ended."""
        with self._users:
            self._num_users -= 1

    @property
    def is_idle(self) -> bool:
        """Whether no call that entered is in flight."""
        return self._num_users == 0

    def end_reason(self) -> Reason | None:
        """Why the session ended; None while it lives, as far as this client knows."""
        return self._ended

    def end(self, reason: Reason) -> None:
        """Let nothing start in this session any more; the first reason stays."""
        if self._ended is None:
            self._ended = reason

    def call(self, method: str, request: object, timeout_s: float) -> Any | Reason:
        """The answer of a unary call, or why there is none; ends within `timeout_s`."""
        if (ended := self.end_reason()) is not None:
            return ended
        if timeout_s <= 0.0:
            return Reason.DEADLINE
        try:
            return getattr(self.stub, method)(request, timeout=timeout_s)
        except grpc.RpcError as error:
            return self.reason_of(method, error)
        except ValueError:  # gRPC's word for a channel that was closed meanwhile
            return self.end_reason() or Reason.AGENT_DOWN

    def reason_of(self, method: str, error: grpc.RpcError) -> Reason:
        """Translate a failed call; what has no reason of its own is logged once per method and status."""
        code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.UNAUTHENTICATED:
            self.end(Reason.LEASE_LOST)
            self.link.wake()
        if code is grpc.StatusCode.NOT_FOUND and details.startswith("namespace "):
            self._note_closed(details)
            return Reason.NO_SPACE if method in _STORING else Reason.ABSENT
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            is_full = method in _STORING or _said_beside(error).get(REFUSAL) == TOO_MANY_LEASES
            reason = Reason.NO_SPACE if is_full else Reason.DEADLINE
        else:
            reason = _REASONS.get(code, Reason.INTERNAL)
        if self._ended is not None and reason is Reason.AGENT_DOWN:
            return self._ended
        is_fault = reason is Reason.INTERNAL or code is grpc.StatusCode.RESOURCE_EXHAUSTED
        if is_fault and (method, code) not in self._faults_logged:
            self._faults_logged.add((method, code))
            _log.error(
                "the agent refuses a call: method=%s status=%s details=%s",
                method,
                code.name,
                details,
            )
        return reason

    def _note_closed(self, details: str) -> None:
        """The agent closed an empty namespace to make room for another; with the next ping it is opened again."""
        for digest in [d for d in self.opened.copy() if short_hex(d) in details]:
            self.opened.discard(digest)
            _log.info("the agent closed a namespace: namespace=%s", short_hex(digest))


@dataclass(frozen=True, slots=True)
class _Ended:
    """The session stream ended; by the agent's word when `is_answer`, else because nobody is there."""

    message: str
    is_answer: bool
    speaks_older: bool = False
    """True when the hello was refused by an agent that speaks older versions of the contract only."""


class _OlderAgent(AgentRejected):
    """The agent speaks older versions of the contract than the one that was offered."""


class _Link:
    """One connection: channel, session stream, and the thread that reads it into an inbox."""

    def __init__(
        self, target: AgentTarget, inbox: queue.SimpleQueue[object], hello: cache_pb2.SessionHello
    ) -> None:
        self.ended: _Ended | None = None
        """Set by the reader, also when the keeper does not look into the inbox for this link."""
        # Before the files are read: what changes in between counts as changed.
        self.stamps = stamps_of(target.tls) if target.tls is not None else None
        self.channel = open_channel(target)
        self._inbox = inbox
        self._requests: queue.SimpleQueue[cache_pb2.SessionRequest | None] = queue.SimpleQueue()
        self._requests.put(cache_pb2.SessionRequest(hello=hello))
        self._call: Any = cache_pb2_grpc.CacheServiceStub(self.channel).Session(
            iter(self._requests.get, None)
        )
        threading.Thread(target=self._read, name="larder-session-reader", daemon=True).start()

    def send(self, ping: cache_pb2.SessionPing) -> None:
        """Queue a ping."""
        self._requests.put(cache_pb2.SessionRequest(ping=ping))

    def wake(self) -> None:
        """Make the keeper look at its session."""
        self._inbox.put(None)

    def close(self) -> None:
        """End the session and every call of it. Idempotent."""
        self._requests.put(None)
        self._call.cancel()
        self.channel.close()

    def _read(self) -> None:
        try:
            for response in self._call:
                self._inbox.put((self, response))
            ended = _Ended("the agent ended the session", is_answer=True)
        except grpc.RpcError as error:
            code = error.code()
            is_answer = code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            ended = _Ended(f"{code.name}: {error.details()}", is_answer, _speaks_older(error))
        self.ended = ended
        self._inbox.put((self, ended))


class SessionKeeper:
    """Keeps one session with the agent; see the module."""

    def __init__(
        self,
        target: AgentTarget,
        identity: ClientIdentity,
        *,
        deadlines: Deadlines,
        data_plane: DataPlane,
        clock: Callable[[], float],
        on_change: Callable[[ClientState], None] | None,
        arena_user: ArenaUser | None,
    ) -> None:
        """Opens nothing and starts nothing."""
        self._target = target
        self._identity = identity
        self._deadlines = deadlines
        self._data_plane: DataPlane = data_plane
        self._clock = clock
        self._on_change = on_change
        self._arena_user = arena_user
        self._process = os.getpid()
        self._inbox: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        # Guards what follows; notified when a session becomes visible or goes.
        self._changed = threading.Condition()
        self._session: Session | None = None
        self._namespaces: dict[NamespaceDigest, NamespaceSpec] = {}
        self._state = _not_connected("not started")
        self._outcomes: deque[Outcome] = deque()
        self._num_dropped_outcomes = 0
        self._cleanups: deque[tuple[Session, str, int]] = deque()
        # Of the keeper's thread alone.
        self._unanswered: deque[tuple[float, list[Outcome]]] = deque()
        self._last_complaint = ""
        self._renew_at: float | None = None

    # Any thread.

    def start(self) -> None:
        """Start the thread; a second call does nothing."""
        if self._thread is None and not self._is_closing:
            self._process = os.getpid()
            self._thread = threading.Thread(target=self._run, name="larder-session", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """End the session and the thread; idempotent, ends within the deadlines of one call."""
        self._is_closing = True
        with self._changed:
            session = self._session
        if session is not None:
            session.end(Reason.AGENT_DOWN)
        self._inbox.put(None)
        thread = self._thread
        if (
            thread is not None
            and thread is not threading.current_thread()
            and self._process == os.getpid()
        ):
            thread.join(self._deadlines.commit_s + self._deadlines.reconnect_s)
        self._publish(_not_connected("closed"))

    def session(self) -> Session | None:
        """The live session, or None: in that case nothing is there. Always None in a forked child."""
        session = self._session
        if session is None or session.end_reason() is not None or self._process != os.getpid():
            return None
        return session

    def state(self) -> ClientState:
        """How it is connected now."""
        return self._state

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until a session is visible."""
        with self._changed:
            return self._changed.wait_for(lambda: self._session is not None, timeout_s)

    def open_namespace(self, spec: NamespaceSpec, deadline_s: float | None = None) -> bool:
        """Remember `spec` for every session, and open it in the present one within `deadline_s` (None = `reserve_s`).

        False when there is a session and the agent did not open it: then the keeper goes on trying.
        """
        with self._changed:
            self._namespaces[spec.digest] = spec
            session = self.session()
        timeout_s = self._deadlines.reserve_s if deadline_s is None else deadline_s
        return session is None or self._open_in(session, spec, timeout_s) is None

    def num_groups(self, namespace: NamespaceDigest) -> int | None:
        """Groups of an opened namespace."""
        spec = self._namespaces.get(namespace)
        return None if spec is None else len(spec.groups)

    def report(self, outcome: Outcome) -> None:
        """Queue an outcome for the next ping; the oldest goes when the queue is full."""
        with self._changed:
            self._outcomes.append(outcome)
            self._drop_surplus_outcomes()

    def release_later(self, session: Session, lease_id: int) -> None:
        """Give a lease back without waiting."""
        self._queue_cleanup(session, "Release", lease_id)

    def abort_later(self, session: Session, reservation_ids: Iterable[int]) -> None:
        """End reservations without waiting."""
        for reservation_id in reservation_ids:
            self._queue_cleanup(session, "Abort", reservation_id)

    def give_up_reservations(self, session: Session) -> None:
        """End a session of whose reservations the agent may know more than this client, when it maps the arena.

        What this client could write to waits for its word, which it can't give for reservations that it never heard of
        or whose abort was lost. The end of the mapping, after the last copy, is that word for all of them; without a
        mapping the agent frees them by itself.
        """
        if session.plane.name == "shared_memory":
            session.end(Reason.AGENT_DOWN)
            session.link.wake()

    def _queue_cleanup(self, session: Session, method: str, subject: int) -> None:
        with self._changed:
            if session.end_reason() is not None or len(self._cleanups) >= MAX_QUEUED_IDS:
                return  # the agent frees it with the session or by its TTL
            self._cleanups.append((session, method, subject))
            is_first = len(self._cleanups) == 1
        if is_first:
            self._inbox.put(None)

    # The keeper's thread.

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while not self._is_closed():
            link_opened_at = self._clock()
            message = ""
            try:
                message = self._connect_and_serve()
            except LarderError as error:
                message = str(error)
            except Exception:  # noqa: BLE001 - outermost frame: logged, and all is a miss until it works again
                _log.exception("the session thread failed; it tries again")
                message = "internal fault, see the log"
            if self._is_closed():
                return
            self._complain(message)
            if self._clock() - link_opened_at > self._deadlines.reconnect_s * 2:
                pause_s = FIRST_PAUSE_S
            self._idle(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(pause_s * 2, self._deadlines.reconnect_s)

    def _connect_and_serve(self) -> str:
        """One session from hello to its end; returns why it ended, raises LarderError when it did not begin."""
        link, welcome, plane, why_not_shared = self._connect()
        session = Session(link, welcome, plane)
        self._renew_at = None
        try:
            self._make_visible(session, welcome, why_not_shared)
            while (message := self._serve(session, welcome)) is None:
                session, welcome = self._succeed(session, welcome)
            return message
        finally:
            self._make_invisible(session)
            session.end(Reason.AGENT_DOWN)
            session.plane.retire()
            if self._is_closed():
                self._say_goodbye(link)
            link.close()
            self._take_back_outcomes()

    def _succeed(
        self, former: Session, welcome: cache_pb2.SessionWelcome
    ) -> tuple[Session, cache_pb2.SessionWelcome]:
        """Put a session with the present TLS files in the place of `former`; where that fails, `former` stays.

        Called when the agent has confirmed every ping of `former`, so that no outcome is told twice.
        """
        self._renew_at = None
        link = None
        try:
            # TLS goes with an address, so bytes are streamed and there is no mapping to take over.
            link, renewed = self._open_link(maps_arena=False)
            session = Session(link, renewed, None)
            self._make_visible(session, renewed, "")
        except LarderError as error:
            if link is not None:
                link.close()
            if not self._is_closed():
                _log.warning("TLS files changed but don't get in; the old session stays: %s", error)
            self._renew_at = self._clock() + RENEW_AGAIN_S
            return former, welcome
        _log.info("certificates renewed: agent=%s", self._target)
        threading.Thread(
            target=self._retire, args=(former, welcome), name="larder-session-retire", daemon=True
        ).start()
        return session, renewed

    def _retire(self, former: Session, welcome: cache_pb2.SessionWelcome) -> None:
        """Close a session that was succeeded, after its calls in flight. In a thread of its own."""
        deadline = Deadline(self._clock, self._deadlines.load_s)
        interval_s = min(RETIRE_S, welcome.ping_interval_ms / 1000)
        pause = threading.Event()
        while True:
            pause.wait(interval_s)
            if former.is_idle or deadline.has_passed() or self._is_closed():
                break
            former.link.send(cache_pb2.SessionPing())
        former.end(Reason.AGENT_DOWN)
        former.plane.retire()
        former.link.close()

    def _wants_renewal(self, link: _Link, now: float) -> bool:
        """Whether the TLS files are others than those of `link`, and it is time to use them."""
        tls = self._target.tls
        if tls is None:
            return False
        if self._renew_at is not None:
            return now >= self._renew_at
        stamps = stamps_of(tls)
        if stamps is not None and stamps != link.stamps:
            self._renew_at = now + random.uniform(0.0, RENEW_WITHIN_S)
        return False

    def _connect(self) -> tuple[_Link, cache_pb2.SessionWelcome, Plane | None, str]:
        if self._target.socket_dir is None or self._data_plane not in ("auto", "shared_memory"):
            if self._data_plane == "shared_memory":
                raise AgentRejected(
                    "shared memory needs the agent's socket directory, not an address"
                )
            return (*self._open_link(maps_arena=False), None, "")
        link, welcome = self._open_link(maps_arena=True)
        try:
            mapping = self._map_arena(self._target.socket_dir, welcome)
        except LarderError as error:
            link.close()
            if self._data_plane == "shared_memory":
                raise
            # A session that said it would map the arena must not live on without it.
            return (*self._open_link(maps_arena=False), None, f"bytes are streamed: {error}")
        except BaseException:
            link.close()
            raise
        user = self._arena_user
        if user is not None:
            mapping.introduce(user)
        threading.Thread(target=mapping.populate, name="larder-populate", daemon=True).start()
        plane = SharedMemoryPlane(
            mapping,
            welcome.checksum_piece_bytes,
            span_bytes=0 if user is None else user.span_bytes,
        )
        return link, welcome, plane, ""

    def _map_arena(self, socket_dir: Path, welcome: cache_pb2.SessionWelcome) -> ArenaMapping:
        if not welcome.arena_offered:
            raise AgentRejected("the agent does not offer its arena")
        return map_arena(
            socket_dir,
            session_token=welcome.session_token,
            epoch=welcome.epoch,
            arena_bytes=welcome.arena_bytes,
            deadline=Deadline(self._clock, self._deadlines.reconnect_s),
        )

    def _open_link(self, *, maps_arena: bool) -> tuple[_Link, cache_pb2.SessionWelcome]:
        try:
            return self._offer(PROTOCOL_VERSION, maps_arena=maps_arena)
        except _OlderAgent:
            return self._offer(OLDEST_PROTOCOL_VERSION, maps_arena=maps_arena)

    def _offer(self, version: int, *, maps_arena: bool) -> tuple[_Link, cache_pb2.SessionWelcome]:
        identity = self._identity
        half = "UNSPECIFIED" if identity.half is None else identity.half.name
        hello = cache_pb2.SessionHello(
            protocol_version=version,
            role=f"CLIENT_ROLE_{identity.role.name}",
            half=f"CLIENT_HALF_{half}",
            engine_name=_cut(identity.engine_name, MAX_ENGINE_NAME_BYTES),
            host=_cut(identity.host or socket.gethostname(), MAX_HOST_BYTES),
            rank=identity.rank,
            vllm_version=_cut(identity.vllm_version, MAX_VERSION_BYTES),
            larder_version=__version__,
            maps_arena=maps_arena,
        )
        link = _Link(self._target, self._inbox, hello)
        try:
            return link, self._welcome_of(link)
        except BaseException:
            link.close()
            raise

    def _welcome_of(self, link: _Link) -> cache_pb2.SessionWelcome:
        """The agent's answer to the hello; raises LarderError when it is none, or takes too long."""
        deadline = Deadline(self._clock, self._deadlines.reconnect_s)
        while not self._is_closed():
            event = self._next_event(link, deadline.left_s())
            if isinstance(event, _Ended):
                kind = AgentRejected if event.is_answer else AgentUnavailable
                kind = _OlderAgent if event.speaks_older else kind
                raise kind(f"no session with the agent at {self._target}: {event.message}")
            if isinstance(event, cache_pb2.SessionResponse):
                welcome = event.welcome
                if len(welcome.session_token) != 16 or not welcome.checksum_piece_bytes:
                    raise AgentRejected(f"{self._target} does not speak this protocol")
                return welcome
            if deadline.has_passed():
                raise AgentUnavailable(
                    f"the agent at {self._target} did not answer within {self._deadlines.reconnect_s:g} s"
                )
        raise AgentUnavailable("closed")

    def _next_event(self, link: _Link, timeout_s: float) -> object | None:
        """What `link` received next; None after `timeout_s` and when somebody woke the thread."""
        try:
            item = self._inbox.get(timeout=max(0.0, timeout_s))
        except queue.Empty:
            return None
        if isinstance(item, tuple) and item[0] is link:
            event: object = item[1]
            return event
        return None  # a wake-up, or something of an earlier link

    def _make_visible(
        self, session: Session, welcome: cache_pb2.SessionWelcome, why_not_shared: str
    ) -> None:
        """Open every namespace, then let other calls see the session."""
        asked: set[NamespaceDigest] = set()
        while True:
            with self._changed:
                missing = [spec for digest, spec in self._namespaces.items() if digest not in asked]
                if not missing:
                    self._session = session
                    break
            for spec in missing:
                reason = self._open_in(session, spec, self._deadlines.reserve_s)
                if reason in (Reason.AGENT_DOWN, Reason.DEADLINE, Reason.LEASE_LOST):
                    raise AgentUnavailable(
                        f"the agent at {self._target} went away while namespaces were opened"
                    )
                asked.add(spec.digest)
        if why_not_shared:
            _log.warning(
                "connected without shared memory: agent=%s why=%s", self._target, why_not_shared
            )
        plane = None if self._data_plane == "none" else session.plane.name
        _log.info(
            "connected: agent=%s epoch=%08x data_plane=%s", self._target, session.epoch, plane
        )
        self._last_complaint = ""
        self._publish(
            ClientState(
                connected=True,
                epoch=session.epoch,
                data_plane=plane,
                node_number=welcome.node_number,
                message=why_not_shared,
            )
        )

    def _make_invisible(self, session: Session) -> None:
        with self._changed:
            if self._session is session:
                self._session = None
            self._cleanups.clear()

    def _open_missing(self, session: Session, timeout_s: float) -> None:
        """Ask again for the namespaces that are not open, until the agent leaves one such call unanswered."""
        with self._changed:
            missing = [s for digest, s in self._namespaces.items() if digest not in session.opened]
        for spec in missing:
            if self._is_closed() or session.end_reason() is not None:
                return
            if self._open_in(session, spec, timeout_s) is Reason.DEADLINE:
                return

    def _open_in(self, session: Session, spec: NamespaceSpec, timeout_s: float) -> Reason | None:
        request = cache_pb2.OpenNamespaceRequest(
            session_token=session.token,
            namespace_digest=spec.digest,
            description=spec.description,
            tokens_per_chunk=spec.tokens_per_chunk,
            groups=[
                cache_pb2.GroupShape(
                    kind=g.kind, num_shards=g.num_shards, shard_bytes=g.shard_bytes
                )
                for g in spec.groups
            ],
        )
        answer = session.call("OpenNamespace", request, timeout_s)
        if not isinstance(answer, Reason):
            session.opened.add(spec.digest)
            session.refused.discard(spec.digest)
            return None
        if answer not in (Reason.AGENT_DOWN, Reason.DEADLINE, Reason.LEASE_LOST):
            if spec.digest not in session.refused:
                _log.error(
                    "the agent does not open namespace=%s, so nothing of it is cached until it does",
                    short_hex(spec.digest),
                )
            session.refused.add(spec.digest)
        return answer

    def _serve(self, session: Session, welcome: cache_pb2.SessionWelcome) -> str | None:
        """Ping, collect pongs, and do what was queued, until the session ends; returns why.

        None when it is time for a session with other TLS files.
        """
        interval_s = min(max(welcome.ping_interval_ms / 1000, 0.05), MAX_PING_INTERVAL_S)
        next_ping_at = self._clock() + interval_s
        while not self._is_closed():
            event = self._next_event(session.link, next_ping_at - self._clock())
            ended = session.link.ended
            if ended is not None:
                session.end(Reason.LEASE_LOST if ended.is_answer else Reason.AGENT_DOWN)
                return ended.message
            if session.end_reason() is Reason.AGENT_DOWN:
                return "the agent left a reservation or its end unanswered"
            if session.end_reason() is not None:
                return "the agent does not know the session any more"
            if (
                isinstance(event, cache_pb2.SessionResponse)
                and event.WhichOneof("message") == "pong"
            ):
                if self._unanswered:
                    self._unanswered.popleft()
                self._note_pong(event.pong)
                if not self._unanswered and self._wants_renewal(session.link, self._clock()):
                    return None
                continue
            now = self._clock()
            if now >= next_ping_at:
                if self._unanswered and now - self._unanswered[0][0] > SILENCE_S:
                    return f"the agent left a ping unanswered for {SILENCE_S:g} s"
                self._ping(session.link, now)
                next_ping_at = now + interval_s
                self._open_missing(session, min(interval_s, self._deadlines.reserve_s))
            self._clean_up(session, until=next_ping_at)
        return "closed"

    def _note_pong(self, pong: cache_pb2.SessionPong) -> None:
        state = self._state
        message = (
            "the agent drains" if pong.draining else state.message.replace("the agent drains", "")
        )
        if (pong.node_number, message) != (state.node_number, state.message):
            self._publish(
                ClientState(
                    connected=True,
                    epoch=state.epoch,
                    data_plane=state.data_plane,
                    node_number=pong.node_number,
                    message=message,
                )
            )

    def _ping(self, link: _Link, now: float) -> None:
        """Send one ping, or as many as the queued outcomes need."""
        while True:
            with self._changed:
                batch = [
                    self._outcomes.popleft()
                    for _ in range(min(len(self._outcomes), MAX_OUTCOMES_PER_PING))
                ]
                has_more = bool(self._outcomes)
                num_dropped = self._num_dropped_outcomes
            self._unanswered.append((now, batch))
            link.send(
                cache_pb2.SessionPing(
                    outcomes=[
                        cache_pb2.Outcome(
                            kind=f"OUTCOME_KIND_{o.kind.name}",
                            reason=f"OUTCOME_REASON_{o.reason.name}",
                            request_id=_cut(o.request_id, MAX_REQUEST_ID_BYTES),
                            asked_tokens=_u32(o.asked_tokens),
                            served_tokens=_u32(o.served_tokens),
                            duration_ms=_u32(o.duration_ms),
                            num_bytes=max(0, o.num_bytes),
                        )
                        for o in batch
                    ],
                    num_dropped_outcomes=num_dropped,
                )
            )
            if not has_more:
                return

    def _say_goodbye(self, link: _Link) -> None:
        """Send the outcomes of the last calls, which would be lost with this client, and wait for the pong."""
        with self._changed:
            if not self._outcomes:
                return
        deadline = Deadline(self._clock, GOODBYE_S)
        self._ping(link, self._clock())
        while self._unanswered and not deadline.has_passed():
            event = self._next_event(link, deadline.left_s())
            if isinstance(event, _Ended):
                return
            if event is not None:
                self._unanswered.popleft()

    def _take_back_outcomes(self) -> None:
        """Queue again, first in line, what a session that ended did not confirm."""
        with self._changed:
            for _, batch in reversed(self._unanswered):
                self._outcomes.extendleft(reversed(batch))
            self._unanswered.clear()
            self._drop_surplus_outcomes()

    def _drop_surplus_outcomes(self) -> None:
        while len(self._outcomes) > MAX_QUEUED_OUTCOMES:
            self._outcomes.popleft()
            self._num_dropped_outcomes += 1

    def _clean_up(self, session: Session, *, until: float) -> None:
        """Release and abort what was queued, up to the time `until`, when the next ping is due.

        Stops at the first call that the agent leaves unanswered: the next one would take as long. What was not tried is
        for the next round; what was tried and failed is left to the agent's time limits.
        """
        with self._changed:
            queued = [(method, subject) for s, method, subject in self._cleanups if s is session]
            self._cleanups.clear()
        calls: deque[tuple[str, list[int]]] = deque()
        for method in ("Release", "Abort"):
            ids = [subject for m, subject in queued if m == method]
            calls.extend((method, batch) for batch in _batches(ids, MAX_IDS_PER_CALL))
        while calls and not self._is_closed() and session.end_reason() is None:
            method, subjects = calls.popleft()
            answer = _end_all(session, method, subjects, self._deadlines.commit_s)
            if answer is grpc.StatusCode.NOT_FOUND and len(subjects) > 1:
                # The agent refuses a batch with one that it does not know (any more): then each half by itself.
                middle = len(subjects) // 2
                calls.extendleft([(method, subjects[middle:]), (method, subjects[:middle])])
            is_unanswered = answer is grpc.StatusCode.DEADLINE_EXCEEDED
            if method == "Abort" and answer in _UNANSWERED:
                self.give_up_reservations(session)
                return
            if calls and (is_unanswered or self._clock() >= until):
                with self._changed:
                    left = [
                        (session, method, subject) for method, every in calls for subject in every
                    ]
                    self._cleanups.extendleft(reversed(left))
                if not is_unanswered:
                    session.link.wake()
                return

    def _complain(self, message: str) -> None:
        """Say once per outage and cause why there is no session."""
        if message != self._last_complaint:
            _log.warning("no cache agent, going on without cache: %s", message)
            self._last_complaint = message
        self._publish(_not_connected(message))

    def _is_closed(self) -> bool:
        return self._is_closing

    def _publish(self, state: ClientState) -> None:
        with self._changed:
            if state == self._state:
                return
            self._state = state
            self._changed.notify_all()
        if self._on_change is not None:
            try:
                self._on_change(state)
            except Exception:  # noqa: BLE001 - the caller's code may raise anything; the session goes on
                _log.exception("the callback for changes of the connection failed")

    def _idle(self, pause_s: float) -> None:
        """Wait before the next try, or until closed; what comes meanwhile belongs to sessions that ended."""
        deadline = Deadline(self._clock, pause_s)
        while not self._is_closed() and not deadline.has_passed():
            try:
                self._inbox.get(timeout=deadline.left_s())
            except queue.Empty:
                return


def _end_all(
    session: Session, method: str, subjects: list[int], timeout_s: float
) -> grpc.StatusCode | None:
    """Release leases or abort reservations; None, or the status with which that failed."""
    try:
        if method == "Release":
            # Leases whose own release went wrong, and those of lookups: nobody said that they were read under.
            released = cache_pb2.ReleaseRequest(
                session_token=session.token, lease_ids=subjects, unread_lease_ids=subjects
            )
            session.stub.Release(released, timeout=timeout_s)
        else:
            aborted = cache_pb2.AbortRequest(session_token=session.token, reservation_ids=subjects)
            session.stub.Abort(aborted, timeout=timeout_s)
    except grpc.RpcError as error:
        code: grpc.StatusCode = error.code()
        if code is not grpc.StatusCode.NOT_FOUND:
            session.reason_of(method, error)
        return code
    except ValueError:
        pass  # the channel was closed meanwhile, and all went with the session
    return None


def _said_beside(error: Any) -> dict[str, str]:
    """The trailing metadata of a failed call."""
    return {key: str(value) for key, value in error.trailing_metadata() or ()}


def _speaks_older(error: Any) -> bool:
    if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
        return False
    # An agent of version 1 says nothing; only a hello's version has this status.
    newest = _said_beside(error).get(SPOKEN, "1-1").rpartition("-")[2]
    return newest.isdecimal() and int(newest) < PROTOCOL_VERSION


def _not_connected(message: str) -> ClientState:
    return ClientState(connected=False, epoch=None, data_plane=None, node_number=0, message=message)


def _batches(items: list[_Answer], size: int) -> Iterator[list[_Answer]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _cut(text: str, max_bytes: int) -> str:
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _u32(value: int) -> int:
    return min(max(0, int(value)), 0xFFFF_FFFF)
