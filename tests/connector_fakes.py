"""A cache in this process, at the port of the client: what `CacheClient` answers, without agent, sockets and threads.

Faults are scripted per call, so that tests can fail call N for every N. Clock and waiting can be replaced, so that a
harness decides when what happens. A store is reserved first and pending until it is committed, as at the agent; what a
client has reserved or leased ends with it.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from cacheservice.client.values import (
    ClientState,
    LookupAnswer,
    LookupWait,
    RetrieveResult,
    ShardRead,
    ShardWrite,
    StoreResult,
)
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.outcomes import Outcome, Presence, Reason

PIECE = 1 << 16
ShardId = tuple[bytes, bytes, int, int]
"""Namespace, chunk, group, shard."""


class FakeCache:
    """The bytes that all fake clients of one test share."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.lock = threading.Lock()
        self.shards: dict[ShardId, bytes] = {}
        self.pending: set[tuple[bytes, bytes]] = set()
        """Whole chunks that somebody outside of the test is storing."""
        self.reserved: dict[ShardId, FakeClient] = {}
        """Shards between reserve and commit, and who stores them."""
        self.namespaces: dict[bytes, NamespaceSpec] = {}
        self.epoch = 7
        self.is_up = True
        self.leases: set[int] = set()
        self.lease_owners: dict[int, FakeClient] = {}
        self.next_lease = 1
        self.outcomes: list[Outcome] = []
        self.fail_retrieve: Callable[[ShardRead], Reason | None] = lambda read: None
        self.fail_store: Callable[[ShardWrite], Reason | None] = lambda write: None
        self.lookup_gate: threading.Event | None = None
        """When set, lookups wait for it (at most 2 s)."""
        self.rest: Callable[[], None] = lambda: time.sleep(0.002)
        """What a waiting lookup does between two looks."""
        self.turn: Callable[[], None] = lambda: None
        """Called before each shard is copied and each lookup is answered: the world may move on here."""
        self.see_stored: Callable[[bytes, ShardWrite, bytes], None] = lambda ns, write, content: (
            None
        )
        """Told of each shard that is committed, with its bytes."""

    def restart(self) -> None:
        """The agent dies and comes back with nothing."""
        with self.lock:
            self.epoch += 1
            self.shards.clear()
            self.pending.clear()
            self.reserved.clear()
            self.leases.clear()
            self.lease_owners.clear()

    def end_session(self, client: FakeClient) -> None:
        """What a client that is gone held ends with it."""
        with self.lock:
            for shard in [s for s, owner in self.reserved.items() if owner is client]:
                del self.reserved[shard]
            for lease in [n for n, owner in self.lease_owners.items() if owner is client]:
                self.leases.discard(lease)
                del self.lease_owners[lease]

    def presence(self, namespace: bytes, chunk: bytes) -> bytes:
        """Codes of all groups of one chunk."""
        codes = []
        for group, shape in enumerate(self.namespaces[namespace].groups):
            there = all(
                (namespace, chunk, group, s) in self.shards for s in range(shape.num_shards)
            )
            is_pending = (namespace, chunk) in self.pending or any(
                (namespace, chunk, group, s) in self.reserved for s in range(shape.num_shards)
            )
            codes.append(
                Presence.READY_HERE
                if there
                else Presence.PENDING
                if is_pending
                else Presence.ABSENT
            )
        return bytes(codes)


