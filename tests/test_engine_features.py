"""Features of vLLM beside plain serving: each is handled or refused, as docs/engine-features.md says.

Keys come from vLLM's own Request and block hasher, steps from its own Scheduler under the page oracle of
scheduler_harness.py, configurations from its own EngineArgs. Real engines with a real agent are in
test_engine_features_live.py.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import engines
import pytest
import scheduler_harness
import torch
from scheduler_harness import Engine, Text, World
from scheduler_shapes import SHAPES

from cacheservice.cli.status import is_rank_of
from cacheservice.connector.checks import caution_of, check_engine
from cacheservice.core.keys import chunk_keys_of
from cacheservice.core.layout import GroupKind
from cacheservice.errors import RefusedError

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs/engine-features.md"
HASH_BLOCK = 16
CHUNK = 64
DENSE = SHAPES["dense-tp1"]


# ---------------------------------------------------------------- configurations


@cache
def _config(**flags: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    transfer = engines.transfer_config(socket_dir="/nowhere")
    settings = {
        "model": str(engines.tiny_llama()), "dtype": "float32", "skip_tokenizer_init": True, "enforce_eager": True,
        "max_model_len": 2048, "prefix_caching_hash_algo": "sha256_cbor", "kv_transfer_config": transfer,
        **{name: dict(value) if isinstance(value, tuple) else value for name, value in flags.items()},
    }  # fmt: skip
    return EngineArgs(**settings).create_engine_config()


def config(changes: dict[str, Any] | None = None, **flags: Any) -> Any:
    """vLLM's configuration for these flags of its command line (mappings as tuples of pairs).

    `changes` sets fields that this platform would not let one set, as `part.field`; a field that vLLM does not have is
    an error.
    """
    made = copy.copy(_config(**flags))
    for path, value in (changes or {}).items():
        part, field = path.split(".")
        changed = copy.copy(getattr(made, part))
        assert hasattr(changed, field), f"vLLM has no {path}"
        # Not setattr: is_diffusion is a cached property of the class, which the instance's dictionary overrides.
        changed.__dict__[field] = value
        setattr(made, part, changed)
    return made


def images_without_caches() -> Any:
    """A multimodal model whose images are neither hashed for a processor's cache nor for a prefix cache."""
    from vllm.config.multimodal import MultiModalConfig

    return config(
        {"model_config.multimodal_config": MultiModalConfig(mm_processor_cache_gb=0)},
        enable_prefix_caching=False,
    )


DRAFTER = (("method", "draft_model"), ("model", str(engines.MODEL_FOLDER / "llama")))


def under_multi_connector(policy: str, *names: str) -> tuple[Any, Any]:
    """(configuration that MultiConnector gives the first of these children, configuration of the engine)."""
    from vllm.config import KVTransferConfig

    child = engines.transfer_config(socket_dir="/nowhere")
    outer = {
        "kv_connector": "MultiConnector", "kv_role": "kv_both", "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {"connectors": [{**child, "kv_connector": name} for name in names]},
    }  # fmt: skip
    return config(), replace(config(), kv_transfer_config=KVTransferConfig(**outer))


