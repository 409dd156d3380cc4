"""Free TCP ports on loopback. Called by `up`. One found free may be taken before it is used: the program says so."""

from __future__ import annotations

import socket

from cacheservice.errors import ConfigError

DEFAULT_FIRST_PORT = 8100
LAST_PORT = 65535
HOST = "127.0.0.1"


def is_free(port: int, host: str = HOST) -> bool:
    """Whether a server could listen there now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def choose_ports(first: int | None, count: int) -> list[int]:
    """`count` ports: consecutive ones from `first`, or the next free ones from DEFAULT_FIRST_PORT when it is None.

    Raises ConfigError when a port that the user asked for is taken, or none is left.
    """
    if first is not None:
        wanted = list(range(first, first + count))
        if wanted[-1] > LAST_PORT:
            raise ConfigError(
                f"--port {first}: {count} ports are needed and {LAST_PORT} is the last one; choose a lower one"
            )
        for port in wanted:
            if not is_free(port):
                raise ConfigError(
                    f"port {port} is taken; this run needs {wanted[0]} to {wanted[-1]}: choose another --port, or "
                    "leave it out to take free ones"
                )
        return wanted
    found = []
    for port in range(DEFAULT_FIRST_PORT, LAST_PORT + 1):
        if is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(f"no {count} free ports above {DEFAULT_FIRST_PORT}")
