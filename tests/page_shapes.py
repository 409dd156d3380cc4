"""KV caches in one allocation, as vLLM makes them, of many shapes: for every test that compares copied bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from cacheservice.connector.pages import ShardLayout, group_pages


@dataclass(frozen=True)
class Shape:
    """Layers of several page sizes, pages of kernel blocks, padding between pages, an offset."""

    contents: tuple[int, ...]
    """Elements of one token and head, per layer."""
    num_blocks: int
    heads: int
    tokens: int
    kernel_blocks: int
    padding: int
    offset: int
    dtype: torch.dtype
    blocks_outermost: bool
    shards: int

    def room(self, device: str = "cpu") -> Any:
        """Memory for it, uint8, of random bytes."""
        item = torch.empty(0, dtype=self.dtype).element_size()
        pages = [self._page(content) + self.padding for content in self.contents]
        size = (self.offset + sum(pages) * self.num_blocks) * item
        return torch.randint(0, 256, (size + 16,), dtype=torch.uint8, device=device)

    def views(self, room: Any) -> list[Any]:
        """Per layer [num_blocks * kernel_blocks, heads, tokens, content]."""
        flat = room.view(self.dtype)
        views, at = [], self.offset
        pages = [self._page(content) + self.padding for content in self.contents]
        for content, page in zip(self.contents, pages, strict=True):
            stride = sum(pages) if self.blocks_outermost else page
            part = self.heads * self.tokens * content
            shape = (self.num_blocks * self.kernel_blocks, self.heads, self.tokens, content)
            if self.kernel_blocks > 1:
                assert page == stride == part * self.kernel_blocks
                stride = part
            views.append(
                flat.as_strided(shape, (stride, self.tokens * content, content, 1), storage_offset=at)
            )  # fmt: skip
            at += page if self.blocks_outermost else page * self.num_blocks
        return views

    def layouts(self, room: Any) -> list[ShardLayout]:
        """Where each shard's bytes lie."""
        named = [(f"layer.{i}", view) for i, view in enumerate(self.views(room))]
        pages = group_pages(named, num_blocks=self.num_blocks, num_heads=self.heads)
        each = self.heads // self.shards
        return [ShardLayout(pages, first_head=i * each, num_heads=each) for i in range(self.shards)]

    def _page(self, content: int) -> int:
        return self.heads * self.tokens * content * self.kernel_blocks


@st.composite
def shapes(draw: Any) -> Shape:
    """Small ones."""
    kernel_blocks = draw(st.sampled_from([1, 1, 2]))
    blocks_outermost = kernel_blocks == 1 and draw(st.booleans())
    heads = draw(st.sampled_from([1, 2, 4]))
    return Shape(
        contents=tuple(draw(st.lists(st.sampled_from([2, 3, 8, 12]), min_size=1, max_size=3))),
        num_blocks=draw(st.integers(2, 7)),
        heads=heads,
        tokens=draw(st.sampled_from([1, 2, 4])),
        kernel_blocks=kernel_blocks,
        padding=0 if kernel_blocks > 1 else draw(st.sampled_from([0, 0, 1, 4])),
        offset=draw(st.sampled_from([0, 0, 3, 8])),
        dtype=draw(st.sampled_from([torch.uint8, torch.float16, torch.float32])),
        blocks_outermost=blocks_outermost,
        shards=draw(st.sampled_from([s for s in (1, 2, 4) if s <= heads])),
    )


def plain(num_blocks: int = 6, layers: int = 2, page_bytes: int = 4096) -> Shape:
    """`layers` pages of `page_bytes` a block."""
    return Shape(
        contents=(page_bytes,) * layers, num_blocks=num_blocks, heads=1, tokens=1, kernel_blocks=1, padding=0,
        offset=0, dtype=torch.uint8, blocks_outermost=False, shards=1,
    )  # fmt: skip
