"""kubectl as a subprocess: JSON and text in, sentences when it fails. The only place that starts it, but for `agents`.

Invariant: Secrets are never read as objects; see `report` for the one table of their names. Thread rule: any thread.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from cacheservice.errors import ConfigError, LarderError

RESOURCE = "kvcaches.larder.dev"
ANSWER_WITHIN_S = 30.0
"""Longer than the 10 s that kubectl itself waits for a connection."""
_FORBIDDEN = re.compile(
    r'cannot (?P<verb>\w+) resource "(?P<resource>[^"]+)" in API group "(?P<group>[^"]*)"'
    r'(?: in the namespace "(?P<namespace>[^"]+)"| at the (?P<scope>cluster) scope)?'
)
_NO_SERVER = re.compile(
    r"Unable to connect|connection refused|was refused|no such host|i/o timeout|no configuration has been provided"
    r"|context .* does not exist|deadline exceeded"
)
_LOGGED_OUT = re.compile(r"You must be logged in|Unauthorized|getting credentials")


class ClusterError(LarderError):
    """kubectl failed. The message says what, and what to do."""


class Forbidden(ClusterError):
    """The user may not do that; the message names the verb."""


class NotThere(ClusterError):
    """There is no such object."""


@dataclass(frozen=True, slots=True)
class Access:
    """Which cluster and namespace: the flags that the user gave, "" for those of the current context."""

    namespace: str = ""
    context: str = ""
    kubeconfig: str = ""


class Kubectl:
    """Runs kubectl for one place."""

    def __init__(self, access: Access, *, program: str = "kubectl") -> None:
        self._access = access
        self._program = program

    def argv(self, *words: str, namespace: str | None = None) -> list[str]:
        """The command line. `namespace` None is the one that the user named, or the context's; "" leaves it out."""
        chosen = self._access.namespace if namespace is None else namespace
        argv = [self._program]
        if self._access.kubeconfig:
            argv += ["--kubeconfig", self._access.kubeconfig]
        if self._access.context:
            argv += ["--context", self._access.context]
        if chosen:
            argv += ["--namespace", chosen]
        return [*argv, *words]

    def text(self, *words: str, namespace: str | None = None) -> str:
        """What kubectl prints. Raises ClusterError, Forbidden or NotThere."""
        try:
            done = subprocess.run(
                self.argv(*words, namespace=namespace), capture_output=True, text=True, errors="replace",
                stdin=subprocess.DEVNULL, timeout=ANSWER_WITHIN_S, check=False,
            )  # fmt: skip
        except OSError as error:
            raise missing_program(self._program, error) from error
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"the cluster did not answer within {ANSWER_WITHIN_S:g} s: try kubectl get --raw /readyz, or name "
                "another --context"
            ) from error
        if done.returncode != 0:
            raise translated(done.stderr, words)
        return done.stdout

    def object(self, *words: str, namespace: str | None = None) -> dict[str, Any]:
        """The JSON object that `kubectl … -o json` prints. Raises ClusterError, Forbidden or NotThere."""
        try:
            found = json.loads(self.text(*words, "-o", "json", namespace=namespace))
        except ValueError as error:
            raise ClusterError(f"kubectl {' '.join(words)} answered no JSON: {error}") from error
        if not isinstance(found, dict):
            raise ClusterError(f"kubectl {' '.join(words)} answered no object")
        return found

    def items(self, *words: str, namespace: str | None = None) -> tuple[dict[str, Any], ...]:
        """The items of a list. Raises ClusterError or Forbidden."""
        return tuple(self.object(*words, namespace=namespace).get("items") or ())

    def kvcache(self, name: str) -> dict[str, Any]:
        """The resource; ConfigError with the nearest name when there is none."""
        try:
            return self.object("get", RESOURCE, name)
        except NotThere as error:
            try:
                known = [item["metadata"]["name"] for item in self.items("get", RESOURCE)]
            except ClusterError:
                known = []
            raise ConfigError(no_such(name, known, self._access.namespace)) from error


def no_such(name: str, known: Sequence[str], namespace: str) -> str:
    """The sentence for a KVCache that is not there."""
    where = f"namespace {namespace}" if namespace else "the current namespace"
    near = get_close_matches(name, known, 1)
    if near:
        return f"there is no KVCache {name} in {where}: did you mean {near[0]}?"
    if known:
        shown = ", ".join(sorted(known)[:5]) + (" and others" if len(known) > 5 else "")
        return f"there is no KVCache {name} in {where}, but there are {shown}"
    return f"there is no KVCache in {where}: kubectl get kvcaches -A shows where they are, then add -n NAMESPACE"


def missing_program(program: str, error: OSError) -> ClusterError:
    """The sentence for a kubectl that can't be started."""
    return ClusterError(
        f"{program} can't be started ({error.strerror}): install kubectl and put it on PATH, then try kubectl version"
    )


def translated(stderr: str, words: Sequence[str]) -> ClusterError:
    """What kubectl complained about, as an error with a remedy."""
    said = " ".join(stderr.split()) or "it said nothing"
    if forbidden := _FORBIDDEN.search(said):
        return Forbidden(_forbidden(forbidden))
    if "doesn't have a resource type" in said and "kvcaches" in said:
        return ClusterError(
            "this cluster does not know KVCache: install the chart (helm install larder charts/larder), or name the "
            "right cluster with --context"
        )
    if "(NotFound)" in said or "not found" in said:
        return NotThere(said)
    if _LOGGED_OUT.search(said):
        return ClusterError(f"the cluster does not know you: log in again ({_short(said)})")
    if _NO_SERVER.search(said):
        return ClusterError(
            "the cluster can't be reached: check kubectl config current-context, --context and --kubeconfig "
            f"({_short(said)})"
        )
    return ClusterError(f"kubectl {words[0] if words else ''} failed: {_short(said)}")


def _forbidden(match: re.Match[str]) -> str:
    resource = match["resource"] + (f".{match['group']}" if match["group"] else "")
    where = f"in namespace {match['namespace']}" if match["namespace"] else "in the whole cluster"
    plain, _, sub = match["resource"].partition("/")
    flags = f"{plain}{'.' + match['group'] if match['group'] else ''}" + (
        f" --subresource={sub}" if sub else ""
    )
    scope = f" -n {match['namespace']}" if match["namespace"] else ""
    return (
        f"you may not {match['verb']} {resource} {where}: ask for that verb, and check with kubectl auth can-i "
        f"{match['verb']} {flags}{scope}"
    )


def _short(said: str) -> str:
    said = said.removeprefix("error: ").removeprefix("Error: ")
    return said if len(said) <= 300 else said[:299] + "…"
