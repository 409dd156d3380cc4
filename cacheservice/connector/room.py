"""Whether the engine keeps room for requests that hold loaded blocks when one more load is offered. Pure.

A request whose load has ended holds its blocks until its first forward pass, and vLLM can preempt it only after that.
vLLM 0.32 therefore keeps back what such requests still need (v1/core/sched/scheduler.py
`_inflight_prefill_reserved_blocks`), but for groups with a window it compares their bounded need with the length of
their block table, nulls included, and keeps back nothing (v1/core/single_type_kv_cache_manager.py
`get_num_blocks_to_allocate` with `apply_admission_cap`). Two requests can then hold all blocks between them while each
lacks a few, and the engine stands still for ever. Seen with the scheduler harness, on pools of less than two requests.

Called by: scheduler.py, for models with such groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cacheservice.core.layout import GroupKind, GroupSpec
from cacheservice.core.prefix import blocks_read

WITH_WINDOW = (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)


def needs_guard(groups: Sequence[GroupSpec]) -> bool:
    """Whether vLLM counts too little for a model of these groups."""
    return any(group.kind in WITH_WINDOW for group in groups)


def leaves_room(
    groups: Sequence[GroupSpec],
    *,
    num_tokens: int,
    end: int,
    holders: Iterable[tuple[int, int]],
    free_blocks: int,
    step_tokens: int,
) -> bool:
    """Whether a load up to `end` for a request of `num_tokens` leaves every request that holds loaded blocks, and
    itself, the blocks of its first forward pass.

    `holders` are the others, `(tokens, tokens that are computed or being loaded)`; without any, vLLM's own check is
    enough. A forward pass takes at most `step_tokens`.
    """
    needed = sum(_first_step(groups, tokens, computed, step_tokens) for tokens, computed in holders)
    if not needed:
        return True
    needed += sum(len(blocks_read(group, 0, end)) for group in groups)
    needed += _first_step(groups, num_tokens, end, step_tokens)
    return needed <= free_blocks


def _first_step(
    groups: Sequence[GroupSpec], num_tokens: int, computed_tokens: int, step_tokens: int
) -> int:
    """Blocks that a request's next forward pass takes beyond those it has; none of a window is free before it."""
    stop = min(num_tokens, computed_tokens + step_tokens)
    return sum(
        -(-stop // group.block_tokens) - -(-computed_tokens // group.block_tokens)
        for group in groups
        if computed_tokens
    )
