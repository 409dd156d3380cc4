"""Background threads that run one at a time and only when a test says so, in an order that a seed decides.

`Jobs` takes the place of the connector's thread pools: what they were given waits until it is picked, runs up to the
next `pause`, and waits again, so that a load can stand still half-way while the engine goes on. Each job has a thread
of its own, but only one of all runs at any time, hence no test here depends on the machine's speed. A job that raises
makes the step that ran it raise.

Called by: scheduler_harness.py.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any


class Killed(BaseException):
    """The process that this job belonged to is gone."""


class Job:
    """One piece of background work."""

    def __init__(self, pool: SteppedPool, run: Callable[[], None]) -> None:
        self.pool = pool
        self.is_started = self.is_done = self.is_killed = False
        self._run = run
        self._failure: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)

    def resume(self) -> None:
        """Let it run to its next pause or its end."""
        if not self.is_started:
            self.is_started = True
            threading.Thread(target=self._main, name="job", daemon=True).start()
        self._go.release()
        self._back.acquire()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def wait_for_turn(self) -> None:
        """Called by the job: stop until it is resumed."""
        self._back.release()
        self._go.acquire()
        if self.is_killed:
            raise Killed

    def _main(self) -> None:
        self.pool.jobs.current.job = self
        self._go.acquire()
        try:
            self._run()
        except Killed:
            pass
        except BaseException as failure:
            self._failure = failure
        finally:
            self.is_done = True
            self._back.release()


class Jobs:
    """All background work of one world."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.current = threading.local()
        self.waiting: list[Job] = []
        """Not ended, in the order in which they were given."""
        self.pause_chance = 0.0
        self.tick: Callable[[], None] = lambda: None
        """Called while `finish` goes round, so that what waits for a time comes to it."""
        self.num_pauses = 0

    def pool(self, max_workers: int = 1, thread_name_prefix: str = "") -> SteppedPool:
        """Stands for ThreadPoolExecutor."""
        return SteppedPool(self, max_workers, thread_name_prefix)

    def pause(self, *, always: bool = False) -> None:
        """Called by jobs where the world may move on; nothing outside of a job."""
        job: Job | None = getattr(self.current, "job", None)
        if job is None or (not always and self.rng.random() >= self.pause_chance):
            return
        self.num_pauses += 1
        job.wait_for_turn()

    def runnable(self) -> list[Job]:
        """Those that a real pool would be running: as many of each pool as it has threads, oldest first."""
        chosen: list[Job] = []
        for job in self.waiting:
            if sum(other.pool is job.pool for other in chosen) < job.pool.max_workers:
                chosen.append(job)
        return chosen

    def progress(self, chance: float) -> None:
        """Let each runnable job go on with this chance, in random order."""
        jobs = [job for job in self.runnable() if self.rng.random() < chance]
        self.rng.shuffle(jobs)
        for job in jobs:
            self.resume(job)

    def resume(self, job: Job) -> None:
        """Let one job go on."""
        job.resume()
        if job.is_done:
            self.waiting.remove(job)

    def finish(self, pool: SteppedPool | None = None, limit: int = 10_000) -> None:
        """Run all jobs, or those of one pool, to their ends."""
        for _ in range(limit):
            left = [job for job in self.runnable() if pool is None or job.pool is pool]
            if not left:
                return
            for job in left:
                self.resume(job)
            self.tick()
        raise AssertionError("a job of the connector does not end")

    def drop(self, pool: SteppedPool, *, started: bool) -> None:
        """Forget what a pool was given; with `started` also what it has begun, as when its process is killed."""
        for job in [job for job in self.waiting if job.pool is pool]:
            if job.is_started and started:
                job.is_killed = True
                job.resume()
            elif job.is_started:
                continue
            self.waiting.remove(job)


class SteppedPool:
    """A pool of the connector. The interface of ThreadPoolExecutor, as far as the connector uses it."""

    def __init__(self, jobs: Jobs, max_workers: int, name: str) -> None:
        self.jobs, self.max_workers, self.name = jobs, max_workers, name
        self._is_shut = False

    def submit(self, run: Callable[..., Any], *arguments: Any) -> None:
        """Take work. The connector's way of making threads early has nothing to do here."""
        if self._is_shut:
            raise RuntimeError("cannot schedule new futures after shutdown")
        if isinstance(getattr(run, "__self__", None), threading.Event):
            return
        self.jobs.waiting.append(Job(self, lambda: run(*arguments)))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As the real one does: what has not begun is dropped or run, what has begun is waited for."""
        self._is_shut = True
        if cancel_futures:
            self.jobs.drop(self, started=False)
        if wait:
            self.jobs.finish(self)
