"""How a KVCache's status goes through its life: creation, rollouts, scaling, pauses, evidence; and what it never says."""

# ruff: noqa: E501 - sentences stand as they are read

from dataclasses import replace
from datetime import timedelta

import pytest
from cacheoperator.conditions.finding import Scene
from cacheoperator.conditions.transfer import MAX_PAIRS, differences, unproven_pairs
from cacheoperator.observed import Observed, ProbeResult, Window
from cacheoperator.status import Event, layout_of, recheck_after_s, status, transitions
from operator_scenes import (
    D1,
    D2,
    EARLIER,
    ENGINES_SPEC,
    MINUTE,
    NOW,
    READ,
    UNREAD,
    agent,
    broken_decode,
    check_invariants,
    condition,
    container,
    healthy,
    manifest,
    old_and_new,
    pod,
    sessions,
    short,
    view,
    with_agents,
    with_pod,
    with_workload,
    without_pods,
)

AUTOSCALED = ENGINES_SPEC.replace("{replicas: 2}", "{}")
BYO = "cache: {nodeSelector: {gpu: a100}}"
AGGREGATED = "model: {name: org/model}\ndecode: {replicas: 2}"


def reasons(events: list[Event]) -> list[str]:
    return [event.reason for event in events]


def seen(observed: Observed, previous: dict | None = None, spec: str = ENGINES_SPEC) -> dict:
    found = status(manifest(spec), observed, previous or {})
    check_invariants(found)
    return found


def no_sessions(observed: Observed) -> Observed:
    return with_agents(observed, sessions=(), namespaces=(), flows=())


# Creation


def test_first_look_has_every_condition_and_no_failure() -> None:
    empty = Observed(now=NOW, generation=1, operator_version="0.1.0")
    found = seen(empty)
    assert short(found, "Ready") == ("Unknown", "Creating")
    assert short(found, "Accepted") == ("True", "Accepted")
    assert short(found, "TransferVerified") == ("Unknown", "AwaitingAgents")
    assert reasons(transitions({}, found)) == ["Accepted"]
    assert found["problems"] == []


def test_external_redis_is_unknown_until_an_agent_asks_it() -> None:
    spec = ENGINES_SPEC + "redis: {external: {address: 'valkey:6380'}}"
    observed = with_pod(
        with_pod(healthy(agents=()), "demo-cache-n1", is_ready=False),
        "demo-cache-n2",
        is_ready=False,
    )
    found = seen(observed, spec=spec)
    assert short(found, "RedisReady") == ("Unknown", "AwaitingAgents")
    assert condition(found, "RedisReady")["message"] == (
        "valkey:6380: no agent has asked it yet (see CacheReady)"
    )
    assert found["summary"]["redis"] == "AwaitingAgents"
    unread = with_agents(healthy(), problem="timed out")
    assert short(seen(unread, spec=spec), "RedisReady") == ("Unknown", "AgentsUnreadable")
    for name in ("demo-cache-n1", "demo-cache-n2"):
        unread = with_pod(unread, name, ready_since=NOW - MINUTE)
    assert short(seen(unread, spec=spec), "RedisReady") == ("Unknown", "AwaitingAgents")
    assert seen(unread, spec=spec)["problems"] == []


def test_agent_that_has_not_asked_redis_yet_says_nothing_of_it() -> None:
    """Seen on a cluster: it starts as unreachable, for no reason."""
    fresh = with_agents(
        healthy(), index_health="unreachable", index_message="Redis at x has not been asked yet"
    )
    assert short(seen(fresh), "RedisReady") == ("True", "Ready")
    spec = ENGINES_SPEC + "redis: {external: {address: 'valkey:6380'}}"
    assert short(seen(fresh, spec=spec), "RedisReady") == ("Unknown", "AwaitingAgents")
    one = replace(fresh, agents=(fresh.agents[0], healthy().agents[1]))
    assert short(seen(one, spec=spec), "RedisReady") == ("True", "Ready")


def test_embedded_redis_speaks_for_itself_before_agents_do() -> None:
    assert short(seen(healthy(agents=())), "RedisReady") == ("True", "Ready")


def test_drain_of_an_agent_is_no_trouble_of_redis() -> None:
    observed = replace(
        healthy(),
        agents=(
            healthy().agents[0],
            replace(
                healthy().agents[1],
                is_draining=True,
                index_health="unreachable",
                index_reason="Unreachable",
            ),
        ),
    )
    assert short(seen(observed), "RedisReady") == ("True", "Ready")


# Never too early


@pytest.mark.parametrize(
    ("component", "name"),
    [
        ("redis", "RedisReady"),
        ("cache", "CacheReady"),
        ("prefill", "EnginesReady"),
        ("decode", "EnginesReady"),
        ("router", "EnginesReady"),
    ],
)
def test_a_version_that_its_controller_has_not_seen_is_not_ready(component: str, name: str) -> None:
    was = seen(healthy())
    found = seen(with_workload(healthy(), component, generation=3), was)
    assert short(found, name) == ("Unknown", "AwaitingController")
    assert short(found, "Ready") == ("Unknown", "AwaitingController")
    # A blink, not a loss: neither on the way there nor back.
    assert transitions(was, found) == []
    assert transitions(found, seen(healthy(), found)) == []


