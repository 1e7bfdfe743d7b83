"""chain: carry a running sum through many rounds of a table that the prompt gives once.

A task is a table of amounts, a start, a modulus and a number of rounds, such as `a=3 b=7 from 5 mod
10, 2 rounds`. The gold response writes the sum after each amount:

    1: a8 b5
    2: a8 b5
    #### 5

Totals that share a factor with the modulus cycle early, so they are not drawn.

Reward = (1 - step_weight) * right + step_weight * prefix: `right` is 1 when the number after the
last `####` is the last sum, `prefix` is the share of sums before the first wrong one.
"""

from __future__ import annotations

import re
from math import gcd
from random import Random
from string import ascii_lowercase
from typing import Any

from lowroll.envs.answers.equality import hash_answer, same_number
from lowroll.envs.base import GeneratedEnvironment, bounded
from lowroll.types import Prompt, Score

TEMPLATE = (
    "{text}\nAdd the amounts in turn, round by round. Write a line for each round, such as "
    "1: a8 b5, with every new sum after its letter, and then the last sum after ####."
)
MAX_SUMS = 5000  # more do not fit into the scored text
SUM = re.compile(r"([a-z])(\d{1,4})")


class Chain(GeneratedEnvironment):
    """`entries` amounts of 0..`max_amount`, added in turn for `min_rounds`..`max_rounds` rounds."""

    exact = True

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        system: str | None = None,
        template: str = TEMPLATE,
        entries: int = 8,
        max_amount: int = 9,
        modulus: int = 10,
        min_rounds: int = 12,
        max_rounds: int = 12,
        step_weight: float = 0.0,
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        if not 1 <= entries <= len(ascii_lowercase):
            raise ValueError(f"env {name!r}: entries must be in 1..26, got {entries}")
        if not 2 <= modulus <= 1000:
            raise ValueError(f"env {name!r}: modulus must be in 2..1000, got {modulus}")
        if not 1 <= max_amount < modulus:
            raise ValueError(
                f"env {name!r}: max_amount must be in 1..{modulus - 1}, got {max_amount}"
            )
        if not 1 <= min_rounds <= max_rounds <= 1000:
            raise ValueError(
                f"env {name!r}: need 1 <= min_rounds <= max_rounds <= 1000, got {min_rounds} and "
                f"{max_rounds}"
            )
        if entries * max_rounds > MAX_SUMS:
            raise ValueError(
                f"env {name!r}: entries * max_rounds must be at most {MAX_SUMS}, got "
                f"{entries * max_rounds}"
            )
        if not 0.0 <= step_weight < 1.0:
            raise ValueError(f"env {name!r}: step_weight must be in [0, 1), got {step_weight}")
        self.letters, self.max_amount, self.modulus = ascii_lowercase[:entries], max_amount, modulus
        self.rounds, self.step_weight = (min_rounds, max_rounds), step_weight
        self.exact = step_weight == 0.0

    def task(self, rng: Random) -> tuple[str, dict[str, Any]]:
        amounts = [0]
        while gcd(sum(amounts), self.modulus) != 1:
            amounts = [rng.randint(0, self.max_amount) for _ in self.letters]
        start, rounds = rng.randrange(self.modulus), rng.randint(*self.rounds)
        sums, total = [], start
        for amount in amounts * rounds:
            total = (total + amount) % self.modulus
            sums.append(total)
        table = " ".join(
            f"{letter}={amount}" for letter, amount in zip(self.letters, amounts, strict=True)
        )
        text = f"{table} from {start} mod {self.modulus}, {rounds} rounds"
        return text, {"answer": str(total), "sums": sums}

    def score(self, prompt: Prompt, text: str) -> Score:
        text = bounded(text)
        answer = hash_answer(text)
        right = float(answer is not None and same_number(prompt.info["answer"], answer) is True)
        prefix = self._right_before_wrong(text, prompt.info["sums"]) / len(prompt.info["sums"])
        reward = (1.0 - self.step_weight) * right + self.step_weight * prefix
        return Score(
            reward, {"right": right, "prefix": prefix, "has_answer": float(answer is not None)}
        )

    def _right_before_wrong(self, text: str, sums: list[int]) -> int:
        written_sums = SUM.findall(text.rpartition("####")[0] or text)
        for i, (expected, (letter, number)) in enumerate(zip(sums, written_sums, strict=False)):
            if letter != self.letters[i % len(self.letters)] or int(number) != expected:
                return i
        return min(len(sums), len(written_sums))

    def gold(self, prompt: Prompt) -> str:
        return self.written(prompt.info["sums"])

    def written(self, sums: list[int]) -> str:
        width = len(self.letters)
        lines = [
            f"{row_start // width + 1}: "
            + " ".join(f"{letter}{sums[row_start + i]}" for i, letter in enumerate(self.letters))
            for row_start in range(0, len(sums), width)
        ]
        return "\n".join([*lines, f"#### {sums[-1]}"])

    def perturbed(self, prompt: Prompt) -> str:
        chain = self.gold(prompt).rpartition("####")[0]
        return f"{chain}#### {int(prompt.info['answer']) + 1}"
