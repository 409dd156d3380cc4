"""The router's command line, tried with the real smg in front of engines that only pretend."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from stub_engines import MODEL, PARAMS, PodApi, StubEngine, serving

from cacheservice.commands import router as router_module
from cacheservice.commands.router import (
    CONTROL_KEY_ENV,
    ENGINE_KEY_ENV,
    POD_GRACE_S,
    PRE_STOP_S,
    SHUTDOWN_GRACE_S,
    DiscoveredEngines,
    RouterSite,
    StaticEngines,
    router_argv,
)
from cacheservice.local.ports import PortLocks
from cacheservice.manifest import RouterType

KEY = "control-secret"
WITHIN_S = 60.0
BODY = {"model": MODEL, "prompt": "hello", "max_tokens": 4, "temperature": 0.7}


@dataclass(frozen=True)
class Answer:
    status: int
    body: Any

    @property
    def engine(self) -> str:
        return str(self.body["choices"][0]["text"])


@dataclass(frozen=True)
class Router:
    """A router that runs."""

    url: str
    metrics_url: str
    pid: int

    def ask(
        self, method: str, path: str, body: Any = None, *, key: str | None = None, url: str = ""
    ) -> Answer:
        headers = {"Content-Type": "application/json"}
        if key is not None:
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            (url or self.url) + path, data=content, headers=headers, method=method
        )
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as response:
                return Answer(response.status, _parsed(response.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, _parsed(error.read()))

    def complete(self, **changes: Any) -> Answer:
        key = changes.pop("key", None)
        return self.ask("POST", "/v1/completions", {**BODY, **changes}, key=key)

    def until(self, is_so: Callable[[Answer], bool]) -> Answer:
        """Ask until the answer is so; AssertionError with the last one when it does not become so."""
        deadline = time.monotonic() + WITHIN_S
        while not is_so(answer := self.complete()):
            assert time.monotonic() < deadline, answer
            time.sleep(0.1)
        return answer


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except ValueError:
        return content.decode()


@contextmanager
def running(
    engines: StaticEngines | DiscoveredEngines,
    folder: Path,
    env: Mapping[str, str] | None = None,
    *,
    wait: bool = True,
) -> Iterator[Router]:
    locks = PortLocks()
    port, metrics_port = locks.choose(None, 2)
    site = RouterSite(
        host="127.0.0.1", port=port, metrics_host="127.0.0.1", metrics_port=metrics_port,
        engines=engines, shutdown_grace_s=1,
    )  # fmt: skip
    log = folder / "router.log"
    with (
        log.open("w") as file,
        subprocess.Popen(
            router_argv(site, python=sys.executable),
            env={**os.environ, "NO_PROXY": "*", CONTROL_KEY_ENV: KEY, **(env or {})},
            stdout=file,
            stderr=file,
        ) as process,
    ):
        router = Router(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{metrics_port}", process.pid)
        try:
            deadline = time.monotonic() + WITHIN_S
            while not _is_up(router, "/readiness" if wait else "/liveness"):
                assert process.poll() is None, log.read_text()
                assert time.monotonic() < deadline, log.read_text()
                time.sleep(0.05)
            yield router
        finally:
            process.terminate()
            assert process.wait(timeout=30) == 0
            locks.close()


def _is_up(router: Router, path: str) -> bool:
    try:
        return router.ask("GET", path).status == 200
    except OSError:
        return False


def url(engine: StubEngine) -> str:
    return f"http://127.0.0.1:{engine.port}"


@pytest.fixture
def prefill() -> Iterator[StubEngine]:
    with serving(StubEngine("prefill", PARAMS)) as engine:
        yield engine


@pytest.fixture
def decode() -> Iterator[StubEngine]:
    with serving(StubEngine("decode")) as engine:
        yield engine


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_goes_to_prefill_and_its_params_to_decode_as_they_are(
    prefill: StubEngine, decode: StubEngine, tmp_path: Path, path: str
) -> None:
    body = {**BODY, "cache_salt": "s", "seed": 2**60}
    if "chat" in path:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    with running(StaticEngines((url(decode),), (url(prefill),)), tmp_path) as router:
        answer = router.ask("POST", path, body)
        assert (answer.status, answer.engine) == (200, "decode")
        (to_prefill,), (to_decode,) = prefill.asked, decode.asked
        assert to_prefill["max_tokens"] == 1
        assert "kv_transfer_params" not in to_prefill
        assert to_decode["max_tokens"] == 4
        assert to_decode["kv_transfer_params"] == PARAMS
        for asked in (to_prefill, to_decode):
            assert (asked["temperature"], asked["cache_salt"], asked["seed"]) == (0.7, "s", 2**60)


def test_without_prefill_it_routes_plainly(decode: StubEngine, tmp_path: Path) -> None:
    with running(StaticEngines((url(decode),)), tmp_path) as router:
        assert router.complete().engine == "decode"
        assert "kv_transfer_params" not in decode.asked[0]
        page = router.ask("GET", "/metrics", url=router.metrics_url)
        assert "smg_worker_requests_total" in page.body


def test_prefill_that_dies_is_a_503_in_openai_s_shape_until_it_is_back(
    decode: StubEngine, tmp_path: Path
) -> None:
    with ExitStack() as life:
        prefill = life.enter_context(serving(StubEngine("prefill", PARAMS)))
        with running(StaticEngines((url(decode),), (url(prefill),)), tmp_path) as router:
            assert router.complete().engine == "decode"
            life.close()
            answer = router.complete()
            assert answer.status in (502, 503)
            assert set(answer.body["error"]) >= {"message", "type", "code"}
            answer = router.until(lambda seen: seen.status == 503)
            assert answer.body["error"]["code"] == "no_available_workers"
            assert "prefill" in answer.body["error"]["message"]
            deadline = time.monotonic() + WITHIN_S
            while router.ask("GET", "/readiness").status != 503:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            assert router.ask("GET", "/liveness").status == 200
            with serving(prefill, port=prefill.port):
                assert router.until(lambda seen: seen.status == 200).engine == "decode"


def test_one_of_two_prefill_engines_may_die(
    prefill: StubEngine, decode: StubEngine, tmp_path: Path
) -> None:
    with ExitStack() as life:
        other = life.enter_context(serving(StubEngine("other", PARAMS)))
        engines = StaticEngines((url(decode),), (url(prefill), url(other)))
        with running(engines, tmp_path) as router:
            life.close()
            assert [router.complete(prompt=f"p{n}").status for n in range(20)] == [200] * 20


def test_an_engine_that_comes_late_is_taken_in(decode: StubEngine, tmp_path: Path) -> None:
    locks = PortLocks()
    (port,) = locks.choose(None, 1)
    engines = StaticEngines((url(decode),), (f"http://127.0.0.1:{port}",))
    with running(engines, tmp_path, wait=False) as router:
        answer = router.complete()
        assert (answer.status, answer.body["error"]["code"]) == (503, "no_available_workers")
        with serving(StubEngine("prefill", PARAMS), port=port):
            assert router.until(lambda seen: seen.status == 200).engine == "decode"
    locks.close()


CONTROL = [
    ("GET", "/workers"), ("POST", "/workers"), ("DELETE", "/workers/x"), ("POST", "/flush_cache"),
    ("GET", "/get_loads"),
]  # fmt: skip


def test_the_control_plane_is_closed_without_the_key_and_open_with_it(
    prefill: StubEngine, decode: StubEngine, tmp_path: Path
) -> None:
    with running(StaticEngines((url(decode),), (url(prefill),)), tmp_path) as router:
        body = {"url": "http://127.0.0.1:1"}
        for method, path in CONTROL:
            for key in (None, "wrong", ""):
                answer = router.ask(method, path, body if method == "POST" else None, key=key)
                assert answer.status in (401, 403), (method, path, key, answer)
        listed = router.ask("GET", "/workers", key=KEY)
        assert {worker["url"] for worker in listed.body["workers"]} == {url(prefill), url(decode)}
        assert router.ask("POST", "/flush_cache", key=KEY).status == 200
        assert router.complete().status == 200, "who asks a model needs no key"
        # The whole point of making the arguments inside: any user of the machine can read these.
        command_line = Path(f"/proc/{router.pid}/cmdline").read_bytes()
        assert KEY.encode() not in command_line


def test_engines_with_an_api_key_are_found_and_clients_need_it(tmp_path: Path) -> None:
    with (
        serving(StubEngine("prefill", PARAMS, api_key="engine-key")) as prefill,
        serving(StubEngine("decode", api_key="engine-key")) as decode,
        running(
            StaticEngines((url(decode),), (url(prefill),)), tmp_path, {ENGINE_KEY_ENV: "engine-key"}
        ) as router,
    ):
        assert router.complete(key="engine-key").engine == "decode"
        for key in (None, "wrong", KEY):
            answer = router.complete(key=key)
            assert (answer.status, answer.body["error"]["code"]) == (401, "invalid_api_key")
        assert router.ask("POST", "/flush_cache", key="engine-key").status == 401
        assert b"engine-key" not in Path(f"/proc/{router.pid}/cmdline").read_bytes()


def test_without_a_control_key_it_does_not_start(decode: StubEngine) -> None:
    site = RouterSite(
        host="127.0.0.1", port=1, metrics_host="127.0.0.1", metrics_port=2, engines=StaticEngines((url(decode),))
    )  # fmt: skip
    env = {name: value for name, value in os.environ.items() if name != CONTROL_KEY_ENV}
    ended = subprocess.run(
        router_argv(site, python=sys.executable), env=env, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert ended.returncode != 0
    assert CONTROL_KEY_ENV in ended.stderr


def test_prompts_of_token_ids_are_refused_in_openai_s_shape(
    decode: StubEngine, tmp_path: Path
) -> None:
    """So the documentation says. When this fails, smg has learned it: change the documentation."""
    with running(StaticEngines((url(decode),)), tmp_path) as router:
        answer = router.complete(prompt=[1, 2, 3])
        assert (answer.status, answer.body["error"]["type"]) == (400, "invalid_request_error")


PREFILL_LABELS = {
    "app.kubernetes.io/instance": "demo",
    "app.kubernetes.io/component": "prefill",
}
DECODE_LABELS = {**PREFILL_LABELS, "app.kubernetes.io/component": "decode"}


def test_pods_are_found_by_their_labels_and_forgotten(tmp_path: Path) -> None:
    locks = PortLocks()
    (port,) = locks.choose(None, 1)  # the same for all pods: loopback has many addresses
    with (
        PodApi().serving() as api,
        serving(StubEngine("prefill", PARAMS), "127.0.0.2", port),
        serving(StubEngine("decode"), "127.0.0.3", port) as decode,
        serving(StubEngine("prefill", PARAMS), "127.0.0.5", port),
        serving(StubEngine("stranger"), "127.0.0.4", port) as stranger,
    ):
        (tmp_path / "kubeconfig").write_text(api.kubeconfig())
        engines = DiscoveredEngines(
            namespace="team", port=port, prefill=PREFILL_LABELS, decode=DECODE_LABELS
        )
        env = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
        with running(engines, tmp_path, env, wait=False) as router:
            # Not one engine of the model, as before the first has started: smg's word for it is 404. The documentation
            # says so; when this fails, smg has learned better.
            answer = router.complete()
            assert (answer.status, answer.body["error"]["code"]) == (404, "model_not_found")
            api.put("demo-prefill-0", "127.0.0.2", PREFILL_LABELS)
            api.put("demo-decode-0", "127.0.0.3", DECODE_LABELS)
            api.put("other", "127.0.0.4", {**DECODE_LABELS, "app.kubernetes.io/instance": "other"})
            assert router.until(lambda seen: seen.status == 200).engine == "decode"
            assert decode.asked[-1]["kv_transfer_params"] == PARAMS
            # No prefill, as while its only pod is replaced: an error that clients try again.
            api.delete("demo-prefill-0")
            answer = router.until(lambda seen: seen.status != 200)
            assert (answer.status, answer.body["error"]["code"]) == (503, "no_available_workers")
            api.put("demo-prefill-1", "127.0.0.5", PREFILL_LABELS)
            assert router.until(lambda seen: seen.status == 200).engine == "decode"
            assert not stranger.asked
            api.delete("demo-decode-0")
            answer = router.until(lambda seen: seen.status != 200)
            assert (answer.status, answer.body["error"]["code"]) == (503, "no_available_workers")
        assert set(api.paths) == {"/api/v1/namespaces/team/pods"}, "more than its Role allows"
    locks.close()


def test_pods_without_prefill_are_found_too(tmp_path: Path) -> None:
    locks = PortLocks()
    (port,) = locks.choose(None, 1)
    with PodApi().serving() as api, serving(StubEngine("decode"), "127.0.0.3", port):
        (tmp_path / "kubeconfig").write_text(api.kubeconfig())
        api.put("demo-decode-0", "127.0.0.3", DECODE_LABELS)
        engines = DiscoveredEngines(namespace="team", port=port, decode=DECODE_LABELS)
        env = {"KUBECONFIG": str(tmp_path / "kubeconfig")}
        with running(engines, tmp_path, env, wait=False) as router:
            assert router.until(lambda seen: seen.status == 200).engine == "decode"
    locks.close()


def test_the_router_ends_before_its_pod_is_killed() -> None:
    assert PRE_STOP_S + SHUTDOWN_GRACE_S < POD_GRACE_S


def test_flags_of_vllm_router_are_told_from_those_of_smg() -> None:
    site = RouterSite(
        host="0.0.0.0", port=8000, metrics_host="0.0.0.0", metrics_port=29000,
        engines=DiscoveredEngines(namespace="team", port=8000, prefill={"a": "b"}, decode={"c": "d"}),
    )  # fmt: skip
    argv = router_argv(site, RouterType.VLLM_ROUTER)
    assert argv[0] == "vllm-router"
    assert "--vllm-pd-disaggregation" in argv
    assert "--pd-disaggregation" not in argv
    assert argv[argv.index("--prefill-selector") + 1] == "a=b"
    assert not set(argv) & {"--backend", "--history-backend", "--worker-wedge-secs"}
    with pytest.raises(ValueError, match="None"):
        router_argv(site, RouterType.NONE)
    assert router_module.VLLM_ROUTER_KEY_ENV == "OPENAI_API_KEY"
