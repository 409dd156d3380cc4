"""The namespace of an engine: everything that must be equal for its bytes to be interchangeable, as one digest.

Each rank describes what it has (`RankFacts`, made where the pages are registered); the scheduler half merges the
ranks and adds what only it knows. The facts are canonical: sizes over all heads and layers of all ranks, so that
engines with other tensor parallel sizes have the same digest. Nothing here needs an agent. Design, sections 6 and 7.

Called by: worker.py (`describe_rank`), scheduler.py (`plan_namespace`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Any

from cacheservice.connector.checks import HASH_ALGORITHM
from cacheservice.connector.groups import REMEDY, describe_group, name_of
from cacheservice.connector.pages import GroupPages
from cacheservice.core.keys import NamespaceDigest
from cacheservice.core.layout import (
    GroupKind,
    GroupShape,
    GroupSpec,
    NamespaceSpec,
    build_namespace,
    choose_tokens_per_chunk,
    num_shards_of,
)  # fmt: skip
from cacheservice.errors import RefusedError, UncacheableError

SCHEMA_VERSION = 2
PROBE_TOKENS = tuple(range(1, 17))
PROBE_EXTRA_KEYS = (("lora", "probe", "path"), ("mm", "probe", 3), ("cache_salt", "probe"))
MAX_SHARD_BYTES = 1 << 32
KV_HEADS_NAME = re.compile(
    "kv_heads|key_value_heads|head_kv|multi_query_group_num|num_attention_groups"
)
"""Fields of model configurations with a number of KV heads: those of vLLM 0.32's transformers_utils/
model_arch_config_convertor.py `get_total_num_kv_heads`, and their variants for some layers (`swa_…`, `…_per_layer`)."""


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One group as one rank sees it."""

    kind: GroupKind
    block_tokens: int
    kernel_block_tokens: int
    layers: tuple[str, ...]
    block_bytes: int
    """Payload of one block over this rank's layers and heads."""
    num_heads: int
    """KV heads of this rank; 1 for what is not made of heads."""
    is_head_major: bool
    """A range of heads is one run of bytes, so that a page can be cut by heads."""
    is_replicated: bool
    """Every tensor parallel rank holds the same bytes."""
    window_tokens: int | None
    details: tuple[tuple[str, str], ...]
    """Fields of vLLM's spec that change the meaning of bytes and not their number, as text."""


@dataclass(frozen=True, slots=True)
class RankFacts:
    """What one rank has. Travels to the scheduler half, so plain values only."""

    tp_rank: int
    pp_rank: int
    layout: str
    backend: str
    isa: str
    groups: tuple[RankGroup, ...]
    refusal: str = ""
    """Why this rank can't cache; empty when it can. The other fields mean nothing then."""


@dataclass(frozen=True, slots=True)
class NamespacePlan:
    """A namespace, and how its shards map to groups. Safe to pickle."""

    spec: NamespaceSpec
    groups: tuple[GroupSpec, ...]

    @property
    def digest(self) -> NamespaceDigest:
        """Digest of the namespace."""
        return self.spec.digest

    @property
    def tokens_per_chunk(self) -> int:
        """Tokens of one chunk."""
        return self.spec.tokens_per_chunk


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What the scheduler half knows of its engine."""

    facts: Mapping[str, Any]
    """JSON values: model, dtypes, hashes, salt."""
    num_kv_heads: int
    """Of the model, over all ranks."""
    hash_block_tokens: int
    tensor_parallel_size: int
    tensor_parallel_sizes: tuple[int, ...]
    tokens_per_chunk: int | None
    """What the user asked for; None = automatic."""
    other_kv_heads: tuple[int, ...] = ()
    """Other numbers of KV heads that the model's configuration names, for layers of their own kind."""


