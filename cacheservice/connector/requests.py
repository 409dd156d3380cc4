"""What the scheduler half knows of one request, and what it decides from it. Pure: no clock, no thread, no vLLM.

Invariants. Only presence is remembered, never an answer: vLLM asks again and again with another number of computed
tokens, and a remembered answer makes it load wrong ranges silently (docs/decisions/0003). Every question ends within
a deadline. A chunk that failed to load is not offered to the same request again. A state is made when the request
arrives and dropped when it finishes.

Called by: scheduler.py, in the engine's scheduling thread only.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from cacheservice.connector.hand_over import HandOver
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupKind, GroupSpec
from cacheservice.core.outcomes import Presence, Reason
from cacheservice.core.prefix import hit_tokens

READY = frozenset({Presence.READY_HERE, Presence.READY_ELSEWHERE})
READY_OR_PENDING = READY | {Presence.PENDING}
PRESENCE_MAX_AGE_S = 2.0
RETRY_AFTER_FAILURE_S = 2.0
WAIT_POLL_S = 0.02
MAX_LOOKUP_KEYS = 4096


@dataclass(frozen=True, slots=True)
class Limits:
    """The deadlines that decisions need, in seconds."""

    lookup_s: float
    pending_s: float


@dataclass(frozen=True, slots=True)
class KnownPresence:
    """What the agent said of the first chunks of a request."""

    codes: bytes
    """One Presence per chunk and group, chunk by chunk."""
    seen_at: float
    epoch: int
    lease_id: int


@dataclass(slots=True)
class OpenLookup:
    """A lookup on its way."""

    started_at: float
    deadline_at: float
    waits: bool
    """It waits at the agent for chunks that are being stored."""


class Move(enum.Enum):
    """What is to be done for a question of vLLM."""

    ANSWER = enum.auto()
    """Tell vLLM the number of tokens."""
    WAIT = enum.auto()
    """Tell vLLM to ask again in the next step."""
    LOOK_UP = enum.auto()
    """Start a lookup, then decide again."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What is to be done, and how the question would end if it ended now."""

    move: Move
    reason: Reason
    tokens: int = 0
    """For ANSWER: how many tokens beyond the computed ones can be loaded."""
    wait_chunks: int = 0
    """For LOOK_UP: wait at the agent for the first so many chunks; 0 = don't wait."""
    wait_s: float = 0.0
    is_hand_over: bool = False