@pytest.mark.parametrize(
    ("component", "name"),
    [("redis", "RedisReady"), ("cache", "CacheReady"), ("decode", "EnginesReady")],
)
def test_old_pods_never_make_up_the_number(component: str, name: str) -> None:
    """dynamo#3567: enough pods are ready, but none of the version that is wanted."""
    observed = with_workload(healthy(), component, updated=0)
    assert short(seen(observed), name)[0] == "False"


def test_status_names_the_generation_that_it_is_about() -> None:
    found = seen(healthy(generation=4), seen(healthy()))
    assert found["observedGeneration"] == 4
    assert {c["observedGeneration"] for c in found["conditions"]} == {4}


# Rollouts


def test_rollout_begins_and_ends_once() -> None:
    was = seen(healthy())
    begun = seen(old_and_new({"created_at": NOW - MINUTE}), was)
    assert short(begun, "EnginesReady") == ("False", "RollingOut")
    assert condition(begun, "EnginesReady")["message"] == (
        "deployment/demo-decode is replacing its pods by those of its newest revision"
    )
    assert reasons(transitions(was, begun)) == ["RolloutStarted", "EngineLost"]
    # All old pods are gone, and the last new one still loads: it is the same rollout.
    only_new = with_pod(
        healthy(),
        "demo-decode-b",
        is_ready=False,
        created_at=NOW - MINUTE,
        containers=(container("decode", is_ready=False, running_since=NOW),),
    )
    on_its_way = seen(with_workload(only_new, "decode", ready=1), begun)
    assert short(on_its_way, "EnginesReady") == ("False", "RollingOut")
    assert transitions(begun, on_its_way) == []
    done = seen(healthy(), on_its_way)
    assert short(done, "EnginesReady") == ("True", "Ready")
    assert reasons(transitions(on_its_way, done)) == ["RolloutFinished", "EngineConnected"]


def test_rollout_of_agents_is_no_degradation() -> None:
    was = seen(healthy())
    rolling = with_workload(
        with_pod(healthy(), "demo-cache-n1", template_hash="old"), "cache", updated=1
    )
    found = seen(rolling, was)
    assert short(found, "CacheReady") == ("False", "RollingOut")
    assert reasons(transitions(was, found)) == ["RolloutStarted"]
    assert reasons(transitions(found, seen(healthy(), found))) == ["RolloutFinished"]


def test_rollout_that_waits_for_a_person_is_ready() -> None:
    rolling = with_workload(
        with_pod(healthy(), "demo-cache-n1", template_hash="old"), "cache", updated=1
    )
    spec = ENGINES_SPEC.replace("cache: {", "cache: {updateStrategy: OnDelete, ")
    found = seen(rolling, spec=spec)
    assert short(found, "CacheReady") == ("True", "Ready")
    assert "delete the pods of the old revision" in condition(found, "CacheReady")["message"]


def test_rollout_of_agents_that_takes_too_long_is_stalled() -> None:
    rolling = with_pod(healthy(), "demo-cache-n1", template_hash="old")
    rolling = with_pod(rolling, "demo-cache-n2", is_ready=False, created_at=NOW - 21 * MINUTE)
    rolling = with_workload(rolling, "cache", updated=1, ready=1)
    found = seen(rolling)
    assert short(found, "CacheReady") == ("False", "RolloutStalled")
    assert condition(found, "CacheReady")["message"] == (
        "daemonset/demo-cache: old revision still serving; 1/2 updated, pod/demo-cache-n2 on n2 not ready since 2026-11-21 11:43 "
        "UTC: see kubectl describe pod -n serving demo-cache-n2"
    )
    assert short(
        seen(with_pod(rolling, "demo-cache-n2", created_at=NOW - 19 * MINUTE)), "CacheReady"
    ) == ("False", "RollingOut")


def test_roll_back_to_an_old_revision_is_not_late() -> None:
    """Kubernetes reuses the old ReplicaSet, whose age says nothing about this rollout."""
    observed = with_workload(
        old_and_new({"created_at": NOW - MINUTE}), "decode", changed_at=NOW - timedelta(days=9)
    )
    assert short(seen(observed), "EnginesReady") == ("False", "RollingOut")


def test_first_start_is_no_rollout() -> None:
    observed = with_workload(
        replace(healthy(), pods=tuple(p for p in healthy().pods if p.component != "decode")),
        "decode",
        ready=0,
        updated=0,
    )
    assert short(seen(observed), "EnginesReady") == ("False", "Starting")


# Scaling


def test_scaled_to_zero_is_no_failure() -> None:
    observed = healthy(agents=(agent("n1"), agent("n2")))
    for component in ("prefill", "decode"):
        observed = with_workload(
            without_pods(observed, component), component, wanted=0, ready=0, updated=0, available=0
        )
    found = seen(observed)
    assert short(found, "EnginesReady") == ("True", "ScaledToZero")
    assert short(found, "TransferVerified") == ("True", "ScaledToZero")
    assert short(found, "Ready") == ("True", "Ready")
    # A router that started meanwhile, on another node, is not ready before the first engine is.
    waiting = with_workload(observed, "router", ready=0, available=0)
    assert short(seen(waiting), "EnginesReady") == ("True", "ScaledToZero")
    half = with_workload(waiting, "decode", wanted=1, ready=1, updated=1, available=1)
    assert short(seen(half), "EnginesReady") == ("False", "Starting")
    # What was verified before stays so.
    was = seen(healthy())
    later = seen(observed, was)
    assert short(later, "TransferVerified") == ("True", "Verified")
    assert transitions(was, later) == []


