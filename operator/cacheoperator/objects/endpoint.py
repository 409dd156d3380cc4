"""Service NAME, the OpenAI endpoint: it leads to the router, or, without one, to the decode engines. Pure.

A cache for engines of others has no endpoint.
"""

from __future__ import annotations

from cacheoperator import names
from cacheoperator.names import Component
from cacheoperator.objects import pods
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheservice.manifest import KVCacheManifest, RouterType


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:  # noqa: ARG001 - all builders
    """The Service, or nothing."""
    if manifest.decode is None:
        return []
    metadata = names.metadata(manifest, refs.uid, manifest.name)
    if manifest.service.annotations:
        metadata["annotations"] = dict(manifest.service.annotations)
    return [
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata,
            "spec": {
                "type": str(manifest.service.type),
                "selector": names.selector_labels(manifest.name, entrance(manifest)),
                # Routers and engines both name their port so.
                "ports": [pods.service_port("http", names.SERVICE_PORT)],
            },
        }
    ]


def entrance(manifest: KVCacheManifest) -> Component:
    """Whose pods take the requests of clients."""
    return Component.DECODE if manifest.router.type is RouterType.NONE else Component.ROUTER
