"""An operator as a process of the test: `python -m cacheoperator` with a configuration of its own, and what it wrote.

For tests of the operator alone: it can be stopped, killed and started again at will, and several can run. Runs under
the login of KUBECONFIG, so what the chart's account may do is tested elsewhere (test_chart_install.py).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml
from live_cluster import AUDIT_LOG, REPOSITORY, until

IMAGES = {
    "engine_cuda": "stand-in",
    "engine_cpu": "stand-in",
    "payload": "larder-payload",
    "agent": "larder",
    "redis": "redis",
    "router_smg": "larder-router",
    "router_vllm": "larder-router",
}
"""Images of images.py by field of the operator's settings."""
READ_VERBS = {"get", "list", "watch"}


def images(**other: str) -> dict[str, str]:
    """References for the operator's settings; `other` names another image for a field."""
    registry = os.environ.get("LARDER_E2E_REGISTRY", "localhost")
    return {field: f"{registry}/{name}:dev" for field, name in {**IMAGES, **other}.items()}


class Operator:
    """One process. `folder` takes its configuration and its log."""

    def __init__(self, folder: Path, *namespaces: str, **settings: Any) -> None:
        self.namespaces = namespaces
        self.port = _free_port()
        self._config = folder / f"operator-{self.port}.yaml"
        self._log = folder / f"operator-{self.port}.log"
        values = {
            "images": images(),
            "image_pull_policy": "IfNotPresent",
            "watch_namespaces": list(namespaces),
            "http_port": self.port,
            "resync_s": 2.0,
            **settings,
        }
        self._config.write_text(yaml.safe_dump(values), encoding="utf-8")
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, is_ready: bool = True) -> None:
        """Start it, and wait until it works."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "cacheoperator", "--config", str(self._config)],
                cwd=REPOSITORY, stdout=log, stderr=log,
                env={**os.environ, "PYTHONPATH": str(REPOSITORY / "operator")},
            )  # fmt: skip
        if is_ready:
            self.until_ready()

    def until_ready(self) -> None:
        until(
            f"the operator is ready: {self._log}",
            lambda: self.answer("/readyz")[0] == 200,
            timeout_s=60,
        )

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        """End it; its exit code."""
        if self._process is None:
            return 0
        self._process.send_signal(number)
        try:
            return self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise
        finally:
            self._process = None

    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def answer(self, path: str) -> tuple[int, str]:
        """Status and text of its HTTP; (0, reason) when there is none."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name: str) -> float:
        """Sum over all labels; 0 when it is not there."""
        _, text = self.answer("/metrics")
        found = re.findall(rf"^{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.MULTILINE)
        return sum(float(value) for value in found)

    def writes(self) -> float:
        """Requests to the API server that were no reads, by its own count; the lease's too."""
        _, text = self.answer("/metrics")
        found = re.findall(
            r'^larder_operator_api_requests_total\{method="(\w+)",[^}]*\} (\S+)$',
            text,
            re.MULTILINE,
        )
        return sum(float(value) for method, value in found if method != "GET")

    def after_passes(self, count: int = 2, *, each_s: float = 60) -> None:
        """Wait until that many passes over all KVCaches have begun and ended from now on."""
        for _ in range(count + 1):
            before = self.metric("larder_operator_full_pass_end_timestamp_seconds")
            until(
                "a full pass",
                lambda before=before: (
                    self.metric("larder_operator_full_pass_end_timestamp_seconds") > before
                ),
                timeout_s=each_s,
            )

    def log(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def running(folder: Path, *namespaces: str, **settings: Any) -> Iterator[Operator]:
    """An operator that works, and is ended afterwards."""
    operator = Operator(folder, *namespaces, **settings)
    try:
        operator.start()
        yield operator
    finally:
        operator.stop()


def audited(since: datetime, *namespaces: str) -> list[str]:
    """Writes by operators in namespaces since a moment: "verb resource/name URI by user". No renewals of leases."""
    found = []
    with AUDIT_LOG.open(encoding="utf-8") as file:
        for line in file:
            if "larder-operator" not in line:
                continue
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # being written
            about = entry.get("objectRef") or {}
            is_ours = str(entry.get("userAgent", "")).startswith("larder-operator")
            if not is_ours or about.get("namespace") not in namespaces:
                continue
            at = datetime.fromisoformat(entry["requestReceivedTimestamp"])
            if at < since or entry["verb"] in READ_VERBS or about.get("resource") == "leases":
                continue
            found.append(
                f"{entry['verb']} {about.get('resource')}/{about.get('name')} {entry['requestURI']}"
                f" by {entry['user']['username']}"
            )
    return found


def now() -> datetime:
    return datetime.now(UTC)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
