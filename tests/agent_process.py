"""A real agent for tests: as a process of its own, to be killed, stopped and restarted, or inside the test's process.

    with AgentProcess() as agent:           # python -m cacheservice serve, in a short temporary directory
        agent.target                        # AgentTarget(socket_dir=…)
        agent.kill(); agent.start()         # same directory, another epoch
        agent.pause(); agent.resume()       # SIGSTOP, SIGCONT

    with local_agent(cpu="16Mi") as agent:  # cacheservice.agent.serve.Agent in this process
        agent.guarded, agent.registry       # its store and sessions

    two agents that see each other: AgentProcess(index=redis.url, tcp=True), twice

Only processes that an object started itself are signalled, by pid.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cacheservice.agent.config import build_config
from cacheservice.agent.serve import Agent
from cacheservice.client.values import AgentTarget
from cacheservice.core.layout import GroupShape, NamespaceSpec, build_namespace
from cacheservice.index.port import Index

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 40.0


class AgentProcess:
    """`python -m cacheservice serve` as a child. Starts on construction unless told not to; not thread-safe."""

    def __init__(
        self,
        *,
        socket_dir: Path | None = None,
        cpu: str = "64Mi",
        index: str = "memory",
        node: str | None = None,
        tcp: bool = False,
        http: bool = False,
        args: Sequence[str] = (),
        start: bool = True,
    ) -> None:
        """`tcp` listens on a free loopback port (with --insecure unless `args` name certificates) and advertises it."""
        # Not pytest's tmp_path: a unix socket's path may have 107 bytes at most.
        self._folder = (
            None if socket_dir is not None else Path(tempfile.mkdtemp(prefix="larder-agent-"))
        )
        self.socket_dir = socket_dir or self._folder
        assert self.socket_dir is not None
        self.address = f"{LOOPBACK}:{free_port()}" if tcp else None
        self.http_address = f"{LOOPBACK}:{free_port()}" if http else None
        self._log_path = Path(tempfile.mkstemp(prefix="larder-agent-", suffix=".log")[1])
        command = ["serve", "--socket-dir", str(self.socket_dir), "--cpu", cpu, "--index", index]
        command += ["--node", node or f"node-{self.socket_dir.name}"]
        if self.address is not None:
            command += ["--listen", self.address]
            command += [] if "--tls-cert" in args else ["--insecure"]
        if self.http_address is not None:
            command += ["--http", self.http_address]
        self._command = [sys.executable, "-m", "cacheservice", *command, *args]
        self._process: subprocess.Popen[str] | None = None
        self.ready_line = ""
        atexit.register(self.close)
        try:
            if start:
                self.start()
        except BaseException:
            self.close()
            raise

    @property
    def target(self) -> AgentTarget:
        """For clients of the same node: shared memory."""
        return AgentTarget(socket_dir=self.socket_dir)

    @property
    def tcp_target(self) -> AgentTarget:
        """For clients over TCP: streams."""
        return AgentTarget(address=self.address)

    @property
    def pid(self) -> int:
        """Process id of the running agent."""
        assert self._process is not None, "this agent is not running"
        return self._process.pid

    @property
    def log(self) -> str:
        """What it wrote to stderr, over all its lives."""
        return self._log_path.read_text(errors="replace")

    def start(self) -> None:
        """Start it and wait until it says that it is ready; RuntimeError with its log when it does not."""
        assert self._process is None, "this agent runs already"
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                text=True,
            )
        assert self._process.stdout is not None
        # EOF when it dies, so this ends either way.
        self.ready_line = self._process.stdout.readline()
        if not self.ready_line.startswith("ready"):
            self._process.kill()
            self._reap()
            raise RuntimeError(f"the agent did not start:\n{self.log}")

    def kill(self) -> None:
        """SIGKILL and reap. Does nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._reap()

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> int:
        """SIGTERM, wait for the drain; returns the exit code."""
        assert self._process is not None, "this agent is not running"
        self._process.terminate()
        self._process.wait(timeout_s)
        return self._reap()

    def restart(self) -> None:
        """Kill it and start it in the same directory: another epoch, an empty arena."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def get(self, path: str) -> tuple[int, bytes]:
        """One HTTP page: status and body. Needs `http=True`."""
        assert self.http_address is not None, "start this agent with http=True"
        return http_get(f"http://{self.http_address}{path}")

    def counters(self) -> Mapping[str, int]:
        """Gauges and totals of /statusz."""
        counters: Mapping[str, int] = json.loads(self.get("/statusz")[1])["counters"]
        return counters

    def close(self) -> None:
        """Kill it and remove its folder; idempotent."""
        self.kill()
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._log_path.unlink(missing_ok=True)
        atexit.unregister(self.close)

    def _reap(self) -> int:
        process, self._process = self._process, None
        assert process is not None
        code = process.wait()
        assert process.stdout is not None
        process.stdout.close()
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


@contextmanager
def local_agent(*, index: Index | None = None, **fields: Any) -> Iterator[Agent]:
    """An agent in this process, with `AgentConfig` fields; its folder goes with it.

    `index` is given instead of built, for example one of several `MemoryIndex` on one store, so that agents of one
    process see each other; they then need `listen="127.0.0.1:0", insecure=True`.
    """
    folder = Path(tempfile.mkdtemp(prefix="larder-agent-"))
    values = {
        "socket_dir": folder,
        "cpu": "16Mi",
        "drain_seconds": 2,
        "node": folder.name,
        **fields,
    }
    agent = Agent(build_config(values), index=index)
    try:
        agent.start()
        try:
            yield agent
        finally:
            agent.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def target_of(agent: Agent) -> AgentTarget:
    """Target of a local agent: shared memory."""
    return AgentTarget(socket_dir=agent.config.socket_dir)


def tcp_target_of(agent: Agent) -> AgentTarget:
    """Target of a local agent over TCP."""
    return AgentTarget(address=f"{LOOPBACK}:{agent.tcp_port}")


def a_namespace(
    *,
    shard_bytes: Sequence[int] = (300_000,),
    num_shards: Sequence[int] | None = None,
    kinds: Sequence[str] | None = None,
    name: str = "test",
) -> NamespaceSpec:
    """A namespace with one group per entry, of full attention unless `kinds` say otherwise."""
    counts = num_shards or [1] * len(shard_bytes)
    kinds = kinds or ["full"] * len(shard_bytes)
    groups = [
        GroupShape(kind, n, size) for kind, n, size in zip(kinds, counts, shard_bytes, strict=True)
    ]
    return build_namespace({"name": name}, tokens_per_chunk=256, groups=groups)


def wait_until(
    condition: Callable[[], object], *, timeout_s: float = 20.0, what: str = "the condition"
) -> None:
    """Poll until `condition` is true; fails the test after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come true in {timeout_s} s"
        time.sleep(0.01)


def http_get(url: str) -> tuple[int, bytes]:
    """Status and body of a page, errors included."""
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
