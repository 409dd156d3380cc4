"""What the scheduler half decides for one request: pure, on a clock that the test sets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheservice.connector.hand_over import (
    HandOver,
    has_foreign_hand_over,
    read_hand_over,
    write_hand_over,
)
from cacheservice.connector.pins import Pins
from cacheservice.connector.requests import (
    PRESENCE_MAX_AGE_S,
    RETRY_AFTER_FAILURE_S,
    Decision,
    KnownPresence,
    Limits,
    Move,
    OpenLookup,
    RequestState,
    decide,
)  # fmt: skip
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.layout import GroupKind, GroupSpec
from cacheservice.core.outcomes import Presence, Reason

FULL = [GroupSpec(GroupKind.FULL, 16, num_layers=1, bytes_per_block=64)]
TOKENS = 64
LIMITS = Limits(lookup_s=0.1, pending_s=1.0)
READY, ELSEWHERE, PENDING, ABSENT = 1, 2, 3, 0


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def state_of(
    num_chunks: int = 5,
    codes: list[int] | None = None,
    *,
    now: float = 100.0,
    computed: int = 0,
    **changes,
):
    state = RequestState(
        "r",
        arrived_at=now,
        keys=[key(i) for i in range(num_chunks)],
        num_tokens=num_chunks * TOKENS + 10,
    )
    state.computed_tokens = computed
    if codes is not None:
        state.known = KnownPresence(bytes(codes), now, epoch=7, lease_id=3)
    for name, value in changes.items():
        setattr(state, name, value)
    return state


def ask(state: RequestState, now: float = 100.0) -> Decision:
    return decide(state, FULL, TOKENS, LIMITS, now)


@pytest.mark.parametrize(
    ("computed", "tokens"), [(0, 256), (16, 240), (112, 144), (240, 16), (256, 0), (336, 0)]
)
def test_the_answer_is_what_the_cache_has_beyond_what_is_computed_now(computed, tokens):
    state = state_of(6, [1, 1, 1, 1, 0, 0], computed=computed)
    decision = ask(state)
    assert decision.move is Move.ANSWER
    assert decision.tokens == tokens
    assert decision.reason is (Reason.HIT if tokens else Reason.ABSENT)


def test_nothing_is_remembered_but_presence():
    """The same state gives each of its answers again, in any order."""
    state = state_of(codes=[1, 1, 1, 1, 0])
    for computed in (0, 336, 112, 336, 0, 112):
        state.computed_tokens = computed
        assert ask(state).tokens == max(0, 256 - computed)


def test_without_presence_a_lookup_is_started():
    assert ask(state_of()).move is Move.LOOK_UP


def test_a_lookup_in_flight_is_waited_for_until_its_deadline():
    state = state_of(lookup=OpenLookup(100.0, 100.1, waits=False))
    assert ask(state, 100.05).move is Move.WAIT
    late = ask(state, 100.2)
    assert (late.move, late.tokens, late.reason) == (Move.ANSWER, 0, Reason.DEADLINE)


def test_old_presence_is_looked_up_again():
    state = state_of(codes=[1, 1, 1, 1, 1])
    assert ask(state, 100.0 + PRESENCE_MAX_AGE_S).move is Move.ANSWER
    assert ask(state, 100.01 + PRESENCE_MAX_AGE_S).move is Move.LOOK_UP


def test_after_a_failed_lookup_no_other_is_tried_for_a_while():
    state = state_of()
    state.see_failure(Reason.AGENT_DOWN, 100.0)
    assert ask(state, 100.5).reason is Reason.AGENT_DOWN
    assert ask(state, 100.5).move is Move.ANSWER
    assert ask(state, 100.0 + RETRY_AFTER_FAILURE_S).move is Move.LOOK_UP


def test_pending_chunks_are_waited_for_and_then_given_up():
    state = state_of(codes=[1, PENDING, 1, 0, 0])
    first = ask(state)
    assert (first.move, first.wait_chunks, first.is_hand_over) == (Move.LOOK_UP, 3, False)
    assert first.wait_s == pytest.approx(1.0)
    state.known = KnownPresence(bytes([1, PENDING, 1, 0, 0]), 100.5, 7, 3)
    assert ask(state, 100.5).wait_s == pytest.approx(0.5)
    state.known = KnownPresence(bytes([1, PENDING, 1, 0, 0]), 101.0, 7, 3)
    assert (ask(state, 101.0).move, ask(state, 101.0).tokens) == (Move.ANSWER, 64)


def test_pending_chunks_that_would_gain_nothing_are_not_waited_for():
    assert ask(state_of(codes=[PENDING, 1, 0, 0, 0], computed=128)).reason is Reason.ABSENT
    assert ask(state_of(codes=[1, 0, PENDING, 0, 0])).tokens == 64


def test_waits_do_not_follow_each_other_without_a_pause():
    state = state_of(codes=[PENDING, 0, 0, 0, 0], last_wait_at=99.995)
    assert ask(state).move is Move.WAIT


def hand_over(num_chunks: int = 3, wait_s: float = 2.0) -> HandOver:
    return HandOver(NamespaceDigest(bytes(32)), 1, 7, num_chunks, wait_s)


def test_a_hand_over_is_waited_for_even_when_nothing_is_pending_yet():
    state = state_of(codes=[1, 0, 0, 0, 0], hand_over=hand_over())
    decision = ask(state, 100.5)
    assert (decision.move, decision.wait_chunks, decision.is_hand_over) == (Move.LOOK_UP, 3, True)
    assert decision.wait_s == pytest.approx(1.5)


def test_a_hand_over_wait_counts_from_arrival_and_ends():
    state = state_of(codes=[1, 0, 0, 0, 0], hand_over=hand_over())
    state.known = KnownPresence(bytes([1, 0, 0, 0, 0]), 102.0, 7, 3)
    decision = ask(state, 102.0)
    assert (decision.move, decision.tokens) == (Move.ANSWER, 64)


@pytest.mark.parametrize(("block", "wait_chunks"), [(TOKENS, 4), (16, 0)])
def test_of_states_a_hand_over_is_waited_for_where_vllm_keeps_one(block, wait_chunks):
    """A prompt of exactly whole chunks can't use the state at its end. The one before is a block before that: at a
    chunk's end where a chunk is a block, else nowhere."""
    groups = [*FULL, GroupSpec(GroupKind.RECURRENT, block, num_layers=1, bytes_per_block=64)]
    state = state_of(codes=[1, 0] * 4 + [1, 1], hand_over=hand_over(5), num_tokens=5 * TOKENS)
    decision = decide(state, groups, TOKENS, LIMITS, 100.0)
    assert (decision.tokens, decision.wait_chunks) == (0, wait_chunks)
    # With a token more the state at the end is used, and waited for until it is there.
    state.num_tokens += 1
    assert decide(state, groups, TOKENS, LIMITS, 100.0).tokens == 5 * TOKENS
    state.known = KnownPresence(bytes([1, 0] * 5), 100.0, 7, 3)
    decision = decide(state, groups, TOKENS, LIMITS, 100.0)
    assert (decision.move, decision.wait_chunks, decision.is_hand_over) == (Move.LOOK_UP, 5, True)


