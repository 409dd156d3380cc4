"""What helm makes of the chart, without a cluster: golden renders, schemas of Kubernetes, permissions, refusals.

The renders in golden/ are compared as text, without the CRD, which is compared with its file. After a change that is
meant: LARDER_UPDATE_GOLDEN=1 pytest e2e/test_chart.py, and read the diff.
"""

from __future__ import annotations

import copy
import os
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from cacheoperator.__main__ import read_settings
from cacheoperator.install_check import NEEDED, Scope
from cacheoperator.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts" / "larder"
GOLDEN = Path(__file__).resolve().parent / "golden"
RENDERS = ("default", "namespaced", "everything")
NAMESPACE = "larder-system"
OLDEST, NEWEST = "1.30", "1.37"
"""Versions of Kubernetes whose schemas every object must satisfy; the oldest is that of Chart.yaml's kubeVersion."""

Object = dict[str, Any]


def helm_program() -> str:
    """The helm of the bundled cluster, or one on PATH."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    bundled = Path(os.environ.get("LARDER_E2E_DIR") or Path(cache) / "larder-e2e") / "bin" / "helm"
    found = str(bundled) if bundled.exists() else shutil.which("helm")
    if found is None:
        pytest.skip("helm is missing: run e2e/cluster/build.sh, or put helm 3.14 or newer on PATH")
    return found


def run_helm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([helm_program(), *args], capture_output=True, text=True, check=False)


def template(*args: str) -> str:
    """`helm template` of the release `larder`; fails the test with helm's words."""
    done = run_helm("template", "larder", str(CHART), "--namespace", NAMESPACE, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def values_of(render: str) -> str:
    return str(GOLDEN / f"chart-{render}.values.yaml")


def objects_of(text: str) -> list[Object]:
    return [item for item in yaml.safe_load_all(text) if item]


def without_crd(text: str) -> str:
    documents = text.split("---\n")
    return "---\n".join(d for d in documents if "kind: CustomResourceDefinition" not in d)


def pods_in(objects: list[Object]) -> Iterator[tuple[str, Object]]:
    """(name, pod template or pod) of everything that becomes a pod."""
    for item in objects:
        if item["kind"] == "Pod":
            yield item["metadata"]["name"], item
        elif item["kind"] == "Deployment":
            yield item["metadata"]["name"], item["spec"]["template"]


def one(objects: list[Object], kind: str, name: str = "larder-operator") -> Object:
    (found,) = [o for o in objects if (o["kind"], o["metadata"]["name"]) == (kind, name)]
    return found


@pytest.fixture(params=RENDERS)
def render(request: pytest.FixtureRequest) -> tuple[str, list[Object]]:
    text = template("--values", values_of(request.param))
    return request.param, objects_of(text)


@pytest.mark.parametrize("name", RENDERS)
def test_render_is_the_golden_one(name: str) -> None:
    text = without_crd(template("--values", values_of(name)))
    golden = GOLDEN / f"chart-{name}.yaml"
    if os.environ.get("LARDER_UPDATE_GOLDEN"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", RENDERS)
def test_lint_has_nothing_to_say(name: str) -> None:
    done = run_helm("lint", "--strict", str(CHART), "--values", values_of(name))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout


@pytest.mark.parametrize("version", [OLDEST, NEWEST])
def test_every_object_is_valid_for_kubernetes(
    render: tuple[str, list[Object]], version: str
) -> None:
    name, objects = render
    checked = 0
    for item in objects:
        if item["apiVersion"].startswith("monitoring.coreos.com/"):
            continue
        kubernetes_validate.validate(item, version, strict=True)
        checked += 1
    assert checked >= 12, name


def test_objects_have_different_names(render: tuple[str, list[Object]]) -> None:
    names = [(o["kind"], o["metadata"].get("namespace"), o["metadata"]["name"]) for o in render[1]]
    assert len(set(names)) == len(names)


def test_crd_is_the_file_and_is_kept() -> None:
    source = yaml.safe_load((CHART / "files" / "kvcaches.yaml").read_text())
    crd = one(objects_of(template()), "CustomResourceDefinition", "kvcaches.larder.dev")
    assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert crd["spec"] == source["spec"]
    given_away = one(
        objects_of(template("--set", "crds.keep=false")), "CustomResourceDefinition", "kvcaches.larder.dev"
    )  # fmt: skip
    assert "annotations" not in given_away["metadata"]
    assert given_away["spec"] == source["spec"]
    kinds = {item["kind"] for item in objects_of(template("--set", "crds.enabled=false"))}
    assert "CustomResourceDefinition" not in kinds


def test_nothing_outside_namespaces_when_told_so() -> None:
    objects = objects_of(template("--values", values_of("namespaced")))
    places = {o["metadata"].get("namespace") for o in objects}
    assert places == {NAMESPACE, "team-a", "team-b"}
    in_namespaces = {
        "ConfigMap", "Deployment", "Pod", "Role", "RoleBinding", "Service", "ServiceAccount",
    }  # fmt: skip
    assert {o["kind"] for o in objects} == in_namespaces


@pytest.mark.parametrize(
    "left_out", ["watchNamespaces=[]", "crds.enabled=true", "rbac.aggregate=true"]
)
def test_each_of_the_three_switches_brings_objects_outside_namespaces(left_out: str) -> None:
    objects = objects_of(template("--values", values_of("namespaced"), "--set-json", left_out))
    assert any("namespace" not in o["metadata"] for o in objects)


def _granted(objects: list[Object], kind: str, namespace: str | None) -> set[tuple[str, str, str]]:
    """What the operator's account is given by roles of `kind` in `namespace`, by way of their bindings."""
    granted: set[tuple[str, str, str]] = set()
    for binding in objects:
        if binding["kind"] != f"{kind}Binding" or binding["metadata"].get("namespace") != namespace:
            continue
        subject = {"kind": "ServiceAccount", "name": "larder-operator", "namespace": NAMESPACE}
        if subject not in binding["subjects"]:
            continue
        (role,) = [
            o
            for o in objects
            if o["kind"] == binding["roleRef"]["kind"] == kind
            and o["metadata"]["name"] == binding["roleRef"]["name"]
            and o["metadata"].get("namespace") == namespace
        ]
        granted |= {
            (group, resource, verb)
            for rule in role["rules"]
            for group in rule["apiGroups"]
            for resource in rule["resources"]
            for verb in rule["verbs"]
        }
    return granted


def _needed(*scopes: Scope) -> set[tuple[str, str, str]]:
    return {(n.group, n.resource, verb) for n in NEEDED if n.scope in scopes for verb in n.verbs}


def test_whole_cluster_is_watched_with_what_is_needed_and_no_more() -> None:
    objects = objects_of(template())
    assert _granted(objects, "ClusterRole", None) == _needed(Scope.WATCHED, Scope.CLUSTER)
    assert _granted(objects, "Role", NAMESPACE) == _needed(Scope.LEASE)


def test_namespaces_are_watched_with_what_is_needed_and_no_more() -> None:
    objects = objects_of(template("--values", values_of("namespaced")))
    assert _granted(objects, "ClusterRole", None) == set()
    assert _granted(objects, "Role", NAMESPACE) == set()
    for namespace in ("team-a", "team-b"):
        assert _granted(objects, "Role", namespace) == _needed(Scope.WATCHED, Scope.LEASE)


def test_roles_are_left_to_others_when_told_so() -> None:
    objects = objects_of(template("--set", "rbac.create=false,rbac.aggregate=false"))
    ours = [o for o in objects if "Role" in o["kind"] and o["metadata"]["name"] != "larder-test"]
    assert ours == []


def test_users_of_the_cluster_get_kvcaches_with_their_roles() -> None:
    roles = {
        o["metadata"]["name"]: o
        for o in objects_of(template())
        if o["kind"] == "ClusterRole" and o["metadata"]["name"] != "larder-operator"
    }

    def verbs(of: str) -> set[str]:
        label = f"rbac.authorization.k8s.io/aggregate-to-{of}"
        return {
            verb
            for role in roles.values()
            if role["metadata"]["labels"].get(label) == "true"
            for rule in role["rules"]
            for verb in rule["verbs"]
        }

    assert set(roles) == {"larder-view", "larder-edit", "larder-admin"}
    assert verbs("view") == {"get", "list", "watch"}
    assert verbs("edit") == verbs("view") | {"create", "update", "patch", "delete"}
    assert verbs("admin") == verbs("edit") | {"deletecollection"}


def test_every_pod_passes_restricted_and_has_a_read_only_root(
    render: tuple[str, list[Object]],
) -> None:
    pods = dict(pods_in(render[1]))
    assert set(pods) == {"larder-operator", "larder-test-permissions", "larder-test-admission"}
    for name, pod in pods.items():
        spec = pod["spec"]
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec), name
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert spec["enableServiceLinks"] is False
        kinds = {kind for volume in spec.get("volumes", []) for kind in volume if kind != "name"}
        assert kinds <= {"configMap", "emptyDir"}, name
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]
            assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_user_of_the_pods_may_be_left_to_the_cluster() -> None:
    for _, pod in pods_in(objects_of(template("--set", "operator.runAsUser=null"))):
        assert pod["spec"]["securityContext"] == {
            "runAsNonRoot": True,
            "seccompProfile": {"type": "RuntimeDefault"},
        }


