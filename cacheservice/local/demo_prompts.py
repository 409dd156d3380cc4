"""Real text for the demo, from what every installation has: licences, docstrings and the language reference of Python.

Nothing of it is in this repository. The same installation always gives the same prompts; `digest` names them, since
another version of a package gives others. Called by `demo`.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

CutText = Callable[[str, int], str]
"""The beginning of a text that has so many tokens."""

LICENCE_OF = ("numpy", "grpcio", "transformers", "xxhash")
DOCSTRINGS_OF = (
    "argparse",
    "logging",
    "subprocess",
    "datetime",
    "decimal",
    "statistics",
    "typing",
    "threading",
    "shutil",
)
CHARACTERS_PER_TOKEN = 3.5
"""For models without tokenizer.json only."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request of the demo. `name` says what it shows."""

    name: str
    text: str
    max_tokens: int


def build_prompts(cut: CutText) -> list[Prompt]:
    """Documents of 2 to 6 thousand tokens, two questions about one of them, and a conversation of three turns."""
    manual, reference = _docstrings(DOCSTRINGS_OF), _reference()
    prompts = [
        _about(
            "licence", cut(_licences(LICENCE_OF), 2000), "What must a copy of this software carry?"
        ),
        _about("manual", cut(manual, 4000), "Which of these functions raise an exception?"),
        _about("manual, 2nd question", cut(manual, 4000), "How is a logger found by its name?"),
        _about("reference", cut(reference, 6000), "When is an object's truth value false?"),
    ]
    turns = [
        "Tell me how a program is started from another one.",
        "And how does it wait for the end of that program?",
        "What happens if it takes too long?",
    ]
    # The replies are given, not generated: every engine gets the same conversation.
    replies = [
        cut(_docstrings(("subprocess",)), 500),
        cut(_docstrings(("asyncio.subprocess", "signal", "queue")), 400),
    ]
    said = "The assistant knows this text.\n\n" + cut(
        _docstrings(("multiprocessing.pool", "unittest.mock", "socket")) + manual[20000:], 1500
    )
    for index, question in enumerate(turns):
        said += f"\n\nUser: {question}\nAssistant:"
        prompts.append(Prompt(f"conversation, turn {index + 1}", said, MAX_TOKENS))
        if index < len(replies):
            said += f" {replies[index]}"
    return prompts


MAX_TOKENS = 16


def digest(prompts: list[Prompt]) -> str:
    """Names the prompts, lengths of answers included."""
    return hashlib.sha256(
        repr([(prompt.text, prompt.max_tokens) for prompt in prompts]).encode()
    ).hexdigest()[:16]


def token_cutter(model: Path) -> CutText:
    """Cuts by the tokenizer of the model in `model`; by characters when it has none that can be read here."""
    file = model / "tokenizer.json"
    if not file.is_file():
        return lambda text, num_tokens: text[: int(num_tokens * CHARACTERS_PER_TOKEN)]
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))

    def cut(text: str, num_tokens: int) -> str:
        offsets = tokenizer.encode(text, add_special_tokens=False).offsets
        return text[: offsets[min(num_tokens, len(offsets)) - 1][1]]

    return cut


def _about(name: str, document: str, question: str) -> Prompt:
    return Prompt(name, f"{document}\n\nQuestion: {question}\nAnswer:", MAX_TOKENS)


def _licences(packages: tuple[str, ...]) -> str:
    return "\n\n".join(
        file.read_text()
        for package in packages
        for file in importlib.metadata.files(package) or ()
        if "dist-info" in str(file) and file.name.upper().startswith("LICEN")
    )


def _docstrings(modules: tuple[str, ...]) -> str:
    """The docstrings of modules, by their place in the source."""
    texts = []
    for name in modules:
        source = importlib.import_module(name).__file__
        assert source is not None, f"{name} is a module with a source"
        for node in ast.walk(ast.parse(Path(source).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ast.get_docstring(node)
                if text:
                    texts.append(f"{getattr(node, 'name', name)}: {text}")
    return "\n\n".join(texts)


def _reference() -> str:
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))
