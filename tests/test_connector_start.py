"""What the connector refuses at start, in words, and what it accepts."""

from __future__ import annotations

import subprocess
import sys
from fractions import Fraction
from types import SimpleNamespace

import engines  # noqa: F401 - sets vLLM's environment
import pytest
import torch

from cacheservice.connector.checks import caution_of_split
from cacheservice.connector.config import DEADLINE_KEYS, parse_extra_config
from cacheservice.connector.groups import REMEDY, check_groups, describe_group
from cacheservice.core.layout import GroupKind
from cacheservice.errors import ConfigError, UncacheableError


def parse(kv_role: str | None = "kv_both", /, **extra):
    return parse_extra_config(extra, kv_role=kv_role)


def test_a_socket_directory_is_all_that_is_needed():
    config = parse(socket_dir="/run/larder")
    assert str(config.socket_dir) == "/run/larder"
    assert config.deadlines.lookup_s == 0.1
    assert config.checksums == "always"


@pytest.mark.parametrize(
    ("kv_role", "role"),
    [("kv_producer", "prefill"), ("kv_consumer", "decode"), ("kv_both", "both")],
)
def test_the_role_follows_vllms(kv_role, role):
    assert parse(kv_role, socket_dir="/x").role == role
    assert parse(kv_role, socket_dir="/x", role="both").role == "both"


def test_every_deadline_has_a_key_in_milliseconds():
    config = parse(socket_dir="/x", **dict.fromkeys(DEADLINE_KEYS, 1500))
    assert all(getattr(config.deadlines, name) == 1.5 for name in DEADLINE_KEYS.values())


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"socket_dri": "/x"}, "did you mean 'socket_dir'"),
        ({"completely": 1}, "known keys"),
        ({}, "exactly one of"),
        ({"socket_dir": "/x", "address": "h:1"}, "exactly one of"),
        ({"address": "host"}, "not host:port"),
        ({"address": "host:99999"}, "not host:port"),
        ({"socket_dir": 5}, "must be a string"),
        ({"socket_dir": "/x", "tokens_per_chunk": "many"}, "whole number"),
        ({"socket_dir": "/x", "tokens_per_chunk": True}, "whole number"),
        ({"socket_dir": "/x", "tokens_per_chunk": 0}, "whole number"),
        ({"socket_dir": "/x", "tensor_parallel_sizes": 2}, "list of sizes"),
        ({"socket_dir": "/x", "tensor_parallel_sizes": []}, "list of sizes"),
        ({"socket_dir": "/x", "role": "master"}, "one of prefill, decode, both"),
        ({"socket_dir": "/x", "checksums": "never"}, "one of always, remote"),
        ({"socket_dir": "/x", "lookup_ms": 0}, "lookup_ms"),
        ({"socket_dir": "/x", "hand_over_ms": 6000}, "hand_over_ms"),
        ({"address": "h:1", "tls_cert": "/c"}, "missing: tls_key, tls_ca"),
        ({"address": "h:1", "tls_server_name": "agent"}, "tls_server_name goes with tls_cert"),
        ({"socket_dir": "/x", "tls_cert": "c", "tls_key": "k", "tls_ca": "a"}, "go with 'address'"),
    ],
)
def test_wrong_keys_are_refused_by_name(extra, words):
    with pytest.raises(ConfigError, match=words):
        parse(**extra)


def group(spec, **changes):
    return SimpleNamespace(
        **{"layer_names": ["a"], "kv_cache_spec": spec, "is_eagle_group": False, "host_resident": False,
           "enable_kv_transfer": True, **changes}
    )  # fmt: skip


def kv_config(*groups, layout="LBHNC", hash_block=16):
    return SimpleNamespace(
        kv_cache_groups=list(groups), kv_cache_layout=layout, hash_block_size=hash_block
    )


