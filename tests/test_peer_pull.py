"""Two agents, one index: what one stored, the other fetches, or misses in time."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from agent_process import AgentProcess, a_namespace, local_agent, wait_until
from agent_stub import StubSession, bytes_of, checksums, key_of, stub_session
from redis_server import RedisServer

from cacheservice.agent.serve import Agent
from cacheservice.client import CacheClient
from cacheservice.core.keys import ChunkKey
from cacheservice.core.layout import NamespaceSpec
from cacheservice.core.outcomes import Presence
from cacheservice.index.memory import MemoryIndex, MemoryIndexStore
from cacheservice.v1 import admin_pb2, cache_pb2

SIZE = 2_500_000
SPEC = a_namespace(shard_bytes=(SIZE,))
READY = cache_pb2.ACQUIRE_RESULT_READY
NOT_FOUND = cache_pb2.ACQUIRE_RESULT_NOT_FOUND
PEER_FAILED = cache_pb2.ACQUIRE_RESULT_PEER_FAILED
TIMED_OUT = cache_pb2.ACQUIRE_RESULT_TIMED_OUT
NO_SPACE = cache_pb2.ACQUIRE_RESULT_NO_SPACE
ELSEWHERE = Presence.READY_ELSEWHERE


class Pair:
    """An owner and a reader with a session each, in this process."""

    def __init__(
        self,
        shared: MemoryIndexStore,
        owner: Agent,
        reader: Agent,
        there: StubSession,
        here: StubSession,
    ) -> None:
        self.shared = shared
        self.target = f"unix:{reader.config.agent_socket}"
        """Where the reader's engines find it."""
        self.owner = owner
        self.reader = reader
        self.there = there
        self.here = here
        for session in (there, here):
            session.open(SPEC)

    def store_there(self, *words: object) -> tuple[ChunkKey, bytes]:
        """Store one chunk at the owner and wait until the reader's index knows it."""
        key, content = key_of(*words), bytes_of(SIZE, *words)
        assert self.there.store(SPEC, key, content) == cache_pb2.COMMIT_RESULT_COMMITTED
        self.wait_announced(key)
        return key, content

    def wait_announced(self, *keys: ChunkKey) -> None:
        """Wait until the reader sees the chunks elsewhere."""
        wait_until(
            lambda: set(self.here.lookup(SPEC, keys).presence) <= {ELSEWHERE, Presence.READY_HERE},
            what="the announcement",
        )


@contextlib.contextmanager
def a_pair(*, reader_cpu: str = "32Mi", owner_cpu: str = "32Mi") -> Iterator[Pair]:
    shared = MemoryIndexStore()
    tcp = {"listen": "127.0.0.1:0", "insecure": True}
    with (
        local_agent(index=MemoryIndex(shared), cpu=owner_cpu, **tcp) as owner,
        local_agent(index=MemoryIndex(shared), cpu=reader_cpu, **tcp) as reader,
        stub_session(f"unix:{owner.config.agent_socket}") as there,
        stub_session(f"unix:{reader.config.agent_socket}") as here,
    ):
        yield Pair(shared, owner, reader, there, here)
        for agent in (owner, reader):
            with agent.guarded.reading() as store:
                store.check_invariants()


@pytest.fixture(name="pair")
def _pair() -> Iterator[Pair]:
    with a_pair() as pair:
        yield pair


def nothing_is_left(agent: Agent, *, num_leases: int = 0) -> None:
    """Leases, reservations and pending bytes are back at their start."""

    def is_clean() -> bool:
        with agent.guarded.reading() as store:
            counts = store.counts()
        return (counts.num_leases, counts.num_reservations, counts.pending_bytes, counts.quarantined_bytes) == (
            num_leases, 0, 0, 0,
        )  # fmt: skip

    wait_until(is_clean, what="counts at their start")


