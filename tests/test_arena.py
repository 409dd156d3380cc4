"""The arena: sealed, private, allocated before it is handed over, and given only to those who may have it."""

from __future__ import annotations

import array
import ctypes
import errno
import fcntl
import itertools
import mmap
import os
import selectors
import socket
import stat
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess, a_namespace, http_get, local_agent, wait_until
from agent_stub import StubSession, bytes_of, checksums, key_of, stub_session

from cacheservice.agent.arena import build_arena
from cacheservice.agent.arena_socket import ANSWER, HELLO, MAGIC, VERSION, HandOverStatus
from cacheservice.agent.serve import Agent
from cacheservice.agent.sessions import Session
from cacheservice.errors import ConfigError
from cacheservice.v1 import cache_pb2

SIZE = 500_000
SPEC = a_namespace(shard_bytes=(SIZE,))


@pytest.fixture(name="agent")
def _agent() -> Iterator[Agent]:
    with local_agent() as agent:
        yield agent
        with agent.guarded.reading() as store:
            store.check_invariants()


def unix(agent: Agent) -> str:
    return f"unix:{agent.config.agent_socket}"


class Guest:
    """A connection to arena.sock, and what it got."""

    def __init__(self, path: Path, token: bytes, *, hello: bytes | None = None) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(10)
        self.socket.connect(str(path))
        self.socket.sendall(hello if hello is not None else HELLO.pack(MAGIC, VERSION, 0, token))
        content, ancillary, _, _ = self.socket.recvmsg(ANSWER.size, socket.CMSG_SPACE(4))
        self.fds = array.array("i")
        for _, _, packed in ancillary:
            self.fds.frombytes(packed)
        magic, version, status, self.epoch, zero, self.arena_bytes = ANSWER.unpack(content)
        assert (magic, version, zero) == (MAGIC, VERSION, 0)
        self.status = HandOverStatus(status)

    def close(self) -> None:
        for fd in self.fds:
            os.close(fd)
        self.socket.close()


def test_arena_is_allocated_sealed_and_private() -> None:
    arena = build_arena(8 * 2**20, threads=3)
    try:
        assert os.fstat(arena.fd).st_blocks * 512 >= arena.size_bytes
        assert stat.S_IMODE(os.fstat(arena.fd).st_mode) == 0o600
        assert fcntl.fcntl(arena.fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        seals = fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS)
        assert seals == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        for size in (0, arena.size_bytes * 2):
            with pytest.raises(OSError, match="not permitted") as caught:
                os.ftruncate(arena.fd, size)
            assert caught.value.errno == errno.EPERM
        arena.view[:3] = b"abc"
        assert ctypes.string_at(arena.address, 3) == b"abc"
    finally:
        arena.close()
        arena.close()


