"""PromQL of the chart's dashboards and of the pages, read by a parser of PromQL and compared with scrapes.

What Prometheus does not refuse and Grafana shows as an empty panel is found here: a name or a label that nobody serves,
a rate of what is no counter, a quantile without buckets, two sides of an operator that can not match.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import promql_parser as promql
from prometheus_client.parser import text_string_to_metric_families

DASHBOARDS = Path(__file__).resolve().parent.parent / "charts" / "larder" / "dashboards"
OF_PROMETHEUS = frozenset({"namespace", "pod"})
"""Labels that a scrape by PodMonitor adds."""
OF_COUNTERS = {"rate", "irate", "increase", "resets"}
COUNTERS = ("_total", "_bucket", "_sum", "_count")
NOTHING: frozenset[str] = frozenset()

Samples = dict[str, list[dict[str, str]]]


def queries(dashboard: str) -> Iterator[tuple[str, str]]:
    """(where, expression) of all panels and variables, as Prometheus gets them."""
    board = json.loads((DASHBOARDS / dashboard).read_text())
    for panel in board["panels"]:
        for target in panel["targets"]:
            yield panel["title"], filled(target["expr"])
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            yield f"${variable['name']}", filled(variable["query"]["query"])


def filled(expression: str) -> str:
    """Grafana's own words replaced: its interval, its variables with "All" chosen, and its question for values."""
    asked = re.fullmatch(r"label_values\((.*), (\w+)\)", expression)
    if asked is not None:
        expression = f"count by ({asked[2]}) ({asked[1]})"
    return re.sub(r"\$\w+", ".*", expression.replace("$__rate_interval", "5m"))


def metrics_of(expression: str) -> list[str]:
    """Names that an expression selects. AssertionError when it is no PromQL or selects nothing."""
    found: list[str] = []

    def visit(node: promql.Expr) -> None:
        if isinstance(node, promql.VectorSelector):
            found.append(_name(node))

    promql.walk(_parsed(expression), visit)
    assert found, f"{expression} asks for nothing"
    return found


def labels_of(expression: str, samples: Samples) -> frozenset[str]:
    """Labels of the answer; AssertionError for what finds nothing in `samples`, or is no PromQL."""
    metrics_of(expression)
    return _labels(_parsed(expression), samples)


def check(dashboard: str, samples: Samples) -> None:
    """Every query of `dashboard` finds something in `samples`; AssertionError for what does not."""
    for where, expression in queries(dashboard):
        try:
            labels_of(expression, samples)
        except AssertionError as fault:
            raise AssertionError(f"{dashboard}, {where}: {fault}") from fault


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


def _parsed(expression: str) -> promql.Expr:
    try:
        parsed: promql.Expr = promql.parse(expression)
    except ValueError as fault:
        raise AssertionError(f"{expression} is no PromQL: {fault}") from fault
    return parsed


def _labels(node: promql.Expr, samples: Samples) -> frozenset[str]:
    """Labels of what a part of an expression gives; none for a number."""
    match node:
        case promql.VectorSelector():
            return _selected(node, samples)
        case promql.MatrixSelector():
            return _selected(node.vector_selector, samples)
        case promql.ParenExpr() | promql.UnaryExpr() | promql.SubqueryExpr():
            return _labels(node.expr, samples)
        case promql.Call():
            return _called(node, samples)
        case promql.AggregateExpr():
            return _aggregated(node, samples)
        case promql.BinaryExpr():
            return _combined(node, samples)
        case promql.NumberLiteral() | promql.StringLiteral():
            return NOTHING
    raise AssertionError(f"{node} is of a kind that was not thought of: {type(node).__name__}")


def _name(selector: promql.VectorSelector) -> str:
    assert selector.name, f"{selector} selects by labels alone"
    return selector.name


def _selected(selector: promql.VectorSelector, samples: Samples) -> frozenset[str]:
    name = _name(selector)
    assert name in samples, f"nothing is called {name}"
    labels = OF_PROMETHEUS.union(*samples[name])
    assert not selector.matchers.or_matchers, (
        f"{selector}: `or` between matchers was not thought of"
    )
    for matcher in selector.matchers.matchers:
        assert matcher.name in labels, f"{name} has no label {matcher.name}"
        values = {sample[matcher.name] for sample in samples[name] if matcher.name in sample}
        if values and matcher.op == promql.MatchOp.Equal:
            assert matcher.value in values, f"{name} never has {matcher.name}={matcher.value}"
    return labels


def _called(call: promql.Call, samples: Samples) -> frozenset[str]:
    if call.func.name in OF_COUNTERS:
        (selector,) = call.args
        name = _name(selector.vector_selector)
        assert name.endswith(COUNTERS), f"{call.func.name} of {name}, which is no counter"
    given = [_labels(argument, samples) for argument in call.args]
    labels = NOTHING.union(*given)
    if call.func.name == "histogram_quantile":
        assert "le" in labels, f"{call}: no buckets to take a quantile of"
        return labels - {"le"}
    return labels


def _aggregated(node: promql.AggregateExpr, samples: Samples) -> frozenset[str]:
    labels = _labels(node.expr, samples)
    if node.modifier is None:
        return NOTHING
    named = frozenset(node.modifier.labels)
    assert named <= labels, f"{node}: there is no label {', '.join(sorted(named - labels))}"
    return named if node.modifier.type == promql.AggModifierType.By else labels - named


def _combined(node: promql.BinaryExpr, samples: Samples) -> frozenset[str]:
    left, right = _labels(node.lhs, samples), _labels(node.rhs, samples)
    if any(_is_number(side) for side in (node.lhs, node.rhs)):
        return left | right
    by = node.modifier.matching if node.modifier else None
    if by is not None:
        named = frozenset(by.labels)
        assert named <= left | right, f"{node}: there is no label {', '.join(named - left - right)}"
        is_by = by.type == promql.LabelModifierType.Include
        sides = (left & named, right & named) if is_by else (left - named, right - named)
    else:
        sides = (left, right)
    # `or` takes the left side, else the right one: that of `vector(0)` has no labels, and is meant to.
    if str(node.op) != "or":
        assert sides[0] == sides[1], f"{node}: {_list(sides[0])} never matches {_list(sides[1])}"
    return left


def _is_number(node: promql.Expr) -> bool:
    """Whether an operand is a scalar, which goes with any labels."""
    match node:
        case promql.ParenExpr() | promql.UnaryExpr():
            return _is_number(node.expr)
        case promql.BinaryExpr():
            return _is_number(node.lhs) and _is_number(node.rhs)
        case promql.Call():
            return bool(node.func.return_type == promql.ValueType.Scalar)
    return isinstance(node, promql.NumberLiteral)


def _list(labels: frozenset[str]) -> str:
    return "{" + ", ".join(sorted(labels)) + "}"
