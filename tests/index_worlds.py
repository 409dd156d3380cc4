"""The two indexes behind one face, for tests that hold both to the port."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol

from redis_server import RedisServer

from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.index.open import build_index
from cacheservice.index.port import Announcement, Index

NAMESPACE = NamespaceDigest(b"n" * 32)
TTL_S = 3600.0


def chunk(number: int) -> ChunkKey:
    """A chunk key that contains bytes which text protocols trip over."""
    return ChunkKey(b"\r\n\0{}:" + number.to_bytes(26, "big"))


def announcement(
    number: int, bitmap: int = 1, namespace: NamespaceDigest = NAMESPACE
) -> Announcement:
    """What an agent says of chunk `number`."""
    return Announcement(namespace, chunk(number), bitmap)


class FakeClock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass for everything that uses this clock."""
        self.now_s += seconds


class World(Protocol):
    """Some agents on one index."""

    clock: FakeClock

    def agent(self) -> Index:
        """One more agent's index, not joined."""

    def erase(self) -> None:
        """Lose everything, as FLUSHALL."""

    def expire_lease(self, number: int) -> None:
        """Let the node's lease run out."""

    def expire_entries(self) -> None:
        """Let the TTL of every chunk run out."""

    def close(self) -> None:
        """End it."""


class MemoryWorld:
    """Agents on one store."""

    def __init__(self) -> None:
        self.clock = FakeClock()
        self.store = MemoryIndexStore(clock=self.clock, entry_ttl_s=TTL_S)

    def agent(self) -> Index:
        return MemoryIndex(self.store)

    def erase(self) -> None:
        self.store.erase()

    def expire_lease(self, number: int) -> None:
        self.store.leases[number].expires_at = self.clock()

    def expire_entries(self) -> None:
        for value in self.store.values.values():
            value.expires_at = self.clock()

    def close(self) -> None:
        self.store.check_invariants()


class RedisWorld:
    """Agents on a real Redis, under a key prefix of their own. Time-outs are long: nothing here is about them."""

    def __init__(self, server: RedisServer) -> None:
        self.clock = FakeClock()
        self.server = server
        self.prefix = f"larder:{secrets.token_hex(4)}:"
        self.redis = server.client()
        self._agents: list[Index] = []

    def agent(self) -> Index:
        index = build_index(
            self.server.url,
            key_prefix=self.prefix,
            timeout_s=5,
            write_timeout_s=5,
            entry_ttl_s=TTL_S,
            clock=self.clock,
        )
        self._agents.append(index)
        return index

    def keys(self, pattern: str = "*") -> list[bytes]:
        """Keys of this world that match."""
        return list(self.redis.scan_iter(match=self.prefix + pattern, count=10_000))

    def erase(self) -> None:
        for key in self.keys():
            self.redis.delete(key)

    def expire_lease(self, number: int) -> None:
        self._expire(f"{self.prefix}node:{number}".encode())

    def expire_entries(self) -> None:
        for key in self.keys("{*"):
            self._expire(key)

    def close(self) -> None:
        for index in self._agents:
            index.close()
        self.redis.close()

    def _expire(self, key: bytes) -> None:
        assert self.redis.pexpire(key, 1), key
        poll(lambda: not self.redis.exists(key))


def poll(is_done: Callable[[], object], *, timeout_s: float = 20.0) -> None:
    """Wait until it is, AssertionError when it never is."""
    deadline = time.monotonic() + timeout_s
    while not is_done():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.002)
