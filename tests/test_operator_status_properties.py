"""What holds of every status, whatever is observed."""

from dataclasses import replace
from datetime import timedelta

from cacheoperator.names import Component
from cacheoperator.observed import (
    AgentReport,
    ApplyError,
    Container,
    EngineSession,
    Flow,
    NamespaceView,
    NodeView,
    Observed,
    Pod,
    ProbeResult,
    Warning,  # noqa: A004 - Kubernetes' word
    Window,
    Workload,
)
from cacheoperator.status import CONDITIONS, ORDER, recheck_after_s, status, transitions
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_scenes import (
    D1,
    D2,
    ENGINES_SPEC,
    EXTERNAL,
    MINUTE,
    NOW,
    check_invariants,
    condition,
    manifest,
)

SPECS = [
    ENGINES_SPEC,
    ENGINES_SPEC + EXTERNAL,
    ENGINES_SPEC + "paused: true",
    ENGINES_SPEC.replace("cache: {", "cache: {transport: SharedMemory, updateStrategy: OnDelete, "),
    "model: {name: m}\nprefill: {}\ndecode: {}\nverify: Traffic",
    "model: {name: m}\ndecode: {}\nrouter: {type: None}",
    "cache: {nodeSelector: {a: b}}",
]
MANIFESTS = [manifest(spec) for spec in SPECS]

