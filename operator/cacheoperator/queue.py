"""Which KVCaches are to be reconciled, when, and how soon after a failure: keys in, keys out, each once.

Invariants: a key is handed to one worker at a time; a key that is put while it is being worked on comes again
afterwards; many puts are one; of two due times the earlier holds. Used in one event loop, no locks.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from typing import Generic, TypeVar

Key = TypeVar("Key")


class Queue(Generic[Key]):
    """`clock` gives seconds, monotone. After n failures in a row a key comes again after 2^n × `first_backoff_s`."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        first_backoff_s: float = 0.5,
        longest_backoff_s: float = 120.0,
    ) -> None:
        self._clock = clock
        self._first_backoff_s = first_backoff_s
        self._longest_backoff_s = longest_backoff_s
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, int, Key]] = []
        self._count = 0
        self._working: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def put(self, key: Key, after_s: float = 0.0) -> None:
        """Have `key` worked on, at the latest `after_s` seconds from now, but never beside itself."""
        at = self._clock() + after_s
        known = self._due.get(key)
        if known is not None and known <= at:
            return
        self._due[key] = at
        self._count += 1
        heapq.heappush(self._heap, (at, self._count, key))
        self._changed.set()

    async def get(self) -> Key:
        """The next key that is due. Each `get` needs one `done`, `fail` or `forget`."""
        while True:
            at = self._next_due()
            if at is not None and at <= self._clock():
                _, _, key = heapq.heappop(self._heap)
                del self._due[key]
                self._working.add(key)
                return key
            self._changed.clear()
            wait_s = None if at is None else max(0.0, at - self._clock())
            try:
                await asyncio.wait_for(self._changed.wait(), wait_s)
            except TimeoutError:
                pass

    def done(self, key: Key) -> None:
        """It went well: its failures are forgotten."""
        self._failures.pop(key, None)
        self._release(key)

    def fail(self, key: Key) -> float:
        """It went wrong: it comes again. Returns after how many seconds at the latest."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        after_s = min(self._longest_backoff_s, self._first_backoff_s * 2.0 ** min(failures, 30))
        self._release(key)
        self.put(key, after_s)
        return after_s

    def __len__(self) -> int:
        """Keys that are due now or later, those in work left out."""
        return len(self._due)

    def num_due(self) -> int:
        """Keys that are due by now and wait for a worker."""
        now = self._clock()
        return sum(1 for at in self._due.values() if at <= now)

    def check_invariants(self) -> None:
        """For tests: every key with a due time has an entry in the heap with that time, unless it is in work."""
        entries = {(at, key) for at, _, key in self._heap}
        for key, at in self._due.items():
            assert (at, key) in entries or key in self._working, (key, at)

    def _release(self, key: Key) -> None:
        self._working.discard(key)
        if key in self._due:
            self._count += 1
            heapq.heappush(self._heap, (self._due[key], self._count, key))
        self._changed.set()

    def _next_due(self) -> float | None:
        """Due time of the first key that may be handed out; drops entries that no longer hold."""
        while self._heap:
            at, _, key = self._heap[0]
            if self._due.get(key) == at and key not in self._working:
                return at
            heapq.heappop(self._heap)
        return None
