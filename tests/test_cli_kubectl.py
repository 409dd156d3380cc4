"""kubectl larder: what the screens say about fixed worlds, and what becomes of failures of kubectl."""

from __future__ import annotations

import dataclasses
import json
import os
import stat
import sys
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import kubectl_worlds as worlds
import pytest
from kubectl_worlds import ONE, OTHER, namespace, outcome, page, seen, session

from cacheservice.cli import main as cli
from cacheservice.core.outcomes import Reason
from cacheservice.kubectl.cluster import ClusterError, Forbidden, NotThere, no_such, translated
from cacheservice.kubectl.explain import MEANINGS, explain, explain_request, id_asked_of_agents
from cacheservice.kubectl.pods import pod_state
from cacheservice.kubectl.status import screen, status_view
from cacheservice.kubectl.upgrade import stamp, upgrade_text


def line_with(text: str, *words: str) -> str:
    """The one line with all words."""
    (line,) = [one for one in text.splitlines() if all(word in one for word in words)]
    return line


# status


def test_a_kvcache_that_is_well_fits_on_one_screen() -> None:
    view = status_view(seen())
    text = screen(view)
    assert view.is_ready
    assert text.startswith(
        "demo in namespace team   Ready: True (Ready) since 2026-11-22 00:24 UTC\n"
    )
    assert (
        line_with(text, "endpoint")
        == "endpoint   http://demo.team.svc:8000  router SMG, 1 of 1 ready"
    )
    assert "hostPath is allowed here" in line_with(text, "transport  ")
    assert line_with(text, "redis") == "redis      embedded, 1 of 1 ready; 1 of 1 agents use it"
    assert line_with(text, "demo-cache-a").split() == [
        "demo-cache-a", "node1", "25%", "of", "256", "MiB", "12", "4", "45%", "ready"
    ]  # fmt: skip
    assert line_with(text, "demo-decode-a").split() == [
        "demo-decode-a", "decode", "node1", "ready", "SharedMemory", "3f9a01bc", "90%", "0"
    ]  # fmt: skip
    assert line_with(text, "TransferVerified", "Verified")
    assert "problems" not in text
    assert "not read" not in text
    assert len(text.splitlines()) < 30
    assert max(map(len, text.splitlines())) <= 120


def test_json_has_all_that_the_screen_has() -> None:
    view = json.loads(json.dumps(status_view(seen()).as_json()))
    assert view["is_ready"] is True
    assert view["agents"][0]["hit_tokens"] == 896
    assert [one["fingerprint"] for one in view["engines"]] == [ONE, ONE]


def test_what_is_wrong_is_named_with_object_reason_and_message() -> None:
    text = screen(status_view(seen(
        conditions=[worlds.condition("Ready", "False", "CrashLooping", "pod/x ends\n with   code 2")],
        problems=[{"object": "pod/x", "reason": "CrashLooping", "message": "look at its log"}],
        pages={"demo-cache-a": "does not answer on port 7501; its pod is CrashLoopBackOff"},
    )))  # fmt: skip
    assert "Ready: False (CrashLooping)" in text.splitlines()[0]
    assert "pod/x ends with code 2 (since 2026-11-22 00:24 UTC)" in text
    assert line_with(text, "pod/x  CrashLooping  look at its log")
    assert "its pod is CrashLoopBackOff" in line_with(text, "demo-cache-a")
    assert "not connected" in line_with(text, "demo-decode-a")


def test_a_generation_that_the_operator_has_not_seen_is_not_ready() -> None:
    view = status_view(seen(observedGeneration=1))
    assert not view.is_ready
    assert "generation 2 is new and not seen by the operator yet" in screen(view)


def test_a_resource_without_status_is_said_to_have_no_operator() -> None:
    world = seen()
    bare = dataclasses.replace(world, resource={**worlds.RESOURCE, "status": {}}, agents=())
    text = screen(status_view(bare))
    assert "Ready: unknown" in text
    assert "is it installed?" in text
    assert "none yet" in line_with(text, "endpoint")


