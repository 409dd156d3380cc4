"""Real vLLM engines for tests: tiny models made once per machine, engines in this process, built and torn down.

Engines run on CPU in one process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`), so a test can reach the scheduler and both
halves of the connector. Building one takes seconds; tests share engines where they can.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cacheservice.local.model_recipes import TINY

for name, value in {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}.items():
    os.environ.setdefault(name, value)

BLOCK_TOKENS = 32
CHUNK_TOKENS = 64
MODEL_FOLDER = Path(tempfile.gettempdir()) / f"larder-test-models-{os.getuid()}"


@cache
def tiny_model(name: str) -> Path:
    """Folder of a tiny model (a key of TINY); made on first use, kept between sessions: making it is repeatable."""
    folder = MODEL_FOLDER / name
    subprocess.run(
        [sys.executable, "-m", "cacheservice.local.model", str(folder), "--tiny", name],
        check=True, capture_output=True,
    )  # fmt: skip
    return folder


def tiny_llama() -> Path:
    """Folder of the tiny fp32 llama."""
    return tiny_model("llama")


def transfer_config(role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    """The --kv-transfer-config of a README reader, as a dictionary."""
    return {
        "kv_connector": "LarderConnector",
        "kv_connector_module_path": "cacheservice.connector",
        "kv_role": role,
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"tokens_per_chunk": CHUNK_TOKENS, **extra},
    }


@dataclass(frozen=True)
class Answer:
    """What an engine made of one prompt."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    """Per token: log-probability of the best minus that of the second best."""
    hand_over: dict[str, Any] | None


class Engine:
    """One vLLM engine in this process, of the tiny model `tiny`."""

    def __init__(
        self, transfer: dict[str, Any] | None, *, tiny: str = "llama", **options: Any
    ) -> None:
        from vllm import LLM
        from vllm.config import KVTransferConfig

        settings: dict[str, Any] = {
            "model": str(tiny_model(tiny)),
            "dtype": TINY[tiny].dtype,
            "skip_tokenizer_init": True,
            "enforce_eager": True,
            "block_size": BLOCK_TOKENS,
            "max_model_len": 2048,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "enable_prefix_caching": False,
            "prefix_caching_hash_algo": "sha256_cbor",
            "disable_log_stats": True,
            "seed": 0,
            **options,
        }
        if transfer is not None:
            settings["kv_transfer_config"] = KVTransferConfig(**transfer)
        self.llm = LLM(**settings)
        self._keep_stats()

    @property
    def core(self) -> Any:
        """vLLM's EngineCore."""
        return self.llm.llm_engine.engine_core.engine_core

    @property
    def scheduler(self) -> Any:
        """vLLM's scheduler."""
        return self.core.scheduler

    @property
    def connector(self) -> Any:
        """Our scheduler half's connector object."""
        return self.scheduler.connector

    @property
    def worker_connector(self) -> Any:
        """Our worker half's connector object."""
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()

    @property
    def num_free_blocks(self) -> int:
        """Free blocks of the pool; all but the null block when nothing runs and nothing is pinned."""
        return int(self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks())

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool, the null block included."""
        return int(self.scheduler.kv_cache_manager.block_pool.num_gpu_blocks)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        params: Sequence[dict[str, Any] | None] | None = None,
    ) -> list[Answer]:
        """Greedy answers of exactly `max_tokens` tokens; `params[i]` are the kv_transfer_params of prompt i."""
        from vllm import SamplingParams

        sampling = [
            SamplingParams(
                temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False, logprobs=2,
                extra_args={"kv_transfer_params": given} if given else None,
            )
            for given in (params or [None] * len(prompts))
        ]  # fmt: skip
        outputs = self.llm.generate(
            [{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False
        )
        return [_answer(output) for output in outputs]

    def totals(self) -> dict[str, float]:
        """Counts since the last call, of both halves where they are in this process, named as in stats.py."""
        merged = dict(self._seen.data)
        for half in self._halves:
            stats = (
                half.get_kv_connector_stats()
            )  # what no step has drained yet; added to `_seen` on the way
            for key, value in (stats.data if stats is not None else {}).items():
                merged[key] = merged.get(key, 0) + value
        self._seen.reset()
        return merged

    def _keep_stats(self) -> None:
        """vLLM drains our counts every step; add them up before they are gone."""
        from cacheservice.connector.stats import LarderStats

        self._seen = LarderStats()
        self._halves: list[Any] = []
        if self.scheduler.connector is None:
            return
        from vllm.distributed.kv_transfer import has_kv_transfer_group

        self._halves = [self.connector] + (
            [self.worker_connector] if has_kv_transfer_group() else []
        )
        for connector in self._halves:

            def drain(original: Any = connector.get_kv_connector_stats) -> Any:
                stats = original()
                if stats is not None:
                    self._seen.aggregate(stats)
                return stats

            connector.get_kv_connector_stats = drain

    def count_preemptions(self) -> list[int]:
        """A list whose only element counts preemptions from now on."""
        count = [0]
        original = self.scheduler._preempt_request

        def counted(*arguments: Any, **options: Any) -> None:
            count[0] += 1
            original(*arguments, **options)

        self.scheduler._preempt_request = counted
        return count

    def forget(self) -> None:
        """Come to rest and empty vLLM's own prefix cache, so that what follows can only be loaded or computed."""
        self.drain()
        assert self.llm.reset_prefix_cache(), "blocks are in use"

    def keep_pages(self) -> dict[tuple[int, ...], list[dict[str, Any]]]:
        """From now on, by prompt: the pages that a request has when it ends, of a model of one group.

        Per rank, layer -> array [block of the request, head, bytes], as they lie in vLLM's own tensors.
        """
        kept: dict[tuple[int, ...], list[dict[str, Any]]] = {}
        original = self.connector.request_finished_all_groups

        def keep(request: Any, block_ids: tuple[list[int], ...]) -> Any:
            (blocks,) = block_ids
            kept[tuple(request.prompt_token_ids)] = self.llm.collective_rpc(
                _pages_of_rank, args=(list(blocks),)
            )
            return original(request, block_ids)

        self.connector.request_finished_all_groups = keep
        return kept

    def drain(self, limit: int = 10_000) -> None:
        """Step until nothing is in flight: saves are reported and their pins released."""
        for _ in range(limit):
            if not self.scheduler.has_requests():
                return
            self.core.step()
        raise AssertionError("the engine did not come to rest")

    def close(self) -> None:
        """Tear it down completely, so that another can be built in this process."""
        from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        self.llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del self.llm
        cleanup_dist_env_and_memory()
        gc.collect()


