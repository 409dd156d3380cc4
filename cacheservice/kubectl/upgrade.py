"""What `kubectl larder upgrade` says: which engines take the images of the operator's version, and how. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from cacheoperator.names import ENGINES

from cacheservice.kubectl.seen import Seen
from cacheservice.kubectl.text import INDENT, columns

ANNOTATION = "larder.dev/upgrade"


def stamp(now: datetime) -> str:
    """The annotation's value: a new one is what the operator looks for."""
    return now.strftime("%Y-%m-%dT%H:%M:%SZ")


def upgrade_text(seen: Seen, *, is_dry_run: bool) -> str:
    """What will happen to the engines of `seen`."""
    spec = seen.resource.get("spec") or {}
    engine = spec.get("engine") or {}
    rows = []
    for component in ENGINES:
        workload = seen.workload(component)
        if workload is None:
            continue
        pod = (workload.get("spec") or {}).get("template", {}).get("spec", {})
        rows.append((
            str(workload["metadata"]["name"]), str((workload.get("spec") or {}).get("replicas", 1)),
            _strategy(workload), _images(pod),
        ))  # fmt: skip
    if not rows:
        return (
            f"{seen.name} has no engines of its own: nothing to upgrade. Agents and Redis follow the operator by "
            "themselves.\n"
        )
    head = (
        f"{seen.name}: would let these engines take"
        if is_dry_run
        else f"{seen.name}: these engines now take"
    ) + " the default images of the operator's version; those whose images differ from it roll."
    lines = [head, *columns(("DEPLOYMENT", "PODS", "ROLL", "IMAGES NOW"), rows)]
    lines += [
        f"{INDENT}spec.engine.{field} is set: {engine[field]} stays; change the field to change it"
        for field in ("image", "payloadImage")
        if engine.get(field)
    ]
    if spec.get("paused"):
        lines.append(f"{INDENT}spec.paused is true: nothing rolls until it is false")
    if not is_dry_run:
        lines.append(f"{INDENT}watch: kubectl get kvc {seen.name} -n {seen.namespace} -w")
    return "\n".join(lines) + "\n"


def _strategy(workload: Mapping[str, Any]) -> str:
    strategy = (workload.get("spec") or {}).get("strategy") or {}
    rolling = strategy.get("rollingUpdate") or {}
    if strategy.get("type") == "Recreate":
        return "all at once"
    return f"{rolling.get('maxUnavailable', '25%')} down, {rolling.get('maxSurge', '25%')} more at a time"


def _images(pod: Mapping[str, Any]) -> str:
    every = [*(pod.get("initContainers") or ()), *(pod.get("containers") or ())]
    return ", ".join(dict.fromkeys(str(one.get("image", "")) for one in every))
