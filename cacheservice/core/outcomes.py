"""Why a lookup, load or save ended as it did: a closed list, counted everywhere under the same names.

The numbers equal those of `OutcomeReason` and `OutcomeKind` in proto/cacheservice/v1/cache.proto.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass


class OutcomeKind(enum.IntEnum):
    """What was tried."""

    LOOKUP = 1
    LOAD = 2
    SAVE = 3


class Reason(enum.IntEnum):
    """How it ended; meanings are in the wire contract."""

    HIT = 1
    ABSENT = 2
    PENDING_TIMED_OUT = 3
    DEADLINE = 4
    AGENT_DOWN = 5
    EVICTED = 6
    CHECKSUM = 7
    LEASE_LOST = 8
    FOREIGN_NAMESPACE = 9
    EPOCH_CHANGED = 10
    NO_SPACE = 11
    PEER_FAILED = 12
    LOCAL = 13
    TOO_SHORT = 14
    SKIPPED = 15
    BANNED = 16
    SHED = 17
    DUPLICATE = 18
    CANCELLED = 19
    INTERNAL = 20

    @property
    def label(self) -> str:
        """Name in metrics and JSON."""
        return self.name.lower()


class Presence(enum.IntEnum):
    """State of one group of one chunk in a lookup's answer; one byte each on the wire."""

    ABSENT = 0
    READY_HERE = 1
    READY_ELSEWHERE = 2
    PENDING = 3


@dataclass(frozen=True, slots=True)
class Outcome:
    """One ended lookup, load or save. Holds no key and no token."""

    kind: OutcomeKind
    reason: Reason
    request_id: str
    asked_tokens: int
    served_tokens: int
    duration_ms: int
    num_bytes: int = 0
