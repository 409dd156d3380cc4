"""The command line and the memory of a cache agent, from a manifest. Pure; for `up` and the operator's DaemonSet."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cacheservice.manifest import Cache

DRAIN_S = 3.0
"""On one machine nobody pulls from an agent that goes away; what is in flight ends with its engine."""
POD_DRAIN_S = 20.0
"""In a pod, below the 30 s that Kubernetes waits: other agents may be reading from here."""
WAIT_FOR_MEMORY_S = 120.0
"""In a pod: engines may map the arena of the agent before this one for as long as they take to see that it is gone."""

SMALLEST_SHARD_BYTES = 64 << 10
"""What a chunk of 1 MiB, the smallest that is chosen by itself, comes to on each of 16 ranks. Smaller ones are stored
too, but fewer than fill the arena."""
OWN_BYTES = 150 << 20
"""Of an agent without shards. Measured with an arena of 2 GiB: 33 MiB anonymous, 25 MiB of mapped files, under 10 MiB
for four clients that store; with as many clients and calls as it takes, below this."""
SHARD_BYTES = 1 << 10
"""Of each shard held. Measured: 31 MiB for 30,000 shards."""
ARENA_BYTES_PER_BYTE_OF_PAGE_TABLE = 512
"""8 bytes for each page of 4 KiB, charged to the agent, too. Measured: VmPTE 4 MiB with an arena of 2 GiB."""


@dataclass(frozen=True, slots=True)
class ServerTls:
    """Files of the TCP listener and of calls to other agents. `server_name` is the DNS SAN that these must show,
    `owner` the OWNER in larder://OWNER/ROLE that callers must show; None: any, and the host of the address."""

    cert: Path
    key: Path
    ca: Path
    server_name: str | None = None
    owner: str | None = None


@dataclass(frozen=True, slots=True)
class IndexFiles:
    """Files with what Redis asks of an agent, read at each connect; None: not asked for. A file of a user that is
    missing means that there is no user. The last four go with rediss:// alone."""

    username: Path | None = None
    password: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None


@dataclass(frozen=True, slots=True)
class AgentSite:
    """Where the agent lives. `listen` None is unix sockets only; else it speaks TCP there, plain without `tls`.

    `advertise` None is what `listen` says. `socket_group` None leaves the sockets to the process's own group,
    `max_shards` None the number to the agent: for places without a memory limit.
    """

    node: str
    socket_dir: Path
    http: str
    index: str
    key_prefix: str
    index_password_file: Path | None = None
    listen: str | None = None
    advertise: str | None = None
    tls: ServerTls | None = None
    index_files: IndexFiles | None = None
    socket_group: int | None = None
    max_shards: int | None = None
    wait_for_memory_s: float = 0.0
    drain_s: float = DRAIN_S


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
        "--drain-seconds", f"{site.drain_s:g}",
    ]  # fmt: skip
    files = site.index_files or IndexFiles(password=site.index_password_file)
    argv += _given(
        ("--index-username-file", files.username),
        ("--index-password-file", files.password),
        ("--index-ca-file", files.ca),
        ("--index-cert-file", files.cert),
        ("--index-key-file", files.key),
        ("--index-server-name", files.server_name),
        ("--max-shards", site.max_shards),
        ("--socket-group", site.socket_group),
        ("--wait-for-memory-seconds", f"{site.wait_for_memory_s:g}" if site.wait_for_memory_s else None),
        ("--listen", site.listen),
        ("--advertise", site.advertise),
    )  # fmt: skip
    if site.tls is not None:
        argv += _given(
            ("--tls-cert", site.tls.cert),
            ("--tls-key", site.tls.key),
            ("--tls-ca", site.tls.ca),
            ("--tls-server-name", site.tls.server_name),
            ("--tls-owner", site.tls.owner),
        )
    elif site.listen is not None:
        argv.append("--insecure")
    return tuple(argv)


def max_shards(cache: Cache) -> int:
    """Most shards that an agent with `agent_memory_bytes` may hold: as many as fit when all are as small as
    SMALLEST_SHARD_BYTES, or more where the manifest leaves more memory beside the arena."""
    fitting = max(1024, cache.cpu_bytes // SMALLEST_SHARD_BYTES)
    if cache.overhead_bytes is None:
        return fitting
    left = cache.overhead_bytes - OWN_BYTES - _page_table_bytes(cache)
    return max(fitting, left // SHARD_BYTES)


def agent_memory_bytes(cache: Cache) -> int:
    """Memory limit of an agent's container: the arena, and what the agent needs beside it unless the manifest says how
    much that is (spec.cache.overhead)."""
    if cache.overhead_bytes is not None:
        return cache.cpu_bytes + cache.overhead_bytes
    own = OWN_BYTES + SHARD_BYTES * max_shards(cache)
    return cache.cpu_bytes + own + _page_table_bytes(cache)


def _page_table_bytes(cache: Cache) -> int:
    return cache.cpu_bytes // ARENA_BYTES_PER_BYTE_OF_PAGE_TABLE


def _given(*flags: tuple[str, object | None]) -> list[str]:
    return [word for flag, value in flags if value is not None for word in (flag, str(value))]
