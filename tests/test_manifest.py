"""KVCache manifests: what is accepted, what is refused and in which words, and that both agree with the CRD."""

import dataclasses
import json
import re
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from cacheservice.manifest import (
    Device,
    Eviction,
    ManifestRefused,
    RouterType,
    SecretKey,
    TlsMode,
    Transport,
    load_manifest,
    local_notices,
    manifest_from_object,
    parse_manifest,
    rules,
    size_bytes,
)
from cacheservice.manifest.document import MAX_TEXT_BYTES
from cacheservice.manifest.schema import custom_resource_definition, root_schema

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.yaml"))
REFUSED = sorted((ROOT / "examples" / "refused").glob("*.yaml"))


def nodes(schema, path=()):
    """Every node of a structural schema with its path; * stands for items and additional properties."""
    yield path, schema
    for name, field in schema.get("properties", {}).items():
        yield from nodes(field, (*path, name))
    for keyword in ("items", "additionalProperties"):
        if keyword in schema:
            yield from nodes(schema[keyword], (*path, "*"))


def placed_rules():
    """Each CEL rule with the path of the node that has it."""
    return [
        (path, rule)
        for path, node in nodes(root_schema())
        for rule in node.get("x-kubernetes-validations", ())
    ]


def cel_rules():
    return [rule for _, rule in placed_rules()]


def written_paths(value, schema, path=()):
    """The paths of `nodes` at which `value` has something written."""
    yield path
    if isinstance(value, dict):
        for name, item in value.items():
            field = schema.get("properties", {}).get(name)
            if field is not None:
                yield from written_paths(item, field, (*path, name))
            elif "additionalProperties" in schema:
                yield from written_paths(item, schema["additionalProperties"], (*path, "*"))
    elif isinstance(value, list):
        for item in value:
            yield from written_paths(item, schema["items"], (*path, "*"))


def manifest(spec: str, name: str = "demo") -> str:
    lines = "\n".join(f"  {line}" for line in spec.strip("\n").splitlines())
    return f"apiVersion: larder.dev/v1alpha1\nkind: KVCache\nmetadata: {{name: {name}}}\nspec:\n{lines}\n"


def refusal(text: str) -> tuple[str, ...]:
    with pytest.raises(ManifestRefused) as caught:
        parse_manifest(text, source="x.yaml")
    return tuple(f"{p.path}: {p.message}" if p.path else p.message for p in caught.value.problems)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_accepted(path):
    load_manifest(path)


@pytest.mark.parametrize("path", REFUSED, ids=lambda path: path.stem)
def test_refused_example_says_what_its_first_line_promises(path):
    text = path.read_text(encoding="utf-8")
    promised = text.splitlines()[0].removeprefix("# refused: ")
    assert refusal(text) == (promised,)


def test_every_rule_has_refused_examples_of_its_own():
    """Of its own by the place of the rule: three sizes share a sentence, and each needs an example."""
    examples = {(place, rule["message"]): set() for place, rule in placed_rules()}
    assert len(examples) == len(placed_rules()), "two rules of one place have one sentence"
    for path in REFUSED:
        promised = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# refused: ")
        blamed = re.sub(r"\[\d+\]", ".*", promised.partition(": ")[0])
        told_by = [
            (place, rule["message"])
            for place, rule in placed_rules()
            if promised.endswith(f": {rule['message']}")
            if blamed == ".".join(place) + rule.get("fieldPath", "")
            or f".{blamed}" == rule.get("fieldPath")
        ]
        assert len(told_by) <= 1, f"{path.stem} is one example for several rules"
        for rule in told_by:
            examples[rule].add(path.stem)
    assert {rule for rule, found in examples.items() if not found} == set()


def test_every_field_is_written_in_an_accepted_example():
    """So that every rule, bound and enum is seen to let a value pass, at its own place; items of lists count, too."""
    spec = root_schema()["properties"]["spec"]
    written = {
        path
        for example in EXAMPLES
        for document in yaml.safe_load_all(example.read_text(encoding="utf-8"))
        if document["kind"] == "KVCache"
        for path in written_paths(document["spec"], spec)
    }
    fields = {path for path, _ in nodes(spec)}
    assert fields - written == {("cache", "disk")}, "a field without an accepted value"
    assert {place[1:] for place, _ in placed_rules() if place} <= written


def test_every_rule_of_the_schema_has_exactly_one_twin():
    by_message = {}
    for rule in cel_rules():
        assert by_message.setdefault(rule["message"], rule["rule"]) == rule["rule"], (
            "one sentence for two rules"
        )
    assert set(by_message) == set(rules.TWINS)
    assert len(set(rules.TWINS.values())) == len(rules.TWINS)


