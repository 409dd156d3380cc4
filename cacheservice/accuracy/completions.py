"""The OpenAI API as values: the request for one letter, and what an answer says. Pure.

The letter is chosen by log-probability among A to D where the engine gives them, as MMLU is usually scored; by the text
otherwise. What no letter can be told from is compared by the token that was said: a model that never says a letter,
such as one with random weights, is still compared answer by answer. Raises ValueError for an answer of another shape.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheservice.accuracy.questions import LETTERS

NUM_LOGPROBS = 20
"""vLLM's and OpenAI's maximum by default; the letters are among so many for any model that understood the task."""

SEED = 0
_LETTER = re.compile(r"\W*([A-D])(?!\w)")


@dataclass(frozen=True, slots=True)
class Choice:
    """What was answered.

    `said` is compared between passes: the letter, or the token that was said in its place. `gap` is the difference of
    log-probability between the two best answers; None when the engine gives no log-probabilities.
    """

    said: str
    letter: str | None
    gap: float | None


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to one prompt. `cached_tokens` is None when the engine does not report it."""

    choice: Choice
    prompt_tokens: int
    cached_tokens: int | None


def path_of(*, chat: bool) -> str:
    """Where questions are posted."""
    return "/v1/chat/completions" if chat else "/v1/completions"


def build_request(prompt: str, *, model: str, salt: str, chat: bool) -> dict[str, Any]:
    """One greedy token. Prompts of different `salt` never share a cache (`cache_salt` of vLLM, in its block hashes)."""
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": 1,
        "temperature": 0,
        "seed": SEED,
        "cache_salt": salt,
    }
    if chat:
        message = {"role": "user", "content": prompt}
        return {**body, "messages": [message], "logprobs": True, "top_logprobs": NUM_LOGPROBS}
    return {**body, "prompt": prompt, "logprobs": NUM_LOGPROBS}


def parse_reply(answer: Mapping[str, Any], *, chat: bool) -> Reply:
    """Read the JSON of a completion."""
    try:
        first = answer["choices"][0]
        text = str((first["message"].get("content") if chat else first["text"]) or "")
        logprobs = first.get("logprobs") or {}
        tops = _chat_tops(logprobs) if chat else _tops(logprobs)
        usage = answer.get("usage") or {}
        details = usage.get("prompt_tokens_details") or {}
        cached = details.get("cached_tokens")
        return Reply(
            choice=choose(tops, text),
            prompt_tokens=int(usage.get("prompt_tokens") or 0),
            cached_tokens=None if cached is None else int(cached),
        )
    except (KeyError, IndexError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(
            f"no completion as OpenAI's API has it ({type(error).__name__} {error})"
        ) from error


def choose(tops: Sequence[tuple[str, float]], text: str) -> Choice:
    """The answer from the likeliest tokens with their log-probabilities, and from what was said."""
    by_letter = {
        letter: max(values)
        for letter in LETTERS
        if (values := [logprob for token, logprob in tops if token.strip() == letter])
    }
    if by_letter:
        # sorted is stable: letters of equal log-probability stay in the order A to D.
        ranked = sorted(by_letter, key=lambda letter: -by_letter[letter])
        # A letter that is not among the likeliest is less likely than each of them.
        second = by_letter[ranked[1]] if len(ranked) > 1 else min(value for _, value in tops)
        return Choice(ranked[0], ranked[0], by_letter[ranked[0]] - second)
    ordered = sorted((value for _, value in tops), reverse=True)
    gap = ordered[0] - ordered[1] if len(ordered) > 1 else None
    if not tops and (found := _LETTER.match(text)):
        return Choice(found[1], found[1], None)
    return Choice(text, None, gap)


def _tops(logprobs: Mapping[str, Any]) -> list[tuple[str, float]]:
    found = (logprobs.get("top_logprobs") or [None])[0] or {}
    return [(str(token), float(value)) for token, value in found.items()]


def _chat_tops(logprobs: Mapping[str, Any]) -> list[tuple[str, float]]:
    content = logprobs.get("content") or []
    found = (content[0].get("top_logprobs") or []) if content else []
    return [(str(item["token"]), float(item["logprob"])) for item in found]
