"""The real agent and the real Redis that benches measure, as processes that end with the bench."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cacheservice.client import AgentAdmin, AgentTarget
from cacheservice.errors import LarderError
from cacheservice.local.processes import Process, Program, Supervisor, termination_raises
from cacheservice.local.progress import show_progress
from cacheservice.local.redis import redis_program, redis_url

_CPU_CLOCK_OF_PROCESS = 2  # kernel: posix-timers.h, CPUCLOCK_SCHED


@dataclass(frozen=True, slots=True)
class Agent:
    """A running agent."""

    target: AgentTarget
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds that it has used, all threads, to the nanosecond."""
        return time.clock_gettime((~self.pid << 3) | _CPU_CLOCK_OF_PROCESS)


class Servers:
    """Starts servers in one temporary folder; made by `running_servers`."""

    def __init__(self, folder: Path, supervisor: Supervisor) -> None:
        self.folder = folder
        self._supervisor = supervisor

    def start_agent(self, name: str, *, arena_bytes: int, index: str = "memory") -> Agent:
        """Start an agent and wait until it serves. Raises ProgramFailed with the end of its log."""
        socket_dir = self.folder / name
        target = AgentTarget(socket_dir=socket_dir)
        program = Program(
            name=name,
            argv=(
                sys.executable, "-m", "cacheservice", "serve", "--socket-dir", str(socket_dir),
                "--cpu", f"{arena_bytes >> 20}Mi", "--index", index, "--node", name, "--drain-seconds", "1",
            ),
            env=dict(os.environ),
            log=self.folder / f"{name}.log",
            is_ready=lambda: _answers(target),
            ready_within_s=60.0 + arena_bytes / 1e8,
            stop_within_s=5.0,
        )  # fmt: skip
        process = self._start(program)
        return Agent(target, _pid_below(process))

    def start_redis(self, *, memory_bytes: int) -> tuple[Path, str]:
        """Start a Redis and wait until it answers; its socket and its URL."""
        path = self.folder / "redis.sock"
        self._start(
            redis_program(
                socket_path=path, folder=self.folder, log=self.folder / "redis.log", memory_bytes=memory_bytes,
                env=dict(os.environ),
            )
        )  # fmt: skip
        return path, redis_url(path)

    def _start(self, program: Program) -> Process:
        process = self._supervisor.start(program)
        self._supervisor.wait_ready([process])
        return process


@contextmanager
def running_servers() -> Iterator[Servers]:
    """Servers that are stopped, and a folder that is removed, when the block ends, however it ends."""
    with (
        termination_raises(),
        tempfile.TemporaryDirectory(prefix="larder-bench-") as folder,
        show_progress(Console(stderr=True)) as progress,
        Supervisor(progress) as supervisor,
    ):
        yield Servers(Path(folder), supervisor)


def _answers(target: AgentTarget) -> bool:
    try:
        with AgentAdmin(target, timeout_s=0.5) as admin:
            return admin.status().epoch != 0
    except LarderError:
        return False


def _pid_below(leash: Process) -> int:
    """The program itself: the leash's child."""
    return min(leash.descendants())
