"""Faults put into our own connector, one at a time, that the scheduler harness must notice.

Each is a context manager that patches the package and gives the shapes on which the fault can show. None changes the
harness. What is patched are the decisions of the connector, not its inputs.

Called by: scheduler_life.py, by name, in the process that lives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

from cacheservice.core.layout import GroupKind


@dataclass(frozen=True)
class Mutation:
    """A fault, and where it shows."""

    apply: Callable[[pytest.MonkeyPatch], None]
    shapes: tuple[str, ...]

    def __call__(self) -> AbstractContextManager[None]:
        """Put it in for the length of a with block."""
        return self._applied()

    @contextmanager
    def _applied(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            self.apply(patch)
            yield


MUTATIONS: dict[str, Mutation] = {}


def mutation(*shapes: str) -> Callable[[Callable[[pytest.MonkeyPatch], None]], Any]:
    """Register a fault under its function's name."""

    def register(apply: Callable[[pytest.MonkeyPatch], None]) -> Mutation:
        MUTATIONS[apply.__name__] = Mutation(apply, shapes)
        return MUTATIONS[apply.__name__]

    return register


# What is offered and loaded.


@mutation("dense-tp1", "gemma")
def answer_is_remembered(patch: pytest.MonkeyPatch) -> None:
    """The first answer is given again however much is computed by then: the 256-against-336 bug."""
    from cacheservice.connector.scheduler import SchedulerHalf

    ask, given = SchedulerHalf.matched_tokens, {}

    def asked(self: Any, request: Any, computed: int) -> tuple[int | None, bool]:
        key = (id(self), request.request_id)
        if key not in given:
            answer = ask(self, request, computed)
            if answer[0]:
                given[key] = answer
            return answer
        self._tracked[request.request_id].state.computed_tokens = computed
        return given[key]

    patch.setattr(SchedulerHalf, "matched_tokens", asked)


@mutation("dense-tp1", "mla-tp2")
def answer_ignores_what_is_computed(patch: pytest.MonkeyPatch) -> None:
    """The end of the hit is answered, not how far it is beyond the computed tokens."""
    import cacheservice.connector.requests as requests

    answer = requests._answer

    def wrong(end: int, computed: int, otherwise: Any) -> Any:
        decision = answer(end, computed, otherwise)
        return replace(decision, tokens=end) if decision.tokens else decision

    patch.setattr(requests, "_answer", wrong)


@mutation("dense-tp1", "gpt-oss")
def load_is_shifted_by_a_block(patch: pytest.MonkeyPatch) -> None:
    """Bytes go into the block after the right one."""
    from cacheservice.connector.scheduler import SchedulerHalf

    load = SchedulerHalf.after_alloc

    def shifted(self: Any, request: Any, block_ids: Any, tokens: int) -> None:
        load(self, request, [[*ids[1:], *ids[:1]] for ids in block_ids], tokens)

    patch.setattr(SchedulerHalf, "after_alloc", shifted)


@mutation(
    "gemma", "qwen3-next-tp1", "chunked-local", "deepseek-v4", "three-block-sizes", "two-states"
)
def load_forgets_a_group(patch: pytest.MonkeyPatch) -> None:
    """The first group's pages are not loaded."""
    from cacheservice.connector.shards import RankShards

    reads = RankShards.reads

    def forgetful(self: Any, *arguments: Any) -> Any:
        made = reads(self, *arguments)
        return made and [read for read in made if read.shard.group != 0]

    patch.setattr(RankShards, "reads", forgetful)


@mutation("gpt-oss", "qwen3-next-tp2")
def hit_forgets_a_group(patch: pytest.MonkeyPatch) -> None:
    """A chunk counts as there although nothing of its first group is: a load that can't succeed is offered again and
    again, and what is read is not there."""
    import cacheservice.connector.requests as requests

    hit = requests.hit_tokens

    def forgetful(groups: Any, presence: bytes, **given: Any) -> int:
        codes = bytearray(presence)
        codes[0 :: len(groups)] = bytes([min(given["there"])]) * len(codes[0 :: len(groups)])
        return hit(groups, bytes(codes), **given)

    def stored(self: Any, job: Any, *arguments: Any) -> Any:
        return [w for w in writes(self, job, *arguments) if w.group != 0]

    from cacheservice.connector.shards import RankShards

    reads, writes = RankShards.reads, RankShards.writes

    def only_what_is_there(self: Any, *arguments: Any) -> Any:
        made = reads(self, *arguments)
        return made and [read for read in made if read.shard.group != 0]

    patch.setattr(requests, "hit_tokens", forgetful)
    patch.setattr(RankShards, "writes", stored)
    patch.setattr(RankShards, "reads", only_what_is_there)


