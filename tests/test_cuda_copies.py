"""Copies between GPU pages and the cache, on a GPU that runs what is queued as late or as early as it may.

Bytes are compared with the copier for CPU memory at the moment that a gather or scatter returns. On a real GPU the same
comparison runs in test_cuda_gpu.py.
"""

from __future__ import annotations

import ctypes
import itertools
import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import engines
import pytest
import torch
from agent_process import AgentProcess, a_namespace, local_agent, target_of
from gpu_fake import ENGINE, FakeGpu, GpuFailure, is_mapped
from hypothesis import given, settings
from hypothesis import strategies as st
from page_shapes import plain, shapes

import cacheservice.connector.cuda_arenas as module
from cacheservice.client import (
    AgentAdmin,
    CacheClient,
    ClientIdentity,
    Deadlines,
    Role,
    ShardRead,
    ShardWrite,
)
from cacheservice.client.shared_memory import SharedMemoryPlane
from cacheservice.connector import cuda_device
from cacheservice.connector.copies import CpuCopier
from cacheservice.connector.cuda_copies import KIB, MIB, CopyFailed, CudaCopier, Staging
from cacheservice.connector.pages import ShardLayout
from cacheservice.core.keys import ChunkKey
from cacheservice.core.outcomes import Reason
from cacheservice.errors import UncacheableError

ROOT = Path(__file__).parent.parent

SMALL = Staging(num_lanes=3, slab_bytes=512, bounce_bytes=128, max_rows=24)
"""Several transfers for some hundred bytes."""
SMALL_STAGING = Staging(slab_bytes=32 * KIB, bounce_bytes=16 * KIB, max_rows=1024)
"""Several transfers for a shard of a tiny model."""


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


def test_part_of_a_shard_that_lies_in_no_block_of_the_copy_is_refused():
    shape = plain()
    pages = shape.room()
    copier = CudaCopier(FakeGpu(shape.views(pages)), SMALL)
    layout = shape.layouts(pages)[0]
    host = ctypes.create_string_buffer(4 * layout.block_bytes)
    runs = copier.runs(layout, [4, 2], after=copier.fence(), first_byte=layout.block_bytes)
    with pytest.raises(IndexError):
        runs.gather(0, 10, ctypes.addressof(host))
    with pytest.raises(IndexError):
        runs.scatter(layout.block_bytes, 4 * layout.block_bytes, ctypes.addressof(host))


@pytest.mark.parametrize("block", [-1, 6])
def test_block_that_the_pages_do_not_have_is_refused_before_the_gpu_sees_it(block):
    shape = plain(num_blocks=6)
    pages = shape.room()
    copier = CudaCopier(FakeGpu(shape.views(pages)), SMALL)
    with pytest.raises(IndexError, match="block"):
        copier.runs(shape.layouts(pages)[0], [1, block], after=copier.fence())


class Copy:
    """One copy of several transfers, with a GPU that fails at the calls that the test names."""

    def __init__(self, *, direct: bool, load: bool) -> None:
        self.pages = plain().room()
        self.gpu = FakeGpu(plain().views(self.pages))
        self.copier = CudaCopier(self.gpu, SMALL)
        self.layout = plain().layouts(self.pages)[0]
        self.host = ctypes.create_string_buffer(random.Random(1).randbytes(1000), 1000)
        self.load = load
        if direct:
            registered(self.copier, self.gpu, ctypes.addressof(self.host), len(self.host))

    def run(self, fails: Callable[[str], bool]) -> None:
        """Raises what the copier raises."""
        runs = self.copier.runs(self.layout, [3, 1], after=self.copier.fence())
        self.gpu.fails = fails
        try:
            (runs.scatter if self.load else runs.gather)(0, 1000, ctypes.addressof(self.host))
        finally:
            self.gpu.fails = lambda kind: False


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("load", [True, False])
def test_an_error_at_any_call_fails_the_copy_and_leaves_nothing_to_be_written_later(direct, load):
    kinds: list[str] = []
    Copy(direct=direct, load=load).run(lambda kind: bool(kinds.append(kind)))
    assert len(kinds) > 8
    for number in range(len(kinds)):
        calls = itertools.count()
        copy = Copy(direct=direct, load=load)
        with pytest.raises(GpuFailure):
            copy.run(lambda kind, calls=calls, number=number: next(calls) == number)
        assert not copy.gpu.unfinished(), f"after {kinds[number]} failed"
        copy.run(lambda kind: False)  # the next one is well again
        there = ctypes.create_string_buffer(1000)
        CpuCopier().runs(copy.layout, [3, 1], after=None).gather(0, 1000, ctypes.addressof(there))
        assert there.raw == copy.host.raw


