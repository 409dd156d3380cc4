"""Faults between a real client and a real agent process: each ends in a miss, in time, and leaves nothing behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from agent_process import AgentProcess, a_namespace, local_agent, target_of, wait_until
from client_process import SHARD_BYTES, SPEC, ClientProcess, key, read_of, write_of

from cacheservice.agent.serve import Agent
from cacheservice.client import (
    AgentAdmin,
    CacheClient,
    ClientIdentity,
    Deadlines,
    LookupWait,
    MemorySink,
    MemorySource,
    Role,
    ShardWrite,
)
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.outcomes import Presence, Reason

NUM_PIECES = 4
DEADLINE_S = 3.0
# What a busy machine of two cores may add to any deadline before a thread runs.
SCHEDULING_S = 2.0
SHORT_SESSIONS = ("--session-seconds", "2", "--lease-seconds", "2", "--reservation-seconds", "2")
PLANES = ("shared_memory", "stream")


def content(number: int) -> bytearray:
    return bytearray(random.Random(number).randbytes(SHARD_BYTES))


@pytest.fixture
def agent() -> Iterator[AgentProcess]:
    with AgentProcess() as agent:
        yield agent


@pytest.fixture
def connect() -> Iterator[Callable[..., CacheClient]]:
    clients: list[CacheClient] = []

    def make(agent: AgentProcess | Agent, **settings: Any) -> CacheClient:
        deadlines = Deadlines(
            lookup_s=2.0,
            acquire_s=2.0,
            reserve_s=2.0,
            commit_s=2.0,
            load_s=DEADLINE_S,
            reconnect_s=1.0,
        )
        client = CacheClient(
            target_of(agent) if isinstance(agent, Agent) else agent.target,
            ClientIdentity(Role.TOOL),
            deadlines=deadlines,
            **settings,
        )
        clients.append(client)
        client.open_namespace(SPEC)
        client.start()
        assert client.wait_connected(30), client.state().message
        return client

    yield make
    for client in clients:
        client.close()


class Interrupted:
    """A source and sink that runs `fault` once, in front of piece `at`."""

    def __init__(self, number: int, at: int, fault: Callable[[], object]) -> None:
        self.buffer = content(number)
        self.at = at
        self.fault = fault
        self.num_pieces = 0

    def gather(self, start: int, stop: int, destination: int) -> None:
        self._step()
        MemorySource(self.buffer).gather(start, stop, destination)

    def scatter(self, start: int, stop: int, source: int) -> None:
        self._step()
        MemorySink(self.buffer).scatter(start, stop, source)

    def _step(self) -> None:
        self.num_pieces += 1
        if self.num_pieces == self.at + 1:
            self.fault()


def held(agent: AgentProcess) -> dict[str, int]:
    """What must return to its starting value."""
    with AgentAdmin(agent.target) as admin:
        status = admin.status()
    return {
        "leases": status.num_leases,
        "reservations": status.num_reservations,
        "used": status.used_bytes,
        "quarantined": status.quarantined_bytes,
    }


def num_sessions(agent: AgentProcess) -> int:
    with AgentAdmin(agent.target) as admin:
        return admin.status().num_sessions


def returns_to(agent: AgentProcess, before: dict[str, int]) -> None:
    wait_until(lambda: held(agent) == before, what=f"gauges return to {before}")


def in_time(call: Callable[[], Any], deadline_s: float = DEADLINE_S) -> Any:
    started = time.monotonic()
    result = call()
    assert time.monotonic() - started <= deadline_s * 1.1 + SCHEDULING_S
    return result


def is_whole(client: CacheClient, number: int) -> bool:
    """Whether the chunk is a hit; a hit has the right bytes."""
    buffer = bytearray(SHARD_BYTES)
    reason = client.retrieve(SPEC.digest, [read_of(number, MemorySink(buffer))])[0].reason
    if reason is Reason.HIT:
        assert buffer == content(number), "a hit with other bytes than were committed"
    return reason is Reason.HIT


def stored(client: CacheClient, number: int) -> Reason:
    return client.store(SPEC.digest, [write_of(number, MemorySource(content(number)))])[0].reason


def works_again(agent: AgentProcess, client: CacheClient) -> None:
    """The client has found the new agent by itself, and nothing of before is there."""
    wait_until(lambda: client.state().connected, what="connected again")
    before = held(agent)
    assert before == dict.fromkeys(before, 0)
    answer = client.lookup(SPEC.digest, [key(n) for n in range(3)])
    assert answer.presence == bytes(3)
    assert stored(client, 2) is Reason.HIT
    assert is_whole(client, 2)


@pytest.mark.parametrize("data_plane", PLANES)
@pytest.mark.parametrize("at", [0, NUM_PIECES - 1])
def test_agent_killed_during_a_store(
    agent: AgentProcess, connect: Any, data_plane: Any, at: int
) -> None:
    client = connect(agent, data_plane=data_plane)
    source = Interrupted(1, at, agent.kill)
    result = in_time(lambda: client.store(SPEC.digest, [write_of(1, source)]))[0]
    assert (result.reason, result.num_bytes) == (Reason.AGENT_DOWN, 0)
    assert in_time(lambda: stored(client, 1), 0.5) is Reason.AGENT_DOWN
    agent.start()
    works_again(agent, client)


@pytest.mark.parametrize("data_plane", PLANES)
@pytest.mark.parametrize("at", [0, NUM_PIECES - 1])
def test_agent_killed_during_a_retrieve(
    agent: AgentProcess, connect: Any, data_plane: Any, at: int
) -> None:
    client = connect(agent, data_plane=data_plane)
    assert stored(client, 1) is Reason.HIT
    sink = Interrupted(1, at, agent.kill)
    result = in_time(lambda: client.retrieve(SPEC.digest, [read_of(1, sink)]))[0]
    assert (result.reason, result.num_bytes) == (Reason.AGENT_DOWN, 0)
    agent.start()
    works_again(agent, client)


@pytest.mark.parametrize("restarts", [False, True])
def test_agent_killed_between_lookup_and_retrieve(
    agent: AgentProcess, connect: Any, restarts: bool
) -> None:
    client = connect(agent)
    assert stored(client, 1) is Reason.HIT
    answer = client.lookup(SPEC.digest, [key(1)])
    assert answer.of(0, 0) is Presence.READY_HERE
    agent.kill()
    wait_until(lambda: not client.state().connected, what="the client sees it")
    if restarts:
        agent.start()
        wait_until(lambda: client.state().connected, what="connected again")
    read = read_of(1, MemorySink(bytearray(SHARD_BYTES)))
    result = in_time(
        lambda: client.retrieve(
            SPEC.digest, [read], lookup_lease=answer.lease_id, epoch=answer.epoch
        )
    )
    assert result[0].reason is (Reason.EPOCH_CHANGED if restarts else Reason.AGENT_DOWN)
    client.release(answer.lease_id)
    if not restarts:
        agent.start()
    works_again(agent, client)


@pytest.mark.parametrize("data_plane", PLANES)
def test_agent_restarted_under_load(agent: AgentProcess, connect: Any, data_plane: Any) -> None:
    client = connect(agent, data_plane=data_plane)
    over = threading.Event()
    faults: list[BaseException] = []
    hits = [0] * 4

    def load(thread: int) -> None:
        numbers = random.Random(thread)
        try:
            while not over.is_set():
                number = numbers.randrange(6)
                in_time(lambda: client.lookup(SPEC.digest, [key(n) for n in range(6)]), 2.0)
                in_time(lambda n=number: stored(client, n))  # type: ignore[misc]
                hits[thread] += in_time(lambda n=number: is_whole(client, n))  # type: ignore[misc]
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=load, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(2):
            so_far = sum(hits)
            wait_until(lambda so_far=so_far: faults or sum(hits) > so_far + 8, what="hits")  # type: ignore[misc]
            agent.restart()
        so_far = sum(hits)
        wait_until(lambda: faults or sum(hits) > so_far + 8, what="hits after the last restart")
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert faults == []
    wait_until(
        lambda: held(agent)["leases"] == held(agent)["reservations"] == 0, what="nothing is held"
    )


def test_agent_stopped_for_a_while_costs_deadlines_only(agent: AgentProcess, connect: Any) -> None:
    client = connect(agent)
    assert stored(client, 1) is Reason.HIT
    before = held(agent)
    agent.pause()
    try:
        assert (
            in_time(lambda: client.lookup(SPEC.digest, [key(1)], deadline_s=0.3), 0.3).reason
            is Reason.DEADLINE
        )
        source = MemorySource(content(2))
        result = in_time(
            lambda: client.store(SPEC.digest, [write_of(2, source)], deadline_s=0.3), 0.3
        )
        assert result[0].reason is Reason.DEADLINE
        read = read_of(1, MemorySink(bytearray(SHARD_BYTES)))
        result = in_time(lambda: client.retrieve(SPEC.digest, [read], deadline_s=0.3), 0.3)
        # Nobody knows what it reserved, so the session that mapped the arena is over.
        assert result[0].reason in (Reason.DEADLINE, Reason.AGENT_DOWN)
    finally:
        agent.resume()
    wait_until(lambda: is_whole(client, 1), what="it answers again")
    wait_until(
        lambda: held(agent)["leases"] == before["leases"],
        what="no lease of a call that nobody waited for",
    )


@pytest.mark.parametrize("data_plane", PLANES)
def test_client_killed_while_it_holds_a_reservation_frees_it_at_once(
    agent: AgentProcess, connect: Any, data_plane: str
) -> None:
    client = connect(agent)
    assert stored(client, 1) is Reason.HIT
    before = held(agent)
    with ClientProcess(agent.socket_dir, "store", number=2, at=2, data_plane=data_plane) as writer:
        during = held(agent)
        assert during["reservations"] == 1
        assert during["used"] > before["used"]
        answer = client.lookup(SPEC.digest, [key(2)], wait=LookupWait.NONE)
        assert answer.of(0, 0) is Presence.PENDING
        assert stored(client, 2) is Reason.DUPLICATE
        writer.kill()
        returns_to(agent, before)
    assert stored(client, 2) is Reason.HIT
    assert is_whole(client, 1)
    assert is_whole(client, 2)


def test_client_killed_while_it_holds_a_lease_frees_it_at_once(
    agent: AgentProcess, connect: Any
) -> None:
    client = connect(agent)
    assert stored(client, 1) is Reason.HIT
    before = held(agent)
    with (
        ClientProcess(agent.socket_dir, "retrieve", number=1, at=2) as reader,
        AgentAdmin(agent.target) as admin,
    ):
        assert held(agent)["leases"] == 1
        assert admin.evict(SPEC.digest, [key(1)]).num_leased == 1
        reader.kill()
        returns_to(agent, before)
        assert admin.evict(SPEC.digest, [key(1)]).num_chunks == 1
    assert not is_whole(client, 1)


def test_late_write_of_a_stopped_client_damages_nothing(connect: Any) -> None:
    with AgentProcess(cpu="16Mi", args=SHORT_SESSIONS) as agent:
        client = connect(agent)
        with ClientProcess(
            agent.socket_dir, "store", number=9, at=1, data_plane="shared_memory"
        ) as writer:
            writer.pause()
            wait_until(lambda: num_sessions(agent) == 1, what="the writer's session ended")
            assert held(agent)["reservations"] == 0
            assert held(agent)["quarantined"] > 0
            # Fill what is left, several times over, so that every byte that may be reused is.
            for number in range(12):
                stored(client, number)
            assert is_whole(client, 11)
            present = [n for n in range(12) if is_whole(client, n)]
            assert held(agent)["quarantined"] > 0
            writer.resume()
            assert writer.finish() in ("agent_down", "lease_lost")
            wait_until(lambda: held(agent)["quarantined"] == 0, what="the old mapping is gone")
            assert [n for n in range(12) if is_whole(client, n)] == present
            assert stored(client, 20) is Reason.HIT
            assert is_whole(client, 20)
        wait_until(
            lambda: held(agent)["leases"] == held(agent)["reservations"] == 0,
            what="nothing is held",
        )


@pytest.mark.parametrize("data_plane", PLANES)
def test_stopped_reader_learns_that_its_lease_is_lost(connect: Any, data_plane: str) -> None:
    with AgentProcess(cpu="16Mi", args=SHORT_SESSIONS) as agent:
        client = connect(agent)
        assert stored(client, 1) is Reason.HIT
        before = held(agent)
        with ClientProcess(
            agent.socket_dir, "retrieve", number=1, at=2, data_plane=data_plane
        ) as reader:
            reader.pause()
            wait_until(lambda: num_sessions(agent) == 1, what="the reader's session ended")
            returns_to(agent, before)
            for number in range(2, 14):
                stored(client, number)
            reader.resume()
            assert reader.finish() in ("lease_lost", "agent_down", "checksum")
        assert is_whole(client, 13)


def test_flipped_bit_is_a_miss_and_heals(agent: AgentProcess, connect: Any) -> None:
    client, other = (
        connect(agent, data_plane="shared_memory"),
        connect(agent, data_plane="shared_memory"),
    )
    assert stored(client, 1) is Reason.HIT
    assert stored(client, 2) is Reason.HIT
    before = held(agent)
    with AgentAdmin(agent.target) as admin:
        offset = admin.shards(SPEC.digest, key(1))[0].extent.offset
        other._keeper.session().plane._mapping.view[offset + SHARD_BYTES - 1] ^= 0x10
        result = client.retrieve(
            SPEC.digest, [read_of(n, MemorySink(bytearray(SHARD_BYTES))) for n in (1, 2)]
        )
        assert [r.reason for r in result] == [Reason.CHECKSUM, Reason.HIT]
        wait_until(lambda: not admin.shards(SPEC.digest, key(1)), what="the chunk is dropped")
    assert not is_whole(client, 1)
    assert stored(other, 1) is Reason.HIT
    assert is_whole(client, 1)
    returns_to(agent, before)


def test_flipped_bit_heals_while_a_lookup_leases_the_chunk(
    agent: AgentProcess, connect: Any
) -> None:
    """As in an engine: the scheduler's half holds a lease of its lookup while the workers load."""
    scheduler, worker = (
        connect(agent, data_plane="none"),
        connect(agent, data_plane="shared_memory"),
    )
    assert stored(worker, 1) is Reason.HIT
    with AgentAdmin(agent.target) as admin:
        offset = admin.shards(SPEC.digest, key(1))[0].extent.offset
    worker._keeper.session().plane._mapping.view[offset] ^= 0x10
    lookup = scheduler.lookup(SPEC.digest, [key(1)])
    assert lookup.lease_id
    read = read_of(1, MemorySink(bytearray(SHARD_BYTES)))
    result = worker.retrieve(SPEC.digest, [read], lookup_lease=lookup.lease_id)
    assert result[0].reason is Reason.CHECKSUM
    assert scheduler.lookup(SPEC.digest, [key(1)]).of(0, 0) is Presence.ABSENT
    result = worker.retrieve(SPEC.digest, [read], lookup_lease=lookup.lease_id)
    assert result[0].reason is Reason.EVICTED
    assert stored(worker, 1) is Reason.HIT
    assert is_whole(worker, 1)
    scheduler.release(lookup.lease_id)
    wait_until(lambda: held(agent)["quarantined"] == 0, what="the wrong bytes are gone")