def test_an_agent_without_redis_says_why() -> None:
    index = {"health": "unreachable", "reason": "Unreachable", "message": "connection refused"}
    text = screen(status_view(seen(pages={"demo-cache-a": page(index=index, draining=True)})))
    line = line_with(text, "demo-cache-a")
    assert "unreachable: connection refused" in line
    assert line.endswith("draining")
    assert "0 of 1 agents use it" in line_with(text, "redis")


def test_engines_of_others_and_ranks_of_a_group_are_shown_by_their_names() -> None:
    sessions = [
        session("foreign", "both"),
        session("demo-decode-a-dp1", "decode", transport="Stream"),
    ]
    text = screen(status_view(seen(pages={"demo-cache-a": page(sessions=sessions)})))
    assert line_with(text, "foreign", "both", "connected")
    assert "Stream" in line_with(text, "demo-decode-a")


def test_what_could_not_be_read_is_said() -> None:
    text = screen(
        status_view(seen(pages={}, unread=("you may not list pods in namespace team: ask",)))
    )
    assert "not read\n  you may not list pods" in text
    assert "none seen" in text


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "ready"),
        ({"conditions": [], "containerStatuses": []}, "not ready"),
        ({"conditions": [], "phase": "Pending"}, "pending"),
        (
            {"conditions": [], "containerStatuses": [{"state": {"waiting": {"reason": "ErrImagePull"}}}]},
            "ErrImagePull",
        ),
        (
            {
                "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}],
                "phase": "Pending",
            },
            "Unschedulable",
        ),
        (
            {
                "conditions": [],
                "initContainerStatuses": [{"name": "i", "state": {"waiting": {"reason": "CrashLoopBackOff"}}}],
                "containerStatuses": [{"name": "vllm", "state": {"waiting": {"reason": "PodInitializing"}}}],
            },
            "CrashLoopBackOff",
        ),
    ],
)  # fmt: skip
def test_a_pod_s_state_is_one_word(status: dict[str, Any], state: str) -> None:
    assert pod_state(worlds.pod("p", "decode", **status)) == state


# explain


def test_every_reason_has_a_meaning() -> None:
    assert set(MEANINGS) == {reason.label for reason in Reason}


def test_misses_are_counted_by_reason_over_all_agents() -> None:
    text = explain(seen(pages={"demo-cache-a": page(), "demo-cache-b": page()}))
    assert "2 of 2 agents answer" in text
    assert "1,792 of 4,000 tokens found (45%)" in text
    assert line_with(text, "lookup", "prefill", "absent").split()[3:5] == ["6", "75%"]
    assert line_with(text, "load", "decode", "evicted").split()[3:5] == ["2", "25%"]
    assert "spec.cache.cpu" in line_with(text, "load", "decode", "evicted")
    assert "All engines have the fingerprint 3f9a01bc" in text
    assert line_with(text, "dtype", "bfloat16")


def test_two_fingerprints_are_compared_field_by_field() -> None:
    sessions = [
        session("demo-prefill-a", "prefill"),
        session("demo-decode-a", "decode", namespace=OTHER),
    ]
    spaces = [
        namespace(ONE),
        namespace(OTHER, dtype="float16", groups=[{"kind": "full_attention", "block_tokens": 32}]),
    ]
    text = explain(seen(pages={"demo-cache-a": page(sessions=sessions, namespaces=spaces)}))
    assert "Engines have 2 fingerprints" in text
    assert line_with(text, "3f9a01bc  prefill demo-prefill-a")
    assert line_with(text, "77d2e4aa  decode demo-decode-a")
    assert "give both roles the same --dtype" in line_with(text, "dtype", "bfloat16", "float16")
    assert "--block-size" in line_with(text, "groups[0].block_tokens", "16", "32")
    assert "model" not in text.split("FIELD")[1].replace("same --block-size and model", "")


def test_a_fingerprint_that_no_agent_shows_is_still_told() -> None:
    sessions = [
        session("demo-prefill-a", "prefill"),
        session("demo-decode-a", "decode", namespace=OTHER),
    ]
    text = explain(seen(pages={"demo-cache-a": page(sessions=sessions)}))
    assert (
        "77d2e4aa: no agent shows what it is made of: give both roles the same image and args"
        in text
    )


