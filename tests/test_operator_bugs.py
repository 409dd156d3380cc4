"""Exceptions that nobody expected: one traceback per place, a line with the name for each of the others."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from cacheoperator import bugs
from cacheoperator.bugs import Bugs
from cacheoperator.queue import Queue
from cacheoperator.watch import Key
from cacheoperator.workers import Workers


def wrong_number(text: str) -> None:
    int(text)


def wrong_key() -> None:
    {}["no"]


class Seconds:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tell(told: Bugs, what: str, raise_it: Any) -> None:
    try:
        raise_it()
    except Exception as error:
        told.tell(error, what)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.exc_info]


def test_a_traceback_comes_once_in_a_while_with_a_count(caplog: pytest.LogCaptureFixture) -> None:
    clock = Seconds()
    told = Bugs(logging.getLogger("cacheoperator.test"), clock)
    for n in range(200):
        tell(told, f"kvcache ns/c{n}", lambda n=n: wrong_number(f"x{n}"))
    assert len(caplog.records) == 200
    assert len(tracebacks(caplog)) == 1
    assert "ns/c0" in tracebacks(caplog)[0]
    last = caplog.records[-1].getMessage()
    assert "ns/c199" in last
    assert "ValueError: invalid literal for int() with base 10: 'x199'" in last
    assert "\n" not in last
    tell(told, "kvcache ns/other", wrong_key)
    assert len(tracebacks(caplog)) == 2, "another bug is told whole"
    clock.now = bugs.again_after_s
    tell(told, "kvcache ns/later", lambda: wrong_number("y"))
    assert len(tracebacks(caplog)) == 3
    assert "199 times more" in tracebacks(caplog)[-1]


def test_what_is_remembered_is_bounded(caplog: pytest.LogCaptureFixture) -> None:
    told = Bugs(logging.getLogger("cacheoperator.test"), Seconds())
    for n in range(bugs.most_known + 10):
        scope: dict[str, Any] = {}
        exec(compile("\n" * n + "def f(): raise KeyError", "f.py", "exec"), scope)
        tell(told, "x", scope["f"])
    assert len(tracebacks(caplog)) == bugs.most_known + 10
    assert len(told._known) == bugs.most_known


def test_a_bug_that_all_kvcaches_meet_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    keys = [("ns", f"c{n}") for n in range(20)]
    seen: set[Key] = set()
    done = asyncio.Event()

    class Broken:
        ready: tuple[()] = ()

        async def reconcile(self, key: Key) -> Any:
            seen.add(key)
            if len(seen) == len(keys):
                done.set()
            wrong_key()

    class Watched:
        def keys(self) -> list[Key]:
            return keys

    async def test() -> None:
        queue: Queue[Key] = Queue(asyncio.get_running_loop().time, first_backoff_s=60.0)
        parts: Any = {"reconciler": Broken(), "watched": Watched()}
        workers = Workers(queue=queue, num_workers=2, resync_s=60.0, **parts)
        task = asyncio.create_task(workers.run())
        async with asyncio.timeout(5):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(test())
    assert len(tracebacks(caplog)) == 1
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    for key in keys:
        assert [line for line in lines if f"kvcache {'/'.join(key)} " in line], key
