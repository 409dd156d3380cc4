"""Copies between pages in GPU memory and the cache: a lane gathers rows of pages into its slab on the GPU, and the slab
crosses PCIe in one transfer; loads go the other way.

Invariants. No page is read or written before the fence: the lane's stream waits for the event that the engine's thread
recorded, so nothing waits in that thread and nothing is queued on its stream. When a gather or scatter returns, or
raises, all that it queued is done: bytes are in place, no transfer touches pages, arena or frames any more. Host memory
of a slot is written again only after the transfers that read it. Staging memory is allocated once: so many lanes, each
a slab and two slots. No error of CUDA leaves this module towards vLLM: `fence` keeps it for the copies, where it
becomes a failed load or a dropped save.

The arena is registered with the driver (cuda_arenas.py). What is not (not yet, refused, or frames of the stream plane)
goes through pinned slots.

Called by: worker.py through copies.py; the client's threads. The GPU itself is behind the port `Gpu`: cuda_device.py
is the real one, tests have one that does what is queued as late, or as wrongly, as the queued order allows.
"""

from __future__ import annotations

import ctypes
import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from cacheservice.client.values import MappedArena
from cacheservice.connector.cuda_arenas import RegisteredArenas, Registrar
from cacheservice.connector.cuda_rows import PageTable, Rows
from cacheservice.connector.pages import ShardLayout
from cacheservice.errors import LarderError

logger = logging.getLogger(__name__)

KIB, MIB = 1 << 10, 1 << 20

NUM_SLOTS = 2
SPAN_BYTES = 4 * MIB
"""What the client is asked to copy at once. It makes spans of less than twice that, so one transfer each; the host's
work for one is some tens of microseconds, whatever its length."""
ROW_BYTES = 8


@dataclass(frozen=True, slots=True)
class Staging:
    """How much staging memory one rank has; allocated once, at the start."""

    num_lanes: int = 8
    """Copies at a time: the worker's four loading and two saving threads, and a spare one of the client's plane."""
    slab_bytes: int = 8 * MIB
    """On the GPU, per lane: the longest transfer from or to registered memory. A multiple of `bounce_bytes`."""
    bounce_bytes: int = MIB
    """Pinned, per slot: the longest transfer from or to other memory. A power of two."""
    max_rows: int = 16 * KIB
    """Rows of one transfer: pages of units of 16 bytes or more travel in transfers of 256 KiB or more."""

    @property
    def device_bytes(self) -> int:
        """Memory on the GPU: 65 MiB."""
        return self.num_lanes * (self.slab_bytes + self.max_rows * ROW_BYTES)

    @property
    def host_bytes(self) -> int:
        """Pinned memory: 18 MiB."""
        return self.num_lanes * NUM_SLOTS * (self.bounce_bytes + self.max_rows * ROW_BYTES)


class GpuEvent(Protocol):
    """A moment on a stream; opaque but to the GPU that made it."""


class Lane(Protocol):
    """A stream of our own, at the lowest priority, with staging memory of its own. One thread at a time.

    `with lane:` makes its stream the thread's. The operations are queued: they are done in their order, after they
    returned, unless `wait` or `drain` says otherwise.
    """

    rows: Sequence[NDArray[np.int64]]
    """Per slot: room for `max_rows` row numbers in pinned memory."""
    bounces: Sequence[int]
    """Per slot: address of `bounce_bytes` of pinned memory."""

    def __enter__(self) -> object:
        """Queue from this thread."""

    def __exit__(self, *failure: object) -> None:
        """Leave the thread's stream as it was."""

    def after(self, event: GpuEvent) -> None:
        """Let what is queued from now on start after `event`."""

    def take_rows(self, slot: int, num_rows: int) -> None:
        """Send the first row numbers of a slot to the GPU."""

    def gather(self, num_rows: int, grain: int) -> None:
        """Slab[i * grain …] = pages[row i * grain …], `grain` bytes each, for the rows taken last."""

    def scatter(self, num_rows: int, grain: int) -> None:
        """Pages[row i * grain …] = slab[i * grain …]."""

    def to_host(self, num_bytes: int, address: int) -> None:
        """Copy the first bytes of the slab to host memory."""

    def from_host(self, num_bytes: int, address: int) -> None:
        """Copy host memory to the first bytes of the slab."""

    def mark(self, slot: int) -> None:
        """Remember this point of the stream as the slot's."""

    def wait(self, slot: int) -> None:
        """Block until the slot's point is reached, without the GIL and without spinning."""

    def drain(self) -> None:
        """Block until all that was queued here is done."""


