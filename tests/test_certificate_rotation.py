"""TLS files that change under agents and clients that live: new ones are used in time, and nothing fails for it."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import pytest
from agent_process import a_namespace, local_agent, tcp_target_of, wait_until
from agent_stub import bytes_of, key_of
from cryptography import x509
from signing import Authority, Pem

from cacheservice.agent.serve import Agent
from cacheservice.client import session as session_module
from cacheservice.client.client import CacheClient
from cacheservice.client.copy import MemorySink, MemorySource
from cacheservice.client.values import (
    AgentTarget,
    ClientIdentity,
    ClientState,
    Role,
    ShardRead,
    ShardWrite,
    TlsFiles,
)
from cacheservice.core.keys import ChunkKey
from cacheservice.core.outcomes import Presence, Reason
from cacheservice.errors import ConfigError
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore

SIZE = 200_000
SPEC = a_namespace(shard_bytes=(SIZE,))
SERVER_NAME = "agent.demo.team.larder.internal"
OWNER = "team/demo"


@dataclass(frozen=True, slots=True)
class Identity:
    """Folder of one agent or client, as a mounted Secret: tls.crt, tls.key, ca.crt."""

    folder: Path
    role: str

    @property
    def files(self) -> TlsFiles:
        """As a client of agents is told."""
        folder = self.folder
        return TlsFiles(
            folder / "tls.crt", folder / "tls.key", folder / "ca.crt", server_name=SERVER_NAME
        )

    def certify(self, authority: Authority) -> Pem:
        """Have `authority` sign a new leaf, and put it here."""
        pem = authority.issue(
            f"{self.folder.name}-leaf", f"larder://{OWNER}/{self.role}", dns=SERVER_NAME
        )
        self._put("tls.key", pem.key.read_bytes())
        self._put("tls.crt", pem.cert.read_bytes())
        return pem

    def trust(self, *authorities: Authority) -> None:
        """Trust these and no other."""
        self._put("ca.crt", b"".join(a.ca.read_bytes() for a in authorities))

    def _put(self, name: str, content: bytes) -> None:
        new = self.folder / f".{name}"
        new.write_bytes(content)
        os.replace(new, self.folder / name)


def an_identity(tmp_path: Path, name: str, role: str, authority: Authority) -> Identity:
    (tmp_path / name).mkdir()
    identity = Identity(tmp_path / name, role)
    identity.trust(authority)
    identity.certify(authority)
    return identity


def an_authority(tmp_path: Path, name: str) -> Authority:
    (tmp_path / name).mkdir()
    return Authority(tmp_path / name, name)


def agent_fields(identity: Identity) -> dict[str, object]:
    files = identity.files
    return {
        "listen": "127.0.0.1:0", "tls_cert": files.certificate, "tls_key": files.key, "tls_ca": files.ca,
        "tls_owner": OWNER, "tls_server_name": SERVER_NAME, "session_seconds": 3, "cpu": "32Mi",
    }  # fmt: skip


class Engine:
    """A client over TLS, and how it was connected over time."""

    def __init__(self, agent: Agent, identity: Identity, role: Role) -> None:
        self.agent = agent
        self.name = identity.folder.name
        self.states: list[ClientState] = []
        address = tcp_target_of(agent).address
        self.client = CacheClient(
            AgentTarget(address=address, tls=identity.files),
            ClientIdentity(role, engine_name=self.name),
            on_change=self.states.append,
        )
        self.client.start()
        assert self.client.wait_connected(10)
        self.client.open_namespace(SPEC)

    def tokens(self) -> set[bytes]:
        """Of its sessions at the agent."""
        return {s.token for s in self.agent.registry.sessions() if s.hello.engine_name == self.name}

    def store(self, key: ChunkKey, content: bytes) -> Reason:
        write = ShardWrite(key, None, 0, 0, 0, SIZE, MemorySource(content))
        return self.client.store(SPEC.digest, [write])[0].reason

    def load(self, key: ChunkKey, sink: object = None) -> tuple[Reason, bytes]:
        target = bytearray(SIZE)
        read = ShardRead(key, 0, 0, SIZE, 0, SIZE, sink or MemorySink(target))  # type: ignore[arg-type]
        return self.client.retrieve(SPEC.digest, [read])[0].reason, bytes(target)


@contextmanager
def an_engine(agent: Agent, identity: Identity, role: Role = Role.BOTH) -> Iterator[Engine]:
    engine = Engine(agent, identity, role)
    try:
        yield engine
    finally:
        engine.client.close()


@pytest.fixture(autouse=True)
def _at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "RENEW_WITHIN_S", 0.0)
    monkeypatch.setattr(session_module, "RENEW_AGAIN_S", 0.0)


@dataclass(frozen=True, slots=True)
class World:
    """One agent and one engine, signed for by one authority."""

    authority: Authority
    agent: Agent
    identity: Identity
    engine: Engine


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> Iterator[World]:
    authority = an_authority(tmp_path, "ca")
    server = an_identity(tmp_path, "agent", "agent", authority)
    ours = an_identity(tmp_path, "engine", "engine", authority)
    with local_agent(**agent_fields(server)) as agent, an_engine(agent, ours) as engine:
        yield World(authority, agent, ours, engine)


def test_renewed_certificate_takes_over_without_a_gap(world: World) -> None:
    engine = world.engine
    (before,) = engine.tokens()
    engine.client.open_namespace(SPEC)
    assert engine.store(key_of("k"), bytes_of(SIZE, "k")) is Reason.HIT
    world.identity.certify(world.authority)
    wait_until(
        lambda: engine.tokens() and before not in engine.tokens(), what="a session with the new one"
    )
    assert all(state.connected for state in engine.states)
    # What the client opened is open in the new session too.
    assert engine.load(key_of("k")) == (Reason.HIT, bytes_of(SIZE, "k"))


def test_files_that_stay_tear_nothing_down(world: World) -> None:
    before = world.engine.tokens()
    session = world.agent.registry.sessions()[0]
    pings = session.last_ping_s
    wait_until(lambda: session.last_ping_s > pings + 2, what="three pings")
    assert world.engine.tokens() == before


def test_load_in_flight_ends_in_the_session_that_it_began_in(world: World) -> None:
    engine = world.engine
    assert engine.store(key_of("slow"), bytes_of(SIZE, "slow")) is Reason.HIT
    (before,) = engine.tokens()
    may_go_on = threading.Event()
    started = threading.Event()
    target = bytearray(SIZE)

    class SlowSink(MemorySink):
        def scatter(self, start: int, stop: int, source: int) -> None:
            started.set()
            assert may_go_on.wait(20)
            super().scatter(start, stop, source)

    results: list[Reason] = []
    loading = threading.Thread(
        target=lambda: results.append(engine.load(key_of("slow"), SlowSink(target))[0])
    )
    loading.start()
    assert started.wait(10)
    world.identity.certify(world.authority)
    old = world.agent.registry.live(before)
    wait_until(lambda: len(engine.tokens()) == 2, what="the second session")
    pinged_s = old.last_ping_s
    wait_until(lambda: old.last_ping_s > pinged_s, what="a ping that keeps the old session")
    # New calls go to the new session while the old one waits for its load.
    assert engine.store(key_of("other"), bytes_of(SIZE, "other")) is Reason.HIT
    assert before in engine.tokens()
    may_go_on.set()
    loading.join(20)
    assert results == [Reason.HIT]
    assert bytes(target) == bytes_of(SIZE, "slow")
    wait_until(lambda: before not in engine.tokens(), what="the end of the old session")


def test_files_that_do_not_get_in_leave_the_old_session_alone(
    world: World, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = world.engine
    before = engine.tokens()
    stranger = an_authority(tmp_path, "stranger")
    world.identity.certify(stranger)
    wait_until(lambda: "the old session stays" in caplog.text, what="a try that failed")
    assert engine.tokens() == before
    assert engine.store(key_of("k"), bytes_of(SIZE, "k")) is Reason.HIT
    world.identity.files.certificate.write_bytes(b"half a file")
    assert engine.store(key_of("l"), bytes_of(SIZE, "l")) is Reason.HIT
    assert engine.tokens() == before
    world.identity.certify(world.authority)
    wait_until(
        lambda: engine.tokens() and not engine.tokens() & before, what="a session with right files"
    )
    assert all(state.connected for state in engine.states)


def test_server_name_takes_the_place_of_the_address(tmp_path: Path) -> None:
    authority = an_authority(tmp_path, "ca")
    server = an_identity(tmp_path, "agent", "agent", authority)
    ours = an_identity(tmp_path, "engine", "engine", authority)
    with local_agent(**agent_fields(server)) as agent:
        address = tcp_target_of(agent).address
        files = ours.files
        for name, gets_in in ((SERVER_NAME, True), (None, False), ("agent.other", False)):
            tls = TlsFiles(files.certificate, files.key, files.ca, server_name=name)
            client = CacheClient(AgentTarget(address=address, tls=tls), ClientIdentity(Role.BOTH))
            client.start()
            assert client.wait_connected(2.0) is gets_in, name
            client.close()
    with (
        pytest.raises(ConfigError, match="--tls-server-name needs"),
        local_agent(tls_server_name=SERVER_NAME),
    ):
        pass


@pytest.mark.parametrize(
    ("uri", "gets_in"),
    [
        ("larder://team/demo/engine", True),
        ("larder://team/demo/agent", True),
        ("larder://team/other/engine", False),
        ("larder://other/demo/engine", False),
        ("larder://demo/engine", False),
        ("larder://team/demo/x/engine", False),
        ("larder://team/demo/", False),
    ],
)
def test_owner_is_namespace_and_name(tmp_path: Path, uri: str, gets_in: bool) -> None:
    authority = an_authority(tmp_path, "ca")
    server = an_identity(tmp_path, "agent", "agent", authority)
    with local_agent(**agent_fields(server)) as agent:
        pem = authority.issue("caller", uri, dns="caller")
        tls = TlsFiles(pem.cert, pem.key, authority.ca, server_name=SERVER_NAME)
        target = AgentTarget(address=tcp_target_of(agent).address, tls=tls)
        client = CacheClient(target, ClientIdentity(Role.BOTH))
        client.start()
        assert client.wait_connected(2.0) is gets_in
        client.close()
        # Not silently: the page of the agent says whom it turned away, and why.
        refused = agent.registry.refused_hellos()
        assert len(refused) == (0 if gets_in else 1)
        assert all(
            "127.0.0.1: the certificate has no URI SAN larder://team/demo/ROLE" in r
            for r in refused
        )


class Work:
    """An engine that stores at one agent, and one that loads the same from another, until told to stop."""

    def __init__(self, writer: Engine, reader: Engine) -> None:
        self._writer = writer
        self._reader = reader
        self._stopping = threading.Event()
        self.stores: Counter[Reason] = Counter()
        self.loads: Counter[Reason] = Counter()
        self.longest_s = 0.0
        self.wrong = 0
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join(30)

    def _timed(self, call: Callable[[], object]) -> object:
        started_s = time.monotonic()
        answer = call()
        self.longest_s = max(self.longest_s, time.monotonic() - started_s)
        return answer

    def _run(self) -> None:
        number = 0
        while not self._stopping.is_set():
            number += 1
            key, content = key_of("work", number), bytes_of(SIZE, "work", number)
            stored = self._timed(lambda k=key, c=content: self._writer.store(k, c))
            assert isinstance(stored, Reason)
            self.stores[stored] += 1
            if stored is not Reason.HIT:
                continue
            until_s = time.monotonic() + 5
            elsewhere = bytes([Presence.READY_ELSEWHERE])
            while time.monotonic() < until_s and not self._stopping.is_set():
                if self._reader.client.lookup(SPEC.digest, [key]).presence == elsewhere:
                    break
            if self._stopping.is_set():
                return
            reason, got = self._reader.load(key)
            self.loads[reason] += 1
            self.wrong += reason is Reason.HIT and got != content


def test_authority_changes_in_three_steps_while_engines_work(tmp_path: Path) -> None:
    old, new = an_authority(tmp_path, "old"), an_authority(tmp_path, "new")
    first, second = (an_identity(tmp_path, n, "agent", old) for n in ("agent-1", "agent-2"))
    prefill, decode = (an_identity(tmp_path, n, "engine", old) for n in ("prefill", "decode"))
    everybody = (first, second, prefill, decode)
    shared = MemoryIndexStore()
    with (
        local_agent(index=MemoryIndex(shared), node="agent-1", **agent_fields(first)) as owner,
        local_agent(index=MemoryIndex(shared), node="agent-2", **agent_fields(second)) as puller,
        an_engine(owner, prefill, Role.PREFILL) as writer,
        an_engine(puller, decode, Role.DECODE) as reader,
        Work(writer, reader) as work,
    ):

        def all_sessions() -> set[bytes]:
            """Of the writer, the reader, and of the agent that pulls."""
            return {s.token for a in (owner, puller) for s in a.registry.sessions()}

        def step(what: str, change: Callable[[Identity], object]) -> None:
            """Change everybody's files, one after the other, and wait until all connections are new and work."""
            before = all_sessions()
            for identity in everybody:
                change(identity)
                done = work.loads[Reason.HIT]
                wait_until(lambda d=done: work.loads[Reason.HIT] > d, what=f"work during {what}")
            wait_until(
                lambda: len(all_sessions()) >= 3 and not before & all_sessions(),
                what=f"new sessions after {what}",
            )

        wait_until(lambda: work.loads[Reason.HIT] >= 3, what="work")
        step("trusting both", lambda identity: identity.trust(old, new))
        step("new leaves", lambda identity: identity.certify(new))
        step("dropping the old one", lambda identity: identity.trust(new))
        done = work.loads[Reason.HIT]
        wait_until(lambda: work.loads[Reason.HIT] >= done + 3, what="work with the new authority")
        # And the old one opens nothing any more.
        late = an_identity(tmp_path, "late", "engine", old)
        late.trust(new)
        client = CacheClient(
            AgentTarget(address=tcp_target_of(owner).address, tls=late.files),
            ClientIdentity(Role.BOTH),
        )
        client.start()
        assert not client.wait_connected(1.5)
        client.close()
        assert all(state.connected for e in (writer, reader) for state in e.states)
    assert work.wrong == 0
    assert set(work.stores) | set(work.loads) == {Reason.HIT}, (work.stores, work.loads)
    assert work.longest_s < 10.0


def test_leaf_of_the_tests_names_no_address(tmp_path: Path) -> None:
    """Else the tests above would pass without the server name."""
    identity = an_identity(tmp_path, "agent", "agent", an_authority(tmp_path, "ca"))
    leaf = x509.load_pem_x509_certificate(identity.files.certificate.read_bytes())
    names = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert names.get_values_for_type(x509.DNSName) == [SERVER_NAME]
    assert names.get_values_for_type(x509.IPAddress) == []
