"""What a cached token takes, for every model shape: bytes given up by the arena against those that a hit can read.

    python bench/stored_bytes.py [--shapes llama,gemma3,…] [--tensor-parallel-size 2] [--json]

A real vLLM engine on CPU with a tiny model of each shape stores prompts in a real agent, one at a time. The minimum is
worked out from vLLM's KVCacheConfig alone: for every place where a hit can end, the blocks that attention reads from
there on, each block once, as unpadded pages of distinct heads. Chunks are as large as the connector chooses. With
recurrent state a hit can end where a prompt ended, and nowhere else: vLLM keeps no other state.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import print_json, print_table, say
from servers import Agent, running_servers

from cacheservice.client import AgentAdmin
from cacheservice.local.model import make_tiny_model
from cacheservice.local.model_recipes import TINY

SHAPES = ("llama", "gemma3", "gptoss", "qwen3next", "mla")
PROMPT_TOKENS = (1100, 2070, 3500)
LIMIT = 0.02
"""Overhead that the design allows."""
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
"""For vLLM, where not set; it reads them when it is imported."""
MODEL_FOLDER = Path(tempfile.gettempdir()) / f"larder-bench-models-{os.getuid()}"


@dataclass(frozen=True, slots=True)
class Row:
    """One model shape. `tokens` are those in whole chunks; bytes are for all of them."""

    shape: str
    groups: str
    tokens_per_chunk: int
    tensor_parallel_size: int
    tokens: int
    minimum_bytes: int
    stored_bytes: int

    @property
    def overhead(self) -> float:
        """Share of the stored bytes above the minimum."""
        return self.stored_bytes / self.minimum_bytes - 1


def main() -> int:
    """Run and print; 1 when a shape takes more than LIMIT above the minimum."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--shapes", default=",".join(SHAPES), help=f"some of {', '.join(SHAPES)} (default all)"
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="ranks (default 1)")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    args = parser.parse_args()
    shapes = args.shapes.split(",")
    if unknown := set(shapes) - set(SHAPES):
        parser.error(f"--shapes {', '.join(sorted(unknown))}: name some of {', '.join(SHAPES)}")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    rows = []
    with running_servers() as servers:
        for shape in shapes:
            say(f"{shape}: a vLLM engine stores {len(PROMPT_TOKENS)} prompts")
            agent = servers.start_agent(shape, arena_bytes=512 << 20)
            rows.append(measure(agent, shape, args.tensor_parallel_size))
    if args.json:
        print_json("stored_bytes", rows)
    else:
        print_table(
            "Bytes stored per token, against what a hit can read",
            ["shape", "groups", "tokens per chunk", "minimum", "stored", "overhead"],
            [
                [
                    row.shape, row.groups, f"{row.tokens_per_chunk:,}", f"{row.minimum_bytes / row.tokens:,.0f}",
                    f"{row.stored_bytes / row.tokens:,.0f}", f"{row.overhead:.2%}",
                ]
                for row in rows
            ],
        )  # fmt: skip
    too_much = [row.shape for row in rows if row.overhead > LIMIT]
    if too_much:
        say(f"more than {LIMIT:.0%} above the minimum: {', '.join(too_much)}")
    return 1 if too_much else 0


