"""The screen of `kubectl larder status`: what was seen of one KVCache, as text or JSON. Pure."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from cacheoperator.names import ENGINES, Component

from cacheservice.kubectl.agents import AgentAnswer
from cacheservice.kubectl.pods import pod_state, restarts
from cacheservice.kubectl.seen import Seen, component_of
from cacheservice.kubectl.text import INDENT, columns, mebibytes, share, short_digest

WIDTH = 120


@dataclass(frozen=True, slots=True)
class ConditionLine:
    type: str
    status: str
    reason: str
    since: str
    message: str


@dataclass(frozen=True, slots=True)
class AgentLine:
    """One agent. `hit_tokens` of `asked_tokens`: what lookups of its live sessions found."""

    pod: str
    node: str
    problem: str
    used_bytes: int = 0
    arena_bytes: int = 0
    chunks: int = 0
    sessions: int = 0
    asked_tokens: int = 0
    hit_tokens: int = 0
    index: str = ""
    version: str = ""
    draining: bool = False


@dataclass(frozen=True, slots=True)
class EngineLine:
    """One engine pod. `state` is `ready`, or what it is doing; `connected` counts its sessions with agents."""

    pod: str
    role: str
    node: str
    state: str
    restarts: int
    connected: int
    transport: str
    fingerprint: str
    asked_tokens: int
    hit_tokens: int


@dataclass(frozen=True, slots=True)
class Problem:
    object: str
    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class StatusView:
    """Everything on the screen; `is_ready` is the Ready condition of the present generation."""

    name: str
    namespace: str
    is_ready: bool
    generation: int
    observed_generation: int
    paused: bool
    endpoint: str
    router: str
    transport: str
    transport_reason: str
    model: Mapping[str, Any]
    versions: Mapping[str, Any]
    redis: str
    conditions: tuple[ConditionLine, ...]
    agents: tuple[AgentLine, ...]
    engines: tuple[EngineLine, ...]
    problems: tuple[Problem, ...]
    unread: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


def status_view(seen: Seen) -> StatusView:
    """What there is to say."""
    spec, status = seen.resource.get("spec") or {}, seen.resource.get("status") or {}
    generation = int(seen.resource["metadata"].get("generation", 0))
    observed = int(status.get("observedGeneration", 0))
    conditions = tuple(_condition(one) for one in status.get("conditions") or ())
    ready = next((one for one in conditions if one.type == "Ready"), None)
    return StatusView(
        name=seen.name, namespace=seen.namespace,
        is_ready=ready is not None and ready.status == "True" and observed == generation,
        generation=generation, observed_generation=observed, paused=bool(spec.get("paused")),
        endpoint=str(status.get("endpoint", "")), router=_router(seen),
        transport=str(status.get("transport", "")), transport_reason=str(status.get("transportReason", "")),
        model=status.get("model") or {}, versions=status.get("versions") or {}, redis=_redis(seen),
        conditions=conditions, agents=tuple(_agent(answer) for answer in seen.agents),
        engines=tuple(engine_lines(seen)),
        problems=tuple(
            Problem(str(one.get("object", "")), str(one.get("reason", "")), _one_line(one.get("message", "")))
            for one in status.get("problems") or ()
        ),
        unread=seen.unread,
    )  # fmt: skip


def screen(view: StatusView) -> str:
    """The view as text."""
    lines = [_headline(view), ""]
    facts = [
        ("endpoint", view.endpoint or "none yet", view.router),
        ("transport", view.transport or "not known yet", view.transport_reason),
        ("redis", view.redis, ""),
        ("model", _pairs(view.model) or "not known yet: engines say it when they have started", ""),
        ("versions", _pairs(view.versions) or "not known yet", ""),
    ]
    for title, value, more in facts:
        lines += _wrapped(f"{title:<11}", f"{value}  {more}".rstrip())
    lines += _section("conditions", [
        line for one in view.conditions
        for line in _wrapped(
            f"{INDENT}{one.type:<17}{one.status:<9}{one.reason:<22}", f"{one.message} (since {one.since})"
        )
    ] or [f"{INDENT}none: the operator has not seen it: is it installed? helm list -A"])  # fmt: skip
    lines += _section("agents", columns(
        ("POD", "NODE", "FILL", "CHUNKS", "SESSIONS", "HIT", "INDEX", "PROBLEM"),
        [_agent_cells(one) for one in view.agents],
    ) or [f"{INDENT}none seen: no node has one, or pods may not be listed"])  # fmt: skip
    if view.engines:
        lines += _section("engines", columns(
            ("POD", "ROLE", "NODE", "STATE", "TRANSPORT", "FINGERPRINT", "HIT", "RESTARTS"),
            [_engine_cells(one) for one in view.engines],
        ))  # fmt: skip
    lines += _section("problems", [
        line for one in view.problems
        for line in _wrapped(f"{INDENT}{one.object}  {one.reason}  ", one.message)
    ])  # fmt: skip
    lines += _section("not read", [line for one in view.unread for line in _wrapped(INDENT, one)])
    return "\n".join(lines) + "\n"


def _headline(view: StatusView) -> str:
    ready = next((one for one in view.conditions if one.type == "Ready"), None)
    state = (
        "Ready: unknown"
        if ready is None
        else f"Ready: {ready.status} ({ready.reason}) since {ready.since}"
    )
    if view.observed_generation != view.generation:
        state += f"; generation {view.generation} is new and not seen by the operator yet"
    if view.paused:
        state += "; paused: the operator changes nothing (spec.paused)"
    return f"{view.name} in namespace {view.namespace}   {state}"


def _agent_cells(one: AgentLine) -> tuple[str, ...]:
    if one.problem:
        return (one.pod, one.node or "-", "-", "-", "-", "-", "-", one.problem)
    return (
        one.pod, one.node, f"{share(one.used_bytes, one.arena_bytes)} of {mebibytes(one.arena_bytes)}",
        f"{one.chunks:,}", str(one.sessions), share(one.hit_tokens, one.asked_tokens), one.index,
        "draining" if one.draining else "",
    )  # fmt: skip


def _engine_cells(one: EngineLine) -> tuple[str, ...]:
    return (
        one.pod, one.role, one.node or "-", one.state, one.transport, short_digest(one.fingerprint),
        share(one.hit_tokens, one.asked_tokens), str(one.restarts),
    )  # fmt: skip


def _condition(one: Mapping[str, Any]) -> ConditionLine:
    return ConditionLine(
        type=str(one.get("type", "")), status=str(one.get("status", "")), reason=str(one.get("reason", "")),
        since=minute(str(one.get("lastTransitionTime", ""))), message=_one_line(one.get("message", "")),
    )  # fmt: skip


def _one_line(message: object) -> str:
    return " ".join(str(message).split())


def minute(stamp: str) -> str:
    """An API server's time to the minute: `2026-11-22 00:24 UTC`."""
    match = re.match(r"(\d{4}-\d\d-\d\d)T(\d\d:\d\d)", stamp)
    return f"{match[1]} {match[2]} UTC" if match else stamp or "?"


