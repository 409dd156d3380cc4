"""Flags that Larder sets itself, against the very parser of the vLLM that is installed."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest
from cacheoperator import owned_flags

from cacheservice.manifest.rules import owned_argument

OWNED_DESTINATIONS = {
    "kv_transfer_config", "prefix_caching_hash_algo", "disable_hybrid_kv_cache_manager",
    "kv_offloading_size", "kv_offloading_backend",
    "tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size", "decode_context_parallel_size",
    "nnodes", "node_rank", "master_addr", "master_port",
    "model", "served_model_name", "revision", "host", "port", "uds", "api_key", "hf_token", "config",
    "headless", "grpc", "grpc_port", "ssl_keyfile", "ssl_certfile", "ssl_ca_certs", "ssl_cert_reqs", "ssl_ciphers",
}  # fmt: skip
"""Where vLLM puts the values of owned flags; all that begin with data_parallel_ are owned, too."""


def is_owned(destination: str) -> bool:
    return destination in OWNED_DESTINATIONS or destination.startswith("data_parallel_")


class Vllm:
    """vLLM's parser, asked what it makes of a word."""

    def __init__(self) -> None:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        self.parser = make_arg_parser(FlexibleArgumentParser())
        self.destinations = {
            option: action.dest for option, action in self.parser._option_string_actions.items()
        }

    def destination(self, words: list[str]) -> str | None:
        """Where the value of the flag in `words` goes; None when vLLM refuses it, or when there is no flag."""
        rewritten: list[str] = []

        def keep(_parser, args, _namespace=None):
            rewritten.extend(args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(argparse.ArgumentParser, "parse_args", keep)
            self.parser.parse_args(list(words))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.parser, "error", _raise_refused)
            try:
                meant = self.parser._parse_optional(rewritten[0])
            except Refused:
                return None
        if isinstance(meant, list):  # newer Pythons list all that it may be
            meant = meant[0]
        return None if meant is None or meant[0] is None else meant[0].dest


class Refused(Exception):
    pass


def _raise_refused(message: str) -> None:
    raise Refused(message)


@pytest.fixture(scope="module")
def vllm() -> Vllm:
    return Vllm()


def spellings(option: str) -> Iterator[list[str]]:
    """Every beginning of `option`, in every way to write it."""
    for end in range(2, len(option) + 1):
        start = option[:end]
        if start == "--":
            continue
        dashes = "--" if start.startswith("--") else "-"
        name = start.removeprefix(dashes)
        for written in {name, name.replace("-", "_"), name.replace("-", "_", 1)}:
            spelled = dashes + written
            yield [spelled, "1"]
            yield [f"{spelled}=1"]
            yield [f"{spelled}.some_key", "1"]
            yield [f"{spelled}.some_key=1"]


@pytest.fixture(scope="module")
def understood(vllm: Vllm) -> dict[str, str]:
    """All words that vLLM understands as a flag, with the destination of its value."""
    found: dict[str, str] = {}
    for option in vllm.destinations:
        for words in spellings(option):
            if words == ["--config", "1"]:
                continue  # vLLM opens that file at once
            destination = vllm.destination(words)
            if destination is not None:
                found[words[0]] = destination
    return found


@pytest.mark.engine
def test_every_spelling_of_an_owned_flag_is_refused(vllm: Vllm, understood: dict[str, str]) -> None:
    assert set(vllm.destinations.values()) >= OWNED_DESTINATIONS, "vLLM renamed a flag"
    owned = {word for word, destination in understood.items() if is_owned(destination)}
    assert {
        "--kv-t=1",
        "--kv_transfer_config.some_key",
        "-dp=1",
        "--no_disable-h",
        "--tensor",
    } <= owned
    assert {word for word in owned if owned_flags.owned_flag(word) is None} == set()


@pytest.mark.engine
def test_a_flag_that_is_not_owned_is_accepted_in_full(vllm: Vllm) -> None:
    refused = {
        option
        for option, destination in vllm.destinations.items()
        if not is_owned(destination) and owned_flags.owned_flag(option) is not None
    }
    assert refused == set()
    assert len(vllm.destinations) > 300


@pytest.mark.engine
def test_the_schema_and_the_operator_refuse_the_same_words(understood: dict[str, str]) -> None:
    """The schema's rule is for `args`, ours for templates; what vLLM does not understand may differ."""
    differ = {
        word
        for word, destination in understood.items()
        if owned_argument(word) != (owned_flags.owned_flag(word) is None)
    }
    assert differ == set()


@pytest.mark.parametrize(
    ("word", "flag"),
    [
        ("--kv-transfer-config={}", "--kv-transfer-config"),
        ("--kv_transfer_config.kv_role=kv_both", "--kv-transfer-config"),
        ("--kv-t", "--kv-transfer-config"),
        ("--no-disable-hybrid-kv-cache-manager", "--no-disable-hybrid-kv-cache-manager"),
        ("--config", "--config"),
        ("--config=flags.yaml", "--config"),
        ("--port 8001", "--port"),
        ("--ssl-certfile=x", "--ssl-*"),
        ("--head", "--headless"),
        ("-tp", "--tensor-parallel-size"),
        ("-tp=2", "--tensor-parallel-size"),
        ("-tp2", "--tensor-parallel-size"),
        ("-n2", "--nnodes"),
        ("-pcp=2", "--prefill-context-parallel-size"),
        ("-dpr", "--data-parallel-*"),
        ("--data-parallel-something-new", "--data-parallel-*"),
        ("--no_data_parallel_external_lb", "--no-data-parallel-*"),
    ],
)
def test_odd_spellings(word: str, flag: str) -> None:
    assert owned_flags.owned_flag(word) == flag


@pytest.mark.parametrize(
    "word",
    ["--max-num-seqs=256", "--model-impl=vllm", "--config-format", "-dc", "-O3", "-q", "-1", "-", "--", "kv-transfer",
     "--hf-overrides={}", "--no-enable-prefix-caching", "{\"--port\": 1}", ""],
)  # fmt: skip
def test_other_words_pass(word: str) -> None:
    assert owned_flags.owned_flag(word) is None


def test_the_message_names_flag_and_remedy_but_no_value() -> None:
    message = owned_flags.check(["--dtype=float32", "--api_key=very-secret"])
    assert (
        message
        == "remove --api_key: Larder sets --api-key itself (write spec.engine.apiKeySecretRef)"
    )


def test_a_variable_can_not_bring_a_flag_but_may_be_a_value() -> None:
    assert "$(ANY)" in (owned_flags.check(["--dtype=float32", "$(ANY)"]) or "")
    assert owned_flags.check(["--max-model-len=$(LENGTH)"]) is None


def test_a_wrapper_may_have_its_own_short_flags() -> None:
    assert owned_flags.check_command(["bash", "-c", 'mkdir -p /tmp/x && exec "$0" "$@"']) is None
    assert owned_flags.check_command(["numactl", "--membind=0", "-p", "python3"]) is None


@pytest.mark.parametrize(
    "command",
    [
        ["vllm", "serve", "--kv-transfer-config", "{}"],
        ["bash", "-c", "exec vllm serve m --kv_transfer_config='{}'"],
        ["sh", "-c", "# it's mine\nexec vllm serve --port 1"],
    ],
)
def test_a_command_that_brings_owned_flags_is_refused(command: list[str]) -> None:
    assert owned_flags.check_command(command) is not None