REFUSED = {
    "hash algorithm": lambda: config(prefix_caching_hash_algo="sha256"),
    "images that vLLM numbers": images_without_caches,
    "`kv_load_failure_policy`": lambda: config(
        {"kv_transfer_config.kv_load_failure_policy": "fail"}
    ),
    "`kv_load_failure_policy` under MultiConnector": lambda: under_multi_connector(
        "fail", "LarderConnector", "ExampleConnector"
    ),
    "MultiConnector with Larder twice": lambda: under_multi_connector(
        "recompute", "LarderConnector", "LarderConnector"
    ),
    "speculative decoding with a drafter's own pages": lambda: config(
        speculative_config=(*DRAFTER, ("num_speculative_tokens", 2))
    ),
    "pipeline parallel": lambda: config(pipeline_parallel_size=2),
    "decode context parallel": lambda: config(
        tensor_parallel_size=4, decode_context_parallel_size=2
    ),
    "prefill context parallel": lambda: config(
        {"parallel_config.prefill_context_parallel_size": 2}
    ),
    "ranks of one engine on several nodes": lambda: config(nnodes=2, tensor_parallel_size=2),
    "ranks that Ray places": lambda: config(
        {"parallel_config.distributed_executor_backend": "ray"}, tensor_parallel_size=2
    ),
    "tensor parallel sizes without the own one": lambda: config(
        {"kv_transfer_config.kv_connector_extra_config": {"tensor_parallel_sizes": [2, 4]}}
    ),
    "sleep mode": lambda: config({"model_config.enable_sleep_mode": True}),
    "encoder-decoder models": lambda: config(hf_overrides=(("is_encoder_decoder", True),)),
    "diffusion models": lambda: config({"model_config.is_diffusion": True}),
}
"""Feature, as the page names it, to a configuration that uses it."""


def check(made: Any) -> None:
    """Check a configuration as a rank does, which knows the engine's beside its own."""
    from vllm.config import set_current_vllm_config

    own, whole = made if isinstance(made, tuple) else (made, made)
    with set_current_vllm_config(whole):
        check_engine(own)


@pytest.mark.parametrize("feature", REFUSED)
def test_what_cannot_be_cached_is_refused_at_start(feature):
    """In one sentence with the flag and what to do, which is the page's."""
    with pytest.raises(RefusedError) as refusal:
        check(REFUSED[feature]())
    treated, sentence, _ = rows()[feature]
    assert treated == "refused"
    assert sentence == str(refusal.value)
    assert re.search(r"--[a-z]|kv_load_failure_policy|tensor_parallel_sizes", sentence)
    assert re.search(r"start the engine|[Ss]et \"|add it|leave one", sentence)


def test_a_plain_engine_is_accepted():
    check(config())
    check(under_multi_connector("recompute", "LarderConnector", "ExampleConnector"))


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix"])
def test_drafters_without_pages_are_accepted(method):
    speculative = (("method", "ngram"), ("num_speculative_tokens", 2))
    check(config({"speculative_config.method": method}, speculative_config=speculative))


@pytest.mark.parametrize(
    "method", ["eagle", "eagle3", "mtp", "draft_model", "medusa", "mlp_speculator", "dflash", "extract_hidden_states"]
)  # fmt: skip
def test_drafters_with_pages_of_their_own_are_refused_by_method(method):
    speculative = (("method", "ngram"), ("num_speculative_tokens", 2))
    with pytest.raises(RefusedError, match=f"method '{method}'"):
        check(config({"speculative_config.method": method}, speculative_config=speculative))


def test_data_parallel_ranks_on_nodes_of_their_own_are_accepted():
    made = config(nnodes=2, data_parallel_size=2, data_parallel_size_local=1)
    assert made.parallel_config.nnodes == 2
    check(made)


def test_images_that_vllm_hashes_are_accepted():
    """Either cache makes vLLM hash the image itself."""
    from vllm.config.multimodal import MultiModalConfig

    for cache_gb, own_cache in ((4, False), (0, True)):
        multimodal = MultiModalConfig(mm_processor_cache_gb=cache_gb)
        check(
            config({"model_config.multimodal_config": multimodal}, enable_prefix_caching=own_cache)
        )


def test_scales_of_quantized_pages_come_from_the_checkpoint():
    """Scales that vLLM makes of the first requests would be in no key and no namespace. Older versions had
    --calculate-kv-scales; should it come back, it is to be refused."""
    assert not hasattr(config().cache_config, "calculate_kv_scales")


def test_cautions_name_the_flag_and_what_to_do():
    assert caution_of(config()) is None
    assert "another path" in caution_of(config(enable_lora=True))
    both = caution_of(config(enable_lora=True, weight_transfer_config=(("backend", "nccl"),)))
    assert "--enable-lora" in both
    assert "--weight-transfer-config" in both
    assert "reset_external=true" in both


