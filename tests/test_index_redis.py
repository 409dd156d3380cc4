"""The index on a real Redis that is killed, emptied, stopped, filled, or full of garbage: a bounded miss, then
healing."""

from __future__ import annotations

import random
import secrets
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from index_worlds import NAMESPACE, FakeClock, RedisWorld, announcement, chunk, poll
from redis_server import RedisServer

from cacheservice.errors import IndexUnavailable
from cacheservice.index import redis_index, wire
from cacheservice.index.entry import pack_entry
from cacheservice.index.node_record import MAX_NODES, pack_node
from cacheservice.index.open import build_index
from cacheservice.index.port import Holder, Index, IndexHealth, IndexReason
from cacheservice.index.scripts import ANNOUNCE, MAX_NAMESAKES, Script

TIMEOUT_S = 2.0
"""Of lookups where nothing stalls: a loaded machine answers in time. A killed server refuses at once."""
TAG = "{" + NAMESPACE[:8].hex() + "}:"


@pytest.fixture(scope="module")
def shared_server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def world(shared_server: RedisServer) -> Iterator[RedisWorld]:
    world = RedisWorld(shared_server)
    yield world
    world.close()


@pytest.fixture
def server() -> Iterator[RedisServer]:
    """One that a test may maltreat."""
    with RedisServer() as server:
        yield server


@contextmanager
def indexes(server: RedisServer, number: int = 2, **options: Any) -> Iterator[list[Index]]:
    options = {"timeout_s": TIMEOUT_S, **options}
    opened = [build_index(server.url, **options) for _ in range(number)]
    try:
        yield opened
    finally:
        for index in opened:
            index.close()


def join(index: Index, name: str) -> int:
    return index.join(name=name, address="", epoch=secrets.randbelow(2**32 - 1) + 1)


def found(index: Index, *numbers: int) -> list[bool]:
    return [bool(holders) for holders in index.lookup(NAMESPACE, [chunk(n) for n in numbers])]


def fails(call: Callable[[], object]) -> bool:
    try:
        call()
    except IndexUnavailable:
        return True
    return False


def chunk_key(world: RedisWorld, number: int) -> bytes:
    return (world.prefix + TAG).encode() + chunk(number)


# Keys


def test_every_key_has_the_prefix_and_a_chunks_key_the_namespaces_tag(world: RedisWorld) -> None:
    index = world.agent()
    join(index, "a")
    index.announce([announcement(1)])
    assert world.redis.exists(chunk_key(world, 1))
    assert len(chunk_key(world, 1)) == len(world.prefix) + 18 + 1 + 32
    mine = set(world.keys())
    others = {key for key in world.redis.scan_iter(count=10_000) if not key.startswith(b"larder:")}
    assert not others
    assert {
        key.decode(errors="replace").removeprefix(world.prefix).split(":")[0] for key in mine
    } == {
        "node",
        "name",
        "number",
        "top",
        "sentinel",
        "{6e6e6e6e6e6e6e6e}",
    }


def test_chunks_nodes_and_names_have_a_time_limit(world: RedisWorld) -> None:
    index = world.agent()
    number = join(index, "a")
    index.announce([announcement(1)])
    assert 3590 <= world.redis.ttl(chunk_key(world, 1)) <= 3600
    assert 9 <= world.redis.pttl(f"{world.prefix}node:{number}") / 1000 <= 10
    assert 86_000 <= world.redis.ttl(f"{world.prefix}name:{number}") <= 86_400
    assert 86_000 <= world.redis.ttl(f"{world.prefix}number:1:a") <= 86_400
    world.redis.pexpire(f"{world.prefix}node:{number}", 5000)
    index.heartbeat()
    assert world.redis.pttl(f"{world.prefix}node:{number}") > 9000