def test_after_an_error_that_stays_every_copy_fails_at_once(caplog):
    copy = Copy(direct=False, load=True)
    with pytest.raises(GpuFailure):
        copy.run(lambda kind: kind in ("scatter", "drain"))
    num_queued = len(copy.gpu.log)
    for _ in range(2 * SMALL.num_lanes):
        with pytest.raises(CopyFailed, match="before"):
            copy.run(lambda kind: False)
    assert not [o for o in copy.gpu.log[num_queued:] if o.stream != ENGINE]
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert len(said) == 1
    assert "the engine computes instead" in said[0]


def test_engine_whose_stream_takes_no_event_is_not_disturbed(caplog):
    copy = Copy(direct=False, load=False)
    copy.gpu.fails = lambda kind: kind == "record"
    for _ in range(3):
        assert copy.copier.fence().event is None
    with pytest.raises(CopyFailed, match="could not be waited for"):
        copy.run(lambda kind: False)
    copy.run(lambda kind: False)
    assert len([r for r in caplog.records if r.levelno == logging.ERROR]) == 1


def test_nothing_is_registered_before_the_engine_serves():
    """vLLM captures CUDA graphs while it starts; another thread's call could spoil that."""
    gpu = FakeGpu(plain().views(plain().room()))
    copier = CudaCopier(gpu, SMALL)
    host = ctypes.create_string_buffer(256)
    arena = Arena(ctypes.addressof(host), 256)
    before = set(threading.enumerate())
    copier.arena_mapped(arena)
    assert set(threading.enumerate()) <= before
    assert not gpu.registered
    copier.fence()
    wait_for(lambda: gpu.registered == {arena.address: 256})
    copier.arena_unmapping(arena)
    assert not gpu.registered
    # What is mapped there next is not registered: the GPU would refuse a transfer straight to it.
    layout = plain().layouts(gpu.views[0])[0]
    copier.runs(layout, [1], after=copier.fence()).gather(0, 256, arena.address)
    assert host.raw == gpu.views[0][1].numpy().tobytes()[:256]
    assert not gpu.violations


def test_arena_that_cuda_refuses_is_copied_through_pinned_memory_with_one_warning(caplog):
    shape = plain()
    pages = shape.room()
    gpu = FakeGpu(shape.views(pages), fails=lambda kind: kind == "register")
    copier = CudaCopier(gpu, SMALL)
    hosts = [ctypes.create_string_buffer(2000) for _ in range(3)]
    for host in hosts:
        arena = Arena(ctypes.addressof(host), len(host))
        copier.arena_mapped(arena)
    after = copier.fence()
    wait_for(lambda: not any(t.name == "larder-register" for t in threading.enumerate()))
    layout = shape.layouts(pages)[0]
    for host in hosts:
        copier.runs(layout, [5], after=after).gather(100, 1900, ctypes.addressof(host) + 100)
        there = ctypes.create_string_buffer(2000)
        CpuCopier().runs(layout, [5], after=None).gather(0, 2000, ctypes.addressof(there))
        assert host.raw[100:1900] == there.raw[100:1900]
    assert max(o.num_bytes for o in gpu.transfers()) <= SMALL.bounce_bytes
    warned = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warned) == 1
    assert "registered 0 of" in warned[0]


