"""What the API server can answer instead of what was asked. Foreign exceptions are translated once, in `cluster`.

ClusterError            code, reason, message as the API server said them
├── Unreachable         no answer in time, overload (429) or an error of the server's own (5xx): try again
│   └── Broken          500: the server is there, and something behind it fails, as an admission webhook that is away
├── Forbidden           401, 403: RBAC, Pod Security, quota or another admission rule
├── NotFound            404: no such object, or no such kind
├── Conflict            409: the object is another one or another version than we thought, or exists already
├── Gone                410: a list or watch must start anew
└── Invalid             other 4xx: the object itself; `causes` says where
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class ClusterError(Exception):
    """`reason` is Kubernetes' word (Forbidden, AlreadyExists …), `causes` are (field path, message) pairs."""

    def __init__(
        self,
        message: str,
        *,
        code: int = 0,
        reason: str = "",
        causes: tuple[tuple[str, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.reason = reason
        self.causes = causes


class Unreachable(ClusterError):
    pass


class Broken(Unreachable):
    pass


class Forbidden(ClusterError):
    pass


class NotFound(ClusterError):
    pass


class Conflict(ClusterError):
    pass


class Gone(ClusterError):
    pass


class Invalid(ClusterError):
    pass


def error_of_status(code: int, status: Mapping[str, Any]) -> ClusterError:
    """The error for an HTTP answer of `code` whose body is a Kubernetes Status object (or anything else)."""
    details = status.get("details") or {}
    causes = tuple(
        (str(cause.get("field", "")), str(cause.get("message", "")))
        for cause in details.get("causes") or ()
        if isinstance(cause, Mapping)
    )
    error: type[ClusterError] = Invalid
    if code == 429 or code >= 500:
        error = Broken if code == 500 else Unreachable
    else:
        error = {401: Forbidden, 403: Forbidden, 404: NotFound, 409: Conflict, 410: Gone}.get(
            code, Invalid
        )
    return error(
        str(status.get("message") or f"HTTP status {code}"),
        code=code,
        reason=str(status.get("reason") or ""),
        causes=causes,
    )
