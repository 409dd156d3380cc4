"""KVCaches whose engines are stand-ins (images/stand-in), so that each costs seconds: what tests of faults apply."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from live_cluster import Document, Namespace, reference

NODE_ONE = {"larder.dev/e2e": "one"}
NODE_TWO = {"larder.dev/e2e": "two"}
SILENT = "10.96.200.200:6379"
"""An address of no Service."""


def kvcache(name: str, *changes: Mapping[str, Any]) -> Document:
    """A resource that costs little: one agent and one engine, a stand-in that is ready at once, both on node1."""
    document: Document = {
        "apiVersion": "larder.dev/v1alpha1",
        "kind": "KVCache",
        "metadata": {"name": name},
        "spec": {
            "model": {"name": "stand-in", "path": "/nowhere"},
            "engine": {"device": "cpu", "image": reference("stand-in"), "sharedMemory": "16Mi"},
            "cache": {"cpu": "64Mi", "nodeSelector": dict(NODE_ONE)},
            "redis": {"embedded": {"memory": "64Mi"}},
            "router": {"type": "None"},
            "decode": {"template": stand_in("ready")},
        },
    }
    for change in changes:
        _merge(document["spec"], change)
    return document


def external(address: str, secret: str = "", more: Mapping[str, Any] | None = None) -> Document:
    reference_to = {"credentialsSecretRef": {"name": secret}} if secret else {}
    given = {"address": address, **reference_to, **(more or {})}
    return {"redis": {"embedded": None, "external": given}}


def engines_alone(name: str, *changes: Mapping[str, Any]) -> Document:
    """One without agents and without a Redis of its own, where they do not matter."""
    elsewhere = {"cache": {"nodeSelector": {"rack": "seven"}}}
    return kvcache(name, elsewhere, external(SILENT), *changes)


def cache_alone(name: str, *changes: Mapping[str, Any]) -> Document:
    """One without engines, where they do not matter."""
    return kvcache(name, *changes, {"decode": None})


def stand_in(mode: str, env: Mapping[str, str] | None = None, **container: Any) -> Document:
    """A template for an engine: what the stand-in does, and on which node."""
    told = {"STAND_IN": mode, **(env or {})}
    return {
        "spec": {
            "nodeSelector": dict(NODE_ONE),
            "containers": [
                {
                    "name": "vllm",
                    "env": [{"name": name, "value": value} for name, value in told.items()],
                    "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}},
                    **container,
                }
            ],
        }
    }


def _merge(into: Document, change: Mapping[str, Any]) -> None:
    for key, value in change.items():
        if value is None:
            into.pop(key, None)
        elif isinstance(value, Mapping) and isinstance(into.get(key), dict) and key != "template":
            _merge(into[key], value)
        else:
            into[key] = copy.deepcopy(value)


@contextmanager
def applied(namespace: Namespace, document: Document) -> Iterator[str]:
    """The resource, for as long as a test needs it."""
    name = document["metadata"]["name"]
    namespace.apply(document)
    try:
        yield name
    finally:
        namespace.delete("kvcache", name)


def problem(namespace: Namespace, name: str, reason: str) -> Document:
    """The entry of status.problems with this reason."""
    found = [
        one
        for one in namespace.get("kvcache", name)["status"]["problems"]
        if one["reason"] == reason
    ]
    assert found, namespace.get("kvcache", name)["status"]["problems"]
    return dict(found[0])


@contextmanager
def secret(namespace: Namespace, name: str, content: Mapping[str, str]) -> Iterator[str]:
    """A user's Secret, for as long as a test needs it."""
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": name},
            "stringData": dict(content),
        }
    )
    try:
        yield name
    finally:
        namespace.delete("secret", name)


def credentials(
    namespace: Namespace, name: str, username: str, password: str
) -> AbstractContextManager[str]:
    """A user's Secret with what Redis asks for."""
    return secret(namespace, name, {"username": username, "password": password})