def describe_engine(
    vllm_config: Any, kv_cache_config: Any, *, salt: str, tensor_parallel_sizes: Sequence[int] | None,
    tokens_per_chunk: int | None,
) -> EngineFacts:  # fmt: skip
    """Collect what the scheduler half knows. Reads samples of the weight files: seconds for a large model."""
    from cacheservice.connector.model_identity import identify_model

    model, cache, parallel = (
        vllm_config.model_config,
        vllm_config.cache_config,
        vllm_config.parallel_config,
    )
    facts = {
        "schema": SCHEMA_VERSION,
        "vllm": _vllm_series(),
        "model": identify_model(model, vllm_config.load_config),
        "dtype": str(model.dtype),
        "quantization": str(model.quantization),
        "kv_cache_dtype": str(cache.cache_dtype),
        "hash": hash_facts(),
        "hash_block_tokens": kv_cache_config.hash_block_size,
        "salt": salt,
    }
    if kv_cache_config.has_mamba_layers:
        facts["conv_state_layout"] = _conv_state_layout()
    own = parallel.tensor_parallel_size
    return EngineFacts(
        facts=facts,
        num_kv_heads=model.get_total_num_kv_heads(),
        hash_block_tokens=kv_cache_config.hash_block_size,
        tensor_parallel_size=own,
        tensor_parallel_sizes=tuple(tensor_parallel_sizes or (own,)),
        tokens_per_chunk=tokens_per_chunk,
        other_kv_heads=tuple(sorted(kv_head_counts(model.hf_text_config.to_dict()))),
    )


def kv_head_counts(config: Mapping[str, object] | Sequence[object]) -> set[int]:
    """Every number of KV heads that a model's configuration names, at any depth: layers of one model may differ
    (MiMo-V2 has 4 in full attention and 8 in windows), and vLLM names one number for all of them."""
    counts: set[int] = set()
    values: Iterable[tuple[object, object]] = (
        config.items() if isinstance(config, Mapping) else enumerate(config)
    )
    for name, value in values:
        if isinstance(value, Mapping):
            counts |= kv_head_counts(value)
        elif isinstance(value, list | tuple):
            counts |= kv_head_counts([v for v in value if isinstance(v, Mapping | list | tuple)])
        if isinstance(name, str) and KV_HEADS_NAME.search(name):
            listed = value if isinstance(value, list | tuple) else [value]
            counts.update(v for v in listed if type(v) is int and v > 0)
    return counts


def _conv_state_layout() -> str:
    """Order of the two axes of a convolution state, which an environment variable can change."""
    from vllm.model_executor.layers.mamba.mamba_utils import get_conv_state_layout

    return str(get_conv_state_layout())


def _vllm_series() -> str:
    """major.minor of vLLM: another one may compute or lay out the same pages otherwise."""
    import vllm

    return ".".join(vllm.__version__.split(".")[:2])


def hash_facts() -> dict[str, str]:
    """How vLLM hashes blocks in this process: algorithm, seed value, and a probe that notices any change of the input.

    The seed value is computed as vLLM 0.32 does in v1/core/kv_cache_utils.py `init_none_hash`, which runs later than
    this.
    """
    from vllm.utils.hashing import get_hash_fn_by_name
    from vllm.v1.core.kv_cache_utils import BlockHash, hash_block_tokens, resolve_none_hash_seed

    function = get_hash_fn_by_name(HASH_ALGORITHM)
    none_hash = function(resolve_none_hash_seed(function))
    probe = hash_block_tokens(function, BlockHash(none_hash), PROBE_TOKENS, PROBE_EXTRA_KEYS)
    return {"algorithm": HASH_ALGORITHM, "none_hash": none_hash.hex(), "probe": bytes(probe).hex()}


def describe_rank(
    kv_cache_config: Any,
    pages: Sequence[GroupPages],
    *,
    tp_rank: int,
    pp_rank: int,
    backend: str,
    isa: str,
) -> RankFacts:
    """Describe what this rank registered; `pages[g]` is the page plan of group g."""
    groups = []
    for number, (group, plan) in enumerate(
        zip(kv_cache_config.kv_cache_groups, pages, strict=True)
    ):
        spec, where = group.kv_cache_spec, name_of(number, group)
        facts = describe_group(spec, where)
        kernel_blocks = {layer.kernel_blocks for layer in plan.layers}
        if len(kernel_blocks) != 1:
            raise UncacheableError(
                f"{where} has layers of different kernel block sizes, not cached here. {REMEDY}"
            )
        is_cut_by_heads = facts.kind is not GroupKind.RECURRENT and not facts.is_replicated
        heads = _kv_heads(spec, where) if is_cut_by_heads else 1
        groups.append(
            RankGroup(
                kind=facts.kind,
                block_tokens=spec.block_size,
                kernel_block_tokens=spec.block_size // kernel_blocks.pop(),
                layers=tuple(layer.name for layer in plan.layers),
                block_bytes=plan.block_bytes,
                num_heads=heads,
                is_head_major=plan.is_head_major and plan.num_heads == heads,
                is_replicated=facts.is_replicated,
                window_tokens=facts.window_tokens,
                details=_details(spec, [layer.name for layer in plan.layers]),
            )
        )
    return RankFacts(
        tp_rank, pp_rank, str(kv_cache_config.kv_cache_layout), backend, isa, tuple(groups)
    )


