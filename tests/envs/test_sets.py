"""The held-out sets: every one read from a file in its published shape, asked and judged."""

from __future__ import annotations

import base64
import json
import os
import pickle
import sys
import types
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lowroll.envs.sets.choices import choice
from lowroll.envs.sets.livecodebench_tests import cases, pickled_text
from lowroll.envs.sets.table import CLASSES, RULES, SETS, SUITES, chosen
from lowroll.envs.table import make

SUM = {"question_content": "Add two numbers.", "starter_code": "", "metadata": "{}"}


def packed(found: Any) -> str:
    """As LiveCodeBench publishes private cases."""
    return base64.b64encode(zlib.compress(pickle.dumps(json.dumps(found)))).decode()


def case(given: str, expected: str, kind: str = "stdin") -> dict[str, str]:
    return {"input": given, "output": expected, "testtype": kind}


ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": "How many?", "answer": "6*2=<<6*2=12>>12\nSo 1,212.\n#### 1,212"},
        {"question": "And now?", "answer": "#### -3"},
    ],
    "math500": [
        {"problem": "Half?", "solution": "It is $\\boxed{\\frac12}$.", "answer": "\\frac12"},
        {"problem": "Pair?", "solution": "none", "answer": "(3, \\pi)", "level": 3},
    ],
    "gaokao2023en": [
        {"question": "Root?", "answer": "$\\sqrt{2}$", "lang": "en"},
        {"question": "Nothing?", "answer": ""},
    ],
    "minerva": [{"problem": "Mass?", "solution": "So \\boxed{3.5}", "type": "x", "idx": 0}],
    "olympiadbench": [
        {"question": "Roots?", "final_answer": ["$1$", "$-2$"], "is_multiple_answer": True},
        {"question": "One?", "final_answer": ["$7$"], "is_multiple_answer": False},
    ],
    "aime24": [{"id": 60, "problem": "Find it.", "solution": "s", "answer": "025", "url": "u"}],
    "aime25": [{"problem": "Find it.", "answer": "70"}],
    "amc23": [{"id": 0, "question": "Find it.", "answer": 27.0, "url": "u"}],
    "arc-c": [
        {
            "question": "Why?",
            "choices": {"text": ["w", "x", "y", "z"], "label": ["1", "2", "3", "4"]},
            "answerKey": "3",
        },
        {
            "question": "Who?",
            "choices": {"text": ["w", "x"], "label": ["A", "B"]},
            "answerKey": "A",
        },
    ],
    "gpqa-d": [
        {
            "Question": f"Which of {i}?",
            "Correct Answer": "right",
            "Incorrect Answer 1": "a",
            "Incorrect Answer 2": "b",
            "Incorrect Answer 3": "c",
        }
        for i in range(20)
    ],
    "mmlu-pro": [
        {
            "question": "Which?",
            "options": [*"abcdefgh", "N/A", "N/A"],
            "answer": "H",
            "answer_index": 7,
            "category": "law",
        }
    ],
    "livecodebench": [
        {
            **SUM,
            "public_test_cases": json.dumps([case("1 2", "3")]),
            "private_test_cases": packed([case("4 5", "9")]),
        },
        {
            **SUM,
            "starter_code": "def add(a, b):\n    ",
            "metadata": '{"func_name": "add"}',
            "public_test_cases": "[]",
            "private_test_cases": packed([case("[1]\n[2]", "[1, 2]", "functional")]),
        },
    ],
}
Written = Callable[..., Any]


@pytest.fixture
def written(tmp_path: Path) -> Written:
    """The environment of a set over rows in a file."""

    def write(name: str, rows: list[dict[str, Any]] | None = None, **args: Any) -> Any:
        file = tmp_path / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows or ROWS[name]))
        return make(f"set/{name}", name=name, args={"test_path": str(file), **args})

    return write


