"""What vLLM's KV cache groups are to a cache: the kind of each, by the class of its spec and never by a model name.

Fail closed: a class that is not named here as known to be safe makes the whole model uncacheable, because vLLM accepts
wrong bytes silently. The engine then runs without cache and says so once. vLLM 0.32, v1/kv_cache_interface.py.

Called by: connector.py when a half is built, namespace.py when ranks have registered their pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cacheservice.core.layout import GroupKind
from cacheservice.errors import UncacheableError

SPECS: dict[str, GroupKind] = {
    "FullAttentionSpec": GroupKind.FULL,
    "MLAAttentionSpec": GroupKind.MLA,
    "SlidingWindowSpec": GroupKind.SLIDING_WINDOW,
    "SlidingWindowMLASpec": GroupKind.SLIDING_WINDOW,
    "ChunkedLocalAttentionSpec": GroupKind.CHUNKED_LOCAL,
    "MambaSpec": GroupKind.RECURRENT,
}
"""Classes whose pages are a function of the tokens before their end. Exact classes: a subclass may mean other bytes."""

REFUSED_SPECS: dict[str, str] = {
    "CircularBufferSpec": "a ring of raw keys per request, which vLLM itself does not cache by prefix",
    "CrossAttentionSpec": "cross attention to an encoder's output, which is no function of the prefix",
    "EncoderOnlyAttentionSpec": "encoder attention, which looks at later tokens",
    "HiSparseHotSpec": "HiSparse's working set, a copy of what another group holds",
    "HiSparseResidentSpec": "HiSparse's working set, a copy of what another group holds",
    "HiddenStateCacheSpec": "hidden states for a drafter",
    "RSWASpec": "a window that keeps the prompt and drops what lies between",
    "SinkFullAttentionSpec": "learned sink blocks, which belong to no token",
}
"""Classes that are known and not cached, each with what it holds."""

REMEDY = "This engine runs without cache; to silence this, start it without --kv-transfer-config"


@dataclass(frozen=True, slots=True)
class GroupFacts:
    """What a group is, as its spec says."""

    kind: GroupKind
    window_tokens: int | None
    """Sliding window or local chunk in tokens."""
    is_replicated: bool
    """Every tensor parallel rank holds the same bytes."""


def check_groups(kv_cache_config: Any) -> None:
    """Look at all groups of a KVCacheConfig. Raises UncacheableError."""
    from vllm.v1.kv_cache_layout import KVCacheLayout

    layout = kv_cache_config.kv_cache_layout
    if layout not in KVCacheLayout.__members__ or not KVCacheLayout[layout].is_block_compact:
        raise UncacheableError(
            f"KV cache layout {layout!r} scatters a page over memory: set VLLM_KV_CACHE_LAYOUT=LBHNC (or HND). {REMEDY}"
        )
    for number, group in enumerate(kv_cache_config.kv_cache_groups):
        where = name_of(number, group)
        if group.is_eagle_group:
            raise UncacheableError(
                f"{where} holds layers of a drafter, whose pages depend on the token after them: start the engine "
                f"without --speculative-config. {REMEDY}"
            )
        if group.host_resident or not group.enable_kv_transfer:
            raise UncacheableError(
                f"{where} is kept in host memory or rebuilt from another group (HiSparse), which this version does not "
                f"cache. {REMEDY}"
            )
        describe_group(group.kv_cache_spec, where)
    if kv_cache_config.hash_block_size is None:
        raise UncacheableError(
            f"vLLM did not say how many tokens a block hash covers; this vLLM version is not supported. {REMEDY}"
        )


def name_of(number: int, group: Any) -> str:
    """A group in words."""
    first = group.layer_names[0] if group.layer_names else "no layers"
    return f"KV cache group {number} ({first} …)"


def describe_group(spec: Any, where: str) -> GroupFacts:
    """Kind of a group by the exact classes of its vLLM specs. Raises UncacheableError for all that is not known to be
    safe."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    found = {_describe_layer(layer_spec, where) for layer_spec in iter_layer_specs(spec)}
    if len(found) != 1:
        raise UncacheableError(
            f"{where} mixes kinds of attention in one group: "
            f"{', '.join(sorted({type(s).__name__ for s in iter_layer_specs(spec)}))}. {REMEDY}"
        )
    return found.pop()


def _describe_layer(spec: Any, where: str) -> GroupFacts:
    name = type(spec).__name__
    kind = SPECS.get(name)
    if kind is None:
        what = REFUSED_SPECS.get(name, "which this version does not know")
        raise UncacheableError(f"{where} is of class {name}: {what}. {REMEDY}")
    if kind is GroupKind.RECURRENT:
        return _describe_state(spec, where)
    states = spec.tokens_per_state
    if states != int(states) or states < 1 or spec.block_size % int(states):
        raise UncacheableError(
            f"{where} keeps one state per {states} tokens in blocks of {spec.block_size}, so that blocks are not made "
            f"of whole states. {REMEDY}"
        )
    for flag in ("non_causal", "non_causal_multi_token_decode"):
        if getattr(spec, flag, False):
            raise UncacheableError(
                f"{where} attends to later tokens ({flag}), so its pages are not a function of the prefix. {REMEDY}"
            )
    if getattr(spec, "bounded_replay", False):
        raise UncacheableError(
            f"{where} is a window that vLLM computes again after each hit (bounded replay), not cached here. {REMEDY}"
        )
    if getattr(spec, "extra_retained_tokens", 0):
        raise UncacheableError(
            f"{where} keeps {spec.extra_retained_tokens} more tokens than its window for a drafter: start the engine "
            f"without --speculative-config. {REMEDY}"
        )
    if not spec.prefix_cacheable:
        raise UncacheableError(f"{where} is not cached by prefix in vLLM either. {REMEDY}")
    window = None
    if kind is GroupKind.SLIDING_WINDOW:
        window = spec.sliding_window
        if window < 2:
            raise UncacheableError(
                f"{where} has a window of {window} tokens, of which nothing is ever read. {REMEDY}"
            )
    elif kind is GroupKind.CHUNKED_LOCAL:
        window = spec.attention_chunk_size
        if window % spec.block_size:
            raise UncacheableError(
                f"{where} has local chunks of {window} tokens in blocks of {spec.block_size}, so that a local chunk "
                f"does not start with a block: set --block-size to a divisor of {window}. {REMEDY}"
            )
    is_replicated = spec.max_tp_shards == 1 or name in ("MLAAttentionSpec", "SlidingWindowMLASpec")
    return GroupFacts(kind, window, is_replicated)


def _describe_state(spec: Any, where: str) -> GroupFacts:
    """Recurrent state: only vLLM's aligned mode keeps states at known token numbers."""
    if spec.mamba_cache_mode != "align":
        raise UncacheableError(
            f"{where} is recurrent state in mode {spec.mamba_cache_mode!r}, in which vLLM keeps no state at known "
            f"token numbers: start the engine with --enable-prefix-caching (--mamba-cache-mode align). {REMEDY}"
        )
    if spec.num_speculative_blocks:
        raise UncacheableError(
            f"{where} is recurrent state with speculative decoding: start the engine without --speculative-config. "
            f"{REMEDY}"
        )
    return GroupFacts(GroupKind.RECURRENT, None, spec.tp_replicated)
