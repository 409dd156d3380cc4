"""What `render` needs beside the manifest: facts of the cluster, read by the edge before it renders. Values only.

Invariant: the same manifest, refs and settings give the same objects, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cacheservice.manifest import KVCacheManifest, Transport


@dataclass(frozen=True, slots=True)
class SharedMemoryVerdict:
    """Whether pods of this namespace may mount the socket folder (hostPath). `reason` is for status.transportReason."""

    is_allowed: bool
    reason: str


@dataclass(frozen=True, slots=True)
class ImagesInUse:
    """What an engine workload's pod template names now: kept until the template changes anyway.

    `template_digest` is that of the pod template without these images (annotation larder.dev/template on the workload,
    not on its pods); `upgrade` is the value of the annotation larder.dev/upgrade on the KVCache, when it is newer than
    what the workload has seen.
    """

    engine_image: str
    payload_image: str | None
    template_digest: str


@dataclass(frozen=True, slots=True)
class KeyPair:
    """PEM, both."""

    certificate: str
    key: str = field(repr=False)


@dataclass(frozen=True, slots=True)
class TlsMaterial:
    """Certificates of this KVCache as they are to be in Secrets. `authority.plan` decides them; see there.

    `authority_data` is the whole data of the authority's Secret (strings, not base64); `trusted` is the PEM bundle of
    all authorities that are trusted now; `leaves` by role: agent, engine.
    """

    authority_data: Mapping[str, str] = field(repr=False)
    trusted: str
    leaves: Mapping[str, KeyPair]


@dataclass(frozen=True, slots=True)
class Refs:
    """Facts for one KVCache. Secrets here are of our own making, never users'."""

    uid: str
    generation: int
    shared_memory: SharedMemoryVerdict
    pod_monitor_known: bool = False
    """Whether the API server serves monitoring.coreos.com/v1 PodMonitor."""
    images_in_use: Mapping[str, ImagesInUse] = field(default_factory=dict)
    """By component, prefill and decode; absent for a workload that does not exist."""
    live_replicas: Mapping[str, int] = field(default_factory=dict)
    """By component: `replicas` of the live workload where our field manager still owns it and the manifest does not set
    it any more: applied once more without force, so that the number stays while the field is handed over."""
    redis_password: str = field(default="", repr=False)
    """Of the embedded Redis; made by the edge when its Secret is missing."""
    router_key: str = field(default="", repr=False)
    tls: TlsMaterial | None = None
    """None with spec.tls.mode Off or Secret."""
    upgrade: str = ""
    """Value of the annotation larder.dev/upgrade of the KVCache (`kubectl larder upgrade` sets it to a new stamp)."""
    live_upgrades: Mapping[str, str] = field(default_factory=dict)
    """By component: the upgrade stamp that the live workload was last rendered for."""


def uses_shared_memory(manifest: KVCacheManifest, refs: Refs) -> bool:
    """Whether engines and agents share the socket folder; otherwise bytes go by stream over TCP.

    `transport: SharedMemory` is taken at its word: where the folder is forbidden its pods are rejected, and status says
    so; only Auto falls back.
    """
    if manifest.cache.transport is Transport.AUTO:
        return refs.shared_memory.is_allowed
    return manifest.cache.transport is Transport.SHARED_MEMORY
