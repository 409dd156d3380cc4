"""The client against an agent that answers wrongly, late or not at all: every failure is a value, in time."""

from __future__ import annotations

import logging
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from agent_process import local_agent, target_of
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_agent import ScriptedAgent

from cacheservice.client import (
    AgentTarget,
    CacheClient,
    ClientIdentity,
    ClientState,
    Deadlines,
    LookupWait,
    MemorySink,
    MemorySource,
    Role,
    ShardRead,
    ShardWrite,
    TlsFiles,
)
from cacheservice.client.copy import piece_checksum
from cacheservice.client.deadlines import Deadline, Watch
from cacheservice.client.plane import LeasedRead, ReservedWrite
from cacheservice.client.session import GOODBYE_S, SessionKeeper
from cacheservice.client.stream import (
    StreamPlane,
    _IncomingRange,
    split_read_response,
    write_header,
)
from cacheservice.core.keys import ChunkKey, short_hex
from cacheservice.core.layout import GroupShape, build_namespace
from cacheservice.core.outcomes import Outcome, OutcomeKind, Presence, Reason
from cacheservice.core.store import Store
from cacheservice.errors import ConfigError
from cacheservice.v1 import cache_pb2

MIB = 1024 * 1024
SHARD_BYTES = 2 * MIB + 4321
SPEC = build_namespace(
    {"model": "m"}, tokens_per_chunk=256, groups=[GroupShape("full", 1, SHARD_BYTES)]
)
TOOL = ClientIdentity(Role.TOOL)
QUICK = Deadlines(
    lookup_s=0.5, acquire_s=0.5, reserve_s=0.5, commit_s=0.5, load_s=1.0, reconnect_s=0.3
)
# How much longer than its deadline a call may take where four tests share a core.
SLACK_S = 1.0


def key(number: int) -> ChunkKey:
    return ChunkKey(number.to_bytes(32, "big"))


def content(number: int, size: int = SHARD_BYTES) -> bytearray:
    return bytearray(random.Random(number).randbytes(size))


def write_of(number: int, source: Any = None, size: int = SHARD_BYTES) -> ShardWrite:
    parent = key(number - 1) if number else None
    return ShardWrite(
        key(number), parent, number, 0, 0, size, source or MemorySource(content(number, size))
    )


def read_of(number: int, buffer: bytearray, start: int = 0, stop: int = SHARD_BYTES) -> ShardRead:
    return ShardRead(key(number), 0, 0, SHARD_BYTES, start, stop, MemorySink(buffer, origin=start))


@pytest.fixture
def socket_dir() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(
        prefix="larder-"
    ) as folder:  # tmp_path is too long for a socket
        yield Path(folder)


@pytest.fixture
def agent(socket_dir: Path) -> Iterator[ScriptedAgent]:
    agent = ScriptedAgent(socket_dir).start()
    yield agent
    agent.stop()


@pytest.fixture
def connect(socket_dir: Path) -> Iterator[Callable[..., CacheClient]]:
    clients: list[CacheClient] = []

    def make(*, wait: bool = True, **settings: Any) -> CacheClient:
        settings.setdefault("deadlines", QUICK)
        client = CacheClient(AgentTarget(socket_dir=socket_dir), TOOL, **settings)
        clients.append(client)
        client.open_namespace(SPEC)
        client.start()
        if wait:
            assert client.wait_connected(10), client.state().message
        return client

    yield make
    for client in clients:
        client.close()


def until(condition: Callable[[], bool], what: str, timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.01)


def fail_with(code: grpc.StatusCode) -> Callable[..., Any]:
    def refuse(request: Any, context: Any, built_in: Any) -> Any:
        context.abort(code, "scripted")

    return refuse


class SlowSource:
    """Gathers zeros, calling `meanwhile` with the number of each piece first."""

    def __init__(self, meanwhile: Callable[[int], None]) -> None:
        self.meanwhile = meanwhile
        self.num_pieces = 0

    def gather(self, start: int, stop: int, destination: int) -> None:
        self.meanwhile(self.num_pieces)
        self.num_pieces += 1


