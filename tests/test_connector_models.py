"""Real engines of every model shape with a real agent: the same outputs, loads that happened, pages byte for byte.

Outputs are judged as in test_connector_engine.py: two controls without connector, one of them with vLLM's own prefix
cache; where they agree every difference fails. MLA is judged by the bytes of its pages alone, because vLLM's MLA on a
CPU does not give the same answer twice. Ranks of one engine are processes of their own (gloo).
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from agent_process import AgentProcess, wait_until
from engines import BLOCK_TOKENS, Answer, Engine, engine, transfer_config

from cacheservice.core.layout import GroupKind
from cacheservice.local.identity import Tokens, Verdict, enough_count, judge

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ANSWER_TOKENS = 6
# Loads are counted exactly here, so a busy machine must not turn one into a deadline.
PATIENT = {
    "lookup_ms": 10_000, "acquire_ms": 20_000, "reserve_ms": 10_000, "commit_ms": 10_000, "load_ms": 30_000,
}  # fmt: skip
TWO_RANKS = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}


@dataclass(frozen=True)
class Shape:
    """A model of several groups: what vLLM makes of it, and room for a test that must run out of room."""

    name: str
    kinds: tuple[GroupKind, ...]
    block_tokens: int
    """As vLLM chooses it; the other runs have `small_block_tokens`."""
    chunk_tokens: int
    small_block_size: int
    """As given to vLLM, which makes larger blocks where a state needs them."""
    small_block_tokens: int
    small_chunk_tokens: int
    num_blocks_for_preemption: int
    step_tokens: int
    """Token budget of a step where requests are preempted: several prompts must grow at once."""

    @property
    def is_recurrent(self) -> bool:
        """vLLM keeps recurrent state at known places only with its own prefix cache on."""
        return GroupKind.RECURRENT in self.kinds

    @property
    def options(self) -> dict[str, Any]:
        """Of the engine."""
        return {"tiny": self.name, "block_size": None, "enable_prefix_caching": self.is_recurrent}


WINDOW, FULL, STATE = GroupKind.SLIDING_WINDOW, GroupKind.FULL, GroupKind.RECURRENT
SHAPES = {
    "gemma3": Shape("gemma3", (*[WINDOW] * 5, FULL), 128, 256, 32, 32, 64, 160, 128),
    "gptoss": Shape("gptoss", (WINDOW, FULL), 128, 128, 32, 32, 32, 50, 128),
    "qwen3next": Shape("qwen3next", (*[STATE] * 3, FULL), 256, 256, 64, 192, 192, 16, 400),
}


def fresh(rng: random.Random, num_tokens: int) -> list[int]:
    """A prompt that shares nothing with another one."""
    return [rng.randrange(4, 1024) for _ in range(num_tokens)]


def varied_prompts() -> list[list[int]]:
    """Documents, conversations that extend them, questions that diverge within them; lengths around window ends."""
    rng = random.Random(23)
    prompts: list[list[int]] = []
    for length in (333, 640, 901):
        document = fresh(rng, length)
        prompts.append(document)
        for turn in range(1, 4):
            prompts.append([*prompts[-1], *fresh(rng, rng.randrange(20, 90) * turn)])
        for _ in range(3):
            cut = rng.randrange(length // 4, length)
            prompts.append([*document[:cut], *fresh(rng, rng.randrange(5, 90))])
    for around in (128, 256, 512):
        prompts.extend(fresh(rng, around + offset) for offset in (-1, 0, 1))
    return prompts


PROMPTS = varied_prompts()


def assert_same(
    answers: Sequence[Answer], controls: Sequence[Sequence[Answer]], which: Sequence[int]
) -> None:
    """Judge as section 13 of the design says."""
    pairs = [(tokens_of(controls[0][i]), tokens_of(controls[1][i])) for i in which]
    assert enough_count(pairs), "controls differ too often for a verdict"
    wrong = [
        i
        for i, answer, pair in zip(which, answers, pairs, strict=True)
        if judge(tokens_of(answer), *pair) is Verdict.DIFFERENT
    ]
    assert not wrong, f"prompts {wrong} have other tokens than without cache"


def tokens_of(answer: Answer) -> Tokens:
    """What is compared."""
    return Tokens(answer.tokens, answer.gaps)


def at_rest(subject: Engine) -> dict[str, float]:
    """Let it finish its saves; nothing may stay pinned. Returns the counts since the last call."""
    subject.drain()
    assert subject.num_free_blocks == subject.num_blocks - 1
    return subject.totals()


def generate_alone(subject: Engine, prompts: Sequence[Sequence[int]]) -> list[Answer]:
    """One prompt after the other, each with vLLM's own prefix cache emptied."""
    answers = []
    for prompt in prompts:
        answers += subject.generate([prompt], ANSWER_TOKENS)
        subject.forget()
    return answers


