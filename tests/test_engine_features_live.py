"""Features of vLLM beside plain serving, with real engines and a real agent: docs/engine-features.md has the list.

Greedy answers are compared with those of an engine without connector; where they differ, the log-probabilities of the
two best tokens must be closer than 0.1, as in test_connector_engine.py. Engines cost seconds, so one serves many
features; two at a time can't be in one process.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import engines
import pytest
import torch
from agent_process import AgentProcess, wait_until
from engines import CHUNK_TOKENS, Engine, engine, transfer_config

from cacheservice.errors import RefusedError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

DECISIVE_GAP = 0.1
PATIENT = {
    "lookup_ms": 5000,
    "acquire_ms": 20000,
    "reserve_ms": 10000,
    "commit_ms": 10000,
    "load_ms": 30000,
}
"""Where a test counts hits exactly, a busy machine must not turn one into a deadline."""
HIDDEN_SIZE = 256
"""Of the tiny llama."""


def prompt(seed: int, num_tokens: int = 300) -> list[int]:
    """Random tokens."""
    rng = random.Random(seed)
    return [rng.randrange(4, 1000) for _ in range(num_tokens)]


@dataclass(frozen=True)
class Said:
    """One completion: its tokens, and per token the best log-probability minus the second best."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


def ask(
    subject: Engine, prompts: Sequence[Any], *, adapter: Any = None, priority: list[int] | None = None,
    **sampling: Any,
) -> list[list[Said]]:  # fmt: skip
    """Completions of every prompt; saves have ended when this returns."""
    from vllm import SamplingParams

    params = SamplingParams(
        **{"temperature": 0.0, "max_tokens": 8, "ignore_eos": True, "detokenize": False, "logprobs": 2, **sampling}
    )  # fmt: skip
    given = [{"prompt_token_ids": p} if isinstance(p, list) else p for p in prompts]
    outputs = subject.llm.generate(
        given, params, lora_request=adapter, priority=priority, use_tqdm=False
    )
    subject.drain()
    return [[_said(completion) for completion in output.outputs] for output in outputs]


def _said(completion: Any) -> Said:
    gaps = []
    for position in completion.logprobs:
        best = sorted((entry.logprob for entry in position.values()), reverse=True)
        gaps.append(best[0] - best[1])
    return Said(tuple(completion.token_ids), tuple(gaps))


def assert_same(answers: list[list[Said]], wanted: list[list[Said]]) -> None:
    """Every token is that of the control, unless the control nearly said the other one."""
    flat, control = [s for one in answers for s in one], [s for one in wanted for s in one]
    assert len(flat) == len(control)
    for number, (said, expected) in enumerate(zip(flat, control, strict=True)):
        if said.tokens != expected.tokens:
            pairs = enumerate(zip(said.tokens, expected.tokens, strict=True))
            first = next(at for at, (a, b) in pairs if a != b)
            assert expected.gaps[first] < DECISIVE_GAP, f"answer {number} differs at token {first}"


def hits(subject: Engine) -> int:
    """Requests that found their prefix in the cache since the last call."""
    return int(subject.totals().get("outcome/lookup/hit", 0))


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with AgentProcess(cpu="256Mi", http=True) as running:
        yield running


def num_ready_chunks(agent: AgentProcess) -> int:
    """Chunks in the cache."""
    text = agent.get("/metrics")[1].decode()
    return int(
        float(
            next(
                line.split()[-1]
                for line in text.splitlines()
                if line.startswith("cacheservice_chunks ")
            )
        )
    )


def ours(agent: AgentProcess, **extra: Any) -> dict[str, Any]:
    """--kv-transfer-config for this agent."""
    return transfer_config(socket_dir=str(agent.socket_dir), **PATIENT, **extra)


# ---------------------------------------------------------------- one engine for many features

MANY = {
    "enable_lora": True,
    "max_loras": 2,
    "max_lora_rank": 8,
    "scheduling_policy": "priority",
    "enable_prompt_embeds": True,
    "skip_tokenizer_init": False,  # beam search wants to know the end token
}


def make_adapter(folder: Path, seed: int) -> str:
    """A LoRA adapter for all of the tiny llama's attention; returns its path."""
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(4):
        for name, width in (("q_proj", HIDDEN_SIZE), ("k_proj", 128), ("v_proj", 128)):
            at = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{at}.lora_A.weight"] = torch.randn(8, HIDDEN_SIZE, generator=generator) / 16
            weights[f"{at}.lora_B.weight"] = torch.randn(width, 8, generator=generator) / 3
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "k_proj", "v_proj"],
        "bias": "none", "base_model_name_or_path": "tiny",
    }))  # fmt: skip
    return str(folder)