def test_old_kernel_without_populate_gets_the_same_arena(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cacheservice.agent.arena._MADV_POPULATE_WRITE", 9999)
    arena = build_arena(3 * 2**20 + 4096)
    try:
        assert os.fstat(arena.fd).st_blocks * 512 >= arena.size_bytes
    finally:
        arena.close()


def test_session_gets_the_arena_and_sees_its_bytes(agent: Agent) -> None:
    with stub_session(unix(agent), maps_arena=True) as session:
        assert session.welcome.arena_offered
        guest = Guest(agent.config.arena_socket, session.token)
        assert guest.status is HandOverStatus.OK
        assert (guest.epoch, guest.arena_bytes) == (
            session.welcome.epoch,
            session.welcome.arena_bytes,
        )
        with pytest.raises(PermissionError):
            os.ftruncate(guest.fds[0], 0)
        session.open(SPEC)
        (reserved,) = session.reserve(SPEC, (key_of("shm"), 0, 0))
        content = bytes_of(SIZE, "shm")
        with mmap.mmap(guest.fds[0], guest.arena_bytes) as mapping:
            at = reserved.extent.offset
            mapping[at : at + SIZE] = content
            assert session.commit((reserved.reservation_id, checksums(content))) == [1]
            with stub_session(unix(agent)) as reader:
                lease, _ = reader.acquire(SPEC, (key_of("shm"), 0, 0))
                assert reader.read(lease, SIZE) == content
        (known,) = [s for s in agent.registry.sessions() if s.hello.maps_arena]
        assert known.data_plane == "shared_memory"
        guest.close()


def test_strangers_get_no_arena(agent: Agent) -> None:
    path = agent.config.arena_socket
    with (
        stub_session(unix(agent)) as streaming,
        stub_session(unix(agent), maps_arena=True) as mapping,
    ):
        for guest in (
            Guest(path, b"x" * 16),
            Guest(path, streaming.token),
        ):
            assert guest.status is HandOverStatus.UNKNOWN_TOKEN
            assert not guest.fds
            guest.close()
        for hello in (
            HELLO.pack(b"HTTP", VERSION, 0, mapping.token),
            HELLO.pack(MAGIC, 2, 0, mapping.token),
            HELLO.pack(MAGIC, VERSION, 1, mapping.token),
        ):
            guest = Guest(path, mapping.token, hello=hello)
            assert (guest.status, len(guest.fds)) == (HandOverStatus.BAD_HELLO, 0)
            guest.close()
        first = Guest(path, mapping.token)
        assert first.status is HandOverStatus.OK
        second = Guest(path, mapping.token)
        assert second.status is HandOverStatus.UNKNOWN_TOKEN
        second.close()
        first.close()


def test_uid_that_is_not_listed_is_refused() -> None:
    with (
        local_agent(allow_uid=[os.getuid() + 1]) as agent,
        stub_session(unix(agent), maps_arena=True) as session,
    ):
        guest = Guest(agent.config.arena_socket, session.token)
        assert (guest.status, len(guest.fds)) == (HandOverStatus.UID_REFUSED, 0)
        guest.close()
    with (
        local_agent(allow_uid=[os.getuid()]) as agent,
        stub_session(unix(agent), maps_arena=True) as session,
    ):
        guest = Guest(agent.config.arena_socket, session.token)
        assert guest.status is HandOverStatus.OK
        guest.close()


def test_session_that_never_comes_for_the_arena_is_ended() -> None:
    with local_agent(session_seconds=0.3) as agent:
        session = StubSession(unix(agent), maps_arena=True)

        def is_over() -> bool:
            try:
                session.ping()
            except Exception:
                return True
            return False

        wait_until(is_over, what="the session's end")
        session.close()


def test_extents_stay_quarantined_until_the_mapping_is_closed(agent: Agent) -> None:
    session = StubSession(unix(agent), maps_arena=True)
    guest = Guest(agent.config.arena_socket, session.token)
    session.open(SPEC)
    session.reserve(SPEC, (key_of("q"), 0, 0))
    session.close()
    wait_until(lambda: not agent.registry.sessions(), what="the session's end")
    with agent.guarded.reading() as store:
        counts = store.counts()
    assert (counts.num_reservations, counts.pending_bytes) == (0, 0)
    assert counts.quarantined_bytes >= SIZE
    guest.close()

    def is_free() -> bool:
        with agent.guarded.reading() as store:
            return store.counts().used_bytes == 0

    wait_until(is_free, what="the quarantine's end")


def test_mapping_that_closes_first_ends_the_session(agent: Agent) -> None:
    with stub_session(unix(agent), maps_arena=True) as session:
        guest = Guest(agent.config.arena_socket, session.token)
        session.open(SPEC)
        session.reserve(SPEC, (key_of("m"), 0, 0))
        guest.close()
        wait_until(lambda: not agent.registry.sessions(), what="the session's end")
        with agent.guarded.reading() as store:
            assert store.counts().used_bytes == 0


def test_connection_that_says_nothing_or_too_much_is_closed(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheservice.agent.arena_socket._HELLO_TIMEOUT_S", 0.1)
    silent = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    silent.settimeout(10)
    silent.connect(str(agent.config.arena_socket))
    silent.sendall(b"LRDR")
    assert silent.recv(1) == b""
    silent.close()
    with stub_session(unix(agent), maps_arena=True) as session:
        guest = Guest(agent.config.arena_socket, session.token)
        session.open(SPEC)
        session.reserve(SPEC, (key_of("spam"), 0, 0))
        guest.socket.sendall(b"more")
        wait_until(lambda: not agent.registry.sessions(), what="the session's end")
        with agent.guarded.reading() as store:
            assert store.counts().quarantined_bytes >= SIZE, (
                "only EOF proves that the mapping is gone"
            )
        guest.close()
        wait_until(lambda: agent._counts().used_bytes == 0, what="the quarantine's end")


def test_client_that_goes_on_writing_is_dismissed_once(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    dismissed: list[Session] = []
    dismiss = agent.registry.dismiss
    monkeypatch.setattr(
        agent.registry, "dismiss", lambda session: (dismissed.append(session), dismiss(session))
    )
    with stub_session(unix(agent), maps_arena=True) as session:
        guest = Guest(agent.config.arena_socket, session.token)
        # More than a socket's buffer holds: the agent reads it, though not at any price.
        guest.socket.sendall(bytes(2**20))
        assert len(dismissed) == 1
        guest.close()
        wait_until(lambda: not agent._arena_socket.num_connections, what="the connection's end")
    assert len(dismissed) == 1


def test_connection_that_fails_is_the_only_one_that_ends(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        stub_session(unix(agent), maps_arena=True) as unlucky,
        stub_session(unix(agent), maps_arena=True) as later,
    ):
        guest = Guest(agent.config.arena_socket, unlucky.token)
        unlucky.open(SPEC)
        unlucky.reserve(SPEC, (key_of("unlucky"), 0, 0))
        sockets = agent._arena_socket
        read = sockets._read
        num_failures = 0

        def fail_once(connection: Any) -> None:
            nonlocal num_failures
            num_failures += 1
            monkeypatch.setattr(sockets, "_read", read)
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(sockets, "_read", fail_once)
        guest.socket.sendall(b"x")
        wait_until(lambda: len(agent.registry.sessions()) == 1, what="the end of its session")
        assert num_failures == 1
        assert sockets.is_serving
        with agent.guarded.reading() as store:
            assert store.counts().quarantined_bytes >= SIZE, "its mapping may still be there"
        other = Guest(agent.config.arena_socket, later.token)
        assert other.status is HandOverStatus.OK
        guest.close()
        wait_until(lambda: agent._counts().used_bytes == 0, what="the quarantine's end")
        other.close()


def test_dead_thread_makes_the_agent_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    with local_agent(http="127.0.0.1:0") as agent:
        url = f"http://127.0.0.1:{agent.http_port}/healthz"
        assert http_get(url)[0] == 200

        def fail() -> None:
            raise ZeroDivisionError("a bug")

        monkeypatch.setattr(agent._arena_socket, "_serve_once", fail)
        wait_until(lambda: http_get(url)[0] == 503, what="the bad health")


def test_agent_without_descriptors_waits_and_serves_again(
    agent: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = agent._arena_socket._listener
    assert listener is not None
    tried_at: list[float] = []
    has_descriptors = False

    class Poor:
        """The listener of a process that has no descriptor left."""

        def accept(self) -> Any:
            tried_at.append(time.monotonic())
            if has_descriptors:
                return listener.accept()
            raise OSError(errno.EMFILE, "Too many open files")

        def fileno(self) -> int:
            return listener.fileno()

        def close(self) -> None:
            listener.close()

    pause_s = 0.3
    monkeypatch.setattr("cacheservice.agent.arena_socket._ACCEPT_PAUSE_S", pause_s)
    monkeypatch.setattr("cacheservice.agent.arena_socket._TICK_S", pause_s / 3)
    poor = Poor()
    sockets = agent._arena_socket
    sockets._selector.unregister(listener)
    monkeypatch.setattr(sockets, "_listener", poor)
    sockets._selector.register(poor, selectors.EVENT_READ, None)
    with stub_session(unix(agent), maps_arena=True) as session:
        came = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        came.connect(str(agent.config.arena_socket))
        wait_until(lambda: len(tried_at) >= 3, what="tries to accept")
        assert min(b - a for a, b in itertools.pairwise(tried_at)) >= pause_s
        has_descriptors = True
        guest = Guest(agent.config.arena_socket, session.token)
        assert guest.status is HandOverStatus.OK
        guest.close()
        came.close()


def test_sockets_are_for_the_group_only_and_stale_ones_are_replaced() -> None:
    with AgentProcess(cpu="8Mi") as agent:
        assert agent.socket_dir is not None
        for name in ("agent.sock", "arena.sock"):
            mode = (agent.socket_dir / name).stat().st_mode
            assert stat.S_ISSOCK(mode)
            assert stat.S_IMODE(mode) == 0o660
        agent.kill()
        assert (agent.socket_dir / "agent.sock").exists()
        agent.start()
        with stub_session(f"unix:{agent.socket_dir}/agent.sock", maps_arena=True) as session:
            guest = Guest(agent.socket_dir / "arena.sock", session.token)
            assert guest.status is HandOverStatus.OK
            guest.close()


def test_directory_that_the_agent_makes_is_for_the_group_only(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    directory = tmp_path_factory.mktemp("s") / "run"
    with local_agent(socket_dir=directory):
        assert stat.S_IMODE(directory.stat().st_mode) == 0o770


def test_socket_group_is_applied() -> None:
    with local_agent(socket_group=str(os.getgid())) as agent:
        assert agent.config.agent_socket.stat().st_gid == os.getgid()
    with (
        pytest.raises(ConfigError, match="no such group"),
        local_agent(socket_group="larder-no-such-group"),
    ):
        pass


def test_mapping_outlives_a_killed_agent() -> None:
    with AgentProcess(cpu="8Mi") as agent:
        assert agent.socket_dir is not None
        session = StubSession(f"unix:{agent.socket_dir}/agent.sock", maps_arena=True)
        guest = Guest(agent.socket_dir / "arena.sock", session.token)
        with mmap.mmap(guest.fds[0], guest.arena_bytes) as mapping:
            agent.kill()
            mapping[-4:] = struct.pack("<I", 7)
            assert mapping[-4:] == struct.pack("<I", 7)
            assert guest.socket.recv(1) == b""
        guest.close()
        session.close()


def test_writer_stopped_past_its_time_can_not_spoil_another_shard() -> None:
    """A mapped writer whose reservation ran out writes late: its extent was given to nobody."""
    with (
        local_agent(reservation_seconds=0.2, cpu="2Mi") as agent,
        stub_session(unix(agent), maps_arena=True) as stopped,
        stub_session(unix(agent)) as other,
    ):
        stopped.open(SPEC)
        guest = Guest(agent.config.arena_socket, stopped.token)
        (late,) = stopped.reserve(SPEC, (key_of("late"), 0, 0))

        def is_over() -> bool:
            with agent.guarded.reading() as store:
                return store.counts().num_reservations == 0

        wait_until(is_over, what="the reservation's end")
        others = {}
        while True:
            key = key_of("other", len(others))
            (reserved,) = other.reserve(SPEC, (key, 0, 0))
            if reserved.result != cache_pb2.RESERVE_RESULT_RESERVED:
                break
            start, stop = reserved.extent.offset, reserved.extent.offset + SIZE
            assert stop <= late.extent.offset or start >= late.extent.offset + SIZE
            others[key] = reserved.reservation_id
            if len(others) == 8:
                break
        with mmap.mmap(guest.fds[0], guest.arena_bytes) as mapping:
            mapping[late.extent.offset : late.extent.offset + SIZE] = b"\xff" * SIZE
        assert stopped.commit((late.reservation_id, [0])) == [cache_pb2.COMMIT_RESULT_EXPIRED]
        guest.close()