@mutation("gemma", "gpt-oss", "deepseek-v4")
def window_is_ignored(patch: pytest.MonkeyPatch) -> None:
    """Of a window only the last block is loaded, as if it were a state."""
    import cacheservice.connector.scheduler as scheduler
    import cacheservice.connector.shards as shards
    import cacheservice.core.prefix as prefix

    right = prefix.blocks_read

    def last_only(group: Any, computed: int, end: int) -> range:
        needed = right(group, computed, end)
        if group.kind is GroupKind.SLIDING_WINDOW and needed:
            return range(needed.stop - 1, needed.stop)
        return needed

    for module in (scheduler, shards, prefix):
        patch.setattr(module, "blocks_read", last_only)


@mutation("qwen3-next-tp1", "qwen3-next-async")
def state_is_restored_at_the_last_token(patch: pytest.MonkeyPatch) -> None:
    """A hit may cover a whole request, although a state can't be rewound for the last token."""
    import cacheservice.connector.requests as requests

    hit = requests.hit_tokens

    def whole(groups: Any, presence: bytes, *, num_tokens: int, **given: Any) -> int:
        end = hit(groups, presence, num_tokens=num_tokens + 1, **given)
        return end if end <= num_tokens else hit(groups, presence, num_tokens=num_tokens, **given)

    patch.setattr(requests, "hit_tokens", whole)


@mutation("dense-tp1", "mla-tp1")
def failed_load_counts_as_done(patch: pytest.MonkeyPatch) -> None:
    """The ranks say that all is well whatever the cache said."""
    from cacheservice.connector.worker import WorkerHalf

    end = WorkerHalf._end_load

    def fine(self: Any, job: Any, first_failed: Any, *rest: Any) -> None:
        del first_failed
        end(self, job, None, *rest)

    patch.setattr(WorkerHalf, "_end_load", fine)


@mutation("dense-tp1", "chunked-local")
def hit_is_a_chunk_too_short(patch: pytest.MonkeyPatch) -> None:
    """The last chunk that is there is not offered: no byte is wrong, it is only slower."""
    import cacheservice.connector.requests as requests

    hit = requests.hit_tokens

    def shorter(groups: Any, presence: bytes, *, num_tokens: int, **given: Any) -> int:
        end = hit(groups, presence, num_tokens=num_tokens, **given)
        return hit(groups, presence, num_tokens=end - 1, **given) if end else 0

    patch.setattr(requests, "hit_tokens", shorter)


# What the ranks report.


@mutation("dense-tp2", "mla-tp2")
def one_rank_reports_loads_twice(patch: pytest.MonkeyPatch) -> None:
    """The second rank reports each load in two steps."""
    from cacheservice.connector.worker import WorkerHalf

    take, seen = WorkerHalf.take_ended_loads, {}

    def twice(self: Any) -> tuple[set[str], set[str]]:
        finished, failed = take(self)
        if self._facts.tp_rank == 1:
            again = seen.pop(id(self), set())
            seen[id(self)] = set(finished)
            finished = finished | again
        return finished, failed

    patch.setattr(WorkerHalf, "take_ended_loads", twice)


@mutation("dense-tp2", "gqa-tp4")
def one_rank_reports_no_loads(patch: pytest.MonkeyPatch) -> None:
    """The second rank never says that a load has ended."""
    from cacheservice.connector.worker import WorkerHalf

    take = WorkerHalf.take_ended_loads

    def silent(self: Any) -> tuple[set[str], set[str]]:
        finished, failed = take(self)
        return (set(), set()) if self._facts.tp_rank == 1 else (finished, failed)

    patch.setattr(WorkerHalf, "take_ended_loads", silent)


@mutation("dense-tp2", "mla-tp2")
def one_rank_reports_no_saves(patch: pytest.MonkeyPatch) -> None:
    """The second rank never says that a save has ended, so that its blocks stay pinned."""
    from cacheservice.connector.worker import WorkerHalf

    take = WorkerHalf.take_reports

    def silent(self: Any) -> Any:
        reports = take(self)
        if reports is not None and self._facts.tp_rank == 1:
            reports.saves.clear()
        return reports

    patch.setattr(WorkerHalf, "take_reports", silent)


