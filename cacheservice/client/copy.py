"""Copies between the caller's memory and the arena, piece by piece, with one xxh3 per piece.

A piece is hashed next to its copy, while it is in cache: one pass over DRAM instead of two (0.88–0.91 of plain memcpy
instead of 0.76 on an EPYC, 0.73 instead of 0.67 on an older Xeon, measured). Copying (ctypes) and hashing both
release the GIL, and one core alone can't saturate the memory, so a spare thread takes every other piece of a large
call. Bytes are hashed where they will be read, so a checksum also covers the copy. Called by both data planes; knows
nothing of sessions or leases.
"""

from __future__ import annotations

import ctypes
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeAlias

from xxhash import xxh3_64_intdigest

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
        """See `values.PageSource`."""
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
        """See `values.PageSink`."""
        first = start - self._origin
        if not 0 <= first <= stop - self._origin <= self._num_bytes:
            raise ValueError(f"bytes [{start}, {stop}) of the shard are outside the sink")
        ctypes.memmove(self._address + first, source, stop - start)


class SpareThread:
    """A thread that helps one call at a time; a second call that comes meanwhile works alone. Thread-safe.

    Two are enough: a server's cores are the engine's, and two cores copy and hash about as fast as memory allows.
    """

    def __init__(self, name: str) -> None:
        """Start nothing before the first `share`."""
        self._name = name
        self._is_free = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def share(self, work: Callable[[], None], spare_work: Callable[[], None]) -> None:
        """Run `work` here and, if the thread is free, `spare_work` there; return when both have ended.

        Neither may raise. `spare_work` may not run at all, so `work` alone must suffice.
        """
        if not self._is_free.acquire(blocking=False):
            work()
            return
        try:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            job = _Job(spare_work)
            self._jobs.put(job)
            try:
                work()
            finally:
                job.take_back_or_wait()
        finally:
            self._is_free.release()

    def stop(self) -> None:
        """Let the thread end after what it does now. Does not wait; `share` must not be called any more."""
        self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()


class _Job:
    """Work that either its giver takes back or the spare thread runs, never both."""

    __slots__ = ("_claim", "_end", "_work")

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._claim = threading.Lock()
        self._end = threading.Event()

    def run(self) -> None:
        if self._claim.acquire(blocking=False):
            try:
                self._work()
            finally:
                self._end.set()

    def take_back_or_wait(self) -> None:
        if not self._claim.acquire(blocking=False):
            self._end.wait()


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
