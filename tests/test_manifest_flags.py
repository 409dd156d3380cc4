"""Flags that Larder owns, against the argument parser of the vLLM that is installed."""

import pytest

from cacheservice.manifest.rules import owned_argument

OWNED = {
    "kv_transfer_config", "prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager", "kv_offloading_size",
    "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "prefill_context_parallel_size",
    "decode_context_parallel_size", "nnodes", "node_rank", "master_addr", "master_port",
    "model", "served_model_name", "revision", "host", "port", "uds", "api_key", "hf_token", "config",
}  # fmt: skip
USEFUL = [
    "--max-num-seqs=256", "--max-model-len", "--dtype=float32", "--enforce-eager", "--kv-cache-dtype=fp8",
    "--gpu-memory-utilization", "--quantization=fp8", "--no-enable-prefix-caching", "--block-size", "-O3",
    "--chat-template", "--tool-call-parser", "--config-format=hf", "--model-impl=vllm", "--hf-overrides={}",
    "--enable-expert-parallel", "--tokenizer", "--trust-remote-code", "--max-num-batched-tokens", "2048",
    "--prefix-cache-retention-interval", "--disable-log-stats", "--no-enable-chunked-prefill", "--pooler-config={}",
]  # fmt: skip


@pytest.fixture(scope="module")
def options():
    """Every option string of `vllm serve`, with the destination of its value."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    return {option: action.dest for option, action in parser._option_string_actions.items()}


@pytest.mark.engine
def test_every_spelling_that_vllm_takes_for_an_owned_flag_is_refused(options):
    assert set(options.values()) >= OWNED, "vLLM renamed a flag"
    passed = set()
    for option, destination in options.items():
        if destination not in OWNED:
            continue
        for end in range(2, len(option) + 1):
            spelling = option[:end]
            meant = {other for name, other in options.items() if name.startswith(spelling)}
            if spelling == option or meant == {
                destination
            }:  # argparse takes an unambiguous beginning
                dashes = "--" if spelling.startswith("--") else "-"
                with_underscores = dashes + spelling.removeprefix(dashes).replace("-", "_")
                spellings = (spelling, with_underscores, f"{spelling}=1")
                passed |= {each for each in spellings if owned_argument(each)}
    assert not passed


@pytest.mark.parametrize("argument", USEFUL)
def test_flag_that_larder_does_not_own_is_accepted(argument):
    assert owned_argument(argument)


@pytest.mark.parametrize(
    "argument",
    [
        "--kv_transfer_config",
        "--kv-transfer-config.kv_role=kv_both",
        "--kv-t={}",
        "--config",
        "--config=x.yaml",
        "-tp=2",
        "-tp2",
    ],
)
def test_odd_spelling_of_an_owned_flag_is_refused(argument):
    assert not owned_argument(argument)
