"""The operator's client on real sockets, and what of an object is kept."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from cacheoperator import __main__ as operator_process
from cacheoperator.cluster import Cluster, login
from cacheoperator.errors import (
    Broken,
    ClusterError,
    Conflict,
    Forbidden,
    Gone,
    Invalid,
    NotFound,
    Unreachable,
)
from cacheoperator.kinds import (
    CONFIG_MAP,
    DEPLOYMENT,
    KVCACHE,
    NODE,
    POD,
    POD_MONITOR,
    kind_of,
)
from cacheoperator.watch import Watched, controller_uid, store
from kubernetes.aio import client

Json = dict[str, Any]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def with_server(
    handler: Handler, test: Callable[[Cluster], Awaitable[None]], timeout_s: float = 5.0
) -> None:
    async def run() -> None:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(application, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        configuration = client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
        try:
            async with Cluster(configuration, timeout_s=timeout_s) as cluster:
                await test(cluster)
        finally:
            await runner.cleanup()

    asyncio.run(run())


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (400, Invalid), (401, Forbidden), (403, Forbidden), (409, Conflict), (410, Gone), (422, Invalid),
        (429, Unreachable), (500, Broken), (503, Unreachable),
    ],
)  # fmt: skip
def test_answers_of_the_api_server_become_errors_of_ours(
    status: int, error: type[ClusterError]
) -> None:
    async def answer(request: web.Request) -> web.Response:
        details = {"causes": [{"field": "spec.x", "message": "must not"}]}
        return web.json_response(
            {"reason": "Why", "message": "what", "details": details}, status=status
        )

    async def test(cluster: Cluster) -> None:
        with pytest.raises(ClusterError) as caught:
            await cluster.create(
                {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a", "namespace": "ns"}}
            )
        assert type(caught.value) is error
        assert (caught.value.code, caught.value.reason, caught.value.message) == (
            status,
            "Why",
            "what",
        )
        assert caught.value.causes == (("spec.x", "must not"),)

    with_server(answer, test)


def test_what_is_not_there_is_none_and_a_deletion_of_it_is_done() -> None:
    async def answer(request: web.Request) -> web.Response:
        return web.Response(status=404, text="page not found")

    async def test(cluster: Cluster) -> None:
        assert await cluster.get(POD, "ns", "a") is None
        await cluster.delete(POD, "ns", "a", "u")
        assert not await cluster.serves(KVCACHE)
        with pytest.raises(NotFound):
            await cluster.list(POD, "ns")

    with_server(answer, test)


def test_a_server_that_hangs_is_unreachable_in_time() -> None:
    async def answer(request: web.Request) -> web.Response:
        await asyncio.Event().wait()
        return web.Response()

    async def test(cluster: Cluster) -> None:
        with pytest.raises(Unreachable):
            await cluster.get(POD, "ns", "a")

    with_server(answer, test, timeout_s=0.3)


def test_an_apply_sends_exactly_what_is_wanted_and_brings_warnings_back() -> None:
    seen: list[tuple[str, str, dict[str, str], str, Json]] = []

    async def answer(request: web.Request) -> web.Response:
        body = json.loads(await request.text())
        seen.append((request.method, request.path, dict(request.query), request.content_type, body))
        warning = '299 - "would violate PodSecurity \\"baseline\\""'
        return web.json_response(body, headers={"Warning": warning})

    wanted = {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": "a", "namespace": "ns"},
        "spec": {"x": None},
    }

    async def test(cluster: Cluster) -> None:
        applied = await cluster.apply(wanted, is_dry_run=True)
        assert applied.warnings == ('would violate PodSecurity "baseline"',)

    with_server(answer, test)
    query = {"fieldManager": "larder-operator", "force": "true", "dryRun": "All"}
    path = "/apis/apps/v1/namespaces/ns/deployments/a"
    assert seen == [("PATCH", path, query, "application/apply-patch+yaml", wanted)]


def test_lists_come_in_pages() -> None:
    async def answer(request: web.Request) -> web.Response:
        begin = int(request.query.get("continue", "0"))
        items = [{"metadata": {"name": str(n)}} for n in range(begin, begin + 2)]
        token = str(begin + 2) if begin < 4 else ""
        assert request.query["labelSelector"] == "a=b"
        return web.json_response({"items": items, "metadata": {"continue": token}})

    async def test(cluster: Cluster) -> None:
        found = await cluster.list(CONFIG_MAP, "ns", labels="a=b")
        assert [one["metadata"]["name"] for one in found] == list("012345")
        assert len(await cluster.list(CONFIG_MAP, "ns", labels="a=b", limit=2)) == 2

    with_server(answer, test)


def test_a_status_is_written_to_the_very_resource() -> None:
    seen: list[Json] = []

    async def answer(request: web.Request) -> web.Response:
        assert request.path == "/apis/larder.dev/v1alpha1/namespaces/ns/kvcaches/demo/status"
        seen.extend(json.loads(await request.text()))
        return web.json_response({})

    async def test(cluster: Cluster) -> None:
        await cluster.write_status(KVCACHE, "ns", "demo", "u", {"a": 1})

    with_server(answer, test)
    assert seen == [
        {"op": "test", "path": "/metadata/uid", "value": "u"},
        {"op": "add", "path": "/status", "value": {"a": 1}},
    ]


def test_no_login_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ClusterError, match="KUBECONFIG"):
        asyncio.run(login())


# What is kept


def test_an_object_is_kept_whole_but_for_the_fields_of_other_managers() -> None:
    body = {
        "metadata": {
            "name": "a",
            "namespace": "ns",
            "uid": "u",
            "resourceVersion": "17",
            "ownerReferences": [{"uid": "x"}, {"uid": "owner", "controller": True}],
            "managedFields": [
                {"manager": "larder-operator", "operation": "Apply"},
                {"manager": "kube-controller-manager", "operation": "Update"},
            ],
        },
        "spec": {"a": [1, "ä"]},
    }
    kept = store(DEPLOYMENT, body)
    assert (kept.namespace, kept.name, kept.uid, kept.version, kept.owner_uid) == (
        "ns",
        "a",
        "u",
        17,
        "owner",
    )
    loaded = kept.load()
    assert kind_of(loaded) == DEPLOYMENT
    assert loaded["spec"] == body["spec"]
    assert [entry["manager"] for entry in loaded["metadata"]["managedFields"]] == [
        "larder-operator"
    ]
    assert len(body["metadata"]["managedFields"]) == 2, "what kopf gave stays as it was"
    assert controller_uid({"metadata": {}}) == ""


def test_an_object_that_comes_back_to_the_watch_was_not_deleted() -> None:
    """The API server tells DELETED, too, when a label that the watch selects by is taken away."""
    any_: Any = None
    changed: list[Any] = []
    watched = Watched(changed=changed.append, namespaces=(), cluster=any_)

    def event(change: str | None, version: int, uid: str = "u") -> None:
        metadata = {"name": "a", "namespace": "ns", "uid": uid, "resourceVersion": str(version)}
        labels = {"app.kubernetes.io/instance": "demo"}
        watched.notice(DEPLOYMENT, change, {"metadata": {**metadata, "labels": labels}})

    event("DELETED", 7)
    event("MODIFIED", 6)
    assert "u" in watched.deleted, "an event that was under way"
    event("MODIFIED", 8)
    assert "u" not in watched.deleted
    watched.note_deleted("v")
    event("MODIFIED", 9, "v")
    assert "v" in watched.deleted, "deleted by us, and the watch has not told yet"
    event("DELETED", 10, "v")
    assert "v" in watched.deleted
    assert changed == [("ns", "demo")] * 5


def test_a_pass_over_the_whole_cluster_forgets_nodes_that_went() -> None:
    async def answer(request: web.Request) -> web.Response:
        if request.path == "/api/v1/nodes":
            return web.json_response(
                {"items": [{"metadata": {"name": "n1", "uid": "1"}}], "metadata": {}}
            )
        return web.json_response({"resources": []})

    async def test(cluster: Cluster) -> None:
        watched = Watched(changed=lambda _: None, namespaces=(), cluster=cluster)
        watched.has_nodes = True
        watched._kinds = (NODE,)
        for name in ("n1", "n2"):
            node = {"metadata": {"name": name, "uid": name}, "spec": {}, "status": {}}
            watched.notice(NODE, None, node)
        # What kopf keeps of nodes has no uid.
        watched._indexes = {NODE.plural: {node.name: [node] for node in watched.nodes() or ()}}
        await watched.forget_deleted()
        assert [node.name for node in watched.nodes() or ()] == ["n1"]

    with_server(answer, test)


def test_pod_monitors_are_made_while_their_kind_is_there() -> None:
    resources: list[dict[str, str]] = []

    async def answer(_: web.Request) -> web.Response:
        return web.json_response({"resources": resources})

    async def test(cluster: Cluster) -> None:
        watched = Watched(changed=lambda _: None, namespaces=(), cluster=cluster)
        for has_kind in (False, True, True, False, True):
            resources[:] = [{"name": POD_MONITOR.plural}] if has_kind else []
            await watched.forget_deleted()
            assert watched.is_served(POD_MONITOR) is has_kind

    with_server(answer, test)


def test_monitors_are_never_watched_though_their_kind_is_served() -> None:
    """A watch of theirs would end when their kind goes, and the operator with it."""

    async def answer(request: web.Request) -> web.Response:
        served = {"resources": [{"name": KVCACHE.plural}, {"name": POD_MONITOR.plural}]}
        return web.json_response({"items": [], "metadata": {}, **served})

    async def test(cluster: Cluster) -> None:
        watched = Watched(changed=lambda _: None, namespaces=("ns",), cluster=cluster)
        await watched.look_around()
        assert watched.is_served(POD_MONITOR)
        assert KVCACHE in watched._kinds
        assert POD_MONITOR not in watched._kinds

    with_server(answer, test)


def test_kinds_are_looked_for_until_the_api_server_can_list_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Seen on 1.35: lists of a kind whose CRD is a second old are answered with 429."""
    refused = 2

    async def answer(request: web.Request) -> web.Response:
        nonlocal refused
        if not request.path.endswith("/v1alpha1"):
            return web.json_response({"items": [], "metadata": {}, "resources": []})
        refused -= 1
        if refused >= 0:
            return web.json_response({"message": "storage is (re)initializing"}, status=429)
        return web.json_response({"resources": [{"name": KVCACHE.plural}]})

    async def test(cluster: Cluster) -> None:
        watched = Watched(changed=lambda _: None, namespaces=("ns",), cluster=cluster)
        await asyncio.wait_for(operator_process._look_around(watched), 10)
        assert watched.is_served(KVCACHE)

    monkeypatch.setattr(operator_process, "look_for_crd_s", 0.0)
    with_server(answer, test)


def test_urls_of_kinds() -> None:
    assert POD.path("ns", "a") == "/api/v1/namespaces/ns/pods/a"
    assert DEPLOYMENT.path() == "/apis/apps/v1/deployments"
    assert (
        KVCACHE.path("ns", "a", "status")
        == "/apis/larder.dev/v1alpha1/namespaces/ns/kvcaches/a/status"
    )
    assert (POD.group, DEPLOYMENT.group, DEPLOYMENT.version) == ("", "apps", "v1")
