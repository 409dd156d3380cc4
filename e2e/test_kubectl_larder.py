"""kubectl larder, as kubectl runs it, on a KVCache with real engines: right after the journey, whose engines it asks.

LARDER_E2E_NAMESPACE names a namespace whose KVCache `demo` is used instead; nothing is installed or deleted then.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

import pytest
import yaml
from live_cluster import REPOSITORY, Document, Namespace, kubectl, run, until
from traffic import Question, body, client_pod, prompt, send

pytestmark = pytest.mark.timeout(900)

NAME = "demo"
EXAMPLE = REPOSITORY / "examples" / "cpu-cluster.yaml"
START_S = 480
REMEMBERED_S = 30
"""Engines report outcomes with their pings, every 3 s; two cores may be busy."""


@pytest.fixture(scope="module")
def namespace(request: pytest.FixtureRequest) -> Namespace:
    """A namespace with a KVCache that is Ready."""
    given = os.environ.get("LARDER_E2E_NAMESPACE")
    if given:
        return Namespace(given)
    request.getfixturevalue("installation")
    found: Namespace = request.getfixturevalue("namespaces")["journey"]
    if found.find("kvcache", NAME) is None:
        found.kubectl("apply", "-f", str(EXAMPLE))
    found.kubectl(
        "wait", "--for=condition=Ready", f"kvcache/{NAME}", f"--timeout={START_S}s", timeout_s=START_S + 10
    )  # fmt: skip
    if found.find("pod", "client") is None:
        registry = os.environ.get("LARDER_E2E_REGISTRY", "localhost")
        found.apply(client_pod(f"{registry}/larder:dev"))
        found.kubectl(
            "wait", "--for=condition=Ready", "pod/client", "--timeout=120s", timeout_s=130
        )
    return found


def larder(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """`kubectl larder …`: kubectl finds the plugin on PATH."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["kubectl", "larder", *words], env={**os.environ, "PATH": path, **(env or {})}, capture_output=True, text=True,
        timeout=180, check=False,
    )  # fmt: skip


def status(namespace: Namespace) -> Document:
    """What `status -o json` says."""
    done = larder("status", NAME, "-n", namespace.name, "-o", "json")
    assert done.returncode in (0, 1), done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture(scope="module")
def answer_id(namespace: Namespace) -> str:
    """The id of an answer of the endpoint to a prompt of several chunks that is new to it."""
    endpoint = str(namespace.get("kvcache", NAME)["status"]["endpoint"])
    (answer,) = send(namespace, endpoint, [Question(body(prompt(9001)))])
    assert answer.status == 200, answer
    return str(answer.body["id"])


def test_one_screen_shows_endpoint_agents_and_engines(namespace):
    done = larder("status", NAME, "-n", namespace.name)
    resource = namespace.get("kvcache", NAME)
    ready = next(one for one in resource["status"]["conditions"] if one["type"] == "Ready")
    assert done.returncode == (0 if ready["status"] == "True" else 1), done.stdout + done.stderr
    assert resource["status"]["endpoint"] in done.stdout
    for component in ("cache", "prefill", "decode"):
        for pod in namespace.pods(NAME, component):
            assert pod["metadata"]["name"] in done.stdout
    assert "not read" not in done.stdout
    assert len(done.stdout.splitlines()) <= 60


def test_agents_and_engines_are_asked_themselves(namespace, answer_id):
    view = until(
        "engines report what they read",
        lambda: (
            (seen := status(namespace))
            and sum(one["hit_tokens"] for one in seen["engines"])
            and seen
        ),
        timeout_s=REMEMBERED_S,
    )
    assert all(not agent["problem"] for agent in view["agents"])
    assert sum(agent["chunks"] for agent in view["agents"]) > 0
    engines = {engine["role"]: engine for engine in view["engines"]}
    assert engines["prefill"]["fingerprint"] == engines["decode"]["fingerprint"] != ""
    assert engines["decode"]["transport"] in ("SharedMemory", "Stream")
    assert engines["decode"]["hit_tokens"] > 0