def test_bytes_whose_abort_was_lost_do_not_stay_with_the_client(
    connect: Callable[..., CacheClient],
) -> None:
    with local_agent(cpu="16Mi") as agent:
        client = connect(agent, data_plane="shared_memory")
        aborting, go_on = threading.Event(), threading.Event()
        with agent.guarded.reading() as store:
            abort = store.abort

        def lose(*_: Any) -> None:
            aborting.set()
            go_on.wait(20)

        store.abort = lose  # type: ignore[method-assign, assignment]
        source = Interrupted(1, 0, lambda: None)
        result = client.store(
            SPEC.digest, [write_of(1, source)], give_up=lambda: source.num_pieces > 0
        )
        assert result[0].reason is Reason.CANCELLED
        assert aborting.wait(20)
        wait_until(lambda: not client.state().connected, what="the client ends its session")
        store.abort = abort  # type: ignore[method-assign]
        go_on.set()

        def is_clean() -> bool:
            with agent.guarded.reading() as store:
                counts = store.counts()
            return counts.num_reservations == counts.quarantined_bytes == counts.pending_bytes == 0

        wait_until(is_clean, what="nothing is held for what nobody can end")
        wait_until(lambda: stored(client, 3) is Reason.HIT, what="the next session stores")


def test_two_writers_of_one_chunk_end_well(agent: AgentProcess, connect: Any) -> None:
    """One writes, the other skips; a reader that waits for the chunk gets it."""
    first, second = connect(agent), connect(agent, data_plane="stream")
    in_copy, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        in_copy.set()
        go_on.wait(20)

    results: list[Reason] = []
    write: ShardWrite = write_of(1, Interrupted(1, 1, hold))
    writer = threading.Thread(
        target=lambda: results.append(first.store(SPEC.digest, [write], deadline_s=30)[0].reason)
    )
    writer.start()
    assert in_copy.wait(20)
    assert stored(second, 1) is Reason.DUPLICATE
    waiter: list[Any] = []
    waiting = threading.Thread(
        target=lambda: waiter.append(
            second.lookup(
                SPEC.digest, [key(1)], wait=LookupWait.PENDING, wait_num_chunks=1, wait_s=5.0
            )
        )
    )
    waiting.start()
    go_on.set()
    writer.join()
    waiting.join()
    assert results == [Reason.HIT]
    assert waiter[0].of(0, 0) is Presence.READY_HERE
    assert is_whole(second, 1)


