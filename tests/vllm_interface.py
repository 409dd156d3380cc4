"""What our connector needs of vLLM, as one vLLM has it; and how two vLLMs differ in that.

`describe` runs in a process that imports the vLLM in question: as a script it prints JSON, so that the newest version's
source, laid over the installed one by PYTHONPATH, is described in a process of its own. What is described:
- every field, method and function that our code reads or imports (vllm_reads.py finds them in our source);
- whole surfaces: the classes that ours derive from, and those that describe a KV cache, where also a new name matters;
- whether our methods take what vLLM's signatures pass, and implement all that is abstract;
- the classes of KV cache specs, of which connector/groups.py has to name each.

Called by: test_newest_vllm.py.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import re
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import engines  # noqa: F401 - sets vLLM's environment
from vllm_classes import is_vllm, locate, member_of, members_of, path_of, signature_of

CONNECTOR = Path(__file__).resolve().parent.parent / "cacheservice" / "connector"
CACHE_INTERFACE = "vllm.v1.kv_cache_interface"
CACHE_CLASSES = ("KVCacheConfig", "KVCacheGroupSpec", "KVCacheTensor")
"""Where a new field can mean that pages are made, shared or moved in another way."""
NOT_LEAVES = {"KVCacheSpec", "AttentionSpec", "UniformTypeKVCacheSpecs"}
"""Specs that no layer has: base classes, and a container of other specs, which is looked into."""


@dataclass
class Interface:
    """One vLLM, seen from our connector. Names are "module:Class.name" or "module:function"."""

    version: str
    folder: str
    has: dict[str, str | None] = field(default_factory=dict)
    """What our code reads or imports, as text; None where this vLLM has nothing of that name."""
    used_at: dict[str, list[str]] = field(default_factory=dict)
    """Places in our code, by the same names."""
    surfaces: dict[str, str] = field(default_factory=dict)
    """All names of the classes that are compared as a whole."""
    overridden: dict[str, str] = field(default_factory=dict)
    """Names of vLLM's that our classes define too, with our class."""
    problems: list[str] = field(default_factory=list)
    """What does not fit, whatever another version has."""


@dataclass(frozen=True)
class Difference:
    """One thing that another vLLM has otherwise."""

    text: str
    """Without line numbers, so that it stays the same while our code changes."""
    matters_to: str

    def __str__(self) -> str:
        return f"{self.text}    [{self.matters_to}]"


def describe(names: dict[str, list[str]] | None = None) -> Interface:
    """Describe the vLLM that this process imports. `names`: what to look at; None finds it in our source."""
    import vllm

    found = Interface(vllm.__version__, str(Path(vllm.__file__).parent))
    accepted = _accepted_specs(found)
    if names is None:
        from vllm_reads import find_reads  # wants every class that our code meets

        sources = {path.name: path.read_text() for path in CONNECTOR.glob("*.py")}
        container = locate(f"{CACHE_INTERFACE}:UniformTypeKVCacheSpecs")
        reads = find_reads(sources, [*accepted, container])
        found.problems += reads.problems
        names = {name: sorted(at) for name, at in {**reads.members, **reads.imports}.items()}
    found.used_at = names
    for name in names:
        found.has[name] = _text_of(name)
    ours = _our_classes(found)
    bases = {base: None for cls in ours for base in cls.__mro__ if is_vllm(base)}
    for cls in {**bases, **dict.fromkeys(_cache_classes(found, accepted))}:
        for name, member in members_of(cls).items():
            if cls in bases or member.text.startswith(("field", "property")):
                found.surfaces[f"{path_of(cls)}.{name}"] = member.text
    for cls in ours:
        _check_fit(found, cls)
    _check_specs(found)
    return found


def differences(old: Interface, new: Interface) -> list[Difference]:
    """How `new` differs from `old` in what our connector needs, and what does not fit in `new` at all."""
    found = [Difference(problem, "does not fit") for problem in new.problems]
    for name, was in sorted((old.surfaces | old.has).items()):
        now = new.surfaces.get(name, new.has.get(name))
        if was is None or was == now:
            continue
        matters = [f"overridden by {old.overridden[name]}"] if name in old.overridden else []
        matters += [f"used at {', '.join(old.used_at[name])}"] if name in old.used_at else []
        what = f"is now {now}; it was {was}" if now is not None else f"is gone; it was {was}"
        found.append(Difference(f"{_short(name)} {what}", "; ".join(matters) or "same surface"))
    for name, now in sorted(new.surfaces.items()):
        if name not in old.surfaces:
            found.append(Difference(f"{_short(name)} is new: {now}", "nothing of ours yet"))
    return found


def main() -> None:
    """Read names as JSON from the standard input, write the description to the standard output."""
    names = json.load(sys.stdin)
    stdout, sys.stdout = sys.stdout, sys.stderr  # vLLM prints
    described = describe(names)
    stdout.write(json.dumps(asdict(described)))


def _our_classes(found: Interface) -> list[type]:
    """Classes of ours that derive from vLLM's."""
    classes = []
    for path in sorted(CONNECTOR.glob("*.py")):
        try:
            module = importlib.import_module(f"cacheservice.connector.{path.stem}")
        except ImportError as error:
            found.problems.append(f"{path.name} can't be imported: {error}")
            continue
        for value in vars(module).values():
            is_ours = inspect.isclass(value) and value.__module__ == module.__name__
            if is_ours and any(is_vllm(base) for base in value.__mro__):
                classes.append(value)
    return classes


