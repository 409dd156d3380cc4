"""Refuses an engine whose protobuf or grpcio is older than the generated code of the wire contract takes.

The payload brings neither: a second copy in front of the engine's own would decide for all of it. Generated code
refuses by itself, but in words about generators, and beside a protobuf before 5.26 by a name that is missing. The
minimum is what this distribution requires (pyproject.toml); tests/test_wire_oldest.py holds it against that code.

Called by: __init__.py, before it loads the connector, whose imports would fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata

from cacheservice.errors import RefusedError

WIRE_LIBRARIES = ("protobuf", "grpcio")


def check_wire_libraries() -> None:
    """Compare this process's libraries with what the payload requires of them. Raises RefusedError.

    A distribution without metadata is not judged: the generated code still is the judge.
    """
    installed = {}
    for name in WIRE_LIBRARIES:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass  # laid out by hand; its import tells
    try:
        required = metadata.requires("larder") or []
    except metadata.PackageNotFoundError:
        return  # run from a checkout
    if sentence := too_old(required, installed):
        raise RefusedError(sentence)


def too_old(required: Sequence[str], installed: Mapping[str, str]) -> str | None:
    """What is older than required and what to do about it, in one sentence; None when nothing is.

    `required` as in a distribution's metadata ("protobuf>=6.30.0"); `installed` from names to versions.
    """
    from packaging.requirements import Requirement

    wanted = {}
    for line in required:
        requirement = Requirement(line)
        version = installed.get(requirement.name)
        if version is not None and not requirement.specifier.contains(version, prereleases=True):
            wanted[requirement.name] = f"{requirement.name}{requirement.specifier}"
    if not wanted:
        return None
    seen = " and ".join(f"{name} {installed[name]}" for name in wanted)
    install = " ".join(f"'{line}'" for line in wanted.values())
    return (
        f"the Python of this engine has {seen}, which Larder's wire code can't be loaded with: take an engine image "
        f"with newer ones, or build one that adds them: pip install {install}"
    )