@dataclass
class Questions:
    """What both engines are asked, feature by feature."""

    adapters: list[str]

    def several(self, subject: Engine) -> list[list[Said]]:
        return ask(subject, [prompt(1), prompt(2)], n=3, temperature=1.0, seed=5)

    def beams(self, subject: Engine) -> list[list[tuple[int, ...]]]:
        from vllm.sampling_params import BeamSearchParams

        params = BeamSearchParams(beam_width=3, max_tokens=5, ignore_eos=True)
        given = [{"prompt_token_ids": prompt(3)}]
        outputs = subject.llm.beam_search(given, params)
        subject.drain()
        return [[tuple(beam.tokens) for beam in output.sequences] for output in outputs]

    def adapted(self, subject: Engine, which: int | None) -> list[list[Said]]:
        from vllm.lora.request import LoRARequest

        adapter = None
        if which is not None:
            adapter = LoRARequest(f"adapter-{which}", which + 1, self.adapters[which])
        return ask(subject, [prompt(4)], adapter=adapter)

    def salted(self, subject: Engine, salt: str) -> list[list[Said]]:
        return ask(subject, [{"prompt_token_ids": prompt(5), "cache_salt": salt}])

    def embedded(self, subject: Engine) -> list[list[Said]]:
        values = torch.randn(200, HIDDEN_SIZE, generator=torch.Generator().manual_seed(6)) / 8
        return ask(subject, [{"prompt_embeds": values}])

    def pressed(self, subject: Engine) -> list[list[Said]]:
        return ask(subject, [prompt(70 + i) for i in range(6)], priority=[5, 4, 3, 2, 1, 0])


@pytest.fixture(scope="class")
def many(agent, tmp_path_factory) -> Iterator[tuple[Questions, dict[str, Any], Engine]]:
    """The questions, the answers of an engine without cache, and an engine with one that was asked nothing yet."""
    folder = tmp_path_factory.mktemp("adapters")
    questions = Questions([make_adapter(folder / f"{seed}", seed) for seed in (1, 2)])
    with engine(None, **MANY) as control:
        answers = {
            "several": questions.several(control),
            "beams": questions.beams(control),
            "adapted": [questions.adapted(control, which) for which in (None, 0, 1)],
            "salted": questions.salted(control, "one"),
            "embedded": questions.embedded(control),
            "pressed": questions.pressed(control),
        }
    with engine(ours(agent), **MANY) as subject:
        yield questions, answers, subject


class TestOneEngine:
    """One engine with many features switched on, asked by one test after the other."""

    def test_several_completions_of_a_prompt_hit_one_by_one(self, many):
        """n > 1: vLLM makes one request of each completion."""
        questions, answers, subject = many
        assert len({said.tokens for said in answers["several"][0]}) == 3
        assert questions.several(subject) == [
            [Said(s.tokens, pytest.approx(s.gaps, abs=1e-2)) for s in one]
            for one in answers["several"]
        ]
        hits(subject)
        assert [[s.tokens for s in one] for one in questions.several(subject)] == [
            [s.tokens for s in one] for one in answers["several"]
        ]
        assert hits(subject) == 6
        assert subject.num_free_blocks == subject.num_blocks - 1

    def test_beams_are_requests_that_extend_each_other(self, many):
        questions, answers, subject = many
        assert questions.beams(subject) == answers["beams"]
        hits(subject)
        assert questions.beams(subject) == answers["beams"]
        assert hits(subject) >= 5  # one step of each of the three beams is a request

    def test_adapters_never_share_pages(self, many):
        questions, answers, subject = many
        base, first, second = answers["adapted"]
        assert len({one[0][0].tokens for one in (base, first, second)}) == 3, (
            "adapters change nothing"
        )
        hits(subject)
        for which, wanted in zip((None, 0, 1), answers["adapted"], strict=True):
            assert_same(questions.adapted(subject, which), wanted)
            assert hits(subject) == 0, f"adapter {which} read another one's pages"
        for which, wanted in zip((None, 0, 1), answers["adapted"], strict=True):
            assert_same(questions.adapted(subject, which), wanted)
            assert hits(subject) == 1

    def test_tenants_never_share_pages(self, many):
        questions, answers, subject = many
        hits(subject)
        for salt in ("one", "two"):
            assert_same(questions.salted(subject, salt), answers["salted"])
            assert hits(subject) == 0
        assert_same(questions.salted(subject, "one"), answers["salted"])
        assert hits(subject) == 1

    def test_embeddings_hit_like_tokens(self, many):
        questions, answers, subject = many
        assert_same(questions.embedded(subject), answers["embedded"])
        assert hits(subject) == 0
        assert_same(questions.embedded(subject), answers["embedded"])
        assert hits(subject) == 1

    def test_requests_of_all_priorities_hit(self, many):
        questions, answers, subject = many
        assert_same(questions.pressed(subject), answers["pressed"])
        assert hits(subject) == 0
        assert_same(questions.pressed(subject), answers["pressed"])
        assert hits(subject) == 6

    def test_new_weights_begin_with_an_empty_cache_after_a_pause(self, many, tmp_path):
        """Last in this engine, whose weights it changes. vLLM tells a connector nothing of new weights; a pause that
        clears caches, as its weight updates ask for, resets the connector too."""
        from safetensors.torch import load_file, save_file

        _, _, subject = many
        weights = load_file(engines.tiny_llama() / "model.safetensors")
        changed = {name: w.flip(0) if "v_proj" in name else w for name, w in weights.items()}
        for file in engines.tiny_llama().iterdir():
            (tmp_path / file.name).write_bytes(file.read_bytes())
        save_file(changed, tmp_path / "model.safetensors", metadata={"format": "pt"})
        before = ask(subject, [prompt(9)])
        assert_same(ask(subject, [prompt(9)]), before)
        assert hits(subject) == 1
        shared = subject.connector._scheduler.plan.digest

        subject.core.pause_scheduler(mode="abort", clear_cache=True)
        subject.llm.collective_rpc("reload_weights", kwargs={"weights_path": str(tmp_path)})
        subject.core.resume_scheduler()

        assert subject.connector._scheduler.plan.digest != shared
        after = ask(subject, [prompt(9)])
        assert hits(subject) == 0
        assert after != before, "the weights are the old ones"
        assert_same(ask(subject, [prompt(9)]), after)
        assert hits(subject) == 1


