"""What a check answers, and the order in which checks decide. Pure.

A condition is an ordered list of checks; the first that finds something decides it. The others run too, since their
objects belong into status.problems. Called by the conditions of this package and by `status`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cacheoperator.conditions.reasons import Reason
from cacheoperator.observed import Observed
from cacheservice.manifest import KVCacheManifest

ConditionStatus = Literal["True", "False", "Unknown"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One object that needs a person. `object` is kind/name in lower case."""

    object: str
    reason: Reason
    message: str


@dataclass(frozen=True, slots=True)
class Finding:
    """What a condition says. `is_hopeless`: waiting cannot help, a person must change something."""

    status: ConditionStatus
    reason: Reason
    message: str
    is_hopeless: bool = False
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True)
class Scene:
    """Everything that a check reads. `previous` is the status as stored, {} the first time."""

    manifest: KVCacheManifest
    observed: Observed
    previous: Mapping[str, Any]

    def previous_reason(self, condition: str) -> str:
        """Reason that `condition` had; "" when there was none."""
        for stored in self.previous.get("conditions") or ():
            if stored.get("type") == condition:
                return str(stored.get("reason", ""))
        return ""


Check = Callable[[Scene], Finding | None]


@dataclass(frozen=True, slots=True)
class Decision:
    """The deciding finding of one condition, and the problems of all its findings, hopeless ones first."""

    finding: Finding
    problems: tuple[Problem, ...]


def decide(checks: Sequence[Check], scene: Scene) -> Decision:
    """Run all `checks`; the first finding decides. One of them must find something always; those behind it only give
    problems."""
    found = [finding for finding in (check(scene) for check in checks) if finding is not None]
    assert found, "one check of a condition finds something always"
    ordered = sorted(found, key=lambda finding: not finding.is_hopeless)
    return Decision(found[0], tuple(problem for finding in ordered for problem in finding.problems))
