"""A KVCache as values: what `larder up` and the operator work with, after validation.

Invariants: everything is frozen; sizes are bytes; defaults are filled in; None means "not set", and its consequence is
in the schema's description of the field. `template` values stay as they were written. Built by `load` only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from cacheservice.manifest.problems import Notice

Template = Mapping[str, Any]
"""A strategic-merge pod template, opaque here."""

bytes_of_unit = {"Mi": 1 << 20, "Gi": 1 << 30, "Ti": 1 << 40}


class Device(StrEnum):
    CUDA = "cuda"
    CPU = "cpu"


class Eviction(StrEnum):
    S3FIFO = "S3FIFO"
    LRU = "LRU"


class Transport(StrEnum):
    AUTO = "Auto"
    SHARED_MEMORY = "SharedMemory"
    STREAM = "Stream"


class UpdateStrategy(StrEnum):
    ROLLING_UPDATE = "RollingUpdate"
    ON_DELETE = "OnDelete"


class RouterType(StrEnum):
    SMG = "SMG"
    VLLM_ROUTER = "VLLMRouter"
    NONE = "None"


class ServiceType(StrEnum):
    CLUSTER_IP = "ClusterIP"
    NODE_PORT = "NodePort"
    LOAD_BALANCER = "LoadBalancer"


class TlsMode(StrEnum):
    AUTO = "Auto"
    SECRET = "Secret"
    OFF = "Off"


class Verify(StrEnum):
    PROBE = "Probe"
    TRAFFIC = "Traffic"


@dataclass(frozen=True, slots=True)
class SecretKey:
    """A key of a Secret in the same namespace. Never its value."""

    name: str
    key: str


@dataclass(frozen=True, slots=True)
class Model:
    name: str
    revision: str | None
    path: str | None
    served_name: str
    volume_claim_name: str | None
    token: SecretKey | None


@dataclass(frozen=True, slots=True)
class Role:
    """Prefill or decode engines; `replicas` None leaves the number to an autoscaler (1 at first)."""

    replicas: int | None
    tensor_parallel_size: int
    args: tuple[str, ...]
    max_surge: int
    max_unavailable: int
    template: Template | None


@dataclass(frozen=True, slots=True)
class Engine:
    device: Device
    image: str | None
    payload_image: str | None
    python_path: str | None
    gpu_resource_name: str
    runtime_class_name: str | None
    shared_memory_bytes: int
    startup_timeout_s: int
    api_key: SecretKey | None


@dataclass(frozen=True, slots=True)
class Cache:
    """The agents. `gpu_bytes` is 0 in this version; `tokens_per_chunk` None is chosen from the model's layout."""

    image: str | None
    cpu_bytes: int
    gpu_bytes: int
    overhead_bytes: int | None
    tokens_per_chunk: int | None
    eviction: Eviction
    transport: Transport
    socket_group: int
    node_selector: Mapping[str, str]
    tolerations: tuple[Mapping[str, Any], ...]
    update_strategy: UpdateStrategy
    template: Template | None


@dataclass(frozen=True, slots=True)
class EmbeddedRedis:
    image: str | None
    memory_bytes: int
    template: Template | None


@dataclass(frozen=True, slots=True)
class RedisTls:
    """`ca` None trusts the image's authorities; `server_name` None is the host of the address."""

    server_name: str | None
    ca: SecretKey | None
    client_secret_name: str | None


@dataclass(frozen=True, slots=True)
class ExternalRedis:
    """`address` is host:port; `credentials_secret_name` None is no authentication; `tls` None is plain TCP."""

    address: str
    credentials_secret_name: str | None
    tls: RedisTls | None


@dataclass(frozen=True, slots=True)
class Redis:
    """Exactly one of the two is set."""

    embedded: EmbeddedRedis | None
    external: ExternalRedis | None


@dataclass(frozen=True, slots=True)
class Router:
    type: RouterType
    replicas: int | None
    image: str | None
    template: Template | None


@dataclass(frozen=True, slots=True)
class Service:
    type: ServiceType
    annotations: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Tls:
    mode: TlsMode
    secret_name: str | None


@dataclass(frozen=True, slots=True)
class PodMonitor:
    labels: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class KVCacheManifest:
    """One KVCache.

    `written` holds the path of every field that the author wrote (`spec.cache.cpu`), defaults excluded. `notices` are
    about the file; `local_notices` has those about running it on one machine.
    """

    name: str
    namespace: str
    model: Model | None
    prefill: Role | None
    decode: Role | None
    engine: Engine
    image_pull_secrets: tuple[str, ...]
    cache: Cache
    redis: Redis
    router: Router
    service: Service
    tls: Tls
    verify: Verify
    pod_monitor: PodMonitor | None
    paused: bool
    written: frozenset[str] = frozenset()
    notices: tuple[Notice, ...] = ()


def size_bytes(text: str) -> int:
    """Bytes of a size that the schema accepts: `0`, or a whole number with Mi, Gi or Ti."""
    return 0 if text == "0" else int(text[:-2]) * bytes_of_unit[text[-2:]]


