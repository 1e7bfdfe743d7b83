"""Reward functions as TRL's GRPOTrainer calls them: all arguments, callable objects, None, what they
log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowroll.envs import make
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.orchestrator.groups import for_scorer
from lowroll.types import Score, ScoreError

FUNCTIONS = """
import asyncio
from functools import partial

def all_of_it(prompts, completions, completion_ids, trainer_state, log_extra, log_metric, **columns):
    assert set(columns) == {"level", "answer", "ground_truth"}, columns
    assert len(prompts) == len(completions) == len(completion_ids) == len(columns["level"])
    log_extra("seen", completions)
    log_extra("ids", completion_ids)
    log_metric("tokens", sum(map(len, completion_ids)))
    log_metric("tokens", 0.0)
    return [ids[-1] + trainer_state.global_step / trainer_state.max_steps for ids in completion_ids]

async def later(completions, completion_ids, **kwargs):
    await asyncio.sleep(0)
    return [float(len(ids)) for ids in completion_ids]

def scaled(completions, factor, **kwargs):
    return [factor * len(text) for text in completions]

class Judge:
    def __init__(self, bonus):
        self.bonus = bonus
    def __call__(self, completions, **kwargs):
        return [self.bonus + len(text) for text in completions]

tripled = partial(scaled, factor=3)
judge = Judge(0.5)

def applies(completions, log_extra, log_metric, **kwargs):
    log_extra("first", [text[:1] for text in completions])
    log_metric("asked", len(completions))
    return [1.0 if text == "yes" else None for text in completions]

def state(completions, trainer_state, **kwargs): return [trainer_state.epoch for _ in completions]
def short(completions, log_extra, **kwargs): log_extra("a", [1]); return [0.0 for _ in completions]
def twice(completions, log_extra, **kwargs):
    log_extra("a", completions); log_extra("a", completions); return [0.0 for _ in completions]
def huge(completions, log_extra, **kwargs):
    log_extra("a", ["x" * 10**6 for _ in completions]); return [0.0 for _ in completions]
def object_(completions, log_extra, **kwargs):
    log_extra("a", [object() for _ in completions]); return [0.0 for _ in completions]
