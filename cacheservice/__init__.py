"""Larder's cache service: agent, client, vLLM connector and the `larder` command.

Importing this package opens no channel, starts no thread and imports nothing: engines fork after they load it.
"""

__version__ = "0.1.0"
