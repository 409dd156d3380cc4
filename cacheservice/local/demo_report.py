"""What the demo saw, as a table, as JSON and in words. Knows nothing of engines. Called by `demo` and the CLI."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from cacheservice.local.identity import Verdict


@dataclass(frozen=True, slots=True)
class DemoRow:
    """One prompt. Times to the first token in seconds; `prefill_s` is the whole request to the prefill engine.

    `cached_tokens` is what the restarted decode engine did not compute.
    """

    name: str
    prompt_tokens: int
    cached_tokens: int
    cached_tokens_after_prefill: int
    ttft_cold_s: float
    ttft_own_cache_s: float
    prefill_s: float
    ttft_decode_s: float
    ttft_restarted_s: float
    verdict: Verdict
    verdict_restarted: Verdict

    @property
    def is_right(self) -> bool:
        """Whether both answers pass for those of an engine without cache."""
        return Verdict.DIFFERENT not in (self.verdict, self.verdict_restarted)


@dataclass(frozen=True, slots=True)
class Rate:
    """Bytes moved, and how fast while they moved."""

    num_bytes: int
    gb_per_s: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All of it. `loaded_tokens` came from Larder after the restart; other cached ones from decode itself."""

    name: str
    rows: tuple[DemoRow, ...]
    store: Rate
    retrieve: Rate
    loaded_tokens: int
    controls_agree: bool
    control_is_new: bool
    total_s: float

    @property
    def is_identical(self) -> bool:
        """Whether every answer passes, and enough prompts count for that to mean anything."""
        return self.controls_agree and all(row.is_right for row in self.rows)

    @property
    def speed_up(self) -> float:
        """Median over the prompts of cold time to first token by that after the restart."""
        return statistics.median(row.ttft_cold_s / row.ttft_restarted_s for row in self.rows)

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "demo": self.name, "identical": self.is_identical, "speed_up_median": round(self.speed_up, 2),
            **{name: value for name, value in asdict(self).items() if name != "name"},
        }  # fmt: skip


LEGEND = (
    "Seconds to the first token. cold: an engine without cache. decode: after prefill stored the prompt.",
    "restarted: the decode engine restarted and asked again; cached tokens and faster are about this one.",
)


def print_report(report: DemoReport, console: Console) -> None:
    """The table and the summary."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("prompt", no_wrap=True)
    for title in ("tokens", "cached", "cold", "decode", "restarted", "faster"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column("answer")
    for row in report.rows:
        table.add_row(
            row.name, f"{row.prompt_tokens:,}", f"{row.cached_tokens:,}", f"{row.ttft_cold_s:.2f}",
            f"{row.ttft_decode_s:.2f}", f"{row.ttft_restarted_s:.2f}", f"{row.ttft_cold_s / row.ttft_restarted_s:.0f}×",
            _shown(row),
        )  # fmt: skip
    console.print()
    for line in LEGEND:
        console.print(line)
    console.print(table)
    for line in summary(report):
        console.print(line)
    console.print()


def summary(report: DemoReport) -> Sequence[str]:
    """What it means, in sentences."""
    rows = report.rows
    asked = sum(row.prompt_tokens for row in rows)
    cached = sum(row.cached_tokens for row in rows)
    cold_s, warm_s = sum(row.ttft_cold_s for row in rows), sum(row.ttft_restarted_s for row in rows)
    computed = asked - cached
    was_asked_now = (
        ", with the engine without cache that is asked only once" if report.control_is_new else ""
    )
    took = (
        f"After the decode engine was restarted it took {cached:,} of {asked:,} prompt tokens from a cache "
        f"({report.loaded_tokens:,} from Larder, the rest from what it had loaded before) and computed {computed:,}."
    )
    sooner = (
        f"The first tokens came {cold_s / warm_s:.0f} times sooner in all ({cold_s:.1f} s without a cache, "
        f"{warm_s:.2f} s with), {report.speed_up:.0f} times in the median."
    )
    moved = (
        f"Stored {report.store.num_bytes / 1e6:.0f} MB at {report.store.gb_per_s:.1f} GB/s, retrieved "
        f"{report.retrieve.num_bytes / 1e6:.0f} MB at {report.retrieve.gb_per_s:.1f} GB/s, checksums included."
    )
    ended = f"Everything is stopped. The demo took {report.total_s:.0f} s{was_asked_now}."
    return [took, sooner, moved, _verdict(report), ended]


def _verdict(report: DemoReport) -> str:
    wrong = [row.name for row in report.rows if not row.is_right]
    if wrong:
        return (
            f"ANSWERS DIFFER from those of an engine without cache for: {', '.join(wrong)}. "
            "That is a bug: please report it."
        )
    if not report.controls_agree:
        return "No verdict: two engines without cache differ from each other too often. Is --dtype float32 set?"
    near = sum(Verdict.NEAR_TIE in (row.verdict, row.verdict_restarted) for row in report.rows)
    also = (
        f" ({near} differ at a near-tie, where engines without cache differ, too)" if near else ""
    )
    return f"All {2 * len(report.rows)} answers are token for token those of an engine without cache{also}."


def _shown(row: DemoRow) -> str:
    if not row.is_right:
        return "[red]different[/red]"
    return "same" if row.verdict is row.verdict_restarted is Verdict.SAME else "near tie"
