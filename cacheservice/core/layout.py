"""What the bytes of a namespace look like: groups, shards, chunk size, and the digest over all that must be equal.

Callers: the connector builds a `NamespaceSpec` from vLLM's KVCacheConfig; agent and client only carry it. A shard is
the concatenation, block by block and within a block layer by layer, of the page runs that its head range covers.
"""

from __future__ import annotations

import enum
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cacheservice.core.keys import NamespaceDigest

MIB = 1024 * 1024
CHECKSUM_PIECE_BYTES = MIB
MIN_CHUNK_TOKENS = 256
MAX_CHUNK_TOKENS = 8192
MIN_CHUNK_BYTES = MIB


class GroupKind(enum.Enum):
    """What a hit needs of a group (design, section 7)."""

    FULL = "full"
    MLA = "mla"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    RECURRENT = "recurrent"

    @property
    def is_read_whole(self) -> bool:
        """Whether a hit reads all tokens of every chunk, not only the end of some."""
        return self in (GroupKind.FULL, GroupKind.MLA)


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One group of layers that share a block table, as all ranks together see it."""

    kind: GroupKind
    block_tokens: int
    """Tokens of one block of this group."""
    num_layers: int
    bytes_per_block: int
    """Payload of one block over all layers of the group and all distinct heads, unpadded."""
    num_shards: int = 1
    """Parts that one chunk is stored in; divides `num_heads`, or is 1."""
    window_tokens: int | None = None
    """Sliding window or local chunk in tokens; None for kinds that have none."""
    num_heads: int = 1
    """Distinct slices over all ranks: KV heads; ranks, for recurrent state that is split over them; 1 where every rank
    holds the same bytes. More ranks than slices means that ranks hold the same slice."""

    def num_replicas(self, tensor_parallel_size: int) -> int:
        """How many consecutive ranks hold the same bytes."""
        return max(1, tensor_parallel_size // self.num_heads)

    def stored_tokens(self, tokens_per_chunk: int) -> int:
        """How many tokens before a chunk's end one chunk of this group holds."""
        if self.kind.is_read_whole:
            return tokens_per_chunk
        if self.kind is GroupKind.RECURRENT:
            return self.block_tokens
        assert self.window_tokens is not None
        if self.kind is GroupKind.CHUNKED_LOCAL:
            return min(tokens_per_chunk, self.window_tokens)
        blocks = -(-(self.window_tokens - 1) // self.block_tokens)
        return min(tokens_per_chunk, blocks * self.block_tokens)

    def num_blocks(self, tokens_per_chunk: int) -> int:
        """Blocks of this group in one chunk's shards."""
        return self.stored_tokens(tokens_per_chunk) // self.block_tokens

    def shard_bytes(self, tokens_per_chunk: int) -> int:
        """Exact size of one shard of this group."""
        return self.num_blocks(tokens_per_chunk) * self.bytes_per_block // self.num_shards


@dataclass(frozen=True, slots=True)
class GroupShape:
    """What the agent needs to know of a group: how many shards a chunk has and how long each is."""

    kind: str
    num_shards: int
    shard_bytes: int


@dataclass(frozen=True, slots=True)
class NamespaceSpec:
    """A namespace: digest, readable description, and the shape of its shards. Safe to pickle."""

    digest: NamespaceDigest
    description: str
    """Canonical JSON that `digest` is the SHA-256 of."""
    tokens_per_chunk: int
    groups: tuple[GroupShape, ...]

    @property
    def num_shards(self) -> int:
        """Shards of one chunk over all groups."""
        return sum(g.num_shards for g in self.groups)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of one whole chunk: all shards of all groups."""
        return sum(g.num_shards * g.shard_bytes for g in self.groups)

    def shard_bit(self, group: int, shard: int) -> int:
        """Position of a shard in the index's bitmap: groups in order, shards in order within a group."""
        return sum(g.num_shards for g in self.groups[:group]) + shard


def build_namespace(
    facts: Mapping[str, Any], *, tokens_per_chunk: int, groups: Sequence[GroupShape]
) -> NamespaceSpec:
    """Digest `facts` (JSON values only) together with chunk size and shapes, independent of key order."""
    shapes = [[g.kind, g.num_shards, g.shard_bytes] for g in groups]
    description = json.dumps(
        {**facts, "tokens_per_chunk": tokens_per_chunk, "shards": shapes},
        sort_keys=True, separators=(",", ":"), ensure_ascii=True,
    )  # fmt: skip
    digest = NamespaceDigest(hashlib.sha256(description.encode()).digest())
    return NamespaceSpec(digest, description, tokens_per_chunk, tuple(groups))


def choose_tokens_per_chunk(groups: Sequence[GroupSpec]) -> int:
    """Automatic chunk size (design, section 6).

    The smallest multiple of the LCM of the groups' block sizes that is >= 256 tokens and gives the widest
    full-attention or MLA group >= 1 MiB over all heads and layers, at most 8192 tokens, and
    no chunk straddles a local chunk's border; with a recurrent group the LCM itself, since vLLM offers states only
    where a prompt ended.
    """
    lcm = math.lcm(*(g.block_tokens for g in groups))
    if any(g.kind is GroupKind.RECURRENT for g in groups):
        return lcm
    bytes_per_token = max(
        (g.bytes_per_block / g.block_tokens for g in groups if g.kind.is_read_whole),
        default=0.0,
    )
    wanted = MIN_CHUNK_TOKENS
    if bytes_per_token:
        wanted = max(wanted, math.ceil(MIN_CHUNK_BYTES / bytes_per_token))
    multiples = max(1, math.ceil(wanted / lcm))
    while multiples > 1 and multiples * lcm > MAX_CHUNK_TOKENS:
        multiples -= 1
    while multiples > 1 and not _fits_local_chunks(multiples * lcm, groups):
        multiples -= 1
    return multiples * lcm


def _fits_local_chunks(tokens_per_chunk: int, groups: Sequence[GroupSpec]) -> bool:
    """Whether no chunk straddles the border of a local chunk: vLLM drops the blocks below the border, so what is stored
    of such a chunk would often be gone before its end is computed."""
    return all(
        g.window_tokens % tokens_per_chunk == 0 or tokens_per_chunk % g.window_tokens == 0
        for g in groups
        if g.kind is GroupKind.CHUNKED_LOCAL and g.window_tokens is not None
    )


def num_shards_of(num_kv_heads: int, tensor_parallel_sizes: Sequence[int]) -> int | None:
    """Shards of a GQA/MHA group shared by engines of these sizes, or None when the heads can't be cut so."""
    shards = math.lcm(*(min(tp, num_kv_heads) for tp in tensor_parallel_sizes))
    return shards if num_kv_heads % shards == 0 else None


def num_pieces(shard_bytes: int) -> int:
    """Checksum pieces of a shard: all of 1 MiB but the last."""
    return -(-shard_bytes // CHECKSUM_PIECE_BYTES)