def _pages_of_rank(worker: Any, blocks: list[int]) -> dict[str, Any]:
    """Runs in each rank's process. Reads what vLLM bound to its layers, not what our connector made of it."""
    import torch

    layers = worker.model_runner.compilation_config.static_forward_context
    found = {}
    for name, layer in layers.items():
        cache = getattr(layer, "kv_cache", None)
        if cache is None:
            continue
        states = list(cache) if isinstance(cache, list | tuple) else [cache]
        # [block, head, token, content]; MLA's latent has no heads, and recurrent state is several tensors.
        heads = states[0].shape[1] if len(states) == 1 and states[0].dim() == 4 else 1
        flat = [
            state[blocks].contiguous().view(torch.uint8).reshape(len(blocks), heads, -1)
            for state in states
        ]
        found[name] = torch.cat(flat, dim=-1).numpy()
    return found


def _answer(output: Any) -> Answer:
    completion = output.outputs[0]
    gaps = []
    for position in completion.logprobs:
        best = sorted((entry.logprob for entry in position.values()), reverse=True)
        gaps.append(best[0] - best[1] if len(best) > 1 else float("inf"))
    return Answer(tuple(completion.token_ids), tuple(gaps), output.kv_transfer_params)


@contextmanager
def engine(transfer: dict[str, Any] | None, **options: Any) -> Iterator[Engine]:
    """An engine for the length of a with block; `options` are those of `Engine` and of vLLM's LLM."""
    made = Engine(transfer, **options)
    try:
        yield made
    finally:
        made.close()
