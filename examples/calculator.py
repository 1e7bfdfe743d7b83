"""An environment with a tool: sums that are easier with a calculator. In the YAML:
env: [{id: calculator.py, args: {digits: 3}}]

The model is shown the functions by its chat template, and calls them in the template's own format.
What a call returns, or what was wrong with it, comes back as a message, and the model goes on, for
`max_turns` turns at most. The last turn is scored.
"""

from __future__ import annotations

import re
from random import Random
from typing import Literal

from lowroll.envs import GeneratedEnvironment, ToolEnvironment
from lowroll.types import Prompt


def calculate(a: int, operation: Literal["+", "-", "*"], b: int) -> int:
    """Calculate with two integers.

    Args:
        a: The first number
        operation: What to do with them
        b: The second number
    """
    if abs(a) > 10**12 or abs(b) > 10**12:
        raise ValueError("a number is too large for this calculator")
    return {"+": a + b, "-": a - b, "*": a * b}[operation]


class Calculator(ToolEnvironment, GeneratedEnvironment):
    """Reward: 1 when the last number of the last turn is the result."""

    exact = True

    def __init__(self, *, name: str, seed: int = 0, digits: int = 3, max_turns: int = 4) -> None:
        super().__init__(
            name=name,
            seed=seed,
            template="What is {text}?",
            functions=[calculate],
            max_turns=max_turns,
            call_seconds=1.0,
            most_output=200,
        )
        self.digits = digits

    def task(self, rng: Random) -> tuple[str, dict[str, int]]:
        a, b = (rng.randrange(10**self.digits) for _ in range(2))
        operation = rng.choice("+-*")
        return f"{a} {operation} {b}", {"answer": calculate(a, operation, b)}

    def score(self, prompt: Prompt, text: str) -> float:
        numbers = re.findall(r"-?\d{1,30}", text)
        return float(bool(numbers) and int(numbers[-1]) == prompt.info["answer"])

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.info["answer"])

    def perturbed(self, prompt: Prompt) -> str:
        return str(prompt.info["answer"] + 1)
