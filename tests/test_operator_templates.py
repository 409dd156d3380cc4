"""Users' pod templates merged into ours: by name, with refusals instead of surprises."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from cacheoperator.templates import MISSING, Owned, TemplateRefused, merge, overlaid, value_at
from hypothesis import given, settings
from hypothesis import strategies as st

BASE: dict[str, Any] = {
    "metadata": {"labels": {"app": "larder"}},
    "spec": {
        "initContainers": [{"name": "larder-payload", "image": "payload:1"}],
        "containers": [
            {
                "name": "vllm",
                "image": "vllm:1",
                "args": ["--a", "--b"],
                "env": [
                    {"name": "PYTHONPATH", "value": "/opt"},
                    {"name": "THREADS", "valueFrom": {"resourceFieldRef": {"resource": "limits.cpu"}}},
                ],
                "ports": [{"name": "http", "containerPort": 8000}],
                "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                "resources": {"requests": {"cpu": "1", "memory": "2Gi"}},
                "livenessProbe": {"periodSeconds": 10},
            }
        ],
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "securityContext": {"runAsUser": 7072, "supplementalGroups": [7070]},
        "volumes": [{"name": "tmp", "emptyDir": {}}],
        "enableServiceLinks": False,
    },
}  # fmt: skip


def vllm(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "vllm", **fields}]}}


def container(merged: dict[str, Any]) -> dict[str, Any]:
    return merged["spec"]["containers"][0]


KEYS = {
    "containers": "name",
    "initContainers": "name",
    "volumes": "name",
    "env": "name",
    "volumeMounts": "mountPath",
    "ports": "containerPort",
}


def indexed(value: Any, name: str = "") -> Any:
    """Lists that merge by key as mappings from key to item, so that a plain merge of mappings does it."""
    if isinstance(value, dict):
        return {key: indexed(item, key) for key, item in value.items()}
    if name in KEYS and isinstance(value, list):
        return {"LIST": True, **{item[KEYS[name]]: indexed(item) for item in value}}
    return value


def listed(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value.get("LIST") is True:
        return [listed(item) for key, item in value.items() if key != "LIST"]
    return {key: listed(item) for key, item in value.items()}


def patched(base: Any, patch: Any) -> Any:
    """RFC 7396."""
    if not isinstance(patch, dict):
        return patch
    result = dict(base) if isinstance(base, dict) else {}
    for key, value in patch.items():
        if value is None:
            result.pop(key, None)
        else:
            result[key] = patched(result.get(key), value)
    return result


def without_replaced_sources(base: Any, patch: Any) -> Any:
    """Base, indexed, without sources of variables and volumes for which the patch brings another."""
    base = copy.deepcopy(base)
    spec, change = base.get("spec") or {}, patch.get("spec") or {}
    pairs = [(spec.get("volumes"), change.get("volumes"))]
    for name in ("containers", "initContainers"):
        ours, theirs = spec.get(name) or {}, change.get(name) or {}
        pairs += [
            (ours[key].get("env"), theirs[key].get("env"))
            for key in ours
            if key in theirs and key != "LIST"
        ]
    for ours, theirs in pairs:
        for key in set(ours or {}) & set(theirs or {}) - {"LIST"}:
            brought = {
                name for name, value in theirs[key].items() if name != "name" and value is not None
            }
            for source in set(ours[key]) - {"name"}:
                if brought and source not in brought:
                    del ours[key][source]
    return base


def oracle(base: dict[str, Any], overlay: dict[str, Any]) -> Any:
    change = indexed(overlay)
    return listed(patched(without_replaced_sources(indexed(base), change), change))


def optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


def by_key(
    key: str, keys: list[Any], **fields: st.SearchStrategy[Any]
) -> st.SearchStrategy[list[Any]]:
    def item(value: Any) -> st.SearchStrategy[dict[str, Any]]:
        return st.fixed_dictionaries({key: st.just(value)}, optional=fields)

    return st.lists(st.sampled_from(keys), unique=True, max_size=3).flatmap(
        lambda chosen: st.tuples(*map(item, chosen)).map(list)
    )


def templates(*, nulls: bool) -> st.SearchStrategy[dict[str, Any]]:
    def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.one_of(st.none(), strategy) if nulls else strategy

    text = st.sampled_from(["x", "y"])
    variable = st.one_of(
        optional(value=maybe(text)),
        optional(valueFrom=maybe(optional(fieldRef=maybe(text), secretKeyRef=maybe(text)))),
    )
    variables = st.lists(
        st.tuples(st.sampled_from("ABC"), variable), unique_by=lambda pair: pair[0], max_size=3
    ).map(lambda pairs: [{"name": name, **fields} for name, fields in pairs])
    volume = st.one_of(
        optional(emptyDir=maybe(optional(sizeLimit=maybe(text)))),
        optional(hostPath=maybe(optional(path=maybe(text)))),
    )
    volumes = st.lists(
        st.tuples(st.sampled_from("vw"), volume), unique_by=lambda pair: pair[0], max_size=2
    ).map(lambda pairs: [{"name": name, **fields} for name, fields in pairs])
    containers = by_key(
        "name",
        ["vllm", "side", "other"],
        image=maybe(text),
        args=maybe(st.lists(text, max_size=2)),
        env=maybe(variables),
        ports=maybe(by_key("containerPort", [1, 2], name=maybe(text))),
        volumeMounts=maybe(
            by_key("mountPath", ["/a", "/b"], name=maybe(text), readOnly=maybe(st.booleans()))
        ),
        resources=maybe(
            optional(
                limits=maybe(optional(cpu=maybe(text))), requests=maybe(optional(cpu=maybe(text)))
            )
        ),
    )
    spec = optional(
        containers=maybe(containers),
        initContainers=maybe(containers),
        volumes=maybe(volumes),
        nodeSelector=maybe(optional(a=maybe(text), b=maybe(text))),
        tolerations=maybe(st.lists(optional(key=text), max_size=2)),
        hostNetwork=maybe(st.booleans()),
    )
    labels = optional(env=maybe(text), volumes=maybe(text))
    return optional(
        metadata=maybe(optional(labels=maybe(labels), annotations=maybe(labels))), spec=maybe(spec)
    )


@settings(max_examples=600, deadline=None)
@given(base=templates(nulls=False), overlay=templates(nulls=True))
def test_merge_is_a_merge_of_mappings_where_lists_have_keys(
    base: dict[str, Any], overlay: dict[str, Any]
) -> None:
    before = copy.deepcopy((base, overlay))
    merged = merge(base, overlay)
    assert merged == oracle(base, overlay)
    assert (base, overlay) == before
    assert not has_null(merged)


def has_null(value: Any) -> bool:
    if isinstance(value, dict):
        return any(map(has_null, value.values()))
    return any(map(has_null, value)) if isinstance(value, list) else value is None


@settings(max_examples=200, deadline=None)
@given(base=templates(nulls=False), overlay=templates(nulls=True))
def test_merging_twice_is_merging_once(base: dict[str, Any], overlay: dict[str, Any]) -> None:
    once = merge(base, overlay)
    assert merge(once, overlay) == once


@given(base=templates(nulls=False))
def test_an_empty_overlay_changes_nothing(base: dict[str, Any]) -> None:
    assert merge(base, {}) == base == overlaid(base, None, where="t")


def test_order_is_ours_then_theirs() -> None:
    merged = merge(
        BASE, vllm(env=[{"name": "Z", "value": "1"}, {"name": "PYTHONPATH", "value": "/x"}])
    )
    assert [item["name"] for item in container(merged)["env"]] == ["PYTHONPATH", "THREADS", "Z"]


def test_a_list_without_keys_is_replaced() -> None:
    merged = merge(BASE, {
        "spec": {"tolerations": [{"operator": "Exists"}], "containers": [{"name": "vllm", "args": ["--c"]}]}
    })  # fmt: skip
    assert merged["spec"]["tolerations"] == [{"operator": "Exists"}]
    assert container(merged)["args"] == ["--c"]


def test_null_removes() -> None:
    merged = merge(
        BASE, vllm(livenessProbe=None, resources={"requests": {"cpu": None}}, unknown=None)
    )
    assert "livenessProbe" not in container(merged)
    assert "unknown" not in container(merged)
    assert container(merged)["resources"] == {"requests": {"memory": "2Gi"}}


def test_a_value_takes_the_place_of_a_reference_and_another_volume_the_place_of_ours() -> None:
    """Kubernetes refuses both at once, and nobody wants to write null for what he can't see."""
    merged = merge(BASE, vllm(env=[{"name": "THREADS", "value": "4"}]))
    assert container(merged)["env"][1] == {"name": "THREADS", "value": "4"}
    merged = merge(
        BASE, {"spec": {"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]}}
    )
    assert merged["spec"]["volumes"] == [
        {"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}
    ]
    merged = merge(BASE, {"spec": {"volumes": [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]}})
    assert merged["spec"]["volumes"] == [{"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}}]


def test_a_mount_is_the_same_with_and_without_a_last_slash() -> None:
    merged = merge(BASE, vllm(volumeMounts=[{"name": "disk", "mountPath": "/tmp/"}]))
    assert container(merged)["volumeMounts"] == [{"name": "disk", "mountPath": "/tmp/"}]


def test_labels_named_like_lists_are_labels() -> None:
    merged = merge(BASE, {"metadata": {"labels": {"env": "prod", "ports": "many"}}})
    assert merged["metadata"]["labels"] == {"app": "larder", "env": "prod", "ports": "many"}


REFUSED = [
    ({"containers": []},
     "containers: a pod template has metadata and spec, nothing else: did you mean template.spec.containers?"),
    ({"kind": "Pod"}, "kind: a pod template has metadata and spec, nothing else"),
    ({"spec": {"$patch": "replace"}},
     "spec.$patch: directives of strategic merge are not supported: null removes a field"),
    ({"spec": {"$setElementOrder/containers": []}}, "spec.$setElementOrder/containers: directives"),
    ({"spec": {"containers": [{"$patch": "delete", "name": "vllm"}]}}, "spec.containers[0].$patch: directives"),
    ({"spec": {"affinity": {"nodeAffinity": {"$patch": "x"}}}}, "spec.affinity.nodeAffinity.$patch: directives"),
    ({"spec": {"tolerations": [{"$patch": "x"}]}}, "spec.tolerations[0].$patch: directives"),
    ({"spec": []}, "spec: must be a mapping, and is a list"),
    ({"spec": {"containers": {"name": "vllm"}}}, "spec.containers: must be a list, and is a mapping"),
    ({"spec": {"containers": ["vllm"]}}, "spec.containers[0]: must be a mapping with name, and is a string"),
    ({"spec": {"containers": [{"image": "x"}]}},
     "spec.containers[0].name: is required here and must be a string: items merge by it"),
    ({"spec": {"containers": [{"name": "a"}, {"name": "a"}]}},
     "spec.containers[a]: is there twice: items merge by name"),
    (vllm(env=[{"name": "X", "value": 1}]),
     'spec.containers[vllm].env[X].value: 1 is read as a number, and a string is wanted: write "1"'),
    (vllm(env=[{"name": "X", "value": True}]),
     'spec.containers[vllm].env[X].value: true is read as true or false, and a string is wanted: write "true"'),
    (vllm(env={"X": "1"}), "spec.containers[vllm].env: must be a list, and is a mapping"),
    (vllm(ports=[{"containerPort": "8000"}]),
     "spec.containers[vllm].ports[0].containerPort: is required here and must be a whole number"),
    (vllm(ports=[{"containerPort": True}]), "spec.containers[vllm].ports[0].containerPort: is required"),
    (vllm(volumeMounts=[{"name": "x"}]), "spec.containers[vllm].volumeMounts[0].mountPath: is required"),
    (vllm(volumeMounts=[{"name": "x", "mountPath": "/a"}, {"name": "y", "mountPath": "/a/"}]),
     "spec.containers[vllm].volumeMounts[/a]: is there twice"),
    (vllm(args="--a"), "spec.containers[vllm].args: must be a list, and is a string"),
    (vllm(args=["--n", 1]), "spec.containers[vllm].args[1]: 1 is read as a number"),
    (vllm(resources="big"), "spec.containers[vllm].resources: must be a mapping, and is a string"),
    (vllm(livenessProbe=[]), "spec.containers[vllm].livenessProbe: must be a mapping, and is a list"),
    ({"metadata": {"labels": {"a": 1}}}, "metadata.labels.a: 1 is read as a number"),
    ({"spec": {"nodeSelector": {"gpu": True}}}, "spec.nodeSelector.gpu: true is read as"),
    ({"spec": {"tolerations": {"key": "x"}}}, "spec.tolerations: must be a list, and is a mapping"),
    ({"spec": {"tolerations": False}}, "spec.tolerations: must be a list, and is true or false"),
    ({"spec": {"tolerations": ["x"]}}, "spec.tolerations[0]: must be a mapping, and is a string"),
    ({"spec": {"tolerations": [None]}}, "spec.tolerations[0]: has no value"),
    ({"spec": {"enableServiceLinks": {}}}, "spec.enableServiceLinks: must be true or false, and is a mapping"),
    ({"spec": {"hostAliases": [{1: "x"}]}}, "spec.hostAliases[0].1: 1 is not a string"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("overlay", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED]
)
def test_what_cannot_be_merged_is_refused_with_its_path(
    overlay: dict[str, Any], message: str
) -> None:
    with pytest.raises(TemplateRefused) as refused:
        merge(BASE, overlay)
    assert refused.value.reason == "InvalidTemplate"
    assert str(refused.value) == refused.value.message
    assert refused.value.message.startswith(f"template.{message}")


OWNED = (
    Owned(("spec", "containers", "vllm", "args"), "write flags into spec.decode.args", reason="ReservedArgument"),
    Owned(("spec", "containers", "vllm", "env", "PYTHONPATH"), "write spec.engine.pythonPath"),
    Owned(("spec", "containers", "vllm", "ports", "8000"), "the router expects it"),
    Owned(("spec", "containers", "vllm", "volumeMounts", "/tmp"), "keep it"),
    Owned(("spec", "securityContext", "supplementalGroups"), "7070 must be in it", may_grow=True),
    Owned(("metadata", "labels", "app"), "selects the pods"),
)  # fmt: skip


@pytest.mark.parametrize(
    ("overlay", "path"),
    [
        (vllm(args=["--c"]), "spec.containers[vllm].args"),
        (vllm(args=None), "spec.containers[vllm].args"),
        (
            vllm(env=[{"name": "PYTHONPATH", "value": "/x"}]),
            "spec.containers[vllm].env[PYTHONPATH]",
        ),
        (
            vllm(env=[{"name": "PYTHONPATH", "value": None}]),
            "spec.containers[vllm].env[PYTHONPATH]",
        ),
        (vllm(env=None), "spec.containers[vllm].env[PYTHONPATH]"),
        (vllm(ports=[{"containerPort": 8000, "name": "web"}]), "spec.containers[vllm].ports[8000]"),
        (
            vllm(volumeMounts=[{"mountPath": "/tmp/", "name": "other"}]),
            "spec.containers[vllm].volumeMounts[/tmp]",
        ),
        (
            {"spec": {"securityContext": {"supplementalGroups": [1]}}},
            "spec.securityContext.supplementalGroups",
        ),
        ({"spec": {"securityContext": None}}, "spec.securityContext.supplementalGroups"),
        ({"spec": None}, "spec.containers[vllm].args"),
        ({"metadata": {"labels": {"app": "mine"}}}, "metadata.labels.app"),
        ({"metadata": None}, "metadata.labels.app"),
    ],
)
def test_what_is_owned_stays(overlay: dict[str, Any], path: str) -> None:
    with pytest.raises(TemplateRefused) as refused:
        overlaid(BASE, overlay, where="spec.decode.template", owned=OWNED)
    why = next(
        part
        for part in OWNED
        if part.path[-1] == path.rsplit(".", maxsplit=1)[-1].rstrip("]").split("[")[-1]
    )
    assert refused.value.message == f"spec.decode.template.{path}: {why.why}"
    assert refused.value.reason == why.reason


def test_what_is_owned_may_be_repeated_or_grow() -> None:
    repeated = vllm(args=["--a", "--b"], env=[{"name": "OTHER", "value": "1"}])
    assert overlaid(BASE, repeated, where="t", owned=OWNED) == merge(BASE, repeated)
    grown = {"spec": {"securityContext": {"supplementalGroups": [44, 7070]}}}
    merged = overlaid(BASE, grown, where="t", owned=OWNED)
    assert merged["spec"]["securityContext"] == {
        "runAsUser": 7072,
        "supplementalGroups": [44, 7070],
    }


def test_value_at_tells_nothing_from_null() -> None:
    assert value_at(BASE, ("spec", "containers", "vllm", "env", "PYTHONPATH", "value")) == "/opt"
    assert value_at(BASE, ("spec", "containers", "none", "env")) is MISSING
    assert value_at({"spec": {"x": None}}, ("spec", "x")) is None
