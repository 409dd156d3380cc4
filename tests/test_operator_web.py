"""/healthz, /readyz, /metrics of the operator, and questions to agents, over real sockets."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import aiohttp
import pytest
from aiohttp import web
from cacheoperator import statusz
from cacheoperator.cluster import Applied, Cluster
from cacheoperator.observed import Pod
from cacheoperator.web import Web
from kubernetes.aio import client


async def answers(served: Web) -> dict[str, tuple[int, str]]:
    port = await served.open("127.0.0.1", 0)
    try:
        async with aiohttp.ClientSession() as session:
            found = {}
            for path in ("/healthz", "/readyz", "/metrics", "/"):
                async with session.get(f"http://127.0.0.1:{port}{path}") as answer:
                    found[path] = (answer.status, await answer.text())
            return found
    finally:
        await served.close()


def test_a_problem_is_503_with_its_sentence() -> None:
    found = asyncio.run(answers(Web(health=lambda: "", readiness=lambda: "waiting for the lease")))
    assert found["/healthz"] == (200, "ok\n")
    assert found["/readyz"] == (503, "waiting for the lease\n")
    assert found["/"][0] == 404
    assert "larder_operator_queue_length" in found["/metrics"][1]


@pytest.mark.parametrize("code", [200, 201])
def test_an_apply_says_whether_it_created(code: int) -> None:
    seen: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append(request.query_string)
        return web.json_response({"metadata": {}}, status=code)

    async def test() -> Applied:
        application = web.Application()
        application.router.add_patch("/api/v1/namespaces/ns/configmaps/a", answer)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            async with Cluster(client.Configuration(host=host)) as cluster:
                metadata = {"name": "a", "namespace": "ns"}
                obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
                return await cluster.apply(obj, is_forced=False)
        finally:
            await runner.cleanup()

    assert asyncio.run(test()).is_created == (code == 201)
    assert seen == ["fieldManager=larder-operator&force=false"]


def pod(ip: str) -> Pod:
    return Pod(
        component="cache", name=f"agent-{ip}", uid="u", node="n", ip=ip, phase="Running", is_ready=True,
        is_deleting=False, created_at=datetime.now(UTC), template_hash="",
    )  # fmt: skip


async def ask(monkeypatch: pytest.MonkeyPatch, handler: object, *ips: str) -> tuple[str, ...]:
    application = web.Application()
    application.router.add_get("/statusz", handler)  # type: ignore[arg-type]
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    monkeypatch.setattr(statusz, "AGENT_HTTP_PORT", runner.addresses[0][1])
    agents = statusz.Agents(timeout_s=0.5 if handler is hang else 30.0)
    try:
        return tuple(report.problem for report in await agents.ask([pod(ip) for ip in ips]))
    finally:
        await agents.close()
        await runner.cleanup()


async def hang(_: web.Request) -> web.Response:
    await asyncio.Event().wait()
    return web.Response()


async def fail(_: web.Request) -> web.Response:
    return web.Response(status=503, text="starting")


async def babble(_: web.Request) -> web.Response:
    return web.Response(text="[1, 2")


async def flood(_: web.Request) -> web.Response:
    return web.Response(body=b"x" * (statusz.largest_answer_bytes + 1))


async def send_away(request: web.Request) -> web.Response:
    if request.query:
        return web.json_response({"epoch": 3})
    raise web.HTTPFound("/statusz?elsewhere=1")


async def speak(_: web.Request) -> web.Response:
    return web.json_response({"epoch": 3})


@pytest.mark.parametrize(
    ("handler", "problem"),
    [
        (hang, "does not answer in time"),
        (fail, "answers HTTP 503"),
        (babble, "can't be read"),
        (flood, "is too long"),
        (send_away, "answers HTTP 302"),
        (speak, ""),
    ],
)
def test_an_agent_that_does_not_answer_well_is_a_problem_and_no_exception(
    monkeypatch: pytest.MonkeyPatch, handler: object, problem: str
) -> None:
    found = asyncio.run(ask(monkeypatch, handler, "127.0.0.1", ""))
    assert problem in found[0]
    assert bool(problem) == bool(found[0])
    assert found[1] == "has no address yet"
