"""What an apply would change, against a model of server-side apply; the same on a real API server is in e2e/."""

from __future__ import annotations

import copy
from decimal import Decimal
from typing import Any

import pytest
from apply_model import Server, values_of
from cacheoperator.difference import difference, quantity, unowned
from hypothesis import given, settings
from hypothesis import strategies as st

MANAGER = "larder-operator"
Json = dict[str, Any]

names = st.sampled_from(["a", "b", "c"])
texts = st.sampled_from(["", "x", "y", "1"])
words = st.sampled_from(["x", "y", "1"])
envs = st.lists(
    st.fixed_dictionaries({"name": names}, optional={"value": texts}),
    min_size=1,
    max_size=3,
    unique_by=lambda item: item["name"],
)
ports = st.lists(
    st.fixed_dictionaries({"containerPort": st.sampled_from([80, 8000])}, optional={"name": texts}),
    min_size=1,
    max_size=2,
    unique_by=lambda item: item["containerPort"],
)
tolerations = st.lists(
    st.fixed_dictionaries(
        {"key": names}, optional={"effect": st.sampled_from(["NoSchedule", "NoExecute"])}
    ),
    min_size=1,
    max_size=2,
)
limits = st.fixed_dictionaries(
    {"memory": st.sampled_from(["1024Mi", "1Gi", "2048Mi", "3Mi"])},
    optional={"cpu": st.sampled_from(["1000m", "1", "250m"])},
)
containers = st.lists(
    st.fixed_dictionaries(
        {"name": names, "image": st.sampled_from(["i:1", "i:2"])},
        optional={
            "args": st.lists(texts, min_size=1, max_size=2),
            "env": envs,
            "ports": ports,
            "resources": st.fixed_dictionaries({"limits": limits}),
        },
    ),
    min_size=1,
    max_size=3,
    unique_by=lambda item: item["name"],
)
objects = st.fixed_dictionaries(
    {
        "apiVersion": st.just("v1"),
        "kind": st.just("Thing"),
        "metadata": st.fixed_dictionaries(
            {
                "name": st.just("a"),
                "labels": st.dictionaries(names, words, min_size=1, max_size=3),
            }
        ),
        "spec": st.fixed_dictionaries(
            {"containers": containers},
            optional={
                "replicas": st.integers(0, 3),
                "hostNetwork": st.booleans(),
                "tolerations": tolerations,
                "nodeSelector": st.dictionaries(names, words, min_size=1, max_size=2),
            },
        ),
    }
)


@given(objects)
def test_nothing_differs_after_an_apply(wanted: Json) -> None:
    server = Server()
    assert difference(wanted, server.apply(MANAGER, wanted)) == ()


@settings(max_examples=300)
@given(objects, objects)
def test_another_wish_differs_exactly_when_an_apply_changes_something(
    before: Json, after: Json
) -> None:
    server = Server()
    old = server.apply(MANAGER, before)
    paths = difference(after, old)
    new = server.apply(MANAGER, after)
    assert difference(after, new) == ()
    if content(old) != content(new):
        assert paths, "the apply changed the object and was not seen coming"


@settings(max_examples=300)
@given(objects, objects)
def test_what_someone_else_changed_of_ours_differs(wanted: Json, foreign: Json) -> None:
    server = Server()
    server.apply(MANAGER, wanted)
    touched = copy.deepcopy(server.live)
    touched["spec"] = {**touched["spec"], **foreign["spec"]}
    edited = server.update("someone", touched)
    paths = difference(wanted, edited)
    repaired = server.apply(MANAGER, wanted)
    assert difference(wanted, repaired) == ()
    if content(edited) != content(repaired):
        assert paths, "the apply put something right and was not seen coming"


def content(live: Json) -> dict[tuple[str, ...], str]:
    """Values by path, in no order: where others' items stand among ours is no one's business."""
    value = copy.deepcopy(live)
    value["metadata"].pop("managedFields")
    return values_of(value)


# Cases as the real API server answered them (Kubernetes 1.35)


def entry(fields: Json, manager: str = MANAGER, **more: Any) -> Json:
    return {
        "manager": manager,
        "operation": "Apply",
        "fieldsType": "FieldsV1",
        "fieldsV1": fields,
        **more,
    }


def deployment(spec: Json, fields: Json) -> Json:
    owned = entry({"f:spec": {"f:kept": {}, **fields}})
    return {"metadata": {"name": "a", "managedFields": [owned]}, "spec": {"kept": "x", **spec}}


def wish(spec: Json) -> Json:
    full = {"kept": "x", **spec}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "a"}, "spec": full}


