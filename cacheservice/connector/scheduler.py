"""The scheduler half: asks what is there, plans loads and saves, keeps blocks pinned while they are read.

Invariants. No call blocks longer than 1 ms a step. Nothing here raises for anything that the agent does; what vLLM
passes is the truth and is never asserted on. Every question, load and save ends, and is counted under one Reason.
All pins are released when all ranks reported. What is decided is in requests.py; this file connects it to vLLM and
to the client.

Called by: connector.py, in the engine's scheduling thread. Owns its client and the lookup threads.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from cacheservice.client.values import LookupWait
from cacheservice.connector.config import ConnectorConfig
from cacheservice.connector.hand_over import (
    HandOver,
    has_foreign_hand_over,
    read_hand_over,
    write_hand_over,
)
from cacheservice.connector.lookups import LookupHandle, LookupQuestion, Lookups, wait_for
from cacheservice.connector.metadata import (
    LarderMetadata,
    LarderWorkerMetadata,
    LoadJob,
    LoadReport,
    SaveJob,
)
from cacheservice.connector.namespace import EngineFacts, NamespacePlan, RankFacts, plan_namespace
from cacheservice.connector.pins import Pins
from cacheservice.connector.requests import (
    MAX_LOOKUP_KEYS,
    Decision,
    KnownPresence,
    Limits,
    Move,
    OpenLookup,
    RequestState,
    decide,
)  # fmt: skip
from cacheservice.connector.room import leaves_room, needs_guard
from cacheservice.connector.saves import Saves, blocks_per_chunk, offers_by_chunk
from cacheservice.connector.stats import LarderStats, StatsRecorder
from cacheservice.connector.unwritten import UnwrittenBlocks
from cacheservice.core.keys import chunk_keys_of, short_hex
from cacheservice.core.outcomes import Outcome, OutcomeKind, Reason
from cacheservice.core.prefix import blocks_read
from cacheservice.errors import RefusedError, UncacheableError

logger = logging.getLogger(__name__)

STEP_WAIT_S = 0.001
"""How long one engine step may wait for lookups in flight, all requests together."""
WAIT_SLACK_S = 0.1
MAX_CROWDED_LOOKS = 8
"""Hits without room that one step looks at: each costs a fraction of a millisecond, and hundreds can queue."""


@dataclass(slots=True)
class _Tracked:
    """One request: vLLM's object, what we know, and what is on its way."""

    request: Any
    state: RequestState
    handle: LookupHandle | None = None
    is_skipped: bool = False
    """It asked not to read the prefix cache, or is of a kind that can't."""
    was_asked: bool = False
    """vLLM has asked at least once."""
    is_foreign: bool = False
    """It came with a hand-over of another namespace."""


@dataclass(slots=True)
class _OpenLoad:
    """A load that not all ranks have reported."""

    request_id: str
    lease_id: int
    report: LoadReport | None = None


