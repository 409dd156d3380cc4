"""The client under other versions of protobuf and grpcio than the agent's: run as a program by test_wire_oldest.py.

    wire_oldest_client.py SOCKET_DIR DATA_PLANE

Hello, lookup, store, lookup and load of one chunk over the agent's socket; says in JSON what each gave, and with what.
It imports the client alone, as an engine does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import google.protobuf
import grpc

from cacheservice.client import (
    AgentTarget,
    CacheClient,
    ClientIdentity,
    MemorySink,
    MemorySource,
    Role,
    ShardRead,
    ShardWrite,
)
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupShape, build_namespace
from cacheservice.core.outcomes import Presence

SHARD_BYTES = 3 * 1024 * 1024 + 999
SPEC = build_namespace(
    {"name": "oldest"}, tokens_per_chunk=256, groups=[GroupShape("full", 1, SHARD_BYTES)]
)


def main() -> None:
    """See the module."""
    socket_dir, data_plane = sys.argv[1:]
    client = CacheClient(
        AgentTarget(socket_dir=Path(socket_dir)),
        ClientIdentity(Role.TOOL),
        data_plane=data_plane,  # type: ignore[arg-type]
    )
    client.open_namespace(SPEC)
    client.start()
    assert client.wait_connected(30), client.state().message
    key = ChunkKey(data_plane.encode().ljust(32, b"k"))
    written = bytes(index * 7 % 251 for index in range(SHARD_BYTES))
    read = bytearray(SHARD_BYTES)
    before = client.lookup(SPEC.digest, [key], deadline_s=30)
    (stored,) = client.store(
        SPEC.digest,
        [ShardWrite(key, None, 0, 0, 0, SHARD_BYTES, MemorySource(bytearray(written)))],
        deadline_s=60,
    )
    after = client.lookup(SPEC.digest, [key], deadline_s=30)
    (loaded,) = client.retrieve(
        SPEC.digest,
        [ShardRead(key, 0, 0, SHARD_BYTES, 0, SHARD_BYTES, MemorySink(read))],
        deadline_s=60,
    )
    said = {
        "protobuf": google.protobuf.__version__,
        "grpcio": grpc.__version__,
        "before": [Presence(byte).name for byte in before.presence],
        "stored": stored.reason.label,
        "after": [Presence(byte).name for byte in after.presence],
        "loaded": loaded.reason.label,
        "equal": bytes(read) == written,
    }
    client.close()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
