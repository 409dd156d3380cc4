"""Question files, prompts, the choice of a letter and the judgement: what the accuracy check decides without I/O."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest

from cacheservice.accuracy.completions import Choice, build_request, choose, parse_reply
from cacheservice.accuracy.data_files import BUNDLED, read_subjects
from cacheservice.accuracy.prompts import build_prompt, shared_prefix
from cacheservice.accuracy.questions import (
    LETTERS,
    build_subject,
    parse_subject,
    parse_subjects,
    select,
)
from cacheservice.accuracy.verdicts import Verdict, enough_count, judge
from cacheservice.errors import ConfigError

MMLU_ROWS = '"Is ""this"" one, or\ntwo lines?",yes,"no, it isn\'t",maybe,5,B\n\nSecond?,1,2,3,4,d\n'


def test_a_file_of_mmlu_is_read_as_it_is_downloaded() -> None:
    first, second = parse_subject(MMLU_ROWS, "x_test.csv")
    assert first.text == 'Is "this" one, or\ntwo lines?'
    assert first.choices == ("yes", "no, it isn't", "maybe", "5")
    assert (first.answer, second.answer) == ("B", "D")
    # Line numbers are those of an editor: the first question takes two lines, then one is empty.
    assert (first.place, second.place) == ("x_test.csv:1", "x_test.csv:4")


def test_one_file_for_all_has_a_subject_column_with_or_without_a_header() -> None:
    plain = parse_subjects("art,Who?,a,b,c,d,A\nlaw,Why?,a,b,c,d,B\nart,When?,a,b,c,d,C\n", "f.csv")
    assert {name: [question.text for question in found] for name, found in plain.items()} == {
        "art": ["Who?", "When?"], "law": ["Why?"],
    }  # fmt: skip
    other_order = "Answer,D,C,B,A,Question,Subject,Note\nA,d,c,b,a,Who?,art,-\n"
    (question,) = parse_subjects(other_order, "f.csv")["art"]
    assert (question.text, question.choices, question.answer) == ("Who?", ("a", "b", "c", "d"), "A")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("Who?,a,b,c,A\n", ["f.csv:1", "5 columns instead of 6", "quotes"]),
        ("Who?,a,b,c,d,A\nWhy?,a,b,c,d,e,A\n", ["f.csv:2", "7 columns instead of 6"]),
        ("Who?,a,b,c,d,A\nWhy?,a,b,c,d,E\n", ["f.csv:2", "'E'", "not A, B, C or D"]),
        ('Who?,a,b,c,d,A\n"Why?,a,b,c,d,A\n', ["f.csv:2", "not CSV"]),
        ('"Who"ever?,a,b,c,d,A\n', ["f.csv:1", "not CSV"]),
        (" ,a,b,c,d,A\n", ["f.csv:1", "question is empty"]),
        ("question,A,B,C,answer\nWho?,a,b,c,A\n", ["f.csv:1", "no column D"]),
    ],
)
def test_a_malformed_file_is_refused_with_its_line(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_subject(text, "f.csv")
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_missing_subject_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"f\.csv:1: the header has no column subject"):
        parse_subjects("question,A,B,C,D,answer\nWho?,a,b,c,d,A\n", "f.csv")
    with pytest.raises(ConfigError, match=r"f\.csv:1: the subject is empty"):
        parse_subjects(",Who?,a,b,c,d,A\n", "f.csv")


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def rows(count: int, subject: str = "") -> str:
    head = f"{subject}," if subject else ""
    return "".join(f"{head}Question {n}?,a,b,c,d,{LETTERS[n % 4]}\n" for n in range(count))


def test_folders_and_files_are_read_and_examples_are_never_asked(tmp_path: Path) -> None:
    written(tmp_path, "test/art_test.csv", rows(3))
    written(tmp_path, "dev/art_dev.csv", "\ufeffquestion,A,B,C,D,answer\nExample?,a,b,c,d,A\n")
    written(tmp_path, "test/law_test.csv", rows(8))
    art, law = read_subjects(tmp_path, shots=None)
    assert (art.name, [e.text for e in art.examples], len(art.questions)) == (
        "art",
        ["Example?"],
        3,
    )
    # Without examples of its own, the first five questions serve.
    assert (law.name, len(law.examples), len(law.questions)) == ("law", 5, 3)
    assert not set(law.examples) & set(law.questions)

    single = written(tmp_path, "all.csv", rows(4, "art") + rows(3, "law"))
    art, law = read_subjects(single, shots=2)
    assert (len(art.examples), len(art.questions), len(law.questions)) == (2, 2, 1)


def test_data_that_is_not_there_is_refused_with_what_is_wanted(tmp_path: Path) -> None:
    def refusal(path: Path, shots: int | None = None) -> str:
        with pytest.raises(ConfigError) as caught:
            read_subjects(path, shots=shots)
        return str(caught.value)

    assert "does not exist" in refusal(tmp_path / "absent")
    assert "no test/*_test.csv" in refusal(tmp_path)
    assert "no questions" in refusal(written(tmp_path, "empty.csv", "\n"))
    latin = written(tmp_path, "latin.csv", "art,Où?,a,b,c,d,A\n".encode("latin-1"))
    assert "latin.csv: not UTF-8 at byte 5" in refusal(latin)
    short = written(tmp_path, "short.csv", rows(4, "art"))
    assert "--shots 3 or less" in refusal(short, 4)
    assert read_subjects(short, shots=3)
    written(tmp_path, "test/art_test.csv", "")
    assert "art has" in refusal(tmp_path)
    written(tmp_path, "test/art_test.csv", rows(1))
    written(tmp_path, "dev/art_dev.csv", rows(2))
    assert "--shots 2 or less" in refusal(tmp_path, 3)


def test_subjects_are_chosen_by_name_and_limited() -> None:
    questions = parse_subject(rows(7), "f.csv")
    sets = [build_subject(name, questions, None, shots=2) for name in ("art", "law")]
    (chosen,) = select(sets, names=["law"], limit=3)
    assert (chosen.name, len(chosen.questions), len(chosen.examples)) == ("law", 3, 2)
    assert [subject.name for subject in select(sets, names=[], limit=None)] == ["art", "law"]
    with pytest.raises(ConfigError, match="no subject lwa; did you mean law"):
        select(sets, names=["lwa"], limit=None)


def test_bundled_questions_are_enough_and_give_no_letter_an_advantage() -> None:
    subjects = read_subjects(BUNDLED, shots=None)
    questions = [question for subject in subjects for question in subject.questions]
    everything = questions + [example for subject in subjects for example in subject.examples]
    assert len(subjects) >= 6
    assert len(questions) >= 60
    assert len({question.text for question in everything}) == len(everything)
    assert all(len(set(question.choices)) == 4 for question in everything)
    assert all(all(question.choices) for question in everything)
    for subject in subjects:
        assert len(subject.examples) == 9, subject.name
        counts = Counter(question.answer for question in subject.questions)
        assert max(counts.values()) <= 3, (subject.name, counts)


def test_prompts_of_a_subject_share_more_than_a_chunk_and_do_not_give_the_answer_away() -> None:
    for subject in read_subjects(BUNDLED, shots=None):
        prefix = shared_prefix(subject)
        # English has about 4.5 characters per token with the vocabularies of today; a chunk has 256 tokens at least.
        assert len(prefix) / 6 > 256, subject.name
        for question in subject.questions:
            prompt = build_prompt(subject, question)
            assert prompt.startswith(prefix + "\n\n")
            own = prompt.removeprefix(prefix).strip()
            offered = [
                f"{letter}. {choice}"
                for letter, choice in zip(LETTERS, question.choices, strict=True)
            ]
            assert own == "\n".join([question.text, *offered, "Answer:"])
        assert prefix.count("Answer: ") == len(subject.examples)


@pytest.mark.parametrize(
    ("tops", "text", "expected"),
    [
        ({" B": -0.5, " A": -1.5, "the": -0.1}, "the", Choice("B", "B", 1.0)),
        ({"B": -3.0, " B": -1.0, "A": -2.0}, " B", Choice("B", "B", 1.0)),
        # C, A and D are not among the likeliest, so less likely than the last of these.
        ({" B": -0.5, "x": -1.0, "y": -4.0}, " B", Choice("B", "B", 3.5)),
        ({"x": -0.5, "y": -0.75}, "x", Choice("x", None, 0.25)),
        ({}, " C.", Choice("C", "C", None)),
        ({}, "(D) because", Choice("D", "D", None)),
        ({}, "Because", Choice("Because", None, None)),
        ({}, "As such", Choice("As such", None, None)),
        ({}, "", Choice("", None, None)),
    ],
)
def test_the_letter_is_the_likeliest_and_else_what_was_said(
    tops: dict[str, float], text: str, expected: Choice
) -> None:
    assert choose(list(tops.items()), text) == expected


def test_requests_are_greedy_and_salted_and_both_apis_are_read_alike() -> None:
    plain = build_request("p", model="m", salt="s", chat=False)
    chat = build_request("p", model="m", salt="s", chat=True)
    for body in (plain, chat):
        assert (body["temperature"], body["max_tokens"], body["cache_salt"]) == (0, 1, "s")
        assert "seed" in body
    usage = {"prompt_tokens": 7, "prompt_tokens_details": {"cached_tokens": 3}}
    tops = {" A": -0.5, " C": -1.0}
    one = parse_reply(
        {"choices": [{"text": " A", "logprobs": {"top_logprobs": [tops]}}], "usage": usage}, chat=False
    )  # fmt: skip
    listed = [{"token": token, "logprob": value} for token, value in tops.items()]
    other = parse_reply(
        {
            "choices": [{"message": {"content": " A"}, "logprobs": {"content": [{"top_logprobs": listed}]}}],
            "usage": usage,
        },
        chat=True,
    )  # fmt: skip
    assert one == other
    assert (one.choice, one.prompt_tokens, one.cached_tokens) == (Choice("A", "A", 0.5), 7, 3)
    bare = parse_reply({"choices": [{"text": " D"}], "usage": {"prompt_tokens": 7}}, chat=False)
    assert (bare.choice.said, bare.cached_tokens) == ("D", None)
    for broken in (
        {},
        {"choices": []},
        {"choices": [{}]},
        {"choices": [{"text": "A"}], "usage": 3},
    ):
        with pytest.raises(ValueError, match="no completion"):
            parse_reply(broken, chat=False)


@pytest.mark.parametrize(
    ("said", "controls", "gaps", "verdict"),
    [
        ("A", "AA", (1.0, 1.0), Verdict.SAME),
        ("A", "A", (1.0, 1.0), Verdict.SAME),
        ("B", "AA", (1.0, 1.0), Verdict.DIFFERENT),
        # Where controls agree, a near-tie excuses nothing.
        ("B", "AA", (0.0001, 0.0001), Verdict.DIFFERENT),
        ("B", "A", (0.0001, 0.0001), Verdict.DIFFERENT),
        ("A", "AB", (1.0, 1.0), Verdict.TIE),
        ("B", "AB", (1.0, 1.0), Verdict.TIE),
        ("C", "AB", (0.01, 0.01), Verdict.TIE),
        ("C", "AB", (0.2, 0.01), Verdict.DIFFERENT),
        ("C", "AB", (0.01, 0.2), Verdict.DIFFERENT),
        ("C", "AB", (None, 0.01), Verdict.DIFFERENT),
    ],
)
def test_an_answer_is_judged_by_controls(
    said: str, controls: str, gaps: tuple[float | None, float], verdict: Verdict
) -> None:
    answer = Choice(said, said, gaps[0])
    assert judge(answer, [Choice(letter, letter, gaps[1]) for letter in controls]) is verdict


def test_nothing_but_the_answer_of_every_control_is_ever_the_same() -> None:
    """Against all small cases: SAME means that no control said anything else."""
    for said, controls, gap in itertools.product("ABC", itertools.product("ABC", repeat=3), (0, 1)):
        verdict = judge(Choice(said, said, gap), [Choice(c, c, gap) for c in controls])
        assert (verdict is Verdict.SAME) == (set(controls) == {said})
        if len(set(controls)) == 1 and controls[0] != said:
            assert verdict is Verdict.DIFFERENT


def test_nine_of_ten_questions_must_count() -> None:
    assert enough_count(9, 10)
    assert not enough_count(8, 10)
    assert not enough_count(89, 100)