def specs():
    from vllm.v1 import kv_cache_interface as kv

    common = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.float32}
    state = {"block_size": 16, "shapes": ((2, 2),), "dtypes": (torch.float32,)}
    return {
        "full": kv.FullAttentionSpec(**common),
        "mla": kv.MLAAttentionSpec(**{**common, "num_kv_heads": 1}),
        "window": kv.SlidingWindowSpec(**common, sliding_window=64),
        "local": kv.ChunkedLocalAttentionSpec(**common, attention_chunk_size=64),
        "sink": kv.SinkFullAttentionSpec(**common, sink_len=4),
        "mamba": kv.MambaSpec(**state, mamba_cache_mode="align"),
        "scattered states": kv.MambaSpec(**state, mamba_cache_mode="none"),
        "drafted states": kv.MambaSpec(**state, mamba_cache_mode="align", num_speculative_blocks=2),
        "hidden": kv.HiddenStateCacheSpec(**{**common, "num_kv_heads": 1}),
        "compressed": kv.MLAAttentionSpec(**{**common, "num_kv_heads": 1}, tokens_per_state=4),
        "odd": kv.MLAAttentionSpec(**{**common, "num_kv_heads": 1}, tokens_per_state=5),
        "fractional": kv.FullAttentionSpec(**common, tokens_per_state=Fraction(1, 2)),
        "non-causal": kv.FullAttentionSpec(**common, non_causal=True),
    }


KINDS = {
    "full": GroupKind.FULL,
    "mla": GroupKind.MLA,
    "compressed": GroupKind.MLA,
    "window": GroupKind.SLIDING_WINDOW,
    "local": GroupKind.CHUNKED_LOCAL,
    "mamba": GroupKind.RECURRENT,
}
WHY_NOT = {
    "sink": "learned sink blocks",
    "hidden": "hidden states for a drafter",
    "fractional": "one state per 1/2 tokens",
    "odd": "one state per 5 tokens",
    "non-causal": "attends to later tokens",
    "scattered states": "mode 'none'",
    "drafted states": "--speculative-config",
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items())
def test_kinds_of_groups_are_read_off_their_specs(name, kind):
    assert describe_group(specs()[name], "group").kind is kind
    check_groups(kv_config(group(specs()["full"]), group(specs()[name])))


@pytest.mark.parametrize(("name", "words"), WHY_NOT.items())
def test_a_model_with_other_groups_is_uncacheable_in_words(name, words):
    """The sentence names the group, what it holds, and what to do."""
    with pytest.raises(UncacheableError, match="group 1") as refusal:
        check_groups(kv_config(group(specs()["full"]), group(specs()[name])))
    assert words in str(refusal.value)
    assert REMEDY in str(refusal.value)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ({"is_eagle_group": True}, "--speculative-config"),
        ({"host_resident": True}, "HiSparse"),
        ({"enable_kv_transfer": False}, "HiSparse"),
    ],
)
def test_a_model_with_draft_or_host_groups_is_uncacheable(flag, words):
    with pytest.raises(UncacheableError, match=words):
        check_groups(kv_config(group(specs()["full"], **flag)))


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC", None, "NEW"])
def test_layouts_that_scatter_pages_are_uncacheable(layout):
    with pytest.raises(UncacheableError, match="VLLM_KV_CACHE_LAYOUT"):
        check_groups(kv_config(group(specs()["full"]), layout=layout))


def test_importing_the_connector_opens_nothing():
    """Engines fork after they load plugins: no thread, no channel, not even vLLM may come with the import."""
    code = (
        "import sys, threading, cacheservice.connector, cacheservice.connector.plugin\n"
        "assert threading.active_count() == 1\n"
        "assert not {'vllm', 'torch', 'grpc'} & set(sys.modules), sorted(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_plugin_registers_the_name_once():
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from cacheservice.connector import LarderConnector
    from cacheservice.connector.plugin import register

    register()
    register()
    assert KVConnectorFactory.get_connector_class_by_name("LarderConnector") is LarderConnector


def test_the_interface_of_vllm_is_met():
    """Every method of the base class that we override takes the parameters that vLLM passes."""
    import inspect

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, supports_hma

    from cacheservice.connector import LarderConnector

    assert supports_hma(LarderConnector)
    for name, ours in vars(LarderConnector).items():
        theirs = getattr(KVConnectorBase_V1, name, None)
        if name.startswith("_") or not inspect.isfunction(ours) or theirs is None:
            continue
        assert list(inspect.signature(ours).parameters) == list(
            inspect.signature(theirs).parameters
        ), name


@pytest.mark.parametrize(
    ("split", "is_warned"), [(256, False), (512, False), (128, True), (384, True)]
)
def test_an_engine_that_ends_steps_where_it_keeps_no_state_is_told_which_flag_to_set(
    split, is_warned
):
    """What vLLM 0.32 makes of a server on CPU: all groups have blocks of 256, its own block size is 128 again."""
    config = SimpleNamespace(cache_config=SimpleNamespace(block_size=split))
    caution = caution_of_split(config, 256)
    assert (caution is not None) == is_warned
    if caution:
        assert "--block-size 256" in caution