def test_the_table_is_whole() -> None:
    assert ROWS.keys() == SETS.keys()
    assert {one.rule for one in SETS.values()} == RULES.keys() == CLASSES.keys()
    assert [one.name for one in chosen("math7")] == list(SUITES["math7"])
    assert [one.name for one in chosen("aime24, math7,aime24")][:2] == ["aime24", "gsm8k"]
    assert {name for suite in SUITES.values() for name in suite} | {"aime25"} == SETS.keys()
    for one in SETS.values():
        assert "{text}" in one.template and one.source and one.licence and one.split
    with pytest.raises(ValueError, match="unknown set 'gsmk8'.*did you mean 'gsm8k'"):
        chosen("gsmk8")
    with pytest.raises(ValueError, match="unknown set 'math7'"):
        make("set/math7")


@pytest.mark.parametrize("name", [name for name in ROWS if name != "livecodebench"])
def test_every_set_takes_its_own_answers_alone(name: str, written: Written) -> None:
    env = written(name)
    found = env.validate(100, "test")
    assert found.ok and found.count == env.size("test") == len(ROWS[name]) - (
        name == "gaokao2023en"
    )
    assert env.size("train") == 0 and env.size() == 0
    prompt = env.prompt(0, "test")
    assert prompt.info == env.prompt(env.size("test"), "test").info  # as of any test split
    first = ROWS[name][0]
    asked = first.get("question") or first.get("problem") or first.get("Question")
    assert asked in prompt.messages[-1]["content"]
    assert env.matching(prompt, env.gold(prompt)).info["beside"] == env.gold(prompt)
    right = env.matching(prompt, env.gold(prompt))
    assert env.score(right, env.gold(prompt)).reward == 1.0
    assert env.score(right, env.perturbed(prompt)).reward == 0.0
    wrong = env.matching(prompt, env.perturbed(prompt))
    assert env.score(wrong, env.perturbed(prompt)).reward == 1.0
    assert env.score(wrong, env.gold(prompt)).reward == 0.0
    assert env.score(env.matching(prompt, "nothing"), "nothing").reward == 0.0
    with pytest.raises(ValueError, match="no train split"):
        env.prompt(0, "train")


@pytest.mark.parametrize(
    ("name", "index", "text", "reward"),
    [
        ("gsm8k", 0, "#### 1212", 1),
        ("gsm8k", 0, "\\boxed{1,212}", 1),
        ("gsm8k", 0, "1212", 0),
        ("aime24", 0, "\\boxed{25}", 1),
        ("aime24", 0, "\\boxed{025}", 1),
        ("aime24", 0, "\\boxed{250}", 0),
        ("amc23", 0, "\\boxed{27}", 1),
        ("olympiadbench", 0, "\\boxed{-2, 1}", 1),
        ("olympiadbench", 0, "\\boxed{1}", 0),
        ("olympiadbench", 1, "\\boxed{1} no, \\boxed{7}", 1),
        ("math500", 0, "\\boxed{0.5}", 1),
        ("arc-c", 0, "Answer: C", 1),
        ("arc-c", 0, "Answer: 3", 0),
        ("mmlu-pro", 0, "Answer: A\nNo.\n**Answer:** (H)", 1),
        ("mmlu-pro", 0, "Answer: I", 0),  # of a row that has eight options
    ],
)
def test_what_counts_as_the_answer(
    name: str, index: int, text: str, reward: float, written: Written
) -> None:
    env = written(name)
    assert env.score(env.prompt(index, "test"), text).reward == reward


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Answer: B", "B"),
        ("answer:C.", "C"),
        ("Answer: $D$", "D"),
        ("**Answer: A**", "A"),
        ("Answer: \\boxed{B}", "B"),
        ("Answer: B\nAnswer: C because", "C"),
        ("Answer: E", None),
        ("Answer: B, then Answer: E", None),  # the last decides
        ("Answer: Because", None),
        ("Answer: I'd say B", None),
        ("The answer is B", None),
        ("", None),
        ("Answer: " * 20_000, None),
    ],
)
def test_the_last_answer_is_the_choice(text: str, found: str | None) -> None:
    assert choice(text, 4) == found


def test_options_are_shuffled_by_the_question_alone(written: Written) -> None:
    env = written("gpqa-d")
    prompts = [env.prompt(i, "test") for i in range(20)]
    letters = [prompt.info["answer"] for prompt in prompts]
    assert set(letters) == set("ABCD")
    for prompt in prompts:
        assert f"{prompt.info['answer']}) right" in prompt.messages[-1]["content"]
    other = written("gpqa-d", ROWS["gpqa-d"][::-1])
    assert [other.prompt(i, "test").info["answer"] for i in range(20)] == letters[::-1]