def _agent(answer: AgentAnswer) -> AgentLine:
    if answer.page is None:
        return AgentLine(answer.pod, answer.node, answer.problem)
    page = answer.page
    index = page.get("index") or {}
    health, message = str(index.get("health", "")), str(index.get("message", ""))
    sessions = page.get("sessions") or ()
    return AgentLine(
        pod=answer.pod, node=answer.node, problem="", used_bytes=int(page.get("used_bytes", 0)),
        arena_bytes=int(page.get("arena_bytes", 0)), chunks=int(page.get("num_chunks", 0)),
        sessions=int(page.get("num_sessions", 0)),
        asked_tokens=sum(int(one.get("asked_tokens", 0)) for one in sessions),
        hit_tokens=sum(int(one.get("hit_tokens", 0)) for one in sessions),
        index=f"{health}: {message}" if message and health != "ready" else health,
        version=str(page.get("version", "")), draining=bool(page.get("draining")),
    )  # fmt: skip


def engine_lines(seen: Seen) -> Iterable[EngineLine]:
    """Every engine pod; and engines of others that agents know, with their names instead of pods."""
    sessions = [
        one for answer in seen.agents if answer.page for one in answer.page.get("sessions") or ()
    ]
    sessions = [one for one in sessions if one.get("role")]
    pods = seen.pods_of(*ENGINES)
    named = {str(pod["metadata"]["name"]) for pod in pods}
    for pod in pods:
        name = str(pod["metadata"]["name"])
        yield _engine(
            name, component_of(pod), str(pod.get("spec", {}).get("nodeName", "")), pod_state(pod), restarts(pod),
            [one for one in sessions if engine_of(one) == name],
        )  # fmt: skip
    for name in sorted({engine_of(one) for one in sessions} - named):
        own = [one for one in sessions if engine_of(one) == name]
        host = str(own[0].get("host", ""))
        yield _engine(name, str(own[0]["role"]), host, "connected", 0, own)


