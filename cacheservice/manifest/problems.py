"""What can be wrong with a manifest, as values that know where they are.

Invariant: a problem says which field, what is wrong with it and what to write instead. Made by the other modules of
this package; printed by the CLI and, later, put into the Accepted condition by the operator.
"""

from __future__ import annotations

from dataclasses import dataclass

from cacheservice.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Position:
    """A place in a file: line and column, both counted from 1; 0, 0 when the manifest did not come from text."""

    line: int = 0
    column: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """One reason to refuse a manifest. `path` is the field, for example `spec.cache.cpu`, or "" for the whole file."""

    path: str
    message: str
    position: Position = Position()

    def __str__(self) -> str:
        place = (
            f"line {self.position.line}, column {self.position.column}: "
            if self.position.line
            else ""
        )
        return f"{place}{self.path}: {self.message}" if self.path else f"{place}{self.message}"


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that is accepted and yet worth a sentence: it does nothing here, or not yet."""

    path: str
    message: str
    position: Position = Position()

    def __str__(self) -> str:
        return f"{self.path}: {self.message}" if self.path else self.message


class ManifestRefused(ConfigError):
    """A manifest that cannot be used. `problems` holds all of them, sorted by their position in the file."""

    def __init__(self, source: str, problems: tuple[Problem, ...]) -> None:
        self.source = source
        self.problems = problems
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        super().__init__(
            "\n".join([f"{source}: {count}", *(f"  {problem}" for problem in problems)])
        )
