"""What goes wrong without an engine: each fault really happens, and status says what, which object and what to do.

Engines are stand-ins here (images/stand-in), so each fault costs seconds. Faults of real engines are in
test_faults_engines.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack
from secrets import token_hex

import pytest
import yaml
from live_cluster import Document, Namespace, is_ready, kubectl, reference, until
from redis_of_others import certificate_for, keys, redis_cli, redis_server, ttl_s
from stand_ins import (
    NODE_TWO,
    SILENT,
    applied,
    cache_alone,
    credentials,
    engines_alone,
    external,
    kvcache,
    problem,
    secret,
    stand_in,
)
from traffic import pod_is_ready

pytestmark = [pytest.mark.timeout(400), pytest.mark.beside]


@pytest.fixture(scope="module")
def faults(installation: Namespace, namespaces: dict[str, Namespace]) -> Namespace:
    return namespaces["faults"]


# What takes a minute by its nature is begun first, and its end is looked at last.

POD_MONITORS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "podmonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {
            "kind": "PodMonitor",
            "listKind": "PodMonitorList",
            "plural": "podmonitors",
            "singular": "podmonitor",
        },
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {
                    "openAPIV3Schema": {
                        "type": "object",
                        "x-kubernetes-preserve-unknown-fields": True,
                    }
                },
            }
        ],
    },
}
"""The kind of Prometheus' operator, as far as the API server must know it."""


@pytest.fixture(scope="module")
def pod_monitors(faults: Namespace) -> Iterator[Document]:
    """The kind, not installed yet; gone afterwards. Where Prometheus' operator is installed it is left alone."""
    name = POD_MONITORS["metadata"]["name"]
    if kubectl("get", "crd", name, "--ignore-not-found"):
        pytest.skip(f"the cluster knows {name} already, so nothing can be seen without it")
    yield POD_MONITORS
    kubectl("delete", "crd", name, "--ignore-not-found")


SLOW = engines_alone(
    "slow", {"engine": {"startupTimeoutSeconds": 120}, "decode": {"template": stand_in("never")}}
)
BARE = kvcache("bare", {"prefill": {"template": stand_in("ready")}})
SECRETIVE = engines_alone("secret", {"model": {"tokenSecretRef": {"name": "hugging"}}})
STUCK = engines_alone("stuck", {"engine": {"startupTimeoutSeconds": 3600}})
MONITORED = engines_alone("monitored", {"decode": None, "podMonitor": {}})
API_KEY = f"key-{token_hex(16)}"
KEYED = kvcache(
    "keyed",
    {
        "engine": {"apiKeySecretRef": {"name": "engine-key", "key": "api-key"}},
        "prefill": {"template": stand_in("cached")},
        "decode": {"template": stand_in("cached", {"STAND_IN_KEY": "another"})},
    },
)


UNPULLED = kvcache("image", external(SILENT), {"engine": {"image": "localhost/no-such-image:v1"}})
UNPULLED_AGENT = cache_alone(
    "agent-image", external(SILENT), {"cache": {"image": "localhost/no-such-agent:v1"}}
)


@pytest.fixture(scope="module", autouse=True)
def long_ones(faults: Namespace, redis: str, small_redis: str) -> Iterator[None]:
    with (
        credentials(faults, "wrong", "larder", "wrong") as wrong,
        credentials(faults, "right", "larder", "right") as right,
        credentials(faults, "weak", "weak", "right") as weak,
        secret(faults, "engine-key", {"api-key": API_KEY}),
        ExitStack() as stack,
    ):
        for document in (
            SLOW, BARE, SECRETIVE, STUCK, MONITORED, KEYED, UNPULLED, UNPULLED_AGENT,
            cache_alone("password", external(redis, wrong)),
            cache_alone("permission", external(redis, weak)),
            cache_alone("full", external(f"{small_redis}:6379", right)),
            cache_alone("encrypted", external(f"{small_redis}:6380", right, {"tls": {}})),
            cache_alone("silent", external(SILENT)),
        ):  # fmt: skip
            name = stack.enter_context(applied(faults, document))
            # One after the other: thirty pods at once would take the cores from the API server.
            until(
                f"{name} is looked at",
                lambda name=name: faults.get("kvcache", name).get("status"),
                timeout_s=60,
            )
        yield


