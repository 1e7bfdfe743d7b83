"""The chain: a task and its scores by hand, an independent reading of the prompt, and answers that a
hostile model would give."""

from __future__ import annotations

import re

import pytest

from lowroll.envs.base import MAX_TEXT
from lowroll.envs.chain import Chain
from lowroll.types import Prompt

PROMPT = Prompt(
    id="train/0",
    env="c",
    messages=[{"role": "user", "content": "a=3 b=8 from 5 mod 10, 2 rounds"}],
    info={"answer": "7", "sums": [8, 6, 9, 7]},
)
GOLD = "1: a8 b6\n2: a9 b7\n#### 7"


def chain(**args: object) -> Chain:
    return Chain(name="c", **{"template": "{text}", "entries": 2, **args})


def test_a_task_by_hand() -> None:
    env = chain()
    assert env.gold(PROMPT) == GOLD
    assert env.perturbed(PROMPT) == "1: a8 b6\n2: a9 b7\n#### 8"


@pytest.mark.parametrize(
    ("text", "right", "prefix"),
    [
        (GOLD, 1.0, 1.0),
        ("1: a8 b6\n2: a9 b7\n#### 8", 0.0, 1.0),
        ("1: a8 b6\n2: a0 b7\n#### 7", 1.0, 0.5),  # a lucky answer: two errors that cancel
        ("1: a8 b5\n2: a9 b7\n#### 7", 1.0, 0.25),
        ("1: b8 a6\n2: a9 b7\n#### 7", 1.0, 0.0),  # out of turn
        ("1: a8 b6", 0.0, 0.5),
        ("1: a8 b6\n2: a9 b7 a0 b8\n#### 7", 1.0, 1.0),  # goes on: nothing more to gain
        ("#### 7", 1.0, 0.0),
        ("#### 7\n#### 8", 0.0, 0.0),
        ("7", 0.0, 0.0),
        ("", 0.0, 0.0),
        ("a8 " * MAX_TEXT, 0.0, 0.25),
        ("#### 9999999999999999999999", 0.0, 0.0),
        ("a99999999999999999999 #### 7", 1.0, 0.0),
    ],
)
def test_scores_by_hand(text: str, right: float, prefix: float) -> None:
    plain = chain().score(PROMPT, text)
    assert (plain.reward, plain.metrics["right"], plain.metrics["prefix"]) == (right, right, prefix)
    mixed = chain(step_weight=0.25).score(PROMPT, text)
    assert mixed.reward == 0.75 * right + 0.25 * prefix


@pytest.mark.parametrize("args", [{}, {"modulus": 97, "max_amount": 96}, {"max_amount": 3}])
def test_gold_is_the_sum_of_what_the_prompt_says(args: dict) -> None:
    """An independent reading of the prompt alone."""
    env = Chain(name="c", template="{text}", entries=7, min_rounds=3, max_rounds=12, **args)
    for index in range(50):
        prompt = env.prompt(index, "test")
        text = prompt.messages[0]["content"]
        amounts = [int(amount) for amount in re.findall(r"[a-z]=(\d+)", text)]
        start, modulus, rounds = map(
            int, re.search(r"from (\d+) mod (\d+), (\d+) rounds", text).groups()
        )
        written = [int(number) for number in re.findall(r"[a-z](\d+)", env.gold(prompt))]
        assert max(amounts) <= args.get("max_amount", 9) and len(amounts) == 7
        assert 3 <= rounds <= 12 and len(written) == 7 * rounds
        for i, number in enumerate(written):
            start = (start + amounts[i % 7]) % modulus
            assert number == start
        assert env.gold(prompt).endswith(f"#### {start}")
        rounds_end = written[6::7][:modulus]
        assert len(set(rounds_end)) == len(rounds_end)  # no round ends where an earlier one did


@pytest.mark.parametrize("step_weight", [0.0, 0.5])
def test_the_scorer_takes_gold_and_rejects_what_is_near(step_weight: float) -> None:
    env = chain(step_weight=step_weight, entries=8)
    assert env.exact == (step_weight == 0.0)
    assert env.validate(40).ok and env.validate(20, "test").ok


@pytest.mark.parametrize(
    ("good", "bad", "says"),
    [
        ({"entries": 1}, {"entries": 0}, "entries"),
        ({"entries": 26}, {"entries": 27}, "entries"),
        ({"modulus": 2, "max_amount": 1}, {"modulus": 1}, "modulus"),
        ({"modulus": 1000}, {"modulus": 1001}, "modulus"),
        ({"max_amount": 1}, {"max_amount": 0}, "max_amount"),
        ({"max_amount": 9}, {"max_amount": 10}, "max_amount"),
        ({"min_rounds": 1, "max_rounds": 1}, {"min_rounds": 0}, "min_rounds"),
        ({"max_rounds": 1000}, {"max_rounds": 1001}, "min_rounds"),
        ({}, {"min_rounds": 13}, "min_rounds"),
        ({"entries": 25, "max_rounds": 200}, {"entries": 26, "max_rounds": 200}, "entries"),
        ({"step_weight": 0.0}, {"step_weight": -0.01}, "step_weight"),
        ({"step_weight": 0.99}, {"step_weight": 1.0}, "step_weight"),
    ],
)
def test_a_chain_takes_its_bounds(good: dict, bad: dict, says: str) -> None:
    chain(**good)
    with pytest.raises(ValueError, match=f"env 'c': .*{says}"):
        chain(**bad)
