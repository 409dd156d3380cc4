"""`python -m cacheoperator`: the operator's process. Reads its configuration once, wires the parts, runs until SIGTERM.

    --config FILE     YAML with the fields of `settings.Settings`; unknown keys are errors
    --namespace NAME  watch this namespace (repeat); overrides watch_namespaces of the file

Environment: POD_NAME and POD_NAMESPACE (who and where we are), KUBECONFIG (outside of a pod).
Ends with 0 after SIGTERM or SIGINT, with 1 when it can't go on: no login, a watch that was refused, the lease lost.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import secrets
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import yaml

from cacheoperator.children import Children
from cacheoperator.cluster import Cluster, login
from cacheoperator.errors import ClusterError, NotFound, Unreachable
from cacheoperator.events import Teller
from cacheoperator.lease import Lease, Others
from cacheoperator.probe import Prober
from cacheoperator.queue import Queue
from cacheoperator.reconcile import Reconciler
from cacheoperator.settings import Images, Settings
from cacheoperator.statusz import Agents
from cacheoperator.watch import Key, Watched
from cacheoperator.web import Web
from cacheoperator.workers import Workers
from cacheservice.errors import ConfigError

log = logging.getLogger("cacheoperator")

look_for_crd_s = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m cacheoperator", description=__doc__)
    parser.add_argument(
        "--config", type=Path, required=True, help="YAML with the fields of Settings"
    )
    parser.add_argument(
        "--namespace", action="append", default=[], help="watch this namespace; repeat"
    )
    parser.add_argument("--http-port", type=int, help="overrides http_port of the file")
    parser.add_argument("--verbose", action="store_true", help="log at DEBUG")
    options = parser.parse_args(argv)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s %(message)s",
    )
    for chatty in ("kopf", "aiohttp", "asyncio"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    try:
        settings = read_settings(options.config, os.environ)
    except ConfigError as error:
        log.error("%s", error)
        return 1
    changes: dict[str, Any] = {}
    if options.namespace:
        changes["watch_namespaces"] = tuple(options.namespace)
    if options.http_port is not None:
        changes["http_port"] = options.http_port
    settings = dataclasses.replace(settings, **changes)
    try:
        return asyncio.run(run(settings, os.environ.get("POD_NAME") or socket.gethostname()))
    except ClusterError as error:
        log.error("%s", error.message)
        return 1


def read_settings(path: Path, environment: Mapping[str, str]) -> Settings:
    """The settings in the file, with the version of this package. Raises ConfigError."""
    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    if not isinstance(value, dict) or not isinstance(value.get("images"), dict):
        raise ConfigError(f"{path}: must be a mapping with `images`")
    fields = _known(Settings, value, str(path))
    fields["images"] = Images(
        **_known(Images, value["images"], f"{path}: images", are_all_needed=True)
    )
    fields["watch_namespaces"] = tuple(fields.get("watch_namespaces") or ())
    fields.setdefault("operator_version", metadata.version("larder"))
    if environment.get("POD_NAMESPACE"):
        fields["operator_namespace"] = environment["POD_NAMESPACE"]
    return Settings(**fields)


def _known(
    wanted: type[Settings | Images],
    value: Mapping[str, Any],
    where: str,
    *,
    are_all_needed: bool = False,
) -> dict[str, Any]:
    names = {found.name for found in dataclasses.fields(wanted)}
    unknown = sorted(set(value) - names)
    missing = sorted(names - set(value)) if are_all_needed else []
    if unknown or missing:
        said = [f"unknown: {', '.join(unknown)}"] if unknown else []
        said += [f"missing: {', '.join(missing)}"] if missing else []
        raise ConfigError(f"{where}: {'; '.join(said)}")
    return dict(value)


async def run(settings: Settings, instance: str) -> int:
    """Log in, take the lease, watch and work until a signal comes or something ends it. Returns the exit code."""
    stop = asyncio.Event()
    state = {"problem": "logging in"}
    workers: Workers | None = None
    web = Web(
        health=lambda: workers.health() if workers is not None else "",
        readiness=lambda: state["problem"],
    )
    await web.open("0.0.0.0", settings.http_port)
    _take_signals(stop)
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(web.close)
        cluster = await stack.enter_async_context(Cluster(await login()))
        agents = Agents()
        stack.push_async_callback(agents.close)
        queue: Queue[Key] = Queue(asyncio.get_running_loop().time)
        watched = Watched(
            changed=queue.put,
            namespaces=settings.watch_namespaces,
            cluster=cluster,
        )
        children = Children(cluster, watched, _now)
        prober = Prober(cluster, settings, _now, queue.put)
        stack.push_async_callback(prober.close)
        identity = f"{instance}_{secrets.token_hex(4)}"
        reconciler = Reconciler(
            cluster=cluster,
            watched=watched,
            children=children,
            agents=agents,
            teller=Teller(cluster, _now, instance),
            settings=settings,
            now=_now,
            prober=prober,
            others=None if settings.watch_namespaces else Others(cluster, identity),
        )
        leases = [
            Lease(cluster, namespace, identity)
            for namespace in settings.watch_namespaces or (settings.operator_namespace,)
        ]
        state["problem"] = "waiting for the lease: another operator may work here"
        for lease in leases:
            stack.push_async_callback(lease.release)
        holds: list[asyncio.Task[str]] = []
        stack.push_async_callback(_cancel, holds)
        if not await _until(stop, _acquire(leases, holds)):
            return 0
        state["problem"] = "waiting for the CRD kvcaches.larder.dev"
        if not await _until(stop, _look_around(watched)):
            return 0
        state["problem"] = "reading what is in the cluster"
        workers = Workers(
            queue=queue,
            reconciler=reconciler,
            watched=watched,
            num_workers=settings.num_workers,
            resync_s=settings.resync_s,
        )
        return await _work(stop, state, watched, workers, holds)


async def _work(
    stop: asyncio.Event,
    state: dict[str, str],
    watched: Watched,
    workers: Workers,
    holds: Sequence[asyncio.Task[str]],
) -> int:
    """Until `stop`, or until one of the parts ends, which is a failure."""

    async def work() -> None:
        await watched.wait_until_read()
        _take_signals(stop)  # kopf took them for itself when it began
        state["problem"] = ""
        await workers.run()

    watching = asyncio.create_task(watched.run(stop), name="watch")
    parts = [
        watching,
        asyncio.create_task(work(), name="work"),
        *holds,
    ]
    stopping = asyncio.create_task(stop.wait(), name="stop")
    done, _ = await asyncio.wait([*parts, stopping], return_when=asyncio.FIRST_COMPLETED)
    code = 0
    for part in done - {stopping}:
        if not stop.is_set() and not (part is watching and part.exception() is None):
            code = 1
            log.error(
                "%s ended: %s", part.get_name(), part.exception() or part.result(),
                exc_info=part.exception(),
            )  # fmt: skip
    stop.set()
    state["problem"] = "ending"
    # No more writes, as the lease may be another's by now; kopf takes its time.
    await _cancel([part for part in parts if part is not watching])
    with contextlib.suppress(Exception):
        await asyncio.wait_for(watching, 10)
    await _cancel([watching, stopping])
    return code


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _acquire(leases: Sequence[Lease], holds: list[asyncio.Task[str]]) -> None:
    """Each is held from the moment that it is ours: the next one, or the CRD, may keep us waiting.

    One after the other, so that two operators of the same namespaces never wait for each other; but all are looked at
    first: an operator that died in twenty namespaces is then silent in all of them at once, not in one after the other.
    """
    for lease in leases:
        with contextlib.suppress(ClusterError):
            await lease.look()
    for lease in leases:
        await lease.acquire()
        holds.append(asyncio.create_task(lease.hold(), name="lease"))


async def _look_around(watched: Watched) -> None:
    """Until the CRD is there and every kind can be listed: a CRD that was just made is at first refused (429)."""
    told = ""
    while True:
        try:
            await watched.look_around()
        except (NotFound, Unreachable) as error:
            if error.message != told:
                log.error("%s", error.message)
            told = error.message
            await asyncio.sleep(look_for_crd_s)
        else:
            return


async def _until(stop: asyncio.Event, work: Any) -> bool:
    """Await `work`, unless `stop` comes first; whether it was done."""
    stopping = asyncio.create_task(stop.wait())
    working = asyncio.create_task(work)
    await asyncio.wait([stopping, working], return_when=asyncio.FIRST_COMPLETED)
    if not working.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        return False
    stopping.cancel()
    await working
    return True


def _take_signals(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)


def _now() -> datetime:
    return datetime.now(UTC)


if __name__ == "__main__":
    sys.exit(main())
