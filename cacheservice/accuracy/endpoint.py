"""HTTP to one OpenAI endpoint: its models, completions, vLLM's metrics and the reset of its own prefix cache.

http.client, so that proxies of the environment stay out, and a connection per request, so that threads share nothing.
Raises EndpointError with what was asked, what came back and what to do; ConfigError where a flag is wrong.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from cacheservice.accuracy.completions import Reply, build_request, parse_reply, path_of
from cacheservice.errors import ConfigError, LarderError
from cacheservice.local.metrics_text import counter

REQUEST_TIMEOUT_S = 300.0
RESET_WITHIN_S = 30.0
"""Blocks of saves on their way are pinned for at most 15 s (`pin_ms`), and vLLM resets nothing while they are."""
RESET_PAUSE_S = 0.2
LOADED_TOKENS = "vllm:larder_tokens_total"


class EndpointError(LarderError):
    """The endpoint can't be reached, refuses, or answers something that is no completion."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where an engine is. `prefix` is the path before /v1; `flag` is the option that named it, for messages."""

    flag: str
    scheme: str
    host: str
    port: int | None
    prefix: str
    api_key: str | None = field(default=None, repr=False)

    @property
    def shown(self) -> str:
        """The address for messages."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = f":{self.port}" if self.port is not None else ""
        return f"{self.scheme}://{host}{port}{self.prefix}"


def parse_endpoint(url: str, *, flag: str, api_key: str | None) -> Endpoint:
    """An endpoint from its address, with or without the /v1 of OpenAI clients. Raises ConfigError."""
    wanted = "give something like http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {url} is no address ({error}): {wanted}") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{flag} {url} is no http:// or https:// address: {wanted}")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError(
            f"{flag}: only host, port and path belong into the address; keys come from a file (--api-key-file)"
        )
    prefix = parts.path.rstrip("/").removesuffix("/v1").rstrip("/")
    return Endpoint(flag, parts.scheme, parts.hostname, port, prefix, api_key)


def choose_model(endpoint: Endpoint, wanted: str | None) -> str:
    """The model to ask: `wanted` if it is served, else the only one. Raises ConfigError, EndpointError."""
    status, body = _send(endpoint, "GET", "/v1/models")
    if status == http.HTTPStatus.NOT_FOUND and wanted is not None:
        # Some routers list no models; a wrong name then shows at the first question.
        return wanted
    if status != http.HTTPStatus.OK:
        raise _refusal(endpoint, "GET /v1/models", status, body)
    try:
        names = [str(model["id"]) for model in json.loads(body)["data"]]
    except (ValueError, KeyError, TypeError) as error:
        raise EndpointError(
            f"{endpoint.shown}/v1/models is no list of models: is it an OpenAI endpoint?"
        ) from error
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(
                f"{endpoint.flag} {endpoint.shown} serves {', '.join(names) or 'no model'}, not {wanted}: "
                "give --model one of its names, or the engine --served-model-name"
            )
        return wanted
    if len(names) != 1:
        raise ConfigError(
            f"{endpoint.shown} serves {', '.join(names) or 'no model'}: choose by --model"
        )
    return names[0]


def ask(endpoint: Endpoint, prompt: str, *, model: str, salt: str, chat: bool) -> Reply:
    """Ask for one letter. Raises EndpointError."""
    path = path_of(chat=chat)
    body = build_request(prompt, model=model, salt=salt, chat=chat)
    status, answer = _send(endpoint, "POST", path, body)
    if status != http.HTTPStatus.OK:
        raise _refusal(endpoint, f"POST {path}", status, answer)
    try:
        return parse_reply(json.loads(answer), chat=chat)
    except ValueError as error:
        raise EndpointError(f"{endpoint.shown}{path}: {error}: {_start_of(answer)}") from error


def loaded_tokens(endpoint: Endpoint) -> int | None:
    """Tokens that the engine took from Larder so far, from its metrics; 0 without Larder. None: no such page."""
    try:
        status, body = _send(endpoint, "GET", "/metrics")
    except EndpointError:
        return None
    text = body.decode("utf-8", "replace")
    if status != http.HTTPStatus.OK or "vllm:" not in text:
        return None
    return int(counter(text, LOADED_TOKENS, kind="load", what="served"))


def reset_own_cache(endpoint: Endpoint) -> None:
    """Empty the engine's own prefix cache; what Larder holds stays. Raises ConfigError, EndpointError."""
    deadline = time.monotonic() + RESET_WITHIN_S
    while True:
        status, body = _send(endpoint, "POST", "/reset_prefix_cache")
        if status in (http.HTTPStatus.NOT_FOUND, http.HTTPStatus.METHOD_NOT_ALLOWED):
            raise ConfigError(
                f"--reset-prefix-cache: {endpoint.shown} has no /reset_prefix_cache; start the engine with "
                "VLLM_SERVER_DEV_MODE=1, or with --no-enable-prefix-caching and leave the flag out"
            )
        if status != http.HTTPStatus.OK:
            raise _refusal(endpoint, "POST /reset_prefix_cache", status, body)
        if _succeeded(body):
            return
        if time.monotonic() > deadline:
            raise EndpointError(
                f"{endpoint.shown} did not empty its prefix cache within {RESET_WITHIN_S:.0f} s: "
                "is it serving somebody else?"
            )
        time.sleep(RESET_PAUSE_S)


