"""vLLM's functions that plan a KV cache, wherever the vLLM at hand keeps them: 0.33 moved them to a new module.

Used by: scheduler_harness.py, scheduler_life.py, which run on the pinned vLLM and on the newest one.
"""

from __future__ import annotations

try:
    from vllm.v1.core.kv_cache_planning import (
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
        kv_cache_groups_tp_replicas,
    )
except ModuleNotFoundError:
    from vllm.v1.core.kv_cache_utils import (  # 0.32
        get_kv_cache_config_from_groups,
        get_kv_cache_groups,
        kv_cache_groups_tp_replicas,
    )

__all__ = ["get_kv_cache_config_from_groups", "get_kv_cache_groups", "kv_cache_groups_tp_replicas"]
