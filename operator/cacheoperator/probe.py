"""The proof of transfer (spec.verify: Probe): for a new pair of fingerprints one request, to prefill, then to decode.

The request is two chunks and a token long and has a cache salt of its own, so that it meets no one's chunks and leaves
none that anyone could meet. It only makes something move; the evidence is what agents then count (conditions/transfer).
No pair is asked twice that status.transfers knows, one probe runs at a time per KVCache, and a pair without evidence is
asked ever more rarely. A pair that got its evidence, or that is not in use any more, begins anew when it comes back.

An engine with an API key is asked from a short-lived pod that mounts the key, since the operator reads no user's
Secret: this module, run there as `python3 -m cacheoperator.probe`, is that pod's program. So it imports nothing heavy
at the top.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cacheoperator.cluster import Cluster
    from cacheoperator.observed import Observed, Pod, ProbeResult
    from cacheoperator.settings import Settings
    from cacheservice.manifest import KVCacheManifest

log = logging.getLogger(__name__)

first_backoff_s, longest_backoff_s = 15.0, 900.0
request_limit_s = 60.0
pod_limit_s = 180.0
pod_look_s = 1.0
KEY_ENV = "LARDER_ENGINE_KEY"
largest_answer_bytes = 1 << 20
TERMINATION_LOG = "/dev/termination-log"


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: addresses are host:port, `model` the served name; `num_tokens` makes two chunks and one token."""

    prefill: str
    decode: str
    model: str
    num_tokens: int
    salt: str


