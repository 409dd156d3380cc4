"""What callers and users get wrong is answered with what, which and what to do."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from agent_process import AgentProcess, a_namespace, local_agent
from agent_stub import (
    StubSession,
    bytes_of,
    checksums,
    key_of,
    open_request,
    status_of,
    stub_session,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheservice.agent.config import build_config, parse_host_port, parse_size
from cacheservice.agent.serve import Agent
from cacheservice.core.layout import GroupShape, NamespaceSpec
from cacheservice.errors import ConfigError
from cacheservice.v1 import cache_pb2

SIZE = 200_000
SPEC = a_namespace(shard_bytes=(SIZE, SIZE), num_shards=(1, 2))
INVALID = grpc.StatusCode.INVALID_ARGUMENT
NOT_FOUND = grpc.StatusCode.NOT_FOUND
SERVICE = "/cacheservice.v1.CacheService/"
UNARY = (
    "OpenNamespace",
    "Lookup",
    "Release",
    "Reserve",
    "Commit",
    "Abort",
    "GetStatus",
    "ReserveTails",
    "AcquireTails",
)
STREAMED = ("Acquire", "Read")


@pytest.fixture(name="agent", scope="module")
def _agent() -> Iterator[Agent]:
    with local_agent() as agent:
        yield agent


@pytest.fixture(name="session")
def _session(agent: Agent) -> Iterator[StubSession]:
    with stub_session(f"unix:{agent.config.agent_socket}") as session:
        session.open(SPEC)
        yield session


def rejection(call: object, *args: object, **fields: object) -> tuple[grpc.StatusCode, str]:
    """Status and words that a call is refused with."""
    try:
        answer = call(*args, **fields)  # type: ignore[operator]
        if hasattr(answer, "__next__"):
            list(answer)
    except grpc.RpcError as error:
        return status_of(error)
    raise AssertionError("the call was not refused")


def test_unknown_namespace(session: StubSession) -> None:
    code, words = rejection(session.lookup, a_namespace(name="foreign"), [key_of(0)])
    assert code is NOT_FOUND
    assert "OpenNamespace" in words


def test_unknown_token(session: StubSession) -> None:
    session.token = b"x" * 16
    for call in (
        lambda: session.lookup(SPEC, []),
        lambda: session.acquire(SPEC, (key_of(0), 0, 0)),
        lambda: session.release(1),
        lambda: session.reserve(SPEC, (key_of(0), 0, 0)),
        lambda: session.commit((1, [])),
        lambda: session.read(1, 1),
        lambda: session.write(1, b"x"),
        lambda: session.open(SPEC),
    ):
        code, words = rejection(call)
        assert code is grpc.StatusCode.UNAUTHENTICATED
        assert "session" in words


@pytest.mark.parametrize("key", [b"", b"x" * 31, b"x" * 33])
def test_key_of_a_wrong_length(session: StubSession, key: bytes) -> None:
    code, words = rejection(session.lookup, SPEC, [key_of(0), key])
    assert (code, "chunk_keys[1]" in words, "32" in words) == (INVALID, True, True)
    for call in (session.reserve, session.acquire):
        code, words = rejection(call, SPEC, (key, 0, 0))
        assert (code, "[0]" in words, "32" in words) == (INVALID, True, True)


def test_size_that_differs_from_the_layout(session: StubSession) -> None:
    item = cache_pb2.ReserveItem(shard=cache_pb2.ShardRef(chunk_key=key_of(0)), size_bytes=SIZE + 1)
    request = cache_pb2.ReserveRequest(
        session_token=session.token, namespace_digest=SPEC.digest, items=[item]
    )
    code, words = rejection(session.cache.Reserve, request)
    assert (code, str(SIZE) in words, "items[0].size_bytes" in words) == (INVALID, True, True)


def test_group_and_shard_outside_the_layout(session: StubSession) -> None:
    for group, shard, what in ((2, 0, "group"), (0, 1, "shard"), (1, 2, "shard")):
        code, words = rejection(session.acquire, SPEC, (key_of(0), group, shard))
        assert (code, f"shards[0].{what}" in words) == (INVALID, True)


def test_too_many_keys_are_refused_before_they_are_read(session: StubSession) -> None:
    code, words = rejection(session.lookup, SPEC, [key_of(0)] * 5000)
    assert (code, "4096" in words) == (INVALID, True)
    code, words = rejection(session.lookup, SPEC, [key_of(0)] * 1_000_000)
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "larger than max" in words


def test_bounds_of_the_contract(session: StubSession) -> None:
    for fields, name in (
        ({"wait_ms": 5001}, "wait_ms"),
        ({"wait_num_chunks": 2}, "wait_num_chunks"),
    ):
        code, words = rejection(session.lookup, SPEC, [key_of(0)], **fields)
        assert (code, name in words) == (INVALID, True)
    code, words = rejection(session.acquire, SPEC, (key_of(0), 0, 0), deadline_ms=60_001)
    assert (code, "deadline_ms" in words) == (INVALID, True)
    code, words = rejection(session.acquire, SPEC)
    assert (code, "shards" in words) == (INVALID, True)
    code, words = rejection(session.acquire, SPEC, *[(key_of(0), 0, 0)] * 16385)
    assert (code, "16384" in words) == (INVALID, True)
    code, words = rejection(session.reserve, SPEC, *[(key_of(0), 0, 0)] * 16385)
    assert (code, "16384" in words) == (INVALID, True)
    code, words = rejection(session.release, *range(1, 4098))
    assert (code, "4096" in words) == (INVALID, True)


def test_second_commit_and_second_release(session: StubSession) -> None:
    content = bytes_of(SIZE, "twice")
    (reserved,) = session.reserve(SPEC, (key_of("twice"), 0, 0))
    session.write(reserved.reservation_id, content)
    item = (reserved.reservation_id, checksums(content))
    code, words = rejection(session.commit, item, item)
    assert (code, "twice" in words) == (INVALID, True)
    session.commit(item)
    code, words = rejection(session.commit, item)
    assert (code, str(reserved.reservation_id) in words) == (NOT_FOUND, True)
    abort = cache_pb2.AbortRequest(
        session_token=session.token, reservation_ids=[reserved.reservation_id]
    )
    assert rejection(session.cache.Abort, abort)[0] is NOT_FOUND
    lease, _ = session.acquire(SPEC, (key_of("twice"), 0, 0))
    session.release(lease)
    code, words = rejection(session.release, lease)
    assert (code, str(lease) in words) == (NOT_FOUND, True)
    code, words = rejection(session.read, lease, SIZE)
    assert code is NOT_FOUND


def test_wrong_number_of_checksums(session: StubSession) -> None:
    content = bytes_of(SIZE, "sums")
    (reserved,) = session.reserve(SPEC, (key_of("sums"), 0, 0))
    session.write(reserved.reservation_id, content)
    code, words = rejection(session.commit, (reserved.reservation_id, [1, 2]))
    assert (code, "1 pieces" in words) == (INVALID, True)


def test_another_session_can_not_touch_what_is_not_its_own(
    agent: Agent, session: StubSession
) -> None:
    content = bytes_of(SIZE, "mine")
    (reserved,) = session.reserve(SPEC, (key_of("mine"), 0, 0))
    with stub_session(f"unix:{agent.config.agent_socket}") as other:
        assert rejection(other.write, reserved.reservation_id, content)[0] is NOT_FOUND
        assert (
            rejection(other.commit, (reserved.reservation_id, checksums(content)))[0] is NOT_FOUND
        )
        session.write(reserved.reservation_id, content)
        session.commit((reserved.reservation_id, checksums(content)))
        lease, _ = session.acquire(SPEC, (key_of("mine"), 0, 0))
        assert rejection(other.read, lease, SIZE)[0] is NOT_FOUND
        assert rejection(other.release, lease)[0] is NOT_FOUND
    assert session.release(lease) == [True]


def test_frames_outside_their_extent(session: StubSession) -> None:
    (reserved,) = session.reserve(SPEC, (key_of("frames"), 1, 1))
    write = session.cache.Write

    def frame(start: int, payload: bytes) -> Iterator[cache_pb2.WriteRequest]:
        yield cache_pb2.WriteRequest(
            session_token=session.token,
            reservation_id=reserved.reservation_id,
            start=start,
            payload=payload,
        )

    assert rejection(write, frame(5, b"x"))[0] is grpc.StatusCode.OUT_OF_RANGE
    assert rejection(write, frame(0, b"x" * (SIZE + 1)))[0] is grpc.StatusCode.OUT_OF_RANGE
    code, words = rejection(write, frame(0, b"x" * (2**20 + 1)))
    assert (code, "payload" in words) == (INVALID, True)
    assert session.write(reserved.reservation_id, b"x" * SIZE) == SIZE


def test_read_range_outside_the_shard(session: StubSession) -> None:
    session.store(SPEC, key_of("range"), bytes_of(SIZE, "range"))
    lease, _ = session.acquire(SPEC, (key_of("range"), 0, 0))
    code, words = rejection(session.read, lease, SIZE + 1)
    assert (code, "ranges[0]" in words) == (INVALID, True)
    assert rejection(session.read, lease, SIZE, position=1)[0] is NOT_FOUND


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"namespace_digest": b"x" * 31}, "namespace_digest"),
        ({"namespace_digest": b"x" * 32}, "SHA-256"),
        ({"description": ""}, "description"),
        ({"description": "x" * 65537}, "description"),
        ({"tokens_per_chunk": 0}, "tokens_per_chunk"),
    ],
)
def test_namespace_that_is_malformed(
    session: StubSession, change: dict[str, object], field: str
) -> None:
    request = open_request(SPEC, session.token)
    for name, value in change.items():
        setattr(request, name, value)
    code, words = rejection(session.cache.OpenNamespace, request)
    assert (code, field in words) == (INVALID, True)


@pytest.mark.parametrize(
    "group", [("full", 0, 1), ("full", 257, 1), ("full", 1, 0), ("x" * 33, 1, 1)]
)
def test_group_that_is_malformed(session: StubSession, group: tuple[str, int, int]) -> None:
    spec = NamespaceSpec(SPEC.digest, SPEC.description, 256, (GroupShape(*group),))
    code, words = rejection(session.open, spec)
    assert (code, "groups[0]" in words) == (INVALID, True)


def test_more_shards_than_an_entry_of_the_index_can_name(session: StubSession) -> None:
    groups = tuple(GroupShape("full", 256, 1) for _ in range(8))
    spec = NamespaceSpec(SPEC.digest, SPEC.description, 256, groups)
    code, words = rejection(session.open, spec)
    assert (code, "2040" in words) == (INVALID, True)


def test_same_digest_with_another_shape(session: StubSession) -> None:
    spec = NamespaceSpec(SPEC.digest, SPEC.description, 256, (GroupShape("full", 1, 7),))
    code, words = rejection(session.open, spec)
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert "layout" in words


@pytest.mark.parametrize(
    ("hello", "code", "word"),
    [
        (
            cache_pb2.SessionHello(protocol_version=99, role=1),
            grpc.StatusCode.FAILED_PRECONDITION,
            "version",
        ),
        (cache_pb2.SessionHello(protocol_version=1), INVALID, "role"),
        (
            cache_pb2.SessionHello(protocol_version=1, role=1, engine_name="x" * 129),
            INVALID,
            "engine_name",
        ),
        (None, INVALID, "hello"),
    ],
)
def test_hello_that_is_wrong(
    session: StubSession, hello: cache_pb2.SessionHello | None, code: grpc.StatusCode, word: str
) -> None:
    request = cache_pb2.SessionRequest(hello=hello) if hello else cache_pb2.SessionRequest()
    seen, words = rejection(session.cache.Session, iter([request]))
    assert (seen, word in words) == (code, True)


def test_session_that_sends_no_ping_but_a_second_hello(agent: Agent) -> None:
    with stub_session(f"unix:{agent.config.agent_socket}") as session:
        session._requests.put(cache_pb2.SessionRequest(hello=cache_pb2.SessionHello()))
        code, words = rejection(lambda: next(session.stream))
        assert (code, "pings only" in words) == (INVALID, True)


@settings(max_examples=60)
@given(st.binary(max_size=300), st.sampled_from([*UNARY, *STREAMED]))
def test_garbage_gets_a_status_and_harms_nobody(agent: Agent, garbage: bytes, method: str) -> None:
    with grpc.insecure_channel(f"unix:{agent.config.agent_socket}") as channel:
        check_garbage(channel, method, garbage)


def test_truncated_messages_get_a_status(agent: Agent, session: StubSession) -> None:
    whole = session.acquire_request(SPEC, (key_of(0), 0, 0), (key_of(1), 1, 1)).SerializeToString()
    chance = random.Random(1)
    for stop in range(1, len(whole)):
        check_garbage(session.channel, "Acquire", whole[:stop])
        flipped = bytearray(whole)
        flipped[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        check_garbage(session.channel, "Lookup", bytes(flipped))
    code, words = rejection(session.channel.unary_unary(SERVICE + "Lookup"), whole[:-1], timeout=10)
    assert (code, "can't be parsed" in words) == (INVALID, True)
    code, words = rejection(
        session.channel.stream_unary(SERVICE + "Write"), iter([b"\xff"]), timeout=10
    )
    assert (code, "can't be parsed" in words) == (INVALID, True)
    assert not session.ping().draining


def check_garbage(channel: grpc.Channel, method: str, content: bytes) -> None:
    """Send bytes; whatever the answer, it is one of the contract's and no fault of the agent."""
    try:
        if method in STREAMED:
            list(channel.unary_stream(SERVICE + method)(content, timeout=10))
        else:
            channel.unary_unary(SERVICE + method)(content, timeout=10)
    except grpc.RpcError as error:
        code, words = status_of(error)
        assert code in {
            INVALID, NOT_FOUND, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED,
        }, words  # fmt: skip


