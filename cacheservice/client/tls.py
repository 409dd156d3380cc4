"""Mutual TLS towards an agent: the client shows its certificate and checks the agent's.

gRPC checks the chain and that a DNS (or IP) SAN of the agent's certificate matches the host of the address, or
`TlsFiles.server_name`. Files are read whenever a channel is opened; the session keeper opens a new one some time after
they changed (see `session.py`).
"""

from __future__ import annotations

from pathlib import Path

import grpc

from cacheservice.client.values import TlsFiles
from cacheservice.errors import ConfigError


def channel_credentials(files: TlsFiles) -> grpc.ChannelCredentials:
    """Credentials of what the files hold now. Raises ConfigError naming the file that can't be read."""
    return grpc.ssl_channel_credentials(
        root_certificates=_read(files.ca, "CA certificates"),
        private_key=_read(files.key, "private key"),
        certificate_chain=_read(files.certificate, "certificate"),
    )


def stamps_of(files: TlsFiles) -> tuple[tuple[int, int, int], ...] | None:
    """Which files these are now: another value means other content. None while one of them can't be seen."""
    try:
        stats = [path.stat() for path in (files.certificate, files.key, files.ca)]
    except OSError:
        return None
    return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in stats)


def _read(path: Path, what: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"the client's {what} {path} can't be read: {error.strerror}") from error
    if b"-----BEGIN" not in content:
        raise ConfigError(f"the client's {what} {path} is no PEM file")
    return content
