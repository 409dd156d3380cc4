"""An operator that lacks a permission, and two that meet in one namespace: who works there, and what is said.

The release of this file watches one namespace. The operator of the whole cluster, where this run has one, was there
first and may do what the release's may not: whatever it did would show.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from live_cluster import CommandFailed, Namespace, is_ready, kubectl, until
from test_chart_install import CHART, RELEASE, VALUES, helm

pytestmark = pytest.mark.timeout(400)

PREFIX = os.environ.get("LARDER_E2E_PREFIX", "e2e")
IS_SHARED = bool(os.environ.get("LARDER_E2E_SHARED"))
NOWHERE = {"larder.dev/e2e-nowhere": "true"}
ROLE = "larder-operator"


def kvcache(name: str) -> dict[str, object]:
    """Redis, and agents that find no node."""
    return {
        "apiVersion": "larder.dev/v1alpha1",
        "kind": "KVCache",
        "metadata": {"name": name},
        "spec": {"cache": {"cpu": "64Mi", "nodeSelector": NOWHERE}},
    }


@pytest.fixture(scope="module")
def places(definition: dict[str, object]) -> Iterator[tuple[Namespace, Namespace]]:
    """The namespace of the release, and the one that it watches."""
    system, team = Namespace(f"{PREFIX}-own-system"), Namespace(f"{PREFIX}-own-team")
    kubectl("delete", "namespace", system.name, team.name, "--ignore-not-found", timeout_s=180)
    for namespace in (system, team):
        kubectl("create", "namespace", namespace.name)
    yield system, team
    kubectl("delete", "namespace", system.name, team.name, "--wait=false")


@pytest.fixture(scope="module")
def team(places: tuple[Namespace, Namespace]) -> Iterator[Namespace]:
    """The namespace that the release watches, and where it works."""
    system, team = places
    helm(
        "install", RELEASE, CHART, "--namespace", system.name, "--wait", "--timeout", "90s",
        values={**VALUES, "watchNamespaces": [team.name]},
    )  # fmt: skip
    yield team
    helm("uninstall", RELEASE, "--namespace", system.name, "--ignore-not-found", "--wait")


def may_not(namespace: Namespace, verb: str, resource: str) -> list[dict[str, object]]:
    """Take a permission of the namespace's Role away; gives the rules as they were."""
    rules = namespace.get("role", ROLE)["rules"]
    changed = []
    for rule in rules:
        if resource in rule["resources"] and verb in rule["verbs"]:
            others = [name for name in rule["resources"] if name != resource]
            verbs = [name for name in rule["verbs"] if name != verb]
            changed += [{**rule, "resources": others}] if others else []
            changed += [{**rule, "resources": [resource], "verbs": verbs}]
        else:
            changed.append(rule)
    assert changed != rules, f"the chart's Role has no {verb} {resource}"
    namespace.patch("role", ROLE, {"rules": changed})
    return list(rules)


def test_permission_that_is_missing_is_named_and_heals(team: Namespace) -> None:
    rules = may_not(team, "patch", "statefulsets")
    team.apply(kvcache("denied"))
    condition = team.until_condition(
        "denied", "Accepted", "False", "Forbidden",
        containing=[f"cannot patch statefulsets.apps in {team.name}", "upgrade the chart"],
    )  # fmt: skip
    assert team.conditions("denied")["Ready"]["reason"] == "Forbidden"
    problems = team.get("kvcache", "denied")["status"]["problems"]
    assert ("statefulset/denied-redis", "Forbidden") in [
        (problem["object"], problem["reason"]) for problem in problems
    ]
    (event, *_) = until("an event", lambda: team.events("denied", "Forbidden"), timeout_s=15)
    assert event["message"] == condition["message"]
    assert team.find("daemonset", "denied-cache"), "all that may be made is made"
    assert team.find("statefulset", "denied-redis") is None
    team.patch("role", ROLE, {"rules": rules})
    team.until_condition("denied", "Accepted", "True", timeout_s=60)
    assert team.find("statefulset", "denied-redis")


@pytest.fixture(scope="module")
def everywhere(request: pytest.FixtureRequest) -> Namespace:
    """Where the operator of the whole cluster runs."""
    if IS_SHARED:
        pytest.skip("LARDER_E2E_SHARED is set: no operator may watch the whole cluster")
    return Namespace(request.getfixturevalue("installation").name)


def test_operator_of_the_cluster_leaves_a_namespace_to_its_own(
    team: Namespace, places: tuple[Namespace, Namespace], everywhere: Namespace
) -> None:
    """It came first. Then it is restarted, and comes later. Then the other one goes."""
    system, _ = places
    may_not(team, "patch", "statefulsets")
    holder = str(team.get("lease", ROLE)["spec"]["holderIdentity"])
    assert holder.startswith(operator_pod(system))
    team.apply(kvcache("left"))
    stays_off = f"another operator works here, staying off namespace={team.name} holder={holder}"
    until("the first says so", lambda: stays_off in log_of(everywhere), timeout_s=60)
    team.until_condition("left", "Accepted", "False", "Forbidden")

    before = operator_pod(everywhere)
    everywhere.delete("pod", before)
    until(
        "the later one says so",
        lambda: operator_pod(everywhere) != before and stays_off in log_of(everywhere),
        timeout_s=90,
    )
    until("it works", lambda: is_ready(everywhere.get("deployment", ROLE)), timeout_s=60)
    until(
        "it has been through all KVCaches",
        lambda: "full pass took_s=" in log_of(everywhere),
        timeout_s=60,
    )
    assert team.find("statefulset", "left-redis") is None
    assert team.conditions("left")["Accepted"]["reason"] == "Forbidden"

    helm("uninstall", RELEASE, "--namespace", system.name, "--wait")
    # It might have been a restart, which is waited for.
    team.until_condition("left", "Accepted", "True", timeout_s=150)
    assert team.find("statefulset", "left-redis")
    assert f"the other operator went namespace={team.name}" in log_of(everywhere)


def operator_pod(namespace: Namespace) -> str:
    """The newest that is not being deleted. CommandFailed while there is none."""
    pods = [
        pod
        for pod in namespace.list("pods", "app.kubernetes.io/name=larder-operator")
        if "deletionTimestamp" not in pod["metadata"]
    ]
    if not pods:
        raise CommandFailed(f"no operator in {namespace.name}")
    return str(max(pods, key=lambda pod: pod["metadata"]["creationTimestamp"])["metadata"]["name"])


def log_of(namespace: Namespace) -> str:
    """Of the operator there, as it runs now."""
    return namespace.kubectl("logs", operator_pod(namespace))
