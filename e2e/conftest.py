"""The cluster, our installation in it, and what is shown when a test fails.

Tests speak to the cluster of KUBECONFIG (`make e2e` brings up the bundled one when none is given). In strict mode, with
CI or LARDER_E2E_STRICT set, a skip is a failure: what was not tried did not pass.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import yaml
from live_cluster import (
    CACHE,
    REPOSITORY,
    CommandFailed,
    Namespace,
    image,
    is_ready,
    kubectl,
    reference,
    run,
    until,
)
from traffic import (
    CONTROL,
    MAX_TOKENS,
    Harmed,
    Oracle,
    Question,
    body,
    client_pod,
    control_deployment,
    prompt,
    send,
    until_control,
)

IS_STRICT = bool(os.environ.get("CI") or os.environ.get("LARDER_E2E_STRICT"))
IS_BUNDLED = bool(os.environ.get("LARDER_E2E_BUNDLED"))
IS_SHARED = bool(os.environ.get("LARDER_E2E_SHARED"))
"""Others use the cluster too: leave the CustomResourceDefinition to them and watch our namespaces alone."""
INSTALLED = os.environ.get("LARDER_E2E_INSTALLED", "")
"""Namespace of an operator of the whole cluster that is there and is taken as it is, "" to install one."""
BESIDE = os.environ.get("LARDER_E2E_BESIDE", "")
"""A file that another pytest in the same cluster has locked for as long as it runs (run.sh), "" for none."""
IS_KEPT = bool(os.environ.get("LARDER_E2E_KEEP"))
PREFIX = os.environ.get("LARDER_E2E_PREFIX", "e2e")
EXAMPLE = REPOSITORY / "examples" / "cpu-cluster.yaml"
NUM_KNOWN, NUM_FOR_ALL = 56, 12
"""Prompts whose answer the control says: those that load sends over and over, the rest for one look each."""
START_S = 480
"""An engine on a CPU starts in 30-58 s; three at once on two busy cores take longer."""
BESIDE_S = 600
LAST = ("test_journey", "test_kubectl_larder", "test_faults_engines")
"""Files that share the pair of real engines, in the order of what they do to it."""
NAMESPACES = ("journey", "faults", "sessions", "quota", "restricted", "admission")
USED: list[Namespace] = []
HARMED = CACHE / "harmed"
"""There when a request was harmed: run.sh tries nothing once more then."""


# Skips and failures


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn skips into failures in strict mode; write the state of our namespaces beside a failure."""
    report = yield
    if report.skipped and IS_STRICT and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        report.outcome = "failed"
        report.longrepr = f"not tried, and this run is strict: {reason}"
    elif report.failed:
        if call.excinfo is not None and call.excinfo.errisinstance(Harmed):
            HARMED.parent.mkdir(parents=True, exist_ok=True)
            HARMED.write_text(f"{item.nodeid}: {call.excinfo.value}", encoding="utf-8")
        folder = CACHE / "failures" / item.name
        folder.mkdir(parents=True, exist_ok=True)
        for namespace in USED:
            path = folder / f"{namespace.name}.txt"
            path.write_text(namespace.state(), encoding="utf-8")
            report.sections.append((f"state of {namespace.name}", f"in {path}"))
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """As above, for a whole file that is skipped."""
    report = yield
    if report.skipped and IS_STRICT:
        report.outcome = "failed"
        report.longrepr = f"not tried, and this run is strict: {report.longrepr}"
    return report


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that look inside nodes need the bundled cluster; those of real engines come last, rough ones at the end.

    Late ones come after all others without real engines: their resources live as long as the run.
    What is marked slow is tried with LARDER_E2E_SLOW only: what stand-ins show in CI, with real engines.
    """
    if not os.environ.get("LARDER_E2E_SLOW"):
        config.hook.pytest_deselected(
            items=[one for one in items if one.get_closest_marker("slow")]
        )
        items[:] = [one for one in items if not one.get_closest_marker("slow")]
    items.sort(
        key=lambda item: (
            LAST.index(item.path.stem) if item.path.stem in LAST else -1,
            item.get_closest_marker("late") is not None,
        )
    )
    for item in items:
        if item.get_closest_marker("bundled") and not IS_BUNDLED:
            item.add_marker(
                pytest.mark.skip(reason="needs the bundled cluster, whose nodes it looks into")
            )


# The cluster


@pytest.fixture(scope="session")
def cluster() -> None:
    """A cluster that answers."""
    if not os.environ.get("KUBECONFIG"):
        pytest.skip("KUBECONFIG is not set: run `make e2e`, which brings up a cluster")
    for program in ("kubectl", "helm"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not on PATH")
    kubectl("version", timeout_s=30)


@pytest.fixture(scope="session")
def namespaces(cluster: None) -> Iterator[dict[str, Namespace]]:
    """Our namespaces, empty at first and deleted at the end; with LARDER_E2E_KEEP they are used again as they are."""
    made = {short: Namespace(f"{PREFIX}-{short}") for short in NAMESPACES}
    names = [namespace.name for namespace in made.values()]
    if not IS_KEPT:
        kubectl("delete", "namespace", *names, "--ignore-not-found", timeout_s=180)
    for name in names:
        if not kubectl("get", "namespace", name, "--ignore-not-found"):
            kubectl("create", "namespace", name)
    USED.extend(made.values())
    yield made
    if not IS_KEPT:
        kubectl("delete", "namespace", *names, "--wait=false")


@pytest.fixture(scope="session")
def installation(namespaces: dict[str, Namespace]) -> Iterator[Namespace]:
    """The operator, installed by the chart; the namespace that it is in."""
    if INSTALLED:
        yield Namespace(INSTALLED)
        return
    system = Namespace(f"{PREFIX}-system")
    values = {
        "images": {
            "larder": image("larder"),
            "payload": image("larder-payload"),
            "engineCuda": image("stand-in"),
            "engineCpu": image("engine-cpu"),
            "redis": image("redis"),
            "routerSmg": image("larder-router"),
            "routerVllm": image("larder-router"),
        },
        "imagePullPolicy": "IfNotPresent",
        "operator": {"resyncSeconds": 30},
    }
    if IS_SHARED:
        values["crds"] = {"enabled": False}
        values["rbac"] = {"aggregate": False}
        values["watchNamespaces"] = [namespace.name for namespace in namespaces.values()]
        until(
            "the others have installed the CustomResourceDefinition",
            lambda: kubectl("get", "crd", "kvcaches.larder.dev", "--ignore-not-found") or None,
            timeout_s=120,
        )
    USED.append(system)
    run(
        "helm", "upgrade", "--install", "larder", str(REPOSITORY / "charts" / "larder"),
        "--namespace", system.name, "--create-namespace", "--wait", "--timeout", "90s", "--values", "-",
        stdin=yaml.safe_dump(values),
    )  # fmt: skip
    until(
        "the operator's Deployment is ready",
        lambda: is_ready(system.get("deployment", "larder-operator")),
        timeout_s=60,
    )
    yield system
    if not IS_KEPT:
        run("helm", "uninstall", "larder", "--namespace", system.name, "--wait")
        kubectl("delete", "namespace", system.name, "--wait=false")


@pytest.fixture(scope="session", autouse=True)
def begun(request: pytest.FixtureRequest) -> None:
    """Engines take a minute to start: they do so while the tests without engines run, which mostly wait."""
    if any(item.path.stem in LAST for item in request.session.items):
        request.getfixturevalue("started")


@pytest.fixture(scope="session")
def started(installation: Namespace, namespaces: dict[str, Namespace]) -> Namespace:
    """A namespace with a client, a plain engine called control, and examples/cpu-cluster.yaml: applied, no more."""
    namespace = namespaces["journey"]
    spec = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["spec"]
    namespace.apply(
        client_pod(reference("larder")),
        control_deployment(
            reference("engine-cpu"),
            spec["model"]["path"],
            spec["engine"]["pythonPath"],
            spec["decode"]["args"],
        ),
    )
    if namespace.find("kvcache", "demo") is None:
        # Else it is as an earlier run left it, see LARDER_E2E_KEEP.
        namespace.kubectl("apply", "-f", str(EXAMPLE))
    return namespace


@pytest.fixture(scope="session")
def journey(started: Namespace) -> Namespace:
    """The same, when the resource is Ready, and no other pytest needs the cores or has pods on the nodes."""
    if BESIDE:
        until("the tests beside these have ended", is_alone, timeout_s=BESIDE_S)
    started.kubectl(
        "wait", "--for=condition=Ready", "kvcache/demo", f"--timeout={START_S}s", timeout_s=START_S + 10
    )  # fmt: skip
    return started


def is_alone() -> bool:
    with Path(BESIDE).open("a", encoding="utf-8") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


@pytest.fixture(scope="session")
def oracle(journey: Namespace) -> Oracle:
    """What the control says to some prompts. It is not needed after that, and takes up memory no more."""
    url = until_control(journey, START_S)
    asked = [Question(body(prompt(seed))) for seed in range(NUM_KNOWN)]
    answers = send(journey, url, asked, concurrency=2)
    assert [answer.status for answer in answers] == [200] * NUM_KNOWN
    assert all(answer.cached_tokens == 0 for answer in answers)
    assert {len(answer.tokens) for answer in answers} == {MAX_TOKENS}
    # A control that answers the same to everything would prove nothing.
    assert len({answer.tokens for answer in answers}) == NUM_KNOWN
    journey.kubectl("scale", f"deployment/{CONTROL}", "--replicas=0")
    known = [
        Question(question.body, answer.tokens)
        for question, answer in zip(asked, answers, strict=True)
    ]
    return Oracle(known, NUM_FOR_ALL)


@pytest.fixture(scope="session")
def endpoint(journey: Namespace) -> str:
    """Where the KVCache demo of `journey` answers, as its status says it."""
    return str(journey.get("kvcache", "demo")["status"]["endpoint"])


@pytest.fixture(scope="session")
def definition(request: pytest.FixtureRequest) -> dict[str, object]:
    """The CustomResourceDefinition as the API server has it; installed by the chart unless it is there."""
    if not IS_SHARED:
        request.getfixturevalue("installation")
    try:
        return dict(json.loads(kubectl("get", "crd", "kvcaches.larder.dev", "-o", "json")))
    except CommandFailed as problem:
        pytest.fail(f"no CustomResourceDefinition: {problem}")