def test_a_withdrawal_leaves_the_others_time_alone(world: RedisWorld) -> None:
    a, b = world.agent(), world.agent()
    join(a, "a")
    join(b, "b")
    a.announce([announcement(1)])
    b.announce([announcement(1)])
    world.redis.expire(chunk_key(world, 1), 100)
    a.announce([announcement(1, 0)])
    assert 0 < world.redis.ttl(chunk_key(world, 1)) <= 100


def test_withdrawing_the_last_holder_deletes_the_key(world: RedisWorld) -> None:
    index = world.agent()
    join(index, "a")
    index.announce([announcement(n) for n in range(10)])
    index.announce([announcement(n, 0) for n in range(10)])
    assert not world.keys("{*")


def test_a_lookup_of_1024_keys_is_one_command(world: RedisWorld) -> None:
    index = world.agent()
    number_before = world.redis.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"]
    index.lookup(NAMESPACE, [chunk(n) for n in range(1024)])
    assert world.redis.info("commandstats")["cmdstat_mget"]["calls"] == number_before + 1
    index.lookup(NAMESPACE, [chunk(n) for n in range(1025)])
    assert world.redis.info("commandstats")["cmdstat_mget"]["calls"] == number_before + 3


def test_numbers_are_bounded_and_freed_numbers_are_given_again(world: RedisWorld) -> None:
    index = world.agent()
    join(index, "first")
    world.redis.mset({f"{world.prefix}name:{n}": "1:x" for n in range(2, MAX_NODES + 1)})
    with pytest.raises(IndexUnavailable, match=f"all {MAX_NODES} node numbers are taken"):
        join(world.agent(), "second")
    world.redis.delete(f"{world.prefix}name:77")
    assert join(world.agent(), "third") == 77


def test_too_many_namesakes_are_refused(world: RedisWorld) -> None:
    for _ in range(MAX_NAMESAKES):
        join(world.agent(), "same")
    index = world.agent()
    with pytest.raises(IndexUnavailable, match=r"too many live agents are called 'same'.*--node"):
        join(index, "same")
    assert index.status().health is IndexHealth.REFUSING


def test_a_thousand_nodes_are_read_in_two_round_trips_then_one(world: RedisWorld) -> None:
    reader = world.agent()
    world.redis.mset(
        {
            f"{world.prefix}node:{n}": pack_node(epoch=n, name=f"node-{n}", address=f"10.0.0.1:{n}")
            for n in range(1, 1001)
        }
        | {f"{world.prefix}top": 1000}
    )

    def num_reads() -> int:
        return int(world.redis.info("commandstats").get("cmdstat_mget", {"calls": 0})["calls"])

    before = num_reads()
    assert len(reader.nodes()) == 1000
    assert num_reads() - before == 2
    reader.nodes()
    assert num_reads() - before == 2
    world.clock.advance(1.01)
    assert reader.nodes()[1000].name == "node-1000"
    assert num_reads() - before == 3


def test_a_node_that_joined_a_moment_ago_is_found_without_waiting_for_the_table(
    world: RedisWorld,
) -> None:
    reader, late = world.agent(), world.agent()
    assert reader.nodes() == {}
    join(late, "late")
    late.announce([announcement(1)])
    world.clock.advance(0.21)
    assert found(reader, 1) == [True]


# Loss


def test_killed_and_restarted_empty_it_heals_by_itself(server: RedisServer) -> None:
    with indexes(server) as (a, b):
        join(a, "a")
        number = join(b, "b")
        a.announce([announcement(1)])
        assert found(b, 1) == [True]
        server.kill()
        assert fails(lambda: found(b, 1))
        assert fails(a.heartbeat)
        assert "can't be reached" in b.status().message
        assert b.status().health is IndexHealth.UNREACHABLE
        assert fails(lambda: a.announce([announcement(2)]))
        server.start()
        # One heartbeat each, and nothing else: a restarted Redis is not looked for by hand.
        assert [b.heartbeat(), a.heartbeat()] == [True, True]
        a.announce([announcement(1)])
        poll(lambda: not fails(lambda: found(b, 1)))
        poll(lambda: found(b, 1) == [True])
        assert join_again(b, "b") == number
        assert b.status().health is IndexHealth.READY
        assert [b.heartbeat(), a.heartbeat()] == [False, False]


