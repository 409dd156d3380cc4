"""Which complete chunks are handed to the ranks to be stored, and which saves are on their way.

Invariants. A chunk is handed over only when its last token is computed by this step or before, and while its blocks
are real. The blocks of a save are pinned until every rank has reported it, and pins are bounded: what finds no room is
tried again in the next step. What is known to be in the cache, is being stored, or was just saved here is not saved
again.

Called by: scheduler.py, in the engine's scheduling thread. Single-threaded, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from cacheservice.connector.metadata import BlockIds, SaveChunk, SaveJob, SaveReport
from cacheservice.connector.namespace import NamespacePlan
from cacheservice.connector.pins import Pins
from cacheservice.connector.requests import READY_OR_PENDING, RequestState
from cacheservice.core.keys import ChunkKey

MAX_CHUNKS_PER_SAVE = 64
MAX_BLOCKS_PER_STEP = 1024
"""Blocks that one step hands over: each costs microseconds, and many wait after pins were full or the agent was away.
As many as a step computes with 16384 tokens in blocks of 16; the rest follows in the next steps."""
RECENT_SAVES = 16384
RECENT_SAVE_S = 10.0
NULL_BLOCK = 0


class Saves:
    """Owns the pins and what is remembered of saves."""

    def __init__(
        self,
        pins: Pins,
        *,
        num_ranks: int,
        new_id: Callable[[], int],
        clock: Callable[[], float],
    ) -> None:
        self._pins = pins
        self._num_ranks = num_ranks
        self._new_id = new_id
        self._clock = clock
        self._open: dict[int, SaveJob] = {}
        self._recent: OrderedDict[ChunkKey, float] = OrderedDict()
        self._epoch: int | None = None
        self._chosen: list[tuple[str, SaveChunk]] = []
        self._chosen_blocks = 0

    @property
    def num_open(self) -> int:
        """Saves that not all ranks have reported."""
        return len(self._open)

    @property
    def num_pinned_blocks(self) -> int:
        """Pins held."""
        return self._pins.num_blocks

    def frees_blocks_soon(self) -> bool:
        """Whether pinned blocks will come back in a moment."""
        return self._pins.are_worth_waiting_for(self._clock())

    def see_agent(self, epoch: int | None) -> bool:
        """Note the agent's incarnation; whether it is another one, which has nothing of what was saved before."""
        if epoch == self._epoch:
            return False
        self.forget_recent()
        self._epoch = epoch
        return True

    @property
    def epoch(self) -> int | None:
        """The incarnation of the agent that what is saved counts for."""
        return self._epoch

    @property
    def max_blocks(self) -> int:
        """How many blocks may be pinned at a time."""
        return self._pins.max_blocks

    def has_room(self, num_blocks: int) -> bool:
        """Whether so many more blocks may be handed over in this step; never more than a step takes, but always one
        chunk."""
        wanted = self._chosen_blocks + num_blocks
        is_short = wanted <= MAX_BLOCKS_PER_STEP or not self._chosen_blocks
        return is_short and self._pins.has_room(wanted)

    def forget_recent(self) -> None:
        """What was saved does not count any more."""
        self._recent.clear()

    def choose(
        self,
        state: RequestState,
        plan: NamespacePlan,
        complete: int,
        table: Sequence[Sequence[int]],
    ) -> None:
        """Pick chunks `[state.next_save, complete)` of a request whose current block table is `table`."""
        while state.next_save < complete:
            number = state.next_save
            if self.is_wanted(state, number, len(plan.groups)):
                blocks = _blocks_of(number, plan, table)
                if blocks is not None:
                    size = sum(len(group_ids) for group_ids in blocks)
                    if not self.has_room(size):
                        return
                    self._chosen_blocks += size
                    parent = state.keys[number - 1] if number else None
                    chunk = SaveChunk(state.keys[number], parent, number, blocks)
                    self._chosen.append((state.request_id, chunk))
                    self._remember(state.keys[number])
            state.next_save += 1

    def take_jobs(self, plan: NamespacePlan) -> list[SaveJob]:
        """Pin what was chosen in this step and make jobs of it."""
        chosen, self._chosen, self._chosen_blocks = self._chosen, [], 0
        jobs = []
        for start in range(0, len(chosen), MAX_CHUNKS_PER_SAVE):
            part = chosen[start : start + MAX_CHUNKS_PER_SAVE]
            owners = {request_id for request_id, _ in part}
            job = SaveJob(
                save_id=self._new_id(),
                request_id=owners.pop() if len(owners) == 1 else "",
                namespace=plan.digest,
                chunks=tuple(chunk for _, chunk in part),
            )
            blocks = [b for chunk in job.chunks for ids in chunk.block_ids for b in ids]
            self._pins.pin(job.save_id, blocks, num_ranks=self._num_ranks, now=self._clock())
            self._open[job.save_id] = job
            jobs.append(job)
        return jobs

    def see_report(self, save_id: int, report: SaveReport) -> None:
        """Some ranks are done with a save; unknown ids are ignored."""
        job = self._open.get(save_id)
        if job is None:
            return
        if not report.is_complete:
            for chunk in job.chunks:
                self._recent.pop(chunk.key, None)
        if self._pins.report(save_id, report.num_ranks):
            del self._open[save_id]

    def is_wanted(self, state: RequestState, number: int, num_groups: int) -> bool:
        """Whether a chunk is worth saving: not when it is known to be there, being stored, or was just saved."""
        codes = state.presence_of(number, num_groups, epoch=self._epoch)
        if codes is not None and all(code in READY_OR_PENDING for code in codes):
            return False
        saved_at = self._recent.get(state.keys[number])
        return saved_at is None or self._clock() - saved_at > RECENT_SAVE_S

    def _remember(self, key: ChunkKey) -> None:
        self._recent[key] = self._clock()
        self._recent.move_to_end(key)
        while len(self._recent) > RECENT_SAVES:
            self._recent.popitem(last=False)


def blocks_per_chunk(plan: NamespacePlan) -> int:
    """Blocks of one chunk over all groups."""
    return sum(plan.tokens_per_chunk // group.block_tokens for group in plan.groups)


def _blocks_of(number: int, plan: NamespacePlan, table: Sequence[Sequence[int]]) -> BlockIds | None:
    """Blocks of a chunk per group; None when some are gone (null blocks) or not in the table."""
    ids = []
    for group, group_ids in zip(plan.groups, table, strict=True):
        per_chunk = plan.tokens_per_chunk // group.block_tokens
        blocks = tuple(group_ids[number * per_chunk : (number + 1) * per_chunk])
        if len(blocks) != per_chunk or NULL_BLOCK in blocks:
            return None
        ids.append(blocks)
    return tuple(ids)
