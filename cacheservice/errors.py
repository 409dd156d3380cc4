"""All exceptions of Larder. A miss is no exception: it is a value.

LarderError
├── ConfigError         what the user wrote is wrong: say what, which, and what to do; exit code 2
├── RefusedError        these flags can't be cached; the connector refuses to start, in one sentence
│   └── UncacheableError    this model can't be cached: the engine runs without cache and says so once
├── AgentUnavailable    no live session with the agent, or it did not answer in time: a miss, try later
├── AgentRejected       the agent refused a call as wrong: our bug or a version skew; a miss, logged once
├── StartCancelled      the agent was told to stop before it was ready; it ends as after a drain
├── IndexUnavailable    the index did not answer in time, or refuses; serve what is here
└── RequestRejected     a caller's request is wrong (agent side); becomes a gRPC status
    ├── InvalidRequest      INVALID_ARGUMENT
    ├── UnknownSession      UNAUTHENTICATED
    ├── UnknownObject       NOT_FOUND
    ├── Conflict            FAILED_PRECONDITION
    │   └── ProtocolNotSpoken   the same; the client may offer another version
    ├── LimitReached        RESOURCE_EXHAUSTED
    │   └── TooManyLeases       the same; nothing can be had until leases end
    ├── NotReady            UNAVAILABLE
    ├── LeaseLost           ABORTED
    ├── OutOfExtent         OUT_OF_RANGE
    ├── Forbidden           PERMISSION_DENIED
    └── NotServed           UNIMPLEMENTED
"""

from __future__ import annotations


class LarderError(Exception):
    """Root of the tree."""


class ConfigError(LarderError):
    """A flag, file or field is wrong; the message says which and how to mend it."""


class RefusedError(LarderError):
    """This engine can't be cached; the message names the feature, the flag and what to do."""


class UncacheableError(RefusedError):
    """The model's KV cache can't be cached whatever the flags; the message names the group and what to do."""


class AgentUnavailable(LarderError):
    """The agent can't be reached or did not answer within the deadline."""


class AgentRejected(LarderError):
    """The agent answered that the call itself is wrong."""


class StartCancelled(LarderError):
    """The agent was told to stop while it started."""


class IndexUnavailable(LarderError):
    """The index did not answer within its deadline, or refuses to."""


class RequestRejected(LarderError):
    """A request that the agent refuses; leaves say with which status."""


class InvalidRequest(RequestRejected):
    """A field is malformed or out of bounds."""


class UnknownSession(RequestRejected):
    """The session token is not of a live session."""


class UnknownObject(RequestRejected):
    """A namespace, lease or reservation that is not known, or not the caller's."""


class Conflict(RequestRejected):
    """The request contradicts what was agreed before."""


class ProtocolNotSpoken(Conflict):
    """The client speaks another version of the wire contract."""


class LimitReached(RequestRejected):
    """A configured limit is reached."""


class TooManyLeases(LimitReached):
    """No lease can be given until others end."""


class NotReady(RequestRejected):
    """The agent starts or drains; the caller may come back later."""


class LeaseLost(RequestRejected):
    """The lease ran out while its bytes were read; what came is worthless."""


class OutOfExtent(RequestRejected):
    """Bytes for outside the extent that was reserved for them."""


class Forbidden(RequestRejected):
    """The caller's certificate does not allow this call."""


class NotServed(RequestRejected):
    """A call that this version of the agent does not serve."""
