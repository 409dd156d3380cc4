"""The GPU of one rank through torch: streams, events, row copies, transfers, registration of host memory.

Everything here goes to streams of our own. The engine's stream is named once, to record an event on it; the device is
never synchronised. Rows are moved by torch's index_select and index_copy_ over the one allocation that vLLM keeps
all pages in (vLLM 0.32, v1/worker/utils.py `allocate_kv_cache`), seen as a table of equal rows.

Called by: copies.py (cuda_copier); cuda_copies.py alone uses what it makes. Not run by anything without a GPU, but for
`row_table`, `gather_rows` and `scatter_rows`, which do the same on CPU tensors in tests.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray

from cacheservice.connector.cuda_copies import (
    MIB,
    NUM_SLOTS,
    CudaCopier,
    GpuEvent,
    Staging,
)
from cacheservice.errors import UncacheableError

_HOST_REGISTER_PORTABLE = 1
_HOST_REGISTER_MAPPED = 2
_CAPTURE_MODE_RELAXED = 2
_LOWEST_PRIORITY = 0
"""CUDA counts priorities from 0, the lowest and the default, downwards; there is none below the engine's."""


def cuda_copier(views: Sequence[Any]) -> CudaCopier:
    """The copier for these views of pages in GPU memory; raises UncacheableError when it can't be had."""
    staging = Staging()
    try:
        return CudaCopier(TorchGpu(views), staging)
    except RuntimeError as error:  # torch's CUDA errors, out of memory among them
        raise UncacheableError(
            f"copying between GPU and cache can't be prepared ({error}). It needs {staging.device_bytes // MIB} MiB "
            f"on the GPU and {staging.host_bytes // MIB} MiB of pinned memory: lower --gpu-memory-utilization a "
            "little, or raise the pod's memory limit"
        ) from error