class SlowSink:
    """Takes bytes nowhere, calling `meanwhile` with the number of each piece first."""

    def __init__(self, meanwhile: Callable[[int], None]) -> None:
        self.meanwhile = meanwhile
        self.num_pieces = 0

    def scatter(self, start: int, stop: int, source: int) -> None:
        self.meanwhile(self.num_pieces)
        self.num_pieces += 1


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
def test_stored_bytes_come_back(agent: ScriptedAgent, connect: Any, data_plane: Any) -> None:
    client = connect(data_plane=data_plane)
    assert client.state().data_plane == data_plane
    assert client.state().node_number in (7, 8)
    assert [r.reason for r in client.store(SPEC.digest, [write_of(0), write_of(1)])] == [
        Reason.HIT
    ] * 2
    answer = client.lookup(SPEC.digest, [key(0), key(1), key(2)])
    assert answer.reason is None
    assert [answer.of(i, 0) for i in range(3)] == [
        Presence.READY_HERE,
        Presence.READY_HERE,
        Presence.ABSENT,
    ]
    assert answer.lease_id
    buffers = [bytearray(SHARD_BYTES), bytearray(SHARD_BYTES)]
    results = client.retrieve(
        SPEC.digest,
        [read_of(1, buffers[1]), read_of(0, buffers[0])],
        lookup_lease=answer.lease_id,
        epoch=answer.epoch,
    )
    assert [(r.reason, r.num_bytes) for r in results] == [(Reason.HIT, SHARD_BYTES)] * 2
    assert buffers == [content(0), content(1)]
    assert len(agent.released) == 1, "the load's lease is released, the lookup's stays the caller's"


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
@pytest.mark.parametrize("checksums", ["always", "remote"])
@pytest.mark.parametrize(
    ("start", "stop"),
    [(0, 1), (5, 5), (MIB - 1, MIB + 1), (MIB, 2 * MIB), (100, SHARD_BYTES), (SHARD_BYTES - 1, SHARD_BYTES)],
)  # fmt: skip
def test_part_of_a_shard_comes_back(
    agent: ScriptedAgent, connect: Any, data_plane: Any, checksums: Any, start: int, stop: int
) -> None:
    client = connect(data_plane=data_plane, checksums=checksums)
    client.store(SPEC.digest, [write_of(0)])
    buffer = bytearray(stop - start)
    results = client.retrieve(SPEC.digest, [read_of(0, buffer, start, stop)])
    assert [(r.reason, r.num_bytes) for r in results] == [(Reason.HIT, stop - start)]
    assert buffer == content(0)[start:stop]


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
def test_wrong_bytes_are_never_a_hit_and_the_chunk_is_dropped(
    agent: ScriptedAgent, connect: Any, data_plane: Any
) -> None:
    client = connect(data_plane=data_plane)
    client.store(SPEC.digest, [write_of(0), write_of(1)])
    agent.memory[MIB + 17] ^= 1
    buffer = bytearray(SHARD_BYTES)
    results = client.retrieve(SPEC.digest, [read_of(0, buffer), read_of(1, buffer)])
    assert [r.reason for r in results] == [Reason.CHECKSUM, Reason.HIT]
    assert buffer == content(1)
    assert agent.corrupt == [0], "the agent is asked to look at it again"
    first = bytearray(MIB)
    assert client.retrieve(SPEC.digest, [read_of(0, first, 0, MIB)])[0].reason is Reason.HIT
    assert first == content(0)[:MIB], "pieces that the range does not touch are not looked at"


def test_trusting_client_skips_checksums_of_local_bytes_only(
    agent: ScriptedAgent, connect: Any
) -> None:
    client = connect(checksums="remote")
    client.store(SPEC.digest, [write_of(0)])
    agent.memory[17] ^= 1
    buffer = bytearray(SHARD_BYTES)
    assert client.retrieve(SPEC.digest, [read_of(0, buffer)])[0].reason is Reason.HIT

    def remote(request: Any, context: Any, built_in: Any) -> Iterator[Any]:
        for answer in built_in(request, context):
            answer.shards[0].is_remote = True
            yield answer

    agent.script["Acquire"] = remote
    assert client.retrieve(SPEC.digest, [read_of(0, buffer)])[0].reason is Reason.CHECKSUM


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
def test_lease_that_did_not_hold_spoils_the_load(
    agent: ScriptedAgent, connect: Any, data_plane: Any
) -> None:
    client = connect(data_plane=data_plane)
    client.store(SPEC.digest, [write_of(0)])
    agent.script["Release"] = lambda request, context, built_in: cache_pb2.ReleaseResponse(
        held=[False]
    )
    results = client.retrieve(
        SPEC.digest, [read_of(0, bytearray(SHARD_BYTES)), read_of(9, bytearray(SHARD_BYTES))]
    )
    assert [(r.reason, r.num_bytes) for r in results] == [
        (Reason.LEASE_LOST, 0),
        (Reason.EVICTED, 0),
    ]
    agent.script["Release"] = fail_with(grpc.StatusCode.NOT_FOUND)
    results = client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])
    assert results[0].reason is Reason.LEASE_LOST


def test_another_epoch_is_a_miss_without_a_call(agent: ScriptedAgent, connect: Any) -> None:
    client = connect()
    client.store(SPEC.digest, [write_of(0)])
    results = client.retrieve(
        SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))], epoch=agent.epoch ^ 2
    )
    assert results[0].reason is Reason.EPOCH_CHANGED
    assert agent.num_calls["Acquire"] == 0


def test_duplicates_and_full_agents_skip_stores(agent: ScriptedAgent, connect: Any) -> None:
    client = connect()
    numbers = range(agent.arena_bytes // SHARD_BYTES + 1)
    results = client.store(SPEC.digest, [write_of(n) for n in numbers])
    assert [r.reason for r in results] == [Reason.HIT] * (len(numbers) - 1) + [Reason.NO_SPACE]
    assert client.store(SPEC.digest, [write_of(0)])[0].reason is Reason.DUPLICATE


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        (cache_pb2.COMMIT_RESULT_LOST_RACE, Reason.DUPLICATE),
        (cache_pb2.COMMIT_RESULT_EXPIRED, Reason.DEADLINE),
        (cache_pb2.COMMIT_RESULT_CHECKSUM_MISMATCH, Reason.CHECKSUM),
        (99, Reason.INTERNAL),
    ],
)
def test_each_commit_has_its_own_result(
    agent: ScriptedAgent, connect: Any, result: Any, reason: Reason
) -> None:
    client = connect()
    agent.script["Commit"] = lambda request, context, built_in: cache_pb2.CommitResponse(
        results=[cache_pb2.COMMIT_RESULT_COMMITTED, result]
    )
    results = client.store(SPEC.digest, [write_of(0), write_of(1)])
    assert [r.reason for r in results] == [Reason.HIT, reason]


