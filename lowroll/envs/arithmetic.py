"""arithmetic: evaluate a generated expression step by step.

The gold response to `(3 + 5) * 2` reduces one operation a line, innermost and leftmost first:

    3 + 5 = 8
    8 * 2 = 16
    #### 16

Reward = (1 - format_weight) * right + format_weight * tidy: `right` is 1 when the number after the
last `####` is the value, `tidy` is 1 when the lines before it are as many true statements `a op b =
c` as there are operations.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from lowroll.envs.answers.equality import hash_answer, same_number
from lowroll.envs.base import GeneratedEnvironment, bounded
from lowroll.types import Prompt, Score

TEMPLATE = (
    "Compute {text}\nWrite one operation a line, such as 2 + 3 = 5, and then the result after ####."
)
STEP = re.compile(r"(-?\d{1,18}) ([-+*/]) (-?\d{1,18}) = (-?\d{1,18})")


def apply(op: str, a: int, b: int) -> int | None:
    """Return a op b in the integers; None for an inexact division."""
    if op == "/":
        return a // b if b and a % b == 0 else None
    return a + b if op == "+" else a - b if op == "-" else a * b


class Arithmetic(GeneratedEnvironment):
    """`min_steps`..`max_steps` operations out of `ops`, operands 1..`max_operand`."""

    exact = True

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        system: str | None = None,
        template: str = TEMPLATE,
        min_steps: int = 2,
        max_steps: int = 4,
        max_operand: int = 20,
        ops: str = "+-*",
        format_weight: float = 0.0,
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        if not 1 <= min_steps <= max_steps <= 64:
            raise ValueError(
                f"env {name!r}: need 1 <= min_steps <= max_steps <= 64, got {min_steps} and "
                f"{max_steps}"
            )
        if not 1 <= max_operand <= 10**6:
            raise ValueError(f"env {name!r}: max_operand must be in 1..10^6, got {max_operand}")
        if not ops or set(ops) - set("+-*/"):
            raise ValueError(f"env {name!r}: ops must be some of '+-*/', got {ops!r}")
        if not 0.0 <= format_weight < 1.0:
            raise ValueError(f"env {name!r}: format_weight must be in [0, 1), got {format_weight}")
        self.steps, self.max_operand, self.ops = (min_steps, max_steps), max_operand, ops
        self.format_weight = format_weight
        self.exact = format_weight == 0.0

    def task(self, rng: Random) -> tuple[str, dict[str, Any]]:
        lines: list[str] = []
        text, value = self._expression(rng, rng.randint(*self.steps), lines)
        return text[1:-1], {"answer": str(value), "steps": lines}

    def _expression(self, rng: Random, steps: int, lines: list[str]) -> tuple[str, int]:
        if steps == 0:
            value = rng.randint(1, self.max_operand)
            return str(value), value
        op = rng.choice(self.ops)
        left_steps = steps - 1 if op == "/" else rng.randrange(steps)
        left_text, a = self._expression(rng, left_steps, lines)
        if op == "/":
            b = rng.choice([d for d in range(1, self.max_operand + 1) if a % d == 0])
            right_text = str(b)
        else:
            right_text, b = self._expression(rng, steps - 1 - left_steps, lines)
        result = apply(op, a, b)
        assert result is not None
        lines.append(f"{a} {op} {b} = {result}")
        return f"({left_text} {op} {right_text})", result

    def score(self, prompt: Prompt, text: str) -> Score:
        text = bounded(text)
        answer = hash_answer(text)
        right = float(answer is not None and same_number(prompt.info["answer"], answer) is True)
        tidy = float(self._is_tidy(text, len(prompt.info["steps"])))
        reward = (1.0 - self.format_weight) * right + self.format_weight * tidy
        return Score(
            reward, {"right": right, "tidy": tidy, "has_answer": float(answer is not None)}
        )

    def _is_tidy(self, text: str, num_steps: int) -> bool:
        lines = [line.strip() for line in text.rpartition("####")[0].splitlines() if line.strip()]
        matches = [STEP.fullmatch(line) for line in lines]
        return len(lines) == num_steps and all(
            m is not None and apply(m[2], int(m[1]), int(m[3])) == int(m[4]) for m in matches
        )

    def gold(self, prompt: Prompt) -> str:
        return "\n".join([*prompt.info["steps"], f"#### {prompt.info['answer']}"])

    def perturbed(self, prompt: Prompt) -> str:
        return "\n".join([*prompt.info["steps"], f"#### {int(prompt.info['answer']) + 1}"])
