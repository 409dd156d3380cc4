"""Runs a KVCache manifest on this machine: Redis, one agent, the engines and the router, as child processes.

`plan_run` decides (which programs, where), `LocalRun` does it: starts, waits, restarts, stops. Called by `larder up`,
by the demo and by tests. What the programs' command lines look like is in `cacheservice.commands`, `router` and
`redis`; how they are watched in `processes`. Everything listens on unix sockets or on loopback.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote, urlsplit

from cacheservice.commands.agents import AgentSite, agent_argv
from cacheservice.commands.engines import EngineCommand, EngineRole, EngineSite, engine_command
from cacheservice.errors import ConfigError
from cacheservice.local.http_client import answers_ok
from cacheservice.local.model import is_complete
from cacheservice.local.model_recipes import DEMO_SHAPES, DEMOS
from cacheservice.local.ports import HOST, PortLocks
from cacheservice.local.processes import Process, Program, Supervisor
from cacheservice.local.progress import Progress
from cacheservice.local.redis import redis_program, redis_url
from cacheservice.local.router import check_installed, has_router, router_program
from cacheservice.local.runs import (
    AgentState,
    EngineState,
    RouterState,
    RunFolder,
    RunState,
    now_unix_s,
)
from cacheservice.manifest import KVCacheManifest, Transport

AGENT_READY_WITHIN_S = 60.0
AGENT_READY_S_PER_GIB = 3.0
MODEL_WITHIN_S = 300.0
ENGINE_STOP_WITHIN_S = 10.0
LARDER_ROOT = Path(__file__).resolve().parents[2]
"""The checkout, or site-packages."""


@dataclass(frozen=True, slots=True)
class RunOptions:
    """What the user chose beside the manifest. `redis_url` None is the embedded one; `first_port` None any free ones.

    `larder_dir` holds runs and models; `model_dir` None is what the manifest says; `environment` is passed to every
    program (this module does not read it itself); `num_threads` are the compute threads of each cpu engine.
    """

    manifest_path: str
    larder_dir: Path
    environment: Mapping[str, str]
    redis_url: str | None = None
    model_dir: Path | None = None
    first_port: int | None = None
    num_threads: int = 1


@dataclass(frozen=True, slots=True)
class AgentIndex:
    """How the agent reaches Redis. The URL never holds a password."""

    url: str
    key_prefix: str
    password_file: Path | None


def num_usable_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0))


class LocalRun:
    """One manifest, running. Leave the supervisor's `with` block to stop it. Thread rule: one thread."""

    def __init__(
        self,
        manifest: KVCacheManifest,
        options: RunOptions,
        folder: RunFolder,
        supervisor: Supervisor,
        progress: Progress,
    ) -> None:
        self.manifest = manifest
        self.options = options
        self.model = ""
        self.engine_sites: list[EngineSite] = []
        self._folder = folder
        self._supervisor = supervisor
        self._progress = progress
        self._engines: dict[str, Process] = {}
        self._agent: Process | None = None
        self._port_locks = PortLocks()
        self._agent_state: AgentState | None = None
        self._router_state: RouterState | None = None
        self._redis_shown = ""
        self._started_at_unix_s = now_unix_s()

    def start(self) -> None:
        """Start everything and return when it is ready. Raises ConfigError, or ProgramFailed with the end of a log."""
        roles = engine_roles(self.manifest)
        is_routed = has_router(self.manifest.router.type, roles)
        if is_routed:
            check_installed(self.manifest.router.type)
        ports = self._port_locks.choose(
            self.options.first_port, len(roles) + (4 if is_routed else 2)
        )
        # The endpoint comes first: whoever names a port means that one.
        router_ports = [ports.pop(0)] if is_routed else []
        self.model = resolve_model(
            self.manifest, self.options, self._supervisor, log=self._folder.log("model")
        )
        socket_dir = self._folder.socket_dir()
        index = self._start_redis(socket_dir)
        http = f"{HOST}:{ports[len(roles)]}"
        listen = (
            f"{HOST}:{ports[len(roles) + 1]}"
            if self.manifest.cache.transport is Transport.STREAM
            else None
        )
        self._start_agent(AgentSite(
            node=f"{socket.gethostname()}-{self.manifest.name}"[:64], socket_dir=socket_dir, http=http, index=index.url,
            key_prefix=index.key_prefix, index_password_file=index.password_file, listen=listen,
        ))  # fmt: skip
        self.engine_sites = engine_sites(
            roles, ports, model=self.model, socket_dir=socket_dir, agent_address=listen,
            num_threads=self.options.num_threads,
        )  # fmt: skip
        for site in self.engine_sites:
            self._start_engine(site)
        self._supervisor.wait_ready(self._supervisor.processes)
        if is_routed:
            # After the engines: it would fill its log with their start.
            self._start_router(router_ports[0], ports[len(roles) + 2])
        self._folder.write_state(self.state())

    def restart_engine(self, name: str) -> None:
        """Stop the engine, start it again in the same place, and wait until it is ready."""
        site = self.site(name)
        self._progress.begin(name, "stopping")
        self._supervisor.stop(self._engines.pop(name))
        self._progress.end(name, "stopped")
        self._start_engine(site)
        self._supervisor.wait_ready([self._engines[name]])
        self._folder.write_state(self.state())

    def site(self, name: str) -> EngineSite:
        """Where the engine called `name` is; KeyError when there is none."""
        for site in self.engine_sites:
            if site.name == name:
                return site
        raise KeyError(name)

    def first_engine(self, role: EngineRole) -> EngineSite | None:
        """The first engine of `role`."""
        return next((site for site in self.engine_sites if site.role is role), None)

    @property
    def agent_http(self) -> str:
        """HOST:PORT of the agent's metrics."""
        assert self._agent_state is not None, "the run was started"
        return self._agent_state.http

    def watch(self, between: Callable[[], None] = lambda: None) -> None:
        """Block until a program dies (ProgramFailed) or a signal comes. `between` is called about twice a second."""
        while True:
            self._supervisor.check_alive()
            between()
            time.sleep(0.5)

    def state(self) -> RunState:
        """What runs, for `larder status`."""
        assert self._agent_state is not None, "the run was started"
        return RunState(
            name=self.manifest.name, manifest=self.options.manifest_path, model=self.model, pid=os.getpid(),
            started_at_unix_s=self._started_at_unix_s, redis=self._redis_shown,
            engines=tuple(
                EngineState(
                    name=site.name, role=str(site.role), url=engine_url(site), pid=self._engines[site.name].pid,
                    log=str(self._engines[site.name].program.log),
                )
                for site in self.engine_sites
            ),
            agents=(self._agent_state,),
            router=self._router_state,
        )  # fmt: skip

    def _start_redis(self, socket_dir: Path) -> AgentIndex:
        external = self.manifest.redis.external
        url = self.options.redis_url or (f"redis://{external.address}" if external else None)
        if url is not None:
            without_password, password = split_password(url)
            self._redis_shown = without_password
            # A Redis of others: the run's name in the prefix keeps two KVCaches apart.
            password_file = self._folder.secret("redis", password) if password else None
            return AgentIndex(without_password, f"larder:{self.manifest.name}:", password_file)
        embedded = self.manifest.redis.embedded
        assert embedded is not None, "a manifest has an embedded or an external Redis"
        socket_path = socket_dir / "redis.sock"
        program = redis_program(
            socket_path=socket_path, folder=self._folder.path, log=self._folder.log("redis"),
            memory_bytes=embedded.memory_bytes * 8 // 10, env=self.options.environment,
        )  # fmt: skip
        self._supervisor.start(program)
        self._redis_shown = f"embedded, {socket_path}"
        return AgentIndex(redis_url(socket_path), "larder:", None)

    def _start_agent(self, site: AgentSite) -> None:
        arena_gib = self.manifest.cache.cpu_bytes / 2**30
        program = Program(
            name="agent",
            argv=agent_argv(self.manifest.cache, site, python=sys.executable),
            env=program_env(self.options.environment, {}),
            log=self._folder.log("agent"),
            is_ready=lambda: answers_ok(HOST, int(site.http.rpartition(":")[2]), "/readyz"),
            ready_within_s=AGENT_READY_WITHIN_S + AGENT_READY_S_PER_GIB * arena_gib,
            doing=f"allocating an arena of {arena_gib:g} GiB",
        )
        self._agent = self._supervisor.start(program)
        self._agent_state = AgentState(
            name="agent",
            socket_dir=str(site.socket_dir),
            http=site.http,
            pid=self._agent.pid,
            log=str(program.log),
        )

    def _start_engine(self, site: EngineSite) -> None:
        command = engine_command(self.manifest, site, python=sys.executable)
        program = engine_program(
            site, command, environment=self.options.environment, log=self._folder.log(site.name),
            ready_within_s=self.manifest.engine.startup_timeout_s,
        )  # fmt: skip
        self._engines[site.name] = self._supervisor.start(program)

    def _start_router(self, port: int, metrics_port: int) -> None:
        router = self.manifest.router.type
        program = router_program(
            router, self.engine_sites, port=port, metrics_port=metrics_port,
            environment=program_env(self.options.environment, {}), log=self._folder.log("router"),
        )  # fmt: skip
        process = self._supervisor.start(program)
        self._supervisor.wait_ready([process])
        self._router_state = RouterState(
            type=str(router), url=f"http://{HOST}:{port}/v1", metrics=f"http://{HOST}:{metrics_port}/metrics",
            pid=process.pid, log=str(program.log),
        )  # fmt: skip


