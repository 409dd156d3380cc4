"""Why one pod does not become ready, and what to do: from the kubelet's and the scheduler's words. Pure.

Invariants: a pod has at most one trouble, the one nearest to the cause; a ready pod has none. Messages name the pod,
the cause and the remedy, and hold no counts of restarts or times that pass. Used by the conditions of all components.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta

from cacheoperator.conditions import secrets, wording
from cacheoperator.conditions.finding import Problem, Scene
from cacheoperator.conditions.reasons import Reason
from cacheoperator.names import Component
from cacheoperator.observed import Container, Pod
from cacheservice.manifest import KVCacheManifest

PULL_REASONS = frozenset(
    {
        "ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable",
        "ImageInspectError", "SignatureValidationFailed",
    }
)  # fmt: skip
START_REASONS = frozenset(
    {"CreateContainerError", "RunContainerError", "CreateContainerConfigError"}
)
PROBE_EARLY = timedelta(seconds=30)
PROBE_LATE = timedelta(seconds=120)
"""A run that the startup probe ends lasts as long as it allows: a probe's period less, or the pod's grace more."""
RECENT = timedelta(minutes=10)
"""How long an OOM kill is shown after the container is ready again."""
STANDS_AFTER = timedelta(seconds=60)
ENGINE_CONTAINER = "vllm"
SCHEDULER_ASIDE = re.compile(r"\.? (no new claims to deallocate|preemption: ).*", re.DOTALL)
"""What kube-scheduler 1.35 adds after the reason: what it thought of evicting others."""

SEVERITY = (
    Reason.SECRET_NOT_FOUND, Reason.CONFIG_MAP_NOT_FOUND, Reason.IMAGE_PULL_FAILED, Reason.INIT_FAILED,
    Reason.START_FAILED, Reason.OOM_KILLED, Reason.STARTUP_TIMEOUT, Reason.CRASH_LOOPING, Reason.UNSCHEDULABLE,
    Reason.MOUNT_FAILED, Reason.NODE_NOT_READY, Reason.EVICTED,
)  # fmt: skip
"""Worst first: which of several pods' troubles a condition tells."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """What is wrong with `pod`. `object` is what a person must change or look at."""

    pod: Pod
    reason: Reason
    object: str
    message: str
    is_hopeless: bool

    @property
    def problem(self) -> Problem:
        """As it stands in status.problems."""
        return Problem(self.object, self.reason, self.message)


def troubles(scene: Scene, components: Iterable[str]) -> tuple[Trouble, ...]:
    """Troubles of the pods of `components`, worst first, then oldest first; pods that are being deleted have none."""
    wanted = frozenset(components)
    found = [
        trouble
        for pod in scene.observed.pods
        if pod.component in wanted and not pod.is_deleting and not pod.is_ready
        if (trouble := _trouble(pod, scene)) is not None
    ]
    return tuple(
        sorted(found, key=lambda t: (SEVERITY.index(t.reason), t.pod.created_at, t.pod.name))
    )


def recent_kills(scene: Scene, components: Iterable[str]) -> tuple[Problem, ...]:
    """Ready pods whose container was killed for memory a short while ago: it will come again."""
    wanted = frozenset(components)
    return tuple(
        Problem(f"pod/{pod.name}", Reason.OOM_KILLED, _oom(pod, container, scene.manifest))
        for pod in scene.observed.pods
        if pod.component in wanted and not pod.is_deleting and pod.is_ready
        for container in pod.containers
        if container.ended_reason == "OOMKilled" and container.ended_at is not None
        if scene.observed.now - container.ended_at < RECENT
    )


def has_stood(scene: Scene, pod: Pod) -> bool:
    """Whether a pod has been ready long enough for others to have noticed."""
    return (
        pod.is_ready
        and pod.ready_since is not None
        and scene.observed.now - pod.ready_since > STANDS_AFTER
    )


def place(pod: Pod) -> str:
    """`pod/demo-cache-x on gpu-3`."""
    return f"pod/{pod.name} on {pod.node}" if pod.node else f"pod/{pod.name}"


