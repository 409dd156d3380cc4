"""bench/stored_bytes.py: its minimum is that of the design, and a real engine stores no more than two percent above."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import engines  # noqa: F401 - sets vLLM's environment
import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.engine
@pytest.mark.timeout(600)
def test_windows_and_state_take_what_hits_read_and_hardly_more() -> None:
    done = subprocess.run(
        [sys.executable, "bench/stored_bytes.py", "--json", "--shapes", "gptoss,qwen3next"],
        cwd=ROOT, capture_output=True, text=True, check=False, timeout=550,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["bench"] == "stored_bytes"
    windows, state = found["rows"]
    assert windows["groups"] == "2 sliding 128, 2 full"
    assert state["groups"] == "3 state, 1 full"
    for row in (windows, state):
        assert row["minimum_bytes"] <= row["stored_bytes"] <= 1.02 * row["minimum_bytes"], row
    # In fp32, per layer and token: K and V of two heads of 64. Windows: 127 tokens, one block of 128, per chunk.
    per_token = 2 * 2 * 64 * 4
    num_chunks = windows["tokens"] // windows["tokens_per_chunk"]
    assert (
        windows["minimum_bytes"]
        == 2 * per_token * windows["tokens"] + 2 * per_token * 128 * num_chunks
    )


@pytest.mark.parametrize("arguments", [["--shapes", "llama,bert"], ["--shapes", ""]])
def test_a_shape_that_is_not_known_is_refused_before_anything_starts(arguments: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "bench/stored_bytes.py", *arguments],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "gemma3" in done.stderr


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import stored_bytes

    return stored_bytes


def test_the_minimum_counts_each_block_that_some_hit_reads_once(bench: Any) -> None:
    """Two chunks of 256 tokens in a prompt of 600, blocks of 64; one head of 32 + 32 in fp32, so 16,384 B per block."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec, SlidingWindowSpec

    page: dict[str, Any] = {
        "block_size": 64, "num_kv_heads": 1, "head_size": 32, "dtype": torch.float32, "page_size_padded": 99_999,
    }  # fmt: skip

    def blocks(spec: Any) -> float:
        return float(bench.readable_bytes(spec, 1, 600, 256) / 16_384)

    assert blocks(FullAttentionSpec(**page)) == 8
    # A hit at 256 and one at 512 read the 64 or 129 tokens before; all of both chunks from 512 on.
    assert blocks(SlidingWindowSpec(**page, sliding_window=65)) == 2
    assert blocks(SlidingWindowSpec(**page, sliding_window=66)) == 4
    assert blocks(SlidingWindowSpec(**page, sliding_window=130)) == 6
    assert blocks(SlidingWindowSpec(**page, sliding_window=2000)) == 8
    state = MambaSpec(
        block_size=256, shapes=((3, 4), (2, 2)), dtypes=(torch.bfloat16, torch.float32)
    )
    assert bench.readable_bytes(state, 2, 600, 256) == 2 * (12 * 2 + 4 * 4)
    assert bench.readable_bytes(state, 2, 255, 256) == 0