@dataclass(slots=True)
class RequestState:
    """One request. Times are of one monotonic clock."""

    request_id: str
    arrived_at: float
    keys: list[ChunkKey] = field(default_factory=list)
    num_tokens: int = 0
    num_preemptions: int = 0
    hand_over: HandOver | None = None
    known: KnownPresence | None = None
    lookup: OpenLookup | None = None
    failed_at: float | None = None
    """When a lookup last failed; no other is tried for a while."""
    failure: Reason = Reason.ABSENT
    pending_since: float | None = None
    crowded_since: float | None = None
    """Since when a hit has waited for room beside other loads (room.py)."""
    last_wait_at: float | None = None
    banned_from: int | None = None
    """Chunks from this number on are not offered to this request again."""
    must_recompute: bool = False
    """A load of this request failed: nothing is offered to it until it is preempted.

    vLLM 0.32 keeps such a request among those that it holds blocks back for (v1/core/sched/scheduler.py,
    `_inflight_prefills`), so a second asynchronous load has to fit beside the request's own reservation. On a pool of
    less than twice the prompt it never does, and the whole queue stands still behind it. Seen with two failed loads on
    40 blocks.
    """
    asked_at: float | None = None
    """Start of the question that is open; None when the last one ended."""
    computed_tokens: int = 0
    """What vLLM had computed when it asked last."""
    offered: int = 0
    """The last answer: what update_state_after_alloc may authorise."""
    reason: Reason = Reason.ABSENT
    load_id: int | None = None
    next_save: int = 0
    """Chunks before this one are saved, were known to be there, or can't be saved."""
    num_promised: int = 0
    """The cache has, or will have, all that a hit of so many chunks needs."""
    saves_forbidden: bool = False

    def see_tokens(self, keys: Sequence[ChunkKey], num_tokens: int, num_preemptions: int) -> None:
        """Note how long the request is now. More chunks, or a preemption, make what was known outdated."""
        if num_preemptions != self.num_preemptions or len(keys) > len(self.keys):
            self.forget_presence()
            self.must_recompute &= num_preemptions == self.num_preemptions
            self.keys = list(keys)
            self.num_preemptions = num_preemptions
        self.num_tokens = num_tokens

    def forget_presence(self) -> None:
        """What the agent said does not count any more. The lease, if any, is kept to be superseded."""
        if self.known is not None:
            self.known = KnownPresence(b"", float("-inf"), self.known.epoch, self.known.lease_id)
        self.failed_at = None

    def see_new_agent(self, epoch: int | None) -> None:
        """The agent was restarted: it has nothing of what was saved or seen before."""
        self.next_save = self.num_promised = 0
        if self.known is not None and self.known.epoch != epoch:
            self.forget_presence()

    def take_lease(self) -> int:
        """The lease that goes to a load, or is to be given back; 0 for none. It is not this state's any more."""
        if self.known is None or not self.known.lease_id:
            return 0
        lease_id = self.known.lease_id
        self.known = KnownPresence(self.known.codes, self.known.seen_at, self.known.epoch, 0)
        return lease_id

    def see_answer(self, answer: KnownPresence) -> None:
        """A lookup was answered."""
        self.lookup = None
        self.known = answer
        self.failed_at = None

    def see_failure(self, reason: Reason, now: float) -> None:
        """A lookup ended without an answer, or was given up."""
        self.failed_at = now
        self.failure = reason

    def see_failed_load(self, first_failed_chunk: int, reason: Reason) -> None:
        """A load failed from this chunk on. What was merely gone at acquire is no reason to distrust the chunk."""
        self.forget_presence()
        self.must_recompute = True
        if reason is Reason.EVICTED:
            return
        if self.banned_from is None or first_failed_chunk < self.banned_from:
            self.banned_from = first_failed_chunk

    def presence_of(
        self, chunk: int, group: int, num_groups: int, *, epoch: int | None
    ) -> Presence | None:
        """What this incarnation of the agent last said of one group of this chunk; None when it said nothing."""
        position = chunk * num_groups + group
        if self.known is None or self.known.epoch != epoch or position >= len(self.known.codes):
            return None
        return Presence(self.known.codes[position])


