"""PodMonitors for Prometheus' operator: NAME for agents and engines, NAME-router for the router. Pure.

Only with spec.podMonitor, and only where the API server knows the kind.
"""

from __future__ import annotations

from cacheoperator import names
from cacheoperator.names import Component
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheservice.manifest import KVCacheManifest, RouterType

_ROLES = (Component.CACHE, Component.PREFILL, Component.DECODE)


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:  # noqa: ARG001 - all builders
    """Two, one or none."""
    if manifest.pod_monitor is None or not refs.pod_monitor_known:
        return []
    ours = {names.NAME_LABEL: names.APP_NAME, names.INSTANCE_LABEL: manifest.name}
    has_role = {
        "key": names.COMPONENT_LABEL,
        "operator": "In",
        "values": [str(role) for role in _ROLES],
    }
    selector = {"matchLabels": ours, "matchExpressions": [has_role]}
    name, router = names.pod_monitor_names(manifest.name)
    monitors = [_monitor(manifest, refs, name, None, selector, "http")]
    if manifest.decode is not None and manifest.router.type is not RouterType.NONE:
        selector = {"matchLabels": names.selector_labels(manifest.name, Component.ROUTER)}
        monitors.append(_monitor(manifest, refs, router, Component.ROUTER, selector, "metrics"))
    return monitors


def _monitor(
    manifest: KVCacheManifest, refs: Refs, name: str, component: Component | None, selector: Object, port: str
) -> Object:  # fmt: skip
    assert manifest.pod_monitor is not None, "asked before"
    metadata = names.metadata(manifest, refs.uid, name, component)
    # Ours win: the operator finds its objects by them.
    metadata["labels"] = {**manifest.pod_monitor.labels, **names.labels(manifest.name, component)}
    return {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PodMonitor",
        "metadata": metadata,
        "spec": {
            "selector": selector,
            "podTargetLabels": [names.INSTANCE_LABEL, names.COMPONENT_LABEL],
            "podMetricsEndpoints": [{"port": port, "path": "/metrics"}],
        },
    }
