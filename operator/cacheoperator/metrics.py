"""All metrics of the operator, `larder_operator_*`, in one registry of their own; `web` serves them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

registry = CollectorRegistry()

reconciles = Counter(
    "larder_operator_reconciles_total",
    "Reconciles of one KVCache, by how they ended: done, failed or gone.",
    ["outcome"],
    registry=registry,
)
reconcile_duration_seconds = Histogram(
    "larder_operator_reconcile_duration_seconds",
    "Time of one reconcile.",
    buckets=(0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30),
    registry=registry,
)
full_pass_duration_seconds = Gauge(
    "larder_operator_full_pass_duration_seconds",
    "Time of the newest pass over all KVCaches.",
    registry=registry,
)
full_pass_end_seconds = Gauge(
    "larder_operator_full_pass_end_timestamp_seconds",
    "When the newest pass over all KVCaches ended.",
    registry=registry,
)
queue_length = Gauge(
    "larder_operator_queue_length", "KVCaches that wait for a reconcile now.", registry=registry
)
resources = Gauge("larder_operator_resources", "KVCaches that are watched.", registry=registry)
ready_resources = Gauge(
    "larder_operator_ready_resources", "KVCaches with condition Ready.", registry=registry
)
applies = Counter(
    "larder_operator_applies_total",
    "Server-side applies of children, by kind and result: created, changed, refused.",
    ["kind", "result"],
    registry=registry,
)
drift_repairs = Counter(
    "larder_operator_drift_repairs_total",
    "Children that someone else had changed and that were put right, by kind.",
    ["kind"],
    registry=registry,
)
deletions = Counter(
    "larder_operator_deletions_total",
    "Children that are not wanted any more, by kind.",
    ["kind"],
    registry=registry,
)
status_writes = Counter(
    "larder_operator_status_writes_total", "Patches of a KVCache's status.", registry=registry
)
events = Counter(
    "larder_operator_events_total", "Events written, by type and reason.", ["type", "reason"],
    registry=registry,
)  # fmt: skip
requests = Counter(
    "larder_operator_api_requests_total",
    "Requests to the API server, by method and HTTP status (or timeout, unreachable); watches are not counted.",
    ["method", "status"],
    registry=registry,
)
probes = Counter(
    "larder_operator_probes_total", "Transfer probes, by result: ok or failed.", ["result"],
    registry=registry,
)  # fmt: skip
is_leader = Gauge(
    "larder_operator_lease_held", "1 while this operator holds the lease of what it watches.",
    registry=registry,
)  # fmt: skip
