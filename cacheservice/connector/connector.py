"""`LarderConnector`: vLLM's interface on one side, our two halves on the other. Contains no decision of its own.

vLLM builds one object per role: SCHEDULER in the engine core, WORKER in each rank; they share nothing but the
metadata that vLLM carries. Construction checks and refuses (checks.py, config.py) and opens nothing; channels and
threads begin when the ranks have registered their pages. Interface of vLLM 0.32, kv_connector/v1/base.py; order of
calls in reference/vllm-connector.md.
"""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from cacheservice.client import (
    AgentTarget,
    ArenaUser,
    CacheClient,
    ClientIdentity,
    Deadlines,
    Half,
    Role,
    TlsFiles,
)
from cacheservice.connector.checks import (
    caution_of,
    caution_of_split,
    check_engine,
    saves_prompts_only,
)
from cacheservice.connector.config import ConnectorConfig, parse_extra_config
from cacheservice.connector.copies import copier_for
from cacheservice.connector.groups import REMEDY, check_groups, name_of
from cacheservice.connector.metadata import LarderHandshake, LarderMetadata, LarderWorkerMetadata
from cacheservice.connector.namespace import (
    RankFacts,
    describe_engine,
    describe_rank,
    layers_in_order,
    refused_rank,
)
from cacheservice.connector.pages import GroupPages, group_pages
from cacheservice.connector.scheduler import SchedulerHalf
from cacheservice.connector.stats import LarderPromMetrics, LarderStats
from cacheservice.connector.unwritten import UnwrittenBlocks
from cacheservice.connector.worker import WorkerHalf
from cacheservice.core.layout import GroupKind
from cacheservice.errors import UncacheableError

logger = logging.getLogger(__name__)

FIRST_CONNECTION_S = 2.0
"""How long the start of an engine waits for the agent before it warns and goes on."""


class LarderConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring. Not thread-safe: vLLM calls each object from one thread."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        """Check the configuration. Raises ConfigError or RefusedError, in one sentence, with what to set.

        A model that can't be cached is no error: both halves then do nothing, and the scheduler half says so once.
        """
        super().__init__(vllm_config, role, kv_cache_config)
        _log_with_vllm()
        transfer = vllm_config.kv_transfer_config
        self._config = parse_extra_config(
            transfer.kv_connector_extra_config or {},
            kv_role=transfer.kv_role,
            engine_id=transfer.engine_id,
        )
        check_engine(vllm_config)
        self._refusal = _refusal_of(kv_cache_config)
        if role is KVConnectorRole.SCHEDULER and (caution := caution_of(vllm_config)):
            logger.warning("%s", caution)
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        self._facts: RankFacts | None = None
        self._has_seen_request = False
        if role is KVConnectorRole.SCHEDULER:
            client = build_client(self._config, Half.SCHEDULER, rank=0)
            self._scheduler = SchedulerHalf(
                self._config,
                client,
                num_ranks=vllm_config.parallel_config.world_size,
                step_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
                saves_prompts_only=saves_prompts_only(vllm_config),
            )
            self._client = client
            if self._refusal:
                self._scheduler.turn_off(self._refusal)

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss, nothing more."""
        return False

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """With True, what vLLM calls computed would be full attention's hit alone; windows and states below it would
        not be local. All our ranges rest on the opposite."""
        return False

    # ------------------------------------------------------------------ scheduler half

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """Called once, before any request."""
        super().bind_kv_cache_manager(kv_cache_manager)
        if self._refusal:
            return
        self._scheduling.bind_block_pool(kv_cache_manager.block_pool)
        if self._vllm_config.scheduler_config.policy == "priority":
            self._scheduling.watch_preemptions(
                UnwrittenBlocks(
                    kv_cache_manager.block_pool,
                    num_groups=len(self._kv_cache_config.kv_cache_groups),
                    hash_block_tokens=self._kv_cache_config.hash_block_size,
                    step_tokens=self._vllm_config.scheduler_config.max_num_batched_tokens,
                )
            )
        self._scheduling.expect(
            describe_engine(
                self._vllm_config,
                self._kv_cache_config,
                salt=self._config.salt,
                tensor_parallel_sizes=self._config.tensor_parallel_sizes,
                tokens_per_chunk=self._config.tokens_per_chunk,
            )
        )
        self._client.start()

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Facts of all ranks; another connector's, under MultiConnector, are ignored."""
        ranks = [m.facts for _, m in sorted(metadata.items()) if isinstance(m, LarderHandshake)]
        if not ranks:
            return
        plan = self._scheduling.describe_expected(ranks)
        if plan is None:
            return
        logger.info(
            "cache namespace=%s tokens_per_chunk=%d chunk_bytes=%d description=%s",
            plan.digest.hex(), plan.tokens_per_chunk, plan.spec.chunk_bytes, plan.spec.description,
        )  # fmt: skip
        if not self._client.wait_connected(FIRST_CONNECTION_S):
            logger.warning(
                "no cache agent at %s: %s. The engine runs without cache and connects when the agent is there",
                self._config.socket_dir or self._config.address,
                self._client.state().message,
            )

    def set_xfer_handshake_metadata(
        self, metadata: dict[int, KVConnectorHandshakeMetadata]
    ) -> None:
        """The form without pipeline ranks."""
        self.set_xfer_handshake_metadata_pp_aware(
            {(0, rank): facts for rank, facts in metadata.items()}
        )

    def on_new_request(self, request: Any) -> None:
        """Start looking."""
        if not self._has_seen_request:
            self._has_seen_request = True
            self._warn_of_split()
        self._scheduling.on_new_request(request)

    def _warn_of_split(self) -> None:
        plan = self._scheduling.plan
        states = (
            [g.block_tokens for g in plan.groups if g.kind is GroupKind.RECURRENT] if plan else []
        )
        if states and (caution := caution_of_split(self._vllm_config, max(states))):
            logger.warning("%s", caution)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """(tokens that can be loaded beyond the computed ones, True) or (None, False) = ask again in the next step."""
        return self._scheduling.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Plan the load of exactly so many tokens."""
        # A block table of 100,000 tokens takes milliseconds, and most requests load nothing.
        block_ids = blocks.get_block_ids() if num_external_tokens > 0 else ()
        self._scheduling.after_alloc(request, block_ids, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Loads and saves of this step."""
        return self._scheduling.build_metadata(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        """Reports of the ranks."""
        if connector_output.kv_connector_worker_meta is not None:
            self._scheduling.see_worker_metadata(connector_output.kv_connector_worker_meta)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The form for one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """The pins keep the blocks of saves in flight, so vLLM may always free its own references."""
        del block_ids
        return False, self._scheduling.request_finished(request)

    def has_pending_push_work(self) -> bool:
        """Keep stepping while ranks read pinned blocks."""
        return self._scheduling.has_open_saves()

    def has_pending_block_frees(self) -> bool:
        """Whether blocks will come back so soon that waiting beats preempting."""
        return self._scheduling.frees_blocks_soon()

    def reset_cache(self) -> bool | None:
        """Go on in a private namespace."""
        return self._scheduling.reset_cache()

    # ------------------------------------------------------------------ worker half

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Read the page plan off the views, and connect."""
        tp_rank, pp_rank = _ranks()
        if self._refusal:
            self._facts = refused_rank(self._refusal, tp_rank=tp_rank, pp_rank=pp_rank)
            return
        try:
            pages = self._pages_of(kv_caches)
            backend, isa = _attention_of(self._vllm_config, self._kv_cache_config)
            facts = describe_rank(
                self._kv_cache_config, pages, tp_rank=tp_rank, pp_rank=pp_rank, backend=backend, isa=isa
            )  # fmt: skip
            copier = copier_for(kv_caches)
        except UncacheableError as error:
            self._facts = refused_rank(str(error), tp_rank=tp_rank, pp_rank=pp_rank)
            return
        except Exception as error:
            # Pages are described from much of vLLM's inside; what is not as we know it must not keep an engine down.
            logger.exception("the pages of this rank could not be described")
            why = (
                f"rank {tp_rank} could not describe its KV cache ({type(error).__name__}: {error}), which is a fault "
                f"of Larder's with this vLLM. {REMEDY}"
            )
            self._facts = refused_rank(why, tp_rank=tp_rank, pp_rank=pp_rank)
            return
        parallel = self._vllm_config.parallel_config
        client = build_client(
            self._config, Half.WORKER, rank=parallel.rank, arena_user=copier.arena_user
        )
        self._worker = WorkerHalf(
            self._config, client, pages, facts, copier, tensor_parallel_size=parallel.tensor_parallel_size
        )  # fmt: skip
        self._facts = facts
        client.start()

    def _pages_of(self, kv_caches: dict[str, Any]) -> list[GroupPages]:
        pages = []
        for number, group in enumerate(self._kv_cache_config.kv_cache_groups):
            names = layers_in_order(group.layer_names)
            heads = {kv_caches[name].shape[1] for name in names}
            if len(heads) != 1:
                raise UncacheableError(
                    f"{name_of(number, group)} has layers with {sorted(heads)} heads, not cached here. {REMEDY}"
                )
            pages.append(
                group_pages(
                    [(name, kv_caches[name]) for name in names],
                    num_blocks=self._kv_cache_config.num_blocks,
                    num_heads=heads.pop(),
                )
            )
        return pages

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        """This rank's facts, for the scheduler half."""
        return LarderHandshake(self._facts) if self._facts is not None else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begin this step's loads."""
        del forward_context, kwargs
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, LarderMetadata):
            self._worker.see_metadata(metadata)
            self._worker.start_loads(metadata)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous; nothing waits layer by layer."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Saves take whole blocks after the step; nothing is done layer by layer."""

    def wait_for_save(self) -> None:
        """Begin this step's saves: on CPU the forward pass is done when vLLM calls this."""
        metadata = self._connector_metadata
        if self._worker is not None and isinstance(metadata, LarderMetadata):
            self._worker.start_saves(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended since the last step; failed ones are in both sets."""
        del finished_req_ids
        if self._worker is None:
            return KVConnectorTransferResults()
        finished, failed = self._worker.take_ended_loads()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        """Reports for the scheduler half. A rank that can't cache says so in each: under MultiConnector the handshake
        may go to another connector."""
        if self._worker is None:
            return LarderWorkerMetadata(facts=[self._facts]) if self._facts is not None else None
        return self._worker.take_reports()

    # ------------------------------------------------------------------ both halves

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last step."""
        half = self._scheduler or self._worker
        return half.drain_stats() if half is not None else None

    def shutdown(self) -> None:
        """End threads and channels; the pages may be freed afterwards."""
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        """Rebuild the counts in the front-end process."""
        return LarderStats(data=data or {})

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Our counters on vLLM's /metrics page."""
        return LarderPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _scheduling(self) -> SchedulerHalf:
        assert self._scheduler is not None, "this is the worker half"
        return self._scheduler


def build_client(
    config: ConnectorConfig, half: Half, *, rank: int, arena_user: ArenaUser | None = None
) -> CacheClient:
    """The client of one half. It opens nothing before `start`."""
    import vllm

    tls = None
    if config.tls_cert is not None and config.tls_key is not None and config.tls_ca is not None:
        tls = TlsFiles(config.tls_cert, config.tls_key, config.tls_ca, config.tls_server_name)
    host = socket.gethostname()
    deadlines = config.deadlines
    return CacheClient(
        AgentTarget(socket_dir=config.socket_dir, address=config.address, tls=tls),
        ClientIdentity(
            role=Role[config.role.upper()],
            half=half,
            engine_name=config.engine_name or f"{host}-{os.getpid()}",
            host=host,
            rank=rank,
            vllm_version=vllm.__version__,
        ),
        deadlines=Deadlines(
            lookup_s=deadlines.lookup_s,
            pending_s=deadlines.pending_s,
            acquire_s=deadlines.acquire_s,
            reserve_s=deadlines.reserve_s,
            commit_s=deadlines.commit_s,
            load_s=deadlines.load_s,
            hand_over_s=deadlines.hand_over_s,
            reconnect_s=deadlines.reconnect_s,
        ),
        data_plane="none" if half is Half.SCHEDULER else "auto",
        checksums="always" if config.checksums == "always" else "remote",
        arena_user=arena_user,
    )


def _log_with_vllm() -> None:
    """Let our loggers write where vLLM's do, at vLLM's level: vLLM configures its own name only."""
    ours, theirs = logging.getLogger("cacheservice"), logging.getLogger("vllm")
    if ours.handlers or logging.getLogger().handlers:
        return
    for handler in theirs.handlers:
        ours.addHandler(handler)
    ours.setLevel(theirs.getEffectiveLevel())


def _refusal_of(kv_cache_config: Any) -> str:
    """Why no half may cache this model; empty when nothing speaks against it."""
    try:
        check_groups(kv_cache_config)
    except UncacheableError as error:
        return str(error)
    return ""


def _attention_of(vllm_config: Any, kv_cache_config: Any) -> tuple[str, str]:
    """Names of the attention backends and of the CPU instruction sets that decide about the inside of a page."""
    from vllm.platforms import current_platform

    layers = vllm_config.compilation_config.static_forward_context
    backends, sets = set(), set()
    for group in kv_cache_config.kv_cache_groups:
        for name in group.layer_names:
            layer = layers.get(name)
            backend = (
                layer.get_attn_backend().get_name()
                if hasattr(layer, "get_attn_backend")
                else "unknown"
            )
            backends.add(backend)
            if current_platform.is_cpu() and backend == "CPU_ATTN":
                sets.add(_cpu_instruction_set(vllm_config, group.kv_cache_spec))
    return "|".join(sorted(backends)), "|".join(sorted(sets))


def _cpu_instruction_set(vllm_config: Any, spec: Any) -> str:
    """How the CPU backend lays K out inside a page (vLLM 0.32, v1/attention/backends/cpu_attn.py `_get_attn_isa`)."""
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
    from vllm.v1.kv_cache_interface import iter_layer_specs

    cache_dtype = vllm_config.cache_config.cache_dtype
    names = {
        _get_attn_isa(
            vllm_config.model_config.dtype, layer.block_size, layer.head_size, cache_dtype
        )
        for layer in iter_layer_specs(spec)
    }
    return "|".join(sorted(names))


def _ranks() -> tuple[int, int]:
    """(tensor parallel rank, pipeline parallel rank) of this process."""
    from vllm.distributed.parallel_state import get_pp_group, get_tensor_model_parallel_rank

    return get_tensor_model_parallel_rank(), get_pp_group().rank_in_group
