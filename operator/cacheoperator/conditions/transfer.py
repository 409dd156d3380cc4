"""TransferVerified: decode has read what prefill stored. Evidence, not configuration. Pure.

A fingerprint is the digest of the namespace that an engine opened; engines share chunks only when theirs are equal. For
each pair of fingerprints, prefill's and decode's, a verdict is remembered in status.transfers:

Verified         agents saw decode read chunks that prefill stored; stays until there is contrary evidence
NothingRead      in ten minutes prefill stored MIN_CHUNKS, decode found as many and read none; ends when it reads
LayoutMismatch   engines at rest with different fingerprints; ends when the pair is not in use any more

Invariants: no verdict comes from settings alone; while engines are being replaced the old pair's evidence holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any

from cacheoperator.conditions import wording, workloads
from cacheoperator.conditions.finding import Decision, Finding, Problem, Scene, decide
from cacheoperator.conditions.reasons import Reason
from cacheoperator.conditions.redis import readable_agents, unreadable
from cacheoperator.conditions.troubles import ENGINE_CONTAINER, STANDS_AFTER, has_stood, place
from cacheoperator.names import ENGINES, Component
from cacheoperator.observed import EngineSession, Pair
from cacheservice.manifest import Transport, Verify

MIN_CHUNKS = 20
MAX_PAIRS = 8
MAX_FIELDS = 8
MAX_VALUE = 80
STREAM = "Stream"
VERIFIED, NOTHING_READ, LAYOUT_MISMATCH = "Verified", "NothingRead", "LayoutMismatch"
VERDICTS = (VERIFIED, NOTHING_READ, LAYOUT_MISMATCH)

REMEDIES = {
    "vllm": "use one engine image for both roles",
    "model": "give both roles the same files of the model",
    "dtype": "give both roles the same --dtype",
    "kv_cache_dtype": "give both roles the same --kv-cache-dtype",
    "quantization": "give both roles the same --quantization",
    "hash": "give both roles the same image and PYTHONHASHSEED",
    "hash_block_tokens": "give both roles the same --block-size",
    "groups": "give both roles the same --block-size and model",
    "layout": "give both roles the same VLLM_KV_CACHE_LAYOUT",
    "backend": "give both roles the same attention backend",
    "isa": "run both roles on nodes with the same kind of CPU",
    "salt": "give both roles the same salt",
    "tokens_per_chunk": "set spec.cache.chunkTokens",
    "generation": "restart the engine whose cache was reset",
}
"""By field of the namespace's description (cacheservice/connector/namespace.py)."""
OTHER_REMEDY = "give both roles the same image and args"


def check(scene: Scene) -> Decision:
    """Decide the condition."""
    return decide(CHECKS, scene)


# What is in use


def engine_sessions(scene: Scene) -> tuple[EngineSession, ...]:
    """Live sessions of engines; where this resource runs engines, only those of pods that are not going away."""
    own = {
        pod.name for pod in scene.observed.pods if pod.component in ENGINES and not pod.is_deleting
    }
    has_engines = scene.manifest.decode is not None
    return tuple(
        session
        for agent in readable_agents(scene)
        for session in agent.sessions
        if session.role and (session.engine in own or not has_engines)
    )


def fingerprints(scene: Scene, role: Component) -> frozenset[str]:
    """Fingerprints that engines of `role` use now."""
    return frozenset(
        session.namespace
        for session in engine_sessions(scene)
        if session.namespace and session.role in (role, "both")
    )


def transport(scene: Scene) -> tuple[str, str]:
    """The slowest transport in use, and why. Before bytes move: what was decided."""
    decided, reason = scene.observed.transport, scene.observed.transport_reason
    used = {session.transport for session in engine_sessions(scene)} - {""}
    if STREAM in used and decided != STREAM:
        engines = [s.engine for s in engine_sessions(scene) if s.transport == STREAM]
        return STREAM, (
            f"shared memory is set up, but {wording.listed(engines)} could not use it: see the log of container "
            f"{ENGINE_CONTAINER}"
        )
    if not reason and decided:
        reason = f"spec.cache.transport is {scene.manifest.cache.transport}"
        if scene.manifest.cache.transport is Transport.AUTO:
            reason = f"namespace {scene.manifest.namespace} lets pods mount the socket folder"
    return decided, reason


