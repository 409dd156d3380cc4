# ruff: noqa: ARG002, N802 - names and arguments are those of the generated base class
"""What operators may ask and do. Who may call it is checked in `tls.py`, through the interceptor."""

from __future__ import annotations

import logging
from collections.abc import Callable

import grpc

from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.messages import (
    HALF_NUMBERS,
    ROLE_NUMBERS,
    parse_digest,
    parse_keys,
)
from cacheservice.agent.sessions import Session, SessionRegistry
from cacheservice.errors import InvalidRequest, UnknownObject
from cacheservice.v1 import admin_pb2, admin_pb2_grpc, cache_pb2

_log = logging.getLogger(__name__)

Context = grpc.ServicerContext
_EVICTED_AT_ONCE = 1000
"""Chunks evicted in one hold of the core lock."""


class AdminServicer(admin_pb2_grpc.AdminServiceServicer):
    """`cacheservice.v1.AdminService`. Thread-safe; holds no state of calls."""

    def __init__(
        self, guarded: GuardedStore, registry: SessionRegistry, *, drain: Callable[[], None]
    ) -> None:
        self._guarded = guarded
        self._registry = registry
        self._drain = drain

    def ListNamespaces(
        self, request: admin_pb2.ListNamespacesRequest, context: Context
    ) -> admin_pb2.ListNamespacesResponse:
        """Open namespaces."""
        with self._guarded.reading() as store:
            found = store.list_namespaces()
        response = admin_pb2.ListNamespacesResponse()
        for summary in found:
            response.namespaces.add(
                namespace_digest=summary.spec.digest, description=summary.spec.description,
                num_chunks=summary.num_chunks, num_bytes=summary.num_bytes,
                tokens_per_chunk=summary.spec.tokens_per_chunk,
                groups=[
                    cache_pb2.GroupShape(kind=g.kind, num_shards=g.num_shards, shard_bytes=g.shard_bytes)
                    for g in summary.spec.groups
                ],
            )  # fmt: skip
        return response

    def ListEngines(
        self, request: admin_pb2.ListEnginesRequest, context: Context
    ) -> admin_pb2.ListEnginesResponse:
        """Live sessions."""
        sessions = self._registry.sessions()
        now_s = self._guarded.clock()
        holdings: dict[int, tuple[int, int]] = {}
        with self._guarded.reading() as store:
            for session in sessions:
                if self._registry.is_live(session):
                    holdings[session.id] = store.session_holdings(session.id)
        return admin_pb2.ListEnginesResponse(
            engines=[_engine(s, holdings[s.id], now_s) for s in sessions if s.id in holdings]
        )

    def ListShards(
        self, request: admin_pb2.ListShardsRequest, context: Context
    ) -> admin_pb2.ListShardsResponse:
        """Shards of one chunk."""
        digest = parse_digest(request.namespace_digest)
        (chunk,) = parse_keys([request.chunk_key], field="chunk_key")
        with self._guarded.reading() as store:
            found = store.list_shards(digest, chunk)
        response = admin_pb2.ListShardsResponse()
        for shard in found:
            response.shards.add(
                group=shard.group, shard=shard.shard,
                state=admin_pb2.SHARD_STATE_READY if shard.is_ready else admin_pb2.SHARD_STATE_PENDING,
                extent=cache_pb2.Extent(offset=shard.offset, length=shard.length),
                num_leases=shard.num_leases, writer_name=shard.writer_name,
                writer_role=ROLE_NUMBERS.get(shard.writer_role, 0),
            )  # fmt: skip
        return response

    def Evict(self, request: admin_pb2.EvictRequest, context: Context) -> admin_pb2.EvictResponse:
        """Evict what no lease holds."""
        digest = parse_digest(request.namespace_digest) if request.namespace_digest else None
        chunks = parse_keys(request.chunk_keys)
        if chunks and digest is None:
            raise InvalidRequest(
                "chunk_keys need their namespace_digest; give it, or leave the keys out to evict all"
            )
        if digest is not None and chunks:
            named = [(digest, chunks)]
        else:
            with self._guarded.reading() as store:
                # What was stored last goes first: mostly the suffixes.
                named = [(ns, keys[::-1]) for ns, keys in store.chunk_keys(digest)]
        num_chunks = num_bytes = num_leased = 0
        for ns, keys in named:
            for start in range(0, len(keys), _EVICTED_AT_ONCE):
                with self._guarded.changing() as store:
                    try:
                        answer = store.evict(ns, keys[start : start + _EVICTED_AT_ONCE])
                    except UnknownObject:
                        if chunks:
                            raise
                        break  # closed meanwhile, as nothing was left in it
                num_chunks += answer.num_chunks
                num_bytes += answer.num_bytes
                num_leased += answer.num_leased
        _log.info(
            "evicted by request num_chunks=%d num_bytes=%d num_leased=%d",
            num_chunks, num_bytes, num_leased,
        )  # fmt: skip
        return admin_pb2.EvictResponse(
            num_chunks=num_chunks, num_bytes=num_bytes, num_leased=num_leased
        )

    def Drain(self, request: admin_pb2.DrainRequest, context: Context) -> admin_pb2.DrainResponse:
        """Start to drain."""
        self._drain()
        return admin_pb2.DrainResponse()


def _engine(session: Session, holdings: tuple[int, int], now_s: float) -> admin_pb2.EngineSummary:
    hello = session.hello
    return admin_pb2.EngineSummary(
        hello=cache_pb2.SessionHello(
            protocol_version=hello.protocol, role=ROLE_NUMBERS[hello.role],  # type: ignore[arg-type]
            half=HALF_NUMBERS[hello.half],  # type: ignore[arg-type]
            engine_name=hello.engine_name, host=hello.host, rank=hello.rank, vllm_version=hello.vllm_version,
            larder_version=hello.larder_version, maps_arena=hello.maps_arena,
        ),
        uptime_s=int(now_s - session.started_s), data_plane=session.data_plane,
        num_leases=holdings[0], num_reservations=holdings[1],
        outcomes=[cache_pb2.Counter(name=n, value=v) for n, v in sorted(session.outcomes.copy().items())],
        asked_tokens=session.asked_tokens, hit_tokens=session.hit_tokens,
    )  # fmt: skip