def nan(completions, log_metric, **kwargs): log_metric("a", float("nan")); return [0.0]
def mine(completions, log_metric, **kwargs): log_metric("mine", 1); return [0.0 for _ in completions]
def mean(completions, log_metric, **kwargs): log_metric("mean", 1); return [0.0 for _ in completions]
"""


@pytest.fixture()
def files(tmp_path: Path) -> Path:
    rows = [{"prompt": f"{i}+1?", "answer": str(i + 1), "level": i} for i in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    return tmp_path


def args(folder: Path, *names: str, **more: Any) -> dict[str, Any]:
    functions = [f"{folder / 'rewards.py'}:{name}" for name in names]
    return {"path": str(folder / "rows.jsonl"), "held_out": 0, "reward_funcs": functions, **more}


def scores(
    settings: dict[str, Any], *texts: str, ids: list[list[int]] | None = None
) -> list[Score | ScoreError]:
    prompt = make("data", args=settings).prompt(0)
    if ids is not None:
        prompt = for_scorer(prompt, ids, step=3, max_steps=4)
    with ScorerPool({"data": ("data", settings, 0)}, num_workers=1) as pool:
        return pool.score([(prompt, text) for text in texts])


def test_a_function_is_given_all_that_trl_gives(files: Path) -> None:
    a, b = scores(args(files, "all_of_it"), "x", "yy", ids=[[5, 7], [9]])
    assert isinstance(a, Score) and isinstance(b, Score)
    assert (a.reward, b.reward) == (7.5, 9.5)  # two of four steps are done before the third
    assert a.metrics == {"all_of_it": 7.5, "tokens": 1.5} == {**b.metrics, "all_of_it": 7.5}
    assert a.extra == {"seen": "x", "ids": [5, 7]} and b.extra == {"seen": "yy", "ids": [9]}


def test_an_async_function_gets_the_token_ids(files: Path) -> None:
    found = scores(args(files, "later"), "x", "y", ids=[[5, 7], []])
    assert [one.reward for one in found if isinstance(one, Score)] == [2.0, 0.0]


def test_only_who_takes_token_ids_is_sent_them(files: Path) -> None:
    (files / "rewards.py").write_text("def few(completions): return [0.0 for _ in completions]\n")
    prompt = make("data", args=args(files, "few")).prompt(0)
    assert for_scorer(prompt, [[1]], step=1, max_steps=1) is prompt


def test_without_a_rollout_there_are_no_ids_and_no_steps(files: Path) -> None:
    """As before a run, when the scorer is tried."""
    (found,) = scores(args(files, "later"), "x")
    assert isinstance(found, Score) and found.reward == 0.0


def test_callable_objects_are_found_by_the_name_of_their_file(files: Path) -> None:
    found = scores(args(files, "tripled", "judge"), "ab")
    assert found == [Score(8.5, {"tripled": 6.0, "judge": 2.5})]


def test_none_of_all_functions_is_no_error(files: Path) -> None:
    yes, no = scores(args(files, "applies"), "yes", "no")
    assert yes == Score(1.0, {"applies": 1.0, "asked": 2.0}, {"first": "y"})
    assert isinstance(no, ScoreError) and no.kind == "inapplicable"
    assert "applies said None" in no.message
    assert (no.metrics, no.extra) == ({"asked": 2.0}, {"first": "n"})


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("state", "trainer_state has global_step and max_steps here, and no 'epoch'"),
        ("short", "log_extra: 'a' has 1 values for 2 completions"),
        ("twice", "log_extra: 'a' was logged before"),
        ("huge", "log_extra: more than 500,000 characters"),
        ("object_", "log_extra: 'a' holds what is no JSON data"),
        ("nan", "the metric 'a' is nan"),
        ("mine", "log_metric: 'mine' is the name of a reward function"),
        ("mean", "log_metric: 'mean' is the name of a reward function"),
    ],
)
def test_what_cannot_be_recorded_is_refused(files: Path, name: str, says: str) -> None:
    for found in scores(args(files, name), "x", "y"):
        assert isinstance(found, ScoreError) and says in found.message, found
        assert found.kind != "inapplicable"


def test_mean_is_a_name_of_ours(files: Path) -> None:
    (files / "rewards.py").write_text(
        "def other(completions, log_metric): log_metric('mean', 1); return [0.0]\n"
    )
    (found,) = scores(args(files, "other"), "x")
    assert isinstance(found, ScoreError) and "'mean' is the mean reward" in found.message


def test_a_function_of_one_response_is_given_nothing_of_the_group(files: Path) -> None:
    (files / "rewards.py").write_text("def one(text, log_extra): return 1.0\n")
    with pytest.raises(ValueError, match="takes 'log_extra', and only functions of completions"):
        make("data", args=args(files, "one"))


def test_a_prompt_column_is_not_passed_twice(files: Path) -> None:
    """TRL passes every column but these."""
    (files / "rewards.py").write_text(
        "def rest(completions, **columns):\n"
        "    assert 'prompt' not in columns and 'completion' not in columns, columns\n"
        "    return [1.0 for _ in completions]\n"
    )
    assert scores(args(files, "rest"), "x") == [Score(1.0, {"rest": 1.0})]


def test_async_functions_run_beside_each_other(files: Path) -> None:
    """Each waits for the other: one after the other they would never end."""
    (files / "rewards.py").write_text(
        "import asyncio\n"
        "came = []\n"
        "async def meet(name):\n"
        "    came.append(name)\n"
        "    while len(set(came)) < 2:\n"
        "        await asyncio.sleep(0.001)\n"
        "async def a(completions, **columns):\n"
        "    await meet('a')\n"
        "    return [1.0 for _ in completions]\n"
        "async def b(text):\n"
        "    await meet('b')\n"
        "    return 2.0\n"
        "def c(text): return 4.0\n"
    )
    found = scores(args(files, "a", "c", "b"), "x", "y")
    assert found == [Score(7.0, {"a": 1.0, "c": 4.0, "b": 2.0})] * 2


def test_an_error_of_an_async_function_names_it(files: Path) -> None:
    (files / "rewards.py").write_text(
        "async def good(completions): return [1.0 for _ in completions]\n"
        "async def bad(completions):\n"
        "    raise KeyError('lost')\n"
    )
    (found,) = scores(args(files, "good", "bad"), "x")
    assert isinstance(found, ScoreError) and found.kind == "exception"
    assert "rewards.py:3: reward 'bad': KeyError" in found.message


def test_environments_of_trl_are_refused_by_name(files: Path) -> None:
    (files / "rewards.py").write_text("def e(completions, environments): return [1.0]\n")
    with pytest.raises(ValueError, match="takes 'environments', and TRL's environments are not"):
        make("data", args=args(files, "e"))
