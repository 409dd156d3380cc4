"""What the cache costs and gives a real vLLM engine on CPU: time to first token and throughput in three cases.

    python bench/engine.py [--json] [--pairs N] [--model DIR] [--prompt-tokens N] [--dir DIR]

    no_connector   an engine without connector
    all_miss       the same engine with connector, agent and Redis, prompts that nobody stored
    all_hit        the same prompts once more: everything whole chunks hold comes from the cache

Two engines run side by side, and only one of them works at a time. A round sends a prompt of --prompt-tokens alone
(time to first token), then four prompts of an eighth of that at once with 32 tokens of output each, to either engine;
who goes first alternates. The engines' own prefix caches are off, so that every hit is ours. Throughput is tokens in
and out per second over the round. `overhead_percent` is the median over the rounds of what all_miss loses in
throughput, with the interval that holds the true median with 95 % or more; CPU seconds are those of engine, agent and
Redis together.

With --json stdout is one object {"bench": "engine", "rows": [...]}; progress goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil
from report import print_json, print_table, say
from rich.console import Console

from cacheservice.client import AgentAdmin, AgentTarget
from cacheservice.commands.engines import EngineRole, EngineSite, engine_command
from cacheservice.errors import LarderError
from cacheservice.local.control import COMPLETIONS
from cacheservice.local.http_client import Answer, ask
from cacheservice.local.ports import HOST, choose_ports
from cacheservice.local.processes import Interrupted, Process, Supervisor, termination_raises
from cacheservice.local.progress import show_progress
from cacheservice.local.runs import RunFolder
from cacheservice.local.up import LocalRun, RunOptions, engine_program, num_usable_cpus
from cacheservice.manifest import parse_manifest

MANIFEST = """
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {name: bench-engine}
spec:
  model: {name: larder-demo}
  engine: {device: cpu}
  cache: {cpu: 2Gi}
  decode: {args: [--dtype=float32, --no-enable-prefix-caching]}
"""
BATCH = 4
BATCH_OUTPUT_TOKENS = 32
LONE_OUTPUT_TOKENS = 1
MIN_CONFIDENCE = 0.95
STORED_WITHIN_S = 30.0


@dataclass(frozen=True, slots=True)
class Row:
    """One case over all rounds; the last fields are of all_miss, against no_connector in the same round."""

    case: str
    ttft_ms_p50: float
    throughput_tok_s: float
    cpu_s_per_1000_tokens: float
    cached_tokens_p50: float
    overhead_percent: float | None = None
    overhead_percent_low: float | None = None
    overhead_percent_high: float | None = None
    extra_cpu_s_per_1000_tokens: float | None = None


@dataclass(frozen=True, slots=True)
class Round:
    """One engine's share of a round."""

    ttft_s: float
    cached_tokens: int
    num_tokens: int
    seconds: float
    cpu_s: float

    @property
    def throughput(self) -> float:
        """Tokens in and out per second."""
        return self.num_tokens / self.seconds


class Engine:
    """One engine under test, and the processes that work for it."""

    def __init__(self, site: EngineSite, processes: Sequence[Process]) -> None:
        self._site = site
        self._processes = processes

    def warm_up(self) -> None:
        """The first requests pay for what vLLM does lazily."""
        for _ in range(2):
            self._ask([5, 6, 7], 4)

    def run(self, lone: Sequence[int], batch: Sequence[Sequence[int]]) -> Round:
        """One lone prompt, then a batch at once."""
        cpu_before, begun = self._cpu_s(), time.perf_counter()
        first = self._ask(lone, LONE_OUTPUT_TOKENS)
        with ThreadPoolExecutor(len(batch)) as pool:
            answers = [
                first,
                *pool.map(lambda prompt: self._ask(prompt, BATCH_OUTPUT_TOKENS), batch),
            ]
        seconds = time.perf_counter() - begun
        return Round(
            ttft_s=first.ttft_s, cached_tokens=first.cached_tokens, seconds=seconds,
            num_tokens=sum(answer.prompt_tokens + len(answer.token_ids) for answer in answers),
            cpu_s=self._cpu_s() - cpu_before,
        )  # fmt: skip

    def _ask(self, prompt: Sequence[int], max_tokens: int) -> Answer:
        body = {
            "model": "larder-demo", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0,
            "ignore_eos": True,
        }  # fmt: skip
        return ask(self._site.host, self._site.port, COMPLETIONS, body, with_gaps=False)

    def _cpu_s(self) -> float:
        total = 0.0
        for process in self._processes:
            for pid in process.descendants():
                times = psutil.Process(pid).cpu_times()
                total += times.user + times.system
        return total


