"""Real vLLM engines with a real agent: the same tokens with and without cache, whatever happens to the agent.

Token identity is judged in fp32. Two controls without connector, one of which splits the work as a hit does, by vLLM's
own prefix cache: a prompt counts when they agree. On one that counts every difference fails; on one that does not, a
difference with a gap of 0.1 or more between the two best tokens fails.
"""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Sequence

import pytest
from agent_process import AgentProcess, wait_until
from engines import CHUNK_TOKENS, Answer, engine, transfer_config
from redis_server import RedisServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

ANSWER_TOKENS = 8
DECISIVE_GAP = 0.1
# Where a test counts hits exactly, a busy machine must not turn one into a deadline.
PATIENT = {
    "lookup_ms": 5000,
    "acquire_ms": 20000,
    "reserve_ms": 10000,
    "commit_ms": 10000,
    "load_ms": 30000,
}


def varied_prompts() -> list[list[int]]:
    """220 prompts: shared prefixes, repeats, extensions, divergences at every offset, lengths around chunk ends."""
    rng = random.Random(11)

    def fresh(num_tokens: int) -> list[int]:
        return [rng.randrange(4, 1024) for _ in range(num_tokens)]

    documents = [fresh(n) for n in (130, 257, 320, 511, 700)]
    prompts: list[list[int]] = []
    for document in documents:
        prompts.append(document)
        for turn in range(1, 12):  # a conversation: each turn extends the one before
            prompts.append([*prompts[-1], *fresh(rng.randrange(3, 40) + turn)])
        for _ in range(14):  # questions about the document that diverge somewhere within it
            cut = rng.randrange(10, len(document))
            prompts.append([*document[:cut], *fresh(rng.randrange(5, 90))])
        prompts.extend(list(document) for _ in range(4))
    for around in (64, 128, 192, 256):
        prompts.extend(fresh(around + offset) for offset in (-1, 0, 1, 2))
    while len(prompts) < 220:
        prompts.append(fresh(rng.randrange(4, 260)))
    return prompts


PROMPTS = varied_prompts()


def differences(
    answers: Sequence[Answer], controls: Sequence[Sequence[Answer]], which: Sequence[int]
) -> tuple[list[int], int]:
    """(indices of prompts on which `answers` fail, how many prompts counted)."""
    failed, counted = [], 0
    for i, answer in zip(which, answers, strict=True):
        reference = controls[0][i]
        counts = all(control[i].tokens == reference.tokens for control in controls)
        counted += counts
        if answer.tokens == reference.tokens:
            continue
        first = next(
            p
            for p, (a, b) in enumerate(zip(answer.tokens, reference.tokens, strict=True))
            if a != b
        )
        if counts or reference.gaps[first] >= DECISIVE_GAP:
            failed.append(i)
    return failed, counted


def assert_same(
    answers: Sequence[Answer],
    controls: Sequence[Sequence[Answer]],
    which: Sequence[int] | None = None,
) -> None:
    """Judge as section 13 says."""
    which = range(len(PROMPTS)) if which is None else which
    failed, counted = differences(answers, controls, which)
    assert counted >= 0.9 * len(which), f"only {counted} of {len(which)} prompts count"
    assert not failed, f"prompts {failed} have other tokens than without cache"


@pytest.fixture(scope="module")
def controls() -> list[list[Answer]]:
    """Answers without connector: computed whole, and again with vLLM's own prefix cache warm."""
    with engine(None, enable_prefix_caching=True, kv_cache_memory_bytes=512 << 20) as control:
        whole = control.generate(PROMPTS, ANSWER_TOKENS)
        split = control.generate(PROMPTS, ANSWER_TOKENS)
    return [whole, split]


@pytest.fixture(scope="module")
def agent():
    with AgentProcess(cpu="1Gi", http=True) as running:
        yield running


def reasons(agent: AgentProcess, kind: str) -> list[str]:
    """Reasons of the outcomes of one kind that the agent was told of."""
    outcomes = json.loads(agent.get("/statusz?outcomes=1")[1])["outcomes"]
    return [o["reason"] for o in outcomes if o["kind"] == kind]


