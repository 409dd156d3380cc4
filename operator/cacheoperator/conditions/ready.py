"""Ready: the first condition that is not True speaks for all. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from cacheoperator.conditions.finding import Finding, Scene
from cacheoperator.conditions.reasons import Reason


def check(findings: Sequence[Finding], scene: Scene | None, endpoint: str) -> Finding:
    """`findings` in the order Accepted, RedisReady, CacheReady, EnginesReady, TransferVerified; `scene` None when the
    resource can't be read."""
    if scene is not None and scene.manifest.paused:
        message = "spec.paused is true: nothing is changed, and what runs goes on; set it to false to go on"
        return Finding("Unknown", Reason.PAUSED, message)
    for finding in findings:
        if finding.status != "True":
            return Finding(finding.status, finding.reason, finding.message)
    where = f"serves at {endpoint}" if endpoint else "the cache is ready for engines"
    return Finding("True", Reason.READY, where)
