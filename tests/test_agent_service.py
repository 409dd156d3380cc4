"""The agent's calls, over its real sockets, in this process."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from agent_process import a_namespace, local_agent, wait_until
from agent_stub import StubSession, bytes_of, checksums, key_of, status_of, stub_session
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import (
    ProtoReflectionDescriptorDatabase,
)

from cacheservice.agent.serve import SERVICES, Agent
from cacheservice.core.outcomes import Presence
from cacheservice.v1 import admin_pb2, cache_pb2

SIZE = 2_500_000
"""Two whole pieces and a part."""
SPEC = a_namespace(shard_bytes=(SIZE,))


@pytest.fixture(name="agent")
def _agent() -> Iterator[Agent]:
    with local_agent(cpu="32Mi") as agent:
        yield agent
        with agent.guarded.reading() as store:
            store.check_invariants()


@pytest.fixture(name="session")
def _session(agent: Agent) -> Iterator[StubSession]:
    with stub_session(unix(agent)) as session:
        session.open(SPEC)
        yield session


def unix(agent: Agent) -> str:
    return f"unix:{agent.config.agent_socket}"


def test_stored_bytes_come_back_exactly(session: StubSession) -> None:
    content = bytes_of(SIZE, "a")
    assert session.store(SPEC, key_of("a"), content) == cache_pb2.COMMIT_RESULT_COMMITTED
    lease, found = session.acquire(SPEC, (key_of("a"), 0, 0))
    assert found[0].result == cache_pb2.ACQUIRE_RESULT_READY
    assert list(found[0].piece_checksums) == checksums(content)
    assert not found[0].is_remote
    assert session.read(lease, SIZE) == content
    assert session.release(lease) == [True]


def test_parts_of_a_shard_can_be_read(session: StubSession) -> None:
    content = bytes_of(SIZE, "parts")
    session.store(SPEC, key_of("parts"), content)
    lease, _ = session.acquire(SPEC, (key_of("parts"), 0, 0))
    ranges = [(1_000_000, 2_300_001), (0, 0), (SIZE - 1, SIZE)]
    request = cache_pb2.ReadRequest(
        session_token=session.token, lease_id=lease,
        ranges=[cache_pb2.ShardRange(position=0, start=a, stop=b) for a, b in ranges],
    )  # fmt: skip
    read = [b"", b"", b""]
    for frame in session.cache.Read(request):
        assert frame.start == ranges[frame.range_index][0] + len(read[frame.range_index])
        assert len(frame.payload) <= 2**20
        read[frame.range_index] += frame.payload
    assert read == [content[a:b] for a, b in ranges]


def test_lookup_says_absent_pending_and_ready_and_leases_what_is_ready(
    session: StubSession,
) -> None:
    session.store(SPEC, key_of(0), bytes_of(SIZE, 0))
    (reserved,) = session.reserve(SPEC, (key_of(1), 0, 0))
    answer = session.lookup(SPEC, [key_of(0), key_of(1), key_of(2)], take_lease=True)
    assert list(answer.presence) == [Presence.READY_HERE, Presence.PENDING, Presence.ABSENT]
    assert answer.lease_id
    assert answer.lease_ttl_ms == 5000
    assert answer.index_asked
    renewed = session.lookup(
        SPEC, [key_of(0)], take_lease=True, superseded_lease_id=answer.lease_id
    )
    assert session.release(renewed.lease_id) == [True]
    with pytest.raises(grpc.RpcError) as caught:
        session.release(answer.lease_id)
    assert status_of(caught.value)[0] is grpc.StatusCode.NOT_FOUND
    session.cache.Abort(
        cache_pb2.AbortRequest(
            session_token=session.token, reservation_ids=[reserved.reservation_id]
        )
    )
    assert list(session.lookup(SPEC, [key_of(1)]).presence) == [Presence.ABSENT]


def test_second_writer_of_a_shard_skips(agent: Agent, session: StubSession) -> None:
    (first,) = session.reserve(SPEC, (key_of("w"), 0, 0))
    with stub_session(unix(agent)) as other:
        (second,) = other.reserve(SPEC, (key_of("w"), 0, 0))
        assert second.result == cache_pb2.RESERVE_RESULT_PENDING
        assert not second.reservation_id
        content = bytes_of(SIZE, "w")
        session.write(first.reservation_id, content)
        session.commit((first.reservation_id, checksums(content)))
        (third,) = other.reserve(SPEC, (key_of("w"), 0, 0))
        assert third.result == cache_pb2.RESERVE_RESULT_READY


def test_bytes_that_do_not_match_their_checksums_are_dropped(session: StubSession) -> None:
    content = bytes_of(SIZE, "c")
    good = [key_of("good"), key_of("torn"), key_of("short"), key_of("never")]
    reserved = session.reserve(SPEC, *((k, 0, 0) for k in good))
    ids = [r.reservation_id for r in reserved]
    session.write(ids[0], content)
    session.write(ids[1], b"\x00" + content[1:])
    session.write(ids[2], content[:-1])
    results = session.commit(*((i, checksums(content)) for i in ids))
    assert (
        results
        == [cache_pb2.COMMIT_RESULT_COMMITTED] + [cache_pb2.COMMIT_RESULT_CHECKSUM_MISMATCH] * 3
    )
    presence = session.lookup(SPEC, good).presence
    assert list(presence) == [Presence.READY_HERE, *[Presence.ABSENT] * 3]


def test_a_shard_may_come_in_several_write_calls(session: StubSession) -> None:
    content = bytes_of(SIZE, "several")
    (reserved,) = session.reserve(SPEC, (key_of("several"), 0, 0))
    for start, stop in ((0, 700_000), (700_000, 1_800_000), (1_800_000, SIZE)):
        frames = [
            cache_pb2.WriteRequest(
                session_token=session.token, reservation_id=reserved.reservation_id, start=at,
                payload=content[at : min(at + 333_333, stop)],
            )
            for at in range(start, stop, 333_333)
        ]  # fmt: skip
        assert session.cache.Write(iter(frames)).num_bytes == stop - start
    assert session.commit((reserved.reservation_id, checksums(content))) == [
        cache_pb2.COMMIT_RESULT_COMMITTED
    ]


def test_commit_with_an_unknown_reservation_commits_nothing(
    agent: Agent, session: StubSession
) -> None:
    content = bytes_of(SIZE, "all")
    one, two = session.reserve(SPEC, (key_of("all", 1), 0, 0), (key_of("all", 2), 0, 0))
    session.write(one.reservation_id, content)
    items = [(r, checksums(content)) for r in (one.reservation_id, two.reservation_id, 12345)]
    with pytest.raises(grpc.RpcError) as caught:
        session.commit(*items)
    assert status_of(caught.value)[0] is grpc.StatusCode.NOT_FOUND
    assert list(session.lookup(SPEC, [key_of("all", 1)]).presence) == [Presence.PENDING]
    assert session.commit(items[0]) == [cache_pb2.COMMIT_RESULT_COMMITTED]


def test_acquire_answers_pending_shards_when_they_become_ready(
    agent: Agent, session: StubSession
) -> None:
    content = bytes_of(SIZE, "p")
    session.store(SPEC, key_of("here"), content)
    late, never = session.reserve(SPEC, (key_of("late"), 0, 0), (key_of("never"), 0, 0))
    with stub_session(unix(agent)) as reader:
        shards = [(key_of(w), 0, 0) for w in ("late", "here", "never", "nowhere")]
        answers = iter(
            reader.cache.Acquire(
                reader.acquire_request(SPEC, *shards, deadline_ms=20_000), timeout=30
            )
        )
        first = next(answers)
        assert [(s.position, s.result) for s in first.shards] == [
            (1, cache_pb2.ACQUIRE_RESULT_READY)
        ]
        second = next(answers)
        assert [(s.position, s.result) for s in second.shards] == [
            (3, cache_pb2.ACQUIRE_RESULT_NOT_FOUND)
        ]
        session.write(late.reservation_id, content)
        session.commit((late.reservation_id, checksums(content)))
        third = next(answers)
        assert [(s.position, s.result) for s in third.shards] == [
            (0, cache_pb2.ACQUIRE_RESULT_READY)
        ]
        session.cache.Abort(
            cache_pb2.AbortRequest(
                session_token=session.token, reservation_ids=[never.reservation_id]
            )
        )
        fourth = next(answers)
        assert [(s.position, s.result) for s in fourth.shards] == [
            (2, cache_pb2.ACQUIRE_RESULT_NOT_FOUND)
        ]
        assert list(answers) == []
        assert {first.lease_id, second.lease_id, third.lease_id, fourth.lease_id} == {
            first.lease_id
        }
        assert reader.read(first.lease_id, SIZE, position=0) == content
        assert reader.release(first.lease_id) == [True]


def test_acquire_answers_the_rest_at_its_deadline(session: StubSession) -> None:
    session.reserve(SPEC, (key_of("slow"), 0, 0))
    _, found = session.acquire(SPEC, (key_of("slow"), 0, 0), (key_of("none"), 0, 0), deadline_ms=50)
    assert found[0].result == cache_pb2.ACQUIRE_RESULT_TIMED_OUT
    assert found[1].result == cache_pb2.ACQUIRE_RESULT_NOT_FOUND


def test_acquire_that_is_cancelled_gives_its_lease_back(agent: Agent, session: StubSession) -> None:
    session.store(SPEC, key_of("x"), bytes_of(SIZE, "x"))
    session.reserve(SPEC, (key_of("y"), 0, 0))
    request = session.acquire_request(
        SPEC, (key_of("x"), 0, 0), (key_of("y"), 0, 0), deadline_ms=60_000
    )
    call = session.cache.Acquire(request, timeout=70)
    next(iter(call))
    assert session.cache.GetStatus(cache_pb2.GetStatusRequest()).num_leases == 1
    call.cancel()
    wait_until(
        lambda: session.cache.GetStatus(cache_pb2.GetStatusRequest()).num_leases == 0,
        what="no lease left",
    )


def test_lookup_waits_for_pending_chunks(session: StubSession) -> None:
    content = bytes_of(SIZE, "pend")
    (reserved,) = session.reserve(SPEC, (key_of("pend"), 0, 0))
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            session.lookup, SPEC, [key_of("pend"), key_of("other")],
            wait=cache_pb2.LOOKUP_WAIT_PENDING, wait_num_chunks=2, wait_ms=5000,
        )  # fmt: skip
        session.write(reserved.reservation_id, content)
        assert not waiting.done()
        session.commit((reserved.reservation_id, checksums(content)))
        assert list(waiting.result().presence) == [Presence.READY_HERE, Presence.ABSENT]


def test_hand_over_lookup_waits_for_chunks_that_nobody_began(session: StubSession) -> None:
    content = bytes_of(SIZE, "ho")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(
            session.lookup, SPEC, [key_of("ho")], take_lease=True,
            wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=5000,
        )  # fmt: skip
        session.store(SPEC, key_of("ho"), content)
        answer = waiting.result()
    assert list(answer.presence) == [Presence.READY_HERE]
    assert answer.lease_id


@pytest.mark.parametrize("kind", ["recurrent", "sliding_window"])
def test_hand_over_waits_for_all_attention_and_the_last_state_only(
    agent: Agent, session: StubSession, kind: str
) -> None:
    spec = a_namespace(shard_bytes=(1000, 3000), kinds=("full", kind), name=kind)
    session.open(spec)
    keys = [key_of(kind, n) for n in range(3)]
    for key in keys[1:]:
        session.store(spec, key, bytes_of(1000, "pages"))
    # Closing the other session ends its lookup.
    with ThreadPoolExecutor(2) as pool, stub_session(unix(agent)) as other:
        in_vain = pool.submit(
            other.lookup, spec, [key_of("never")],
            wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=4000,
        )  # fmt: skip
        waiting = pool.submit(
            session.lookup, spec, keys,
            wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=3, wait_ms=5000,
        )  # fmt: skip
        session.store(spec, keys[2], bytes_of(3000, "state"), 1)
        assert not waiting.done()
        session.store(spec, keys[0], bytes_of(1000, "pages"))
        here, absent = Presence.READY_HERE, Presence.ABSENT
        assert list(waiting.result().presence) == [here, absent, here, absent, here, here]
        assert not in_vain.done(), "it came back with its time, not with the last state"


def test_hand_over_that_ends_with_a_local_chunk_waits_for_nothing_of_it(
    agent: Agent, session: StubSession
) -> None:
    """At its end nothing of a local chunk is read, so nothing of it is stored there."""
    spec = a_namespace(shard_bytes=(1000, 3000), kinds=("full", "chunked_local"))
    session.open(spec)
    session.store(spec, key_of("pages"), bytes_of(1000, "pages"))
    # Closing the other session ends its lookup.
    with ThreadPoolExecutor(1) as pool, stub_session(unix(agent)) as other:
        in_vain = pool.submit(
            other.lookup, spec, [key_of("never")],
            wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=4000,
        )  # fmt: skip
        answer = session.lookup(
            spec, [key_of("pages")],
            wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=5000,
        )  # fmt: skip
        assert list(answer.presence) == [Presence.READY_HERE, Presence.ABSENT]
        assert not in_vain.done(), "it came back with its time"


def test_lookup_wait_ends_with_its_time(session: StubSession) -> None:
    session.reserve(SPEC, (key_of("never"), 0, 0))
    answer = session.lookup(
        SPEC, [key_of("never")], wait=cache_pb2.LOOKUP_WAIT_PENDING, wait_num_chunks=1, wait_ms=30
    )
    assert list(answer.presence) == [Presence.PENDING]


def test_session_end_frees_what_it_held(agent: Agent, session: StubSession) -> None:
    session.store(SPEC, key_of("kept"), bytes_of(SIZE, "kept"))
    used = session.cache.GetStatus(cache_pb2.GetStatusRequest()).used_bytes
    other = StubSession(unix(agent))
    other.reserve(SPEC, (key_of("r"), 0, 0))
    other.acquire(SPEC, (key_of("kept"), 0, 0))
    other.lookup(SPEC, [key_of("kept")], take_lease=True)
    status = session.cache.GetStatus(cache_pb2.GetStatusRequest())
    assert (status.num_leases, status.num_reservations, status.num_sessions) == (2, 1, 2)
    other.close()

    def is_back() -> bool:
        now = session.cache.GetStatus(cache_pb2.GetStatusRequest())
        return (now.num_leases, now.num_reservations, now.num_sessions, now.used_bytes) == (
            0,
            0,
            1,
            used,
        )

    wait_until(is_back, what="counts at their start")
    with pytest.raises(grpc.RpcError) as caught:
        session.cache.Lookup(
            cache_pb2.LookupRequest(session_token=other.token, namespace_digest=SPEC.digest)
        )
    assert status_of(caught.value)[0] is grpc.StatusCode.UNAUTHENTICATED


def test_silent_session_is_ended() -> None:
    with local_agent(session_seconds=0.3) as agent, stub_session(unix(agent)) as session:
        session.open(SPEC)
        wait_until(lambda: not agent.registry.sessions(), what="the session's end")
        with pytest.raises(grpc.RpcError):
            session.ping()


def test_stream_without_a_hello_is_ended() -> None:
    with local_agent(session_seconds=0.3) as agent, grpc.insecure_channel(unix(agent)) as channel:
        from cacheservice.v1 import cache_pb2_grpc

        hold = threading.Event()

        def nothing() -> Iterator[cache_pb2.SessionRequest]:
            hold.wait(30)
            yield from ()

        call = cache_pb2_grpc.CacheServiceStub(channel).Session(nothing())
        with pytest.raises(grpc.RpcError):
            next(call)
        hold.set()


def test_sessions_are_limited() -> None:
    with local_agent(max_sessions=1) as agent, stub_session(unix(agent)):
        with pytest.raises(grpc.RpcError) as caught:
            StubSession(unix(agent))
        code, details = status_of(caught.value)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "--max-sessions" in details


def test_outcomes_are_kept_and_counted(agent: Agent, session: StubSession) -> None:
    lookup = cache_pb2.Outcome(
        kind=cache_pb2.OUTCOME_KIND_LOOKUP, reason=cache_pb2.OUTCOME_REASON_HIT, request_id="r1",
        asked_tokens=1000, served_tokens=768, duration_ms=3,
    )  # fmt: skip
    load = cache_pb2.Outcome(kind=cache_pb2.OUTCOME_KIND_LOAD, reason=99, request_id="x" * 300)  # type: ignore[arg-type]
    assert not session.ping(lookup, load).draining
    (engine,) = session.admin.ListEngines(admin_pb2.ListEnginesRequest()).engines
    assert engine.hello.engine_name == "stub"
    assert (engine.asked_tokens, engine.hit_tokens) == (1000, 768)
    assert {c.name: c.value for c in engine.outcomes} == {"lookup.hit": 1, "load.internal": 1}
    kept = list(agent.registry.kept_outcomes)
    assert [k.outcome.request_id for k in kept] == ["r1", "x" * 256]


def test_admin_lists_and_evicts(session: StubSession) -> None:
    for number in range(3):
        session.store(SPEC, key_of(number), bytes_of(SIZE, number))
    session.reserve(SPEC, (key_of("pending"), 0, 0))
    (namespace,) = session.admin.ListNamespaces(admin_pb2.ListNamespacesRequest()).namespaces
    assert (namespace.num_chunks, namespace.num_bytes) == (3, 3 * SIZE)
    assert namespace.description == SPEC.description
    (shard,) = session.admin.ListShards(
        admin_pb2.ListShardsRequest(namespace_digest=SPEC.digest, chunk_key=key_of(0))
    ).shards
    assert shard.state == admin_pb2.SHARD_STATE_READY
    assert shard.writer_role == cache_pb2.CLIENT_ROLE_TOOL
    lease, _ = session.acquire(SPEC, (key_of(0), 0, 0))
    evicted = session.admin.Evict(admin_pb2.EvictRequest())
    assert (evicted.num_chunks, evicted.num_leased) == (2, 1)
    session.release(lease)
    evicted = session.admin.Evict(
        admin_pb2.EvictRequest(namespace_digest=SPEC.digest, chunk_keys=[key_of(0)])
    )
    assert (evicted.num_chunks, evicted.num_leased) == (1, 0)


def test_large_calls_take_the_lock_in_slices_and_answer_in_order(
    agent: Agent, session: StubSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cacheservice.agent.service.SHARDS_AT_ONCE", 2)
    monkeypatch.setattr("cacheservice.agent.acquire._LEASED_AT_ONCE", 2)
    monkeypatch.setattr("cacheservice.agent.admin_service._EVICTED_AT_ONCE", 2)
    small = a_namespace(shard_bytes=(4096,), name="small")
    session.open(small)
    names = [(key_of("slice", n), 0, 0) for n in range(7)]
    content = bytes_of(4096, "slice")
    session.store(small, names[3][0], content)
    results = session.reserve(small, *names)
    ready, reserved = cache_pb2.RESERVE_RESULT_READY, cache_pb2.RESERVE_RESULT_RESERVED
    assert [r.result for r in results] == [ready if n == 3 else reserved for n in range(7)]
    for result in results[:3] + results[4:6]:
        session.write(result.reservation_id, content)
        session.commit((result.reservation_id, checksums(content)))
    lease, found = session.acquire(small, *names)
    assert {p for p, s in found.items() if s.result == cache_pb2.ACQUIRE_RESULT_READY} == {
        *range(6)
    }
    assert session.read(lease, 4096, position=5) == content
    assert session.admin.Evict(admin_pb2.EvictRequest()).num_leased == 6
    assert session.release(lease) == [True]
    evicted = session.admin.Evict(admin_pb2.EvictRequest(namespace_digest=small.digest))
    assert (evicted.num_chunks, evicted.num_bytes) == (6, 6 * 4096)


def test_lease_that_ran_out_while_reading_aborts_the_read() -> None:
    with local_agent(lease_seconds=0.3) as agent, stub_session(unix(agent)) as session:
        session.open(SPEC)
        session.store(SPEC, key_of("l"), bytes_of(SIZE, "l"))
        lease, _ = session.acquire(SPEC, (key_of("l"), 0, 0))

        def is_over() -> bool:
            with agent.guarded.reading() as store:
                return not store.lease_holds(
                    agent.registry.sessions()[0].id, lease, agent.guarded.clock()
                )

        wait_until(is_over, what="the lease's end")
        with pytest.raises(grpc.RpcError) as caught:
            session.read(lease, SIZE)
        assert status_of(caught.value)[0] in (grpc.StatusCode.ABORTED, grpc.StatusCode.NOT_FOUND)
        assert session.release(lease) == [False]


def test_drain_takes_nothing_new_and_says_so(agent: Agent, session: StubSession) -> None:
    content = bytes_of(SIZE, "d")
    (reserved,) = session.reserve(SPEC, (key_of("d"), 0, 0))
    session.admin.Drain(admin_pb2.DrainRequest())
    assert session.ping().draining
    with pytest.raises(grpc.RpcError) as caught:
        session.reserve(SPEC, (key_of("e"), 0, 0))
    assert status_of(caught.value)[0] is grpc.StatusCode.UNAVAILABLE
    session.write(reserved.reservation_id, content)
    assert session.commit((reserved.reservation_id, checksums(content))) == [
        cache_pb2.COMMIT_RESULT_COMMITTED
    ]
    status = health_pb2_grpc.HealthStub(session.channel).Check(health_pb2.HealthCheckRequest())
    assert status.status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_health_and_reflection_are_on(agent: Agent, session: StubSession) -> None:
    health = health_pb2_grpc.HealthStub(session.channel)
    for service in ("", *SERVICES):
        checked = health.Check(health_pb2.HealthCheckRequest(service=service))
        assert checked.status == health_pb2.HealthCheckResponse.SERVING
    assert set(SERVICES) < set(ProtoReflectionDescriptorDatabase(session.channel).get_services())


def test_tails_are_refused_in_words(session: StubSession) -> None:
    for call, request in (
        (session.cache.ReserveTails, cache_pb2.ReserveTailsRequest()),
        (session.cache.AcquireTails, cache_pb2.AcquireTailsRequest()),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(request)
        code, details = status_of(caught.value)
        assert code is grpc.StatusCode.UNIMPLEMENTED
        assert "tails are not served" in details


def test_stream_write_that_races_another_session_ends_well() -> None:
    """The first writer's time runs out, a second one commits, the first one comes late: bytes never mix."""
    with (
        local_agent(reservation_seconds=0.2) as short,
        stub_session(unix(short)) as slow,
        stub_session(unix(short)) as quick,
    ):
        slow.open(SPEC)
        theirs, ours = bytes_of(SIZE, "slow"), bytes_of(SIZE, "quick")
        (late,) = slow.reserve(SPEC, (key_of("race"), 0, 0))
        slow.write(late.reservation_id, theirs[:1_000_000])

        def is_free() -> bool:
            return list(quick.lookup(SPEC, [key_of("race")]).presence) == [Presence.ABSENT]

        wait_until(is_free, what="the reservation's end")
        assert quick.store(SPEC, key_of("race"), ours) == cache_pb2.COMMIT_RESULT_COMMITTED
        assert slow.commit((late.reservation_id, checksums(theirs))) == [
            cache_pb2.COMMIT_RESULT_LOST_RACE
        ]
        lease, found = quick.acquire(SPEC, (key_of("race"), 0, 0))
        assert list(found[0].piece_checksums) == checksums(ours)
        assert quick.read(lease, SIZE) == ours
        quick.release(lease)
        with short.guarded.reading() as store:
            counts = store.counts()
            store.check_invariants()
        assert (counts.pending_bytes, counts.quarantined_bytes, counts.num_reservations) == (
            0,
            0,
            0,
        )