def test_outputs_are_the_same_cold_and_after_a_restart_of_the_engine(controls, agent):
    with engine(transfer_config(socket_dir=str(agent.socket_dir), **PATIENT)) as subject:
        assert_same(subject.generate(PROMPTS, ANSWER_TOKENS), controls)
        subject.drain()
        assert subject.num_free_blocks == subject.num_blocks - 1
    with engine(transfer_config(socket_dir=str(agent.socket_dir), **PATIENT)) as subject:
        assert_same(subject.generate(PROMPTS, ANSWER_TOKENS), controls)
        subject.drain()
        assert subject.num_free_blocks == subject.num_blocks - 1
        stats = subject.totals()
        long_enough = sum(len(p) >= 64 for p in PROMPTS)
        assert stats["outcome/lookup/hit"] == long_enough, stats
        assert stats["outcome/load/hit"] == long_enough, stats
        assert not any(
            key.startswith("outcome/save/") and not key.endswith("duplicate") for key in stats
        )
        assert subject.worker_connector._worker._client.state().data_plane == "shared_memory"


def test_outputs_are_the_same_when_requests_are_preempted(controls, agent):
    """Little room, prompts in parts of 128 tokens, vLLM's own prefix cache on and off."""
    which = [i for i, p in enumerate(PROMPTS) if 200 < len(p) < 420]
    for own_cache in (False, True):
        settings = {
            "num_gpu_blocks_override": 28,
            "max_model_len": 800,
            "max_num_batched_tokens": 128,
            "enable_prefix_caching": own_cache,
        }
        with engine(
            transfer_config(socket_dir=str(agent.socket_dir), salt=f"preempt-{own_cache}"),
            **settings,
        ) as subject:
            subject.scheduler.scheduler_reserve_full_isl = False
            preempted = subject.count_preemptions()
            for _ in range(2):
                assert_same(
                    subject.generate([PROMPTS[i] for i in which], ANSWER_TOKENS), controls, which
                )
            assert preempted[0] > 0
            subject.drain()
            assert subject.num_free_blocks == subject.num_blocks - 1
            assert subject.totals()["outcome/load/hit"] > 0


def test_an_agent_that_is_killed_and_restarted_under_load_changes_no_output(controls):
    which = list(range(0, len(PROMPTS), 2))
    prompts = [PROMPTS[i] for i in which]
    with (
        AgentProcess(cpu="256Mi") as agent,
        engine(transfer_config(socket_dir=str(agent.socket_dir))) as subject,
    ):
        assert_same(subject.generate(prompts, ANSWER_TOKENS), controls, which)
        subject.totals()
        done = threading.Event()

        def torment() -> None:
            while not done.wait(0.7):
                agent.kill()
                if done.wait(0.4):
                    break
                agent.start()

        thread = threading.Thread(target=torment)
        thread.start()
        try:
            for _ in range(2):
                assert_same(subject.generate(prompts, ANSWER_TOKENS), controls, which)
        finally:
            done.set()
            thread.join()
        subject.drain()
        assert subject.num_free_blocks == subject.num_blocks - 1
        if agent._process is None:
            agent.start()
        wait_until(
            lambda: subject.connector._client.state().connected, what="the engine's reconnection"
        )
        wait_until(
            lambda: subject.worker_connector._worker._client.state().connected,
            what="the rank's reconnection",
        )
        subject.totals()
        some = which[:30]
        for _ in range(2):
            assert_same(subject.generate([PROMPTS[i] for i in some], ANSWER_TOKENS), controls, some)
            subject.drain()
        assert subject.totals()["outcome/load/hit"] > 0


