"""Programs under a leash: nothing survives their end, a Ctrl-C, or even a SIGKILL of the one who started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from cacheservice.local import leash
from cacheservice.local.causes import likely_cause
from cacheservice.local.processes import (
    Interrupted,
    Process,
    Program,
    ProgramFailed,
    Supervisor,
    termination_raises,
)
from cacheservice.local.progress import PlainProgress

ENV = {"PATH": os.environ["PATH"]}

# A program that ignores SIGTERM, and whose grandchild leads a session of its own, out of reach of process groups.
STUBBORN = (
    "trap '' TERM; setsid sh -c 'trap \"\" TERM; sleep 300 & wait' & sleep 300 & wait; sleep 300"
)


def program(
    tmp_path: Path,
    command: str,
    *,
    name: str = "fake",
    is_ready: Callable[[], bool] = lambda: True,
    ready_within_s: float = 20.0,
    stop_within_s: float = 0.3,
) -> Program:
    return Program(
        name=name, argv=("sh", "-c", command), env=ENV, log=tmp_path / f"{name}.log", is_ready=is_ready,
        ready_within_s=ready_within_s, stop_within_s=stop_within_s,
    )  # fmt: skip


def supervisor() -> Supervisor:
    return Supervisor(PlainProgress(Console(stderr=True)))


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Running, not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def started(process: Process, num_descendants: int) -> list[int]:
    wait_until(lambda: len(process.descendants()) >= num_descendants)
    return process.descendants()


def test_descendants_that_ignore_sigterm_and_left_the_session_are_gone_after_a_stop(
    tmp_path: Path,
) -> None:
    with supervisor() as running:
        pids = started(running.start(program(tmp_path, STUBBORN)), 4)
    assert not [pid for pid in pids if lives(pid)]


def test_what_a_program_leaves_behind_when_it_ends_is_stopped_and_its_status_kept(
    tmp_path: Path,
) -> None:
    with supervisor() as running:
        process = running.start(program(tmp_path, "setsid sleep 300 & echo $!; exit 7"))
        wait_until(lambda: process.exit_status() is not None)
        assert process.exit_status() == 7
        orphan = int(process.log_tail())
        assert not lives(orphan)


def test_nothing_survives_a_sigkill_of_the_starter(tmp_path: Path) -> None:
    starter = f"""
import os, sys, time
from pathlib import Path
from cacheservice.local.processes import Process, Program
process = Process(Program(
    name="fake", argv=("sh", "-c", {STUBBORN!r}), env=dict(os.environ), log=Path({str(tmp_path)!r}) / "log",
    is_ready=lambda: True, ready_within_s=5, stop_within_s=0.3,
))
while len(process.descendants()) < 4:
    time.sleep(0.02)
