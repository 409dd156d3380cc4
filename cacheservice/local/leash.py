"""Run one program so that nothing of it outlives its owner: `python leash.py FD GRACE_S -- COMMAND …`.

The owner holds the other end of the pipe FD. When that end closes, whether the owner asked for it or died of SIGKILL,
the program gets SIGTERM, and GRACE_S seconds later every process that descends from it gets SIGKILL. The same happens
to what the program leaves behind when it ends by itself. Exits with the program's status (128 + signal when a signal
ended it), and only when no descendant is left.

A process group is not enough: vLLM's engine core is a grandchild, and libraries make sessions of their own. So this
process is the subreaper of all of them (orphans become its children, prctl(2)) and finds them in /proc.

Started by `cacheservice.local.processes` as a file, without the package: it imports the standard library only, has
one thread, and costs about 9 MB.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
POLL_S = 0.1


def main(arguments: list[str]) -> int:
    descriptor, grace_s, dashes, *command = arguments
    assert dashes == "--", "python leash.py FD GRACE_S -- COMMAND …"
    assert command, "python leash.py FD GRACE_S -- COMMAND …"
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The owner closes the pipe to end us. A stray signal must not part us from the program.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        # One thread here, so preexec_fn is safe.
        prepare = _before_exec(libc, os.getpid())
        program = subprocess.Popen(command, process_group=0, preexec_fn=prepare)  # noqa: PLW1509
    except OSError as error:
        print(
            f"larder: {command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True
        )
        return 127
    return _watch(program.pid, int(descriptor), float(grace_s))


def _before_exec(libc: ctypes.CDLL, leash: int) -> Callable[[], None]:
    def prepare() -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)  # what is ignored stays ignored across exec
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != leash:  # the leash died before the line above
            os._exit(1)

    return prepare


def _watch(program: int, descriptor: int, grace_s: float) -> int:
    poller = select.poll()
    poller.register(descriptor, select.POLLIN)
    status: int | None = None
    kill_at: float | None = None
    while True:
        if kill_at is None:
            owner_closed = bool(poller.poll(POLL_S * 1000))
        else:
            owner_closed = True
            time.sleep(POLL_S)
        has_children, ended = _reap(program)
        status = ended if status is None else status
        if not has_children:
            # Orphans become our children, so nothing at all is left: no zombie either, and with
            # it no thread that still holds memory or a port while its process counts as dead.
            return 1 if status is None else status
        if kill_at is None and (owner_closed or status is not None):
            kill_at = time.monotonic() + grace_s
            for process in [program] if status is None else descendants(os.getpid()):
                _signal(process, signal.SIGTERM)
        elif kill_at is not None and time.monotonic() >= kill_at:
            for process in descendants(os.getpid()):
                _signal(process, signal.SIGKILL)


def _reap(program: int) -> tuple[bool, int | None]:
    """Collect every dead child; whether any child is left, and the program's exit status if it was among the dead."""
    status: int | None = None
    while True:
        try:
            pid, raw = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return False, status
        if pid == 0:
            return True, status
        if pid == program:
            code = os.waitstatus_to_exitcode(raw)
            status = code if code >= 0 else 128 - code


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except ProcessLookupError:
        pass  # it ended meanwhile


def descendants(root: int) -> list[int]:
    """Processes below `root`, parents first, zombies left out."""
    children: dict[int, list[int]] = {}
    zombies: set[int] = set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as file:
                # The command in parentheses may hold anything, also parentheses.
                state, parent, *_ = file.read().rpartition(b")")[2].split()
        except OSError:
            continue  # it ended meanwhile
        children.setdefault(int(parent), []).append(int(name))
        if state in (b"Z", b"X"):
            zombies.add(int(name))
    found: list[int] = []
    waiting = [root]
    while waiting:
        below = children.get(waiting.pop(), [])
        found += [process for process in below if process not in zombies]
        waiting += below
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
