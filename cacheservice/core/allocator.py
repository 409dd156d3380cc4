"""Places extents in the arena: best fit over exact sizes, neighbours coalesced at once.

Invariants: extents tile the arena without gap or overlap, no two free extents touch, every offset and length is a
multiple of `ALIGNMENT_BYTES`. Called by the store, under its caller's lock. It leaves to the store which extents to
give up when nothing fits (`cacheservice.core.runs` finds neighbours that together would).

Why this shape (docs/decisions/0004-allocator.md): d free extents of distinct sizes need at least d (d + 1) / 2 pages,
so a 1 TiB arena has at most 23,170 distinct free sizes. A sorted list of them, bisected, is an exact best fit whose
cost does not grow with the number of extents.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

ALIGNMENT_BYTES = 4096
"""One page: no two shards share a page, so that a stopped writer's late store can't touch a neighbour's page, page
registration (cudaHostRegister) and direct I/O of a disk tier fit, and at most 4095 bytes a shard are lost."""


def aligned(length: int) -> int:
    """Bytes that `length` bytes occupy in the arena."""
    return -(-length // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class Extent:
    """A range `[offset, offset + length)` of the arena, linked to its neighbours by address.

    Made and changed only by the allocator, but for `owner`, which belongs to who allocated it. A free extent may be
    absorbed by a neighbour; then `length` is 0 and the object means nothing any more.
    """

    __slots__ = ("following", "is_free", "length", "offset", "owner", "preceding")

    def __init__(self, offset: int, length: int) -> None:
        self.offset = offset
        self.length = length
        self.is_free = True
        self.owner: object = None
        self.preceding: Extent | None = None
        self.following: Extent | None = None

    def __repr__(self) -> str:
        state = "free" if self.is_free else "used"
        return f"Extent({self.offset}+{self.length} {state})"


class Allocator:
    """Free and used extents of one arena. Not thread-safe; the caller holds the core lock."""

    def __init__(self, arena_bytes: int) -> None:
        usable = arena_bytes - arena_bytes % ALIGNMENT_BYTES
        if usable <= 0:
            raise ValueError(f"arena of {arena_bytes} bytes has no page of {ALIGNMENT_BYTES} bytes")
        self.num_extents = 1
        """Free and used together."""
        self.free_bytes = 0
        self.usable_bytes = usable
        self._first = Extent(0, usable)
        self._sizes: list[int] = []
        self._bins: dict[int, dict[Extent, None]] = {}
        self._add_free(self._first)

    @property
    def first(self) -> Extent:
        """The extent at offset 0; follow `following` for all others by address."""
        return self._first

    @property
    def used_bytes(self) -> int:
        """Sum of the lengths of the used extents."""
        return self.usable_bytes - self.free_bytes

    @property
    def largest_free_bytes(self) -> int:
        """The longest extent that `allocate` would give now."""
        return self._sizes[-1] if self._sizes else 0

    def allocate(self, length: int) -> Extent | None:
        """The start of the smallest free extent that holds `length` bytes, or None when none does."""
        if length <= 0:
            raise ValueError(f"length={length} is not positive")
        span = aligned(length)
        position = bisect_left(self._sizes, span)
        if position == len(self._sizes):
            return None
        size = self._sizes[position]
        # popitem and not next(reversed(...)): only it forgets the places of what was taken from the end before.
        extent, _ = self._bins[size].popitem()
        self.free_bytes -= size
        if not self._bins[size]:
            self._drop_bin(size)
        if size > span:
            rest = Extent(extent.offset + span, size - span)
            extent.length = span
            rest.preceding, rest.following = extent, extent.following
            if rest.following is not None:
                rest.following.preceding = rest
            extent.following = rest
            self.num_extents += 1
            self._add_free(rest)
        extent.is_free = False
        return extent

    def free(self, extent: Extent) -> None:
        """Give a used extent back; it may be absorbed by its neighbours."""
        assert not extent.is_free, f"{extent} is freed twice"
        assert extent.length, f"{extent} is no extent of the arena any more"
        extent.is_free = True
        extent.owner = None
        following = extent.following
        if following is not None and following.is_free:
            self._remove_free(following)
            self._absorb_following(extent, following)
        preceding = extent.preceding
        if preceding is not None and preceding.is_free:
            self._remove_free(preceding)
            self._absorb_following(preceding, extent)
            extent = preceding
        self._add_free(extent)

    def largest_holes(self, limit: int) -> list[Extent]:
        """At most `limit` free extents, longest first."""
        holes: list[Extent] = []
        for size in reversed(self._sizes):
            for extent in reversed(self._bins[size]):
                holes.append(extent)
                if len(holes) == limit:
                    return holes
        return holes

    def extents(self) -> Iterator[Extent]:
        """All extents by address."""
        extent: Extent | None = self._first
        while extent is not None:
            yield extent
            extent = extent.following

    def check_invariants(self) -> None:
        """Raise AssertionError when the extents do not tile the arena or the size bins differ from them."""
        offset = count = free = 0
        preceding: Extent | None = None
        for extent in self.extents():
            assert extent.preceding is preceding, (
                f"{extent} follows {preceding} but does not know it"
            )
            assert extent.offset == offset, f"gap or overlap at {offset}: {extent}"
            assert extent.length > 0, f"{extent} is empty"
            assert extent.length % ALIGNMENT_BYTES == 0, f"{extent} is not aligned"
            if extent.is_free:
                assert preceding is None or not preceding.is_free, (
                    f"{preceding} and {extent} both free"
                )
                assert extent in self._bins.get(extent.length, {}), f"{extent} is in no bin"
                assert extent.owner is None, f"{extent} is free but owned"
                free += extent.length
            offset += extent.length
            count += 1
            preceding = extent
        assert offset == self.usable_bytes, f"extents end at {offset}, arena at {self.usable_bytes}"
        assert count == self.num_extents, f"{count} extents, counted {self.num_extents}"
        assert free == self.free_bytes, f"{free} bytes free, counted {self.free_bytes}"
        assert self._sizes == sorted(self._bins), "sizes differ from bins"
        assert all(self._bins.values()), "a bin is empty"
        assert sum(size * len(found) for size, found in self._bins.items()) == free, (
            "stale bin entry"
        )

    def _absorb_following(self, extent: Extent, following: Extent) -> None:
        extent.length += following.length
        extent.following = following.following
        if extent.following is not None:
            extent.following.preceding = extent
        following.length = 0
        following.preceding = following.following = None
        self.num_extents -= 1

    def _add_free(self, extent: Extent) -> None:
        extent.is_free = True
        self.free_bytes += extent.length
        found = self._bins.get(extent.length)
        if found is None:
            self._bins[extent.length] = {extent: None}
            insort(self._sizes, extent.length)
        else:
            found[extent] = None

    def _remove_free(self, extent: Extent) -> None:
        self.free_bytes -= extent.length
        found = self._bins[extent.length]
        del found[extent]
        if not found:
            self._drop_bin(extent.length)

    def _drop_bin(self, size: int) -> None:
        del self._bins[size]
        del self._sizes[bisect_left(self._sizes, size)]
