"""Reads counters out of a Prometheus text page. Pure; for our own engines and agents only."""

from __future__ import annotations

import re

_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][\w:]*)(?:\{(?P<labels>.*)\})? (?P<value>\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def counter(text: str, name: str, **labels: str) -> float:
    """The sum of all samples called `name` that have these labels; 0.0 when there is none."""
    total = 0.0
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match["name"] == name:
            found = dict(_LABEL.findall(match["labels"] or ""))
            if all(found.get(label) == value for label, value in labels.items()):
                total += float(match["value"])
    return total
