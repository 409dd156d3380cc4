"""Ranks and shards: what several worker halves store and load together, and how their reports are merged."""

from __future__ import annotations

import time
from types import SimpleNamespace

import engines  # noqa: F401 - sets vLLM's environment
import pytest
import torch
from connector_fakes import FakeCache, FakeClient

from cacheservice.connector.config import parse_extra_config
from cacheservice.connector.copies import CpuCopier
from cacheservice.connector.metadata import (
    LarderMetadata,
    LarderWorkerMetadata,
    LoadJob,
    LoadReport,
    SaveChunk,
    SaveJob,
    SaveReport,
)  # fmt: skip
from cacheservice.connector.namespace import EngineFacts, RankFacts, RankGroup, plan_namespace
from cacheservice.connector.pages import group_pages
from cacheservice.connector.worker import WorkerHalf
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupKind
from cacheservice.core.outcomes import Outcome, Reason

HEADS, BLOCKS, TOKENS, CONTENT, LAYERS, CHUNK = 4, 12, 16, 8, 2, 64
CONFIG = parse_extra_config({"socket_dir": "/nowhere"}, kv_role="kv_both")


class Fleet:
    """All ranks of one engine of a tensor parallel size, over slices of one set of pages."""

    def __init__(
        self, cache: FakeCache, tp: int, sizes: tuple[int, ...], *, kind=GroupKind.FULL, fill: bool
    ) -> None:
        self.cache, self.tp = cache, tp
        heads = 1 if kind is GroupKind.MLA else HEADS
        generator = torch.Generator().manual_seed(5)
        shape = (BLOCKS, heads, TOKENS, CONTENT)
        self.whole = [
            torch.rand(shape, generator=generator) if fill else torch.zeros(shape)
            for _ in range(LAYERS)
        ]
        local = max(1, heads // tp)
        self.views, self.halves, facts = [], [], []
        for rank in range(tp):
            first = 0 if heads == 1 else rank * heads // tp
            views = [layer[:, first : first + local].contiguous() for layer in self.whole]
            named = [(f"layers.{i}", view) for i, view in enumerate(views)]
            pages = group_pages(named, num_blocks=BLOCKS, num_heads=local)
            group = RankGroup(
                kind,
                TOKENS,
                TOKENS,
                tuple(name for name, _ in named),
                pages.block_bytes,
                local,
                is_head_major=True,
                is_replicated=kind is GroupKind.MLA,
                window_tokens=None,
                details=(),
            )
            fact = RankFacts(rank, 0, "LBHNC", "X", "", (group,))
            facts.append(fact)
            self.views.append(views)
            self.halves.append(
                WorkerHalf(
                    CONFIG, FakeClient(cache), [pages], fact, CpuCopier(), tensor_parallel_size=tp
                )
            )
        self.plan = plan_namespace(EngineFacts({}, HEADS, TOKENS, tp, sizes, CHUNK), facts)
        for half in self.halves:
            half.see_metadata(LarderMetadata(plan=self.plan))

    def save(self, blocks: list[int]) -> SaveReport:
        chunks = tuple(
            SaveChunk(key(n), key(n - 1) if n else None, n, (tuple(blocks[4 * n : 4 * n + 4]),))
            for n in range(len(blocks) // 4)
        )
        for half in self.halves:
            half.start_saves(LarderMetadata(saves=[SaveJob(1, "r", self.plan.digest, chunks)]))
        return self.reports("saves")[1]

    def load(self, blocks: list[int], start: int, stop: int, **changes) -> LoadReport:
        first, last = start // CHUNK, -(-stop // CHUNK)
        job = LoadJob(
            load_id=1, request_id="r", namespace=changes.get("namespace", self.plan.digest),
            epoch=changes.get("epoch", self.cache.epoch), lookup_lease=0, start_token=start, stop_token=stop,
            first_chunk=first, chunks=tuple(key(n) for n in range(first, last)), block_ids=(tuple(blocks),),
        )  # fmt: skip
        for half in self.halves:
            half.start_loads(LarderMetadata(loads=[job]))
        return self.reports("loads")[1]

    def reports(self, name: str):
        merged = LarderWorkerMetadata()
        until = time.monotonic() + 10
        waiting = list(self.halves)
        while waiting and time.monotonic() < until:
            for half in list(waiting):
                half.take_ended_loads()
                report = half.take_reports()
                if report is not None and getattr(report, name):
                    merged = merged.aggregate(report)
                    waiting.remove(half)
        assert not waiting
        return getattr(merged, name)

    def bytes_of(self, rank: int, block: int) -> bytes:
        return b"".join(view[block].numpy().tobytes() for view in self.views[rank])

    def close(self) -> None:
        for half in self.halves:
            half.shutdown()


def key(number: int) -> ChunkKey:
    return ChunkKey((number + 1).to_bytes(32, "big"))


@pytest.fixture
def fleet():
    made = []

    def build(*arguments, **options):
        made.append(Fleet(*arguments, **options))
        return made[-1]

    yield build
    for one in made:
        one.close()


@pytest.mark.parametrize("writer", [1, 2, 4, 8])
@pytest.mark.parametrize("reader", [1, 2, 4, 8])
def test_engines_of_other_sizes_read_each_others_shards(fleet, writer, reader):
    """Eight ranks of four heads hold each head twice: they take turns in writing."""
    cache = FakeCache()
    sizes = tuple(sorted({writer, reader}))
    source = fleet(cache, writer, sizes, fill=True)
    target = fleet(cache, reader, sizes, fill=False)
    assert source.plan.digest == target.plan.digest
    assert source.save([3, 1, 4, 2, 9, 8, 7, 6]) == SaveReport(writer, True)
    num_shards = source.plan.spec.groups[0].num_shards
    assert len(cache.shards) == 2 * num_shards
    assert (
        sum(half._client.num_stored for half in source.halves) == 2 * num_shards
    )  # nobody stored twice
    report = target.load([5, 6, 7, 8, 9, 10, 11], 16, 128)
    assert (report.num_ranks, report.first_failed_chunk) == (reader, None)
    for rank in range(reader):
        for block, original in zip([5, 6, 7, 8, 9, 10, 11], [1, 4, 2, 9, 8, 7, 6], strict=True):
            first = rank * HEADS // reader
            local = max(1, HEADS // reader)
            wanted = b"".join(
                layer[original][first : first + local].numpy().tobytes() for layer in source.whole
            )
            assert target.bytes_of(rank, block) == wanted
        assert not any(view[4].any() for view in target.views[rank])


def test_latent_pages_are_written_by_one_rank_each_and_read_by_all(fleet):
    cache = FakeCache()
    source = fleet(cache, 2, (2,), kind=GroupKind.MLA, fill=True)
    source.save([3, 1, 4, 2, 9, 8, 7, 6])
    assert [half._client.num_stored for half in source.halves] == [1, 1]
    target = fleet(cache, 2, (2,), kind=GroupKind.MLA, fill=False)
    assert target.load([1, 2, 3, 4, 5, 6, 7, 8], 0, 128).first_failed_chunk is None
    for rank in range(2):
        assert target.bytes_of(rank, 2) == source.bytes_of(0, 1)


def test_a_load_of_one_rank_that_fails_fails_at_its_first_chunk(fleet):
    cache = FakeCache()
    source = fleet(cache, 2, (2,), fill=True)
    source.save([3, 1, 4, 2, 9, 8, 7, 6])
    cache.fail_retrieve = lambda read: (
        Reason.CHECKSUM if read.shard == 1 and read.chunk == key(1) else None
    )
    report = source.load([1, 2, 3, 4, 5, 6, 7, 8], 0, 128)
    assert report == LoadReport(2, 1, Reason.CHECKSUM)


def test_a_load_of_another_incarnation_or_namespace_fails(fleet):
    cache = FakeCache()
    source = fleet(cache, 1, (1,), fill=True)
    source.save([3, 1, 4, 2])
    assert source.load([1, 2, 3, 4], 0, 64, epoch=99).reason is Reason.EPOCH_CHANGED
    assert source.load([1, 2, 3, 4], 0, 64, namespace=bytes(32)).reason is Reason.CANCELLED


@pytest.mark.parametrize(
    ("blocks", "start", "stop"),
    [([1, 2, 3, 4], 8, 64), ([1, 2], 0, 64), ([1, 0, 3, 4], 0, 64), ([], 0, 64)],
)
def test_ranges_that_cannot_be_loaded_safely_fail(fleet, blocks, start, stop):
    cache = FakeCache()
    source = fleet(cache, 1, (1,), fill=True)
    source.save([3, 1, 4, 2])
    assert source.load(blocks, start, stop).first_failed_chunk == 0


def test_a_save_that_waited_too_long_is_given_up(fleet):
    cache = FakeCache()
    source = fleet(cache, 1, (1,), fill=True)
    now = [0.0]
    source.halves[0]._clock = lambda: now[0]
    real = source.halves[0]._copy_out

    def late(job, submitted_at):
        now[0] += 20.0
        return real(job, submitted_at)

    source.halves[0]._copy_out = late
    assert source.save([3, 1, 4, 2]) == SaveReport(1, False)
    assert not cache.shards


def test_a_fault_of_our_own_is_a_failed_load_and_a_failed_save(fleet, caplog):
    cache = FakeCache()
    source = fleet(cache, 1, (1,), fill=True)
    source.halves[0]._client.store = None
    source.halves[0]._client.retrieve = None
    assert source.save([3, 1, 4, 2]) == SaveReport(1, False)
    assert source.load([1, 2, 3, 4], 0, 64) == LoadReport(1, 0, Reason.INTERNAL)


def test_shutting_down_leaves_no_copy_behind(fleet):
    """The pages may be freed after shutdown, so no thread may touch them any more."""
    cache = FakeCache()
    source = fleet(cache, 1, (1,), fill=True)
    cache.fail_store = lambda write: time.sleep(0.02)
    for _ in range(5):
        source.halves[0].start_saves(
            LarderMetadata(
                saves=[
                    SaveJob(
                        1, "r", source.plan.digest, (SaveChunk(key(0), None, 0, ((1, 2, 3, 4),)),)
                    )
                ]
            )
        )
    source.close()
    num = len(cache.outcomes)
    time.sleep(0.1)
    assert len(cache.outcomes) == num
    source.close()


def test_counts_reach_prometheus_and_the_log():
    from prometheus_client import REGISTRY, Counter, Gauge, Histogram
    from vllm.v1.metrics.prometheus import unregister_vllm_metrics

    from cacheservice.connector.connector import LarderConnector
    from cacheservice.connector.stats import StatsRecorder
    from cacheservice.core.outcomes import OutcomeKind

    recorder, other = StatsRecorder(), StatsRecorder()
    recorder.outcome(OutcomeKind.LOOKUP, Reason.HIT, asked=128, served=64, duration_s=0.5)
    recorder.event("none_answers", 3)
    other.outcome(
        OutcomeKind.LOAD, Reason.HIT, asked=64, served=64, duration_s=0.25, num_bytes=1000
    )
    stats = recorder.drain().aggregate(other.drain())
    assert recorder.drain() is None
    rebuilt = LarderConnector.build_kv_connector_stats(dict(stats.to_dict()))
    assert rebuilt.reduce()["tokens/lookup/served"] == 64
    assert not rebuilt.is_empty()

    class Config:
        kv_transfer_config = None

    unregister_vllm_metrics()  # an engine that ran in this process before has left its own there
    metrics = LarderConnector.build_prom_metrics(
        Config,
        {Counter: Counter, Gauge: Gauge, Histogram: Histogram},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    try:
        metrics.observe(rebuilt.data)
        metrics.observe(rebuilt.data)
        labels = {"model_name": "m", "engine": "0"}
        assert (
            REGISTRY.get_sample_value(
                "vllm:larder_outcomes_total", {**labels, "kind": "lookup", "reason": "hit"}
            )
            == 2
        )
        assert (
            REGISTRY.get_sample_value("vllm:larder_bytes_total", {**labels, "kind": "load"}) == 2000
        )
        assert (
            REGISTRY.get_sample_value(
                "vllm:larder_events_total", {**labels, "event": "none_answers"}
            )
            == 6
        )
    finally:
        for name in list(REGISTRY._names_to_collectors):
            if name.startswith("vllm:larder") and name in REGISTRY._names_to_collectors:
                REGISTRY.unregister(REGISTRY._names_to_collectors[name])


def test_outcomes_have_the_numbers_of_the_wire():
    from cacheservice.v1 import cache_pb2

    for reason in Reason:
        assert cache_pb2.OutcomeReason.Value(f"OUTCOME_REASON_{reason.name}") == reason
    assert Outcome.__slots__


@pytest.mark.parametrize("fault", ["no thread", "shut down"])
def test_without_a_thread_a_load_has_failed_and_a_save_is_incomplete(fleet, fault):
    cache = FakeCache()
    source = fleet(cache, 1, (1,), fill=True)
    half = source.halves[0]
    half._loads.shutdown()
    half._saves.shutdown()
    if fault == "no thread":
        half._loads = half._saves = SimpleNamespace(submit=refuse, shutdown=lambda **options: None)
    assert source.save([3, 1, 4, 2]) == SaveReport(1, False)
    assert source.load([1, 2, 3, 4], 0, 64) == LoadReport(1, 0, Reason.INTERNAL)
    assert not cache.shards


def refuse(*arguments):
    raise RuntimeError("can't start new thread")