# ---------------------------------------------------------------- engines of their own


@pytest.mark.filterwarnings("ignore::numba.core.errors.NumbaPendingDeprecationWarning")
def test_speculative_decoding_saves_prompts_only(agent):
    """Drafts by n-gram, of which some are taken and some rejected; of the answer nothing is stored."""
    import llvmlite.binding.ffi

    # vLLM 0.32 looks into every object of every module that is loaded (triton_utils/dispatcher.py), and trips over one
    # of llvmlite, which numba brings, which the n-gram drafter uses.
    llvmlite.binding.ffi._lib_fn_wrapper.get = lambda self, *_: None
    phrase = prompt(20, 40)
    question = [*phrase, *phrase, *phrase, *prompt(21, 60), *phrase]  # 220 tokens: 3 chunks
    few = {"max_tokens": 100, "allowed_token_ids": [100, 200]}  # so few that some drafts are right
    speculative = {
        "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
    }  # fmt: skip
    with engine(ours(agent), speculative_config=speculative) as subject:
        drafted, taken = _watch_drafts(subject)
        before = num_ready_chunks(agent)
        first = ask(subject, [question], **few)
        assert num_ready_chunks(agent) == before + 3
        assert 0 < taken[0] < drafted[0], "no draft was taken, or none was rejected"
        hits(subject)
        assert_same(ask(subject, [question], **few), first)
        assert hits(subject) == 1
        assert subject.num_free_blocks == subject.num_blocks - 1


def _watch_drafts(subject: Engine) -> tuple[list[int], list[int]]:
    """Counts, from now on, of drafted tokens that were scheduled and of those that were taken."""
    drafted, taken, see = [0], [0], subject.scheduler.update_from_output

    def seen(plan: Any, output: Any) -> Any:
        for request_id, drafts in plan.scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[request_id]]
            drafted[0] += sum(token >= 0 for token in drafts)
            taken[0] += max(0, len(sampled) - 1)
        return see(plan, output)

    subject.scheduler.update_from_output = seen
    return drafted, taken


@pytest.fixture(scope="module")
def plain_digest(agent) -> bytes:
    """Namespace of a plain engine, which has stored prompts 4 and 30."""
    with engine(ours(agent)) as plain:
        ask(plain, [prompt(4), prompt(30)])
        return plain.connector._scheduler.plan.digest


def test_fp8_pages_are_cached_as_they_are_and_never_mixed(agent, plain_digest):
    """A quarter of the bytes of fp32, in a namespace of their own."""
    with engine(ours(agent), kv_cache_dtype="fp8") as subject:
        plan = subject.connector._scheduler.plan
        assert plan.digest != plain_digest
        assert plan.spec.chunk_bytes == CHUNK_TOKENS * 4 * 2 * (64 + 64)  # layers, heads, K and V
        first = ask(subject, [prompt(4)])
        assert hits(subject) == 0, "pages of another type were read"
        assert_same(ask(subject, [prompt(4)]), first)
        assert hits(subject) == 1


