"""Bytes over gRPC, in frames of at most 1 MiB: for clients that can't map the arena, and for other agents.

Copies run without the core lock. What is sent is compared with its checksums on the way, so that an owner learns of
wrong bytes from the agents that pull them. A reader's bytes are covered by its lease, which is looked at again after
the last frame; a writer's extent is held by the store while a call writes to it. Called by `service.py`.

The fast bulk path between agents (plain sockets straight between arenas, a later issue) belongs beside this file: it
needs the same three steps, leased extent → bytes → does the lease still hold, and nothing else of the service.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

import xxhash

from cacheservice.agent.arena import Arena
from cacheservice.agent.frames import build_read_frame, split_write_frame
from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.messages import MAX_FRAME_BYTES
from cacheservice.agent.sessions import Session, SessionRegistry, StreamedRead, StreamedShard
from cacheservice.core.keys import ChunkKey, short_hex
from cacheservice.core.layout import CHECKSUM_PIECE_BYTES
from cacheservice.core.store import ReadyShard
from cacheservice.errors import Conflict, InvalidRequest, LeaseLost, OutOfExtent, UnknownObject

_log = logging.getLogger(__name__)


class ByteStreams:
    """Reads from and writes into the arena. Thread-safe."""

    def __init__(self, guarded: GuardedStore, arena: Arena, registry: SessionRegistry) -> None:
        self._guarded = guarded
        self._arena = arena
        self._registry = registry
        self.num_bytes_sent = 0
        self.num_bytes_received = 0

    def read(
        self, session: Session, lease_id: int, ranges: Sequence[tuple[int, int, int]]
    ) -> Iterator[bytes]:
        """Serialized `ReadResponse` frames of (position, start, stop) ranges of leased shards, in order."""
        if session.data_plane == "none":
            session.data_plane = "stream"
        extents = []
        with self._guarded.reading() as store:
            for number, (position, start, stop) in enumerate(ranges):
                offset, length = store.leased_extent(session.id, lease_id, position)
                if not start <= stop <= length:
                    raise InvalidRequest(
                        f"ranges[{number}] is [{start}, {stop}); the shard has {length} bytes, ranges are half-open"
                    )
                extents.append((number, position, offset, length, start, stop))
        base = self._arena.address
        expected = session.reads.get(lease_id, {})
        for number, position, offset, shard_bytes, start, stop in extents:
            read = expected.get(position)
            for at in range(start, stop, MAX_FRAME_BYTES):
                length = min(MAX_FRAME_BYTES, stop - at)
                self.num_bytes_sent += length
                frame = build_read_frame(number, at, base + offset + at, length)
                if read is not None and not _is_right(frame, at, length, shard_bytes, read):
                    self._drop(read)
                    read = None
                yield frame
        self._check_lease(session, lease_id)

    def write(self, frames: Iterable[bytes]) -> int:
        """Take serialized `WriteRequest` frames into reserved extents; returns the number of bytes."""
        session: Session | None = None
        open_shards: dict[int, tuple[int, int, StreamedShard]] = {}
        num_bytes = 0
        try:
            for serialized in frames:
                frame = split_write_frame(serialized)
                if session is None:
                    session = self._registry.live(frame.session_token)
                    if session.data_plane == "none":
                        session.data_plane = "stream"
                payload = frame.payload
                if len(payload) > MAX_FRAME_BYTES:
                    raise InvalidRequest(
                        f"payload has {len(payload)} bytes; a frame has at most {MAX_FRAME_BYTES}"
                    )
                if frame.reservation_id not in open_shards:
                    open_shards[frame.reservation_id] = self._open(session, frame.reservation_id)
                offset, length, streamed = open_shards[frame.reservation_id]
                if frame.start != streamed.num_bytes:
                    raise OutOfExtent(
                        f"the frame starts at {frame.start}, but byte {streamed.num_bytes} is next; frames of one "
                        "reservation come in order, without gaps"
                    )
                if frame.start + len(payload) > length:
                    raise OutOfExtent(
                        f"the frame ends at {frame.start + len(payload)}; the shard has {length} bytes"
                    )
                frame.copy_to(self._arena.address + offset + frame.start)
                streamed.add(payload)
                num_bytes += len(payload)
                self.num_bytes_received += len(payload)
        finally:
            if session is not None:
                self._close(session, open_shards)
        return num_bytes

    def look_again(self, session: Session, reports: Sequence[tuple[int, int]]) -> None:
        """Drop the chunks of those (lease, position) whose bytes are wrong, as their reader says.

        A reader is not believed. Its lease keeps the bytes in place while they are hashed; when it is gone afterwards,
        nothing is said about them.
        """
        for lease_id, position in reports:
            with self._guarded.reading() as store:
                found = store.leased_shard(session.id, lease_id, position)
            if found is None or self._has_checksums(found):
                continue
            with self._guarded.changing() as store:
                chunk = store.drop_corrupt_leased(session.id, lease_id, position)
            if chunk is not None:
                _log_corrupt(chunk)

    def _has_checksums(self, found: ReadyShard) -> bool:
        view = self._arena.view
        stop = found.offset + found.length
        starts = range(found.offset, stop, CHECKSUM_PIECE_BYTES)
        return all(
            xxhash.xxh3_64_intdigest(view[at : min(at + CHECKSUM_PIECE_BYTES, stop)]) == expected
            for at, expected in zip(starts, found.checksums, strict=True)
        )

    def _open(self, session: Session, reservation_id: int) -> tuple[int, int, StreamedShard]:
        with self._guarded.reading() as store:
            streamed = session.streamed.get(reservation_id)
            if streamed is not None and streamed.in_call:
                raise Conflict(
                    "another Write call writes to this reservation now; send its frames in one call"
                )
            offset, length = store.begin_agent_copy(session.id, reservation_id)
            if streamed is None:
                streamed = session.streamed[reservation_id] = StreamedShard(length)
            streamed.in_call = True
        return offset, length, streamed

    def _close(
        self, session: Session, open_shards: dict[int, tuple[int, int, StreamedShard]]
    ) -> None:
        with self._guarded.changing() as store:
            for reservation_id, (_, _, streamed) in open_shards.items():
                streamed.in_call = False
                store.end_agent_copy(session.id, reservation_id)

    def _drop(self, read: StreamedRead) -> None:
        """The bytes are not those of the commit: the reader will see it, and nobody is to be given them again."""
        with self._guarded.changing() as store:
            store.drop_corrupt(read.namespace, read.chunk)
        _log_corrupt(read.chunk)

    def _check_lease(self, session: Session, lease_id: int) -> None:
        now_s = self._guarded.clock()
        try:
            with self._guarded.reading() as store:
                held = store.lease_holds(session.id, lease_id, now_s)
        except UnknownObject:
            held = False
        if not held:
            raise LeaseLost(
                "the lease ran out while its bytes were read; what came is worthless: acquire again"
            )


def _log_corrupt(chunk: ChunkKey) -> None:
    _log.error("bytes changed in the arena; the chunk is dropped chunk=%s", short_hex(chunk))


def _is_right(frame: bytes, at: int, length: int, shard_bytes: int, read: StreamedRead) -> bool:
    """Compare a frame that is one whole piece with its checksum, while it is in cache; others pass."""
    is_piece = at % CHECKSUM_PIECE_BYTES == 0 and (
        length == CHECKSUM_PIECE_BYTES or at + length == shard_bytes
    )
    if not is_piece:
        return True
    seen = xxhash.xxh3_64_intdigest(memoryview(frame)[len(frame) - length :])
    return seen == read.checksums[at // CHECKSUM_PIECE_BYTES]
