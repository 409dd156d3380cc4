"""The client of a cache agent: `CacheClient` for engines and agents, `AgentAdmin` for people.

Importing opens no channel and starts no thread; `CacheClient.start` does.
"""

from cacheservice.client.admin import AgentAdmin
from cacheservice.client.client import CacheClient
from cacheservice.client.copy import MemorySink, MemorySource
from cacheservice.client.values import (
    AgentTarget,
    ChecksumPolicy,
    ClientIdentity,
    ClientState,
    DataPlane,
    Deadlines,
    Half,
    LookupAnswer,
    LookupWait,
    PageSink,
    PageSource,
    RetrieveResult,
    Role,
    ShardRead,
    ShardWrite,
    StoreResult,
    TlsFiles,
)

__all__ = [
    "AgentAdmin",
    "AgentTarget",
    "CacheClient",
    "ChecksumPolicy",
    "ClientIdentity",
    "ClientState",
    "DataPlane",
    "Deadlines",
    "Half",
    "LookupAnswer",
    "LookupWait",
    "MemorySink",
    "MemorySource",
    "PageSink",
    "PageSource",
    "RetrieveResult",
    "Role",
    "ShardRead",
    "ShardWrite",
    "StoreResult",
    "TlsFiles",
]