@pytest.mark.parametrize(
    ("text", "size"),
    [("2Gi", 2**31), ("1.5Mi", 3 * 2**19), ("64MiB", 2**26), ("1G", 10**9), ("4096", 4096)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "2Gx", "-1Gi", "0", "two", "1e9", "0.3"])
def test_sizes_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no"):
        parse_size(text)


@pytest.mark.parametrize("text", ["", "host", ":1", "host:", "host:x", "host:70000", "::1:5"])
def test_addresses_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"HOST:PORT|\[HOST\]"):
        parse_host_port(text)
    assert str(parse_host_port("[::1]:5")) == "[::1]:5"


def test_unknown_field_of_the_file_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text("socket_dri: /x\ncpu: 2Gi\n")
    with pytest.raises(ConfigError, match=r"'socket_dri'; did you mean socket_dir\?"):
        build_config({}, file=file)
    file.write_text("- 1\n")
    with pytest.raises(ConfigError, match="must be a mapping"):
        build_config({}, file=file)
    file.write_text("cpu: [\n")
    with pytest.raises(ConfigError, match="is no YAML"):
        build_config({}, file=file)
    with pytest.raises(ConfigError, match="can't be read"):
        build_config({}, file=tmp_path / "absent")


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "agent.yaml"
    file.write_text(
        "socket_dir: /from/file\ncpu: 2Gi\nallow_uid: [1, 2]\ninsecure: true\neviction: lru\n"
    )
    config = build_config({"cpu": "1Gi"}, file=file)
    assert (config.cpu, str(config.socket_dir), config.allow_uid) == (2**30, "/from/file", (1, 2))
    assert (config.insecure, config.eviction.value) == (True, "LRU")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "--socket-dir is missing"),
        ({"socket_dir": "/x"}, "--cpu is missing"),
        ({"socket_dir": "/x", "cpu": "2Gi", "eviction": "MRU"}, "S3FIFO or LRU"),
        ({"socket_dir": "/x", "cpu": "2Gi", "index": "http://x"}, "redis://HOST:PORT"),
        ({"socket_dir": "/x", "cpu": "2Gi", "listen": "0.0.0.0:1"}, "--insecure"),
        ({"socket_dir": "/x", "cpu": "2Gi", "advertise": "0.0.0.0:1"}, "--listen"),
        ({"socket_dir": "/x", "cpu": "2Gi", "tls_cert": "/x"}, "--tls-key, --tls-ca missing"),
        ({"socket_dir": "/" + "x" * 100, "cpu": "2Gi"}, "107 bytes"),
        ({"socket_dir": "/x", "cpu": "2Gi", "max_sessions": "0"}, "--max-sessions"),
        ({"socket_dir": "/x", "cpu": "2Gi", "lease_seconds": "soon"}, "--lease-seconds"),
        ({"socket_dir": "/x", "cpu": "2Gi", "allow_uid": ["root"]}, "--allow-uid"),
        ({"socket_dir": "/x", "cpu": "2Gi", "insecure": "yes"}, "true nor false"),
        ({"socket_dir": "/x", "cpu": True}, "--cpu"),
        ({"socket_dir": "/x", "cpu": "2Gi", "log_level": "LOUD"}, "--log-level"),
    ],
)
def test_configuration_that_is_wrong_says_what_to_do(values: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config(values)
    assert words in str(caught.value)


def test_message_about_an_index_quotes_no_password() -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"socket_dir": "/x", "cpu": "2Gi", "index": "http://me:secret@host"})
    assert "secret" not in str(caught.value)


