"""What the pages say is what the code has: keys, reasons, metrics, links, commands."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from cacheservice.agent.metrics import GAUGES, TOTALS
from cacheservice.connector.config import KEYS
from cacheservice.core.outcomes import Outcome, OutcomeKind, Presence, Reason
from cacheservice.v1 import cache_pb2

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]


def _first_column(page: str, heading: str) -> list[str]:
    """The back-ticked names in the first column of the first table after `heading`."""
    names = []
    for line in page.split(heading, 1)[1].splitlines():
        found = re.match(r"\| `([^`]+)` \|", line)
        if found:
            names.append(found[1])
        elif names:
            break
    return names


def test_operations_page_lists_every_key_reason_and_metric() -> None:
    page = (ROOT / "docs/operations.md").read_text()
    assert _first_column(page, "## The connector") == list(KEYS)
    assert _first_column(page, "## Why was it a miss?") == [reason.label for reason in Reason]
    assert _first_column(page, "| gauge ") == list(GAUGES)
    assert _first_column(page, "| total ") == list(TOTALS)


def test_words_of_the_core_are_those_of_the_wire() -> None:
    for mine, theirs, prefix in (
        (Reason, cache_pb2.OutcomeReason, "OUTCOME_REASON_"),
        (OutcomeKind, cache_pb2.OutcomeKind, "OUTCOME_KIND_"),
    ):
        wire = {name.removeprefix(prefix): number for name, number in theirs.items() if number}
        assert {member.name: member.value for member in mine} == wire
    presence = {
        name.removeprefix("PRESENCE_"): number for name, number in cache_pb2.Presence.items()
    }
    presence["ABSENT"] = presence.pop("UNSPECIFIED")
    assert {member.name: member.value for member in Presence} == presence
    assert set(Outcome.__slots__) == set(cache_pb2.Outcome.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_readme_is_short_and_its_make_targets_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 200
    assert "@@" not in text, "a number is missing"
    targets = set(re.findall(r"^make ([a-z-]+)$", text, re.MULTILINE))
    assert targets == {"demo", "test"}
    for target in targets:
        done = subprocess.run(
            ["make", "-n", target], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr


def test_failure_page_names_tests_that_exist() -> None:
    page = (ROOT / "docs/failure-tests.md").read_text()
    named = re.findall(r"`(test_\w+\.py)(?:::(\w+))?`", page)
    assert len(named) > 30
    for file, test in named:
        text = (ROOT / "tests" / file).read_text()
        assert not test or f"def {test}(" in text, f"{file} has no {test}"