def row_table(storage: Any, device: Any, grain: int) -> Any:
    """All of `storage` as [rows, words], `grain` bytes a row; what does not fill a row at its end is left out."""
    dtype, word_bytes = (torch.int64, 8) if grain % 8 == 0 else (torch.uint8, 1)
    words = grain // word_bytes
    shape = (storage.nbytes() // grain, words)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, (words, 1))


def gather_rows(table: Any, rows: Any, slab: Any) -> None:
    """Copy rows of `table` to the beginning of `slab` (uint8, contiguous), in the order of `rows` (int64)."""
    torch.index_select(table, 0, rows, out=_rows_of(slab, table, len(rows)))


def scatter_rows(table: Any, rows: Any, slab: Any) -> None:
    """Copy the beginning of `slab` to rows of `table`; no row is named twice."""
    table.index_copy_(0, rows, _rows_of(slab, table, len(rows)))


def _rows_of(slab: Any, table: Any, num_rows: int) -> Any:
    words = table.shape[1]
    num_bytes = num_rows * words * table.element_size()
    return slab[:num_bytes].view(table.dtype).view(num_rows, words)


class TorchGpu:
    """See `cuda_copies.Gpu`."""

    def __init__(self, views: Sequence[Any]) -> None:
        """Look at the allocation of these views, all of one rank. Raises UncacheableError when they lie in several."""
        storages = {view.untyped_storage().data_ptr(): view.untyped_storage() for view in views}
        if len(storages) != 1:
            raise UncacheableError(
                f"the KV cache lies in {len(storages)} allocations on the GPU, and this version copies from one only "
                "(vLLM 0.32 makes one for every model): please report the model"
            )
        self._storage = next(iter(storages.values()))
        self.first_byte: int = self._storage.data_ptr()
        self.num_bytes: int = self._storage.nbytes()
        self.device = views[0].device
        self._tables: dict[int, Any] = {}
        self._threads = threading.local()

    def record(self) -> GpuEvent:
        """See `Gpu`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event  # type: ignore[no-any-return]

    def open_lanes(self, staging: Staging) -> Sequence[TorchLane]:
        """See `Gpu`. One allocation for all: the allocator would round each slab up to 20 MiB."""
        lanes = staging.num_lanes
        slabs = torch.empty(lanes, staging.slab_bytes, dtype=torch.uint8, device=self.device)
        rows = torch.empty(lanes, staging.max_rows, dtype=torch.int64, device=self.device)
        slots = (lanes, NUM_SLOTS)
        pinned_rows = torch.empty(*slots, staging.max_rows, dtype=torch.int64, pin_memory=True)
        bounces = torch.empty(*slots, staging.bounce_bytes, dtype=torch.uint8, pin_memory=True)
        return [
            TorchLane(self, slabs[i], rows[i], pinned_rows[i], bounces[i]) for i in range(lanes)
        ]

    def register(self, address: int, num_bytes: int) -> None:
        """See `Gpu`. A refusal leaves an error in this thread's CUDA state, so the thread should end after it."""
        self.prepare_thread()
        flags = _HOST_REGISTER_PORTABLE | _HOST_REGISTER_MAPPED
        _demand(torch.cuda.cudart().cudaHostRegister(address, num_bytes, flags), "cudaHostRegister")

    def unregister(self, address: int) -> None:
        """See `Gpu`."""
        self.prepare_thread()
        _demand(torch.cuda.cudart().cudaHostUnregister(address), "cudaHostUnregister")

    def table(self, grain: int) -> Any:
        """The pages as rows of `grain` bytes."""
        found = self._tables.get(grain)
        if found is None:
            found = self._tables[grain] = row_table(self._storage, self.device, grain)
        return found

    def prepare_thread(self) -> None:
        """Once per thread: use this rank's device, and let no graph capture of the engine be spoilt by our calls.

        A new thread begins on device 0, where a call would make a context of some hundred MB. While any thread
        captures in CUDA's global mode, as vLLM does, calls of other threads that might synchronise fail and break the
        capture, unless they declare themselves relaxed (CUDA driver API, cuThreadExchangeStreamCaptureMode).
        """
        if getattr(self._threads, "is_ready", False):
            return
        torch.cuda.set_device(self.device)
        try:
            mode = ctypes.c_int(_CAPTURE_MODE_RELAXED)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        except (OSError, AttributeError):
            pass  # another vendor's torch: it has no such library, and its captures are its own affair
        self._threads.is_ready = True


class TorchLane:
    """See `cuda_copies.Lane`."""

    def __init__(self, gpu: TorchGpu, slab: Any, rows: Any, pinned_rows: Any, bounces: Any) -> None:
        """Use this memory: slab and rows on the GPU, the others pinned, [slot, …]."""
        self._gpu = gpu
        self._slab = slab
        self._rows = rows
        self._pinned_rows = pinned_rows
        self._bounces = bounces
        self.rows: Sequence[NDArray[np.int64]] = [slot.numpy() for slot in pinned_rows]
        self.bounces: Sequence[int] = [slot.data_ptr() for slot in bounces]
        self._stream = torch.cuda.Stream(gpu.device, priority=_LOWEST_PRIORITY)
        # The allocator gave memory that this thread's stream may still be using for what was freed there.
        self._stream.wait_stream(torch.cuda.current_stream(gpu.device))
        self._marks = [torch.cuda.Event(blocking=True) for _ in range(NUM_SLOTS)]
        self._contexts: list[Any] = []

    def __enter__(self) -> Self:
        """See `Lane`. Pages made in inference mode may be written in inference mode only."""
        self._gpu.prepare_thread()
        self._contexts = [torch.inference_mode(), torch.cuda.stream(self._stream)]
        for context in self._contexts:
            context.__enter__()
        return self

    def __exit__(self, *failure: object) -> None:
        """See `Lane`."""
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)

    def after(self, event: Any) -> None:
        """See `Lane`."""
        self._stream.wait_event(event)

    def take_rows(self, slot: int, num_rows: int) -> None:
        """See `Lane`."""
        self._rows[:num_rows].copy_(self._pinned_rows[slot][:num_rows], non_blocking=True)

    def gather(self, num_rows: int, grain: int) -> None:
        """See `Lane`."""
        gather_rows(self._gpu.table(grain), self._rows[:num_rows], self._slab)

    def scatter(self, num_rows: int, grain: int) -> None:
        """See `Lane`."""
        scatter_rows(self._gpu.table(grain), self._rows[:num_rows], self._slab)

    def to_host(self, num_bytes: int, address: int) -> None:
        """See `Lane`."""
        _host_bytes(address, num_bytes).copy_(self._slab[:num_bytes], non_blocking=True)

    def from_host(self, num_bytes: int, address: int) -> None:
        """See `Lane`."""
        self._slab[:num_bytes].copy_(_host_bytes(address, num_bytes), non_blocking=True)

    def mark(self, slot: int) -> None:
        """See `Lane`."""
        self._marks[slot].record(self._stream)

    def wait(self, slot: int) -> None:
        """See `Lane`."""
        self._marks[slot].synchronize()

    def drain(self) -> None:
        """See `Lane`."""
        self._stream.synchronize()


def _demand(answer: Any, call: str) -> None:
    """Raise RuntimeError when CUDA's runtime answered with an error; the numbers are those of cudaError_t."""
    if int(answer):
        raise RuntimeError(f"{call} answered with CUDA error {int(answer)}")


def _host_bytes(address: int, num_bytes: int) -> Any:
    """A tensor over memory that the caller keeps."""
    return torch.frombuffer((ctypes.c_ubyte * num_bytes).from_address(address), dtype=torch.uint8)
