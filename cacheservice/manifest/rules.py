"""The CEL rules of the schema, once more in Python.

Kubernetes evaluates `x-kubernetes-validations` itself; `larder up` has no CEL. Every rule in the schema
has exactly one twin here under the same message (a test holds both ways), and a twin that is a pattern
is the very pattern of its rule. Called by `validate` with values whose defaults are filled in. A twin
answers False only for what its rule refuses: a part of another type than the schema's has its own
problem already, and must not raise here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Check = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Pattern:
    """`self.matches(text)`, or `!self.matches(text)` when `forbidden`. CEL's matches finds anywhere, like re.search."""

    text: str
    forbidden: bool = False

    def __call__(self, value: Any) -> bool:
        if not isinstance(value, str):
            return True
        # RE2's $ is the end of the text; Python's also stands before a last newline, which \Z does not.
        found = re.search(self.text.replace("$", r"\Z"), value) is not None
        return found is not self.forbidden


service_name = Pattern(r"^[a-z]([-a-z0-9]{0,38}[a-z0-9])?$")
owned_argument = Pattern(
    r"^(--(kv[-_][to]|prefix[-_]cachi|(no[-_])?disable[-_]h|(no[-_])?data[-_]p|te|pi|dec|prefill[-_]c"
    r"|nn|nod|mas|ser|rev|ho|por|ud|api[-_]k|hf[-_]t|hea|gr|ssl|(config|model)([=. ]|$))|-(t|p|dp|dcp|n|r))",
    forbidden=True,
)
size = Pattern(r"^[1-9][0-9]{0,5}(Mi|Gi|Ti)$")
arena_size = Pattern(r"^([1-9][0-9]{0,5}(Gi|Ti)|(6[4-9]|[7-9][0-9]|[1-9][0-9]{2,5})Mi)$")
redis_address = Pattern(
    r"^(\[[0-9a-fA-F:]{2,45}\]|[A-Za-z0-9._-]{1,253}):"
    r"([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])$"
)


def _name_fits_a_service(resource: Any) -> bool:
    name = _at(resource, "metadata", "name")
    return name is None or service_name(name)


def _prefill_has_decode(spec: Any) -> bool:
    return not _has(spec, "prefill") or _has(spec, "decode")


def _engines_have_a_model(spec: Any) -> bool:
    return _has(spec, "model") or not (_has(spec, "prefill") or _has(spec, "decode"))


def _cache_without_engines_chooses_nodes(spec: Any) -> bool:
    return _has(spec, "prefill") or _has(spec, "decode") or bool(_at(spec, "cache", "nodeSelector"))


def _rollouts_can_move(spec: Any) -> bool:
    is_cpu = _at(spec, "engine", "device") == "cpu"
    return all(
        _rollout_can_move(_at(spec, role, "rollout"), is_cpu=is_cpu)
        for role in ("prefill", "decode")
    )


def _rollout_can_move(rollout: Any, *, is_cpu: bool) -> bool:
    if not isinstance(rollout, dict):
        return True
    surge = rollout.get("maxSurge", 1 if is_cpu else 0)
    unavailable = rollout.get("maxUnavailable", 0 if is_cpu else 1)
    return not isinstance(surge, int) or not isinstance(unavailable, int) or surge + unavailable > 0


def _toleration_is_one_that_kubernetes_takes(toleration: Any) -> bool:
    if not isinstance(toleration, dict):
        return True
    exists = toleration.get("operator") == "Exists"
    if exists and toleration.get("value", "") != "":
        return False
    if not exists and toleration.get("key", "") == "":
        return False
    return "tolerationSeconds" not in toleration or toleration.get("effect") == "NoExecute"


def _path_is_absolute_outside_a_volume(model: Any) -> bool:
    path = _at(model, "path")
    return not isinstance(path, str) or _has(model, "volumeClaimName") or path.startswith("/")


def _has_no_disk_tier(cache: Any) -> bool:
    return not _has(cache, "disk")


def _has_no_gpu_tier(gpu: Any) -> bool:
    return not isinstance(gpu, str) or gpu == "0"


def _has_one_redis_at_most(redis: Any) -> bool:
    return not (_has(redis, "embedded") and _has(redis, "external"))


def _secret_goes_with_its_mode(tls: Any) -> bool:
    needs_secret = _at(tls, "mode") == "Secret"
    return needs_secret is _has(tls, "secretRef")


TWINS: dict[str, Check] = {
    "it becomes the name of a Service: write at most 40 lower-case letters, digits and -, beginning with a "
    "letter and not ending with -": _name_fits_a_service,
    "spec.prefill needs spec.decode: prefill engines only produce KV for decode engines to read": _prefill_has_decode,
    "spec.model is required when spec.prefill or spec.decode is set; leave out all three to run a cache "
    "for engines that you deploy yourself": _engines_have_a_model,
    "a cache without engines must choose its nodes: set spec.cache.nodeSelector, or add spec.model and "
    "spec.decode": _cache_without_engines_chooses_nodes,
    "a rollout needs maxSurge or maxUnavailable above 0 (cuda begins with 0 and 1, cpu with 1 and 0): with both 0 no "
    "engine could ever be replaced": _rollouts_can_move,
    "Kubernetes refuses this toleration: operator Exists goes without a value, no key goes with operator Exists, and "
    "tolerationSeconds goes with effect NoExecute": _toleration_is_one_that_kubernetes_takes,
    "spec.model.path must be absolute, for example /models/llama; only with spec.model.volumeClaimName is it a folder "
    "inside that volume": _path_is_absolute_outside_a_volume,
    "Larder sets this flag itself: remove it from args (model, parallel sizes, tokens and keys have their "
    "own fields in this resource; host, port, protocol, --config, KV transfer, hash algorithm and hybrid "
    "KV cache manager cannot be changed)": owned_argument,
    "write a whole number with Mi, Gi or Ti, for example 8Gi": size,
    "write a whole number with Mi, Gi or Ti, at least 64Mi, for example 8Gi": arena_size,
    "write host:port with a port from 1 to 65535 and no scheme, for example redis.infra.svc:6379 or "
    "[fd00::1]:6379": redis_address,
    "a disk tier is not in this version: remove the field": _has_no_disk_tier,
    'a GPU tier is not in this version: remove the field or write "0"': _has_no_gpu_tier,
    "set at most one of spec.redis.embedded and spec.redis.external": _has_one_redis_at_most,
    "spec.tls.secretRef and spec.tls.mode: Secret go together: set both or neither": _secret_goes_with_its_mode,
}


def _has(value: Any, name: str) -> bool:
    return isinstance(value, dict) and name in value


def _at(value: Any, *names: str) -> Any:
    for name in names:
        if not isinstance(value, dict):
            return None
        value = value.get(name)
    return value