def test_autoscaler_moves_replicas_without_making_the_resource_unready() -> None:
    was = seen(healthy(), spec=AUTOSCALED)
    young = pod(
        "decode",
        "demo-decode-c",
        "n1",
        is_ready=False,
        created_at=NOW - MINUTE,
        containers=(container("decode", is_ready=False, running_since=NOW),),
    )
    scaled = with_workload(
        replace(healthy(), pods=(*healthy().pods, young)), "decode", wanted=3, updated=3
    )
    found = seen(scaled, was, spec=AUTOSCALED)
    assert short(found, "EnginesReady") == ("True", "Scaling")
    assert short(found, "Ready") == ("True", "Ready")
    assert condition(found, "EnginesReady")["message"] == (
        "prefill 1/1, decode 2/3 ready: an autoscaler asked for more, and they are loading"
    )
    assert transitions(was, found) == []
    # Where a person wrote the number, it is wanted.
    assert short(seen(scaled), "EnginesReady") == ("False", "ModelLoading")
    # A step down loses none.
    down = with_workload(
        replace(healthy(), pods=tuple(p for p in healthy().pods if p.name != "demo-decode-b")),
        "decode", wanted=1, ready=1, updated=1,
    )  # fmt: skip
    assert transitions(found, seen(down, found, spec=AUTOSCALED)) == []


def test_autoscaled_role_without_any_engine_is_not_ready() -> None:
    observed = broken_decode({"running_since": NOW - MINUTE}, {"created_at": NOW - MINUTE})
    observed = with_workload(observed, "decode", ready=0)
    assert short(seen(observed, spec=AUTOSCALED), "EnginesReady") == ("False", "ModelLoading")


def test_autoscaled_engine_that_restarts_is_not_loading() -> None:
    observed = broken_decode({"running_since": NOW, "restarts": 1}, {"created_at": NOW - MINUTE})
    assert short(seen(observed, spec=AUTOSCALED), "EnginesReady") == ("False", "ModelLoading")


# Stalled


def test_cause_that_heals_within_a_minute_stalls_nothing() -> None:
    pulling = broken_decode({"running_since": None, "waiting_reason": "ErrImagePull"})
    first = seen(pulling, seen(healthy()))
    assert short(first, "Stalled") == ("Unknown", "ImagePullFailed")
    healed = seen(replace(healthy(), now=NOW + 30 * timedelta(seconds=1)), first)
    assert short(healed, "Stalled") == ("False", "NotStalled")
    again = seen(replace(pulling, now=NOW + 70 * timedelta(seconds=1)), healed)
    assert short(again, "Stalled") == ("Unknown", "ImagePullFailed")
    assert recheck_after_s(
        again, replace(pulling, now=NOW + 80 * timedelta(seconds=1))
    ) == pytest.approx(49.322)


def test_stalled_keeps_its_time_while_the_cause_stands() -> None:
    pulling = broken_decode({"running_since": None, "waiting_reason": "ErrImagePull"})
    first = seen(pulling)
    stalled = seen(replace(pulling, now=NOW + 2 * MINUTE), first)
    later = seen(replace(pulling, now=NOW + 9 * MINUTE), stalled)
    assert later == stalled


# Paused, refused


def test_pause_and_resume() -> None:
    was = seen(healthy())
    paused = seen(healthy(), was, spec=ENGINES_SPEC + "paused: true")
    assert short(paused, "Ready") == ("Unknown", "Paused")
    assert short(paused, "EnginesReady") == ("True", "Ready")
    assert reasons(transitions(was, paused)) == ["Paused"]
    resumed = seen(healthy(), paused)
    assert reasons(transitions(paused, resumed)) == ["Resumed"]
    broken = broken_decode({"running_since": None, "waiting_reason": "ErrImagePull"})
    assert (
        short(
            seen(replace(broken, now=NOW + 9 * MINUTE), paused, spec=ENGINES_SPEC + "paused: true"),
            "Stalled",
        )[0]
        == "False"
    )


def test_resource_that_cannot_be_read_keeps_what_is_known() -> None:
    was = seen(healthy())
    refused = healthy(
        generation=4, is_refused="spec.cache.cpu: write a whole number with Mi, Gi or Ti"
    )
    found = status(None, refused, was)
    check_invariants(found)
    assert short(found, "Accepted") == ("False", "InvalidSpec")
    assert condition(found, "Ready")["message"] == (
        "spec.cache.cpu: write a whole number with Mi, Gi or Ti: correct the resource"
    )
    assert short(found, "EnginesReady") == ("Unknown", "NotAccepted")
    assert [(e.type, e.reason) for e in transitions(was, found)] == [("Warning", "InvalidSpec")]
    for kept in ("endpoint", "transfers", "model", "connectionConfigMap", "summary"):
        assert found[kept] == was[kept]
    assert short(status(None, replace(refused, now=NOW + MINUTE), found), "Stalled") == (
        "True",
        "InvalidSpec",
    )


