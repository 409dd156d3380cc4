from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ClientRole(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLIENT_ROLE_UNSPECIFIED: _ClassVar[ClientRole]
    CLIENT_ROLE_PREFILL: _ClassVar[ClientRole]
    CLIENT_ROLE_DECODE: _ClassVar[ClientRole]
    CLIENT_ROLE_BOTH: _ClassVar[ClientRole]
    CLIENT_ROLE_PEER: _ClassVar[ClientRole]
    CLIENT_ROLE_TOOL: _ClassVar[ClientRole]

class ClientHalf(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    CLIENT_HALF_UNSPECIFIED: _ClassVar[ClientHalf]
    CLIENT_HALF_SCHEDULER: _ClassVar[ClientHalf]
    CLIENT_HALF_WORKER: _ClassVar[ClientHalf]

class OutcomeReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_REASON_UNSPECIFIED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_HIT: _ClassVar[OutcomeReason]
    OUTCOME_REASON_ABSENT: _ClassVar[OutcomeReason]
    OUTCOME_REASON_PENDING_TIMED_OUT: _ClassVar[OutcomeReason]
    OUTCOME_REASON_DEADLINE: _ClassVar[OutcomeReason]
    OUTCOME_REASON_AGENT_DOWN: _ClassVar[OutcomeReason]
    OUTCOME_REASON_EVICTED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_CHECKSUM: _ClassVar[OutcomeReason]
    OUTCOME_REASON_LEASE_LOST: _ClassVar[OutcomeReason]
    OUTCOME_REASON_FOREIGN_NAMESPACE: _ClassVar[OutcomeReason]
    OUTCOME_REASON_EPOCH_CHANGED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_NO_SPACE: _ClassVar[OutcomeReason]
    OUTCOME_REASON_PEER_FAILED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_LOCAL: _ClassVar[OutcomeReason]
    OUTCOME_REASON_TOO_SHORT: _ClassVar[OutcomeReason]
    OUTCOME_REASON_SKIPPED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_BANNED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_SHED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_DUPLICATE: _ClassVar[OutcomeReason]
    OUTCOME_REASON_CANCELLED: _ClassVar[OutcomeReason]
    OUTCOME_REASON_INTERNAL: _ClassVar[OutcomeReason]

class OutcomeKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_KIND_UNSPECIFIED: _ClassVar[OutcomeKind]
    OUTCOME_KIND_LOOKUP: _ClassVar[OutcomeKind]
    OUTCOME_KIND_LOAD: _ClassVar[OutcomeKind]
    OUTCOME_KIND_SAVE: _ClassVar[OutcomeKind]

class LookupWait(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOOKUP_WAIT_UNSPECIFIED: _ClassVar[LookupWait]
    LOOKUP_WAIT_PENDING: _ClassVar[LookupWait]
    LOOKUP_WAIT_HAND_OVER: _ClassVar[LookupWait]

class Presence(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    PRESENCE_UNSPECIFIED: _ClassVar[Presence]
    PRESENCE_READY_HERE: _ClassVar[Presence]
    PRESENCE_READY_ELSEWHERE: _ClassVar[Presence]
    PRESENCE_PENDING: _ClassVar[Presence]

class AcquireResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ACQUIRE_RESULT_UNSPECIFIED: _ClassVar[AcquireResult]
    ACQUIRE_RESULT_READY: _ClassVar[AcquireResult]
    ACQUIRE_RESULT_NOT_FOUND: _ClassVar[AcquireResult]
    ACQUIRE_RESULT_TIMED_OUT: _ClassVar[AcquireResult]
    ACQUIRE_RESULT_PEER_FAILED: _ClassVar[AcquireResult]
    ACQUIRE_RESULT_NO_SPACE: _ClassVar[AcquireResult]

class ReserveResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RESERVE_RESULT_UNSPECIFIED: _ClassVar[ReserveResult]
    RESERVE_RESULT_RESERVED: _ClassVar[ReserveResult]
    RESERVE_RESULT_READY: _ClassVar[ReserveResult]
    RESERVE_RESULT_PENDING: _ClassVar[ReserveResult]
    RESERVE_RESULT_NO_SPACE: _ClassVar[ReserveResult]

class CommitResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_RESULT_UNSPECIFIED: _ClassVar[CommitResult]
    COMMIT_RESULT_COMMITTED: _ClassVar[CommitResult]
    COMMIT_RESULT_LOST_RACE: _ClassVar[CommitResult]
    COMMIT_RESULT_EXPIRED: _ClassVar[CommitResult]
    COMMIT_RESULT_CHECKSUM_MISMATCH: _ClassVar[CommitResult]

class IndexState(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INDEX_STATE_UNSPECIFIED: _ClassVar[IndexState]
    INDEX_STATE_READY: _ClassVar[IndexState]
    INDEX_STATE_UNREACHABLE: _ClassVar[IndexState]
    INDEX_STATE_REFUSING: _ClassVar[IndexState]
    INDEX_STATE_MEMORY: _ClassVar[IndexState]
CLIENT_ROLE_UNSPECIFIED: ClientRole
CLIENT_ROLE_PREFILL: ClientRole
CLIENT_ROLE_DECODE: ClientRole
CLIENT_ROLE_BOTH: ClientRole
CLIENT_ROLE_PEER: ClientRole
CLIENT_ROLE_TOOL: ClientRole
CLIENT_HALF_UNSPECIFIED: ClientHalf
CLIENT_HALF_SCHEDULER: ClientHalf
CLIENT_HALF_WORKER: ClientHalf
OUTCOME_REASON_UNSPECIFIED: OutcomeReason
OUTCOME_REASON_HIT: OutcomeReason
OUTCOME_REASON_ABSENT: OutcomeReason
OUTCOME_REASON_PENDING_TIMED_OUT: OutcomeReason
OUTCOME_REASON_DEADLINE: OutcomeReason
OUTCOME_REASON_AGENT_DOWN: OutcomeReason
OUTCOME_REASON_EVICTED: OutcomeReason
OUTCOME_REASON_CHECKSUM: OutcomeReason
OUTCOME_REASON_LEASE_LOST: OutcomeReason
OUTCOME_REASON_FOREIGN_NAMESPACE: OutcomeReason
OUTCOME_REASON_EPOCH_CHANGED: OutcomeReason
OUTCOME_REASON_NO_SPACE: OutcomeReason
OUTCOME_REASON_PEER_FAILED: OutcomeReason
OUTCOME_REASON_LOCAL: OutcomeReason
OUTCOME_REASON_TOO_SHORT: OutcomeReason
OUTCOME_REASON_SKIPPED: OutcomeReason
OUTCOME_REASON_BANNED: OutcomeReason
OUTCOME_REASON_SHED: OutcomeReason
OUTCOME_REASON_DUPLICATE: OutcomeReason
OUTCOME_REASON_CANCELLED: OutcomeReason
OUTCOME_REASON_INTERNAL: OutcomeReason
OUTCOME_KIND_UNSPECIFIED: OutcomeKind
OUTCOME_KIND_LOOKUP: OutcomeKind
OUTCOME_KIND_LOAD: OutcomeKind
OUTCOME_KIND_SAVE: OutcomeKind
LOOKUP_WAIT_UNSPECIFIED: LookupWait
LOOKUP_WAIT_PENDING: LookupWait
LOOKUP_WAIT_HAND_OVER: LookupWait
PRESENCE_UNSPECIFIED: Presence
PRESENCE_READY_HERE: Presence
PRESENCE_READY_ELSEWHERE: Presence
PRESENCE_PENDING: Presence
ACQUIRE_RESULT_UNSPECIFIED: AcquireResult
ACQUIRE_RESULT_READY: AcquireResult
ACQUIRE_RESULT_NOT_FOUND: AcquireResult
ACQUIRE_RESULT_TIMED_OUT: AcquireResult
ACQUIRE_RESULT_PEER_FAILED: AcquireResult
ACQUIRE_RESULT_NO_SPACE: AcquireResult
RESERVE_RESULT_UNSPECIFIED: ReserveResult
RESERVE_RESULT_RESERVED: ReserveResult
RESERVE_RESULT_READY: ReserveResult
RESERVE_RESULT_PENDING: ReserveResult
RESERVE_RESULT_NO_SPACE: ReserveResult
COMMIT_RESULT_UNSPECIFIED: CommitResult
COMMIT_RESULT_COMMITTED: CommitResult
COMMIT_RESULT_LOST_RACE: CommitResult
COMMIT_RESULT_EXPIRED: CommitResult
COMMIT_RESULT_CHECKSUM_MISMATCH: CommitResult
INDEX_STATE_UNSPECIFIED: IndexState
INDEX_STATE_READY: IndexState
INDEX_STATE_UNREACHABLE: IndexState
INDEX_STATE_REFUSING: IndexState
INDEX_STATE_MEMORY: IndexState

class SessionHello(_message.Message):
    __slots__ = ("protocol_version", "role", "half", "engine_name", "host", "rank", "vllm_version", "larder_version", "maps_arena")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HALF_FIELD_NUMBER: _ClassVar[int]
    ENGINE_NAME_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    VLLM_VERSION_FIELD_NUMBER: _ClassVar[int]
    LARDER_VERSION_FIELD_NUMBER: _ClassVar[int]
    MAPS_ARENA_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    role: ClientRole
    half: ClientHalf
    engine_name: str
    host: str
    rank: int
    vllm_version: str
    larder_version: str
    maps_arena: bool
    def __init__(self, protocol_version: _Optional[int] = ..., role: _Optional[_Union[ClientRole, str]] = ..., half: _Optional[_Union[ClientHalf, str]] = ..., engine_name: _Optional[str] = ..., host: _Optional[str] = ..., rank: _Optional[int] = ..., vllm_version: _Optional[str] = ..., larder_version: _Optional[str] = ..., maps_arena: bool = ...) -> None: ...

class Outcome(_message.Message):
    __slots__ = ("kind", "reason", "request_id", "asked_tokens", "served_tokens", "duration_ms", "num_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ASKED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SERVED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DURATION_MS_FIELD_NUMBER: _ClassVar[int]
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: OutcomeKind
    reason: OutcomeReason
    request_id: str
    asked_tokens: int
    served_tokens: int
    duration_ms: int
    num_bytes: int
    def __init__(self, kind: _Optional[_Union[OutcomeKind, str]] = ..., reason: _Optional[_Union[OutcomeReason, str]] = ..., request_id: _Optional[str] = ..., asked_tokens: _Optional[int] = ..., served_tokens: _Optional[int] = ..., duration_ms: _Optional[int] = ..., num_bytes: _Optional[int] = ...) -> None: ...

class SessionPing(_message.Message):
    __slots__ = ("outcomes", "num_dropped_outcomes")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    NUM_DROPPED_OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[Outcome]
    num_dropped_outcomes: int
    def __init__(self, outcomes: _Optional[_Iterable[_Union[Outcome, _Mapping]]] = ..., num_dropped_outcomes: _Optional[int] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("hello", "ping")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    hello: SessionHello
    ping: SessionPing
    def __init__(self, hello: _Optional[_Union[SessionHello, _Mapping]] = ..., ping: _Optional[_Union[SessionPing, _Mapping]] = ...) -> None: ...

class SessionWelcome(_message.Message):
    __slots__ = ("session_token", "epoch", "node_name", "node_number", "arena_bytes", "arena_offered", "checksum_piece_bytes", "ping_interval_ms", "protocol_version", "larder_version")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    ARENA_OFFERED_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_PIECE_BYTES_FIELD_NUMBER: _ClassVar[int]
    PING_INTERVAL_MS_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    LARDER_VERSION_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    epoch: int
    node_name: str
    node_number: int
    arena_bytes: int
    arena_offered: bool
    checksum_piece_bytes: int
    ping_interval_ms: int
    protocol_version: int
    larder_version: str
    def __init__(self, session_token: _Optional[bytes] = ..., epoch: _Optional[int] = ..., node_name: _Optional[str] = ..., node_number: _Optional[int] = ..., arena_bytes: _Optional[int] = ..., arena_offered: bool = ..., checksum_piece_bytes: _Optional[int] = ..., ping_interval_ms: _Optional[int] = ..., protocol_version: _Optional[int] = ..., larder_version: _Optional[str] = ...) -> None: ...

class SessionPong(_message.Message):
    __slots__ = ("draining", "node_number")
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    draining: bool
    node_number: int
    def __init__(self, draining: bool = ..., node_number: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("welcome", "pong")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    welcome: SessionWelcome
    pong: SessionPong
    def __init__(self, welcome: _Optional[_Union[SessionWelcome, _Mapping]] = ..., pong: _Optional[_Union[SessionPong, _Mapping]] = ...) -> None: ...

class GroupShape(_message.Message):
    __slots__ = ("kind", "num_shards", "shard_bytes")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    SHARD_BYTES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    num_shards: int
    shard_bytes: int
    def __init__(self, kind: _Optional[str] = ..., num_shards: _Optional[int] = ..., shard_bytes: _Optional[int] = ...) -> None: ...

class OpenNamespaceRequest(_message.Message):
    __slots__ = ("session_token", "namespace_digest", "description", "tokens_per_chunk", "groups")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_CHUNK_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_digest: bytes
    description: str
    tokens_per_chunk: int
    groups: _containers.RepeatedCompositeFieldContainer[GroupShape]
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ..., description: _Optional[str] = ..., tokens_per_chunk: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[GroupShape, _Mapping]]] = ...) -> None: ...

class OpenNamespaceResponse(_message.Message):
    __slots__ = ("epoch",)
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    def __init__(self, epoch: _Optional[int] = ...) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("session_token", "namespace_digest", "chunk_keys", "take_lease", "superseded_lease_id", "wait", "wait_num_chunks", "wait_ms", "owner_node", "owner_epoch")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    CHUNK_KEYS_FIELD_NUMBER: _ClassVar[int]
    TAKE_LEASE_FIELD_NUMBER: _ClassVar[int]
    SUPERSEDED_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    WAIT_NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    OWNER_NODE_FIELD_NUMBER: _ClassVar[int]
    OWNER_EPOCH_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_digest: bytes
    chunk_keys: _containers.RepeatedScalarFieldContainer[bytes]
    take_lease: bool
    superseded_lease_id: int
    wait: LookupWait
    wait_num_chunks: int
    wait_ms: int
    owner_node: int
    owner_epoch: int
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ..., chunk_keys: _Optional[_Iterable[bytes]] = ..., take_lease: bool = ..., superseded_lease_id: _Optional[int] = ..., wait: _Optional[_Union[LookupWait, str]] = ..., wait_num_chunks: _Optional[int] = ..., wait_ms: _Optional[int] = ..., owner_node: _Optional[int] = ..., owner_epoch: _Optional[int] = ...) -> None: ...

class LookupResponse(_message.Message):
    __slots__ = ("presence", "lease_id", "lease_ttl_ms", "epoch", "index_asked")
    PRESENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    INDEX_ASKED_FIELD_NUMBER: _ClassVar[int]
    presence: bytes
    lease_id: int
    lease_ttl_ms: int
    epoch: int
    index_asked: bool
    def __init__(self, presence: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., epoch: _Optional[int] = ..., index_asked: bool = ...) -> None: ...

class ShardRef(_message.Message):
    __slots__ = ("chunk_key", "group", "shard")
    CHUNK_KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    chunk_key: bytes
    group: int
    shard: int
    def __init__(self, chunk_key: _Optional[bytes] = ..., group: _Optional[int] = ..., shard: _Optional[int] = ...) -> None: ...

class AcquireRequest(_message.Message):
    __slots__ = ("session_token", "namespace_digest", "lookup_lease_id", "shards", "deadline_ms")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    LOOKUP_LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_digest: bytes
    lookup_lease_id: int
    shards: _containers.RepeatedCompositeFieldContainer[ShardRef]
    deadline_ms: int
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ..., lookup_lease_id: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[ShardRef, _Mapping]]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class Extent(_message.Message):
    __slots__ = ("offset", "length")
    OFFSET_FIELD_NUMBER: _ClassVar[int]
    LENGTH_FIELD_NUMBER: _ClassVar[int]
    offset: int
    length: int
    def __init__(self, offset: _Optional[int] = ..., length: _Optional[int] = ...) -> None: ...

class AcquiredShard(_message.Message):
    __slots__ = ("position", "result", "extent", "piece_checksums", "is_remote", "writer_role")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    RESULT_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    PIECE_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    IS_REMOTE_FIELD_NUMBER: _ClassVar[int]
    WRITER_ROLE_FIELD_NUMBER: _ClassVar[int]
    position: int
    result: AcquireResult
    extent: Extent
    piece_checksums: _containers.RepeatedScalarFieldContainer[int]
    is_remote: bool
    writer_role: ClientRole
    def __init__(self, position: _Optional[int] = ..., result: _Optional[_Union[AcquireResult, str]] = ..., extent: _Optional[_Union[Extent, _Mapping]] = ..., piece_checksums: _Optional[_Iterable[int]] = ..., is_remote: bool = ..., writer_role: _Optional[_Union[ClientRole, str]] = ...) -> None: ...

class AcquireResponse(_message.Message):
    __slots__ = ("lease_id", "lease_ttl_ms", "epoch", "shards")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    lease_ttl_ms: int
    epoch: int
    shards: _containers.RepeatedCompositeFieldContainer[AcquiredShard]
    def __init__(self, lease_id: _Optional[int] = ..., lease_ttl_ms: _Optional[int] = ..., epoch: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[AcquiredShard, _Mapping]]] = ...) -> None: ...

class LeasedPosition(_message.Message):
    __slots__ = ("lease_id", "position")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    position: int
    def __init__(self, lease_id: _Optional[int] = ..., position: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("session_token", "lease_ids", "corrupt", "unread_lease_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    UNREAD_LEASE_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    lease_ids: _containers.RepeatedScalarFieldContainer[int]
    corrupt: _containers.RepeatedCompositeFieldContainer[LeasedPosition]
    unread_lease_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., lease_ids: _Optional[_Iterable[int]] = ..., corrupt: _Optional[_Iterable[_Union[LeasedPosition, _Mapping]]] = ..., unread_lease_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseResponse(_message.Message):
    __slots__ = ("held",)
    HELD_FIELD_NUMBER: _ClassVar[int]
    held: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, held: _Optional[_Iterable[bool]] = ...) -> None: ...

class ReserveItem(_message.Message):
    __slots__ = ("shard", "parent_key", "chunk_number", "size_bytes")
    SHARD_FIELD_NUMBER: _ClassVar[int]
    PARENT_KEY_FIELD_NUMBER: _ClassVar[int]
    CHUNK_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    shard: ShardRef
    parent_key: bytes
    chunk_number: int
    size_bytes: int
    def __init__(self, shard: _Optional[_Union[ShardRef, _Mapping]] = ..., parent_key: _Optional[bytes] = ..., chunk_number: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("session_token", "namespace_digest", "items")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_digest: bytes
    items: _containers.RepeatedCompositeFieldContainer[ReserveItem]
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[ReserveItem, _Mapping]]] = ...) -> None: ...

