"""helm install, test, upgrade and uninstall of a release of our own, and what each leaves alone.

The release watches one namespace and has nothing outside namespaces but, for one test, the CRD. Its KVCache has a Redis
and agents without nodes, so that a second operator, which may watch the whole cluster, would do the same to it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from dashboard_queries import labels_of, metrics_of, names_in, queries, samples_of
from live_cluster import REPOSITORY, CommandFailed, Namespace, is_ready, kubectl, run, until

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
    until(
        "the new operator is ready",
        lambda: (
            _pod_of_operator(system) != before
            and is_ready(system.get("deployment", "larder-operator"))
        ),
        timeout_s=60,
    )
    boards = system.get("configmap", "larder-dashboards")["data"]
    assert set(boards) == {"larder-agents.json", "larder-operator.json"}
    assert json.loads(boards["larder-agents.json"])["uid"] == "larder-agents"
    # The new operator has been through all KVCaches, and nothing of them is another.
    until(
        "the new operator has made a full pass",
        lambda: "larder_operator_full_pass_duration_seconds 0.0\n" not in _operator_metrics(system),
        timeout_s=60,
    )
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


def test_uninstall_keeps_crd_and_kvcaches_and_what_they_run(
    places: tuple[Namespace, Namespace],
    release: dict[str, Any],
    kept: tuple[str, str, str],
    tmp_path: Path,
) -> None:
    """The release takes over the CRD, which lacks a column as an older one might, brings it up to date, and goes."""
    system, team = places
    values = {**release, "crds": {"enabled": True}}
    crd = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
    owner = crd["metadata"].get("annotations", {})
    columns = crd["spec"]["versions"][0]["additionalPrinterColumns"]
    path = "/spec/versions/0/additionalPrinterColumns"
    older = [{"op": "replace", "path": path, "value": columns[:-1]}]
    kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps(older))
    try:
        helm(
            "upgrade", RELEASE, CHART, "--namespace", system.name, "--take-ownership", "--force-conflicts",
            "--wait", "--timeout", "90s", values=values,
        )  # fmt: skip
        upgraded = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
        assert upgraded["spec"]["versions"][0]["additionalPrinterColumns"] == columns
        assert upgraded["metadata"]["uid"] == crd["metadata"]["uid"]
        assert upgraded["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"
        assert _uids(team) == kept

        helm("uninstall", RELEASE, "--namespace", system.name, "--wait")

        assert system.find("deployment", "larder-operator") is None
        assert team.find("role", "larder-operator") is None
        left = json.loads(kubectl("get", "crd", CRD, "-o", "json"))
        assert left["metadata"]["uid"] == crd["metadata"]["uid"]
        assert "deletionTimestamp" not in left["metadata"]
        assert _uids(team) == kept
    finally:
        _give_back_crd(owner)


def test_kvcache_goes_with_all_that_it_runs_also_without_operator(
    places: tuple[Namespace, Namespace], kept: tuple[str, str, str]
) -> None:
    """After the test above: nobody is there who could remove a finalizer."""
    _, team = places
    team.delete("kvcache", "kept")
    until(
        "everything of the KVCache is gone",
        lambda: (
            not team.list(
                "kvcaches,statefulsets,daemonsets,services,configmaps,secrets,pods",
                "app.kubernetes.io/instance=kept",
            )
            and team.find("kvcache", "kept") is None
        ),
        timeout_s=60,
    )


def _give_back_crd(owner: dict[str, str]) -> None:
    """Annotations as they were, and the file's content; the next owner is whoever had it before."""
    names = (
        "helm.sh/resource-policy",
        "meta.helm.sh/release-name",
        "meta.helm.sh/release-namespace",
    )
    changes = [f"{name}={owner[name]}" if name in owner else f"{name}-" for name in names]
    kubectl("annotate", "crd", CRD, "--overwrite", *changes)
    kubectl(
        "apply", "--server-side", "--force-conflicts", "--field-manager=helm", "-f", f"{CHART}/files/kvcaches.yaml",
    )  # fmt: skip
