"""Asks every question in each pass and has the answers judged.

    cold      each question under a salt of its own that nobody used before: nothing can come from any cache
    shared    all questions under one new salt: the examples that prompts begin with are computed once per subject
    warm      the same again: what was stored in the shared pass is read, as far as whole chunks go

With a control, an engine without our cache, each question is asked there twice in a row under a salt of its own: first
it computes the whole prompt, then its own prefix cache splits the work the way a load from our cache does. Without one,
the cold pass is the control, and a question whose answers differ is asked cold again, to see whether the engine repeats
itself at all. So nothing has to be restarted, and other traffic may go on. Called by the CLI.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from cacheservice.accuracy.completions import Choice, Reply
from cacheservice.accuracy.endpoint import (
    Endpoint,
    EndpointError,
    ask,
    choose_model,
    loaded_tokens,
    reset_own_cache,
)
from cacheservice.accuracy.prompts import build_prompt
from cacheservice.accuracy.questions import Question, Subject
from cacheservice.accuracy.verdicts import Verdict, all_agree, all_near, judge

NUM_RECHECKS = 2
"""How often a question that differs is asked cold again when there is no control."""


class Pass(StrEnum):
    """One time that all questions are asked. The order is that of the report."""

    COLD = "cold"
    SHARED = "shared"
    WARM = "warm"
    CONTROL = "control"
    CONTROL_AGAIN = "control again"

    @property
    def is_control(self) -> bool:
        """Whether it is asked at the control endpoint."""
        return self in (Pass.CONTROL, Pass.CONTROL_AGAIN)


@dataclass(frozen=True, slots=True)
class Asking:
    """What to ask and how. `control` None: the cold pass is compared with. `concurrency` is requests at a time."""

    endpoint: Endpoint
    control: Endpoint | None
    model: str | None
    chat: bool
    concurrency: int
    resets_own_cache: bool


@dataclass(frozen=True, slots=True)
class Answered:
    """One question with its answer in each pass. `rechecks` are further cold answers, asked only where it differed."""

    subject: str
    question: Question
    replies: Mapping[Pass, Reply]
    rechecks: tuple[Reply, ...]

    @property
    def counts(self) -> bool:
        """Whether the controls agree."""
        return all_agree([reply.choice for reply in self._controls])

    @property
    def control(self) -> Choice:
        """What the answers are compared with first."""
        return self._controls[0].choice

    @property
    def verdicts(self) -> Mapping[Pass, Verdict]:
        """What became of each pass of the endpoint with the cache."""
        controls = [reply.choice for reply in self._controls]
        return {
            name: judge(reply.choice, controls)
            for name, reply in self.replies.items()
            if not name.is_control
        }

    @property
    def differs(self) -> bool:
        """Whether an answer can't be that of an engine without cache."""
        return Verdict.DIFFERENT in self.verdicts.values()

    @property
    def is_near(self) -> bool:
        """Whether rounding may explain all that differs."""
        verdicts = self.verdicts
        return all(
            all_near([reply.choice, self.control])
            for name, reply in self.replies.items()
            if verdicts.get(name) is Verdict.DIFFERENT
        )

    @property
    def is_tie(self) -> bool:
        """Whether it tells nothing, as the controls differ from each other."""
        return not self.differs and not self.counts

    @property
    def _controls(self) -> list[Reply]:
        own = [reply for name, reply in self.replies.items() if name.is_control]
        return own or [self.replies[Pass.COLD], *self.rechecks]


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that was seen. `larder_tokens` came from Larder in shared and warm pass; None: there is no count."""

    model: str
    answered: tuple[Answered, ...]
    larder_tokens: int | None

    @property
    def passes(self) -> list[Pass]:
        """The passes that were asked, in order."""
        return [name for name in Pass if name in self.answered[0].replies]


Report = Callable[[str], None]
_Item = tuple[int, Subject, Question]
_Result = TypeVar("_Result")


def ask_all(subjects: Sequence[Subject], asking: Asking, report: Report) -> Outcome:
    """Ask everything. `report` gets a line for each step. Raises ConfigError, EndpointError."""
    model = choose_model(asking.endpoint, asking.model)
    if asking.control is not None:
        choose_model(asking.control, model)
    items: list[_Item] = [
        (number, subject, question)
        for number, (subject, question) in enumerate(
            (subject, question) for subject in subjects for question in subject.questions
        )
    ]
    if asking.resets_own_cache:
        # Not needed yet, but an engine that can't should say so before minutes have passed.
        reset_own_cache(asking.endpoint)
    session = _Session(asking, model, uuid.uuid4().hex, report)
    replies: dict[Pass, list[Reply]] = {}
    replies[Pass.COLD] = session.ask_each(items, Pass.COLD, lambda n: f"cold-{n}")
    before = loaded_tokens(asking.endpoint)
    replies[Pass.SHARED] = session.ask_each(items, Pass.SHARED, lambda _: "shared")
    if asking.resets_own_cache:
        reset_own_cache(asking.endpoint)
    replies[Pass.WARM] = session.ask_each(items, Pass.WARM, lambda _: "shared")
    after = loaded_tokens(asking.endpoint)
    if asking.control is not None:
        replies |= session.ask_control(asking.control, items)
    answered = [
        Answered(subject.name, question, {name: replies[name][n] for name in Pass if name in replies}, ())
        for n, subject, question in items
    ]  # fmt: skip
    if asking.control is None:
        answered = session.recheck(items, answered)
    larder_tokens = None if before is None or after is None else after - before
    return Outcome(model, tuple(answered), larder_tokens)


@dataclass(frozen=True, slots=True)
class _Session:
    """One run of the bench: its salts begin with `run`, which nobody used before."""

    asking: Asking
    model: str
    run: str
    report: Report

    def ask_each(
        self, items: Sequence[_Item], name: Pass, salt: Callable[[int], str]
    ) -> list[Reply]:
        """The replies to all questions, in order."""

        def one(item: _Item) -> Reply:
            return self._ask(self.asking.endpoint, item, salt(item[0]))

        return list(self._mapped(one, items, name))

    def ask_control(self, control: Endpoint, items: Sequence[_Item]) -> dict[Pass, list[Reply]]:
        """Each question twice in a row, so that the control's own prefix cache has to keep no more than that."""

        def twice(item: _Item) -> tuple[Reply, Reply]:
            salt = f"control-{item[0]}"
            return self._ask(control, item, salt), self._ask(control, item, salt)

        pairs = list(self._mapped(twice, items, Pass.CONTROL))
        return {
            Pass.CONTROL: [first for first, _ in pairs],
            Pass.CONTROL_AGAIN: [second for _, second in pairs],
        }

    def recheck(self, items: Sequence[_Item], answered: Sequence[Answered]) -> list[Answered]:
        """Ask cold again what differs from the cold pass."""
        result = []
        for item, seen in zip(items, answered, strict=True):
            if not seen.differs:
                result.append(seen)
                continue
            self.report(f"asking {seen.question.place} cold again, as its answers differ")
            more = tuple(
                self._ask(self.asking.endpoint, item, f"cold-{item[0]}-{again}")
                for again in range(1, NUM_RECHECKS + 1)
            )
            result.append(Answered(seen.subject, seen.question, seen.replies, more))
        return result

    def _ask(self, endpoint: Endpoint, item: _Item, salt: str) -> Reply:
        _, subject, question = item
        prompt = build_prompt(subject, question)
        try:
            return ask(
                endpoint, prompt, model=self.model, salt=f"larder-{self.run}-{salt}", chat=self.asking.chat
            )  # fmt: skip
        except EndpointError as error:
            raise EndpointError(f"{question.place}: {error}") from error

    def _mapped(
        self, call: Callable[[_Item], _Result], items: Sequence[_Item], name: Pass
    ) -> Iterator[_Result]:
        """`call` for each item, `concurrency` at a time, in order. The first error ends it."""
        pool = ThreadPoolExecutor(self.asking.concurrency, thread_name_prefix="larder-bench")
        try:
            for number, answer in enumerate(pool.map(call, items), 1):
                self.report(f"{name}: {number} of {len(items)} questions")
                yield answer
        finally:
            pool.shutdown(cancel_futures=True)
