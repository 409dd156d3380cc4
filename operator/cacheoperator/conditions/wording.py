"""Times, sizes and names as they stand in messages. Pure.

Invariant: nothing here depends on now: a message that stands for an hour is the same text for an hour.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime

MAX_SHOWN = 3
MAX_LINE = 300
LOG_LINES = 3


def minute(at: datetime) -> str:
    """`12:04 UTC`: for what ends within a day."""
    return f"{at.astimezone(UTC):%H:%M} UTC"


def date_and_minute(at: datetime) -> str:
    """`2026-11-21 12:04 UTC`: for what may stand for days."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def size(num_bytes: int) -> str:
    """`9Gi`, `1434Mi`: the largest unit that gives a whole number, rounded up to Mi."""
    for unit, shift in (("Ti", 40), ("Gi", 30)):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return f"{-(-num_bytes >> 20)}Mi"


def listed(names: Iterable[str]) -> str:
    """`a, b, c and others`: sorted, at most MAX_SHOWN of them, without a number that changes all the time."""
    shown = sorted(set(names))
    more = " and others" if len(shown) > MAX_SHOWN else ""
    return ", ".join(shown[:MAX_SHOWN]) + more


def selector(labels: Mapping[str, str]) -> str:
    """`{gpu: a100, zone: b}`."""
    return "{" + ", ".join(f"{key}: {value}" for key, value in sorted(labels.items())) + "}"


def last_lines(text: str) -> str:
    """The last lines of a log, on one line, each cut."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(cut(line, MAX_LINE) for line in lines[-LOG_LINES:])


def cut(text: str, limit: int) -> str:
    """`text` with at most `limit` characters."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def joined(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + f" and {parts[-1]}"


def sentence_end(text: str) -> str:
    """`text` without a full stop or spaces at its end, so that a remedy can follow."""
    return text.strip().rstrip(".").rstrip()
