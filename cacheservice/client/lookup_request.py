"""Lookup requests as bytes, and the call that sends them: protobuf takes four times as long for the list of keys.

The format is that of `LookupRequest` in proto/cacheservice/v1/cache.proto, in the order of serializers; the agent's
side is `agent/frames.py`. Called by `client.py` and `session.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import grpc

from cacheservice.core.keys import DIGEST_BYTES, ChunkKey, NamespaceDigest
from cacheservice.v1 import cache_pb2

_ONE_LENGTH = frozenset({DIGEST_BYTES})
_KEY_TAG = bytes((3 << 3 | 2, DIGEST_BYTES))
"""Field 3 with that many bytes."""


def lookup_call(channel: grpc.Channel) -> Any:
    """Calls Lookup with a request that is serialized already; takes the place of the generated stub's method."""
    return channel.unary_unary(
        "/cacheservice.v1.CacheService/Lookup",
        response_deserializer=cache_pb2.LookupResponse.FromString,
    )


def build_lookup(
    session_token: bytes,
    namespace: NamespaceDigest,
    chunks: Sequence[ChunkKey],
    rest: cache_pb2.LookupRequest,
) -> bytes:
    """A serialized `LookupRequest`; `rest` has the fields after the keys."""
    head = _head(session_token, namespace)
    if not chunks or not _ONE_LENGTH.issuperset(map(len, chunks)):
        keys = cache_pb2.LookupRequest(chunk_keys=chunks)
        return head + keys.SerializeToString() + rest.SerializeToString()
    return b"".join((head, _KEY_TAG, _KEY_TAG.join(chunks), rest.SerializeToString()))


@lru_cache(maxsize=64)
def _head(session_token: bytes, namespace: NamespaceDigest) -> bytes:
    head = cache_pb2.LookupRequest(session_token=session_token, namespace_digest=namespace)
    return head.SerializeToString()