def test_operator_is_one_pod_with_probes() -> None:
    objects = objects_of(template())
    spec = one(objects, "Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    (container,) = spec["template"]["spec"]["containers"]
    assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "http"}
    assert container["livenessProbe"]["httpGet"] == {"path": "/healthz", "port": "http"}
    assert {e["name"] for e in container["env"]} >= {"USER", "POD_NAMESPACE"}
    labels = spec["template"]["metadata"]["labels"]
    service = one(objects, "Service", "larder-operator-metrics")["spec"]
    for selector in (spec["selector"]["matchLabels"], service["selector"]):
        assert selector.items() <= labels.items()
    assert [(p["name"], p["containerPort"]) for p in container["ports"]] == [("http", 8080)]
    assert service["ports"][0]["targetPort"] == "http"
    for _, pod in pods_in(objects):
        if pod["metadata"]["labels"]["app.kubernetes.io/component"] == "test":
            assert not service["selector"].items() <= pod["metadata"]["labels"].items()


def _config(objects: list[Object]) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(one(objects, "ConfigMap")["data"]["operator.yaml"])
    return config


def _settings(objects: list[Object], folder: Path) -> Settings:
    """As the operator reads them in its pod."""
    path = folder / "operator.yaml"
    path.write_text(one(objects, "ConfigMap")["data"]["operator.yaml"])
    return read_settings(path, {"POD_NAMESPACE": NAMESPACE})


