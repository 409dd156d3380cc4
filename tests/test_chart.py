"""The chart, as far as it can be judged without helm: values, schema, permissions, images. Rest: e2e/test_chart.py."""

from __future__ import annotations

import copy
import dataclasses
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from cacheoperator import install_check
from cacheoperator.install_check import NEEDED, Permission, Scope, questions_for
from cacheoperator.kinds import (
    EVENT,
    KVCACHE,
    LEASE,
    NAMESPACE,
    NODE,
    POD,
    POD_MONITOR,
    REPLICA_SET,
    SECRET,
    child_kinds,
    watched_children,
)
from cacheoperator.settings import Images, Settings

from cacheservice import __version__

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "larder"
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
TEMPLATES = {
    path.name: path.read_text()
    for path in sorted((CHART / "templates").rglob("*"))
    if path.is_file()
}

OPEN = {"global"}
"""Umbrella charts put keys of their other charts there."""
NOT_CONFIGURED = {"operator_version", "operator_namespace", "operator_name"}
"""Settings that the operator knows from itself and from its pod."""


def _schema_nodes(
    node: Mapping[str, Any], path: str = ""
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _schema_nodes(child, f"{path}.{name}".lstrip("."))
    for name in ("items", "additionalProperties"):
        if isinstance(node.get(name), dict):
            yield from _schema_nodes(node[name], f"{path}[]")


def _value_objects(values: Mapping[str, Any], path: str = "") -> Iterator[str]:
    yield path
    for name, child in values.items():
        if isinstance(child, dict):
            yield from _value_objects(child, f"{path}.{name}".lstrip("."))


def _is_free_form(path: str) -> bool:
    """Maps of strings: labels, quantities."""
    node = dict(_schema_nodes(SCHEMA))[path]
    return isinstance(node.get("additionalProperties"), dict)


def _get(values: dict[str, Any], path: str) -> dict[str, Any]:
    for name in path.split(".") if path else ():
        values = values[name]
    return values


def test_schema_is_a_schema_and_accepts_the_defaults() -> None:
    jsonschema.Draft7Validator.check_schema(SCHEMA)
    jsonschema.Draft7Validator(SCHEMA).validate(VALUES)


@pytest.mark.parametrize(
    ("path", "node"), list(_schema_nodes(SCHEMA)), ids=lambda value: str(value)[:60]
)
def test_schema_describes_every_value_and_leaves_nothing_open(
    path: str, node: Mapping[str, Any]
) -> None:
    assert len(node.get("description", "")) > 10, f"{path} has no description"
    assert "type" in node, f"{path} has no type"
    if node["type"] == "object" and path not in OPEN:
        assert node.get("additionalProperties") not in (None, True), f"{path} takes any key"


@pytest.mark.parametrize(
    "path",
    [path for path in _value_objects(VALUES) if path not in OPEN and not _is_free_form(path)],
)
def test_unknown_key_is_refused_everywhere(path: str) -> None:
    values = copy.deepcopy(VALUES)
    _get(values, path)["tpyo"] = "x"
    with pytest.raises(jsonschema.ValidationError, match="tpyo"):
        jsonschema.Draft7Validator(SCHEMA).validate(values)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("images.redis.digest", "sha256:12"),
        ("images.redis.tag", "8.1 "),
        ("images.redis.repository", "Valkey/valkey"),
        ("imagePullPolicy", "Sometimes"),
        ("imagePullSecrets", ["registry"]),
        ("watchNamespaces", ["Team_A"]),
        ("watchNamespaces", ["a", "a"]),
        ("crds.enabled", "yes"),
        ("operator.certificateLifetimeSeconds", 10),
        ("operator.workers", 0),
        ("operator.runAsUser", 0),
        ("operator.resources", {"limit": {}}),
        ("operator.tolerations", [{"operator": "Any"}]),
        ("networkPolicy.metricsFrom", [{}]),
        ("global.imageRegistry", "mirror/"),
    ],
)
def test_wrong_value_is_refused(path: str, value: object) -> None:
    values = copy.deepcopy(VALUES)
    parent, _, name = path.rpartition(".")
    _get(values, parent)[name] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(SCHEMA).validate(values)


def test_schema_and_values_have_the_same_keys() -> None:
    nodes = dict(_schema_nodes(SCHEMA))
    for path in _value_objects(VALUES):
        if not _is_free_form(path):
            assert set(_get(VALUES, path)) == set(nodes[path]["properties"]), path


