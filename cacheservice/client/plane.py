"""How bytes travel between the caller's memory and the agent: the port that both data planes serve.

A plane belongs to one session. Methods end by the watch or the call's deadline, raise nothing for what agent or network
do, and are called from many threads at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from cacheservice.client.deadlines import Deadline, Watch
from cacheservice.client.values import ShardRead, ShardWrite
from cacheservice.core.outcomes import Reason


@dataclass(frozen=True, slots=True)
class ReservedWrite:
    """A shard to write, and the room that the agent gave for it."""

    write: ShardWrite
    reservation_id: int
    offset: int
    """First byte in the arena."""


@dataclass(frozen=True, slots=True)
class LeasedRead:
    """A shard to read, and where the agent leased it."""

    read: ShardRead
    position: int
    """Position of the shard in the Acquire call."""
    offset: int
    """First byte in the arena."""
    checksums: Sequence[int] | None
    """One per piece of the shard; None = do not verify."""


class Plane(Protocol):
    """See the module."""

    @property
    def name(self) -> Literal["shared_memory", "stream"]:
        """As in status pages."""

    def write(
        self, shards: Sequence[ReservedWrite], *, watch: Watch, deadline: Deadline
    ) -> list[tuple[int, ...] | Reason]:
        """Bring the bytes of each shard to its room; per shard its piece checksums, or why it is not all there."""

    def read(
        self, lease_id: int, shards: Sequence[LeasedRead], *, watch: Watch, deadline: Deadline
    ) -> list[Reason]:
        """Bring the wanted range of each shard to its sink; HIT, or why the sink's bytes are worthless."""

    def retire(self) -> None:
        """Start nothing new; let go of memory when the last copy in flight has ended. Does not wait."""
