"""Every reason that a condition can have, in one list: docs/status.md explains each, and a test holds both together."""

from __future__ import annotations

from enum import StrEnum


class Reason(StrEnum):
    """CamelCase words that are stable: people and scripts match on them."""

    # All is well.
    ACCEPTED = "Accepted"
    READY = "Ready"
    SCALING = "Scaling"
    SCALED_TO_ZERO = "ScaledToZero"
    NOT_APPLICABLE = "NotApplicable"
    VERIFIED = "Verified"
    FALLBACK_STREAM = "FallbackStream"
    NOT_STALLED = "NotStalled"
    # Under way: waiting helps.
    PAUSED = "Paused"
    NOT_ACCEPTED = "NotAccepted"
    CREATING = "Creating"
    AWAITING_CONTROLLER = "AwaitingController"
    STARTING = "Starting"
    MODEL_LOADING = "ModelLoading"
    ROLLING_OUT = "RollingOut"
    AWAITING_AGENTS = "AwaitingAgents"
    AGENTS_UNREADABLE = "AgentsUnreadable"
    AWAITING_ENGINES = "AwaitingEngines"
    AWAITING_TRAFFIC = "AwaitingTraffic"
    # The resource itself, and what the API server says of its objects.
    INVALID_SPEC = "InvalidSpec"
    RESERVED_ARGUMENT = "ReservedArgument"
    INVALID_TEMPLATE = "InvalidTemplate"
    NAME_CONFLICT = "NameConflict"
    FORBIDDEN = "Forbidden"
    QUOTA_EXCEEDED = "QuotaExceeded"
    APPLY_REFUSED = "ApplyRefused"
    APPLY_FAILED = "ApplyFailed"
    SECRET_NOT_FOUND = "SecretNotFound"
    DRIFT_CONTESTED = "DriftContested"
    POD_MONITOR_CRD_MISSING = "PodMonitorCRDMissing"
    # Redis, as agents see it.
    UNREACHABLE = "Unreachable"
    AUTH_FAILED = "AuthFailed"
    PERMISSION_DENIED = "PermissionDenied"
    FULL = "Full"
    TLS_FAILED = "TlsFailed"
    REFUSED = "Refused"
    # Pods.
    POD_REJECTED = "PodRejected"
    CONFIG_MAP_NOT_FOUND = "ConfigMapNotFound"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    INIT_FAILED = "InitFailed"
    OOM_KILLED = "OOMKilled"
    STARTUP_TIMEOUT = "StartupTimeout"
    CRASH_LOOPING = "CrashLooping"
    START_FAILED = "StartFailed"
    MOUNT_FAILED = "MountFailed"
    UNSCHEDULABLE = "Unschedulable"
    EVICTED = "Evicted"
    NODE_NOT_READY = "NodeNotReady"
    NOT_READY = "NotReady"
    ROLLOUT_STALLED = "RolloutStalled"
    # Nodes and agents.
    NO_MATCHING_NODES = "NoMatchingNodes"
    NO_LOCAL_CACHE = "NoLocalCache"
    # From prefill to decode.
    SHARED_MEMORY_UNAVAILABLE = "SharedMemoryUnavailable"
    CONNECTOR_MISSING = "ConnectorMissing"
    PROTOCOL_MISMATCH = "ProtocolMismatch"
    ENGINE_REFUSED = "EngineRefused"
    LAYOUT_MISMATCH = "LayoutMismatch"
    NOTHING_READ = "NothingRead"
    PROBE_FAILED = "ProbeFailed"
    PROBE_READ_NOTHING = "ProbeReadNothing"


UNDER_WAY = frozenset(
    {
        Reason.NOT_ACCEPTED, Reason.CREATING, Reason.AWAITING_CONTROLLER, Reason.STARTING, Reason.MODEL_LOADING,
        Reason.ROLLING_OUT, Reason.AWAITING_AGENTS, Reason.AWAITING_ENGINES, Reason.AWAITING_TRAFFIC,
    }
)  # fmt: skip
"""Not True, and no failure: no Warning event."""

NOTICES = frozenset({Reason.DRIFT_CONTESTED, Reason.POD_MONITOR_CRD_MISSING})
"""Decide no condition: they are problems alone, and each that comes is an event."""
