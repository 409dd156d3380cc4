"""The status of a KVCache, whole, from what was observed; and the events that its transitions are worth. Pure.

Invariants: the same manifest, observation and previous status give the same status, and given that status again they
give it unchanged and no event; every condition is there from the first time on; lastTransitionTime moves with a
condition's status alone; a message changes only with what it tells, never because time passes. Called by `reconcile`,
which stores the result.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from cacheoperator import names
from cacheoperator.conditions import (
    accepted,
    cache,
    engines,
    ready,
    redis,
    stalled,
    transfer,
    wording,
)
from cacheoperator.conditions.finding import Decision, Finding, Problem, Scene
from cacheoperator.conditions.reasons import NOTICES, UNDER_WAY, Reason
from cacheoperator.names import Component
from cacheoperator.observed import NamespaceView, Observed
from cacheservice.manifest import KVCacheManifest

ORDER = ("Accepted", "RedisReady", "CacheReady", "EnginesReady", "TransferVerified")
CONDITIONS = ("Ready", *ORDER, "Stalled")
MAX_PROBLEMS = 8
MAX_MESSAGE = 8192
MAX_PROBLEM_MESSAGE = 1024
MAX_EVENT_MESSAGE = 1000

LAYOUTS = {
    "full": "Full",
    "mla": "MLA",
    "sliding_window": "SlidingWindow",
    "chunked_local": "ChunkedLocal",
    "recurrent": "Recurrent",
}


@dataclass(frozen=True, slots=True)
class Event:
    """One event on the KVCache."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


