"""Write checkpoints with random weights that real vLLM loads, with no access to a model hub.

    python -m cacheservice.local.model OUTDIR                                   the demo model
    python -m cacheservice.local.model OUTDIR --tiny llama --dtype bfloat16     a model of 2 M parameters, for tests

Invariants: a folder that has its marker file (`larder-model.json`) is complete, since the folder is written beside its
place and then renamed; a complete one of the same recipe is left alone. Called by `larder up`, `make demo` and tests.
torch and transformers are imported inside the functions: importing this module costs nothing.

Weights are drawn wide on purpose. With the usual deviation of 0.02 a random model repeats one token whatever it is
given, and a corrupted KV cache goes unnoticed; here the greedy output depends on the whole context.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cacheservice.errors import ConfigError
from cacheservice.local.model_recipes import DEMOS, TINY, Dtype, Recipe

if TYPE_CHECKING:
    import torch

MARKER = "larder-model.json"
SLOWEST_DECAY, FASTEST_DECAY = 0.002, 0.05
NARROW = 0.02
Report = Callable[[str], None]


def make_demo_model(folder: Path, shape: str = "llama", *, report: Report) -> Path:
    """Make the demo model of `shape` (a key of DEMOS) in `folder` (340 MB, about 15 s) unless it is there.

    `report` gets one line before each slow step. Raises ConfigError when the folder holds something else.
    """
    return make_model(folder, DEMOS[shape], report=report)


def make_tiny_model(
    folder: Path, name: str = "llama", *, dtype: Dtype | None = None, report: Report
) -> Path:
    """Make the model for tests called `name` (a key of TINY; KeyError otherwise) in `folder` unless it is there.

    `dtype` None is that of the recipe.
    """
    recipe = TINY[name] if dtype is None else replace(TINY[name], dtype=dtype)
    return make_model(folder, recipe, report=report)


def make_model(folder: Path, recipe: Recipe, *, report: Report) -> Path:
    """Make `recipe` in `folder` unless it is complete there. Safe against a second process that does the same."""
    if is_complete(folder, recipe):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _only_one_maker(folder):
        if is_complete(folder, recipe):  # another process made it while this one waited
            return folder
        if folder.exists() and not folder.is_dir():
            raise ConfigError(f"{folder} is a file: name a folder")
        if folder.exists() and any(folder.iterdir()) and not (folder / MARKER).exists():
            raise ConfigError(
                f"{folder} is not empty and was not made by Larder: name another folder, or an empty one"
            )
        scratch = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            made = scratch / "new"
            made.mkdir()
            _write_model(made, recipe, report)
            if folder.exists():
                folder.rename(scratch / "old")
            made.rename(folder)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
    return folder


def is_complete(folder: Path, recipe: Recipe) -> bool:
    """Whether `folder` holds every file of `recipe`, each with the size that it was written with."""
    try:
        marker = json.loads((folder / MARKER).read_text(encoding="utf-8"))
        sizes = dict(marker["files"])
        return marker["recipe"] == recipe.digest and all(
            (folder / name).stat().st_size == num_bytes for name, num_bytes in sizes.items()
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _only_one_maker(folder: Path) -> Iterator[None]:
    """Hold a lock beside the folder. The file stays: to unlink it would let two makers hold two different locks."""
    descriptor = os.open(
        folder.parent / f".{folder.name}.lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_model(folder: Path, recipe: Recipe, report: Report) -> None:
    report("loading torch and transformers")
    import torch
    import transformers

    transformers.utils.logging.disable_progress_bar()

    report(f"training a tokenizer of {recipe.vocab_size} tokens")
    _write_tokenizer(folder, recipe)

    config = getattr(transformers, recipe.config_class)(
        vocab_size=recipe.vocab_size, max_position_embeddings=recipe.max_tokens, tie_word_embeddings=False,
        unk_token_id=0, bos_token_id=1, eos_token_id=2, pad_token_id=3, **recipe.config,
    )  # fmt: skip
    for name, value in recipe.lost_by_transformers.items():
        setattr(config, name, value)
    torch.manual_seed(recipe.seed)  # for what an architecture draws and `_draw_weights` leaves
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    report(f"drawing {num_parameters / 1e6:.0f} M weights")
    _draw_weights(model, recipe)
    model = model.to(getattr(torch, recipe.dtype))
    num_bytes = sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    )
    report(f"writing {num_bytes / 1e6:.0f} MB to {folder.parent.parent}")
    model.save_pretrained(folder)
    _finish(folder, recipe)


def _draw_weights(model: torch.nn.Module, recipe: Recipe) -> None:
    """Replace the initial weights. Drawn in fp32 on the CPU from an own generator, in the order of the names."""
    import torch

    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            _draw(name, parameter, recipe, generator)


def _draw(name: str, weight: torch.Tensor, recipe: Recipe, generator: torch.Generator) -> None:
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        weight.add_(
            recipe.query_key_gain - 1
        )  # zero-centred in some architectures: begins at 0 or at 1
    elif name.endswith("A_log"):
        # Decay per token of recurrent state. As transformers draws it most heads forget within a few tokens, and a
        # state that was corrupted would change nothing.
        weight.uniform_(math.log(SLOWEST_DECAY), math.log(FASTEST_DECAY), generator=generator)
    elif name.endswith(("bias", "sinks")) and "dt_bias" not in name:
        weight.normal_(
            0.0, NARROW, generator=generator
        )  # from_config leaves some of these as they lie in memory
    elif weight.dim() < 2:
        pass  # the weights of norms stay 1
    elif "embed_tokens" in name:
        weight.normal_(0.0, recipe.embedding_deviation, generator=generator)
    else:
        is_query_or_key = "q_proj" in name or "k_proj" in name
        gain = recipe.query_key_gain if is_query_or_key else recipe.weight_gain
        weight.normal_(0.0, gain / _input_width(name, weight, recipe) ** 0.5, generator=generator)
        if "lm_head" in name:
            # Logits of <unk>, <s>, </s> and <pad> are 0, which never wins: answers are as long as
            # they are asked to be.
            weight[:4] = 0.0


def _input_width(name: str, weight: torch.Tensor, recipe: Recipe) -> int:
    """Numbers that one output sums over. Stacked experts are [expert, out, in], those of gpt-oss [expert, in, out]."""
    if "conv1d" in name:
        return int(weight.shape[-1])  # each channel by itself
    if weight.dim() == 3:
        return int(weight.shape[1 if recipe.config_class == "GptOssConfig" else 2])
    return int(weight.shape[1])


def _write_tokenizer(folder: Path, recipe: Recipe) -> None:
    """Train a byte-level BPE on the language reference that comes with Python, and give it a minimal chat template."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    lines = [line for name in sorted(topics) for line in topics[name].splitlines()]
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocab_size,
        special_tokens=["<unk>", "<s>", "</s>", "<pad>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(lines, trainer)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=recipe.max_tokens,
    )
    tokenizer.chat_template = (
        "{% for m in messages %}<s>{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}<s>assistant:{% endif %}"
    )
    tokenizer.save_pretrained(folder)


