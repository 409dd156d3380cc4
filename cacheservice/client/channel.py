"""Opens gRPC channels to an agent, all with the same options.

Called by the session thread and by `AgentAdmin`; never at import, since engines fork.
"""

from __future__ import annotations

import grpc
from grpc.experimental import ChannelOptions

from cacheservice.client.tls import channel_credentials
from cacheservice.client.values import AgentTarget

MAX_MESSAGE_BYTES = 64 * 1024 * 1024

_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # The session decides when to try again; gRPC's own retries and shared back-off would hide a new agent for seconds.
    ("grpc.enable_retries", 0),
    ("grpc.use_local_subchannel_pool", 1),
    # Agents are inside the cluster or on this machine; a proxy from the environment is for others.
    ("grpc.enable_http_proxy", 0),
    # Streams are iterated in the caller's thread: one hop less for each Acquire (the session has its own reader).
    (ChannelOptions.SingleThreadedUnaryStream, 1),
)


def open_channel(target: AgentTarget) -> grpc.Channel:
    """A channel that connects on its first call. Raises ConfigError when TLS files can't be read."""
    if target.tls is None:
        return grpc.insecure_channel(target.grpc_target, options=_OPTIONS)
    options: tuple[tuple[str, int | str], ...] = _OPTIONS
    if target.tls.server_name is not None:
        options = (*options, ("grpc.ssl_target_name_override", target.tls.server_name))
    return grpc.secure_channel(target.grpc_target, channel_credentials(target.tls), options=options)
