"""The connector against the newest released vLLM: its interface, and its scheduler under our harness.

Real engines run on the pinned CPU build only. Of the newest version there is the Python source, in .cache/vllm-newest
(`make vllm-newest`); PYTHONPATH lays it over that build, in processes of their own. Its scheduler, cache manager and
configuration run there; models don't, as its kernels need a GPU.
"""

from __future__ import annotations

import ast
import builtins
import ctypes
import hashlib
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import prometheus_client
import pytest
import torch
import transformers
import vllm_interface
from scheduler_shapes import SHAPES
from vllm_interface import Difference, Interface, differences

REPOSITORY = Path(__file__).resolve().parent.parent
NEWEST = REPOSITORY / ".cache" / "vllm-newest"

REVIEWED = {
    "CacheConfig.cache_dtype is now field: CacheDType | str; it was field: CacheDType": (
        "Platforms may register cache types of their own. We put the name into the namespace and look at nothing else."
    ),
    "KVConnectorBase_V1.supports_sleep_mode is new: classmethod method (cls, kv_transfer_config: KVTransferConfig)"
    " -> bool": "Asked for engines with --enable-sleep-mode, which checks.py refuses, with what to do instead.",
    "KVConnectorBase_V1.unregister_kv_caches is new: method (self) -> None": (
        "Called before an engine sleeps, which checks.py refuses."
    ),
    "KVConnectorBase_V1.restore_kv_caches is new: method (self) -> None": (
        "Called after an engine woke up; it never sleeps."
    ),
    "KVCacheSpec.is_draft is new: field: bool": (
        "Marks layers of a drafter. It is left out of comparisons and groups; is_eagle_group still tells us the groups."
    ),
    "MLAAttentionSpec.topk_buffer_width is new: field: int | None": (
        "Width of a buffer of HiSparse, whose groups are refused. No byte of a page depends on it."
    ),
    "SlidingWindowSpec.num_retained_tokens is new: property -> int": (
        "What is readable below a step: window - 1 + extra_retained_tokens, as before; a window with extra is refused."
    ),
}
"""Differences between the pinned and the newest version that were looked at, each with why nothing has to be done."""


@pytest.fixture(scope="module")
def pinned() -> Interface:
    """The installed vLLM."""
    return vllm_interface.describe()


@pytest.fixture(scope="module")
def newest(pinned: Interface) -> Interface:
    """The newest vLLM."""
    return describe_elsewhere(newest_folder(), pinned)


def newest_folder() -> Path:
    """Where the newest vLLM's source is."""
    if not (NEWEST / "larder-fetched").is_file():
        pytest.skip("the source of the newest vLLM is not there: make vllm-newest")
    return NEWEST


def newest_version() -> str:
    """As pinned."""
    lines = (REPOSITORY / "requirements" / "vllm-newest.txt").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("vllm=="))
    return line.removeprefix("vllm==").split()[0]


