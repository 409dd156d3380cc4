"""Messages made and taken apart by hand: frames of Read and Write (one copy of each byte instead of three), and the
keys of a lookup (a quarter of protobuf's time for the list).

The format is that of proto/cacheservice/v1/cache.proto; what does not look the way serializers write it goes through
protobuf. Called by `byte_streams.py` and `service.py`; the client's side is `client/stream.py` and
`client/lookup_request.py`.
"""

from __future__ import annotations

import ctypes
import struct
from itertools import chain
from typing import NamedTuple

from google.protobuf.message import DecodeError

from cacheservice.agent.messages import MAX_KEYS, check_count
from cacheservice.core.keys import DIGEST_BYTES, ChunkKey
from cacheservice.errors import InvalidRequest
from cacheservice.v1 import cache_pb2

# Field number << 3 | wire type.
_WRITE_TOKEN, _WRITE_RESERVATION, _WRITE_START, _WRITE_PAYLOAD = 0x0A, 0x10, 0x18, 0x22
_LOOKUP_TOKEN, _LOOKUP_NAMESPACE, _LOOKUP_KEY = 0x0A, 0x12, 0x1A
_READ_RANGE_INDEX, _READ_START, _READ_PAYLOAD = 0x08, 0x10, 0x1A

_TOKEN_BYTES = 16
_NAMESPACE_AT = 2 + _TOKEN_BYTES
_KEYS_AT = _NAMESPACE_AT + 2 + DIGEST_BYTES
_KEY_BYTES = 2 + DIGEST_BYTES
_KEY = struct.Struct(f"2x{DIGEST_BYTES}s")
_KEYS_PER_BLOCK = 64
_BLOCK_OF_KEYS = struct.Struct(_KEY.format * _KEYS_PER_BLOCK)

# CPython allows to fill a bytes object that nobody else has seen yet (C API, PyBytes_FromStringAndSize).
_new_bytes = ctypes.pythonapi.PyBytes_FromStringAndSize
_new_bytes.restype = ctypes.py_object
_new_bytes.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t]
_address_of = ctypes.pythonapi.PyBytes_AsString
_address_of.restype = ctypes.c_void_p
_address_of.argtypes = [ctypes.py_object]


class WriteFrame(NamedTuple):
    """One frame of a Write; the payload is `content` from `payload_at` to its end."""

    session_token: bytes
    reservation_id: int
    start: int
    content: bytes
    payload_at: int

    @property
    def payload(self) -> memoryview:
        """The bytes that it brings."""
        return memoryview(self.content)[self.payload_at :]

    def copy_to(self, address: int) -> None:
        """Copy the payload, without the interpreter's lock."""
        source = _address_of(self.content) + self.payload_at
        ctypes.memmove(address, source, len(self.content) - self.payload_at)


def build_read_frame(range_index: int, start: int, address: int, num_bytes: int) -> bytes:
    """A serialized `ReadResponse` with the bytes at `address`, copied once, without the interpreter's lock."""
    header = bytearray()
    for tag, value in (
        (_READ_RANGE_INDEX, range_index),
        (_READ_START, start),
        (_READ_PAYLOAD, num_bytes),
    ):
        header.append(tag)
        while value > 0x7F:
            header.append(value & 0x7F | 0x80)
            value >>= 7
        header.append(value)
    frame: bytes = _new_bytes(None, len(header) + num_bytes)
    target = _address_of(frame)
    ctypes.memmove(target, bytes(header), len(header))
    ctypes.memmove(target + len(header), address, num_bytes)
    return frame


def split_write_frame(frame: bytes) -> WriteFrame:
    """Take a serialized `WriteRequest` apart without copying its payload. InvalidRequest for what is none."""
    token = b""
    reservation_id = start = at = 0
    try:
        while at < len(frame):
            tag = frame[at]
            value, at = _read_varint(frame, at + 1)
            if tag == _WRITE_TOKEN and value <= 64:
                token = frame[at : at + value]
                at += value
            elif tag == _WRITE_RESERVATION:
                reservation_id = value
            elif tag == _WRITE_START:
                start = value
            elif tag == _WRITE_PAYLOAD and at + value == len(frame):
                return WriteFrame(token, reservation_id, start, frame, at)
            else:
                break
    except IndexError:
        pass  # cut short: protobuf says so below
    try:
        message = cache_pb2.WriteRequest.FromString(frame)
    except DecodeError as error:
        raise InvalidRequest(
            "a frame of Write can't be parsed: it is truncated, garbled or of another contract; send WriteRequest of "
            "cacheservice.v1"
        ) from error
    return WriteFrame(
        message.session_token, message.reservation_id, message.start, message.payload, 0
    )


def split_lookup(frame: bytes) -> tuple[cache_pb2.LookupRequest, list[ChunkKey]]:
    """A serialized `LookupRequest` and its first keys, of the right length and no more than are allowed. Keys that are
    not written as usual stay in the message, after those. InvalidRequest for what is none.
    """
    keys: list[ChunkKey] = []
    rest = frame
    if (
        frame[:2] == bytes((_LOOKUP_TOKEN, _TOKEN_BYTES))
        and frame[_NAMESPACE_AT : _NAMESPACE_AT + 2] == bytes((_LOOKUP_NAMESPACE, DIGEST_BYTES))
    ):  # fmt: skip
        # As long as each 34 bytes begin with the same tag and length they are one key each, whatever is in them.
        tags, lengths = frame[_KEYS_AT::_KEY_BYTES], frame[_KEYS_AT + 1 :: _KEY_BYTES]
        num_keys = min(
            len(tags) - len(tags.lstrip(bytes((_LOOKUP_KEY,)))),
            len(lengths) - len(lengths.lstrip(bytes((DIGEST_BYTES,)))),
            max(0, len(frame) - _KEYS_AT) // _KEY_BYTES,
        )
        check_count("chunk_keys", num_keys, MAX_KEYS)
        stop = _KEYS_AT + num_keys * _KEY_BYTES
        middle = stop - num_keys % _KEYS_PER_BLOCK * _KEY_BYTES
        blocks = _BLOCK_OF_KEYS.iter_unpack(frame[_KEYS_AT:middle])
        keys = list(
            chain(
                chain.from_iterable(blocks),
                chain.from_iterable(_KEY.iter_unpack(frame[middle:stop])),
            )
        )
        rest = frame[:_KEYS_AT] + frame[stop:]
    try:
        return cache_pb2.LookupRequest.FromString(rest), keys
    except DecodeError as error:
        raise InvalidRequest(
            "the message to Lookup can't be parsed: it is truncated, garbled or of another contract; send "
            "LookupRequest of cacheservice.v1"
        ) from error


def _read_varint(frame: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = frame[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & (2**64 - 1), at
        shift += 7
        if shift > 63:
            raise IndexError(at)
