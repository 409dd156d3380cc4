"""Which weights an engine runs, so that pods with their own download share a cache and fine-tunes never do.

The identity is the model's configuration and, per weight file, its size, the hash of its header and a hash over
samples of every tensor at the offsets that the header gives. Neither path nor mtime counts. Samples rather than all
bytes: a 140 GB model is identified in seconds, and training moves nearly every element of a tensor that it touches, so
it moves the samples. A sparse edit, such as single rows of an embedding, may leave all samples as they were: who edits
weights like that gives the engines another `salt`. Called by: namespace.py, once per engine, in the scheduler half.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from cacheservice.errors import RefusedError

SAMPLES_PER_TENSOR = 4
SAMPLE_BYTES = 256
STRIDE_BYTES = 1 << 20
STRIDE_SAMPLE_BYTES = 4096
MAX_HEADER_BYTES = 100_000_000
WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
MULTIMODAL_FIELDS = (
    "mm_encoder_attn_dtype",
    "mm_encoder_fp8_scale_path",
    "video_pruning_rate",
    "video_pruning_method",
    "mm_processor_kwargs",
)
"""Fields of vLLM 0.32's config/multimodal.py that change what the model makes of the same image. A request's own
processor arguments are in vLLM's hash of the image; those of the engine are not."""
UNIMPORTANT_KEYS = frozenset(
    {"_name_or_path", "transformers_version", "id2label", "label2id", "problem_type"}
)


def identify_model(model_config: Any, load_config: Any) -> dict[str, Any]:
    """JSON facts that differ when the model's configuration, what its processor does to images, or sampled weights
    do."""
    facts: dict[str, Any] = {
        "config": digest_of_config(model_config.hf_config),
        "uses_long_rope": _uses_long_rope(model_config),
        "multimodal": multimodal_facts(getattr(model_config, "multimodal_config", None)),
    }
    if str(load_config.load_format) == "dummy":
        return {**facts, "weights": f"dummy, seed {model_config.seed}"}
    place = Path(model_config.model)
    if not place.exists():
        place = _downloaded(
            str(model_config.model),
            model_config.revision,
            getattr(load_config, "download_dir", None),
        )
    files = [place] if place.is_file() else weight_files(place)
    if not files:
        raise RefusedError(
            f"the weights in {place} can't be identified: no file ends in {', '.join(WEIGHT_SUFFIXES)}; "
            "give --model a folder with the weights, so that engines with other weights never share a cache"
        )
    return {**facts, "weights": digest_of_files(files)}


def multimodal_facts(config: Any) -> dict[str, Any]:
    """What of the engine's multimodal configuration changes the KV of images; empty for models of text."""
    if config is None:
        return {}
    return {
        name: _canonical(getattr(config, name))
        for name in MULTIMODAL_FIELDS
        if hasattr(config, name)
    }


def weight_files(folder: Path) -> list[Path]:
    """The weight files of a folder: safetensors where there are any, else all known kinds; sorted by name."""
    for suffixes in ((".safetensors",), WEIGHT_SUFFIXES):
        files = sorted(p for p in folder.iterdir() if p.suffix in suffixes and p.is_file())
        if files:
            return files
    return []


def digest_of_files(files: list[Path]) -> str:
    """Hex SHA-256 over name, size, header and samples of each file."""
    total = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            header = _safetensors_header(file, size) if path.suffix == ".safetensors" else None
            samples = _stride_ranges(size) if header is None else _tensor_ranges(*header, size)
            digest = hashlib.sha256(header[1] if header else b"")
            for start, length in samples:
                digest.update(os.pread(file.fileno(), length, start))
            total.update(json.dumps([path.name, size, digest.hexdigest()]).encode())
    return total.hexdigest()


def digest_of_config(hf_config: Any) -> str:
    """Hex SHA-256 over the configuration as JSON, after overrides, without what does not change a computation."""
    return hashlib.sha256(
        json.dumps(_canonical(hf_config.to_dict()), sort_keys=True).encode()
    ).hexdigest()


def _canonical(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _canonical(v) for k, v in value.items() if k not in UNIMPORTANT_KEYS}
    if isinstance(value, list | tuple):
        return [_canonical(v) for v in value]
    if isinstance(value, set | frozenset):
        return sorted((_canonical(v) for v in value), key=lambda v: json.dumps(v, sort_keys=True))
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if hasattr(value, "to_dict"):
        return _canonical(value.to_dict())
    text = str(value)
    return f"<{type(value).__qualname__}>" if " at 0x" in text else text


def _uses_long_rope(model_config: Any) -> bool:
    """Phi-style long RoPE picks its factors by --max-model-len (vLLM 0.32, phi3_long_rope_scaled_rope.py)."""
    config = model_config.hf_text_config
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "longrope":
        return False
    original = rope.get("original_max_position_embeddings") or getattr(
        config, "original_max_position_embeddings", None
    )
    return original is not None and model_config.max_model_len > original


def _downloaded(model: str, revision: str | None, cache_dir: str | None) -> Path:
    """Folder of a model that vLLM has fetched from a hub, into `--download-dir` if one is given."""
    try:
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(model, revision=revision, cache_dir=cache_dir, local_files_only=True)
        )
    except Exception as error:
        raise RefusedError(
            f"the weights of model {model!r} are not on this machine, so they can't be identified: "
            "download the model and give --model its folder"
        ) from error


def _safetensors_header(file: BinaryIO, size: int) -> tuple[dict[str, Any], bytes] | None:
    """Parsed and raw header: u64 length, then JSON `{name: {dtype, shape, data_offsets: [start, stop]}}`."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(MAX_HEADER_BYTES, size - 8):
        return None
    raw = file.read(length)
    try:
        header = json.loads(raw)
    except ValueError:
        return None
    return (header, raw) if isinstance(header, dict) else None


def _tensor_ranges(header: dict[str, Any], raw: bytes, size: int) -> list[tuple[int, int]]:
    base = 8 + len(raw)
    ranges = []
    for name, tensor in sorted(header.items()):
        if name == "__metadata__":
            continue
        start, stop = (base + int(offset) for offset in tensor["data_offsets"])
        stop = min(stop, size)
        length = stop - start
        if length <= SAMPLES_PER_TENSOR * SAMPLE_BYTES:
            ranges.append((start, max(0, length)))
            continue
        last = length - SAMPLE_BYTES
        ranges.extend(
            (start + i * last // (SAMPLES_PER_TENSOR - 1), SAMPLE_BYTES)
            for i in range(SAMPLES_PER_TENSOR)
        )
    return ranges


def _stride_ranges(size: int) -> list[tuple[int, int]]:
    """For files whose tensors can't be found: the start of every MiB, and the end."""
    ends = [(max(0, size - STRIDE_SAMPLE_BYTES), STRIDE_SAMPLE_BYTES)]
    return [(start, STRIDE_SAMPLE_BYTES) for start in range(0, size, STRIDE_BYTES)] + ends
