"""The real API server admits every example, refuses every other one in the promised words, and fills in defaults.

tests/test_manifest.py says the same of our own reader; where a rule is one of the schema's own keywords, or of YAML,
the API server has its own words, which are listed here.
"""

import json

import pytest
import yaml
from live_cluster import REPOSITORY, CommandFailed, Namespace, kubectl

pytestmark = pytest.mark.timeout(300)

EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
REFUSED = sorted((REPOSITORY / "examples" / "refused").glob("*.yaml"))

OTHER_WORDS = {
    "boolean-for-a-word": "spec.tls.mode in body must be of type string",
    "chunk-not-a-multiple": "spec.cache.chunkTokens in body should be a multiple of 16",
    "integer-size": "spec.cache.cpu in body must be of type string",
    "missing-model-name": "spec.model.name: Required value",
    "no-tensor-parallelism": "spec.decode.tensorParallelSize in body should be greater than or equal to 1",
    "other-version": 'no matches for kind "KVCache" in version "larder.dev/v1"',
    # Kubernetes drops a section without a value: what is left has no engines.
    "section-without-value": "a cache without engines must choose its nodes",
    "unknown-field": 'unknown field "spec.cache.evction"',
    "unknown-field-without-neighbour": 'unknown field "spec.tls.zzz"',
    "untyped-toleration": 'unknown field "spec.cache.tolerations[0].taint"',
    "wrong-enum": 'spec.cache.eviction: Unsupported value: "lru": supported values: "S3FIFO", "LRU"',
}
OF_THE_FILE_ALONE = {"duplicate-key", "two-kvcaches"}
"""kubectl reads the file before the API server sees it: it keeps the last of two keys, and sends both documents."""


def create(namespace: Namespace, path: str = "-", text: str | None = None) -> dict:
    output = namespace.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", path, stdin=text
    )
    return dict(json.loads(output))


@pytest.fixture
def namespace(definition, namespaces):
    return namespaces["admission"]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_admitted(namespace, path):
    documents = list(yaml.safe_load_all(path.read_text(encoding="utf-8")))
    assert [document["kind"] for document in documents].count("KVCache") == 1
    for document in documents:
        document["metadata"].pop("namespace", None)
        made = create(namespace, text=yaml.safe_dump(document))
        assert made["metadata"]["name"] == document["metadata"]["name"]


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_refused_example_is_refused_in_the_promised_words(namespace, path):
    if path.stem in OF_THE_FILE_ALONE:
        namespace.kubectl("create", "--dry-run=server", "--validate=strict", "-f", str(path))
        return
    with pytest.raises(CommandFailed) as refused:
        create(namespace, str(path))
    said = str(refused.value)
    if path.stem in OTHER_WORDS:
        assert OTHER_WORDS[path.stem] in said
        return
    # "# refused: FIELD: 'VALUE': SENTENCE"
    promised = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# refused: ")
    field = promised.split(": ", 1)[0]
    assert f"{field}: Invalid value" in said
    sentences = [
        rule["message"]
        for rule in rules(schema_of(namespace))
        if promised.endswith(rule["message"])
    ]
    assert sentences
    assert sentences[0] in said


def test_defaults_are_filled_in(namespace):
    spec = create(namespace, str(REPOSITORY / "examples" / "minimal.yaml"))["spec"]
    assert spec == {
        "model": {"name": "Qwen/Qwen3-0.6B"},
        "prefill": {"tensorParallelSize": 1},
        "decode": {"tensorParallelSize": 1},
        "engine": {
            "device": "cuda",
            "gpuResourceName": "nvidia.com/gpu",
            "sharedMemory": "8Gi",
            "startupTimeoutSeconds": 1800,
        },
        "cache": {
            "cpu": "8Gi",
            "gpu": "0",
            "eviction": "S3FIFO",
            "socketGroup": 7070,
            "transport": "Auto",
            "updateStrategy": "RollingUpdate",
        },
        "redis": {},
        "router": {"type": "SMG"},
        "service": {"type": "ClusterIP"},
        "tls": {"mode": "Auto"},
        "verify": "Probe",
        "paused": False,
    }


def test_chunk_size_may_change_and_a_refused_change_leaves_the_resource(namespace):
    name = "changes"
    document = {
        "apiVersion": "larder.dev/v1alpha1",
        "kind": "KVCache",
        "metadata": {"name": name},
        "spec": {
            "paused": True,
            "model": {"name": "m"},
            "decode": {},
            "cache": {"chunkTokens": 256},
        },
    }
    namespace.apply(document)
    try:
        namespace.patch("kvcache", name, {"spec": {"cache": {"chunkTokens": 512}}})
        assert namespace.get("kvcache", name)["spec"]["cache"]["chunkTokens"] == 512
        with pytest.raises(CommandFailed, match="write a whole number with Mi, Gi or Ti"):
            namespace.patch("kvcache", name, {"spec": {"cache": {"cpu": "8GB"}}})
        assert namespace.get("kvcache", name)["spec"]["cache"]["cpu"] == "8Gi"
    finally:
        namespace.delete("kvcache", name)


def test_every_field_is_explained(definition):
    published = json.loads(kubectl("get", "--raw", "/openapi/v3/apis/larder.dev/v1alpha1"))
    schema = published["components"]["schemas"]["dev.larder.v1alpha1.KVCache"]
    silent = [
        ".".join(path)
        for path, node in nodes(schema)
        if not node.get("description") and path[-1:] != ("*",)
    ]
    assert not silent
    explained = kubectl("explain", "kvc.spec.cache.cpu")
    assert "Memory for cached KV on each node" in explained
    assert "Default: 8Gi." in explained


def test_it_is_found_by_short_name_and_category_and_shows_its_columns(namespace):
    namespace.apply(
        {
            "apiVersion": "larder.dev/v1alpha1",
            "kind": "KVCache",
            "metadata": {"name": "shown"},
            "spec": {"paused": True, "model": {"name": "m"}, "decode": {}},
        }
    )
    try:
        header = namespace.kubectl("get", "kvc", "shown").splitlines()[0].split()
        assert header == ["NAME", "READY", "REASON", "CACHE", "PREFILL", "DECODE", "AGE"]
        assert "shown" in namespace.kubectl("get", "ai")
    finally:
        namespace.delete("kvcache", "shown")


def test_stored_definition_is_small(definition):
    spec = definition["spec"]
    assert len(json.dumps(spec, separators=(",", ":"))) <= 30 * 1024


def schema_of(namespace: Namespace) -> dict:
    stored = json.loads(kubectl("get", "crd", "kvcaches.larder.dev", "-o", "json"))
    return stored["spec"]["versions"][0]["schema"]["openAPIV3Schema"]


def nodes(schema, path=()):
    """Every node of a structural schema with its path; * stands for items and additional properties."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, (*path, name))
    for keyword in ("items", "additionalProperties"):
        if isinstance(schema.get(keyword), dict):
            yield from nodes(schema[keyword], (*path, "*"))


def rules(schema):
    return [rule for _, node in nodes(schema) for rule in node.get("x-kubernetes-validations", ())]
