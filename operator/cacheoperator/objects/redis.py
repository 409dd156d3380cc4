"""The embedded Redis: Secret NAME-redis-password, Service and StatefulSet NAME-redis of one pod. Nothing for an
external one.

Runs Valkey or Redis, whichever its image has. Invariants: entries take 80 % of the pod's memory and the least recently
used leave first (an entry lost is a miss); nothing is written to disk; the password is in a mounted file and in a
configuration in memory, never in arguments or environment. A new password rolls this pod and no other: its template
carries a digest of it, and agents read their file at every connect.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

from cacheoperator import names, templates
from cacheoperator.names import Component
from cacheoperator.objects import pods
from cacheoperator.objects.pods import Object
from cacheoperator.refs import Refs
from cacheoperator.settings import Settings
from cacheservice.manifest import EmbeddedRedis, KVCacheManifest

PASSWORD_KEY = "password"
PASSWORD_ANNOTATION = "larder.dev/password-digest"
MEMORY_FOR_ENTRIES_PERCENT = 80
"""The rest is for the process, its clients' buffers and holes between entries."""
GRACE_S = 10
"""There is nothing to save."""
CONFIG_FOLDER = "/run/redis"

_START = """\
set -eu
umask 077
{
  cat <<'END'
port PORT
dir FOLDER
save ""
appendonly no
maxmemory MAX_MEMORY
maxmemory-policy allkeys-lru
END
  printf 'requirepass "%s"\\n' "$(cat PASSWORD_FILE)"
} > FOLDER/redis.conf
for server in valkey-server redis-server; do
  if command -v "$server" > /dev/null; then exec "$server" FOLDER/redis.conf; fi
done
echo 'this image has neither valkey-server nor redis-server: set spec.redis.embedded.image' >&2
exit 1
"""
_PING = """\
client=redis-cli
if command -v valkey-cli > /dev/null; then client=valkey-cli; fi
answer=$({ printf 'AUTH %s\\n' "$(cat PASSWORD_FILE)"; echo PING; } | "$client" -p PORT 2>&1)
case "$answer" in *PONG*) exit 0 ;; esac
echo "$answer" >&2
exit 1
"""
"""The password goes by the client's standard input: printf is the shell's own, so no argument shows it."""


def build(manifest: KVCacheManifest, refs: Refs, settings: Settings) -> list[Object]:
    """Secret, Service and StatefulSet, or nothing. Raises TemplateRefused for spec.redis.embedded.template."""
    embedded = manifest.redis.embedded
    if embedded is None:
        return []
    assert refs.redis_password, "the edge makes a password before it renders"
    name = names.workload_name(manifest.name, Component.REDIS)
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(manifest, refs.uid, name, Component.REDIS),
        "spec": {
            "type": "ClusterIP",
            "selector": names.selector_labels(manifest.name, Component.REDIS),
            "ports": [pods.service_port("redis", names.REDIS_PORT)],
        },
    }
    return [_secret(manifest, refs), service, _stateful_set(manifest, embedded, refs, settings)]


def password_digest(uid: str, password: str) -> str:
    """Changes with the password and tells nothing of it, also to who compares KVCaches."""
    return hmac.new(uid.encode(), password.encode(), hashlib.sha256).hexdigest()[:16]


def _secret(manifest: KVCacheManifest, refs: Refs) -> Object:
    name = names.redis_password_name(manifest.name)
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": names.metadata(manifest, refs.uid, name, Component.REDIS),
        "type": "Opaque",
        "data": {PASSWORD_KEY: base64.b64encode(refs.redis_password.encode()).decode()},
    }


def _stateful_set(
    manifest: KVCacheManifest, embedded: EmbeddedRedis, refs: Refs, settings: Settings
) -> Object:
    name = names.workload_name(manifest.name, Component.REDIS)
    pod: Object = {
        "metadata": {
            "labels": names.labels(manifest.name, Component.REDIS),
            "annotations": {PASSWORD_ANNOTATION: password_digest(refs.uid, refs.redis_password)},
        },
        "spec": {
            **pods.pull_secrets(manifest),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "terminationGracePeriodSeconds": GRACE_S,
            "securityContext": pods.pod_security(names.UID_REDIS),
            "containers": [_container(embedded, settings)],
            "volumes": [
                pods.secret_volume(
                    "password", names.redis_password_name(manifest.name), (PASSWORD_KEY,)
                ),
                {"name": "config", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            ],
        },
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": names.metadata(manifest, refs.uid, name, Component.REDIS),
        "spec": {
            "replicas": 1,
            "serviceName": name,
            # Otherwise a pod that can't start, by a wrong image for example, is never replaced by a right one: the
            # controller waits for it to become ready first.
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": names.selector_labels(manifest.name, Component.REDIS)},
            "template": templates.overlaid(
                pod, embedded.template, where="spec.redis.embedded.template",
                owned=pods.owned(pod, "redis", "command", "args", "volumeMounts"),
            ),
        },
    }  # fmt: skip


def _container(embedded: EmbeddedRedis, settings: Settings) -> Object:
    memory = pods.quantity(embedded.memory_bytes)
    ping = {"exec": {"command": ["sh", "-c", _script(_PING, embedded)]}, "timeoutSeconds": 5}
    return {
        "name": "redis",
        **pods.image(embedded.image or settings.images.redis, settings),
        "command": ["sh", "-c"],
        "args": [_script(_START, embedded)],
        "ports": [{"name": "redis", "containerPort": names.REDIS_PORT, "protocol": "TCP"}],
        "resources": {
            "requests": {"cpu": "100m", "memory": memory},
            "limits": {"memory": memory},
        },
        "startupProbe": {**ping, "periodSeconds": 2, "failureThreshold": 60},
        "readinessProbe": {**ping, "periodSeconds": 10, "failureThreshold": 2},
        "livenessProbe": {**ping, "periodSeconds": 20, "failureThreshold": 4},
        "securityContext": pods.container_security(),
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": [
            {"name": "password", "mountPath": names.REDIS_AUTH_MOUNT, "readOnly": True},
            {"name": "config", "mountPath": CONFIG_FOLDER},
        ],
    }


def _script(text: str, embedded: EmbeddedRedis) -> str:
    words = {
        "PASSWORD_FILE": f"{names.REDIS_AUTH_MOUNT}/{PASSWORD_KEY}",
        "PORT": str(names.REDIS_PORT),
        "FOLDER": CONFIG_FOLDER,
        "MAX_MEMORY": str(embedded.memory_bytes * MEMORY_FOR_ENTRIES_PERCENT // 100),
    }
    for word, value in words.items():
        text = text.replace(word, value)
    return text
