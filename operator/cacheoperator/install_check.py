"""`helm test`: is the operator installed so that it can work? Two questions to the API server, each a pod of the chart.

`permissions` runs under the operator's own account and asks for every verb of `NEEDED`; `admission` has an account that
may create KVCaches and makes two dry runs: the minimal resource must come back with defaults, and one that only a CEL
rule can refuse must be refused in the rule's words. Nothing is stored. Prints a line per fault; exit code 1 with any.

Invariant: `NEEDED` is what the operator uses, no more; tests compare it with the chart's rules and with the kinds that
`render` makes. Run by charts/larder/templates/tests/.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from kubernetes import client, config

from cacheoperator.names import API_VERSION, GROUP, KIND, PLURAL, VERSION


class Scope(StrEnum):
    """Where a permission is needed."""

    WATCHED = "watched"
    """In each namespace that is watched, or in all."""
    CLUSTER = "cluster"
    """Only when the whole cluster is watched."""
    LEASE = "lease"
    """Where the Lease lies: in each watched namespace, or, for the whole cluster, in the operator's own."""


@dataclass(frozen=True, slots=True)
class Permission:
    """Verbs on one resource. `resource` may have a subresource: `kvcaches/status`."""

    group: str
    resource: str
    verbs: tuple[str, ...]
    scope: Scope = Scope.WATCHED


_READ = ("get", "list", "watch")
_OWN = (*_READ, "create", "patch", "delete")

NEEDED = (
    Permission(GROUP, "kvcaches", ("list", "watch")),
    Permission(GROUP, "kvcaches/status", ("patch",)),
    Permission("apps", "deployments", _OWN),
    Permission("apps", "daemonsets", _OWN),
    Permission("apps", "statefulsets", _OWN),
    Permission("apps", "replicasets", ("list",)),
    Permission("apps", "controllerrevisions", ("list",)),
    Permission("", "services", _OWN),
    Permission("", "configmaps", _OWN),
    Permission("", "serviceaccounts", _OWN),
    Permission("networking.k8s.io", "networkpolicies", _OWN),
    Permission("policy", "poddisruptionbudgets", _OWN),
    Permission("rbac.authorization.k8s.io", "roles", _OWN),
    Permission("rbac.authorization.k8s.io", "rolebindings", _OWN),
    # Never watched: their kind comes and goes with another product.
    Permission("monitoring.coreos.com", "podmonitors", ("get", "create", "patch", "delete")),
    Permission("", "secrets", ("get", "create", "patch")),
    # Reading is what the router's Role gives away. Making: the dry run that tells whether pods may share memory, and
    # the short-lived pod that asks engines with an API key for the proof of transfer (spec.verify: Probe).
    Permission("", "pods", (*_READ, "create", "delete")),
    Permission("", "events", ("get", "list", "create", "patch")),
    Permission("", "namespaces", ("get",)),
    Permission("", "nodes", ("list", "watch"), Scope.CLUSTER),
    # Namespaces that have an operator of their own are left to it.
    Permission("coordination.k8s.io", "leases", ("get",), Scope.CLUSTER),
    Permission("coordination.k8s.io", "leases", ("get", "create", "update"), Scope.LEASE),
)

MINIMAL: Mapping[str, Any] = {
    "apiVersion": API_VERSION,
    "kind": KIND,
    "metadata": {"name": "larder-install-check"},
    "spec": {"model": {"name": "Qwen/Qwen3-0.6B"}, "prefill": {}, "decode": {}},
}
"""Like examples/minimal.yaml, under a name that nobody uses."""

REFUSED: Mapping[str, Any] = {
    **MINIMAL,
    "spec": {"model": {"name": "Qwen/Qwen3-0.6B"}, "prefill": {}},
}
"""Its schema is right; only a CEL rule refuses prefill without decode."""
REFUSAL = "spec.prefill needs spec.decode"

