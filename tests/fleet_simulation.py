"""A fleet in one thread on virtual time: agents, index, network and engines, with seeded faults.

The store, the eviction policies, the index and the checksums are the real ones; threads, sockets and clocks are
replaced by one event loop. Arenas are real memory with tiny shards, and what a shard must contain is a function of its
key, so every served byte can be judged. Chunks have groups of three kinds and are mostly there in part: of windows and
states a document keeps only what its end reads, a state may come later, and from another agent. Faults: agents crash
and come back, the index is unreachable or erased, messages are lost, late or sent twice, engines die anywhere or stop
past every time limit and go on writing, bits flip.
"""

from __future__ import annotations

import hashlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import xxhash

from cacheservice.agent.remote_hints import RemoteHints
from cacheservice.core.eviction import build_policy
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.layout import GroupShape, NamespaceSpec, build_namespace
from cacheservice.core.outcomes import Presence
from cacheservice.core.store import (
    CommitResult,
    HeldChunk,
    ReserveRequestItem,
    ReserveResult,
    SessionId,
    Store,
    StoreLimits,
)
from cacheservice.errors import IndexUnavailable, RequestRejected
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.index.port import Announcement

PAGE = 4096
SPEC: NamespaceSpec = build_namespace(
    {"model": "simulated"},
    tokens_per_chunk=256,
    groups=[
        GroupShape("full", 2, PAGE),
        GroupShape("sliding_window", 1, 2 * PAGE),
        GroupShape("recurrent", 1, 3 * PAGE),
    ],
)
PAGES, WINDOW, STATE = [(0, 0), (0, 1)], (1, 0), (2, 0)
LIMITS = StoreLimits(reservation_ttl_s=6.0, lease_ttl_s=3.0, lookup_lease_ttl_s=1.0)

Steps = Generator[float, None, None]
ShardName = tuple[ChunkKey, int, int]
"""Chunk, group, shard."""


def content(chunk: bytes, group: int, shard: int) -> bytes:
    """The bytes that a shard must have, from its key alone."""
    length = SPEC.groups[group].shard_bytes
    seed = hashlib.sha256(chunk + bytes([group, shard])).digest()
    return seed * (length // len(seed))


def chain(document: int, length: int) -> list[ChunkKey]:
    """Keys of a document; documents of one family of four share their first two chunks."""
    keys: list[ChunkKey] = []
    for number in range(length):
        owner = document // 4 if number < 2 else document
        parent = keys[-1] if keys else b""
        keys.append(
            ChunkKey(hashlib.sha256(parent + f"{number < 2}/{owner}/{number}".encode()).digest())
        )
    return keys


def parts_read(keys: list[ChunkKey]) -> list[ShardName]:
    """What a hit at the end of these chunks reads."""
    return [
        *((key, *shard) for key in keys for shard in PAGES),
        (keys[-1], *WINDOW),
        (keys[-1], *STATE),
    ]


class Crashed(Exception):
    """The agent that a step talks to is not there any more."""


@dataclass
class World:
    """Virtual time, the event loop, and all dice."""

    seed: int
    now_s: float = 100.0
    rng: random.Random = field(init=False)
    counts: Counter[str] = field(default_factory=Counter)
    faults_on: bool = True
    engines_on: bool = True

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, delay_s: float, act: Callable[[], None]) -> None:
        """Run `act` after `delay_s`."""
        heapq.heappush(self._events, (self.now_s + delay_s, next(self._numbers), act))

    def run(self, steps: Steps) -> None:
        """Start a coroutine; each number that it yields is a wait in seconds."""

        def resume() -> None:
            try:
                self.at(next(steps), resume)
            except StopIteration:
                pass

        self.at(0.0, resume)

    def run_until(self, end_s: float, check: Callable[[], None]) -> None:
        """Play events up to `end_s`, calling `check` now and then."""
        while self._events and self._events[0][0] <= end_s:
            self.now_s, number, act = heapq.heappop(self._events)
            act()
            if number % 16 == 0:
                check()
        self.now_s = end_s

    def chance(self, share: float) -> bool:
        """True with this probability, while faults are on."""
        return self.faults_on and self.rng.random() < share


