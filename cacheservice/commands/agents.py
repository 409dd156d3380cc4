"""The command line of the cache agent of one machine, from a manifest. Pure; started by `up`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cacheservice.manifest import Cache

DRAIN_S = 3.0
"""On one machine nobody pulls from an agent that goes away; what is in flight ends with its engine."""


@dataclass(frozen=True, slots=True)
class AgentSite:
    """Where the agent lives. `listen` None is unix sockets only; else it speaks plain TCP on that loopback address."""

    node: str
    socket_dir: Path
    http: str
    index: str
    key_prefix: str
    index_password_file: Path | None = None
    listen: str | None = None


def agent_argv(cache: Cache, site: AgentSite, *, python: str) -> tuple[str, ...]:
    """How to start the agent."""
    argv = [
        python, "-m", "cacheservice", "serve",
        "--socket-dir", str(site.socket_dir),
        "--cpu", f"{cache.cpu_bytes >> 20}Mi",
        "--eviction", str(cache.eviction),
        "--index", site.index,
        "--key-prefix", site.key_prefix,
        "--node", site.node,
        "--http", site.http,
        "--drain-seconds", f"{DRAIN_S:g}",
    ]  # fmt: skip
    if site.index_password_file is not None:
        argv += ["--index-password-file", str(site.index_password_file)]
    if site.listen is not None:
        argv += ["--listen", site.listen, "--insecure"]
    return tuple(argv)
