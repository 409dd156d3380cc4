"""Engine Deployments: what Kubernetes accepts, what vLLM and the connector accept, what a template may change."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cacheoperator import names
from cacheoperator.names import Component
from cacheoperator.objects import engines
from cacheoperator.objects.engines import EngineImages, choose_images
from cacheoperator.refs import ImagesInUse, KeyPair, Refs, SharedMemoryVerdict, TlsMaterial
from cacheoperator.settings import Images, Settings
from cacheoperator.templates import TemplateRefused
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from cacheservice.connector.config import parse_extra_config
from cacheservice.manifest import KVCacheManifest, load_manifest, parse_manifest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.yaml"))
IMAGES = Images(
    engine_cuda="vllm/vllm-openai:v0.32.0", engine_cpu="vllm-cpu:0.32.0", payload="larder-payload:1", agent="larder:1",
    redis="valkey:8", router_smg="smg:1", router_vllm="vllm-router:1",
)  # fmt: skip
SETTINGS = Settings(operator_version="1.2.3", images=IMAGES)
ALLOWED = SharedMemoryVerdict(is_allowed=True, reason="")
REFS = Refs(uid="0b0e5c1c-7f41-4f2c-9a55-1a2b3c4d5e6f", generation=1, shared_memory=ALLOWED)
STREAM = dataclasses.replace(
    REFS, shared_memory=SharedMemoryVerdict(is_allowed=False, reason="enforce=restricted")
)


def manifest(
    spec: str = "", *, prefill: str = "{}", decode: str = "{}", model: str = "{name: org/m}"
) -> KVCacheManifest:
    text = f"""
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {{name: demo, namespace: serving}}
spec:
  model: {model}
  prefill: {prefill}
  decode: {decode}
{spec}
"""
    return parse_manifest(text, source="test")


def deployment(
    parsed: KVCacheManifest,
    component: Component = Component.DECODE,
    *,
    refs: Refs = REFS,
    settings: Settings = SETTINGS,
) -> dict[str, Any]:
    (found,) = engines.build_role(parsed, refs, settings, component)
    return found


def pod(
    parsed: KVCacheManifest, component: Component = Component.DECODE, **kwargs: Any
) -> dict[str, Any]:
    return deployment(parsed, component, **kwargs)["spec"]["template"]["spec"]


def vllm(pod_spec: dict[str, Any]) -> dict[str, Any]:
    return next(item for item in pod_spec["containers"] if item["name"] == "vllm")


def env(pod_spec: dict[str, Any]) -> dict[str, Any]:
    variables = vllm(pod_spec)["env"]
    assert len({item["name"] for item in variables}) == len(variables)
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in variables}


def flag(pod_spec: dict[str, Any], name: str) -> str:
    args = vllm(pod_spec)["args"]
    assert args.count(name) == 1, (name, args)
    return args[args.index(name) + 1]


def extra_config(pod_spec: dict[str, Any]) -> dict[str, Any]:
    return json.loads(flag(pod_spec, "--kv-transfer-config"))["kv_connector_extra_config"]


def with_template(template: dict[str, Any], spec: str = "", **kwargs: str) -> KVCacheManifest:
    parsed = manifest(spec, **kwargs)
    assert parsed.decode is not None
    return dataclasses.replace(parsed, decode=dataclasses.replace(parsed.decode, template=template))


@pytest.mark.parametrize("refs", [REFS, STREAM], ids=["shared memory", "stream"])
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_engines_of_every_example_are_what_kubernetes_accepts(path: Path, refs: Refs) -> None:
    parsed = load_manifest(path)
    objects = engines.build(parsed, refs, SETTINGS)
    assert len(objects) == (parsed.prefill is not None) + (parsed.decode is not None)
    for item in objects:
        kubernetes_validate.validate(item, "1.35", strict=True)
        assert json.loads(json.dumps(item)) == item
        labels = item["spec"]["template"]["metadata"]["labels"]
        assert item["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert passes_restricted(item["spec"]["template"]["spec"], host_path=refs is REFS)


def test_the_autoscaler_of_the_example_owns_replicas() -> None:
    path = next(path for path in EXAMPLES if path.name == "autoscaled.yaml")
    _, autoscaler = yaml.safe_load_all(path.read_text())
    kubernetes_validate.validate(autoscaler, "1.35", strict=True)
    target = autoscaler["spec"]["scaleTargetRef"]
    found = [
        item
        for item in engines.build(load_manifest(path), REFS, SETTINGS)
        if (item["apiVersion"], item["kind"], item["metadata"]["name"])
        == (target["apiVersion"], target["kind"], target["name"])
    ]
    assert [("replicas" in item["spec"]) for item in found] == [False]
    assert found[0]["metadata"]["namespace"] == autoscaler["metadata"]["namespace"]


def passes_restricted(spec: dict[str, Any], *, host_path: bool) -> bool:
    """Pod Security Standards, `restricted` (Kubernetes 1.35), but for the socket folder."""
    context = spec["securityContext"]
    assert context["runAsNonRoot"] is True
    assert context["runAsUser"] != 0
    assert context["seccompProfile"] == {"type": "RuntimeDefault"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
    for container in spec["containers"] + spec["initContainers"]:
        security = container["securityContext"]
        assert security["allowPrivilegeEscalation"] is False
        assert security["capabilities"] == {"drop": ["ALL"]}
        assert security["readOnlyRootFilesystem"] is True
        assert "privileged" not in security
        assert not any("hostPort" in port for port in container.get("ports", ()))
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    kinds = {next(key for key in volume if key != "name") for volume in spec["volumes"]}
    allowed = {
        "emptyDir",
        "secret",
        "configMap",
        "projected",
        "persistentVolumeClaim",
        "downwardAPI",
        "ephemeral",
    }
    assert kinds - allowed == ({"hostPath"} if host_path else set())
    return True


def test_each_role_says_what_it_is_and_shares_the_folder_of_its_node() -> None:
    parsed = manifest()
    for component in (Component.PREFILL, Component.DECODE):
        spec = pod(parsed, component)
        extra = extra_config(spec)
        assert (extra["role"], extra["engine_name"]) == (str(component), "$(POD_NAME)")
        assert extra["socket_dir"] == names.SOCKET_MOUNT
        volume = next(item for item in spec["volumes"] if item["name"] == "larder-socket")
        assert volume["hostPath"] == {
            "path": "/run/larder/serving/demo",
            "type": "DirectoryOrCreate",
        }
        assert spec["securityContext"]["supplementalGroups"] == [7070]
        assert env(spec)["POD_NAME"] == {
            "fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}
        }
        assert not any("secret" in item for item in spec["volumes"])


def test_without_prefill_decode_engines_do_both() -> None:
    text = "apiVersion: larder.dev/v1alpha1\nkind: KVCache\nmetadata: {name: a}\nspec: {model: {name: m}, decode: {}}"
    (found,) = engines.build(parse_manifest(text, source="test"), REFS, SETTINGS)
    assert found["metadata"]["name"] == "a-decode"
    assert extra_config(found["spec"]["template"]["spec"])["role"] == "both"


@pytest.mark.parametrize(
    ("tls", "secret"),
    [
        ("", "demo-engine-tls"),
        ("  tls: {mode: Secret, secretRef: {name: mine}}", "mine"),
        ("  tls: {mode: 'Off'}", None),
    ],
)
def test_the_stream_path_goes_to_the_agent_of_the_node_with_certificates(
    tls: str, secret: str | None
) -> None:
    spec = pod(manifest(tls), refs=STREAM)
    extra = extra_config(spec)
    assert "socket_dir" not in extra
    assert extra["address"] == "demo-cache.serving.svc:7500"
    secrets = [item["secret"]["secretName"] for item in spec["volumes"] if "secret" in item]
    assert secrets == ([secret] if secret else [])
    mounts = {item["mountPath"]: item for item in vllm(spec)["volumeMounts"]}
    assert ("/etc/larder/tls" in mounts) is bool(secret)
    assert "supplementalGroups" not in spec["securityContext"]
    if secret:
        assert "subPath" not in mounts["/etc/larder/tls"]
        assert extra["tls_server_name"] == names.dns_san("demo", "serving")
        assert (extra["tls_cert"], extra["tls_key"]) == (
            "/etc/larder/tls/tls.crt",
            "/etc/larder/tls/tls.key",
        )
    else:
        assert not any(key.startswith("tls_") for key in extra)


@pytest.mark.parametrize("refs", [REFS, STREAM], ids=["shared memory", "stream"])
def test_the_connector_takes_what_the_pod_gives_it(refs: Refs) -> None:
    spec = pod(
        manifest("  cache: {chunkTokens: 512}", prefill="{tensorParallelSize: 4}"), refs=refs
    )
    text = flag(spec, "--kv-transfer-config").replace("$(POD_NAME)", "demo-decode-5d4-x2x")
    config = parse_extra_config(json.loads(text)["kv_connector_extra_config"], kv_role="kv_both")
    assert config.engine_name == "demo-decode-5d4-x2x"
    assert config.tensor_parallel_sizes == (1, 4)
    assert config.tokens_per_chunk == 512


def test_transport_that_is_asked_for_is_taken() -> None:
    assert "socket_dir" in extra_config(
        pod(manifest("  cache: {transport: SharedMemory}"), refs=STREAM)
    )
    assert "address" in extra_config(pod(manifest("  cache: {transport: Stream}"), refs=REFS))


def test_replicas_are_left_to_autoscalers_unless_set_or_handed_over() -> None:
    assert "replicas" not in deployment(manifest())["spec"]
    assert deployment(manifest(decode="{replicas: 0}"))["spec"]["replicas"] == 0
    handed_over = dataclasses.replace(REFS, live_replicas={"decode": 5})
    assert deployment(manifest(), refs=handed_over)["spec"]["replicas"] == 5
    assert "replicas" not in deployment(manifest(), Component.PREFILL, refs=handed_over)["spec"]
    assert deployment(manifest(decode="{replicas: 2}"), refs=handed_over)["spec"]["replicas"] == 2


def test_gpus_are_as_many_as_tensor_parallel_ranks() -> None:
    spec = pod(
        manifest("  engine: {gpuResourceName: amd.com/gpu}", decode="{tensorParallelSize: 8}")
    )
    resources = vllm(spec)["resources"]
    assert resources["limits"] == {"amd.com/gpu": "8"}
    assert resources["requests"]["amd.com/gpu"] == "8"
    assert flag(spec, "--tensor-parallel-size") == "8"
    assert {"key": "amd.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in spec[
        "tolerations"
    ]


def test_cpu_engines_ask_for_no_gpu_and_share_cores() -> None:
    spec = pod(manifest("  engine: {device: cpu}"))
    assert vllm(spec)["image"] == IMAGES.engine_cpu
    assert set(vllm(spec)["resources"]) == {"requests"}
    assert set(vllm(spec)["resources"]["requests"]) == {"cpu", "memory"}
    assert "tolerations" not in spec
    assert env(spec)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert env(spec)["OMP_NUM_THREADS"]["resourceFieldRef"]["resource"] == "limits.cpu"


def test_no_memory_limit_unless_the_template_says_so() -> None:
    assert "memory" not in vllm(pod(manifest()))["resources"]["limits"]
    template = {
        "spec": {"containers": [{"name": "vllm", "resources": {"limits": {"memory": "64Gi"}}}]}
    }
    resources = vllm(pod(with_template(template)))["resources"]
    assert resources["limits"] == {"nvidia.com/gpu": "1", "memory": "64Gi"}


def test_shared_memory_and_caches_can_be_written_and_the_rest_cannot() -> None:
    spec = pod(manifest("  engine: {sharedMemory: 16Gi}"))
    volumes = {item["name"]: item for item in spec["volumes"]}
    mounts = {item["mountPath"]: item for item in vllm(spec)["volumeMounts"]}
    assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"] == {
        "medium": "Memory",
        "sizeLimit": "16Gi",
    }
    writable = [path for path, item in mounts.items() if not item.get("readOnly")]
    assert all(
        "emptyDir" in volumes[mounts[path]["name"]] or path == "/run/larder" for path in writable
    )
    variables = env(spec)
    caches = [
        "HOME",
        "HF_HOME",
        "VLLM_CACHE_ROOT",
        "TRITON_CACHE_DIR",
        "TORCHINDUCTOR_CACHE_DIR",
        "XDG_CACHE_HOME",
    ]
    for name in caches:
        assert variables[name].startswith("/home/larder"), name
    assert "/home/larder" in writable
    assert variables["USER"] == "larder"


def test_the_connector_is_copied_into_an_unmodified_image() -> None:
    spec = pod(manifest("  engine: {pythonPath: '/srv/site-packages:/x', payloadImage: p:2}"))
    (init,) = spec["initContainers"]
    assert (init["name"], init["image"]) == ("larder-payload", "p:2")
    assert init["command"] == ["cp", "-r", "/payload/.", "/opt/larder/"]
    assert env(spec)["PYTHONPATH"] == "/opt/larder/site-packages:/srv/site-packages:/x"
    assert env(pod(manifest()))["PYTHONPATH"] == "/opt/larder/site-packages"
    mount = next(item for item in vllm(spec)["volumeMounts"] if item["mountPath"] == "/opt/larder")
    assert mount["readOnly"] is True


@pytest.mark.parametrize(
    ("model", "path", "claim"),
    [
        ("{name: org/m, revision: abc}", "org/m", None),
        ("{name: org/m, path: /srv/m}", "/srv/m", None),
        ("{name: org/m, volumeClaimName: pvc}", "/models", "pvc"),
        ("{name: org/m, volumeClaimName: pvc, path: a/b}", "/models/a/b", "pvc"),
        ("{name: org/m, volumeClaimName: pvc, path: /a}", "/models/a", "pvc"),
    ],
)
def test_model_by_name_path_or_claim(model: str, path: str, claim: str | None) -> None:
    spec = pod(manifest(model=model))
    assert flag(spec, "--model") == path
    assert flag(spec, "--served-model-name") == "org/m"
    assert ("--revision" in vllm(spec)["args"]) is (path == "org/m")
    claims = [
        item["persistentVolumeClaim"] for item in spec["volumes"] if "persistentVolumeClaim" in item
    ]
    assert claims == ([{"claimName": claim, "readOnly": True}] if claim else [])
    mounted = [item for item in vllm(spec)["volumeMounts"] if item["mountPath"] == "/models"]
    assert mounted == (
        [{"name": "models", "mountPath": "/models", "readOnly": True}] if claim else []
    )


def test_secrets_are_references() -> None:
    parsed = manifest(
        "  engine: {apiKeySecretRef: {name: keys}}\n  imagePullSecrets: [{name: registry}]",
        model="{name: org/m, tokenSecretRef: {name: hf, key: t}}",
    )
    spec = pod(parsed)
    assert env(spec)["HF_TOKEN"] == {"secretKeyRef": {"name": "hf", "key": "t"}}
    assert env(spec)["VLLM_API_KEY"] == {"secretKeyRef": {"name": "keys", "key": "api-key"}}
    assert spec["imagePullSecrets"] == [{"name": "registry"}]
    assert not {"--api-key", "--hf-token"} & set(vllm(spec)["args"])
    leaf = KeyPair("certificate", "PRIVATE")
    refs = dataclasses.replace(
        STREAM, redis_password="PRIVATE", router_key="PRIVATE",
        tls=TlsMaterial({"key": "PRIVATE"}, "trusted", {"engine": leaf}),
    )  # fmt: skip
    assert "PRIVATE" not in json.dumps(engines.build(parsed, refs, SETTINGS))


def test_probes_wait_for_the_model_and_deaths_are_slow() -> None:
    item = deployment(manifest("  engine: {startupTimeoutSeconds: 3605}"))
    container = vllm(item["spec"]["template"]["spec"])
    startup = container["startupProbe"]
    assert startup["httpGet"] == {"path": "/health", "port": "http"}
    assert startup["failureThreshold"] * startup["periodSeconds"] == 3610
    assert item["spec"]["progressDeadlineSeconds"] > 3610
    liveness = container["livenessProbe"]
    assert liveness["failureThreshold"] * liveness["periodSeconds"] >= 60


@pytest.mark.parametrize(
    ("args", "grace_s"),
    [
        ("[]", 90),
        ("[--shutdown-timeout=300]", 330),
        ("[--shutdown_timeout, '300']", 330),
        ("[--shutdown-timeout=0]", 30),
    ],
)
def test_the_grace_period_outlasts_draining(args: str, grace_s: int) -> None:
    spec = pod(manifest(decode=f"{{args: {args}}}"))
    assert spec["terminationGracePeriodSeconds"] == grace_s
    shutdown = [word for word in vllm(spec)["args"] if word.startswith("--shutdown")]
    assert len(shutdown) == 1
    if args == "[]":
        assert flag(spec, "--shutdown-timeout") == "60"
    assert flag(spec, "--disable-access-log-for-endpoints") == "/health,/metrics"


def test_rollouts_need_no_spare_gpu() -> None:
    strategy = deployment(manifest())["spec"]["strategy"]
    assert strategy == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1},
    }
    strategy = deployment(manifest("  engine: {device: cpu}"))["spec"]["strategy"]
    assert strategy["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}


# What rolls pods, and what does not.


def live(item: dict[str, Any], refs: Refs = REFS) -> Refs:
    """Refs as they are once `item` is in the cluster."""
    component = item["metadata"]["labels"][names.COMPONENT_LABEL]
    upgrade = item["metadata"]["annotations"].get(engines.UPGRADE_ANNOTATION, "")
    return dataclasses.replace(
        refs,
        images_in_use={component: engines.images_in_use(item)},
        live_upgrades={component: upgrade},
    )


NEWER = dataclasses.replace(
    SETTINGS, operator_version="9.9.9",
    images=dataclasses.replace(IMAGES, engine_cuda="vllm/vllm-openai:v0.40.0", payload="larder-payload:2"),
)  # fmt: skip


def images_of(item: dict[str, Any]) -> tuple[str, str]:
    spec = item["spec"]["template"]["spec"]
    return vllm(spec)["image"], spec["initContainers"][0]["image"]


def test_a_newer_operator_rolls_no_engine() -> None:
    before = deployment(manifest())
    settings = dataclasses.replace(
        NEWER, operator_namespace="other", operator_name="other", cluster_domain="x.local", watch_namespaces=("a",),
        certificate_lifetime_s=1, secret_refresh_s=1, resync_s=1.0, num_workers=1, http_port=1,
    )  # fmt: skip
    after = deployment(manifest(), refs=live(before), settings=settings)
    assert after == before
    assert images_of(deployment(manifest(), settings=NEWER)) == (
        "vllm/vllm-openai:v0.40.0",
        "larder-payload:2",
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (
            manifest(decode="{args: [--max-num-seqs=8]}"),
            ("vllm/vllm-openai:v0.40.0", "larder-payload:2"),
        ),
        (manifest("  engine: {image: mine:1}"), ("mine:1", "larder-payload:2")),
        (manifest("  engine: {payloadImage: p:1}"), ("vllm/vllm-openai:v0.40.0", "p:1")),
        (manifest(decode="{replicas: 7}"), ("vllm/vllm-openai:v0.32.0", "larder-payload:1")),
        (
            manifest("  engine: {startupTimeoutSeconds: 60}"),
            ("vllm/vllm-openai:v0.40.0", "larder-payload:2"),
        ),
    ],
    ids=["args", "image", "payload image", "replicas", "probe"],
)
def test_images_in_use_stay_until_the_pods_are_replaced_anyway(
    changed: KVCacheManifest, expected: tuple[str, str]
) -> None:
    before = deployment(manifest())
    after = deployment(changed, refs=live(before), settings=NEWER)
    assert images_of(after) == expected
    again = deployment(changed, refs=live(after), settings=NEWER)
    assert again == after


def test_taking_a_set_image_away_brings_the_newest_default() -> None:
    before = deployment(manifest("  engine: {image: mine:1}"))
    assert (
        images_of(deployment(manifest(), refs=live(before), settings=NEWER))[0]
        == "vllm/vllm-openai:v0.40.0"
    )


def test_upgrade_brings_new_images_once() -> None:
    before = deployment(manifest())
    asked = dataclasses.replace(live(before), upgrade="2026-11-22T00:00:00Z")
    after = deployment(manifest(), refs=asked, settings=NEWER)
    assert images_of(after) == ("vllm/vllm-openai:v0.40.0", "larder-payload:2")
    newest = dataclasses.replace(
        NEWER, images=dataclasses.replace(IMAGES, engine_cuda="vllm/vllm-openai:v0.50.0")
    )
    done = dataclasses.replace(live(after), upgrade="2026-11-22T00:00:00Z")
    assert deployment(manifest(), refs=done, settings=newest) == after


def test_an_image_that_a_stranger_sets_is_drift() -> None:
    before = deployment(manifest())
    drifted = copy.deepcopy(before)
    drifted["spec"]["template"]["spec"]["containers"][0]["image"] = "strange:1"
    assert deployment(manifest(), refs=live(drifted), settings=NEWER) == before


def test_choose_images() -> None:
    default, old = EngineImages("e:2", "p:2"), ImagesInUse("e:1", "p:1", "digest")
    kept = EngineImages("e:1", "p:1")
    assert choose_images(default=default, in_use=None, digest="digest", is_upgrade=False) == default
    assert choose_images(default=default, in_use=old, digest="digest", is_upgrade=False) == kept
    assert choose_images(default=default, in_use=old, digest="other", is_upgrade=False) == default
    assert choose_images(default=default, in_use=old, digest="digest", is_upgrade=True) == default
    unmarked = ImagesInUse("e:1", None, "")
    assert choose_images(
        default=default, in_use=unmarked, digest="digest", is_upgrade=False
    ) == EngineImages("e:1", "p:2")


# What a template may change, and what not.


def test_a_template_adds_and_changes_what_is_the_users() -> None:
    template = yaml.safe_load("""
