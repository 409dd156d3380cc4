"""A reconcile from a KVCache to its status, on an API server in memory; and what decides about hostPath and leases."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cacheoperator import reconcile, shared_memory
from cacheoperator.__main__ import read_settings
from cacheoperator.children import Children
from cacheoperator.cluster import Cluster
from cacheoperator.errors import Broken, ClusterError, Forbidden, NotFound, Unreachable
from cacheoperator.kinds import KVCACHE, LEASE, POD_MONITOR, Kind
from cacheoperator.lease import LEASE_NAME, Lease, Others
from cacheoperator.probe import Prober
from cacheoperator.reconcile import Look, Reconciler
from cacheoperator.settings import Images, Settings
from cacheoperator.watch import Key, Stored, store
from operator_fakes import Clock, FakeCluster, FakeWatched
from operator_world import IMAGES

from cacheservice.errors import ConfigError

Json = dict[str, Any]
KEY = ("ns", "demo")


class Agents:
    async def ask(self, pods: object) -> tuple[()]:
        return ()


class Teller:
    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    async def tell(
        self, namespace: str, name: str, uid: str, type_: str, reason: str, message: str
    ) -> None:
        self.told.append((reason, message))


class Watched(FakeWatched):
    """Children as FakeWatched has them, and one KVCache."""

    def __init__(self, cluster: ApiServer) -> None:
        super().__init__(cluster)
        self._api = cluster

    def kvcache(self, key: Key) -> Stored | None:
        return None if self._api.resource is None else store(KVCACHE, self._api.resource)

    def pods(self, key: Key) -> tuple[()]:
        return ()

    def nodes(self) -> None:
        return None


class ApiServer(FakeCluster):
    """With the KVCache's status, and lists, which are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.version = 1000
        self.gets: list[Kind] = []
        self.unreadable: dict[Kind, ClusterError] = {}
        self.statuses: list[Json] = []
        self.resource: Json | None = {
            "apiVersion": "larder.dev/v1alpha1",
            "kind": "KVCache",
            "metadata": {
                "name": "demo",
                "namespace": "ns",
                "uid": "u",
                "generation": 1,
                "resourceVersion": "1",
            },
            "spec": {
                "model": {"name": "m"},
                "engine": {"device": "cpu"},
                "decode": {"replicas": 0},
                "cache": {"cpu": "64Mi", "nodeSelector": {"a": "b"}},
                "redis": {"external": {"address": "redis.x.svc:6379"}},
                "router": {"type": "None"},
                "tls": {"mode": "Off"},
            },
        }

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json | None:
        self.gets.append(kind)
        if kind in self.unreadable:
            raise self.unreadable[kind]
        return None if kind.kind == "Namespace" else await super().get(kind, namespace, name)

    async def list(self, kind: Kind, namespace: str, **_: Any) -> list[Json]:
        return []

    async def write_status(
        self, kind: Kind, namespace: str, name: str, uid: str, status: Mapping[str, Any]
    ) -> Json:
        if self.resource is None:
            raise NotFound("gone", code=404)
        self.version += 1
        self.statuses.append(dict(status))
        return {"metadata": {"resourceVersion": str(self.version)}}

    def catch_up(self) -> None:
        """The watch shows the newest status."""
        assert self.resource is not None
        self.resource["status"] = self.statuses[-1]
        self.resource["metadata"]["resourceVersion"] = str(self.version)