def test_new_generation_is_accepted_with_an_event() -> None:
    was = seen(healthy())
    events = transitions(was, seen(healthy(generation=4), was))
    assert [(e.type, e.reason, e.message) for e in events] == [
        (
            "Normal",
            "Accepted",
            "generation 4: 1 prefill x TP1, 2 decode x TP1, 8Gi of cache on each of 2 nodes",
        )
    ]
    wide = ENGINES_SPEC.replace("{replicas: 1}", "{tensorParallelSize: 8}").replace(
        "cache: {", "cache: {cpu: 512Gi, "
    )
    assert transitions({}, seen(healthy(), spec=wide))[0].message == (
        "generation 3: prefill (autoscaled) x TP8, 2 decode x TP1, 512Gi of cache on each of 2 nodes"
    )


# Other shapes of a resource


def test_cache_for_engines_of_others() -> None:
    observed = replace(
        without_pods(without_pods(without_pods(healthy(), "prefill"), "decode"), "router"),
        workloads={k: w for k, w in healthy().workloads.items() if k in ("redis", "cache")},
        agents=(agent("n1"), agent("n2")),
    )
    found = seen(observed, spec=BYO)
    assert short(found, "Ready") == ("True", "Ready")
    assert condition(found, "Ready")["message"] == "the cache is ready for engines"
    assert short(found, "EnginesReady") == ("True", "NotApplicable")
    assert short(found, "TransferVerified") == ("True", "NotApplicable")
    assert "endpoint" not in found
    assert found["summary"] == {"redis": "1/1", "cache": "2/2"}
    assert reasons(transitions({}, found)) == ["Accepted", "RedisReady", "CacheReady"]
    # Their engines are seen, and told when they can't meet.
    theirs = (*sessions("theirs-p", "prefill"), *sessions("theirs-d", "decode", D2))
    connected = seen(
        replace(observed, agents=(agent("n1", sessions("theirs-p", "prefill")), agent("n2"))),
        spec=BYO,
    )
    assert (
        condition(connected, "EnginesReady")["message"]
        == "this resource runs no engines; engines of others are connected"
    )
    apart = seen(replace(observed, agents=(agent("n1", theirs), agent("n2"))), spec=BYO)
    assert short(apart, "TransferVerified") == ("False", "LayoutMismatch")


def test_aggregated_engines_hand_nothing_over() -> None:
    observed = replace(
        without_pods(healthy(), "prefill"),
        workloads={k: w for k, w in healthy().workloads.items() if k != "prefill"},
        agents=(
            agent("n1", sessions("demo-decode-a", "decode")),
            agent("n2", sessions("demo-decode-b", "decode")),
        ),
    )
    found = seen(observed, spec=AGGREGATED)
    assert short(found, "TransferVerified") == ("True", "NotApplicable")
    assert short(found, "Ready") == ("True", "Ready")
    assert "prefill" not in found["summary"]


def test_without_a_router_none_is_waited_for() -> None:
    observed = with_workload(
        with_pod(healthy(), "demo-router-a", is_ready=False), "router", ready=0
    )
    assert short(seen(observed, spec=ENGINES_SPEC + "router: {type: None}"), "EnginesReady") == (
        "True",
        "Ready",
    )


# Evidence


def test_evidence_stays_until_there_is_contrary_evidence() -> None:
    was = seen(healthy())
    silent = replace(healthy(now=NOW + timedelta(days=3)), agents=(agent("n1"), agent("n2")))
    silent = replace(silent, pods=tuple(replace(p, ready_since=silent.now) for p in silent.pods))
    found = seen(silent, was)
    assert found["transfers"] == was["transfers"]
    assert short(found, "TransferVerified") == ("True", "Verified")
    # Agents that restarted count from 0: no evidence against.
    restarted = with_agents(healthy(flow_window=Window(NOW, 0, 0, 0)), flows=())
    assert short(seen(restarted, was), "TransferVerified") == ("True", "Verified")


@pytest.mark.parametrize(
    ("window", "is_against"),
    [
        (Window(NOW, 20, 20, 0), True),
        (Window(NOW, 19, 20, 0), False),
        (Window(NOW, 20, 19, 0), False),
        (Window(NOW, 500, 500, 1), False),
        (None, False),
    ],
)
def test_nothing_read_needs_twenty_chunks_stored_and_found(
    window: Window | None, is_against: bool
) -> None:
    was = seen(healthy())
    observed = healthy(flow_window=window)
    observed = replace(
        observed, agents=(replace(observed.agents[0], flows=(UNREAD,)), observed.agents[1])
    )
    found = seen(observed, was)
    assert short(found, "TransferVerified") == (
        ("False", "NothingRead") if is_against else ("True", "Verified")
    )


