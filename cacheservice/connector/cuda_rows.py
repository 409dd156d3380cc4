"""Where the bytes of a shard lie in the pages' allocation, as row numbers that a GPU gathers or scatters by.

The allocation is seen as a table of equal, aligned rows of `grain` bytes. The grain is the largest that every run,
stride and cut of a copy is a multiple of, so any range of a shard is a list of whole rows. Pure; immutable, but for a
cache of row numbers per grain.

Called by: cuda_copies.py, on copying threads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from cacheservice.connector.pages import ShardLayout


class PageTable:
    """Where one block of a shard lies."""

    __slots__ = (
        "__weakref__",
        "_by_grain",
        "_lengths",
        "_max_block",
        "_offsets",
        "_strides",
        "block_bytes",
        "grain",
    )

    def __init__(
        self, layout: ShardLayout, first_byte: int, num_bytes: int, max_grain: int
    ) -> None:
        self._offsets = [run.address - first_byte for run in layout.runs]
        self._strides = [run.block_stride for run in layout.runs]
        self._lengths = [run.length for run in layout.runs]
        self._max_block = min(
            (num_bytes - offset - length) // stride
            for offset, length, stride in zip(
                self._offsets, self._lengths, self._strides, strict=True
            )
        )
        self.block_bytes = layout.block_bytes
        # Also a divisor of every limit of a transfer.
        self.grain = math.gcd(max_grain, *self._offsets, *self._strides, *self._lengths)
        self._by_grain: dict[int, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}

    def checked(self, blocks: Sequence[int]) -> NDArray[np.int64]:
        """The ids as an array. Raises IndexError for one that is not there: the GPU would end the process."""
        ids = np.asarray(blocks, dtype=np.int64)
        if ids.size and (ids.min() < 0 or ids.max() > self._max_block):
            raise IndexError(
                f"block {ids.max()} is beyond the last one of the KV cache, {self._max_block}"
            )
        return ids

    def rows(self, blocks: NDArray[np.int64], position: int, end: int) -> Rows:
        """Bytes [position, end) of these blocks, one after another. Raises IndexError outside of them."""
        if position < 0 or end > len(blocks) * self.block_bytes:
            raise IndexError(
                f"bytes [{position}, {end}) are outside of the {len(blocks)} blocks of this copy"
            )
        grain = math.gcd(self.grain, position, end)
        return Rows(*self._rows_of_block(grain), blocks, grain, position, end)

    def _rows_of_block(self, grain: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Row numbers of block 0 in shard order, and how far each moves per block."""
        if (made := self._by_grain.get(grain)) is None:
            rows = [
                np.arange(offset // grain, (offset + length) // grain, dtype=np.int64)
                for offset, length in zip(self._offsets, self._lengths, strict=True)
            ]
            steps = [
                np.full(len(r), stride // grain, dtype=np.int64)
                for r, stride in zip(rows, self._strides, strict=True)
            ]
            made = self._by_grain[grain] = (np.concatenate(rows), np.concatenate(steps))
        return made


class Rows:
    """The rows of bytes [position, end) of some blocks, one after another."""

    __slots__ = ("_blocks", "_first", "_of_block", "_steps", "grain", "num_bytes")

    def __init__(
        self,
        of_block: NDArray[np.int64],
        steps: NDArray[np.int64],
        blocks: NDArray[np.int64],
        grain: int,
        position: int,
        end: int,
    ) -> None:
        self._of_block = of_block
        self._steps = steps
        self._blocks = blocks
        self._first = position
        self.grain = grain
        self.num_bytes = end - position

    def write(self, at: int, num_bytes: int, out: NDArray[np.int64]) -> int:
        """Write the rows of `num_bytes` from byte `at` on; returns their number."""
        per_block = len(self._of_block)
        first = (self._first + at) // self.grain
        last = first + num_bytes // self.grain
        number, within = divmod(first, per_block)
        written = 0
        if within:  # the rest of a block
            stop = min(per_block, within + last - first)
            written = stop - within
            self._write_one(number, within, stop, out[:written])
            number += 1
        whole = (last - first - written) // per_block
        if whole:
            room = out[written : written + whole * per_block].reshape(whole, per_block)
            blocks = self._blocks[number : number + whole, np.newaxis]
            np.multiply(blocks, self._steps, out=room)
            room += self._of_block
            written += whole * per_block
            number += whole
        if rest := last - first - written:
            self._write_one(number, 0, rest, out[written : written + rest])
        return last - first

    def _write_one(self, number: int, start: int, stop: int, out: NDArray[np.int64]) -> None:
        np.multiply(self._steps[start:stop], self._blocks[number], out=out)
        out += self._of_block[start:stop]