# ---------------------------------------------------------------- the page


def rows() -> dict[str, tuple[str, str, str]]:
    """The page's table: feature to how it is treated, what happens or the sentence, and its tests."""
    found = {}
    for line in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        if line.startswith("| ") and len(cells) == 4 and cells[1] in ("handled", "refused", "off"):
            found[cells[0]] = (cells[1], cells[2], cells[3])
    return found


def test_the_page_names_every_refusal_and_tests_that_exist():
    table = rows()
    assert {feature for feature, row in table.items() if row[0] == "refused"} == set(REFUSED)
    assert len(table) >= len(REFUSED) + 18
    own = "".join(
        (ROOT / "tests" / name).read_text() for name in (f"{Path(__file__).stem}.py", f"{Path(__file__).stem}_live.py")
    )  # fmt: skip
    for feature, (_, what, tests) in table.items():
        named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", tests)
        assert named, f"{feature}: no test"
        assert len(named) == tests.count("test_") - tests.count(".py"), f"{feature}: misspelt test"
        assert what, feature
        for file, test in named:
            text = (ROOT / "tests" / file).read_text() if file else own
            assert f"def {test}(" in text, f"{feature}: there is no {test}"


# ---------------------------------------------------------------- keys


def chunk_keys(**fields: Any) -> list[bytes]:
    """Chunk keys of a request of 300 equal tokens, which has nothing but these fields of its own."""
    from vllm import SamplingParams
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    init_none_hash(sha256_cbor)
    prompt = None if "prompt_embeds" in fields else [0] * 300
    request = Request(
        request_id="r", prompt_token_ids=prompt, sampling_params=SamplingParams(max_tokens=1), pooling_params=None,
        block_hasher=get_request_block_hasher(HASH_BLOCK, sha256_cbor), **fields,
    )  # fmt: skip
    return chunk_keys_of(request.block_hashes, hash_block_tokens=HASH_BLOCK, tokens_per_chunk=CHUNK)


def adapter(name: str, path: str, number: int = 1, **fields: Any) -> Any:
    """A LoRA adapter as a request names it."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=name, lora_int_id=number, lora_path=path, **fields)


def image(identifier: str, offset: int, length: int = 40) -> list[Any]:
    """The image of a prompt, where the placeholders of `length` tokens begin at `offset`."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange

    position = PlaceholderRange(offset=offset, length=length)
    return [
        MultiModalFeatureSpec(
            data=None, modality="image", identifier=identifier, mm_position=position
        )
    ]


def assert_share_only(first: int, *keys: Sequence[bytes]) -> None:
    """The first so many chunks have one key in all of these; none of the later ones is in two of them."""
    assert all(len(k) == 4 for k in keys)
    assert len({tuple(k[:first]) for k in keys}) == 1
    for number in range(first, 4):
        assert len({k[number] for k in keys}) == len(keys), f"chunk {number} is shared"


def test_adapters_are_told_apart_by_name_and_path():
    adapters = [adapter("a", "/a"), adapter("b", "/a"), adapter("a", "/b"), None]
    assert_share_only(0, *(chunk_keys(lora_request=one) for one in adapters))
    # Every engine numbers adapters by itself.
    assert chunk_keys(lora_request=adapter("a", "/a", 1)) == chunk_keys(
        lora_request=adapter("a", "/a", 2)
    )


def test_images_are_told_apart_by_what_they_are_and_where():
    """The one image begins in the second chunk; before it prompts share, after it never."""
    prompts = [image("x", 100), image("y", 100), image("x", 101), []]
    assert_share_only(1, *(chunk_keys(mm_features=one) for one in prompts))
    assert chunk_keys(mm_features=image("x", 100)) == chunk_keys(mm_features=image("x", 100))