def ask(question: Question, key: str = "") -> str:
    """Send the request to prefill, then to decode with prefill's hand-over. Returns what went wrong, "" for nothing.

    Blocks for up to twice `request_limit_s`.
    """
    body: dict[str, Any] = {
        "model": question.model,
        # Small ids are in every vocabulary; they vary, so that chunks of one prompt differ.
        "prompt": [1 + (7 * n + n // 50) % 90 for n in range(question.num_tokens)],
        "max_tokens": 1,
        "temperature": 0.0,
        "cache_salt": question.salt,
    }
    answer, problem = _post(question.prefill, body, key)
    if problem:
        return f"prefill at {question.prefill} {problem}"
    params = answer.get("kv_transfer_params")
    if params:
        body["kv_transfer_params"] = params
    _, problem = _post(question.decode, body, key)
    return f"decode at {question.decode} {problem}" if problem else ""


def _post(address: str, body: Mapping[str, Any], key: str) -> tuple[dict[str, Any], str]:
    """The JSON answer of /v1/completions, or what went wrong."""
    headers = {"Content-Type": "application/json", "Connection": "close"}
    if key:
        headers["Authorization"] = f"Bearer {key}"
    connection = http.client.HTTPConnection(address, timeout=request_limit_s)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
        content = response.read(largest_answer_bytes)
    except (OSError, http.client.HTTPException) as error:
        return {}, f"does not answer the probe ({type(error).__name__})"
    finally:
        connection.close()
    if response.status in (401, 403):
        return (
            {},
            f"refuses the API key (HTTP {response.status}): look at spec.engine.apiKeySecretRef",
        )
    if response.status != 200:
        return {}, f"answers the probe with HTTP {response.status}: {_short(content)}"
    try:
        answer = json.loads(content)
    except ValueError:
        return {}, "answers the probe with something that is not JSON"
    return (answer, "") if isinstance(answer, dict) else ({}, "answers the probe with a wrong JSON")


def _short(content: bytes) -> str:
    """The message of an OpenAI error, or the beginning of what it is instead."""
    text = content.decode(errors="replace")
    try:
        value = json.loads(text)
        text = str((value.get("error") or value).get("message", text))
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:200]


class Prober:
    """Runs probes beside the reconciles. `changed` is called when one ended. Owned by one event loop."""

    def __init__(
        self,
        cluster: Cluster,
        settings: Settings,
        now: Callable[[], datetime],
        changed: Callable[[tuple[str, str]], None],
    ) -> None:
        from cacheoperator.bugs import Bugs

        self._cluster = cluster
        self._settings = settings
        self._now = now
        self._changed = changed
        self._bugs = Bugs(log, time.monotonic)
        self._running: dict[tuple[str, str], asyncio.Task[None]] = {}
        self._results: dict[tuple[str, str], dict[tuple[str, str], ProbeResult]] = {}
        self._next: dict[tuple[str, str], dict[tuple[str, str], tuple[int, datetime]]] = {}
        """By KVCache and pair: how often it was asked without getting its evidence, and when it may be asked again."""

    def results(self, key: tuple[str, str]) -> tuple[ProbeResult, ...]:
        """How the newest probe of each pair went."""
        return tuple(self._results.get(key, {}).values())

    def forget(self, key: tuple[str, str]) -> None:
        """The KVCache is gone."""
        self._results.pop(key, None)
        self._next.pop(key, None)
        running = self._running.pop(key, None)
        if running is not None:
            running.cancel()

    def consider(
        self,
        key: tuple[str, str],
        uid: str,
        manifest: KVCacheManifest,
        observed: Observed,
        pairs: Sequence[tuple[str, str]],
    ) -> float | None:
        """Begin a probe of the first of `pairs` that may be asked now, if none runs. Gives when to come again."""
        if key in self._running:
            return None
        waits = self._next.setdefault(key, {})
        for pair in [pair for pair in waits if pair not in pairs]:
            del waits[pair]
        now = self._now()
        left_s = []
        for pair in pairs:
            failures, at = waits.get(pair, (0, now))
            if at > now:
                left_s.append((at - now).total_seconds())
                continue
            question = question_for(manifest, observed, pair)
            if question is not None:
                log.info("probe namespace=%s name=%s %s", *key, question)
                work = self._probe(key, uid, manifest, question, pair, failures)
                self._running[key] = asyncio.create_task(work, name="probe")
                return None
        return min(left_s, default=None)

    async def close(self) -> None:
        """End what runs."""
        running = list(self._running.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    async def _probe(
        self,
        key: tuple[str, str],
        uid: str,
        manifest: KVCacheManifest,
        question: Question,
        pair: tuple[str, str],
        failures: int,
    ) -> None:
        from cacheoperator import metrics
        from cacheoperator.errors import ClusterError
        from cacheoperator.observed import ProbeResult

        try:
            if manifest.engine.api_key is None:
                problem = await asyncio.to_thread(ask, question)
            else:
                problem = await ask_from_pod(
                    self._cluster, probe_pod(manifest, self._settings, uid, question)
                )
        except ClusterError as error:
            problem = f"the probe's pod could not run: {error.message}"
        except Exception as error:  # noqa: BLE001 - the outermost frame of a task
            self._bugs.tell(error, f"the probe of kvcache {'/'.join(key)} failed")
            problem = f"the probe failed ({type(error).__name__})"
        finally:
            self._running.pop(key, None)
        metrics.probes.labels("failed" if problem else "ok").inc()
        now = self._now()
        self._results.setdefault(key, {})[pair] = ProbeResult(*pair, at=now, problem=problem)
        # Also after an answer: without evidence the next probe comes, but not at once.
        backoff_s = min(longest_backoff_s, first_backoff_s * 2.0 ** min(failures, 10))
        at = now + timedelta(seconds=backoff_s)
        self._next.setdefault(key, {})[pair] = (failures + 1, at)
        if problem:
            log.warning("probe namespace=%s name=%s: %s", *key, problem)
        self._changed(key)


def question_for(
    manifest: KVCacheManifest, observed: Observed, pair: tuple[str, str]
) -> Question | None:
    """A request to a ready engine of each fingerprint; None while there is none to ask."""
    if manifest.model is None:
        return None
    prefill = _engine(observed, "prefill", pair[0])
    decode = _engine(observed, "decode", pair[1])
    tokens_per_chunk = max(
        (
            view.tokens_per_chunk
            for agent in observed.agents
            for view in agent.namespaces
            if view.digest in pair
        ),
        default=0,
    )
    if prefill is None or decode is None or not tokens_per_chunk:
        return None
    return Question(
        prefill=_address(prefill),
        decode=_address(decode),
        model=manifest.model.served_name,
        num_tokens=2 * tokens_per_chunk + 1,
        salt=f"larder-probe-{secrets.token_hex(8)}",
    )


def _engine(observed: Observed, component: str, fingerprint: str) -> Pod | None:
    registered = {
        session.engine
        for agent in observed.agents
        for session in agent.sessions
        if session.namespace == fingerprint
    }
    return next(
        (
            pod
            for pod in observed.pods
            if pod.component == component
            and pod.is_ready
            and not pod.is_deleting
            and pod.ip
            and pod.name in registered
        ),
        None,
    )


def _address(pod: Pod) -> str:
    from cacheoperator.names import ENGINE_PORT

    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    return f"{host}:{ENGINE_PORT}"


def probe_pod(
    manifest: KVCacheManifest, settings: Settings, uid: str, question: Question
) -> dict[str, Any]:
    """The short-lived pod: passes Pod Security `restricted`, gets the API key from the user's Secret."""
    from cacheoperator import names

    assert manifest.engine.api_key is not None
    pull = [{"name": name} for name in manifest.image_pull_secrets]
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": f"{manifest.name}-probe",
            "namespace": manifest.namespace,
            # Without the name label: what selects our pods does not select this one.
            "labels": {
                names.INSTANCE_LABEL: manifest.name,
                names.COMPONENT_LABEL: "probe",
                names.MANAGED_BY_LABEL: names.MANAGED_BY,
            },
            "ownerReferences": [names.owner_reference(manifest.name, uid)],
        },
        "spec": {
            **({"imagePullSecrets": pull} if pull else {}),
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(pod_limit_s),
            "terminationGracePeriodSeconds": 0,
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": names.UID_AGENT,
                "runAsGroup": names.UID_AGENT,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [
                {
                    "name": "probe",
                    "image": manifest.cache.image or settings.images.agent,
                    **(
                        {"imagePullPolicy": settings.image_pull_policy}
                        if settings.image_pull_policy
                        else {}
                    ),
                    "command": ["python3", "-m", "cacheoperator.probe"],
                    "args": [
                        "--prefill", question.prefill,
                        "--decode", question.decode,
                        "--model", question.model,
                        "--num-tokens", str(question.num_tokens),
                        "--salt", question.salt,
                    ],
                    "env": [
                        {
                            "name": KEY_ENV,
                            "valueFrom": {
                                "secretKeyRef": {
                                    "name": manifest.engine.api_key.name,
                                    "key": manifest.engine.api_key.key,
                                }
                            },
                        }
                    ],
                    "resources": {
                        "requests": {"cpu": "10m", "memory": "32Mi"},
                        "limits": {"memory": "96Mi"},
                    },
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                }
            ],
        },
    }  # fmt: skip


