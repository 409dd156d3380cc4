"""Dashboards ask only for what is there: names against the metric tables, names and labels against live scrapes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import dashboard_queries
import pytest
from agent_process import AgentProcess, a_namespace
from agent_stub import StubSession, bytes_of, key_of
from cacheoperator import metrics as operator_metrics
from dashboard_queries import DASHBOARDS, Samples, check, labels_of, metrics_of, queries, samples_of
from prometheus_client import generate_latest

from cacheservice.agent.metrics import GAUGES, PREFIX, TOTALS
from cacheservice.v1 import cache_pb2

ROOT = DASHBOARDS.parents[2]


@pytest.fixture(scope="module")
def agent_scrape() -> Samples:
    """A real agent that has stored, found and lost something."""
    spec = a_namespace()
    with AgentProcess(http=True) as agent:
        session = StubSession(f"unix:{agent.socket_dir}/agent.sock", name="engine-1")
        session.open(spec)
        session.store(spec, key_of("page"), bytes_of(spec.groups[0].shard_bytes, "page"))
        for kind, reason in (("LOOKUP", "HIT"), ("LOAD", "PEER_FAILED"), ("SAVE", "NO_SPACE")):
            session.ping(
                cache_pb2.Outcome(
                    kind=cache_pb2.OutcomeKind.Value(f"OUTCOME_KIND_{kind}"),
                    reason=cache_pb2.OutcomeReason.Value(f"OUTCOME_REASON_{reason}"),
                )
            )
        status, body = agent.get("/metrics")
        assert status == 200
        session.close()
    return samples_of(body.decode())


def test_agents_dashboard_asks_for_what_a_real_agent_serves(agent_scrape: Samples) -> None:
    check("agents.json", agent_scrape)


def test_agents_dashboard_uses_names_of_the_metrics_file() -> None:
    names = {
        *(PREFIX + name for name in GAUGES),
        *(f"{PREFIX}{name}_total" for name in TOTALS),
        *(f"{PREFIX}{name}" for name in ("calls_total", "call_seconds_bucket", "outcomes_total")),
    }
    for where, expression in queries("agents.json"):
        for metric in metrics_of(expression):
            assert metric in names, f"{where}: {metric}"


@pytest.fixture(scope="module")
def operator_scrape() -> Samples:
    """The operator's registry, with one sample of each labelled family (they have none before something happened)."""
    samples: Samples = {}
    for family in operator_metrics.registry.collect():
        labels: tuple[str, ...] = ()
        for collector in vars(operator_metrics).values():
            if getattr(collector, "_name", None) == family.name:
                labels = collector._labelnames
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        for suffix in suffixes.get(family.type, ("",)):
            of_bucket = ("le",) if suffix == "_bucket" else ()
            samples[family.name + suffix] = [dict.fromkeys((*labels, *of_bucket), "")]
    exposed = samples_of(generate_latest(operator_metrics.registry).decode())
    assert {name for name in exposed if not name.endswith("_created")} <= set(samples)
    return samples


def test_operator_dashboard_asks_for_what_the_operator_has(operator_scrape: Samples) -> None:
    check("operator.json", operator_scrape)


def test_alerts_on_the_operations_page_ask_for_what_there_is(
    agent_scrape: Samples, operator_scrape: Samples
) -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    table = page.split("| alert | expression |", 1)[1].split("\n\n", 1)[0]
    expressions = [row.split("|")[2].split("`")[1] for row in table.splitlines()[2:]]
    assert len(expressions) >= 6
    for expression in expressions:
        labels_of(expression, {**agent_scrape, **operator_scrape})


def test_every_metric_that_a_page_names_is_there(
    agent_scrape: Samples, operator_scrape: Samples
) -> None:
    """Whatever stands between backticks and has the name of a metric is PromQL; "cacheservice_…" stands for many."""
    found = 0
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        for span in re.findall(r"`([^`\n]*)`", page.read_text()):
            if re.search(r"\b(cacheservice|larder_operator)_[a-z]", span):
                labels_of(span, {**agent_scrape, **operator_scrape})
                found += 1
    assert found >= 7


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(cacheservice_comits_total[5m]))", "nothing is called cacheservice_comits_total"),
        ('cacheservice_used_bytes{engine="x"}', "has no label engine"),
        ('rate(cacheservice_outcomes_total{kind="lokup"}[5m])', "never has kind=lokup"),
        ("sum by (engine) (cacheservice_used_bytes)", "no label engine"),
        ("sum(cacheservice_used_bytes", "no PromQL"),
        ("rate(cacheservice_committed_bytes_total)", "no PromQL: expected type matrix"),
        ("rate(cacheservice_used_bytes[5m])", "no counter"),
        ("histogram_quantile(0.9, rate(cacheservice_call_seconds_sum[5m]))", "no buckets"),
        ("histogram_quantile(0.9, sum(rate(cacheservice_call_seconds_bucket[5m])))", "no buckets"),
        (
            "sum by (pod) (cacheservice_used_bytes) / sum(cacheservice_arena_bytes)",
            r"\{pod\} never matches \{\}",
        ),
        ("cacheservice_used_bytes / on (node) cacheservice_arena_bytes", "no label node"),
        ("vector(1)", "asks for nothing"),
    ],
)
def test_the_check_finds_faults(
    expression: str, fault: str, agent_scrape: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dashboard_queries, "queries", lambda _: iter([("panel", expression)]))
    with pytest.raises(AssertionError, match=fault):
        check("agents.json", agent_scrape)


@pytest.mark.parametrize("path", sorted(DASHBOARDS.glob("*.json")), ids=lambda path: path.name)
def test_every_panel_says_what_it_shows(path: Path) -> None:
    board: dict[str, Any] = json.loads(path.read_text())
    assert board["uid"].startswith("larder-")
    ids = [panel["id"] for panel in board["panels"]]
    assert len(set(ids)) == len(ids)
    for panel in board["panels"]:
        assert panel["title"]
        assert panel["description"]
        assert panel["datasource"]["uid"] == "${datasource}"
