"""The operator alone on a real API server: what it makes, repairs, leaves alone, and that it is quiet when all is well.

Needs no engine and no GPU: most resources here have no node to run on, so nothing but objects appears; a few have a
stand-in. Each test has a KVCache of its own in one of two namespaces; one operator watches the first of them.
"""

from __future__ import annotations

import copy
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_cluster import CommandFailed, Namespace, kubectl, run, until
from operator_process import Operator, audited, images, now, running

PREFIX = os.environ.get("LARDER_E2E_PREFIX", "e2e")
NOWHERE = {"larder.dev/e2e-nowhere": "true"}
KUBECTL_LARDER = str(Path(sys.executable).parent / "kubectl-larder")
"""What `kubectl larder` runs."""
OURS = "app.kubernetes.io/managed-by=larder-operator,app.kubernetes.io/instance="
KINDS = (
    "deployments,daemonsets,statefulsets,services,configmaps,secrets,serviceaccounts,roles,rolebindings,"
    "networkpolicies,poddisruptionbudgets"
)


def kvcache(name: str, **changes: Any) -> dict[str, Any]:
    """A resource whose pods find no node; `changes` replace fields of spec."""
    placed = {"template": {"spec": {"nodeSelector": NOWHERE}}}
    spec: dict[str, Any] = {
        "model": {"name": "llama", "path": "/srv/models/llama"},
        "engine": {"device": "cpu", "sharedMemory": "64Mi"},
        "cache": {"cpu": "64Mi", "nodeSelector": NOWHERE},
        "redis": {"external": {"address": "redis.nowhere.svc:6379"}},
        "router": {"type": "None"},
        "prefill": {"replicas": 0, **placed},
        "decode": {"replicas": 0, **placed},
        **changes,
    }
    return {
        "apiVersion": "larder.dev/v1alpha1",
        "kind": "KVCache",
        "metadata": {"name": name},
        "spec": {field: value for field, value in spec.items() if value is not None},
    }


def stand_in(mode: str) -> dict[str, Any]:
    """A template for an engine of e2e/images/stand-in, on a node."""
    told = [{"name": "STAND_IN", "value": mode}]
    return {"spec": {"containers": [{"name": "vllm", "env": told}]}}


@pytest.fixture(scope="module")
def places(cluster: None, definition: dict[str, Any]) -> Iterator[tuple[Namespace, Namespace]]:
    """A watched namespace and one that nobody watches."""
    names = [f"{PREFIX}-operator", f"{PREFIX}-unwatched"]
    kubectl("delete", "namespace", *names, "--ignore-not-found", timeout_s=180)
    for name in names:
        kubectl("create", "namespace", name)
    yield Namespace(names[0]), Namespace(names[1])
    if not os.environ.get("LARDER_E2E_KEEP"):
        kubectl("delete", "namespace", *names, "--wait=false")


@pytest.fixture(scope="module")
def operator(
    places: tuple[Namespace, Namespace], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Operator]:
    with running(tmp_path_factory.mktemp("operator"), places[0].name) as started:
        yield started


@pytest.fixture
def here(places: tuple[Namespace, Namespace], operator: Operator) -> Iterator[Namespace]:
    """The watched namespace; every KVCache in it goes after the test."""
    if operator.answer("/readyz")[0] != 200:
        pytest.fail(f"the operator does not work: {operator.log()[-3000:]}")
    yield places[0]
    places[0].kubectl("delete", "kvcaches", "--all", "--wait=false")


def children(namespace: Namespace, name: str) -> dict[str, dict[str, Any]]:
    """By kind/name."""
    return {
        f"{found['kind']}/{found['metadata']['name']}": found
        for found in namespace.list(KINDS, OURS + name)
    }


def accepted(namespace: Namespace, name: str) -> dict[str, Any]:
    """Wait until the resource is accepted in its newest generation."""
    until(
        f"{name} is seen",
        lambda: (
            namespace.get("kvcache", name).get("status", {}).get("observedGeneration")
            == namespace.get("kvcache", name)["metadata"]["generation"]
        ),
        timeout_s=60,
    )
    return namespace.until_condition(name, "Accepted", "True")


def test_children_appear_and_belong_to_it(here: Namespace) -> None:
    here.apply(kvcache("appear", redis={"embedded": {}}, router={"replicas": 0}))
    accepted(here, "appear")
    uid = here.get("kvcache", "appear")["metadata"]["uid"]
    found = children(here, "appear")
    assert {
        "Deployment/appear-prefill", "Deployment/appear-decode", "Deployment/appear-router", "DaemonSet/appear-cache",
        "StatefulSet/appear-redis", "Service/appear", "Service/appear-cache", "ConfigMap/appear-connection",
        "Secret/appear-redis-password", "Secret/appear-authority", "Secret/appear-agent-tls",
    } <= set(found)  # fmt: skip
    for title, child in found.items():
        owners = child["metadata"]["ownerReferences"]
        assert [owner["uid"] for owner in owners if owner.get("controller")] == [uid], title
        assert not child["metadata"].get("finalizers"), title
    resource = here.get("kvcache", "appear")
    assert "finalizers" not in resource["metadata"]
    assert "annotations" not in resource["metadata"]


def test_foreign_changes_are_put_right_and_told(here: Namespace, operator: Operator) -> None:
    here.apply(
        kvcache("drift", decode={"replicas": 1, "template": {"spec": {"nodeSelector": NOWHERE}}})
    )
    accepted(here, "drift")
    operator.after_passes(1)
    here.patch("service", "drift-cache", {"spec": {"internalTrafficPolicy": "Cluster"}})
    until(
        "the policy is put right",
        lambda: here.get("service", "drift-cache")["spec"]["internalTrafficPolicy"] == "Local",
        timeout_s=30,
    )
    told = until("it is told", lambda: here.events("drift", "DriftRepaired"), timeout_s=30)
    assert "service/drift-cache" in told[0]["message"]
    assert "spec.internalTrafficPolicy" in told[0]["message"]

    here.kubectl("scale", "deployment", "drift-decode", "--replicas=3")
    until(
        "the number is put right, since the manifest sets it",
        lambda: here.get("deployment", "drift-decode")["spec"]["replicas"] == 1,
        timeout_s=30,
    )
    here.delete("configmap", "drift-connection")
    until("it is made anew", lambda: here.find("configmap", "drift-connection"), timeout_s=30)
    here.kubectl("label", "configmap", "drift-connection", "app.kubernetes.io/managed-by-")
    until(
        "the label that we find it by is back",
        lambda: (
            "app.kubernetes.io/managed-by"
            in here.get("configmap", "drift-connection")["metadata"]["labels"]
        ),
        timeout_s=30,
    )
    here.kubectl("delete", "secret", "drift-authority")
    until("an unwatched Secret, too", lambda: here.find("secret", "drift-authority"), timeout_s=30)


def test_a_change_that_an_apply_can_not_undo_is_put_right(
    here: Namespace, operator: Operator
) -> None:
    here.apply(kvcache("stubborn"))
    accepted(here, "stubborn")
    operator.after_passes(1)
    pod = here.get("deployment", "stubborn-decode")["spec"]["template"]["spec"]
    place = next(n for n, volume in enumerate(pod["volumes"]) if "emptyDir" in volume)
    name = pod["volumes"][place]["name"]
    change = [
        {
            "op": "replace",
            "path": f"/spec/template/spec/volumes/{place}",
            "value": {"name": name, "hostPath": {"path": "/var/tmp"}},
        }
    ]
    here.kubectl("patch", "deployment", "stubborn-decode", "--type=json", "-p", json.dumps(change))

    def is_right() -> bool:
        found = here.get("deployment", "stubborn-decode")["spec"]["template"]["spec"]["volumes"]
        return any(volume["name"] == name and "emptyDir" in volume for volume in found)

    until("the volume is an emptyDir again", is_right, timeout_s=30)
    accepted(here, "stubborn")


