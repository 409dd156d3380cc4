"""The connector under vLLM's own scheduler: what it answers, loads and saves, checked page by page."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from connector_fakes import FakeCache
from threaded_harness import Harness, prompt

from cacheservice.connector.requests import PRESENCE_MAX_AGE_S, Move, RequestState
from cacheservice.core.outcomes import OutcomeKind, Reason


@pytest.fixture
def cache():
    return FakeCache()


@pytest.fixture
def make(monkeypatch, cache):
    made = []

    def build(**options):
        made.append(Harness(monkeypatch, options.pop("cache", cache), **options))
        return made[-1]

    yield build
    for harness in made:
        harness.close()


def wait_quietly(gate, timeout_s=5.0):
    gate.wait(timeout_s)


def lookups(cache, request_id=None):
    return [
        o.reason
        for o in cache.outcomes
        if o.kind is OutcomeKind.LOOKUP and request_id in (None, o.request_id)
    ]


def test_what_one_engine_stored_another_loads(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    first.check_at_rest()
    assert len(cache.shards) == 4
    second = make()
    second.add("b", prompt(1, 300))
    second.run()
    second.check_at_rest()
    assert ("b", 0, 300, 256) in second.answers
    assert lookups(cache, "b") == [Reason.HIT]
    assert [o.served_tokens for o in cache.outcomes if o.kind is OutcomeKind.LOAD] == [256]


def test_an_engine_whose_pages_cannot_be_described_runs_without_cache_and_says_so_once(
    make, cache, monkeypatch, caplog
):
    import cacheservice.connector.connector as module

    def fails(*arguments):
        raise KeyError("kv_cache_dtype")

    monkeypatch.setattr(module, "_attention_of", fails)
    harness = make()
    harness.add("a", prompt(1, 300))
    harness.run()
    harness.check_at_rest()
    assert harness.half.reset_cache()
    assert not cache.shards
    assert {answer for *_, answer in harness.answers} == {0}
    said = [r.getMessage() for r in caplog.records if "runs without cache" in r.getMessage()]
    assert len(said) == 1
    assert "KeyError" in said[0]
    assert not any("private namespace" in r.getMessage() for r in caplog.records)


def test_nothing_is_stored_twice(make, cache):
    harness = make()
    for name in "abc":
        harness.add(name, prompt(1, 300))
        harness.run()
    assert sum(c.num_stored for c in harness.clients) == 4
    assert sum(o.kind is OutcomeKind.SAVE for o in cache.outcomes) == 1


def test_chunked_prefill_saves_each_chunk_when_it_is_complete(make, cache):
    harness = make(max_batched_tokens=100)
    harness.add("a", prompt(1, 500))
    handed_over = [
        [
            chunk.number
            for save in harness.step().kv_connector_metadata.saves
            for chunk in save.chunks
        ]
        for _ in range(5)
    ]
    assert handed_over == [[0], [1, 2], [3], [4, 5], [6]]
    harness.run()
    harness.check_at_rest()
    assert len(cache.shards) == 7


def test_generated_tokens_are_saved_too(make, cache):
    harness = make()
    harness.add("a", prompt(1, 60), max_tokens=80)
    harness.run()
    assert len(cache.shards) == 2


@pytest.mark.parametrize("with_prefix_caching", [True, False])
def test_preempted_requests_resume_from_the_cache_with_the_right_range(
    make, cache, with_prefix_caching
):
    """The 256-against-336 case: the store holds less than the engine; an answer that is remembered loads wrong
    ranges."""
    cache.fail_store = lambda write: Reason.NO_SPACE if write.number >= 4 else None
    first = make(num_blocks=400)
    for i in (1, 2):
        first.add(str(i), prompt(i, 400), max_tokens=1)
    first.run()
    harness = make(
        num_blocks=46, max_batched_tokens=336, max_seqs=4, prefix_caching=with_prefix_caching
    )
    requests = [harness.add(str(i), prompt(i, 400), max_tokens=200) for i in (1, 2)]
    harness.run()
    harness.check_at_rest()
    assert sum(r.num_preemptions for r in requests) >= 1
    for _, computed, _, answer in harness.answers:
        assert answer in (None, max(0, 256 - computed))
    if with_prefix_caching:
        assert any(computed > 256 and answer == 0 for _, computed, _, answer in harness.answers)
        assert any(
            0 < computed < 256 and answer == 256 - computed
            for _, computed, _, answer in harness.answers
        )
    loads = [o for o in cache.outcomes if o.kind is OutcomeKind.LOAD]
    assert loads
    assert all(o.reason is Reason.HIT for o in loads)


@pytest.mark.parametrize("num_good", range(5))
def test_failed_loads_are_not_offered_again(make, cache, num_good):
    first = make()
    first.add("a", prompt(1, 330))
    first.run()
    harness = make()
    bad = list(first.half._saves._recent)[num_good][0]
    cache.fail_retrieve = lambda read: Reason.CHECKSUM if read.chunk == bad else None
    harness.add("b", prompt(1, 330))
    harness.run()
    harness.check_at_rest()
    answers = [a for *_, a in harness.answers if a is not None]
    assert answers == [320, 0]
    reasons = [o.reason for o in cache.outcomes if o.kind is OutcomeKind.LOAD]
    assert reasons == [Reason.CHECKSUM]


def test_what_is_gone_at_acquire_is_computed_and_stored_again(make, cache):
    first = make()
    first.add("a", prompt(1, 330))
    first.run()
    harness = make()

    def lose(read):
        cache.shards.clear()

    cache.fail_retrieve = lose
    harness.add("b", prompt(1, 330))
    harness.run()
    harness.check_at_rest()
    assert [a for *_, a in harness.answers if a is not None] == [320, 0]
    assert [o.reason for o in cache.outcomes if o.kind is OutcomeKind.LOAD] == [Reason.EVICTED]
    assert len(cache.shards) == 5


@pytest.mark.parametrize("with_prefix_caching", [True, False])
@pytest.mark.parametrize("reserve_full", [True, False])
def test_failed_loads_on_a_small_pool_do_not_stop_the_queue(
    make, cache, reserve_full, with_prefix_caching
):
    """Two prompts that together just fit, both loads fail, more requests wait behind them."""
    first = make(num_blocks=400, tokens_per_chunk=48)
    for i in range(4):
        first.add(str(i), prompt(i, 420))
    first.run()
    harness = make(
        num_blocks=40,
        tokens_per_chunk=48,
        max_batched_tokens=64,
        prefix_caching=with_prefix_caching,
    )
    harness.scheduler.scheduler_reserve_full_isl = reserve_full
    cache.fail_retrieve = lambda read: (
        Reason.CHECKSUM
        if read.chunk in [key for key, _ in first.half._saves._recent][5::8]
        else None
    )
    for i in range(4):
        harness.add(f"b{i}", prompt(i, 300 + 30 * i, prompt(i, 290)), max_tokens=30)
    harness.run(limit=3000)
    harness.check_at_rest()
    assert Reason.CHECKSUM in [o.reason for o in cache.outcomes if o.kind is OutcomeKind.LOAD]


def test_requests_end_well_whenever_they_are_aborted(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    harness = make()
    for step in range(12):
        harness.add(f"b{step}", prompt(1, 300, prompt(1, 256)), max_tokens=3)
        for _ in range(step):
            harness.step()
        harness.abort(f"b{step}")
        harness.run()
        harness.scheduler.kv_cache_manager.reset_prefix_cache()
    harness.check_at_rest()


def test_an_abort_between_plan_and_metadata_frees_the_blocks(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    harness = make()
    gate = threading.Event()
    cache.fail_retrieve = lambda read: None if gate.wait(2) else Reason.DEADLINE
    harness.add("b", prompt(1, 300))
    harness.run(lambda: bool(harness.half._open_loads), limit=200)
    harness.abort("b")
    for _ in range(5):
        harness.step()
    assert (
        harness.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() < harness.num_blocks - 1
    )
    gate.set()
    harness.run()
    harness.check_at_rest()


def test_pins_are_bounded_and_released(make, cache):
    gate = threading.Event()
    cache.fail_store = lambda write: wait_quietly(gate)
    harness = make(num_blocks=64)
    for i in range(3):
        harness.add(str(i), prompt(i, 250), max_tokens=1)
    for _ in range(6):
        harness.step()
        assert harness.half._saves.num_pinned_blocks <= 16
    assert harness.half._saves.num_pinned_blocks == 16
    assert harness.scheduler.connector.has_pending_block_frees()
    gate.set()
    harness.run()
    harness.check_at_rest()
    assert Reason.SHED in [o.reason for o in cache.outcomes if o.kind is OutcomeKind.SAVE]


def test_full_pins_cost_no_look_at_block_tables(make, cache):
    gate = threading.Event()
    cache.fail_store = lambda write: wait_quietly(gate)
    harness = make(num_blocks=64)
    for i in range(3):
        harness.add(str(i), prompt(i, 250), max_tokens=40)
    for _ in range(6):
        harness.step()
    assert harness.half._saves.num_pinned_blocks == 16
    looked = []
    state = SimpleNamespace(get_block_ids=looked.append, boundary_state_offloads={})
    scheduled = dict.fromkeys(harness.scheduler.requests, 1)
    output = SimpleNamespace(
        num_scheduled_tokens=scheduled, kv_connector_block_state=state, has_sync_kv_loads=False
    )
    assert harness.half.build_metadata(output).saves == []
    assert looked == []
    gate.set()
    harness.run()
    harness.check_at_rest()


def test_a_step_hands_over_only_so_much(make, cache, monkeypatch):
    import cacheservice.connector.saves as module

    monkeypatch.setattr(module, "MAX_BLOCKS_PER_STEP", 9)
    harness = make(num_blocks=200)
    for i in range(3):
        harness.add(str(i), prompt(i, 130), max_tokens=20)
    sizes = []
    while harness.scheduler.has_requests():
        saves = harness.step().kv_connector_metadata.saves
        sizes.append(sum(len(s.chunks) for s in saves))
    assert [s for s in sizes if s] == [2, 2, 2]
    harness.check_at_rest()


@pytest.mark.parametrize(("num_blocks", "is_said"), [(12, True), (64, False)])
def test_a_chunk_that_can_never_be_pinned_is_said_once(make, cache, caplog, num_blocks, is_said):
    harness = make(num_blocks=num_blocks)
    harness.add("a", prompt(1, 100))
    harness.run()
    harness.half.reset_cache()
    said = [r for r in caplog.records if "--num-gpu-blocks-override" in r.getMessage()]
    assert [r.levelname for r in said] == ["WARNING"] * is_said


def test_pinned_blocks_keep_their_bytes_while_others_allocate(make, cache):
    gate = threading.Event()
    cache.fail_store = lambda write: wait_quietly(gate)
    harness = make(num_blocks=64, prefix_caching=False)
    harness.add("a", prompt(1, 64), max_tokens=1)
    harness.run(lambda: not harness.scheduler.requests)
    assert harness.scheduler.has_requests()
    for i in range(10, 16):
        harness.add(str(i), prompt(i, 63), max_tokens=2)
    harness.run(lambda: not harness.scheduler.requests)
    gate.set()
    harness.run()
    harness.check_at_rest()
    other = make()
    other.add("b", prompt(1, 80))
    other.run()
    assert ("b", 0, 80, 64) in other.answers  # and the page oracle has checked what was loaded


def test_a_missing_agent_costs_nothing_and_is_used_when_it_comes(make, cache):
    cache.is_up = False
    harness = make()
    harness.add("a", prompt(1, 300), max_tokens=20)
    for _ in range(4):
        harness.step()
    assert harness.answers == [("a", 0, 300, 0)]
    cache.is_up = True
    harness.run()
    harness.check_at_rest()
    assert lookups(cache, "a") == [Reason.AGENT_DOWN]
    assert len(cache.shards) == 4


def test_an_agent_that_vanishes_during_a_load_means_recompute(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    harness = make()

    def vanish(read):
        cache.is_up = False

    cache.fail_retrieve = vanish
    harness.add("b", prompt(1, 300))
    harness.run()
    harness.check_at_rest()
    assert [o.reason for o in cache.outcomes if o.kind is OutcomeKind.LOAD] == [Reason.AGENT_DOWN]


def test_an_agent_that_restarts_between_plan_and_load_means_recompute(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    harness = make()
    original = harness.half.after_alloc

    def restart(*arguments):
        original(*arguments)
        cache.epoch += 1

    harness.half.after_alloc = restart
    harness.add("b", prompt(1, 300))
    harness.run()
    harness.check_at_rest()
    assert [o.reason for o in cache.outcomes if o.kind is OutcomeKind.LOAD] == [
        Reason.EPOCH_CHANGED
    ]


def test_what_a_restarted_agent_lost_is_stored_again_and_not_promised(make, cache):
    harness = make(prefix_caching=False)
    harness.add("a", prompt(1, 300), max_tokens=200)
    harness.run(lambda: len(cache.shards) == 4)
    cache.epoch += 1
    cache.shards.clear()
    harness.step()
    harness.run(lambda: len(cache.shards) >= 4)
    cache.epoch += 1
    cache.shards.clear()
    request = harness.scheduler.requests["a"]
    assert (
        harness.half.request_finished(request) is None
    )  # before the next step has seen the new agent
    harness.run()


def test_a_chunk_known_from_a_dead_agent_is_stored(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    cache.fail_retrieve = lambda read: Reason.CHECKSUM
    harness = make()
    harness.add("b", prompt(1, 300), max_tokens=60)
    harness.run(lambda: any(a[3] for a in harness.answers))
    cache.epoch += 1
    cache.shards.clear()
    harness.run()
    harness.check_at_rest()
    assert len(cache.shards) == 5


def test_a_lookup_that_is_late_delays_a_request_by_its_deadline_only(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    harness = make(lookup_ms=700)
    cache.lookup_gate = threading.Event()
    harness.add("b", prompt(1, 300))
    harness.step()
    assert harness.answers[-1][3] is None
    harness.run(lambda: bool(harness.finished), limit=20000)
    assert harness.answers[-1][3] == 0
    assert lookups(cache, "b") == [Reason.DEADLINE]
    cache.lookup_gate.set()
    harness.run()
    harness.check_at_rest()


def test_what_was_seen_at_arrival_is_looked_up_again_after_a_long_wait_in_the_queue(make, cache):
    harness = make()
    harness.add("b", prompt(1, 300))
    handle = harness.half._tracked["b"].handle
    assert handle.done.wait(5)
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    handle.answered_at -= PRESENCE_MAX_AGE_S + 1
    harness.run()
    harness.check_at_rest()
    assert ("b", 0, 300, 256) in harness.answers


def test_chunks_that_are_being_stored_are_waited_for(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    key = next(k for k in cache.shards if k[1] == list(first.half._saves._recent)[2][0])
    content = cache.shards.pop(key)
    cache.pending.add((key[0], key[1]))
    harness = make()
    harness.add("b", prompt(1, 300))
    for _ in range(5):
        harness.step()
    assert harness.answers[-1][3] is None
    with cache.lock:
        cache.shards[key] = content
        cache.pending.clear()
    harness.run()
    harness.check_at_rest()
    assert ("b", 0, 300, 256) in harness.answers


def test_chunks_that_stay_pending_time_out(make, cache):
    first = make()
    first.add("a", prompt(1, 300))
    first.run()
    key = next(k for k in cache.shards if k[1] == next(iter(first.half._saves._recent))[0])
    del cache.shards[key]
    cache.pending.add((key[0], key[1]))
    harness = make(pending_ms=60)
    harness.add("b", prompt(1, 300))
    harness.run()
    harness.check_at_rest()
    assert lookups(cache, "b") == [Reason.PENDING_TIMED_OUT]


def test_a_hand_over_is_waited_for(make, cache):
    first = make()
    first.add("a", prompt(1, 300), max_tokens=1)
    first.run()
    params = first.finished["a"]
    assert params["larder"]["num_chunks"] == 4
    stored, cache.shards = cache.shards, {}
    harness = make()
    harness.add("b", prompt(1, 300), kv_transfer_params=params)
    for _ in range(5):
        harness.step()
    assert harness.answers[-1][3] is None
    with cache.lock:
        cache.shards.update(stored)
    harness.run()
    harness.check_at_rest()
    assert ("b", 0, 300, 256) in harness.answers


def test_a_reset_ends_the_wait_for_an_old_hand_over(make, cache):
    first = make()
    first.add("a", prompt(1, 300), max_tokens=1)
    first.run()
    cache.shards.clear()
    harness = make()
    harness.add("b", prompt(1, 300), kv_transfer_params=first.finished["a"])
    for _ in range(5):
        harness.step()
    assert harness.answers[-1][3] is None
    harness.half.reset_cache()
    harness.run()
    harness.check_at_rest()
    assert lookups(cache, "b") == [Reason.ABSENT]


def test_a_hand_over_that_never_comes_ends_at_its_own_wait(make, cache):
    first = make()
    first.add("a", prompt(1, 300), max_tokens=1)
    first.run()
    params = {"larder": {**first.finished["a"]["larder"], "wait_ms": 80}}
    cache.shards.clear()
    harness = make()
    harness.add("b", prompt(1, 300), kv_transfer_params=params)
    harness.run()
    harness.check_at_rest()
    assert lookups(cache, "b") == [Reason.PENDING_TIMED_OUT]


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "00" * 32}, {"namespace": 5}, {"namespace": "zz"}, {"num_chunks": 0}, {"num_chunks": 10**9},
        {"node": -1}, {"node": True}, {"epoch": 2**40}, {"wait_ms": "soon"}, {"wait_ms": -5},
    ],
)  # fmt: skip
def test_a_foreign_or_malformed_hand_over_is_ignored(make, cache, change):
    harness = make()
    good = {
        "namespace": harness.half.plan.digest.hex(),
        "node": 1,
        "epoch": 7,
        "num_chunks": 4,
        "wait_ms": 5000,
    }
    harness.add(
        "b",
        prompt(1, 300),
        kv_transfer_params={"larder": {**good, **change}, "do_remote_decode": True},
    )
    harness.step()
    harness.run()
    harness.check_at_rest()
    assert lookups(cache, "b") == [Reason.FOREIGN_NAMESPACE]


def test_parameters_of_other_connectors_mean_nothing(make, cache):
    harness = make()
    harness.add(
        "b", prompt(1, 300), kv_transfer_params={"do_remote_prefill": False, "remote_host": None}
    )
    harness.run()
    assert lookups(cache, "b") == [Reason.ABSENT]


def test_a_reset_gives_the_engine_a_namespace_of_its_own(make, cache):
    harness = make()
    old = harness.half.plan.digest
    harness.add("a", prompt(1, 300))
    harness.run()
    assert harness.scheduler.reset_prefix_cache(reset_connector=True)
    assert harness.half.plan.digest != old
    harness.add("b", prompt(1, 300))
    harness.run()
    harness.check_at_rest()
    assert lookups(cache, "b") == [Reason.ABSENT]
    assert {k[0] for k in cache.shards} == {old, harness.half.plan.digest}


def test_pages_from_before_a_reset_are_never_stored(make, cache):
    harness = make(max_batched_tokens=128)
    harness.add("a", prompt(1, 300))
    harness.step()
    old = harness.half.plan.digest
    harness.scheduler.reset_connector_cache()
    harness.run()
    harness.check_at_rest()
    assert {k[0] for k in cache.shards} <= {old}


def test_short_prompts_and_local_hits_are_told_apart(make, cache):
    harness = make()
    harness.add("short", prompt(1, 40))
    harness.run()
    assert lookups(cache, "short") == [Reason.TOO_SHORT]
    harness.add("a", prompt(2, 200))
    harness.run()
    harness.add("b", prompt(2, 200))
    harness.run()
    harness.check_at_rest()
    assert lookups(cache, "b") == [Reason.LOCAL]


def test_metadata_of_other_connectors_is_ignored(make, cache):
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorWorkerMetadata,
    )

    class Foreign(KVConnectorMetadata):
        pass

    class ForeignReports(KVConnectorWorkerMetadata):
        def aggregate(self, other):
            return self

    harness = make()
    harness.worker.bind_connector_metadata(Foreign())
    harness.worker.start_load_kv(None)
    harness.worker.wait_for_save()
    harness.half.see_worker_metadata(ForeignReports())
    harness.add("a", prompt(1, 100))
    harness.run()
    harness.check_at_rest()


def test_a_reset_before_the_facts_came_counts_too(monkeypatch, make, cache):
    from cacheservice.connector.connector import LarderConnector

    shared = make().half.plan.digest
    with monkeypatch.context() as patch:
        patch.setattr(
            LarderConnector, "set_xfer_handshake_metadata_pp_aware", lambda self, metadata: None
        )
        harness = make()
    assert harness.half.reset_cache()
    harness.add("a", prompt(1, 300))
    harness.run()
    harness.add("b", prompt(2, 300))
    harness.run()
    harness.check_at_rest()
    assert {k[0] for k in cache.shards} == {harness.half.plan.digest}
    assert harness.half.plan.digest != shared


def test_facts_that_come_late_are_enough(monkeypatch, make, cache):
    """Under MultiConnector only the first child gets handshake metadata; ours may be the second."""
    from cacheservice.connector.connector import LarderConnector

    with monkeypatch.context() as patch:
        patch.setattr(
            LarderConnector, "set_xfer_handshake_metadata_pp_aware", lambda self, metadata: None
        )
        harness = make()
    assert harness.half.plan is None
    harness.add("a", prompt(1, 100))
    harness.run()
    harness.add("b", prompt(2, 300))
    harness.run()
    harness.check_at_rest()
    assert len(cache.shards) == 5  # those that were computed before the facts came, too


@pytest.mark.parametrize("seed", range(12))
def test_random_life_leaves_nothing_behind(make, cache, seed):
    """Requests of shared prefixes come, go, are preempted and aborted, while agent, loads and stores fail at random."""
    rng = random.Random(seed)
    harness = make(
        num_blocks=rng.choice([40, 64, 200]), max_batched_tokens=rng.choice([64, 130, 512]),
        tokens_per_chunk=rng.choice([16, 48, 64]),
        prefix_caching=rng.random() < 0.5, lookup_ms=20, pending_ms=20, hand_over_ms=30,
    )  # fmt: skip
    faults = [None] * 12 + [Reason.EVICTED, Reason.CHECKSUM, Reason.LEASE_LOST, Reason.DEADLINE]
    cache.fail_retrieve = lambda read: rng.choice(faults)
    cache.fail_store = lambda write: rng.choice(faults[2:])
    params = [None]
    alive = []
    for number in range(120):
        action = rng.random()
        if action < 0.25 and len(alive) < 6:
            name = str(number)
            shared = prompt(rng.randrange(3), rng.randrange(20, 400))
            extra = {"kv_transfer_params": given} if (given := rng.choice(params)) else {}
            harness.add(
                name,
                prompt(number, len(shared) + rng.randrange(60), shared),
                rng.randrange(1, 60),
                **extra,
            )
            alive.append(name)
        elif action < 0.30 and alive:
            harness.abort(alive.pop(rng.randrange(len(alive))))
        elif action < 0.33:
            cache.is_up = not cache.is_up
        elif action < 0.35:
            cache.epoch += 1
            cache.shards.clear()
        for _ in range(rng.randrange(6)):
            harness.step()
        params.extend(p for p in harness.finished.values() if p)
        alive = [a for a in alive if a in harness.scheduler.requests]
    harness.run()
    harness.check_at_rest()


def remembered_answer(monkeypatch):
    """The first answer is given again, whatever is computed meanwhile."""
    import cacheservice.connector.scheduler as module

    original, memo = module.decide, {}

    def decide(state, *arguments):
        decision = original(state, *arguments)
        if decision.move is module.Move.ANSWER:
            decision = memo.setdefault(state.request_id, decision)
        return decision

    monkeypatch.setattr(module, "decide", decide)


def answer_without_subtraction(monkeypatch):
    """The end of the hit instead of what it gains."""
    import cacheservice.connector.requests as module

    monkeypatch.setattr(
        module,
        "_answer",
        lambda end, computed, otherwise: module.Decision(Move.ANSWER, Reason.HIT, end),
    )


def load_shifted_by_a_block(monkeypatch):
    """A load writes what belongs into block i into block i + 1 of the request."""
    import cacheservice.connector.shards as module

    original = module.RankShards.reads

    def reads(self, job, copier, after):
        shifted = tuple((*ids[1:], ids[0]) for ids in job.block_ids)
        return original(self, replace(job, block_ids=shifted), copier, after)

    monkeypatch.setattr(module.RankShards, "reads", reads)


def load_starts_at_the_chunk(monkeypatch):
    """A load that starts within a chunk reads from the chunk's start."""
    import cacheservice.connector.shards as module

    original = module.RankShards.reads

    def reads(self, job, copier, after):
        made = original(self, job, copier, after)
        first = made[0].shard
        if first.start:
            wrong = replace(
                first,
                start=0,
                stop=first.stop - first.start,
                sink=ShiftedSink(first.sink, first.start),
            )
            made[0] = replace(made[0], shard=wrong)
        return made

    monkeypatch.setattr(module.RankShards, "reads", reads)


