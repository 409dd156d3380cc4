"""The queue of KVCaches: each once, never beside itself, later after failures."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from cacheoperator.queue import Queue
from hypothesis import given
from hypothesis import strategies as st


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


async def is_idle(queue: Queue[str]) -> bool:
    """Whether `get` would wait now."""
    getting = asyncio.ensure_future(queue.get())
    for _ in range(5):
        await asyncio.sleep(0)
    if getting.done():
        return False
    getting.cancel()
    return True


def test_many_puts_are_one() -> None:
    async def test() -> None:
        queue: Queue[str] = Queue(Clock())
        for _ in range(3):
            queue.put("a")
        assert await queue.get() == "a"
        queue.done("a")
        assert await is_idle(queue)

    run(test)


def test_a_key_put_while_in_work_comes_again_afterwards_and_not_before() -> None:
    async def test() -> None:
        queue: Queue[str] = Queue(Clock())
        queue.put("a")
        await queue.get()
        queue.put("a")
        assert await is_idle(queue)
        queue.done("a")
        assert await queue.get() == "a"

    run(test)


def test_the_earlier_of_two_times_holds() -> None:
    async def test() -> None:
        clock = Clock()
        queue: Queue[str] = Queue(clock)
        queue.put("a", 60)
        queue.put("a", 5)
        queue.put("a", 90)
        clock.now = 4.9
        assert await is_idle(queue)
        clock.now = 5.0
        assert await queue.get() == "a"
        queue.done("a")
        clock.now = 1000.0
        assert await is_idle(queue)

    run(test)


def test_failures_wait_twice_as_long_each_until_one_goes_well() -> None:
    async def test() -> None:
        clock = Clock()
        queue: Queue[str] = Queue(clock, first_backoff_s=1.0, longest_backoff_s=5.0)
        waits = []
        queue.put("a")
        for _ in range(5):
            await queue.get()
            waits.append(queue.fail("a"))
            assert await is_idle(queue)
            clock.now += waits[-1]
        assert waits == [1.0, 2.0, 4.0, 5.0, 5.0]
        await queue.get()
        queue.done("a")
        queue.put("a")
        await queue.get()
        assert queue.fail("a") == 1.0

    run(test)


def test_a_change_does_not_wait_for_the_backoff() -> None:
    async def test() -> None:
        queue: Queue[str] = Queue(Clock())
        queue.put("a")
        await queue.get()
        queue.fail("a")
        queue.put("a")
        assert await queue.get() == "a"

    run(test)


def test_waiters_wake_for_a_put() -> None:
    async def test() -> None:
        queue: Queue[str] = Queue(asyncio.get_running_loop().time)
        getting = [asyncio.ensure_future(queue.get()) for _ in range(3)]
        await asyncio.sleep(0)
        for key in "abc":
            queue.put(key)
        assert sorted(await asyncio.gather(*getting)) == ["a", "b", "c"]

    run(test)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from("abc"), st.integers(0, 9)),
        st.tuples(st.just("get"), st.just(""), st.just(0)),
        st.tuples(st.sampled_from(["done", "fail"]), st.sampled_from("abc"), st.just(0)),
        st.tuples(st.just("wait"), st.just(""), st.integers(1, 9)),
    ),
    max_size=40,
)


@given(steps)
def test_it_hands_out_what_a_plain_table_of_due_times_would(
    plan: list[tuple[str, str, int]],
) -> None:
    async def test() -> None:
        clock = Clock()
        queue: Queue[str] = Queue(clock, first_backoff_s=1.0, longest_backoff_s=4.0)
        due: dict[str, float] = {}
        working: set[str] = set()
        failures: dict[str, int] = {}
        for step, key, number in plan:
            if step == "put":
                queue.put(key, number)
                due[key] = min(due.get(key, clock.now + number), clock.now + number)
            elif step == "wait":
                clock.now += number
            elif step in ("done", "fail") and key in working:
                working.discard(key)
                if step == "done":
                    queue.done(key)
                    failures.pop(key, None)
                else:
                    failures[key] = failures.get(key, 0) + 1
                    after_s = min(4.0, 2.0 ** (failures[key] - 1))
                    assert queue.fail(key) == after_s
                    due[key] = min(due.get(key, clock.now + after_s), clock.now + after_s)
            elif step == "get":
                open_keys = {k: at for k, at in due.items() if at <= clock.now and k not in working}
                if not open_keys:
                    assert await is_idle(queue)
                    continue
                got = await queue.get()
                assert due[got] == min(open_keys.values())
                del due[got]
                working.add(got)
            queue.check_invariants()
            assert len(queue) == len(due)

    run(test)
