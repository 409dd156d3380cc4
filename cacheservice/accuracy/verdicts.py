"""Whether answers with the cache are those without, question by question, as section 13 of the design judges. Pure.

An engine without any cache does not always repeat itself: a near-tie falls the other way when sums are rounded in
another order, as they are when a prompt is computed in other pieces or beside other requests. So a question counts when
the controls agree: then any difference is a fault. Where they differ it is a tie, unless the answer is none of theirs
and led by GAP_LIMIT or more, which rounding cannot explain.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from cacheservice.accuracy.completions import Choice
from cacheservice.local.identity import GAP_LIMIT, MIN_COUNTING


class Verdict(StrEnum):
    """What became of one question in one pass."""

    SAME = "same"
    TIE = "tie"
    """The controls differ from each other on this question, so that it tells nothing."""
    DIFFERENT = "different"


def judge(choice: Choice, controls: Sequence[Choice]) -> Verdict:
    """Compare an answer with the answers of at least one control."""
    if all_agree(controls):
        return Verdict.SAME if choice.said == controls[0].said else Verdict.DIFFERENT
    if choice.said in {control.said for control in controls}:
        return Verdict.TIE
    return Verdict.TIE if all_near([choice, controls[0]]) else Verdict.DIFFERENT


def all_near(choices: Sequence[Choice]) -> bool:
    """Whether each answer is known to lead by so little that rounding may have decided."""
    return all(choice.gap is not None and choice.gap < GAP_LIMIT for choice in choices)


def all_agree(controls: Sequence[Choice]) -> bool:
    """Whether the question counts."""
    return len({control.said for control in controls}) == 1


def enough_count(num_counting: int, num_asked: int) -> bool:
    """Whether so many questions count that no difference means something."""
    return num_counting >= MIN_COUNTING * num_asked