class ReservedShard(_message.Message):
    __slots__ = ("result", "reservation_id", "extent")
    RESULT_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    EXTENT_FIELD_NUMBER: _ClassVar[int]
    result: ReserveResult
    reservation_id: int
    extent: Extent
    def __init__(self, result: _Optional[_Union[ReserveResult, str]] = ..., reservation_id: _Optional[int] = ..., extent: _Optional[_Union[Extent, _Mapping]] = ...) -> None: ...

class ReserveResponse(_message.Message):
    __slots__ = ("shards", "ttl_ms", "epoch")
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ReservedShard]
    ttl_ms: int
    epoch: int
    def __init__(self, shards: _Optional[_Iterable[_Union[ReservedShard, _Mapping]]] = ..., ttl_ms: _Optional[int] = ..., epoch: _Optional[int] = ...) -> None: ...

class CommitItem(_message.Message):
    __slots__ = ("reservation_id", "piece_checksums")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PIECE_CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    reservation_id: int
    piece_checksums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reservation_id: _Optional[int] = ..., piece_checksums: _Optional[_Iterable[int]] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("session_token", "items")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    items: _containers.RepeatedCompositeFieldContainer[CommitItem]
    def __init__(self, session_token: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[CommitItem, _Mapping]]] = ...) -> None: ...

class CommitResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedScalarFieldContainer[CommitResult]
    def __init__(self, results: _Optional[_Iterable[_Union[CommitResult, str]]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("session_token", "reservation_ids")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_IDS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    reservation_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, session_token: _Optional[bytes] = ..., reservation_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ShardRange(_message.Message):
    __slots__ = ("position", "start", "stop")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    position: int
    start: int
    stop: int
    def __init__(self, position: _Optional[int] = ..., start: _Optional[int] = ..., stop: _Optional[int] = ...) -> None: ...

class ReadRequest(_message.Message):
    __slots__ = ("session_token", "lease_id", "ranges")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    lease_id: int
    ranges: _containers.RepeatedCompositeFieldContainer[ShardRange]
    def __init__(self, session_token: _Optional[bytes] = ..., lease_id: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[ShardRange, _Mapping]]] = ...) -> None: ...

class ReadResponse(_message.Message):
    __slots__ = ("range_index", "start", "payload")
    RANGE_INDEX_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    range_index: int
    start: int
    payload: bytes
    def __init__(self, range_index: _Optional[int] = ..., start: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WriteRequest(_message.Message):
    __slots__ = ("session_token", "reservation_id", "start", "payload")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    reservation_id: int
    start: int
    payload: bytes
    def __init__(self, session_token: _Optional[bytes] = ..., reservation_id: _Optional[int] = ..., start: _Optional[int] = ..., payload: _Optional[bytes] = ...) -> None: ...

class WriteResponse(_message.Message):
    __slots__ = ("num_bytes",)
    NUM_BYTES_FIELD_NUMBER: _ClassVar[int]
    num_bytes: int
    def __init__(self, num_bytes: _Optional[int] = ...) -> None: ...

class TailItem(_message.Message):
    __slots__ = ("tail_key", "group", "shard", "num_tokens", "size_bytes")
    TAIL_KEY_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    SHARD_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    tail_key: bytes
    group: int
    shard: int
    num_tokens: int
    size_bytes: int
    def __init__(self, tail_key: _Optional[bytes] = ..., group: _Optional[int] = ..., shard: _Optional[int] = ..., num_tokens: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class ReserveTailsRequest(_message.Message):
    __slots__ = ("session_token", "namespace_digest", "items", "ttl_ms")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TTL_MS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_digest: bytes
    items: _containers.RepeatedCompositeFieldContainer[TailItem]
    ttl_ms: int
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[TailItem, _Mapping]]] = ..., ttl_ms: _Optional[int] = ...) -> None: ...

