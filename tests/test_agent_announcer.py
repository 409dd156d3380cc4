"""What the index is told: everything in the end, whatever goes away or overflows in between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from agent_process import a_namespace, local_agent, wait_until
from agent_stub import StubSession, bytes_of, key_of, stub_session

from cacheservice.agent import announcer
from cacheservice.agent.serve import Agent
from cacheservice.core.outcomes import Presence
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.index.port import Announcement, Index
from cacheservice.v1 import admin_pb2

SIZE = 5000
SPEC = a_namespace(shard_bytes=(SIZE,))


@pytest.fixture(name="shared")
def _shared() -> MemoryIndexStore:
    return MemoryIndexStore()


@pytest.fixture(name="observer")
def _observer(shared: MemoryIndexStore) -> Iterator[Index]:
    index = MemoryIndex(shared)
    index.join(name="observer", address="", epoch=1)
    yield index
    index.close()


def unix(agent: Agent) -> str:
    return f"unix:{agent.config.agent_socket}"


def store(session: StubSession, numbers: Sequence[int]) -> None:
    for number in numbers:
        session.store(SPEC, key_of(number), bytes_of(SIZE, number))


def told(observer: Index, numbers: Sequence[int]) -> list[bool]:
    return [bool(holders) for holders in observer.lookup(SPEC.digest, [key_of(n) for n in numbers])]


def agrees(observer: Index, session: StubSession, numbers: Sequence[int]) -> bool:
    """Whether the index says what the arena holds."""
    here = session.lookup(SPEC, [key_of(n) for n in numbers]).presence
    return told(observer, numbers) == [p == Presence.READY_HERE for p in here]


def test_announcements_wait_while_the_index_is_away(
    shared: MemoryIndexStore, observer: Index
) -> None:
    with local_agent(index=MemoryIndex(shared)) as agent, stub_session(unix(agent)) as session:
        session.open(SPEC)
        store(session, range(3))
        wait_until(lambda: all(told(observer, range(3))), what="the first announcements")
        shared.unavailable = "away"
        store(session, range(3, 6))
        session.admin.Evict(
            admin_pb2.EvictRequest(namespace_digest=SPEC.digest, chunk_keys=[key_of(0)])
        )
        wait_until(lambda: agent._announcer.num_waiting == 4, what="the queue")
        shared.unavailable = ""
        wait_until(lambda: agrees(observer, session, range(6)), what="the index to agree")


def test_overflow_is_made_good_by_telling_all(
    shared: MemoryIndexStore, observer: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(announcer, "_MAX_WAITING", 5)
    with local_agent(index=MemoryIndex(shared)) as agent, stub_session(unix(agent)) as session:
        session.open(SPEC)
        wait_until(lambda: agent._announcer.node_number, what="joining")
        shared.unavailable = "away"
        store(session, range(20))
        assert agent._announcer.num_overflows
        assert agent._announcer.num_waiting <= 5
        shared.unavailable = ""
        wait_until(lambda: agrees(observer, session, range(20)), what="the index to agree")


def test_change_while_all_is_told_again_is_not_undone(
    shared: MemoryIndexStore, observer: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before every batch of the retelling some chunk of it goes: what is told late must not bring it back."""
    monkeypatch.setattr(announcer, "BATCH", 3)
    index = MemoryIndex(shared)
    with local_agent(index=index) as agent, stub_session(unix(agent)) as session:
        session.open(SPEC)
        store(session, range(30))
        wait_until(lambda: agrees(observer, session, range(30)), what="the first announcements")
        announce, doomed = index.announce, list(range(0, 30, 4))

        def announce_late(announcements: Sequence[Announcement]) -> None:
            if doomed:
                number = doomed.pop()
                with agent.guarded.changing() as core:
                    core.evict(SPEC.digest, [key_of(number)])
            announce(announcements)

        monkeypatch.setattr(index, "announce", announce_late)
        shared.erase()
        index_lost = observer.lookup(SPEC.digest, [key_of(1)])
        assert index_lost == [()]
        observer.join(name="observer", address="", epoch=1)
        wait_until(
            lambda: not doomed and agrees(observer, session, range(30)),
            what="the index to agree",
        )


def test_drain_withdraws_everything(shared: MemoryIndexStore, observer: Index) -> None:
    with local_agent(index=MemoryIndex(shared)) as agent, stub_session(unix(agent)) as session:
        session.open(SPEC)
        store(session, range(5))
        wait_until(lambda: all(told(observer, range(5))), what="the announcements")
        session.admin.Drain(admin_pb2.DrainRequest())
        wait_until(lambda: not any(told(observer, range(5))), what="the withdrawal")
        wait_until(lambda: set(observer.nodes()) <= {1}, what="leaving")
        assert not shared.values
