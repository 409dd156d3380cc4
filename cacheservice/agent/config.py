"""What an agent is told: one frozen record, built once from flags and an optional YAML file.

The fields of `AgentConfig` are the one table: the command line, the file and `--help` are made from it. Flags win over
the file. Unknown keys of the file are errors that name the nearest field. Called by `command.py`; everything else gets
the finished record or pieces of it.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from cacheservice.errors import ConfigError

_SIZE_UNITS = {
    "": 1, "B": 1,
    "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12,
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_MAX_SOCKET_PATH = 107
"""Longest path of a unix socket (sun_path of Linux, less the final zero)."""


class Eviction(enum.Enum):
    """Which chunk goes first when room is needed."""

    S3FIFO = "S3FIFO"
    LRU = "LRU"


class HostPort(NamedTuple):
    """Where to listen, or where others find us."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_size(text: object) -> int:
    """Bytes of `2Gi`, `512MiB`, `1G` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", str(text))
    if match is None or match[2] not in _SIZE_UNITS:
        raise ValueError("is no size; write a number with a unit, as 2Gi, 512Mi or 1G")
    size = float(match[1]) * _SIZE_UNITS[match[2]]
    if size != int(size) or size < 1:
        raise ValueError("is no whole number of bytes above 0")
    return int(size)


def parse_host_port(text: object) -> HostPort:
    """`HOST:PORT`, with an IPv6 host in brackets."""
    host, colon, port = str(text).rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError("has an IPv6 host without brackets; write [HOST]:PORT")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ValueError("is no HOST:PORT; write for example 0.0.0.0:7500")
    return HostPort(host, int(port))


def _parse_count(text: object) -> int:
    if isinstance(text, bool) or not re.fullmatch(r"\d+", str(text)) or int(str(text)) < 1:
        raise ValueError("is no whole number above 0")
    return int(str(text))


def _parse_seconds(text: object) -> float:
    try:
        seconds = float(str(text))
    except ValueError:
        seconds = -1.0
    if isinstance(text, bool) or not 0 <= seconds < 10**7:
        raise ValueError("is no number of seconds of 0 or more")
    return seconds


def _parse_flag(text: object) -> bool:
    if isinstance(text, bool):
        return text
    raise ValueError("is neither true nor false")


def _parse_text(text: object) -> str:
    if not isinstance(text, str) or not text or len(text) > 512:
        raise ValueError("is no text of 1 to 512 characters")
    return text


def _parse_path(text: object) -> Path:
    return Path(_parse_text(str(text) if isinstance(text, Path) else text))


def _parse_eviction(text: object) -> Eviction:
    for policy in Eviction:
        if str(text).upper() == policy.value:
            return policy
    raise ValueError("is no eviction policy; write S3FIFO or LRU")


def _parse_uids(values: object) -> tuple[int, ...]:
    listed = values if isinstance(values, list | tuple) else [values]
    if not all(not isinstance(v, bool) and re.fullmatch(r"\d+", str(v)) for v in listed):
        raise ValueError("is no user id, a whole number of 0 or more")
    return tuple(int(str(v)) for v in listed)


def _parse_index(text: object) -> str:
    url = _parse_text(text)
    if url != "memory" and not re.match(r"(redis|rediss|unix)://", url):
        raise ValueError(
            "is no index; write memory, redis://HOST:PORT, rediss://HOST:PORT or unix://PATH"
        )
    return url


def _parse_log_level(text: object) -> str:
    level = str(text).upper()
    if level not in ("DEBUG", "INFO", "WARNING", "ERROR"):
        raise ValueError("is no log level; write DEBUG, INFO, WARNING or ERROR")
    return level


def _option(
    parse: Callable[[object], Any],
    help_text: str,
    *,
    default: Any = dataclasses.MISSING,
    shown: str = "",
) -> Any:
    """A field that is also a flag. `shown` is how `--help` prints the default; empty for none."""
    metadata = {"parse": parse, "help": help_text, "shown": shown}
    return dataclasses.field(default=default, metadata=metadata)


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentConfig:
    """Everything an agent is told. Units, defaults and reasons are in the help texts."""

    socket_dir: Path = _option(
        _parse_path,
        "Directory of agent.sock (gRPC) and arena.sock (hands the arena over); made with mode 0770 if missing. "
        "One agent per directory.",
    )
    cpu: int = _option(
        parse_size,
        "Size of the arena, with unit, as 2Gi. It is allocated in full at the start, so that it is charged to this "
        "process once and can't run out later.",
    )
    wait_for_memory_seconds: float = _option(
        _parse_seconds,
        "Seconds to wait at the start until the arena fits into the memory that cgroups and machine have left: the one "
        "before may still be mapped by engines. /readyz says what is missing; after that time the start fails.",
        default=0.0, shown="0, fails at once",
    )  # fmt: skip
    index: str = _option(
        _parse_index,
        "Where agents say what they hold: memory (this agent alone), redis://HOST:PORT/DB, rediss:// for TLS, "
        "unix://PATH. A user may be in the URL; a password belongs into --index-password-file.",
        default="memory", shown="memory",
    )  # fmt: skip
    listen: HostPort | None = _option(
        parse_host_port,
        "HOST:PORT for other nodes (gRPC over TCP). Needs --tls-cert, --tls-key and --tls-ca, or --insecure.",
        default=None, shown="unix sockets only",
    )  # fmt: skip
    advertise: HostPort | None = _option(
        parse_host_port,
        "HOST:PORT under which other agents reach --listen.",
        default=None, shown="what --listen says",
    )  # fmt: skip
    node: str = _option(
        _parse_text,
        "Name of this node in the index; keeps its number over restarts.",
        default=socket.gethostname(), shown="host name",
    )  # fmt: skip
    http: HostPort | None = _option(
        parse_host_port,
        "HOST:PORT for /metrics, /healthz, /readyz and /statusz. Plain HTTP without keys, tokens or prompts: "
        "bind it to loopback or the pod's network.",
        default=None, shown="off",
    )  # fmt: skip
    key_prefix: str = _option(
        _parse_text,
        "Prefix of all keys in Redis; one per KVCache, so that one ACL rule isolates it.",
        default="larder:", shown="larder:",
    )  # fmt: skip
    index_username_file: Path | None = _option(
        _parse_path,
        "File with the user of Redis; trailing newline ignored. Read again at each connect; no file, no user.",
        default=None, shown="the user in the URL, or Redis's default user",
    )  # fmt: skip
    index_password_file: Path | None = _option(
        _parse_path,
        "File with the password of Redis; trailing newline ignored. Read again at each connect.",
        default=None, shown="no password",
    )  # fmt: skip
    index_ca_file: Path | None = _option(
        _parse_path,
        "PEM file of the authority that signed the certificate of Redis (rediss:// only). Read again at each connect.",
        default=None, shown="the system's authorities",
    )  # fmt: skip
    index_cert_file: Path | None = _option(
        _parse_path,
        "PEM certificate of this agent for a Redis that wants one (rediss:// only). Read again at each connect.",
        default=None, shown="none",
    )  # fmt: skip
    index_key_file: Path | None = _option(
        _parse_path,
        "PEM key of --index-cert-file. Read again at each connect.",
        default=None, shown="none",
    )  # fmt: skip
    index_server_name: str | None = _option(
        _parse_text,
        "Name that is asked for in the TLS handshake and that the certificate of Redis must carry (rediss:// only).",
        default=None, shown="the host in the URL",
    )  # fmt: skip
    max_shards: int = _option(
        _parse_count,
        "Most shards held at a time; about 1 KB of memory each beside the arena.",
        default=1_000_000, shown="1000000",
    )  # fmt: skip
    max_namespaces: int = _option(
        _parse_count,
        "Most namespaces open at a time; each keeps up to 64 KiB of description.",
        default=64, shown="64",
    )  # fmt: skip
    max_sessions: int = _option(
        _parse_count,
        "Most clients at a time; each engine has one session per rank and one for its scheduler, each agent that "
        "pulls from here one. A session takes one thread.",
        default=256, shown="256",
    )  # fmt: skip
    max_calls: int = _option(
        _parse_count,
        "Most calls served at a time; three quarters of them may be waiting for chunks.",
        default=64, shown="64",
    )  # fmt: skip
    eviction: Eviction = _option(
        _parse_eviction,
        "S3FIFO (small queue of half the arena, suffix first) or LRU.",
        default=Eviction.S3FIFO, shown="S3FIFO",
    )  # fmt: skip
    insecure: bool = _option(
        _parse_flag,
        "Let --listen speak plain TCP. Whoever reaches the port can then read and store: for closed networks only.",
        default=False, shown="off",
    )  # fmt: skip
    tls_cert: Path | None = _option(
        _parse_path,
        "PEM certificate of this agent, for --listen and for calling other agents. Read again when it changes.",
        default=None, shown="none",
    )  # fmt: skip
    tls_key: Path | None = _option(
        _parse_path,
        "PEM key of --tls-cert. Read again when it changes.",
        default=None,
        shown="none",
    )
    tls_ca: Path | None = _option(
        _parse_path,
        "PEM file of the authority that clients of --listen must be signed by; each client's certificate also needs "
        "a URI SAN larder://OWNER/ROLE with role engine, agent or operator. Read again when it changes.",
        default=None, shown="none",
    )  # fmt: skip
    tls_owner: str | None = _option(
        _parse_text,
        "OWNER that the URI SAN of every client must name, as NAME or NAMESPACE/NAME; give it when one authority signs "
        "for several KVCaches.",
        default=None, shown="any owner",
    )  # fmt: skip
    tls_server_name: str | None = _option(
        _parse_text,
        "DNS name that the certificates of the other agents must carry, instead of the host of their addresses: pods "
        "are reached by addresses that no certificate can name ahead.",
        default=None, shown="the host of each address",
    )  # fmt: skip
    allow_uid: tuple[int, ...] = _option(
        _parse_uids,
        "User id that may have the arena; repeat for several. The group of the directory is the gate in any case.",
        default=(), shown="every user who can open the socket",
    )  # fmt: skip
    socket_group: str | None = _option(
        _parse_text,
        "Group (name or id) that owns directory and sockets.",
        default=None, shown="group of this process",
    )  # fmt: skip
    drain_seconds: float = _option(
        _parse_seconds,
        "Seconds that SIGTERM leaves for what is in flight and for leaving the index.",
        default=20.0, shown="20, below the 30 that Kubernetes waits",
    )  # fmt: skip
    session_seconds: float = _option(
        _parse_seconds,
        "Seconds without a ping after which a session ends, and within which a session that maps the arena must "
        "have come for it.",
        default=10.0, shown="10",
    )  # fmt: skip
    lease_seconds: float = _option(
        _parse_seconds, "Seconds that a lease of Acquire lasts.", default=30.0, shown="30"
    )
    lookup_lease_seconds: float = _option(
        _parse_seconds, "Seconds that a lease of Lookup lasts.", default=5.0, shown="5"
    )
    reservation_seconds: float = _option(
        _parse_seconds,
        "Seconds after which others may store what a client reserved and did not commit.",
        default=60.0, shown="60",
    )  # fmt: skip
    pull_seconds: float = _option(
        _parse_seconds,
        "Most seconds that fetching one batch of shards from another agent may take.",
        default=10.0, shown="10",
    )  # fmt: skip
    log_level: str = _option(
        _parse_log_level, "DEBUG, INFO, WARNING or ERROR.", default="INFO", shown="INFO"
    )

    @property
    def agent_socket(self) -> Path:
        """The gRPC socket."""
        return self.socket_dir / "agent.sock"

    @property
    def arena_socket(self) -> Path:
        """The socket that hands the arena over."""
        return self.socket_dir / "arena.sock"

    @property
    def speaks_tls(self) -> bool:
        """Whether the TCP listener, if any, asks for certificates."""
        return self.tls_cert is not None


def build_config(values: Mapping[str, object], *, file: Path | None = None) -> AgentConfig:
    """Merge `values` (flags that were given, by field name) over `file`, check them, and freeze the result.

    Raises ConfigError whose message names the field, what is wrong and what to write.
    """
    merged: dict[str, object] = _read_file(file) if file is not None else {}
    merged.update(values)
    parsed: dict[str, Any] = {}
    for field in dataclasses.fields(AgentConfig):
        if field.name not in merged:
            if field.default is dataclasses.MISSING:
                raise ConfigError(
                    f"{flag_of(field.name)} is missing; give it, or {field.name} in --config FILE"
                )
            continue
        value = merged[field.name]
        try:
            parsed[field.name] = field.metadata["parse"](value)
        except ValueError as error:
            raise ConfigError(f"{flag_of(field.name)}: {_shown(value)} {error}") from error
    config = AgentConfig(**parsed)
    _check_together(config)
    return config


def _shown(value: object) -> str:
    """A value for messages, without the password that a URL may hold."""
    return re.sub(r"://[^@/]*@", "://…@", repr(value))


def flag_of(field_name: str) -> str:
    """`socket_dir` → `--socket-dir`."""
    return "--" + field_name.replace("_", "-")


def nearest(word: str, known: list[str]) -> str:
    """` Did you mean X?` when something known is near, else the list of what is known."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else "known are " + ", ".join(known)


