"""The allocator against a page map: exact best fit, coalescing, nothing stranded."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheservice.core.allocator import ALIGNMENT_BYTES, Allocator, Extent, aligned
from cacheservice.core.runs import cheapest_run, next_run

PAGE = ALIGNMENT_BYTES
NUM_PAGES = 40


class AllocatorMachine(RuleBasedStateMachine):
    """Oracle: a list that says which allocation owns each page."""

    def __init__(self) -> None:
        super().__init__()
        self.allocator = Allocator(NUM_PAGES * PAGE + 17)
        self.pages: list[Extent | None] = [None] * NUM_PAGES
        self.taken: list[Extent] = []

    def holes(self) -> list[int]:
        lengths, run = [], 0
        for owner in [*self.pages, self]:
            if owner is None:
                run += 1
            elif run:
                lengths.append(run)
                run = 0
        return lengths

    @rule(length=st.integers(1, 12 * PAGE))
    def allocate(self, length: int) -> None:
        pages = aligned(length) // PAGE
        fitting = [hole for hole in self.holes() if hole >= pages]
        extent = self.allocator.allocate(length)
        assert (extent is not None) == bool(fitting)
        if extent is None:
            return
        first = extent.offset // PAGE
        assert extent.length == pages * PAGE
        assert self.pages[first : first + pages] == [None] * pages
        before = self.holes()
        self.pages[first : first + pages] = [extent] * pages
        remaining = list(before)
        remaining.remove(min(fitting))
        if min(fitting) > pages:
            remaining.append(min(fitting) - pages)
        assert sorted(self.holes()) == sorted(remaining), "not the best fit"
        self.taken.append(extent)

    @precondition(lambda self: self.taken)
    @rule(choice=st.integers(0, 1000))
    def free(self, choice: int) -> None:
        extent = self.taken.pop(choice % len(self.taken))
        self.pages = [None if owner is extent else owner for owner in self.pages]
        self.allocator.free(extent)

    @precondition(lambda self: self.taken)
    @rule(
        pages=st.integers(1, NUM_PAGES), held=st.sets(st.integers(0, 20)), start=st.integers(0, 9)
    )
    def find_runs(self, pages: int, held: set[int], start: int) -> None:
        walls = {extent for i, extent in enumerate(self.taken) if i in held}

        def price(extent: Extent) -> float | None:
            return None if extent in walls else float(extent.length)

        longest = run = 0
        for owner in self.pages:
            run = 0 if owner in walls else run + 1
            longest = max(longest, run)
        found = next_run(self.allocator.first, pages * PAGE, price, 1000)
        assert (found is not None) == (longest >= pages)
        grown = cheapest_run(self.allocator.extents(), pages * PAGE, price)
        assert (grown is not None) == (longest >= pages)
        for answer in (found, grown):
            for left, right in zip(answer or [], (answer or [])[1:], strict=False):
                assert left.following is right
            if answer is not None:
                assert sum(extent.length for extent in answer) >= pages * PAGE
                assert not walls & set(answer)

    @invariant()
    def is_consistent(self) -> None:
        self.allocator.check_invariants()
        holes = self.holes()
        assert self.allocator.free_bytes == sum(holes) * PAGE
        assert self.allocator.largest_free_bytes == max(holes, default=0) * PAGE
        longest = [extent.length for extent in self.allocator.largest_holes(3)]
        assert longest == sorted((h * PAGE for h in holes), reverse=True)[:3]


TestAllocator = AllocatorMachine.TestCase
TestAllocator.settings = settings(max_examples=60, stateful_step_count=40)


def test_everything_freed_is_one_hole_again() -> None:
    allocator = Allocator(100 * PAGE)
    taken = [allocator.allocate(PAGE) for _ in range(100)]
    assert allocator.allocate(1) is None
    for extent in taken[::2] + taken[1::2]:
        assert extent is not None
        allocator.free(extent)
    assert allocator.largest_free_bytes == 100 * PAGE
    assert allocator.num_extents == 1


def test_freeing_twice_is_noticed() -> None:
    allocator = Allocator(4 * PAGE)
    extent = allocator.allocate(PAGE)
    assert extent is not None
    allocator.free(extent)
    with pytest.raises(AssertionError):
        allocator.free(extent)


def test_arena_below_one_page_is_refused() -> None:
    with pytest.raises(ValueError, match="has no page"):
        Allocator(PAGE - 1)


def test_a_length_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="not positive"):
        Allocator(PAGE).allocate(0)
