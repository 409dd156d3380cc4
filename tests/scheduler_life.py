"""The life of one engine after another, as a seed decides: requests, aborts, restarts, a cache that fails.

`live` runs one seed on one shape and returns what happened; whatever breaks a rule raises. The same shape and seed give
the same life, step by step, as long as PYTHONHASHSEED is the same (vLLM iterates over sets of request ids): `main` sees
to that.

    python tests/scheduler_life.py SHAPE SEED        replays one life
    python tests/scheduler_life.py SHAPE --runs N    lives seeds 0 to N - 1

Called by: test_scheduler_harness.py, in processes of its own.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from scheduler_harness import Engine, Text, World, Wrong, vllm_config
from scheduler_mutations import MUTATIONS
from scheduler_shapes import SHAPES, Shape

from cacheservice.core.outcomes import OutcomeKind, Reason

MAX_STEPS = 6000
MAX_IDLE_STEPS = 400
MAX_IDLE_S = 15.0
"""After so many steps and so much time without background work and without anything computed, the engine is stuck."""
MAX_SAID = 160
"""Longest answer in tokens."""
LOAD_FAULTS = (
    Reason.EVICTED, Reason.CHECKSUM, Reason.LEASE_LOST, Reason.DEADLINE, Reason.PEER_FAILED,
)  # fmt: skip


@dataclass
class Counts:
    """What happened in one life or in many."""

    runs: int = 0
    steps: int = 0
    requests: int = 0
    preemptions: int = 0
    loads: int = 0
    failed_loads: int = 0
    saves: int = 0
    shards: int = 0
    """Stored, each compared with what was computed."""
    aborts: int = 0
    restarts: int = 0
    agent_deaths: int = 0
    evictions: int = 0
    pauses: int = 0
    """Loads, saves and lookups that stood still half-way."""
    hand_overs: int = 0

    def add(self, other: Counts) -> None:
        """Add up."""
        for name, value in asdict(other).items():
            setattr(self, name, getattr(self, name) + value)

    def __str__(self) -> str:
        """For people."""
        return " ".join(f"{name}={value}" for name, value in asdict(self).items())


@dataclass(frozen=True)
class Mood:
    """How this life is: chances per step, unless said otherwise."""

    quickness: float
    """That a piece of background work goes on."""
    pausing: float
    """That background work stands still before a shard."""
    promptness: float
    load_fault: float
    """Per shard."""
    store_fault: float
    """Per shard."""
    eviction: float
    abort: float
    agent_death: float
    restart: float
    reset: float
    arrival: float
    tick_s: tuple[float, ...]
    is_calm: bool = True

    @classmethod
    def of(cls, rng: random.Random) -> Mood:
        """One in three lives is calm but for small pools; the others have a trouble or two."""
        calm = rng.random() < 0.33

        def some(*chances: float) -> float:
            return 0.0 if calm else rng.choice(chances)

        return cls(
            quickness=rng.choice((1.0, 0.6, 0.3, 0.1)), pausing=rng.choice((0.0, 0.3, 0.7)),
            promptness=rng.choice((1.0, 0.5, 0.0)), load_fault=some(0, 0.03, 0.3), store_fault=some(0, 0.1, 0.4),
            eviction=some(0, 0.05, 0.3), abort=some(0, 0.03, 0.12), agent_death=some(0, 0, 0.015),
            restart=some(0, 0, 0.012), reset=some(0, 0, 0, 0.01), arrival=rng.choice((0.15, 0.4, 1.0)),
            tick_s=rng.choice(((0.002,), (0.005, 0.02), (0.01, 0.01, 0.01, 0.3), (0.005,) * 40 + (4.0, 20.0))),
            is_calm=calm,
        )  # fmt: skip


@dataclass
class Life:
    """One life under way."""

    shape: Shape
    world: World
    mood: Mood
    counts: Counts = field(default_factory=lambda: Counts(runs=1))
    open: dict[str, tuple[Text, dict[str, Any]]] = field(default_factory=dict)
    """Requests that have not finished, with what they were given as."""
    told: list[tuple[Text, str | None]] = field(default_factory=list)
    """Texts of the past, with their salts."""
    hand_overs: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By text: what its answer carried."""
    num_engines: int = 0
    idle_since: tuple[int, float] | None = None
    """Step and time at which anything happened last."""
    tokens_per_chunk: int = 0
    longest: int = 0
    long_prefill: int = 0
    """Most tokens of one prompt in a step, so that several are under way at a time; 0 = as many as a step takes."""
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def engine(self) -> Engine:
        """The one that lives now."""
        assert self.world.engine is not None
        return self.world.engine

    @property
    def rng(self) -> random.Random:
        """The seed's."""
        return self.world.rng

    # ------------------------------------------------------------------ engines

    def start_engine(self) -> None:
        """The next engine; sizes take turns."""
        sizes = self.shape.tensor_parallel_sizes
        tp = sizes[self.num_engines % len(sizes)]
        self.num_engines += 1
        Engine(
            self.world, self.shape, tp=tp, tokens_per_chunk=self.tokens_per_chunk, **self.options
        )
        settings = self.engine.scheduler.scheduler_config
        settings.long_prefill_token_threshold = self.long_prefill

    def restart_engine(self) -> None:
        """End it, in good order or not; what was open is asked again or forgotten."""
        self.collect()
        if self.rng.random() < 0.5:
            self.engine.kill()
        else:
            self.engine.shut_down()
            self.see_finished()
        self.counts.restarts += 1
        self.world.note("restart")
        again, self.open = list(self.open.values()), {}
        self.start_engine()
        self.idle_since = None
        for text, given in again:
            if self.rng.random() < 0.7:
                self.ask(text, given)

    def collect(self) -> None:
        """Take over what the engine counted."""
        engine = self.engine
        self.counts.steps += engine.num_steps
        self.counts.preemptions += engine.num_preemptions
        self.counts.shards += sum(client.num_stored for client in engine.clients)

    # ------------------------------------------------------------------ requests

    def new_text(self) -> tuple[Text, str | None]:
        """A prompt: one of the past, one that shares a beginning with it, or a new one."""
        rng, unit = self.rng, self.tokens_per_chunk
        dice = rng.random()
        if self.told and dice < 0.2:
            text, salt = rng.choice(self.told)
            prompt = list(text.prompt)
        elif self.told and dice < 0.8:
            text, salt = rng.choice(self.told)
            known = text.tokens  # what was said is part of the conversation
            cut = rng.choice(
                (len(known), rng.randrange(1, len(known) + 1), len(known) // unit * unit)
            )
            tail = rng.choice((0, 1, rng.randrange(1, 2 * unit)))
            prompt = known[:cut] + [rng.randrange(4, 1000) for _ in range(tail)]
        else:
            salt = "tenant" if rng.random() < 0.1 else None
            length = rng.choice((rng.randrange(1, self.longest), rng.randrange(1, 5) * unit))
            prompt = [rng.randrange(4, 1000) for _ in range(length)]
        prompt = prompt[: self.longest] or [4]
        return Text(prompt, salt), salt

    def ask(self, text: Text, given: dict[str, Any]) -> None:
        """Give the engine a request."""
        self.counts.requests += 1
        request_id = f"r{self.counts.requests}"
        self.open[request_id] = (text, given)
        self.engine.add(request_id, text, **given)
        self.world.note("ask", request_id, len(text.prompt), given)

    def ask_new(self) -> None:
        """Give the engine a request that it has not had."""
        rng = self.rng
        text, salt = self.new_text()
        given: dict[str, Any] = {
            "salt": salt,
            "max_tokens": rng.choice((1, 2, rng.randrange(1, 24), rng.randrange(40, MAX_SAID))),
            "priority": rng.randrange(3) if self.shape.policy == "priority" else 0,
            "skips_cache": rng.random() < 0.04,
        }  # fmt: skip
        key = hash((tuple(text.prompt), salt))
        if key in self.hand_overs and rng.random() < 0.5:
            given["params"] = self.hand_overs[key]
            self.counts.hand_overs += 1
        self.told.append((text, salt))
        self.ask(text, given)

    def interrupt(self) -> None:
        """What comes from outside while a step is under way."""
        if self.open and self.rng.random() < self.mood.abort / 2:
            self.abort_one()

    def abort_one(self) -> None:
        """End a request from outside."""
        request_id = self.rng.choice(sorted(self.open))
        self.engine.abort(request_id)
        self.counts.aborts += 1
        self.world.note("abort", request_id)
        del self.open[request_id]

    def see_finished(self) -> None:
        """Forget what is done; remember its hand-over."""
        for request_id in [r for r in self.open if r in self.engine.finished]:
            text, given = self.open.pop(request_id)
            params = self.engine.finished[request_id][1]
            if params:
                self.hand_overs[hash((tuple(text.prompt), given["salt"]))] = params

    # ------------------------------------------------------------------ the cache

    def evict(self) -> None:
        """Something is gone from the cache: one shard, a chunk, or a chunk and all after it that was stored later."""
        shards = sorted(self.world.cache.shards)
        if not shards:
            return
        chosen = self.rng.choice(shards)
        whole = self.rng.random() < 0.7
        for shard in shards:
            if shard == chosen or (whole and shard[:2] == chosen[:2]):
                del self.world.cache.shards[shard]
        self.counts.evictions += 1

    def agent_dies(self) -> None:
        """The agent is gone for some time, or is another one at once."""
        self.counts.agent_deaths += 1
        self.world.note("agent")
        self.world.cache.restart()
        self.world.cache.is_up = self.rng.random() < 0.3

    def load_fault(self, read: Any) -> Reason | None:
        """Why this shard can't be had, if it can't."""
        chance = self.mood.load_fault
        return self.rng.choice(LOAD_FAULTS) if chance and self.rng.random() < chance else None

    def store_fault(self, write: Any) -> Reason | None:
        """Why this shard is not stored, if it is not."""
        chance = self.mood.store_fault
        return Reason.NO_SPACE if chance and self.rng.random() < chance else None

    # ------------------------------------------------------------------ steps

    def disturb(self) -> None:
        """What comes from outside between two steps."""
        rng, mood, cache = self.rng, self.mood, self.world.cache
        if rng.random() < mood.eviction:
            self.evict()
        if cache.is_up:
            if rng.random() < mood.agent_death:
                self.agent_dies()
        elif rng.random() < 0.1:
            cache.is_up = True
        if self.open and rng.random() < mood.abort:
            self.abort_one()
        if rng.random() < mood.restart:
            self.restart_engine()
        if rng.random() < mood.reset and not self.engine.in_flight:
            self.engine.scheduler.reset_prefix_cache(reset_connector=True)
            self.world.note("reset")

    def step(self) -> None:
        """One step of the engine, and of everything else."""
        preemptions = self.engine.num_preemptions
        plan = self.engine.step()
        self.see_finished()
        self.see_whether_stuck(plan)
        self.world.jobs.progress(self.mood.quickness)
        self.world.pass_time(self.rng.choice(self.mood.tick_s))
        is_due = self.rng.random() < 0.15 or self.engine.num_preemptions > preemptions
        if is_due and not self.engine.in_flight:
            self.engine.check_prefix_cache()
        half = self.engine.half
        if half._saves is not None and half._saves.num_pinned_blocks > half._saves.max_blocks:
            raise Wrong("more blocks are pinned than may be")

    def see_whether_stuck(self, plan: Any) -> None:
        """Raise when requests are open and nothing has happened for long, although nothing is on its way."""
        engine, world = self.engine, self.world
        moved = plan is None or plan.total_num_scheduled_tokens or plan.kv_connector_metadata.loads
        if moved or world.jobs.waiting or not self.open or self.idle_since is None:
            self.idle_since = (engine.num_steps, world.now)
            return
        steps, seconds = engine.num_steps - self.idle_since[0], world.now - self.idle_since[1]
        if steps > MAX_IDLE_STEPS and seconds > MAX_IDLE_S:
            raise Wrong(f"{len(self.open)} requests are open, and nothing moves")

    def rest(self) -> None:
        """No more trouble: everything has to end."""
        self.world.cache.is_up = True
        self.mood = Mood(1.0, 0.0, 1.0, 0, 0, 0, 0, 0, 0, 0, 0, (0.005,))
        self.world.jobs.pause_chance = 0.0
        quiet = 0
        for _ in range(MAX_STEPS):
            if not self.engine.scheduler.has_requests() and not self.engine.in_flight:
                break
            self.step()
            if not self.open and not self.world.jobs.waiting:
                quiet += 1
            if quiet > MAX_IDLE_STEPS:
                raise Wrong(
                    f"the engine keeps stepping for nothing, {MAX_IDLE_STEPS} steps after its last request"
                )
        else:
            raise Wrong(f"not at rest after {MAX_STEPS} steps without trouble")
        self.engine.check_prefix_cache()
        self.engine.check_at_rest()

    def probe(self) -> None:
        """A new engine asks for a text of the past: it must be offered exactly what is there."""
        self.engine.shut_down()
        self.start_engine()
        text, salt = self.rng.choice(self.told)
        request = self.engine.add("probe", Text(text.prompt, salt), salt=salt, max_tokens=1)
        expected = self.engine.expected_hit(request)
        self.engine.run()
        answers = [a for who, *_, a in self.engine.answers if who == "probe" and a is not None]
        if answers[:1] != [expected]:
            raise Wrong(
                f"{expected} of {len(text.prompt)} tokens can be had, and {answers} were offered"
            )
        self.engine.check_prefix_cache()
        self.engine.check_at_rest()


def live(name: str, seed: int, mutation: str | None = None) -> tuple[Counts, str]:
    """One life, with a fault of that name in our connector; returns what happened and a digest of every decision.
    Raises whatever broke."""
    shape = SHAPES[name]
    world = World(f"{name} {seed}")
    rng = world.rng
    mood = Mood.of(rng)
    life = Life(shape, world, mood, tokens_per_chunk=rng.choice(shape.chunks))
    world.jobs.pause_chance, world.promptness = mood.pausing, mood.promptness
    world.interrupt = life.interrupt
    world.cache.fail_retrieve, world.cache.fail_store = life.load_fault, life.store_fault
    life.longest = rng.choice((shape.max_model_len // 2, shape.max_model_len * 3 // 4))
    life.long_prefill = rng.choice((0, 0, 32)) if shape.policy == "priority" else 0
    budget = rng.choice(shape.budgets)
    life.options = {
        "budget": budget,
        "max_seqs": rng.choice((2, 4, 8)),
        "num_blocks": pool_size(
            shape, life.longest + MAX_SAID, budget, rng.choice((1.05, 1.3, 1.8))
        ),
        "executes_late": rng.random() < 0.5,
        "lookup_ms": rng.choice((100, 5000)),
    }
    with MUTATIONS[mutation]() if mutation else nullcontext(), world.installed():
        try:
            life.start_engine()
            wanted = rng.randrange(12, 36)
            must_restart = {rng.randrange(wanted) for _ in range(rng.choice((0, 1, 2)))}
            if shape.tensor_parallel_sizes[1:]:
                must_restart |= {wanted // 3, wanted // 3 * 2}
            num_steps = 0
            while wanted > 0 or life.open:
                num_steps += 1
                if num_steps > MAX_STEPS:
                    raise Wrong(f"{len(life.open)} requests are open after {MAX_STEPS} steps")
                if wanted and rng.random() < mood.arrival:
                    wanted -= 1
                    life.ask_new()
                life.disturb()
                life.step()
                if wanted in must_restart:
                    must_restart.remove(wanted)
                    life.restart_engine()
            life.rest()
            life.collect()
            if mood.is_calm and any(
                o.kind is OutcomeKind.LOAD and o.reason is Reason.EVICTED
                for o in world.cache.outcomes
            ):
                raise Wrong("something was offered that was never there")
            if life.told:
                life.probe()
            life.engine.shut_down()
            if world.cache.leases or world.cache.reserved:
                raise Wrong(f"held by nobody: {world.cache.leases} {world.cache.reserved}")
        except BaseException as error:
            if world.engine is not None:
                error.add_note(f"{replay_command(name, seed, mutation)}\n{world.engine.describe()}")
            raise
    for outcome in world.cache.outcomes:
        life.counts.loads += outcome.kind is OutcomeKind.LOAD
        life.counts.saves += outcome.kind is OutcomeKind.SAVE
        life.counts.failed_loads += (
            outcome.kind is OutcomeKind.LOAD and outcome.reason is not Reason.HIT
        )
    life.counts.pauses = world.jobs.num_pauses
    world.note(life.counts)
    return life.counts, world.trace.hexdigest()


def pool_size(shape: Shape, longest: int, budget: int, factor: float) -> int:
    """Blocks for `factor` requests of the longest kind, the null block included."""
    from vllm_planning import get_kv_cache_groups

    config = vllm_config(shape, shape.tensor_parallel_sizes[0], budget, 8, 1 << 20, {})
    longest = min(longest, shape.max_model_len)
    in_flight = budget * (2 if shape.async_scheduling else 1)
    total = 0
    for group in get_kv_cache_groups(config, dict(shape.layers(shape.tensor_parallel_sizes[0]))):
        spec = group.kv_cache_spec
        spec = next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values()))
        blocks = -(-longest // spec.block_size)
        if hasattr(spec, "max_admission_blocks_per_request"):
            blocks = min(blocks, spec.max_admission_blocks_per_request(in_flight, longest))
        total += 3 if shape.has_state and not hasattr(spec, "head_size") else blocks
    return 1 + int(total * factor)


def replay_command(name: str, seed: int, mutation: str | None = None) -> str:
    """How to see this life again."""
    fault = f" --mutation {mutation}" if mutation else ""
    return f".venv/bin/python tests/scheduler_life.py {name} {seed}{fault}"


@dataclass(frozen=True)
class Told:
    """What a process that lived reports to the one that asked it to."""

    name: str
    seed: int
    counts: Counts | None
    """None when a rule was broken."""
    trace: str = ""
    failure: str = ""


def tell(name: str, seed: int, mutation: str | None = None) -> Told:
    """Live, and report instead of raising."""
    try:
        counts, trace = live(name, seed, mutation)
    except Exception as error:
        notes = "\n".join(getattr(error, "__notes__", ()))
        at = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(at.filename).name}:{at.lineno}"
        return Told(
            name, seed, None, failure=f"{type(error).__name__} at {where}: {error}\n{notes}"
        )
    return Told(name, seed, counts, trace)


def main(arguments: Sequence[str]) -> int:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        description="Live one seed, or many, of the scheduler harness."
    )
    parser.add_argument("shape", choices=[*SHAPES, "all"])
    parser.add_argument("seed", type=int, nargs="?", help="replay this one")
    parser.add_argument("--runs", type=int, default=1, help="without a seed: live so many")
    parser.add_argument("--first", type=int, default=0, help="without a seed: begin with this one")
    parser.add_argument(
        "--mutation", choices=sorted(MUTATIONS), help="put this fault into the connector"
    )
    given = parser.parse_args(arguments)
    if given.seed is not None and given.shape != "all":
        counts, trace = live(given.shape, given.seed, given.mutation)
        print(f"{given.shape} {given.seed}: {counts}\ntrace {trace}")
        return 0
    num_failed = 0
    for name in SHAPES if given.shape == "all" else [given.shape]:
        total = Counts()
        for seed in range(given.first, given.first + given.runs):
            told = tell(name, seed, given.mutation)
            if told.counts is None:
                num_failed += 1
                print(f"{name} {seed}: {told.failure}", flush=True)
            else:
                total.add(told.counts)
        print(f"{name}: {total}", flush=True)
    return 1 if num_failed else 0


if __name__ == "__main__":
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, *sys.argv])
    sys.exit(main(sys.argv[1:]))
