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


DRAFTERS_WITHOUT_PAGES = ("ngram", "ngram_gpu", "suffix")
"""Methods of speculative decoding that draft from the request's own tokens, without KV pages of a drafter's own."""


def check_engine(vllm_config: Any) -> None:
    """Refuse flags of the engine that make keys or bytes unusable. Raises RefusedError."""
    _check_names_of_content(vllm_config.cache_config, vllm_config.model_config.multimodal_config)
    _check_transfer(vllm_config.kv_transfer_config)
    _check_model(vllm_config.model_config)
    _check_drafter(vllm_config.speculative_config)
    _check_parallel(vllm_config.parallel_config, vllm_config.kv_transfer_config)


def saves_prompts_only(vllm_config: Any) -> bool:
    """Whether generated tokens are left out of the cache: with speculative decoding, whose rejected drafts leave pages
    behind that are computed again later. Every chunk of a prompt ends before the first draft."""
    return vllm_config.speculative_config is not None


def caution_of(vllm_config: Any) -> str | None:
    """What the operator has to mind with these flags; None when there is nothing."""
    cautions = []
    if vllm_config.lora_config is not None:
        cautions.append(
            "--enable-lora: vLLM's block hashes name an adapter by its name and path, not by its content. Give an "
            "adapter that is replaced another path, or all engines another salt; else cached pages of the old one are "
            "used."
        )
    if vllm_config.weight_transfer_config is not None:
        cautions.append(
            "--weight-transfer-config: vLLM's block hashes do not name the weights. Pause with clear_cache=true (the "
            "default) for each update, or reset with reset_external=true after it; else cached pages of the old "
            "weights are used. The engine then goes on in a cache of its own until it restarts."
        )
    return " ".join(cautions) or None


def caution_of_split(vllm_config: Any, state_block_tokens: int) -> str | None:
    """What to mind when the engine ends its prefill steps where it keeps no recurrent state; None when it does not.

    `state_block_tokens` are the tokens of a block of recurrent state. To be asked when the first request comes: a
    server on CPU sets its block size back to the platform's default after it has started (vLLM 0.32,
    v1/engine/core.py calls `VllmConfig.__post_init__` again, platforms/cpu.py).
    """
    split = vllm_config.cache_config.block_size
    if split % state_block_tokens == 0:
        return None
    return (
        f"vLLM ends the steps of a prompt at multiples of {split} tokens, but keeps recurrent state at multiples of "
        f"{state_block_tokens} only: most prompts leave no state behind, and nothing of them is found again. Start the "
        f"engine with --block-size {state_block_tokens}"
    )


def _check_names_of_content(cache: Any, multimodal: Any) -> None:
    """Chunk keys must say what the pages were computed from, in every process alike."""
    algorithm = cache.prefix_caching_hash_algo
    if algorithm != HASH_ALGORITHM:
        raise RefusedError(
            f"Larder names chunks by vLLM's block hashes, and those of {algorithm!r} differ between processes: "
            f"start the engine with --prefix-caching-hash-algo {HASH_ALGORITHM}"
        )
    # vLLM 0.32, renderers/base.py `_process_mm_uuids`: with both caches off an image is named by a counter of the
    # process, so that the first image of any two engines would have one name.
    if (
        multimodal is not None
        and multimodal.mm_processor_cache_gb == 0
        and not cache.enable_prefix_caching
    ):
        raise RefusedError(
            "with --mm-processor-cache-gb 0 and without prefix caching vLLM numbers images and does not hash them, so "
            "that other images would be found under the same keys: start the engine without --mm-processor-cache-gb 0, "
            "or with --enable-prefix-caching"
        )


def _check_transfer(transfer: Any) -> None:
    """Our own part of --kv-transfer-config, and what MultiConnector has around it."""
    policy = transfer.kv_load_failure_policy
    if policy != "recompute":
        raise RefusedError(
            f"kv_load_failure_policy={policy!r} would end a request with an error when a load fails: set "
            '"kv_load_failure_policy": "recompute" in --kv-transfer-config'
        )
    outer = _outer_transfer()
    if outer is None or outer is transfer:
        return
    if outer.kv_load_failure_policy != "recompute":
        raise RefusedError(
            f"{outer.kv_connector} has kv_load_failure_policy={outer.kv_load_failure_policy!r}, and vLLM reads its own "
            "and not its children's: when a load fails, the request would end with an error. Set "
            '"kv_load_failure_policy": "recompute" beside "kv_connector": "MultiConnector" too'
        )
    children = outer.kv_connector_extra_config.get("connectors", [])
    if sum(child.get("kv_connector") == transfer.kv_connector for child in children) > 1:
        raise RefusedError(
            f"{outer.kv_connector} has {transfer.kv_connector} twice, and vLLM ends an engine whose connectors hand "
            'over under the same name: leave one of them out of "connectors" in --kv-transfer-config'
        )


def _outer_transfer() -> Any:
    """--kv-transfer-config as the user wrote it; None when vLLM does not say. MultiConnector gives each child a
    configuration of its own, but ranks build connectors with the whole one at hand (vLLM 0.32, v1/worker/worker_base.py
    `initialize_from_config`)."""
    from vllm.config import get_current_vllm_config_or_none

    whole = get_current_vllm_config_or_none()
    return whole.kv_transfer_config if whole is not None else None


def _check_model(model: Any) -> None:
    if model.is_encoder_decoder:
        raise RefusedError(
            "this model is an encoder-decoder, which vLLM does not run with any KV connector: start the engine without "
            "--kv-transfer-config"
        )
    if model.is_diffusion:
        raise RefusedError(
            "this model is a diffusion model, which computes the pages of a canvas again and again: start the engine "
            "without --kv-transfer-config"
        )
    if model.enable_sleep_mode:
        raise RefusedError(
            "sleep mode takes the memory of KV pages away from under the cache: start the engine without "
            "--enable-sleep-mode"
        )


def _check_drafter(speculative: Any) -> None:
    if speculative is None or speculative.method in DRAFTERS_WITHOUT_PAGES:
        return
    raise RefusedError(
        f"speculative decoding with method {speculative.method!r} is not cached, because a drafter's own pages depend "
        f'on the token after them: set "method" in --speculative-config to one of {", ".join(DRAFTERS_WITHOUT_PAGES)}, '
        "or start the engine without it"
    )


def _check_parallel(parallel: Any, transfer: Any) -> None:
    if parallel.pipeline_parallel_size > 1:
        raise RefusedError(
            "this version does not cache with pipeline parallelism: start the engine without --pipeline-parallel-size"
        )
    for flag in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, flag) > 1:
            raise RefusedError(
                "this version does not cache with context parallelism: "
                f"start the engine without --{flag.replace('_', '-')}"
            )
    if parallel.nnodes_within_dp > 1:
        raise RefusedError(
            "this version caches engines whose ranks are all on one node: start the engine without --nnodes, or give "
            "each node data parallel ranks of its own (--data-parallel-size-local)"
        )
    if parallel.world_size > 1 and parallel.distributed_executor_backend == "ray":
        raise RefusedError(
            "this version caches engines whose ranks are all on one node, and Ray may spread them: start the engine "
            "with --distributed-executor-backend mp"
        )
    sizes = (transfer.kv_connector_extra_config or {}).get("tensor_parallel_sizes")
    if sizes and parallel.tensor_parallel_size not in sizes:
        raise RefusedError(
            f"tensor_parallel_sizes={sizes} does not name this engine's own size "
            f"{parallel.tensor_parallel_size}: add it to the list on every engine that shares the cache"
        )
