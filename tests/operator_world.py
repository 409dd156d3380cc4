"""A small world for tests of the operator's renders: settings, refs, manifests, and the golden files.

python tests/operator_world.py      writes tests/golden/operator/ anew, one file for each example
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from cacheoperator.authority import ROLES
from cacheoperator.refs import KeyPair, Refs, SharedMemoryVerdict, TlsMaterial
from cacheoperator.render import Rendered, render
from cacheoperator.settings import Images, Settings

from cacheservice.manifest import KVCacheManifest, load_manifest, parse_manifest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
GOLDENS = ROOT / "tests" / "golden" / "operator"
IMAGES = Images(
    engine_cuda="vllm/vllm-openai:v0.32.0", engine_cpu="vllm-cpu:0.32.0", payload="larder-payload:1", agent="larder:1",
    redis="valkey:8", router_smg="larder-router:1", router_vllm="vllm-router:1",
)  # fmt: skip
SETTINGS = Settings(operator_version="1.2.3", images=IMAGES)
LEAF = KeyPair(certificate="a certificate\n", key="a key\n")
REFS = Refs(
    uid="0b0e5c1c-7f41-4f2c-9a55-1a2b3c4d5e6f",
    generation=1,
    shared_memory=SharedMemoryVerdict(is_allowed=True, reason="nothing forbids hostPath here"),
    pod_monitor_known=True,
    redis_password="generated-password",
    router_key="generated-key",
    tls=TlsMaterial(
        authority_data={"authority.crt": "an authority\n", "authority.key": "its key\n"},
        trusted="an authority\n",
        leaves=dict.fromkeys(ROLES, LEAF),
    ),
)
STREAM_REFS = dataclasses.replace(
    REFS, shared_memory=SharedMemoryVerdict(is_allowed=False, reason="enforce=restricted")
)


def manifest(
    spec: str = "", *, prefill: str | None = "{}", decode: str | None = "{}"
) -> KVCacheManifest:
    """A KVCache `demo` in `serving`; `spec` are further lines of its spec, indented by two."""
    text = "apiVersion: larder.dev/v1alpha1\nkind: KVCache\nmetadata: {name: demo, namespace: serving}\nspec:\n"
    if decode is not None:
        text += f"  model: {{name: org/m}}\n  decode: {decode}\n"
    if prefill is not None and decode is not None:
        text += f"  prefill: {prefill}\n"
    return parse_manifest(text + spec, source="test")


def rendered(parsed: KVCacheManifest, refs: Refs = REFS, settings: Settings = SETTINGS) -> Rendered:
    """`render`, after a look that the world's defaults were meant."""
    return render(parsed, refs, settings)


def one(result: Rendered, kind: str, name: str) -> dict[str, Any]:
    """The object; a test fails when it is not there once."""
    found = [
        item for item in result.objects if (item["kind"], item["metadata"]["name"]) == (kind, name)
    ]
    assert len(found) == 1, f"{kind} {name} is there {len(found)} times"
    return found[0]


def pod_spec(item: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = item["spec"]["template"]["spec"]
    return spec


def pod_templates(result: Rendered) -> Iterator[dict[str, Any]]:
    for item in result.objects:
        if item["kind"] in ("Deployment", "StatefulSet", "DaemonSet"):
            yield item["spec"]["template"]


def golden_text(example: Path) -> str:
    """What an example becomes, as YAML."""
    result = rendered(load_manifest(example))
    assert not result.refusals, result.refusals
    # By way of JSON, so that YAML has no anchors for what is the same in two places.
    objects = json.loads(json.dumps(result.objects))
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120)


class _Dumper(yaml.SafeDumper):
    """Text of several lines is written in lines: scripts and ConfigMaps are to be read, too."""


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


if __name__ == "__main__":
    GOLDENS.mkdir(parents=True, exist_ok=True)
    for old in GOLDENS.glob("*.yaml"):
        old.unlink()
    for source in EXAMPLES:
        (GOLDENS / source.name).write_text(golden_text(source))
        print(f"wrote {source.name}", file=sys.stderr)
