"""Entry point of the group `vllm.general_plugins`: makes `LarderConnector` known to vLLM by its name.

`kv_connector_module_path` alone is enough for a single connector. MultiConnector finds the metrics of its children by
class name (vLLM 0.32, kv_connector/v1/multi_connector.py), so the name must be registered too.
"""

from __future__ import annotations

NAME = "LarderConnector"


def register() -> None:
    """Register the connector unless it is registered already. vLLM calls this once in each of its processes."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if NAME not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(NAME, "cacheservice.connector", NAME)