class FakeClient:
    """One half's client."""

    def __init__(self, cache: FakeCache) -> None:
        self.cache = cache
        self.is_closed = False
        self.lookups: list[tuple[int, LookupWait]] = []
        self.num_stored = 0

    def start(self) -> None:
        pass

    def wait_connected(self, timeout_s: float) -> bool:
        return self.cache.is_up

    def close(self) -> None:
        self.is_closed = True

    def state(self) -> ClientState:
        return ClientState(
            self.cache.is_up, self.cache.epoch if self.cache.is_up else None, "shared_memory", 1, ""
        )

    def open_namespace(self, spec: NamespaceSpec) -> None:
        self.cache.namespaces[spec.digest] = spec

    def report(self, outcome: Outcome) -> None:
        self.cache.outcomes.append(outcome)

    def release(self, lease_id: int) -> None:
        with self.cache.lock:
            self.cache.leases.discard(lease_id)
            self.cache.lease_owners.pop(lease_id, None)

    def lookup(
        self, namespace: bytes, chunks: Sequence[bytes], *, take_lease: bool = True, superseded_lease: int = 0,
        wait: LookupWait = LookupWait.NONE, wait_num_chunks: int = 0, wait_s: float = 0.0,
        owner: tuple[int, int] | None = None, deadline_s: float | None = None,
    ) -> LookupAnswer:  # fmt: skip
        self.lookups.append((len(chunks), wait))
        if self.cache.lookup_gate is not None:
            self.cache.lookup_gate.wait(2)
        if not self.cache.is_up or self.is_closed:
            return LookupAnswer(Reason.AGENT_DOWN, b"", 0, 0, 0.0, 0)
        until = self.cache.clock() + wait_s
        self.cache.turn()
        while True:
            if not self.cache.is_up or self.is_closed:
                return LookupAnswer(Reason.AGENT_DOWN, b"", 0, 0, 0.0, 0)
            with self.cache.lock:
                self.cache.leases.discard(superseded_lease)
                self.cache.lease_owners.pop(superseded_lease, None)
                codes = b"".join(self.cache.presence(namespace, c) for c in chunks)
                groups = len(self.cache.namespaces[namespace].groups)
                named = codes[: wait_num_chunks * groups]
                lacking = (
                    (wait is LookupWait.PENDING and Presence.PENDING in named)
                    or (wait is LookupWait.HAND_OVER and any(c != Presence.READY_HERE for c in named))
                )  # fmt: skip
                if not lacking or self.cache.clock() >= until:
                    lease = 0
                    if take_lease and Presence.READY_HERE in codes:
                        lease, self.cache.next_lease = (
                            self.cache.next_lease,
                            self.cache.next_lease + 1,
                        )
                        self.cache.leases.add(lease)
                        self.cache.lease_owners[lease] = self
                    return LookupAnswer(
                        None, codes, groups, lease, self.cache.clock() + 5, self.cache.epoch
                    )
            self.cache.rest()

    def store(
        self, namespace: bytes, writes: Sequence[ShardWrite], *, deadline_s: float | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> list[StoreResult]:  # fmt: skip
        cache, epoch = self.cache, self.cache.epoch
        reasons: list[Reason | None] = []
        for write in writes:
            key = (namespace, write.chunk, write.group, write.shard)
            reason = cache.fail_store(write)
            with cache.lock:
                if reason is None and not cache.is_up:
                    reason = Reason.AGENT_DOWN
                if reason is None and (key in cache.shards or key in cache.reserved):
                    reason = Reason.DUPLICATE
                if reason is None:
                    cache.reserved[key] = self
            reasons.append(reason)
        return [
            StoreResult(reason, 0)
            if reason is not None
            else self._commit(namespace, write, epoch, give_up)
            for write, reason in zip(writes, reasons, strict=True)
        ]

    def _commit(
        self, namespace: bytes, write: ShardWrite, epoch: int, give_up: Callable[[], bool] | None
    ) -> StoreResult:
        """Copy one shard that is reserved, and commit it unless something came between."""
        cache, key = self.cache, (namespace, write.chunk, write.group, write.shard)
        cache.turn()
        room = bytearray(write.size_bytes)
        reason = None
        if give_up is not None and give_up():
            reason = Reason.CANCELLED
        else:
            address = ctypes.addressof(ctypes.c_char.from_buffer(room))
            for start in range(0, write.size_bytes, PIECE):
                stop = min(start + PIECE, write.size_bytes)
                write.source.gather(start, stop, address + start)
            if give_up is not None and give_up():
                reason = Reason.CANCELLED
        with cache.lock:
            if cache.reserved.get(key) is self:
                del cache.reserved[key]
            if not cache.is_up or cache.epoch != epoch or self.is_closed:
                reason = Reason.AGENT_DOWN
            if reason is not None:
                return StoreResult(reason, 0)
            cache.shards[key] = bytes(room)
            self.num_stored += 1
        cache.see_stored(namespace, write, bytes(room))
        return StoreResult(Reason.HIT, write.size_bytes)

    def retrieve(
        self, namespace: bytes, reads: Sequence[ShardRead], *, lookup_lease: int = 0, epoch: int | None = None,
        deadline_s: float | None = None,
    ) -> list[RetrieveResult]:  # fmt: skip
        results = []
        for read in reads:
            self.cache.turn()
            content = self.cache.shards.get((namespace, read.chunk, read.group, read.shard))
            reason = self.cache.fail_retrieve(read)
            if not self.cache.is_up or self.is_closed:
                reason = Reason.AGENT_DOWN
            elif epoch is not None and epoch != self.cache.epoch:
                reason = Reason.EPOCH_CHANGED
            elif content is None:
                reason = Reason.EVICTED
            if content is None or reason not in (None, Reason.CHECKSUM):
                results.append(RetrieveResult(reason or Reason.EVICTED, 0))
                continue
            assert len(content) == read.size_bytes
            if reason is Reason.CHECKSUM:  # what the pages got is known to be worthless afterwards
                content = bytes(len(content))
            held = ctypes.create_string_buffer(content, len(content))
            for start in range(read.start, read.stop, PIECE):
                stop = min(start + PIECE, read.stop)
                read.sink.scatter(start, stop, ctypes.addressof(held) + start)
            results.append(
                RetrieveResult(reason or Reason.HIT, 0 if reason else read.stop - read.start)
            )
        return results


def fake_clients(monkeypatch: Any, cache: FakeCache) -> list[FakeClient]:
    """Let every connector made from now on talk to `cache`; returns the list that its clients are added to."""
    import cacheservice.connector.connector as module

    made: list[FakeClient] = []

    def build(config: Any, half: Any, *, rank: int, arena_user: Any = None) -> FakeClient:
        made.append(FakeClient(cache))
        return made[-1]

    monkeypatch.setattr(module, "build_client", build)
    return made