def test_a_pattern_is_the_very_pattern_of_its_rule():
    for rule in cel_rules():
        twin = rules.TWINS[rule["message"]]
        written = re.search(r"matches\('(.*)'\)", rule["rule"])
        assert isinstance(twin, rules.Pattern) == (
            written is not None and "name" not in rule["rule"]
        )
        if written is not None:
            pattern = twin.text if isinstance(twin, rules.Pattern) else rules.service_name.text
            assert written[1].replace("\\\\", "\\") == pattern
            assert rule["rule"].startswith("!") == (
                isinstance(twin, rules.Pattern) and twin.forbidden
            )


def test_field_path_of_a_rule_names_a_field_that_exists():
    for _, node in nodes(root_schema()):
        for rule in node.get("x-kubernetes-validations", ()):
            field = node
            for name in rule.get("fieldPath", "").strip(".").split("."):
                field = field["properties"][name] if name else field


def test_schema_is_structural_small_and_described():
    text = json.dumps(custom_resource_definition(), separators=(",", ":"))
    assert len(text) <= 30 * 1024
    for path, node in nodes(root_schema()):
        assert node["type"] in {"object", "array", "string", "integer", "boolean"}, path
        # Kubernetes describes metadata itself, and an item is described with its list.
        if path[:1] != ("metadata",) and path[-1:] != ("*",):
            assert node.get("description"), f"{path} has no description"
        if "default" in node and node["type"] != "object" and path != ("spec", "cache", "gpu"):
            default = "false" if node["default"] is False else node["default"]
            assert f"Default: {default}." in node["description"], path
        if path[:1] == ("spec",) and node["type"] == "string":
            assert "maxLength" in node or "enum" in node, (
                f"{path}: a string without bound makes CEL cost unbounded"
            )
        if path[:1] == ("spec",) and node["type"] == "array":
            assert "maxItems" in node, path


def test_prefill_and_decode_have_one_schema():
    spec = root_schema()["properties"]["spec"]["properties"]
    prefill, decode = dict(spec["prefill"]), dict(spec["decode"])
    prefill.pop("description"), decode.pop("description")
    assert prefill == decode


def test_defaults_are_filled_in():
    read = load_manifest(ROOT / "examples" / "minimal.yaml")
    assert (read.name, read.namespace) == ("demo", "default")
    assert read.model is not None
    assert read.model.served_name == "Qwen/Qwen3-0.6B"
    assert read.prefill is not None
    assert read.prefill.replicas is None
    assert read.prefill.tensor_parallel_size == 1
    assert (read.prefill.max_surge, read.prefill.max_unavailable) == (0, 1)
    assert read.engine.device is Device.CUDA
    assert read.cache.cpu_bytes == 8 << 30
    assert read.cache.gpu_bytes == 0
    assert read.cache.tokens_per_chunk is None
    assert read.cache.eviction is Eviction.S3FIFO
    assert read.cache.transport is Transport.AUTO
    assert read.redis.external is None
    assert read.redis.embedded is not None
    assert read.redis.embedded.memory_bytes == 512 << 20
    assert read.router.type is RouterType.SMG
    assert read.tls.mode is TlsMode.AUTO
    assert not read.paused


def test_written_values_win_over_defaults():
    read = load_manifest(ROOT / "examples" / "production.yaml")
    assert read.namespace == "serving"
    assert read.decode is not None
    assert read.decode.args == ("--max-num-seqs=256",)
    assert read.model is not None
    assert read.model.token == SecretKey("huggingface", "token")
    assert read.redis.embedded is None
    assert read.redis.external is not None
    assert read.redis.external.tls is not None
    assert read.redis.external.tls.ca == SecretKey("dsv3-redis-ca", "ca.crt")
    assert read.cache.tolerations == ({"key": "nvidia.com/gpu", "operator": "Exists"},)
    with pytest.raises(dataclasses.FrozenInstanceError):
        read.name = "other"


def test_all_problems_are_told_at_once_in_the_order_of_the_file():
    text = manifest("model: {nam: x}\ncache: {evction: LRU, cpu: 8GB}\ndecode: {replicas: '2'}")
    with pytest.raises(ManifestRefused) as caught:
        parse_manifest(text, source="x.yaml")
    places = [(p.position.line, p.path) for p in caught.value.problems]
    assert places == [
        (5, "spec.model.name"),
        (5, "spec.model.nam"),
        (6, "spec.cache.evction"),
        (6, "spec.cache.cpu"),
        (7, "spec.decode.replicas"),
    ]
    assert str(caught.value).startswith("x.yaml: 5 problems\n  line 5, column 3: spec.model.name: ")


