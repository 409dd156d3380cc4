"""The synchronous client of a cache agent: look up, store, retrieve.

Invariants: no public method raises for what agent, network or index do, or for what the caller's sources and sinks
do; each ends within its deadline, give or take one span of a copy; a result HIT of `retrieve` means that the bytes were
verified and that the lease held from before the first copy to after the last. Called by both halves of the connector,
by agents that pull from peers, by tools. How a session is kept is in `session`, how bytes move in `shared_memory` and
`stream`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import grpc

from cacheservice.client.deadlines import Deadline, Watch
from cacheservice.client.lookup_request import build_lookup
from cacheservice.client.plane import LeasedRead, ReservedWrite
from cacheservice.client.session import Session, SessionKeeper
from cacheservice.client.values import (
    AgentTarget,
    ArenaUser,
    ChecksumPolicy,
    ClientIdentity,
    ClientState,
    DataPlane,
    Deadlines,
    LookupAnswer,
    LookupWait,
    RetrieveResult,
    Role,
    ShardRead,
    ShardWrite,
    StoreResult,
)
from cacheservice.core.keys import ChunkKey, NamespaceDigest, short_hex
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.outcomes import Outcome, Reason
from cacheservice.v1 import cache_pb2

_log = logging.getLogger(__name__)

# Bounds of the wire contract; larger batches are split.
MAX_LOOKUP_KEYS = 4096
MAX_SHARDS_PER_CALL = 16_384
MAX_LOOKUP_WAIT_S = 5.0
MAX_ACQUIRE_WAIT_S = 60.0
MAX_CORRUPT_PER_RELEASE = 64
MAX_CHECKSUMS_PER_COMMIT = 131_072
"""Keeps a commit of large shards near 1 MiB, well below the message limit of any gRPC server."""

_RESERVE_REASONS = {
    cache_pb2.RESERVE_RESULT_READY: Reason.DUPLICATE,
    cache_pb2.RESERVE_RESULT_PENDING: Reason.DUPLICATE,
    cache_pb2.RESERVE_RESULT_NO_SPACE: Reason.NO_SPACE,
}
_COMMIT_REASONS = {
    cache_pb2.COMMIT_RESULT_COMMITTED: Reason.HIT,
    cache_pb2.COMMIT_RESULT_LOST_RACE: Reason.DUPLICATE,
    cache_pb2.COMMIT_RESULT_EXPIRED: Reason.DEADLINE,
    cache_pb2.COMMIT_RESULT_CHECKSUM_MISMATCH: Reason.CHECKSUM,
}
_ACQUIRE_REASONS = {
    cache_pb2.ACQUIRE_RESULT_NOT_FOUND: Reason.EVICTED,
    cache_pb2.ACQUIRE_RESULT_TIMED_OUT: Reason.PENDING_TIMED_OUT,
    cache_pb2.ACQUIRE_RESULT_PEER_FAILED: Reason.PEER_FAILED,
    cache_pb2.ACQUIRE_RESULT_NO_SPACE: Reason.NO_SPACE,
}

_ROLE_NAMES = {int(role): role.name.lower() for role in Role}

_Item = TypeVar("_Item")


class CacheClient:
    """One client of one agent. Thread-safe: any number of calls may be in flight.

    Owns a session thread from `start` to `close`. Must be started in the process that uses it: in a forked child
    every call is a miss.
    """

    def __init__(
        self,
        target: AgentTarget,
        identity: ClientIdentity,
        *,
        deadlines: Deadlines = Deadlines(),  # noqa: B008 - frozen
        data_plane: DataPlane = "auto",
        checksums: ChecksumPolicy = "always",
        clock: Callable[[], float] = time.monotonic,
        on_change: Callable[[ClientState], None] | None = None,
        arena_user: ArenaUser | None = None,
    ) -> None:
        """Open nothing and start nothing. `on_change` is called from the session thread and must not block.

        `arena_user` is told where the arena lies, with shared memory.
        """
        self._deadlines = deadlines
        self._clock = clock
        # What comes from an address crossed a machine, whatever the agent says of its way before.
        self._verifies_local = checksums == "always" or target.socket_dir is None
        self._moves_bytes = data_plane != "none"
        self._keeper = SessionKeeper(
            target,
            identity,
            deadlines=deadlines,
            data_plane=data_plane,
            clock=clock,
            on_change=on_change,
            arena_user=arena_user,
        )

    def start(self) -> None:
        """Start to connect, and to connect again whenever the session ends. Returns at once."""
        self._keeper.start()

    def wait_connected(self, timeout_s: float) -> bool:
        """Wait until calls can succeed; for tools and tests."""
        return self._keeper.wait_connected(timeout_s)

    def close(self) -> None:
        """End the session; calls in flight fail, all later ones are misses. Idempotent."""
        self._keeper.close()

    def state(self) -> ClientState:
        """How the client is connected now."""
        return self._keeper.state()

    def open_namespace(self, spec: NamespaceSpec, *, deadline_s: float | None = None) -> bool:
        """Declare a namespace, now and in every later session. Blocks for one call at most, of `deadline_s` (None =
        `reserve_s`); a missing agent is no error.

        False when there is a session and the agent did not open it: it is asked again with every ping, and until it
        does, calls for this namespace are misses.
        """
        return self._keeper.open_namespace(spec, deadline_s)

    def release(self, lease_id: int) -> None:
        """Give a lookup's lease back without waiting. Unknown ones are ignored."""
        session = self._keeper.session()
        if session is not None and lease_id:
            self._keeper.release_later(session, lease_id)

    def report(self, outcome: Outcome) -> None:
        """Tell the agent how something ended, with one of the next pings; bounded, never blocks."""
        self._keeper.report(outcome)

    def lookup(
        self,
        namespace: NamespaceDigest,
        chunks: Sequence[ChunkKey],
        *,
        take_lease: bool = True,
        superseded_lease: int = 0,
        wait: LookupWait = LookupWait.NONE,
        wait_num_chunks: int = 0,
        wait_s: float = 0.0,
        owner: tuple[int, int] | None = None,
        deadline_s: float | None = None,
    ) -> LookupAnswer:
        """Ask which chunks are there.

        `chunks` are in prefix order. The lease covers chunks that are ready here, of the first 4096.
        `superseded_lease` is given back in the same step. With `wait` the agent waits up to `wait_s` (at most 5 s)
        for the first `wait_num_chunks`; `owner` is the node and epoch that a hand-over names. `deadline_s` None =
        `lookup_s` + the wait.
        """
        session = self._keeper.session()
        if session is None:
            return _no_lookup(Reason.AGENT_DOWN)
        wait_s = min(max(0.0, wait_s), MAX_LOOKUP_WAIT_S) if wait is not LookupWait.NONE else 0.0
        deadline = Deadline(
            self._clock, self._deadlines.lookup_s + wait_s if deadline_s is None else deadline_s
        )
        presence = b""
        lease_id, lease_expires_at = 0, 0.0
        with session:
            for first in range(0, len(chunks), MAX_LOOKUP_KEYS):
                keys = chunks[first : first + MAX_LOOKUP_KEYS]
                is_first = first == 0
                num_waited = min(max(0, wait_num_chunks - first), len(keys))
                left_s = deadline.left_s()
                request = cache_pb2.LookupRequest(
                    take_lease=take_lease and is_first,
                    superseded_lease_id=superseded_lease if is_first else 0,
                )
                if num_waited:
                    request.wait = int(wait)  # type: ignore[assignment]
                    request.wait_num_chunks = num_waited
                    # Leave the answer time to arrive.
                    request.wait_ms = int(
                        1000 * max(0.0, min(wait_s, left_s - self._deadlines.lookup_s / 2))
                    )
                if owner is not None:
                    request.owner_node, request.owner_epoch = owner
                asked_at = self._clock()
                serialized = build_lookup(session.token, namespace, keys, request)
                answer = session.call("Lookup", serialized, left_s)
                if isinstance(answer, Reason):
                    if lease_id:
                        self._keeper.release_later(session, lease_id)
                    return _no_lookup(answer)
                if not answer.presence or len(answer.presence) % len(keys):
                    _log.error(
                        "a lookup's answer has %s states for %s keys",
                        len(answer.presence),
                        len(keys),
                    )
                    return _no_lookup(Reason.INTERNAL)
                presence += answer.presence
                if is_first and answer.lease_id:
                    lease_id = answer.lease_id
                    lease_expires_at = asked_at + answer.lease_ttl_ms / 1000
        num_groups = (
            len(presence) // len(chunks) if chunks else self._keeper.num_groups(namespace) or 0
        )
        return LookupAnswer(None, presence, num_groups, lease_id, lease_expires_at, session.epoch)

    def store(
        self,
        namespace: NamespaceDigest,
        writes: Sequence[ShardWrite],
        *,
        deadline_s: float | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> list[StoreResult]:
        """Store shards; one result per write, in order.

        Blocks until all are committed or skipped, `deadline_s` (None = `load_s`) passed, the session ended, or
        `give_up`, asked between pieces, said so; then everything uncommitted is aborted. Sources are not read after
        the return.
        """
        session = self._keeper.session()
        if session is None or not writes:
            return [StoreResult(Reason.AGENT_DOWN, 0)] * len(writes)
        deadline = Deadline(
            self._clock, self._deadlines.load_s if deadline_s is None else deadline_s
        )
        watch = Watch(deadline, end_of_session=session.end_reason, give_up=give_up)
        results: list[Reason] = []
        try:
            with session:
                for batch in _batches(writes, MAX_SHARDS_PER_CALL):
                    results += self._store_batch(session, namespace, batch, watch, deadline)
        except Exception:  # noqa: BLE001 - outermost frame: logged, and the rest is not stored
            _log.exception("a store failed: namespace=%s", short_hex(namespace))
        results += [Reason.INTERNAL] * (len(writes) - len(results))
        return [
            StoreResult(reason, write.size_bytes if reason is Reason.HIT else 0)
            for reason, write in zip(results, writes, strict=True)
        ]

    def retrieve(
        self,
        namespace: NamespaceDigest,
        reads: Sequence[ShardRead],
        *,
        lookup_lease: int = 0,
        epoch: int | None = None,
        deadline_s: float | None = None,
    ) -> list[RetrieveResult]:
        """Bring ranges of shards to their sinks; one result per read, in order.

        Shards are copied as they become ready. `lookup_lease` protects them until this call has a lease of its own;
        it stays the caller's to release. `epoch` is the incarnation that the caller planned with, None = any.
        `deadline_s` None = `load_s`. Sinks are not written to after the return.
        """
        session = self._keeper.session()
        if session is None or not reads:
            return [RetrieveResult(Reason.AGENT_DOWN, 0)] * len(reads)
        if epoch is not None and epoch != session.epoch:
            return [RetrieveResult(Reason.EPOCH_CHANGED, 0)] * len(reads)
        deadline = Deadline(
            self._clock, self._deadlines.load_s if deadline_s is None else deadline_s
        )
        results: list[Reason] = []
        roles: list[str] = []
        try:
            with session:
                for batch in _batches(reads, MAX_SHARDS_PER_CALL):
                    results += self._retrieve_batch(
                        session, namespace, batch, lookup_lease, deadline, roles
                    )
        except Exception:  # noqa: BLE001 - outermost frame: logged, and the load has failed
            _log.exception("a retrieve failed: namespace=%s", short_hex(namespace))
        results += [Reason.INTERNAL] * (len(reads) - len(results))
        roles += [""] * (len(reads) - len(roles))
        return [
            RetrieveResult(reason, read.stop - read.start if reason is Reason.HIT else 0, role)
            for reason, read, role in zip(results, reads, roles, strict=True)
        ]

    def _store_batch(
        self,
        session: Session,
        namespace: NamespaceDigest,
        writes: Sequence[ShardWrite],
        watch: Watch,
        deadline: Deadline,
    ) -> list[Reason]:
        if not self._moves_bytes:
            raise ValueError("a client with data_plane='none' can't store")
        if not watch.may_go_on():
            return [watch.stopped or Reason.INTERNAL] * len(writes)
        request = cache_pb2.ReserveRequest(
            session_token=session.token,
            namespace_digest=namespace,
            items=[
                cache_pb2.ReserveItem(
                    shard=cache_pb2.ShardRef(chunk_key=w.chunk, group=w.group, shard=w.shard),
                    parent_key=w.parent or b"",
                    chunk_number=w.number,
                    size_bytes=w.size_bytes,
                )
                for w in writes
            ],
        )
        answer = session.call("Reserve", request, deadline.left_s(self._deadlines.reserve_s))
        if isinstance(answer, Reason):
            if answer in (Reason.DEADLINE, Reason.AGENT_DOWN):
                # The agent may have reserved: it must not wait for the end of what is not known here.
                self._keeper.give_up_reservations(session)
            return [answer] * len(writes)
        results = [Reason.INTERNAL] * len(writes)
        reserved: list[tuple[int, ReservedWrite]] = []
        uncommitted: set[int] = set()
        for position, (write, given) in enumerate(zip(writes, answer.shards, strict=False)):
            if given.result != cache_pb2.RESERVE_RESULT_RESERVED:
                results[position] = _RESERVE_REASONS.get(given.result, Reason.INTERNAL)
                continue
            uncommitted.add(given.reservation_id)
            if given.extent.length == write.size_bytes:
                reserved.append(
                    (position, ReservedWrite(write, given.reservation_id, given.extent.offset))
                )
            else:
                _log.error(
                    "the agent reserves extents of another size: namespace=%s", short_hex(namespace)
                )
        if not reserved:
            self._keeper.abort_later(session, uncommitted)
            return results
        try:
            written = session.plane.write(
                [shard for _, shard in reserved], watch=watch, deadline=deadline
            )
            complete: list[tuple[int, int, tuple[int, ...]]] = []
            for (position, shard), outcome in zip(reserved, written, strict=True):
                if isinstance(outcome, Reason):
                    results[position] = outcome
                else:
                    complete.append((position, shard.reservation_id, outcome))
            if watch.stopped is not None or not watch.may_go_on():
                for position, _, _ in complete:
                    results[position] = watch.stopped or Reason.INTERNAL
                return results
            for commit in _commits(complete):
                self._commit(session, commit, results, uncommitted, deadline)
        finally:
            self._keeper.abort_later(session, uncommitted)
        return results

    def _commit(
        self,
        session: Session,
        complete: Sequence[tuple[int, int, tuple[int, ...]]],
        results: list[Reason],
        uncommitted: set[int],
        deadline: Deadline,
    ) -> None:
        """Commit (position, reservation, checksums) and note results; what ended is taken out of `uncommitted`."""
        request = cache_pb2.CommitRequest(
            session_token=session.token,
            items=[
                cache_pb2.CommitItem(reservation_id=reservation_id, piece_checksums=checksums)
                for _, reservation_id, checksums in complete
            ],
        )
        answer = session.call("Commit", request, deadline.left_s(self._deadlines.commit_s))
        for at, (position, reservation_id, _) in enumerate(complete):
            if isinstance(answer, Reason):
                results[position] = answer
                continue
            uncommitted.discard(reservation_id)
            results[position] = Reason.INTERNAL
            if at < len(answer.results):
                results[position] = _COMMIT_REASONS.get(answer.results[at], Reason.INTERNAL)

    def _retrieve_batch(
        self,
        session: Session,
        namespace: NamespaceDigest,
        reads: Sequence[ShardRead],
        lookup_lease: int,
        deadline: Deadline,
        roles: list[str],
    ) -> list[Reason]:
        """One result per read; `roles` grows by as many roles of writers."""
        if not self._moves_bytes:
            raise ValueError("a client with data_plane='none' can't retrieve")
        if any(not 0 <= r.start <= r.stop <= r.size_bytes for r in reads):
            raise ValueError("a read's range is outside its shard")
        left_s = deadline.left_s()
        if left_s <= 0.0:
            return [Reason.DEADLINE] * len(reads)
        request = cache_pb2.AcquireRequest(
            session_token=session.token,
            namespace_digest=namespace,
            lookup_lease_id=lookup_lease,
            shards=[
                cache_pb2.ShardRef(chunk_key=r.chunk, group=r.group, shard=r.shard) for r in reads
            ],
            deadline_ms=int(1000 * min(left_s, self._deadlines.acquire_s, MAX_ACQUIRE_WAIT_S)),
        )
        watch = Watch(deadline, end_of_session=session.end_reason)
        results: list[Reason | None] = [None] * len(reads)
        writers = [""] * len(reads)
        lease_id = 0
        failure: Reason = Reason.INTERNAL
        call = None
        try:
            call = session.stub.Acquire(request, timeout=left_s)
            for answer in call:
                lease_id = answer.lease_id or lease_id
                for shard in answer.shards:
                    if shard.writer_role and shard.position < len(reads):
                        writers[shard.position] = _ROLE_NAMES.get(shard.writer_role, "")
                self._take_acquired(session, reads, answer, results, watch, deadline)
                if not watch.may_go_on():
                    failure = watch.stopped or Reason.INTERNAL
                    break
        except grpc.RpcError as error:
            failure = session.reason_of("Acquire", error)
        except ValueError:  # gRPC's word for a channel that was closed meanwhile
            failure = session.end_reason() or Reason.AGENT_DOWN
        finally:
            if call is not None:
                call.cancel()
            corrupt = [p for p, reason in enumerate(results) if reason is Reason.CHECKSUM]
            was_read = all(reason is Reason.HIT for reason in results)
            worth = None
            if lease_id:
                worth = self._give_back(session, lease_id, corrupt, deadline, was_read=was_read)
        roles += writers
        for position, read in enumerate(reads):
            reason = results[position]
            if reason is None:
                results[position] = failure
            elif reason in (Reason.HIT, Reason.CHECKSUM) and worth is not Reason.HIT:
                results[position] = worth or Reason.INTERNAL
            elif reason is Reason.CHECKSUM:
                _log.error(
                    "bytes are not what was stored, the agent is told: chunk=%s group=%s shard=%s",
                    short_hex(read.chunk), read.group, read.shard,
                )  # fmt: skip
        return [reason or Reason.INTERNAL for reason in results]

    def _take_acquired(
        self,
        session: Session,
        reads: Sequence[ShardRead],
        answer: cache_pb2.AcquireResponse,
        results: list[Reason | None],
        watch: Watch,
        deadline: Deadline,
    ) -> None:
        """Copy the shards that `answer` says are ready, and note a result for each that it answers."""
        leased: list[LeasedRead] = []
        for shard in answer.shards:
            position = shard.position
            if position >= len(reads) or results[position] is not None:
                continue
            if shard.result != cache_pb2.ACQUIRE_RESULT_READY:
                results[position] = _ACQUIRE_REASONS.get(shard.result, Reason.INTERNAL)
                continue
            read = reads[position]
            checksums = shard.piece_checksums
            if shard.extent.length != read.size_bytes or len(checksums) != -(
                -read.size_bytes // session.piece_bytes
            ):
                _log.error(
                    "a shard has another size or number of checksums: chunk=%s",
                    short_hex(read.chunk),
                )
                results[position] = Reason.INTERNAL
                continue
            verifies = self._verifies_local or shard.is_remote
            leased.append(
                LeasedRead(read, position, shard.extent.offset, checksums if verifies else None)
            )
        if leased:
            outcomes = session.plane.read(answer.lease_id, leased, watch=watch, deadline=deadline)
            for leased_read, reason in zip(leased, outcomes, strict=True):
                results[leased_read.position] = reason

    def _give_back(
        self,
        session: Session,
        lease_id: int,
        corrupt: Sequence[int],
        deadline: Deadline,
        *,
        was_read: bool,
    ) -> Reason:
        """Release the lease; HIT when it held throughout, else what everything read under it is.

        The agent looks again at the positions in `corrupt`, and drops what is wrong so that it can be stored anew.
        """
        request = cache_pb2.ReleaseRequest(
            session_token=session.token,
            lease_ids=[lease_id],
            corrupt=[
                cache_pb2.LeasedPosition(lease_id=lease_id, position=position)
                for position in corrupt[:MAX_CORRUPT_PER_RELEASE]
            ],
            unread_lease_ids=() if was_read else (lease_id,),
        )
        answer = session.call("Release", request, deadline.left_s(self._deadlines.commit_s))
        if isinstance(answer, Reason):
            self._keeper.release_later(session, lease_id)
            # The agent does not know the lease: nothing protected the bytes.
            return Reason.LEASE_LOST if answer is Reason.INTERNAL else answer
        return Reason.HIT if list(answer.held) == [True] else Reason.LEASE_LOST


def _no_lookup(reason: Reason) -> LookupAnswer:
    return LookupAnswer(reason, b"", 0, 0, 0.0, 0)


def _commits(
    complete: Sequence[tuple[int, int, tuple[int, ...]]],
) -> Iterator[list[tuple[int, int, tuple[int, ...]]]]:
    """Cut what is to be committed into calls of bounded size."""
    batch: list[tuple[int, int, tuple[int, ...]]] = []
    num_checksums = 0
    for item in complete:
        if batch and num_checksums + len(item[2]) > MAX_CHECKSUMS_PER_COMMIT:
            yield batch
            batch, num_checksums = [], 0
        batch.append(item)
        num_checksums += len(item[2])
    if batch:
        yield batch


def _batches(items: Sequence[_Item], size: int) -> Iterator[Sequence[_Item]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