def main() -> int:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--pairs", type=int, default=10, help="rounds (default 10)")
    parser.add_argument(
        "--prompt-tokens", type=int, default=4096, help="tokens of the lone prompt (default 4096)"
    )
    parser.add_argument(
        "--model", type=Path, help="folder of a checkpoint (default: the demo model, made once)"
    )
    parser.add_argument(
        "--dir", type=Path, default=Path(".larder"), help="folder for logs and the demo model"
    )
    arguments = parser.parse_args()
    if arguments.pairs < 1 or arguments.prompt_tokens < 512:
        parser.error("--pairs is at least 1 and --prompt-tokens at least 512")
    options = RunOptions(
        manifest_path="bench", larder_dir=arguments.dir.absolute(), environment=dict(os.environ),
        model_dir=arguments.model, num_threads=num_usable_cpus(),
    )  # fmt: skip
    try:
        with termination_raises():
            rounds = measure(
                options, num_pairs=arguments.pairs, prompt_tokens=arguments.prompt_tokens
            )
    except LarderError as error:
        say(f"error: {error}")
        return 1
    except (KeyboardInterrupt, Interrupted):
        say("interrupted; everything is stopped")
        return 130
    rows = summarize(rounds)
    if arguments.json:
        print_json("engine", rows)
    else:
        print_rows(rows, rounds)
    return 0


def measure(options: RunOptions, *, num_pairs: int, prompt_tokens: int) -> dict[str, list[Round]]:
    """Start both engines, run all rounds, stop everything."""
    manifest = parse_manifest(MANIFEST, source="bench")
    rounds: dict[str, list[Round]] = {"no_connector": [], "all_miss": [], "all_hit": []}
    with (
        RunFolder(options.larder_dir, manifest.name) as folder,
        show_progress(Console(stderr=True)) as progress,
        Supervisor(progress) as supervisor,
    ):
        run = LocalRun(manifest, options, folder, supervisor, progress)
        run.start()
        with_cache = Engine(run.engine_sites[0], supervisor.processes)
        site = EngineSite(
            name="plain", role=EngineRole.BOTH, host=HOST, port=choose_ports(None, 1)[0], model=run.model,
            num_threads=options.num_threads,
        )  # fmt: skip
        command = engine_command(manifest, site, python=sys.executable)
        plain_process = supervisor.start(engine_program(
            site, command, environment=options.environment, log=folder.log(site.name), ready_within_s=600
        ))  # fmt: skip
        supervisor.wait_ready([plain_process])
        plain = Engine(site, [plain_process])
        for engine in (plain, with_cache):
            engine.warm_up()
        draw = prompt_maker(Path(run.model), prompt_tokens)
        progress.begin("rounds", "")
        for number in range(num_pairs):
            progress.update("rounds", f"{number + 1} of {num_pairs}")
            lone, batch = draw()
            pair: list[tuple[str, Engine]] = [("no_connector", plain), ("all_miss", with_cache)]
            for case, engine in pair if number % 2 == 0 else reversed(pair):
                rounds[case].append(engine.run(lone, batch))
            wait_stored(run)
            rounds["all_hit"].append(with_cache.run(lone, batch))
        progress.end("rounds", f"{num_pairs} rounds")
    return rounds


