"""Runs one agent: puts the parts together, serves, drains, stops.

Order of the start: lock of the socket directory, HTTP (alive, not ready), arena (waited for, allocated and prefaulted),
store, index (not waited for), both sockets, then health says SERVING. Order of the end: health says NOT_SERVING and
nothing new is taken, what is in flight may finish, entries leave the index, then everything closes. Called by
`command.py`; tests use `Agent` in their own process.
"""

from __future__ import annotations

import fcntl
import gc
import grp
import logging
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from cacheservice import __version__
from cacheservice.agent.acquire import Acquires
from cacheservice.agent.admin_service import AdminServicer
from cacheservice.agent.announcer import Announcer
from cacheservice.agent.arena import build_arena
from cacheservice.agent.arena_socket import ArenaSocket
from cacheservice.agent.byte_streams import ByteStreams
from cacheservice.agent.config import AgentConfig, HostPort
from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.lookups import Lookups
from cacheservice.agent.memory import wait_for_room
from cacheservice.agent.messages import MAX_MESSAGE_BYTES
from cacheservice.agent.metrics import Metrics, Readings
from cacheservice.agent.pulls import PeerPulls
from cacheservice.agent.remote_hints import RemoteHints
from cacheservice.agent.service import (
    RAW_REQUESTS,
    RAW_RESPONSES,
    AgentFacts,
    CacheServicer,
    ServiceParts,
)
from cacheservice.agent.sessions import SessionLimits, SessionRegistry
from cacheservice.agent.status_page import StatusSources, status_page
from cacheservice.agent.statuses import StatusInterceptor
from cacheservice.agent.tls import CallerCheck, ServerCertificates
from cacheservice.agent.waiting_calls import WaitingCalls
from cacheservice.agent.web import Pages, WebServer
from cacheservice.client.values import TlsFiles
from cacheservice.core.eviction import build_policy
from cacheservice.core.store import SessionId, Store, StoreLimits
from cacheservice.errors import ConfigError, Forbidden, StartCancelled
from cacheservice.index.open import build_index
from cacheservice.index.port import Index, IndexHealth
from cacheservice.v1 import admin_pb2_grpc, cache_pb2, cache_pb2_grpc

_log = logging.getLogger(__name__)

_SESSION = "/cacheservice.v1.CacheService/Session"
SERVICES = ("cacheservice.v1.CacheService", "cacheservice.v1.AdminService")
_PULL_SESSION = SessionId(0)
"""Clients' sessions are numbered from 1."""
_TICK_S = 0.25
_STOPPED_S = 2.0
_GRACE_S = 4.0
"""Longer than the interval of pings."""
_END_CALLS_S = 5.0
_GC_THRESHOLDS = (10_000, 10, 10_000)
"""The last makes full collections as rare as one in a thousand million new records."""
_EVICT_PER_TICK = 256
_INDEX_STATES = {
    IndexHealth.READY: cache_pb2.INDEX_STATE_READY,
    IndexHealth.UNREACHABLE: cache_pb2.INDEX_STATE_UNREACHABLE,
    IndexHealth.REFUSING: cache_pb2.INDEX_STATE_REFUSING,
    IndexHealth.MEMORY: cache_pb2.INDEX_STATE_MEMORY,
}