def join_again(index: Index, name: str) -> int:
    """The number that this incarnation has now (its epoch is not known here, so ask the table)."""
    poll(lambda: any(node.name == name for node in index.nodes().values()))
    return next(number for number, node in index.nodes().items() if node.name == name)


def test_a_restart_between_two_lookups_costs_no_failed_lookup(server: RedisServer) -> None:
    with indexes(server) as (a, b):
        join(a, "a")
        a.announce([announcement(1)])
        assert found(b, 1) == [True]
        server.restart_empty()
        assert found(b, 1) == [False]
        assert b.counters()["lookup_errors"] == 0
        assert a.heartbeat() is True


def test_flushall_is_noticed_through_the_sentinel(server: RedisServer) -> None:
    with indexes(server, 1) as (a,), server.client() as client:
        join(a, "a")
        assert a.heartbeat() is False
        # The node entry is back before the heartbeat sees that it was gone, as after a quick failover.
        record = client.get("larder:node:1"), client.get("larder:name:1")
        client.flushall()
        client.set("larder:node:1", record[0] or b"", px=10_000)
        client.set("larder:name:1", record[1] or b"")
        assert a.heartbeat() is True
        assert a.heartbeat() is False


def test_another_run_id_with_the_same_data_means_announce_again(server: RedisServer) -> None:
    with indexes(server, 1) as (a,):
        join(a, "a")
        with server.client() as client:
            kept = {key: client.get(key) for key in client.keys("larder:*")}
        server.restart_empty()
        with server.client() as client:
            client.mset({key: value or b"" for key, value in kept.items()})
        assert a.heartbeat() is True
        assert a.heartbeat() is False


def test_unreachable_at_start_the_first_heartbeat_that_works_joins(server: RedisServer) -> None:
    server.kill()
    with indexes(server) as (a, b):
        with pytest.raises(IndexUnavailable, match="can't be reached"):
            join(a, "a")
        assert fails(a.heartbeat)
        assert fails(lambda: a.announce([announcement(1)]))
        server.start()
        assert a.heartbeat() is True
        a.announce([announcement(1)])
        poll(lambda: not fails(lambda: found(b, 1)))
        assert found(b, 1) == [True]


def test_scripts_that_redis_forgot_are_loaded_again(world: RedisWorld) -> None:
    a = world.agent()
    join(a, "a")
    for n in range(3):
        world.redis.script_flush()
        a.announce([announcement(n)])
        world.redis.script_flush()
        assert a.heartbeat() is False
    assert found(world.agent(), 0, 1, 2) == [True] * 3
    world.redis.script_flush()
    a.leave()
    assert not found(world.agent(), 0)[0]


# Stalls


def test_a_stopped_redis_costs_each_lookup_its_timeout_then_nothing_then_heals(
    server: RedisServer,
) -> None:
    with indexes(server, 2, timeout_s=0.02) as (a, b):
        join(a, "a")
        a.announce([announcement(1)])
        poll(lambda: not fails(lambda: found(b, 1)))
        server.pause()
        try:
            stopped_at = time.monotonic()
            waits_s = []
            num_spared = 0
            num_errors = b.counters()["lookup_errors"]
            while time.monotonic() - stopped_at < 5:
                started = time.monotonic()
                with pytest.raises(IndexUnavailable) as caught:
                    found(b, 1)
                if "left alone" in str(caught.value):
                    num_spared += 1
                else:
                    waits_s.append(time.monotonic() - started)
                time.sleep(0.001)
            assert b.status().health is IndexHealth.UNREACHABLE
            assert "20 ms" in b.status().message
            # Of thousands of lookups only the first five and one probe per pause waited; none as long as the stall.
            assert 5 <= len(waits_s) < 30
            assert num_spared > len(waits_s)
            assert max(waits_s) < 2.5
            assert b.counters()["lookup_errors"] - num_errors == len(waits_s) + num_spared
        finally:
            server.resume()
        poll(lambda: not fails(lambda: found(b, 1)), timeout_s=10)
        poll(lambda: b.status().health is IndexHealth.READY)


