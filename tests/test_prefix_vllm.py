"""Hits, loads and saves against vLLM's own prefix cache: its coordinator, its block pool, its KV cache manager.

vLLM's `find_longest_cache_hit` is asked what it would find if its own pool held exactly the blocks that our chunks hold
(and, below C, what an engine has itself). At a chunk end the two must agree. They may differ in three ways, each
stated by a test: vLLM looks between chunk ends when a chunk is longer than its alignment, it never hits a whole prompt
(it computes the last token again and rounds down), and with hashes finer than a block it may end inside one.
"""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace

import engines  # noqa: F401 - sets vLLM's environment
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_prefix import WHOLE, World, group, needed_of_chunk, questions, tokens_read, worlds
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_coordinator import KVCacheCoordinator, get_kv_cache_coordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHash, get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from cacheservice.core.layout import GroupKind, GroupSpec
from cacheservice.core.prefix import blocks_read, parts_to_load, stored_blocks

HASH = get_hash_fn_by_name("sha256_cbor")
NUM_BLOCKS = 700
MAX_TOKENS = 512


def vllm_spec(spec: GroupSpec, *, is_latent: bool = False) -> KVCacheSpec:
    shape = {"block_size": spec.block_tokens, "num_kv_heads": 1, "head_size": 8, "dtype": torch.float32}  # fmt: skip
    match spec.kind:
        case GroupKind.FULL:
            return FullAttentionSpec(**shape)
        case GroupKind.MLA:
            return MLAAttentionSpec(**shape)
        case GroupKind.SLIDING_WINDOW:
            windowed = SlidingWindowMLASpec if is_latent else SlidingWindowSpec
            return windowed(**shape, sliding_window=spec.window_tokens)
        case GroupKind.CHUNKED_LOCAL:
            return ChunkedLocalAttentionSpec(**shape, attention_chunk_size=spec.window_tokens)
        case GroupKind.RECURRENT:
            return MambaSpec(
                block_size=spec.block_tokens, shapes=((2,),), dtypes=(torch.float32,), mamba_cache_mode="align",
            )  # fmt: skip


def setup(groups: list[GroupSpec]) -> dict:
    """What vLLM's engine core passes to its cache manager for these groups (`resolve_kv_cache_block_sizes`)."""
    config = KVCacheConfig(
        num_blocks=NUM_BLOCKS,
        kv_cache_tensors=[],
        kv_cache_groups=[
            KVCacheGroupSpec([f"layer.{i}"], vllm_spec(spec, is_latent=i % 2 == 1))
            for i, spec in enumerate(groups)
        ],
        prefix_cache_retention_interval=None,
    )
    return {
        "kv_cache_config": config,
        "max_model_len": MAX_TOKENS,
        "max_in_flight_tokens": MAX_TOKENS,
        "enable_caching": True,
        "use_eagle": False,
        "enable_kv_cache_events": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "scheduler_block_size": math.lcm(*(spec.block_tokens for spec in groups)),
        "hash_block_size": math.gcd(*(spec.block_tokens for spec in groups)),
    }


def is_possible(groups: list[GroupSpec]) -> bool:
    """Whether vLLM can run such groups: it asserts equal blocks beside chunked local attention."""
    sizes = {spec.block_tokens for spec in groups}
    return len(sizes) == 1 or not any(spec.kind is GroupKind.CHUNKED_LOCAL for spec in groups)


