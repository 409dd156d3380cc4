"""A GPU that does what is queued as late, or as early, as streams and events allow, and really moves the bytes.

The port `cuda_copies.Gpu` over pages in CPU memory. Every operation is recorded and queued on its stream; it runs when
somebody blocks for it, or when the adversary likes. So a wait that is missing shows as wrong bytes: a gather reads what
the pages held before the engine's kernel, a transfer sends row numbers of the part after the next, a caller finds its
buffer untouched. The rows themselves are moved by the real code (cuda_device.gather_rows, scatter_rows).
"""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Self

import torch

from cacheservice.connector.cuda_copies import NUM_SLOTS, Staging
from cacheservice.connector.cuda_device import gather_rows, row_table, scatter_rows

Mood = Literal["late", "early", "random"]
"""When operations run that nobody blocks for: never, at once (the engine's still never), or by chance."""

ENGINE = "engine"


@dataclass(eq=False)
class Operation:
    """One queued operation."""

    stream: str
    kind: str
    num_bytes: int
    run: Callable[[], None]
    needs: list[Operation]
    is_done: bool = False


class GpuFailure(RuntimeError):
    """What this GPU raises where torch raises a CUDA error."""


@dataclass
class FakeGpu:
    """See the module."""

    views: Sequence[Any]
    mood: Mood = "late"
    seed: int = 0
    log: list[Operation] = field(default_factory=list)
    fails: Callable[[str], bool] = lambda kind: False
    """Asked before each operation is queued, registered or waited for."""

    def __post_init__(self) -> None:
        self.storage = self.views[0].untyped_storage()
        self.first_byte = self.storage.data_ptr()
        self.num_bytes = self.storage.nbytes()
        self.rng = random.Random(self.seed)
        self.lock = threading.RLock()
        self.last: dict[str, Operation] = {}
        self.pending: list[Operation] = []
        self.registered: dict[int, int] = {}
        self.device_bytes = 0
        self.pinned_bytes = 0
        self.violations: list[str] = []
        """What was wrong with registrations; a copier may swallow exceptions of these calls."""
        self.blocked_on: list[str] = []
        """Streams that somebody blocked for."""

    # The port.

    def record(self) -> Operation:
        self.check("record")
        return self.queue(ENGINE, "event", lambda: None)

    def open_lanes(self, staging: Staging) -> list[FakeLane]:
        self.check("open_lanes")
        return [FakeLane(self, f"lane {i}", staging) for i in range(staging.num_lanes)]

    def register(self, address: int, num_bytes: int) -> None:
        if not is_mapped(address, num_bytes):
            self.violations.append("registers memory that is not there")
        self.check("register")
        with self.lock:
            for first, length in self.registered.items():
                if address < first + length and first < address + num_bytes:
                    self.violations.append("registers twice")
            self.registered[address] = num_bytes

    def unregister(self, address: int) -> None:
        with self.lock:
            num_bytes = self.registered.pop(address, 0)
        if not num_bytes or not is_mapped(address, num_bytes):
            self.violations.append("unregisters memory that is gone")
        self.check("unregister")

    # What tests see and do.

    def engine(self, work: Callable[[], None]) -> None:
        """Launch a kernel of the engine."""
        self.queue(ENGINE, "kernel", work)

    def finish(self) -> None:
        """Let everything that is queued run."""
        with self.lock:
            for operation in self.last.values():
                self.force(operation)

    def unfinished(self) -> list[Operation]:
        """Operations of lanes that were queued and have not run."""
        with self.lock:
            return [o for o in self.log if o.stream != ENGINE and not o.is_done]

    def transfers(self) -> list[Operation]:
        """What crossed PCIe, but for row numbers."""
        return [o for o in self.log if o.kind in ("to_host", "from_host")]

    def check(self, kind: str) -> None:
        if self.fails(kind):
            raise GpuFailure(f"CUDA error: {kind} failed on purpose")

    def queue(
        self, stream: str, kind: str, run: Callable[[], None], *, num_bytes: int = 0, after: Sequence[Operation] = ()
    ) -> Operation:  # fmt: skip
        with self.lock:
            before = [self.last[stream]] if stream in self.last else []
            made = Operation(stream, kind, num_bytes, run, [*before, *after])
            self.last[stream] = made
            self.log.append(made)
            self.pending = [o for o in self.pending if not o.is_done] + [made]
            self.act()
            return made

    def act(self) -> None:
        """Let the adversary run what may run."""
        if self.mood == "late":
            return
        for operation in self.pending:
            if operation.is_done or (operation.stream == ENGINE and self.mood == "early"):
                continue
            if self.mood == "random" and self.rng.random() < 0.7:
                continue
            if all(need.is_done for need in operation.needs):
                self.run(operation)

    def force(self, operation: Operation) -> None:
        """Run an operation and what it needs, nothing else."""
        stack = [operation]
        while stack:
            top = stack[-1]
            missing = [need for need in top.needs if not need.is_done]
            if missing:
                self.rng.shuffle(missing)
                stack += missing
                continue
            self.run(stack.pop())

    def run(self, operation: Operation) -> None:
        if not operation.is_done:
            operation.is_done = True
            operation.run()
            operation.needs = []


