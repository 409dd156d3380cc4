"""Eviction policies: never a held chunk, suffix before prefix, and what each policy keeps."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheservice.core.eviction import (
    GHOSTS_PER_CHUNK,
    LRU,
    MIN_GHOSTS,
    S3FIFO,
    Evictable,
    EvictionPolicy,
    build_policy,
)
from cacheservice.core.lineage import Lineage


class Entry(Evictable):
    """A chunk of a test; counts how often the policy looks at it."""

    __slots__ = ("holds", "num_looks", "parent_key")

    def __init__(
        self, key: int, number: int = 0, parent_key: int | None = None, num_bytes: int = 1
    ):
        super().__init__(key.to_bytes(32, "big"), number, num_bytes)
        self.holds = 0
        self.num_looks = 0
        self.parent_key = None if parent_key is None else parent_key.to_bytes(32, "big")

    def is_held(self) -> bool:
        self.num_looks += 1
        return self.holds > 0


class Cache:
    """A policy with the lineage that a store would keep beside it."""

    def __init__(self, policy: EvictionPolicy) -> None:
        self.policy = policy
        self.lineage = Lineage()
        self.entries: dict[bytes, Entry] = {}

    def insert(self, entry: Entry) -> None:
        parent = self.entries.get(entry.parent_key) if entry.parent_key else None
        self.entries[entry.key] = entry
        self.lineage.enter(entry, entry.parent_key, parent)
        self.policy.insert(entry)

    def remove(self, entry: Entry, *, evicted: bool = True) -> None:
        self.policy.remove(entry, evicted=evicted)
        self.lineage.leave(entry, entry.parent_key)
        del self.entries[entry.key]

    def evict(self) -> Entry | None:
        victim = self.policy.next_victim()
        if victim is None:
            return None
        assert isinstance(victim, Entry)
        self.remove(victim)
        return victim

    def chain(self, first_key: int, length: int, *, prefix_first: bool = False) -> list[Entry]:
        """Insert a prompt of `length` chunks and return it, prefix first."""
        entries = [Entry(first_key + i, i, first_key + i - 1 if i else None) for i in range(length)]
        for entry in entries if prefix_first else reversed(entries):
            self.insert(entry)
        return entries


class PolicyMachine(RuleBasedStateMachine):
    """Oracle: the set of cached chunks, who is held, and who names whom as parent."""

    policy_name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.cache = Cache(build_policy(self.policy_name))

    def pick(self, choice: int) -> Entry:
        entries = list(self.cache.entries.values())
        return entries[choice % len(entries)]

    def children(self, entry: Entry) -> list[Entry]:
        return [
            e
            for e in self.cache.entries.values()
            if e.parent_key == entry.key and e.number > entry.number
        ]

    @rule(key=st.integers(0, 40), num_bytes=st.integers(1, 5), is_wild=st.booleans())
    def insert(self, key: int, num_bytes: int, is_wild: bool) -> None:
        """Keys form a binary tree; a wild one lies about its number, as a faulty client may."""
        parent = (key - 1) // 2 if key else None
        number = 3 if is_wild else (key + 1).bit_length() - 1
        entry = Entry(key, number, parent, num_bytes)
        if entry.key not in self.cache.entries:
            self.cache.insert(entry)

    @precondition(lambda self: self.cache.entries)
    @rule(choices=st.lists(st.integers(0, 1000), min_size=1, max_size=6))
    def access(self, choices: list[int]) -> None:
        self.cache.policy.access(list(dict.fromkeys(self.pick(c) for c in choices)))

    @precondition(lambda self: self.cache.entries)
    @rule(choice=st.integers(0, 1000))
    def hold(self, choice: int) -> None:
        self.pick(choice).holds += 1

    @precondition(lambda self: self.cache.entries)
    @rule(choice=st.integers(0, 1000))
    def let_go(self, choice: int) -> None:
        entry = self.pick(choice)
        if entry.holds:
            entry.holds -= 1
            if not entry.holds:
                self.cache.policy.let_go(entry)

    @precondition(lambda self: self.cache.entries)
    @rule(choice=st.integers(0, 1000), num_bytes=st.integers(1, 9))
    def resize(self, choice: int, num_bytes: int) -> None:
        self.cache.policy.resize(self.pick(choice), num_bytes)

    @precondition(lambda self: self.cache.entries)
    @rule(choice=st.integers(0, 1000))
    def remove(self, choice: int) -> None:
        self.cache.remove(self.pick(choice), evicted=False)

    @rule(count=st.integers(1, 6))
    def evict(self, count: int) -> None:
        for _ in range(count):
            victim = self.cache.policy.next_victim()
            if victim is None:
                assert all(e.holds for e in self.cache.entries.values()), "a victim was overlooked"
                return
            assert isinstance(victim, Entry)
            assert not victim.holds, "a held chunk was named"
            assert all(e.holds for e in self.children(victim)), (
                "a prefix was named before a suffix that could go"
            )
            self.cache.remove(victim)

    @invariant()
    def is_consistent(self) -> None:
        self.cache.policy.check_invariants()
        self.cache.lineage.check_invariants()
        members = self.cache.policy.members()
        assert len(members) == len(self.cache.entries)
        assert set(members) == set(self.cache.entries.values())
        assert len(self.cache.policy.coldest(3)) <= 3


class S3FIFOMachine(PolicyMachine):
    policy_name = "s3fifo"


TestLRU = PolicyMachine.TestCase
TestLRU.settings = settings(max_examples=60, stateful_step_count=50)
TestS3FIFO = S3FIFOMachine.TestCase
TestS3FIFO.settings = settings(max_examples=60, stateful_step_count=50)

both = pytest.mark.parametrize("name", ["lru", "s3fifo"])


@both
@pytest.mark.parametrize("prefix_first", [True, False])
def test_suffix_goes_before_prefix_however_it_was_stored(name: str, prefix_first: bool) -> None:
    cache = Cache(build_policy(name))
    prompt = cache.chain(0, 10, prefix_first=prefix_first)
    assert [cache.evict() for _ in prompt] == prompt[::-1]


@both
def test_suffix_stored_after_its_prefix_aged_still_goes_first(name: str) -> None:
    cache = Cache(build_policy(name))
    prompt = cache.chain(0, 3)
    cache.chain(100, 5)
    tail = Entry(3, 3, 2)
    cache.insert(tail)
    order = []
    while (victim := cache.evict()) is not None:
        order.append(victim)
    assert order.index(tail) < order.index(prompt[2]) < order.index(prompt[0])


@both
def test_chunks_after_a_leased_one_do_not_block_eviction(name: str) -> None:
    cache = Cache(build_policy(name))
    prompt = cache.chain(0, 5)
    prompt[4].holds = 1
    assert {cache.evict() for _ in range(4)} == set(prompt[:4])
    assert cache.evict() is None
    prompt[4].holds = 0
    cache.policy.let_go(prompt[4])
    assert cache.evict() is prompt[4]


@both
def test_prefix_of_a_leased_chunk_outlives_other_prompts(name: str) -> None:
    cache = Cache(build_policy(name))
    prompt = cache.chain(0, 5)
    others = cache.chain(100, 5)
    prompt[4].holds = 1
    assert {cache.evict() for _ in range(5)} == set(others)


@both
def test_prefix_comes_back_into_order_when_its_suffix_is_let_go(name: str) -> None:
    cache = Cache(build_policy(name))
    prompt = cache.chain(0, 3)
    others = cache.chain(100, 4)
    prompt[2].holds = 1
    assert {cache.evict() for _ in others} == set(others)
    prompt[2].holds = 0
    cache.policy.let_go(prompt[2])
    cache.chain(200, 8)
    order = []
    while (victim := cache.evict()) is not None:
        order.append(victim)
    assert [entry for entry in order if entry in prompt] == prompt[::-1]
    assert order[-1] not in prompt, "they went on waiting, as the last resort"


@both
def test_eviction_looks_at_each_chunk_a_bounded_number_of_times(name: str) -> None:
    """Long chains stored prefix first, half of them held: no quadratic scan."""
    cache = Cache(build_policy(name))
    length, num_chains = 400, 5
    chains = [cache.chain(1000 * c, length, prefix_first=True) for c in range(num_chains)]
    for entry in chains[0]:
        entry.holds = 1
    for chain in chains[1:]:
        cache.policy.access(chain)
    while cache.evict() is not None:
        pass
    looks = sum(entry.num_looks for chain in chains for entry in chain)
    assert len(cache.entries) == length
    assert looks <= 8 * length * num_chains


def test_lru_keeps_what_was_used_last() -> None:
    cache = Cache(LRU())
    first, second = cache.chain(0, 3), cache.chain(100, 3)
    cache.policy.access(first)
    assert [cache.evict() for _ in range(4)] == [*second[::-1], first[2]]


def test_s3fifo_lets_a_scan_pass_and_keeps_what_was_asked_twice() -> None:
    cache = Cache(S3FIFO())
    hot = cache.chain(0, 10)
    cache.policy.access(hot)
    cache.chain(50, 20)
    for start in range(100, 1100, 10):
        cache.chain(start, 10)
        for _ in range(10):
            cache.evict()
    assert all(entry.key in cache.entries for entry in hot)


def test_s3fifo_takes_back_a_ghost_as_proven() -> None:
    cache = Cache(S3FIFO())
    prompt = cache.chain(0, 4)
    for _ in range(4):
        cache.evict()
    again = cache.chain(0, 4)
    scan = cache.chain(100, 8)
    assert {cache.evict() for _ in range(4)} <= set(scan)
    assert all(entry.key in cache.entries for entry in again)
    assert not any(entry is other for entry in prompt for other in again)


def test_ghosts_are_bounded_by_what_is_cached() -> None:
    policy = S3FIFO()
    cache = Cache(policy)
    for key in range(4 * MIN_GHOSTS):
        cache.insert(Entry(key))
        if len(cache.entries) > 600:
            cache.evict()
    assert policy.num_ghosts == GHOSTS_PER_CHUNK * 601
    while cache.evict() is not None:
        pass
    assert policy.num_ghosts <= MIN_GHOSTS


def test_unknown_policy_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="use s3fifo or lru"):
        build_policy("arc")


def test_small_fraction_must_lie_between_0_and_1() -> None:
    with pytest.raises(ValueError, match="small_fraction"):
        S3FIFO(small_fraction=1.0)
