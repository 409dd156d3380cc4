"""The command line of an engine, from a manifest: what Larder owns, what it defaults, what the author decides."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from cacheservice.commands.agents import AgentSite, agent_argv
from cacheservice.commands.engines import CPU_KV_BYTES, EngineRole, EngineSite, engine_command
from cacheservice.connector.config import parse_extra_config
from cacheservice.manifest import KVCacheManifest, parse_manifest

SITE = EngineSite(
    name="decode", role=EngineRole.DECODE, host="127.0.0.1", port=8101, socket_dir="/run/larder"
)


def manifest(
    decode: str = "{}", *, spec: str = "", engine: str = "{device: cpu}"
) -> KVCacheManifest:
    text = f"""
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {{name: demo}}
spec:
  model: {{name: org/model, revision: abc}}
  engine: {engine}
  prefill: {{}}
  decode: {decode}
{spec}
"""
    return parse_manifest(text, source="test")


def value_of(argv: tuple[str, ...], flag: str) -> str:
    assert argv.count(flag) == 1, (flag, argv)
    return argv[argv.index(flag) + 1]


def test_the_connector_is_configured_as_the_readme_says() -> None:
    argv = engine_command(manifest(), SITE).argv
    assert argv[:3] == ("python3", "-m", "vllm.entrypoints.openai.api_server")
    assert value_of(argv, "--prefix-caching-hash-algo") == "sha256_cbor"
    config = json.loads(value_of(argv, "--kv-transfer-config"))
    assert config == {
        "kv_connector": "LarderConnector",
        "kv_connector_module_path": "cacheservice.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "socket_dir": "/run/larder",
            "engine_name": "decode",
            "role": "decode",
            "lookup_ms": 1000,
        },
    }


@pytest.mark.parametrize(
    "place", [{"socket_dir": "/run/larder"}, {"agent_address": "127.0.0.1:7500"}]
)
@pytest.mark.parametrize("role", list(EngineRole))
def test_the_connector_takes_what_is_written_for_it(
    place: dict[str, str], role: EngineRole
) -> None:
    site = dataclasses.replace(SITE, role=role, **{"socket_dir": None, **place})
    other = "  cache: {chunkTokens: 512, cpu: 1Gi}"
    argv = engine_command(manifest("{tensorParallelSize: 2}", spec=other), site).argv
    extra = json.loads(value_of(argv, "--kv-transfer-config"))["kv_connector_extra_config"]
    config = parse_extra_config(extra, kv_role="kv_both")
    assert config.role == role
    assert config.tokens_per_chunk == 512
    assert config.tensor_parallel_sizes == (1, 2)


def test_an_engine_without_cache_has_no_connector_and_is_the_same_otherwise() -> None:
    control = engine_command(manifest(), dataclasses.replace(SITE, socket_dir=None)).argv
    cached = engine_command(manifest(), SITE).argv
    at = cached.index("--kv-transfer-config")
    assert control == cached[:at] + cached[at + 2 :]


def test_cpu_engines_have_bounded_memory_and_do_not_compile() -> None:
    argv = engine_command(manifest(), SITE).argv
    assert value_of(argv, "--kv-cache-memory-bytes") == str(CPU_KV_BYTES)
    assert "--enforce-eager" in argv


def test_cuda_engines_keep_vllms_own_defaults() -> None:
    command = engine_command(
        manifest(engine="{device: cuda}"), dataclasses.replace(SITE, num_threads=4)
    )
    assert "--enforce-eager" not in command.argv
    assert "--kv-cache-memory-bytes" not in command.argv
    assert "OMP_NUM_THREADS" not in command.env


def test_threads_are_set_only_where_engines_share_a_machine() -> None:
    assert "OMP_NUM_THREADS" not in engine_command(manifest(), SITE).env
    env = engine_command(manifest(), dataclasses.replace(SITE, num_threads=2)).env
    assert (env["OMP_NUM_THREADS"], env["VLLM_CPU_OMP_THREADS_BIND"]) == ("2", "nobind")


@pytest.mark.parametrize("written", ["--kv-cache-memory-bytes=5", "--kv_cache_memory_bytes=5"])
def test_args_replace_defaults_and_come_last(written: str) -> None:
    argv = engine_command(
        manifest(f"{{args: [{written}, --no-enforce-eager, --dtype=float32]}}"), SITE
    ).argv
    assert argv[-3:] == (written, "--no-enforce-eager", "--dtype=float32")
    assert "--kv-cache-memory-bytes" not in argv
    assert "--enforce-eager" not in argv


def test_a_folder_replaces_the_hub_id_and_its_revision() -> None:
    hub = engine_command(manifest(), SITE).argv
    assert (value_of(hub, "--model"), value_of(hub, "--revision")) == ("org/model", "abc")
    local = engine_command(manifest(), dataclasses.replace(SITE, model="/models/x")).argv
    assert value_of(local, "--model") == "/models/x"
    assert "--revision" not in local
    assert value_of(local, "--served-model-name") == "org/model"


def test_tensor_parallel_size_is_given_where_it_is_not_one() -> None:
    argv = engine_command(manifest("{tensorParallelSize: 4}"), SITE).argv
    assert value_of(argv, "--tensor-parallel-size") == "4"
    assert "--tensor-parallel-size" not in engine_command(manifest(), SITE).argv


def test_the_agent_takes_what_is_written_for_it() -> None:
    from cacheservice.agent.config import AgentConfig, build_config, flag_of

    cache = manifest(spec="  cache: {cpu: 64Mi, eviction: LRU}").cache
    site = AgentSite(
        node="n", socket_dir=Path("/run/larder"), http="127.0.0.1:9000", index="unix:///run/redis.sock?db=0",
        key_prefix="larder:", index_password_file=Path("/run/password"), listen="127.0.0.1:9001",
    )  # fmt: skip
    argv = list(agent_argv(cache, site, python="python3"))
    assert argv[:4] == ["python3", "-m", "cacheservice", "serve"]
    fields = {flag_of(field.name): field.name for field in dataclasses.fields(AgentConfig)}
    values: dict[str, object] = {}
    rest = argv[4:]
    while rest:
        name = fields[rest.pop(0)]
        values[name] = True if name == "insecure" else rest.pop(0)
    config = build_config(values)
    assert config.cpu == 64 << 20
    assert config.eviction.value == "LRU"
    assert str(config.listen) == "127.0.0.1:9001"
