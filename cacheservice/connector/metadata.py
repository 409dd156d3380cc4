"""What the two halves of the connector tell each other, through vLLM, step by step.

Down: `LarderMetadata`, pickled to the workers by vLLM. Up: `LarderWorkerMetadata`, merged over the ranks by vLLM's
KVOutputAggregator with `aggregate`. Both are plain values; numbers count from 0, token ranges are half-open. Another
connector's metadata can arrive in our place under MultiConnector and is ignored by type.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from cacheservice.connector.namespace import NamespacePlan, RankFacts
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.outcomes import Reason

BlockIds = tuple[tuple[int, ...], ...]
"""Block ids per group."""
NULL_BLOCK = 0
"""vLLM's placeholder where a group has no block (any more): never read, never written."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Bytes of tokens [start_token, stop_token) of one request, to be put into its blocks."""

    load_id: int
    request_id: str
    namespace: NamespaceDigest
    epoch: int
    """Incarnation of the agent that the plan rests on; another one fails the load."""
    lookup_lease: int
    start_token: int
    stop_token: int
    first_chunk: int
    chunks: tuple[ChunkKey, ...]
    """Keys of chunks first_chunk, first_chunk + 1, …"""
    block_ids: BlockIds
    """Per group the blocks that the range needs: those at the positions `blocks_read(group, start_token, stop_token)`
    of the request's block table."""


@dataclass(frozen=True, slots=True)
class SaveChunk:
    """One chunk of which pages are complete after this step's forward pass."""

    key: ChunkKey
    parent: ChunkKey | None
    number: int
    block_ids: BlockIds
    """Per group the blocks at the positions `stored_blocks(group, tokens_per_chunk, number)`; none for a group that is
    not saved now: it is there already, its blocks are gone, or vLLM offered no state."""


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Chunks to store. Their blocks are pinned until every rank has reported the job."""

    save_id: int
    request_id: str
    """Empty when the chunks are of several requests."""
    namespace: NamespaceDigest
    chunks: tuple[SaveChunk, ...]


@dataclass(slots=True)
class LarderMetadata(KVConnectorMetadata):
    """Scheduler half to ranks, once per step."""

    loads: list[LoadJob] = field(default_factory=list)
    saves: list[SaveJob] = field(default_factory=list)
    plan: NamespacePlan | None = None
    """Set in the first step, and again when the namespace changed."""


@dataclass(frozen=True, slots=True)
class LoadReport:
    """How one load ended on the ranks that reported so far."""

    num_ranks: int
    first_failed_chunk: int | None
    reason: Reason
    """HIT, or why the first failed chunk failed."""

    def merged_with(self, other: LoadReport) -> LoadReport:
        failed = [r for r in (self, other) if r.first_failed_chunk is not None]
        worst = min(failed, key=lambda r: r.first_failed_chunk or 0) if failed else self
        return LoadReport(self.num_ranks + other.num_ranks, worst.first_failed_chunk, worst.reason)


@dataclass(frozen=True, slots=True)
class SaveReport:
    """How one save ended on the ranks that reported so far."""

    num_ranks: int
    is_complete: bool
    """Every shard of these ranks is in the cache or being stored by somebody else."""

    def merged_with(self, other: SaveReport) -> SaveReport:
        return SaveReport(self.num_ranks + other.num_ranks, self.is_complete and other.is_complete)


@dataclass(slots=True)
class LarderWorkerMetadata(KVConnectorWorkerMetadata):
    """Ranks to scheduler half: what ended since the last step, each job once per rank."""

    loads: dict[int, LoadReport] = field(default_factory=dict)
    saves: dict[int, SaveReport] = field(default_factory=dict)
    facts: list[RankFacts] = field(default_factory=list)
    """Sent until a plan came: under MultiConnector only the first child gets handshake metadata."""

    def aggregate(self, other: KVConnectorWorkerMetadata) -> LarderWorkerMetadata:
        """Merge the reports of another rank. Foreign types change nothing."""
        if not isinstance(other, LarderWorkerMetadata):
            return self
        merged = LarderWorkerMetadata(
            dict(self.loads), dict(self.saves), [*self.facts, *other.facts]
        )
        for load_id, load in other.loads.items():
            mine = merged.loads.get(load_id)
            merged.loads[load_id] = mine.merged_with(load) if mine else load
        for save_id, save in other.saves.items():
            known = merged.saves.get(save_id)
            merged.saves[save_id] = known.merged_with(save) if known else save
        return merged


@dataclass(slots=True)
class LarderHandshake(KVConnectorHandshakeMetadata):
    """A rank's facts, on the way to the scheduler half at start."""

    facts: RankFacts
