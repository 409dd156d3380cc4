"""What a KVCache says of itself: every failure that people meet, in the exact words, and what becomes of it."""

# ruff: noqa: E501 - sentences stand as they are read

from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

import pytest
from cacheoperator.observed import (
    ApplyError,
    Container,
    NodeView,
    Observed,
    Warning,  # noqa: A004 - Kubernetes' word
    Window,
)
from cacheoperator.status import CONDITIONS, recheck_after_s, status, transitions
from operator_scenes import (
    D1,
    D2,
    EARLIER,
    ENGINES_SPEC,
    EXTERNAL,
    IMAGE,
    MINUTE,
    NOW,
    UNREAD,
    agent,
    broken_decode,
    check_invariants,
    condition,
    container,
    healthy,
    manifest,
    old_and_new,
    sessions,
    short,
    view,
    with_agents,
    with_pod,
    with_workload,
    without_pods,
)


@dataclass
class Case:
    """A failure: what is observed, and what must be said."""

    name: str
    observed: Observed
    condition: str
    status: str
    reason: str
    message: str
    is_stalled: bool
    events: tuple[str, ...]
    """Reasons of the events on the way from healthy to here, in order."""
    more: str = ""
    spec: str = ENGINES_SPEC
    problems: tuple[str, ...] = field(default=())


PULL = {"running_since": None, "waiting_reason": "ImagePullBackOff"}
QUOTA = (
    'Error creating: pods "demo-decode-66f-9kq" is forbidden: exceeded quota: team, requested: pods=1, '
    "used: pods=5, limited: pods=5"
)
SECURITY = (
    'Error creating: pods "demo-cache-x2x4j" is forbidden: violates PodSecurity "restricted:latest": hostPath volumes '
    '(volume "sockets")'
)


def rejected(component: str, said: str) -> Observed:
    event = Warning(f"daemonset/demo-{component}", component, "FailedCreate", said, EARLIER, NOW)
    shown = without_pods(healthy(warnings=(event,)), component)
    return with_workload(shown, component, ready=0, updated=0, available=0)


def loading(since: datetime = NOW - 5 * MINUTE) -> Observed:
    return broken_decode({"running_since": since}, {"created_at": since - MINUTE})


def api_error(
    object_: str, code: int, reason: str, message: str, component: str = "", at: str = ""
) -> Observed:
    return healthy(
        apply_errors=(ApplyError(object_, component, "patch", code, reason, message, EARLIER, at),)
    )


def redis_says(reason: str, health: str, message: str) -> Observed:
    return with_agents(healthy(), index_reason=reason, index_health=health, index_message=message)


