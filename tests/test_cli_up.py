"""`larder up` with a real engine: it serves, its cache is used, `larder status` sees it, Ctrl-C leaves nothing."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import psutil
import pytest
from engines import tiny_llama
from up_process import CLI, engine_environment, larder_up

from cacheservice.local.http_client import EngineError, ask

pytestmark = pytest.mark.engine

MANIFEST = """
apiVersion: larder.dev/v1alpha1
kind: KVCache
metadata: {name: tiny}
spec:
  model: {name: tiny}
  engine: {device: cpu}
  cache: {cpu: 256Mi, chunkTokens: 128}
  decode: {args: [--dtype=float32, --kv-cache-memory-bytes=67108864, --no-enable-prefix-caching]}
"""


def test_up_serves_from_the_cache_and_ctrl_c_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "kvcache.yaml").write_text(MANIFEST)
    env = engine_environment()
    with larder_up(tmp_path, "--model", str(tiny_llama()), env=env) as (state, process):
        (engine,) = state["engines"]
        port = int(engine["url"].split(":")[2].split("/")[0])
        body = {
            "model": "tiny",
            "prompt": list(range(5, 605)),
            "max_tokens": 4,
            "temperature": 0,
        }
        first = ask("127.0.0.1", port, "/v1/completions", body)
        assert first.cached_tokens == 0
        # Saves end after the answer, and on a busy machine a lookup may miss its deadline.
        for _ in range(20):
            again = ask("127.0.0.1", port, "/v1/completions", body)
            if again.cached_tokens:
                break
        assert again.cached_tokens == 512
        assert again.token_ids == first.token_ids

        # Through the router: the same text, and from the cache the second time.
        router = int(state["router"]["url"].split(":")[2].split("/")[0])
        text = {**body, "prompt": " ".join(str(number) for number in range(400))}
        direct = ask("127.0.0.1", port, "/v1/completions", text)
        for _ in range(20):
            routed = ask("127.0.0.1", router, "/v1/completions", text)
            assert routed.token_ids == direct.token_ids
            if routed.cached_tokens:
                break
        assert routed.cached_tokens > 0
        with pytest.raises(EngineError, match=r"400.*StringOrArray"):
            ask("127.0.0.1", router, "/v1/completions", body)

        shown = subprocess.run(
            [*CLI, "status", "--json"],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        (run,) = json.loads(shown.stdout)["runs"]
        assert run["engines"][0]["healthy"]
        assert run["router"]["ready"]
        assert run["engines"][0]["data_plane"] == "shared_memory"
        assert run["agents"][0]["chunks"] >= 5
        assert run["agents"][0]["index"] == "ready"
        table = subprocess.run(
            [*CLI, "status"], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
        )
        assert "decode" in table.stdout
        assert state["router"]["url"] in table.stdout

        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 9, (
            "redis, agent, API server, engine core, worker, router, and leashes"
        )
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
        _, alive = psutil.wait_procs(family, timeout=0)
        assert not alive
        assert not (tmp_path / ".larder" / "run" / "tiny" / "state.json").exists()
