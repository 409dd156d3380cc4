"""What a server-side apply of a wanted object would change in the live one. Pure; `reconcile` applies what differs.

An apply without effect is still a PATCH in the audit log, so this decides before. It needs no schema: the live
object's managedFields entry of ours (fieldsV1) says which fields we own, how their lists are keyed, and what is atomic
(a leaf `{}`). Three things are a difference, leaf by leaf:

1. a wanted field that our entry does not name: new, or taken over by someone who changed its value (whoever changes a
   value of ours takes the ownership away, seen on 1.35);
2. a field in our entry that is not wanted any more;
3. a live value that is not the wanted one: we want something else than at the last apply.

No difference: what the API server makes of a value (`1024Mi` → `1Gi`), zero values that it leaves out (they stay in our
entry, seen), and its defaults, where they land inside of something atomic.

Words for lists and their paths are those of the API: spec.template.spec.containers[vllm].env[A].value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from decimal import Decimal, InvalidOperation
from typing import Any

from cacheoperator.names import FIELD_MANAGER

unowned = "metadata.managedFields"
"""The path that stands for: we never applied this object."""

not_applied = {"name", "namespace", "uid", "resourceVersion", "managedFields"}
"""Fields of metadata that identify and are owned by nobody."""

atomic_defaults: Mapping[str, tuple[object, ...]] = {
    "protocol": ("TCP",),
    "apiVersion": ("v1",),
    "divisor": ("0", 0),
    "volumeMode": ("Filesystem",),
    "kind": ("PersistentVolumeClaim",),
    "apiGroup": ("rbac.authorization.k8s.io", ""),
    "status": ({"phase": "Pending"},),
    "defaultMode": (420,),
}
"""What the API server adds inside atomic fields: ports of NetworkPolicies, fieldRefs, claim templates, subjects."""

open_maps = {"labels", "annotations", "data"}
"""Maps that others add to: empty, they are a leaf in fieldsV1 as if they were atomic."""

keys_with_default: Mapping[str, object] = {"protocol": "TCP"}
"""Parts of a list's key that an author may leave out."""

maps_of_quantities = {"limits", "requests", "hard", "capacity", "overhead"}
quantities = {"sizeLimit", "divisor", "storage"}
int_or_strings = {"port", "targetPort", "maxSurge", "maxUnavailable", "minAvailable"}

multipliers = {
    "": Decimal(1), "n": Decimal(10) ** -9, "u": Decimal(10) ** -6, "m": Decimal(10) ** -3,
    "k": Decimal(10) ** 3, "M": Decimal(10) ** 6, "G": Decimal(10) ** 9, "T": Decimal(10) ** 12,
    "P": Decimal(10) ** 15, "E": Decimal(10) ** 18, "Ki": Decimal(1 << 10), "Mi": Decimal(1 << 20),
    "Gi": Decimal(1 << 30), "Ti": Decimal(1 << 40), "Pi": Decimal(1 << 50), "Ei": Decimal(1 << 60),
}  # fmt: skip

Fields = Mapping[str, Any]


def difference(
    wanted: Mapping[str, Any], live: Mapping[str, Any], manager: str = FIELD_MANAGER
) -> tuple[str, ...]:
    """Paths that an apply of `wanted` by `manager` would change in `live`, sorted; empty when it would do nothing."""
    owned = owned_fields(live, manager)
    if owned is None:
        return (unowned,)
    paths: list[str] = []
    skipped = {"apiVersion", "kind", "status"}
    top = {key: value for key, value in wanted.items() if key not in skipped}
    metadata = {k: v for k, v in wanted["metadata"].items() if k not in not_applied}
    top["metadata"] = metadata
    if not metadata and "f:metadata" not in owned:
        del top["metadata"]
    _compare_map(owned, top, live, "", paths)
    return tuple(sorted(set(paths)))


def owned_fields(live: Mapping[str, Any], manager: str = FIELD_MANAGER) -> Fields | None:
    """fieldsV1 of what `manager` last applied to the main resource; None when it never did."""
    for entry in live["metadata"].get("managedFields") or ():
        is_apply = entry.get("operation") == "Apply" and not entry.get("subresource")
        if entry.get("manager") == manager and is_apply:
            fields: Fields = entry.get("fieldsV1") or {}
            return fields
    return None


