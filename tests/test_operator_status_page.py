"""docs/status.md has every reason and event that the code can give, and no other; docs/operations.md every failure."""

import ast
import re
from pathlib import Path

from cacheoperator import conditions, status
from cacheoperator.conditions.reasons import UNDER_WAY, Reason

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/status.md").read_text()
CODE = [*sorted(Path(conditions.__path__[0]).glob("*.py")), Path(str(status.__file__))]

FAILURES = (
    (ROOT / "docs/operations.md")
    .read_text()
    .split("## When something is wrong\n", 1)[1]
    .split("\n## ", 1)[0]
)

NO_FAILURE = UNDER_WAY | {
    Reason.ACCEPTED, Reason.READY, Reason.SCALING, Reason.SCALED_TO_ZERO, Reason.NOT_APPLICABLE, Reason.VERIFIED,
    Reason.NOT_STALLED, Reason.PAUSED,
}  # fmt: skip

told_by_others = {"RESERVED_ARGUMENT"}
"""Reasons that come as words from `render`."""


def first_column(heading: str) -> list[str]:
    """The back-ticked words in the first column of the table under `heading`."""
    section = PAGE.split(f"## {heading}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)


def test_every_reason_is_explained_and_no_other() -> None:
    assert first_column("Reasons") == [str(reason) for reason in Reason]


def test_every_reason_is_given_somewhere() -> None:
    used = {
        node.attr
        for path in CODE
        if path.name != "reasons.py"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "Reason"
    }
    assert used | told_by_others == set(Reason.__members__)


def test_every_event_is_explained_and_no_other() -> None:
    tree = ast.parse(Path(str(status.__file__)).read_text())
    words = {
        node.value
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef)
        if "list[Event]" in ast.unparse(function.returns or ast.Constant(value=""))
        for node in ast.walk(function)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        if re.fullmatch(r"([A-Z][a-z]+)+", node.value)
    }
    others = {"Normal", "Warning", "True", "False", "Unknown", "Ready", "EnginesReady"}
    assert set(first_column("Events")) == words - others


def test_conditions_are_explained_in_their_order() -> None:
    assert first_column("Conditions") == list(status.ORDER)


def test_what_is_under_way_is_a_reason_of_its_own() -> None:
    assert set(Reason) > UNDER_WAY


def failure_rows() -> list[list[str]]:
    """Cells of all rows of the failure tables: number, reason, condition, meaning, where to look, what to do."""
    rows = [
        [cell.strip() for cell in line.strip("|").split(" | ")]
        for line in FAILURES.splitlines()
        if line.startswith("| ") and "`" in line
    ]
    return [row if re.fullmatch(r"\d+", row[0]) else ["", *row] for row in rows]


def test_failure_table_has_every_failure_once_with_a_first_look_and_a_remedy() -> None:
    rows = failure_rows()
    assert all(len(row) == 6 and all(row[1:]) for row in rows)
    told = [row[1].strip("`") for row in rows]
    assert len(told) == len(set(told))
    assert set(told) - {str(Reason.MODEL_LOADING)} == {str(r) for r in set(Reason) - NO_FAILURE}
    for _, reason, _, _, look, _ in rows:
        assert "`" in look or "the message" in look, f"{reason}: where to look first?"


def test_failure_table_counts_to_seventeen() -> None:
    numbers = [int(row[0]) for row in failure_rows() if row[0]]
    assert numbers == sorted(numbers)
    assert set(numbers) == set(range(1, 18))


def test_failure_table_names_the_conditions_that_the_page_of_reasons_names() -> None:
    section = PAGE.split("## Reasons\n", 1)[1].split("\n## ", 1)[0]
    rows = (re.match(r"\| `(\w+)` \| ([^|]+) \|", line) for line in section.splitlines())
    where = {row[1]: set(re.findall(r"[A-Z]\w+", row[2])) for row in rows if row is not None}
    for _, reason, told, *_ in failure_rows():
        assert set(re.findall(r"[A-Z]\w+", told)) == where[reason.strip("`")], reason


def test_failures_that_never_occur_on_the_cluster_are_listed() -> None:
    """By the words that tests compare with: a reason that none of them names is one that none has seen."""
    tests = "".join(path.read_text() for path in sorted((ROOT / "e2e").glob("test_*.py")))
    unseen = {str(reason) for reason in set(Reason) - NO_FAILURE if f'"{reason}"' not in tests}
    page = (ROOT / "e2e/README.md").read_text().split("All of the seventeen failures", 1)[1]
    assert set(re.findall(r"`([A-Z]\w+)`", page)) == unseen
    seventeen = {row[1].strip("`") for row in failure_rows() if row[0]}
    # Some numbers have reasons that are told apart beyond what they count.
    assert seventeen & unseen <= {"Refused", "InitFailed", "StartFailed", "EngineRefused"}
