"""When a call must stop: its deadline passed, its session ended, or its caller gave up.

Pure apart from the clock and the two questions that it is given. Used by every blocking call of the client.
"""

from __future__ import annotations

from collections.abc import Callable

from cacheservice.core.outcomes import Reason


class Deadline:
    """Ends at a fixed time of a monotonic clock. Immutable, so thread-safe."""

    __slots__ = ("_at", "_clock")

    def __init__(self, clock: Callable[[], float], budget_s: float) -> None:
        """End `budget_s` seconds from now."""
        self._clock = clock
        self._at = clock() + budget_s

    def left_s(self, at_most_s: float = float("inf")) -> float:
        """Seconds left, 0.0 when it passed, never more than `at_most_s`."""
        return max(0.0, min(self._at - self._clock(), at_most_s))

    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self._clock() >= self._at


class Watch:
    """Asked between pieces whether a copy may go on; remembers a reason why not. One per call.

    `may_go_on` is for the thread of the call, since it asks the caller; `has_time` for any thread.
    """

    __slots__ = ("_deadline", "_end_of_session", "_give_up", "stopped")

    def __init__(
        self,
        deadline: Deadline,
        *,
        end_of_session: Callable[[], Reason | None],
        give_up: Callable[[], bool] | None = None,
    ) -> None:
        """`end_of_session` says why the session ended, None while it lives."""
        self._deadline = deadline
        self._end_of_session = end_of_session
        self._give_up = give_up
        self.stopped: Reason | None = None

    def may_go_on(self) -> bool:
        """False from the first time on that there is a reason to stop, which is then in `stopped`."""
        if self.has_time() and self._give_up is not None and self._give_up():
            self.stopped = Reason.CANCELLED
        return self.stopped is None

    def has_time(self) -> bool:
        """As `may_go_on`, without asking the caller whether it gives up."""
        if self.stopped is None:
            ended = self._end_of_session()
            if ended is not None:
                self.stopped = ended
            elif self._deadline.has_passed():
                self.stopped = Reason.DEADLINE
        return self.stopped is None
