"""The environment `data`: the shapes of rows, and reward functions in the scoring workers."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from lowroll.envs import make
from lowroll.envs.data.columns import Columns
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.types import Prompt, Score, ScoreError

CHAT = [{"role": "user", "content": "2+3?"}]
SHAPES: dict[str, tuple[dict[str, Any], Any, Any, str | None]] = {
    "trl": ({"prompt": "2+3?", "solution": "5"}, "2+3?", "5", None),
    "trl-chat": ({"prompt": CHAT, "answer": "5"}, CHAT, "5", None),
    "verl": (
        {
            "data_source": "x",
            "prompt": CHAT,
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"answer": "no"},
        },
        CHAT,
        "5",
        None,
    ),
    "dapo": (
        {"prompt": CHAT, "reward_model": {"ground_truth": "5"}, "answer": None},
        CHAT,
        "5",
        None,
    ),
    "expected": ({"problem": "2+3?", "expected_answer": 5}, "2+3?", 5, None),
    "gsm8k": ({"question": "2+3?", "answer": "it is\n#### 5"}, "2+3?", "it is\n#### 5", None),
    "completion": ({"prompt": "2+3?", "completion": "5"}, "2+3?", None, "5"),
    "chat-completion": (
        {"prompt": CHAT, "completion": [{"role": "assistant", "content": "5"}]},
        CHAT,
        None,
        "5",
    ),
    "messages": ({"messages": [*CHAT, {"role": "assistant", "content": "5"}]}, CHAT, None, "5"),
    "open-messages": ({"messages": CHAT, "answer": "5"}, CHAT, "5", None),
    "parts": (
        {"prompt": [{"role": "user", "name": None, "content": [{"type": "text", "text": "2+3?"}]}]},
        CHAT,
        None,
        None,
    ),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_usual_shapes_need_no_mapping(shape: str) -> None:
    row, prompt, answer, completion = SHAPES[shape]
    task = Columns().task(row, "x")
    assert (task.prompt, task.answer, task.completion) == (prompt, answer, completion)


def test_columns_by_name_and_what_is_no_json() -> None:
    row = {"q": "2+3?", "meta": {"gold": ["5", 6.0]}, "image": b"x", "score": math.nan}
    task = Columns("q", "meta.gold").task(row, "x")
    assert (task.prompt, task.answer) == ("2+3?", ["5", 6.0])
    assert task.columns == {"q": "2+3?", "meta": {"gold": ["5", 6.0]}, "score": None}


@pytest.mark.parametrize(
    "row, columns, says",
    [
        ({"promt": "x"}, Columns(), "f:3: none of the columns prompt, question, .*it has: promt"),
        (
            {"promt": "x", "y": 1},
            Columns("prompt"),
            r"f:3: prompt: no column 'prompt' \(did you mean 'promt'\?\); it has: promt, y",
        ),
        (
            {"prompt": "x", "meta": {"truth": 1}},
            Columns(None, "meta.gold"),
            "f:3: answer: no column 'meta.gold'; it has: truth",
        ),
        ({"prompt": " "}, Columns(), "f:3: column 'prompt': it is empty"),
        ({"prompt": None}, Columns(), "f:3: column 'prompt' is null: drop the row"),
        ({"prompt": []}, Columns(), "f:3: column 'prompt': it is an empty list"),
        ({"prompt": 3}, Columns(), "must be a text or a list of chat messages, got int"),
        ({"prompt": [{"content": "x"}]}, Columns(), "message 0: must be {role, content}"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image"}]}]},
            Columns(),
            r"only text can be asked, got parts of \['image'\]",
        ),
        ({"prompt": [{"role": "assistant", "content": "x"}]}, Columns(), "nothing is asked in it"),
        ({"prompt": "x", "answer": b"x"}, Columns(), "f:3: the answer must be text, a number"),
    ],
)
def test_a_row_of_another_shape_is_named(row: Any, columns: Columns, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        columns.task(row, "f:3")


FUNCTIONS = """
import asyncio
import os
import time

def right(completions, answer, **columns):
    assert set(columns) > {"prompts", "question", "level", "ground_truth", "trainer_state"}, columns
    return [float(text == gold) for text, gold in zip(completions, answer, strict=True)]

def longest(completions):
    most = max(map(len, completions))
    return [None if not text else float(len(text) == most) for text in completions]

async def level(text, level=1, absent=7):
    await asyncio.sleep(0)
    return level + absent + len(text)