def prompt_maker(
    model: Path, prompt_tokens: int
) -> Callable[[], tuple[list[int], list[list[int]]]]:
    """Draws a lone prompt and a batch, never the same twice, the same for every run of the bench."""
    vocabulary = int(json.loads((model / "config.json").read_text())["vocab_size"])
    generator = random.Random(7)

    def prompt(num_tokens: int) -> list[int]:
        return [generator.randrange(10, vocabulary) for _ in range(num_tokens)]

    return lambda: (prompt(prompt_tokens), [prompt(prompt_tokens // 8) for _ in range(BATCH)])


def wait_stored(run: LocalRun) -> None:
    """Wait until nothing is being stored any more."""
    deadline = time.monotonic() + STORED_WITHIN_S
    with AgentAdmin(AgentTarget(socket_dir=Path(run.state().agents[0].socket_dir))) as admin:
        before = -1
        while True:
            status = admin.status()
            if status.num_reservations == 0 and status.num_chunks == before:
                return
            if time.monotonic() > deadline:
                raise LarderError(
                    f"stores did not end within {STORED_WITHIN_S:g} s; see the log of the engine"
                )
            before = status.num_chunks
            time.sleep(0.25)


def summarize(rounds: dict[str, list[Round]]) -> list[Row]:
    """Medians, and what all_miss loses against no_connector of the same round."""
    rows = []
    for case, measured in rounds.items():
        row = Row(
            case=case,
            ttft_ms_p50=round(statistics.median(one.ttft_s for one in measured) * 1e3, 1),
            throughput_tok_s=round(statistics.median(one.throughput for one in measured), 1),
            cpu_s_per_1000_tokens=round(cpu_per_1000(measured), 4),
            cached_tokens_p50=statistics.median(one.cached_tokens for one in measured),
        )
        rows.append(row)
    pairs = list(zip(rounds["no_connector"], rounds["all_miss"], strict=True))
    losses = sorted((1 - miss.throughput / plain.throughput) * 100 for plain, miss in pairs)
    low, high = median_interval(len(losses))
    extra = cpu_per_1000(rounds["all_miss"]) - cpu_per_1000(rounds["no_connector"])
    miss = rows[1]
    rows[1] = Row(
        case=miss.case, ttft_ms_p50=miss.ttft_ms_p50, throughput_tok_s=miss.throughput_tok_s,
        cpu_s_per_1000_tokens=miss.cpu_s_per_1000_tokens, cached_tokens_p50=miss.cached_tokens_p50,
        overhead_percent=round(statistics.median(losses), 2), overhead_percent_low=round(losses[low], 2),
        overhead_percent_high=round(losses[high], 2), extra_cpu_s_per_1000_tokens=round(extra, 4),
    )  # fmt: skip
    return rows


def cpu_per_1000(measured: Sequence[Round]) -> float:
    """CPU seconds per 1,000 tokens over all rounds."""
    return 1e3 * sum(one.cpu_s for one in measured) / sum(one.num_tokens for one in measured)


def median_interval(count: int) -> tuple[int, int]:
    """Positions in a sorted sample between which the true median lies with MIN_CONFIDENCE (sign test)."""
    outside, low = 0.0, 0
    for position in range(count // 2):
        outside += 2 * math.comb(count, position) / 2**count
        if outside > 1 - MIN_CONFIDENCE:
            break
        low = position
    return low, count - 1 - low


def print_rows(rows: Sequence[Row], rounds: dict[str, list[Round]]) -> None:
    """The table, and the two ratios that the design has targets for."""
    print_table(
        "vLLM on CPU",
        ("case", "TTFT p50 ms", "tokens/s", "CPU s/1,000 tokens", "cached"),
        [
            (
                row.case, f"{row.ttft_ms_p50:,.0f}", f"{row.throughput_tok_s:,.0f}",
                f"{row.cpu_s_per_1000_tokens:.3f}", f"{row.cached_tokens_p50:,.0f}",
            )
            for row in rows
        ],
    )  # fmt: skip
    miss = rows[1]
    print(
        f"Overhead without hits: {miss.overhead_percent} % of throughput ({miss.overhead_percent_low} to "
        f"{miss.overhead_percent_high}), {miss.extra_cpu_s_per_1000_tokens} CPU s more per 1,000 tokens."
    )
    faster = [
        miss.ttft_s / hit.ttft_s
        for miss, hit in zip(rounds["all_miss"], rounds["all_hit"], strict=True)
    ]
    print(f"First token on a hit: {statistics.median(faster):.1f} times sooner.")


if __name__ == "__main__":
    sys.exit(main())
