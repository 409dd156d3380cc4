"""Orders cached chunks by how little they would be missed.

A policy holds every chunk that has ready shards and names the next victim. It never names one that is held (leased,
or with shards being written): such a chunk is parked when the policy meets it and comes back when it is let go, so
nothing is scanned twice. It names suffixes before prefixes, because a chunk is of no use without the chunks before
it: a chunk that is met while a cached chunk follows it is moved right behind that follower. All operations are O(1),
amortised over the chain that one chunk belongs to. Memory: the links are in the chunks; S3-FIFO adds one key per
ghost.

Called by the store, under its caller's lock. It leaves to the store who holds what and what eviction means.

Sources: S3-FIFO is Yang et al., SOSP 2023; the small queue of 50 % of the bytes and the order suffix before prefix
are measured choices (docs/decisions/0004-allocator.md, `bench/eviction.py`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

MAX_FREQUENCY = 3
MIN_GHOSTS = 1024
GHOSTS_PER_CHUNK = 2
"""Two instead of the paper's one: +3 to +8 % hits where the cache is small, no loss where it is large (decision
0004).
"""


class Evictable:
    """What a policy knows of a chunk. Store and lineage own the fields of their parts; `queue` says which list it is
    in.
    """

    __slots__ = (
        "colder",
        "first_child",
        "frequency",
        "hotter",
        "key",
        "next_sibling",
        "num_bytes",
        "number",
        "parent",
        "preceding_sibling",
        "queue",
        "stamp",
    )

    def __init__(self, key: bytes, number: int, num_bytes: int) -> None:
        self.key = key
        self.number = number
        """Position in the chain: a parent's is smaller than its children's."""
        self.num_bytes = num_bytes
        self.parent: Evictable | None = None
        self.first_child: Evictable | None = None
        self.next_sibling: Evictable | None = None
        self.preceding_sibling: Evictable | None = None
        self.queue: Queue | None = None
        self.colder: Evictable | None = None
        self.hotter: Evictable | None = None
        self.stamp = 0
        self.frequency = 0

    def is_held(self) -> bool:
        """True while the chunk must not be evicted."""
        raise NotImplementedError


class Queue:
    """A list of chunks, coldest first. Stamps never fall from cold to hot, so two chunks of one queue can be
    compared.
    """

    __slots__ = ("coldest", "hottest", "length", "name", "num_bytes")

    def __init__(self, name: str) -> None:
        self.name = name
        self.coldest: Evictable | None = None
        self.hottest: Evictable | None = None
        self.num_bytes = 0
        self.length = 0

    def add_hottest(self, entry: Evictable, stamp: int) -> None:
        """Append; `stamp` is not below that of any member."""
        last = self.hottest
        entry.queue, entry.stamp = self, stamp
        entry.colder, entry.hotter = last, None
        if last is None:
            self.coldest = entry
        else:
            last.hotter = entry
        self.hottest = entry
        self.num_bytes += entry.num_bytes
        self.length += 1

    def add_behind(self, entry: Evictable, other: Evictable) -> None:
        """Insert right on the hotter side of `other`, which is a member."""
        entry.queue, entry.stamp = self, other.stamp
        entry.colder, entry.hotter = other, other.hotter
        if other.hotter is None:
            self.hottest = entry
        else:
            other.hotter.colder = entry
        other.hotter = entry
        self.num_bytes += entry.num_bytes
        self.length += 1

    def remove(self, entry: Evictable) -> None:
        """Take a member out."""
        colder, hotter = entry.colder, entry.hotter
        if colder is None:
            self.coldest = hotter
        else:
            colder.hotter = hotter
        if hotter is None:
            self.hottest = colder
        else:
            hotter.colder = colder
        entry.queue = entry.colder = entry.hotter = None
        self.num_bytes -= entry.num_bytes
        self.length -= 1

    def warmth_of(self, entry: Evictable) -> float:
        """Where a member stands: 0 at the cold end, below 1 at the hot end."""
        assert self.coldest is not None
        assert self.hottest is not None
        return (entry.stamp - self.coldest.stamp) / (self.hottest.stamp - self.coldest.stamp + 1)

    def members(self) -> list[Evictable]:
        """All, coldest first."""
        found = []
        entry = self.coldest
        while entry is not None:
            found.append(entry)
            entry = entry.hotter
        return found

    def check_invariants(self) -> None:
        """Raise AssertionError when links, counts or stamps are wrong."""
        colder: Evictable | None = None
        length = num_bytes = 0
        entry = self.coldest
        while entry is not None:
            assert entry.queue is self, f"{self.name}: a member thinks it is elsewhere"
            assert entry.colder is colder, f"{self.name}: broken link"
            assert colder is None or colder.stamp <= entry.stamp, f"{self.name}: stamps fall"
            length += 1
            num_bytes += entry.num_bytes
            colder, entry = entry, entry.hotter
        assert self.hottest is colder, f"{self.name}: wrong end"
        assert (length, num_bytes) == (self.length, self.num_bytes), f"{self.name}: wrong counts"


class EvictionPolicy(Protocol):
    """Which chunk goes next. Entries are in at most one policy."""

    name: str

    def insert(self, entry: Evictable) -> None:
        """A chunk became readable. Of several at once insert suffixes first."""

    def remove(self, entry: Evictable, *, evicted: bool) -> None:
        """The chunk is gone; `evicted` when for want of room, which a policy may remember."""

    def resize(self, entry: Evictable, num_bytes: int) -> None:
        """The chunk has `num_bytes` now."""

    def access(self, entries: Sequence[Evictable]) -> None:
        """Somebody asked for these chunks of one prompt, given prefix first."""

    def let_go(self, entry: Evictable) -> None:
        """A held chunk is held no more. Must be called each time, parked or not."""

    def next_victim(self) -> Evictable | None:
        """The chunk to evict now, still a member; None when every chunk is held."""

    def coldest(self, limit: int) -> list[Evictable]:
        """At most `limit` chunks near the cold end, without looking at holds or order within chains."""

    def heat(self, entry: Evictable) -> float:
        """How much a member would be missed, 0 (next to go) to 4."""

    def members(self) -> list[Evictable]:
        """All chunks, in no order that means anything."""

    def check_invariants(self) -> None:
        """Raise AssertionError when the policy's own state is inconsistent."""