def test_namespace_that_made_room_for_another_is_opened_again() -> None:
    with local_agent(max_namespaces=1, session_seconds=3, cpu="64Mi") as agent:

        def use_and_empty(spec: NamespaceSpec) -> None:
            assert (
                client.store(spec.digest, [write_of(0, MemorySource(content(0)))])[0].reason
                is Reason.HIT
            )
            with agent.guarded.changing() as store:
                store.evict(spec.digest, [key(0)])

        client = CacheClient(target_of(agent), ClientIdentity(Role.TOOL))
        client.open_namespace(SPEC)
        client.start()
        try:
            assert client.wait_connected(30), client.state().message
            use_and_empty(SPEC)
            other = a_namespace(shard_bytes=(SHARD_BYTES,), name="other")
            assert client.open_namespace(other)
            use_and_empty(other)
            assert client.lookup(SPEC.digest, [key(0)]).reason is Reason.ABSENT
            wait_until(
                lambda: client.lookup(SPEC.digest, [key(0)]).reason is None, what="opened again"
            )
        finally:
            client.close()


def test_streamed_store_to_an_agent_that_stops_taking_frames_ends_in_time(
    agent: AgentProcess, connect: Callable[..., CacheClient]
) -> None:
    client = connect(agent, data_plane="stream")
    gathered_at: list[float] = []

    class StopsTheAgent:
        def gather(self, start: int, stop: int, destination: int) -> None:
            if not gathered_at:
                agent.pause()
            gathered_at.append(time.monotonic())

    writes = [
        ShardWrite(key(n), key(n - 1) if n else None, n, 0, 0, SHARD_BYTES, StopsTheAgent())
        for n in range(16)
    ]
    reasons: list[Reason] = []
    returned_at: list[float] = []

    def store() -> None:
        results = client.store(SPEC.digest, writes, deadline_s=DEADLINE_S)
        returned_at.append(time.monotonic())
        reasons.extend(result.reason for result in results)

    # A thread of its own, so that a store that never ends fails the test instead of hanging it.
    storing = threading.Thread(target=store, daemon=True)
    storing.start()
    storing.join(DEADLINE_S + SCHEDULING_S)
    agent.resume()
    assert set(reasons) == {Reason.DEADLINE}
    assert gathered_at[-1] <= returned_at[0], "a source was read after the store had returned"
