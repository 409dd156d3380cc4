"""Takes back the names of blocks that vLLM named for a forward pass and then left out of it.

vLLM 0.32 hashes the blocks of a request when it plans a pass (v1/core/kv_cache_manager.py `allocate_slots`). Under
priority scheduling it may preempt that request later in the same planning, to make room for another (v1/core/sched/
scheduler.py `schedule`), and frees the blocks with their hashes: nobody ever writes them, and the next request with
that prefix gets them as computed (vllm-project/vllm issue 57580). The engine would compute wrong tokens with them, and
we would store the chunks that it believes to have for all other engines. Between that planning and the next one nobody
looks a block up, so it is enough to take the hashes back at the end of it.

Called by: scheduler.py, in the engine's scheduling thread, for engines with priority scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.core.kv_cache_utils import BlockHash


class UnwrittenBlocks:
    """What was planned for each request, and so which of its names stand for nothing when it is preempted."""

    def __init__(
        self, block_pool: Any, *, num_groups: int, hash_block_tokens: int, step_tokens: int
    ) -> None:
        """A pass computes at most `step_tokens`."""
        self._pool = block_pool
        self._num_groups = num_groups
        self._hash_block_tokens = hash_block_tokens
        self._step_tokens = step_tokens
        self._named: dict[str, int] = {}
        """Tokens of each request whose blocks may have names, after the last pass that it was part of."""

    def see_plan(self, scheduler_output: Any, request_of: Callable[[str], Any]) -> None:
        """Take back the names of preempted requests, and note how far the others are named."""
        for request_id in scheduler_output.preempted_req_ids or ():
            request = request_of(request_id)
            if request is not None:
                self._take_back(request, self._named.get(request_id, 0))
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = request_of(request_id)
            if request is not None:
                self._named[request_id] = min(
                    request.num_computed_tokens + num_tokens, request.num_tokens
                )

    def forget(self, request_id: str) -> None:
        """The request has finished."""
        self._named.pop(request_id, None)

    def _take_back(self, request: Any, num_tokens: int) -> None:
        """Take back the names of this request's tokens beyond so many, as far as one pass reaches.

        A block that another request has computed under the same name loses it too: it is merely computed again. With
        async scheduling, drafts and placeholders count as planned before they are tokens, so one pass names what two
        have planned.
        """
        first = num_tokens // self._hash_block_tokens
        stop = first + 2 * -(-self._step_tokens // self._hash_block_tokens) + 1
        for block_hash in request.block_hashes[first:stop]:
            for group in range(self._num_groups):
                seen: set[int] = set()  # several blocks may have one name
                while found := self._pool.get_cached_block(BlockHash(block_hash), [group]):
                    blocks = {block.block_id for block in found}
                    if blocks <= seen:
                        break
                    seen |= blocks
                    self._pool.evict_blocks(blocks)
