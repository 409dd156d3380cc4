"""From what the user wrote after `--index` to an index.

Called by the agent's and the CLI's start. Nothing is connected yet when it returns: an unreachable Redis is a state of
the index (`Index.status`), not a failure to start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from cacheservice.errors import ConfigError
from cacheservice.index.location import RedisTls, parse_location
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.index.port import Index
from cacheservice.index.redis_index import RedisIndex

MEMORY = "memory"
DEFAULT_KEY_PREFIX = "larder:"
MAX_PREFIX_BYTES = 64


def build_index(
    url_or_memory: str,
    *,
    key_prefix: str = DEFAULT_KEY_PREFIX,
    username: str | None = None,
    username_file: Path | None = None,
    password_file: Path | None = None,
    tls_ca: Path | None = None,
    tls_cert: Path | None = None,
    tls_key: Path | None = None,
    tls_server_name: str | None = None,
    timeout_s: float = 0.02,
    write_timeout_s: float = 1.0,
    entry_ttl_s: float = 3600.0,
    memory_store: MemoryIndexStore | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Index:
    """The index that `url_or_memory` names: `memory`, or a URL as `location.py` describes.

    timeout_s: a lookup's, from its call to its answer, waiting for a connection included.
    write_timeout_s: of connecting and of all other calls.
    entry_ttl_s: after which Redis forgets what nobody announced again; agents do so at half of it. At least 2.
    memory_store: what `memory` shares with other agents of this process; None makes its own.

    ConfigError says what is wrong; it never quotes a password.
    """
    if url_or_memory == MEMORY:
        return MemoryIndex(memory_store)
    encoded = key_prefix.encode(errors="surrogateescape")
    is_plain = (
        key_prefix.isascii() and key_prefix.isprintable() and not set(key_prefix) & set("{} *?[]\\")
    )
    if not 0 < len(encoded) <= MAX_PREFIX_BYTES or not is_plain:
        raise ConfigError(
            f"the key prefix {key_prefix!r} can't be used: give 1 to {MAX_PREFIX_BYTES} ASCII characters without "
            "spaces, braces and the wildcards * ? [ ] \\, for example larder:"
        )
    if tls_key is not None and tls_cert is None:
        raise ConfigError("a TLS key for Redis is given without its certificate: give both")
    if timeout_s <= 0 or write_timeout_s <= 0 or entry_ttl_s < 2:
        raise ConfigError(
            "the index's time-outs must be above 0, and the TTL of entries at least 2 s"
        )
    if tls_cert is not None and tls_key is None:
        raise ConfigError("a TLS certificate for Redis is given without its key: give both")
    tls = RedisTls(tls_ca, tls_cert, tls_key, tls_server_name)
    location = parse_location(
        url_or_memory,
        username=username,
        username_file=username_file,
        password_file=password_file,
        tls=tls if tls != RedisTls() else None,
    )
    return RedisIndex(
        location,
        key_prefix=key_prefix,
        timeout_s=timeout_s,
        write_timeout_s=write_timeout_s,
        entry_ttl_s=entry_ttl_s,
        clock=clock,
    )
