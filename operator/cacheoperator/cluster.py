"""The API server, spoken to by the `kubernetes` package's asyncio client: reads, applies, deletes, statuses, events.

Objects are plain JSON values. Every call has a time limit, and every failure is one of `errors`. Secrets can be got by
name but not listed. Called by the operator's edge only (reconcile, observe, lease, probe, shared_memory).

`kubernetes.aio` serves here as transport, login and token refresh; its typed models are not used: an apply must send
exactly the fields that we want, and models of 2,000 pods cost memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.exceptions import ApiException

from cacheoperator import metrics
from cacheoperator.errors import ClusterError, NotFound, Unreachable, error_of_status
from cacheoperator.kinds import SECRET, Kind, kind_of
from cacheoperator.names import FIELD_MANAGER

type_apply = "application/apply-patch+yaml"
type_json_patch = "application/json-patch+json"
type_merge_patch = "application/merge-patch+json"

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Applied:
    """The object as the API server now has it (or would have it, on a dry run), and its warnings."""

    object: Json
    warnings: tuple[str, ...]
    is_created: bool = False
    """Whether it was not there before."""


class Cluster:
    """One connection pool to one API server. Use in one event loop; `close` it."""

    def __init__(
        self, configuration: kubernetes_client.Configuration, *, timeout_s: float = 15.0
    ) -> None:
        self.configuration = configuration
        self._api = kubernetes_client.ApiClient(configuration)
        self._api.user_agent = FIELD_MANAGER
        self._timeout = aiohttp.ClientTimeout(total=timeout_s, connect=5.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._api.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Json | None:
        """None when there is no such object (or no such kind)."""
        try:
            body, _ = await self._request("GET", kind.path(namespace, name))
        except NotFound:
            return None
        return body

    async def exists(self, path: str) -> bool:
        """Whether the API server serves `path`: for group versions."""
        try:
            await self._request("GET", path)
        except NotFound:
            return False
        return True

    async def serves(self, kind: Kind) -> bool:
        """Whether the API server knows `kind`."""
        try:
            body, _ = await self._request("GET", kind.path().rpartition("/")[0])
        except NotFound:
            return False
        return any(found.get("name") == kind.plural for found in body.get("resources") or ())

    async def list(
        self,
        kind: Kind,
        namespace: str | None = None,
        *,
        labels: str = "",
        fields: str = "",
        limit: int | None = None,
        metadata_only: bool = False,
    ) -> list[Json]:
        """All objects, page by page; with `limit` the first that many. `metadata_only` gives apiVersion-less stubs."""
        assert kind is not SECRET, "Secrets are never listed"
        headers = {}
        if metadata_only:
            headers["Accept"] = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
        found: list[Json] = []
        token = ""
        while True:
            query = {"limit": str(min(limit or 500, 500))}
            if labels:
                query["labelSelector"] = labels
            if fields:
                query["fieldSelector"] = fields
            if token:
                query["continue"] = token
            body, _ = await self._request("GET", kind.path(namespace), query, headers=headers)
            found += body.get("items") or []
            token = (body.get("metadata") or {}).get("continue") or ""
            if not token or (limit is not None and len(found) >= limit):
                return found

    async def apply(
        self,
        obj: Mapping[str, Any],
        *,
        is_dry_run: bool = False,
        manager: str = FIELD_MANAGER,
        is_forced: bool = True,
    ) -> Applied:
        """Server-side apply of the whole `obj`. Fields that it leaves out and `manager` owned are removed. Not forced
        it is a Conflict when another manager owns a field that would change."""
        metadata = obj["metadata"]
        query = {"fieldManager": manager, "force": "true" if is_forced else "false"}
        if is_dry_run:
            query["dryRun"] = "All"
        path = kind_of(obj).path(metadata.get("namespace"), metadata["name"])
        code, body, warnings = await self._answer("PATCH", path, query, obj, type_apply)
        return Applied(body, warnings, is_created=code == 201)

    async def create(self, obj: Mapping[str, Any], *, is_dry_run: bool = False) -> Applied:
        """POST; Conflict (AlreadyExists) when the name is taken."""
        query = {"fieldManager": FIELD_MANAGER}
        if is_dry_run:
            query["dryRun"] = "All"
        path = kind_of(obj).path(obj["metadata"].get("namespace"))
        body, warnings = await self._request("POST", path, query, obj)
        return Applied(body, warnings, is_created=True)

    async def replace(self, obj: Mapping[str, Any]) -> Json:
        """PUT; Conflict when metadata.resourceVersion is not the newest."""
        metadata = obj["metadata"]
        path = kind_of(obj).path(metadata.get("namespace"), metadata["name"])
        body, _ = await self._request("PUT", path, {"fieldManager": FIELD_MANAGER}, obj)
        return body

    async def patch(
        self, kind: Kind, namespace: str | None, name: str, change: Mapping[str, Any]
    ) -> Json:
        """Merge patch."""
        path = kind.path(namespace, name)
        query = {"fieldManager": FIELD_MANAGER}
        body, _ = await self._request("PATCH", path, query, change, type_merge_patch)
        return body

    async def replace_template(self, there: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
        """Put the pod template of `wanted` in the place of the one of the workload `there`, whole."""
        metadata = there["metadata"]
        change: Sequence[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": metadata["uid"]},
            {"op": "replace", "path": "/spec/template", "value": wanted["spec"]["template"]},
        ]
        path = kind_of(there).path(metadata["namespace"], metadata["name"])
        query = {"fieldManager": FIELD_MANAGER}
        await self._request("PATCH", path, query, change, type_json_patch)

    async def write_status(
        self, kind: Kind, namespace: str, name: str, uid: str, status: Mapping[str, Any]
    ) -> Json:
        """Replace the whole status of the object with `uid`; Invalid or NotFound when it is another object by now."""
        change: Sequence[Mapping[str, Any]] = [
            {"op": "test", "path": "/metadata/uid", "value": uid},
            {"op": "add", "path": "/status", "value": status},
        ]
        path = kind.path(namespace, name, "status")
        query = {"fieldManager": FIELD_MANAGER}
        body, _ = await self._request("PATCH", path, query, change, type_json_patch)
        return body

    async def delete(self, kind: Kind, namespace: str | None, name: str, uid: str) -> None:
        """Delete exactly the object with `uid`, its children in the background. Nothing to do when it is gone."""
        options = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._request("DELETE", kind.path(namespace, name), body=options)
        except NotFound:
            pass

    async def _request(
        self, method: str, path: str, *arguments: Any, **options: Any
    ) -> tuple[Json, tuple[str, ...]]:
        """`_answer` for whom its code says nothing."""
        _, body, warnings = await self._answer(method, path, *arguments, **options)
        return body, warnings

    async def _answer(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: object | None = None,
        content_type: str = "application/json",
        headers: Mapping[str, str] | None = None,
    ) -> tuple[int, Json, tuple[str, ...]]:
        try:
            _, url, sent, _, _ = await self._api.param_serialize(
                method,
                path,
                query_params=list((query or {}).items()),
                header_params={
                    "Accept": "application/json",
                    "Content-Type": content_type,
                    **(headers or {}),
                },
                auth_settings=["BearerToken"],
            )
            response = await self._api.call_api(
                method, url, sent, body, _request_timeout=self._timeout
            )
            content = await response.read()
        except TimeoutError as error:
            metrics.requests.labels(method, "timeout").inc()
            raise Unreachable(f"the API server did not answer {method} {path} in time") from error
        except (aiohttp.ClientError, OSError, ApiException) as error:
            metrics.requests.labels(method, "unreachable").inc()
            raise Unreachable(f"the API server can't be reached: {error}") from error
        metrics.requests.labels(method, str(response.status)).inc()
        try:
            value = json.loads(content) if content else {}
        except ValueError:
            value = {"message": content[:500].decode(errors="replace")}
        if not isinstance(value, dict):
            value = {"message": str(value)[:500]}
        if response.status >= 300:
            raise error_of_status(response.status, value)
        warnings = tuple(_warning_text(header) for header in response.headers.getall("Warning", ()))
        return response.status, value, warnings


def _warning_text(header: str) -> str:
    """The text inside `299 - "text"` (RFC 7234, section 5.5)."""
    _, quote, rest = header.partition('"')
    return rest.rpartition('"')[0].replace('\\"', '"') if quote else header


async def login(kubeconfig: str | None = None) -> kubernetes_client.Configuration:
    """The service account's login inside a pod, else that of a kubeconfig file. ClusterError when there is neither.

    A kubeconfig that is named, by argument or by KUBECONFIG, wins: someone runs the operator by hand.
    """
    configuration = kubernetes_client.Configuration()
    named = kubeconfig or os.environ.get("KUBECONFIG")
    try:
        if not named and os.environ.get("KUBERNETES_SERVICE_HOST"):
            kubernetes_config.load_incluster_config(client_configuration=configuration)
        else:
            path = named or str(Path.home() / ".kube" / "config")
            await kubernetes_config.load_kube_config(
                config_file=path, client_configuration=configuration
            )
    except kubernetes_config.ConfigException as error:
        raise ClusterError(
            f"no way to log in to a cluster ({error}): run in a pod with a service account, or set KUBECONFIG"
        ) from error
    return configuration
