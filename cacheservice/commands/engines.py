"""The command line and environment of one vLLM engine, from a manifest. Pure: nothing is started and nothing is read.

The one place that knows which flags of vLLM Larder sets and how an engine on CPU is set up; used by `larder up`, and
by the operator for the container of an engine pod. Flags that Larder owns were refused in `args` by the manifest's
schema already, so `args` come last and win over the defaults here. No secret is ever among the arguments: vLLM reads
API key and token from the environment.

A model with recurrent state on CPU needs --block-size in `args`: vLLM 0.32 ends a CPU server's steps at other tokens
than those at which it keeps a state, unless told. Which size depends on the model, so that is left to its owner; the
connector warns.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from cacheservice.manifest import Device, KVCacheManifest, Role

CONNECTOR = "LarderConnector"
CONNECTOR_MODULE = "cacheservice.connector"
CPU_LOOKUP_MS = 1000
"""On a CPU a chunk takes longer to compute than this, and the agent shares the cores with the engine: waiting longer
than the default 100 ms for an answer is the better bargain."""
HASH_ALGORITHM = "sha256_cbor"
CPU_KV_BYTES = 1 << 30
"""KV space of a cpu engine when args say nothing. vLLM's own default is a share of all memory: too much here."""
_SHUTDOWN_FLAG = "--shutdown-timeout"


class EngineRole(StrEnum):
    """What an engine is to the cache: `kv_role` for vLLM, and `role` for our connector."""

    PREFILL = "prefill"
    DECODE = "decode"
    BOTH = "both"


@dataclass(frozen=True, slots=True)
class EngineTls:
    """`folder` holds tls.crt, tls.key and ca.crt; `server_name` is the DNS name in the agent's certificate."""

    folder: str
    server_name: str


@dataclass(frozen=True, slots=True)
class EngineSite:
    """What differs from engine to engine and from place to place.

    Exactly one of `socket_dir` and `agent_address` is set, or neither: an engine without cache, as a control. With an
    address, `tls` is what to show and trust there; None is plain TCP. `name` empty lets the connector choose one.
    `model` None is the manifest's model; `num_threads` None leaves the choice to vLLM (one container, all of its CPUs).
    `drain_s` is how long requests in flight may take after SIGTERM; None aborts them, as vLLM does by itself.
    """

    name: str
    role: EngineRole
    host: str
    port: int
    model: str | None = None
    socket_dir: str | None = None
    agent_address: str | None = None
    num_threads: int | None = None
    tls: EngineTls | None = None
    drain_s: int | None = None
    is_probed: bool = False
    """Whether something asks for /health every few seconds for ever: then its log is for other requests."""


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """`argv` begins with the Python interpreter's name as given; `env` are the variables to add, not all of them."""

    argv: tuple[str, ...]
    env: Mapping[str, str]


def role_of(manifest: KVCacheManifest, role: EngineRole) -> Role:
    """The manifest's part for engines of `role`. A manifest without prefill has decode engines that do both."""
    part = manifest.prefill if role is EngineRole.PREFILL else manifest.decode
    assert part is not None, f"the manifest has no {role} engines"
    return part


def engine_command(
    manifest: KVCacheManifest, site: EngineSite, *, python: str = "python3"
) -> EngineCommand:
    """How to start the engine at `site`. `args` of its role come last, so they win over the defaults here."""
    assert manifest.model is not None, "a manifest with engines has a model"
    role = role_of(manifest, site.role)
    is_cpu = manifest.engine.device is Device.CPU
    model = site.model or manifest.model.path or manifest.model.name
    argv = [
        python, "-m", "vllm.entrypoints.openai.api_server",
        "--model", model,
        "--served-model-name", manifest.model.served_name,
        "--host", site.host,
        "--port", str(site.port),
        "--prefix-caching-hash-algo", HASH_ALGORITHM,
    ]  # fmt: skip
    if manifest.model.revision and model == manifest.model.name:
        argv += ["--revision", manifest.model.revision]
    if role.tensor_parallel_size > 1:
        argv += ["--tensor-parallel-size", str(role.tensor_parallel_size)]
    if site.socket_dir or site.agent_address:
        argv += [
            "--kv-transfer-config",
            json.dumps(kv_transfer_config(manifest, site), separators=(",", ":")),
        ]
    argv += _defaults(site, is_cpu=is_cpu, args=role.args)
    return EngineCommand(argv=(*argv, *role.args), env=_env(site, is_cpu=is_cpu))