class _Parking:
    """Chunks that were met and can't go: held ones, and those that a held chunk follows.

    The second kind waits in order, as the last resort when all else is held.
    """

    def __init__(self) -> None:
        self.held = Queue("held")
        self.waiting = Queue("waiting")

    def has(self, entry: Evictable) -> bool:
        return entry.queue is self.held or entry.queue is self.waiting

    def last_resort(self) -> Evictable | None:
        """The first waiting chunk that is not held itself."""
        while (entry := self.waiting.coldest) is not None:
            if not entry.is_held():
                return entry
            self.waiting.remove(entry)
            self.held.add_hottest(entry, 0)
        return None

    def check_invariants(self) -> None:
        self.held.check_invariants()
        self.waiting.check_invariants()
        for entry in self.held.members():
            assert entry.is_held(), "a chunk is parked as held but is not"


def _settle(entry: Evictable, parking: _Parking) -> None:
    """Move a chunk that was met with cached chunks after it behind them, the whole chain below it in one pass.

    Per chunk alone a chain that was stored prefix first would cost the square of its length.
    """
    path = [entry]
    while (child := path[-1].first_child) is not None:
        path.append(child)
    for parent, child in zip(reversed(path[:-1]), reversed(path[1:]), strict=True):
        if parking.has(parent):
            continue
        queue = parent.queue
        assert queue is not None
        if child.queue is parking.held or child.queue is parking.waiting:
            if parent is entry:
                queue.remove(parent)
                parking.waiting.add_hottest(parent, 0)
            continue
        assert child.queue is not None
        if parent is entry or (child.queue is queue and parent.stamp < child.stamp):
            queue.remove(parent)
            child.queue.add_behind(parent, child)


def _wake_parents(entry: Evictable, parking: _Parking) -> None:
    """Chunks that wait because `entry` was held go behind it again, where `entry` is."""
    child, parent = entry, entry.parent
    while parent is not None and parent.queue is parking.waiting:
        parking.waiting.remove(parent)
        assert child.queue is not None
        child.queue.add_behind(parent, child)
        child, parent = parent, parent.parent


