"""What an agent costs: time until it is ready, memory of its own, and padding of what it stores.

    python bench/agent.py [--arena-gib 8] [--shards 200000] [--json]

Real agent processes. Ready time runs from the start of the process, interpreter included, until it serves; the arena
is allocated and prefaulted by then. A plain memfd of the same size is allocated before, so that a virtual machine has
got its memory from its host; how long that took the second time is the floor of the same run. Memory is RssAnon,
which leaves the arena (a memfd) out. Padding compares the bytes that the arena gives up with the bytes that a hit can
read, for the shard of the demo model's chunk and for a small odd one.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from report import print_json, print_table, say
from servers import Agent, running_servers

from cacheservice.client import (
    AgentAdmin,
    CacheClient,
    ClientIdentity,
    MemorySource,
    Role,
    ShardWrite,
)
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import GroupShape, NamespaceSpec, build_namespace
from cacheservice.core.outcomes import Reason

BATCH = 1024
DEMO_SHARD_BYTES = 256 * 12 * 1024
ODD_SHARD_BYTES = 1_000_003


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement."""

    what: str
    value: float
    unit: str
    target: float | None = None
    """Upper bound from the design; None = none."""


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--arena-gib", type=int, default=8, help="GiB of the arena (default 8)")
    parser.add_argument(
        "--shards", type=int, default=200_000, help="shards to fill it with (default 200000)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    raw_s = min(allocation_s(args.arena_gib << 30) for _ in range(2))
    with running_servers() as servers:
        started = time.monotonic()
        agent = servers.start_agent("agent", arena_bytes=args.arena_gib << 30)
        ready_s = time.monotonic() - started
        say(f"ready after {ready_s:.1f} s")
        rows = [
            Row("raw_allocation_s_per_8gib", raw_s * 8 / args.arena_gib, "s"),
            *measure(agent, args.arena_gib, args.shards, ready_s),
        ]
    if args.json:
        print_json("agent", rows)
        return
    print_table(
        "What an agent costs",
        ["what", "value", "unit", "target"],
        [
            [r.what, f"{r.value:.3g}", r.unit, "" if r.target is None else f"≤ {r.target:g}"]
            for r in rows
        ],
    )


def measure(agent: Agent, arena_gib: int, num_shards: int, ready_s: float) -> Iterator[Row]:
    """Everything but the ready time, which is given."""
    yield Row("ready_s_per_8gib", ready_s * 8 / arena_gib, "s", 10)
    empty = rss_anon_bytes(agent.pid)
    yield Row("own_memory_empty", empty / 1e6, "MB", 150)
    identity = ClientIdentity(
        role=Role.TOOL, half=None, engine_name="bench", host="", rank=0, vllm_version=""
    )
    client = CacheClient(agent.target, identity)
    client.start()
    try:
        assert client.wait_connected(30.0), client.state().message
        for name, shard_bytes in (("demo", DEMO_SHARD_BYTES), ("odd", ODD_SHARD_BYTES)):
            yield Row(
                f"padding_{name}_shards", 100 * padding(client, agent, name, shard_bytes), "%", 2
            )
        fill(client, namespace("tiny", 4096), num_shards)
        say("filled")
        with AgentAdmin(agent.target, timeout_s=5.0) as admin:
            held = admin.status().num_shards
        filled = rss_anon_bytes(agent.pid)
        yield Row("shards_held", held, "")
        yield Row("memory_per_shard", (filled - empty) / held, "B")
        yield Row("own_memory_filled", filled / 1e6, "MB", 150 + held / 1000)
    finally:
        client.close()


def allocation_s(num_bytes: int) -> float:
    """Seconds that the kernel takes to allocate a memfd of this size."""
    started = time.monotonic()
    fd = os.memfd_create("larder-bench", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(fd, 0, num_bytes)
        return time.monotonic() - started
    finally:
        os.close(fd)


def padding(client: CacheClient, agent: Agent, name: str, shard_bytes: int) -> float:
    """Share of the arena's used bytes that no hit can read, after 64 shards of one size in an empty arena."""
    fill(client, namespace(name, shard_bytes), 64)
    with AgentAdmin(agent.target, timeout_s=5.0) as admin:
        used = admin.status().used_bytes
        admin.evict()
    return used / (64 * shard_bytes) - 1


def namespace(name: str, shard_bytes: int) -> NamespaceSpec:
    """One group, one shard."""
    return build_namespace(
        {"bench": name}, tokens_per_chunk=256, groups=[GroupShape("full", 1, shard_bytes)]
    )


def fill(client: CacheClient, spec: NamespaceSpec, num_shards: int) -> None:
    """Store chains of 16 chunks until `num_shards` are stored."""
    client.open_namespace(spec)
    size = spec.groups[0].shard_bytes
    source = MemorySource(bytearray(size))
    keys = [
        ChunkKey(hashlib.sha256(f"{spec.digest.hex()}/{i}".encode()).digest())
        for i in range(num_shards)
    ]
    for first in range(0, num_shards, BATCH):
        batch = [
            ShardWrite(keys[i], keys[i - 1] if i % 16 else None, i % 16, 0, 0, size, source)
            for i in range(first, min(first + BATCH, num_shards))
        ]
        results = client.store(spec.digest, batch, deadline_s=120.0)
        assert all(r.reason is Reason.HIT for r in results), {r.reason for r in results}


def rss_anon_bytes(pid: int) -> int:
    """Anonymous resident memory of a process."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no RssAnon for process {pid}")


if __name__ == "__main__":
    main()
