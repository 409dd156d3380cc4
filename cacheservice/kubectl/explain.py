"""The text of `kubectl larder explain`: why lookups missed, how fingerprints differ, the path of one request. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

from cacheoperator.conditions.transfer import OTHER_REMEDY, REMEDIES, differences

from cacheservice.kubectl.seen import Seen
from cacheservice.kubectl.status import engine_of
from cacheservice.kubectl.text import INDENT, columns, mebibytes, share, short_digest

MAX_REQUESTS = 10
_API_PREFIX = re.compile(r"^(chatcmpl|cmpl|resp|embd|pool)-")

MEANINGS = {
    "hit": "found, loaded or stored",
    "absent": "nothing is stored for this prefix: it is new, or was evicted, or belongs to another fingerprint",
    "pending_timed_out": "somebody was storing it, but not in time: prefill is slower than decode waits",
    "deadline": "the agent took too long to answer: is its node short of CPU?",
    "agent_down": "no agent at this engine's node: see the agents in kubectl larder status",
    "evicted": "it was there and made room before it was read: more spec.cache.cpu",
    "checksum": "bytes were damaged and not used: is the node's memory sound?",
    "lease_lost": "copying took longer than the lease: is the node short of CPU?",
    "foreign_namespace": "a hand-over came from an engine with another fingerprint",
    "epoch_changed": "the agent restarted meanwhile",
    "no_space": "no room, or too many leases: more spec.cache.cpu",
    "peer_failed": "the agent of another node did not deliver: network, or NetworkPolicies on port 7500",
    "local": "the engine had it in its own prefix cache: nothing to gain",
    "too_short": "the prompt has no whole chunk",
    "skipped": "the request asked for no cache, or is of a kind that can't be cached",
    "banned": "a chunk that failed for this request is not tried again",
    "shed": "a save was dropped: too many blocks were pinned",
    "duplicate": "somebody else stored it: nothing to do",
    "cancelled": "the request was aborted or preempted",
    "internal": "a fault: the engine's log has it",
}
KIND_ORDER = {"lookup": 0, "load": 1, "save": 2}
ROLE_ORDER = {"prefill": 0, "decode": 1}
NOTHING = frozenset({"", "None", "{}", "[]"})
"""Values of fields that say nothing where there is nothing to compare with."""
GOOD = frozenset({"hit", "local", "too_short", "duplicate"})
"""Nothing to look into."""


def explain(seen: Seen) -> str:
    """Why lookups, loads and saves end as they do, and whether engines can share what they store."""
    pages = [answer.page for answer in seen.agents if answer.page]
    lines = [
        f"{seen.name} in namespace {seen.namespace}: {len(pages)} of {len(seen.agents)} agents answer"
    ]
    lines += [
        f"{INDENT}{answer.pod}: {answer.problem}" for answer in seen.agents if not answer.page
    ]
    lines += [f"{INDENT}{sentence}" for sentence in seen.unread]
    if not pages:
        return "\n".join([*lines, "", _no_agents(seen)]) + "\n"
    sessions = [one for page in pages for one in page.get("sessions") or () if one.get("role")]
    lines += ["", *_outcomes(sessions), "", *_fingerprints(pages, sessions)]
    refused = [str(sentence) for page in pages for sentence in page.get("refused_hellos") or ()]
    if refused:
        lines += [
            "",
            "refused in the last minute",
            *(f"{INDENT}{one}" for one in dict.fromkeys(refused)),
        ]
    return "\n".join(lines) + "\n"


def _no_agents(seen: Seen) -> str:
    if seen.unread:
        return "Nothing can be said without the agents: get the rights above, then try again."
    if not seen.agents:
        return "There is no agent yet: kubectl larder status says what it waits for."
    return "No agent answers: see their logs, kubectl logs -l app.kubernetes.io/component=cache -c agent."


def _outcomes(sessions: list[Mapping[str, Any]]) -> list[str]:
    """Counts of what the engines that are connected now reported, by role, kind and reason, most frequent first."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for session in sessions:
        for name, number in (session.get("outcomes") or {}).items():
            kind, _, reason = str(name).partition(".")
            counts.setdefault((kind, str(session["role"])), Counter())[reason] += int(number)
    if not counts:
        if not sessions:
            return ["No engine is connected: see the engines in kubectl larder status."]
        return [
            "Engines are connected, and nothing was looked up yet: send a request of more than one chunk."
        ]
    rows = []
    for (kind, role), reasons in sorted(
        counts.items(), key=lambda item: (KIND_ORDER.get(item[0][0], 3), item[0])
    ):
        whole = sum(reasons.values())
        for reason, number in reasons.most_common():
            rows.append(
                (kind, role, reason, f"{number:,}", share(number, whole), MEANINGS.get(reason, ""))
            )
    asked = sum(int(one.get("asked_tokens", 0)) for one in sessions)
    hit = sum(int(one.get("hit_tokens", 0)) for one in sessions)
    dropped = sum(int(one.get("dropped_outcomes", 0)) for one in sessions)
    head = f"what became of lookups, loads and saves of the engines connected now: {hit:,} of {asked:,} tokens found"
    lines = [
        f"{head} ({share(hit, asked)})",
        *columns(("WHAT", "ROLE", "REASON", "COUNT", "SHARE", "MEANS"), rows),
    ]
    if dropped:
        lines.append(f"{INDENT}{dropped:,} more were not reported: engines had too many at once")
    return lines


