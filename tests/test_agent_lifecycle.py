"""A whole agent process: start, drain, death, an index that goes away, and what its pages say."""

from __future__ import annotations

import json
import re
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
from agent_process import AgentProcess, a_namespace, free_port, http_get, local_agent, wait_until
from agent_stub import StubSession, bytes_of, checksums, key_of, stub_session
from redis_server import RedisServer

from cacheservice.agent.config import HostPort
from cacheservice.agent.metrics import GAUGES, PREFIX, TOTALS
from cacheservice.core.outcomes import Presence
from cacheservice.index.open import build_index
from cacheservice.index.port import Index
from cacheservice.v1 import cache_pb2

SIZE = 300_000
SPEC = a_namespace(shard_bytes=(SIZE,))


def unix(agent: AgentProcess) -> str:
    return f"unix:{agent.socket_dir}/agent.sock"


def observer(redis: RedisServer) -> Index:
    """The index as another node sees it, patient, because tests share their cores."""
    return build_index(redis.url, timeout_s=5.0)


def test_ready_line_says_what_runs_where() -> None:
    with AgentProcess(cpu="8Mi", tcp=True, http=True, node="n1") as agent:
        line = agent.ready_line
        for words in ("node=n1", "arena_bytes=8388608", f"sockets={agent.socket_dir}", "index=memory",
                      "shared memory", f"tcp={agent.address} insecure", f"http={agent.http_address}"):  # fmt: skip
            assert words in line


def test_drain_lets_work_end_and_ends_with_code_0() -> None:
    with AgentProcess(cpu="16Mi", args=["--drain-seconds", "15"]) as agent:
        session = StubSession(unix(agent))
        session.open(SPEC)
        content = bytes_of(SIZE, "d")
        (reserved,) = session.reserve(SPEC, (key_of("d"), 0, 0))
        with ThreadPoolExecutor(1) as pool:
            stopping = pool.submit(agent.stop)
            wait_until(lambda: session.ping().draining, what="the drain")
            session.write(reserved.reservation_id, content)
            assert session.commit((reserved.reservation_id, checksums(content))) == [
                cache_pb2.COMMIT_RESULT_COMMITTED
            ]
            assert stopping.result() == 0
        session.close()


def test_drain_ends_with_its_time_when_work_does_not() -> None:
    with AgentProcess(cpu="16Mi", args=["--drain-seconds", "0.5"]) as agent:
        session = StubSession(unix(agent))
        session.open(SPEC)
        session.reserve(SPEC, (key_of("stuck"), 0, 0))
        assert agent.stop() == 0
        session.close()


def test_second_signal_ends_at_once() -> None:
    with AgentProcess(cpu="16Mi", args=["--drain-seconds", "600"]) as agent:
        session = StubSession(unix(agent))
        session.open(SPEC)
        session.reserve(SPEC, (key_of("stuck"), 0, 0))
        process = psutil.Process(agent.pid)
        process.send_signal(signal.SIGINT)
        wait_until(lambda: session.ping().draining, what="the drain")
        assert agent.stop() == 1
        session.close()


def test_drained_agent_leaves_nothing_in_the_index() -> None:
    with RedisServer() as redis, AgentProcess(cpu="16Mi", index=redis.url) as agent:
        with stub_session(unix(agent)) as session:
            session.open(SPEC)
            session.store(SPEC, key_of("gone"), bytes_of(SIZE, "gone"))
        index = observer(redis)
        index.join(name="observer", address="", epoch=1)
        wait_until(
            lambda: any(index.lookup(SPEC.digest, [key_of("gone")])), what="the announcement"
        )
        assert agent.stop() == 0
        assert index.lookup(SPEC.digest, [key_of("gone")]) == [()]
        with redis.client() as client:
            assert not [k for k in list(client.scan_iter()) if key_of("gone") in k]
        index.close()


