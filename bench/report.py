"""How the benches print: one JSON object for programs, a table for people; everything else goes to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table


def say(text: str) -> None:
    """A line of progress."""
    print(text, file=sys.stderr, flush=True)


def print_json(bench: str, rows: Sequence[Any]) -> None:
    """`{"bench": ..., "rows": [...]}` on stdout; rows are dataclasses, and fields that are None are left out."""
    plain = [
        {name: value for name, value in asdict(row).items() if value is not None} for row in rows
    ]
    print(json.dumps({"bench": bench, "rows": plain}))


def print_table(title: str, columns: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """A table on stdout; the first column is text, the others are numbers."""
    table = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=True)
    for line in lines:
        table.add_row(*line)
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]
