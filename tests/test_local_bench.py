"""The arithmetic of bench/engine.py: intervals and overheads."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    folder = Path(__file__).resolve().parents[1] / "bench"
    sys.path.insert(0, str(folder))
    try:
        spec = importlib.util.spec_from_file_location("bench_engine", folder / "engine.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules["bench_engine"] = module
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(folder))


def test_the_interval_of_the_median_is_that_of_the_sign_test(bench: ModuleType) -> None:
    assert bench.median_interval(10) == (1, 8)
    assert bench.median_interval(20) == (5, 14)
    assert bench.median_interval(3) == (0, 2)


def test_overhead_compares_engines_of_the_same_round(bench: ModuleType) -> None:
    def rounds(*seconds: float, cached: int = 0) -> list[object]:
        return [
            bench.Round(ttft_s=s / 2, cached_tokens=cached, num_tokens=1000, seconds=s, cpu_s=2 * s)
            for s in seconds
        ]

    measured = {
        "no_connector": rounds(1.0, 2.0),
        "all_miss": rounds(1.25, 2.5),
        "all_hit": rounds(0.1, 0.1, cached=900),
    }
    plain, miss, hit = bench.summarize(measured)
    assert miss.overhead_percent == 20.0
    assert miss.extra_cpu_s_per_1000_tokens == 0.75
    assert plain.overhead_percent is None
    assert (hit.ttft_ms_p50, hit.throughput_tok_s, hit.cached_tokens_p50) == (50.0, 10_000.0, 900)