def decide(
    state: RequestState,
    groups: Sequence[GroupSpec],
    tokens_per_chunk: int,
    limits: Limits,
    now: float,
) -> Decision:
    """What to tell vLLM, which has `state.computed_tokens` of `state.num_tokens` tokens computed now."""
    computed = state.computed_tokens
    num_chunks = min(len(state.keys), MAX_LOOKUP_KEYS)
    if not num_chunks:
        return Decision(Move.ANSWER, Reason.TOO_SHORT)
    if computed >= num_chunks * tokens_per_chunk:
        return Decision(Move.ANSWER, Reason.LOCAL)
    if state.banned_from is not None and computed >= state.banned_from * tokens_per_chunk:
        return Decision(Move.ANSWER, Reason.BANNED)
    if state.must_recompute:
        return Decision(Move.ANSWER, Reason.BANNED)

    def hit(there: Collection[int], codes: bytes) -> int:
        return hit_tokens(
            groups, codes, there=there, tokens_per_chunk=tokens_per_chunk, computed_tokens=computed,
            num_tokens=state.num_tokens, max_chunks=state.banned_from,
        )  # fmt: skip

    is_fresh = state.known is not None and now - state.known.seen_at <= PRESENCE_MAX_AGE_S
    if state.lookup is not None and now < state.lookup.deadline_at:
        return Decision(Move.WAIT, Reason.DEADLINE)
    if state.lookup is not None:
        # It is late. Go on with what an earlier one said, if that is not too old; take this one's answer if it comes.
        reason = Reason.PENDING_TIMED_OUT if state.lookup.waits else Reason.DEADLINE
        end = hit(READY, state.known.codes) if is_fresh and state.known is not None else 0
        return _answer(end, computed, reason)
    if not is_fresh:
        if state.failed_at is not None and now - state.failed_at < RETRY_AFTER_FAILURE_S:
            return Decision(Move.ANSWER, state.failure)
        return Decision(Move.LOOK_UP, Reason.DEADLINE)

    assert state.known is not None
    end = hit(READY, state.known.codes)
    promised = 0
    if state.hand_over is not None:
        promised_chunks = min(state.hand_over.num_chunks, num_chunks)
        promised = hit(
            READY, _kept_promise(groups, tokens_per_chunk, promised_chunks, state.num_tokens)
        )
    wait_end, wait_until, is_hand_over = _worth_waiting_for(
        state, end, hit(READY_OR_PENDING, state.known.codes), promised, limits, now
    )
    wait_chunks = wait_end // tokens_per_chunk
    if not wait_chunks:
        return _answer(end, computed, Reason.ABSENT)
    if now >= wait_until:
        return _answer(end, computed, Reason.PENDING_TIMED_OUT)
    if state.last_wait_at is not None and now - state.last_wait_at < WAIT_POLL_S:
        return Decision(Move.WAIT, Reason.PENDING_TIMED_OUT)
    return Decision(
        Move.LOOK_UP,
        Reason.PENDING_TIMED_OUT,
        wait_chunks=wait_chunks,
        wait_s=wait_until - now,
        is_hand_over=is_hand_over,
    )


def _kept_promise(
    groups: Sequence[GroupSpec], tokens_per_chunk: int, num_chunks: int, num_tokens: int
) -> bytes:
    """Presence when a hand-over is kept.

    Of recurrent states there are the one at its end, and the one at the last block boundary that leaves a token to
    compute (vLLM 0.32, v1/kv_cache_interface.py `get_mamba_prefill_checkpoint_position`). They differ for prompts of
    exactly whole blocks, and the second need not be at a chunk's end.
    """
    codes = bytearray([Presence.READY_HERE]) * (num_chunks * len(groups))
    for number, group in enumerate(groups):
        if group.kind is GroupKind.RECURRENT:
            kept = (num_tokens - 1) // group.block_tokens * group.block_tokens
            before_end = bytes([Presence.ABSENT]) * (num_chunks - 1)
            codes[number : (num_chunks - 1) * len(groups) : len(groups)] = before_end
            chunk, rest = divmod(kept, tokens_per_chunk)
            if not rest and 0 < chunk < num_chunks:
                codes[(chunk - 1) * len(groups) + number] = Presence.READY_HERE
    return bytes(codes)


def _answer(end: int, computed: int, otherwise: Reason) -> Decision:
    tokens = max(0, end - computed)
    return Decision(Move.ANSWER, Reason.HIT if tokens else otherwise, tokens)


def _worth_waiting_for(
    state: RequestState, end: int, end_with_pending: int, end_promised: int, limits: Limits, now: float
) -> tuple[int, float, bool]:  # fmt: skip
    """(end of the hit to wait for or 0, until when, whether a hand-over promised it).

    `end` is what could be had now, the others what it would be when all that is pending, or was promised, is there.
    """
    at_hand = max(end, state.computed_tokens)
    if state.hand_over is not None and end_promised > at_hand:
        until = state.arrived_at + state.hand_over.wait_s
        if now < until or end_with_pending <= at_hand:
            return end_promised, until, True
    if end_with_pending > at_hand:
        if state.pending_since is None:
            state.pending_since = now
        return end_with_pending, state.pending_since + limits.pending_s, False
    return 0, 0.0, False
