"""The cache agents: DaemonSet NAME-cache, one agent per node, and Service NAME-cache to the agent of one's own node.

Invariants: the arena fits into the memory limit, so it can't be killed for what it was told to hold; the socket folder
of a node holds the sockets of this KVCache alone and opens to one group; TCP speaks TLS unless the manifest says Off;
passwords and keys are files, never in arguments or environment. One node at a time is replaced.
"""

from __future__ import annotations

from pathlib import Path

from cacheoperator import names, templates
from cacheoperator.names import Component
from cacheoperator.objects import placement, pods
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs, uses_shared_memory
from cacheoperator.settings import Settings
from cacheservice.commands.agents import (
    POD_DRAIN_S,
    WAIT_FOR_MEMORY_S,
    AgentSite,
    IndexFiles,
    ServerTls,
    agent_argv,
    agent_memory_bytes,
    max_shards,
)
from cacheservice.manifest import ExternalRedis, KVCacheManifest, TlsMode, UpdateStrategy

GRACE_S = 30
"""Above POD_DRAIN_S."""
CPU_REQUEST = "100m"
"""What an idle agent and its heartbeats need; copying takes what is free, so there is no limit."""
_PREFAULT_S_PER_GIB = 4
"""Three times what a GiB of arena takes on a slow machine."""
_STARTUP_PERIOD_S = 5

_PREPARE_FOLDER = """\
import os
os.chown("{folder}", 0, {group})
os.chmod("{folder}", 0o770)
"""
"""By Python, which the agent's image has for sure, unlike a shell."""


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:
    """Service and DaemonSet. Raises TemplateRefused for spec.cache.template."""
    return [_service(manifest, refs), _daemon_set(manifest, refs, settings)]


def tls_secret_name(manifest: KVCacheManifest, role: str) -> str | None:
    """Secret with tls.crt, tls.key and ca.crt for `role` agent, engine or operator; None with spec.tls.mode Off."""
    match manifest.tls.mode:
        case TlsMode.AUTO:
            return names.leaf_name(manifest.name, role)
        case TlsMode.SECRET:
            return manifest.tls.secret_name
        case TlsMode.OFF:
            return None


def _service(manifest: KVCacheManifest, refs: Refs) -> Object:
    """How engines on the stream path find the agent of their node. A node without a ready agent drops the connection,
    which the connector takes for a miss."""
    name = names.workload_name(manifest.name, Component.CACHE)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(manifest, refs.uid, name, Component.CACHE),
        "spec": {
            "type": "ClusterIP",
            "internalTrafficPolicy": "Local",
            "selector": names.selector_labels(manifest.name, Component.CACHE),
            "ports": [pods.service_port("grpc", names.AGENT_PORT)],
        },
    }


def _daemon_set(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> Object:
    name = names.workload_name(manifest.name, Component.CACHE)
    pod: Object = {
        "metadata": {"labels": names.labels(manifest.name, Component.CACHE)},
        "spec": _pod_spec(manifest, refs, settings),
    }
    strategy: Object = {"type": str(manifest.cache.update_strategy)}
    if manifest.cache.update_strategy is UpdateStrategy.ROLLING_UPDATE:
        strategy["rollingUpdate"] = {"maxUnavailable": 1, "maxSurge": 0}
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": names.metadata(manifest, refs.uid, name, Component.CACHE),
        "spec": {
            "selector": {"matchLabels": names.selector_labels(manifest.name, Component.CACHE)},
            "updateStrategy": strategy,
            "template": templates.overlaid(
                pod, manifest.cache.template, where="spec.cache.template",
                owned=pods.owned(pod, "agent", "command", "args", "volumeMounts"),
            ),
        },
    }  # fmt: skip