def test_one_late_lookup_is_an_error_of_its_caller_and_no_state_of_redis(
    server: RedisServer,
) -> None:
    with indexes(server, 2, timeout_s=0.02) as (a, b):
        join(a, "a")
        a.announce([announcement(1)])
        poll(lambda: not fails(lambda: found(b, 1)))
        server.pause()
        try:
            with pytest.raises(IndexUnavailable, match="20 ms"):
                found(b, 1)
            assert b.status().health is IndexHealth.READY
            # In a row they say something: the breaker opens.
            poll(
                lambda: fails(lambda: found(b, 1)) and b.status().health is IndexHealth.UNREACHABLE
            )
            assert "20 ms" in b.status().message
        finally:
            server.resume()


def test_no_thread_piles_up_behind_a_stopped_redis(server: RedisServer) -> None:
    with indexes(server, 1, timeout_s=0.05) as (a,):
        join(a, "a")
        server.pause()
        try:
            num_threads = threading.active_count()
            stop_at = time.monotonic() + 1.0
            results: list[bool] = []

            def look() -> None:
                while time.monotonic() < stop_at:
                    results.append(fails(lambda: found(a, 1)))
                    time.sleep(0.005)

            lookers = [threading.Thread(target=look) for _ in range(16)]
            for looker in lookers:
                looker.start()
            most = 0
            while any(looker.is_alive() for looker in lookers):
                most = max(most, threading.active_count())
                time.sleep(0.01)
            assert all(results)
            # 16 lookers, and at most one that connects for lookups and one for writes.
            assert most <= num_threads + 16 + 2
        finally:
            server.resume()


def test_writers_and_lookups_do_not_wait_for_each_other(server: RedisServer) -> None:
    """A heartbeat in flight at a stopped Redis does not keep status, counters or an open breaker's answer."""
    with indexes(server, 1, timeout_s=0.02, write_timeout_s=1.5) as (a,):
        join(a, "a")
        server.pause()
        try:
            beating = threading.Thread(target=lambda: fails(a.heartbeat))
            beating.start()
            num_done = 0
            while beating.is_alive():
                fails(lambda: found(a, 1))
                a.status()
                a.counters()
                num_done += 1
            assert num_done > 10
        finally:
            server.resume()
            beating.join()


def test_many_threads_share_few_connections_and_get_their_own_answers(server: RedisServer) -> None:
    with indexes(server, 2, timeout_s=10) as (a, b), server.client() as client:
        join(a, "a")
        a.announce([announcement(n, n + 1) for n in range(64)])
        wrong: list[object] = []

        def look(first: int) -> None:
            for step in range(50):
                number = (first + step) % 64
                answer = b.lookup(NAMESPACE, [chunk(number), chunk(1000 + number)])
                if [h.bitmap for holders in answer for h in holders] != [number + 1]:
                    wrong.append(answer)

        lookers = [threading.Thread(target=look, args=(n,)) for n in range(32)]
        for looker in lookers:
            looker.start()
        for looker in lookers:
            looker.join()
        assert not wrong
        assert b.counters()["lookups"] == 32 * 50
        assert b.counters()["lookup_errors"] == 0
        # Eight for lookups, one of a's for writes, one of this test.
        assert client.info("clients")["connected_clients"] <= redis_index.LOOKUP_CONNECTIONS + 2


# Garbage


