"""Copies between the caller's memory and the arena, piece by piece, with one xxh3 per piece.

A piece is hashed next to its copy, while it is in cache: one pass over DRAM instead of two (0.88–0.91 of plain memcpy
instead of 0.76, measured). Copying (ctypes) and hashing both release the GIL. Bytes are hashed where they will be
read, so a checksum also covers the copy. Called by both data planes; knows nothing of sessions or leases.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest

from cacheservice.client.values import PageSink, PageSource

Buffer: TypeAlias = Any
"""bytes, bytearray, mmap, memoryview: whatever has one contiguous C buffer."""

_address_of_bytes = ctypes.pythonapi.PyBytes_AsString
_address_of_bytes.restype = ctypes.c_void_p
_address_of_bytes.argtypes = [ctypes.py_object]

piece_checksum = xxh3_64_intdigest
"""xxh3-64, seed 0, of one piece."""


class MemorySource:
    """A shard, or its part from byte `origin` on, in plain memory. Keeps the buffer alive. Thread-safe."""

    __slots__ = ("_address", "_buffer", "_num_bytes", "_origin")

    def __init__(self, buffer: Buffer, *, origin: int = 0) -> None:
        """Refer to `buffer`; nothing is copied, so it must not change before the store ends."""
        self._buffer, self._address, self._num_bytes = _pin(buffer)
        self._origin = origin

    def gather(self, start: int, stop: int, destination: int) -> None:
        """See `PageSource`."""
        first = start - self._origin
        if not 0 <= first <= stop - self._origin <= self._num_bytes:
            raise ValueError(f"bytes [{start}, {stop}) of the shard are outside the source")
        ctypes.memmove(destination, self._address + first, stop - start)


class MemorySink:
    """Room for a shard, or for its part from byte `origin` on, in writable memory. Keeps the buffer alive."""

    __slots__ = ("_address", "_buffer", "_num_bytes", "_origin")

    def __init__(self, buffer: Buffer, *, origin: int = 0) -> None:
        """Refer to `buffer`; its content is worthless until the retrieve has answered HIT."""
        if memoryview(buffer).readonly:
            raise ValueError("a sink needs writable memory")
        self._buffer, self._address, self._num_bytes = _pin(buffer)
        self._origin = origin

    def scatter(self, start: int, stop: int, source: int) -> None:
        """See `PageSink`."""
        first = start - self._origin
        if not 0 <= first <= stop - self._origin <= self._num_bytes:
            raise ValueError(f"bytes [{start}, {stop}) of the shard are outside the sink")
        ctypes.memmove(self._address + first, source, stop - start)


def gather_pieces(
    source: PageSource,
    num_bytes: int,
    *,
    address: int,
    view: memoryview,
    piece_bytes: int,
    may_go_on: Callable[[], bool],
) -> list[int] | None:
    """Copy a whole shard to `address`, which `view` also shows; return its piece checksums.

    `may_go_on` is asked before every piece; None when it said no: what was written so far is to be abandoned.
    """
    checksums = []
    gather = source.gather
    for start in range(0, num_bytes, piece_bytes):
        if not may_go_on():
            return None
        stop = min(start + piece_bytes, num_bytes)
        gather(start, stop, address + start)
        checksums.append(xxh3_64_intdigest(view[start:stop]))
    return checksums


def scatter_pieces(
    sink: PageSink,
    start: int,
    stop: int,
    *,
    address: int,
    view: memoryview,
    piece_bytes: int,
    checksums: Sequence[int] | None,
    may_go_on: Callable[[], bool],
) -> bool | None:
    """Verify each piece that [start, stop) touches, then hand over its wanted part.

    `address` and `view` show the whole shard; `checksums` has one entry per piece of it, None = trust the bytes.
    Returns False when a piece is not what its writer wrote (it and all later ones were not handed over), None when
    `may_go_on` said no, True when all was handed over.
    """
    shard_bytes = len(view)
    scatter = sink.scatter
    first = start - start % piece_bytes
    for piece_start in range(first, stop, piece_bytes):
        if not may_go_on():
            return None
        piece_stop = min(piece_start + piece_bytes, shard_bytes)
        if (
            checksums is not None
            and xxh3_64_intdigest(view[piece_start:piece_stop])
            != checksums[piece_start // piece_bytes]
        ):
            return False
        wanted = max(start, piece_start)
        scatter(wanted, min(stop, piece_stop), address + wanted)
    return True


def address_of_bytes(content: bytes) -> int:
    """Address of the first byte; valid while the caller keeps `content`."""
    address: int = _address_of_bytes(content)
    return address


def _pin(buffer: Buffer) -> tuple[object, int, int]:
    """Something that keeps the memory in place, its address and its length."""
    view = memoryview(buffer).cast("B")
    if not len(view):
        return buffer, 0, 0
    if not view.readonly:
        exported = (ctypes.c_char * len(view)).from_buffer(view)
        return exported, ctypes.addressof(exported), len(view)
    if not isinstance(buffer, bytes):
        buffer = bytes(view)  # ctypes has no address for other read-only memory
    return buffer, _address_of_bytes(buffer), len(buffer)