@st.composite
def vllm_worlds(draw, min_chunks: int = 1) -> World:
    world = draw(worlds(min_chunks=min_chunks))
    if not is_possible(world.groups):
        block = world.groups[0].block_tokens
        groups = [dataclasses.replace(spec, block_tokens=block) for spec in world.groups]
        world = dataclasses.replace(world, groups=groups, computed=world.computed // block * block)
    return dataclasses.replace(world, max_chunks=None)


class Pool:
    """vLLM's coordinator with a pool that holds what `world` says: ours in chunks, the engine's own below C."""

    def __init__(self, world: World) -> None:
        arguments = setup(world.groups)
        self.coordinator: KVCacheCoordinator = get_kv_cache_coordinator(**arguments)
        last = world.computed + (world.num_chunks + 2) * world.tokens_per_chunk
        num_hashes = last // arguments["hash_block_size"]
        self.hashes = [BlockHash(i.to_bytes(32, "big")) for i in range(num_hashes)]
        for index, spec in enumerate(world.groups):
            held = {
                position
                for chunk in range(world.num_chunks)
                if world.is_there(chunk, index)
                for position in stored_blocks(spec, world.tokens_per_chunk, chunk)
            }
            own = world.computed // spec.block_tokens
            held |= set(range(own - 1 if spec.kind is GroupKind.RECURRENT and own else 0, own))
            if not held:
                continue
            size = max(held) + 1
            self.coordinator.block_pool.cache_full_blocks(
                request=SimpleNamespace(block_hashes=self.hashes),
                blocks=self.coordinator.block_pool.get_new_blocks(size),
                num_cached_blocks=0,
                num_full_blocks=size,
                block_size=spec.block_tokens,
                kv_cache_group_id=index,
                block_mask=[position in held for position in range(size)],
            )

    def hit(self, max_tokens: int) -> int:
        known = len(self.hashes) * self.coordinator.block_pool.hash_block_size
        return self.coordinator.find_longest_cache_hit(self.hashes, min(max_tokens, known))[1]


@given(vllm_worlds(), st.integers(0, 5))
@settings(max_examples=200)
def test_a_hit_ends_at_the_last_chunk_end_that_vllm_could_resume_at(world, offset):
    for asked in questions(world)[offset::6]:
        pool = Pool(asked)
        last = asked.num_chunks * asked.tokens_per_chunk
        ends = [
            end
            for end in range(asked.tokens_per_chunk, last + 1, asked.tokens_per_chunk)
            if end > asked.computed and pool.hit(end) == end
        ]
        assert asked.hit(num_tokens=last + 1) == max(ends, default=0)
        if not all(spec.kind in WHOLE for spec in asked.groups):
            ends = [end for end in ends if end < last]
        assert asked.hit(num_tokens=last) == max(ends, default=0)


@given(vllm_worlds(), st.data())
@settings(max_examples=250)
def test_with_chunks_of_its_alignment_vllm_finds_the_same_length(world, data):
    groups = data.draw(st.sampled_from([world.groups, world.groups[:1]]))
    step = math.lcm(*(spec.block_tokens for spec in groups))
    presence = world.presence[: len(world.presence) // len(groups) * len(groups)]
    computed = step * data.draw(st.integers(0, 5))
    world = World(groups, presence, step, computed, num_tokens=world.num_tokens)
    pool = Pool(world)
    for num_tokens in range(max(1, computed + 1), (world.num_chunks + 1) * step + 2):
        ours = world.hit(num_tokens=num_tokens)
        theirs = pool.hit(min(num_tokens - 1, max(world.num_chunks * step, computed)))
        if ours == num_tokens:  # a whole prompt, which vLLM rounds down
            assert all(spec.kind in WHOLE for spec in groups)
            assert theirs == ours - step
        elif pool.coordinator.enable_partial_hash_hits:  # it may end inside a block
            assert ours <= max(theirs, computed)
        else:
            assert ours == (theirs if theirs > computed else 0)


@given(vllm_worlds(), st.integers(0, 5))
@settings(max_examples=100)
def test_vllm_never_finds_less_than_we_offer_below_the_whole_prompt(world, offset):
    for asked in questions(world)[offset::6]:
        pool, end = Pool(asked), asked.hit()
        if end < asked.num_tokens:
            assert pool.hit(asked.num_tokens - 1) >= end


def request(name: str, num_tokens: int, groups: list[GroupSpec]) -> Request:
    init_none_hash(HASH)
    return Request(
        request_id=name,
        prompt_token_ids=list(range(num_tokens)),
        sampling_params=SamplingParams(max_tokens=8),
        pooling_params=None,
        block_hasher=get_request_block_hasher(setup(groups)["hash_block_size"], HASH),
    )


def manager_of(groups: list[GroupSpec]) -> KVCacheManager:
    return KVCacheManager(**setup(groups))


@given(vllm_worlds(), st.data())
@settings(max_examples=200)
def test_a_load_writes_all_blocks_that_vllm_allocates_for_it_and_no_other(world, data):
    """Through vLLM's manager: an earlier request leaves C tokens, the load is allocated as the scheduler does it."""
    tokens = world.tokens_per_chunk
    end = tokens * data.draw(st.integers(1, 6))
    num_tokens = end + data.draw(st.integers(0, 3))
    manager = manager_of(world.groups)
    if world.computed:
        earlier = request("earlier", world.computed, world.groups)
        assert manager.allocate_slots(earlier, world.computed) is not None
        manager.free(earlier)
        manager.new_step_starts()
    asked = request("asked", num_tokens, world.groups)
    hit, computed, _ = manager.get_computed_blocks(asked)
    tail = computed % manager.coordinator.scheduler_block_size
    if tail:  # the scheduler gives a hit inside a block up for a longer load
        computed -= tail
        hit = manager.truncate_computed_blocks(hit, computed)
    if computed >= end:
        return
    assert manager.allocate_slots(
        asked, 0, computed, hit, num_external_computed_tokens=end - computed, delay_cache_blocks=True
    ) is not None  # fmt: skip
    first = min(end, num_tokens - 1)
    own = {block.block_id for blocks in hit.blocks for block in blocks if not block.is_null}
    for spec, table in zip(world.groups, manager.get_block_ids("asked"), strict=True):
        fresh = [p for p, block_id in enumerate(table) if block_id and block_id not in own]
        assert fresh == list(blocks_read(spec, computed, end))
        parts = parts_to_load(spec, tokens, computed, end)
        assert parts is not None
        assert fresh == [p for part in parts for p in range(part.first_block, part.stop_block)]
        if first == end or spec.kind in WHOLE:
            touched = tokens_read(spec, first) + ([first] if first < end else [])
            assert all(table[token // spec.block_tokens] for token in touched)


@given(vllm_worlds(), st.data())
@settings(max_examples=200)
def test_the_step_that_crosses_a_chunk_end_still_has_the_blocks_that_the_chunk_holds(world, data):
    """And vLLM offers the state there, in that very block, when a step ends at it."""
    tokens = world.tokens_per_chunk
    num_tokens = 5 * tokens + data.draw(st.integers(1, tokens))
    manager = manager_of(world.groups)
    asked = request("asked", num_tokens, world.groups)
    step_tokens = math.lcm(*(spec.block_tokens for spec in world.groups))
    has_state = any(spec.kind is GroupKind.RECURRENT for spec in world.groups)
    seen = 0
    while asked.num_computed_tokens < num_tokens:
        computed = asked.num_computed_tokens
        size = data.draw(st.integers(1, 2 * tokens))
        if has_state:  # vLLM ends chunks of a prompt at blocks then (`_mamba_block_aligned_split`)
            size = step_tokens * data.draw(st.integers(1, 2 * tokens // step_tokens))
            if computed + size >= num_tokens and num_tokens % step_tokens:
                size = max(num_tokens // step_tokens * step_tokens - computed, 0) or num_tokens
        size = min(size, num_tokens - computed)
        manager.new_step_starts()
        assert manager.allocate_slots(asked, size) is not None
        tables = manager.get_block_ids("asked")
        offers = {
            (group, end): block
            for group, block, end in manager.take_boundary_state_offloads().get("asked", [])
        }
        for end in range((computed // tokens + 1) * tokens, computed + size + 1, tokens):
            chunk = end // tokens - 1
            for index, (spec, table) in enumerate(zip(world.groups, tables, strict=True)):
                held = stored_blocks(spec, tokens, chunk)
                if spec.kind is GroupKind.RECURRENT:
                    if end == computed + size:
                        assert offers[index, end] == table[held.start] != 0
                        seen += 1
                    continue
                assert needed_of_chunk(spec, tokens, chunk) <= set(held)
                assert all(table[position] for position in held)
        asked.num_computed_tokens += size


def test_a_load_of_a_whole_prompt_would_lack_a_block_of_a_window():
    """Why such a load is not offered: vLLM computes the last token again, with the table that it made for the end."""
    groups = [group(GroupKind.FULL, 4), group(GroupKind.SLIDING_WINDOW, 4, window_tokens=5)]
    manager, asked = manager_of(groups), request("asked", 8, groups)
    manager.allocate_slots(
        asked, 0, 0, None, num_external_computed_tokens=8, delay_cache_blocks=True
    )
    table = manager.get_block_ids("asked")[1]
    assert [bool(table[token // 4]) for token in tokens_read(groups[1], 8)] == [True] * 4
    assert [bool(table[token // 4]) for token in tokens_read(groups[1], 7)] == [False] + [True] * 3


def test_a_deepseek_v4_like_model_stores_only_what_hits_read():
    """Latents in blocks of 256 and 64 tokens, a window of 128, compressor states in blocks of 4 and 8."""

    window = GroupKind.SLIDING_WINDOW
    groups = [
        group(GroupKind.MLA, 256),
        group(GroupKind.MLA, 64),
        group(window, 64, 128),
        group(window, 4, 8),
        group(window, 8, 128),
    ]
    assert [spec.num_blocks(256) for spec in groups] == [1, 4, 2, 2, 16]
    arguments = setup(groups) | {"max_model_len": 8192, "max_in_flight_tokens": 8192}
    arguments["kv_cache_config"].num_blocks = 2000
    manager = KVCacheManager(**arguments)
    asked = request("asked", 4096, groups)
    assert manager.allocate_slots(asked, 4096) is not None
    assert [len(table) for table in manager.get_block_ids("asked")] == [16, 64, 64, 1024, 512]
    manager.free(asked)
    loaded = request("loaded", 4097, groups)
    manager.coordinator.block_pool.reset_prefix_cache()
    manager.allocate_slots(
        loaded, 0, 0, None, num_external_computed_tokens=4096, delay_cache_blocks=True
    )
    read = [blocks_read(spec, 0, 4096) for spec in groups]
    assert [len(blocks) for blocks in read] == [16, 64, 2, 2, 16]
    for blocks, table in zip(read, manager.get_block_ids("loaded"), strict=True):
        assert [p for p, block_id in enumerate(table) if block_id] == list(blocks)