@pytest.mark.parametrize("data_plane", ["auto", "shared_memory", "stream", "none"])
def test_without_an_agent_everything_is_a_miss_at_once(connect: Any, data_plane: Any) -> None:
    client = connect(wait=False, data_plane=data_plane)
    started = time.monotonic()
    client.open_namespace(SPEC)
    assert client.lookup(SPEC.digest, [key(0)]).reason is Reason.AGENT_DOWN
    assert client.store(SPEC.digest, [write_of(0)])[0].reason is Reason.AGENT_DOWN
    assert (
        client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])[0].reason
        is Reason.AGENT_DOWN
    )
    client.release(5)
    client.report(Outcome(OutcomeKind.LOOKUP, Reason.ABSENT, "r", 1, 0, 1))
    assert time.monotonic() - started < SLACK_S
    assert not client.state().connected
    until(lambda: "agent.sock" in client.state().message, "the message names the socket")


_CODES = [code for code in grpc.StatusCode if code is not grpc.StatusCode.OK]


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
@pytest.mark.parametrize(
    "method",
    [
        "OpenNamespace",
        "Lookup",
        "Reserve",
        "Commit",
        "Write",
        "Acquire",
        "Read",
        "Release",
        "Abort",
    ],
)
def test_no_status_of_any_call_escapes_or_makes_a_hit(
    agent: ScriptedAgent, connect: Any, data_plane: Any, method: str
) -> None:
    client = connect(data_plane=data_plane)
    client.store(SPEC.digest, [write_of(0)])
    room = agent.next_offset
    for code in _CODES:
        assert client.wait_connected(10)
        agent.next_offset = room
        agent.script[method] = fail_with(code)
        calls_before = agent.num_calls[method]
        client.open_namespace(SPEC)
        lookup = client.lookup(SPEC.digest, [key(0)])
        stored = client.store(SPEC.digest, [write_of(1)])[0].reason
        loaded = client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])[0].reason
        was_asked = agent.num_calls[method] > calls_before
        agent.script.clear()
        agent.shards.pop((SPEC.digest, key(1), 0, 0), None)
        # Some end the session.
        until(lambda: client.lookup(SPEC.digest, [key(0)]).reason is None, "connected anew")
        if not was_asked:
            assert method in ("Abort", "Write", "Read")
            continue
        assert (lookup.reason is not None) or method != "Lookup"
        assert stored is not Reason.HIT or method not in ("Reserve", "Commit", "Write"), code
        assert loaded is not Reason.HIT or method not in ("Acquire", "Read", "Release"), code


@pytest.mark.parametrize(
    ("data_plane", "method", "reason"),
    [
        ("auto", "Lookup", Reason.DEADLINE),
        ("auto", "Acquire", Reason.DEADLINE),
        ("auto", "Release", Reason.DEADLINE),
        ("stream", "Read", Reason.DEADLINE),
        ("auto", "Reserve", Reason.NO_SPACE),
        ("auto", "Commit", Reason.NO_SPACE),
        ("stream", "Write", Reason.NO_SPACE),
    ],
)
def test_agent_out_of_call_slots_is_late_for_readers_and_full_for_writers(
    agent: ScriptedAgent, connect: Any, data_plane: Any, method: str, reason: Reason
) -> None:
    client = connect(data_plane=data_plane)
    client.store(SPEC.digest, [write_of(0)])
    agent.script[method] = fail_with(grpc.StatusCode.RESOURCE_EXHAUSTED)
    if method == "Lookup":
        assert client.lookup(SPEC.digest, [key(0)]).reason is reason
    elif reason is Reason.DEADLINE:
        read = read_of(0, bytearray(SHARD_BYTES))
        assert client.retrieve(SPEC.digest, [read])[0].reason is reason
    else:
        assert client.store(SPEC.digest, [write_of(1)])[0].reason is reason


@pytest.mark.parametrize("method", ["Lookup", "Reserve", "Commit", "Acquire", "Release"])
def test_agent_that_never_answers_costs_the_deadline(
    agent: ScriptedAgent, connect: Any, method: str
) -> None:
    client = connect()
    client.store(SPEC.digest, [write_of(0)])
    over = threading.Event()

    def hang(request: Any, context: Any, built_in: Any) -> Any:
        over.wait(20)
        return built_in(request, context)

    agent.script[method] = hang
    try:
        for call in (
            lambda: [client.lookup(SPEC.digest, [key(0)], deadline_s=0.2).reason],
            lambda: [r.reason for r in client.store(SPEC.digest, [write_of(1)], deadline_s=0.2)],
            lambda: [
                r.reason
                for r in client.retrieve(
                    SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))], deadline_s=0.2
                )
            ],
        ):
            started = time.monotonic()
            reasons = call()
            assert time.monotonic() - started < 0.2 + SLACK_S
            misses = {Reason.DEADLINE, Reason.DUPLICATE}
            if method == "Reserve":
                misses.add(Reason.AGENT_DOWN)  # the session is over: nobody knows what it holds
            assert set(reasons) <= {None, Reason.HIT, *misses}
    finally:
        over.set()


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
def test_slow_source_and_sink_cost_the_deadline(
    agent: ScriptedAgent, connect: Any, data_plane: Any
) -> None:
    client = connect(data_plane=data_plane)
    pause = threading.Event()
    source = SlowSource(lambda piece: pause.wait(0.15) and None)
    writes = [write_of(n, source) for n in range(5)]
    started = time.monotonic()
    results = client.store(SPEC.digest, writes, deadline_s=0.3)
    assert time.monotonic() - started < 0.3 + SLACK_S
    assert {r.reason for r in results} == {Reason.DEADLINE}
    until(lambda: len(agent.aborted) == 5, "all reservations aborted")
    client.store(SPEC.digest, [write_of(10)])
    sink = SlowSink(lambda piece: pause.wait(0.2) and None)
    read = ShardRead(key(10), 0, 0, SHARD_BYTES, 0, SHARD_BYTES, sink)
    started = time.monotonic()
    assert client.retrieve(SPEC.digest, [read], deadline_s=0.3)[0].reason is Reason.DEADLINE
    assert time.monotonic() - started < 0.3 + SLACK_S
    until(lambda: len(agent.released) == 1, "the lease is given back")


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
@pytest.mark.parametrize("after_pieces", range(7))
def test_store_that_is_given_up_is_aborted(
    agent: ScriptedAgent, connect: Any, data_plane: Any, after_pieces: int
) -> None:
    client = connect(data_plane=data_plane)
    source = SlowSource(lambda piece: None)
    threads: set[threading.Thread] = set()

    def give_up() -> bool:
        threads.add(threading.current_thread())
        return source.num_pieces >= after_pieces

    writes = [write_of(0, source), write_of(1, source)]
    results = client.store(SPEC.digest, writes, give_up=give_up)
    assert threads == {threading.current_thread()}, "the caller is asked in its own thread only"
    assert [r.reason for r in results] == [Reason.CANCELLED] * 2
    assert source.num_pieces == after_pieces
    assert agent.num_calls["Commit"] == 0
    if agent.num_calls["Reserve"]:
        until(lambda: len(agent.aborted) == 2, "both reservations aborted")


