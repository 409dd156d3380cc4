"""Prefix-hit ratio of the eviction policies on a request trace, through the agent's own store.

    python bench/eviction.py TRACE --capacity 1000,5000 --policy s3fifo,lru [--json]

TRACE has one JSON object per line with `hash_ids`, the ids of the prompt's blocks, first to last (the format of the
Mooncake FAST25 traces, 512 tokens a block). Each id is one chunk with one shard of one page; the arena has `capacity`
pages. A request leases its longest ready prefix, releases it, reserves what is missing and commits it, as an engine
with a cold cache of its own would. hit_ratio = blocks in leased prefixes / blocks asked for.

With --json stdout is one object {"bench": "eviction", "rows": [...]}; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cacheservice.core.allocator import ALIGNMENT_BYTES
from cacheservice.core.eviction import build_policy
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupShape, build_namespace
from cacheservice.core.outcomes import Presence
from cacheservice.core.store import (
    ReserveRequestItem,
    ReserveResult,
    SessionId,
    Store,
    StoreLimits,
)

POLICIES = ("s3fifo", "lru")
SESSION = SessionId(1)


@dataclass(frozen=True, slots=True)
class Row:
    """One policy at one capacity."""

    policy: str
    capacity: int
    """Blocks of the trace that the arena holds."""
    hit_ratio: float
    num_blocks: int
    """Blocks asked for."""
    seconds: float


def read_trace(path: Path) -> list[list[ChunkKey]]:
    """Chunk keys of each request; ValueError names the line that is wrong."""
    keys: dict[int, ChunkKey] = {}
    requests = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                ids = [int(i) for i in json.loads(line)["hash_ids"]]
            except (KeyError, TypeError, ValueError) as problem:
                raise ValueError(
                    f"{path}:{number} is not an object with hash_ids, a list of integers; "
                    "give a trace in the Mooncake format"
                ) from problem
            requests.append([keys.setdefault(i, ChunkKey(i.to_bytes(32, "big"))) for i in ids])
    return requests


def replay(requests: Sequence[Sequence[ChunkKey]], *, policy: str, capacity: int) -> Row:
    """Run the whole trace through a new store."""
    started = time.perf_counter()
    ids = itertools.count(1)
    spec = build_namespace(
        {"model": "trace"}, tokens_per_chunk=512, groups=[GroupShape("full", 1, ALIGNMENT_BYTES)]
    )
    store = Store(
        arena_bytes=capacity * ALIGNMENT_BYTES,
        policy=build_policy(policy),
        limits=StoreLimits(max_shards=max(capacity, 1)),
        new_id=lambda: next(ids),
    )
    store.open_session(SESSION, maps_arena=False, role="both", name="trace")
    store.open_namespace(spec)
    num_hits = num_blocks = 0
    for keys in requests:
        num_blocks += len(keys)
        num_ready = store.presence(spec.digest, keys)
        num_prefix = len(num_ready) - len(num_ready.lstrip(bytes([Presence.READY_HERE])))
        num_hits += num_prefix
        if num_prefix:
            answer = store.acquire(
                SESSION, spec.digest, [(key, 0, 0) for key in keys[:num_prefix]], 0.0
            )
            assert len(answer.ready) == num_prefix, "a ready chunk could not be leased"
            store.release(SESSION, [answer.lease_id], 0.0)
        items = [
            ReserveRequestItem(key, keys[i - 1] if i else None, i, 0, 0, ALIGNMENT_BYTES)
            for i, key in enumerate(keys[num_prefix:], num_prefix)
        ]
        reserved = store.reserve(SESSION, spec.digest, items, 0.0)
        store.commit(
            SESSION,
            [
                (r.reservation_id, (0,), False)
                for r in reserved
                if r.result is ReserveResult.RESERVED
            ],
            0.0,
        )
        store.take_changes()
    ratio = num_hits / num_blocks if num_blocks else 0.0
    return Row(
        policy, capacity, round(ratio, 4), num_blocks, round(time.perf_counter() - started, 2)
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; 2 when the trace can't be read."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("trace", type=Path, help="JSON lines with hash_ids")
    parser.add_argument(
        "--capacity", required=True, type=_capacities, metavar="N[,N...]", help="blocks that fit"
    )
    parser.add_argument(
        "--policy", default="s3fifo,lru", type=_policies, metavar="P[,P...]",
        help="of s3fifo and lru; default both",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    options = parser.parse_args(arguments)
    try:
        requests = read_trace(options.trace)
    except (OSError, ValueError) as problem:
        print(f"eviction: {problem}", file=sys.stderr)
        return 2
    rows = []
    for policy, capacity in itertools.product(options.policy, options.capacity):
        row = replay(requests, policy=policy, capacity=capacity)
        rows.append(row)
        print(f"{policy} capacity={capacity} in {row.seconds:.1f} s", file=sys.stderr)
    if options.json:
        print(json.dumps({"bench": "eviction", "rows": [asdict(row) for row in rows]}))
        return 0
    print(f"{'policy':8} {'capacity':>9} {'hit ratio':>9}")
    for row in rows:
        print(f"{row.policy:8} {row.capacity:>9} {row.hit_ratio:>9.4f}")
    return 0


def _capacities(text: str) -> list[int]:
    try:
        found = [int(part) for part in text.split(",")]
    except ValueError as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers") from problem
    if min(found) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} has a capacity below 1 block")
    return found


def _policies(text: str) -> list[str]:
    found = text.split(",")
    unknown = [name for name in found if name not in POLICIES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not known; use s3fifo or lru")
    return found


if __name__ == "__main__":
    sys.exit(main())
