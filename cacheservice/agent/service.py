# ruff: noqa: ARG002, N802 - names and arguments are those of the generated base class
"""The service that engines and other agents call: checks messages, asks the parts, builds answers.

No rule of the cache is decided here. Every method raises leaves of `RequestRejected` (see `statuses.py`), and checks
what came before it takes memory for it. Threads: called from the server's pool, any number at once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from cacheservice import __version__
from cacheservice.agent.acquire import Acquires, Answered
from cacheservice.agent.byte_streams import ByteStreams
from cacheservice.agent.frames import split_lookup
from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.lookups import Lookups, Wait
from cacheservice.agent.messages import (
    MAX_CORRUPT,
    MAX_KEYS,
    MAX_LEASES,
    MAX_SHARDS,
    ROLE_NUMBERS,
    check_count,
    check_distinct,
    check_range,
    parse_digest,
    parse_hello,
    parse_keys,
    parse_namespace,
    parse_outcomes,
    parse_shard,
)
from cacheservice.agent.sessions import Hello, SessionRegistry, StreamedRead
from cacheservice.agent.sessions import Session as LiveSession
from cacheservice.core.keys import DIGEST_BYTES, ChunkKey
from cacheservice.core.layout import CHECKSUM_PIECE_BYTES, NamespaceSpec
from cacheservice.core.protocol import PROTOCOL_VERSION
from cacheservice.core.store import (
    CommitItem,
    CommitResult,
    ReserveAnswer,
    ReserveRequestItem,
    ReserveResult,
    Store,
)
from cacheservice.errors import (
    InvalidRequest,
    NotReady,
    NotServed,
    RequestRejected,
    UnknownObject,
)
from cacheservice.v1 import cache_pb2, cache_pb2_grpc

_log = logging.getLogger(__name__)

RAW_REQUESTS = frozenset(
    {"/cacheservice.v1.CacheService/Write", "/cacheservice.v1.CacheService/Lookup"}
)
"""Methods that parse their requests themselves, because protobuf would copy each byte twice more, or is slow with many
keys."""
RAW_RESPONSES = frozenset({"/cacheservice.v1.CacheService/Read"})
"""Methods that serialize their responses themselves."""
SHARDS_AT_ONCE = 1024
"""Shards reserved in one hold of the core lock: some 10 ms when each of them evicts."""
MAX_WAIT_MS = 5000
MAX_ACQUIRE_MS = 60_000

Context = grpc.ServicerContext


@dataclass(frozen=True, slots=True)
class AgentFacts:
    """What the service says of its agent; times in milliseconds."""

    node_name: str
    epoch: int
    arena_bytes: int
    lease_ttl_ms: int
    lookup_lease_ttl_ms: int
    reservation_ttl_ms: int
    node_number: Callable[[], int]
    is_draining: Callable[[], bool]


@dataclass(frozen=True, slots=True)
class ServiceParts:
    """What the service delegates to."""

    guarded: GuardedStore
    registry: SessionRegistry
    lookups: Lookups
    acquires: Acquires
    byte_streams: ByteStreams
    status: Callable[[], cache_pb2.GetStatusResponse]


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """`cacheservice.v1.CacheService`. Thread-safe; holds no state of calls."""

    def __init__(self, facts: AgentFacts, parts: ServiceParts) -> None:
        self._facts = facts
        self._guarded = parts.guarded
        self._registry = parts.registry
        self._lookups = parts.lookups
        self._acquires = parts.acquires
        self._byte_streams = parts.byte_streams
        self._status = parts.status

    def Session(
        self, request_iterator: Iterator[cache_pb2.SessionRequest], context: Context
    ) -> Iterator[cache_pb2.SessionResponse]:
        """One client, from hello to the end of its stream."""
        number = self._registry.expect_hello(context.cancel)
        try:
            first = next(request_iterator, None)
            if first is None or first.WhichOneof("message") != "hello":
                raise InvalidRequest("the first message of a session must be its hello")
            session = self._registry.begin(number, self._introduce(first.hello), context.cancel)
        finally:
            self._registry.forget_stream(number)
        hello = session.hello
        where = "tcp" if is_tcp(context) else "unix"
        _log.info(
            "session began id=%d role=%s half=%s engine=%s rank=%d over=%s maps_arena=%s",
            session.id, hello.role, hello.half or "-", hello.engine_name, hello.rank, where, hello.maps_arena,
        )  # fmt: skip
        try:
            # gRPC may learn that the client is gone while this thread sleeps elsewhere.
            context.add_callback(lambda: self._end(session, "stream closed"))
            yield cache_pb2.SessionResponse(welcome=self._welcome(session, over_tcp=where == "tcp"))
            for request in request_iterator:
                if request.WhichOneof("message") != "ping":
                    raise InvalidRequest("after the hello a session sends pings only")
                self._registry.note_ping(
                    session, parse_outcomes(request.ping), request.ping.num_dropped_outcomes
                )
                yield cache_pb2.SessionResponse(
                    pong=cache_pb2.SessionPong(
                        draining=self._facts.is_draining(), node_number=self._facts.node_number()
                    )
                )
        finally:
            self._end(session, "stream closed")

    def OpenNamespace(
        self, request: cache_pb2.OpenNamespaceRequest, context: Context
    ) -> cache_pb2.OpenNamespaceResponse:
        """Declare a namespace."""
        session = self._registry.live(request.session_token)
        spec = parse_namespace(request)
        with self._guarded.changing() as store:
            store.open_namespace(spec)
        session.namespace = spec.digest
        return cache_pb2.OpenNamespaceResponse(epoch=self._facts.epoch)

    def Lookup(
        self,
        request: bytes,  # type: ignore[override] # not parsed yet, see RAW_REQUESTS
        context: Context,
    ) -> cache_pb2.LookupResponse:
        """Say what is there."""
        return self._look_up(*split_lookup(request), context)

    def _look_up(
        self, request: cache_pb2.LookupRequest, chunks: list[ChunkKey], context: Context
    ) -> cache_pb2.LookupResponse:
        session = self._registry.live(request.session_token)
        if request.chunk_keys:
            check_count("chunk_keys", len(chunks) + len(request.chunk_keys), MAX_KEYS)
            chunks = parse_keys([*chunks, *request.chunk_keys])
        check_range("wait_num_chunks", request.wait_num_chunks, len(chunks))
        check_range("wait_ms", request.wait_ms, MAX_WAIT_MS)
        namespace = parse_digest(request.namespace_digest)
        wait = None
        if request.wait in (cache_pb2.LOOKUP_WAIT_PENDING, cache_pb2.LOOKUP_WAIT_HAND_OVER):
            wait = Wait(
                num_chunks=request.wait_num_chunks, seconds=request.wait_ms / 1000,
                is_hand_over=request.wait == cache_pb2.LOOKUP_WAIT_HAND_OVER,
                owner_node=request.owner_node, owner_epoch=request.owner_epoch,
            )  # fmt: skip
        result = self._lookups.look_up(
            session, namespace, chunks, takes_lease=request.take_lease,
            superseded_lease=request.superseded_lease_id, wait=wait, is_active=context.is_active,
        )  # fmt: skip
        return cache_pb2.LookupResponse(
            presence=result.presence, lease_id=result.lease_id,
            lease_ttl_ms=self._facts.lookup_lease_ttl_ms if result.lease_id else 0,
            epoch=self._facts.epoch, index_asked=result.index_asked,
        )  # fmt: skip

    def Acquire(
        self, request: cache_pb2.AcquireRequest, context: Context
    ) -> Iterator[cache_pb2.AcquireResponse]:
        """Lease shards and say where they lie, as they become ready."""
        session = self._registry.live(request.session_token)
        check_count("shards", len(request.shards), MAX_SHARDS, least=1)
        check_range("deadline_ms", request.deadline_ms, MAX_ACQUIRE_MS)
        spec = self._spec(request.namespace_digest)
        shards = [parse_shard(s, spec, where=f"shards[{i}]") for i, s in enumerate(request.shards)]
        # A caller that goes away must not leave its lease until the next look.
        context.add_callback(self._guarded.wake)
        answers = self._acquires.acquire(
            session, spec, shards, wait_s=request.deadline_ms / 1000, is_active=context.is_active
        )
        for answer in answers:
            if not session.hello.maps_arena:
                for position, ready in answer.ready:
                    read = StreamedRead(spec.digest, shards[position][0], ready.checksums)
                    session.note_read(answer.lease_id, position, read)
            yield self._acquire_response(answer, for_peer=session.hello.role == "peer")

    def Release(
        self, request: cache_pb2.ReleaseRequest, context: Context
    ) -> cache_pb2.ReleaseResponse:
        """Give leases back."""
        session = self._registry.live(request.session_token)
        check_count("lease_ids", len(request.lease_ids), MAX_LEASES)
        check_distinct("lease_ids", request.lease_ids, len(request.lease_ids))
        check_count("corrupt", len(request.corrupt), MAX_CORRUPT)
        check_count("unread_lease_ids", len(request.unread_lease_ids), MAX_LEASES)
        given_back = set(request.lease_ids)
        for number, report in enumerate(request.corrupt):
            if report.lease_id not in given_back:
                raise InvalidRequest(
                    f"corrupt[{number}].lease_id is {report.lease_id}, which lease_ids does not name"
                )
        # Before the release: the bytes stay in place only as long as the lease.
        self._byte_streams.look_again(session, [(r.lease_id, r.position) for r in request.corrupt])
        # One rank stands for its engine: all of them read each chunk, perhaps other shards of it.
        read = given_back.difference(request.unread_lease_ids) if session.hello.rank == 0 else ()
        with self._guarded.changing() as store:
            held = store.release(
                session.id, list(request.lease_ids), self._guarded.clock(), read=read
            )
            for lease_id in request.lease_ids:
                session.reads.pop(lease_id, None)
        return cache_pb2.ReleaseResponse(held=held)

    def Reserve(
        self, request: cache_pb2.ReserveRequest, context: Context
    ) -> cache_pb2.ReserveResponse:
        """Give room for shards."""
        session = self._registry.live(request.session_token)
        if self._facts.is_draining():
            raise NotReady("the agent drains and takes nothing new; store again when it is back")
        check_count("items", len(request.items), MAX_SHARDS)
        spec = self._spec(request.namespace_digest)
        items = [
            self._reserve_item(item, spec, f"items[{i}]") for i, item in enumerate(request.items)
        ]
        answers: list[ReserveAnswer] = []
        for start in range(0, len(items), SHARDS_AT_ONCE):
            # All are checked by now, so what fails midway is a session that ended, and all it reserved with it.
            part = items[start : start + SHARDS_AT_ONCE]
            with self._guarded.changing() as store:
                answers += store.reserve(session.id, spec.digest, part, self._guarded.clock())
        if not context.is_active():
            # The caller gave up while it waited for the lock: it will never learn these numbers.
            self._withdraw(session, answers)
        response = cache_pb2.ReserveResponse(
            ttl_ms=self._facts.reservation_ttl_ms, epoch=self._facts.epoch
        )
        for answer in answers:
            shard = response.shards.add(result=_RESERVE_RESULTS[answer.result])
            if answer.result is ReserveResult.RESERVED:
                shard.reservation_id = answer.reservation_id
                shard.extent.offset = answer.offset
                shard.extent.length = answer.length
        return response

    def Commit(
        self, request: cache_pb2.CommitRequest, context: Context
    ) -> cache_pb2.CommitResponse:
        """Make reserved shards readable."""
        session = self._registry.live(request.session_token)
        check_count("items", len(request.items), MAX_SHARDS)
        check_distinct("items", (i.reservation_id for i in request.items), len(request.items))
        is_remote = is_tcp(context)
        items = [
            CommitItem(i.reservation_id, tuple(i.piece_checksums), is_remote=is_remote)
            for i in request.items
        ]
        with self._guarded.changing() as store:
            results = self._commit(store, session, items)
        return cache_pb2.CommitResponse(results=[_COMMIT_RESULTS[result] for result in results])

    def Abort(self, request: cache_pb2.AbortRequest, context: Context) -> cache_pb2.AbortResponse:
        """End reservations."""
        session = self._registry.live(request.session_token)
        check_count("reservation_ids", len(request.reservation_ids), MAX_SHARDS)
        check_distinct("reservation_ids", request.reservation_ids, len(request.reservation_ids))
        with self._guarded.changing() as store:
            store.abort(session.id, list(request.reservation_ids), self._guarded.clock())
            for reservation_id in request.reservation_ids:
                session.streamed.pop(reservation_id, None)
        return cache_pb2.AbortResponse()

    def Read(self, request: cache_pb2.ReadRequest, context: Context) -> Iterator[bytes]:  # type: ignore[override] # serialized already, see RAW_RESPONSES
        """Send leased bytes."""
        session = self._registry.live(request.session_token)
        check_count("ranges", len(request.ranges), MAX_SHARDS)
        ranges = [(r.position, r.start, r.stop) for r in request.ranges]
        return self._byte_streams.read(session, request.lease_id, ranges)

    def Write(
        self,
        request_iterator: Iterator[bytes],  # type: ignore[override] # not parsed yet, see RAW_REQUESTS
        context: Context,
    ) -> cache_pb2.WriteResponse:
        """Take bytes into reserved extents."""
        return cache_pb2.WriteResponse(num_bytes=self._byte_streams.write(request_iterator))

    def ReserveTails(self, request: Any, context: Context) -> Any:
        """Not in this version."""
        raise NotServed("tails are not served in this version; store whole chunks with Reserve")

    def AcquireTails(self, request: Any, context: Context) -> Any:
        """Not in this version."""
        raise NotServed("tails are not served in this version; read whole chunks with Acquire")

    def GetStatus(
        self, request: cache_pb2.GetStatusRequest, context: Context
    ) -> cache_pb2.GetStatusResponse:
        """Describe the agent."""
        return self._status()

    def _spec(self, digest: bytes) -> NamespaceSpec:
        with self._guarded.reading() as store:
            return store.namespace(parse_digest(digest))

    def _introduce(self, hello: cache_pb2.SessionHello) -> Hello:
        try:
            return parse_hello(hello)
        except RequestRejected as error:
            self._registry.note_refused(f"engine {hello.engine_name or '(no name)'}", str(error))
            raise

    def _end(self, session: LiveSession, why: str) -> None:
        if self._registry.end(session):
            _log.info(
                "session ended id=%d engine=%s why=%s", session.id, session.hello.engine_name, why
            )

    def _welcome(self, session: LiveSession, *, over_tcp: bool) -> cache_pb2.SessionWelcome:
        return cache_pb2.SessionWelcome(
            session_token=session.token, epoch=self._facts.epoch, node_name=self._facts.node_name,
            node_number=self._facts.node_number(), arena_bytes=self._facts.arena_bytes,
            arena_offered=not over_tcp, checksum_piece_bytes=CHECKSUM_PIECE_BYTES,
            ping_interval_ms=self._registry.ping_interval_ms,
            protocol_version=min(session.hello.protocol, PROTOCOL_VERSION), larder_version=__version__,
        )  # fmt: skip

    def _acquire_response(self, answer: Answered, *, for_peer: bool) -> cache_pb2.AcquireResponse:
        response = cache_pb2.AcquireResponse(
            lease_id=answer.lease_id, lease_ttl_ms=self._facts.lease_ttl_ms, epoch=self._facts.epoch
        )
        for position, ready in answer.ready:
            response.shards.add(
                position=position, result=cache_pb2.ACQUIRE_RESULT_READY,
                extent=cache_pb2.Extent(offset=ready.offset, length=ready.length),
                piece_checksums=ready.checksums, is_remote=ready.is_remote,
                # Only who keeps a copy has use for it.
                writer_role=ROLE_NUMBERS.get(ready.writer_role, 0) if for_peer else 0,
            )  # fmt: skip
        for position, result in answer.failed:
            response.shards.add(position=position, result=result)
        return response

    def _reserve_item(
        self, item: cache_pb2.ReserveItem, spec: NamespaceSpec, where: str
    ) -> ReserveRequestItem:
        chunk, group, shard = parse_shard(item.shard, spec, where=f"{where}.shard")
        if item.size_bytes != spec.groups[group].shard_bytes:
            raise InvalidRequest(
                f"{where}.size_bytes is {item.size_bytes}; a shard of group {group} of this namespace has "
                f"{spec.groups[group].shard_bytes} bytes"
            )
        if item.parent_key and len(item.parent_key) != DIGEST_BYTES:
            raise InvalidRequest(
                f"{where}.parent_key has {len(item.parent_key)} bytes; it must have {DIGEST_BYTES}, or none for the "
                "first chunk"
            )
        parent = ChunkKey(item.parent_key) if item.parent_key else None
        return ReserveRequestItem(
            chunk=chunk, parent=parent, number=item.chunk_number, group=group, shard=shard,
            size_bytes=item.size_bytes,
        )  # fmt: skip

    def _withdraw(self, session: LiveSession, answers: Sequence[ReserveAnswer]) -> None:
        given = [a.reservation_id for a in answers if a.result is ReserveResult.RESERVED]
        try:
            with self._guarded.changing() as store:
                store.abort(session.id, given, self._guarded.clock())
        except RequestRejected:
            pass  # they ended with the session

    def _commit(
        self, store: Store, session: LiveSession, items: Sequence[CommitItem]
    ) -> list[CommitResult]:
        """Commit; bytes that came through Write are compared with what was hashed as they came.

        Bytes in shared memory are only their writer's to check. What does not match is committed as a copy in flight,
        so that the store ends it with CHECKSUM_MISMATCH in the same all-or-nothing step.
        """
        in_flight = []
        try:
            for item in items:
                if self._is_written(session, item):
                    continue
                try:
                    store.begin_agent_copy(session.id, item.reservation_id)
                except UnknownObject:
                    continue  # not there or out of time: the commit says so
                in_flight.append(item.reservation_id)
            results = store.commit(session.id, items, self._guarded.clock())
        finally:
            for reservation_id in in_flight:
                store.end_agent_copy(session.id, reservation_id)
        for item in items:
            session.streamed.pop(item.reservation_id, None)
        return results

    def _is_written(self, session: LiveSession, item: CommitItem) -> bool:
        streamed = session.streamed.get(item.reservation_id)
        if streamed is None:
            return session.hello.maps_arena
        return streamed.matches(item.checksums)


def is_tcp(context: Context) -> bool:
    """Whether a call came over TCP, so from another machine perhaps."""
    return not str(context.peer()).startswith("unix:")


_RESERVE_RESULTS = {
    ReserveResult.RESERVED: cache_pb2.RESERVE_RESULT_RESERVED,
    ReserveResult.READY: cache_pb2.RESERVE_RESULT_READY,
    ReserveResult.PENDING: cache_pb2.RESERVE_RESULT_PENDING,
    ReserveResult.NO_SPACE: cache_pb2.RESERVE_RESULT_NO_SPACE,
}
_COMMIT_RESULTS = {
    CommitResult.CHECKSUM_MISMATCH: cache_pb2.COMMIT_RESULT_CHECKSUM_MISMATCH,
    CommitResult.COMMITTED: cache_pb2.COMMIT_RESULT_COMMITTED,
    CommitResult.LOST_RACE: cache_pb2.COMMIT_RESULT_LOST_RACE,
    CommitResult.EXPIRED: cache_pb2.COMMIT_RESULT_EXPIRED,
}