def test_store_is_given_up_while_the_agent_takes_no_frames(
    agent: ScriptedAgent, connect: Any
) -> None:
    client = connect(data_plane="stream")
    taking_none, over = threading.Event(), threading.Event()

    def take_none(requests: Any, context: Any, built_in: Any) -> Any:
        taking_none.set()
        over.wait(20)
        return cache_pb2.WriteResponse()

    agent.script["Write"] = take_none
    try:
        writes = [write_of(n) for n in range(8)]
        results = client.store(SPEC.digest, writes, deadline_s=20, give_up=taking_none.is_set)
        assert {r.reason for r in results} == {Reason.CANCELLED}
    finally:
        over.set()


def test_channel_that_was_closed_meanwhile_is_no_agent() -> None:
    channel = grpc.insecure_channel("unix:/nowhere")
    plane = StreamPlane(
        channel, session_token=b"t" * 16, piece_bytes=MIB, reason_of=lambda *_: Reason.INTERNAL
    )
    channel.close()
    deadline = Deadline(time.monotonic, 10)
    watch = Watch(deadline, end_of_session=lambda: None)
    written = plane.write([ReservedWrite(write_of(0), 1, 0)], watch=watch, deadline=deadline)
    read = LeasedRead(read_of(0, bytearray(SHARD_BYTES)), 0, 0, None)
    assert written == [Reason.AGENT_DOWN]
    assert plane.read(1, [read], watch=watch, deadline=deadline) == [Reason.AGENT_DOWN]


@pytest.mark.parametrize("data_plane", ["shared_memory", "stream"])
def test_failing_source_spoils_its_shard_only_as_far_as_it_must(
    agent: ScriptedAgent, connect: Any, data_plane: Any, caplog: Any
) -> None:
    def fail(piece: int) -> None:
        raise RuntimeError("page is gone")

    client = connect(data_plane=data_plane)
    results = client.store(SPEC.digest, [write_of(0), write_of(1, SlowSource(fail))])
    assert [r.reason for r in results] == [Reason.HIT, Reason.INTERNAL]
    until(lambda: len(agent.aborted) == 1, "the failed one aborted")
    read = ShardRead(key(0), 0, 0, SHARD_BYTES, 0, SHARD_BYTES, SlowSink(fail))
    assert client.retrieve(SPEC.digest, [read])[0].reason is Reason.INTERNAL
    assert "page is gone" in caplog.text
    buffer = bytearray(SHARD_BYTES)
    assert client.retrieve(SPEC.digest, [read_of(0, buffer)])[0].reason is Reason.HIT


@pytest.mark.parametrize(
    "extent", [(1 << 40, SHARD_BYTES), (0, SHARD_BYTES - 1), (32 * MIB - 1, SHARD_BYTES)]
)
def test_extent_that_can_not_be_is_refused(
    agent: ScriptedAgent, connect: Any, extent: tuple[int, int]
) -> None:
    offset, length = extent
    client = connect(data_plane="shared_memory")
    client.store(SPEC.digest, [write_of(0)])

    def misplace_reserved(request: Any, context: Any, built_in: Any) -> Any:
        answer = built_in(request, context)
        answer.shards[0].extent.offset, answer.shards[0].extent.length = offset, length
        return answer

    def misplace_acquired(request: Any, context: Any, built_in: Any) -> Iterator[Any]:
        for answer in built_in(request, context):
            answer.shards[0].extent.offset, answer.shards[0].extent.length = offset, length
            yield answer

    agent.script.update(Reserve=misplace_reserved, Acquire=misplace_acquired)
    assert client.store(SPEC.digest, [write_of(1)])[0].reason is Reason.INTERNAL
    until(lambda: len(agent.aborted) == 1, "aborted")
    assert (
        client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])[0].reason
        is Reason.INTERNAL
    )


def test_answers_that_do_not_fit_the_question_are_misses(
    agent: ScriptedAgent, connect: Any
) -> None:
    client = connect()
    client.store(SPEC.digest, [write_of(0)])
    agent.script["Lookup"] = lambda request, context, built_in: cache_pb2.LookupResponse(
        presence=b"\1"
    )
    assert client.lookup(SPEC.digest, [key(0), key(1)]).reason is Reason.INTERNAL
    agent.script["Reserve"] = lambda request, context, built_in: cache_pb2.ReserveResponse()
    assert client.store(SPEC.digest, [write_of(1)])[0].reason is Reason.INTERNAL

    def strange(request: Any, context: Any, built_in: Any) -> Iterator[Any]:
        for answer in built_in(request, context):
            answer.shards[0].position = 77
            yield answer

    agent.script["Acquire"] = strange
    assert (
        client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])[0].reason
        is Reason.INTERNAL
    )
    read = ShardRead(key(0), 0, 0, SHARD_BYTES, 5, SHARD_BYTES + 1, MemorySink(bytearray(1)))
    assert client.retrieve(SPEC.digest, [read])[0].reason is Reason.INTERNAL


