"""What goes wrong around real engines while requests come in: each fault happens, and heals, and clients are unharmed.

All tests share the pair of engines of test_journey.py, run after it, and in this order: each leaves behind what the
next one wants, and the last deletes the resource. An engine that must start again costs a minute of both cores, so a
test restarts as few as it can. A client sends completions through the endpoint all the time; where the role that is hit
has one replica, it may get errors as OpenAI shapes them until that one is back.
"""

from __future__ import annotations

import itertools
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import pytest
import yaml
from live_cluster import (
    REPOSITORY,
    CommandFailed,
    Document,
    Namespace,
    NotYet,
    in_node,
    is_ready,
    kubectl,
    reference,
    run,
    until,
)
from traffic import (
    CLIENT,
    CONTROL,
    Answer,
    Load,
    Oracle,
    Question,
    assert_honest,
    assert_unharmed,
    body,
    pod_is_ready,
    prompt,
    send,
    until_control,
)

pytestmark = pytest.mark.timeout(600)

NAME = "demo"
EXAMPLE = REPOSITORY / "examples" / "cpu-cluster.yaml"
START_S = 300
"""An engine on a CPU starts in 30-58 s; on busy cores it takes longer."""
WAIT_S = 150
"""What Kubernetes and the operator do in seconds, on busy cores."""
REFRESH_S = 200
"""A kubelet shows a changed Secret within 60-90 s, and an agent looks at its files now and then."""
RENEWAL_S = 260
"""Certificates are renewed after so long; then the other third is left for kubelets to show them."""
NEXT_TAG = "dev-next"
API_KEY = "sk-only-for-these-tests"
MEMORY_LIMIT = "5Gi"
"""Of a decode engine: twice what it needs."""

seeds = itertools.count(1_000)
"""Of prompts that nobody has sent yet."""


@pytest.fixture(scope="module")
def place(journey: Namespace, oracle: Oracle, installation: Namespace) -> Namespace:
    """The namespace of the journey: its resource, Ready, with two routers, so that a drain leaves one."""
    spec = journey.get("kvcache", NAME)["spec"]
    if (
        spec["router"].get("replicas") != 2
        or spec["prefill"]["args"] != example()["prefill"]["args"]
    ):
        # Else it is as an earlier run left it, see LARDER_E2E_KEEP.
        put(journey, resource())
    until_settled(journey, 2 * START_S)
    join(journey)
    # From the beginning, so that certificates are renewed in the course of these tests.
    engines = identities(journey, "prefill", "decode")
    upgrade(
        installation,
        f"operator.certificateLifetimeSeconds={RENEWAL_S * 3 // 2},operator.secretRefreshSeconds=65",
    )
    assert identities(journey, "prefill", "decode") == engines
    return journey


def join(namespace: Namespace) -> None:
    """Bring the cache to the control, by the connection's patch and what it says above it; it starts meanwhile."""
    patch = namespace.get("configmap", f"{NAME}-connection")["data"]["pod-patch.yaml"]
    namespace.kubectl("patch", "deployment", CONTROL, "--patch", patch)
    args = namespace.get("deployment", CONTROL)["spec"]["template"]["spec"]["containers"][0]["args"]
    more = [
        "--prefix-caching-hash-algo=sha256_cbor",
        "--kv-transfer-config=$(LARDER_KV_TRANSFER_CONFIG)",
    ]
    args = [arg for arg in args if arg != "--no-enable-prefix-caching" and arg not in more]
    change = [
        {"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": [*args, *more]},
        {"op": "replace", "path": "/spec/replicas", "value": 1},
    ]
    namespace.kubectl("patch", "deployment", CONTROL, "--type=json", "-p", json.dumps(change))


@pytest.fixture(scope="module")
def endpoint(place: Namespace) -> str:
    """As status says it."""
    return str(place.get("kvcache", NAME)["status"]["endpoint"])


def example() -> Document:
    """The spec that `make e2e` applies."""
    return dict(yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))["spec"])


def resource(**decode: Any) -> Document:
    """The example with two routers; `decode` replaces that role."""
    document: Document = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    document["spec"]["router"] = {"replicas": 2}
    if decode:
        document["spec"]["decode"] = decode
    return document


