"""Which agents are said to hold which shards: against a search through everything that was announced."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from agent_process import a_namespace
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheservice.agent import remote_hints
from cacheservice.agent.remote_hints import RemoteHints
from cacheservice.core.keys import ChunkKey
from cacheservice.core.outcomes import Presence
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.index.port import Announcement

SPEC = a_namespace(
    shard_bytes=(100, 300, 200), num_shards=(2, 1, 3), kinds=("full", "recurrent", "sliding_window")
)
BITS = [(g, 1 << SPEC.shard_bit(g, s)) for g in range(3) for s in range(SPEC.groups[g].num_shards)]
MASKS = [sum(bit for group, bit in BITS if group == g) for g in range(3)]
ALL = sum(MASKS)
CHUNKS = [ChunkKey(bytes([n]) * 32) for n in range(5)]
ABSENT, HERE, ELSEWHERE, PENDING = (
    Presence.ABSENT, Presence.READY_HERE, Presence.READY_ELSEWHERE, Presence.PENDING
)  # fmt: skip

bitmaps = st.one_of(st.just(0), st.sampled_from([*MASKS, ALL]), st.integers(0, ALL))
nodes = st.integers(0, 2)


@dataclass
class World:
    """Three agents that announced something, one that asks, and a clock."""

    now_s: float = 0.0
    numbers: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        store = MemoryIndexStore(clock=lambda: self.now_s)
        self.agents = [MemoryIndex(store) for _ in range(3)]
        for number, index in enumerate(self.agents):
            address = f"agent-{number}:1"
            self.numbers.append(index.join(name=address, address=address, epoch=number + 1))
        self.hints = RemoteHints(MemoryIndex(store), clock=lambda: self.now_s)

    def announce(self, agent: int, bitmap_of: dict[int, int]) -> None:
        self.agents[agent].heartbeat()
        self.agents[agent].announce(
            [Announcement(SPEC.digest, CHUNKS[n], bitmap) for n, bitmap in bitmap_of.items()]
        )

    def found_bits(self, wanted: dict[ChunkKey, int]) -> dict[ChunkKey, dict[int, int]]:
        """Per chunk what the agents are said to have, by number of the agent."""
        return {
            chunk: {self.numbers.index(h.node): h.bitmap for h in hint.holders.each}
            for chunk, hint in self.hints.find(SPEC, wanted).items()
        }


@settings(max_examples=300, deadline=None)
@given(
    held=st.lists(st.lists(bitmaps, min_size=5, max_size=5), min_size=3, max_size=3),
    here=st.lists(st.sampled_from([ABSENT, HERE, PENDING]), min_size=15, max_size=15),
    doubted=st.sets(st.tuples(nodes, st.integers(0, 4))),
    wanted=st.lists(st.integers(1, ALL), min_size=5, max_size=5),
)
def test_a_group_is_elsewhere_when_agents_that_are_believed_have_all_its_shards(
    held: list[list[int]],
    here: list[int],
    doubted: set[tuple[int, int]],
    wanted: list[int],
) -> None:
    world = World()
    for agent, bitmap_of in enumerate(held):
        world.announce(agent, dict(enumerate(bitmap_of)))
    for agent, chunk in doubted:
        world.hints.distrust(SPEC.digest, [CHUNKS[chunk]], world.numbers[agent])

    def believed(chunk: int) -> dict[int, int]:
        return {a: held[a][chunk] for a in range(3) if (a, chunk) not in doubted and held[a][chunk]}

    expected = bytearray(here)
    for chunk in range(len(CHUNKS)):
        union = 0
        for bitmap in believed(chunk).values():
            union |= bitmap
        for group, mask in enumerate(MASKS):
            if here[chunk * 3 + group] == ABSENT and union & mask == mask:
                expected[chunk * 3 + group] = ELSEWHERE
    presence = bytearray(here)
    assert world.hints.overlay(SPEC, CHUNKS, presence)
    assert presence == expected

    found = world.found_bits(dict(zip(CHUNKS, wanted, strict=True)))
    for number, chunk in enumerate(CHUNKS):
        claims = believed(number)
        assert found.get(chunk, {}).items() <= claims.items()
        for _, bit in BITS:
            if wanted[number] & bit and any(bitmap & bit for bitmap in claims.values()):
                assert any(bitmap & bit for bitmap in found[chunk].values())


def test_a_hint_that_lacks_what_is_wanted_is_asked_for_again_and_keeps_what_the_owner_said() -> (
    None
):
    world = World()
    # The owner of a hand-over said that it has the attention; the index knows of a state elsewhere only.
    states = bytes([HERE, ABSENT, ABSENT])
    world.hints.learn(SPEC, CHUNKS[:1], world.numbers[0], 1, states)
    world.announce(1, {0: MASKS[1]})
    assert world.found_bits({CHUNKS[0]: MASKS[0]}) == {CHUNKS[0]: {0: MASKS[0]}}
    wanted = {CHUNKS[0]: MASKS[0] | MASKS[1]}
    assert world.found_bits(wanted) == {CHUNKS[0]: {0: MASKS[0], 1: MASKS[1]}}


def test_place_in_the_chain_is_known_also_when_only_later_chunks_were_asked_for() -> None:
    world = World()
    world.announce(0, dict.fromkeys(range(5), ALL))
    presence = bytearray([HERE, HERE, HERE] * 3 + [HERE, ABSENT, HERE] + [ABSENT] * 3)
    world.hints.overlay(SPEC, CHUNKS, presence)
    world.now_s += 60.0  # long forgotten as a claim, but where a chunk stands does not change
    world.agents[0].heartbeat()
    world.announce(0, {3: ALL, 4: ALL})
    found = world.hints.find(SPEC, dict.fromkeys(CHUNKS[3:], ALL))
    assert [(h.parent, h.number) for h in found.values()] == [(CHUNKS[2], 3), (CHUNKS[3], 4)]


def test_distrust_ends_and_leaves_other_agents_in_place() -> None:
    world = World()
    world.announce(0, {0: ALL})
    world.announce(1, {0: MASKS[1]})
    wanted = {CHUNKS[0]: ALL}
    assert world.found_bits(wanted) == {CHUNKS[0]: {0: ALL}}
    world.hints.distrust(SPEC.digest, CHUNKS[:1], world.numbers[0])
    assert world.found_bits(wanted) == {CHUNKS[0]: {1: MASKS[1]}}
    for _ in range(3):
        world.now_s += 5.0
        for index in world.agents:
            index.heartbeat()
    world.announce(0, {0: ALL})
    assert world.found_bits(wanted) == {CHUNKS[0]: {0: ALL}}


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_hints, "_MAX_REMEMBERED", 40)
    world = World()
    for first in range(0, 300, 10):
        chunks = [ChunkKey(n.to_bytes(32, "big")) for n in range(1000 + first, 1010 + first)]
        world.agents[0].announce([Announcement(SPEC.digest, chunk, ALL) for chunk in chunks])
        world.hints.overlay(SPEC, chunks, bytearray(30))
        world.hints.distrust(SPEC.digest, chunks, 77)
        assert len(world.hints._young) + len(world.hints._old) <= 40
        assert len(world.hints._distrusted) <= 40
        # The latest are still there.
        assert {*world.hints._young, *world.hints._old} >= {(SPEC.digest, c) for c in chunks}
    # Nothing is kept of chunks that nobody has.
    before = {*world.hints._young, *world.hints._old}
    world.hints.overlay(SPEC, CHUNKS, bytearray(15))
    assert {*world.hints._young, *world.hints._old} == before