class LRU:
    """Least recently used first; of one prompt the tail counts as less recent than the head."""

    name = "lru"

    def __init__(self) -> None:
        self._queue = Queue("lru")
        self._parking = _Parking()
        self._stamp = 0

    def insert(self, entry: Evictable) -> None:
        """See `EvictionPolicy`."""
        self._stamp += 1
        self._queue.add_hottest(entry, self._stamp)

    def remove(self, entry: Evictable, *, evicted: bool) -> None:  # noqa: ARG002
        """See `EvictionPolicy`."""
        if self._parking.has(entry):
            self._unpark(entry)  # so that chunks that wait for it wait no more
        assert entry.queue is not None
        entry.queue.remove(entry)

    def resize(self, entry: Evictable, num_bytes: int) -> None:
        """See `EvictionPolicy`."""
        assert entry.queue is not None
        entry.queue.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes

    def access(self, entries: Sequence[Evictable]) -> None:
        """See `EvictionPolicy`."""
        queue = self._queue
        for entry in reversed(entries):
            if entry.queue is queue:
                self._stamp += 1
                queue.remove(entry)
                queue.add_hottest(entry, self._stamp)

    def let_go(self, entry: Evictable) -> None:
        """See `EvictionPolicy`."""
        if entry.queue is self._parking.held:
            self._unpark(entry)

    def next_victim(self) -> Evictable | None:
        """See `EvictionPolicy`."""
        queue = self._queue
        while (entry := queue.coldest) is not None:
            if entry.is_held():
                queue.remove(entry)
                self._parking.held.add_hottest(entry, 0)
            elif entry.first_child is not None:
                _settle(entry, self._parking)
            else:
                return entry
        return self._parking.last_resort()

    def coldest(self, limit: int) -> list[Evictable]:
        """See `EvictionPolicy`."""
        return _first(self._queue, limit)

    def heat(self, entry: Evictable) -> float:
        """See `EvictionPolicy`."""
        return 4.0 * self._queue.warmth_of(entry) if entry.queue is self._queue else 4.0

    def members(self) -> list[Evictable]:
        """See `EvictionPolicy`."""
        return [
            *self._queue.members(),
            *self._parking.held.members(),
            *self._parking.waiting.members(),
        ]

    def check_invariants(self) -> None:
        """See `EvictionPolicy`."""
        self._queue.check_invariants()
        self._parking.check_invariants()

    def _unpark(self, entry: Evictable) -> None:
        assert entry.queue is not None
        entry.queue.remove(entry)
        self._stamp += 1
        self._queue.add_hottest(entry, self._stamp)
        _wake_parents(entry, self._parking)


