"""The fence is behind the step's forward pass with both model runners of vLLM, whose own glue drives the connector.

vLLM's real scheduler and cache manager, our real connector and CUDA copier, pages on the stand-in for a GPU. A forward
pass is queued, as on a GPU, and runs as late as it may: a save that did not wait for it stores other bytes, a load that
did not wait for what the blocks' last owner still writes loses its bytes to that, and the page oracle sees both.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from agent_process import wait_until
from connector_fakes import FakeCache
from gpu_fake import ENGINE, FakeGpu
from threaded_harness import BLOCK_TOKENS, LAYERS, Harness, content_of, prompt

from cacheservice.connector.cuda_copies import KIB, CudaCopier, Staging

STAGING = Staging(num_lanes=4, slab_bytes=4 * KIB, bounce_bytes=KIB, max_rows=256)


class FirstRunner:
    """What vLLM 0.32's V1 runner does with a connector in a step (v1/worker/kv_connector_model_runner_mixin.py)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connector: Any) -> None:
        import vllm.v1.worker.kv_connector_model_runner_mixin as module

        monkeypatch.setattr(module, "get_kv_transfer_group", lambda: connector)
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
        self._mixin = module.KVConnectorModelRunnerMixin

    def step(self, scheduler_output: Any, forward: Any) -> Any:
        with self._mixin._get_kv_connector_output(scheduler_output) as output:
            forward()
        return output


class SecondRunner:
    """The same of the V2 model runner (v1/worker/gpu/kv_connector.py), the default on GPUs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connector: Any) -> None:
        import vllm.v1.worker.gpu.kv_connector as module

        monkeypatch.setattr(module, "is_forward_context_available", lambda: True)
        monkeypatch.setattr(module, "get_forward_context", lambda: None)
        # Not through __init__, which would register the pages once more.
        self._runner = module.ActiveKVConnector.__new__(module.ActiveKVConnector)
        self._runner.kv_connector = connector
        self._runner._pending_load_kwargs = None
        self._runner._disabled = False

    def step(self, scheduler_output: Any, forward: Any) -> Any:
        batch = SimpleNamespace(idx_mapping=[], req_ids=[], num_tokens=0)
        self._runner.pre_forward(scheduler_output, batch, {})
        forward()
        self._runner.finish_forward()
        return self._runner.post_forward(scheduler_output.finished_req_ids)


class Worker:
    """The harness's worker: its calls come from a model runner's glue, once per step."""

    def __init__(self, connector: Any, runner: Any, forward: Any) -> None:
        self._connector = connector
        self._runner = runner
        self._forward = forward
        self._metadata: Any = None
        self._output: Any = None

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._metadata = metadata

    def start_load_kv(self, forward_context: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        plan = SimpleNamespace(
            kv_connector_metadata=self._metadata, has_sync_kv_loads=False, finished_req_ids=set()
        )
        self._output = self._runner.step(plan, self._forward)

    def get_transfer_results(self, finished: set[str]) -> Any:
        return SimpleNamespace(
            finished_sending=self._output.finished_sending or set(),
            finished_recving=self._output.finished_recving or set(),
            failed_recving=self._output.failed_recving or set(),
        )

    def get_kv_connector_stats(self) -> Any:
        return self._output.kv_connector_stats

    def build_connector_worker_meta(self) -> Any:
        return self._output.kv_connector_worker_meta

    def clear_connector_metadata(self) -> None:
        assert self._connector._connector_metadata is None  # the glue has done it

    def shutdown(self) -> None:
        self._connector.shutdown()


class GpuHarness(Harness):
    """The harness with its pages in one allocation on the stand-in, where forward passes are queued."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, cache: FakeCache, runner: Any, **options: Any
    ):
        import cacheservice.connector.connector as module

        register = module.LarderConnector.register_kv_caches

        def register_in_one_allocation(connector: Any, kv_caches: dict[str, Any]) -> None:
            views = torch.zeros(len(kv_caches), *next(iter(kv_caches.values())).shape)
            kv_caches.update(zip(list(kv_caches), views, strict=True))
            register(connector, kv_caches)

        def copier(kv_caches: dict[str, Any]) -> CudaCopier:
            self.gpu = FakeGpu(list(kv_caches.values()), mood="late")
            return CudaCopier(self.gpu, STAGING)

        with monkeypatch.context() as patch:
            patch.setattr(module.LarderConnector, "register_kv_caches", register_in_one_allocation)
            patch.setattr(module, "copier_for", copier)
            super().__init__(monkeypatch, cache, **options)
        self._writes: list[tuple[str, int, Any]] = []
        self._let_saves_end_within_their_step(self.worker)
        self.worker = Worker(self.worker, runner(monkeypatch, self.worker), self._forward)

    def _let_saves_end_within_their_step(self, connector: Any) -> None:
        """Before anything but the save itself makes the forward pass run."""
        start = connector.wait_for_save

        def wait_for_save() -> None:
            saves = {job.save_id for job in connector._connector_metadata.saves}
            start()
            wait_until(lambda: saves <= connector._worker._ended_saves.keys(), what="a save's end")

        connector.wait_for_save = wait_for_save

    def _write_pages(self, request: Any) -> None:
        """Remember what the forward pass of this step writes."""
        table = self._table(request)
        valid = min(request.num_computed_tokens, request.num_tokens)
        for i in range(valid // BLOCK_TOKENS):
            for layer, name in enumerate(LAYERS):
                content = content_of(request.block_hashes[i], layer)
                self._writes.append((name, table[i], content.view_as(self.pages[name][0])))

    def _forward(self) -> None:
        writes, self._writes = self._writes, []

        def kernel() -> None:
            for name, block, content in writes:
                self.pages[name][block] = content

        self.gpu.engine(kernel)

    def _check_pages(self, request: Any, num_computed: int) -> None:
        """As attention of this step sees them: behind all that was queued on the engine's own stream."""
        with self.gpu.lock:
            if ENGINE in self.gpu.last:
                self.gpu.force(self.gpu.last[ENGINE])
        super()._check_pages(request, num_computed)


@pytest.mark.parametrize("runner", [FirstRunner, SecondRunner])
def test_saves_and_loads_are_behind_the_forward_pass(runner, monkeypatch):
    cache = FakeCache()
    harness = GpuHarness(
        monkeypatch, cache, runner, num_blocks=60, max_batched_tokens=128, prefix_caching=False
    )
    try:
        for turn in range(6):
            for name in "ab":
                harness.add(f"{name}{turn}", prompt(ord(name), 200 + 20 * turn))
            harness.run()
        harness.check_at_rest()
        loaded = [answer for _, computed, _, answer in harness.answers if answer]
        assert len(loaded) >= 10
        kinds = {operation.kind for operation in harness.gpu.log}
        assert {"kernel", "event", "gather", "scatter"} <= kinds
        assert not harness.gpu.unfinished()
    finally:
        harness.close()
