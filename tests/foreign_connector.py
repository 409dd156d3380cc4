"""A connector of somebody else's, beside ours under MultiConnector: offers what it is told to, and fails to bring it.

Its loads are synchronous: vLLM computes with the pages in the step that loads them, and learns only afterwards that a
load has failed. Called by: test_engine_features_live.py, in one process with the engine.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

RUBBISH = 7.0


class ForeignMetadata(KVConnectorMetadata):
    """Blocks that the ranks shall load."""

    def __init__(self, blocks: list[int]) -> None:
        self.blocks = blocks


class ForeignReports(KVConnectorWorkerMetadata):
    """Something that ours must not take for its own."""

    def aggregate(self, other: Any) -> Any:
        """Merge with another rank's."""
        return self


class ForeignConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring."""

    offered_tokens = 0
    """What it says to have of every prompt. Set by the test, for both halves."""
    num_failed = 0
    """Blocks that it failed to load."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._blocks: list[int] = []
        self._failed: set[int] = set()
        self._pages: dict[str, torch.Tensor] = {}

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        limit = min(self.offered_tokens, request.num_tokens - 1)
        return max(0, limit - num_computed_tokens), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens > 0:
            per_block = self._kv_cache_config.kv_cache_groups[0].kv_cache_spec.block_size
            self._blocks += blocks.get_block_ids()[0][: num_external_tokens // per_block]

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        blocks, self._blocks = self._blocks, []
        return ForeignMetadata(blocks)

    def request_finished_all_groups(
        self, request: Any, block_ids: Any
    ) -> tuple[bool, dict[str, Any]]:
        return False, {"foreign": request.request_id}

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._pages = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, ForeignMetadata), "another connector's metadata"
        for pages in self._pages.values():
            pages[metadata.blocks] = RUBBISH
        self._failed |= set(metadata.blocks)
        ForeignConnector.num_failed += len(metadata.blocks)

    def get_block_ids_with_load_errors(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata:
        return ForeignReports()

    def wait_for_layer_load(self, layer_name: str) -> None: ...

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None: ...

    def wait_for_save(self) -> None: ...
