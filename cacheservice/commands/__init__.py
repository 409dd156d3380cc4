"""Command lines of every program that Larder starts: engines, agents, the router.

Pure: a manifest and a place in, argv and environment out. `larder up` starts them as processes, the operator as
containers; so that both start the same, this is the one place that knows the flags.
"""
