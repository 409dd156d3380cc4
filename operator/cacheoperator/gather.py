"""What `render` needs to know of the cluster, read: our own Secrets, what runs now, what the namespace allows.

Only Secrets of our own making are read, by name, and only when this KVCache controls them; users' Secrets never are. A
Secret that is missing gets new content here, which the apply then writes. Until it is there the content stays the same
(`unstored`): a quota or a foreign Secret may refuse it for long, and pods roll with a digest of it.
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
from cacheoperator.cluster import Cluster, Json
from cacheoperator.kinds import DAEMON_SET, DEPLOYMENT, POD_MONITOR, SECRET, Kind
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
    unstored: dict[str, dict[str, str]],
) -> Gathered:
    """Read everything. `denial` is a verdict from pods that were rejected after all, which overrules the dry run;
    `unstored` is kept by the caller from one call to the next."""
    key: Key = (manifest.namespace, manifest.name)
    uid = str(resource["metadata"]["uid"])
    label = await shared_memory.enforce_label(cluster, manifest.namespace)

    async def workload(kind: Kind, component: Component) -> Json | None:
        return await _own_workload(
            cluster, key, uid, (kind, names.workload_name(manifest.name, component)), live
        )

    agents = await workload(DAEMON_SET, Component.CACHE)
    remembered = "" if agents is None else _annotations(agents).get(shared_memory.ANNOTATION, "")
    verdict = denial or shared_memory.known_verdict(manifest, label, remembered)
    if verdict is None and manifest.paused:
        verdict = shared_memory.allowed  # a dry run is a write too, and nothing is applied now
    if verdict is None:
        verdict = await shared_memory.ask(cluster, manifest, settings)

    password, router_key = "", ""
    if manifest.redis.embedded is not None:
        name = names.redis_password_name(manifest.name)
        password = await _own_word(cluster, key, uid, name, "password", unstored)
    if manifest.decode is not None and manifest.router.type is not RouterType.NONE:
        name = names.router_key_name(manifest.name)
        router_key = await _own_word(cluster, key, uid, name, "control-plane-key", unstored)
    tls, due = await _certificates(cluster, settings, manifest, uid, now, unstored)

    images: dict[str, ImagesInUse] = {}
    upgrades: dict[str, str] = {}
    for component in ENGINES:
        if engines.part_of(manifest, component) is None:
            continue
        engine = await workload(DEPLOYMENT, component)
        if engine is not None:
            images[component] = engines.images_in_use(engine)
            upgrades[component] = _annotations(engine).get(engines.UPGRADE_ANNOTATION, "")
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


async def _own_workload(
    cluster: Cluster, key: Key, uid: str, name: ObjectName, live: Mapping[ObjectName, Stored]
) -> Json | None:
    """A workload that the KVCache controls. What the watch does not show is asked for: were an engine's Deployment
    taken for absent, its pods would roll to the default images."""
    child = live.get(name)
    found = child.load() if child is not None else await cluster.get(name[0], key[0], name[1])
    return found if found is not None and controller_uid(found) == uid else None


async def _own_word(
    cluster: Cluster, key: Key, uid: str, name: str, field: str, unstored: dict[str, dict[str, str]]
) -> str:
    """The generated text under `field` of our Secret `name`, made anew when it is missing there."""
    found = (await own_secret(cluster, key, uid, name)).get(field)
    if found:
        unstored.pop(name, None)
        return found
    return unstored.setdefault(name, {field: secrets.token_urlsafe(32)})[field]


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
    cluster: Cluster,
    settings: Settings,
    manifest: KVCacheManifest,
    uid: str,
    now: datetime,
    unstored: dict[str, dict[str, str]],
) -> tuple[TlsMaterial | None, datetime | None]:
    if manifest.tls.mode is not TlsMode.AUTO:
        return None, None
    key: Key = (manifest.namespace, manifest.name)
    name = names.authority_name(manifest.name)
    stored = await own_secret(cluster, key, uid, name)
    plan = authority.plan(
        stored or unstored.get(name),
        now=now,
        name=manifest.name,
        namespace=manifest.namespace,
        settings=settings,
    )
    if stored:
        unstored.pop(name, None)
    else:
        unstored[name] = dict(plan.material.authority_data)
    if plan.steps and not manifest.paused:
        log.info(
            "certificates namespace=%s name=%s steps=%s",
            manifest.namespace, manifest.name, "; ".join(plan.steps),
        )  # fmt: skip
    return plan.material, plan.due


def _annotations(obj: Mapping[str, Any]) -> Mapping[str, str]:
    found: Mapping[str, str] = obj["metadata"].get("annotations") or {}
    return found
