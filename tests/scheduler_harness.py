"""vLLM's real Scheduler, KVCacheManager and KVOutputAggregator with both halves of our connector, N ranks in a process.

The page oracle. What a forward pass writes for a token is a function of all tokens up to it, the layer and the slice
(a KV head, or a rank's part of a state); what it leaves in a block of a recurrent group is a function of all tokens so
far. Before anything reads a page, and again for every running request after every step, every page that the scheduler
believes to be computed must hold exactly these bytes, on every rank; so must every block that vLLM has put into its
prefix cache; and every shard that is stored must hold them in the order of the design. vLLM accepts a wrong load
silently; this does not.

One allocation per rank, laid out and viewed by vLLM's own functions, so that groups lie over each other as in engines.
Nothing here waits, sleeps or reads a clock: background work is stepped_jobs.py, time is a number. A test takes this one
unless it is about threads, for which there is threaded_harness.py.

Called by: scheduler_life.py, test_scheduler_harness.py. Facts of vLLM are those of 0.32.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import engines  # sets vLLM's environment before vLLM is imported
import numpy as np
import pytest
from connector_fakes import FakeCache, FakeClient
from scheduler_shapes import Shape
from stepped_jobs import Jobs, SteppedPool

from cacheservice.core.outcomes import Reason

MASK = (1 << 64) - 1
NULL_BLOCK = 0
POISON = 0xA5
"""What the null block's pages hold; nothing may ever write there."""


SHOWN = (
    "reason",
    "lookup",
    "banned_from",
    "must_recompute",
    "crowded_since",
    "load_id",
    "next_save",
)
"""What is said of the connector's state of a request when a rule is broken."""


class Wrong(AssertionError):
    """The connector broke a rule."""