# Evidence


def evidence(scene: Scene) -> tuple[Pair, ...]:
    """What status.transfers is to hold: verdicts of the pairs in use, and the newest of others, at most MAX_PAIRS."""
    now = scene.observed.now.replace(microsecond=0)
    stored = {(pair.prefill, pair.decode): pair for pair in stored_pairs(scene.previous)}
    in_use: dict[tuple[str, str], Pair] = {}
    for key in pairs_in_use(scene):
        known = stored.get(key)
        verdict = _verdict(scene, key, known.verdict if known else "")
        if verdict:
            is_known = known is not None and known.verdict == verdict
            in_use[key] = known if is_known and known else Pair(*key, verdict, now)
    others = sorted(
        (pair for key, pair in stored.items() if key not in in_use),
        key=lambda pair: (pair.since, pair.prefill, pair.decode),
        reverse=True,
    )
    kept = [*sorted(in_use.values(), key=lambda pair: (pair.prefill, pair.decode)), *others]
    return tuple(sorted(kept[:MAX_PAIRS], key=lambda pair: (pair.since, pair.prefill, pair.decode)))


def stored_pairs(previous: Mapping[str, Any]) -> tuple[Pair, ...]:
    """status.transfers as it was stored; what can't be read is left out."""
    pairs = []
    for entry in previous.get("transfers") or ():
        try:
            since = datetime.fromisoformat(str(entry["since"]))
            pair = Pair(str(entry["prefill"]), str(entry["decode"]), str(entry["verdict"]), since)
        except (KeyError, TypeError, ValueError):
            continue
        if pair.verdict in VERDICTS and since.tzinfo is not None:
            pairs.append(pair)
    return tuple(pairs)


def pairs_in_use(scene: Scene) -> tuple[tuple[str, str], ...]:
    """Equal fingerprints of both roles; and, when no engine is being replaced, each that finds no equal."""
    prefill, decode = fingerprints(scene, Component.PREFILL), fingerprints(scene, Component.DECODE)
    equal = sorted(prefill & decode)
    pairs = [(digest, digest) for digest in equal]
    if not prefill or not decode or any(_is_moving(scene, component) for component in ENGINES):
        return tuple(pairs)
    pairs += [(min(prefill - decode or prefill), digest) for digest in sorted(decode - prefill)]
    pairs += [(digest, min(decode - prefill or decode)) for digest in sorted(prefill - decode)]
    return tuple(dict.fromkeys(pairs))


def unproven_pairs(scene: Scene) -> tuple[tuple[str, str], ...]:
    """Pairs in use that nothing is known about: each wants one probe (spec.verify: Probe)."""
    known = {(pair.prefill, pair.decode) for pair in evidence(scene)}
    return tuple(key for key in pairs_in_use(scene) if key not in known)


def _is_moving(scene: Scene, component: Component) -> bool:
    """Whether engines of a role come or go: their fingerprints are not the last word."""
    found = workloads.workload(scene, component)
    if found is None:
        return False
    return workloads.is_rolling(scene, component) or not workloads.is_complete(found)


def _verdict(scene: Scene, key: tuple[str, str], known: str) -> str:
    prefill, decode = key
    if prefill != decode:
        return LAYOUT_MISMATCH
    stored, found, read = _moved(scene, prefill)
    window = scene.observed.flow_window
    is_busy = window is not None and min(window.committed, window.looked_up) >= MIN_CHUNKS
    if is_busy and window is not None and not window.loaded and stored and found:
        return NOTHING_READ
    if not read:
        return known
    if known == NOTHING_READ and (window is None or not window.loaded):
        return known  # it was read once, and not since
    return VERIFIED


