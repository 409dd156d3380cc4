"""helm install, test, upgrade and uninstall of a release of our own, and what each leaves alone.

The release watches one namespace and has nothing outside namespaces but, for the last tests, the CRD. Its KVCache has a
Redis and agents without nodes, so that a second operator, which may watch the whole cluster, would do the same to it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_queries import labels_of, metrics_of, names_in, queries, samples_of
from live_cluster import (
    REPOSITORY,
    CommandFailed,
    Namespace,
    is_ready,
    kubectl,
    reference,
    run,
    until,
)

pytestmark = pytest.mark.timeout(600)

CHART = str(REPOSITORY / "charts" / "larder")
CRD = "kvcaches.larder.dev"
RELEASE = "larder"
KVCACHE = {
    "apiVersion": "larder.dev/v1alpha1",
    "kind": "KVCache",
    "metadata": {"name": "kept"},
    "spec": {"cache": {"cpu": "64Mi", "nodeSelector": {"larder.dev/nowhere": "true"}}},
}
CARRIED: dict[str, Any] = {
    "apiVersion": "larder.dev/v1alpha1",
    "kind": "KVCache",
    "metadata": {"name": "carried"},
    "spec": {
        "model": {"name": "stand-in", "path": "/nowhere"},
        "engine": {"device": "cpu", "image": reference("stand-in"), "sharedMemory": "16Mi"},
        "cache": {"cpu": "64Mi", "nodeSelector": {"larder.dev/nowhere": "true"}},
        "redis": {"external": {"address": "redis.nowhere.svc:6379"}},
        "router": {"type": "None"},
        "tls": {"mode": "Off"},
        "decode": {
            "replicas": 1,
            "template": {
                "spec": {
                    "containers": [
                        {"name": "vllm", "env": [{"name": "STAND_IN", "value": "ready"}]}
                    ]
                }
            },
        },
    },
}
"""With an engine that runs, and no Secret that two operators could make at the same time."""
OLD_VERSION = "0.0.9"
IMAGES = {
    "larder": "larder",
    "payload": "larder-payload",
    "engineCuda": "stand-in",
    "engineCpu": "engine-cpu",
    "redis": "redis",
    "routerSmg": "larder-router",
    "routerVllm": "larder-router",
}
VALUES: dict[str, Any] = {
    "images": {
        name: {
            "registry": os.environ.get("LARDER_E2E_REGISTRY", "localhost"),
            "repository": repository,
            "tag": "dev",
        }
        for name, repository in IMAGES.items()
    },
    "imagePullPolicy": "IfNotPresent",
    "crds": {"enabled": False},
    "rbac": {"aggregate": False},
    "operator": {"resyncSeconds": 30},
}


def helm(*args: str, values: dict[str, Any] | None = None, timeout_s: float = 180) -> str:
    if values is not None:
        args = (*args, "--values", "-")
    return run("helm", *args, stdin=yaml.safe_dump(values or {}), timeout_s=timeout_s)


@pytest.fixture(scope="module")
def places(request: pytest.FixtureRequest, cluster: None) -> Iterator[tuple[Namespace, Namespace]]:
    """The operator's namespace, under Pod Security `restricted`, and the one that it watches."""
    if not os.environ.get("LARDER_E2E_SHARED"):
        request.getfixturevalue("installation")  # brings the CRD
    prefix = os.environ.get("LARDER_E2E_PREFIX", "e2e")
    system, team = Namespace(f"{prefix}-chart-system"), Namespace(f"{prefix}-chart-team")
    kubectl("delete", "namespace", system.name, team.name, "--ignore-not-found", timeout_s=180)
    for namespace in (system, team):
        kubectl("create", "namespace", namespace.name)
    kubectl("label", "namespace", system.name, "pod-security.kubernetes.io/enforce=restricted")
    if not os.environ.get("LARDER_E2E_SHARED"):
        # Made by the operator of the whole cluster alone: two would each make a password at first.
        _make_kvcache(team)
    yield system, team
    kubectl("delete", "namespace", system.name, team.name, "--wait=false")


