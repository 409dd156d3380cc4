"""What only sessions show: which protocol a connector speaks, how its bytes move, and whether they are read.

Stand-ins hold the sessions (images/stand-in), real ones with the agent of their node, through our own client. Two
resources serve all tests: what one leaves is where the next begins. An agent remembers for a minute whom it refused, so
that is begun first, and its end is looked at after other files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from live_cluster import Document, Namespace, NotYet, until
from redis_of_others import redis_cli, redis_server
from stand_ins import applied, credentials, external, kvcache, problem, stand_in

from cacheservice.core.protocol import OLDEST_PROTOCOL_VERSION, PROTOCOL_VERSION

pytestmark = [pytest.mark.timeout(400), pytest.mark.beside]

FLOW, STRANGE = "flow", "strange"
TOKENS_PER_CHUNK = 16
"""As in images/stand-in/chunks.py."""
NUM_CHUNKS = 24
"""Of one request. Status judges from twenty on."""
ASK = (
    "import sys, urllib.request as web;"
    "web.urlopen('http://127.0.0.1:8000/v1/completions', sys.stdin.buffer.read(), timeout=30).read()"
)


@pytest.fixture(scope="session")
def sessions(installation: Namespace, namespaces: dict[str, Namespace]) -> Namespace:
    return namespaces["sessions"]


@pytest.fixture(scope="session", autouse=True)
def flow(sessions: Namespace) -> Iterator[None]:
    """Prefill maps the arena, decode does without."""
    change = {
        "verify": "Traffic",
        "prefill": {"template": stand_in("cached")},
        "decode": {"template": stand_in("streams")},
    }
    with applied(sessions, kvcache(FLOW, change)):
        yield


@pytest.fixture(scope="session", autouse=True)
def strange(flow: None, sessions: Namespace) -> Iterator[None]:
    """An index that others run, and a decode engine whose connector is of another time."""
    change = {
        "verify": "Traffic",
        "prefill": {"template": stand_in("cached")},
        "decode": {"template": stand_in("stranger")},
    }
    servers = redis_server(sessions, "others", "64mb")
    address = next(servers)
    with (
        credentials(sessions, "owner", "larder", "right") as secret,
        applied(sessions, kvcache(STRANGE, change, external(address, secret))),
    ):
        yield
    next(servers, None)


def newest_pod(namespace: Namespace, name: str, component: str) -> Document:
    """Of a role, or the agent."""
    return max(
        namespace.pods(name, component), key=lambda pod: pod["metadata"]["creationTimestamp"]
    )


def complete(namespace: Namespace, name: str, role: str, request: Document) -> None:
    """Send a request to the engine of a role, past every router, from inside its pod."""
    pod = newest_pod(namespace, name, role)["metadata"]["name"]
    namespace.kubectl(
        "exec", "-i", pod, "-c", "vllm", "--", "python3", "-c", ASK, stdin=json.dumps(request)
    )


def hand_over(namespace: Namespace, name: str, *, is_read: bool) -> None:
    """One prompt that prefill stores and decode finds, and reads, or does not."""
    request: Document = {"prompt": list(range(NUM_CHUNKS * TOKENS_PER_CHUNK)), "cache_salt": name}
    complete(namespace, name, "prefill", request)
    complete(namespace, name, "decode", {**request, "read": is_read})


def until_handed_over(
    namespace: Namespace, name: str, status: str, reason: str, *, is_read: bool
) -> Document:
    """Hand over until TransferVerified says what is wanted: again, as an operator that was away has seen nothing."""
    for turns_left in reversed(range(10)):
        until(
            f"prefill and decode of {name} answer",
            lambda: hand_over(namespace, name, is_read=is_read) is None,
            timeout_s=60,
        )
        try:
            return namespace.until_condition(name, "TransferVerified", status, reason, timeout_s=12)
        except NotYet:
            if not turns_left:
                raise
    raise AssertionError("unreachable")


def flows(namespace: Namespace, name: str) -> Document:
    """What the agent has counted of prefill's chunks for decode."""
    agent = newest_pod(namespace, name, "cache")["metadata"]["name"]
    (found,) = [
        one
        for one in namespace.statusz(agent)["flows"]
        if (one["writer_role"], one["reader_role"]) == ("prefill", "decode")
    ]
    return dict(found)


def test_connector_of_another_time_is_refused_and_told(sessions):
    condition = sessions.until_condition(
        STRANGE,
        "TransferVerified",
        "False",
        "ProtocolMismatch",
        containing=[
            f"this agent speaks {OLDEST_PROTOCOL_VERSION} and {PROTOCOL_VERSION}: upgrade the agent",
            f"kubectl larder upgrade {STRANGE}, or set spec.engine.payloadImage and spec.cache.image",
        ],
    )
    pod = newest_pod(sessions, STRANGE, "decode")
    name, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
    assert f"the agent on {node} refuses engine {name}: protocol_version 9" in condition["message"]
    assert problem(sessions, STRANGE, "ProtocolMismatch")["object"] == f"node/{node}"
    assert sessions.events(STRANGE, "ProtocolMismatch")
    # It goes on without a cache.
    sessions.until_condition(STRANGE, "EnginesReady", "True", timeout_s=60)
    sessions.patch("kvcache", STRANGE, {"spec": {"decode": {"template": stand_in("cached")}}})