def engine_roles(manifest: KVCacheManifest) -> list[EngineRole]:
    """One item per engine, prefill first. Decode engines do both when nothing else prefills."""
    decode_role = EngineRole.DECODE if manifest.prefill is not None else EngineRole.BOTH
    roles: list[EngineRole] = []
    for part, role in ((manifest.prefill, EngineRole.PREFILL), (manifest.decode, decode_role)):
        if part is not None:
            roles += [role] * (1 if part.replicas is None else part.replicas)
    return roles


def engine_sites(
    roles: list[EngineRole],
    ports: list[int],
    *,
    model: str,
    socket_dir: Path,
    agent_address: str | None,
    num_threads: int,
) -> list[EngineSite]:
    """Names and places: `prefill`, `decode`, and with more than one `decode-0`, `decode-1`."""
    sites = []
    for index, (role, port) in enumerate(zip(roles, ports, strict=False)):
        title = "decode" if role is EngineRole.BOTH else str(role)
        number = roles[:index].count(role)
        sites.append(EngineSite(
            name=title if roles.count(role) == 1 else f"{title}-{number}", role=role, host=HOST, port=port, model=model,
            socket_dir=None if agent_address else str(socket_dir), agent_address=agent_address, num_threads=num_threads,
        ))  # fmt: skip
    return sites