def refused_rank(why: str, *, tp_rank: int, pp_rank: int) -> RankFacts:
    """What a rank says of itself that can't cache."""
    return RankFacts(tp_rank, pp_rank, "", "", "", (), refusal=why)


def _kv_heads(spec: Any, where: str) -> int:
    """KV heads of this rank; every layer of a group must have as many, so that one head range cuts all of them."""
    from vllm.v1.kv_cache_interface import iter_layer_specs

    heads = {layer.num_kv_heads for layer in iter_layer_specs(spec)}
    if len(heads) != 1:
        raise UncacheableError(
            f"{where} has layers with {sorted(heads)} KV heads, not cached here. {REMEDY}"
        )
    return int(heads.pop())


def layers_in_order(names: Sequence[str]) -> list[str]:
    """Canonical order of layers: by the numbers in their names, then by name."""
    return sorted(names, key=lambda name: ([int(n) for n in re.findall(r"\d+", name)], name))


def plan_namespace(
    engine: EngineFacts, ranks: Sequence[RankFacts], *, generation: str = ""
) -> NamespacePlan:
    """Merge the ranks into one namespace. `generation` is not empty after this engine's cache was reset.

    Raises UncacheableError when ranks disagree or the sizes can't share a cache, RefusedError when the user's own
    tokens_per_chunk does not fit the model.
    """
    if not ranks:
        raise UncacheableError("no rank described its KV cache")
    for rank in ranks:
        if rank.refusal:
            raise UncacheableError(rank.refusal)
    first = ranks[0]
    for rank in ranks[1:]:
        differ = [n for n in ("layout", "backend", "isa") if getattr(rank, n) != getattr(first, n)]
        if differ or len(rank.groups) != len(first.groups):
            raise UncacheableError(
                f"ranks disagree about {', '.join(differ) or 'the number of groups'}; cache refused"
            )
    specs, described = [], []
    for number in range(len(first.groups)):
        spec, facts = _merge_group(engine, number, [rank.groups[number] for rank in ranks], ranks)
        specs.append(spec)
        described.append(facts)
    tokens_per_chunk = _chunk_size(engine, specs)
    shapes = [
        GroupShape(s.kind.value, s.num_shards, s.shard_bytes(tokens_per_chunk)) for s in specs
    ]
    for number, shape in enumerate(shapes):
        if not 0 < shape.shard_bytes <= MAX_SHARD_BYTES:
            raise RefusedError(
                f"a shard of group {number} would have {shape.shard_bytes} bytes: set a smaller tokens_per_chunk than "
                f"{tokens_per_chunk} in kv_connector_extra_config"
            )
    facts = {
        **engine.facts,
        "layout": first.layout,
        "backend": first.backend,
        "isa": first.isa,
        "groups": described,
        "generation": generation,
    }
    return NamespacePlan(
        build_namespace(facts, tokens_per_chunk=tokens_per_chunk, groups=shapes), tuple(specs)
    )


def _merge_group(
    engine: EngineFacts, number: int, parts: Sequence[RankGroup], ranks: Sequence[RankFacts]
) -> tuple[GroupSpec, dict[str, Any]]:
    first = parts[0]
    for part in parts[1:]:
        for name in (
            "kind",
            "block_tokens",
            "kernel_block_tokens",
            "num_heads",
            "is_head_major",
            "is_replicated",
            "window_tokens",
            "details",
        ):
            if getattr(part, name) != getattr(first, name):
                raise UncacheableError(
                    f"ranks disagree about {name} of KV cache group {number}; cache refused"
                )
    by_stage = {rank.pp_rank: part for rank, part in zip(ranks, parts, strict=True)}
    layers = layers_in_order([name for part in by_stage.values() for name in part.layers])
    stage_bytes = sum(part.block_bytes for part in by_stage.values())
    heads = _total_slices(engine, number, first)
    num_shards = _num_shards(engine, number, first, heads)
    bytes_per_block = stage_bytes // first.num_heads * heads
    spec = GroupSpec(
        kind=first.kind, block_tokens=first.block_tokens, num_layers=len(layers), bytes_per_block=bytes_per_block,
        num_shards=num_shards, window_tokens=first.window_tokens, num_heads=heads,
    )  # fmt: skip
    facts = {
        "kind": first.kind.value,
        "block_tokens": first.block_tokens,
        "kernel_block_tokens": first.kernel_block_tokens,
        "layers": layers,
        "heads": heads,
        "window_tokens": first.window_tokens,
        "bytes_per_token": bytes_per_block / first.block_tokens,
        "details": dict(first.details),
    }
    return spec, facts


