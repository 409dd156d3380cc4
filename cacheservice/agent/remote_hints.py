"""What other agents are said to hold: answers of the index, and of owners that a hand-over named.

Hints only: the owner confirms before any byte moves. One that turned out wrong is not believed again for a while.
Called by `lookups.py` (which overlays them on local presence) and `acquire.py` (which asks where to pull from).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from cacheservice.agent.config import parse_host_port
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.outcomes import Presence
from cacheservice.errors import IndexUnavailable
from cacheservice.index.port import Holder, Index, Node

_MAX_REMEMBERED = 65536
_FRESH_S = 2.0
"""Presence older than this is asked again (design, section 5)."""
_DISTRUST_S = 10.0
"""A hint that was wrong is ignored this long: the index forgets it meanwhile, or its node heals."""
_CPU_TIER = 1
# Plain integers: comparing a byte with an enum's member costs five times as much, per chunk of each lookup.
_ABSENT = int(Presence.ABSENT)
_READY_HERE = int(Presence.READY_HERE)
_READY_ELSEWHERE = int(Presence.READY_ELSEWHERE)


class RemoteHint(NamedTuple):
    """One chunk that another agent is said to hold."""

    node: int
    epoch: int
    bitmap: int
    parent: ChunkKey | None
    """Key of the chunk before it, as far as a lookup told; None otherwise."""
    number: int
    """Position in its chain, as far as a lookup told; 0 otherwise."""
    until_s: float


_Remembered = tuple[int, int, int, ChunkKey | None, int, float]
"""The fields of a `RemoteHint`, bare: a lookup makes one for each of its chunks, and few are asked for."""


def group_masks(spec: NamespaceSpec) -> list[int]:
    """Per group the bits of all its shards in the index's bitmap."""
    masks = []
    first = 0
    for group in spec.groups:
        masks.append(((1 << group.num_shards) - 1) << first)
        first += group.num_shards
    return masks


