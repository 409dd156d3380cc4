"""Where the bytes of a shard lie: every layout and head range against a plain tensor computation."""

from __future__ import annotations

import ctypes

import engines  # noqa: F401 - sets vLLM's environment
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheservice.connector.copies import PageRuns, copier_for
from cacheservice.connector.pages import ShardLayout, group_pages
from cacheservice.errors import RefusedError, UncacheableError

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT = 3, 7, 4, 2, 6


def caches(
    order: str, *, kernel_blocks: int = 1, padding: int = 0, heads: int = HEADS
) -> list[torch.Tensor]:
    """Per-layer views [blocks * kernel_blocks, heads, tokens, content] of one allocation in this physical order."""
    sizes = {
        "L": LAYERS,
        "B": BLOCKS * kernel_blocks,
        "H": heads,
        "N": TOKENS,
        "C": CONTENT + padding,
    }
    shape = [sizes[axis] for axis in order]
    memory = torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)
    logical = memory.permute([order.index(axis) for axis in "LBHNC"])
    return [logical[layer][..., :CONTENT] if padding else logical[layer] for layer in range(LAYERS)]


def plan(views: list[torch.Tensor], heads: int = HEADS):
    return group_pages(
        [(f"layer.{i}", v) for i, v in enumerate(views)], num_blocks=BLOCKS, num_heads=heads
    )


def expected(
    views: list[torch.Tensor], blocks: list[int], first: int, count: int, kernel_blocks: int
) -> bytes:
    """Block by block, layer by layer, kernel block by kernel block: the heads, as they lie in memory."""
    parts = []
    for block in blocks:
        for view in views:
            for part in range(kernel_blocks):
                piece = view[block * kernel_blocks + part][first : first + count]
                # [heads, tokens, content] in memory order
                order = sorted(range(3), key=lambda axis: -piece.stride(axis))
                parts.append(piece.permute(order).contiguous().numpy().tobytes())
    return b"".join(parts)


def gathered(runs: PageRuns, start: int, stop: int) -> bytes:
    room = ctypes.create_string_buffer(stop - start + 1)
    runs.gather(start, stop, ctypes.addressof(room))
    return room.raw[: stop - start]


@given(
    order=st.sampled_from(["LBHNC", "BLHNC", "LBNHC", "BLNHC"]),
    blocks=st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=5),
    shards=st.sampled_from([1, 2, 4]),
    kernel_blocks=st.sampled_from([1, 2]),
    cuts=st.tuples(st.floats(0, 1), st.floats(0, 1)),
)
@settings(max_examples=150)
def test_bytes_of_a_shard_come_from_and_go_to_the_right_places(
    order, blocks, shards, kernel_blocks, cuts
):
    if order in ("LBNHC", "BLNHC") and shards > 1:
        shards = 1
    if order.startswith("B") and kernel_blocks > 1:
        kernel_blocks = 1  # vLLM refuses to split packed blocks
    views = caches(order, kernel_blocks=kernel_blocks)
    pages = plan(views)
    per_shard = HEADS // shards
    for shard in range(shards):
        layout = ShardLayout(pages, first_head=shard * per_shard, num_heads=per_shard)
        runs = PageRuns(layout, blocks)
        size = layout.block_bytes * len(blocks)
        want = expected(views, blocks, shard * per_shard, per_shard, kernel_blocks)
        assert len(want) == size
        start, stop = sorted(round(c * size) for c in cuts)
        assert gathered(runs, start, stop) == want[start:stop]
        before = [v.clone() for v in views]
        content = bytes(b ^ 0x5A for b in want)
        held = ctypes.create_string_buffer(content[start:stop], max(1, stop - start))
        if len(set(blocks)) == len(blocks):
            runs.scatter(start, stop, ctypes.addressof(held))
            assert expected(views, blocks, shard * per_shard, per_shard, kernel_blocks) == (
                want[:start] + content[start:stop] + want[stop:]
            )
            untouched = [b for b in range(BLOCKS) if b not in blocks]
            for old, new in zip(before, views, strict=True):
                for b in untouched:
                    assert torch.equal(old[b * kernel_blocks], new[b * kernel_blocks])
            for old, new in zip(before, views, strict=True):
                new.copy_(old)


def test_a_range_that_starts_within_a_shard_maps_to_its_own_blocks():
    views = caches("LBHNC")
    layout = ShardLayout(plan(views), first_head=0, num_heads=HEADS)
    runs = PageRuns(layout, [5, 2], first_byte=3 * layout.block_bytes)
    got = gathered(runs, 4 * layout.block_bytes, 5 * layout.block_bytes)
    assert got == expected(views, [2], 0, HEADS, 1)
    with pytest.raises(IndexError):
        gathered(runs, 0, 10)
    with pytest.raises(IndexError):
        gathered(runs, 3 * layout.block_bytes, 6 * layout.block_bytes)


def test_shards_of_small_ranks_are_those_of_a_large_rank():
    """What two ranks of two heads store is byte for byte what one rank of four heads reads in its shards."""
    whole = caches("LBHNC")
    blocks = [3, 1]
    for rank in range(2):
        part = [v[:, 2 * rank : 2 * rank + 2].contiguous() for v in whole]
        small = PageRuns(ShardLayout(plan(part, 2), first_head=0, num_heads=2), blocks)
        large = PageRuns(ShardLayout(plan(whole), first_head=2 * rank, num_heads=2), blocks)
        size = len(blocks) * ShardLayout(plan(part, 2), first_head=0, num_heads=2).block_bytes
        assert gathered(small, 0, size) == gathered(large, 0, size)


def test_layouts_that_scatter_a_page_are_refused():
    for order in ("LHBNC", "BHLNC"):
        with pytest.raises(RefusedError, match="not one run of bytes"):
            plan(caches(order))


def test_pages_in_memory_that_nobody_can_copy_are_refused():
    view = torch.empty(BLOCKS, HEADS, TOKENS, CONTENT, device="meta")
    with pytest.raises(UncacheableError, match=r"device meta, .* CPU and CUDA memory"):
        copier_for({"layer.0": view})


def test_padding_inside_of_a_page_is_refused():
    with pytest.raises(RefusedError, match="not one run of bytes"):
        plan(caches("LBHNC", padding=2))


def test_padding_between_pages_is_left_alone():
    memory = torch.zeros(BLOCKS, HEADS * TOKENS * CONTENT + 16)
    view = memory[:, : HEADS * TOKENS * CONTENT].view(BLOCKS, HEADS, TOKENS, CONTENT)
    layout = ShardLayout(plan([view]), first_head=0, num_heads=HEADS)
    held = ctypes.create_string_buffer(b"\x3f" * layout.block_bytes, layout.block_bytes)
    PageRuns(layout, [2]).scatter(0, layout.block_bytes, ctypes.addressof(held))
    assert view[2].flatten()[0] != 0
    assert not memory[:, HEADS * TOKENS * CONTENT :].any()
    assert not memory[1].any()
    assert not memory[3].any()


def test_head_ranges_of_token_major_pages_are_refused():
    with pytest.raises(RefusedError, match="contiguous heads"):
        ShardLayout(plan(caches("LBNHC")), first_head=0, num_heads=2)
