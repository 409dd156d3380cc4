"""Who may call what over TCP: mutual TLS, and the URI SAN of the caller's certificate.

A certificate names its owner and role as `larder://OWNER/ROLE`, role engine, agent or operator; OWNER is a name, or
namespace/name of a KVCache. Engines and agents
may use the cache, operators may also use the admin service. On the unix socket whoever can open it may do both. Files
are read again when they change, without a restart. Called by `serve.py`; clients check the DNS SAN
(`cacheservice/client/tls.py`).
"""

from __future__ import annotations

import logging
import re
import threading
from pathlib import Path

import grpc

from cacheservice.errors import ConfigError, Forbidden

_log = logging.getLogger(__name__)

_URI = re.compile(r"larder://(?P<owner>[^/]+(?:/[^/]+)?)/(?P<role>engine|agent|operator)")
_ADMIN = "/cacheservice.v1.AdminService/"
_CACHE = "/cacheservice.v1.CacheService/"
_SAN_PROPERTIES = ("x509_subject_alternative_name", "peer_uri")

Context = grpc.ServicerContext


class ServerCertificates:
    """Gives gRPC the server's credentials anew whenever a file changed. Thread-safe."""

    def __init__(self, *, cert: Path, key: Path, ca: Path) -> None:
        self._paths = (cert, key, ca)
        self._lock = threading.Lock()
        self._stamps: tuple[tuple[int, int, int], ...] = ()

    def credentials(self) -> grpc.ServerCredentials:
        """Credentials for `add_secure_port`. ConfigError when a file can't be used."""
        self._stamps = self._stat()
        return grpc.dynamic_ssl_server_credentials(
            self._load(),
            self._fetch,  # type: ignore[arg-type] # None is allowed: grpc documents it, the stubs do not
            require_client_authentication=True,
        )

    def _fetch(self) -> grpc.ServerCertificateConfiguration | None:
        """Asked by gRPC at every handshake; None keeps what it has."""
        with self._lock:
            try:
                stamps = self._stat()
                if stamps == self._stamps:
                    return None
                loaded = self._load()
            except ConfigError as error:
                _log.warning("new certificates can't be used, the old ones stay error=%s", error)
                return None
            self._stamps = stamps
            _log.info("certificates read again cert=%s", self._paths[0])
            return loaded

    def _stat(self) -> tuple[tuple[int, int, int], ...]:
        try:
            stats = [path.stat() for path in self._paths]
        except OSError as error:
            raise ConfigError(f"TLS file can't be read: {error}") from error
        return tuple((s.st_mtime_ns, s.st_ino, s.st_size) for s in stats)

    def _load(self) -> grpc.ServerCertificateConfiguration:
        try:
            cert, key, ca = (path.read_bytes() for path in self._paths)
        except OSError as error:
            raise ConfigError(f"TLS file can't be read: {error}") from error
        for path, content in zip(self._paths, (cert, key, ca), strict=True):
            if b"-----BEGIN" not in content:
                raise ConfigError(f"{path} is no PEM file")
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=ca)


class CallerCheck:
    """Decides which callers may call which method. Stateless."""

    def __init__(self, *, speaks_tls: bool, owner: str | None) -> None:
        """`owner` None: any owner that the authority signed for."""
        self._speaks_tls = speaks_tls
        self._owner = owner

    def check(self, method: str, context: Context) -> None:
        """Raise Forbidden when the caller may not call `method`. Health and reflection are open to all who connect."""
        if str(context.peer()).startswith("unix:"):
            return
        is_admin = method.startswith(_ADMIN)
        if not is_admin and not method.startswith(_CACHE):
            return
        if not self._speaks_tls:
            if is_admin:
                raise Forbidden(
                    "the admin service is not served over plain TCP; use the agent's unix socket, or TLS with an "
                    "operator's certificate"
                )
            return
        role = self._role(context)
        if is_admin and role != "operator":
            raise Forbidden(
                "the admin service over TCP is for operators; use a certificate with the URI SAN larder://OWNER/operator"
            )

    def _role(self, context: Context) -> str:
        identities = []
        auth = context.auth_context()
        for name in _SAN_PROPERTIES:
            identities += [bytes(value).decode(errors="replace") for value in auth.get(name, [])]
        for identity in identities:
            match = _URI.fullmatch(identity)
            if match is not None and self._owner in (None, match["owner"]):
                return match["role"]
        owner = self._owner or "OWNER"
        raise Forbidden(
            f"the certificate has no URI SAN larder://{owner}/ROLE with role engine, agent or operator; issue one"
        )
