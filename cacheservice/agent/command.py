"""The command line of an agent: `python -m cacheservice serve`.

Flags are made from the fields of `AgentConfig`, so that file, flags and help can't differ. Exit codes: 0 after a drain,
1 when the agent could not start or died, 2 when what the user wrote is wrong.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from cacheservice import __version__
from cacheservice.agent.config import AgentConfig, build_config, flag_of
from cacheservice.errors import ConfigError, LarderError

app = typer.Typer(
    name="cacheservice", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    help="Larder's cache service.",
)  # fmt: skip


@app.callback()
def _group() -> None:
    """Larder's cache service."""


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def serve(**flags: Any) -> None:
    """Run one cache agent until SIGTERM or SIGINT; a second signal ends it at once."""
    file = flags.pop("config")
    given = {name: value for name, value in flags.items() if value not in (None, [], False)}
    try:
        config = build_config(given, file=Path(file) if file else None)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    _set_up_logs(config.log_level)
    # Late, so that --help and a wrong flag answer at once.
    from cacheservice.agent.serve import run_agent

    try:
        code = run_agent(config)
    except ConfigError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    except LarderError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error
    raise typer.Exit(code)


def _set_up_logs(level: str) -> None:
    logging.basicConfig(
        stream=sys.stderr,
        level=level,
        format="%(asctime)s level=%(levelname)s logger=%(name)s %(message)s",
    )


def _parameters() -> list[inspect.Parameter]:
    parameters = []
    for field in dataclasses.fields(AgentConfig):
        shown = field.metadata["shown"]
        default = f" Default: {shown}." if shown else " Required."
        option = typer.Option(
            flag_of(field.name), help=field.metadata["help"] + default, show_default=False
        )
        kind: Any = str | None
        if field.type in ("bool", bool):
            kind = bool
        elif "tuple" in str(field.type):
            kind = list[str] | None
        parameters.append(
            _parameter(field.name, Annotated[kind, option], default=False if kind is bool else None)
        )
    help_text = "YAML file with the same fields, as `socket_dir: /run/larder`; flags win over it. Default: none."
    file_option = typer.Option("--config", help=help_text, show_default=False)
    parameters.append(_parameter("config", Annotated[str | None, file_option], default=None))
    return parameters


def _parameter(name: str, annotation: Any, *, default: object) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


def _register() -> None:
    parameters = _parameters()
    # typer reads both; together they are the dataclass in its words.
    serve.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    serve.__annotations__ = {p.name: p.annotation for p in parameters}
    app.command("serve")(serve)


_register()
