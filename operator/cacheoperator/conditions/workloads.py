"""Checks that agents, engines, Redis and router have in common: is the workload there, seen, complete, in motion. Pure.

Invariant: a workload is complete only when its controller has seen the newest version and enough pods *of that version*
are ready; old pods never make up the number.
"""

from __future__ import annotations

from datetime import timedelta

from cacheoperator.conditions import wording
from cacheoperator.conditions.finding import Finding, Problem, Scene
from cacheoperator.conditions.reasons import Reason
from cacheoperator.conditions.troubles import place, troubles
from cacheoperator.names import ENGINES, Component, workload_name
from cacheoperator.observed import Pod, Workload

STALLED_AFTER = timedelta(minutes=20)
KIND_OF = {
    Component.REDIS: "statefulset",
    Component.CACHE: "daemonset",
    Component.PREFILL: "deployment",
    Component.DECODE: "deployment",
    Component.ROUTER: "deployment",
}


def workload(scene: Scene, component: Component) -> Workload | None:
    """The live workload of `component`."""
    return scene.observed.workloads.get(component)


def object_of(scene: Scene, component: Component) -> str:
    """`daemonset/demo-cache`."""
    return f"{KIND_OF[component]}/{workload_name(scene.manifest.name, component)}"


def pods_of(scene: Scene, component: Component) -> tuple[Pod, ...]:
    """Pods of `component` that count: neither being deleted nor failed; oldest first."""
    return tuple(
        sorted(
            (
                pod
                for pod in scene.observed.pods
                if pod.component == component and not pod.is_deleting and pod.phase != "Failed"
            ),
            key=lambda pod: (pod.created_at, pod.name),
        )
    )


def is_complete(found: Workload) -> bool:
    """Whether as many pods of the newest version are ready as are wanted, by its controller's own word."""
    return (
        found.observed_generation >= found.generation
        and found.updated >= found.wanted
        and found.ready >= found.wanted
    )


def old_pods(scene: Scene, found: Workload, component: Component) -> tuple[Pod, ...]:
    """Pods of an older revision, those that are being deleted too."""
    newest = found.newest_template_hash
    return tuple(
        pod
        for pod in scene.observed.pods
        if pod.component == component and pod.phase != "Failed"
        if newest and pod.template_hash and pod.template_hash != newest
    )


def is_rolling(scene: Scene, component: Component) -> bool:
    """Whether pods of two revisions are there, or the newest version is not seen or not complete yet."""
    found = workload(scene, component)
    if found is None or not found.wanted:
        return False
    return bool(old_pods(scene, found, component)) or found.updated < found.wanted


def check_exists(scene: Scene, component: Component) -> Finding | None:
    """The workload is there, and its controller has seen its newest version."""
    found = workload(scene, component)
    what = object_of(scene, component)
    if found is None:
        return Finding("Unknown", Reason.CREATING, f"{what} does not exist yet")
    if found.observed_generation < found.generation:
        message = f"{what}: its controller has not seen its newest version yet"
        return Finding("Unknown", Reason.AWAITING_CONTROLLER, message)
    return None


def check_rejected(scene: Scene, component: Component) -> Finding | None:
    """Pods that the API server refuses: Pod Security, quota, a missing ServiceAccount. A DaemonSet has no condition for
    that, only FailedCreate events; they live on for an hour, so they count only while pods are missing."""
    found = workload(scene, component)
    if found is None:
        return None
    said = found.condition_messages.get("ReplicaFailure", "")
    newest = found.newest_template_hash
    present = [
        pod
        for pod in pods_of(scene, component)
        if not newest or not pod.template_hash or pod.template_hash == newest
    ]
    if not said and len(present) < found.wanted:
        events = [
            warning
            for warning in scene.observed.warnings
            if warning.component == component and warning.reason == "FailedCreate"
            if found.changed_at is None or warning.last_seen >= found.changed_at
        ]
        if events:
            newest_event = max(events, key=lambda event: (event.last_seen, event.message))
            said = newest_event.message
    if not said:
        return None
    what = object_of(scene, component)
    if "exceeded quota" in said:
        remedy = f"raise the quota of namespace {scene.manifest.namespace}, or ask for less"
    elif "PodSecurity" in said:
        remedy = f"namespace {scene.manifest.namespace} must allow it, or the template must not ask for it"
    else:
        remedy = "change what it names, or the template"
    message = f"{what}: pods are refused: {wording.sentence_end(_without_pod_name(said))}: {remedy}"
    return Finding(
        "False", Reason.POD_REJECTED, message, is_hopeless=True,
        problems=(Problem(what, Reason.POD_REJECTED, message),),
    )  # fmt: skip