def engine_of(session: Mapping[str, Any]) -> str:
    """The engine's name of a session: without `-dpN` of rank N of a data parallel group."""
    return re.sub(r"-dp\d+$", "", str(session.get("engine", "")))


def _engine(
    name: str, role: str, node: str, state: str, num_restarts: int, sessions: list[Mapping[str, Any]]
) -> EngineLine:  # fmt: skip
    transports = sorted({str(one.get("transport", "")) for one in sessions} - {""})
    fingerprints = sorted({str(one.get("namespace", "")) for one in sessions} - {""})
    if transports:
        transport = ", ".join(transports)
    else:
        transport = "not used yet" if sessions else "not connected"
    return EngineLine(
        pod=name, role=role, node=node, state=state, restarts=num_restarts, connected=len(sessions),
        transport=transport, fingerprint=", ".join(fingerprints),
        asked_tokens=sum(int(one.get("asked_tokens", 0)) for one in sessions),
        hit_tokens=sum(int(one.get("hit_tokens", 0)) for one in sessions),
    )  # fmt: skip


def _router(seen: Seen) -> str:
    router = (seen.resource.get("spec") or {}).get("router") or {}
    kind = str(router.get("type", "SMG"))
    if kind == "None":
        return "no router (spec.router.type None)"
    workload = seen.workload(Component.ROUTER)
    return f"router {kind}" + (f", {_ready_of(workload)}" if workload else "")


def _redis(seen: Seen) -> str:
    external = ((seen.resource.get("spec") or {}).get("redis") or {}).get("external")
    if external:
        text = f"external {external.get('address', '')}"
    else:
        workload = seen.workload(Component.REDIS)
        text = f"embedded, {_ready_of(workload)}" if workload else "embedded"
    answers = [answer.page for answer in seen.agents if answer.page]
    well = sum(1 for page in answers if (page.get("index") or {}).get("health") == "ready")
    return text + (f"; {well} of {len(answers)} agents use it" if answers else "")


def _ready_of(workload: Mapping[str, Any]) -> str:
    status, spec = workload.get("status") or {}, workload.get("spec") or {}
    ready = status.get("readyReplicas", status.get("numberReady", 0))
    return f"{ready or 0} of {spec.get('replicas', 1)} ready"


def _pairs(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items())


def _section(title: str, lines: list[str]) -> list[str]:
    return ["", title, *lines] if lines else []


def _wrapped(head: str, text: str) -> list[str]:
    """`head` and `text`, the lines of the text under each other."""
    indent = " " * min(len(head), 50)
    return textwrap.wrap(
        text, WIDTH, initial_indent=head, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    ) or [head.rstrip()]  # fmt: skip