def mix(x: int) -> int:
    """A 64-bit number that depends on every bit of `x`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & MASK
    return x ^ (x >> 31)


class Text:
    """A prompt and everything that the model says after it: each token is a function of those before it."""

    def __init__(self, prompt: Sequence[int], salt: str | None = None) -> None:
        self.prompt = list(prompt)
        self.tokens = list(prompt)
        self._digests = np.zeros(len(prompt) + 64, dtype=np.uint64)
        start = hashlib.sha256((salt or "").encode()).digest()
        self._digests[0] = int.from_bytes(start[:8], "little")
        self._known = 0
        self._columns: dict[tuple[str, int], np.ndarray] = {}

    def token(self, position: int) -> int:
        """The token at this position."""
        if position >= len(self.tokens):
            self.digests(position + 1)
        return self.tokens[position]

    def digests(self, num_tokens: int) -> np.ndarray:
        """Digest of the first n tokens, for n from 0 to `num_tokens`."""
        if num_tokens >= len(self._digests):
            grown = np.zeros(num_tokens * 2, dtype=np.uint64)
            grown[: self._known + 1] = self._digests[: self._known + 1]
            self._digests = grown
        while self._known < num_tokens:
            last = int(self._digests[self._known])
            if self._known == len(self.tokens):
                self.tokens.append(4 + (last >> 32) % 992)
            self._digests[self._known + 1] = mix(
                (last + self.tokens[self._known] * 0x9E3779B97F4A7C15 + 1) & MASK
            )
            self._known += 1
        return self._digests[: num_tokens + 1]

    def column(self, layer: Layer, piece: int, num_tokens: int) -> np.ndarray:
        """What layer and slice hold after n tokens, for n from 0 to `num_tokens`: uint8 [num_tokens + 1, bytes]."""
        key = (layer.name, piece)
        known = self._columns.get(key)
        if known is None or len(known) <= num_tokens:
            digests = self.digests(num_tokens * 2 if known is not None else num_tokens)
            factors = layer.factors(piece)
            known = ((digests[:, None] * factors[None, :]) >> np.uint64(56)).astype(np.uint8)
            self._columns[key] = known
        return known


@functools.cache
def _factors(name: str, piece: int, size: int) -> np.ndarray:
    seed = hashlib.sha256(f"{name} {piece}".encode()).digest()
    generator = np.random.Generator(np.random.PCG64(int.from_bytes(seed[:8], "little")))
    return generator.integers(1, 1 << 63, size=size, dtype=np.uint64) | np.uint64(1)


@dataclass(frozen=True)
class Layer:
    """One layer as every rank has it."""

    name: str
    group: int
    bytes_per_state: int
    """Of one slice."""
    tokens_per_state: int
    pieces: tuple[tuple[int, ...], ...]
    """Per rank, which slices its pages hold, in order."""

    def factors(self, piece: int) -> np.ndarray:
        """What makes this layer's bytes differ from others'."""
        return _factors(self.name, piece, self.bytes_per_state)


@dataclass(frozen=True)
class Group:
    """One KV cache group."""

    kind: str
    """full, window, local or state."""
    block_tokens: int
    window: int
    layers: tuple[Layer, ...]

    def first_read(self, computed: int) -> int:
        """First token that the next token after `computed` reads."""
        if self.kind == "window":
            return max(0, computed - self.window + 1)
        if self.kind == "local":
            return computed // self.window * self.window
        return 0


@dataclass
class Running:
    """A request as a worker knows it: only from scheduler outputs."""

    text: Text
    known_tokens: int
    """Prompt and what was sampled so far."""
    table: list[list[int]]
    computed: int
    state_column: int | None = None
    """Where the recurrent state was left by the last step; None for a new or resumed request."""


class World:
    """What outlives an engine: the cache, the time, the background work, the texts."""

    def __init__(self, seed: str = "") -> None:
        self.rng = random.Random(seed)
        self.now = 1000.0
        self.jobs = Jobs(self.rng)
        self.jobs.tick = lambda: self.pass_time(0.05)
        self.cache = FakeCache(self.clock)
        self.cache.turn = self.jobs.pause
        self.cache.rest = lambda: self.jobs.pause(always=True)
        self.cache.see_stored = self._check_stored
        self.texts: dict[str, Text] = {}
        self.chains: dict[bytes, tuple[Text, int]] = {}
        """vLLM's block hash to a text and the number of tokens that the hash covers."""
        self.engine: Engine | None = None
        self.trace = hashlib.sha256()
        """Everything that was decided, to see that a replay is one."""
        self.interrupt: Callable[[], None] = lambda: None
        """Called when a step has run and before the scheduler sees its output, where vLLM's core takes aborts."""
        self.promptness = 1.0
        """How likely a lookup comes back while the scheduler half waits for it."""
        self._pools: list[SteppedPool] = []
        self._rank = 0
        self._clients: list[FakeClient] = []

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def pass_time(self, seconds: float) -> None:
        """It is later now."""
        self.now += seconds

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Let connectors that are made inside live in this world."""
        import cacheservice.connector.connector as connector
        import cacheservice.connector.lookups as lookups
        import cacheservice.connector.scheduler as scheduler
        import cacheservice.connector.worker as worker

        def pool(max_workers: int = 1, thread_name_prefix: str = "") -> SteppedPool:
            self._pools.append(self.jobs.pool(max_workers, thread_name_prefix))
            return self._pools[-1]

        def client(config: Any, half: Any, *, rank: int, arena_user: Any = None) -> FakeClient:
            self._clients.append(FakeClient(self.cache))
            return self._clients[-1]

        def wait_for(handle: Any, budget_s: float) -> float:
            """Lookups may come back while they are waited for, and take no time that anybody could measure."""
            if budget_s > 0 and not handle.done.is_set():
                for job in self.jobs.runnable():
                    if job.pool.name == "larder-lookup" and self.rng.random() < self.promptness:
                        self.jobs.resume(job)
            return budget_s

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lookups, "ThreadPoolExecutor", pool)
            patch.setattr(worker, "ThreadPoolExecutor", pool)
            patch.setattr(connector, "build_client", client)
            patch.setattr(connector, "_ranks", lambda: (self._rank, 0))
            for name in ("SchedulerHalf", "WorkerHalf"):
                half = functools.partial(getattr(connector, name), clock=self.clock)
                patch.setattr(connector, name, half)
            patch.setattr(scheduler, "wait_for", wait_for)
            patch.setattr(scheduler, "secrets", self)
            try:
                yield
            finally:
                for left in self._pools:
                    self.jobs.drop(left, started=True)

    def token_hex(self, num_bytes: int) -> str:
        """What the connector takes for random, in place of the module `secrets`."""
        return self.rng.randbytes(num_bytes).hex()

    def take_made(self) -> tuple[list[SteppedPool], list[FakeClient]]:
        """Pools and clients made since the last call."""
        made = self._pools, self._clients
        self._pools, self._clients = [], []
        return made

    def as_rank(self, rank: int) -> None:
        """Which rank the next worker half is."""
        self._rank = rank

    def note(self, *what: Any) -> None:
        """Add to the trace."""
        self.trace.update(repr(what).encode())

    def _check_stored(self, namespace: bytes, write: Any, content: bytes) -> None:
        """A shard must hold, block by block and layer by layer, what was computed for its chunk."""
        engine = self.engine
        assert engine is not None
        found = self.chains.get(bytes(write.chunk))
        if found is None:
            raise Wrong(f"a chunk is stored under a key that no request has: {write.chunk.hex()}")
        wanted = engine.shard_content(*found, write.number, write.group, write.shard)
        if content != wanted:
            at = next(
                (i for i, (a, b) in enumerate(zip(content, wanted, strict=False)) if a != b), -1
            )
            raise Wrong(
                f"chunk {write.number} group {write.group} shard {write.shard}: stored bytes differ from the computed "
                f"ones, first at byte {at} of {len(content)} (expected {len(wanted)})"
            )  # fmt: skip


class Rank:
    """One worker: its memory, and our worker half."""

    def __init__(self, engine: Engine, number: int) -> None:
        import torch
        from vllm.v1.kv_cache_layout import KVCacheLayout
        from vllm.v1.worker.utils import allocate_kv_cache

        self.number = number
        kv = engine.worker_kv
        kernel_block = engine.shape.kernel_block
        self.views = allocate_kv_cache(
            kv,
            torch.device("cpu"),
            KVCacheLayout[kv.kv_cache_layout],
            [kernel_block] * len(kv.kv_cache_groups) if kernel_block else None,
        )
        self.pages: dict[str, np.ndarray] = {}
        """Per layer uint8 [blocks, kernel blocks of each, slices, states, bytes], over the rank's one allocation."""
        for name, view in self.views.items():
            by_block = view.view(torch.uint8).unflatten(0, (kv.num_blocks, -1))
            self.pages[name] = by_block.numpy()
        for page in self.pages.values():
            page[:] = engine.world.rng.randrange(256)
        for page in self.pages.values():
            page[NULL_BLOCK] = POISON
        engine.world.as_rank(number)
        self.connector = engine.connector_class(engine.config, engine.worker_role, kv)
        self.connector.register_kv_caches(self.views)