def status(
    manifest: KVCacheManifest | None, observed: Observed, previous: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole status. `manifest` is None when observed.is_refused says why; `previous` is {} the first time."""
    new: dict[str, Any] = {"observedGeneration": observed.generation}
    if manifest is None:
        unread = Finding(
            "Unknown", Reason.NOT_ACCEPTED, "not looked at: the resource is refused (see Accepted)"
        )
        findings = [accepted.refused_manifest(observed), *[unread] * (len(ORDER) - 1)]
        decisions = [Decision(finding, ()) for finding in findings]
        scene = None
        for field in (
            "endpoint",
            "connectionConfigMap",
            "transport",
            "transportReason",
            "model",
            "transfers",
        ):
            if field in previous:
                new[field] = previous[field]
        new["versions"] = {**previous.get("versions", {}), "operator": observed.operator_version}
    else:
        scene = Scene(manifest, observed, previous)
        decisions = [part.check(scene) for part in (accepted, redis, cache, engines, transfer)]
        findings = [decision.finding for decision in decisions]
        new |= _facts(scene)
        new["transfers"] = [
            {"prefill": pair.prefill, "decode": pair.decode, "verdict": pair.verdict, "since": _time(pair.since)}
            for pair in transfer.evidence(scene)
        ]  # fmt: skip
    new["summary"] = _summary(observed, manifest, findings)
    is_paused = manifest is not None and manifest.paused
    whole = {
        "Ready": ready.check(findings, scene, new.get("endpoint", "")),
        **dict(zip(ORDER, findings, strict=True)),
        "Stalled": stalled.check(
            [] if is_paused else findings, observed.now, _stored(previous, "Stalled")
        ),
    }
    new["conditions"] = [_condition(name, whole[name], observed, previous) for name in CONDITIONS]
    new["problems"] = _problems(decisions)
    return new


def recheck_after_s(new: Mapping[str, Any], observed: Observed) -> float | None:
    """Seconds until this status changes by time alone; None when only an observation can change it."""
    stored = _stored(new, "Stalled")
    if stored is None or stored[0] != "Unknown":
        return None
    return max(0.0, (stored[1] + stalled.STANDS_FOR - observed.now).total_seconds())


def transitions(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """Events for what changed from `previous` to `new`; none when nothing did."""
    events = [
        *_pausing(previous, new),
        *_acceptance(previous, new),
        *_gains_and_losses(previous, new),
        *_rollouts(previous, new),
        *_engine_numbers(previous, new),
        *_failures(previous, new),
        *_notices(previous, new),
        *_chunk_change(previous, new),
    ]
    return [
        Event(event.type, event.reason, wording.cut(event.message, MAX_EVENT_MESSAGE))
        for event in dict.fromkeys(events)
    ]


# Fields


def _facts(scene: Scene) -> dict[str, Any]:
    manifest, observed, previous = scene.manifest, scene.observed, scene.previous
    facts: dict[str, Any] = {"connectionConfigMap": names.connection_name(manifest.name)}
    if manifest.decode is not None:
        facts["endpoint"] = f"http://{manifest.name}.{manifest.namespace}.svc:{names.SERVICE_PORT}"
    used, why = transfer.transport(scene)
    if used:
        facts["transport"], facts["transportReason"] = used, why
    view = _model_view(scene)
    if view is not None:
        facts["model"] = {
            "layout": layout_of(view.facts),
            "chunkTokens": view.tokens_per_chunk,
            "kvBytesPerToken": view.bytes_per_token,
        }
    elif "model" in previous:
        facts["model"] = previous["model"]  # of the engines that ran last
    facts["versions"] = _versions(scene, observed, previous)
    return facts


def _versions(scene: Scene, observed: Observed, previous: Mapping[str, Any]) -> dict[str, Any]:
    """Of what runs; of what ran last where nothing does."""
    agents = redis.readable_agents(scene)
    sessions = transfer.engine_sessions(scene)
    seen: dict[str, Any] = {
        "agent": _joined(agent.version for agent in agents),
        "connector": _joined(session.larder_version for session in sessions),
        "engine": _joined(session.vllm_version for session in sessions),
        "protocol": min((session.protocol for session in sessions), default=0)
        or min((agent.protocol for agent in agents), default=0),
    }
    known = {name: value for name, value in seen.items() if value}
    return {**previous.get("versions", {}), **known, "operator": observed.operator_version}


def _joined(values: Any) -> str:
    return ", ".join(sorted({value for value in values if value}))


def _model_view(scene: Scene) -> NamespaceView | None:
    """The namespace of the newest decode engines, else of any engines; the most used one."""
    views = {
        view.digest: view for agent in redis.readable_agents(scene) for view in agent.namespaces
    }
    sessions = [s for s in transfer.engine_sessions(scene) if s.namespace in views]
    newest = {
        pod.name
        for pod in scene.observed.pods
        if (found := scene.observed.workloads.get(pod.component)) is not None
        if pod.template_hash == found.newest_template_hash
    }
    for chosen in (
        [s for s in sessions if s.role == Component.DECODE and s.engine in newest],
        [s for s in sessions if s.engine in newest],
        sessions,
    ):
        if chosen:
            counts = Counter(session.namespace for session in chosen)
            return views[min(counts, key=lambda digest: (-counts[digest], digest))]
    return None


def layout_of(facts: Mapping[str, object]) -> str:
    """`MLA`, `Full+SlidingWindow`: the kinds of KV cache groups of a namespace's description."""
    groups = facts.get("groups")
    if not isinstance(groups, list | tuple):
        return "Unknown"
    kinds = [str(group.get("kind", "")) for group in groups if isinstance(group, Mapping)]
    return (
        "+".join(dict.fromkeys(LAYOUTS.get(kind, kind or "Unknown") for kind in kinds)) or "Unknown"
    )


def _summary(
    observed: Observed, manifest: KVCacheManifest | None, findings: Sequence[Finding]
) -> dict[str, str]:
    summary = {
        str(component): engines.shown(found)
        for component in (Component.REDIS, Component.CACHE, Component.PREFILL, Component.DECODE)
        if (found := observed.workloads.get(component)) is not None
    }
    if manifest is not None and manifest.redis.external is not None:
        summary[Component.REDIS.value] = str(findings[ORDER.index("RedisReady")].reason)
    return summary


def _problems(decisions: Sequence[Decision]) -> list[dict[str, str]]:
    """Worst first: those of hopeless conditions, then in the order of conditions, notices last; one per object and
    reason."""
    ordered = sorted(decisions, key=lambda decision: not decision.finding.is_hopeless)
    unique: dict[tuple[str, str], Problem] = {}
    for decision in ordered:
        for problem in decision.problems:
            unique.setdefault((problem.object, problem.reason), problem)
    return [
        {
            "object": problem.object,
            "reason": str(problem.reason),
            "message": wording.cut(problem.message, MAX_PROBLEM_MESSAGE),
        }
        for problem in sorted(unique.values(), key=lambda problem: problem.reason in NOTICES)[
            :MAX_PROBLEMS
        ]
    ]


# Conditions


def _condition(
    name: str, finding: Finding, observed: Observed, previous: Mapping[str, Any]
) -> dict[str, Any]:
    stored = _stored(previous, name)
    at = stored[1] if stored is not None and stored[0] == finding.status else observed.now
    return {
        "type": name,
        "status": finding.status,
        "observedGeneration": observed.generation,
        "lastTransitionTime": _time(at),
        "reason": str(finding.reason),
        "message": wording.cut(finding.message, MAX_MESSAGE),
    }


def _stored(status_: Mapping[str, Any], name: str) -> tuple[str, datetime] | None:
    found = _conditions(status_).get(name)
    if found is None:
        return None
    try:
        at = datetime.fromisoformat(str(found.get("lastTransitionTime")))
    except ValueError:
        return None
    return (str(found.get("status")), at) if at.tzinfo is not None else None


def _conditions(status_: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    return {str(found.get("type")): found for found in status_.get("conditions") or ()}


def _time(at: datetime) -> str:
    return f"{at.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"


# Events


def _pair(
    previous: Mapping[str, Any], new: Mapping[str, Any], name: str
) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    empty: Mapping[str, Any] = {}
    return _conditions(previous).get(name, empty), _conditions(new).get(name, empty)


def _pausing(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    before, after = _pair(previous, new, "Ready")
    was, is_now = before.get("reason") == Reason.PAUSED, after.get("reason") == Reason.PAUSED
    if is_now and not was:
        return [Event("Normal", "Paused", after["message"])]
    if was and not is_now:
        return [Event("Normal", "Resumed", "spec.paused is false: objects are brought up to date")]
    return []


def _acceptance(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    before, after = _pair(previous, new, "Accepted")
    if after.get("status") != "True":
        return []
    is_same = before.get("status") == "True" and before.get("observedGeneration") == after.get(
        "observedGeneration"
    )
    return [] if is_same else [Event("Normal", "Accepted", after["message"])]


def _gains_and_losses(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    events = []
    for name, gained, lost in (
        ("RedisReady", "RedisReady", "RedisLost"),
        ("CacheReady", "CacheReady", "CacheDegraded"),
        ("TransferVerified", "TransferVerified", "TransferLost"),
    ):
        before, after = _pair(previous, new, name)
        was, is_now = _holds(before), _holds(after)
        # A controller that has not seen a change yet is no loss, and its end no gain.
        was_blink = before.get("reason") == Reason.AWAITING_CONTROLLER
        if is_now and not was and not was_blink and before.get("reason") != Reason.ROLLING_OUT:
            events.append(Event("Normal", gained, after["message"]))
        elif was and after.get("status") == "False" and after.get("reason") != Reason.ROLLING_OUT:
            events.append(Event("Warning", lost, after["message"]))
    return events


def _holds(condition: Mapping[str, Any]) -> bool:
    """True, and by evidence: what does not apply is neither gained nor lost."""
    return condition.get("status") == "True" and condition.get("reason") not in (
        Reason.NOT_APPLICABLE,
        Reason.SCALED_TO_ZERO,
    )


def _rollouts(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    rolling = (Reason.ROLLING_OUT, Reason.ROLLOUT_STALLED)
    events = []
    for name in ("RedisReady", "CacheReady", "EnginesReady"):
        before, after = _pair(previous, new, name)
        if after.get("reason") == Reason.ROLLING_OUT and before.get("reason") not in rolling:
            events.append(Event("Normal", "RolloutStarted", after["message"]))
        elif before.get("reason") in rolling and after.get("status") == "True":
            events.append(Event("Normal", "RolloutFinished", f"{name}: {after['message']}"))
    return events


def _engine_numbers(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """Engines that came or went; an autoscaler's step down loses none."""
    events = []
    for role in (Component.PREFILL, Component.DECODE):
        before = _numbers(previous.get("summary", {}).get(role, "0/0"))
        after = _numbers(new.get("summary", {}).get(role, "0/0"))
        text = f"{role} {after[0]}/{after[1]} ready"
        if after[0] > before[0]:
            events.append(Event("Normal", "EngineConnected", text))
        elif after[0] < before[0] and after[0] < after[1]:
            events.append(Event("Warning", "EngineLost", text))
    return events


def _numbers(text: str) -> tuple[int, int]:
    ready_, _, wanted = text.partition("/")
    return (int(ready_), int(wanted)) if ready_.isdigit() and wanted.isdigit() else (0, 0)


def _failures(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """One Warning per failure reason, from the first condition that has it."""
    before, after = _failure_reasons(previous), _failure_reasons(new)
    return [
        Event("Warning", reason, message)
        for reason, message in after.items()
        if reason not in before
    ]


def _failure_reasons(status_: Mapping[str, Any]) -> dict[str, str]:
    reasons: dict[str, str] = {}
    conditions = _conditions(status_)
    for name in ORDER:
        found = conditions.get(name, {})
        reason = str(found.get("reason", ""))
        is_failure = found.get("status") in ("False", "Unknown") and reason not in UNDER_WAY
        if is_failure or reason == Reason.FALLBACK_STREAM:
            reasons.setdefault(reason, str(found.get("message", "")))
    return reasons


def _notices(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    """One Warning for each object that gets a problem which decides no condition."""
    before = {(problem["object"], problem["reason"]) for problem in previous.get("problems") or ()}
    return [
        Event("Warning", problem["reason"], problem["message"])
        for problem in new.get("problems") or ()
        if problem["reason"] in NOTICES and (problem["object"], problem["reason"]) not in before
    ]


def _chunk_change(previous: Mapping[str, Any], new: Mapping[str, Any]) -> list[Event]:
    before = (previous.get("model") or {}).get("chunkTokens")
    after = (new.get("model") or {}).get("chunkTokens")
    if before is None or after is None or before == after:
        return []
    message = (
        f"chunkTokens changed from {before} to {after}: chunks stored with {before} tokens are unreachable now, "
        "and leave as room is needed"
    )
    return [Event("Warning", "ChunkTokensChanged", message)]
