"""Applying what differs, on an API server in memory: never more than needed, never what is not ours."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from cacheoperator.children import REPLICAS_MANAGER, Children, Memory, Outcome, normal
from cacheoperator.errors import Broken, ClusterError, Conflict, Forbidden, Invalid, Unreachable
from cacheoperator.names import FIELD_MANAGER
from cacheoperator.owners import owners
from operator_fakes import Clock, FakeCluster, FakeWatched

Json = dict[str, Any]
KEY = ("ns", "demo")
UID = "uid-of-demo"


def owned(kind: str, name: str, uid: str = UID, **fields: Any) -> Json:
    version = "apps/v1" if kind in ("Deployment", "DaemonSet") else "v1"
    owner = {"kind": "KVCache", "name": "demo", "uid": uid, "controller": True}
    return {
        "apiVersion": version,
        "kind": kind,
        "metadata": {
            "name": name,
            "namespace": "ns",
            "labels": {"app.kubernetes.io/component": "decode"},
            "ownerReferences": [owner],
        },
        **fields,
    }


def deployment(replicas: int | None = None, image: str = "i:1") -> Json:
    spec: Json = {"template": {"spec": {"containers": [{"name": "vllm", "image": image}]}}}
    if replicas is not None:
        spec["replicas"] = replicas
    return owned("Deployment", "demo-decode", spec=spec)


class World:
    def __init__(self) -> None:
        self.cluster = FakeCluster()
        self.watched = FakeWatched(self.cluster)
        self.clock = Clock()
        self.children = Children(self.cluster, self.watched, self.clock)  # type: ignore[arg-type]
        self.memory = Memory()

    def apply(self, *wanted: Mapping[str, Any], is_wish_known: bool = False) -> Outcome:
        """One round; `cluster.writes` has the writes of this one alone."""
        self.cluster.writes.clear()
        return asyncio.run(
            self.children.apply(KEY, UID, wanted, self.memory, is_wish_known=is_wish_known)
        )

    def restart(self) -> None:
        """An operator that remembers nothing and has seen everything."""
        self.watched.look()
        self.children = Children(self.cluster, self.watched, self.clock)  # type: ignore[arg-type]
        self.memory = Memory()

    def prune(self, *wanted: Mapping[str, Any]) -> Outcome:
        return asyncio.run(self.children.prune(KEY, UID, wanted, self.memory))

    def live(self, kind: str, name: str) -> Json:
        body = self.cluster.body((kind, "ns", name))
        assert body is not None
        return body


@pytest.fixture
def world() -> World:
    return World()


def test_a_second_round_writes_nothing_whether_the_watch_has_caught_up_or_not(world: World) -> None:
    wanted = [
        owned("Secret", "demo-key", data={"a": "eA=="}),
        owned("Service", "demo", spec={"x": "1"}),
        deployment(2),
    ]
    assert world.apply(*wanted).num_writes == 3
    world.apply(*wanted)
    assert world.cluster.writes == []
    world.watched.look()
    world.apply(*wanted)
    assert world.cluster.writes == []
    wanted[2] = deployment(3)
    world.apply(*wanted)
    assert world.cluster.writes == ["apply Deployment/demo-decode larder-operator"]
    world.apply(*wanted)
    assert world.cluster.writes == [], "the watch still shows the number of before"
    world.watched.look()
    fresh = Children(world.cluster, world.watched, world.clock)  # type: ignore[arg-type]
    asyncio.run(fresh.apply(KEY, UID, wanted, Memory()))
    assert world.cluster.writes == [], "a restart remembers nothing and writes nothing"


def test_foreign_changes_are_repaired_and_told_but_wishes_of_ours_are_not_repairs(
    world: World,
) -> None:
    world.apply(deployment(2))
    world.watched.look()
    world.cluster.change(
        ("Deployment", "ns", "demo-decode"), lambda live: live["spec"].update(replicas=9)
    )
    world.watched.look()
    outcome = world.apply(deployment(2))
    assert [(repair.object, repair.paths) for repair in outcome.repairs] == [
        ("deployment/demo-decode", ("spec.replicas",))
    ]
    assert world.live("Deployment", "demo-decode")["spec"]["replicas"] == 2
    world.watched.look()
    outcome = world.apply(deployment(3))
    assert outcome.repairs == []
    assert world.live("Deployment", "demo-decode")["spec"]["replicas"] == 3


def scaled_to_nine(live: Json) -> None:
    live["spec"]["replicas"] = 9


DECODE = ("Deployment", "ns", "demo-decode")


def test_who_changes_an_object_each_time_makes_few_writes_and_is_named(world: World) -> None:
    world.apply(deployment(2))
    begin = world.clock()
    repaired_at = []
    outcome = Outcome()
    while (world.clock() - begin).total_seconds() < 1800:
        world.cluster.change(DECODE, scaled_to_nine, "their-operator")
        world.watched.look()
        outcome = world.apply(deployment(2))
        if outcome.repairs:
            repaired_at.append((world.clock() - begin).total_seconds())
            [repair] = outcome.repairs
            assert repair.managers == ("their-operator",)
        world.clock.pass_s(10)
    assert repaired_at[:5] == [0, 10, 20, 30, 40], "a few are put right at once"
    gaps = [later - earlier for earlier, later in itertools.pairwise(repaired_at[4:])]
    assert gaps[:5] == [10, 20, 40, 80, 160]
    assert set(gaps[5:]) == {300}
    [contest] = outcome.contests
    assert (contest.object, contest.component) == ("deployment/demo-decode", "decode")
    assert (contest.paths, contest.managers) == (("spec.replicas",), ("their-operator",))
    assert outcome.due is not None
    assert outcome.due > world.clock()

    world.apply(deployment(4))
    assert world.cluster.writes, "what the KVCache says now does not wait"
    assert world.live("Deployment", "demo-decode")["spec"]["replicas"] == 4


def test_a_contest_is_told_until_it_has_been_calm_for_long(world: World) -> None:
    world.apply(deployment(2))
    for _ in range(5):
        world.cluster.change(DECODE, scaled_to_nine)
        world.watched.look()
        world.apply(deployment(2))
    world.watched.look()
    for _ in range(14):
        world.clock.pass_s(60)
        outcome = world.apply(deployment(2))
        assert world.cluster.writes == []
        assert len(outcome.contests) == 1
        assert outcome.due is not None
    world.clock.pass_s(60)
    outcome = world.apply(deployment(2))
    assert (outcome.contests, outcome.due) == ([], None)
    for _ in range(4):
        world.cluster.change(DECODE, scaled_to_nine)
        world.watched.look()
        assert world.apply(deployment(2)).repairs, "it is an object like any other again"


def test_changes_now_and_then_are_put_right_at_once(world: World) -> None:
    world.apply(deployment(2))
    for _ in range(50):
        world.clock.pass_s(76)
        world.cluster.change(DECODE, scaled_to_nine)
        world.watched.look()
        outcome = world.apply(deployment(2))
        assert len(outcome.repairs) == 1
        assert outcome.contests == []


def test_who_deletes_an_object_each_time_makes_few_writes(world: World) -> None:
    world.apply(deployment(2))
    num_writes = 0
    outcome = Outcome()
    for _ in range(60):
        world.watched.look()
        if world.cluster.body(DECODE) is not None:
            world.cluster.lose(DECODE)
        world.watched.look()
        outcome = world.apply(deployment(2))
        num_writes += len(world.cluster.writes)
        world.clock.pass_s(10)
    assert num_writes == 5 + 5, "and then after 10, 20, 40, 80 and 160 s"
    assert [contest.paths for contest in outcome.contests] == [()]


def test_what_changed_while_the_operator_was_away_is_told(world: World) -> None:
    world.apply(deployment(2), owned("Secret", "demo-key", data={"a": "eA=="}))
    world.cluster.change(DECODE, scaled_to_nine, "kubectl-scale")
    secret = ("Secret", "ns", "demo-key")
    world.cluster.change(secret, lambda live: live["data"].update(a="eQ=="), "kubectl-edit")
    world.restart()
    wanted = deployment(2), owned("Secret", "demo-key", data={"a": "eA=="})
    outcome = world.apply(*wanted, is_wish_known=True)
    assert [(r.object, r.paths, r.managers) for r in outcome.repairs] == [
        ("deployment/demo-decode", ("spec.replicas",), ("kubectl-scale",)),
        ("secret/demo-key", ("data.a",), ("kubectl-edit",)),
    ]
    world.restart()
    outcome = world.apply(*wanted, is_wish_known=True)
    assert (outcome.repairs, world.cluster.writes) == ([], [])


def test_a_new_wish_after_a_restart_is_no_repair(world: World) -> None:
    world.apply(deployment(2))
    world.restart()
    newer = deployment(2, image="i:2")
    newer["spec"]["progressDeadlineSeconds"] = 60
    outcome = world.apply(newer, is_wish_known=True)
    assert world.cluster.writes, "a newer operator wants something else, and more"
    assert outcome.repairs == []
    world.cluster.change(DECODE, scaled_to_nine)
    world.restart()
    assert world.apply(deployment(3)).repairs == [], "the KVCache was changed meanwhile, too"
    assert world.live("Deployment", "demo-decode")["spec"]["replicas"] == 3


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("spec.replicas", {"f:spec": {"f:replicas": {}}}),
        (
            "spec.template.spec.containers[vllm].env[A].value",
            {"f:spec": {"f:template": {"f:spec": {"f:containers": {
                'k:{"name":"vllm"}': {"f:env": {'k:{"name":"A"}': {"f:value": {}}}}
            }}}}},
        ),
        (
            "spec.ports[80,TCP]",
            {"f:spec": {"f:ports": {'k:{"port":80,"protocol":"TCP"}': {".": {}}}}},
        ),
        ("metadata.finalizers[a/b]", {"f:metadata": {"f:finalizers": {'v:"a/b"': {}}}}),
        ("spec.selector", {"f:spec": {"f:selector": {"f:app": {}}}}),
    ],
)  # fmt: skip
def test_the_owner_of_a_path_is_found(path: str, fields: Json) -> None:
    def live(*entries: tuple[str, str, str]) -> Json:
        managed = [
            {"manager": who, "operation": how, "subresource": part, "fieldsV1": fields}
            for who, how, part in entries
        ]
        return {"metadata": {"managedFields": managed}}

    them = ("kubectl-edit", "Update", "")
    assert owners(live(them), ["spec.other", path]) == {path: "kubectl-edit"}
    ours = (FIELD_MANAGER, "Apply", "")
    for entries in (
        [],
        [(REPLICAS_MANAGER, "Apply", "")],
        [(FIELD_MANAGER, "Update", "")],
        [("kube-controller-manager", "Update", "status")],
        [them, ours] if not path.startswith("spec.selector") else [ours],
    ):
        assert owners(live(*entries), [path]) == {}


def test_a_foreign_object_is_never_written(world: World) -> None:
    theirs = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "demo", "namespace": "ns"},
        "spec": {"x": "9"},
    }
    world.cluster.put(theirs)
    outcome = world.apply(
        owned("Service", "demo", spec={"x": "1"}), owned("ConfigMap", "other", data={"a": "b"})
    )
    assert world.cluster.writes == ["apply ConfigMap/other larder-operator"]
    [error] = outcome.errors
    assert (error.object, error.reason, error.component) == (
        "service/demo",
        "NameConflict",
        "decode",
    )
    since = error.since
    world.clock.pass_s(60)
    [error] = world.apply(owned("Service", "demo", spec={"x": "1"})).errors
    assert error.since == since, "since when it is so stays"


@pytest.mark.parametrize(
    "theirs", [{"a": "9"}, {"a": "b"}, {"other": "c"}], ids=["disagrees", "agrees", "is beside"]
)
def test_an_object_that_appears_before_our_first_apply_is_not_taken_over(
    world: World, theirs: Json
) -> None:
    id_ = ("ConfigMap", "ns", "demo")
    before: list[Json] = []

    def be_faster(verb: str, obj: Mapping[str, Any]) -> None:
        if not before:
            metadata = {"name": "demo", "namespace": "ns", "labels": {"theirs": "yes"}}
            world.cluster.put(
                {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": theirs}
            )
            before.append(world.live("ConfigMap", "demo"))

    world.cluster.refuse = be_faster
    wanted = owned("ConfigMap", "demo", data={"a": "b"})
    outcome = world.apply(wanted)
    assert outcome.must_wait
    after = world.live("ConfigMap", "demo")
    for body in (before[0], after):
        del body["metadata"]["resourceVersion"]
        body["metadata"].pop("managedFields")
    assert after == before[0]
    [error] = world.apply(wanted).errors
    assert error.reason == "NameConflict"
    assert world.cluster.writes == []
    world.cluster.lose(id_)
    world.apply(wanted)
    assert world.live("ConfigMap", "demo")["metadata"]["ownerReferences"]


def test_an_object_of_an_earlier_resource_of_this_name_is_waited_for(world: World) -> None:
    world.cluster.put(owned("Service", "demo", uid="uid-of-before"))
    outcome = world.apply(owned("Service", "demo"))
    assert outcome.must_wait
    assert outcome.errors == []
    assert world.cluster.writes == []


def test_later_applies_name_the_object_that_they_mean(world: World) -> None:
    world.apply(owned("Service", "demo", spec={"x": "1"}))
    world.watched.look()
    id_ = ("Service", "ns", "demo")
    world.cluster.uids[id_] = "another"  # deleted and made anew by someone while we looked away
    outcome = world.apply(owned("Service", "demo", spec={"x": "2"}))
    assert outcome.must_wait
    assert world.live("Service", "demo")["spec"]["x"] == "1"


def test_replicas_are_handed_over_before_they_are_left_out(world: World) -> None:
    world.apply(deployment(3))
    world.watched.look()
    world.apply(deployment(None))
    assert world.cluster.writes == [
        f"apply Deployment/demo-decode {REPLICAS_MANAGER}",
        "apply Deployment/demo-decode larder-operator",
    ]
    assert world.live("Deployment", "demo-decode")["spec"]["replicas"] == 3
    world.watched.look()
    world.cluster.change(
        ("Deployment", "ns", "demo-decode"), lambda live: live["spec"].update(replicas=7)
    )
    world.watched.look()
    world.apply(deployment(None))
    assert world.cluster.writes == [], "an autoscaler's number is its own"


def test_an_admission_webhook_that_insists_is_not_fought(world: World) -> None:
    def insist(obj: Json) -> Json:
        if obj["kind"] == "Deployment" and "spec" in obj:
            obj["spec"]["template"]["spec"]["containers"][0]["image"] = "mirror/i:1"
        return obj

    world.cluster.webhook = insist
    world.apply(deployment(1))
    world.watched.look()
    first = world.apply(deployment(1))
    world.watched.look()
    second = world.apply(deployment(1))
    assert first.repairs == []
    assert second.num_writes == 0
    assert world.cluster.writes == []
    world.apply(deployment(1, image="i:2"))
    assert world.cluster.writes, "another wish is tried"


def test_what_an_apply_can_not_undo_is_replaced(world: World) -> None:
    world.apply(deployment(1))
    world.watched.look()
    world.apply(deployment(1))
    world.cluster.change(
        ("Deployment", "ns", "demo-decode"),
        lambda live: live["spec"]["template"]["spec"]["containers"][0].update(image="evil"),
    )
    world.watched.look()
    answers = [Invalid("two sources", code=422), None, None]
    world.cluster.refuse = lambda verb, obj: answers.pop(0)
    outcome = world.apply(deployment(1))
    assert [line.split()[0] for line in world.cluster.writes] == [
        "apply",
        "replace-template",
        "apply",
    ]
    assert outcome.errors == []


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            Forbidden(
                'configmaps "x" is forbidden: exceeded quota: tight', code=403, reason="Forbidden"
            ),
            "QuotaExceeded",
        ),
        (Forbidden('User "u" cannot patch resource', code=403, reason="Forbidden"), "Forbidden"),
        (Invalid("wrong", code=422, reason="Invalid", causes=(("spec.x", "no"),)), "Invalid"),
        (Broken(".spec.foo: field not declared in schema", code=500), "Invalid"),
        (
            Broken('failed calling webhook "x"', code=500, reason="InternalError"),
            "InternalError",
        ),
    ],
)
def test_a_refusal_is_a_value_and_the_rest_goes_on(
    world: World, error: ClusterError, reason: str
) -> None:
    world.cluster.refuse = lambda verb, obj: error if obj["kind"] == "ConfigMap" else None
    outcome = world.apply(owned("ConfigMap", "x"), owned("Service", "demo"))
    [found] = outcome.errors
    assert (found.object, found.verb, found.reason) == ("configmap/x", "create", reason)
    assert found.field_path == (error.causes[0][0] if error.causes else "")
    assert world.cluster.body(("Service", "ns", "demo")) is not None


def test_a_server_that_does_not_answer_ends_the_round(world: World) -> None:
    world.cluster.refuse = lambda verb, obj: Unreachable("no answer")
    with pytest.raises(Unreachable):
        world.apply(owned("ConfigMap", "x"))


def test_a_conflict_is_tried_again(world: World) -> None:
    world.cluster.refuse = lambda verb, obj: Conflict("changed", code=409)
    outcome = world.apply(owned("ConfigMap", "x"))
    assert outcome.must_wait
    assert outcome.errors == []


def test_the_authority_is_not_stored_when_a_leaf_was_refused(world: World) -> None:
    world.cluster.refuse = lambda verb, obj: (
        Forbidden("no", code=403) if obj["metadata"]["name"] == "demo-agent-tls" else None
    )
    world.apply(
        owned("Secret", "demo-agent-tls"),
        owned("Secret", "demo-authority"),
        owned("Service", "demo"),
    )
    assert world.cluster.writes == [
        "apply Secret/demo-agent-tls larder-operator",
        "apply Service/demo larder-operator",
    ]


def test_prune_deletes_what_is_ours_and_not_wanted(world: World) -> None:
    world.apply(owned("Service", "keep"), owned("Service", "drop"))
    world.cluster.put(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "theirs", "namespace": "ns"}}
    )
    world.watched.look()
    world.cluster.writes.clear()
    world.prune(owned("Service", "keep"))
    assert world.cluster.writes == ["delete Service/drop"]
    world.prune(owned("Service", "keep"))
    assert world.cluster.writes == ["delete Service/drop"], (
        "once, though the watch has not told yet"
    )


@pytest.mark.parametrize(
    "error", [Forbidden("a policy keeps it", code=403), Broken("failed calling webhook", code=500)]
)
def test_a_deletion_that_is_refused_says_since_when(world: World, error: ClusterError) -> None:
    world.apply(owned("Service", "keep"), owned("Service", "drop"))
    world.watched.look()
    world.cluster.refuse = lambda verb, obj: error if verb == "delete" else None
    [first] = world.prune(owned("Service", "keep")).errors
    assert (first.object, first.verb) == ("service/drop", "delete")
    for _ in range(2):
        world.clock.pass_s(60)
        world.apply(owned("Service", "keep"))
        [again] = world.prune(owned("Service", "keep")).errors
        assert again.since == first.since
    world.cluster.refuse = lambda verb, obj: None
    assert world.prune(owned("Service", "keep")).errors == []
    assert world.memory.kept == {}


def test_what_was_made_anew_meanwhile_is_not_deleted_but_looked_at_again(world: World) -> None:
    world.apply(owned("Service", "drop"))
    world.watched.look()
    world.cluster.uids["Service", "ns", "drop"] = "another"
    outcome = world.prune()
    assert outcome.must_wait
    assert outcome.errors == []
    assert world.cluster.body(("Service", "ns", "drop")) is not None


def test_string_data_is_data() -> None:
    wanted = normal({"kind": "Secret", "stringData": {"a": "x"}, "data": {"b": "eQ=="}})
    assert wanted["data"] == {"a": "eA==", "b": "eQ=="}
    assert "stringData" not in wanted