@pytest.mark.bundled
def test_passes_and_a_restart_write_nothing(
    here: Namespace, operator: Operator, places: tuple[Namespace, Namespace]
) -> None:
    since = now()
    here.apply(kvcache("quiet", redis={"embedded": {}}, router={"replicas": 0}))
    here.apply(kvcache("silent"))
    accepted(here, "quiet")
    accepted(here, "silent")
    # An audit log that nobody writes, or that is read wrongly, would show nothing below either.
    made = {line.partition(" /")[0] for line in audited(since, here.name)}
    assert {
        "patch deployments/quiet-decode", "patch statefulsets/quiet-redis", "patch secrets/silent-authority",
        "patch kvcaches/quiet", "patch kvcaches/silent",
    } <= made  # fmt: skip
    assert any(write.startswith("create events") for write in made), made
    until(
        "Redis runs, so that nothing changes by itself any more",
        lambda: here.get("statefulset", "quiet-redis").get("status", {}).get("readyReplicas"),
        timeout_s=90,
    )
    settled(here, operator, "quiet", "silent")
    since = now()
    operator.after_passes(3)
    assert audited(since, here.name) == []
    for _ in range(4):
        assert operator.stop() == 0
        since = now()
        operator.start()
        operator.after_passes(2)
        writes = audited(since, here.name)
        if not any(" by system:serviceaccount:" in write for write in writes):
            break
        # While nobody was here, an installed operator of the whole cluster came in, and drew NetworkPolicies to itself.
        settled(here, operator, "quiet", "silent")
    assert writes == []


def settled(namespace: Namespace, operator: Operator, *names: str) -> None:
    """Wait until two passes leave the resources as they are."""

    def versions() -> list[str]:
        return [namespace.get("kvcache", name)["metadata"]["resourceVersion"] for name in names]

    def is_settled() -> bool:
        before = versions()
        operator.after_passes(1)
        return versions() == before

    until("nothing changes any more", is_settled, timeout_s=150)


def test_a_foreign_object_of_our_name_is_left_alone(here: Namespace) -> None:
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "conflict-cache", "labels": {"whose": "theirs"}},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "theirs"}},
    }
    here.apply(foreign)
    version = here.get("service", "conflict-cache")["metadata"]["resourceVersion"]
    here.apply(kvcache("conflict"))
    here.until_condition(
        "conflict", "Accepted", "False", "NameConflict", containing=["Service conflict-cache"]
    )
    assert here.get("service", "conflict-cache")["metadata"]["resourceVersion"] == version
    assert here.find("configmap", "conflict-connection"), "the other objects are made"
    here.kubectl("delete", "service", "conflict-cache")
    here.until_condition("conflict", "Accepted", "True")
    assert here.get("service", "conflict-cache")["metadata"]["ownerReferences"]


def test_paused_stops_all_writes_but_status(here: Namespace, operator: Operator) -> None:
    here.apply(kvcache("rest"))
    accepted(here, "rest")
    here.patch("kvcache", "rest", {"spec": {"paused": True}})
    until(
        "the pause is seen",
        lambda: here.get("kvcache", "rest")["status"]["observedGeneration"] == 2,
        timeout_s=30,
    )
    here.delete("configmap", "rest-connection")
    until("it is gone", lambda: not here.find("configmap", "rest-connection"), timeout_s=30)
    operator.after_passes(2)
    assert here.find("configmap", "rest-connection") is None
    here.patch("kvcache", "rest", {"spec": {"paused": False}})
    until("it comes back", lambda: here.find("configmap", "rest-connection"), timeout_s=30)


