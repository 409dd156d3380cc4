"""The GPU's side of bench/datapath.py: pages in GPU memory, copied by the connector's CUDA copier.

Pages are 64 KiB, four layers a block, blocks in shuffled order, as an engine that has run for a while has them. The
yardsticks are copies of the same length between GPU and pinned memory on one stream: `pinned_out` for stores,
`pinned_in` for retrieves.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from cacheservice.client import ArenaUser, PageSink, PageSource
from cacheservice.connector.cuda_copies import CudaCopier, CudaRuns
from cacheservice.connector.cuda_device import TorchGpu
from cacheservice.connector.pages import ShardLayout, group_pages

PAGE_BYTES = 64 << 10
LAYERS = 4
BLOCK_BYTES = LAYERS * PAGE_BYTES


def cuda_pages(num_bytes: int) -> Any:
    """Pages in GPU memory for a source and a sink of `num_bytes` each: [layers, blocks, 1, 1, page], uint8."""
    shape = (LAYERS, 2 * num_bytes // BLOCK_BYTES, 1, 1, PAGE_BYTES)
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


class GpuMemory:
    """See `datapath.Memory`; `pages` as `cuda_pages` makes them."""

    def __init__(self, pages: Any, num_bytes: int, copier: CudaCopier | None = None) -> None:
        """`copier` is for tests; None = one for this GPU."""
        self.num_bytes = num_bytes
        self.yardsticks = {"store": "pinned_out", "retrieve": "pinned_in"}
        self._pages = pages
        views = list(pages)
        self._copier = copier if copier is not None else CudaCopier(TorchGpu(views))
        self.arena_user: ArenaUser | None = self._copier
        num_blocks = num_bytes // BLOCK_BYTES
        named = [(f"layer.{i}", view) for i, view in enumerate(views)]
        self._layout = ShardLayout(
            group_pages(named, num_blocks=2 * num_blocks, num_heads=1), first_head=0, num_heads=1
        )
        blocks = list(range(2 * num_blocks))
        random.Random(1).shuffle(blocks)
        self._source, self._sink = blocks[:num_blocks], blocks[num_blocks:]
        self._plain: tuple[Any, Any] | None = None

    def source(self, offset: int, num_bytes: int) -> PageSource:
        """See Memory."""
        return self._runs(self._source, offset, num_bytes)

    def sink(self, offset: int, num_bytes: int) -> PageSink:
        """See Memory."""
        return self._runs(self._sink, offset, num_bytes)

    def clear_sink(self) -> None:
        """See Memory."""
        self._pages[:, self._sink] = 0

    def is_same(self, offset: int, num_bytes: int) -> bool:
        """See Memory."""
        stretch = slice(offset // BLOCK_BYTES, (offset + num_bytes) // BLOCK_BYTES)
        source, sink = self._source[stretch], self._sink[stretch]
        return bool(torch.equal(self._pages[:, source], self._pages[:, sink]))

    def copy(self, yardstick: str, offset: int, num_bytes: int, size: int) -> None:
        """See Memory."""
        if self._plain is None:
            self._plain = (
                torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._pages.device),
                torch.zeros(self.num_bytes, dtype=torch.uint8, pin_memory=True),
            )
        source, target = self._plain if yardstick == "pinned_out" else reversed(self._plain)
        for start in range(offset, offset + num_bytes, size):
            stretch = slice(start, start + size)
            target[stretch].copy_(source[stretch], non_blocking=True)
        torch.cuda.current_stream().synchronize()

    def _runs(self, blocks: Sequence[int], offset: int, num_bytes: int) -> CudaRuns:
        first = offset // BLOCK_BYTES
        chosen = blocks[first : first + num_bytes // BLOCK_BYTES]
        return self._copier.runs(self._layout, chosen, after=self._copier.fence())
