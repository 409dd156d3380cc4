"""The router: Deployment NAME-router, the ServiceAccount, Role and RoleBinding by which it finds the engines' pods, and
the Secret with the key of its control plane. Nothing without engines, or with spec.router.type None. Pure.

It is ready while it runs, whatever its engines do: with no healthy prefill engine its own answer, 503 in OpenAI's
shape, is better than a Service without endpoints, which refuses the connection. (With no engine pod at all SMG answers
404, `model_not_found`.) Only its start waits for the first engine of each role.
"""

from __future__ import annotations

import base64

from cacheoperator import names, templates
from cacheoperator.names import Component
from cacheoperator.objects import pods
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheservice.commands.router import (
    CONTROL_KEY_ENV,
    ENGINE_KEY_ENV,
    LIVE_PATH,
    POD_GRACE_S,
    PRE_STOP_S,
    READY_PATH,
    VLLM_ROUTER_KEY_ENV,
    DiscoveredEngines,
    RouterSite,
    router_argv,
)
from cacheservice.manifest import KVCacheManifest, RouterType

CONTROL_KEY = "control-plane-key"
_HOME = "/tmp"  # noqa: S108 - an emptyDir of the pod
_STARTUP_PERIOD_S = 5
_STARTUP_S = 86_400
"""Engines may load for an hour, or be scaled to zero: a router that waits for them is in nobody's way, and one that is
killed for it looks like a fault."""


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:
    """Secret, ServiceAccount, Role, RoleBinding and Deployment, or nothing. Raises TemplateRefused for
    spec.router.template."""
    if manifest.decode is None or manifest.router.type is RouterType.NONE:
        return []
    return [
        *_control_key(manifest, refs),
        *_access(manifest, refs),
        _deployment(manifest, refs, settings),
    ]


def _control_key(manifest: KVCacheManifest, refs: Refs) -> list[Object]:
    if manifest.router.type is not RouterType.SMG:
        return []
    assert refs.router_key, "the edge makes a key before it renders"
    name = names.router_key_name(manifest.name)
    return [
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": names.metadata(manifest, refs.uid, name, Component.ROUTER),
            "type": "Opaque",
            "data": {CONTROL_KEY: base64.b64encode(refs.router_key.encode()).decode()},
        }
    ]


def _access(manifest: KVCacheManifest, refs: Refs) -> list[Object]:
    """It may read pods of its namespace: both routers ask for all of them and choose by label themselves."""
    name = names.workload_name(manifest.name, Component.ROUTER)
    group = "rbac.authorization.k8s.io"

    def metadata() -> Object:
        return names.metadata(manifest, refs.uid, name, Component.ROUTER)

    return [
        {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata()},
        {
            "apiVersion": f"{group}/v1",
            "kind": "Role",
            "metadata": metadata(),
            "rules": [{"apiGroups": [""], "resources": ["pods"], "verbs": ["get", "list", "watch"]}],
        },
        {
            "apiVersion": f"{group}/v1",
            "kind": "RoleBinding",
            "metadata": metadata(),
            "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
            "subjects": [
                {"kind": "ServiceAccount", "name": name, "namespace": manifest.namespace}
            ],
        },
    ]  # fmt: skip


def _deployment(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> Object:
    name = names.workload_name(manifest.name, Component.ROUTER)
    pod: Object = {
        "metadata": {"labels": names.labels(manifest.name, Component.ROUTER)},
        "spec": {
            **pods.pull_secrets(manifest),
            "serviceAccountName": name,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": POD_GRACE_S,
            "securityContext": pods.pod_security(names.UID_ROUTER),
            "containers": [_container(manifest, settings)],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }
    spec: Object = {
        "selector": {"matchLabels": names.selector_labels(manifest.name, Component.ROUTER)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
        },
        "template": templates.overlaid(
            pod, manifest.router.template, where="spec.router.template",
            owned=pods.owned(pod, "router", "ports"),
        ),
    }  # fmt: skip
    replicas = manifest.router.replicas
    if replicas is None:
        replicas = refs.live_replicas.get(Component.ROUTER)
    if replicas is not None:
        spec["replicas"] = replicas
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": names.metadata(manifest, refs.uid, name, Component.ROUTER),
        "spec": spec,
    }


def _container(manifest: KVCacheManifest, settings: Settings) -> Object:
    argv = router_argv(_site(manifest), manifest.router.type)
    # `python3 -c SCRIPT` for SMG, one word for VLLMRouter: a template's args stand for the flags alone.
    num_words = 3 if argv[1] == "-c" else 1
    is_smg = manifest.router.type is RouterType.SMG
    default = settings.images.router_smg if is_smg else settings.images.router_vllm
    return {
        "name": "router",
        **pods.image(manifest.router.image or default, settings),
        "command": list(argv[:num_words]),
        "args": list(argv[num_words:]),
        "env": _env(manifest),
        "ports": [
            {"name": "http", "containerPort": names.ROUTER_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": names.ROUTER_METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": {
            "requests": {"cpu": "100m", "memory": "256Mi"},
            "limits": {"memory": "2Gi"},
        },
        "startupProbe": pods.http_probe(
            READY_PATH, port="http", period_s=_STARTUP_PERIOD_S, failures=_STARTUP_S // _STARTUP_PERIOD_S,
        ),
        "readinessProbe": pods.http_probe(LIVE_PATH, port="http", period_s=5, failures=2),
        "livenessProbe": pods.http_probe(LIVE_PATH, port="http", period_s=10, failures=6),
        "lifecycle": {"preStop": {"exec": {"command": ["sleep", str(PRE_STOP_S)]}}},
        "securityContext": pods.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": "tmp", "mountPath": _HOME}],
    }  # fmt: skip


def _env(manifest: KVCacheManifest) -> list[Object]:
    """Both routers want keys from their environment; SMG's takes them out of it before it starts."""
    env: list[Object] = [{"name": "HOME", "value": _HOME}]
    is_smg = manifest.router.type is RouterType.SMG
    if is_smg:
        env.append(
            pods.secret_env(CONTROL_KEY_ENV, names.router_key_name(manifest.name), CONTROL_KEY)
        )
    if (key := manifest.engine.api_key) is not None:
        name = ENGINE_KEY_ENV if is_smg else VLLM_ROUTER_KEY_ENV
        env.append(pods.secret_env(name, key.name, key.key))
    return env


def _site(manifest: KVCacheManifest) -> RouterSite:
    prefill = names.selector_labels(manifest.name, Component.PREFILL)
    return RouterSite(
        host="0.0.0.0",
        port=names.ROUTER_PORT,
        metrics_host="0.0.0.0",
        metrics_port=names.ROUTER_METRICS_PORT,
        engines=DiscoveredEngines(
            namespace=manifest.namespace,
            port=names.ENGINE_PORT,
            decode=names.selector_labels(manifest.name, Component.DECODE),
            prefill=None if manifest.prefill is None else prefill,
        ),
    )