def measure(agent: Agent, shape: str, tensor_parallel_size: int) -> Row:
    """Store prompts that share nothing, and compare. Each is finished before the next, so that each is computed in
    one step and vLLM keeps one state of it."""
    model = make_tiny_model(MODEL_FOLDER / shape, shape, report=say)
    with engine(agent, model, shape, tensor_parallel_size) as llm:
        core = llm.llm_engine.engine_core.engine_core
        tokens_per_chunk = core.scheduler.connector._scheduler.plan.tokens_per_chunk
        rng = random.Random(3)
        for num_tokens in PROMPT_TOKENS:
            answer(llm, [rng.randrange(4, 1024) for _ in range(num_tokens)])
            while core.scheduler.has_requests():  # saves in flight
                core.step()
        with AgentAdmin(agent.target) as admin:
            stored_bytes = admin.status().used_bytes
        config = core.scheduler.kv_cache_config
        replicas = config.kv_tp_replicas
        minimum = sum(
            readable_bytes(
                group.kv_cache_spec, len(group.layer_names), num_tokens, tokens_per_chunk
            )
            for group in config.kv_cache_groups
            for num_tokens in PROMPT_TOKENS
        )
        return Row(
            shape=shape,
            groups=", ".join(names_of_groups(config)),
            tokens_per_chunk=tokens_per_chunk,
            tensor_parallel_size=tensor_parallel_size,
            tokens=sum(n // tokens_per_chunk * tokens_per_chunk for n in PROMPT_TOKENS),
            minimum_bytes=minimum * tensor_parallel_size // replicas,
            stored_bytes=stored_bytes,
        )


def readable_bytes(spec: Any, num_layers: int, num_tokens: int, tokens_per_chunk: int) -> int:
    """Bytes of one rank's unpadded pages of one group that some hit on a prompt of `num_tokens` reads.

    vLLM 0.32, v1/kv_cache_interface.py: what the classes of specs mean.
    """
    name = type(spec).__name__
    ends = range(tokens_per_chunk, num_tokens + 1, tokens_per_chunk)
    if name == "MambaSpec":
        state_bytes = sum(
            math.prod(shape) * dtype.itemsize
            for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True)
        )
        return num_layers * state_bytes * min(1, len(ends))
    blocks: set[int] = set()
    for end in ends:
        first = 0
        if name == "SlidingWindowSpec":
            first = max(0, end - (spec.sliding_window - 1))
        elif name not in ("FullAttentionSpec", "MLAAttentionSpec"):
            raise NotImplementedError(f"this bench does not know what a hit reads of {name}")
        blocks.update(range(first // spec.block_size, end // spec.block_size))
    return num_layers * spec.unpadded_page_size_bytes * len(blocks)


def names_of_groups(config: Any) -> Iterator[str]:
    """Such as `10 sliding 256`: layers, kind and window."""
    kinds = {"FullAttentionSpec": "full", "MLAAttentionSpec": "latent", "MambaSpec": "state"}
    counts: dict[str, int] = {}
    for group in config.kv_cache_groups:
        spec = group.kv_cache_spec
        window = getattr(spec, "sliding_window", None)
        kind = f"sliding {window}" if window else kinds[type(spec).__name__]
        counts[kind] = counts.get(kind, 0) + len(group.layer_names)
    return (f"{count} {kind}" for kind, count in counts.items())


def answer(llm: Any, prompt: Sequence[int]) -> None:
    """One token."""
    from vllm import SamplingParams

    llm.generate(
        [{"prompt_token_ids": list(prompt)}],
        SamplingParams(temperature=0.0, max_tokens=1, detokenize=False),
        use_tqdm=False,
    )


@contextmanager
def engine(agent: Agent, model: Path, shape: str, tensor_parallel_size: int) -> Iterator[Any]:
    """A vLLM engine of the model, with blocks and chunks as vLLM and the connector choose them."""
    from vllm import LLM
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import ensure_kv_transfer_shutdown
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    ranks: dict[str, Any] = {}
    if tensor_parallel_size > 1:
        ranks = {"tensor_parallel_size": tensor_parallel_size, "distributed_executor_backend": "mp"}
    llm = LLM(
        model=str(model), dtype=TINY[shape].dtype, skip_tokenizer_init=True, enforce_eager=True, max_model_len=4096,
        max_num_batched_tokens=4096, kv_cache_memory_bytes=256 << 20, prefix_caching_hash_algo="sha256_cbor",
        kv_transfer_config=KVTransferConfig(
            kv_connector="LarderConnector", kv_connector_module_path="cacheservice.connector", kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={
                "socket_dir": str(agent.target.socket_dir), "lookup_ms": 5000, "reserve_ms": 10000, "commit_ms": 10000
            },
        ),
        **ranks,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        ensure_kv_transfer_shutdown()
        del llm
        cleanup_dist_env_and_memory()


if __name__ == "__main__":
    sys.exit(main())
