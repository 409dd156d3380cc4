"""The arena: one sealed memfd that holds every shard, mapped here and by the engines of the node.

Invariants: every page is allocated and charged to this process before `build_arena` returns, so that no engine pays for
it and nothing can fail later; size and seals never change, so that a mapping can't raise SIGBUS; mode 0600, so that a
reader can't reopen it through /proc. Called by `serve.py`; the bytes are handed out by `arena_socket.py`,
`byte_streams.py` and `pulls.py`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import mmap
import os
import threading
import time

from cacheservice.agent.memory import check_fits
from cacheservice.errors import ConfigError, StartCancelled

_log = logging.getLogger(__name__)

_GIB = 2**30
_STEP_BYTES = 64 * 2**20
"""One call's worth of pages: large enough to be cheap, small enough to share between threads and to report progress."""
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23
"""Linux 5.14 (include/uapi/asm-generic/mman-common.h); older kernels answer EINVAL."""
_kept: list[Arena] = []
"""Closed arenas that somebody may still copy from or to; referred to so that nothing unmaps them."""


class Arena:
    """The region. Owns descriptor and mapping; `view` may be used from any thread until `close`."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self.fd = fd
        self.size_bytes = size_bytes
        self._mapping = mmap.mmap(fd, size_bytes)
        self.view = memoryview(self._mapping)
        self._address_holder = ctypes.c_char.from_buffer(self._mapping)
        self.address = ctypes.addressof(self._address_holder)
        self._stays_mapped = False

    def keep_mapped(self) -> None:
        """Have `close` leave the mapping to the end of the process: somebody may still copy."""
        self._stays_mapped = True
        _kept.append(self)

    def close(self) -> None:
        """Give the region up; its memory returns when the last engine has unmapped it. Idempotent."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        if self._stays_mapped:
            return
        # A frame in flight may still hold a slice of the view: then the mapping goes with the process.
        del self._address_holder
        try:
            self.view.release()
            self._mapping.close()
        except BufferError:
            _log.debug("arena still in use at close")


def build_arena(
    size_bytes: int,
    *,
    threads: int = min(8, os.cpu_count() or 1),
    cancelled: threading.Event | None = None,
) -> Arena:
    """Create, allocate, prefault and seal the arena.

    Raises ConfigError when it does not fit into the memory that this process may have, StartCancelled soon after
    `cancelled` was set.
    """
    check_fits(size_bytes)
    started = time.monotonic()
    fd = os.memfd_create("larder-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(fd, 0o600)
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )
        arena = Arena(fd, size_bytes)
    except OSError:
        os.close(fd)
        raise
    try:
        _prefault(arena, threads, cancelled or threading.Event())
    except StartCancelled:
        arena.close()
        raise
    except OSError as error:
        arena.close()
        raise ConfigError(
            f"--cpu {size_bytes}: the kernel gave no memory for the arena ({error.strerror}); give a smaller --cpu or "
            "a larger memory limit"
        ) from error
    took = time.monotonic() - started
    _log.info("arena ready size_bytes=%d seconds=%.2f", size_bytes, took)
    return arena


def _prefault(arena: Arena, threads: int, cancelled: threading.Event) -> None:
    """Touch every page from several threads: one alone takes 0.2 to 1 GB/s on a virtual machine (measured)."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    # Larger pages where the machine allows them for shared memory; refused without harm elsewhere.
    libc.madvise(arena.address, arena.size_bytes, _MADV_HUGEPAGE)
    steps = iter(range(0, arena.size_bytes, _STEP_BYTES))
    lock = threading.Lock()
    failures: list[int] = []
    done_bytes = 0
    told_bytes = 0

    def touch() -> None:
        nonlocal done_bytes, told_bytes
        while not failures and not cancelled.is_set():
            with lock:
                start = next(steps, None)
            if start is None:
                return
            length = min(_STEP_BYTES, arena.size_bytes - start)
            try:
                # Allocating by call and then mapping what is there is several times faster than faulting it in.
                os.posix_fallocate(arena.fd, start, length)
            except OSError as error:
                failures.append(error.errno or errno.ENOMEM)
                return
            if libc.madvise(arena.address + start, length, _MADV_POPULATE_WRITE):
                failures.append(ctypes.get_errno())
                return
            with lock:
                done_bytes += length
                if done_bytes - told_bytes >= _GIB:
                    told_bytes = done_bytes
                    _log.info(
                        "arena prefault done_bytes=%d of_bytes=%d", done_bytes, arena.size_bytes
                    )

    workers = [threading.Thread(target=touch, name=f"prefault-{i}") for i in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if cancelled.is_set():
        raise StartCancelled("told to stop while the arena was prefaulted")
    if failures and failures[0] not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(failures[0], os.strerror(failures[0]))
    if failures:
        _prefault_by_hand(arena, cancelled)


def _prefault_by_hand(arena: Arena, cancelled: threading.Event) -> None:
    """For kernels before 5.14: allocate, then read one byte a page so that our own mapping is filled too."""
    for start in range(0, arena.size_bytes, _STEP_BYTES):
        if cancelled.is_set():
            raise StartCancelled("told to stop while the arena was prefaulted")
        os.posix_fallocate(arena.fd, start, min(_STEP_BYTES, arena.size_bytes - start))
        bytes(arena.view[start : start + _STEP_BYTES : mmap.PAGESIZE])
