"""Check a value against a structural schema the way Kubernetes does, and fill in its defaults.

Invariants: every problem is found in one pass, each with path, position and remedy; the input is not changed; what
Kubernetes would drop silently (unknown fields, fields without a value) is a problem. Reads the keywords that
`kvcaches.yaml` uses; an unknown keyword in the schema is our bug and raises. Called by `load`; the rules that the
schema writes in CEL are in `rules`.
"""

from __future__ import annotations

import copy
import difflib
import re
from typing import Any

from cacheservice.manifest.document import Document, Path, path_text
from cacheservice.manifest.problems import Position, Problem
from cacheservice.manifest.rules import TWINS
from cacheservice.manifest.schema import Schema

known_keywords = frozenset(
    "type description default properties required enum pattern minLength maxLength minimum maximum "
    "multipleOf format items maxItems maxProperties additionalProperties x-kubernetes-validations "
    "x-kubernetes-preserve-unknown-fields x-kubernetes-list-type x-kubernetes-list-map-keys".split()
)
bits_of_format = {"int32": 31, "int64": 63}
python_types: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "boolean": (bool,),
}


def validate(
    document: Document, value: Any, schema: Schema, path: Path = ()
) -> tuple[Any, tuple[Problem, ...]]:
    """Return a copy of `value` with defaults, and all its problems in the order of their positions."""
    walk = _Walk(document)
    checked = walk.check(value, schema, path)
    return checked, tuple(
        sorted(walk.problems, key=lambda problem: (problem.position.line, problem.position.column))
    )


def nearest(name: str, names: list[str]) -> str | None:
    """The one of `names` that `name` was probably meant to be, or None. Upper and lower case are alike."""
    by_lower = {known.lower(): known for known in names}
    close = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None