def build_manifest(
    resource: Mapping[str, Any], *, written: frozenset[str], notices: tuple[Notice, ...]
) -> KVCacheManifest:
    """Turn a validated resource with its defaults into values. A KeyError here is our bug."""
    spec = resource["spec"]
    engine = _build_engine(spec["engine"])
    return KVCacheManifest(
        name=resource["metadata"]["name"],
        namespace=resource["metadata"].get("namespace", "default"),
        model=_build_model(spec["model"]) if "model" in spec else None,
        prefill=_build_role(spec["prefill"], engine.device) if "prefill" in spec else None,
        decode=_build_role(spec["decode"], engine.device) if "decode" in spec else None,
        engine=engine,
        image_pull_secrets=tuple(secret["name"] for secret in spec.get("imagePullSecrets", ())),
        cache=_build_cache(spec["cache"]),
        redis=_build_redis(spec["redis"]),
        router=_build_router(spec["router"]),
        service=Service(
            ServiceType(spec["service"]["type"]), spec["service"].get("annotations", {})
        ),
        tls=Tls(TlsMode(spec["tls"]["mode"]), _name_of(spec["tls"].get("secretRef"))),
        verify=Verify(spec["verify"]),
        pod_monitor=PodMonitor(spec["podMonitor"].get("labels", {}))
        if "podMonitor" in spec
        else None,
        paused=spec["paused"],
        written=written,
        notices=notices,
    )


def _build_model(model: Mapping[str, Any]) -> Model:
    return Model(
        name=model["name"],
        revision=model.get("revision"),
        path=model.get("path"),
        served_name=model.get("servedName", model["name"]),
        volume_claim_name=model.get("volumeClaimName"),
        token=_secret_key(model.get("tokenSecretRef")),
    )


def _build_role(role: Mapping[str, Any], device: Device) -> Role:
    rollout = role.get("rollout", {})
    has_spare_device = device is Device.CPU
    return Role(
        replicas=role.get("replicas"),
        tensor_parallel_size=role["tensorParallelSize"],
        args=tuple(role.get("args", ())),
        max_surge=rollout.get("maxSurge", 1 if has_spare_device else 0),
        max_unavailable=rollout.get("maxUnavailable", 0 if has_spare_device else 1),
        template=role.get("template"),
    )


def _build_engine(engine: Mapping[str, Any]) -> Engine:
    return Engine(
        device=Device(engine["device"]),
        image=engine.get("image"),
        payload_image=engine.get("payloadImage"),
        python_path=engine.get("pythonPath"),
        gpu_resource_name=engine["gpuResourceName"],
        runtime_class_name=engine.get("runtimeClassName"),
        shared_memory_bytes=size_bytes(engine["sharedMemory"]),
        startup_timeout_s=engine["startupTimeoutSeconds"],
        api_key=_secret_key(engine.get("apiKeySecretRef")),
    )


def _build_cache(cache: Mapping[str, Any]) -> Cache:
    return Cache(
        image=cache.get("image"),
        cpu_bytes=size_bytes(cache["cpu"]),
        gpu_bytes=size_bytes(cache["gpu"]),
        overhead_bytes=size_bytes(cache["overhead"]) if "overhead" in cache else None,
        tokens_per_chunk=cache.get("chunkTokens"),
        eviction=Eviction(cache["eviction"]),
        transport=Transport(cache["transport"]),
        socket_group=cache["socketGroup"],
        node_selector=cache.get("nodeSelector", {}),
        tolerations=tuple(cache.get("tolerations", ())),
        update_strategy=UpdateStrategy(cache["updateStrategy"]),
        template=cache.get("template"),
    )


def _build_redis(redis: Mapping[str, Any]) -> Redis:
    if "external" in redis:
        external = redis["external"]
        tls = external.get("tls")
        return Redis(
            embedded=None,
            external=ExternalRedis(
                address=external["address"],
                credentials_secret_name=_name_of(external.get("credentialsSecretRef")),
                tls=None if tls is None else RedisTls(
                    server_name=tls.get("serverName"),
                    ca=_secret_key(tls.get("caSecretRef")),
                    client_secret_name=_name_of(tls.get("clientSecretRef")),
                ),
            ),
        )  # fmt: skip
    embedded = redis["embedded"]
    return Redis(
        embedded=EmbeddedRedis(
            image=embedded.get("image"),
            memory_bytes=size_bytes(embedded["memory"]),
            template=embedded.get("template"),
        ),
        external=None,
    )


def _build_router(router: Mapping[str, Any]) -> Router:
    return Router(
        type=RouterType(router["type"]),
        replicas=router.get("replicas"),
        image=router.get("image"),
        template=router.get("template"),
    )


def _secret_key(reference: Mapping[str, Any] | None) -> SecretKey | None:
    return None if reference is None else SecretKey(reference["name"], reference["key"])


def _name_of(reference: Mapping[str, Any] | None) -> str | None:
    return None if reference is None else str(reference["name"])
