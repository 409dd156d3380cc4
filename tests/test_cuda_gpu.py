"""The CUDA copies on a real GPU: the same byte comparisons as on the stand-in, real streams, real engines, the bench.

    pytest -m gpu

Needs an NVIDIA GPU, and a CUDA build of vLLM for the engines. Skipped where there is none.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from agent_process import AgentProcess, a_namespace
from hypothesis import given, settings
from hypothesis import strategies as st
from page_shapes import plain, shapes
from test_connector_engine import ANSWER_TOKENS, PATIENT, PROMPTS, assert_same

from cacheservice.client import (
    CacheClient,
    ClientIdentity,
    Deadlines,
    Role,
    ShardRead,
    ShardWrite,
)
from cacheservice.connector.copies import CpuCopier, copier_for
from cacheservice.connector.cuda_copies import MIB, CudaCopier
from cacheservice.core.keys import ChunkKey
from cacheservice.core.outcomes import Reason

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no NVIDIA GPU here: torch.cuda.is_available() is False",
    ),
    pytest.mark.timeout(600),
]

ROOT = Path(__file__).parent.parent
LONG_CYCLES = 100_000_000
"""Some tens of milliseconds of a kernel that does nothing."""


def copier_of(shape: Any, pages: Any) -> Any:
    views = shape.views(pages)
    copier = copier_for({f"layer.{i}": view for i, view in enumerate(views)})
    assert isinstance(copier, CudaCopier)
    return copier


def slowly(work: Any) -> Any:
    """Run `work` on a stream that is busy for a while, as an engine's is; returns the stream."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(LONG_CYCLES)
        work()
    return stream


class Host:
    """Pages of their own, outside of the arena, or registered as if they were one."""

    def __init__(self, copier: Any, num_bytes: int, *, is_arena: bool) -> None:
        self.memory = mmap.mmap(-1, num_bytes)
        self.num_bytes = num_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._copier = copier if is_arena else None
        if is_arena:
            copier.arena_mapped(self)
            copier.fence()
            deadline = time.monotonic() + 30
            while not copier._arenas.reach(self.address):
                assert time.monotonic() < deadline
                time.sleep(0.001)

    def enter(self) -> bool:
        return True

    def leave(self) -> None:
        pass

    def close(self) -> None:
        if self._copier is not None:
            self._copier.arena_unmapping(self)


@given(shape=shapes(), seed=st.integers(0, 1 << 30), is_arena=st.booleans())
@settings(max_examples=40)
def test_a_save_reads_what_the_engine_computed_before_it(shape, seed, is_arena):
    rng = random.Random(seed)
    pages = shape.room("cuda")
    computed = shape.room("cuda")
    copier = copier_of(shape, pages)
    blocks = [rng.randrange(shape.num_blocks) for _ in range(rng.randint(1, 6))]
    torch.cuda.synchronize()
    stream = slowly(lambda: pages.copy_(computed))
    with torch.cuda.stream(stream):
        after = copier.fence()
    on_cpu = computed.cpu()
    for layout, reference in zip(shape.layouts(pages), shape.layouts(on_cpu), strict=True):
        size = layout.block_bytes * len(blocks)
        host = Host(copier, size, is_arena=is_arena)
        middle = rng.randint(0, size)
        runs = copier.runs(layout, blocks, after=after)
        runs.gather(middle, size, host.address + middle)
        runs.gather(0, middle, host.address)
        wanted = ctypes.create_string_buffer(size)
        CpuCopier().runs(reference, blocks, after=None).gather(0, size, ctypes.addressof(wanted))
        assert host.memory[:size] == wanted.raw
        host.close()


@given(shape=shapes(), seed=st.integers(0, 1 << 30), is_arena=st.booleans())
@settings(max_examples=40)
def test_a_load_writes_after_the_engine_let_go_of_the_blocks_and_nowhere_else(
    shape, seed, is_arena
):
    rng = random.Random(seed)
    pages = shape.room("cuda")
    before = pages.clone()
    zeroed = shape.room("cuda")
    seen = torch.zeros_like(pages)
    copier = copier_of(shape, pages)
    blocks = rng.sample(range(shape.num_blocks), rng.randint(1, shape.num_blocks))
    torch.cuda.synchronize()

    def last_owner() -> None:
        seen.copy_(pages)
        pages.copy_(zeroed)

    stream = slowly(last_owner)
    with torch.cuda.stream(stream):
        after = copier.fence()
    wanted = zeroed.cpu()
    for layout, reference in zip(shape.layouts(pages), shape.layouts(wanted), strict=True):
        size = layout.block_bytes * len(blocks)
        host = Host(copier, size, is_arena=is_arena)
        ctypes.memmove(host.address, rng.randbytes(size), size)
        copier.runs(layout, blocks, after=after).scatter(0, size, host.address)
        CpuCopier().runs(reference, blocks, after=None).scatter(0, size, host.address)
        host.close()
    assert torch.equal(pages.cpu(), wanted)
    assert torch.equal(seen, before)


