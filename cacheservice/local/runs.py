"""The folder of one `larder up`: its lock, its logs, its sockets, and the state file that `larder status` reads.

    .larder/models/demo              the demo model (made once)
    .larder/run/NAME/lock            held while NAME runs; the kernel drops it however the run ends
    .larder/run/NAME/state.json      what runs, with addresses; written when all is ready, removed at the end
    .larder/run/NAME/logs/*.log      output of each program
    .larder/run/NAME/sockets/        agent.sock, arena.sock, redis.sock; below /tmp when this path is too long

Invariant: one run per name and folder. Called by `up` and by the CLI.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cacheservice.errors import ConfigError

MAX_SOCKET_PATH_BYTES = 107
LONGEST_SOCKET_NAME = "redis.sock.."
STATE_VERSION = 2


@dataclass(frozen=True, slots=True)
class EngineState:
    """One engine as a user sees it. `url` ends with /v1; `pid` is that of its leash."""

    name: str
    role: str
    url: str
    pid: int
    log: str


@dataclass(frozen=True, slots=True)
class AgentState:
    name: str
    socket_dir: str
    http: str
    pid: int
    log: str


@dataclass(frozen=True, slots=True)
class RouterState:
    """What stands in front of the engines. `url` is the OpenAI endpoint of the run and ends with /v1."""

    type: str
    url: str
    metrics: str
    pid: int
    log: str


@dataclass(frozen=True, slots=True)
class RunState:
    """What runs. `redis` is shown to people: it never holds a password. `router` None: engines are asked directly."""

    name: str
    manifest: str
    model: str
    pid: int
    started_at_unix_s: float
    redis: str
    engines: tuple[EngineState, ...]
    agents: tuple[AgentState, ...]
    router: RouterState | None = None
    version: int = STATE_VERSION


class RunFolder:
    """One run's folder, locked while the `with` block lasts. Raises ConfigError when the name runs already."""

    def __init__(self, larder_dir: Path, name: str) -> None:
        self.path = (larder_dir / "run" / name).absolute()
        self.name = name
        self._lock = -1
        self._short_sockets: Path | None = None

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(self.path / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(
                f"{self.path} cannot be written ({error.strerror}): run larder in a folder that you own, or name one "
                "with --dir"
            ) from error
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._lock)
            state = read_state(self.path)
            who = f" (process {state.pid})" if state else ""
            raise ConfigError(
                f"{self.name} runs already in {self.path}{who}: end it with Ctrl-C there, or choose another --dir"
            ) from error
        self._remove_leftovers()
        shutil.rmtree(self.path / "logs", ignore_errors=True)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._remove_leftovers()
        if self._short_sockets is not None:
            shutil.rmtree(self._short_sockets, ignore_errors=True)
        os.close(self._lock)

    def socket_dir(self) -> Path:
        """A folder, mode 0700, whose sockets have paths that fit into a unix address."""
        folder = self.path / "sockets"
        if len(os.fsencode(folder / LONGEST_SOCKET_NAME)) > MAX_SOCKET_PATH_BYTES:
            if self._short_sockets is None:
                self._short_sockets = Path(tempfile.mkdtemp(prefix="larder-"))
            return self._short_sockets
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder

    def log(self, name: str) -> Path:
        """Where the program `name` writes; emptied when the run begins."""
        return self.path / "logs" / f"{name}.log"

    def secret(self, name: str, content: str) -> Path:
        """A file that only this user can read, gone when the run ends."""
        path = self.path / "secrets" / name
        path.parent.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
        return path

    def write_state(self, state: RunState) -> None:
        """Replace the state file at once, so that a reader sees the old or the new one."""
        scratch = self.path / f".state.{os.getpid()}"
        scratch.write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
        scratch.replace(self.path / "state.json")

    def _remove_leftovers(self) -> None:
        """What a run leaves that was killed. Logs of the last run stay until the next one begins."""
        (self.path / "state.json").unlink(missing_ok=True)
        for folder in ("sockets", "secrets"):
            shutil.rmtree(self.path / folder, ignore_errors=True)


def live_runs(larder_dir: Path) -> list[RunState]:
    """The runs below `larder_dir` that are up now, by name. A state file without a lock holder is of a killed run."""
    found = []
    for path in sorted((larder_dir / "run").glob("*/state.json")):
        if _is_locked(path.parent / "lock"):
            state = read_state(path.parent)
            if state is not None:
                found.append(state)
    return found


def read_state(run: Path) -> RunState | None:
    """The state file of the folder `run`; None when it is not there or not ours."""
    try:
        raw = json.loads((run / "state.json").read_text(encoding="utf-8"))
        if raw.get("version") != STATE_VERSION:
            return None
        return _state(raw)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return None


def _state(raw: Mapping[str, Any]) -> RunState:
    engines = tuple(EngineState(**engine) for engine in raw["engines"])
    agents = tuple(AgentState(**agent) for agent in raw["agents"])
    router = None if raw["router"] is None else RouterState(**raw["router"])
    return RunState(**{**raw, "engines": engines, "agents": agents, "router": router})


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        # Shared: two `larder status` at a time must not take each other for a run.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def now_unix_s() -> float:
    return time.time()