@pytest.mark.parametrize(
    ("wanted", "live", "fields", "paths"),
    [
        ({"replicas": 3}, {"replicas": 3}, {"f:replicas": {}}, ()),
        ({"replicas": 3}, {"replicas": 5}, {}, ("spec.replicas",)),
        ({}, {"replicas": 3}, {"f:replicas": {}}, ("spec.replicas",)),
        ({"hostNetwork": False}, {}, {"f:hostNetwork": {}}, ()),
        ({"replicas": 0}, {"replicas": 1}, {"f:replicas": {}}, ("spec.replicas",)),
        ({"nodeSelector": {}}, {}, {"f:nodeSelector": {}}, ()),
        ({"emptyDir": {}}, {"emptyDir": {}}, {"f:emptyDir": {}}, ()),
        ({"emptyDir": {}}, {"hostPath": {"path": "/"}}, {}, ("spec.emptyDir",)),
        (
            {"emptyDir": {"sizeLimit": "1024Mi"}},
            {"emptyDir": {"sizeLimit": "1Gi"}},
            {"f:emptyDir": {"f:sizeLimit": {}}},
            (),
        ),
        ({"context": {"runAsUser": 0}}, {"context": {}}, {"f:context": {}}, ("spec.context",)),
        (
            {"limits": {"cpu": "1000m", "nvidia.com/gpu": 2}},
            {"limits": {"cpu": "1", "nvidia.com/gpu": "2"}},
            {"f:limits": {"f:cpu": {}, "f:nvidia.com/gpu": {}}},
            (),
        ),
        ({"value": "1000m"}, {"value": "1"}, {"f:value": {}}, ("spec.value",)),
        (
            {"tolerations": [{"key": "x"}]},
            {"tolerations": [{"key": "x", "effect": "NoSchedule"}]},
            {"f:tolerations": {}},
            ("spec.tolerations",),
        ),
        ({"tolerations": []}, {"tolerations": [{"key": "x"}]}, {"f:tolerations": {}}, ("spec.tolerations",)),
        (
            {"ingress": [{"ports": [{"port": 1}]}]},
            {"ingress": [{"ports": [{"port": 1, "protocol": "TCP"}]}]},
            {"f:ingress": {}},
            (),
        ),
        ({"update": {"maxSurge": 1}}, {"update": {"maxSurge": "1"}}, {"f:update": {"f:maxSurge": {}}}, ()),
    ],
)  # fmt: skip
def test_values_as_the_api_server_writes_them(
    wanted: Json, live: Json, fields: Json, paths: tuple[str, ...]
) -> None:
    assert difference(wish(wanted), deployment(live, fields)) == paths


def test_order_of_a_keyed_list_counts() -> None:
    fields = {"f:initContainers": {f'k:{{"name":"{n}"}}': {".": {}, "f:name": {}} for n in "ab"}}
    there = deployment({"initContainers": [{"name": "b"}, {"name": "a"}]}, fields)
    assert difference(wish({"initContainers": [{"name": "a"}, {"name": "b"}]}), there) == (
        "spec.initContainers",
    )
    assert difference(wish({"initContainers": [{"name": "b"}, {"name": "a"}]}), there) == ()


def test_an_atomic_element_of_a_keyed_list_is_compared_whole() -> None:
    owner = {"uid": "u", "kind": "KVCache", "controller": True, "blockOwnerDeletion": False}
    there = {
        "metadata": {
            "name": "a",
            "ownerReferences": [owner],
            "managedFields": [entry({"f:metadata": {"f:ownerReferences": {'k:{"uid":"u"}': {}}}})],
        }
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "a", "ownerReferences": [owner]},
    }
    assert difference(wanted, there) == ()
    wanted["metadata"]["ownerReferences"] = [{**owner, "controller": False}]
    assert difference(wanted, there) == ("metadata.ownerReferences[u]",)


def test_labels_of_others_are_theirs() -> None:
    there = {
        "metadata": {
            "name": "a",
            "labels": {"theirs": "1"},
            "managedFields": [entry({"f:metadata": {"f:labels": {}}})],
        }
    }
    wanted: Json = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "a", "labels": {}}}
    assert difference(wanted, there) == ()


def test_an_object_that_we_never_applied_differs() -> None:
    there = {"metadata": {"name": "a", "managedFields": [entry({}, manager="kubectl")]}, "spec": {}}
    assert difference(wish({}), there) == (unowned,)
    there["metadata"]["managedFields"] = [entry({}, subresource="scale")]
    assert difference(wish({}), there) == (unowned,)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1Gi", Decimal(1 << 30)), ("1024Mi", Decimal(1 << 30)), ("1000m", Decimal(1)), (2, Decimal(2)),
        ("1.5Gi", Decimal(3 << 29)), ("1e3", Decimal(1000)), ("100k", Decimal(100_000)), ("1E", Decimal(10) ** 18),
        ("x", None), ("", None), ("Gi", None), (True, None), (None, None), ("nan", None), ("infinity", None),
    ],
)  # fmt: skip
def test_quantities_are_numbers(text: object, number: Decimal | None) -> None:
    assert quantity(text) == number
