"""HTTP to our own children on loopback: probes, JSON, and the OpenAI API with the time to its first token.

http.client, because proxies from the environment must not stand between us and loopback, and because this file is all
of HTTP that Larder needs. Raises EngineError for whatever an engine answers that is no success. Thread rule: none kept.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cacheservice.errors import LarderError

PROBE_TIMEOUT_S = 1.0
REQUEST_TIMEOUT_S = 300.0


class EngineError(LarderError):
    """An engine answered with an error, or not at all; the message has what it said."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an engine answered to one prompt.

    `ttft_s` is from sending the request to the first token, `total_s` to the last one. `gaps` holds for each token the
    difference of log-probability between the two likeliest. `cached_tokens` is what vLLM did not compute.
    """

    token_ids: tuple[int, ...]
    gaps: tuple[float, ...]
    text: str
    prompt_tokens: int
    cached_tokens: int
    ttft_s: float
    total_s: float


def answers_ok(host: str, port: int, path: str) -> bool:
    """Whether a GET answers 200 within about a second."""
    connection = http.client.HTTPConnection(host, port, timeout=PROBE_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def get_text(host: str, port: int, path: str, *, timeout_s: float = 5.0) -> str:
    """The body of a GET. Raises EngineError."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout_s)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read().decode("utf-8", "replace")
        if response.status != 200:
            raise EngineError(f"GET {path} at {host}:{port}: {response.status} {body[:300]}")
        return body
    except (OSError, http.client.HTTPException) as error:
        raise EngineError(f"GET {path} at {host}:{port}: {type(error).__name__} {error}") from error
    finally:
        connection.close()


def post_json(host: str, port: int, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON that a POST answers. Raises EngineError."""
    connection = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_S)
    try:
        response = _post(connection, path, body)
        answer: dict[str, Any] = json.loads(response.read())
        return answer
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineError(
            f"POST {path} at {host}:{port}: {type(error).__name__} {error}"
        ) from error
    finally:
        connection.close()


def ask(
    host: str, port: int, path: str, body: Mapping[str, Any], *, with_gaps: bool = True
) -> Answer:
    """Stream the answer to `body`, the JSON of a completion. Raises EngineError.

    Adds to `body` what is needed to measure: streaming, usage, token ids and, for `gaps`, the two likeliest tokens.
    """
    asked = {
        **body,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if with_gaps:
        # As ids: two tokens of the same text stay two keys.
        asked |= {"logprobs": 2, "return_tokens_as_token_ids": True}
    connection = http.client.HTTPConnection(host, port, timeout=REQUEST_TIMEOUT_S)
    begun = time.perf_counter()
    first: float | None = None
    token_ids: list[int] = []
    gaps: list[float] = []
    text: list[str] = []
    usage: Mapping[str, Any] = {}
    try:
        for event in _events(_post(connection, path, asked)):
            if "error" in event:
                raise EngineError(f"POST {path} at {host}:{port}: {event['error']}")
            for choice in event.get("choices", ()):
                new = choice.get("token_ids") or []
                if new and first is None:
                    first = time.perf_counter()
                token_ids += new
                text.append(str(choice.get("text") or ""))
                gaps += _gaps(choice.get("logprobs"))
            usage = event.get("usage") or usage
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise EngineError(
            f"POST {path} at {host}:{port}: {type(error).__name__} {error}"
        ) from error
    finally:
        connection.close()
    ended = time.perf_counter()
    if first is None:
        raise EngineError(
            f"POST {path} at {host}:{port}: the answer has no token; see the engine's log"
        )
    details = usage.get("prompt_tokens_details") or {}
    return Answer(
        token_ids=tuple(token_ids), gaps=tuple(gaps), text="".join(text),
        prompt_tokens=int(usage.get("prompt_tokens", 0)), cached_tokens=int(details.get("cached_tokens") or 0),
        ttft_s=first - begun, total_s=ended - begun,
    )  # fmt: skip


def _post(
    connection: http.client.HTTPConnection, path: str, body: Mapping[str, Any]
) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != 200:
        said = response.read().decode("utf-8", "replace")[:500]
        raise EngineError(
            f"POST {path} at {connection.host}:{connection.port}: {response.status} {said}"
        )
    return response


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON of each server-sent event until [DONE]."""
    for line in response:
        if not line.startswith(b"data:"):
            continue
        content = line[5:].strip()
        if content == b"[DONE]":
            return
        yield json.loads(content)


def _gaps(logprobs: Mapping[str, Any] | None) -> list[float]:
    tops = (logprobs or {}).get("top_logprobs") or ()
    return [_gap(list(top.values())) for top in tops if top]


def _gap(logprobs: list[float]) -> float:
    best = sorted(logprobs, reverse=True)[:2]
    return best[0] - best[1] if len(best) == 2 else 0.0
