"""Free TCP ports on loopback. Called by `up`. One found free may be taken before it is used: the program says so.

Those of engines are held until then: an engine takes half a minute to listen, and vLLM binds with SO_REUSEPORT (0.32,
entrypoints/launchers/launcher.py), so that two engines on one port would silently share its connections.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

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


def hold_ports(ports: Sequence[int]) -> list[socket.socket]:
    """Keep these ports from everybody but servers of this user that bind with SO_REUSEPORT, as long as the sockets are
    open. They don't listen, so no connection reaches them. Raises OSError when somebody else was quicker."""
    held: list[socket.socket] = []
    try:
        for port in ports:
            held.append(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
            # For the bind alone: connections of an earlier server may linger, and a later holder must not succeed.
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            held[-1].bind((HOST, port))
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
            held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError:
        for one in held:
            one.close()
        raise
    return held