def test_tenants_with_other_salts_share_nothing():
    assert_share_only(0, *(chunk_keys(cache_salt=salt) for salt in ("one", "two", None)))
    assert chunk_keys(cache_salt="one") == chunk_keys(cache_salt="one")


def test_prompt_embeddings_are_told_apart_by_their_values():
    """They differ in one number, towards the end of the fourth chunk."""
    ones = torch.ones(300, 8)
    others = ones.clone()
    others[250, 3] = 2
    assert_share_only(3, chunk_keys(prompt_embeds=ones), chunk_keys(prompt_embeds=others))
    assert_share_only(0, chunk_keys(prompt_embeds=ones), chunk_keys())
    assert chunk_keys(prompt_embeds=ones) == chunk_keys(prompt_embeds=ones.clone())


# ---------------------------------------------------------------- steps


@pytest.fixture
def world() -> Iterator[World]:
    made = World("features")
    with made.installed():
        yield made


def give(engine: Engine, request_id: str, text: Text, *, max_tokens: int = 4, **fields: Any) -> Any:
    """Give the engine a request with fields that Engine.add does not know."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    engine.world.texts[request_id] = text
    request = Request(
        request_id=request_id, prompt_token_ids=fields.pop("tokens", list(text.prompt)), pooling_params=None,
        sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        arrival_time=engine.world.now, **{"block_hasher": engine._hash_blocks, **fields},
    )  # fmt: skip
    engine.scheduler.add_request(request)
    return request


def last_answer(engine: Engine, request_id: str) -> int | None:
    """What vLLM was told of this request at last."""
    return [answer for asked, _, _, answer in engine.answers if asked == request_id][-1]


def stored_chunks(world: World, text: Text) -> set[int]:
    """Numbers of the chunks of a text that are in the cache."""
    ends = {world.chains[bytes(key[1])] for key in world.cache.shards}
    return {end // CHUNK - 1 for of, end in ends if of is text}


def test_what_one_adapter_or_tenant_stored_no_other_reads(world):
    tokens = [0] * 300
    texts = {who: Text(tokens, who) for who in ("a", "elsewhere", "b", "salt", "base")}
    first = Engine(world, DENSE)
    give(first, "0", texts["a"], lora_request=adapter("a", "/a", 1))
    give(first, "1", texts["salt"], cache_salt="salt")
    first.run()
    first.shut_down()
    second = Engine(world, DENSE)
    give(second, "a", texts["a"], lora_request=adapter("a", "/a", 7))
    give(second, "salt", texts["salt"], cache_salt="salt")
    give(second, "b", texts["b"], lora_request=adapter("b", "/a", 8))
    give(second, "elsewhere", texts["elsewhere"], lora_request=adapter("a", "/elsewhere", 9))
    give(second, "base", texts["base"])
    second.run()
    second.check_at_rest()
    answers = {who: last_answer(second, who) for who in texts}
    assert answers == {"a": 256, "salt": 256, "b": 0, "elsewhere": 0, "base": 0}


def test_an_adapter_that_was_replaced_in_place_is_not_cached(world):
    """It has the keys of the one that it replaced; vLLM marks its requests."""
    engine = Engine(world, replace(DENSE, prefix_caching=False))
    old, new = Text([0] * 300, "old"), Text([0] * 300, "new")
    give(engine, "0", old, lora_request=adapter("a", "/a"))
    engine.run()
    stored = dict(world.cache.shards)
    assert len(stored) == 4
    give(engine, "1", new, lora_request=adapter("a", "/a", load_inplace=True))
    engine.run()
    engine.check_at_rest()
    assert last_answer(engine, "1") == 0
    assert world.cache.shards == stored


def test_a_request_of_low_priority_gives_way_and_resumes_from_the_cache(world):
    """vLLM preempts the request of the lowest priority, not the youngest, and puts it behind the others."""
    shape = replace(SHAPES["priority"], prefix_caching=False)
    engine = Engine(world, shape, num_blocks=40, budget=128)
    engine.add("low", Text(range(4, 304)), max_tokens=60, priority=9)
    while engine.scheduler.requests["low"].num_computed_tokens < 310:
        engine.step()
        world.jobs.progress(1.0)
    engine.add("high", Text(range(304, 604)), max_tokens=60, priority=0)
    engine.run()
    engine.check_at_rest()
    assert engine.num_preemptions >= 1
    assert list(engine.finished) == ["high", "low"]
    resumed = [a for asked, _, tokens, a in engine.answers if asked == "low" and tokens > 300]
    assert resumed[-1] == 256
    assert {asked for asked, _, tokens, _ in engine.answers if tokens > 300} == {"low"}


@pytest.mark.parametrize("late", [False, True], ids=["at once", "late"])
def test_with_async_scheduling_only_tokens_that_are_known_are_saved(world, late):
    """vLLM plans a step before it has seen the last one's tokens: what it calls computed is ahead of what is hashed."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    first = Engine(world, SHAPES["async"], executes_late=late)
    assert isinstance(first.scheduler, AsyncScheduler)
    text = Text(range(4, 154))
    request = first.add("a", text, max_tokens=110)
    ahead = []
    while first.scheduler.has_requests() or first.in_flight:
        first.step()
        world.jobs.progress(1.0)
        ahead.append(request.num_computed_tokens - request.num_tokens)
    first.check_at_rest()
    assert max(ahead) == 0, "vLLM never planned a step whose input it did not know"
    # 260 tokens, of which the last was never computed: four chunks, two of them of generated tokens.
    assert stored_chunks(world, text) == {0, 1, 2, 3}
    first.shut_down()
    second = Engine(world, SHAPES["async"], executes_late=late)
    second.add("b", Text(text.tokens[:260]), max_tokens=40)
    second.run()
    second.check_at_rest()
    assert last_answer(second, "b") == 256


