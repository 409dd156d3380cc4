"""The ConfigMap for engines that others deploy: the connector takes its values, Kubernetes takes its patch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cacheoperator import names
from cacheoperator.objects import connection
from cacheoperator.refs import Refs, SharedMemoryVerdict
from cacheoperator.settings import Images, Settings
from cacheoperator.templates import merge

from cacheservice.connector.config import parse_extra_config
from cacheservice.manifest import load_manifest

EXAMPLES = Path(__file__).parent.parent / "examples"
SETTINGS = Settings(
    operator_version="1", images=Images(
        engine_cuda="e", engine_cpu="c", payload="payload:1", agent="a", redis="r", router_smg="s", router_vllm="v",
    ),
)  # fmt: skip
REFS = Refs(
    uid="0b0e5c1c", generation=1, shared_memory=SharedMemoryVerdict(is_allowed=True, reason="")
)
STREAM = dataclasses.replace(
    REFS, shared_memory=SharedMemoryVerdict(is_allowed=False, reason="restricted")
)
BYO = EXAMPLES / "byo-engines.yaml"
PLAIN = yaml.safe_load("""
apiVersion: apps/v1
kind: Deployment
metadata: {name: mistral}
spec:
  selector: {matchLabels: {app: mistral}}
  template:
    metadata: {labels: {app: mistral}}
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.32.0
        command: [vllm, serve, mistralai/Mistral-7B]
        args: [--prefix-caching-hash-algo=sha256_cbor, --kv-transfer-config=$(LARDER_KV_TRANSFER_CONFIG)]
        env: [{name: HF_TOKEN, valueFrom: {secretKeyRef: {name: hf, key: token}}}]
        volumeMounts: [{name: shm, mountPath: /dev/shm}]
      volumes: [{name: shm, emptyDir: {medium: Memory}}]
""")


def config_map(path: Path = BYO, refs: Refs = REFS) -> dict[str, Any]:
    (found,) = connection.build(load_manifest(path), refs, SETTINGS)
    return found


def patched(refs: Refs) -> dict[str, Any]:
    patch = yaml.safe_load(config_map(refs=refs)["data"]["pod-patch.yaml"])
    assert set(patch) == {"spec"}
    assert set(patch["spec"]) == {"template"}
    template = merge(PLAIN["spec"]["template"], patch["spec"]["template"])
    return PLAIN | {"spec": PLAIN["spec"] | {"template": template}}


@pytest.mark.parametrize("refs", [REFS, STREAM], ids=["shared memory", "stream"])
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_example_has_one_that_kubernetes_and_the_connector_accept(
    path: Path, refs: Refs
) -> None:
    item = config_map(path, refs)
    kubernetes_validate.validate(item, "1.35", strict=True)
    for role in ("prefill", "decode", "both"):
        value = json.loads(item["data"][f"{role}.json"])
        extra = value.pop("kv_connector_extra_config")
        config = parse_extra_config(extra, kv_role=value["kv_role"])
        assert config.role == role
        assert config.engine_name == "", "pods of a Deployment share this value"
        assert value == {
            "kv_connector": "LarderConnector",
            "kv_connector_module_path": "cacheservice.connector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }


@pytest.mark.parametrize("refs", [REFS, STREAM], ids=["shared memory", "stream"])
def test_the_patch_gives_a_plain_deployment_all_that_the_connector_needs(refs: Refs) -> None:
    deployment = patched(refs)
    kubernetes_validate.validate(deployment, "1.35", strict=True)
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    env = {item["name"]: item for item in container["env"]}
    assert env["HF_TOKEN"]["valueFrom"], "what was there stays"
    assert env["PYTHONPATH"]["value"] == "/opt/larder/site-packages"
    assert list(env).index("LARDER_POD_NAME") < list(env).index("LARDER_KV_TRANSFER_CONFIG")
    assert env["LARDER_POD_NAME"]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    config = json.loads(env["LARDER_KV_TRANSFER_CONFIG"]["value"])
    extra = config["kv_connector_extra_config"]
    assert extra.pop("engine_name") == "$(LARDER_POD_NAME)"
    assert config == json.loads(config_map(refs=refs)["data"]["both.json"])

    mounts = {item["mountPath"]: item["name"] for item in container["volumeMounts"]}
    volumes = {item["name"]: item for item in template["spec"]["volumes"]}
    assert set(mounts.values()) <= set(volumes)
    assert [item["name"] for item in template["spec"]["initContainers"]] == ["larder-payload"]
    assert template["spec"]["initContainers"][0]["image"] == "payload:1"
    if refs is REFS:
        host_path = volumes[mounts[extra["socket_dir"]]]["hostPath"]
        assert host_path["path"] == "/run/larder/default/shared"
        assert template["spec"]["securityContext"] == {"supplementalGroups": [7070]}
    else:
        secret = volumes[mounts[str(Path(extra["tls_key"]).parent)]]["secret"]
        assert secret["secretName"] == "shared-engine-tls"
        assert secret["defaultMode"] == 0o444, "the pod's user is not ours to choose"
        assert template["metadata"]["labels"] == {
            "app": "mistral",
            "larder.dev/engine-of": "shared",
        }


def test_the_patch_says_how_to_use_it() -> None:
    text = config_map()["data"]["pod-patch.yaml"]
    notes = [line for line in text.splitlines() if line.startswith("#")]
    assert any("kubectl patch deployment" in line for line in notes)
    assert "#   --kv-transfer-config=$(LARDER_KV_TRANSFER_CONFIG)" in notes
    assert "#   --prefix-caching-hash-algo=sha256_cbor" in notes


def test_the_configmap_belongs_to_the_kvcache() -> None:
    item = config_map()
    assert item["metadata"]["name"] == names.connection_name("shared")
    assert item["metadata"]["ownerReferences"][0]["uid"] == REFS.uid
