"""vLLM's real Scheduler and KVCacheManager with both halves of our connector, on their own threads and a real clock.

For what depends on threads: a lookup that hangs, a copy that a step overtakes, streams of a stand-in GPU. One rank, one
group of full attention. Everything else (other groups, ranks, stored bytes, hits that must happen) is for
scheduler_harness.py, which steps background work by hand, checks more and can be replayed.

The page oracle: a forward pass writes into every complete block bytes that are a function of its chained hash and
the layer.
Before each pass every block that the scheduler believes to be computed must hold exactly these bytes. vLLM accepts a
wrong load silently; this does not.

Called by: test_connector_scheduling.py, test_cuda_runners.py.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import engines  # sets vLLM's environment before vLLM is imported
import torch
from connector_fakes import FakeCache, fake_clients

BLOCK_TOKENS = 16
NUM_HEADS = 2
HEAD_SIZE = 4
LAYERS = ("model.layers.0.attn", "model.layers.1.attn")


class Harness:
    """One engine without a model."""

    def __init__(
        self, monkeypatch: Any, cache: FakeCache, *, num_blocks: int = 128, max_batched_tokens: int = 512,
        tokens_per_chunk: int = 64, prefix_caching: bool = True, max_seqs: int = 8, **extra: Any,
    ) -> None:  # fmt: skip
        from vllm.config import KVTransferConfig
        from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
        from vllm.utils.hashing import sha256_cbor
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        import cacheservice.connector.connector as module

        # A busy machine must not turn a hit into a deadline; tests of deadlines give their own.
        extra = {"lookup_ms": 5000, **extra}
        self.cache = cache
        self.clients = fake_clients(monkeypatch, cache)
        monkeypatch.setattr(module, "_ranks", lambda: (0, 0))
        config = vllm_config(max_batched_tokens, max_seqs, prefix_caching)
        config.kv_transfer_config = KVTransferConfig(
            **{
                **engines.transfer_config(socket_dir="/nowhere", **extra),
                "kv_connector_extra_config": {
                    "socket_dir": "/nowhere",
                    "tokens_per_chunk": tokens_per_chunk,
                    **extra,
                },
            }
        )
        spec = FullAttentionSpec(
            block_size=BLOCK_TOKENS,
            num_kv_heads=NUM_HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.float32,
        )
        kv = KVCacheConfig(
            num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(list(LAYERS), spec)],
            kv_cache_layout="LBHNC", hash_block_size=BLOCK_TOKENS, cache_hit_alignment_tokens=BLOCK_TOKENS,
        )  # fmt: skip
        config.cache_config.num_gpu_blocks = num_blocks
        config.cache_config.block_size = BLOCK_TOKENS
        init_none_hash(sha256_cbor)
        self.hasher = get_request_block_hasher(BLOCK_TOKENS, sha256_cbor)
        self.num_blocks = num_blocks
        self.scheduler = Scheduler(
            vllm_config=config, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(config),
            block_size=BLOCK_TOKENS, hash_block_size=BLOCK_TOKENS, log_stats=True,
        )  # fmt: skip
        self.worker = module.LarderConnector(config, KVConnectorRole.WORKER, kv)
        self.pages = {
            name: torch.zeros(
                num_blocks, NUM_HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE, dtype=torch.float32
            )
            for name in LAYERS
        }
        self.worker.register_kv_caches(self.pages)
        self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
            {(0, 0): self.worker.get_handshake_metadata()}
        )
        self.num_steps = 0
        self.answers: list[tuple[str, int, int, int | None]] = []
        """(request, computed tokens, tokens of the request, our answer) of every question."""
        ask = self.scheduler.connector.get_num_new_matched_tokens

        def recorded(request: Any, computed: int) -> tuple[int | None, bool]:
            answer = ask(request, computed)
            self.answers.append((request.request_id, computed, request.num_tokens, answer[0]))
            return answer

        self.scheduler.connector.get_num_new_matched_tokens = recorded
        self.finished: dict[str, Any] = {}

    @property
    def half(self) -> Any:
        """Our scheduler half."""
        return self.scheduler.connector._scheduler

    def add(
        self, request_id: str, tokens: Sequence[int], max_tokens: int = 4, **extra_args: Any
    ) -> Any:
        """Give the engine a request."""
        from vllm import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, extra_args=extra_args or None
        )
        request = Request(
            request_id=request_id, prompt_token_ids=list(tokens), sampling_params=sampling, pooling_params=None,
            block_hasher=self.hasher,
        )  # fmt: skip
        self.scheduler.add_request(request)
        return request

    def abort(self, request_id: str) -> None:
        """End a request from outside."""
        from vllm.v1.request import RequestStatus

        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> Any:
        """One step of the engine: schedule, check pages, run, report."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        self.num_steps += 1
        plan = self.scheduler.schedule()
        requests = [self.scheduler.requests[r] for r in plan.num_scheduled_tokens]
        for request in requests:
            self._check_pages(
                request, request.num_computed_tokens - plan.num_scheduled_tokens[request.request_id]
            )
            self._write_pages(request)
        output = KVConnectorOutput()
        worker = self.worker
        worker.bind_connector_metadata(plan.kv_connector_metadata)
        worker.start_load_kv(None)
        worker.wait_for_save()
        results = worker.get_transfer_results(plan.finished_req_ids)
        output.finished_sending = results.finished_sending
        output.finished_recving = results.finished_recving
        output.failed_recving = results.failed_recving
        output.kv_connector_stats = worker.get_kv_connector_stats()
        output.kv_connector_worker_meta = worker.build_connector_worker_meta()
        worker.clear_connector_metadata()
        sampled = []
        for request in requests:
            is_last_part = request.num_computed_tokens >= request.num_tokens
            sampled.append([self._token_after(request)] if is_last_part else [])
        ran = ModelRunnerOutput(
            req_ids=[r.request_id for r in requests],
            req_id_to_index={r.request_id: i for i, r in enumerate(requests)},
            sampled_token_ids=sampled, logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            kv_connector_output=output,
        )  # fmt: skip
        outputs = self.scheduler.update_from_output(plan, ran)
        for client in outputs.values():
            for one in client.outputs:
                if one.finish_reason is not None:
                    self.finished[one.request_id] = one.kv_transfer_params
        if not requests:
            time.sleep(0.0005)  # as vLLM's core does between empty steps
        return plan

    def run(self, until: Callable[[], bool] | None = None, limit: int = 5000) -> None:
        """Step until nothing is left to do, or until a condition holds."""
        for _ in range(limit):
            if until() if until is not None else not self.scheduler.has_requests():
                return
            self.step()
        raise AssertionError(f"not at rest after {limit} steps: {self.describe()}")

    def describe(self) -> str:
        """Who waits for what, for a test that got stuck."""
        lines = [f"{self.num_free_blocks} blocks free, {self.half._saves.num_pinned_blocks} pinned"]
        for request in self.scheduler.requests.values():
            tracked = self.half._tracked.get(request.request_id)
            lines.append(
                f"{request.request_id}: {request.status.name} tokens={request.num_tokens} computed="
                f"{request.num_computed_tokens} blocks={len(self._table(request))} "
                f"preempted={request.num_preemptions} "
                f"banned={tracked.state.banned_from if tracked else None} "
                f"load={tracked.state.load_id if tracked else None}"
            )
            lines.append(
                f"    last answers: {[a for a in self.answers if a[0] == request.request_id][-4:]}"
            )
        scheduler = self.scheduler
        lines.append(f"open loads: {self.half._open_loads}")
        lines.append(f"waiting: {[r.request_id for r in scheduler.waiting]}")
        lines.append(f"holding: {[r.request_id for r in scheduler.kv_holding_waiting]}")
        lines.append(
            f"received: {scheduler.finished_recving_kv_req_ids} "
            f"failed: {scheduler.failed_recving_kv_req_ids}"
        )
        lines.append(f"reserving: {[r.request_id for r in scheduler._inflight_prefills]}")
        return "\n".join(lines)

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the pool."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    def check_at_rest(self) -> None:
        """Nothing may be left behind when nothing runs."""
        pool = self.scheduler.kv_cache_manager.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1
        assert not self.half._tracked
        assert not self.half._open_loads
        assert self.half._saves.num_open == 0
        assert self.half._saves.num_pinned_blocks == 0
        deadline = time.monotonic() + 5
        while (
            self.cache.leases and time.monotonic() < deadline
        ):  # a lookup in flight gives its lease back when it ends
            time.sleep(0.001)
        assert not self.cache.leases

    def close(self) -> None:
        """End the threads of both halves."""
        self.scheduler.shutdown()
        self.worker.shutdown()

    def _token_after(self, request: Any) -> int:
        return (
            int.from_bytes(
                hashlib.sha256(bytes(str(list(request.all_token_ids)[-8:]), "ascii")).digest()[:2],
                "little",
            )
            % 1000
        )

    def _table(self, request: Any) -> list[int]:
        return self.scheduler.kv_cache_manager.get_block_ids(request.request_id)[0]

    def _check_pages(self, request: Any, num_computed: int) -> None:
        for i, block in enumerate(self._table(request)[: num_computed // BLOCK_TOKENS]):
            for layer, name in enumerate(LAYERS):
                wanted = content_of(request.block_hashes[i], layer)
                assert torch.equal(self.pages[name][block].flatten(), wanted), (
                    f"request {request.request_id}: block {i} (id {block}) of {name} holds other bytes than computed; "
                    f"computed={num_computed} answers={[a for a in self.answers if a[0] == request.request_id]}"
                )

    def _write_pages(self, request: Any) -> None:
        table = self._table(request)
        valid = min(request.num_computed_tokens, request.num_tokens)
        for i in range(valid // BLOCK_TOKENS):
            for layer, name in enumerate(LAYERS):
                self.pages[name][table[i]] = content_of(request.block_hashes[i], layer).view_as(
                    self.pages[name][0]
                )
        if valid % BLOCK_TOKENS and len(table) > valid // BLOCK_TOKENS:
            for name in LAYERS:  # a block that is not complete yet
                self.pages[name][table[valid // BLOCK_TOKENS]] = random.random()


def content_of(block_hash: bytes, layer: int) -> torch.Tensor:
    """What the page of a complete block holds."""
    size = NUM_HEADS * BLOCK_TOKENS * 2 * HEAD_SIZE
    generator = torch.Generator().manual_seed(
        int.from_bytes(bytes(block_hash)[:7], "little") + layer
    )
    return torch.rand(size, generator=generator)


def vllm_config(max_batched_tokens: int, max_seqs: int, prefix_caching: bool) -> Any:
    """vLLM's configuration for the tiny llama; the model itself is never built."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(engines.tiny_llama()), dtype="float32", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=2048,
        max_num_batched_tokens=max_batched_tokens, max_num_seqs=max_seqs, enable_prefix_caching=prefix_caching,
        prefix_caching_hash_algo="sha256_cbor", kv_cache_memory_bytes=16 << 20,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.scheduler_reserve_full_isl = False
    return config


def prompt(seed: int, num_tokens: int, prefix: Sequence[int] = ()) -> list[int]:
    """Random tokens, after a given prefix."""
    rng = random.Random(seed)
    return [*prefix, *(rng.randrange(4, 1000) for _ in range(num_tokens - len(prefix)))]
