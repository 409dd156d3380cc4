"""How large and how fast the operator is with 200 KVCaches and 2,000 foreign pods: memory, full pass, writes at rest.

    e2e/cluster/run.sh .venv/bin/python bench/operator_scale.py [--resources 200] [--pods 2000] [--keep]

Needs KUBECONFIG of a cluster with our CRD and nothing else to do. Makes a namespace of its own with the resources,
which have no node to run on (so only objects appear, about 20 each), and with pods that no scheduler takes. The
operator runs as a process of this machine and watches the whole cluster, as the chart's default does (with --namespaced
that one namespace: for a cluster that others use); its memory is the resident set.

The targets are issue 5's: at most 150 MB, a full pass in at most 60 s. Exit code 1 when one is missed, or when the
operator writes anything while nothing changes.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / "operator"), str(REPOSITORY / "e2e")]

from cacheoperator.cluster import Cluster, login  # noqa: E402
from cacheoperator.errors import Conflict  # noqa: E402
from cacheoperator.kinds import KVCACHE, NAMESPACE, POD  # noqa: E402
from operator_process import Operator  # noqa: E402

MOST_MEGABYTES = 150.0
LONGEST_PASS_S = 60.0
NOWHERE = {"larder.dev/bench-nowhere": "true"}
AT_ONCE = 16


def resource(namespace: str, name: str, *, is_paused: bool) -> dict[str, Any]:
    return {
        "apiVersion": KVCACHE.api_version,
        "kind": KVCACHE.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {
            "model": {"name": "llama", "path": "/srv/models/llama"},
            "engine": {"device": "cpu", "sharedMemory": "64Mi"},
            "cache": {"cpu": "64Mi", "nodeSelector": NOWHERE},
            "redis": {"external": {"address": "redis.nowhere.svc:6379"}},
            "router": {"replicas": 0},
            "prefill": {"replicas": 0},
            "decode": {"replicas": 0},
            "paused": is_paused,
        },
    }


def foreign_pod(namespace: str, name: str) -> dict[str, Any]:
    """As large as pods are: a few variables and mounts. Nobody schedules it."""
    env = [{"name": f"SETTING_{n}", "value": "x" * 40} for n in range(20)]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": namespace, "labels": {"app": "theirs"}},
        "spec": {
            "schedulerName": "nobody",
            "containers": [{"name": "main", "image": "theirs:1", "env": env}],
        },
    }


async def make(cluster: Cluster, objects: list[dict[str, Any]]) -> None:
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(obj: dict[str, Any]) -> None:
        async with gate:
            try:
                await cluster.create(obj)
            except Conflict:
                pass  # of an earlier run

    await asyncio.gather(*(one(obj) for obj in objects))


def memory_megabytes(pid: int, field: str) -> float:
    for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise LookupError(field)


async def wait_for(what: str, is_so: Any, limit_s: float) -> float:
    begin = time.monotonic()
    while not await is_so():
        if time.monotonic() - begin > limit_s:
            raise TimeoutError(what)
        await asyncio.sleep(1)
    return time.monotonic() - begin


async def measure(options: argparse.Namespace) -> int:
    ours = options.namespace
    async with Cluster(await login()) as cluster:
        await make(cluster, [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": ours}}])
        begin = time.monotonic()
        await make(cluster, [foreign_pod(ours, f"pod-{n}") for n in range(options.pods)])
        await make(
            cluster,
            [resource(ours, f"kv-{n}", is_paused=options.paused) for n in range(options.resources)],
        )
        print(
            f"made {options.resources} KVCaches and {options.pods} pods in {time.monotonic() - begin:.0f} s"
        )
        with tempfile.TemporaryDirectory() as folder:
            operator = Operator(
                Path(folder),
                *([ours] if options.namespaced else []),
                operator_namespace=ours,
                resync_s=options.resync,
            )
            try:
                operator.start()
                return await watch(options, cluster, operator, ours)
            finally:
                print(f"ended with {operator.stop()}")
                if options.log:
                    print(operator.log()[-options.log :])
                if not options.keep:
                    found = await cluster.get(NAMESPACE, None, ours)
                    if found is not None:
                        await cluster.delete(NAMESPACE, None, ours, found["metadata"]["uid"])


async def watch(
    options: argparse.Namespace, cluster: Cluster, operator: Operator, ours: str
) -> int:
    async def all_seen() -> bool:
        found = await cluster.list(KVCACHE, ours)
        return sum(1 for one in found if one.get("status")) >= options.resources

    took_s = await wait_for("every KVCache has a status", all_seen, 1200)
    print(f"every KVCache has its objects and a status after {took_s:.0f} s")
    pid = operator.pid()
    await asyncio.to_thread(operator.after_passes, 2, each_s=options.resync + 300)
    pass_s = operator.metric("larder_operator_full_pass_duration_seconds")
    writes = operator.writes() - lease_writes(operator)
    cpu = cpu_seconds(pid)
    await asyncio.to_thread(operator.after_passes, 1, each_s=options.resync + 300)
    later = operator.writes() - lease_writes(operator)
    now, peak = memory_megabytes(pid, "VmRSS"), memory_megabytes(pid, "VmHWM")
    print(f"resident {now:.0f} MB, at most {peak:.0f} MB; full pass {pass_s:.2f} s; "
          f"CPU of two passes {cpu_seconds(pid) - cpu:.1f} s; writes at rest {later - writes:.0f}")  # fmt: skip
    pods = await cluster.list(POD, ours, labels="app=theirs", metadata_only=True)
    print(f"with {len(pods)} foreign pods")
    is_well = now <= MOST_MEGABYTES and pass_s <= LONGEST_PASS_S and later == writes
    print("within the targets" if is_well else "MISSED")
    return 0 if is_well else 1


def lease_writes(operator: Operator) -> float:
    """Renewals are PUT or the first POST; nothing else of the operator's is a PUT."""
    _, text = operator.answer("/metrics")
    return sum(
        float(line.split()[-1])
        for line in text.splitlines()
        if line.startswith("larder_operator_api_requests_total") and 'method="PUT"' in line
    )


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--resources", type=int, default=200)
    parser.add_argument("--pods", type=int, default=2000)
    parser.add_argument("--resync", type=float, default=60.0, help="seconds between full passes")
    parser.add_argument(
        "--paused", action="store_true", help="resources that are paused: no objects, only a status"
    )
    parser.add_argument(
        "--namespace", default="bench-operator", help="made for the run, and deleted"
    )
    parser.add_argument("--namespaced", action="store_true", help="watch the one namespace alone")
    parser.add_argument(
        "--log", type=int, default=0, help="print so many last characters of the operator's log"
    )
    parser.add_argument("--keep", action="store_true", help="leave the namespaces there")
    return asyncio.run(measure(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
