"""ConfigMap NAME-connection: how engines that something else deploys use this cache.

`prefill.json`, `decode.json` and `both.json` are the very value of vLLM's --kv-transfer-config for each role;
`pod-patch.yaml` is a patch for a Deployment (`kubectl patch deployment NAME --patch-file`) that brings the connector,
the way to the agent and the variables that carry those values, so that an engine's arguments need two flags more. Pure.

Invariant: no secret is in it, and nothing that differs from pod to pod: names come from the pod itself.
"""

from __future__ import annotations

import json

import yaml

from cacheoperator import names
from cacheoperator.objects import engines, pods
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs, uses_shared_memory
from cacheoperator.settings import Settings
from cacheservice.commands.engines import HASH_ALGORITHM, EngineRole, EngineSite, kv_transfer_config
from cacheservice.manifest import KVCacheManifest

ENGINE_OF_LABEL = "larder.dev/engine-of"
"""Of pods that others deploy: the KVCache that they use. The agents' NetworkPolicy lets them in by it."""
PATCH_KEY = "pod-patch.yaml"
CONFIG_ENV = "LARDER_KV_TRANSFER_CONFIG"
POD_ENV = "LARDER_POD_NAME"
"""Before CONFIG_ENV in the patch, as that names it."""


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:
    """The ConfigMap."""
    name = names.connection_name(manifest.name)
    roles = {f"{role}.json": _transfer_config(manifest, refs, role) for role in EngineRole}
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": names.metadata(manifest, refs.uid, name),
            "data": {**roles, PATCH_KEY: _explained_patch(manifest, refs, settings)},
        }
    ]


def _transfer_config(
    manifest: KVCacheManifest, refs: Refs, role: EngineRole, *, name: str = ""
) -> str:
    """Without `name` the connector makes one for each process, of host name and process id."""
    site = EngineSite(
        name=name,
        role=role,
        host="0.0.0.0",
        port=names.ENGINE_PORT,
        **engines.agent_access(manifest, refs),
    )
    return json.dumps(kv_transfer_config(manifest, site), separators=(",", ":"))


def pod_patch(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> Object:
    """The patch of a Deployment whose container is named `vllm`; lists in it merge by name, as kubectl does."""
    ways = engines.agent_volumes(manifest, refs)
    config = _transfer_config(manifest, refs, EngineRole.BOTH, name=f"$({POD_ENV})")
    spec: Object = {
        "initContainers": [
            engines.payload_container(
                manifest.engine.payload_image or settings.images.payload, settings
            )
        ],
        "containers": [
            {
                "name": engines.CONTAINER,
                "env": [
                    {"name": "PYTHONPATH", "value": engines.python_path(manifest)},
                    pods.field_env(POD_ENV, "metadata.name"),
                    # Not a reference to both.json: Kubernetes puts the pod's name in for $(…) in plain values alone.
                    {"name": CONFIG_ENV, "value": config},
                ],
                "volumeMounts": [
                    {"name": engines.PAYLOAD, "mountPath": engines.PAYLOAD_MOUNT, "readOnly": True},
                    *(mount for _, mount in ways),
                ],
            }
        ],
        "volumes": [{"name": engines.PAYLOAD, "emptyDir": {}}, *(volume for volume, _ in ways)],
    }
    if uses_shared_memory(manifest, refs):
        spec["securityContext"] = {"supplementalGroups": [manifest.cache.socket_group]}
    for volume in spec["volumes"]:
        if "secret" in volume:
            # The pod's user and fsGroup are not ours to choose, and nobody else is in the pod.
            volume["secret"]["defaultMode"] = 0o444
    labels = {ENGINE_OF_LABEL: manifest.name}
    return {"spec": {"template": {"metadata": {"labels": labels}, "spec": spec}}}


def _explained_patch(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> str:
    config = names.connection_name(manifest.name)
    patch = yaml.safe_dump(pod_patch(manifest, refs, settings), sort_keys=False, width=200)
    notes = [
        f"Brings the cache of KVCache {manifest.name} to an engine in the same namespace:",
        f"  kubectl get configmap {config} -o jsonpath='{{.data.pod-patch\\.yaml}}' > {PATCH_KEY}",
        f"  kubectl patch deployment YOUR-ENGINE --patch-file {PATCH_KEY}",
        "Then add to the arguments of vllm (a patch can't: it would replace them all):",
        f"  --prefix-caching-hash-algo={HASH_ALGORITHM}",
        f"  --kv-transfer-config=$({CONFIG_ENV})",
        f"The container is named {engines.CONTAINER} here: write your container's name if it has another.",
        f'Engines for one half of the work: write "role":"{EngineRole.PREFILL}" or "{EngineRole.DECODE}" below.',
        "PYTHONPATH and supplementalGroups take the place of what is there: append what your engine needs.",
    ]
    return "".join(f"# {note}\n" for note in notes) + patch