def test_replicas_that_are_no_longer_set_stay_and_belong_to_an_autoscaler(
    here: Namespace, operator: Operator
) -> None:
    resource = kvcache(
        "scaled", decode={"replicas": 3, "template": {"spec": {"nodeSelector": NOWHERE}}}
    )
    here.apply(resource)
    accepted(here, "scaled")
    assert here.get("deployment", "scaled-decode")["spec"]["replicas"] == 3
    without = copy.deepcopy(resource)
    del without["spec"]["decode"]["replicas"]
    here.apply(without)
    assert "replicas" not in here.get("kvcache", "scaled")["spec"]["decode"]
    accepted(here, "scaled")
    operator.after_passes(1)
    assert here.get("deployment", "scaled-decode")["spec"]["replicas"] == 3
    generation = here.get("deployment", "scaled-decode")["metadata"]["generation"]
    here.kubectl("scale", "deployment", "scaled-decode", "--replicas=5")
    here.apply(
        {**without, "spec": {**without["spec"], "cache": {"cpu": "96Mi", "nodeSelector": NOWHERE}}}
    )
    accepted(here, "scaled")
    operator.after_passes(2)
    found = here.get("deployment", "scaled-decode")
    assert found["spec"]["replicas"] == 5
    assert found["metadata"]["generation"] == generation + 1, "nothing but the scale changed it"
    here.apply(
        {
            **resource,
            "spec": {**resource["spec"], "cache": {"cpu": "96Mi", "nodeSelector": NOWHERE}},
        }
    )
    until(
        "set again, the number is ours again",
        lambda: here.get("deployment", "scaled-decode")["spec"]["replicas"] == 3,
        timeout_s=30,
    )


def test_what_is_not_wanted_any_more_goes(here: Namespace) -> None:
    here.apply(kvcache("shrink", router={"replicas": 0}))
    accepted(here, "shrink")
    assert here.find("deployment", "shrink-router")
    assert here.find("deployment", "shrink-prefill")
    here.apply(kvcache("shrink", prefill=None))
    until(
        "prefill and router are gone",
        lambda: (
            not any(here.find("deployment", f"shrink-{part}") for part in ("router", "prefill"))
        ),
        timeout_s=60,
    )
    accepted(here, "shrink")
    left = children(here, "shrink")
    assert not [
        title for title in left if "shrink-router" in title and not title.startswith("Secret/")
    ]


def test_deletion_leaves_nothing_behind(here: Namespace) -> None:
    here.apply(kvcache("leaving", redis={"embedded": {}}, router={"replicas": 0}))
    accepted(here, "leaving")
    here.kubectl("delete", "kvcache", "leaving", "--timeout=20s")
    until("everything is gone", lambda: children(here, "leaving") == {}, timeout_s=60)
    until("its pods are gone", lambda: here.pods("leaving") == [], timeout_s=60)
    here.apply(kvcache("leaving"))
    accepted(here, "leaving")


def test_a_resource_of_the_same_name_made_at_once_gets_objects_of_its_own(here: Namespace) -> None:
    here.apply(kvcache("again"))
    accepted(here, "again")
    here.kubectl("delete", "kvcache", "again", "--cascade=background")
    here.apply(kvcache("again"))
    uid = here.get("kvcache", "again")["metadata"]["uid"]

    def all_new() -> bool:
        found = children(here, "again").values()
        return len(found) > 8 and all(
            child["metadata"]["ownerReferences"][0]["uid"] == uid for child in found
        )

    until("all objects belong to the new one", all_new, timeout_s=60)
    accepted(here, "again")


def test_only_watched_namespaces_are_touched(
    here: Namespace, operator: Operator, places: tuple[Namespace, Namespace]
) -> None:
    other = places[1]
    # Keeps off an operator that watches the whole cluster, should there be one.
    other.apply(
        {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": "larder-operator"},
            "spec": {"holderIdentity": "nobody", "leaseDurationSeconds": 3600},
        }
    )
    try:
        here.apply(kvcache("watched"))
        accepted(here, "watched")
        operator.after_passes(4)  # others look at leases every 5 s
        other.apply(kvcache("elsewhere"))
        operator.after_passes(1)
        assert children(other, "elsewhere") == {}
        assert "status" not in other.get("kvcache", "elsewhere")
        assert operator.answer("/readyz")[0] == 200
    finally:
        other.delete("kvcache", "elsewhere")
        other.delete("lease", "larder-operator")


