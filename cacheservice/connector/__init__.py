"""The vLLM connector, named in --kv-transfer-config as `LarderConnector` of the module `cacheservice.connector`.

Everything that Larder imports from vLLM and torch is in this package. Importing it opens no channel, starts no
thread and does not even import vLLM: the class is loaded when it is first asked for, because engines fork after they
load plugins. Raises RefusedError then where the engine's protobuf or grpcio is too old.
"""

from __future__ import annotations

from typing import Any

__all__ = ["LarderConnector"]


def __getattr__(name: str) -> Any:
    if name == "LarderConnector":
        from cacheservice.connector.libraries import check_wire_libraries

        check_wire_libraries()
        from cacheservice.connector.connector import LarderConnector

        return LarderConnector
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
