"""Requests from inside the cluster's network: a client pod, what it sends, and what an engine without cache answers."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from live_cluster import Document, Namespace, is_ready, until

CLIENT = "client"
CONTROL = "control"
"""A plain engine: no connector, no prefix cache."""
SCRIPT = (Path(__file__).parent / "client.py").read_text(encoding="utf-8")
MODEL = "larder-demo"
MAX_TOKENS = 12
RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
PAUSE_S, LONG_PAUSE_S = 1.5, 4.0
"""Between two requests of one of the clients of a load. One costs a second of two cores that have more to do."""
WORDS = ("flour salt sugar rice lentils honey vinegar oil thyme barley oats yeast "
         "pepper cumin beans figs dates almonds raisins cocoa").split()  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back for one request; status 0 is a connection that gave nothing."""

    index: int
    status: int
    seconds: float
    body: Any
    expected: tuple[int, ...] | None = None
    """What an engine without cache said to it, where that one was asked."""

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the model said: token ids, which say more than a text, where what cannot be decoded is one sign."""
        return tuple(self.body["choices"][0]["token_ids"])

    @property
    def is_wrong(self) -> bool:
        """Whether it says something else than an engine without cache."""
        return self.expected is not None and self.tokens != self.expected

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that the answering engine did not compute."""
        details = self.body["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    @property
    def is_openai_error(self) -> bool:
        """Whether the body is an error as OpenAI shapes it."""
        return (
            isinstance(self.body, dict)
            and isinstance(self.body.get("error"), dict)
            and isinstance(self.body["error"].get("message"), str)
        )


@dataclass(frozen=True, slots=True)
class Question:
    """A body of /v1/completions, and what an engine without cache says to it, if that one was asked."""

    body: Document
    expected: tuple[int, ...] | None = None


class Harmed(AssertionError):
    """A request was not answered, or not as without a cache. What is tried once more otherwise is not after this."""


def assert_unharmed(answers: Sequence[Answer]) -> None:
    """Each request got its completion, and the very tokens of an engine without cache where we know them."""
    if failed := [answer for answer in answers if answer.status != 200]:
        raise Harmed(f"{len(failed)} of {len(answers)} requests failed: {failed[:5]}")
    _assert_right(answers)


def assert_honest(answers: Sequence[Answer]) -> None:
    """As above, or told in OpenAI's shape that nobody is there now."""
    for answer in answers:
        if answer.status != 200 and not (answer.status == 503 and answer.is_openai_error):
            raise Harmed(f"neither an answer nor 503 in OpenAI's shape: {answer}")
    _assert_right([answer for answer in answers if answer.status == 200])


def _assert_right(answers: Sequence[Answer]) -> None:
    if wrong := [(one.index, one.tokens, one.expected) for one in answers if one.is_wrong]:
        raise Harmed(f"{len(wrong)} of {len(answers)} answers are wrong: {wrong[:5]}")


class Oracle:
    """Questions whose answer is known from the control: some for every one, others that are given away once."""

    def __init__(self, questions: Sequence[Question], num_for_all: int) -> None:
        self.for_all = tuple(questions[:num_for_all])
        self._left = list(questions[num_for_all:])

    def take(self, number: int) -> list[Question]:
        """Questions that no engine with a cache has seen. Fewer, when there are no more."""
        taken, self._left = self._left[:number], self._left[number:]
        return taken


def prompt(seed: int, num_words: int = 300) -> str:
    """A text that no other seed begins with."""
    chosen = random.Random(seed)
    return f"List {seed}: " + " ".join(chosen.choice(WORDS) for _ in range(num_words))


def body(text: str, max_tokens: int = MAX_TOKENS) -> Document:
    """A greedy completion, so that two engines can be compared."""
    return {
        "model": MODEL, "prompt": text, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "return_token_ids": True,
    }  # fmt: skip


def client_pod(image: str) -> Document:
    """A pod that waits for orders; it has no label of ours and mounts nothing of ours."""
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": CLIENT, "labels": {"app": "client"}},
        "spec": {
            "terminationGracePeriodSeconds": 0,
            "securityContext": {
                "runAsNonRoot": True, "runAsUser": 4242, "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "client",
                    "image": image,
                    "command": ["sleep", "infinity"],
                    "securityContext": RESTRICTED,
                    "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}],
                }
            ],
            "volumes": [{"name": "tmp", "emptyDir": {}}],
        },
    }  # fmt: skip


