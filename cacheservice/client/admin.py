"""Asks an agent about itself and changes what it holds: for the command line, status pages and tests.

Needs no session. Unlike `CacheClient` this raises, because a person waits for the answer: AgentUnavailable when nobody
answers, AgentRejected when the agent refuses; both messages name the agent and the cause.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import grpc

from cacheservice.client.channel import open_channel
from cacheservice.client.values import AgentTarget
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.errors import AgentRejected, AgentUnavailable
from cacheservice.v1 import admin_pb2, admin_pb2_grpc, cache_pb2, cache_pb2_grpc

_NOBODY = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
)


class AgentAdmin:
    """Status and admin calls to one agent. Owns a channel from its making to `close`; thread-safe."""

    def __init__(self, target: AgentTarget, *, timeout_s: float = 5.0) -> None:
        """Connect with the first call. Each call ends within `timeout_s`. Raises ConfigError for unreadable TLS
        files."""
        self._target = target
        self._timeout_s = timeout_s
        self._channel = open_channel(target)
        self._cache: Any = cache_pb2_grpc.CacheServiceStub(self._channel)
        self._admin: Any = admin_pb2_grpc.AdminServiceStub(self._channel)

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Close."""
        self.close()

    def close(self) -> None:
        """Close the channel. Idempotent."""
        self._channel.close()

    def status(self) -> cache_pb2.GetStatusResponse:
        """What the agent holds, who is connected, how its index is."""
        answer: cache_pb2.GetStatusResponse = self._call(
            self._cache.GetStatus, cache_pb2.GetStatusRequest()
        )
        return answer

    def namespaces(self) -> Sequence[admin_pb2.NamespaceSummary]:
        """Opened namespaces, most recently used first."""
        answer = self._call(self._admin.ListNamespaces, admin_pb2.ListNamespacesRequest())
        return list(answer.namespaces)

    def engines(self) -> Sequence[admin_pb2.EngineSummary]:
        """Clients with a live session, oldest first."""
        answer = self._call(self._admin.ListEngines, admin_pb2.ListEnginesRequest())
        return list(answer.engines)

    def shards(
        self, namespace: NamespaceDigest, chunk: ChunkKey
    ) -> Sequence[admin_pb2.ShardSummary]:
        """Shards of one chunk, in every state."""
        request = admin_pb2.ListShardsRequest(namespace_digest=namespace, chunk_key=chunk)
        return list(self._call(self._admin.ListShards, request).shards)

    def evict(
        self, namespace: NamespaceDigest | None = None, chunks: Sequence[ChunkKey] = ()
    ) -> admin_pb2.EvictResponse:
        """Evict the chunks (at most 4096), all of the namespace when none is named, or everything."""
        request = admin_pb2.EvictRequest(namespace_digest=namespace or b"", chunk_keys=chunks)
        answer: admin_pb2.EvictResponse = self._call(self._admin.Evict, request)
        return answer

    def drain(self) -> None:
        """Let the agent take nothing new and leave the index."""
        self._call(self._admin.Drain, admin_pb2.DrainRequest())

    def _call(self, method: Any, request: object) -> Any:
        try:
            return method(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            kind = AgentUnavailable if error.code() in _NOBODY else AgentRejected
            raise kind(f"agent {self._target}: {error.code().name}: {error.details()}") from error