def _succeeded(body: bytes) -> bool:
    """vLLM 0.32 answers {"success": …} (entrypoints/serve/dev/cache/api_router.py); others nothing."""
    try:
        answer = json.loads(body)
    except ValueError:
        return True
    return not isinstance(answer, dict) or bool(answer.get("success", True))


def _send(
    endpoint: Endpoint, method: str, path: str, body: Mapping[str, Any] | None = None
) -> tuple[int, bytes]:
    """Status and body of the answer, whatever it is."""
    kind = http.client.HTTPSConnection if endpoint.scheme == "https" else http.client.HTTPConnection
    connection = kind(endpoint.host, endpoint.port, timeout=REQUEST_TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    if endpoint.api_key is not None:
        headers["Authorization"] = f"Bearer {endpoint.api_key}"
    content = None if body is None else json.dumps(body).encode()
    try:
        connection.request(method, endpoint.prefix + path, content, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except TimeoutError as error:
        raise EndpointError(
            f"{endpoint.flag} {endpoint.shown} did not answer {method} {path} within {REQUEST_TIMEOUT_S:.0f} s: "
            "is the engine overloaded? See its log"
        ) from error
    except (OSError, http.client.HTTPException) as error:
        raise EndpointError(
            f"{endpoint.flag} {endpoint.shown} can't be reached ({type(error).__name__} {error}): "
            "does the engine run, and is the address right?"
        ) from error
    finally:
        connection.close()


def _refusal(endpoint: Endpoint, what: str, status: int, body: bytes) -> EndpointError:
    said = _said(body)
    if status in (http.HTTPStatus.UNAUTHORIZED, http.HTTPStatus.FORBIDDEN):
        hint = (
            f"; is the key right? See --api-key-file and --control-api-key-file ({endpoint.flag})"
        )
    elif "logprobs" in said:
        hint = "; start the engine with --max-logprobs 20 or more"
    elif "context length" in said or "max_model_len" in said:
        hint = "; give fewer --shots, or leave out subjects with long questions by --subjects"
    elif "cache_salt" in said:
        hint = "; the cold pass needs cache_salt, which vLLM has: is this a vLLM endpoint?"
    elif status == http.HTTPStatus.NOT_FOUND:
        hint = "; is the address right, and the model's name? See also --chat"
    else:
        hint = ""
    return EndpointError(f"{endpoint.shown}: {what} was answered {status}: {said}{hint}")


def _said(body: bytes) -> str:
    """The message of an OpenAI error, or the beginning of whatever came."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        return str(error["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return _start_of(body)


def _start_of(body: bytes) -> str:
    return body.decode("utf-8", "replace")[:300].strip() or "nothing"
