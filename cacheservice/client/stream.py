"""The data plane without shared memory: bytes in gRPC frames of 1 MiB.

Frames are written and read by hand instead of through protobuf classes, because each class costs two more copies of
every byte: a frame to send is gathered straight into the bytes object that gRPC sends, a frame that came is scattered
straight from the bytes object that gRPC delivered. The format is that of `WriteRequest` and `ReadResponse`; a test
compares it with the generated classes. Called by the client; what it does not do: reserve, commit, lease.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import grpc
from google.protobuf.message import DecodeError

from cacheservice.client.copy import address_of_bytes, piece_checksum
from cacheservice.client.deadlines import Deadline, Watch
from cacheservice.client.plane import LeasedRead, ReservedWrite
from cacheservice.core.outcomes import Reason
from cacheservice.v1 import cache_pb2

_log = logging.getLogger(__name__)

# Field number << 3 | wire type.
_WRITE_TOKEN, _WRITE_RESERVATION, _WRITE_START, _WRITE_PAYLOAD = 0x0A, 0x10, 0x18, 0x22
_READ_RANGE_INDEX, _READ_START, _READ_PAYLOAD = 0x08, 0x10, 0x1A

_POLL_S = 0.05
"""How often a call that waits for the agent asks whether it may go on."""

# CPython allows to fill a bytes object that nobody else has seen yet (C API, PyBytes_FromStringAndSize).
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]


class StreamPlane:
    """Bytes by the Read and Write calls of one session."""

    name: Literal["stream"] = "stream"

    def __init__(
        self,
        channel: grpc.Channel,
        *,
        session_token: bytes,
        piece_bytes: int,
        reason_of: Callable[[str, grpc.RpcError], Reason],
    ) -> None:
        """`reason_of` translates a failed call."""
        service = "/cacheservice.v1.CacheService/"
        self._read: Any = channel.unary_stream(
            service + "Read", request_serializer=cache_pb2.ReadRequest.SerializeToString
        )
        self._write: Any = channel.stream_unary(
            service + "Write", response_deserializer=cache_pb2.WriteResponse.FromString
        )
        self._token = session_token
        self._piece_bytes = piece_bytes
        self._reason_of = reason_of

    def write(
        self, shards: Sequence[ReservedWrite], *, watch: Watch, deadline: Deadline
    ) -> list[tuple[int, ...] | Reason]:
        """See `Plane`. All shards travel in one call; when it fails, none is all there."""
        results: list[tuple[int, ...] | Reason] = [Reason.INTERNAL] * len(shards)
        outbox = _Outbox()
        try:
            # Not the blocking form: it waits past its deadline, for ever, when an agent stops taking frames.
            call = self._write.future(outbox, timeout=deadline.left_s())
        except ValueError:  # gRPC's word for a channel that was closed meanwhile
            return [watch.stopped or Reason.AGENT_DOWN] * len(shards)
        call.add_done_callback(lambda _: outbox.close())
        try:
            for frame in self._frames(shards, results, watch):
                if not outbox.put(frame, watch):
                    break
            outbox.end()
            while (response := _answer_within(call, _POLL_S)) is None:
                if not watch.may_go_on():
                    break
        except grpc.RpcError as error:
            reason = watch.stopped or self._reason_of("Write", error)
            return [reason] * len(shards)
        finally:
            outbox.close()
            call.cancel()
        if response is None:
            return [watch.stopped or Reason.INTERNAL] * len(shards)
        sent = sum(
            shard.write.size_bytes
            for shard, result in zip(shards, results, strict=True)
            if isinstance(result, tuple)
        )
        if watch.stopped is None and response.num_bytes < sent:
            _log.error(
                "the agent took %s of %s bytes; nothing of the batch is stored",
                response.num_bytes,
                sent,
            )
            return [Reason.INTERNAL] * len(shards)
        return results

    def read(
        self, lease_id: int, shards: Sequence[LeasedRead], *, watch: Watch, deadline: Deadline
    ) -> list[Reason]:
        """See `Plane`. Asks for whole pieces where they are verified."""
        every = [_IncomingRange(shard, self._piece_bytes) for shard in shards]
        incoming = [r for r in every if r.result is None]
        if not incoming:
            return [r.result or Reason.INTERNAL for r in every]
        request = cache_pb2.ReadRequest(
            session_token=self._token,
            lease_id=lease_id,
            ranges=[
                cache_pb2.ShardRange(position=r.shard.position, start=r.first, stop=r.last)
                for r in incoming
            ],
        )
        try:
            call = self._read(request, timeout=deadline.left_s())
        except ValueError:  # gRPC's word for a channel that was closed meanwhile
            unfinished = watch.stopped or Reason.AGENT_DOWN
            return [unfinished if r.result is None else r.result for r in every]
        try:
            for frame in call:
                if not watch.may_go_on():
                    break
                index, start, content, payload_at = split_read_response(frame)
                incoming[index].take(content, payload_at, start)
            unfinished = watch.stopped or Reason.INTERNAL
        except grpc.RpcError as error:
            unfinished = watch.stopped or self._reason_of("Read", error)
        except (ValueError, IndexError, DecodeError) as error:
            _log.error("the agent sends frames that make no sense: %s", error)
            unfinished = Reason.INTERNAL
        except Exception:  # noqa: BLE001 - the caller's sink may raise anything; the load has then failed
            _log.exception("a page sink failed, its shards are not loaded")
            unfinished = Reason.INTERNAL
        finally:
            call.cancel()
        return [unfinished if r.result is None else r.result for r in every]

    def retire(self) -> None:
        """See `Plane`; the channel is the session's."""

    def _frames(
        self,
        shards: Sequence[ReservedWrite],
        results: list[tuple[int, ...] | Reason],
        watch: Watch,
    ) -> Iterator[bytes]:
        """Frames of all shards, one per piece, noting each shard's checksums. Ends early when there is a reason to.

        For the thread of the call: asks the watch, and reads sources.
        """
        token: bytes | None = self._token
        for index, shard in enumerate(shards):
            checksums = []
            for start in range(0, shard.write.size_bytes, self._piece_bytes):
                if not watch.may_go_on():
                    results[index:] = [watch.stopped or Reason.INTERNAL] * (len(shards) - index)
                    return
                stop = min(start + self._piece_bytes, shard.write.size_bytes)
                header = write_header(token, shard.reservation_id, start, stop - start)
                frame: bytes = _new_bytes(None, len(header) + stop - start)
                address = address_of_bytes(frame)
                ctypes.memmove(address, header, len(header))
                try:
                    shard.write.source.gather(start, stop, address + len(header))
                except Exception:  # noqa: BLE001 - the caller's source may raise anything; the store is then skipped
                    _log.exception(
                        "a page source failed, its shard and those after it are not stored"
                    )
                    return
                checksums.append(piece_checksum(memoryview(frame)[len(header) :]))
                token = None
                yield frame
            results[index] = tuple(checksums)


