"""Copies between the engine's pages and the cache: one port, one implementation per kind of memory.

The worker half takes a fence where vLLM calls it and asks for the runs of a shard; the client then gathers from them or
scatters into them on threads of ours. Whoever implements this sees to it that a gather reads what the fence's compute
wrote, and that a scatter has reached the pages when it returns.

Called by: connector.py (copier_for), worker.py (fences), shards.py (runs), the client's data planes (gather and
scatter). The other implementation is cuda_copies.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from cacheservice.client.values import ArenaUser
from cacheservice.connector.pages import ShardLayout
from cacheservice.errors import UncacheableError

Fence = Any
"""What the engine had launched on its compute stream when the fence was taken; opaque to everybody but its copier."""


class ShardRuns(Protocol):
    """A shard's bytes in the KV cache, as source and as sink of the client (client/values.py)."""

    def gather(self, start: int, stop: int, destination: int) -> None:
        """Copy bytes [start, stop) of the shard from the pages to the address `destination`."""

    def scatter(self, start: int, stop: int, source: int) -> None:
        """Copy bytes [start, stop) of the shard from the address `source` into the pages; they are there on return."""


class Copier(Protocol):
    """Copies for the pages of one rank. `fence` is called in vLLM's thread, the rest on any."""

    def fence(self) -> Fence:
        """Everything that the engine has launched up to now."""

    def runs(
        self, layout: ShardLayout, blocks: Sequence[int], *, after: Fence, first_byte: int = 0
    ) -> ShardRuns:
        """The runs of `blocks`, which hold the shard's bytes from `first_byte` on; not touched before `after`."""

    @property
    def arena_user(self) -> ArenaUser | None:
        """Who wants to know where the client maps the agent's arena; None = nobody."""

    def close(self) -> None:
        """No copy is in flight any more, and none will come: give everything back."""


class CpuCopier:
    """Pages in CPU memory: the forward pass is done when vLLM calls us, so there is nothing to wait for."""

    def fence(self) -> Fence:
        """See Copier."""
        return None

    def runs(
        self, layout: ShardLayout, blocks: Sequence[int], *, after: Fence, first_byte: int = 0
    ) -> ShardRuns:
        """See Copier."""
        del after
        return PageRuns(layout, blocks, first_byte=first_byte)

    @property
    def arena_user(self) -> ArenaUser | None:
        """See Copier."""
        return None

    def close(self) -> None:
        """See Copier."""


def copier_for(kv_caches: Mapping[str, Any]) -> Copier:
    """The copier for the memory that these views are in. Raises UncacheableError when there is none."""
    devices = {view.device.type for view in kv_caches.values()}
    if devices == {"cpu"}:
        return CpuCopier()
    if devices == {"cuda"}:
        from cacheservice.connector.cuda_device import cuda_copier

        return cuda_copier(list(kv_caches.values()))
    raise UncacheableError(
        f"the KV cache is on device {', '.join(sorted(devices))}, and pages are copied from CPU and CUDA memory only: "
        "run the engine on one of these, or start it without --kv-transfer-config"
    )


class PageRuns:
    """A shard's bytes in the KV cache in CPU memory, as source and as sink of the client.

    `blocks[i]` is the block that holds bytes `[first_byte + i * block_bytes, …)` of the shard; bytes outside of the
    given blocks must not be asked for. The caller guarantees that these blocks stay its own until the copy is done:
    pinned for a save, allocated to a waiting request for a load. Thread-safe, since it has no state of its own.
    """

    __slots__ = ("_blocks", "_first_byte", "_layout")

    def __init__(self, layout: ShardLayout, blocks: Sequence[int], *, first_byte: int = 0) -> None:
        self._layout = layout
        self._blocks = blocks
        self._first_byte = first_byte

    def gather(self, start: int, stop: int, destination: int) -> None:
        """Copy bytes [start, stop) of the shard from the pages to `destination`."""
        for page, at, length in self._walk(start, stop):
            ctypes.memmove(destination + at, page, length)

    def scatter(self, start: int, stop: int, source: int) -> None:
        """Copy bytes [start, stop) of the shard from `source` into the pages."""
        for page, at, length in self._walk(start, stop):
            ctypes.memmove(page, source + at, length)

    def _walk(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """(address in the page, offset from `start`, length) of every run part in [start, stop), in shard order."""
        layout, blocks = self._layout, self._blocks
        position = start - self._first_byte
        end = stop - self._first_byte
        if position < 0 or end > len(blocks) * layout.block_bytes:
            raise IndexError(
                f"bytes [{start}, {stop}) are outside of the {len(blocks)} blocks of this copy"
            )
        parts: list[tuple[int, int, int]] = []
        at = 0
        while position < end:
            number, within = divmod(position, layout.block_bytes)
            block = blocks[number]
            for run, run_start, run_stop in zip(
                layout.runs, layout.starts, layout.starts[1:], strict=False
            ):
                if run_stop <= within:
                    continue
                skip = within - run_start
                length = min(run.length - skip, end - position)
                parts.append((run.address + block * run.block_stride + skip, at, length))
                at += length
                position += length
                within += length
                if position >= end:
                    break
        return parts
