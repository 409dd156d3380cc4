"""Start programs, wait until they are ready, notice when they die, and stop them so that nothing is left.

Invariants: each program runs under a leash (`leash.py`) that ends it and all its descendants when this process asks
for it or dies, even of SIGKILL; output goes to one log file per program; every wait has a deadline. Called by `up`,
`demo` and the benchmarks. What the programs are is theirs. Thread rule: one thread.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from cacheservice.errors import LarderError
from cacheservice.local import leash
from cacheservice.local.causes import likely_cause
from cacheservice.local.progress import Progress

POLL_S = 0.1
TAIL_LINES = 15
TAIL_BYTES = 64 * 1024
_LOG_PREFIX = re.compile(
    r"^(\(\w+ pid=\d+\) )?(INFO|level=INFO).{0,90}?\] +|^\(\w+ pid=\d+\) +|^INFO: +"
)
_NOISE = re.compile(r"WARNING|^W\d{4} |triton|^\s*warnings\.warn")
KILL_S = 3.0
"""What a leash may take beyond the grace of its program to kill the rest."""


class ProgramFailed(LarderError):
    """A program died or did not become ready; the message has the end of its log and the likely cause."""


class Interrupted(BaseException):
    """SIGTERM or SIGHUP came. Not an Exception, like KeyboardInterrupt: whoever catches failures must not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@dataclass(frozen=True, slots=True)
class Program:
    """What to start, and how to see that it is ready.

    `env` is the whole environment. `is_ready` is asked about ten times a second, takes at most a second, and does not
    raise. `stop_within_s` is what the program may take after SIGTERM before everything below it gets SIGKILL.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    log: Path
    is_ready: Callable[[], bool]
    ready_within_s: float
    stop_within_s: float = 10.0
    doing: str = "starting"


class Process:
    """One started program. `pid` is that of its leash. Owned by the Supervisor."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.started_at = time.monotonic()
        program.log.parent.mkdir(parents=True, exist_ok=True)
        self.log_start = program.log.stat().st_size if program.log.exists() else 0
        read_end, self._write_end = os.pipe()
        try:
            with program.log.open("ab") as log:
                self._leash = subprocess.Popen(
                    [
                        sys.executable, "-I", "-S", leash.__file__,
                        str(read_end), str(program.stop_within_s), "--", *program.argv,
                    ],
                    env=dict(program.env), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True, pass_fds=(read_end,),
                )  # fmt: skip
        finally:
            os.close(read_end)

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def pid(self) -> int:
        return self._leash.pid

    def exit_status(self) -> int | None:
        """None while it runs; else the program's own status, 128 + n when signal n ended it."""
        code = self._leash.poll()
        return code if code is None or code >= 0 else 128 - code

    def descendants(self) -> list[int]:
        """Pids of everything that runs below the leash."""
        return leash.descendants(self.pid)

    def begin_stop(self) -> None:
        """Ask the leash to end it; returns at once. Idempotent."""
        if self._write_end >= 0:
            os.close(self._write_end)
            self._write_end = -1

    def wait_stopped(self) -> None:
        """Wait until nothing of it is left, at most `stop_within_s` + KILL_S; then kill what there is."""
        deadline = time.monotonic() + self.program.stop_within_s + KILL_S
        try:
            self._leash.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            for process in [*self.descendants(), self.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self._leash.wait()

    def log_tail(self, num_lines: int = TAIL_LINES) -> str:
        """The last lines that this start wrote, oldest first."""
        try:
            with self.program.log.open("rb") as file:
                end = file.seek(0, os.SEEK_END)
                file.seek(max(self.log_start, end - TAIL_BYTES))
                text = file.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-num_lines:])

    def last_words(self) -> str:
        """The message of the last line of the log, without time stamps and warnings, for progress lines."""
        for line in reversed(self.log_tail(8).splitlines()):
            words = _LOG_PREFIX.sub("", line.strip())
            if any(character.isalpha() for character in words) and not _NOISE.search(line):
                return words
        return ""


