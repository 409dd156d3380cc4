"""A small model of server-side apply: ownership in fieldsV1, keyed lists, defaults, canonical values.

For property tests of `cacheoperator.difference`: fast, and wrong nowhere where those tests look. That the real API
server does the same is tried in e2e/test_operator.py. Seen on Kubernetes 1.35 and modelled: a value that the
server drops because it is zero stays in the applier's entry; whoever changes a value takes the field away from all
others; a field that no applier names any more is removed; empty maps and lists are leaves.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from typing import Any

KEYS = {
    "containers": ("name",),
    "initContainers": ("name",),
    "env": ("name",),
    "ports": ("containerPort", "protocol"),
}
ATOMIC = {"args", "tolerations", "nodeSelector", "finalNames"}
DROPPED = {"hostNetwork", "value", "args", "tolerations", "nodeSelector", "labels", "env", "ports"}
"""Left out of what is stored when zero or empty."""
CANONICAL = {"1024Mi": "1Gi", "1000m": "1", "2048Mi": "2Gi"}

Json = dict[str, Any]
Path = tuple[str, ...]


def paths_of(value: Any, name: str = "") -> Any:
    """fieldsV1 of a value."""
    if isinstance(value, dict) and name not in ATOMIC and value:
        return {
            f"f:{key}": paths_of(inner, key) for key, inner in value.items() if inner is not None
        }
    if isinstance(value, list) and name in KEYS and value:
        return {key_of(item, name): {".": {}, **paths_of(item)} for item in value}
    return {}


def key_of(item: Mapping[str, Any], name: str) -> str:
    key = {part: item.get(part, "TCP" if part == "protocol" else None) for part in KEYS[name]}
    return "k:" + json.dumps(key, separators=(",", ":"))


def leaves(fields: Mapping[str, Any], path: Path = ()) -> set[Path]:
    found = set()
    for name, inner in fields.items():
        if inner:
            found |= leaves(inner, (*path, name))
        else:
            found.add((*path, name))
    return found


def fields_of(paths: set[Path]) -> Json:
    fields: Json = {}
    for path in paths:
        at = fields
        for name in path:
            at = at.setdefault(name, {})
    return fields


class Server:
    """One object under server-side apply. `live` is what a client reads."""

    def __init__(self) -> None:
        self.stored: Json | None = None
        self.managers: dict[tuple[str, str], set[Path]] = {}

    @property
    def live(self) -> Json:
        assert self.stored is not None
        value = copy.deepcopy(self.stored)
        value["metadata"] = {
            **value.get("metadata", {}),
            "name": "a",
            "managedFields": [
                {"manager": manager, "operation": operation, "fieldsV1": fields_of(paths)}
                for (manager, operation), paths in self.managers.items()
            ],
        }
        return value

    def apply(self, manager: str, wanted: Json) -> Json:
        """Forced apply of the whole object."""
        body = {
            key: copy.deepcopy(value)
            for key, value in wanted.items()
            if key not in ("apiVersion", "kind")
        }
        body["metadata"] = {key: value for key, value in body["metadata"].items() if key != "name"}
        if not body["metadata"]:
            del body["metadata"]
        mine = leaves(paths_of(body))
        before = self.managers.get((manager, "Apply"), set())
        old = copy.deepcopy(self.stored or {})
        new = merge(old, body)
        others = set().union(
            *(paths for who, paths in self.managers.items() if who != (manager, "Apply")), set()
        )
        for path in before - mine:
            if not any(other[: len(path)] == path for other in others | mine):
                remove(new, path)
        self.managers[manager, "Apply"] = mine
        self._store(old, new, (manager, "Apply"))
        return self.live

    def update(self, manager: str, new: Json) -> Json:
        """A plain write by someone: what differs becomes theirs, and is taken from all others."""
        body = {
            key: copy.deepcopy(value)
            for key, value in new.items()
            if key not in ("apiVersion", "kind")
        }
        body["metadata"] = {
            key: value
            for key, value in body["metadata"].items()
            if key not in ("name", "managedFields")
        }
        self._store(copy.deepcopy(self.stored or {}), body, (manager, "Update"))
        return self.live

    def _store(self, old: Json, new: Json, who: tuple[str, str]) -> None:
        new = normalised(new)
        before, after = values_of(old), values_of(new)
        changed = {path for path in after if before.get(path) != after[path]}
        gone = set(before) - set(after)
        for other, paths in list(self.managers.items()):
            if other == who:
                continue
            taken = {
                path
                for path in paths
                if any(
                    path == lost or path[: len(lost)] == lost or lost[: len(path)] == path
                    for lost in gone
                )
                or path in changed
                or (path not in after and any(found[: len(path)] == path for found in changed))
            }
            self.managers[other] = paths - taken
        if who[1] == "Update":
            self.managers[who] = self.managers.get(who, set()) | changed
        self.managers = {other: paths for other, paths in self.managers.items() if paths}
        self.stored = new


def values_of(value: Any, name: str = "", path: Path = ()) -> dict[Path, str]:
    """Leaf path in fieldsV1 words → its value as JSON."""
    if isinstance(value, dict) and name not in ATOMIC and value:
        found: dict[Path, str] = {}
        for key, inner in value.items():
            found |= values_of(inner, key, (*path, f"f:{key}"))
        return found
    if isinstance(value, list) and name in KEYS and value:
        found = {}
        for item in value:
            at = (*path, key_of(item, name))
            found[(*at, ".")] = ""
            found |= values_of(item, "", at)
        return found
    return {path: json.dumps(value, sort_keys=True)}


def merge(live: Any, wanted: Any, name: str = "") -> Any:
    if isinstance(wanted, dict) and isinstance(live, dict) and name not in ATOMIC:
        merged = dict(live)
        for key, value in wanted.items():
            if value is not None:
                merged[key] = merge(live.get(key), value, key)
        return merged
    if isinstance(wanted, list) and isinstance(live, list) and name in KEYS:
        by_key = {key_of(item, name): item for item in live}
        merged_items = [merge(by_key.get(key_of(item, name), {}), item) for item in wanted]
        named = {key_of(item, name) for item in wanted}
        return merged_items + [item for key, item in by_key.items() if key not in named]
    return copy.deepcopy(wanted)


def remove(value: Any, path: Path) -> None:
    """Take a leaf out, and what is empty after it."""
    name, rest = path[0], path[1:]
    if name == ".":
        return
    if name.startswith("k:"):
        for n, item in enumerate(value):
            if all(
                item.get(part, "TCP") == wanted for part, wanted in json.loads(name[2:]).items()
            ):
                if rest == (".",):
                    del value[n]
                elif rest:
                    remove(item, rest)
                return
        return
    key = name[2:]
    if not isinstance(value, dict) or key not in value:
        return
    if rest:
        remove(value[key], rest)
    else:
        del value[key]


def normalised(value: Any, name: str = "") -> Any:
    """As the API server stores it: zero values dropped, quantities canonical, defaults filled in."""
    if isinstance(value, dict):
        found = {key: normalised(inner, key) for key, inner in value.items()}
        found = {key: inner for key, inner in found.items() if inner or key not in DROPPED}
        if "containerPort" in found:
            found.setdefault("protocol", "TCP")
        if "image" in found:
            found.setdefault("imagePullPolicy", "IfNotPresent")
        return found
    if isinstance(value, list):
        return [normalised(item) for item in value]
    if name in ("memory", "cpu") and isinstance(value, str):
        return CANONICAL.get(value, value)
    return value
