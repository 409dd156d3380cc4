"""What makes two engines share a cache, and what keeps them apart."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from types import SimpleNamespace

import engines
import pytest

from cacheservice.connector.model_identity import (
    MULTIMODAL_FIELDS,
    digest_of_config,
    digest_of_files,
    identify_model,
    weight_files,
)
from cacheservice.connector.namespace import (
    EngineFacts,
    RankFacts,
    RankGroup,
    hash_facts,
    kv_head_counts,
    layers_in_order,
    plan_namespace,
)  # fmt: skip
from cacheservice.connector.namespace import _details as spec_details
from cacheservice.core.layout import GroupKind
from cacheservice.errors import RefusedError

HEADS = 8
TOKEN_BYTES_PER_HEAD = 2 * 64 * 2


def engine_facts(tp: int = 1, sizes: tuple[int, ...] | None = None, **changes) -> EngineFacts:
    facts = {"model": "m", "salt": "", "hash": {"probe": "00"}}
    return replace(
        EngineFacts(facts, HEADS, 16, tp, sizes or (tp,), None),
        **changes,
    )


def rank(
    tp_rank: int = 0,
    tp: int = 1,
    *,
    pp_rank: int = 0,
    layers=("layers.0", "layers.1"),
    kind=GroupKind.FULL,
    **changes,
):
    heads = 1 if kind is GroupKind.MLA else max(1, HEADS // tp)
    group = RankGroup(
        kind=kind, block_tokens=16, kernel_block_tokens=16, layers=tuple(layers),
        block_bytes=16 * TOKEN_BYTES_PER_HEAD * heads * len(layers), num_heads=heads, is_head_major=True,
        is_replicated=kind is GroupKind.MLA, window_tokens=None, details=(("dtype", "bf16"),),
    )  # fmt: skip
    group = replace(group, **{k: v for k, v in changes.items() if hasattr(group, k)})
    rest = {k: v for k, v in changes.items() if not hasattr(group, k)}
    return replace(RankFacts(tp_rank, pp_rank, "LBHNC", "CPU_ATTN", "vec", (group,)), **rest)


@pytest.mark.parametrize("tp", [2, 4, 8, 16])
def test_ranks_with_other_heads_are_never_taken_for_replicas(tp):
    """MiMo-V2: 4 KV heads in full attention, which vLLM names for the model, and 8 in windows. With 8 ranks each has
    one of either: those of the windows are all different."""
    config = {"num_key_value_heads": 4, "swa_num_key_value_heads": 8, "num_attention_heads": 64}
    counts = kv_head_counts({**config, "layers": [{"n_kv_heads_in_layer": [8, 4, None]}]})
    assert counts == {4, 8}
    ranks = []
    for number in range(tp):
        (full,) = rank(number).groups
        groups = [
            replace(full, layers=(name,), num_heads=max(1, count // tp), block_bytes=4096 * max(1, count // tp))
            for name, count in (("layers.0", 4), ("layers.1", 8))
        ]  # fmt: skip
        ranks.append(replace(rank(number), groups=tuple(groups)))
    engine = engine_facts(tp, num_kv_heads=4, other_kv_heads=tuple(sorted(counts)))
    full, window = plan_namespace(engine, ranks).groups
    assert window.num_heads == 8
    assert window.num_replicas(tp) == max(1, tp // 8)
    assert full.num_replicas(tp) <= max(1, tp // 4)


def test_engines_of_several_tensor_parallel_sizes_have_one_digest():
    plans = [
        plan_namespace(engine_facts(tp, (1, 2, 4)), [rank(r, tp) for r in range(tp)])
        for tp in (1, 2, 4)
    ]
    assert len({p.digest for p in plans}) == 1
    assert plans[0].spec.groups[0].num_shards == 4
    assert plans[0].spec.description == plans[2].spec.description


def test_more_ranks_than_heads_share_with_fewer():
    plans = [
        plan_namespace(engine_facts(tp, (8, 16)), [rank(r, tp) for r in range(tp)])
        for tp in (8, 16)
    ]
    assert plans[0].digest == plans[1].digest
    assert plans[0].spec.groups[0].num_shards == 8


def test_latent_attention_has_one_shard_whatever_the_size():
    plans = [
        plan_namespace(
            engine_facts(tp, (tp,)), [rank(r, tp, kind=GroupKind.MLA) for r in range(tp)]
        )
        for tp in (1, 4)
    ]
    assert {p.spec.groups[0].num_shards for p in plans} == {1}
    assert plans[0].digest == plans[1].digest


def test_pipeline_stages_are_one_union_of_layers():
    whole = plan_namespace(
        engine_facts(), [rank(layers=("layers.0", "layers.1", "layers.2", "layers.10"))]
    )
    stages = [
        rank(layers=("layers.0", "layers.1")),
        rank(layers=("layers.10", "layers.2"), pp_rank=1),
    ]
    assert plan_namespace(engine_facts(), stages).digest == whole.digest


def test_layers_are_ordered_by_number():
    names = ["model.layers.10.a", "model.layers.2.a", "model.layers.2.b", "model.layers.1.a"]
    assert layers_in_order(names) == [names[3], names[1], names[2], names[0]]


@pytest.mark.parametrize(
    "change",
    [
        {"layout": "BLHNC"}, {"backend": "FLASH"}, {"isa": "amx"}, {"kernel_block_tokens": 8},
        {"details": (("dtype", "fp16"),)}, {"layers": ("layers.0", "layers.7")},
    ],
)  # fmt: skip
def test_whatever_changes_the_meaning_of_bytes_changes_the_digest(change):
    assert (
        plan_namespace(engine_facts(), [rank(**change)]).digest
        != plan_namespace(engine_facts(), [rank()]).digest
    )


@pytest.mark.parametrize("change", [{"salt": "x"}, {"model": "n"}, {"hash": {"probe": "01"}}])
def test_engine_facts_are_part_of_the_digest(change):
    changed = engine_facts()
    changed = replace(changed, facts={**changed.facts, **change})
    assert (
        plan_namespace(changed, [rank()]).digest != plan_namespace(engine_facts(), [rank()]).digest
    )


def test_a_generation_makes_a_namespace_private_and_can_be_seen():
    plan = plan_namespace(engine_facts(), [rank()], generation="abc")
    assert plan.digest != plan_namespace(engine_facts(), [rank()]).digest
    assert json.loads(plan.spec.description)["generation"] == "abc"


@pytest.mark.parametrize(
    "change", [{"isa": "amx"}, {"layout": "BLHNC"}, {"block_tokens": 32}, {"num_heads": 2}]
)
def test_ranks_that_disagree_are_refused(change):
    with pytest.raises(RefusedError, match="disagree"):
        plan_namespace(engine_facts(2), [rank(0, 2), rank(1, 2, **change)])


@pytest.mark.parametrize(
    ("engine", "ranks", "words"),
    [
        (engine_facts(sizes=(1, 3)), [rank()], "tensor_parallel_sizes"),
        (engine_facts(tokens_per_chunk=250), [rank()], "multiple of 16"),
        (engine_facts(sizes=(1, 2)), [rank(is_head_major=False)], "contiguous heads"),
        (engine_facts(4), [rank(r, 4, num_heads=1) for r in range(4)], "share a head"),
        (engine_facts(), [], "no rank"),
    ],
)
def test_what_cannot_be_shared_is_refused_in_words(engine, ranks, words):
    with pytest.raises(RefusedError, match=words):
        plan_namespace(engine, ranks)


def test_chunks_are_chosen_large_enough_or_as_asked():
    assert plan_namespace(engine_facts(), [rank()]).tokens_per_chunk == 256
    assert plan_namespace(engine_facts(tokens_per_chunk=48), [rank()]).tokens_per_chunk == 48
    big_hash = plan_namespace(engine_facts(hash_block_tokens=96), [rank()])
    assert big_hash.tokens_per_chunk % 96 == 0


def test_a_shard_holds_exactly_the_pages_of_its_heads():
    plan = plan_namespace(engine_facts(sizes=(1, 4)), [rank()])
    assert plan.spec.groups[0].shard_bytes == 256 * TOKEN_BYTES_PER_HEAD * 2 * 2
    assert plan.spec.chunk_bytes == 256 * TOKEN_BYTES_PER_HEAD * 2 * HEADS


def test_hashes_of_this_process_are_described(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    ours = hash_facts()
    assert ours == hash_facts()
    monkeypatch.setenv("PYTHONHASHSEED", "123")
    seeded = hash_facts()
    assert seeded["none_hash"] != ours["none_hash"]
    assert seeded["probe"] != ours["probe"]


@pytest.fixture
def copy_of_model(tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(engines.tiny_llama(), folder)
    return folder


def edit_weights(folder, offset_from_end: int) -> None:
    path = folder / "model.safetensors"
    path.chmod(0o644)
    with path.open("r+b") as file:
        file.seek(-offset_from_end, 2)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))


def test_a_copy_of_the_model_is_the_same_model(copy_of_model):
    original = digest_of_files(weight_files(engines.tiny_llama()))
    assert digest_of_files(weight_files(copy_of_model)) == original


def test_every_tensor_is_sampled(copy_of_model):
    """A fine-tune that changes one tensor in the middle changes the digest: its first element is always sampled."""
    path = copy_of_model / "model.safetensors"
    path.chmod(0o644)
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    original = digest_of_files([path])
    for name, tensor in header.items():
        if name == "__metadata__":
            continue
        for position in (tensor["data_offsets"][0], tensor["data_offsets"][1] - 1):
            changed = bytearray(raw)
            changed[8 + length + position] ^= 1
            path.write_bytes(changed)
            assert digest_of_files([path]) != original, name


def test_files_that_are_no_safetensors_are_sampled_by_stride(tmp_path):
    path = tmp_path / "model.bin"
    path.write_bytes(bytes(3 << 20))
    before = digest_of_files(weight_files(tmp_path))
    path.write_bytes(bytes(3 << 20)[:-1] + b"\1")
    assert digest_of_files(weight_files(tmp_path)) != before
    broken = tmp_path / "model.safetensors"
    broken.write_bytes(b"\xff" * 4000)
    assert weight_files(tmp_path) == [broken]
    assert digest_of_files([broken])


def model_config(folder, **changes):
    values = {"hidden_size": 8, "_name_or_path": str(folder), "rope_parameters": None}
    config = SimpleNamespace(to_dict=lambda: values, rope_parameters=None)
    return SimpleNamespace(
        **{"model": str(folder), "revision": None, "seed": 0, "hf_config": config, "hf_text_config": config,
           "max_model_len": 100, **changes}
    )  # fmt: skip


def test_the_path_of_a_model_does_not_count(copy_of_model):
    load = SimpleNamespace(load_format="auto")
    here = identify_model(model_config(engines.tiny_llama()), load)
    assert identify_model(model_config(copy_of_model), load) == here
    edit_weights(copy_of_model, 1)
    assert identify_model(model_config(copy_of_model), load) != here


def test_weights_that_cannot_be_identified_are_refused(tmp_path):
    load = SimpleNamespace(load_format="auto")
    with pytest.raises(RefusedError, match="can't be identified"):
        identify_model(model_config(tmp_path), load)
    with pytest.raises(RefusedError, match="download"):
        identify_model(model_config("nobody/nothing"), load)


def test_weights_in_a_download_folder_of_their_own_are_found(tmp_path):
    snapshot = tmp_path / "models--nobody--tiny" / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    refs = tmp_path / "models--nobody--tiny" / "refs"
    refs.mkdir()
    (refs / "main").write_text("0" * 40)
    shutil.copy(engines.tiny_llama() / "model.safetensors", snapshot)
    load = SimpleNamespace(load_format="auto", download_dir=str(tmp_path))
    here = identify_model(
        model_config(engines.tiny_llama()), SimpleNamespace(load_format="auto", download_dir=None)
    )
    assert identify_model(model_config("nobody/tiny"), load)["weights"] == here["weights"]


@pytest.mark.parametrize("other", [("fp8", "bf16", "bf16"), ("bf16", "bf16", "fp8")])
def test_which_layer_has_which_dtype_counts(other):
    """As --kv-cache-dtype-skip-layers makes it: the same dtypes, in other layers."""
    names = ["layers.0", "layers.1", "layers.2"]

    def details(dtypes):
        specs = {n: SimpleNamespace(dtype=d) for n, d in zip(names, dtypes, strict=True)}
        return spec_details(SimpleNamespace(kv_cache_specs=specs), names)

    assert details(other) != details(("bf16", "fp8", "bf16"))
    assert details(("bf16",) * 3) == spec_details(SimpleNamespace(dtype="bf16"), names)


def test_long_rope_depends_on_the_longest_prompt(tmp_path):
    dummy = SimpleNamespace(load_format="dummy")
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 4096}
    config = SimpleNamespace(to_dict=dict, rope_parameters=rope)
    short = identify_model(
        model_config(tmp_path, hf_config=config, hf_text_config=config, max_model_len=4096), dummy
    )
    long = identify_model(
        model_config(tmp_path, hf_config=config, hf_text_config=config, max_model_len=8192), dummy
    )
    assert short != long


@pytest.mark.parametrize("name", MULTIMODAL_FIELDS)
def test_what_the_engine_makes_of_images_counts(tmp_path, name):
    from vllm.config.multimodal import MultiModalConfig

    assert name in MultiModalConfig.__dataclass_fields__

    def identity(**fields):
        config = SimpleNamespace(**fields)
        load = SimpleNamespace(load_format="dummy")
        return identify_model(model_config(tmp_path, multimodal_config=config), load)

    plain = dict.fromkeys(MULTIMODAL_FIELDS)
    assert identity(**plain) == identity(**plain)
    assert identity(**plain) != identity(**{**plain, name: {"num_crops": 4}})


def test_the_order_of_a_set_does_not_count():
    names = [f"layer{i}" for i in range(20)]

    def digest(values):
        return digest_of_config(SimpleNamespace(to_dict=lambda: {"skipped": values}))

    assert digest(set(names)) == digest(frozenset(reversed(names))) == digest(sorted(names))
    assert digest(set(names[1:])) != digest(set(names))


def test_the_series_of_vllm_counts(monkeypatch):
    import vllm

    from cacheservice.connector.namespace import _vllm_series

    monkeypatch.setattr(vllm, "__version__", "0.33.1+cpu")
    assert _vllm_series() == "0.33"
