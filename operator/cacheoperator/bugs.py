"""Telling exceptions that nobody expected: the whole traceback once, and after it a line each.

A bug that one KVCache meets is met by all that look like it, at every pass and every try: 200 tracebacks would push
out of the log what led to the first. So the same exception from the same place is told whole once in `again_after_s`,
with how often it came meanwhile. Used in one event loop, no locks; remembers at most `most_known` places.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

again_after_s = 600.0
most_known = 256

Place = tuple[str, str, int]
"""Type of the exception, file and line that raised it."""


@dataclass(slots=True)
class _Known:
    told_at: float
    num_since: int = 0


class Bugs:
    """`clock` gives seconds, monotone."""

    def __init__(self, log: logging.Logger, clock: Callable[[], float]) -> None:
        self._log = log
        self._clock = clock
        self._known: dict[Place, _Known] = {}

    def tell(self, error: Exception, what: str) -> None:
        """Log `error` at ERROR. `what` says what failed, and for whom."""
        place = _place(error)
        now = self._clock()
        known = self._known.get(place)
        if known is not None and now - known.told_at < again_after_s:
            known.num_since += 1
            self._log.error(
                "%s: %s: %s at %s:%d, whose traceback was logged before",
                what, place[0], error, place[1], place[2],
            )  # fmt: skip
            return
        more = f" It came {known.num_since} times more since." if known and known.num_since else ""
        self._known.pop(place, None)
        self._known[place] = _Known(now)
        if len(self._known) > most_known:
            del self._known[next(iter(self._known))]
        self._log.error("%s: a bug, please report it.%s", what, more, exc_info=error)


def _place(error: Exception) -> Place:
    at = error.__traceback__
    while at is not None and at.tb_next is not None:
        at = at.tb_next
    if at is None:
        return type(error).__name__, "?", 0
    return type(error).__name__, at.tb_frame.f_code.co_filename, at.tb_lineno
