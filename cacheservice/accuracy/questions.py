"""Multiple-choice questions and the CSV that they come in. Pure: text in, questions out, no files.

Two forms are read. MMLU as it is downloaded: a file per subject, no header, `question,A,B,C,D,answer`. And one file for
all: `subject,question,A,B,C,D,answer`, where a header may give the columns another order. The answer is a letter.
Raises ConfigError with file and line for whatever is malformed.
"""

from __future__ import annotations

import csv
import difflib
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from cacheservice.errors import ConfigError

LETTERS = ("A", "B", "C", "D")
COLUMNS = ("question", *LETTERS, "answer")
SUBJECT_COLUMN = "subject"
DEFAULT_SHOTS = 5
"""As many as MMLU has examples for each subject."""


@dataclass(frozen=True, slots=True)
class Question:
    """One question. `choices` belong to A, B, C and D, `answer` is the right letter, `place` is file and line."""

    text: str
    choices: tuple[str, str, str, str]
    answer: str
    place: str


@dataclass(frozen=True, slots=True)
class Subject:
    """Questions that share a prompt prefix. `examples` are shown with their answers and never asked."""

    name: str
    examples: tuple[Question, ...]
    questions: tuple[Question, ...]


def parse_subject(text: str, source: str) -> list[Question]:
    """The questions of a file of one subject. `source` names it in messages."""
    return [question for _, question in _parse(text, source, COLUMNS)]


def parse_subjects(text: str, source: str) -> dict[str, list[Question]]:
    """The questions of a file of several subjects, by subject, in the order of the file."""
    found: dict[str, list[Question]] = {}
    for subject, question in _parse(text, source, (SUBJECT_COLUMN, *COLUMNS)):
        found.setdefault(subject, []).append(question)
    return found


def build_subject(
    name: str,
    questions: Sequence[Question],
    examples: Sequence[Question] | None,
    *,
    shots: int | None,
) -> Subject:
    """The first `shots` of `examples` and the questions that are asked; None: all examples.

    Where `examples` is None the first questions serve as such and are not asked; then `shots` None means DEFAULT_SHOTS.
    """
    if shots is None:
        shots = DEFAULT_SHOTS if examples is None else len(examples)
    if examples is None:
        examples, questions = questions[:shots], questions[shots:]
        if not questions:
            raise ConfigError(
                f"{name} has {len(examples)} questions and no examples of its own, so --shots {shots} leaves none "
                f"to ask: give --shots {max(0, len(examples) - 1)} or less"
            )
    if len(examples) < shots:
        raise ConfigError(
            f"{name} has {len(examples)} examples: give --shots {len(examples)} or less"
        )
    if not questions:
        raise ConfigError(f"{name} has no questions: leave it out by --subjects, or fill its file")
    return Subject(name, tuple(examples[:shots]), tuple(questions))


def select(
    subjects: Sequence[Subject], *, names: Sequence[str], limit: int | None
) -> list[Subject]:
    """The subjects called `names` (all when there are none), each with its first `limit` questions."""
    by_name = {subject.name: subject for subject in subjects}
    for name in names:
        if name not in by_name:
            close = difflib.get_close_matches(name, by_name, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(by_name)}"
            raise ConfigError(f"--subjects: there is no subject {name}; {hint}")
    chosen = [by_name[name] for name in dict.fromkeys(names)] if names else list(subjects)
    return [replace(subject, questions=subject.questions[:limit]) for subject in chosen]


def _parse(text: str, source: str, columns: Sequence[str]) -> Iterator[tuple[str, Question]]:
    """Subject (empty where there is no such column) and question of each row."""
    order: Mapping[str, int] = {column: index for index, column in enumerate(columns)}
    width = len(columns)
    is_first = True
    for line, row in _rows(text, source):
        if is_first and (header := _header(row, source, line, columns)) is not None:
            order, width, is_first = header, len(row), False
            continue
        is_first = False
        if len(row) != width:
            raise ConfigError(
                f"{source}:{line}: {len(row)} columns instead of {width} ({', '.join(columns)}); "
                "a text with a comma in it needs quotes"
            )
        yield _row(row, order, f"{source}:{line}")


def _rows(text: str, source: str) -> Iterator[tuple[int, list[str]]]:
    """Number of the first line, and columns, of each row that is not empty."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    line = 1
    while True:
        try:
            row = next(reader, None)
        except csv.Error as error:
            raise ConfigError(f"{source}:{line}: not CSV: {error}") from error
        if row is None:
            return
        if any(cell.strip() for cell in row):
            yield line, row
        line = reader.line_num + 1


def _header(
    row: Sequence[str], source: str, line: int, columns: Sequence[str]
) -> Mapping[str, int] | None:
    """The place of each column when `row` is a header, else None. A header has the words question and answer."""
    written = [cell.strip().lower() for cell in row]
    if not {"question", "answer"} <= set(written):
        return None
    missing = [column for column in columns if column.lower() not in written]
    if missing:
        raise ConfigError(
            f"{source}:{line}: the header has no column {' and no column '.join(missing)}; "
            f"needed are {', '.join(columns)}"
        )
    return {column: written.index(column.lower()) for column in columns}


def _row(row: Sequence[str], order: Mapping[str, int], place: str) -> tuple[str, Question]:
    cells = {column: row[index].strip() for column, index in order.items()}
    letter = cells["answer"].upper()
    if letter not in LETTERS:
        raise ConfigError(f"{place}: the answer is {cells['answer']!r}, not A, B, C or D")
    if not cells["question"]:
        raise ConfigError(f"{place}: the question is empty")
    subject = cells.get(SUBJECT_COLUMN, "")
    if SUBJECT_COLUMN in order and not subject:
        raise ConfigError(f"{place}: the subject is empty")
    a, b, c, d = (cells[name] for name in LETTERS)
    return subject, Question(cells["question"], (a, b, c, d), letter, place)