def serve(*args: str) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "cacheservice", "serve", *args],
        capture_output=True, text=True, timeout=60, check=False, env={"COLUMNS": "200", "PATH": ""},
    )  # fmt: skip


def test_unknown_flag_names_the_nearest() -> None:
    done = serve("--socet-dir", "/tmp/x")
    assert done.returncode == 2
    assert "--socket-dir" in done.stderr


def test_arena_larger_than_memory_is_refused_with_numbers(tmp_path: Path) -> None:
    done = serve("--socket-dir", str(tmp_path), "--cpu", "900Ti")
    assert done.returncode == 2
    assert "--cpu 921600.00 GiB does not fit" in done.stderr
    assert "smaller --cpu" in done.stderr
    assert "Traceback" not in done.stderr


def test_second_agent_of_a_directory_is_refused_in_words() -> None:
    with AgentProcess(cpu="8Mi") as agent:
        done = serve("--socket-dir", str(agent.socket_dir), "--cpu", "8Mi")
        assert done.returncode == 2
        assert "another agent serves there" in done.stderr
        with stub_session(f"unix:{agent.socket_dir}/agent.sock") as session:
            assert not session.ping().draining


def test_listener_without_certificates_is_refused_in_a_sentence(tmp_path: Path) -> None:
    done = serve("--socket-dir", str(tmp_path), "--cpu", "8Mi", "--listen", "127.0.0.1:0")
    assert done.returncode == 2
    assert "--insecure" in done.stderr


def test_port_that_is_taken_is_refused_in_words() -> None:
    with AgentProcess(cpu="8Mi", tcp=True) as agent:
        assert agent.address is not None
        with (
            pytest.raises(ConfigError, match="can't listen there"),
            local_agent(listen=agent.address, insecure=True),
        ):
            pass


def test_help_names_every_flag() -> None:
    done = serve("--help")
    assert done.returncode == 0
    for flag in ("--socket-dir", "--cpu", "--index", "--listen", "--advertise", "--node", "--http", "--key-prefix",
                 "--index-password-file", "--max-shards", "--config", "--tls-cert", "--eviction"):  # fmt: skip
        assert flag in done.stdout
