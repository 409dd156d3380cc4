"""Whether pods of a namespace may mount the socket folder (hostPath): decided before anything is applied.

Pod Security `baseline` and `restricted` forbid it. The namespace's enforce label says so at once; where it is missing
or `privileged`, the cluster's default or another admission rule may still forbid it, so a pod with the folder is
created as a dry run, and, when that is refused, one without it: only a difference between the two is about the folder.

The verdict is written as annotation larder.dev/shared-memory on the agents' DaemonSet: `DIGEST allowed` or
`DIGEST refused REASON`, where DIGEST is of the label. So a pass over unchanged resources, and a restart of the
operator, makes no dry run; a change of the label asks again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from cacheoperator import names
from cacheoperator.cluster import Cluster
from cacheoperator.errors import ClusterError, Forbidden, Unreachable
from cacheoperator.kinds import NAMESPACE
from cacheoperator.refs import SharedMemoryVerdict
from cacheoperator.settings import Settings
from cacheservice.manifest import KVCacheManifest, Transport

ANNOTATION = "larder.dev/shared-memory"
ENFORCE_LABEL = "pod-security.kubernetes.io/enforce"

allowed = SharedMemoryVerdict(is_allowed=True, reason="")
longest_reason = 400


def label_digest(label: str) -> str:
    """Of the enforce label's value; "" when there is none."""
    return hashlib.sha256(f"enforce={label}".encode()).hexdigest()[:12]


def verdict_of_label(label: str) -> SharedMemoryVerdict | None:
    """What the enforce label alone decides; None when a dry run must."""
    if label in ("baseline", "restricted"):
        return SharedMemoryVerdict(
            is_allowed=False,
            reason=f'Pod Security "{label}" of the namespace forbids hostPath volumes',
        )
    return None


def write_annotation(label: str, verdict: SharedMemoryVerdict) -> str:
    """The value under which the verdict is remembered."""
    if verdict.is_allowed:
        return f"{label_digest(label)} allowed"
    return f"{label_digest(label)} refused {verdict.reason[:longest_reason]}"


def read_annotation(label: str, value: str) -> SharedMemoryVerdict | None:
    """The remembered verdict; None when it was made under another label, or is none."""
    digest, _, rest = value.partition(" ")
    verdict, _, reason = rest.partition(" ")
    if digest != label_digest(label):
        return None
    if verdict == "allowed":
        return allowed
    return SharedMemoryVerdict(is_allowed=False, reason=reason) if verdict == "refused" else None


async def enforce_label(cluster: Cluster, namespace: str) -> str:
    """Value of the namespace's enforce label, "" for none, or when it may not be read: the dry run decides then."""
    try:
        found = await cluster.get(NAMESPACE, None, namespace)
    except Forbidden:
        return ""
    labels = ((found or {}).get("metadata") or {}).get("labels") or {}
    return str(labels.get(ENFORCE_LABEL, ""))


def known_verdict(
    manifest: KVCacheManifest, label: str, remembered: str
) -> SharedMemoryVerdict | None:
    """What needs no dry run; `remembered` is the DaemonSet's annotation, "" for none."""
    if manifest.cache.transport is Transport.STREAM:
        return SharedMemoryVerdict(is_allowed=False, reason="spec.cache.transport is Stream")
    return verdict_of_label(label) or read_annotation(label, remembered)


async def ask(
    cluster: Cluster, manifest: KVCacheManifest, settings: Settings
) -> SharedMemoryVerdict:
    """The verdict by dry runs."""
    refusal = await _refusal(cluster, probe_pod(manifest, settings, has_folder=True))
    if refusal is None or await _refusal(cluster, probe_pod(manifest, settings, has_folder=False)):
        return allowed
    return SharedMemoryVerdict(is_allowed=False, reason=refusal[:longest_reason])


def probe_pod(
    manifest: KVCacheManifest, settings: Settings, *, has_folder: bool
) -> Mapping[str, Any]:
    """A pod for a dry run: like an agent's as far as admission cares, with the socket folder or without."""
    image = manifest.cache.image or settings.images.agent
    resources = {
        "requests": {"cpu": "1m", "memory": "1Mi"},
        "limits": {"cpu": "1m", "memory": "1Mi"},
    }
    security = {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    spec: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "restartPolicy": "Never",
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": names.UID_AGENT,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [
            {"name": "agent", "image": image, "resources": resources, "securityContext": security}
        ],
    }
    if has_folder:
        path = f"{names.SOCKET_ROOT}/{manifest.namespace}/{manifest.name}"
        spec["volumes"] = [
            {"name": "sockets", "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
        ]
        spec["initContainers"] = [
            {
                "name": "socket-dir",
                "image": image,
                "resources": resources,
                "securityContext": {
                    **security,
                    "runAsUser": 0,
                    "runAsNonRoot": False,
                    "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
                },
                "volumeMounts": [{"name": "sockets", "mountPath": names.SOCKET_MOUNT}],
            }
        ]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{manifest.name}-admission-check",
            "namespace": manifest.namespace,
            "labels": {names.MANAGED_BY_LABEL: names.MANAGED_BY},
        },
        "spec": spec,
    }


async def _refusal(cluster: Cluster, pod: Mapping[str, Any]) -> str | None:
    """Why the API server refuses `pod`; None when it takes it."""
    try:
        await cluster.create(pod, is_dry_run=True)
    except Unreachable:
        raise
    except ClusterError as error:
        return error.message
    return None