class RemoteHints:
    """Asks the index and remembers what it said, bounded. Thread-safe; never raises for the index."""

    def __init__(self, index: Index, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._lock = threading.Lock()
        self._hints: OrderedDict[tuple[bytes, bytes], _Remembered] = OrderedDict()
        self._distrusted: OrderedDict[tuple[bytes, bytes, int], float] = OrderedDict()

    def overlay(self, spec: NamespaceSpec, chunks: Sequence[ChunkKey], presence: bytearray) -> bool:
        """Mark in `presence` (chunk-major) what is absent here and ready elsewhere; False when the index is away."""
        if _ABSENT not in presence or self.is_alone():
            return True
        num_groups = len(spec.groups)
        absent = [at for at, state in enumerate(presence) if state == _ABSENT]
        wanted = absent if num_groups == 1 else sorted({at // num_groups for at in absent})
        found = self._ask(spec.digest, [chunks[p] for p in wanted])
        if found is None:
            return False
        masks = group_masks(spec)
        digest, until_s = spec.digest, self._clock() + _FRESH_S
        parents = (None, *chunks)
        hints: dict[tuple[bytes, bytes], _Remembered] = {}
        for position, holder in zip(wanted, found, strict=True):
            if holder is None:
                continue
            bitmap = holder.bitmap
            hints[digest, chunks[position]] = (
                holder.node, holder.epoch, bitmap, parents[position], position, until_s,
            )  # fmt: skip
            if num_groups > 1:
                mark_elsewhere(presence, position * num_groups, masks, bitmap)
            elif bitmap & masks[0] == masks[0]:
                presence[position] = _READY_ELSEWHERE
        with self._lock:
            self._remember(hints)
        return True

    def learn(
        self,
        spec: NamespaceSpec,
        chunks: Sequence[ChunkKey],
        node: int,
        epoch: int,
        presence: bytes,
    ) -> None:
        """Remember what an owner said itself (its answer to a lookup of the same chunks)."""
        num_groups = len(spec.groups)
        masks = group_masks(spec)
        until_s = self._clock() + _DISTRUST_S
        with self._lock:
            for position, chunk in enumerate(chunks):
                states = presence[position * num_groups : (position + 1) * num_groups]
                bitmap = sum(m for m, s in zip(masks, states, strict=True) if s == _READY_HERE)
                if not bitmap:
                    continue
                parent = chunks[position - 1] if position else None
                self._distrusted.pop((spec.digest, chunk, node), None)
                hint = RemoteHint(node, epoch, bitmap, parent, position, until_s)
                self._remember({(spec.digest, chunk): hint})

    def find(self, spec: NamespaceSpec, chunks: Sequence[ChunkKey]) -> dict[ChunkKey, RemoteHint]:
        """Where the chunks are said to be; those that are nowhere are left out."""
        now_s = self._clock()
        found: dict[ChunkKey, RemoteHint] = {}
        remembered: dict[ChunkKey, RemoteHint] = {}
        with self._lock:
            for chunk in chunks:
                known = self._hints.get((spec.digest, chunk))
                if known is not None:
                    hint = RemoteHint(*known)
                    remembered[chunk] = hint
                    if hint.until_s > now_s:
                        found[chunk] = hint
        unknown = [chunk for chunk in chunks if chunk not in found]
        if not unknown or self.is_alone():
            return found
        for chunk, holder in zip(unknown, self._ask(spec.digest, unknown) or [], strict=False):
            if holder is not None:
                old = remembered.get(chunk)
                parent, number = (old.parent, old.number) if old is not None else (None, 0)
                found[chunk] = RemoteHint(
                    holder.node, holder.epoch, holder.bitmap, parent, number, now_s + _FRESH_S
                )
        return found

    def distrust(self, namespace: NamespaceDigest, chunks: Sequence[ChunkKey], node: int) -> None:
        """A hint was wrong, or its node does not deliver: do not try it again at once."""
        until_s = self._clock() + _DISTRUST_S
        with self._lock:
            for chunk in chunks:
                hint = self._hints.get((namespace, chunk))
                if hint is not None and hint[0] == node:
                    del self._hints[namespace, chunk]
                self._distrusted[namespace, chunk, node] = until_s
                if len(self._distrusted) > _MAX_REMEMBERED:
                    self._distrusted.popitem(last=False)

    def node(self, number: int, epoch: int) -> Node | None:
        """The live node of that number and incarnation, when it can be called."""
        try:
            node = self._index.nodes().get(number)
        except IndexUnavailable:
            return None
        if node is None or node.epoch != epoch or not _is_address(node.address):
            return None
        return node

    def is_alone(self) -> bool:
        """Whether nobody else can be in the index, so that asking it per chunk is waste."""
        return self._index.is_alone()

    def _remember(self, hints: Mapping[tuple[bytes, bytes], _Remembered]) -> None:
        """Keep them, newest last."""
        known = self._hints
        for name in hints:
            known.pop(name, None)
        known.update(hints)
        while len(known) > _MAX_REMEMBERED:
            known.popitem(last=False)

    def _ask(
        self, namespace: NamespaceDigest, chunks: Sequence[ChunkKey]
    ) -> list[Holder | None] | None:
        """The best believable holder per chunk; None when the index did not answer."""
        try:
            claims = self._index.lookup(namespace, chunks)
            nodes = self._index.nodes() if any(claims) else {}
        except IndexUnavailable:
            return None
        epochs = {number: node.epoch for number, node in nodes.items() if node.address}
        now_s = self._clock()
        best: list[Holder | None] = []
        # Chunks of one prompt mostly have the same claims, and then the index gives one object for all of them.
        chosen_of, chosen = None, None
        with self._lock:
            distrusted = self._distrusted
            for chunk, holders in zip(chunks, claims, strict=True):
                if holders is chosen_of and not distrusted:
                    best.append(chosen)
                    continue
                usable = None
                for holder in holders:
                    if (
                        holder.tier == _CPU_TIER
                        and epochs.get(holder.node) == holder.epoch
                        and not (
                            distrusted
                            and distrusted.get((namespace, chunk, holder.node), 0.0) > now_s
                        )
                        and (
                            usable is None or holder.bitmap.bit_count() > usable.bitmap.bit_count()
                        )
                    ):
                        usable = holder
                chosen_of, chosen = holders, usable
                best.append(usable)
        return best


def mark_elsewhere(presence: bytearray, first: int, masks: Sequence[int], bitmap: int) -> None:
    """Set the absent groups of one chunk that `bitmap` covers in full to READY_ELSEWHERE."""
    for group, mask in enumerate(masks):
        if presence[first + group] == _ABSENT and bitmap & mask == mask:
            presence[first + group] = _READY_ELSEWHERE


def _is_address(address: str) -> bool:
    try:
        parse_host_port(address)
    except ValueError:
        return False
    return len(address) <= 300
