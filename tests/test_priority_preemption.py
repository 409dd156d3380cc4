"""Under priority scheduling vLLM names blocks, preempts their request in the same planning, and never writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from scheduler_harness import Engine, Text, World
from scheduler_shapes import SHAPES


@pytest.fixture
def world() -> Iterator[World]:
    made = World("unwritten")
    with made.installed():
        yield made


@pytest.mark.parametrize(
    ("shape", "num_blocks", "chunk"),
    [("priority", 12, 32), ("gemma", 52, 32), ("qwen3-next-tp1", 20, 16), ("qwen3-next-tp1", 26, 16)],
)  # fmt: skip
def test_no_name_stays_on_a_block_that_nobody_wrote(
    world: World, shape: str, num_blocks: int, chunk: int
) -> None:
    """The harness holds every named block, every computed page and every stored shard against what it must be. "low"
    is planned first in each pass, "high" then lacks a block in the same pass."""
    engine = Engine(
        world, replace(SHAPES[shape], policy="priority"), num_blocks=num_blocks, budget=64, tokens_per_chunk=chunk
    )  # fmt: skip
    engine.scheduler.scheduler_config.long_prefill_token_threshold = 32
    engine.add("low", Text(range(4, 164)), priority=9)
    engine.step()
    world.jobs.progress(1.0)
    engine.add("high", Text(range(304, 464)), priority=0)
    for _ in range(100):
        if not engine.scheduler.has_requests():
            break
        engine.step()
        engine.check_prefix_cache()
        world.jobs.progress(1.0)
        world.pass_time(0.005)
    engine.check_at_rest()
    assert engine.num_preemptions, "nothing was preempted"
    assert set(engine.finished) == {"low", "high"}
    assert world.cache.shards
    assert not engine.half._unwritten._named


def test_engines_that_preempt_the_last_request_have_nothing_to_take_back(world: World) -> None:
    """With the default policy vLLM never preempts what it has planned in the same pass."""
    assert Engine(world, SHAPES["dense-tp1"]).half._unwritten is None
