"""What other agents are said to hold: answers of the index, and of owners that a hand-over named.

Hints only: the owner confirms before any byte moves. One that turned out wrong is not believed again for a while. Of a
chunk with several groups one agent may hold some and another the rest, so a hint names as many holders as it takes.
Called by `lookups.py` (which overlays them on local presence) and `pulls.py` (which asks where to pull from).
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import compress, repeat
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
_ABSENT_BYTE = bytes((_ABSENT,))
_ELSEWHERE_BYTE = bytes((_READY_ELSEWHERE,))


class Holders(NamedTuple):
    """Who together is said to hold what of one chunk."""

    each: tuple[Holder, ...]
    """Who has most first; each has shards that those before it lack."""
    bitmap: int
    """Shards that any of them has."""


class RemoteHint(NamedTuple):
    """One chunk that other agents are said to hold."""

    holders: Holders
    parent: ChunkKey | None
    """Key of the chunk before it, as far as a lookup told; None otherwise."""
    number: int
    """Position in its chain, as far as a lookup told; 0 otherwise."""
    until_s: float


_NOBODY = Holders((), 0)
_Name = tuple[bytes, bytes]
"""Namespace and chunk."""
_Remembered = tuple[Holders, ChunkKey | None, int, float]
"""The fields of a `RemoteHint`, bare: a lookup makes one for each of its chunks, and few are asked for."""


class RemoteHints:
    """Asks the index and remembers what it said, bounded. Thread-safe; never raises for the index."""

    def __init__(self, index: Index, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._index = index
        self._clock = clock
        self._lock = threading.Lock()
        # Two generations, so that a lookup's hints are kept by one update: when the younger one is half of what may be
        # remembered, the older one goes.
        self._young: dict[_Name, _Remembered] = {}
        self._old: dict[_Name, _Remembered] = {}
        self._distrusted: OrderedDict[tuple[bytes, bytes, int], float] = OrderedDict()

    def overlay(self, spec: NamespaceSpec, chunks: Sequence[ChunkKey], presence: bytearray) -> bool:
        """Mark in `presence` (chunk-major) what is absent here and ready elsewhere; False when the index is away."""
        if _ABSENT not in presence or self.is_alone():
            return True
        num_groups = len(spec.groups)
        asked: Sequence[ChunkKey] = chunks
        numbers: Iterable[int] = range(len(chunks))
        parents: Iterable[ChunkKey | None] = [None, *chunks[:-1]]
        # Mostly something of every chunk is absent: all of it, or the states that only the ends of prompts have.
        is_whole_group_absent = any(
            not presence[group::num_groups].strip(_ABSENT_BYTE) for group in range(num_groups)
        )
        if not is_whole_group_absent:
            rows = zip(*[iter(presence)] * num_groups, strict=True)
            numbers = [number for number, states in enumerate(rows) if _ABSENT in states]
            asked = [chunks[number] for number in numbers]
            parents = [chunks[number - 1] if number else None for number in numbers]
        found = self._ask(spec.digest, asked)
        if found is None:
            return False
        masks = _group_masks(spec)
        # Chunks of one prompt mostly have the same holders, or none.
        if found.count(found[0]) == len(found):
            if not found[0].bitmap:
                return True
            for group, mask in enumerate(masks):
                if found[0].bitmap & mask == mask:
                    states = presence[group::num_groups]
                    presence[group::num_groups] = states.replace(_ABSENT_BYTE, _ELSEWHERE_BYTE)
        else:
            for number, holders in zip(numbers, found, strict=True):
                _mark_elsewhere(presence, number * num_groups, masks, holders.bitmap)
            are_held = [holders.bitmap for holders in found]
            asked, found = list(compress(asked, are_held)), list(compress(found, are_held))
            numbers, parents = compress(numbers, are_held), compress(parents, are_held)
        until_s = self._clock() + _FRESH_S
        with self._lock:
            self._remember(
                spec.digest, asked, zip(found, parents, numbers, repeat(until_s), strict=False)
            )
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
        masks = _group_masks(spec)
        until_s = self._clock() + _DISTRUST_S
        held: list[ChunkKey] = []
        hints: list[_Remembered] = []
        for position, chunk in enumerate(chunks):
            states = presence[position * num_groups : (position + 1) * num_groups]
            bitmap = sum(m for m, s in zip(masks, states, strict=True) if s == _READY_HERE)
            if bitmap:
                parent = chunks[position - 1] if position else None
                holders = Holders((Holder(node, _CPU_TIER, epoch, bitmap),), bitmap)
                held.append(chunk)
                hints.append((holders, parent, position, until_s))
        with self._lock:
            for chunk in held:
                self._distrusted.pop((spec.digest, chunk, node), None)
            self._remember(spec.digest, held, hints)

    def find(
        self, spec: NamespaceSpec, wanted: Mapping[ChunkKey, int]
    ) -> dict[ChunkKey, RemoteHint]:
        """Where the chunks are said to be, of which the shards in the given bitmaps are wanted; those that are nowhere
        are left out.
        """
        now_s = self._clock()
        known: dict[ChunkKey, RemoteHint] = {}
        with self._lock:
            for chunk in wanted:
                name = (spec.digest, chunk)
                remembered = self._young.get(name) or self._old.get(name)
                if remembered is not None:
                    known[chunk] = RemoteHint(*remembered)
        found = {chunk: hint for chunk, hint in known.items() if hint.until_s > now_s}
        unknown = [
            chunk
            for chunk, bitmap in wanted.items()
            if chunk not in found or bitmap & ~found[chunk].holders.bitmap
        ]
        if not unknown or self.is_alone():
            return found
        told = self._ask(spec.digest, unknown) or []
        for chunk, holders in zip(unknown, told, strict=False):
            fresh = found.get(chunk)
            if fresh is not None:
                # An owner may have told us before it told the index.
                holders = _choose([*fresh.holders.each, *holders.each])
            if holders.bitmap:
                old = known.get(chunk)
                parent, number = (old.parent, old.number) if old is not None else (None, 0)
                found[chunk] = RemoteHint(holders, parent, number, now_s + _FRESH_S)
        return found

    def distrust(self, namespace: NamespaceDigest, chunks: Sequence[ChunkKey], node: int) -> None:
        """A hint was wrong, or its node does not deliver: do not try it again at once."""
        until_s = self._clock() + _DISTRUST_S
        with self._lock:
            for chunk in chunks:
                name = (namespace, chunk)
                for generation in (self._young, self._old):
                    hint = generation.get(name)
                    if hint is not None:
                        others = _choose(h for h in hint[0].each if h.node != node)
                        generation[name] = (others, *hint[1:])
                self._distrusted[namespace, chunk, node] = until_s
                self._distrusted.move_to_end((namespace, chunk, node))
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

    def _remember(
        self,
        namespace: NamespaceDigest,
        chunks: Iterable[ChunkKey],
        hints: Iterable[_Remembered],
    ) -> None:
        # All in one update without a loop of ours: most of a lookup's time would go there.
        self._young.update(zip(zip(repeat(namespace), chunks, strict=False), hints, strict=False))
        if len(self._young) >= _MAX_REMEMBERED // 2:
            self._old, self._young = self._young, {}

    def _ask(self, namespace: NamespaceDigest, chunks: Sequence[ChunkKey]) -> list[Holders] | None:
        """The believable holders per chunk; None when the index did not answer."""
        try:
            claims = self._index.lookup(namespace, chunks)
            nodes = self._index.nodes() if any(claims) else {}
        except IndexUnavailable:
            return None
        epochs = {number: node.epoch for number, node in nodes.items() if node.address}
        now_s = self._clock()
        with self._lock:
            distrusted = self._distrusted
            while distrusted and next(iter(distrusted.values())) <= now_s:
                distrusted.popitem(last=False)

            def choose(chunk: ChunkKey | None, claimed: Iterable[Holder]) -> Holders:
                return _choose(
                    holder
                    for holder in claimed
                    if holder.tier == _CPU_TIER
                    and epochs.get(holder.node) == holder.epoch
                    and (namespace, chunk, holder.node) not in distrusted
                )

            if distrusted:
                return list(map(choose, chunks, claims))
            # Chunks of one prompt mostly have the same claims, and then the index gives one object for all of them.
            if claims.count(claims[0]) == len(claims):
                return [choose(None, claims[0])] * len(claims)
            distinct = dict(zip(map(id, claims), claims, strict=True))
            chosen = {which: choose(None, claimed) for which, claimed in distinct.items()}
            return list(map(chosen.__getitem__, map(id, claims)))


def _choose(believable: Iterable[Holder]) -> Holders:
    each: list[Holder] = []
    bitmap = 0
    for holder in sorted(believable, key=lambda h: h.bitmap.bit_count(), reverse=True):
        if holder.bitmap & ~bitmap:
            each.append(holder)
            bitmap |= holder.bitmap
    return Holders(tuple(each), bitmap) if each else _NOBODY


def _group_masks(spec: NamespaceSpec) -> list[int]:
    """Per group the bits of all its shards in the index's bitmap."""
    masks = []
    first = 0
    for group in spec.groups:
        masks.append(((1 << group.num_shards) - 1) << first)
        first += group.num_shards
    return masks


def _mark_elsewhere(presence: bytearray, first: int, masks: Sequence[int], bitmap: int) -> None:
    """Set the absent groups of one chunk that `bitmap` covers in full to READY_ELSEWHERE."""
    for position, mask in enumerate(masks, first):
        if presence[position] == _ABSENT and bitmap & mask == mask:
            presence[position] = _READY_ELSEWHERE


def _is_address(address: str) -> bool:
    try:
        parse_host_port(address)
    except ValueError:
        return False
    return len(address) <= 300