def test_copies_wait_for_nothing_that_the_engine_launched_after_the_fence():
    """Also shows that the device is never synchronised, and that the engine's stream never waits for a copy."""
    shape = plain(page_bytes=1 << 20)
    pages = shape.room("cuda")
    copier = copier_of(shape, pages)
    layout = shape.layouts(pages)[0]
    host = Host(copier, layout.block_bytes * 4, is_arena=True)
    torch.cuda.synchronize()
    after = copier.fence()
    stream = slowly(lambda: None)
    with torch.cuda.stream(stream):
        for _ in range(20):
            torch.cuda._sleep(LONG_CYCLES)
    runs = copier.runs(layout, [0, 1, 2, 3], after=after)
    runs.gather(0, host.num_bytes, host.address)
    runs.scatter(0, host.num_bytes, host.address)
    assert not stream.query()
    stream.synchronize()
    host.close()


@pytest.mark.parametrize("plane", ["shared_memory", "stream"])
def test_shards_go_through_a_real_agent_and_come_back_as_they_were(plane):
    shape = plain(num_blocks=160, layers=2, page_bytes=192 * 1024)
    pages = shape.room("cuda")
    copier = copier_of(shape, pages)
    layout = shape.layouts(pages)[0]
    size = 33 * layout.block_bytes
    spec = a_namespace(shard_bytes=(size,))
    patient = Deadlines(acquire_s=30, reserve_s=30, commit_s=30, load_s=60)
    with AgentProcess(cpu="256Mi") as agent:
        client = CacheClient(
            agent.target, ClientIdentity(Role.TOOL), data_plane=plane, arena_user=copier,
            deadlines=patient,
        )  # fmt: skip
        client.open_namespace(spec)
        client.start()
        try:
            assert client.wait_connected(30)
            first, second = list(range(33)), list(range(100, 133))
            for number in range(8):
                key = ChunkKey(bytes([number]) * 32)
                pages.random_()
                source = copier.runs(layout, first, after=copier.fence())
                write = ShardWrite(key, None, 0, 0, 0, size, source)
                assert client.store(spec.digest, [write])[0].reason is Reason.HIT
                sink = copier.runs(layout, second, after=copier.fence())
                read = ShardRead(key, 0, 0, size, 0, size, sink)
                assert client.retrieve(spec.digest, [read])[0].reason is Reason.HIT
                for view in shape.views(pages):
                    assert torch.equal(view[first], view[second])
            if plane == "shared_memory":
                with copier._arenas._lock:
                    held = sum(b - a for a, b in copier._arenas._registered)
                assert held == 256 * MIB
        finally:
            client.close()


@pytest.mark.engine
@pytest.mark.parametrize("runner", ["0", "1"])
def test_engine_on_a_gpu_gives_the_same_tokens_cold_and_warm(runner, monkeypatch):
    """Both model runners of vLLM. As test_connector_engine.py judges it; that file runs on a GPU as it is, too."""
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        pytest.skip("this vLLM is no CUDA build")
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", runner)
    options: dict[str, Any] = {"kv_cache_memory_bytes": 512 << 20}
    with engines.engine(None, enable_prefix_caching=True, **options) as control:
        controls = [control.generate(PROMPTS, ANSWER_TOKENS) for _ in range(2)]
    with AgentProcess(cpu="1Gi") as agent:
        transfer = engines.transfer_config(socket_dir=str(agent.socket_dir), **PATIENT)
        for is_warm in (False, True):
            with engines.engine(transfer, **options) as subject:
                worker = subject.worker_connector._worker
                assert isinstance(worker._copier, CudaCopier)
                assert_same(subject.generate(PROMPTS, ANSWER_TOKENS), controls)
                subject.drain()
                if is_warm:
                    long_enough = sum(len(p) >= engines.CHUNK_TOKENS for p in PROMPTS)
                    assert subject.totals()["outcome/load/hit"] == long_enough


def test_bench_measures_copies_of_gpu_pages():
    done = subprocess.run(
        [sys.executable, "bench/datapath.py", "--json", "--quick", "--device", "cuda", "--sizes", "16"],
        cwd=ROOT, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert {row["path"] for row in rows} == {
        "pinned_out", "pinned_in", "shm_store", "shm_retrieve", "stream_store", "stream_retrieve",
    }  # fmt: skip
    assert all(row["gbps_median"] > 0 for row in rows)
