"""Answers lookups: what is here, what is said to be elsewhere, and the waits of a lookup.

Local presence is the truth and is read under the core lock; the index and a hand-over's owner are asked without it. The
answer's presence and its lease are taken in one step at the end, so that what is called ready is leased. Called by
`service.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.pulls import PeerPulls
from cacheservice.agent.remote_hints import RemoteHints
from cacheservice.agent.sessions import Session
from cacheservice.agent.waiting_calls import WaitingCalls
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.layout import GroupKind, NamespaceSpec
from cacheservice.core.outcomes import Presence

_ABSENT = int(Presence.ABSENT)
_READY_HERE = int(Presence.READY_HERE)
_READY_ELSEWHERE = int(Presence.READY_ELSEWHERE)
_PENDING = int(Presence.PENDING)
_READY = (_READY_HERE, _READY_ELSEWHERE)
_READ_WHOLE = frozenset(kind.value for kind in GroupKind if kind.is_read_whole)
_OVERLAID = bytes(
    _READY_ELSEWHERE if both == (_READY_ELSEWHERE << 2 | _ABSENT) else both & 3
    for both in range(256)
)
"""By code seen elsewhere << 2 | code here."""
_INDEX_POLL_S = 0.1
"""How often a hand-over without a named owner asks the index again."""


@dataclass(frozen=True, slots=True)
class Wait:
    """What a lookup waits for: what a hand-over promised (see `_promised`), or that no named chunk is pending."""

    num_chunks: int
    seconds: float
    is_hand_over: bool
    owner_node: int = 0
    owner_epoch: int = 0


@dataclass(frozen=True, slots=True)
class LookupResult:
    """What a lookup found; `lease_id` 0 when it has none."""

    presence: bytes
    lease_id: int
    index_asked: bool


class Lookups:
    """Holds no state of calls. Thread-safe."""

    def __init__(
        self,
        guarded: GuardedStore,
        hints: RemoteHints,
        pulls: PeerPulls,
        waiting_calls: WaitingCalls,
        *,
        own_epoch: int,
    ) -> None:
        self._guarded = guarded
        self._hints = hints
        self._pulls = pulls
        self._waiting_calls = waiting_calls
        self._own_epoch = own_epoch

    def look_up(
        self,
        session: Session,
        namespace: NamespaceDigest,
        chunks: Sequence[ChunkKey],
        *,
        takes_lease: bool,
        superseded_lease: int,
        wait: Wait | None,
        is_active: Callable[[], bool],
    ) -> LookupResult:
        """Answer one lookup; waits at most `wait.seconds`. UnknownObject for a namespace that is not open."""
        # A peer asks what is here; asking others for it in turn could go round in circles.
        sees_elsewhere = session.hello.role != "peer" and not self._hints.is_alone()
        elsewhere = bytearray()
        index_asked = True
        if sees_elsewhere or wait is not None:
            with self._guarded.reading() as store:
                spec = store.namespace(namespace)
                if sees_elsewhere:
                    elsewhere = store.presence(namespace, chunks)
            if sees_elsewhere:
                index_asked = self._hints.overlay(spec, chunks, elsewhere)
            if wait is not None and wait.num_chunks and wait.seconds > 0:
                with self._waiting_calls.slot() as may_wait:
                    if may_wait:
                        self._sleep(
                            spec, chunks, wait, elsewhere, is_active, sees_elsewhere=sees_elsewhere
                        )
        now_s = self._guarded.clock()
        num_elsewhere = _num_elsewhere(elsewhere, len(chunks))
        with self._guarded.changing() as store:
            presence, lease = store.look_up(
                session.id, namespace, chunks, now_s,
                takes_lease=takes_lease, superseded=superseded_lease,
            )  # fmt: skip
            if num_elsewhere:
                store.count_found_elsewhere(session.id, namespace, num_elsewhere)
        lease_id = lease.lease_id if lease is not None else 0
        _overlay(presence, elsewhere)
        return LookupResult(bytes(presence), lease_id, index_asked)

    def _sleep(
        self,
        spec: NamespaceSpec,
        chunks: Sequence[ChunkKey],
        wait: Wait,
        elsewhere: bytearray,
        is_active: Callable[[], bool],
        *,
        sees_elsewhere: bool,
    ) -> None:
        """Sleep until the wait is fulfilled or hopeless, or its time is over; `elsewhere` is brought up to date."""
        named = chunks[: wait.num_chunks]
        num_states = len(named) * len(spec.groups)
        promised = _promised(spec, len(named)) if wait.is_hand_over else []
        deadline_s = self._guarded.clock() + wait.seconds
        owner_is_elsewhere = wait.owner_node != 0 and wait.owner_epoch != self._own_epoch
        asks_owner = sees_elsewhere and wait.is_hand_over and owner_is_elsewhere
        polls_index = sees_elsewhere and wait.is_hand_over
        next_poll_s = self._guarded.clock() + _INDEX_POLL_S
        while is_active():
            with self._guarded.waiting() as (store, sleep):
                presence = store.presence(spec.digest, named)
                if wait.is_hand_over:
                    _overlay(presence, elsewhere)
                    is_over = all(presence[position] in _READY for position in promised)
                else:
                    is_over = Presence.PENDING not in presence
                if is_over:
                    return
                now_s = self._guarded.clock()
                if now_s >= deadline_s:
                    return
                if not asks_owner and (not polls_index or now_s < next_poll_s):
                    sleep(
                        min(deadline_s, next_poll_s if polls_index else deadline_s, now_s + 0.5)
                        - now_s
                    )
                    continue
            if asks_owner:
                asks_owner = False
                seen = self._pulls.ask_owner(
                    spec,
                    named,
                    node=wait.owner_node,
                    epoch=wait.owner_epoch,
                    wait_s=deadline_s - now_s,
                )
                if seen is None:
                    return  # it is gone, and with it the promise
                for position in range(num_states):
                    if seen[position] == _READY_HERE:
                        elsewhere[position] = _READY_ELSEWHERE
            else:
                # Asked for is only what was promised and was not seen elsewhere yet; what is here is read above.
                asked = bytearray([_PENDING]) * num_states
                for position in promised:
                    asked[position] = (
                        _ABSENT if elsewhere[position] != _READY_ELSEWHERE else _PENDING
                    )
                self._hints.overlay(spec, named, asked)
                for position in promised:
                    if asked[position] == _READY_ELSEWHERE:
                        elsewhere[position] = _READY_ELSEWHERE
                next_poll_s = self._guarded.clock() + _INDEX_POLL_S


def _promised(spec: NamespaceSpec, num_chunks: int) -> list[int]:
    """Positions among presence codes of what a hand-over of `num_chunks` chunks promises, which is a hit at their end.

    It reads every chunk of full attention and MLA, but only the end of a window and the last recurrent state: those of
    earlier chunks were perhaps never stored. A window that is longer than a chunk reads some chunks more, which
    their writer has committed by then: chunks are stored in order. Where a local chunk ends nothing of it is read or
    stored, and where that is only the engines know, so nothing of local chunks is waited for: they are stored together
    with the attention of the same chunk.
    """
    num_groups = len(spec.groups)
    promised: list[int] = []
    for number, group in enumerate(spec.groups):
        if group.kind == GroupKind.CHUNKED_LOCAL.value:
            continue
        first = 0 if group.kind in _READ_WHOLE else num_chunks - 1
        promised += range(first * num_groups + number, num_chunks * num_groups, num_groups)
    return promised


def _num_elsewhere(elsewhere: bytearray, num_chunks: int) -> int:
    """Chunks of which something was seen elsewhere: those of the group of which most was."""
    if _READY_ELSEWHERE not in elsewhere:
        return 0
    num_groups = len(elsewhere) // num_chunks
    return max(elsewhere[group::num_groups].count(_READY_ELSEWHERE) for group in range(num_groups))


def _overlay(presence: bytearray, elsewhere: bytearray) -> None:
    """Mark what is absent here and was seen elsewhere."""
    if _READY_ELSEWHERE not in elsewhere:
        return
    # Both codes of a state in one byte, which is looked up: a loop over thousands of states would be most of a lookup.
    seen = int.from_bytes(elsewhere[: len(presence)]) << 2
    both = (seen | int.from_bytes(presence)).to_bytes(len(presence))
    presence[:] = both.translate(_OVERLAID)
