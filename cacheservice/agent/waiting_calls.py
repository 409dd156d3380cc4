"""How many calls may sleep at once. A call above the limit is answered with what is known now instead of waiting."""

from __future__ import annotations

import threading
from types import TracebackType


class WaitingCalls:
    """A bounded count of sleeping calls. Thread-safe; use as `with waiting_calls.slot() as may_wait`."""

    def __init__(self, most: int) -> None:
        self._free = threading.BoundedSemaphore(most)
        self.num_turned_away = 0
        """Calls that would have waited and were not let, since the start."""

    def slot(self) -> _Slot:
        """Take a slot for the length of a `with` block; the value says whether there was one."""
        return _Slot(self, self._free)


class _Slot:
    def __init__(self, owner: WaitingCalls, free: threading.BoundedSemaphore) -> None:
        self._owner = owner
        self._free = free
        self._taken = False

    def __enter__(self) -> bool:
        self._taken = self._free.acquire(blocking=False)
        if not self._taken:
            self._owner.num_turned_away += 1
        return self._taken

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._taken:
            self._free.release()
