from cacheservice.v1 import cache_pb2 as _cache_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ShardState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SHARD_STATE_UNSPECIFIED: _ClassVar[ShardState]
    SHARD_STATE_PENDING: _ClassVar[ShardState]
    SHARD_STATE_READY: _ClassVar[ShardState]
SHARD_STATE_UNSPECIFIED: ShardState
SHARD_STATE_PENDING: ShardState
SHARD_STATE_READY: ShardState

class ListNamespacesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class NamespaceSummary(_message.Message):
    __slots__ = ("namespace_digest", "description", "num_chunks", "num_bytes", "tokens_per_chunk", "groups")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    description: str
    num_chunks: int
    num_bytes: int
    tokens_per_chunk: int
    groups: _containers.RepeatedCompositeFieldContainer[_cache_pb2.GroupShape]
    def __init__(self, namespace_digest: _Optional[bytes] = ..., description: _Optional[str] = ..., num_chunks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., tokens_per_chunk: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[_cache_pb2.GroupShape, _Mapping]]] = ...) -> None: ...

class ListNamespacesResponse(_message.Message):
    __slots__ = ("namespaces",)
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    namespaces: _containers.RepeatedCompositeFieldContainer[NamespaceSummary]
    def __init__(self, namespaces: _Optional[_Iterable[_Union[NamespaceSummary, _Mapping]]] = ...) -> None: ...

class ListEnginesRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EngineSummary(_message.Message):
    __slots__ = ("hello", "uptime_s", "data_plane", "num_leases", "num_reservations", "outcomes", "asked_tokens", "hit_tokens")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DATA_PLANE_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    hello: _cache_pb2.SessionHello
    uptime_s: int
    data_plane: str
    num_leases: int
    num_reservations: int
    outcomes: _containers.RepeatedCompositeFieldContainer[_cache_pb2.Counter]
    asked_tokens: int
    hit_tokens: int
    def __init__(self, hello: _Optional[_Union[_cache_pb2.SessionHello, _Mapping]] = ..., uptime_s: _Optional[int] = ..., data_plane: _Optional[str] = ..., num_leases: _Optional[int] = ..., num_reservations: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[_cache_pb2.Counter, _Mapping]]] = ..., asked_tokens: _Optional[int] = ..., hit_tokens: _Optional[int] = ...) -> None: ...

class ListEnginesResponse(_message.Message):
    __slots__ = ("engines",)
    ENGINES_FIELD_NUMBER: _ClassVar[int]
    engines: _containers.RepeatedCompositeFieldContainer[EngineSummary]
    def __init__(self, engines: _Optional[_Iterable[_Union[EngineSummary, _Mapping]]] = ...) -> None: ...

class ListShardsRequest(_message.Message):
    __slots__ = ("namespace_digest", "chunk_key")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEY_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    chunk_key: bytes
    def __init__(self, namespace_digest: _Optional[bytes] = ..., chunk_key: _Optional[bytes] = ...) -> None: ...

class ShardSummary(_message.Message):
    __slots__ = ("group", "shard", "state", "extent", "num_leases", "writer_role", "writer_name")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    WRITER_ROLE_FIELD_NUMBER: _ClassVar[int]
    WRITER_NAME_FIELD_NUMBER: _ClassVar[int]
    group: int
    shard: int
    state: ShardState
    extent: _cache_pb2.Extent
    num_leases: int
    writer_role: _cache_pb2.ClientRole
    writer_name: str
    def __init__(self, group: _Optional[int] = ..., shard: _Optional[int] = ..., state: _Optional[_Union[ShardState, str]] = ..., extent: _Optional[_Union[_cache_pb2.Extent, _Mapping]] = ..., num_leases: _Optional[int] = ..., writer_role: _Optional[_Union[_cache_pb2.ClientRole, str]] = ..., writer_name: _Optional[str] = ...) -> None: ...

class ListShardsResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ShardSummary]
    def __init__(self, shards: _Optional[_Iterable[_Union[ShardSummary, _Mapping]]] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("namespace_digest", "chunk_keys")
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    namespace_digest: bytes
    chunk_keys: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace_digest: _Optional[bytes] = ..., chunk_keys: _Optional[_Iterable[bytes]] = ...) -> None: ...

class EvictResponse(_message.Message):
    __slots__ = ("num_chunks", "num_bytes", "num_leased")
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASED_FIELD_NUMBER: _ClassVar[int]
    num_chunks: int
    num_bytes: int
    num_leased: int
    def __init__(self, num_chunks: _Optional[int] = ..., num_bytes: _Optional[int] = ..., num_leased: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
