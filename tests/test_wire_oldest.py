"""The connector runs beside the protobuf and grpcio of an engine image, down to the versions that we name.

The oldest ones are in .cache/wire-oldest (`make wire-oldest`); PYTHONPATH lays them over .venv, in processes of their
own. The agent is of .venv: the newest. What is older is refused in one sentence.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from agent_process import local_agent
from packaging.requirements import Requirement

from cacheservice.connector.libraries import WIRE_LIBRARIES, too_old

REPOSITORY = Path(__file__).resolve().parent.parent
TESTS = Path(__file__).resolve().parent
OLDEST = REPOSITORY / ".cache" / "wire-oldest"
GENERATED = REPOSITORY / "cacheservice" / "v1"


def pinned() -> dict[str, str]:
    """Versions in requirements/wire-oldest.txt by name."""
    text = (REPOSITORY / "requirements" / "wire-oldest.txt").read_text()
    return dict(re.findall(r"^([\w-]+)==([\d.]+)", text, re.MULTILINE))


def required() -> dict[str, str]:
    """Minimum versions in pyproject.toml by name, of what has one only."""
    lines = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["dependencies"]
    return dict(re.fullmatch(r"([\w-]+)(?:\[\w+\])?>=([\d.]+)", line).groups() for line in lines)  # type: ignore[union-attr,misc]


def under(first: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Runs Python with `first` in front of everything that is installed."""
    path = os.pathsep.join([str(first), str(TESTS), str(REPOSITORY)])
    return subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


@pytest.fixture
def oldest() -> Path:
    """The folder with the oldest versions."""
    if not OLDEST.is_dir():
        pytest.skip("the oldest protobuf and grpcio are not there: make wire-oldest")
    return OLDEST


def test_every_place_names_the_versions_of_the_generated_code() -> None:
    messages = {path.name: path.read_text() for path in GENERATED.glob("*_pb2.py")}
    calls = {path.name: path.read_text() for path in GENERATED.glob("*_pb2_grpc.py")}
    assert len(messages) == len(calls) == 2
    of_messages = {
        re.search(r"^# Protobuf Python Version: ([\d.]+)$", text, re.MULTILINE)[1]  # type: ignore[index]
        for text in messages.values()
    }
    of_calls = {
        re.search(r"^GRPC_GENERATED_VERSION = '([\d.]+)'$", text, re.MULTILINE)[1]  # type: ignore[index]
        for text in calls.values()
    }
    assert of_messages == {pinned()["protobuf"]} == {required()["protobuf"]}
    assert of_calls == {pinned()["grpcio"]} == {pinned()["grpcio-tools"]} == {required()["grpcio"]}
    row = next(
        line
        for line in (REPOSITORY / "README.md").read_text().splitlines()
        if line.startswith("| protobuf, grpcio in the engine's Python |")
    )
    runtime = (REPOSITORY / "requirements" / "runtime.txt").read_text()
    newest = dict(re.findall(r"^(protobuf|grpcio)==([\d.]+)", runtime, re.MULTILINE))
    assert re.findall(r"\d[\d.]*\d", row) == [
        pinned()["protobuf"],
        pinned()["grpcio"],
        newest["protobuf"],
        newest["grpcio"],
    ]


@pytest.mark.parametrize("data_plane", ["auto", "stream"])
def test_client_of_the_oldest_libraries_stores_and_loads(oldest: Path, data_plane: str) -> None:
    with local_agent() as agent:
        ran = under(
            oldest, str(TESTS / "wire_oldest_client.py"), str(agent.config.socket_dir), data_plane
        )
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == "", "no warning either: each engine would show it"
    assert json.loads(ran.stdout) == {
        "protobuf": pinned()["protobuf"],
        "grpcio": pinned()["grpcio"],
        "before": ["ABSENT"],
        "stored": "hit",
        "after": ["READY_HERE"],
        "loaded": "hit",
        "equal": True,
    }


def test_connector_loads_beside_the_oldest_libraries(oldest: Path) -> None:
    program = "import cacheservice.connector as c; print(c.LarderConnector.__name__)"
    ran = under(oldest, "-c", program)
    assert ran.stdout.split()[-1:] == ["LarderConnector"], ran.stderr


def test_connector_says_which_library_is_too_old_and_does_not_load(tmp_path: Path) -> None:
    about = tmp_path / "protobuf-5.29.6.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: protobuf\nVersion: 5.29.6\n")
    ran = under(tmp_path, "-c", "import cacheservice.connector as c; c.LarderConnector")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == (
        "cacheservice.errors.RefusedError: the Python of this engine has protobuf 5.29.6, which Larder's wire code "
        "can't be loaded with: take an engine image with newer ones, or build one that adds them: "
        f"pip install 'protobuf>={required()['protobuf']}'"
    )


@pytest.mark.parametrize(
    ("installed", "named"),
    [
        ({"protobuf": "6.30.0", "grpcio": "1.72.2"}, ()),
        ({"protobuf": "7.36.2", "grpcio": "1.85.1"}, ()),
        ({"protobuf": "7.37.0rc1", "grpcio": "1.90.0.dev0"}, ()),
        ({}, ()),
        ({"protobuf": "6.29.9", "grpcio": "1.72.2"}, ("protobuf",)),
        ({"protobuf": "6.30.0", "grpcio": "1.72.1"}, ("grpcio",)),
        ({"protobuf": "4.25.9", "grpcio": "1.9.0"}, ("protobuf", "grpcio")),
    ],
)
def test_too_old_names_each_library_that_is(
    installed: dict[str, str], named: tuple[str, ...]
) -> None:
    lines = ["protobuf>=6.30.0", "grpcio>=1.72.2", "grpcio-reflection>=9", "typer>=9; extra == 'x'"]
    sentence = too_old(lines, installed)
    if not named:
        assert sentence is None
        return
    assert sentence is not None
    for name in WIRE_LIBRARIES:
        assert (f"{name} {installed[name]}" in sentence) is (name in named)
        minimum = next(line for line in lines if Requirement(line).name == name)
        assert (f"'{minimum}'" in sentence) is (name in named)
