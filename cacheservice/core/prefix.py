"""How long a hit is and which blocks it takes: the longest prefix whose bytes are all there, over groups of every kind.

A prefix of E tokens can be used when each group has what a computation that starts at E reads (design, section 7):

    full, mla        every token of [C, E), where the engine has [0, C) itself
    sliding window   the last `window - 1` tokens before E
    chunked local    the tokens of E's local chunk before E; none when E starts a local chunk
    recurrent        the state exactly at E

`blocks_read` is that rule, in blocks; what is offered, what is loaded and what is checked all come from it. E is always
a multiple of the chunk size. A group of which nothing is there makes the hit zero: no group is ever left out.

Where a hit covers all tokens of a request, vLLM computes the last one again (0.32, v1/core/sched/scheduler.py
`_update_waiting_for_remote_kv`), so the computation starts at E - 1 with the blocks that were loaded for E. A state
can't be rewound, a window may lack the token before it, and vLLM's own prefix cache never goes this way: with any group
that is not full attention or MLA, E is less than the number of tokens.

Pure. Called by: the connector's scheduler half on every question of vLLM (only presence is remembered between calls,
never E) and when it plans loads and saves; the worker half when it finds the pages of a load.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from cacheservice.core.layout import GroupKind, GroupSpec


@dataclass(frozen=True, slots=True)
class ChunkPart:
    """Blocks of one group that a load takes from one chunk."""

    chunk: int
    """Number of the chunk in the request."""
    first_block: int
    """Position in the request's block table of this group."""
    stop_block: int
    """Position after the last one."""


def blocks_read(group: GroupSpec, computed_tokens: int, end: int) -> range:
    """Positions in the block table that a computation resuming at `end` reads and the engine does not have below
    `computed_tokens`.

    `computed_tokens` is a multiple of the group's block. For recurrent groups the last position holds the state at
    `end`.
    """
    block = group.block_tokens
    stop = -(-end // block)
    if end <= computed_tokens:
        return range(stop, stop)
    match group.kind:
        case GroupKind.FULL | GroupKind.MLA:
            start = computed_tokens
        case GroupKind.RECURRENT:
            return range(stop - 1, stop)
        case GroupKind.SLIDING_WINDOW:
            assert group.window_tokens is not None
            start = end - (group.window_tokens - 1)
        case GroupKind.CHUNKED_LOCAL:
            assert group.window_tokens is not None
            start = end // group.window_tokens * group.window_tokens
    start = max(start, computed_tokens)
    if start >= end:
        return range(stop, stop)
    return range(start // block, stop)


def stored_blocks(group: GroupSpec, tokens_per_chunk: int, chunk: int) -> range:
    """Positions in the block table that chunk number `chunk` holds of this group: the last ones before its end."""
    stop = (chunk + 1) * tokens_per_chunk // group.block_tokens
    return range(stop - group.num_blocks(tokens_per_chunk), stop)


def parts_to_load(
    group: GroupSpec, tokens_per_chunk: int, computed_tokens: int, end: int
) -> list[ChunkPart] | None:
    """What a load of [computed_tokens, end) takes from which chunk; None when chunks don't hold all of it.

    `end` need not be a chunk's end: vLLM may authorise fewer tokens than were offered. Windows and states are held
    before chunk ends only.
    """
    needed = blocks_read(group, computed_tokens, end)
    if group.kind is GroupKind.RECURRENT and end % tokens_per_chunk:
        return None
    blocks_per_chunk = tokens_per_chunk // group.block_tokens
    parts = []
    block = needed.start
    while block < needed.stop:
        chunk = block // blocks_per_chunk
        stored = stored_blocks(group, tokens_per_chunk, chunk)
        if block < stored.start:
            return None
        stop = min(needed.stop, stored.stop)
        parts.append(ChunkPart(chunk, block, stop))
        block = stop
    return parts


def hit_tokens(
    groups: Sequence[GroupSpec],
    presence: bytes,
    *,
    there: Collection[int],
    tokens_per_chunk: int,
    computed_tokens: int,
    num_tokens: int,
    max_chunks: int | None = None,
) -> int:
    """End, exclusive and in tokens, of the longest usable prefix; 0 when nothing beyond `computed_tokens` can be had.

    `presence` has one byte per chunk and group, chunk by chunk; codes in `there` count as there. `max_chunks` bounds
    how many chunks may be used (chunks that failed for this request are not offered again).
    """
    num_groups = len(groups)
    num_chunks = min(len(presence) // num_groups, num_tokens // tokens_per_chunk)
    if max_chunks is not None:
        num_chunks = min(num_chunks, max_chunks)
    first = computed_tokens // tokens_per_chunk
    for index, group in enumerate(groups):
        if group.kind.is_read_whole:
            end = first
            while end < num_chunks and presence[end * num_groups + index] in there:
                end += 1
            num_chunks = min(num_chunks, end)
    partial = [(i, group) for i, group in enumerate(groups) if not group.kind.is_read_whole]
    # States and windows always read the last chunk. Most chunks of a prompt have no state: pass over them quickly.
    last_chunk_counts = [i for i, group in partial if group.kind is not GroupKind.CHUNKED_LOCAL]
    for chunks in range(num_chunks, first, -1):
        end = chunks * tokens_per_chunk
        if end == num_tokens and partial:
            continue
        last = (chunks - 1) * num_groups
        for index in last_chunk_counts:
            if presence[last + index] not in there:
                break
        else:
            if all(
                _is_held(group, i, num_groups, presence, there, tokens_per_chunk, computed_tokens, end)
                for i, group in partial
            ):  # fmt: skip
                return end
    return 0


def _is_held(
    group: GroupSpec, index: int, num_groups: int, presence: bytes, there: Collection[int],
    tokens_per_chunk: int, computed_tokens: int, end: int,
) -> bool:  # fmt: skip
    """Whether the chunks that are there hold what `group` reads at the chunk end `end`."""
    needed = blocks_read(group, computed_tokens, end)
    blocks_per_chunk = tokens_per_chunk // group.block_tokens
    return all(
        presence[chunk * num_groups + index] in there
        for chunk in range(needed.start // blocks_per_chunk, -(-needed.stop // blocks_per_chunk))
        if needed
    )
