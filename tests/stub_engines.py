"""Engines that compute nothing, and an API server that knows pods: what a router needs around it to be tested.

A stub engine answers as vLLM does where a router looks (/health, /v1/models, /v1/completions) and keeps what it was
asked. Its answer says which engine it was; a prefill engine's has `kv_transfer_params`.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODEL = "demo"
PARAMS = {"larder": {"owner": "node1", "chunks": 3, "nested": [1, None, "é", 0.7]}}


@dataclass
class StubEngine:
    """One engine; `with serving(engine, host)` listens. `api_key` is wanted from whoever asks /v1."""

    name: str
    params: Mapping[str, Any] | None = None
    api_key: str | None = None
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)


@contextmanager
def serving(engine: StubEngine, host: str = "127.0.0.1", port: int = 0) -> Iterator[StubEngine]:
    """`engine` at `engine.port` for the length of the with block."""

    class Handler(_Quiet):
        def do_GET(self) -> None:
            if self.path == "/health":
                self.send({})
            elif self.path == "/v1/models" and self._is_known():
                self.send({"object": "list", "data": [{"id": MODEL, "object": "model"}]})
            elif self.path == "/version":
                self.send({"version": "0.32.0"})
            else:
                self.send({"detail": "Not Found"}, 404)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or "{}")
            if not self._is_known():
                return
            engine.asked.append(body)
            engine.authorizations.append(self.headers.get("Authorization"))
            answer = {
                "id": "cmpl-1", "object": "text_completion", "created": 1, "model": MODEL,
                "choices": [{"index": 0, "text": engine.name, "finish_reason": "length", "logprobs": None}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
            }  # fmt: skip
            if engine.params is not None:
                answer["kv_transfer_params"] = engine.params
            self.send(answer)

        def _is_known(self) -> bool:
            if engine.api_key in (None, (self.headers.get("Authorization") or "")[7:]):
                return True
            self.send({"error": "Unauthorized"}, 401)
            return False

    with _serving(host, port, Handler) as server:
        engine.port = server.server_port
        yield engine


class PodApi:
    """An API server that lists and watches the pods of one namespace, and nothing else. `port` is where."""

    def __init__(self) -> None:
        self.port = 0
        self.paths: list[str] = []
        self._pods: dict[str, dict[str, Any]] = {}
        self._version = 1
        self._watchers: list[queue.Queue[dict[str, Any]]] = []
        self._lock = threading.Lock()

    def put(self, name: str, ip: str, labels: Mapping[str, str]) -> None:
        """A ready pod appears."""
        with self._lock:
            self._version += 1
            pod = {
                "apiVersion": "v1", "kind": "Pod",
                "metadata": {
                    "name": name, "namespace": "team", "uid": name, "labels": dict(labels),
                    "resourceVersion": str(self._version),
                },
                "spec": {"containers": []},
                "status": {
                    "phase": "Running", "podIP": ip, "podIPs": [{"ip": ip}],
                    "conditions": [{"type": "Ready", "status": "True"}],
                },
            }  # fmt: skip
            self._pods[name] = pod
            self._tell("ADDED", pod)

    def delete(self, name: str) -> None:
        """A pod is gone."""
        with self._lock:
            self._version += 1
            pod = self._pods.pop(name)
            pod["metadata"]["resourceVersion"] = str(self._version)
            self._tell("DELETED", pod)

    def _tell(self, kind: str, pod: dict[str, Any]) -> None:
        for watcher in self._watchers:
            watcher.put({"type": kind, "object": pod})

    @contextmanager
    def serving(self) -> Iterator[PodApi]:
        """Listen for the length of the with block."""
        api = self

        class Handler(_Quiet):
            def do_GET(self) -> None:
                path, _, query = self.path.partition("?")
                api.paths.append(path)
                if not path.endswith("/pods"):
                    self.send({"kind": "Status", "status": "Failure", "code": 404}, 404)
                elif "watch=" in query:
                    self._watch()
                else:
                    with api._lock:
                        items, version = list(api._pods.values()), str(api._version)
                    self.send({
                        "apiVersion": "v1", "kind": "PodList", "metadata": {"resourceVersion": version}, "items": items
                    })  # fmt: skip

            def _watch(self) -> None:
                events: queue.Queue[dict[str, Any]] = queue.Queue()
                with api._lock:
                    api._watchers.append(events)
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                while event := events.get():
                    line = json.dumps(event).encode() + b"\n"
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                    self.wfile.flush()

        with _serving("127.0.0.1", 0, Handler) as server:
            self.port = server.server_port
            try:
                yield self
            finally:
                for watcher in self._watchers:
                    watcher.put({})

    def kubeconfig(self) -> str:
        """The text of a kubeconfig for it (JSON, which is YAML)."""
        return json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "c",
            "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{self.port}"}}],
            "users": [{"name": "u", "user": {}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u", "namespace": "team"}}],
        })  # fmt: skip


class _Quiet(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass

    def send(self, answer: Any, status: int = 200) -> None:
        content = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class _Server(ThreadingHTTPServer):
    """Ends like a process: connections that are kept alive end with it."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        super().__init__(address, handler)
        self._connections: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def end(self) -> None:
        self.shutdown()
        self.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@contextmanager
def _serving(
    host: str, port: int, handler: type[BaseHTTPRequestHandler]
) -> Iterator[ThreadingHTTPServer]:
    with _Server((host, port), handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.end()
            thread.join()