def put(namespace: Namespace, document: Document) -> None:
    """As the journey does it, so that what is left out now is taken away."""
    namespace.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(document))


@pytest.fixture(scope="module")
def first_certificates() -> dict[str, str]:
    """What agents showed after the upgrade; that test fills it in."""
    return {}


# What is seen of the resource, of pods, of the cache


class KubectlWatch:
    """One object of a namespace, watched while the `with` block runs: `see` gets each line, in a thread."""

    def __init__(self, namespace: Namespace, kind: str, name: str, jsonpath: str) -> None:
        self._command = (
            "kubectl", "--namespace", namespace.name, "get", kind, name, "--watch",
            "-o", f'jsonpath={jsonpath}{{"\\n"}}',
        )  # fmt: skip
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read)

    def see(self, line: str) -> None:
        """Take one line, without white space around it; it may be empty."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(self._command, stdout=subprocess.PIPE, text=True)
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        with self._process:
            self._reader.join()

    def _read(self) -> None:
        assert self._process is not None
        for line in self._process.stdout or ():
            self.see(line.strip())


class Story(KubectlWatch):
    """Every condition that a KVCache goes through while a test does something to it, however short."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(namespace, "kvcache", NAME, "{.status.conditions}")
        self.lines: list[tuple[str, str, str, str]] = []
        """(type, status, reason, message), one per change."""

    def see(self, line: str) -> None:
        """Note what has changed."""
        for one in json.loads(line) if line else ():
            told = (one["type"], one["status"], one["reason"], one["message"])
            last = next((seen for seen in reversed(self.lines) if seen[0] == told[0]), None)
            if told != last:
                self.lines.append(told)

    def until_told(
        self, kind: str, status: str, reason: str, *words: str, timeout_s: float = WAIT_S
    ) -> None:
        """Wait until a condition has had that status and reason ("": any), with all words in its message."""

        def look() -> bool:
            return any(
                line[:2] == (kind, status)
                and reason in ("", line[2])
                and all(word in line[3] for word in words)
                for line in list(self.lines)
            )

        try:
            until(f"{kind}={status}/{reason} {words}", look, timeout_s=timeout_s)
        except NotYet as late:
            raise NotYet("\n  ".join([str(late), *map(str, self.lines)])) from late

    def was(self, kind: str, status: str) -> list[tuple[str, str, str, str]]:
        """What a condition said while it had that status."""
        return [line for line in self.lines if line[:2] == (kind, status)]


def fresh(number: int) -> list[Question]:
    """Prompts that no engine has seen."""
    return [Question(body(prompt(next(seeds)))) for _ in range(number)]


@pytest.fixture(scope="module")
def load(
    place: Namespace, endpoint: str, oracle: Oracle
) -> Callable[[], AbstractContextManager[Load]]:
    """Requests that flow when the block begins, and that are looked at by the caller after it.

    Every other one is new to every engine; those between have an answer that the control gave.
    """

    @contextmanager
    def loaded() -> Iterator[Load]:
        known = itertools.cycle(oracle.for_all)
        mixed = [question for new in fresh(200) for question in (next(known), new)]
        with Load(place, endpoint, mixed, 2) as running:
            running.until_answered(3)
            yield running
            # What happened may be seen by the requests after it only.
            running.until_answered(6)

    return loaded


@pytest.fixture(scope="module")
def assert_hits(place: Namespace, endpoint: str, oracle: Oracle) -> Callable[[], None]:
    """A check that decode reads what prefill stored, and says what the control says, for prompts that nobody has seen.

    Within a time: a look-up on busy cores may take longer than an engine waits for it.
    """

    def check() -> None:
        seen: list[Answer] = []

        def look() -> bool:
            seen[:] = send(place, endpoint, oracle.take(4) or fresh(4))
            assert_unharmed(seen)
            return all(map(is_hit, seen))

        try:
            until("4 hits of 4", look, timeout_s=WAIT_S)
        except NotYet as late:
            raise NotYet(f"{late}: {[answer.body['usage'] for answer in seen]}") from late

    return check