def test_what_is_there_of_a_hand_over_is_used_at_once():
    assert ask(state_of(codes=[1, 2, 1, 0, 0], hand_over=hand_over())).tokens == 192
    assert ask(state_of(codes=[0, 0, 1, 0, 0], hand_over=hand_over(), computed=128)).tokens == 64


def test_after_a_failed_load_nothing_is_offered_until_a_preemption():
    """A second asynchronous load of a request can make vLLM 0.32 stand still: see RequestState.must_recompute."""
    state = state_of(codes=[1, 1, 1, 1, 1])
    state.see_failed_load(2, Reason.CHECKSUM)
    assert (ask(state).move, ask(state).tokens, ask(state).reason) == (
        Move.ANSWER,
        0,
        Reason.BANNED,
    )
    state.see_tokens(state.keys, state.num_tokens, 1)
    assert ask(state).move is Move.LOOK_UP


def test_a_failed_chunk_is_not_offered_again():
    state = state_of(codes=[1, 1, 1, 1, 1])
    state.see_failed_load(2, Reason.CHECKSUM)
    state.see_tokens(state.keys, state.num_tokens, 1)
    state.known = KnownPresence(bytes([1] * 5), 100.0, 7, 3)
    assert ask(state).tokens == 128
    state.computed_tokens = 128
    assert ask(state).reason is Reason.BANNED


def test_a_chunk_that_was_merely_gone_may_be_offered_after_a_preemption():
    state = state_of(codes=[1] * 5)
    state.see_failed_load(2, Reason.EVICTED)
    assert ask(state).tokens == 0
    state.see_tokens(state.keys, state.num_tokens, 1)
    state.known = KnownPresence(bytes([1] * 5), 100.0, 7, 3)
    assert ask(state).tokens == 320


def test_a_preemption_outdates_what_is_known_and_keeps_the_lease_for_the_next_lookup():
    state = state_of(codes=[1] * 5)
    state.see_tokens(state.keys, 330, 1)
    assert ask(state).move is Move.LOOK_UP
    assert state.take_lease() == 3
    assert state.take_lease() == 0


def test_what_an_agent_said_that_is_no_more_does_not_count():
    state = state_of(codes=[1] * 5, next_save=3)
    assert state.presence_of(4, 0, 1, epoch=7) is Presence(1)
    assert state.presence_of(4, 0, 1, epoch=8) is None
    assert state.presence_of(5, 0, 1, epoch=7) is None
    state.see_new_agent(8)
    assert state.next_save == 0
    assert ask(state).move is Move.LOOK_UP
    assert state.take_lease() == 3


def test_what_the_new_agent_said_already_counts():
    state = state_of(codes=[1] * 5)
    state.see_new_agent(7)
    assert ask(state).tokens == 320


