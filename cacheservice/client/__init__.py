"""The client of a cache agent: `CacheClient` for engines and agents, `AgentAdmin` for people.

Importing opens no channel and starts no thread; `CacheClient.start` does.
"""

from cacheservice.client.admin import AgentAdmin
from cacheservice.client.client import CacheClient
from cacheservice.client.copy import MemorySink, MemorySource
from cacheservice.client.values import (
    AgentTarget,
    ArenaUser,
    ChecksumPolicy,
    ClientIdentity,
    ClientState,
    DataPlane,
    Deadlines,
    Half,
    LookupAnswer,
    LookupWait,
    MappedArena,
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
    "ArenaUser",
    "CacheClient",
    "ChecksumPolicy",
    "ClientIdentity",
    "ClientState",
    "DataPlane",
    "Deadlines",
    "Half",
    "LookupAnswer",
    "LookupWait",
    "MappedArena",
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
