"""How fast bytes get into and out of the cache, against plain memcpy: real client, real agent process, checksums on.

    python bench/datapath.py [--json] [--quick] [--rounds N] [--sizes MIB,...] [--device cpu|cuda]

Rounds are interleaved: each measures all cases of a shard size once, memcpy beside the cases that it is compared
with, so that a busy machine slows all alike. memcpy is one thread over 512 MiB of prefaulted buffers in rotation,
`size_bytes` a call. A call of store or retrieve moves 64 MiB, or one shard where that is larger: `size_bytes` is the
size of a shard. Every measured case of memcpy and shared memory moves 1 GiB, a stream case 256 MiB; the arena is
full, so stores evict. `cpu_s_per_gb` is the CPU time of client and agent together. After each retrieve the bytes are
compared with what was stored.

With --device cuda the bytes are pages in GPU memory, 64 KiB each and in any order, and the yardsticks are copies of
`size_bytes` between GPU and pinned memory, one way for stores and the other for retrieves (datapath_gpu.py).

With --json stdout is one object {"bench": "datapath", "rows": [...]}; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import mmap
import os
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from report import print_json, print_table, say
from servers import Agent, running_servers

from cacheservice.client import (
    AgentAdmin,
    ArenaUser,
    CacheClient,
    ClientIdentity,
    Deadlines,
    MemorySink,
    MemorySource,
    PageSink,
    PageSource,
    Role,
    ShardRead,
    ShardWrite,
)
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupShape, NamespaceSpec, build_namespace
from cacheservice.core.outcomes import Presence, Reason

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
CALL_BYTES = 64 * MIB
SIZES = (256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB)
QUICK_SIZES = (256 * KIB, 16 * MIB, 64 * MIB)
IN_FLIGHT = (1, 4)
PATHS = ("shm_store", "shm_retrieve", "stream_store", "stream_retrieve")
PATIENT = Deadlines(acquire_s=30, reserve_s=30, commit_s=30, load_s=60)


@dataclass(frozen=True, slots=True)
class Row:
    """One case over all rounds."""

    path: str
    size_bytes: int
    in_flight: int
    gbps_best: float
    gbps_median: float
    cpu_s_per_gb: float


@dataclass(frozen=True, slots=True)
class Volume:
    """How many bytes one measured case moves, and in how many rounds."""

    shared_bytes: int
    stream_bytes: int
    buffer_bytes: int
    rounds: int
    sizes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """What a measurement is of."""

    path: str
    size_bytes: int
    in_flight: int


@dataclass(slots=True)
class Measured:
    """Rounds of one case."""

    gbps: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    num_bytes: int = 0


class Buffer:
    """Prefaulted private memory."""

    def __init__(self, num_bytes: int, *, pattern: bytes | None = None) -> None:
        self.memory = mmap.mmap(
            -1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE
        )
        self.view = memoryview(self.memory)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.num_bytes = num_bytes
        if pattern is not None:
            for start in range(0, num_bytes, len(pattern)):
                # Each stretch differs, so that bytes in the wrong place are seen.
                self.view[start : start + len(pattern)] = pattern
                self.view[start : start + 8] = start.to_bytes(8, "little")


class Memory(Protocol):
    """What is stored from and retrieved into: two stretches of `num_bytes`, source and sink."""

    num_bytes: int
    yardsticks: dict[str, str]
    """Per ending of a path, the plain copy that it is compared with."""
    arena_user: ArenaUser | None

    def source(self, offset: int, num_bytes: int) -> PageSource:
        """Bytes of the source."""

    def sink(self, offset: int, num_bytes: int) -> PageSink:
        """Room in the sink."""

    def clear_sink(self) -> None:
        """Make the sink unlike the source."""

    def is_same(self, offset: int, num_bytes: int) -> bool:
        """Whether the sink holds what the source does."""

    def copy(self, yardstick: str, offset: int, num_bytes: int, size: int) -> None:
        """The plain copy of a stretch, `size` bytes a call; done on return."""


class HostMemory:
    """Memory of this process."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.yardsticks = {"store": "memcpy", "retrieve": "memcpy"}
        self.arena_user: ArenaUser | None = None
        self._source = Buffer(num_bytes, pattern=os.urandom(MIB))
        self._sink = Buffer(num_bytes)

    def source(self, offset: int, num_bytes: int) -> PageSource:
        """See Memory."""
        return MemorySource(self._source.view[offset : offset + num_bytes])

    def sink(self, offset: int, num_bytes: int) -> PageSink:
        """See Memory."""
        return MemorySink(self._sink.view[offset : offset + num_bytes])

    def clear_sink(self) -> None:
        """See Memory."""
        ctypes.memset(self._sink.address, 0, self._sink.num_bytes)

    def is_same(self, offset: int, num_bytes: int) -> bool:
        """See Memory."""
        stretch = slice(offset, offset + num_bytes)
        return self._sink.view[stretch] == self._source.view[stretch]

    def copy(self, yardstick: str, offset: int, num_bytes: int, size: int) -> None:
        """See Memory."""
        del yardstick
        for start in range(offset, offset + num_bytes, size):
            ctypes.memmove(self._sink.address + start, self._source.address + start, size)