def _trouble(pod: Pod, scene: Scene) -> Trouble | None:
    if pod.phase == "Failed":
        return _failed(pod)
    return (
        _waiting(pod, scene)
        or _mounts(pod, scene)
        or _ended(pod, scene)
        or _unscheduled(pod, scene)
        or _on_lost_node(pod, scene)
    )


def _failed(pod: Pod) -> Trouble:
    said = wording.sentence_end(pod.failed) or "it failed, and its node gives no reason"
    message = f"{place(pod)}: {said}; its controller makes another one: see that its node has room"
    return Trouble(pod, Reason.EVICTED, f"pod/{pod.name}", message, is_hopeless=False)


def _waiting(pod: Pod, scene: Scene) -> Trouble | None:
    for container in pod.containers:
        reason, said = container.waiting_reason, wording.sentence_end(container.waiting_message)
        if reason in PULL_REASONS:
            return _pull(pod, container, said, scene)
        if reason in START_REASONS:
            absent = secrets.missing(said, scene.manifest)
            if absent is not None:
                return _missing(pod, absent)
            message = (
                f"{place(pod)}: container {container.name} can't be started "
                f"({reason}: {said or 'no reason given'}): correct its image, command or template"
            )
            return Trouble(pod, Reason.START_FAILED, f"pod/{pod.name}", message, is_hopeless=False)
    return None


def _missing(pod: Pod, absent: secrets.Missing) -> Trouble:
    return Trouble(
        pod, absent.reason, absent.object, absent.message, is_hopeless=not absent.is_ours
    )


def _pull(pod: Pod, container: Container, said: str, scene: Scene) -> Trouble:
    # ErrImagePull and ImagePullBackOff take turns; only the former says why, and not always.
    detail = (
        "" if said.startswith("Back-off pulling image") and "ErrImagePull" not in said else said
    )
    told = f" ({wording.cut(detail, 500)})" if detail else ""
    message = (
        f"{place(pod)}: image {container.image} of container {container.name} can't be pulled{told}: "
        "correct the image, or give spec.imagePullSecrets"
    )
    without = [
        warning.message
        for warning in scene.observed.warnings
        if warning.reason == "FailedToRetrieveImagePullSecret"
        and warning.object in (f"pod/{pod.name}", pod.name)
    ]
    if without:
        message += f"; {wording.sentence_end(without[0])}"
    return Trouble(pod, Reason.IMAGE_PULL_FAILED, f"pod/{pod.name}", message, is_hopeless=True)


def _mounts(pod: Pod, scene: Scene) -> Trouble | None:
    if not pod.supplemental_problem:
        return None
    absent = secrets.missing(pod.supplemental_problem, scene.manifest)
    if absent is not None:
        return _missing(pod, absent)
    said = wording.sentence_end(pod.supplemental_problem)
    message = f"{place(pod)}: {wording.cut(said, 600)}; look at its volumes and at its node"
    return Trouble(pod, Reason.MOUNT_FAILED, f"pod/{pod.name}", message, is_hopeless=False)


def _ended(pod: Pod, scene: Scene) -> Trouble | None:
    for container in pod.containers:
        if container.is_ready or container.ended_exit_code is None:
            continue
        if container.ended_reason == "OOMKilled":
            message = _oom(pod, container, scene.manifest)
            return Trouble(pod, Reason.OOM_KILLED, f"pod/{pod.name}", message, is_hopeless=False)
        if container.is_init:
            if container.ended_exit_code == 0:
                continue
            message = _exit(pod, container, scene.manifest)
            return Trouble(pod, Reason.INIT_FAILED, f"pod/{pod.name}", message, is_hopeless=False)
        if _was_ended_by_startup_probe(container, pod, scene.manifest):
            message = _timeout(pod, container, scene.manifest)
            return Trouble(
                pod, Reason.STARTUP_TIMEOUT, f"pod/{pod.name}", message, is_hopeless=True
            )
        if container.waiting_reason == "CrashLoopBackOff" or container.restarts >= 2:
            message = _exit(pod, container, scene.manifest)
            return Trouble(pod, Reason.CRASH_LOOPING, f"pod/{pod.name}", message, is_hopeless=False)
    return None