class Agent:
    """One agent. `start`, then any time `begin_drain`, at last `stop`; not to be started twice."""

    def __init__(
        self,
        config: AgentConfig,
        *,
        index: Index | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`index` None: what the configuration says."""
        self.config = config
        self.epoch = secrets.randbelow(2**32 - 1) + 1
        self._given_index = index
        self._clock = clock
        self._started_s = clock()
        self._draining = threading.Event()
        self._stopping = threading.Event()
        self._undo: list[Callable[[], object]] = []
        self._drain_lock = threading.Lock()
        self._failed_part = ""
        self._has_parts = False
        """True once everything that the pages show is there."""
        self._is_ready = False
        self._cancelled = threading.Event()
        self._waits_for = ""

    # What `start` makes, in its order.
    _guarded: GuardedStore
    _registry: SessionRegistry
    _announcer: Announcer
    _index: Index
    _metrics: Metrics
    _health: health.HealthServicer
    _server: grpc.Server
    _pulls: PeerPulls
    _web: WebServer | None = None
    tcp_port = 0
    """Port of the TCP listener; 0 without one."""

    def start(self) -> None:
        """Serve. Raises ConfigError when it can't, StartCancelled after `cancel_start`; nothing is left behind then."""
        try:
            self._start()
        except BaseException:
            self._close()
            raise

    def cancel_start(self) -> None:
        """Have `start` give up soon, if it has not come to serving yet. May be called by a signal handler."""
        self._cancelled.set()

    def _note_wait(self, what: str) -> None:
        self._waits_for = what

    def _start(self) -> None:
        config = self.config
        _prepare_directory(config)
        self._undo.append(_lock_directory(config.socket_dir))
        for path in (config.agent_socket, config.arena_socket):
            _unlink_stale(path)
        if config.http is not None:
            # First of all: making a large arena takes long, and probes want to know that somebody is at it.
            self._web = WebServer(config.http, self._pages())
            self._undo.append(self._web.stop)
            self._web.start()
        index = self._given_index or build_index(
            config.index, key_prefix=config.key_prefix, username_file=config.index_username_file,
            password_file=config.index_password_file, tls_ca=config.index_ca_file,
            tls_cert=config.index_cert_file, tls_key=config.index_key_file, tls_server_name=config.index_server_name,
        )  # fmt: skip
        self._index = index
        self._undo.append(index.close)
        if config.wait_for_memory_seconds:
            wait_for_room(
                config.cpu, config.wait_for_memory_seconds, cancelled=self._cancelled, tell=self._note_wait
            )  # fmt: skip
        arena = build_arena(config.cpu, cancelled=self._cancelled)
        self._arena = arena
        self._undo.append(arena.close)
        self._calls = ThreadPoolExecutor(
            max_workers=config.max_sessions + config.max_calls, thread_name_prefix="call"
        )
        self._undo.append(self._end_calls)
        limits = StoreLimits(
            reservation_ttl_s=config.reservation_seconds, lease_ttl_s=config.lease_seconds,
            lookup_lease_ttl_s=config.lookup_lease_seconds, max_shards=config.max_shards,
            max_namespaces=config.max_namespaces,
        )  # fmt: skip
        store = Store(
            arena_bytes=config.cpu, policy=build_policy(config.eviction.value.lower()), limits=limits,
            new_id=lambda: secrets.randbits(62) + 1,
        )  # fmt: skip
        self._guarded = guarded = GuardedStore(store, clock=self._clock)
        self._registry = registry = SessionRegistry(
            guarded,
            SessionLimits(config.max_sessions, config.session_seconds, config.session_seconds),
        )
        self._waiting_calls = WaitingCalls(max(1, config.max_calls * 3 // 4))
        hints = RemoteHints(index, clock=self._clock)
        self._pulls = pulls = PeerPulls(
            guarded, arena, hints, session=_PULL_SESSION, node_name=config.node, tls=_peer_tls(config),
            most_s=config.pull_seconds,
        )  # fmt: skip
        self._undo.append(pulls.stop)
        self._byte_streams = ByteStreams(guarded, arena, registry)
        self._arena_socket = ArenaSocket(
            config.arena_socket, arena, self.epoch, registry, allowed_uids=config.allow_uid,
            max_connections=2 * config.max_sessions,
        )  # fmt: skip
        self._metrics = Metrics(
            Readings(
                store=self._counts, gauges=self._gauges, totals=self._totals,
                outcomes=registry.outcome_totals.copy, index=index.counters,
            )
        )  # fmt: skip
        self._build_server(hints)
        # Umask, because gRPC creates its socket itself: it must never be open to others, not even for a moment.
        old_mask = os.umask(0o117)
        try:
            self._arena_socket.start()
            self._undo.append(self._arena_socket.stop)
            if not self._server.add_insecure_port(f"unix:{config.agent_socket.absolute()}"):
                raise ConfigError(
                    f"--socket-dir {config.socket_dir}: can't listen on {config.agent_socket}"
                )
        except (OSError, RuntimeError) as error:
            raise ConfigError(
                f"--socket-dir {config.socket_dir}: can't listen there: {error}"
            ) from error
        finally:
            os.umask(old_mask)
        _open_sockets_to_group(config)
        self._listen(config)
        # After the port is known, before anybody can store.
        self._announcer = Announcer(
            index,
            guarded,
            node_name=config.node,
            address=self._advertised(),
            epoch=self.epoch,
            clock=self._clock,
        )
        self._announcer.start()
        self._has_parts = True
        self._server.start()
        self._ticker = threading.Thread(target=self._tick, name="ticker", daemon=True)
        self._ticker.start()
        for service in ("", *SERVICES):
            self._health.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._is_ready = True

    @property
    def http_port(self) -> int:
        """Port of the HTTP server; 0 without one."""
        return self._web.port if self._web is not None else 0

    @property
    def guarded(self) -> GuardedStore:
        """The store, for tests."""
        return self._guarded

    @property
    def registry(self) -> SessionRegistry:
        """The sessions, for tests."""
        return self._registry

    @property
    def arena(self) -> Any:
        """The arena, for tests."""
        return self._arena

    def begin_drain(self) -> None:
        """Take nothing new, say so to everybody, leave the index. Returns at once; idempotent."""
        with self._drain_lock:
            if self._draining.is_set():
                return
            self._draining.set()
        _log.info("draining seconds=%.1f", self.config.drain_seconds)
        self._health.enter_graceful_shutdown()
        threading.Thread(
            target=self._announcer.stop,
            args=(self.config.drain_seconds,),
            name="drain",
            daemon=True,
        ).start()

    def stop(self) -> None:
        """Drain within the configured time, then close everything."""
        deadline_s = self._clock() + self.config.drain_seconds
        self.begin_drain()
        while self._clock() < deadline_s and self._has_work():
            self._stopping.wait(0.05)
        self._announcer.stop(max(0.0, deadline_s - self._clock()))
        self._stopping.set()
        self._server.stop(grace=min(1.0, max(0.0, deadline_s - self._clock()))).wait()
        self._close()
        _log.info("stopped node=%s", self.config.node)

    def summary(self) -> str:
        """One line on what is running where."""
        config = self.config
        state = self._index.status()
        transport = "shared memory and streams"
        if config.listen is not None:
            transport += f", tcp={self._advertised()} {'mTLS' if config.speaks_tls else 'insecure'}"
        return (
            f"ready node={config.node} arena_bytes={config.cpu} epoch={self.epoch:08x} sockets={config.socket_dir} "
            f"index={state.health.value} eviction={config.eviction.value} transport={transport}"
            + (f" http={config.http.host}:{self.http_port}" if config.http else "")
        )

    def _build_server(self, hints: RemoteHints) -> None:
        config = self.config
        self._caller_check = CallerCheck(speaks_tls=config.speaks_tls, owner=config.tls_owner)
        interceptor = StatusInterceptor(
            check_caller=self._check_caller, count_call=self._metrics.count_call,
            raw_requests=RAW_REQUESTS, raw_responses=RAW_RESPONSES,
        )  # fmt: skip
        num_threads = config.max_sessions + config.max_calls
        self._server = grpc.server(
            self._calls,
            interceptors=[interceptor],
            maximum_concurrent_rpcs=num_threads,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.so_reuseport", 0),
                # Peers behind a dead link are found out without waiting for TCP.
                ("grpc.keepalive_time_ms", 10_000),
                ("grpc.keepalive_timeout_ms", 5_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
                ("grpc.max_metadata_size", 16 * 1024),
            ],
        )
        self._undo.append(lambda: self._server.stop(grace=None).wait(2.0))
        facts = AgentFacts(
            node_name=config.node, epoch=self.epoch, arena_bytes=config.cpu,
            lease_ttl_ms=int(config.lease_seconds * 1000),
            lookup_lease_ttl_ms=int(config.lookup_lease_seconds * 1000),
            reservation_ttl_ms=int(config.reservation_seconds * 1000),
            node_number=self._node_number, is_draining=self._draining.is_set,
        )  # fmt: skip
        lookups = Lookups(
            self._guarded, hints, self._pulls, self._waiting_calls, own_epoch=self.epoch,
        )  # fmt: skip
        parts = ServiceParts(
            guarded=self._guarded, registry=self._registry, lookups=lookups,
            acquires=Acquires(self._guarded, self._pulls, self._waiting_calls),
            byte_streams=self._byte_streams, status=self._status,
        )  # fmt: skip
        cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheServicer(facts, parts), self._server)
        admin = AdminServicer(self._guarded, self._registry, drain=self.begin_drain)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(admin, self._server)
        self._health = health.HealthServicer()
        for service in ("", *SERVICES):
            self._health.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)

    def _check_caller(self, method: str, context: grpc.ServicerContext) -> None:
        try:
            self._caller_check.check(method, context)
        except Forbidden as error:
            if method == _SESSION:
                host = str(context.peer()).rpartition(":")[0]
                self._registry.note_refused(f"a client at {host}", str(error))
            raise

    def _listen(self, config: AgentConfig) -> None:
        if config.listen is None:
            return
        try:
            if config.speaks_tls:
                assert config.tls_cert is not None
                assert config.tls_key is not None
                assert config.tls_ca is not None
                self._certificates = ServerCertificates(
                    cert=config.tls_cert, key=config.tls_key, ca=config.tls_ca
                )
                port = self._server.add_secure_port(
                    str(config.listen), self._certificates.credentials()
                )
            else:
                port = self._server.add_insecure_port(str(config.listen))
        except RuntimeError as error:
            raise ConfigError(
                f"--listen {config.listen}: can't listen there: {error}; choose another port"
            ) from error
        if not port:
            raise ConfigError(f"--listen {config.listen}: can't listen there; choose another port")
        self.tcp_port = port

    def _advertised(self) -> str:
        config = self.config
        if config.listen is None:
            return ""
        address = config.advertise or config.listen
        return str(HostPort(address.host, address.port or self.tcp_port))

    def _node_number(self) -> int:
        return self._announcer.node_number

    def _tick(self) -> None:
        """Time passes: what ran out ends, room is made ahead of need, silent clients go."""
        idle_check_s = grace_s = 0.0
        last_s = self._clock()
        while not self._stopping.wait(_TICK_S):
            try:
                now_s = self._clock()
                if now_s - last_s > _STOPPED_S:
                    # This process was stopped: pings lie unread in its sockets, nobody was silent.
                    _log.warning("agent did not run seconds=%.1f", now_s - last_s)
                    grace_s = now_s + _GRACE_S
                last_s = now_s
                is_more_due = True
                while is_more_due and not self._stopping.is_set():
                    with self._guarded.changing() as store:
                        is_more_due = store.expire(now_s)
                with self._guarded.changing() as store:
                    store.evict_to_low_watermark(_EVICT_PER_TICK)
                silent = self._registry.end_silent() if now_s >= grace_s else []
                for session, why in silent:
                    _log.warning(
                        "session ended id=%d engine=%s why=%s",
                        session.id,
                        session.hello.engine_name,
                        why,
                    )
                if now_s >= idle_check_s:
                    idle_check_s = now_s + 10.0
                    self._pulls.close_idle()
            except Exception:  # noqa: BLE001
                # The outermost frame of the thread. Without it nothing would expire: /healthz says so.
                _log.exception("ticker failed")
                self._failed_part = "ticker"

    def _has_work(self) -> bool:
        counts = self._counts()
        return bool(counts.num_reservations or counts.num_leases)

    def _counts(self) -> Any:
        with self._guarded.reading() as store:
            return store.counts()

    def _gauges(self) -> Mapping[str, float]:
        health_now = self._index.status().health
        sessions = self._registry.sessions()
        return {
            "arena_connections": self._arena_socket.num_connections,
            "peers": self._pulls.num_peers,
            "waiting_announcements": self._announcer.num_waiting,
            "index_ready": float(health_now in (IndexHealth.READY, IndexHealth.MEMORY)),
            "draining": float(self._draining.is_set()),
            "node_number": self._node_number(),
            # Ours for pulls is no client.
            "sessions": len(sessions),
            "shared_memory_sessions": sum(s.data_plane == "shared_memory" for s in sessions),
            "stream_sessions": sum(s.data_plane == "stream" for s in sessions),
        }

    def _totals(self) -> Mapping[str, float]:
        pulls = self._pulls.counts
        return {
            "stream_sent_bytes": self._byte_streams.num_bytes_sent,
            "stream_received_bytes": self._byte_streams.num_bytes_received,
            "pulled_shards": pulls.num_shards,
            "pulled_bytes": pulls.num_bytes,
            "failed_pulls": pulls.num_failed,
            "lost_pull_races": pulls.num_lost_races,
            "announcement_overflows": self._announcer.num_overflows,
            "calls_not_let_wait": self._waiting_calls.num_turned_away,
        }

    def _status(self) -> cache_pb2.GetStatusResponse:
        counts = self._counts()
        index = self._index.status()
        response = cache_pb2.GetStatusResponse(
            node_name=self.config.node, node_number=self._node_number(), epoch=self.epoch,
            larder_version=__version__, uptime_s=int(self._clock() - self._started_s),
            draining=self._draining.is_set(), arena_bytes=counts.arena_bytes, used_bytes=counts.used_bytes,
            num_chunks=counts.num_chunks, num_shards=counts.num_shards, num_leases=counts.num_leases,
            num_reservations=counts.num_reservations, num_sessions=len(self._registry.sessions()),
            index_state=_INDEX_STATES[index.health], index_message=index.message,
            quarantined_bytes=counts.quarantined_bytes, eviction=self.config.eviction.value.lower(),
        )  # fmt: skip
        for name, value in self._metrics.values().items():
            response.counters.add(name=name, value=value)
        return response

    def _pages(self) -> Pages:
        return Pages(
            is_alive=self._is_alive, why_not_ready=self._why_not_ready, metrics=self._exposition,
            status=self._status_page,
        )  # fmt: skip

    def _is_alive(self) -> bool:
        return not self._failed_part and (not self._has_parts or self._arena_socket.is_serving)

    def _why_not_ready(self) -> str:
        if self._draining.is_set():
            return "draining"
        return "" if self._is_ready else self._waits_for or "starting"

    def _exposition(self) -> bytes | None:
        return self._metrics.exposition() if self._has_parts else None

    def _status_page(self, *, with_outcomes: bool, request: str) -> Mapping[str, Any] | None:
        if not self._has_parts:
            return None
        sources = StatusSources(
            node=self.config.node, epoch=self.epoch, eviction=self.config.eviction.value,
            started_s=self._started_s, guarded=self._guarded, registry=self._registry,
            node_number=self._node_number, is_draining=self._draining.is_set, index=self._index.status,
            counters=self._metrics.values,
        )  # fmt: skip
        return status_page(sources, with_outcomes=with_outcomes, request=request)

    def _end_calls(self) -> None:
        """Wait until no handler copies from or to the arena: unmapping it under one would end the process."""
        waiting = threading.Thread(target=self._calls.shutdown, name="end-calls", daemon=True)
        waiting.start()
        waiting.join(_END_CALLS_S)
        if waiting.is_alive():
            _log.warning("calls still run; the arena stays mapped until the process ends")
            self._arena.keep_mapped()

    def _close(self) -> None:
        self._stopping.set()
        while self._undo:
            undo = self._undo.pop()
            try:
                undo()
            except Exception:  # noqa: BLE001
                # The outermost frame of the end: the rest must still be closed.
                _log.exception("closing failed")


def run_agent(config: AgentConfig) -> int:
    """Serve until a signal, then drain. Returns the exit code; a second signal ends the process at once."""
    agent = Agent(config)
    asked = threading.Event()

    def on_signal(number: int, _: object) -> None:
        if asked.is_set():
            _log.warning("second signal; ending at once signal=%d", number)
            os._exit(1)
        asked.set()
        agent.cancel_start()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, on_signal)
    try:
        agent.start()
    except StartCancelled as error:
        _log.info("stopped before it was ready: %s", error)
        return 0
    # A full collection looks at every record of every shard, with all threads stopped. The store's records need none:
    # they are unlinked when they go. So what is here for good is left out, and only the young are looked at, which is
    # where the garbage of calls is.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_GC_THRESHOLDS)
    # The one line that people and `larder up` wait for.
    print(agent.summary(), flush=True)  # noqa: T201
    while not asked.wait(1.0):
        pass
    agent.stop()
    return 0