def is_hit(answer: Answer) -> bool:
    """Whether the most of the prompt was not computed."""
    return answer.cached_tokens > int(answer.body["usage"]["prompt_tokens"]) // 2


def identities(namespace: Namespace, *components: str) -> dict[str, tuple[str, int]]:
    """Pods by name: UID and restarts, so that nothing can have been replaced or restarted when two are equal."""
    return {
        pod["metadata"]["name"]: (
            pod["metadata"]["uid"],
            sum(one["restartCount"] for one in pod["status"].get("containerStatuses", ())),
        )
        for component in components
        for pod in namespace.pods(NAME, component)
    }


def node_of(pod: Document) -> str:
    return str(pod["spec"]["nodeName"])


def pod_name(pod: Document) -> str:
    return str(pod["metadata"]["name"])


def until_observed(namespace: Namespace) -> None:
    """Wait until status is about the newest generation."""

    def look() -> bool:
        document = namespace.get("kvcache", NAME)
        seen = document.get("status", {}).get("observedGeneration")
        return bool(seen == document["metadata"]["generation"])

    until("the operator saw the newest generation", look, timeout_s=WAIT_S)


def until_settled(namespace: Namespace, timeout_s: float) -> None:
    """Wait until Ready, and every workload as written."""
    until_observed(namespace)
    namespace.until_condition(NAME, "Ready", "True", timeout_s=timeout_s)


# Agents


def test_agent_deleted_under_load(place, load, assert_hits):
    """Engines compute meanwhile; the next agent finds the sockets of the one before it in the way, and takes over."""
    (decode,) = place.pods(NAME, "decode")
    engines = identities(place, "prefill", "decode")
    agent = next(pod for pod in place.pods(NAME, "cache") if node_of(pod) == node_of(decode))
    with Story(place) as story, load() as running:
        place.kubectl("delete", "pod", pod_name(agent), "--wait=false")
        story.until_told(
            "CacheReady", "False", "Starting", f"daemonset/{NAME}-cache", "1/2 nodes ready"
        )
        place.until_condition(NAME, "CacheReady", "True", timeout_s=WAIT_S)
    assert_unharmed(running.answers)
    assert identities(place, "prefill", "decode") == engines
    assert pod_name(agent) not in identities(place, "cache")
    assert_hits()
    place.until_condition(NAME, "Ready", "True", timeout_s=WAIT_S)
    assert place.events(NAME, "CacheDegraded")


# Redis


def test_redis_deleted_under_load(place, load, assert_hits):
    others = identities(place, "prefill", "decode", "cache")
    (redis,) = place.pods(NAME, "redis")
    with Story(place) as story, load() as running:
        until("the loss is told", lambda: redis_loss_told(place, story), timeout_s=WAIT_S)
        place.until_condition(NAME, "RedisReady", "True", timeout_s=WAIT_S)
    assert_unharmed(running.answers)
    assert identities(place, "redis")[pod_name(redis)][0] != redis["metadata"]["uid"]
    assert identities(place, "prefill", "decode", "cache") == others
    assert_hits()
    until("each agent speaks to the new Redis", lambda: has_index(place), timeout_s=WAIT_S)
    assert place.events(NAME, "RedisLost")


def redis_loss_told(namespace: Namespace, story: Story) -> bool:
    """Delete its pod, and say whether status told of it: the next one answers in seconds, which may go unseen."""
    namespace.delete("pod", f"{NAME}-redis-0")
    try:
        story.until_told("RedisReady", "False", "Starting", f"{NAME}-redis", timeout_s=8)
    except NotYet:
        return False
    return True


def has_index(namespace: Namespace) -> bool:
    """Whether every agent is on good terms with Redis, as it says itself."""
    healths = [
        namespace.statusz(pod_name(pod))["index"]["health"] for pod in namespace.pods(NAME, "cache")
    ]
    return healths == ["ready", "ready"]


# An engine that somebody else deployed