def _finish(folder: Path, recipe: Recipe) -> None:
    """Flush every file to disk and write the marker: after a power cut a renamed folder must not hold empty files."""
    sizes = {}
    for path in sorted(folder.iterdir()):
        path.chmod(0o644)  # safetensors writes 0600, and an engine may run as another user
        sizes[path.name] = path.stat().st_size
        with path.open("rb") as file:
            os.fsync(file.fileno())
    marker = {"recipe": recipe.digest, **asdict(recipe), "files": sizes}
    (folder / MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m cacheservice.local.model",
        description=__doc__.splitlines()[0] if __doc__ else None,
    )
    parser.add_argument(
        "outdir", type=Path, help="folder to make; left alone when the model is there already"
    )
    parser.add_argument(
        "--tiny",
        choices=sorted(TINY),
        help="a small model for tests (default: the demo model, 340 MB)",
    )
    parser.add_argument(
        "--shape",
        choices=sorted(DEMOS),
        default="llama",
        help="of the demo model (default: llama)",
    )
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of a small model (default: float32 where vLLM's CPU kernels take it)",
    )
    options = parser.parse_args(arguments)

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    try:
        if options.tiny:
            folder = make_tiny_model(
                options.outdir, options.tiny, dtype=options.dtype, report=report
            )
        else:
            folder = make_demo_model(options.outdir, options.shape, report=report)
    except ConfigError as error:
        report(f"error: {error}")
        return 2
    print(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