def test_shard_of_another_agent_is_pulled_verified_and_served_as_local(pair: Pair) -> None:
    key, content = pair.store_there("a")
    assert list(pair.here.lookup(SPEC, [key, key_of("none")]).presence) == [
        ELSEWHERE,
        Presence.ABSENT,
    ]
    lease, found = pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
    assert (found[0].result, found[0].is_remote) == (READY, True)
    assert list(found[0].piece_checksums) == checksums(content)
    assert pair.here.read(lease, SIZE) == content
    assert pair.here.release(lease) == [True]
    assert list(pair.here.lookup(SPEC, [key]).presence) == [Presence.READY_HERE]
    nothing_is_left(pair.owner)
    nothing_is_left(pair.reader)
    # And the reader now says itself that it has it.
    index = pair.owner._index
    wait_until(lambda: index.lookup(SPEC.digest, [key])[0], what="the reader's announcement")


def test_one_shard_is_fetched_once_however_many_ask(pair: Pair) -> None:
    keys = [pair.store_there("many", n)[0] for n in range(3)]
    with ThreadPoolExecutor(6) as pool:
        asked = [
            pool.submit(pair.here.acquire, SPEC, *[(k, 0, 0) for k in keys], deadline_ms=10_000)
            for _ in range(6)
        ]
        for answer in asked:
            lease, found = answer.result()
            assert [found[p].result for p in range(3)] == [READY] * 3
            pair.here.release(lease)
    assert pair.owner._byte_streams.num_bytes_sent == 3 * SIZE


def test_only_what_is_asked_is_fetched() -> None:
    spec = a_namespace(shard_bytes=(1000, 3000), num_shards=(2, 1), name="two groups")
    with a_pair() as pair:
        for session in (pair.there, pair.here):
            session.open(spec)
        for group, shard in ((0, 0), (0, 1), (1, 0)):
            size = spec.groups[group].shard_bytes
            pair.there.store(spec, key_of("g"), bytes_of(size, group, shard), group, shard)
        wait_until(
            lambda: list(pair.here.lookup(spec, [key_of("g")]).presence) == [ELSEWHERE] * 2,
            what="the announcement",
        )
        lease, found = pair.here.acquire(spec, (key_of("g"), 0, 1), deadline_ms=10_000)
        assert found[0].result == READY
        assert pair.here.read(lease, 1000) == bytes_of(1000, 0, 1)
        assert pair.owner._byte_streams.num_bytes_sent == 1000
        # The group that is here in part is still found whole elsewhere.
        assert list(pair.here.lookup(spec, [key_of("g")]).presence) == [ELSEWHERE] * 2
        _, found = pair.here.acquire(
            spec, (key_of("g"), 0, 0), (key_of("g"), 0, 1), (key_of("g"), 1, 0), deadline_ms=10_000
        )
        assert [found[p].result for p in range(3)] == [READY] * 3
        assert list(pair.here.lookup(spec, [key_of("g")]).presence) == [Presence.READY_HERE] * 2


def test_wrong_bytes_at_the_owner_are_a_miss(pair: Pair) -> None:
    key, _ = pair.store_there("flip")
    with pair.owner.guarded.reading() as store:
        offset = store.list_shards(SPEC.digest, key)[0].offset
    pair.owner.arena.view[offset + SIZE - 1] ^= 1
    _, found = pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
    assert found[0].result == PEER_FAILED
    # It is not tried again at once, and its owner serves it to nobody any more.
    assert list(pair.here.lookup(SPEC, [key]).presence) == [Presence.ABSENT]
    assert list(pair.there.lookup(SPEC, [key]).presence) == [Presence.ABSENT]
    wait_until(
        lambda: not any(pair.reader._index.lookup(SPEC.digest, [key])), what="its withdrawal"
    )
    nothing_is_left(pair.owner)
    nothing_is_left(pair.reader, num_leases=1)


def test_stale_hint_is_a_miss_and_not_believed_again_at_once(pair: Pair) -> None:
    key, _ = pair.store_there("stale")
    # The owner loses it without a word: its announcements never leave.
    pair.owner._announcer.note = lambda changes: None  # type: ignore[method-assign, assignment]
    pair.owner.guarded.on_changes(lambda changes: None)
    with pair.owner.guarded.changing() as store:
        store.evict(SPEC.digest, [key])
    assert list(pair.here.lookup(SPEC, [key]).presence) == [ELSEWHERE]
    _, found = pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
    assert found[0].result == NOT_FOUND
    assert list(pair.here.lookup(SPEC, [key]).presence) == [Presence.ABSENT]


