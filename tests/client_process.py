"""A client in a process of its own, to be killed or stopped in mid-copy. Run as a program by `ClientProcess`.

It stores or retrieves one shard; at one piece of the copy it says "copying" and waits for a line on stdin. At the end
it says the result's reason.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from agent_process import a_namespace

from cacheservice.client import (
    AgentTarget,
    CacheClient,
    ClientIdentity,
    MemorySink,
    MemorySource,
    Role,
    ShardRead,
    ShardWrite,
)
from cacheservice.core.keys import ChunkKey

MIB = 1024 * 1024
SHARD_BYTES = 3 * MIB + 999
SPEC = a_namespace(shard_bytes=(SHARD_BYTES,), name="faults")
ROTTEN = 0xEE


class Halting:
    """A source of ROTTEN bytes, or a sink, that waits for stdin in front of piece `at`."""

    def __init__(self, at: int) -> None:
        """Count pieces from 0."""
        self.at = at
        self.seen = 0
        self.buffer = bytearray([ROTTEN]) * SHARD_BYTES

    def gather(self, start: int, stop: int, destination: int) -> None:
        self._halt()
        MemorySource(self.buffer).gather(start, stop, destination)

    def scatter(self, start: int, stop: int, source: int) -> None:
        self._halt()
        MemorySink(self.buffer).scatter(start, stop, source)

    def _halt(self) -> None:
        if self.seen == self.at:
            print("copying", flush=True)
            sys.stdin.readline()
        self.seen += 1


class ClientProcess:
    """Runs this file; use as a context manager."""

    def __init__(
        self, socket_dir: Path, what: str, *, number: int, at: int, data_plane: str = "auto"
    ) -> None:
        """`what` is store or retrieve; returns when the copy halts in front of piece `at`."""
        tests = Path(__file__).parent
        self.process = subprocess.Popen(
            [sys.executable, __file__, str(socket_dir), what, str(number), str(at), data_plane],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{tests}{os.pathsep}{tests.parent}"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line == "copying\n", f"the client said {line!r}"

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait(30)

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.process.pid, signal.SIGCONT)

    def finish(self) -> str:
        """Let the copy go on; the reason that it ends with. The client lives on until the context ends."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            try:
                pipe.close()
            except BrokenPipeError:
                pass  # the client died with our line unread


def key(number: int) -> ChunkKey:
    """Key of a test's chunk."""
    return ChunkKey(number.to_bytes(32, "big"))


def write_of(number: int, source: Any) -> ShardWrite:
    """A first chunk of a chain."""
    return ShardWrite(key(number), None, 0, 0, 0, SHARD_BYTES, source)


def read_of(number: int, sink: Any) -> ShardRead:
    """The whole shard."""
    return ShardRead(key(number), 0, 0, SHARD_BYTES, 0, SHARD_BYTES, sink)


def main() -> None:
    """See the module."""
    socket_dir, what, number, at, data_plane = sys.argv[1:]
    client = CacheClient(
        AgentTarget(socket_dir=Path(socket_dir)),
        ClientIdentity(Role.TOOL),
        data_plane=data_plane,  # type: ignore[arg-type]
    )
    client.open_namespace(SPEC)
    client.start()
    assert client.wait_connected(30), client.state().message
    halting = Halting(int(at))
    if what == "store":
        reason = client.store(SPEC.digest, [write_of(int(number), halting)], deadline_s=60)[
            0
        ].reason
    else:
        reason = client.retrieve(SPEC.digest, [read_of(int(number), halting)], deadline_s=60)[
            0
        ].reason
    print(reason.label, flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
