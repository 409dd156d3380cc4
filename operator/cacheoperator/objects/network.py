"""NetworkPolicies: who may open a connection to pods of a KVCache. Ingress alone; pure.

| pods | port | from |
| Redis | 6379 | the agents |
| agents | 7500 | the engines, the agents, and pods of the namespace with the label larder.dev/engine-of: NAME |
| agents | 7501 | the operator, scrapers |
| engines | 8000 | the router, the operator and its probe, scrapers; everybody where no router of ours stands in front |
| router | 8000 | everybody |
| router | 29000 | scrapers |

Scrapers are pods with the label app.kubernetes.io/name: prometheus in any namespace, and only with spec.podMonitor.
Policies add up: who needs more writes one more, beside these. Probes of the kubelet and port-forwards pass in any case.
"""

from __future__ import annotations

import copy

from cacheoperator import names
from cacheoperator.names import Component
from cacheoperator.objects.connection import ENGINE_OF_LABEL
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheservice.manifest import KVCacheManifest, RouterType

PROBE_COMPONENT = "probe"
"""app.kubernetes.io/component of the short-lived pod that verifies transfers with the engines' API key."""


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:
    """One policy for each component that there is."""
    operator = {
        "namespaceSelector": {
            "matchLabels": {"kubernetes.io/metadata.name": settings.operator_namespace}
        },
        "podSelector": {"matchLabels": {names.NAME_LABEL: settings.operator_name}},
    }
    scrapers: list[Object] = []
    if manifest.pod_monitor is not None:
        scrapers.append(
            {
                "namespaceSelector": {},
                "podSelector": {"matchLabels": {names.NAME_LABEL: "prometheus"}},
            }
        )
    agents = _pods(names.selector_labels(manifest.name, Component.CACHE))
    engines = [_pods(names.selector_labels(manifest.name, role)) for role in names.ENGINES]
    foreign_engines = _pods({ENGINE_OF_LABEL: manifest.name})
    rules = {
        Component.CACHE: [
            _rule([*engines, agents, foreign_engines], names.AGENT_PORT),
            _rule([operator, *scrapers], names.AGENT_HTTP_PORT),
        ]
    }
    if manifest.redis.embedded is not None:
        rules[Component.REDIS] = [_rule([agents], names.REDIS_PORT)]
    if manifest.decode is not None:
        # It has no name label: what selects our pods is not to select this one.
        probe = {names.INSTANCE_LABEL: manifest.name, names.COMPONENT_LABEL: PROBE_COMPONENT}
        router = _pods(names.selector_labels(manifest.name, Component.ROUTER))
        from_router = _rule([router, operator, _pods(probe), *scrapers], names.ENGINE_PORT)
        has_router = manifest.router.type is not RouterType.NONE
        rules[Component.DECODE] = [from_router if has_router else _rule([], names.ENGINE_PORT)]
        if manifest.prefill is not None:
            rules[Component.PREFILL] = rules[Component.DECODE]
        if has_router:
            rules[Component.ROUTER] = [_rule([], names.ROUTER_PORT)]
            if scrapers:
                rules[Component.ROUTER].append(_rule(scrapers, names.ROUTER_METRICS_PORT))
    return [_policy(manifest, refs, component, some) for component, some in rules.items()]


def _pods(labels: dict[str, str]) -> Object:
    return {"podSelector": {"matchLabels": labels}}


def _rule(peers: list[Object], port: int) -> Object:
    """No peers: from everywhere, also from outside of the cluster."""
    ports = [{"port": port, "protocol": "TCP"}]
    return {"from": peers, "ports": ports} if peers else {"ports": ports}


def _policy(
    manifest: KVCacheManifest, refs: Refs, component: Component, rules: list[Object]
) -> Object:
    name = names.workload_name(manifest.name, component)
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": names.metadata(manifest, refs.uid, name, component),
        "spec": {
            "podSelector": {"matchLabels": names.selector_labels(manifest.name, component)},
            "policyTypes": ["Ingress"],
            "ingress": copy.deepcopy(rules),
        },
    }
