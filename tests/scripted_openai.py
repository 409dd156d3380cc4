"""A scripted OpenAI endpoint with vLLM's habits: a prefix cache that obeys `cache_salt`, log-probabilities, usage.

It computes nothing: a script says what is answered to each request, from what was asked and how. Used where a test
needs an engine that is wrong on purpose; what real engines do is tested with real ones.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PROMPT_TOKENS = 600
PREFIX_TOKENS = 256
"""What prompts of one salt share."""
WHOLE_TOKENS = 512
"""What a prompt shares with itself."""


@dataclass(frozen=True)
class Asked:
    """One request. `times` is how often this prompt came under this salt before."""

    prompt: str
    salt: str
    times: int
    body: Mapping[str, Any]
    headers: Mapping[str, str]

    @property
    def is_cold(self) -> bool:
        """Whether it is of a salt of its own, as the cold pass and controls use."""
        return "cold" in self.salt

    @property
    def is_warm(self) -> bool:
        """Whether it is the second time under the shared salt."""
        return "shared" in self.salt and self.times > 0


Script = Callable[[Asked], Mapping[str, float]]
"""The log-probabilities of the next token. An empty one: the engine gives none, and says " B"."""


@dataclass
class ScriptedEngine:
    """The endpoint. Knobs are read at each request."""

    script: Script
    models: tuple[str, ...] = ("m",)
    lists_models: bool = True
    reports_cached: bool = True
    obeys_salt: bool = True
    has_cache: bool = True
    larder_tokens: Callable[[int], int] | None = lambda cached: cached
    """Of so many tokens from the cache, how many Larder gave; None: no metrics."""
    api_key: str | None = None
    refuses: tuple[int, str] | None = None
    resets: list[bool] | None = None
    """What /reset_prefix_cache answers, one after the other; None: there is no such path."""
    log: list[Asked] = field(default_factory=list)
    num_resets: int = 0
    url: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _seen: dict[tuple[str, str], int] = field(default_factory=dict)
    _loaded: int = 0

    def answer(
        self, method: str, path: str, body: dict[str, Any], headers: Mapping[str, str]
    ) -> tuple[int, Any]:
        """Status and JSON (or text) of the answer."""
        if self.api_key is not None and headers.get("Authorization") != f"Bearer {self.api_key}":
            return 401, {"error": {"message": "Unauthorized"}}
        if (method, path) == ("GET", "/v1/models") and self.lists_models:
            return 200, {"data": [{"id": name} for name in self.models]}
        if (method, path) == ("GET", "/metrics") and self.larder_tokens is not None:
            labels = 'kind="load",what="served"'
            return 200, f"vllm:larder_tokens_total{{{labels}}} {self._loaded}\n"
        if (method, path) == ("POST", "/reset_prefix_cache") and self.resets is not None:
            self.num_resets += 1
            return 200, {"success": self.resets.pop(0)}
        if method == "POST" and path in ("/v1/completions", "/v1/chat/completions"):
            return self._complete(body, headers, is_chat="chat" in path)
        return 404, {"detail": "Not Found"}

    def _complete(
        self, body: dict[str, Any], headers: Mapping[str, str], *, is_chat: bool
    ) -> tuple[int, Any]:
        if self.refuses is not None:
            return self.refuses[0], {"error": {"message": self.refuses[1]}}
        if body["model"] not in self.models:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        prompt = body["messages"][0]["content"] if is_chat else body["prompt"]
        salt = body["cache_salt"]
        with self._lock:
            key = (salt if self.obeys_salt else "", prompt)
            times = self._seen.get(key, 0)
            cached = 0
            if self.has_cache and any(of == key[0] for of, _ in self._seen):
                cached = WHOLE_TOKENS if times else PREFIX_TOKENS
            self._seen[key] = times + 1
            if self.larder_tokens is not None:
                self._loaded += self.larder_tokens(cached)
            asked = Asked(prompt, salt, times, body, headers)
            self.log.append(asked)
        tops = self.script(asked)
        usage: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "prompt_tokens_details": None}
        if self.reports_cached:
            usage["prompt_tokens_details"] = {"cached_tokens": cached}
        return 200, {"choices": [(_chat if is_chat else _completion)(tops)], "usage": usage}


def _completion(tops: Mapping[str, float]) -> dict[str, Any]:
    said = max(tops, key=lambda token: tops[token]) if tops else " B"
    return {"text": said, "logprobs": {"top_logprobs": [dict(tops)]} if tops else None}


def _chat(tops: Mapping[str, float]) -> dict[str, Any]:
    said = max(tops, key=lambda token: tops[token]) if tops else " B"
    content = [{"top_logprobs": [{"token": t, "logprob": value} for t, value in tops.items()]}]
    return {
        "message": {"role": "assistant", "content": said},
        "logprobs": {"content": content} if tops else None,
    }


@contextmanager
def serving(engine: ScriptedEngine) -> Iterator[ScriptedEngine]:
    """The endpoint at `engine.url` for the length of a with block."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            self._send(*engine.answer("GET", self.path, {}, dict(self.headers)))

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            body = json.loads(content) if content else {}
            self._send(*engine.answer("POST", self.path, body, dict(self.headers)))

        def _send(self, status: int, answer: Any) -> None:
            content = (answer if isinstance(answer, str) else json.dumps(answer)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        engine.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield engine
        finally:
            server.shutdown()
            thread.join()
