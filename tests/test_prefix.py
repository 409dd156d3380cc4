"""How long a hit is: the chunk-wise answer against an oracle that looks at single tokens."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheservice.core.layout import GroupKind, GroupSpec
from cacheservice.core.outcomes import Presence
from cacheservice.core.prefix import hit_tokens

READY = frozenset({Presence.READY_HERE, Presence.READY_ELSEWHERE})


def group(kind: GroupKind, block_tokens: int = 2, window_tokens: int | None = None) -> GroupSpec:
    return GroupSpec(
        kind, block_tokens, num_layers=1, bytes_per_block=8, window_tokens=window_tokens
    )


def hit(groups, presence, *, tokens_per_chunk=4, computed=0, num_tokens=1000, max_chunks=None):
    return hit_tokens(
        groups, bytes(presence), there=READY, tokens_per_chunk=tokens_per_chunk, computed_tokens=computed,
        num_tokens=num_tokens, max_chunks=max_chunks,
    )  # fmt: skip


def oracle(groups, presence, *, tokens_per_chunk, computed, num_tokens, max_chunks):
    """Token by token: what the store holds of each group, what the engine holds, and what a start at E reads."""
    num_groups = len(groups)
    num_chunks = len(presence) // num_groups
    limit = num_chunks if max_chunks is None else min(num_chunks, max_chunks)
    best = 0
    for end in range(tokens_per_chunk, limit * tokens_per_chunk + 1, tokens_per_chunk):
        if end > num_tokens or end <= computed:
            continue
        good = True
        for index, spec in enumerate(groups):
            stored = set()
            for chunk in range(num_chunks):
                if presence[chunk * num_groups + index] in READY:
                    stop = (chunk + 1) * tokens_per_chunk
                    stored |= set(range(stop - spec.stored_tokens(tokens_per_chunk), stop))
            have = stored | set(range(computed))
            if spec.kind in (GroupKind.FULL, GroupKind.MLA):
                needed = set(range(end))
            elif spec.kind is GroupKind.SLIDING_WINDOW:
                needed = {t for t in range(end) if end - t <= spec.window_tokens - 1}
            elif spec.kind is GroupKind.CHUNKED_LOCAL:
                needed = {
                    t for t in range(end) if t // spec.window_tokens == end // spec.window_tokens
                }
            else:
                good &= (
                    end < num_tokens
                    and presence[(end // tokens_per_chunk - 1) * num_groups + index] in READY
                )
                needed = set()
            good &= needed <= have
        if good:
            best = end
    return best


@st.composite
def cases(draw):
    tokens_per_chunk = draw(st.sampled_from([2, 4, 8]))
    groups = []
    for _ in range(draw(st.integers(1, 3))):
        kind = draw(st.sampled_from(list(GroupKind)))
        block = draw(st.sampled_from([b for b in (1, 2, 4) if tokens_per_chunk % b == 0]))
        window = None
        if kind is GroupKind.SLIDING_WINDOW:
            window = draw(st.integers(2, 20))
        if kind is GroupKind.CHUNKED_LOCAL:
            window = draw(st.integers(1, 20))
        groups.append(group(kind, block, window))
    num_chunks = draw(st.integers(0, 7))
    codes = st.sampled_from([0, 1, 1, 1, 2, 3])
    presence = draw(
        st.lists(codes, min_size=num_chunks * len(groups), max_size=num_chunks * len(groups))
    )
    return (
        groups,
        presence,
        {
            "tokens_per_chunk": tokens_per_chunk,
            "computed": draw(st.integers(0, 6 * tokens_per_chunk)),
            "num_tokens": draw(st.integers(0, 8 * tokens_per_chunk)),
            "max_chunks": draw(st.one_of(st.none(), st.integers(0, 7))),
        },
    )


@given(cases())
@settings(max_examples=600)
@example(
    (
        [group(GroupKind.FULL)],
        [1, 1],
        {"tokens_per_chunk": 4, "computed": 8, "num_tokens": 8, "max_chunks": None},
    )
)
def test_hit_equals_what_single_tokens_allow(case):
    groups, presence, rest = case
    assert hit(groups, presence, **rest) == oracle(groups, presence, **rest)


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


def test_recurrent_state_can_not_be_rewound_for_the_last_token():
    spec = [group(GroupKind.RECURRENT, block_tokens=4)]
    assert hit(spec, [1, 1], num_tokens=8) == 4
    assert hit(spec, [1, 1], num_tokens=9) == 8


def test_pending_counts_only_when_asked_for():
    spec = [group(GroupKind.FULL)]
    assert hit(spec, [1, Presence.PENDING]) == 4
    assert hit_tokens(
        spec, bytes([1, Presence.PENDING]), there=READY | {Presence.PENDING}, tokens_per_chunk=4, computed_tokens=0,
        num_tokens=8,
    ) == 8  # fmt: skip


def test_failed_chunks_are_left_out():
    assert hit([group(GroupKind.FULL)], [1, 1, 1], max_chunks=2) == 8