def _without_pod_name(said: str) -> str:
    """A refused pod has another name at each try, and a message must not change with it."""
    head, found, tail = said.partition(" is forbidden: ")
    return tail if found and head.startswith(("Error creating: pods ", "pods ")) else said


def check_pods(scene: Scene, components: tuple[Component, ...]) -> Finding | None:
    """The worst trouble of the pods; all of them as problems. Failed leftovers count while something is missing."""
    found = troubles(scene, components)
    complete = {
        component
        for component in components
        if (seen := workload(scene, component)) is not None and is_complete(seen)
    }
    told = [
        trouble
        for trouble in found
        if not (trouble.reason is Reason.EVICTED and trouble.pod.component in complete)
    ]
    if not told:
        return None
    worst = told[0]
    problems = tuple(dict.fromkeys(trouble.problem for trouble in told))
    serving = [
        f"{component} keeps serving with its old revision"
        for component in components
        if component == worst.pod.component
        if (seen := workload(scene, component)) is not None
        if any(pod.is_ready for pod in old_pods(scene, seen, component))
    ]
    message = "; ".join([worst.message, *serving])
    return Finding("False", worst.reason, message, worst.is_hopeless, problems)


def check_rollout(scene: Scene, component: Component, condition: str) -> Finding | None:
    """A new revision on its way: stalled when its controller says so or it takes too long, else rolling out.

    `condition` remembers that it rolls by its previous reason, until the last new pod is ready.
    """
    found = workload(scene, component)
    if found is None or not found.wanted:
        return None
    has_old = bool(old_pods(scene, found, component))
    began = scene.previous_reason(condition) in (Reason.ROLLING_OUT, Reason.ROLLOUT_STALLED)
    if not has_old and (not began or is_complete(found)):
        return None
    what = object_of(scene, component)
    waiting = [
        pod
        for pod in pods_of(scene, component)
        if not pod.is_ready and pod.template_hash == found.newest_template_hash
    ]
    allowed = STALLED_AFTER
    if component in ENGINES:
        allowed = max(allowed, timedelta(seconds=scene.manifest.engine.startup_timeout_s))
    # By the pod's age: a revision that was rolled back to is as old as when it was first made.
    is_late = bool(waiting) and scene.observed.now - waiting[0].created_at > allowed
    if "Progressing" not in found.condition_messages and not is_late:
        message = f"{what} is replacing its pods by those of its newest revision"
        return Finding("False", Reason.ROLLING_OUT, message)
    is_served = any(pod.is_ready for pod in old_pods(scene, found, component))
    old = "old revision still serving" if is_served else "no old pod serves any more"
    namespace = scene.manifest.namespace
    stuck, remedy = "", f"kubectl describe -n {namespace} {what}"
    if waiting:
        since = wording.date_and_minute(waiting[0].created_at)
        stuck = f", {place(waiting[0])} not ready since {since}"
        remedy = f"kubectl describe pod -n {namespace} {waiting[0].name}"
    message = f"{what}: {old}; {found.updated}/{found.wanted} updated{stuck}: see {remedy}"
    problem = Problem(what, Reason.ROLLOUT_STALLED, message)
    return Finding("False", Reason.ROLLOUT_STALLED, message, problems=(problem,))


def check_starting(scene: Scene, component: Component, ready: str) -> Finding | None:
    """Not all pods ready, and nothing known to be wrong. `ready` says what a ready one is called: nodes, pods."""
    found = workload(scene, component)
    if found is None or is_complete(found):
        return None
    waiting = [pod for pod in pods_of(scene, component) if not pod.is_ready]
    since = wording.date_and_minute(waiting[0].created_at) if waiting else ""
    where = f"; {place(waiting[0])} waits since {since}" if waiting else ""
    message = f"{object_of(scene, component)}: {min(found.ready, found.updated)}/{found.wanted} {ready} ready{where}"
    return Finding("False", Reason.STARTING, message)
