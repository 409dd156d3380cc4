"""What is chosen to be saved, where most of a request is known to be there."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from cacheservice.connector.pins import Pins
from cacheservice.connector.requests import KnownPresence, RequestState
from cacheservice.connector.saves import Saves
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupKind, GroupSpec
from cacheservice.core.outcomes import Presence

GROUPS = (
    GroupSpec(GroupKind.FULL, 16, 1, 64),
    GroupSpec(GroupKind.SLIDING_WINDOW, 16, 1, 64, window_tokens=17),
)
PLAN: Any = SimpleNamespace(groups=GROUPS, tokens_per_chunk=32)
NUM_CHUNKS = 400


class Table(list[int]):
    """The blocks of one group; notes which were looked at."""

    def __init__(self, num_blocks: int, seen: set[int]) -> None:
        super().__init__(range(1, num_blocks + 1))
        self.seen = seen

    def __getitem__(self, key: Any) -> Any:
        self.seen.update(range(*key.indices(len(self))))
        return super().__getitem__(key)


def chosen(codes: bytes, *, epoch: int = 7) -> tuple[RequestState, Saves, set[int]]:
    """Choose from a request of 400 chunks, of which the agent said `codes`."""
    pool = SimpleNamespace(num_gpu_blocks=10_000)
    saves = Saves(Pins(pool), num_ranks=1, new_id=lambda: 1, clock=lambda: 0.0)
    saves.see_agent(7)
    state = RequestState("r", 0.0)
    state.keys = [ChunkKey(bytes([n >> 8, n & 255]) * 16) for n in range(NUM_CHUNKS)]
    state.known = KnownPresence(codes, 0.0, epoch, 0)
    seen: set[int] = set()
    saves.pass_over_known(state, len(GROUPS), NUM_CHUNKS)
    saves.choose(state, PLAN, NUM_CHUNKS, [Table(NUM_CHUNKS * 2, seen) for _ in GROUPS], {})
    return state, saves, seen


@pytest.mark.parametrize("code", [Presence.READY_HERE, Presence.READY_ELSEWHERE, Presence.PENDING])
def test_what_is_there_is_passed_over_at_once(
    code: Presence, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that begins with a hit of 100,000 tokens must not cost the scheduler milliseconds."""
    looked_at = []
    choose_blocks = Saves._blocks_of

    def watched(self: Saves, *arguments: Any) -> Any:
        looked_at.append(arguments)
        return choose_blocks(self, *arguments)

    monkeypatch.setattr(Saves, "_blocks_of", watched)
    state, saves, seen = chosen(bytes([code]) * (NUM_CHUNKS * 2))
    assert (state.next_save, state.num_promised) == (NUM_CHUNKS, NUM_CHUNKS)
    assert not looked_at
    assert not seen
    assert not saves._chosen


def test_the_first_group_that_is_missing_is_saved() -> None:
    """The window of chunk 397 is missing, and the answer said nothing of chunk 399."""
    codes = bytearray([Presence.READY_HERE]) * ((NUM_CHUNKS - 1) * 2)
    codes[397 * 2 + 1] = Presence.ABSENT
    state, saves, seen = chosen(bytes(codes))
    parts = {(chunk.number, g) for _, chunk in saves._chosen for g in (0, 1) if chunk.block_ids[g]}
    assert parts == {(397, 1), (399, 0), (399, 1)}
    assert seen == {397 * 2 + 1, 399 * 2, 399 * 2 + 1}
    assert (state.next_save, state.num_promised) == (NUM_CHUNKS, NUM_CHUNKS)


def test_what_another_incarnation_of_the_agent_said_counts_for_nothing() -> None:
    codes = bytes([Presence.READY_HERE]) * (NUM_CHUNKS * 2)
    _, saves, _ = chosen(codes, epoch=6)
    assert saves._chosen[0][1].number == 0