def _fingerprints(pages: list[Mapping[str, Any]], sessions: list[Mapping[str, Any]]) -> list[str]:
    known: dict[str, Mapping[str, Any]] = {}
    for page in pages:
        for one in page.get("namespaces") or ():
            known[str(one.get("digest", ""))] = one
    roles: dict[str, set[str]] = {}
    for session in sessions:
        if session.get("namespace"):
            roles.setdefault(str(session["namespace"]), set()).add(
                f"{session['role']} {engine_of(session)}"
            )
    if not roles:
        return ["No engine has opened a fingerprint yet: engines do so when they have started."]
    order = sorted(roles, key=lambda digest: (-len(roles[digest]), digest))
    if len(order) == 1:
        text = f"All engines have the fingerprint {short_digest(order[0])}: they can read what the others store."
        return [text, *_facts(known.get(order[0]))]
    lines = [
        f"Engines have {len(order)} fingerprints: those of one can't read what those of another store."
    ]
    lines += [
        f"{INDENT}{short_digest(digest)}  {', '.join(sorted(roles[digest]))}" for digest in order
    ]
    first = known.get(order[0])
    for digest in order[1:]:
        lines += ["", *_compared(order[0], first, digest, known.get(digest))]
    return lines


def _facts(namespace: Mapping[str, Any] | None) -> list[str]:
    if namespace is None:
        return []
    rows = [
        (path, left)
        for path, left, _ in differences(namespace.get("facts") or {}, {})
        if left not in NOTHING
    ]
    rows.append(("tokens_per_chunk", str(namespace.get("tokens_per_chunk", ""))))
    return columns(("FIELD", "VALUE"), list(dict.fromkeys(rows)))


def _compared(
    one_digest: str, one: Mapping[str, Any] | None, other_digest: str, other: Mapping[str, Any] | None
) -> list[str]:  # fmt: skip
    if one is None or other is None:
        return [f"{short_digest(other_digest)}: no agent shows what it is made of: {OTHER_REMEDY}"]
    sides = [
        {**(side.get("facts") or {}), "tokens_per_chunk": side.get("tokens_per_chunk")} for side in (one, other)
    ]  # fmt: skip
    rows = [
        (path, left, right, REMEDIES.get(re.split(r"[.\[]", path)[0], OTHER_REMEDY))
        for path, left, right in differences(*sides)
    ]
    if not rows:
        return [
            f"{short_digest(one_digest)} and {short_digest(other_digest)}: the fields that agents show are equal"
        ]
    return columns(("FIELD", short_digest(one_digest), short_digest(other_digest), "REMEDY"), rows)


# One request


def id_asked_of_agents(request: str) -> str:
    """What engines' request ids contain of the id that a user has: without the prefix of an API, which vLLM puts before
    an X-Request-Id, and which differs between prefill's and decode's answer to one request."""
    return _API_PREFIX.sub("", request.strip())


def explain_request(seen: Seen, request: str) -> str:
    """The path of one request, prefill first, from the outcomes that agents remember (already of that id)."""
    found: list[Mapping[str, Any]] = [
        {**one, "node": answer.node}
        for answer in seen.agents if answer.page
        for one in answer.page.get("outcomes") or ()
        if id_asked_of_agents(request) in str(one.get("request_id", ""))
    ]  # fmt: skip
    found.sort(key=_in_order)
    ids = list(dict.fromkeys(_client_id(step) for step in found))
    if not ids:
        return _not_remembered(seen, request)
    if len(ids) > MAX_REQUESTS:
        shown = "\n".join(f"{INDENT}{one}" for one in ids[:MAX_REQUESTS])
        return f"{len(ids)} requests have {request} in their id, give more of it:\n{shown}\n"
    lines: list[str] = []
    for one in ids:
        own = [step for step in found if _client_id(step) == one]
        lines += [*([""] if lines else []), one, *_steps(own), *_verdict(own)]
    return "\n".join(lines) + "\n"