def _moved(scene: Scene, digest: str) -> tuple[bool, bool, bool]:
    """Whether chunks of this namespace were stored by prefill, found by decode, and read by decode."""
    flows = [f for agent in readable_agents(scene) for f in agent.flows if f.namespace == digest]
    from_prefill = [f for f in flows if f.writer_role in (Component.PREFILL, "both")]
    by_decode = [f for f in from_prefill if f.reader_role in (Component.DECODE, "both")]
    # "elsewhere": found in the index, at another node's agent, which alone knows who wrote it.
    found_elsewhere = [
        f
        for f in flows
        if f.writer_role == "elsewhere" and f.reader_role in (Component.DECODE, "both")
    ]
    return (
        any(flow.committed for flow in from_prefill),
        any(flow.looked_up for flow in (*by_decode, *found_elsewhere)),
        any(flow.loaded for flow in by_decode),
    )


# Checks


def not_applicable(scene: Scene) -> Finding | None:
    """Without a prefill role nothing is handed over. Engines of others are still told when they can't meet."""
    if scene.manifest.prefill is not None:
        return None
    if scene.manifest.decode is None and _against(scene) is not None:
        return None
    return Finding(
        "True",
        Reason.NOT_APPLICABLE,
        "no prefill role: nothing is handed over from prefill to decode",
    )


def shared_memory_unavailable(scene: Scene) -> Finding | None:
    """The user asked for shared memory, and bytes go another way."""
    used, why = transport(scene)
    if scene.manifest.cache.transport is not Transport.SHARED_MEMORY or used != STREAM:
        return None
    what = f"kvcache/{scene.manifest.name}"
    # Where the folder is forbidden the pods are rejected, and CacheReady says so; here an engine lacks something.
    message = (
        "spec.cache.transport is SharedMemory, but bytes move by Stream: "
        f"{wording.sentence_end(why)}, or write Auto"
    )
    reason = Reason.SHARED_MEMORY_UNAVAILABLE
    return Finding("False", reason, message, True, (Problem(what, reason, message),))


def refused_hellos(scene: Scene) -> Finding | None:
    """Connectors that an agent refuses: of another protocol, or with a hello that it does not take."""
    found = sorted(
        {(said, agent.node) for agent in readable_agents(scene) for said in agent.refused_hellos}
    )
    if not found:
        return None
    reason = (
        Reason.PROTOCOL_MISMATCH
        if any("protocol" in said for said, _ in found)
        else Reason.ENGINE_REFUSED
    )
    said, node = next(
        pair for pair in found if "protocol" in pair[0] or reason is Reason.ENGINE_REFUSED
    )
    remedy = (
        f"bring both to one version: kubectl larder upgrade {scene.manifest.name}, or set spec.engine.payloadImage "
        "and spec.cache.image"
        if reason is Reason.PROTOCOL_MISMATCH
        else "see the log of that agent"
    )
    message = f"the agent on {node} refuses {wording.sentence_end(said)}: {remedy}"
    problems = tuple(
        Problem(f"node/{where}", reason, f"the agent on {where} refuses {text}")
        for text, where in found
    )
    return Finding("False", reason, message, True, problems)


def connector_missing(scene: Scene) -> Finding | None:
    """Engines that serve and have no session with the agent of their node, which answers."""
    registered = {session.engine for agent in readable_agents(scene) for session in agent.sessions}
    answering = {agent.node: agent.pod for agent in readable_agents(scene) if not agent.is_draining}
    settled = {pod.name for pod in scene.observed.pods if has_stood(scene, pod)}
    silent = [
        pod
        for pod in sorted(scene.observed.pods, key=lambda pod: (pod.created_at, pod.name))
        if pod.component in ENGINES and not pod.is_deleting and has_stood(scene, pod)
        if pod.name not in registered and answering.get(pod.node, "") in settled
    ]
    if not silent:
        return None
    problems = []
    for pod in silent:
        images = [c.image for c in pod.containers if c.name == ENGINE_CONTAINER] or ["unknown"]
        message = (
            f"{pod.component} {place(pod)} serves requests but is not registered with the agent there: image "
            f"{images[0]} lacks the connector or can't load it; see kubectl logs -n {scene.manifest.namespace} "
            f"{pod.name} -c {ENGINE_CONTAINER}"
        )
        problems.append(Problem(f"pod/{pod.name}", Reason.CONNECTOR_MISSING, message))
    return Finding("False", Reason.CONNECTOR_MISSING, problems[0].message, True, tuple(problems))


