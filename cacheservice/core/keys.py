"""Names of cached things: namespaces, chunks, shards.

A chunk key is the hash of the last block of a chunk, as vLLM chained it over all tokens before: equal keys in one
namespace mean equal bytes. Keys are plain 32-byte strings, because millions of them live in dictionaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, NewType

DIGEST_BYTES = 32

NamespaceDigest = NewType("NamespaceDigest", bytes)
"""SHA-256 over the canonical description of a namespace; 32 bytes."""

ChunkKey = NewType("ChunkKey", bytes)
"""Chained digest over all tokens up to the chunk's end; 32 bytes."""


class ShardKey(NamedTuple):
    """One shard: what one distinct rank slice holds of one group of one chunk."""

    namespace: NamespaceDigest
    chunk: ChunkKey
    group: int
    shard: int


def short_hex(digest: bytes) -> str:
    """First 8 hex digits, for logs."""
    return digest[:4].hex()


def chunk_keys_of(
    block_hashes: Sequence[bytes], *, hash_block_tokens: int, tokens_per_chunk: int
) -> list[ChunkKey]:
    """Keys of all whole chunks that `block_hashes` cover, first to last.

    `block_hashes[i]` covers tokens `[0, (i + 1) * hash_block_tokens)` by chaining (vLLM 0.32,
    v1/core/kv_cache_utils.py `hash_block_tokens`), so the last hash inside a chunk names the whole prefix.
    `tokens_per_chunk` must be a multiple of `hash_block_tokens`.
    """
    if tokens_per_chunk % hash_block_tokens:
        raise ValueError(
            f"tokens_per_chunk={tokens_per_chunk} is no multiple of the hash block of {hash_block_tokens} tokens"
        )
    step = tokens_per_chunk // hash_block_tokens
    return [ChunkKey(bytes(h)) for h in block_hashes[step - 1 :: step]]
