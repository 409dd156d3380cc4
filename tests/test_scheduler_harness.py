"""The connector under vLLM's own scheduler, for every shape of model and many seeds, with every page checked.

`make harness` lives through `RUNS` seeds per shape (marker `harness`); here, in `make test`, are a few of them, the
cases that have a name, and the proof that the harness notices faults.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor, as_completed

import pytest
from scheduler_harness import Engine, Text, World, Wrong
from scheduler_life import Counts, Told, live, replay_command, tell
from scheduler_mutations import MUTATIONS
from scheduler_shapes import SHAPES

from cacheservice.core.outcomes import Reason

RUNS = int(os.environ.get("RUNS", "30"))
"""Seeds per shape in `make harness`."""
FEW = 2
MUTANT_RUNS = 12
"""Within so many lives per shape a fault must be noticed."""
NUM_PROCESSES = 2


@pytest.fixture(scope="session")
def lives():
    """Processes that live: of their own, because a replay needs PYTHONHASHSEED, which only a new process takes."""
    before = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    pool = ProcessPoolExecutor(NUM_PROCESSES, mp_context=multiprocessing.get_context("spawn"))
    try:
        for future in [pool.submit(os.getpid) for _ in range(2 * NUM_PROCESSES)]:
            future.result()
    finally:
        os.environ.pop("PYTHONHASHSEED")
        if before is not None:
            os.environ["PYTHONHASHSEED"] = before
    yield pool
    pool.shutdown()


TOTAL = Counts()
LIVED: set[str] = set()


def live_all(lives, name: str, seeds: range) -> Counts:
    """Live these seeds of a shape; fails with the first that broke a rule and how to see it again."""
    total = Counts()
    failed: list[Told] = []
    for future in as_completed([lives.submit(tell, name, seed) for seed in seeds]):
        told = future.result()
        if told.counts is None:
            failed.append(told)
        else:
            total.add(told.counts)
    if failed:
        first = min(failed, key=lambda told: told.seed)
        commands = "\n".join(
            replay_command(name, told.seed) for told in sorted(failed, key=lambda t: t.seed)
        )
        pytest.fail(
            f"{len(failed)} of {len(seeds)} lives broke a rule. Replay:\n{commands}\n\nThe first:\n{first.failure}",
            pytrace=False,
        )
    return total


@pytest.mark.parametrize("name", SHAPES)
def test_a_few_lives_keep_every_page_right(lives, name):
    assert live_all(lives, name, range(FEW)).runs == FEW


@pytest.mark.harness
@pytest.mark.timeout(300 + 10 * RUNS)
@pytest.mark.parametrize("name", SHAPES)
def test_many_lives_keep_every_page_right(lives, name, capsys):
    counts = live_all(lives, name, range(RUNS))
    with capsys.disabled():
        print(f"\n{name}: {counts}", end=" ")
    assert counts.loads - counts.failed_loads >= RUNS // 4, f"hardly anything is loaded: {counts}"
    assert counts.shards
    TOTAL.add(counts)
    LIVED.add(name)


@pytest.mark.harness
def test_what_the_harness_is_for_really_happened(capsys):
    if set(SHAPES) != LIVED:
        pytest.skip("only some of the shapes lived")
    with capsys.disabled():
        print(f"\nall: {TOTAL}", end=" ")
    assert TOTAL.runs == RUNS * len(SHAPES)
    for name in (
        "preemptions", "loads", "failed_loads", "aborts", "restarts", "agent_deaths", "evictions", "pauses",
        "hand_overs",
    ):  # fmt: skip
        assert getattr(TOTAL, name) >= RUNS, f"too few {name}: {TOTAL}"


def test_a_life_can_be_replayed(lives):
    """In other processes, one after another life: the same decisions, step by step."""
    first, *others = [
        lives.submit(tell, name, seed).result()
        for name, seed in [
            ("gemma-async", 3),
            ("dense-tp1", 5),
            ("gemma-async", 3),
            ("gemma-async", 4),
        ]
    ]
    again, other_seed = others[1], others[2]
    assert first.trace, first.failure
    assert again.trace == first.trace
    assert other_seed.trace != first.trace


@pytest.mark.parametrize(
    ("mutation", "name"),
    [
        pytest.param(mutation, name, marks=() if name == known.shapes[0] else pytest.mark.harness)
        for mutation, known in MUTATIONS.items()
        for name in known.shapes
    ],
)
def test_the_harness_notices_a_fault_of_ours(lives, mutation, name):
    for start in range(0, MUTANT_RUNS, NUM_PROCESSES):
        futures = [lives.submit(tell, name, start + i, mutation) for i in range(NUM_PROCESSES)]
        noticed = [told for told in (f.result() for f in futures) if told.counts is None]
        if noticed:  # by a rule of the harness or of vLLM, not by a slip of the fault itself
            assert noticed[0].failure.startswith(("Wrong", "AssertionError")), noticed[0].failure
            return
    pytest.fail(f"{mutation} went unnoticed on {name} in {MUTANT_RUNS} lives")


@pytest.mark.parametrize("name", ["dense-tp1", "dense-tp2", "mla-tp2", "async"])
def test_a_preempted_request_is_offered_what_lies_beyond_its_computed_tokens(name):
    """256 tokens are stored, a chunked request is preempted with 336 computed, and vLLM asks again and again while
    others take its blocks: the answer is max(0, 256 - computed) each time, and the load is what was allowed."""
    world = World(name)
    shape = SHAPES[name]
    stored = Text(prompt(2, 400))
    with world.installed():
        world.cache.fail_store = lambda write: Reason.NO_SPACE if write.number >= 4 else None
        writer = Engine(world, shape, tp=shape.tensor_parallel_sizes[0], num_blocks=200)
        writer.add("w", stored, max_tokens=1)
        writer.run()
        writer.shut_down()
        # 26 blocks are one request's that decodes; the other takes 21 for 336 tokens, and there are no more.
        engine = Engine(
            world,
            shape,
            tp=shape.tensor_parallel_sizes[0],
            num_blocks=48,
            budget=81,
            tokens_per_chunk=64,
        )
        computed_at_preemption = []
        preempt = engine.scheduler._preempt_request

        def noted(request, *arguments, **options):
            computed_at_preemption.append(request.num_computed_tokens)
            preempt(request, *arguments, **options)

        engine.scheduler._preempt_request = noted
        first = engine.add("a", Text(prompt(1, 400)), max_tokens=200)
        while first.num_output_tokens < 4:
            engine.step()
            world.jobs.progress(1.0)
            world.pass_time(0.005)
        engine.add("b", Text(stored.prompt), max_tokens=40)
        loads = []
        for _ in range(2000):
            if not engine.scheduler.has_requests() and not engine.in_flight:
                break
            plan = engine.step()
            if plan is not None:
                loads += [job for job in plan.kv_connector_metadata.loads if job.request_id == "b"]
            world.jobs.progress(1.0)
            world.pass_time(0.005)
        engine.check_prefix_cache()
        engine.check_at_rest()
        engine.shut_down()
    assert computed_at_preemption[0] == 336
    answers = [(computed, answer) for who, computed, _, answer in engine.answers if who == "b"]
    assert all(answer in (None, max(0, 256 - computed)) for computed, answer in answers), answers
    assert len(answers) >= 20
    assert {(336, 0), (320, 0)} <= set(answers)
    assert any(0 < computed < 256 and answer == 256 - computed for computed, answer in answers)
    assert len(loads) >= 2
    last = loads[-1]
    assert 0 < last.start_token < 256
    assert last.stop_token == 256
    assert len(last.block_ids[0]) == (256 - last.start_token) // 16


@pytest.mark.parametrize("keeps_room", [True, False])
def test_two_loaded_requests_do_not_hold_all_blocks_between_them(monkeypatch, keeps_room):
    """28 + 8 blocks for 448 loaded tokens of one, 10 + 8 for 160 of the other, and 2 are left; the first needs 4 to run
    at all. vLLM 0.32 lets it come to that, and can't preempt either."""
    import cacheservice.connector.scheduler as scheduler

    if not keeps_room:
        monkeypatch.setattr(scheduler, "leaves_room", lambda *groups, **given: True)
    world = World()
    shape = SHAPES["gpt-oss"]
    texts = [Text(prompt(1, 475)), Text(prompt(2, 170))]
    with world.installed():
        writer = Engine(world, shape, num_blocks=800, tokens_per_chunk=32)
        for text in texts:
            writer.add(f"w{len(text.prompt)}", Text(text.prompt), max_tokens=1)
            writer.run()
        writer.shut_down()
        engine = Engine(world, shape, num_blocks=57, budget=50, tokens_per_chunk=32)
        for number, text in enumerate(texts):
            engine.add(str(number), text, max_tokens=20)
        for _ in range(20):  # nothing but lookups comes back
            engine.step()
            world.pass_time(0.001)
        if not keeps_room:
            assert engine.num_loads == 2
            with pytest.raises(Wrong, match="not at rest"):
                engine.run()
            engine.kill()
            return
        assert engine.num_loads == 1
        engine.run()
        assert engine.num_loads >= 2
        engine.check_at_rest()
        engine.shut_down()