def test_nothing_read_ends_when_decode_reads_and_not_before() -> None:
    against = healthy(flow_window=Window(NOW, 50, 50, 0))
    was = seen(against, seen(healthy()))
    assert short(was, "TransferVerified") == ("False", "NothingRead")
    # The agents' totals still hold what was read long ago; the window is empty, or the operator restarted.
    for window in (Window(NOW, 0, 0, 0), None):
        quiet = seen(healthy(now=NOW + 30 * MINUTE, flow_window=window), was)
        assert short(quiet, "TransferVerified") == ("False", "NothingRead")
        assert quiet["transfers"] == was["transfers"]
    reads = seen(healthy(now=NOW + 30 * MINUTE, flow_window=Window(NOW, 3, 3, 3)), was)
    assert short(reads, "TransferVerified") == ("True", "Verified")
    assert reasons(transitions(was, reads)) == ["TransferVerified"]


def test_chunks_found_at_another_node_count_as_found() -> None:
    elsewhere = replace(UNREAD, writer_role="elsewhere", committed=0)
    observed = healthy(flow_window=Window(NOW, 30, 30, 0))
    observed = replace(
        observed,
        agents=(
            replace(observed.agents[0], flows=(replace(UNREAD, looked_up=0),)),
            replace(observed.agents[1], flows=(elsewhere,)),
        ),
    )
    assert short(seen(observed), "TransferVerified") == ("False", "NothingRead")


def test_what_decode_stored_itself_is_no_evidence() -> None:
    own = replace(READ, writer_role="decode")
    observed = replace(
        healthy(), agents=(replace(healthy().agents[0], flows=(own,)), healthy().agents[1])
    )
    assert short(seen(observed), "TransferVerified") == ("Unknown", "AwaitingTraffic")
    other = replace(READ, reader_role="prefill")
    observed = replace(
        healthy(), agents=(replace(healthy().agents[0], flows=(other,)), healthy().agents[1])
    )
    assert short(seen(observed), "TransferVerified") == ("Unknown", "AwaitingTraffic")


def unproven(**changes) -> Observed:
    return with_agents(healthy(**changes), flows=())


def test_before_any_evidence_traffic_is_awaited() -> None:
    found = seen(unproven())
    assert short(found, "TransferVerified") == ("Unknown", "AwaitingTraffic")
    assert condition(found, "TransferVerified")["message"] == (
        "decode has read nothing of prefill yet (fingerprint 1a1a1a1a): the operator sends one small request when both roles "
        "are ready"
    )
    assert short(found, "Ready") == ("Unknown", "AwaitingTraffic")
    assert unproven_pairs(Scene(manifest(), unproven(), {})) == ((D1, D1),)
    assert unproven_pairs(Scene(manifest(), healthy(), {})) == ()
    by_traffic = seen(unproven(), spec=ENGINES_SPEC + "verify: Traffic")
    assert condition(by_traffic, "TransferVerified")["message"].endswith(
        "send requests through the endpoint (spec.verify is Traffic)"
    )
    nobody = seen(no_sessions(unproven()))
    assert short(nobody, "TransferVerified") == ("False", "ConnectorMissing")
    starting = with_pod(no_sessions(unproven()), "demo-prefill-a", ready_since=NOW)
    starting = with_pod(
        with_pod(starting, "demo-decode-a", ready_since=NOW), "demo-decode-b", ready_since=NOW
    )
    found = seen(starting)
    assert short(found, "TransferVerified") == ("Unknown", "AwaitingEngines")
    assert condition(found, "TransferVerified")["message"] == (
        "no prefill and decode engine has opened its namespace at an agent yet"
    )


def test_probe_that_fails_says_why_and_is_no_evidence() -> None:
    failed = ProbeResult(D1, D1, NOW, "decode pod/demo-decode-a answered 401: it wants an API key")
    found = seen(unproven(probes=(failed,)))
    assert short(found, "TransferVerified") == ("Unknown", "ProbeFailed")
    assert condition(found, "TransferVerified")["message"] == (
        "the probe from prefill to decode failed: decode pod/demo-decode-a answered 401: it wants an API key; it is repeated, "
        "and requests through the endpoint are evidence too"
    )
    assert found["transfers"] == []
    assert reasons(transitions(seen(unproven()), found)) == ["ProbeFailed"]
    of_others = replace(failed, decode=D2)
    assert short(seen(unproven(probes=(of_others,))), "TransferVerified") == (
        "Unknown",
        "AwaitingTraffic",
    )
    assert short(seen(healthy(probes=(failed,))), "TransferVerified") == ("True", "Verified")


def test_probe_that_was_answered_and_read_nothing_is_told_after_a_minute() -> None:
    answered = ProbeResult(D1, D1, NOW - MINUTE, "")
    assert short(seen(unproven(probes=(answered,))), "TransferVerified") == (
        "Unknown",
        "AwaitingTraffic",
    )
    later = unproven(probes=(answered,), now=NOW + timedelta(seconds=1))
    assert short(seen(later), "TransferVerified") == ("Unknown", "ProbeReadNothing")


def rolled_to_d2(is_done: bool) -> Observed:
    """decode-b has the new fingerprint already; prefill too, and still an old one beside it unless done."""
    new = (*sessions("demo-prefill-a", "prefill", D2), *sessions("demo-decode-b", "decode", D2))
    old = (
        ()
        if is_done
        else (*sessions("demo-prefill-old", "prefill"), *sessions("demo-decode-a", "decode"))
    )
    last = sessions("demo-decode-a", "decode", D2) if is_done else ()
    observed = healthy(
        agents=(agent("n1", (*new, *old, *last), namespaces=(view(), view(D2))), agent("n2"))
    )
    if is_done:
        return observed
    observed = replace(
        observed, pods=(*observed.pods, pod("prefill", "demo-prefill-old", template_hash="old"))
    )
    return with_workload(
        with_pod(observed, "demo-decode-a", template_hash="old"), "decode", updated=1
    )


