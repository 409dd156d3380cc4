"""The port of the index, held by both implementations: the one in memory and the one on a real Redis."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
from index_worlds import (
    NAMESPACE,
    TTL_S,
    MemoryWorld,
    RedisWorld,
    World,
    announcement,
    chunk,
)
from redis_server import RedisServer

from cacheservice.core.keys import ChunkKey, NamespaceDigest
from cacheservice.core.layout import GroupShape, build_namespace
from cacheservice.errors import ConfigError, IndexUnavailable
from cacheservice.index.entry import MAX_HOLDERS
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.index.port import Holder, Index, IndexHealth, Node

NODES_AGE_S = 1.01


@pytest.fixture(scope="module")
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    world: World = (
        MemoryWorld()
        if request.param == "memory"
        else RedisWorld(request.getfixturevalue("server"))
    )
    yield world
    world.close()


def joined(world: World, name: str, *, address: str = "", epoch: int = 0) -> tuple[Index, int]:
    """An agent that is in the node table, and its number."""
    index = world.agent()
    return index, index.join(
        name=name, address=address, epoch=epoch or secrets.randbelow(2**32 - 1) + 1
    )


def holders(index: Index, *numbers: int) -> list[tuple[Holder, ...]]:
    return index.lookup(NAMESPACE, [chunk(n) for n in numbers])


def test_another_agents_chunks_are_found_in_order_with_their_shards(world: World) -> None:
    a, number = joined(world, "a", epoch=11)
    b, _ = joined(world, "b")
    a.announce([announcement(1, 0b1), announcement(3, 1 << 200)])
    assert holders(b, 3, 2, 1) == [
        (Holder(number, 1, 11, 1 << 200),),
        (),
        (Holder(number, 1, 11, 1),),
    ]
    assert b.lookup(NAMESPACE, []) == []


def test_own_chunks_are_left_out(world: World) -> None:
    a, _ = joined(world, "a")
    a.announce([announcement(1)])
    assert holders(a, 1) == [()]


def test_an_agent_that_has_not_joined_finds_but_cannot_announce(world: World) -> None:
    a, _ = joined(world, "a")
    a.announce([announcement(1)])
    reader = world.agent()
    assert len(holders(reader, 1)[0]) == 1
    with pytest.raises(IndexUnavailable, match="joined"):
        reader.announce([announcement(2)])
    with pytest.raises(IndexUnavailable, match="joined"):
        reader.heartbeat()


def test_several_holders_of_one_chunk_are_all_found(world: World) -> None:
    agents = [joined(world, f"agent-{n}") for n in range(4)]
    for index, number in agents:
        index.announce([announcement(1, number)])
    reader = world.agent()
    found = holders(reader, 1)[0]
    assert {(h.node, h.bitmap) for h in found} == {(number, number) for _, number in agents}


def test_announcing_again_replaces_and_an_empty_bitmap_withdraws(world: World) -> None:
    a, a_number = joined(world, "a")
    b, b_number = joined(world, "b")
    reader = world.agent()
    a.announce([announcement(1, 0b01)])
    b.announce([announcement(1, 0b10)])
    a.announce([announcement(1, 0b11)])
    assert {(h.node, h.bitmap) for h in holders(reader, 1)[0]} == {
        (a_number, 0b11),
        (b_number, 0b10),
    }
    a.announce([announcement(1, 0), announcement(9, 0)])
    assert [(h.node, h.bitmap) for h in holders(reader, 1)[0]] == [(b_number, 0b10)]
    b.announce([announcement(1, 0)])
    assert holders(reader, 1) == [()]


def test_groups_of_one_chunk_are_told_by_each_holder_as_it_has_them(world: World) -> None:
    """Eight shards of attention and eight of a state: most chunks have the first part only, some the second later."""
    spec = build_namespace(
        {"index": "hybrid"}, tokens_per_chunk=256,
        groups=[GroupShape("full", 8, 100), GroupShape("recurrent", 8, 300)],
    )  # fmt: skip
    attention = sum(1 << spec.shard_bit(0, shard) for shard in range(8))
    state = sum(1 << spec.shard_bit(1, shard) for shard in range(8))
    a, a_number = joined(world, "a")
    b, b_number = joined(world, "b")
    reader = world.agent()

    def found() -> list[dict[int, int]]:
        return [{h.node: h.bitmap for h in each} for each in holders(reader, 1, 2, 3)]

    a.announce([announcement(n, attention) for n in (1, 2, 3)])
    b.announce([announcement(2, state), announcement(3, 1 << spec.shard_bit(1, 7))])
    assert found() == [
        {a_number: attention},
        {a_number: attention, b_number: state},
        {a_number: attention, b_number: 1 << 15},
    ]
    a.announce([announcement(3, attention | state)])
    b.announce([announcement(2, 0)])
    assert found() == [
        {a_number: attention},
        {a_number: attention},
        {a_number: attention | state, b_number: 1 << 15},
    ]


def test_of_several_announcements_of_a_chunk_in_one_call_the_last_counts(world: World) -> None:
    a, _ = joined(world, "a")
    reader = world.agent()
    a.announce([announcement(1, 1), announcement(1, 0), announcement(2, 0), announcement(2, 4)])
    assert [h.bitmap for found in holders(reader, 1, 2) for h in found] == [4]


@pytest.mark.parametrize("length", [0, 31, 33])
def test_a_key_of_another_length_is_the_callers_bug(world: World, length: int) -> None:
    index = world.agent()
    with pytest.raises(ValueError, match="32 bytes"):
        index.lookup(NAMESPACE, [chunk(1), ChunkKey(b"k" * length)])
    assert holders(index, 1) == [()]


def test_namespaces_do_not_mix(world: World) -> None:
    a, _ = joined(world, "a")
    reader = world.agent()
    a.announce([announcement(1)])
    assert reader.lookup(NamespaceDigest(b"m" * 32), [chunk(1)]) == [()]


def test_a_popular_chunk_keeps_the_latest_holders_only(world: World) -> None:
    agents = [joined(world, f"agent-{n}") for n in range(MAX_HOLDERS + 2)]
    for index, _ in agents:
        index.announce([announcement(1)])
    found = holders(world.agent(), 1)[0]
    assert [h.node for h in found] == [number for _, number in agents[2:]]


def test_many_chunks_in_one_lookup_and_one_announcement(world: World) -> None:
    a, _ = joined(world, "a")
    reader = world.agent()
    a.announce([announcement(n, n) for n in range(1, 2500)])
    found = holders(reader, *range(4096))
    assert [found[n][0].bitmap for n in range(1, 2500)] == list(range(1, 2500))
    assert not any(found[2500:])
    assert not found[0]
    assert a.counters()["announcements"] == 2499
    a.announce([announcement(n, 0) for n in range(1, 2500)])
    assert not any(holders(reader, *range(4096)))


def test_nodes_are_those_with_a_lease(world: World) -> None:
    a, a_number = joined(world, "a", address="10.0.0.1:7000", epoch=5)
    _, b_number = joined(world, "b", epoch=6)
    assert a.nodes() == {
        a_number: Node(a_number, 5, "a", "10.0.0.1:7000"),
        b_number: Node(b_number, 6, "b", ""),
    }
    a.leave()
    world.expire_lease(b_number)
    world.clock.advance(NODES_AGE_S)
    assert a.nodes() == {}
    with pytest.raises(TypeError):
        a.nodes()[1] = Node(1, 1, "x", "")  # type: ignore[index]


def test_entries_of_a_dead_node_are_ignored_and_removed_by_the_next_announcement(
    world: World,
) -> None:
    dead, dead_number = joined(world, "dead")
    dead.announce([announcement(1)])
    world.expire_lease(dead_number)
    live, live_number = joined(world, "live")
    reader = world.agent()
    assert holders(reader, 1) == [()]
    assert reader.counters()["stale_entries"] == 1
    live.announce([announcement(1)])
    assert live.counters()["stale_entries"] == 1
    assert [h.node for h in holders(reader, 1)[0]] == [live_number]
    # The dead one's entry is gone for good, even when it comes back.
    assert dead.heartbeat()
    world.clock.advance(NODES_AGE_S)
    assert [h.node for h in holders(reader, 1)[0]] == [live_number]


def test_leaving_kills_all_entries_at_once(world: World) -> None:
    a, _ = joined(world, "a")
    a.announce([announcement(n) for n in range(50)])
    a.leave()
    a.leave()
    assert not any(holders(world.agent(), *range(50)))
    with pytest.raises(IndexUnavailable, match="joined"):
        a.announce([announcement(1)])


def test_a_restarted_agent_keeps_its_number_and_its_old_entries_are_dead(world: World) -> None:
    old, number = joined(world, "a", epoch=1)
    joined(world, "b")
    old.announce([announcement(1)])
    old.leave()
    new, same_number = joined(world, "a", epoch=2)
    assert same_number == number
    assert holders(world.agent(), 1) == [()]
    new.announce([announcement(2)])
    assert [h.epoch for h in holders(world.agent(), 2)[0]] == [2]


def test_an_agent_that_crashed_at_a_known_address_takes_its_number_over_at_once(
    world: World,
) -> None:
    old, number = joined(world, "a", address="h:1", epoch=1)
    new, same_number = joined(world, "a", address="h:1", epoch=2)
    assert same_number == number
    with pytest.raises(IndexUnavailable, match="another incarnation"):
        old.announce([announcement(1)])
    new.announce([announcement(2)])
    # The old one was not dead after all: it gets a number of its own and both live.
    assert old.heartbeat()
    other = old.join(name="a", address="h:1", epoch=1)
    assert other != number
    assert new.heartbeat() is False
    world.clock.advance(NODES_AGE_S)
    assert {n: node.epoch for n, node in new.nodes().items()} == {number: 2, other: 1}


def test_two_live_agents_of_one_name_have_two_numbers(world: World) -> None:
    first, first_number = joined(world, "a", address="h:1")
    second, second_number = joined(world, "a", address="h:2")
    third, third_number = joined(world, "a")
    assert len({first_number, second_number, third_number}) == 3
    assert [i.heartbeat() for i in (first, second, third)] == [False] * 3
    first.announce([announcement(1)])
    second.announce([announcement(1)])
    assert {h.node for h in holders(third, 1)[0]} == {first_number, second_number}


def test_joining_again_answers_the_same_number(world: World) -> None:
    a, number = joined(world, "a", epoch=7)
    joined(world, "b")
    assert a.join(name="a", address="", epoch=7) == number
    assert a.heartbeat() is False


@pytest.mark.parametrize("name", ["", "x" * 300, "a\nb"])
def test_a_name_that_cannot_be_stored_is_refused(world: World, name: str) -> None:
    with pytest.raises(ConfigError, match="printable"):
        world.agent().join(name=name, address="", epoch=1)


def test_names_that_look_alike_in_keys_get_numbers_of_their_own(world: World) -> None:
    names = ["a", "1:a", "2:a", "a:1", "node:1", "*", "{x}", "é"]
    numbers = [joined(world, name)[1] for name in names]
    assert len(set(numbers)) == len(names)
    world.clock.advance(NODES_AGE_S)
    assert {node.name for node in world.agent().nodes().values()} == set(names)


def test_a_fenced_agent_changes_nothing(world: World) -> None:
    old, number = joined(world, "a", epoch=1)
    old.announce([announcement(1, 1)])
    world.expire_lease(number)
    new, same_number = joined(world, "a", epoch=2)
    assert same_number == number
    new.announce([announcement(1, 2)])
    # A late withdrawal and a late announcement of the old incarnation.
    for late in ([announcement(1, 0)], [announcement(1, 1)], [announcement(2, 1)]):
        with pytest.raises(IndexUnavailable, match="incarnation"):
            old.announce(late)
    old.leave()
    reader = world.agent()
    assert [[(h.epoch, h.bitmap) for h in found] for found in holders(reader, 1, 2)] == [
        [(2, 2)],
        [],
    ]
    assert new.heartbeat() is False


def test_an_agent_that_slept_past_its_lease_comes_back_with_its_number_and_epoch(
    world: World,
) -> None:
    a, number = joined(world, "a", epoch=9)
    a.announce([announcement(1)])
    world.expire_lease(number)
    with pytest.raises(IndexUnavailable, match="expired"):
        a.announce([announcement(2)])
    assert a.heartbeat() is True
    assert a.heartbeat() is False
    assert a.join(name="a", address="", epoch=9) == number
    assert [(h.node, h.epoch) for h in holders(world.agent(), 1)[0]] == [(number, 9)]


def test_loss_of_everything_is_noticed_once_by_each(world: World) -> None:
    a, a_number = joined(world, "a", epoch=1)
    b, b_number = joined(world, "b", epoch=2)
    a.announce([announcement(1)])
    assert [a.heartbeat(), b.heartbeat()] == [False, False]
    world.erase()
    # In the other order than they came: numbers stay all the same.
    assert [b.heartbeat(), a.heartbeat()] == [True, True]
    assert [a.heartbeat(), b.heartbeat()] == [False, False]
    assert a.join(name="a", address="", epoch=1) == a_number
    assert b.join(name="b", address="", epoch=2) == b_number
    a.announce([announcement(1)])
    world.clock.advance(NODES_AGE_S)
    assert [h.node for h in holders(b, 1)[0]] == [a_number]
    assert a.counters()["reannouncements"] == 1


def test_entries_expire_and_are_asked_for_again_before_that(world: World) -> None:
    a, _ = joined(world, "a")

    def num_renewals(seconds: float) -> int:
        renewals = 0
        for _ in range(round(seconds / 3)):
            world.clock.advance(3)
            renewals += a.heartbeat()
        return renewals

    a.announce([announcement(1)])
    assert num_renewals(TTL_S * 0.3) == 0
    assert num_renewals(TTL_S * 0.25) == 1
    assert num_renewals(TTL_S * 0.1) == 0
    world.expire_entries()
    assert holders(world.agent(), 1) == [()]


def test_counters_and_status_say_what_happened(world: World) -> None:
    a, _ = joined(world, "a")
    b, _ = joined(world, "b")
    a.announce([announcement(1), announcement(2)])
    holders(b, 1, 2)
    holders(b, 3)
    assert b.counters()["lookups"] == 2
    assert a.counters()["announcements"] == 2
    assert set(a.counters()) == {
        "lookups",
        "lookup_errors",
        "malformed_entries",
        "stale_entries",
        "announcements",
        "reannouncements",
    }
    assert a.status().health in (IndexHealth.READY, IndexHealth.MEMORY)
    assert a.status().message == ""
    for index in (a, b):
        index.close()
        index.close()


def test_an_index_says_that_it_is_alone_only_when_it_is() -> None:
    """An agent that believes it is alone asks nobody, so this must never be said too early."""
    store = MemoryIndexStore()
    first, second = MemoryIndex(store), MemoryIndex(store)
    assert first.is_alone()
    second.join(name="b", address="b:1", epoch=2)
    assert not first.is_alone()
    assert second.is_alone()
    first.join(name="a", address="a:1", epoch=1)
    assert not second.is_alone()
