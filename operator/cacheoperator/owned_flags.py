"""Flags of vLLM that Larder sets itself, in every spelling that vLLM's parser takes.

vLLM's FlexibleArgumentParser (0.32, utils/argparse_utils.py) takes `_` for `-`, `--flag=value`, `--flag.key value`, and
every beginning of a flag that is not the beginning of another one too. Which beginnings those are changes with each
version of vLLM, so every beginning of an owned flag is refused, also the ambiguous ones, which vLLM refuses itself.
A flag of vLLM that is not owned is never refused in full (tested against the parser).

`args` of a KVCache were checked by the schema's rule already (cacheservice.manifest.rules.owned_argument); this is for
templates, whose content the schema does not see. Pure; called by objects/engines.py.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_PARALLEL = "only tensor parallelism is in this version (tensorParallelSize)"
_SPAN = "an engine is one pod in this version"
_HTTP = "the router and the probes speak plain HTTP with engines"
_CACHE = "the cache depends on it"

OWNED: dict[str, str] = {
    "kv-transfer-config": _CACHE,
    "kv-offloading-size": "the agent keeps KV outside the engine",
    "kv-offloading-backend": "the agent keeps KV outside the engine",
    "prefix-caching-hash-algo": _CACHE,
    "disable-hybrid-kv-cache-manager": _CACHE,
    "no-disable-hybrid-kv-cache-manager": _CACHE,
    "tensor-parallel-size": "write tensorParallelSize",
    "pipeline-parallel-size": _PARALLEL,
    "prefill-context-parallel-size": _PARALLEL,
    "decode-context-parallel-size": _PARALLEL,
    "nnodes": _SPAN,
    "node-rank": _SPAN,
    "master-addr": _SPAN,
    "master-port": _SPAN,
    "model": "write spec.model",
    "revision": "write spec.model.revision",
    "served-model-name": "write spec.model.servedName",
    "hf-token": "write spec.model.tokenSecretRef",
    "api-key": "write spec.engine.apiKeySecretRef",
    "host": "the router and the probes expect engines on all addresses",
    "port": "the router and the probes expect engines on port 8000",
    "uds": "the router and the probes expect engines on port 8000",
    "headless": _HTTP,
    "grpc": _HTTP,
    "grpc-port": _HTTP,
    "config": "flags in a file can't be checked: write them into args",
}  # fmt: skip
"""Long flag without its dashes, and what a user does instead."""

OWNED_FAMILIES: dict[str, str] = {
    "data-parallel-": _PARALLEL,
    "no-data-parallel-": _PARALLEL,
    "ssl-": _HTTP,
}
"""Beginnings of flags that are owned whatever follows."""

OWNED_SHORT: dict[str, str] = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-pcp": "--prefill-context-parallel-size",
    "-dcp": "--decode-context-parallel-size",
    "-dp": "--data-parallel-*",
    "-n": "--nnodes",
    "-r": "--node-rank",
}
"""Short flag and the long one, or the family, that it stands for. -dpr, -dpl and so on begin with -dp."""

UNOWNED_SHORT = frozenset({"-dc"})
"""Full short flags of vLLM that are also the beginning of an owned one: --diffusion-config."""


def check(args: Sequence[str]) -> str | None:
    """What is wrong with the arguments `args` of vLLM, or None: the first owned flag, and what to do instead."""
    for word in args:
        flag = owned_flag(word)
        if flag is not None:
            return _message(word, flag)
        if word.startswith("$("):
            # Kubernetes puts a variable of the container there, which may be any flag.
            return f"remove {word}: a variable may hold a flag that Larder sets itself; write --flag=$(NAME)"
    return None


def check_command(command: Sequence[str]) -> str | None:
    """The same for a container's `command`, which may begin with another program or be a script.

    Only long flags are looked for: the -p of `mkdir -p` is not vLLM's. Words inside a script count.
    """
    for argument in command:
        for word in _words(argument):
            flag = owned_flag(word) if word.startswith("--") else None
            if flag is not None:
                return _message(word, flag)
    return None


def owned_flag(word: str) -> str | None:
    """The owned flag that `word` is a spelling of, with its dashes, or None. A family ends with a star."""
    spelled = _cut(word)
    if spelled.startswith("--"):
        name = spelled[2:].replace("_", "-")
        return _owned_long(name) if name else None
    if len(spelled) < 2 or not spelled.startswith("-") or spelled in UNOWNED_SHORT:
        return None
    for short, flag in OWNED_SHORT.items():
        # A value may follow at once: -n2. Of flags with two letters vLLM 0.32 does not take that; others may.
        if short.startswith(spelled) or spelled.startswith(short):
            return flag
    return None


def _owned_long(name: str) -> str | None:
    for flag in OWNED:
        if flag.startswith(name):
            return f"--{flag}"
    for family in OWNED_FAMILIES:
        if family.startswith(name) or name.startswith(family):
            return f"--{family}*"
    return None


def _message(word: str, flag: str) -> str:
    name = flag.removeprefix("--").removesuffix("*")
    remedy = OWNED.get(name) or OWNED_FAMILIES[name]
    # Only the flag is shown: its value may be a secret, as behind --api-key=.
    return f"remove {_cut(word)}: Larder sets {flag} itself ({remedy})"


def _cut(word: str) -> str:
    """The flag in `word`: what stands before a value or the key of a nested value."""
    return re.split(r"[=.\s]", word, maxsplit=1)[0]


def _words(argument: str) -> list[str]:
    try:
        return shlex.split(argument)
    except ValueError:  # a script with an apostrophe in a comment or here-document
        return argument.split()
