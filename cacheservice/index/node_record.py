"""The packed record of one live node, as its leased key holds it. Pure; docs/decisions/0005-redis-format.md.

    u8 version   u32 epoch   u8 length, name in UTF-8   u8 length, address in UTF-8       little-endian

The epoch is at bytes 1 to 5, where the Lua of `scripts.py` compares it. Parsing raises nothing: a record that is not
exactly this is no node.
"""

from __future__ import annotations

import struct

from cacheservice.errors import ConfigError
from cacheservice.index.port import Node

VERSION = 1
MAX_NODES = 4096
"""Numbers that are given out: 1 to this. 16 bits would allow more; readers fetch all numbers in use at once."""
MAX_TEXT_BYTES = 255

_HEAD = struct.Struct("<BI")


def pack_node(*, epoch: int, name: str, address: str) -> bytes:
    """Record of a node; ConfigError for a name or address that can't be one."""
    if not 0 < epoch < 1 << 32:
        raise ConfigError(f"epoch {epoch} of node {name!r} is not in 1 to 2^32 - 1")
    return _HEAD.pack(VERSION, epoch) + _pack_text(name, "name") + _pack_text(address, "address")


def parse_node(number: int, record: bytes) -> Node | None:
    """The node, or None for bytes that are no record."""
    if len(record) < _HEAD.size + 2 or len(record) > _HEAD.size + 2 * (1 + MAX_TEXT_BYTES):
        return None
    version, epoch = _HEAD.unpack_from(record)
    name_stop = _HEAD.size + 1 + record[_HEAD.size]
    if version != VERSION or not epoch or name_stop >= len(record):
        return None
    if name_stop + 1 + record[name_stop] != len(record):
        return None
    try:
        name = record[_HEAD.size + 1 : name_stop].decode()
        address = record[name_stop + 1 :].decode()
    except UnicodeDecodeError:
        return None
    if not name or not (name + address).isprintable():
        return None
    return Node(number, epoch, name, address)


def _pack_text(text: str, what: str) -> bytes:
    encoded = text.encode(errors="surrogateescape")
    is_missing = not text and what == "name"
    if is_missing or len(encoded) > MAX_TEXT_BYTES or not text.isprintable():
        raise ConfigError(
            f"node {what} {text!r} can't be used: give at most {MAX_TEXT_BYTES} bytes of printable text"
            + (", not empty" if is_missing else "")
        )
    return bytes([len(encoded)]) + encoded
