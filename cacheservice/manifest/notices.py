"""What a KVCache asks for that one machine without Kubernetes does not do: accepted, and said.

Pure: a manifest in, sentences out. Called by `larder up` before it starts anything.
"""

from __future__ import annotations

from cacheservice.manifest.problems import Notice
from cacheservice.manifest.resource import Device, KVCacheManifest, TlsMode

only_on_kubernetes = (
    "spec.engine.image",
    "spec.engine.payloadImage",
    "spec.engine.pythonPath",
    "spec.engine.gpuResourceName",
    "spec.engine.runtimeClassName",
    "spec.engine.sharedMemory",
    "spec.engine.apiKeySecretRef",
    "spec.model.tokenSecretRef",
    "spec.model.volumeClaimName",
    "spec.prefill.rollout",
    "spec.prefill.template",
    "spec.decode.rollout",
    "spec.decode.template",
    "spec.imagePullSecrets",
    "spec.cache.image",
    "spec.cache.overhead",
    "spec.cache.socketGroup",
    "spec.cache.nodeSelector",
    "spec.cache.tolerations",
    "spec.cache.updateStrategy",
    "spec.cache.template",
    "spec.redis.embedded.image",
    "spec.redis.embedded.template",
    "spec.router.image",
    "spec.router.replicas",
    "spec.router.template",
    "spec.service",
    "spec.verify",
    "spec.podMonitor",
    "spec.paused",
)


def local_notices(manifest: KVCacheManifest) -> tuple[Notice, ...]:
    """The notices of the file, then those about running it as local processes."""
    notices = list(manifest.notices)
    if manifest.decode is not None and manifest.engine.device is Device.CUDA:
        notices.append(
            Notice(
                "spec.engine.device",
                "cuda needs a GPU and a CUDA build of vLLM on this machine; write device: cpu to run without",
            )
        )
    external = manifest.redis.external
    if external is not None and (external.credentials_secret_name or external.tls):
        notices.append(
            Notice(
                "spec.redis.external",
                "Secrets are not readable outside Kubernetes: give the whole URL with --redis (rediss://USER:PASSWORD@HOST:PORT)",
            )
        )
    if manifest.tls.mode is TlsMode.SECRET:
        notices.append(
            Notice(
                "spec.tls",
                "has no effect on one machine: everything listens on unix sockets or on loopback",
            )
        )
    notices += [
        Notice(path, "has no effect outside Kubernetes")
        for path in only_on_kubernetes
        if path in manifest.written
    ]
    return tuple(notices)
