"""The arena is used: fill, evict, refill with other sizes reaches 95 %; a shard costs at most 1 KB of records."""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cacheservice.core.allocator import ALIGNMENT_BYTES, aligned
from cacheservice.core.eviction import build_policy
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupShape, NamespaceSpec, build_namespace
from cacheservice.core.store import (
    ReserveRequestItem,
    ReserveResult,
    SessionId,
    Store,
    StoreLimits,
)

PAGE = ALIGNMENT_BYTES
ARENA_PAGES = 640
MAX_SHARD_PAGES = ARENA_PAGES // 100
SESSION, READER = SessionId(1), SessionId(2)

sizes = st.lists(st.integers(1, MAX_SHARD_PAGES * PAGE), min_size=1, max_size=4, unique=True)


def build_store(arena_bytes: int, policy: str = "s3fifo") -> Store:
    numbers = itertools.count(1)
    store = Store(
        arena_bytes=arena_bytes,
        policy=build_policy(policy),
        limits=StoreLimits(),
        new_id=lambda: next(numbers),
    )
    store.open_session(SESSION, maps_arena=True, role="both", name="engine")
    store.open_session(READER, maps_arena=True, role="both", name="engine")
    return store


def open_shape(store: Store, name: str, shard_bytes: int, num_shards: int = 1) -> NamespaceSpec:
    groups = [GroupShape("full", num_shards, shard_bytes)]
    spec = build_namespace({"m": name}, tokens_per_chunk=256, groups=groups)
    store.open_namespace(spec)
    return spec


def put(store: Store, spec: NamespaceSpec, keys: list[ChunkKey], parents: list[ChunkKey | None]):
    """Store whole chunks; returns whether all found room."""
    size = spec.groups[0].shard_bytes
    items = [
        ReserveRequestItem(key, parent, i, 0, shard, size)
        for i, (key, parent) in enumerate(zip(keys, parents, strict=True))
        for shard in range(spec.groups[0].num_shards)
    ]
    answers = store.reserve(SESSION, spec.digest, items, 0.0)
    store.commit(
        SESSION,
        [(a.reservation_id, (1,), False) for a in answers if a.result is ReserveResult.RESERVED],
        0.0,
    )
    return all(a.result is ReserveResult.RESERVED for a in answers)


def fill(store: Store, specs: list[NamespaceSpec], rng: random.Random, num_bytes: int) -> int:
    """Store prompts of 1 to 5 chunks of random shapes until they took `num_bytes`; all must find room.

    Returns the most bytes that were in use after a prompt: more may be evicted than one prompt needs, since what
    follows a chunk goes with it.
    """
    stored = peak = 0
    while stored < num_bytes:
        spec = rng.choice(specs)
        keys = [ChunkKey(rng.randbytes(32)) for _ in range(rng.randint(1, 5))]
        assert put(store, spec, keys, [None, *keys[:-1]]), "no room though nothing is leased"
        stored += len(keys) * spec.num_shards * aligned(spec.groups[0].shard_bytes)
        peak = max(peak, store.counts().used_bytes)
    return peak


@pytest.mark.parametrize("policy", ["s3fifo", "lru"])
@given(old=sizes, new=sizes, seed=st.integers(0, 1 << 32), evict=st.booleans())
# Holes of a page or two between shards of six pages, none of which a single eviction makes long enough.
@example(old=[1, 2, 5216, 10758], new=[20481], seed=2825, evict=True)
@settings(max_examples=15)
def test_refilling_with_other_sizes_reaches_95_percent(
    policy: str, old: list[int], new: list[int], seed: int, evict: bool
) -> None:
    rng = random.Random(seed)
    store = build_store(ARENA_PAGES * PAGE, policy)
    specs = [open_shape(store, f"old {size}", size, rng.randint(1, 2)) for size in old]
    fill(store, specs, rng, ARENA_PAGES * PAGE * 3 // 2)
    if evict:
        held = [chunk for _, keys in store.chunk_keys(None) for chunk in keys]
        for spec in specs:
            store.evict(spec.digest, rng.sample(held, len(held) // 2))
    specs = [open_shape(store, f"new {size}", size) for size in new]
    fill(store, specs, rng, ARENA_PAGES * PAGE * 3)
    peak = fill(store, specs, rng, ARENA_PAGES * PAGE // 2)
    store.check_invariants()
    assert peak >= 0.95 * ARENA_PAGES * PAGE


@given(size=st.integers(2, 20), seed=st.integers(0, 1 << 32), share=st.floats(0.0, 0.6))
@settings(max_examples=25)
def test_a_run_that_nobody_holds_is_found(size: int, seed: int, share: float) -> None:
    """With leases strewn over the arena a shard finds room exactly when some run is held by nobody."""
    rng = random.Random(seed)
    pages = 200
    store = build_store(pages * PAGE)
    small = open_shape(store, "small", PAGE)
    keys = [ChunkKey(rng.randbytes(32)) for _ in range(pages)]
    for key in keys:
        assert put(store, small, [key], [None])
    leased = [key for key in keys if rng.random() < share]
    answer = store.acquire(READER, small.digest, [(key, 0, 0) for key in leased], 0.0)
    walls = sorted(shard.offset // PAGE for _, shard in answer.ready)
    longest = max(after - before - 1 for before, after in itertools.pairwise([-1, *walls, pages]))
    big = open_shape(store, "big", size * PAGE)
    assert put(store, big, [ChunkKey(rng.randbytes(32))], [None]) == (longest >= size)
    store.check_invariants()
    again = store.acquire(READER, small.digest, [(key, 0, 0) for key in leased], 0.0)
    assert again.ready == answer.ready


def test_a_shard_costs_at_most_one_kilobyte_of_records_with_ghosts() -> None:
    rng = random.Random(1)
    num_shards = 1500
    tracemalloc.start()
    try:
        store = build_store(num_shards * PAGE)
        spec = open_shape(store, "m", PAGE)
        before, _ = tracemalloc.get_traced_memory()
        fill(store, [spec], rng, 4 * num_shards * PAGE)
        store.take_changes()
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert store.counts().num_shards >= num_shards - 5
    assert (after - before) / num_shards <= 1024


def test_padding_is_less_than_a_page_a_shard() -> None:
    assert [aligned(n) for n in (1, PAGE, PAGE + 1)] == [PAGE, PAGE, 2 * PAGE]