@pytest.mark.parametrize(
    ("world", "sentence"),
    [
        (seen(pages={}), "There is no agent yet: kubectl larder status says what it waits for."),
        (seen(pages={"a": "its pod is Pending"}), "No agent answers"),
        (seen(pages={}, unread=("you may not list pods",)), "get the rights above"),
        (seen(pages={"a": page(sessions=[])}), "No engine is connected"),
        (seen(pages={"a": page(sessions=[session("e", "both")])}), "nothing was looked up yet"),
    ],
)
def test_what_there_is_nothing_to_say_about_is_said_with_the_next_step(
    world: Any, sentence: str
) -> None:
    assert sentence in explain(world)


def test_refused_engines_are_named() -> None:
    refused = ["engine x speaks protocol 9, this agent 1 and 2"]
    assert refused[0] in explain(
        seen(pages={"a": page(refused_hellos=refused), "b": page(refused_hellos=refused)})
    )


# explain REQUEST


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("cmpl-abc", "abc"), ("chatcmpl-abc", "abc"), ("abc", "abc"), (" cmpl-a-0 ", "a-0"),
        ("cmpl-cmpl-x", "cmpl-x"), ("cmpl-", ""),
    ],
)  # fmt: skip
def test_an_id_is_asked_for_without_the_prefix_of_its_api(given: str, asked: str) -> None:
    assert id_asked_of_agents(given) == asked


def test_the_path_of_a_request_is_told_in_order_over_all_agents_and_engines() -> None:
    # Halves of an engine tell their agent at other times, so the times say nothing about the order.
    ring_a = [
        outcome(
            "cmpl-abc-0-0123abcd",
            "prefill",
            "save",
            "hit",
            6.0,
            served_tokens=896,
            num_bytes=3 << 20,
        ),
        outcome("cmpl-abc-0-0123abcd", "prefill", "lookup", "absent", 5.0),
    ]
    ring_b = [
        outcome("cmpl-abc-0-ffff0000", "decode", "load", "hit", 9.0, served_tokens=640),
        outcome("cmpl-abc-0-ffff0000", "decode", "lookup", "hit", 7.0, served_tokens=896),
        outcome("cmpl-other-0-ffff0000", "decode", "lookup", "hit", 1.0),
    ]
    world = seen(pages={"b": page(outcomes=ring_b), "a": page(outcomes=ring_a)})
    text = explain_request(world, "chatcmpl-abc")
    lines = text.splitlines()
    assert lines[0] == "cmpl-abc-0"
    told = [line.split() for line in lines[2:6]]
    assert [(cells[3], cells[8], cells[9]) for cells in told] == [
        ("prefill", "lookup", "absent"), ("prefill", "save", "hit"),
        ("decode", "lookup", "hit"), ("decode", "load", "hit"),
    ]  # fmt: skip
    assert "3 MiB" in lines[3]
    assert "640 of 896" in lines[5]
    assert "prefill took nothing from the cache" in text
    assert "prefill, absent: nothing is stored for this prefix" in text
    assert "decode took 640 tokens from the cache" in text
    assert "cmpl-other" not in text


def test_an_id_of_many_requests_asks_for_more_of_it() -> None:
    ring = [outcome(f"cmpl-a{number}", "decode", "lookup", "hit", 1.0) for number in range(30)]
    text = explain_request(seen(pages={"a": page(outcomes=ring)}), "cmpl-a")
    assert text.startswith("30 requests have cmpl-a in their id, give more of it")


def test_an_unknown_request_is_told_how_far_agents_remember() -> None:
    ring = [outcome("cmpl-x", "decode", "lookup", "hit", 600.0)]
    text = explain_request(
        seen(pages={"a": page(outcomes=ring), "b": "its pod is Pending"}), "cmpl-nope"
    )
    assert "No agent remembers a request with cmpl-nope" in text
    assert line_with(text, "a remembers 1, back to 10 min ago")
    assert line_with(text, "b: its pod is Pending")


# upgrade


