"""HTTP of the operator: /healthz, /readyz, /metrics. Plain text; nothing else is served.

/healthz is 503 when the process should be restarted, /readyz while it does not work: another operator holds the lease,
or the first lists have not come yet.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import generate_latest

from cacheoperator import metrics

Check = Callable[[], str]
"""Gives "" when all is well, else what is wrong."""


class Web:
    """Serves until `close`."""

    def __init__(self, *, health: Check, readiness: Check) -> None:
        application = web.Application()
        application.router.add_get("/healthz", _answer(health))
        application.router.add_get("/readyz", _answer(readiness))
        application.router.add_get("/metrics", _metrics)
        self._runner = web.AppRunner(application, access_log=None)

    async def open(self, host: str, port: int) -> int:
        """Listen; returns the port (a free one for 0)."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def close(self) -> None:
        await self._runner.cleanup()


def _answer(check: Check) -> Callable[[web.Request], Awaitable[web.Response]]:
    async def answer(_: web.Request) -> web.Response:
        problem = check()
        return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)

    return answer


async def _metrics(_: web.Request) -> web.Response:
    content = generate_latest(metrics.registry)
    return web.Response(
        body=content, headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"}
    )
