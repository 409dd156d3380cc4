"""Reads question sets from disk: MMLU's folder as it is downloaded, one CSV file, or the bundled set.

MMLU's archive unpacks to `dev/`, `val/` and `test/`, with a file per subject (`anatomy_test.csv`); questions are those
of `test/`, examples those of `dev/`. Raises ConfigError that names the path and what is wanted there.
"""

from __future__ import annotations

from pathlib import Path

from cacheservice.accuracy.questions import (
    Question,
    Subject,
    build_subject,
    parse_subject,
    parse_subjects,
)
from cacheservice.errors import ConfigError

BUNDLED = Path(__file__).parent / "bundled"
"""66 questions of our own making in six subjects, with nine examples each, laid out as MMLU is."""

LAYOUT = (
    "a folder like MMLU's, with test/SUBJECT_test.csv and dev/SUBJECT_dev.csv, or a CSV file with the columns "
    "subject, question, A, B, C, D and answer"
)


def read_subjects(path: Path, *, shots: int | None) -> list[Subject]:
    """All subjects at `path`, a folder or a file, each with `shots` examples; None: see `build_subject`."""
    if path.is_file():
        found = parse_subjects(_text(path), str(path))
        if not found:
            raise ConfigError(f"--data {path} has no questions; wanted is {LAYOUT}")
        return [build_subject(name, rows, None, shots=shots) for name, rows in found.items()]
    if not path.exists():
        raise ConfigError(f"--data {path} does not exist; wanted is {LAYOUT}")
    files = sorted((path / "test").glob("*_test.csv"))
    if not files:
        raise ConfigError(f"--data {path} has no test/*_test.csv; wanted is {LAYOUT}")
    subjects = []
    for file in files:
        name = file.name.removesuffix("_test.csv")
        questions = parse_subject(_text(file), str(file))
        examples = _examples(path / "dev" / f"{name}_dev.csv")
        subjects.append(build_subject(name, questions, examples, shots=shots))
    return subjects


def _examples(path: Path) -> list[Question] | None:
    return parse_subject(_text(path), str(path)) if path.is_file() else None


def _text(path: Path) -> str:
    try:
        # The csv module wants line ends as they are.
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.read()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 at byte {error.start}; save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror or error}") from error
