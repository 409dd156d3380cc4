"""Between wire messages and the core's values: every bound of the contract is checked here, before memory is taken.

Each `parse_x` raises InvalidRequest that names the field, what came and what is allowed. Called by `service.py` and
`admin_service.py` only; nothing deeper sees a message.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import cast

from cacheservice.agent.sessions import Hello
from cacheservice.core.keys import DIGEST_BYTES, ChunkKey, NamespaceDigest
from cacheservice.core.layout import GroupShape, NamespaceSpec
from cacheservice.core.outcomes import Outcome, OutcomeKind, Reason
from cacheservice.core.protocol import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from cacheservice.errors import InvalidRequest, ProtocolNotSpoken
from cacheservice.index.entry import MAX_BITMAP_BITS
from cacheservice.v1 import cache_pb2

MAX_KEYS = 4096
MAX_SHARDS = 16384
MAX_LEASES = 4096
MAX_CORRUPT = 64
"""Shards that one Release has looked at again: a reader may cost the agent that much hashing."""
MAX_FRAME_BYTES = 2**20
MAX_DESCRIPTION_BYTES = 64 * 1024
MAX_OUTCOMES = 256
MAX_REQUEST_ID_BYTES = 256
MAX_MESSAGE_BYTES = 8 * 2**20
"""Longest message that the server takes: room for 16384 reservations with their keys, or for their checksums."""

_ONE_LENGTH = frozenset({DIGEST_BYTES})
_ROLES = {1: "prefill", 2: "decode", 3: "both", 4: "peer", 5: "tool"}
_HALVES = {0: "", 1: "scheduler", 2: "worker"}
ROLE_NUMBERS = {name: number for number, name in _ROLES.items()}
HALF_NUMBERS = {name: number for number, name in _HALVES.items()}


def parse_hello(hello: cache_pb2.SessionHello) -> Hello:
    """A client's introduction."""
    if not OLDEST_PROTOCOL_VERSION <= hello.protocol_version <= PROTOCOL_VERSION:
        which = "agent" if hello.protocol_version > PROTOCOL_VERSION else "engine"
        raise ProtocolNotSpoken(
            f"protocol_version {hello.protocol_version} is not spoken here; this agent speaks "
            f"{OLDEST_PROTOCOL_VERSION} and {PROTOCOL_VERSION}: upgrade the {which}"
        )
    if hello.role not in _ROLES:
        raise InvalidRequest(
            "hello.role is not said; set CLIENT_ROLE_PREFILL, _DECODE, _BOTH, _PEER or _TOOL"
        )
    for name, most in (
        ("engine_name", 128),
        ("host", 256),
        ("vllm_version", 64),
        ("larder_version", 64),
    ):
        length = len(getattr(hello, name).encode())
        if length > most:
            raise InvalidRequest(f"hello.{name} has {length} bytes; at most {most} are allowed")
    return Hello(
        role=_ROLES[hello.role], half=_HALVES.get(hello.half, ""), engine_name=hello.engine_name, host=hello.host,
        rank=hello.rank, vllm_version=hello.vllm_version, larder_version=hello.larder_version,
        maps_arena=hello.maps_arena, protocol=hello.protocol_version,
    )  # fmt: skip


def parse_outcomes(ping: cache_pb2.SessionPing) -> list[Outcome]:
    """What became of a client's tries; kinds and reasons of a newer contract count as internal."""
    check_count("outcomes", len(ping.outcomes), MAX_OUTCOMES)
    kinds = {kind.value for kind in OutcomeKind}
    reasons = {reason.value for reason in Reason}
    return [
        Outcome(
            kind=OutcomeKind(o.kind), reason=Reason(o.reason) if o.reason in reasons else Reason.INTERNAL,
            request_id=o.request_id[:MAX_REQUEST_ID_BYTES], asked_tokens=o.asked_tokens,
            served_tokens=o.served_tokens, duration_ms=o.duration_ms, num_bytes=o.num_bytes,
        )
        for o in ping.outcomes
        if o.kind in kinds
    ]  # fmt: skip