def whole(rollout):
    assert rollout.messages == [{"role": "assistant", "content": rollout.text}]
    return len(rollout.prompt) + rollout.columns["level"]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(solution_str == ground_truth) + extra_info["bonus"]

def chat(completions, prompts):
    return [len(messages[-1]["content"]) + len(asked) for messages, asked in zip(completions, prompts)]

def broken(completions, **columns):
    assert completions
    return columns["nothing"]

def few(completions): return [1.0] * (len(completions) + 1)
def odd(text): return {"odd": "x", "nan": float("nan"), "big": 1e9}.get(text)
def word(text): return "1"
def slow(text): time.sleep(30 if text == "slow" else 0); return 1
def dies(text): os._exit(3)
def wants(text, levle): return 1
def ids(completion_ids, text): return 1
"""
ROWS = [{"question": f"{i}+1?", "answer": str(i + 1), "level": i} for i in range(6)]


@pytest.fixture()
def files(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return tmp_path


def args(folder: Path, *names: str, **more: Any) -> dict[str, Any]:
    functions = [f"{folder / 'rewards.py'}:{name}" for name in names]
    return {"path": str(folder / "rows.jsonl"), "held_out": 0, "reward_funcs": functions, **more}


def pool(settings: dict[str, Any], **more: Any) -> ScorerPool:
    return ScorerPool({"data": ("data", settings, 0)}, num_workers=1, **more)


def test_functions_in_the_workers_are_weighted_and_each_is_a_metric(files: Path) -> None:
    settings = args(files, "right", "longest", "level", "whole", reward_weights=[1, 0.5, 0, 0.1])
    env = make("data", args=settings)
    prompt = next(p for p in map(env.prompt, range(6)) if p.info["columns"]["level"] == 2)
    assert prompt.messages == [{"role": "user", "content": "2+1?"}]
    assert prompt.info["columns"] == {**ROWS[2], "ground_truth": "3"}
    with pool(settings) as workers:
        right, wrong, none = workers.score([(prompt, "3"), (prompt, "four"), (prompt, "")])
    assert isinstance(right, Score) and isinstance(wrong, Score) and isinstance(none, Score)
    assert right.metrics["right"] == 1 and wrong.metrics["right"] == 0
    assert right.metrics["level"] == 2 + 7 + 1 and right.metrics["whole"] == 4 + 2
    assert "longest" not in none.metrics and none.reward == pytest.approx(0.6)
    assert right.reward == pytest.approx(1 + 0.5 * right.metrics["longest"] + 0.6)


def test_only_the_columns_that_are_taken_travel(files: Path) -> None:
    assert make("data", args=args(files, "level")).prompt(0).info["columns"].keys() == {"level"}
    assert make("data", args=args(files, "longest")).prompt(0).info["columns"] == {}


def test_functions_of_verl_and_of_messages(files: Path) -> None:
    rows = [
        {
            "data_source": "x",
            "prompt": CHAT,
            "reward_model": {"ground_truth": "5"},
            "extra_info": {"bonus": 0.5},
        }
    ]
    (files / "verl.jsonl").write_text(json.dumps(rows[0]))
    settings = args(files, "compute_score", "chat", path=str(files / "verl.jsonl"))
    env = make("data", args={**settings, "system": "Add.", "template": "{text} Think."})
    prompt = env.prompt(0)
    assert prompt.messages == [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "2+3? Think."},
    ]
    assert env.score(prompt, "5") == Score(1.5 + 3, {"compute_score": 1.5, "chat": 3.0})


MISTAKES = [
    ("broken", "x", "exception", r"rewards\.py:30: reward 'broken': KeyError: 'nothing'"),
    ("few", "x", "invalid", r"rewards\.py:32: reward 'few' returned 2 for 1 completions"),
    ("odd", "odd", "invalid", r"rewards\.py:33: reward 'odd' returned 'x' \(str\); it must be a"),
    ("odd", "nan", "invalid", "reward 'odd' returned nan; it must be finite"),
    ("odd", "big", "invalid", r"reward 'odd' returned 1000000000.0; .*1e\+06 at most"),
    ("odd", "none", "inapplicable", r"no reward function applies \(odd said None\)"),
    ("word", "x", "invalid", r"reward 'word' returned '1' \(str\)"),
]


def test_what_a_function_does_wrong_is_an_error_with_its_place(files: Path) -> None:
    settings = {name: args(files, name) for name, *_ in MISTAKES}
    asked = {name: make("data", name=name, args=settings[name]).prompt(0) for name in settings}
    with ScorerPool({n: ("data", settings[n], 0) for n in settings}, num_workers=1) as workers:
        found = workers.score([(asked[name], text) for name, text, *_ in MISTAKES])
    for (_, _, kind, says), error in zip(MISTAKES, found, strict=True):
        assert isinstance(error, ScoreError) and error.kind == kind
        assert re.search(says, error.message), error.message


def refused(folder: Path, *names: str, **more: Any) -> str:
    with pytest.raises(ValueError) as caught:
        make("data", args=args(folder, *names, **more))
    return str(caught.value)


def test_bad_settings_are_refused_before_anything_runs(files: Path) -> None:
    assert "no function 'rihgt' (did you mean 'right'?); it has: right," in refused(files, "rihgt")
    assert (
        "rewards.py:37: reward 'wants' takes 'levle', and there is no such column (did you mean "
        in (refused(files, "wants"))
    )
    assert "it may take text, solution_str, completion, prompt, rollout" in refused(files, "wants")
    assert "takes 'completion_ids', and only functions of completions" in refused(files, "ids")
    assert "two functions are called 'right'" in refused(files, "right", "right")
    assert "1 reward_weights for 2 reward_funcs" in refused(
        files, "right", "level", reward_weights=[1]
    )
    nowhere = refused(files, reward_funcs=["right"])
    assert "'right' names no function; write file.py:function" in nowhere
    assert "none.py does not exist" in refused(files, reward_funcs=[str(files / "none.py:f")])
    assert "module 'no.such' cannot be imported" in refused(files, reward_funcs=["no.such:f"])
    (files / "bad.py").write_text("import json\nx = nothing\n")
    assert "bad.py:2: it cannot be imported: NameError" in refused(
        files, reward_funcs=[str(files / "bad.py:f")]
    )


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("def f(): return 1.0", "reward 'f' takes nothing of the response; it may take completion"),
        ("def f(prompt): return 1.0", "takes nothing of the response"),
        ("def f(*args): return 1.0", r"f.py:1: reward 'f': \*args must be a parameter that can be"),
        ("def f(text, /): return 1.0", "text must be a parameter that can be named"),
    ],
)
def test_a_function_that_cannot_see_a_response_is_refused(
    tmp_path: Path, files: Path, function: str, why: str
) -> None:
    (tmp_path / "f.py").write_text(function + "\n")
    assert re.search(why, refused(files, reward_funcs=[f"{tmp_path / 'f.py'}:f"]))


def test_texts_and_chats_in_one_file_are_refused_by_row(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "b"}]
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": chat, "answer": "2"}]
    for name, order in (("a", rows), ("b", rows[::-1])):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in order))
        with pytest.raises(ValueError, match=rf"{name}.jsonl:2: its prompt is .*{name}.jsonl:1 is"):
            make("data", args={"path": str(path)})
    for name, row in (("c", rows[0]), ("d", rows[1])):
        (tmp_path / f"{name}.jsonl").write_text(json.dumps(row) + "\n")
    other = {"path": str(tmp_path / "c.jsonl"), "test_path": str(tmp_path / "d.jsonl")}
    assert make("data", args=other).size("test") == 1  # each file in its own way


def test_without_functions_the_final_answer_is_judged(files: Path) -> None:
    env = make("data", args={"path": str(files / "rows.jsonl"), "held_out": 0.2})
    assert env.validate().ok and env.validate(split="test").ok and env.size("test") == 1
    (files / "open.jsonl").write_text('{"prompt": "x", "gold": "5"}')
    with pytest.raises(
        ValueError, match=r"open.jsonl:1: no answer in it and no reward_funcs .*gold"
    ):
        make("data", args={"path": str(files / "open.jsonl"), "held_out": 0})
    env = make("data", args={"path": str(files / "open.jsonl"), "held_out": 0, "answer": "gold"})
    assert env.score(env.prompt(0), r"\boxed{5}").reward == 1.0  # type: ignore[union-attr]
    module = make("data", args=args(files, reward_funcs=["lowroll.envs.data.functions:answer"]))
    assert isinstance(module.prompt(0), Prompt)


def test_responses_to_one_prompt_are_seen_together_and_others_are_not(files: Path) -> None:
    settings = args(files, "longest", "level")
    env = make("data", args=settings)
    first, second = env.prompt(0), env.prompt(1)
    assert env.together and not make("data", args=args(files, "level")).together
    with pool(settings) as workers:
        texts = [(first, "a"), (first, "bbb"), (second, "cc"), (first, ""), (first, "dd")]
        scores = workers.score(texts)
        one, eight = (
            workers.score([(second, "x")]),
            workers.score([(first, "y" * i) for i in range(8)]),
        )
    longest = [score.metrics.get("longest") for score in scores if isinstance(score, Score)]
    assert longest == [0, 1, 1, None, 1]
    assert [s.metrics["longest"] for s in one if isinstance(s, Score)] == [1]
    assert [s.metrics.get("longest") for s in eight if isinstance(s, Score)] == [None, *[0] * 6, 1]


def test_an_error_is_of_those_that_were_scored_together(files: Path) -> None:
    broken, odd = args(files, "broken", "longest"), args(files, "longest", "odd")
    specs = {name: ("data", given, 0) for name, given in (("b", broken), ("o", odd))}
    b, o = (make("data", name=name, args=given).prompt(0) for name, (_, given, _) in specs.items())
    with ScorerPool(specs, num_workers=1) as workers:
        found = workers.score([(b, "x"), (b, "y"), (o, "none"), (o, "odd")])
        alone = workers.score([(o, "none"), (o, "")])
    assert [isinstance(one, ScoreError) for one in found] == [True] * 4
    assert all("env 'b', train/0: " in str(one) for one in found[:2])
    assert isinstance(alone[0], Score) and isinstance(alone[1], ScoreError)
    assert "no reward function applies (longest, odd said None)" in alone[1].message


@pytest.mark.slow
@pytest.mark.parametrize("beside", ["", "longest"])
def test_a_function_that_hangs_or_ends_its_process_is_named(files: Path, beside: str) -> None:
    names = [beside] if beside else []
    settings = {name: args(files, *names, name) for name in ("slow", "dies")}
    prompts = {n: make("data", name=n, args=settings[n]).prompt(0) for n in settings}
    specs = {n: ("data", settings[n], 0) for n in settings}
    with ScorerPool(specs, num_workers=1, time_limit=0.5) as workers:
        fine, late, dead = workers.score(
            [(make("data", name="slow", args=settings["slow"]).prompt(0), "x")]
            + [(prompts["slow"], "slow"), (prompts["dies"], "x")]
        )
    assert isinstance(fine, Score) and isinstance(late, ScoreError) and isinstance(dead, ScoreError)
    assert late.kind == "timeout" and re.search(r"in .*rewards\.py:35: reward 'slow'", late.message)
    assert dead.kind == "crash" and re.search(r"in .*rewards\.py:36: reward 'dies'", dead.message)


def test_a_conversation_is_a_completion_of_several_messages(files: Path) -> None:
    env = make("data", args=args(files, "chat"))
    prompt = Prompt("t/0", "data", CHAT, {"chat": True, "columns": {}})
    said = [
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "no"},
        {"role": "assistant", "content": "five"},
    ]
    assert env.score_conversation(prompt, [*CHAT, *said]) == Score(5.0, {"chat": 5.0})


def test_numbers_of_numpy_and_torch_are_rewards(files: Path) -> None:
    (files / "rewards.py").write_text(
        "import numpy, torch\n"
        "def true(completions): return [numpy.bool_(True) for _ in completions]\n"
        "def half(text): return torch.tensor(0.5)\n"
        "def two(text): return numpy.array(2)\n"
    )
    env = make("data", args=args(files, "true", "half", "two"))
    assert env.score(env.prompt(0), "x") == Score(3.5, {"true": 1.0, "half": 0.5, "two": 2.0})


@pytest.mark.parametrize(
    "rows, says",
    [
        (
            [{"prompt": "x", "answer": "1"}] * 3,
            r"has one row \(3 times\), and none can be held out",
        ),
        ([{"prompt": "x", "answer": None}], r":1: column 'answer', the answer, is null: drop"),
        *(
            (
                [{"prompt": [{"role": "user", "content": "x"}, said], "answer": "1"}],
                r":1: column 'prompt': message 1: its content must be text, got NoneType",
            )
            for said in (
                {"role": "user"},
                {"role": "assistant", "content": None, "tool_calls": []},
                {"role": "user", "tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]},
            )
        ),
    ],
)
def test_rows_that_say_too_little(tmp_path: Path, rows: list[Any], says: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=says):
        make("data", args={"path": str(path), "held_out": 0.1}).size()
    with pytest.raises(
        ValueError, match=re.escape(f"a hub id (looked at {Path('gone.jsonl').absolute()})")
    ):
        make("data", args={"path": "gone.jsonl"})
