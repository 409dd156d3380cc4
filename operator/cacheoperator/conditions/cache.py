"""CacheReady: an agent on every node that should have one, and on every node with an engine. Pure."""

from __future__ import annotations

from collections import defaultdict

from cacheoperator.conditions import wording, workloads
from cacheoperator.conditions.finding import Decision, Finding, Problem, Scene, decide
from cacheoperator.conditions.reasons import Reason
from cacheoperator.conditions.troubles import has_stood, recent_kills
from cacheoperator.names import ENGINES, Component
from cacheservice.manifest import UpdateStrategy

CONDITION = "CacheReady"


def check(scene: Scene) -> Decision:
    """Decide the condition; agents that the operator can't read and recent kills are problems too."""
    decision = decide(CHECKS, scene)
    kills = recent_kills(scene, (Component.CACHE,))
    return Decision(decision.finding, (*decision.problems, *kills, *_unreadable(scene)))


def exists(scene: Scene) -> Finding | None:
    return workloads.check_exists(scene, Component.CACHE)


def no_matching_nodes(scene: Scene) -> Finding | None:
    """No node may have an agent: none has the labels, or all that have them are tainted."""
    found = workloads.workload(scene, Component.CACHE)
    if found is None or found.wanted:
        return None
    chosen = scene.manifest.cache.node_selector
    where = (
        f"spec.cache.nodeSelector {wording.selector(chosen)}"
        if chosen
        else "what the agents ask of a node (spec.cache.nodeSelector, else that of the engines)"
    )
    matching = [node for node in scene.observed.nodes or () if node.matches_cache]
    taints = sorted({node.untolerated_taint for node in matching if not node.tolerated})
    if matching and not any(node.tolerated for node in matching):
        message = (
            f"0 nodes: those that match {where} have a taint that agents don't tolerate "
            f"({wording.listed(taints)}): add it to spec.cache.tolerations"
        )
    else:
        message = f"0 nodes match {where}: label nodes so, or correct it"
    problem = Problem(
        workloads.object_of(scene, Component.CACHE), Reason.NO_MATCHING_NODES, message
    )
    return Finding("False", Reason.NO_MATCHING_NODES, message, problems=(problem,))


def rejected(scene: Scene) -> Finding | None:
    return workloads.check_rejected(scene, Component.CACHE)


def pods(scene: Scene) -> Finding | None:
    return workloads.check_pods(scene, (Component.CACHE,))


def no_local_cache(scene: Scene) -> Finding | None:
    """Engines on nodes that never get an agent: they compute everything, and nothing says so but this."""
    covered = {
        pod.node for pod in scene.observed.pods if pod.component == Component.CACHE and pod.node
    }
    nodes = {node.name: node for node in scene.observed.nodes or ()}
    alone: dict[str, list[str]] = defaultdict(list)
    for pod in scene.observed.pods:
        if pod.component not in ENGINES or pod.is_deleting or pod.phase in ("Failed", "Succeeded"):
            continue
        view = nodes.get(pod.node)
        is_coming = view is not None and view.matches_cache and view.tolerated
        if pod.node and pod.node not in covered and not is_coming:
            alone[pod.node].append(f"pod/{pod.name}")
    if not alone or (scene.observed.nodes is None and not _is_settled(scene)):
        return None
    problems = []
    for node in sorted(alone):
        view = nodes.get(node)
        if view is None:
            why = "give it what the agents ask of a node"
        elif not view.matches_cache:
            why = "it does not match the agents' node selector: correct spec.cache.nodeSelector or the engines' own"
        else:
            why = f"taint {view.untolerated_taint} not tolerated: add it to spec.cache.tolerations"
        engines = wording.listed(alone[node])
        message = f"engines {engines} run on {node}, which has no agent ({why})"
        problems.append(Problem(f"node/{node}", Reason.NO_LOCAL_CACHE, message))
    text = "; ".join(problem.message for problem in problems[: wording.MAX_SHOWN])
    return Finding("False", Reason.NO_LOCAL_CACHE, text, problems=tuple(problems))


def rollout(scene: Scene) -> Finding | None:
    if scene.manifest.cache.update_strategy is UpdateStrategy.ON_DELETE:
        return None  # it waits for a person, who said so
    return workloads.check_rollout(scene, Component.CACHE, CONDITION)


def starting(scene: Scene) -> Finding | None:
    found = workloads.workload(scene, Component.CACHE)
    is_by_hand = scene.manifest.cache.update_strategy is UpdateStrategy.ON_DELETE
    if found is not None and is_by_hand and found.ready >= found.wanted:
        return None
    return workloads.check_starting(scene, Component.CACHE, "nodes")


def ready(scene: Scene) -> Finding:
    found = workloads.workload(scene, Component.CACHE)
    number = "" if found is None else f"{found.ready}/{found.wanted} nodes"
    is_old = found is not None and found.updated < found.wanted
    by_hand = "; delete the pods of the old revision to update them (updateStrategy OnDelete)"
    return Finding("True", Reason.READY, number + (by_hand if is_old else ""))


CHECKS = (exists, no_matching_nodes, rejected, pods, no_local_cache, rollout, starting, ready)


def _is_settled(scene: Scene) -> bool:
    found = workloads.workload(scene, Component.CACHE)
    return found is not None and workloads.is_complete(found)


def _unreadable(scene: Scene) -> tuple[Problem, ...]:
    settled = {p.name for p in scene.observed.pods if has_stood(scene, p) and not p.is_deleting}
    return tuple(
        Problem(
            f"pod/{agent.pod}",
            Reason.AGENTS_UNREADABLE,
            f"the operator can't read the status of the agent on {agent.node} ({wording.sentence_end(agent.problem)}): "
            "let it reach port 7501",
        )
        for agent in sorted(scene.observed.agents, key=lambda agent: (agent.node, agent.pod))
        if agent.problem and agent.pod in settled
    )