def test_engine_that_loads_says_since_when(faults):
    faults.until_condition(
        "slow", "EnginesReady", "False", "ModelLoading", containing=["loading since", "120 s"]
    )


def test_missing_secret_is_named(faults):
    condition = faults.until_condition(
        "secret",
        "Accepted",
        "False",
        "SecretNotFound",
        containing=["hugging", "spec.model.tokenSecretRef"],
    )
    assert faults.name in condition["message"]
    assert faults.conditions("secret")["Ready"]["reason"] == "SecretNotFound"
    assert faults.events("secret", "SecretNotFound")


def test_redis_with_another_password_is_told(faults, redis):
    faults.until_condition(
        "password", "RedisReady", "False", "AuthFailed", timeout_s=120, containing=[redis, "larder"]
    )
    # The kubelet shows a changed Secret within 90 s or so: see the end of this file.
    faults.patch("secret", "wrong", {"stringData": {"password": "right"}})


def test_redis_answers_until_it_is_full(faults):
    faults.until_condition("full", "RedisReady", "True", timeout_s=120)
    # One command may take it over its limit; the next that asks for memory is refused. Its agent has nothing to write.
    redis_cli(faults, "SETRANGE", "filler", "9000000", "x", pod="small")


def test_prefill_is_asked_with_the_key_and_decode_wants_another(faults):
    faults.until_condition("keyed", "EnginesReady", "True", timeout_s=120)
    faults.until_condition(
        "keyed",
        "TransferVerified",
        "Unknown",
        "ProbeFailed",
        timeout_s=120,
        containing=["decode at", "refuses the API key (HTTP 401)", "spec.engine.apiKeySecretRef"],
    )
    template = {"template": stand_in("cached")}
    faults.patch("kvcache", "keyed", {"spec": {"decode": template}})


def test_pod_monitor_is_left_out_where_nobody_knows_the_kind(faults, pod_monitors):
    faults.until_condition("monitored", "Accepted", "True")
    message = problem(faults, "monitored", "PodMonitorCRDMissing")["message"]
    assert "install the CRDs of Prometheus' operator" in message
    kubectl("apply", "--server-side", "-f", "-", stdin=yaml.safe_dump(pod_monitors))


def test_engine_that_a_new_version_does_not_replace(faults):
    """The operator allows what an engine may take and ten minutes. Paused, it leaves a shorter deadline as it is."""
    faults.until_condition("stuck", "EnginesReady", "True", timeout_s=120)
    faults.patch("kvcache", "stuck", {"spec": {"decode": {"template": stand_in("never")}}})
    faults.until_condition("stuck", "EnginesReady", "False", "RollingOut", timeout_s=60)
    faults.patch("kvcache", "stuck", {"spec": {"paused": True}})
    seen = faults.get("kvcache", "stuck")["metadata"]["generation"]
    until(
        "the operator has paused",
        lambda: faults.get("kvcache", "stuck")["status"]["observedGeneration"] == seen,
        timeout_s=30,
    )
    faults.patch("deployment", "stuck-decode", {"spec": {"progressDeadlineSeconds": 5}})


def test_name_of_another_owner_is_never_taken_over(faults):
    foreign = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "taken", "labels": {"owner": "somebody"}},
        "spec": {"ports": [{"port": 80}], "selector": {"app": "somebody"}},
    }
    faults.apply(foreign)
    try:
        none = {"router": {"type": "SMG", "replicas": 0}, "decode": {"replicas": 0}}
        with applied(faults, engines_alone("taken", none)) as name:
            condition = faults.until_condition(name, "Accepted", "False", "NameConflict")
            assert "Service taken exists and is not owned by this KVCache" in condition["message"]
            assert "delete that object" in condition["message"]
            service = faults.get("service", "taken")
            assert service["spec"]["selector"] == {"app": "somebody"}
            assert "ownerReferences" not in service["metadata"]
            faults.delete("service", "taken")
            faults.until_condition(name, "Accepted", "True", timeout_s=120)
            until(
                "our own Service",
                lambda: faults.get("service", "taken")["metadata"].get("ownerReferences"),
                timeout_s=30,
            )
    finally:
        faults.delete("service", "taken")