def kv_transfer_config(manifest: KVCacheManifest, site: EngineSite) -> dict[str, object]:
    """The value of --kv-transfer-config for our connector. A failed load is recomputed, never an error."""
    assert bool(site.socket_dir) != bool(site.agent_address), (
        "an engine has a socket folder or an address"
    )
    extra: dict[str, object] = (
        {"socket_dir": site.socket_dir} if site.socket_dir else {"address": site.agent_address}
    )
    if site.tls is not None:
        assert site.agent_address, "TLS is for TCP: a socket folder needs none"
        extra["tls_cert"] = f"{site.tls.folder}/tls.crt"
        extra["tls_key"] = f"{site.tls.folder}/tls.key"
        extra["tls_ca"] = f"{site.tls.folder}/ca.crt"
        extra["tls_server_name"] = site.tls.server_name
    if site.name:
        extra["engine_name"] = site.name
    extra["role"] = str(site.role)
    if manifest.engine.device is Device.CPU:
        extra["lookup_ms"] = CPU_LOOKUP_MS
    if manifest.cache.tokens_per_chunk is not None:
        extra["tokens_per_chunk"] = manifest.cache.tokens_per_chunk
    sizes = sorted(
        {
            role.tensor_parallel_size
            for role in (manifest.prefill, manifest.decode)
            if role is not None
        }
    )
    if len(sizes) > 1:
        extra["tensor_parallel_sizes"] = sizes
    return {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": CONNECTOR_MODULE,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def drain_seconds(args: Sequence[str], default: int) -> int:
    """How long an engine with `args` drains after SIGTERM: what they say, else `default`."""
    chosen = default
    for at, argument in enumerate(args):
        flag, _, value = argument.partition("=")
        if _spelled(flag) == _SHUTDOWN_FLAG:
            value = value or (args[at + 1] if at + 1 < len(args) else "")
            chosen = int(value) if value.isdecimal() else default
    return chosen


def _defaults(site: EngineSite, *, is_cpu: bool, args: Sequence[str]) -> list[str]:
    """Defaults that args replace. vLLM takes a flag given twice, but a reader of the command line would wonder."""
    defaults: list[tuple[str, str | None]] = [("--enable-prompt-tokens-details", None)]
    if is_cpu:
        # Compiling costs 40 s of start and, on CPU, gains little but for tiny models.
        defaults += [("--enforce-eager", None), ("--kv-cache-memory-bytes", str(CPU_KV_BYTES))]
    if site.is_probed:
        defaults.append(("--disable-access-log-for-endpoints", "/health,/metrics"))
    if site.drain_s is not None:
        defaults.append((_SHUTDOWN_FLAG, str(site.drain_s)))
    written = {
        _spelled(argument.split("=", 1)[0]) for argument in args if argument.startswith("--")
    }
    result: list[str] = []
    for flag, value in defaults:
        if flag not in written and f"--no-{flag[2:]}" not in written:
            result += [flag] if value is None else [flag, value]
    return result


def _spelled(flag: str) -> str:
    return flag.replace("_", "-")


def _env(site: EngineSite, *, is_cpu: bool) -> dict[str, str]:
    env = {"VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if is_cpu and site.num_threads is not None:
        # "auto" would pin the threads of every engine to the same cores.
        env["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        env["OMP_NUM_THREADS"] = str(site.num_threads)
    return env
