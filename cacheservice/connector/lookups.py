"""Lookups on background threads, so that the scheduler half never waits for the agent longer than it chooses to.

Owns two small pools: one for lookups that come back at once, one for those that wait at the agent until something is
stored; the second is bounded, and who finds no place in it asks again and again without waiting. A lookup that
nobody wants any more gives its lease back when it arrives, and one that was not answered the lease that it should have
superseded. One that comes to its turn after its deadline is not asked. Threads start with the namespace or the first
lookup, never at import or construction.

Called by: scheduler.py, from the engine's scheduling thread only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cacheservice.connector.pools import start_threads, submit_once
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.outcomes import Reason

if TYPE_CHECKING:
    from cacheservice.client.values import LookupAnswer, LookupWait

NUM_QUICK_THREADS = 4
NUM_WAITING_THREADS = 16


@dataclass(slots=True)
class LookupHandle:
    """One lookup on its way. `answer` is set before `done`."""

    request_id: str
    done: threading.Event = field(default_factory=threading.Event)
    answer: LookupAnswer | None = None
    failure: Reason = Reason.INTERNAL
    """Why there is no answer, when there is none."""
    answered_at: float = 0.0
    """When the answer came, which may be long before anybody takes it: requests queue."""
    waits: bool = False
    is_abandoned: bool = False


@dataclass(frozen=True, slots=True)
class LookupQuestion:
    """What to ask; see CacheClient.lookup."""

    namespace: NamespaceDigest
    chunks: tuple[ChunkKey, ...]
    superseded_lease: int
    wait: LookupWait
    wait_num_chunks: int
    wait_s: float
    owner: tuple[int, int] | None
    deadline_s: float


class Lookups:
    """The threads that lookups run on."""

    def __init__(self, client: Any, clock: Callable[[], float] = time.monotonic) -> None:
        """Use this client, which stays the caller's."""
        self._client = client
        self._clock = clock
        self._lock = threading.Lock()
        self._num_waiting = 0
        self._quick = ThreadPoolExecutor(NUM_QUICK_THREADS, thread_name_prefix="larder-lookup")
        self._waiting = ThreadPoolExecutor(
            NUM_WAITING_THREADS, thread_name_prefix="larder-lookup-wait"
        )
        self._is_closed = False

    def start_threads(self) -> None:
        """Make the threads of lookups that come back at once; those that wait are made as needed."""
        start_threads(self._quick, NUM_QUICK_THREADS)

    def start(self, request_id: str, question: LookupQuestion) -> LookupHandle | None:
        """Ask in the background. None when this one would wait and all waiting places are taken; a handle without an
        answer when there is no thread to ask with."""
        waits = question.wait_s > 0
        handle = LookupHandle(request_id, waits=waits)
        with self._lock:
            if self._is_closed or (waits and self._num_waiting >= NUM_WAITING_THREADS):
                return None
            self._num_waiting += waits
        pool = self._waiting if waits else self._quick
        if not submit_once(pool, self._run, handle, question, self._clock()):
            self._give_back(question.superseded_lease)
            self._end(handle)
        return handle

    def abandon(self, handle: LookupHandle) -> None:
        """Nobody wants this answer; the lease that it brings is given back."""
        with self._lock:
            handle.is_abandoned = True
            answer = handle.answer
        if answer is not None:
            self._give_back(answer.lease_id)

    def close(self) -> None:
        """End the threads; the client must have been closed before, so that no call lasts. Idempotent."""
        with self._lock:
            self._is_closed = True
        self._quick.shutdown(wait=True, cancel_futures=True)
        self._waiting.shutdown(wait=True, cancel_futures=True)

    def _run(self, handle: LookupHandle, question: LookupQuestion, started_at: float) -> None:
        try:
            answer = None
            left_s = question.deadline_s - (self._clock() - started_at)
            if left_s <= 0:
                handle.failure = Reason.DEADLINE
            elif not handle.is_abandoned:
                answer = self._client.lookup(
                    question.namespace,
                    question.chunks,
                    take_lease=True,
                    superseded_lease=question.superseded_lease,
                    wait=question.wait,
                    wait_num_chunks=question.wait_num_chunks,
                    wait_s=min(question.wait_s, left_s),
                    owner=question.owner,
                    deadline_s=left_s,
                )
            if answer is None or answer.reason is not None:
                # Perhaps the agent has ended it, perhaps not; a second release is ignored.
                self._give_back(question.superseded_lease)
            with self._lock:
                handle.answered_at = self._clock()
                handle.answer = answer
                give_back = handle.is_abandoned
            if give_back and answer is not None:
                self._give_back(answer.lease_id)
        finally:
            self._end(handle)

    def _give_back(self, lease_id: int) -> None:
        if lease_id:
            self._client.release(lease_id)

    def _end(self, handle: LookupHandle) -> None:
        if handle.waits:
            with self._lock:
                self._num_waiting -= 1
        handle.done.set()


def wait_for(handle: LookupHandle, budget_s: float) -> float:
    """Wait for an answer, at most so long; returns what is left of the budget."""
    if handle.done.is_set() or budget_s <= 0:
        return budget_s
    before = time.monotonic()
    handle.done.wait(budget_s)
    return max(0.0, budget_s - (time.monotonic() - before))