class Agent:
    """One node: the real store over a real arena, announcements behind the write, pulls from peers."""

    def __init__(
        self, world: World, fleet: dict[str, Agent], index: MemoryIndexStore, name: str
    ) -> None:
        self.world, self.fleet, self.index_store, self.name = world, fleet, index, name
        self.policy = world.rng.choice(["s3fifo", "lru"])
        self.pages = world.rng.choice([32, 48, 80])
        self.is_up = False
        self.ids = itertools.count(1)
        self.start()

    def start(self) -> None:
        """A fresh incarnation: nothing of the last one is left."""
        self.is_up = True
        self.epoch = self.world.rng.randrange(1, 1 << 32)
        self.store = Store(
            arena_bytes=self.pages * PAGE,
            policy=build_policy(self.policy),
            limits=LIMITS,
            new_id=lambda: next(self.ids),
        )
        self.arena = bytearray(self.pages * PAGE)
        self.flipped: set[int] = set()
        self.waiting: dict[tuple[NamespaceDigest, ChunkKey], int] = {}
        self.index = MemoryIndex(self.index_store)
        self.hints = RemoteHints(self.index, clock=lambda: self.world.now_s)
        self.number = 0
        self.store.open_namespace(SPEC)
        self.puller = self.session(maps_arena=True, role="peer")
        self.world.run(self.ticks(self.epoch))

    def crash(self) -> None:
        """Gone without a word; back after a while."""
        self.is_up = False
        self.world.counts["crashes"] += 1
        self.world.at(self.world.rng.uniform(0.5, 15.0), self.start)

    def session(self, *, maps_arena: bool, role: str) -> SessionId:
        session = SessionId(next(self.ids))
        self.store.open_session(session, maps_arena=maps_arena, role=role, name=self.name)
        return session

    def ticks(self, epoch: int) -> Steps:
        """Ticker and announcer of one incarnation."""
        next_beat_s = 0.0
        while self.is_up and self.epoch == epoch:
            self.store.expire(self.world.now_s)
            self.store.evict_to_low_watermark(4)
            for namespace, chunk, bitmap in self.store.take_changes():
                self.waiting[namespace, chunk] = bitmap
            try:
                if not self.number:
                    self.number = self.index.join(
                        name=self.name, address=f"{self.name}:1", epoch=self.epoch
                    )
                    self.note_all()
                elif self.world.now_s >= next_beat_s:
                    next_beat_s = self.world.now_s + 3.0
                    if self.index.heartbeat():  # what it lost may include our number
                        self.number = self.index.join(
                            name=self.name, address=f"{self.name}:1", epoch=self.epoch
                        )
                        self.note_all()
                if self.waiting:
                    batch = [Announcement(n, c, b) for (n, c), b in self.waiting.items()]
                    self.index.announce(batch)
                    if self.world.chance(0.1):  # the answer was lost, so it is sent again
                        self.index.announce(batch)
                    self.waiting.clear()
            except IndexUnavailable:
                self.world.counts["index_unavailable"] += 1
            yield self.world.rng.uniform(0.1, 0.6)

    def note_all(self) -> None:
        for namespace, chunk, bitmap in self.held():
            self.waiting.setdefault((namespace, chunk), bitmap)

    def held(self) -> list[HeldChunk]:
        ((namespace, keys),) = self.store.chunk_keys(None)
        return self.store.held(namespace, keys)

    def check(self) -> None:
        if self.is_up:
            self.store.check_invariants()

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self.arena[offset : offset + length])

    def flip_a_bit(self) -> None:
        """Damage a ready shard's first byte, as bad memory would."""
        held = self.held()
        if not held:
            return
        _, chunk, _ = self.world.rng.choice(held)
        shard = self.world.rng.choice(
            [s for s in self.store.list_shards(SPEC.digest, chunk) if s.is_ready]
        )
        self.arena[shard.offset] ^= 1
        self.world.counts["flips"] += 1

    def pull(self, keys: list[ChunkKey], epoch: int) -> Steps:
        """Copy what a hit at the end of these chunks lacks here and others are said to have; a miss on any trouble."""
        presence = self.store.presence(SPEC.digest, keys)
        place_of = {key: len(SPEC.groups) * number for number, key in enumerate(keys)}
        parts = {(key, g, s): place_of[key] + g for key, g, s in parts_read(keys)}
        if all(presence[place] == Presence.READY_HERE for place in parts.values()):
            return
        if not self.hints.overlay(SPEC, keys, presence):
            self.world.counts["index_unavailable"] += 1
        wanted: dict[ChunkKey, int] = {}
        for (key, group, shard), place in parts.items():
            if presence[place] == Presence.READY_ELSEWHERE:
                wanted[key] = wanted.get(key, 0) | 1 << SPEC.shard_bit(group, shard)
        for key, hint in self.hints.find(SPEC, wanted).items():
            left = wanted[key]
            sources = 0
            for holder in hint.holders.each:
                mine = [s for s in (*PAGES, WINDOW, STATE) if left >> SPEC.shard_bit(*s) & 1]
                mine = [s for s in mine if holder.bitmap >> SPEC.shard_bit(*s) & 1]
                node = self.hints.node(holder.node, holder.epoch)
                if not mine or node is None:
                    continue
                left &= ~holder.bitmap
                sources += 1
                place = (hint.parent, hint.number)
                owner = self.fleet[node.name]
                pulled = yield from self.pull_one(owner, holder.epoch, key, place, mine, epoch)
                if not self.is_up or self.epoch != epoch:
                    return
                if not pulled:
                    self.hints.distrust(SPEC.digest, [key], holder.node)
            self.world.counts["spread"] += sources > 1

    def pull_one(
        self,
        owner: Agent,
        owner_epoch: int,
        chunk: ChunkKey,
        place: tuple[ChunkKey | None, int],
        shards: list[tuple[int, int]],
        epoch: int,
    ) -> Generator[float, None, bool]:
        """Copy shards of one chunk; False when the owner did not have them, or did not deliver."""
        world = self.world

        def on_the_wire() -> Generator[float, None, bool]:
            yield world.rng.expovariate(20.0)
            return not world.chance(0.05) and owner.is_up and owner.epoch == owner_epoch

        if not (yield from on_the_wire()):
            world.counts["pull_lost"] += 1
            return False
        if not self.is_up or self.epoch != epoch:
            return False
        visitor = owner.session(maps_arena=False, role="peer")
        try:
            answer = owner.store.acquire(
                visitor, SPEC.digest, [(chunk, g, s) for g, s in shards], world.now_s
            )
            if len(answer.ready) < len(shards):
                world.counts["pull_stale_hint"] += 1
                return False
            rooms = self.store.reserve(
                self.puller,
                SPEC.digest,
                [
                    ReserveRequestItem(chunk, *place, g, s, SPEC.groups[g].shard_bytes)
                    for g, s in shards
                ],
                world.now_s,
            )
            good = []
            for (_, ready), room in zip(answer.ready, rooms, strict=True):
                if room.result is not ReserveResult.RESERVED:
                    continue
                frame = owner.read(ready.offset, ready.length)
                arrived = (yield from on_the_wire()) and self.is_up and self.epoch == epoch
                if not self.is_up or self.epoch != epoch:
                    return False
                held = owner.is_up and owner.epoch == owner_epoch
                held = held and owner.store.lease_holds(visitor, answer.lease_id, world.now_s)
                if not arrived or not held or xxhash.xxh3_64_intdigest(frame) != ready.checksums[0]:
                    self.store.abort(self.puller, [room.reservation_id], world.now_s)
                    world.counts["pull_aborted"] += 1
                    continue
                self.arena[room.offset : room.offset + room.length] = frame
                good.append((room.reservation_id, ready.checksums, True))
            results = self.store.commit(self.puller, good, world.now_s)
            world.counts["pulled"] += results.count(CommitResult.COMMITTED)
            return len(good) == len(shards)
        except RequestRejected:
            world.counts["pull_rejected"] += 1
            return False
        finally:
            if owner.is_up and owner.epoch == owner_epoch:
                owner.store.end_session(visitor)


