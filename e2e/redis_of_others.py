"""A Redis that somebody else runs: its pod and Service, its users, and a command to it."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from live_cluster import Document, Namespace, reference
from traffic import RESTRICTED, until_pod_ready

USERS = "user default off\nuser larder on >right ~* &* +@all\nuser weak on >right\n"


def redis_server(
    namespace: Namespace, name: str, memory: str, *, tls_secret: str = ""
) -> Iterator[str]:
    namespace.apply(*redis_of_others(name, USERS, memory, tls_secret))
    until_pod_ready(namespace, name, 60)
    yield f"{name}.{namespace.name}.svc:6379"
    namespace.delete("pod", name)
    namespace.delete("service", name)


def redis_of_others(name: str, users: str, memory: str, tls_secret: str) -> tuple[Document, ...]:
    script = f"printf '{users}' > /tmp/users; exec redis-server --aclfile /tmp/users --maxmemory {memory} --save ''"
    container: Document = {
        "name": "redis",
        "image": reference("redis"),
        "workingDir": "/tmp",
        "readinessProbe": {"tcpSocket": {"port": 6379}, "periodSeconds": 1},
        "securityContext": {**RESTRICTED, "readOnlyRootFilesystem": False},
    }
    spec: Document = {"terminationGracePeriodSeconds": 0, "containers": [container]}
    if tls_secret:
        files = "--tls-cert-file /tls/tls.crt --tls-key-file /tls/tls.key"
        script += f" --tls-port 6380 --tls-auth-clients no {files}"
        container["volumeMounts"] = [{"name": "tls", "mountPath": "/tls"}]
        spec["volumes"] = [{"name": "tls", "secret": {"secretName": tls_secret}}]
    container["command"] = ["sh", "-c", script.replace("\n", "\\n")]
    ports = [{"name": "plain", "port": 6379}, {"name": "tls", "port": 6380}]
    return (
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "labels": {"app": name}},
            "spec": spec,
        },
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": name},
            "spec": {"selector": {"app": name}, "ports": ports},
        },
    )


def certificate_for(host: str) -> dict[str, str]:
    """A certificate of its own making, which nobody trusts; ca.crt is for those who are to."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, host)])
    now = datetime.now(UTC)
    built = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = built.public_bytes(serialization.Encoding.PEM).decode()
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    return {"tls.crt": pem, "ca.crt": pem, "tls.key": private.decode()}


def redis_cli(namespace: Namespace, *command: str, pod: str = "others") -> str:
    login = ("--user", "larder", "-a", "right", "--no-auth-warning")
    return namespace.kubectl("exec", pod, "--", "redis-cli", *login, *command)


def keys(namespace: Namespace, pattern: str) -> list[str]:
    return redis_cli(namespace, "KEYS", pattern).split()


def ttl_s(namespace: Namespace, key: str) -> int:
    return int(redis_cli(namespace, "TTL", key))