def test_an_embedding_model_shares_prefixes_with_a_generating_one(agent, plain_digest):
    """A pooled request computes one step; its pages are those of any request of the same model."""
    with engine(
        ours(agent), runner="pooling", convert="embed", skip_tokenizer_init=False
    ) as subject:
        assert subject.connector._scheduler.plan.digest == plain_digest

        def embed(seed: int, salt: str) -> torch.Tensor:
            given = {"prompt_token_ids": prompt(seed), "cache_salt": salt}
            output = subject.llm.embed(
                [given if salt else given["prompt_token_ids"]], use_tqdm=False
            )[0]
            subject.drain()
            return torch.tensor(output.outputs.embedding)

        computed = embed(30, "mine")
        assert hits(subject) == 0
        assert torch.allclose(embed(30, "mine"), computed, atol=1e-4)
        assert hits(subject) == 1
        assert torch.allclose(embed(30, ""), computed, atol=1e-4)
        assert hits(subject) == 1, "what a generating engine stored was not found"
        assert not torch.allclose(embed(31, ""), computed, atol=1e-2)
        assert subject.num_free_blocks == subject.num_blocks - 1


# ---------------------------------------------------------------- beside other connectors


def beside(agent: AgentProcess, other: dict[str, Any], *, ours_first: bool) -> dict[str, Any]:
    """--kv-transfer-config with MultiConnector, ours and another."""
    children = [ours(agent), {"kv_role": "kv_both", **other}]
    return {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": children if ours_first else children[::-1]},
    }  # fmt: skip


FOREIGN = {"kv_connector": "ForeignConnector", "kv_connector_module_path": "foreign_connector"}


class Shared(Engine):
    """An engine under MultiConnector, whose counts are those of several connectors."""

    def _keep_stats(self) -> None:
        """What became of a load is asked of the agent."""


@contextmanager
def shared_engine(transfer: dict[str, Any], **options: Any) -> Iterator[Engine]:
    """An engine under MultiConnector for the length of a with block."""
    made = Shared(transfer, **options)
    try:
        yield made
    finally:
        made.close()


def num_loads(agent: AgentProcess) -> int:
    """Loads that ended well, of all engines so far."""
    outcomes = json.loads(agent.get("/statusz?outcomes=1")[1])["outcomes"]
    return sum(o["kind"] == "load" and o["reason"] == "hit" for o in outcomes)


def test_what_another_connector_failed_to_load_is_not_stored(agent, monkeypatch):
    """MultiConnector: the other's synchronous load writes rubbish, which vLLM computes with and then throws away."""
    from foreign_connector import ForeignConnector

    question = prompt(40)
    with shared_engine(beside(agent, FOREIGN, ours_first=True)) as subject:
        monkeypatch.setattr(ForeignConnector, "offered_tokens", 256)
        failed, stored = ForeignConnector.num_failed, num_ready_chunks(agent)
        first = ask(subject, [question])
        assert ForeignConnector.num_failed > failed
        assert num_ready_chunks(agent) == stored + 4
        monkeypatch.setattr(ForeignConnector, "offered_tokens", 0)
        loaded = num_loads(agent)
        assert_same(ask(subject, [question]), first)
        wait_until(lambda: num_loads(agent) == loaded + 1, timeout_s=10)
        assert subject.num_free_blocks == subject.num_blocks - 1


def test_two_connectors_store_and_ours_serves_what_the_other_lost(agent, tmp_path):
    """MultiConnector with vLLM's ExampleConnector, which makes vLLM do without its hybrid manager."""
    other = {
        "kv_connector": "ExampleConnector",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    transfer = beside(agent, other, ours_first=False)
    with shared_engine(transfer, disable_hybrid_kv_cache_manager=True) as subject:
        loaded = num_loads(agent)
        first = ask(subject, [prompt(50)])
        folders = list(tmp_path.iterdir())
        assert folders, "the other connector stored nothing"
        assert_same(ask(subject, [prompt(50)]), first)
        for folder in folders:
            shutil.rmtree(folder)
        assert_same(ask(subject, [prompt(50)]), first)
        wait_until(lambda: num_loads(agent) == loaded + 1, timeout_s=10)
        assert subject.num_free_blocks == subject.num_blocks - 1


def test_a_refusal_is_what_the_start_of_an_engine_ends_with(agent):
    """MultiConnector's own failure policy is seen by the ranks only; the default would end requests with errors."""
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    transfer = beside(agent, FOREIGN, ours_first=True)
    del transfer["kv_load_failure_policy"]
    with pytest.raises(RefusedError, match='beside "kv_connector": "MultiConnector" too'):
        Engine(transfer)
    ensure_kv_transfer_shutdown()  # as Engine.close does for one that has started
    cleanup_dist_env_and_memory()