metadata: {annotations: {team: search}, labels: {tier: gold}}
spec:
  priorityClassName: high
  nodeSelector: {pool: a}
  tolerations: [{key: pool, operator: Exists}]
  securityContext: {runAsUser: 1000, supplementalGroups: [44, 7070]}
  initContainers: [{name: warm, image: busybox:1}]
  containers:
  - name: vllm
    command: [numactl, --membind=0, python3, -m, vllm.entrypoints.openai.api_server]
    env: [{name: NCCL_DEBUG, value: INFO}, {name: HF_HOME, value: /cache}, {name: OMP_NUM_THREADS, value: "1"}]
    volumeMounts: [{name: cache, mountPath: /cache}]
    livenessProbe: null
    resources: {limits: {memory: 64Gi}}
  - {name: sidecar, image: "log:1"}
  volumes: [{name: cache, persistentVolumeClaim: {claimName: hub}}]
""")
    item = deployment(with_template(template, "  engine: {device: cpu}"))
    kubernetes_validate.validate(item, "1.35", strict=True)
    spec = item["spec"]["template"]["spec"]
    assert item["spec"]["template"]["metadata"]["labels"]["tier"] == "gold"
    assert [container["name"] for container in spec["containers"]] == ["vllm", "sidecar"]
    assert [container["name"] for container in spec["initContainers"]] == ["larder-payload", "warm"]
    assert env(spec)["HF_HOME"] == "/cache"
    assert env(spec)["OMP_NUM_THREADS"] == "1"
    assert vllm(spec)["command"][0] == "numactl"
    assert "--kv-transfer-config" in vllm(spec)["args"]
    assert "livenessProbe" not in vllm(spec)
    assert spec["securityContext"]["runAsUser"] == 1000


def test_tolerations_of_a_template_keep_that_of_the_gpus() -> None:
    spec = pod(with_template({"spec": {"tolerations": [{"key": "pool", "operator": "Exists"}]}}))
    gpu = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert spec["tolerations"] == [{"key": "pool", "operator": "Exists"}, gpu]


@pytest.mark.parametrize(
    "resources",
    [
        None,
        {"limits": None},
        {"requests": None},
        {"limits": {"nvidia.com/gpu": None}, "requests": {"nvidia.com/gpu": None}},
        {"limits": {"nvidia.com/gpu": "4"}, "requests": {"nvidia.com/gpu": "4"}},
        {"limits": {"nvidia.com/gpu": True}},
        {"limits": []},
    ],
)
def test_a_template_can_not_change_how_many_gpus_an_engine_has(resources: Any) -> None:
    parsed = with_template(in_vllm(resources=resources), decode="{tensorParallelSize: 2}")
    with pytest.raises(TemplateRefused) as refused:
        engines.build_role(parsed, REFS, SETTINGS, Component.DECODE)
    assert refused.value.reason == "InvalidTemplate"
    assert "spec.decode.template.spec.containers[vllm].resources" in refused.value.message


def test_a_template_may_repeat_the_number_of_gpus_and_leaves_a_cpu_engine_alone() -> None:
    gpus = {"nvidia.com/gpu": 2}
    template = in_vllm(resources={"limits": {**gpus, "memory": "64Gi"}, "requests": gpus})
    resources = vllm(pod(with_template(template, decode="{tensorParallelSize: 2}")))["resources"]
    assert int(resources["limits"]["nvidia.com/gpu"]) == 2
    assert resources["limits"]["memory"] == "64Gi"
    on_cpu = with_template(in_vllm(resources=None), "  engine: {device: cpu}")
    assert "resources" not in vllm(pod(on_cpu))


def in_vllm(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "vllm", **fields}]}}


@pytest.mark.parametrize(
    ("template", "refs", "path"),
    [
        (in_vllm(args=["--max-num-seqs=8"]), REFS, "spec.containers[vllm].args"),
        (in_vllm(args=None), REFS, "spec.containers[vllm].args"),
        (in_vllm(env=[{"name": "PYTHONPATH", "value": "/x"}]), REFS, "spec.containers[vllm].env[PYTHONPATH]"),
        (in_vllm(env=[{"name": "POD_NAME", "value": "x"}]), REFS, "spec.containers[vllm].env[POD_NAME]"),
        (in_vllm(env=[{"name": "HF_TOKEN", "value": "x"}]), REFS, "spec.containers[vllm].env[HF_TOKEN]"),
        (in_vllm(env=[{"name": "VLLM_API_KEY", "value": "x"}]), REFS, "spec.containers[vllm].env[VLLM_API_KEY]"),
        (in_vllm(ports=[{"containerPort": 8000, "name": "web"}]), REFS, "spec.containers[vllm].ports[8000]"),
        (in_vllm(volumeMounts=[{"name": "x", "mountPath": "/opt/larder"}]),
         REFS, "spec.containers[vllm].volumeMounts[/opt/larder]"),
        (in_vllm(volumeMounts=[{"name": "x", "mountPath": "/run/larder/"}]),
         REFS, "spec.containers[vllm].volumeMounts[/run/larder]"),
        (in_vllm(volumeMounts=[{"name": "x", "mountPath": "/etc/larder/tls"}]),
         STREAM, "spec.containers[vllm].volumeMounts[/etc/larder/tls]"),
        ({"spec": {"volumes": [{"name": "larder-socket", "emptyDir": {}}]}}, REFS, "spec.volumes[larder-socket]"),
        ({"spec": {"volumes": [{"name": "larder-payload", "emptyDir": {"medium": "Memory"}}]}},
         REFS, "spec.volumes[larder-payload]"),
        ({"spec": {"volumes": [{"name": "larder-tls", "emptyDir": {}}]}}, STREAM, "spec.volumes[larder-tls]"),
        ({"spec": {"volumes": None}}, REFS, "spec.volumes[larder-payload]"),
        ({"spec": {"securityContext": {"supplementalGroups": [1]}}}, REFS, "spec.securityContext.supplementalGroups"),
        ({"spec": {"restartPolicy": "Never"}}, REFS, "spec.restartPolicy"),
        ({"spec": {"initContainers": [{"name": "larder-payload", "command": ["true"]}]}},
         REFS, "spec.initContainers[larder-payload].command"),
        ({"spec": {"initContainers": [{"name": "larder-payload", "args": ["x"]}]}},
         REFS, "spec.initContainers[larder-payload].args"),
        ({"metadata": {"labels": {names.INSTANCE_LABEL: "x"}}}, REFS, f"metadata.labels.{names.INSTANCE_LABEL}"),
        ({"metadata": {"labels": {names.COMPONENT_LABEL: None}}}, REFS, f"metadata.labels.{names.COMPONENT_LABEL}"),
        ({"metadata": {"labels": {names.MANAGED_BY_LABEL: "x"}}}, REFS, f"metadata.labels.{names.MANAGED_BY_LABEL}"),
    ],
)  # fmt: skip
def test_what_larder_owns_is_refused_with_its_path(
    template: dict[str, Any], refs: Refs, path: str
) -> None:
    parsed = with_template(
        template,
        "  engine: {apiKeySecretRef: {name: k}}",
        model="{name: m, tokenSecretRef: {name: hf}}",
    )
    with pytest.raises(TemplateRefused) as refused:
        engines.build_role(parsed, refs, SETTINGS, Component.DECODE)
    assert refused.value.message.startswith(f"spec.decode.template.{path}: ")
    assert refused.value.reason == (
        "ReservedArgument" if path.endswith(".args") and "vllm" in path else "InvalidTemplate"
    )
    assert engines.build_role(parsed, refs, SETTINGS, Component.PREFILL), (
        "the other role is not held up"
    )


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (in_vllm(args=["--kv_transfer_config.kv_role=x"]),
         "args: remove --kv_transfer_config: Larder sets --kv-transfer-config itself"),
        (in_vllm(args=["-pp", "2"]), "args: remove -pp: Larder sets --pipeline-parallel-size itself"),
        (in_vllm(command=["vllm", "serve", "--tensor_parallel", "2"]),
         "command: remove --tensor_parallel: Larder sets --tensor-parallel-size itself"),
        (in_vllm(command=["sh", "-c", "exec vllm serve --config x.yaml"]),
         "command: remove --config: Larder sets --config itself"),
    ],
)  # fmt: skip
def test_owned_flags_in_a_template_are_refused(template: dict[str, Any], message: str) -> None:
    with pytest.raises(TemplateRefused) as refused:
        engines.build(with_template(template), REFS, SETTINGS)
    assert refused.value.reason == "ReservedArgument"
    assert refused.value.message.startswith(f"spec.decode.template.spec.containers[vllm].{message}")


def test_owned_flags_in_args_that_the_schema_let_pass_are_refused() -> None:
    parsed = manifest()
    assert parsed.prefill is not None
    role = dataclasses.replace(parsed.prefill, args=("--conf", "x.yaml"))
    with pytest.raises(TemplateRefused, match=r"^spec\.prefill\.args: remove --conf") as refused:
        engines.build(dataclasses.replace(parsed, prefill=role), REFS, SETTINGS)
    assert refused.value.reason == "ReservedArgument"


KEYS = ["metadata", "spec", "labels", "containers", "initContainers", "volumes", "env", "name", "value", "args",
        "command",
        "image", "ports", "containerPort", "volumeMounts", "mountPath", "securityContext", "supplementalGroups",
        "tolerations", "$patch"]  # fmt: skip
LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(0, 9000),
    st.sampled_from(["vllm", "larder-payload", "PYTHONPATH", "/run/larder", "--port", "x", ""]),
)  # fmt: skip
JSON = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=12,
)


@examples(max_examples=500, deadline=None)
@given(
    metadata=JSON,
    spec=JSON,
    container=st.dictionaries(st.sampled_from(KEYS), JSON, max_size=4),
    is_wrapped=st.booleans(),
)
def test_any_template_is_merged_or_refused_in_words(
    metadata: Any, spec: Any, container: dict[str, Any], is_wrapped: bool
) -> None:
    """Templates are opaque to the schema: whatever is in them must not stop the operator."""
    if is_wrapped:
        spec = {"containers": [{**container, "name": "vllm"}]}
    parsed = with_template({"metadata": metadata, "spec": spec})
    try:
        (item,) = engines.build_role(parsed, REFS, SETTINGS, Component.DECODE)
    except TemplateRefused as refused:
        assert refused.message.startswith("spec.decode.template."), refused.message  # noqa: PT017
        return
    assert extra_config(item["spec"]["template"]["spec"])["engine_name"] == "$(POD_NAME)"
    assert (
        item["spec"]["selector"]["matchLabels"].items()
        <= item["spec"]["template"]["metadata"]["labels"].items()
    )
    assert all(images_of(item))


def test_rendering_twice_gives_the_same_bytes() -> None:
    first, second = (json.dumps(engines.build(manifest(), REFS, SETTINGS)) for _ in range(2))
    assert first == second
