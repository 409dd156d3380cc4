"""The router of a run on this machine: the same command line as in a pod, on loopback. Called by `up`.

Its control plane is closed with a key that nobody is told: engines come and go with the run, not by requests.
"""

from __future__ import annotations

import importlib.util
import secrets
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from cacheservice.commands.engines import EngineRole, EngineSite
from cacheservice.commands.router import (
    CONTROL_KEY_ENV,
    READY_PATH,
    RouterSite,
    StaticEngines,
    router_argv,
)
from cacheservice.errors import ConfigError
from cacheservice.local.http_client import answers_ok
from cacheservice.local.ports import HOST
from cacheservice.local.processes import Program
from cacheservice.manifest import RouterType

SHUTDOWN_GRACE_S = 1
"""The engines stop at the same time: there is nothing to wait for."""
STOP_WITHIN_S = 5.0
READY_WITHIN_S = 60.0
VLLM_ROUTER = "vllm-router"


def has_router(router: RouterType, roles: Sequence[EngineRole]) -> bool:
    """Whether a run gets one: when it is wanted, and something answers requests."""
    return router is not RouterType.NONE and any(role is not EngineRole.PREFILL for role in roles)


def check_installed(router: RouterType) -> None:
    """Raise ConfigError when the router's program is not on this machine."""
    if router is RouterType.SMG and importlib.util.find_spec("smg") is None:
        raise ConfigError(
            "the router needs the package smg in this Python: pip install 'larder[local]', or write spec.router.type "
            "None"
        )
    if router is RouterType.VLLM_ROUTER and shutil.which(VLLM_ROUTER) is None:
        raise ConfigError(
            "spec.router.type VLLMRouter needs the program vllm-router: pip install vllm-router, or write SMG or None"
        )


def router_program(
    router: RouterType,
    sites: Sequence[EngineSite],
    *,
    port: int,
    metrics_port: int,
    environment: Mapping[str, str],
    log: Path,
) -> Program:
    """The router in front of the engines at `sites`, as a program to supervise. `environment` is that of a child."""
    urls = {
        role: tuple(f"http://{site.host}:{site.port}" for site in sites if site.role is role)
        for role in EngineRole
    }
    site = RouterSite(
        host=HOST, port=port, metrics_host=HOST, metrics_port=metrics_port, shutdown_grace_s=SHUTDOWN_GRACE_S,
        engines=StaticEngines(
            prefill=urls[EngineRole.PREFILL], decode=urls[EngineRole.DECODE] + urls[EngineRole.BOTH]
        ),
    )  # fmt: skip
    env = {**environment, CONTROL_KEY_ENV: secrets.token_urlsafe(24)}
    return Program(
        name="router",
        argv=router_argv(site, router, python=sys.executable),
        env=env,
        log=log,
        is_ready=lambda: answers_ok(HOST, port, READY_PATH),
        ready_within_s=READY_WITHIN_S,
        stop_within_s=STOP_WITHIN_S,
        doing="starting the router",
    )
