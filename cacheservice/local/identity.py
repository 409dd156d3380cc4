"""Whether answers given with the cache are those of an engine without, as section 13 of the design judges it. Pure.

Greedy decoding in fp32 is not a function of the prompt alone: the same sums in another order round differently, and a
near-tie falls the other way. So two controls without connector are asked: one computes the whole prompt, one has vLLM's
own prefix cache split the work the way a cache does. Where they agree, any difference is ours and fails. Where they do
not, a difference fails only if the likeliest token led by GAP_LIMIT or more, which rounding cannot explain. Enough
prompts must count for the verdict to mean anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

GAP_LIMIT = 0.1
"""Difference of log-probability between the two likeliest tokens."""

MIN_COUNTING = 0.9
"""Share of prompts on which the controls must agree."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One answer: its tokens, and for each of them how far it led before the second likeliest."""

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]


class Verdict(StrEnum):
    """What became of one prompt."""

    SAME = "same"
    NEAR_TIE = "near tie"
    """Differs where the controls differ too, at a token that led by less than GAP_LIMIT."""
    DIFFERENT = "different"


def judge(answer: Tokens, cold: Tokens, own_cache: Tokens) -> Verdict:
    """Compare an answer with those of the two controls."""
    if answer.token_ids in (cold.token_ids, own_cache.token_ids):
        return Verdict.SAME
    if counts(cold, own_cache):
        return Verdict.DIFFERENT
    at = first_difference(answer.token_ids, cold.token_ids)
    gaps = [tokens.gaps[at] for tokens in (answer, cold) if at < len(tokens.gaps)]
    return Verdict.NEAR_TIE if gaps and max(gaps) < GAP_LIMIT else Verdict.DIFFERENT


def counts(cold: Tokens, own_cache: Tokens) -> bool:
    """Whether the controls agree."""
    return cold.token_ids == own_cache.token_ids


def enough_count(controls: Sequence[tuple[Tokens, Tokens]]) -> bool:
    """Whether the controls agree often enough for the verdicts to mean anything."""
    return sum(counts(*pair) for pair in controls) >= MIN_COUNTING * len(controls)


def first_difference(left: Sequence[int], right: Sequence[int]) -> int:
    """The first position at which they differ; the shorter length when one begins the other."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
