"""Counts of the connector, through vLLM's own hooks: its log line and its Prometheus endpoint.

All metric names of the connector are here. Counts are taken in both halves, drained once per step, merged by vLLM and
exported in the front-end process, so everything is a plain dictionary of numbers that msgpack can carry.
"""

from __future__ import annotations

import threading
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cacheservice.core.outcomes import OutcomeKind, Reason

# vLLM drops its own metrics by the word "vllm" in their names when an engine is made again in one process.
OUTCOMES = "vllm:larder_outcomes"
TOKENS = "vllm:larder_tokens"
BYTES = "vllm:larder_bytes"
SECONDS = "vllm:larder_seconds"
EVENTS = "vllm:larder_events"

KINDS = {kind: kind.name.lower() for kind in OutcomeKind}
TOKEN_KINDS = ("asked", "served")
EVENT_KINDS = ("none_answers", "foreign_hand_overs", "namespace_resets", "shed_chunks")


class LarderStats(KVConnectorStats):
    """Sums since the last drain; keys such as `outcome/lookup/hit`, `tokens/lookup/served`, `bytes/save`, `event/…`."""

    def reset(self) -> None:
        """Forget everything."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> LarderStats:
        """Add the sums of another half or rank."""
        for key, value in other.data.items():
            self.data[key] = self.data.get(key, 0) + value
        return self

    def reduce(self) -> dict[str, int | float]:
        """What the log line shows."""
        return {key: round(value, 3) for key, value in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether there is nothing to say."""
        return not self.data


class StatsRecorder:
    """Collects counts from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sums: dict[str, float] = {}

    def outcome(
        self,
        kind: OutcomeKind,
        reason: Reason,
        *,
        asked: int,
        served: int,
        duration_s: float,
        num_bytes: int = 0,
    ) -> None:
        """Count one ended lookup, load or save."""
        name = KINDS[kind]
        self._add({
            f"outcome/{name}/{reason.label}": 1, f"tokens/{name}/asked": asked, f"tokens/{name}/served": served,
            f"bytes/{name}": num_bytes, f"seconds/{name}": duration_s,
        })  # fmt: skip

    def event(self, name: str, count: int = 1) -> None:
        """Count something that is no outcome; a name of EVENT_KINDS."""
        self._add({f"event/{name}": count})

    def drain(self) -> LarderStats | None:
        """The sums since the last drain; None when there are none."""
        with self._lock:
            if not self._sums:
                return None
            sums, self._sums = self._sums, {}
        return LarderStats(data=dict(sums))

    def _add(self, amounts: dict[str, float]) -> None:
        with self._lock:
            for key, value in amounts.items():
                if value:
                    self._sums[key] = self._sums.get(key, 0) + value


class LarderPromMetrics(KVConnectorPromMetrics):
    """Counters on vLLM's /metrics page, with vLLM's own labels first."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._outcomes = self._counter_cls(
            name=OUTCOMES, documentation="Lookups, loads and saves that ended, by how they ended.",
            labelnames=[*labelnames, "kind", "reason"],
        )  # fmt: skip
        self._tokens = self._counter_cls(
            name=TOKENS, documentation="Tokens that lookups, loads and saves asked for, and that they were served.",
            labelnames=[*labelnames, "kind", "what"],
        )  # fmt: skip
        self._bytes = self._counter_cls(
            name=BYTES,
            documentation="Bytes of KV cache loaded and saved.",
            labelnames=[*labelnames, "kind"],
        )
        self._seconds = self._counter_cls(
            name=SECONDS, documentation="Time that lookups, loads and saves took, all added up, in seconds.",
            labelnames=[*labelnames, "kind"],
        )  # fmt: skip
        self._events = self._counter_cls(
            name=EVENTS,
            documentation="Other things worth counting.",
            labelnames=[*labelnames, "event"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add the sums of one drain."""
        labels = self.per_engine_labelvalues[engine_idx]
        counters = {
            "outcome": self._outcomes, "tokens": self._tokens, "bytes": self._bytes, "seconds": self._seconds,
            "event": self._events,
        }  # fmt: skip
        for key, value in transfer_stats_data.items():
            what, *rest = key.split("/")
            if what in counters:
                counters[what].labels(*labels, *rest).inc(value)