class FakeLane:
    """The port `cuda_copies.Lane`."""

    def __init__(self, gpu: FakeGpu, name: str, staging: Staging) -> None:
        self.gpu = gpu
        self.name = name
        self.staging = staging
        self.slab = torch.full((staging.slab_bytes,), 0xEE, dtype=torch.uint8)
        self.taken = torch.zeros(staging.max_rows, dtype=torch.int64)
        self.pinned = [torch.zeros(staging.max_rows, dtype=torch.int64) for _ in range(NUM_SLOTS)]
        self.bounce = [
            torch.full((staging.bounce_bytes,), 0xDD, dtype=torch.uint8) for _ in range(NUM_SLOTS)
        ]
        self.rows = [slot.numpy() for slot in self.pinned]
        self.bounces = [slot.data_ptr() for slot in self.bounce]
        gpu.device_bytes += _bytes(self.slab) + _bytes(self.taken)
        gpu.pinned_bytes += sum(_bytes(t) for t in [*self.pinned, *self.bounce])
        self.marks: dict[int, Operation] = {}
        self.user: int | None = None

    def __enter__(self) -> Self:
        assert self.user is None, "two threads in one lane"
        self.user = threading.get_ident()
        return self

    def __exit__(self, *failure: object) -> None:
        self.user = None

    def _queue(self, kind: str, run: Callable[[], None], **more: Any) -> Operation:
        assert self.user == threading.get_ident(), "queued from outside of `with lane`"
        self.gpu.check(kind)
        return self.gpu.queue(self.name, kind, run, **more)

    def after(self, event: Operation) -> None:
        self._queue("after", lambda: None, after=[event])

    def take_rows(self, slot: int, num_rows: int) -> None:
        source = self.pinned[slot]
        self._queue("rows", lambda: self.taken[:num_rows].copy_(source[:num_rows]))

    def gather(self, num_rows: int, grain: int) -> None:
        table = row_table(self.gpu.storage, "cpu", grain)
        self._queue("gather", lambda: gather_rows(table, self.taken[:num_rows], self.slab))

    def scatter(self, num_rows: int, grain: int) -> None:
        table = row_table(self.gpu.storage, "cpu", grain)
        self._queue("scatter", lambda: scatter_rows(table, self.taken[:num_rows], self.slab))

    def to_host(self, num_bytes: int, address: int) -> None:
        self._check_host(num_bytes, address)
        source = self.slab.data_ptr()
        self._queue(
            "to_host", lambda: ctypes.memmove(address, source, num_bytes), num_bytes=num_bytes
        )

    def from_host(self, num_bytes: int, address: int) -> None:
        self._check_host(num_bytes, address)
        target = self.slab.data_ptr()
        self._queue(
            "from_host", lambda: ctypes.memmove(target, address, num_bytes), num_bytes=num_bytes
        )

    def mark(self, slot: int) -> None:
        self.marks[slot] = self._queue("mark", lambda: None)

    def wait(self, slot: int) -> None:
        self.gpu.check("wait")
        with self.gpu.lock:
            self.gpu.blocked_on.append(self.name)
            self.gpu.force(self.marks[slot])

    def drain(self) -> None:
        self.gpu.check("drain")
        with self.gpu.lock:
            self.gpu.blocked_on.append(self.name)
            if self.name in self.gpu.last:
                self.gpu.force(self.gpu.last[self.name])

    def _check_host(self, num_bytes: int, address: int) -> None:
        """A transfer of memory that is not pinned would be synchronous, and one across registrations may fail."""
        ranges = [(b, self.staging.bounce_bytes) for b in self.bounces]
        ranges += self.gpu.registered.items()
        assert any(first <= address and address + num_bytes <= first + n for first, n in ranges)
        assert 0 < num_bytes <= self.staging.slab_bytes


def is_mapped(address: int, num_bytes: int) -> bool:
    """Whether this process has memory there, by the kernel's list."""
    left = address
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, stop = (int(part, 16) for part in line.split()[0].split("-"))
        if first <= left < stop:
            left = stop
        if left >= address + num_bytes:
            return True
    return False


def _bytes(tensor: Any) -> int:
    return int(tensor.numel() * tensor.element_size())