class S3FIFO:
    """Two FIFO queues by bytes: new chunks prove themselves in the small one, accessed ones move to the main one.

    `small_fraction` of the bytes belong to the small queue. Keys that left the small queue without an access are
    remembered as ghosts, at most `GHOSTS_PER_CHUNK` per cached chunk (or `MIN_GHOSTS`); a ghost that comes back goes
    straight to the main queue.
    """

    name = "s3fifo"

    def __init__(self, *, small_fraction: float = 0.5) -> None:
        if not 0.0 < small_fraction < 1.0:
            raise ValueError(f"small_fraction={small_fraction} is not between 0 and 1")
        self._small_fraction = small_fraction
        self._small = Queue("small")
        self._main = Queue("main")
        self._parking = _Parking()
        self._ghosts: dict[int, None] = {}
        self._ghost_order: deque[int] = deque()
        self._stamp = 0

    @property
    def num_ghosts(self) -> int:
        """Keys remembered."""
        return len(self._ghosts)

    def insert(self, entry: Evictable) -> None:
        """See `EvictionPolicy`."""
        self._stamp += 1
        entry.frequency = 0
        ghost = _ghost_of(entry.key)
        if ghost in self._ghosts:
            del self._ghosts[ghost]
            self._main.add_hottest(entry, self._stamp)
        else:
            self._small.add_hottest(entry, self._stamp)

    def remove(self, entry: Evictable, *, evicted: bool) -> None:
        """See `EvictionPolicy`."""
        if evicted and entry.queue is self._small:
            self._remember(entry.key)
        if self._parking.has(entry):
            self._unpark(entry)  # so that chunks that wait for it wait no more
        assert entry.queue is not None
        entry.queue.remove(entry)

    def resize(self, entry: Evictable, num_bytes: int) -> None:
        """See `EvictionPolicy`."""
        assert entry.queue is not None
        entry.queue.num_bytes += num_bytes - entry.num_bytes
        entry.num_bytes = num_bytes

    def access(self, entries: Sequence[Evictable]) -> None:
        """See `EvictionPolicy`."""
        for entry in entries:
            if entry.frequency < MAX_FREQUENCY:
                entry.frequency += 1

    def let_go(self, entry: Evictable) -> None:
        """See `EvictionPolicy`."""
        if entry.queue is self._parking.held:
            self._unpark(entry)

    def next_victim(self) -> Evictable | None:
        """See `EvictionPolicy`."""
        small, main = self._small, self._main
        while True:
            share = self._small_fraction * (small.num_bytes + main.num_bytes)
            queue = small if small.length and (small.num_bytes > share or not main.length) else main
            entry = queue.coldest
            if entry is None:
                return self._parking.last_resort()
            if entry.is_held():
                queue.remove(entry)
                self._parking.held.add_hottest(entry, 0)
            elif entry.frequency:
                queue.remove(entry)
                self._stamp += 1
                entry.frequency = 0 if queue is small else entry.frequency - 1
                main.add_hottest(entry, self._stamp)
            elif entry.first_child is not None:
                _settle(entry, self._parking)
            else:
                return entry

    def coldest(self, limit: int) -> list[Evictable]:
        """See `EvictionPolicy`."""
        found = _first(self._small, limit)
        return found + _first(self._main, limit - len(found))

    def heat(self, entry: Evictable) -> float:
        """See `EvictionPolicy`."""
        queue = entry.queue
        if queue is self._small:
            return min(4.0, entry.frequency + queue.warmth_of(entry))
        if queue is self._main:
            return min(4.0, 1.0 + entry.frequency + queue.warmth_of(entry))
        return 4.0

    def members(self) -> list[Evictable]:
        """See `EvictionPolicy`."""
        return [
            *self._small.members(),
            *self._main.members(),
            *self._parking.held.members(),
            *self._parking.waiting.members(),
        ]

    def check_invariants(self) -> None:
        """See `EvictionPolicy`."""
        self._small.check_invariants()
        self._main.check_invariants()
        self._parking.check_invariants()
        assert self._ghosts.keys() <= set(self._ghost_order), "a ghost would never be forgotten"

    def _unpark(self, entry: Evictable) -> None:
        assert entry.queue is not None
        entry.queue.remove(entry)
        self._stamp += 1
        entry.frequency = 0
        self._main.add_hottest(entry, self._stamp)
        _wake_parents(entry, self._parking)

    def _remember(self, key: bytes) -> None:
        # A ghost that comes back leaves its place in the order behind; when that place runs out, a second stay of the
        # same key is forgotten early. That costs a hint, and saves half of the memory.
        ghost = _ghost_of(key)
        if ghost not in self._ghosts:
            self._ghosts[ghost] = None
            self._ghost_order.append(ghost)
        chunks = self._small.length + self._main.length + self._parking.held.length
        limit = max(MIN_GHOSTS, GHOSTS_PER_CHUNK * chunks)
        while len(self._ghost_order) > limit:
            self._ghosts.pop(self._ghost_order.popleft(), None)


def build_policy(name: str) -> EvictionPolicy:
    """The policy of that name, `s3fifo` or `lru`; ValueError for any other."""
    if name == S3FIFO.name:
        return S3FIFO()
    if name == LRU.name:
        return LRU()
    raise ValueError(f"eviction policy {name!r} is not known; use s3fifo or lru")


def _ghost_of(key: bytes) -> int:
    """Seven bytes of a digest: a ghost is a hint, and a small integer takes a third of the key's memory."""
    return int.from_bytes(key[-7:], "little")


def _first(queue: Queue, limit: int) -> list[Evictable]:
    found: list[Evictable] = []
    entry = queue.coldest
    while entry is not None and len(found) < limit:
        found.append(entry)
        entry = entry.hotter
    return found