class Gpu(Registrar, Protocol):
    """The device with the pages of one rank. Every method may raise what the CUDA library raises."""

    first_byte: int
    """Address of the allocation that holds all pages."""
    num_bytes: int

    def record(self) -> GpuEvent:
        """The present end of the calling thread's stream, that is of the engine's."""

    def open_lanes(self, staging: Staging) -> Sequence[Lane]:
        """New lanes, and all their memory."""


class CopyFailed(LarderError):
    """CUDA refused or failed; the shard is neither stored nor loaded."""


@dataclass(frozen=True, slots=True)
class CudaFence:
    """See `Copier.fence`."""

    event: GpuEvent | None
    problem: str = ""
    """Why there is no event."""


class CudaCopier:
    """The copier for pages on one GPU. Thread-safe, but for `fence`, which is for the engine's thread."""

    span_bytes = SPAN_BYTES

    def __init__(self, gpu: Gpu, staging: Staging = Staging()) -> None:
        """Allocate all staging memory; raises what the CUDA library raises when there is none."""
        self._gpu = gpu
        self._staging = staging
        self._lanes: queue.LifoQueue[Lane] = queue.LifoQueue()
        lanes = gpu.open_lanes(staging)
        _warm_up(lanes[0], min(gpu.num_bytes, staging.slab_bytes), staging.max_rows)
        for lane in lanes:
            self._lanes.put(lane)
        self._tables: WeakKeyDictionary[ShardLayout, PageTable] = WeakKeyDictionary()
        self._problem = ""
        self._noted = ""
        self._arenas = RegisteredArenas(gpu)

    @property
    def arena_user(self) -> CudaCopier:
        """Itself: it registers the arena."""
        return self

    def arena_mapped(self, arena: MappedArena) -> None:
        """See `ArenaUser`."""
        self._arenas.add(arena)

    def arena_unmapping(self, arena: MappedArena) -> None:
        """See `ArenaUser`."""
        self._arenas.remove(arena)

    def fence(self) -> CudaFence:
        """See `Copier`. Never raises."""
        try:
            self._arenas.begin()
            return CudaFence(self._gpu.record())
        except Exception as error:  # noqa: BLE001 - in vLLM's thread: the copies behind this fence fail instead
            self._note(f"no event on the engine's stream: {error}")
            return CudaFence(None, str(error))

    def runs(
        self, layout: ShardLayout, blocks: Sequence[int], *, after: CudaFence, first_byte: int = 0
    ) -> CudaRuns:
        """See `Copier`. Raises IndexError for a block that the pages do not have."""
        table = self._tables.get(layout)
        if table is None:
            table = self._tables[layout] = self._table_of(layout)
        return CudaRuns(self, table, table.checked(blocks), after, first_byte)

    def _table_of(self, layout: ShardLayout) -> PageTable:
        gpu = self._gpu
        return PageTable(layout, gpu.first_byte, gpu.num_bytes, self._staging.bounce_bytes)

    def close(self) -> None:
        """See `Copier`. The memory goes with the last reference to it."""
        self._arenas.close()

    def copy_out(self, rows: Rows, destination: int, after: CudaFence) -> None:
        """Pages to host memory. Returns when the bytes are there."""
        with self._lane(after) as lane:
            landing: list[tuple[int, int] | None] = [None] * NUM_SLOTS

            def settle(slot: int) -> None:
                lane.wait(slot)
                if (waiting := landing[slot]) is not None:
                    ctypes.memmove(waiting[0], lane.bounces[slot], waiting[1])
                    landing[slot] = None

            used = 0
            for at, num_bytes, is_direct in self._parts(rows, destination):
                slot = used % NUM_SLOTS
                if used >= NUM_SLOTS:
                    settle(slot)
                used += 1
                num_rows = rows.write(at, num_bytes, lane.rows[slot])
                lane.take_rows(slot, num_rows)
                lane.gather(num_rows, rows.grain)
                if is_direct:
                    lane.to_host(num_bytes, destination + at)
                else:
                    lane.to_host(num_bytes, lane.bounces[slot])
                    landing[slot] = (destination + at, num_bytes)
                lane.mark(slot)
            for slot in range(min(used, NUM_SLOTS)):
                settle(slot)

    def copy_in(self, rows: Rows, source: int, after: CudaFence) -> None:
        """Host memory to pages. Returns when the bytes are there."""
        with self._lane(after) as lane:
            used = 0
            for at, num_bytes, is_direct in self._parts(rows, source):
                slot = used % NUM_SLOTS
                if used >= NUM_SLOTS:
                    lane.wait(slot)
                used += 1
                num_rows = rows.write(at, num_bytes, lane.rows[slot])
                if not is_direct:
                    ctypes.memmove(lane.bounces[slot], source + at, num_bytes)
                lane.from_host(num_bytes, source + at if is_direct else lane.bounces[slot])
                lane.take_rows(slot, num_rows)
                lane.scatter(num_rows, rows.grain)
                lane.mark(slot)
            for slot in range(min(used, NUM_SLOTS)):
                lane.wait(slot)

    @contextmanager
    def _lane(self, after: CudaFence) -> Iterator[Lane]:
        """A lane whose next operations start after the fence; nothing is left in it afterwards."""
        if after.event is None:
            raise CopyFailed(f"the engine's work could not be waited for: {after.problem}")
        lane = self._lanes.get()
        try:
            if self._problem:
                raise CopyFailed(f"CUDA failed before: {self._problem}")
            with lane:
                try:
                    lane.after(after.event)
                    yield lane
                except BaseException:
                    # Nothing may be written late: not to pages that the engine gives to another request, nor to an
                    # extent that the agent gives to another shard.
                    self._drain(lane)
                    raise
        finally:
            self._lanes.put(lane)

    def _drain(self, lane: Lane) -> None:
        try:
            lane.drain()
        except Exception as error:  # noqa: BLE001 - whatever CUDA's library raises
            # An error that stays: the device does nothing more for this process, so nothing is written late either.
            self._note(str(error))
            self._problem = str(error)

    def _note(self, problem: str) -> None:
        """Say it once."""
        if problem != self._noted:
            self._noted = problem
            logger.error(
                "copying between GPU and cache failed, the engine computes instead: %s", problem
            )

    def _parts(self, rows: Rows, address: int) -> Iterator[tuple[int, int, bool]]:
        """(first byte, length, whether the host memory is registered) of each transfer, none much shorter than others.

        A transfer stays within one registration: CUDA does not promise more.
        """
        grain = rows.grain
        at = 0
        while at < rows.num_bytes:
            left = rows.num_bytes - at
            direct = min(left, self._arenas.reach(address + at)) // grain * grain
            stretch = direct or left
            room = self._staging.slab_bytes if direct else self._staging.bounce_bytes
            limit = min(room, self._staging.max_rows * grain)
            number = -(-stretch // limit)
            length = min(stretch, -(-stretch // (number * grain)) * grain)
            yield at, length, bool(direct)
            at += length


def _warm_up(lane: Lane, num_bytes: int, max_rows: int) -> None:
    """Load the kernels now: CUDA loads them when they are first used, and may stop the device for that.

    Writes the first rows of the pages, of `num_bytes` at most, with themselves, while the engine starts; as many as
    make torch choose the kernels that copies will use. On a thread of its own, since a lane changes its thread's CUDA
    settings; raises what came up there.
    """
    grain = KIB if num_bytes >= KIB else ROW_BYTES
    num_rows = min(64, max_rows, num_bytes // grain)
    failures: list[Exception] = []

    def run() -> None:
        try:
            with lane:
                lane.rows[0][:num_rows] = np.arange(num_rows)
                lane.take_rows(0, num_rows)
                lane.gather(num_rows, grain)
                lane.scatter(num_rows, grain)
                lane.mark(0)
                lane.wait(0)
        except Exception as failure:  # noqa: BLE001 - raised below, in the thread that asked
            failures.append(failure)

    thread = threading.Thread(target=run, name="larder-warm-up")
    thread.start()
    thread.join()
    if failures:
        raise failures[0]


class CudaRuns:
    """A shard's bytes in GPU memory, as source and as sink of the client; see `copies.PageRuns` for the arguments."""

    __slots__ = ("_after", "_blocks", "_copier", "_first_byte", "_table")

    def __init__(
        self,
        copier: CudaCopier,
        table: PageTable,
        blocks: NDArray[np.int64],
        after: CudaFence,
        first_byte: int,
    ) -> None:
        self._copier = copier
        self._table = table
        self._blocks = blocks
        self._after = after
        self._first_byte = first_byte

    def gather(self, start: int, stop: int, destination: int) -> None:
        """Copy bytes [start, stop) of the shard from the pages to `destination`; they are there on return."""
        self._copier.copy_out(self._rows(start, stop), destination, self._after)

    def scatter(self, start: int, stop: int, source: int) -> None:
        """Copy bytes [start, stop) of the shard from `source` into the pages; they are there on return."""
        self._copier.copy_in(self._rows(start, stop), source, self._after)

    def _rows(self, start: int, stop: int) -> Rows:
        return self._table.rows(self._blocks, start - self._first_byte, stop - self._first_byte)
