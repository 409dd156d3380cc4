"""Flags of the engine that can't be cached with are refused at start, in one sentence with the flag to set.

Each check looks at vLLM's configuration only and raises RefusedError; nothing is checked again later. Fail closed,
because vLLM accepts wrong bytes silently. What only the model decides is in groups.py: there the engine runs without
cache. An agent that can't be reached is no reason to refuse: the engine connects later.

Called by: connector.py when a half is built.
"""

from __future__ import annotations

from typing import Any

from cacheservice.errors import RefusedError

HASH_ALGORITHM = "sha256_cbor"


def check_engine(vllm_config: Any) -> None:
    """Refuse flags of the engine that make keys or bytes unusable. Raises RefusedError."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    algorithm = cache.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        raise RefusedError(
            f"Larder names chunks by vLLM's block hashes, and those of {algorithm!r} differ between processes: "
            f"start the engine with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    policy = vllm_config.kv_transfer_config.kv_load_failure_policy
    if policy != "recompute":
        raise RefusedError(
            f"kv_load_failure_policy={policy!r} would end a request with an error when a load fails: set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    if vllm_config.speculative_config is not None:
        raise RefusedError(
            "this version does not cache with speculative decoding: start the engine without --speculative-config"
        )
    if parallel.pipeline_parallel_size > 1:
        raise RefusedError(
            "this version does not cache with pipeline parallelism: start the engine without --pipeline-parallel-size"
        )
    if getattr(parallel, "nnodes", 1) > 1:
        raise RefusedError(
            "this version caches engines whose ranks are all on one node: start the engine without --nnodes"
        )
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, flag, 1) > 1:
            raise RefusedError(
                "this version does not cache with context parallelism: "
                f"start the engine without --{flag.replace('_', '-')}"
            )
    sizes_of_others = (vllm_config.kv_transfer_config.kv_connector_extra_config or {}).get(
        "tensor_parallel_sizes"
    )
    if sizes_of_others and parallel.tensor_parallel_size not in sizes_of_others:
        raise RefusedError(
            f"tensor_parallel_sizes={sizes_of_others} does not name this engine's own size "
            f"{parallel.tensor_parallel_size}: add it to the list on every engine that shares the cache"
        )


def caution_of(vllm_config: Any) -> str | None:
    """What the operator has to mind with these flags; None when there is nothing."""
    if getattr(vllm_config, "lora_config", None) is None:
        return None
    return (
        "--enable-lora: vLLM's block hashes name an adapter by its name and path, not by its content. Give an adapter "
        "that is replaced another path, or all engines another salt; else cached pages of the old one are used"
    )
