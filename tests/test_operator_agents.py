"""The agents' DaemonSet: what its agent understands, how much memory it gets, on which nodes it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cacheoperator.objects.placement import matches_node, placement, untolerated_taint
from operator_world import REFS, STREAM_REFS, manifest, one, pod_spec, rendered

from cacheservice.agent.config import AgentConfig, build_config, flag_of
from cacheservice.commands.agents import (
    OWN_BYTES,
    SHARD_BYTES,
    agent_memory_bytes,
    max_shards,
)
from cacheservice.manifest import KVCacheManifest

EXTERNAL = (
    "  redis: {external: {address: 'r.infra.svc:6380', credentialsSecretRef: {name: credentials},"
    " tls: {serverName: redis.internal, caSecretRef: {name: ca, key: root.pem}, clientSecretRef: {name: client}}}}\n"
)


def agent_pod(parsed: KVCacheManifest, refs: Any = REFS) -> dict[str, Any]:
    return pod_spec(one(rendered(parsed, refs), "DaemonSet", "demo-cache"))


@pytest.fixture
def agent_config(tmp_path: Path) -> Callable[[KVCacheManifest], AgentConfig]:
    """What the agent makes of its arguments once the kubelet has put in node, address and files (without a user)."""
    folders = {"tls": "tls.crt tls.key ca.crt", "redis": "password", "redis-tls": "ca.crt tls.crt tls.key"}  # fmt: skip
    for folder, files in folders.items():
        (tmp_path / folder).mkdir()
        for file in files.split():
            (tmp_path / folder / file).write_text("")
    return lambda parsed: _agent_config(parsed, str(tmp_path))


def _agent_config(parsed: KVCacheManifest, folder: str) -> AgentConfig:
    container = agent_pod(parsed)["containers"][0]
    assert [*container["command"]] == ["python3", "-m", "cacheservice", "serve"]
    fields = {flag_of(field.name): field.name for field in dataclasses.fields(AgentConfig)}
    values: dict[str, object] = {}
    words = [
        word.replace("$(POD_IP)", "fd00::7")
        .replace("$(NODE_NAME)", "node-1")
        .replace("/etc/larder", folder)
        for word in container["args"]
    ]
    while words:
        name = fields[words.pop(0)]
        values[name] = True if name == "insecure" else words.pop(0)
    return build_config(values)


def mounted(spec: dict[str, Any]) -> set[str]:
    return {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]}


AgentConfigOf = Callable[[KVCacheManifest], AgentConfig]


def test_the_agent_takes_every_argument(agent_config: AgentConfigOf) -> None:
    config = agent_config(manifest("  cache: {cpu: 2Gi, eviction: LRU, socketGroup: 4242}\n"))
    assert config.cpu == 2 << 30
    assert config.eviction.value == "LRU"
    assert config.socket_group == "4242"
    assert config.node == "node-1"
    assert config.index == "redis://demo-redis.serving.svc:6379/0"
    assert config.key_prefix == "larder:0b0e5c1c:"
    assert str(config.advertise) == "[fd00::7]:7500"
    assert config.tls_owner == "serving/demo"
    assert config.tls_server_name == "agent.demo.serving.larder.internal"
    assert config.drain_seconds == 20
    assert config.wait_for_memory_seconds == 120
    assert not config.insecure


def test_the_agent_takes_every_argument_for_an_external_redis(
    agent_config: AgentConfigOf, tmp_path: Path
) -> None:
    config = agent_config(manifest(EXTERNAL))
    assert config.index == "rediss://r.infra.svc:6380/0"
    assert config.index_server_name == "redis.internal"
    files = (
        config.index_username_file, config.index_password_file, config.index_ca_file, config.index_cert_file,
        config.index_key_file,
    )  # fmt: skip
    paths = [str(path).replace(str(tmp_path), "/etc/larder") for path in files]
    volumes = {volume["name"]: volume for volume in agent_pod(manifest(EXTERNAL))["volumes"]}
    there = {
        f"{folder}/{item['path']}": (source["secret"]["name"], item["key"], "optional" in source["secret"])
        for folder, name in (("/etc/larder/redis", "redis-auth"), ("/etc/larder/redis-tls", "redis-tls"))
        for source in volumes[name]["projected"]["sources"]
        for item in source["secret"]["items"]
    }  # fmt: skip
    assert {path: there[path] for path in paths} == {
        "/etc/larder/redis/username": ("credentials", "username", True),
        "/etc/larder/redis/password": ("credentials", "password", False),
        "/etc/larder/redis-tls/ca.crt": ("ca", "root.pem", False),
        "/etc/larder/redis-tls/tls.crt": ("client", "tls.crt", False),
        "/etc/larder/redis-tls/tls.key": ("client", "tls.key", False),
    }
    assert {"/etc/larder/redis", "/etc/larder/redis-tls"} < mounted(agent_pod(manifest(EXTERNAL)))


def test_a_redis_that_asks_for_nothing_is_given_nothing(agent_config: AgentConfigOf) -> None:
    plain = manifest("  redis: {external: {address: 'r:6379'}}\n")
    config = agent_config(plain)
    assert config.index == "redis://r:6379/0"
    assert config.index_password_file is None
    assert not {"/etc/larder/redis", "/etc/larder/redis-tls"} & mounted(agent_pod(plain))


@pytest.mark.parametrize(
    ("spec", "secret"),
    [
        ("", "demo-agent-tls"),
        ("  tls: {mode: Secret, secretRef: {name: mine}}\n", "mine"),
        ("  tls: {mode: 'Off'}\n", None),
    ],
)
def test_tcp_speaks_tls_unless_the_manifest_says_off(
    spec: str, secret: str | None, agent_config: AgentConfigOf
) -> None:
    parsed = manifest(spec)
    config = agent_config(parsed)
    assert config.insecure is (secret is None)
    assert (config.tls_cert is None) is (secret is None)
    names = [v["secret"]["secretName"] for v in agent_pod(parsed)["volumes"] if v["name"] == "tls"]
    assert names == ([] if secret is None else [secret])


def test_the_folder_of_sockets_is_shared_or_the_pods_own() -> None:
    shared = agent_pod(manifest("  cache: {socketGroup: 4242}\n"))
    assert shared["volumes"][0] == {
        "name": "sockets",
        "hostPath": {"path": "/run/larder/serving/demo", "type": "DirectoryOrCreate"},
    }
    (prepare,) = shared["initContainers"]
    assert 'chown("/run/larder", 0, 4242)' in prepare["args"][0]
    assert 'chmod("/run/larder", 0o770)' in prepare["args"][0]
    assert shared["securityContext"]["supplementalGroups"] == [4242]
    own = agent_pod(manifest(), STREAM_REFS)
    assert own["volumes"][0] == {"name": "sockets", "emptyDir": {}}
    assert "initContainers" not in own


def test_engines_on_the_stream_path_find_the_agent_of_their_node() -> None:
    service = one(rendered(manifest(), STREAM_REFS), "Service", "demo-cache")["spec"]
    assert service["internalTrafficPolicy"] == "Local"
    assert service["ports"][0]["port"] == 7500


def test_one_node_at_a_time_or_when_a_person_says_so() -> None:
    def strategy(spec: str) -> Any:
        return one(rendered(manifest(spec)), "DaemonSet", "demo-cache")["spec"]["updateStrategy"]

    assert strategy("") == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxUnavailable": 1, "maxSurge": 0},
    }
    assert strategy("  cache: {updateStrategy: OnDelete}\n") == {"type": "OnDelete"}


@pytest.mark.parametrize("cpu", ["64Mi", "8Gi", "512Gi"])
def test_memory_has_room_for_the_arena_and_all_shards_that_are_allowed(cpu: str) -> None:
    cache = manifest(f"  cache: {{cpu: {cpu}}}\n").cache
    page_tables = cache.cpu_bytes // 512
    own = OWN_BYTES + SHARD_BYTES * max_shards(cache)
    assert agent_memory_bytes(cache) == cache.cpu_bytes + own + page_tables
    container = agent_pod(manifest(f"  cache: {{cpu: {cpu}}}\n"))["containers"][0]
    assert container["resources"]["limits"] == {
        "memory": container["resources"]["requests"]["memory"]
    }
    assert str(max_shards(cache)) == container["args"][container["args"].index("--max-shards") + 1]


def test_overhead_in_the_manifest_is_the_overhead() -> None:
    cache = manifest("  cache: {cpu: 8Gi, overhead: 2Gi}\n").cache
    assert agent_memory_bytes(cache) == 10 << 30
    left = (2 << 30) - OWN_BYTES - (8 << 30) // 512
    assert max_shards(cache) == left // SHARD_BYTES
    small = manifest("  cache: {cpu: 8Gi, overhead: 1Mi}\n").cache
    assert max_shards(small) == max_shards(manifest("  cache: {cpu: 8Gi}\n").cache)


def test_a_large_arena_has_time_to_be_allocated() -> None:
    def startup_s(cpu: str) -> int:
        probe = agent_pod(manifest(f"  cache: {{cpu: {cpu}}}\n"))["containers"][0]["startupProbe"]
        return int(probe["failureThreshold"] * probe["periodSeconds"])

    assert startup_s("1Gi") >= 120 + 10
    assert startup_s("512Gi") >= 120 + 2 * 640, "twice the target of 10 s per 8 GiB"


GPU = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def on(selector: str = "", tolerations: str = "", affinity: str = "") -> str:
    """An engine's role with a template that says where it goes."""
    parts = [f"nodeSelector: {selector}"] if selector else []
    parts += [f"tolerations: {tolerations}"] if tolerations else []
    if affinity:
        term = f"nodeSelectorTerms: [{{matchExpressions: [{affinity}]}}]"
        parts.append(
            f"affinity: {{nodeAffinity: {{requiredDuringSchedulingIgnoredDuringExecution: {{{term}}}}}}}"
        )
    return f"{{template: {{spec: {{{', '.join(parts)}}}}}}}"