def test_upgrade_says_what_rolls_and_what_stays() -> None:
    world = seen()
    text = upgrade_text(world, is_dry_run=False)
    assert line_with(text, "demo-decode", "1 down, 0 more at a time", "larder-payload:1, vllm:1")
    assert "kubectl get kvc demo -n team -w" in text
    pinned = {**worlds.RESOURCE, "spec": {"engine": {"image": "mine:1"}, "paused": True}}
    text = upgrade_text(dataclasses.replace(world, resource=pinned), is_dry_run=True)
    assert "would let" in text
    assert "spec.engine.image is set: mine:1 stays" in text
    assert "spec.paused is true: nothing rolls" in text
    assert "no engines of its own" in upgrade_text(
        dataclasses.replace(world, workloads=()), is_dry_run=False
    )


def test_two_stamps_differ() -> None:
    assert stamp(datetime(2026, 1, 1, tzinfo=UTC)) != stamp(
        datetime(2026, 1, 1, 0, 0, 1, tzinfo=UTC)
    )


# Failures of kubectl


CANNOT, CORE, IN_TEAM = 'User "u" cannot', 'in API group ""', 'in the namespace "team"'
PODS = f'resource "pods" {CORE}'


@pytest.mark.parametrize(
    ("stderr", "kind", "words"),
    [
        (
            f"Error from server (Forbidden): pods is forbidden: {CANNOT} list {PODS} {IN_TEAM}",
            Forbidden, ("you may not list pods in namespace team", "kubectl auth can-i list pods -n team"),
        ),
        (
            f'error upgrading connection: is forbidden: {CANNOT} create resource "pods/portforward" {CORE} {IN_TEAM}',
            Forbidden, ("create pods/portforward", "can-i create pods --subresource=portforward -n team"),
        ),
        (
            f'nodes is forbidden: {CANNOT} list resource "nodes" {CORE} at the cluster scope',
            Forbidden, ("list nodes in the whole cluster",),
        ),
        (
            f'is forbidden: {CANNOT} get resource "kvcaches" in API group "larder.dev" {IN_TEAM}',
            Forbidden, ("get kvcaches.larder.dev in namespace team",),
        ),
        ('error: the server doesn\'t have a resource type "kvcaches"', ClusterError, ("helm install",)),
        ('Error from server (NotFound): kvcaches.larder.dev "x" not found', NotThere, ()),
        ("The connection to the server localhost:8080 was refused", ClusterError, ("--context",)),
        ("error: You must be logged in to the server (Unauthorized)", ClusterError, ("log in again",)),
        ("something new\nof two lines", ClusterError, ("kubectl get failed: something new of two lines",)),
    ],
)  # fmt: skip
def test_what_kubectl_complains_about_is_said_with_the_remedy(
    stderr: str, kind: type, words: tuple[str, ...]
) -> None:
    error = translated(stderr, ("get",))
    assert isinstance(error, kind)
    for word in words:
        assert word in str(error)


def test_a_name_that_is_not_there_is_answered_with_the_nearest() -> None:
    assert (
        no_such("dmo", ["demo", "other"], "team")
        == "there is no KVCache dmo in namespace team: did you mean demo?"
    )
    assert "but there are demo, other" in no_such("zzz", ["other", "demo"], "")
    assert "kubectl get kvcaches -A" in no_such("x", [], "team")


# The whole way, with a kubectl that is a script