@pytest.fixture(scope="module")
def release(places: tuple[Namespace, Namespace]) -> Iterator[dict[str, Any]]:
    """The values of the release, which is installed and ready."""
    system, team = places
    values = {**VALUES, "watchNamespaces": [team.name]}
    helm(
        "install", RELEASE, CHART, "--namespace", system.name, "--wait", "--timeout", "90s", values=values,
    )  # fmt: skip
    yield values
    helm("uninstall", RELEASE, "--namespace", system.name, "--ignore-not-found", "--wait")


@pytest.fixture(scope="module")
def kept(places: tuple[Namespace, Namespace], release: dict[str, Any]) -> tuple[str, str, str]:
    """UIDs of a KVCache, of its Redis and of the Redis pod."""
    _, team = places
    _make_kvcache(team)
    return _uids(team)


def _make_kvcache(team: Namespace) -> None:
    """Or leave it as it is."""
    team.apply(KVCACHE)
    until(
        "Redis of the KVCache runs",
        lambda: is_ready(team.get("statefulset", "kept-redis")),
        timeout_s=90,
    )


def _uids(team: Namespace) -> tuple[str, str, str]:
    (pod,) = team.pods("kept", "redis")
    objects = (team.get("kvcache", "kept"), team.get("statefulset", "kept-redis"), pod)
    kvcache, workload, redis = (str(found["metadata"]["uid"]) for found in objects)
    return kvcache, workload, redis


def _uids_of_carried(team: Namespace) -> tuple[str, str, str]:
    """The Deployment's with its generation: a change of it has not replaced the pod yet."""
    (pod,) = team.pods("carried", "decode")
    objects = (team.get("kvcache", "carried"), team.get("deployment", "carried-decode"), pod)
    kvcache, workload, engine = (str(found["metadata"]["uid"]) for found in objects)
    return kvcache, f"{workload} {objects[1]['metadata']['generation']}", engine


def _package_of_an_old_version(folder: Path) -> str:
    """The chart as it may have been once: without a column and a field that it has now."""
    chart = folder / "larder"
    shutil.copytree(CHART, chart)
    about = chart / "Chart.yaml"
    text, count = re.subn(
        r"(?m)^(version|appVersion): .*$", rf"\1: {OLD_VERSION}", about.read_text()
    )
    assert count == 2
    about.write_text(text)
    source = chart / "files" / "kvcaches.yaml"
    crd = yaml.safe_load(source.read_text())
    _columns_of(crd).pop()
    spec = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["service"]["properties"]["annotations"]
    source.write_text(yaml.safe_dump(crd, sort_keys=False))
    helm("package", str(chart), "--destination", str(folder))
    return str(folder / f"larder-{OLD_VERSION}.tgz")


def _columns_of(crd: dict[str, Any]) -> list[Any]:
    columns: list[Any] = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    return columns


def _version_of(system: Namespace) -> str:
    labels = system.get("deployment", "larder-operator")["metadata"]["labels"]
    return str(labels["helm.sh/chart"]).removeprefix("larder-")


def _until_full_pass_of_another(system: Namespace, before: str) -> None:
    """Wait until an operator in another pod than `before` has been through all KVCaches."""
    until(
        "the new operator is ready",
        lambda: (
            _pod_of_operator(system) != before
            and is_ready(system.get("deployment", "larder-operator"))
        ),
        timeout_s=60,
    )
    until(
        "the new operator has made a full pass",
        lambda: "larder_operator_full_pass_duration_seconds 0.0\n" not in _operator_metrics(system),
        timeout_s=60,
    )


def _pod_of_operator(system: Namespace) -> str:
    selector = "app.kubernetes.io/name=larder-operator"
    (pod,) = [p for p in system.list("pods", selector) if "deletionTimestamp" not in p["metadata"]]
    return str(pod["metadata"]["name"])


