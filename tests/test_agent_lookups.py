"""What a hand-over's wait asks for, against what a hit reads."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cacheservice.agent.lookups import _overlay, _promised
from cacheservice.core.layout import GroupKind, GroupShape, GroupSpec, build_namespace
from cacheservice.core.outcomes import Presence
from cacheservice.core.prefix import hit_tokens

CHUNK = 64
WINDOWS = {GroupKind.SLIDING_WINDOW: CHUNK + 1, GroupKind.CHUNKED_LOCAL: CHUNK // 2}


@given(
    kinds=st.lists(st.sampled_from(GroupKind), min_size=1, max_size=4),
    num_chunks=st.integers(1, 6),
)
def test_a_promise_is_the_least_that_a_hit_of_its_length_reads(
    kinds: list[GroupKind], num_chunks: int
) -> None:
    """Windows no longer than a chunk, so that the last one is all that a hit reads of them, and local chunks that end
    where chunks do, so that it reads nothing of them."""
    spec = build_namespace(
        {"of": "promise"}, tokens_per_chunk=CHUNK,
        groups=[GroupShape(kind.value, 1, 4096) for kind in kinds],
    )  # fmt: skip
    groups = [GroupSpec(kind, 16, 1, 4096, window_tokens=WINDOWS.get(kind)) for kind in kinds]

    def hit(codes: bytes) -> int:
        return hit_tokens(
            groups, codes, there={Presence.READY_HERE}, tokens_per_chunk=CHUNK, computed_tokens=0,
            num_tokens=num_chunks * CHUNK + 1,
        )  # fmt: skip

    promised = _promised(spec, num_chunks)
    assert len(promised) == len(set(promised))
    codes = bytearray(num_chunks * len(kinds))
    for position in promised:
        codes[position] = Presence.READY_HERE
    assert hit(codes) == num_chunks * CHUNK
    for position in promised:
        codes[position] = Presence.ABSENT
        assert hit(codes) < num_chunks * CHUNK
        codes[position] = Presence.READY_HERE


@given(st.lists(st.tuples(*[st.sampled_from(Presence)] * 2), max_size=40), st.integers(0, 40))
def test_only_what_is_absent_here_is_marked_as_seen_elsewhere(
    pairs: list[tuple[Presence, Presence]], num_waited_for: int
) -> None:
    presence = bytearray(here for here, _ in pairs)[:num_waited_for]
    _overlay(presence, bytearray(there for _, there in pairs))
    assert list(presence) == [
        there if here is Presence.ABSENT and there is Presence.READY_ELSEWHERE else here
        for here, there in pairs[:num_waited_for]
    ]
