"""What the store promises, one behaviour per test."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from cacheservice.core.allocator import ALIGNMENT_BYTES
from cacheservice.core.eviction import build_policy
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.layout import GroupShape, NamespaceSpec, build_namespace
from cacheservice.core.outcomes import Presence
from cacheservice.core.store import (
    AcquireAnswer,
    CommitResult,
    HeldChunk,
    LookupLease,
    ReserveAnswer,
    ReserveRequestItem,
    ReserveResult,
    SessionId,
    Store,
    StoreLimits,
)
from cacheservice.errors import (
    Conflict,
    InvalidRequest,
    LimitReached,
    UnknownObject,
    UnknownSession,
)

PAGE = ALIGNMENT_BYTES
A, B = SessionId(1), SessionId(2)
ONE = build_namespace({"m": 1}, tokens_per_chunk=256, groups=[GroupShape("full", 1, PAGE)])
TWO = build_namespace(
    {"m": 2},
    tokens_per_chunk=256,
    groups=[GroupShape("full", 2, PAGE), GroupShape("sliding_window", 1, PAGE)],
)
COMMITTED, RESERVED = CommitResult.COMMITTED, ReserveResult.RESERVED

both = pytest.mark.parametrize("policy", ["s3fifo", "lru"])


class World:
    """A store with two sessions: A maps the arena, B streams."""

    def __init__(
        self, pages: int = 16, *, policy: str = "s3fifo", limits: StoreLimits | None = None
    ) -> None:
        numbers = itertools.count(1)
        self.store = Store(
            arena_bytes=pages * PAGE,
            policy=build_policy(policy),
            limits=limits or StoreLimits(max_lookup_lease_fraction=1.0),
            new_id=lambda: next(numbers),
        )
        self.store.open_session(A, maps_arena=True, role="prefill", name="engine-a")
        self.store.open_session(B, maps_arena=False, role="decode", name="engine-b")
        self.store.open_namespace(ONE)
        self.store.open_namespace(TWO)

    def reserve(
        self,
        keys: Sequence[ChunkKey],
        *,
        session: SessionId = A,
        spec: NamespaceSpec = ONE,
        shard: tuple[int, int] = (0, 0),
        now_s: float = 0.0,
    ) -> list[ReserveAnswer]:
        group, index = shard
        items = [
            ReserveRequestItem(
                key, keys[i - 1] if i else None, i, group, index, spec.groups[group].shard_bytes
            )
            for i, key in enumerate(keys)
        ]
        return self.store.reserve(session, spec.digest, items, now_s)

    def commit(
        self, answers: Sequence[ReserveAnswer], *, session: SessionId = A, now_s: float = 0.0
    ) -> list[CommitResult]:
        items = [(a.reservation_id, (7,), False) for a in answers if a.result is RESERVED]
        return self.store.commit(session, items, now_s)

    def put(self, keys: Sequence[ChunkKey], *, now_s: float = 0.0) -> None:
        """Store a prompt; fails when there is no room."""
        answers = self.reserve(keys, now_s=now_s)
        assert all(a.result is not ReserveResult.NO_SPACE for a in answers)
        self.commit(answers, now_s=now_s)
        self.store.check_invariants()

    def acquire(
        self, keys: Sequence[ChunkKey], *, session: SessionId = B, now_s: float = 0.0
    ) -> AcquireAnswer:
        return self.store.acquire(session, ONE.digest, [(k, 0, 0) for k in keys], now_s)

    def lease(
        self,
        session: SessionId,
        keys: Sequence[ChunkKey],
        now_s: float,
        *,
        spec: NamespaceSpec = ONE,
        superseded: int = 0,
    ) -> LookupLease | None:
        """What a lookup leases."""
        _, lease = self.store.look_up(
            session, spec.digest, keys, now_s, takes_lease=True, superseded=superseded
        )
        return lease

    def ready(self, keys: Sequence[ChunkKey], spec: NamespaceSpec = ONE) -> list[int]:
        """Positions of the chunks that are ready."""
        width = len(spec.groups)
        codes = self.store.presence(spec.digest, keys)
        return [i for i in range(len(keys)) if set(codes[i * width : (i + 1) * width]) == {1}]


def prompt(name: str, length: int) -> list[ChunkKey]:
    return [ChunkKey(hashlib.sha256(f"{name} {i}".encode()).digest()) for i in range(length)]


# Leases


@both
def test_leased_chunks_survive_pressure(policy: str) -> None:
    world = World(16, policy=policy)
    kept = prompt("kept", 8)
    world.put(kept)
    answer = world.acquire(kept)
    before = [extent for _, extent in answer.ready]
    for i in range(20):
        world.put(prompt(f"other {i}", 8))
    assert [e for _, e in world.acquire(kept).ready] == before


@both
def test_chunks_leased_by_a_lookup_survive_pressure(policy: str) -> None:
    world = World(16, policy=policy)
    kept = prompt("kept", 8)
    world.put(kept)
    assert world.lease(B, kept, 0.0) is not None
    for i in range(20):
        world.put(prompt(f"other {i}", 8))
    assert world.ready(kept) == list(range(8))


def test_no_space_when_everything_is_leased_and_room_again_after_release() -> None:
    world = World(8)
    kept = prompt("kept", 8)
    world.put(kept)
    lease = world.acquire(kept).lease_id
    assert {a.result for a in world.reserve(prompt("new", 3))} == {ReserveResult.NO_SPACE}
    assert world.store.release(B, [lease], 1.0) == [True]
    world.put(prompt("new", 3))


def test_expired_lease_protects_nothing_and_says_so_once() -> None:
    world = World(8)
    kept = prompt("kept", 8)
    world.put(kept)
    lease = world.acquire(kept, now_s=0.0).lease_id
    assert world.store.next_deadline() == 30.0
    world.store.expire(30.0)
    assert not world.store.lease_holds(B, lease, 30.0)
    world.put(prompt("new", 8), now_s=30.0)
    assert world.ready(kept) == []
    assert world.store.release(B, [lease], 31.0) == [False]
    with pytest.raises(UnknownObject, match="released before"):
        world.store.release(B, [lease], 31.0)


def test_lease_past_its_time_did_not_hold_even_before_expire_ran() -> None:
    world = World()
    world.put(prompt("p", 1))
    lease = world.acquire(prompt("p", 1)).lease_id
    assert world.store.release(B, [lease], 30.0) == [False]


def test_expire_ends_so_much_at_once_and_says_whether_more_is_due() -> None:
    world = World(limits=StoreLimits(max_lookup_lease_fraction=1.0))
    keys = prompt("p", 4)
    world.put(keys)
    for _ in range(3):
        world.lease(B, keys, 0.0)
    world.reserve(prompt("q", 2), session=B)
    rounds = 1
    while world.store.expire(60.0, max_entries=5):
        world.store.check_invariants()
        rounds += 1
    assert rounds == 4
    counts = world.store.counts()
    assert (counts.num_leases, counts.num_reservations) == (0, 0)
    assert world.store.next_deadline() is None


def test_release_is_all_or_nothing() -> None:
    world = World()
    world.put(prompt("p", 1))
    lease = world.acquire(prompt("p", 1)).lease_id
    for wrong in ([lease, 999], [lease, lease]):
        with pytest.raises(UnknownObject, match="nothing was released"):
            world.store.release(B, wrong, 0.0)
    with pytest.raises(UnknownObject):
        world.store.release(A, [lease], 0.0)
    assert world.store.release(B, [lease], 0.0) == [True]


def test_expired_leases_are_remembered_up_to_a_limit() -> None:
    world = World(limits=StoreLimits(max_released_leases=2))
    world.put(prompt("p", 1))
    leases = [world.acquire(prompt("p", 1)).lease_id for _ in range(3)]
    world.store.expire(100.0)
    with pytest.raises(UnknownObject):
        world.store.release(B, leases[:1], 100.0)
    assert world.store.release(B, leases[1:], 100.0) == [False, False]


def test_lookup_lease_is_renewed_by_a_lookup_of_the_same_chunks_only() -> None:
    world = World(16)
    keys = prompt("p", 3)
    world.put(keys)
    first = world.lease(B, keys[:2], 0.0)
    assert first is not None
    renewed = world.lease(B, keys[:2], 4.0, superseded=first.lease_id)
    assert renewed is not None
    assert not world.store.lease_holds(B, first.lease_id, 4.0)
    assert renewed.expires_at_s == first.expires_at_s + 4.0
    assert world.store.counts().lookup_lease_bytes == 2 * PAGE
    other = world.lease(B, keys, 5.0, superseded=renewed.lease_id)
    assert other is not None
    assert not world.store.lease_holds(B, renewed.lease_id, 5.0), "of other chunks; given back"
    foreign = world.lease(A, keys, 5.0, superseded=other.lease_id)
    assert foreign is not None
    assert world.store.lease_holds(B, other.lease_id, 5.0), "not the session's own"
    world.store.check_invariants()
    assert world.store.release(B, [other.lease_id], 5.0) == [True]
    assert world.store.release(A, [foreign.lease_id], 5.0) == [True]
    assert world.store.counts().lookup_lease_bytes == 0
    world.store.check_invariants()


def test_lookup_leases_cover_at_most_their_share_in_distinct_bytes() -> None:
    world = World(16, limits=StoreLimits(max_lookup_lease_fraction=0.25))
    keys = prompt("p", 8)
    world.put(keys)
    assert world.lease(B, keys[:5], 0.0) is None
    first = world.lease(B, keys[:4], 0.0)
    again = world.lease(A, keys[:4], 0.0)
    assert first is not None
    assert again is not None
    assert world.lease(A, keys[4:5], 0.0) is None
    assert world.store.counts().lookup_lease_bytes == 4 * PAGE
    world.store.release(B, [first.lease_id], 0.0)
    assert world.lease(A, keys[4:5], 0.0) is None
    world.store.release(A, [again.lease_id], 0.0)
    assert world.lease(A, keys[4:5], 0.0) is not None
    assert world.store.counts().totals.num_refused_lookup_leases == 3
    world.store.check_invariants()


def test_oldest_lookup_leases_end_when_what_they_cover_grows_too_much() -> None:
    """A window or state comes to a chunk that is leased already: the share that lookups may pin stays a limit."""
    world = World(pages=16, limits=StoreLimits(max_lookup_lease_fraction=0.25))
    keys = prompt("grows", 2)
    for shard in ((0, 0), (0, 1)):
        world.commit(world.reserve(keys, spec=TWO, shard=shard))
    leases = [world.lease(B, [key], float(i), spec=TWO) for i, key in enumerate(keys)]
    assert world.store.counts().lookup_lease_bytes == 4 * PAGE
    world.commit(world.reserve(keys[1:], spec=TWO, shard=(1, 0)))
    world.store.check_invariants()
    assert world.store.counts().lookup_lease_bytes == 3 * PAGE
    ids = [lease.lease_id for lease in leases if lease is not None]
    assert world.store.release(B, ids, 2.0) == [False, True]


@both
def test_chunk_that_is_there_in_part_is_evicted_as_a_whole_and_after_what_follows_it(
    policy: str,
) -> None:
    world = World(pages=8, policy=policy)
    keys = prompt("parts", 3)
    # The first chunk has a window only; its pages come last, as those of a prompt that was cut short.
    world.commit(world.reserve(keys, spec=TWO, shard=(1, 0)))
    world.commit(world.reserve(keys[:2], spec=TWO, shard=(0, 0)))
    world.commit(world.reserve(keys[:1], spec=TWO, shard=(0, 1)))
    world.store.take_changes()
    for number, left in enumerate((3, 3, 2, 1, 1, 0, 0, 0)):
        world.put(prompt("other", 8)[number : number + 1])
        there = [len(world.store.list_shards(TWO.digest, key)) for key in keys]
        assert there == [3, 2, 1][:left] + [0] * (3 - left)
    changes = {c.chunk: c.bitmap for c in world.store.take_changes() if c.namespace == TWO.digest}
    assert changes == dict.fromkeys(keys, 0)


def test_keys_given_twice_are_leased_and_let_go_alike() -> None:
    world = World()
    keys = prompt("p", 2)
    world.put(keys)
    lease = world.lease(B, keys * 2, 0.0)
    assert lease is not None
    assert world.store.counts().lookup_lease_bytes == 2 * PAGE
    world.store.release(B, [lease.lease_id], 0.0)
    assert world.store.counts().lookup_lease_bytes == 0
    assert world.store.evict(None, None).num_chunks == 2


def test_number_of_leases_is_limited() -> None:
    world = World(limits=StoreLimits(max_leases=1))
    world.put(prompt("p", 1))
    world.acquire(prompt("p", 1))
    with pytest.raises(LimitReached, match="1 leases are open on 2 chunks and shards"):
        world.acquire(prompt("p", 1))
    assert world.lease(B, prompt("p", 1), 0.0) is None


def test_entries_of_all_leases_are_limited() -> None:
    world = World(limits=StoreLimits(max_lease_entries=8, max_lookup_lease_fraction=1.0))
    keys = prompt("p", 4)
    world.put(keys)
    lookup = world.lease(A, keys, 0.0)
    assert lookup is not None
    first = world.acquire(keys[:1])
    with pytest.raises(LimitReached, match="limits are 65536 and 8"):
        world.acquire(keys[:2])
    with pytest.raises(LimitReached):
        world.store.extend_lease(
            B, first.lease_id, ONE.digest, [1, 2], [(k, 0, 0) for k in keys[:2]], 0.0
        )
    assert world.lease(B, keys, 0.0) is None
    assert world.store.counts().totals.num_refused_lookup_leases == 1
    renewed = world.lease(A, keys, 0.0, superseded=lookup.lease_id)
    assert renewed is not None, "takes no more than it had"
    world.store.check_invariants()
    world.store.release(A, [renewed.lease_id], 0.0)
    world.acquire(keys[:2])
    world.store.check_invariants()


def test_a_lease_grows_when_pending_shards_become_ready() -> None:
    world = World()
    keys = prompt("p", 3)
    world.put(keys[:1])
    pending = world.reserve(keys)
    answer = world.acquire([*keys, *prompt("absent", 1)])
    assert ([p for p, _ in answer.ready], answer.pending, answer.absent) == ([0], [1, 2], [3])
    world.commit(pending)
    more = world.store.extend_lease(
        B, answer.lease_id, ONE.digest, [1, 2], [(k, 0, 0) for k in keys[1:]], 20.0
    )
    assert [p for p, _ in more.ready] == [1, 2]
    assert world.store.leased_extent(B, answer.lease_id, 2) == more.ready[1][1][:2]
    assert world.store.lease_holds(B, answer.lease_id, 49.0), "an extension renews"
    with pytest.raises(UnknownObject, match="position 3"):
        world.store.leased_extent(B, answer.lease_id, 3)
    with pytest.raises(UnknownObject, match="ran out"):
        world.store.extend_lease(B, answer.lease_id, ONE.digest, [3], [(keys[0], 0, 0)], 50.0)


# Reservations


def test_a_shard_is_pending_for_all_until_it_is_committed() -> None:
    world = World()
    keys = prompt("p", 1)
    first = world.reserve(keys)
    assert [a.result for a in world.reserve(keys, session=B)] == [ReserveResult.PENDING]
    assert [a.result for a in world.reserve(keys)] == [ReserveResult.PENDING]
    assert world.store.presence(ONE.digest, keys) == bytes([Presence.PENDING])
    assert world.commit(first) == [COMMITTED]
    assert [a.result for a in world.reserve(keys, session=B)] == [ReserveResult.READY]
    assert world.store.presence(ONE.digest, keys) == bytes([Presence.READY_HERE])


def test_a_group_is_ready_when_all_its_shards_are() -> None:
    world = World()
    keys = prompt("p", 1)
    world.commit(world.reserve(keys, spec=TWO, shard=(0, 0)))
    assert world.store.presence(TWO.digest, keys) == bytes([Presence.ABSENT, Presence.ABSENT])
    world.commit(world.reserve(keys, spec=TWO, shard=(1, 0)))
    second = world.reserve(keys, spec=TWO, shard=(0, 1))
    assert world.store.presence(TWO.digest, keys) == bytes([Presence.PENDING, Presence.READY_HERE])
    world.commit(second)
    assert world.store.presence(TWO.digest, keys) == bytes([Presence.READY_HERE] * 2)
    assert world.store.take_changes() == [HeldChunk(TWO.digest, keys[0], 0b111)]


def test_first_commit_wins_and_bytes_that_differ_are_counted() -> None:
    world = World()
    keys = prompt("p", 1)
    slow = world.reserve(keys, session=A, now_s=0.0)
    world.store.expire(60.0)
    fast = world.reserve(keys, session=B, now_s=60.0)
    assert fast[0].result is RESERVED
    assert fast[0].offset != slow[0].offset, "a stopped writer may wake up"
    assert world.commit(fast, session=B, now_s=61.0) == [COMMITTED]
    late = [(slow[0].reservation_id, (8,), False)]
    assert world.store.commit(A, late, 62.0) == [CommitResult.LOST_RACE]
    assert world.acquire(keys).ready[0][1][:3] == (fast[0].offset, PAGE, (7,))
    counts = world.store.counts()
    assert counts.totals.num_mismatched_commits == 1
    assert counts.used_bytes == PAGE, "the loser's extent is free"


def test_late_commit_has_expired_and_frees_its_extent() -> None:
    world = World()
    slow = world.reserve(prompt("p", 1))
    world.store.expire(60.0)
    assert world.store.presence(ONE.digest, prompt("p", 1)) == bytes([Presence.ABSENT])
    assert world.store.counts().quarantined_bytes == PAGE
    assert world.commit(slow, now_s=61.0) == [CommitResult.EXPIRED]
    assert world.store.counts().used_bytes == 0
    with pytest.raises(UnknownObject):
        world.commit(slow, now_s=61.0)


def test_what_ran_out_is_free_at_once_when_only_the_agent_could_write_there() -> None:
    """The client may never have learned of it: nobody will ever abort it."""
    world = World(4)
    late, never, copied = world.reserve(prompt("p", 3), session=B)
    world.store.begin_agent_copy(B, copied.reservation_id)
    world.store.expire(60.0)
    world.store.check_invariants()
    assert world.store.counts().quarantined_bytes == PAGE, "the copy is in flight"
    with pytest.raises(UnknownObject, match="ran out"):
        world.store.begin_agent_copy(B, late.reservation_id)
    world.store.end_agent_copy(B, copied.reservation_id)
    assert world.store.counts().used_bytes == 0
    world.put(prompt("p", 1), now_s=61.0)
    assert world.commit([late, copied], session=B, now_s=62.0) == [
        CommitResult.LOST_RACE,
        CommitResult.EXPIRED,
    ]
    with pytest.raises(UnknownObject):
        world.store.abort(A, [never.reservation_id], 62.0)
    world.store.abort(B, [never.reservation_id], 62.0)
    for ended in (late, never, copied):
        with pytest.raises(UnknownObject):
            world.commit([ended], session=B, now_s=62.0)
    world.store.check_invariants()


def test_freed_reservations_are_remembered_up_to_a_limit() -> None:
    world = World(limits=StoreLimits(max_expired_reservations=2))
    answers = world.reserve(prompt("p", 3), session=B)
    world.store.expire(60.0)
    world.store.check_invariants()
    with pytest.raises(UnknownObject):
        world.commit(answers, session=B, now_s=60.0)
    assert world.commit(answers[1:], session=B, now_s=60.0) == [CommitResult.EXPIRED] * 2


def test_commit_past_its_time_expires_even_before_expire_ran() -> None:
    world = World()
    assert world.commit(world.reserve(prompt("p", 1)), now_s=60.0) == [CommitResult.EXPIRED]
    world.store.check_invariants()


def test_a_commit_batch_with_one_unknown_reservation_commits_nothing() -> None:
    world = World()
    good = world.reserve(prompt("p", 1))[0].reservation_id
    for wrong in ([(good, (1,), False), (999, (1,), False)], [(good, (1,), False)] * 2):
        with pytest.raises(UnknownObject):
            world.store.commit(A, wrong, 0.0)
    with pytest.raises(UnknownObject):
        world.store.commit(B, [(good, (1,), False)], 0.0)
    with pytest.raises(InvalidRequest, match="1 pieces of 1 MiB"):
        world.store.commit(A, [(good, (1, 2), False)], 0.0)
    with pytest.raises(InvalidRequest):
        world.store.commit(A, [(good, (1 << 64,), False)], 0.0)
    assert world.ready(prompt("p", 1)) == []
    assert world.store.commit(A, [(good, (1,), False)], 0.0) == [COMMITTED]


def test_abort_frees_at_once_and_only_once() -> None:
    world = World()
    ids = [a.reservation_id for a in world.reserve(prompt("p", 2))]
    with pytest.raises(UnknownObject):
        world.store.abort(A, [*ids, 999], 0.0)
    world.store.abort(A, ids, 0.0)
    assert world.store.counts().used_bytes == 0
    with pytest.raises(UnknownObject):
        world.store.abort(A, ids[:1], 0.0)


def test_piece_checksums_come_back_as_they_were_given() -> None:
    spec = build_namespace(
        {"m": 3}, tokens_per_chunk=256, groups=[GroupShape("full", 1, (2 << 20) + 1)]
    )
    world = World(2048)
    world.store.open_namespace(spec)
    answer = world.reserve(prompt("p", 1), spec=spec)
    sums = (0, (1 << 64) - 1, 5)
    assert world.store.commit(A, [(answer[0].reservation_id, sums, True)], 0.0) == [COMMITTED]
    found = world.store.acquire(B, spec.digest, [(prompt("p", 1)[0], 0, 0)], 0.0).ready[0][1]
    assert (found.checksums, found.is_remote) == (sums, True)
    assert found.length == (2 << 20) + 1


# Quarantine


def test_extents_of_a_dead_writer_wait_until_its_mapping_is_closed() -> None:
    world = World(4)
    world.reserve(prompt("p", 4), session=A)
    world.store.end_session(A)
    assert world.store.presence(ONE.digest, prompt("p", 4)) == bytes(4)
    assert world.reserve(prompt("p", 1), session=B)[0].result is ReserveResult.NO_SPACE
    assert world.store.counts().quarantined_bytes == 4 * PAGE
    world.store.mapping_closed(A)
    assert world.store.counts().used_bytes == 0
    assert world.reserve(prompt("p", 1), session=B)[0].result is RESERVED


def test_extents_of_a_dead_stream_writer_are_free_at_once() -> None:
    world = World(4)
    world.reserve(prompt("p", 4), session=B)
    world.store.end_session(B)
    assert world.store.counts().used_bytes == 0


def test_mapping_closed_before_the_session_ends_leaves_no_quarantine() -> None:
    world = World(4)
    world.reserve(prompt("old", 1), session=A, now_s=0.0)
    world.store.expire(60.0)
    world.reserve(prompt("p", 2), session=A, now_s=60.0)
    world.store.mapping_closed(A)
    assert world.store.counts().quarantined_bytes == 0
    world.store.end_session(A)
    assert world.store.counts().used_bytes == 0
    world.store.check_invariants()


def test_an_extent_is_not_given_out_while_the_agent_copies_into_it() -> None:
    world = World(1)
    reservation = world.reserve(prompt("p", 1), session=B)[0]
    world.store.begin_agent_copy(B, reservation.reservation_id)
    world.store.end_session(B)
    assert world.reserve(prompt("q", 1), session=A)[0].result is ReserveResult.NO_SPACE
    world.store.end_agent_copy(B, reservation.reservation_id)
    assert world.reserve(prompt("q", 1), session=A)[0].result is RESERVED


def test_commit_during_a_copy_is_a_mismatch() -> None:
    world = World()
    reservation = world.reserve(prompt("p", 1), session=B)
    world.store.begin_agent_copy(B, reservation[0].reservation_id)
    assert world.commit(reservation, session=B) == [CommitResult.CHECKSUM_MISMATCH]
    assert world.ready(prompt("p", 1)) == []
    world.store.end_agent_copy(B, reservation[0].reservation_id)
    assert world.store.counts().used_bytes == 0


# Eviction


@both
def test_suffix_is_evicted_before_prefix(policy: str) -> None:
    world = World(8, policy=policy)
    keys = prompt("p", 8)
    for i in range(8):
        items = [ReserveRequestItem(keys[i], keys[i - 1] if i else None, i, 0, 0, PAGE)]
        world.commit(world.store.reserve(A, ONE.digest, items, 0.0))
    for i in range(1, 8):
        world.put(prompt(f"new {i}", 1)[:1])
        world.acquire(prompt(f"new {i}", 1), session=A)
        assert world.ready(keys) == list(range(8 - i))


@both
def test_a_chunk_goes_with_all_its_shards_and_groups(policy: str) -> None:
    world = World(6, policy=policy)
    for name in ("p", "q"):
        for shard in ((0, 0), (0, 1), (1, 0)):
            world.commit(world.reserve(prompt(name, 1), spec=TWO, shard=shard))
    world.put(prompt("new", 1))
    both_chunks = [*prompt("p", 1), *prompt("q", 1)]
    assert len(world.ready(both_chunks, TWO)) == 1
    assert world.store.counts().used_bytes == 4 * PAGE


def test_reserving_a_second_shard_does_not_evict_the_first() -> None:
    world = World(3)
    world.commit(world.reserve(prompt("p", 1), spec=TWO, shard=(0, 0)))
    world.put(prompt("a", 2))
    assert world.reserve(prompt("p", 1), spec=TWO, shard=(0, 1))[0].result is RESERVED
    assert [s.is_ready for s in world.store.list_shards(TWO.digest, prompt("p", 1)[0])] == [
        True,
        False,
    ]


def test_neighbours_are_evicted_to_make_one_long_extent() -> None:
    big = build_namespace({"m": 4}, tokens_per_chunk=256, groups=[GroupShape("full", 1, 4 * PAGE)])
    world = World(64)
    world.store.open_namespace(big)
    keys = [prompt(f"p{i}", 1)[0] for i in range(64)]
    for key in keys:
        world.put([key])
    held = world.acquire(keys[::8])
    world.store.evict(ONE.digest, keys[1::8])
    assert world.store.counts().free_bytes == 8 * PAGE
    answers = world.reserve([prompt("big", 1)[0]], spec=big)
    assert answers[0].result is RESERVED
    assert len(world.ready(keys)) >= 64 - 8 - 4, "no more than one run was given up"
    assert [p for p, _ in held.ready] == [p for p, _ in world.acquire(keys[::8]).ready]
    assert world.store.counts().totals.num_run_evictions == 1


def test_no_space_rather_than_an_empty_cache_when_leases_are_everywhere() -> None:
    big = build_namespace({"m": 4}, tokens_per_chunk=256, groups=[GroupShape("full", 1, 4 * PAGE)])
    world = World(64)
    world.store.open_namespace(big)
    keys = [prompt(f"p{i}", 1)[0] for i in range(64)]
    for key in keys:
        world.put([key])
    leased = world.acquire(keys[::3])
    assert world.reserve(prompt("big", 1), spec=big)[0].result is ReserveResult.NO_SPACE
    assert len(world.ready(keys)) >= 60
    world.store.release(B, [leased.lease_id], 0.0)
    assert world.reserve(prompt("big", 1), spec=big)[0].result is RESERVED


def test_number_of_shards_is_limited_by_eviction() -> None:
    world = World(16, limits=StoreLimits(max_shards=4))
    for i in range(6):
        world.put(prompt(f"p{i}", 2))
    assert world.store.counts().num_shards == 4
    world.acquire([k for i in range(6) for k in prompt(f"p{i}", 2)])
    assert world.reserve(prompt("new", 1))[0].result is ReserveResult.NO_SPACE


def test_background_eviction_goes_from_high_to_low_watermark() -> None:
    world = World(100)
    world.put(prompt("p", 95))
    assert world.store.evict_to_low_watermark(100) == 0
    world.put(prompt("q", 3))
    assert world.store.evict_to_low_watermark(2) == 2
    assert world.store.evict_to_low_watermark(100) == 6
    assert world.store.counts().used_bytes == 90 * PAGE


def test_explicit_eviction_leaves_what_is_leased() -> None:
    world = World()
    keys = prompt("p", 4)
    world.put(keys)
    world.acquire(keys[:1])
    assert world.store.evict(ONE.digest, [*keys, keys[3]]) == (3, 3 * PAGE, 1)
    assert world.store.evict(None, None) == (0, 0, 1)
    with pytest.raises(UnknownObject):
        world.store.evict(NamespaceDigest(bytes(32)), None)


def test_corrupt_chunk_is_never_served_again_but_stays_for_its_readers() -> None:
    world = World(2)
    keys = prompt("p", 1)
    world.put(keys)
    lease = world.acquire(keys).lease_id
    world.store.drop_corrupt(ONE.digest, keys[0])
    assert world.ready(keys) == []
    assert world.acquire(keys).absent == [0]
    again = world.reserve(keys)
    assert again[0].offset != 0
    assert world.store.counts().quarantined_bytes == PAGE
    world.commit(again)
    assert world.store.release(B, [lease], 0.0) == [True]
    assert world.store.counts().used_bytes == PAGE
    assert world.ready(keys) == [0]
    world.store.check_invariants()


def test_corrupt_chunk_keeps_what_is_being_written() -> None:
    world = World()
    keys = prompt("p", 1)
    world.commit(world.reserve(keys, spec=TWO, shard=(0, 0)))
    pending = world.reserve(keys, spec=TWO, shard=(0, 1))
    world.store.acquire(B, TWO.digest, [(keys[0], 0, 0)], 0.0)
    world.store.drop_corrupt(TWO.digest, keys[0])
    world.store.check_invariants()
    assert world.commit(pending) == [COMMITTED]
    assert world.store.take_changes() == [HeldChunk(TWO.digest, keys[0], 0b10)]


# Changes, names, limits


def test_changes_are_coalesced_and_bounded() -> None:
    world = World(limits=replace(StoreLimits(), max_changes=3))
    keys = prompt("p", 5)
    world.put(keys)
    assert [c.chunk for c in world.store.take_changes(2)] == keys[2:4]
    world.store.evict(ONE.digest, None)
    changes = world.store.take_changes()
    assert len(changes) == 3
    assert {c.bitmap for c in changes} == {0}
    assert world.store.take_changes() == []
    assert world.store.counts().totals.num_forgotten_changes > 0


def test_namespaces_conflict_on_shape_and_are_limited() -> None:
    world = World(limits=StoreLimits(max_namespaces=2))
    world.store.open_namespace(ONE)
    other = replace(ONE, groups=(GroupShape("full", 1, 2 * PAGE),))
    with pytest.raises(Conflict, match="two engines disagree"):
        world.store.open_namespace(other)
    third = build_namespace({"m": 9}, tokens_per_chunk=1, groups=[GroupShape("full", 1, 1)])
    with pytest.raises(LimitReached, match="the limit is 2"):
        world.store.open_namespace(third)
    world.put(prompt("p", 1))
    world.store.evict(ONE.digest, None)
    world.store.open_namespace(third)
    with pytest.raises(UnknownObject, match="OpenNamespace"):
        world.store.namespace(ONE.digest)
    assert {n.spec.digest for n in world.store.list_namespaces()} == {third.digest, TWO.digest}


def test_calls_with_wrong_input_say_what_and_change_nothing() -> None:
    world = World()
    key = prompt("p", 1)[0]
    good = ReserveRequestItem(key, None, 0, 0, 0, PAGE)
    for wrong, text in (
        (good._replace(size_bytes=PAGE - 1), "have 4096 bytes"),
        (good._replace(group=1), "groups 0 to 0"),
        (good._replace(shard=1), "group 0, which has 1"),
        (good._replace(chunk=ChunkKey(b"short")), "has 5 bytes"),
        (good._replace(parent=ChunkKey(b"short")), "parent_key has 5 bytes"),
        (good._replace(number=-1), "counts from 0"),
    ):
        with pytest.raises(InvalidRequest, match=text):
            world.store.reserve(A, ONE.digest, [good, wrong], 0.0)
    with pytest.raises(UnknownSession, match="open a session"):
        world.store.reserve(SessionId(9), ONE.digest, [good], 0.0)
    assert world.store.counts().used_bytes == 0


def test_everything_of_a_session_ends_with_it() -> None:
    world = World()
    world.put(prompt("p", 2))
    world.acquire(prompt("p", 2))
    world.lease(B, prompt("p", 2), 0.0)
    world.reserve(prompt("q", 1), session=B)
    assert world.store.session_holdings(B) == (2, 1)
    world.store.end_session(B)
    world.store.end_session(B)
    counts = world.store.counts()
    assert (counts.num_leases, counts.num_reservations, counts.lookup_lease_bytes) == (0, 0, 0)
    assert counts.num_sessions == 1
    with pytest.raises(UnknownSession):
        world.acquire(prompt("p", 1))


def test_shards_tell_who_wrote_them() -> None:
    world = World()
    world.put(prompt("p", 1))
    world.reserve(prompt("q", 1), session=B)
    (ready,) = world.store.list_shards(ONE.digest, prompt("p", 1)[0])
    (pending,) = world.store.list_shards(ONE.digest, prompt("q", 1)[0])
    assert (ready.is_ready, ready.writer_role, ready.writer_name) == (True, "prefill", "engine-a")
    assert (pending.is_ready, pending.writer_role) == (False, "decode")
    assert world.store.list_shards(ONE.digest, prompt("none", 1)[0]) == []