def test_a_request_that_skips_the_cache_is_stored_for_others(world):
    """vLLM computes all of a prompt whose log-probabilities are wanted, whatever we have."""
    engine = Engine(world, replace(DENSE, prefix_caching=False))
    for request_id, skips in (("first", True), ("skipping", True), ("other", False)):
        engine.add(request_id, Text(range(4, 304)), skips_cache=skips)
        engine.run()
    engine.check_at_rest()
    assert last_answer(engine, "first") == last_answer(engine, "skipping") == 0
    assert last_answer(engine, "other") == 256


def test_a_streaming_session_is_left_alone(world):
    """Its last token is replaced by what the client says next, and with it the hashes of its blocks."""
    engine = Engine(world, DENSE)
    text, plain = Text(range(4, 204)), Text(range(304, 504))
    session = give(engine, "session", text, max_tokens=20, resumable=True)
    engine.add("plain", plain)
    engine.run()
    assert session.status.name == "WAITING_FOR_STREAMING_REQ"
    more = [text.token(i) for i in range(session.num_computed_tokens, 400)]
    give(engine, "session", text, tokens=more, max_tokens=4, resumable=True, block_hasher=None)
    engine.run()
    assert session.num_prompt_tokens == 400
    give(engine, "session", text, tokens=[4], resumable=False, block_hasher=None)
    engine.run()
    engine.check_at_rest()
    assert stored_chunks(world, plain) == {0, 1, 2}
    assert not stored_chunks(world, text)
    assert not any(asked == "session" and answer for asked, _, _, answer in engine.answers)