def test_no_node_for_the_cache(faults):
    with applied(
        faults,
        cache_alone("nowhere", external(SILENT), {"cache": {"nodeSelector": {"rack": "seven"}}}),
    ) as name:
        faults.until_condition(
            name, "CacheReady", "False", "NoMatchingNodes",
            containing=["0 nodes match spec.cache.nodeSelector", "rack: seven"],
        )  # fmt: skip
        assert problem(faults, name, "NoMatchingNodes")["object"] == "daemonset/nowhere-cache"


def test_engine_on_a_node_without_an_agent(faults):
    template = stand_in("ready")
    template["spec"]["nodeSelector"] = NODE_TWO
    with applied(
        faults, kvcache("apart", external(SILENT), {"decode": {"template": template}})
    ) as name:
        condition = faults.until_condition(
            name, "CacheReady", "False", "NoLocalCache", containing=["apart-decode"]
        )
        assert "which has no agent" in condition["message"]
        assert problem(faults, name, "NoLocalCache")["object"].startswith("node/")


def test_too_few_gpus(faults):
    change = {
        "engine": {"device": "cuda"},
        "decode": {"tensorParallelSize": 8, "template": stand_in("ready")},
    }
    with applied(faults, engines_alone("gpus", change)) as name:
        faults.until_condition(
            name, "EnginesReady", "False", "Unschedulable",
            containing=["Insufficient nvidia.com/gpu", "asks 8 nvidia.com/gpu", "tensorParallelSize"],
        )  # fmt: skip


def test_images_that_cannot_be_pulled_are_told(faults):
    remedy = "correct the image, or give spec.imagePullSecrets"
    faults.until_condition(
        "image",
        "EnginesReady",
        "False",
        "ImagePullFailed",
        containing=["localhost/no-such-image:v1", "image-decode", remedy],
    )
    faults.until_condition(
        "agent-image",
        "CacheReady",
        "False",
        "ImagePullFailed",
        containing=["localhost/no-such-agent:v1", "agent-image-cache", remedy],
    )


def test_engine_that_crashes_says_its_last_words(faults):
    with applied(
        faults, engines_alone("crash", {"decode": {"template": stand_in("crash")}})
    ) as name:
        faults.until_condition(
            name, "EnginesReady", "False", "CrashLooping", timeout_s=90,
            containing=["exit code 1", "told to crash", "kubectl logs", "--previous"],
        )  # fmt: skip


def test_engine_that_is_killed_for_memory(faults):
    template = stand_in(
        "memory",
        resources={"requests": {"cpu": "10m", "memory": "32Mi"}, "limits": {"memory": "64Mi"}},
    )
    with applied(faults, engines_alone("memory", {"decode": {"template": template}})) as name:
        faults.until_condition(
            name, "EnginesReady", "False", "OOMKilled", timeout_s=90,
            containing=["limit 64Mi", "spec.decode.template"],
        )  # fmt: skip


def test_template_that_gives_an_owned_argument(faults):
    template = stand_in("ready", args=["--kv-transfer-config={}"])
    with applied(faults, engines_alone("reserved", {"decode": {"template": template}})) as name:
        faults.until_condition(
            name, "Accepted", "False", "ReservedArgument", containing=["spec.decode.template"]
        )
        assert faults.find("deployment", "reserved-decode") is None


def test_template_with_a_field_that_nobody_knows(faults):
    template = stand_in("ready", imagePullSecret="x")
    with applied(faults, engines_alone("template", {"decode": {"template": template}})) as name:
        faults.until_condition(
            name,
            "Accepted",
            "False",
            "InvalidTemplate",
            containing=["imagePullSecret", "spec.decode.template"],
        )


def test_quota_that_is_too_small(installation, namespaces):
    namespace = namespaces["quota"]
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "ResourceQuota",
            "metadata": {"name": "small"},
            "spec": {"hard": {"pods": "2"}},
        }
    )
    with applied(namespace, kvcache("quota")) as name:
        condition = namespace.until_condition(
            name, "Ready", "False", "PodRejected", containing=["exceeded quota"]
        )
        assert "raise the quota of namespace" in condition["message"]
        namespace.patch("resourcequota", "small", {"spec": {"hard": {"pods": "20"}}})
        # Its controller would try again by itself, but after minutes by now; a new one tries at once.
        namespace.kubectl("delete", "replicaset", "-l", f"app.kubernetes.io/instance={name}")
        namespace.until_condition(name, "EnginesReady", "True", timeout_s=180)


