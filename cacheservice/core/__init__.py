"""The pure core: what is decided, without clock, lock, network, torch or Redis.

Everything here is synchronous and deterministic: times come in as arguments, effects go out as return values. The agent
and the connector are its callers. Nothing here imports anything of Larder but itself and `cacheservice.errors`.
"""
