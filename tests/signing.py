"""Certificates for tests: an authority that signs what it is asked for."""

from __future__ import annotations

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

LOOPBACK: tuple[x509.GeneralName, ...] = (
    x509.DNSName("localhost"),
    x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
)


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificate and key, as files."""

    cert: Path
    key: Path


class Authority:
    """Signs certificates with SANs."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.ca = folder / f"{name}.pem"
        self.ca.write_bytes(self._sign(self._name, self._key.public_key(), [], is_ca=True))

    def issue(self, file: str, *uris: str, dns: str | None = None) -> Pem:
        """A certificate with these URI SANs, for loopback, or for the name `dns` alone."""
        key = ec.generate_private_key(ec.SECP256R1())
        sans: list[x509.GeneralName] = [
            *([] if dns else LOOPBACK),
            *([x509.DNSName(dns)] if dns else []),
            *map(x509.UniformResourceIdentifier, uris),
        ]
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, file)])
        pem = Pem(self._folder / f"{file}.crt", self._folder / f"{file}.key")
        pem.key.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        pem.cert.write_bytes(self._sign(subject, key.public_key(), sans, is_ca=False))
        return pem

    def _sign(
        self,
        subject: x509.Name,
        public: ec.EllipticCurvePublicKey,
        sans: list[x509.GeneralName],
        *,
        is_ca: bool,
    ) -> bytes:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(public)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(minutes=5))
            .not_valid_after(now + dt.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=is_ca, path_length=None), critical=True)
        )
        if sans:
            builder = builder.add_extension(x509.SubjectAlternativeName(sans), critical=False)
        return builder.sign(self._key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)
