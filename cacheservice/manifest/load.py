"""From a file, a text or a Kubernetes object to a KVCacheManifest, or to all reasons why not.

The one loader of `larder up` and of the operator, so that both read a manifest alike. Nothing here touches the network
or the cluster.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cacheservice.manifest.document import MAX_TEXT_BYTES, Document, path_text, read_documents
from cacheservice.manifest.problems import ManifestRefused, Notice, Problem
from cacheservice.manifest.resource import KVCacheManifest, build_manifest
from cacheservice.manifest.schema import Schema, api_version, kind, root_schema
from cacheservice.manifest.validate import nearest, validate

text_map: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
open_object: Schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
object_meta_fields: dict[str, Schema] = {
    "namespace": {"type": "string"},
    "labels": text_map,
    "annotations": text_map,
    "finalizers": {"type": "array", "items": {"type": "string"}},
    "ownerReferences": {"type": "array", "items": open_object},
    "managedFields": {"type": "array", "items": open_object},
    "uid": {"type": "string"},
    "resourceVersion": {"type": "string"},
    "generation": {"type": "integer"},
    "creationTimestamp": {"type": "string"},
    "deletionTimestamp": {"type": "string"},
    "deletionGracePeriodSeconds": {"type": "integer"},
    "selfLink": {"type": "string"},
}
"""What Kubernetes itself knows in metadata, beside the names that our schema describes."""


def load_manifest(path: Path) -> KVCacheManifest:
    """Read the one KVCache in the file `path`. Raises ManifestRefused with every problem of the file."""
    try:
        with path.open("rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
    except OSError as error:
        raise ManifestRefused(
            str(path), (Problem("", f"cannot be read ({error.strerror}): is the path right?"),)
        ) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ManifestRefused(
            str(path), (Problem("", f"is not UTF-8 text (byte {error.start}): save it as UTF-8"),)
        ) from error
    return parse_manifest(text, source=str(path))


def parse_manifest(text: str, *, source: str) -> KVCacheManifest:
    """Read the one KVCache in `text` (YAML or JSON); `source` names it in messages. Raises ManifestRefused."""
    documents, problems = read_documents(text)
    ours = [document for document in documents if _is_kvcache(document.value)]
    if not ours and len(documents) == 1:
        ours = list(documents)  # a misspelt kind deserves the other problems of the file, too
    if not ours:
        if not problems:
            problems = (
                Problem(
                    "", f"holds no KVCache: it needs apiVersion: {api_version()} and kind: {kind()}"
                ),
            )
        raise ManifestRefused(source, problems)
    for extra in ours[1:]:
        position = extra.position(())
        problems = (
            *problems,
            Problem("", "a second KVCache in one file: put it into a file of its own", position),
        )
    notices = tuple(
        Notice(
            "", f"{_title(document.value)} in the same file is left alone", document.position(())
        )
        for document in documents
        if document not in ours
    )
    return _manifest(ours[0], problems, source, notices)


def manifest_from_object(resource: Mapping[str, Any], *, source: str) -> KVCacheManifest:
    """The same for a resource that is an object already, as the Kubernetes API gives it. Raises ManifestRefused."""
    return _manifest(Document(dict(resource)), (), source, ())


def _manifest(
    document: Document, problems: tuple[Problem, ...], source: str, notices: tuple[Notice, ...]
) -> KVCacheManifest:
    value = document.value
    if not isinstance(value, dict):
        raise ManifestRefused(
            source,
            (*problems, Problem("", "is not a mapping: write apiVersion, kind, metadata and spec")),
        )
    if "status" in value:
        ignored = Notice(
            "status", "is the operator's and ignored here", document.position(("status",))
        )
        notices = (*notices, ignored)
    checked, found = validate(
        document, {name: field for name, field in value.items() if name != "status"}, _schema()
    )
    problems = (*problems, *_identity_problems(document), *found)
    if problems:
        told = sorted(
            set(problems),
            key=lambda problem: (problem.position.line, problem.position.column, problem.path),
        )
        raise ManifestRefused(source, tuple(told))
    redis = checked["spec"]["redis"]
    if "external" not in redis and "embedded" not in redis:
        embedded = _schema()["properties"]["spec"]["properties"]["redis"]["properties"]["embedded"]
        redis["embedded"] = validate(Document({}), {}, embedded)[0]
    written = frozenset(path_text(path) for path in document.positions)
    return build_manifest(checked, written=written, notices=notices)


def _schema() -> Schema:
    """The schema of the CRD, with what Kubernetes adds: the fields of metadata, and that a name is required."""
    root = dict(root_schema())
    metadata = root["properties"]["metadata"]
    properties = {**metadata["properties"], **object_meta_fields}
    root["properties"] = {
        **root["properties"],
        "metadata": {**metadata, "properties": properties, "required": ["name"]},
    }
    root["required"] = ["apiVersion", "kind", "metadata", "spec"]
    return root


def _identity_problems(document: Document) -> list[Problem]:
    problems = []
    for name, wanted in (("apiVersion", api_version()), ("kind", kind())):
        value = document.value.get(name)
        if isinstance(value, str) and value != wanted:
            problems.append(
                Problem(
                    name, f"{value!r} is not read here: write {wanted}", document.position((name,))
                )
            )
    return problems


def _is_kvcache(value: Any) -> bool:
    """Whether a document means to be ours. A misspelt kind counts when nothing else could be meant."""
    if not isinstance(value, dict):
        return False
    its_kind, its_version = str(value.get("kind", "")), str(value.get("apiVersion", ""))
    is_of_our_group = its_version.partition("/")[0] == api_version().partition("/")[0]
    return its_kind == kind() or (is_of_our_group and nearest(its_kind, [kind()]) is not None)


def _title(value: Any) -> str:
    if not isinstance(value, dict):
        return "a document without kind"
    metadata = value.get("metadata")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    return f"{value.get('kind', 'a document without kind')}{f' {name}' if name else ''}"
