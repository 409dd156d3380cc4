"""`kubectl larder report`: everything about one KVCache in one zip, for whoever is asked to help. Without secrets.

Invariants: no Secret is fetched: `kubectl get secrets` as a table, which the server prints, has their names and number
of keys; everything else goes through `redaction`; what may not be read is named in README.txt and the rest goes on.
"""

from __future__ import annotations

import functools
import json
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cacheoperator.names import Component, selector

from cacheservice import __version__
from cacheservice.errors import ConfigError, LarderError
from cacheservice.kubectl.agents import fetch
from cacheservice.kubectl.cluster import RESOURCE, Kubectl
from cacheservice.kubectl.explain import explain
from cacheservice.kubectl.redaction import redact_object, redact_text
from cacheservice.kubectl.seen import Seen, component_of
from cacheservice.kubectl.status import screen, status_view

KINDS = (
    "deployments.apps", "daemonsets.apps", "statefulsets.apps", "replicasets.apps", "controllerrevisions.apps", "pods",
    "services", "endpointslices.discovery.k8s.io", "configmaps", "serviceaccounts", "roles.rbac.authorization.k8s.io",
    "rolebindings.rbac.authorization.k8s.io", "networkpolicies.networking.k8s.io",
    "poddisruptionbudgets.policy", "horizontalpodautoscalers.autoscaling",
)  # fmt: skip
"""Children, by label. Never secrets."""
DESCRIBED = ("pods", "deployments.apps", "daemonsets.apps", "statefulsets.apps", "services")
LOG_LINES = 5000
NUM_AT_ONCE = 6
"""Runs of kubectl; each takes a tenth of a second of a core."""
OPERATOR_LABEL = "app.kubernetes.io/name=larder-operator"


class Report:
    """The zip while it is written. What can't be read is kept for README.txt.

    Files are asked for first and made by `finish`, a few at a time: each is a run of kubectl.
    """

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self._archive = archive
        self._wanted: list[tuple[str, Callable[[], str]]] = []
        self._names: list[str] = []
        self._missing: list[str] = []

    def text(self, name: str, make: Callable[[], str]) -> None:
        """A file of text; none when it would be empty."""
        self._wanted.append((name, lambda: redact_text(make())))

    def json(self, name: str, make: Callable[[], Any]) -> None:
        """A file of JSON."""
        self._wanted.append(
            (name, lambda: json.dumps(redact_object(make()), indent=1, ensure_ascii=False))
        )

    def finish(self, title: str) -> None:
        """Make all files, then README.txt."""
        with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
            for (name, _), (content, problem) in zip(
                self._wanted, pool.map(_made, self._wanted), strict=True
            ):
                if problem:
                    self._missing.append(f"{name}: {redact_text(problem)}")
                elif content.strip():
                    self._archive.writestr(name, content)
                    self._names.append(name)
        lines = [
            title,
            f"made by kubectl larder {__version__}; values that look like secrets are (redacted)",
            "",
        ]
        lines += [*sorted(self._names), ""]
        if self._missing:
            lines += ["could not be read:", *(f"  {one}" for one in self._missing)]
        self._archive.writestr("README.txt", "\n".join(lines) + "\n")

    @property
    def num_files(self) -> int:
        return len(self._names)

    @property
    def missing(self) -> tuple[str, ...]:
        return tuple(self._missing)


def _made(wanted: tuple[str, Callable[[], str]]) -> tuple[str, str]:
    """Content, or why there is none."""
    try:
        return wanted[1](), ""
    except LarderError as error:
        return "", str(error)


def write_report(kubectl: Kubectl, seen: Seen, path: Path) -> Report:
    """Write the zip to `path`, which must not exist (ConfigError). Raises nothing about the cluster."""
    try:
        file = path.open("xb")
    except FileExistsError as error:
        raise ConfigError(f"{path} exists: name another file with --output") from error
    except OSError as error:
        raise ConfigError(
            f"{path} can't be written ({error.strerror}): name another file with --output"
        ) from error
    with file, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        report = Report(archive)
        _objects(report, kubectl, seen)
        for pod in seen.pods:
            _logs(report, kubectl, seen.namespace, pod, "logs")
        for answer in seen.agents:
            _agent(report, kubectl, seen.namespace, answer.pod, answer.problem)
        _operator(report, kubectl)
        for sentence in seen.unread:
            report.text("children", _raiser(sentence))
        report.finish(f"KVCache {seen.name} in namespace {seen.namespace}")
    return report


