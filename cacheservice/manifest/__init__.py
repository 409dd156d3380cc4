"""KVCache manifests: the text that Kubernetes takes, read by the same rules without Kubernetes.

`document` reads YAML with positions, `validate` and `rules` check it against the schema in `kvcaches.yaml`, `resource`
is what comes out. Called by `larder up` and by the operator. What the fields mean for processes or pods is theirs.
"""

from cacheservice.manifest.load import load_manifest, manifest_from_object, parse_manifest
from cacheservice.manifest.notices import local_notices
from cacheservice.manifest.problems import ManifestRefused, Notice, Position, Problem
from cacheservice.manifest.resource import (
    Cache,
    Device,
    EmbeddedRedis,
    Engine,
    Eviction,
    ExternalRedis,
    KVCacheManifest,
    Model,
    PodMonitor,
    Redis,
    RedisTls,
    Role,
    Router,
    RouterType,
    SecretKey,
    Service,
    ServiceType,
    Tls,
    TlsMode,
    Transport,
    UpdateStrategy,
    Verify,
    size_bytes,
)

__all__ = [
    "load_manifest", "parse_manifest", "manifest_from_object", "local_notices",
    "ManifestRefused", "Problem", "Notice", "Position",
    "KVCacheManifest", "Model", "Role", "Engine", "Cache", "Redis", "EmbeddedRedis", "ExternalRedis", "RedisTls",
    "Router", "Service", "Tls", "PodMonitor", "SecretKey",
    "Device", "Eviction", "Transport", "UpdateStrategy", "RouterType", "ServiceType", "TlsMode", "Verify",
    "size_bytes",
]  # fmt: skip
