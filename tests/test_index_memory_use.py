"""What the index costs in Redis: at most 200 bytes of its memory per chunk, hash tables included, whatever the key
prefix."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from index_worlds import poll
from redis_server import RedisServer, redis_server_binary

from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.index.open import build_index
from cacheservice.index.port import Announcement

MAX_BYTES_PER_CHUNK = 200
NUM_CHUNKS = 20_000
SYSTEM_BINARY = "/usr/bin/redis-server"


@pytest.fixture(params=["bundled", "system"])
def server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Two allocators: the wheel's server uses libc's, Debian's a jemalloc that rounds to 16 bytes."""
    binary = redis_server_binary() if request.param == "bundled" else SYSTEM_BINARY
    if binary is None or not os.path.exists(binary):
        pytest.skip(f"no redis-server at {binary}: install Debian's redis-server")
    with RedisServer(binary=binary) as server:
        yield server


def settled_bytes(client: redis.Redis) -> int:
    """Bytes in use when the hash tables have stopped growing, without the connections' buffers."""
    seen: list[Any] = []

    def has_settled() -> bool:
        seen.append(client.memory_stats())
        return len(seen) > 20 and seen[-1]["db.0"] == seen[-20]["db.0"]

    poll(has_settled)
    return int(seen[-1]["total.allocated"]) - int(seen[-1]["clients.normal"])


@pytest.mark.parametrize("prefix", ["larder:", "larder:0a1b2c3d:"])
def test_a_chunk_with_one_holder_costs_at_most_200_bytes(server: RedisServer, prefix: str) -> None:
    # Debian's jemalloc has no sizes between 64 and 80 or between 32 and 48 bytes: a key with the long prefix takes 80,
    # and more than 3 bitmap bytes take 48. The target is of the builds that Redis publishes and of the wheel's.
    is_bundled = server.binary == redis_server_binary()
    bitmap = 2**64 - 1 if is_bundled else 2**24 - 1
    limit = MAX_BYTES_PER_CHUNK if is_bundled or prefix == "larder:" else 204
    index = build_index(server.url, key_prefix=prefix, write_timeout_s=10)
    namespace = NamespaceDigest(os.urandom(32))
    index.join(name="a", address="10.0.0.1:7000", epoch=2**32 - 1)
    chunks = [ChunkKey(os.urandom(32)) for _ in range(NUM_CHUNKS)]
    with server.client() as client:
        # Loads the script before the first reading.
        index.announce([Announcement(namespace, chunks[0], 1)])
        index.announce([Announcement(namespace, chunks[0], 0)])
        before = settled_bytes(client)
        for at in range(0, NUM_CHUNKS, 1000):
            index.announce([Announcement(namespace, key, bitmap) for key in chunks[at : at + 1000]])
        used = (settled_bytes(client) - before) / NUM_CHUNKS
        assert client.dbsize() == NUM_CHUNKS + 5
        key = next(client.scan_iter(match=prefix + "{*"))
        alone = client.memory_usage(key)
        assert client.ttl(key) > 3500
    index.close()
    print(f"{prefix} {used:.1f} B a chunk, MEMORY USAGE {alone} B")
    assert used <= limit
    assert alone <= MAX_BYTES_PER_CHUNK
