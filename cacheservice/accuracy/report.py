"""What `larder bench accuracy` saw: the verdict, a table, sentences, JSON. Knows nothing of HTTP. Called by the CLI."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cacheservice.accuracy.completions import Choice
from cacheservice.accuracy.passes import Answered, Outcome, Pass
from cacheservice.accuracy.verdicts import enough_count
from cacheservice.local.identity import GAP_LIMIT

SMALLEST_CHUNK_TOKENS = 256
"""The connector's own choice of a chunk is never smaller, but with recurrent groups (design, section 6)."""


class Result(StrEnum):
    """What the run as a whole says; anything but SAME fails."""

    SAME = "same"
    DIFFERENT = "different"
    NOT_COLD = "not cold"
    """The cold pass took tokens from a cache."""
    NOT_WARM = "not warm"
    """The warm pass took none."""
    NOT_LARDER = "not Larder"
    """It did, but from the engine's own prefix cache alone."""
    UNSTABLE = "unstable"
    """Too many questions on which the controls differ from each other."""


@dataclass(frozen=True, slots=True)
class PassTokens:
    """Prompt tokens of a pass; `cached` None: the engine does not report it."""

    prompt: int
    longest_prompt: int
    cached: int | None


@dataclass(frozen=True, slots=True)
class SubjectRow:
    """One line of the table. `num_right` per pass."""

    name: str
    num_asked: int
    num_right: dict[Pass, int]
    num_different: int
    num_ties: int


@dataclass(frozen=True, slots=True)
class AccuracyReport:
    """The outcome, read."""

    outcome: Outcome

    @property
    def result(self) -> Result:
        """The verdict. A difference fails whatever else is wrong; none means something only if all else is right."""
        tokens = {name: self.tokens(name) for name in self.outcome.passes}
        if self.different:
            return Result.DIFFERENT
        if tokens[Pass.COLD].cached or (Pass.CONTROL in tokens and tokens[Pass.CONTROL].cached):
            return Result.NOT_COLD
        if self.outcome.larder_tokens == 0:
            return Result.NOT_LARDER if tokens[Pass.WARM].cached else Result.NOT_WARM
        if tokens[Pass.WARM].cached == 0:
            return Result.NOT_WARM
        if not enough_count(self.num_counting, len(self.outcome.answered)):
            return Result.UNSTABLE
        return Result.SAME

    @property
    def is_identical(self) -> bool:
        """Whether no answer differs and the passes were such that this means something."""
        return self.result is Result.SAME

    @property
    def different(self) -> list[Answered]:
        """Questions with an answer that is none of an engine without cache."""
        return [answered for answered in self.outcome.answered if answered.differs]

    @property
    def ties(self) -> list[Answered]:
        """Questions that tell nothing, as the controls differ from each other."""
        return [answered for answered in self.outcome.answered if answered.is_tie]

    @property
    def num_counting(self) -> int:
        """Questions on which the controls agree, as far as is known."""
        return sum(answered.counts for answered in self.outcome.answered)

    @property
    def largest_shift(self) -> float | None:
        """How far the lead of an equal answer moved from its control, at most; None without log-probabilities."""
        shifts = [
            abs(reply.choice.gap - control.gap)
            for answered in self.outcome.answered
            for name, reply in answered.replies.items()
            if not name.is_control
            for control in [answered.control]
            if reply.choice.said == control.said
            if reply.choice.gap is not None and control.gap is not None
        ]
        return max(shifts, default=None)

    @property
    def num_without_letter(self) -> int:
        """Questions whose cold answer is no letter."""
        return sum(
            answered.replies[Pass.COLD].choice.letter is None for answered in self.outcome.answered
        )

    def tokens(self, name: Pass) -> PassTokens:
        """The prompt tokens of one pass. Engines report cached tokens for all requests or for none."""
        replies = [answered.replies[name] for answered in self.outcome.answered]
        cached = [reply.cached_tokens for reply in replies if reply.cached_tokens is not None]
        return PassTokens(
            prompt=sum(reply.prompt_tokens for reply in replies),
            longest_prompt=max(reply.prompt_tokens for reply in replies),
            cached=sum(cached) if cached else None,
        )

    def subjects(self) -> list[SubjectRow]:
        """A row per subject, in the order that they were asked."""
        names = dict.fromkeys(answered.subject for answered in self.outcome.answered)
        return [
            self._row(name, [seen for seen in self.outcome.answered if seen.subject == name])
            for name in names
        ]

    def total(self) -> SubjectRow:
        """All subjects as one row."""
        return self._row("all", self.outcome.answered)

    def as_json(self) -> dict[str, Any]:
        """One JSON object."""
        return {
            "model": self.outcome.model,
            "result": str(self.result),
            "identical": self.is_identical,
            "num_questions": len(self.outcome.answered),
            "num_different": len(self.different),
            "num_ties": len(self.ties),
            "num_without_letter": self.num_without_letter,
            "largest_shift": self.largest_shift,
            "larder_tokens": self.outcome.larder_tokens,
            "passes": {str(name): _pass_json(self, name) for name in self.outcome.passes},
            "subjects": [_row_json(row) for row in self.subjects()],
            "different": [_answers_json(answered) for answered in self.different],
            "ties": [_answers_json(answered) for answered in self.ties],
        }

    def _row(self, name: str, answered: Sequence[Answered]) -> SubjectRow:
        return SubjectRow(
            name=name,
            num_asked=len(answered),
            num_right={
                each: sum(seen.replies[each].choice.letter == seen.question.answer for seen in answered)
                for each in self.outcome.passes
            },
            num_different=sum(seen.differs for seen in answered),
            num_ties=sum(seen.is_tie for seen in answered),
        )  # fmt: skip


