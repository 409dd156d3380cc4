"""Who gets in over TCP: mutual TLS, roles in certificates, files that change."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from agent_process import a_namespace, local_agent, wait_until
from agent_stub import bytes_of, key_of, status_of, stub_session
from signing import Authority, Pem

from cacheservice.agent.serve import Agent
from cacheservice.client.admin import AgentAdmin
from cacheservice.client.client import CacheClient
from cacheservice.client.copy import MemorySink
from cacheservice.client.values import AgentTarget, ClientIdentity, Role, ShardRead, TlsFiles
from cacheservice.core.outcomes import Presence, Reason
from cacheservice.errors import AgentRejected, ConfigError
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.v1 import cache_pb2

SIZE = 1_500_000
SPEC = a_namespace(shard_bytes=(SIZE,))


@dataclass(frozen=True, slots=True)
class World:
    """An authority, an agent that it signed for, and how to come as somebody."""

    authority: Authority
    agent: Agent
    server: Pem

    def target(self, pem: Pem) -> AgentTarget:
        """Over TCP with this certificate."""
        tls = TlsFiles(certificate=pem.cert, key=pem.key, ca=self.authority.ca)
        return AgentTarget(address=f"127.0.0.1:{self.agent.tcp_port}", tls=tls)


def tls_fields(authority: Authority, pem: Pem, **fields: object) -> dict[str, object]:
    return {
        "listen": "127.0.0.1:0", "tls_cert": pem.cert, "tls_key": pem.key, "tls_ca": authority.ca, **fields,
    }  # fmt: skip


@pytest.fixture(name="world")
def _world(tmp_path: Path) -> Iterator[World]:
    authority = Authority(tmp_path, "ca")
    server = authority.issue("server", "larder://demo/agent")
    with local_agent(**tls_fields(authority, server)) as agent:
        yield World(authority, agent, server)


def can_connect(target: AgentTarget) -> bool:
    client = CacheClient(target, ClientIdentity(Role.BOTH))
    client.start()
    try:
        return client.wait_connected(2.0)
    finally:
        client.close()


def test_engine_with_a_certificate_gets_in_and_no_other(world: World, tmp_path: Path) -> None:
    assert can_connect(world.target(world.authority.issue("engine", "larder://demo/engine")))
    stranger = Authority(tmp_path, "stranger").issue("theirs", "larder://demo/engine")
    assert not can_connect(world.target(stranger))
    nobody = AgentTarget(address=f"127.0.0.1:{world.agent.tcp_port}")
    assert not can_connect(nobody)


@pytest.mark.parametrize(
    "uri", ["", "https://example.org/", "larder://demo/cook", "larder://demo/engine/x"]
)
def test_certificate_without_a_role_is_told_what_it_needs(world: World, uri: str) -> None:
    target = world.target(world.authority.issue("plain", *([uri] if uri else [])))
    with (
        AgentAdmin(target) as admin,
        pytest.raises(AgentRejected, match=r"PERMISSION_DENIED.*URI SAN larder://"),
    ):
        admin.status()


def test_admin_over_tcp_is_for_operators(world: World) -> None:
    with AgentAdmin(world.target(world.authority.issue("engine", "larder://demo/engine"))) as admin:
        assert admin.status().arena_bytes
        with pytest.raises(AgentRejected, match=r"PERMISSION_DENIED.*operator"):
            admin.evict()
    with AgentAdmin(world.target(world.authority.issue("op", "larder://demo/operator"))) as admin:
        assert admin.evict().num_chunks == 0
    with AgentAdmin(AgentTarget(socket_dir=world.agent.config.socket_dir)) as admin:
        assert admin.evict().num_chunks == 0


def test_admin_is_not_served_over_plain_tcp() -> None:
    with (
        local_agent(listen="127.0.0.1:0", insecure=True) as agent,
        AgentAdmin(AgentTarget(address=f"127.0.0.1:{agent.tcp_port}")) as admin,
    ):
        assert admin.status().arena_bytes
        with pytest.raises(AgentRejected, match="PERMISSION_DENIED"):
            admin.drain()


def test_owner_is_checked_when_given(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    server = authority.issue("server", "larder://demo/agent")
    with local_agent(**tls_fields(authority, server, tls_owner="demo")) as agent:
        world = World(authority, agent, server)
        assert can_connect(world.target(authority.issue("ours", "larder://demo/engine")))
        with (
            AgentAdmin(world.target(authority.issue("theirs", "larder://other/engine"))) as admin,
            pytest.raises(AgentRejected, match="larder://demo/"),
        ):
            admin.status()


def test_renewed_files_are_used_without_a_restart(world: World, tmp_path: Path) -> None:
    (tmp_path / "new").mkdir()
    renewed = Authority(tmp_path / "new", "ca")
    ours = renewed.issue("engine", "larder://demo/engine")
    tls = TlsFiles(certificate=ours.cert, key=ours.key, ca=renewed.ca)
    target = AgentTarget(address=f"127.0.0.1:{world.agent.tcp_port}", tls=tls)
    assert not can_connect(target)
    pem = renewed.issue("server", "larder://demo/agent")
    world.server.cert.write_bytes(b"half a file")
    assert can_connect(world.target(world.authority.issue("engine", "larder://demo/engine"))), (
        "the old ones stay"
    )
    world.server.cert.write_bytes(pem.cert.read_bytes())
    world.server.key.write_bytes(pem.key.read_bytes())
    world.authority.ca.write_bytes(renewed.ca.read_bytes())
    wait_until(lambda: can_connect(target), what="a connection with the new authority")


def test_files_that_are_no_pem_refuse_the_start(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    server = authority.issue("server")
    server.cert.write_text("no certificate")
    with (
        pytest.raises(ConfigError, match="is no PEM file"),
        local_agent(**tls_fields(authority, server)),
    ):
        pass


def test_agents_pull_from_each_other_over_tls(tmp_path: Path) -> None:
    authority = Authority(tmp_path, "ca")
    pems = [authority.issue(name, "larder://demo/agent") for name in ("one", "two")]
    shared = MemoryIndexStore()
    with (
        local_agent(index=MemoryIndex(shared), **tls_fields(authority, pems[0])) as owner,
        local_agent(index=MemoryIndex(shared), **tls_fields(authority, pems[1])) as reader,
        stub_session(f"unix:{owner.config.agent_socket}") as there,
    ):
        there.open(SPEC)
        content = bytes_of(SIZE, "tls")
        there.store(SPEC, key_of("tls"), content)
        client = CacheClient(
            AgentTarget(socket_dir=reader.config.socket_dir), ClientIdentity(Role.DECODE)
        )
        client.start()
        assert client.wait_connected(10)
        client.open_namespace(SPEC)
        wait_until(
            lambda: (
                client.lookup(SPEC.digest, [key_of("tls")]).presence
                == bytes([Presence.READY_ELSEWHERE])
            ),
            what="the announcement",
        )
        got = bytearray(SIZE)
        read = ShardRead(key_of("tls"), 0, 0, SIZE, 0, SIZE, MemorySink(got))
        (result,) = client.retrieve(SPEC.digest, [read])
        assert result.reason is Reason.HIT
        assert bytes(got) == content
        client.close()


def test_health_needs_a_certificate_of_the_authority_only(world: World) -> None:
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    pem = world.authority.issue("probe")
    credentials = grpc.ssl_channel_credentials(
        world.authority.ca.read_bytes(), pem.key.read_bytes(), pem.cert.read_bytes()
    )
    with grpc.secure_channel(f"127.0.0.1:{world.agent.tcp_port}", credentials) as channel:
        checked = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=10
        )
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
        from cacheservice.v1 import cache_pb2_grpc

        with pytest.raises(grpc.RpcError) as caught:
            cache_pb2_grpc.CacheServiceStub(channel).GetStatus(
                cache_pb2.GetStatusRequest(), timeout=10
            )
        assert status_of(caught.value)[0] is grpc.StatusCode.PERMISSION_DENIED