class Engine:
    """One engine's life beside an agent: writes documents and reads them, honestly or not."""

    def __init__(self, world: World, agent: Agent) -> None:
        self.world, self.agent = world, agent

    def live(self) -> Steps:
        """One request after the other, until the world says so."""
        world = self.world
        while world.engines_on:
            yield world.rng.expovariate(1.5)
            if not self.agent.is_up:
                continue
            keys = chain(int(world.rng.paretovariate(0.6)) % 24, world.rng.randrange(1, 6))
            request = self.read(keys) if world.rng.random() < 0.6 else self.write(keys)
            try:
                yield from request
            except (Crashed, RequestRejected) as error:
                world.counts[type(error).__name__] += 1

    def here(self, epoch: int) -> Agent:
        if not self.agent.is_up or self.agent.epoch != epoch:
            raise Crashed
        return self.agent

    def end(self, epoch: int, session: SessionId, *, orderly: bool) -> None:
        """The session's stream breaks; the kernel tells of the mapping at once, or much later."""
        if not self.agent.is_up or self.agent.epoch != epoch:
            return
        store = self.agent.store
        store.end_session(session)
        delay_s = 0.0 if orderly else self.world.rng.choice([0.0, 2.0, 12.0])

        def unmapped() -> None:
            if self.agent.is_up and self.agent.epoch == epoch:
                store.mapping_closed(session)

        self.world.at(delay_s, unmapped)

    def write(self, keys: list[ChunkKey]) -> Steps:
        world, agent = self.world, self.agent
        epoch, arena = agent.epoch, agent.arena
        session = agent.session(maps_arena=True, role="prefill")
        kind = world.rng.random()
        first_window = world.rng.randrange(len(keys))  # those before were freed by the engine
        wanted: list[tuple[int, tuple[int, int]]] = []
        if kind < 0.8:
            wanted += [(i, shard) for i in range(len(keys)) for shard in PAGES]
            wanted += [(i, WINDOW) for i in range(first_window, len(keys))]
        if kind > 0.3:  # at times the state alone: it is offered later than the pages
            wanted.append((len(keys) - 1, STATE))
            world.counts["late_states"] += kind >= 0.8
        items = [
            ReserveRequestItem(
                keys[i], keys[i - 1] if i else None, i, g, s, SPEC.groups[g].shard_bytes
            )
            for i, (g, s) in wanted
        ]
        rooms = agent.store.reserve(session, SPEC.digest, items, world.now_s)
        reserved = [
            (i, r) for i, r in zip(items, rooms, strict=True) if r.result is ReserveResult.RESERVED
        ]
        world.counts["reserved"] += len(reserved)
        batch = []
        session_ended = False
        for item, room in reserved:
            good = content(item.chunk, item.group, item.shard)
            half = len(good) // 2
            arena[room.offset : room.offset + half] = good[:half]
            if world.chance(0.02):  # the process dies in the middle of a copy
                world.counts["writer_died"] += 1
                self.end(epoch, session, orderly=False)
                return
            if (
                world.chance(0.02) and not session_ended
            ):  # stopped: the session times out, the mapping does not
                world.counts["writer_stopped"] += 1
                yield world.rng.uniform(1.0, 20.0)
                if agent.is_up and agent.epoch == epoch:
                    agent.store.end_session(session)
                session_ended = True
                yield world.rng.uniform(0.0, 20.0)
            else:
                yield world.rng.expovariate(30.0)
            # The arena of a dead agent stays mapped: this write goes where it went before, wanted or not.
            arena[room.offset + half : room.offset + len(good)] = good[half:]
            batch.append((room.reservation_id, (xxhash.xxh3_64_intdigest(good),), False))
        if session_ended:
            if agent.is_up and agent.epoch == epoch:
                agent.store.mapping_closed(session)
            return
        store = self.here(epoch).store
        if world.rng.random() < 0.1:
            store.abort(session, [b[0] for b in batch], world.now_s)
        elif batch:
            if world.chance(0.1):  # late: past the reservation's time
                yield world.rng.uniform(0.0, 10.0)
                store = self.here(epoch).store
            results = store.commit(session, batch, world.now_s)
            world.counts["committed"] += results.count(CommitResult.COMMITTED)
            world.counts["late"] += results.count(CommitResult.EXPIRED)
        self.end(epoch, session, orderly=True)

    def read(self, keys: list[ChunkKey]) -> Steps:
        world, agent = self.world, self.agent
        epoch, arena, store = agent.epoch, agent.arena, agent.store
        session = agent.session(maps_arena=True, role="decode")
        yield from agent.pull(keys, epoch)
        store = self.here(epoch).store
        store.look_up(session, SPEC.digest, keys, world.now_s, takes_lease=True)
        yield world.rng.expovariate(5.0)
        if world.chance(0.03):
            self.end(epoch, session, orderly=False)
            return
        store = self.here(epoch).store
        shards = parts_read(keys)
        answer = store.acquire(session, SPEC.digest, shards, world.now_s)
        copies = []
        for position, ready in answer.ready:
            half = ready.length // 2
            first = bytes(arena[ready.offset : ready.offset + half])
            yield world.rng.choice([0.0, 0.01, 0.05]) if not world.chance(0.03) else 10.0
            copy = first + bytes(arena[ready.offset + half : ready.offset + ready.length])
            copies.append((shards[position], copy, ready.checksums[0]))
        store = self.here(epoch).store
        (held,) = store.release(session, [answer.lease_id], world.now_s)
        for (chunk, group, shard), copy, checksum in copies:
            verified = xxhash.xxh3_64_intdigest(copy) == checksum
            if verified and held:
                assert copy == content(chunk, group, shard), (
                    f"wrong bytes served for {chunk[:4].hex()}/{group}/{shard}"
                )
                world.counts["hits"] += 1
                world.counts["state_hits"] += (group, shard) == STATE
            elif held:
                # Only a flipped bit explains it: the lease held, so nobody may have written there.
                damage = sum(
                    a != b for a, b in zip(copy, content(chunk, group, shard), strict=True)
                )
                assert damage <= world.counts["flips"], "a leased extent was overwritten"
                world.counts["checksum_misses"] += 1
                store.drop_corrupt(SPEC.digest, chunk)
            else:
                world.counts["lease_lost"] += 1
        self.end(epoch, session, orderly=True)