def test_short_and_local_prompts_need_no_lookup():
    assert ask(state_of(0)).reason is Reason.TOO_SHORT
    assert ask(state_of(3, computed=192)).reason is Reason.LOCAL


codes = st.lists(st.sampled_from([0, 1, 1, 1, 2, 3]), max_size=6)


@given(
    known=codes, computed=st.integers(0, 30).map(lambda blocks: blocks * 16),
    banned=st.one_of(st.none(), st.integers(0, 6)), promised=st.one_of(st.none(), st.integers(1, 8)),
    wait_s=st.floats(0, 5), age=st.floats(0, 4),
)  # fmt: skip
@settings(max_examples=400)
def test_every_question_ends_with_a_safe_answer(known, computed, banned, promised, wait_s, age):
    """Whatever the agent says: never more than is there, never beyond the tokens, and never waiting for ever."""
    now = 100.0
    state = state_of(6, known, now=now - age, computed=computed, banned_from=banned)
    state.arrived_at = now
    state.num_tokens = max(computed, 6 * TOKENS)
    state.hand_over = hand_over(promised, wait_s) if promised else None
    for _ in range(2000):
        decision = ask(state, now)
        if decision.move is Move.ANSWER:
            break
        now += 0.011
        if decision.move is Move.LOOK_UP:
            state.last_wait_at = now if decision.wait_chunks else state.last_wait_at
            state.known = KnownPresence(bytes(known), now, 7, 0)
    else:
        raise AssertionError("no answer")
    assert now <= 100.0 + max(wait_s, LIMITS.pending_s) + 1.2
    end = computed + decision.tokens
    assert end <= state.num_tokens
    assert decision.tokens >= 0
    if decision.tokens:
        assert end % TOKENS == 0
        assert banned is None or end <= banned * TOKENS
        assert all(c in (READY, ELSEWHERE) for c in known[computed // TOKENS : end // TOKENS])
        assert len(known) >= end // TOKENS


@given(
    params=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.just("00" * 32),
        lambda inner: st.dictionaries(
            st.sampled_from(["larder", "namespace", "node", "epoch", "num_chunks", "wait_ms", "x"]), inner, max_size=6
        ) | st.lists(inner, max_size=3),
        max_leaves=12,
    )
)  # fmt: skip
def test_no_parameters_of_a_client_do_harm(params):
    read = read_hand_over(params, longest_wait_s=5.0)
    assert read is None or (0 <= read.wait_s <= 5.0 and read.num_chunks >= 1)
    has_foreign_hand_over(params)


def test_a_wait_of_any_size_is_clamped():
    params = write_hand_over(HandOver(NamespaceDigest(bytes(32)), 1, 1, 1, 1.0))
    params["larder"]["wait_ms"] = 10**400
    assert read_hand_over(params, longest_wait_s=5.0).wait_s == 5.0


def test_a_hand_over_survives_the_way_through_a_router():
    given_over = HandOver(NamespaceDigest(bytes(range(32))), 3, 2**32 - 1, 17, 1.25)
    assert read_hand_over(write_hand_over(given_over), longest_wait_s=5.0) == given_over
    assert read_hand_over(write_hand_over(given_over), longest_wait_s=0.5).wait_s == 0.5


class Pool:
    """As much of vLLM's BlockPool as pins touch."""

    def __init__(self, size: int) -> None:
        self.num_gpu_blocks = size
        self.blocks = [SimpleNamespace(block_id=i, ref_cnt=0) for i in range(size)]
        self.freed: list[int] = []

    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    def free_blocks(self, blocks):
        for block in blocks:
            block.ref_cnt -= 1
            self.freed.append(block.block_id)


def test_pins_end_when_all_ranks_reported():
    pool = Pool(40)
    pins = Pins(pool)
    pins.pin(1, [3, 4, 5], num_ranks=2, now=0.0)
    assert pins.num_blocks == 3
    assert pins.has_room(7)
    assert not pins.has_room(8)
    assert not pins.report(1, 1)
    assert pool.blocks[4].ref_cnt == 1
    assert pins.report(1, 1)
    assert pool.freed == [5, 4, 3]
    assert not pins.report(1, 1)
    assert pins.num_blocks == 0


def test_stuck_pins_are_not_worth_waiting_for():
    pins = Pins(Pool(40))
    assert not pins.are_worth_waiting_for(0.0)
    pins.pin(1, [3], num_ranks=1, now=0.0)
    assert pins.are_worth_waiting_for(0.1)
    assert not pins.are_worth_waiting_for(0.6)


def test_blocks_that_a_request_holds_too_are_not_worth_waiting_for():
    pool = Pool(40)
    pool.touch(pool.blocks[3:5])
    pins = Pins(pool)
    pins.pin(1, [3, 4], num_ranks=1, now=0.0)
    assert not pins.are_worth_waiting_for(0.1)
    pool.free_blocks(pool.blocks[4:5])
    assert pins.are_worth_waiting_for(0.1)
