"""How long a hit is: the longest prefix whose bytes are all there, over groups of every kind. Pure.

A prefix of E tokens can be used when each group has what a computation that starts at E reads (design, section 7):

    full, mla        every token of [C, E), where the engine has [0, C) itself
    sliding window   the last `window - 1` tokens before E
    chunked local    the tokens of E's local chunk before E; none when E starts a local chunk
    recurrent        the state exactly at E, and E < num_tokens, since a state can't be rewound for the last token

E is always a multiple of the chunk size. A group of which nothing is there makes the hit zero: no group is ever left
out.
Called by: the connector's scheduler half on every question of vLLM; only presence is remembered between calls, never E.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cacheservice.core.layout import GroupKind, GroupSpec


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
        if group.kind in (GroupKind.FULL, GroupKind.MLA):
            end = first
            while end < num_chunks and presence[end * num_groups + index] in there:
                end += 1
            num_chunks = min(num_chunks, end)
    for chunks in range(num_chunks, first, -1):
        end = chunks * tokens_per_chunk
        if all(
            _can_resume(
                group,
                index,
                num_groups,
                presence,
                there,
                tokens_per_chunk,
                computed_tokens,
                end,
                num_tokens,
            )
            for index, group in enumerate(groups)
        ):
            return end
    return 0


def _can_resume(
    group: GroupSpec, index: int, num_groups: int, presence: bytes, there: Collection[int],
    tokens_per_chunk: int, computed_tokens: int, end: int, num_tokens: int,
) -> bool:  # fmt: skip
    """Whether `group` has what a computation that starts at `end` reads, beyond what the engine has below C."""
    match group.kind:
        case GroupKind.FULL | GroupKind.MLA:
            return True  # the caller cut the chunks at the first gap
        case GroupKind.RECURRENT:
            return (
                end < num_tokens
                and presence[(end // tokens_per_chunk - 1) * num_groups + index] in there
            )
        case GroupKind.SLIDING_WINDOW:
            assert group.window_tokens is not None
            start = end - (group.window_tokens - 1)
        case GroupKind.CHUNKED_LOCAL:
            assert group.window_tokens is not None
            start = end // group.window_tokens * group.window_tokens
    start = max(start, computed_tokens, 0)
    return all(
        presence[chunk * num_groups + index] in there
        for chunk in range(start // tokens_per_chunk, -(-end // tokens_per_chunk))
        if start < end
    )
