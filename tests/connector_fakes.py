"""A cache in this process, at the port of the client: what `CacheClient` answers, without agent, sockets and threads.

Faults are scripted per call, so that tests can fail call N for every N.
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


class FakeCache:
    """The bytes that all fake clients of one test share."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.shards: dict[tuple[bytes, bytes, int, int], bytes] = {}
        self.pending: set[tuple[bytes, bytes]] = set()
        self.namespaces: dict[bytes, NamespaceSpec] = {}
        self.epoch = 7
        self.is_up = True
        self.leases: set[int] = set()
        self.next_lease = 1
        self.outcomes: list[Outcome] = []
        self.fail_retrieve: Callable[[ShardRead], Reason | None] = lambda read: None
        self.fail_store: Callable[[ShardWrite], Reason | None] = lambda write: None
        self.lookup_gate: threading.Event | None = None
        """When set, lookups wait for it (at most 2 s)."""

    def presence(self, namespace: bytes, chunk: bytes) -> bytes:
        """Codes of all groups of one chunk."""
        codes = []
        for group, shape in enumerate(self.namespaces[namespace].groups):
            there = all(
                (namespace, chunk, group, s) in self.shards for s in range(shape.num_shards)
            )
            is_pending = (namespace, chunk) in self.pending
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
        until = time.monotonic() + wait_s
        while True:
            with self.cache.lock:
                self.cache.leases.discard(superseded_lease)
                codes = b"".join(self.cache.presence(namespace, c) for c in chunks)
                groups = len(self.cache.namespaces[namespace].groups)
                named = codes[: wait_num_chunks * groups]
                lacking = (
                    (wait is LookupWait.PENDING and Presence.PENDING in named)
                    or (wait is LookupWait.HAND_OVER and any(c != Presence.READY_HERE for c in named))
                )  # fmt: skip
                if not lacking or time.monotonic() >= until:
                    lease = 0
                    if take_lease and Presence.READY_HERE in codes:
                        lease, self.cache.next_lease = (
                            self.cache.next_lease,
                            self.cache.next_lease + 1,
                        )
                        self.cache.leases.add(lease)
                    return LookupAnswer(
                        None, codes, groups, lease, time.monotonic() + 5, self.cache.epoch
                    )
            time.sleep(0.002)

    def store(
        self, namespace: bytes, writes: Sequence[ShardWrite], *, deadline_s: float | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> list[StoreResult]:  # fmt: skip
        results = []
        for write in writes:
            key = (namespace, write.chunk, write.group, write.shard)
            reason = self.cache.fail_store(write)
            if reason is None and not self.cache.is_up:
                reason = Reason.AGENT_DOWN
            if reason is None and key in self.cache.shards:
                reason = Reason.DUPLICATE
            if reason is not None:
                results.append(StoreResult(reason, 0))
                continue
            room = bytearray(write.size_bytes)
            address = ctypes.addressof(ctypes.c_char.from_buffer(room))
            for start in range(0, write.size_bytes, PIECE):
                stop = min(start + PIECE, write.size_bytes)
                write.source.gather(start, stop, address + start)
            with self.cache.lock:
                self.cache.shards[key] = bytes(room)
                self.num_stored += 1
            results.append(StoreResult(Reason.HIT, write.size_bytes))
        return results

    def retrieve(
        self, namespace: bytes, reads: Sequence[ShardRead], *, lookup_lease: int = 0, epoch: int | None = None,
        deadline_s: float | None = None,
    ) -> list[RetrieveResult]:  # fmt: skip
        results = []
        for read in reads:
            content = self.cache.shards.get((namespace, read.chunk, read.group, read.shard))
            reason = self.cache.fail_retrieve(read)
            if not self.cache.is_up:
                reason = Reason.AGENT_DOWN
            elif epoch is not None and epoch != self.cache.epoch:
                reason = Reason.EPOCH_CHANGED
            elif content is None:
                reason = Reason.EVICTED
            if reason is not None or content is None:
                results.append(RetrieveResult(reason or Reason.EVICTED, 0))
                continue
            assert len(content) == read.size_bytes
            held = ctypes.create_string_buffer(content, len(content))
            for start in range(read.start, read.stop, PIECE):
                stop = min(start + PIECE, read.stop)
                read.sink.scatter(start, stop, ctypes.addressof(held) + start)
            results.append(RetrieveResult(Reason.HIT, read.stop - read.start))
        return results


def fake_clients(monkeypatch: Any, cache: FakeCache) -> list[FakeClient]:
    """Let every connector made from now on talk to `cache`; returns the list that its clients are added to."""
    import cacheservice.connector.connector as module

    made: list[FakeClient] = []

    def build(config: Any, half: Any, *, rank: int) -> FakeClient:
        made.append(FakeClient(cache))
        return made[-1]

    monkeypatch.setattr(module, "build_client", build)
    return made
