"""Copies between GPU pages and the cache, on a GPU that runs what is queued as late or as early as it may.

Bytes are compared with the copier for CPU memory at the moment that a gather or scatter returns. On a real GPU the same
comparison runs in test_cuda_gpu.py.
"""

from __future__ import annotations

import ctypes
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import engines  # noqa: F401 - sets vLLM's environment
import pytest
import torch
from gpu_fake import FakeGpu, GpuFailure
from hypothesis import given, settings
from hypothesis import strategies as st

import cacheservice.connector.cuda_copies as module
from cacheservice.connector.copies import CpuCopier
from cacheservice.connector.cuda_copies import CopyFailed, CudaCopier, Staging
from cacheservice.connector.pages import ShardLayout, group_pages

SMALL = Staging(num_lanes=3, slab_bytes=512, bounce_bytes=128, max_rows=24)
"""Several transfers for some hundred bytes."""


@dataclass(frozen=True)
class Shape:
    """A KV cache in one allocation: layers of several page sizes, pages of kernel blocks, padding, an offset."""

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

    def room(self) -> Any:
        """Memory for it, uint8, of random bytes."""
        item = torch.empty(0, dtype=self.dtype).element_size()
        pages = [self._page(content) + self.padding for content in self.contents]
        size = (self.offset + sum(pages) * self.num_blocks) * item
        return torch.randint(0, 256, (size + 16,), dtype=torch.uint8)

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


class Arena:
    """Host memory that stands for the mapped arena."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.address = address
        self.num_bytes = num_bytes
        self.num_uses = 0

    def enter(self) -> bool:
        self.num_uses += 1
        return True

    def leave(self) -> None:
        self.num_uses -= 1


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def registered(copier: CudaCopier, gpu: FakeGpu, address: int, num_bytes: int) -> Arena:
    """An arena there, registered by the copier's own thread."""
    before = sum(gpu.registered.values())
    arena = Arena(address, num_bytes)
    copier.arena_mapped(arena)
    copier.fence()
    wait_for(lambda: sum(gpu.registered.values()) == before + num_bytes and not arena.num_uses)
    return arena


def cut(rng: random.Random, start: int, stop: int, number: int) -> list[tuple[int, int]]:
    """[start, stop) in so many parts, in any order."""
    points = sorted({start, stop, *(rng.randint(start, stop) for _ in range(number - 1))})
    parts = list(pairwise(points))
    rng.shuffle(parts)
    return parts


@contextmanager
def small_registrations(num_bytes: int) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "REGISTER_BYTES", num_bytes)
        yield


def in_threads(work: Sequence[Callable[[], None]]) -> None:
    """Run all at once; the first failure is raised here."""
    failures: list[BaseException] = []

    def run(one: Callable[[], None]) -> None:
        try:
            one()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=run, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


moods = st.sampled_from(["late", "early", "random"])


@given(
    shape=shapes(),
    mood=moods,
    seed=st.integers(0, 1 << 30),
    slice_bytes=st.sampled_from([40, 96, 1 << 20]),
)
@settings(max_examples=120)  # fmt: skip
def test_a_save_reads_what_the_engine_computed_before_it(shape, mood, seed, slice_bytes):
    rng = random.Random(seed)
    pages = shape.room()
    computed = torch.randint(0, 256, pages.shape, dtype=torch.uint8)
    gpu = FakeGpu(shape.views(pages), mood=mood, seed=seed)
    copier = CudaCopier(gpu, SMALL)
    blocks = [rng.randrange(shape.num_blocks) for _ in range(rng.randint(1, 6))]
    layouts = list(zip(shape.layouts(pages), shape.layouts(computed), strict=True))
    size = layouts[0][0].block_bytes * len(blocks)
    host = ctypes.create_string_buffer(size * len(layouts) + 64)
    base = ctypes.addressof(host)
    first_byte = rng.choice([0, layouts[0][0].block_bytes * 3])
    with small_registrations(slice_bytes):
        if rng.random() < 0.7:  # all of it, or a part
            first = rng.choice([0, rng.randint(0, size)])
            registered(copier, gpu, base + first, rng.randint(1, len(host) - first))
        gpu.engine(lambda: pages.copy_(computed))
        after = copier.fence()
        gathers = []
        for shard, (layout, _) in enumerate(layouts):
            runs = copier.runs(layout, blocks, after=after, first_byte=first_byte)
            gathers += [
                (runs, start, stop, base + shard * size + start)
                for start, stop in cut(rng, 0, size, rng.randint(1, 5))
            ]
        expected = ctypes.create_string_buffer(len(host))
        cpu = CpuCopier()
        for shard, (_, layout) in enumerate(layouts):
            cpu.runs(layout, blocks, after=None).gather(
                0, size, ctypes.addressof(expected) + shard * size
            )

        def gather(which: slice) -> Callable[[], None]:
            def work() -> None:
                for runs, start, stop, destination in gathers[which]:
                    runs.gather(first_byte + start, first_byte + stop, destination)
                    at = destination - base
                    assert host.raw[at : at + stop - start] == expected.raw[at : at + stop - start]

            return work

        in_threads([gather(slice(None, None, 2)), gather(slice(1, None, 2))])
    assert host.raw == expected.raw
    assert not gpu.unfinished()
    assert set(gpu.blocked_on) <= {f"lane {i}" for i in range(SMALL.num_lanes)}


