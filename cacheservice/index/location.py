"""Where Redis is and how to be let in: parsed from a URL and files, once, at start. No network here.

    redis://[[USER]:PASSWORD@]HOST[:PORT][/DB]     rediss:// the same over TLS     unix://[[USER]:PASSWORD@]/PATH[?db=N]

Invariant: nothing that is printed from a `RedisLocation` (repr, str, `label`) contains the password.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, unquote, urlsplit

from cacheservice.errors import ConfigError

DEFAULT_PORT = 6379
MAX_PASSWORD_BYTES = 65_536
MAX_USERNAME_BYTES = 1024


@dataclass(frozen=True, slots=True)
class RedisTls:
    """PEM files, read again at each connect; None of `ca` means the system's certificates."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    """Name that is asked for (SNI) and that the certificate must carry; None means the host of the URL."""

    def build_context(self) -> ssl.SSLContext:
        """Context that checks the server's certificate and name; OSError (SSLError among them) for a bad file."""
        context = ssl.create_default_context(cafile=None if self.ca is None else str(self.ca))
        if self.cert is not None:
            context.load_cert_chain(str(self.cert), None if self.key is None else str(self.key))
        return context


@dataclass(frozen=True, slots=True)
class RedisLocation:
    """One Redis server and who we are to it."""

    host: str
    """Empty for a unix socket."""
    port: int
    path: str
    """Path of a unix socket; empty for TCP."""
    database: int = 0
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    password_file: Path | None = None
    """Read again at each connect; trailing line breaks are cut. Takes the place of `password`."""
    username_file: Path | None = None
    """As `password_file`, for `username`; while it is missing there is no user: a mounted Secret may have none."""
    tls: RedisTls | None = None

    @property
    def label(self) -> str:
        """The address as messages show it: no password."""
        who = f"{self.username}@" if self.username else ""
        database = f"/{self.database}" if self.database else ""
        if self.path:
            return f"unix://{who}{self.path}" + (f"?db={self.database}" if self.database else "")
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'rediss' if self.tls else 'redis'}://{who}{host}:{self.port}{database}"

    def read_password(self) -> str | None:
        """The password to use now, None for none; OSError or UnicodeDecodeError when its file can't be read."""
        if self.password_file is None:
            return self.password
        return _read_line(self.password_file, MAX_PASSWORD_BYTES)

    def with_user(self) -> RedisLocation:
        """The same with the user of now, from the file if there is one; OSError or UnicodeDecodeError as above."""
        if self.username_file is None:
            return self
        try:
            user = _read_line(self.username_file, MAX_USERNAME_BYTES)
        except FileNotFoundError:
            user = ""
        return replace(self, username=user or None)


def _read_line(path: Path, max_bytes: int) -> str:
    with path.open("rb") as file:
        return file.read(max_bytes).decode().rstrip("\r\n")


def parse_location(
    url: str,
    *,
    username: str | None = None,
    username_file: Path | None = None,
    password_file: Path | None = None,
    tls: RedisTls | None = None,
) -> RedisLocation:
    """The location that a URL names; `username` or its file and `password_file` add to a URL that has none.

    ConfigError, which never quotes the URL's password, for an unknown scheme or parameter, a password given twice, or
    TLS files for a URL without TLS.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise ConfigError("the index's URL can't be parsed: write redis://HOST:PORT") from None
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise ConfigError(
            f"the index's URL begins with {parts.scheme or 'no scheme'!r}: write memory, redis://HOST:PORT, "
            "rediss://HOST:PORT or unix:///PATH"
        )
    user = unquote(parts.username) if parts.username else None
    password = unquote(parts.password) if parts.password else None
    if user is not None and username is not None and user != username:
        raise ConfigError("the index's user is given twice: in the URL and beside it; keep one")
    if username_file is not None and (user is not None or username is not None):
        raise ConfigError("the index's user is given twice: as a name and as a file; keep the file")
    if password is not None and password_file is not None:
        raise ConfigError(
            "the index's password is given twice: in the URL and as a file; keep the file"
        )
    if tls is not None and parts.scheme != "rediss":
        raise ConfigError(
            "TLS files are given but the index's URL is not rediss://: change its scheme"
        )
    if parts.fragment:
        raise ConfigError("the index's URL has a '#': write it as %23")
    who = user or username
    if parts.scheme == "unix":
        return _unix_location(parts, who, password, password_file, username_file)
    if not parts.hostname or parts.query:
        raise ConfigError(
            f"the index's URL must be {parts.scheme}://HOST[:PORT][/DB], without parameters"
        )
    return RedisLocation(
        host=parts.hostname,
        port=DEFAULT_PORT if port is None else port,
        path="",
        database=_database(parts.path.strip("/")),
        username=who,
        password=password,
        password_file=password_file,
        username_file=username_file,
        tls=(tls or RedisTls()) if parts.scheme == "rediss" else None,
    )


def _unix_location(
    parts: SplitResult,
    who: str | None,
    password: str | None,
    password_file: Path | None,
    username_file: Path | None,
) -> RedisLocation:
    query = parse_qs(parts.query)
    path = unquote(parts.path)
    if parts.hostname or not path.startswith("/") or query.keys() - {"db"}:
        raise ConfigError(
            "the index's URL must be unix:///ABSOLUTE/PATH[?db=N], with three slashes"
        )
    database = _database(query.get("db", [""])[-1])
    return RedisLocation(
        host="", port=0, path=path, database=database, username=who, password=password,
        password_file=password_file, username_file=username_file,
    )  # fmt: skip


def _database(text: str) -> int:
    if not text:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 6):
        raise ConfigError(f"the index's database {text!r} is no number: write redis://HOST:PORT/0")
    return int(text)