def contrary_evidence(scene: Scene) -> Finding | None:
    """LayoutMismatch or NothingRead of a pair in use; without any in use, of the pair that was used last."""
    return _against(scene)


def _against(scene: Scene) -> Finding | None:
    for pair in sorted(_relevant(scene), key=lambda pair: pair.verdict):
        if pair.verdict == LAYOUT_MISMATCH:
            return _layout_mismatch(scene, pair)
        if pair.verdict == NOTHING_READ:
            message = (
                f"since {wording.date_and_minute(pair.since)} prefill stores chunks and decode finds them, but reads "
                f"none (fingerprint {_short(pair.decode)}): kubectl larder explain {scene.manifest.name} says why"
            )
            problem = Problem(f"kvcache/{scene.manifest.name}", Reason.NOTHING_READ, message)
            return Finding("False", Reason.NOTHING_READ, message, problems=(problem,))
    return None


def _layout_mismatch(scene: Scene, pair: Pair) -> Finding:
    views = {view.digest: view for agent in readable_agents(scene) for view in agent.namespaces}
    one, other = views.get(pair.prefill), views.get(pair.decode)
    head = f"prefill and decode store different KV (fingerprints {_short(pair.prefill)} and {_short(pair.decode)})"
    if one is None or other is None:
        message = f"{head}: {OTHER_REMEDY}"
    else:
        mine = {**one.facts, "tokens_per_chunk": one.tokens_per_chunk}
        theirs = {**other.facts, "tokens_per_chunk": other.tokens_per_chunk}
        differ = differences(mine, theirs)
        told = [
            f"{path}: prefill {left}, decode {right}" for path, left, right in differ[:MAX_FIELDS]
        ]
        more = " and others" if len(differ) > MAX_FIELDS else ""
        fields = dict.fromkeys(path.split(".")[0].split("[")[0] for path, _, _ in differ)
        remedies = dict.fromkeys(REMEDIES.get(name, OTHER_REMEDY) for name in fields)
        which = "; ".join(told) or "the fields that agents show are equal"
        message = f"{head}: {which}{more}: {'; '.join(remedies) or OTHER_REMEDY}"
    problem = Problem(f"kvcache/{scene.manifest.name}", Reason.LAYOUT_MISMATCH, message)
    return Finding("False", Reason.LAYOUT_MISMATCH, message, True, (problem,))


def differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Every field that differs, by its path, with both values; `none` where one side lacks it."""
    left, right = dict(_leaves("", one)), dict(_leaves("", other))
    return [
        (path, _value(left, path), _value(right, path))
        for path in sorted(left.keys() | right.keys())
        if left.get(path) != right.get(path)
    ]


def _value(leaves: Mapping[str, str], path: str) -> str:
    return wording.cut(leaves.get(path, "none"), MAX_VALUE)


def _leaves(path: str, value: object) -> Iterable[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not path):
        for name in value:
            yield from _leaves(f"{path}.{name}" if path else str(name), value[name])
    elif isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        for number, item in enumerate(value):
            yield from _leaves(f"{path}[{number}]", item)
    elif isinstance(value, float) and value.is_integer():
        yield path, str(int(value))
    else:
        yield path, str(value)


def _relevant(scene: Scene) -> tuple[Pair, ...]:
    """Verdicts that count now. Without a pair in use the newest stands, unless a newer revision may change it."""
    pairs = evidence(scene)
    in_use = set(pairs_in_use(scene))
    if in_use:
        return tuple(pair for pair in pairs if (pair.prefill, pair.decode) in in_use)
    if not pairs:
        return ()
    newest = pairs[-1]
    changed = [
        found.changed_at
        for component in ENGINES
        if (found := workloads.workload(scene, component)) is not None
        and found.wanted
        and found.changed_at is not None
    ]
    is_moving = any(_is_moving(scene, component) for component in ENGINES)
    if not is_moving and any(at > newest.since for at in changed):
        return ()
    return (newest,)


def verified(scene: Scene) -> Finding | None:
    """Every pair in use is verified; while engines are being replaced, one of them is enough."""
    relevant = _relevant(scene)
    good = [pair for pair in relevant if pair.verdict == VERIFIED]
    in_use = set(pairs_in_use(scene))
    is_moving = any(_is_moving(scene, component) for component in ENGINES)
    unproven = in_use - {(pair.prefill, pair.decode) for pair in good}
    if not good or (unproven and not is_moving):
        return None
    pair = good[-1]
    since = wording.date_and_minute(pair.since)
    message = f"decode reads what prefill stores (fingerprint {_short(pair.decode)}, since {since})"
    if unproven:
        digests = wording.listed(_short(decode) for _, decode in unproven)
        message += f"; {digests}, which is on its way, is not verified yet"
    used, why = transport(scene)
    if used == STREAM and scene.manifest.cache.transport is Transport.AUTO:
        return Finding(
            "True",
            Reason.FALLBACK_STREAM,
            f"{message}; bytes move by Stream, which is slower: {wording.sentence_end(why)}",
        )
    return Finding("True", Reason.VERIFIED, message)


def scaled_to_zero(scene: Scene) -> Finding | None:
    """Nothing can move while a role has no engine, and nobody wants it to."""
    seen = [workloads.workload(scene, component) for component in ENGINES]
    if all(found is None or found.wanted for found in seen):
        return None
    return Finding(
        "True", Reason.SCALED_TO_ZERO, "no evidence yet, and prefill or decode is scaled to zero"
    )


def awaiting_agents(scene: Scene) -> Finding | None:
    if readable_agents(scene):
        return None
    awaiting = Finding("Unknown", Reason.AWAITING_AGENTS, "no agent runs yet (see CacheReady)")
    return unreadable(scene) or awaiting


def awaiting_engines(scene: Scene) -> Finding | None:
    absent = [component for component in ENGINES if not fingerprints(scene, component)]
    if not absent and pairs_in_use(scene):
        return None
    if not absent:
        return Finding(
            "Unknown",
            Reason.AWAITING_ENGINES,
            "prefill and decode have no fingerprint in common while engines are replaced",
        )
    message = f"no {wording.joined(absent)} engine has opened its namespace at an agent yet"
    return Finding("Unknown", Reason.AWAITING_ENGINES, message)


def probed(scene: Scene) -> Finding | None:
    """What the newest probe of an unproven pair says, when it says something."""
    wanted = set(unproven_pairs(scene))
    probes = [probe for probe in scene.observed.probes if (probe.prefill, probe.decode) in wanted]
    if not probes:
        return None
    probe = max(probes, key=lambda probe: (probe.at, probe.decode))
    what = f"kvcache/{scene.manifest.name}"
    if probe.problem:
        message = (
            f"the probe from prefill to decode failed: {wording.sentence_end(probe.problem)}; it is repeated, and "
            "requests through the endpoint are evidence too"
        )
        return Finding(
            "Unknown",
            Reason.PROBE_FAILED,
            message,
            problems=(Problem(what, Reason.PROBE_FAILED, message),),
        )
    if scene.observed.now - probe.at <= STANDS_AFTER:
        return None
    message = (
        "both engines answered the probe, but decode did not read what prefill stored (fingerprint "
        f"{_short(probe.decode)}): "
        f"kubectl larder explain {scene.manifest.name} says why"
    )
    problem = Problem(what, Reason.PROBE_READ_NOTHING, message)
    return Finding("Unknown", Reason.PROBE_READ_NOTHING, message, problems=(problem,))


def awaiting_traffic(scene: Scene) -> Finding:
    digests = wording.listed(_short(decode) for _, decode in unproven_pairs(scene))
    how = (
        "the operator sends one small request when both roles are ready"
        if scene.manifest.verify is Verify.PROBE
        else "send requests through the endpoint (spec.verify is Traffic)"
    )
    message = f"decode has read nothing of prefill yet (fingerprint {digests}): {how}"
    return Finding("Unknown", Reason.AWAITING_TRAFFIC, message)


CHECKS = (
    not_applicable, shared_memory_unavailable, refused_hellos, connector_missing, contrary_evidence, verified,
    scaled_to_zero, awaiting_agents, awaiting_engines, probed, awaiting_traffic,
)  # fmt: skip


def _short(digest: str) -> str:
    return digest[:8]