def test_misses_are_explained_by_reason(namespace, answer_id):
    done = larder("explain", NAME, "-n", namespace.name)
    assert done.returncode == 0, done.stderr
    assert "All engines have the fingerprint" in done.stdout
    assert "lookup" in done.stdout
    assert "absent" in done.stdout, "prefill had nothing for the first request"


def test_the_path_of_one_request_is_told(namespace, answer_id):
    text = until(
        "an agent remembers the request",
        lambda: (
            (done := larder("explain", NAME, answer_id, "-n", namespace.name)).returncode == 0
            and "from the cache" in done.stdout
            and done.stdout
        ),
        timeout_s=REMEMBERED_S,
    )
    assert "decode took" in text, text
    assert "load" in text
    unknown = larder("explain", NAME, "cmpl-nobodysent", "-n", namespace.name)
    assert "No agent remembers a request with cmpl-nobodysent" in unknown.stdout


def report_of(namespace: Namespace, name: str, path: Path) -> dict[str, str]:
    """Files of a report, by name."""
    done = larder("report", name, "-n", namespace.name, "-o", str(path))
    assert done.returncode == 0, done.stderr
    with zipfile.ZipFile(path) as archive:
        return {file: archive.read(file).decode() for file in archive.namelist()}


CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def secret_values(namespace: Namespace) -> Iterator[tuple[str, str]]:
    """What every Secret of the namespace holds, less certificates, which are public: plain, line by line, as base64."""
    for secret in namespace.list("secrets"):
        for key, encoded in (secret.get("data") or {}).items():
            name = f"{secret['metadata']['name']}/{key}"
            value = base64.b64decode(encoded).decode(errors="replace")
            rest = CERTIFICATE.sub("", value)
            yield from (
                (name, line.strip()) for line in rest.splitlines() if len(line.strip()) >= 8
            )
            if rest == value and len(value) >= 8:
                yield name, encoded


def test_a_report_has_the_story_and_no_secret(namespace, tmp_path):
    files = report_of(namespace, NAME, tmp_path / "r.zip")
    assert json.loads(files["kvcache.json"])["metadata"]["name"] == NAME
    for component in ("cache", "prefill", "decode"):
        for pod in namespace.pods(NAME, component):
            name = pod["metadata"]["name"]
            assert any(file.startswith(f"logs/{name}.") for file in files), name
    assert len([name for name in files if name.endswith(".statusz.json")]) == len(
        namespace.pods(NAME, "cache")
    )
    assert any(
        "cacheservice_" in content
        for name, content in files.items()
        if name.endswith(".metrics.txt")
    )
    assert json.loads(files["objects/deployments.json"])["items"]
    assert_no_secret(files, namespace)
    assert f"{NAME}-redis-password" in files["secrets.txt"]


def assert_no_secret(files: dict[str, str], namespace: Namespace) -> None:
    values = list(secret_values(namespace))
    assert {"authority.key", "tls.key"} <= {name.partition("/")[2] for name, _ in values}
    for file, content in files.items():
        for name, value in values:
            assert value not in content, f"{file} has the value of {name}"


