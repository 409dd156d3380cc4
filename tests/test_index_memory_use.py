"""What the index costs in Redis: at most 200 bytes of its memory per chunk, hash tables included, whatever the key
prefix."""

from __future__ import annotations

import os
from collections.abc import Iterator

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
    """Bytes in use when hash tables and the buffers of closed connections have stopped changing."""
    seen: list[int] = []

    def has_settled() -> bool:
        stats = client.memory_stats()
        seen.append(int(stats["total.allocated"]))
        is_alone = client.info("clients")["connected_clients"] == 1
        return is_alone and len(seen) > 100 and len(set(seen[-100:])) == 1

    poll(has_settled)
    return seen[-1]


def announce(server: RedisServer, prefix: str, announcements: list[Announcement]) -> None:
    """As one agent that then goes away."""
    index = build_index(server.url, key_prefix=prefix, write_timeout_s=10)
    index.join(name="a", address="10.0.0.1:7000", epoch=2**32 - 1)
    index.announce(announcements)
    index.close()


@pytest.mark.parametrize("prefix", ["larder:", "larder:0a1b2c3d:"])
def test_a_chunk_with_one_holder_costs_at_most_200_bytes(server: RedisServer, prefix: str) -> None:
    # Debian's jemalloc has no sizes between 64 and 80 or between 32 and 48 bytes: a key with the long prefix takes 80,
    # and more than 3 bitmap bytes take 48. The target is of the builds that Redis publishes and of the wheel's.
    is_bundled = server.binary == redis_server_binary()
    bitmap = 2**64 - 1 if is_bundled else 2**24 - 1
    limit = MAX_BYTES_PER_CHUNK if is_bundled or prefix == "larder:" else 208
    namespace = NamespaceDigest(os.urandom(32))
    chunks = [ChunkKey(os.urandom(32)) for _ in range(NUM_CHUNKS)]
    with server.client() as client:
        # Loads the scripts and makes the node's keys before the first reading.
        announce(server, prefix, [Announcement(namespace, chunks[0], 0)])
        before = settled_bytes(client)
        announce(server, prefix, [Announcement(namespace, key, bitmap) for key in chunks])
        used = (settled_bytes(client) - before) / NUM_CHUNKS
        assert NUM_CHUNKS <= client.dbsize() <= NUM_CHUNKS + 5
        key = next(client.scan_iter(match=prefix + "{*"))
        alone = client.memory_usage(key)
        assert client.ttl(key) > 3500
    print(f"{prefix} {used:.1f} B a chunk, MEMORY USAGE {alone} B")
    assert used <= limit
    assert alone <= MAX_BYTES_PER_CHUNK
