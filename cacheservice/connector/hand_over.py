"""The hand-over between a prefill and a decode engine: `{"larder": {...}}` in vLLM's `kv_transfer_params`. Pure.

Prefill's answer names what it stored and where; decode waits for exactly that, then computes the rest. Whatever a
client sends here is untrusted: anything malformed is ignored, and the wait is clamped, so that no client can hold an
engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cacheservice.core.keys import DIGEST_BYTES, NamespaceDigest

PARAMS_KEY = "larder"
MAX_CHUNKS = 4096


@dataclass(frozen=True, slots=True)
class HandOver:
    """What a prefill engine promises."""

    namespace: NamespaceDigest
    node: int
    """Number of the owner's node in the index; 0 = no index, the chunks are at this agent or nowhere."""
    epoch: int
    num_chunks: int
    wait_s: float
    """Already clamped to this engine's own maximum."""

    @property
    def owner(self) -> tuple[int, int] | None:
        """Node and epoch of the owner, as a lookup names them."""
        return (self.node, self.epoch) if self.node else None


def read_hand_over(params: Any, *, longest_wait_s: float) -> HandOver | None:
    """Parse the parameters of a request; None when there is no well-formed hand-over of ours in them."""
    if not isinstance(params, Mapping) or not isinstance(ours := params.get(PARAMS_KEY), Mapping):
        return None
    try:
        namespace = bytes.fromhex(ours["namespace"])
    except (KeyError, TypeError, ValueError):
        return None
    numbers = [ours.get(name) for name in ("node", "epoch", "num_chunks", "wait_ms")]
    if len(namespace) != DIGEST_BYTES or not all(
        isinstance(n, int) and not isinstance(n, bool) for n in numbers
    ):
        return None
    node, epoch, num_chunks, wait_ms = (int(n) for n in numbers if n is not None)
    if not (
        0 <= node < 1 << 16
        and 0 <= epoch < 1 << 32
        and 0 < num_chunks <= MAX_CHUNKS
        and wait_ms >= 0
    ):
        return None
    return HandOver(
        NamespaceDigest(namespace),
        node,
        epoch,
        num_chunks,
        min(wait_ms, longest_wait_s * 1000) / 1000,
    )


def has_foreign_hand_over(params: Any) -> bool:
    """Whether the parameters hold something under our name at all (to count what is ignored)."""
    return isinstance(params, Mapping) and PARAMS_KEY in params


def write_hand_over(hand_over: HandOver) -> dict[str, Any]:
    """The parameters for the answer of a prefill engine."""
    return {
        PARAMS_KEY: {
            "namespace": hand_over.namespace.hex(),
            "node": hand_over.node,
            "epoch": hand_over.epoch,
            "num_chunks": hand_over.num_chunks,
            "wait_ms": round(hand_over.wait_s * 1000),
        }
    }
