"""The models that Larder makes: complete or absent, made once, and not blind to their context."""

import json
import multiprocessing
import re
import subprocess
import sys
from pathlib import Path

import pytest

from cacheservice.errors import ConfigError
from cacheservice.local import model as maker
from cacheservice.local.model import MARKER, is_complete, make_model, make_tiny_model
from cacheservice.local.model_recipes import DEMO, DEMO_SHAPES, DEMOS, TINY, Recipe
from cacheservice.manifest import load_manifest

ROOT = Path(__file__).resolve().parents[1]


def silent(line: str) -> None:
    assert line


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama", report=silent)


def entries(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_model_is_a_complete_checkpoint_with_tokenizer_and_chat_template(tiny):
    assert is_complete(tiny, TINY["llama"])
    config = json.loads((tiny / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["dtype"] == "float32"
    assert config["max_position_embeddings"] >= 8192
    assert {"model.safetensors", "tokenizer.json", "chat_template.jinja", MARKER} <= entries(tiny)
    assert not [path for path in tiny.iterdir() if path.stat().st_mode & 0o044 != 0o044], (
        "not readable by all"
    )


def test_text_survives_the_tokenizer(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny)
    text = "The pantry keeps what was cooked: naïve 🍞 2 × 3 = 6\n\tdone"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<s>user: hello\n<s>assistant:"


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptoss", "qwen3next"])
def test_greedy_output_depends_on_early_tokens_and_does_not_repeat_itself(name, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path / name, name, report=silent)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(4, 1000, (1, 300), generator=draw).repeat(4, 1)
    prompts[1:, 20:36] = torch.randint(4, 1000, (3, 16), generator=draw)
    answers = model.generate(prompts, max_new_tokens=12, do_sample=False)[:, 300:].tolist()
    assert len({tuple(answer) for answer in answers}) == 4, "a change far back is not seen"
    assert all(len(set(answer)) > 6 for answer in answers), "one token is repeated"
    assert not {token for answer in answers for token in answer} & {0, 1, 2, 3}, (
        "an answer ends by itself"
    )


@pytest.mark.parametrize("name", sorted(TINY))
def test_weights_of_every_tiny_model_are_finite_and_the_same_each_time(name, tmp_path):
    """from_config leaves parameters of some architectures as they lie in memory."""
    import torch
    from safetensors.torch import load_file

    first, second = (
        load_file(
            make_tiny_model(tmp_path / place / name, name, report=silent) / "model.safetensors"
        )
        for place in ("one", "two")
    )
    assert first.keys() == second.keys()
    for tensor, weight in first.items():
        assert torch.isfinite(weight).all(), tensor
        assert torch.equal(weight, second[tensor]), tensor
    config = json.loads((tmp_path / "one" / name / "config.json").read_text())
    assert TINY[name].lost_by_transformers.items() <= config.items()


@pytest.mark.parametrize("shape", sorted(DEMOS))
def test_make_demo_runs_an_example_that_makes_the_model_of_that_shape(shape):
    command = subprocess.run(
        ["make", "-n", "demo", f"MODEL={shape}"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout  # fmt: skip
    example = re.search(r"larder demo (\S+)", command)
    assert example is not None, command
    manifest = load_manifest(ROOT / example[1])
    assert manifest.model is not None
    assert DEMO_SHAPES[manifest.model.name] == shape
    dtype = f"--dtype={DEMOS[shape].dtype}"
    for role in (manifest.prefill, manifest.decode):
        assert role is not None
        assert dtype in role.args
    assert len({recipe.name for recipe in DEMOS.values()}) == len(DEMOS), "two share a folder"


def test_complete_model_is_left_alone(tiny):
    before = {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()}
    make_tiny_model(tiny, report=lambda line: pytest.fail(f"works again: {line}"))
    assert {path.name: path.stat().st_mtime_ns for path in tiny.iterdir()} == before


@pytest.fixture
def writer(monkeypatch):
    """A stand-in for the part that needs torch; returns the number of models written so far."""
    written = []

    def write(folder: Path, recipe: Recipe, report: maker.Report) -> None:
        report("writing")
        written.append(folder)
        (folder / "weights").write_bytes(b"w" * 100)
        maker._finish(folder, recipe)

    monkeypatch.setattr(maker, "_write_model", write)
    return written


@pytest.mark.parametrize("damage", ["file lost", "file cut", "other recipe", "marker garbled"])
def test_incomplete_or_other_model_is_made_again(tmp_path, writer, damage):
    folder = make_model(tmp_path / "m", DEMO, report=silent)
    marker = folder / MARKER
    if damage == "file lost":
        (folder / "weights").unlink()
    elif damage == "file cut":
        (folder / "weights").write_bytes(b"w")
    elif damage == "other recipe":
        marker.write_text(json.dumps({**json.loads(marker.read_text()), "recipe": "0"}))
    else:
        marker.write_text("[1")
    assert not is_complete(folder, DEMO)
    make_model(folder, DEMO, report=silent)
    assert is_complete(folder, DEMO)
    assert entries(tmp_path) == {"m", ".m.lock"}, "scratch is left behind"


def test_failed_attempt_leaves_the_old_model_and_no_scratch(tmp_path, writer, monkeypatch):
    folder = make_model(tmp_path / "m", DEMO, report=silent)

    def fail(folder: Path, recipe: Recipe, report: maker.Report) -> None:
        (folder / "half").write_bytes(b"h")
        raise KeyboardInterrupt

    monkeypatch.setattr(maker, "_write_model", fail)
    with pytest.raises(KeyboardInterrupt):
        make_model(folder, TINY["llama"], report=silent)
    assert is_complete(folder, DEMO)
    assert entries(tmp_path) == {"m", ".m.lock"}


def test_folder_of_somebody_else_is_not_overwritten(tmp_path, writer):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="not made by Larder"):
        make_model(tmp_path / "m", DEMO, report=silent)
    assert entries(tmp_path / "m") == {"thesis.tex"}
    assert not writer


def test_path_that_is_a_file_is_refused_in_words(tmp_path, writer):
    (tmp_path / "m").write_text("x")
    with pytest.raises(ConfigError, match="is a file"):
        make_model(tmp_path / "m", DEMO, report=silent)


def _make_in_process(folder: Path, answers) -> None:
    def write(folder: Path, recipe: Recipe, report: maker.Report) -> None:
        answers.put("wrote")
        (folder / "weights").write_bytes(b"w" * 100)
        maker._finish(folder, recipe)

    maker._write_model = write
    make_model(folder, DEMO, report=silent)
    answers.put("done")


def test_two_processes_make_it_once(tmp_path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    makers = [
        context.Process(target=_make_in_process, args=(tmp_path / "m", answers)) for _ in range(3)
    ]
    for process in makers:
        process.start()
    said = sorted(answers.get(timeout=60) for _ in range(4))
    for process in makers:
        process.join(60)
    assert said == ["done", "done", "done", "wrote"]


def test_command_prints_the_folder_and_refuses_in_words(tiny, tmp_path):
    command = [sys.executable, "-m", "cacheservice.local.model"]
    done = subprocess.run(
        [*command, str(tiny), "--tiny", "llama"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"{tiny}\n", "")
    (tmp_path / "file").write_text("x")
    refused = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "not made by Larder" in refused.stderr