def parse_namespace(request: cache_pb2.OpenNamespaceRequest) -> NamespaceSpec:
    """A namespace with its digest checked against its description."""
    digest = parse_digest(request.namespace_digest)
    description = request.description.encode()
    if not 0 < len(description) <= MAX_DESCRIPTION_BYTES:
        raise InvalidRequest(
            f"description has {len(description)} bytes; 1 to {MAX_DESCRIPTION_BYTES} are allowed"
        )
    if hashlib.sha256(description).digest() != digest:
        raise InvalidRequest("namespace_digest is not the SHA-256 of description")
    if not 1 <= request.tokens_per_chunk <= 65536:
        raise InvalidRequest(
            f"tokens_per_chunk is {request.tokens_per_chunk}; 1 to 65536 are allowed"
        )
    if not 1 <= len(request.groups) <= 64:
        raise InvalidRequest(f"groups has {len(request.groups)} entries; 1 to 64 are allowed")
    shapes = []
    for number, group in enumerate(request.groups):
        if len(group.kind.encode()) > 32:
            raise InvalidRequest(f"groups[{number}].kind has more than 32 bytes")
        if not 1 <= group.num_shards <= 256:
            raise InvalidRequest(
                f"groups[{number}].num_shards is {group.num_shards}; 1 to 256 are allowed"
            )
        if not 1 <= group.shard_bytes <= 2**32:
            raise InvalidRequest(
                f"groups[{number}].shard_bytes is {group.shard_bytes}; 1 to 2^32 are allowed"
            )
        shapes.append(GroupShape(group.kind, group.num_shards, group.shard_bytes))
    total = sum(shape.num_shards for shape in shapes)
    if total > MAX_BITMAP_BITS:
        raise InvalidRequest(
            f"groups have {total} shards together; an entry of the index has room for {MAX_BITMAP_BITS}: "
            "share the cache among fewer tensor-parallel sizes"
        )
    return NamespaceSpec(digest, request.description, request.tokens_per_chunk, tuple(shapes))


def parse_digest(digest: bytes) -> NamespaceDigest:
    """A namespace digest of the right length."""
    if len(digest) != DIGEST_BYTES:
        raise InvalidRequest(
            f"namespace_digest has {len(digest)} bytes; it must have {DIGEST_BYTES}"
        )
    return NamespaceDigest(digest)


def parse_keys(keys: Sequence[bytes], *, field: str = "chunk_keys") -> list[ChunkKey]:
    """Chunk keys of the right number and length."""
    check_count(field, len(keys), MAX_KEYS)
    copied = cast("list[ChunkKey]", list(keys))
    if not _ONE_LENGTH.issuperset(map(len, copied)):
        position, key = next((i, k) for i, k in enumerate(copied) if len(k) != DIGEST_BYTES)
        raise InvalidRequest(
            f"{field}[{position}] has {len(key)} bytes; it must have {DIGEST_BYTES}"
        )
    return copied


def parse_shard(
    shard: cache_pb2.ShardRef, spec: NamespaceSpec, *, where: str
) -> tuple[ChunkKey, int, int]:
    """One shard that the namespace can have."""
    if len(shard.chunk_key) != DIGEST_BYTES:
        raise InvalidRequest(
            f"{where}.chunk_key has {len(shard.chunk_key)} bytes; it must have {DIGEST_BYTES}"
        )
    if shard.group >= len(spec.groups):
        raise InvalidRequest(
            f"{where}.group is {shard.group}; the namespace has {len(spec.groups)} groups"
        )
    if shard.shard >= spec.groups[shard.group].num_shards:
        raise InvalidRequest(
            f"{where}.shard is {shard.shard}; group {shard.group} has {spec.groups[shard.group].num_shards} shards"
        )
    return ChunkKey(shard.chunk_key), shard.group, shard.shard


def check_count(field: str, count: int, most: int, *, least: int = 0) -> None:
    """Bound a repeated field."""
    if not least <= count <= most:
        raise InvalidRequest(
            f"{field} has {count} entries; {least} to {most} are allowed in one call"
        )


def check_range(field: str, value: int, most: int) -> None:
    """Bound a number."""
    if not 0 <= value <= most:
        raise InvalidRequest(f"{field} is {value}; 0 to {most} are allowed")


def check_distinct(field: str, values: Iterable[object], count: int) -> None:
    """Refuse a batch that names one thing twice."""
    if len(set(values)) != count:
        raise InvalidRequest(f"{field} names something twice; name each once")
