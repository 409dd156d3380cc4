"""docs/status.md has every reason and event that the code can give, and no other."""

import ast
import re
from pathlib import Path

from cacheoperator import conditions, status
from cacheoperator.conditions.reasons import UNDER_WAY, Reason

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/status.md").read_text()
CODE = [*sorted(Path(conditions.__path__[0]).glob("*.py")), Path(str(status.__file__))]

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
