"""What is wrong with Redis, in one sentence with its remedy. Pure: foreign errors and replies in, `RedisTrouble` out.

Invariant: no message contains a password; they are made of the location's label and of what Redis or the system said.
"""

from __future__ import annotations

import ssl
from pathlib import Path

from cacheservice.errors import IndexUnavailable
from cacheservice.index.location import RedisLocation
from cacheservice.index.port import IndexHealth, IndexReason

ACL_COMMANDS = "+mget +get +set +del +pexpire +expire +evalsha +script|load +info +select"
"""Everything an agent sends or its scripts call; AUTH needs no permission."""


class RedisTrouble(IndexUnavailable):
    """IndexUnavailable that knows how the index is; `lost_connection`: asking on a new one may help; `is_late`: nothing
    is known but that the answer took too long."""

    def __init__(
        self,
        health: IndexHealth,
        reason: IndexReason,
        message: str,
        *,
        lost_connection: bool = False,
        is_late: bool = False,
    ) -> None:
        super().__init__(message)
        self.health = health
        self.reason = reason
        self.lost_connection = lost_connection
        self.is_late = is_late


def acl_line(key_prefix: str, username: str | None) -> str:
    """The command that gives a user what an agent needs, and no more."""
    return f"ACL SETUSER {username or 'larder'} on >PASSWORD ~{key_prefix}* {ACL_COMMANDS}"


def timed_out(location: RedisLocation, timeout_s: float, what: str) -> RedisTrouble:
    """Redis did not answer in time."""
    return RedisTrouble(
        IndexHealth.UNREACHABLE,
        IndexReason.UNREACHABLE,
        f"Redis at {location.label} did not {what} within {timeout_s * 1000:.0f} ms: it is stopped, overloaded or too "
        "far; look at its SLOWLOG and the network, or raise the index's time-out",
        is_late=True,
    )


def lost(location: RedisLocation, what: str, *, is_first_call: bool = False) -> RedisTrouble:
    """The connection ended or carried something that is not Redis's protocol.

    With TLS 1.3 a server refuses a client's certificate, or its absence, during the first call only.
    """
    if is_first_call and location.tls is not None:
        return RedisTrouble(
            IndexHealth.UNREACHABLE,
            IndexReason.TLS_FAILED,
            f"TLS to Redis at {location.label} failed ({what}): does it want a client certificate, or another one?",
            lost_connection=True,
        )
    return RedisTrouble(
        IndexHealth.UNREACHABLE,
        IndexReason.UNREACHABLE,
        f"the connection to Redis at {location.label} was lost ({what}): if it stays so, see whether Redis runs there, "
        "and whether it wants TLS (rediss://)",
        lost_connection=True,
    )


def not_connected(location: RedisLocation, error: OSError | ValueError) -> RedisTrouble:
    """Connecting failed: network, file or TLS."""
    said = str(error) or type(error).__name__
    if isinstance(error, ssl.SSLCertVerificationError):
        return RedisTrouble(
            IndexHealth.UNREACHABLE,
            IndexReason.TLS_FAILED,
            f"TLS to Redis at {location.label} failed: its certificate is not trusted "
            f"({error.verify_message or said}); give the CA that signed it, and use the host name that it was issued "
            "for",
        )
    if isinstance(error, ssl.SSLError):
        return RedisTrouble(
            IndexHealth.UNREACHABLE,
            IndexReason.TLS_FAILED,
            f"TLS to Redis at {location.label} failed ({error.reason or said}): does it speak TLS at that port (else "
            "use redis://), and does it want a client certificate?",
        )
    return RedisTrouble(
        IndexHealth.UNREACHABLE,
        IndexReason.UNREACHABLE,
        f"Redis at {location.label} can't be reached ({said}): start it, or correct the index's address",
    )


def unreadable_credential(
    location: RedisLocation, what: str, path: Path | None, error: OSError | UnicodeDecodeError
) -> RedisTrouble:
    """The file of user or password (`what`) can't be read."""
    said = (error.strerror or str(error)) if isinstance(error, OSError) else "no UTF-8 text"
    return RedisTrouble(
        IndexHealth.REFUSING, IndexReason.AUTH_FAILED,
        f"the {what} file {path} for Redis at {location.label} can't be read ({said}): create it or correct its path; "
        "it is read again at each connect",
    )  # fmt: skip


def unreadable_certificates(location: RedisLocation, error: OSError) -> RedisTrouble:
    """A TLS file is missing or no PEM of its kind."""
    tls = location.tls
    files = (
        ""
        if tls is None
        else ", ".join(str(path) for path in (tls.ca, tls.cert, tls.key) if path is not None)
    )
    return RedisTrouble(
        IndexHealth.REFUSING,
        IndexReason.TLS_FAILED,
        f"the TLS files for Redis at {location.label} can't be used ({files}: {error.strerror or error}): they must be "
        "readable PEM, the key that of the certificate; they are read again at each connect",
    )


def refused(location: RedisLocation, reply: str, key_prefix: str) -> RedisTrouble:
    """Redis answered with an error."""
    where = f"Redis at {location.label}"
    refusing = IndexHealth.REFUSING
    word = reply.split(" ", 1)[0]
    if word == "WRONGPASS" or "invalid password" in reply or "invalid username-password" in reply:
        return RedisTrouble(
            refusing,
            IndexReason.AUTH_FAILED,
            f"{where} refuses the user or password (WRONGPASS): correct the user and the password, or their files",
        )
    if word == "NOAUTH":
        return RedisTrouble(
            refusing,
            IndexReason.AUTH_FAILED,
            f"{where} wants a password (NOAUTH): give one in the URL or as a password file",
        )
    if "AUTH" in reply and "without any password configured" in reply:
        return RedisTrouble(
            refusing,
            IndexReason.AUTH_FAILED,
            f"{where} has no password but one was given: leave it out, or set requirepass there",
        )
    if word == "NOPERM" or any(
        text in reply
        for text in ("NOPERM", "ACL failure", "can't run this command", "can't access at least one")
    ):
        return RedisTrouble(
            refusing,
            IndexReason.PERMISSION_DENIED,
            f"{where} denies what the index needs (NOPERM: {_short(reply)}): run "
            f"`{acl_line(key_prefix, location.username)}` there",
        )
    if word == "OOM" or "-OOM" in reply or "'maxmemory'" in reply:
        return RedisTrouble(
            refusing,
            IndexReason.FULL,
            f"{where} is full (OOM under noeviction): raise its maxmemory, or set maxmemory-policy allkeys-lru; until "
            "then new chunks are not announced",
        )
    if word in ("LOADING", "BUSY", "MASTERDOWN", "TRYAGAIN") or "max number of clients" in reply:
        return RedisTrouble(
            IndexHealth.UNREACHABLE,
            IndexReason.UNREACHABLE,
            f"{where} can't serve now ({_short(reply)}): it should pass; else look at its log",
        )
    if word == "READONLY" or "-READONLY" in reply:
        return RedisTrouble(
            refusing,
            IndexReason.REFUSED,
            f"{where} is a read-only replica: give the address of its primary",
        )
    if word in ("MOVED", "ASK", "CROSSSLOT", "CLUSTERDOWN"):
        return RedisTrouble(
            refusing,
            IndexReason.REFUSED,
            f"{where} is a Redis Cluster, which is not supported: use one primary",
        )
    return RedisTrouble(
        refusing,
        IndexReason.REFUSED,
        f"{where} refuses ({_short(reply)}): Redis 6.2 or newer is needed; look at its log",
    )


def _short(reply: str) -> str:
    return reply if len(reply) <= 200 else reply[:200] + "…"