def test_pull_without_room_says_so() -> None:
    with a_pair(reader_cpu="4Mi") as pair:
        key, _ = pair.store_there("big")
        pair.here.store(SPEC, key_of("held"), bytes_of(SIZE, "held"))
        lease, _ = pair.here.acquire(SPEC, (key_of("held"), 0, 0))
        _, found = pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
        assert found[0].result == NO_SPACE
        assert pair.here.release(lease) == [True]
        _, found = pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
        assert found[0].result == READY


def test_local_store_that_began_first_wins_over_the_pull(pair: Pair) -> None:
    key, content = pair.store_there("race")
    (reserved,) = pair.here.reserve(SPEC, (key, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.here.acquire, SPEC, (key, 0, 0), deadline_ms=10_000)
        pair.here.write(reserved.reservation_id, content)
        assert pair.here.commit((reserved.reservation_id, checksums(content))) == [
            cache_pb2.COMMIT_RESULT_COMMITTED
        ]
        _, found = asked.result()
    assert (found[0].result, found[0].is_remote) == (READY, False)
    assert pair.owner._byte_streams.num_bytes_sent == 0


def test_local_store_that_gives_up_lets_the_pull_in(pair: Pair) -> None:
    key, content = pair.store_there("given up")
    (reserved,) = pair.here.reserve(SPEC, (key, 0, 0))
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(pair.here.acquire, SPEC, (key, 0, 0), deadline_ms=10_000)
        wait_until(
            lambda: pair.here.cache.GetStatus(cache_pb2.GetStatusRequest()).num_leases,
            what="the acquire",
        )
        pair.here.cache.Abort(
            cache_pb2.AbortRequest(
                session_token=pair.here.token, reservation_ids=[reserved.reservation_id]
            )
        )
        lease, found = asked.result()
    assert (found[0].result, found[0].is_remote) == (READY, True)
    assert pair.here.read(lease, SIZE) == content


def test_pulls_and_local_stores_that_race_never_mix_bytes(pair: Pair) -> None:
    """Both sides have the same key with different bytes, so that any mix would show."""
    for number in range(12):
        key = key_of("mix", number)
        theirs, ours = bytes_of(SIZE, "theirs", number), bytes_of(SIZE, "ours", number)
        pair.there.store(SPEC, key, theirs)
        pair.wait_announced(key)
        barrier = threading.Barrier(2)

        def store_here(
            key: ChunkKey = key, ours: bytes = ours, barrier: threading.Barrier = barrier
        ) -> int:
            barrier.wait()
            (reserved,) = pair.here.reserve(SPEC, (key, 0, 0))
            if reserved.result != cache_pb2.RESERVE_RESULT_RESERVED:
                return 0
            pair.here.write(reserved.reservation_id, ours)
            return pair.here.commit((reserved.reservation_id, checksums(ours)))[0]

        with ThreadPoolExecutor(1) as pool:
            storing = pool.submit(store_here)
            barrier.wait()
            lease, found = pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
            stored = storing.result()
        assert found[0].result == READY
        content = pair.here.read(lease, SIZE)
        assert pair.here.release(lease) == [True]
        assert content == (ours if stored == cache_pb2.COMMIT_RESULT_COMMITTED else theirs)
        assert list(found[0].piece_checksums) == checksums(content)
        pair.here.admin.Evict(admin_pb2.EvictRequest())
        pair.there.admin.Evict(admin_pb2.EvictRequest())
    nothing_is_left(pair.reader)
    nothing_is_left(pair.owner)


def test_peers_are_served_only_what_is_here(pair: Pair) -> None:
    key, _ = pair.store_there("circle")
    with stub_session(pair.target, role=cache_pb2.CLIENT_ROLE_PEER) as peer:
        assert list(peer.lookup(SPEC, [key]).presence) == [Presence.ABSENT]
        _, found = peer.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
        assert found[0].result == NOT_FOUND
    assert pair.owner._byte_streams.num_bytes_sent == 0


def test_hand_over_asks_the_owner_that_it_names(pair: Pair) -> None:
    """The index never hears of it: the owner itself says when it is there."""
    pair.owner.guarded.on_changes(lambda changes: None)
    key, content = key_of("hand-over"), bytes_of(SIZE, "hand-over")
    node = pair.there.ping().node_number
    assert node
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            pair.here.lookup, SPEC, [key], wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=5000,
            owner_node=node, owner_epoch=pair.owner.epoch,
        )  # fmt: skip
        pair.there.store(SPEC, key, content)
        assert list(asked.result().presence) == [ELSEWHERE]
    lease, found = pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
    assert found[0].result == READY
    assert pair.here.read(lease, SIZE) == content


