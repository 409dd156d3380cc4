"""Versions of the wire contract (proto/cacheservice/v1) that this version of Larder speaks, and words beside statuses.

The version goes up with every release that adds something, also where the other side may ignore it, so that people can
see who lacks it. Agents speak `PROTOCOL_VERSION` and the one before: engines keep the connector that they were started
with while agents are upgraded. Clients offer theirs, and to an agent that only speaks older ones the one before: while
agents are upgraded one by one, new ones pull from old ones. Used by the agent and the client.
"""

from __future__ import annotations

PROTOCOL_VERSION = 2
"""1: the first release. 2: `AcquiredShard.writer_role`, `ReleaseRequest.unread_lease_ids`, and the metadata below."""
OLDEST_PROTOCOL_VERSION = PROTOCOL_VERSION - 1
"""Of a client that an agent still serves."""

REFUSAL = "larder-refusal"
"""Key of the trailing metadata that tells refusals of one gRPC status apart, for clients that react to them in other
ways; its values follow."""
TOO_MANY_LEASES = "leases"
"""RESOURCE_EXHAUSTED because of leases, and not because calls are served too slowly."""
PROTOCOL_NOT_SPOKEN = "protocol"
"""FAILED_PRECONDITION of a hello; `SPOKEN` says what would do."""
SPOKEN = "larder-protocols"
"""Key of the oldest and the newest version that the agent speaks, as `1-2`. Agents of version 1 do not say it."""
