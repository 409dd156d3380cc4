"""Clients and agents of neighbouring versions get along; others are told which side to upgrade."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import pytest
from agent_process import a_namespace, local_agent, target_of, wait_until
from agent_stub import bytes_of, key_of, stub_session
from scripted_agent import ScriptedAgent

from cacheservice.client.client import CacheClient
from cacheservice.client.copy import MemorySink
from cacheservice.client.values import AgentTarget, ClientIdentity, Deadlines, Role, ShardRead
from cacheservice.core.outcomes import Reason
from cacheservice.core.protocol import (
    OLDEST_PROTOCOL_VERSION,
    PROTOCOL_NOT_SPOKEN,
    PROTOCOL_VERSION,
    REFUSAL,
    SPOKEN,
    TOO_MANY_LEASES,
)

SIZE = 1000
SPEC = a_namespace(shard_bytes=(SIZE,))


def said_beside(error: grpc.RpcError) -> dict[str, str]:
    return dict(error.trailing_metadata())  # type: ignore[attr-defined]


def refuse_versions(
    agent: ScriptedAgent, spoken: Sequence[int], metadata: tuple[tuple[str, str], ...]
) -> list[int]:
    """Have the agent speak only these; returns the list of what was offered, as it grows."""
    offered: list[int] = []

    def session(requests: Iterator[Any], context: Any, built_in: Any) -> Iterator[Any]:
        first = next(requests)
        offered.append(first.hello.protocol_version)
        if first.hello.protocol_version not in spoken:
            context.set_trailing_metadata(metadata)
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "protocol_version is not spoken")

        def again() -> Iterator[Any]:
            yield first
            yield from requests

        yield from built_in(again(), context)

    agent.script["Session"] = session
    return offered


@pytest.fixture(name="scripted")
def _scripted(tmp_path: Path) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(tmp_path).start()
    yield agent
    agent.stop()


@pytest.fixture(name="client")
def _client(scripted: ScriptedAgent) -> Iterator[CacheClient]:
    client = CacheClient(
        AgentTarget(socket_dir=scripted.socket_dir),
        ClientIdentity(Role.DECODE),
        deadlines=Deadlines(reconnect_s=0.2),
    )
    yield client
    client.close()


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (
            (REFUSAL, PROTOCOL_NOT_SPOKEN),
            (SPOKEN, f"{PROTOCOL_VERSION - 2}-{PROTOCOL_VERSION - 1}"),
        ),
    ],
    ids=["agent of version 1", "agent that says what it speaks"],
)
def test_client_offers_the_version_before_to_an_older_agent(
    scripted: ScriptedAgent, client: CacheClient, metadata: tuple[tuple[str, str], ...]
) -> None:
    offered = refuse_versions(scripted, [OLDEST_PROTOCOL_VERSION], metadata)
    client.start()
    assert client.wait_connected(10)
    assert offered == [PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION]


def test_client_does_not_offer_less_to_a_newer_agent(
    scripted: ScriptedAgent, client: CacheClient
) -> None:
    newer = f"{PROTOCOL_VERSION + 1}-{PROTOCOL_VERSION + 2}"
    offered = refuse_versions(
        scripted, [PROTOCOL_VERSION + 1], ((REFUSAL, PROTOCOL_NOT_SPOKEN), (SPOKEN, newer))
    )
    client.start()
    wait_until(lambda: len(offered) >= 3, what="three tries")
    assert set(offered) == {PROTOCOL_VERSION}
    wait_until(lambda: "not spoken" in client.state().message, what="the reason")


def test_agent_that_speaks_nothing_of_ours_is_refused_in_words(
    scripted: ScriptedAgent, client: CacheClient
) -> None:
    offered = refuse_versions(scripted, [], ())
    client.start()
    wait_until(lambda: "not spoken" in client.state().message, what="the reason")
    assert offered[:2] == [PROTOCOL_VERSION, OLDEST_PROTOCOL_VERSION]


def test_agent_says_what_it_speaks_beside_the_refusal() -> None:
    with local_agent() as agent:
        with (
            pytest.raises(grpc.RpcError) as refused,
            stub_session(f"unix:{agent.config.agent_socket}", protocol=PROTOCOL_VERSION + 1),
        ):
            pass
        assert said_beside(refused.value) == {
            REFUSAL: PROTOCOL_NOT_SPOKEN,
            SPOKEN: f"{OLDEST_PROTOCOL_VERSION}-{PROTOCOL_VERSION}",
        }


def test_too_many_leases_are_no_room_and_not_a_slow_agent() -> None:
    with local_agent() as agent, stub_session(f"unix:{agent.config.agent_socket}") as stub:
        stub.open(SPEC)
        key = key_of("k")
        stub.store(SPEC, key, bytes_of(SIZE, "k"))
        client = CacheClient(target_of(agent), ClientIdentity(Role.DECODE))
        client.start()
        assert client.wait_connected(10)
        client.open_namespace(SPEC)
        with agent.guarded.changing() as store:
            store._limits = dataclasses.replace(store.limits, max_leases=0)
        with pytest.raises(grpc.RpcError) as refused:
            stub.acquire(SPEC, (key, 0, 0))
        assert said_beside(refused.value) == {REFUSAL: TOO_MANY_LEASES}
        read = ShardRead(key, 0, 0, SIZE, 0, SIZE, MemorySink(bytearray(SIZE)))
        assert client.retrieve(SPEC.digest, [read])[0].reason is Reason.NO_SPACE
        client.close()
