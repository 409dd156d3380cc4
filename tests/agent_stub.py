"""A bare client for tests of the agent itself: generated stubs and one session, no client code in between."""

from __future__ import annotations

import hashlib
import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import xxhash

from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import CHECKSUM_PIECE_BYTES, NamespaceSpec
from cacheservice.core.protocol import PROTOCOL_VERSION
from cacheservice.v1 import admin_pb2_grpc, cache_pb2, cache_pb2_grpc


class StubSession:
    """A session with the agent, and its stubs. Not thread-safe."""

    def __init__(
        self,
        target: str,
        *,
        role: int = cache_pb2.CLIENT_ROLE_TOOL,
        maps_arena: bool = False,
        name: str = "stub",
        rank: int = 0,
        protocol: int = PROTOCOL_VERSION,
        options: Sequence[tuple[str, Any]] = (),
    ) -> None:
        self.channel = grpc.insecure_channel(
            target, options=[("grpc.use_local_subchannel_pool", 1), *options]
        )
        self.cache: Any = cache_pb2_grpc.CacheServiceStub(self.channel)
        self.admin: Any = admin_pb2_grpc.AdminServiceStub(self.channel)
        self._requests: queue.SimpleQueue[cache_pb2.SessionRequest | None] = queue.SimpleQueue()
        hello = cache_pb2.SessionHello(
            protocol_version=protocol, role=role, engine_name=name, host="test", rank=rank,
            maps_arena=maps_arena, vllm_version="0.11", larder_version="9.9",
        )  # fmt: skip
        self._requests.put(cache_pb2.SessionRequest(hello=hello))
        self.stream: Any = self.cache.Session(iter(self._requests.get, None), timeout=120)
        self.welcome: cache_pb2.SessionWelcome = next(self.stream).welcome
        self.token = self.welcome.session_token

    def ping(self, *outcomes: cache_pb2.Outcome) -> cache_pb2.SessionPong:
        """Ping and wait for the pong."""
        self._requests.put(cache_pb2.SessionRequest(ping=cache_pb2.SessionPing(outcomes=outcomes)))
        pong: cache_pb2.SessionPong = next(self.stream).pong
        return pong

    def open(self, spec: NamespaceSpec) -> None:
        """Open a namespace."""
        self.cache.OpenNamespace(open_request(spec, self.token), timeout=5)

    def reserve(self, spec: NamespaceSpec, *shards: tuple[ChunkKey, int, int]) -> Any:
        """Reserve shards, as chunks of no chain; the answered shards."""
        items = [
            cache_pb2.ReserveItem(
                shard=cache_pb2.ShardRef(chunk_key=k, group=g, shard=s),
                size_bytes=spec.groups[g].shard_bytes,
            )
            for k, g, s in shards
        ]
        request = cache_pb2.ReserveRequest(
            session_token=self.token, namespace_digest=spec.digest, items=items
        )
        return self.cache.Reserve(request, timeout=5).shards

    def write(self, reservation_id: int, content: bytes, *, frame_bytes: int = 2**20) -> int:
        """Write a shard by stream; the bytes that the agent took."""
        frames = (
            cache_pb2.WriteRequest(
                session_token=self.token, reservation_id=reservation_id, start=start,
                payload=content[start : start + frame_bytes],
            )
            for start in range(0, len(content), frame_bytes)
        )  # fmt: skip
        num_bytes: int = self.cache.Write(frames, timeout=20).num_bytes
        return num_bytes

    def commit(self, *items: tuple[int, Sequence[int]]) -> list[int]:
        """Commit reservations with their checksums."""
        request = cache_pb2.CommitRequest(
            session_token=self.token,
            items=[cache_pb2.CommitItem(reservation_id=i, piece_checksums=c) for i, c in items],
        )
        return list(self.cache.Commit(request, timeout=5).results)

    def store(
        self, spec: NamespaceSpec, key: ChunkKey, content: bytes, group: int = 0, shard: int = 0
    ) -> int:
        """Reserve, write, commit one shard; the commit's result."""
        (reserved,) = self.reserve(spec, (key, group, shard))
        assert reserved.result == cache_pb2.RESERVE_RESULT_RESERVED
        self.write(reserved.reservation_id, content)
        return self.commit((reserved.reservation_id, checksums(content)))[0]

    def lookup(
        self, spec: NamespaceSpec, keys: Sequence[ChunkKey], **fields: Any
    ) -> cache_pb2.LookupResponse:
        """Look chunks up."""
        request = cache_pb2.LookupRequest(
            session_token=self.token, namespace_digest=spec.digest, chunk_keys=keys, **fields
        )
        answer: cache_pb2.LookupResponse = self.cache.Lookup(request, timeout=10)
        return answer

    def acquire(
        self, spec: NamespaceSpec, *shards: tuple[ChunkKey, int, int], deadline_ms: int = 0
    ) -> tuple[int, dict[int, cache_pb2.AcquiredShard]]:
        """Acquire shards: the lease, and the answers by position."""
        answers = list(
            self.cache.Acquire(
                self.acquire_request(spec, *shards, deadline_ms=deadline_ms), timeout=70
            )
        )
        found = {s.position: s for a in answers for s in a.shards}
        return answers[0].lease_id, found

    def acquire_request(
        self, spec: NamespaceSpec, *shards: tuple[ChunkKey, int, int], deadline_ms: int = 0
    ) -> cache_pb2.AcquireRequest:
        """The request of `acquire`."""
        return cache_pb2.AcquireRequest(
            session_token=self.token, namespace_digest=spec.digest, deadline_ms=deadline_ms,
            shards=[cache_pb2.ShardRef(chunk_key=k, group=g, shard=s) for k, g, s in shards],
        )  # fmt: skip

    def read(self, lease_id: int, length: int, position: int = 0) -> bytes:
        """Read one leased shard by stream."""
        request = cache_pb2.ReadRequest(
            session_token=self.token, lease_id=lease_id,
            ranges=[cache_pb2.ShardRange(position=position, start=0, stop=length)],
        )  # fmt: skip
        return b"".join(frame.payload for frame in self.cache.Read(request, timeout=20))

    def release(self, *lease_ids: int, unread: Sequence[int] = ()) -> list[bool]:
        """Give leases back."""
        request = cache_pb2.ReleaseRequest(
            session_token=self.token, lease_ids=lease_ids, unread_lease_ids=unread
        )
        return list(self.cache.Release(request, timeout=5).held)

    def close(self) -> None:
        """End session and channel."""
        self._requests.put(None)
        self.stream.cancel()
        self.channel.close()