class _Walk:
    def __init__(self, document: Document) -> None:
        self.problems: list[Problem] = []
        self._document = document

    def check(self, value: Any, schema: Schema, path: Path) -> Any:
        assert known_keywords.issuperset(schema), (
            f"{path_text(path)}: {set(schema) - known_keywords}"
        )
        if not self._has_type(value, schema, path):
            return value
        num_problems = len(self.problems)
        if isinstance(value, dict):
            value = self._check_object(value, schema, path)
        elif isinstance(value, list):
            value = self._check_array(value, schema, path)
        elif isinstance(value, str):
            self._check_string(value, schema, path)
        elif isinstance(value, int) and not isinstance(value, bool):
            self._check_integer(value, schema, path)
        if "enum" in schema and value not in schema["enum"]:
            self._refuse(
                path,
                f"{value!r} is not one of {', '.join(schema['enum'])}{_suggestion(str(value), schema['enum'])}",
            )
        if not self._is_unclear(path, num_problems):
            self._check_rules(value, schema, path)
        return value

    def _has_type(self, value: Any, schema: Schema, path: Path) -> bool:
        wanted = schema["type"]
        if isinstance(value, python_types[wanted]) and (
            wanted == "boolean" or not isinstance(value, bool)
        ):
            return True
        written = self._document.written.get(path)
        if value is None:
            empty = " (write {} for all defaults)" if wanted == "object" else ""
            self._refuse(
                path,
                f"has no value, and Kubernetes would drop it: write one or remove the field{empty}",
            )
        elif wanted == "string" and written is not None:
            self._refuse(
                path,
                f'{written} is read as {_article(value)}, and a string is wanted: write "{written}" in quotes',
            )
        else:
            self._refuse(
                path, f"must be {_articles[wanted]}, and is {_article(value)}{_example(schema)}"
            )
        return False

    def _check_object(self, value: dict[str, Any], schema: Schema, path: Path) -> dict[str, Any]:
        properties: Schema = schema.get("properties", {})
        others = schema.get("additionalProperties")
        is_open = schema.get("x-kubernetes-preserve-unknown-fields", False)
        result: dict[str, Any] = {}
        for name, item in value.items():
            here = (*path, name)
            if name in properties:
                result[name] = self.check(item, properties[name], here)
            elif others is not None:
                result[name] = self.check(item, others, here)
            elif is_open:
                result[name] = copy.deepcopy(item)
            else:
                missing = [known for known in properties if known not in value]
                self._refuse(here, f"unknown field; {_meant(name, missing, list(properties))}")
        if len(value) > schema.get("maxProperties", len(value)):
            self._refuse(
                path, f"has {len(value)} entries, and {schema['maxProperties']} is the most"
            )
        for name in schema.get("required", ()):
            if name not in value:
                description = (
                    properties.get(name, {}).get("description", "").split(". ")[0].rstrip(".")
                )
                self._refuse(
                    (*path, name), f"is required{': ' + description if description else ''}"
                )
        for name, field in properties.items():
            if name not in value and "default" in field:
                result[name] = self.check(copy.deepcopy(field["default"]), field, (*path, name))
        return result

    def _check_array(self, value: list[Any], schema: Schema, path: Path) -> list[Any]:
        if len(value) > schema.get("maxItems", len(value)):
            self._refuse(path, f"has {len(value)} items, and {schema['maxItems']} is the most")
        return [
            self.check(item, schema["items"], (*path, index)) for index, item in enumerate(value)
        ]

    def _check_string(self, value: str, schema: Schema, path: Path) -> None:
        if len(value) < schema.get("minLength", 0):
            self._refuse(path, "must not be empty: write a value or remove the field")
        if len(value) > schema.get("maxLength", len(value)):
            self._refuse(
                path, f"has {len(value)} characters, and {schema['maxLength']} is the most"
            )
        if "pattern" in schema and re.search(schema["pattern"], value) is None:
            self._refuse(path, f"{value!r} does not match {schema['pattern']}")

    def _check_integer(self, value: int, schema: Schema, path: Path) -> None:
        most = 2 ** bits_of_format[schema.get("format", "int64")] - 1
        lowest, highest = schema.get("minimum", -most - 1), min(schema.get("maximum", most), most)
        if not lowest <= value <= highest:
            bounds = (
                f"at least {lowest}" if "maximum" not in schema else f"from {lowest} to {highest}"
            )
            self._refuse(path, f"{value} is out of bounds: write a whole number {bounds}")
        if value % schema.get("multipleOf", 1):
            step = schema["multipleOf"]
            down = max(value - value % step, schema.get("minimum", step))
            self._refuse(
                path, f"{value} is not a multiple of {step}: write {down} or {down + step}"
            )

    def _is_unclear(self, path: Path, since: int) -> bool:
        """Whether `path` or a field of it is misspelt or ill-typed: a rule over `path` would blame the wrong thing."""
        own = path_text(path)
        return any(
            _parent(problem.path) == own or problem.path == own for problem in self.problems[since:]
        )

    def _check_rules(self, value: Any, schema: Schema, path: Path) -> None:
        for rule in schema.get("x-kubernetes-validations", ()):
            if not TWINS[rule["message"]](value):
                field_path = (
                    tuple(rule["fieldPath"].strip(".").split(".")) if "fieldPath" in rule else ()
                )
                shown = f"{value!r}: " if isinstance(value, str) else ""
                self._refuse((*path, *field_path), f"{shown}{rule['message']}")

    def _refuse(self, path: Path, message: str) -> None:
        self.problems.append(Problem(path_text(path), message, self._position(path)))

    def _position(self, path: Path) -> Position:
        return self._document.position(path)


_articles = {
    "object": "a mapping of fields",
    "array": "a list",
    "string": "a string",
    "integer": "a whole number",
    "boolean": "true or false",
}


def _article(value: Any) -> str:
    if isinstance(value, bool):
        return f"the boolean {str(value).lower()}"
    if isinstance(value, float):
        return "a number with a fraction"
    for name, types in python_types.items():
        if isinstance(value, types):
            return _articles[name]
    return "empty" if value is None else type(value).__name__


def _example(schema: Schema) -> str:
    if schema["type"] == "object" and schema.get("properties"):
        return f" (its fields: {', '.join(schema['properties'])})"
    return f" (for example {schema['default']})" if schema.get("default") is not None else ""


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _meant(name: str, missing: list[str], names: list[str]) -> str:
    near = nearest(name, missing) or nearest(name, names)
    return (
        f"did you mean {near!r}?"
        if near
        else f"fields here are {', '.join(names)}"
        if names
        else "no field is allowed here"
    )


def _suggestion(value: str, names: list[str]) -> str:
    near = nearest(value, names)
    return f"; did you mean {near}?" if near else ""
