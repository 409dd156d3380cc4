"""Free TCP ports on loopback. Called by `up`. One found free may be taken before it is used: the program says so.

Between runs of one user it is not: an engine takes half a minute to listen, and until then its port looks free. So
each run holds a lock per port, which ends with the process.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from collections.abc import Collection
from pathlib import Path

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


def choose_ports(first: int | None, count: int, *, besides: Collection[int] = ()) -> list[int]:
    """`count` ports: consecutive ones from `first`, or the next free ones from DEFAULT_FIRST_PORT when it is None, but
    none of `besides`.

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
        if port not in besides and is_free(port):
            found.append(port)
            if len(found) == count:
                return found
    raise ConfigError(f"no {count} free ports above {DEFAULT_FIRST_PORT}")


class PortLocks:
    """The ports that this run holds against other runs of the same user, until it is closed or the process ends."""

    def __init__(self, folder: Path | None = None) -> None:
        """Hold none yet. `folder` has a lock file per port; None: one of this user's in the folder for temporary
        files."""
        self._folder = folder or Path(tempfile.gettempdir()) / f"larder-ports-{os.getuid()}"
        self._held: dict[int, int] = {}
        """Descriptor of the locked file, by port."""

    def choose(self, first: int | None, count: int) -> list[int]:
        """As `choose_ports`, but none that another run holds; what is chosen is held. Raises ConfigError."""
        skipped: set[int] = set()
        while True:  # ends: each round skips more ports, and there are so many
            ports = choose_ports(first, count, besides=skipped)
            taken = [port for port in ports if not self._hold(port)]
            if not taken:
                return ports
            self.close()
            if first is not None:
                raise ConfigError(
                    f"port {taken[0]} belongs to another run that is starting: choose another --port, or leave it out "
                    "to take free ones"
                )
            skipped.update(taken)

    def close(self) -> None:
        """Give all back."""
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    def _hold(self, port: int) -> bool:
        if port in self._held:
            return True
        self._folder.mkdir(mode=0o700, exist_ok=True)
        descriptor = os.open(self._folder / str(port), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._held[port] = descriptor
        return True