def _pod_spec(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> Object:
    cache = manifest.cache
    group = cache.socket_group
    image = pods.image(cache.image or settings.images.agent, settings)
    spec: Object = {
        **pods.pull_secrets(manifest),
        **placement.placement(manifest),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": GRACE_S,
        "securityContext": {
            **pods.pod_security(names.UID_AGENT, group=group),
            "supplementalGroups": [group],
        },
        "containers": [_container(manifest, refs, image)],
        "volumes": _volumes(manifest, refs),
    }
    if uses_shared_memory(manifest, refs):
        # The kubelet makes the folder for root alone, and fsGroup leaves hostPath as it is.
        spec["initContainers"] = [
            {
                "name": "socket-dir",
                **image,
                "command": ["python3", "-c"],
                "args": [_PREPARE_FOLDER.format(folder=names.SOCKET_MOUNT, group=group)],
                "resources": {
                    "requests": {"cpu": "10m", "memory": "32Mi"},
                    "limits": {"memory": "64Mi"},
                },
                "securityContext": {
                    "runAsUser": 0,
                    "runAsGroup": 0,
                    "runAsNonRoot": False,
                    "allowPrivilegeEscalation": False,
                    "readOnlyRootFilesystem": True,
                    "capabilities": {"drop": ["ALL"], "add": ["CHOWN"]},
                },
                "terminationMessagePolicy": "FallbackToLogsOnError",
                "volumeMounts": [{"name": "sockets", "mountPath": names.SOCKET_MOUNT}],
            }
        ]
    return spec


def _container(manifest: KVCacheManifest, refs: Refs, image: Object) -> Object:
    cache = manifest.cache
    argv = agent_argv(cache, _site(manifest, refs), python="python3")
    memory = pods.quantity(agent_memory_bytes(cache))
    start_s = WAIT_FOR_MEMORY_S + 60 + _PREFAULT_S_PER_GIB * (cache.cpu_bytes >> 30)
    return {
        "name": "agent",
        **image,
        "command": list(argv[:4]),
        "args": list(argv[4:]),
        "env": [
            pods.field_env("POD_IP", "status.podIP"),
            pods.field_env("NODE_NAME", "spec.nodeName"),
        ],
        "ports": [
            {"name": "grpc", "containerPort": names.AGENT_PORT, "protocol": "TCP"},
            {"name": "http", "containerPort": names.AGENT_HTTP_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": CPU_REQUEST, "memory": memory},
            "limits": {"memory": memory},
        },
        "startupProbe": pods.http_probe(
            "/readyz", port="http", period_s=_STARTUP_PERIOD_S, failures=int(start_s // _STARTUP_PERIOD_S),
        ),
        "readinessProbe": pods.http_probe("/readyz", port="http", period_s=5, failures=2),
        "livenessProbe": pods.http_probe("/healthz", port="http", period_s=10, failures=6),
        "securityContext": pods.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(manifest),
    }  # fmt: skip


def _site(manifest: KVCacheManifest, refs: Refs) -> AgentSite:
    redis = manifest.redis
    if redis.external is not None:
        scheme = "redis" if redis.external.tls is None else "rediss"
        index = f"{scheme}://{redis.external.address}/0"
    else:
        host = f"{names.workload_name(manifest.name, Component.REDIS)}.{manifest.namespace}.svc"
        index = f"redis://{host}:{names.REDIS_PORT}/0"
    tls = None
    if manifest.tls.mode is not TlsMode.OFF:
        folder = Path(names.TLS_MOUNT)
        tls = ServerTls(
            cert=folder / "tls.crt", key=folder / "tls.key", ca=folder / "ca.crt",
            server_name=names.dns_san(manifest.name, manifest.namespace),
            owner=names.owner_of_uri(manifest.name, manifest.namespace),
        )  # fmt: skip
    return AgentSite(
        node="$(NODE_NAME)",
        socket_dir=Path(names.SOCKET_MOUNT),
        http=f"0.0.0.0:{names.AGENT_HTTP_PORT}",
        index=index,
        key_prefix=names.key_prefix(refs.uid),
        listen=f"0.0.0.0:{names.AGENT_PORT}",
        # In brackets for the sake of IPv6; the agent takes any host in them.
        advertise=f"[$(POD_IP)]:{names.AGENT_PORT}",
        tls=tls,
        index_files=_index_files(redis.external),
        socket_group=manifest.cache.socket_group,
        max_shards=max_shards(manifest.cache),
        wait_for_memory_s=WAIT_FOR_MEMORY_S,
        drain_s=POD_DRAIN_S,
    )


def _index_files(external: ExternalRedis | None) -> IndexFiles:
    auth, tls = Path(names.REDIS_AUTH_MOUNT), Path(names.REDIS_TLS_MOUNT)
    if external is None:
        return IndexFiles(password=auth / "password")
    has_credentials = external.credentials_secret_name is not None
    has_ca = external.tls is not None and external.tls.ca is not None
    has_client = external.tls is not None and external.tls.client_secret_name is not None
    return IndexFiles(
        username=auth / "username" if has_credentials else None,
        password=auth / "password" if has_credentials else None,
        ca=tls / "ca.crt" if has_ca else None,
        cert=tls / "tls.crt" if has_client else None,
        key=tls / "tls.key" if has_client else None,
        server_name=external.tls.server_name if external.tls else None,
    )


def _volumes(manifest: KVCacheManifest, refs: Refs) -> list[Object]:
    sockets: Object = {"name": "sockets"}
    if uses_shared_memory(manifest, refs):
        path = f"{names.SOCKET_ROOT}/{manifest.namespace}/{manifest.name}"
        sockets["hostPath"] = {"path": path, "type": "DirectoryOrCreate"}
    else:
        sockets["emptyDir"] = {}
    volumes = [sockets]
    if (secret := tls_secret_name(manifest, "agent")) is not None:
        volumes.append(pods.secret_volume("tls", secret))
    return [*volumes, *_index_volumes(manifest)]


def _index_volumes(manifest: KVCacheManifest) -> list[Object]:
    external = manifest.redis.external
    if external is None:
        return [
            pods.secret_volume(
                "redis-auth", names.redis_password_name(manifest.name), ("password",)
            )
        ]
    volumes = []
    if external.credentials_secret_name is not None:
        # Two sources, so that a Secret or password that is missing holds the pod up with FailedMount, and a user that
        # is missing does not.
        secret = external.credentials_secret_name
        volumes.append(
            _projected("redis-auth", [
                {"name": secret, "items": [{"key": "password", "path": "password"}]},
                {"name": secret, "items": [{"key": "username", "path": "username"}], "optional": True},
            ])
        )  # fmt: skip
    tls_sources: list[Object] = []
    if external.tls is not None and external.tls.ca is not None:
        ca = external.tls.ca
        tls_sources.append({"name": ca.name, "items": [{"key": ca.key, "path": "ca.crt"}]})
    if external.tls is not None and external.tls.client_secret_name is not None:
        keys = [{"key": key, "path": key} for key in ("tls.crt", "tls.key")]
        tls_sources.append({"name": external.tls.client_secret_name, "items": keys})
    if tls_sources:
        volumes.append(_projected("redis-tls", tls_sources))
    return volumes


def _projected(name: str, secrets: list[Object]) -> Object:
    sources = [{"secret": secret} for secret in secrets]
    return {"name": name, "projected": {"defaultMode": pods.SECRET_MODE, "sources": sources}}


def _mounts(manifest: KVCacheManifest) -> list[Object]:
    mounts: list[Object] = [{"name": "sockets", "mountPath": names.SOCKET_MOUNT}]
    if manifest.tls.mode is not TlsMode.OFF:
        mounts.append({"name": "tls", "mountPath": names.TLS_MOUNT, "readOnly": True})
    places = {"redis-auth": names.REDIS_AUTH_MOUNT, "redis-tls": names.REDIS_TLS_MOUNT}
    return mounts + [
        {"name": volume["name"], "mountPath": places[volume["name"]], "readOnly": True}
        for volume in _index_volumes(manifest)
    ]
