"""Columns, sizes and shares as text. Pure."""

from __future__ import annotations

from collections.abc import Sequence

GAP = "  "
INDENT = "  "


def columns(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table, left-aligned, indented; the last column is as long as it is. No rows, no lines."""
    if not rows:
        return []
    table = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(row[number]) for row in table) for number in range(len(titles))]
    return [
        (INDENT + GAP.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()
        for row in table
    ]  # fmt: skip


def mebibytes(num_bytes: int) -> str:
    """`1,434 MiB`."""
    return f"{num_bytes / 2**20:,.0f} MiB"


def share(part: float, whole: float) -> str:
    """`37%`, or `-` of nothing."""
    return f"{part / whole:.0%}" if whole else "-"


def short_digest(digest: str) -> str:
    """As the operator writes it in conditions: `3f9a01bc`."""
    return digest[:8] or "-"
