"""How the operator's process begins: it takes its leases."""

from __future__ import annotations

import asyncio
from typing import Any

from cacheoperator import __main__ as process
from cacheoperator.lease import Lease
from operator_fakes import FakeCluster

NAMESPACES = ("one", "two", "three")


def test_an_operator_that_died_in_many_namespaces_is_waited_for_once() -> None:
    async def test() -> None:
        cluster: Any = FakeCluster()
        now = 0.0
        for namespace in NAMESPACES:
            assert await Lease(cluster, namespace, "dead").try_once()
        # Looks every 10 ms; how long the dead one keeps its leases, 15 s, is for it to say.
        leases = [
            Lease(cluster, namespace, "next", duration_s=0.05, clock=lambda: now)
            for namespace in NAMESPACES
        ]
        holds: list[asyncio.Task[str]] = []
        taking = asyncio.create_task(process._acquire(leases, holds))
        while leases[0].holder != "dead" or leases[-1].holder != "dead":
            assert not taking.done()
            await asyncio.sleep(0)
        now = 16.0
        try:
            await asyncio.wait_for(taking, 10)
            assert [await lease.look() for lease in leases] == [""] * 3
            assert len(holds) == 3
        finally:
            await process._cancel(holds)

    asyncio.run(asyncio.wait_for(test(), 30))
