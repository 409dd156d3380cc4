"""Versions of the wire contract (proto/cacheservice/v1) that this version of Larder speaks.

The version goes up with every release that adds something, also where the other side may ignore it, so that people can
see who lacks it. Agents speak `PROTOCOL_VERSION` and the one before: engines keep the connector that they were started
with while agents are upgraded. Used by the agent and the client.
"""

from __future__ import annotations

PROTOCOL_VERSION = 2
"""1: the first release. 2 adds `AcquiredShard.writer_role` and `ReleaseRequest.unread_lease_ids`."""
OLDEST_PROTOCOL_VERSION = PROTOCOL_VERSION - 1
"""Of a client that an agent still serves."""