def garbage_values() -> dict[str, bytes]:
    good = pack_entry(Holder(1, 1, 5, 3))
    return {
        "empty": b"",
        "text": b"hello, world",
        "truncated": good[:-1],
        "no epoch": good[:4] + bytes(4) + good[8:],
        "another version": good[:3] + b"\x09" + good[4:],
        "unknown tier": good[:2] + b"\x00" + good[3:],
        "no shard": good[:9] + bytes(1),
        "an empty bitmap": good[:8] + bytes(1),
        "claims a longer bitmap than it has": good[:8] + b"\xff" + good[9:],
        "10 MiB": bytes(10 * 1024 * 1024),
        "many entries": b"".join(pack_entry(Holder(n, 1, 5, 3)) for n in range(2, 2000)),
        "random": random.Random(7).randbytes(999),
    }


@pytest.mark.parametrize("what", garbage_values())
def test_garbage_in_a_chunks_value_is_a_miss_and_is_overwritten(
    world: RedisWorld, what: str
) -> None:
    writer, reader = world.agent(), world.agent()
    number = writer.join(name="w", address="", epoch=5)
    value = garbage_values()[what]
    world.redis.set(chunk_key(world, 1), value)
    writer.announce([announcement(2)])
    answer = reader.lookup(NAMESPACE, [chunk(1), chunk(2)])
    assert answer == [(), (Holder(number, 1, 5, 1),)]
    counters = reader.counters()
    assert counters["malformed_entries"] + counters["stale_entries"] >= bool(value)
    writer.announce([announcement(1, 6)])
    assert reader.lookup(NAMESPACE, [chunk(1)]) == [(Holder(number, 1, 5, 6),)]
    assert world.redis.get(chunk_key(world, 1)) == pack_entry(Holder(number, 1, 5, 6))
    world.redis.set(chunk_key(world, 1), value)
    writer.announce([announcement(1, 0)])
    assert reader.lookup(NAMESPACE, [chunk(1)]) == [()]


def test_a_valid_entry_beside_garbage_is_found(world: RedisWorld) -> None:
    writer, reader = world.agent(), world.agent()
    number = writer.join(name="w", address="", epoch=5)
    world.redis.set(chunk_key(world, 1), pack_entry(Holder(number, 1, 5, 9)) + b"tail")
    assert reader.lookup(NAMESPACE, [chunk(1)]) == [(Holder(number, 1, 5, 9),)]
    assert reader.counters()["malformed_entries"] == 1


def test_a_key_of_another_type_is_a_miss_and_is_overwritten(world: RedisWorld) -> None:
    writer, reader = world.agent(), world.agent()
    join(writer, "w")
    world.redis.rpush(chunk_key(world, 1), "a", "b")
    assert found(reader, 1) == [False]
    writer.announce([announcement(1, 0)])
    writer.announce([announcement(1)])
    assert found(reader, 1) == [True]


@pytest.mark.parametrize(
    "garbage", [b"", b"-1", b"inf", b"nan", b"1e99", b"999999999999", b"x", b"0x10", b"2.5"]
)
def test_garbage_in_the_node_table_hurts_nobody(world: RedisWorld, garbage: bytes) -> None:
    a, b = world.agent(), world.agent()
    number = join(a, "a")
    world.redis.set(f"{world.prefix}top", garbage)
    world.redis.set(f"{world.prefix}number:1:b", garbage)
    world.redis.set(f"{world.prefix}name:9", garbage)
    world.redis.set(f"{world.prefix}node:5", garbage)
    world.redis.set(f"{world.prefix}sentinel", garbage)
    other = join(b, "b")
    assert other not in (number, 5, 9)
    assert a.heartbeat() is True
    a.announce([announcement(1)])
    world.clock.advance(1.01)
    assert found(b, 1) == [True]
    assert set(b.nodes()) == {number, other}