class ReserveTailsResponse(_message.Message):
    __slots__ = ("shards",)
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    shards: _containers.RepeatedCompositeFieldContainer[ReservedShard]
    def __init__(self, shards: _Optional[_Iterable[_Union[ReservedShard, _Mapping]]] = ...) -> None: ...

class AcquireTailsRequest(_message.Message):
    __slots__ = ("session_token", "namespace_digest", "items", "deadline_ms")
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    DEADLINE_MS_FIELD_NUMBER: _ClassVar[int]
    session_token: bytes
    namespace_digest: bytes
    items: _containers.RepeatedCompositeFieldContainer[TailItem]
    deadline_ms: int
    def __init__(self, session_token: _Optional[bytes] = ..., namespace_digest: _Optional[bytes] = ..., items: _Optional[_Iterable[_Union[TailItem, _Mapping]]] = ..., deadline_ms: _Optional[int] = ...) -> None: ...

class AcquireTailsResponse(_message.Message):
    __slots__ = ("lease_id", "shards")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SHARDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    shards: _containers.RepeatedCompositeFieldContainer[AcquiredShard]
    def __init__(self, lease_id: _Optional[int] = ..., shards: _Optional[_Iterable[_Union[AcquiredShard, _Mapping]]] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Counter(_message.Message):
    __slots__ = ("name", "value")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    name: str
    value: int
    def __init__(self, name: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("node_name", "node_number", "epoch", "larder_version", "uptime_s", "draining", "arena_bytes", "used_bytes", "num_chunks", "num_shards", "num_leases", "num_reservations", "num_sessions", "index_state", "index_message", "counters", "quarantined_bytes", "eviction")
    NODE_NAME_FIELD_NUMBER: _ClassVar[int]
    NODE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    LARDER_VERSION_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    ARENA_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_BYTES_FIELD_NUMBER: _ClassVar[int]
    NUM_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    NUM_SHARDS_FIELD_NUMBER: _ClassVar[int]
    NUM_LEASES_FIELD_NUMBER: _ClassVar[int]
    NUM_RESERVATIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_SESSIONS_FIELD_NUMBER: _ClassVar[int]
    INDEX_STATE_FIELD_NUMBER: _ClassVar[int]
    INDEX_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_BYTES_FIELD_NUMBER: _ClassVar[int]
    EVICTION_FIELD_NUMBER: _ClassVar[int]
    node_name: str
    node_number: int
    epoch: int
    larder_version: str
    uptime_s: int
    draining: bool
    arena_bytes: int
    used_bytes: int
    num_chunks: int
    num_shards: int
    num_leases: int
    num_reservations: int
    num_sessions: int
    index_state: IndexState
    index_message: str
    counters: _containers.RepeatedCompositeFieldContainer[Counter]
    quarantined_bytes: int
    eviction: str
    def __init__(self, node_name: _Optional[str] = ..., node_number: _Optional[int] = ..., epoch: _Optional[int] = ..., larder_version: _Optional[str] = ..., uptime_s: _Optional[int] = ..., draining: bool = ..., arena_bytes: _Optional[int] = ..., used_bytes: _Optional[int] = ..., num_chunks: _Optional[int] = ..., num_shards: _Optional[int] = ..., num_leases: _Optional[int] = ..., num_reservations: _Optional[int] = ..., num_sessions: _Optional[int] = ..., index_state: _Optional[_Union[IndexState, str]] = ..., index_message: _Optional[str] = ..., counters: _Optional[_Iterable[_Union[Counter, _Mapping]]] = ..., quarantined_bytes: _Optional[int] = ..., eviction: _Optional[str] = ...) -> None: ...
