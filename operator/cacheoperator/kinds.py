"""The kinds that the operator makes and reads, and where the API server keeps them. Pure tables.

Invariant: `child_kinds` are all kinds that `render` may make; Secrets and PodMonitors are among them but never listed
or watched.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheoperator.names import API_VERSION, KIND, PLURAL


@dataclass(frozen=True, slots=True)
class Kind:
    """`api_version` is `v1` or `group/version`; `plural` is its word in URLs."""

    api_version: str
    kind: str
    plural: str
    is_namespaced: bool = True

    @property
    def group(self) -> str:
        """ "" for the core group."""
        group, _, version = self.api_version.rpartition("/")
        return group if version else ""

    @property
    def version(self) -> str:
        return self.api_version.rpartition("/")[2]

    def path(self, namespace: str | None = None, name: str | None = None, sub: str = "") -> str:
        """URL path of the collection, an object or its subresource `sub`."""
        parts = ["/apis" if self.group else "/api", self.api_version]
        if self.is_namespaced and namespace is not None:
            parts += ["namespaces", namespace]
        parts.append(self.plural)
        parts += [part for part in (name, sub) if part]
        return "/".join(parts)


KVCACHE = Kind(API_VERSION, KIND, PLURAL)
POD = Kind("v1", "Pod", "pods")
NODE = Kind("v1", "Node", "nodes", is_namespaced=False)
NAMESPACE = Kind("v1", "Namespace", "namespaces", is_namespaced=False)
EVENT = Kind("v1", "Event", "events")
SECRET = Kind("v1", "Secret", "secrets")
SERVICE = Kind("v1", "Service", "services")
CONFIG_MAP = Kind("v1", "ConfigMap", "configmaps")
DEPLOYMENT = Kind("apps/v1", "Deployment", "deployments")
DAEMON_SET = Kind("apps/v1", "DaemonSet", "daemonsets")
STATEFUL_SET = Kind("apps/v1", "StatefulSet", "statefulsets")
REPLICA_SET = Kind("apps/v1", "ReplicaSet", "replicasets")
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision", "controllerrevisions")
LEASE = Kind("coordination.k8s.io/v1", "Lease", "leases")
POD_MONITOR = Kind("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")

watched_children = (
    DEPLOYMENT,
    DAEMON_SET,
    STATEFUL_SET,
    SERVICE,
    CONFIG_MAP,
    Kind("v1", "ServiceAccount", "serviceaccounts"),
    Kind("rbac.authorization.k8s.io/v1", "Role", "roles"),
    Kind("rbac.authorization.k8s.io/v1", "RoleBinding", "rolebindings"),
    Kind("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies"),
    Kind("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets"),
)
workloads = (DEPLOYMENT, DAEMON_SET, STATEFUL_SET)
child_kinds = (SECRET, *watched_children, POD_MONITOR)

_by_name = {
    (kind.api_version, kind.kind): kind
    for kind in (
        *child_kinds,
        KVCACHE,
        POD,
        NODE,
        NAMESPACE,
        EVENT,
        REPLICA_SET,
        CONTROLLER_REVISION,
        LEASE,
    )
}


def kind_of(obj: Mapping[str, Any]) -> Kind:
    """The table's row for an object with apiVersion and kind; KeyError is our bug."""
    return _by_name[obj["apiVersion"], obj["kind"]]