def engine_program(
    site: EngineSite,
    command: EngineCommand,
    *,
    environment: Mapping[str, str],
    log: Path,
    ready_within_s: float,
) -> Program:
    """An engine as a program to supervise: ready when /health answers."""
    added = dict(command.env)
    if site.model is not None and Path(site.model).is_dir():
        added["HF_HUB_OFFLINE"] = "1"  # all is in the folder: nothing is to be asked of a hub
    return Program(
        name=site.name,
        argv=command.argv,
        env=program_env(environment, added),
        log=log,
        is_ready=lambda: answers_ok(site.host, site.port, "/health"),
        ready_within_s=ready_within_s,
        stop_within_s=ENGINE_STOP_WITHIN_S,
        doing="starting vLLM",
    )


def engine_url(site: EngineSite) -> str:
    """The OpenAI base URL."""
    return f"http://{site.host}:{site.port}/v1"


def resolve_model(
    manifest: KVCacheManifest, options: RunOptions, supervisor: Supervisor, *, log: Path
) -> str:
    """The model folder (made here when it is the demo model), or the hub id that vLLM downloads; "" without engines."""
    if manifest.model is None:
        return ""
    named = options.model_dir or (Path(manifest.model.path) if manifest.model.path else None)
    if named is not None:
        if not (named / "config.json").is_file():
            raise ConfigError(
                f"{named} holds no model: it has no config.json; name the folder of a checkpoint with --model"
            )
        return str(named.absolute())
    shape = DEMO_SHAPES.get(manifest.model.name)
    if shape is None:
        return manifest.model.name
    recipe = DEMOS[shape]
    folder = (options.larder_dir / "models" / recipe.name).absolute()
    if not is_complete(folder, recipe):
        # A process of its own: torch would keep half a gigabyte here for the rest of the run.
        supervisor.run_to_end(Program(
            name="model",
            argv=(sys.executable, "-m", "cacheservice.local.model", str(folder), "--shape", shape),
            env=program_env(options.environment, {}), log=log, is_ready=lambda: False,
            ready_within_s=MODEL_WITHIN_S, doing="making the demo model (once)",
        ))  # fmt: skip
    return str(folder)


def split_password(url: str) -> tuple[str, str]:
    """A Redis URL without its password, and the password ("" when there is none): passwords stay out of `ps`."""
    parts = urlsplit(url)
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"--redis {parts.scheme or url}: write redis://HOST:PORT, rediss://HOST:PORT or unix:///PATH"
        )
    if parts.password is None:
        return url, ""
    user = f"{parts.username}@" if parts.username else ""
    host = parts.netloc.rpartition("@")[2]
    # Not urlunsplit: without a host it drops the slashes of unix:///PATH.
    return url.replace(f"//{parts.netloc}", f"//{user}{host}", 1), unquote(parts.password)


def program_env(environment: Mapping[str, str], added: Mapping[str, str]) -> dict[str, str]:
    """`environment` with `added`. A checkout that is not installed is put on Python's path for the children."""
    env = {**environment, **added, "PYTHONUNBUFFERED": "1"}
    if LARDER_ROOT.name not in ("site-packages", "dist-packages"):
        paths = [
            str(LARDER_ROOT),
            *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep)),
        ]
        env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env
