"""`larder bench …`: checks that users run against their own engines. Reads flags, calls the rest, prints the result."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cacheservice.errors import ConfigError

if TYPE_CHECKING:
    from cacheservice.accuracy.passes import Asking
    from cacheservice.accuracy.questions import Subject
    from cacheservice.accuracy.report import AccuracyReport

bench_app = typer.Typer(
    name="bench", no_args_is_help=True, help="Check engines that run, from their OpenAI address."
)


@bench_app.callback()
def _bench() -> None:
    """Makes typer keep `accuracy` a command of its own, although it is the only one."""


@bench_app.command()
def accuracy(
    url: Annotated[
        str,
        typer.Option(
            "--url", metavar="URL", help="An engine with Larder, or a router before several."
        ),
    ],
    data: Annotated[
        Path | None,
        typer.Option(
            "--data", metavar="PATH", show_default=False,
            help="MMLU's folder as downloaded (test/, dev/), or a CSV file with the columns subject, question, A, B, "
            "C, D and answer. Default: 66 questions that come with Larder.",
        ),
    ] = None,
    control_url: Annotated[
        str | None,
        typer.Option(
            "--control-url", metavar="URL",
            help="An engine without Larder, of the same model, to compare with; best with its own prefix cache on.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Its name there. Default: the only one."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option("--api-key-file", metavar="FILE", help="File with the key for --url."),
    ] = None,
    control_api_key_file: Annotated[
        Path | None,
        typer.Option(
            "--control-api-key-file", metavar="FILE", help="File with the key for --control-url."
        ),
    ] = None,
    shots: Annotated[
        int | None,
        typer.Option(
            "--shots", metavar="N", min=0, show_default=False,
            help="Answered examples before a question. Default: all of dev/, which are 5 for MMLU.",
        ),
    ] = None,
    subjects: Annotated[
        str,
        typer.Option(
            "--subjects", metavar="A,B,…", help="Only these subjects.", show_default=False
        ),
    ] = "",
    limit: Annotated[
        int | None,
        typer.Option("--limit", metavar="N", min=1, help="Only the first N of each subject."),
    ] = None,
    concurrency: Annotated[
        int,
        typer.Option(
            "--concurrency", metavar="N", min=1, max=256,
            help="Requests at a time. With 1 an engine rounds alike each time.",
        ),
    ] = 1,
    chat: Annotated[
        bool, typer.Option("--chat", help="Ask /v1/chat/completions instead of /v1/completions.")
    ] = False,
    reset_prefix_cache: Annotated[
        bool,
        typer.Option(
            "--reset-prefix-cache",
            help="Empty the engine's own prefix cache before the warm pass, so that Larder serves all of it. Needs "
            "VLLM_SERVER_DEV_MODE=1 at the engine.",
        ),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object to stdout instead of text.")
    ] = False,
) -> None:  # fmt: skip
    """Does the cache change answers? Asks multiple-choice questions with the cache cold and warm, and compares.

    Exits with 0 when no question is answered differently, and with 1 when one is, or when nothing can be said, such as
    when the cache was not used.
    """
    from cacheservice.accuracy.data_files import BUNDLED, read_subjects
    from cacheservice.accuracy.endpoint import parse_endpoint
    from cacheservice.accuracy.passes import Asking
    from cacheservice.accuracy.questions import select

    names = [name.strip() for name in subjects.split(",") if name.strip()]
    asking = Asking(
        endpoint=parse_endpoint(url, flag="--url", api_key=_key(api_key_file, "--api-key-file")),
        control=None if control_url is None else parse_endpoint(
            control_url, flag="--control-url", api_key=_key(control_api_key_file, "--control-api-key-file")
        ),
        model=model, chat=chat, concurrency=concurrency, resets_own_cache=reset_prefix_cache,
    )  # fmt: skip
    chosen = select(read_subjects(data or BUNDLED, shots=shots), names=names, limit=limit)
    report = _asked(chosen, asking)
    _print(report, as_json=as_json)
    raise typer.Exit(0 if report.is_identical else 1)


def _asked(chosen: list[Subject], asking: Asking) -> AccuracyReport:
    from rich.console import Console

    from cacheservice.accuracy.passes import ask_all
    from cacheservice.accuracy.report import AccuracyReport
    from cacheservice.local.progress import show_progress

    num_questions = sum(len(subject.questions) for subject in chosen)
    with show_progress(Console(stderr=True)) as progress:
        what = f"{num_questions} questions in {len(chosen)} subjects"
        progress.begin("accuracy", what)
        outcome = ask_all(chosen, asking, lambda line: progress.update("accuracy", line))
        progress.end("accuracy", f"{what} asked in {len(outcome.passes)} passes")
    return AccuracyReport(outcome)


def _print(report: AccuracyReport, *, as_json: bool) -> None:
    from rich.console import Console

    from cacheservice.accuracy.report import print_report

    if as_json:
        print(json.dumps(report.as_json()))
    else:
        print_report(report, Console(width=None if sys.stdout.isatty() else 120))


def _key(path: Path | None, flag: str) -> str | None:
    """The first line of a file with an API key."""
    if path is None:
        return None
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} can't be read: {error}") from error
    if not key or any(character.isspace() for character in key):
        raise ConfigError(f"{flag} {path}: one key on one line is wanted")
    return key
