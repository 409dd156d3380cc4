"""A few connections to Redis, lent to one caller at a time; connecting happens on a thread of its own.

So that a slow connect (a host name that does not resolve, a TLS handshake, a stopped server) never holds a caller
beyond its deadline, and never holds more than one thread: at most one connect is under way, and those who wait share
its outcome.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from cacheservice.index.trouble import RedisTrouble
from cacheservice.index.wire import Connection, Deadline


class ConnectionPool:
    """At most `max_connections` connections. Thread-safe; owns them and its short-lived connecting thread."""

    def __init__(
        self,
        connect: Callable[[Deadline], Connection],
        *,
        max_connections: int,
        connect_timeout_s: float,
        on_late: Callable[[Deadline], RedisTrouble],
    ) -> None:
        """`on_late` makes what is raised when no connection came free in time."""
        self._connect = connect
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._on_late = on_late
        self._changed = threading.Condition()
        self._idle: list[Connection] = []
        self._num_lent = 0
        self._is_connecting = False
        self._num_outcomes = 0
        self._outcome: RedisTrouble | None = None
        self._is_closed = False

    def take(self, deadline: Deadline) -> Connection:
        """A connection, most recently used first; the caller gives it back or discards it. RedisTrouble when there is
        none in time, with the reason when a connect failed meanwhile."""
        with self._changed:
            outcomes_before = self._num_outcomes
            while not self._idle:
                if self._is_closed or (
                    self._num_outcomes > outcomes_before and self._outcome is not None
                ):
                    raise self._outcome or self._on_late(deadline)
                outcomes_before = self._num_outcomes
                self._start_connecting()
                try:
                    left = deadline.remaining_s()
                except TimeoutError:
                    raise self._on_late(deadline) from None
                self._changed.wait(left)
            self._num_lent += 1
            return self._idle.pop()

    def give_back(self, connection: Connection) -> None:
        """Return a connection whose last exchange was complete."""
        with self._changed:
            self._num_lent -= 1
            if not self._is_closed:
                self._idle.append(connection)
                self._changed.notify()
                return
        connection.close()

    def discard(self, connection: Connection, *, and_idle: bool = False) -> None:
        """Close a lent connection, and with `and_idle` the idle ones too: they led to the same dead server."""
        with self._changed:
            self._num_lent -= 1
            closing = [connection]
            if and_idle:
                closing += self._idle
                self._idle = []
            self._changed.notify()
        for each in closing:
            each.close()

    def close(self) -> None:
        """Close idle connections; lent ones are closed as they come back. Idempotent."""
        with self._changed:
            self._is_closed = True
            closing, self._idle = self._idle, []
            self._changed.notify_all()
        for each in closing:
            each.close()

    def _start_connecting(self) -> None:
        open_or_opening = self._num_lent + len(self._idle) + self._is_connecting
        if self._is_connecting or self._is_closed or open_or_opening >= self._max_connections:
            return
        self._is_connecting = True
        try:
            threading.Thread(
                target=self._open_one, name="larder-index-connect", daemon=True
            ).start()
        except RuntimeError:
            # No thread to be had: the caller waits for a connection that comes back, or for its deadline.
            self._is_connecting = False

    def _open_one(self) -> None:
        opened: Connection | None = None
        failure: RedisTrouble | None = None
        try:
            opened = self._connect(Deadline(self._connect_timeout_s))
        except RedisTrouble as error:
            failure = error
        finally:
            with self._changed:
                self._is_connecting = False
                self._num_outcomes += 1
                self._outcome = failure
                if opened is not None and not self._is_closed:
                    self._idle.append(opened)
                    opened = None
                self._changed.notify_all()
            if opened is not None:
                opened.close()