def test_a_misspelt_section_is_not_blamed_twice():
    assert refusal(manifest("model: {name: m}\nprefill: {}\ndecod: {}")) == (
        "spec.decod: unknown field; did you mean 'decode'?",
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "holds no KVCache"),
        ("a: [1,", "not valid YAML"),
        ("just words", "is not a mapping"),
        ("- 1", "is not a mapping"),
        ("a: &a [*a]", "nested deeper"),
        ("\x00", "not valid YAML"),
        ("x" * (MAX_TEXT_BYTES + 1), "longer than 1 MiB"),
        ("[" * 5000, "nested deeper"),
        ("a: " + "{b: " * 100 + "1" + "}" * 100, "nested deeper"),
        (
            "a0: &a0 [x, x]\n"
            + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)),
            "more than 20000 values",
        ),
        (manifest("model: {name: m}\n<<: {decode: {}}"), "merge keys"),
        (manifest("model: {name: m}\n1: 2\ndecode: {}"), "not a string"),
        (manifest("model: {name: !!python/name:os.system x}\ndecode: {}"), "YAML tag"),
        (manifest("model: !secret {name: m}\ndecode: {}"), "YAML tag !secret"),
        (
            manifest("model: {name: 2026-01-01x}\ndecode: {}") + "status: 5\nfoo: 1\n",
            "foo: unknown field",
        ),
    ],
    ids=range(15),
)
def test_text_that_is_no_manifest_is_refused_in_words(text, said):
    assert any(said in line for line in refusal(text)), refusal(text)


def test_date_is_text_as_in_json():
    read = parse_manifest(
        manifest("model: {name: m, revision: 2026-01-01}\ndecode: {}"), source="x"
    )
    assert read.model is not None
    assert read.model.revision == "2026-01-01"


def test_other_objects_in_the_file_are_left_alone_and_named():
    text = "apiVersion: v1\nkind: Secret\nmetadata: {name: hf}\n---\n" + manifest(
        "model: {name: m}\ndecode: {}"
    )
    read = parse_manifest(text, source="x")
    assert [notice.message for notice in read.notices] == [
        "Secret hf in the same file is left alone"
    ]


def test_file_that_cannot_be_read_is_refused_in_words(tmp_path):
    with pytest.raises(ManifestRefused, match="cannot be read"):
        load_manifest(tmp_path / "absent.yaml")
    with pytest.raises(ManifestRefused, match="cannot be read"):
        load_manifest(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: caf\xe9")
    with pytest.raises(ManifestRefused, match="not UTF-8"):
        load_manifest(tmp_path / "latin.yaml")


def test_the_demo_s_manifest_needs_no_notice():
    assert local_notices(load_manifest(ROOT / "examples" / "cpu-local.yaml")) == ()


def test_fields_without_effect_on_one_machine_are_named():
    paths = {
        notice.path
        for notice in local_notices(load_manifest(ROOT / "examples" / "production.yaml"))
    }
    assert {
        "spec.service",
        "spec.tls",
        "spec.redis.external",
        "spec.engine.device",
        "spec.cache.tolerations",
    } <= paths


def test_live_object_of_the_api_is_read_like_its_text():
    metadata = {
        "name": "demo",
        "uid": "u",
        "generation": 3,
        "managedFields": [{"manager": "kubectl"}],
        "labels": {"a": "b"},
    }
    live = {
        "apiVersion": "larder.dev/v1alpha1", "kind": "KVCache", "metadata": metadata,
        "spec": {"model": {"name": "m"}, "decode": {}}, "status": {"conditions": []},
    }  # fmt: skip
    from_text = parse_manifest(manifest("model: {name: m}\ndecode: {}"), source="x")
    from_object = manifest_from_object(live, source="default/demo")
    assert dataclasses.replace(from_object, written=frozenset(), notices=()) == dataclasses.replace(
        from_text, written=frozenset()
    )
    assert live["spec"] == {"model": {"name": "m"}, "decode": {}}, "the caller's object was changed"


def test_sizes_are_read_as_binary_units():
    assert [size_bytes(text) for text in ("0", "64Mi", "2Gi", "1Ti")] == [
        0,
        64 << 20,
        2 << 30,
        1 << 40,
    ]


field_names = sorted(
    {str(name) for path, _ in nodes(root_schema()["properties"]["spec"]) for name in path}
)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "8Gi", "Secret", "--port"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(field_names), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from([*root_schema()["properties"]["spec"]["properties"], "x"]),
        json_values,
        max_size=5,
    )
)
def test_any_object_is_accepted_or_refused_in_words(spec):
    resource = {
        "apiVersion": "larder.dev/v1alpha1",
        "kind": "KVCache",
        "metadata": {"name": "demo"},
        "spec": spec,
    }
    problems = None
    try:
        manifest_from_object(resource, source="x")
    except ManifestRefused as refused:
        problems = [problem.message for problem in refused.problems]
    assert problems is None or (problems and all(problems))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60) | st.text(alphabet="{}[]:,&*!|>#-?\"'\n a1%@`", max_size=60))
def test_any_text_is_refused_in_words(text):
    with pytest.raises(ManifestRefused):
        parse_manifest(text, source="x")
