"""`larder bench accuracy` with real parts: vLLM's API server, the connector, an agent, Redis, and the wheel's files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
from engines import tiny_llama

ROOT = Path(__file__).resolve().parents[1]
CLI = [sys.executable, "-m", "cacheservice.cli.main"]
MANIFEST = """
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {name: tiny}
spec:
  model: {name: tiny}
  engine: {device: cpu}
  cache: {cpu: 256Mi}
  decode: {args: [--dtype=float32, --kv-cache-memory-bytes=67108864]}
"""
START_TIMEOUT_S = 240
NUM_QUESTIONS = 4


def bench(url: str, *arguments: str, cwd: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*CLI, "bench", "accuracy", "--url", url, "--json", "--limit", "2", "--subjects", "logic,reading", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


@pytest.mark.engine
@pytest.mark.timeout(600)  # two runs beside the start of an engine
def test_a_real_engine_answers_alike_from_larder_and_its_own_cache_alone_proves_nothing(
    tmp_path: Path,
) -> None:
    (tmp_path / "kvcache.yaml").write_text(MANIFEST)
    env = {
        name: value for name, value in os.environ.items()
        if not name.startswith("LARDER_") and name not in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL")
    }  # fmt: skip
    env["VLLM_SERVER_DEV_MODE"] = "1"  # brings /reset_prefix_cache
    with (
        (tmp_path / "stderr").open("w") as stderr,
        subprocess.Popen(
            [*CLI, "up", "kvcache.yaml", "--model", str(tiny_llama()), "--json"], cwd=tmp_path, env=env,
            stdout=subprocess.PIPE, stderr=stderr, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout is not None
        watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
        watchdog.start()
        try:
            line = process.stdout.readline()
            assert line, (tmp_path / "stderr").read_text()
            watchdog.cancel()
            url = json.loads(line)["engines"][0]["url"]

            # Nothing has made the engine forget what it computed, so Larder had nothing to give.
            code, alone = bench(url, cwd=tmp_path)
            assert (code, alone["result"], alone["larder_tokens"]) == (1, "not Larder", 0)
            assert alone["passes"]["warm"]["cached_tokens"] > 0

            code, found = bench(url, "--reset-prefix-cache", cwd=tmp_path)
            assert (code, found["result"]) == (0, "same")
            assert found["num_questions"] == NUM_QUESTIONS
            cold, warm = found["passes"]["cold"], found["passes"]["warm"]
            assert cold["cached_tokens"] == 0
            # Prompts have 1,300 tokens and more here; at most a chunk of 256 is not whole. Half of all leaves room for
            # a lookup that misses its deadline on a busy machine.
            assert warm["cached_tokens"] > warm["prompt_tokens"] / 2
            assert found["larder_tokens"] > 0
            assert found["num_different"] == 0
            assert found["largest_shift"] < 0.01

            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=60) == 0
        finally:
            watchdog.cancel()
            process.kill()


def test_the_wheel_carries_the_questions(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    bundled = ROOT / "cacheservice" / "accuracy" / "bundled"
    wanted = {str(path.relative_to(ROOT)) for path in bundled.rglob("*.csv")}
    assert len(wanted) >= 12
    with zipfile.ZipFile(wheel) as content:
        assert wanted <= set(content.namelist())
