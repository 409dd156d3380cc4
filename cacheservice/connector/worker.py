"""The worker half, one per rank: copies pages between the engine and the cache on a few threads of its own.

Invariants. Every load that the scheduler half authorised is reported finished exactly once, failed or not, and only
after the last byte was written to its pages. Every save is reported exactly once, and only after the last byte was
read from its pages. Both end within their deadline. Nothing here raises into vLLM for anything that the agent does.

Called by: connector.py, in the rank's model-runner thread. Owns its client, its threads and the page plan.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cacheservice.connector.config import ConnectorConfig
from cacheservice.connector.copies import Copier, Fence
from cacheservice.connector.metadata import (
    LarderMetadata,
    LarderWorkerMetadata,
    LoadJob,
    LoadReport,
    SaveJob,
    SaveReport,
)  # fmt: skip
from cacheservice.connector.namespace import RankFacts
from cacheservice.connector.pages import GroupPages
from cacheservice.connector.pools import start_threads, submit_once
from cacheservice.connector.shards import RankShards
from cacheservice.connector.stats import LarderStats, StatsRecorder
from cacheservice.core.outcomes import Outcome, OutcomeKind, Reason

logger = logging.getLogger(__name__)

NUM_LOAD_THREADS = 4
NUM_SAVE_THREADS = 2
PIN_MARGIN_S = 1.0
"""A save is given up so long before its pins must be released, for the commit or abort that follows."""
STORED = (Reason.HIT, Reason.DUPLICATE)


class WorkerHalf:
    """See the module's docstring."""

    def __init__(
        self,
        config: ConnectorConfig,
        client: Any,
        pages: Sequence[GroupPages],
        facts: RankFacts,
        copier: Copier,
        *,
        tensor_parallel_size: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Own `client` and `copier` (closed with this half); `pages[g]` are this rank's pages of group g."""
        self._config = config
        self._client = client
        self._pages = tuple(pages)
        self._facts = facts
        self._copier = copier
        self._tensor_parallel_size = tensor_parallel_size
        self._clock = clock
        self._lock = threading.Lock()
        self._shards: RankShards | None = None
        self._ended_loads: dict[str, tuple[LoadJob, LoadReport]] = {}
        self._ended_saves: dict[int, SaveReport] = {}
        self._load_reports: dict[int, LoadReport] = {}
        self._is_closing = False
        self._loads = ThreadPoolExecutor(NUM_LOAD_THREADS, thread_name_prefix="larder-load")
        self._saves = ThreadPoolExecutor(NUM_SAVE_THREADS, thread_name_prefix="larder-save")
        self._stats = StatsRecorder()

    # ------------------------------------------------------------------ one step of the engine

    def see_metadata(self, metadata: LarderMetadata) -> None:
        """Take a new namespace, if there is one."""
        if metadata.plan is None:
            return
        if self._shards is None:
            start_threads(self._loads, NUM_LOAD_THREADS)
            start_threads(self._saves, NUM_SAVE_THREADS)
        self._shards = RankShards(
            metadata.plan,
            self._pages,
            tp_rank=self._facts.tp_rank,
            tensor_parallel_size=self._tensor_parallel_size,
        )
        self._client.open_namespace(metadata.plan.spec)

    def start_loads(self, metadata: LarderMetadata) -> None:
        """Begin the loads of this step; returns at once. One that finds no thread has failed."""
        if not metadata.loads:
            return
        # Not before what the engine has launched: it may still zero these blocks, or write them for their last owner.
        fence = self._copier.fence()
        for job in metadata.loads:
            started = self._clock()
            if not submit_once(self._loads, self._load, job, fence, started):
                self._end_load(job, job.first_chunk, Reason.INTERNAL, 0, started)

    def start_saves(self, metadata: LarderMetadata) -> None:
        """Begin the saves of this step, whose forward pass is done; returns at once. One that finds no thread is
        reported as incomplete."""
        if not metadata.saves:
            return
        fence = self._copier.fence()
        for job in metadata.saves:
            started = self._clock()
            if not submit_once(self._saves, self._save, job, fence, started):
                self._end_save(job, Reason.INTERNAL, 0, 0, started)

    def take_ended_loads(self) -> tuple[set[str], set[str]]:
        """Requests whose load has ended since the last call, and those of them whose load failed."""
        with self._lock:
            ended, self._ended_loads = self._ended_loads, {}
        failed = set()
        for request_id, (job, report) in ended.items():
            if (
                report.first_failed_chunk is None
                and self._shards is not None
                and job.namespace != self._shards.plan.digest
            ):
                report = LoadReport(
                    1, job.first_chunk, Reason.CANCELLED
                )  # the cache was reset meanwhile
            if report.first_failed_chunk is not None:
                failed.add(request_id)
            self._load_reports[job.load_id] = report
        return set(ended), failed

    def take_reports(self) -> LarderWorkerMetadata | None:
        """What the scheduler half has to know; None when there is nothing."""
        with self._lock:
            saves, self._ended_saves = self._ended_saves, {}
        loads, self._load_reports = self._load_reports, {}
        facts = [] if self._shards is not None else [self._facts]
        if not (loads or saves or facts):
            return None
        return LarderWorkerMetadata(loads, saves, facts)

    def drain_stats(self) -> LarderStats | None:
        """Counts since the last call."""
        return self._stats.drain()

    def shutdown(self) -> None:
        """Stop copying, then end threads and client: the pages may be freed after this. Idempotent."""
        self._is_closing = True
        self._loads.shutdown(wait=False, cancel_futures=True)
        self._saves.shutdown(wait=False, cancel_futures=True)
        self._client.close()
        self._loads.shutdown(wait=True)
        self._saves.shutdown(wait=True)
        self._copier.close()

    # ------------------------------------------------------------------ loads

    def _load(self, job: LoadJob, fence: Fence, submitted_at: float) -> None:
        started = self._clock()
        try:
            first_failed, reason, num_bytes = self._copy_in(job, fence, submitted_at)
        except Exception:
            logger.exception("load failed for a reason of our own request=%s", job.request_id)
            first_failed, reason, num_bytes = job.first_chunk, Reason.INTERNAL, 0
        self._end_load(job, first_failed, reason, num_bytes, started)

    def _end_load(
        self, job: LoadJob, first_failed: int | None, reason: Reason, num_bytes: int, started: float
    ) -> None:
        with self._lock:
            self._ended_loads[job.request_id] = (job, LoadReport(1, first_failed, reason))
        asked = job.stop_token - job.start_token
        served = asked if first_failed is None else 0
        self._count(OutcomeKind.LOAD, reason, job.request_id, asked, served, started, num_bytes)

    def _copy_in(
        self, job: LoadJob, fence: Fence, submitted_at: float
    ) -> tuple[int | None, Reason, int]:
        """(first failed chunk or None, why, bytes copied)."""
        shards = self._shards
        left_s = self._config.deadlines.load_s - (self._clock() - submitted_at)
        if shards is None or shards.plan.digest != job.namespace:
            return job.first_chunk, Reason.CANCELLED, 0
        if left_s <= 0:
            return job.first_chunk, Reason.DEADLINE, 0
        reads = shards.reads(job, self._copier, fence)
        if reads is None:
            return job.first_chunk, Reason.INTERNAL, 0
        if not reads:
            return None, Reason.HIT, 0  # local chunks end there: nothing of what was before is read
        results = self._client.retrieve(
            job.namespace,
            [read.shard for read in reads],
            lookup_lease=job.lookup_lease,
            epoch=job.epoch,
            deadline_s=left_s,
        )
        failed = [
            (read.chunk_number, r.reason)
            for read, r in zip(reads, results, strict=True)
            if r.reason is not Reason.HIT
        ]
        num_bytes = sum(r.num_bytes for r in results)
        if not failed:
            return None, Reason.HIT, num_bytes
        chunk, reason = min(failed, key=lambda f: f[0])
        return chunk, reason, num_bytes

    # ------------------------------------------------------------------ saves

    def _save(self, job: SaveJob, fence: Fence, submitted_at: float) -> None:
        started = self._clock()
        try:
            reason, num_bytes, num_stored = self._copy_out(job, fence, submitted_at)
        except Exception:
            logger.exception("save failed for a reason of our own chunks=%d", len(job.chunks))
            reason, num_bytes, num_stored = Reason.INTERNAL, 0, 0
        self._end_save(job, reason, num_bytes, num_stored, started)

    def _end_save(
        self, job: SaveJob, reason: Reason, num_bytes: int, num_stored: int, started: float
    ) -> None:
        with self._lock:
            self._ended_saves[job.save_id] = SaveReport(1, reason in STORED)
        tokens = self._shards.plan.tokens_per_chunk if self._shards is not None else 0
        self._count(
            OutcomeKind.SAVE,
            reason,
            job.request_id,
            len(job.chunks) * tokens,
            num_stored * tokens,
            started,
            num_bytes,
        )

    def _copy_out(self, job: SaveJob, fence: Fence, submitted_at: float) -> tuple[Reason, int, int]:
        """(how the batch ended, bytes stored, chunks stored)."""
        shards = self._shards
        give_up_at = submitted_at + max(0.0, self._config.deadlines.pin_s - PIN_MARGIN_S)
        if shards is None or shards.plan.digest != job.namespace:
            return Reason.CANCELLED, 0, 0
        left_s = give_up_at - self._clock()
        if left_s <= 0:
            return Reason.DEADLINE, 0, 0
        writes = shards.writes(job, self._copier, fence)
        if not writes:
            return Reason.DUPLICATE, 0, 0  # other ranks write all of it

        def gives_up() -> bool:
            return self._is_closing or self._clock() >= give_up_at or self._shards is not shards

        results = self._client.store(job.namespace, writes, deadline_s=left_s, give_up=gives_up)
        failed = [r.reason for r in results if r.reason not in STORED]
        num_bytes = sum(r.num_bytes for r in results)
        stored = {w.chunk for w, r in zip(writes, results, strict=True) if r.reason is Reason.HIT}
        if failed:
            return failed[0], num_bytes, len(stored)
        return (Reason.HIT if stored else Reason.DUPLICATE), num_bytes, len(stored)

    def _count(
        self,
        kind: OutcomeKind,
        reason: Reason,
        request_id: str,
        asked: int,
        served: int,
        started: float,
        num_bytes: int,
    ) -> None:
        duration_s = self._clock() - started
        self._stats.outcome(
            kind, reason, asked=asked, served=served, duration_s=duration_s, num_bytes=num_bytes
        )
        self._client.report(
            Outcome(kind, reason, request_id, asked, served, round(duration_s * 1000), num_bytes)
        )
        logger.debug(
            "%s ended request=%s reason=%s tokens=%d bytes=%d ms=%.1f",
            kind.name.lower(), request_id, reason.label, asked, num_bytes, duration_s * 1000,
        )  # fmt: skip