def test_staging_memory_is_what_the_docs_say():
    gpu = FakeGpu(plain().views(plain().room()))
    CudaCopier(gpu)
    staging = Staging()
    assert (gpu.device_bytes, gpu.pinned_bytes) == (staging.device_bytes, staging.host_bytes)
    text = (ROOT / "docs" / "decisions" / "0006-cuda-copies.md").read_text()
    assert f"{staging.device_bytes // MIB} MiB on the GPU" in text
    assert f"{staging.host_bytes // MIB} MiB of pinned memory" in text


@given(
    first=st.integers(0, 3),
    num_bytes=st.integers(0, 400),
    per_span=st.integers(1, 6),
)
def test_spans_cover_every_byte_once_and_are_long_enough(first, num_bytes, per_span):
    plane = SharedMemoryPlane(Mock(), 10, span_bytes=per_span * 10 - 5)
    spans: list[tuple[int, int, int]] = []
    plane._add_spans(spans, 7, first * 10, first * 10 + num_bytes)
    assert {index for index, _, _ in spans} <= {7}
    assert [b for _, start, stop in spans for b in range(start, stop)] == list(
        range(first * 10, first * 10 + num_bytes)
    )
    assert all(start % 10 == 0 for _, start, _ in spans)
    pieces = [-(-(stop - start) // 10) for _, start, stop in spans]
    assert all(min(per_span, sum(pieces)) <= number < 2 * per_span for number in pieces)


@dataclass
class Node:
    """An agent, a client of it, and pages on a GPU that both the client's calls and the test can name."""

    gpu: FakeGpu
    copier: CudaCopier
    client: CacheClient
    pages: Any
    layout: ShardLayout
    spec: Any

    def store(self, key: bytes, blocks: Sequence[int], size: int) -> None:
        source = self.copier.runs(self.layout, blocks, after=self.copier.fence())
        write = ShardWrite(ChunkKey(key), None, 0, 0, 0, size, source)
        assert self.client.store(self.spec.digest, [write])[0].reason is Reason.HIT

    def retrieve(self, key: bytes, blocks: Sequence[int], size: int, start: int, stop: int) -> None:
        first = start // self.layout.block_bytes * self.layout.block_bytes
        sink = self.copier.runs(self.layout, blocks, after=self.copier.fence(), first_byte=first)
        read = ShardRead(ChunkKey(key), 0, 0, size, start, stop, sink)
        assert self.client.retrieve(self.spec.digest, [read])[0].reason is Reason.HIT

    def bytes_of(self, blocks: Sequence[int]) -> bytes:
        held = ctypes.create_string_buffer(len(blocks) * self.layout.block_bytes)
        CpuCopier().runs(self.layout, blocks, after=None).gather(
            0, len(held), ctypes.addressof(held)
        )
        return held.raw


NODE_BLOCKS, NODE_PAGE = 80, 192 * 1024
SHARD_BLOCKS = 33
"""33 blocks of 384 KiB: 12.4 MiB, whose last piece is 384 KiB."""


@contextmanager
def a_node(agent: Any, plane: str, mood: Any = "late") -> Iterator[Node]:
    shape = plain(num_blocks=NODE_BLOCKS, layers=2, page_bytes=NODE_PAGE)
    pages = shape.room()
    layout = shape.layouts(pages)[0]
    gpu = FakeGpu(shape.views(pages), mood=mood)
    copier = CudaCopier(gpu)
    spec = a_namespace(shard_bytes=(SHARD_BLOCKS * layout.block_bytes,))
    client = CacheClient(
        target_of(agent), ClientIdentity(Role.TOOL), data_plane=plane, arena_user=copier,
        deadlines=Deadlines(acquire_s=30, reserve_s=30, commit_s=30, load_s=60),
    )  # fmt: skip
    client.open_namespace(spec)
    client.start()
    try:
        assert client.wait_connected(30)
        yield Node(gpu, copier, client, pages, layout, spec)
    finally:
        client.close()


@pytest.mark.parametrize("plane", ["shared_memory", "stream"])
@pytest.mark.parametrize("mood", ["late", "random"])
def test_shards_go_through_a_real_agent_and_come_back_as_they_were(plane, mood):
    rng = random.Random(5)
    size = SHARD_BLOCKS * 2 * NODE_PAGE
    with local_agent(cpu="64Mi") as agent, a_node(agent, plane, mood) as node:
        if plane == "shared_memory":
            node.copier.fence()
            wait_for(lambda: sum(node.gpu.registered.values()) == 64 * MIB)
        blocks = rng.sample(range(NODE_BLOCKS), SHARD_BLOCKS)
        content = node.bytes_of(blocks)
        node.store(b"k" * 32, blocks, size)
        node.gpu.engine(node.pages.zero_)
        others = rng.sample(range(NODE_BLOCKS), SHARD_BLOCKS)
        node.retrieve(b"k" * 32, others, size, 0, size)
        assert node.bytes_of(others) == content
        # From the middle on: the first piece is verified whole and copied in part.
        node.gpu.engine(lambda: node.pages.fill_(7))
        node.retrieve(b"k" * 32, others[5:], size, 5 * node.layout.block_bytes, size)
        assert node.bytes_of(others[5:]) == content[5 * node.layout.block_bytes :]
        assert node.bytes_of(others[:5]) == b"\x07" * (5 * node.layout.block_bytes)
        lengths = [o.num_bytes for o in node.gpu.transfers()]
        assert sum(lengths) == 3 * size - 5 * node.layout.block_bytes
        if plane == "shared_memory":
            assert min(lengths) >= 256 * KIB
            assert len(lengths) <= 9
        assert node.client.state().data_plane == plane


def test_every_piece_of_a_span_is_verified_before_any_page_is_written():
    size = SHARD_BLOCKS * 2 * NODE_PAGE
    with local_agent(cpu="64Mi") as agent, a_node(agent, "shared_memory") as node:
        session = node.client._keeper.session()
        assert session is not None
        arena = session.plane._mapping.view  # type: ignore[attr-defined]
        blocks, others = list(range(SHARD_BLOCKS)), list(range(40, 40 + SHARD_BLOCKS))
        content = node.bytes_of(blocks)
        before, untouched = node.pages.clone(), node.bytes_of(others)
        for number in range(-(-size // MIB)):
            key = bytes([number]) * 32
            node.pages.copy_(before)
            node.store(key, blocks, size)
            at = bytes(arena).find(content[:64]) + number * MIB + 100
            arena[at] ^= 1
            sink = node.copier.runs(node.layout, others, after=node.copier.fence())
            read = ShardRead(ChunkKey(key), 0, 0, size, 0, size, sink)
            assert node.client.retrieve(node.spec.digest, [read])[0].reason is Reason.CHECKSUM
            span = number * MIB // (4 * MIB)  # twelve pieces and a half: three spans
            first = min(span, 2) * 4 * MIB // node.layout.block_bytes + 1
            assert (
                node.bytes_of(others[first : first + 5])
                == untouched[
                    first * node.layout.block_bytes : (first + 5) * node.layout.block_bytes
                ]
            )
            with AgentAdmin(target_of(agent)) as admin:
                admin.evict()


def test_arena_is_unregistered_before_it_is_unmapped(caplog):
    """The fake GPU looks into the kernel's list of mappings when it is told to forget one."""
    with local_agent(cpu="16Mi") as agent, a_node(agent, "shared_memory") as node:
        node.copier.fence()
        wait_for(lambda: sum(node.gpu.registered.values()) == 16 * MIB)
        address = next(iter(node.gpu.registered))
        assert is_mapped(address, 16 * MIB)
        node.client.close()
        wait_for(lambda: not is_mapped(address, 16 * MIB))
        assert not node.gpu.registered
        assert not node.gpu.violations
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_an_agent_that_comes_back_is_registered_again_and_the_old_arena_forgotten():
    with AgentProcess(cpu="16Mi") as agent:
        shape = plain()
        pages = shape.room()
        gpu = FakeGpu(shape.views(pages))
        copier = CudaCopier(gpu, SMALL)
        copier.fence()
        client = CacheClient(agent.target, ClientIdentity(Role.TOOL), arena_user=copier)
        client.start()
        try:
            for _ in range(2):
                assert client.wait_connected(30)
                wait_for(lambda: sum(gpu.registered.values()) == 16 * MIB)
                agent.kill()
                wait_for(lambda: not client.state().connected and not gpu.registered)
                agent.start()
        finally:
            client.close()
        assert not gpu.violations


def test_user_of_the_arena_that_raises_disturbs_nothing(caplog):
    class Broken:
        span_bytes = 0

        def arena_mapped(self, arena: Any) -> None:
            raise RuntimeError("mapped")

        def arena_unmapping(self, arena: Any) -> None:
            raise RuntimeError("unmapping")

    with local_agent() as agent:
        client = CacheClient(
            target_of(agent), ClientIdentity(Role.TOOL), data_plane="shared_memory", arena_user=Broken()
        )  # fmt: skip
        client.start()
        try:
            assert client.wait_connected(30)
        finally:
            client.close()
        wait_for(lambda: "failed to let go" in caplog.text)
    assert "failed to prepare" in caplog.text


class TorchWithoutGpu:
    """torch whose `cuda` notes its calls; memory is the CPU's and every operation is done when it returns."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.cuda = self
        self.current = threading.local()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: int, pin_memory: bool = False, **options: Any) -> Any:
        return torch.empty(*shape, **options)

    def Event(self, *, blocking: bool = False) -> Any:
        outer = self

        class Event:
            def record(self, stream: str) -> None:
                outer.calls.append(("record", str(stream)))

            def synchronize(self) -> None:
                assert blocking, "spins, or waits for the engine's event"
                outer.calls.append(("wait for event", None))

        return Event()

    def Stream(self, device: Any, priority: int) -> Any:
        outer, name = self, f"stream {sum(c[0] == 'stream' for c in self.calls)}"
        self.calls.append(("stream", priority))

        class Stream:
            def __str__(self) -> str:
                return name

            def wait_stream(self, other: Any) -> None:
                outer.calls.append(("wait_stream", str(other)))

            def wait_event(self, event: Any) -> None:
                outer.calls.append(("wait_event", event))

            def synchronize(self) -> None:
                outer.calls.append(("drain", name))

        return Stream()

    def current_stream(self, device: Any) -> str:
        return "the engine's"

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        self.calls.append(("enter", str(stream)))
        yield

    def synchronize(self) -> None:
        raise AssertionError("synchronises the device")

    def set_device(self, device: Any) -> None:
        self.calls.append(("set_device", threading.get_ident()))

    def cudart(self) -> Any:
        def call(name: str, answer: int) -> Any:
            return lambda *arguments: self.calls.append((name, arguments)) or answer

        return Mock(
            cudaHostRegister=call("register", 0), cudaHostUnregister=call("unregister", 711)
        )


def test_torch_is_called_for_streams_of_our_own_alone(monkeypatch, caplog):
    """The code that needs a GPU, with a torch that does the same on CPU tensors: names, arguments, threads, bytes."""
    fake = TorchWithoutGpu()
    monkeypatch.setattr(cuda_device, "torch", fake)
    shape = plain()
    pages = shape.room()
    wanted = pages.clone()
    copier = cuda_device.cuda_copier(shape.views(pages))
    assert torch.equal(pages, wanted)  # loading the kernels changed no page
    assert [c for c in fake.calls if c[0] == "stream"] == [("stream", 0)] * 8
    assert fake.calls.count(("wait_stream", "the engine's")) == 8
    host = ctypes.create_string_buffer(random.Random(2).randbytes(16_000), 16_000)
    arena = Arena(ctypes.addressof(host), 8192)
    copier.arena_mapped(arena)
    starting, fake.calls = fake.calls, []
    after = copier.fence()
    wait_for(lambda: copier._arenas.reach(arena.address) == 8192)
    layout, target = shape.layouts(pages)[0], shape.layouts(wanted)[0]
    in_threads(
        [
            lambda: copier.runs(layout, [2, 4], after=after).scatter(
                0, 16_000, ctypes.addressof(host)
            )
        ]
    )
    CpuCopier().runs(target, [2, 4], after=None).scatter(0, 16_000, ctypes.addressof(host))
    assert torch.equal(pages, wanted)
    back = ctypes.create_string_buffer(16_000)
    in_threads(
        [lambda: copier.runs(layout, [2, 4], after=after).gather(0, 16_000, ctypes.addressof(back))]
    )
    assert back.raw == host.raw
    named = [c[0] for c in fake.calls]
    assert [c for c in fake.calls if c[1] == "the engine's"] == [("record", "the engine's")]
    assert ("register", (arena.address, 8192, 3)) in fake.calls
    assert [c for c in fake.calls if c[0] == "wait_event"] == [("wait_event", after.event)] * 2
    assert named.count("wait for event") == named.count("record") - 1 > 2
    assert (
        named.count("set_device") == 3
    )  # the registering thread and two that copied; not the engine's
    assert ("set_device", threading.get_ident()) not in starting + fake.calls
    assert "drain" not in named
    copier.arena_unmapping(arena)
    assert ("unregister", (arena.address,)) in fake.calls
    assert (
        "could not be unregistered: cudaHostUnregister answered with CUDA error 711" in caplog.text
    )


def test_pages_in_several_allocations_are_refused():
    with pytest.raises(UncacheableError, match="2 allocations"):
        cuda_device.cuda_copier([torch.zeros(4), torch.zeros(4)])


def test_gpu_without_room_for_staging_memory_is_refused_in_words(monkeypatch):
    fake = TorchWithoutGpu()

    def full(*shape: int, **options: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(fake, "empty", full)
    monkeypatch.setattr(cuda_device, "torch", fake)
    with pytest.raises(UncacheableError, match=r"out of memory.* 65 MiB on the GPU .* lower --gpu"):
        cuda_device.cuda_copier(plain().views(plain().room()))


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_real_engine_with_these_copies_gives_the_same_tokens_cold_and_warm(monkeypatch):
    """vLLM on CPU, its real pages behind the stand-in: a load that is reported before its bytes are there shows."""
    rng = random.Random(4)
    document = [rng.randrange(4, 1000) for _ in range(260)]
    prompts = [
        [*document[: rng.randrange(70, 260)], *(rng.randrange(4, 1000) for _ in range(30))]
        for _ in range(12)
    ]
    with engines.engine(None) as control:
        wanted = [answer.tokens for answer in control.generate(prompts)]
    gpus: list[FakeGpu] = []

    def copier(kv_caches: dict[str, Any]) -> CudaCopier:
        gpus.append(FakeGpu(list(kv_caches.values()), mood="random", seed=len(gpus)))
        return CudaCopier(gpus[-1], SMALL_STAGING)

    monkeypatch.setattr("cacheservice.connector.connector.copier_for", copier)
    patient = {"lookup_ms": 5000, "acquire_ms": 20000, "load_ms": 30000, "reserve_ms": 10000}
    with AgentProcess(cpu="256Mi") as agent:
        transfer = engines.transfer_config(socket_dir=str(agent.socket_dir), **patient)
        for is_warm in (False, True):
            with engines.engine(transfer) as subject:
                answers = subject.generate(prompts)
                subject.drain()
                assert [answer.tokens for answer in answers] == wanted
                totals = subject.totals()
                if is_warm:
                    assert totals["outcome/load/hit"] == len(prompts), totals
                gpu = gpus[-1]
                assert gpu.registered
                assert {o.kind for o in gpu.transfers()} >= {"from_host" if is_warm else "to_host"}
                assert not gpu.unfinished()
                assert not gpu.violations
            assert not gpu.registered
