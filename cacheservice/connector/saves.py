"""Which complete chunks are handed to the ranks to be stored, and which saves are on their way.

Invariants. A chunk is handed over only when its last token is computed by this step or before, and each group of it
only while its blocks are real: those of a window in the step that crosses the chunk's end, a recurrent state in the
step in which vLLM offers it. The blocks of a save are pinned until every rank has reported it, and pins are bounded:
what finds no room is tried again in the next step. What is known to be in the cache, is being stored, or was just saved
here is not saved again, group by group.

Called by: scheduler.py, in the engine's scheduling thread. Single-threaded, no I/O.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence

from cacheservice.connector.metadata import NULL_BLOCK, BlockIds, SaveChunk, SaveJob, SaveReport
from cacheservice.connector.namespace import NamespacePlan
from cacheservice.connector.pins import Pins
from cacheservice.connector.requests import READY_OR_PENDING, RequestState
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupKind
from cacheservice.core.prefix import blocks_read, stored_blocks

MAX_CHUNKS_PER_SAVE = 64
MAX_BLOCKS_PER_STEP = 1024
"""Blocks that one step hands over: each costs microseconds, and many wait after pins were full or the agent was away.
As many as a step computes with 16384 tokens in blocks of 16; the rest follows in the next steps."""
RECENT_SAVES = 16384
RECENT_SAVE_S = 10.0
WANTED = bytes(code not in READY_OR_PENDING for code in range(256))
"""Code of presence to whether it is worth saving."""

Offers = Mapping[int, Mapping[int, int]]
"""Recurrent states that vLLM offers of one request: chunk number to group to block. The state is the one at the chunk's
end."""


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
        self._recent: OrderedDict[tuple[ChunkKey, int], float] = OrderedDict()
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
        offers: Offers,
    ) -> None:
        """Pick chunks `[state.next_save, complete)` of a request whose current block table is `table`, and the states
        of earlier chunks that are offered only now."""
        late = sorted(number for number in offers if number < min(state.next_save, complete))
        for number in (*late, *range(state.next_save, complete)):
            blocks, is_whole = self._blocks_of(state, plan, number, table, offers.get(number, {}))
            size = sum(len(group_ids) for group_ids in blocks)
            if size:
                if not self.has_room(size):
                    return
                self._chosen_blocks += size
                parent = state.keys[number - 1] if number else None
                chunk = SaveChunk(state.keys[number], parent, number, blocks)
                self._chosen.append((state.request_id, chunk))
                for group, group_ids in enumerate(blocks):
                    if group_ids:
                        self._remember(chunk.key, group)
            state.next_save = max(state.next_save, number + 1)
            if is_whole:
                state.num_promised = max(state.num_promised, number + 1)

    def pass_over_known(self, state: RequestState, num_groups: int, complete: int) -> None:
        """Go on behind the chunks that are there in all groups: after a long hit these are hundreds, in one step."""
        if state.known is None or state.known.epoch != self._epoch:
            return
        codes = state.known.codes
        first_wanted = codes.translate(WANTED).find(1, state.next_save * num_groups)
        stop = min(complete, (first_wanted if first_wanted >= 0 else len(codes)) // num_groups)
        if stop > state.next_save:
            state.next_save = stop
            state.num_promised = max(state.num_promised, stop)

    def _blocks_of(
        self,
        state: RequestState,
        plan: NamespacePlan,
        number: int,
        table: Sequence[Sequence[int]],
        offered: Mapping[int, int],
    ) -> tuple[BlockIds, bool]:
        """(blocks per group, none where the group is not to be saved; whether the cache will have the whole chunk)."""
        blocks: list[tuple[int, ...]] = []
        is_whole = True
        for g, group in enumerate(plan.groups):
            ids: tuple[int, ...] = ()
            # At the end of a local chunk nothing before it is read, so no hit needs that group of this chunk.
            is_read = group.kind is not GroupKind.CHUNKED_LOCAL or bool(
                blocks_read(group, 0, (number + 1) * plan.tokens_per_chunk)
            )
            if is_read and self.is_wanted(state, number, g, len(plan.groups)):
                if group.kind is GroupKind.RECURRENT:
                    block = offered.get(g)
                    if block is not None and self._pins.holds_state(block, state.keys[number], g):
                        ids = (block,)
                else:
                    held = stored_blocks(group, plan.tokens_per_chunk, number)
                    ids = tuple(table[g][held.start : held.stop])
                    if len(ids) != len(held) or NULL_BLOCK in ids:
                        ids = ()  # they left the window, or were never there
                is_whole &= bool(ids)
            blocks.append(ids)
        return tuple(blocks), is_whole

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
                for group, group_ids in enumerate(chunk.block_ids):
                    if group_ids:
                        self._recent.pop((chunk.key, group), None)
        if self._pins.report(save_id, report.num_ranks):
            del self._open[save_id]

    def is_wanted(self, state: RequestState, number: int, group: int, num_groups: int) -> bool:
        """Whether a group of a chunk is worth saving: not when it is known to be there, being stored, or was just
        saved."""
        code = state.presence_of(number, group, num_groups, epoch=self._epoch)
        if code in READY_OR_PENDING:
            return False
        saved_at = self._recent.get((state.keys[number], group))
        return saved_at is None or self._clock() - saved_at > RECENT_SAVE_S

    def _remember(self, key: ChunkKey, group: int) -> None:
        self._recent[key, group] = self._clock()
        self._recent.move_to_end((key, group))
        while len(self._recent) > RECENT_SAVES:
            self._recent.popitem(last=False)


def blocks_per_chunk(plan: NamespacePlan) -> int:
    """Blocks that one chunk holds over all groups."""
    return sum(group.num_blocks(plan.tokens_per_chunk) for group in plan.groups)


def offers_by_chunk(
    offered: Iterable[tuple[int, int, int]], plan: NamespacePlan, complete: int
) -> Offers:
    """Of the states that vLLM offers of one request, `(group, block, number of tokens)`, those at the ends of its first
    `complete` chunks. A state at any other number of tokens can't be found again by its chunk's key."""
    offers: dict[int, dict[int, int]] = {}
    for group, block, num_tokens in offered:
        chunk, rest = divmod(num_tokens, plan.tokens_per_chunk)
        if not rest and 0 < chunk <= complete:
            offers.setdefault(chunk - 1, {})[group] = block
    return offers