def test_index_that_is_away_at_the_start_is_said_and_heals() -> None:
    with RedisServer() as redis:
        redis.kill()
        with (
            AgentProcess(cpu="16Mi", index=redis.url, http=True) as agent,
            stub_session(unix(agent)) as session,
        ):
            assert "index=unreachable" in agent.ready_line or "index=ready" not in agent.ready_line
            assert agent.get("/readyz")[0] == 200
            session.open(SPEC)
            session.store(SPEC, key_of("h"), bytes_of(SIZE, "h"))
            answer = session.lookup(SPEC, [key_of("h"), key_of("other")])
            assert list(answer.presence) == [Presence.READY_HERE, Presence.ABSENT]
            assert not answer.index_asked
            status = session.cache.GetStatus(cache_pb2.GetStatusRequest())
            assert status.index_state == cache_pb2.INDEX_STATE_UNREACHABLE
            assert status.index_message
            assert status.node_number == 0
            assert "index unavailable" in agent.log
            redis.start()
            wait_until(lambda: session.ping().node_number, what="joining")
            wait_until(
                lambda: session.lookup(SPEC, [key_of("x")]).index_asked,
                what="an answer of the index",
            )
            index = observer(redis)
            wait_until(
                lambda: any(index.lookup(SPEC.digest, [key_of("h")])), what="the announcement"
            )
            index.close()


@pytest.mark.parametrize("loss", ["flushed", "restarted"])
def test_index_that_lost_everything_is_told_again(loss: str) -> None:
    with RedisServer() as redis, AgentProcess(cpu="16Mi", index=redis.url) as agent:
        index = observer(redis)
        with stub_session(unix(agent)) as session:
            session.open(SPEC)
            for number in range(20):
                session.store(SPEC, key_of(number), bytes_of(SIZE, number))
            keys = [key_of(number) for number in range(20)]
            wait_until(lambda: all(index.lookup(SPEC.digest, keys)), what="the announcements")
            if loss == "flushed":
                with redis.client() as client:
                    client.flushall()
            else:
                redis.restart_empty()

            def is_back() -> bool:
                try:
                    return all(index.lookup(SPEC.digest, keys))
                except Exception:
                    return False

            wait_until(is_back, timeout_s=30, what="the announcements again")
        index.close()


def test_evicted_chunks_leave_the_index() -> None:
    with RedisServer() as redis, AgentProcess(cpu="2Mi", index=redis.url) as agent:
        index = observer(redis)
        with stub_session(unix(agent)) as session:
            session.open(SPEC)
            for number in range(30):
                session.store(SPEC, key_of(number), bytes_of(SIZE, number))
            here = session.lookup(SPEC, [key_of(n) for n in range(30)]).presence

            def agree() -> bool:
                told = index.lookup(SPEC.digest, [key_of(n) for n in range(30)])
                return [bool(t) for t in told] == [p == Presence.READY_HERE for p in here]

            wait_until(agree, what="index and arena to agree")
        index.close()


def test_rotated_password_heals_without_a_restart(tmp_path: Path) -> None:
    secret = tmp_path / "password"
    secret.write_text("s3cr3t-one\n")
    with RedisServer(tcp=True, password="s3cr3t-one") as redis:
        url = redis.url_for(None, None)
        args = ["--index-password-file", str(secret)]
        with (
            AgentProcess(cpu="16Mi", index=url, http=True, args=args) as agent,
            stub_session(unix(agent)) as session,
        ):
            session.open(SPEC)
            session.store(SPEC, key_of("p"), bytes_of(SIZE, "p"))

            def index_state() -> tuple[str, str]:
                state = json.loads(agent.get("/statusz")[1])["index"]
                return state["health"], state["reason"]

            def is_announced() -> bool:
                with redis.client() as client:
                    return any(key.startswith(b"larder:{") for key in client.keys("larder:*"))

            wait_until(is_announced, what="the announcement")
            pid = agent.pid
            redis.kill()
            wait_until(lambda: index_state() == ("unreachable", "Unreachable"), what="its end")
            redis.password = "s3cr3t-two"
            redis.start()
            wait_until(lambda: index_state() == ("refusing", "AuthFailed"), what="the refusal")
            # Meanwhile it serves what it holds.
            assert list(session.lookup(SPEC, [key_of("p")]).presence) == [Presence.READY_HERE]
            secret.write_text("s3cr3t-two\n")
            wait_until(lambda: index_state() == ("ready", ""), what="healing")
            wait_until(is_announced, what="the announcement again")
            assert agent.pid == pid
            for text in (agent.log, agent.get("/statusz")[1].decode()):
                assert "s3cr3t" not in text