def test_namespace_that_forbids_host_paths_gets_streams(installation, namespaces):
    namespace = namespaces["restricted"]
    kubectl(
        "label",
        "namespace",
        namespace.name,
        "pod-security.kubernetes.io/enforce=restricted",
        "--overwrite",
    )
    with applied(namespace, kvcache("strict")) as name:
        namespace.until_condition(name, "CacheReady", "True", timeout_s=120)
        namespace.until_condition(name, "EnginesReady", "True", timeout_s=60)
        status = namespace.get("kvcache", name)["status"]
        assert status["transport"] == "Stream"
        assert "restricted" in status["transportReason"]
        volumes = [
            volume
            for pod in namespace.pods(name)
            for volume in pod["spec"]["volumes"]
            if "hostPath" in volume
        ]
        assert volumes == []
    with applied(namespace, kvcache("forced", {"cache": {"transport": "SharedMemory"}})) as name:
        condition = namespace.until_condition(
            name, "CacheReady", "False", "PodRejected", containing=["PodSecurity"]
        )
        assert "hostPath" in condition["message"]


# Redis of others


@pytest.fixture(scope="module")
def redis(faults: Namespace) -> Iterator[str]:
    """A Redis that is not ours: host:port. `larder` may do everything, `weak` nothing."""
    yield from redis_server(faults, "others", "64mb")


@pytest.fixture(scope="module")
def small_redis(faults: Namespace) -> Iterator[str]:
    """Another one: host, which serves plain at 6379 and, with the Secret `small`, TLS at 6380.

    It refuses what would take it over 8 MB, as Redis's default policy is noeviction.
    """
    with secret(faults, "small", certificate_for(f"small.{faults.name}.svc")):
        for address in redis_server(faults, "small", "8mb", tls_secret="small"):
            yield address.removesuffix(":6379")


def test_redis_that_nobody_answers_for(faults):
    faults.until_condition(
        "silent", "RedisReady", "False", "Unreachable", timeout_s=120,
        containing=[SILENT, "engines keep running"],
    )  # fmt: skip


def test_redis_whose_certificate_is_not_trusted(faults, small_redis):
    faults.until_condition(
        "encrypted",
        "RedisReady",
        "False",
        "TlsFailed",
        timeout_s=120,
        containing=[
            f"TLS to Redis at rediss://larder@{small_redis}:6380 failed",
            "not trusted",
            "give the CA that signed it",
        ],
    )
    trust = {"tls": {"caSecretRef": {"name": "small"}}}
    faults.patch("kvcache", "encrypted", {"spec": {"redis": {"external": trust}}})


def test_redis_that_permits_too_little_prints_the_line_that_is_needed(faults):
    condition = faults.until_condition(
        "permission", "RedisReady", "False", "PermissionDenied", timeout_s=120
    )
    uid = faults.get("kvcache", "permission")["metadata"]["uid"].replace("-", "")
    (line,) = re.findall(r"run `(ACL SETUSER [^`]+)` there", condition["message"])
    words = line.split()
    assert words[:4] == ["ACL", "SETUSER", "weak", "on"]
    assert f"~larder:{uid[:8]}:*" in words, "no key of another KVCache"
    assert not {"~*", "allkeys", "+@all", "allcommands"} & set(words)
    assert redis_cli(faults, *words).strip() == "OK"
    faults.until_condition("permission", "RedisReady", "True", timeout_s=60)


# Replicas