class ShiftedSink:
    def __init__(self, sink, by):
        self.sink, self.by = sink, by

    def scatter(self, start, stop, source):
        self.sink.scatter(start + self.by, stop + self.by, source)


def save_of_other_blocks(monkeypatch):
    """A save reads the blocks of the chunk before."""
    import cacheservice.connector.saves as module

    original = module.SaveChunk
    monkeypatch.setattr(
        module,
        "SaveChunk",
        lambda key, parent, number, ids: original(key, parent, number, tuple(i[::-1] for i in ids)),
    )


def unpinned_saves(monkeypatch):
    """Blocks of a save in flight can be reused."""
    import cacheservice.connector.pins as module

    monkeypatch.setattr(module.Pins, "pin", lambda self, *arguments, **options: None)


def no_bans(monkeypatch):
    """A failed chunk is offered again and again."""
    monkeypatch.setattr(RequestState, "see_failed_load", lambda self, *arguments: None)


def loads_reported_early(monkeypatch):
    """A load is reported before its bytes have arrived."""
    import cacheservice.connector.worker as module

    original = module.WorkerHalf._copy_in

    def copy(self, job, submitted_at):
        threading.Timer(0.05, original, (self, job, submitted_at)).start()
        return None, Reason.HIT, 0

    monkeypatch.setattr(module.WorkerHalf, "_copy_in", copy)