few = st.integers(0, 3)
times = st.sampled_from(
    [NOW - timedelta(days=2), NOW - 40 * MINUTE, NOW - 5 * MINUTE, NOW - timedelta(seconds=30)]
)
maybe_time = st.none() | times
nodes = st.sampled_from(["n1", "n2", "n3"])
components = st.sampled_from([str(component) for component in Component])
messages = st.dictionaries(
    st.sampled_from(["ReplicaFailure", "Progressing", "Available"]), st.just("said"), max_size=2
)
hashes = st.sampled_from(["old", "new", ""])
texts = st.sampled_from(
    [
        "", "x", "y." * 3000, 'secret "hf" not found', 'secret "demo-engine-tls" not found', 'configmap "c" not found',
        "references non-existent secret key: token", "couldn't find key a in Secret b", "exceeded quota: q",
        'violates PodSecurity "restricted"', "is being terminated", "field not declared in schema", "…\n\n ☃ .",
        'cannot patch resource "pods" in API group "" in the namespace "serving"',
    ]
)  # fmt: skip
containers = st.builds(
    Container,
    name=st.sampled_from(["vllm", "agent", "redis", "router", "larder-payload", "sidecar"]),
    image=st.just("image:1"),
    is_init=st.booleans(),
    is_ready=st.booleans(),
    restarts=few,
    waiting_reason=st.sampled_from(
        [
            "",
            "ImagePullBackOff",
            "CrashLoopBackOff",
            "CreateContainerConfigError",
            "RunContainerError",
            "PodInitializing",
        ]
    ),
    waiting_message=texts,
    ended_reason=st.sampled_from(["", "OOMKilled", "Error", "Completed"]),
    ended_exit_code=st.sampled_from([None, 0, 1, 137]),
    ended_message=texts,
    ended_started_at=maybe_time,
    ended_at=maybe_time,
    running_since=maybe_time,
    memory_limit_bytes=st.sampled_from([None, 1, 9 << 30]),
)
names = st.sampled_from(["demo-a", "demo-b", "demo-c", "demo-d", "demo-e"])
pods = st.builds(
    Pod, component=components, name=names, uid=names, node=st.just("") | nodes, ip=st.just(""),
    phase=st.sampled_from(["Pending", "Running", "Failed", "Succeeded"]), is_ready=st.booleans(),
    is_deleting=st.booleans(), created_at=times, template_hash=hashes, unschedulable=texts, ready_since=maybe_time,
    containers=st.lists(containers, max_size=2).map(tuple), gpu_request=few, supplemental_problem=texts, failed=texts,
)  # fmt: skip
workloads = st.builds(
    Workload, component=components, kind=st.just("Deployment"), name=names, generation=few, observed_generation=few,
    wanted=few, ready=few, updated=few, available=few, changed_at=maybe_time, newest_template_hash=hashes,
    condition_messages=messages,
)  # fmt: skip
digests = st.sampled_from(["", D1, D2, "3c" * 32])
sessions = st.builds(
    EngineSession, engine=names, role=st.sampled_from(["prefill", "decode", "both", ""]), half=st.just("scheduler"),
    rank=st.just(0), transport=st.sampled_from(["", "Stream", "SharedMemory"]), namespace=digests,
    larder_version=st.sampled_from(["", "0.1", "0.2"]), vllm_version=st.sampled_from(["", "0.32"]), protocol=few,
)  # fmt: skip
facts = st.dictionaries(
    st.sampled_from(["vllm", "groups", "model", "x"]),
    st.sampled_from(
        [1, "a", None, [], [{"kind": "full"}], [{"kind": "mla"}, {"kind": 3}], {"a": {"b": 1}}]
    ),
)
flows = st.builds(
    Flow, namespace=digests, writer_role=st.sampled_from(["prefill", "decode", "elsewhere", ""]),
    reader_role=st.sampled_from(["prefill", "decode"]), committed=few, looked_up=few, loaded=few,
)  # fmt: skip
agents = st.builds(
    AgentReport, pod=names, node=nodes, problem=st.sampled_from(["", "", "timed out"]), version=st.just("0.1"),
    protocol=few, is_draining=st.booleans(), index_health=st.sampled_from(["", "ready", "unreachable", "refusing"]),
    index_reason=st.sampled_from(["", "", "Unreachable", "AuthFailed", "Full", "Odd", "Ready"]), index_message=texts,
    sessions=st.lists(sessions, max_size=4).map(tuple),
    namespaces=st.lists(
        st.builds(NamespaceView, digest=digests, facts=facts, tokens_per_chunk=few, bytes_per_token=few), max_size=2
    ).map(tuple),
    flows=st.lists(flows, max_size=3).map(tuple),
    refused_hellos=st.lists(st.sampled_from(["engine x: protocol_version 3", "engine y: odd"]), max_size=2).map(tuple),
)  # fmt: skip
numbers = st.sampled_from([0, 1, 19, 20, 50])
observations = st.builds(
    Observed,
    now=st.sampled_from([NOW, NOW + timedelta(hours=20)]),
    generation=st.integers(1, 3),
    operator_version=st.just("0.1.0"),
    is_refused=texts,
    refusals=st.lists(
        st.tuples(st.sampled_from(["InvalidTemplate", "ReservedArgument", "Odd"]), texts.filter(bool)), max_size=2
    ).map(tuple),
    workloads=st.lists(workloads, max_size=6).map(lambda found: {w.component: w for w in found}),
    pods=st.lists(pods, max_size=6, unique_by=lambda p: p.name).map(tuple),
    warnings=st.lists(
        st.builds(
            Warning, object=st.just("pod/demo-a"), component=components,
            reason=st.sampled_from(["FailedCreate", "FailedMount", "FailedToRetrieveImagePullSecret"]), message=texts,
            first_seen=times, last_seen=times,
        ),
        max_size=3,
    ).map(tuple),
    apply_errors=st.lists(
        st.builds(
            ApplyError, object=st.sampled_from(["service/demo", "deployment/demo-decode", "odd"]),
            component=st.just("") | components | st.just("probe"), verb=st.just("patch"),
            code=st.sampled_from([0, 400, 401, 403, 409, 422, 500]),
            reason=st.sampled_from(["", "Forbidden", "NameConflict", "QuotaExceeded"]), message=texts, since=times,
        ),
        max_size=2, unique_by=lambda error: error.object,
    ).map(tuple),
    nodes=st.none()
    | st.lists(
        st.builds(NodeView, nodes, st.booleans(), st.booleans(), st.booleans(), texts),
        max_size=3,
        unique_by=lambda node: node.name,
    ).map(tuple),
    agents=st.lists(agents, max_size=3, unique_by=lambda agent: agent.pod).map(tuple),
    transport=st.sampled_from(["", "SharedMemory", "Stream"]),
    transport_reason=texts,
    flow_window=st.none() | st.builds(Window, times, numbers, numbers, numbers),
    probes=st.lists(
        st.builds(ProbeResult, digests, digests, times, texts),
        max_size=2, unique_by=lambda probe: (probe.prefill, probe.decode),
    ).map(tuple),
)  # fmt: skip
resources = st.sampled_from(MANIFESTS) | st.none()


