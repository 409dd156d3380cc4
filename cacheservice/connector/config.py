"""What the user can say to the connector: the closed list of keys of `kv_connector_extra_config`.

Parsed once per half, at construction. Called by: connector.py. An unknown key, a wrong type or a value out of bounds is
a ConfigError that names the key and the remedy, so that a typing error never becomes a silent default.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cacheservice.errors import ConfigError

MAX_CHUNK_TOKENS_OVERRIDE = 65536


@dataclass(frozen=True, slots=True)
class ConnectorDeadlines:
    """How long things may take, in seconds (design, section 5). Each has a key of its own in milliseconds."""

    lookup_s: float = 0.1
    """From the start of a lookup until the request goes on without an answer."""
    pending_s: float = 1.0
    """How long a request waits for chunks that another engine is storing right now, without a hand-over."""
    hand_over_s: float = 5.0
    """Upper bound of what a hand-over can ask for with its `wait_ms`."""
    acquire_s: float = 2.0
    reserve_s: float = 2.0
    commit_s: float = 2.0
    load_s: float = 10.0
    """A whole load on one rank, waiting in our queue included."""
    reconnect_s: float = 2.0
    """Upper bound of the pause between two attempts to reach the agent."""
    pin_s: float = 15.0
    """How long the blocks of a save may stay pinned; the rank gives the save up before that."""


DEADLINE_KEYS: dict[str, str] = {
    "lookup_ms": "lookup_s",
    "pending_ms": "pending_s",
    "hand_over_ms": "hand_over_s",
    "acquire_ms": "acquire_s",
    "reserve_ms": "reserve_s",
    "commit_ms": "commit_s",
    "load_ms": "load_s",
    "reconnect_ms": "reconnect_s",
    "pin_ms": "pin_s",
}
"""Key of the extra config to field of ConnectorDeadlines."""

MAX_DEADLINE_MS = 60_000

KEYS = (
    "socket_dir",
    "address",
    "tokens_per_chunk",
    "tensor_parallel_sizes",
    "salt",
    "role",
    "engine_name",
    "checksums",
    "tls_cert",
    "tls_key",
    "tls_ca",
    "tls_server_name",
    *DEADLINE_KEYS,
)


@dataclass(frozen=True, slots=True)
class ConnectorConfig:
    """The parsed extra config."""

    socket_dir: Path | None
    """Directory of the node's agent.sock and arena.sock. Exactly one of this and `address` is set."""
    address: str | None
    """host:port of an agent: the stream path, for where shared memory can't be had."""
    tokens_per_chunk: int | None = None
    """None: chosen from the model (design, section 6)."""
    tensor_parallel_sizes: tuple[int, ...] | None = None
    """Sizes of all engines that share the cache; None: this engine's own."""
    salt: str = ""
    """Goes into the namespace: another salt is another cache. A fleet is reset by changing it."""
    role: str = "both"
    """prefill, decode or both; a label for status pages and metrics, every role stores and retrieves."""
    engine_name: str = ""
    """Shown by the agent, with `-dpN` for rank N of a data parallel group; empty: made of host and process id."""
    checksums: str = "always"
    """always, or remote: only for bytes that crossed a machine."""
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    tls_server_name: str | None = None
    """DNS name that the agent's certificate must carry; None: the host of `address`."""
    deadlines: ConnectorDeadlines = field(default_factory=ConnectorDeadlines)