def test_every_value_is_used_by_a_template() -> None:
    text = "\n".join(TEMPLATES.values())
    used = set(re.findall(r"\.Values\.([A-Za-z0-9.]+)", text))
    for path in _value_objects(VALUES):
        if _is_free_form(path):
            continue
        for name, value in _get(VALUES, path).items():
            leaf = f"{path}.{name}".lstrip(".")
            if leaf.startswith("images."):
                continue
            if not isinstance(value, dict) or _is_free_form(leaf):
                assert any(leaf == u or leaf.startswith(f"{u}.") for u in used), (
                    f"{leaf} does nothing"
                )
    for path in used - {"images.X"}:  # a comment's
        _get(VALUES, path)


@pytest.mark.parametrize("page", ["docs/security.md", "docs/operations.md"])
def test_pages_name_values_that_there_are(page: str) -> None:
    text = (ROOT / page).read_text()
    sections = "|".join(name for name, value in VALUES.items() if isinstance(value, dict))
    named = set(re.findall(rf"`((?:{sections})\.[a-zA-Z.]+)", text))
    assert named
    for path in named:
        _get(VALUES, path)


def test_each_image_reaches_the_operator_under_its_own_name() -> None:
    pairs = re.search(r"\$field := dict (.*) \}\}", TEMPLATES["configmap.yaml"])
    assert pairs is not None
    words = re.findall(r'"(\w+)"', pairs[1])
    fields = dict(zip(words[::2], words[1::2], strict=True))
    assert set(fields) == set(VALUES["images"])
    assert set(fields.values()) == {field.name for field in dataclasses.fields(Images)}
    for value, field in fields.items():
        snake = re.sub(r"(?=[A-Z])", "_", value).lower()
        assert field == ("agent" if value == "larder" else snake)


def test_config_map_has_exactly_the_settings_of_the_operator() -> None:
    text = _define("larder.config", until="apiVersion: v1")
    written = set(re.findall(r"^(\w+):", text, re.MULTILINE))
    assert written == {field.name for field in dataclasses.fields(Settings)} - NOT_CONFIGURED


def test_defaults_of_chart_and_operator_are_the_same() -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    operator = VALUES["operator"]
    assert defaults["cluster_domain"] == operator["clusterDomain"]
    assert defaults["certificate_lifetime_s"] == operator["certificateLifetimeSeconds"]
    assert defaults["secret_refresh_s"] == operator["secretRefreshSeconds"]
    assert defaults["resync_s"] == operator["resyncSeconds"]
    assert defaults["num_workers"] == operator["workers"]
    assert defaults["http_port"] == 8080
    assert defaults["operator_name"] == _define("larder.name")


def _define(name: str, *, until: str = "") -> str:
    """The text of one named template, as far as its first `end`, or as far as `until`."""
    text = "\n".join(TEMPLATES.values())
    found = re.search(
        r"\{\{-? define \""
        + re.escape(name)
        + r"\" -?\}\}(.*?)"
        + (re.escape(until) or r"\{\{-? end -?\}\}"),
        text,
        re.DOTALL,
    )
    assert found is not None, name
    return found[1].strip()


def _permissions(rules: list[dict[str, list[str]]]) -> set[tuple[str, str, str]]:
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def _needed(*scopes: Scope) -> set[tuple[str, str, str]]:
    return {(n.group, n.resource, verb) for n in NEEDED if n.scope in scopes for verb in n.verbs}


def test_rules_give_what_the_operator_needs_and_no_more() -> None:
    rules = yaml.safe_load(_define("larder.rules"))
    assert _permissions(rules) == _needed(Scope.WATCHED)
    assert _permissions(yaml.safe_load(_define("larder.leaseRule"))) == _needed(Scope.LEASE)
    assert "*" not in _define("larder.rules")


def test_permissions_are_those_of_the_kinds_that_the_operator_touches() -> None:
    """Both ways: a kind without permission, and a permission without kind."""
    # Leases of others are only looked at, in the whole cluster.
    elsewhere = Permission(LEASE.group, LEASE.plural, ("get",), Scope.CLUSTER)
    assert elsewhere in NEEDED
    needed = [need for need in NEEDED if need != elsewhere]
    by_resource = {(n.group, n.resource): set(n.verbs) for n in needed}
    assert len(by_resource) == len(needed)
    for kind in watched_children:
        assert by_resource.pop((kind.group, kind.plural)) == {
            "get", "list", "watch", "create", "patch", "delete",
        }  # fmt: skip
    # Their kind comes and goes with another product, and a watch would go with it.
    assert by_resource.pop((POD_MONITOR.group, POD_MONITOR.plural)) == {
        "get", "create", "patch", "delete",
    }  # fmt: skip
    assert POD_MONITOR in child_kinds
    assert POD_MONITOR not in watched_children
    # Its own Secrets by name; never listed, so that it never sees another's.
    assert by_resource.pop((SECRET.group, SECRET.plural)) == {"get", "create", "patch"}
    assert SECRET in child_kinds
    assert SECRET not in watched_children
    assert by_resource.pop((KVCACHE.group, KVCACHE.plural)) == {"list", "watch"}
    assert by_resource.pop((KVCACHE.group, f"{KVCACHE.plural}/status")) == {"patch"}
    for kind in (POD, EVENT, NAMESPACE, NODE, REPLICA_SET, LEASE):
        assert by_resource.pop((kind.group, kind.plural))
    assert by_resource.pop(("apps", "controllerrevisions"))
    assert by_resource == {}


