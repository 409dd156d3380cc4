"""What `make demo` shows: a prefill and a decode engine that share a cache, measured against an engine without one.

    control   (first run only) an engine without cache answers every prompt: the cold times, and the right answers
    serve     each prompt goes to prefill with max_tokens 1, then to decode, which finds the KV in the cache
    restart   the decode engine is restarted, so that its own prefix cache is gone, and asked everything again

The engines are asked directly, without the router that `larder up` starts: prefill and decode are timed apart, and a
router answers with one time for both. Called by the CLI; `demo_report` prints what comes out. Stopping, also on Ctrl-C
at any moment, is the supervisor's.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from cacheservice.commands.engines import EngineRole, EngineSite, engine_command
from cacheservice.errors import ConfigError
from cacheservice.local.control import (
    COMPLETIONS,
    ControlAnswer,
    ask_control,
    completion,
    control_key,
    keep_control,
    load_control,
    tokens_of,
)
from cacheservice.local.demo_prompts import Prompt, build_prompts, digest, token_cutter
from cacheservice.local.demo_report import DemoReport, DemoRow, Rate
from cacheservice.local.http_client import Answer, ask, get_text, post_json
from cacheservice.local.identity import enough_count, judge
from cacheservice.local.metrics_text import counter
from cacheservice.local.ports import HOST, PortLocks
from cacheservice.local.processes import Supervisor
from cacheservice.local.progress import Progress, show_progress
from cacheservice.local.runs import RunFolder
from cacheservice.local.up import LocalRun, RunOptions, engine_program, resolve_model
from cacheservice.manifest import KVCacheManifest, RouterType

WARM_UP = Prompt("warm-up", "Hello.", 4)
"""The first request of an engine pays for what vLLM does lazily. Shorter than any chunk, so never cached."""


@dataclass(frozen=True, slots=True)
class _Served:
    """One prompt through prefill and decode. `prefill_s` is the whole request to prefill."""

    prefill_s: float
    answer: Answer


@dataclass(frozen=True, slots=True)
class _Moved:
    """Bytes and busy seconds of saves or loads, from an engine's own metrics, since it started."""

    num_bytes: float
    seconds: float

    def __add__(self, other: _Moved) -> _Moved:
        return _Moved(self.num_bytes + other.num_bytes, self.seconds + other.seconds)


def run_demo(manifest: KVCacheManifest, options: RunOptions, console: Console) -> DemoReport:
    """Run all of it and return what was seen. Raises ConfigError, ProgramFailed or EngineError; all is stopped then."""
    _check(manifest)
    manifest = replace(manifest, router=replace(manifest.router, type=RouterType.NONE))
    begun = time.monotonic()
    with (
        RunFolder(options.larder_dir, manifest.name) as folder,
        show_progress(console) as progress,
        Supervisor(progress) as supervisor,
    ):
        model = resolve_model(manifest, options, supervisor, log=folder.log("model"))
        progress.begin(
            "prompts",
            "reading licences, docstrings and the language reference of this installation",
        )
        prompts = build_prompts(token_cutter(Path(model)))
        progress.end("prompts", f"{len(prompts)} prompts of real text")
        control, control_is_new = _control(
            manifest, options, model, prompts, folder, supervisor, progress
        )
        run = LocalRun(manifest, options, folder, supervisor, progress)
        run.start()
        demo = _Demo(run, manifest, prompts, progress)
        served = demo.serve()
        stored, retrieved = (
            demo.moved(EngineRole.PREFILL, "save"),
            demo.moved(EngineRole.DECODE, "load"),
        )
        run.restart_engine(demo.decode.name)
        warm = demo.ask_again()
        retrieved += demo.moved(EngineRole.DECODE, "load")
        loaded_tokens = demo.loaded_tokens()
    return _report(
        manifest.name, prompts, control, served, warm, control_is_new=control_is_new,
        store=_rate(stored), retrieve=_rate(retrieved), loaded_tokens=loaded_tokens,
        total_s=time.monotonic() - begun,
    )  # fmt: skip


def _check(manifest: KVCacheManifest) -> None:
    for title, part in (("prefill", manifest.prefill), ("decode", manifest.decode)):
        if part is None or part.replicas == 0:
            raise ConfigError(
                f"the demo needs spec.{title} with at least one replica: take examples/cpu-local.yaml, or add it"
            )