def test_agents_that_drained_leave_nothing_that_stays() -> None:
    with RedisServer() as redis:
        agents = [
            AgentProcess(cpu="2Mi", index=redis.url, node=node, args=["--key-prefix", "larder:0a1b2c3d:"])
            for node in ("n1", "n2")
        ]  # fmt: skip
        with redis.client() as client:

            def ours(start: bytes = b"") -> list[bytes]:
                return client.keys(b"larder:0a1b2c3d:" + start + b"*")

            for number, agent in enumerate(agents):
                with stub_session(unix(agent)) as session:
                    session.open(SPEC)
                    # More than fit: what was evicted has to go too.
                    for chunk in range(30):
                        session.store(SPEC, key_of(number, chunk), bytes_of(SIZE, number, chunk))
            wait_until(lambda: ours(b"{"), what="announcements")
            for agent in agents:
                assert agent.stop() == 0
            assert ours(b"{") == []
            assert ours(b"node:") == []
            # What keeps numbers over an upgrade goes within a day.
            left = ours()
            assert left
            for key in left:
                assert 0 < client.ttl(key) <= 86_400, key
        for agent in agents:
            agent.close()


def test_agent_stopped_past_every_time_limit_keeps_its_epoch_and_entries() -> None:
    with RedisServer() as redis, AgentProcess(cpu="16Mi", index=redis.url) as agent:
        index = observer(redis)
        with stub_session(unix(agent)) as session:
            session.open(SPEC)
            session.store(SPEC, key_of("s"), bytes_of(SIZE, "s"))
            wait_until(
                lambda: any(index.lookup(SPEC.digest, [key_of("s")])), what="the announcement"
            )
            agent.pause()
            wait_until(
                lambda: not any(index.lookup(SPEC.digest, [key_of("s")])),
                what="its lease's end",
                timeout_s=30,
            )
            agent.resume()
            wait_until(
                lambda: any(index.lookup(SPEC.digest, [key_of("s")])),
                what="its return",
                timeout_s=30,
            )
            epoch = session.welcome.epoch
        with stub_session(unix(agent)) as session:
            assert session.welcome.epoch == epoch
            session.open(SPEC)
            assert list(session.lookup(SPEC, [key_of("s")]).presence) == [Presence.READY_HERE]
        index.close()


def test_killed_agent_comes_back_with_another_epoch_and_nothing() -> None:
    with AgentProcess(cpu="16Mi") as agent:
        with stub_session(unix(agent)) as session:
            session.open(SPEC)
            session.store(SPEC, key_of("k"), bytes_of(SIZE, "k"))
            epoch = session.welcome.epoch
            agent.kill()
            with pytest.raises(grpc.RpcError):
                session.ping()
        agent.start()
        with stub_session(unix(agent)) as session:
            assert session.welcome.epoch != epoch
            session.open(SPEC)
            assert list(session.lookup(SPEC, [key_of("k")]).presence) == [Presence.ABSENT]


