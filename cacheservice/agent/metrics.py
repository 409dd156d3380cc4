"""Every metric of an agent, by name. Gauges and totals are read from the parts when somebody asks, so that nothing on
the data path counts twice. Called by `serve.py` (makes it) and `web.py` (serves it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from cacheservice.core.store import StoreCounts

PREFIX = "cacheservice_"

GAUGES: Mapping[str, str] = {
    "arena_bytes": "Size of the arena.",
    "used_bytes": "Bytes in extents: ready, pending or quarantined.",
    "ready_bytes": "Bytes in extents of readable shards.",
    "pending_bytes": "Bytes in extents that are being written.",
    "quarantined_bytes": "Bytes that wait until nobody can write to or read them any more.",
    "largest_free_bytes": "Longest contiguous free range.",
    "namespaces": "Open namespaces.",
    "chunks": "Chunks with at least one readable shard.",
    "shards": "Readable shards.",
    "leases": "Leases that hold now, lookup leases included.",
    "lookup_leases": "Lookup leases that hold now.",
    "lookup_lease_bytes": "Bytes that lookup leases cover.",
    "reservations": "Open reservations.",
    "sessions": "Live sessions of clients.",
    "shared_memory_sessions": "Live sessions whose bytes travel through the arena.",
    "stream_sessions": "Live sessions whose bytes travel by gRPC: about five times slower.",
    "arena_connections": "Clients that have the arena mapped.",
    "peers": "Other agents that this one has a connection to.",
    "waiting_announcements": "Chunks of which the index does not know the latest.",
    "index_ready": "1 while the index answers, else 0.",
    "draining": "1 while the agent drains, else 0.",
    "node_number": "Number of this node in the index; 0 while it was not reached.",
}
"""Gauges: name without prefix, help text."""

TOTALS: Mapping[str, str] = {
    "commits": "Shards committed.",
    "committed_bytes": "Bytes committed.",
    "lost_races": "Commits that came after another writer's.",
    "mismatched_commits": "Lost races whose bytes differed from those that stayed.",
    "late_commits": "Commits after the reservation's time.",
    "duplicate_reserves": "Reservations refused because the shard was there or being written.",
    "no_space": "Reservations refused for want of room.",
    "evicted_chunks": "Chunks evicted.",
    "evicted_bytes": "Bytes evicted.",
    "run_evictions": "Times that neighbours were evicted to make one long extent.",
    "expired_leases": "Leases that ran out before their release.",
    "expired_reservations": "Reservations that ran out.",
    "refused_lookup_leases": "Lookups answered without a lease because lookup leases cover too much.",
    "corrupt_chunks": "Chunks dropped because their bytes were wrong.",
    "forgotten_changes": "Changes that were never told to the index because too many waited.",
    "stream_sent_bytes": "Bytes sent by Read streams.",
    "stream_received_bytes": "Bytes taken by Write streams.",
    "pulled_shards": "Shards fetched from other agents.",
    "pulled_bytes": "Bytes fetched from other agents.",
    "failed_pulls": "Shards that another agent did not deliver.",
    "lost_pull_races": "Fetched shards that a local store committed first.",
    "announcement_overflows": "Times that too many announcements waited, so that all had to be told again.",
    "calls_not_let_wait": "Calls answered at once because too many were waiting.",
}
"""Totals since the start: name without prefix and `_total`, help text."""

_CALL_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5, 10.0)


@dataclass(frozen=True, slots=True)
class Readings:
    """Where the numbers come from; each is called when somebody asks."""

    store: Callable[[], StoreCounts]
    gauges: Callable[[], Mapping[str, float]]
    """Those of `GAUGES` that the store does not have."""
    totals: Callable[[], Mapping[str, float]]
    """Those of `TOTALS` that the store does not have."""
    outcomes: Callable[[], Mapping[tuple[str, str, str], int]]
    """Outcomes that clients reported: (kind, reason, role) → count."""
    index: Callable[[], Mapping[str, int]]
    """The index's own counters."""


class Metrics:
    """The agent's registry. Thread-safe."""

    def __init__(self, readings: Readings) -> None:
        self._readings = readings
        self._registry = CollectorRegistry()
        self._calls = Counter(
            f"{PREFIX}calls_total", "Calls that ended, by method and gRPC status.", ["method", "status"],
            registry=self._registry,
        )  # fmt: skip
        self._seconds = Histogram(
            f"{PREFIX}call_seconds", "Duration of unary calls and streams, waits included.", ["method"],
            buckets=_CALL_BUCKETS, registry=self._registry,
        )  # fmt: skip
        self._registry.register(_FromParts(self))

    def count_call(self, method: str, status: str, seconds: float) -> None:
        """One call ended."""
        self._calls.labels(method, status).inc()
        if method != "Session":
            self._seconds.labels(method).observe(seconds)

    def exposition(self) -> bytes:
        """Everything in Prometheus' text format."""
        return generate_latest(self._registry)

    def values(self) -> dict[str, int]:
        """Gauges and totals by name without prefix, for status answers."""
        numbers: dict[str, float] = {
            **self.gauges(),
            **{f"{n}_total": v for n, v in self.totals().items()},
        }
        for (kind, reason, role), count in self._readings.outcomes().items():
            numbers[f"outcomes_total.{kind}.{reason}.{role}"] = count
        for name, count in self._readings.index().items():
            numbers[f"index_{name}_total"] = count
        return {name: int(number) for name, number in sorted(numbers.items())}

    def gauges(self) -> dict[str, float]:
        """What holds now."""
        store = self._readings.store()
        numbers = dict(self._readings.gauges())
        for name in GAUGES:
            if name not in numbers:
                attribute = name if name.endswith("_bytes") else f"num_{name}"
                numbers[name] = getattr(store, attribute)
        return numbers

    def totals(self) -> dict[str, float]:
        """What happened since the start."""
        store = self._readings.store().totals
        numbers = dict(self._readings.totals())
        for name in TOTALS:
            if name not in numbers:
                numbers[name] = getattr(store, f"num_{name}")
        return numbers

    def families(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """What the parts know, as metric families."""
        for name, value in self.gauges().items():
            yield GaugeMetricFamily(f"{PREFIX}{name}", GAUGES[name], value=value)
        for name, value in self.totals().items():
            yield CounterMetricFamily(f"{PREFIX}{name}_total", TOTALS[name], value=value)
        outcomes = CounterMetricFamily(
            f"{PREFIX}outcomes_total", "What became of lookups, loads and saves, as clients reported.",
            labels=["kind", "reason", "role"],
        )  # fmt: skip
        for labels, count in self._readings.outcomes().items():
            outcomes.add_metric(list(labels), count)
        yield outcomes
        index = CounterMetricFamily(
            f"{PREFIX}index_events_total", "What the index counted.", labels=["event"]
        )
        for name, count in self._readings.index().items():
            index.add_metric([name], count)
        yield index


class _FromParts(Collector):
    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """See prometheus_client."""
        return self._metrics.families()

    def describe(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Nothing: otherwise registering would read parts that do not exist yet."""
        return iter(())