def test_frames_that_make_no_sense_are_a_miss(agent: ScriptedAgent, connect: Any) -> None:
    client = connect(data_plane="stream")
    client.store(SPEC.digest, [write_of(0)])
    for frames in (
        [],
        [cache_pb2.ReadResponse(range_index=3, start=0, payload=b"x")],
        [cache_pb2.ReadResponse(range_index=0, start=5, payload=b"x")],
        [cache_pb2.ReadResponse(range_index=0, start=0, payload=bytes(SHARD_BYTES + 1))],
    ):
        agent.script["Read"] = lambda request, context, built_in, frames=frames: iter(frames)
        results = client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])
        assert results[0].reason is Reason.INTERNAL


def test_batches_beyond_the_wire_limits_are_split(agent: ScriptedAgent, connect: Any) -> None:
    client = connect()
    sizes: list[int] = []
    leases: list[bool] = []
    waits: list[int] = []

    def count(request: Any, context: Any, built_in: Any) -> Any:
        sizes.append(len(request.chunk_keys))
        leases.append(request.take_lease)
        waits.append(request.wait_num_chunks)
        return built_in(request, context)

    agent.script["Lookup"] = count
    answer = client.lookup(
        SPEC.digest,
        [key(n) for n in range(9000)],
        wait=LookupWait.PENDING,
        wait_num_chunks=5000,
        wait_s=1.0,
    )
    assert answer.reason is None
    assert len(answer.presence) == 9000
    assert sizes == [4096, 4096, 808]
    assert leases == [True, False, False]
    assert waits == [4096, 904, 0]
    reserved: list[int] = []

    def ready(request: Any, context: Any, built_in: Any) -> Any:
        reserved.append(len(request.items))
        return cache_pb2.ReserveResponse(
            shards=[cache_pb2.ReservedShard(result=cache_pb2.RESERVE_RESULT_READY)]
            * len(request.items)
        )

    agent.script["Reserve"] = ready
    source = MemorySource(bytearray(1))
    writes = [write_of(n, source, size=1) for n in range(16_385)]
    results = client.store(SPEC.digest, writes, deadline_s=30)
    assert {r.reason for r in results} == {Reason.DUPLICATE}
    assert reserved == [16_384, 1]


@pytest.mark.parametrize("why", ["refused", "unsealed", "not offered", "gone"])
def test_streams_when_the_arena_can_not_be_had_and_says_why(
    socket_dir: Path, connect: Any, caplog: Any, why: str
) -> None:
    caplog.set_level(logging.WARNING)
    agent = ScriptedAgent(socket_dir, offers_arena=why != "not offered")
    if why == "refused":
        agent.arena_status = 3
    if why == "unsealed":
        agent.seals = 0
    agent.start()
    if why == "gone":
        (socket_dir / "arena.sock").unlink()
    try:
        client = connect()
        assert client.state().data_plane == "stream"
        expected = {
            "refused": "uid",
            "unsealed": "not sealed",
            "not offered": "not offer",
            "gone": "arena.sock",
        }
        assert expected[why] in client.state().message
        assert [h.maps_arena for h in agent.hellos] == [True, False]
        assert client.store(SPEC.digest, [write_of(0)])[0].reason is Reason.HIT
        warnings = [r for r in caplog.records if "without shared memory" in r.getMessage()]
        assert len(warnings) == 1
        strict = connect(wait=False, data_plane="shared_memory")
        until(
            lambda: expected[why] in strict.state().message,
            "the strict client says why it is not connected",
        )
        assert not strict.state().connected
    finally:
        if why == "gone":
            (socket_dir / "arena.sock").touch()
        agent.stop()


def test_reconnects_and_opens_namespaces_before_anybody_sees_the_session(
    socket_dir: Path, connect: Any
) -> None:
    states: list[ClientState] = []
    first = ScriptedAgent(socket_dir).start()
    client = connect(on_change=states.append)
    client.store(SPEC.digest, [write_of(0)])
    first.stop()
    until(lambda: not client.state().connected, "the client sees the agent go")
    assert client.lookup(SPEC.digest, [key(0)]).reason is Reason.AGENT_DOWN
    second = ScriptedAgent(socket_dir)
    entered, go_on = threading.Event(), threading.Event()

    def hold(request: Any, context: Any, built_in: Any) -> Any:
        entered.set()
        go_on.wait(10)
        return built_in(request, context)

    second.script["OpenNamespace"] = hold
    second.start()
    try:
        assert entered.wait(10)
        assert client.lookup(SPEC.digest, [key(0)]).reason is Reason.AGENT_DOWN
        go_on.set()
        assert client.wait_connected(10)
        answer = client.lookup(SPEC.digest, [key(0)])
        assert (answer.reason, answer.epoch) == (None, second.epoch)
        assert answer.of(0, 0) is Presence.ABSENT
        connected = [s for s in states if s.connected]
        assert {s.epoch for s in connected} == {first.epoch, second.epoch}
    finally:
        second.stop()


