"""Hands the arena over: the second unix socket of an agent.

A client says who it is (its session token), gets the descriptor of the arena by SCM_RIGHTS, and keeps the connection
open as long as it has the arena mapped: the EOF here is the only proof that nobody writes through that mapping any
more. One thread serves all connections; none of them ever blocks or ends it. Called by `serve.py`; the client's side is
`cacheservice/client/shared_memory.py`.

Protocol, little-endian. Hello, 24 bytes: b"LRDR", u16 version, u16 zero, 16 bytes of session token. Answer, 24 bytes:
b"LRDR", u16 version, u16 status, u32 epoch, u32 zero, u64 arena bytes; with the descriptor when the status is 0.
"""

from __future__ import annotations

import array
import enum
import errno
import logging
import os
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from cacheservice.agent.arena import Arena
from cacheservice.agent.sessions import Session, SessionRegistry

_log = logging.getLogger(__name__)

MAGIC = b"LRDR"
VERSION = 1
HELLO = struct.Struct("<4sHH16s")
ANSWER = struct.Struct("<4sHHIIQ")
_UCRED = struct.Struct("3i")
_HELLO_TIMEOUT_S = 5.0
_TICK_S = 1.0
_ACCEPT_PAUSE_S = 1.0
"""How long nobody is accepted after that failed, for want of descriptors say: the listener stays readable meanwhile."""
_UNREAD_BYTES = 4096
_CLIENT_LEFT = (errno.ECONNABORTED, errno.EAGAIN, errno.EINTR)


class HandOverStatus(enum.IntEnum):
    """How a hello is answered."""

    OK = 0
    BAD_HELLO = 1
    UNKNOWN_TOKEN = 2
    UID_REFUSED = 3
    NOT_READY = 4


@dataclass(slots=True, eq=False)
class _Connection:
    socket: socket.socket
    uid: int
    came_s: float
    received: bytes = b""
    session: Session | None = None
    is_distrusted: bool = False
    """Its session was ended by us. What it sends is thrown away, once a tick, until it closes: that alone proves that
    the mapping is gone."""


