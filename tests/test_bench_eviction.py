"""bench/eviction.py on small traces: what it prints, and that it goes through the real store."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parent.parent / "bench" / "eviction.py"


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_eviction", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_trace(path: Path, requests: list[list[int]]) -> Path:
    lines = [
        json.dumps({"timestamp": i, "input_length": 512 * len(ids), "hash_ids": ids})
        for i, ids in enumerate(requests)
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_large_cache_hits_all_that_was_seen(
    tmp_path: Path, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3], [1, 2, 3], [1, 2, 4, 5], [6]])
    arguments = [str(trace), "--capacity", "10,1", "--policy", "lru,s3fifo", "--json"]
    assert bench.main(arguments) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["bench"] == "eviction"
    found = {(r["policy"], r["capacity"]): r["hit_ratio"] for r in printed["rows"]}
    assert found[("lru", 10)] == found[("s3fifo", 10)] == round(5 / 11, 4)
    assert set(found) == {(p, c) for p in ("lru", "s3fifo") for c in (10, 1)}


def test_a_hit_is_a_prefix_hit(tmp_path: Path, bench: ModuleType) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [[1, 2, 3, 4], [9, 2, 3, 4], [1, 2, 8]])
    row = bench.replay(bench.read_trace(trace), policy="lru", capacity=100)
    assert row.hit_ratio == round(2 / 11, 4)


def test_s3fifo_keeps_a_shared_prompt_through_a_scan_and_lru_does_not(
    tmp_path: Path, bench: ModuleType
) -> None:
    shared = list(range(10))
    scan = [list(range(1000 + 20 * i, 1020 + 20 * i)) for i in range(8)]
    requests = bench.read_trace(
        write_trace(tmp_path / "t", [shared, shared, *scan, shared, *scan[::-1]])
    )
    lru = bench.replay(requests, policy="lru", capacity=60)
    s3fifo = bench.replay(requests, policy="s3fifo", capacity=60)
    assert s3fifo.hit_ratio > lru.hit_ratio > 0


def test_json_is_all_that_stdout_has(tmp_path: Path) -> None:
    trace = write_trace(tmp_path / "trace.jsonl", [[1], [1]])
    command = [sys.executable, str(SCRIPT), str(trace), "--capacity", "4", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    rows = json.loads(ended.stdout)["rows"]
    assert [(r["policy"], r["hit_ratio"]) for r in rows] == [("s3fifo", 0.5), ("lru", 0.5)]
    assert "capacity=4" in ended.stderr


def test_a_wrong_line_is_named(
    tmp_path: Path, bench: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"hash_ids": [1]}\n{"ids": [1]}\n', encoding="utf-8")
    assert bench.main([str(trace), "--capacity", "4"]) == 2
    assert "trace.jsonl:2 is not an object with hash_ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value", "text"),
    [
        ("--policy", "arc", "'arc' is not known; use s3fifo or lru"),
        ("--capacity", "0", "below 1 block"),
        ("--capacity", "many", "not a list of whole numbers"),
    ],
)
def test_wrong_flags_are_refused(
    bench: ModuleType, capsys: pytest.CaptureFixture[str], flag: str, value: str, text: str
) -> None:
    arguments = ["trace", "--capacity", "4", "--policy", "lru"]
    arguments[arguments.index(flag) + 1] = value
    with pytest.raises(SystemExit) as ended:
        bench.main(arguments)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err
