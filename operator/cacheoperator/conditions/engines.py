"""EnginesReady: as many engines of the newest version serve as are wanted, and the router in front of them. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timedelta

from cacheoperator.conditions import wording, workloads
from cacheoperator.conditions.finding import Decision, Finding, Problem, Scene, decide
from cacheoperator.conditions.reasons import Reason
from cacheoperator.conditions.troubles import ENGINE_CONTAINER, place, recent_kills
from cacheoperator.names import Component
from cacheoperator.observed import Pod, Workload
from cacheservice.manifest import Role, RouterType

CONDITION = "EnginesReady"


def check(scene: Scene) -> Decision:
    """Decide the condition; recent kills are problems too."""
    decision = decide(CHECKS, scene)
    kills = recent_kills(scene, components(scene))
    return Decision(decision.finding, (*decision.problems, *kills))


def roles(scene: Scene) -> tuple[tuple[Component, Role], ...]:
    """Roles that this resource runs itself."""
    both = ((Component.PREFILL, scene.manifest.prefill), (Component.DECODE, scene.manifest.decode))
    return tuple((component, role) for component, role in both if role is not None)


def components(scene: Scene) -> tuple[Component, ...]:
    """What stands between a client and the cache: engines, and the router when it is ours."""
    engines = tuple(component for component, _ in roles(scene))
    has_router = bool(engines) and scene.manifest.router.type is not RouterType.NONE
    return (*engines, Component.ROUTER) if has_router else engines


def not_applicable(scene: Scene) -> Finding | None:
    if components(scene):
        return None
    seen = any(session.role for agent in scene.observed.agents for session in agent.sessions)
    others = "engines of others are connected" if seen else "no engine is connected yet"
    return Finding("True", Reason.NOT_APPLICABLE, f"this resource runs no engines; {others}")


def exists(scene: Scene) -> Finding | None:
    return _first(workloads.check_exists(scene, component) for component in components(scene))


def rejected(scene: Scene) -> Finding | None:
    found = [workloads.check_rejected(scene, component) for component in components(scene)]
    told = [finding for finding in found if finding is not None]
    if not told:
        return None
    problems = tuple(problem for finding in told for problem in finding.problems)
    return Finding("False", told[0].reason, told[0].message, is_hopeless=True, problems=problems)


def pods(scene: Scene) -> Finding | None:
    return workloads.check_pods(scene, components(scene))


def rollout(scene: Scene) -> Finding | None:
    found = [
        workloads.check_rollout(scene, component, CONDITION) for component in components(scene)
    ]
    told = [finding for finding in found if finding is not None]
    told.sort(key=lambda finding: finding.reason is not Reason.ROLLOUT_STALLED)
    return told[0] if told else None


def loading(scene: Scene) -> Finding | None:
    """Engines that load their model, the one that takes longest first."""
    behind = [component for component, role in roles(scene) if not _serves(scene, component, role)]
    if not behind:
        return None
    waiting = [
        pod
        for component in behind
        for pod in workloads.pods_of(scene, component)
        if not pod.is_ready
    ]
    counts = ", ".join(_count(scene, component) for component, _ in roles(scene))
    if not waiting:
        return Finding("False", Reason.STARTING, f"{counts} ready; pods are being made")
    began = {pod.name: since for pod in waiting if (since := _loading_since(pod)) is not None}
    if not began:
        oldest = min(waiting, key=lambda pod: (pod.created_at, pod.name))
        text = f"{place(oldest)} starting since {wording.date_and_minute(oldest.created_at)}"
        return Finding("False", Reason.STARTING, f"{counts} ready; {text}")
    slowest = min(
        (pod for pod in waiting if pod.name in began), key=lambda p: (began[p.name], p.name)
    )
    since_at, limit_s = began[slowest.name], scene.manifest.engine.startup_timeout_s
    if scene.observed.now - since_at > timedelta(seconds=limit_s + 120):
        # The startup probe would have ended it: it was ready once, and is not any more.
        message = (
            f"{counts} ready; {place(slowest)} runs since {wording.date_and_minute(since_at)} and does not answer "
            f"/health: see kubectl logs -n {scene.manifest.namespace} {slowest.name} -c {ENGINE_CONTAINER}"
        )
        problem = Problem(f"pod/{slowest.name}", Reason.NOT_READY, message)
        return Finding("False", Reason.NOT_READY, message, problems=(problem,))
    message = (
        f"{counts} ready; slowest {place(slowest)} loading since {wording.minute(since_at)} of at most "
        f"{limit_s} s"
    )
    return Finding("False", Reason.MODEL_LOADING, message)


def router(scene: Scene) -> Finding | None:
    if Component.ROUTER not in components(scene) or _is_scaled_to_zero(scene):
        return None  # a router waits for its first engines
    return workloads.check_starting(scene, Component.ROUTER, "routers")


def ready(scene: Scene) -> Finding:
    found = roles(scene)
    counts = ", ".join(_count(scene, component) for component, _ in found)
    seen = [workloads.workload(scene, component) for component, _ in found]
    if _is_scaled_to_zero(scene):
        return Finding("True", Reason.SCALED_TO_ZERO, f"{counts}: no engine is wanted now")
    if any(workload is not None and not workloads.is_complete(workload) for workload in seen):
        message = f"{counts} ready: an autoscaler asked for more, and they are loading"
        return Finding("True", Reason.SCALING, message)
    return Finding("True", Reason.READY, f"{counts} ready")


CHECKS = (not_applicable, exists, rejected, pods, rollout, loading, router, ready)


def _is_scaled_to_zero(scene: Scene) -> bool:
    seen = [workloads.workload(scene, component) for component, _ in roles(scene)]
    return all(workload is not None and not workload.wanted for workload in seen)


def _first(findings: Iterable[Finding | None]) -> Finding | None:
    return next((finding for finding in findings if finding is not None), None)


def _count(scene: Scene, component: Component) -> str:
    found = workloads.workload(scene, component)
    return f"{component} {shown(found)}" if found is not None else f"{component} 0/?"


def shown(found: Workload) -> str:
    """`1/2`: ready and wanted. During a rollout old pods count here, but not for any condition."""
    return f"{found.ready}/{found.wanted}"


def _serves(scene: Scene, component: Component, role: Role) -> bool:
    """Whether a role has what is wanted. Where an autoscaler owns the number, one engine serves while others load:
    else every step up would make the resource not ready."""
    found = workloads.workload(scene, component)
    if found is None or workloads.is_complete(found):
        return True  # `exists` speaks of what is not there
    if role.replicas is not None or not found.ready or workloads.old_pods(scene, found, component):
        return False
    limit = timedelta(seconds=scene.manifest.engine.startup_timeout_s + 120)
    return all(
        scene.observed.now - pod.created_at < limit
        and not any(container.restarts for container in pod.containers)
        for pod in workloads.pods_of(scene, component)
        if not pod.is_ready
    )


def _loading_since(pod: Pod) -> datetime | None:
    for container in pod.containers:
        if container.name == ENGINE_CONTAINER and container.running_since is not None:
            return container.running_since
    return None
