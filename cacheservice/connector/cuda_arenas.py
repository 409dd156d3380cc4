"""Registers the agent's arena with the CUDA driver, so that transfers go straight to and from it.

In slices, on a thread of its own, from the engine's first load or save on: earlier the engine may be capturing graphs,
which other threads' CUDA calls can spoil. Unregistered before it is unmapped, since the driver would go on holding
what is not there any more. Memory that could not be registered is copied another way, after one warning.

Called by: cuda_copies.py, for the client (arena_mapped, arena_unmapping) and for copying threads (reach).
"""

from __future__ import annotations

import logging
import math
import threading
from bisect import bisect_right, insort
from typing import Any, Protocol

from cacheservice.client.values import MappedArena

logger = logging.getLogger(__name__)

MIB = 1 << 20
REGISTER_BYTES = 1 << 30
"""What is registered in one call, which keeps the driver busy for a fraction of a second."""


class Registrar(Protocol):
    """What of a GPU is needed here; both may raise what the CUDA library raises."""

    def register(self, address: int, num_bytes: int) -> None:
        """Let transfers go straight to and from this host memory."""

    def unregister(self, address: int) -> None:
        """Undo `register`, before the memory goes."""


class RegisteredArenas:
    """Which host memory is registered, and the thread that registers it."""

    def __init__(self, gpu: Registrar) -> None:
        self._gpu = gpu
        # Guards what follows; never held while CUDA is called or an arena left.
        self._lock = threading.Lock()
        self._waiting: list[MappedArena] = []
        self._registered: list[tuple[int, int]] = []
        """(first byte, byte after the last one) of each registration, by address."""
        self._has_begun = False
        self._has_complained = False
        self._is_closed = False

    def begin(self) -> None:
        """The engine serves: register what is mapped, and from now on whatever comes. Cheap when it has begun."""
        if self._has_begun:
            return
        with self._lock:
            self._has_begun = True
            waiting, self._waiting = self._waiting, []
        for arena in waiting:
            self._start(arena)

    def add(self, arena: MappedArena) -> None:
        """Register `arena`, now or when the engine serves."""
        with self._lock:
            if not self._has_begun:
                self._waiting.append(arena)
                return
        self._start(arena)

    def remove(self, arena: MappedArena) -> None:
        """Unregister what lies in `arena`; nobody copies from or to it any more."""
        stop = arena.address + arena.num_bytes
        with self._lock:
            self._waiting = [a for a in self._waiting if a is not arena]
            gone = [r for r in self._registered if arena.address <= r[0] < stop]
            self._registered = [r for r in self._registered if r not in gone]
        for first, _ in gone:
            try:
                self._gpu.unregister(first)
            except Exception as error:  # noqa: BLE001 - whatever CUDA's library raises
                logger.warning("the old arena could not be unregistered: %s", error)

    def reach(self, address: int) -> int:
        """Bytes from `address` on in one registration; 0 when it is in none."""
        with self._lock:
            at = bisect_right(self._registered, (address, math.inf)) - 1
            return max(0, self._registered[at][1] - address) if at >= 0 else 0

    def close(self) -> None:
        """Start no registration any more. What is registered goes when its arena does."""
        self._is_closed = True

    def _start(self, arena: MappedArena) -> None:
        thread = threading.Thread(
            target=self._register, args=(arena,), name="larder-register", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # no more threads
            self._complain(0, arena.num_bytes, error)

    def _register(self, arena: MappedArena) -> None:
        for start in range(arena.address, arena.address + arena.num_bytes, REGISTER_BYTES):
            stop = min(start + REGISTER_BYTES, arena.address + arena.num_bytes)
            if self._is_closed or not arena.enter():
                return
            try:
                self._gpu.register(start, stop - start)
                with self._lock:
                    insort(self._registered, (start, stop))
            except Exception as error:  # noqa: BLE001 - whatever CUDA's library raises
                self._complain(start - arena.address, arena.num_bytes, error)
                return
            finally:
                arena.leave()

    def _complain(self, done: int, wanted: int, error: Any) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning(
                "CUDA registered %d of %d MiB of the cache's memory; the rest is copied through pinned buffers, "
                "slower: %s. Ask of the GPU's driver and container runtime why cudaHostRegister is refused",
                done // MIB,
                wanted // MIB,
                error,
            )
