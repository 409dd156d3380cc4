"""Lookups in the background, and pools that can't make threads."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from cacheservice.client.values import LookupAnswer, LookupWait
from cacheservice.connector.lookups import NUM_WAITING_THREADS, LookupQuestion, Lookups
from cacheservice.connector.pools import start_threads, submit_once
from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.outcomes import Reason


class Client:
    """Answers as it is told, and notes what was asked and given back."""

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self.released: list[int] = []
        self.deadlines: list[float] = []
        self.gate = threading.Event()
        self.gate.set()

    def lookup(self, namespace, chunks, *, deadline_s, **options) -> LookupAnswer:
        self.deadlines.append(deadline_s)
        self.gate.wait(10)
        if self.reason is not None:
            return LookupAnswer(self.reason, b"", 0, 0, 0.0, 0)
        return LookupAnswer(None, b"\1", 1, 77, 5.0, 3)

    def release(self, lease_id: int) -> None:
        self.released.append(lease_id)


class NoThreads(ThreadPoolExecutor):
    """Queues the work, then finds that no thread can be made, as the real one does."""

    def _adjust_thread_count(self) -> None:
        raise RuntimeError("can't start new thread")


def question(**changes) -> LookupQuestion:
    options = {
        "namespace": NamespaceDigest(bytes(32)), "chunks": (ChunkKey(bytes(32)),), "superseded_lease": 0,
        "wait": LookupWait.NONE, "wait_num_chunks": 0, "wait_s": 0.0, "owner": None, "deadline_s": 0.1,
    }  # fmt: skip
    return LookupQuestion(**{**options, **changes})


@pytest.fixture
def client():
    return Client()


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
def lookups(client, now):
    made = Lookups(client, lambda: now[0])
    yield made
    client.gate.set()
    made.close()


def test_an_answer_supersedes_the_lease_by_itself(lookups, client):
    handle = lookups.start("r", question(superseded_lease=5))
    assert handle.done.wait(10)
    assert handle.answer.lease_id == 77
    assert client.released == []


def test_a_lookup_that_failed_gives_the_superseded_lease_back(lookups, client):
    client.reason = Reason.DEADLINE
    handle = lookups.start("r", question(superseded_lease=5))
    assert handle.done.wait(10)
    assert client.released == [5]


def test_a_lookup_that_nobody_wants_any_more_is_not_asked_and_leaves_no_lease(lookups, client):
    client.gate.clear()
    busy = [lookups.start("busy", question()) for _ in range(8)]
    handle = lookups.start("r", question(superseded_lease=5))
    lookups.abandon(handle)
    client.gate.set()
    assert all(one.done.wait(10) for one in [*busy, handle])
    assert handle.answer is None
    assert client.released == [5]


def test_a_lookup_that_comes_late_to_its_turn_is_not_asked(lookups, client, now):
    client.gate.clear()
    busy = [lookups.start("busy", question()) for _ in range(4)]
    handle = lookups.start("r", question(superseded_lease=5))
    now[0] += 0.2
    client.gate.set()
    assert all(one.done.wait(10) for one in [*busy, handle])
    assert (handle.answer, handle.failure) == (None, Reason.DEADLINE)
    assert client.released == [5]
    assert len(client.deadlines) == 4


def test_the_time_in_the_queue_counts(lookups, client, now):
    lookups._quick.shutdown()
    lookups._quick = ThreadPoolExecutor(1)
    client.gate.clear()
    busy = lookups.start("busy", question())
    handle = lookups.start("r", question())
    now[0] += 0.05
    client.gate.set()
    assert busy.done.wait(10)
    assert handle.done.wait(10)
    assert client.deadlines[-1] == pytest.approx(0.05)


@pytest.mark.parametrize("wait_s", [0.0, 1.0])
def test_without_a_thread_a_lookup_has_failed_and_holds_no_place(lookups, client, wait_s):
    lookups._quick = lookups._waiting = NoThreads(1)
    for _ in range(NUM_WAITING_THREADS + 1):
        handle = lookups.start("r", question(superseded_lease=5, wait_s=wait_s))
        assert handle.done.is_set()
        assert (handle.answer, handle.failure) == (None, Reason.INTERNAL)
    assert client.released == [5] * (NUM_WAITING_THREADS + 1)
    assert lookups._num_waiting == 0


def test_work_that_was_refused_never_runs():
    """The executor has queued it when it raises; a thread that is there must not take it."""
    ran, gate = [], threading.Event()
    with ThreadPoolExecutor(1) as pool:
        assert submit_once(pool, gate.wait, 10)
        pool._adjust_thread_count = lambda: NoThreads._adjust_thread_count(pool)
        assert not submit_once(pool, ran.append, "refused")
        gate.set()
    assert ran == []


def test_work_is_refused_after_a_shutdown():
    pool = ThreadPoolExecutor(1)
    pool.shutdown()
    assert not submit_once(pool, print)


def test_threads_made_ahead_serve_when_no_other_can_be_made():
    ran = []
    with ThreadPoolExecutor(2) as pool:
        start_threads(pool, 2)
        assert len(pool._threads) == 2
        pool._adjust_thread_count = lambda: None
        assert submit_once(pool, ran.append, 1)
    assert ran == [1]


def test_too_few_threads_at_start_are_no_error(caplog):
    start_threads(NoThreads(2), 2)
    assert "fewer threads than wanted" in caplog.text