@pytest.mark.parametrize("name", ["dense-tp1", "gemma", "qwen3-next-tp1", "deepseek-v4"])
def test_after_a_reset_an_engine_has_a_cache_of_its_own(world, name):
    """POST /reset_prefix_cache?reset_external=true, a pause that clears caches, a wake-up with new weights."""
    shape = SHAPES[name]
    tokens = shape.chunks[0]
    prompt = list(range(4, 4 + 3 * tokens + 5))
    first = Engine(world, shape, tokens_per_chunk=tokens, num_blocks=1024)
    first.add("a", Text(prompt))
    first.run()
    shared = {key[0] for key in world.cache.shards}
    assert first.scheduler.reset_prefix_cache(reset_connector=True)
    old = set(world.cache.shards)
    for request_id in ("b", "c"):
        first.add(request_id, Text(prompt))
        first.run()
        assert first.scheduler.reset_prefix_cache()
    first.check_at_rest()
    assert last_answer(first, "b") == 0
    assert last_answer(first, "c") > 0
    new = set(world.cache.shards) - old
    assert new
    assert not {key[0] for key in new} & shared
    first.shut_down()
    second = Engine(world, shape, tokens_per_chunk=tokens, num_blocks=1024)
    second.add("d", Text(prompt))
    second.run()
    assert {second.half.plan.digest} == shared
    assert last_answer(second, "d") > 0


def test_without_the_hybrid_manager_windows_are_cached_as_full_attention(world, monkeypatch):
    """vLLM then keeps every block of a window until the request ends, in one group with full attention."""
    prompt = range(4, 304)
    plans = []
    for disabled in (False, True):

        def disable(made: Any, disabled: bool = disabled) -> None:
            made.scheduler_config.disable_hybrid_kv_cache_manager = disabled

        engine = build(world, SHAPES["gpt-oss"], monkeypatch, disable)
        plans.append(engine.half.plan)
        for request_id in ("cold", "warm"):
            engine.add(request_id, Text(prompt))
            engine.run()
            assert engine.scheduler.reset_prefix_cache()
        engine.check_at_rest()
        assert last_answer(engine, "cold") == 0, "bytes of another kind of group were read"
        assert last_answer(engine, "warm") == 256
        engine.shut_down()
    assert [len(plan.groups) for plan in plans] == [2, 1]
    assert plans[1].groups[0].kind is GroupKind.FULL
    assert plans[0].digest != plans[1].digest


def build(world: World, shape: Any, monkeypatch: Any, change: Callable[[Any], None]) -> Engine:
    """An engine whose configuration was changed in a way that no shape knows."""
    base = scheduler_harness.vllm_config

    def changed(*arguments: Any) -> Any:
        made = base(*arguments)
        change(made)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(scheduler_harness, "vllm_config", changed)
        return Engine(world, shape)


def test_two_data_parallel_ranks_share_the_cache_and_have_names_of_their_own(world, monkeypatch):
    """vLLM starts one engine per rank with one configuration, and tells them apart by the end of engine_id."""
    text, made, names = Text(range(4, 304)), [], []
    for number in (0, 1):

        def become_rank(one: Any, number: int = number) -> None:
            """As v1/engine/core.py `run_engine_core` does for models without experts."""
            one.parallel_config = copy.copy(config(data_parallel_size=2).parallel_config)
            one.parallel_config.data_parallel_index = number
            one.parallel_config.reconfigure_for_independent_dp_rank()
            one.kv_transfer_config.engine_id += f"_dp{number}"
            one.kv_transfer_config.kv_connector_extra_config["engine_name"] = "fleet"

        engine = build(world, DENSE, monkeypatch, become_rank)
        engine.add(str(number), text)
        engine.run()
        made.append(engine)
        names.append(engine.connector._config.engine_name)
    assert last_answer(made[1], "1") == 256
    assert made[0].half.plan.digest == made[1].half.plan.digest
    assert names == ["fleet-dp0", "fleet-dp1"]


def test_larder_status_counts_all_ranks_of_a_data_parallel_group():
    assert all(is_rank_of(name, "decode") for name in ("decode", "decode-dp0", "decode-dp12"))
    assert not any(
        is_rank_of(name, "decode") for name in ("decode-2", "decode-dp", "my-decode-dp0")
    )