class SchedulerHalf:
    """See the module's docstring."""

    def __init__(
        self,
        config: ConnectorConfig,
        client: Any,
        *,
        num_ranks: int,
        step_tokens: int = 0,
        saves_prompts_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own `client` (closed with this half); a step computes at most `step_tokens`. Nothing is started before the
        first plan."""
        self._config = config
        self._client = client
        self._num_ranks = num_ranks
        self._step_tokens = step_tokens
        self._saves_prompts_only = saves_prompts_only
        self._clock = clock
        self._limits = Limits(
            lookup_s=config.deadlines.lookup_s, pending_s=config.deadlines.pending_s
        )
        self._lookups = Lookups(client, clock)
        self._stats = StatsRecorder()
        self._engine: EngineFacts | None = None
        self._is_off = False
        """The model can't be cached."""
        self._ranks: list[RankFacts] = []
        self._plan: NamespacePlan | None = None
        self._plan_is_news = False
        self._generation = ""
        """Not empty after the first reset, also when that came before the plan."""
        self._saves: Saves | None = None
        self._tracked: dict[str, _Tracked] = {}
        self._block_pool: Any = None
        self._unwritten: UnwrittenBlocks | None = None
        self._holders: dict[str, Any] = {}
        """vLLM's requests that hold the blocks of a load, which may be on its way, and have not run since."""
        self._new_loads: list[LoadJob] = []
        self._open_loads: dict[int, _OpenLoad] = {}
        self._num_crowded = 0
        """Hits that found no room in this step."""
        self._next_id = 1
        self._wait_budget_s = STEP_WAIT_S

    # ------------------------------------------------------------------ start and namespace

    def bind_block_pool(self, block_pool: Any) -> None:
        """Take the pool whose blocks are pinned while they are saved."""
        self._block_pool = block_pool
        self._saves = Saves(
            Pins(block_pool), num_ranks=self._num_ranks, new_id=self._take_id, clock=self._clock
        )

    def watch_preemptions(self, unwritten: UnwrittenBlocks) -> None:
        """From now on take back the names of blocks whose forward pass is preempted (priority scheduling)."""
        self._unwritten = unwritten

    def describe(self, engine: EngineFacts, ranks: Sequence[RankFacts]) -> NamespacePlan:
        """Settle the namespace. Raises RefusedError when the ranks can't share one."""
        self._engine, self._ranks = engine, list(ranks)
        self._adopt(plan_namespace(engine, self._ranks, generation=self._generation))
        assert self._plan is not None
        return self._plan

    @property
    def plan(self) -> NamespacePlan | None:
        """The namespace; None until the ranks described themselves."""
        return self._plan

    def reset_cache(self) -> bool:
        """Forget the cache: from now on this engine has a namespace of its own, until it restarts."""
        if self._is_off:
            return True
        self._generation = secrets.token_hex(16)
        if self._plan is not None and self._engine is not None:
            self._adopt(plan_namespace(self._engine, self._ranks, generation=self._generation))
        if self._saves is not None:
            self._saves.forget_recent()
        self._stats.event("namespace_resets")
        for tracked in self._tracked.values():
            # Pages computed before the reset must not be stored after it.
            tracked.state.saves_forbidden = True
            tracked.state.hand_over = None  # it promised chunks of the old namespace
            self._drop_lookup(tracked)
            if lease := tracked.state.take_lease():
                self._client.release(lease)
            tracked.state.forget_presence()
        logger.warning(
            "the cache was reset: this engine uses a private namespace until it restarts namespace=%s",
            short_hex(self._plan.digest) if self._plan is not None else "none yet",
        )
        return True

    def _adopt(self, plan: NamespacePlan) -> None:
        if self._plan is None:
            self._lookups.start_threads()
            self._check_chunk_fits(plan)
        self._plan, self._plan_is_news = plan, True
        self._client.open_namespace(plan.spec)

    def _check_chunk_fits(self, plan: NamespacePlan) -> None:
        if self._saves is None or blocks_per_chunk(plan) <= self._saves.max_blocks:
            return
        logger.warning(
            "nothing will be stored: a chunk of %d tokens takes %d blocks, and at most %d (a quarter of the engine's) "
            "may be pinned. Give the engine more blocks (--kv-cache-memory-bytes, or --num-gpu-blocks-override), or "
            "set a smaller tokens_per_chunk in kv_connector_extra_config on every engine that shares the cache",
            plan.tokens_per_chunk,
            blocks_per_chunk(plan),
            self._saves.max_blocks,
        )

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: Any) -> None:
        """Start looking before vLLM asks."""
        now = self._clock()
        tracked = _Tracked(request, RequestState(request.request_id, arrived_at=now))
        self._tracked[request.request_id] = tracked
        # A streaming session changes its tokens under way. An adapter that replaced another of the same name and path
        # has that one's keys: vLLM's server marks all its requests from then on (vLLM 0.32, openai/models/serving.py).
        adapter = request.lora_request
        is_uncacheable = bool(getattr(request, "resumable", False)) or (
            adapter is not None and adapter.load_inplace
        )
        tracked.is_skipped = bool(request.skip_reading_prefix_cache) or is_uncacheable
        tracked.state.saves_forbidden = is_uncacheable
        if self._plan is None:
            return
        params = getattr(request, "kv_transfer_params", None)
        if has_foreign_hand_over(params):
            hand_over = read_hand_over(params, longest_wait_s=self._config.deadlines.hand_over_s)
            if hand_over is None or hand_over.namespace != self._plan.digest:
                tracked.is_foreign = True
                self._stats.event("foreign_hand_overs")
                logger.debug(
                    "hand-over of another namespace ignored request=%s", request.request_id
                )
            else:
                tracked.state.hand_over = hand_over
        if tracked.is_skipped or not self._client.state().connected:
            return
        self._see_tokens(tracked)
        tracked.state.asked_at = now
        if tracked.state.keys:
            self._look_up(tracked, Decision(Move.LOOK_UP, Reason.DEADLINE), now)

    def matched_tokens(self, request: Any, computed_tokens: int) -> tuple[int | None, bool]:
        """vLLM's question: how many tokens beyond `computed_tokens` can be loaded. None = ask again next step."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return 0, False
        state = tracked.state
        state.computed_tokens, state.offered = computed_tokens, 0
        self._holders.pop(request.request_id, None)
        if self._plan is None or tracked.is_skipped:
            state.reason = Reason.SKIPPED
            return 0, False
        now = self._clock()
        if state.asked_at is None:
            state.asked_at = now
        if self._has_no_turn(state):
            self._stats.event("none_answers")
            return None, False
        self._see_tokens(tracked)
        for _ in range(3):
            self._wait_budget_s = (
                wait_for(tracked.handle, self._wait_budget_s)
                if tracked.handle
                else self._wait_budget_s
            )
            self._take_answer(tracked)
            tracked.was_asked = True
            if state.lookup is None and not self._client.state().connected:
                state.reason = Reason.AGENT_DOWN
                return 0, False
            decision = decide(
                state, self._plan.groups, self._plan.tokens_per_chunk, self._limits, self._clock()
            )
            if decision.move is Move.ANSWER and self._is_crowded(state, decision.tokens):
                self._num_crowded += 1
                if self._may_wait_for_room(state):
                    break
                decision = Decision(Move.ANSWER, Reason.NO_SPACE)
            state.reason = decision.reason
            if decision.move is Move.ANSWER:
                state.offered = decision.tokens
                return decision.tokens, decision.tokens > 0
            if decision.move is Move.WAIT or not self._look_up(tracked, decision, self._clock()):
                break
        self._stats.event("none_answers")
        return None, False

    def _is_crowded(self, state: RequestState, tokens: int) -> bool:
        """Whether loading so many tokens would take blocks that requests with loaded blocks need to run at all."""
        if not tokens or not self._holders or self._plan is None:
            return False
        if not needs_guard(self._plan.groups):
            return False
        fits = leaves_room(
            self._plan.groups,
            num_tokens=state.num_tokens,
            end=state.computed_tokens + tokens,
            holders=[(r.num_tokens, r.num_computed_tokens) for r in self._holders.values()],
            free_blocks=self._block_pool.get_num_free_blocks(),
            step_tokens=self._step_tokens,
        )
        if fits:
            state.crowded_since = None
        return not fits

    def _has_no_turn(self, state: RequestState) -> bool:
        """Whether this request waits for room already, and others before it found none in this step."""
        return (
            self._num_crowded >= MAX_CROWDED_LOOKS
            and bool(self._holders)
            and state.crowded_since is not None
            and self._may_wait_for_room(state)
        )

    def _may_wait_for_room(self, state: RequestState) -> bool:
        """Whether a hit that finds no room is worth waiting for; not longer than a load may take."""
        now = self._clock()
        if state.crowded_since is None:
            state.crowded_since = now
        return now - state.crowded_since < self._config.deadlines.load_s

    def after_alloc(
        self, request: Any, block_ids: Sequence[Sequence[int]], num_external_tokens: int
    ) -> None:
        """vLLM has allocated; load exactly so many tokens from the computed ones on, or nothing."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        state = tracked.state
        state.crowded_since = None
        if num_external_tokens <= 0:
            self._holders.pop(request.request_id, None)
            if state.load_id is None or state.asked_at is not None:
                self._settle(
                    tracked, Reason.LOCAL if state.reason is Reason.HIT else state.reason, 0
                )
            return
        assert self._plan is not None
        tokens = self._plan.tokens_per_chunk
        start, stop = state.computed_tokens, state.computed_tokens + num_external_tokens
        first, last = start // tokens, -(-stop // tokens)
        load_id = self._take_id()
        lease_id = state.take_lease()
        ids = []
        for group, group_ids in zip(self._plan.groups, block_ids, strict=True):
            needed = blocks_read(group, start, stop)
            ids.append(tuple(group_ids[needed.start : needed.stop]))
        self._new_loads.append(
            LoadJob(
                load_id=load_id,
                request_id=request.request_id,
                namespace=self._plan.digest,
                epoch=state.known.epoch if state.known is not None else 0,
                lookup_lease=lease_id,
                start_token=start,
                stop_token=stop,
                first_chunk=first,
                chunks=tuple(state.keys[first:last]),
                block_ids=tuple(ids),
            )
        )
        self._open_loads[load_id] = _OpenLoad(request.request_id, lease_id)
        state.load_id = load_id
        self._holders[request.request_id] = request
        self._settle(tracked, Reason.HIT, num_external_tokens)

    def request_finished(self, request: Any) -> dict[str, Any] | None:
        """Drop what is known of the request; returns the hand-over for its answer."""
        tracked = self._tracked.pop(request.request_id, None)
        self._holders.pop(request.request_id, None)
        if self._unwritten is not None:
            self._unwritten.forget(request.request_id)
        if tracked is None:
            return None
        state = tracked.state
        if state.asked_at is not None:
            self._settle(tracked, Reason.CANCELLED, 0)
        self._drop_lookup(tracked)
        if lease := state.take_lease():
            self._client.release(lease)
        # A load that was authorised goes to the ranks even when its request was aborted before this step's metadata:
        # vLLM frees the blocks of such a request only when its load is reported.
        if self._plan is None or state.saves_forbidden:
            return None
        self._count_unsaved(tracked)
        status = self._client.state()
        if not status.connected or not state.num_promised:
            return None
        if self._saves is None or self._saves.epoch != status.epoch:
            return None  # what was stored was stored at an agent that is no more
        return write_hand_over(
            HandOver(
                namespace=self._plan.digest,
                node=status.node_number,
                epoch=status.epoch or 0,
                num_chunks=min(state.num_promised, MAX_LOOKUP_KEYS),
                wait_s=self._config.deadlines.hand_over_s,
            )
        )

    def _count_unsaved(self, tracked: _Tracked) -> None:
        """Count the chunks of a finished request that were computed here and never handed to the ranks."""
        if self._plan is None or self._saves is None:
            return
        state, request, tokens = tracked.state, tracked.request, self._plan.tokens_per_chunk
        complete = min(
            min(request.num_computed_tokens, self._num_savable(request)) // tokens, len(state.keys)
        )
        unsaved = sum(
            any(
                self._saves.is_wanted(state, number, group, len(self._plan.groups))
                for group, spec in enumerate(self._plan.groups)
                if spec.kind.is_read_whole
            )
            for number in range(state.next_save, complete)
        )
        if not unsaved:
            return
        reason = Reason.SHED if self._client.state().connected else Reason.AGENT_DOWN
        self._stats.event("shed_chunks", unsaved)
        self._stats.outcome(
            OutcomeKind.SAVE, reason, asked=unsaved * tokens, served=0, duration_s=0.0
        )
        self._client.report(
            Outcome(OutcomeKind.SAVE, reason, state.request_id, unsaved * tokens, 0, 0)
        )
        logger.debug(
            "chunks not saved request=%s chunks=%d reason=%s",
            state.request_id,
            unsaved,
            reason.label,
        )

    # ------------------------------------------------------------------ steps

    def build_metadata(self, scheduler_output: Any) -> LarderMetadata:
        """What the ranks shall do in this step."""
        self._wait_budget_s = STEP_WAIT_S
        self._num_crowded = 0
        if self._unwritten is not None:
            self._unwritten.see_plan(scheduler_output, self._request_of)
        metadata = LarderMetadata(loads=self._new_loads)
        self._new_loads = []
        if self._plan_is_news:
            metadata.plan, self._plan_is_news = self._plan, False
        if self._plan is not None and self._saves is not None:
            status = self._client.state()
            if status.connected:
                if self._saves.see_agent(status.epoch):
                    for tracked in self._tracked.values():
                        tracked.state.see_new_agent(status.epoch)
                metadata.saves = self._plan_saves(self._plan, self._saves, scheduler_output)
        return metadata

    def _request_of(self, request_id: str) -> Any:
        """vLLM's request; None for one that is gone."""
        tracked = self._tracked.get(request_id)
        return tracked.request if tracked is not None else None

    def _plan_saves(
        self, plan: NamespacePlan, saves: Saves, scheduler_output: Any
    ) -> list[SaveJob]:
        chunk_blocks = blocks_per_chunk(plan)
        block_state = scheduler_output.kv_connector_block_state
        scheduled = scheduler_output.num_scheduled_tokens
        offered = block_state.boundary_state_offloads
        unproven = _loaded_by_others(scheduler_output)
        # Requests of offers that compute nothing now have just been loaded: their pages are complete.
        for request_id in (*scheduled, *(r for r in offered if r not in scheduled)):
            if not saves.has_room(chunk_blocks):
                break  # the others have their turn in a later step; a look at every block table costs milliseconds
            tracked = self._tracked.get(request_id)
            if tracked is None or tracked.state.saves_forbidden or request_id in unproven:
                continue
            request, state = tracked.request, tracked.state
            # num_computed_tokens is not advanced yet: after this step's forward pass the cache is valid up to here.
            # Draft tokens and placeholders are not in num_tokens, so they are never saved.
            valid = min(
                request.num_computed_tokens + scheduled.get(request_id, 0),
                self._num_savable(request),
            )
            complete = valid // plan.tokens_per_chunk
            if complete <= state.next_save and request_id not in offered:
                continue
            self._see_tokens(tracked)
            self._take_answer(tracked)
            complete = min(complete, len(state.keys))
            offers = offers_by_chunk(offered.get(request_id, ()), plan, complete)
            saves.pass_over_known(state, len(plan.groups), complete)
            if not offers and complete <= state.next_save:
                continue
            table = block_state.get_block_ids(request_id)
            if table is not None:
                saves.choose(state, plan, complete, table, offers)
        return saves.take_jobs(plan)

    def _num_savable(self, request: Any) -> int:
        """Tokens of which pages may be stored once they are computed."""
        return int(request.num_prompt_tokens if self._saves_prompts_only else request.num_tokens)

    def turn_off(self, why: str) -> None:
        """This engine's model can't be cached: say so once, and answer nothing from now on."""
        self._plan, self._engine, self._is_off = None, None, True
        logger.error("this engine runs without cache: %s", why)

    def see_worker_metadata(self, reports: Any) -> None:
        """Take what the ranks reported; foreign types are another connector's."""
        if not isinstance(reports, LarderWorkerMetadata):
            return
        if reports.facts and self._plan is None and self._engine is not None:
            self._describe_late(reports.facts)
        for load_id, load in reports.loads.items():
            self._see_load(load_id, load)
        if self._saves is not None:
            for save_id, save in reports.saves.items():
                self._saves.see_report(save_id, save)

    def _see_load(self, load_id: int, report: LoadReport) -> None:
        """Some ranks are done with a load. vLLM goes on with the request when all are."""
        opened = self._open_loads.get(load_id)
        if opened is None:
            return
        opened.report = report if opened.report is None else opened.report.merged_with(report)
        if opened.report.num_ranks < self._num_ranks:
            return
        del self._open_loads[load_id]
        if opened.lease_id:
            self._client.release(opened.lease_id)
        tracked = self._tracked.get(opened.request_id)
        if tracked is None or tracked.state.load_id != load_id:
            return
        if opened.report.first_failed_chunk is not None:
            tracked.state.see_failed_load(opened.report.first_failed_chunk, opened.report.reason)

    def _describe_late(self, facts: Sequence[RankFacts]) -> None:
        """Under MultiConnector only the first child gets handshake metadata; ranks then send their facts each step."""
        if len(facts) < self._num_ranks:
            return
        assert self._engine is not None
        try:
            self.describe(self._engine, facts)
        except RefusedError as error:
            self.turn_off(str(error))

    def describe_expected(self, ranks: Sequence[RankFacts]) -> NamespacePlan | None:
        """Settle the namespace with the engine's facts noted before; None when the model can't be cached."""
        if self._engine is None:
            return None
        try:
            return self.describe(self._engine, ranks)
        except UncacheableError as error:
            self.turn_off(str(error))
            return None

    def expect(self, engine: EngineFacts) -> None:
        """Note the engine's facts for the case that the ranks' facts come later (MultiConnector)."""
        self._engine = engine

    def has_open_saves(self) -> bool:
        """Whether blocks are pinned, so that vLLM has to keep stepping until the ranks report."""
        return self._saves is not None and self._saves.num_open > 0

    def frees_blocks_soon(self) -> bool:
        """Whether vLLM should wait for pinned blocks instead of preempting; not for a save that has got stuck."""
        return self._saves is not None and self._saves.frees_blocks_soon()

    def drain_stats(self) -> LarderStats | None:
        """Counts since the last call."""
        return self._stats.drain()

    def shutdown(self) -> None:
        """End threads and the client. Idempotent."""
        self._client.close()
        self._lookups.close()

    # ------------------------------------------------------------------ lookups

    def _see_tokens(self, tracked: _Tracked) -> None:
        """Bring the chunk keys up to date with the request's tokens; cheap when nothing changed."""
        assert self._plan is not None
        assert self._engine is not None
        request, state = tracked.request, tracked.state
        hash_tokens = self._engine.hash_block_tokens
        step = self._plan.tokens_per_chunk // hash_tokens
        if (
            len(request.block_hashes) // step == len(state.keys)
            and request.num_preemptions == state.num_preemptions
        ):
            state.num_tokens = request.num_tokens
            return
        keys = chunk_keys_of(
            request.block_hashes,
            hash_block_tokens=hash_tokens,
            tokens_per_chunk=self._plan.tokens_per_chunk,
        )
        state.see_tokens(keys, request.num_tokens, request.num_preemptions)

    def _look_up(self, tracked: _Tracked, decision: Decision, now: float) -> bool:
        """Start a lookup; False when this one may not be started now."""
        assert self._plan is not None
        state = tracked.state
        wait = LookupWait.NONE
        if decision.wait_chunks:
            wait = LookupWait.HAND_OVER if decision.is_hand_over else LookupWait.PENDING
            state.last_wait_at = now
        question = LookupQuestion(
            namespace=self._plan.digest,
            chunks=tuple(state.keys[:MAX_LOOKUP_KEYS]),
            superseded_lease=state.take_lease(),
            wait=wait,
            wait_num_chunks=decision.wait_chunks,
            wait_s=decision.wait_s,
            owner=state.hand_over.owner if state.hand_over is not None else None,
            deadline_s=decision.wait_s + self._limits.lookup_s
            if decision.wait_s
            else self._limits.lookup_s,
        )
        self._drop_lookup(tracked)
        handle = self._lookups.start(state.request_id, question)
        if handle is None:  # no place to wait at the agent: ask without waiting, again and again
            handle = self._lookups.start(
                state.request_id,
                LookupQuestion(
                    question.namespace, question.chunks, question.superseded_lease, LookupWait.NONE, 0, 0.0,
                    question.owner, self._limits.lookup_s,
                ),
            )  # fmt: skip
        if handle is None:
            return False
        tracked.handle = handle
        deadline = decision.wait_s + WAIT_SLACK_S if handle.waits else self._limits.lookup_s
        state.lookup = OpenLookup(now, now + deadline, waits=handle.waits)
        return True

    def _take_answer(self, tracked: _Tracked) -> None:
        """Take the answer of a lookup that has come back, if one has."""
        handle, state = tracked.handle, tracked.state
        if handle is None or not handle.done.is_set():
            return
        tracked.handle = None
        answer = handle.answer
        if answer is None or answer.reason is not None:
            state.lookup = None
            reason = handle.failure if answer is None or answer.reason is None else answer.reason
            # One that ran out while the request queued says nothing of now: the question asks again.
            if tracked.was_asked or reason is not Reason.DEADLINE:
                state.see_failure(reason, self._clock())
            return
        # A request can queue for minutes between its arrival and the first question; that answer is as old as it is.
        # Later ones count from when they are taken: steps may outlast presence, and must not ask for ever.
        seen_at = self._clock() if tracked.was_asked else handle.answered_at
        state.see_answer(KnownPresence(answer.presence, seen_at, answer.epoch, answer.lease_id))
        if state.asked_at is None and (lease := state.take_lease()):
            self._client.release(lease)  # the question has ended without it

    def _drop_lookup(self, tracked: _Tracked) -> None:
        if tracked.handle is not None:
            self._lookups.abandon(tracked.handle)
            tracked.handle = None
        tracked.state.lookup = None

    def _settle(self, tracked: _Tracked, reason: Reason, served_tokens: int) -> None:
        """End the open question of a request: count it, log it, tell the agent, give the lease back."""
        state, now = tracked.state, self._clock()
        if tracked.is_foreign and reason is Reason.ABSENT:
            reason = Reason.FOREIGN_NAMESPACE
        if lease := state.take_lease():
            self._client.release(lease)
        started = state.asked_at if state.asked_at is not None else now
        state.asked_at = None
        asked_tokens = len(state.keys) * (
            self._plan.tokens_per_chunk if self._plan is not None else 0
        )
        self._stats.outcome(
            OutcomeKind.LOOKUP,
            reason,
            asked=asked_tokens,
            served=served_tokens,
            duration_s=now - started,
        )
        self._client.report(
            Outcome(
                OutcomeKind.LOOKUP,
                reason,
                state.request_id,
                asked_tokens,
                served_tokens,
                round((now - started) * 1000),
            )
        )
        logger.debug(
            "lookup ended request=%s reason=%s asked_tokens=%d computed_tokens=%d served_tokens=%d",
            state.request_id, reason.label, asked_tokens, state.computed_tokens, served_tokens,
        )  # fmt: skip

    def _take_id(self) -> int:
        self._next_id += 1
        return self._next_id


def _loaded_by_others(scheduler_output: Any) -> frozenset[str]:
    """Requests whose pages another connector (under MultiConnector) writes during this very step. Whether it could is
    known after the step only, so they are saved in a later one; our own loads are asynchronous and never among them."""
    if not scheduler_output.has_sync_kv_loads:
        return frozenset()
    admitted = [request.req_id for request in scheduler_output.scheduled_new_reqs]
    return frozenset([*admitted, *scheduler_output.scheduled_cached_reqs.resumed_req_ids])