def test_a_missing_secret_that_comes_later_heals(here: Namespace) -> None:
    """A real pod: the stand-in serves as soon as its container may start."""
    resource = kvcache(
        "token",
        model={"name": "llama", "path": "/srv/models/llama", "tokenSecretRef": {"name": "hf"}},
        prefill=None,
        decode={"replicas": 1, "template": stand_in("ready")},
    )
    here.apply(resource)
    here.until_condition(
        "token", "Accepted", "False", "SecretNotFound", containing=["hf"], timeout_s=90
    )
    here.kubectl("create", "secret", "generic", "hf", "--from-literal=token=x")
    try:
        here.until_condition("token", "Accepted", "True", timeout_s=120)
        until(
            "the engine is ready",
            lambda: (
                here.get("deployment", "token-decode").get("status", {}).get("readyReplicas") == 1
            ),
            timeout_s=120,
        )
    finally:
        here.kubectl("delete", "secret", "hf")


def test_engines_keep_their_image_until_an_upgrade_is_asked_for(
    here: Namespace, operator: Operator, tmp_path: Path
) -> None:
    """A newer operator brings another image for engines; the pod is a real one."""

    def engine() -> tuple[str, str] | None:
        """UID and image of the one engine, when it is ready and alone."""
        pods = here.pods("newer", "decode")
        if len(pods) != 1 or not all(
            one["ready"] for one in pods[0]["status"].get("containerStatuses", [{"ready": False}])
        ):
            return None
        return pods[0]["metadata"]["uid"], pods[0]["spec"]["containers"][0]["image"]

    here.apply(
        kvcache("newer", prefill=None, decode={"replicas": 1, "template": stand_in("ready")})
    )
    before = until("the engine is ready", engine, timeout_s=90)
    old, new = (images(engine_cpu=name)["engine_cpu"] for name in ("stand-in", "stand-in-next"))
    assert before[1] == old
    operator.stop()
    try:
        with running(tmp_path, here.name, images=images(engine_cpu="stand-in-next")) as newer:
            newer.after_passes(1)
            assert engine() == before, "a newer operator replaces no engine"
            ask = (KUBECTL_LARDER, "upgrade", "newer", "--namespace", here.name)
            said = run(*ask, "--dry-run")
            assert "newer-decode" in said
            assert old in said
            newer.after_passes(1)
            assert engine() == before, "nor does a dry run"
            run(*ask)
            after = until(
                "an engine of the new image alone",
                lambda: (found := engine()) is not None and found != before and found,
                timeout_s=90,
            )
            assert after[1] == new
            newer.after_passes(1)
            assert engine() == after, "once is enough"
    finally:
        operator.start()


def test_changed_chunk_size_warns_of_what_is_lost(here: Namespace, operator: Operator) -> None:
    """With a real agent and a stand-in that has a session: an engine says how long its chunks are."""

    def in_use() -> int | None:
        return here.get("kvcache", "chunks").get("status", {}).get("model", {}).get("chunkTokens")

    (node,) = kubectl("get", "nodes", "-o", "name").split()[-1:]
    here_alone = {"kubernetes.io/hostname": node.removeprefix("node/")}
    resource = kvcache(
        "chunks",
        cache={"cpu": "64Mi", "nodeSelector": here_alone},
        redis={"embedded": {"memory": "64Mi"}},
        prefill=None,
        decode={
            "replicas": 1,
            "template": {"spec": {**stand_in("cached")["spec"], "nodeSelector": here_alone}},
        },
    )
    here.apply(resource)
    until("an engine with chunks of 16 tokens", lambda: in_use() == 16, timeout_s=120)
    assert here.events("chunks", "ChunkTokensChanged") == []
    here.patch("kvcache", "chunks", {"spec": {"cache": {"chunkTokens": 32}}})
    until("an engine with chunks of 32 tokens", lambda: in_use() == 32, timeout_s=120)
    (event,) = until(
        "it is told", lambda: here.events("chunks", "ChunkTokensChanged"), timeout_s=30
    )
    assert (event["type"], event.get("count", 1)) == ("Warning", 1)
    assert event["message"] == (
        "chunkTokens changed from 16 to 32: chunks stored with 16 tokens are unreachable now, and leave as room is "
        "needed"
    )
    operator.after_passes(1)
    assert in_use() == 32
    assert len(here.events("chunks", "ChunkTokensChanged")) == 1, "once, not once a pass"


