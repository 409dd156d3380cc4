"""What this version can't cache is refused at start, in one sentence with the flag to set.

Each check looks at vLLM's configuration only and raises RefusedError; nothing is checked again later. Fail closed: a
kind of group or a feature that is not named here as known is refused, because vLLM accepts wrong bytes silently. An
agent that can't be reached is no reason to refuse: the engine runs without cache and connects later.

Called by: connector.py when a half is built, namespace.py when ranks have registered their pages.
"""

from __future__ import annotations

from typing import Any

from cacheservice.core.layout import GroupKind
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


def check_groups(kv_cache_config: Any) -> None:
    """Refuse layouts and groups that are not whole, opaque, block-compact pages of a known kind. Raises
    RefusedError."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = kv_cache_config.kv_cache_layout
    if layout not in KVCacheLayout.__members__ or not KVCacheLayout[layout].is_block_compact:
        raise RefusedError(
            f"KV cache layout {layout!r} scatters a page over memory: set VLLM_KV_CACHE_LAYOUT=LBHNC (or HND)"
        )
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        where = f"KV cache group {number} ({group.layer_names[0] if group.layer_names else 'no layers'} …)"
        if group.is_eagle_group or group.host_resident or not group.enable_kv_transfer:
            raise RefusedError(
                f"{where} holds draft or host-resident layers, which this version does not cache"
            )
        kind_of_group(group.kv_cache_spec, where)
    if kv_cache_config.hash_block_size is None:
        raise RefusedError(
            "vLLM did not say how many tokens a block hash covers; this vLLM version is not supported"
        )


def kind_of_group(spec: Any, where: str) -> GroupKind:
    """Kind of a group by the exact class of its vLLM spec. Raises RefusedError for all that is not known to be safe."""
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec, iter_layer_specs

    kinds = set()
    for layer_spec in iter_layer_specs(spec):
        name = type(layer_spec).__name__
        if type(layer_spec) is FullAttentionSpec:
            kinds.add(GroupKind.FULL)
        elif type(layer_spec) is MLAAttentionSpec:
            kinds.add(GroupKind.MLA)
        else:
            raise RefusedError(
                f"this version caches full-attention and MLA groups; {where} is of class {name}. Models with sliding "
                "windows: --disable-hybrid-kv-cache-manager makes vLLM keep them as full attention"
            )
        if layer_spec.tokens_per_state != 1:
            raise RefusedError(
                f"{where} compresses {layer_spec.tokens_per_state} tokens into one state, not cached here"
            )
        if layer_spec.non_causal:
            raise RefusedError(
                f"{where} attends to later tokens, so its pages are not a function of the prefix"
            )
    if len(kinds) != 1:
        raise RefusedError(
            f"{where} mixes kinds of attention in one group, which this version does not cache"
        )
    return kinds.pop()