def _total_slices(engine: EngineFacts, number: int, group: RankGroup) -> int:
    """Distinct slices of a group over all ranks: see GroupSpec.num_heads."""
    ranks = engine.tensor_parallel_size
    if group.is_replicated:
        return 1
    if group.kind is GroupKind.RECURRENT:
        return ranks
    # Several numbers may give as many per rank, since a rank has one at least. The largest is right for its own layers,
    # and stores those of a smaller one more than once; a smaller one would take different heads for the same.
    fitting = [
        count
        for count in (engine.num_kv_heads, *engine.other_kv_heads)
        if group.num_heads == max(1, count // ranks) and 0 in (count % ranks, ranks % count)
    ]
    if fitting:
        return max(fitting)
    if group.num_heads > 1 or ranks == 1:
        return group.num_heads * ranks  # a group with other heads than the model's main one
    raise UncacheableError(
        f"KV cache group {number} has one KV head per rank where the model's {engine.num_kv_heads} over {ranks} ranks "
        f"give {engine.num_kv_heads // ranks}: how many ranks share a head is not known. Use a smaller "
        f"--tensor-parallel-size. {REMEDY}"
    )


def _num_shards(engine: EngineFacts, number: int, group: RankGroup, heads: int) -> int:
    """Into how many parts a chunk of a group is stored, so that every size in use reads and writes whole parts."""
    if group.is_replicated:
        return 1
    sizes = engine.tensor_parallel_sizes
    if group.kind is GroupKind.RECURRENT:
        if set(sizes) != {engine.tensor_parallel_size}:
            raise UncacheableError(
                f"tensor_parallel_sizes={list(sizes)}: KV cache group {number} is recurrent state, whose parts per "
                "rank can't be put together for another number of ranks. Give all engines that share the cache one "
                f"--tensor-parallel-size and leave tensor_parallel_sizes out. {REMEDY}"
            )
        return heads
    shards = num_shards_of(heads, sizes)
    if shards is None:
        raise UncacheableError(
            f"tensor_parallel_sizes={list(sizes)} cut the {heads} KV heads of KV cache group {number} so that parts "
            f"don't divide each other: give sizes of which each divides the number of heads. {REMEDY}"
        )
    if shards != heads // group.num_heads and not group.is_head_major:
        raise UncacheableError(
            "several tensor parallel sizes need contiguous heads: set VLLM_KV_CACHE_LAYOUT=LBHNC (or HND). "
            f"{REMEDY}"
        )
    return shards


def _chunk_size(engine: EngineFacts, groups: Sequence[GroupSpec]) -> int:
    unit = lcm(engine.hash_block_tokens, *(g.block_tokens for g in groups))
    wanted = engine.tokens_per_chunk
    if wanted is None:
        chosen = choose_tokens_per_chunk(groups)
        return chosen if chosen % unit == 0 else unit * -(-chosen // unit)
    if wanted % unit:
        raise RefusedError(
            f"tokens_per_chunk={wanted} is no multiple of {unit}, the common multiple of this model's block sizes: "
            f"set it to {unit * max(1, round(wanted / unit))}, or leave it out"
        )
    return wanted


def _details(spec: Any, layers: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Spec fields that say how to read the bytes; in the order of layers where a group has several kinds of them."""
    names = (
        "head_size", "head_size_v", "dtype", "kv_quant_mode", "sliding_window", "attention_chunk_size",
        "cache_dtype_str", "cache_role", "model_version", "state_content_bytes", "tokens_per_state", "num_head_slots",
        "shapes", "dtypes", "mamba_type", "mamba_cache_mode",
    )  # fmt: skip
    by_layer = getattr(spec, "kv_cache_specs", None)
    specs = [spec] if by_layer is None else [by_layer.get(name) for name in layers]
    found = []
    for name in sorted(names):
        values = [str(getattr(layer, name, None)) for layer in specs]
        found.append((name, values[0] if len(set(values)) == 1 else "|".join(values)))
    return tuple(found)
