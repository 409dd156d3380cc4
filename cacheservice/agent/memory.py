"""Whether an arena fits into the memory of the machine and of the cgroups, and the wait until it does.

An arena of an agent before this one is charged until the last engine has unmapped it, which takes those a moment; an
agent that allocates meanwhile is killed, or has others killed. So this is asked before the arena is made. cgroup v2 and
v1, as this process sees them: in a container mostly its own only. Called by `arena.py` and `serve.py`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cacheservice.errors import ConfigError, StartCancelled

_log = logging.getLogger(__name__)

_GIB = 2**30
_MIB = 2**20
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_SPARE_OF_MACHINE = 256 * _MIB
"""Left to everything else on the machine."""
_SPARE_OF_CGROUP = 64 * _MIB
"""Left in a cgroup for what this process still needs to start; what it has is counted as used."""
_UNLIMITED = 2**60
"""cgroup v1 has no word for no limit: it says some number near 2^63."""
_LOOK_S = 0.5


@dataclass(frozen=True, slots=True)
class _Left:
    """What one limit leaves."""

    source: str
    num_bytes: int
    spare_bytes: int
    remedy: str


@dataclass(frozen=True, slots=True)
class Shortage:
    """Why an arena does not fit now."""

    missing_bytes: int
    sentence: str
    """The numbers and the remedy."""


def shortage(arena_bytes: int) -> Shortage | None:
    """The worst one, or None when the arena fits."""
    found = None
    for left in _memory_left():
        missing = arena_bytes + left.spare_bytes - left.num_bytes
        if missing > 0 and (found is None or missing > found.missing_bytes):
            found = Shortage(
                missing,
                f"--cpu {arena_bytes / _GIB:.2f} GiB does not fit: {left.source} leaves "
                f"{max(left.num_bytes, 0) / _GIB:.2f} GiB, of which {left.spare_bytes / _GIB:.2f} GiB stay free for "
                f"everything else; {left.remedy}",
            )
    return found


def check_fits(arena_bytes: int) -> None:
    """Raise ConfigError with the numbers and the remedy when an arena of this size can't be had here now."""
    found = shortage(arena_bytes)
    if found is not None:
        raise ConfigError(found.sentence)


def wait_for_room(
    arena_bytes: int,
    wait_s: float,
    *,
    cancelled: threading.Event,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Wait until the arena fits, at most `wait_s`; `tell` hears what is missing, and "" at the end.

    Raises ConfigError when it never did, StartCancelled when told to stop.
    """
    deadline_s = clock() + wait_s
    was_logged = False
    while True:
        found = shortage(arena_bytes)
        if found is None or clock() >= deadline_s:
            break
        tell(f"waiting for {-(-found.missing_bytes // _MIB)} MiB of memory: {found.sentence}")
        if not was_logged:
            _log.warning(
                "waiting for memory, at most %.0f s; an arena before this one may still be mapped by engines: %s",
                wait_s, found.sentence,
            )  # fmt: skip
            was_logged = True
        if cancelled.wait(_LOOK_S):
            raise StartCancelled("told to stop while waiting for memory")
    tell("")
    if found is not None:
        raise ConfigError(found.sentence)
    if was_logged:
        _log.info("memory is there")


def _memory_left() -> Iterator[_Left]:
    """What the machine and every cgroup of this process leave."""
    for line in _MEMINFO.read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield _Left(
                "MemAvailable of this machine", int(line.split()[1]) * 1024, _SPARE_OF_MACHINE,
                "give a smaller --cpu or free memory",
            )  # fmt: skip
    for folder in _cgroup_folders():
        left = _left_in_v2(folder)
        if left is None:
            left = _left_in_v1(folder)
        if left is not None:
            yield _Left(
                f"the memory limit of cgroup {folder}", left, _SPARE_OF_CGROUP,
                "give a smaller --cpu or a larger memory limit to the pod",
            )  # fmt: skip


def _left_in_v2(folder: Path) -> int | None:
    """What a cgroup leaves; None without a limit, and for what is no cgroup."""
    try:
        limit = (folder / "memory.max").read_text().strip()
        if limit == "max":
            return None
        used = int((folder / "memory.current").read_text())
        return int(limit) - used + _file_cache(folder, ("inactive_file", "active_file"))
    except (OSError, ValueError):
        return None


def _left_in_v1(folder: Path) -> int | None:
    try:
        limit = int((folder / "memory.limit_in_bytes").read_text())
        if limit >= _UNLIMITED:
            return None
        used = int((folder / "memory.usage_in_bytes").read_text())
        return limit - used + _file_cache(folder, ("total_inactive_file", "total_active_file"))
    except (OSError, ValueError):
        return None


def _file_cache(folder: Path, names: tuple[str, ...]) -> int:
    """Bytes that the kernel takes back when memory is short. An arena is none of it: it counts as shmem."""
    lines = (folder / "memory.stat").read_text().splitlines()
    return sum(int(value) for name, value in map(str.split, lines) if name in names)


def _cgroup_folders() -> Iterator[Path]:
    """The folders of this process's memory cgroups up to the root. A container may see but its own, as the root."""
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = _CGROUPS
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
        else:
            continue
        folder = root / path.lstrip("/")
        while True:
            yield folder
            if folder == root or root not in folder.parents:
                break
            folder = folder.parent
