"""When to put an object right that someone else changes again and again. Pure: a history in, a history out.

A change of someone's is put right at once, and so are a few more. Who changes it each time is a program: putting it
right at once would make two of them write for ever. So after `most_at_once` repairs within `within` the next ones wait,
twice as long each time; after `calm_after` without a repair the object is like any other again.

Kept by `children` per object, in memory: a restart of the operator begins anew, with few writes.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

most_at_once = 5
within = timedelta(minutes=5)
first_wait, longest_wait = timedelta(seconds=10), timedelta(minutes=5)
calm_after = timedelta(minutes=15)
"""Longer than `longest_wait`, else a contest would end between two repairs."""


@dataclass(frozen=True, slots=True)
class History:
    """Repairs of one object: when the newest `most_at_once` were, and how many times the next one had to wait."""

    repairs: tuple[datetime, ...] = ()
    num_waits: int = 0

    def repaired(self, now: datetime) -> History:
        """With one more."""
        before = self if self.is_known(now) else History()
        repairs = (*before.repairs, now)[-most_at_once:]
        is_often = len(repairs) == most_at_once and now - repairs[0] <= within
        is_contest = is_often or before.num_waits > 0
        return History(repairs, before.num_waits + 1 if is_contest else 0)

    def is_known(self, now: datetime) -> bool:
        """Whether it still counts."""
        return bool(self.repairs) and now - self.repairs[-1] < calm_after

    def is_contested(self, now: datetime) -> bool:
        return self.num_waits > 0 and self.is_known(now)

    def next_repair(self, now: datetime) -> datetime:
        """When the object may be put right again: `now`, or later."""
        if not self.is_contested(now):
            return now
        wait = min(longest_wait, first_wait * (1 << min(self.num_waits - 1, 10)))
        return max(now, self.repairs[-1] + wait)

    def calm_at(self) -> datetime:
        """When the contest is over if nothing more happens."""
        return self.repairs[-1] + calm_after