def _operator_metrics(system: Namespace) -> str:
    pod = _pod_of_operator(system)
    return kubectl(
        "get", "--raw", f"/api/v1/namespaces/{system.name}/pods/{pod}:8080/proxy/metrics"
    )


def test_operator_starts_under_restricted_and_says_that_it_is_ready(
    places: tuple[Namespace, Namespace], release: dict[str, Any]
) -> None:
    system, _ = places
    assert is_ready(system.get("deployment", "larder-operator"))
    page = _operator_metrics(system)
    assert "larder_operator_lease_held 1.0" in page


def test_nothing_outside_namespaces_belongs_to_the_release(
    places: tuple[Namespace, Namespace], release: dict[str, Any]
) -> None:
    system, _ = places
    text = helm("get", "manifest", RELEASE, "--namespace", system.name)
    in_cluster = set(run("kubectl", "api-resources", "--namespaced=false", "-o", "name").split())
    assert "clusterroles.rbac.authorization.k8s.io" in in_cluster
    kinds = {
        line.split()[-1]
        for line in run(
            "kubectl", "api-resources", "--namespaced=false", "--no-headers"
        ).splitlines()
    }
    assert not kinds & {item["kind"] for item in yaml.safe_load_all(text) if item}


def test_no_request_of_the_operator_is_forbidden(
    places: tuple[Namespace, Namespace], kept: tuple[str, str, str]
) -> None:
    system, team = places
    until(
        "the operator has looked at the KVCache",
        lambda: "Accepted" in team.conditions("kept"),
        timeout_s=60,
    )
    page = _operator_metrics(system)
    assert 'larder_operator_api_requests_total{method="PATCH",status="200"}' in page
    # Nodes belong to no namespace, so a namespaced operator does not ask for them either.
    assert 'status="403"' not in page, [
        line for line in page.splitlines() if "api_requests" in line
    ]


def test_dashboard_asks_for_what_this_operator_serves(
    places: tuple[Namespace, Namespace], kept: tuple[str, str, str]
) -> None:
    """Names and labels; names alone where nothing has happened yet, as there are no labels then."""
    page = _operator_metrics(places[0])
    there, samples = names_in(page), samples_of(page)
    compared = 0
    for where, expression in queries("operator.json"):
        metrics = set(metrics_of(expression))
        assert metrics <= there, where
        if metrics <= set(samples):
            labels_of(expression, samples)
            compared += 1
    assert compared >= 8


def test_operator_of_the_whole_cluster_has_its_permissions(
    request: pytest.FixtureRequest, cluster: None
) -> None:
    if os.environ.get("LARDER_E2E_SHARED"):
        pytest.skip("LARDER_E2E_SHARED is set: no operator may watch the whole cluster")
    system = request.getfixturevalue("installation")
    helm("test", RELEASE, "--namespace", system.name, "--timeout", "90s")


def test_users_get_kvcaches_with_the_roles_of_the_cluster(
    request: pytest.FixtureRequest, places: tuple[Namespace, Namespace]
) -> None:
    if os.environ.get("LARDER_E2E_SHARED"):
        pytest.skip("LARDER_E2E_SHARED is set: the aggregated roles are not installed")
    request.getfixturevalue("installation")
    _, team = places
    may = {
        "view": {"get"},
        "edit": {"get", "create"},
        "admin": {"get", "create", "deletecollection"},
    }
    for role, expected in may.items():
        team.kubectl(
            "create", "rolebinding", f"a-{role}", f"--clusterrole={role}", f"--user=a-{role}"
        )
        for verb in sorted(may["admin"]):
            # The controller that aggregates takes a moment; `no` ends with 1.
            ask = ("auth", "can-i", verb, "kvcaches.larder.dev", f"--as=a-{role}")
            if verb in expected:
                until(
                    f"{role} may {verb}", lambda ask=ask: "yes" in team.kubectl(*ask), timeout_s=20
                )
            else:
                with pytest.raises(CommandFailed, match="no"):
                    team.kubectl(*ask)


