"""An arena is made only where there is memory for it: refused or waited for in words, and given up when told."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from agent_process import LOOPBACK, free_port, http_get, local_agent, wait_until

from cacheservice.agent import arena, memory
from cacheservice.agent.arena import build_arena
from cacheservice.agent.config import build_config
from cacheservice.agent.memory import Shortage, check_fits, shortage, wait_for_room
from cacheservice.agent.serve import Agent
from cacheservice.errors import ConfigError, StartCancelled

MIB = 2**20
GIB = 2**30


@pytest.fixture(name="machine")
def _machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with 8 GiB available and no cgroup, to be written into."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {8 * GIB // 1024} kB\n")
    (tmp_path / "cgroup").write_text("")
    (tmp_path / "fs").mkdir()
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory, "_OWN_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "fs")
    return tmp_path


def write_v2(folder: Path, *, limit: object, used: int, inactive: int = 0, active: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"anon 1\nshmem 7\ninactive_file {inactive}\nactive_file {active}\n"
    )


def write_v1(folder: Path, *, limit: int, used: int, inactive: int = 0, active: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.limit_in_bytes").write_text(f"{limit}\n")
    (folder / "memory.usage_in_bytes").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(
        f"inactive_file 1\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n"
    )


def most_that_fits() -> int:
    """In bytes, by bisection."""
    low, high = 0, 2**50
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if shortage(middle) is None else (low, middle)
    return low


def test_machine_keeps_some_memory(machine: Path) -> None:
    assert most_that_fits() == 8 * GIB - 256 * MIB
    check_fits(7 * GIB)
    with pytest.raises(ConfigError, match=r"MemAvailable of this machine leaves 8.00 GiB.*smaller"):
        check_fits(8 * GIB)


def test_cgroup_v2_limits_of_every_level_count_without_file_cache(machine: Path) -> None:
    (machine / "cgroup").write_text("0::/pods/pod1/agent\n")
    root = machine / "fs"
    write_v2(root / "pods/pod1/agent", limit="max", used=GIB)
    write_v2(
        root / "pods/pod1", limit=2 * GIB, used=900 * MIB, inactive=100 * MIB, active=300 * MIB
    )
    assert most_that_fits() == 2 * GIB - 500 * MIB - 64 * MIB
    # An arena that is still mapped is charged as shared memory, and that is not given back.
    write_v2(root / "pods/pod1/agent", limit=GIB, used=600 * MIB)
    assert most_that_fits() == GIB - 600 * MIB - 64 * MIB
    with pytest.raises(ConfigError, match="larger memory limit to the pod"):
        check_fits(GIB)


def test_cgroup_v1_is_read_too_also_where_only_the_own_one_is_seen(machine: Path) -> None:
    (machine / "cgroup").write_text("5:cpu:/x\n4:memory:/kubepods/pod1/agent\n0::/\n")
    root = machine / "fs/memory"
    # In a container the path of the host is not there; what is, is its own.
    write_v1(root, limit=3 * GIB, used=GIB, inactive=200 * MIB, active=300 * MIB)
    assert most_that_fits() == 3 * GIB - GIB + 500 * MIB - 64 * MIB
    write_v1(root / "kubepods/pod1/agent", limit=GIB, used=0)
    assert most_that_fits() == GIB - 64 * MIB
    write_v1(root / "kubepods/pod1/agent", limit=2**63 - 4096, used=0)
    write_v1(root, limit=2**63 - 4096, used=0)
    assert most_that_fits() == 8 * GIB - 256 * MIB


def test_files_that_are_missing_or_garbage_limit_nothing(machine: Path) -> None:
    (machine / "cgroup").write_text("4:memory:/a\n0::/b\n")
    (machine / "fs/b").mkdir(parents=True)
    (machine / "fs/b/memory.max").write_text("lots\n")
    assert most_that_fits() == 8 * GIB - 256 * MIB
    (machine / "cgroup").unlink()
    assert most_that_fits() == 8 * GIB - 256 * MIB


class Waiting:
    """`wait_for_room` in a thread."""

    def __init__(self, arena_bytes: int, wait_s: float = 600.0) -> None:
        self.told: list[str] = []
        self.cancelled = threading.Event()
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(arena_bytes, wait_s))
        self._thread.start()

    def _run(self, arena_bytes: int, wait_s: float) -> None:
        try:
            wait_for_room(arena_bytes, wait_s, cancelled=self.cancelled, tell=self.told.append)
        except BaseException as error:
            self.error = error

    def join(self) -> None:
        self._thread.join(20)
        assert not self._thread.is_alive()


def test_wait_ends_when_an_earlier_arena_is_gone(
    machine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (machine / "cgroup").write_text("0::/pod\n")
    pod = machine / "fs/pod"
    write_v2(pod, limit=3 * GIB, used=2 * GIB)
    waiting = Waiting(2 * GIB)
    wait_until(lambda: len(waiting.told) >= 2, what="two looks")
    assert waiting.told[0].startswith("waiting for 1088 MiB of memory: --cpu 2.00 GiB does not fit")
    # The old arena goes bit by bit: what is missing is told anew, but logged once.
    write_v2(pod, limit=3 * GIB, used=1200 * MIB)
    wait_until(
        lambda: waiting.told[-1].startswith("waiting for 240 MiB of memory"), what="the new number"
    )
    write_v2(pod, limit=3 * GIB, used=100 * MIB)
    waiting.join()
    assert waiting.error is None
    assert waiting.told[-1] == ""
    assert caplog.text.count("waiting for memory") == 1


def test_wait_is_over_after_its_time(machine: Path) -> None:
    now_s = [0.0]

    def clock() -> float:
        now_s[0] += 50.0
        return now_s[0]

    with pytest.raises(ConfigError, match="does not fit"):
        wait_for_room(
            9 * GIB, 100.0, cancelled=threading.Event(), tell=lambda _: None, clock=clock
        )  # fmt: skip


def test_wait_and_prefault_end_when_told_to_stop(
    machine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = Waiting(9 * GIB)
    wait_until(lambda: waiting.told, what="a look")
    waiting.cancelled.set()
    waiting.join()
    assert isinstance(waiting.error, StartCancelled)
    cancelled = threading.Event()
    num_steps = 0
    allocate = arena.os.posix_fallocate

    def allocate_and_stop(fd: int, start: int, length: int) -> None:
        nonlocal num_steps
        num_steps += 1
        allocate(fd, start, length)
        cancelled.set()

    monkeypatch.setattr(arena, "_STEP_BYTES", MIB)
    monkeypatch.setattr(arena.os, "posix_fallocate", allocate_and_stop)
    with pytest.raises(StartCancelled):
        build_arena(64 * MIB, threads=2, cancelled=cancelled)
    assert num_steps <= 2


def test_agent_is_alive_but_not_ready_while_it_waits_and_serves_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    missing: list[Shortage | None] = [Shortage(300 * MIB, "MemAvailable leaves too little")]
    monkeypatch.setattr(memory, "shortage", lambda _: missing[0])
    folder = Path(tempfile.mkdtemp(prefix="larder-agent-"))
    port = free_port()
    config = build_config(
        {"socket_dir": folder, "cpu": "8Mi", "http": f"{LOOPBACK}:{port}", "wait_for_memory_seconds": 600}
    )  # fmt: skip
    agent = Agent(config)
    starting = threading.Thread(target=agent.start)
    starting.start()

    def page(path: str) -> tuple[int, str]:
        status, body = http_get(f"http://{LOOPBACK}:{port}{path}")
        return status, body.decode()

    waits = (503, "waiting for 300 MiB of memory: MemAvailable leaves too little\n")
    wait_until(lambda: _is_there(page) and page("/readyz") == waits, what="the wait")
    assert page("/healthz") == (200, "ok\n")
    assert page("/statusz") == waits
    assert page("/metrics") == waits
    assert not config.agent_socket.exists()
    missing[0] = None
    starting.join(20)
    assert page("/readyz") == (200, "ok\n")
    assert json.loads(page("/statusz")[1])["arena_bytes"] == 8 * MIB
    agent.stop()


def _is_there(page: Callable[[str], tuple[int, str]]) -> bool:
    try:
        return page("/healthz")[0] == 200
    except OSError:
        return False


def test_without_the_wait_a_start_without_memory_fails_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "shortage", lambda _: Shortage(MIB, "--cpu does not fit: words"))
    with pytest.raises(ConfigError, match="words"), local_agent():
        pass


@contextmanager
def a_process(*args: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An agent process that is not waited for, and its HTTP address."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="larder-agent-") as folder:
        process = subprocess.Popen(
            [sys.executable, "-m", "cacheservice", "serve", "--socket-dir", folder,
             "--http", f"{LOOPBACK}:{port}", *args],
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        try:
            yield process, f"http://{LOOPBACK}:{port}"
        finally:
            if process.poll() is None:
                process.kill()
            process.communicate()


def test_sigterm_ends_a_waiting_process_with_code_0() -> None:
    # More than any machine has: a real shortage.
    with a_process("--cpu", "200Ti", "--wait-for-memory-seconds", "600") as (process, url):
        wait_until(
            lambda: _is_there(lambda path: _page(url + path))
            and "MiB of memory" in _page(url + "/readyz")[1],
            what="the wait",
        )  # fmt: skip
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
        assert process.returncode == 0
        assert b"stopped before it was ready" in log
        assert log.count(b"waiting for memory, at most 600 s") == 1


def _page(url: str) -> tuple[int, str]:
    status, body = http_get(url)
    return status, body.decode()