@given(
    shape=shapes(),
    mood=moods,
    seed=st.integers(0, 1 << 30),
    slice_bytes=st.sampled_from([40, 96, 1 << 20]),
)
@settings(max_examples=120)  # fmt: skip
def test_a_load_writes_after_the_engine_let_go_of_the_blocks_and_nowhere_else(
    shape, mood, seed, slice_bytes
):
    rng = random.Random(seed)
    pages = shape.room()
    before = pages.clone()
    zeroed = torch.randint(0, 256, pages.shape, dtype=torch.uint8)
    read_by_engine = torch.zeros_like(pages)
    gpu = FakeGpu(shape.views(pages), mood=mood, seed=seed)
    copier = CudaCopier(gpu, SMALL)
    blocks = rng.sample(range(shape.num_blocks), rng.randint(1, shape.num_blocks))
    layouts = shape.layouts(pages)
    size = layouts[0].block_bytes * len(blocks)
    host = ctypes.create_string_buffer(random.Random(seed).randbytes(size * len(layouts)))
    base = ctypes.addressof(host)
    first_byte = rng.choice([0, layouts[0].block_bytes * 3])
    with small_registrations(slice_bytes):
        if rng.random() < 0.7:
            first = rng.choice([0, rng.randint(0, size)])
            registered(copier, gpu, base + first, rng.randint(1, len(host) - first))
        gpu.engine(
            lambda: read_by_engine.copy_(pages)
        )  # attention of the request that had the blocks
        gpu.engine(lambda: pages.copy_(zeroed))  # what it still writes, or zeroing
        after = copier.fence()
        wanted = zeroed.clone()
        scatters = []
        for shard, (layout, target) in enumerate(zip(layouts, shape.layouts(wanted), strict=True)):
            runs = copier.runs(layout, blocks, after=after, first_byte=first_byte)
            cpu = CpuCopier().runs(target, blocks, after=None, first_byte=first_byte)
            parts = cut(rng, 0, size, rng.randint(1, 5))
            scatters += [(runs, cpu, *part, base + shard * size + part[0]) for part in parts]

        def scatter(which: slice) -> Callable[[], None]:
            def work() -> None:
                for runs, cpu, start, stop, source in scatters[which]:
                    runs.scatter(first_byte + start, first_byte + stop, source)
                    held = bytes(host.raw[source - base : source - base + stop - start])
                    cpu.scatter(first_byte + start, first_byte + stop, source)
                    # On return, in the memory itself, without any further wait.
                    there = ctypes.create_string_buffer(stop - start)
                    layout_runs = CpuCopier().runs(
                        layouts[(source - base) // size], blocks, after=None, first_byte=first_byte
                    )
                    layout_runs.gather(
                        first_byte + start, first_byte + stop, ctypes.addressof(there)
                    )
                    assert there.raw == held

            return work

        in_threads([scatter(slice(None, None, 2)), scatter(slice(1, None, 2))])
    assert torch.equal(pages, wanted)
    assert not gpu.unfinished()
    gpu.finish()
    assert torch.equal(pages, wanted)
    assert torch.equal(read_by_engine, before)
