"""Events on KVCaches, `kubectl events --for kvc/NAME`: the same thing twice is one event with a count.

The name of an event is made of the KVCache's UID, reason and message, so a restart of the operator repeats none.
Events are told at most: what can't be written is logged.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from datetime import datetime

from cacheoperator import metrics
from cacheoperator.cluster import Cluster
from cacheoperator.errors import ClusterError, Conflict
from cacheoperator.kinds import EVENT
from cacheoperator.names import API_VERSION, FIELD_MANAGER, KIND

log = logging.getLogger(__name__)

longest_message = 1000
"""Characters; the API server takes 1,024 bytes."""


class Teller:
    """`now` is aware; `instance` is the pod that speaks."""

    def __init__(self, cluster: Cluster, now: Callable[[], datetime], instance: str) -> None:
        self._cluster = cluster
        self._now = now
        self._instance = instance

    async def tell(
        self, namespace: str, name: str, uid: str, type_: str, reason: str, message: str
    ) -> None:
        """Write one event, `type_` Normal or Warning."""
        message = message.encode()[:longest_message].decode(errors="ignore")
        digest = hashlib.sha256(f"{uid}|{reason}|{message}".encode()).hexdigest()[:16]
        at = self._now().strftime("%Y-%m-%dT%H:%M:%SZ")
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{name}.{digest}", "namespace": namespace},
            "involvedObject": {
                "apiVersion": API_VERSION,
                "kind": KIND,
                "name": name,
                "namespace": namespace,
                "uid": uid,
            },
            "type": type_,
            "reason": reason,
            "message": message,
            "source": {"component": FIELD_MANAGER},
            "reportingComponent": FIELD_MANAGER,
            "reportingInstance": self._instance,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        metrics.events.labels(type_, reason).inc()
        try:
            try:
                await self._cluster.create(event)
            except Conflict:
                known = await self._cluster.get(EVENT, namespace, f"{name}.{digest}")
                count = int((known or {}).get("count") or 1)
                change = {"count": count + 1, "lastTimestamp": at}
                await self._cluster.patch(EVENT, namespace, f"{name}.{digest}", change)
        except ClusterError as error:
            log.warning(
                "cannot write event namespace=%s name=%s reason=%s: %s",
                namespace, name, reason, error.message,
            )  # fmt: skip
