"""The one core lock: the store, and a condition for those who wait for it to change.

Every access to the store goes through `reading` or `changing`. Nothing is done under the lock but work in memory: no
I/O, no call of the index, no logging. What changed is handed to the announcer (a dictionary update) before the lock is
let go, so that announcements keep the order of the changes.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from cacheservice.core.store import HeldChunk, Store


class GuardedStore:
    """Owns the store and its lock. All methods may be called from any thread."""

    def __init__(self, store: Store, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._num_waiting = 0
        self._on_changes: Callable[[Sequence[HeldChunk]], None] | None = None
        self.clock = clock

    def on_changes(self, listener: Callable[[Sequence[HeldChunk]], None]) -> None:
        """Have `listener` told, under the lock, what the store now holds of each chunk that changed."""
        self._on_changes = listener

    @contextmanager
    def reading(self) -> Iterator[Store]:
        """The store, for questions that change nothing others wait for."""
        with self._lock:
            yield self._store

    @contextmanager
    def changing(self) -> Iterator[Store]:
        """The store, for anything that may make a shard ready or free one."""
        with self._lock:
            try:
                yield self._store
            finally:
                self._tell()

    @contextmanager
    def waiting(self) -> Iterator[tuple[Store, Callable[[float], None]]]:
        """The store, and a function that sleeps up to so many seconds, or until something changed, without the lock."""
        with self._lock:
            self._num_waiting += 1
            try:
                yield self._store, self._sleep
            finally:
                self._num_waiting -= 1
                self._tell_listener()

    def wake(self) -> None:
        """Let everybody who waits look again: a pull or a call ended."""
        with self._lock:
            self._changed.notify_all()

    def _sleep(self, timeout_s: float) -> None:
        # Only when something changed: two waiters that woke each other on every look would never sleep.
        if self._tell_listener():
            self._changed.notify_all()
        if timeout_s > 0:
            self._changed.wait(timeout_s)

    def _tell(self) -> None:
        self._tell_listener()
        if self._num_waiting:
            self._changed.notify_all()

    def _tell_listener(self) -> bool:
        changes = self._store.take_changes()
        if changes and self._on_changes is not None:
            self._on_changes(changes)
        return bool(changes)