FAKE = """#!{python}
import json, os, sys
words = sys.argv[1:]
with open({log!r}, "a") as log:
    log.write(json.dumps(words) + "\\n")
answers = json.load(open({answers!r}))
for name in ("--kubeconfig", "--context", "--namespace"):
    if name in words:
        at = words.index(name)
        del words[at:at + 2]
if words[0] == "port-forward":
    print("Forwarding from 127.0.0.1:%d -> 7501" % answers["port"], flush=True)
    sys.stdin.close()
    import time
    time.sleep(60)
key = " ".join(words[:3]) if " ".join(words[:3]) in answers else " ".join(words[:2])
answer = answers.get(key)
if answer is None:
    print(answers.get("else", "Error from server (NotFound): nothing here"), file=sys.stderr)
    sys.exit(1)
print(answer if isinstance(answer, str) else json.dumps(answer))
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubectl]:
    with agent_page(page(outcomes=[outcome("cmpl-abc-0", "decode", "lookup", "hit", 1.0)])) as port:
        kubectl = FakeKubectl(tmp_path, port)
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
        monkeypatch.chdir(tmp_path)
        yield kubectl


class FakeKubectl:
    """Answers by its first words; `answers` may be changed. Everything that was asked is in `asked()`."""

    def __init__(self, folder: Path, port: int) -> None:
        world = seen()
        self._folder = folder
        self.answers: dict[str, Any] = {
            "port": port,
            "get kvcaches.larder.dev demo": world.resource,
            "get kvcaches.larder.dev -o": {"items": [world.resource]},
            "get pods": {"items": list(world.pods)},
            "get deployments.apps,daemonsets.apps,statefulsets.apps": {
                "items": list(world.workloads)
            },
            "annotate kvcaches.larder.dev": "annotated",
        }
        path = folder / "bin" / "kubectl"
        path.parent.mkdir()
        path.write_text(FAKE.format(
            python=sys.executable, log=str(folder / "asked"), answers=str(folder / "answers.json")
        ))  # fmt: skip
        path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def run(self, *words: str, monkeypatch: pytest.MonkeyPatch) -> int:
        """`kubectl larder …`; its exit code."""
        (self._folder / "answers.json").write_text(json.dumps(self.answers))
        monkeypatch.setattr(sys, "argv", ["/usr/bin/kubectl-larder", *words])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return int(ended.value.code or 0)

    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in (self._folder / "asked").read_text().splitlines()]


@contextmanager
def agent_page(content: dict[str, Any] | str) -> Iterator[int]:
    """An agent's HTTP, as a port of loopback; a text is why it is not ready."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

        def do_GET(self) -> None:
            is_ready = not isinstance(content, str)
            body = (json.dumps(content) if is_ready else str(content)).encode()
            if "metrics" in self.path:
                body = b"cacheservice_x 1\n"
            self.send_response(200 if is_ready else 503)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


