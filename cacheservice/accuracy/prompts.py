"""The prompt of a question. Pure. Those of a subject begin alike, so that a cache of prefixes is really used."""

from __future__ import annotations

from cacheservice.accuracy.questions import LETTERS, Question, Subject


def build_prompt(subject: Subject, question: Question) -> str:
    """Instructions, the examples with their answers, then the question with the answer left open."""
    parts = [shared_prefix(subject), _shown(question)]
    return "\n\n".join(parts)


def shared_prefix(subject: Subject) -> str:
    """What all prompts of a subject begin with."""
    topic = subject.name.replace("_", " ")
    opening = (
        f"Below are questions about {topic}. Each offers four choices, marked A to D, of which exactly one is right. "
        "The answer is the letter of the right choice and nothing else."
    )
    answered = [f"{_shown(example)} {example.answer}" for example in subject.examples]
    return "\n\n".join([opening, *answered])


def _shown(question: Question) -> str:
    lines = [question.text]
    lines += [
        f"{letter}. {choice}" for letter, choice in zip(LETTERS, question.choices, strict=True)
    ]
    return "\n".join([*lines, "Answer:"])