class _Outbox:
    """Frames on their way from the thread of the call, which gathers them, to the thread with which gRPC sends them.

    Bounded: gathering stays one frame ahead of sending. An iterator for gRPC, `put` and `end` for the call, `close` for
    both.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._is_complete = False
        self._is_closed = False

    def put(self, frame: bytes, watch: Watch) -> bool:
        """Wait for room; False when the call ended or there is a reason to stop, then `frame` is dropped."""
        while True:
            with self._changed:
                if not self._is_closed and self._frames:
                    self._changed.wait(_POLL_S)
                if self._is_closed:
                    return False
                if not self._frames:
                    self._frames.append(frame)
                    self._changed.notify_all()
                    return True
            if not watch.may_go_on():  # not under the lock, since it asks the caller
                return False

    def end(self) -> None:
        """All frames were put."""
        with self._changed:
            self._is_complete = True
            self._changed.notify_all()

    def close(self) -> None:
        """The call is over: nothing is taken and nothing is given any more. Idempotent."""
        with self._changed:
            self._is_closed = True
            self._frames.clear()
            self._changed.notify_all()

    def __iter__(self) -> Iterator[bytes]:
        """See the class."""
        return self

    def __next__(self) -> bytes:
        """The next frame; ends when there is none to come."""
        with self._changed:
            while not (self._frames or self._is_complete or self._is_closed):
                self._changed.wait()
            if not self._frames:
                raise StopIteration
            self._changed.notify_all()
            return self._frames.popleft()


def _answer_within(call: Any, timeout_s: float) -> cache_pb2.WriteResponse | None:
    """The answer of `call`, None when there is none yet; raises RpcError when it failed."""
    try:
        response: cache_pb2.WriteResponse = call.result(timeout=timeout_s)
    except grpc.FutureTimeoutError:
        return None
    return response


class _IncomingRange:
    """Puts the frames of one range together to pieces, verifies them and hands them over."""

    __slots__ = ("_buffer", "_next", "_piece_bytes", "first", "last", "result", "shard")

    def __init__(self, shard: LeasedRead, piece_bytes: int) -> None:
        read = shard.read
        self.shard = shard
        self.first, self.last = read.start, read.stop
        if shard.checksums is not None:
            self.first -= read.start % piece_bytes
            self.last = min(read.size_bytes, -(-read.stop // piece_bytes) * piece_bytes)
        self.result: Reason | None = Reason.HIT if self.first == self.last else None
        self._next = self.first
        self._buffer = bytearray()
        self._piece_bytes = piece_bytes

    def take(self, frame: bytes, payload_at: int, start: int) -> None:
        """Use the bytes of `frame` from `payload_at` on, which are those of the shard from `start` on."""
        num_bytes = len(frame) - payload_at
        if start != self._next + len(self._buffer) or start + num_bytes > self.last:
            raise ValueError(
                f"bytes [{start}, {start + num_bytes}) come where {self._next + len(self._buffer)} is next"
            )
        at = payload_at
        while at < len(frame) and self.result is None:
            piece_stop = min(
                self._next - self._next % self._piece_bytes + self._piece_bytes, self.last
            )
            wanted = piece_stop - self._next - len(self._buffer)
            taken = min(wanted, len(frame) - at)
            if taken == wanted and not self._buffer:
                self._hand_over(frame, at, taken)
            else:
                self._buffer += memoryview(frame)[at : at + taken]
                if taken == wanted:
                    self._hand_over(bytes(self._buffer), 0, len(self._buffer))
                    self._buffer.clear()
            at += taken
        if self.result is not None:
            # Failed: the rest of the range is let pass.
            self._next, self._buffer = start + num_bytes, bytearray()

    def _hand_over(self, content: bytes, at: int, num_bytes: int) -> None:
        """Verify and scatter the piece, or the unverified part of one, that starts at `_next`."""
        start, stop = self._next, self._next + num_bytes
        self._next = stop
        checksums = self.shard.checksums
        if checksums is not None and (
            piece_checksum(memoryview(content)[at : at + num_bytes])
            != checksums[start // self._piece_bytes]
        ):
            self.result = Reason.CHECKSUM
            return
        read = self.shard.read
        wanted = max(start, read.start)
        read.sink.scatter(
            wanted, min(stop, read.stop), address_of_bytes(content) + at + wanted - start
        )
        if stop == self.last:
            self.result = Reason.HIT


def write_header(token: bytes | None, reservation_id: int, start: int, num_bytes: int) -> bytes:
    """All of a serialized `WriteRequest` that comes before its payload of `num_bytes`."""
    header = bytearray()
    if token is not None:
        header += bytes((_WRITE_TOKEN, len(token))) + token
    header.append(_WRITE_RESERVATION)
    _append_varint(header, reservation_id)
    header.append(_WRITE_START)
    _append_varint(header, start)
    header.append(_WRITE_PAYLOAD)
    _append_varint(header, num_bytes)
    return bytes(header)


def split_read_response(frame: bytes) -> tuple[int, int, bytes, int]:
    """`range_index`, `start`, and where the payload is in a serialized `ReadResponse`: bytes, and the first one's
    position.

    Serializers write fields in the order of their numbers, so the payload usually is the end of `frame`; anything
    else goes through protobuf. Raises DecodeError for what is no ReadResponse, IndexError for a cut one.
    """
    index = start = at = 0
    while at < len(frame):
        tag = frame[at]
        value, at = _read_varint(frame, at + 1)
        if tag == _READ_RANGE_INDEX:
            index = value
        elif tag == _READ_START:
            start = value
        elif tag == _READ_PAYLOAD and at + value == len(frame):
            return index, start, frame, at
        else:
            break
    message = cache_pb2.ReadResponse.FromString(frame)
    return message.range_index, message.start, message.payload, 0


def _append_varint(target: bytearray, value: int) -> None:
    while value > 0x7F:
        target.append(value & 0x7F | 0x80)
        value >>= 7
    target.append(value)


def _read_varint(frame: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80 or shift > 63:
            return value, at
        shift += 7
