"""Where agents go: on the nodes where engines of the same KVCache may go. Pure.

An engine on a node without an agent runs without cache, so agents whose nodes the manifest does not choose follow the
pod templates of the engines: their node selectors, their required node affinity, their tolerations. `matches_node` and
`untolerated_taint` read a pod spec as the scheduler does, for the part of it that is said here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cacheservice.manifest import Device, KVCacheManifest, Role

Object = dict[str, Any]


def placement(manifest: KVCacheManifest) -> Object:
    """The fields nodeSelector, affinity and tolerations of the agents' pods, those that say something."""
    chosen: Object = {}
    if manifest.cache.node_selector:
        chosen["nodeSelector"] = dict(manifest.cache.node_selector)
    else:
        chosen |= _nodes_of_engines(_engine_specs(manifest))
    tolerations = [dict(toleration) for toleration in manifest.cache.tolerations]
    if tolerations := tolerations or _tolerations_of_engines(manifest):
        chosen["tolerations"] = tolerations
    return chosen


def matches_node(pod_spec: Mapping[str, Any], labels: Mapping[str, str], node_name: str) -> bool:
    """Whether node selector and required node affinity of `pod_spec` take a node with these labels."""
    selector = pod_spec.get("nodeSelector") or {}
    if any(labels.get(key) != value for key, value in selector.items()):
        return False
    terms = _required_terms(pod_spec)
    return not terms or any(_term_matches(term, labels, node_name) for term in terms)


def untolerated_taint(pod_spec: Mapping[str, Any], taints: Iterable[Mapping[str, str]]) -> str:
    """The first taint, as key=value:effect, that keeps pods with `pod_spec` off a node; "" when there is none.

    Taints that Kubernetes itself lets every DaemonSet tolerate (node.kubernetes.io/…) keep nothing off.
    """
    tolerations = pod_spec.get("tolerations") or []
    for taint in taints:
        if taint.get("effect") not in ("NoSchedule", "NoExecute"):
            continue
        if taint.get("key", "").startswith("node.kubernetes.io/"):
            continue
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            value = f"={taint['value']}" if taint.get("value") else ""
            return f"{taint.get('key', '')}{value}:{taint['effect']}"
    return ""


def _engine_specs(manifest: KVCacheManifest) -> list[Mapping[str, Any]]:
    """What the templates of the engines say about their pods."""
    return [_spec_of(role) for role in (manifest.prefill, manifest.decode) if role is not None]


def _spec_of(role: Role) -> Mapping[str, Any]:
    return _mapping((role.template or {}).get("spec"))


def _mapping(value: object) -> Mapping[str, Any]:
    """Templates are opaque: what has another type is refused where it is merged, and says nothing here."""
    return value if isinstance(value, Mapping) else {}


def _mappings(value: object) -> list[Mapping[str, Any]]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _nodes_of_engines(specs: Sequence[Mapping[str, Any]]) -> Object:
    """Every node that takes any of the pods. One that goes anywhere means anywhere."""
    selectors = [dict(_mapping(spec.get("nodeSelector"))) for spec in specs]
    terms = [_required_terms(spec) for spec in specs]
    if not any(terms) and all(selector == selectors[0] for selector in selectors):
        return {"nodeSelector": selectors[0]} if selectors and selectors[0] else {}
    if any(not selector and not some for selector, some in zip(selectors, terms, strict=True)):
        return {}
    wanted: list[Object] = []
    for selector, some in zip(selectors, terms, strict=True):
        by_label = [
            {"key": key, "operator": "In", "values": [value]}
            for key, value in sorted(selector.items())
        ]
        for term in some or [{}]:
            joined = {**term}
            if by_label:
                joined["matchExpressions"] = [*by_label, *_mappings(term.get("matchExpressions"))]
            if joined not in wanted:
                wanted.append(joined)
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": wanted}}
    return {"affinity": {"nodeAffinity": required}}


def _tolerations_of_engines(manifest: KVCacheManifest) -> list[Object]:
    tolerations: list[Object] = []
    if manifest.engine.device is Device.CUDA and (manifest.prefill or manifest.decode):
        # As the admission plugin ExtendedResourceToleration gives it to pods that ask for the resource.
        tolerations.append(
            {"key": manifest.engine.gpu_resource_name, "operator": "Exists", "effect": "NoSchedule"}
        )
    for spec in _engine_specs(manifest):
        for toleration in _mappings(spec.get("tolerations")):
            if dict(toleration) not in tolerations:
                tolerations.append(dict(toleration))
    return tolerations


def _required_terms(spec: Mapping[str, Any]) -> list[Object]:
    nodes = _mapping(_mapping(spec.get("affinity")).get("nodeAffinity"))
    required = _mapping(nodes.get("requiredDuringSchedulingIgnoredDuringExecution"))
    return [dict(term) for term in _mappings(required.get("nodeSelectorTerms"))]


def _term_matches(term: Mapping[str, Any], labels: Mapping[str, str], node_name: str) -> bool:
    """An empty term matches no node, as in Kubernetes."""
    expressions = _mappings(term.get("matchExpressions"))
    fields = _mappings(term.get("matchFields"))
    if not expressions and not fields:
        return False
    return all(_holds(expression, labels) for expression in expressions) and all(
        _holds(field, {"metadata.name": node_name}) for field in fields
    )


def _holds(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(str(expression.get("key", "")))
    values = expression.get("values")
    values = values if isinstance(values, list) else []
    match expression.get("operator"):
        case "In":
            return value in values
        case "NotIn":
            return value not in values
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
        case "Gt" | "Lt" as operator:
            try:
                number, bound = int(value or ""), int(values[0])
            except (ValueError, TypeError, IndexError):
                return False
            return number > bound if operator == "Gt" else number < bound
    return False


def _tolerates(toleration: Mapping[str, Any], taint: Mapping[str, str]) -> bool:
    if toleration.get("effect") not in (None, "", taint.get("effect")):
        return False
    key = toleration.get("key") or ""
    exists = str(toleration.get("operator", "Equal")) == "Exists"
    if not key:
        return exists
    if key != taint.get("key"):
        return False
    return exists or str(toleration.get("value") or "") == (taint.get("value") or "")
