"""NetworkPolicies, read as a cluster that enforces them would: who reaches which port of whom."""

from __future__ import annotations

from typing import Any

import pytest
from cacheoperator import names
from cacheoperator.names import Component
from operator_world import SETTINGS, manifest, rendered

from cacheservice.manifest import KVCacheManifest

Caller = tuple[str, dict[str, str]]
"""Namespace and labels of a pod."""


def ours(component: str) -> Caller:
    labels = {**names.selector_labels("demo", Component.CACHE), names.COMPONENT_LABEL: component}
    return "serving", labels


CALLERS: dict[str, Caller] = {
    **{role: ours(role) for role in ("redis", "cache", "prefill", "decode", "router")},
    "probe": ("serving", {names.INSTANCE_LABEL: "demo", names.COMPONENT_LABEL: "probe"}),
    "operator": (SETTINGS.operator_namespace, {names.NAME_LABEL: SETTINGS.operator_name}),
    "fake operator": ("serving", {names.NAME_LABEL: SETTINGS.operator_name}),
    "foreign engine": ("serving", {"larder.dev/engine-of": "demo"}),
    "engine of another": ("serving", {"larder.dev/engine-of": "other"}),
    "prometheus": ("monitoring", {names.NAME_LABEL: "prometheus"}),
    "stranger": ("serving", {"app": "web"}),
    "far stranger": ("elsewhere", {"app": "web"}),
    "agent of another": (
        "serving",
        names.selector_labels("other", Component.CACHE),
    ),
}


def reachable(parsed: KVCacheManifest, component: str, port: int) -> set[str]:
    """Names of the callers that may connect. Nothing selects the pods: everybody may."""
    _, target = ours(component)
    policies = [
        item["spec"] for item in rendered(parsed).objects
        if item["kind"] == "NetworkPolicy" and item["spec"]["podSelector"]["matchLabels"].items() <= target.items()
    ]  # fmt: skip
    if not policies:
        return set(CALLERS)
    return {
        name
        for name, caller in CALLERS.items()
        if any(_lets_in(rule, caller, port) for policy in policies for rule in policy["ingress"])
    }


def _lets_in(rule: dict[str, Any], caller: Caller, port: int) -> bool:
    if port not in [entry["port"] for entry in rule["ports"]]:
        return False
    return "from" not in rule or any(_is_meant(peer, caller) for peer in rule["from"])


def _is_meant(peer: dict[str, Any], caller: Caller) -> bool:
    namespace, labels = caller
    if "namespaceSelector" in peer:
        wanted = peer["namespaceSelector"].get("matchLabels", {})
        if wanted and wanted != {"kubernetes.io/metadata.name": namespace}:
            return False
    elif namespace != "serving":
        return False
    return bool(peer["podSelector"]["matchLabels"].items() <= labels.items())


MONITORED = "  podMonitor: {}\n"


@pytest.mark.parametrize(
    ("component", "port", "spec", "wanted"),
    [
        ("redis", 6379, "", {"cache"}),
        ("cache", 7500, "", {"cache", "prefill", "decode", "foreign engine"}),
        ("cache", 7501, "", {"operator"}),
        ("cache", 7501, MONITORED, {"operator", "prometheus"}),
        ("cache", 7500, MONITORED, {"cache", "prefill", "decode", "foreign engine"}),
        ("prefill", 8000, "", {"router", "operator", "probe"}),
        ("decode", 8000, "", {"router", "operator", "probe"}),
        ("decode", 8000, MONITORED, {"router", "operator", "probe", "prometheus"}),
        ("decode", 8000, "  router: {type: None}\n", set(CALLERS)),
        ("prefill", 8000, "  router: {type: None}\n", set(CALLERS)),
        ("router", 8000, "", set(CALLERS)),
        ("router", 29000, "", set()),
        ("router", 29000, MONITORED, {"prometheus"}),
        ("decode", 22, "", set()),
    ],
)
def test_pods_are_reached_by_those_who_need_them(
    component: str, port: int, spec: str, wanted: set[str]
) -> None:
    assert reachable(manifest(spec), component, port) == wanted


def test_an_external_redis_is_not_ours_to_guard() -> None:
    parsed = manifest("  redis: {external: {address: 'r:6379'}}\n")
    assert reachable(parsed, "redis", 6379) == set(CALLERS)


def test_without_prefill_there_is_no_policy_for_it() -> None:
    objects = rendered(manifest(prefill=None)).objects
    found = [o["metadata"]["name"] for o in objects if o["kind"] == "NetworkPolicy"]
    assert sorted(found) == ["demo-cache", "demo-decode", "demo-redis", "demo-router"]
