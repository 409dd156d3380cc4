"""How many blocks a load must leave to requests that can't be preempted."""

from __future__ import annotations

import pytest

from cacheservice.connector.room import leaves_room, needs_guard
from cacheservice.core.layout import GroupKind, GroupSpec

FULL = GroupSpec(GroupKind.FULL, 16, 2, 512)
WINDOW = GroupSpec(GroupKind.SLIDING_WINDOW, 16, 2, 512, window_tokens=128)
LOCAL = GroupSpec(GroupKind.CHUNKED_LOCAL, 16, 2, 512, window_tokens=96)
STATE = GroupSpec(GroupKind.RECURRENT, 16, 2, 512)
MLA = GroupSpec(GroupKind.MLA, 16, 2, 512)


@pytest.mark.parametrize(
    ("groups", "wanted"),
    [
        ((FULL,), False),
        ((MLA,), False),
        ((STATE, FULL), False),
        ((WINDOW, FULL), True),
        ((LOCAL, FULL), True),
    ],
)
def test_only_groups_with_a_window_are_counted_wrong_by_vllm(groups, wanted):
    assert needs_guard(groups) is wanted


def test_alone_a_load_is_judged_by_vllm():
    assert leaves_room(
        (WINDOW, FULL), num_tokens=400, end=384, holders=[], free_blocks=0, step_tokens=64
    )


def test_the_first_steps_of_all_and_the_load_itself_must_fit():
    """A load of 160 tokens takes 10 + 8 blocks and 8 for the step after it; the holder lacks 2 + 2 for 27 tokens."""
    given = {"num_tokens": 405, "end": 160, "holders": [(475, 448)], "step_tokens": 64}
    assert leaves_room((WINDOW, FULL), **given, free_blocks=10 + 8 + 8 + 4)
    assert not leaves_room((WINDOW, FULL), **given, free_blocks=10 + 8 + 8 + 3)


def test_a_holder_whose_load_failed_has_no_blocks_and_counts_nothing():
    assert leaves_room(
        (WINDOW, FULL), num_tokens=400, end=384, holders=[(475, 0)], free_blocks=0, step_tokens=64
    )


def test_a_holder_with_room_in_its_last_block_lacks_nothing():
    assert leaves_room(
        (WINDOW, FULL), num_tokens=400, end=384, holders=[(447, 445)], free_blocks=0, step_tokens=64
    )
