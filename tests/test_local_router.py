"""The router of `larder up`: when there is one, what it stands in front of, and what it needs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import pytest
from stub_engines import PARAMS, StubEngine, serving

from cacheservice.commands.engines import EngineRole, EngineSite
from cacheservice.commands.router import CONTROL_KEY_ENV
from cacheservice.errors import ConfigError
from cacheservice.local import router as local_router
from cacheservice.local.http_client import post_json
from cacheservice.local.ports import PortLocks
from cacheservice.local.processes import Program, Supervisor
from cacheservice.local.progress import PlainProgress
from cacheservice.local.router import check_installed, has_router, router_program
from cacheservice.local.up import program_env
from cacheservice.manifest import RouterType

PREFILL, DECODE, BOTH = EngineRole.PREFILL, EngineRole.DECODE, EngineRole.BOTH


@pytest.mark.parametrize(
    ("router", "roles", "expected"),
    [
        (RouterType.SMG, [PREFILL, DECODE], True),
        (RouterType.SMG, [BOTH], True),
        (RouterType.VLLM_ROUTER, [BOTH], True),
        (RouterType.SMG, [PREFILL], False),
        (RouterType.SMG, [], False),
        (RouterType.NONE, [PREFILL, DECODE], False),
    ],
)
def test_there_is_a_router_where_something_answers(
    router: RouterType, roles: list[EngineRole], expected: bool
) -> None:
    assert has_router(router, roles) is expected


def test_a_router_that_is_not_installed_is_named_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    check_installed(RouterType.SMG)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'larder\[local\]'.*None"):
        check_installed(RouterType.SMG)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="pip install vllm-router"):
        check_installed(RouterType.VLLM_ROUTER)


def site(name: str, role: EngineRole, port: int) -> EngineSite:
    return EngineSite(name=name, role=role, host="127.0.0.1", port=port)


def program(folder: Path, sites: list[EngineSite], ports: list[int], **environment: str) -> Program:
    return router_program(
        RouterType.SMG, sites, port=ports[0], metrics_port=ports[1], environment=program_env(dict(environment), {}),
        log=folder / "router.log",
    )  # fmt: skip


def test_requests_go_through_it_whatever_proxy_the_environment_names(tmp_path: Path) -> None:
    from rich.console import Console

    locks = PortLocks()
    ports = locks.choose(None, 2)
    with (
        serving(StubEngine("prefill", PARAMS)) as prefill,
        serving(StubEngine("decode")) as decode,
        Supervisor(PlainProgress(Console(stderr=True))) as supervisor,
    ):
        sites = [site("prefill", PREFILL, prefill.port), site("decode", DECODE, decode.port)]
        proxy = dict.fromkeys(("http_proxy", "HTTP_PROXY", "ALL_PROXY"), "http://127.0.0.1:1")
        made = program(tmp_path, sites, ports, **proxy)
        supervisor.wait_ready([supervisor.start(made)])
        answer = post_json(
            "127.0.0.1", ports[0], "/v1/completions", {"model": "demo", "prompt": "x", "max_tokens": 2}
        )  # fmt: skip
        assert answer["choices"][0]["text"] == "decode"
        assert decode.asked[0]["kv_transfer_params"] == PARAMS
    locks.close()


def test_every_run_has_a_key_of_its_own_that_is_in_no_argument(tmp_path: Path) -> None:
    sites = [site("decode", BOTH, 1)]
    one, other = (program(tmp_path, sites, [2, 3]) for _ in range(2))
    assert one.env[CONTROL_KEY_ENV] != other.env[CONTROL_KEY_ENV]
    assert one.env[CONTROL_KEY_ENV] not in " ".join(one.argv)
    assert one.argv == other.argv
    assert "--worker-urls" in one.argv
    assert one.stop_within_s > local_router.SHUTDOWN_GRACE_S


def test_status_of_a_router_that_does_not_answer_is_no_success() -> None:
    from cacheservice.cli.status import observe_router
    from cacheservice.local.runs import RouterState

    locks = PortLocks()
    (port,) = locks.choose(None, 1)
    state = RouterState("SMG", f"http://127.0.0.1:{port}/v1", "http://127.0.0.1:1/metrics", 1, "/l")
    seen = observe_router(SimpleNamespace(router=state))  # type: ignore[arg-type]
    assert seen is not None
    assert (seen.ready, seen.url) == (False, state.url)
    assert observe_router(SimpleNamespace(router=None)) is None  # type: ignore[arg-type]
    locks.close()
