"""The authority of a KVCache and its certificates: what is to be in their Secrets now, and when to ask again.

An authority signs two leaves: agent (server and client) and engine (client). Each has the URI SAN
larder://NAMESPACE/NAME/ROLE, by which servers tell who calls; the agent's has the DNS SAN that clients check too. The
role operator, which agents know for their admin service over TCP, gets none: see docs/decisions/0010.

A leaf is renewed after two thirds of its life, at once, since the authority stays. An authority, which lives ten times
as long, is changed after two thirds of its own, in three steps, because a pod may see a changed Secret as late as
`secret_refresh_s` after the change:

    1 trust both   every bundle gets the new authority, leaves stay
    2 new leaves   leaves are signed by the new authority, bundles keep both
    3 drop old     bundles lose the old authority

Invariants: between two steps lie at least twice `secret_refresh_s`, so at every moment each pod that holds material up
to `secret_refresh_s` old verifies each other one; the same stored data with no step due gives the same data again, byte
by byte. All state is in the data of the authority's Secret. Planning reads no clock; keys and serial numbers are random
and come from `new_key` and the signing functions below. Called by the operator's edge, which stores what comes out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from cacheoperator import names
from cacheoperator.refs import KeyPair, TlsMaterial
from cacheoperator.settings import Settings

ROLES = ("agent", "engine")
AUTHORITY_LIFETIMES = 10
"""How many lives of a leaf an authority lasts."""
SHORTEST_LIFETIME_REFRESHES = 6
"""A leaf lives at least this many times `secret_refresh_s`: its last third must be enough to be seen everywhere."""
WAIT_REFRESHES = 2
CLOCK_SKEW = timedelta(minutes=5)
"""Certificates begin this much earlier, for machines whose clock is late."""

_AUTHORITY, _NEXT, _PREVIOUS = "authority", "next", "previous"
_SINCE = "since"

MakeKey = Callable[[], ec.EllipticCurvePrivateKey]


def new_key() -> ec.EllipticCurvePrivateKey:
    """A fresh key, P-256."""
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True, slots=True)
class AuthorityPlan:
    """`material` is for Refs.tls; `steps` are what was done, in words for a log, empty when nothing was due; at `due`
    the next step is."""

    material: TlsMaterial
    steps: tuple[str, ...]
    due: datetime


@dataclass(frozen=True, slots=True)
class _State:
    """`next_authority` is there between steps 1 and 2, `previous` (a certificate) between 2 and 3; `since` is the time
    of the newest step while one of them is."""

    authority: KeyPair
    next_authority: KeyPair | None = None
    previous: str | None = None
    since: datetime | None = None
    leaves: Mapping[str, KeyPair] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Times:
    now: datetime
    leaf: timedelta
    authority: timedelta
    wait: timedelta


def plan(
    stored: Mapping[str, str] | None, *, now: datetime, name: str, namespace: str, settings: Settings,
    make_key: MakeKey = new_key,
) -> AuthorityPlan:  # fmt: skip
    """What the Secrets of KVCache `name` are to hold at `now` (with a time zone).

    `stored` is the data of its authority's Secret, None when there is none. What can't be read, or has expired, is
    replaced at once and without steps: nothing verifies by it any more.
    """
    refresh = timedelta(seconds=settings.secret_refresh_s)
    leaf = max(
        timedelta(seconds=settings.certificate_lifetime_s), SHORTEST_LIFETIME_REFRESHES * refresh
    )
    times = _Times(
        now=now.astimezone(UTC).replace(microsecond=0),
        leaf=leaf,
        authority=AUTHORITY_LIFETIMES * leaf,
        wait=WAIT_REFRESHES * refresh,
    )
    state, steps = _advance(_read(stored), times, make_key)
    leaves = dict(state.leaves)
    for role in ROLES:
        if role not in leaves or _is_leaf_due(leaves[role], state, role, name, namespace, times):
            leaves[role] = _sign_leaf(state.authority, role, name, namespace, times, make_key)
            steps.append(f"new certificate for {role}")
    state = replace(state, leaves=leaves)
    return AuthorityPlan(_material(state), tuple(steps), _next_due(state, times))


def _advance(state: _State | None, times: _Times, make_key: MakeKey) -> tuple[_State, list[str]]:
    """At most one step: the time between two of them runs from when the first was stored."""
    if state is not None and state.next_authority is not None:
        assert state.since is not None, "read so"
        if times.now >= state.since + times.wait or _end(state.authority) <= times.now:
            old = state.authority.certificate
            moved = _State(state.next_authority, previous=old, since=times.now)
            return moved, ["leaves by the new authority"]
        return state, []
    if state is None or _end(state.authority) <= times.now:
        return _State(_sign_authority(times, make_key)), ["new authority"]
    if state.previous is not None:
        assert state.since is not None, "read so"
        if times.now >= state.since + times.wait:
            return replace(state, previous=None, since=None), ["old authority dropped"]
        return state, []
    if times.now >= _renewal(state.authority, times.authority):
        new = _sign_authority(times, make_key)
        return replace(state, next_authority=new, since=times.now), ["new authority trusted too"]
    return state, []


def _next_due(state: _State, times: _Times) -> datetime:
    dues = [_renewal(leaf, times.leaf) for leaf in state.leaves.values()]
    if state.since is not None:
        dues.append(state.since + times.wait)
    else:
        dues.append(_renewal(state.authority, times.authority))
    return min(dues)


def _is_leaf_due(
    leaf: KeyPair, state: _State, role: str, name: str, namespace: str, times: _Times
) -> bool:
    """Also when it is not this authority's, or names something else."""
    certificate = x509.load_pem_x509_certificate(leaf.certificate.encode())
    authority = x509.load_pem_x509_certificate(state.authority.certificate.encode())
    try:
        certificate.verify_directly_issued_by(authority)
        sans = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (InvalidSignature, ValueError, TypeError, x509.ExtensionNotFound):
        return True
    return sans != _sans(role, name, namespace) or times.now >= _renewal(leaf, times.leaf)


