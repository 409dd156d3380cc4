"""The store under random calls, against a model that knows what every page of the arena holds.

Writers are simulated down to the page: who may still write (a reservation that is open, or whose session's mapping
is open, or that the agent copies into) does write now and then, whatever the store thinks of it. The oracle is the
promise: what a lease serves is what was committed, from grant to release. Chunks are mostly there in part: three groups
of different kinds, sizes and shard counts, windows dropped, states only where a prompt ended, and sometimes later.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cacheservice.core.allocator import ALIGNMENT_BYTES, aligned
from cacheservice.core.eviction import build_policy
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupShape, build_namespace
from cacheservice.core.outcomes import Presence
from cacheservice.core.store import (
    CommitResult,
    ReserveRequestItem,
    ReserveResult,
    SessionId,
    Store,
    StoreLimits,
)
from cacheservice.errors import UnknownObject

PAGE = ALIGNMENT_BYTES
NUM_PAGES = 26
SPEC = build_namespace(
    {"model": "m"},
    tokens_per_chunk=256,
    groups=[
        GroupShape("full", 2, PAGE),
        GroupShape("sliding_window", 1, 3 * PAGE - 5),
        GroupShape("recurrent", 1, 2 * PAGE - 9),
    ],
)
NS = SPEC.digest
PAGES = [(0, 0), (0, 1)]
WINDOW, STATE = (1, 0), (2, 0)
SHARDS = [*PAGES, WINDOW, STATE]
CHUNKS = [ChunkKey(hashlib.sha256(bytes([i])).digest()) for i in range(12)]
LIMITS = StoreLimits(
    reservation_ttl_s=10.0, lease_ttl_s=8.0, lookup_lease_ttl_s=3.0, max_released_leases=3,
    max_shards=17, max_leases=12,
)  # fmt: skip

chunks = st.integers(0, len(CHUNKS) - 1)
choices = st.integers(0, 1000)
wanted = st.lists(st.tuples(chunks, st.sampled_from(SHARDS)), min_size=1, max_size=6)


def parent_of(chunk: int) -> ChunkKey | None:
    """Three chains of four chunks."""
    return CHUNKS[chunk - 1] if chunk % 4 else None


@dataclass
class Writer:
    """One reservation as its writer knows it."""

    reservation_id: int
    session: int
    chunk: int
    shard: tuple[int, int]
    pages: range
    expires_at: float
    is_ended: bool = False
    """The writer said that it is done."""
    num_copies: int = 0


@dataclass
class Reader:
    """One lease as its reader knows it."""

    session: int
    expires_at: float
    chunks: list[int]
    extents: dict[int, tuple[range, str, tuple[int, tuple[int, int]]]] = field(default_factory=dict)
    is_lookup: bool = False
    is_dropped: bool = False
    """The session ended, so nobody reads any more."""


class StoreMachine(RuleBasedStateMachine):
    policy_name = "s3fifo"

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.numbers = itertools.count(1)
        self.store = Store(
            arena_bytes=NUM_PAGES * PAGE,
            policy=build_policy(self.policy_name),
            limits=LIMITS,
            new_id=lambda: next(self.numbers),
        )
        self.store.open_namespace(SPEC)
        self.memory: list[str] = [""] * NUM_PAGES
        self.sessions: dict[int, bool] = {}
        self.mapped: set[int] = set()
        self.writers: dict[int, Writer] = {}
        self.committed: dict[tuple[int, tuple[int, int]], str] = {}
        self.readers: dict[int, Reader] = {}
        self.released: list[tuple[int, int]] = []
        self.announced: dict[ChunkKey, int] = {}
        self.stamps = itertools.count(1)
        self.open_session(True)
        self.open_session(False)

    # What the model derives

    def live(self) -> list[int]:
        return [s for s, is_live in self.sessions.items() if is_live]

    def pick_session(self, choice: int) -> SessionId:
        live = self.live()
        return SessionId(live[choice % len(live)])

    def may_write(self, writer: Writer) -> bool:
        if writer.num_copies:
            return True
        if writer.is_ended:
            return False
        if writer.session in self.mapped:
            return True
        # Through the agent alone, which takes nothing for a reservation whose time ran out.
        return self.sessions[writer.session] and writer.expires_at > self.now

    def open_writers(self) -> list[Writer]:
        """Whose shards are pending."""
        return [
            w
            for w in self.writers.values()
            if not w.is_ended and self.sessions[w.session] and w.expires_at > self.now
        ]

    def chunks_that_may_not_go(self) -> set[int]:
        leased = {c for r in self.holding() for c in r.chunks}
        return leased | {w.chunk for w in self.open_writers()}

    def check_evictions(
        self, before: dict[tuple[int, tuple[int, int]], range], spared: set[int]
    ) -> None:
        """Chunks go as a whole, whatever of them is there, and none before one that follows it and could go."""
        now = set(self.ready())
        there = {c for c, _ in before}
        gone = there - {c for c, _ in now}
        assert {c for c, _ in before.keys() - now} == gone, "a part of a chunk was evicted"
        for chunk in gone:
            follower = chunk + 1
            if follower % 4 and follower in there - gone:
                assert follower in spared, f"chunk {chunk} was evicted before {follower}"

    def holding(self) -> list[Reader]:
        return [r for r in self.readers.values() if not r.is_dropped and r.expires_at > self.now]

    def ready(self) -> dict[tuple[int, tuple[int, int]], range]:
        found = {}
        for number, key in enumerate(CHUNKS):
            for summary in self.store.list_shards(NS, key):
                if summary.is_ready:
                    first = summary.offset // PAGE
                    pages = range(first, first + aligned(summary.length) // PAGE)
                    found[number, (summary.group, summary.shard)] = pages
        return found

    # Sessions and time

    @rule(maps_arena=st.booleans())
    def open_session(self, maps_arena: bool) -> None:
        session = SessionId(len(self.sessions) + 1)
        self.store.open_session(session, maps_arena=maps_arena, role="both", name="engine")
        self.sessions[session] = True
        if maps_arena:
            self.mapped.add(session)

    @precondition(lambda self: self.live())
    @rule(choice=choices)
    def end_session(self, choice: int) -> None:
        session = self.pick_session(choice)
        self.store.end_session(session)
        self.sessions[session] = False
        for reader in self.readers.values():
            reader.is_dropped |= reader.session == session

    @precondition(lambda self: self.mapped)
    @rule(choice=choices)
    def close_mapping(self, choice: int) -> None:
        session = sorted(self.mapped)[choice % len(self.mapped)]
        self.store.mapping_closed(SessionId(session))
        self.mapped.discard(session)
        for writer in self.writers.values():
            if writer.session == session and (
                not self.sessions[session] or writer.expires_at <= self.now
            ):
                writer.is_ended = True

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 11.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.store.expire(self.now)

    @rule(choice=choices)
    def stopped_writers_wake_up(self, choice: int) -> None:
        for writer in self.writers.values():
            if self.may_write(writer):
                for page in writer.pages:
                    self.memory[page] = f"garbage {next(self.stamps)}"

    # Stores

    @precondition(lambda self: self.live())
    @rule(choice=choices, items=wanted)
    def reserve(self, choice: int, items: list[tuple[int, tuple[int, int]]]) -> None:
        session = self.pick_session(choice)
        pending = {(w.chunk, w.shard) for w in self.open_writers()}
        ready = self.ready()
        request = [
            ReserveRequestItem(CHUNKS[c], parent_of(c), c % 4, g, s, SPEC.groups[g].shard_bytes)
            for c, (g, s) in items
        ]
        named = {c for c, _ in items}
        answers = self.store.reserve(session, NS, request, self.now)
        self.check_evictions(ready, self.chunks_that_may_not_go() | named)
        leased = {
            page for r in self.holding() for pages, _, _ in r.extents.values() for page in pages
        }
        for (chunk, shard), answer in zip(items, answers, strict=True):
            if (chunk, shard) in pending:
                assert answer.result is ReserveResult.PENDING
            elif answer.result is ReserveResult.READY:
                assert (chunk, shard) in ready
            elif answer.result is ReserveResult.RESERVED:
                first = answer.offset // PAGE
                pages = range(first, first + aligned(answer.length) // PAGE)
                assert not leased & set(pages), "a leased extent was given out"
                for writer in self.writers.values():
                    if self.may_write(writer):
                        assert not set(writer.pages) & set(pages), "a written extent was given out"
                self.writers[answer.reservation_id] = Writer(
                    answer.reservation_id, session, chunk, shard, pages,
                    self.now + LIMITS.reservation_ttl_s,
                )  # fmt: skip
                pending.add((chunk, shard))
            else:
                assert answer.result is ReserveResult.NO_SPACE

    @precondition(lambda self: self.live())
    @rule(
        choice=choices,
        first=chunks,
        count=st.integers(1, 4),
        windows_from=st.integers(0, 4),
        has_state=st.booleans(),
    )
    def store_prompt(
        self, choice: int, first: int, count: int, windows_from: int, has_state: bool
    ) -> None:
        """As an engine stores one: windows that were still there, one state. Most of the pressure comes from here."""
        numbers = range(first, min(first + count, len(CHUNKS)))
        wanted = [(c, shard) for c in numbers for shard in PAGES]
        wanted += [(c, WINDOW) for c in numbers[windows_from:]]
        wanted += [(numbers[-1], STATE)] if has_state else []
        self.store_all(choice, wanted)

    @precondition(lambda self: self.live() and self.ready())
    @rule(choice=choices, which=choices, shard=st.sampled_from([WINDOW, STATE]))
    def store_later(self, choice: int, which: int, shard: tuple[int, int]) -> None:
        """A state is offered for a chunk that is there without it."""
        there = sorted({c for c, _ in self.ready()})
        self.store_all(choice, [(there[which % len(there)], shard)])

    def store_all(self, choice: int, wanted: list[tuple[int, tuple[int, int]]]) -> None:
        before = set(self.writers)
        self.reserve(choice, wanted)
        new = [self.writers[i] for i in self.writers if i not in before]
        if new:
            self.commit_batch(new)

    @precondition(lambda self: any(not w.is_ended for w in self.writers.values()))
    @rule(choice=choices, count=st.integers(1, 4))
    def commit(self, choice: int, count: int) -> None:
        known = [w for w in self.writers.values() if not w.is_ended and self.sessions[w.session]]
        if not known:
            return
        session = known[choice % len(known)].session
        self.commit_batch([w for w in known if w.session == session][:count])

    def commit_batch(self, batch: list[Writer]) -> None:
        session = batch[0].session
        ready = self.ready()
        expected = []
        for writer in batch:
            if writer.num_copies == 0 and self.may_write(writer):
                text = f"{writer.chunk} {writer.shard} {next(self.stamps)}"
                for page in writer.pages:
                    self.memory[page] = text
            key = (writer.chunk, writer.shard)
            if writer.expires_at <= self.now:
                lost = key in ready or any(
                    k == key and r is CommitResult.COMMITTED for k, r in expected
                )
                expected.append((key, CommitResult.LOST_RACE if lost else CommitResult.EXPIRED))
            elif writer.num_copies:
                expected.append((key, CommitResult.CHECKSUM_MISMATCH))
            else:
                expected.append((key, CommitResult.COMMITTED))
                self.committed[key] = self.memory[writer.pages[0]]
        items = [(w.reservation_id, (w.reservation_id,), False) for w in batch]
        results = self.store.commit(SessionId(session), items, self.now)
        assert results == [r for _, r in expected]
        self.see_shed_leases()
        for writer in batch:
            writer.is_ended = True

    def see_shed_leases(self) -> None:
        """The oldest lookup leases ended, if what they cover together had grown above the limit."""
        lookups = {
            i: r
            for i, r in self.readers.items()
            if r.is_lookup and not r.is_dropped and r.expires_at > self.now
        }
        ended = {
            i
            for i, r in lookups.items()
            if not self.store.lease_holds(SessionId(r.session), i, self.now)
        }
        if not ended:
            return
        sizes = {key: len(pages) for key, pages in self.ready().items()}
        covered = {c for r in lookups.values() for c in r.chunks}
        num_pages = sum(size for (chunk, _), size in sizes.items() if chunk in covered)
        assert num_pages > LIMITS.max_lookup_lease_fraction * NUM_PAGES, "ended for nothing"
        for lease_id in ended:
            for other in lookups.keys() - ended:
                assert lookups[lease_id].expires_at <= lookups[other].expires_at
            self.readers[lease_id].expires_at = self.now

    @precondition(lambda self: any(not w.is_ended for w in self.writers.values()))
    @rule(choice=choices)
    def abort(self, choice: int) -> None:
        known = [w for w in self.writers.values() if not w.is_ended and self.sessions[w.session]]
        if known:
            writer = known[choice % len(known)]
            self.store.abort(SessionId(writer.session), [writer.reservation_id], self.now)
            writer.is_ended = True

    @precondition(lambda self: self.open_writers())
    @rule(choice=choices)
    def begin_copy(self, choice: int) -> None:
        known = self.open_writers()
        writer = known[choice % len(known)]
        offset, _ = self.store.begin_agent_copy(SessionId(writer.session), writer.reservation_id)
        assert offset == writer.pages[0] * PAGE
        writer.num_copies += 1

    @precondition(lambda self: any(w.num_copies for w in self.writers.values()))
    @rule(choice=choices)
    def end_copy(self, choice: int) -> None:
        copying = [w for w in self.writers.values() if w.num_copies]
        writer = copying[choice % len(copying)]
        self.store.end_agent_copy(SessionId(writer.session), writer.reservation_id)
        writer.num_copies -= 1

    # Lookups

    @precondition(lambda self: self.live())
    @rule(choice=choices, first=chunks, count=st.integers(1, 6), renews=st.booleans())
    def lookup(self, choice: int, first: int, count: int, renews: bool) -> None:
        session = self.pick_session(choice)
        asked = list(range(first, min(first + count, len(CHUNKS))))
        mine = [i for i, r in self.readers.items() if r.session == session and r.is_lookup]
        former = mine[-1] if renews and mine else 0
        codes, lease = self.store.look_up(
            session, NS, [CHUNKS[c] for c in asked], self.now, takes_lease=True, superseded=former
        )
        assert codes == self.store.presence(NS, [CHUNKS[c] for c in asked])
        if former:  # renewed or given back, whether it held or not
            assert not self.store.lease_holds(session, former, self.now)
            del self.readers[former]
        if lease is not None:
            ready = self.ready()
            there = [c for c in asked if any((c, s) in ready for s in SHARDS)]
            assert lease.num_chunks == len(there)
            reader = Reader(session, lease.expires_at_s, there, is_lookup=True)
            for key, pages in ready.items():
                if key[0] in there:
                    reader.extents[len(reader.extents)] = (pages, self.committed[key], key)
            self.readers[lease.lease_id] = reader

    @precondition(lambda self: self.live())
    @rule(choice=choices, items=wanted, extends=st.booleans())
    def acquire(self, choice: int, items: list[tuple[int, tuple[int, int]]], extends: bool) -> None:
        session = self.pick_session(choice)
        shards = [(CHUNKS[c], g, s) for c, (g, s) in items]
        mine = [
            i
            for i, r in self.readers.items()
            if r.session == session and not r.is_lookup and r.expires_at > self.now
        ]
        if extends and mine:
            start = 1 + max(self.readers[mine[0]].extents, default=0)
            positions = range(start, start + len(items))
            answer = self.store.extend_lease(session, mine[0], NS, positions, shards, self.now)
            assert answer.lease_id == mine[0]
        elif self.store.counts().num_leases >= LIMITS.max_leases:
            return
        else:
            start, positions = 0, range(len(items))
            answer = self.store.acquire(session, NS, shards, self.now)
            self.readers[answer.lease_id] = Reader(session, 0.0, [])
        reader = self.readers[answer.lease_id]
        reader.expires_at = self.now + LIMITS.lease_ttl_s
        pending = {(w.chunk, w.shard) for w in self.open_writers()}
        ready = self.ready()
        answered = [*(p for p, _ in answer.ready), *answer.pending, *answer.absent]
        assert sorted(answered) == list(positions)
        for position in answer.pending:
            assert items[position - start] in pending
        for position in answer.absent:
            assert items[position - start] not in ready
            assert items[position - start] not in pending
        for position, shard in answer.ready:
            key = items[position - start]
            first = shard.offset // PAGE
            pages = range(first, first + aligned(shard.length) // PAGE)
            assert pages == ready[key]
            reader.extents[position] = (pages, self.committed[key], key)
            reader.chunks.append(key[0])
            assert self.store.leased_extent(session, answer.lease_id, position) == shard[:2]

    @precondition(lambda self: any(not r.is_dropped for r in self.readers.values()))
    @rule(choice=choices)
    def release(self, choice: int) -> None:
        known = [i for i, r in self.readers.items() if not r.is_dropped]
        lease_id = known[choice % len(known)]
        reader = self.readers.pop(lease_id)
        holds = reader.expires_at > self.now
        assert self.store.lease_holds(SessionId(reader.session), lease_id, self.now) == holds
        try:
            held = self.store.release(SessionId(reader.session), [lease_id], self.now)
        except UnknownObject:
            assert not holds, "a lease that holds is not known"
        else:
            assert held == [holds]
        self.released.append((reader.session, lease_id))

    @precondition(lambda self: self.released)
    @rule(choice=choices)
    def release_again(self, choice: int) -> None:
        session, lease_id = self.released[choice % len(self.released)]
        if not self.sessions[session]:
            return
        try:
            self.store.release(SessionId(session), [lease_id], self.now)
        except UnknownObject:
            return
        raise AssertionError("a lease was released twice")

    # Pressure and administration

    @rule(chunk=chunks, scope=st.sampled_from(["chunk", "namespace", "all"]))
    def evict(self, chunk: int, scope: str) -> None:
        named = [CHUNKS[chunk]] if scope == "chunk" else None
        before = set(self.ready())
        leased = {c for r in self.holding() for c in r.chunks}
        answer = self.store.evict(None if scope == "all" else NS, named)
        gone = {c for c, _ in before - set(self.ready())}
        assert len(gone) == answer.num_chunks
        assert not gone & leased
        if scope != "chunk":
            assert {c for c, _ in self.ready()} <= leased

    @rule(max_chunks=st.integers(0, 5))
    def evict_to_low_watermark(self, max_chunks: int) -> None:
        used, ready = self.store.counts().used_bytes, self.ready()
        evicted = self.store.evict_to_low_watermark(max_chunks)
        self.check_evictions(ready, self.chunks_that_may_not_go())
        assert len({c for c, _ in ready} - {c for c, _ in self.ready()}) == evicted
        assert evicted <= max_chunks
        assert not evicted or used > LIMITS.high_watermark * NUM_PAGES * PAGE

    @rule(chunk=chunks)
    def drop_corrupt(self, chunk: int) -> None:
        self.store.drop_corrupt(NS, CHUNKS[chunk])
        assert not any(c == chunk for c, _ in self.ready())
        for reader in self.readers.values():
            # Its lease keeps the bytes in place, but not what is stored under the key from now on.
            reader.chunks = [c for c in reader.chunks if c != chunk]

    @rule(limit=st.one_of(st.none(), st.integers(0, 3)))
    def take_changes(self, limit: int | None) -> None:
        for change in self.store.take_changes(limit):
            self.announced[change.chunk] = change.bitmap
        if not self.store.counts().num_waiting_changes:
            ((_, keys),) = self.store.chunk_keys(None)
            held = {h.chunk: h.bitmap for h in self.store.held(NS, keys)}
            assert {k: b for k, b in self.announced.items() if b} == held

    # What must hold after every call

    @invariant()
    def store_is_consistent(self) -> None:
        self.store.check_invariants()

    @invariant()
    def leases_serve_what_was_committed(self) -> None:
        for reader in self.holding():
            for pages, text, key in reader.extents.values():
                assert {self.memory[p] for p in pages} == {text}, (
                    f"wrong bytes under a lease of {key}"
                )

    @invariant()
    def what_is_ready_holds_what_was_committed(self) -> None:
        for key, pages in self.ready().items():
            assert {self.memory[p] for p in pages} == {self.committed[key]}, f"wrong bytes of {key}"

    @invariant()
    def lookups_tell_the_truth(self) -> None:
        ready = self.ready()
        pending = {(w.chunk, w.shard) for w in self.open_writers()}
        expected = bytearray()
        for chunk in range(len(CHUNKS)):
            for group in range(len(SPEC.groups)):
                shards = [(chunk, s) for s in SHARDS if s[0] == group]
                if all(s in ready for s in shards):
                    expected.append(Presence.READY_HERE)
                elif any(s in pending for s in shards):
                    expected.append(Presence.PENDING)
                else:
                    expected.append(Presence.ABSENT)
        assert self.store.presence(NS, CHUNKS) == expected

    @invariant()
    def limits_are_hard(self) -> None:
        counts = self.store.counts()
        assert counts.lookup_lease_bytes <= counts.arena_bytes * LIMITS.max_lookup_lease_fraction
        assert counts.num_leases <= LIMITS.max_leases
        assert counts.num_leases == len(self.holding())
        assert counts.num_reservations == len(self.open_writers())
        assert counts.num_sessions == len(self.live())
        deadline = self.store.next_deadline()
        assert deadline is None or deadline > self.now

    def teardown(self) -> None:
        """Everything that had an owner is gone with it (P3)."""
        for writer in self.writers.values():
            for _ in range(writer.num_copies):
                self.store.end_agent_copy(SessionId(writer.session), writer.reservation_id)
        for session in self.live():
            self.store.end_session(SessionId(session))
        for session in self.mapped:
            self.store.mapping_closed(SessionId(session))
        self.store.evict(None, None)
        self.store.check_invariants()
        counts = self.store.counts()
        assert (counts.used_bytes, counts.num_leases, counts.num_reservations) == (0, 0, 0)
        assert (counts.num_sessions, counts.lookup_lease_bytes) == (0, 0)


class LRUStoreMachine(StoreMachine):
    policy_name = "lru"


TestStoreS3FIFO = StoreMachine.TestCase
TestStoreS3FIFO.settings = settings(max_examples=120, stateful_step_count=50)
TestStoreLRU = LRUStoreMachine.TestCase
TestStoreLRU.settings = settings(max_examples=60, stateful_step_count=50)