def test_engine_of_others_reads_by_the_connection_patch(place, endpoint, oracle):
    """The control of before, with the patch that status points at: it joined while the tests above ran."""
    url = until_control(place, START_S)
    asked = oracle.take(4)
    assert len(asked) == 4
    # Prefill and decode of ours store them; the same prompts are new to this engine's own cache.
    assert_unharmed(send(place, endpoint, asked))
    answers = send(place, url, asked)
    assert_unharmed(answers)
    assert [is_hit(answer) for answer in answers] == [True] * 4, answers
    (pod,) = place.list("pods", f"app={CONTROL}")
    assert pod_name(pod) in [session["engine"] for _, session in sessions(place)]
    place.until_condition(NAME, "Ready", "True", timeout_s=WAIT_S)
    place.delete("deployment", CONTROL)


# Password, and nobody to rotate it


def test_password_rotated_and_operator_away_for_a_minute(place, installation, load, assert_hits):
    """The new password is the operator's work, all the rest is not: agents follow and engines serve without it."""
    others = identities(place, "prefill", "decode", "cache", "router")
    (redis,) = place.pods(NAME, "redis")
    secret = f"{NAME}-redis-password"
    before = place.get("secret", secret)["data"]
    with Story(place) as story, load() as running:
        place.kubectl("delete", "secret", secret)
        # A look at the resource; else the next full pass would find it.
        place.kubectl("label", "kvcache", NAME, "larder.dev/e2e-seen=again", "--overwrite")
        after = until("a new password", lambda: place.find("secret", secret), timeout_s=WAIT_S)
        assert after["data"] != before
        until(
            "Redis with the new password",
            lambda: (
                is_ready(place.get("statefulset", f"{NAME}-redis"))
                and place.get("pod", pod_name(redis))["metadata"]["uid"] != redis["metadata"]["uid"]
                and pod_is_ready(place.get("pod", pod_name(redis)))
            ),
            timeout_s=WAIT_S,
        )
        # Told while it is replaced, and as AuthFailed until the kubelets have shown the agents the new one.
        story.until_told("RedisReady", "False", "RollingOut", f"statefulset/{NAME}-redis")
        with away(installation):
            left = time.monotonic()
            until(
                "agents with the new password",
                lambda: has_index(place),
                timeout_s=REFRESH_S,
            )
            until("a minute without operator", lambda: time.monotonic() > left + 60, timeout_s=70)
        place.until_condition(NAME, "Ready", "True", timeout_s=WAIT_S)
    assert_unharmed(running.answers)
    assert identities(place, "prefill", "decode", "cache", "router") == others
    assert_hits()


@contextmanager
def away(system: Namespace) -> Iterator[None]:
    """No operator."""
    system.kubectl("scale", "deployment/larder-operator", "--replicas=0")
    try:
        until("no operator", lambda: not operators(system), timeout_s=WAIT_S)
        yield
    finally:
        system.kubectl("scale", "deployment/larder-operator", "--replicas=1")
    until(
        "the operator",
        lambda: is_ready(system.get("deployment", "larder-operator")),
        timeout_s=WAIT_S,
    )


def operators(system: Namespace) -> list[Document]:
    return system.list("pods", "app.kubernetes.io/name=larder-operator")


# Upgrade


@pytest.mark.bundled
def test_operator_and_agents_upgraded_under_load(
    place, installation, first_certificates, load, assert_hits
):
    """helm upgrade to images of another version: agents one node at a time, engines keep the connector they have."""
    for name in ("larder", "larder-payload"):
        for node in nodes():
            in_node(
                node, "ctr", "--namespace", "k8s.io", "images", "tag", "--force",
                reference(name), next_reference(name),
            )  # fmt: skip
    (operator,) = operators(installation)
    others = identities(place, "prefill", "decode", "router", "redis")
    agents = identities(place, "cache")
    with Story(place) as story, load() as running, Unready(place) as unready:
        upgrade(installation, f"images.larder.tag={NEXT_TAG},images.payload.tag={NEXT_TAG}")
        (after,) = operators(installation)
        assert after["metadata"]["uid"] != operator["metadata"]["uid"]
        assert after["spec"]["containers"][0]["image"] == next_reference("larder")
        until(
            "agents of the next version",
            lambda: {
                pod["spec"]["containers"][0]["image"]
                for pod in place.pods(NAME, "cache")
                if pod_is_ready(pod)
            } == {next_reference("larder")} and is_ready(place.get("daemonset", f"{NAME}-cache")),
            timeout_s=180,
        )  # fmt: skip
        story.until_told("CacheReady", "False", "RollingOut")
        place.until_condition(NAME, "Ready", "True", timeout_s=WAIT_S)
    assert_unharmed(running.answers)
    assert unready.most == 1
    assert not set(agents) & set(identities(place, "cache"))
    assert identities(place, "prefill", "decode", "router", "redis") == others
    for component in ("prefill", "decode"):
        (pod,) = place.pods(NAME, component)
        (payload,) = [
            one for one in pod["spec"]["initContainers"] if one["name"] == "larder-payload"
        ]
        assert payload["image"] == reference("larder-payload")
    assert_hits()
    first_certificates.update(certificates(place))


