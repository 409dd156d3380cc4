"""Engines: the Deployments NAME-prefill and NAME-decode, vLLM pods that carry the connector.

Invariants: the image of vLLM is used as it is, and the connector is copied in by an init container; a pod runs without
root, capabilities or a writable root, and all that vLLM writes goes to emptyDirs; `replicas` that the manifest does not
set are left to whoever scales; images that are in use stay until the pods are replaced anyway (`choose_images`), so
that a new default never costs a GPU fleet its warm engines. Secrets reach vLLM as environment from a reference.

What a user's template may not change is in `_owned`. Pure; called by `render`.
"""

from __future__ import annotations

import hashlib
import json
import math
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheoperator import names, owned_flags
from cacheoperator.names import ENGINES, Component
from cacheoperator.objects import pods
from cacheoperator.objects.agents import tls_secret_name
from cacheoperator.objects.pods import Object
from cacheoperator.refs import ImagesInUse, Refs, uses_shared_memory
from cacheoperator.settings import Settings
from cacheoperator.templates import (
    MISSING,
    RESERVED_ARGUMENT,
    Owned,
    TemplateRefused,
    overlaid,
    value_at,
)
from cacheservice.commands.engines import (
    EngineRole,
    EngineSite,
    EngineTls,
    drain_seconds,
    engine_command,
)
from cacheservice.manifest import Device, KVCacheManifest, Role

CONTAINER = "vllm"
PAYLOAD = "larder-payload"
"""Init container and volume."""
SOCKET = "larder-socket"
TLS = "larder-tls"
PAYLOAD_MOUNT = "/opt/larder"
PAYLOAD_SITE = f"{PAYLOAD_MOUNT}/site-packages"
MODELS_MOUNT = "/models"
HOME = "/home/larder"

TEMPLATE_ANNOTATION = "larder.dev/template"
"""On the Deployment: digest of its pod template without images that are ours to choose."""
IMAGES_ANNOTATION = "larder.dev/images"
"""On the Deployment: the images that it was made with, so that a stranger's `kubectl set image` is not one of them."""
UPGRADE_ANNOTATION = "larder.dev/upgrade"
"""On KVCache and Deployment: the stamp of `kubectl larder upgrade`, asked for and done."""

DRAIN_S = 60
"""Requests in flight after SIGTERM, unless args say --shutdown-timeout."""
PRE_STOP_S = 5
"""Before SIGTERM: time for router and Services to stop sending here."""
_TEARDOWN_S = 25
"""After the last request: vLLM ends its processes."""
_SCHEDULING_S = 600
"""Pulling a large image and finding a node, on top of the model's own time, before a rollout counts as stuck."""
_STARTUP_PERIOD_S = 10

_ROLE_OF = {Component.PREFILL: EngineRole.PREFILL, Component.DECODE: EngineRole.DECODE}


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:
    """The Deployments of both roles, those that the manifest has. Raises TemplateRefused."""
    return [
        item for component in ENGINES for item in build_role(manifest, refs, settings, component)
    ]


def build_role(
    manifest: KVCacheManifest, refs: Refs, settings: Settings, component: Component
) -> list[Object]:
    """The Deployment of prefill or decode, or nothing. Raises TemplateRefused for its args or its template."""
    role = part_of(manifest, component)
    if role is None:
        return []
    template = _pod_template(manifest, refs, settings, component, role)
    digest = template_digest(template)
    is_upgrade = bool(refs.upgrade) and refs.upgrade != refs.live_upgrades.get(component, "")
    images = choose_images(
        default=EngineImages(_default_image(manifest, settings), settings.images.payload),
        in_use=refs.images_in_use.get(component), digest=digest, is_upgrade=is_upgrade,
    )  # fmt: skip
    images = _put_images(template, images)
    name = names.workload_name(manifest.name, component)
    metadata = names.metadata(manifest, refs.uid, name, component)
    metadata["annotations"] = {
        TEMPLATE_ANNOTATION: digest,
        IMAGES_ANNOTATION: json.dumps(
            {"engine": images.engine, "payload": images.payload}, sort_keys=True
        ),
        **({UPGRADE_ANNOTATION: refs.upgrade} if refs.upgrade else {}),
    }
    spec: Object = {
        "selector": {"matchLabels": names.selector_labels(manifest.name, component)},
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxSurge": role.max_surge, "maxUnavailable": role.max_unavailable},
        },
        "progressDeadlineSeconds": manifest.engine.startup_timeout_s + _SCHEDULING_S,
        "template": template,
    }
    replicas = refs.live_replicas.get(component) if role.replicas is None else role.replicas
    if replicas is not None:
        spec["replicas"] = replicas
    return [{"apiVersion": "apps/v1", "kind": "Deployment", "metadata": metadata, "spec": spec}]


