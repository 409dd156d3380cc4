"""`larder up` and `larder demo`: build the options, open the run folder, supervise. Called by `cli.main` only."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from cacheservice.errors import ConfigError
from cacheservice.local.processes import Interrupted, Supervisor
from cacheservice.local.progress import show_progress
from cacheservice.local.runs import RunFolder, RunState
from cacheservice.local.up import LARDER_ROOT, LocalRun, RunOptions, num_usable_cpus
from cacheservice.manifest import KVCacheManifest, load_manifest, local_notices


def run_up(
    file: Path,
    *,
    redis_url: str | None,
    model_dir: Path | None,
    first_port: int | None,
    larder_dir: Path,
    as_json: bool,
) -> None:
    """Start everything, print where it is, and wait for Ctrl-C or a program that dies (ProgramFailed)."""
    manifest = load_manifest(file)
    options = _options(file, redis_url, model_dir, first_port, larder_dir)
    try:
        with _started(manifest, options) as run:
            _print_addresses(run.state(), as_json=as_json)
            run.watch()
    except (KeyboardInterrupt, Interrupted):
        # The ordinary end of `up`; what began and was not ready yet is stopped all the same.
        return


def run_demo(
    file: Path | None,
    *,
    redis_url: str | None,
    model_dir: Path | None,
    first_port: int | None,
    larder_dir: Path,
    as_json: bool,
) -> int:
    """Run the demo and print what it found; the exit code says whether answers were the same."""
    from cacheservice.local.demo import run_demo as demo
    from cacheservice.local.demo_report import print_report

    manifest = load_manifest(file or _example())
    options = _options(file or _example(), redis_url, model_dir, first_port, larder_dir)
    console = Console(stderr=True)
    report = demo(manifest, options, console)
    if as_json:
        print(json.dumps(report.as_json()))
    else:
        print_report(report, _output())
    return 0 if report.is_identical else 1


@contextmanager
def _started(manifest: KVCacheManifest, options: RunOptions) -> Iterator[LocalRun]:
    """The run, ready; stopped when the block ends."""
    with (
        RunFolder(options.larder_dir, manifest.name) as folder,
        show_progress(Console(stderr=True)) as progress,
        Supervisor(progress) as supervisor,
    ):
        for notice in local_notices(manifest):
            progress.note(f"note: {notice}")
        run = LocalRun(manifest, options, folder, supervisor, progress)
        run.start()
        yield run


def _options(
    file: Path,
    redis_url: str | None,
    model_dir: Path | None,
    first_port: int | None,
    larder_dir: Path,
) -> RunOptions:
    return RunOptions(
        manifest_path=str(file.absolute()), larder_dir=larder_dir.absolute(), environment=dict(os.environ),
        redis_url=redis_url, model_dir=model_dir, first_port=first_port, num_threads=num_usable_cpus(),
    )  # fmt: skip


def _example() -> Path:
    """The demo's manifest: of this checkout, whatever the current folder is."""
    path = LARDER_ROOT / "examples" / "cpu-local.yaml"
    if not path.exists():
        raise ConfigError(
            "examples/cpu-local.yaml is only in a checkout: give a KVCache manifest, larder demo FILE"
        )
    return path


def _print_addresses(state: RunState, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(asdict(state)), flush=True)
        return
    table = Table(box=None, pad_edge=False)
    for title in ("engine", "role", "address", "log"):
        table.add_column(title)
    for engine in state.engines:
        table.add_row(engine.name, engine.role, engine.url, shown_path(engine.log))
    console = _output()
    has_prefill = any(engine.role == "prefill" for engine in state.engines)
    console.print(f"\n{state.name} is up.\n")
    if state.router is not None:
        console.print(f"OpenAI endpoint   {state.router.url}\n", soft_wrap=True)
    console.print(table)
    for agent in state.agents:
        console.print(
            f"\nagent   sockets in {shown_path(agent.socket_dir)}, metrics at http://{agent.http}/metrics",
            soft_wrap=True,
        )
    console.print(f"redis   {state.redis}", soft_wrap=True)
    if state.router is not None:
        console.print(
            f"router  {state.router.type}, metrics at {state.router.metrics}, log {shown_path(state.router.log)}",
            soft_wrap=True,
        )
        way = "a request to prefill and then to decode" if has_prefill else "a request to an engine"
        console.print(
            f"\nThe router sends {way}. It takes text: send prompts of token ids to an engine.",
            soft_wrap=True,
        )
    elif has_prefill:
        console.print(
            "\nAsk prefill with max_tokens 1, then decode with the kv_transfer_params of its answer."
        )
    console.print("larder status shows what the cache hit. Ctrl-C stops everything.\n")


def _output() -> Console:
    """Results; wide when they go into a file or a pipe."""
    return Console(width=None if sys.stdout.isatty() else 120)


def shown_path(path: str) -> str:
    """Relative to the current folder where that is shorter."""
    relative = os.path.relpath(path)
    return min(relative, path, key=len)