async def ask_from_pod(cluster: Cluster, pod: dict[str, Any]) -> str:
    """Run `pod` to its end and delete it. Gives what it said went wrong, "" for nothing. Raises ClusterError."""
    from cacheoperator.errors import Conflict
    from cacheoperator.kinds import POD

    namespace, name = pod["metadata"]["namespace"], pod["metadata"]["name"]
    deadline = asyncio.get_running_loop().time() + pod_limit_s
    uid = ""
    while not uid:
        try:
            uid = str((await cluster.create(pod)).object["metadata"]["uid"])
        except Conflict:
            # Left over from an operator that ended meanwhile. Only what is a probe of ours is deleted.
            found = await cluster.get(POD, namespace, name)
            if found is not None and found["metadata"].get("labels") != pod["metadata"]["labels"]:
                return f"pod/{name} exists and is not a probe of ours: delete it"
            if asyncio.get_running_loop().time() > deadline:
                return f"pod/{name} of an earlier probe does not end"
            if found is not None:
                await cluster.delete(POD, namespace, name, found["metadata"]["uid"])
            await asyncio.sleep(pod_look_s)
    try:
        while True:
            found = await cluster.get(POD, namespace, name)
            if found is None:
                return f"pod/{name} was deleted before it ended"
            said = _said(found)
            if said is not None:
                return said
            if asyncio.get_running_loop().time() > deadline:
                return f"pod/{name} did not end in {pod_limit_s:.0f} s: {_waiting(found)}"
            await asyncio.sleep(pod_look_s)
    finally:
        await asyncio.shield(cluster.delete(POD, namespace, name, uid))


def _said(pod: Mapping[str, Any]) -> str | None:
    """What the ended pod wrote; None while it has not ended."""
    status = pod.get("status") or {}
    if status.get("phase") not in ("Succeeded", "Failed"):
        return None
    if status["phase"] == "Succeeded":
        return ""
    for container in status.get("containerStatuses") or ():
        ended = (container.get("state") or {}).get("terminated") or {}
        if ended.get("message"):
            return str(ended["message"])
    return f"the probe's pod failed: {status.get('reason') or 'no reason given'}"


def _waiting(pod: Mapping[str, Any]) -> str:
    for container in (pod.get("status") or {}).get("containerStatuses") or ():
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason"):
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    return "it is not scheduled, or runs too slowly"


def main(argv: Sequence[str] | None = None) -> int:
    """Inside the pod. What went wrong goes where Kubernetes finds it; exit code 1 then."""
    parser = argparse.ArgumentParser(prog="python3 -m cacheoperator.probe")
    for name in ("prefill", "decode", "model", "salt"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--num-tokens", type=int, required=True)
    options = parser.parse_args(argv)
    problem = ask(Question(**vars(options)), os.environ.get(KEY_ENV, ""))
    if problem:
        print(problem, file=sys.stderr)  # noqa: T201 - the pod's log
        try:
            with open(TERMINATION_LOG, "w", encoding="utf-8") as file:
                file.write(problem)
        except OSError:
            pass  # not in a pod
    return 1 if problem else 0


if __name__ == "__main__":
    sys.exit(main())
