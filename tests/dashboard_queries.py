"""Queries of the chart's dashboards, read as far as PromQL goes there, and compared with scrapes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

DASHBOARDS = Path(__file__).resolve().parent.parent / "charts" / "larder" / "dashboards"
FUNCTIONS = {
    "sum", "max", "count", "rate", "time", "vector", "histogram_quantile", "label_values", "by", "or", "and",
    "increase",
}  # fmt: skip
OF_PROMETHEUS = {"namespace", "pod", "le"}
"""Labels that a scrape by PodMonitor adds, and that of histograms."""

Samples = dict[str, list[dict[str, str]]]


def queries(dashboard: str) -> Iterator[tuple[str, str]]:
    """(where, expression) of all panels and variables."""
    board = json.loads((DASHBOARDS / dashboard).read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", variable["query"]["query"]


def selectors(expression: str) -> Iterator[tuple[str, list[tuple[str, str, str]]]]:
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


def samples_of(text: str) -> Samples:
    """Labels of every sample of a scrape, by name."""
    samples: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, []).append(dict(sample.labels))
    return samples


def names_in(text: str) -> set[str]:
    """Names of all samples that a scrape has or may have: families with labels have none before something happened."""
    suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    return {
        family.name + suffix
        for family in text_string_to_metric_families(text)
        for suffix in suffixes.get(family.type, ("",))
    }


def check(dashboard: str, samples: Samples) -> None:
    """Every metric, label, and value of an equality of `dashboard` is in `samples`; AssertionError for what is not."""
    for where, expression in queries(dashboard):
        found = list(selectors(expression))
        assert found, f"{where}: {expression} asks for nothing"
        known: set[str] = set(OF_PROMETHEUS)
        for metric, matchers in found:
            assert metric in samples, f"{dashboard}, {where}: nothing is called {metric}"
            labels = {name for sample in samples[metric] for name in sample}
            known |= labels
            for label, operator, value in matchers:
                assert label in labels | OF_PROMETHEUS, f"{where}: {metric} has no label {label}"
                if label in labels and operator == "=":
                    values = {sample[label] for sample in samples[metric]}
                    assert value in values, f"{where}: {metric} never has {label}={value}"
        assert _grouping(expression) <= known, f"{where}: {expression}"