def scenario(make, cache):
    """Chunked prefill, reuse, preemption, partial local hits, failed loads, slow saves."""
    never = threading.Event()
    first = make(num_blocks=400, max_batched_tokens=120)
    for i in (1, 2, 3):
        first.add(str(i), prompt(i, 400), max_tokens=2)
    first.run(limit=3000)
    small = make(num_blocks=46, max_batched_tokens=336, max_seqs=4)
    for i in (1, 2):
        small.add(str(i), prompt(i, 400), max_tokens=200)
    small.run(limit=3000)
    partial = make(num_blocks=400)
    partial.add("p", prompt(1, 400)[:100])
    partial.run(limit=500)
    partial.add("q", prompt(1, 400))
    partial.run(limit=500)
    assert ("q", 96, 400, 288) in partial.answers
    cache.fail_store = lambda write: wait_quietly(never, 0.02)
    busy = make(num_blocks=60, max_batched_tokens=100, prefix_caching=False)
    for i in range(20, 28):
        busy.add(str(i), prompt(i, 150), max_tokens=3)
    busy.run(limit=3000)
    again = make(num_blocks=400)
    for i in range(20, 28):
        again.add(str(i), prompt(i, 150), max_tokens=3)
    again.run(limit=3000)
    failing = make(num_blocks=400)
    cache.fail_retrieve = lambda read: Reason.CHECKSUM
    failing.add("f", prompt(1, 400))
    failing.run(limit=500)
    assert Reason.CHECKSUM in [o.reason for o in cache.outcomes if o.kind is OutcomeKind.LOAD]


def test_the_scenario_itself_is_sound(make, cache):
    scenario(make, cache)


@pytest.mark.parametrize(
    "mutation",
    [
        remembered_answer, answer_without_subtraction, load_shifted_by_a_block, load_starts_at_the_chunk,
        save_of_other_blocks, unpinned_saves, no_bans, loads_reported_early,
    ],
)  # fmt: skip
def test_the_oracle_notices_a_broken_connector(make, cache, monkeypatch, mutation):
    """A test that can't fail is a defect: each of these mistakes must make the scenario fail."""
    mutation(monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError)):
        scenario(make, cache)