def _objects(report: Report, kubectl: Kubectl, seen: Seen) -> None:
    own, namespace = selector(seen.name), seen.namespace
    report.text("status.txt", lambda: screen(status_view(seen)))
    report.text("explain.txt", lambda: explain(seen))
    report.json("kvcache.json", lambda: seen.resource)
    report.text(
        "describe/kvcache.txt",
        lambda: kubectl.text("describe", RESOURCE, seen.name, namespace=namespace),
    )
    for kind in KINDS:
        plural = kind.split(".", 1)[0]
        report.json(
            f"objects/{plural}.json",
            lambda kind=kind: kubectl.object("get", kind, "-l", own, namespace=namespace),  # type: ignore[misc]
        )
    for kind in DESCRIBED:
        report.text(
            f"describe/{kind.split('.', 1)[0]}.txt",
            lambda kind=kind: kubectl.text("describe", kind, "-l", own, namespace=namespace),  # type: ignore[misc]
        )
    report.text(
        "secrets.txt", lambda: kubectl.text("get", "secrets", "-l", own, "--server-print=true", namespace=namespace)
    )  # fmt: skip
    report.json("events.json", lambda: kubectl.object("get", "events", namespace=namespace))
    report.text(
        "events.txt",
        lambda: kubectl.text(
            "get", "events", "--sort-by=.metadata.creationTimestamp", namespace=namespace
        ),
    )
    report.text(
        "nodes.txt",
        lambda: kubectl.text("get", "nodes", "-o", "wide", "--show-labels", namespace=""),
    )
    report.text("versions.txt", lambda: kubectl.text("version", namespace=""))


def _logs(
    report: Report, kubectl: Kubectl, namespace: str, pod: Mapping[str, Any], folder: str
) -> None:
    """Every container that has run, and its run before."""
    name = str(pod["metadata"]["name"])
    status = pod.get("status") or {}
    for one in [
        *(status.get("initContainerStatuses") or ()),
        *(status.get("containerStatuses") or ()),
    ]:
        container, state = str(one["name"]), one.get("state") or {}
        words = ("logs", name, "-c", container, f"--tail={LOG_LINES}", "--timestamps")
        if "running" in state or "terminated" in state or one.get("restartCount"):
            report.text(
                f"{folder}/{name}.{container}.log",
                lambda words=words: kubectl.text(*words, namespace=namespace),  # type: ignore[misc]
            )
        if one.get("restartCount"):
            report.text(
                f"{folder}/{name}.{container}.previous.log",
                lambda words=words: kubectl.text(*words, "--previous", namespace=namespace),  # type: ignore[misc]
            )


def _agent(report: Report, kubectl: Kubectl, namespace: str, pod: str, problem: str) -> None:
    """Its /statusz with the ring of outcomes, and its metrics."""
    if problem:
        report.text(f"agents/{pod}", _raiser(problem))
        return

    @functools.cache
    def pages() -> list[str]:
        return fetch(kubectl, namespace, pod, ["/statusz?outcomes=1", "/metrics"])

    report.text(f"agents/{pod}.metrics.txt", lambda: pages()[1])
    report.json(f"agents/{pod}.statusz.json", lambda: _parsed(pages()[0]))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _operator(report: Report, kubectl: Kubectl) -> None:
    """The operator's pods and logs, where the user may see them: it lives in a namespace of its own."""
    try:
        pods = kubectl.items("get", "pods", "-A", "-l", OPERATOR_LABEL, namespace="")
    except LarderError as error:
        report.text("operator", _raiser(str(error)))
        return
    for pod in pods:
        report.json(f"operator/{pod['metadata']['name']}.json", lambda pod=pod: pod)  # type: ignore[misc]
        _logs(report, kubectl, str(pod["metadata"]["namespace"]), pod, "operator")


def _raiser(sentence: str) -> Callable[[], str]:
    def fail() -> str:
        raise LarderError(sentence)

    return fail


def counts_of(seen: Seen) -> str:
    """`2 agents, 3 engines`: what a report is about, for the last line on the screen."""
    engines = [
        pod for pod in seen.pods if component_of(pod) in (Component.PREFILL, Component.DECODE)
    ]
    return f"{len(seen.agents)} agents, {len(engines)} engines"
