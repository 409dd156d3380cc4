"""RedisReady: the index answers, as the agents see it. Pure.

The operator never speaks to Redis: an embedded one is judged by its pod first, both kinds by what agents report.
"""

from __future__ import annotations

from dataclasses import replace

from cacheoperator.conditions import wording, workloads
from cacheoperator.conditions.finding import Decision, Finding, Problem, Scene, decide
from cacheoperator.conditions.reasons import Reason
from cacheoperator.conditions.troubles import has_stood
from cacheoperator.names import Component, workload_name
from cacheoperator.observed import AgentReport

CONDITION = "RedisReady"
WORST_FIRST = (
    Reason.AUTH_FAILED, Reason.PERMISSION_DENIED, Reason.TLS_FAILED, Reason.FULL, Reason.REFUSED, Reason.UNREACHABLE,
)  # fmt: skip
EFFECT = {
    Reason.FULL: "new chunks are found on their own node only",
}
"""What goes on meanwhile; the others: engines keep running with the chunks of their own node only."""
OTHER_EFFECT = "engines keep running with the chunks of their own node only"


def check(scene: Scene) -> Decision:
    """Decide the condition."""
    return decide(CHECKS, scene)


def readable_agents(scene: Scene) -> tuple[AgentReport, ...]:
    """Agents that answered, by node; one that drains goes away and is not asked about Redis."""
    return tuple(
        sorted(
            (agent for agent in scene.observed.agents if not agent.problem),
            key=lambda agent: (agent.node, agent.pod),
        )
    )


def embedded_exists(scene: Scene) -> Finding | None:
    return workloads.check_exists(scene, Component.REDIS) if _is_embedded(scene) else None


def embedded_rejected(scene: Scene) -> Finding | None:
    return workloads.check_rejected(scene, Component.REDIS) if _is_embedded(scene) else None


def embedded_pods(scene: Scene) -> Finding | None:
    return workloads.check_pods(scene, (Component.REDIS,)) if _is_embedded(scene) else None


def embedded_rollout(scene: Scene) -> Finding | None:
    return (
        workloads.check_rollout(scene, Component.REDIS, CONDITION) if _is_embedded(scene) else None
    )


def embedded_starting(scene: Scene) -> Finding | None:
    return workloads.check_starting(scene, Component.REDIS, "pods") if _is_embedded(scene) else None


def agents_in_trouble(scene: Scene) -> Finding | None:
    """What agents say, the worst first; those that are well are mentioned, since then it is not Redis alone."""
    agents = [agent for agent in readable_agents(scene) if not agent.is_draining]
    bad = [(reason, agent) for agent in agents if (reason := index_reason(agent)) is not None]
    if not bad:
        return None
    reason, agent = min(bad, key=lambda pair: (WORST_FIRST.index(pair[0]), pair[1].node))
    nodes = [a.node for r, a in bad if r is reason]
    where = f"agents on {wording.listed(nodes)}" if len(bad) < len(agents) else "all agents"
    said = wording.sentence_end(agent.index_message) or f"Redis at {address(scene)} is {reason}"
    message = f"{said}; seen by {where}; {EFFECT.get(reason, OTHER_EFFECT)}"
    # After its password changed, an embedded Redis and its agents meet again by themselves: a kubelet's refresh later.
    is_hopeless = reason in (Reason.AUTH_FAILED, Reason.PERMISSION_DENIED, Reason.TLS_FAILED)
    problem = Problem(_object(scene), reason, message)
    return Finding("False", reason, message, is_hopeless and not _is_embedded(scene), (problem,))


def no_agent_yet(scene: Scene) -> Finding | None:
    """An external Redis that nobody has asked yet: agents are the only ones that speak to it."""
    if _is_embedded(scene) or any(has_asked(agent) for agent in readable_agents(scene)):
        return None
    said = unreadable(scene) or Finding(
        "Unknown", Reason.AWAITING_AGENTS, "no agent has asked it yet (see CacheReady)"
    )
    return replace(said, message=f"{address(scene)}: {said.message}")


def unreadable(scene: Scene) -> Finding | None:
    """Agents that have been ready for a while, none of which the operator can read."""
    failed = {agent.pod for agent in scene.observed.agents if agent.problem}
    settled = [
        pod
        for pod in scene.observed.pods
        if pod.component == Component.CACHE and pod.name in failed and has_stood(scene, pod)
    ]
    if not settled or readable_agents(scene):
        return None
    message = (
        "agents are ready, but the operator can't read what they say: let it reach their port 7501"
    )
    return Finding("Unknown", Reason.AGENTS_UNREADABLE, message)


def ready(scene: Scene) -> Finding:
    external = scene.manifest.redis.external
    if external is None:
        return Finding("True", Reason.READY, f"{_object(scene)} answers")
    with_tls = " (TLS)" if external.tls is not None else ""
    return Finding("True", Reason.READY, f"{external.address}{with_tls} answers")


CHECKS = (
    embedded_exists, embedded_rejected, embedded_pods, embedded_rollout, embedded_starting, agents_in_trouble,
    no_agent_yet, ready,
)  # fmt: skip


def index_reason(agent: AgentReport) -> Reason | None:
    """What one agent says of its index; None when it is well, or has not asked yet."""
    if agent.index_reason:
        try:
            found = Reason(agent.index_reason)
        except ValueError:
            return Reason.REFUSED
        return found if found in WORST_FIRST else Reason.REFUSED
    return None if agent.index_health == "ready" or not has_asked(agent) else Reason.REFUSED


def has_asked(agent: AgentReport) -> bool:
    """Whether the agent has heard of its index since it started: before that it is `unreachable` for no reason."""
    return bool(agent.index_reason) or agent.index_health not in ("", "unreachable")


def address(scene: Scene) -> str:
    """host:port of the Redis in use."""
    external = scene.manifest.redis.external
    if external is not None:
        return external.address
    return f"{workload_name(scene.manifest.name, Component.REDIS)}:6379"


def _is_embedded(scene: Scene) -> bool:
    return scene.manifest.redis.external is None


def _object(scene: Scene) -> str:
    if _is_embedded(scene):
        return workloads.object_of(scene, Component.REDIS)
    return f"redis/{address(scene)}"