def print_report(report: AccuracyReport, console: Console) -> None:
    """The table and what it means."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("subject", no_wrap=True)
    for title in ("questions", *report.outcome.passes, "different", "ties"):
        table.add_column(title, justify="right")
    for row in report.subjects():
        table.add_row(*_cells(row))
    table.add_section()
    table.add_row(*_cells(report.total()))
    console.print()
    console.print(
        "Share of right answers per pass. different: questions whose answer the cache changed."
    )
    console.print(table)
    for line in _named(report):
        console.print(escape(line), soft_wrap=True)
    for line in summary(report):
        console.print(escape(line), soft_wrap=True)
    console.print()


def summary(report: AccuracyReport) -> list[str]:
    """What it means, in sentences; the verdict is the last."""
    return [
        *_cached_lines(report),
        *_answer_lines(report),
        *_tie_lines(report),
        _verdict(report),
    ]


def _cached_lines(report: AccuracyReport) -> list[str]:
    warm = report.tokens(Pass.WARM)
    lines = []
    if warm.cached is None:
        lines.append(
            "The engine does not report cached tokens: start it with --enable-prompt-tokens-details to see them."
        )
    else:
        shared = report.tokens(Pass.SHARED)
        lines.append(
            f"From a cache came {_share(shared)} of the prompt tokens in the shared pass and {_share(warm)} in the "
            "warm one; the rest is less than a chunk, or was never stored."
        )
    if report.outcome.larder_tokens is not None:
        lines.append(
            f"Larder gave the engine {report.outcome.larder_tokens:,} tokens meanwhile, by the engine's own count."
        )
    elif warm.cached != 0:
        lines.append(
            "How much of it Larder gave is not known: the endpoint does not show an engine's /metrics (a router?)."
        )
    if warm.longest_prompt < SMALLEST_CHUNK_TOKENS:
        lines.append(
            f"The longest prompt has {warm.longest_prompt} tokens, less than the smallest chunk "
            f"({SMALLEST_CHUNK_TOKENS}): give more --shots."
        )
    if (
        Pass.CONTROL_AGAIN in report.outcome.passes
        and report.tokens(Pass.CONTROL_AGAIN).cached == 0
    ):
        lines.append(
            "The control took nothing from its own prefix cache, so it can't show what rounding alone changes: start "
            "it without --no-enable-prefix-caching."
        )
    return lines


def _answer_lines(report: AccuracyReport) -> list[str]:
    lines = []
    if report.num_without_letter:
        lines.append(
            f"{report.num_without_letter} of {len(report.outcome.answered)} cold answers are no letter; they count as "
            "wrong, and are compared by the token that was said."
        )
    if report.largest_shift is not None:
        lines.append(
            "The lead of an answer over the next best one, in log-probability, moved by at most "
            f"{report.largest_shift:.4f}."
        )
    return lines


def _tie_lines(report: AccuracyReport) -> list[str]:
    if not report.ties:
        return []
    line = (
        f"{len(report.ties)} of {len(report.outcome.answered)} questions are ties: without the cache they are not "
        "always answered alike either (rounding), so they tell nothing."
    )
    return [line]


def _verdict(report: AccuracyReport) -> str:
    num_asked = len(report.outcome.answered)
    match report.result:
        case Result.SAME:
            known = report.outcome.larder_tokens or report.tokens(Pass.WARM).cached
            unless = "" if known else " Whether a cache was used is not known, see above."
            return f"0 of {num_asked} questions are answered differently with the cache.{unless}"
        case Result.DIFFERENT:
            return (
                f"{len(report.different)} of {num_asked} questions ARE ANSWERED DIFFERENTLY with the cache. "
                f"{_rounding(report)}If it stays, that is a bug: please report it."
            )
        case Result.NOT_COLD:
            return (
                "No verdict: the cold pass took tokens from a cache, although each of its prompts has a cache_salt of "
                "its own. Something between here and the engine drops cache_salt, or a cache ignores it."
            )
        case Result.NOT_WARM:
            return (
                "No verdict: the warm pass took nothing from a cache. Are prompts longer than a chunk (the engine logs "
                "tokens_per_chunk when it starts; more --shots make them longer), and is the engine connected to its "
                "agent?"
            )
        case Result.NOT_LARDER:
            return (
                "No verdict: everything came from the engine's own prefix cache, nothing from Larder. Give "
                "--reset-prefix-cache, or start the engine with --no-enable-prefix-caching. Is it connected to Larder?"
            )
        case Result.UNSTABLE:
            return (
                f"No verdict: on {num_asked - report.num_counting} of {num_asked} questions even engines without the "
                "cache differ from themselves. Is --dtype float32 set? Does --concurrency 1 help?"
            )


def _rounding(report: AccuracyReport) -> str:
    """What to do about differences that rounding may explain; nothing where a control has told already."""
    near = sum(answered.is_near for answered in report.different)
    if not near or Pass.CONTROL in report.outcome.passes:
        return ""
    return (
        f"In {near} of them each answer leads by less than {GAP_LIMIT}, which may be rounding: give an engine without "
        "Larder as --control-url to know, best with --dtype float32 on both. "
    )


def _named(report: AccuracyReport) -> list[str]:
    """A line for each question that differs or is a tie."""
    return [
        f"{what} {answered.subject}, {answered.question.place}: {_answers(answered)}"
        for what, some in (("DIFFERENT", report.different), ("tie", report.ties))
        for answered in some
    ]


def _answers(answered: Answered) -> str:
    shown = [f"{name} {_said(reply.choice)}" for name, reply in answered.replies.items()]
    shown += [f"cold again {_said(reply.choice)}" for reply in answered.rechecks]
    return ", ".join(shown)


def _said(choice: Choice) -> str:
    written = choice.letter or repr(choice.said)
    return written if choice.gap is None else f"{written} (gap {choice.gap:.4f})"


def _cells(row: SubjectRow) -> list[str]:
    right = [f"{100 * number / row.num_asked:.1f} %" for number in row.num_right.values()]
    return [row.name, str(row.num_asked), *right, str(row.num_different), str(row.num_ties)]


def _share(tokens: PassTokens) -> str:
    assert tokens.cached is not None, "asked only when it is known"
    percent = 100 * tokens.cached / tokens.prompt if tokens.prompt else 0.0
    return f"{percent:.0f} % ({tokens.cached:,} of {tokens.prompt:,})"


def _pass_json(report: AccuracyReport, name: Pass) -> dict[str, Any]:
    tokens = report.tokens(name)
    return {
        "num_right": report.total().num_right[name],
        "prompt_tokens": tokens.prompt,
        "cached_tokens": tokens.cached,
    }


def _row_json(row: SubjectRow) -> dict[str, Any]:
    return {
        "subject": row.name,
        "num_questions": row.num_asked,
        "num_right": {str(name): number for name, number in row.num_right.items()},
        "accuracy": {
            str(name): round(number / row.num_asked, 4) for name, number in row.num_right.items()
        },
        "num_different": row.num_different,
        "num_ties": row.num_ties,
    }


def _answers_json(answered: Answered) -> dict[str, Any]:
    return {
        "subject": answered.subject,
        "place": answered.question.place,
        "right": answered.question.answer,
        "answers": {
            str(name): {"said": reply.choice.said, "gap": reply.choice.gap}
            for name, reply in answered.replies.items()
        },
        "cold_again": [reply.choice.said for reply in answered.rechecks],
        "verdicts": {str(name): str(verdict) for name, verdict in answered.verdicts.items()},
    }