print(process.pid, *process.descendants(), flush=True)
time.sleep(300)
"""
    with subprocess.Popen(
        [sys.executable, "-c", starter], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) >= 5
        parent.kill()
    wait_until(lambda: not any(lives(pid) for pid in pids))


def test_the_program_dies_with_its_leash(tmp_path: Path) -> None:
    with supervisor() as running:
        process = running.start(program(tmp_path, "exec sleep 300"))
        (pid,) = started(process, 1)
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not lives(pid))


def test_a_program_gets_its_grace_to_end_well(tmp_path: Path) -> None:
    command = "trap 'echo ended well; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    with supervisor() as running:
        process = running.start(program(tmp_path, command, stop_within_s=20))
        wait_until(lambda: "up" in process.log_tail())
    assert process.log_tail().endswith("ended well")


def test_a_program_that_dies_is_reported_with_the_end_of_its_log_and_the_remedy(
    tmp_path: Path,
) -> None:
    command = "echo starting; echo 'ImportError: libnuma.so.1: cannot open shared object file' >&2; exit 3"
    with supervisor() as running, pytest.raises(ProgramFailed) as failure:
        running.wait_ready([running.start(program(tmp_path, command, is_ready=lambda: False))])
    message = str(failure.value)
    assert "fake ended with status 3" in message
    assert str(tmp_path / "fake.log") in message
    assert "  | starting\n" in message
    assert "apt install libnuma1" in message


def test_a_program_that_is_late_is_reported(tmp_path: Path) -> None:
    late = program(
        tmp_path, "echo still at it; sleep 300", is_ready=lambda: False, ready_within_s=0.5
    )
    with (
        supervisor() as running,
        pytest.raises(ProgramFailed, match=r"was not ready within 0\.5 s"),
    ):
        running.wait_ready([running.start(late)])


def test_a_program_that_dies_later_is_noticed(tmp_path: Path) -> None:
    with supervisor() as running:
        process = running.start(program(tmp_path, "exec sleep 300"))
        running.wait_ready([process])
        (pid,) = started(process, 1)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: process.exit_status() is not None)
        with pytest.raises(ProgramFailed, match=r"(?s)SIGKILL.*want of memory"):
            running.check_alive()


def test_a_program_that_is_not_there_is_reported_by_name(tmp_path: Path) -> None:
    absent = Program(
        name="redis", argv=("/nonexistent/redis-server",), env=ENV, log=tmp_path / "log", is_ready=lambda: False,
        ready_within_s=20,
    )  # fmt: skip
    with (
        supervisor() as running,
        pytest.raises(ProgramFailed, match="/nonexistent/redis-server cannot be started"),
    ):
        running.wait_ready([running.start(absent)])


def test_run_to_end_wants_success(tmp_path: Path) -> None:
    with supervisor() as running:
        running.run_to_end(program(tmp_path, "echo done"))
        assert running.processes == ()
        with pytest.raises(ProgramFailed, match="ended with status 1"):
            running.run_to_end(program(tmp_path, "exit 1"))


def test_a_restart_shows_its_own_log_only(tmp_path: Path) -> None:
    with supervisor() as running:
        first = running.start(program(tmp_path, "echo first; exec sleep 300"))
        wait_until(lambda: "first" in first.log_tail())
        running.stop(first)
        second = running.start(program(tmp_path, "echo second; exec sleep 300"))
        wait_until(lambda: second.log_tail() != "")
        assert second.log_tail() == "second"
        assert (tmp_path / "fake.log").read_text() == "first\nsecond\n"


def test_ctrl_c_while_waiting_stops_everything(tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupts() -> bool:
        wait_until(lambda: len(process.descendants()) >= 4)
        pids.extend(process.descendants())
        os.kill(os.getpid(), signal.SIGINT)
        return False

    with pytest.raises(KeyboardInterrupt), supervisor() as running:  # noqa: PT012
        process = running.start(program(tmp_path, STUBBORN, is_ready=interrupts))
        running.wait_ready([process])
    assert len(pids) >= 4
    assert not [pid for pid in pids if lives(pid)]


def test_sigterm_becomes_an_exception_and_the_old_handler_comes_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Interrupted) as interrupted, termination_raises():  # noqa: PT012
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5)
    assert interrupted.value.number == signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) == before


def test_descendants_do_not_count_zombies() -> None:
    with subprocess.Popen(["true"]) as child:
        wait_until(lambda: not lives(child.pid))
        assert child.pid not in leash.descendants(os.getpid())


@pytest.mark.parametrize(
    ("log", "remedy"),
    [
        ("OSError: [Errno 98] Address already in use", "--port"),
        ("torch.OutOfMemory: DefaultCPUAllocator: not enough memory", "spec.cache.cpu"),
        ("api_server.py: error: unrecognized arguments: --dtipe x", "--dtipe x"),
        (
            "ValueError: To serve at least one request with the models's max seq len",
            "--max-model-len",
        ),
        ("ModuleNotFoundError: No module named 'vllm'", "make venv"),
    ],
)
def test_known_causes_come_with_a_remedy(log: str, remedy: str) -> None:
    assert remedy in (likely_cause(log, killed=False) or "")


def test_an_unknown_death_has_no_made_up_cause() -> None:
    assert likely_cause("Traceback: something new", killed=False) is None
    assert "memory" in (likely_cause("", killed=True) or "")
