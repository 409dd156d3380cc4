"""The cluster under test, by kubectl and helm alone: what a user has. Used by every test in this folder.

Everything here is an effect or a question with a deadline; what is expected is said in the tests. No sleeps but those
between two looks at the same thing.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

Document = dict[str, Any]
Seen = TypeVar("Seen")

REPOSITORY = Path(__file__).resolve().parent.parent
CACHE = Path(
    os.environ.get("LARDER_E2E_DIR")
    or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "larder-e2e"
)
AUDIT_LOG = CACHE / "audit" / "audit.log"


class CommandFailed(Exception):
    """kubectl or helm ended with an error; the text is what it said."""


class NotYet(Exception):
    """A deadline passed; the text says what was waited for and what was seen last."""


def run(*command: str, stdin: str | None = None, timeout_s: float = 120) -> str:
    """What a command prints. Raises CommandFailed with everything that it said."""
    done = subprocess.run(
        command, input=stdin, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    if done.returncode != 0:
        raise CommandFailed(f"{' '.join(command)}: {done.stdout}{done.stderr}".strip())
    return done.stdout


def kubectl(*arguments: str, stdin: str | None = None, timeout_s: float = 120) -> str:
    """What kubectl prints."""
    return run("kubectl", *arguments, stdin=stdin, timeout_s=timeout_s)


def in_node(node: str, *command: str) -> str:
    """What a command prints inside a node of the bundled cluster: "node2"."""
    return run(
        str(REPOSITORY / "e2e" / "cluster" / "run.sh"), f"-{node.removeprefix('node')}", *command
    )


def until(what: str, look: Callable[[], Seen | None], *, timeout_s: float) -> Seen:
    """Look until there is something (not None, not False). Raises NotYet when the deadline passes.

    What kubectl refuses meanwhile, and a field that is missing, count as nothing there. Looks come ever more rarely, up
    to 2 s: each costs a tenth of a second of the cores that do what is waited for.
    """
    begun = time.monotonic()
    deadline = begun + timeout_s
    last: object = None
    while True:
        try:
            seen = look()
            if seen is not None and seen is not False:
                return seen
            last = seen
        except (CommandFailed, KeyError) as problem:
            last = problem
        if time.monotonic() > deadline:
            raise NotYet(f"not within {timeout_s:g} s: {what}; seen last: {last}")
        time.sleep(min(2, 0.5 + (time.monotonic() - begun) / 20))


class Namespace:
    """One namespace and what tests ask of it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def kubectl(self, *arguments: str, stdin: str | None = None, timeout_s: float = 120) -> str:
        """What kubectl prints for this namespace."""
        return kubectl("--namespace", self.name, *arguments, stdin=stdin, timeout_s=timeout_s)

    def apply(self, *documents: Mapping[str, Any]) -> None:
        """Server-side apply, as field manager "e2e"."""
        self.kubectl(
            "apply", "--server-side", "--force-conflicts", "--field-manager=e2e", "-f", "-",
            stdin=yaml.safe_dump_all(documents, sort_keys=False),
        )  # fmt: skip

    def delete(self, kind: str, *names: str) -> None:
        """Ask for a deletion, whether the objects are there or not; does not wait."""
        self.kubectl("delete", kind, *names, "--ignore-not-found", "--wait=false")

    def get(self, kind: str, name: str) -> Document:
        """One object. Raises CommandFailed when it is not there."""
        return dict(json.loads(self.kubectl("get", kind, name, "-o", "json")))

    def find(self, kind: str, name: str) -> Document | None:
        """One object, or None."""
        text = self.kubectl("get", kind, name, "-o", "json", "--ignore-not-found")
        return dict(json.loads(text)) if text.strip() else None

    def list(self, kinds: str, selector: str = "") -> list[Document]:
        """All objects of some kinds, by label."""
        text = self.kubectl("get", kinds, "-o", "json", *(["-l", selector] if selector else []))
        return list(json.loads(text)["items"])

    def pods(self, instance: str, component: str = "") -> list[Document]:
        """Pods of a KVCache, of one component or all; those that are being deleted are left out."""
        selector = f"app.kubernetes.io/name=larder,app.kubernetes.io/instance={instance}"
        if component:
            selector += f",app.kubernetes.io/component={component}"
        return [
            pod for pod in self.list("pods", selector) if "deletionTimestamp" not in pod["metadata"]
        ]

    def patch(self, kind: str, name: str, change: Mapping[str, Any]) -> None:
        """A merge patch."""
        self.kubectl("patch", kind, name, "--type=merge", "-p", json.dumps(change))

    def conditions(self, name: str) -> dict[str, Document]:
        """Conditions of a KVCache by type; none while there is no status."""
        status = self.get("kvcache", name).get("status", {})
        return {condition["type"]: condition for condition in status.get("conditions", ())}

    def until_condition(
        self,
        name: str,
        condition_type: str,
        status: str,
        reason: str = "",
        *,
        timeout_s: float = 120,
        containing: Iterable[str] = (),
    ) -> Document:
        """Wait until a condition of a KVCache says what is wanted, and return it."""
        words = tuple(containing)

        def look() -> Document | None:
            seen = self.conditions(name)
            condition = seen.get(condition_type)
            if (
                condition is not None
                and condition["status"] == status
                and reason in ("", condition["reason"])
                and all(word in condition["message"] for word in words)
            ):
                return condition
            shown[:] = [
                f"{kind}={one['status']}/{one['reason']}: {one['message']}"
                for kind, one in seen.items()
            ]
            return None

        shown: list[str] = []
        try:
            return until(
                f"{name}: {condition_type}={status}/{reason} {words}", look, timeout_s=timeout_s
            )
        except NotYet as late:
            raise NotYet("\n  ".join([str(late), *shown])) from late

    def events(self, name: str, reason: str = "") -> list[Document]:
        """Events about an object, by its name."""
        return [
            event
            for event in self.list("events")
            if event["involvedObject"].get("name") == name and reason in ("", event["reason"])
        ]

    def statusz(self, pod: str) -> Document:
        """What an agent says of itself, through the API server."""
        path = f"/api/v1/namespaces/{self.name}/pods/{pod}:7501/proxy/statusz"
        return dict(json.loads(kubectl("get", "--raw", path)))

    def state(self) -> str:
        """Everything that helps to understand a failure: objects, events, the ends of logs."""
        questions = (
            ("get", "kvcaches,pods,deployments,daemonsets,statefulsets,services", "-o", "wide"),
            ("get", "kvcaches", "-o", "yaml"),
            ("get", "events", "--sort-by=.lastTimestamp"),
            ("describe", "pods"),
        )
        logs = ("--all-containers", "--prefix", "--tail=120")
        names = [pod["metadata"]["name"] for pod in self.list("pods")]
        return "\n".join(
            f"==== {' '.join(question)}\n{self._answer(question)}"
            for question in (*questions, *(("logs", name, *logs) for name in names))
        )

    def _answer(self, question: tuple[str, ...]) -> str:
        try:
            return self.kubectl(*question)
        except (CommandFailed, subprocess.TimeoutExpired) as problem:
            return str(problem)


def image(name: str) -> dict[str, str]:
    """The chart's words for an image of e2e/images.py; LARDER_E2E_REGISTRY is where another cluster finds them."""
    registry = os.environ.get("LARDER_E2E_REGISTRY", "localhost")
    return {"registry": registry, "repository": name, "tag": "dev"}


def reference(name: str) -> str:
    """The same as one word, for a pod."""
    parts = image(name)
    return f"{parts['registry']}/{parts['repository']}:{parts['tag']}"


def is_ready(workload: Mapping[str, Any]) -> bool:
    """Whether a Deployment, StatefulSet or DaemonSet runs as written, every pod of it ready and of the newest form."""
    status, wanted = workload.get("status", {}), workload["spec"].get("replicas", 1)
    if status.get("observedGeneration", 0) < workload["metadata"]["generation"]:
        return False
    if workload["kind"] == "DaemonSet":
        wanted = status.get("desiredNumberScheduled", 0)
        return bool(
            status.get("numberReady", 0) == wanted == status.get("updatedNumberScheduled", 0)
        )
    return bool(
        status.get("readyReplicas", 0) == wanted == status.get("updatedReplicas", 0)
        and status.get("replicas", 0) == wanted
    )