def test_an_engine_without_agent_serves_and_uses_it_when_it_comes(controls):
    some = list(range(30))
    with (
        AgentProcess(cpu="64Mi", start=False) as agent,
        engine(transfer_config(socket_dir=str(agent.socket_dir))) as subject,
    ):
        assert_same(subject.generate([PROMPTS[i] for i in some], ANSWER_TOKENS), controls, some)
        assert {k for k in subject.totals() if k.startswith("outcome/lookup/")} <= {
            "outcome/lookup/agent_down", "outcome/lookup/too_short"
        }  # fmt: skip
        agent.start()
        wait_until(
            lambda: subject.connector._client.state().connected, what="the engine's connection"
        )
        wait_until(
            lambda: subject.worker_connector._worker._client.state().connected,
            what="the rank's connection",
        )
        for _ in range(2):
            assert_same(subject.generate([PROMPTS[i] for i in some], ANSWER_TOKENS), controls, some)
            subject.drain()
        assert subject.totals()["outcome/load/hit"] > 0


def test_the_stream_path_serves_the_same_outputs(controls):
    some = list(range(40))
    with AgentProcess(cpu="256Mi", tcp=True) as agent:
        for _ in range(2):
            with engine(transfer_config(address=agent.address)) as subject:
                assert_same(
                    subject.generate([PROMPTS[i] for i in some], ANSWER_TOKENS), controls, some
                )
                subject.drain()
                state = subject.worker_connector._worker._client.state()
                assert state.data_plane == "stream"
                stats = subject.totals()
        assert stats["outcome/load/hit"] > 0


def test_decode_on_another_node_gets_what_prefill_stored(controls):
    """Prefill's engine on one agent, decode's on the other; a real Redis between them, bytes pulled from the peer."""
    which = [i for i, p in enumerate(PROMPTS) if len(p) >= 64][:60]
    prompts = [PROMPTS[i] for i in which]
    with (
        RedisServer() as redis,
        AgentProcess(cpu="256Mi", index=redis.url, tcp=True, node="a") as first,
        AgentProcess(cpu="256Mi", index=redis.url, tcp=True, node="b", http=True) as second,
    ):
        with engine(
            transfer_config("kv_producer", socket_dir=str(first.socket_dir), **PATIENT)
        ) as prefill:
            answers = prefill.generate(prompts, 1)
            prefill.drain()
        params = [a.hand_over for a in answers]
        assert all(p is not None and p["larder"]["node"] for p in params)
        with engine(
            transfer_config("kv_consumer", socket_dir=str(second.socket_dir), **PATIENT)
        ) as decode:
            assert_same(decode.generate(prompts, ANSWER_TOKENS, params), controls, which)
            decode.drain()
            stats = decode.totals()
        assert stats["outcome/load/hit"] == len(which), stats
        assert stats["tokens/load/served"] == sum(
            p["larder"]["num_chunks"] * 64 for p in params if p
        )