@pytest.mark.parametrize("knows_owner", [True, False])
def test_hand_over_of_a_recurrent_model_is_there_with_its_last_state(
    pair: Pair, knows_owner: bool
) -> None:
    """States are kept only where a prompt ended; those of the chunks before never come, here or elsewhere."""
    spec = a_namespace(shard_bytes=(1000, 3000), kinds=("full", "recurrent"), name="recurrent")
    for session in (pair.there, pair.here):
        session.open(spec)
    keys = [key_of("recurrent", n) for n in range(3)]
    owner = {}
    if knows_owner:
        pair.owner.guarded.on_changes(lambda changes: None)  # so the index can't help
        owner = {"owner_node": pair.there.ping().node_number, "owner_epoch": pair.owner.epoch}
    # Closing the other session ends its lookup.
    with ThreadPoolExecutor(2) as pool, stub_session(pair.target) as other:
        in_vain = pool.submit(
            other.lookup, spec, [key_of("never")],
            wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=4000,
        )  # fmt: skip
        asked = pool.submit(
            pair.here.lookup, spec, keys, wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=3,
            wait_ms=5000, **owner,
        )  # fmt: skip
        for key in keys:
            pair.there.store(spec, key, bytes_of(1000, "pages"))
        pair.there.store(spec, keys[2], bytes_of(3000, "state"), 1)
        absent = Presence.ABSENT
        answer = list(asked.result().presence)
        assert answer == [ELSEWHERE, absent, ELSEWHERE, absent, ELSEWHERE, ELSEWHERE]
        assert not in_vain.done(), "it came back with its time, not with the last state"


def test_groups_of_one_chunk_come_from_the_agents_that_have_them(pair: Pair) -> None:
    """Attention is at one agent, the state of the same chunk, which came later, only at another."""
    spec = a_namespace(shard_bytes=(1000, 3000), num_shards=(2, 1), kinds=("full", "recurrent"))
    key = key_of("spread")
    index = MemoryIndex(pair.shared)
    with (
        local_agent(index=index, cpu="32Mi", listen="127.0.0.1:0", insecure=True) as third,
        stub_session(f"unix:{third.config.agent_socket}") as elsewhere,
    ):
        for session in (pair.there, pair.here, elsewhere):
            session.open(spec)
        for shard in range(2):
            pair.there.store(spec, key, bytes_of(1000, shard), 0, shard)
        elsewhere.store(spec, key, bytes_of(3000, "state"), 1)
        wait_until(
            lambda: list(pair.here.lookup(spec, [key]).presence) == [ELSEWHERE] * 2,
            what="both announcements",
        )
        lease, found = pair.here.acquire(
            spec, (key, 0, 0), (key, 0, 1), (key, 1, 0), deadline_ms=10_000
        )
        assert [found[p].result for p in range(3)] == [READY] * 3
        assert pair.here.read(lease, 1000, 1) == bytes_of(1000, 1)
        assert pair.here.read(lease, 3000, 2) == bytes_of(3000, "state")
        sent = (pair.owner._byte_streams.num_bytes_sent, third._byte_streams.num_bytes_sent)
        assert sent == (2000, 3000)


