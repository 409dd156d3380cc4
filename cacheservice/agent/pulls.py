"""Fetches shards from other agents into this arena, so that engines find them as local ones.

A hint says where; the owner confirms and leases (its epoch must be the hint's), the bytes come over its read stream,
each piece's checksum is verified, and what is right is committed here and announced. Every failure is a miss. Single
flight is the store's own: a shard that is being fetched is pending, so nobody fetches it twice, and a local store
that races wins or loses by who commits first. Called by `acquire.py` and `lookups.py`; uses the same client as
engines do, over the stream.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeAlias

import xxhash

from cacheservice.agent.arena import Arena
from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.messages import ROLE_NUMBERS
from cacheservice.agent.remote_hints import RemoteHint, RemoteHints
from cacheservice.client.client import CacheClient
from cacheservice.client.values import (
    AgentTarget,
    ClientIdentity,
    Deadlines,
    LookupWait,
    Role,
    ShardRead,
    TlsFiles,
)
from cacheservice.core.chunks import Writer
from cacheservice.core.keys import ChunkKey, short_hex
from cacheservice.core.layout import CHECKSUM_PIECE_BYTES, NamespaceSpec
from cacheservice.core.outcomes import Reason
from cacheservice.core.store import (
    CommitItem,
    CommitResult,
    ReserveRequestItem,
    ReserveResult,
    SessionId,
)
from cacheservice.errors import RequestRejected
from cacheservice.index.port import Node
from cacheservice.v1 import cache_pb2

_log = logging.getLogger(__name__)

ShardName: TypeAlias = tuple[ChunkKey, int, int]
"""Chunk key, group, shard."""

_BATCH_BYTES = 8 * 2**20
"""Shards fetched by one call: enough to hide its cost, little enough that the first are usable early."""
_WORKERS = 4
_MAX_JOBS = 256
"""Batches waiting or running; more are answered as failed, which is a miss."""
_CONNECT_S = 2.0
_MAX_PEERS = 64
_IDLE_S = 60.0
_WRITERS = {role: Writer(role, "pulled") for role in ("", *ROLE_NUMBERS)}
"""Who wrote what was pulled, by role; one record for all shards."""

PEER_FAILED = cache_pb2.ACQUIRE_RESULT_PEER_FAILED
NO_SPACE = cache_pb2.ACQUIRE_RESULT_NO_SPACE
NOT_FOUND = cache_pb2.ACQUIRE_RESULT_NOT_FOUND


@dataclass(slots=True)
class PullTicket:
    """What one acquire asked to have fetched. Written by workers, read under the core lock."""

    num_open: int = 0
    failures: dict[ShardName, cache_pb2.AcquireResult] = field(default_factory=dict)

    @property
    def is_done(self) -> bool:
        """Whether every batch ended."""
        return self.num_open == 0


@dataclass(frozen=True, slots=True)
class _Job:
    """One batch from one owner."""

    spec: NamespaceSpec
    node: Node
    wanted: list[tuple[ShardName, RemoteHint]]
    deadline_s: float
    ticket: PullTicket


@dataclass(slots=True)
class PullCounts:
    """What pulls did since the start."""

    num_shards: int = 0
    num_bytes: int = 0
    num_failed: int = 0
    num_lost_races: int = 0
    seconds: float = 0.0


class PeerPulls:
    """Owns the worker threads, the clients of other agents, and the session in the store that pulls reserve under."""

    def __init__(
        self,
        guarded: GuardedStore,
        arena: Arena,
        hints: RemoteHints,
        *,
        session: SessionId,
        node_name: str,
        tls: TlsFiles | None,
        most_s: float,
    ) -> None:
        self._guarded = guarded
        self._arena = arena
        self._hints = hints
        self._session = session
        self._most_s = most_s
        self._peers = _Peers(node_name=node_name, tls=tls, clock=guarded.clock)
        self._workers = ThreadPoolExecutor(max_workers=_WORKERS, thread_name_prefix="pull")
        self._jobs = threading.BoundedSemaphore(_MAX_JOBS)
        self._stopped = False
        self.counts = PullCounts()
        with guarded.changing() as store:
            store.open_session(session, maps_arena=True, role="peer", name="pulls of this agent")

    def start(
        self, spec: NamespaceSpec, shards: Sequence[ShardName], deadline_s: float
    ) -> PullTicket:
        """Fetch what others are said to hold; what nobody holds is simply absent when the ticket is done."""
        ticket = PullTicket()
        bits = [1 << spec.shard_bit(group, shard) for _, group, shard in shards]
        asked: dict[ChunkKey, int] = {}
        for (chunk, _, _), bit in zip(shards, bits, strict=True):
            asked[chunk] = asked.get(chunk, 0) | bit
        hints = self._hints.find(spec, asked)
        owners = {(h.node, h.epoch) for hint in hints.values() for h in hint.holders.each}
        nodes = {owner: self._hints.node(*owner) for owner in owners}
        by_owner: dict[tuple[int, int], list[tuple[ShardName, RemoteHint]]] = {}
        for name, bit in zip(shards, bits, strict=True):
            hint = hints.get(name[0])
            if hint is None:
                continue
            # Attention may be at one agent and a recurrent state, that came later, at another.
            for holder in hint.holders.each:
                owner = (holder.node, holder.epoch)
                if holder.bitmap & bit and nodes[owner] is not None:
                    by_owner.setdefault(owner, []).append((name, hint))
                    break
        jobs = []
        deadline_s = min(deadline_s, self._guarded.clock() + self._most_s)
        for owner, wanted in by_owner.items():
            node = nodes[owner]
            assert node is not None
            jobs += [
                _Job(spec, node, batch, deadline_s, ticket) for batch in _batches(spec, wanted)
            ]
        ticket.num_open = len(jobs)
        for job in jobs:
            self._submit(job)
        return ticket

    def ask_owner(
        self,
        spec: NamespaceSpec,
        chunks: Sequence[ChunkKey],
        *,
        node: int,
        epoch: int,
        wait_s: float,
    ) -> bytes | None:
        """Have the owner that a hand-over names wait for the chunks; its presence bytes, None when it can't be."""
        owner = self._hints.node(node, epoch)
        if owner is None:
            return None
        deadline_s = self._guarded.clock() + wait_s
        with self._peers.use(owner.address, spec, within_s=wait_s) as client:
            left_s = deadline_s - self._guarded.clock()
            if not client.wait_connected(min(_CONNECT_S, max(0.0, left_s))):
                return None
            left_s = deadline_s - self._guarded.clock()
            answer = client.lookup(
                spec.digest, chunks, take_lease=False, wait=LookupWait.HAND_OVER, wait_num_chunks=len(chunks),
                wait_s=max(0.0, left_s), deadline_s=max(0.0, left_s) + 0.2,
            )  # fmt: skip
        if answer.reason is not None or answer.epoch != epoch:
            return None
        self._hints.learn(spec, chunks, node, epoch, answer.presence)
        return answer.presence

    def close_idle(self) -> None:
        """Close clients that nobody used for a minute. Called by the ticker."""
        self._peers.close_idle()

    @property
    def num_peers(self) -> int:
        """Agents that this one has a client for."""
        return self._peers.num_clients

    def stop(self) -> None:
        """Close all clients, which ends running batches, and wait for that: they write into the arena."""
        self._stopped = True
        self._peers.close()
        self._workers.shutdown(wait=True, cancel_futures=True)

    def _submit(self, job: _Job) -> None:
        if self._stopped or not self._jobs.acquire(blocking=False):
            self._end(job, dict.fromkeys((name for name, _ in job.wanted), PEER_FAILED))
            return
        try:
            self._workers.submit(self._run, job)
        except RuntimeError:  # stopped meanwhile
            self._jobs.release()
            self._end(job, dict.fromkeys((name for name, _ in job.wanted), PEER_FAILED))

    def _run(self, job: _Job) -> None:
        failures: dict[ShardName, cache_pb2.AcquireResult] = {}
        started_s = self._guarded.clock()
        try:
            failures = self._pull(job)
        except Exception:  # noqa: BLE001
            # The outermost frame of a worker: a bug of ours is a miss for the engine.
            _log.exception("pull failed node=%d", job.node.number)
            failures = dict.fromkeys((name for name, _ in job.wanted), PEER_FAILED)
        finally:
            self._jobs.release()
            self.counts.seconds += self._guarded.clock() - started_s
            self._end(job, failures)

    def _end(self, job: _Job, failures: dict[ShardName, cache_pb2.AcquireResult]) -> None:
        self.counts.num_failed += len(failures)
        with self._guarded.changing():
            job.ticket.failures.update(failures)
            job.ticket.num_open -= 1

    def _pull(self, job: _Job) -> dict[ShardName, cache_pb2.AcquireResult]:
        """Reserve, fetch, verify, commit one batch; returns what failed."""
        spec = job.spec
        failures: dict[ShardName, cache_pb2.AcquireResult] = {}
        left_s = job.deadline_s - self._guarded.clock()
        if left_s <= 0:
            return {}
        with self._peers.use(job.node.address, spec, within_s=left_s) as client:
            left_s = max(0.0, job.deadline_s - self._guarded.clock())
            if not client.wait_connected(min(_CONNECT_S, left_s)):
                self._distrust(job, "can't be reached")
                return dict.fromkeys((name for name, _ in job.wanted), PEER_FAILED)
            items = [
                ReserveRequestItem(
                    chunk=chunk, parent=hint.parent, number=hint.number, group=group, shard=shard,
                    size_bytes=spec.groups[group].shard_bytes,
                )
                for (chunk, group, shard), hint in job.wanted
            ]  # fmt: skip
            with self._guarded.changing() as store:
                answers = store.reserve(self._session, spec.digest, items, self._guarded.clock())
            reserved: list[tuple[ShardName, int, _ArenaSink]] = []
            for (name, _), answer in zip(job.wanted, answers, strict=True):
                if answer.result is ReserveResult.RESERVED:
                    sink = _ArenaSink(self._arena.address + answer.offset)
                    reserved.append((name, answer.reservation_id, sink))
                elif answer.result is ReserveResult.NO_SPACE:
                    failures[name] = NO_SPACE
                # READY and PENDING: somebody else brings it, the acquire goes on waiting for that.
            if reserved:
                failures.update(self._fetch(job, client, reserved))
        return failures

    def _fetch(
        self, job: _Job, client: CacheClient, reserved: Sequence[tuple[ShardName, int, _ArenaSink]]
    ) -> dict[ShardName, cache_pb2.AcquireResult]:
        spec = job.spec
        failures: dict[ShardName, cache_pb2.AcquireResult] = {}
        good: list[tuple[ShardName, CommitItem]] = []
        writers: dict[int, Writer] = {}
        try:
            reads = []
            for (chunk, group, shard), _, sink in reserved:
                size = spec.groups[group].shard_bytes
                reads.append(ShardRead(chunk, group, shard, size, 0, size, sink))
            left_s = job.deadline_s - self._guarded.clock()
            results = client.retrieve(
                spec.digest, reads, epoch=job.node.epoch, deadline_s=max(0.001, left_s)
            )
            for (name, reservation_id, sink), result in zip(reserved, results, strict=True):
                if result.reason is Reason.HIT:
                    writers[reservation_id] = _WRITERS[result.writer_role]
                    good.append(
                        (name, CommitItem(reservation_id, sink.checksums(), is_remote=True))
                    )
                else:
                    gone = result.reason in (Reason.ABSENT, Reason.EVICTED, Reason.EPOCH_CHANGED)
                    failures[name] = NOT_FOUND if gone else PEER_FAILED
            if failures:
                reasons = sorted({r.reason.label for r in results if r.reason is not Reason.HIT})
                self._distrust(
                    job, f"did not deliver: {', '.join(reasons)}", {name[0] for name in failures}
                )
        finally:
            # Our sinks are idle from here on, so the extents of what failed may be used again.
            self._commit(reserved, good, writers)
        return failures

    def _commit(
        self,
        reserved: Sequence[tuple[ShardName, int, _ArenaSink]],
        good: Sequence[tuple[ShardName, CommitItem]],
        writers: Mapping[int, Writer],
    ) -> None:
        kept = {item.reservation_id for _, item in good}
        try:
            with self._guarded.changing() as store:
                store.abort(
                    self._session,
                    [r for _, r, _ in reserved if r not in kept],
                    self._guarded.clock(),
                )
                results = store.commit(
                    self._session,
                    [item for _, item in good],
                    self._guarded.clock(),
                    writers=writers,
                )
        except RequestRejected as error:
            _log.error("pulled shards can't be committed error=%s", error)
            return
        self.counts.num_bytes += sum(sink.num_bytes for _, r, sink in reserved if r in kept)
        self.counts.num_shards += results.count(CommitResult.COMMITTED)
        self.counts.num_lost_races += len(results) - results.count(CommitResult.COMMITTED)

    def _distrust(self, job: _Job, what: str, chunks: set[ChunkKey] | None = None) -> None:
        doubted = sorted(chunks if chunks is not None else {name[0] for name, _ in job.wanted})
        self._hints.distrust(job.spec.digest, doubted, job.node.number)
        _log.warning(
            "peer %s node=%s address=%s namespace=%s num_chunks=%d",
            what, job.node.name, job.node.address, short_hex(job.spec.digest), len(doubted),
        )  # fmt: skip


