"""From a KVCache to all objects that it needs: the builders of `objects/` put together and in order. Pure.

Invariants: the same manifest, refs and settings give the same objects, to the byte; every object belongs to the KVCache
by an owner reference; no two have the same kind and name; nothing of the operator's version is in a pod template. What
a user's template does wrong is a refusal, and leaves out the objects of the builder that met it: then nothing of theirs
is applied, and nothing that exists may be pruned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from cacheoperator.names import Component
from cacheoperator.objects import (
    agents,
    certificates,
    connection,
    disruption,
    endpoint,
    engines,
    monitor,
    network,
    redis,
    router,
)
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheoperator.templates import TemplateRefused
from cacheservice.manifest import KVCacheManifest

Object = dict[str, Any]
Builder = Callable[[KVCacheManifest, Refs, Settings], list[Object]]

BUILDERS: tuple[Builder, ...] = (
    certificates.build,
    redis.build,
    agents.build,
    connection.build,
    partial(engines.build_role, component=Component.PREFILL),
    partial(engines.build_role, component=Component.DECODE),
    router.build,
    endpoint.build,
    disruption.build,
    network.build,
    monitor.build,
)
APPLY_ORDER = (
    "Secret",
    "ConfigMap",
    "ServiceAccount",
    "Role",
    "RoleBinding",
    "Service",
    "NetworkPolicy",
    "PodDisruptionBudget",
    "StatefulSet",
    "DaemonSet",
    "Deployment",
    "PodMonitor",
)
"""What pods need to start comes before them; agents come before engines."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """`objects` in the order in which they are to be applied; `refusals` are (reason, message) for Accepted=False."""

    objects: tuple[Object, ...]
    refusals: tuple[tuple[str, str], ...] = ()


def render(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> Rendered:
    """Everything that `manifest` needs."""
    objects: list[Object] = []
    refusals: list[tuple[str, str]] = []
    for build in BUILDERS:
        try:
            objects += build(manifest, refs, settings)
        except TemplateRefused as refused:
            refusals.append((refused.reason, refused.message))
    # Stable: within a kind the builders' order stands, as leaves before their authority (see certificates).
    objects.sort(key=lambda item: APPLY_ORDER.index(item["kind"]))
    return Rendered(tuple(objects), tuple(refusals))
