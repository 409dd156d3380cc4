"""The agent's arena in this process: taken over from arena.sock, mapped once, unmapped after the last copy.

Protocol: 24 bytes each way, with the arena's descriptor in the answer (SCM_RIGHTS); afterwards the connection stays
open without traffic, and its end tells the agent that this process will not write to the arena any more. So the order
is fixed: last copy ends, mapping goes, connection closes. Only a sealed arena is mapped, because one that could
shrink would kill the engine with SIGBUS. Called by the session thread (map, retire) and by copying threads (enter,
leave).
"""

from __future__ import annotations

import ctypes
import fcntl
import logging
import mmap
import os
import socket
import struct
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal, TypeAlias

from cacheservice.client.copy import SpareThread, piece_checksum
from cacheservice.client.deadlines import Deadline, Watch
from cacheservice.client.plane import LeasedRead, ReservedWrite
from cacheservice.client.values import ArenaUser
from cacheservice.core.outcomes import Reason
from cacheservice.errors import AgentRejected, AgentUnavailable

_log = logging.getLogger(__name__)

PROTOCOL_VERSION = 1
MIN_SHARED_PIECES = 8
"""Calls of fewer pieces end before a second thread has woken up."""
_MAGIC = b"LRDR"
_HELLO = struct.Struct("<4sHH16s")
_ANSWER = struct.Struct("<4sHHIIQ")
_STATUS_OK = 0
_STATUS_NOT_READY = 4
_REFUSALS = {
    1: "the agent does not speak this client's arena protocol; use one version of Larder on a node",
    2: "the session ended before the arena was asked for",
    3: f"the agent's list of uids does not have this process's uid {os.getuid()}; add it or leave the list out",
}
_NEEDED_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_MADV_POPULATE_READ = 22  # Linux 5.14; Python 3.11's mmap has no name for it
_POPULATE_SLICE_BYTES = 64 * 1024 * 1024

_Span: TypeAlias = tuple[int, int, int]
"""Position of a shard in the call, first byte of what is copied at once, byte after the last one."""

# A fork without exec copies the connection, and its end would not be seen before the child ends too.
_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_inherited_connections() -> None:
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_inherited_connections)


class ArenaMapping:
    """The mapped arena. Copying threads bracket every use with `enter` and `leave`; thread-safe."""

    def __init__(self, descriptor: int, arena_bytes: int, connection: socket.socket) -> None:
        """Map the whole arena. The caller keeps `descriptor`; `connection` is owned from here on."""
        self._memory = mmap.mmap(descriptor, arena_bytes)
        self._exported: ctypes.c_char | None = ctypes.c_char.from_buffer(self._memory)
        self._connection = connection
        self._lock = threading.Lock()
        self._num_copies = 0
        self._is_retired = False
        self._user: ArenaUser | None = None
        self.num_bytes = arena_bytes
        self.address = ctypes.addressof(self._exported)
        self.view = memoryview(self._memory)
        _connections.add(connection)

    def introduce(self, user: ArenaUser) -> None:
        """Tell `user` of the memory now, and once more before it goes. For the owner, before it shares the mapping."""
        self._user = user
        try:
            user.arena_mapped(self)
        except Exception:  # noqa: BLE001 - the user's code may raise anything; its copies then do without preparation
            _log.exception("the user of the arena failed to prepare it; copies may be slower")

    def enter(self) -> bool:
        """Start a use of the memory; False when the mapping is retired: do not touch it then."""
        with self._lock:
            if self._is_retired:
                return False
            self._num_copies += 1
            return True

    def leave(self) -> None:
        """End a use; the last one after `retire` unmaps."""
        with self._lock:
            self._num_copies -= 1
            is_last = self._is_retired and self._num_copies == 0
        if is_last:
            self._unmap()

    def retire(self) -> None:
        """Let no new use start, and unmap as soon as none is left. Idempotent, does not wait."""
        with self._lock:
            if self._is_retired:
                return
            self._is_retired = True
            is_idle = self._num_copies == 0
        if is_idle:
            self._unmap()

    def populate(self) -> None:
        """Fill the page table, so that first copies run at full speed (a fault per page halves them, measured).

        Takes about 0.2 s per GiB, in slices, so that neither `retire` nor a thread that maps memory waits long. Kernels
        without MADV_POPULATE_READ fault page by page instead.
        """
        madvise = ctypes.CDLL(None, use_errno=True).madvise
        madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        for start in range(0, self.num_bytes, _POPULATE_SLICE_BYTES):
            if not self.enter():
                return
            try:
                length = min(_POPULATE_SLICE_BYTES, self.num_bytes - start)
                if madvise(self.address + start, length, _MADV_POPULATE_READ):
                    return
            finally:
                self.leave()

    def _unmap(self) -> None:
        if self._user is not None:
            try:
                self._user.arena_unmapping(self)
            except Exception:  # noqa: BLE001 - the user's code may raise anything; the memory goes all the same
                _log.exception("the user of the arena failed to let go of it")
        self._exported = None
        self.view.release()
        self._memory.close()
        self._connection.close()