@pytest.fixture
def canary(namespace: Namespace) -> Iterator[dict[str, str]]:
    """Values that nobody else has: of a Secret and of a variable, which the engine of a KVCache of this name gets."""
    values = {"in a secret": f"canary-{token_hex(16)}", "in a variable": f"canary-{token_hex(16)}"}
    namespace.apply(
        {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "canary"},
            "stringData": {"value": values["in a secret"]},
        }
    )
    env = [
        {"name": "STAND_IN", "value": "ready"},
        {"name": "LICENCE", "valueFrom": {"secretKeyRef": {"name": "canary", "key": "value"}}},
        {"name": "DOWNLOAD_TOKEN", "value": values["in a variable"]},
    ]
    image = f"{os.environ.get('LARDER_E2E_REGISTRY', 'localhost')}/stand-in:dev"
    namespace.apply(
        {
            "apiVersion": "larder.dev/v1alpha1",
            "kind": "KVCache",
            "metadata": {"name": "canary"},
            "spec": {
                "model": {"name": "stand-in", "path": "/nowhere"},
                "engine": {"device": "cpu", "image": image, "sharedMemory": "16Mi"},
                "cache": {"cpu": "64Mi", "nodeSelector": {"larder.dev/nowhere": "true"}},
                "redis": {"external": {"address": "redis.nowhere.svc:6379"}},
                "router": {"type": "None"},
                "decode": {
                    "replicas": 1,
                    "template": {"spec": {"containers": [{"name": "vllm", "env": env}]}},
                },
            },
        }
    )
    until(
        "the engine has its variables",
        lambda: namespace.get("deployment", "canary-decode")["status"].get("readyReplicas") == 1,
        timeout_s=120,
    )
    yield values
    namespace.delete("kvcache", "canary")
    namespace.delete("secret", "canary")


def test_a_report_has_events_and_the_operators_log_and_no_canary(namespace, canary, tmp_path):
    files = report_of(namespace, "canary", tmp_path / "r.zip")
    told = [
        event["reason"]
        for event in json.loads(files["events.json"])["items"]
        if event["involvedObject"]["name"] == "canary"
    ]
    assert told, "the operator tells at least that it has accepted the resource"
    assert all(reason in files["events.txt"] for reason in told)
    logs = [text for file, text in files.items() if re.fullmatch(r"operator/.*\.log", file)]
    assert any(f"namespace={namespace.name} " in text and "canary-decode" in text for text in logs)
    pods = json.loads(files["objects/pods.json"])["items"]
    names = {one["name"] for pod in pods for one in pod["spec"]["containers"][0]["env"]}
    assert {"LICENCE", "DOWNLOAD_TOKEN"} <= names, "the variables are there, their values are not"
    for file, content in files.items():
        for where, value in canary.items():
            assert value not in content, f"{file} has the canary {where}"
    assert_no_secret(files, namespace)


def test_an_upgrade_is_a_stamp_and_rolls_nothing_that_is_up_to_date(namespace):
    before = {pod["metadata"]["uid"] for pod in namespace.pods(NAME)}
    dry = larder("upgrade", NAME, "-n", namespace.name, "--dry-run")
    assert dry.returncode == 0, dry.stderr
    assert f"{NAME}-decode" in dry.stdout
    stamps = namespace.get("kvcache", NAME)["metadata"].get("annotations", {})
    done = larder("upgrade", NAME, "-n", namespace.name)
    assert done.returncode == 0, done.stderr
    stamp = namespace.get("kvcache", NAME)["metadata"]["annotations"]["larder.dev/upgrade"]
    assert stamp != stamps.get("larder.dev/upgrade")
    until(
        "the operator has seen the stamp",
        lambda: (
            stamp
            in json.dumps(
                namespace.get("deployment", f"{NAME}-decode")["metadata"].get("annotations", {})
            )
        ),
        timeout_s=60,
    )
    assert {pod["metadata"]["uid"] for pod in namespace.pods(NAME)} == before


def test_who_may_not_look_is_told_which_verb(namespace, tmp_path):
    token = kubectl("create", "token", "default", "-n", namespace.name).strip()
    config = yaml.safe_load(run("kubectl", "config", "view", "--minify", "--raw"))
    config["users"] = [{"name": config["users"][0]["name"], "user": {"token": token}}]
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    done = larder("status", NAME, "-n", namespace.name, "--kubeconfig", str(path))
    assert done.returncode == 1
    assert f"you may not get kvcaches.larder.dev in namespace {namespace.name}" in " ".join(
        done.stderr.split()
    )


def test_a_name_that_is_not_there_is_answered_with_the_nearest(namespace):
    done = larder("status", "dmo", "-n", namespace.name)
    assert done.returncode == 2
    assert f"did you mean {NAME}?" in " ".join(done.stderr.split())
