"""The data-path and lookup benches run through real processes and print what programs can read."""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_fake import FakeGpu

from cacheservice.connector.cuda_copies import CudaCopier

ROOT = Path(__file__).parent.parent
MIB = 1 << 20


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def rows_of(bench: str, *arguments: str) -> list[dict[str, Any]]:
    done = run(f"bench/{bench}.py", "--json", "--quick", *arguments)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)  # exactly one object
    assert found["bench"] == bench
    assert set(found) == {"bench", "rows"}
    rows: list[dict[str, Any]] = found["rows"]
    return rows


def test_datapath_measures_every_path() -> None:
    rows = rows_of("datapath", "--rounds", "1", "--sizes", "0.25,64")
    fields = {"path", "size_bytes", "in_flight", "gbps_best", "gbps_median", "cpu_s_per_gb"}
    assert all(set(row) == fields for row in rows)
    cases = [(row["path"], row["size_bytes"], row["in_flight"]) for row in rows]
    paths = ("shm_store", "shm_retrieve", "stream_store", "stream_retrieve")
    sizes = (MIB // 4, 64 * MIB)
    expected = [("memcpy", size, 1) for size in sizes]
    expected += [(path, size, n) for path in paths for size in sizes for n in (1, 4)]
    assert cases == expected
    for row in rows:
        assert 0 < row["gbps_median"] <= row["gbps_best"]
        assert row["cpu_s_per_gb"] > 0


def test_datapath_prints_a_table() -> None:
    done = run("bench/datapath.py", "--quick", "--rounds", "1", "--sizes", "16")
    assert done.returncode == 0, done.stderr
    assert "of memcpy" in done.stdout
    assert "shm_retrieve" in done.stdout
    assert "quick" in done.stderr


def test_lookup_measures_both_indexes() -> None:
    rows = rows_of("lookup")
    assert [(row["index"], row["keys"]) for row in rows] == [
        (index, keys) for index in ("memory", "redis") for keys in (16, 256, 1000)
    ]
    common = {"index", "keys", "p50_ms", "p99_ms", "empty_call_p50_ms"}
    for row in rows:
        of_redis = {"mget_p50_ms", "redis_bytes_per_chunk"} if row["index"] == "redis" else set()
        assert set(row) == common | of_redis
        assert 0 < row["p50_ms"] <= row["p99_ms"]
    assert rows[-1]["redis_bytes_per_chunk"] <= 200


@pytest.mark.skipif(
    torch.cuda.is_available(), reason="there is a GPU: test_cuda_gpu.py runs this bench"
)
def test_datapath_on_a_gpu_that_is_not_there_is_refused() -> None:
    done = run("bench/datapath.py", "--quick", "--device", "cuda")
    assert done.returncode == 2
    assert "torch sees no GPU here" in done.stderr


def test_pages_of_the_gpu_bench_are_compared_where_they_were_copied_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the tests' stand-in for a GPU: what `is_same` says follows what sources gave and sinks took."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import datapath_gpu as bench

    num_bytes = 8 * bench.BLOCK_BYTES
    pages = torch.randint(0, 256, (bench.LAYERS, 16, 1, 1, bench.PAGE_BYTES), dtype=torch.uint8)
    memory = bench.GpuMemory(pages, num_bytes, CudaCopier(FakeGpu(list(pages))))
    memory.clear_sink()
    assert not memory.is_same(0, num_bytes)
    half = num_bytes // 2
    host = ctypes.create_string_buffer(half)
    memory.source(half, half).gather(0, half, ctypes.addressof(host))
    memory.sink(half, half).scatter(0, half, ctypes.addressof(host))
    assert memory.is_same(half, half)
    assert not memory.is_same(0, num_bytes)
    memory.clear_sink()
    assert not memory.is_same(half, half)


@pytest.mark.parametrize("sizes", ["x", "3", "0", "128"])
def test_size_that_does_not_divide_a_call_is_refused(sizes: str) -> None:
    done = run("bench/datapath.py", "--sizes", sizes)
    assert done.returncode == 2
    assert "--sizes" in done.stderr
