"""Blocks that must not be reused while a save reads them: bounded, and released only when every rank has reported.

A pin is one more reference on vLLM's block (`block_pool.touch`), so it covers preemption, freed windows, finish and
abort with one mechanism. Single-threaded: the engine's scheduling thread.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from cacheservice.core.keys import ChunkKey

MAX_PINNED_FRACTION = 0.25
WORTH_WAITING_S = 0.5
"""Pins younger than this will be released in a moment; older ones belong to a save that has got stuck."""


class Pins:
    """Owns the references that saves hold on blocks of one pool."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool
        self._blocks_of: dict[int, list[Any]] = {}
        self._ranks_left: dict[int, int] = {}
        self._pinned_at: dict[int, float] = {}
        self._num_pinned = 0
        self.max_blocks = int(block_pool.num_gpu_blocks * MAX_PINNED_FRACTION)

    def __len__(self) -> int:
        """Saves whose blocks are pinned."""
        return len(self._blocks_of)

    @property
    def num_blocks(self) -> int:
        """Pins held; a block that two saves read counts twice."""
        return self._num_pinned

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many more blocks may be pinned."""
        return self._num_pinned + num_blocks <= self.max_blocks

    def are_worth_waiting_for(self, now: float) -> bool:
        """Whether blocks will come back so soon that waiting for them is cheaper than a preemption. A block that a
        request holds as well does not come back with its pin."""
        return any(
            block.ref_cnt == 1
            for save_id, pinned_at in self._pinned_at.items()
            if now - pinned_at < WORTH_WAITING_S
            for block in self._blocks_of[save_id]
        )

    def holds_state(self, block_id: int, key: ChunkKey, group: int) -> bool:
        """Whether vLLM itself says that this block holds the state of this chunk end. Offers are made before the
        forward pass, for requests that may be gone since; a state under another name would be served to everybody."""
        wanted = make_block_hash_with_group_id(BlockHash(key), group)
        return bool(self._pool.blocks[block_id].block_hash == wanted)

    def pin(self, save_id: int, block_ids: Iterable[int], *, num_ranks: int, now: float) -> None:
        """Hold these blocks until `num_ranks` ranks reported `save_id`."""
        blocks = [self._pool.blocks[i] for i in block_ids]
        self._pool.touch(blocks)
        self._blocks_of[save_id] = blocks
        self._ranks_left[save_id] = num_ranks
        self._pinned_at[save_id] = now
        self._num_pinned += len(blocks)

    def report(self, save_id: int, num_ranks: int) -> bool:
        """So many more ranks are done; True when that were the last ones and the blocks are free. Unknown ids:
        False."""
        if save_id not in self._blocks_of:
            return False
        self._ranks_left[save_id] -= num_ranks
        if self._ranks_left[save_id] > 0:
            return False
        blocks = self._blocks_of.pop(save_id)
        del self._ranks_left[save_id], self._pinned_at[save_id]
        self._num_pinned -= len(blocks)
        self._pool.free_blocks(reversed(blocks))  # the end of a chain is evicted first
        return True