def run_over(folder: Path, *arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Run Python with the vLLM of this folder in place of the installed one."""
    # Bytecode beside the source makes the next run of these tests several seconds faster.
    unwanted = ("PYTHONDONTWRITEBYTECODE", "PYTEST_CURRENT_TEST")
    environment = {k: v for k, v in os.environ.items() if k not in unwanted}
    environment["PYTHONPATH"] = f"{folder}{os.pathsep}{REPOSITORY / 'tests'}"
    environment["PYTHONHASHSEED"] = "0"  # a life of the scheduler harness is the same each time
    return subprocess.run(
        [sys.executable, *arguments], input=text, env=environment, cwd=REPOSITORY, capture_output=True, text=True,
        check=False,
    )  # fmt: skip


def describe_elsewhere(folder: Path, pinned: Interface) -> Interface:
    """Describe the vLLM in a folder, in a process of its own."""
    script = Path(vllm_interface.__file__)
    ran = run_over(folder, str(script), text=json.dumps(pinned.used_at))
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = Interface(**json.loads(ran.stdout))
    assert Path(found.folder) == folder / "vllm"
    return found


def unreviewed(found: Sequence[Difference], reviewed: Sequence[str]) -> list[str]:
    """What nobody has looked at, and what was looked at and is not so any more."""
    texts = {difference.text for difference in found}
    fresh = [f"unreviewed: {difference}" for difference in found if difference.text not in reviewed]
    return fresh + [
        f"no longer so, take it out of REVIEWED: {t}" for t in reviewed if t not in texts
    ]


# ---- interface


def test_every_read_of_vllm_is_known(pinned):
    missing = [f"{name} is not there" for name, text in pinned.has.items() if text is None]
    assert not (faults := pinned.problems + missing), "\n".join(faults)


PLANTED = [
    ("def f(thing: Any): ...", "f(thing) is Any: say in ROOTS or NOT_VLLM what it is"),
    ("class A:\n    thing: list[Any]", "thing is Any: say in ROOTS"),
    ("def f() -> Any: ...", "f returns Any: say in ROOTS"),
    ("def f(request: Any):\n    request.num_moons", "Request has no num_moons"),
    (
        "def f(request: Any, name: str):\n    getattr(request, name)",
        "name of the attribute is not known",
    ),
    (
        "def f(spec: Any):\n    for n in ('dtype', 'moons'):\n        getattr(spec, n, 1)",
        "has no moons",
    ),
    (
        "def f(request: Any):\n    request.kv_transfer_params['x'].moons",
        "not known what this is read",
    ),
    (
        "def f(block_pool: Any):\n    return [b.moons for b in reversed(block_pool.blocks[1:])]",
        "KVCacheBlock has no moons",
    ),
    (
        "class A:\n def g(self, block_pool: Any): self._pool = block_pool\n def f(self): self._pool.moons",
        "BlockPool has no moons",
    ),
    (
        "class A:\n    request: Any\ndef f(a: A):\n    for n, x in enumerate([a.request]):\n        x.moons",
        "Request has no moons",
    ),
    (
        "class A:\n def f(self, request_of: Callable[[str], Any]): request_of(1).moons",
        "Request has no moons",
    ),
    (
        "class A:\n def _request_of(self) -> Any: ...\n def f(self): self._request_of().moons",
        "Request has no moons",
    ),
    (
        "def f(group: Any):\n  for n, (s, _) in enumerate(zip([group], 'ab')): s.moons",
        "KVCacheGroupSpec has no moons",
    ),
    (
        "from vllm.v1 import kv_cache_interface as k\ndef f(spec: Any): [s.moon for s in k.iter_layer_specs(spec)]",
        "FullAttentionSpec has no moon",
    ),
    (
        "from vllm.v1.outputs import KVConnectorOutput\nclass C(KVConnectorOutput):\n def f(self): self._moons",
        "KVConnectorOutput has no _moons",
    ),
    (
        "from vllm.v1.outputs import KVConnectorOutput\ndef f():\n    return KVConnectorOutput(moons=1)",
        "KVConnectorOutput has no moons",
    ),
]


@pytest.mark.parametrize(("source", "problem"), PLANTED, ids=[p for _, p in PLANTED])
def test_the_search_says_what_vllm_lacks_and_what_it_can_not_follow(source, problem):
    from vllm.v1.kv_cache_interface import FullAttentionSpec
    from vllm_reads import find_reads

    (found,) = find_reads({"ours.py": source}, [FullAttentionSpec]).problems
    assert problem in found


def test_no_name_of_vllm_escapes_the_search(pinned):
    """The search follows types; this looks at bare names. What is nobody else's name must have been found as vLLM's."""
    trees = [ast.parse(p.read_text()) for p in sorted((REPOSITORY / "cacheservice").rglob("*.py"))]
    ours = {name for tree in trees for name in names_defined_in(tree)}
    others = names_of_other_libraries()
    found = {name.replace(":", ".").rsplit(".", maxsplit=1)[-1] for name in pinned.has}
    used = {
        node.attr: f"{path.name}:{node.lineno}"
        for path in vllm_interface.CONNECTOR.glob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and not node.attr.startswith(("__", "cu"))  # CUDA's C
    }
    nobodys = {name: place for name, place in used.items() if name not in ours | others | found}
    assert not nobodys, nobodys


def test_newest_vllm_differs_only_where_reviewed(pinned, newest):
    assert newest.version == newest_version()
    assert not (faults := unreviewed(differences(pinned, newest), list(REVIEWED))), "\n".join(
        faults
    )


def test_a_reviewed_difference_that_is_gone_must_leave_the_list():
    found = [Difference("A.x is gone; it was attribute", "used at a.py:1")]
    assert unreviewed(found, ["A.x is gone; it was attribute"]) == []
    assert unreviewed(found, []) == [
        "unreviewed: A.x is gone; it was attribute    [used at a.py:1]"
    ]
    assert unreviewed([], ["A.x is gone; it was attribute"]) == [
        "no longer so, take it out of REVIEWED: A.x is gone; it was attribute"
    ]


BASE = "distributed/kv_transfer/kv_connector/v1/base.py"
KV_CACHE = "v1/kv_cache_interface.py"

CHANGES: dict[str, tuple[str, Callable[[str], str], tuple[str, ...]]] = {
    "a parameter has another name": (
        BASE,
        lambda s: within(s, "KVConnectorBase_V1.get_num_new_matched_tokens", "num_computed_tokens:", "computed:"),
        (
            "LarderConnector.get_num_new_matched_tokens: ours has no parameter computed    [does not fit]",
            "KVConnectorBase_V1.get_num_new_matched_tokens is now abstract method (self, request: Request, computed:",
        ),
    ),
    "a method is gone": (
        BASE,
        lambda s: without(s, "KVConnectorBase_V1.has_pending_block_frees"),
        ("KVConnectorBase_V1.has_pending_block_frees is gone; it was method (self) -> bool    [overridden by Larder",),
    ),
    "a method is a property": (
        BASE,
        lambda s: s.replace("    def has_pending_push_work", "    @property\n    def has_pending_push_work"),
        (
            "LarderConnector.has_pending_push_work: only one of the two is a property",
            "KVConnectorBase_V1.has_pending_push_work is now property -> bool; it was method (self) -> bool",
        ),
    ),
    "a method is abstract": (
        BASE,
        lambda s: s.replace(
            "    @abstractmethod\n    def start_load_kv",
            "    @abstractmethod\n    def adopt(self): ...\n\n    @abstractmethod\n    def start_load_kv",
        ),
        ("LarderConnector lacks adopt, which is abstract", "KVConnectorBase_V1.adopt is new: abstract method (self)"),
    ),
    "a method of the worker is new": (
        BASE,
        lambda s: s.replace("    def reset_cache", "    def forget(self): ...\n\n    def reset_cache"),
        ("KVConnectorBase_V1.forget is new: method (self)",),
    ),
    "a field of a step is gone": (
        "v1/core/sched/output.py",
        lambda s: without(s, "SchedulerOutput.kv_connector_block_state"),
        ("SchedulerOutput.kv_connector_block_state is gone; it was field: KVConnectorBlockState | None    [used",),
    ),
    "a field set in __init__ is gone": (
        "v1/request.py",
        lambda s: s.replace("self.num_preemptions = 0", "pass"),
        ("Request.num_preemptions is gone",),
    ),
    "a field of an output is of another type": (
        "v1/outputs.py",
        lambda s: within(s, "KVConnectorOutput", "kv_connector_worker_meta:", "kv_connector_worker_meta: list |"),
        ("KVConnectorOutput.kv_connector_worker_meta is now field: list |",),
    ),
    "a flag is gone": (
        "config/kv_transfer.py",
        lambda s: without(s, "KVTransferConfig.kv_load_failure_policy"),
        ("KVTransferConfig.kv_load_failure_policy is gone",),
    ),
    "a flag that is read with a default is gone": (
        "config/parallel.py",
        lambda s: without(s, "ParallelConfig.prefill_context_parallel_size"),
        ("ParallelConfig.prefill_context_parallel_size is gone",),
    ),
    "a field of a group is gone": (
        KV_CACHE,
        lambda s: without(s, "KVCacheGroupSpec.is_eagle_group"),
        ("KVCacheGroupSpec.is_eagle_group is gone; it was field: bool    [used at groups.py",),
    ),
    "a group has a new field": (
        KV_CACHE,
        lambda s: within(s, "KVCacheGroupSpec", "    host_resident:", "    is_torn: bool = False\n    host_resident:"),
        ("KVCacheGroupSpec.is_torn is new: field: bool",),
    ),
    "an accepted spec has a new field": (
        KV_CACHE,
        lambda s: within(s, "MambaSpec", "    mamba_type:", "    stride: int = 1\n    mamba_type:"),
        ("MambaSpec.stride is new: field: int",),
    ),
    "a spec class is new": (
        KV_CACHE,
        lambda s: s + "\n\nclass NovelSpec(SlidingWindowMLASpec):\n    pass\n",
        ("NovelSpec (v1/kv_cache_interface.py) is a spec class that groups.py neither accepts nor refuses by name",),
    ),
    "a function has another signature": (
        "v1/core/kv_cache_utils.py",
        lambda s: within(s, "hash_block_tokens", "curr_block_token_ids: Sequence[int]", "curr_block_token_ids: bytes"),
        ("kv_cache_utils.hash_block_tokens is now",),
    ),
    "a function is gone": (
        "v1/core/kv_cache_utils.py",
        lambda s: without(s, "resolve_none_hash_seed"),
        ("kv_cache_utils.resolve_none_hash_seed is gone",),
    ),
    "a method of the block pool has another name": (
        "v1/core/block_pool.py",
        lambda s: s.replace("    def touch(", "    def hold("),
        ("BlockPool.touch is gone; it was method (self, blocks: Sequence[KVCacheBlock]) -> None    [used at pins.py",),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def faults_of_a_changed_vllm(pinned, tmp_path_factory) -> list[str]:
    """What is said of a newest vLLM that was changed in all these ways at once."""
    source = newest_folder()
    folder = tmp_path_factory.mktemp("changed") / "vllm-changed"
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, (file, change, _) in CHANGES.items():
        path = folder / "vllm" / file
        before = path.read_text()
        path.write_text(change(before))
        is_changed = path.read_text() != before
        assert is_changed, f"nothing was changed for: {name}"
    return unreviewed(differences(pinned, describe_elsewhere(folder, pinned)), list(REVIEWED))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_of_vllm_is_named(name, faults_of_a_changed_vllm):
    for sentence in CHANGES[name][2]:
        assert [f for f in faults_of_a_changed_vllm if sentence in f], "\n".join(
            faults_of_a_changed_vllm
        )


def test_only_what_was_changed_is_named(faults_of_a_changed_vllm):
    known = [sentence for _, _, sentences in CHANGES.values() for sentence in sentences]
    wrong = [f for f in faults_of_a_changed_vllm if not any(k in f for k in known)]
    assert wrong == [], "\n".join(wrong)


def test_only_source_is_fetched_and_only_of_the_pinned_wheel(tmp_path, monkeypatch, capfd):
    monkeypatch.syspath_prepend(REPOSITORY / "tools")
    tool = importlib.import_module("fetch_newest_vllm")
    wheels, pinned_list = tmp_path / "wheels", tmp_path / "pinned.txt"
    wheels.mkdir()
    wheel = wheels / "vllm-9.9-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("vllm/__init__.py", "")
        archive.writestr("vllm/_C.abi3.so", "kernels")
        about = "vllm-9.9.dist-info"
        archive.writestr(f"{about}/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 9.9\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    monkeypatch.setattr(tool, "PINNED", pinned_list)
    monkeypatch.setattr(tool, "FOLDER", tmp_path / "cache" / "vllm-newest")
    for name, value in (("PIP_NO_INDEX", "1"), ("PIP_FIND_LINKS", str(wheels))):
        monkeypatch.setenv(name, value)

    def fetched() -> list[str]:
        found = (path for path in tool.FOLDER.rglob("*") if path.is_file())
        return sorted(str(path.relative_to(tool.FOLDER)) for path in found)

    pinned_list.write_text(f"vllm==9.9 --hash=sha256:{'0' * 64}\n")
    assert tool.main() == 1
    assert "DO NOT MATCH THE HASHES" in capfd.readouterr().err
    assert fetched() == []
    pinned_list.write_text(f"vllm==9.9 --hash=sha256:{digest}\n")
    assert tool.main() == 0
    assert fetched() == ["larder-fetched", "vllm/__init__.py"]
    pinned_list.write_text(f"# another list\nvllm==9.9 --hash=sha256:{digest}\n")
    assert tool.main() == 0, "an older one gives way"
    wheel.unlink()
    assert tool.main() == 0, "what is there is not fetched again"
    pinned_list.write_text(f"vllm==9.9 --hash=sha256:{'1' * 64}\n")
    assert tool.main() == 1
    assert fetched() == ["larder-fetched", "vllm/__init__.py"]
    assert list(tool.FOLDER.parent.iterdir()) == [tool.FOLDER]


def test_the_readme_names_both_versions(pinned):
    table = (REPOSITORY / "README.md").read_text().split("## Compatibility")[1]
    assert f"| vLLM {pinned.version} |" in table
    assert f"| vLLM {newest_version()}, the newest |" in table


# ---- scheduler

ALL_CHECKED = """
import sys, vllm
assert vllm.__version__ == sys.argv[1] and vllm.__file__.startswith(sys.argv[2]), vllm.__file__
"""
RUN_TESTS = ALL_CHECKED + "import pytest; sys.exit(pytest.main(sys.argv[3:]))"
LIVE = ALL_CHECKED + "import scheduler_life; sys.exit(scheduler_life.main(sys.argv[3:]))"


def run_on_newest(code: str, *arguments: str) -> str:
    """Run code with the newest vLLM; returns what it printed, and fails with it when it ends with an error."""
    folder = newest_folder()
    ran = run_over(folder, "-c", code, newest_version(), str(folder), *arguments)
    assert ran.returncode == 0, f"{ran.stdout[-6000:]}\n{ran.stderr[-2000:]}"
    return ran.stdout


PREEMPTED = "test_a_preempted_request_is_offered_what_lies_beyond_its_computed_tokens"


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "files",
    [
        ("test_connector_scheduling.py", f"test_scheduler_harness.py::{PREEMPTED}"),
        ("test_connector_start.py", "test_connector_ranks.py", "test_prefix_vllm.py"),
    ],
)
def test_what_holds_under_the_pinned_scheduler_holds_under_the_newest(files):
    # That the oracles notice faults of ours is proved on the pinned vLLM.
    chosen = ["-k", "not oracle_notices", "-m", "not engine and not harness"]
    options = ["-q", "-p", "no:cacheprovider", *chosen]
    printed = run_on_newest(RUN_TESTS, *options, *(f"tests/{file}" for file in files))
    summary = printed.strip().splitlines()[-1]
    assert re.match(r"\d+ passed", summary), printed
    assert "skipped" not in summary, printed


def live_on_newest(runs: int) -> None:
    """Live so many seeds of every shape of the scheduler harness."""
    printed = run_on_newest(LIVE, "all", "--runs", str(runs))
    for name in SHAPES:
        assert f"{name}: runs={runs} " in printed, printed


@pytest.mark.timeout(900)
def test_a_few_lives_under_the_newest_scheduler_keep_every_page_right():
    live_on_newest(1)


@pytest.mark.harness
@pytest.mark.timeout(3600)
def test_many_lives_under_the_newest_scheduler_keep_every_page_right():
    live_on_newest(max(1, int(os.environ.get("RUNS", "32")) // 8))


def without(source: str, name: str) -> str:
    """Source without one function, method or field."""
    lines = source.splitlines(keepends=True)
    node = node_called(ast.parse(source), name)
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)])
    assert node.end_lineno is not None
    return "".join([*lines[: first - 1], *lines[node.end_lineno :]])


def within(source: str, name: str, old: str, new: str) -> str:
    """Source with something replaced once, inside of one class or function."""
    node = node_called(ast.parse(source), name)
    lines = source.splitlines(keepends=True)
    inside = "".join(lines[node.lineno - 1 : node.end_lineno])
    assert old in inside, f"{old!r} is not in {name}"
    return source.replace(inside, inside.replace(old, new, 1), 1)


def node_called(tree: ast.Module, name: str) -> ast.stmt:
    """The definition of "Class.name" or "function"."""
    body: list[ast.stmt] = tree.body
    found: ast.stmt | None = None
    for part in name.split("."):
        (found,) = (n for n in body if part in (getattr(n, "name", None), target_of(n)))
        body = getattr(found, "body", [])
    assert found is not None
    return found


def target_of(node: ast.stmt) -> str | None:
    """Name of an annotated field."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id
    return None


def names_defined_in(tree: ast.Module) -> set[str]:
    """Functions, classes, fields and what is set on objects."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.AnnAssign | ast.Assign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {t.id for t in targets if isinstance(t, ast.Name)}
    return found


def names_of_other_libraries() -> set[str]:
    """Names of Python's types, and of the modules that the connector imports from elsewhere than vLLM and ourselves."""
    owners: list[object] = [getattr(builtins, name) for name in dir(builtins)]
    # Objects that reach the connector without an import of their classes.
    owners += [torch, torch.Tensor, torch.device, torch.cuda, torch.cuda.Event, torch.cuda.Stream]
    owners += [prometheus_client.Counter, transformers.PretrainedConfig, type(ctypes.c_char)]
    for path in vllm_interface.CONNECTOR.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            modules: list[str] = []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules = [node.module]
                if node.module == "importlib":
                    modules += [f"importlib.{alias.name}" for alias in node.names]
            for name in modules:
                if name.split(".")[0] not in ("cacheservice", "vllm"):
                    module = importlib.import_module(name)
                    owners += [module, *(v for v in vars(module).values() if isinstance(v, type))]
    return {name for owner in owners for name in dir(owner)}
