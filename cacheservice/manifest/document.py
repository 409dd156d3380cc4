"""YAML text to plain values, every one of them with its position.

Invariants: only the types of JSON come out; a key that appears twice is a problem, never a silent
overwrite; the work is bounded by MAX_TEXT_BYTES, MAX_VALUES and MAX_DEPTH, also for aliases that
multiply. Called by `load`. Knows nothing of KVCache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from cacheservice.manifest.problems import Position, Problem

MAX_TEXT_BYTES = 1 << 20
MAX_VALUES = 20_000
MAX_DEPTH = 64

type_of_tag = {
    "tag:yaml.org,2002:null": "null",
    "tag:yaml.org,2002:bool": "boolean",
    "tag:yaml.org,2002:int": "integer",
    "tag:yaml.org,2002:float": "number",
    "tag:yaml.org,2002:str": "string",
    "tag:yaml.org,2002:timestamp": "string",  # JSON has no dates, and Kubernetes reads text
}
tags_of_collections = frozenset({"tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"})

Path = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """One YAML document: its value, where each path in it was written, and the text of scalars as it was written."""

    value: Any
    positions: Mapping[Path, Position] = field(default_factory=dict)
    written: Mapping[Path, str] = field(default_factory=dict)

    def position(self, path: Path) -> Position:
        """The place of `path`, or of the nearest parent that was written (defaults were not)."""
        while path and path not in self.positions:
            path = path[:-1]
        return self.positions.get(path, Position())


def path_text(path: Path) -> str:
    """`spec.decode.args[3]`; keys that are not plain words are put into brackets and quotes."""
    text = ""
    for step in path:
        if isinstance(step, int):
            text += f"[{step}]"
        elif step.replace("_", "").replace("-", "").isalnum():
            text += f".{step}" if text else step
        else:
            text += f"[{step!r}]"
    return text


def read_documents(text: str) -> tuple[tuple[Document, ...], tuple[Problem, ...]]:
    """Read every document of `text`. Empty ones are left out; problems do not raise, so that all are told at once."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
        return (), (
            Problem("", f"longer than {MAX_TEXT_BYTES >> 20} MiB: is this the right file?"),
        )
    problems: list[Problem] = []
    documents: list[Document] = []
    try:
        loader = yaml.SafeLoader(text)
    except yaml.YAMLError as error:  # a character that YAML forbids, found before the first token
        return (), (_syntax_problem(error),)
    try:
        while loader.check_node():
            node = loader.get_node()
            assert node is not None, "check_node said that there is one"
            reader = _Reader(loader, problems)
            value = reader.convert(node, ())
            if value is not None or not isinstance(node, yaml.ScalarNode):
                documents.append(Document(value, reader.positions, reader.written))
    except _TooLarge as error:
        problems.append(Problem("", str(error), error.position))
    except yaml.YAMLError as error:
        problems.append(_syntax_problem(error))
    except RecursionError:
        problems.append(
            Problem("", f"nested deeper than {MAX_DEPTH} levels: is this the right file?")
        )
    finally:
        loader.dispose()
    return tuple(documents), tuple(problems)


class _TooLarge(Exception):
    def __init__(self, message: str, position: Position) -> None:
        super().__init__(message)
        self.position = position


class _Reader:
    """Turns the nodes of one document into values. Own code, since SafeConstructor lets a later key win silently."""

    def __init__(self, loader: yaml.SafeLoader, problems: list[Problem]) -> None:
        self.positions: dict[Path, Position] = {}
        self.written: dict[Path, str] = {}
        self._loader = loader
        self._problems = problems
        self._num_values = 0

    def convert(self, node: yaml.Node, path: Path) -> Any:
        position = _position(node)
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise _TooLarge(f"more than {MAX_VALUES} values: is this the right file?", position)
        if len(path) > MAX_DEPTH:
            raise _TooLarge(
                f"nested deeper than {MAX_DEPTH} levels: is this the right file?", position
            )
        self.positions.setdefault(path, position)
        if not isinstance(node, yaml.ScalarNode) and node.tag not in tags_of_collections:
            self._refuse_tag(node, path)
        if isinstance(node, yaml.MappingNode):
            return self._convert_mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.convert(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._convert_scalar(node, path)

    def _convert_mapping(self, node: yaml.MappingNode, path: Path) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            position = _position(key_node)
            key = key_node.value
            if key_node.tag == "tag:yaml.org,2002:merge":
                self._refuse(
                    path, "merge keys (<<) are not read here: write the fields out", position
                )
                continue
            if not isinstance(key, str) or key_node.tag != "tag:yaml.org,2002:str":
                shown = f"{key!r}" if isinstance(key, str) else "a list or mapping"
                self._refuse(path, f"the key {shown} is not a string: write it in quotes", position)
                continue
            here = (*path, key)
            if key in result:
                first = self.positions[here]
                self._refuse(
                    here, f"appears twice (first on line {first.line}): keep one", position
                )
                continue
            self.positions[here] = position
            result[key] = self.convert(value_node, here)
        return result

    def _convert_scalar(self, node: yaml.Node, path: Path) -> Any:
        self.written[path] = node.value
        kind = type_of_tag.get(node.tag)
        if kind is None:
            self._refuse_tag(node, path)
            return None
        if kind == "string":
            return node.value
        try:
            return self._loader.construct_object(node)
        except (ValueError, yaml.YAMLError):
            self._refuse(
                path,
                f"{node.value!r} cannot be read as {kind}: write text in quotes",
                _position(node),
            )
            return None

    def _refuse_tag(self, node: yaml.Node, path: Path) -> None:
        tag = node.tag.replace("tag:yaml.org,2002:", "!!")
        self._refuse(path, f"the YAML tag {tag} is not read here: remove it", _position(node))

    def _refuse(self, path: Path, message: str, position: Position) -> None:
        self._problems.append(Problem(path_text(path), message, position))


def _position(node: yaml.Node) -> Position:
    return Position(node.start_mark.line + 1, node.start_mark.column + 1)


def _syntax_problem(error: yaml.YAMLError) -> Problem:
    if isinstance(error, yaml.MarkedYAMLError):
        mark = error.problem_mark or error.context_mark
        said = ", ".join(part for part in (error.context, error.problem) if part)
        position = Position(mark.line + 1, mark.column + 1) if mark else Position()
        return Problem("", f"not valid YAML: {said}", position)
    return Problem("", f"not valid YAML: {str(error).splitlines()[0]}")