def test_helm_test_proves_permissions_and_admission(
    places: tuple[Namespace, Namespace], release: dict[str, Any]
) -> None:
    system, _ = places
    helm("test", RELEASE, "--namespace", system.name, "--timeout", "90s")
    assert system.list("pods", "app.kubernetes.io/component=test") == []
    assert system.find("role", "larder-test") is None


def test_helm_test_names_what_is_missing(
    places: tuple[Namespace, Namespace], release: dict[str, Any]
) -> None:
    system, team = places
    role = team.get("role", "larder-operator")
    rules = [rule for rule in role["rules"] if rule["resources"] != ["kvcaches/status"]]
    assert len(rules) == len(role["rules"]) - 1
    team.patch("role", "larder-operator", {"rules": rules})
    try:
        with pytest.raises(CommandFailed):
            helm("test", RELEASE, "--namespace", system.name, "--timeout", "90s")
        log = system.kubectl("logs", "larder-test-permissions")
        assert f"not allowed: patch kvcaches/status.larder.dev in namespace {team.name}" in log
        assert "upgrade the chart with rbac.create=true" in log
    finally:
        team.patch("role", "larder-operator", {"rules": role["rules"]})
        system.delete("pod", "larder-test-permissions")


def test_upgrade_with_other_values_restarts_the_operator_alone(
    places: tuple[Namespace, Namespace], release: dict[str, Any], kept: tuple[str, str, str]
) -> None:
    system, team = places
    before = _pod_of_operator(system)
    values = {
        **release,
        "operator": {"resyncSeconds": 31, "podLabels": {"cost-centre": "kv"}},
        "dashboards": {"enabled": True},
    }
    helm(
        "upgrade", RELEASE, CHART, "--namespace", system.name, "--wait", "--timeout", "90s", values=values,
    )  # fmt: skip
    boards = system.get("configmap", "larder-dashboards")["data"]
    assert set(boards) == {"larder-agents.json", "larder-operator.json"}
    assert json.loads(boards["larder-agents.json"])["uid"] == "larder-agents"
    _until_full_pass_of_another(system, before)
    assert _uids(team) == kept


def test_unknown_value_is_refused_before_anything_is_changed(
    places: tuple[Namespace, Namespace], release: dict[str, Any]
) -> None:
    system, _ = places
    with pytest.raises(CommandFailed, match="replicas"):
        helm(
            "upgrade", RELEASE, CHART, "--namespace", system.name,
            values={**release, "operator": {"replicas": 2}},
        )  # fmt: skip
    history = json.loads(helm("history", RELEASE, "--namespace", system.name, "-o", "json"))
    assert all(revision["status"] != "failed" for revision in history)