class _ArenaSink:
    """Takes one shard into its extent and makes its checksums on the way, while the bytes are in cache."""

    __slots__ = ("_address", "_hasher", "_pieces", "num_bytes")

    def __init__(self, address: int) -> None:
        self._address = address
        self._hasher = xxhash.xxh3_64()
        self._pieces: list[int] = []
        self.num_bytes = 0

    def scatter(self, start: int, stop: int, source: int) -> None:
        """Copy the next bytes; the client hands them over in order (see client.values.PageSink)."""
        if start != self.num_bytes:
            raise AssertionError(f"pulled bytes out of order: {start} after {self.num_bytes}")
        ctypes.memmove(self._address + start, source, stop - start)
        at = start
        while at < stop:
            end = min(stop, at - at % CHECKSUM_PIECE_BYTES + CHECKSUM_PIECE_BYTES)
            self._hasher.update((ctypes.c_char * (end - at)).from_address(source + at - start))
            if end % CHECKSUM_PIECE_BYTES == 0:
                self._pieces.append(self._hasher.intdigest())
                self._hasher.reset()
            at = end
        self.num_bytes = stop

    def checksums(self) -> tuple[int, ...]:
        """xxh3-64 of each piece; call once, when all bytes came."""
        if self.num_bytes % CHECKSUM_PIECE_BYTES:
            self._pieces.append(self._hasher.intdigest())
            self._hasher.reset()
        return tuple(self._pieces)