@pytest.mark.parametrize(("name", "chunk"), [("gemma3", 128), ("qwen3next", 256)])
def test_decode_on_another_node_gets_every_group_of_a_hybrid_model(name, chunk):
    """States of most chunks are stored nowhere. Lengths at and around chunk ends: with groups of several kinds a hit
    leaves a token to compute."""
    rng = random.Random(5)
    document = [rng.randrange(4, 1024) for _ in range(900)]
    prompts = [document[:n] for n in (chunk - 1, 2 * chunk, 2 * chunk + 1, 700, 900)]
    prompts.append([rng.randrange(4, 1024) for _ in range(3 * chunk)])
    options = {
        "tiny": name, "block_size": None, "enable_prefix_caching": name == "qwen3next",
        "kv_cache_memory_bytes": 256 << 20,
    }  # fmt: skip
    extra = {"tokens_per_chunk": chunk, **PATIENT}
    with engine(None, **{**options, "enable_prefix_caching": True}) as control:
        answers = [control.generate(prompts, ANSWER_TOKENS) for _ in range(2)]
    with (
        RedisServer() as redis,
        AgentProcess(cpu="512Mi", index=redis.url, tcp=True, node="a") as first,
        AgentProcess(cpu="512Mi", index=redis.url, tcp=True, node="b") as second,
    ):
        with engine(
            transfer_config("kv_producer", socket_dir=str(first.socket_dir), **extra), **options
        ) as prefill:
            params = []
            for prompt in prompts:  # one after the other, so that each is one of its own
                params += [a.hand_over for a in prefill.generate([prompt], 1)]
                prefill.forget()
            prefill.drain()
        with engine(
            transfer_config("kv_consumer", socket_dir=str(second.socket_dir), **extra), **options
        ) as decode:
            decoded = []
            for prompt, given in zip(prompts, params, strict=True):
                decoded += decode.generate([prompt], ANSWER_TOKENS, [given])
                decode.forget()
            decode.drain()
            stats = decode.totals()
    assert_same(decoded, answers, range(len(prompts)))
    ended = {k: n for k, n in stats.items() if k.startswith(("outcome/lookup", "outcome/load"))}
    num_long = len(prompts) - 1
    assert ended == {
        "outcome/lookup/hit": num_long, "outcome/lookup/too_short": 1, "outcome/load/hit": num_long
    }  # fmt: skip
    assert stats["tokens/load/served"] == sum((len(p) - 1) // chunk * chunk for p in prompts)


def test_hand_over_within_one_node(controls, agent):
    which = [i for i, p in enumerate(PROMPTS) if len(p) >= 64][60:90]
    prompts = [PROMPTS[i] for i in which]
    extra = {"socket_dir": str(agent.socket_dir), "salt": "one node", **PATIENT}
    with engine(transfer_config("kv_producer", **extra)) as prefill:
        params = [a.hand_over for a in prefill.generate(prompts, 1)]
        prefill.drain()
    with engine(transfer_config("kv_consumer", **extra), disable_log_stats=False) as decode:
        started = time.monotonic()
        assert_same(decode.generate(prompts, ANSWER_TOKENS, params), controls, which)
        assert time.monotonic() - started < 60
        decode.drain()
        stats = decode.totals()
    # Each prompt is looked up once and loaded once, whole: prefill was drained, so that all it promised is there, and
    # decode has no prefix cache of its own to find anything in.
    ended = {k: n for k, n in stats.items() if k.startswith(("outcome/lookup", "outcome/load"))}
    assert ended == {"outcome/lookup/hit": len(which), "outcome/load/hit": len(which)}
    promised = sum(p["larder"]["num_chunks"] * CHUNK_TOKENS for p in params if p)
    assert stats["tokens/load/served"] == promised
    assert exported("vllm:larder_outcomes_total", kind="load", reason="hit") == len(which)
    assert exported("vllm:larder_tokens_total", kind="load", what="served") == promised


def test_two_ranks_store_and_load_their_own_heads(agent):
    """Tensor parallel size 2, ranks in processes of their own. Compared with itself: sums are ordered by size."""
    prompts = [p for p in PROMPTS if 64 <= len(p) < 400][:24]
    options = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    with engine(
        transfer_config(socket_dir=str(agent.socket_dir), salt="two", **PATIENT), **options
    ) as subject:
        cold = subject.generate(prompts, ANSWER_TOKENS)
        subject.drain()
        assert [g.num_shards for g in subject.connector._scheduler.plan.spec.groups] == [2]
        subject.totals()
        warm = subject.generate(prompts, ANSWER_TOKENS)
        subject.drain()
        assert subject.num_free_blocks == subject.num_blocks - 1
        assert subject.totals()["outcome/lookup/hit"] == len(prompts)

        def loads_of(rank: int) -> int:
            outcomes = json.loads(agent.get("/statusz?outcomes=1")[1])["outcomes"]
            return sum(
                o["kind"] == "load" and o["reason"] == "hit" and o["rank"] == rank for o in outcomes
            )

        wait_until(
            lambda: loads_of(1) >= len(prompts), what="the second rank's report of its loads"
        )
    assert [a.tokens for a in warm] == [a.tokens for a in cold]


def exported(name: str, **labels: str) -> float:
    """A sample of this process's Prometheus registry, whatever engine it is of."""
    from prometheus_client import REGISTRY

    return sum(
        sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
