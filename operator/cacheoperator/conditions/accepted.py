"""Accepted: the resource can be used, and the API server took all of its objects. Pure."""

from __future__ import annotations

import re

from cacheoperator.conditions import wording
from cacheoperator.conditions.finding import Decision, Finding, Problem, Scene, decide
from cacheoperator.conditions.reasons import Reason
from cacheoperator.conditions.troubles import troubles
from cacheoperator.names import Component
from cacheoperator.observed import ApplyError, Contest, Observed
from cacheservice.manifest import Device, Role

UNKNOWN_FIELD = (
    "field not declared in schema",
    "unknown field",
    "failed to create typed patch object",
)
"""How the API server refuses what a template names and it does not know; the code is 400, 422 or 500 by version."""
KINDS = {
    kind.lower(): kind
    for kind in (
        "Service", "ConfigMap", "Secret", "ServiceAccount", "Role", "RoleBinding", "NetworkPolicy",
        "PodDisruptionBudget", "DaemonSet", "Deployment", "StatefulSet", "PodMonitor",
    )
}  # fmt: skip
PERMISSION_REMEDY = "upgrade the chart, which permits it (rbac.create)"
FORBIDDEN = re.compile(
    r'cannot (?P<verb>\S+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)")?'
)
"""RBAC's sentence: kubernetes 1.35 apiserver pkg/endpoints/handlers/responsewriters/errors.go `forbiddenMessage`."""


def check(scene: Scene) -> Decision:
    """Decide the condition."""
    return decide(CHECKS, scene)


def refused_manifest(observed: Observed) -> Finding:
    """What Accepted says of a resource that can't be read: the CRD's own rules refuse it, but it was stored before."""
    message = (
        f"{wording.sentence_end(observed.is_refused) or 'it cannot be read'}: correct the resource"
    )
    return Finding("False", Reason.INVALID_SPEC, message, is_hopeless=True)


def refused_by_render(scene: Scene) -> Finding | None:
    """Operator-owned arguments and templates that can't be merged."""
    if not scene.observed.refusals:
        return None
    found = [(_reason_of(reason), message) for reason, message in scene.observed.refusals]
    return Finding(
        "False", found[0][0], "; ".join(text for _, text in found), is_hopeless=True,
        problems=tuple(Problem(_kvcache(scene), why, text) for why, text in found),
    )  # fmt: skip


def foreign_object(scene: Scene) -> Finding | None:
    """Objects that have our names and belong to others: never taken over."""
    return _finding(scene, [e for e in _errors(scene) if e.reason == Reason.NAME_CONFLICT])


def forbidden(scene: Scene) -> Finding | None:
    """The operator lacks a permission."""
    return _finding(scene, [e for e in _errors(scene) if _reason(e, scene) is Reason.FORBIDDEN])


def refused_object(scene: Scene) -> Finding | None:
    """Objects that the API server refuses: quota, an admission rule, a field that it does not know."""
    kinds = (Reason.INVALID_TEMPLATE, Reason.QUOTA_EXCEEDED, Reason.APPLY_REFUSED)
    return _finding(scene, [e for e in _errors(scene) if _reason(e, scene) in kinds])


def missing_secret(scene: Scene) -> Finding | None:
    """Secrets that pods wait for."""
    found = [
        trouble
        for trouble in troubles(scene, tuple(Component))
        if trouble.reason is Reason.SECRET_NOT_FOUND and trouble.is_hopeless
    ]
    if not found:
        return None
    messages = tuple(dict.fromkeys(trouble.message for trouble in found))
    problems = tuple(dict.fromkeys(trouble.problem for trouble in found))
    return Finding("False", Reason.SECRET_NOT_FOUND, "; ".join(messages), True, problems)


def failed_apply(scene: Scene) -> Finding | None:
    """The API server did not answer, or was overtaken by another writer: tried again by itself."""
    errors = [e for e in _errors(scene) if _reason(e, scene) is Reason.APPLY_FAILED]
    if not errors:
        return None
    error = errors[0]
    said = wording.sentence_end(error.message)
    message = f"{error.verb} of {error.object} failed and is tried again: {said}"
    return Finding("Unknown", Reason.APPLY_FAILED, message)


def accepted(scene: Scene) -> Finding:
    """All is well: what was accepted, in numbers."""
    return Finding(
        "True", Reason.ACCEPTED, f"generation {scene.observed.generation}: {_sizes(scene)}"
    )


def contested(scene: Scene) -> Finding | None:
    """Objects that someone else changes again and again. The resource can be used all the same."""
    found = [
        Problem(contest.object, Reason.DRIFT_CONTESTED, _contest(contest))
        for contest in sorted(scene.observed.contests, key=lambda contest: contest.object)
    ]
    if not found:
        return None
    return Finding("True", Reason.DRIFT_CONTESTED, found[0].message, problems=tuple(found))


def missing_pod_monitors(scene: Scene) -> Finding | None:
    """spec.podMonitor in a cluster without Prometheus' operator: everything else works."""
    if scene.manifest.pod_monitor is None or scene.observed.is_pod_monitor_served:
        return None
    message = (
        "spec.podMonitor is set, and the cluster does not know PodMonitor (monitoring.coreos.com/v1): install the CRDs "
        "of Prometheus' operator, or remove spec.podMonitor"
    )
    problem = Problem(_kvcache(scene), Reason.POD_MONITOR_CRD_MISSING, message)
    return Finding("True", Reason.POD_MONITOR_CRD_MISSING, message, problems=(problem,))


CHECKS = (
    refused_by_render, foreign_object, forbidden, refused_object, missing_secret, failed_apply, accepted, contested,
    missing_pod_monitors,
)  # fmt: skip