def test_evidence_of_the_old_pair_holds_while_the_new_one_is_verified() -> None:
    was = seen(healthy())
    rolling = seen(rolled_to_d2(is_done=False), was)
    assert short(rolling, "TransferVerified") == ("True", "Verified")
    assert condition(rolling, "TransferVerified")["message"] == (
        "decode reads what prefill stores (fingerprint 1a1a1a1a, since 2026-11-21 12:04 UTC); 2b2b2b2b, which is on its way, is "
        "not verified yet"
    )
    assert unproven_pairs(Scene(manifest(), rolled_to_d2(is_done=False), was)) == ((D2, D2),)
    # At the end of the rollout the old evidence is not enough any more.
    done = seen(rolled_to_d2(is_done=True), rolling)
    assert short(done, "TransferVerified") == ("Unknown", "AwaitingTraffic")
    moved = replace(rolled_to_d2(is_done=True), now=NOW + MINUTE)
    moved = replace(
        moved,
        agents=(replace(moved.agents[0], flows=(replace(READ, namespace=D2),)), moved.agents[1]),
    )
    verified = seen(moved, done)
    assert short(verified, "TransferVerified") == ("True", "Verified")
    assert [t["since"] for t in verified["transfers"]] == [
        "2026-11-21T12:04:05Z",
        "2026-11-21T12:05:05Z",
    ]
    assert unproven_pairs(Scene(manifest(), moved, done)) == ()


def test_at_rest_every_pair_in_use_must_be_verified() -> None:
    engines = (*sessions("demo-prefill-a", "prefill"), *sessions("demo-prefill-b", "prefill", D2))
    decodes = (*sessions("demo-decode-a", "decode"), *sessions("demo-decode-b", "decode", D2))
    observed = healthy(agents=(agent("n1", (*engines, *decodes), flows=(READ,)), agent("n2")))
    observed = replace(observed, pods=(*observed.pods, pod("prefill", "demo-prefill-b")))
    found = seen(with_workload(observed, "prefill", wanted=2, ready=2, updated=2))
    assert short(found, "TransferVerified") == ("Unknown", "AwaitingTraffic")
    assert "(fingerprint 2b2b2b2b)" in condition(found, "TransferVerified")["message"]


def test_fingerprints_that_differ_in_a_rollout_are_no_mismatch() -> None:
    observed = healthy(
        agents=(
            agent(
                "n1",
                (*sessions("demo-prefill-a", "prefill", D2), *sessions("demo-decode-a", "decode")),
            ),
            agent("n2", sessions("demo-decode-b", "decode")),
        )
    )
    assert short(seen(observed), "TransferVerified") == ("False", "LayoutMismatch")
    rolling = with_workload(
        with_pod(observed, "demo-decode-a", template_hash="old"), "decode", updated=1
    )
    assert short(seen(rolling), "TransferVerified") == ("Unknown", "AwaitingEngines")
    assert short(seen(rolling, seen(healthy())), "TransferVerified")[0] != "False"


def test_one_engine_apart_from_the_others_is_a_mismatch() -> None:
    observed = healthy(
        agents=(
            replace(healthy().agents[0]),
            agent(
                "n2",
                sessions("demo-decode-b", "decode", D2),
                namespaces=(view(), view(D2, generation="2")),
            ),
        )
    )
    found = seen(observed)
    assert short(found, "TransferVerified") == ("False", "LayoutMismatch")
    assert condition(found, "TransferVerified")["message"].endswith(
        "generation: prefill none, decode 2: restart the engine whose cache was reset"
    )


def test_sessions_of_pods_that_go_away_do_not_count() -> None:
    observed = healthy(
        agents=(replace(healthy().agents[0]), agent("n2", sessions("demo-decode-b", "decode", D2)))
    )
    observed = with_pod(observed, "demo-decode-b", is_deleting=True)
    assert short(seen(observed), "TransferVerified") == ("True", "Verified")


def test_evidence_older_than_a_new_revision_waits_for_its_engines() -> None:
    """A new model starts: what the old one proved says nothing until the engines say what they are."""
    was = seen(healthy())
    fresh = healthy(now=NOW + 10 * MINUTE, agents=(agent("n1"), agent("n2")))
    fresh = with_workload(fresh, "decode", changed_at=NOW + 9 * MINUTE)
    fresh = replace(fresh, pods=tuple(replace(p, ready_since=fresh.now) for p in fresh.pods))
    assert short(seen(fresh, was), "TransferVerified") == ("Unknown", "AwaitingEngines")


