"""From an empty cluster to an answer: one helm install, one kubectl apply, real engines, everything that is promised.

All tests here share one prefill and one decode engine, which take a minute to start; their order is that of a user's
first hour. What kills things is in test_faults_engines.py.
"""

from __future__ import annotations

import json
import time

import pytest
from live_cluster import (
    AUDIT_LOG,
    Document,
    Namespace,
    in_node,
    is_ready,
    kubectl,
    reference,
    until,
)
from traffic import Answer, Oracle, assert_unharmed, client_pod, send, until_pod_ready

pytestmark = pytest.mark.timeout(900)

NAME = "demo"
NUM_QUESTIONS = 4


@pytest.fixture(scope="module")
def first_answers(journey: Namespace, endpoint: str, oracle: Oracle) -> list[Answer]:
    """Of the very first requests that the endpoint sees from a client."""
    return send(journey, endpoint, oracle.take(NUM_QUESTIONS))


def test_first_requests_are_answered_token_by_token_as_without_a_cache(first_answers):
    assert len(first_answers) == NUM_QUESTIONS
    assert all(answer.expected for answer in first_answers)
    assert_unharmed(first_answers)


def test_decode_reads_what_prefill_stored_for_the_first_request(first_answers):
    for answer in first_answers:
        prompt_tokens = answer.body["usage"]["prompt_tokens"]
        # All but the last chunk, which may be partial, and the last token, which is always computed.
        assert answer.cached_tokens > prompt_tokens // 2, answer.body["usage"]


def test_every_condition_is_met_and_evidence_is_written_down(journey):
    conditions = journey.conditions(NAME)
    for one in (
        "Accepted",
        "RedisReady",
        "CacheReady",
        "EnginesReady",
        "TransferVerified",
        "Ready",
    ):
        assert conditions[one]["status"] == "True", conditions[one]
    assert conditions["Stalled"]["status"] == "False"
    status = journey.get("kvcache", NAME)["status"]
    assert status["observedGeneration"] == journey.get("kvcache", NAME)["metadata"]["generation"]
    assert [pair["verdict"] for pair in status["transfers"]] == ["Verified"]
    assert status["summary"]["prefill"] == "1/1"
    assert status["summary"]["decode"] == "1/1"
    assert not status.get("problems")


def test_memory_is_shared_between_users_without_privileges(journey, first_answers):
    users = set()
    for component in ("cache", "prefill", "decode"):
        for pod in journey.pods(NAME, component):
            spec = pod["spec"]
            for forbidden in ("hostIPC", "hostNetwork", "hostPID"):
                assert not spec.get(forbidden), (component, forbidden)
            for container in spec["containers"]:
                merged = {**spec.get("securityContext", {}), **container["securityContext"]}
                assert not merged.get("privileged")
                assert merged["allowPrivilegeEscalation"] is False
                assert merged["capabilities"]["drop"] == ["ALL"]
                assert not merged["capabilities"].get("add")
                assert merged["readOnlyRootFilesystem"] is True
                assert merged["runAsNonRoot"] is True
                users.add((component == "cache", merged["runAsUser"]))
    agents = {user for is_agent, user in users if is_agent}
    engines = {user for is_agent, user in users if not is_agent}
    assert agents
    assert engines
    assert not agents & engines
    assert journey.get("kvcache", NAME)["status"]["transport"] == "SharedMemory"
    sessions = [one for one in engine_sessions(journey) if one["role"] != "peer"]
    assert {session["role"] for session in sessions} == {"prefill", "decode"}
    moving = {session["transport"] for session in sessions if session["transport"]}
    assert moving == {"SharedMemory"}


def test_processes_run_as_the_users_that_the_pods_name(journey):
    (agent, *_) = journey.pods(NAME, "cache")
    (decode,) = journey.pods(NAME, "decode")
    uids = [
        journey.kubectl("exec", pod["metadata"]["name"], "-c", container, "--", "id", "-u").strip()
        for pod, container in ((agent, "agent"), (decode, "vllm"))
    ]
    assert len(set(uids)) == 2
    assert "0" not in uids


