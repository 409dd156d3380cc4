"""Which checkpoints Larder can make: the shape of each, as data. Imports nothing heavy; `model` turns them into files.

    TINY      models of 1-3 M parameters for tests, one for every kind of KV cache group that vLLM runs on a CPU
    DEMOS     models of 20-90 M parameters for `make demo MODEL=`, slow enough that a cache is felt

Each class below is one of transformers' config classes, whose fields are its own. Shapes obey vLLM 0.32's CPU backend:
head sizes 32, 64, 80, 96, 112, 128 and more, and for MLA a latent of exactly 512 + 64.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]

DEMO_MODEL_NAME = "larder-demo"
"""`spec.model.name` for which `larder up` makes the demo model by itself; `larder-demo-gemma3` names another shape."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything that the files of a model depend on, besides the versions of torch, transformers and Python.

    `weight_gain` is the standard deviation of a matrix times the square root of its input width: 1 keeps the size of
    activations. `query_key_gain` is that of query and key, or, where these are normalised, the weight of that norm.
    """

    name: str
    dtype: Dtype
    config_class: str
    config: Mapping[str, Any]
    vocab_size: int
    max_tokens: int
    weight_gain: float
    query_key_gain: float
    embedding_deviation: float = 1.0
    lost_by_transformers: Mapping[str, Any] = field(default_factory=dict)
    """Fields of config.json that vLLM reads and the config class drops."""
    seed: int = 7
    version: int = 2  # raise it when `model` writes something else for the same recipe

    @property
    def digest(self) -> str:
        """Names the recipe; a folder with another digest is made again."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


def _tiny(
    name: str, config_class: str, *, dtype: Dtype = "float32", gains: tuple[float, float] = (2.0, 2.0),
    embedding: float = 1.0, lost: Mapping[str, Any] | None = None, **config: Any,
) -> Recipe:  # fmt: skip
    return Recipe(
        name=name, dtype=dtype, config_class=config_class, config=config, vocab_size=1024, max_tokens=8192,
        weight_gain=gains[0], query_key_gain=gains[1], embedding_deviation=embedding, lost_by_transformers=lost or {},
    )  # fmt: skip


_TINY_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
_TINY_LLAMA: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}
_TINY_MLA: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
    "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_TINY_MAMBA2: dict[str, Any] = {
    "hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "mamba_n_heads": 8, "mamba_d_head": 32,
    "mamba_n_groups": 1, "mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 64,
}  # fmt: skip

_TINY_RECIPES = (
    _tiny("llama", "LlamaConfig", **_TINY_LLAMA, **_TINY_ATTENTION),
    # One KV head, which two ranks both hold.
    _tiny("llama1head", "LlamaConfig", **_TINY_LLAMA, **{**_TINY_ATTENTION, "num_key_value_heads": 1}),
    # 12 layers: five sliding windows of 256 to one full. vLLM makes six groups of two layers. Embeddings are multiplied
    # by the square root of the hidden size, and each layer adds something of size 1.
    _tiny(
        "gemma3", "Gemma3TextConfig", embedding=0.1, hidden_size=128, intermediate_size=256, num_hidden_layers=12,
        sliding_window=256, query_pre_attn_scalar=64, **_TINY_ATTENTION,
    ),
    # Mixture of experts, attention sinks; sliding windows of 128 and full attention by turns: two groups.
    _tiny(
        "gptoss", "GptOssConfig", hidden_size=128, intermediate_size=128, num_hidden_layers=4, sliding_window=128,
        num_local_experts=4, num_experts_per_tok=2, **_TINY_ATTENTION,
    ),
    # Three layers of gated delta net to one of full attention: recurrent state in three groups. In bf16, because
    # vLLM 0.32's kernel on CPU asserts that (model_executor/layers/mamba/ops/cpu/gdn_attention.py). Hence narrower
    # weights and no choice of experts: with those of the others, vLLM by itself gives 15 of 19 prompts the same six
    # tokens when it preempts some of them, with these all 19. Small embeddings let the context weigh more.
    _tiny(
        "qwen3next", "Qwen3NextConfig", dtype="bfloat16", gains=(1.0, 2.0), embedding=0.1, hidden_size=128,
        intermediate_size=256, num_hidden_layers=4,
        linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=64, linear_value_head_dim=64,
        linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=128,
        shared_expert_intermediate_size=128, decoder_sparse_step=1, full_attention_interval=4, **_TINY_ATTENTION,
    ),
    # DeepSeek-V2: MLA, one latent per token that all heads and all ranks share.
    _tiny(
        "mla", "DeepseekV2Config", q_lora_rank=None, moe_layer_freq=1, topk_method="greedy", routed_scaling_factor=1.0,
        norm_topk_prob=False, **_TINY_MLA,
    ),
    # DeepSeek-V3: MLA with a latent of the query too. Without the two fields that transformers drops, vLLM 0.32 ends
    # with KeyError 'e_score_correction_bias'.
    _tiny(
        "deepseekv3", "DeepseekV3Config", lost={"topk_method": "noaux_tc", "scoring_func": "sigmoid"}, q_lora_rank=64,
        **_TINY_MLA,
    ),
    # Attention and mamba2 side by side in every layer. vLLM's CPU backend runs mamba2 without prefix caching only.
    _tiny(
        "falconh1", "FalconH1Config", head_dim=64, intermediate_size=256, num_hidden_layers=2, mamba_d_ssm=256,
        **_TINY_MAMBA2,
    ),
    # Mamba2 with one attention layer in four.
    _tiny(
        "granite", "GraniteMoeHybridConfig", intermediate_size=256, num_hidden_layers=4,
        layer_types=["mamba", "mamba", "attention", "mamba"], num_local_experts=0, num_experts_per_tok=0,
        shared_intermediate_size=256, position_embedding_type="nope", **_TINY_MAMBA2,
    ),
)  # fmt: skip
TINY = {recipe.name: recipe for recipe in _TINY_RECIPES}

