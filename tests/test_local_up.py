"""What `larder up` decides before anything runs: names, ports, folders, passwords, and one run per name."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from rich.console import Console

from cacheservice.commands.engines import EngineRole
from cacheservice.errors import ConfigError
from cacheservice.local.metrics_text import counter
from cacheservice.local.ports import PortLocks, choose_ports
from cacheservice.local.processes import Supervisor
from cacheservice.local.progress import PlainProgress
from cacheservice.local.redis import answers_ping, redis_program, redis_url
from cacheservice.local.runs import AgentState, EngineState, RunFolder, RunState, live_runs
from cacheservice.local.up import engine_roles, engine_sites, program_env, split_password
from cacheservice.manifest import KVCacheManifest, parse_manifest

HEAD = "apiVersion: larder.dev/v1alpha1\nkind: KVCache\nmetadata: {name: demo}\nspec: "


def manifest(spec: str) -> KVCacheManifest:
    return parse_manifest(HEAD + spec, source="test")


def test_replicas_become_engines_and_prefill_comes_first() -> None:
    roles = engine_roles(
        manifest("{model: {name: m}, prefill: {replicas: 1}, decode: {replicas: 2}}")
    )
    assert roles == [EngineRole.PREFILL, EngineRole.DECODE, EngineRole.DECODE]
    sites = engine_sites(
        roles, [1, 2, 3], model="m", socket_dir=Path("/s"), agent_address=None, num_threads=1
    )
    assert [(site.name, site.port) for site in sites] == [
        ("prefill", 1),
        ("decode-0", 2),
        ("decode-1", 3),
    ]


def test_decode_alone_does_both() -> None:
    roles = engine_roles(manifest("{model: {name: m}, decode: {}}"))
    assert roles == [EngineRole.BOTH]
    (site,) = engine_sites(
        roles, [1], model="m", socket_dir=Path("/s"), agent_address=None, num_threads=1
    )
    assert site.name == "decode"


def test_a_cache_without_engines_starts_none() -> None:
    assert engine_roles(manifest("{cache: {nodeSelector: {a: b}}}")) == []


def test_the_stream_path_gives_engines_an_address_instead_of_the_sockets() -> None:
    (site,) = engine_sites(
        [EngineRole.BOTH],
        [1],
        model="m",
        socket_dir=Path("/s"),
        agent_address="127.0.0.1:9",
        num_threads=1,
    )
    assert (site.socket_dir, site.agent_address) == (None, "127.0.0.1:9")


@pytest.mark.parametrize(
    ("url", "without", "password"),
    [
        ("redis://h:1/0", "redis://h:1/0", ""),
        ("redis://:secret@h:1/0", "redis://h:1/0", "secret"),
        ("rediss://user:s%40t@[::1]:1", "rediss://user@[::1]:1", "s@t"),
        ("unix:///run/redis.sock?db=0", "unix:///run/redis.sock?db=0", ""),
        ("unix://:secret@/run/redis.sock", "unix:///run/redis.sock", "secret"),
    ],
)
def test_a_password_stays_out_of_the_command_line(url: str, without: str, password: str) -> None:
    assert split_password(url) == (without, password)


@pytest.mark.parametrize("url", ["localhost:6379", "http://h:1", ""])
def test_a_wrong_redis_url_is_refused_with_the_right_form(url: str) -> None:
    with pytest.raises(ConfigError, match="redis://HOST:PORT"):
        split_password(url)


def test_two_runs_that_start_together_choose_other_ports(tmp_path) -> None:
    """An engine takes half a minute to listen; meanwhile its port looks free."""
    first, second, third = (PortLocks(tmp_path) for _ in range(3))
    ports = first.choose(None, 3)
    others = second.choose(None, 3)
    assert not set(ports) & set(others)
    with pytest.raises(ConfigError, match=f"port {ports[1]} belongs to another run"):
        third.choose(ports[1], 2)
    first.close()
    assert third.choose(ports[1], 1) == [ports[1]]
    second.close()
    third.close()


def test_ports_are_consecutive_when_asked_for_and_free_otherwise() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken.*--port"):
            choose_ports(port, 1)
    assert len(set(choose_ports(None, 3))) == 3
    with pytest.raises(ConfigError, match="65535 is the last one"):
        choose_ports(65534, 3)


def test_two_runs_of_one_name_are_refused_and_two_names_are_not(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "demo"):
        with pytest.raises(ConfigError, match="demo runs already"), RunFolder(tmp_path, "demo"):
            pass
        with RunFolder(tmp_path, "other"):
            pass
    with RunFolder(tmp_path, "demo"):
        pass


def test_a_folder_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--dir"), RunFolder(tmp_path / "file", "demo"):
        pass


def test_sockets_move_when_the_folder_is_too_deep_for_a_unix_address(tmp_path: Path) -> None:
    with RunFolder(tmp_path / ("d" * 100), "demo") as folder:
        short = folder.socket_dir()
        assert len(os.fsencode(short / "arena.sock")) <= 107
        assert short.stat().st_mode & 0o777 == 0o700
        assert folder.socket_dir() == short
    assert not short.exists()


def test_secrets_are_readable_by_this_user_only_and_gone_after_the_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "demo") as folder:
        path = folder.secret("redis", "hidden")
        assert path.read_text() == "hidden"
        assert path.stat().st_mode & 0o777 == 0o600
    assert not path.exists()


def state() -> RunState:
    return RunState(
        name="demo", manifest="/m.yaml", model="m", pid=1, started_at_unix_s=0.0, redis="embedded",
        engines=(EngineState("decode", "decode", "http://127.0.0.1:1/v1", 2, "/log"),),
        agents=(AgentState("agent", "/sockets", "127.0.0.1:1", 3, "/log"),),
    )  # fmt: skip


def test_a_run_is_seen_while_its_lock_is_held_and_only_then(tmp_path: Path) -> None:
    assert live_runs(tmp_path) == []
    with RunFolder(tmp_path, "demo") as folder:
        assert live_runs(tmp_path) == []
        folder.write_state(state())
        assert live_runs(tmp_path) == [state()]
        text = (folder.path / "state.json").read_text()
    assert live_runs(tmp_path) == []
    # What a killed run leaves: the file, and a lock that nobody holds.
    (folder.path / "state.json").write_text(text)
    assert live_runs(tmp_path) == []


def test_a_foreign_state_file_is_no_run(tmp_path: Path) -> None:
    with RunFolder(tmp_path, "demo") as folder:
        for text in ("", "[]", "{}", '{"version": 1}', '{"version": 99}'):
            (folder.path / "state.json").write_text(text)
            assert live_runs(tmp_path) == []


def test_children_find_the_checkout_before_what_the_user_has_on_the_path() -> None:
    env = program_env({"PYTHONPATH": "/mine", "A": "1"}, {"A": "2"})
    first, *rest = env["PYTHONPATH"].split(os.pathsep)
    assert (Path(first) / "cacheservice").is_dir()
    assert rest == ["/mine"]
    assert env["A"] == "2"


def test_the_embedded_redis_forgets_the_least_used_and_writes_nothing(tmp_path: Path) -> None:
    import redis

    socket_path = tmp_path / "r.sock"
    program = redis_program(
        socket_path=socket_path,
        folder=tmp_path,
        log=tmp_path / "redis.log",
        memory_bytes=64 << 20,
        env=dict(os.environ),
    )
    with Supervisor(PlainProgress(Console(stderr=True))) as supervisor:
        supervisor.wait_ready([supervisor.start(program)])
        with redis.Redis.from_url(redis_url(socket_path)) as client:
            settings = client.config_get("maxmemory*")
            assert settings["maxmemory"] == str(64 << 20)
            assert settings["maxmemory-policy"] == "allkeys-lru"
            assert client.config_get("save")["save"] == ""
            assert client.config_get("port")["port"] == "0"
    assert not answers_ping(socket_path)
    assert not list(tmp_path.glob("*.rdb"))


def test_counters_are_summed_over_the_labels_that_are_not_asked_for() -> None:
    page = (
        '# TYPE x_total counter\nx_total{engine="0",kind="load"} 2.0\nx_total{engine="1",kind="load"} 3\n'
        'x_total{engine="0",kind="save"} 7\nx_total_created{kind="load"} 9\ny 1e3\n'
    )
    assert counter(page, "x_total", kind="load") == 5
    assert counter(page, "x_total") == 12
    assert counter(page, "y") == 1000
    assert counter(page, "z") == 0