def test_agents_follow_the_engines() -> None:
    same = placement(manifest(prefill=on("{pool: a}"), decode=on("{pool: a}")))
    assert same == {"nodeSelector": {"pool": "a"}, "tolerations": [GPU]}
    anywhere = placement(manifest(prefill=on("{pool: a}"), decode="{}"))
    assert anywhere == {"tolerations": [GPU]}
    tolerated = placement(manifest(decode=on(tolerations="[{key: x, operator: Exists}]")))
    assert tolerated == {"tolerations": [GPU, {"key": "x", "operator": "Exists"}]}
    cpu = placement(manifest("  engine: {device: cpu}\n"))
    assert cpu == {}


def test_agents_are_on_the_nodes_of_both_roles() -> None:
    spec = placement(manifest(
        prefill=on("{pool: a}", affinity="{key: disk, operator: In, values: [fast]}"), decode=on("{pool: b}"),
    ))  # fmt: skip
    wanted = {
        "prefill's": ({"pool": "a", "disk": "fast"}, True),
        "decode's": ({"pool": "b"}, True),
        "half of prefill's": ({"pool": "a"}, False),
        "nobody's": ({"pool": "c", "disk": "fast"}, False),
    }
    assert {who: matches_node(spec, labels, "n") for who, (labels, _) in wanted.items()} == {
        who: answer for who, (_, answer) in wanted.items()
    }


