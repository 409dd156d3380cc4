"""Users' pod templates, merged into ours: lists whose items have a name by that name, everything else by place.

What merges: maps, key by key; containers, initContainers, volumes and env by name; volumeMounts by mountPath; ports by
containerPort. Every other list replaces ours. null removes a key, ours or the user's. One thing has one source: an
environment variable that gets a `value` loses our `valueFrom`, and a volume of another kind loses our kind, as
Kubernetes refuses both at once. Directives of strategic merge ($patch, $setElementOrder and the like) are refused.

Invariants: inputs are not changed and share nothing with the result; our items keep their order and the user's new ones
follow in theirs; what `owned` names is in the result as it was in ours, or TemplateRefused says why not. Unknown fields
pass: the API server knows them better. Pure; called by every builder of a pod.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from cacheoperator.difference import quantity

INVALID_TEMPLATE = "InvalidTemplate"
RESERVED_ARGUMENT = "ReservedArgument"


class TemplateRefused(Exception):
    """A template that can't be used. `reason` is for the condition Accepted; the message names the path."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message


@dataclass(frozen=True, slots=True)
class Owned:
    """A part of our template that a user's may not change: the value at `path` with all that is below it, or that there
    is none.

    In a list that merges by key, the step of `path` is the item's key: ("spec", "containers", "vllm", "args"). With
    `may_grow` the value is a list that the user may replace as long as our items are in it; with `is_quantity` it is a
    number that may be written otherwise (2 for "2"). `why` ends the message.
    """

    path: tuple[str, ...]
    why: str
    may_grow: bool = False
    is_quantity: bool = False
    reason: str = INVALID_TEMPLATE


def merge(
    base: Mapping[str, Any], overlay: Mapping[str, Any], *, where: str = "template"
) -> dict[str, Any]:
    """`overlay` merged into the pod template `base`, as a new object. `where` begins paths in messages.

    Raises TemplateRefused(InvalidTemplate) for a directive, a wrong type, an item without its key or with one twice.
    """
    for name in overlay:
        if name not in ("metadata", "spec"):
            hint = f": did you mean {where}.spec.{name}?" if name in _POD_SPEC.fields else ""
            raise _refused(
                f"{where}.{name}", f"a pod template has metadata and spec, nothing else{hint}"
            )
    result = _merged_map(base, overlay, _POD_TEMPLATE, where)
    assert isinstance(result, dict), "two maps merge into a map"
    return result


def overlaid(
    base: Mapping[str, Any],
    overlay: Mapping[str, Any] | None,
    *,
    where: str,
    owned: Sequence[Owned] = (),
) -> dict[str, Any]:
    """`merge`, and a refusal when the result differs from `base` in what `owned` names. None is no overlay.

    `where` is the path of the template in the KVCache, such as spec.decode.template.
    """
    if overlay is None:
        return copy.deepcopy(dict(base))
    merged = merge(base, overlay, where=where)
    for part in owned:
        before, after = value_at(base, part.path), value_at(merged, part.path)
        is_kept = (
            after == before
            or (part.may_grow and _holds_all(after, before))
            or (part.is_quantity and quantity(after) == quantity(before) is not None)
        )
        if not is_kept:
            raise TemplateRefused(part.reason, f"{_path_text(where, part.path)}: {part.why}")
    return merged


class Missing(Enum):
    """What `value_at` answers where there is nothing; None is a value."""

    MISSING = auto()


MISSING = Missing.MISSING


def value_at(template: Any, path: Sequence[str]) -> Any:
    """The value at `path` of a pod template, where a step into a keyed list is an item's key; MISSING if none."""
    node: _Node = _POD_TEMPLATE
    value = template
    for step in path:
        if isinstance(node, _Keyed):
            keyed = node
            found = (
                [item for item in value if _key_of(item, keyed) == step]
                if isinstance(value, list)
                else []
            )
            value, node = (found[0] if found else MISSING), keyed.item
        else:
            value = value.get(step, MISSING) if isinstance(value, Mapping) else MISSING
            node = node.fields.get(step, _ANY) if isinstance(node, _Map) else _ANY
        if value is MISSING:
            return MISSING
    return value


# What a pod template looks like, as far as merging must know it. Everything else is _ANY.