CASES = [
    # 1
    Case(
        "1 token secret missing",
        broken_decode({**PULL, "waiting_reason": "CreateContainerConfigError", "waiting_message": 'secret "hf" not found'}),
        "Accepted", "False", "SecretNotFound",
        'secret "hf" not found in namespace serving (spec.model.tokenSecretRef): create it with token',
        True, ("EngineLost", "SecretNotFound"), problems=("secret/hf",),
    ),
    Case(
        "1 key of the token secret missing",
        broken_decode({
            **PULL, "waiting_reason": "CreateContainerConfigError",
            "waiting_message": "couldn't find key token in Secret serving/hf",
        }),
        "Accepted", "False", "SecretNotFound",
        'secret "hf" in namespace serving has no key token (spec.model.tokenSecretRef): add the key',
        True, ("EngineLost", "SecretNotFound"), problems=("secret/hf",),
    ),
    Case(
        "1 TLS secret missing, seen by its volume",
        broken_decode(
            {"running_since": None, "waiting_reason": "ContainerCreating"},
            {"supplemental_problem": 'FailedMount: MountVolume.SetUp failed for volume "tls" : secret "mtls" not found'},
        ),
        "Accepted", "False", "SecretNotFound",
        'secret "mtls" not found in namespace serving (spec.tls.secretRef): create it with tls.crt and tls.key and ca.crt',
        True, ("EngineLost", "SecretNotFound"), more="tls: {mode: Secret, secretRef: {name: mtls}}", problems=("secret/mtls",),
    ),
    Case(
        "1 key of the TLS secret missing, seen by its volume",
        broken_decode(
            {"running_since": None, "waiting_reason": "ContainerCreating"},
            {"supplemental_problem": 'FailedMount: MountVolume.SetUp failed for volume "tls" : references non-existent secret key: ca.crt'},
        ),
        "Accepted", "False", "SecretNotFound",
        'secret "mtls" in namespace serving has no key ca.crt (spec.tls.secretRef): add the key',
        True, ("EngineLost", "SecretNotFound"), more="tls: {mode: Secret, secretRef: {name: mtls}}",
    ),
    Case(
        "1 a secret of our own is missing: no person needed",
        broken_decode(
            {"running_since": None, "waiting_reason": "ContainerCreating"},
            {"supplemental_problem": 'FailedMount: MountVolume.SetUp failed for volume "tls" : secret "demo-engine-tls" not found'},
        ),
        "EnginesReady", "False", "SecretNotFound",
        'secret "demo-engine-tls" not found in namespace serving: the operator makes it again',
        False, ("EngineLost", "SecretNotFound"),
    ),
    Case(
        "configmap of a template missing",
        broken_decode({**PULL, "waiting_reason": "CreateContainerConfigError", "waiting_message": 'configmap "chat" not found'}),
        "EnginesReady", "False", "ConfigMapNotFound",
        'configmap "chat" not found in namespace serving: create it, or correct the template that names it',
        True, ("EngineLost", "ConfigMapNotFound"),
    ),
    # 2
    Case(
        "2 external Redis unreachable",
        redis_says("Unreachable", "unreachable", "Redis at valkey.infra.svc:6380 can't be reached (timed out): start it, or correct the index's address"),
        "RedisReady", "False", "Unreachable",
        "Redis at valkey.infra.svc:6380 can't be reached (timed out): start it, or correct the index's address; seen by all "
        "agents; engines keep running with the chunks of their own node only",
        False, ("RedisLost", "Unreachable"), more=EXTERNAL, problems=("redis/valkey.infra.svc:6380",),
    ),
    Case(
        "2 Redis unreachable from one node",
        replace(healthy(), agents=(
            healthy().agents[0],
            replace(healthy().agents[1], index_health="unreachable", index_reason="Unreachable", index_message="Redis at x can't be reached"),
        )),
        "RedisReady", "False", "Unreachable",
        "Redis at x can't be reached; seen by agents on n2; engines keep running with the chunks of their own node only",
        False, ("RedisLost", "Unreachable"), more=EXTERNAL,
    ),
    # 3
    Case(
        "3 wrong password",
        redis_says("AuthFailed", "refusing", "Redis at v:1 refuses the user or password (WRONGPASS): correct the URL or the password file"),
        "RedisReady", "False", "AuthFailed",
        "Redis at v:1 refuses the user or password (WRONGPASS): correct the URL or the password file; seen by all agents; "
        "engines keep running with the chunks of their own node only",
        True, ("RedisLost", "AuthFailed"), more=EXTERNAL,
    ),
    Case(
        "3 wrong password of our own Redis heals with the next refresh of the Secret",
        redis_says("AuthFailed", "refusing", "Redis at demo-redis:6379 refuses the password"),
        "RedisReady", "False", "AuthFailed",
        "Redis at demo-redis:6379 refuses the password; seen by all agents; engines keep running with the chunks of their own "
        "node only",
        False, ("RedisLost", "AuthFailed"), problems=("statefulset/demo-redis",),
    ),
    Case(
        "3 no permission, with the ACL line",
        redis_says("PermissionDenied", "refusing", "Redis at v:1 denies what the index needs (NOPERM: x): run `ACL SETUSER kv on >PASSWORD ~larder:1:* +mget` there"),
        "RedisReady", "False", "PermissionDenied",
        "Redis at v:1 denies what the index needs (NOPERM: x): run `ACL SETUSER kv on >PASSWORD ~larder:1:* +mget` there; seen "
        "by all agents; engines keep running with the chunks of their own node only",
        True, ("RedisLost", "PermissionDenied"), more=EXTERNAL,
    ),
    Case(
        "3 TLS fails",
        redis_says("TlsFailed", "unreachable", "TLS to Redis at v:1 failed: its certificate is not trusted; give the CA that signed it"),
        "RedisReady", "False", "TlsFailed",
        "TLS to Redis at v:1 failed: its certificate is not trusted; give the CA that signed it; seen by all agents; engines "
        "keep running with the chunks of their own node only",
        True, ("RedisLost", "TlsFailed"), more=EXTERNAL,
    ),
    Case(
        "3 Redis refuses, by an agent that gives no reason",
        redis_says("", "refusing", "Redis at v:1 is a Redis Cluster, which is not supported: use one primary"),
        "RedisReady", "False", "Refused",
        "Redis at v:1 is a Redis Cluster, which is not supported: use one primary; seen by all agents; engines keep running "
        "with the chunks of their own node only",
        False, ("RedisLost", "Refused"), more=EXTERNAL,
    ),
    # 4
    Case(
        "4 Redis full",
        redis_says("Full", "refusing", "Redis at v:1 is full (OOM under noeviction): raise its maxmemory"),
        "RedisReady", "False", "Full",
        "Redis at v:1 is full (OOM under noeviction): raise its maxmemory; seen by all agents; new chunks are found on their own "
        "node only",
        False, ("RedisLost", "Full"), more=EXTERNAL,
    ),
    # 5
    Case(
        "5 no node for the cache",
        replace(
            with_workload(without_pods(healthy(), "cache"), "cache", wanted=0, ready=0, updated=0, available=0),
            nodes=(NodeView("n1", False, True, True), NodeView("n2", False, True, True)),
        ),
        "CacheReady", "False", "NoMatchingNodes",
        "0 nodes match spec.cache.nodeSelector {gpu: a100}: label nodes so, or correct it",
        False, ("CacheDegraded", "NoMatchingNodes"), problems=("daemonset/demo-cache", "node/n1", "node/n2"),
    ),
    Case(
        "5 all nodes for the cache are tainted",
        replace(
            with_workload(without_pods(healthy(), "cache"), "cache", wanted=0, ready=0, updated=0, available=0),
            nodes=(NodeView("n1", True, False, True, "team=a:NoSchedule"),),
        ),
        "CacheReady", "False", "NoMatchingNodes",
        "0 nodes: those that match spec.cache.nodeSelector {gpu: a100} have a taint that agents don't tolerate "
        "(team=a:NoSchedule): add it to spec.cache.tolerations",
        False, ("CacheDegraded", "NoMatchingNodes"),
    ),
    # 6
    Case(
        "6 Pod Security refuses agents: a DaemonSet has no condition, only events",
        rejected("cache", SECURITY),
        "CacheReady", "False", "PodRejected",
        'daemonset/demo-cache: pods are refused: violates PodSecurity "restricted:latest": hostPath volumes (volume '
        '"sockets"): namespace serving must allow it, or the template must not ask for it',
        True, ("CacheDegraded", "PodRejected"), problems=("daemonset/demo-cache",),
    ),
    Case(
        "6 quota refuses engines",
        with_workload(
            without_pods(healthy(), "decode"), "decode", ready=0, updated=0, available=0,
            condition_messages={"ReplicaFailure": QUOTA.removeprefix("Error creating: ")},
        ),
        "EnginesReady", "False", "PodRejected",
        "deployment/demo-decode: pods are refused: exceeded quota: team, requested: pods=1, used: pods=5, limited: pods=5: "
        "raise the quota of namespace serving, or ask for less",
        True, ("EngineLost", "PodRejected"),
    ),
    # 7
    Case(
        "7 too few GPUs",
        broken_decode(
            {"running_since": None},
            {"node": "", "phase": "Pending", "gpu_request": 8, "unschedulable": "0/6 nodes are available: 6 Insufficient nvidia.com/gpu. no new claims to deallocate, preemption: 0/6 nodes are available: 6 No preemption victims found for incoming pod."},
        ),
        "EnginesReady", "False", "Unschedulable",
        "pod/demo-decode-b: 0/6 nodes are available: 6 Insufficient nvidia.com/gpu (asks 8 nvidia.com/gpu): add nodes with free "
        "GPUs, or lower replicas or tensorParallelSize",
        False, ("EngineLost", "Unschedulable"), problems=("pod/demo-decode-b",),
    ),
    Case(
        "7 volume claim missing",
        broken_decode(
            {"running_since": None},
            {"node": "", "phase": "Pending", "unschedulable": 'persistentvolumeclaim "models" not found'},
        ),
        "EnginesReady", "False", "Unschedulable",
        'pod/demo-decode-b: persistentvolumeclaim "models" not found: create or correct spec.model.volumeClaimName',
        False, ("EngineLost", "Unschedulable"),
    ),
    # 8
    Case(
        "8 image pull",
        broken_decode({**PULL, "waiting_reason": "ErrImagePull", "waiting_message": "manifest unknown"}),
        "EnginesReady", "False", "ImagePullFailed",
        f"pod/demo-decode-b on n2: image {IMAGE} of container vllm can't be pulled (manifest unknown): correct the image, or give "
        "spec.imagePullSecrets",
        True, ("EngineLost", "ImagePullFailed"), problems=("pod/demo-decode-b",),
    ),
    Case(
        "8 image of the agents",
        with_workload(
            with_pod(
                healthy(), "demo-cache-n2", is_ready=False, ready_since=None,
                containers=(container("cache", is_ready=False, **{**PULL, "waiting_message": 'Back-off pulling image "x"'}),),
            ),
            "cache", ready=1, available=1,
        ),
        "CacheReady", "False", "ImagePullFailed",
        "pod/demo-cache-n2 on n2: image larder/cache:1 of container agent can't be pulled: correct the image, or give "
        "spec.imagePullSecrets",
        True, ("CacheDegraded", "ImagePullFailed"),
    ),
    # 9
    Case(
        "9 slow load",
        loading(),
        "EnginesReady", "False", "ModelLoading",
        "prefill 1/1, decode 1/2 ready; slowest pod/demo-decode-b on n2 loading since 11:59 UTC of at most 1800 s",
        False, ("EngineLost",),
    ),
    Case(
        "9 start-up timed out",
        broken_decode({
            "running_since": NOW - MINUTE, "restarts": 1, "ended_reason": "Error", "ended_exit_code": 137,
            "ended_started_at": NOW - timedelta(seconds=1870), "ended_at": NOW - MINUTE,
            "ended_message": "INFO starting\nINFO loading shard 1\nINFO loading shard 2\n\nINFO loading shard 3\n",
        }),
        "EnginesReady", "False", "StartupTimeout",
        "pod/demo-decode-b on n2 did not finish loading within 1800 s and was restarted: raise spec.engine.startupTimeoutSeconds; "
        "it said last: INFO loading shard 1 | INFO loading shard 2 | INFO loading shard 3",
        True, ("EngineLost", "StartupTimeout"), problems=("pod/demo-decode-b",),
    ),
    # 10
    Case(
        "10 crash loop",
        broken_decode({
            "running_since": None, "restarts": 4, "waiting_reason": "CrashLoopBackOff", "ended_reason": "Error",
            "ended_exit_code": 1, "ended_started_at": NOW - 2 * MINUTE, "ended_at": NOW - MINUTE,
            "ended_message": "Traceback\nValueError: no such dtype",
        }),
        "EnginesReady", "False", "CrashLooping",
        "pod/demo-decode-b on n2: container vllm ends with exit code 1: Traceback | ValueError: no such dtype; see kubectl logs "
        "-n serving demo-decode-b -c vllm --previous",
        False, ("EngineLost", "CrashLooping"), problems=("pod/demo-decode-b",),
    ),
    Case(
        "10 agent killed for memory: limit against arena",
        with_workload(
            with_pod(
                healthy(), "demo-cache-n2", is_ready=False, ready_since=None,
                containers=(container("cache", is_ready=False, restarts=1, ended_reason="OOMKilled", ended_exit_code=137),),
            ),
            "cache", ready=1, available=1,
        ),
        "CacheReady", "False", "OOMKilled",
        "pod/demo-cache-n2 on n2: container agent was killed for memory: limit 9Gi, of which the arena takes 8Gi: raise "
        "spec.cache.overhead",
        False, ("CacheDegraded", "OOMKilled"), problems=("pod/demo-cache-n2",),
    ),
    Case(
        "10 engine killed for memory",
        broken_decode({"restarts": 1, "ended_reason": "OOMKilled", "ended_exit_code": 137}),
        "EnginesReady", "False", "OOMKilled",
        "pod/demo-decode-b on n2: container vllm was killed for memory: limit 9Gi: raise resources.limits.memory in "
        "spec.decode.template",
        False, ("EngineLost", "OOMKilled"),
    ),
    Case(
        "10 init container fails",
        with_workload(
            with_pod(
                healthy(), "demo-decode-b", is_ready=False, ready_since=None,
                containers=(
                    Container("larder-payload", "larder/payload:1", True, False, 3, waiting_reason="CrashLoopBackOff",
                              ended_reason="Error", ended_exit_code=1, ended_message="cp: no space left"),
                    container("decode", is_ready=False, running_since=None, waiting_reason="PodInitializing"),
                ),
            ),
            "decode", ready=1,
        ),
        "EnginesReady", "False", "InitFailed",
        "pod/demo-decode-b on n2: init container larder-payload ends with exit code 1: cp: no space left; see kubectl logs "
        "-n serving demo-decode-b -c larder-payload --previous",
        False, ("EngineLost", "InitFailed"),
    ),
    Case(
        "10 container can't be started",
        broken_decode({**PULL, "waiting_reason": "RunContainerError", "waiting_message": 'exec: "vllm": not found'}),
        "EnginesReady", "False", "StartFailed",
        'pod/demo-decode-b on n2: container vllm can\'t be started (RunContainerError: exec: "vllm": not found): correct its '
        "image, command or template",
        False, ("EngineLost", "StartFailed"),
    ),
    # 11
    Case(
        "11 connector missing",
        replace(healthy(), agents=(healthy().agents[0], agent("n2"))),
        "TransferVerified", "False", "ConnectorMissing",
        f"decode pod/demo-decode-b on n2 serves requests but is not registered with the agent there: image {IMAGE} lacks the "
        "connector or can't load it; see kubectl logs -n serving demo-decode-b -c vllm",
        True, ("TransferLost", "ConnectorMissing"), problems=("pod/demo-decode-b",),
    ),
    Case(
        "11 version skew",
        replace(healthy(), agents=(
            healthy().agents[0],
            agent("n2", refused_hellos=("engine demo-decode-b: protocol_version 4 is not spoken here; this agent speaks 1 and 2.",)),
        )),
        "TransferVerified", "False", "ProtocolMismatch",
        "the agent on n2 refuses engine demo-decode-b: protocol_version 4 is not spoken here; this agent speaks 1 and 2: bring "
        "both to one version: kubectl larder upgrade demo, or set spec.engine.payloadImage and spec.cache.image",
        True, ("TransferLost", "ProtocolMismatch"), problems=("node/n2", "pod/demo-decode-b"),
    ),
    Case(
        "11 a hello refused for another cause",
        replace(healthy(), agents=(healthy().agents[0], agent("n2", refused_hellos=("engine x: rank -1",)))),
        "TransferVerified", "False", "EngineRefused",
        "the agent on n2 refuses engine x: rank -1: see the log of that agent",
        True, ("TransferLost", "EngineRefused"),
    ),
    # 12
    Case(
        "12 layouts differ, field by field",
        replace(healthy(), agents=(
            replace(healthy().agents[0], sessions=sessions("demo-prefill-a", "prefill"),
                    namespaces=(view(), view(D2, 512, kv_cache_dtype="fp8", model={"name": "org/model", "files": "99"}))),
            agent("n2", (*sessions("demo-decode-a", "decode", D2), *sessions("demo-decode-b", "decode", D2))),
        )),
        "TransferVerified", "False", "LayoutMismatch",
        "prefill and decode store different KV (fingerprints 1a1a1a1a and 2b2b2b2b): kv_cache_dtype: prefill auto, decode fp8; "
        "model.files: prefill 77, decode 99; tokens_per_chunk: prefill 256, decode 512: give both roles the same "
        "--kv-cache-dtype; give both roles the same files of the model; set spec.cache.chunkTokens",
        True, ("TransferLost", "LayoutMismatch", "ChunkTokensChanged"), problems=("kvcache/demo",),
    ),
    Case(
        "12 nothing is read",
        replace(
            healthy(), flow_window=Window(NOW - 10 * MINUTE, committed=20, looked_up=20, loaded=0),
            agents=(replace(healthy().agents[0], flows=(UNREAD,)), healthy().agents[1]),
        ),
        "TransferVerified", "False", "NothingRead",
        "since 2026-11-21 12:04 UTC prefill stores chunks and decode finds them, but reads none (fingerprint 1a1a1a1a): kubectl "
        "larder explain demo says why",
        False, ("TransferLost", "NothingRead"), problems=("kvcache/demo",),
    ),
    # 13
    Case(
        "13 shared memory not allowed, Auto",
        healthy(transport="Stream", transport_reason="namespace serving enforces Pod Security baseline, which forbids hostPath"),
        "TransferVerified", "True", "FallbackStream",
        "decode reads what prefill stores (fingerprint 1a1a1a1a, since 2026-11-21 12:04 UTC); bytes move by Stream, which is "
        "slower: namespace serving enforces Pod Security baseline, which forbids hostPath",
        False, ("FallbackStream",),
    ),
    Case(
        "13 shared memory wanted, and not used",
        replace(healthy(), agents=(
            replace(healthy().agents[0], sessions=(
                *sessions("demo-prefill-a", "prefill", transport="Stream"), *sessions("demo-decode-a", "decode"))),
            healthy().agents[1],
        )),
        "TransferVerified", "False", "SharedMemoryUnavailable",
        "spec.cache.transport is SharedMemory, but bytes move by Stream: shared memory is set up, but demo-prefill-a could not use "
        "it: see the log of container vllm, or write Auto",
        True, ("TransferLost", "SharedMemoryUnavailable"),
        spec=ENGINES_SPEC.replace("cache: {", "cache: {transport: SharedMemory, "),
    ),
    # 14
    Case(
        "14 engine on a node without agent",
        replace(
            with_pod(healthy(), "demo-decode-b", node="gpu-9"),
            nodes=(*healthy().nodes, NodeView("gpu-9", True, False, True, "nvidia.com/gpu:NoSchedule")),
        ),
        "CacheReady", "False", "NoLocalCache",
        "engines pod/demo-decode-b run on gpu-9, which has no agent (taint nvidia.com/gpu:NoSchedule not tolerated: add it to "
        "spec.cache.tolerations)",
        False, ("CacheDegraded", "NoLocalCache"), problems=("node/gpu-9",),
    ),
    Case(
        "14 without sight of nodes",
        replace(with_pod(healthy(), "demo-decode-b", node="gpu-9"), nodes=None),
        "CacheReady", "False", "NoLocalCache",
        "engines pod/demo-decode-b run on gpu-9, which has no agent (give it what the agents ask of a node)",
        False, ("CacheDegraded", "NoLocalCache"),
    ),
    # 15
    Case(
        "15 operator lacks RBAC",
        api_error(
            "daemonset/demo-cache", 403, "Forbidden",
            'daemonsets.apps "demo-cache" is forbidden: User "system:serviceaccount:larder-system:larder-operator" cannot patch '
            'resource "daemonsets" in API group "apps" in the namespace "serving"', "cache",
        ),
        "Accepted", "False", "Forbidden", "cannot patch daemonsets.apps in serving: upgrade the chart, which permits it (rbac.create)",
        True, ("Forbidden",), problems=("daemonset/demo-cache",),
    ),
    # 16
    Case(
        "16 a foreign object has our name",
        api_error("service/demo", 409, "NameConflict", "not ours"),
        "Accepted", "False", "NameConflict",
        "Service demo exists and is not owned by this KVCache: delete that object, or give this resource another name",
        True, ("NameConflict",), problems=("service/demo",),
    ),
    # 17
    Case(
        "17 stuck rollout, by its controller's word",
        old_and_new({}, condition_messages={"Progressing": 'ReplicaSet "demo-decode-66f" has timed out progressing.'}),
        "EnginesReady", "False", "RolloutStalled",
        "deployment/demo-decode: old revision still serving; 1/2 updated, pod/demo-decode-c on n2 not ready since 2026-11-21 "
        "11:04 UTC: see kubectl describe pod -n serving demo-decode-c",
        False, ("EngineLost", "RolloutStalled"), problems=("deployment/demo-decode",),
    ),
    Case(
        "17 a rollout with a bad image keeps serving with its old revision",
        old_and_new({"containers": (container("decode", is_ready=False, **PULL),), "created_at": NOW - MINUTE}),
        "EnginesReady", "False", "ImagePullFailed",
        f"pod/demo-decode-c on n2: image {IMAGE} of container vllm can't be pulled: correct the image, or give "
        "spec.imagePullSecrets; decode keeps serving with its old revision",
        True, ("EngineLost", "ImagePullFailed"),
    ),
    # Others
    Case(
        "an object is refused by quota",
        api_error("service/demo", 403, "QuotaExceeded", 'services "demo" is forbidden: exceeded quota: team'),
        "Accepted", "False", "QuotaExceeded",
        'service/demo: services "demo" is forbidden: exceeded quota: team: raise the quota of namespace serving, or ask for less',
        True, ("QuotaExceeded",),
    ),
    Case(
        "a template names what the API server does not know",
        api_error(
            "deployment/demo-decode", 500, "Invalid",
            "failed to create typed patch object (serving/demo-decode; apps/v1, Kind=Deployment): .spec.template.spec.gpus: field "
            "not declared in schema", "decode", ".spec.template.spec.gpus",
        ),
        "Accepted", "False", "InvalidTemplate",
        "deployment/demo-decode is refused: failed to create typed patch object (serving/demo-decode; apps/v1, Kind=Deployment): "
        ".spec.template.spec.gpus: field not declared in schema: correct spec.decode.template",
        True, ("InvalidTemplate",), spec=ENGINES_SPEC.replace("{replicas: 2}", "{replicas: 2, template: {spec: {gpus: 1}}}"),
    ),
    Case(
        "an admission rule refuses an object",
        api_error("service/demo", 403, "Forbidden", 'admission webhook "rules.example" denied the request: no LoadBalancer'),
        "Accepted", "False", "ApplyRefused",
        'service/demo is refused: admission webhook "rules.example" denied the request: no LoadBalancer',
        True, ("ApplyRefused",),
    ),
    Case(
        "the API server is overloaded",
        api_error("service/demo", 503, "ServiceUnavailable", "etcdserver: leader changed"),
        "Accepted", "Unknown", "ApplyFailed", "patch of service/demo failed and is tried again: etcdserver: leader changed",
        False, ("ApplyFailed",),
    ),
    Case(
        "the namespace goes away",
        api_error("service/demo", 403, "Forbidden", "services \"demo\" is forbidden: unable to create new content in namespace serving because it is being terminated"),
        "Accepted", "False", "ApplyRefused",
        'service/demo is refused: services "demo" is forbidden: unable to create new content in namespace serving because it is '
        "being terminated",
        False, ("ApplyRefused",),
    ),
    Case(
        "an argument that is the operator's",
        healthy(refusals=(("ReservedArgument", "spec.decode.template: --kv-transfer-config is set by Larder: remove it"),)),
        "Accepted", "False", "ReservedArgument", "spec.decode.template: --kv-transfer-config is set by Larder: remove it",
        True, ("ReservedArgument",), problems=("kvcache/demo",),
    ),
    Case(
        "an engine is evicted",
        with_workload(
            with_pod(healthy(), "demo-decode-b", is_ready=False, phase="Failed", failed="Evicted: The node was low on resource: memory."),
            "decode", ready=1,
        ),
        "EnginesReady", "False", "Evicted",
        "pod/demo-decode-b on n2: Evicted: The node was low on resource: memory; its controller makes another one: see that its "
        "node has room",
        False, ("EngineLost", "Evicted"),
    ),
    Case(
        "a node is lost",
        with_workload(
            replace(
                with_pod(healthy(), "demo-cache-n2", is_ready=False, ready_since=None),
                nodes=(NodeView("n1", True, True, True), NodeView("n2", True, True, False)),
            ),
            "cache", ready=1,
        ),
        "CacheReady", "False", "NodeNotReady",
        "node n2 is not ready, and pod/demo-cache-n2 with it: repair or remove the node",
        False, ("CacheDegraded", "NodeNotReady"), problems=("node/n2",),
    ),
    Case(
        "a volume can't be mounted",
        broken_decode(
            {"running_since": None, "waiting_reason": "ContainerCreating"},
            {"supplemental_problem": "FailedMount: hostPath type check failed: /run/larder/serving/demo is not a directory"},
        ),
        "EnginesReady", "False", "MountFailed",
        "pod/demo-decode-b on n2: FailedMount: hostPath type check failed: /run/larder/serving/demo is not a directory; look at its "
        "volumes and at its node",
        False, ("EngineLost", "MountFailed"),
    ),
    Case(
        "an engine that was ready does not answer any more",
        broken_decode({"running_since": EARLIER}),
        "EnginesReady", "False", "NotReady",
        "prefill 1/1, decode 1/2 ready; pod/demo-decode-b on n2 runs since 2026-11-21 11:04 UTC and does not answer /health: see "
        "kubectl logs -n serving demo-decode-b -c vllm",
        False, ("EngineLost", "NotReady"),
    ),
    Case(
        "the router is not ready",
        with_workload(with_pod(healthy(), "demo-router-a", is_ready=False), "router", ready=0),
        "EnginesReady", "False", "Starting",
        "deployment/demo-router: 0/1 routers ready; pod/demo-router-a on n1 waits since 2026-11-21 11:04 UTC",
        False, (),
    ),
    Case(
        "Redis pod is not there yet",
        with_workload(without_pods(healthy(), "redis"), "redis", ready=0, updated=0),
        "RedisReady", "False", "Starting", "statefulset/demo-redis: 0/1 pods ready", False, ("RedisLost",),
    ),
    Case(
        "agents answer nobody",
        with_agents(healthy(), problem="timed out", sessions=(), namespaces=(), flows=()),
        "RedisReady", "Unknown", "AgentsUnreadable",
        "valkey.infra.svc:6380: agents are ready, but the operator can't read what they say: let it reach their port 7501",
        False, ("AgentsUnreadable",), more=EXTERNAL, problems=("pod/demo-cache-n1", "pod/demo-cache-n2"),
    ),
]  # fmt: skip


