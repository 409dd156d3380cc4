"""One operator per watched namespace, or per cluster: a coordination.k8s.io Lease that the working operator renews.

Named `larder-operator`: in each watched namespace, or, when all are watched, in the operator's own. The later operator
finds it held, says so, stays off and takes over when the holder has not renewed for its duration. Renewals are the one
write that an idle operator makes. A holder that can't renew stops in time: `hold` returns, and the process ends.

An operator of the whole cluster leaves a namespace whose own Lease is held to that holder (`Others`), whoever came
first: the namespaced one may not look elsewhere.

Times of different machines are not compared: a candidate measures by its own clock how long the holder's renewTime has
not moved.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from datetime import UTC, datetime

from cacheoperator import metrics
from cacheoperator.cluster import Cluster, Json
from cacheoperator.errors import ClusterError, Conflict, Forbidden
from cacheoperator.kinds import LEASE
from cacheoperator.names import FIELD_MANAGER

log = logging.getLogger(__name__)

LEASE_NAME = FIELD_MANAGER


class Lease:
    """One Lease. `identity` must differ between operators; `duration_s` is how long a silent holder keeps it."""

    def __init__(
        self,
        cluster: Cluster,
        namespace: str,
        identity: str,
        *,
        duration_s: float = 15.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._namespace = namespace
        self._identity = identity
        self._duration_s = duration_s
        self._clock = clock
        self._seen: tuple[str, str] | None = None
        self._seen_at = 0.0
        self.holder = ""
        """Who holds it, as far as we know; "" for nobody."""
        self.is_given_back = False
        """Whether somebody held it once, and nobody did at the last `look`."""

    async def acquire(self) -> None:
        """Returns when the lease is ours; until then says who has it."""
        told = ""
        while True:
            try:
                if await self.try_once():
                    log.info("lease held namespace=%s identity=%s", self._namespace, self._identity)
                    metrics.is_leader.set(1)
                    return
            except ClusterError as error:
                log.warning(
                    "cannot take the lease namespace=%s: %s", self._namespace, error.message
                )
            if self.holder and self.holder != told:
                told = self.holder
                log.warning(
                    "another operator works here, staying off: holder=%s lease=%s/%s",
                    self.holder, self._namespace, LEASE_NAME,
                )  # fmt: skip
            await asyncio.sleep(self._duration_s / 5)

    async def hold(self) -> str:
        """Renew for as long as it goes; returns why it ended, before anyone else may take it: also an API server that
        does not answer holds nothing up."""
        end = self._clock() + self._duration_s * 0.8
        while True:
            await asyncio.sleep(min(self._duration_s / 3, max(0.0, end - self._clock())))
            begin = self._clock()
            try:
                async with asyncio.timeout(max(self._duration_s * 0.05, end - begin)):
                    is_ours = await self.try_once()
            except (ClusterError, TimeoutError) as error:
                problem = str(error) or "the API server does not answer"
                log.warning("cannot renew the lease namespace=%s: %s", self._namespace, problem)
                if self._clock() >= end:
                    metrics.is_leader.set(0)
                    return (
                        f"the lease {self._namespace}/{LEASE_NAME} could not be renewed: {problem}"
                    )
                continue
            if not is_ours:
                metrics.is_leader.set(0)
                return f"the lease {self._namespace}/{LEASE_NAME} was taken by {self.holder}"
            # The renewal may have reached the server as early as this.
            end = begin + self._duration_s * 0.8

    async def release(self) -> None:
        """Give it back, so that the next operator need not wait. Best effort."""
        try:
            found = await self._cluster.get(LEASE, self._namespace, LEASE_NAME)
            if found is not None and found["spec"].get("holderIdentity") == self._identity:
                found["spec"]["holderIdentity"] = ""
                await self._cluster.replace(found)
        except ClusterError as error:
            log.info("cannot give the lease back: %s", error.message)

    async def look(self) -> str:
        """Who else holds it, "" for nobody. Writes nothing."""
        found = await self._cluster.get(LEASE, self._namespace, LEASE_NAME)
        spec = (found or {}).get("spec") or {}
        self.holder = str(spec.get("holderIdentity") or "")
        self.is_given_back = found is not None and not self.holder
        is_free = self.holder in ("", self._identity) or self._is_left_alone(spec)
        return "" if is_free else self.holder

    async def try_once(self) -> bool:
        """Take or renew it if it is free, ours or left alone; whether it is ours now."""
        found = await self._cluster.get(LEASE, self._namespace, LEASE_NAME)
        try:
            if found is None:
                await self._cluster.create(self._body())
                self.holder = self._identity
                return True
            spec = found.get("spec") or {}
            self.holder = str(spec.get("holderIdentity") or "")
            if self.holder not in ("", self._identity) and not self._is_left_alone(spec):
                return False
            body = self._body()
            transitions = int(spec.get("leaseTransitions") or 0)
            if self.holder != self._identity:
                transitions += 1
            body["metadata"]["resourceVersion"] = found["metadata"]["resourceVersion"]
            body["spec"]["leaseTransitions"] = transitions
            await self._cluster.replace(body)
        except Conflict:
            return False  # someone was faster; the next look tells who
        self.holder = self._identity
        return True

    def _is_left_alone(self, spec: Json) -> bool:
        seen = (str(spec.get("holderIdentity")), str(spec.get("renewTime")))
        if seen != self._seen:
            self._seen, self._seen_at = seen, self._clock()
            return False
        duration_s = float(spec.get("leaseDurationSeconds") or self._duration_s)
        return self._clock() - self._seen_at > duration_s

    def _body(self) -> Json:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        return {
            "apiVersion": LEASE.api_version,
            "kind": LEASE.kind,
            "metadata": {"name": LEASE_NAME, "namespace": self._namespace},
            "spec": {
                "holderIdentity": self._identity,
                "leaseDurationSeconds": int(self._duration_s),
                "renewTime": now,
            },
        }


GONE = "nobody (an operator that may be restarting is waited for)"


class Others:
    """Operators that have a namespace of their own, for one that watches the whole cluster as `identity`. A namespace
    is looked at when it is asked for, at most every `again_s` seconds.

    A namespace whose Lease is free is left alone for another `gone_after_s` seconds: its operator may only be
    restarting, and two that take turns within seconds would undo each other's work. So does one that has just begun
    and was not there to see it go.
    """

    def __init__(
        self,
        cluster: Cluster,
        identity: str,
        *,
        again_s: float = 5.0,
        gone_after_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._identity = identity
        self._again_s = again_s
        self._gone_after_s = gone_after_s
        self._clock = clock
        self._leases: dict[str, Lease] = {}
        self._held: dict[str, tuple[float, str]] = {}
        """When a namespace was last seen to be held, and by whom."""
        self._known: dict[str, tuple[float, str]] = {}

    async def holder(self, namespace: str) -> str:
        """Who works in `namespace` instead of us, "" for nobody. Raises Unreachable."""
        at, known = self._known.get(namespace, (-self._again_s, ""))
        if self._clock() - at < self._again_s:
            return known
        lease = self._leases.setdefault(
            namespace, Lease(self._cluster, namespace, self._identity, clock=self._clock)
        )
        try:
            found = await lease.look()
        except Forbidden:
            found = ""  # rules of an older chart
        if found:
            self._held[namespace] = (self._clock(), found)
        elif lease.is_given_back and namespace not in self._known:
            self._held[namespace] = (self._clock(), GONE)
        if not found and namespace in self._held:
            seen_at, holder = self._held[namespace]
            found = holder if self._clock() - seen_at < self._gone_after_s else ""
        if found != known:
            log.warning(
                "%s namespace=%s holder=%s lease=%s",
                "another operator works here, staying off" if found else "the other operator went",
                namespace, found or known, LEASE_NAME,
            )  # fmt: skip
        self._known[namespace] = (self._clock(), found)
        return found