class _Demo:
    """The two engines that the demo talks to."""

    def __init__(
        self,
        run: LocalRun,
        manifest: KVCacheManifest,
        prompts: Sequence[Prompt],
        progress: Progress,
    ) -> None:
        prefill, decode = run.first_engine(EngineRole.PREFILL), run.first_engine(EngineRole.DECODE)
        assert prefill is not None, "checked before the start"
        assert decode is not None, "checked before the start"
        assert manifest.model is not None, "engines have a model"
        self.prefill, self.decode = prefill, decode
        self._model = manifest.model.served_name
        self._prompts = prompts
        self._progress = progress

    def serve(self) -> list[_Served]:
        """Every prompt through prefill, then decode."""
        for site in (self.prefill, self.decode):
            _warm_up(site, self._model)
        served = []
        self._progress.begin("serving", "")
        for number, prompt in enumerate(self._prompts, 1):
            title = f"{prompt.name} ({number} of {len(self._prompts)})"
            body = completion(self._model, prompt)
            self._progress.update("serving", f"{title}: prefill computes and stores")
            begun = time.perf_counter()
            done = post_json(
                self.prefill.host, self.prefill.port, COMPLETIONS, {**body, "max_tokens": 1}
            )
            prefill_s = time.perf_counter() - begun
            self._progress.update("serving", f"{title}: decode answers")
            params = done.get("kv_transfer_params")
            if params:
                body["kv_transfer_params"] = params
            served.append(
                _Served(prefill_s, ask(self.decode.host, self.decode.port, COMPLETIONS, body))
            )
        self._progress.end("serving", f"{len(served)} prompts through prefill and decode")
        return served

    def ask_again(self) -> list[Answer]:
        """Every prompt to the restarted decode engine alone, without a hand-over."""
        _warm_up(self.decode, self._model)
        answers = []
        self._progress.begin("asking", "")
        for number, prompt in enumerate(self._prompts, 1):
            self._progress.update(
                "asking",
                f"{prompt.name} ({number} of {len(self._prompts)}): decode alone, restarted",
            )
            answers.append(
                ask(
                    self.decode.host, self.decode.port, COMPLETIONS, completion(self._model, prompt)
                )
            )
        self._progress.end("asking", f"{len(answers)} prompts again, from the cache")
        return answers

    def moved(self, role: EngineRole, kind: str) -> _Moved:
        """What the engine of `role` saved or loaded since its start."""
        site = self.prefill if role is EngineRole.PREFILL else self.decode
        text = get_text(site.host, site.port, "/metrics")
        return _Moved(
            counter(text, "vllm:larder_bytes_total", kind=kind),
            counter(text, "vllm:larder_seconds_total", kind=kind),
        )

    def loaded_tokens(self) -> int:
        """Tokens that the restarted decode engine took from the cache, not from its own prefix cache."""
        text = get_text(self.decode.host, self.decode.port, "/metrics")
        return int(counter(text, "vllm:larder_tokens_total", kind="load", what="served"))


def _control(
    manifest: KVCacheManifest, options: RunOptions, model: str, prompts: Sequence[Prompt], folder: RunFolder,
    supervisor: Supervisor, progress: Progress,
) -> tuple[list[ControlAnswer], bool]:  # fmt: skip
    """The control's answers, and whether they were made now."""
    assert manifest.decode is not None, "checked before the start"
    assert manifest.model is not None, "engines have a model"
    path = Path(model)
    key = control_key(
        model=path if path.is_dir() else model, engine_args=manifest.decode.args, prompts_digest=digest(list(prompts)),
        num_threads=options.num_threads,
    )  # fmt: skip
    kept = options.larder_dir / "models" / f"{path.name}-control-{key}.json"
    answers = load_control(kept, len(prompts))
    if answers is not None:
        progress.note(f"the engine without cache answered before: {kept.name}")
        return answers, False
    locks = PortLocks()
    try:
        site = EngineSite(
            name="control", role=EngineRole.DECODE, host=HOST, port=locks.choose(options.first_port, 1)[0], model=model,
            num_threads=options.num_threads,
        )  # fmt: skip
        answers = _ask_without_cache(manifest, options, site, prompts, folder, supervisor, progress)
    finally:
        # The run takes ports of its own, also this one.
        locks.close()
    keep_control(kept, answers)
    return answers, True


def _ask_without_cache(
    manifest: KVCacheManifest, options: RunOptions, site: EngineSite, prompts: Sequence[Prompt], folder: RunFolder,
    supervisor: Supervisor, progress: Progress,
) -> list[ControlAnswer]:  # fmt: skip
    """Start an engine without cache, ask it everything, stop it."""
    assert manifest.model is not None, "engines have a model"
    command = engine_command(manifest, site, python=sys.executable)
    process = supervisor.start(engine_program(
        site, command, environment=options.environment, log=folder.log(site.name),
        ready_within_s=manifest.engine.startup_timeout_s,
    ))  # fmt: skip
    supervisor.wait_ready([process])
    _warm_up(site, manifest.model.served_name)
    progress.begin("control", "an engine without cache")
    answers = ask_control(
        HOST,
        site.port,
        manifest.model.served_name,
        prompts,
        lambda what: progress.update("control", what),
    )
    supervisor.stop(process)
    progress.end(
        "control",
        f"an engine without cache answered {len(prompts)} prompts (once, kept beside the model)",
    )
    return answers


def _warm_up(site: EngineSite, model: str) -> None:
    ask(site.host, site.port, COMPLETIONS, completion(model, WARM_UP))


def _rate(moved: _Moved) -> Rate:
    gigabytes_per_s = moved.num_bytes / moved.seconds / 1e9 if moved.seconds else 0.0
    return Rate(num_bytes=int(moved.num_bytes), gb_per_s=gigabytes_per_s)


def _report(
    name: str, prompts: Sequence[Prompt], control: Sequence[ControlAnswer], served: Sequence[_Served],
    warm: Sequence[Answer], *, control_is_new: bool, store: Rate, retrieve: Rate, loaded_tokens: int, total_s: float,
) -> DemoReport:  # fmt: skip
    rows = tuple(
        DemoRow(
            name=prompt.name,
            prompt_tokens=right.prompt_tokens,
            cached_tokens=again.cached_tokens,
            cached_tokens_after_prefill=first.answer.cached_tokens,
            ttft_cold_s=right.cold_ttft_s,
            ttft_own_cache_s=right.own_cache_ttft_s,
            prefill_s=first.prefill_s,
            ttft_decode_s=first.answer.ttft_s,
            ttft_restarted_s=again.ttft_s,
            verdict=judge(tokens_of(first.answer), right.cold, right.own_cache),
            verdict_restarted=judge(tokens_of(again), right.cold, right.own_cache),
        )
        for prompt, right, first, again in zip(prompts, control, served, warm, strict=True)
    )
    return DemoReport(
        name=name, rows=rows, store=store, retrieve=retrieve, loaded_tokens=loaded_tokens,
        controls_agree=enough_count([(right.cold, right.own_cache) for right in control]),
        control_is_new=control_is_new, total_s=total_s,
    )  # fmt: skip