@pytest.fixture
def was() -> dict:
    """The status of the healthy resource, as it was stored."""
    return status(manifest(), healthy(), {})


def test_healthy_resource_says_so() -> None:
    found = status(manifest(), healthy(), {})
    check_invariants(found)
    assert {name: short(found, name) for name in CONDITIONS} == {
        "Ready": ("True", "Ready"),
        "Accepted": ("True", "Accepted"),
        "RedisReady": ("True", "Ready"),
        "CacheReady": ("True", "Ready"),
        "EnginesReady": ("True", "Ready"),
        "TransferVerified": ("True", "Verified"),
        "Stalled": ("False", "NotStalled"),
    }
    assert {k: v for k, v in found.items() if k != "conditions"} == {
        "observedGeneration": 3,
        "endpoint": "http://demo.serving.svc:8000",
        "connectionConfigMap": "demo-connection",
        "transport": "SharedMemory",
        "transportReason": "the namespace allows hostPath volumes",
        "model": {"layout": "Full", "chunkTokens": 256, "kvBytesPerToken": 70_272},
        "versions": {
            "operator": "0.1.0",
            "agent": "0.1.0",
            "connector": "0.1.0",
            "engine": "0.23.0",
            "protocol": 2,
        },
        "summary": {"redis": "1/1", "cache": "2/2", "prefill": "1/1", "decode": "2/2"},
        "problems": [],
        "transfers": [
            {"prefill": D1, "decode": D1, "verdict": "Verified", "since": "2026-11-21T12:04:05Z"}
        ],
    }
    assert [(e.type, e.reason, e.message) for e in transitions({}, found)] == [
        (
            "Normal",
            "Accepted",
            "generation 3: 1 prefill x TP1, 2 decode x TP1, 8Gi of cache on each of 2 nodes",
        ),
        ("Normal", "RedisReady", "statefulset/demo-redis answers"),
        ("Normal", "CacheReady", "2/2 nodes"),
        (
            "Normal",
            "TransferVerified",
            "decode reads what prefill stores (fingerprint 1a1a1a1a, since 2026-11-21 12:04 UTC)",
        ),
        ("Normal", "EngineConnected", "prefill 1/1 ready"),
        ("Normal", "EngineConnected", "decode 2/2 ready"),
    ]
    assert transitions(found, status(manifest(), healthy(), found)) == []


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_failure_has_its_words_and_its_events(case: Case) -> None:
    wanted = manifest(case.spec, case.more)
    before = status(wanted, healthy(), {})
    assert short(before, "Ready") == ("True", "Ready")
    found = status(wanted, case.observed, before)
    check_invariants(found)
    shown = condition(found, case.condition)
    assert (shown["status"], shown["reason"], shown["message"]) == (
        case.status,
        case.reason,
        case.message,
    )
    events = transitions(before, found)
    assert tuple(event.reason for event in events) == case.events
    for event in events:
        assert event.type == "Warning"
        if event.reason == case.reason:
            assert event.message == case.message
    assert [p["object"] for p in found["problems"]][: len(case.problems)] == list(case.problems)
    # Stalled only after the cause stood for a minute, and not before.
    assert short(found, "Stalled") == (
        ("Unknown", case.reason) if case.is_stalled else ("False", "NotStalled")
    )
    assert recheck_after_s(found, case.observed) == (
        pytest.approx(59.322) if case.is_stalled else None
    )
    soon = status(wanted, replace(case.observed, now=NOW + timedelta(seconds=59)), found)
    assert short(soon, "Stalled")[0] != "True"
    later = status(wanted, replace(case.observed, now=NOW + MINUTE), soon)
    assert short(later, "Stalled") == (
        ("True", case.reason) if case.is_stalled else ("False", "NotStalled")
    )
    assert transitions(found, later) == []
    # And it heals by itself.
    healed = status(
        wanted, healthy(now=NOW + 2 * MINUTE, flow_window=Window(NOW, 30, 25, 25)), later
    )
    assert short(healed, "Ready") == ("True", "Ready")
    assert short(healed, "Stalled") == ("False", "NotStalled")
    assert not any(
        e.type == "Warning" for e in transitions(later, healed) if e.reason != "ChunkTokensChanged"
    )


