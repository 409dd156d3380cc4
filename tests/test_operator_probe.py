"""The proof of transfer: what is asked of engines, when, and what a pod with the API key would say."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from cacheoperator import probe
from cacheoperator.observed import AgentReport, EngineSession, NamespaceView, Observed, Pod
from cacheoperator.probe import Prober, Question, ask, ask_from_pod, main, probe_pod, question_for
from operator_fakes import Clock, FakeCluster
from operator_world import SETTINGS

from cacheservice.manifest import KVCacheManifest, manifest_from_object

Json = dict[str, Any]
KEY = ("ns", "demo")


class Engine:
    """Answers completions as an engine does; `answers` is (status, JSON)."""

    def __init__(self) -> None:
        self.seen: list[tuple[Json, str]] = []
        self.answer: tuple[int, Any] = (200, {"choices": []})
        engine = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                engine.seen.append((body, self.headers.get("Authorization", "")))
                status, value = engine.answer
                content = json.dumps(value).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@pytest.fixture
def engines() -> Iterator[tuple[Engine, Engine]]:
    pair = Engine(), Engine()
    yield pair
    for engine in pair:
        engine.close()


def question(engines: tuple[Engine, Engine]) -> Question:
    return Question(engines[0].address, engines[1].address, model="m", num_tokens=513, salt="s")


def test_prefill_is_asked_first_and_decode_gets_its_hand_over(
    engines: tuple[Engine, Engine],
) -> None:
    engines[0].answer = (200, {"kv_transfer_params": {"larder": {"owner": 1}}})
    assert ask(question(engines), "secret") == ""
    [(first, authorization)] = engines[0].seen
    [(second, _)] = engines[1].seen
    assert authorization == "Bearer secret"
    assert len(first["prompt"]) == 513
    assert first["prompt"][:256] != first["prompt"][256:512], "two chunks that differ"
    assert (first["cache_salt"], first["max_tokens"]) == ("s", 1)
    assert second == {**first, "kv_transfer_params": {"larder": {"owner": 1}}}


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ((401, {}), "apiKeySecretRef"),
        (
            (400, {"error": {"message": "maximum context length is 100"}}),
            "maximum context length is 100",
        ),
        ((500, "broken"), "HTTP 500"),
        ((200, [1]), "wrong JSON"),
    ],
)
def test_what_prefill_refuses_is_said_and_decode_is_not_asked(
    engines: tuple[Engine, Engine], answer: tuple[int, Any], words: str
) -> None:
    engines[0].answer = answer
    problem = ask(question(engines), "secret")
    assert words in problem
    assert problem.startswith("prefill at")
    assert "secret" not in problem
    assert engines[1].seen == []


def test_an_engine_that_is_not_there_is_said(engines: tuple[Engine, Engine]) -> None:
    gone = Question(engines[0].address, "127.0.0.1:9", "m", 3, "s")
    assert "decode at 127.0.0.1:9 does not answer" in ask(gone)


def test_the_pods_program_takes_the_key_from_its_environment(
    engines: tuple[Engine, Engine],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(probe.KEY_ENV, "secret")
    monkeypatch.setattr(probe, "TERMINATION_LOG", "/nowhere/at/all")
    spec = probe_pod(manifest(has_key=True), SETTINGS, "u", question(engines))["spec"]
    arguments = spec["containers"][0]["args"]
    assert main(arguments) == 0
    assert engines[1].seen[0][1] == "Bearer secret"
    engines[1].answer = (503, {})
    assert main(arguments) == 1
    assert "decode" in capsys.readouterr().err


def manifest(*, has_key: bool = False) -> KVCacheManifest:
    engine: Json = {"device": "cpu"}
    if has_key:
        engine["apiKeySecretRef"] = {"name": "keys", "key": "k"}
    resource = {
        "apiVersion": "larder.dev/v1alpha1",
        "kind": "KVCache",
        "metadata": {"name": "demo", "namespace": "ns"},
        "spec": {"model": {"name": "m"}, "prefill": {}, "decode": {}, "engine": engine},
    }
    return manifest_from_object(resource, source="test")


def observed(*, is_ready: bool = True) -> Observed:
    clock = Clock()

    def pod(component: str, ip: str) -> Pod:
        return Pod(
            component,
            f"demo-{component}-1",
            component,
            "n",
            ip,
            "Running",
            is_ready,
            False,
            clock(),
            "h",
        )

    def session(component: str) -> EngineSession:
        return EngineSession(f"demo-{component}-1", component, "worker", 0, "", "ab", "1", "2", 2)

    agent = AgentReport(
        "agent",
        "n",
        sessions=(session("prefill"), session("decode")),
        namespaces=(NamespaceView("ab", {}, 256, 8),),
    )
    return Observed(
        now=clock(), generation=1, operator_version="1", agents=(agent,),
        pods=(pod("prefill", "10.0.0.1"), pod("decode", "fd00::2")),
    )  # fmt: skip


def test_a_ready_engine_of_each_fingerprint_is_asked_for_two_chunks() -> None:
    found = question_for(manifest(), observed(), ("ab", "ab"))
    assert found is not None
    assert (found.prefill, found.decode) == ("10.0.0.1:8000", "[fd00::2]:8000")
    assert (found.model, found.num_tokens) == ("m", 513)
    again = question_for(manifest(), observed(), ("ab", "ab"))
    assert again is not None
    assert again.salt != found.salt
    assert question_for(manifest(), observed(), ("ab", "cd")) is None
    assert question_for(manifest(), observed(is_ready=False), ("ab", "ab")) is None


def test_one_probe_at_a_time_and_ever_more_rarely(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []

    def answer(question: Question, key: str = "") -> str:
        asked.append(question)
        return "no"

    monkeypatch.setattr(probe, "ask", answer)

    async def test() -> None:
        clock, told = Clock(), asyncio.Event()
        fake: Any = FakeCluster()
        prober = Prober(fake, SETTINGS, clock, lambda key: told.set())

        def consider(pairs: list[tuple[str, str]]) -> float | None:
            return prober.consider(KEY, "u", manifest(), observed(), pairs)

        pairs = [("ab", "ab")]
        assert consider([]) is None
        consider(pairs)
        consider(pairs)
        await asyncio.wait_for(told.wait(), 5)
        assert len(asked) == 1
        assert [result.problem for result in prober.results(KEY)] == ["no"]
        assert consider(pairs) == probe.first_backoff_s
        clock.pass_s(probe.first_backoff_s)
        told.clear()
        assert consider(pairs) is None
        await asyncio.wait_for(told.wait(), 5)
        assert consider(pairs) == 2 * probe.first_backoff_s
        assert fake.writes == []
        prober.forget(KEY)
        assert prober.results(KEY) == ()
        await prober.close()

    asyncio.run(test())


def test_each_pair_waits_for_itself_and_begins_anew_after_its_evidence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def answer(question: Question, key: str = "") -> str:
        asked.append(question.model)
        return "no"

    monkeypatch.setattr(probe, "ask", answer)
    monkeypatch.setattr(
        probe, "question_for", lambda m, o, pair: Question("p:1", "d:1", pair[0], 3, "s")
    )

    async def test() -> None:
        clock, told = Clock(), asyncio.Event()
        fake: Any = FakeCluster()
        prober = Prober(fake, SETTINGS, clock, lambda key: told.set())

        async def consider(*pairs: str) -> float | None:
            told.clear()
            wait_s = prober.consider(
                KEY, "u", manifest(), observed(), [(pair, pair) for pair in pairs]
            )
            if wait_s is None and pairs:
                await asyncio.wait_for(told.wait(), 5)
            return wait_s

        assert await consider("old") is None
        clock.pass_s(probe.first_backoff_s)
        assert await consider("old") is None
        clock.pass_s(1)
        assert await consider("old", "new") is None
        assert asked == ["old", "old", "new"], "a new pair waits for no other"
        assert await consider("old", "new") == probe.first_backoff_s
        assert await consider("new") == probe.first_backoff_s
        assert await consider("old") is None, "it was proven meanwhile, and is doubted now"
        assert await consider("old") == probe.first_backoff_s
        await prober.close()

    asyncio.run(test())


class Pods(FakeCluster):
    """A kubelet that ends each pod with `status` at once."""

    def __init__(self, status: Json) -> None:
        super().__init__()
        self.status = status

    async def get(self, kind: Any, namespace: str | None, name: str) -> Json | None:
        found = await super().get(kind, namespace, name)
        return None if found is None else {**found, "status": self.status}

    async def create(self, obj: Any, *, is_dry_run: bool = False) -> Any:
        applied = await super().create(obj, is_dry_run=is_dry_run)
        body = await super().get(
            probe_kind(), obj["metadata"]["namespace"], obj["metadata"]["name"]
        )
        return type(applied)(body, ())


def probe_kind() -> Any:
    from cacheoperator.kinds import POD

    return POD


@pytest.mark.parametrize(
    ("status", "said"),
    [
        ({"phase": "Succeeded"}, ""),
        ({"phase": "Failed", "containerStatuses": [{"state": {"terminated": {"message": "decode at x refuses"}}}]},
         "decode at x refuses"),
        ({"phase": "Failed", "reason": "DeadlineExceeded"}, "DeadlineExceeded"),
    ],
)  # fmt: skip
def test_a_pod_of_the_probe_is_deleted_whatever_it_said(status: Json, said: str) -> None:
    pod = probe_pod(manifest(has_key=True), SETTINGS, "u", Question("a:1", "b:1", "m", 3, "s"))
    env = pod["spec"]["containers"][0]["env"]
    assert env == [
        {"name": probe.KEY_ENV, "valueFrom": {"secretKeyRef": {"name": "keys", "key": "k"}}}
    ]
    cluster: Any = Pods(status)
    assert said in asyncio.run(ask_from_pod(cluster, pod))
    assert cluster.writes == ["create Pod/demo-probe", "delete Pod/demo-probe"]


def test_a_foreign_pod_of_the_probes_name_is_left_alone() -> None:
    pod = probe_pod(manifest(has_key=True), SETTINGS, "u", Question("a:1", "b:1", "m", 3, "s"))
    cluster: Any = Pods({})
    cluster.put(
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "demo-probe", "namespace": "ns"}}
    )
    assert "delete it" in asyncio.run(ask_from_pod(cluster, pod))
    assert [line for line in cluster.writes if line.startswith("delete")] == []


def test_a_left_over_pod_of_an_earlier_probe_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "pod_look_s", 0.0)
    pod = probe_pod(manifest(has_key=True), SETTINGS, "u", Question("a:1", "b:1", "m", 3, "s"))
    cluster: Any = Pods({"phase": "Succeeded"})
    cluster.put(pod)
    assert asyncio.run(ask_from_pod(cluster, pod)) == ""
    assert cluster.uids == {}
