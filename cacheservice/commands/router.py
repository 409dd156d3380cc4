"""The command line and environment of the router in front of the engines. Pure; one place for `larder up` and operator.

SMG is `smg` 1.13 from PyPI; its flags and habits were tried with that version. What is set on purpose: times of seconds
where its defaults are minutes, a closed control plane, nothing kept of answers, a bound on the size of a request.
Without prefill engines it routes plainly over the decode engines. VLLMRouter is `vllm-router` 0.1.17: same place, same
selectors; it has no control plane to close when it serves prefill and decode.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from cacheservice.manifest import RouterType

CONTROL_KEY_ENV = "LARDER_ROUTER_KEY"
"""Holds the key of SMG's control plane; SMG does not start without it. Letters, digits, - and _."""
ENGINE_KEY_ENV = "LARDER_ENGINE_KEY"
"""Holds the engines' API key when they want one, absent otherwise. SMG asks engines with it (without it no engine is
found to have a model) and then wants it from clients, too."""
VLLM_ROUTER_KEY_ENV = "OPENAI_API_KEY"
"""What vllm-router reads the engines' API key from; it drops the client's Authorization and sends this."""
SHUTDOWN_GRACE_S = 45
"""What requests in flight may take after SIGTERM; new ones are refused from then on."""
PRE_STOP_S = 5
"""In a pod: what the Service's endpoints need to forget the router before it gets SIGTERM."""
POD_GRACE_S = 60
"""In a pod: above PRE_STOP_S + SHUTDOWN_GRACE_S, so that the router ends by itself."""
REQUEST_TIMEOUT_S = 1800
"""A long answer is no error. An engine that hangs fails its health check long before."""
MAX_REQUEST_BYTES = 64 << 20
"""SMG holds a request in memory while it may have to be sent again; its default is 512 MiB."""
NUM_ATTEMPTS = 5
"""For a request that an engine failed, in about half a second."""
NUM_FAILURES_TO_LEAVE = 3
"""After so many an engine is left alone for 5 s. Below NUM_ATTEMPTS."""
READY_PATH = "/readiness"
"""200 as soon as there is an engine of each role: for the startup probe and for waiting."""
LIVE_PATH = "/liveness"
"""200 while the router runs, whatever its engines do."""

_SMG = f"""\
import os, sys
for name in [name for name in os.environ if name.lower() in ("http_proxy", "https_proxy", "all_proxy")]:
    del os.environ[name]
from smg.cli import main
secret = ["--control-plane-api-keys", "larder:larder:admin:" + os.environ.pop("{CONTROL_KEY_ENV}")]
if os.environ.get("{ENGINE_KEY_ENV}"):
    secret += ["--api-key", os.environ.pop("{ENGINE_KEY_ENV}")]
main([*sys.argv[1:], *secret])
"""
"""smg takes keys as arguments only, and every user of a machine can read those of a process: so the arguments are
made inside it. A proxy of the environment must not stand between it and engines; NO_PROXY=* does not help (1.13)."""


@dataclass(frozen=True, slots=True)
class StaticEngines:
    """Base URLs without /v1. No `prefill` is plain routing."""

    decode: tuple[str, ...]
    prefill: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DiscoveredEngines:
    """Ready pods of one namespace, by labels. `prefill` None is plain routing. `port` is that of every engine."""

    namespace: str
    port: int
    decode: Mapping[str, str]
    prefill: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterSite:
    """Where the router listens and what it routes to. Metrics are on a port of their own, without any key."""

    host: str
    port: int
    metrics_host: str
    metrics_port: int
    engines: StaticEngines | DiscoveredEngines
    shutdown_grace_s: int = SHUTDOWN_GRACE_S


def router_argv(
    site: RouterSite, router: RouterType = RouterType.SMG, *, python: str = "python3"
) -> tuple[str, ...]:
    """How to start the router; `python` is an interpreter that has smg. No secret is in it: see the names of variables
    above. RouterType.NONE has no command line (ValueError)."""
    if router is RouterType.SMG:
        return (
            python,
            "-c",
            _SMG,
            "launch",
            *_listening(site),
            *_smg_engines(site.engines),
            *_smg_habits(site),
        )
    if router is RouterType.VLLM_ROUTER:
        return (
            "vllm-router",
            *_listening(site),
            *_vllm_router_engines(site.engines),
            *_vllm_router_habits(),
        )
    raise ValueError(f"router type {router} has no command line")