def test_remembered_pairs_are_bounded_and_those_in_use_are_kept() -> None:
    many = [
        {
            "prefill": f"{n:064x}",
            "decode": f"{n:064x}",
            "verdict": "Verified",
            "since": f"2026-11-20T12:{n:02d}:00Z",
        }
        for n in range(20)
    ]
    found = seen(healthy(), {"transfers": many})
    assert len(found["transfers"]) == MAX_PAIRS
    assert D1 in [t["decode"] for t in found["transfers"]]
    assert f"{19:064x}" in [t["decode"] for t in found["transfers"]]
    # Also the one in use that was proved longest ago, by agents that forgot.
    old = {"prefill": D1, "decode": D1, "verdict": "Verified", "since": "2026-11-01T12:00:00Z"}
    found = seen(with_agents(healthy(), flows=()), {"transfers": [*many, old]})
    assert found["transfers"][0] == old
    broken = [
        {"prefill": 1},
        {},
        {**many[0], "since": "yesterday"},
        {**many[0], "verdict": "Perhaps"},
    ]
    assert len(seen(healthy(), {"transfers": broken})["transfers"]) == 1


def test_connector_gets_a_minute_and_an_agent_that_answers() -> None:
    def reason(observed: Observed) -> str:
        return short(seen(observed), "TransferVerified")[1]

    silent = replace(healthy(), agents=(healthy().agents[0], agent("n2")))
    assert reason(silent) == "ConnectorMissing"
    assert reason(with_pod(silent, "demo-decode-b", ready_since=NOW - MINUTE)) == "Verified"
    assert reason(with_pod(silent, "demo-cache-n2", ready_since=NOW - MINUTE)) == "Verified"
    unread = replace(silent, agents=(silent.agents[0], agent("n2", problem="timed out")))
    assert reason(unread) == "Verified"
    assert reason(with_pod(silent, "demo-decode-b", is_deleting=True)) == "Verified"
    assert reason(with_pod(silent, "demo-decode-b", is_ready=False)) == "Verified"


# Details


def test_transport_is_the_slowest_in_use() -> None:
    observed = replace(
        healthy(),
        agents=(
            healthy().agents[0],
            agent("n2", sessions("demo-decode-b", "decode", transport="Stream")),
        ),
    )
    found = seen(observed)
    assert found["transport"] == "Stream"
    assert found["transportReason"] == (
        "shared memory is set up, but demo-decode-b could not use it: see the log of container vllm"
    )
    assert short(found, "TransferVerified") == ("True", "FallbackStream")
    quiet = healthy(transport_reason="")
    assert seen(quiet)["transportReason"] == "namespace serving lets pods mount the socket folder"
    wanted = seen(
        with_agents(healthy(transport="Stream", transport_reason="spec.cache.transport is Stream")),
        spec=ENGINES_SPEC.replace("cache: {", "cache: {transport: Stream, "),
    )
    assert wanted["transport"] == "Stream"
    assert short(wanted, "TransferVerified") == ("True", "Verified")


def test_change_of_chunk_size_warns_that_stored_chunks_are_unreachable() -> None:
    was = seen(healthy())
    engines = (
        *sessions("demo-prefill-a", "prefill", D2),
        *sessions("demo-decode-a", "decode", D2),
        *sessions("demo-decode-b", "decode", D2),
    )
    found = seen(
        healthy(agents=(agent("n1", engines, namespaces=(view(), view(D2, 512))), agent("n2"))), was
    )
    assert found["model"]["chunkTokens"] == 512
    event = transitions(was, found)[-1]
    assert (event.type, event.reason, event.message) == (
        "Warning",
        "ChunkTokensChanged",
        "chunkTokens changed from 256 to 512: chunks stored with 256 tokens are unreachable now, and leave as room is needed",
    )
    # While engines rest, the model of those that ran last is shown.
    assert seen(no_sessions(healthy()), found)["model"] == found["model"]


def test_layout_is_named_by_its_groups() -> None:
    assert layout_of({"groups": [{"kind": "mla"}]}) == "MLA"
    groups = [{"kind": "full"}, {"kind": "sliding_window"}, {"kind": "full"}, {"kind": "new"}]
    assert layout_of({"groups": groups}) == "Full+SlidingWindow+new"
    assert layout_of({}) == layout_of({"groups": []}) == "Unknown"


def test_differences_name_the_field_and_both_values() -> None:
    one = {"a": 1, "b": {"c": [1, 2], "d": None}, "g": [{"k": "x"}, {"k": "y"}], "same": 0}
    other = {"a": 1, "b": {"c": [1, 3]}, "g": [{"k": "x"}], "same": 0}
    assert differences(one, other) == [
        ("b.c", "[1, 2]", "[1, 3]"),
        ("b.d", "None", "none"),
        ("g[1].k", "y", "none"),
    ]
    assert differences({"a": "x" * 500}, {}) == [("a", "x" * 79 + "…", "none")]
    # Bytes are whole numbers for whoever reads them, though JSON has them with a point.
    assert differences({"a": 4096.0}, {"a": 2048.5}) == [("a", "4096", "2048.5")]
    assert differences({"a": "x" * 500}, {"a": "x" * 501}) != []


def test_kill_for_memory_stays_a_problem_for_a_while_after_the_pod_is_ready_again() -> None:
    killed = container(
        "cache",
        restarts=1,
        ended_reason="OOMKilled",
        ended_exit_code=137,
        ended_at=NOW - 9 * MINUTE,
    )
    observed = with_pod(healthy(), "demo-cache-n1", containers=(killed,))
    found = seen(observed)
    assert short(found, "CacheReady") == ("True", "Ready")
    assert [(p["object"], p["reason"]) for p in found["problems"]] == [
        ("pod/demo-cache-n1", "OOMKilled")
    ]
    assert seen(replace(observed, now=NOW + 2 * MINUTE))["problems"] == []


