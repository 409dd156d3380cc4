"""Plain HTTP for probes, Prometheus and people: /healthz, /readyz, /metrics, /statusz. Read only; no keys, no tokens.

Limits: few connections, short time-outs, no request bodies. Called by `serve.py`.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol
from urllib.parse import parse_qs

from cacheservice.agent.config import HostPort
from cacheservice.errors import ConfigError

_log = logging.getLogger(__name__)

_MAX_CONNECTIONS = 16
_TIMEOUT_S = 5.0


class StatusPage(Protocol):
    """Makes the value of /statusz."""

    def __call__(self, *, with_outcomes: bool, request: str) -> Mapping[str, Any] | None:
        """With the ring of outcomes, or without; with it, of requests whose id contains `request`. None: not yet."""


@dataclass(frozen=True, slots=True)
class Pages:
    """What is served; each is called per request, from any thread."""

    is_alive: Callable[[], bool]
    """False when a restart is the only way out."""
    why_not_ready: Callable[[], str]
    """Empty when ready."""
    metrics: Callable[[], bytes | None]
    """None while the agent starts."""
    status: StatusPage


class WebServer:
    """The listener and its threads."""

    def __init__(self, address: HostPort, pages: Pages) -> None:
        """Bind. ConfigError when the address can't be had."""
        handler = type("BoundHandler", (_Handler,), {"pages": pages})
        try:
            self._server = _Server(address, handler)
        except OSError as error:
            raise ConfigError(
                f"--http {address}: can't listen there: {error.strerror}; choose another port"
            ) from error
        self._thread = threading.Thread(target=self._server.serve_forever, name="http", daemon=True)

    @property
    def port(self) -> int:
        """The port that was bound, also when 0 was asked for."""
        return int(self._server.server_address[1])

    def start(self) -> None:
        """Serve."""
        self._thread.start()

    def stop(self) -> None:
        """Close the listener."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self, address: HostPort, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
        self._slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        super().__init__((address.host, address.port), handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it when there are too many."""
        if not self._slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """The thread of one connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ARG002
        """A client that goes away in the middle is nothing to report loudly."""
        _log.debug("http request failed client=%s", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    pages: Pages
    timeout = _TIMEOUT_S
    server_version = "larder"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer one page."""
        path, _, query = self.path.partition("?")
        if path == "/healthz":
            alive = self.pages.is_alive()
            self._send(
                200 if alive else 503,
                b"ok\n" if alive else b"a thread of the agent died; restart it\n",
            )
        elif path == "/readyz":
            why_not = self.pages.why_not_ready()
            self._send(503 if why_not else 200, f"{why_not or 'ok'}\n".encode())
        elif path == "/metrics":
            self._send_made(self.pages.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/statusz":
            self._send_made(self._status(query), "application/json")
        else:
            self._send(404, b"not here; there are /healthz, /readyz, /metrics and /statusz\n")

    def _send_made(self, body: bytes | None, kind: str) -> None:
        if body is None:
            self._send(503, f"{self.pages.why_not_ready() or 'starting'}\n".encode())
        else:
            self._send(200, body, kind=kind)

    def _status(self, query: str) -> bytes | None:
        """`outcomes=1` adds the ring of outcomes, `request=ID` those of it that are of this request."""
        try:
            asked = parse_qs(query, max_num_fields=8)
        except ValueError:
            asked = {}
        request = asked.get("request", [""])[0]
        with_outcomes = asked.get("outcomes", ["0"])[0] == "1" or bool(request)
        page = self.pages.status(with_outcomes=with_outcomes, request=request)
        return None if page is None else json.dumps(page, separators=(",", ":")).encode()

    do_HEAD = do_GET  # noqa: N815

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        """Requests are not logged: probes would fill the log."""

    def _send(self, status: int, body: bytes, *, kind: str = "text/plain; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.close_connection = True
