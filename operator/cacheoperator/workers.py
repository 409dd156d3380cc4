"""Workers that take KVCaches from the queue, and the pass over all of them every `resync_s` seconds.

`health` is what /healthz asks: a pass that is overdue or a reconcile that hangs means that the process is to be
restarted. A failing reconcile never ends a worker; what it raised is told (see `bugs`) and the key comes again with
backoff.
"""

from __future__ import annotations

import asyncio
import logging
import time

from cacheoperator import metrics
from cacheoperator.bugs import Bugs
from cacheoperator.errors import ClusterError
from cacheoperator.queue import Queue
from cacheoperator.reconcile import Look, Reconciler
from cacheoperator.watch import Key, Watched

log = logging.getLogger(__name__)

reconcile_limit_s = 120.0
"""A reconcile that takes longer is given up: every call inside has a shorter limit of its own."""


class Workers:
    """Owned by one event loop; `run` until cancelled."""

    def __init__(
        self,
        *,
        queue: Queue[Key],
        reconciler: Reconciler,
        watched: Watched,
        num_workers: int,
        resync_s: float,
    ) -> None:
        self._queue = queue
        self._reconciler = reconciler
        self._watched = watched
        self._num_workers = num_workers
        self._resync_s = resync_s
        self._left: set[Key] = set()
        self._pass_begin: float | None = None
        self._pass_end = time.monotonic()
        self._busy: dict[Key, float] = {}
        self._bugs = Bugs(log, time.monotonic)
        self.num_passes = 0

    async def run(self) -> None:
        """Work. The first pass begins at once."""
        async with asyncio.TaskGroup() as group:
            for _ in range(self._num_workers):
                group.create_task(self._work())
            group.create_task(self._pass_regularly())

    def health(self) -> str:
        """ "" when all is well, else what is wrong."""
        now = time.monotonic()
        limit_s = 2 * self._resync_s + 2 * reconcile_limit_s
        if now - self._pass_end > limit_s:
            return f"no pass over all KVCaches ended in {limit_s:.0f} s"
        for key, since in self._busy.items():
            if now - since > 2 * reconcile_limit_s:
                return f"the reconcile of {'/'.join(key)} hangs"
        return ""

    async def _work(self) -> None:
        while True:
            key = await self._queue.get()
            self._busy[key] = time.monotonic()
            look, outcome = await self._reconcile(key)
            took_s = time.monotonic() - self._busy.pop(key)
            metrics.reconcile_duration_seconds.observe(took_s)
            metrics.reconciles.labels(outcome).inc()
            if look.has_failed:
                after_s = self._queue.fail(key)
                log.debug("again namespace=%s name=%s after_s=%.1f", *key, after_s)
            else:
                self._queue.done(key)
            if look.again_s is not None:
                self._queue.put(key, look.again_s)
            metrics.queue_length.set(self._queue.num_due())
            metrics.ready_resources.set(len(self._reconciler.ready))
            self._note_pass(key)

    async def _reconcile(self, key: Key) -> tuple[Look, str]:
        try:
            async with asyncio.timeout(reconcile_limit_s):
                look = await self._reconciler.reconcile(key)
        except ClusterError as error:
            log.warning("cannot reconcile namespace=%s name=%s: %s", *key, error.message)
            return Look(has_failed=True), "failed"
        except TimeoutError:
            log.error("a reconcile took too long namespace=%s name=%s", *key)
            return Look(has_failed=True), "failed"
        except Exception as error:  # noqa: BLE001 - told, and a worker lives on
            self._bugs.tell(error, f"the reconcile of kvcache {'/'.join(key)} failed")
            return Look(has_failed=True), "failed"
        return look, "failed" if look.has_failed else "done"

    async def _pass_regularly(self) -> None:
        while True:
            keys = self._watched.keys()
            metrics.resources.set(len(keys))
            self._pass_begin = time.monotonic()
            self._left = set(keys)
            for key in keys:
                self._queue.put(key)
            self._note_pass(None)
            await asyncio.sleep(self._resync_s)
            try:
                await self._watched.forget_deleted()
            except ClusterError as error:
                log.warning("cannot compare with the API server: %s", error.message)
            except Exception as error:  # noqa: BLE001 - told, and a worker lives on
                self._bugs.tell(error, "comparing with the API server failed")

    def _note_pass(self, key: Key | None) -> None:
        if key is not None:
            self._left.discard(key)
        if not self._left and self._pass_begin is not None:
            self._pass_end = time.monotonic()
            self.num_passes += 1
            took_s = self._pass_end - self._pass_begin
            self._pass_begin = None
            metrics.full_pass_duration_seconds.set(took_s)
            metrics.full_pass_end_seconds.set(time.time())
            log.info("full pass took_s=%.2f", took_s)