def _read_file(file: Path) -> dict[str, object]:
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {file}: can't be read: {error}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {file}: is no YAML: {' '.join(str(error).split())}") from error
    if document is None:
        return {}
    if not isinstance(document, dict):
        raise ConfigError(f"--config {file}: must be a mapping of fields, as `cpu: 2Gi`")
    known = [field.name for field in dataclasses.fields(AgentConfig)]
    for key in document:
        if key not in known:
            hint = nearest(str(key).replace("-", "_"), known)
            raise ConfigError(f"--config {file}: unknown field {key!r}; {hint}")
    return dict(document)


def _check_together(config: AgentConfig) -> None:
    tls_files = {
        "--tls-cert": config.tls_cert,
        "--tls-key": config.tls_key,
        "--tls-ca": config.tls_ca,
    }
    missing = [flag for flag, path in tls_files.items() if path is None]
    if missing and len(missing) < len(tls_files):
        raise ConfigError(
            f"{', '.join(missing)} missing; TLS needs all of --tls-cert, --tls-key and --tls-ca"
        )
    if config.tls_server_name is not None and missing:
        raise ConfigError("--tls-server-name needs --tls-cert, --tls-key and --tls-ca")
    if config.insecure and not missing:
        raise ConfigError("--insecure contradicts --tls-cert; leave one of them out")
    if config.listen is not None and missing and not config.insecure:
        raise ConfigError(
            f"--listen {config.listen} needs --tls-cert, --tls-key and --tls-ca so that only known clients get in, "
            "or --insecure"
        )
    if config.advertise is not None and config.listen is None:
        raise ConfigError(
            "--advertise is of use only with --listen; give --listen or leave --advertise out"
        )
    is_wildcard = config.listen is not None and config.listen.host in ("0.0.0.0", "::")
    if is_wildcard and config.advertise is None and config.index != "memory":
        raise ConfigError(
            f"--listen {config.listen} is no address that others can call; add --advertise HOST:PORT with this node's"
        )
    for flag, path in tls_files.items():
        if path is not None and not path.is_file():
            raise ConfigError(f"{flag} {path}: there is no such file")
    longest = max(str(config.agent_socket), str(config.arena_socket), key=len)
    if len(longest.encode()) > _MAX_SOCKET_PATH:
        raise ConfigError(
            f"--socket-dir {config.socket_dir}: {longest} has more than {_MAX_SOCKET_PATH} bytes, the most that a "
            "unix socket may have; choose a shorter directory"
        )
