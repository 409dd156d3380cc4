"""Pretends to be vLLM's server, started the same way, in the mode that the environment variable STAND_IN names.

never    (the default) answers /health with 503 for ever: an engine that loads its model for ever
ready    answers /health with 200 and everything else with OpenAI's shape of an error
crash    ends at once with status 1
memory   takes memory until the kernel ends it
"""

import argparse
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(BaseHTTPRequestHandler):
    """One request to the stand-in."""

    def do_GET(self) -> None:
        """/health by the mode; nothing else is there."""
        if self.path == "/health":
            self._answer(200 if MODE == "ready" else 503, {})
        else:
            self._refuse()

    def do_POST(self) -> None:
        """No completion is ever made here."""
        self._refuse()

    def _refuse(self) -> None:
        message = f"a stand-in has no {self.path}"
        self._answer(503, {"error": {"message": message, "type": "server_error", "code": 503}})

    def _answer(self, status: int, document: dict[str, object]) -> None:
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


MODE = os.environ.get("STAND_IN", "never")

if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    flags.add_argument("--host", default="0.0.0.0")
    flags.add_argument("--port", type=int, default=8000)
    site, _ = flags.parse_known_args()
    print(f"stand-in in mode {MODE}, started with {sys.argv[1:]}")
    # As a container's first process it would not hear of it otherwise.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    if MODE == "crash":
        sys.exit("stand-in: told to crash")
    if MODE == "memory":
        taken = []
        while True:
            taken.append(b"x" * (8 << 20))
    ThreadingHTTPServer((site.host, site.port), Server).serve_forever()