@pytest.mark.parametrize(
    "code",
    [
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.INTERNAL,
    ],
)
@pytest.mark.parametrize("is_first", [True, False])
def test_namespace_that_could_not_be_opened_is_tried_again(
    socket_dir: Path, connect: Any, code: grpc.StatusCode, is_first: bool, caplog: Any
) -> None:
    agent = ScriptedAgent(socket_dir)
    other = build_namespace({"model": "o"}, tokens_per_chunk=256, groups=SPEC.groups)
    refusals = threading.Semaphore(0)
    opens = threading.Event()

    def refuse_at_first(request: Any, context: Any, built_in: Any) -> Any:
        if request.namespace_digest != other.digest or opens.is_set():
            return built_in(request, context)
        refusals.release()
        return context.abort(code, "scripted")

    agent.script["OpenNamespace"] = refuse_at_first
    agent.start()
    try:
        client = connect(wait=not is_first)
        was_opened = client.open_namespace(other)
        assert is_first or not was_opened
        for _ in range(4):
            assert refusals.acquire(timeout=10)
        assert client.lookup(other.digest, [key(0)]).reason is not None
        opens.set()
        until(lambda: client.lookup(other.digest, [key(0)]).reason is None, "the namespace open")
        assert len([r for r in caplog.records if "does not open" in r.message]) <= 1
        num_calls = agent.num_calls["OpenNamespace"]
        num_pings = len(agent.pings)
        until(lambda: len(agent.pings) > num_pings + 2, "more pings")
        assert agent.num_calls["OpenNamespace"] <= num_calls + 1, (
            "asked until it is open, no longer"
        )
    finally:
        agent.stop()


@pytest.mark.parametrize("method", ["Lookup", "Reserve", "Acquire"])
def test_namespace_that_the_agent_closed_is_opened_again(
    agent: ScriptedAgent, connect: Any, method: str
) -> None:
    client = connect()
    client.store(SPEC.digest, [write_of(0)])
    agent.groups.clear()
    num_opened = agent.num_calls["OpenNamespace"]

    def as_the_agent_does(request: Any, context: Any, built_in: Any) -> Any:
        if request.namespace_digest not in agent.groups:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"namespace {short_hex(SPEC.digest)} is not open on this agent; call OpenNamespace first",
            )
        return built_in(request, context)

    agent.script[method] = as_the_agent_does

    def reason() -> Reason | None:
        if method == "Lookup":
            return client.lookup(SPEC.digest, [key(0)]).reason
        if method == "Reserve":
            return client.store(SPEC.digest, [write_of(1)])[0].reason
        return client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])[0].reason

    assert reason() is (Reason.NO_SPACE if method == "Reserve" else Reason.ABSENT)
    until(lambda: reason() in (None, Reason.HIT), "the namespace open again")
    assert agent.num_calls["OpenNamespace"] == num_opened + 1


def test_agent_that_dies_in_mid_copy_leaves_the_memory_mapped(
    socket_dir: Path, connect: Any
) -> None:
    agent = ScriptedAgent(socket_dir).start()
    client = connect(data_plane="shared_memory")
    client.store(SPEC.digest, [write_of(0)])
    results: list[Reason] = []

    def kill_at_second(piece: int) -> None:
        if piece == 1:
            agent.stop()
            until(lambda: not client.state().connected, "session ended")

    sink = SlowSink(kill_at_second)
    read = ShardRead(key(0), 0, 0, SHARD_BYTES, 0, SHARD_BYTES, sink)
    results.append(client.retrieve(SPEC.digest, [read])[0].reason)
    assert results == [Reason.AGENT_DOWN]
    assert sink.num_pieces == 2
    assert "memfd:scripted" not in Path("/proc/self/maps").read_text(), (
        "unmapped after the last copy"
    )


def test_arena_connection_outlives_the_last_copy(agent: ScriptedAgent, connect: Any) -> None:
    client = connect(data_plane="shared_memory")
    client.store(SPEC.digest, [write_of(0)])
    connection = agent.arena_connections[0]
    connection.settimeout(10)
    in_copy, go_on = threading.Event(), threading.Event()

    def hold(piece: int) -> None:
        in_copy.set()
        go_on.wait(10)

    read = ShardRead(key(0), 0, 0, SHARD_BYTES, 0, SHARD_BYTES, SlowSink(hold))
    loader = threading.Thread(target=client.retrieve, args=(SPEC.digest, [read]))
    loader.start()
    assert in_copy.wait(10)
    client.close()
    connection.setblocking(False)
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    connection.settimeout(10)
    go_on.set()
    assert connection.recv(1) == b"", "closed after the copy"
    loader.join()


