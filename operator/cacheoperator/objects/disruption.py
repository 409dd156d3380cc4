"""PodDisruptionBudgets: a drain takes one pod of a role at a time. Pure.

For prefill, decode and router. Not for agents: `kubectl drain` leaves DaemonSets alone, so a budget would hold for
nobody. Not for Redis: its one pod must be free to move, and entries lost are misses.
"""

from __future__ import annotations

from cacheoperator import names
from cacheoperator.names import Component
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheservice.manifest import KVCacheManifest, RouterType


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:  # noqa: ARG001 - all builders
    """One for each role that there is."""
    components = []
    if manifest.prefill is not None:
        components.append(Component.PREFILL)
    if manifest.decode is not None:
        components.append(Component.DECODE)
        if manifest.router.type is not RouterType.NONE:
            components.append(Component.ROUTER)
    return [_budget(manifest, refs, component) for component in components]


def _budget(manifest: KVCacheManifest, refs: Refs, component: Component) -> Object:
    name = names.workload_name(manifest.name, component)
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": names.metadata(manifest, refs.uid, name, component),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": names.selector_labels(manifest.name, component)},
            # An engine that never gets ready must not hold up the drain of its node.
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }
