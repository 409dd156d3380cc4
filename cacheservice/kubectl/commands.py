"""The commands of `kubectl larder`: flags in, text out. Called by `cli.main`, which turns failures into sentences."""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from cacheservice.errors import ConfigError
from cacheservice.kubectl.cluster import RESOURCE, Access, Kubectl
from cacheservice.kubectl.seen import Seen, read

kubectl_app = typer.Typer(
    name="kubectl", add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What a KVCache in a cluster is doing, and why. Reads by kubectl, with your rights.",
)  # fmt: skip

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="Name of the KVCache.")]
NamespaceOption = Annotated[
    str,
    typer.Option("--namespace", "-n", metavar="NAMESPACE", help="Default: that of the context."),
]
ContextOption = Annotated[
    str, typer.Option("--context", metavar="NAME", help="Context of the kubeconfig.")
]
KubeconfigOption = Annotated[
    str, typer.Option("--kubeconfig", metavar="FILE", help="Default: as kubectl finds it.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only say what would be asked for.")]


@kubectl_app.command()
def status(
    name: NameArgument,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    kubeconfig: KubeconfigOption = "",
    output: Annotated[
        str, typer.Option("--output", "-o", metavar="json", help="json: one JSON object.")
    ] = "",
) -> None:
    """One screen: endpoint, conditions, agents with fill and hit ratio, engines, Redis, problems.

    Exits with 1 when it is not Ready.
    """
    from cacheservice.kubectl.status import screen, status_view

    if output not in ("", "json"):
        raise ConfigError(f"-o {output}: json is the only other form")
    view = status_view(read(_kubectl(namespace, context, kubeconfig), name))
    sys.stdout.write(f"{json.dumps(view.as_json(), indent=1)}\n" if output else screen(view))
    raise typer.Exit(0 if view.is_ready else 1)


@kubectl_app.command()
def explain(
    name: NameArgument,
    request: Annotated[
        str,
        typer.Argument(
            metavar="[REQUEST]", show_default=False,
            help="Id of one request: of its answer (cmpl-…), or the X-Request-Id that was sent.",
        ),
    ] = "",
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    kubeconfig: KubeconfigOption = "",
) -> None:  # fmt: skip
    """Why lookups miss, and whether engines can share what they store; or the path of one request.

    Prefill and decode know a request by one id only when the client sent an X-Request-Id: else each has its own.
    """
    from cacheservice.kubectl.explain import explain as explained
    from cacheservice.kubectl.explain import explain_request, id_asked_of_agents, is_remembered

    kubectl = _kubectl(namespace, context, kubeconfig)
    if not request:
        sys.stdout.write(explained(read(kubectl, name)))
        return
    wanted = id_asked_of_agents(request)
    if not wanted:
        raise ConfigError(
            f"{request} is no id of a request: give what follows after the prefix, too"
        )
    seen = read(kubectl, name, {"request": wanted})
    if not is_remembered(seen):
        # Once more with everything, to say how far back they remember.
        seen = read(kubectl, name, {"outcomes": "1"})
    sys.stdout.write(explain_request(seen, request))


@kubectl_app.command()
def upgrade(
    name: NameArgument,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    kubeconfig: KubeconfigOption = "",
    dry_run: DryRunOption = False,  # noqa: FBT002 - typer makes it a flag
) -> None:
    """Let engines take the images of the operator's version; a new operator alone never rolls them."""
    from cacheservice.kubectl.upgrade import ANNOTATION, stamp, upgrade_text

    kubectl = _kubectl(namespace, context, kubeconfig)
    resource = kubectl.kvcache(name)
    seen = _without_agents(kubectl, resource)
    if not dry_run:
        kubectl.text(
            "annotate", RESOURCE, name, f"{ANNOTATION}={stamp(datetime.now(UTC))}", "--overwrite",
            namespace=seen.namespace,
        )  # fmt: skip
    sys.stdout.write(upgrade_text(seen, is_dry_run=dry_run))


@kubectl_app.command()
def report(
    name: NameArgument,
    namespace: NamespaceOption = "",
    context: ContextOption = "",
    kubeconfig: KubeconfigOption = "",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", show_default=False, help="Default: larder-NAMESPACE-NAME-TIME.zip here."
        ),
    ] = None,
) -> None:  # fmt: skip
    """Pack everything about it into a zip, without secrets: objects, events, logs, what agents say, metrics."""
    from cacheservice.kubectl.report import counts_of, write_report

    kubectl = _kubectl(namespace, context, kubeconfig)
    seen = read(kubectl, name)
    moment = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    path = output or Path(f"larder-{seen.namespace}-{name}-{moment}.zip")
    written = write_report(kubectl, seen, path)
    sys.stdout.write(f"{path}: {written.num_files} files about {counts_of(seen)}\n")
    if written.missing:
        sys.stdout.write(f"{len(written.missing)} things could not be read: see README.txt in it\n")


def _kubectl(namespace: str, context: str, kubeconfig: str) -> Kubectl:
    return Kubectl(Access(namespace, context, kubeconfig))


def _without_agents(kubectl: Kubectl, resource: dict[str, object]) -> Seen:
    from cacheoperator.names import selector

    from cacheservice.kubectl.seen import WORKLOADS

    seen = Seen(resource)
    workloads = kubectl.items("get", WORKLOADS, "-l", selector(seen.name), namespace=seen.namespace)
    return Seen(resource, workloads=workloads)
