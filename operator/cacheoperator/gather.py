"""What `render` needs to know of the cluster, read: our own Secrets, what runs now, what the namespace allows.

Only Secrets of our own making are read, by name, and only when this KVCache controls them; users' Secrets never are. A
Secret that is missing gets new content here, which the apply then writes.
"""

from __future__ import annotations

import base64
import binascii
import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from cacheoperator import authority, names, shared_memory
from cacheoperator.children import ObjectName
from cacheoperator.cluster import Cluster
from cacheoperator.kinds import DAEMON_SET, DEPLOYMENT, POD_MONITOR, SECRET
from cacheoperator.names import ENGINES, Component
from cacheoperator.objects import engines
from cacheoperator.refs import ImagesInUse, Refs, SharedMemoryVerdict, TlsMaterial
from cacheoperator.settings import Settings
from cacheoperator.watch import Key, Stored, Watched, controller_uid
from cacheservice.manifest import KVCacheManifest, RouterType, TlsMode

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gathered:
    """The refs; `enforce_label` they were made under; when certificates want another look (None: never)."""

    refs: Refs
    enforce_label: str
    certificates_due: datetime | None


async def gather(
    cluster: Cluster,
    watched: Watched,
    settings: Settings,
    manifest: KVCacheManifest,
    resource: Mapping[str, Any],
    live: Mapping[ObjectName, Stored],
    now: datetime,
    denial: SharedMemoryVerdict | None,
) -> Gathered:
    """Read everything. `denial` is a verdict from pods that were rejected after all, which overrules the dry run."""
    key: Key = (manifest.namespace, manifest.name)
    uid = str(resource["metadata"]["uid"])
    label = await shared_memory.enforce_label(cluster, manifest.namespace)
    agents = live.get((DAEMON_SET, names.workload_name(manifest.name, Component.CACHE)))
    remembered = ""
    if agents is not None and agents.owner_uid == uid:
        remembered = _annotations(agents.load()).get(shared_memory.ANNOTATION, "")
    verdict = denial or shared_memory.known_verdict(manifest, label, remembered)
    if verdict is None and manifest.paused:
        verdict = shared_memory.allowed  # a dry run is a write too, and nothing is applied now
    if verdict is None:
        verdict = await shared_memory.ask(cluster, manifest, settings)

    password, router_key = "", ""
    if manifest.redis.embedded is not None:
        found = await own_secret(cluster, key, uid, names.redis_password_name(manifest.name))
        password = found.get("password") or secrets.token_urlsafe(32)
    if manifest.decode is not None and manifest.router.type is not RouterType.NONE:
        found = await own_secret(cluster, key, uid, names.router_key_name(manifest.name))
        router_key = found.get("control-plane-key") or secrets.token_urlsafe(32)
    tls, due = await _certificates(cluster, settings, manifest, uid, now)

    images: dict[str, ImagesInUse] = {}
    upgrades: dict[str, str] = {}
    for component in ENGINES:
        engine = live.get((DEPLOYMENT, names.workload_name(manifest.name, component)))
        if engine is not None and engine.owner_uid == uid:
            body = engine.load()
            images[component] = engines.images_in_use(body)
            upgrades[component] = _annotations(body).get(engines.UPGRADE_ANNOTATION, "")
    refs = Refs(
        uid=uid,
        generation=int(resource["metadata"]["generation"]),
        shared_memory=verdict,
        pod_monitor_known=watched.is_served(POD_MONITOR),
        images_in_use=images,
        redis_password=password,
        router_key=router_key,
        tls=tls,
        upgrade=_annotations(resource).get(engines.UPGRADE_ANNOTATION, ""),
        live_upgrades=upgrades,
    )
    return Gathered(refs, label, due)


async def own_secret(cluster: Cluster, key: Key, uid: str, name: str) -> dict[str, str]:
    """Texts of a Secret that the KVCache with `uid` controls; empty when there is none."""
    found = await cluster.get(SECRET, key[0], name)
    if found is None or controller_uid(found) != uid:
        return {}
    texts = {}
    for field, value in (found.get("data") or {}).items():
        try:
            texts[field] = base64.b64decode(value, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            continue  # someone broke it: it is made anew
    return texts


async def _certificates(
    cluster: Cluster, settings: Settings, manifest: KVCacheManifest, uid: str, now: datetime
) -> tuple[TlsMaterial | None, datetime | None]:
    if manifest.tls.mode is not TlsMode.AUTO:
        return None, None
    key: Key = (manifest.namespace, manifest.name)
    stored = await own_secret(cluster, key, uid, names.authority_name(manifest.name))
    plan = authority.plan(
        stored or None,
        now=now,
        name=manifest.name,
        namespace=manifest.namespace,
        settings=settings,
    )
    if plan.steps and not manifest.paused:
        log.info(
            "certificates namespace=%s name=%s steps=%s",
            manifest.namespace, manifest.name, "; ".join(plan.steps),
        )  # fmt: skip
    return plan.material, plan.due


def _annotations(obj: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return found
