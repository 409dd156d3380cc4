"""What all pods of ours have in common: Pod Security `restricted`, pull secrets, sizes, volumes of Secrets. Pure.

Called by the builders of workloads. Invariants: no container of these runs as root, with capabilities or with a
writable root; what a container needs to write is an emptyDir; Secrets are mounted whole, never by subPath (a subPath
is never refreshed), and readable for the pod's own group alone.
"""

from __future__ import annotations

from typing import Any

from cacheoperator import names
from cacheoperator.settings import Settings
from cacheoperator.templates import Owned
from cacheservice.manifest import KVCacheManifest

Object = dict[str, Any]

SECRET_MODE = 0o440
"""For root and the pod's fsGroup. Written out, as the API server's own default would let everyone read."""


def quantity(num_bytes: int) -> str:
    """Bytes as Kubernetes writes them itself, rounded up to whole MiB: `1Gi`, not `1024Mi`."""
    mebibytes = -(-num_bytes // (1 << 20))
    return f"{mebibytes}Mi" if mebibytes % 1024 else f"{mebibytes // 1024}Gi"


def container_security() -> Object:
    """securityContext of a container that passes `restricted`."""
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def pod_security(uid: int, *, group: int | None = None) -> Object:
    """securityContext of a pod whose containers run as `uid`. `group` may read its Secrets; None: its own."""
    return {
        "runAsNonRoot": True,
        "runAsUser": uid,
        "runAsGroup": uid,
        "fsGroup": uid if group is None else group,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


_SELECTOR_LABELS = (names.NAME_LABEL, names.INSTANCE_LABEL, names.COMPONENT_LABEL)


def pull_secrets(manifest: KVCacheManifest) -> Object:
    """The field imagePullSecrets of a pod, or nothing."""
    names = manifest.image_pull_secrets
    return {"imagePullSecrets": [{"name": name} for name in names]} if names else {}


def image(name: str, settings: Settings) -> Object:
    """The fields of a container that say what to run."""
    policy = settings.image_pull_policy
    return {"image": name} if policy is None else {"image": name, "imagePullPolicy": policy}


def field_env(name: str, path: str) -> Object:
    """A variable with a fact of the pod itself, as `status.podIP`."""
    return {"name": name, "valueFrom": {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}}


def secret_env(name: str, secret: str, key: str) -> Object:
    """A variable with one key of a Secret: for programs that can't read a file."""
    return {"name": name, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def secret_volume(name: str, secret: str, keys: tuple[str, ...] = ()) -> Object:
    """A volume with the Secret, or with some of its keys as files of the same name."""
    source: Object = {"secretName": secret, "defaultMode": SECRET_MODE}
    if keys:
        source["items"] = [{"key": key, "path": key} for key in keys]
    return {"name": name, "secret": source}


def service_port(name: str, port: int) -> Object:
    """A port of a Service, to the port of that name in its pods."""
    return {"name": name, "port": port, "protocol": "TCP", "targetPort": name}


def http_probe(path: str, *, port: str, period_s: int, failures: int, timeout_s: int = 5) -> Object:
    """A probe by GET. Every field that the API server would fill in otherwise stays out."""
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period_s,
        "timeoutSeconds": timeout_s,
        "failureThreshold": failures,
    }


def owned(pod: Object, container: str, *fields: str) -> tuple[Owned, ...]:
    """What a user's template may not change in the pod template `pod`: the labels that select its pods, `fields` of
    its container, its volumes, its supplemental groups, and what its init containers do. Lists of `fields` and groups
    may grow."""
    keep = "Larder sets it from the other fields of this resource: keep what it has"
    spec = pod["spec"]
    parts = [
        Owned(("metadata", "labels", label), "the workload finds its pods by it: remove it here")
        for label in pod["metadata"]["labels"]
        if label in _SELECTOR_LABELS
    ]
    parts += [
        Owned(("spec", "containers", container, field), keep, may_grow=True) for field in fields
    ]
    parts += [Owned(("spec", "volumes", volume["name"]), keep) for volume in spec["volumes"]]
    if "supplementalGroups" in spec["securityContext"]:
        parts.append(Owned(("spec", "securityContext", "supplementalGroups"), keep, may_grow=True))
    for init in spec.get("initContainers", ()):
        parts += [
            Owned(("spec", "initContainers", init["name"], field), keep)
            for field in ("command", "args", "securityContext", "volumeMounts")
        ]
    return tuple(parts)