class ArenaSocket:
    """The listener and its thread. `start` binds, `stop` closes everything; in between it serves."""

    def __init__(
        self,
        path: Path,
        arena: Arena,
        epoch: int,
        registry: SessionRegistry,
        *,
        allowed_uids: Collection[int] = (),
        max_connections: int = 1024,
        is_ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self._path = path
        self._arena = arena
        self._epoch = epoch
        self._registry = registry
        self._allowed_uids = frozenset(allowed_uids)
        self._max_connections = max_connections
        self._is_ready = is_ready
        self._selector = selectors.DefaultSelector()
        self._connections: set[_Connection] = set()
        self._listener: socket.socket | None = None
        self._accepts_again_s: float | None = None
        """When the listener is looked at again; None while it is."""
        self._stopping = threading.Event()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._thread = threading.Thread(target=self._serve, name="arena-socket", daemon=True)

    @property
    def num_connections(self) -> int:
        """Open connections: clients that have the arena mapped, or say hello."""
        return len(self._connections)

    @property
    def is_serving(self) -> bool:
        """False when the thread died: then no end of a mapping is seen any more, and the agent must be restarted."""
        return self._thread.is_alive() or self._stopping.is_set()

    def start(self) -> None:
        """Bind and serve. The caller has removed a stale socket and sets the mode."""
        listener = socket.socket(
            socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC
        )
        listener.bind(str(self._path))
        listener.listen(64)
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, None)
        self._selector.register(self._wake_read, selectors.EVENT_READ, None)
        self._thread.start()

    def stop(self) -> None:
        """Close the listener and all connections; mappings of clients outlive it."""
        self._stopping.set()
        os.write(self._wake_write, b"x")
        if self._thread.is_alive():
            self._thread.join(timeout=5)
        for connection in list(self._connections):
            self._close(connection)
        if self._listener is not None:
            self._listener.close()
        self._selector.close()
        for end in (self._wake_read, self._wake_write):
            os.close(end)

    def _serve(self) -> None:
        try:
            while not self._stopping.is_set():
                self._serve_once()
        except Exception:  # noqa: BLE001 - the outermost frame of the thread; /healthz says that it died
            _log.exception("the arena socket failed, restart the agent")

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(_TICK_S):
            if isinstance(key.data, _Connection):
                self._attend(key.data)
            elif key.fileobj is self._listener:
                self._accept()
        now_s = time.monotonic()
        if self._accepts_again_s is not None and now_s >= self._accepts_again_s:
            assert self._listener is not None
            self._accepts_again_s = None
            self._selector.register(self._listener, selectors.EVENT_READ, None)
        for connection in list(self._connections):
            if connection.is_distrusted:
                self._attend(connection)
            elif connection.session is None and now_s - connection.came_s > _HELLO_TIMEOUT_S:
                self._close(connection)

    def _attend(self, connection: _Connection) -> None:
        """Read one connection; what goes wrong there is its own end only."""
        try:
            if connection.is_distrusted:
                self._throw_away(connection)
            else:
                self._read(connection)
        except Exception:  # noqa: BLE001 - the outermost frame of a connection
            _log.exception("an arena connection failed and is dropped uid=%d", connection.uid)
            self._drop(connection)

    def _drop(self, connection: _Connection) -> None:
        """End the session of a connection that failed; without one, close it."""
        try:
            if connection.session is None:
                self._close(connection)
            elif not connection.is_distrusted:
                self._distrust(connection, connection.session)
        except Exception:  # noqa: BLE001 - nothing is left to try; its extents stay quarantined
            _log.exception("an arena connection can't be dropped uid=%d", connection.uid)

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            accepted, _ = self._listener.accept()
        except OSError as error:
            if error.errno not in _CLIENT_LEFT:
                _log.warning(
                    "nobody can come for the arena error=%s; raise the limit of open files if it says so",
                    error,
                )
                self._selector.unregister(self._listener)
                self._accepts_again_s = time.monotonic() + _ACCEPT_PAUSE_S
            return
        accepted.setblocking(False)
        if len(self._connections) >= self._max_connections:
            accepted.close()
            return
        try:
            credentials = accepted.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
            # The process id is 0 across pods; the user is what can be told.
            _, uid, _ = _UCRED.unpack(credentials)
            connection = _Connection(accepted, uid, time.monotonic())
            self._selector.register(accepted, selectors.EVENT_READ, connection)
        except OSError as error:
            _log.warning("arena connection can't be served error=%s", error)
            accepted.close()
            return
        self._connections.add(connection)

    def _read(self, connection: _Connection) -> None:
        received = _receive(connection, HELLO.size - len(connection.received) or 1)
        if received is None:
            return
        if not received:
            self._close(connection)
            return
        if connection.session is not None:
            # Not our protocol, but no proof either that the mapping is gone: only the session ends.
            _log.warning("arena connection says more than its hello uid=%d", connection.uid)
            self._distrust(connection, connection.session)
            return
        connection.received += received
        if len(connection.received) == HELLO.size:
            self._answer(connection)

    def _distrust(self, connection: _Connection, session: Session) -> None:
        connection.is_distrusted = True
        # Looked at once a tick from now on, so that it can't keep this thread busy.
        self._selector.unregister(connection.socket)
        self._registry.dismiss(session)

    def _throw_away(self, connection: _Connection) -> None:
        """Read what a distrusted connection sent, as far as it does not take long, and see whether it closed."""
        for _ in range(256):
            received = _receive(connection, _UNREAD_BYTES)
            if received is None:
                return
            if not received:
                self._close(connection)
                return

    def _answer(self, connection: _Connection) -> None:
        status = self._judge(connection)
        answer = ANSWER.pack(MAGIC, VERSION, status, self._epoch, 0, self._arena.size_bytes)
        ancillary = []
        if status is HandOverStatus.OK:
            ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [self._arena.fd]))]
        try:
            connection.socket.sendmsg([answer], ancillary)
        except OSError as error:
            _log.debug("arena answer failed error=%s", error)
            self._close(connection)
            return
        if status is not HandOverStatus.OK:
            _log.warning("arena refused status=%s uid=%d", status.name.lower(), connection.uid)
            self._close(connection)

    def _judge(self, connection: _Connection) -> HandOverStatus:
        magic, version, zero, token = HELLO.unpack(connection.received)
        if magic != MAGIC or version != VERSION or zero != 0:
            return HandOverStatus.BAD_HELLO
        if self._allowed_uids and connection.uid not in self._allowed_uids:
            return HandOverStatus.UID_REFUSED
        if not self._is_ready():
            return HandOverStatus.NOT_READY
        connection.session = self._registry.arena_connected(token)
        return HandOverStatus.UNKNOWN_TOKEN if connection.session is None else HandOverStatus.OK

    def _close(self, connection: _Connection) -> None:
        if connection not in self._connections:
            return
        self._connections.discard(connection)
        try:
            self._selector.unregister(connection.socket)
        except (KeyError, ValueError):
            pass  # never registered, or the selector is closed already
        connection.socket.close()
        if connection.session is not None:
            self._registry.arena_closed(connection.session)


def _receive(connection: _Connection, most: int) -> bytes | None:
    """What came; empty when the other side closed, None when there is nothing yet."""
    try:
        return connection.socket.recv(most)
    except BlockingIOError:
        return None
    except OSError:
        return b""