def _prepare_directory(config: AgentConfig) -> None:
    directory = config.socket_dir
    try:
        if not directory.exists():
            directory.mkdir(parents=True)
            directory.chmod(0o770)
            if config.socket_group is not None:
                os.chown(directory, -1, _group_id(config.socket_group))
    except OSError as error:
        raise ConfigError(f"--socket-dir {directory}: can't be made: {error.strerror}") from error
    if not directory.is_dir():
        raise ConfigError(f"--socket-dir {directory}: is no directory")


def _lock_directory(directory: Path) -> Callable[[], None]:
    """Make this the only agent of the directory; the lock goes with the process."""
    path = directory / "agent.lock"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(
            f"--socket-dir {directory}: can't write there: {error.strerror}"
        ) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        raise ConfigError(
            f"--socket-dir {directory}: another agent serves there; stop it or choose another directory"
        ) from error
    return lambda: os.close(fd)


def _unlink_stale(path: Path) -> None:
    """Remove what an earlier agent left; we hold the lock, so nobody serves there."""
    try:
        if path.is_socket():
            path.unlink()
    except OSError as error:
        raise ConfigError(
            f"{path}: the socket of an earlier agent can't be removed: {error.strerror}"
        ) from error
    if path.exists():
        raise ConfigError(
            f"{path}: is in the way and no socket; remove it or choose another --socket-dir"
        )


def _open_sockets_to_group(config: AgentConfig) -> None:
    try:
        for path in (config.agent_socket, config.arena_socket):
            path.chmod(0o660)
            if config.socket_group is not None:
                os.chown(path, -1, _group_id(config.socket_group))
    except OSError as error:
        raise ConfigError(
            f"--socket-group {config.socket_group}: the sockets can't be given to it: {error.strerror}"
        ) from error


def _group_id(group: str) -> int:
    if group.isdecimal():
        return int(group)
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError as error:
        raise ConfigError(
            f"--socket-group {group}: there is no such group; name one that exists"
        ) from error


def _peer_tls(config: AgentConfig) -> TlsFiles | None:
    if config.tls_cert is None or config.tls_key is None or config.tls_ca is None:
        return None
    return TlsFiles(
        certificate=config.tls_cert, key=config.tls_key, ca=config.tls_ca,
        server_name=config.tls_server_name,
    )  # fmt: skip