@dataclass(slots=True)
class _Peer:
    client: CacheClient
    used_s: float
    num_users: int = 0
    opening: threading.Lock = field(default_factory=threading.Lock)
    opened: set[bytes] = field(default_factory=set)
    """Namespaces that the client opened, or opens as soon as it is connected and in every later session."""


class _Peers:
    """One client per address, bounded, closed when idle. Thread-safe."""

    def __init__(
        self, *, node_name: str, tls: TlsFiles | None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._node_name = node_name
        self._tls = tls
        self._clock = clock
        self._lock = threading.Lock()
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    @property
    def num_clients(self) -> int:
        return len(self._peers)

    def use(self, address: str, spec: NamespaceSpec, *, within_s: float) -> _Use:
        """The client of an address, for the length of a `with` block; `spec` is open if that took at most
        `within_s`."""
        return _Use(self, address, spec, within_s)

    def enter(self, address: str, spec: NamespaceSpec, within_s: float) -> _Peer:
        deadline_s = self._clock() + within_s
        retired: list[CacheClient] = []
        with self._lock:
            peer = self._peers.get(address)
            if peer is None:
                idle = [a for a, p in self._peers.items() if p.num_users == 0]
                while len(self._peers) >= _MAX_PEERS and idle:
                    retired.append(self._peers.pop(idle.pop(0)).client)
                peer = _Peer(self._connect(address), self._clock())
                self._peers[address] = peer
            self._peers.move_to_end(address)
            peer.num_users += 1
            peer.used_s = self._clock()
        for client in retired:
            client.close()
        if spec.digest not in peer.opened:
            self._open(peer, spec, deadline_s)
        return peer

    def _open(self, peer: _Peer, spec: NamespaceSpec, deadline_s: float) -> None:
        """Ask the peer, once for all who want it; where that fails, the next one who enters asks again."""
        # Not under the lock of all: it is one call to the peer, and takes up to its deadline.
        if not peer.opening.acquire(timeout=max(0.0, deadline_s - self._clock())):
            return
        try:
            left_s = min(_CONNECT_S, deadline_s - self._clock())
            if spec.digest not in peer.opened and peer.client.open_namespace(
                spec, deadline_s=max(0.0, left_s)
            ):
                peer.opened.add(spec.digest)
        finally:
            peer.opening.release()

    def leave(self, peer: _Peer) -> None:
        with self._lock:
            peer.num_users -= 1
            peer.used_s = self._clock()

    def close_idle(self) -> None:
        before_s = self._clock() - _IDLE_S
        with self._lock:
            idle = [a for a, p in self._peers.items() if p.num_users == 0 and p.used_s < before_s]
            clients = [self._peers.pop(address).client for address in idle]
        for client in clients:
            client.close()

    def close(self) -> None:
        with self._lock:
            clients = [peer.client for peer in self._peers.values()]
            self._peers.clear()
        for client in clients:
            client.close()

    def _connect(self, address: str) -> CacheClient:
        client = CacheClient(
            AgentTarget(address=address, tls=self._tls),
            ClientIdentity(Role.PEER, engine_name=self._node_name, host=self._node_name),
            deadlines=Deadlines(), data_plane="stream",
        )  # fmt: skip
        client.start()
        return client


class _Use:
    def __init__(self, peers: _Peers, address: str, spec: NamespaceSpec, within_s: float) -> None:
        self._peers = peers
        self._address = address
        self._spec = spec
        self._within_s = within_s
        self._peer: _Peer | None = None

    def __enter__(self) -> CacheClient:
        self._peer = self._peers.enter(self._address, self._spec, self._within_s)
        return self._peer.client

    def __exit__(self, *_: object) -> None:
        assert self._peer is not None
        self._peers.leave(self._peer)


def _batches(
    spec: NamespaceSpec, wanted: Sequence[tuple[ShardName, RemoteHint]]
) -> list[list[tuple[ShardName, RemoteHint]]]:
    batches: list[list[tuple[ShardName, RemoteHint]]] = []
    room = 0
    for item in wanted:
        size = spec.groups[item[0][1]].shard_bytes
        if not batches or size > room:
            batches.append([])
            room = _BATCH_BYTES
        batches[-1].append(item)
        room -= size
    return batches
