"""Names, labels and owner of everything that belongs to a KVCache. Pure; the one place where they are made.

Invariants: selectors are name + instance + component and never change; the owner reference makes Kubernetes collect
all children when the KVCache goes; names fit into 63 characters (a KVCache's name has at most 40).
"""

from __future__ import annotations

from enum import StrEnum

from cacheservice.manifest import KVCacheManifest

API_VERSION = "larder.dev/v1alpha1"
KIND = "KVCache"
GROUP, VERSION, PLURAL = "larder.dev", "v1alpha1", "kvcaches"
FIELD_MANAGER = "larder-operator"
MANAGED_BY = "larder-operator"
PART_OF = "larder"
APP_NAME = "larder"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
INSTANCE_LABEL = "app.kubernetes.io/instance"
COMPONENT_LABEL = "app.kubernetes.io/component"
NAME_LABEL = "app.kubernetes.io/name"

AGENT_PORT = 7500
"""gRPC over TCP: engines on the stream path, and other agents."""
AGENT_HTTP_PORT = 7501
"""Probes, metrics, statusz of an agent."""
ENGINE_PORT = 8000
ROUTER_PORT = 8000
ROUTER_METRICS_PORT = 29000
REDIS_PORT = 6379
SERVICE_PORT = 8000

SOCKET_ROOT = "/run/larder"
"""On the node: SOCKET_ROOT/NAMESPACE/NAME, one folder per KVCache."""
SOCKET_MOUNT = "/run/larder"
"""In pods. Short: the path of a unix socket has at most 107 bytes."""
TLS_MOUNT = "/etc/larder/tls"
REDIS_AUTH_MOUNT = "/etc/larder/redis"
REDIS_TLS_MOUNT = "/etc/larder/redis-tls"

UID_AGENT, UID_ENGINE, UID_REDIS, UID_ROUTER = 7071, 7072, 7073, 7074
"""Users of our containers when an image does not insist on its own; agents and engines differ on purpose."""


class Component(StrEnum):
    """app.kubernetes.io/component, and the suffix of the workload's name."""

    REDIS = "redis"
    CACHE = "cache"
    PREFILL = "prefill"
    DECODE = "decode"
    ROUTER = "router"


ENGINES = (Component.PREFILL, Component.DECODE)


def workload_name(name: str, component: Component) -> str:
    """`demo-prefill`: also of the component's Service, ServiceAccount, PodDisruptionBudget and NetworkPolicy."""
    return f"{name}-{component}"


def pod_monitor_names(name: str) -> tuple[str, str]:
    """For agents and engines, and for the router."""
    return name, workload_name(name, Component.ROUTER)


def connection_name(name: str) -> str:
    """ConfigMap for engines that others deploy."""
    return f"{name}-connection"


def redis_password_name(name: str) -> str:
    """Secret of our making: key `password`."""
    return f"{name}-redis-password"


def authority_name(name: str) -> str:
    """Secret of our making with the authority's key and certificates; mounted nowhere."""
    return f"{name}-authority"


def leaf_name(name: str, role: str) -> str:
    """Secret of our making with tls.crt, tls.key, ca.crt for `role` agent or engine."""
    return f"{name}-{role}-tls"


def router_key_name(name: str) -> str:
    """Secret of our making: key `control-plane-key` of the router."""
    return f"{name}-router-key"


def dns_san(name: str, namespace: str) -> str:
    """What clients check in an agent's certificate, by target-name override."""
    return f"agent.{name}.{namespace}.larder.internal"


def owner_of_uri(name: str, namespace: str) -> str:
    """OWNER in the URI SAN larder://NAMESPACE/NAME/ROLE."""
    return f"{namespace}/{name}"


def key_prefix(uid: str) -> str:
    """Of all keys of one KVCache in Redis: one ACL isolates it."""
    return f"larder:{uid.replace('-', '')[:8]}:"


def selector_labels(name: str, component: Component) -> dict[str, str]:
    """What selects the pods of one component; immutable."""
    return {NAME_LABEL: APP_NAME, INSTANCE_LABEL: name, COMPONENT_LABEL: str(component)}


def selector(name: str) -> str:
    """Selects the pods and workloads of one KVCache, of all components, in a list."""
    return f"{NAME_LABEL}={APP_NAME},{INSTANCE_LABEL}={name}"


def labels(name: str, component: Component | None = None) -> dict[str, str]:
    """Labels of every object; objects of the KVCache as a whole have no component."""
    chosen = {
        NAME_LABEL: APP_NAME,
        INSTANCE_LABEL: name,
        "app.kubernetes.io/part-of": PART_OF,
        MANAGED_BY_LABEL: MANAGED_BY,
    }
    if component is not None:
        chosen[COMPONENT_LABEL] = str(component)
    return chosen


def owner_reference(name: str, uid: str) -> dict[str, object]:
    """The KVCache as controller of a child. Not blocking: nothing of ours may hold up a deletion."""
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def metadata(
    manifest: KVCacheManifest, uid: str, name: str, component: Component | None = None
) -> dict[str, object]:
    """metadata of a child: name, namespace, labels, owner."""
    return {
        "name": name,
        "namespace": manifest.namespace,
        "labels": labels(manifest.name, component),
        "ownerReferences": [owner_reference(manifest.name, uid)],
    }