def test_chunks_that_decode_finds_and_never_reads(sessions):
    sessions.until_condition(FLOW, "EnginesReady", "True")
    sessions.until_condition(FLOW, "TransferVerified", "Unknown", "AwaitingTraffic")
    condition = until_handed_over(sessions, FLOW, "False", "NothingRead", is_read=False)
    counted = flows(sessions, FLOW)
    assert min(counted["committed"], counted["looked_up"]) >= NUM_CHUNKS
    assert counted["loaded"] == 0
    assert "prefill stores chunks and decode finds them, but reads none" in condition["message"]
    assert f"fingerprint {counted['namespace'][:8]}" in condition["message"]
    assert f"kubectl larder explain {FLOW} says why" in condition["message"]
    assert sessions.conditions(FLOW)["Ready"]["reason"] == "NothingRead"
    assert problem(sessions, FLOW, "NothingRead")["object"] == f"kvcache/{FLOW}"
    assert sessions.events(FLOW, "NothingRead")


def test_stream_where_shared_memory_was_to_be_had(sessions):
    condition = until_handed_over(sessions, FLOW, "True", "FallbackStream", is_read=True)
    assert flows(sessions, FLOW)["loaded"] >= NUM_CHUNKS
    name = newest_pod(sessions, FLOW, "decode")["metadata"]["name"]
    why = f"shared memory is set up, but {name} could not use it: see the log of container vllm"
    assert "decode reads what prefill stores" in condition["message"]
    assert f"bytes move by Stream, which is slower: {why}" in condition["message"]
    status = sessions.get("kvcache", FLOW)["status"]
    assert (status["transport"], status["transportReason"]) == ("Stream", why)
    sessions.until_condition(FLOW, "Ready", "True", timeout_s=30)
    assert sessions.events(FLOW, "FallbackStream")


def test_shared_memory_that_was_asked_for_and_is_not_used(sessions):
    before = {pod["metadata"]["uid"] for pod in sessions.pods(FLOW)}
    sessions.patch("kvcache", FLOW, {"spec": {"cache": {"transport": "SharedMemory"}}})
    name = newest_pod(sessions, FLOW, "decode")["metadata"]["name"]
    sessions.until_condition(
        FLOW,
        "TransferVerified",
        "False",
        "SharedMemoryUnavailable",
        containing=[
            "spec.cache.transport is SharedMemory, but bytes move by Stream",
            f"{name} could not use it: see the log of container vllm",
            ", or write Auto",
        ],
    )
    assert problem(sessions, FLOW, "SharedMemoryUnavailable")["object"] == f"kvcache/{FLOW}"
    sessions.patch("kvcache", FLOW, {"spec": {"cache": {"transport": "Auto"}}})
    until_handed_over(sessions, FLOW, "True", "FallbackStream", is_read=True)
    assert {pod["metadata"]["uid"] for pod in sessions.pods(FLOW)} == before


def test_decode_of_another_layout_is_told_field_by_field(sessions):
    sessions.patch("kvcache", FLOW, {"spec": {"decode": {"template": stand_in("half")}}})
    condition = sessions.until_condition(
        FLOW,
        "TransferVerified",
        "False",
        "LayoutMismatch",
        containing=[
            "prefill and decode store different KV",
            "dtype: prefill float32, decode bfloat16",
        ],
    )
    # Fields that are equal are not told.
    assert "shard_bytes" not in condition["message"]
    assert problem(sessions, FLOW, "LayoutMismatch")["object"] == f"kvcache/{FLOW}"
    assert sessions.events(FLOW, "LayoutMismatch")
    sessions.delete("kvcache", FLOW)


@pytest.mark.late
def test_refused_connector_is_forgotten_when_its_engine_is_gone(sessions):
    until_handed_over(sessions, STRANGE, "True", "Verified", is_read=True)
    assert sessions.get("kvcache", STRANGE)["status"]["transport"] == "SharedMemory"
    sessions.until_condition(STRANGE, "Ready", "True", timeout_s=30)


@pytest.mark.late
def test_agents_take_their_chunks_out_of_a_redis_of_others(sessions):
    """Their keys would live for an hour by themselves."""
    uid = sessions.get("kvcache", STRANGE)["metadata"]["uid"].replace("-", "")
    pattern = f"larder:{uid[:8]}:{{*}}:*"
    hand_over(sessions, STRANGE, is_read=True)
    until(
        "the chunks of this resource in Redis",
        lambda: num_keys(sessions, pattern) >= NUM_CHUNKS,
        timeout_s=30,
    )
    sessions.delete("kvcache", STRANGE)
    kinds = (
        "pods,services,configmaps,secrets,serviceaccounts,deployments,daemonsets,statefulsets,"
        "networkpolicies,poddisruptionbudgets,roles,rolebindings"
    )
    until(
        "no chunk of it is in Redis, and no object of it is left",
        lambda: (
            num_keys(sessions, pattern) == 0
            and not sessions.list(kinds, f"app.kubernetes.io/instance={STRANGE}")
        ),
        timeout_s=60,
    )
    assert sessions.find("kvcache", STRANGE) is None


def num_keys(namespace: Namespace, pattern: str) -> int:
    """Keys that match; chunks' are binary, so they are counted where they are."""
    return int(redis_cli(namespace, "EVAL", "return #redis.call('KEYS', ARGV[1])", "0", pattern))