def part_of(manifest: KVCacheManifest, component: Component) -> Role | None:
    """The manifest's part for `component`, prefill or decode."""
    return manifest.prefill if component is Component.PREFILL else manifest.decode


@dataclass(frozen=True, slots=True)
class EngineImages:
    """References of the two images of an engine pod."""

    engine: str
    payload: str


def choose_images(
    *, default: EngineImages, in_use: ImagesInUse | None, digest: str, is_upgrade: bool
) -> EngineImages:
    """The images for what the manifest leaves open: those in use as long as the pods would stay as they are.

    `digest` is that of the new template. A workload without a digest was marked by nobody, or a person took the mark
    away: its images stay too, as replacing them is what must not happen by itself.
    """
    if in_use is None or is_upgrade or in_use.template_digest not in ("", digest):
        return default
    return EngineImages(
        in_use.engine_image or default.engine, in_use.payload_image or default.payload
    )


def template_digest(template: Mapping[str, Any]) -> str:
    """Of a pod template in which images that are ours to choose are empty."""
    text = json.dumps(template, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def images_in_use(workload: Mapping[str, Any]) -> ImagesInUse:
    """What a live Deployment of `build_role` was made with: by its annotation, or by its pod template without one."""
    annotations = workload["metadata"].get("annotations") or {}
    template = workload["spec"]["template"]
    engine = value_at(template, ("spec", "containers", CONTAINER, "image"))
    payload = value_at(template, ("spec", "initContainers", PAYLOAD, "image"))
    try:
        chosen = json.loads(annotations.get(IMAGES_ANNOTATION, "{}"))
        engine, payload = str(chosen["engine"]), str(chosen["payload"])
    except (ValueError, TypeError, KeyError):  # not ours, or written over by hand
        pass
    return ImagesInUse(
        engine_image="" if engine is MISSING else engine,
        payload_image=None if payload is MISSING else payload,
        template_digest=annotations.get(TEMPLATE_ANNOTATION, ""),
    )


def _default_image(manifest: KVCacheManifest, settings: Settings) -> str:
    is_cpu = manifest.engine.device is Device.CPU
    return settings.images.engine_cpu if is_cpu else settings.images.engine_cuda


def _put_images(template: Object, images: EngineImages) -> EngineImages:
    """Fill what is empty in `template`, and say what is in it then."""
    found = []
    for kind, name, image in (
        ("containers", CONTAINER, images.engine),
        ("initContainers", PAYLOAD, images.payload),
    ):
        container = value_at(template, ("spec", kind, name))
        container["image"] = container.get("image") or image
        found.append(container["image"])
    return EngineImages(*found)


def _pod_template(
    manifest: KVCacheManifest, refs: Refs, settings: Settings, component: Component, role: Role
) -> Object:
    """With empty images where the manifest leaves them open."""
    where = f"spec.{component}.template"
    _check_flags(role, component)
    base: Object = {
        "metadata": {"labels": names.labels(manifest.name, component)},
        "spec": _pod_spec(manifest, refs, settings, component, role),
    }
    template = overlaid(base, role.template, where=where, owned=_owned(manifest, base, component))
    _check_command(value_at(template, ("spec", "containers", CONTAINER, "command")), where)
    if manifest.engine.device is Device.CUDA:
        _tolerate_gpus(template["spec"], manifest.engine.gpu_resource_name)
    return template


def _pod_spec(
    manifest: KVCacheManifest, refs: Refs, settings: Settings, component: Component, role: Role
) -> Object:
    engine = manifest.engine
    security = {
        **pods.pod_security(names.UID_ENGINE),
        # A volume with a downloaded model is large, and has the right owner after the first time.
        "fsGroupChangePolicy": "OnRootMismatch",
    }
    if uses_shared_memory(manifest, refs):
        security["supplementalGroups"] = [manifest.cache.socket_group]
    runtime_class = engine.runtime_class_name
    drain_s = drain_seconds(role.args, DRAIN_S)
    return {
        **pods.pull_secrets(manifest),
        **({"runtimeClassName": runtime_class} if runtime_class is not None else {}),
        "automountServiceAccountToken": False,
        # A Service named vllm would put VLLM_PORT=tcp://… into every pod, and vLLM reads that.
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": PRE_STOP_S + drain_s + _TEARDOWN_S,
        "securityContext": security,
        "topologySpreadConstraints": [
            {
                "maxSkew": 1,
                "topologyKey": "kubernetes.io/hostname",
                "whenUnsatisfiable": "ScheduleAnyway",
                "labelSelector": {"matchLabels": names.selector_labels(manifest.name, component)},
            }
        ],
        "initContainers": [payload_container(manifest.engine.payload_image or "", settings)],
        "containers": [_container(manifest, refs, settings, component, role)],
        "volumes": _volumes(manifest, refs),
    }


def payload_container(image: str, settings: Settings) -> Object:
    """The init container that copies the connector out of its image. Also in pods that others deploy."""
    return {
        "name": PAYLOAD,
        **pods.image(image, settings),
        "command": ["cp", "-r", "/payload/.", f"{PAYLOAD_MOUNT}/"],
        "resources": {
            "requests": {"cpu": "10m", "memory": "32Mi"},
            "limits": {"memory": "128Mi"},
        },
        "securityContext": pods.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [{"name": PAYLOAD, "mountPath": PAYLOAD_MOUNT}],
    }


def _container(
    manifest: KVCacheManifest, refs: Refs, settings: Settings, component: Component, role: Role
) -> Object:
    command = engine_command(manifest, _site(manifest, refs, component))
    startup_periods = math.ceil(manifest.engine.startup_timeout_s / _STARTUP_PERIOD_S)
    return {
        "name": CONTAINER,
        **pods.image(manifest.engine.image or "", settings),
        "command": list(command.argv[:3]),
        "args": list(command.argv[3:]),
        "env": _env(manifest, command.env),
        "ports": [{"name": "http", "containerPort": names.ENGINE_PORT, "protocol": "TCP"}],
        "resources": _resources(manifest, role),
        "startupProbe": pods.http_probe(
            "/health", port="http", period_s=_STARTUP_PERIOD_S, failures=startup_periods
        ),
        "readinessProbe": pods.http_probe("/health", port="http", period_s=5, failures=3),
        # A long prefill may keep the API server from answering: only an engine that is gone for minutes is dead.
        "livenessProbe": pods.http_probe(
            "/health", port="http", period_s=15, failures=8, timeout_s=10
        ),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "securityContext": pods.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(manifest, refs),
    }


def _site(manifest: KVCacheManifest, refs: Refs, component: Component) -> EngineSite:
    """Where the engine lives. Kubernetes puts the pod's name in for $(POD_NAME)."""
    role = EngineRole.BOTH if manifest.prefill is None else _ROLE_OF[component]
    return EngineSite(
        name="$(POD_NAME)", role=role, host="0.0.0.0", port=names.ENGINE_PORT, model=_model_path(manifest),
        drain_s=DRAIN_S, is_probed=True, **agent_access(manifest, refs),
    )  # fmt: skip


def agent_access(manifest: KVCacheManifest, refs: Refs) -> dict[str, Any]:
    """The fields of EngineSite that say how an engine in a pod reaches the agent of its node."""
    if uses_shared_memory(manifest, refs):
        return {"socket_dir": names.SOCKET_MOUNT}
    host = f"{names.workload_name(manifest.name, Component.CACHE)}.{manifest.namespace}.svc"
    access: dict[str, Any] = {"agent_address": f"{host}:{names.AGENT_PORT}"}
    if tls_secret_name(manifest, "engine") is not None:
        access["tls"] = EngineTls(names.TLS_MOUNT, names.dns_san(manifest.name, manifest.namespace))
    return access


def agent_volumes(manifest: KVCacheManifest, refs: Refs) -> list[tuple[Object, Object]]:
    """Volume and mount of what an engine in a pod needs to reach its agent, on either path."""
    if uses_shared_memory(manifest, refs):
        path = f"{names.SOCKET_ROOT}/{manifest.namespace}/{manifest.name}"
        # The engine may be there before the agent: the kubelet makes the folder, the agent opens it to the group later.
        volume = {"name": SOCKET, "hostPath": {"path": path, "type": "DirectoryOrCreate"}}
        return [(volume, {"name": SOCKET, "mountPath": names.SOCKET_MOUNT})]
    secret = tls_secret_name(manifest, "engine")
    if secret is None:
        return []
    mount = {"name": TLS, "mountPath": names.TLS_MOUNT, "readOnly": True}
    return [(pods.secret_volume(TLS, secret), mount)]


def python_path(manifest: KVCacheManifest) -> str:
    """PYTHONPATH of an engine. It replaces the image's own, which spec.engine.pythonPath brings back."""
    behind = manifest.engine.python_path
    return PAYLOAD_SITE if behind is None else f"{PAYLOAD_SITE}:{behind}"


def _model_path(manifest: KVCacheManifest) -> str | None:
    """Folder of the model as the engine sees it; None: by name."""
    assert manifest.model is not None, "a manifest with engines has a model"
    if manifest.model.volume_claim_name is None:
        return manifest.model.path
    return posixpath.normpath(posixpath.join(MODELS_MOUNT, (manifest.model.path or "").lstrip("/")))


def _env(manifest: KVCacheManifest, command_env: Mapping[str, str]) -> list[Object]:
    """Images of vLLM are made for root, whose caches are all over the root file system: each is told where to go."""
    assert manifest.model is not None, "a manifest with engines has a model"
    plain = {
        "PYTHONPATH": python_path(manifest),
        **command_env,
        "HOME": HOME,
        # The user has no line in /etc/passwd: getpass asks the environment first.
        "USER": "larder",
        "LOGNAME": "larder",
        "XDG_CACHE_HOME": f"{HOME}/.cache",
        "XDG_CONFIG_HOME": f"{HOME}/.config",
        "HF_HOME": f"{HOME}/.cache/huggingface",
        "VLLM_CACHE_ROOT": f"{HOME}/.cache/vllm",
        "VLLM_CONFIG_ROOT": f"{HOME}/.config/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{HOME}/.cache/torchinductor",
        "TRITON_CACHE_DIR": f"{HOME}/.cache/triton",
        "CUDA_CACHE_PATH": f"{HOME}/.cache/nv",
        "OUTLINES_CACHE_DIR": f"{HOME}/.cache/outlines",
    }
    env = [
        pods.field_env("POD_NAME", "metadata.name"),
        # vLLM would look for its own address by the route to the Internet.
        pods.field_env("VLLM_HOST_IP", "status.podIP"),
        *({"name": name, "value": value} for name, value in plain.items()),
    ]
    if manifest.engine.device is Device.CPU:
        # "auto" pins the threads of every engine of a node to the same cores. A pod without a CPU limit gets all.
        env.append({"name": "VLLM_CPU_OMP_THREADS_BIND", "value": "nobind"})
        limit = {"containerName": CONTAINER, "resource": "limits.cpu", "divisor": "1"}
        env.append({"name": "OMP_NUM_THREADS", "valueFrom": {"resourceFieldRef": limit}})
    if (token := manifest.model.token) is not None:
        env.append(pods.secret_env("HF_TOKEN", token.name, token.key))
    if (key := manifest.engine.api_key) is not None:
        env.append(pods.secret_env("VLLM_API_KEY", key.name, key.key))
    return env


def _resources(manifest: KVCacheManifest, role: Role) -> Object:
    """Requests that let an engine start, not what it will use: that depends on the model, and is for the template."""
    ranks = role.tensor_parallel_size
    if manifest.engine.device is Device.CPU:
        return {"requests": {"cpu": f"{250 * ranks}m", "memory": f"{1 + ranks}Gi"}}
    # One busy thread per rank, the API server and the scheduler; weights pass through memory on their way to the GPU.
    gpus = {manifest.engine.gpu_resource_name: str(ranks)}
    return {"requests": {"cpu": str(1 + ranks), "memory": f"{4 * ranks}Gi", **gpus}, "limits": gpus}


def _volumes(manifest: KVCacheManifest, refs: Refs) -> list[Object]:
    assert manifest.model is not None, "a manifest with engines has a model"
    shared_memory = pods.quantity(manifest.engine.shared_memory_bytes)
    volumes: list[Object] = [
        {"name": PAYLOAD, "emptyDir": {}},
        *(volume for volume, _ in agent_volumes(manifest, refs)),
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": shared_memory}},
        {"name": "home", "emptyDir": {}},
        {"name": "tmp", "emptyDir": {}},
    ]  # fmt: skip
    if (claim := manifest.model.volume_claim_name) is not None:
        volumes.append(
            {"name": "models", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
        )
    return volumes


def _mounts(manifest: KVCacheManifest, refs: Refs) -> list[Object]:
    assert manifest.model is not None, "a manifest with engines has a model"
    mounts: list[Object] = [
        {"name": PAYLOAD, "mountPath": PAYLOAD_MOUNT, "readOnly": True},
        *(mount for _, mount in agent_volumes(manifest, refs)),
        {"name": "shm", "mountPath": "/dev/shm"},  # noqa: S108 - in a pod of its own
        {"name": "home", "mountPath": HOME},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
    ]
    if manifest.model.volume_claim_name is not None:
        mounts.append({"name": "models", "mountPath": MODELS_MOUNT, "readOnly": True})
    return mounts


def _tolerate_gpus(spec: Object, resource: str) -> None:
    """The taint of GPU nodes, as the admission plugin ExtendedResourceToleration does it where it is on. A template's
    tolerations replace a list, and are not to lose this one."""
    toleration = {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
    if toleration not in spec.get("tolerations", []):
        spec["tolerations"] = [*spec.get("tolerations", []), toleration]


def _owned(manifest: KVCacheManifest, base: Object, component: Component) -> list[Owned]:
    """What a template may not change in the pod template `base`."""
    container = ("spec", "containers", CONTAINER)
    cache = "the cache needs it as it is: remove it here"
    owned = [
        Owned(("metadata", "labels", label), "Larder finds its pods by it: remove it here")
        for label in base["metadata"]["labels"]
    ]
    owned += [
        Owned(
            (*container, "args"),
            f"they would replace all that Larder sets: write flags into spec.{component}.args",
            reason=RESERVED_ARGUMENT,
        ),
        Owned(
            (*container, "env", "PYTHONPATH"),
            "the connector is found by it: write spec.engine.pythonPath",
        ),
        Owned((*container, "env", "POD_NAME"), "the cache knows engines by it: remove it here"),
        Owned(
            (*container, "ports", str(names.ENGINE_PORT)),
            "the router and the probes use it: remove it here",
        ),
        Owned(("spec", "restartPolicy"), "pods of a Deployment always restart: remove it here"),
    ]
    for field in ("command", "args", "volumeMounts"):
        owned.append(Owned(("spec", "initContainers", PAYLOAD, field), cache))
    if manifest.engine.device is Device.CUDA:
        why = f"an engine has one GPU per rank: write spec.{component}.tensorParallelSize"
        for field in ("limits", "requests"):
            path = (*container, "resources", field, manifest.engine.gpu_resource_name)
            owned.append(Owned(path, why, is_quantity=True))
    if manifest.model is not None and manifest.model.token is not None:
        owned.append(Owned((*container, "env", "HF_TOKEN"), "spec.model.tokenSecretRef sets it"))
    if manifest.engine.api_key is not None:
        owned.append(
            Owned((*container, "env", "VLLM_API_KEY"), "spec.engine.apiKeySecretRef sets it")
        )
    for volume in (PAYLOAD, SOCKET, TLS):
        owned.append(Owned(("spec", "volumes", volume), cache))
    for mount in (PAYLOAD_MOUNT, names.SOCKET_MOUNT, names.TLS_MOUNT):
        owned.append(Owned((*container, "volumeMounts", mount), cache))
    if "supplementalGroups" in base["spec"]["securityContext"]:
        group = manifest.cache.socket_group
        why = f"group {group} opens the socket folder (spec.cache.socketGroup): keep it in the list"
        owned.append(Owned(("spec", "securityContext", "supplementalGroups"), why, may_grow=True))
    return owned


def _check_flags(role: Role, component: Component) -> None:
    """`args` passed the schema, whose rule knows the spellings of today's vLLM; and words of a template did not."""
    problem = owned_flags.check(role.args)
    if problem is not None:
        raise TemplateRefused(RESERVED_ARGUMENT, f"spec.{component}.args: {problem}")
    written = value_at(role.template or {}, ("spec", "containers", CONTAINER, "args"))
    if isinstance(written, list):
        problem = owned_flags.check([word for word in written if isinstance(word, str)])
        if problem is not None:
            where = f"spec.{component}.template.spec.containers[{CONTAINER}].args"
            raise TemplateRefused(RESERVED_ARGUMENT, f"{where}: {problem}")


def _check_command(command: Any, where: str) -> None:
    problem = owned_flags.check_command(command) if isinstance(command, list) else None
    if problem is not None:
        raise TemplateRefused(
            RESERVED_ARGUMENT, f"{where}.spec.containers[{CONTAINER}].command: {problem}"
        )
