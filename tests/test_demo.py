"""The demo from end to end, with a real Redis and a real agent, and engines that only pretend (`fake_vllm`)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import fake_vllm
import psutil
import pytest

MANIFEST = """
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {name: demo}
spec:
  model: {name: m}
  engine: {device: cpu}
  cache: {cpu: 64Mi}
  prefill: {}
  decode: {}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a manifest, a model that nobody loads, and a vLLM that only pretends."""
    (tmp_path / "kvcache.yaml").write_text(MANIFEST)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    fake_vllm.install(tmp_path / "fake")
    return tmp_path


@contextmanager
def demo(folder: Path, mode: str = "", *arguments: str) -> Iterator[subprocess.Popen[str]]:
    env = {
        **{name: value for name, value in os.environ.items() if not name.startswith("LARDER_")},
        "PYTHONPATH": str(folder / "fake"), "FAKE_VLLM": mode,
    }  # fmt: skip
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from cacheservice.cli.main import main; main()"
    command = [
        sys.executable, "-c", start, str(Path(__file__).resolve().parents[1]),
        "demo", "kvcache.yaml", "--model", "model", *arguments,
    ]  # fmt: skip
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def finished(folder: Path, mode: str = "", *arguments: str) -> tuple[int, str, str]:
    with demo(folder, mode, *arguments) as process:
        out, err = process.communicate(timeout=120)
        return process.returncode, out, err


def test_the_demo_says_how_much_faster_it_is_and_that_answers_are_the_same(folder: Path) -> None:
    code, out, err = finished(folder)
    assert code == 0, err
    assert "token for token those of an engine without cache" in out
    assert "2.0 GB/s" in out
    assert "Everything is stopped" in out
    assert "5,376 of 7,000 prompt tokens" in " ".join(out.split())
    assert "asked only once" in " ".join(out.split())

    # Again: the engine without cache is not started any more.
    code, out, err = finished(folder, "", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["identical"] is True
    assert report["control_is_new"] is False
    assert len(report["rows"]) == 7
    assert {
        "prompt_tokens",
        "cached_tokens",
        "ttft_cold_s",
        "ttft_decode_s",
        "ttft_restarted_s",
        "verdict",
    } <= set(report["rows"][0])
    assert "control: starting" not in err
    assert not list((folder / ".larder" / "run" / "demo").glob("state.json"))


def test_an_answer_that_differs_ends_with_exit_code_1(folder: Path) -> None:
    code, out, _ = finished(folder, "wrong")
    assert code == 1
    assert "ANSWERS DIFFER" in out


def test_an_engine_that_dies_is_explained(folder: Path) -> None:
    code, out, err = finished(folder, "crash")
    assert (code, out) == (1, "")
    assert "control ended with status 1" in err
    assert "--port" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("mode", "phase"), [("stuck", "control: starting vLLM"), ("slow", "control      ready")]
)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_at_any_moment_leaves_nothing(
    folder: Path, mode: str, phase: str, number: signal.Signals
) -> None:
    with demo(folder, mode) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if phase in line:
                break
        else:
            pytest.fail(f"the demo ended before {phase!r}")
        time.sleep(0.2)
        family = psutil.Process(process.pid).children(recursive=True)
        assert family
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode == 128 + number
        _, alive = psutil.wait_procs(family, timeout=0)
        assert not alive, alive
