"""/statusz, which the operator and `kubectl larder` read: fields, flows between roles, refused clients, outcomes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import grpc
import pytest
from agent_process import a_namespace, http_get, local_agent, wait_until
from agent_stub import StubSession, bytes_of, key_of, status_of, stub_session

from cacheservice import __version__
from cacheservice.agent.serve import Agent
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import NamespaceSpec, build_namespace
from cacheservice.core.protocol import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.v1 import cache_pb2

SIZE = 100_000
SPEC = a_namespace(shard_bytes=(SIZE,))
PREFILL = cache_pb2.CLIENT_ROLE_PREFILL
DECODE = cache_pb2.CLIENT_ROLE_DECODE


@pytest.fixture(name="agent")
def _agent() -> Iterator[Agent]:
    with local_agent(http="127.0.0.1:0") as agent:
        yield agent


def unix(agent: Agent) -> str:
    """Where its clients find it."""
    return f"unix:{agent.config.agent_socket}"


def page_of(agent: Agent, query: str = "") -> dict[str, Any]:
    """The page, parsed."""
    status, body = http_get(f"http://127.0.0.1:{agent.http_port}/statusz{query}")
    assert status == 200
    page: dict[str, Any] = json.loads(body)
    return page


def flow(agent: Agent, writer: str, reader: str, spec: NamespaceSpec = SPEC) -> tuple[int, ...]:
    """(committed, looked_up, loaded) of one row; zeros when there is none."""
    rows = [
        (f["committed"], f["looked_up"], f["loaded"])
        for f in page_of(agent)["flows"]
        if (f["namespace"], f["writer_role"], f["reader_role"])
        == (spec.digest.hex(), writer, reader)
    ]
    assert len(rows) <= 1
    return rows[0] if rows else (0, 0, 0)


def engine(agent: Agent, role: int, **fields: Any) -> Any:
    """A session of an engine with this role, as a context."""
    return stub_session(unix(agent), role=role, name=f"engine-{role}", **fields)


def store(session: StubSession, *words: object) -> list[ChunkKey]:
    """Store one chunk per word."""
    keys = [key_of(word) for word in words]
    for word, key in zip(words, keys, strict=True):
        session.store(SPEC, key, bytes_of(SIZE, word))
    return keys


def load(session: StubSession, keys: Sequence[ChunkKey], *, is_read: bool = True) -> None:
    """Acquire, read, release."""
    lease, found = session.acquire(SPEC, *((key, 0, 0) for key in keys), deadline_ms=10_000)
    for position in found:
        session.read(lease, SIZE, position)
    session.release(lease, unread=() if is_read else [lease])


def test_page_describes_agent_sessions_and_namespaces(agent: Agent) -> None:
    facts = {"model": "tiny", "salt": "tenant-secret"}
    spec = build_namespace(facts, tokens_per_chunk=256, groups=SPEC.groups)
    with engine(agent, PREFILL, protocol=OLDEST_PROTOCOL_VERSION) as session:
        session.open(spec)
        session.store(spec, key_of(1), bytes_of(SIZE, 1))
        page = page_of(agent)
        (seen,) = page["sessions"]
    assert (page["version"], page["protocol"]) == (__version__, PROTOCOL_VERSION)
    assert (page["arena_bytes"], page["num_chunks"], page["num_sessions"]) == (16 << 20, 1, 1)
    assert page["used_bytes"] >= SIZE
    assert page["index"] == {"health": "memory", "reason": "", "message": ""}
    assert (seen["engine"], seen["role"], seen["transport"]) == ("engine-1", "prefill", "Stream")
    assert (seen["namespace"], seen["protocol"]) == (spec.digest.hex(), OLDEST_PROTOCOL_VERSION)
    assert (seen["vllm_version"], seen["larder_version"]) == ("0.11", "9.9")
    (namespace,) = page["namespaces"]
    assert (namespace["digest"], namespace["tokens_per_chunk"]) == (spec.digest.hex(), 256)
    assert namespace["bytes_per_token"] == SIZE // 256
    assert (namespace["num_chunks"], namespace["num_bytes"]) == (1, SIZE)
    assert namespace["facts"]["model"] == "tiny"
    # Two salts can be compared, but not read.
    assert namespace["facts"]["salt"].startswith("sha256:")
    assert "tenant-secret" not in json.dumps(page)
    assert "outcomes" not in page


def test_description_that_is_no_object_shows_no_facts(agent: Agent) -> None:
    import hashlib

    with engine(agent, PREFILL) as session:
        for description in ("[1]", "{", "[" * 30_000):
            request = cache_pb2.OpenNamespaceRequest(
                session_token=session.token, description=description, tokens_per_chunk=256,
                namespace_digest=hashlib.sha256(description.encode()).digest(),
                groups=[cache_pb2.GroupShape(kind="full", num_shards=1, shard_bytes=SIZE)],
            )  # fmt: skip
            session.cache.OpenNamespace(request, timeout=5)
        assert [n["facts"] for n in page_of(agent)["namespaces"]] == [{}, {}, {}]


def test_flows_tell_who_stored_who_found_and_who_read(agent: Agent) -> None:
    with engine(agent, PREFILL) as prefill, engine(agent, DECODE) as decode:
        for session in (prefill, decode):
            session.open(SPEC)
        keys = store(prefill, "a", "b", "c")
        own = store(decode, "d")
        # Seen before anybody asked: nothing was read of what was stored.
        assert flow(agent, "prefill", "decode") == (3, 0, 0)
        answer = decode.lookup(SPEC, [*keys, *own, key_of("none")], take_lease=True)
        assert flow(agent, "prefill", "decode") == (3, 3, 0)
        assert flow(agent, "decode", "decode") == (1, 1, 0)
        # The same request asks again: that is no other lookup.
        decode.lookup(
            SPEC,
            [*keys, *own, key_of("none")],
            take_lease=True,
            superseded_lease_id=answer.lease_id,
        )
        assert flow(agent, "prefill", "decode") == (3, 3, 0)
        load(decode, keys[:2])
        assert flow(agent, "prefill", "decode") == (3, 3, 2)
        assert flow(agent, "decode", "prefill") == (1, 0, 0)


def test_what_was_not_read_does_not_count_as_loaded(agent: Agent) -> None:
    with (
        engine(agent, PREFILL) as prefill,
        engine(agent, DECODE) as decode,
        engine(agent, DECODE, rank=1) as second_rank,
    ):
        for session in (prefill, decode, second_rank):
            session.open(SPEC)
        keys = store(prefill, "a", "b")
        load(decode, keys, is_read=False)
        # Every rank reads: one of them stands for the engine.
        load(second_rank, keys)
        lookup = decode.lookup(SPEC, keys, take_lease=True)
        decode.release(lookup.lease_id)
        assert flow(agent, "prefill", "decode") == (2, 2, 0)


def test_a_chunk_counts_once_however_many_shards_it_has(agent: Agent) -> None:
    spec = a_namespace(shard_bytes=(1000, 2000), num_shards=(2, 1), name="two groups")
    with engine(agent, PREFILL) as prefill, engine(agent, DECODE) as decode:
        prefill.open(spec)
        decode.open(spec)
        key = key_of("k")
        for group, shard in ((0, 0), (0, 1), (1, 0)):
            size = spec.groups[group].shard_bytes
            prefill.store(spec, key, bytes_of(size, shard), group, shard)
        lease, _ = decode.acquire(spec, (key, 0, 0), (key, 0, 1), (key, 1, 0), deadline_ms=5000)
        decode.release(lease)
        assert flow(agent, "prefill", "decode", spec) == (1, 0, 1)


def test_role_of_the_writer_survives_the_way_to_another_agent() -> None:
    shared = MemoryIndexStore()
    tcp = {"listen": "127.0.0.1:0", "insecure": True, "http": "127.0.0.1:0", "cpu": "32Mi"}
    with (
        local_agent(index=MemoryIndex(shared), **tcp) as owner,
        local_agent(index=MemoryIndex(shared), **tcp) as puller,
        engine(owner, PREFILL) as prefill,
        engine(puller, DECODE) as decode,
    ):
        prefill.open(SPEC)
        decode.open(SPEC)
        keys = store(prefill, "a", "b")
        wait_until(
            lambda: set(decode.lookup(SPEC, keys).presence) == {cache_pb2.PRESENCE_READY_ELSEWHERE},
            what="the announcement",
        )
        # The index does not know who stored what other agents hold.
        assert flow(puller, "elsewhere", "decode")[1] >= 2
        load(decode, keys)
        assert flow(puller, "prefill", "decode") == (0, 0, 2)
        decode.lookup(SPEC, keys, take_lease=True)
        assert flow(puller, "prefill", "decode") == (0, 2, 2)
        # Stored is what engines stored: once in all agents together.
        assert flow(owner, "prefill", "decode") == (2, 0, 0)


@pytest.mark.parametrize(
    ("protocol", "is_spoken"),
    [
        (PROTOCOL_VERSION + 1, False),
        (PROTOCOL_VERSION, True),
        (PROTOCOL_VERSION - 1, True),
        (PROTOCOL_VERSION - 2, False),
    ],
)
def test_this_protocol_and_the_one_before_are_spoken(
    agent: Agent, protocol: int, is_spoken: bool
) -> None:
    if is_spoken:
        with engine(agent, DECODE, protocol=protocol) as session:
            # The welcome names what both speak.
            assert session.welcome.protocol_version == protocol
            session.open(SPEC)
            key = key_of("k")
            session.store(SPEC, key, bytes_of(SIZE, "k"))
            load(session, [key])
            assert page_of(agent)["refused_hellos"] == []
        return
    with pytest.raises(grpc.RpcError) as refused, engine(agent, DECODE, protocol=protocol):
        pass
    code, details = status_of(refused.value)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert f"speaks {PROTOCOL_VERSION - 1} and {PROTOCOL_VERSION}" in details
    (sentence,) = page_of(agent)["refused_hellos"]
    assert sentence.startswith(f"engine engine-2: protocol_version {protocol} is not spoken here")
    newer = protocol > PROTOCOL_VERSION
    assert sentence.endswith("upgrade the agent" if newer else "upgrade the engine")


def test_refused_clients_are_kept_once_each_and_not_too_many(agent: Agent) -> None:
    for number in [*range(20), 3]:
        with pytest.raises(grpc.RpcError):
            StubSession(unix(agent), role=DECODE, protocol=99, name=f"engine\n-{number}")
    refused = page_of(agent)["refused_hellos"]
    assert len(refused) == len(set(refused)) == 16
    assert refused[0].startswith("engine engine-3: ")
    assert refused[1].startswith("engine engine-19: ")


def test_refusals_of_a_client_that_came_right_are_forgotten() -> None:
    now_s = [1000.0]
    folder_agent = local_agent(http="127.0.0.1:0")
    with folder_agent as agent:
        agent.guarded.clock = lambda: now_s[0]
        agent.registry.note_refused("engine engine-1", "protocol_version 9 is not spoken here")
        assert len(page_of(agent)["refused_hellos"]) == 1
        now_s[0] += 61.0
        assert page_of(agent)["refused_hellos"] == []


def test_outcomes_are_shown_when_asked_for_and_by_request(agent: Agent) -> None:
    with engine(agent, DECODE) as session:
        session.open(SPEC)
        session.ping(*(
            cache_pb2.Outcome(
                kind=cache_pb2.OUTCOME_KIND_LOOKUP, reason=cache_pb2.OUTCOME_REASON_HIT,
                request_id=request, asked_tokens=512, served_tokens=256,
            )
            for request in ("cmpl-1", "cmpl-2", "cmpl-2-0")
        ))  # fmt: skip
        assert "outcomes" not in page_of(agent)
        assert [o["request_id"] for o in page_of(agent, "?outcomes=1")["outcomes"]] == [
            "cmpl-1",
            "cmpl-2",
            "cmpl-2-0",
        ]
        found = page_of(agent, "?outcomes=1&request=cmpl-2")["outcomes"]
        assert [o["request_id"] for o in found] == ["cmpl-2", "cmpl-2-0"]
        assert found[0]["namespace"] == SPEC.digest.hex()
        assert (found[0]["kind"], found[0]["reason"], found[0]["rank"]) == ("lookup", "hit", 0)
        assert page_of(agent, "?request=absent")["outcomes"] == []
        assert "outcomes" not in page_of(agent, "?" + "&".join("a=1" for _ in range(20)))