class Supervisor:
    """All programs of one run. Leaving the `with` block stops them, newest first, whatever happened inside."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._processes: list[Process] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop_all()

    @property
    def processes(self) -> tuple[Process, ...]:
        return tuple(self._processes)

    def start(self, program: Program) -> Process:
        """Start it and return at once. Raises ProgramFailed when not even its leash can be started."""
        self._progress.begin(program.name, program.doing)
        try:
            process = Process(program)
        except OSError as error:
            raise ProgramFailed(f"{program.name} cannot be started: {error}") from error
        self._processes.append(process)
        return process

    def wait_ready(self, processes: Sequence[Process]) -> None:
        """Wait until all are ready. Raises ProgramFailed as soon as any program dies or one of them is late."""
        waiting = list(processes)
        while waiting:
            self.check_alive()
            for process in list(waiting):
                if process.program.is_ready():
                    waiting.remove(process)
                    self._progress.end(process.name, "ready")
                    continue
                waited_s = time.monotonic() - process.started_at
                if waited_s > process.program.ready_within_s:
                    limit_s = process.program.ready_within_s
                    raise ProgramFailed(_failure(process, f"was not ready within {limit_s:g} s"))
                self._progress.update(process.name, _shown(process))
            time.sleep(POLL_S)

    def run_to_end(self, program: Program) -> None:
        """Start it and wait until it has ended well. Raises ProgramFailed otherwise, also when it is late."""
        process = self.start(program)
        while (status := process.exit_status()) is None:
            if time.monotonic() - process.started_at > program.ready_within_s:
                raise ProgramFailed(
                    _failure(process, f"did not end within {program.ready_within_s:g} s")
                )
            self._progress.update(process.name, _shown(process))
            time.sleep(POLL_S)
        if status != 0:
            raise ProgramFailed(_failure(process, _ended(status)))
        self.stop(process)
        self._progress.end(process.name, "done")

    def check_alive(self) -> None:
        """Raise ProgramFailed when a program has ended that nobody stopped."""
        for process in self._processes:
            status = process.exit_status()
            if status is not None:
                raise ProgramFailed(_failure(process, _ended(status)))

    def stop(self, process: Process) -> None:
        """Stop one program; returns when nothing of it is left."""
        process.begin_stop()
        process.wait_stopped()
        self._processes.remove(process)

    def stop_all(self) -> None:
        """Stop everything at once, within the longest `stop_within_s` + KILL_S. Ctrl-C is ignored meanwhile."""
        if not self._processes:
            return
        with _signals_ignored():
            # Engines first: an agent that goes away under a busy engine only fills its log with misses.
            for process in reversed(self._processes):
                process.begin_stop()
            self._progress.begin("stopping", ", ".join(process.name for process in self._processes))
            for process in reversed(self._processes):
                process.wait_stopped()
            self._processes.clear()
            self._progress.end("stopping", "everything stopped")


@contextlib.contextmanager
def termination_raises() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise Interrupted in the main thread, as SIGINT raises KeyboardInterrupt."""

    def interrupt(number: int, _frame: FrameType | None) -> None:
        raise Interrupted(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # A shell starts background jobs with SIGINT ignored; `kill -INT` is to work there, too.
    wanted = {
        signal.SIGTERM: interrupt,
        signal.SIGHUP: interrupt,
        signal.SIGINT: signal.default_int_handler,
    }
    before = {number: signal.signal(number, function) for number, function in wanted.items()}
    try:
        yield
    finally:
        for number, function in before.items():
            signal.signal(number, function)


@contextlib.contextmanager
def _signals_ignored() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, function in before.items():
            signal.signal(number, function)


def _shown(process: Process) -> str:
    words = process.last_words()
    return f"{process.program.doing}: {words[:80]}" if words else process.program.doing


def _ended(status: int) -> str:
    if status > 128:
        with contextlib.suppress(ValueError):
            return f"was ended by {signal.Signals(status - 128).name}"
    return f"ended with status {status}"


def _failure(process: Process, what: str) -> str:
    tail = process.log_tail()
    shown = (
        "\n".join(f"  | {line}" for line in tail.splitlines()) if tail else "  | (it wrote nothing)"
    )
    status = process.exit_status()
    cause = likely_cause(process.log_tail(400), killed=status == 128 + signal.SIGKILL)
    hint = f"\nLikely cause: {cause}" if cause else ""
    return f"{process.name} {what}. The end of {process.program.log}:\n{shown}{hint}"
