"""guess: find a number in a conversation with the hints "higher" and "lower", in few guesses.

    user 1-9    assistant 5    user higher    assistant 7        found at the second of its turns

The reward is 1 for the number, less `turn_cost` for each earlier guess; a miss gets `near` times 1
- |guess - number| / width; anything else 0.
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

from lowroll.envs.base import GeneratedEnvironment
from lowroll.types import Message, Prompt, Score

NUMBER = re.compile(r"\s*(\d{1,9})\s*")


class Guess(GeneratedEnvironment):
    """A number of 1..`most` in a given range of `width` numbers."""

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        system: str | None = None,
        template: str = "{text}",
        most: int = 99,
        width: int = 9,
        max_turns: int = 3,
        turn_cost: float = 0.0,
        near: float = 0.0,
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        if not 2 <= width <= most < 10**9:
            raise ValueError(f"env {name!r}: need 2 <= width <= most, got {width} and {most}")
        if not 0.0 <= near < 1.0:
            raise ValueError(f"env {name!r}: near must be in [0, 1), got {near}")
        if not 0.0 <= turn_cost * (max_turns - 1) < 1.0:
            raise ValueError(f"env {name!r}: turn_cost {turn_cost} leaves the last turn no reward")
        self.most, self.width, self.max_turns = most, width, max_turns
        self.turn_cost, self.near = turn_cost, near
        self.exact = near == 0.0

    def task(self, rng: Random) -> tuple[str, dict[str, Any]]:
        low = rng.randint(1, self.most - self.width + 1)
        number = rng.randint(low, low + self.width - 1)
        # a range is one task for the split, so ranges are held out
        return f"{low}-{low + self.width - 1}", {"answer": str(number)}

    def respond(self, prompt: Prompt, messages: list[Message]) -> list[Message] | None:
        guess, number = guessed(messages[-1]["content"]), int(prompt.info["answer"])
        if guess == number:
            return None
        if guess is None:
            hint = "a number"
        else:
            hint = "higher" if guess < number else "lower"
        return [{"role": "user", "content": hint}]

    def score_conversation(self, prompt: Prompt, messages: list[Message]) -> Score:
        guesses = [message["content"] for message in messages if message["role"] == "assistant"]
        last_score = self.score(prompt, guesses[-1])
        cost = self.turn_cost * (len(guesses) - 1) if last_score.metrics["found"] else 0.0
        return Score(
            last_score.reward - cost, {**last_score.metrics, "guesses": float(len(guesses))}
        )

    def score(self, prompt: Prompt, text: str) -> Score:
        guess, number = guessed(text), int(prompt.info["answer"])
        if guess == number:
            return Score(1.0, {"found": 1.0})
        nearness = 0.0 if guess is None else max(0.0, 1 - abs(guess - number) / self.width)
        return Score(self.near * nearness, {"found": 0.0})

    def gold(self, prompt: Prompt) -> str:
        return str(prompt.info["answer"])

    def perturbed(self, prompt: Prompt) -> str:
        return str(int(prompt.info["answer"]) + 1)


def guessed(text: str) -> int | None:
    match = NUMBER.fullmatch(text)
    return int(match[1]) if match else None
