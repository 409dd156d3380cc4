"""What the operator is told: one frozen record, built once from flags and environment by `__main__`.

Invariant: nothing of it but images and their pull policy enters a pod template, so that another version of the operator
rolls no pod.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """Default image of each program; a KVCache may name its own. All are full references."""

    engine_cuda: str
    engine_cpu: str
    payload: str
    """Carries the connector; an init container of each engine copies it out."""
    agent: str
    redis: str
    router_smg: str
    router_vllm: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`watch_namespaces` empty: the whole cluster. Times are seconds."""

    operator_version: str
    images: Images
    operator_namespace: str = "larder-system"
    operator_name: str = "larder-operator"
    """Name of the Deployment and of its pods' app.kubernetes.io/name label: NetworkPolicies let it in."""
    watch_namespaces: tuple[str, ...] = ()
    cluster_domain: str = "cluster.local"
    certificate_lifetime_s: int = 90 * 86_400
    """Of a leaf; renewed after two thirds. The authority lives ten times as long."""
    secret_refresh_s: int = 90
    """Longest time a kubelet takes to show a changed Secret in a pod; steps of an authority change wait twice that."""
    resync_s: float = 300.0
    """Between two full passes over all KVCaches."""
    num_workers: int = 4
    http_port: int = 8080
    image_pull_policy: str | None = None
    """None leaves it to Kubernetes: Always for :latest, else IfNotPresent."""