class SharedMemoryPlane:
    """Bytes by copies to and from the mapped arena."""

    name: Literal["shared_memory"] = "shared_memory"

    def __init__(self, mapping: ArenaMapping, piece_bytes: int, *, span_bytes: int = 0) -> None:
        """Own `mapping`. Copies take whole pieces of one shard, at least `span_bytes` together where it has so many."""
        self._mapping = mapping
        self._piece_bytes = piece_bytes
        self._pieces_per_span = max(1, -(-span_bytes // piece_bytes))
        self._spare = SpareThread("larder-copy")

    def write(
        self,
        shards: Sequence[ReservedWrite],
        *,
        watch: Watch,
        deadline: Deadline,  # noqa: ARG002 - the watch has it too
    ) -> list[tuple[int, ...] | Reason]:
        """See `Plane`."""
        checksums: list[list[int | None]] = []
        failed: dict[int, Reason] = {}
        spans: list[_Span] = []
        piece_bytes, address, view = self._piece_bytes, self._mapping.address, self._mapping.view
        for index, shard in enumerate(shards):
            size = shard.write.size_bytes
            checksums.append([None] * -(-size // piece_bytes))
            if self._holds(shard.offset, size):
                self._add_spans(spans, index, 0, size)
            else:
                failed[index] = Reason.INTERNAL

        def copy(index: int, first: int, stop: int) -> None:
            shard = shards[index]
            at, of_shard = shard.offset, checksums[index]
            shard.write.source.gather(first, stop, address + at + first)
            while first < stop:
                end = min(first + piece_bytes, stop)
                of_shard[first // piece_bytes] = piece_checksum(view[at + first : at + end])
                first = end

        if not self._copy_all(spans, copy, failed, watch):
            return [Reason.AGENT_DOWN] * len(shards)
        results: list[tuple[int, ...] | Reason] = []
        for index, of_shard in enumerate(checksums):
            complete = tuple(c for c in of_shard if c is not None)
            is_complete = len(complete) == len(of_shard) and index not in failed
            results.append(
                complete if is_complete else failed.get(index) or watch.stopped or Reason.INTERNAL
            )
        return results

    def read(
        self,
        lease_id: int,  # noqa: ARG002 - the extents say it all
        shards: Sequence[LeasedRead],
        *,
        watch: Watch,
        deadline: Deadline,  # noqa: ARG002 - the watch has it too
    ) -> list[Reason]:
        """See `Plane`. Each piece is verified before any of it is handed over."""
        missing: list[set[int]] = []
        failed: dict[int, Reason] = {}
        spans: list[_Span] = []
        piece_bytes, address, view = self._piece_bytes, self._mapping.address, self._mapping.view
        for index, shard in enumerate(shards):
            read = shard.read
            num_before = len(spans)
            if not self._holds(shard.offset, read.size_bytes):
                failed[index] = Reason.INTERNAL
            elif read.start < read.stop:
                self._add_spans(spans, index, read.start - read.start % piece_bytes, read.stop)
            missing.append({first for _, first, _ in spans[num_before:]})

        def copy(index: int, first: int, stop: int) -> None:
            shard = shards[index]
            read, at, checksums = shard.read, shard.offset, shard.checksums
            if checksums is not None:
                start = first
                while start < stop:  # whole pieces: the last one may end after what is wanted
                    end = min(start + piece_bytes, read.size_bytes)
                    found = piece_checksum(view[at + start : at + end])
                    if found != checksums[start // piece_bytes]:
                        failed[index] = Reason.CHECKSUM
                        return
                    start = end
            wanted = max(first, read.start)
            read.sink.scatter(wanted, stop, address + at + wanted)
            missing[index].discard(first)

        if not self._copy_all(spans, copy, failed, watch):
            return [Reason.AGENT_DOWN] * len(shards)
        return [
            failed.get(index) or ((watch.stopped or Reason.INTERNAL) if left else Reason.HIT)
            for index, left in enumerate(missing)
        ]

    def retire(self) -> None:
        """See `Plane`."""
        self._mapping.retire()
        self._spare.stop()

    def _add_spans(self, spans: list[_Span], index: int, first: int, stop: int) -> None:
        """Cut [first, stop) of a shard into spans of whole pieces but for the end; `first` is where a piece begins.

        None has fewer pieces than a span should have, unless all together have.
        """
        step = self._piece_bytes
        num_pieces = -(-(stop - first) // step)
        num_spans = num_pieces // self._pieces_per_span
        if num_spans <= 1:
            if num_pieces:
                spans.append((index, first, stop))
            return
        cuts = [first + num_pieces * i // num_spans * step for i in range(num_spans)]
        cuts.append(stop)
        spans += [(index, *cut) for cut in pairwise(cuts)]

    def _copy_all(
        self,
        spans: list[_Span],
        copy: Callable[[int, int, int], None],
        failed: dict[int, Reason],
        watch: Watch,
    ) -> bool:
        """Call `copy` for the spans, here and in the spare thread, until the watch stops it.

        Shards in `failed` are passed over, and one whose copy raises is added. False when the mapping is gone.
        """
        if not self._mapping.enter():
            return False
        left = iter(spans)  # of a list, so that two threads may share it

        def work(may_go_on: Callable[[], bool]) -> None:
            for index, first, stop in left:
                if not may_go_on():
                    return
                if index in failed:
                    continue
                try:
                    copy(index, first, stop)
                except Exception:  # noqa: BLE001 - the caller's source or sink may raise anything
                    failed[index] = Reason.INTERNAL
                    _log.exception(
                        "a page source or sink failed, its shard is neither stored nor loaded"
                    )

        try:
            if len(spans) * self._pieces_per_span < MIN_SHARED_PIECES or len(spans) == 1:
                work(watch.may_go_on)
            else:
                self._spare.share(lambda: work(watch.may_go_on), lambda: work(watch.has_time))
        finally:
            self._mapping.leave()
        return True

    def _holds(self, offset: int, num_bytes: int) -> bool:
        """Whether the extent lies in the arena; one that does not would end the process, so nobody is trusted."""
        if 0 <= offset <= self._mapping.num_bytes - num_bytes:
            return True
        _log.error(
            "the agent names an extent outside its arena: offset=%s length=%s", offset, num_bytes
        )
        return False


def map_arena(
    socket_dir: Path, *, session_token: bytes, epoch: int, arena_bytes: int, deadline: Deadline
) -> ArenaMapping:
    """Ask `socket_dir`/arena.sock for the arena of this session, and map it.

    Waits while the agent is not ready. Raises AgentUnavailable when nobody answers before the deadline, and
    AgentRejected when the arena can't be had or must not be mapped; both messages say why.
    """
    path = socket_dir / "arena.sock"
    pause = threading.Event()
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            status, mapping = _ask(connection, path, session_token, epoch, arena_bytes, deadline)
        except OSError as error:
            connection.close()
            raise AgentUnavailable(f"{path} does not hand over the arena: {error}") from error
        except BaseException:
            connection.close()
            raise
        if mapping is not None:
            return mapping
        connection.close()
        if status != _STATUS_NOT_READY:
            raise AgentRejected(
                f"{path} refuses the arena: {_REFUSALS.get(status, f'status {status}')}"
            )
        if deadline.has_passed():
            raise AgentUnavailable(f"{path} has no arena ready yet")
        pause.wait(0.05)


def _ask(
    connection: socket.socket,
    path: Path,
    token: bytes,
    epoch: int,
    arena_bytes: int,
    deadline: Deadline,
) -> tuple[int, ArenaMapping | None]:
    """Status of one try, and the mapping when it is OK (then `connection` belongs to it)."""
    connection.settimeout(max(0.001, deadline.left_s()))
    connection.connect(str(path.absolute()))
    connection.sendall(_HELLO.pack(_MAGIC, PROTOCOL_VERSION, 0, token))
    answer, descriptors = _receive_answer(connection)
    try:
        magic, version, status, answered_epoch, _, answered_bytes = _ANSWER.unpack(answer)
        if magic != _MAGIC or version != PROTOCOL_VERSION:
            raise AgentRejected(
                f"{path} answers in another protocol; is it the socket of a Larder agent?"
            )
        if status != _STATUS_OK:
            return status, None
        if answered_epoch != epoch:
            raise AgentUnavailable(f"{path} belongs to another incarnation of the agent")
        if len(descriptors) != 1:
            raise AgentRejected(f"{path} handed over {len(descriptors)} descriptors instead of one")
        if answered_bytes != arena_bytes or os.fstat(descriptors[0]).st_size < arena_bytes:
            raise AgentRejected(f"{path} hands over an arena of another size than the agent named")
        if fcntl.fcntl(descriptors[0], fcntl.F_GET_SEALS) & _NEEDED_SEALS != _NEEDED_SEALS:
            raise AgentRejected(
                f"{path} hands over an arena that is not sealed, so it could shrink under us"
            )
        connection.settimeout(None)
        return status, ArenaMapping(descriptors[0], arena_bytes, connection)
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _receive_answer(connection: socket.socket) -> tuple[bytes, list[int]]:
    """The fixed answer and what came with it; raises ConnectionError when the agent hangs up early."""
    answer = b""
    descriptors: list[int] = []
    space = socket.CMSG_SPACE(4 * 4)
    try:
        while len(answer) < _ANSWER.size:
            part, ancillary, _, _ = connection.recvmsg(
                _ANSWER.size - len(answer), space, socket.MSG_CMSG_CLOEXEC
            )
            for level, kind, content in ancillary:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    whole = len(content) - len(content) % 4
                    descriptors += struct.unpack(f"={whole // 4}i", content[:whole])
            if not part:
                raise ConnectionError("the agent hung up")
            answer += part
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return answer, descriptors
