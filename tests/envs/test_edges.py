"""Environments at their edges: bounds of arguments, what `validate` counts, which rows come, what
is perturbed."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from random import Random

import pytest

from lowroll.envs import base as envs_base
from lowroll.envs import make
from lowroll.envs.arithmetic import Arithmetic, apply
from lowroll.envs.base import Environment, GeneratedEnvironment, Validation, bounded, split_of
from lowroll.envs.data.files import read_jsonl
from lowroll.envs.reasoning_gym import ReasoningGym
from lowroll.envs.reverse_text import ReverseText
from lowroll.envs.rows import SplitRows
from lowroll.envs.table import construct
from lowroll.types import Prompt, Score


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ({"min_steps": 1, "max_steps": 1}, {"min_steps": 0}, "min_steps"),
        ({"max_steps": 64}, {"max_steps": 65}, "min_steps"),
        ({"min_steps": 3, "max_steps": 3}, {"min_steps": 4, "max_steps": 3}, "min_steps"),
        ({"max_operand": 1}, {"max_operand": 0}, "max_operand"),
        ({"max_operand": 10**6}, {"max_operand": 10**6 + 1}, "max_operand"),
        ({"ops": "/"}, {"ops": ""}, "ops"),
        ({"ops": "+-*/"}, {"ops": "+%"}, "ops"),
        ({"format_weight": 0.0}, {"format_weight": -0.01}, "format_weight"),
        ({"format_weight": 0.99}, {"format_weight": 1.0}, "format_weight"),
    ],
)
def test_arithmetic_takes_its_bounds(good: dict, bad: dict, says: str) -> None:
    Arithmetic(name="a", **good)
    with pytest.raises(ValueError, match=f"env 'a': .*{says}"):
        Arithmetic(name="a", **bad)


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ({"min_words": 1, "max_words": 1}, {"min_words": 0}, "min_words"),
        ({}, {"min_words": 5, "max_words": 4}, "min_words"),
        ({"min_len": 1, "max_len": 1}, {"min_len": 0}, "min_len"),
        ({}, {"min_len": 9}, "min_len"),
        ({}, {"max_len": 2.5}, "min_len"),
        ({"alphabet": "ab"}, {"alphabet": ""}, "alphabet"),
        ({}, {"alphabet": "a b"}, "alphabet"),
        ({"template": "{text}!"}, {"template": "text"}, "template"),
    ],
)
def test_reverse_text_takes_its_bounds(good: dict, bad: dict, says: str) -> None:
    ReverseText(name="r", **good)
    with pytest.raises(ValueError, match=f"env 'r': .*{says}"):
        ReverseText(name="r", **bad)


def test_the_sizes_of_generated_texts_are_those_asked_for() -> None:
    """By default 1 to 4 words of 2 to 8 small letters; each bound is reached."""
    words = [
        make("reverse-text").prompt(i).messages[-1]["content"].split(": ", 1)[1].split(" ")
        for i in range(300)
    ]
    assert {len(some) for some in words} == {1, 2, 3, 4}
    assert {len(word) for some in words for word in some} == set(range(2, 9))
    assert set("".join("".join(some) for some in words)) == set("abcdefghijklmnopqrstuvwxyz")
    steps = [len(make("arithmetic").prompt(i).info["steps"]) for i in range(100)]
    assert set(steps) == {2, 3, 4}
    operands = [
        value
        for i in range(300)
        for value in _leaves(Arithmetic(name="a", min_steps=1, max_steps=1), i)
    ]
    assert (min(operands), max(operands)) == (1, 20)


@pytest.mark.parametrize("id", ["arithmetic", "reverse-text"])
def test_the_seed_is_0_unless_it_is_said(id: str) -> None:
    assert (
        make(id).prompt(3)
        == make(id, seed=0).prompt(3)
        == construct(id).prompt(3)
        != make(id, seed=1).prompt(3)
    )
    assert type(make(id))(name=id).prompt(3) == make(id).prompt(3)


def _leaves(env: Arithmetic, index: int) -> list[int]:
    left, _, right, _, _ = env.prompt(index).info["steps"][0].split(" ")
    return [int(left), int(right)]


def test_operations_in_the_integers() -> None:
    assert [apply(op, 7, -2) for op in "+-*"] == [5, 9, -14]
    assert (
        apply("/", 8, 4),
        apply("/", -8, 4),
        apply("/", 7, 2),
        apply("/", 7, 0),
        apply("/", 0, 7),
    ) == (2, -2, None, None, 0)


def test_a_tidy_scratchpad_is_worth_its_weight() -> None:
    env = Arithmetic(name="a", format_weight=0.25)
    prompt = Prompt("p", "a", [], {"answer": "16", "steps": ["3 + 5 = 8", "8 * 2 = 16"]})
    for text, reward in (
        (env.gold(prompt), 1.0),
        ("#### 16", 0.75),
        ("3 + 5 = 8\n8 * 2 = 16\n#### 17", 0.25),
        ("3 + 5 = 8\n8 * 2 = 17\n#### 16", 0.75),
        ("3 + 5 = 8\n#### 16", 0.75),
        ("I think 16", 0.0),
        ("#### 16\n#### 17", 0.0),
        ("\n 3 + 5 = 8 \n\n8 * 2 = 16\n#### 16", 1.0),
    ):
        assert env.score(prompt, text).reward == reward, text
    assert env.exact is False and Arithmetic(name="a").exact is True
    assert Arithmetic(name="a").score(prompt, "1 + 1 = 3\n#### 16").reward == 1.0


# -- what every environment does


def test_the_last_characters_of_a_long_response_count(monkeypatch: pytest.MonkeyPatch) -> None:
    assert envs_base.MAX_TEXT == 50_000 and len(bounded("x" * 50_001)) == 50_000
    monkeypatch.setattr(envs_base, "MAX_TEXT", 3)
    assert [bounded(text) for text in ("", "abc", "abcd")] == ["", "abc", "bcd"]


class Told(Environment):
    """Judges by a table: text -> reward, or an error."""

    def __init__(
        self, rewards: dict[str, object], exact: bool = False, tasks: int | None = None
    ) -> None:
        super().__init__(name="told")
        self.rewards, self.exact, self.tasks = rewards, exact, tasks

    def prompt(self, index: int, split: str = "train") -> Prompt:
        return self.ask(str(index), index, split, {"index": index})

    def score(self, prompt: Prompt, text: str) -> Score:
        if isinstance(
            reward := self.rewards.get(text, 1.0 if text.startswith("g") else 0.0), Exception
        ):
            raise reward
        return Score(reward)  # type: ignore[arg-type]

    def gold(self, prompt: Prompt) -> str:
        if self.rewards.get("missing") == prompt.info["index"]:
            raise NotImplementedError
        return f"g{prompt.info['index']}"

    def perturbed(self, prompt: Prompt) -> str:
        return f"p{prompt.info['index']}"

    def size(self, split: str = "train") -> int | None:
        return self.tasks


@pytest.mark.parametrize(
    ("rewards", "exact", "accepted", "missing", "rejected", "ok"),
    [
        ({}, True, 3, 0, 3, True),
        ({"g1": 0.999}, False, 2, 0, 3, False),
        ({"p1": 1.0}, False, 3, 0, 2, False),
        ({"p1": 0.999}, False, 3, 0, 3, True),
        ({"p1": 0.001}, True, 3, 0, 2, False),
        ({"missing": 1}, True, 2, 1, 2, True),
        ({"p1": KeyError("x")}, False, 3, 0, 2, False),
        ({"g1": KeyError("x")}, False, 2, 0, 3, False),
    ],
)
def test_validate_counts(
    rewards: dict, exact: bool, accepted: int, missing: int, rejected: int, ok: bool
) -> None:
    found = Told(rewards, exact).validate(3)
    assert (found.count, found.gold_accepted, found.gold_missing, found.perturbed_rejected) == (
        3,
        accepted,
        missing,
        rejected,
    )
    assert found.ok is ok and len(found.failures) == (not ok)


def test_validate_stops_at_the_end_of_the_data_and_shows_five() -> None:
    assert Told({}, tasks=2).validate(5).count == 2 and Told({}, tasks=9).validate(5).count == 5
    assert Told({}).validate().count == 64
    broken = Told({f"g{i}": 0.5 for i in range(9)}).validate(9)
    assert len(broken.failures) == 5 and broken.failures[0] == "train/0: gold 'g0' scored 0.5"
    assert Validation("e", "train", 3, 0, 3, 0).ok


def test_a_task_is_held_out_by_the_first_byte_of_its_hash() -> None:
    """Below 64 it is the test split's; among these texts are hashes that begin with 63 and with
    64."""
    firsts = {text: hashlib.sha256(text.encode()).digest()[0] for text in map(str, range(3000))}
    assert {63, 64} <= set(firsts.values())
    assert all(
        split_of(text) == ("test" if first < 64 else "train") for text, first in firsts.items()
    )


def test_a_generated_task_is_the_first_draw_of_its_split(monkeypatch: pytest.MonkeyPatch) -> None:
    class Env(GeneratedEnvironment):
        def task(self, rng: Random) -> tuple[str, dict]:
            self.draws += 1
            return self.texts[min(self.draws, len(self.texts)) - 1], {"draw": self.draws}

        score = gold = perturbed = None  # type: ignore[assignment]

    def env(*texts: str) -> Env:
        made = Env(name="e")
        made.texts, made.draws = texts, 0
        return made

    train = next(t for t in map(str, range(99)) if split_of(t) == "train")
    test = next(t for t in map(str, range(99)) if split_of(t) == "test")
    monkeypatch.setattr(envs_base, "MAX_DRAWS", 3)
    assert env(train).prompt(0).info["draw"] == 1
    assert env(train, train, test).prompt(0, "test").info["draw"] == 3
    poor = env(train)
    with pytest.raises(ValueError, match="no test task in 3 draws"):
        poor.prompt(0, "test")
    assert poor.draws == 3
    for split, index in (("dev", 0), ("train", -1)):
        with pytest.raises(ValueError, match="split must be|index must be >= 0"):
            env(train).prompt(index, split)


def test_an_environments_own_seed_is_0() -> None:
    class Own(Environment):
        prompt = score = gold = perturbed = None  # type: ignore[assignment]

    draws = [
        Own(name="o", **seed).rng("train", 3).random() for seed in ({}, {"seed": 0}, {"seed": 1})
    ]
    assert draws[0] == draws[1] != draws[2]


def test_a_system_message_is_there_when_there_is_one() -> None:
    assert [m["role"] for m in ReverseText(name="r").prompt(0).messages] == ["user"]
    assert [m["role"] for m in ReverseText(name="r", system="S").prompt(0).messages] == [
        "system",
        "user",
    ]


# -- rows of files


def write(path: Path, *lines: str) -> str:
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def test_rows_come_permuted_by_epoch_and_in_order_for_the_test_split(tmp_path: Path) -> None:
    texts = [f"t{i}" for i in range(7)]
    path = write(tmp_path / "a.jsonl", *(json.dumps({"text": text}) for text in texts))
    rows = SplitRows("e", lambda row, where: row["text"], path=path, test_path=path, seed=3)
    epochs = [[rows.at("train", 7 * epoch + i) for i in range(7)] for epoch in range(3)]
    assert (
        all(sorted(epoch) == list(range(7)) for epoch in epochs)
        and len({tuple(epoch) for epoch in epochs}) == 3
    )
    for epoch in range(3):
        order = list(range(7))
        Random(f"3/{epoch}").shuffle(order)
        assert epochs[epoch] == order
    assert [rows.at("test", i) for i in (0, 6, 7, 15)] == [0, 6, 0, 1]
    assert rows["train"] == rows["test"] == texts


def test_lines_are_numbered_from_one_and_empty_ones_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", '{"x": 1}', "", "  ", '{"x": 2}')
    assert list(read_jsonl(path)) == [(f"{path}:1", {"x": 1}), (f"{path}:4", {"x": 2})]


def test_rows_need_a_path_that_is_there(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def rows(**paths: str | None) -> SplitRows[str]:
        return SplitRows(
            "e", lambda row, where: row.get("text"), **({"path": None, "test_path": None} | paths)
        )

    with pytest.raises(ValueError, match="needs 'path'"):
        rows()
    for name in ("path", "test_path"):
        with pytest.raises(ValueError, match=f"{name} .* is neither a file nor a hub id"):
            rows(**{name: str(tmp_path / "none.jsonl")})
    file = write(tmp_path / "a.jsonl", '{"text": "x"}', '{"other": 1}')
    with pytest.raises(ValueError, match="has no train split; set 'path'"):
        rows(test_path=file).at("train", 0)
    with pytest.raises(ValueError, match="has no test split; set 'test_path'"):
        rows(path=file).at("test", 0)
    held = rows(path=file)
    assert held["train"] == ["x"] and "skipped 1 of 2 rows" in caplog.text
    with pytest.raises(ValueError, match="has no usable row"):
        _ = rows(path=write(tmp_path / "b.jsonl", '{"other": 1}')).train
    assert rows(path="owner/data").sources["test"] is None  # a hub id may hold both
    test = rows(path="owner/data", test_path=file).sources["test"]
    assert test is not None and test.path == file


# -- reasoning-gym's answers, perturbed


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        ("True", "False"),
        ("False", "True"),
        ("12", "22"),
        ("x = 9", "x = 8"),
        ("0", "1"),
        ("3.5", "773.5"),
        ("abcd", "ab"),
        ("abc", "a"),
        ("a 85 b 2", "a 95 b 2"),
        ("19.", "29."),
    ],
)
def test_a_perturbed_answer_is_near_and_wrong(answer: str, wrong: str) -> None:
    env = ReasoningGym.__new__(ReasoningGym)
    env.generator = "g"
    prompt = Prompt("p", "e", [], {"answer": answer})
    assert (
        env.gold(prompt) == f"<answer>{answer}</answer>"
        and env.perturbed(prompt) == f"<answer>{wrong}</answer>"
    )
    with pytest.raises(NotImplementedError, match="stores no answer"):
        env.gold(Prompt("p", "e", [], {"answer": None}))