def control_deployment(
    image: str, model_path: str, python_path: str, args: Sequence[str]
) -> Document:
    """The control, as somebody deploys an engine who knows nothing of us."""
    labels = {"app": CONTROL}
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": CONTROL, "labels": labels},
        "spec": {
            "replicas": 1,
            # Two engines at once would want too much of two cores.
            "strategy": {"type": "Recreate"},
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "terminationGracePeriodSeconds": 0,
                    "enableServiceLinks": False,
                    "containers": [
                        {
                            "name": "vllm",
                            "image": image,
                            "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
                            "args": [
                                "--model", model_path, "--served-model-name", MODEL, "--port", "8000",
                                "--enforce-eager", "--kv-cache-memory-bytes", str(1 << 29),
                                "--no-enable-prefix-caching", "--enable-prompt-tokens-details", *args,
                            ],
                            "env": [
                                {"name": "PYTHONPATH", "value": python_path},
                                {"name": "HOME", "value": "/tmp"},
                                {"name": "VLLM_NO_USAGE_STATS", "value": "1"},
                                {"name": "VLLM_CPU_OMP_THREADS_BIND", "value": "nobind"},
                                {"name": "OMP_NUM_THREADS", "value": "1"},
                            ],
                            "readinessProbe": {
                                "httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 2,
                            },
                            "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
                        }
                    ],
                    # vLLM's processes want 160 MiB of shared memory; a container has 64 by itself.
                    "volumes": [
                        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}
                    ],
                },
            },
        },
    }  # fmt: skip


def until_control(namespace: Namespace, timeout_s: float) -> str:
    """Wait until the newest control answers, and say where: a base URL."""

    def look() -> str | None:
        if not is_ready(namespace.get("deployment", CONTROL)):
            return None
        (pod,) = namespace.list("pods", f"app={CONTROL}")
        return f"http://{pod['status']['podIP']}:8000"

    return until("the control answers", look, timeout_s=timeout_s)


def pod_is_ready(pod: Document) -> bool:
    """The pod's own condition."""
    return any(
        one["type"] == "Ready" and one["status"] == "True"
        for one in pod.get("status", {}).get("conditions", ())
    )


def until_pod_ready(namespace: Namespace, name: str, timeout_s: float) -> Document:
    """Wait for a pod by name."""

    def look() -> Document | None:
        pod = namespace.get("pod", name)
        return pod if pod_is_ready(pod) else None

    return until(f"pod {name} is ready", look, timeout_s=timeout_s)


def send(
    namespace: Namespace,
    url: str,
    questions: Sequence[Question],
    *,
    concurrency: int = 1,
    key: str = "",
) -> list[Answer]:
    """Send from the client pod; `key` is an API key. Answers are in the order of the questions."""
    output = namespace.kubectl(
        "exec", "-i", CLIENT, "--", "python3", "-c", SCRIPT,
        stdin=_order(url, questions, concurrency, key=key), timeout_s=300,
    )  # fmt: skip
    answers = [_answer(line, questions) for line in output.splitlines()]
    return sorted(answers, key=lambda answer: answer.index)


class Load:
    """Requests without end while a test does something to the cluster: a context manager; `answers` grow meanwhile."""

    def __init__(
        self, namespace: Namespace, url: str, questions: Sequence[Question], concurrency: int
    ) -> None:
        self._namespace = namespace
        self._questions = questions
        self._order = _order(url, questions, concurrency, repeat=True)
        self._process: subprocess.Popen[str] | None = None
        self._reader = threading.Thread(target=self._read)
        self.answers: list[Answer] = []

    def __enter__(self) -> Self:
        self.pause(PAUSE_S)
        self._namespace.kubectl("exec", CLIENT, "--", "rm", "-f", "/tmp/stop")
        self._process = subprocess.Popen(
            ["kubectl", "--namespace", self._namespace.name, "exec", "-i", CLIENT, "--", "python3", "-c", SCRIPT],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdin is not None
        self._process.stdin.write(self._order)
        self._process.stdin.close()
        # Read as they come: a full pipe would hold the client back.
        self._reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._namespace.kubectl("exec", CLIENT, "--", "touch", "/tmp/stop")
        with self._process:
            self._reader.join(timeout=180)
            if self._reader.is_alive():
                self._process.kill()

    def pause(self, seconds: float) -> None:
        """Between an answer and the next request of the same client, from now on."""
        script = f"echo {seconds} > /tmp/next-pause && mv /tmp/next-pause /tmp/pause"
        self._namespace.kubectl("exec", CLIENT, "--", "sh", "-c", script)

    @contextlib.contextmanager
    def spared(self) -> Iterator[None]:
        """Fewer requests meanwhile: the cores that answer them have an engine to start, too."""
        self.pause(LONG_PAUSE_S)
        yield
        self.pause(PAUSE_S)

    def until_answered(self, number: int, timeout_s: float = 90) -> None:
        """Wait until that many more requests have been answered well."""
        begun = len(self.answers)

        def look() -> bool:
            return sum(answer.status == 200 for answer in self.answers[begun:]) >= number

        until(f"{number} more answers", look, timeout_s=timeout_s)

    def _read(self) -> None:
        assert self._process is not None
        for line in self._process.stdout or ():
            self.answers.append(_answer(line, self._questions))


def _order(
    url: str,
    questions: Sequence[Question],
    concurrency: int,
    *,
    repeat: bool = False,
    key: str = "",
) -> str:
    return json.dumps(
        {
            "url": url,
            "headers": {"Authorization": f"Bearer {key}"} if key else {},
            "requests": [question.body for question in questions],
            "concurrency": concurrency,
            "repeat_until_closed": repeat,
        }
    )


def _answer(line: str, questions: Sequence[Question]) -> Answer:
    said = json.loads(line)
    return Answer(**said, expected=questions[said["index"]].expected)