@contextmanager
def stub_session(target: str, **fields: Any) -> Iterator[StubSession]:
    """A session that ends with the block."""
    session = StubSession(target, **fields)
    try:
        yield session
    finally:
        session.close()


def open_request(spec: NamespaceSpec, token: bytes) -> cache_pb2.OpenNamespaceRequest:
    """The request that opens `spec`."""
    return cache_pb2.OpenNamespaceRequest(
        session_token=token, namespace_digest=spec.digest, description=spec.description,
        tokens_per_chunk=spec.tokens_per_chunk,
        groups=[
            cache_pb2.GroupShape(kind=g.kind, num_shards=g.num_shards, shard_bytes=g.shard_bytes)
            for g in spec.groups
        ],
    )  # fmt: skip


def key_of(*words: object) -> ChunkKey:
    """A chunk key that is a function of what is given."""
    return ChunkKey(hashlib.sha256(repr(words).encode()).digest())


def bytes_of(size: int, *words: object) -> bytes:
    """Content that is a function of what is given."""
    seed = hashlib.sha256(repr(words).encode()).digest()
    return (seed * (size // len(seed) + 1))[:size]


def checksums(content: bytes) -> list[int]:
    """xxh3-64 per piece."""
    return [
        xxhash.xxh3_64_intdigest(content[start : start + CHECKSUM_PIECE_BYTES])
        for start in range(0, len(content), CHECKSUM_PIECE_BYTES)
    ]


def status_of(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Code and details."""
    return error.code(), error.details() or ""