def upgrade(system: Namespace, values: str) -> None:
    """Other values of the chart."""
    run(
        "helm", "upgrade", "larder", str(REPOSITORY / "charts" / "larder"), "--namespace", system.name,
        "--reuse-values", "--wait", "--timeout", "150s", "--set", values, timeout_s=160,
    )  # fmt: skip


def next_reference(name: str) -> str:
    return f"{reference(name).rpartition(':')[0]}:{NEXT_TAG}"


def nodes() -> list[str]:
    """Names, sorted."""
    return sorted(
        node["metadata"]["name"]
        for node in json.loads(kubectl("get", "nodes", "-o", "json"))["items"]
    )


class Unready(KubectlWatch):
    """How many agents were not ready at a time: `most`."""

    def __init__(self, namespace: Namespace) -> None:
        super().__init__(namespace, "daemonset", f"{NAME}-cache", "{.status.numberUnavailable}")
        self.most = 0

    def see(self, line: str) -> None:
        """Keep the largest number; none is none."""
        self.most = max(self.most, int(line or 0))


# Engines on two nodes


def test_decode_rolled_to_the_other_node_under_load(place, load, assert_hits):
    """A new engine takes over from the old one without an error; from then on each hit crosses nodes, under TLS.

    It loads the other copy of the model, whose files differ in their times only, and says what the control says.
    """
    (prefill,) = place.pods(NAME, "prefill")
    (old,) = place.pods(NAME, "decode")
    kept = identities(place, "prefill")
    with Story(place) as story, load() as running:
        kubectl("cordon", node_of(prefill))
        try:
            put(place, rolled())
            until(
                "the new engine has a node",
                lambda: any(
                    pod_name(pod) != pod_name(old) and "nodeName" in pod["spec"]
                    for pod in place.pods(NAME, "decode")
                ),
                timeout_s=WAIT_S,
            )
        finally:
            kubectl("uncordon", node_of(prefill))
        story.until_told("EnginesReady", "False", "RollingOut", f"deployment/{NAME}-decode")
        with running.spared():
            until(
                "the new engine is ready",
                lambda: any(
                    pod_name(pod) != pod_name(old) and pod_is_ready(pod)
                    for pod in place.pods(NAME, "decode")
                ),
                timeout_s=START_S,
            )
        until(
            "the old engine has gone",
            lambda: pod_name(old) not in [pod_name(pod) for pod in place.list("pods")],
            timeout_s=START_S,
        )
        until_settled(place, WAIT_S)
    assert_unharmed(running.answers)
    (decode,) = place.pods(NAME, "decode")
    assert node_of(decode) != node_of(prefill)
    assert place.get("deployment", f"{NAME}-decode")["spec"]["replicas"] == 1
    assert identities(place, "prefill") == kept
    show = ("ls", "-l", "--time-style=full-iso", example()["model"]["path"])
    listings = [
        place.kubectl("exec", pod_name(pod), "-c", "vllm", "--", *show) for pod in (prefill, decode)
    ]
    assert listings[0] != listings[1]
    assert_hits()
    assert_hits()
    pulled = {
        session["role"]: node
        for node, session in sessions(place)
        if session["role"] in ("prefill", "decode")
    }
    assert pulled == {"prefill": node_of(prefill), "decode": node_of(decode)}
    place.until_condition(NAME, "TransferVerified", "True", "Verified", timeout_s=WAIT_S)