SEVENTEEN = {
    1: {("Accepted", "SecretNotFound"), ("EnginesReady", "SecretNotFound")},
    2: {("RedisReady", "Unreachable")},
    3: {("RedisReady", reason) for reason in ("AuthFailed", "PermissionDenied", "TlsFailed", "Refused")},
    4: {("RedisReady", "Full")},
    5: {("CacheReady", "NoMatchingNodes")},
    6: {("CacheReady", "PodRejected"), ("EnginesReady", "PodRejected")},
    7: {("EnginesReady", "Unschedulable")},
    8: {("CacheReady", "ImagePullFailed"), ("EnginesReady", "ImagePullFailed")},
    9: {("EnginesReady", "ModelLoading"), ("EnginesReady", "StartupTimeout")},
    10: {("EnginesReady", reason) for reason in ("CrashLooping", "OOMKilled", "InitFailed", "StartFailed")}
    | {("CacheReady", "OOMKilled")},
    11: {("TransferVerified", reason) for reason in ("ConnectorMissing", "ProtocolMismatch", "EngineRefused")},
    12: {("TransferVerified", "LayoutMismatch"), ("TransferVerified", "NothingRead")},
    13: {("TransferVerified", "FallbackStream"), ("TransferVerified", "SharedMemoryUnavailable")},
    14: {("CacheReady", "NoLocalCache")},
    15: {("Accepted", "Forbidden")},
    16: {("Accepted", "NameConflict")},
    17: {("EnginesReady", "RolloutStalled"), ("EnginesReady", "ImagePullFailed")},
}  # fmt: skip
"""The failures that people meet with every operator of this kind: the condition that tells each, and its reason."""


def test_all_seventeen_failures_are_in_the_table() -> None:
    told: dict[int, set[tuple[str, str]]] = {}
    for case in CASES:
        number = case.name.partition(" ")[0]
        if number.isdigit():
            told.setdefault(int(number), set()).add((case.condition, case.reason))
    assert told == SEVENTEEN
    # All are False but one that works, only slower.
    numbered = [case for case in CASES if case.name[0].isdigit()]
    assert {case.name for case in numbered if case.status != "False"} == {
        "13 shared memory not allowed, Auto"
    }