class _Leaf(Enum):
    ANY = auto()
    STRING = auto()
    STRINGS = auto()
    STRING_MAP = auto()
    MAPPINGS = auto()


_ANY = _Leaf.ANY


@dataclass(frozen=True, slots=True)
class _Map:
    """`sources`: whether the keys are kinds of one thing, of which an item has one (see the module's docstring)."""

    fields: Mapping[str, _Node]
    sources: frozenset[str] | None = None
    """Keys of which only one may be there; the empty set means all but the item's name."""


@dataclass(frozen=True, slots=True)
class _Keyed:
    key: str
    item: _Map
    is_number: bool = False
    is_path: bool = False


_Node = _Leaf | _Map | _Keyed

_CONTAINER = _Map({
    "args": _Leaf.STRINGS,
    "command": _Leaf.STRINGS,
    "env": _Keyed("name", _Map({"value": _Leaf.STRING}, sources=frozenset({"value", "valueFrom"}))),
    "image": _Leaf.STRING,
    "ports": _Keyed("containerPort", _Map({}), is_number=True),
    "volumeMounts": _Keyed("mountPath", _Map({}), is_path=True),
})  # fmt: skip
_POD_SPEC = _Map({
    "containers": _Keyed("name", _CONTAINER),
    "initContainers": _Keyed("name", _CONTAINER),
    "volumes": _Keyed("name", _Map({}, sources=frozenset())),
    "nodeSelector": _Leaf.STRING_MAP,
    "tolerations": _Leaf.MAPPINGS,
    # For the hint only: what people write one level too high.
    "affinity": _ANY, "serviceAccountName": _ANY, "securityContext": _ANY,
    "priorityClassName": _ANY, "topologySpreadConstraints": _ANY, "imagePullSecrets": _ANY, "runtimeClassName": _ANY,
    "terminationGracePeriodSeconds": _ANY, "hostNetwork": _ANY, "schedulerName": _ANY, "restartPolicy": _ANY,
})  # fmt: skip
_POD_TEMPLATE = _Map({
    "metadata": _Map({"labels": _Leaf.STRING_MAP, "annotations": _Leaf.STRING_MAP}),
    "spec": _POD_SPEC,
})  # fmt: skip


def _merged(base: Any, overlay: Any, node: _Node, path: str) -> Any:
    """`overlay` is not None; `base` is MISSING where we have nothing."""
    match node:
        case _Keyed():
            return _merged_keyed(base, overlay, node, path)
        case _Leaf.STRING if not isinstance(overlay, str):
            raise _not_a_string(path, overlay)
        case _Leaf.STRINGS:
            _require(isinstance(overlay, list), path, "must be a list", overlay)
            for index, item in enumerate(overlay):
                if not isinstance(item, str):
                    raise _not_a_string(f"{path}[{index}]", item)
            return list(overlay)
        case _Leaf.MAPPINGS:
            _require(isinstance(overlay, list), path, "must be a list", overlay)
            for index, item in enumerate(overlay):
                is_right = item is None or isinstance(item, dict)
                _require(is_right, f"{path}[{index}]", "must be a mapping", item)
            return _merged_any(MISSING, overlay, path)
        case _Leaf.STRING_MAP:
            _require(isinstance(overlay, dict), path, "must be a mapping", overlay)
            for name, item in overlay.items():
                if item is not None and not isinstance(item, str):
                    raise _not_a_string(f"{path}.{name}", item)
            return _merged_map(base, overlay, _Map({}), path)
        case _Map():
            _require(isinstance(overlay, dict), path, "must be a mapping", overlay)
            return _merged_map(base, overlay, node, path)
        case _:
            return _merged_any(base, overlay, path)


def _merged_any(base: Any, overlay: Any, path: str) -> Any:
    if base is not MISSING and _shape(base) is not _shape(overlay):
        raise _refused(path, f"must be {_kind(base)}, and is {_kind(overlay)}")
    if isinstance(overlay, dict):
        return _merged_map(base, overlay, _Map({}), path)
    if isinstance(overlay, list):
        return [_added(item, f"{path}[{index}]") for index, item in enumerate(overlay)]
    return overlay


def _shape(value: Any) -> type | None:
    """Kinds of scalars are the API server's business: a port may be a number or a name."""
    return type(value) if isinstance(value, dict | list) else None


