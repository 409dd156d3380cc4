"""Asks cache agents for /statusz and /metrics through `kubectl port-forward`: no address of a pod is needed.

Each agent has a forward of its own for as long as it is asked; all at once, a few at a time. Never raises: an agent
that can't be asked is an answer with a problem.
"""

from __future__ import annotations

import json
import queue
import re
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from cacheoperator.names import AGENT_HTTP_PORT

from cacheservice.errors import LarderError
from cacheservice.kubectl.cluster import ClusterError, Kubectl, missing_program, translated
from cacheservice.kubectl.pods import pod_state
from cacheservice.local.http_client import EngineError, get_text

FORWARD_WITHIN_S = 15.0
ANSWER_WITHIN_S = 10.0
NUM_AT_ONCE = 8
_FORWARDING = re.compile(r"Forwarding from 127\.0\.0\.1:(\d+)")


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """What the agent in `pod` said: `page` is its /statusz, None with a `problem`."""

    pod: str
    node: str
    page: Mapping[str, Any] | None
    problem: str = ""


def ask_agents(
    kubectl: Kubectl, namespace: str, pods: Sequence[Mapping[str, Any]], query: Mapping[str, str]
) -> tuple[AgentAnswer, ...]:
    """The /statusz of every agent of `pods`, in their order."""

    def ask(pod: Mapping[str, Any]) -> AgentAnswer:
        name = str(pod["metadata"]["name"])
        node = str(pod.get("spec", {}).get("nodeName", ""))
        state = pod_state(pod)
        if (pod.get("status") or {}).get("phase") != "Running":
            return AgentAnswer(name, node, None, f"its pod is {state}")
        try:
            path = "/statusz" + (f"?{urlencode(query)}" if query else "")
            page = json.loads(fetch(kubectl, namespace, name, [path])[0])
            if not isinstance(page, dict):
                return AgentAnswer(name, node, None, "its /statusz is no JSON object")
            return AgentAnswer(name, node, page)
        except EngineError as error:
            return AgentAnswer(name, node, None, _unanswered(str(error), state))
        except LarderError as error:
            return AgentAnswer(name, node, None, str(error))
        except ValueError:
            return AgentAnswer(name, node, None, "its /statusz is no JSON")

    return tuple(_each(ask, pods))


def _unanswered(said: str, state: str) -> str:
    """An agent that starts answers 503 and says what it waits for; the rest is about our end of the forward."""
    answered = re.search(r": (\d{3}) (.*)$", said, re.DOTALL)
    if answered:
        return f"answers {answered[1]}: {' '.join(answered[2].split())[:200]}"
    return f"does not answer on port {AGENT_HTTP_PORT}; its pod is {state}"


def fetch(
    kubectl: Kubectl, namespace: str, pod: str, paths: Sequence[str], *, port: int = AGENT_HTTP_PORT
) -> list[str]:
    """The bodies of GETs to one port of a pod. Raises ClusterError or EngineError."""
    with _forwarded(kubectl, namespace, pod, port) as local_port:
        return [
            get_text("127.0.0.1", local_port, path, timeout_s=ANSWER_WITHIN_S) for path in paths
        ]


def _each(
    ask: Callable[[Mapping[str, Any]], AgentAnswer], pods: Sequence[Mapping[str, Any]]
) -> Iterator[AgentAnswer]:
    with ThreadPoolExecutor(NUM_AT_ONCE) as pool:
        yield from pool.map(ask, pods)


@contextmanager
def _forwarded(kubectl: Kubectl, namespace: str, pod: str, port: int) -> Iterator[int]:
    """A port of loopback that leads to `port` of the pod while the block lasts."""
    argv = kubectl.argv(
        "port-forward", f"pod/{pod}", f":{port}", "--address", "127.0.0.1", namespace=namespace
    )
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )  # fmt: skip
    except OSError as error:
        raise missing_program(argv[0], error) from error
    with process:
        lines: queue.Queue[str] = queue.Queue()
        assert process.stdout is not None
        assert process.stderr is not None
        reader = threading.Thread(target=_read, args=(process.stdout, lines), daemon=True)
        reader.start()
        try:
            try:
                line = lines.get(timeout=FORWARD_WITHIN_S)
            except queue.Empty as error:
                raise ClusterError(
                    f"kubectl port-forward to {pod} did not begin within {FORWARD_WITHIN_S:g} s"
                ) from error
            match = _FORWARDING.search(line)
            if match is None:
                process.kill()
                raise translated(process.stderr.read() or line, ("port-forward",))
            yield int(match[1])
        finally:
            process.kill()
            reader.join()


def _read(stream: Any, lines: queue.Queue[str]) -> None:
    """Every line, so that kubectl never waits for a full pipe; "" when it ends."""
    for line in stream:
        lines.put(line)
    lines.put("")
