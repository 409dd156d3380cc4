"""Which shards this rank reads and writes, and which of its pages each one's bytes are in.

A rank covers the shards of its own heads; of what several ranks hold alike they take turns by chunk, so that nothing is
stored twice and no rank does all the work. Which blocks a load needs and a chunk holds is core/prefix.py's rule, the
same that made the offer. Pure: jobs in, the client's reads and writes out.

Called by: worker.py, on its copying threads. Immutable.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cacheservice.client.values import ShardRead, ShardWrite
from cacheservice.connector.copies import Copier, Fence
from cacheservice.connector.metadata import NULL_BLOCK, LoadJob, SaveJob
from cacheservice.connector.namespace import NamespacePlan
from cacheservice.connector.pages import GroupPages, ShardLayout
from cacheservice.core.layout import GroupSpec
from cacheservice.core.prefix import blocks_read, parts_to_load, stored_blocks


@dataclass(frozen=True, slots=True)
class Read:
    """One shard range of a load."""

    chunk_number: int
    """Position of the chunk in the request."""
    shard: ShardRead


class RankShards:
    """The shards of one namespace as one rank sees them."""

    def __init__(
        self,
        plan: NamespacePlan,
        pages: Sequence[GroupPages],
        *,
        tp_rank: int,
        tensor_parallel_size: int,
    ) -> None:
        """`pages[g]` are this rank's pages of group g."""
        self.plan = plan
        self._tp_rank = tp_rank
        self._replicas = tuple(g.num_replicas(tensor_parallel_size) for g in plan.groups)
        self._shards = tuple(
            _shards_of(group, group_pages, tp_rank, tensor_parallel_size)
            for group, group_pages in zip(plan.groups, pages, strict=True)
        )

    def reads(self, job: LoadJob, copier: Copier, after: Fence) -> list[Read] | None:
        """The shard ranges of a load; None when the range can't be loaded from what chunks hold.

        That happens when vLLM authorises another range than was offered: anything but whole blocks would overwrite a
        block that is shared, and windows and states are held before chunk ends only.
        """
        plan, made = self.plan, []
        for g, group in enumerate(plan.groups):
            needed = blocks_read(group, job.start_token, job.stop_token)
            parts = parts_to_load(group, plan.tokens_per_chunk, job.start_token, job.stop_token)
            ids = job.block_ids[g]
            if parts is None or job.start_token % group.block_tokens or len(ids) != len(needed):
                return None
            if NULL_BLOCK in ids:
                return None
            for part in parts:
                first = stored_blocks(group, plan.tokens_per_chunk, part.chunk).start
                blocks = ids[part.first_block - needed.start : part.stop_block - needed.start]
                for shard, layout in self._shards[g]:
                    first_byte = (part.first_block - first) * layout.block_bytes
                    made.append(
                        Read(
                            part.chunk,
                            ShardRead(
                                chunk=job.chunks[part.chunk - job.first_chunk],
                                group=g,
                                shard=shard,
                                size_bytes=plan.spec.groups[g].shard_bytes,
                                start=first_byte,
                                stop=(part.stop_block - first) * layout.block_bytes,
                                sink=copier.runs(layout, blocks, after=after, first_byte=first_byte),
                            ),
                        )
                    )  # fmt: skip
        return made

    def writes(self, job: SaveJob, copier: Copier, after: Fence) -> list[ShardWrite]:
        """The shards of a save that this rank writes; none when other ranks write all of it."""
        made = []
        for chunk in job.chunks:
            for g, blocks in enumerate(chunk.block_ids):
                if not blocks or not self._is_writer(g, chunk.number):
                    continue
                for shard, layout in self._shards[g]:
                    made.append(
                        ShardWrite(
                            chunk=chunk.key,
                            parent=chunk.parent,
                            number=chunk.number,
                            group=g,
                            shard=shard,
                            size_bytes=self.plan.spec.groups[g].shard_bytes,
                            source=copier.runs(layout, blocks, after=after),
                        )
                    )
        return made

    def _is_writer(self, group: int, chunk_number: int) -> bool:
        """Ranks that hold the same bytes take turns by chunk."""
        replicas = self._replicas[group]
        return chunk_number % replicas == self._tp_rank % replicas


def _shards_of(
    group: GroupSpec, pages: GroupPages, tp_rank: int, tensor_parallel_size: int
) -> tuple[tuple[int, ShardLayout], ...]:
    """The shards that this rank's slice covers, each with where its bytes lie."""
    replicas = group.num_replicas(tensor_parallel_size)
    num_holders = max(1, tensor_parallel_size // replicas)
    per_rank = max(1, group.num_shards // num_holders)
    heads = pages.num_heads // per_rank
    first = tp_rank // replicas * per_rank if group.num_shards > 1 else 0
    return tuple(
        (first + i, ShardLayout(pages, first_head=i * heads, num_heads=heads))
        for i in range(per_rank)
    )