def test_replicas_that_were_set_and_are_unset_stay(faults):
    with applied(faults, engines_alone("handover", {"decode": {"replicas": 2}})) as name:
        faults.until_condition(name, "EnginesReady", "True", timeout_s=120)
        document = engines_alone("handover")
        faults.apply(document)
        assert "replicas" not in faults.get("kvcache", name)["spec"]["decode"]
        seen = faults.get("kvcache", name)["metadata"]["generation"]
        until(
            "the operator saw it",
            lambda: faults.get("kvcache", name)["status"]["observedGeneration"] == seen,
            timeout_s=60,
        )
        assert faults.get("deployment", "handover-decode")["spec"]["replicas"] == 2
        # What an autoscaler does next is left alone, by another reconcile too.
        faults.kubectl("scale", "deployment/handover-decode", "--replicas=3")
        faults.patch("kvcache", name, {"spec": {"service": {"annotations": {"seen": "again"}}}})
        seen = faults.get("kvcache", name)["metadata"]["generation"]
        until(
            "the operator saw that too",
            lambda: faults.get("kvcache", name)["status"]["observedGeneration"] == seen,
            timeout_s=60,
        )
        assert faults.get("deployment", "handover-decode")["spec"]["replicas"] == 3
        until(
            "three engines",
            lambda: is_ready(faults.get("deployment", "handover-decode")),
            timeout_s=60,
        )


# Deletion


def test_deleted_resource_leaves_nothing_within_a_minute(faults, redis):
    """Chunks in Redis are looked at in test_faults_sessions.py."""
    faults.apply(cache_alone("gone", external(redis, "right")))
    faults.until_condition("gone", "CacheReady", "True", timeout_s=120)
    faults.until_condition("gone", "RedisReady", "True", timeout_s=60)
    uid = faults.get("kvcache", "gone")["metadata"]["uid"]
    pattern = f"larder:{uid.replace('-', '')[:8]}:*"
    until("keys of this resource in Redis", lambda: keys(faults, pattern), timeout_s=30)
    faults.delete("kvcache", "gone")
    kinds = (
        "pods,services,configmaps,secrets,serviceaccounts,deployments,daemonsets,statefulsets,"
        "networkpolicies,poddisruptionbudgets,roles,rolebindings"
    )
    until(
        "nothing of it is left",
        lambda: not faults.list(kinds, "app.kubernetes.io/instance=gone"),
        timeout_s=60,
    )
    assert faults.find("kvcache", "gone") is None
    # What drained agents leave, so that node numbers are not given twice, goes by itself.
    until(
        "what is left of its keys in Redis expires within a day",
        lambda: all(0 < ttl_s(faults, key) <= 86_400 for key in keys(faults, pattern)),
        timeout_s=60,
    )


# The ends of what was begun first


def test_what_stood_a_minute_calls_for_a_person_and_heals_by_itself(faults):
    stalled = faults.until_condition("secret", "Stalled", "True", "SecretNotFound", timeout_s=120)
    assert "hugging" in stalled["message"]
    try:
        faults.kubectl("create", "secret", "generic", "hugging", "--from-literal=token=x")
        faults.until_condition("secret", "Accepted", "True", timeout_s=150)
        faults.until_condition("secret", "EnginesReady", "True", timeout_s=60)
        faults.until_condition("secret", "Stalled", "False", timeout_s=30)
    finally:
        faults.delete("secret", "hugging")


def test_rollout_that_is_stuck_is_told_and_goes_back(faults):
    condition = faults.until_condition(
        "stuck", "EnginesReady", "False", "RolloutStalled", timeout_s=90,
        containing=["deployment/stuck-decode", "old revision still serving", "not ready since"],
    )  # fmt: skip
    (waiting,) = [
        pod["metadata"]["name"] for pod in faults.pods("stuck", "decode") if not pod_is_ready(pod)
    ]
    assert f"kubectl describe pod -n {faults.name} {waiting}" in condition["message"]
    assert problem(faults, "stuck", "RolloutStalled")["object"] == "deployment/stuck-decode"
    assert faults.events("stuck", "RolloutStalled")
    change = {"paused": False, "decode": {"template": stand_in("ready")}}
    faults.patch("kvcache", "stuck", {"spec": change})
    faults.until_condition("stuck", "EnginesReady", "True", timeout_s=60)


def test_full_redis_is_told_and_heals(faults, small_redis):
    faults.until_condition(
        "full",
        "RedisReady",
        "False",
        "Full",
        timeout_s=60,
        containing=[
            f"{small_redis}:6379",
            "full (OOM under noeviction)",
            "raise its maxmemory, or set maxmemory-policy allkeys-lru",
            "found on their own node only",
        ],
    )
    assert faults.conditions("full")["CacheReady"]["status"] == "True"
    redis_cli(faults, "CONFIG", "SET", "maxmemory-policy", "allkeys-lru", pod="small")
    faults.until_condition("full", "RedisReady", "True", timeout_s=60)