@pytest.fixture(scope="module")
def old_release(
    places: tuple[Namespace, Namespace],
    release: dict[str, Any],
    kept: tuple[str, str, str],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[dict[str, Any]]:
    """A version before of the chart, installed with its CRD instead of the release; its values.

    The CRD is that of the cluster, narrowed by what nobody uses; afterwards it belongs to whom it belonged before.
    """
    system, _ = places
    crd = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
    package = _package_of_an_old_version(tmp_path_factory.mktemp("chart"))
    helm("uninstall", RELEASE, "--namespace", system.name, "--wait")
    values = {**release, "crds": {"enabled": True}}
    try:
        helm(
            "install", RELEASE, package, "--namespace", system.name, "--take-ownership", "--force-conflicts",
            "--wait", "--timeout", "90s", values=values,
        )  # fmt: skip
        yield values
    finally:
        _give_back_crd(crd["metadata"])


@pytest.fixture(scope="module")
def carried(
    places: tuple[Namespace, Namespace], old_release: dict[str, Any]
) -> tuple[str, str, str]:
    """UIDs of a KVCache that was made under the version before, of its engines' Deployment and of their pod."""
    _, team = places
    team.apply(CARRIED)
    until(
        "the engine runs",
        lambda: is_ready(team.get("deployment", "carried-decode")),
        timeout_s=90,
    )
    return _uids_of_carried(team)


def test_upgrade_from_the_version_before_keeps_what_runs(
    places: tuple[Namespace, Namespace],
    old_release: dict[str, Any],
    kept: tuple[str, str, str],
    carried: tuple[str, str, str],
) -> None:
    """The newer version brings its CRD and other default images, which exist nowhere: no engine takes one."""
    system, team = places
    assert _version_of(system) == OLD_VERSION
    old = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
    newer = yaml.safe_load(Path(CHART, "files", "kvcaches.yaml").read_text())
    assert _columns_of(old) == _columns_of(newer)[:-1]
    applied = {
        **CARRIED,
        "spec": {**CARRIED["spec"], "service": {"annotations": {"whose": "ours"}}},
    }
    with pytest.raises(CommandFailed, match=r"spec\.service\.annotations: field not declared"):
        team.apply(applied)

    images = {
        **old_release["images"],
        **{
            name: {**old_release["images"][name], "tag": "of-the-newer-version"}
            for name in ("payload", "engineCpu", "engineCuda")
        },
    }
    before = _pod_of_operator(system)
    helm(
        "upgrade", RELEASE, CHART, "--namespace", system.name, "--wait", "--timeout", "90s",
        values={**old_release, "images": images},
    )  # fmt: skip
    assert _version_of(system) != OLD_VERSION
    upgraded = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
    assert upgraded["metadata"]["uid"] == old["metadata"]["uid"]
    assert _columns_of(upgraded) == _columns_of(newer)
    _until_full_pass_of_another(system, before)
    assert _uids(team) == kept
    assert _uids_of_carried(team) == carried

    until("the new field is admitted", lambda: team.apply(applied) is None, timeout_s=20)
    until(
        "the new operator does what it says",
        lambda: (
            team.get("service", "carried")["metadata"].get("annotations", {}).get("whose") == "ours"
        ),
        timeout_s=30,
    )
    assert _uids_of_carried(team) == carried


def test_uninstall_keeps_crd_and_kvcaches_and_what_they_run(
    places: tuple[Namespace, Namespace],
    old_release: dict[str, Any],
    kept: tuple[str, str, str],
    carried: tuple[str, str, str],
) -> None:
    """Of a release that the CRD belongs to."""
    system, team = places
    crd = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
    assert crd["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
    assert crd["metadata"]["annotations"]["meta.helm.sh/release-namespace"] == system.name

    helm("uninstall", RELEASE, "--namespace", system.name, "--wait")

    assert system.find("deployment", "larder-operator") is None
    assert team.find("role", "larder-operator") is None
    left = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
    assert left["metadata"]["uid"] == crd["metadata"]["uid"]
    assert "deletionTimestamp" not in left["metadata"]
    assert _uids(team) == kept
    assert _uids_of_carried(team) == carried


def test_kvcache_goes_with_all_that_it_runs_also_without_operator(
    places: tuple[Namespace, Namespace], kept: tuple[str, str, str]
) -> None:
    """After the test above: nobody is there who could remove a finalizer."""
    _, team = places
    team.delete("kvcache", "kept")
    team.delete("kvcache", "carried")
    until(
        "everything of the KVCache is gone",
        lambda: (
            not team.list(
                "kvcaches,statefulsets,daemonsets,services,configmaps,secrets,pods",
                "app.kubernetes.io/instance in (kept, carried)",
            )
            and team.find("kvcache", "kept") is None
        ),
        timeout_s=60,
    )


def _give_back_crd(metadata: dict[str, Any]) -> None:
    """The file's content, with labels and annotations as they were: they say to Helm who owns it."""
    document = yaml.safe_load(Path(CHART, "files", "kvcaches.yaml").read_text())
    for field in ("labels", "annotations"):
        document["metadata"][field] = metadata.get(field, {})
    kubectl(
        "apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", "-",
        stdin=yaml.safe_dump(document),
    )  # fmt: skip
