"""The packed value of one chunk: who holds which of its shards. Pure.

A value is a sequence of entries, little-endian, each 9 bytes and a bitmap without its trailing zero bytes:

    u16 node   u8 tier   u8 version   u32 epoch   u8 length   length × u8 bitmap

Invariants: `pack_entry` writes only what `parse_entries` accepts; `parse_entries` raises nothing whatever it is given,
reads at most MAX_HOLDERS entries of at most MAX_VALUE_BYTES, and never guesses: what does not parse is counted and left
out. Why it is so: docs/decisions/0005-redis-format.md.

Used by both indexes; the Lua of `scripts.py` does `replace_entry` once more inside Redis.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from cacheservice.index.port import Holder

VERSION = 1
TIERS = (1, 2, 3)
"""cpu, gpu, disk."""
MAX_BITMAP_BITS = 8 * 255
MAX_HOLDERS = 32
"""Entries kept per chunk. One owner is enough to pull from; more would make the values of popular chunks long."""
MAX_VALUE_BYTES = 65_536

_HEAD = struct.Struct("<HBBIB")
HEAD_BYTES = _HEAD.size


class ParsedValue(NamedTuple):
    """What a value says, and how much of it was not understood."""

    holders: tuple[Holder, ...]
    malformed: int


def pack_entry(holder: Holder) -> bytes:
    """Bytes of one entry: 10 when only the first 8 shards are set, one more for each further 8."""
    if not 0 < holder.bitmap < 1 << MAX_BITMAP_BITS:
        raise ValueError(f"a bitmap has 1 to {MAX_BITMAP_BITS} bits and at least one set")
    length = -(-holder.bitmap.bit_length() // 8)
    head = _HEAD.pack(holder.node, holder.tier, VERSION, holder.epoch, length)
    return head + holder.bitmap.to_bytes(length, "little")


def parse_entries(value: bytes) -> ParsedValue:
    """All valid entries in order, and the number of malformed ones; a tail that is no entry counts as one."""
    if len(value) > MAX_VALUE_BYTES:
        return ParsedValue((), 1)
    holders: dict[tuple[int, int], Holder] = {}
    malformed = 0
    at = 0
    for _ in range(MAX_HOLDERS):
        if at == len(value):
            break
        if len(value) - at < HEAD_BYTES:
            return ParsedValue(tuple(holders.values()), malformed + 1)
        node, tier, version, epoch, length = _HEAD.unpack_from(value, at)
        stop = at + HEAD_BYTES + length
        if stop > len(value):
            return ParsedValue(tuple(holders.values()), malformed + 1)
        bitmap = int.from_bytes(value[at + HEAD_BYTES : stop], "little")
        at = stop
        # The head has the same size in every version, so an entry of a later one is skipped, not guessed at.
        if not _is_valid(node, tier, version, epoch, bitmap) or (node, tier) in holders:
            malformed += 1
            continue
        holders[node, tier] = Holder(node, tier, epoch, bitmap)
    return ParsedValue(tuple(holders.values()), malformed + (at != len(value)))


def replace_entry(
    value: bytes, own: Holder, is_live: Callable[[int, int], bool]
) -> tuple[bytes, int]:
    """`value` with the entry of `(own.node, own.tier)` replaced by `own`, or removed when its bitmap is 0, and without
    entries that are malformed or of a node and epoch that `is_live` denies; and how many of those were dropped.

    The own entry goes last; beyond MAX_HOLDERS the first ones go. An empty result means: delete the key.
    """
    parsed = parse_entries(value)
    others = [h for h in parsed.holders if (h.node, h.tier) != (own.node, own.tier)]
    kept = [h for h in others if is_live(h.node, h.epoch)]
    dropped = parsed.malformed + len(others) - len(kept)
    if own.bitmap:
        kept.append(own)
    return b"".join(pack_entry(h) for h in kept[-MAX_HOLDERS:]), dropped


def _is_valid(node: int, tier: int, version: int, epoch: int, bitmap: int) -> bool:
    return bool(version == VERSION and node and epoch and bitmap and tier in TIERS)
