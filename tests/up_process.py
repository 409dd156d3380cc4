"""`larder up --json` as a process of its own: started in a folder, waited for, and killed at the end of the test.

    with larder_up(folder, "--model", "model", env=environment) as (state, process):
        state["engines"]                    # what it printed when all was ready
        process.send_signal(signal.SIGINT)  # as Ctrl-C does; (folder / "stderr") is its log

The manifest is `folder / "kvcache.yaml"`, which the test has written. Used with real engines and with fake_vllm.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CLI = (sys.executable, "-m", "cacheservice.cli.main")
START_TIMEOUT_S = 240.0
"""Real engines on two busy cores."""


@contextmanager
def larder_up(
    folder: Path, *arguments: str, env: Mapping[str, str], cli: Sequence[str] = CLI
) -> Iterator[tuple[dict[str, Any], subprocess.Popen[str]]]:
    """What `larder up` printed, and its process; fails with its log when it does not get ready."""
    log = folder / "stderr"
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            [*cli, "up", "kvcache.yaml", "--json", *arguments],
            cwd=folder, env=dict(env), stdout=subprocess.PIPE, stderr=stderr, text=True,
        ) as process,
    ):  # fmt: skip
        try:
            assert process.stdout is not None
            watchdog = threading.Timer(START_TIMEOUT_S, process.kill)
            watchdog.start()
            try:
                line = process.stdout.readline()
            finally:
                watchdog.cancel()
            assert line, log.read_text()
            yield json.loads(line), process
        finally:
            process.kill()


def engine_environment() -> dict[str, str]:
    """This process's environment without Larder's settings, and without what `make test` sets for engines in it."""
    inside = {"VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_LOGGING_LEVEL"}
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("LARDER_") and name not in inside
    }
