"""Who is let in to Redis, and what is said when nobody is: URLs, users, password files, ACLs, TLS. No secret in any
word."""

from __future__ import annotations

import datetime as dt
import ipaddress
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from index_worlds import NAMESPACE, announcement, chunk, poll
from redis_server import RedisServer, ServerTls, redis_server_binary, tls_redis_server_binary
from signing import Authority

from cacheservice.errors import ConfigError, IndexUnavailable
from cacheservice.index.location import RedisTls, parse_location
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.index.open import build_index
from cacheservice.index.port import Index, IndexHealth, IndexReason, IndexStatus
from cacheservice.index.redis_index import RedisIndex
from cacheservice.index.trouble import acl_line

SECRET = "s3cr3t/p@ss: wörd"
QUOTED = "s3cr3t%2Fp%40ss%3A%20w%C3%B6rd"


# URLs


@pytest.mark.parametrize(
    ("url", "label", "password"),
    [
        ("redis://h", "redis://h:6379", None),
        ("redis://h:7000/3", "redis://h:7000/3", None),
        ("rediss://h", "rediss://h:6379", None),
        ("redis://[::1]:1", "redis://[::1]:1", None),
        (f"redis://:{QUOTED}@h", "redis://h:6379", SECRET),
        (f"redis://joe:{QUOTED}@h", "redis://joe@h:6379", SECRET),
        ("unix:///run/redis.sock", "unix:///run/redis.sock", None),
        ("unix:///run/redis.sock?db=2", "unix:///run/redis.sock?db=2", None),
        (f"unix://joe:{QUOTED}@/run/redis.sock", "unix://joe@/run/redis.sock", SECRET),
    ],
)
def test_urls_are_understood_and_shown_without_password(
    url: str, label: str, password: str | None
) -> None:
    location = parse_location(url)
    assert location.label == label
    assert location.read_password() == password
    assert SECRET not in repr(location)
    assert QUOTED not in repr(location)


