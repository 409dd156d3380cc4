"""Stalled: waiting cannot help, and the cause stood for a while. Pure.

A hopeless cause makes it Unknown first; since lastTransitionTime moves with the status alone, that is when the cause
began. So a cause that heals within STANDS_FOR, like an image that the registry gave on the second try, stalls nothing,
and a restart of the operator does not begin anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from cacheoperator.conditions.finding import Finding
from cacheoperator.conditions.reasons import Reason

STANDS_FOR = timedelta(seconds=60)


def check(
    findings: Sequence[Finding], now: datetime, stored: tuple[str, datetime] | None
) -> Finding:
    """`findings` of the other conditions in their order; `stored` is (status, lastTransitionTime) of Stalled before."""
    cause = next((finding for finding in findings if finding.is_hopeless), None)
    if cause is None:
        return Finding("False", Reason.NOT_STALLED, "nothing waits for a person")
    stood = stored is not None and (
        stored[0] == "True" or (stored[0] == "Unknown" and now - stored[1] >= STANDS_FOR)
    )
    return Finding("True" if stood else "Unknown", cause.reason, cause.message, is_hopeless=True)