def parse_extra_config(
    extra: Mapping[str, Any], *, kv_role: str | None, engine_id: str | None = None
) -> ConnectorConfig:
    """Check `extra` key by key; `kv_role` and `engine_id` are those of the transfer config. Raises ConfigError."""
    for key in extra:
        if key not in KEYS:
            near = difflib.get_close_matches(str(key), KEYS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(KEYS)}"
            raise ConfigError(f"kv_connector_extra_config: unknown key {key!r}{hint}")
    socket_dir, address = _text(extra, "socket_dir"), _text(extra, "address")
    if bool(socket_dir) == bool(address):
        raise ConfigError(
            "kv_connector_extra_config: set exactly one of 'socket_dir' (directory of this node's agent sockets) "
            "and 'address' (host:port of an agent)"
        )
    if address and not _is_host_port(address):
        raise ConfigError(f"kv_connector_extra_config: address={address!r} is not host:port")
    tls = {key: _text(extra, key) for key in ("tls_cert", "tls_key", "tls_ca")}
    if any(tls.values()) and not all(tls.values()):
        missing = ", ".join(key for key, value in tls.items() if not value)
        raise ConfigError(
            f"kv_connector_extra_config: TLS needs all three files; missing: {missing}"
        )
    if any(tls.values()) and not address:
        raise ConfigError(
            "kv_connector_extra_config: tls_cert, tls_key and tls_ca go with 'address'; a socket directory needs none"
        )
    server_name = _text(extra, "tls_server_name")
    if server_name and not any(tls.values()):
        raise ConfigError(
            "kv_connector_extra_config: tls_server_name goes with tls_cert, tls_key and tls_ca"
        )
    return ConnectorConfig(
        socket_dir=Path(socket_dir) if socket_dir else None,
        address=address or None,
        tokens_per_chunk=_integer(extra, "tokens_per_chunk", low=1, high=MAX_CHUNK_TOKENS_OVERRIDE),
        tensor_parallel_sizes=_sizes(extra),
        salt=_text(extra, "salt"),
        role=_choice(extra, "role", ("prefill", "decode", "both"), _role_of(kv_role)),
        engine_name=_name_of_rank(_text(extra, "engine_name"), engine_id),
        checksums=_choice(extra, "checksums", ("always", "remote"), "always"),
        tls_cert=_path(tls["tls_cert"]),
        tls_key=_path(tls["tls_key"]),
        tls_ca=_path(tls["tls_ca"]),
        tls_server_name=server_name or None,
        deadlines=_deadlines(extra),
    )


def _name_of_rank(name: str, engine_id: str | None) -> str:
    """Engines of one data parallel group have the same extra config; vLLM tells them apart by the end of engine_id
    (vLLM 0.32, v1/engine/core.py `run_engine_core`)."""
    rank = re.search(r"_dp(\d+)$", engine_id or "")
    return f"{name}-dp{rank[1]}" if name and rank else name


def _role_of(kv_role: str | None) -> str:
    return {"kv_producer": "prefill", "kv_consumer": "decode"}.get(kv_role or "", "both")


def _deadlines(extra: Mapping[str, Any]) -> ConnectorDeadlines:
    given = {}
    for key, name in DEADLINE_KEYS.items():
        milliseconds = _integer(extra, key, low=1, high=MAX_DEADLINE_MS)
        if milliseconds is not None:
            given[name] = milliseconds / 1000
    deadlines = ConnectorDeadlines(**given)
    if deadlines.hand_over_s > 5:
        raise ConfigError("kv_connector_extra_config: hand_over_ms is at most 5000")
    return deadlines


def _text(extra: Mapping[str, Any], key: str) -> str:
    value = extra.get(key, "")
    if not isinstance(value, str):
        raise ConfigError(f"kv_connector_extra_config: {key}={value!r} must be a string")
    return value


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def _choice(extra: Mapping[str, Any], key: str, choices: tuple[str, ...], default: str) -> str:
    value = extra.get(key, default)
    if value not in choices:
        raise ConfigError(
            f"kv_connector_extra_config: {key}={value!r} must be one of {', '.join(choices)}"
        )
    return str(value)


def _integer(extra: Mapping[str, Any], key: str, *, low: int, high: int) -> int | None:
    if key not in extra:
        return None
    value = extra[key]
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ConfigError(
            f"kv_connector_extra_config: {key}={value!r} must be a whole number from {low} to {high}"
        )
    return value


def _sizes(extra: Mapping[str, Any]) -> tuple[int, ...] | None:
    if "tensor_parallel_sizes" not in extra:
        return None
    value = extra["tensor_parallel_sizes"]
    is_list = isinstance(value, list | tuple) and bool(value)
    if not is_list or not all(
        isinstance(v, int) and not isinstance(v, bool) and 1 <= v <= 1024 for v in value
    ):
        raise ConfigError(
            f"kv_connector_extra_config: tensor_parallel_sizes={value!r} must be a list of sizes, such as [2, 4]"
        )
    return tuple(sorted(set(value)))


def _is_host_port(address: str) -> bool:
    host, _, port = address.rpartition(":")
    return bool(host) and port.isdecimal() and 0 < int(port) < 65536