def ended(**changes) -> Observed:
    """decode-b runs again after it ended with 137."""
    told = {
        "running_since": NOW - MINUTE, "restarts": 1, "ended_reason": "Error", "ended_exit_code": 137,
        "ended_started_at": NOW - 3 * MINUTE, "ended_at": NOW - 2 * MINUTE,
    }  # fmt: skip
    return broken_decode({**told, **changes})


def test_kill_is_a_startup_timeout_only_when_the_run_was_that_long() -> None:
    def reason(**changes) -> str:
        return short(seen(ended(**changes)), "EnginesReady")[1]

    long_ago = NOW - 2 * MINUTE - timedelta(seconds=1810)
    assert reason() == "ModelLoading"  # once is no loop
    assert reason(ended_started_at=long_ago) == "StartupTimeout"
    assert reason(ended_started_at=long_ago, ended_exit_code=1) == "ModelLoading"
    assert reason(ended_started_at=long_ago - 5 * MINUTE) == "ModelLoading"
    assert reason(ended_started_at=None) == "ModelLoading"


def test_crash_loop_is_one_also_while_the_container_runs() -> None:
    assert short(seen(ended(restarts=2)), "EnginesReady") == ("False", "CrashLooping")
    backing_off = ended(running_since=None, waiting_reason="CrashLoopBackOff")
    assert short(seen(backing_off), "EnginesReady") == ("False", "CrashLooping")


def test_pods_that_are_being_deleted_have_no_trouble() -> None:
    going = with_pod(ended(restarts=2), "demo-decode-b", is_deleting=True)
    found = seen(with_workload(going, "decode", ready=1))
    assert short(found, "EnginesReady") == ("False", "Starting")
    assert found["problems"] == []


def test_leftover_of_an_eviction_is_no_trouble_when_all_is_complete() -> None:
    left = pod("decode", "demo-decode-z", is_ready=False, phase="Failed", failed="Evicted: memory")
    assert short(seen(replace(healthy(), pods=(*healthy().pods, left))), "Ready")[0] == "True"


def test_problems_are_the_worst_eight() -> None:
    pods = [
        pod(
            "decode",
            f"demo-decode-{n}",
            "",
            is_ready=False,
            phase="Pending",
            unschedulable="0/6 nodes",
            containers=(),
        )
        for n in range(12)
    ]
    missing = container(
        "prefill",
        is_ready=False,
        running_since=None,
        waiting_reason="CreateContainerConfigError",
        waiting_message='secret "hf" not found',
    )
    observed = with_pod(
        replace(healthy(), pods=(*healthy().pods, *pods)),
        "demo-prefill-a",
        is_ready=False,
        containers=(missing,),
    )
    found = seen(with_workload(with_workload(observed, "decode", wanted=14), "prefill", ready=0))
    assert len(found["problems"]) == 8
    assert found["problems"][0]["object"] == "secret/hf"
    assert len({(p["object"], p["reason"]) for p in found["problems"]}) == 8


def test_what_waiting_cannot_heal_comes_first_among_problems() -> None:
    full = with_pod(
        healthy(),
        "demo-cache-n2",
        is_ready=False,
        node="",
        unschedulable="0/2 nodes: 2 Insufficient memory",
    )
    pulling = container("decode", is_ready=False, running_since=None, waiting_reason="ErrImagePull")
    both = with_pod(
        with_workload(full, "cache", ready=1),
        "demo-decode-b",
        is_ready=False,
        containers=(pulling,),
    )
    found = seen(with_workload(both, "decode", ready=1))
    assert short(found, "Ready") == ("False", "Unschedulable")
    assert [p["reason"] for p in found["problems"]] == ["ImagePullFailed", "Unschedulable"]
    assert short(found, "Stalled") == ("Unknown", "ImagePullFailed")


def test_message_does_not_change_with_the_name_of_a_refused_pod() -> None:
    said = 'pods "demo-decode-66f-{}" is forbidden: exceeded quota: team'
    found = [
        condition(
            seen(
                with_workload(
                    healthy(),
                    "decode",
                    condition_messages={"ReplicaFailure": said.format(name)},
                    ready=1,
                )
            ),
            "EnginesReady",
        )["message"]
        for name in ("aaaa", "bbbb")
    ]
    assert found[0] == found[1]


def test_events_of_an_hour_ago_are_not_told_of_pods_that_came_since() -> None:
    from cacheoperator.observed import Warning as WarningEvent

    event = WarningEvent(
        "daemonset/demo-cache", "cache", "FailedCreate", "pods are forbidden: no", EARLIER, NOW
    )
    assert short(seen(healthy(warnings=(event,))), "CacheReady") == ("True", "Ready")


def test_event_messages_fit_into_an_event() -> None:
    was = seen(healthy())
    found = seen(healthy(refusals=(("InvalidTemplate", "x" * 5000),)), was)
    assert max(len(event.message) for event in transitions(was, found)) == 1000
