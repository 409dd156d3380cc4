"""Random agents on one index against a dictionary: what is found is what the living said last, after any order of
joins, crashes, restarts, sleeps, late messages, losses and garbage."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from index_worlds import NAMESPACE, MemoryWorld, RedisWorld, World, announcement, chunk
from redis_server import RedisServer

from cacheservice.errors import IndexUnavailable
from cacheservice.index.entry import MAX_HOLDERS
from cacheservice.index.port import Holder, Index, Node

NAMES = ["a", "b", "c"]
CHUNKS = range(6)
AGENTS = st.integers(0, 5)
BITMAPS = st.one_of(st.just(0), st.integers(1, 7), st.just(1 << 70), st.integers(0, (1 << 20) - 1))
"""Parts of a chunk: groups with few shards and with many."""


class Agent:
    """One incarnation as the model sees it."""

    def __init__(self, index: Index, name: str, epoch: int, number: int) -> None:
        self.index = index
        self.name = name
        self.epoch = epoch
        self.number = number
        self.has_lease = True
        self.has_left = False
        self.must_announce = False


class IndexMachine(RuleBasedStateMachine):
    """The model: which incarnations hold a lease, and what each chunk's value lists."""

    server: ClassVar[RedisServer | None] = None
    """None: the memory index."""

    def __init__(self) -> None:
        super().__init__()
        self.world: World = MemoryWorld() if self.server is None else RedisWorld(self.server)
        self.agents: list[Agent] = []
        self.entries: dict[int, dict[tuple[int, int], int]] = {}
        """chunk -> {(number, epoch): bitmap}, in the order of their last announcement."""
        self.epoch = 0
        self.reader = self.world.agent()

    def agent(self, which: int) -> Agent:
        return self.agents[which % len(self.agents)]

    def live(self) -> dict[int, Agent]:
        return {agent.number: agent for agent in self.agents if agent.has_lease}

    @precondition(lambda self: len(self.agents) < 8)
    @rule(name=st.sampled_from(NAMES), has_address=st.booleans())
    def start_agent(self, name: str, has_address: bool) -> None:
        self.epoch += 1
        index = self.world.agent()
        address = f"{name}:7000" if has_address else ""
        number = index.join(name=name, address=address, epoch=self.epoch)
        for other in self.agents:
            if other.has_lease and other.number == number:
                # Only the same agent at the same address is taken for dead.
                assert has_address
                assert other.name == name
                other.has_lease = False
                other.must_announce = True
        self.agents.append(Agent(index, name, self.epoch, number))

    @precondition(lambda self: self.agents)
    @rule(which=AGENTS, numbers=st.dictionaries(st.sampled_from(CHUNKS), BITMAPS, min_size=1))
    def announce(self, which: int, numbers: dict[int, int]) -> None:
        agent = self.agent(which)
        batch = [announcement(n, bitmap) for n, bitmap in numbers.items()]
        if not agent.has_lease:
            with pytest.raises(IndexUnavailable):
                agent.index.announce(batch)
            return
        agent.index.announce(batch)
        live = {(number, other.epoch) for number, other in self.live().items()}
        for number, bitmap in numbers.items():
            value = self.entries.get(number, {})
            value = {
                who: held for who, held in value.items() if who in live and who[0] != agent.number
            }
            if bitmap:
                value[agent.number, agent.epoch] = bitmap
            assert len(value) <= MAX_HOLDERS
            self.entries[number] = value

    @precondition(lambda self: self.agents)
    @rule(which=AGENTS)
    def beat(self, which: int) -> None:
        agent = self.agent(which)
        if agent.has_left:
            with pytest.raises(IndexUnavailable):
                agent.index.heartbeat()
            return
        assert agent.index.heartbeat() is (agent.must_announce or not agent.has_lease)
        agent.must_announce = False
        agent.has_lease = True
        address = next((n.address for n in self.nodes().values() if n.epoch == agent.epoch), "")
        number = agent.index.join(name=agent.name, address=address, epoch=agent.epoch)
        if number != agent.number:
            taken = [other for other in self.agents if other is not agent and other.has_lease]
            assert number not in [other.number for other in taken]
        agent.number = number

    @precondition(lambda self: self.agents)
    @rule(which=AGENTS)
    def leave(self, which: int) -> None:
        agent = self.agent(which)
        agent.index.leave()
        agent.has_lease = False
        agent.has_left = True

    @precondition(lambda self: any(agent.has_lease for agent in self.agents))
    @rule(which=AGENTS)
    def sleep_past_the_lease(self, which: int) -> None:
        sleepers = [agent for agent in self.agents if agent.has_lease]
        agent = sleepers[which % len(sleepers)]
        self.world.expire_lease(agent.number)
        agent.has_lease = False

    @rule()
    def lose_everything(self) -> None:
        self.world.erase()
        self.entries.clear()
        for agent in self.agents:
            agent.has_lease = False
            agent.must_announce = True

    @rule()
    def let_entries_expire(self) -> None:
        self.world.expire_entries()
        self.entries.clear()

    @rule(number=st.sampled_from(CHUNKS), value=st.binary(max_size=40))
    def write_garbage(self, number: int, value: bytes) -> None:
        if isinstance(self.world, RedisWorld):
            key = (
                self.world.prefix.encode()
                + b"{"
                + NAMESPACE[:8].hex().encode()
                + b"}:"
                + chunk(number)
            )
            # Node 0 is nobody: the garbage can't name a living node by chance.
            self.world.redis.set(key, b"\0\0" + value)
            self.entries.pop(number, None)

    def nodes(self) -> Mapping[int, Node]:
        if isinstance(self.world, RedisWorld):
            self.world.clock.advance(1.01)  # else the table may be that old
        return self.reader.nodes()

    @invariant()
    def finds_what_the_living_said(self) -> None:
        nodes = self.nodes()
        live = self.live()
        assert {n: node.epoch for n, node in nodes.items()} == {n: a.epoch for n, a in live.items()}
        answer = self.reader.lookup(NAMESPACE, [chunk(n) for n in CHUNKS])
        for number, found in zip(CHUNKS, answer, strict=True):
            expected = [
                Holder(node, 1, epoch, bitmap)
                for (node, epoch), bitmap in self.entries.get(number, {}).items()
                if node in live and live[node].epoch == epoch
            ]
            assert list(found) == expected, number
        if isinstance(self.world, MemoryWorld):
            self.world.store.check_invariants()

    @invariant()
    def numbers_of_the_living_differ(self) -> None:
        numbers = [agent.number for agent in self.agents if agent.has_lease]
        assert len(set(numbers)) == len(numbers)

    def teardown(self) -> None:
        self.world.close()


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def run(machine: type[IndexMachine], max_examples: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=30,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_random_agents_on_the_memory_index() -> None:
    run(IndexMachine, 150)


def test_random_agents_on_a_real_redis(server: RedisServer) -> None:
    class RedisMachine(IndexMachine):
        pass

    RedisMachine.server = server
    run(RedisMachine, 40)