def test_operator_reads_the_values_as_its_settings(tmp_path: Path) -> None:
    settings = _settings(objects_of(template("--values", values_of("everything"))), tmp_path)
    assert settings.images.agent == "mirror.example:5000/larder/larder@sha256:" + "1".rjust(64, "0")
    assert settings.images.redis == "mirror.example:5000/library/redis:7.4"
    assert settings.images.engine_cuda == "mirror.example:5000/vllm/vllm-openai:v0.32.0"
    assert settings == Settings(
        operator_version=settings.operator_version,
        images=settings.images,
        operator_namespace=NAMESPACE,
        cluster_domain="cluster.example",
        certificate_lifetime_s=3600,
        secret_refresh_s=60,
        resync_s=60,
        num_workers=8,
        http_port=8080,
        image_pull_policy="IfNotPresent",
    )
    namespaced = _settings(objects_of(template("--values", values_of("namespaced"))), tmp_path)
    assert namespaced.watch_namespaces == ("team-a", "team-b")
    by_default = _settings(objects_of(template()), tmp_path)
    assert by_default == Settings(
        operator_version=by_default.operator_version,
        images=by_default.images,
        operator_namespace=NAMESPACE,
    )


def test_air_gap_needs_one_registry_and_the_listed_images() -> None:
    """All images that appear anywhere in the render are those of images.txt, moved to the one registry."""
    objects = objects_of(template("--set", "global.imageRegistry=mirror.example:5000/proxy"))
    found = set(_config(objects)["images"].values())
    found |= {c["image"] for _, pod in pods_in(objects) for c in pod["spec"]["containers"]}
    listed = (CHART / "images.txt").read_text().splitlines()
    assert found == {f"mirror.example:5000/proxy/{image.partition('/')[2]}" for image in listed}
    by_default = objects_of(template())
    assert set(_config(by_default)["images"].values()) == set(listed)