def test_of_mmlu_pro_what_fills_up_is_no_option(written: Written) -> None:
    text = written("mmlu-pro").prompt(0, "test").messages[-1]["content"]
    assert "H) h" in text and "I)" not in text and "N/A" not in text


@pytest.mark.parametrize(
    ("name", "row", "told"),
    [
        ("aime24", {"text": "x", "key": 1}, r"jsonl:1: no column problem or .*; it has: text, key"),
        ("aime24", {"problem": "x"}, r"jsonl:1: no column answer or .*; it has: problem"),
        ("aime24", {"problem": 3, "answer": 1}, r"jsonl:1: column 'problem' must hold text"),
        ("aime24", {"problem": "x", "answer": {}}, "'answer' must be a string or a number"),
        ("arc-c", {"question": "x", "choices": 1, "answerKey": "A"}, "'choices' must hold a list"),
        (
            "arc-c",
            {"question": "x", "choices": {"text": ["a"], "label": ["A"]}, "answerKey": "B"},
            "answer 'B' is none of the labels",
        ),
        ("gpqa-d", {"Question": "x", "Correct Answer": "y"}, "none of the columns Incorrect"),
        ("aime24", {"problem": "x", "answer": ""}, "has no usable row"),
    ],
)
def test_a_bad_row_is_named(name: str, row: dict[str, Any], told: str, written: Written) -> None:
    with pytest.raises(ValueError, match=told):
        written(name, [row])


def test_a_set_that_cannot_be_fetched_says_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def located(source: Any) -> Any:
        raise ValueError(f"{source.path}[{source.split}]: cannot be reached")
        yield

    monkeypatch.setattr("lowroll.envs.sets.rows.located", located)
    with pytest.raises(ValueError, match=r"aime_2024\[train\]: cannot be .*; a file .*aime24=FILE"):
        make("set/aime24")
    with pytest.raises(ValueError, match="'no.jsonl' is neither a file nor a hub id"):
        make("set/aime24", args={"test_path": "no.jsonl"})
    with pytest.raises(ValueError, match=r"needs a file: .*--data livecodebench='test\*.jsonl'"):
        make("set/livecodebench")


# -- LiveCodeBench ---------------------------------------------------------------------------------


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, ("evil",)


def squeezed(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data)).decode()


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("size", [0, 10, 300, 70_000])
def test_a_pickled_text_is_read(protocol: int, size: int) -> None:
    text = "é" * size
    assert pickled_text(pickle.dumps(text, protocol)) == text


def test_cases_are_read_in_both_forms() -> None:
    found = [case("1", "2"), case("[3]", "4", "functional")]
    assert cases(packed(found)) == cases(json.dumps(found)) == found
    assert cases("") == cases(" ") == []


@pytest.mark.parametrize(
    ("column", "told"),
    [
        (squeezed(pickle.dumps(Evil())), "a pickle of more than one text"),
        (squeezed(pickle.dumps(["text"])), "a pickle of more than one text"),
        (squeezed(pickle.dumps(os.getcwd)), "a pickle of more than one text"),
        (squeezed(pickle.dumps("[]", 0)), "a pickle of more than one text"),
        (squeezed(pickle.dumps("[]")[:-3]), "a pickle"),
        (squeezed(pickle.dumps("[]") + b"."), "a pickle"),
        (squeezed(b"\x80\x04X\xff\xff\xff\xff["), "cut short"),
        (squeezed(b"\x80\x04\x8c\x01[\x8c\x01]."), "a pickle of more than one text"),
        (squeezed(b"\x80"), "without an end"),
        (squeezed(b""), "without an end"),
        (squeezed(pickle.dumps("{}")), "must be a list of {input, output, testtype}"),
        (squeezed(pickle.dumps("[")), "are no JSON"),
        (squeezed(pickle.dumps('[{"input": 1}]')), "must be a list of"),
        ("nothing", "neither JSON nor base64"),
        (packed([])[:-8], "neither JSON nor base64|cut short"),
        (base64.b64encode(b"plain").decode(), "neither JSON nor base64"),
    ],
)
def test_a_hostile_column_is_refused(
    column: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=told):
        cases(column)
    assert not (tmp_path / "evil").exists()