def test_nobody_may_run_commands_in_pods_or_become_more() -> None:
    forbidden = {
        "pods/exec",
        "pods/portforward",
        "pods/attach",
        "serviceaccounts/token",
        "clusterroles",
    }
    assert not forbidden & {need.resource for need in NEEDED}
    assert not {"escalate", "bind", "impersonate", "*"} & {
        verb for need in NEEDED for verb in need.verbs
    }


def test_questions_follow_what_is_watched() -> None:
    whole = list(questions_for([], "larder-system"))
    some = list(questions_for(["a", "b"], "larder-system"))
    assert {q.namespace for q in whole if q.resource != "leases"} == {""}
    assert {q.namespace for q in whole if q.resource == "leases"} == {"", "larder-system"}
    assert {q.verb for q in whole if q.resource == "leases" and not q.namespace} == {"get"}
    assert {q.namespace for q in some} == {"a", "b"}
    assert "nodes" in {q.resource for q in whole}
    assert "nodes" not in {q.resource for q in some}
    assert str(next(q for q in some if q.resource == "deployments")) == (
        "get deployments.apps in namespace a"
    )


STORED = {"spec": {"cache": {"cpu": "8Gi"}}}


@pytest.mark.parametrize(
    ("answers", "fault"),
    [
        ([(201, STORED), (422, f"... {install_check.REFUSAL}: ...")], None),
        ([(404, "the server could not find the requested resource")], "is not served"),
        ([(403, "forbidden")], r"was refused \(403\): forbidden"),
        ([(201, {"spec": {}}), (422, install_check.REFUSAL)], "without defaults"),
        ([(201, STORED), (201, STORED)], "CEL rules are not in force"),
        ([(201, STORED), (422, "spec.prefill: Invalid value")], "CEL rules are not in force"),
    ],
)
def test_admission_check_finds_what_is_wrong(
    answers: list[tuple[int, object]], fault: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of an API server, in order; helm test on a real one is in e2e/test_chart_install.py."""
    given = iter(answers)
    asked = []

    def dry_run(namespace: str, body: Mapping[str, Any]) -> tuple[int, object]:
        asked.append((namespace, body))
        return next(given)

    monkeypatch.setattr(install_check, "_dry_run", dry_run)
    monkeypatch.setattr(install_check, "_SERVED_WITHIN_S", 0.0)
    faults = list(install_check._admission_faults("somewhere"))
    assert {namespace for namespace, _ in asked} == {"somewhere"}
    assert len(asked) == len(answers)
    if fault is None:
        assert faults == []
    else:
        (found,) = faults
        assert re.search(fault, found)


def test_first_resource_is_the_same_everywhere() -> None:
    minimal = yaml.safe_load((ROOT / "examples" / "minimal.yaml").read_text())
    shown = re.search(r"<<EOF\n(.*?)\n   EOF", TEMPLATES["NOTES.txt"], re.DOTALL)
    assert shown is not None
    assert yaml.safe_load(shown[1]) == minimal
    assert {**install_check.MINIMAL, "metadata": minimal["metadata"]} == minimal
    crd = (CHART / "files" / "kvcaches.yaml").read_text()
    assert install_check.REFUSAL in crd


def test_versions_agree() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == __version__
    assert chart["version"] == __version__


def test_list_of_images_is_that_of_the_values() -> None:
    path = ROOT / "tools" / "chart_images.py"
    spec = importlib.util.spec_from_file_location("chart_images", path)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    listed = (CHART / "images.txt").read_text().splitlines()
    assert listed == tool.images(), "run: .venv/bin/python tools/chart_images.py --write"
    assert len(set(listed)) == len(VALUES["images"])
    shown = subprocess.run(
        [sys.executable, str(path), "--registry", "mirror:5000"], check=True, capture_output=True, text=True
    ).stdout  # fmt: skip
    for line, source in zip(shown.splitlines(), listed, strict=True):
        assert line == f"{source} mirror:5000/{source.partition('/')[2]}"


def test_no_image_is_latest() -> None:
    for name, image in VALUES["images"].items():
        assert image["tag"] != "latest", name
