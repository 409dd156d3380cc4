"""What was read of one KVCache, and reading it. `Seen` is plain JSON values: the views are made of it alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheoperator.names import COMPONENT_LABEL, Component, selector

from cacheservice.kubectl.agents import AgentAnswer, ask_agents
from cacheservice.kubectl.cluster import ClusterError, Forbidden, Kubectl

WORKLOADS = "deployments.apps,daemonsets.apps,statefulsets.apps"


@dataclass(frozen=True, slots=True)
class Seen:
    """One KVCache: the resource, its pods and workloads as the API server has them, and what its agents said.

    `unread` are sentences about what could not be read and why.
    """

    resource: Mapping[str, Any]
    pods: tuple[Mapping[str, Any], ...] = ()
    workloads: tuple[Mapping[str, Any], ...] = ()
    agents: tuple[AgentAnswer, ...] = ()
    unread: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return str(self.resource["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.resource["metadata"]["namespace"])

    def pods_of(self, *components: Component) -> list[Mapping[str, Any]]:
        """Pods of these components, by name."""
        own = [pod for pod in self.pods if component_of(pod) in components]
        return sorted(own, key=lambda pod: str(pod["metadata"]["name"]))

    def workload(self, component: Component) -> Mapping[str, Any] | None:
        """The Deployment, DaemonSet or StatefulSet of a component."""
        return next((one for one in self.workloads if component_of(one) == component), None)


def component_of(child: Mapping[str, Any]) -> str:
    """Its component label, "" when it has none."""
    return str((child["metadata"].get("labels") or {}).get(COMPONENT_LABEL, ""))


def read(kubectl: Kubectl, name: str, query: Mapping[str, str] | None = None) -> Seen:
    """Read all of it. What is forbidden or fails is said in `unread`; only the resource itself is needed.

    Raises ConfigError or ClusterError. `query` goes to the agents' /statusz.
    """
    resource = kubectl.kvcache(name)
    namespace = str(resource["metadata"]["namespace"])
    unread: list[str] = []

    def listed(kinds: str) -> tuple[dict[str, Any], ...]:
        try:
            return kubectl.items("get", kinds, "-l", selector(name), namespace=namespace)
        except Forbidden as error:
            unread.append(str(error))
            return ()

    pods, workloads = listed("pods"), listed(WORKLOADS)
    caches = [pod for pod in pods if component_of(pod) == Component.CACHE]
    try:
        agents = ask_agents(
            kubectl, namespace, sorted(caches, key=lambda pod: str(pod["metadata"]["name"])), query or {}
        )  # fmt: skip
    except ClusterError as error:
        unread.append(str(error))
        agents = ()
    return Seen(resource, pods, workloads, agents, tuple(unread))
