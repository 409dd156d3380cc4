"""The `larder` command: reads flags and environment, calls the rest, and turns failures into sentences and exit codes.

Exit codes: 0 all well; 1 something failed on the way (a program died, outputs differ); 2 what the user wrote is wrong;
130 and 143 ended by Ctrl-C or SIGTERM before the work was done. Results go to stdout, everything else to stderr.
Imports of weight are inside the commands: `larder --help` answers at once.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from cacheservice import __version__
from cacheservice.cli.bench import bench_app
from cacheservice.errors import ConfigError, LarderError
from cacheservice.kubectl.commands import kubectl_app
from cacheservice.local.processes import Interrupted, termination_raises
from cacheservice.manifest import ManifestRefused

DEFAULT_DIR = Path(".larder")

app = typer.Typer(
    name="larder", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Larder keeps the KV cache of language models, so that no prompt prefix is computed twice.",
)  # fmt: skip
app.add_typer(bench_app)
app.add_typer(kubectl_app, help="The same as kubectl larder: what a KVCache in a cluster is doing.")
PLUGIN = "kubectl-larder"
"""Name of the program that kubectl runs for `kubectl larder`."""

DirOption = Annotated[
    Path,
    typer.Option(
        "--dir", metavar="DIR", envvar="LARDER_DIR",
        help="Folder for what runs (state, logs, sockets) and for the demo model.",
    ),
]  # fmt: skip
RedisOption = Annotated[
    str | None,
    typer.Option(
        "--redis", metavar="URL", envvar="LARDER_REDIS_URL", show_envvar=True,
        help="Use this Redis (redis://, rediss://, unix://) instead of an embedded one.",
    ),
]  # fmt: skip
ModelOption = Annotated[
    Path | None,
    typer.Option(
        "--model", metavar="DIR", help="Folder of a checkpoint, instead of what the manifest says."
    ),
]
PortOption = Annotated[
    int | None,
    typer.Option(
        "--port", metavar="N", min=1, max=65535, show_default=False,
        help="First port: the router takes N (the OpenAI endpoint), engines take the next (prefill first), then the "
        "agent. Default: free ports from 8100.",
    ),
]  # fmt: skip
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object to stdout instead of text.")
]


@app.command()
def up(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="A KVCache manifest, as Kubernetes takes it.")
    ],
    redis: RedisOption = None,
    model: ModelOption = None,
    port: PortOption = None,
    folder: DirOption = DEFAULT_DIR,
    as_json: JsonOption = False,
) -> None:
    """Run a KVCache on this machine until Ctrl-C: Redis, a cache agent, the engines and the router in front of them.

    Prints the address of the OpenAI endpoint when all is ready. With --json that is one object, printed then.
    """
    from cacheservice.cli.run import run_up

    run_up(
        file, redis_url=redis, model_dir=model, first_port=port, larder_dir=folder, as_json=as_json
    )


@app.command()
def status(folder: DirOption = DEFAULT_DIR, as_json: JsonOption = False) -> None:
    """Show what `larder up` runs: the endpoint, engines, agents, and what their cache hit."""
    from cacheservice.cli.status import print_status

    raise typer.Exit(print_status(folder, as_json=as_json))


@app.command()
def demo(
    file: Annotated[
        Path | None,
        typer.Argument(
            metavar="[FILE]",
            help="A KVCache manifest with prefill and decode. Default: examples/cpu-local.yaml.",
            show_default=False,
        ),
    ] = None,
    redis: RedisOption = None,
    model: ModelOption = None,
    port: PortOption = None,
    folder: DirOption = DEFAULT_DIR,
    as_json: JsonOption = False,
) -> None:
    """A prefill and a decode engine share a cache on this machine: what does it save, and are answers the same?

    The first run makes a model and asks an engine without cache, too; its answers are kept beside the model. Exits
    with 1 when an answer differs from the engine without cache.
    """
    from cacheservice.cli.run import run_demo

    code = run_demo(
        file, redis_url=redis, model_dir=model, first_port=port, larder_dir=folder, as_json=as_json
    )
    raise typer.Exit(code)


@app.command()
def version(as_json: JsonOption = False) -> None:
    """Print the version."""
    import json

    print(json.dumps({"version": __version__}) if as_json else __version__)


def main() -> None:
    """The entry point of `larder` and `kubectl-larder`: by the name that it was started with."""
    if Path(sys.argv[0]).name.startswith(PLUGIN):
        sys.exit(exit_code(lambda: kubectl_app(prog_name="kubectl larder", standalone_mode=False)))
    sys.exit(exit_code(lambda: app(standalone_mode=False)))


def exit_code(command: Callable[[], object]) -> int:
    """Run `command` and say what became of it: the one place where exceptions turn into messages."""
    console = Console(stderr=True)
    try:
        with termination_raises():
            result = command()
        return result if isinstance(result, int) else 0
    except typer.Exit as exit_:
        return exit_.exit_code
    except (ConfigError, ManifestRefused) as error:
        _say(console, str(error))
        return 2
    except LarderError as error:
        _say(console, str(error))
        return 1
    except BrokenPipeError:
        # Whoever read our output has seen enough. Python would complain once more when it closes stdout.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (KeyboardInterrupt, typer.Abort):
        console.print("interrupted; everything is stopped")
        return 130
    except Interrupted as error:
        console.print(f"{error}; everything is stopped")
        return 128 + error.number
    except Exception as error:
        if not _is_usage_error(error):
            raise
        error.show(sys.stderr)  # type: ignore[attr-defined]
        return 2


def _is_usage_error(error: Exception) -> bool:
    """Whether it is click's way to say that a flag is wrong. By name: typer may carry a click of its own."""
    return any(parent.__name__ == "ClickException" for parent in type(error).__mro__)


def _say(console: Console, message: str) -> None:
    console.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


if __name__ == "__main__":
    main()