@pytest.mark.parametrize(
    "suffix", ["top", "sentinel", "node:1", "name:1", "number:1:a", "node:2", "name:2"]
)
def test_a_node_table_key_of_another_type_is_replaced(world: RedisWorld, suffix: str) -> None:
    a = world.agent()
    join(a, "a")
    world.redis.delete(world.prefix + suffix)
    world.redis.rpush(world.prefix + suffix, "x")
    a.heartbeat()
    a.heartbeat()
    a.announce([announcement(1)])
    world.clock.advance(1.01)
    assert found(world.agent(), 1) == [True]


def test_any_bytes_in_the_node_table_are_survived(world: RedisWorld) -> None:
    rng = random.Random(3)
    reader, writer = world.agent(), world.agent()
    join(writer, "w")
    for _ in range(200):
        record = rng.randbytes(rng.randrange(1, 60))
        world.redis.set(f"{world.prefix}node:2", rng.choice([b"\x01", b""]) + record)
        world.redis.set(
            chunk_key(world, 1), struct.pack("<HBBIBB", 2, 1, 1, rng.randrange(1, 9), 1, 1)
        )
        world.clock.advance(1.01)
        reader.lookup(NAMESPACE, [chunk(1)])
        writer.announce([announcement(1)])


# Full


@pytest.fixture
def full_server() -> Iterator[RedisServer]:
    with RedisServer(args=["--maxmemory", "4mb", "--maxmemory-policy", "noeviction"]) as server:
        yield server


def fill(client: redis.Redis) -> None:
    for size in (100_000, 1000, 10):
        for number in range(10_000):
            try:
                client.set(f"filler:{size}:{number}", bytes(size))
            except redis.exceptions.OutOfMemoryError:
                break


def test_a_full_redis_is_reported_keeps_its_nodes_and_heals(full_server: RedisServer) -> None:
    with indexes(full_server) as (a, b), full_server.client() as client:
        join(a, "a")
        a.announce([announcement(1), announcement(2)])
        fill(client)
        with pytest.raises(IndexUnavailable, match=r"full \(OOM under noeviction\).*maxmemory"):
            a.announce([announcement(3)])
        for _ in range(2):
            assert a.heartbeat() is False
            assert a.status().health is IndexHealth.REFUSING
            assert "full" in a.status().message
            assert a.status().reason is IndexReason.FULL
        # What is there is still found, and may go.
        assert found(b, 1, 2, 3) == [True, True, False]
        with pytest.raises(IndexUnavailable, match="full"):
            a.announce([announcement(4), announcement(2, 0)])
        assert found(b, 1, 2, 4) == [True, False, False]
        with pytest.raises(IndexUnavailable, match="full"):
            join(b, "b")
        client.delete(*client.keys("filler*"))
        assert a.heartbeat() is False
        assert a.status().health is IndexHealth.READY
        a.announce([announcement(3)])
        assert b.heartbeat() is True
        assert found(b, 3) == [True]


def test_an_agent_with_nothing_to_announce_finds_out_that_redis_is_full(
    full_server: RedisServer,
) -> None:
    now = 1000.0
    with indexes(full_server, 1, clock=lambda: now) as (index,), full_server.client() as client:
        join(index, "a")
        index.heartbeat()
        fill(client)
        index.heartbeat()
        assert index.status().health is IndexHealth.READY
        now += 10.0
        assert index.heartbeat() is False
        assert index.status().reason is IndexReason.FULL
        client.delete(*client.keys("filler*"))
        assert index.heartbeat() is False
        assert index.status().health is IndexHealth.READY


def test_an_evicting_redis_may_drop_everything_and_all_comes_back(server: RedisServer) -> None:
    with indexes(server) as (a, b), server.client() as client:
        number = join(a, "a")
        a.announce([announcement(1)])
        for victim in (
            b"larder:node:1",
            b"larder:name:1",
            b"larder:number:1:a",
            b"larder:top",
            b"larder:sentinel",
        ):
            client.delete(victim)
            must_announce = a.heartbeat()
            assert must_announce is (
                victim in (b"larder:node:1", b"larder:name:1", b"larder:sentinel")
            ), victim
            a.announce([announcement(1)])
            assert join_again(b, "a") == number
            assert found(b, 1) == [True]
            assert a.heartbeat() is False