def _added(item: Any, path: str) -> Any:
    if item is None:
        raise _refused(path, "has no value: write one or remove the item")
    return _merged_any(MISSING, item, path)


def _merged_map(base: Any, overlay: Mapping[str, Any], node: _Map, path: str) -> dict[str, Any]:
    result: dict[str, Any] = {} if base is MISSING else copy.deepcopy(dict(base))
    for name, value in overlay.items():
        here = f"{path}.{name}"
        if not isinstance(name, str):
            raise _refused(here, f"{name!r} is not a string: write it in quotes")
        if name.startswith("$"):
            raise _refused(
                here, "directives of strategic merge are not supported: null removes a field"
            )
        if value is None:
            result.pop(name, None)
            continue
        result[name] = _merged(result.get(name, MISSING), value, node.fields.get(name, _ANY), here)
    return result


def _merged_keyed(base: Any, overlay: Any, node: _Keyed, path: str) -> list[Any]:
    _require(isinstance(overlay, list), path, "must be a list", overlay)
    result: list[Any] = [] if base is MISSING else list(base)
    place = {_key_of(item, node): index for index, item in enumerate(result)}
    seen: set[str] = set()
    for index, item in enumerate(overlay):
        here = f"{path}[{index}]"
        _require(isinstance(item, dict), here, f"must be a mapping with {node.key}", item)
        if "$patch" in item:
            raise _refused(
                f"{here}.$patch",
                "directives of strategic merge are not supported: null removes a field",
            )
        key = item.get(node.key)
        is_right = (
            isinstance(key, int) and not isinstance(key, bool)
            if node.is_number
            else isinstance(key, str)
        )
        if not is_right or key == "":
            wanted = "a whole number" if node.is_number else "a string"
            raise _refused(
                f"{here}.{node.key}", f"is required here and must be {wanted}: items merge by it"
            )
        name = _key_of(item, node)
        here = f"{path}[{name}]"
        if name in seen:
            raise _refused(here, f"is there twice: items merge by {node.key}")
        seen.add(name)
        before = result[place[name]] if name in place else MISSING
        after = _one_source(before, _merged_map(before, item, node.item, here), item, node)
        if name in place:
            result[place[name]] = after
        else:
            result.append(after)
    return result


def _one_source(
    before: Any, after: dict[str, Any], item: Mapping[str, Any], node: _Keyed
) -> dict[str, Any]:
    """`after` without the sources that were ours, when the user's `item` brings another one."""
    if node.item.sources is None or before is MISSING:
        return after
    sources = node.item.sources or set(after) - {node.key}
    brought = {name for name, value in item.items() if value is not None and name in sources}
    if not brought:
        return after
    return {name: value for name, value in after.items() if name not in sources or name in brought}


def _key_of(item: Any, node: _Keyed) -> str:
    key = str(item.get(node.key)) if isinstance(item, Mapping) else ""
    return posixpath.normpath(key) if node.is_path and key else key


def _holds_all(after: Any, before: Any) -> bool:
    return isinstance(after, list) and all(item in after for item in before)


def _path_text(where: str, path: Iterable[str]) -> str:
    node: _Node = _POD_TEMPLATE
    text = where
    for step in path:
        if isinstance(node, _Keyed):
            text, node = f"{text}[{step}]", node.item
        else:
            text = f"{text}.{step}"
            node = node.fields.get(step, _ANY) if isinstance(node, _Map) else _ANY
    return text


def _require(is_met: bool, path: str, wanted: str, value: Any) -> None:  # noqa: FBT001 - reads as a sentence
    if not is_met:
        raise _refused(path, f"{wanted}, and is {_kind(value)}")


def _not_a_string(path: str, value: Any) -> TemplateRefused:
    if isinstance(value, bool | int | float):
        written = str(value).lower() if isinstance(value, bool) else str(value)
        return _refused(
            path, f'{written} is read as {_kind(value)}, and a string is wanted: write "{written}"'
        )
    return _refused(path, f"must be a string, and is {_kind(value)}")


def _refused(path: str, message: str) -> TemplateRefused:
    return TemplateRefused(INVALID_TEMPLATE, f"{path}: {message}")


def _kind(value: Any) -> str:
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, dict):
        return "a mapping"
    return "a list" if isinstance(value, list) else "a string"
