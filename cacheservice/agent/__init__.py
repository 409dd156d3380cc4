"""The cache agent: one process per node that owns the arena and serves it.

Start reading at `serve.py`, which puts the parts together. A call goes one way: `statuses.py` (checks who may call,
turns refusals into gRPC statuses) → `service.py` (checks the message) → `guarded_store.py` (the one core lock) → the
pure store. What needs waiting is in `acquire.py`, bytes over gRPC in `byte_streams.py`, other agents in `pulls.py`,
the index in `announcer.py` and `remote_hints.py`.
"""