@pytest.mark.parametrize(
    "url",
    [
        "",
        "localhost:6379",
        f"http://:{QUOTED}@h",
        f"redis://:{QUOTED}@",
        f"redis://:{QUOTED}@h:port",
        f"redis://:{QUOTED}@h:99999",
        f"redis://:{QUOTED}@h/zero",
        f"redis://:{QUOTED}@h?ssl=1",
        f"redis://:{QUOTED}@h#x",
        f"unix://:{QUOTED}@host/path",
        f"unix://:{QUOTED}@",
        f"unix://:{QUOTED}@/p?timeout=1",
        f"redis://:{QUOTED}@[::1",
    ],
)
def test_a_wrong_url_is_refused_without_quoting_its_password(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_index(url)
    error: BaseException | None = caught.value
    while error is not None:
        assert "s3cr3t" not in str(error)
        error = error.__cause__
    assert (
        "redis://" in str(caught.value)
        or "unix://" in str(caught.value)
        or "URL" in str(caught.value)
    )


def test_contradictions_are_refused(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    with pytest.raises(ConfigError, match="given twice"):
        build_index("redis://:a@h", password_file=secret)
    with pytest.raises(ConfigError, match="given twice"):
        build_index("redis://joe@h", username="jane")
    with pytest.raises(ConfigError, match="given twice"):
        build_index("redis://joe@h", username_file=secret)
    with pytest.raises(ConfigError, match="rediss://"):
        build_index("redis://h", tls_ca=secret)
    with pytest.raises(ConfigError, match="rediss://"):
        build_index("redis://h", tls_server_name="redis")
    with pytest.raises(ConfigError, match="without its key"):
        build_index("rediss://h", tls_cert=secret)
    with pytest.raises(ConfigError, match="certificate"):
        build_index("rediss://h", tls_key=secret)
    for prefix in ("", "a b:", "a{b}:", "a*:", "x" * 65, "é:", "a\n"):
        with pytest.raises(ConfigError, match="prefix"):
            build_index("redis://h", key_prefix=prefix)
    for option in ("timeout_s", "write_timeout_s", "entry_ttl_s"):
        with pytest.raises(ConfigError, match="above 0"):
            build_index("redis://h", **{option: 0})  # type: ignore[arg-type]


def test_memory_is_an_index_too() -> None:
    store = MemoryIndexStore()
    index = build_index("memory", memory_store=store)
    assert isinstance(index, MemoryIndex)
    assert index.join(name="a", address="", epoch=1) == 1
    assert store.leases
    store.unavailable = "told to"
    assert index.status().message == "told to"
    with pytest.raises(IndexUnavailable, match="told to"):
        index.lookup(NAMESPACE, [chunk(1)])
    assert index.counters()["lookup_errors"] == 1


def test_nothing_connects_before_the_first_call() -> None:
    index = build_index("redis://127.0.0.1:1")
    assert isinstance(index, RedisIndex)
    assert "has not been asked yet" in index.status().message
    assert index.status().reason is None
    index.close()


# Users and passwords


def use(index: Index, number: int = 1) -> None:
    """Everything that an agent does."""
    index.join(name="a", address="", epoch=1)
    index.announce([announcement(number), announcement(number + 1)])
    index.announce([announcement(number, 0)])
    index.heartbeat()
    index.nodes()
    index.lookup(NAMESPACE, [chunk(number), chunk(number + 1)])
    index.leave()


def refusal(index: Index, reason: IndexReason = IndexReason.AUTH_FAILED) -> str:
    """What joining says; status and lookups say the same and none holds a secret."""
    with pytest.raises(IndexUnavailable) as joining:
        index.join(name="a", address="", epoch=1)
    with pytest.raises(IndexUnavailable) as looking:
        index.lookup(NAMESPACE, [chunk(1)])
    status = index.status()
    assert (status.health, status.reason) == (IndexHealth.REFUSING, reason)
    for text in (str(joining.value), str(looking.value), status.message, repr(index)):
        assert "s3cr3t" not in text
    assert status.message == str(joining.value)
    index.close()
    return str(joining.value)


@pytest.fixture(scope="module", params=[None, "/usr/bin/redis-server"], ids=["bundled", "system"])
def protected_server(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    binary = request.param or redis_server_binary()
    if request.param and (
        not os.path.exists(binary) or os.path.realpath(binary) == redis_server_binary()
    ):
        pytest.skip(f"no second redis-server at {binary}")
    with RedisServer(password=SECRET, binary=binary) as server:
        yield server


def test_a_password_in_the_url_lets_in(protected_server: RedisServer) -> None:
    index = build_index(protected_server.url)
    use(index)
    index.close()


def test_no_password_and_a_wrong_one_are_told_apart(protected_server: RedisServer) -> None:
    assert "NOAUTH" in refusal(build_index(protected_server.url_for(None, None)))
    assert "WRONGPASS" in refusal(build_index(protected_server.url_for(None, "s3cr3t-but-wrong")))
    assert "WRONGPASS" in refusal(
        build_index(protected_server.url_for("nobody", "s3cr3t-but-wrong"))
    )


def test_a_password_where_none_is_wanted_is_named() -> None:
    with RedisServer() as server:
        assert "has no password" in refusal(build_index(server.url_for(None, SECRET)))


def test_a_password_file_is_read_again_at_each_connect(
    protected_server: RedisServer, tmp_path: Path
) -> None:
    secret = tmp_path / "password"
    index = build_index(protected_server.url_for(None, None), password_file=secret, timeout_s=1)
    with pytest.raises(IndexUnavailable, match=r"password file .*/password .*No such file"):
        index.join(name="a", address="", epoch=1)
    secret.write_text("wrong")
    with pytest.raises(IndexUnavailable, match="WRONGPASS"):
        index.join(name="a", address="", epoch=1)
    secret.write_text(SECRET + "\n")
    use(index)
    index.close()


def test_a_user_file_is_read_at_each_connect_and_named_in_the_acl_line(
    protected_server: RedisServer, tmp_path: Path
) -> None:
    user, secret = tmp_path / "username", tmp_path / "password"
    secret.write_text("s3cr3t-agent")
    index = build_index(
        protected_server.url_for(None, None), username_file=user, password_file=secret, timeout_s=1
    )
    # A Secret may have a password alone: then it is the default user's.
    secret.write_text(SECRET)
    use(index)
    index.close()
    index = build_index(
        protected_server.url_for(None, None), username_file=user, password_file=secret, timeout_s=1
    )
    secret.write_text("s3cr3t-agent")
    user.write_bytes(b"\xff")
    with pytest.raises(IndexUnavailable, match=r"user file .*/username .*no UTF-8"):
        index.join(name="a", address="", epoch=1)
    assert index.status().reason is IndexReason.AUTH_FAILED
    user.write_text("nobody\n")
    with pytest.raises(IndexUnavailable, match="WRONGPASS"):
        index.join(name="a", address="", epoch=1)
    with protected_server.client() as client:
        client.execute_command(
            "ACL", "SETUSER", "reader", "on", ">s3cr3t-agent", "~larder:*", "+get"
        )
        user.write_text("reader\n")
        with pytest.raises(IndexUnavailable, match=r"NOPERM.*ACL SETUSER reader on"):
            index.join(name="a", address="", epoch=1)
        assert index.status().reason is IndexReason.PERMISSION_DENIED
        client.execute_command(
            *acl_line("larder:", "reader").replace("PASSWORD", "s3cr3t-agent").split()
        )
        use(index)
        assert index.status() == IndexStatus(IndexHealth.READY)
        client.execute_command("ACL", "DELUSER", "reader")
    index.close()


def test_a_user_with_the_documented_rights_and_no_more_is_enough(
    protected_server: RedisServer,
) -> None:
    prefix = "larder:0a1b2c3d:"
    line = acl_line(prefix, "agent").replace("PASSWORD", "s3cr3t-agent")
    with protected_server.client() as client:
        client.execute_command(*line.split())
        index = build_index(
            protected_server.url_for("agent", "s3cr3t-agent"), key_prefix=prefix, timeout_s=1
        )
        client.script_flush()
        use(index)
        assert index.status().health is IndexHealth.READY
        index.close()
        # The same user under another prefix is refused, and told how it would not be.
        foreign = refusal(
            build_index(
                protected_server.url_for("agent", "s3cr3t-agent"), key_prefix="larder:ffff0000:"
            ),
            IndexReason.PERMISSION_DENIED,
        )
        assert "NOPERM" in foreign
        assert acl_line("larder:ffff0000:", "agent") in foreign
        client.execute_command("ACL", "DELUSER", "agent")


@pytest.mark.parametrize(
    "command", ["mget", "get", "set", "pexpire", "evalsha", "script|load", "info", "select"]
)
def test_each_documented_right_is_needed_and_named_when_missing(
    protected_server: RedisServer, command: str
) -> None:
    line = acl_line("larder:", "agent").replace("PASSWORD", "s3cr3t-agent")
    rights = [word for word in line.split() if word != f"+{command}"]
    with protected_server.client() as client:
        client.execute_command("ACL", "SETUSER", "agent", "reset")
        client.execute_command(*rights)
        client.script_flush()
        url = protected_server.url_for("agent", "s3cr3t-agent") + select_of(protected_server)
        index = build_index(url, timeout_s=1)
        try:
            with pytest.raises(IndexUnavailable, match=r"NOPERM.*ACL SETUSER agent on"):
                use(index)
        finally:
            index.close()
        client.execute_command("ACL", "DELUSER", "agent")


def select_of(server: RedisServer) -> str:
    return "?db=1" if server.socket_path else "/1"


def test_a_right_that_is_withdrawn_later_is_noticed_and_heals(
    protected_server: RedisServer,
) -> None:
    line = acl_line("larder:", "agent").replace("PASSWORD", "s3cr3t-agent")
    with protected_server.client() as client:
        client.execute_command("ACL", "SETUSER", "agent", "reset")
        client.execute_command(*line.split())
        index = build_index(protected_server.url_for("agent", "s3cr3t-agent"), timeout_s=1)
        index.join(name="a", address="", epoch=1)
        client.execute_command("ACL", "SETUSER", "agent", "-set")
        with pytest.raises(IndexUnavailable, match="NOPERM"):
            index.announce([announcement(1)])
        assert index.status().health is IndexHealth.REFUSING
        client.execute_command("ACL", "SETUSER", "agent", "+set")
        index.heartbeat()
        assert index.status().health is IndexHealth.READY
        index.announce([announcement(1)])
        index.close()


def test_a_server_that_is_no_redis_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        index = build_index(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=1)
        with pytest.raises(IndexUnavailable, match="was lost"):
            index.lookup(NAMESPACE, [chunk(1)])
        assert "whether Redis runs there" in index.status().message
        index.close()
        thread.join()


# TLS


@dataclass(frozen=True)
class Certificates:
    """One CA with a server and a client certificate, and a CA that signed nothing of it."""

    ca: Path
    server: tuple[Path, Path]
    client: tuple[Path, Path]
    other_ca: Path


def make_certificates(folder: Path) -> Certificates:
    now = dt.datetime.now(dt.UTC)

    def issue(
        name: str, issuer: tuple[x509.Name, ec.EllipticCurvePrivateKey] | None
    ) -> tuple[Path, Path, x509.Name, ec.EllipticCurvePrivateKey]:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        by_name, by_key = issuer or (subject, key)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(by_name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(hours=1))
            .not_valid_after(now + dt.timedelta(hours=1))
            .add_extension(
                x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True
            )
            .add_extension(
                x509.SubjectAlternativeName(
                    [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
                ),
                critical=False,
            )
            .sign(by_key, hashes.SHA256())
        )
        cert_path, key_path = folder / f"{name}.crt", folder / f"{name}.key"
        cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_path.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return cert_path, key_path, subject, key

    ca, _, ca_name, ca_key = issue("ca", None)
    other_ca, *_ = issue("other", None)
    server = issue("server", (ca_name, ca_key))[:2]
    client = issue("client", (ca_name, ca_key))[:2]
    return Certificates(ca, server, client, other_ca)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def tls_server(certificates: Certificates) -> Iterator[RedisServer]:
    binary = tls_redis_server_binary()
    if binary is None:
        pytest.skip(
            "no redis-server with TLS: install Debian's redis-server, or set LARDER_REDIS_SERVER"
        )
    tls = ServerTls(*certificates.server, ca=certificates.ca, verify_clients=True)
    with RedisServer(tls=tls, binary=binary, password=SECRET) as server:
        yield server


def tls_index(server: RedisServer, certificates: Certificates, **changes: object) -> Index:
    cert, key = certificates.client
    options = {
        "tls_ca": certificates.ca,
        "tls_cert": cert,
        "tls_key": key,
        "timeout_s": 1.0,
        "write_timeout_s": 5.0,
    }
    return build_index(server.url, **{**options, **changes})  # type: ignore[arg-type]


def tls_failure(index: Index, reason: IndexReason = IndexReason.TLS_FAILED) -> str:
    with pytest.raises(IndexUnavailable) as caught:
        index.join(name="a", address="", epoch=1)
    assert index.status().reason is reason
    index.close()
    assert "s3cr3t" not in str(caught.value)
    return str(caught.value)


def test_tls_with_a_client_certificate_works(
    tls_server: RedisServer, certificates: Certificates
) -> None:
    index = tls_index(tls_server, certificates)
    use(index)
    many = [chunk(n) for n in range(100, 4196)]
    assert index.lookup(NAMESPACE, many) == [()] * 4096
    assert index.status().health is IndexHealth.READY
    index.close()


def test_tls_failures_say_what_to_do(
    tls_server: RedisServer, certificates: Certificates, tmp_path: Path
) -> None:
    untrusted = tls_failure(tls_index(tls_server, certificates, tls_ca=certificates.other_ca))
    assert "certificate is not trusted" in untrusted
    assert "give the CA" in untrusted
    no_certificate = tls_failure(tls_index(tls_server, certificates, tls_cert=None, tls_key=None))
    assert "TLS to Redis" in no_certificate
    assert "client certificate" in no_certificate
    missing = tls_failure(tls_index(tls_server, certificates, tls_ca=tmp_path / "absent.pem"))
    assert "absent.pem" in missing
    (tmp_path / "empty.pem").write_text("no PEM")
    assert "must be readable PEM" in tls_failure(
        tls_index(tls_server, certificates, tls_ca=tmp_path / "empty.pem")
    )
    plain = tls_failure(
        build_index(f"redis://127.0.0.1:{tls_server.port}"), IndexReason.UNREACHABLE
    )
    assert "rediss://" in plain


def test_a_server_without_tls_is_told_apart(certificates: Certificates) -> None:
    with RedisServer(tcp=True) as server:
        index = build_index(
            f"rediss://127.0.0.1:{server.port}", tls_ca=certificates.ca, write_timeout_s=0.5
        )
        # A Redis that waits for the end of a line and one that is stopped look the same.
        assert "does it speak TLS" in tls_failure(index, IndexReason.UNREACHABLE)


def test_server_name_is_asked_for_and_checked_instead_of_the_host(
    certificates: Certificates, tmp_path: Path
) -> None:
    binary = tls_redis_server_binary()
    if binary is None:
        pytest.skip(
            "no redis-server with TLS: install Debian's redis-server, or set LARDER_REDIS_SERVER"
        )
    authority = Authority(tmp_path, "named")
    pem = authority.issue("redis", dns="redis.example.internal")
    tls = ServerTls(pem.cert, pem.key, ca=authority.ca)
    with RedisServer(tls=tls, binary=binary) as server:
        options: dict[str, Any] = {"tls_ca": authority.ca, "timeout_s": 1, "write_timeout_s": 5}
        assert "not trusted" in tls_failure(build_index(server.url, **options))
        wrong = build_index(server.url, tls_server_name="redis.other", **options)
        assert "not trusted" in tls_failure(wrong)
        index = build_index(server.url, tls_server_name="redis.example.internal", **options)
        use(index)
        index.close()


def test_tls_files_are_read_again_at_each_connect(
    tls_server: RedisServer, certificates: Certificates, tmp_path: Path
) -> None:
    ca = tmp_path / "ca.pem"
    ca.write_bytes(certificates.other_ca.read_bytes())
    index = tls_index(tls_server, certificates, tls_ca=ca)
    with pytest.raises(IndexUnavailable, match="not trusted"):
        index.join(name="a", address="", epoch=1)
    ca.write_bytes(certificates.ca.read_bytes())
    poll(lambda: index.join(name="a", address="", epoch=1))
    index.close()


def test_certificates_are_checked_unless_there_is_no_tls() -> None:
    context = RedisTls().build_context()
    assert context.check_hostname
    assert context.verify_mode is ssl.CERT_REQUIRED