def test_a_manifest_that_chooses_is_obeyed() -> None:
    spec = "  cache: {nodeSelector: {tier: kv}, tolerations: [{key: y, operator: Exists}]}\n"
    chosen = placement(manifest(spec, decode=on("{pool: b}", tolerations="[{key: x}]")))
    assert chosen == {"nodeSelector": {"tier": "kv"}, "tolerations": [{"key": "y", "operator": "Exists"}]}  # fmt: skip


def test_nonsense_in_a_template_is_left_to_the_merge() -> None:
    odd = "{template: {spec: {nodeSelector: x, tolerations: {a: b}, affinity: [1]}}}"
    assert placement(manifest(decode=odd)) == {"tolerations": [GPU]}


@pytest.mark.parametrize(
    ("taint", "left"),
    [
        ({"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"}, ""),
        ({"key": "nvidia.com/gpu", "effect": "NoExecute"}, "nvidia.com/gpu:NoExecute"),
        ({"key": "x", "value": "y", "effect": "NoSchedule"}, "x=y:NoSchedule"),
        ({"key": "x", "effect": "PreferNoSchedule"}, ""),
        ({"key": "node.kubernetes.io/unreachable", "effect": "NoExecute"}, ""),
    ],
)
def test_taints_that_keep_agents_off_are_named(taint: dict[str, str], left: str) -> None:
    assert untolerated_taint({"tolerations": [GPU]}, [taint]) == left


