"""Packed entries and node records: what is written is read back, and whatever else is read raises nothing."""

from __future__ import annotations

import struct

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cacheservice.errors import ConfigError
from cacheservice.index.entry import (
    HEAD_BYTES,
    MAX_BITMAP_BITS,
    MAX_HOLDERS,
    MAX_VALUE_BYTES,
    pack_entry,
    parse_entries,
    replace_entry,
)
from cacheservice.index.node_record import pack_node, parse_node
from cacheservice.index.port import Holder, Node

BITMAPS = st.one_of(
    st.integers(1, 2**64 - 1),
    st.integers(0, MAX_BITMAP_BITS - 1).map(lambda bit: 1 << bit),
    st.integers(1, 2**200),
)
HOLDERS = st.builds(
    Holder,
    node=st.integers(1, 0xFFFF),
    tier=st.integers(1, 3),
    epoch=st.integers(1, 0xFFFFFFFF),
    bitmap=BITMAPS,
)
DISTINCT = st.lists(HOLDERS, max_size=MAX_HOLDERS, unique_by=lambda h: (h.node, h.tier))


@given(DISTINCT)
def test_entries_read_back_as_written(holders: list[Holder]) -> None:
    value = b"".join(pack_entry(h) for h in holders)
    assert parse_entries(value) == (tuple(holders), 0)


def test_an_entry_takes_10_bytes_in_the_documented_order() -> None:
    packed = pack_entry(Holder(node=0x0102, tier=3, epoch=0x0A0B0C0D, bitmap=0b101))
    assert packed == b"\x02\x01" + b"\x03" + b"\x01" + b"\x0d\x0c\x0b\x0a" + b"\x01" + b"\x05"
    assert pack_entry(Holder(1, 1, 1, 1 << 15))[8:] == b"\x02\x00\x80"
    assert len(pack_entry(Holder(1, 1, 1, 1 << 63))) == 17


@given(st.binary(max_size=400))
@example(b"\0" * 17)
@example(b"\xff" * 9)
def test_garbage_is_counted_and_raises_nothing(value: bytes) -> None:
    parsed = parse_entries(value)
    assert all(h.node and h.epoch and h.bitmap and 1 <= h.tier <= 3 for h in parsed.holders)
    assert parsed.holders or parsed.malformed or not value


@given(DISTINCT.filter(bool), st.data())
def test_a_truncated_value_gives_its_whole_entries_and_counts_the_rest(
    holders: list[Holder], data: st.DataObject
) -> None:
    packed = [pack_entry(h) for h in holders]
    value = b"".join(packed)
    cut = data.draw(st.integers(0, len(value) - 1))
    sizes = [sum(map(len, packed[:n])) for n in range(len(packed) + 1)]
    num_whole = max(n for n, size in enumerate(sizes) if size <= cut)
    parsed = parse_entries(value[:cut])
    assert parsed == (tuple(holders[:num_whole]), int(cut not in sizes))


@given(DISTINCT, st.integers(0, 10), st.binary(min_size=HEAD_BYTES - 1, max_size=HEAD_BYTES - 1))
def test_an_entry_of_another_version_is_skipped_and_the_others_stay(
    holders: list[Holder], at: int, rest: bytes
) -> None:
    foreign = struct.pack("<HBBIB", 7, 1, 2, 9, 8) + b"\x01" * 8
    packed = [pack_entry(h) for h in holders[: MAX_HOLDERS - 1]]
    packed.insert(at, foreign)
    assert parse_entries(b"".join(packed)) == (tuple(holders[: MAX_HOLDERS - 1]), 1)


def test_second_entry_of_one_node_and_tier_is_malformed() -> None:
    first, second = Holder(1, 1, 5, 1), Holder(1, 1, 6, 2)
    assert parse_entries(pack_entry(first) + pack_entry(second)) == ((first,), 1)


def test_an_oversized_value_is_not_read() -> None:
    value = pack_entry(Holder(1, 1, 1, 1)) * (MAX_VALUE_BYTES // 10 + 1)
    assert parse_entries(value) == ((), 1)


def test_entries_beyond_the_limit_are_left_out() -> None:
    value = b"".join(pack_entry(Holder(n, 1, 1, 1)) for n in range(1, MAX_HOLDERS + 2))
    parsed = parse_entries(value)
    assert len(parsed.holders) == MAX_HOLDERS
    assert parsed.malformed == 1


@given(DISTINCT, HOLDERS, st.sets(st.integers(1, 0xFFFF)), st.booleans())
def test_replacing_keeps_live_others_and_puts_the_own_entry_last(
    holders: list[Holder], own: Holder, dead: set[int], withdraws: bool
) -> None:
    own = Holder(own.node, own.tier, own.epoch, 0 if withdraws else own.bitmap)
    dead |= {h.node for h in holders[::3]}
    value, dropped = replace_entry(
        b"".join(map(pack_entry, holders)), own, lambda node, epoch: node not in dead
    )
    others = [h for h in holders if (h.node, h.tier) != (own.node, own.tier)]
    live = [h for h in others if h.node not in dead]
    expected = (live + ([own] if own.bitmap else []))[-MAX_HOLDERS:]
    assert parse_entries(value) == (tuple(expected), 0)
    assert dropped == len(others) - len(live)


@pytest.mark.parametrize("bitmap", [0, -1, 1 << MAX_BITMAP_BITS], ids=["empty", "negative", "long"])
def test_a_bitmap_out_of_range_is_not_packed(bitmap: int) -> None:
    with pytest.raises(ValueError):
        pack_entry(Holder(1, 1, 1, bitmap))


PRINTABLE = st.text(max_size=60).filter(str.isprintable)


@given(st.integers(1, 2**32 - 1), PRINTABLE.filter(bool), PRINTABLE)
def test_node_records_read_back_as_written(epoch: int, name: str, address: str) -> None:
    record = pack_node(epoch=epoch, name=name, address=address)
    assert parse_node(7, record) == Node(7, epoch, name, address)
    for cut in range(len(record)):
        assert parse_node(7, record[:cut]) is None
    assert parse_node(7, record + b"x") is None


@given(st.binary(max_size=300))
def test_garbage_is_no_node(record: bytes) -> None:
    node = parse_node(1, record)
    assert (
        node is None or pack_node(epoch=node.epoch, name=node.name, address=node.address) == record
    )


@pytest.mark.parametrize(
    ("name", "address", "epoch"),
    [
        ("", "", 1),
        ("n" * 256, "", 1),
        ("a\nb", "", 1),
        ("a", "h:1\0", 1),
        ("a", "", 0),
        ("a", "", 1 << 32),
    ],
)
def test_what_cannot_be_a_node_is_refused_in_words(name: str, address: str, epoch: int) -> None:
    with pytest.raises(ConfigError, match=r"node|epoch"):
        pack_node(epoch=epoch, name=name, address=address)
