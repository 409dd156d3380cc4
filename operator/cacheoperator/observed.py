"""What was seen of one KVCache: plain values from the API server and from agents' /statusz. Made by `observe`, read by
`status` and the conditions. No clock, no I/O: `now` is a field.

Invariant: nothing here is a guess: what could not be read is None or absent, and says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True)
class Container:
    """One container of a pod, init containers too. Reasons are Kubernetes' words, "" for none."""

    name: str
    image: str
    is_init: bool
    is_ready: bool
    restarts: int
    waiting_reason: str = ""
    waiting_message: str = ""
    ended_reason: str = ""
    """Of the last termination (or the present one): OOMKilled, Error, Completed …"""
    ended_exit_code: int | None = None
    ended_message: str = ""
    ended_started_at: datetime | None = None
    """When the run that ended had begun: a run that lasted as long as the startup probe allows was ended by it."""
    ended_at: datetime | None = None
    running_since: datetime | None = None
    memory_limit_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of ours. `unschedulable` is the scheduler's message, "" when placed or not tried."""

    component: str
    name: str
    uid: str
    node: str
    ip: str
    phase: str
    is_ready: bool
    is_deleting: bool
    created_at: datetime
    template_hash: str
    """pod-template-hash or controller-revision-hash: which revision of its workload it is."""
    unschedulable: str = ""
    ready_since: datetime | None = None
    containers: tuple[Container, ...] = ()
    gpu_request: int = 0
    supplemental_problem: str = ""
    """From events of the pod: FailedMount with a missing Secret or key, FailedCreatePodSandBox … "Reason: message"."""
    failed: str = ""
    """status.reason and status.message of a pod whose phase is Failed: "Evicted: The node was low on …"."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Deployment, DaemonSet or StatefulSet of one component. `wanted` is what its controller wants now."""

    component: str
    kind: str
    name: str
    generation: int
    observed_generation: int
    wanted: int
    ready: int
    updated: int
    available: int
    changed_at: datetime | None = None
    """When its newest revision (ReplicaSet or ControllerRevision) was made."""
    newest_template_hash: str = ""
    condition_messages: Mapping[str, str] = field(default_factory=dict)
    """Conditions that are not as they should be: ReplicaFailure → message, Progressing (False) → message."""


@dataclass(frozen=True, slots=True)
class Warning:  # noqa: A001 - Kubernetes' word
    """A Warning event on one of our objects, still of interest: FailedCreate, FailedMount …"""

    object: str
    """kind/name in lower case, as `daemonset/demo-cache`."""
    component: str
    reason: str
    message: str
    first_seen: datetime
    last_seen: datetime


@dataclass(frozen=True, slots=True)
class ApplyError:
    """An apply or read of ours that the API server refused. `field_path` is its word for where, "" for none."""

    object: str
    component: str
    verb: str
    code: int
    reason: str
    """Forbidden, Invalid, Conflict, NameConflict (a foreign object has our name), QuotaExceeded …"""
    message: str
    since: datetime
    field_path: str = ""


@dataclass(frozen=True, slots=True)
class Contest:
    """An object of ours that someone changes again each time it is put right."""

    object: str
    component: str
    paths: tuple[str, ...]
    """Empty: it is deleted."""
    managers: tuple[str, ...]
    """Field managers that do it, as far as the object tells."""


@dataclass(frozen=True, slots=True)
class NodeView:
    """One node, as far as agents and engines care."""

    name: str
    matches_cache: bool
    """Whether the node selector of the agents matches it."""
    tolerated: bool
    """Whether agents tolerate its NoSchedule and NoExecute taints."""
    is_ready: bool
    untolerated_taint: str = ""


@dataclass(frozen=True, slots=True)
class EngineSession:
    """One live session of an engine half with an agent, from /statusz."""

    engine: str
    """Name of the pod."""
    role: str
    half: str
    rank: int
    transport: str
    """SharedMemory, Stream or "" while nothing moved."""
    namespace: str
    """Hex digest (fingerprint); "" when none was opened."""
    larder_version: str
    vllm_version: str
    protocol: int
    asked_tokens: int = 0
    hit_tokens: int = 0


@dataclass(frozen=True, slots=True)
class NamespaceView:
    """One namespace that an agent knows: the digest and what it was made of."""

    digest: str
    facts: Mapping[str, object]
    """The canonical description, parsed."""
    tokens_per_chunk: int
    bytes_per_token: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Chunks of one namespace that moved through one agent since it started, by who wrote and who read them.

    `committed`: chunks that engines of `writer_role` stored. `looked_up`, `loaded`: chunks of `writer_role` that an
    engine of `reader_role` found by lookup, and read. Monotone while the epoch is the same.
    """

    namespace: str
    writer_role: str
    reader_role: str
    committed: int
    looked_up: int
    loaded: int


@dataclass(frozen=True, slots=True)
class AgentReport:
    """One agent's /statusz, or why there is none (`problem`)."""

    pod: str
    node: str
    problem: str = ""
    epoch: int = 0
    version: str = ""
    protocol: int = 0
    is_draining: bool = False
    index_health: str = ""
    """ready, unreachable, refusing or memory."""
    index_reason: str = ""
    """Machine-readable: Unreachable, AuthFailed, PermissionDenied, Full, TlsFailed, Refused; "" when well."""
    index_message: str = ""
    arena_bytes: int = 0
    used_bytes: int = 0
    sessions: tuple[EngineSession, ...] = ()
    namespaces: tuple[NamespaceView, ...] = ()
    flows: tuple[Flow, ...] = ()
    refused_hellos: tuple[str, ...] = ()
    """Newest first: "engine NAME speaks protocol 3, this agent 1 and 2"."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Evidence about one pair of fingerprints, remembered in status.transfers (see `conditions/transfer.py`)."""

    prefill: str
    decode: str
    verdict: str
    """Verified, NothingRead or LayoutMismatch."""
    since: datetime


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """How the newest probe of a pair went. `problem` "" means that both engines answered."""

    prefill: str
    decode: str
    at: datetime
    problem: str


@dataclass(frozen=True, slots=True)
class Window:
    """Sums of flows over the last ten minutes or less, kept by the edge: from prefill to decode, all agents."""

    since: datetime
    committed: int
    looked_up: int
    loaded: int


@dataclass(frozen=True, slots=True)
class Observed:
    """Everything that `status` reads beside the manifest and the previous status."""

    now: datetime
    generation: int
    operator_version: str
    is_refused: str = ""
    """Why the manifest itself can't be used (ManifestRefused), "" when it can."""
    refusals: tuple[tuple[str, str], ...] = ()
    """(reason, message) of what render refused: ReservedArgument, InvalidTemplate …"""
    workloads: Mapping[str, Workload] = field(default_factory=dict)
    """By component."""
    pods: tuple[Pod, ...] = ()
    warnings: tuple[Warning, ...] = ()
    apply_errors: tuple[ApplyError, ...] = ()
    contests: tuple[Contest, ...] = ()
    is_pod_monitor_served: bool = True
    """Whether the cluster knows the kind PodMonitor."""
    nodes: tuple[NodeView, ...] | None = None
    """None when nodes may not be listed (namespaced install)."""
    agents: tuple[AgentReport, ...] = ()
    transport: str = ""
    transport_reason: str = ""
    """What render decided, and why."""
    flow_window: Window | None = None
    probes: tuple[ProbeResult, ...] = ()
