"""What the stand-in does with the cache, in the modes that have one: it stores and reads chunks of nothing.

Real sessions with the agent of its node, by the client that the payload brings; so the agent counts what moves, and the
operator sees it. No model and no connector: a chunk's key is a digest of tokens and salt, its content zeros.
The rest of what the client imports comes from where vLLM is shown to containers, behind everything of the image.
"""

import hashlib
import json
import sys
from pathlib import Path

sys.path.append("/srv/site-packages")

from cacheservice.client import (
    AgentTarget,
    CacheClient,
    ClientIdentity,
    DataPlane,
    Half,
    MemorySink,
    MemorySource,
    Role,
    ShardRead,
    ShardWrite,
    session,
)
from cacheservice.core.layout import GroupShape, build_namespace
from cacheservice.core.outcomes import Presence, Reason

TOKENS_PER_CHUNK = 16
SHARD_BYTES = 4096


class Chunks:
    """One engine's side of the cache, in the role that the operator's --kv-transfer-config gives."""

    def __init__(
        self, transfer_config: str, *, data_plane: DataPlane, protocol: int | None, dtype: str
    ) -> None:
        """Stand-ins of one `dtype` with chunks of one size have one namespace. `protocol`: None is ours, else one of
        another time.
        """
        if protocol is not None:
            # As every connector it speaks the one before, too.
            session.PROTOCOL_VERSION, session.OLDEST_PROTOCOL_VERSION = protocol, protocol - 1
        told = json.loads(transfer_config)["kv_connector_extra_config"]
        self.role = Role[told["role"].upper()]
        self._tokens_per_chunk = told.get("tokens_per_chunk", TOKENS_PER_CHUNK)
        self._space = build_namespace(
            {"model": "stand-in", "dtype": dtype},
            tokens_per_chunk=self._tokens_per_chunk,
            groups=[GroupShape("full", num_shards=1, shard_bytes=SHARD_BYTES)],
        )
        self._client = CacheClient(
            AgentTarget(socket_dir=Path(told["socket_dir"])),
            ClientIdentity(self.role, Half.WORKER, engine_name=told["engine_name"]),
            data_plane=data_plane,
        )
        self._client.open_namespace(self._space)
        self._client.start()

    def is_connected(self) -> bool:
        """Whether the agent has taken the session."""
        return self._client.state().connected

    def serve(self, tokens: list[int], salt: str, *, is_reading: bool) -> int:
        """Store all whole chunks of a prompt, or, to decode, read those that are there; how many that were.

        Without `is_reading` decode only looks them up.
        """
        keys = [
            hashlib.sha256(repr((salt, tokens[:end])).encode()).digest()
            for end in range(self._tokens_per_chunk, len(tokens) + 1, self._tokens_per_chunk)
        ]
        if self.role is not Role.DECODE:
            return self._store(keys)
        return self._read(keys, is_reading=is_reading)

    def _store(self, keys: list[bytes]) -> int:
        source = MemorySource(bytes(SHARD_BYTES))
        stored = self._client.store(
            self._space.digest,
            [
                ShardWrite(key, keys[at - 1] if at else None, at, 0, 0, SHARD_BYTES, source)
                for at, key in enumerate(keys)
            ],
        )
        return sum(one.reason is Reason.HIT for one in stored)

    def _read(self, keys: list[bytes], *, is_reading: bool) -> int:
        found = self._client.lookup(self._space.digest, keys)
        there = [
            key
            for at, key in enumerate(keys)
            if found.presence and found.of(at, 0) is Presence.READY_HERE
        ]
        read = self._client.retrieve(
            self._space.digest,
            [
                ShardRead(
                    key, 0, 0, SHARD_BYTES, 0, SHARD_BYTES, MemorySink(bytearray(SHARD_BYTES))
                )
                for key in there
                if is_reading
            ],
            lookup_lease=found.lease_id,
        )
        self._client.release(found.lease_id)
        return sum(one.reason is Reason.HIT for one in read)