def _accepted_specs(found: Interface) -> list[type]:
    from cacheservice.connector.groups import SPECS

    return _there(found, SPECS, "a spec class that groups.py accepts")


def _cache_classes(found: Interface, accepted: list[type]) -> list[type]:
    bases = [base for cls in accepted for base in cls.__mro__ if is_vllm(base)]
    return [*bases, *_there(found, CACHE_CLASSES, "which describes a KV cache")]


def _there(found: Interface, names: Iterable[str], what: str) -> list[type]:
    interface = importlib.import_module(CACHE_INTERFACE)
    found.problems += [f"{name}, {what}, is gone" for name in names if not hasattr(interface, name)]
    return [getattr(interface, name) for name in names if hasattr(interface, name)]


def _text_of(name: str) -> str | None:
    """Text of a name. A class that moved is looked for by its name, as its objects reach us all the same."""
    path, _, attribute = name.rpartition(".")
    if ":" not in path:
        module, _, imported = name.partition(":")
        try:
            return signature_of(module, imported)
        except ImportError:
            return None
    try:
        cls = locate(path)
    except (ImportError, AttributeError):
        cls = next(iter(_classes_called(path.partition(":")[2])), None)
    member = member_of(cls, attribute) if cls is not None else None
    return member.text if member is not None else None


def _classes_called(name: str) -> list[type]:
    loaded = [m for n, m in sorted(sys.modules.items()) if n.startswith("vllm.")]
    found = [vars(module).get(name) for module in loaded]
    return [value for value in found if inspect.isclass(value) and is_vllm(value)]


def _check_fit(found: Interface, ours: type) -> None:
    """Whether vLLM can use our class as its signatures say."""
    for name in sorted(getattr(ours, "__abstractmethods__", ())):
        found.problems.append(f"{ours.__name__} lacks {name}, which is abstract")
    theirs = [base for base in ours.__mro__ if is_vllm(base)]
    for name, value in vars(ours).items():
        base = next((b for b in theirs if name in members_of(b)), None)
        if base is None:
            continue
        found.overridden[f"{path_of(base)}.{name}"] = ours.__name__
        if fault := _misfit(inspect.getattr_static(base, name, None), value):
            found.problems.append(f"{ours.__name__}.{name}: {fault}")


def _misfit(theirs: Any, ours: Any) -> str | None:
    """What a caller that goes by vLLM's signature could not do with our method."""
    if theirs is None:
        return None  # set on self, or a field without default
    kinds = (staticmethod, classmethod, property)
    for kind in kinds:
        if isinstance(theirs, kind) != isinstance(ours, kind):
            return f"only one of the two is a {kind.__name__}"
    if not inspect.isfunction(getattr(theirs, "__func__", theirs)):
        return None
    wanted = inspect.signature(getattr(theirs, "__func__", theirs)).parameters
    taken = inspect.signature(getattr(ours, "__func__", ours)).parameters
    has_rest = any(p.kind is p.VAR_KEYWORD for p in taken.values())
    for place, (name, parameter) in enumerate(wanted.items()):
        if parameter.kind is parameter.VAR_KEYWORD and not has_rest:
            return "ours takes no further keywords"
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        if name not in taken and not (parameter.kind is parameter.KEYWORD_ONLY and has_rest):
            return f"ours has no parameter {name}"
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and list(taken)[place] != name:
            return f"ours has {name} in another place"
        if parameter.default is not parameter.empty and taken[name].default is parameter.empty:
            return f"ours demands {name}"
    for name, parameter in taken.items():
        is_rest = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
        if name not in wanted and not is_rest and parameter.default is parameter.empty:
            return f"ours demands {name}, which vLLM does not pass"
    return None


def _check_specs(found: Interface) -> None:
    """Every class of KV cache specs of this vLLM has to be accepted or refused by name."""
    from cacheservice.connector.groups import REFUSED_SPECS, SPECS

    there = spec_classes(Path(found.folder))
    for name, file in sorted(there.items()):
        if name not in {*SPECS, *REFUSED_SPECS, *NOT_LEAVES}:
            found.problems.append(
                f"{name} ({file}) is a spec class that groups.py neither accepts nor refuses by name"
            )
    for name in sorted({*REFUSED_SPECS} - {*there}):
        found.problems.append(f"{name}, a spec class that groups.py refuses, is gone")


def spec_classes(folder: Path) -> dict[str, str]:
    """Names of the classes that derive from KVCacheSpec in a vLLM source tree, each with its file; from the source, as
    some are in modules that only their models import."""
    bases: dict[str, tuple[set[str], str]] = {}
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(errors="replace")
        if not re.search(r"^class \w+\([^)]*Spec", source, re.MULTILINE):
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(b).rsplit(".", maxsplit=1)[-1] for b in node.bases}
                bases[node.name] = (names, str(path.relative_to(folder)))
    found = {"KVCacheSpec"}
    while more := {n for n, (of, _) in bases.items() if of & found and n not in found}:
        found |= more
    return {name: bases[name][1] for name in found if name in bases}


def _short(name: str) -> str:
    """ "Class.name" or "module.function" for reading."""
    module, _, rest = name.partition(":")
    return rest if "." in rest else f"{module}.{rest}"


if __name__ == "__main__":
    main()