@pytest.mark.bundled
def test_a_stranger_on_the_node_cannot_reach_the_sockets(journey):
    """A pod that may mount the very folder, without the group: it cannot even look for a socket."""
    (agent, *_) = journey.pods(NAME, "cache")
    node = agent["spec"]["nodeName"]
    folder = f"/run/larder/{journey.name}/{NAME}"
    assert in_node(node, "stat", "-c", "%a %u %g", folder).strip() == "770 0 7070"
    sockets = in_node(node, "find", folder, "-type", "s", "-printf", "%P %m %g\n").splitlines()
    assert len(sockets) >= 2
    assert {line.partition(" ")[2] for line in sockets} == {"660 7070"}
    stranger = client_pod(reference("larder"))
    stranger["metadata"]["name"] = "stranger"
    stranger["spec"]["nodeName"] = node
    stranger["spec"]["volumes"].append({"name": "sockets", "hostPath": {"path": folder}})
    mount = {"name": "sockets", "mountPath": "/run/larder"}
    stranger["spec"]["containers"][0]["volumeMounts"].append(mount)
    journey.apply(stranger)
    try:
        until_pod_ready(journey, "stranger", 60)
        said = journey.kubectl(
            "exec", "stranger", "--", "python3", "-c", STRANGER_SCRIPT,
            *[line.partition(" ")[0] for line in sockets],
        )  # fmt: skip
    finally:
        journey.delete("pod", "stranger")
    assert said.split() == ["EACCES"] * (1 + len(sockets))


STRANGER_SCRIPT = """
import errno, os, socket, sys
def attempt(what):
    try:
        what()
    except OSError as refused:
        print(errno.errorcode[refused.errno])
    else:
        print("open")
attempt(lambda: os.listdir("/run/larder"))
for name in sys.argv[1:]:
    attempt(lambda: socket.socket(socket.AF_UNIX).connect(f"/run/larder/{name}"))
"""


def test_what_the_operator_made_is_owned_and_goes_by_its_name(journey):
    uid = journey.get("kvcache", NAME)["metadata"]["uid"]
    kinds = "deployments,daemonsets,statefulsets,services,configmaps,secrets,poddisruptionbudgets,networkpolicies"
    ours = journey.list(kinds, f"app.kubernetes.io/instance={NAME}")
    assert len(ours) > 10
    for thing in ours:
        assert [owner["uid"] for owner in thing["metadata"]["ownerReferences"]] == [uid], thing[
            "metadata"
        ]["name"]
        assert thing["metadata"]["name"].startswith(NAME)


@pytest.mark.bundled
def test_an_unchanged_world_and_a_restart_cost_no_write(journey, installation):
    """The operator's leases are renewed by writes; nothing else is, dry-runs and events included."""
    started = writes_of_operator(installation, journey)
    assert started, (
        "the audit log says nothing of the operator: it could not say what it writes either"
    )
    passed = passes(installation)
    until(
        "a full pass of the operator over an unchanged resource",
        lambda: passes(installation) > passed,
        timeout_s=120,
    )
    assert writes_of_operator(installation, journey)[len(started) :] == []

    (pod,) = installation.list("pods", "app.kubernetes.io/name=larder-operator")
    before = writes_of_operator(installation, journey)
    installation.kubectl("delete", "pod", pod["metadata"]["name"])
    until(
        "the operator's next pod is ready",
        lambda: is_ready(installation.get("deployment", "larder-operator")),
        timeout_s=90,
    )
    until("a full pass after the restart", lambda: passes(installation) >= 1, timeout_s=120)
    # What a restarted operator would want to correct, it does in its first pass; statuszs come a little later.
    settled = time.monotonic() + 15
    until("15 s of reading", lambda: time.monotonic() > settled, timeout_s=20)
    assert writes_of_operator(installation, journey)[len(before) :] == []


def passes(system: Namespace) -> int:
    """Full passes that the present operator has made."""
    log = system.kubectl("logs", "deployment/larder-operator", "--tail=-1")
    return log.count("full pass")


def writes_of_operator(system: Namespace, place: Namespace) -> list[str]:
    """What the operator wrote into a namespace, one "verb URI" each; leases aside."""
    user = f"system:serviceaccount:{system.name}:larder-operator"
    writes = []
    # The last piece is an entry that is being written, or nothing.
    for line in AUDIT_LOG.read_text(encoding="utf-8").split("\n")[:-1]:
        entry: Document = json.loads(line)
        about = entry.get("objectRef") or {}
        if (
            entry["user"]["username"] == user
            and about.get("namespace") == place.name
            and about.get("resource") != "leases"
        ):
            writes.append(f"{entry['verb']} {entry['requestURI']}")
    return writes


def engine_sessions(namespace: Namespace) -> list[Document]:
    """Of all agents."""
    return [
        session
        for pod in namespace.pods(NAME, "cache")
        for session in namespace.statusz(pod["metadata"]["name"])["sessions"]
    ]


def test_metrics_of_agents_and_operator_can_be_scraped(journey, installation):
    (agent, *_) = journey.pods(NAME, "cache")
    path = f"/api/v1/namespaces/{journey.name}/pods/{agent['metadata']['name']}:7501/proxy/metrics"
    assert "cacheservice_" in kubectl("get", "--raw", path)
    (operator,) = installation.list("pods", "app.kubernetes.io/name=larder-operator")
    path = f"/api/v1/namespaces/{installation.name}/pods/{operator['metadata']['name']}:8080/proxy/metrics"
    assert "larder_operator_" in kubectl("get", "--raw", path)