def test_state_that_comes_later_is_told_and_pulled_into_the_chunk_that_is_here(pair: Pair) -> None:
    spec = a_namespace(shard_bytes=(1000, 3000), kinds=("full", "recurrent"))
    key = key_of("later")
    for session in (pair.there, pair.here):
        session.open(spec)
    pair.there.store(spec, key, bytes_of(1000, "pages"))
    wait_until(
        lambda: list(pair.here.lookup(spec, [key]).presence) == [ELSEWHERE, Presence.ABSENT],
        what="the first announcement",
    )
    pair.here.acquire(spec, (key, 0, 0), deadline_ms=10_000)
    pair.there.store(spec, key, bytes_of(3000, "state"), 1)
    wait_until(
        lambda: list(pair.here.lookup(spec, [key]).presence) == [Presence.READY_HERE, ELSEWHERE],
        what="the second announcement",
    )
    lease, found = pair.here.acquire(spec, (key, 0, 0), (key, 1, 0), deadline_ms=10_000)
    assert [found[p].result for p in range(2)] == [READY] * 2
    assert pair.here.read(lease, 3000, 1) == bytes_of(3000, "state")
    assert pair.owner._byte_streams.num_bytes_sent == 4000


def test_hand_over_of_an_owner_that_is_gone_does_not_wait(pair: Pair) -> None:
    for node, epoch in ((pair.there.ping().node_number, 1), (4711, pair.owner.epoch)):
        answer = pair.here.lookup(
            SPEC, [key_of("gone")], wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=5000,
            owner_node=node, owner_epoch=epoch,
        )  # fmt: skip
        assert list(answer.presence) == [Presence.ABSENT]


