"""The larder command: what is typed wrongly gets a sentence and exit code 2; --json prints one object."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from cacheservice.cli.main import exit_code
from cacheservice.errors import AgentUnavailable, ConfigError
from cacheservice.local.processes import Interrupted

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "cpu-local.yaml"
HEAD = "apiVersion: larder.dev/v1alpha1\nkind: KVCache\nmetadata: {name: demo}\nspec: "


def larder(*arguments: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("LARDER_")}
    return subprocess.run(
        [sys.executable, "-m", "cacheservice.cli.main", *arguments], cwd=cwd, env={**env, **environment},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def written(tmp_path: Path, spec: str) -> str:
    path = tmp_path / "kvcache.yaml"
    path.write_text(HEAD + spec)
    return str(path)


@pytest.mark.parametrize("command", ["up", "status", "demo", "version"])
def test_every_command_explains_itself(command: str, tmp_path: Path) -> None:
    answer = larder(command, "--help", cwd=tmp_path)
    assert answer.returncode == 0
    assert "Usage" in answer.stdout
    assert "--json" in answer.stdout


def test_version_is_printed_and_as_json(tmp_path: Path) -> None:
    plain = larder("version", cwd=tmp_path).stdout.strip()
    assert json.loads(larder("version", "--json", cwd=tmp_path).stdout) == {"version": plain}


def refused(answer: subprocess.CompletedProcess[str], *words: str) -> None:
    assert answer.returncode == 2, answer
    assert answer.stdout == ""
    assert "Traceback" not in answer.stderr
    for word in words:
        assert word in " ".join(answer.stderr.split()), answer.stderr


def test_what_users_mistype_is_named_with_the_remedy(tmp_path: Path) -> None:
    refused(larder("up", cwd=tmp_path), "FILE")
    refused(larder("upp", cwd=tmp_path), "upp", "up")
    refused(larder("up", "absent.yaml", cwd=tmp_path), "absent.yaml", "is the path right?")
    refused(larder("up", str(EXAMPLE), "--port", "0", cwd=tmp_path), "--port")
    refused(larder("up", str(EXAMPLE), "--prot", "1", cwd=tmp_path), "--prot")
    misspelt = written(tmp_path, "{model: {name: m}, decode: {}, cache: {cpuu: 1Gi}}")
    refused(larder("up", misspelt, cwd=tmp_path), "spec.cache.cpuu", "cpu")
    owned = written(tmp_path, "{model: {name: m}, decode: {args: [--port=1]}}")
    refused(
        larder("up", owned, cwd=tmp_path), "spec.decode.args[0]", "Larder sets this flag itself"
    )


def test_what_cannot_run_here_is_refused_before_anything_starts(tmp_path: Path) -> None:
    refused(
        larder("up", str(EXAMPLE), "--model", "nowhere", cwd=tmp_path),
        "nowhere",
        "config.json",
        "--model",
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(larder("up", str(EXAMPLE), "--model", str(empty), cwd=tmp_path), "config.json")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    wrong_redis = larder(
        "up", str(EXAMPLE), "--model", str(model), cwd=tmp_path, LARDER_REDIS_URL="http://h"
    )
    refused(wrong_redis, "redis://HOST:PORT")
    (tmp_path / "plain").write_text("")
    refused(larder("up", str(EXAMPLE), "--dir", str(tmp_path / "plain"), cwd=tmp_path), "--dir")


def test_the_demo_wants_both_kinds_of_engines(tmp_path: Path) -> None:
    alone = written(tmp_path, "{model: {name: m}, decode: {}}")
    refused(larder("demo", alone, cwd=tmp_path), "spec.prefill", "examples/cpu-local.yaml")
    none = written(tmp_path, "{model: {name: m}, prefill: {}, decode: {replicas: 0}}")
    refused(larder("demo", none, cwd=tmp_path), "spec.decode")


def test_status_says_how_to_start_when_nothing_runs(tmp_path: Path) -> None:
    answer = larder("status", cwd=tmp_path)
    assert answer.returncode == 1
    assert "larder up" in answer.stdout
    assert "--dir" in answer.stdout
    assert not (tmp_path / ".larder").exists(), "looking must not write"


def test_status_as_json_is_one_object_also_when_nothing_runs(tmp_path: Path) -> None:
    answer = larder("status", "--json", cwd=tmp_path)
    assert json.loads(answer.stdout) == {"runs": []}
    assert answer.returncode == 1


def raiser(error: BaseException) -> Callable[[], None]:
    def command() -> None:
        raise error

    return command


def test_each_kind_of_end_has_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(lambda: None) == 0
    assert exit_code(lambda: 1) == 1
    assert exit_code(raiser(ConfigError("mend it"))) == 2
    assert "mend it" in capsys.readouterr().err
    assert exit_code(raiser(AgentUnavailable("nobody there"))) == 1
    assert exit_code(raiser(KeyboardInterrupt())) == 130
    assert exit_code(raiser(Interrupted(15))) == 143
    with pytest.raises(ZeroDivisionError):
        exit_code(lambda: 1 // 0)