def rolled() -> Document:
    """Nobody sets the number of decode engines, and two of them never share a node."""
    return resource(
        args=example()["decode"]["args"],
        rollout={"maxSurge": 1, "maxUnavailable": 0},
        template=other_copy(),
    )


def other_copy() -> Document:
    """A template: the copy of the model in the model's place, a limit, and never two of them on one node."""
    path = example()["model"]["path"]
    return {
        "spec": {
            "containers": [
                {
                    "name": "vllm",
                    "volumeMounts": [{"name": "copy", "mountPath": path, "readOnly": True}],
                    "resources": {"limits": {"memory": MEMORY_LIMIT}},
                }
            ],
            "volumes": [
                {"name": "copy", "hostPath": {"path": f"{path}-copy", "type": "Directory"}}
            ],
            "topologySpreadConstraints": [
                {
                    "maxSkew": 1,
                    "topologyKey": "kubernetes.io/hostname",
                    "whenUnsatisfiable": "DoNotSchedule",
                    "labelSelector": {
                        "matchLabels": {
                            "app.kubernetes.io/instance": NAME,
                            "app.kubernetes.io/component": "decode",
                        }
                    },
                    "matchLabelKeys": ["pod-template-hash"],
                }
            ],
        }
    }


def sessions(namespace: Namespace) -> list[tuple[str, Document]]:
    """Of all agents, with the node that they are on."""
    return [
        (node_of(pod), session)
        for pod in namespace.pods(NAME, "cache")
        for session in namespace.statusz(pod_name(pod))["sessions"]
    ]


@pytest.fixture
def rolled_out(place: Namespace) -> None:
    """As the test above leaves it. Waits for nothing if it is so."""
    decode = place.get("kvcache", NAME)["spec"]["decode"]
    if "template" not in decode or decode["args"] != example()["decode"]["args"]:
        put(place, rolled())
        until_settled(place, START_S)


@pytest.fixture
def scaled(rolled_out: None, place: Namespace) -> None:
    """As the test below leaves it: one decode engine on each node. Waits for nothing if they are asked for."""
    if place.get("deployment", f"{NAME}-decode")["spec"]["replicas"] != 2:
        place.kubectl("scale", f"deployment/{NAME}-decode", "--replicas=2")
        until_scaled(place)


def until_scaled(namespace: Namespace) -> None:
    """Wait until both decode engines serve."""
    namespace.until_condition(
        NAME, "EnginesReady", "True", "Ready", containing=["decode 2/2"], timeout_s=START_S
    )


def test_autoscaler_adds_a_decode_engine_while_we_reconcile(place, load, rolled_out):
    """As an HPA does it, by the scale subresource; the resource says Ready all the time, since one engine serves."""
    kept = identities(place, "prefill", "decode")
    with Story(place) as story, load() as running:
        place.kubectl("scale", f"deployment/{NAME}-decode", "--replicas=2")
        place.patch("kvcache", NAME, {"spec": {"service": {"annotations": {"seen": "again"}}}})
        until_observed(place)
        story.until_told("EnginesReady", "True", "Scaling")
        with running.spared():
            until_scaled(place)
    assert story.was("EnginesReady", "False") == []
    assert_unharmed(running.answers)
    assert place.get("deployment", f"{NAME}-decode")["spec"]["replicas"] == 2
    assert len({node_of(pod) for pod in place.pods(NAME, "decode")}) == 2
    now = identities(place, "prefill", "decode")
    assert {name: now.get(name) for name in kept} == kept


FILL_SCRIPT = """
import os, pathlib, time
for found in pathlib.Path("/proc").glob("[0-9]*"):
    if (found / "cmdline").read_bytes().startswith(b"VLLM::Worker"):
        (found / "oom_score_adj").write_text("1000")
for _ in range(12):
    if not os.fork():
        held = b"x" * (512 << 20)
        time.sleep(60)
        os._exit(0)
os.wait()
"""
"""Points the kernel to the engine's worker; of many, since it would kill whatever is larger than that all the same."""


