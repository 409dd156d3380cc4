"""One connection to Redis, on which every wait ends at an absolute time. RESP2 through hiredis.

Why not redis-py's: its time-outs are per socket operation, so a server that drips bytes, or a connect with AUTH, takes
several of them; it retries on its own; and its replies are unbounded. Here a deadline covers the whole exchange, and a
reply of more than MAX_REPLY_BYTES ends the connection.

Called by `pool.py` (connecting) and `redis_index.py` (calls). A connection belongs to one thread at a time.
"""

from __future__ import annotations

import socket
import ssl
import time
from typing import Any, Protocol

import hiredis

from cacheservice.index import trouble
from cacheservice.index.location import RedisLocation

MAX_REPLY_BYTES = 64 * 1024 * 1024
READ_BYTES = 64 * 1024


class ErrorReply(Exception):
    """Redis answered with an error; the text begins with a word such as NOPERM. Stays inside this package."""


class _NotRedis(Exception):
    """What arrived is not RESP, or too much of it."""


class Deadline:
    """An absolute time on the monotonic clock, and the span it was made of, for messages."""

    __slots__ = ("at", "span_s")

    def __init__(self, span_s: float) -> None:
        self.span_s = span_s
        self.at = time.monotonic() + span_s

    def remaining_s(self) -> float:
        """Seconds left; TimeoutError when none are."""
        left = self.at - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class _Readable(Protocol):
    """Plain and TLS sockets alike."""

    def settimeout(self, value: float | None, /) -> None: ...
    def recv_into(self, buffer: bytearray, /) -> int: ...
    def send(self, payload: memoryview, /) -> int: ...
    def close(self) -> None: ...


def pack(*arguments: bytes | str | int) -> bytes:
    """One command as bytes for the wire."""
    # The stub says "a tuple of one element".
    packed: bytes = hiredis.pack_command(arguments)  # type: ignore[arg-type]
    return packed


class Connection:
    """A socket that is connected and let in. Unusable after any error but ErrorReply: close it."""

    def __init__(self, stream: _Readable, location: RedisLocation) -> None:
        """Owns `stream` from here on."""
        self._stream = stream
        self.location = location
        """With the user that it was let in as."""
        self._buffer = bytearray(READ_BYTES)
        self._missing = object()
        self._reader = hiredis.Reader(
            protocolError=_NotRedis, replyError=ErrorReply, notEnoughData=self._missing
        )
        self._was_answered = False
        self.num_calls = 0
        """Exchanges so far; a failure on an older connection may just mean that the server was restarted."""
        self.run_id: str | None = None
        """Which incarnation of the server this leads to; kept here by who asked for it."""

    def call(self, command: bytes, deadline: Deadline) -> Any:
        """Send one packed command and return its reply: bytes, int, None or a list of them.

        Raises ErrorReply for an error reply, else RedisTrouble.
        """
        return self.call_many(command, 1, deadline)[0]

    def call_many(self, commands: bytes, num_replies: int, deadline: Deadline) -> list[Any]:
        """Send packed commands in one go and return their replies; an error reply is raised when all are read."""
        self.num_calls += 1
        is_first = not self._was_answered
        try:
            self._send(commands, deadline)
            replies = [self._receive(deadline) for _ in range(num_replies)]
        except TimeoutError:
            raise trouble.timed_out(self.location, deadline.span_s, "answer") from None
        except ssl.SSLEOFError as error:
            raise trouble.lost(
                self.location, "closed by the server", is_first_call=is_first
            ) from error
        except ssl.SSLError as error:
            # With TLS 1.3 a server refuses a client's certificate only now.
            raise trouble.not_connected(self.location, error) from error
        except (OSError, _NotRedis) as error:
            said = str(error) or type(error).__name__
            raise trouble.lost(self.location, said, is_first_call=is_first) from error
        self._was_answered = True
        for reply in replies:
            if isinstance(reply, ErrorReply):
                raise reply
        return replies

    def close(self) -> None:
        """Close the socket; idempotent."""
        self._stream.close()

    def _send(self, payload: bytes, deadline: Deadline) -> None:
        rest = memoryview(payload)
        while rest:
            self._stream.settimeout(deadline.remaining_s())
            rest = rest[self._stream.send(rest) :]

    def _receive(self, deadline: Deadline) -> Any:
        reply = self._reader.gets()
        received = 0
        while reply is self._missing:
            self._stream.settimeout(deadline.remaining_s())
            length = self._stream.recv_into(self._buffer)
            received += length
            if not length:
                raise ConnectionResetError("closed by the server")
            if received > MAX_REPLY_BYTES:
                raise _NotRedis(f"a reply of more than {MAX_REPLY_BYTES} bytes")
            self._reader.feed(self._buffer, 0, length)  # type: ignore[arg-type] # any buffer
            reply = self._reader.gets()
        return reply


def connect(location: RedisLocation, key_prefix: str, deadline: Deadline) -> Connection:
    """Open a connection, authenticate, select the database; RedisTrouble when any of it fails or the time is over.

    Looking up a host name has no deadline in libc: run this where that may take long (`pool.py` does).
    """
    try:
        location = location.with_user()
    except (OSError, UnicodeDecodeError) as error:
        path = location.username_file
        raise trouble.unreadable_credential(location, "user", path, error) from error
    try:
        password = location.read_password()
    except (OSError, UnicodeDecodeError) as error:
        path = location.password_file
        raise trouble.unreadable_credential(location, "password", path, error) from error
    try:
        context = location.tls.build_context() if location.tls is not None else None
    except OSError as error:
        raise trouble.unreadable_certificates(location, error) from error
    stage = "accept a connection"
    try:
        if location.path:
            opened = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                opened.settimeout(deadline.remaining_s())
                opened.connect(location.path)
            except BaseException:
                opened.close()
                raise
        else:
            opened = socket.create_connection(
                (location.host, location.port), timeout=deadline.remaining_s()
            )
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if context is not None and location.tls is not None:
            stage = "finish the TLS handshake (does it speak TLS at that port?)"
            try:
                opened.settimeout(deadline.remaining_s())
                # On success the descriptor moves into the new object; on failure this closes it.
                name = location.tls.server_name or location.host
                opened = context.wrap_socket(opened, server_hostname=name)
            except BaseException:
                opened.close()
                raise
    except (TimeoutError, BlockingIOError):
        # BlockingIOError: a unix socket whose backlog is full, because its server is stopped.
        raise trouble.timed_out(location, deadline.span_s, stage) from None
    except (OSError, ValueError) as error:
        raise trouble.not_connected(location, error) from error
    connection = Connection(opened, location)
    try:
        if password is not None:
            who = [location.username] if location.username else []
            connection.call(pack("AUTH", *who, password), deadline)
        if location.database:
            connection.call(pack("SELECT", location.database), deadline)
    except ErrorReply as error:
        connection.close()
        raise trouble.refused(location, str(error), key_prefix) from error
    except BaseException:
        connection.close()
        raise
    connection.num_calls = 0
    return connection
