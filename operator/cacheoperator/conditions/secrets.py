"""Secrets and ConfigMaps that pods wait for: found in what the kubelet says, never read. Pure.

The kubelet's sentences (kubernetes 1.35 pkg/kubelet: kuberuntime, secret and projected volumes) are the only sign of a
missing Secret that needs no permission to read Secrets.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from cacheoperator import names
from cacheoperator.conditions.reasons import Reason
from cacheservice.manifest import KVCacheManifest

SECRET = re.compile(r'secret "(?P<name>[^"]+)" not found')
SECRET_KEY = re.compile(r"couldn't find key (?P<key>\S+) in Secret (?:[^\s/]+/)?(?P<name>\S+)")
SECRET_VOLUME_KEY = re.compile(r"references non-existent secret key: (?P<key>\S+)")
CONFIG_MAP = re.compile(r'configmap "(?P<name>[^"]+)" not found')
CONFIG_MAP_KEY = re.compile(
    r"couldn't find key (?P<key>\S+) in ConfigMap (?:[^\s/]+/)?(?P<name>\S+)"
)
CONFIG_MAP_VOLUME_KEY = re.compile(r"references non-existent config key: (?P<key>\S+)")


@dataclass(frozen=True, slots=True)
class Reference:
    """A Secret that the user names, and the keys that we need of it."""

    name: str
    keys: tuple[str, ...]
    path: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A Secret or ConfigMap without which a pod cannot start. `is_ours`: the operator makes it again by itself."""

    reason: Reason
    object: str
    message: str
    is_ours: bool


def references(manifest: KVCacheManifest) -> tuple[Reference, ...]:
    """Every Secret that the manifest names, but for those of image pulls (pods start without them)."""
    found = []
    if manifest.model is not None and manifest.model.token is not None:
        token = manifest.model.token
        found.append(Reference(token.name, (token.key,), "spec.model.tokenSecretRef"))
    if manifest.engine.api_key is not None:
        key = manifest.engine.api_key
        found.append(Reference(key.name, (key.key,), "spec.engine.apiKeySecretRef"))
    external = manifest.redis.external
    if external is not None:
        where = "spec.redis.external"
        if external.credentials_secret_name:
            name = external.credentials_secret_name
            found.append(Reference(name, ("password",), f"{where}.credentialsSecretRef"))
        if external.tls is not None and external.tls.ca is not None:
            ca = external.tls.ca
            found.append(Reference(ca.name, (ca.key,), f"{where}.tls.caSecretRef"))
        if external.tls is not None and external.tls.client_secret_name:
            name = external.tls.client_secret_name
            found.append(Reference(name, ("tls.crt", "tls.key"), f"{where}.tls.clientSecretRef"))
    if manifest.tls.secret_name:
        keys = ("tls.crt", "tls.key", "ca.crt")
        found.append(Reference(manifest.tls.secret_name, keys, "spec.tls.secretRef"))
    return tuple(found)


def missing(text: str, manifest: KVCacheManifest) -> Missing | None:
    """What `text` of the kubelet says is missing; None when it is about something else."""
    for pattern in (SECRET, SECRET_KEY, SECRET_VOLUME_KEY):
        if found := pattern.search(text):
            words = found.groupdict()
            return _secret(words.get("name", ""), words.get("key", ""), manifest)
    for pattern in (CONFIG_MAP, CONFIG_MAP_KEY, CONFIG_MAP_VOLUME_KEY):
        if found := pattern.search(text):
            words = found.groupdict()
            return _config_map(words.get("name", ""), words.get("key", ""), manifest)
    return None


def _secret(name: str, key: str, manifest: KVCacheManifest) -> Missing:
    known = [
        reference
        for reference in references(manifest)
        if (reference.name == name if name else key in reference.keys)
    ]
    namespace = manifest.namespace
    if name in _own_secrets(manifest.name):
        message = f'secret "{name}" not found in namespace {namespace}: the operator makes it again'
        return Missing(Reason.SECRET_NOT_FOUND, f"secret/{name}", message, is_ours=True)
    paths = " and ".join(reference.path for reference in known) or "named in a template"
    name = name or (known[0].name if known else "")
    shown = f'secret "{name}"' if name else "a secret"
    if key:
        message = f"{shown} in namespace {namespace} has no key {key} ({paths}): add the key"
    else:
        keys = " and ".join(dict.fromkeys(key for reference in known for key in reference.keys))
        remedy = f"create it with {keys}" if keys else "create it, or correct the template"
        message = f"{shown} not found in namespace {namespace} ({paths}): {remedy}"
    return Missing(Reason.SECRET_NOT_FOUND, f"secret/{name}", message, is_ours=False)


def _config_map(name: str, key: str, manifest: KVCacheManifest) -> Missing:
    is_ours = name == names.connection_name(manifest.name)
    shown = f'configmap "{name}"' if name else "a configmap"
    if is_ours:
        remedy = "the operator makes it again"
    elif key:
        remedy = f"add the key {key}"
    else:
        remedy = "create it, or correct the template that names it"
    what = f"has no key {key}" if key else "not found"
    where = f"in namespace {manifest.namespace}"
    message = f"{shown} {where} {what}: {remedy}" if key else f"{shown} {what} {where}: {remedy}"
    return Missing(Reason.CONFIG_MAP_NOT_FOUND, f"configmap/{name}", message, is_ours=is_ours)


def _own_secrets(name: str) -> frozenset[str]:
    leaves = (names.leaf_name(name, role) for role in ("agent", "engine"))
    return frozenset(
        {names.redis_password_name(name), names.authority_name(name), names.router_key_name(name), *leaves}
    )  # fmt: skip