def quantity(value: object) -> Decimal | None:
    """The number that a Kubernetes quantity stands for; None when `value` is none."""
    if isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return Decimal(str(value))
    if not isinstance(value, str):
        return None
    for length in (2, 1, 0):
        number, suffix = (value[:-length], value[-length:]) if length else (value, "")
        if suffix in multipliers:
            try:
                parsed = Decimal(number)
            except InvalidOperation:
                continue
            return parsed * multipliers[suffix] if parsed.is_finite() else None
    return None


def _compare_map(
    owned: Fields, wanted: Mapping[str, Any], live: object, path: str, paths: list[str]
) -> None:
    there = live if isinstance(live, Mapping) else {}
    for key, value in wanted.items():
        if value is None:
            continue
        inner = f"{path}.{key}" if path else key
        fields = owned.get(f"f:{key}")
        if fields is None and isinstance(value, Mapping) and value:
            _compare_map({}, value, there.get(key), inner, paths)
        elif fields is None:
            # An empty map is ours only while it is empty: others may add what we don't mention.
            if value not in ({}, []) or key not in there:
                paths.append(inner)
        else:
            _compare(fields, value, there.get(key), inner, key, path, paths)
    paths += [
        f"{path}.{field[2:]}" if path else field[2:]
        for field in owned
        if field.startswith("f:") and wanted.get(field[2:]) is None
    ]


def _compare(
    fields: Fields, value: Any, live: object, path: str, key: str, parent: str, paths: list[str]
) -> None:
    if not fields:
        if not _is_same(value, live, key, parent.rpartition(".")[2]):
            paths.append(path)
    elif isinstance(value, Mapping):
        _compare_map(fields, value, live, path, paths)
    elif isinstance(value, list):
        _compare_list(fields, value, live, path, paths)
    else:
        paths.append(path)


def _compare_list(
    owned: Fields, wanted: Sequence[Any], live: object, path: str, paths: list[str]
) -> None:
    there = live if isinstance(live, list) else []
    is_matched = [False] * len(wanted)
    places: list[tuple[int, int]] = []
    for field, fields in owned.items():
        if field.startswith("v:"):
            element = json.loads(field[2:])
            place = next((n for n, item in enumerate(wanted) if item == element), None)
            found = next((n for n, item in enumerate(there) if item == element), None)
            inner = f"{path}[{element}]"
        elif field.startswith("k:"):
            key = json.loads(field[2:])
            place = _find(wanted, key)
            found = _find(there, key)
            inner = f"{path}[{','.join(str(part) for part in key.values())}]"
        else:
            continue
        if place is None or found is None:
            paths.append(inner)
        if place is None:
            continue
        is_matched[place] = True
        if found is not None:
            places.append((place, found))
            if field.startswith("k:") and fields:
                _compare_map(fields, wanted[place], there[found], inner, paths)
            elif not fields and not _is_same(wanted[place], there[found], "", ""):
                paths.append(inner)  # an atomic element, as of ownerReferences
    if not all(is_matched):
        paths.append(path)
    found_in_order = [found for _, found in sorted(places)]
    if found_in_order != sorted(found_in_order):
        paths.append(path)


def _find(items: Sequence[Any], key: Mapping[str, Any]) -> int | None:
    for n, item in enumerate(items):
        if isinstance(item, Mapping) and all(
            item.get(part, keys_with_default.get(part)) == value for part, value in key.items()
        ):
            return n
    return None


def _is_same(wanted: Any, live: object, key: str, parent: str) -> bool:
    """Whether the live value of a leaf of ours is what the API server makes of the wanted one."""
    if live is None:
        return not wanted
    if isinstance(wanted, Mapping):
        if not isinstance(live, Mapping) or (wanted and not live):
            return False
        if not wanted and key in open_maps:
            return True
        extra = [
            name
            for name, value in live.items()
            if wanted.get(name) is None and value not in atomic_defaults.get(name, ())
        ]
        return not extra and all(
            _is_same(value, live.get(name), name, key)
            and not (value == 0 and type(value) is int and name not in live)
            for name, value in wanted.items()
        )
    if isinstance(wanted, list):
        return (
            isinstance(live, list)
            and len(wanted) == len(live)
            and all(
                _is_same(one, other, key, parent) for one, other in zip(wanted, live, strict=True)
            )
        )
    if isinstance(wanted, bool) or isinstance(live, bool):
        return wanted is live
    if wanted == live:
        return True
    if parent in maps_of_quantities or key in quantities:
        number = quantity(wanted)
        return number is not None and number == quantity(live)
    return key in int_or_strings and str(wanted) == str(live)
