"""Frames made and taken apart by hand are those that protobuf makes and takes apart."""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from cacheservice.agent.frames import build_read_frame, split_lookup, split_write_frame
from cacheservice.client.lookup_request import build_lookup
from cacheservice.core.keys import NamespaceDigest
from cacheservice.errors import InvalidRequest
from cacheservice.v1 import cache_pb2

U64 = st.integers(0, 2**64 - 1)


@given(st.integers(0, 2**32 - 1), U64, st.binary(max_size=300))
def test_read_frames_parse_as_protobuf(index: int, start: int, payload: bytes) -> None:
    buffer = ctypes.create_string_buffer(payload, len(payload) + 1)
    frame = build_read_frame(index, start, ctypes.addressof(buffer), len(payload))
    message = cache_pb2.ReadResponse.FromString(frame)
    assert (message.range_index, message.start, message.payload) == (index, start, payload)


@given(st.binary(max_size=100), U64, U64, st.binary(max_size=300))
def test_write_frames_of_protobuf_are_understood(
    token: bytes, reservation: int, start: int, payload: bytes
) -> None:
    message = cache_pb2.WriteRequest(
        session_token=token, reservation_id=reservation, start=start, payload=payload
    )
    frame = split_write_frame(message.SerializeToString())
    assert (frame.session_token, frame.reservation_id, frame.start) == (token, reservation, start)
    assert bytes(frame.payload) == payload
    room = ctypes.create_string_buffer(len(payload) + 1)
    frame.copy_to(ctypes.addressof(room))
    assert room.raw[: len(payload)] == payload


@given(st.binary(max_size=100))
def test_garbage_is_what_protobuf_says_or_refused(garbage: bytes) -> None:
    try:
        message = cache_pb2.WriteRequest.FromString(garbage)
    except Exception:
        with pytest.raises(InvalidRequest, match="can't be parsed"):
            split_write_frame(garbage)
        return
    frame = split_write_frame(garbage)
    assert (frame.session_token, frame.reservation_id, frame.start, bytes(frame.payload)) == (
        message.session_token, message.reservation_id, message.start, message.payload,
    )  # fmt: skip


def lookup_message(num_keys: int, **fields: Any) -> cache_pb2.LookupRequest:
    keys = [hashlib.sha256(i.to_bytes(8, "little")).digest() for i in range(num_keys)]
    return cache_pb2.LookupRequest(
        session_token=b"t" * 16, namespace_digest=b"n" * 32, chunk_keys=keys, **fields
    )


@pytest.mark.parametrize("num_keys", [0, 1, 63, 64, 65, 256, 4096])
def test_lookup_is_taken_apart_as_protobuf_does(num_keys: int) -> None:
    whole = lookup_message(num_keys, take_lease=True, superseded_lease_id=2**63)
    serialized = whole.SerializeToString()
    message, keys = split_lookup(serialized)
    assert keys == list(whole.chunk_keys)
    assert not message.chunk_keys
    message.chunk_keys.extend(keys)
    assert message == whole
    rest = cache_pb2.LookupRequest(take_lease=True, superseded_lease_id=2**63)
    built = build_lookup(b"t" * 16, NamespaceDigest(b"n" * 32), keys, rest)
    assert built == serialized


def test_lookup_with_more_keys_than_allowed_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="chunk_keys has 4097"):
        split_lookup(lookup_message(4097).SerializeToString())


@given(st.integers(0, 70), st.data())
def test_lookup_that_is_garbled_is_what_protobuf_says_or_refused(num_keys: int, draws: Any) -> None:
    serialized = bytearray(lookup_message(num_keys, take_lease=True).SerializeToString())
    for _ in range(draws.draw(st.integers(0, 3))):
        at = draws.draw(st.integers(0, len(serialized) - 1))
        serialized[at] = draws.draw(st.sampled_from([0, 0x0A, 0x12, 0x1A, 0x20, 0x1F, 0xFF]))
    garbled = bytes(serialized[: draws.draw(st.integers(0, len(serialized)))])
    try:
        whole = cache_pb2.LookupRequest.FromString(garbled)
    except DecodeError:
        with pytest.raises(InvalidRequest):
            split_lookup(garbled)
        return
    message, keys = split_lookup(garbled)
    assert [*keys, *message.chunk_keys] == list(whole.chunk_keys)
    del message.chunk_keys[:], whole.chunk_keys[:]
    assert message == whole