class Bench:
    """One agent, one client per data plane, and the memory that they copy from and to."""

    def __init__(self, agent: Agent, volume: Volume, memory: Memory) -> None:
        self.agent = agent
        self.volume = volume
        self.memory = memory
        self.specs = {size: _namespace(size) for size in volume.sizes}
        self.clients = {"shm": self._connect("shared_memory"), "stream": self._connect("stream")}
        self.measured: defaultdict[Case, Measured] = defaultdict(Measured)
        self._numbers = itertools.count()
        # The newest stored calls, newest last: reads of one call, and where its bytes came from.
        self._stored: defaultdict[tuple[str, int], list[tuple[list[ChunkKey], int]]] = defaultdict(
            list
        )

    def close(self) -> None:
        """End the clients."""
        for client in self.clients.values():
            client.close()

    def run(self, size: int) -> None:
        """Measure every case of one shard size in every round."""
        with AgentAdmin(self.agent.target) as admin:
            admin.evict()
        for number in range(self.volume.rounds + 1):
            self._run_round(size)
            if number == 0:
                # The first one touched the memory and filled the arena: from now on stores evict.
                for case in [case for case in self.measured if case.size_bytes == size]:
                    del self.measured[case]
        say(f"{_size(size)}: {self.volume.rounds} rounds done")

    def _run_round(self, size: int) -> None:
        for yardstick in dict.fromkeys(self.memory.yardsticks.values()):
            plain = self._plain_calls(yardstick, size)
            self._measure(Case(yardstick, size, 1), plain, self.volume.shared_bytes)
        for plane, in_flight in itertools.product(("shm", "stream"), IN_FLIGHT):
            num_bytes = self.volume.shared_bytes if plane == "shm" else self.volume.stream_bytes
            stores = self._store_calls(plane, size, num_bytes)
            self._measure(Case(f"{plane}_store", size, in_flight), stores, num_bytes)
            retrieves = self._retrieve_calls(plane, size, num_bytes)
            self._measure(Case(f"{plane}_retrieve", size, in_flight), retrieves, num_bytes)
            self._compare(plane, size)

    def rows(self) -> list[Row]:
        """What all rounds gave, path by path."""
        paths = [*dict.fromkeys(self.memory.yardsticks.values()), *PATHS]
        ordered = sorted(
            self.measured, key=lambda c: (paths.index(c.path), c.size_bytes, c.in_flight)
        )
        return [_row(case, self.measured[case]) for case in ordered]

    def ratio(self, case: Case) -> float:
        """Median over the rounds of a case's speed to its yardstick's in the same round."""
        yardstick = self.memory.yardsticks.get(case.path.partition("_")[2], case.path)
        against = self.measured[Case(yardstick, case.size_bytes, 1)].gbps
        return statistics.median(
            a / b for a, b in zip(self.measured[case].gbps, against, strict=True)
        )

    def _measure(self, case: Case, calls: list[Callable[[], None]], num_bytes: int) -> None:
        cpu_before = time.process_time() + self.agent.cpu_s()
        started = time.perf_counter()
        _run_all(calls, case.in_flight)
        seconds = time.perf_counter() - started
        measured = self.measured[case]
        measured.cpu_s += time.process_time() + self.agent.cpu_s() - cpu_before
        measured.gbps.append(num_bytes / seconds / 1e9)
        measured.num_bytes += num_bytes

    def _plain_calls(self, yardstick: str, size: int) -> list[Callable[[], None]]:
        def copy(offset: int) -> Callable[[], None]:
            return lambda: self.memory.copy(yardstick, offset, max(size, CALL_BYTES), size)

        return [copy(offset) for offset in self._offsets(self.volume.shared_bytes)]

    def _store_calls(self, plane: str, size: int, num_bytes: int) -> list[Callable[[], None]]:
        client, spec = self.clients[plane], self.specs[size]

        def store(offset: int) -> Callable[[], None]:
            keys = [self._new_key() for _ in range(CALL_BYTES // size)]
            writes = [
                ShardWrite(
                    key, keys[i - 1] if i else None, i, 0, 0, size,
                    self.memory.source(offset + i * size, size),
                )
                for i, key in enumerate(keys)
            ]  # fmt: skip
            self._stored[plane, size].append((keys, offset))

            def call() -> None:
                _demand_hits(client.store(spec.digest, writes))

            return call

        self._stored[plane, size].clear()
        return [store(offset) for offset in self._offsets(num_bytes)]

    def _retrieve_calls(self, plane: str, size: int, num_bytes: int) -> list[Callable[[], None]]:
        """Reads of the newest stored bytes, as often as `num_bytes` needs."""
        client, spec = self.clients[plane], self.specs[size]
        self.memory.clear_sink()
        stored = self._stored[plane, size]
        # The agent was full: it may have evicted some of what was just stored, as its policy likes.
        present = [
            (keys, offset)
            for keys, offset in stored[-self.volume.buffer_bytes // CALL_BYTES :]
            if set(client.lookup(spec.digest, keys, take_lease=False, deadline_s=30).presence)
            == {Presence.READY_HERE}
        ]
        if len(present) * 2 < min(len(stored), self.volume.buffer_bytes // CALL_BYTES):
            raise SystemExit("datapath: the agent evicted most of what was just stored")
        self._stored[plane, size] = present

        def retrieve(keys: list[ChunkKey], offset: int) -> Callable[[], None]:
            reads = [
                ShardRead(
                    key, 0, 0, size, 0, size,
                    self.memory.sink(offset + i * size, size),
                )
                for i, key in enumerate(keys)
            ]  # fmt: skip

            def call() -> None:
                _demand_hits(client.retrieve(spec.digest, reads))

            return call

        calls = [retrieve(keys, offset) for keys, offset in present]
        return [
            call
            for call, _ in zip(itertools.cycle(calls), range(num_bytes // CALL_BYTES), strict=False)
        ]

    def _compare(self, plane: str, size: int) -> None:
        """Every byte that was retrieved is the one that was stored."""
        for _, offset in self._stored[plane, size]:
            if not self.memory.is_same(offset, CALL_BYTES):
                raise SystemExit(
                    f"datapath: {plane} gave other bytes than were stored, shards of {size} bytes"
                )

    def _offsets(self, num_bytes: int) -> list[int]:
        return [at % self.memory.num_bytes for at in range(0, num_bytes, CALL_BYTES)]

    def _new_key(self) -> ChunkKey:
        return ChunkKey(next(self._numbers).to_bytes(32, "little"))

    def _connect(self, data_plane: str) -> CacheClient:
        client = CacheClient(
            self.agent.target, ClientIdentity(Role.TOOL), deadlines=PATIENT, data_plane=data_plane,  # type: ignore[arg-type]
            arena_user=self.memory.arena_user,
        )  # fmt: skip
        for spec in self.specs.values():
            client.open_namespace(spec)
        client.start()
        if not client.wait_connected(30) or client.state().data_plane != data_plane:
            raise SystemExit(f"datapath: no {data_plane} with the agent: {client.state().message}")
        return client


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="128 MiB a case and 2 rounds: shows that it works, not how fast",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="how often each case is measured; default 7"
    )
    parser.add_argument(
        "--sizes", type=_sizes, metavar="MIB[,MIB...]", help="shard sizes; default 0.25,1,4,16,64"
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="whose memory is stored from and retrieved into; default cpu",
    )
    options = parser.parse_args(arguments)
    if options.device == "cuda" and (missing := _why_no_gpu()):
        parser.error(f"--device cuda: {missing}")
    if options.quick:
        volume = Volume(
            2 * CALL_BYTES,
            CALL_BYTES,
            2 * CALL_BYTES,
            options.rounds or 2,
            options.sizes or QUICK_SIZES,
        )
        say(
            "quick: 128 MiB a case (64 MiB on streams) instead of 1 GiB; these numbers show nothing but that it works"
        )
    else:
        volume = Volume(GIB, GIB // 4, GIB // 2, options.rounds or 7, options.sizes or SIZES)
    with running_servers() as servers:
        agent = servers.start_agent("agent", arena_bytes=4 * volume.buffer_bytes)
        bench = Bench(agent, volume, _memory_on(options.device, volume.buffer_bytes))
        try:
            for size in volume.sizes:
                bench.run(size)
        finally:
            bench.close()
    rows = bench.rows()
    if options.json:
        print_json("datapath", rows)
        return 0
    print_table(
        f"Data path, {volume.rounds} rounds, checksums on",
        ("path", "shard", "in flight", "GB/s best", "GB/s median", _of(bench.memory), "CPU s/GB"),
        [
            (
                row.path, _size(row.size_bytes), str(row.in_flight), f"{row.gbps_best:.2f}", f"{row.gbps_median:.2f}",
                f"{bench.ratio(Case(row.path, row.size_bytes, row.in_flight)):.2f}", f"{row.cpu_s_per_gb:.3f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    return 0


def _why_no_gpu() -> str:
    """What is missing for --device cuda; empty when nothing is."""
    try:
        import torch
    except ImportError:
        return "torch is not installed here; use the Python of a CUDA build of vLLM"
    return (
        ""
        if torch.cuda.is_available()
        else "torch sees no GPU here; run this on a machine with an NVIDIA GPU and its driver"
    )


def _memory_on(device: str, num_bytes: int) -> Memory:
    if device == "cpu":
        return HostMemory(num_bytes)
    from datapath_gpu import GpuMemory, cuda_pages

    return GpuMemory(cuda_pages(num_bytes), num_bytes)


def _of(memory: Memory) -> str:
    return f"of {min(memory.yardsticks.values()).partition('_')[0]}"


def _run_all(calls: list[Callable[[], None]], num_threads: int) -> None:
    """Run all calls, `num_threads` at a time; the first failure is raised here."""
    if num_threads == 1:
        for call in calls:
            call()
        return
    waiting = iter(calls)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not failures:
                with lock:
                    call = next(waiting, None)
                if call is None:
                    return
                call()
        except BaseException as failure:  # noqa: BLE001 - raised below, in the main thread
            failures.append(failure)

    threads = [threading.Thread(target=work) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]


def _demand_hits(results: Sequence[object]) -> None:
    reasons = {result.reason for result in results}  # type: ignore[attr-defined]
    if reasons != {Reason.HIT}:
        raise SystemExit(f"datapath: a call failed: {', '.join(sorted(r.label for r in reasons))}")


def _row(case: Case, measured: Measured) -> Row:
    return Row(
        case.path,
        case.size_bytes,
        case.in_flight,
        round(max(measured.gbps), 3),
        round(statistics.median(measured.gbps), 3),
        round(measured.cpu_s / (measured.num_bytes / 1e9), 4),
    )


def _namespace(size: int) -> NamespaceSpec:
    return build_namespace(
        {"bench": "datapath"}, tokens_per_chunk=256, groups=[GroupShape("full", 1, size)]
    )


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


def _sizes(text: str) -> tuple[int, ...]:
    try:
        found = tuple(int(float(part) * MIB) for part in text.split(","))
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of sizes in MiB") from problem
    if any(size <= 0 or CALL_BYTES % size for size in found):
        raise argparse.ArgumentTypeError(
            f"a shard of {text} MiB does not divide a call of {CALL_BYTES // MIB} MiB"
        )
    return found


if __name__ == "__main__":
    sys.exit(main())