def _kvcache(scene: Scene) -> str:
    return f"kvcache/{scene.manifest.name}"


def _reason_of(word: str) -> Reason:
    try:
        return Reason(word)
    except ValueError:
        return Reason.INVALID_TEMPLATE


def _errors(scene: Scene) -> list[ApplyError]:
    return sorted(scene.observed.apply_errors, key=lambda error: (error.object, error.verb))


def _reason(error: ApplyError, scene: Scene) -> Reason:
    if error.reason == Reason.NAME_CONFLICT:
        return Reason.NAME_CONFLICT
    if "exceeded quota" in error.message:
        return Reason.QUOTA_EXCEEDED
    has_template = _template_path(error, scene) is not None
    if has_template and any(words in error.message for words in UNKNOWN_FIELD):
        return Reason.INVALID_TEMPLATE
    if error.code in (401, 403):
        is_rbac = FORBIDDEN.search(error.message) or "RBAC" in error.message or error.code == 401
        return Reason.FORBIDDEN if is_rbac else Reason.APPLY_REFUSED
    if error.code in (0, 404, 408, 409, 410, 429) or error.code >= 500:
        return Reason.APPLY_FAILED
    return Reason.INVALID_TEMPLATE if has_template else Reason.APPLY_REFUSED


def _template_path(error: ApplyError, scene: Scene) -> str | None:
    """The template that went into this object; None where the user gave none."""
    if error.object.partition("/")[0] not in ("daemonset", "deployment", "statefulset"):
        return None
    manifest = scene.manifest
    embedded = manifest.redis.embedded
    templates = {
        "redis": ("spec.redis.embedded.template", embedded and embedded.template),
        "cache": ("spec.cache.template", manifest.cache.template),
        "prefill": ("spec.prefill.template", manifest.prefill and manifest.prefill.template),
        "decode": ("spec.decode.template", manifest.decode and manifest.decode.template),
        "router": ("spec.router.template", manifest.router.template),
    }
    path, template = templates.get(error.component, ("", None))
    return path if template else None


def _finding(scene: Scene, errors: list[ApplyError]) -> Finding | None:
    if not errors:
        return None
    messages = tuple(dict.fromkeys(_message(error, scene) for error in errors))
    problems = tuple(
        dict.fromkeys(
            Problem(error.object, _reason(error, scene), _message(error, scene)) for error in errors
        )
    )
    # A namespace that goes away refuses everything, and takes this resource along.
    is_hopeless = not any("being terminated" in error.message for error in errors)
    return Finding("False", _reason(errors[0], scene), "; ".join(messages), is_hopeless, problems)


def _message(error: ApplyError, scene: Scene) -> str:
    said = wording.sentence_end(error.message)
    reason = _reason(error, scene)
    namespace = scene.manifest.namespace
    if reason is Reason.NAME_CONFLICT:
        kind, _, name = error.object.partition("/")
        return (
            f"{KINDS.get(kind, kind)} {name} exists and is not owned by this KVCache: "
            "delete that object, or give this resource another name"
        )
    if reason is Reason.FORBIDDEN:
        found = FORBIDDEN.search(said)
        if found is None:
            return (
                f"cannot {error.verb} {error.object} in {namespace}: {PERMISSION_REMEDY} ({said})"
            )
        group = f".{found['group']}" if found["group"] else ""
        where = f" in {found['namespace']}" if found["namespace"] else ""
        return f"cannot {found['verb']} {found['resource']}{group}{where}: {PERMISSION_REMEDY}"
    if reason is Reason.QUOTA_EXCEEDED:
        return f"{error.object}: {said}: raise the quota of namespace {namespace}, or ask for less"
    if error.verb == "delete":
        return f"{error.object} is not wanted any more, and may not be deleted: {said}: allow it, or delete it"
    at = f" at {error.field_path}" if error.field_path and error.field_path not in said else ""
    if reason is Reason.INVALID_TEMPLATE:
        return f"{error.object} is refused{at}: {said}: correct {_template_path(error, scene)}"
    return f"{error.object} is refused{at}: {said}"


def _contest(contest: Contest) -> str:
    who = wording.joined(contest.managers) if contest.managers else "someone"
    if not contest.paths:
        does = f"deletes {contest.object} each time it is made"
    else:
        does = (
            f"changes {wording.listed(contest.paths)} of {contest.object} each time it is put right"
        )
    return f"{who} {does}: end that, or say in the KVCache what you want; until then it is put right every few minutes"


def _sizes(scene: Scene) -> str:
    manifest = scene.manifest
    parts = [
        f"{_count(name, role)} x TP{role.tensor_parallel_size}"
        for name, role in (("prefill", manifest.prefill), ("decode", manifest.decode))
        if role is not None
    ]
    if not parts:
        parts.append("no engines")
    elif manifest.engine.device is Device.CPU:
        parts[-1] += " on CPU"
    return ", ".join([*parts, f"{wording.size(manifest.cache.cpu_bytes)} of cache {_nodes(scene)}"])


def _count(name: str, role: Role) -> str:
    return f"{name} (autoscaled)" if role.replicas is None else f"{role.replicas} {name}"


def _nodes(scene: Scene) -> str:
    if scene.observed.nodes is not None:
        number = sum(node.matches_cache and node.tolerated for node in scene.observed.nodes)
    elif (found := scene.observed.workloads.get(Component.CACHE)) is not None:
        number = found.wanted
    else:
        return "on each node of the cache"
    return f"on {number} node" if number == 1 else f"on each of {number} nodes"