def test_what_unpacks_to_too_much_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    column = packed([case("1", "2")])
    monkeypatch.setattr("lowroll.envs.sets.livecodebench_tests.MAX_DECODED", 20)
    with pytest.raises(ValueError, match="hold more than 20 bytes"):
        cases(column)
    monkeypatch.setattr("lowroll.envs.sets.livecodebench_tests.MAX_ENCODED", 10)
    with pytest.raises(ValueError, match="characters of test cases, more than 10"):
        cases(column)


@dataclass(frozen=True)
class Case:
    input: Any
    output: Any
    fn_name: str | None = None


@pytest.fixture
def sandbox(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What a stand-in for the sandbox was asked; it passes whatever says "right"."""
    asked: list[Any] = []

    def run_cases(source: str, found: list[Case], limits: Any, stop_at_failure: bool) -> Any:
        asked.append((source, found, limits, stop_at_failure))
        right = "right" in source
        return types.SimpleNamespace(all_passed=right, share=1.0 if right else 0.5)

    fake = types.SimpleNamespace(
        Case=Case,
        SandboxLimits=lambda **limits: limits,
        last_block=lambda text: text.split("```")[-2] if text.count("```") > 1 else None,
        run_cases=run_cases,
    )
    monkeypatch.setitem(sys.modules, "lowroll.envs.sandbox", fake)
    return asked


def test_a_program_is_run_on_public_and_private_cases(written: Written, sandbox: list[Any]) -> None:
    env = written("livecodebench")
    read, complete = (env.prompt(i, "test") for i in range(2))
    assert "standard input" in read.messages[-1]["content"]
    assert "def add(a, b):" in complete.messages[-1]["content"]
    assert "9" not in json.dumps([read.messages, read.info["place"][1]])  # hidden stays hidden
    score = env.score(read, "```right```")
    assert (score.reward, score.metrics) == (1.0, {"has_answer": 1.0, "passed": 1.0})
    assert sandbox[0][1] == [Case("1 2", "3"), Case("4 5", "9")]
    assert sandbox[0][2]["seconds"] == 6.0 and sandbox[0][3] is True
    assert env.score(complete, "```wrong```").reward == 0.0
    assert sandbox[1][1] == [Case([[1], [2]], [1, 2], "add")]
    assert env.score(read, "no block").metrics == {"has_answer": 0.0, "passed": 0.0}
    assert len(sandbox) == 2 and env.matching(read, "x") is None
    assert env.validate(2, "test").gold_missing == 2


def test_a_row_whose_cases_cannot_be_read_is_an_error(written: Written, sandbox: list[Any]) -> None:
    rows = [{**ROWS["livecodebench"][0], "private_test_cases": packed(["x"])}]
    rows += [{**SUM, "public_test_cases": "[]", "private_test_cases": ""}]
    env = written("livecodebench", rows)
    for index, told in enumerate(["must be a list of", "no test cases"]):
        with pytest.raises(ValueError, match=f"jsonl, the row at byte [0-9]+: .*{told}"):
            env.score(env.prompt(index, "test"), "```right```")
    assert sandbox == []


@pytest.mark.slow
def test_a_program_passes_in_the_sandbox_itself(written: Written) -> None:
    from lowroll.envs.sandbox import SandboxMissing

    env = written("livecodebench")
    read, complete = (env.prompt(i, "test") for i in range(2))
    try:
        right = env.score(read, "```python\na, b = map(int, input().split())\nprint(a + b)\n```")
    except SandboxMissing as missing:
        pytest.skip(str(missing))
    assert right.reward == 1.0
    wrong = env.score(read, "```python\nprint(3)\n```")  # of the public case alone
    assert (wrong.reward, wrong.metrics["passed"]) == (0.0, 0.5)
    assert env.score(complete, "```python\ndef add(a, b):\n    return a + b\n```").reward == 1.0