# 84 M parameters; in fp32, so that outputs with and without cache can be compared token by token.
# Few wide layers with heads of 128: on a 2.5 GHz Xeon with AVX-512 vLLM takes 4.3-5.4 s for 4,000
# tokens on two cores (0.1 s from its own prefix cache) and 8-9 s on one, where 12 layers of 768 with
# heads of 64 take 11 s: attention costs more per operation on CPU than the other matrix products do.
# 12 KiB of KV per token.
_DEMO_ATTENTION: dict[str, Any] = {
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def _demo(
    name: str, config_class: str, *, dtype: Dtype = "float32", embedding: float = 1.0, **config: Any
) -> Recipe:
    return Recipe(
        name=name, dtype=dtype, config_class=config_class, config={**config, **_DEMO_ATTENTION}, vocab_size=8192,
        max_tokens=16384, weight_gain=1.5, query_key_gain=1.5, embedding_deviation=embedding,
    )  # fmt: skip


DEMO = _demo("demo", "LlamaConfig", hidden_size=1024, intermediate_size=2816, num_hidden_layers=6)
DEMOS = {
    "llama": DEMO,
    # Five sliding windows of 512 tokens to one full layer.
    "gemma3": _demo(
        "demo-gemma3", "Gemma3TextConfig", embedding=1 / 32, hidden_size=768, intermediate_size=2048,
        num_hidden_layers=6, sliding_window=512, query_pre_attn_scalar=128,
    ),
    # Sliding windows of 128 tokens and full attention by turns, two of four experts per token.
    "gptoss": _demo(
        "demo-gptoss", "GptOssConfig", hidden_size=768, intermediate_size=1024, num_hidden_layers=6, sliding_window=128,
        num_local_experts=4, num_experts_per_tok=2,
    ),
    # Three layers of recurrent state to one of full attention. Small: vLLM's CPU kernels take long over state.
    "qwen3next": _demo(
        "demo-qwen3next", "Qwen3NextConfig", dtype="bfloat16", hidden_size=512, intermediate_size=1024,
        num_hidden_layers=4, linear_num_key_heads=4, linear_num_value_heads=8, linear_key_head_dim=64,
        linear_value_head_dim=64, linear_conv_kernel_dim=4, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=512, shared_expert_intermediate_size=512, decoder_sparse_step=1,
        full_attention_interval=4,
    ),
}  # fmt: skip


def demo_model_name(shape: str) -> str:
    """The `spec.model.name` of the demo model of `shape`."""
    return DEMO_MODEL_NAME if shape == "llama" else f"{DEMO_MODEL_NAME}-{shape}"


DEMO_SHAPES = {demo_model_name(shape): shape for shape in DEMOS}
"""Shape by `spec.model.name`."""