def test_decode_engine_killed_for_memory_under_load(place, load, scaled):
    """The kernel kills the engine's worker; the other decode engine answers. The next test goes on from there."""
    (prefill,) = place.pods(NAME, "prefill")
    victim = next(pod for pod in place.pods(NAME, "decode") if node_of(pod) != node_of(prefill))
    with Story(place) as story, load() as running:
        fill(place, pod_name(victim))
        story.until_told(
            "EnginesReady",
            "False",
            "OOMKilled",
            pod_name(victim),
            f"limit {MEMORY_LIMIT}",
            timeout_s=WAIT_S,
        )
    assert_unharmed(running.answers)
    after = place.get("pod", pod_name(victim))
    assert after["metadata"]["uid"] == victim["metadata"]["uid"]
    (status,) = after["status"]["containerStatuses"]
    assert status["lastState"]["terminated"]["reason"] == "OOMKilled"
    assert place.events(NAME, "OOMKilled")


def fill(namespace: Namespace, pod: str) -> None:
    """Take memory inside the engine's container until the kernel steps in; ends with the container."""
    script = ["python3", "-c", FILL_SCRIPT]
    try:
        namespace.kubectl("exec", pod, "-c", "vllm", "--", *script)
    except CommandFailed:
        return


def test_drain_of_each_node_under_load(place, load, assert_hits, scaled):
    """First the node with decode alone: nobody notices. Then that of prefill, which is the only one of its role.

    The first may have an engine that the kernel killed a moment ago: it is evicted all the same.
    """
    (prefill,) = place.pods(NAME, "prefill")
    first = next(
        node_of(pod) for pod in place.pods(NAME, "decode") if node_of(pod) != node_of(prefill)
    )
    with load() as running, drained(first):
        assert {node_of(pod) for pod in place.pods(NAME) if is_evictable(pod)} == {node_of(prefill)}
    assert_unharmed(running.answers)
    until_settled(place, START_S)

    with Story(place) as story, load() as running:
        with drained(node_of(prefill)):
            story.until_told("EnginesReady", "False", "", "prefill 0/1")
        with running.spared():
            until_settled(place, START_S)
    assert_honest(running.answers)
    assert [answer for answer in running.answers if answer.status == 503]
    assert running.answers[-1].status == 200
    assert_hits()


def is_evictable(pod: Document) -> bool:
    owners = pod["metadata"].get("ownerReferences", ())
    return "nodeName" in pod["spec"] and all(owner["kind"] != "DaemonSet" for owner in owners)


@contextmanager
def drained(node: str) -> Iterator[None]:
    """A node without our pods, and closed to new ones. Budgets are respected: kubectl waits for them."""
    try:
        kubectl(
            "drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=200s",
            f"--pod-selector=app.kubernetes.io/instance={NAME}", timeout_s=220,
        )  # fmt: skip
        yield
    finally:
        kubectl("uncordon", node)


CERTIFICATE_SCRIPT = """
import hashlib, socket, ssl, sys
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
context.set_alpn_protocols(["h2"])
with socket.create_connection((sys.argv[1], 7500), timeout=10) as plain:
    with context.wrap_socket(plain) as secured:
        print(hashlib.sha256(secured.getpeercert(binary_form=True)).hexdigest())
"""


@pytest.mark.bundled
def test_certificate_rotated_under_load(place, first_certificates, load, assert_hits):
    """Certificates live for minutes here. Agents that have not restarted since the upgrade show new ones, unnoticed."""
    if not first_certificates:
        # The upgrade was not run: begin now.
        first_certificates.update(certificates(place))
    assert set(certificates(place)) == set(first_certificates)
    others = identities(place, "prefill", "decode", "cache")
    with load() as running:
        until(
            "agents that show new certificates",
            lambda: not set(certificates(place).values()) & set(first_certificates.values()),
            timeout_s=RENEWAL_S + REFRESH_S,
        )
        assert_hits()
    assert_unharmed(running.answers)
    assert identities(place, "prefill", "decode", "cache") == others
    for pod in place.pods(NAME, "cache"):
        assert place.statusz(pod_name(pod))["refused_hellos"] == []