def loadable_tokens(prompts: Sequence[Sequence[int]], chunk_tokens: int) -> int:
    """Tokens that all prompts together load when every whole chunk of each is stored.

    With groups of several kinds a hit leaves at least one token to compute.
    """
    return sum((len(p) - 1) // chunk_tokens * chunk_tokens for p in prompts)


@pytest.fixture(scope="module")
def agent() -> Iterator[AgentProcess]:
    with AgentProcess(cpu="1Gi", http=True) as running:
        yield running


@pytest.fixture(scope="module", params=list(SHAPES))
def shape(request: pytest.FixtureRequest) -> Shape:
    return SHAPES[request.param]


@pytest.fixture(scope="module")
def controls(shape: Shape) -> list[list[Answer]]:
    """Answers without connector: computed whole, and again with vLLM's own prefix cache warm."""
    options = {**shape.options, "enable_prefix_caching": True, "kv_cache_memory_bytes": 256 << 20}
    with engine(None, **options) as control:
        return [control.generate(PROMPTS, ANSWER_TOKENS) for _ in range(2)]


def transfer(agent: AgentProcess, chunk_tokens: int, **extra: Any) -> dict[str, Any]:
    """Our connector with this agent."""
    return transfer_config(
        socket_dir=str(agent.socket_dir), tokens_per_chunk=chunk_tokens, **PATIENT, **extra
    )


def test_outputs_are_the_same_cold_and_in_an_engine_that_is_started_later(shape, controls, agent):
    """Blocks as vLLM gives them. The hybrid KV cache manager stays on, and each group is seen as what it is."""
    settings = {"kv_cache_memory_bytes": 256 << 20, **shape.options}
    everything = range(len(PROMPTS))
    with engine(transfer(agent, shape.chunk_tokens), **settings) as subject:
        config = subject.llm.llm_engine.vllm_config
        assert config.scheduler_config.disable_hybrid_kv_cache_manager is False
        groups = subject.connector._scheduler.plan.groups
        assert tuple(group.kind for group in groups) == shape.kinds
        assert {group.block_tokens for group in groups} == {shape.block_tokens}
        assert_same(subject.generate(PROMPTS, ANSWER_TOKENS), controls, everything)
        assert at_rest(subject)["outcome/save/hit"] > 0
    with engine(transfer(agent, shape.chunk_tokens), **settings) as subject:
        if shape.is_recurrent:
            answers = generate_alone(subject, PROMPTS)
        else:
            answers = subject.generate(PROMPTS, ANSWER_TOKENS)
        assert_same(answers, controls, everything)
        stats = at_rest(subject)
        assert stats["outcome/load/hit"] == sum(len(p) > shape.chunk_tokens for p in PROMPTS)
        assert stats["tokens/load/served"] == loadable_tokens(PROMPTS, shape.chunk_tokens)
        assert not any(k.startswith("outcome/load/") and k != "outcome/load/hit" for k in stats)


def test_outputs_are_the_same_when_requests_are_preempted(shape, controls, agent):
    """Small blocks and few of them, prompts in parts, and everything twice."""
    which = [i for i, p in enumerate(PROMPTS) if 250 < len(p) < 750]
    prompts = [PROMPTS[i] for i in which]
    settings = {
        **shape.options, "block_size": shape.small_block_size, "max_model_len": 1024,
        "max_num_batched_tokens": shape.step_tokens,
    }  # fmt: skip
    few = {"num_gpu_blocks_override": shape.num_blocks_for_preemption}
    if shape.is_recurrent:
        # In bf16 the places where prefill is split show in the output (hence blocks of whole 64 tokens, which vLLM's
        # kernel takes at a time), and what is computed again may: the controls do both as the subject does, one with
        # room for everything and one that preempts without a connector.
        controls = []
        for room in ({}, few):
            with running_short(None, **settings, **room) as (control, preempted):
                found = dict(zip(which, control.generate(prompts, ANSWER_TOKENS), strict=True))
                controls.append([found.get(i) for i in range(len(PROMPTS))])
        assert preempted[0] > 0
    given = transfer(agent, shape.small_chunk_tokens, salt="preempt")
    with running_short(given, **settings, **few) as (subject, preempted):
        groups = subject.connector._scheduler.plan.groups
        assert {group.block_tokens for group in groups} == {shape.small_block_tokens}
        for _ in range(2):
            assert_same(subject.generate(prompts, ANSWER_TOKENS), controls, which)
            subject.drain()
        assert preempted[0] > 0
        assert at_rest(subject)["outcome/load/hit"] > 0


@contextmanager
def running_short(
    given: dict[str, Any] | None, **options: Any
) -> Iterator[tuple[Engine, list[int]]]:
    """An engine that admits prompts before there is room for all of each, and the count of its preemptions."""
    with engine(given, **options) as made:
        made.scheduler.scheduler_reserve_full_isl = False
        yield made, made.count_preemptions()


@dataclass(frozen=True)
class Written:
    """What one engine had in its pages for each of its prompts when they ended."""

    prompts: list[list[int]]
    answers: list[Answer]
    pages: list[list[dict[str, np.ndarray[Any, Any]]]]
    """Per prompt, per rank: layer -> [block of the prompt, head, bytes]; one group."""


def serve_and_read(subject: Engine, prompts: list[list[int]]) -> Written:
    """Answer prompts of a model of one group, and read the pages that they had."""
    pages = subject.keep_pages()
    answers = subject.generate(prompts, ANSWER_TOKENS)
    subject.drain()
    return Written(prompts, answers, [pages[tuple(prompt)] for prompt in prompts])


def assert_pages_equal(
    written: Written, loaded: Written, *, block_tokens: int, by_head: bool
) -> None:
    """Compare the blocks of whole chunks of each prompt, across engines of any number of ranks.

    `by_head`: a rank holds its own heads, so ranks are laid side by side; otherwise each has everything.
    """
    assert written.prompts == loaded.prompts
    for prompt, there, here in zip(loaded.prompts, written.pages, loaded.pages, strict=True):
        num_blocks = len(prompt) // CHUNK * CHUNK // block_tokens
        for layer in there[0]:
            if by_head:
                sides = [np.concatenate([rank[layer] for rank in r], axis=1) for r in (there, here)]
            else:
                sides = [rank[layer] for rank in (*there, *here)]
            assert sides[0][:num_blocks].any(), "empty pages prove nothing"
            for side in sides[1:]:
                assert np.array_equal(sides[0][:num_blocks], side[:num_blocks]), layer


class Sent:
    """What the agent was sent while it was looked at."""

    def __init__(self, agent: AgentProcess) -> None:
        self._agent = agent
        self._before = agent.counters()
        self._outcomes_before = len(self._outcomes())

    @property
    def num_bytes(self) -> int:
        """Bytes committed."""
        return (
            self._agent.counters()["committed_bytes_total"] - self._before["committed_bytes_total"]
        )

    def bytes_of_rank(self, rank: int) -> int:
        """Bytes that a rank says it saved. The agent hears of it a little later than of the bytes."""
        new = self._outcomes()[self._outcomes_before :]
        return sum(o["num_bytes"] for o in new if (o["kind"], o["rank"]) == ("save", rank))

    def _outcomes(self) -> list[dict[str, Any]]:
        outcomes: list[dict[str, Any]] = json.loads(self._agent.get("/statusz?outcomes=1")[1])[
            "outcomes"
        ]
        return sorted(outcomes, key=lambda o: -o["age_s"])


LENGTHS = (150, 270, 281, 300)
CHUNK = 64


def sets_of_prompts() -> list[list[list[int]]]:
    """Two sets of prompts of the same lengths, each with an even number of chunks of 64 tokens, and nothing shared."""
    rng = random.Random(5)
    return [[fresh(rng, n) for n in LENGTHS] for _ in range(2)]


NUM_CHUNKS = sum(n // CHUNK for n in LENGTHS)


@pytest.mark.parametrize(
    ("tiny", "by_head", "page_bytes"),
    # Per token and layer: K and V of two heads of 64 in fp32; a latent of 512 + 64.
    [("llama", True, 2 * 2 * 64 * 4), ("mla", False, 576 * 4)],
)
def test_prefill_and_decode_of_different_tensor_parallel_sizes_share_a_cache(
    agent, tiny, by_head, page_bytes
):
    """One rank writes and two read, then two write and one reads: the same bytes in the same places, stored once."""
    given = transfer(agent, CHUNK, tensor_parallel_sizes=[1, 2], salt="sizes")
    options = {"tiny": tiny, "block_size": 32 if by_head else 16}
    first_set, second_set = sets_of_prompts()
    num_layers = 4 if by_head else 3
    minimum = NUM_CHUNKS * CHUNK * num_layers * page_bytes
    judged = {
        "block_tokens": options["block_size"],
        "by_head": by_head,
    }

    sent = Sent(agent)
    with engine(given, **options) as one_rank:
        digest = one_rank.connector._scheduler.plan.digest
        first = serve_and_read(one_rank, first_set)
        assert at_rest(one_rank).get("outcome/load/hit", 0) == 0
    assert sent.num_bytes == minimum

    with engine(given, **options, **TWO_RANKS) as two_ranks:
        assert two_ranks.connector._scheduler.plan.digest == digest
        sent = Sent(agent)
        assert_pages_equal(first, serve_and_read(two_ranks, first_set), **judged)
        stats = at_rest(two_ranks)
        assert stats["outcome/lookup/hit"] == len(LENGTHS)
        assert stats["tokens/lookup/served"] == NUM_CHUNKS * CHUNK
        assert sent.num_bytes == 0, "what is there was stored again"
        second = serve_and_read(two_ranks, second_set)
        at_rest(two_ranks)
        assert sent.num_bytes == minimum, "two ranks store more than one"
        wait_until(
            lambda: sum(sent.bytes_of_rank(rank) for rank in range(2)) == minimum,
            what="both ranks' reports of their saves",
        )
        assert sent.bytes_of_rank(0) == sent.bytes_of_rank(1), "the ranks don't take turns"
        again = serve_and_read(two_ranks, second_set)
        assert_pages_equal(second, again, **judged)
        if by_head:  # MLA on a CPU does not repeat itself
            assert [a.tokens for a in again.answers] == [a.tokens for a in second.answers]

    with engine(given, **options) as one_rank:
        sent = Sent(agent)
        loaded = serve_and_read(one_rank, [*second_set, *first_set])
        both = Written([*second_set, *first_set], [], [*second.pages, *first.pages])
        assert_pages_equal(both, loaded, **judged)
        stats = at_rest(one_rank)
        assert stats["outcome/load/hit"] == 2 * len(LENGTHS)
        assert stats["tokens/load/served"] == 2 * NUM_CHUNKS * CHUNK
        assert sent.num_bytes == 0
        if by_head:
            assert [a.tokens for a in loaded.answers[len(LENGTHS) :]] == [
                a.tokens for a in first.answers
            ]


def test_latent_pages_of_another_mla_model_are_the_same_bytes_in_another_engine(agent):
    """DeepSeek-V3, one rank."""
    prompts = sets_of_prompts()[0]
    given, options = transfer(agent, CHUNK), {"tiny": "deepseekv3", "block_size": 16}
    with engine(given, **options) as subject:
        written = serve_and_read(subject, prompts)
        at_rest(subject)
    with engine(given, **options) as subject:
        loaded = serve_and_read(subject, prompts)
        assert at_rest(subject)["tokens/load/served"] == NUM_CHUNKS * CHUNK
    assert_pages_equal(written, loaded, block_tokens=16, by_head=False)


def test_a_head_that_both_ranks_hold_is_stored_once(agent):
    """One KV head and two ranks: both compute it, and they write its chunks by turns."""
    prompts = sets_of_prompts()[0]
    sent = Sent(agent)
    with engine(transfer(agent, CHUNK), tiny="llama1head", **TWO_RANKS) as subject:
        (group,) = subject.connector._scheduler.plan.groups
        assert (group.num_heads, group.num_shards) == (1, 1)
        cold = serve_and_read(subject, prompts)
        at_rest(subject)
        stored = NUM_CHUNKS * CHUNK * 4 * 2 * 64 * 4  # tokens, layers, K and V, head size, fp32
        assert sent.num_bytes == stored
        wait_until(
            lambda: sent.bytes_of_rank(0) == sent.bytes_of_rank(1) == stored // 2,
            what="an equal share of each rank",
        )
        warm = serve_and_read(subject, prompts)
        assert at_rest(subject)["outcome/lookup/hit"] == len(prompts)
        assert sent.num_bytes == stored
    assert_pages_equal(cold, warm, block_tokens=BLOCK_TOKENS, by_head=False)
    assert [a.tokens for a in warm.answers] == [a.tokens for a in cold.answers]


@pytest.mark.parametrize("name", ["gemma3", "qwen3next"])
def test_two_ranks_of_a_model_of_several_groups_load_what_they_stored(agent, name):
    """Compared with itself: sums are ordered by tensor parallel size."""
    shape = SHAPES[name]
    prompts = [p for p in PROMPTS if 250 < len(p) < 750]
    with engine(
        transfer(agent, shape.chunk_tokens, salt="two"), **shape.options, **TWO_RANKS
    ) as subject:
        groups = subject.connector._scheduler.plan.groups
        assert tuple(group.kind for group in groups) == shape.kinds
        assert {group.num_shards for group in groups} == {2}
        # Alone: with recurrent state vLLM's own prefix cache is on, and would answer in our place.
        cold = generate_alone(subject, prompts)
        subject.totals()
        warm = generate_alone(subject, prompts)
        stats = at_rest(subject)
        assert stats["outcome/lookup/hit"] == sum(len(p) > shape.chunk_tokens for p in prompts)
        assert stats["tokens/lookup/served"] == loadable_tokens(prompts, shape.chunk_tokens)
        wait_until(
            lambda: loads_of_rank(agent, 1) >= stats["outcome/lookup/hit"],
            what="the second rank's report of its loads",
        )
    assert [a.tokens for a in warm] == [a.tokens for a in cold]


def loads_of_rank(agent: AgentProcess, rank: int) -> int:
    """Loads that a rank told the agent of."""
    outcomes = json.loads(agent.get("/statusz?outcomes=1")[1])["outcomes"]
    return sum((o["kind"], o["reason"], o["rank"]) == ("load", "hit", rank) for o in outcomes)


@contextmanager
def messages() -> Iterator[list[logging.LogRecord]]:
    """What our own loggers say at WARNING and above."""
    said: list[logging.LogRecord] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            said.append(record)

    ours, handler = logging.getLogger("cacheservice"), Keep(logging.WARNING)
    ours.addHandler(handler)
    try:
        yield said
    finally:
        ours.removeHandler(handler)


@pytest.mark.parametrize(
    ("tiny", "settings", "words"),
    [
        ("qwen3next", {"enable_prefix_caching": False}, ["'none'", "--enable-prefix-caching"]),
        ("granite", {"enable_prefix_caching": False}, ["'none'", "--enable-prefix-caching"]),
        ("qwen3next", {"enable_prefix_caching": True}, ["tensor_parallel_sizes"]),
    ],
    ids=["state of gated delta net nowhere known", "state of mamba2 nowhere known", "state of two sizes"],
)  # fmt: skip
def test_a_model_that_cannot_be_cached_runs_without_cache_and_says_so_once(
    agent, tiny, settings, words
):
    prompts = [p for p in PROMPTS if 250 < len(p) < 520][:6]
    options = {"tiny": tiny, "block_size": None, **settings}
    extra = {"tensor_parallel_sizes": [1, 2]} if words == ["tensor_parallel_sizes"] else {}
    with engine(None, **options) as control:
        right = control.generate(prompts, ANSWER_TOKENS)
    given = transfer_config(socket_dir=str(agent.socket_dir), **PATIENT, **extra)
    del given["kv_connector_extra_config"]["tokens_per_chunk"]
    sent = Sent(agent)
    with messages() as said, engine(given, **options) as subject:
        answers = subject.generate(prompts, ANSWER_TOKENS)
        at_rest(subject)
        assert [record.levelname for record in said] == ["ERROR"]
        assert all(word in said[0].getMessage() for word in words), said[0].getMessage()
    assert [a.tokens for a in answers] == [a.tokens for a in right]
    assert sent.num_bytes == 0


def test_with_recurrent_state_a_prefix_hits_only_where_a_prompt_ended(agent):
    """vLLM keeps the state of a prompt's last block boundary and of no other: a prompt that extends it hits, one that
    shares less of it computes everything again."""
    rng = random.Random(77)
    document = fresh(rng, 600)  # state at 512
    shape = SHAPES["qwen3next"]
    with engine(transfer(agent, 256, salt="ends"), **shape.options) as subject:

        def loaded(prompt: list[int]) -> float:
            generate_alone(subject, [prompt])
            return at_rest(subject).get("tokens/load/served", 0)

        assert loaded(document) == 0
        assert loaded([*document, *fresh(rng, 50)]) == 512
        assert loaded([*document[:550], *fresh(rng, 400)]) == 512
        assert loaded([*document[:400], *fresh(rng, 200)]) == 0, "all but state was there"
