"""How long a hit is, and which blocks it takes: against an oracle that looks at single tokens.

The oracle knows nothing of the functions under test. It builds the block table as vLLM does for a load (null, from the
engine itself, or fresh and unwritten), fills fresh blocks from the chunks that are there, and asks whether every token
that the next computation reads, or writes, lies in a block that holds it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheservice.core.layout import GroupKind, GroupSpec
from cacheservice.core.outcomes import Presence
from cacheservice.core.prefix import blocks_read, hit_tokens, parts_to_load, stored_blocks

READY = frozenset({Presence.READY_HERE, Presence.READY_ELSEWHERE})
WHOLE = (GroupKind.FULL, GroupKind.MLA)
CODES = [Presence.ABSENT, Presence.READY_HERE, Presence.READY_HERE, Presence.READY_HERE,
         Presence.READY_ELSEWHERE, Presence.PENDING]  # fmt: skip


def group(kind: GroupKind, block_tokens: int = 2, window_tokens: int | None = None) -> GroupSpec:
    return GroupSpec(
        kind, block_tokens, num_layers=1, bytes_per_block=8, window_tokens=window_tokens
    )


def hit(groups, presence, *, tokens_per_chunk=4, computed=0, num_tokens=1000, max_chunks=None):
    return hit_tokens(
        groups, bytes(presence), there=READY, tokens_per_chunk=tokens_per_chunk, computed_tokens=computed,
        num_tokens=num_tokens, max_chunks=max_chunks,
    )  # fmt: skip


# What a computation reads, token by token


@functools.cache
def tokens_read(spec: GroupSpec, first: int) -> list[int]:
    """Tokens below `first` whose pages a computation reads that has `first` as its first token."""
    match spec.kind:
        case GroupKind.FULL | GroupKind.MLA:
            return list(range(first))
        case GroupKind.SLIDING_WINDOW:  # a token sees itself and the `window - 1` before it
            return [t for t in range(first) if first - t < spec.window_tokens]
        case GroupKind.CHUNKED_LOCAL:  # a token sees its own local chunk
            return [
                t for t in range(first) if t // spec.window_tokens == first // spec.window_tokens
            ]
        case GroupKind.RECURRENT:  # the state after the token before
            return [first - 1] if first else []


@functools.cache
def is_null(spec: GroupSpec, position: int, computed: int) -> bool:
    """Whether vLLM has put the null block here when `computed` tokens are computed: nothing in it will be read.

    vLLM 0.32, v1/core/single_type_kv_cache_manager.py, `get_num_skipped_tokens` of the managers.
    """
    tokens = range(position * spec.block_tokens, (position + 1) * spec.block_tokens)
    read = set(tokens_read(spec, computed))
    return all(t < computed and t not in read for t in tokens)


@functools.cache
def needed_of_chunk(spec: GroupSpec, tokens_per_chunk: int, chunk: int) -> set[int]:
    """Positions inside a chunk that a computation reads which resumes at its end or at a later chunk's."""
    inside = range(chunk * tokens_per_chunk, (chunk + 1) * tokens_per_chunk)
    ends = range(inside.stop, inside.stop + 40 * tokens_per_chunk, tokens_per_chunk)
    if spec.kind is GroupKind.RECURRENT:
        ends = range(inside.stop, inside.stop + 1)
    return {t // spec.block_tokens for end in ends for t in tokens_read(spec, end) if t in inside}


@dataclass
class World:
    """What an engine and the store have of one request."""

    groups: list[GroupSpec]
    presence: list[int]
    tokens_per_chunk: int
    computed: int
    num_tokens: int
    max_chunks: int | None = None

    @property
    def num_chunks(self) -> int:
        return len(self.presence) // len(self.groups)

    def hit(self, **changes) -> int:
        known = {
            "tokens_per_chunk": self.tokens_per_chunk, "computed": self.computed, "num_tokens": self.num_tokens,
            "max_chunks": self.max_chunks,
        }  # fmt: skip
        return hit(self.groups, self.presence, **(known | changes))

    def is_there(self, chunk: int, index: int) -> bool:
        return (
            0 <= chunk < self.num_chunks
            and self.presence[chunk * len(self.groups) + index] in READY
        )

    def resumes(self, index: int, end: int, first: int, loaded: set[int] | None = None) -> bool:
        """Whether a computation that starts at `first` finds all that it touches after a load of [computed, end).

        `loaded` are the positions that the load writes; by default all that the chunks that are there could give.
        """
        spec = self.groups[index]
        block = spec.block_tokens
        if spec.kind is GroupKind.RECURRENT and first != end:
            return False  # the loaded state has seen the token that is to be computed
        good = set()
        for position in range(-(-end // block)):
            if is_null(spec, position, end):
                continue
            if position * block < self.computed:
                if not is_null(spec, position, self.computed):
                    good.add(position)
            elif loaded is not None:
                if position in loaded:
                    good.add(position)
            else:
                chunk = position * block // self.tokens_per_chunk
                if self.is_there(chunk, index) and position in needed_of_chunk(
                    spec, self.tokens_per_chunk, chunk
                ):
                    good.add(position)
        touched = tokens_read(spec, first) + ([first] if first < end else [])
        return all(token // block in good for token in touched)

    def oracle(self) -> int:
        """The longest usable prefix by trying them all."""
        limit = (
            self.num_chunks if self.max_chunks is None else min(self.max_chunks, self.num_chunks)
        )
        best = 0
        for end in range(
            self.tokens_per_chunk, limit * self.tokens_per_chunk + 1, self.tokens_per_chunk
        ):
            if not self.computed < end <= self.num_tokens:
                continue
            if end == self.num_tokens and any(spec.kind not in WHOLE for spec in self.groups):
                continue  # the rule is stricter than what could be read
            first = min(end, self.num_tokens - 1)
            if all(self.resumes(index, end, first) for index in range(len(self.groups))):
                best = end
        return best


# Worlds


@st.composite
def specs(draw, tokens_per_chunk: int, block: int | None = None) -> GroupSpec:
    kind = draw(st.sampled_from(list(GroupKind)))
    sizes = [b for b in (1, 2, 3, 4, 6, 12) if tokens_per_chunk % b == 0]
    block = block or draw(st.sampled_from(sizes))
    window = None
    if kind is GroupKind.SLIDING_WINDOW:
        window = draw(st.integers(2, 30))
    if kind is GroupKind.CHUNKED_LOCAL:  # no chunk straddles a local chunk's border
        ratio = draw(st.integers(1, 4))
        window = block * draw(
            st.sampled_from([d for d in range(1, 13) if tokens_per_chunk // block % d == 0])
        )
        window = draw(st.sampled_from([window, tokens_per_chunk * ratio]))
    return group(kind, block, window)


@st.composite
def worlds(draw, min_chunks: int = 0) -> World:
    tokens_per_chunk = draw(st.sampled_from([4, 8, 12]))
    groups = [draw(specs(tokens_per_chunk)) for _ in range(draw(st.integers(1, 3)))]
    num_chunks = draw(st.integers(min_chunks, 6))
    cells = num_chunks * len(groups)
    codes = draw(st.sampled_from([CODES, CODES, CODES[1:2] * 8 + CODES[:1]]))
    presence = draw(st.lists(st.sampled_from(codes), min_size=cells, max_size=cells))
    step = math.lcm(*(spec.block_tokens for spec in groups))
    end = draw(st.integers(0, 7 * tokens_per_chunk + 1))
    return World(
        groups,
        presence,
        tokens_per_chunk,
        computed=step * draw(st.integers(0, 5 * tokens_per_chunk // step)),
        num_tokens=draw(st.sampled_from([end, num_chunks * tokens_per_chunk, 100])),
        max_chunks=draw(st.one_of(st.none(), st.integers(0, 7))),
    )


def questions(world: World) -> list[World]:
    """The same request asked about with all that an engine may have computed itself."""
    step = math.lcm(*(spec.block_tokens for spec in world.groups))
    return [
        dataclasses.replace(world, computed=computed)
        for computed in range(0, 5 * world.tokens_per_chunk, step)
    ]


# The hit


@given(worlds())
@settings(max_examples=200)
@example(World([group(GroupKind.FULL)], [1, 1], 4, computed=8, num_tokens=8))
@example(World([group(GroupKind.MLA)], [1, 1], 4, computed=0, num_tokens=8))
def test_hit_equals_what_single_tokens_allow(world):
    for asked in (world, *questions(world)):
        assert asked.hit() == asked.oracle()


@given(worlds(min_chunks=1))
@settings(max_examples=120)
def test_an_offered_hit_has_all_its_parts_and_leaves_nothing_unread(world):
    for asked in questions(world):
        end = asked.hit()
        first = min(end, asked.num_tokens - 1)
        for index, spec in enumerate(asked.groups if end else ()):
            parts = parts_to_load(spec, asked.tokens_per_chunk, asked.computed, end)
            assert parts is not None
            assert all(asked.is_there(part.chunk, index) for part in parts)
            loaded = {p for part in parts for p in range(part.first_block, part.stop_block)}
            assert asked.resumes(index, end, first, loaded)


@given(worlds())
@settings(max_examples=60)
def test_a_hit_is_a_chunk_end_beyond_what_is_computed(world):
    for asked in questions(world):
        end = asked.hit()
        assert end % asked.tokens_per_chunk == 0
        assert end == 0 or asked.computed < end <= asked.num_tokens
        if end == asked.num_tokens and end:
            assert all(spec.kind in WHOLE for spec in asked.groups)


@given(worlds(), st.randoms(use_true_random=False))
@settings(max_examples=60)
def test_the_order_of_groups_does_not_matter(world, random):
    order = list(range(len(world.groups)))
    random.shuffle(order)
    rows = [world.presence[i : i + len(order)] for i in range(0, len(world.presence), len(order))]
    shuffled = World(
        [world.groups[i] for i in order], [row[i] for row in rows for i in order], world.tokens_per_chunk,
        world.computed, world.num_tokens, world.max_chunks,
    )  # fmt: skip
    for one, other in zip(questions(world), questions(shuffled), strict=True):
        assert one.hit() == other.hit()


@given(worlds(min_chunks=1), st.data())
@settings(max_examples=60)
def test_more_presence_never_shortens_a_hit(world, data):
    cell = data.draw(st.integers(0, len(world.presence) - 1))
    before = [asked.hit() for asked in questions(world)]
    world.presence[cell] = Presence.READY_HERE
    assert all(asked.hit() >= was for asked, was in zip(questions(world), before, strict=True))


@given(worlds(min_chunks=1))
@settings(max_examples=60)
def test_what_the_engine_has_itself_never_shortens_a_longer_hit(world):
    longest = 0
    for asked in questions(world):  # from less computed to more
        end = asked.hit()
        assert longest <= asked.computed or end >= longest
        longest = max(longest, end)


@given(worlds(min_chunks=1), st.integers(0, 6))
@settings(max_examples=60)
def test_a_bound_on_chunks_is_as_if_the_others_were_not_there(world, bound):
    for asked in questions(world):
        cut = dataclasses.replace(asked, presence=asked.presence[: bound * len(asked.groups)])
        assert asked.hit(max_chunks=bound) == cut.hit(max_chunks=None)


# The blocks


@given(worlds())
@settings(max_examples=100)
def test_blocks_read_are_those_that_vllm_leaves_fresh(world):
    """Neither more, since they would be null or another's, nor fewer, since the rest is not even zeroed."""
    for spec in world.groups:
        for end in range(
            world.tokens_per_chunk, 6 * world.tokens_per_chunk, world.tokens_per_chunk
        ):
            if end <= world.computed:
                assert not blocks_read(spec, world.computed, end)
                continue
            fresh = [
                position
                for position in range(end // spec.block_tokens)
                if position * spec.block_tokens >= world.computed and not is_null(spec, position, end)
            ]  # fmt: skip
            assert list(blocks_read(spec, world.computed, end)) == fresh


@given(worlds())
@settings(max_examples=100)
def test_a_chunk_holds_what_any_hit_reads_of_it_and_no_more(world):
    for spec in world.groups:
        needed = [needed_of_chunk(spec, world.tokens_per_chunk, chunk) for chunk in range(5)]
        held = [set(stored_blocks(spec, world.tokens_per_chunk, chunk)) for chunk in range(5)]
        assert all(n <= h for n, h in zip(needed, held, strict=True))
        if spec.kind is not GroupKind.CHUNKED_LOCAL:  # there some chunks are read by no hit
            assert needed == held


@given(worlds(), st.data())
@settings(max_examples=150)
def test_parts_cover_what_is_read_once_and_lie_in_what_is_stored(world, data):
    """For any end, also inside a chunk or a block: vLLM may authorise fewer tokens than were offered."""
    for spec in world.groups:
        end = data.draw(st.integers(0, 5 * world.tokens_per_chunk))
        parts = parts_to_load(spec, world.tokens_per_chunk, world.computed, end)
        read = list(blocks_read(spec, world.computed, end))
        held = {
            position: chunk
            for chunk in range(7)
            for position in stored_blocks(spec, world.tokens_per_chunk, chunk)
        }
        is_state_inside = spec.kind is GroupKind.RECURRENT and end % world.tokens_per_chunk
        if parts is None:
            assert is_state_inside or not all(position in held for position in read)
            continue
        assert not (is_state_inside and read)
        taken = [
            (p, part.chunk) for part in parts for p in range(part.first_block, part.stop_block)
        ]
        assert taken == [(position, held[position]) for position in read]


# Examples to read


def test_full_attention_ends_at_the_first_gap():
    assert hit([group(GroupKind.FULL)], [1, 1, 0, 1]) == 8


def test_what_the_engine_has_itself_need_not_be_stored():
    assert hit([group(GroupKind.FULL)], [0, 0, 1, 1], computed=8) == 16


def test_a_chunk_that_the_engine_has_in_part_must_be_stored():
    assert hit([group(GroupKind.FULL)], [0, 0, 1, 1], computed=6) == 0


def test_a_group_without_anything_makes_the_hit_zero():
    assert hit([group(GroupKind.FULL), group(GroupKind.MLA)], [1, 0, 1, 0]) == 0


def test_sliding_window_needs_only_the_last_window():
    spec = [group(GroupKind.FULL), group(GroupKind.SLIDING_WINDOW, window_tokens=5)]
    assert hit(spec, [1, 0, 1, 0, 1, 1]) == 12


def test_a_window_wider_than_a_chunk_needs_the_chunks_before_it_too():
    spec = [group(GroupKind.SLIDING_WINDOW, window_tokens=6)]  # 5 tokens before 12, from 7 on
    assert hit(spec, [0, 0, 1]) == 0
    assert hit(spec, [0, 1, 1]) == 12
    assert hit(spec, [0, 0, 1], computed=6) == 0
    assert hit(spec, [0, 0, 1], computed=8) == 12  # block [6, 8) is the engine's own


def test_a_hit_that_starts_a_local_chunk_reads_nothing_of_it():
    spec = [group(GroupKind.CHUNKED_LOCAL, window_tokens=8)]
    assert hit(spec, [0, 0, 0]) == 8
    assert hit(spec, [0, 0, 1]) == 12


def test_recurrent_state_is_needed_only_at_the_end():
    spec = [group(GroupKind.RECURRENT, block_tokens=4)]
    assert hit(spec, [0, 1, 0]) == 8


def test_a_state_can_not_be_rewound_for_the_last_token():
    spec = [group(GroupKind.RECURRENT, block_tokens=4)]
    assert hit(spec, [1, 1], num_tokens=8) == 4
    assert hit(spec, [1, 1], num_tokens=9) == 8


def test_a_whole_prompt_is_offered_only_to_full_attention():
    assert hit([group(GroupKind.FULL), group(GroupKind.MLA)], [1] * 4, num_tokens=8) == 8
    assert hit([group(GroupKind.SLIDING_WINDOW, window_tokens=3)], [1, 1], num_tokens=8) == 4


def test_pending_counts_only_when_asked_for():
    spec = [group(GroupKind.FULL)]
    assert hit(spec, [1, Presence.PENDING]) == 4
    assert hit_tokens(
        spec, bytes([1, Presence.PENDING]), there=READY | {Presence.PENDING}, tokens_per_chunk=4, computed_tokens=0,
        num_tokens=8,
    ) == 8  # fmt: skip


def test_failed_chunks_are_left_out():
    assert hit([group(GroupKind.FULL)], [1, 1, 1], max_chunks=2) == 8


def test_a_load_that_ends_inside_a_chunk_takes_part_of_it():
    parts = parts_to_load(group(GroupKind.FULL), 8, 2, 12)
    assert [(p.chunk, p.first_block, p.stop_block) for p in parts] == [(0, 1, 4), (1, 4, 6)]
    assert parts_to_load(group(GroupKind.RECURRENT), 8, 0, 12) is None
    assert parts_to_load(group(GroupKind.SLIDING_WINDOW, window_tokens=3), 8, 0, 12) is None
