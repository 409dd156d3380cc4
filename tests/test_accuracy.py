"""`larder bench accuracy` against scripted endpoints: what differs is named, what proves nothing is no success.

`test_accuracy_engine.py` runs it against a real engine with a real agent.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from scripted_openai import Asked, ScriptedEngine, serving

from cacheservice.accuracy import endpoint as accuracy_endpoint
from cacheservice.accuracy.data_files import BUNDLED, read_subjects
from cacheservice.accuracy.prompts import build_prompt
from cacheservice.accuracy.questions import LETTERS
from cacheservice.cli.main import app, exit_code

RIGHT = {
    build_prompt(subject, question): question.answer
    for subject in read_subjects(BUNDLED, shots=None)
    for question in subject.questions
}
NUM_QUESTIONS = len(RIGHT)
FIRST = next(iter(RIGHT))
FIRST_PLACE = "arithmetic_in_words_test.csv:1"


@dataclass(frozen=True)
class Ran:
    """How the command ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.out)
        return found


class Run:
    """The command in this process, through the same door as the program."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> Ran:
        self._capsys.readouterr()
        code = exit_code(lambda: app(["bench", "accuracy", *arguments], standalone_mode=False))
        seen = self._capsys.readouterr()
        return Ran(code, " ".join(seen.out.split()), " ".join(seen.err.split()))


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return Run(capsys)


def says(letter: str, lead: float = 2.0) -> Mapping[str, float]:
    """Log-probabilities of a model that prefers `letter`, before the letter that follows it."""
    second = LETTERS[(LETTERS.index(letter) + 1) % 4]
    return {f" {letter}": -0.1, f" {second}": -0.1 - lead, "the": -9.0}


def right(asked: Asked) -> Mapping[str, float]:
    return says(RIGHT[asked.prompt])


def wrong(prompt: str, lead: float = 2.0) -> Mapping[str, float]:
    return says(LETTERS[(LETTERS.index(RIGHT[prompt]) + 1) % 4], lead)


def test_equal_answers_end_well_and_accuracy_is_told_per_subject_and_pass(run: Run) -> None:
    def script(asked: Asked) -> Mapping[str, float]:
        return wrong(asked.prompt) if asked.prompt == FIRST else right(asked)

    with serving(ScriptedEngine(script)) as engine:
        ran = run("--url", f"{engine.url}/v1")
        as_json = run("--url", engine.url, "--json")
    assert ran.code == as_json.code == 0
    # One of eleven is wrong, in each pass alike.
    assert "arithmetic_in_words 11 90.9 % 90.9 % 90.9 % 0 0" in ran.out
    assert "geography 11 100.0 % 100.0 % 100.0 % 0 0" in ran.out
    assert f"all {NUM_QUESTIONS} 98.5 % 98.5 % 98.5 % 0 0" in ran.out
    assert f"0 of {NUM_QUESTIONS} questions are answered differently" in ran.out
    assert "85 %" in ran.out, "512 of 600 tokens in the warm pass"
    found = as_json.json
    assert found["identical"]
    assert found["num_questions"] == NUM_QUESTIONS
    assert found["num_different"] == found["num_ties"] == found["num_without_letter"] == 0
    assert found["subjects"][0]["accuracy"] == dict.fromkeys(("cold", "shared", "warm"), 0.9091)
    assert found["passes"]["cold"]["cached_tokens"] == 0
    assert found["passes"]["warm"]["cached_tokens"] == 512 * NUM_QUESTIONS
    assert found["larder_tokens"] == (
        found["passes"]["shared"]["cached_tokens"] + found["passes"]["warm"]["cached_tokens"]
    )


@pytest.mark.parametrize("when", ["warm", "shared"])
@pytest.mark.parametrize("cold_lead", [2.0, 0.09])
def test_an_answer_that_the_cache_changes_fails_and_is_named(
    run: Run, when: str, cold_lead: float
) -> None:
    def script(asked: Asked) -> Mapping[str, float]:
        is_then = asked.is_warm if when == "warm" else "shared" in asked.salt and not asked.times
        if asked.prompt != FIRST:
            return right(asked)
        return wrong(FIRST, 0.0001) if is_then else says(RIGHT[FIRST], cold_lead)

    with serving(ScriptedEngine(script)) as engine:
        ran = run("--url", engine.url)
        as_json = run("--url", engine.url, "--json")
    assert ran.code == as_json.code == 1
    assert f"1 of {NUM_QUESTIONS} questions ARE ANSWERED DIFFERENTLY" in ran.out
    assert "DIFFERENT arithmetic_in_words" in ran.out
    assert FIRST_PLACE in ran.out
    assert "gap 0.0001" in ran.out
    assert ("--control-url" in ran.out) == (cold_lead < 0.1), "only a near-tie may be rounding"
    assert "arithmetic_in_words 11 100.0 %" in ran.out
    assert [row["num_different"] for row in as_json.json["subjects"]] == [1, 0, 0, 0, 0, 0]
    assert not any(row["num_ties"] for row in as_json.json["subjects"])
    (named,) = as_json.json["different"]
    assert named["place"].endswith(FIRST_PLACE)
    assert named["verdicts"][when] == "different"
    assert named["answers"]["cold"]["said"] == named["right"] == RIGHT[FIRST]
    assert named["cold_again"] == [RIGHT[FIRST]] * 2, (
        "it was asked cold again, and the engine repeats itself"
    )


def test_a_wrong_answer_that_becomes_right_with_the_cache_fails_too(run: Run) -> None:
    def script(asked: Asked) -> Mapping[str, float]:
        return right(asked) if asked.is_warm or asked.prompt != FIRST else wrong(asked.prompt)

    with serving(ScriptedEngine(script)) as engine:
        assert run("--url", engine.url).code == 1


def test_an_engine_that_does_not_repeat_itself_cold_gives_a_tie(run: Run) -> None:
    """Cold it answers one way at first and another way when asked again; so its warm answer tells nothing."""

    def script(asked: Asked) -> Mapping[str, float]:
        is_first_cold = asked.is_cold and asked.salt.count("-") == 3
        return wrong(asked.prompt) if asked.prompt == FIRST and is_first_cold else right(asked)

    with serving(ScriptedEngine(script)) as engine:
        ran = run("--url", engine.url)
        as_json = run("--url", engine.url, "--json").json
    assert ran.code == 0
    assert [row["num_ties"] for row in as_json["subjects"]] == [1, 0, 0, 0, 0, 0]
    assert not any(row["num_different"] for row in as_json["subjects"])
    assert "tie arithmetic_in_words" in ran.out
    assert f"1 of {NUM_QUESTIONS} questions are ties" in ran.out
    assert f"0 of {NUM_QUESTIONS} questions are answered differently" in ran.out


def test_cold_prompts_have_salts_of_their_own_and_warm_ones_share_one(run: Run) -> None:
    with serving(ScriptedEngine(right)) as engine:
        assert run("--url", engine.url).code == 0
        first, engine.log = engine.log, []
        assert run("--url", engine.url).code == 0
        second = engine.log
    cold, shared, warm = (first[n * NUM_QUESTIONS : (n + 1) * NUM_QUESTIONS] for n in range(3))
    assert len(first) == 3 * NUM_QUESTIONS
    assert len({asked.salt for asked in cold}) == NUM_QUESTIONS
    assert len({asked.salt for asked in (*shared, *warm)}) == 1
    assert [asked.times for asked in shared] == [0] * NUM_QUESTIONS
    assert [asked.times for asked in warm] == [1] * NUM_QUESTIONS
    assert not {asked.salt for asked in first} & {asked.salt for asked in second}
    for some in (cold, shared, warm):
        assert [asked.prompt for asked in some] == list(RIGHT)
    # vLLM refuses salts that are long or have these characters (entrypoints/generate/base/protocol.py).
    assert all(len(asked.salt) <= 128 and not set(asked.salt) & set("@/\\\0") for asked in first)


def test_a_cold_pass_that_was_not_cold_is_no_success(run: Run) -> None:
    with serving(ScriptedEngine(right, obeys_salt=False)) as engine:
        assert run("--url", engine.url, "--limit", "1", "--subjects", "logic").code == 0
        ran = run("--url", engine.url)
    assert ran.code == 1
    assert "the cold pass took tokens from a cache" in ran.out
    assert "cache_salt" in ran.out


def test_a_warm_pass_without_hits_is_no_success(run: Run) -> None:
    with serving(ScriptedEngine(right, has_cache=False)) as engine:
        ran = run("--url", engine.url)
        engine.larder_tokens = None
        blind = run("--url", engine.url)
    for one in (ran, blind):
        assert one.code == 1
        assert "the warm pass took nothing from a cache" in one.out
        assert "--shots" in one.out


def test_hits_of_the_engines_own_prefix_cache_alone_are_no_success(run: Run) -> None:
    with serving(ScriptedEngine(right, larder_tokens=lambda cached: 0)) as engine:
        ran = run("--url", engine.url)
    assert ran.code == 1
    assert "nothing from Larder" in ran.out
    assert "--reset-prefix-cache" in ran.out


def test_an_engine_without_larder_and_a_router_without_counts_are_told_apart(run: Run) -> None:
    class Page(ScriptedEngine):
        page = ""

        def answer(self, method: str, path: str, *rest: Any) -> tuple[int, Any]:
            return (200, self.page) if path == "/metrics" else super().answer(method, path, *rest)

    with serving(Page(right)) as engine:
        engine.page = "vllm:prompt_tokens_total 5\n"
        plain = run("--url", engine.url)
        engine.page = "router_requests_total 5\n"
        router = run("--url", engine.url)
    assert plain.code == 1
    assert "nothing from Larder" in plain.out
    assert router.code == 0
    assert "How much of it Larder gave is not known" in router.out


def test_an_engine_that_reports_no_cached_tokens_is_told_how_to(run: Run) -> None:
    with serving(ScriptedEngine(right, reports_cached=False)) as engine:
        counted = run("--url", engine.url)
        engine.larder_tokens = None
        unknown = run("--url", engine.url)
        engine.larder_tokens = lambda cached: 0
        none = run("--url", engine.url)
    assert counted.code == unknown.code == 0
    assert "--enable-prompt-tokens-details" in counted.out
    assert "Larder gave the engine" in counted.out
    assert "Whether a cache was used is not known" in unknown.out
    assert "Whether a cache was used is not known" not in counted.out
    assert none.code == 1
    assert "the warm pass took nothing" in none.out


def test_a_control_is_asked_twice_and_judges(run: Run) -> None:
    """The engine with the cache agrees with itself in all passes, but not with the engine without."""
    with (
        serving(ScriptedEngine(lambda a: wrong(a.prompt) if a.prompt == FIRST else right(a))) as engine,
        serving(ScriptedEngine(right, larder_tokens=None)) as control,
    ):  # fmt: skip
        ran = run("--url", engine.url, "--control-url", control.url, "--json")
        assert ran.code == 1
        (named,) = ran.json["different"]
        assert set(named["verdicts"].values()) == {"different"}
        assert ran.json["passes"]["control again"]["num_right"] == NUM_QUESTIONS
        engine.script = right
        control.log.clear()
        assert run("--url", engine.url, "--control-url", control.url).code == 0
    # Twice in a row, so that the control's own prefix cache still has it.
    pairs = list(zip(control.log[::2], control.log[1::2], strict=True))
    assert [one.prompt for one, _ in pairs] == list(RIGHT)
    assert all(one.salt == two.salt and (one.times, two.times) == (0, 1) for one, two in pairs)
    assert len({one.salt for one, _ in pairs}) == NUM_QUESTIONS


@pytest.mark.parametrize(
    ("lead", "code", "verdict"), [(0.01, 0, "questions are ties"), (0.5, 1, "ARE ANSWERED DIFFERENTLY")]
)  # fmt: skip
def test_where_controls_differ_only_a_clear_lead_fails(
    run: Run, lead: float, code: int, verdict: str
) -> None:
    def script(asked: Asked) -> Mapping[str, float]:
        index = LETTERS.index(RIGHT[asked.prompt])
        third = says(LETTERS[(index + 2) % 4], lead)
        return third if asked.prompt == FIRST else right(asked)

    def control_script(asked: Asked) -> Mapping[str, float]:
        if asked.prompt != FIRST:
            return right(asked)
        return wrong(asked.prompt, 0.01) if asked.times else says(RIGHT[asked.prompt], 0.01)

    with (
        serving(ScriptedEngine(script)) as engine,
        serving(ScriptedEngine(control_script)) as control,
    ):
        ran = run("--url", engine.url, "--control-url", control.url)
    assert ran.code == code
    assert verdict in ran.out


def test_a_near_tie_fails_where_controls_agree_and_no_other_control_is_asked_for(run: Run) -> None:
    with (
        serving(ScriptedEngine(lambda asked: wrong(asked.prompt, 0.01))) as engine,
        serving(ScriptedEngine(lambda asked: says(RIGHT[asked.prompt], 0.01))) as control,
    ):
        ran = run("--url", engine.url, "--control-url", control.url, "--limit", "1")
    assert ran.code == 1
    assert "6 of 6 questions ARE ANSWERED DIFFERENTLY" in ran.out
    assert "--control-url" not in ran.out


def test_too_many_ties_are_no_verdict(run: Run) -> None:
    """Controls may differ on one question of ten, no more."""
    prompts = list(RIGHT)

    def control_script(unstable: Sequence[str]) -> Any:
        def script(asked: Asked) -> Mapping[str, float]:
            return wrong(asked.prompt) if asked.times and asked.prompt in unstable else right(asked)

        return script

    allowed = NUM_QUESTIONS // 10
    with serving(ScriptedEngine(right)) as engine, serving(ScriptedEngine(right)) as control:
        control.script = control_script(prompts[:allowed])
        enough = run("--url", engine.url, "--control-url", control.url)
        control.script = control_script(prompts[: allowed + 1])
        too_few = run("--url", engine.url, "--control-url", control.url)
    assert enough.code == 0
    assert f"{allowed} of {NUM_QUESTIONS} questions are ties" in enough.out
    assert too_few.code == 1
    assert "No verdict" in too_few.out
    assert "float32" in too_few.out


def test_a_control_without_prefix_cache_is_told_what_it_can_not_show(run: Run) -> None:
    with (
        serving(ScriptedEngine(right)) as engine,
        serving(ScriptedEngine(right, has_cache=False)) as control,
    ):
        ran = run("--url", engine.url, "--control-url", control.url)
        control.has_cache = True
        better = run("--url", engine.url, "--control-url", control.url)
    assert "--no-enable-prefix-caching" in ran.out
    assert "--no-enable-prefix-caching" not in better.out


def test_a_control_whose_cold_answers_come_from_a_cache_is_no_control(run: Run) -> None:
    with (
        serving(ScriptedEngine(right)) as engine,
        serving(ScriptedEngine(right, obeys_salt=False)) as control,
    ):
        ran = run("--url", engine.url, "--control-url", control.url)
    assert ran.code == 1
    assert "the cold pass took tokens from a cache" in ran.out


def test_a_model_that_names_no_letter_is_compared_by_what_it_says(run: Run) -> None:
    def script(asked: Asked) -> Mapping[str, float]:
        word = "dog" if asked.is_warm and asked.prompt == FIRST else "cat"
        return {word: -0.5, "horse": -1.0}

    with serving(ScriptedEngine(script)) as engine:
        ran = run("--url", engine.url)
        engine.script = lambda asked: {"cat": -0.5, "horse": -1.0}
        same = run("--url", engine.url)
    assert ran.code == 1
    assert "cold 'cat'" in ran.out
    assert "warm 'dog'" in ran.out
    assert same.code == 0
    assert f"{NUM_QUESTIONS} of {NUM_QUESTIONS} cold answers are no letter" in same.out


def test_without_log_probabilities_the_text_decides(run: Run) -> None:
    with serving(ScriptedEngine(lambda asked: {})) as engine:
        ran = run("--url", engine.url, "--json")
    assert ran.code == 0
    answers_b = sum(answer == "B" for answer in RIGHT.values())
    assert ran.json["passes"]["warm"]["num_right"] == answers_b
    assert ran.json["largest_shift"] is None


def test_a_lead_that_moves_is_shown_although_no_answer_differs(run: Run) -> None:
    def script(asked: Asked) -> Mapping[str, float]:
        return says(RIGHT[asked.prompt], 1.25 if asked.is_warm and asked.prompt == FIRST else 2.0)

    with serving(ScriptedEngine(script)) as engine:
        ran = run("--url", engine.url)
    assert ran.code == 0
    assert "moved by at most 0.7500" in ran.out


def test_chat_asks_the_chat_api(run: Run) -> None:
    with serving(ScriptedEngine(right)) as engine:
        ran = run("--url", engine.url, "--chat", "--limit", "2", "--json")
    assert ran.code == 0
    assert ran.json["passes"]["cold"]["num_right"] == 12
    assert all("messages" in asked.body for asked in engine.log)


def test_requests_run_side_by_side_and_answers_stay_with_their_questions(run: Run) -> None:
    """Each request waits for another one, so that one at a time would never end."""
    meeting = threading.Barrier(2)

    def script(asked: Asked) -> Mapping[str, float]:
        meeting.wait(timeout=60)
        return right(asked)

    with serving(ScriptedEngine(script)) as engine:
        ran = run("--url", engine.url, "--concurrency", "2", "--json")
    assert ran.code == 0
    assert ran.json["passes"]["cold"]["num_right"] == NUM_QUESTIONS


def test_subjects_limits_and_files_of_ones_own(run: Run, tmp_path: Path) -> None:
    with serving(ScriptedEngine(lambda asked: says("A"))) as engine:
        ran = run("--url", engine.url, "--subjects", "logic, reading", "--limit", "3", "--json")
        assert {row["subject"]: row["num_questions"] for row in ran.json["subjects"]} == {
            "logic": 3, "reading": 3,
        }  # fmt: skip
        path = tmp_path / "own.csv"
        path.write_text("".join(f"art,Question {n}?,a,b,c,d,{'AB'[n % 2]}\n" for n in range(6)))
        own = run("--url", engine.url, "--data", str(path), "--shots", "2", "--json")
        assert (own.json["num_questions"], own.json["passes"]["cold"]["num_right"]) == (4, 2)
        assert own.json["different"] == []
        assert own.code == 0
        engine.log.clear()
        run("--url", engine.url, "--data", str(path), "--shots", "2")
        shown = engine.log[0].prompt
        assert shown.index("Question 0?") < shown.index("Question 1?") < shown.index("Question 2?")
        path.write_text("subject,question,A,B,C,answer\n")
        refused = run("--url", engine.url, "--data", str(path))
    assert refused.code == 2
    assert "own.csv:1" in refused.err
    assert "no column D" in refused.err


def test_the_key_goes_to_the_endpoint_that_it_is_for(run: Run, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("sesame-1\n")
    (tmp_path / "other").write_text("sesame-2")
    with (
        serving(ScriptedEngine(right, api_key="sesame-1")) as engine,
        serving(ScriptedEngine(right, api_key="sesame-2")) as control,
    ):
        none = run("--url", engine.url)
        flags = ["--url", engine.url, "--api-key-file", str(tmp_path / "key")]
        assert run(*flags, "--limit", "1").code == 0
        foreign = run(*flags, "--control-url", control.url)
        both = run(
            *flags, "--control-url", control.url, "--control-api-key-file", str(tmp_path / "other"), "--limit", "1",
        )  # fmt: skip
    assert none.code == 1
    assert "401" in none.err
    assert "--api-key-file" in none.err
    assert foreign.code == 1, "the key of one endpoint is not sent to another"
    assert both.code == 0
    assert "sesame" not in f"{none.err} {foreign.err} {both.out} {both.err}"
    for content in ("", "a b\n"):
        (tmp_path / "key").write_text(content)
        assert run(*flags).code == 2
    assert run("--url", "http://h", "--api-key-file", str(tmp_path / "absent")).code == 2


def test_a_model_is_chosen_or_refused_by_name(run: Run) -> None:
    with serving(ScriptedEngine(right)) as engine, serving(ScriptedEngine(right)) as control:
        refused = run("--url", engine.url, "--model", "n")
        assert refused.code == 2
        assert "serves m, not n" in refused.err
        control.models = ("other",)
        refused = run("--url", engine.url, "--control-url", control.url)
        assert refused.code == 2
        assert "--control-url" in refused.err
        assert "serves other, not m" in refused.err
        engine.models = ("m", "n")
        refused = run("--url", engine.url)
        assert refused.code == 2
        assert "serves m, n: choose by --model" in refused.err
        assert run("--url", engine.url, "--model", "n", "--limit", "1").code == 0
        assert engine.log[-1].body["model"] == "n"
        engine.lists_models = False
        assert run("--url", engine.url, "--model", "m", "--limit", "1").code == 0
        refused = run("--url", engine.url, "--model", "x", "--limit", "1")
        assert refused.code == 1
        assert "The model `x` does not exist" in refused.err
        assert FIRST_PLACE in refused.err


@pytest.mark.parametrize(
    ("refusal", "words"),
    [
        ((400, "Requested sample logprobs of 20, which is greater than max"), ["--max-logprobs 20"]),
        ((400, "maximum context length is 512 tokens"), ["fewer --shots", FIRST_PLACE]),
        ((400, "cache_salt: Extra inputs are not permitted"), ["is this a vLLM endpoint?"]),
        ((500, "EngineCore died"), ["500", "EngineCore died"]),
    ],
)  # fmt: skip
def test_what_an_engine_refuses_is_said_with_the_remedy(
    run: Run, refusal: tuple[int, str], words: list[str]
) -> None:
    with serving(ScriptedEngine(right, refuses=refusal)) as engine:
        ran = run("--url", engine.url)
    assert ran.code == 1
    assert ran.out == ""
    assert all(word in ran.err for word in words), ran.err


def test_an_endpoint_that_is_not_there_is_named(run: Run) -> None:
    with serving(ScriptedEngine(right)) as engine:
        gone = engine.url
    ran = run("--url", gone)
    assert ran.code == 1
    assert f"--url {gone} can't be reached" in ran.err
    assert "does the engine run" in ran.err
    with serving(ScriptedEngine(right)) as engine:
        ran = run("--url", engine.url, "--control-url", gone)
        assert (ran.code, engine.log) == (1, []), "said before anything is asked"
        assert f"--control-url {gone} can't be reached" in ran.err


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "ftp://h", "http://", "http://h:x", "http://u:p@h", "http://h?a=b"]
)
def test_an_address_that_is_none_is_refused(run: Run, url: str) -> None:
    ran = run("--url", url)
    assert ran.code == 2
    assert "--url" in ran.err
    assert "u:p" not in ran.err, "a password is not repeated"


def test_something_else_than_an_engine_is_noticed(run: Run) -> None:
    class Odd(ScriptedEngine):
        def answer(self, method: str, path: str, *rest: Any) -> tuple[int, Any]:
            return (200, {"data": "x"}) if "models" in path else (200, "<html>")

    with serving(Odd(right)) as odd:
        ran = run("--url", odd.url)
        assert ran.code == 1
        assert "is it an OpenAI endpoint?" in ran.err
    with serving(ScriptedEngine(right, models=("m",))) as engine:
        engine._complete = lambda *_, **__: (200, "<html>")  # type: ignore[method-assign]
        ran = run("--url", engine.url)
    assert ran.code == 1
    assert "<html>" in ran.err


def test_the_engines_own_cache_is_emptied_before_the_warm_pass(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accuracy_endpoint, "RESET_PAUSE_S", 0.0)
    at: list[int] = []

    class Resettable(ScriptedEngine):
        def answer(self, method: str, path: str, *rest: Any) -> tuple[int, Any]:
            if path == "/reset_prefix_cache":
                at.append(len(self.log))
            return super().answer(method, path, *rest)

    # vLLM refuses while blocks are pinned: it is asked again.
    with serving(Resettable(right, resets=[True, False, False, True])) as engine:
        assert run("--url", engine.url, "--reset-prefix-cache").code == 0
        assert at == [0, 2 * NUM_QUESTIONS, 2 * NUM_QUESTIONS, 2 * NUM_QUESTIONS]
        monkeypatch.setattr(accuracy_endpoint, "RESET_WITHIN_S", 0.0)
        engine.resets = [False] * 1000
        refused = run("--url", engine.url, "--reset-prefix-cache")
        assert refused.code == 1
        assert "did not empty its prefix cache" in refused.err
        engine.resets = None
        engine.log.clear()
        refused = run("--url", engine.url, "--reset-prefix-cache")
        assert (refused.code, engine.log) == (2, [])
        assert "VLLM_SERVER_DEV_MODE=1" in refused.err


def test_short_prompts_are_pointed_out(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    import scripted_openai

    with serving(ScriptedEngine(right)) as engine:
        assert "less than the smallest chunk" not in run("--url", engine.url).out
        monkeypatch.setattr(scripted_openai, "PROMPT_TOKENS", 200)
        assert "has 200 tokens, less than the smallest chunk" in run("--url", engine.url).out


def test_the_letters_of_the_bundled_answers_are_spread() -> None:
    """Else a model that always says the same letter would look good."""
    counts = Counter(RIGHT.values())
    assert set(counts) == set(LETTERS)
    assert max(counts.values()) <= NUM_QUESTIONS * 0.3