def test_deepseek_v4_has_a_block_table_per_block_size():
    """A prompt of 4096 tokens: every group keeps its own table, whatever `cache_config.block_size` has become."""
    world = World()
    shape = SHAPES["deepseek-v4"]
    with world.installed():
        engine = Engine(
            world, shape, num_blocks=6000, budget=4200, tokens_per_chunk=256, max_model_len=8192
        )
        engine.add("a", Text(prompt(1, 4096)), max_tokens=2)
        plan = engine.step()
        table = plan.scheduled_new_reqs[0].block_ids
        by_size = sorted(
            (group.block_tokens, len(ids)) for group, ids in zip(engine.groups, table, strict=True)
        )
        assert by_size == [(4, 1024), (8, 512), (64, 64), (64, 64), (256, 16)]
        engine.run()
        engine.check_prefix_cache()
        engine.check_at_rest()
        plan = engine.half.plan
        for number, group in enumerate(engine.groups):
            held = [len(c) for (_, _, g, _), c in world.cache.shards.items() if g == number]
            assert len(held) == 4096 // plan.tokens_per_chunk
            payload = sum(
                layer.bytes_per_state * group.block_tokens // layer.tokens_per_state
                for layer in group.layers
            )
            window_blocks = -(-(group.window - 1) // group.block_tokens)
            blocks = (
                plan.tokens_per_chunk // group.block_tokens
                if group.kind == "full"
                else window_blocks
            )
            assert set(held) == {payload * blocks}, f"group {number} holds more than a hit reads"
        engine.shut_down()
        again = Engine(
            world, shape, num_blocks=6000, budget=4200, tokens_per_chunk=256, max_model_len=8192
        )
        again.add("b", Text(prompt(1, 4096)), max_tokens=2)
        again.run()
        again.check_prefix_cache()
        again.check_at_rest()
        assert ("b", 0, 4096, 4096 - 256) in again.answers
        again.shut_down()


def test_the_oracle_notices_a_single_wrong_byte():
    world = World()
    with world.installed():
        engine = Engine(world, SHAPES["dense-tp2"], tp=2)
        engine.add("a", Text(prompt(1, 100)), max_tokens=20)
        engine.step()
        engine.check_running()
        block = engine.scheduler.kv_cache_manager.get_block_ids("a")[0][3]
        engine.ranks[1].pages["model.layers.1.attn"][block, 0, 0, 7, 5] ^= 1
        with pytest.raises(Wrong, match=r"rank 1 model\.layers\.1\.attn slice 2: token 55"):
            engine.check_running()
        with pytest.raises(Wrong, match="token 55"):
            engine.check_prefix_cache()
        with pytest.raises(Wrong, match="token 55"):
            engine.step()
        engine.kill()


def test_one_life_in_this_process_is_like_any_other():
    """So that a debugger can be put on it."""
    counts, _ = live("gemma", 0)
    assert counts.requests


def prompt(seed: int, num_tokens: int) -> list[int]:
    """Random tokens."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(4, 1000) for _ in range(num_tokens)]
