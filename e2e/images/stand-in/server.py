"""Pretends to be vLLM's server, started the same way, in the mode that the environment variable STAND_IN names.

never    (the default) answers /health with 503 for ever: an engine that loads its model for ever
ready    answers /health with 200 and everything else with OpenAI's shape of an error
cached   as ready, once the agent has taken its session, and answers completions that move chunks (chunks.py); who asks
         must show the key of STAND_IN_KEY, else of VLLM_API_KEY, when there is one; `"read": false` in a request has
         what is found left unread
streams  as cached, and does without shared memory
half     as cached, and its pages are of another dtype than those of the others
stranger as cached, but ready at once, and it speaks a protocol that no agent does
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
            self._answer(200 if is_healthy() else 503, {})
        else:
            self._refuse()

    def do_POST(self) -> None:
        """A completion of nothing, where there is a cache; else none is ever made here."""
        if chunks is None or self.path != "/v1/completions":
            self._refuse()
            return
        key = os.environ.get("STAND_IN_KEY") or os.environ.get("VLLM_API_KEY")
        # As vLLM 0.32 does it: entrypoints/openai/api_server.py, AuthenticationMiddleware.
        if key and self.headers.get("Authorization") != f"Bearer {key}":
            self._answer(401, {"error": "Unauthorized"})
            return
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        moved = chunks.serve(
            request["prompt"], request.get("cache_salt", ""), is_reading=request.get("read", True)
        )
        print(f"completion of {len(request['prompt'])} tokens, {moved} chunks moved")
        self._answer(200, {"object": "text_completion", "choices": [{"index": 0, "text": ""}]})

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


def is_healthy() -> bool:
    """Whether /health says so."""
    return MODE in ("ready", "stranger") or (chunks is not None and chunks.is_connected())


MODE = os.environ.get("STAND_IN", "never")
chunks = None

if __name__ == "__main__":
    flags = argparse.ArgumentParser()
    flags.add_argument("--host", default="0.0.0.0")
    flags.add_argument("--port", type=int, default=8000)
    flags.add_argument("--kv-transfer-config")
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
    if MODE in ("cached", "streams", "half", "stranger"):
        from vllm.entrypoints.openai.chunks import Chunks

        chunks = Chunks(
            site.kv_transfer_config,
            data_plane="stream" if MODE == "streams" else "auto",
            protocol=99 if MODE == "stranger" else None,
            dtype="bfloat16" if MODE == "half" else "float32",
        )
    ThreadingHTTPServer((site.host, site.port), Server).serve_forever()
