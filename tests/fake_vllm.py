"""A stand-in for vLLM's API server, for tests of what surrounds engines: starts at once, computes nothing.

`install(folder)` writes a package `vllm` whose `python -m vllm.entrypoints.openai.api_server` is this file; put the
folder on PYTHONPATH. Answers are a function of the prompt, so engines agree. The environment variable FAKE_VLLM makes
it misbehave:

    wrong     engines with a connector answer other tokens than those without
    slow      every answer takes five minutes
    stuck     it never becomes ready
    crash     it writes a known error and dies
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

NUM_TOKENS = 4
PROMPT_TOKENS = 1000
CACHED_TOKENS = 768


def install(folder: Path) -> str:
    """Make the package below `folder`; returns what belongs on PYTHONPATH."""
    package = folder / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for parent in (package, package.parent, package.parent.parent):
        (parent / "__init__.py").write_text("")
    shutil.copy(__file__, package / "api_server.py")
    return str(folder)


class Engine(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    has_connector = "--kv-transfer-config" in sys.argv
    mode = os.environ.get("FAKE_VLLM", "")

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        print(format % args, flush=True)

    def do_GET(self) -> None:
        if self.path == "/metrics":
            self._send(
                'vllm:larder_bytes_total{kind="save"} 2e9\nvllm:larder_seconds_total{kind="save"} 1\n'
                'vllm:larder_bytes_total{kind="load"} 2e9\nvllm:larder_seconds_total{kind="load"} 1\n'
                f'vllm:larder_tokens_total{{kind="load",what="served"}} {7 * CACHED_TOKENS}\n'
            )
        else:
            self._send("")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.mode == "slow":
            time.sleep(300)
        if not body.get("stream"):
            self._send(json.dumps({"kv_transfer_params": {"larder": {}}, "choices": []}))
            return
        seed = body["prompt"] + ("!" if self.mode == "wrong" and self.has_connector else "")
        token_ids = list(hashlib.sha256(seed.encode()).digest()[:NUM_TOKENS])
        usage = {
            "prompt_tokens": PROMPT_TOKENS,
            "prompt_tokens_details": {"cached_tokens": CACHED_TOKENS if self.has_connector else 0},
        }
        tops = [{f"token_id:{token}": -0.5, "token_id:999": -2.5} for token in token_ids]
        choice = {"token_ids": token_ids, "text": "…", "logprobs": {"top_logprobs": tops}}
        events = [{"choices": [choice]}, {"choices": [], "usage": usage}]
        self._send(
            "".join(f"data: {json.dumps(event)}\n\n" for event in events) + "data: [DONE]\n\n"
        )

    def _send(self, text: str) -> None:
        content = text.encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


def main() -> None:
    """Serve at --host and --port until SIGTERM."""
    if Engine.mode == "crash":
        sys.exit("OSError: [Errno 98] Address already in use")
    if Engine.mode == "stuck":
        print("INFO 01-01 00:00:00 [loader.py:1] Loading weights", flush=True)
        time.sleep(300)
    at = sys.argv.index("--port")
    with ThreadingHTTPServer(("127.0.0.1", int(sys.argv[at + 1])), Engine) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
