"""What a lookup costs over an empty call: real client, real agent process, memory index and a real Redis.

    python bench/lookup.py [--json] [--quick] [--calls N]

Each turn makes one empty call (gRPC's health check on the same socket), one lookup per number of keys, and, with
Redis, one MGET of the same keys from this process, so that a busy machine slows all alike. With the memory index the
agent holds all keys, and each lookup takes a lease and gives the one before back, as the connector does. With Redis
the agent lacks all keys, and Redis says that another node has them: every lookup pays for one MGET and for reading
its answer. `redis_bytes_per_chunk` is what Redis's memory grew by, per chunk, with one entry each.

With --json stdout is one object {"bench": "lookup", "rows": [...]}; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import grpc
import redis
from grpc_health.v1 import health_pb2, health_pb2_grpc
from report import percentile, print_json, print_table, say
from servers import Agent, running_servers

from cacheservice.client import (
    CacheClient,
    ClientIdentity,
    Deadlines,
    MemorySource,
    Role,
    ShardWrite,
)
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupShape, build_namespace
from cacheservice.core.outcomes import Presence, Reason
from cacheservice.index.open import build_index
from cacheservice.index.port import Announcement, Index

MIB = 1 << 20
NUM_KEYS = (16, 256, 1000)
SHARD_BYTES = 4096
SPEC = build_namespace(
    {"bench": "lookup"}, tokens_per_chunk=256, groups=[GroupShape("full", 1, SHARD_BYTES)]
)
CHUNKS_IN_REDIS = 100_000
ANNOUNCED_PER_CALL = 1000
PATIENT = Deadlines(lookup_s=10, acquire_s=10, reserve_s=10, commit_s=10)
OTHER_NODE_EPOCH = 77


@dataclass(frozen=True, slots=True)
class Row:
    """Lookups of one number of keys with one index."""

    index: str
    keys: int
    p50_ms: float
    p99_ms: float
    empty_call_p50_ms: float
    mget_p50_ms: float | None = None
    redis_bytes_per_chunk: float | None = None


def measure(
    index: str,
    agent: Agent,
    chunks: Sequence[ChunkKey],
    *,
    num_calls: int,
    expected: Presence,
    mget: Callable[[int], None] | None,
    redis_bytes_per_chunk: float | None,
) -> list[Row]:
    """Rows for all numbers of keys; the first tenth of the calls warms up."""
    client = connect(agent)
    channel = grpc.insecure_channel(agent.target.grpc_target)
    health = health_pb2_grpc.HealthStub(channel)
    empty: list[float] = []
    lookups: dict[int, list[float]] = {n: [] for n in NUM_KEYS}
    mgets: dict[int, list[float]] = {n: [] for n in NUM_KEYS}
    leases = dict.fromkeys(NUM_KEYS, 0)
    num_skipped = 0
    try:
        for turn in range(num_calls + num_calls // 10):
            if turn == num_calls // 10:
                empty.clear()
                for timings in (*lookups.values(), *mgets.values()):
                    timings.clear()
            empty.append(_timed(lambda: health.Check(health_pb2.HealthCheckRequest())))
            for n in NUM_KEYS:
                started = time.perf_counter()
                answer = client.lookup(SPEC.digest, chunks[:n], superseded_lease=leases[n])
                seconds = time.perf_counter() - started
                if answer.reason is None and not any(answer.presence) and index != "memory":
                    num_skipped += 1  # Redis took longer than the 20 ms that a lookup gives it
                    continue
                lookups[n].append(seconds)
                if answer.reason is not None or set(answer.presence) != {expected}:
                    found = answer.reason.label if answer.reason else sorted(set(answer.presence))
                    raise SystemExit(
                        f"lookup: expected all {n} keys to be {expected.name}, got {found}"
                    )
                leases[n] = answer.lease_id
                if mget is not None:
                    mgets[n].append(_timed(lambda n=n: mget(n)))  # type: ignore[misc]
    finally:
        client.close()
        channel.close()
    if num_skipped:
        say(
            f"{num_skipped} of {num_calls * len(NUM_KEYS)} lookups went without the index: Redis did not answer in time"
        )
    if num_skipped * 5 > num_calls * len(NUM_KEYS):
        raise SystemExit("lookup: the machine is too busy to measure Redis")
    return [
        Row(
            index,
            n,
            _ms(lookups[n], 0.5),
            _ms(lookups[n], 0.99),
            _ms(empty, 0.5),
            _ms(mgets[n], 0.5) if mget is not None else None,
            redis_bytes_per_chunk,
        )
        for n in NUM_KEYS
    ]


def connect(agent: Agent) -> CacheClient:
    """A client as a scheduler half has one: it moves bytes only to fill the agent."""
    client = CacheClient(agent.target, ClientIdentity(Role.TOOL), deadlines=PATIENT)
    client.open_namespace(SPEC)
    client.start()
    if not client.wait_connected(30):
        raise SystemExit(f"lookup: no session with the agent: {client.state().message}")
    return client


def fill(agent: Agent, chunks: Sequence[ChunkKey]) -> None:
    """Store a shard for every chunk."""
    client = connect(agent)
    source = MemorySource(bytearray(SHARD_BYTES))
    writes = [
        ShardWrite(chunk, chunks[i - 1] if i else None, i, 0, 0, SHARD_BYTES, source)
        for i, chunk in enumerate(chunks)
    ]
    results = client.store(SPEC.digest, writes)
    client.close()
    if {r.reason for r in results} != {Reason.HIT}:
        raise SystemExit("lookup: the agent could not be filled")


def announce(index: Index, chunks: Sequence[ChunkKey]) -> None:
    """Say that the other node has all chunks."""
    for start in range(0, len(chunks), ANNOUNCED_PER_CALL):
        index.announce(
            [
                Announcement(SPEC.digest, chunk, 1)
                for chunk in chunks[start : start + ANNOUNCED_PER_CALL]
            ]
        )


@contextmanager
def other_node(url: str) -> Iterator[Index]:
    """A node that joined the index and stays alive in it."""
    index = build_index(url)
    over = threading.Event()

    def stay_alive() -> None:
        while not over.wait(2.0):
            index.heartbeat()

    index.join(name="other", address="127.0.0.1:9", epoch=OTHER_NODE_EPOCH)
    keeper = threading.Thread(target=stay_alive, daemon=True)
    keeper.start()
    try:
        yield index
    finally:
        over.set()
        keeper.join()
        index.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument(
        "--quick",
        action="store_true",
        help="100 calls and 5,000 chunks in Redis: shows that it works",
    )
    parser.add_argument("--calls", type=int, metavar="N", help="calls of each kind; default 2000")
    options = parser.parse_args(arguments)
    num_calls = options.calls or (100 if options.quick else 2000)
    num_in_redis = 5000 if options.quick else CHUNKS_IN_REDIS
    chunks = [
        ChunkKey(hashlib.sha256(i.to_bytes(8, "little")).digest()) for i in range(num_in_redis)
    ]
    with running_servers() as servers:
        alone = servers.start_agent("alone", arena_bytes=256 * MIB)
        fill(alone, chunks[: max(NUM_KEYS)])
        rows = measure(
            "memory", alone, chunks, num_calls=num_calls, expected=Presence.READY_HERE, mget=None,
            redis_bytes_per_chunk=None,
        )  # fmt: skip
        say("memory index done")
        socket_path, url = servers.start_redis(memory_bytes=1024 * MIB)
        shared = servers.start_agent("shared", arena_bytes=256 * MIB, index=url)
        with other_node(url) as index, redis.Redis(unix_socket_path=str(socket_path)) as plain:
            before = plain.info("memory")["used_memory"]
            announce(index, chunks)
            bytes_per_chunk = round((plain.info("memory")["used_memory"] - before) / len(chunks), 1)
            names = {
                chunk: name
                for name in plain.scan_iter(count=10_000)
                for chunk in [ChunkKey(bytes(name[-32:]))]
            }
            stored_as = [names[chunk] for chunk in chunks[: max(NUM_KEYS)]]
            rows += measure(
                "redis", shared, chunks, num_calls=num_calls, expected=Presence.READY_ELSEWHERE,
                mget=lambda n: plain.mget(stored_as[:n]), redis_bytes_per_chunk=bytes_per_chunk,
            )  # fmt: skip
        say("redis index done")
    if options.json:
        print_json("lookup", rows)
        return 0
    print_table(
        f"Lookups, {num_calls} calls each, milliseconds",
        ("index", "keys", "p50", "p99", "empty call p50", "MGET p50", "p50 over those", "Redis B/chunk"),
        [
            (
                row.index, str(row.keys), f"{row.p50_ms:.3f}", f"{row.p99_ms:.3f}", f"{row.empty_call_p50_ms:.3f}",
                "" if row.mget_p50_ms is None else f"{row.mget_p50_ms:.3f}",
                f"{row.p50_ms - row.empty_call_p50_ms - (row.mget_p50_ms or 0.0):+.3f}",
                "" if row.redis_bytes_per_chunk is None else f"{row.redis_bytes_per_chunk:.0f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    return 0


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def _ms(seconds: Sequence[float], share: float) -> float:
    return round(1000 * percentile(seconds, share), 4)


if __name__ == "__main__":
    sys.exit(main())
