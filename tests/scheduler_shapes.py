"""Model shapes for the scheduler harness: what each rank's layers register with vLLM, small enough for CPU tensors.

Real classes of vLLM's kv_cache_interface, tiny heads. `layers(tp)` is what one of `tp` ranks reports; vLLM's own
functions make groups, page sizes and tensors of it. No model is built, and no model name decides anything.

Called by: scheduler_harness.py, scheduler_life.py, the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

HEAD_SIZE = 4
"""Of K and of V, two bytes each: 16 bytes per token and head."""
BLOCK = 16


@dataclass(frozen=True)
class Shape:
    """One model, and how its engines are set up."""

    name: str
    layers: Callable[[int], dict[str, Any]]
    """Specs of one of so many ranks, by layer."""
    kv_heads: int
    """Of the model, over all ranks."""
    tensor_parallel_sizes: tuple[int, ...] = (1,)
    """One engine after the other has these sizes; all share one cache."""
    chunks: tuple[int, ...] = (32, 64)
    """Chunk sizes to choose from."""
    layout: str = "LBHNC"
    kernel_block: int | None = None
    """Tokens of the blocks that the attention backend uses; None = those of the manager."""
    prefix_caching: bool = True
    async_scheduling: bool = False
    policy: str = "fcfs"
    has_state: bool = False
    max_model_len: int = 640
    budgets: tuple[int, ...] = (50, 80, 120, 336)
    """Tokens per step to choose from."""
    extra: dict[str, Any] = field(default_factory=dict)


def full(heads: int, tp: int, **fields: Any) -> Any:
    """Full attention with so many heads over all ranks."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return FullAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": max(1, heads // tp), "head_size": HEAD_SIZE, "dtype": torch.float16,
           "max_tp_shards": heads, **fields}
    )  # fmt: skip


def sliding(heads: int, tp: int, window: int, **fields: Any) -> Any:
    """Sliding window attention."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return SlidingWindowSpec(
        **{"block_size": BLOCK, "num_kv_heads": max(1, heads // tp), "head_size": HEAD_SIZE, "dtype": torch.float16,
           "max_tp_shards": heads, "sliding_window": window, **fields}
    )  # fmt: skip


def latent(**fields: Any) -> Any:
    """Multi-head latent attention: the same bytes on every rank."""
    import torch
    from vllm.v1.kv_cache_interface import MLAAttentionSpec

    return MLAAttentionSpec(
        **{"block_size": BLOCK, "num_kv_heads": 1, "head_size": 12, "dtype": torch.float16, "max_tp_shards": 1,
           **fields}
    )  # fmt: skip


def latent_window(window: int, **fields: Any) -> Any:
    """A window over latents, or a compressor's state, which vLLM keeps as one."""
    import torch
    from vllm.v1.kv_cache_interface import SlidingWindowMLASpec

    return SlidingWindowMLASpec(
        **{"num_kv_heads": 1, "head_size": 6, "dtype": torch.float16, "max_tp_shards": 1, "sliding_window": window,
           **fields}
    )  # fmt: skip