def _renewal(pair: KeyPair, lifetime: timedelta) -> datetime:
    """After two thirds of its life, or of the life that it would get now: settings may have got shorter."""
    certificate = x509.load_pem_x509_certificate(pair.certificate.encode())
    begin = certificate.not_valid_before_utc + CLOCK_SKEW
    return begin + min(certificate.not_valid_after_utc - begin, lifetime) * 2 / 3


def _end(pair: KeyPair) -> datetime:
    return x509.load_pem_x509_certificate(pair.certificate.encode()).not_valid_after_utc


def _material(state: _State) -> TlsMaterial:
    data: dict[str, str] = {}
    pairs = {_AUTHORITY: state.authority, _NEXT: state.next_authority, **state.leaves}
    for who, pair in pairs.items():
        if pair is not None:
            data[f"{who}.crt"], data[f"{who}.key"] = pair.certificate, pair.key
    if state.previous is not None:
        data[f"{_PREVIOUS}.crt"] = state.previous
    if state.since is not None:
        data[_SINCE] = state.since.isoformat()
    trusted = [state.authority.certificate]
    if state.next_authority is not None:
        trusted.append(state.next_authority.certificate)
    if state.previous is not None:
        trusted.append(state.previous)
    return TlsMaterial(authority_data=data, trusted="".join(trusted), leaves=dict(state.leaves))


def _read(stored: Mapping[str, str] | None) -> _State | None:
    """None for data that is not what `_material` made."""
    if not stored:
        return None
    try:
        authority = _read_pair(stored, _AUTHORITY)
        if authority is None:
            return None
        state = _State(
            authority=authority,
            next_authority=_read_pair(stored, _NEXT),
            previous=stored.get(f"{_PREVIOUS}.crt"),
            since=datetime.fromisoformat(stored[_SINCE]) if _SINCE in stored else None,
            leaves={role: pair for role in ROLES if (pair := _read_pair(stored, role)) is not None},
        )
        if state.previous is not None:
            x509.load_pem_x509_certificate(state.previous.encode())
    except (ValueError, TypeError):
        return None
    is_between = state.next_authority is not None or state.previous is not None
    if is_between is not (state.since is not None):
        return None
    return None if state.since is not None and state.since.tzinfo is None else state


def _read_pair(stored: Mapping[str, str], who: str) -> KeyPair | None:
    """None when a half is missing; ValueError or TypeError for what is no PEM, or a key of something else."""
    if f"{who}.crt" not in stored or f"{who}.key" not in stored:
        return None
    pair = KeyPair(stored[f"{who}.crt"], stored[f"{who}.key"])
    certificate = x509.load_pem_x509_certificate(pair.certificate.encode())
    if _load_key(pair).public_key() != certificate.public_key():
        raise ValueError(f"the key of {who} is not that of its certificate")
    return pair


def _load_key(pair: KeyPair) -> ec.EllipticCurvePrivateKey:
    key = serialization.load_pem_private_key(pair.key.encode(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise TypeError("not a key on an elliptic curve")
    return key


def _sans(role: str, name: str, namespace: str) -> x509.SubjectAlternativeName:
    owner = names.owner_of_uri(name, namespace)
    sans: list[x509.GeneralName] = [x509.UniformResourceIdentifier(f"larder://{owner}/{role}")]
    if role == "agent":
        sans.insert(0, x509.DNSName(names.dns_san(name, namespace)))
    return x509.SubjectAlternativeName(sans)


def _sign_authority(times: _Times, make_key: MakeKey) -> KeyPair:
    """A self-signed authority. Its subject is its own, as verifiers look for an issuer by that first."""
    key = make_key()
    serial = x509.random_serial_number()
    subject = x509.Name(
        [x509.NameAttribute(NameOID.COMMON_NAME, f"larder authority {serial:040x}"[:40])]
    )
    builder = (
        _builder(subject, subject, key.public_key(), serial, times.now, times.now + times.authority)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    return _signed(builder, key, key)


def _sign_leaf(
    authority: KeyPair, role: str, name: str, namespace: str, times: _Times, make_key: MakeKey
) -> KeyPair:
    """Agents are servers and, towards each other, clients; the others only call. Ends with its authority at last."""
    key, authority_key = make_key(), _load_key(authority)
    issuer = x509.load_pem_x509_certificate(authority.certificate.encode())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"larder {role}")])
    usages = [ExtendedKeyUsageOID.CLIENT_AUTH]
    if role == "agent":
        usages.insert(0, ExtendedKeyUsageOID.SERVER_AUTH)
    authority_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    end = min(times.now + times.leaf, issuer.not_valid_after_utc)
    serial = x509.random_serial_number()
    builder = (
        _builder(subject, issuer.subject, key.public_key(), serial, times.now, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(_sans(role, name, namespace), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(authority_id, critical=False)
    )
    return _signed(builder, key, authority_key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, serial: int, begin: datetime, end: datetime
) -> x509.CertificateBuilder:  # fmt: skip
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(serial)
        .not_valid_before(begin - CLOCK_SKEW)
        .not_valid_after(end)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _signed(
    builder: x509.CertificateBuilder, key: ec.EllipticCurvePrivateKey, by: ec.EllipticCurvePrivateKey
) -> KeyPair:  # fmt: skip
    certificate = builder.sign(by, hashes.SHA256())
    encoding = serialization.Encoding.PEM
    written_key = key.private_bytes(
        encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return KeyPair(certificate.public_bytes(encoding).decode(), written_key.decode())