@pytest.mark.parametrize(
    ("expression", "answers"),
    [
        ({"key": "n", "operator": "In", "values": ["1", "2"]}, (True, False, False)),
        ({"key": "n", "operator": "NotIn", "values": ["1"]}, (False, True, True)),
        ({"key": "n", "operator": "Exists"}, (True, True, False)),
        ({"key": "n", "operator": "DoesNotExist"}, (False, False, True)),
        ({"key": "n", "operator": "Gt", "values": ["4"]}, (False, True, False)),
        ({"key": "n", "operator": "Lt", "values": ["4"]}, (True, False, False)),
    ],
)
def test_node_affinity_is_read_as_the_scheduler_does(
    expression: dict[str, Any], answers: tuple[bool, ...]
) -> None:
    terms = [{"matchExpressions": [expression]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = {"affinity": {"nodeAffinity": required}}
    labels: list[dict[str, str]] = [{"n": "1"}, {"n": "5"}, {}]
    assert tuple(matches_node(spec, some, "node") for some in labels) == answers


@pytest.mark.parametrize(
    "terms",
    [
        3,
        [3],
        [{"matchExpressions": 3}],
        [{"matchExpressions": [3]}],
        [{"matchFields": "x"}],
        [{"matchExpressions": [{"key": ["n"], "operator": "In", "values": 3}]}],
        [{"matchExpressions": [{"key": "n", "operator": "Gt", "values": [None]}]}],
    ],
)
def test_an_affinity_that_makes_no_sense_is_left_to_the_api_server(terms: object) -> None:
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    spec = {"affinity": {"nodeAffinity": required}}
    matches_node(spec, {"n": "1"}, "node")
    parsed = manifest("  cache: {cpu: 1Gi}\n", prefill=None)
    assert parsed.decode is not None
    role = dataclasses.replace(
        parsed.decode, template={"spec": {"nodeSelector": {"a": "b"}, **spec}}
    )
    placement(dataclasses.replace(parsed, decode=role))


@pytest.mark.parametrize(
    "template",
    [
        "volumes: [{name: sockets, emptyDir: {}, hostPath: null}]",
        "volumes: [{name: tls, secret: {secretName: mine}}]",
        "volumes: [{name: redis-auth, secret: {secretName: mine}}]",
        "securityContext: {supplementalGroups: [1]}",
        "initContainers: [{name: socket-dir, command: [echo]}]",
        "initContainers: [{name: socket-dir, securityContext: {privileged: true}}]",
    ],
)
def test_a_template_takes_nothing_away_that_the_cache_rests_on(template: str) -> None:
    refused = rendered(manifest(f"  cache: {{template: {{spec: {{{template}}}}}}}\n"))
    assert [reason for reason, _ in refused.refusals] == ["InvalidTemplate"]
    assert not [item for item in refused.objects if item["kind"] == "DaemonSet"]


def test_a_template_may_add_volumes_groups_and_init_containers() -> None:
    added = (
        "{template: {spec: {volumes: [{name: more, emptyDir: {}}], initContainers: [{name: wait, image: x}],"
        " securityContext: {supplementalGroups: [7070, 1]}}}}"
    )
    spec = agent_pod(manifest(f"  cache: {added}\n"))
    assert [volume["name"] for volume in spec["volumes"]][-1] == "more"
    assert [init["name"] for init in spec["initContainers"]] == ["socket-dir", "wait"]
    assert spec["securityContext"]["supplementalGroups"] == [7070, 1]
