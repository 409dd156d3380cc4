"""Secrets with the certificates of a KVCache: NAME-authority, NAME-agent-tls and NAME-engine-tls.

What is in them was decided by `authority.plan`; here it gets its shape. Nothing with spec.tls.mode Secret or Off. The
authority's Secret is mounted nowhere. Pure.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping

from cacheoperator import names
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheservice.manifest import KVCacheManifest, TlsMode


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:  # noqa: ARG001 - all builders
    """The three Secrets, or nothing."""
    if manifest.tls.mode is not TlsMode.AUTO:
        return []
    assert refs.tls is not None, "the edge plans certificates before it renders"
    secrets = []
    for role, pair in sorted(refs.tls.leaves.items()):
        files = {"tls.crt": pair.certificate, "tls.key": pair.key, "ca.crt": refs.tls.trusted}
        name = names.leaf_name(manifest.name, role)
        secrets.append(_secret(manifest, refs, name, "kubernetes.io/tls", files))
    # Last, as it says that the step is done: what is not stored is planned again.
    name = names.authority_name(manifest.name)
    return [*secrets, _secret(manifest, refs, name, "Opaque", refs.tls.authority_data)]


def _secret(
    manifest: KVCacheManifest, refs: Refs, name: str, kind: str, files: Mapping[str, str]
) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.metadata(manifest, refs.uid, name),
        "type": kind,
        "data": {
            file: base64.b64encode(text.encode()).decode() for file, text in sorted(files.items())
        },
    }
