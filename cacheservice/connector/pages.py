"""Where the bytes of a shard lie in the engine's KV cache.

A shard is the concatenation, block by block and within a block layer by layer, of the runs that its head range covers:
one run is the whole page where the rank holds exactly the heads of the shard, else the part of its heads in each kernel
block. Padding is never touched. Built once in `register_kv_caches`; read by worker threads, immutable.

Nothing is copied here: copies.py walks these layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cacheservice.errors import UncacheableError


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer: `page(b) = address + b * block_stride`, `page_bytes` long without padding."""

    name: str
    address: int
    block_stride: int
    page_bytes: int
    kernel_blocks: int
    """How many equal, dense parts a page is made of, each with all heads; 1 unless the backend uses smaller blocks."""


@dataclass(frozen=True, slots=True)
class GroupPages:
    """The pages of one group of this rank, layers in canonical order."""

    layers: tuple[LayerPages, ...]
    num_heads: int
    """Heads of this rank; 1 for MLA."""
    is_head_major: bool
    """Heads are contiguous within a (kernel) block, so that a head range is one run."""

    @property
    def block_bytes(self) -> int:
        """Payload of one block over all layers of this rank."""
        return sum(layer.page_bytes for layer in self.layers)


def group_pages(
    layers: Sequence[tuple[str, Any]], *, num_blocks: int, num_heads: int
) -> GroupPages:
    """Read the page plan off the registered views.

    Each view is `[num_blocks * kernel_blocks, heads, tokens, content]` (vLLM 0.32, v1/kv_cache_interface.py
    `create_kv_cache_views`). Raises UncacheableError when the bytes of a page are not one run.
    """
    made = []
    is_head_major = True
    for name, view in layers:
        item = view.element_size()
        if view.dim() != 4 or view.shape[0] % num_blocks:
            raise UncacheableError(
                f"layer {name}: the KV cache has shape {tuple(view.shape)}, expected [blocks, heads, tokens, content]"
            )
        kernel_blocks = view.shape[0] // num_blocks
        _, heads, tokens, content = view.shape
        strides = view.stride()
        payload = heads * tokens * content
        reach = (
            sum(
                (size - 1) * stride
                for size, stride in zip(view.shape[1:], strides[1:], strict=True)
            )
            + 1
        )
        if reach != payload or (kernel_blocks > 1 and strides[0] != payload):
            raise UncacheableError(
                f"layer {name}: a page is not one run of bytes (shape {tuple(view.shape)}, strides {tuple(strides)}); "
                "set VLLM_KV_CACHE_LAYOUT=LBHNC (or HND)"
            )
        if heads > 1 and strides[1] < strides[2]:
            is_head_major = False
        made.append(
            LayerPages(
                name=name,
                address=view.data_ptr(),
                block_stride=strides[0] * kernel_blocks * item,
                page_bytes=payload * kernel_blocks * item,
                kernel_blocks=kernel_blocks,
            )
        )
    return GroupPages(tuple(made), num_heads, is_head_major)


@dataclass(frozen=True, slots=True)
class _Run:
    """One run of a page: `length` bytes at `address + block * block_stride`."""

    address: int
    block_stride: int
    length: int


class ShardLayout:
    """Runs of one block of one shard, ready to be walked: which bytes of the shard are where, relative to a block."""

    __slots__ = ("__weakref__", "block_bytes", "runs", "starts")

    def __init__(self, pages: GroupPages, *, first_head: int, num_heads: int) -> None:
        """Cover heads [first_head, first_head + num_heads) of this rank's own. Raises UncacheableError when not
        head-major."""
        whole = num_heads == pages.num_heads
        if not whole and not pages.is_head_major:
            raise UncacheableError(
                "engines of other tensor parallel sizes need contiguous heads: set VLLM_KV_CACHE_LAYOUT=LBHNC (or HND)"
            )
        runs: list[_Run] = []
        for layer in pages.layers:
            if whole:
                runs.append(_Run(layer.address, layer.block_stride, layer.page_bytes))
                continue
            part_bytes = layer.page_bytes // layer.kernel_blocks
            head_bytes = part_bytes // pages.num_heads
            for part in range(layer.kernel_blocks):
                offset = part * part_bytes + first_head * head_bytes
                runs.append(
                    _Run(layer.address + offset, layer.block_stride, num_heads * head_bytes)
                )
        self.runs = tuple(runs)
        starts = [0]
        for run in runs:
            starts.append(starts[-1] + run.length)
        self.starts = tuple(starts)
        self.block_bytes = starts[-1]