def certificates(namespace: Namespace) -> dict[str, str]:
    """What each agent, by UID and restarts, shows to a client that says hello: a digest."""
    shown = {}
    for pod in namespace.pods(NAME, "cache"):
        (status,) = pod["status"]["containerStatuses"]
        who = f"{pod['metadata']['uid']}/{status['restartCount']}"
        shown[who] = namespace.kubectl(
            "exec", CLIENT, "--", "python3", "-c", CERTIFICATE_SCRIPT, pod["status"]["podIP"]
        ).strip()
    return shown


# Another layout, and an API key: test_faults_sessions.py and test_faults_status.py show both with stand-ins


@pytest.mark.slow
def test_decode_of_another_layout_is_told_field_by_field(place, endpoint):
    """Nothing can be handed over then: decode computes for itself, and status says which field keeps it from it."""
    put(place, resource(replicas=1, args=["--dtype=bfloat16"]))
    condition = place.until_condition(
        NAME, "TransferVerified", "False", "LayoutMismatch", timeout_s=START_S
    )
    assert "dtype: prefill torch.float32, decode torch.bfloat16" in condition["message"]
    place.until_condition(NAME, "EnginesReady", "True", timeout_s=WAIT_S)
    answers = send(place, endpoint, fresh(2))
    assert_unharmed(answers)
    assert [answer.cached_tokens for answer in answers] == [0, 0]
    assert place.events(NAME, "LayoutMismatch")


class ProbePods(KubectlWatch):
    """Images of the short-lived pods that ask with an API key."""

    def __init__(self, namespace: Namespace) -> None:
        selector = "--selector=app.kubernetes.io/component=probe"
        super().__init__(namespace, "pods", selector, "{.spec.containers[0].image}")
        self.images: list[str] = []

    def see(self, line: str) -> None:
        """Keep it."""
        self.images.append(line)


@pytest.mark.slow
def test_engines_with_an_api_key_are_proven_by_a_pod_that_mounts_it(place, endpoint, installation):
    """Prefill follows to the other layout: a pair that nobody knows. The operator may not read the key's Secret."""
    place.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "engines"},
            "stringData": {"api-key": API_KEY},
        }
    )
    document = resource(replicas=1, args=["--dtype=bfloat16"])
    document["spec"]["prefill"]["args"] = ["--dtype=bfloat16"]
    document["spec"]["engine"]["apiKeySecretRef"] = {"name": "engines"}
    with ProbePods(place) as probes:
        put(place, document)
        until_observed(place)
        until("a probe's pod", lambda: probes.images, timeout_s=START_S)
        place.until_condition(NAME, "TransferVerified", "True", "Verified", timeout_s=WAIT_S)
    until_settled(place, START_S)
    until(
        "no probe's pod is left",
        lambda: not place.list("pods", "app.kubernetes.io/component=probe"),
        timeout_s=WAIT_S,
    )
    assert [answer.status for answer in send(place, endpoint, fresh(1))] == [401]
    answers = send(place, endpoint, fresh(4), key=API_KEY)
    assert [answer.status for answer in answers] == [200] * 4, answers
    assert any(map(is_hit, answers)), answers
    told = [
        yaml.safe_dump(place.get("kvcache", NAME)),
        yaml.safe_dump(place.list("events")),
        installation.kubectl("logs", "deployment/larder-operator", "--tail=-1"),
    ]
    assert [text for text in told if API_KEY in text] == []


# The end


def test_deleted_resource_is_gone_within_a_minute(place):
    begun = time.monotonic()
    place.delete("kvcache", NAME)
    kinds = (
        "pods,services,configmaps,secrets,serviceaccounts,deployments,daemonsets,statefulsets,replicasets,"
        "networkpolicies,poddisruptionbudgets,roles,rolebindings,endpointslices"
    )
    until(
        "nothing of it is left",
        lambda: (
            not place.list(kinds, f"app.kubernetes.io/instance={NAME}")
            and not place.find("kvcache", NAME)
        ),
        timeout_s=60,
    )
    assert time.monotonic() - begun < 75
