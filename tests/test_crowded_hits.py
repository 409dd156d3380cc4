"""Hundreds of hits may wait for room beside loads (room.py); one step looks at a few of them only."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from scheduler_harness import Engine, Text, World
from scheduler_shapes import SHAPES

from cacheservice.connector.requests import decide
from cacheservice.connector.scheduler import MAX_CROWDED_LOOKS

NUM_REQUESTS = 20


def test_a_step_looks_at_few_hits_that_wait_for_room(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World("crowded")
    with world.installed():
        engine = Engine(world, SHAPES["gemma-no-prefix-caching"], num_blocks=400, max_seqs=32)
        text = Text(range(4, 204))
        engine.add("first", text)
        engine.run()
        # Somebody with a loaded prompt who lacks more blocks than there are.
        holder = SimpleNamespace(num_tokens=100_000, num_computed_tokens=16)
        engine.half._step_tokens = 100_000
        engine.half._holders["holder"] = holder
        looks: list[str] = []

        def watched(state: Any, *arguments: Any) -> Any:
            looks.append(state.request_id)
            return decide(state, *arguments)

        monkeypatch.setattr("cacheservice.connector.scheduler.decide", watched)
        for number in range(NUM_REQUESTS):
            engine.add(str(number), text)
        for _ in range(3):  # until each lookup has been answered and each hit found without room
            engine.step()
            world.jobs.progress(1.0)
        assert {a[3] for a in engine.answers[-NUM_REQUESTS:]} == {None}
        looks.clear()
        engine.step()
        assert {a[3] for a in engine.answers[-NUM_REQUESTS:]} == {None}
        assert 0 < len(looks) <= MAX_CROWDED_LOOKS
        del engine.half._holders["holder"]
        engine.run()
        engine.check_at_rest()
        assert len(engine.finished) == NUM_REQUESTS + 1
        assert engine.num_loads >= NUM_REQUESTS