def test_status_asks_kubectl_and_agents_with_the_user_s_flags(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("status", "demo", "-n", "team", "--context", "prod", "--kubeconfig", "/k")
    assert fake.run(*words, monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "25% of 256 MiB" in line_with(out, "demo-cache-a")
    for asked in fake.asked():
        assert asked[:6] == ["--kubeconfig", "/k", "--context", "prod", "--namespace", "team"]
    assert ["port-forward", "pod/demo-cache-a", ":7501"] in [asked[6:9] for asked in fake.asked()]


def test_status_ends_with_1_when_it_is_not_ready(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.answers["get kvcaches.larder.dev demo"] = seen(
        conditions=[worlds.condition("Ready", "False", "NoNodes")]
    ).resource
    assert fake.run("status", "demo", "-o", "json", monkeypatch=monkeypatch) == 1
    assert json.loads(capsys.readouterr().out)["conditions"][0]["reason"] == "NoNodes"


def test_an_agent_that_starts_says_what_it_waits_for(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_page("waiting for 64 MiB of memory") as port:
        fake.answers["port"] = port
        fake.run("status", "demo", monkeypatch=monkeypatch)
    line = line_with(capsys.readouterr().out, "demo-cache-a")
    assert line.endswith("answers 503: waiting for 64 MiB of memory")


def test_an_agent_that_is_gone_is_said_to_be(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with agent_page({}) as port:
        fake.answers["port"] = port
    fake.run("status", "demo", monkeypatch=monkeypatch)
    line = line_with(capsys.readouterr().out, "demo-cache-a")
    assert line.endswith("does not answer on port 7501; its pod is ready")


def test_one_request_is_explained(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake.run("explain", "demo", "cmpl-abc", monkeypatch=monkeypatch) == 0
    assert capsys.readouterr().out.startswith("cmpl-abc-0\n")


def test_upgrade_sets_a_stamp_and_a_dry_run_does_not(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fake.run("upgrade", "demo", "--dry-run", monkeypatch=monkeypatch) == 0
    assert not [asked for asked in fake.asked() if "annotate" in asked]
    assert fake.run("upgrade", "demo", monkeypatch=monkeypatch) == 0
    (asked,) = [asked for asked in fake.asked() if "annotate" in asked]
    assert asked[2:5] == ["annotate", "kvcaches.larder.dev", "demo"]
    assert asked[5].startswith("larder.dev/upgrade=20")
    assert "demo-prefill" in capsys.readouterr().out


SECRET = "planted-7f3a9c"


def test_a_report_has_everything_but_secrets(
    fake: FakeKubectl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    leaky = worlds.pod("demo-decode-a", "decode", containerStatuses=[
        {"name": "vllm", "restartCount": 1, "state": {"running": {}}}
    ])  # fmt: skip
    leaky["spec"]["containers"] = [
        {
            "name": "vllm",
            "args": ["--api-key", SECRET],
            "env": [{"name": "HF_TOKEN", "value": SECRET}],
        }
    ]
    leaky["metadata"]["annotations"] = {"kubectl.kubernetes.io/last-applied-configuration": SECRET}
    fake.answers["get pods"] = {"items": [leaky, *seen().pods[:1]]}
    fake.answers |= {
        "get configmaps": {
            "items": [{"data": {"connection": f'{{"url": "redis://u:{SECRET}@h"}}'}}]
        },
        "get events": {"items": [{"message": f"said token={SECRET}"}]},
        "get secrets": "NAME  TYPE  DATA\ndemo-redis-password  Opaque  1",
        "logs demo-decode-a": f"Authorization: Bearer {SECRET}\npassword: {SECRET}\nall is well",
        "describe pods": f"Environment:\n  HF_TOKEN:  {SECRET}\n  --api-key\n  {SECRET}\n",
        "else": 'secrets is forbidden: User "u" cannot list resource "nodes" in API group "" at the cluster scope',
    }
    assert fake.run("report", "demo", "-o", "r.zip", monkeypatch=monkeypatch) == 0
    with zipfile.ZipFile(tmp_path / "r.zip") as archive:
        files = {name: archive.read(name).decode() for name in archive.namelist()}
    for name, content in files.items():
        assert SECRET not in content, name
    assert "all is well" in files["logs/demo-decode-a.vllm.log"]
    assert "logs/demo-decode-a.vllm.previous.log" in files
    assert "demo-redis-password" in files["secrets.txt"]
    assert json.loads(files["agents/demo-cache-a.statusz.json"])["node"] == "node1"
    assert "cacheservice_x" in files["agents/demo-cache-a.metrics.txt"]
    assert json.loads(files["kvcache.json"])["kind"] == "KVCache"
    assert "you may not list nodes" in files["README.txt"]
    assert "could not be read" in capsys.readouterr().out
    # What is never asked for can't leak.
    for asked in fake.asked():
        if "secrets" in asked:
            assert "-o" not in asked
        assert not {"secret", "secrets", "all"} & set(asked) or "--server-print=true" in asked
    assert fake.run("report", "demo", "-o", "r.zip", monkeypatch=monkeypatch) == 2
    assert "r.zip exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("status", "dmo"), 2, "did you mean demo?"),
        (("status", "demo", "-o", "yaml"), 2, "json is the only other form"),
        (("explain", "demo", "cmpl-"), 2, "is no id of a request"),
    ],
)
def test_what_users_get_wrong_is_one_sentence(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: tuple[str, ...],
    code: int, message: str,
) -> None:  # fmt: skip
    assert fake.run(*words, monkeypatch=monkeypatch) == code
    err = " ".join(capsys.readouterr().err.split())
    assert message in err
    assert "Traceback" not in err


def test_without_kubectl_it_says_so(
    fake: FakeKubectl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert fake.run("status", "demo", monkeypatch=monkeypatch) == 1
    assert "install kubectl" in capsys.readouterr().err


def test_without_the_right_to_list_pods_the_rest_is_shown(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    del fake.answers["get pods"]
    fake.answers["else"] = (
        'User "u" cannot list resource "pods" in API group "" in the namespace "team"'
    )
    assert fake.run("status", "demo", monkeypatch=monkeypatch) == 0
    out = capsys.readouterr().out
    assert "not read\n  you may not list pods in namespace team" in out
    assert "http://demo.team.svc:8000" in out


def test_larder_kubectl_is_the_same_as_the_plugin(
    fake: FakeKubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.run("status", "demo", monkeypatch=monkeypatch)
    plugin = capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["larder", "kubectl", "status", "demo"])
    with pytest.raises(SystemExit):
        cli.main()
    assert capsys.readouterr().out == plugin
