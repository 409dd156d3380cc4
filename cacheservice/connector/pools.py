"""Work on threads in a process that may be out of them: every piece runs exactly once, or is known never to run.

`ThreadPoolExecutor.submit` raises RuntimeError when no thread can be made, after it has queued the work, which another
thread may still take; and after a shutdown. Called by: lookups.py and worker.py, which must not let that reach vLLM.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

logger = logging.getLogger(__name__)

LONGEST_START_S = 5.0


def submit_once(pool: ThreadPoolExecutor, run: Callable[..., None], *arguments: Any) -> bool:
    """Have `run(*arguments)` run on the pool. False: it was refused, and will never run."""
    claim = threading.Lock()

    def run_if_wanted() -> None:
        if claim.acquire(blocking=False):
            run(*arguments)

    try:
        pool.submit(run_if_wanted)
    except RuntimeError as error:
        # The work may have been queued all the same: whoever takes the claim first decides.
        was_taken = not claim.acquire(blocking=False)
        if not was_taken:
            logger.warning("no thread for work of the cache connector, it is dropped: %s", error)
        return was_taken
    return True


def start_threads(pool: ThreadPoolExecutor, num_threads: int) -> None:
    """Make the pool's threads now, while there are some to be had. Fewer are no error: those work."""
    gate = threading.Event()
    try:
        for _ in range(num_threads):
            pool.submit(gate.wait, LONGEST_START_S)
    except RuntimeError as error:
        logger.warning(
            "fewer threads than wanted for the cache connector: %s. Raise the limit of processes or of the pod's PIDs",
            error,
        )
    finally:
        gate.set()
