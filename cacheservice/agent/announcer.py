"""Tells the index what this agent holds, behind the backs of callers.

Invariants: the map of what is to be told is bounded (above it, everything is told again later); one thread speaks to
the index, so announcements of one chunk never overtake each other; while the index is away the agent serves on.
Called by `serve.py`; the guarded store reports changes.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.store import HeldChunk
from cacheservice.errors import IndexUnavailable
from cacheservice.index.port import Announcement, Index

_log = logging.getLogger(__name__)

BATCH = 1000
_MAX_WAITING = 200_000
"""Chunks remembered while the index is away; about 40 MB. Above it, all is announced again instead."""
_COALESCE_S = 0.02
_HEARTBEAT_S = 3.0
_REFRESH_S = 2400.0
"""Entries live 1 h in the index; all are told again well before."""
_REANNOUNCED_PER_S = 20_000
"""A third of what one Redis takes from one client (48 to 72 thousand a second, measured)."""
_MAX_BACK_OFF_S = 5.0
_TURN_S = 1.0
"""How long announcing may go on before the next look at the clock; well below the node lease of 10 s."""
_REJOIN_AFTER_FAILURES = 3


_Keys = tuple[NamespaceDigest, Sequence[ChunkKey]]
"""Some chunks of one namespace."""


class Announcer:
    """One thread that joins, beats, announces and at last leaves."""

    def __init__(
        self,
        index: Index,
        guarded: GuardedStore,
        *,
        node_name: str,
        address: str,
        epoch: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._index = index
        self._guarded = guarded
        self._node_name = node_name
        self._address = address
        self._epoch = epoch
        self._clock = clock
        self._lock = threading.Lock()
        self._waiting: dict[tuple[NamespaceDigest, ChunkKey], int] = {}
        self._tell_all = False
        """True: begin to announce everything, as soon as the index answers."""
        self._retold: Iterator[_Keys] | None = None
        """What is still to be announced again; None when that is done."""
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._withdrawn = threading.Event()
        self._thread = threading.Thread(target=self._run, name="announcer", daemon=True)
        self.node_number = 0
        """Number of this node; 0 until the index was reached for the first time."""
        self.num_overflows = 0

    def start(self) -> None:
        """Begin to talk to the index. Never waits for it."""
        self._guarded.on_changes(self.note)
        self._thread.start()

    def note(self, changes: Sequence[HeldChunk]) -> None:
        """Remember what to tell. Called under the core lock: does nothing that waits."""
        with self._lock:
            for change in changes:
                self._waiting[change.namespace, change.chunk] = change.bitmap
            if len(self._waiting) > _MAX_WAITING:
                # What was withdrawn and is forgotten here expires in the index by itself, or its owner refuses it.
                self._waiting.clear()
                self._tell_all = True
                self.num_overflows += 1
        self._wake.set()

    @property
    def num_waiting(self) -> int:
        """Chunks of which the index does not know the latest yet."""
        return len(self._waiting)

    def stop(self, deadline_s: float) -> bool:
        """Withdraw what was announced, leave the node table, end the thread. False when the time did not suffice."""
        self._deadline = self._clock() + deadline_s
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(timeout=deadline_s + 0.5)
        return self._withdrawn.is_set()

    def _run(self) -> None:
        failures = 0
        next_beat_s = next_refresh_s = 0.0
        while not self._stopping.is_set():
            now_s = self._clock()
            try:
                if self.node_number == 0 or failures >= _REJOIN_AFTER_FAILURES:
                    self._join()
                    next_beat_s = now_s + _HEARTBEAT_S
                    next_refresh_s = now_s + _REFRESH_S * random.uniform(0.8, 1.0)
                elif now_s >= next_beat_s:
                    next_beat_s = now_s + _HEARTBEAT_S
                    if self._index.heartbeat():
                        _log.warning(
                            "index lost our entries; announcing again node=%d", self.node_number
                        )
                        self._note_all(spread_s=1.0)
                        self._join()  # what it lost may include our number
                if now_s >= next_refresh_s:
                    next_refresh_s = now_s + _REFRESH_S * random.uniform(0.8, 1.0)
                    self._note_all(spread_s=5.0)
                self._send_waiting()
                self._retell()
                if failures:
                    _log.info("index is back failures=%d", failures)
                failures = 0
            except IndexUnavailable as error:
                failures += 1
                if failures == 1:
                    _log.warning("index unavailable; serving what is here error=%s", error)
                self._stopping.wait(
                    min(_MAX_BACK_OFF_S, 0.25 * 2 ** min(failures, 5)) * random.uniform(0.5, 1.0)
                )
                continue
            except Exception:  # noqa: BLE001
                # The outermost frame of the thread: our bug must not end announcements for good.
                _log.exception("announcer failed; trying again")
                self._stopping.wait(1.0)
                continue
            if self._has_more():
                continue
            self._wake.wait(max(0.0, min(next_beat_s - self._clock(), _HEARTBEAT_S)))
            self._wake.clear()
            # Let a burst of commits become one call.
            self._stopping.wait(_COALESCE_S)
        self._withdraw()

    def _join(self) -> None:
        number = self._index.join(name=self._node_name, address=self._address, epoch=self._epoch)
        if number != self.node_number:
            _log.info(
                "joined the index node=%s number=%d epoch=%08x",
                self._node_name,
                number,
                self._epoch,
            )
            self.node_number = number
        self._note_all(spread_s=0.0)

    def _note_all(self, *, spread_s: float) -> None:
        """Announce everything again, after a moment, so that many agents do not begin at once."""
        self._stopping.wait(random.uniform(0.0, spread_s))
        self._tell_all = True

    def _retell(self) -> None:
        """Announce what is held, a batch at a time, changes first, for a moment: heartbeats must go on."""
        if self._tell_all:
            self._tell_all = False
            self._retold = self._all_keys()
        until_s = self._clock() + _TURN_S
        while self._retold is not None and not self._tell_all and not self._stopping.is_set():
            if self._clock() >= until_s:
                return
            keys = next(self._retold, None)
            if keys is None:
                self._retold = None
                return
            started_s = self._clock()
            # As it is now: what changes after this is told after this.
            with self._guarded.reading() as store:
                held = store.held(*keys)
            try:
                self._index.announce([Announcement(*chunk) for chunk in held])
            except IndexUnavailable:
                self._tell_all = True
                raise
            # Slowly, so that agents that all come back do not drown the index.
            self._stopping.wait(max(0.0, BATCH / _REANNOUNCED_PER_S - (self._clock() - started_s)))
            self._send_waiting()

    def _all_keys(self) -> Iterator[_Keys]:
        """Keys of everything that is here now, in batches. Holds the core lock for a copy of the keys only."""
        with self._guarded.reading() as store:
            every = store.chunk_keys(None)
        return (
            (namespace, keys[start : start + BATCH])
            for namespace, keys in every
            for start in range(0, len(keys), BATCH)
        )

    def _send_waiting(self) -> None:
        until_s = self._clock() + _TURN_S
        while not self._stopping.is_set() and self._clock() < until_s:
            batch = self._take_batch()
            if not batch:
                return
            self._send(batch)

    def _has_more(self) -> bool:
        return self._retold is not None or self._tell_all or bool(self._waiting)

    def _take_batch(self) -> list[Announcement]:
        with self._lock:
            keys = list(islice(self._waiting, BATCH))
            return [Announcement(ns, chunk, self._waiting.pop((ns, chunk))) for ns, chunk in keys]

    def _send(self, batch: Sequence[Announcement]) -> None:
        try:
            self._index.announce(batch)
        except IndexUnavailable:
            with self._lock:
                for item in batch:
                    self._waiting.setdefault((item.namespace, item.chunk), item.bitmap)
            raise

    def _ours(self) -> Iterator[list[Announcement]]:
        """Withdrawals of all that the index may have of us: what is here, and what is gone and was not told yet."""
        while waiting := self._take_batch():
            yield [Announcement(a.namespace, a.chunk, 0) for a in waiting]
        for namespace, keys in self._all_keys():
            yield [Announcement(namespace, chunk, 0) for chunk in keys]

    def _withdraw(self) -> None:
        """Take our entries out while there is time, then the node: what is left then is dead in one step."""
        try:
            if self.node_number:
                for batch in self._ours():
                    if self._clock() >= self._deadline:
                        _log.warning("drain ran out of time; the rest of our entries expires")
                        break
                    self._index.announce(batch)
                self._index.leave()
            self._withdrawn.set()
        except IndexUnavailable as error:
            _log.warning(
                "index unavailable at drain; our entries expire by themselves error=%s", error
            )
