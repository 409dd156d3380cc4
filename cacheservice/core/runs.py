"""Finds neighbouring extents that, once given up, make room for one long extent.

When enough bytes are free but no hole is long enough, evicting in the order of coldness alone would empty most of the
cache before two victims happen to touch. The store asks here instead, with its own price per extent. A run starts
from holes and cold extents and grows over the cheaper neighbour, so free bytes that lie scattered are used up rather
than left. Nothing is changed here; nothing is ever moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from cacheservice.core.allocator import Extent

Price = Callable[[Extent], float | None]
"""What giving up a used extent costs; None for one that must stay (leased, pending, quarantined)."""


JOINED_WORTH = 4.0
"""Price of a byte that stays stranded, in bytes of the coldest chunks; the hottest cost 5."""


def cheapest_run(seeds: Iterable[Extent], span: int, price: Price) -> list[Extent] | None:
    """Neighbours of at least `span` bytes together, by address, best of those that grow from `seeds`; None if
    none does.

    Each seed looks at no more extents than one run has, so the cost is bounded by seeds x run.
    """
    best: list[Extent] | None = None
    best_score = float("inf")
    for seed in seeds:
        grown = _grow(seed, span, price)
        if grown is None:
            continue
        cost, run = grown
        # Holes at both ends join the rest of the run. What they lose in stranded bytes is worth the eviction of hotter
        # chunks: without that, each replacement leaves its hole beside itself, and holes of a third of a shard stay.
        total = free = longest = 0
        for extent in run:
            total += extent.length
            if extent.is_free:
                free += extent.length
                longest = max(longest, extent.length)
        for end in (run[0].preceding, run[-1].following):
            if end is not None and end.is_free:
                total += end.length
                free += end.length
                longest = max(longest, end.length)
        # Holes that come to lie together count as much: too small to fill now, they grow until one is long enough.
        score = cost - JOINED_WORTH * max(free - (total - span) % span, free - longest)
        if score < best_score:
            best_score, best = score, run
    return best


def next_run(start: Extent, span: int, price: Price, max_extents: int) -> list[Extent] | None:
    """The first run of at least `span` bytes at or after `start` by address that nothing blocks.

    Looks at `max_extents` extents at most and does not wrap around.
    """
    run: list[Extent] = []
    total = first = 0
    extent: Extent | None = start
    for _ in range(max_extents):
        if extent is None:
            return None
        if not extent.is_free and price(extent) is None:
            run.clear()
            total = first = 0
        else:
            run.append(extent)
            total += extent.length
            while total - run[first].length >= span:
                total -= run[first].length
                first += 1
            if total >= span:
                return run[first:]
        extent = extent.following
    return None


def _grow(seed: Extent, span: int, price: Price) -> tuple[float, list[Extent]] | None:
    cost = 0.0 if seed.is_free else price(seed)
    if cost is None:
        return None
    run = [seed]
    total = seed.length
    left, right = seed.preceding, seed.following
    left_price = _price_of(left, price)
    right_price = _price_of(right, price)
    while total < span:
        if left_price is None and right_price is None:
            return None
        take_left = right_price is None or (
            left_price is not None
            and left is not None
            and right is not None
            and left_price * right.length < right_price * left.length
        )
        if take_left:
            assert left is not None
            assert left_price is not None
            run.append(left)
            total += left.length
            cost += left_price
            left = left.preceding
            left_price = _price_of(left, price)
        else:
            assert right is not None
            assert right_price is not None
            run.append(right)
            total += right.length
            cost += right_price
            right = right.following
            right_price = _price_of(right, price)
    run.sort(key=lambda extent: extent.offset)
    return cost, run


def _price_of(extent: Extent | None, price: Price) -> float | None:
    if extent is None:
        return None
    return 0.0 if extent.is_free else price(extent)