def _client_id(step: Mapping[str, Any]) -> str:
    """A request's id without the random end that each vLLM adds (0.32): prefill's and decode's steps are of one."""
    return re.sub(r"-[0-9a-f]{8}$", "", str(step.get("request_id", "")))


def _in_order(step: Mapping[str, Any]) -> tuple[int, int, float]:
    """Prefill first; lookup, load, save; oldest first. Not by time alone: that is when an engine's half told its agent,
    up to 3 s later, each half for itself."""
    role, kind = str(step.get("role", "")), str(step.get("kind", ""))
    return ROLE_ORDER.get(role, 2), KIND_ORDER.get(kind, 3), -float(step.get("age_s", 0))


def _steps(steps: list[Mapping[str, Any]]) -> list[str]:
    rows = []
    for step in steps:
        num_bytes = int(step.get("num_bytes", 0))
        rows.append((
            f"{_age(float(step.get('age_s', 0)))} ago", str(step.get("role", "")),
            f"{step.get('engine', '')} rank {step.get('rank', 0)}", str(step.get("node", "")),
            str(step.get("kind", "")), str(step.get("reason", "")),
            f"{int(step.get('served_tokens', 0)):,} of {int(step.get('asked_tokens', 0)):,}",
            f"{int(step.get('duration_ms', 0)):,} ms", mebibytes(num_bytes) if num_bytes else "",
        ))  # fmt: skip
    return columns(
        ("TOLD", "ROLE", "ENGINE", "NODE", "WHAT", "REASON", "TOKENS", "TOOK", "BYTES"), rows
    )


def _verdict(steps: list[Mapping[str, Any]]) -> list[str]:
    """What it comes to: what each role took from the cache, and what kept it from taking more."""
    lines = []
    for role in dict.fromkeys(str(step.get("role", "")) for step in steps):
        own = [step for step in steps if step.get("role") == role]
        loads = [
            step for step in own if step.get("kind") == "load" and int(step.get("rank", 0)) == 0
        ]
        lookups = [step for step in own if step.get("kind") == "lookup"]
        if loads:
            taken = sum(int(step.get("served_tokens", 0)) for step in loads)
            lines.append(f"{INDENT}{role} took {taken:,} tokens from the cache")
        elif lookups:
            lines.append(f"{INDENT}{role} took nothing from the cache")
        lines += [
            f"{INDENT}{role}, {reason}: {MEANINGS.get(reason, 'a reason that this version does not know')}"
            for reason in dict.fromkeys(str(step.get("reason", "")) for step in own)
            if reason not in GOOD
        ]
    return lines


def _not_remembered(seen: Seen, request: str) -> str:
    pages = [answer.page for answer in seen.agents if answer.page]
    if not pages:
        return _no_agents(seen) + "\n"
    reach = [
        f"{INDENT}{answer.pod} remembers {len(answer.page['outcomes'])}, back to {_age(_oldest(answer.page))} ago"
        for answer in seen.agents if answer.page and answer.page.get("outcomes")
    ]  # fmt: skip
    silent = [
        f"{INDENT}{answer.pod}: {answer.problem}" for answer in seen.agents if not answer.page
    ]
    head = (
        f"No agent remembers a request with {request} in its id. Give the id of the answer (cmpl-…, chatcmpl-…) or the "
        "X-Request-Id that was sent; each agent keeps the last 4,096 outcomes."
    )
    return "\n".join([
        head, *(reach or [f"{INDENT}nothing was looked up yet at any agent that answers"]), *silent,
    ]) + "\n"  # fmt: skip


def _oldest(page: Mapping[str, Any]) -> float:
    return max((float(one.get("age_s", 0)) for one in page.get("outcomes") or ()), default=0.0)


def _age(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.0f} h"


def is_remembered(seen: Seen) -> bool:
    """Whether any agent has an outcome of what it was asked for."""
    return any(answer.page.get("outcomes") for answer in seen.agents if answer.page)
