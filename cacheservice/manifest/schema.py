"""The schema of KVCache, from the one file that Kubernetes gets too.

`kvcaches.yaml` in this folder is a link to charts/larder/files/kvcaches.yaml; a wheel carries the file itself. Read
once per process. Knows the file's place and outline; what the fields mean is read by `validate`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from importlib import resources
from typing import Any

import yaml

Schema = Mapping[str, Any]


@functools.cache
def custom_resource_definition() -> Schema:
    """The whole CustomResourceDefinition as Kubernetes takes it. Shared: do not change it."""
    text = (
        resources.files("cacheservice.manifest")
        .joinpath("kvcaches.yaml")
        .read_text(encoding="utf-8")
    )
    definition: Schema = yaml.safe_load(text)
    return definition


def api_version() -> str:
    """`larder.dev/v1alpha1`."""
    spec = custom_resource_definition()["spec"]
    return f"{spec['group']}/{spec['versions'][0]['name']}"


def kind() -> str:
    """`KVCache`."""
    return str(custom_resource_definition()["spec"]["names"]["kind"])


def root_schema() -> Schema:
    """The structural schema of one KVCache, metadata and status included."""
    schema: Schema = custom_resource_definition()["spec"]["versions"][0]["schema"][
        "openAPIV3Schema"
    ]
    return schema