_SERVED_WITHIN_S = 30.0
"""How long a CRD that was just made may take until it is served."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0 when all is well, 1 with faults, which are printed."""
    parser = argparse.ArgumentParser(
        prog="python3 -m cacheoperator.install_check", description=__doc__
    )
    questions = parser.add_subparsers(dest="question", required=True)
    permissions = questions.add_parser(
        "permissions", help="may this account do what the operator does?"
    )
    permissions.add_argument("--operator-namespace", required=True, help="where the operator runs")
    permissions.add_argument(
        "--namespace",
        action="append",
        default=[],
        help="watched namespace; none: the whole cluster",
    )
    admission = questions.add_parser(
        "admission", help="is the CRD served, with defaults and rules?"
    )
    admission.add_argument("--namespace", required=True, help="where the dry runs are made")
    options = parser.parse_args(argv)

    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
        config.load_incluster_config()
    else:
        config.load_kube_config()
    if options.question == "permissions":
        faults = [
            f"not allowed: {question}"
            for question in questions_for(options.namespace, options.operator_namespace)
            if not _is_allowed(question)
        ]
        remedy = (
            "upgrade the chart with rbac.create=true, or bind these verbs to the account yourself"
        )
    else:
        faults = list(_admission_faults(options.namespace))
        remedy = "upgrade the chart with crds.enabled=true, or apply its files/kvcaches.yaml"
    for fault in faults:
        print(fault)  # noqa: T201 - the pod's log is the result
    print(f"{options.question}: {f'{len(faults)} faults; {remedy}' if faults else 'ok'}")  # noqa: T201
    return 1 if faults else 0


@dataclass(frozen=True, slots=True)
class Question:
    """One verb on one resource in one namespace; "" for all of them."""

    verb: str
    group: str
    resource: str
    namespace: str

    def __str__(self) -> str:
        where = f"in namespace {self.namespace}" if self.namespace else "in every namespace"
        return f"{self.verb} {self.resource}{f'.{self.group}' if self.group else ''} {where}"


def questions_for(namespaces: Sequence[str], operator_namespace: str) -> Iterator[Question]:
    """Every permission that an operator of `namespaces` (none: the whole cluster) needs."""
    for permission in NEEDED:
        if permission.scope is Scope.CLUSTER:
            wanted: Sequence[str] = () if namespaces else ("",)
        elif permission.scope is Scope.LEASE:
            wanted = namespaces or (operator_namespace,)
        else:
            wanted = namespaces or ("",)
        for namespace in wanted:
            for verb in permission.verbs:
                yield Question(verb, permission.group, permission.resource, namespace)


def _is_allowed(question: Question) -> bool:
    resource, _, subresource = question.resource.partition("/")
    review = client.V1SelfSubjectAccessReview(
        spec=client.V1SelfSubjectAccessReviewSpec(
            resource_attributes=client.V1ResourceAttributes(
                verb=question.verb,
                group=question.group,
                resource=resource,
                subresource=subresource,
                namespace=question.namespace,
            )
        )
    )
    answer = client.AuthorizationV1Api().create_self_subject_access_review(review)
    return answer.status is not None and bool(answer.status.allowed)


def _admission_faults(namespace: str) -> Iterator[str]:
    code, answer = _dry_run(namespace, MINIMAL)
    deadline = time.monotonic() + _SERVED_WITHIN_S
    while code == 404 and time.monotonic() < deadline:
        time.sleep(1.0)
        code, answer = _dry_run(namespace, MINIMAL)
    if code == 404:
        yield f"{API_VERSION} {KIND} is not served: is the CRD {PLURAL}.{GROUP} installed?"
        return
    if code != 201:
        yield f"the minimal {KIND} was refused ({code}): {answer}"
        return
    if "cpu" not in answer["spec"].get("cache", {}):
        yield f"the minimal {KIND} came back without defaults: the CRD {PLURAL}.{GROUP} is not Larder's"
    code, answer = _dry_run(namespace, REFUSED)
    if code != 422 or REFUSAL not in str(answer):
        yield f"spec.prefill without spec.decode was not refused by its rule ({code}): CEL rules are not in force"


def _dry_run(namespace: str, body: Mapping[str, Any]) -> tuple[int, Any]:
    """Status code, and the object as it would be stored or the API server's message."""
    try:
        made = client.CustomObjectsApi().create_namespaced_custom_object(
            GROUP, VERSION, namespace, PLURAL, dict(body), dry_run="All", field_validation="Strict"
        )
    except client.ApiException as error:
        return error.status, str(error.body or error.reason)
    return 201, made


if __name__ == "__main__":
    sys.exit(main())
