"""Which other field managers have what we want in an object, by its managedFields. Pure; `children` tells it.

Whoever changes a value of ours takes the field from our entry into its own, so its name stands in the live object. Who
only removed something left no name. Paths are those of `difference`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from cacheoperator.names import FIELD_MANAGER


def owners(live: Mapping[str, Any], paths: Sequence[str]) -> dict[str, str]:
    """Path → manager, for those of `paths` that are not ours any more and have an owner. `live` has all entries."""
    ours: set[str] = set()
    theirs: dict[str, str] = {}
    for entry in live["metadata"].get("managedFields") or ():
        manager = str(entry.get("manager", ""))
        leaves = _leaves(entry.get("fieldsV1") or {}, "")
        if manager == FIELD_MANAGER and entry.get("operation") == "Apply":
            ours.update(leaves)
        elif not manager.startswith(FIELD_MANAGER) and entry.get("subresource") != "status":
            theirs |= dict.fromkeys(leaves, manager)
    found = {}
    for path in paths:
        below = f"{path}."
        manager = theirs.get(path) or next(
            (who for leaf, who in theirs.items() if leaf.startswith(below)), ""
        )
        if manager and path not in ours:
            found[path] = manager
    return found


def _leaves(fields: Mapping[str, Any], path: str) -> Iterator[str]:
    for field, inner in fields.items():
        kind, _, name = field.partition(":")
        if kind == "f":
            here = f"{path}.{name}" if path else name
        elif kind == "k":
            here = f"{path}[{','.join(str(part) for part in json.loads(name).values())}]"
        elif kind == "v":
            here = f"{path}[{json.loads(name)}]"
        else:
            continue  # ".": the item itself, whose fields follow
        if inner and inner != {".": {}}:
            yield from _leaves(inner, here)
        else:
            yield here