def test_shared_memory_follows_what_the_namespace_allows(
    here: Namespace, operator: Operator
) -> None:
    def volumes() -> str:
        return json.dumps(
            here.get("daemonset", "folder-cache")["spec"]["template"]["spec"]["volumes"]
        )

    here.apply(kvcache("folder"))
    accepted(here, "folder")
    assert here.get("kvcache", "folder")["status"]["transport"] == "SharedMemory"
    assert "hostPath" in volumes()
    kubectl("label", "namespace", here.name, "pod-security.kubernetes.io/enforce=baseline")
    try:
        until(
            "the stream path is taken",
            lambda: here.get("kvcache", "folder")["status"]["transport"] == "Stream",
            timeout_s=60,
        )
        assert "hostPath" not in volumes()
        assert "baseline" in here.get("kvcache", "folder")["status"]["transportReason"]
    finally:
        kubectl("label", "namespace", here.name, "pod-security.kubernetes.io/enforce-")
    until(
        "shared memory is back",
        lambda: here.get("kvcache", "folder")["status"]["transport"] == "SharedMemory",
        timeout_s=60,
    )
    assert "hostPath" in volumes()


def test_what_the_api_server_refuses_is_told_with_its_path(here: Namespace) -> None:
    wrong = {"spec": {"nodeSelector": NOWHERE, "terminationGracePeriodSecnds": 3}}
    here.apply(kvcache("typo", decode={"replicas": 0, "template": wrong}))
    here.until_condition(
        "typo", "Accepted", "False", "InvalidTemplate", containing=["terminationGracePeriodSecnds"]
    )
    here.apply(kvcache("typo"))
    here.until_condition("typo", "Accepted", "True")


def test_quota_refusal_is_told(here: Namespace) -> None:
    quota = {
        "apiVersion": "v1",
        "kind": "ResourceQuota",
        "metadata": {"name": "tight"},
        "spec": {"hard": {"count/configmaps": "0"}},
    }
    here.apply(quota)
    try:
        until(
            "it counts",
            lambda: here.get("resourcequota", "tight").get("status", {}).get("hard"),
            timeout_s=30,
        )
        here.apply(kvcache("poor"))
        here.until_condition(
            "poor", "Accepted", "False", "QuotaExceeded", timeout_s=60,
            containing=["configmap/poor-connection", "tight", f"raise the quota of namespace {here.name}"],
        )  # fmt: skip
        told = until("it is told", lambda: here.events("poor", "QuotaExceeded"), timeout_s=30)
        assert {event["type"] for event in told} == {"Warning"}
        assert here.find("service", "poor-cache"), "the other objects are made"
    finally:
        here.kubectl("delete", "resourcequota", "tight")
    here.until_condition("poor", "Accepted", "True", timeout_s=90)
    assert here.find("configmap", "poor-connection")


def test_the_second_operator_stays_off_and_takes_over(
    places: tuple[Namespace, Namespace], tmp_path: Path
) -> None:
    other = places[1]
    first, second = Operator(tmp_path, other.name), Operator(tmp_path, other.name)
    try:
        first.start()
        second.start(is_ready=False)
        until("it says so", lambda: "another operator works here" in second.log(), timeout_s=30)
        code, text = second.answer("/readyz")
        assert code == 503
        assert "lease" in text
        assert second.answer("/healthz")[0] == 200
        first.stop(signal.SIGKILL)
        second.until_ready()
        other.apply(kvcache("inherited"))
        accepted(other, "inherited")
    finally:
        for operator in (first, second):
            try:
                operator.stop(signal.SIGKILL)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                pass
        other.kubectl("delete", "kvcaches", "--all", "--wait=false")


def test_health_and_metrics_are_served(here: Namespace, operator: Operator) -> None:
    here.apply(kvcache("counted"))
    accepted(here, "counted")
    operator.after_passes(1)
    assert operator.answer("/healthz")[0] == 200
    assert operator.metric("larder_operator_resources") >= 1
    assert operator.metric("larder_operator_lease_held") == 1
    with pytest.raises(CommandFailed):
        here.get("kvcache", "never-made")