@settings(max_examples=100, deadline=None)
@given(resources, st.lists(observations, min_size=1, max_size=3))
def test_status_is_whole_valid_deterministic_and_at_rest_after_one_look(resource, looks):
    previous = {}
    for observed in looks:
        found = status(resource, observed, previous)
        check_invariants(found)
        assert status(resource, observed, previous) == found
        assert status(resource, observed, found) == found
        assert transitions(found, found) == []
        events = transitions(previous, found)
        assert len({(event.type, event.reason, event.message) for event in events}) == len(events)
        assert all(0 < len(event.message) <= 1000 for event in events)
        assert all(len(shown["message"]) <= 32_768 for shown in found["conditions"])
        assert all(problem["message"] for problem in found["problems"])
        previous = found


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(MANIFESTS), observations, st.integers(1, 7200))
def test_nothing_ticks(resource, observed, seconds):
    """Time alone changes a message only together with its reason or status: then something happened."""
    before = status(resource, observed, {})
    after = status(
        resource, replace(observed, now=observed.now + timedelta(seconds=seconds)), before
    )
    assert after["summary"] == before["summary"]
    changed = False
    for name in CONDITIONS:
        old, new = condition(before, name), condition(after, name)
        if (old["status"], old["reason"]) == (new["status"], new["reason"]):
            if not (changed and name == "Ready"):
                assert old["message"] == new["message"], name
        else:
            changed = True
        assert (old["lastTransitionTime"] == new["lastTransitionTime"]) == (
            old["status"] == new["status"]
        )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MANIFESTS), observations, observations)
def test_time_of_a_transition_moves_with_the_status_alone(resource, one, other):
    before = status(resource, one, {})
    after = status(resource, replace(other, now=one.now + timedelta(seconds=61)), before)
    for name in CONDITIONS:
        old, new = condition(before, name), condition(after, name)
        assert (old["status"] == new["status"]) == (
            old["lastTransitionTime"] == new["lastTransitionTime"]
        )


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MANIFESTS), observations)
def test_stalled_is_never_at_first_sight_and_comes_when_it_was_announced(resource, observed):
    first = status(resource, observed, {})
    assert condition(first, "Stalled")["status"] != "True"
    wait_s = recheck_after_s(first, observed)
    assert (wait_s is None) == (condition(first, "Stalled")["status"] == "False")
    if wait_s is not None:
        later = status(
            resource, replace(observed, now=observed.now + timedelta(seconds=wait_s)), first
        )
        assert condition(later, "Stalled")["status"] in ("True", "False")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MANIFESTS), observations)
def test_order_of_what_was_seen_does_not_matter(resource, observed):
    turned = replace(
        observed,
        pods=observed.pods[::-1],
        agents=tuple(replace(agent, sessions=agent.sessions[::-1]) for agent in observed.agents),
        apply_errors=observed.apply_errors[::-1],
        nodes=None if observed.nodes is None else observed.nodes[::-1],
        workloads=dict(reversed(observed.workloads.items())),
    )
    assert status(resource, observed, {}) == status(resource, turned, {})


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MANIFESTS), observations)
def test_ready_is_true_only_when_all_are(resource, observed):
    found = status(resource, observed, {})
    is_ready = condition(found, "Ready")["status"] == "True"
    all_true = all(condition(found, name)["status"] == "True" for name in ORDER)
    assert is_ready == (all_true and not resource.paused)
