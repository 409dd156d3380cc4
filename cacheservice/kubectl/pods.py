"""What a pod is doing, in a word. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def pod_state(pod: Mapping[str, Any]) -> str:
    """`ready`, `terminating`, why a container waits, or the phase."""
    status = pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp"):
        return "terminating"
    if any(
        one.get("type") == "Ready" and one.get("status") == "True"
        for one in status.get("conditions") or ()
    ):
        return "ready"
    for one in [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]:
        state = one.get("state") or {}
        reason = (state.get("waiting") or {}).get("reason")
        if reason and reason != "PodInitializing":
            return str(reason)
    for one in status.get("conditions") or ():
        if one.get("type") == "PodScheduled" and one.get("status") == "False":
            return str(one.get("reason") or "Unschedulable")
    phase = str(status.get("phase", "Unknown"))
    return "not ready" if phase == "Running" else phase.lower()


def restarts(pod: Mapping[str, Any]) -> int:
    """Of all its containers."""
    return sum(
        int(one.get("restartCount", 0)) for one in (pod.get("status") or {}).get("containerStatuses") or ()
    )  # fmt: skip