def test_silent_agent_is_given_up(agent: ScriptedAgent, connect: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("cacheservice.client.session.SILENCE_S", 0.2)
    client = connect()
    agent.answers_pings = False
    until(lambda: len(agent.hellos) > 1, "a new session")
    agent.answers_pings = True
    until(lambda: client.state().connected, "connected again")


def test_outcomes_reach_the_agent_and_are_repeated_after_a_reconnect(
    socket_dir: Path, connect: Any
) -> None:
    first = ScriptedAgent(socket_dir)
    first.answers_pings = False
    first.start()
    client = connect()
    for number in range(3):
        client.report(Outcome(OutcomeKind.LOAD, Reason.HIT, f"r{number}" * 200, 1 << 40, 5, 7, 9))
    until(lambda: any(p.outcomes for p in first.pings), "sent once")
    first.stop()
    second = ScriptedAgent(socket_dir).start()
    try:
        until(
            lambda: sum(len(p.outcomes) for p in second.pings) >= 3,
            "sent again, nobody had confirmed them",
        )
        outcome = next(p for p in second.pings if p.outcomes).outcomes[0]
        assert outcome.request_id.startswith("r0r0")
        assert len(outcome.request_id) == 256
        assert outcome.asked_tokens == 0xFFFFFFFF
        until(lambda: len(second.pings) > 10, "confirmed ones are not repeated")
        assert sum(len(p.outcomes) for p in second.pings) == 3
    finally:
        second.stop()


def test_outcomes_of_the_last_calls_are_sent_before_a_close(
    agent: ScriptedAgent, connect: Any
) -> None:
    client = connect()
    until(lambda: agent.pings, "a ping, so that the next one is not due at once")
    for number in range(300):
        client.report(Outcome(OutcomeKind.LOAD, Reason.HIT, f"r{number}", 1, 1, 1))
    client.close()
    told = [o.request_id for ping in agent.pings for o in ping.outcomes]
    assert told == [f"r{number}" for number in range(300)]


def test_close_does_not_wait_long_for_an_agent_that_is_silent(
    agent: ScriptedAgent, connect: Any, monkeypatch: Any
) -> None:
    client = connect()
    waits: list[float] = []
    original = SessionKeeper._next_event

    def noted(keeper: Any, link: Any, timeout_s: float) -> object | None:
        waits.append(timeout_s)
        return original(keeper, link, timeout_s)

    monkeypatch.setattr(SessionKeeper, "_next_event", noted)
    agent.answers_pings = False
    client.report(Outcome(OutcomeKind.LOAD, Reason.HIT, "r", 1, 1, 1))
    client.close()
    assert any(p.outcomes for p in agent.pings)
    assert client.state() == ClientState(False, None, None, 0, "closed")
    assert waits[-1] <= GOODBYE_S


def test_acquire_that_is_refused_for_too_many_leases_has_no_space(monkeypatch: Any) -> None:
    with local_agent() as agent:
        client = CacheClient(target_of(agent), TOOL)
        client.open_namespace(SPEC)
        client.start()
        try:
            assert client.wait_connected(30)
            client.store(SPEC.digest, [write_of(0)])
            monkeypatch.setattr(Store, "_has_lease_room", lambda *_: False)
            (result,) = client.retrieve(SPEC.digest, [read_of(0, bytearray(SHARD_BYTES))])
            assert result.reason is Reason.NO_SPACE
        finally:
            client.close()


def test_outcomes_are_bounded(socket_dir: Path, connect: Any) -> None:
    client = connect(wait=False)
    for _ in range(2000):
        client.report(Outcome(OutcomeKind.LOOKUP, Reason.ABSENT, "r", 1, 0, 1))
    agent = ScriptedAgent(socket_dir).start()
    try:
        until(lambda: sum(len(p.outcomes) for p in agent.pings) >= 1024, "the bounded rest")
        assert sum(len(p.outcomes) for p in agent.pings) == 1024
        assert max(len(p.outcomes) for p in agent.pings) == 256
        assert agent.pings[-1].num_dropped_outcomes == 976
    finally:
        agent.stop()


def test_one_unknown_lease_does_not_keep_the_others(agent: ScriptedAgent, connect: Any) -> None:
    client = connect()
    released: list[int] = []

    def all_or_nothing(request: Any, context: Any, built_in: Any) -> Any:
        if 13 in request.lease_ids:
            context.abort(grpc.StatusCode.NOT_FOUND, "lease 13 is not this session's")
        released.extend(request.lease_ids)
        return built_in(request, context)

    agent.script["Release"] = all_or_nothing
    for lease in range(1, 21):
        client.release(lease)
    until(lambda: len(released) == 19, "all but the unknown one")
    assert sorted(released) == [n for n in range(1, 21) if n != 13]


def test_agent_that_stops_answering_does_not_keep_the_session_thread(
    agent: ScriptedAgent, connect: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("cacheservice.client.session.MAX_IDS_PER_CALL", 1)
    client = connect()
    over = threading.Event()

    def hang(request: Any, context: Any, built_in: Any) -> Any:
        over.wait(20)
        return built_in(request, context)

    agent.script["Release"] = hang
    try:
        for lease in range(1, 8):
            client.release(lease)
        until(lambda: agent.num_calls["Release"] == 1, "the first call of the clean-up")
        for _ in range(2):
            num_pings, num_calls = len(agent.pings), agent.num_calls["Release"]
            until(lambda n=num_pings: len(agent.pings) > n, "a ping")  # type: ignore[misc]
            # Counted before the pings: on a busy machine several may have come meanwhile.
            num_new = agent.num_calls["Release"] - num_calls
            assert num_new <= len(agent.pings) - num_pings + 1, "one unanswered call per ping"
        client.close()
        assert not any(t is client._keeper._thread for t in threading.enumerate())
        assert agent.num_calls["Release"] < 7
    finally:
        over.set()


def test_what_a_slow_agent_kept_from_being_tried_is_cleaned_up_later(
    agent: ScriptedAgent, connect: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("cacheservice.client.session.MAX_IDS_PER_CALL", 1)
    client = connect()
    over = threading.Event()

    def hang(request: Any, context: Any, built_in: Any) -> Any:
        over.wait(20)
        return built_in(request, context)

    agent.script["Release"] = hang
    client.release(1)
    until(lambda: agent.num_calls["Release"] == 1, "the first release")
    for lease in range(2, 6):
        client.release(lease)
    until(lambda: agent.num_calls["Release"] == 2, "the second release")
    assert agent.released == []
    agent.script.clear()
    # The first two may or may not have gone through; nobody asks twice.
    until(lambda: {3, 4, 5} <= set(agent.released), "the others are given back")
    over.set()


def test_many_calls_at_once(agent: ScriptedAgent, connect: Any) -> None:
    client = connect()
    client.store(SPEC.digest, [write_of(n) for n in range(4)])
    failures: list[str] = []

    def load(number: int) -> None:
        for _ in range(10):
            buffer = bytearray(SHARD_BYTES)
            reason = client.retrieve(SPEC.digest, [read_of(number, buffer)], deadline_s=20)[
                0
            ].reason
            if reason is not Reason.HIT or buffer != content(number):
                failures.append(f"{number}: {reason}")

    threads = [threading.Thread(target=load, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_client_that_moves_no_bytes_maps_nothing(agent: ScriptedAgent, connect: Any) -> None:
    client = connect(data_plane="none")
    assert (client.state().connected, client.state().data_plane) == (True, None)
    assert client.lookup(SPEC.digest, [key(0)]).reason is None
    assert client.lookup(SPEC.digest, []).reason is None
    assert agent.arena_connections == []
    assert client.store(SPEC.digest, [write_of(0)])[0].reason is Reason.INTERNAL


def test_closed_client_misses(agent: ScriptedAgent, connect: Any) -> None:
    client = connect()
    client.close()
    client.close()
    client.start()
    assert client.lookup(SPEC.digest, [key(0)]).reason is Reason.AGENT_DOWN
    assert client.state() == ClientState(False, None, None, 0, "closed")


_FORK = """
import os, sys, threading
from pathlib import Path
import cacheservice.client as larder
assert threading.active_count() == 1
client = larder.CacheClient(larder.AgentTarget(socket_dir=Path(sys.argv[1])), larder.ClientIdentity(larder.Role.TOOL))
client.start()
assert client.wait_connected(10)
child = os.fork()
if not child:
    answer = client.lookup(bytes(32), [bytes(32)])
    client.close()
    os._exit(0 if answer.reason is larder.client.Reason.AGENT_DOWN else 1)
_, status = os.waitpid(child, 0)
assert status == 0, status
assert client.state().connected
client.close()
"""


def test_forked_child_misses_and_disturbs_nobody(agent: ScriptedAgent) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _FORK, str(agent.socket_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "build",
    [
        AgentTarget,
        lambda: AgentTarget(socket_dir=Path("/run/larder"), address="host:1"),
        lambda: AgentTarget(socket_dir=Path("/" + "x" * 100)),
        lambda: AgentTarget(socket_dir=Path("/run"), tls=TlsFiles(Path("a"), Path("b"), Path("c"))),
    ],
)
def test_target_that_can_not_be_is_refused(build: Callable[[], AgentTarget]) -> None:
    with pytest.raises(ConfigError):
        build()


def test_unreadable_tls_file_is_named(tmp_path: Path) -> None:
    files = TlsFiles(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt")
    client = CacheClient(AgentTarget(address="localhost:1", tls=files), TOOL, deadlines=QUICK)
    client.start()
    until(lambda: "ca.crt" in client.state().message, "the message names the file")
    client.close()


@given(
    token=st.none() | st.binary(min_size=16, max_size=16),
    reservation=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
)
def test_hand_made_write_frames_are_protobuf(
    token: bytes | None, reservation: int, start: int, payload: bytes
) -> None:
    frame = write_header(token, reservation, start, len(payload)) + payload
    assert cache_pb2.WriteRequest.FromString(frame) == cache_pb2.WriteRequest(
        session_token=token or b"", reservation_id=reservation, start=start, payload=payload
    )


@given(
    index=st.integers(0, 2**32 - 1),
    start=st.integers(0, 2**64 - 1),
    payload=st.binary(max_size=300),
    later=st.booleans(),
)
def test_read_frames_are_taken_apart_as_protobuf_does(
    index: int, start: int, payload: bytes, later: bool
) -> None:
    frame = cache_pb2.ReadResponse(
        range_index=index, start=start, payload=payload
    ).SerializeToString()
    if later:
        frame += b"\xa0\x06\x01"  # field 100 of a later version
    got_index, got_start, holder, at = split_read_response(frame)
    assert (got_index, got_start, holder[at:]) == (index, start, payload)


@settings(deadline=None)
@given(
    shard_bytes=st.integers(1, 50),
    piece_bytes=st.integers(1, 20),
    verifies=st.booleans(),
    data=st.data(),
)
def test_any_framing_is_put_together(
    shard_bytes: int, piece_bytes: int, verifies: bool, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, shard_bytes - 1))
    stop = data.draw(st.integers(start + 1, shard_bytes))
    shard = random.Random(shard_bytes).randbytes(shard_bytes)
    sums = [
        piece_checksum(shard[at : at + piece_bytes]) for at in range(0, shard_bytes, piece_bytes)
    ]
    buffer = bytearray(stop - start)
    read = ShardRead(key(0), 0, 0, shard_bytes, start, stop, MemorySink(buffer, origin=start))
    incoming = _IncomingRange(LeasedRead(read, 0, 0, sums if verifies else None), piece_bytes)
    at = incoming.first
    while at < incoming.last:
        frame_stop = data.draw(st.integers(at + 1, incoming.last))
        prefix = b"head"[: data.draw(st.integers(0, 4))]
        incoming.take(prefix + shard[at:frame_stop], len(prefix), at)
        at = frame_stop
    assert incoming.result is Reason.HIT
    assert buffer == shard[start:stop]


def test_connection_is_not_inherited_by_programs_that_engines_start(
    agent: ScriptedAgent, connect: Any
) -> None:
    connect(data_plane="shared_memory")
    listing = subprocess.run(
        ["ls", "-l", "/proc/self/fd"], capture_output=True, text=True, check=True, close_fds=False
    )
    assert "memfd:scripted" not in listing.stdout
    assert os.getpid()