def state(tp: int, **fields: Any) -> Any:
    """Recurrent state, cut over the ranks, as gated delta net keeps it: two parts of other types, then padding."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    page = full(2, tp).page_size_bytes
    return MambaSpec(
        **{"block_size": BLOCK, "shapes": ((3, 8 // tp), (2, 4 // tp)), "dtypes": (torch.float16, torch.float32),
           "page_size_padded": page, "mamba_cache_mode": "align", **fields}
    )  # fmt: skip


def _dense(heads: int) -> Callable[[int], dict[str, Any]]:
    return lambda tp: {f"model.layers.{i}.attn": full(heads, tp) for i in range(2)}


def _mla(tp: int) -> dict[str, Any]:
    return {f"model.layers.{i}.attn": latent() for i in range(2)}


def _gemma(tp: int) -> dict[str, Any]:
    return {
        f"model.layers.{i}.attn": full(1, tp) if i % 6 == 5 else sliding(1, tp, 40)
        for i in range(6)
    }


def _gpt_oss(tp: int) -> dict[str, Any]:
    return {
        f"model.layers.{i}.attn": full(2, tp) if i % 2 else sliding(2, tp, 128) for i in range(4)
    }


def _qwen3_next(tp: int) -> dict[str, Any]:
    return {f"model.layers.{i}.mix": full(2, tp) if i == 3 else state(tp) for i in range(4)}


def _two_states(tp: int) -> dict[str, Any]:
    """A state that is cut over the ranks, one that every rank has, and full attention."""
    return {
        "model.layers.0.mix": state(tp),
        "model.layers.1.mix": state(
            1, page_size_padded=full(2, tp).page_size_bytes, tp_replicated=True
        ),
        "model.layers.2.mix": full(2, tp),
    }


def _three_block_sizes(tp: int) -> dict[str, Any]:
    """Heads of three sizes: vLLM makes the pages equal, so that blocks have 16, 32 and 48 tokens."""
    return {
        "model.layers.0.attn": full(2, tp, head_size=6),
        "model.layers.1.attn": sliding(2, tp, 40, head_size=3),
        "model.layers.2.attn": sliding(2, tp, 100, head_size=2),
    }


def _llama4(tp: int) -> dict[str, Any]:
    import torch
    from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec

    local = ChunkedLocalAttentionSpec(
        block_size=BLOCK, num_kv_heads=2 // tp, head_size=HEAD_SIZE, dtype=torch.float16, max_tp_shards=2,
        attention_chunk_size=96,
    )  # fmt: skip
    return {f"model.layers.{i}.attn": full(2, tp) if i == 3 else local for i in range(4)}


def _deepseek_v4(tp: int) -> dict[str, Any]:
    """A layer of each compression ratio, with window, compressor state and indexer: vLLM 0.32, models/deepseek_v4."""
    import torch

    layers: dict[str, Any] = {}
    byte = torch.uint8
    for i, ratio in enumerate((4, 128)):
        name = f"model.layers.{i}.attn"
        layers[f"{name}.window"] = latent_window(
            128, block_size=64, head_size=9, dtype=byte, alignment=36, model_version="deepseek_v4"
        )
        layers[f"{name}.main"] = latent(
            block_size=256, head_size=9, dtype=byte, tokens_per_state=ratio, alignment=36,
            model_version="deepseek_v4",
        )  # fmt: skip
        size = 4 if ratio == 4 else 8
        layers[f"{name}.compressor"] = latent_window(
            (2 if ratio == 4 else 1) * ratio, block_size=size, head_size=576 // size // 4, dtype=torch.float32,
            alignment=36,
        )  # fmt: skip
        if ratio == 4:
            layers[f"{name}.indexer"] = latent(
                block_size=256, head_size=3, dtype=byte, tokens_per_state=ratio, alignment=36
            )
    return layers


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("dense-tp1", _dense(2), 2),
        Shape("dense-tp2", _dense(4), 4, (2,)),
        Shape("gqa-tp4", _dense(2), 2, (4,)),
        Shape("mla-tp1", _mla, 1),
        Shape("mla-tp2", _mla, 1, (2,)),
        Shape("gemma", _gemma, 1),
        Shape("gpt-oss", _gpt_oss, 2),
        Shape("qwen3-next-tp1", _qwen3_next, 2, chunks=(16,), has_state=True),
        Shape("qwen3-next-tp2", _qwen3_next, 2, (2,), chunks=(16, 32), has_state=True),
        Shape("chunked-local", _llama4, 2),
        Shape(
            "deepseek-v4",
            _deepseek_v4,
            1,
            chunks=(256,),
            layout="BLHNC",
            max_model_len=1536,
            budgets=(256, 400, 640),
        ),
        Shape("three-block-sizes", _three_block_sizes, 2, chunks=(96, 192)),
        Shape("two-states", _two_states, 2, (2,), chunks=(16,), has_state=True),
        Shape("token-major", _dense(4), 4, (2,), layout="LBNHC"),
        Shape("kernel-blocks", _dense(4), 4, (2, 1), kernel_block=8),
        Shape("no-prefix-caching", _dense(2), 2, prefix_caching=False),
        Shape("gemma-no-prefix-caching", _gemma, 1, prefix_caching=False),
        Shape("async", _dense(2), 2, async_scheduling=True),
        Shape("gemma-async", _gemma, 1, async_scheduling=True),
        Shape(
            "qwen3-next-async", _qwen3_next, 2, chunks=(16,), has_state=True, async_scheduling=True
        ),
        Shape("priority", _dense(2), 2, policy="priority"),
        Shape("gemma-priority", _gemma, 1, policy="priority"),
        Shape(
            "qwen3-next-priority", _qwen3_next, 2, chunks=(16,), has_state=True, policy="priority"
        ),
        Shape("dense-resized", _dense(4), 4, (2, 1)),
        Shape("mla-resized", _mla, 1, (2, 1)),
        Shape("gqa-resized", _dense(2), 2, (4, 1, 2)),
        Shape("gpt-oss-resized", _gpt_oss, 2, (2, 1)),
    )
}