@mutation("dense-tp1", "gemma")
def load_is_reported_before_it_ends(patch: pytest.MonkeyPatch) -> None:
    """A load is reported when it begins."""
    from cacheservice.connector.metadata import LoadReport
    from cacheservice.connector.worker import WorkerHalf
    from cacheservice.core.outcomes import Reason

    start, end = WorkerHalf.start_loads, WorkerHalf._end_load

    def early(self: Any, metadata: Any) -> None:
        start(self, metadata)
        for job in metadata.loads:
            self._ended_loads[job.request_id] = (job, LoadReport(1, None, Reason.HIT))

    patch.setattr(WorkerHalf, "start_loads", early)
    patch.setattr(WorkerHalf, "_end_load", lambda self, *rest: None)
    del end


# What is saved.


@mutation("dense-tp1", "gqa-tp4", "gpt-oss")
def save_comes_before_the_chunk_is_complete(patch: pytest.MonkeyPatch) -> None:
    """A step counts as computing a block more than it does, so that chunks are handed over a step early."""
    from cacheservice.connector.scheduler import SchedulerHalf

    plan_saves = SchedulerHalf._plan_saves

    def early(self: Any, plan: Any, saves: Any, output: Any) -> Any:
        more = {r: n + plan.groups[0].block_tokens for r, n in output.num_scheduled_tokens.items()}
        return plan_saves(self, plan, saves, replace(output, num_scheduled_tokens=more))

    patch.setattr(SchedulerHalf, "_plan_saves", early)


@mutation("priority", "qwen3-next-priority")
def unwritten_blocks_keep_their_names(patch: pytest.MonkeyPatch) -> None:
    """Blocks of a pass that was planned and then preempted count as computed."""
    from cacheservice.connector.unwritten import UnwrittenBlocks

    patch.setattr(UnwrittenBlocks, "see_plan", lambda self, *rest: None)


@mutation("dense-tp1", "gpt-oss")
def save_is_shifted_by_a_block(patch: pytest.MonkeyPatch) -> None:
    """The pages of the blocks before the chunk's are stored."""
    import cacheservice.connector.saves as saves

    right = saves.stored_blocks

    def shifted(group: Any, tokens: int, chunk: int) -> range:
        held = right(group, tokens, chunk)
        return range(held.start - 1, held.stop - 1) if held.start else held

    patch.setattr(saves, "stored_blocks", shifted)


@mutation("dense-tp1", "gemma", "qwen3-next-tp1")
def saves_do_not_pin(patch: pytest.MonkeyPatch) -> None:
    """Blocks may be given to others while they are read."""
    from cacheservice.connector.pins import Pins

    pin = Pins.pin

    def loose(self: Any, save_id: int, block_ids: Any, **given: Any) -> None:
        del block_ids
        pin(self, save_id, (), **given)

    patch.setattr(Pins, "pin", loose)


@mutation("qwen3-next-tp1", "qwen3-next-tp2")
def state_is_saved_that_was_not_offered(patch: pytest.MonkeyPatch) -> None:
    """The block at the chunk's end is taken from the table, where a running state may be."""
    import cacheservice.connector.saves as saves

    choose = saves.Saves.choose

    def bold(self: Any, state: Any, plan: Any, complete: int, table: Any, offers: Any) -> None:
        taken = {}
        for chunk in range(complete):
            taken[chunk] = {}
            for g, group in enumerate(plan.groups):
                if group.kind is GroupKind.RECURRENT:
                    at = (chunk + 1) * plan.tokens_per_chunk // group.block_tokens
                    ids = [b for b in table[g][at : at + 1] if b] or [b for b in table[g] if b][-1:]
                    if ids:
                        taken[chunk][g] = ids[0]
        choose(self, state, plan, complete, table, taken or offers)

    from cacheservice.connector.pins import Pins

    patch.setattr(saves.Saves, "choose", bold)
    patch.setattr(Pins, "holds_state", lambda self, *rest: True)


@mutation("dense-tp2", "gqa-tp4", "qwen3-next-tp2", "kernel-blocks")
def ranks_swap_their_shards(patch: pytest.MonkeyPatch) -> None:
    """Each rank stores and reads the shards of another one. Within one engine that goes well."""
    import cacheservice.connector.shards as shards

    right = shards._shards_of

    def swapped(group: Any, pages: Any, tp_rank: int, size: int) -> Any:
        return right(group, pages, size - 1 - tp_rank, size)

    patch.setattr(shards, "_shards_of", swapped)


@mutation("mla-tp2", "gqa-tp4")
def only_the_writer_reads(patch: pytest.MonkeyPatch) -> None:
    """A rank loads only what it would have stored."""
    from cacheservice.connector.shards import RankShards

    reads = RankShards.reads

    def some(self: Any, *arguments: Any) -> Any:
        made = reads(self, *arguments)
        return made and [r for r in made if self._is_writer(r.shard.group, r.chunk_number)]

    patch.setattr(RankShards, "reads", some)
