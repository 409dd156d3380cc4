"""What /statusz shows, as one JSON value: read by the operator, by `kubectl larder`, and by people.

Invariants: no chunk key, no token, no password, no path of a file with one; bounded by the agent's limits of sessions
and namespaces; it holds the core lock only for counts. Fields may be added, but none changes its meaning: the operator
may be of another version. Called by `web.py` through `serve.py`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cacheservice import __version__
from cacheservice.agent.guarded_store import GuardedStore
from cacheservice.agent.sessions import KeptOutcome, Session, SessionRegistry
from cacheservice.core.protocol import PROTOCOL_VERSION
from cacheservice.core.store import Flow, NamespaceSummary
from cacheservice.index.port import IndexStatus

_TRANSPORTS = {"shared_memory": "SharedMemory", "stream": "Stream"}
_READERS = ("prefill", "decode", "both")
"""Roles of engines: their flows are shown from the first stored chunk on, also while nobody asked for it."""
_SALT = "salt"


@dataclass(frozen=True, slots=True)
class StatusSources:
    """Where the page's values come from; callables are asked per page, from any thread."""

    node: str
    epoch: int
    eviction: str
    started_s: float
    guarded: GuardedStore
    registry: SessionRegistry
    node_number: Callable[[], int]
    is_draining: Callable[[], bool]
    index: Callable[[], IndexStatus]
    counters: Callable[[], Mapping[str, int]]


def status_page(
    sources: StatusSources, *, with_outcomes: bool = False, request: str = ""
) -> Mapping[str, Any]:
    """The whole page. `request` shows of the outcomes those whose request id contains it."""
    guarded, registry = sources.guarded, sources.registry
    now_s = guarded.clock()
    with guarded.reading() as store:
        counts = store.counts()
        namespaces = store.list_namespaces()
        flows = store.flows(_READERS)
    index = sources.index()
    sessions = registry.sessions()
    page: dict[str, Any] = {
        "node": sources.node, "node_number": sources.node_number(), "epoch": sources.epoch,
        "version": __version__, "protocol": PROTOCOL_VERSION, "uptime_s": round(now_s - sources.started_s, 3),
        "draining": sources.is_draining(), "eviction": sources.eviction, "arena_bytes": counts.arena_bytes,
        "used_bytes": counts.used_bytes, "num_chunks": counts.num_chunks, "num_shards": counts.num_shards,
        "num_leases": counts.num_leases, "num_sessions": len(sessions),
        "index": {
            "health": index.health.value, "reason": index.reason.value if index.reason else "",
            "message": index.message,
        },
        "counters": sources.counters(),
        "sessions": [_session(session, now_s) for session in sessions],
        "namespaces": [_namespace(summary) for summary in namespaces],
        "flows": [_flow(flow) for flow in flows],
        "refused_hellos": registry.refused_hellos(),
    }  # fmt: skip
    if with_outcomes:
        page["outcomes"] = [
            _outcome(kept, now_s)
            for kept in registry.kept_outcomes.copy()
            if request in kept.outcome.request_id
        ]
    return page


def _session(session: Session, now_s: float) -> Mapping[str, Any]:
    hello = session.hello
    return {
        "engine": hello.engine_name, "role": hello.role, "half": hello.half, "rank": hello.rank,
        "host": hello.host, "transport": _TRANSPORTS.get(session.data_plane, ""),
        "namespace": _hex(session.namespace), "larder_version": hello.larder_version,
        "vllm_version": hello.vllm_version, "protocol": hello.protocol, "age_s": round(now_s - session.started_s, 3),
        "asked_tokens": session.asked_tokens, "hit_tokens": session.hit_tokens,
        "outcomes": dict(session.outcomes.copy()), "dropped_outcomes": session.num_dropped_outcomes,
    }  # fmt: skip


def _namespace(summary: NamespaceSummary) -> Mapping[str, Any]:
    spec = summary.spec
    return {
        "digest": spec.digest.hex(), "facts": _facts(spec.description), "tokens_per_chunk": spec.tokens_per_chunk,
        "bytes_per_token": spec.chunk_bytes // spec.tokens_per_chunk, "num_chunks": summary.num_chunks,
        "num_bytes": summary.num_bytes,
    }  # fmt: skip


def _facts(description: str) -> Mapping[str, Any]:
    """What the digest was made of; empty when the client wrote something else than a JSON object.

    A salt is shown as a hash: it can be compared, but not used.
    """
    try:
        facts = json.loads(description)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(facts, dict):
        return {}
    salt = facts.get(_SALT)
    if salt:
        facts[_SALT] = f"sha256:{hashlib.sha256(str(salt).encode()).hexdigest()[:12]}"
    return facts


def _flow(flow: Flow) -> Mapping[str, Any]:
    return {
        "namespace": flow.namespace.hex(), "writer_role": flow.writer_role, "reader_role": flow.reader_role,
        "committed": flow.num_stored, "looked_up": flow.num_found, "loaded": flow.num_read,
    }  # fmt: skip


def _outcome(kept: KeptOutcome, now_s: float) -> Mapping[str, Any]:
    outcome = kept.outcome
    return {
        "age_s": round(now_s - kept.at_s, 3), "engine": kept.engine_name, "role": kept.role, "rank": kept.rank,
        "kind": outcome.kind.name.lower(), "reason": outcome.reason.label, "request_id": outcome.request_id,
        "asked_tokens": outcome.asked_tokens, "served_tokens": outcome.served_tokens,
        "duration_ms": outcome.duration_ms, "num_bytes": outcome.num_bytes, "namespace": _hex(kept.namespace),
    }  # fmt: skip


def _hex(digest: bytes | None) -> str:
    return digest.hex() if digest else ""
