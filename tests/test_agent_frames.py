"""Frames made and taken apart by hand are those that protobuf makes and takes apart."""

from __future__ import annotations

import ctypes

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cacheservice.agent.frames import build_read_frame, split_write_frame
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