def test_owner_that_opens_nothing_costs_what_the_caller_has_left_and_is_asked_again(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = a_namespace(shard_bytes=(1000,), name="opened late")
    for session in (pair.there, pair.here):
        session.open(spec)
    pair.there.store(spec, key_of("late"), bytes_of(1000, "late"))
    wait_until(
        lambda: list(pair.here.lookup(spec, [key_of("late")]).presence) == [ELSEWHERE],
        what="the announcement",
    )
    # The peer's client is connected from here on.
    key, _ = pair.store_there("first")
    pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
    asked: list[float] = []
    open_namespace = CacheClient.open_namespace

    def fail_at_first(
        client: CacheClient, spec: NamespaceSpec, *, deadline_s: float | None = None
    ) -> bool:
        assert deadline_s is not None
        asked.append(deadline_s)
        return len(asked) > 2 and open_namespace(client, spec, deadline_s=deadline_s)

    monkeypatch.setattr(CacheClient, "open_namespace", fail_at_first)
    for _ in range(2):
        pair.reader._pulls.ask_owner(
            spec, [key_of("late")], node=pair.there.ping().node_number, epoch=pair.owner.epoch, wait_s=0.5
        )  # fmt: skip
    assert len(asked) == 2
    assert max(asked) <= 0.5
    lease, found = pair.here.acquire(spec, (key_of("late"), 0, 0), deadline_ms=10_000)
    assert found[0].result == READY
    assert pair.here.read(lease, 1000) == bytes_of(1000, "late")
    pair.here.acquire(spec, (key_of("late"), 0, 0), deadline_ms=10_000)
    assert len(asked) == 3, "asked until it was open, no longer"


def test_nobody_waits_for_another_that_opens_longer_than_its_own_time(pair: Pair) -> None:
    key, _ = pair.store_there("first")
    pair.here.acquire(SPEC, (key, 0, 0), deadline_ms=10_000)
    other = a_namespace(shard_bytes=(1000,), name="other")
    peers = pair.reader._pulls._peers
    (peer,) = peers._peers.values()
    with peer.opening, ThreadPoolExecutor(1) as pool:
        entering = pool.submit(peers.enter, *peers._peers, other, 0.1)
        assert entering.result(timeout=60) is peer
    peers.leave(peer)
    assert other.digest not in peer.opened


def test_hand_over_without_an_owner_finds_what_is_announced_late(pair: Pair) -> None:
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(
            pair.here.lookup, SPEC, [key_of("late")],
            wait=cache_pb2.LOOKUP_WAIT_HAND_OVER, wait_num_chunks=1, wait_ms=5000,
        )  # fmt: skip
        pair.there.store(SPEC, key_of("late"), bytes_of(SIZE, "late"))
        assert list(asked.result().presence) == [ELSEWHERE]


# What a busy machine of two cores may add to a deadline before all threads of three processes ran.
SCHEDULING_S = 10.0
BIG = a_namespace(shard_bytes=(12 * 2**20,), name="big")


@pytest.fixture(name="redis", scope="module")
def _redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


def store_big(
    owner: AgentProcess, reader: AgentProcess, *words: object
) -> tuple[StubSession, ChunkKey, bytes]:
    """Store one big shard at the owner; a session at the reader that sees it."""
    key, content = key_of(*words), bytes_of(BIG.groups[0].shard_bytes, *words)
    with stub_session(f"unix:{owner.socket_dir}/agent.sock") as there:
        there.open(BIG)
        there.store(BIG, key, content)
    here = StubSession(f"unix:{reader.socket_dir}/agent.sock")
    here.open(BIG)
    wait_until(
        lambda: list(here.lookup(BIG, [key]).presence) == [ELSEWHERE], what="the announcement"
    )
    return here, key, content


def test_two_processes_share_through_redis(redis: RedisServer) -> None:
    with (
        AgentProcess(index=redis.url, tcp=True, cpu="64Mi") as owner,
        AgentProcess(index=redis.url, tcp=True, cpu="64Mi", http=True) as reader,
    ):
        here, key, content = store_big(owner, reader, "share")
        lease, found = here.acquire(BIG, (key, 0, 0), deadline_ms=20_000)
        assert found[0].result == READY
        assert here.read(lease, len(content)) == content
        counters = reader.counters()
        assert (counters["pulled_shards_total"], counters["pulled_bytes_total"]) == (
            1,
            len(content),
        )
        here.close()


@pytest.mark.parametrize("fault", ["killed", "stopped", "restarted"])
def test_owner_lost_while_it_is_pulled_from_is_a_miss_in_time(
    redis: RedisServer, fault: str
) -> None:
    with (
        AgentProcess(index=redis.url, tcp=True, cpu="64Mi") as owner,
        AgentProcess(index=redis.url, tcp=True, cpu="128Mi", http=True) as reader,
    ):
        here, first, _ = store_big(owner, reader, fault, "first")
        lease, _ = here.acquire(BIG, (first, 0, 0), deadline_ms=20_000)
        here.release(lease)
        here.close()
        here, key, _ = store_big(owner, reader, fault, "second")
        # The connection stands; stopped, the owner can't be quicker than the fault.
        owner.pause()
        deadline_ms = 3000
        allowed_s = deadline_ms / 1000 * 1.1 + SCHEDULING_S
        request = here.acquire_request(BIG, (key, 0, 0), deadline_ms=deadline_ms)
        with ThreadPoolExecutor(1) as pool:
            # The client's own deadline is the oracle: the agent must answer 10 % after its own at the latest, and when
            # the machine lets it.
            asked = pool.submit(lambda: list(here.cache.Acquire(request, timeout=allowed_s)))
            wait_until(lambda: reader.counters()["pending_bytes"], what="the pull")
            if fault == "killed":
                owner.kill()
            elif fault == "restarted":
                owner.restart()
            answers = asked.result()
        (shard,) = [s for a in answers for s in a.shards]
        assert shard.result == (TIMED_OUT if fault == "stopped" else PEER_FAILED)
        here.release(answers[0].lease_id)
        if fault == "stopped":
            owner.resume()
        wait_until(
            lambda: (
                [reader.counters()[n] for n in ("pending_bytes", "leases", "reservations")]
                == [0, 0, 0]
            ),
            what="counters at their start",
        )
        here.close()