def test_reserve_whose_caller_gave_up_meanwhile_keeps_nothing(
    agent: Agent, session: StubSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    reserving, go_on, reserved = threading.Event(), threading.Event(), threading.Event()
    with agent.guarded.reading() as store:
        reserve = store.reserve

    def slow(*args: Any) -> Any:
        reserving.set()
        go_on.wait(30)
        answers = reserve(*args)
        reserved.set()
        return answers

    monkeypatch.setattr(store, "reserve", slow)
    item = cache_pb2.ReserveItem(
        shard=cache_pb2.ShardRef(chunk_key=key_of("late")), size_bytes=SIZE
    )
    request = cache_pb2.ReserveRequest(
        session_token=session.token, namespace_digest=SPEC.digest, items=[item]
    )
    call = session.cache.Reserve.future(request, timeout=60)
    assert reserving.wait(30)
    call.cancel()
    # On the same connection, so the agent has seen the cancellation before it.
    for _ in range(3):
        health_pb2_grpc.HealthStub(session.channel).Check(health_pb2.HealthCheckRequest())
    go_on.set()
    assert reserved.wait(30)

    def is_clean() -> bool:
        with agent.guarded.reading() as store:
            counts = store.counts()
        return (counts.used_bytes, counts.num_reservations) == (0, 0)

    wait_until(is_clean, what="counts at their start")


def test_client_that_dies_while_it_writes_leaves_nothing(
    agent: Agent, session: StubSession
) -> None:
    other = StubSession(unix(agent))
    (reserved,) = other.reserve(SPEC, (key_of("half"), 0, 0))
    began = threading.Event()

    def frames() -> Iterator[cache_pb2.WriteRequest]:
        yield cache_pb2.WriteRequest(
            session_token=other.token, reservation_id=reserved.reservation_id, payload=b"x" * 2**20
        )
        began.wait(30)

    call = other.cache.Write.future(frames(), timeout=60)
    wait_until(lambda: agent._byte_streams.num_bytes_received, what="the first frame")
    other.channel.close()

    def is_clean() -> bool:
        with agent.guarded.reading() as store:
            counts = store.counts()
        return (counts.used_bytes, counts.num_reservations) == (0, 0)

    wait_until(is_clean, what="counts at their start")
    began.set()
    assert call.done()
    assert (
        session.store(SPEC, key_of("half"), bytes_of(SIZE, "half"))
        == cache_pb2.COMMIT_RESULT_COMMITTED
    )


def test_flipped_bit_is_seen_when_it_is_sent(agent: Agent, session: StubSession) -> None:
    session.store(SPEC, key_of("bit"), bytes_of(SIZE, "bit"))
    lease, found = session.acquire(SPEC, (key_of("bit"), 0, 0))
    agent.arena.view[found[0].extent.offset + 2**20] ^= 4
    assert checksums(session.read(lease, SIZE)) != list(found[0].piece_checksums)
    assert list(session.lookup(SPEC, [key_of("bit")]).presence) == [Presence.ABSENT]
    assert session.release(lease) == [True]
    assert session.cache.GetStatus(cache_pb2.GetStatusRequest()).used_bytes == 0


def test_reader_that_maps_the_arena_has_wrong_bytes_looked_at_again(
    agent: Agent, session: StubSession
) -> None:
    names = [(key_of("bit", n), 0, 0) for n in range(3)]
    for key, _, _ in names:
        session.store(SPEC, key, bytes_of(SIZE, key))
    other = session.lookup(SPEC, [key for key, _, _ in names], take_lease=True)
    lease, found = session.acquire(SPEC, *names)
    agent.arena.view[found[1].extent.offset + SIZE - 1] ^= 4
    gone, _ = session.acquire(SPEC, *names)
    session.release(gone)
    with pytest.raises(grpc.RpcError) as caught:
        report(session, [lease], [(gone, 1)])
    assert "lease_ids does not name" in status_of(caught.value)[1]
    # The first is a lie, the last position was never asked for.
    assert report(session, [lease], [(lease, 0), (lease, 1), (lease, 9)]) == [True]
    assert list(session.lookup(SPEC, [key for key, _, _ in names]).presence) == [
        Presence.READY_HERE,
        Presence.ABSENT,
        Presence.READY_HERE,
    ]
    assert session.store(SPEC, names[1][0], bytes_of(SIZE, "new")) == (
        cache_pb2.COMMIT_RESULT_COMMITTED
    ), "though a lookup's lease still holds the wrong bytes"
    assert session.release(other.lease_id) == [True]


def report(session: StubSession, leases: list[int], corrupt: list[tuple[int, int]]) -> list[bool]:
    request = cache_pb2.ReleaseRequest(
        session_token=session.token,
        lease_ids=leases,
        corrupt=[cache_pb2.LeasedPosition(lease_id=i, position=p) for i, p in corrupt],
    )
    return list(session.cache.Release(request, timeout=10).held)


def test_calls_above_the_limit_of_sleepers_are_answered_at_once() -> None:
    with local_agent(max_calls=1) as agent, stub_session(unix(agent)) as session:
        session.open(SPEC)
        session.reserve(SPEC, (key_of("w"), 0, 0))
        request = session.acquire_request(SPEC, (key_of("w"), 0, 0), deadline_ms=60_000)
        sleeper = session.cache.Acquire(request, timeout=70)
        wait_until(lambda: agent._waiting_calls._free._value == 0, what="the sleeper")
        _, found = session.acquire(SPEC, (key_of("w"), 0, 0), deadline_ms=60_000)
        assert found[0].result == cache_pb2.ACQUIRE_RESULT_TIMED_OUT
        answer = session.lookup(
            SPEC, [key_of("w")], wait=cache_pb2.LOOKUP_WAIT_PENDING, wait_num_chunks=1, wait_ms=5000
        )
        assert list(answer.presence) == [Presence.PENDING]
        counters = {
            c.name: c.value for c in session.cache.GetStatus(cache_pb2.GetStatusRequest()).counters
        }
        assert counters["calls_not_let_wait_total"] == 2
        sleeper.cancel()
