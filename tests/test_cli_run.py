"""`larder up` and `larder status` around engines that only pretend: external Redis, stream path, deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fake_vllm
import psutil
import pytest
from redis_server import RedisServer
from up_process import larder_up

HEAD = """
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {name: demo}
spec:
  model: {name: m}
  engine: {device: cpu}
"""
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    fake_vllm.install(tmp_path / "fake")
    return tmp_path


def command(*arguments: str) -> list[str]:
    start = "import sys; sys.path.insert(0, sys.argv.pop(1)); from cacheservice.cli.main import main; main()"
    return [sys.executable, "-c", start, str(ROOT), *arguments]


def environment(folder: Path) -> dict[str, str]:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    return {**ours, "PYTHONPATH": str(folder / "fake")}


@contextmanager
def running(
    folder: Path, spec: str, *arguments: str
) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """`larder up --json` with what it printed."""
    (folder / "kvcache.yaml").write_text(HEAD + spec)
    with larder_up(
        folder, "--model", "model", *arguments, env=environment(folder), cli=command()
    ) as started:
        yield started


def status(folder: Path) -> dict[str, Any]:
    shown = subprocess.run(
        command("status", "--json"),
        cwd=folder,
        env=environment(folder),
        capture_output=True,
        text=True,
        check=False,
    )
    (run,) = json.loads(shown.stdout)["runs"]
    found: dict[str, Any] = run
    return found


def stopped(process: subprocess.Popen[str], number: signal.Signals = signal.SIGINT) -> int:
    process.send_signal(number)
    return process.wait(timeout=60)


def test_an_external_redis_is_used_and_its_password_is_nowhere_to_be_seen(folder: Path) -> None:
    with RedisServer(password="hidden") as server:
        url = server.url
        with running(folder, "  cache: {cpu: 64Mi}\n  decode: {}", "--redis", url) as (
            state,
            process,
        ):
            assert "hidden" not in json.dumps(state)
            seen = status(folder)
            assert seen["agents"][0]["index"] == "ready", seen
            assert seen["redis"] == state["redis"]
            lines = [
                " ".join(child.cmdline())
                for child in psutil.Process(process.pid).children(recursive=True)
            ]
            assert any("cacheservice serve" in line for line in lines)
            assert not any("hidden" in line or "redis-server" in line for line in lines)
            assert stopped(process) == 0
    assert not list((folder / ".larder").rglob("secrets"))


def test_the_stream_path_is_chosen_by_the_manifest(folder: Path) -> None:
    with running(folder, "  cache: {cpu: 64Mi, transport: Stream}\n  decode: {}") as (_, process):
        lines = [
            " ".join(child.cmdline())
            for child in psutil.Process(process.pid).children(recursive=True)
        ]
        (engine,) = [line for line in lines if "api_server" in line and "leash" not in line]
        assert '"address":"127.0.0.1:' in engine
        assert "socket_dir" not in engine
        assert stopped(process, signal.SIGTERM) == 0


def test_ports_are_those_asked_for(folder: Path) -> None:
    from cacheservice.local.ports import choose_ports

    first = choose_ports(None, 6)[0] + 500
    spec = "  cache: {cpu: 64Mi}\n  prefill: {}\n  decode: {}"
    with running(folder, spec, "--port", str(first)) as (state, process):
        assert state["router"]["url"] == f"http://127.0.0.1:{first}/v1"
        assert [engine["url"] for engine in state["engines"]] == [
            f"http://127.0.0.1:{first + 1}/v1", f"http://127.0.0.1:{first + 2}/v1"
        ]  # fmt: skip
        assert stopped(process) == 0


def test_a_death_ends_the_run_with_an_explanation_and_leaves_nothing(folder: Path) -> None:
    with running(folder, "  cache: {cpu: 64Mi}\n  decode: {}") as (_, process):
        family = psutil.Process(process.pid).children(recursive=True)
        (agent,) = [
            child
            for child in family
            if "serve" in child.cmdline() and "leash" not in " ".join(child.cmdline())
        ]
        agent.kill()
        assert process.wait(timeout=60) == 1
        _, alive = psutil.wait_procs(family, timeout=0)
        assert not alive
    assert "agent was ended by SIGKILL" in (folder / "stderr").read_text()


def test_nothing_is_left_when_larder_itself_is_killed(folder: Path) -> None:
    with running(folder, "  cache: {cpu: 64Mi}\n  decode: {}") as (_, process):
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = psutil.wait_procs(family, timeout=60)
        assert not alive
        shown = subprocess.run(
            command("status"),
            cwd=folder,
            env=environment(folder),
            capture_output=True,
            text=True,
            check=False,
        )
        assert "Nothing runs" in shown.stdout
    # The next one is not disturbed by what the killed one left.
    with running(folder, "  cache: {cpu: 64Mi}\n  decode: {}") as (_, process):
        assert status(folder)["engines"][0]["healthy"]
        assert stopped(process) == 0


def test_a_second_run_of_the_same_name_is_refused_and_the_first_goes_on(folder: Path) -> None:
    with running(folder, "  cache: {cpu: 64Mi}\n  decode: {}") as (_, process):
        second = subprocess.run(
            command("up", "kvcache.yaml", "--model", "model"), cwd=folder, env=environment(folder),
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert second.returncode == 2
        assert "demo runs already" in second.stderr
        assert str(process.pid) in second.stderr
        assert status(folder)["engines"][0]["healthy"]
        assert stopped(process) == 0