def _was_ended_by_startup_probe(container: Container, pod: Pod, manifest: KVCacheManifest) -> bool:
    if pod.component not in (Component.PREFILL, Component.DECODE):
        return False
    if container.name != ENGINE_CONTAINER or container.ended_exit_code not in (137, 143, 0):
        return False
    if container.ended_at is None or container.ended_started_at is None:
        return False
    allowed = timedelta(seconds=manifest.engine.startup_timeout_s)
    lasted = container.ended_at - container.ended_started_at
    return allowed - PROBE_EARLY <= lasted <= allowed + PROBE_LATE


def _timeout(pod: Pod, container: Container, manifest: KVCacheManifest) -> str:
    lines = wording.last_lines(container.ended_message)
    told = f"; it said last: {lines}" if lines else ""
    return (
        f"{place(pod)} did not finish loading within {manifest.engine.startup_timeout_s} s and was restarted: "
        f"raise spec.engine.startupTimeoutSeconds{told}"
    )


def _exit(pod: Pod, container: Container, manifest: KVCacheManifest) -> str:
    kind = "init container" if container.is_init else "container"
    lines = wording.last_lines(container.ended_message)
    told = f": {lines}" if lines else ""
    return (
        f"{place(pod)}: {kind} {container.name} ends with exit code {container.ended_exit_code}{told}; see "
        f"kubectl logs -n {manifest.namespace} {pod.name} -c {container.name} --previous"
    )


def _oom(pod: Pod, container: Container, manifest: KVCacheManifest) -> str:
    limit = container.memory_limit_bytes
    what = f"{place(pod)}: container {container.name} was killed for memory"
    if limit is None:
        return f"{what}: its node ran out, and it has no limit; give it more memory or fewer pods"
    if pod.component == Component.CACHE:
        return (
            f"{what}: limit {wording.size(limit)}, of which the arena takes {wording.size(manifest.cache.cpu_bytes)}: "
            "raise spec.cache.overhead"
        )
    remedy = {
        Component.REDIS: "raise spec.redis.embedded.memory",
        Component.PREFILL: "raise resources.limits.memory in spec.prefill.template",
        Component.DECODE: "raise resources.limits.memory in spec.decode.template",
        Component.ROUTER: "raise resources.limits.memory in spec.router.template",
    }.get(Component(pod.component), "raise its limit")
    return f"{what}: limit {wording.size(limit)}: {remedy}"


def _unscheduled(pod: Pod, scene: Scene) -> Trouble | None:
    if pod.node or not pod.unschedulable:
        return None
    asks = (
        f" (asks {pod.gpu_request} {scene.manifest.engine.gpu_resource_name})"
        if pod.gpu_request
        else ""
    )
    said = wording.sentence_end(SCHEDULER_ASIDE.sub("", pod.unschedulable))
    if "persistentvolumeclaim" in said:
        remedy = "create or correct spec.model.volumeClaimName"
    elif pod.component == Component.CACHE:
        remedy = "make room on its node, or lower spec.cache.cpu"
    elif pod.gpu_request:
        remedy = "add nodes with free GPUs, or lower replicas or tensorParallelSize"
    else:
        remedy = "add nodes or make room on them"
    message = f"pod/{pod.name}: {said}{asks}: {remedy}"
    return Trouble(pod, Reason.UNSCHEDULABLE, f"pod/{pod.name}", message, is_hopeless=False)


def _on_lost_node(pod: Pod, scene: Scene) -> Trouble | None:
    lost = {node.name for node in scene.observed.nodes or () if not node.is_ready}
    if pod.node not in lost:
        return None
    message = f"node {pod.node} is not ready, and pod/{pod.name} with it: repair or remove the node"
    return Trouble(pod, Reason.NODE_NOT_READY, f"node/{pod.node}", message, is_hopeless=False)