def test_pages_say_how_it_is_without_keys_and_tokens() -> None:
    with (
        AgentProcess(cpu="16Mi", http=True) as agent,
        stub_session(unix(agent), name="engine-1") as session,
    ):
        session.open(SPEC)
        session.store(SPEC, key_of("page"), bytes_of(SIZE, "page"))
        session.lookup(SPEC, [key_of("page")], take_lease=True)
        outcome = cache_pb2.Outcome(
            kind=cache_pb2.OUTCOME_KIND_LOOKUP, reason=cache_pb2.OUTCOME_REASON_HIT, request_id="cmpl-1",
            asked_tokens=512, served_tokens=256, duration_ms=2,
        )  # fmt: skip
        session.ping(outcome)
        assert agent.get("/healthz") == (200, b"ok\n")
        assert agent.get("/readyz") == (200, b"ok\n")
        assert agent.get("/")[0] == 404
        status, body = agent.get("/statusz?outcomes=1")
        page = json.loads(body)
        assert status == 200
        assert page["counters"]["commits_total"] == 1
        (kept,) = page["outcomes"]
        assert (kept["engine"], kept["reason"], kept["request_id"]) == ("engine-1", "hit", "cmpl-1")
        for secret in (
            session.token.hex(),
            key_of("page").hex(),
            key_of("page").hex()[:8],
        ):
            assert secret not in body.decode()
        text = agent.get("/metrics")[1].decode()
        for name in (*GAUGES, *(f"{n}_total" for n in TOTALS)):
            assert f"\n{PREFIX}{name} " in text, name
        assert f'{PREFIX}outcomes_total{{kind="lookup",reason="hit",role="tool"}} 1.0' in text
        assert f'{PREFIX}calls_total{{method="Commit",status="OK"}} 1.0' in text
        names = re.findall(r"^# TYPE (\S+)", text, re.MULTILINE)
        assert all(name.startswith(PREFIX) for name in names)


def test_draining_agent_is_not_ready() -> None:
    port = free_port()
    with local_agent(http=HostPort("127.0.0.1", port).__str__()) as agent:
        agent.begin_drain()
        assert http_get(f"http://127.0.0.1:{port}/readyz") == (503, b"draining\n")
        assert http_get(f"http://127.0.0.1:{port}/healthz")[0] == 200


def test_logs_hold_no_token(tmp_path: Path) -> None:
    with AgentProcess(cpu="16Mi", args=["--log-level", "DEBUG"]) as agent:
        with stub_session(unix(agent), maps_arena=True) as session:
            session.open(SPEC)
            token = session.token
        wait_until(lambda: "session ended" in agent.log, what="the session's end")
        assert token.hex() not in agent.log
        assert repr(token)[2:-1] not in agent.log


def test_own_memory_stays_small_with_many_sessions_and_shards() -> None:
    small = a_namespace(shard_bytes=(4096,), name="small")
    with AgentProcess(cpu="64Mi") as agent:
        sessions = [StubSession(unix(agent)) for _ in range(60)]
        first = sessions[0]
        first.open(small)
        for start in range(0, 10_000, 1000):
            reserved = first.reserve(
                small, *((key_of(n), 0, 0) for n in range(start, start + 1000))
            )
            frames = (
                cache_pb2.WriteRequest(
                    session_token=first.token, reservation_id=r.reservation_id, payload=b"x" * 4096
                )
                for r in reserved
            )
            first.cache.Write(frames, timeout=60)
            first.commit(*((r.reservation_id, checksums(b"x" * 4096)) for r in reserved))
        status = first.cache.GetStatus(cache_pb2.GetStatusRequest())
        assert status.num_shards == 10_000
        anonymous = int(
            next(
                line.split()[1]
                for line in Path(f"/proc/{agent.pid}/status").read_text().splitlines()
                if line.startswith("RssAnon")
            )
        )
        assert anonymous * 1024 <= 150 * 10**6 + 1000 * status.num_shards
        for session in sessions:
            session.close()


def test_sixty_clients_that_die_leave_nothing() -> None:
    with AgentProcess(cpu="16Mi", http=True) as agent:
        sessions = [StubSession(unix(agent)) for _ in range(30)]
        for number, session in enumerate(sessions):
            session.open(SPEC)
            session.reserve(SPEC, (key_of(number), 0, 0))
        for session in sessions:
            session.channel.close()
        names = (
            "sessions",
            "reservations",
            "leases",
            "pending_bytes",
            "quarantined_bytes",
            "used_bytes",
        )
        wait_until(
            lambda: not any(agent.counters()[n] for n in names), what="counters at their start"
        )