# Faults on call N


class FlakyConnection(wire.Connection):
    """Breaks on its Nth exchange, before sending or after the answer came."""

    countdown = 0
    after = False

    def call_many(self, commands: bytes, num_replies: int, deadline: wire.Deadline) -> list[Any]:
        cls = type(self)
        cls.countdown -= 1
        if cls.countdown == 0 and not cls.after:
            self._stream.close()
        answer = super().call_many(commands, num_replies, deadline)
        if cls.countdown == 0:
            self._stream.close()
            raise redis_index.trouble.lost(self.location, "injected")
        return answer


def scenario(a: Index, b: Index) -> None:
    """Join, announce, look up, withdraw, beat, leave: each step repeated as an agent would, until it works."""
    for index, name in ((a, "a"), (b, "b")):
        insist(lambda index=index, name=name: index.join(name=name, address="", epoch=ord(name)))
    insist(lambda: a.announce([announcement(1, 7), announcement(2, 7)]))
    assert insist(lambda: found(b, 1, 2)) == [True, True]
    insist(lambda: a.announce([announcement(1, 0)]))
    insist(a.heartbeat)
    assert insist(lambda: found(b, 1, 2)) == [False, True]
    assert len(insist(b.nodes)) == 2
    insist(b.heartbeat)


def insist(call: Callable[[], Any]) -> Any:
    for _ in range(5):
        try:
            return call()
        except IndexUnavailable:
            continue
    raise AssertionError("failed five times in a row")


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_a_fault_on_any_one_exchange_changes_no_result(
    world: RedisWorld, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    monkeypatch.setattr(wire, "Connection", FlakyConnection)
    FlakyConnection.after = after
    for at_call in range(1, 40):
        world.erase()
        FlakyConnection.countdown = at_call
        a, b = world.agent(), world.agent()
        scenario(a, b)
        a.close()
        b.close()
        if FlakyConnection.countdown > 0:
            break
    else:
        pytest.fail("the scenario has more exchanges than were tried")
    assert at_call > 10


# Scripts


def run_script(
    world: RedisWorld, script: Script, keys: list[bytes], *arguments: bytes | str | int
) -> Any:
    return world.redis.eval(script.source, len(keys), *keys, *arguments)


def test_a_withdrawal_removes_no_other_incarnations_entry(world: RedisWorld) -> None:
    """The script itself, as it would run late, without the client's own checks."""
    new = world.agent()
    number = new.join(name="a", address="", epoch=2)
    new.announce([announcement(1, 5)])
    before = world.redis.get(chunk_key(world, 1))
    own = number.to_bytes(2, "little") + b"\x01"
    late = (world.prefix, number, (1).to_bytes(4, "little"), 3600, own, b"")
    assert run_script(world, ANNOUNCE, [chunk_key(world, 1)], *late) == [2, 0]
    assert world.redis.get(chunk_key(world, 1)) == before
    assert run_script(world, ANNOUNCE, [chunk_key(world, 1)], world.prefix, 99, *late[2:]) == [1, 0]
    assert world.redis.get(chunk_key(world, 1)) == before


def test_the_breaker_leaves_a_dead_redis_alone_until_its_pause_is_over(server: RedisServer) -> None:
    clock = FakeClock()
    with indexes(server, 1, clock=clock) as (a,):
        assert found(a, 1) == [False]
        server.kill()
        for _ in range(5):
            assert fails(lambda: found(a, 1))
        server.start()
        with pytest.raises(IndexUnavailable, match=r"left alone for a moment.*can't be reached"):
            found(a, 1)
        clock.advance(0.3)
        assert found(a, 1) == [False]
        assert a.status().health is IndexHealth.READY