def test_a_changed_setting_restarts_the_operator_and_other_values_do_not() -> None:
    def pod(*args: str) -> Object:
        found = one(objects_of(template(*args)), "Deployment")["spec"]["template"]
        return copy.deepcopy(found)

    before = pod()
    assert pod("--set", "operator.resyncSeconds=301") != before
    assert pod("--set", "images.redis.tag=9.0") != before
    assert pod("--set", "dashboards.enabled=true,podMonitor.enabled=true") == before


def test_pods_carry_nothing_that_a_new_chart_version_would_change(tmp_path: Path) -> None:
    chart = tmp_path / "larder"
    shutil.copytree(CHART, chart)
    text = (chart / "Chart.yaml").read_text()
    (chart / "Chart.yaml").write_text(text.replace("\nversion: 0.1.0", "\nversion: 0.1.1"))
    done = run_helm("template", "larder", str(chart), "--namespace", NAMESPACE)
    assert done.returncode == 0, done.stderr
    newer = {o["kind"]: o for o in objects_of(done.stdout)}["Deployment"]
    assert newer["metadata"]["labels"]["helm.sh/chart"] == "larder-0.1.1"
    now = one(objects_of(template()), "Deployment")
    assert now["spec"] == newer["spec"]


@pytest.mark.parametrize(
    ("setting", "word"),
    [
        ("operator.replicas=2", "replicas"),
        ("image.tag=1", "image"),
        ("crds.enabled=maybe", "crds"),
        ("images.redis.digest=sha256:1", "digest"),
        ("watchNamespaces={Team_A}", "watchNamespaces"),
    ],
)
def test_helm_refuses_wrong_values(setting: str, word: str) -> None:
    done = run_helm("template", "larder", str(CHART), "--set", setting)
    assert done.returncode != 0
    assert word in done.stderr


def test_package_has_all_that_a_release_needs(tmp_path: Path) -> None:
    done = run_helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    with tarfile.open(tmp_path / "larder-0.1.0.tgz") as package:
        names = {member.name.removeprefix("larder/") for member in package.getmembers()}
    assert names >= {
        "Chart.yaml", "values.yaml", "values.schema.json", "images.txt", "files/kvcaches.yaml",
        "dashboards/agents.json", "dashboards/operator.json", "templates/NOTES.txt",
    }  # fmt: skip
    assert not any("golden" in name or name.endswith(".py") for name in names)


def test_an_umbrella_chart_may_have_globals_of_its_own(tmp_path: Path) -> None:
    umbrella = tmp_path / "platform"
    (umbrella / "charts").mkdir(parents=True)
    shutil.copytree(CHART, umbrella / "charts" / "larder")
    (umbrella / "Chart.yaml").write_text("apiVersion: v2\nname: platform\nversion: 1.0.0\n")
    (umbrella / "values.yaml").write_text(
        "global: {imageRegistry: mirror.example, storageClass: fast}\nlarder: {crds: {enabled: false}}\n"
    )
    done = run_helm("template", "platform", str(umbrella), "--namespace", NAMESPACE)
    assert done.returncode == 0, done.stderr
    config = _config(objects_of(done.stdout))
    assert config["images"]["redis"] == "mirror.example/valkey/valkey:8.1"


@pytest.mark.parametrize(
    ("args", "sentences"),
    [
        ((), ["watches the whole cluster", "The CRD, all KVCaches and what they run stay"]),
        (
            ("--set", "watchNamespaces={team-a,team-b}"),
            ["watches the namespaces team-a, team-b", "kubectl -n team-a apply -f -"],
        ),
        (("--set", "crds.keep=false"), ["it also DELETES the CRD"]),
        (("--set", "rbac.create=false"), ["the operator can do nothing until you bind rules"]),
    ],
)
def test_notes_have_the_next_four_commands(args: tuple[str, ...], sentences: list[str]) -> None:
    done = run_helm(
        "install", "larder", str(CHART), "--namespace", NAMESPACE, "--dry-run=client", *args
    )
    assert done.returncode == 0, done.stderr
    notes = done.stdout.partition("NOTES:")[2]
    for command in (
        "kubectl -n larder-system rollout status deployment/larder-operator",
        "apply -f - <<EOF",
        "get kvc -w",
        "kubectl get kvc --all-namespaces",
    ):
        assert command in notes
    for sentence in sentences:
        assert sentence in notes
