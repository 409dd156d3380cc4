"""`larder status`: what runs below a folder, and what its caches hit. Asks agents and engines; changes nothing."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cacheservice.client.admin import AgentAdmin
from cacheservice.client.values import AgentTarget
from cacheservice.commands.router import READY_PATH
from cacheservice.errors import LarderError
from cacheservice.local.http_client import answers_ok
from cacheservice.local.ports import HOST
from cacheservice.local.runs import RunState, live_runs
from cacheservice.v1 import cache_pb2

WIDTH = 120
"""Columns when the output is no terminal."""


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """One engine. `connected` counts its sessions with the agent (scheduler half and ranks)."""

    name: str
    role: str
    url: str
    healthy: bool
    connected: int
    data_plane: str
    asked_tokens: int
    hit_tokens: int
    outcomes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RouterStatus:
    """The router. `ready` is its own word: it has an engine of each role. `url` is the OpenAI endpoint."""

    type: str
    url: str
    ready: bool
    metrics: str


@dataclass(frozen=True, slots=True)
class AgentStatus:
    """One agent. `problem` is None when it answers; everything else is then as it said."""

    name: str
    problem: str | None
    uptime_s: int = 0
    arena_bytes: int = 0
    used_bytes: int = 0
    chunks: int = 0
    shards: int = 0
    leases: int = 0
    sessions: int = 0
    eviction: str = ""
    index: str = ""
    index_message: str = ""
    metrics: str = ""


def print_status(larder_dir: Path, *, as_json: bool) -> int:
    """Print what runs; the exit code is 1 when nothing does, or when something that should run does not answer."""
    runs = live_runs(larder_dir)
    seen = [(run, *observe(run), observe_router(run)) for run in runs]
    is_well = bool(runs) and all(
        all(engine.healthy for engine in engines)
        and all(agent.problem is None for agent in agents)
        and (router is None or router.ready)
        for _, engines, agents, router in seen
    )
    if as_json:
        print(json.dumps({"runs": [_as_json(*one) for one in seen]}))
        return 0 if is_well else 1
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if not runs:
        console.print(
            f"Nothing runs below {larder_dir}. Start something with: larder up examples/cpu-local.yaml\n"
            "If it runs with another folder, name that: larder status --dir DIR",
            soft_wrap=True,
        )
    for one in seen:
        _print_run(console, *one)
    return 0 if is_well else 1


def observe(run: RunState) -> tuple[list[EngineStatus], list[AgentStatus]]:
    """Ask every agent and engine of `run`. What does not answer is said in the result, never raised."""
    agents: list[AgentStatus] = []
    sessions: list[Any] = []
    for agent in run.agents:
        try:
            with AgentAdmin(AgentTarget(socket_dir=Path(agent.socket_dir)), timeout_s=3.0) as admin:
                status = admin.status()
                sessions += admin.engines()
        except LarderError as error:
            agents.append(AgentStatus(agent.name, problem=str(error)))
            continue
        agents.append(AgentStatus(
            name=agent.name, problem=None, uptime_s=status.uptime_s, arena_bytes=status.arena_bytes,
            used_bytes=status.used_bytes, chunks=status.num_chunks, shards=status.num_shards, leases=status.num_leases,
            sessions=status.num_sessions, eviction=status.eviction,
            index=cache_pb2.IndexState.Name(status.index_state).removeprefix("INDEX_STATE_").lower(),
            index_message=status.index_message, metrics=f"http://{agent.http}/metrics",
        ))  # fmt: skip
    engines = []
    for engine in run.engines:
        own = [s for s in sessions if is_rank_of(s.hello.engine_name, engine.name)]
        outcomes: dict[str, int] = {}
        for session in own:
            for outcome in session.outcomes:
                outcomes[outcome.name] = outcomes.get(outcome.name, 0) + outcome.value
        planes = sorted({session.data_plane for session in own} - {"", "none"})
        engines.append(EngineStatus(
            name=engine.name, role=engine.role, url=engine.url,
            healthy=answers_ok(HOST, _port(engine.url), "/health"), connected=len(own),
            data_plane=", ".join(planes) or "none", asked_tokens=sum(session.asked_tokens for session in own),
            hit_tokens=sum(session.hit_tokens for session in own), outcomes=dict(sorted(outcomes.items())),
        ))  # fmt: skip
    return engines, agents


def observe_router(run: RunState) -> RouterStatus | None:
    """Ask the router of `run`; None when it has none."""
    if run.router is None:
        return None
    return RouterStatus(
        type=run.router.type,
        url=run.router.url,
        ready=answers_ok(HOST, _port(run.router.url), READY_PATH),
        metrics=run.router.metrics,
    )


def _port(url: str) -> int:
    return int(url.split(":")[2].split("/", maxsplit=1)[0])


def is_rank_of(session_name: str, engine_name: str) -> bool:
    """Whether a session is one of this engine's, which has `-dpN` in its name for rank N of a data parallel group."""
    return re.fullmatch(rf"{re.escape(engine_name)}(-dp\d+)?", session_name) is not None


def _as_json(
    run: RunState,
    engines: Sequence[EngineStatus],
    agents: Sequence[AgentStatus],
    router: RouterStatus | None,
) -> dict[str, Any]:
    return {
        "name": run.name, "manifest": run.manifest, "model": run.model, "pid": run.pid, "redis": run.redis,
        "started_at_unix_s": run.started_at_unix_s,
        "engines": [asdict(engine) for engine in engines], "agents": [asdict(agent) for agent in agents],
        "router": None if router is None else asdict(router),
    }  # fmt: skip


def _print_run(
    console: Console, run: RunState, engines: Sequence[EngineStatus], agents: Sequence[AgentStatus],
    router: RouterStatus | None,
) -> None:  # fmt: skip
    console.print(f"\n{run.name}   {run.manifest} (process {run.pid})", soft_wrap=True)
    if router is not None:
        state = "ready" if router.ready else "[red]not ready: it has no engine of each role[/red]"
        console.print(
            f"endpoint   {router.url}   router {router.type}, {state}, metrics {router.metrics}",
            soft_wrap=True,
        )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("engine", "role", "address", "health", "cache"):
        table.add_column(title)
    for title in ("lookups", "hits", "tokens asked", "tokens hit"):
        table.add_column(title, justify="right")
    for engine in engines:
        lookups = sum(
            count for name, count in engine.outcomes.items() if name.startswith("lookup.")
        )
        table.add_row(
            engine.name, engine.role, engine.url, "healthy" if engine.healthy else "[red]no answer[/red]",
            engine.data_plane if engine.connected else "[red]not connected[/red]", f"{lookups:,}",
            f"{engine.outcomes.get('lookup.hit', 0):,}", f"{engine.asked_tokens:,}", f"{engine.hit_tokens:,}",
        )  # fmt: skip
    if engines:
        console.print(table)
    for agent in agents:
        if agent.problem is not None:
            console.print(
                f"[red]{agent.name} does not answer:[/red] {agent.problem}", soft_wrap=True
            )
            continue
        used = agent.used_bytes / agent.arena_bytes if agent.arena_bytes else 0.0
        console.print(
            f"{agent.name}   {agent.chunks:,} chunks in {agent.used_bytes / 2**20:,.0f} of "
            f"{agent.arena_bytes / 2**20:,.0f} MiB ({used:.0%}), {agent.sessions} sessions, "
            f"eviction {agent.eviction}, metrics {agent.metrics}",
            soft_wrap=True,
        )
        console.print(f"index   {agent.index} {agent.index_message}".rstrip(), soft_wrap=True)
