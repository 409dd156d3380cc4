"""Acquires: a lease on shards, answered as they become ready, until the deadline.

Every shard is answered once: ready (now, when its writer commits, or when it was pulled), or with the reason why not.
The lease covers what was answered ready; it is given back when the caller goes away before the end. Called by
`service.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.pulls import PeerPulls, PullTicket, ShardName
from cacheservice.agent.sessions import Session
from cacheservice.agent.waiting_calls import WaitingCalls
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.store import AcquireAnswer, ReadyShard
from cacheservice.errors import UnknownObject
from cacheservice.v1 import cache_pb2

_MAX_PER_ANSWER = 512
"""Shards in one message: keeps it below 1 MiB with 200 checksums each."""
_LEASED_AT_ONCE = 1024
"""Shards leased in one hold of the core lock."""
_LOOK_UP_S = 0.5
"""How often a sleeping acquire looks whether its caller is still there."""

NOT_FOUND = cache_pb2.ACQUIRE_RESULT_NOT_FOUND
TIMED_OUT = cache_pb2.ACQUIRE_RESULT_TIMED_OUT


@dataclass(frozen=True, slots=True)
class Answered:
    """Some shards of one acquire, answered now: by position in the request."""

    lease_id: int
    ready: list[tuple[int, ReadyShard]]
    failed: list[tuple[int, cache_pb2.AcquireResult]]


@dataclass(slots=True)
class _Open:
    """What of one acquire is not answered yet."""

    positions: set[int]
    pulled: dict[int, PullTicket] = field(default_factory=dict)
    """By position: the pull that is to bring it. A position is pulled once at most."""


class Acquires:
    """Holds no state of calls. Thread-safe."""

    def __init__(
        self, guarded: GuardedStore, pulls: PeerPulls, waiting_calls: WaitingCalls
    ) -> None:
        self._guarded = guarded
        self._pulls = pulls
        self._waiting_calls = waiting_calls

    def acquire(
        self,
        session: Session,
        spec: NamespaceSpec,
        shards: Sequence[ShardName],
        *,
        wait_s: float,
        is_active: Callable[[], bool],
    ) -> Iterator[Answered]:
        """Yield answers until every shard has one. The caller closes the iterator when its own caller went away."""
        deadline_s = self._guarded.clock() + wait_s
        with self._guarded.changing() as store:
            answer = store.acquire(session.id, spec.digest, [], self._guarded.clock())
        is_done = False
        try:
            answer = self._lease(session, spec, shards, answer.lease_id)
            still_open = _Open({*answer.pending, *answer.absent})
            if answer.ready or not still_open.positions:
                yield from _in_parts(answer.lease_id, answer.ready, [])
            if still_open.positions:
                yield from self._rest(
                    session, spec, shards, answer, still_open, deadline_s, is_active
                )
            is_done = True
        finally:
            if not is_done or not is_active():
                self._give_back(session, answer.lease_id)

    def _lease(
        self, session: Session, spec: NamespaceSpec, shards: Sequence[ShardName], lease_id: int
    ) -> AcquireAnswer:
        """Take what is ready now into the lease, in slices: others get the lock in between."""
        parts = []
        # From the back: of one prompt the tail counts as accessed before the head.
        for start in reversed(range(0, len(shards), _LEASED_AT_ONCE)):
            part = shards[start : start + _LEASED_AT_ONCE]
            positions = range(start, start + len(part))
            with self._guarded.changing() as store:
                now_s = self._guarded.clock()
                parts.append(
                    store.extend_lease(session.id, lease_id, spec.digest, positions, part, now_s)
                )
        parts.reverse()
        return AcquireAnswer(
            lease_id,
            [ready for part in parts for ready in part.ready],
            [position for part in parts for position in part.pending],
            [position for part in parts for position in part.absent],
        )

    def _rest(
        self,
        session: Session,
        spec: NamespaceSpec,
        shards: Sequence[ShardName],
        first: AcquireAnswer,
        still_open: _Open,
        deadline_s: float,
        is_active: Callable[[], bool],
    ) -> Iterator[Answered]:
        with self._waiting_calls.slot() as may_wait:
            if not may_wait:
                deadline_s = 0.0
            absent: Sequence[int] = first.absent
            while True:
                # A peer gets what is here: pulling for it from a third agent could go round in circles.
                if session.hello.role != "peer" and self._guarded.clock() < deadline_s:
                    self._pull(spec, shards, still_open, absent, deadline_s)
                ready: list[tuple[int, ReadyShard]] = []
                failed: list[tuple[int, cache_pb2.AcquireResult]] = []
                with self._guarded.waiting() as (store, sleep):
                    while is_active():
                        now_s = self._guarded.clock()
                        positions = sorted(still_open.positions)
                        answer = store.extend_lease(
                            session.id,
                            first.lease_id,
                            spec.digest,
                            positions,
                            [shards[p] for p in positions],
                            now_s,
                        )
                        ready = answer.ready
                        is_over = now_s >= deadline_s
                        may_pull = not is_over and session.hello.role != "peer"
                        failed, absent = _judge(answer, shards, still_open, may_pull=may_pull)
                        if is_over:
                            gone = {p for p, _ in [*ready, *failed]}
                            failed += [(p, TIMED_OUT) for p in positions if p not in gone]
                        if ready or failed or absent:
                            break
                        sleep(min(deadline_s - now_s, _LOOK_UP_S))
                    else:
                        return
                still_open.positions -= {p for p, _ in [*ready, *failed]}
                if ready or failed:
                    yield from _in_parts(first.lease_id, ready, failed)
                if not still_open.positions:
                    return

    def _pull(
        self,
        spec: NamespaceSpec,
        shards: Sequence[ShardName],
        still_open: _Open,
        absent: Sequence[int],
        deadline_s: float,
    ) -> None:
        positions = [p for p in absent if p in still_open.positions and p not in still_open.pulled]
        if not positions:
            return
        ticket = self._pulls.start(spec, [shards[p] for p in positions], deadline_s)
        for position in positions:
            still_open.pulled[position] = ticket

    def _give_back(self, session: Session, lease_id: int) -> None:
        try:
            with self._guarded.changing() as store:
                store.release(session.id, [lease_id], self._guarded.clock())
        except UnknownObject:
            pass  # released by the caller, or gone with its session


def _judge(
    answer: AcquireAnswer, shards: Sequence[ShardName], still_open: _Open, *, may_pull: bool
) -> tuple[list[tuple[int, cache_pb2.AcquireResult]], list[int]]:
    """Of the absent ones: those that failed, and those that may still be pulled."""
    failed: list[tuple[int, cache_pb2.AcquireResult]] = []
    to_pull: list[int] = []
    for position in answer.absent:
        ticket = still_open.pulled.get(position)
        if ticket is None:
            # Its writer gave up; perhaps another agent has it.
            if may_pull:
                to_pull.append(position)
            else:
                failed.append((position, NOT_FOUND))
        elif ticket.is_done:
            failed.append((position, ticket.failures.get(shards[position], NOT_FOUND)))
    return failed, to_pull


def _in_parts(
    lease_id: int,
    ready: list[tuple[int, ReadyShard]],
    failed: list[tuple[int, cache_pb2.AcquireResult]],
) -> Iterator[Answered]:
    for start in range(0, max(len(ready), 1), _MAX_PER_ANSWER):
        part = ready[start : start + _MAX_PER_ANSWER]
        yield Answered(lease_id, part, failed if start == 0 else [])