def test_pod_monitor_comes_and_goes_with_its_kind(faults, installation, pod_monitors):
    monitor = until("a PodMonitor", lambda: faults.find("podmonitor", "monitored"), timeout_s=90)
    (owner,) = monitor["metadata"]["ownerReferences"]
    assert owner["uid"] == faults.get("kvcache", "monitored")["metadata"]["uid"]
    assert monitor["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "larder",
        "app.kubernetes.io/instance": "monitored",
    }
    until(
        "nothing is missing any more",
        lambda: (
            "PodMonitorCRDMissing"
            not in [
                one["reason"] for one in faults.get("kvcache", "monitored")["status"]["problems"]
            ]
        ),
        timeout_s=30,
    )
    operator = only_container(installation)
    kubectl("delete", "crd", pod_monitors["metadata"]["name"])
    faults.patch("kvcache", "monitored", {"spec": {"podMonitor": {"labels": {"team": "a"}}}})
    generation = faults.get("kvcache", "monitored")["metadata"]["generation"]
    until(
        "the operator accepts the resource without its PodMonitor",
        lambda: (
            faults.get("kvcache", "monitored")["status"]["observedGeneration"] == generation
            and faults.conditions("monitored")["Accepted"]["status"] == "True"
        ),
        timeout_s=90,
    )
    # Nothing that another product takes away ends the operator.
    assert only_container(installation) == operator


def only_container(system: Namespace) -> str:
    """The id of the operator's, which changes when it ends and begins again."""
    (pod,) = system.list("pods", "app.kubernetes.io/name=larder-operator")
    (container,) = pod["status"]["containerStatuses"]
    return str(container["containerID"])


def test_probe_with_an_api_key_verifies_and_never_shows_the_key(faults, installation):
    condition = faults.until_condition("keyed", "TransferVerified", "True", timeout_s=120)
    assert condition["reason"] == "Verified"
    asked = [event["reason"] for event in faults.events("keyed-probe")]
    assert "Started" in asked, "a pod has asked, not the operator"
    until("the pod is gone", lambda: faults.find("pod", "keyed-probe") is None, timeout_s=30)
    shown = {
        "the resource, its children and pods": faults.kubectl(
            "get", "kvcache,deployments,daemonsets,statefulsets,configmaps,pods", "-o", "yaml"
        ),
        "events": faults.kubectl("get", "events", "-o", "yaml"),
        "the operator's log": installation.kubectl(
            "logs", "deployment/larder-operator", "--all-containers"
        ),
        "the logs of its pods": faults.kubectl(
            "logs", "-l", "app.kubernetes.io/instance=keyed", "--tail=-1", "--all-containers"
        ),
    }
    assert "name=keyed" in shown["the operator's log"]
    for where, text in shown.items():
        assert API_KEY not in text, where


def test_image_that_cannot_be_pulled_calls_for_a_person_and_heals(faults):
    faults.until_condition("image", "Stalled", "True", "ImagePullFailed", timeout_s=90)
    faults.patch("kvcache", "image", {"spec": {"engine": {"image": reference("stand-in")}}})
    faults.until_condition("image", "EnginesReady", "True", timeout_s=90)
    faults.until_condition("image", "Stalled", "False", timeout_s=30)


def test_engine_without_the_connector(faults):
    faults.until_condition("bare", "EnginesReady", "True", timeout_s=90)
    faults.until_condition(
        "bare",
        "TransferVerified",
        "False",
        "ConnectorMissing",
        timeout_s=180,
        containing=["stand-in"],
    )


def test_redis_heals_when_its_secret_is_corrected(faults):
    faults.until_condition("password", "RedisReady", "True", timeout_s=180)


def test_redis_heals_when_its_authority_is_given(faults):
    condition = faults.until_condition("encrypted", "RedisReady", "True", timeout_s=90)
    assert "(TLS) answers" in condition["message"]


def test_engine_that_loaded_for_too_long(faults):
    faults.until_condition(
        "slow",
        "EnginesReady",
        "False",
        "StartupTimeout",
        timeout_s=180,
        containing=["within 120 s", "raise spec.engine.startupTimeoutSeconds"],
    )
