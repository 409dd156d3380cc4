"""Dashboards ask only for what is there: names against the metric tables, names and labels against live scrapes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import AgentProcess, a_namespace
from agent_stub import StubSession, bytes_of, key_of
from cacheoperator import metrics as operator_metrics
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cacheservice.agent.metrics import GAUGES, PREFIX, TOTALS
from cacheservice.v1 import cache_pb2

DASHBOARDS = Path(__file__).resolve().parent.parent / "charts" / "larder" / "dashboards"
FUNCTIONS = {
    "sum", "max", "count", "rate", "time", "vector", "histogram_quantile", "label_values", "by", "or",
}  # fmt: skip
OF_PROMETHEUS = {"namespace", "pod", "le"}
"""Labels that a scrape by PodMonitor adds, and that of histograms."""

Samples = dict[str, list[dict[str, str]]]


def _queries(dashboard: str) -> Iterator[tuple[str, str]]:
    """(where, expression) of all panels and variables."""
    board = json.loads((DASHBOARDS / dashboard).read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", variable["query"]["query"]


def _selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
    """(metric, [(label, operator, value)]) of each vector selector. AssertionError on what is not understood."""
    bare = re.sub(r'"[^"]*"', lambda m: "_" * len(m[0]), expression)
    assert bare.count("(") == bare.count(")"), expression
    assert bare.count("{") == bare.count("}"), expression
    inner = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", lambda m: " " * len(m[0]), bare)
    for found in re.finditer(r"[a-zA-Z_:][a-zA-Z0-9_:]*", inner):
        word, end = found[0], found.end()
        if word in FUNCTIONS or (word in OF_PROMETHEUS and "label_values" in expression):
            continue
        matchers = []
        if expression[end : end + 1] == "{":
            text = expression[end + 1 : bare.index("}", end)]
            matchers = re.findall(r'(\w+)(=~|!~|!=|=)"([^"]*)"', text)
            assert text == ", ".join(f'{n}{o}"{v}"' for n, o, v in matchers), expression
        yield word, matchers


def _grouping(expression: str) -> set[str]:
    return {
        label.strip()
        for found in re.findall(r"\bby \(([^)]*)\)", expression)
        for label in found.split(",")
    }


def _samples(text: str) -> Samples:
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(dict(sample.labels))
    return samples


def _check(dashboard: str, samples: Samples) -> None:
    for where, expression in _queries(dashboard):
        selectors = list(_selectors(expression))
        assert selectors, f"{where}: {expression} asks for nothing"
        known: set[str] = set(OF_PROMETHEUS)
        for metric, matchers in selectors:
            assert metric in samples, f"{dashboard}, {where}: nothing is called {metric}"
            labels = {name for sample in samples[metric] for name in sample}
            known |= labels
            for label, operator, value in matchers:
                assert label in labels | OF_PROMETHEUS, f"{where}: {metric} has no label {label}"
                if label in labels and operator == "=":
                    values = {sample[label] for sample in samples[metric]}
                    assert value in values, f"{where}: {metric} never has {label}={value}"
        assert _grouping(expression) <= known, f"{where}: {expression}"


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
    return _samples(body.decode())


def test_agents_dashboard_asks_for_what_a_real_agent_serves(agent_scrape: Samples) -> None:
    _check("agents.json", agent_scrape)


def test_agents_dashboard_uses_names_of_the_metrics_file() -> None:
    names = {
        *(PREFIX + name for name in GAUGES),
        *(f"{PREFIX}{name}_total" for name in TOTALS),
        *(f"{PREFIX}{name}" for name in ("calls_total", "call_seconds_bucket", "outcomes_total")),
    }
    for where, expression in _queries("agents.json"):
        for metric, _ in _selectors(expression):
            assert metric in names, f"{where}: {metric}"


def test_operator_dashboard_asks_for_what_the_operator_has() -> None:
    """Its own registry, with one sample of each labelled family (they have none before something happened)."""
    samples: Samples = {}
    for family in operator_metrics.registry.collect():
        labels: tuple[str, ...] = ()
        for collector in vars(operator_metrics).values():
            if getattr(collector, "_name", None) == family.name:
                labels = collector._labelnames
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
        for suffix in suffixes.get(family.type, ("",)):
            samples[family.name + suffix] = [dict.fromkeys(labels, "")]
    exposed = generate_latest(operator_metrics.registry).decode()
    assert "larder_operator_resources" in exposed
    _check("operator.json", samples)


@pytest.mark.parametrize(
    ("expression", "fault"),
    [
        ("sum(rate(cacheservice_comits_total[5m]))", "nothing is called cacheservice_comits_total"),
        ('cacheservice_used_bytes{engine="x"}', "has no label engine"),
        ('rate(cacheservice_outcomes_total{kind="lokup"}[5m])', "never has kind=lokup"),
        ("sum by (engine) (cacheservice_used_bytes)", "sum by"),
        ("sum(cacheservice_used_bytes", "sum"),
    ],
)
def test_the_check_finds_faults(
    expression: str, fault: str, agent_scrape: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_queries", lambda _: iter([("panel", expression)]))
    with pytest.raises(AssertionError, match=fault):
        _check("agents.json", agent_scrape)


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