class World:
    """With `monkeypatch` statuses are made up by `summary` and `reason`, else they are real."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.api = ApiServer()
        self.clock = Clock()
        self.watched = Watched(self.api)
        self.teller = Teller()
        self.settings = Settings(operator_version="1", images=IMAGES)
        self.summary = "1/1"
        self.reason = "Fine"
        if monkeypatch is not None:
            monkeypatch.setattr(reconcile.status, "status", self._status)
            monkeypatch.setattr(reconcile.status, "transitions", lambda old, new: [])
            monkeypatch.setattr(reconcile.status, "recheck_after_s", lambda new, observed: None)
        self.observed: Any = None
        self.restart()

    def restart(self) -> None:
        """An operator that remembers nothing."""
        any_: Any = self.api
        watched: Any = self.watched
        agents: Any = Agents()
        teller: Any = self.teller
        self.reconciler = Reconciler(
            cluster=any_, watched=watched, children=Children(any_, watched, self.clock), agents=agents, teller=teller,
            settings=self.settings, now=self.clock, prober=Prober(any_, self.settings, self.clock, lambda key: None),
        )  # fmt: skip

    def _status(self, manifest: object, observed: Any, previous: Mapping[str, Any]) -> Json:
        self.observed = observed
        return {
            "summary": self.summary,
            "conditions": [{"type": "Ready", "status": "True", "reason": self.reason}],
        }

    def round(self) -> Look:
        """One reconcile; `api.writes` has its writes alone."""
        self.api.writes.clear()
        return asyncio.run(self.reconciler.reconcile(KEY))


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_children_first_then_quiet(world: World) -> None:
    world.round()
    assert "apply DaemonSet/demo-cache larder-operator" in world.api.writes
    assert len(world.api.statuses) == 1
    world.watched.look()
    world.api.catch_up()
    world.round()
    assert world.api.writes == []
    world.restart()
    world.round()
    assert world.api.writes == [], "no dry run either: the verdict is on the DaemonSet"
    assert len(world.api.statuses) == 1


def test_summaries_wait_ten_seconds_and_conditions_do_not(world: World) -> None:
    world.round()
    world.summary = "0/1"
    look = world.round()
    assert len(world.api.statuses) == 1
    assert look.again_s is not None
    assert look.again_s <= 10
    world.clock.pass_s(10)
    world.round()
    assert len(world.api.statuses) == 2
    world.summary, world.reason = "1/1", "Other"
    world.round()
    assert len(world.api.statuses) == 3, "a condition changed"


def test_a_status_that_the_watch_has_not_shown_yet_is_not_written_again(world: World) -> None:
    world.round()
    world.clock.pass_s(60)
    world.round()
    assert len(world.api.statuses) == 1


def test_a_resource_that_went_is_forgotten(world: World) -> None:
    world.round()
    assert world.reconciler.ready == {KEY}
    world.api.resource = None
    assert world.round() == Look()
    assert world.api.writes == []
    assert world.reconciler.ready == set()


def test_paused_applies_nothing_and_asks_nothing(world: World) -> None:
    assert world.api.resource is not None
    world.api.resource["spec"]["paused"] = True
    world.round()
    assert world.api.writes == []
    assert len(world.api.statuses) == 1


def test_a_manifest_that_is_refused_touches_nothing_but_status(world: World) -> None:
    assert world.api.resource is not None
    world.api.resource["spec"]["cache"]["gpu"] = "3Gi"
    world.round()
    assert world.api.writes == []
    assert "gpu" in world.observed.is_refused


def test_a_refusal_is_observed_and_tried_again_by_backoff_alone(world: World) -> None:
    world.api.refuse = lambda verb, obj: (
        Forbidden("quota", code=403) if obj["kind"] == "ConfigMap" else None
    )
    look = world.round()
    assert look.has_failed
    assert look.again_s is None
    assert [error.object for error in world.observed.apply_errors] == ["configmap/demo-connection"]


def test_a_deletion_that_is_refused_stalls_and_says_which() -> None:
    world = World()
    assert world.api.resource is not None
    world.api.resource["spec"]["decode"]["replicas"] = 2  # with a PodDisruptionBudget
    world.round()
    world.watched.look()
    world.api.catch_up()
    world.api.resource["spec"]["decode"]["replicas"] = 0
    world.api.resource["spec"].pop("decode")
    world.api.refuse = lambda verb, obj: (
        Forbidden("a policy keeps deployments", code=403)
        if (verb, obj["kind"]) == ("delete", "Deployment")
        else None
    )
    since = set()
    for stalled in ("Unknown", "Unknown", "True", "True"):
        look = world.round()
        assert look.has_failed
        world.watched.look()
        world.api.catch_up()
        conditions = {found["type"]: found for found in world.api.statuses[-1]["conditions"]}
        assert conditions["Stalled"]["status"] == stalled
        assert conditions["Accepted"]["status"] == "False"
        assert "deployment/demo-decode" in conditions["Accepted"]["message"]
        since.add(conditions["Accepted"]["lastTransitionTime"])
        world.clock.pass_s(31)
    assert len(since) == 1
    num_statuses = len(world.api.statuses)
    world.round()
    assert len(world.api.statuses) == num_statuses, "what stands is not written again"


DECODE = ("Deployment", "ns", "demo-decode")


def scaled(live: Json) -> None:
    live["spec"]["replicas"] = 9


def settled() -> World:
    """A world with real statuses in which all is applied and told."""
    world = World()
    for _ in range(3):
        world.round()
        world.watched.look()
        world.api.catch_up()
    world.teller.told.clear()
    return world


def test_a_fight_over_an_object_is_told_once_and_looked_after(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for look_s in ("busy_look_s", "calm_look_s", "idle_look_s"):
        monkeypatch.setattr(reconcile, look_s, 3600.0)
    world = settled()
    look = Look()
    for _ in range(60):
        world.api.change(DECODE, scaled, "their-operator")
        world.watched.look()
        look = world.round()
        world.watched.look()
        world.api.catch_up()
        world.clock.pass_s(10)
    assert look.again_s is not None
    assert look.again_s <= 60, "the last repair was after 350 s, the next is 300 s later"
    told = [reason for reason, _ in world.teller.told]
    assert told.count("DriftContested") == 1
    assert told.count("DriftRepaired") == 5 + 5
    [message] = [text for reason, text in world.teller.told if reason == "DriftContested"]
    assert all(
        word in message for word in ("deployment/demo-decode", "their-operator", "spec.replicas")
    )
    status = world.api.statuses[-1]
    assert "DriftContested" in [problem["reason"] for problem in status["problems"]]
    [accepted] = [found for found in status["conditions"] if found["type"] == "Accepted"]
    assert accepted["status"] == "True", "the resource can be used all the same"
    num_statuses = len(world.api.statuses)
    world.round()
    assert len(world.api.statuses) == num_statuses


def test_a_missing_kind_of_monitors_is_told_once_until_it_is_there() -> None:
    world = settled()
    assert world.api.resource is not None
    world.api.resource["spec"]["podMonitor"] = {}
    world.api.resource["metadata"]["generation"] = 2
    for _ in range(3):
        world.round()
        world.api.catch_up()
        world.restart()
        world.clock.pass_s(60)
    told = [message for reason, message in world.teller.told if reason == "PodMonitorCRDMissing"]
    assert len(told) == 1, "not at each pass, nor at each restart"
    assert "spec.podMonitor" in told[0]
    status = world.api.statuses[-1]
    assert [problem["reason"] for problem in status["problems"]] == [
        "NoMatchingNodes",
        "PodMonitorCRDMissing",
    ], "what keeps it from working comes first"
    world.watched.unwatched = frozenset({POD_MONITOR})
    world.round()
    assert len(world.api.statuses[-1]["problems"]) == 1
    assert "apply PodMonitor/demo larder-operator" in world.api.writes


def test_monitors_that_are_not_wanted_any_more_go_though_they_are_not_watched() -> None:
    """Also after a restart, when nobody remembers who made them; and what is ours no more is left alone."""
    world = settled()
    world.watched.unwatched = frozenset({POD_MONITOR})
    assert world.api.resource is not None
    spec, metadata = world.api.resource["spec"], world.api.resource["metadata"]
    spec["podMonitor"] = {}
    metadata["generation"] = 2
    world.round()
    world.api.catch_up()
    assert world.api.body(("PodMonitor", "ns", "demo"))
    world.restart()
    del spec["podMonitor"]
    metadata["generation"] = 3
    world.round()
    world.api.catch_up()
    assert "delete PodMonitor/demo" in world.api.writes
    assert world.api.body(("PodMonitor", "ns", "demo")) is None
    world.round()
    del world.api.gets[:]
    world.round()
    assert POD_MONITOR not in world.api.gets, "that it has gone is seen once"


@pytest.mark.parametrize(
    "problem", [Forbidden("no", code=403), ClusterError("storage is initializing", code=429)]
)
def test_monitors_that_can_not_be_seen_hold_up_nothing_and_are_asked_for_again(
    problem: ClusterError,
) -> None:
    world = settled()
    world.watched.unwatched = frozenset({POD_MONITOR})
    metadata = world.api.resource["metadata"] if world.api.resource else {}
    world.api.put(
        {
            "apiVersion": POD_MONITOR.api_version,
            "kind": POD_MONITOR.kind,
            "metadata": {
                "name": "demo",
                "namespace": "ns",
                "ownerReferences": [{"uid": metadata["uid"], "controller": True}],
            },
        }
    )
    world.api.unreadable[POD_MONITOR] = problem
    world.round()
    assert world.api.body(("PodMonitor", "ns", "demo"))
    [accepted] = [c for c in world.api.statuses[-1]["conditions"] if c["type"] == "Accepted"]
    assert accepted["status"] == "True"
    del world.api.unreadable[POD_MONITOR]
    world.round()
    assert world.api.body(("PodMonitor", "ns", "demo")) is None


def test_a_monitor_of_others_stays() -> None:
    world = settled()
    world.watched.unwatched = frozenset({POD_MONITOR})
    world.api.put(
        {
            "apiVersion": POD_MONITOR.api_version,
            "kind": POD_MONITOR.kind,
            "metadata": {"name": "demo", "namespace": "ns"},
        }
    )
    world.round()
    assert world.api.body(("PodMonitor", "ns", "demo"))


def test_a_kind_of_monitors_that_goes_is_no_refusal() -> None:
    """Between two full passes: an apply is answered with 404, and that is when it is noticed."""
    world = settled()
    world.watched.unwatched = frozenset({POD_MONITOR})
    assert world.api.resource is not None
    world.api.resource["spec"]["podMonitor"] = {}
    world.api.resource["metadata"]["generation"] = 2
    world.api.has_pod_monitors = False
    world.api.refuse = lambda verb, obj: (
        NotFound("404 page not found", code=404) if obj["kind"] == "PodMonitor" else None
    )
    for _ in range(3):
        world.round()
        world.api.catch_up()
        world.clock.pass_s(60)
    told = [reason for reason, _ in world.teller.told]
    assert "ApplyFailed" not in told
    assert "PodMonitorCRDMissing" in told
    [accepted] = [c for c in world.api.statuses[-1]["conditions"] if c["type"] == "Accepted"]
    assert accepted["status"] == "True"


def test_a_restart_tells_what_changed_meanwhile_and_nothing_else() -> None:
    world = settled()
    world.restart()
    num_statuses = len(world.api.statuses)
    world.round()
    assert (world.api.writes, world.teller.told) == ([], [])
    assert len(world.api.statuses) == num_statuses
    world.api.change(DECODE, scaled, "kubectl-scale")
    world.watched.look()
    world.restart()
    world.round()
    [(reason, message)] = world.teller.told
    assert reason == "DriftRepaired"
    assert (
        message == "deployment/demo-decode: spec.replicas put right; kubectl-scale had changed it"
    )
    world.watched.look()
    world.teller.told.clear()
    world.restart()
    world.round()
    assert (world.api.writes, world.teller.told) == ([], [])


def test_a_server_that_does_not_answer_is_the_callers_matter(world: World) -> None:
    world.api.refuse = lambda verb, obj: Unreachable("away")
    with pytest.raises(Unreachable):
        world.round()


def test_a_secret_that_is_refused_does_not_change_what_pods_are_made_with(world: World) -> None:
    assert world.api.resource is not None
    world.api.resource["spec"] |= {"redis": {}, "router": {}, "tls": {}}
    world.api.refuse = lambda verb, obj: (
        Forbidden("exceeded quota", code=403)
        if obj["metadata"]["name"] in ("demo-redis-password", "demo-engine-tls")
        else None
    )
    assert world.round().has_failed
    assert "apply StatefulSet/demo-redis larder-operator" in world.api.writes
    world.watched.look()
    assert world.round().has_failed
    assert sorted(world.api.writes) == [
        "apply Secret/demo-engine-tls larder-operator",
        "apply Secret/demo-redis-password larder-operator",
    ]
    world.api.refuse = lambda verb, obj: None
    assert not world.round().has_failed
    assert sorted(world.api.writes) == [
        "apply Secret/demo-authority larder-operator",
        "apply Secret/demo-engine-tls larder-operator",
        "apply Secret/demo-redis-password larder-operator",
    ]
    world.round()
    assert world.api.writes == []


def test_a_deleted_password_is_made_anew_once(world: World) -> None:
    assert world.api.resource is not None
    world.api.resource["spec"]["redis"] = {}
    secret = ("Secret", "ns", "demo-redis-password")
    world.round()
    world.watched.look()
    world.round()
    before = world.api.body(secret)
    del world.api.servers[secret], world.api.uids[secret]
    world.round()
    after = world.api.body(secret)
    assert before is not None
    assert after is not None
    assert before["data"] != after["data"]
    assert "apply StatefulSet/demo-redis larder-operator" in world.api.writes
    world.watched.look()
    world.round()
    assert world.api.writes == []


def test_engines_that_the_watch_does_not_show_keep_their_images(world: World) -> None:
    world.round()
    world.settings = replace(
        world.settings, images=replace(IMAGES, engine_cpu="another:2", payload="another:3")
    )
    world.restart()
    world.round()
    live = world.api.body(("Deployment", "ns", "demo-decode"))
    assert live is not None
    [engine] = live["spec"]["template"]["spec"]["containers"]
    assert engine["image"] == IMAGES.engine_cpu
    assert "dry-run Pod/demo-admission-check" not in world.api.writes


def test_a_server_that_fails_behind_itself_is_told(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def broken(*_: Any) -> None:
        raise Broken('failed calling webhook "x"', code=500, reason="InternalError")

    monkeypatch.setattr(reconcile, "gather", broken)
    assert world.round().has_failed
    assert [error.reason for error in world.observed.apply_errors] == ["InternalError"]


def test_what_may_not_be_read_is_told(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(*_: Any) -> None:
        raise Forbidden('User "u" cannot get resource "secrets"', code=403, reason="Forbidden")

    monkeypatch.setattr(reconcile, "gather", refused)
    look = world.round()
    assert look.has_failed
    assert [error.reason for error in world.observed.apply_errors] == ["Forbidden"]
    assert len(world.api.statuses) == 1


# hostPath


@pytest.mark.parametrize(
    ("refused", "is_allowed", "dry_runs"),
    [((), True, 1), (("folder",), False, 2), (("folder", "plain"), True, 2)],
)
def test_hostpath_is_refused_only_when_the_folder_is_the_cause(
    world: World, refused: tuple[str, ...], *, is_allowed: bool, dry_runs: int
) -> None:
    def refuse(verb: str, obj: Mapping[str, Any]) -> ClusterError | None:
        if verb != "dry-run":
            return None
        kind = "folder" if obj["spec"].get("volumes") else "plain"
        return Forbidden(f"no {kind}", code=403) if kind in refused else None

    world.api.refuse = refuse
    world.round()
    asked = [line for line in world.api.writes if line.startswith("dry-run")]
    assert len(asked) == dry_runs
    daemon_set = world.api.body(("DaemonSet", "ns", "demo-cache"))
    assert daemon_set is not None
    assert ("hostPath" in str(daemon_set)) == is_allowed
    value = daemon_set["metadata"]["annotations"][shared_memory.ANNOTATION]
    remembered = shared_memory.read_annotation("", value)
    assert remembered is not None
    assert remembered.is_allowed == is_allowed


def test_a_verdict_holds_for_its_label_alone() -> None:
    verdict = shared_memory.SharedMemoryVerdict(is_allowed=False, reason="a policy says no")
    value = shared_memory.write_annotation("privileged", verdict)
    assert shared_memory.read_annotation("privileged", value) == verdict
    assert shared_memory.read_annotation("", value) is None
    assert shared_memory.read_annotation("", "") is None
    assert shared_memory.read_annotation("", "nonsense") is None


# Leases


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_one_operator_holds_the_lease_until_it_is_silent() -> None:
    async def test() -> None:
        cluster: Any = FakeCluster()
        seconds = Seconds()
        first = Lease(cluster, "ns", "first", clock=seconds)
        second = Lease(cluster, "ns", "second", clock=seconds)
        assert await first.try_once()
        assert not await second.try_once()
        assert second.holder == "first"
        seconds.now = 14.0
        assert not await second.try_once()
        assert await first.try_once()
        seconds.now = 28.0
        assert not await second.try_once(), "it was renewed meanwhile"
        seconds.now = 44.0
        assert await second.try_once()
        assert not await first.try_once()
        assert first.holder == "second"

    asyncio.run(test())


def test_a_lease_given_back_is_free_at_once() -> None:
    async def test() -> None:
        cluster: Any = FakeCluster()
        first, second = Lease(cluster, "ns", "first"), Lease(cluster, "ns", "second")
        assert await first.try_once()
        await second.release()
        assert not await second.try_once(), "it was not its own to give back"
        await first.release()
        assert await second.try_once()
        found = await cluster.get(LEASE, "ns", LEASE_NAME)
        assert found["spec"]["leaseTransitions"] == 1

    asyncio.run(test())


def test_a_namespace_with_an_operator_of_its_own_is_left_to_it(world: World) -> None:
    seconds = Seconds()
    cluster: Any = world.api
    namespaced = Lease(cluster, "ns", "theirs", clock=seconds)
    asyncio.run(namespaced.try_once())
    world.reconciler._others = Others(cluster, "ours", clock=seconds)
    look = world.round()
    assert world.api.writes == []
    assert world.api.statuses == []
    assert look.again_s is not None
    seconds.now += 14.0
    world.round()
    assert world.api.writes == []
    # Its Lease has run out, but it may only be restarting.
    seconds.now += 29.0
    world.round()
    assert world.api.writes == []
    seconds.now += 5.0
    world.round()
    assert "apply DaemonSet/demo-cache larder-operator" in world.api.writes
    seconds.now += 5.0
    asyncio.run(namespaced.try_once())
    world.round()
    assert world.api.writes == []
    asyncio.run(namespaced.release())
    seconds.now += 29.0
    world.watched.look()
    num_told = len(world.api.statuses)
    world.round()
    assert len(world.api.statuses) == num_told
    seconds.now += 5.0
    world.watched.look()
    assert not world.round().has_failed
    assert len(world.api.statuses) > num_told


def test_an_operator_that_begins_while_another_restarts_does_not_take_its_namespace() -> None:
    """Seen on a crowded cluster: ours ended while the other was installed anew, and for five seconds both worked."""

    async def test() -> None:
        seconds = Seconds()
        cluster: Any = FakeCluster()
        namespaced = Lease(cluster, "ns", "theirs", clock=seconds)
        await namespaced.try_once()
        await namespaced.release()
        others = Others(cluster, "ours", clock=seconds)
        assert await others.holder("ns")
        assert await others.holder("empty") == "", "where nobody ever was, nobody is waited for"
        seconds.now += 29.0
        assert await others.holder("ns")
        seconds.now += 5.0
        assert await others.holder("ns") == ""
        seconds.now += 5.0
        assert await others.holder("ns") == ""

    asyncio.run(test())


def test_our_own_lease_and_one_that_may_not_be_read_keep_nobody_off() -> None:
    async def test() -> None:
        cluster: Any = FakeCluster()
        await Lease(cluster, "larder-system", "ours").try_once()
        others = Others(cluster, "ours")
        assert await others.holder("larder-system") == ""

        async def refused(*_: Any) -> None:
            raise Forbidden("leases", code=403)

        cluster.get = refused
        assert await others.holder("ns") == ""

    asyncio.run(test())


@pytest.mark.parametrize("is_hanging", [True, False])
def test_a_holder_that_can_not_renew_ends_before_the_next_may_begin(is_hanging: bool) -> None:
    async def test() -> None:
        cluster: Any = FakeCluster()
        lease = Lease(cluster, "ns", "first", duration_s=0.6)
        assert await lease.try_once()

        async def silence(*_: Any) -> None:
            if is_hanging:
                await asyncio.Event().wait()
            raise Unreachable("away")

        cluster.get = silence
        async with asyncio.timeout(5):
            begin = asyncio.get_running_loop().time()
            assert "could not be renewed" in await lease.hold()
        took_s = asyncio.get_running_loop().time() - begin
        assert took_s >= 0.4, "one answer that fails is not the end"

    asyncio.run(test())


# Settings


def test_settings_are_read_and_unknown_keys_refused(tmp_path: Path) -> None:
    path = tmp_path / "operator.yaml"
    images = "\n".join(f"  {name}: x:1" for name in Images.__dataclass_fields__)
    path.write_text(f"images:\n{images}\nwatch_namespaces: [a]\nresync_s: 9\n", encoding="utf-8")
    settings = read_settings(path, {"POD_NAMESPACE": "there"})
    assert (settings.watch_namespaces, settings.resync_s, settings.operator_namespace) == (
        ("a",),
        9,
        "there",
    )
    for text in (f"images:\n{images}\nresync: 9\n", "images: {agent: x}\n", "images: 3\n", "[]"):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"operator\.yaml"):
            read_settings(path, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_settings(tmp_path / "none.yaml", {})


def test_secrets_are_never_listed() -> None:
    from cacheoperator.kinds import SECRET, watched_children

    assert SECRET not in watched_children

    async def test() -> None:
        from kubernetes.aio import client

        async with Cluster(client.Configuration(host="http://127.0.0.1:9")) as cluster:
            with pytest.raises(AssertionError):
                await cluster.list(SECRET, "ns")

    asyncio.run(test())
