"""How the demo judges answers, keeps the control's, builds its prompts and tells the result."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from cacheservice.local.control import (
    ControlAnswer,
    control_key,
    keep_control,
    load_control,
    processor,
)
from cacheservice.local.demo_prompts import build_prompts, digest, token_cutter
from cacheservice.local.demo_report import DemoReport, DemoRow, Rate, summary
from cacheservice.local.identity import Tokens, Verdict, enough_count, first_difference, judge


def tokens(*ids: int, gap: float = 1.0) -> Tokens:
    return Tokens(ids, tuple(gap for _ in ids))


def test_an_answer_like_either_control_is_the_same() -> None:
    assert judge(tokens(1, 2), tokens(1, 2), tokens(1, 2)) is Verdict.SAME
    assert judge(tokens(1, 3), tokens(1, 2), tokens(1, 3)) is Verdict.SAME


def test_any_difference_fails_where_the_controls_agree() -> None:
    assert (
        judge(tokens(1, 3, gap=0.0), tokens(1, 2, gap=0.0), tokens(1, 2, gap=0.0))
        is Verdict.DIFFERENT
    )
    assert judge(tokens(1), tokens(1, 2), tokens(1, 2)) is Verdict.DIFFERENT


def test_where_the_controls_differ_only_a_clear_lead_fails() -> None:
    near, clear = tokens(1, 2, gap=0.09), tokens(1, 2, gap=0.1)
    other = tokens(1, 3, gap=0.01)
    assert judge(tokens(1, 4, gap=0.05), near, other) is Verdict.NEAR_TIE
    assert judge(tokens(1, 4, gap=0.05), clear, other) is Verdict.DIFFERENT
    assert judge(tokens(1, 4, gap=0.2), near, other) is Verdict.DIFFERENT


def test_without_log_probabilities_a_difference_is_no_near_tie() -> None:
    assert judge(Tokens((1, 4), ()), Tokens((1, 2), ()), Tokens((1, 3), ())) is Verdict.DIFFERENT


def test_nine_of_ten_prompts_must_count() -> None:
    same, differ = (tokens(1), tokens(1)), (tokens(1), tokens(2))
    assert enough_count([same] * 9 + [differ])
    assert not enough_count([same] * 8 + [differ] * 2)


def test_the_first_difference_is_where_one_ends() -> None:
    assert first_difference((1, 2), (1, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2


def control() -> ControlAnswer:
    return ControlAnswer(5, tokens(1, 2), tokens(1, 2), 4.0, 0.1)


def test_the_controls_answers_are_kept_for_the_same_prompts_only(tmp_path: Path) -> None:
    path = tmp_path / "models" / "control.json"
    assert load_control(path, 1) is None
    keep_control(path, [control()])
    assert load_control(path, 1) == [control()]
    assert load_control(path, 2) is None
    path.write_text(path.read_text()[:-20])
    assert load_control(path, 1) is None


def test_the_key_changes_with_all_that_answers_depend_on(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"a" * 200_000)

    def key(args: tuple[str, ...] = (), prompts: str = "p", threads: int = 2) -> str:
        return control_key(
            model=tmp_path, engine_args=args, prompts_digest=prompts, num_threads=threads
        )

    first = key()
    assert first == key()
    assert len({first, key(args=("--dtype=float32",)), key(prompts="q"), key(threads=1)}) == 4
    (tmp_path / "model.safetensors").write_bytes(b"a" * 199_999 + b"b")
    assert key() != first


def test_the_processor_is_named_with_its_instruction_sets(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(
        "model name\t: Fast CPU\nflags\t: fpu avx2 avx512f\n\nmodel name\t: Fast CPU\n"
    )
    assert processor(tmp_path / "cpuinfo") == "Fast CPU avx2 avx512f"
    assert processor(tmp_path / "absent") == "unknown"


def test_prompts_are_long_varied_and_share_prefixes(tmp_path: Path) -> None:
    prompts = build_prompts(token_cutter(tmp_path))
    assert digest(prompts) == digest(build_prompts(token_cutter(tmp_path)))
    texts = [prompt.text for prompt in prompts]
    assert len(set(texts)) == len(texts)
    assert all(5_000 < len(text) < 30_000 for text in texts)
    by_name = {prompt.name: prompt.text for prompt in prompts}
    assert by_name["manual"][:13_000] == by_name["manual, 2nd question"][:13_000]
    assert by_name["conversation, turn 2"].startswith(by_name["conversation, turn 1"])
    assert by_name["conversation, turn 3"].startswith(by_name["conversation, turn 2"])


def report(*rows: DemoRow, controls_agree: bool = True) -> DemoReport:
    return DemoReport(
        name="demo", rows=rows, store=Rate(10**9, 2.0), retrieve=Rate(10**9, 3.0), loaded_tokens=700,
        controls_agree=controls_agree, control_is_new=False, total_s=60,
    )  # fmt: skip


ROW = DemoRow(
    name="manual", prompt_tokens=1000, cached_tokens=768, cached_tokens_after_prefill=768, ttft_cold_s=4.0,
    ttft_own_cache_s=0.1, prefill_s=4.0, ttft_decode_s=0.3, ttft_restarted_s=0.2, verdict=Verdict.SAME,
    verdict_restarted=Verdict.SAME,
)  # fmt: skip


def test_the_summary_says_what_was_saved() -> None:
    text = " ".join(summary(report(ROW)))
    assert "768 of 1,000 prompt tokens" in text
    assert "20 times" in text
    assert "computed 232" in text


@pytest.mark.parametrize("field", ["verdict", "verdict_restarted"])
def test_one_different_answer_fails_the_whole(field: str) -> None:
    wrong = dataclasses.replace(ROW, **{field: Verdict.DIFFERENT})
    assert not report(ROW, wrong).is_identical
    assert "ANSWERS DIFFER" in " ".join(summary(report(ROW, wrong)))
    near = dataclasses.replace(ROW, **{field: Verdict.NEAR_TIE})
    assert report(ROW, near).is_identical


def test_controls_that_differ_too_often_give_no_verdict() -> None:
    assert not report(ROW, controls_agree=False).is_identical
    assert "No verdict" in " ".join(summary(report(ROW, controls_agree=False)))
