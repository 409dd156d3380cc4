"""A circuit breaker: after failures in a row, calls fail at once instead of each waiting for its time-out.

Pure but for a lock; the clock is given.

closed --(max_failures in a row)--> open --(pause over)--> one probe --(success)--> closed, --(failure)--> open, longer

Every permitted call is answered by `succeeded` or `failed`; at most one probe is out at a time, and one that never
reports is replaced after the longest pause. Calls that were under way when it opened and fail later don't lengthen the
pause.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable


class CircuitBreaker:
    """Says whether a call may be tried. Thread-safe."""

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        max_failures: int = 5,
        first_pause_s: float = 0.25,
        longest_pause_s: float = 2.0,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """`jitter` answers in [0, 1): a pause is 50 to 100 % of its length, so that agents don't probe together."""
        self._clock = clock
        self._max_failures = max_failures
        self._first_pause_s = first_pause_s
        self._longest_pause_s = longest_pause_s
        self._jitter = jitter
        self._lock = threading.Lock()
        self._failures = 0
        self._pause_s = first_pause_s
        self._closed = True
        self._is_probing = False
        self._next_probe_at = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether calls go through freely."""
        return self._closed

    def permits(self) -> bool:
        """Whether to try a call now; while open, True for one probe per pause."""
        with self._lock:
            if self._closed:
                return True
            now = self._clock()
            if now < self._next_probe_at:
                return False
            self._is_probing = True
            self._next_probe_at = now + self._longest_pause_s
            return True

    def succeeded(self) -> None:
        """A permitted call worked."""
        with self._lock:
            self._failures = 0
            self._closed = True
            self._is_probing = False
            self._pause_s = self._first_pause_s

    def failed(self) -> None:
        """A permitted call did not work."""
        with self._lock:
            self._failures += 1
            if self._closed:
                if self._failures < self._max_failures:
                    return
                self._closed = False
            elif self._is_probing:
                self._is_probing = False
                self._pause_s = min(self._longest_pause_s, self._pause_s * 2)
            else:
                return
            self._next_probe_at = self._clock() + self._pause_s * (0.5 + 0.5 * self._jitter())
