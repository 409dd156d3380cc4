"""`larder bench accuracy` with real parts: vLLM's API server, the connector, an agent, Redis, and the wheel's files."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from agent_process import free_port
from engines import tiny_llama
from up_process import CLI, START_TIMEOUT_S, engine_environment, larder_up

from cacheservice.commands.engines import EngineRole, EngineSite, engine_command
from cacheservice.local.http_client import answers_ok, get_text
from cacheservice.local.ports import HOST
from cacheservice.manifest import parse_manifest

ROOT = Path(__file__).resolve().parents[1]
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
NUM_QUESTIONS = 4


def bench(url: str, *arguments: str, cwd: Path) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [*CLI, "bench", "accuracy", "--url", url, "--json", "--limit", "2", "--subjects", "logic,reading", *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return done.returncode, found


@contextmanager
def control_engine(env: Mapping[str, str], log: Path) -> Iterator[str]:
    """An engine without Larder, as the manifest has it; its address. It may not be ready yet."""
    port = free_port()  # not of the range that `larder up` chooses from at the same time
    site = EngineSite("control", EngineRole.BOTH, HOST, port, str(tiny_llama()), num_threads=1)
    command = engine_command(parse_manifest(MANIFEST, source="test"), site, python=sys.executable)
    with log.open("w") as output:
        process = subprocess.Popen(
            command.argv, env={**env, **command.env}, stdout=output, stderr=output
        )
    try:
        yield f"http://{HOST}:{port}"
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def outcomes(url: str) -> list[str]:
    """What became of lookups, saves and loads, by the engine's own count."""
    host, port = url.removeprefix("http://").removesuffix("/v1").split(":")
    page = get_text(host, int(port), "/metrics")
    return [line for line in page.splitlines() if line.startswith("vllm:larder_outcomes_total")]


def wait_ready(url: str, log: Path) -> None:
    host, port = url.removeprefix("http://").split(":")
    deadline = time.monotonic() + START_TIMEOUT_S
    while not answers_ok(host, int(port), "/health"):
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.5)


@pytest.mark.engine
@pytest.mark.timeout(900)  # two engines start side by side, and are asked three times
def test_real_engines_with_and_without_larder_answer_alike(tmp_path: Path) -> None:
    (tmp_path / "kvcache.yaml").write_text(MANIFEST)
    env = engine_environment()
    env["VLLM_SERVER_DEV_MODE"] = "1"  # brings /reset_prefix_cache
    control_log = tmp_path / "control"
    with (
        control_engine(env, control_log) as control_url,
        larder_up(tmp_path, "--model", str(tiny_llama()), env=env) as (state, process),
    ):
        url = state["engines"][0]["url"]

        # Nothing has made the engine forget what it computed, so Larder had nothing to give.
        code, alone = bench(url, cwd=tmp_path)
        assert (code, alone["result"], alone["larder_tokens"]) == (1, "not Larder", 0)
        assert alone["passes"]["warm"]["cached_tokens"] > 0

        wait_ready(control_url, control_log)
        code, found = bench(url, "--reset-prefix-cache", "--control-url", control_url, cwd=tmp_path)
        assert (code, found["result"]) == (0, "same"), (found, outcomes(url))
        assert found["num_questions"] == NUM_QUESTIONS
        assert (found["num_different"], found["num_ties"]) == (0, 0)
        passes = found["passes"]
        assert passes["cold"]["cached_tokens"] == passes["control"]["cached_tokens"] == 0
        # Prompts have 1,300 tokens and more here, of which less than a chunk of 256 can't be cached. Half of all
        # leaves room for a lookup that misses its deadline on a busy machine.
        for name in ("warm", "control again"):
            assert passes[name]["cached_tokens"] > passes[name]["prompt_tokens"] / 2, name
        assert found["larder_tokens"] > 0
        assert found["largest_shift"] < 0.01

        # The engine without Larder as the one to check: that is noticed.
        code, plain = bench(control_url, cwd=tmp_path)
        assert (code, plain["result"], plain["larder_tokens"]) == (1, "not Larder", 0)

        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0


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
