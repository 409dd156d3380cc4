"""What agents say about themselves: GET http://POD_IP:7501/statusz, all agents at once, into `observed.AgentReport`.

Never raises: an agent that does not answer, or answers nonsense, is a report with a `problem`. An answer is read up to
a limit; it comes from a pod of ours, yet a wrong pod IP must not fill the operator's memory. Redirects are not
followed: whoever can give a pod our labels must not choose what the operator asks for.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from cacheoperator.names import AGENT_HTTP_PORT
from cacheoperator.observed import AgentReport, EngineSession, Flow, NamespaceView, Pod

largest_answer_bytes = 8 << 20


class Agents:
    """One HTTP session for all agents; at most `limit` questions at a time, each for `timeout_s` seconds."""

    def __init__(self, *, limit: int = 32, timeout_s: float = 3.0) -> None:
        self._limit = limit
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)
        self._session: aiohttp.ClientSession | None = None
        self._gate = asyncio.Semaphore(limit)

    async def ask(self, pods: Sequence[Pod]) -> tuple[AgentReport, ...]:
        """The reports of agents' `pods`, in their order."""
        return tuple(await asyncio.gather(*(self._ask_one(pod) for pod in pods)))

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def _ask_one(self, pod: Pod) -> AgentReport:
        if not pod.ip:
            return AgentReport(pod.name, pod.node, problem="has no address yet")
        host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
        url = f"http://{host}:{AGENT_HTTP_PORT}/statusz"
        try:
            async with self._gate, self._open().get(url, allow_redirects=False) as answer:
                content = bytearray()
                async for piece in answer.content.iter_chunked(1 << 16):
                    content += piece
                    if len(content) > largest_answer_bytes:
                        return AgentReport(pod.name, pod.node, problem="its /statusz is too long")
                if answer.status != 200:
                    problem = f"its /statusz answers HTTP {answer.status}"
                    return AgentReport(pod.name, pod.node, problem=problem)
            return parse_report(pod.name, pod.node, json.loads(content))
        except TimeoutError:
            return AgentReport(pod.name, pod.node, problem="its /statusz does not answer in time")
        except (aiohttp.ClientError, OSError):
            return AgentReport(pod.name, pod.node, problem="its /statusz can't be reached")
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            problem = f"its /statusz can't be read ({type(error).__name__})"
            return AgentReport(pod.name, pod.node, problem=problem)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=self._limit, force_close=True)
            self._session = aiohttp.ClientSession(timeout=self._timeout, connector=connector)
        return self._session


def parse_report(pod: str, node: str, answer: Mapping[str, Any]) -> AgentReport:
    """The JSON of /statusz as values. Raises ValueError, TypeError or KeyError where it is something else."""
    index = answer.get("index") or {}
    return AgentReport(
        pod=pod,
        node=node or str(answer.get("node", "")),
        epoch=int(answer.get("epoch", 0)),
        version=str(answer.get("version", "")),
        protocol=int(answer.get("protocol", 0)),
        is_draining=bool(answer.get("draining", False)),
        index_health=str(index.get("health", "")),
        index_reason=str(index.get("reason", "")),
        index_message=str(index.get("message", "")),
        arena_bytes=int(answer.get("arena_bytes", 0)),
        used_bytes=int(answer.get("used_bytes", 0)),
        sessions=tuple(
            EngineSession(
                engine=str(session["engine"]),
                role=str(session.get("role", "")),
                half=str(session.get("half", "")),
                rank=int(session.get("rank", 0)),
                transport=str(session.get("transport", "")),
                namespace=str(session.get("namespace", "")),
                larder_version=str(session.get("larder_version", "")),
                vllm_version=str(session.get("vllm_version", "")),
                protocol=int(session.get("protocol", 0)),
                asked_tokens=int(session.get("asked_tokens", 0)),
                hit_tokens=int(session.get("hit_tokens", 0)),
            )
            for session in answer.get("sessions") or ()
        ),
        namespaces=tuple(
            NamespaceView(
                digest=str(found["digest"]),
                facts=dict(found.get("facts") or {}),
                tokens_per_chunk=int(found.get("tokens_per_chunk", 0)),
                bytes_per_token=int(found.get("bytes_per_token", 0)),
            )
            for found in answer.get("namespaces") or ()
        ),
        flows=tuple(
            Flow(
                namespace=str(flow.get("namespace", "")),
                writer_role=str(flow.get("writer_role", "")),
                reader_role=str(flow.get("reader_role", "")),
                committed=int(flow.get("committed", 0)),
                looked_up=int(flow.get("looked_up", 0)),
                loaded=int(flow.get("loaded", 0)),
            )
            for flow in answer.get("flows") or ()
        ),
        refused_hellos=tuple(str(line) for line in answer.get("refused_hellos") or ()),
    )