def _listening(site: RouterSite) -> list[str]:
    return [
        "--host", site.host,
        "--port", str(site.port),
        "--prometheus-host", site.metrics_host,
        "--prometheus-port", str(site.metrics_port),
        "--request-timeout-secs", str(REQUEST_TIMEOUT_S),
        "--max-payload-size", str(MAX_REQUEST_BYTES),
        "--policy", "cache_aware",
        "--health-check-interval-secs", "2",
        "--health-check-timeout-secs", "3",
        "--health-failure-threshold", "3",
        "--health-success-threshold", "1",
        "--worker-startup-check-interval", "1",
    ]  # fmt: skip


def _smg_habits(site: RouterSite) -> list[str]:
    return [
        "--backend", "vllm",
        # One line per request is too much; changes of health are warnings.
        "--log-level", "warn",
        "--shutdown-grace-period-secs", str(site.shutdown_grace_s),
        # A retry goes to the same engine, since the prefix is there, until its breaker opens: it must open before
        # the last attempt, or a request fails although another engine is well. Closed again as soon as it answers.
        "--retry-max-retries", str(NUM_ATTEMPTS),
        "--retry-max-backoff-ms", "500",
        "--cb-failure-threshold", str(NUM_FAILURES_TO_LEAVE),
        "--cb-success-threshold", "1",
        "--cb-timeout-duration-secs", "5",
        "--cb-window-duration-secs", "30",
        # Four answers that are not streamed and take longer than the default of 3 s look like a stuck engine.
        "--worker-wedge-secs", "30",
        # Else answers of /v1/responses stay in its memory for a day, readable by whoever knows their id.
        "--history-backend", "none",
    ]  # fmt: skip


def _smg_engines(engines: StaticEngines | DiscoveredEngines) -> list[str]:
    if isinstance(engines, StaticEngines):
        if not engines.prefill:
            return ["--worker-urls", *engines.decode]
        return [
            "--pd-disaggregation",
            *_urls("--prefill", engines.prefill),
            *_urls("--decode", engines.decode),
        ]
    found = _discovery(engines)
    if engines.prefill is None:
        return [*found, "--selector", *_selector(engines.decode)]
    return [
        "--pd-disaggregation", *found,
        "--prefill-selector", *_selector(engines.prefill),
        "--decode-selector", *_selector(engines.decode),
    ]  # fmt: skip


def _vllm_router_engines(engines: StaticEngines | DiscoveredEngines) -> list[str]:
    # Its connector "nixl" passes on what prefill answers, whatever it is; the other ones want their own engines.
    pairs = ["--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    if isinstance(engines, StaticEngines):
        if not engines.prefill:
            return ["--worker-urls", *engines.decode]
        return [*pairs, *_urls("--prefill", engines.prefill), *_urls("--decode", engines.decode)]
    found = _discovery(engines)
    if engines.prefill is None:
        return [*found, "--selector", *_selector(engines.decode)]
    return [
        *pairs, *found,
        "--prefill-selector", *_selector(engines.prefill),
        "--decode-selector", *_selector(engines.decode),
    ]  # fmt: skip


def _vllm_router_habits() -> list[str]:
    # A pod that is ready and does not answer blocks its whole watch for this long.
    return ["--log-level", "warning", "--worker-startup-timeout-secs", "30"]


def _discovery(engines: DiscoveredEngines) -> list[str]:
    return [
        "--service-discovery",
        "--service-discovery-namespace", engines.namespace,
        "--service-discovery-port", str(engines.port),
    ]  # fmt: skip


def _urls(flag: str, urls: tuple[str, ...]) -> list[str]:
    return [word for url in urls for word in (flag, url)]


def _selector(labels: Mapping[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in sorted(labels.items())]