def simulate(seed: int, *, duration_s: float = 240.0) -> Counter[str]:
    """Play one fleet; raises AssertionError when a promise is broken. Returns what happened."""
    world = World(seed)
    index = MemoryIndexStore(clock=lambda: world.now_s, entry_ttl_s=3600.0)
    fleet: dict[str, Agent] = {}
    for name in ("a", "b", "c"):
        fleet[name] = Agent(world, fleet, index, name)
    for agent in fleet.values():
        for _ in range(3):
            world.run(Engine(world, agent).live())

    def trouble() -> Steps:
        while world.faults_on:
            yield world.rng.expovariate(0.15)
            kind = world.rng.randrange(4)
            up = [a for a in fleet.values() if a.is_up]
            if not world.faults_on:
                break
            if kind == 0 and up:
                world.rng.choice(up).crash()
            elif kind == 1:
                index.unavailable = "the simulated network is down"
                world.at(world.rng.uniform(0.5, 14.0), lambda: setattr(index, "unavailable", ""))
            elif kind == 2:
                index.erase()
                world.counts["erased"] += 1
            elif up:
                world.rng.choice(up).flip_a_bit()

    def check() -> None:
        for agent in fleet.values():
            agent.check()
        index.check_invariants()

    world.run(trouble())
    world.run_until(world.now_s + duration_s, check)
    # Quiet: engines go on, faults end. Then everything ends and nothing may be left over.
    world.faults_on = False
    index.unavailable = ""
    world.run_until(world.now_s + 60.0, check)
    settle(world, fleet, index)
    return world.counts


def settle(world: World, fleet: dict[str, Agent], index: MemoryIndexStore) -> None:
    """Without engines every lease and reservation ends, and the index comes to say exactly what is held."""
    world.engines_on = False
    world.run_until(world.now_s + 60.0, lambda: None)
    live = {}
    for name, agent in fleet.items():
        assert agent.is_up, "an agent did not come back"
        agent.check()
        counts = agent.store.counts()
        left = (
            counts.num_leases,
            counts.num_reservations,
            counts.quarantined_bytes,
            counts.pending_bytes,
        )
        assert left == (0, 0, 0, 0), f"left over on {name}: {counts}"
        assert counts.num_sessions == 1, "a session outlived its engine"
        assert counts.used_bytes == counts.ready_bytes, "bytes leaked"
        for _, chunk, bitmap in agent.held():
            live[chunk, agent.number] = bitmap
    reader = MemoryIndex(index)
    known = [ChunkKey(chunk) for _, chunk in index.values]
    claims = {
        (chunk, holder.node): holder.bitmap
        for chunk, holders in zip(known, reader.lookup(SPEC.digest, known), strict=True)
        for holder in holders
    }
    assert claims == live, "the index does not say what is held"