class Engine:
    """One engine without a model."""

    def __init__(
        self, world: World, shape: Shape, *, tp: int = 1, num_blocks: int = 128, budget: int = 512,
        max_seqs: int = 8, tokens_per_chunk: int | None = 64, executes_late: bool = False,
        max_model_len: int | None = None, **extra: Any,
    ) -> None:  # fmt: skip
        from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import (
            generate_scheduler_kv_cache_config,
            get_request_block_hasher,
            init_none_hash,
            resolve_cache_hit_alignment_tokens,
            resolve_kv_cache_block_sizes,
        )
        from vllm.v1.structured_output import StructuredOutputManager
        from vllm_planning import (
            get_kv_cache_config_from_groups,
            get_kv_cache_groups,
            kv_cache_groups_tp_replicas,
        )

        import cacheservice.connector.connector as module

        if max_model_len is not None:
            shape = replace(shape, max_model_len=max_model_len)
        self.world, self.shape, self.tp = world, shape, tp
        settings = {"socket_dir": "/nowhere", **shape.extra, **extra}
        if tokens_per_chunk is not None:
            settings["tokens_per_chunk"] = tokens_per_chunk
        if len(shape.tensor_parallel_sizes) > 1:
            settings["tensor_parallel_sizes"] = list(shape.tensor_parallel_sizes)
        self.config = vllm_config(shape, tp, budget, max_seqs, num_blocks, settings)
        cache_config = self.config.cache_config
        specs = shape.layers(tp)
        groups = get_kv_cache_groups(self.config, dict(specs))
        kv = get_kv_cache_config_from_groups(self.config, groups, 1 << 40)
        kv.kv_cache_layout = shape.layout
        kv.kv_tp_replicas = kv_cache_groups_tp_replicas(groups, tp)
        for_scheduler = generate_scheduler_kv_cache_config([kv])
        cache_config.num_gpu_blocks = kv.num_blocks
        cache_config.block_size = min(g.kv_cache_spec.block_size for g in groups)
        block_size, hash_block = resolve_kv_cache_block_sizes(for_scheduler, self.config)
        alignment = resolve_cache_hit_alignment_tokens(
            for_scheduler, self.config, block_size, hash_block
        )
        for one in (kv, for_scheduler):
            one.hash_block_size, one.cache_hit_alignment_tokens = hash_block, alignment
        self.worker_kv, self.num_blocks, self.hash_block = kv, kv.num_blocks, hash_block
        self.groups = _groups(kv, specs, shape, tp)
        init_none_hash(sha256_cbor)
        self._hash = get_request_block_hasher(hash_block, sha256_cbor)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config, kv_cache_config=for_scheduler,
            structured_output_manager=StructuredOutputManager(self.config), block_size=block_size,
            hash_block_size=hash_block, log_stats=True,
        )  # fmt: skip
        self.connector_class, self.worker_role = module.LarderConnector, KVConnectorRole.WORKER
        self.ranks = [Rank(self, number) for number in range(tp)]
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, r.number): _carried(r.connector.get_handshake_metadata()) for r in self.ranks}
        )
        self.aggregator = KVOutputAggregator.from_connector(self.connector, tp)
        self.pools, self.clients = world.take_made()
        self.running: dict[str, Running] = {}
        """What the workers know."""
        self.in_flight: deque[tuple[Any, Any]] = deque()
        """Steps that are scheduled and whose output the scheduler has not seen, with the output if they have run."""
        self.executes_late = executes_late
        self.finished: dict[str, tuple[str, dict[str, Any] | None]] = {}
        """Finished requests: why, and the hand-over."""
        self.answers: list[tuple[str, int, int, int | None]] = []
        """(request, computed tokens, tokens of the request, our answer) of every question."""
        self.authorised: dict[str, tuple[int, int]] = {}
        """Range that vLLM allowed to load, per request, until the job is handed to the ranks."""
        self.num_preemptions = self.num_steps = self.num_loads = 0
        self._num_outcomes = len(world.cache.outcomes)
        self._watch()
        world.engine = self

    @property
    def half(self) -> Any:
        """Our scheduler half."""
        return self.connector._scheduler

    # ------------------------------------------------------------------ what a test does

    def add(
        self, request_id: str, text: Text, *, max_tokens: int = 4, salt: str | None = None, priority: int = 0,
        params: dict[str, Any] | None = None, skips_cache: bool = False,
    ) -> Any:  # fmt: skip
        """Give the engine a request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        self.world.texts[request_id] = text
        request = Request(
            request_id=request_id, prompt_token_ids=list(text.prompt), pooling_params=None, cache_salt=salt,
            sampling_params=SamplingParams(
                max_tokens=max_tokens, ignore_eos=True, skip_reading_prefix_cache=skips_cache or None,
                extra_args={"kv_transfer_params": params} if params else None,
            ),
            priority=priority, arrival_time=self.world.now, block_hasher=self._hash_blocks,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request from outside."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """Schedule, run, report. With async scheduling the next step is scheduled before this one's output is seen."""
        self.num_steps += 1
        depth = 2 if self.shape.async_scheduling else 1
        plan = None
        if self.scheduler.has_requests() or not self.in_flight:
            plan = self.scheduler.schedule()
            self._check_plan(plan)
            late = self.executes_late and depth > 1
            self.in_flight.append((plan, None if late else self._execute(plan)))
            if len(self.in_flight) < depth and plan.total_num_scheduled_tokens:
                return plan
        self._complete()
        return plan

    def drain(self) -> None:
        """See the output of every step that was scheduled."""
        while self.in_flight:
            self._complete()

    def run(self, limit: int = 3000, tick_s: float = 0.005) -> None:
        """Step until nothing is left to do, with background work that is prompt."""
        for _ in range(limit):
            if not self.scheduler.has_requests() and not self.in_flight:
                return
            self.step()
            self.world.jobs.progress(1.0)
            self.world.pass_time(tick_s)
        raise Wrong(f"not at rest after {limit} steps: {self.describe()}")

    def shut_down(self) -> None:
        """End it in good order."""
        self.drain()
        self.scheduler.shutdown()
        for rank in self.ranks:
            rank.connector.shutdown()
        self._leave()

    def kill(self) -> None:
        """All its processes are gone at once."""
        for pool in self.pools:
            self.world.jobs.drop(pool, started=True)
        self._leave()

    def _leave(self) -> None:
        for client in self.clients:
            client.is_closed = True
            self.world.cache.end_session(client)

    # ------------------------------------------------------------------ rules

    def check_at_rest(self) -> None:
        """Nothing may be left behind when nothing runs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        self.world.jobs.finish()
        half = self.half
        left = {
            "blocks": pool.get_num_free_blocks() - (self.num_blocks - 1),
            "requests": list(self.scheduler.requests),
            "tracked requests": list(half._tracked),
            "open loads": list(half._open_loads),
            "open saves": half._saves.num_open,
            "pins": half._saves.num_pinned_blocks,
            "leases": sorted(self.world.cache.leases),
            "reservations": list(self.world.cache.reserved),
            "background work": [job.pool.name for job in self.world.jobs.waiting],
            "reports": [r.number for r in self.ranks if _has_reports(r.connector)],
        }
        if any(left.values()):
            raise Wrong(f"left behind at rest: { {k: v for k, v in left.items() if v} }")

    def check_running(self) -> None:
        """Every page of every running request that was computed and that is still wanted. Not while a step waits to be
        executed: in one and the same step vLLM lets a request hit blocks that another one computes."""
        if any(output is None for _, output in self.in_flight):
            return
        for request in self.scheduler.running:
            known = self.running.get(request.request_id)
            if known is None:
                continue
            computed = request.num_computed_tokens - request.num_in_flight_tokens
            table = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
            for number, group in enumerate(self.groups):
                if group.kind != "state":
                    self._check_tokens(
                        request.request_id, known.text, number, table[number], 0, computed, skip_null=True
                    )  # fmt: skip

    def check_prefix_cache(self) -> None:
        """Every block that vLLM would give to another request must hold what its hash says; and nobody has written to
        the null block. Only between steps: vLLM hashes blocks before it computes them."""
        from vllm.v1.core.kv_cache_utils import get_block_hash, get_group_id

        for block in self.scheduler.kv_cache_manager.block_pool.blocks:
            if block.block_hash is None or block.is_null:
                continue
            text, end = self.world.chains[bytes(get_block_hash(block.block_hash))]
            number = get_group_id(block.block_hash)
            group = self.groups[number]
            where = f"vLLM's prefix cache (block {block.block_id})"
            if group.kind == "state":
                self._check_state(where, text, number, block.block_id, end)
            else:
                first = end - group.block_tokens
                table = [NULL_BLOCK] * (first // group.block_tokens) + [block.block_id]
                self._check_tokens(where, text, number, table, first, end, skip_null=False)
        for rank in self.ranks:
            for name, pages in rank.pages.items():
                if (pages[NULL_BLOCK] != POISON).any():
                    raise Wrong(f"rank {rank.number} {name}: somebody wrote to the null block")

    def expected_hit(self, request: Any) -> int:
        """Tokens of a prompt that can be had from the cache as it is now, by trying all: design, section 7."""
        plan, tokens = self.half.plan, self.half.plan.tokens_per_chunk
        step = tokens // self.hash_block
        keys = [bytes(h) for h in request.block_hashes[step - 1 :: step]]
        has_part = any(group.kind != "full" for group in self.groups)

        def has(chunk: int, group: int) -> bool:
            shards = range(plan.groups[group].num_shards)
            return all(
                (plan.digest, keys[chunk], group, shard) in self.world.cache.shards
                for shard in shards
            )

        def is_stored(token: int, number: int) -> bool:
            chunk, group = token // tokens, self.groups[number]
            kept = tokens
            if group.kind == "window":
                kept = -(-(group.window - 1) // group.block_tokens) * group.block_tokens
            elif group.kind == "local":
                kept = group.window
            return token >= (chunk + 1) * tokens - kept and has(chunk, number)

        def can_resume(end: int, number: int) -> bool:
            group = self.groups[number]
            if group.kind == "state":
                return has(end // tokens - 1, number)
            return all(is_stored(token, number) for token in range(group.first_read(end), end))

        for end in range(len(keys) * tokens, 0, -tokens):
            if end == request.num_tokens and has_part:
                continue  # the last token is computed again, one before what was loaded
            if all(can_resume(end, number) for number in range(len(self.groups))):
                return end
        return 0

    def shard_content(
        self, text: Text, end: int, chunk: int, group_number: int, shard: int
    ) -> bytes:
        """What a shard must hold: design, section 7."""
        from cacheservice.connector.namespace import layers_in_order
        from cacheservice.core.prefix import stored_blocks

        plan = self.half.plan
        tokens = plan.tokens_per_chunk
        if end != (chunk + 1) * tokens:
            raise Wrong(f"chunk number {chunk} is stored under the key of {end} tokens")
        spec, group = plan.groups[group_number], self.groups[group_number]
        by_name = {layer.name: layer for layer in group.layers}
        per_shard = spec.num_heads // spec.num_shards
        pieces = range(shard * per_shard, (shard + 1) * per_shard)
        kernel_blocks = group.block_tokens // (self.shape.kernel_block or group.block_tokens)
        is_token_major = self.shape.layout.index("N") < self.shape.layout.index("H")
        parts = []
        for block in stored_blocks(spec, tokens, chunk):
            for name in layers_in_order(list(by_name)):
                columns = [text.column(by_name[name], piece, end) for piece in pieces]
                if group.kind == "state":
                    parts += [column[(block + 1) * group.block_tokens] for column in columns]
                    continue
                k = by_name[name].tokens_per_state
                first = block * group.block_tokens
                rows = [c[first + k : first + group.block_tokens + 1 : k] for c in columns]
                page = np.stack(rows).reshape(len(rows), kernel_blocks, -1, rows[0].shape[1])
                order = (1, 2, 0, 3) if is_token_major else (1, 0, 2, 3)
                parts.append(page.transpose(order))
        return b"".join(part.tobytes() for part in parts)

    def describe(self) -> str:
        """Who waits for what."""
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        lines = [f"{free} of {self.num_blocks} blocks free, tp={self.tp}, step {self.num_steps}"]
        for request in self.scheduler.requests.values():
            tracked = self.half._tracked.get(request.request_id)
            known = {name: getattr(tracked.state, name) for name in SHOWN} if tracked else None
            answers = [a[1:] for a in self.answers if a[0] == request.request_id][-3:]
            lines.append(
                f"{request.request_id}: {request.status.name} tokens={request.num_tokens} "
                f"computed={request.num_computed_tokens} preempted={request.num_preemptions} "
                f"answers={answers} {known}"
            )
        lines.append(f"open loads: {self.half._open_loads}")
        lines.append(f"jobs: {[job.pool.name for job in self.world.jobs.waiting]}")
        return "\n".join(lines)

    # ------------------------------------------------------------------ what the scheduler is told and tells

    def _watch(self) -> None:
        """Note what vLLM asks our scheduler half, and hold its answers against the rules that need no oracle."""
        ask, allow = (
            self.connector.get_num_new_matched_tokens,
            self.connector.update_state_after_alloc,
        )
        preempt = self.scheduler._preempt_request

        def asked(request: Any, computed: int) -> tuple[int | None, bool]:
            tokens, is_async = ask(request, computed)
            self.answers.append((request.request_id, computed, request.num_tokens, tokens))
            self.world.note("answer", request.request_id, computed, tokens)
            limit = request.num_tokens - self.shape.has_state
            if tokens and computed + tokens > limit:
                raise Wrong(
                    f"{request.request_id}: offered {tokens} tokens after {computed} of {limit} that may be loaded"
                )
            return tokens, is_async

        def allowed(request: Any, blocks: Any, tokens: int) -> None:
            if tokens > 0:
                computed = next(a[1] for a in reversed(self.answers) if a[0] == request.request_id)
                self.authorised[request.request_id] = (computed, computed + tokens)
            allow(request, blocks, tokens)

        def preempted(*arguments: Any, **options: Any) -> None:
            self.num_preemptions += 1
            preempt(*arguments, **options)

        self.connector.get_num_new_matched_tokens = asked
        self.connector.update_state_after_alloc = allowed
        self.scheduler._preempt_request = preempted

    def _check_plan(self, plan: Any) -> None:
        """The loads of a step are exactly what vLLM allowed since the last one."""
        loads = {
            job.request_id: (job.start_token, job.stop_token)
            for job in plan.kv_connector_metadata.loads
        }
        if loads != self.authorised:
            raise Wrong(
                f"vLLM allowed {self.authorised} to be loaded, and the ranks were told {loads}"
            )
        self.authorised = {}
        self.num_loads += len(loads)
        self.world.note("plan", sorted(plan.num_scheduled_tokens.items()), sorted(loads.items()))

    def _complete(self) -> None:
        """Let the scheduler see the output of the oldest step."""
        plan, output = self.in_flight.popleft()
        if output is None:
            output = self._execute(plan)
        self.world.interrupt()
        for client in self.scheduler.update_from_output(plan, output).values():
            for one in client.outputs:
                if one.finish_reason is not None:
                    self._see_finished(one)
        self.check_running()
        for outcome in self.world.cache.outcomes[self._num_outcomes :]:
            if outcome.reason is Reason.INTERNAL:
                raise Wrong(f"a fault of the connector's own: {outcome}")
        self._num_outcomes = len(self.world.cache.outcomes)

    def _see_finished(self, output: Any) -> None:
        self.finished[output.request_id] = (str(output.finish_reason), output.kv_transfer_params)
        self.world.note("finished", output.request_id, str(output.finish_reason))
        if "error" in str(output.finish_reason).lower():
            raise Wrong(f"{output.request_id} ended with an error")

    def _hash_blocks(self, request: Any) -> list[Any]:
        known = len(request.block_hashes)
        new = self._hash(request)
        text = self.world.texts[request.request_id]
        for number, block_hash in enumerate(new, known + 1):
            self.world.chains.setdefault(bytes(block_hash), (text, number * self.hash_block))
        if list(request.all_token_ids) != text.tokens[: request.num_tokens]:
            raise Wrong(f"{request.request_id} says other tokens than alone")
        return new

    # ------------------------------------------------------------------ what the workers do

    def _execute(self, plan: Any) -> Any:
        """One step on every rank, in the order of vLLM's V1 model runner, and what they report, merged as vLLM does."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self._see_plan(plan)
        for rank in self.ranks:
            self._prepare_pages(rank, plan)
        self._forward(plan)
        self._check_handed_over(plan.kv_connector_metadata)
        carried = pickle.dumps(plan.kv_connector_metadata)
        sampled, request_ids = self._sample(plan)
        outputs = []
        for rank in self.ranks:
            connector, output = rank.connector, KVConnectorOutput()
            metadata = pickle.loads(carried)
            connector.handle_preemptions(metadata)
            connector.bind_connector_metadata(metadata)
            connector.start_load_kv(None)
            connector.wait_for_save()
            results = connector.get_transfer_results(set(plan.finished_req_ids))
            output.finished_sending = results.finished_sending
            output.finished_recving = results.finished_recving
            output.failed_recving = results.failed_recving
            output.invalid_block_ids = connector.get_block_ids_with_load_errors()
            output.kv_connector_stats = connector.get_kv_connector_stats()
            output.kv_connector_worker_meta = connector.build_connector_worker_meta()
            connector.clear_connector_metadata()
            outputs.append(
                ModelRunnerOutput(
                    req_ids=request_ids, req_id_to_index={r: i for i, r in enumerate(request_ids)},
                    sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
                    kv_connector_output=_carried(output),
                )
            )  # fmt: skip
        return self.aggregator.aggregate(outputs, 0)

    def _see_plan(self, plan: Any) -> None:
        """Bring the workers' view up to date, as gpu_model_runner.py `_update_states` does."""
        for request_id in plan.finished_req_ids:
            self.running.pop(request_id, None)
        for new in plan.scheduled_new_reqs:
            self.running[new.req_id] = Running(
                self.world.texts[new.req_id], len(new.prompt_token_ids),
                [list(ids) for ids in new.block_ids], new.num_computed_tokens,
            )  # fmt: skip
        cached = plan.scheduled_cached_reqs
        for index, request_id in enumerate(cached.req_ids):
            known = self.running[request_id]
            known.computed = cached.num_computed_tokens[index]
            new_ids = cached.new_block_ids[index]
            if request_id in cached.resumed_req_ids:
                known.table = [list(ids) for ids in new_ids]
                known.state_column = None
                known.known_tokens = len(known.text.prompt) + cached.num_output_tokens[index]
            elif new_ids is not None:
                for ids, more in zip(known.table, new_ids, strict=True):
                    ids.extend(more)

    def _prepare_pages(self, rank: Rank, plan: Any) -> None:
        """Zero new blocks and copy shared ones, as vLLM does before the forward pass."""
        for block in plan.new_block_ids_to_zero or ():
            for group in self.groups:
                for layer in group.layers:
                    if group.kind != "state":
                        rank.pages[layer.name][block] = 0
        for copied in plan.kv_cache_block_copies or ():
            for pages in rank.pages.values():
                pages[copied.dst_block_id] = pages[copied.src_block_id]

    def _forward(self, plan: Any) -> None:
        """Write what the step computes, and check all that it reads."""
        scheduled = list(plan.num_scheduled_tokens.items())
        for request_id, count in scheduled:
            known = self.running[request_id]
            for number, group in enumerate(self.groups):
                if group.kind == "state":
                    self._move_state(request_id, known, number, count)
                else:
                    self._write_tokens(request_id, known, number, count)
        for request_id, count in scheduled:
            known = self.running[request_id]
            for number, group in enumerate(self.groups):
                if group.kind != "state":
                    first = group.first_read(known.computed)
                    self._check_tokens(
                        request_id, known.text, number, known.table[number],
                        first // group.block_tokens * group.block_tokens, known.computed + count, skip_null=False,
                    )  # fmt: skip
        for request_id, count in scheduled:
            known = self.running[request_id]
            for number, group in enumerate(self.groups):
                if group.kind == "state":
                    self._write_state(known, number, known.computed + count)

    def _check_handed_over(self, metadata: Any) -> None:
        """What the ranks are told to save must be complete when they are told, not only when they come to it."""
        from cacheservice.core.prefix import stored_blocks

        for job in metadata.saves:
            for chunk in job.chunks:
                found = self.world.chains.get(bytes(chunk.key))
                if found is None:
                    raise Wrong(f"a chunk is to be saved under a key that no request has: {chunk}")
                text, end = found
                where = f"save of chunk {chunk.number} of {job.request_id}"
                for number, ids in enumerate(chunk.block_ids):
                    spec, group = self.half.plan.groups[number], self.groups[number]
                    if ids and group.kind == "state":
                        self._check_state(where, text, number, ids[0], end)
                    elif ids:
                        held = stored_blocks(spec, self.half.plan.tokens_per_chunk, chunk.number)
                        first = held.start * group.block_tokens
                        table = [NULL_BLOCK] * held.start + list(ids)
                        self._check_tokens(where, text, number, table, first, end, skip_null=False)

    def _sample(self, plan: Any) -> tuple[list[list[int]], list[str]]:
        sampled = []
        for request_id, count in plan.num_scheduled_tokens.items():
            known = self.running[request_id]
            if known.computed + count < known.known_tokens:
                sampled.append([])
                continue
            sampled.append([known.text.token(known.known_tokens)])
            known.known_tokens += 1
        return sampled, list(plan.num_scheduled_tokens)

    def _slots(
        self, layer: Layer, table: Sequence[int], first: int, stop: int
    ) -> tuple[int, int, np.ndarray, np.ndarray, np.ndarray]:
        """(first state, state after the last, block of each, kernel block in it, place in that) of tokens [first,
        stop)."""
        k = layer.tokens_per_state
        block_tokens = self.groups[layer.group].block_tokens
        states_per_block = block_tokens // k
        low, high = first // k, stop // k
        states = np.arange(low, high)
        positions = states // states_per_block
        ids = np.asarray(table, dtype=np.int64)[positions] if high > low else positions
        parts, slots = np.divmod(
            states % states_per_block, (self.shape.kernel_block or block_tokens) // k
        )
        return low, high, ids, parts, slots

    def _write_tokens(self, request_id: str, known: Running, number: int, count: int) -> None:
        table, stop = known.table[number], known.computed + count
        for layer in self.groups[number].layers:
            low, high, ids, parts, slots = self._slots(layer, table, known.computed, stop)
            if not ids.all():
                raise Wrong(f"{request_id} group {number}: vLLM computes into the null block")
            for rank in self.ranks:
                for at, piece in enumerate(layer.pieces[rank.number]):
                    rows = known.text.column(layer, piece, stop)
                    k = layer.tokens_per_state
                    rank.pages[layer.name][ids, parts, at, slots] = rows[
                        (low + 1) * k : high * k + 1 : k
                    ]

    def _check_tokens(
        self, where: str, text: Text, number: int, table: Sequence[int], first: int, stop: int, *, skip_null: bool
    ) -> None:  # fmt: skip
        for layer in self.groups[number].layers:
            low, high, ids, parts, slots = self._slots(layer, table, first, stop)
            k = layer.tokens_per_state
            real = ids != NULL_BLOCK
            if not real.all():
                if not skip_null:
                    at = int(np.flatnonzero(~real)[0])
                    raise Wrong(
                        f"{where} group {number} {layer.name}: token {(low + at) * k} is read from the null block"
                    )
                ids, parts, slots = ids[real], parts[real], slots[real]
            for rank in self.ranks:
                for at, piece in enumerate(layer.pieces[rank.number]):
                    wanted = text.column(layer, piece, stop)[(low + 1) * k : high * k + 1 : k]
                    if not real.all():
                        wanted = wanted[real]
                    found = rank.pages[layer.name][ids, parts, at, slots]
                    if not np.array_equal(found, wanted):
                        bad = int(np.flatnonzero((found != wanted).any(axis=1))[0])
                        token = int(np.arange(low, high)[real][bad]) * k
                        raise Wrong(
                            f"{where} group {number} rank {rank.number} {layer.name} slice {piece}: token {token} "
                            f"(block {int(ids[bad])}) does not hold what was computed; checked [{first}, {stop})"
                        )

    def _move_state(self, request_id: str, known: Running, number: int, count: int) -> None:
        """Bring the state to the column that this step writes: v1/worker/mamba_utils.py `preprocess_mamba`."""
        group, table = self.groups[number], known.table[number]
        column = -(-(known.computed + count) // group.block_tokens) - 1
        before = known.state_column
        if before is None:
            before = (known.computed - 1) // group.block_tokens
        if table[column] == NULL_BLOCK:
            raise Wrong(f"{request_id} group {number}: vLLM computes a state into the null block")
        if known.computed:
            self._check_state(request_id, known.text, number, table[before], known.computed)
            if before != column:
                for rank in self.ranks:
                    for layer in group.layers:
                        pages = rank.pages[layer.name]
                        pages[table[column]] = pages[table[before]]

    def _write_state(self, known: Running, number: int, after: int) -> None:
        group = self.groups[number]
        column = -(-after // group.block_tokens) - 1
        known.state_column = column
        for layer in group.layers:
            for rank in self.ranks:
                for at, piece in enumerate(layer.pieces[rank.number]):
                    rank.pages[layer.name][known.table[number][column], 0, at, 0] = (
                        known.text.column(layer, piece, after)[after]
                    )

    def _check_state(self, where: str, text: Text, number: int, block: int, after: int) -> None:
        if block == NULL_BLOCK:
            raise Wrong(
                f"{where} group {number}: the state after {after} tokens is read from the null block"
            )
        for layer in self.groups[number].layers:
            for rank in self.ranks:
                for at, piece in enumerate(layer.pieces[rank.number]):
                    wanted = text.column(layer, piece, after)[after]
                    if not np.array_equal(rank.pages[layer.name][block, 0, at, 0], wanted):
                        raise Wrong(
                            f"{where} group {number} rank {rank.number} {layer.name}: block {block} does not hold the "
                            f"state after {after} tokens"
                        )


def _carried(value: Any) -> Any:
    """What arrives in another process."""
    return pickle.loads(pickle.dumps(value))


def _has_reports(connector: Any) -> bool:
    worker = connector._worker
    return worker is not None and bool(
        worker._ended_loads or worker._ended_saves or worker._load_reports
    )


def _groups(kv: Any, specs: dict[str, Any], shape: Shape, tp: int) -> list[Group]:
    """The groups that vLLM made, with what every rank holds of each layer."""
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        MambaSpec,
        SlidingWindowSpec,
        UniformTypeKVCacheSpecs,
    )

    made = []
    for number, group in enumerate(kv.kv_cache_groups):
        layers = []
        for name in group.layer_names:
            spec = group.kv_cache_spec
            if isinstance(spec, UniformTypeKVCacheSpecs):
                spec = spec.kv_cache_specs[name]
            if isinstance(spec, MambaSpec):
                pieces = tuple((0,) if spec.tp_replicated else (rank,) for rank in range(tp))
                layers.append(Layer(name, number, spec.state_content_size_bytes, 1, pieces))
                continue
            heads = specs[name].num_kv_heads
            replicas = max(1, tp // shape.kv_heads) if specs[name].max_tp_shards != 1 else tp
            pieces = tuple(
                tuple(rank // replicas * heads + i for i in range(heads)) for rank in range(tp)
            )
            layers.append(
                Layer(
                    name, number, spec.state_content_size_bytes, int(spec.tokens_per_state), pieces
                )
            )
        kind, window = "full", 0
        if isinstance(spec, MambaSpec):
            kind = "state"
        elif isinstance(spec, SlidingWindowSpec):
            kind, window = "window", spec.sliding_window
        elif isinstance(spec, ChunkedLocalAttentionSpec):
            kind, window = "local", spec.attention_chunk_size
        made.append(Group(kind, spec.block_size, window, tuple(layers)))
    return made


@functools.cache
def _base_config() -> Any:
    """vLLM's configuration for the tiny llama, which is never built; seconds."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(engines.tiny_llama()), dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=2048, max_num_batched_tokens=512, max_num_seqs=8, enable_prefix_caching=True,
        prefix_caching_hash_algo="sha256_cbor", kv_cache_memory_bytes=16 << 20,
    ).create_engine_config()  # fmt: skip


def vllm_config(
    shape: Shape, tp: int, budget: int, max_seqs: int, num_blocks: int, settings: dict[str, Any]
) -> Any:
    """The configuration of one engine: the base with what a shape and a test vary."""
    from vllm.config import KVTransferConfig

    config = copy.copy(_base_config())
    config.model_config = copy.copy(config.model_config)
    config.model_config.max_model_len = shape.max_model_len
    config.model_config.get_total_num_kv_heads = lambda: shape.kv_heads
    config.cache_config = cache = copy.copy(config.cache_config)
    cache.enable_prefix_caching = shape.prefix_caching
    cache.kv_cache_layout = shape.layout
    cache.num_gpu_blocks_override = num_blocks
    if shape.has_state:
        cache.mamba_cache_mode = "align"
    config.parallel_config = parallel = copy.copy(config.parallel_config)
    parallel.tensor_parallel_size = parallel.world_size = tp
    config.scheduler_config = scheduler = copy.copy(config.scheduler_config)
    scheduler.max_num_batched_tokens = scheduler.max_num_scheduled_tokens = budget
    scheduler.max_num_seqs = max_seqs
    scheduler.scheduler_reserve_full_isl = False
    scheduler.async_scheduling = shape.async_scheduling
    scheduler.policy = shape.policy
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="LarderConnector", kv_connector_module_path="cacheservice.connector", kv_role="kv_both",
        kv_load_failure_policy="recompute", kv_connector_extra_config=settings,
    )  # fmt: skip
    return config
