"""The environment records: rewards by hand."""

from __future__ import annotations

import json

import pytest

from lowroll.envs import make
from lowroll.types import Prompt

GOLD = {"name": "Karla", "age": 65, "city": "Dublin"}
PROMPT = Prompt(
    "1", "records", [{"role": "user", "content": "Karla, 65, is from Dublin."}], {"answer": GOLD}
)


@pytest.mark.parametrize(
    ("text", "reward", "exact"),
    [
        (json.dumps(GOLD), 1.0, 1.0),
        (f"\n{json.dumps(GOLD, indent=2)} ", 1.0, 1.0),
        (json.dumps({**GOLD, "age": "65"}), 0.75, 0.0),
        (json.dumps({**GOLD, "land": "Ireland"}), 0.8, 0.0),  # it would count, and is not asked for
        ('{"name": "Karla"}', 0.5, 0.0),
        ("{}", 0.25, 0.0),
        (f"```json\n{json.dumps(GOLD)}\n```", 0.0, 0.0),
        (f"Here it is: {json.dumps(GOLD)}", 0.0, 0.0),
        (json.dumps([GOLD]), 0.0, 0.0),
        ("[" * 100_000, 0.0, 0.0),
        ("", 0.0, 0.0),
    ],
)
def test_rewards_by_hand(text: str, reward: float, exact: float) -> None:
    score = make("records").score(PROMPT, text)
    assert score.reward == pytest.approx(reward) and score.metrics["exact"] == exact


def test_it_is_valid() -> None:
    env = make("records")
    assert env.validate().ok
    prompt = env.prompt(0, "test")
    assert prompt.messages[-1]["content"].endswith("keys name, age and city.")
