"""A small agent in this process whose every answer a test can replace: it serves what no correct agent would.

Speaks the real wire contract over real sockets, with a real sealed memfd. Correct behaviour is the real agent's to
show; this one keeps just enough state for a store and a retrieve to work between two misdeeds.
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from cacheservice.v1 import cache_pb2, cache_pb2_grpc

MIB = 1024 * 1024


class ScriptedAgent(cache_pb2_grpc.CacheServiceServicer):
    """Serves from `start` to `stop`. `script[method]` is called instead of the built-in answer, with the same
    arguments."""

    def __init__(
        self, socket_dir: Path, *, arena_bytes: int = 32 * MIB, offers_arena: bool = True
    ) -> None:
        """Nothing is served before `start`."""
        self.socket_dir = socket_dir
        self.arena_bytes = arena_bytes
        self.offers_arena = offers_arena
        self.epoch = secrets.randbits(32) | 1
        self.script: dict[str, Callable[..., Any]] = {}
        self.num_calls: Counter[str] = Counter()
        self.hellos: list[cache_pb2.SessionHello] = []
        self.pings: list[cache_pb2.SessionPing] = []
        self.answers_pings = True
        self.arena_status = 0
        self.seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        self.groups: dict[bytes, list[cache_pb2.GroupShape]] = {}
        self.shards: dict[tuple[bytes, bytes, int, int], tuple[int, int, list[int]]] = {}
        self.released: list[int] = []
        self.aborted: list[int] = []
        self.corrupt: list[int] = []
        self.arena_connections: list[socket.socket] = []
        self.descriptor = os.memfd_create("scripted", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.descriptor, arena_bytes)
        self.memory = mmap.mmap(self.descriptor, arena_bytes)
        self._tokens: set[bytes] = set()
        self._next_id = itertools.count(1)
        self.next_offset = 0
        self._reserved: dict[int, tuple[tuple[bytes, bytes, int, int], int, int]] = {}
        self._leases: dict[int, list[tuple[int, int]]] = {}
        self._stopping = threading.Event()

    def start(self) -> ScriptedAgent:
        """Serve both sockets."""
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, self.seals)
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        cache_pb2_grpc.add_CacheServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self.socket_dir / 'agent.sock'}")
        self._server.start()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.socket_dir / "arena.sock"))
        self._listener.listen()
        threading.Thread(target=self._hand_over, daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop at once, as a killed agent does."""
        self._stopping.set()
        self._server.stop(0).wait()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for connection in self.arena_connections:
            connection.close()
        (self.socket_dir / "arena.sock").unlink()
        self.memory.close()
        os.close(self.descriptor)

    def __getattribute__(self, name: str) -> Any:
        """Route calls through the script."""
        if name in _METHODS:
            return self._scripted(name)
        return super().__getattribute__(name)

    def _scripted(self, name: str) -> Callable[..., Any]:
        def call(request: Any, context: Any) -> Any:
            self.num_calls[name] += 1
            built_in = getattr(self, "_" + name.lower())
            replacement = self.script.get(name)
            return (
                built_in(request, context)
                if replacement is None
                else replacement(request, context, built_in)
            )

        return call

    def _session(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        self.hellos.append(next(requests).hello)
        token = secrets.token_bytes(16)
        self._tokens.add(token)
        welcome = cache_pb2.SessionWelcome(
            session_token=token,
            epoch=self.epoch,
            node_name="scripted",
            node_number=7,
            arena_bytes=self.arena_bytes,
            arena_offered=self.offers_arena,
            checksum_piece_bytes=MIB,
            ping_interval_ms=50,
            protocol_version=1,
        )
        yield cache_pb2.SessionResponse(welcome=welcome)
        for request in requests:
            self.pings.append(request.ping)
            if self.answers_pings:
                yield cache_pb2.SessionResponse(pong=cache_pb2.SessionPong(node_number=8))

    def _opennamespace(self, request: Any, context: Any) -> Any:
        self.groups[request.namespace_digest] = list(request.groups)
        return cache_pb2.OpenNamespaceResponse(epoch=self.epoch)

    def _lookup(self, request: Any, context: Any) -> Any:
        presence = bytearray()
        for key in request.chunk_keys:
            for number, group in enumerate(self.groups[request.namespace_digest]):
                names = [
                    (request.namespace_digest, key, number, s) for s in range(group.num_shards)
                ]
                presence.append(1 if all(n in self.shards for n in names) else 0)
        lease = next(self._next_id) if request.take_lease and any(presence) else 0
        return cache_pb2.LookupResponse(
            presence=bytes(presence),
            lease_id=lease,
            lease_ttl_ms=5000 if lease else 0,
            epoch=self.epoch,
        )

    def _reserve(self, request: Any, context: Any) -> Any:
        answers = []
        for item in request.items:
            name = (
                request.namespace_digest,
                item.shard.chunk_key,
                item.shard.group,
                item.shard.shard,
            )
            if name in self.shards:
                answers.append(cache_pb2.ReservedShard(result=cache_pb2.RESERVE_RESULT_READY))
                continue
            if self.next_offset + item.size_bytes > self.arena_bytes:
                answers.append(cache_pb2.ReservedShard(result=cache_pb2.RESERVE_RESULT_NO_SPACE))
                continue
            number = next(self._next_id)
            extent = cache_pb2.Extent(offset=self.next_offset, length=item.size_bytes)
            self._reserved[number] = (name, self.next_offset, item.size_bytes)
            self.next_offset += -(-item.size_bytes // 4096) * 4096
            answers.append(
                cache_pb2.ReservedShard(
                    result=cache_pb2.RESERVE_RESULT_RESERVED, reservation_id=number, extent=extent
                )
            )
        return cache_pb2.ReserveResponse(shards=answers, ttl_ms=60_000, epoch=self.epoch)

    def _commit(self, request: Any, context: Any) -> Any:
        for item in request.items:
            name, offset, length = self._reserved.pop(item.reservation_id)
            self.shards[name] = (offset, length, list(item.piece_checksums))
        return cache_pb2.CommitResponse(
            results=[cache_pb2.COMMIT_RESULT_COMMITTED] * len(request.items)
        )

    def _abort(self, request: Any, context: Any) -> Any:
        self.aborted += request.reservation_ids
        return cache_pb2.AbortResponse()

    def _acquire(self, request: Any, context: Any) -> Iterator[Any]:
        lease = next(self._next_id)
        extents = []
        for position, ref in enumerate(request.shards):
            found = self.shards.get((request.namespace_digest, ref.chunk_key, ref.group, ref.shard))
            if found is None:
                extents.append((0, 0))
                shard = cache_pb2.AcquiredShard(
                    position=position, result=cache_pb2.ACQUIRE_RESULT_NOT_FOUND
                )
            else:
                offset, length, checksums = found
                extents.append((offset, length))
                shard = cache_pb2.AcquiredShard(
                    position=position, result=cache_pb2.ACQUIRE_RESULT_READY, piece_checksums=checksums,
                    extent=cache_pb2.Extent(offset=offset, length=length),
                )  # fmt: skip
            self._leases[lease] = extents
            yield cache_pb2.AcquireResponse(
                lease_id=lease, lease_ttl_ms=30_000, epoch=self.epoch, shards=[shard]
            )

    def _release(self, request: Any, context: Any) -> Any:
        self.released += request.lease_ids
        self.corrupt += [report.position for report in request.corrupt]
        return cache_pb2.ReleaseResponse(held=[True] * len(request.lease_ids))

    def _read(self, request: Any, context: Any) -> Iterator[Any]:
        extents = self._leases[request.lease_id]
        for index, wanted in enumerate(request.ranges):
            offset, _ = extents[wanted.position]
            for start in range(wanted.start, wanted.stop, MIB):
                stop = min(start + MIB, wanted.stop)
                payload = self.memory[offset + start : offset + stop]
                yield cache_pb2.ReadResponse(range_index=index, start=start, payload=payload)

    def _write(self, requests: Iterator[Any], context: Any) -> Any:
        num_bytes = 0
        for request in requests:
            _, offset, length = self._reserved[request.reservation_id]
            assert request.start + len(request.payload) <= length
            at = offset + request.start
            self.memory[at : at + len(request.payload)] = request.payload
            num_bytes += len(request.payload)
        return cache_pb2.WriteResponse(num_bytes=num_bytes)

    def _hand_over(self) -> None:
        while not self._stopping.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            self.arena_connections.append(connection)
            hello = connection.recv(24, socket.MSG_WAITALL)
            _, _, _, token = struct.unpack("<4sHH16s", hello)
            status = self.arena_status or (0 if token in self._tokens else 2)
            answer = struct.pack("<4sHHIIQ", b"LRDR", 1, status, self.epoch, 0, self.arena_bytes)
            socket.send_fds(connection, [answer], [] if status else [self.descriptor])


_METHODS = frozenset(
    (
        "Session",
        "OpenNamespace",
        "Lookup",
        "Acquire",
        "Release",
        "Reserve",
        "Commit",
        "Abort",
        "Read",
        "Write",
    )
)
