"""An environment of your own: sort the letters of a word. In the YAML: env: [{id: my_env.py, args:
{length: 6}}]

`task` draws a task from a random generator; the framework keeps train and test apart. `score`
returns a number, or a Score with more numbers for the log, also as `async def`. It may raise: that
rollout is then left out, never scored 0. Check it with
`lowroll.envs.make("examples/my_env.py").validate()`.
"""

from __future__ import annotations

import string
from random import Random

from lowroll.envs import GeneratedEnvironment
from lowroll.types import Prompt


class SortLetters(GeneratedEnvironment):
    """Reward: the share of positions that hold the right letter."""

    def __init__(self, *, name: str, seed: int = 0, length: int = 5) -> None:
        super().__init__(name=name, seed=seed, template="Sort the letters: {text}")
        self.length = length

    def task(self, rng: Random) -> tuple[str, dict[str, str]]:
        word = "".join(rng.sample(string.ascii_lowercase, self.length))
        return word, {"answer": "".join(sorted(word))}

    def score(self, prompt: Prompt, text: str) -> float:
        answer, response = prompt.info["answer"], text.strip()
        right = sum(a == b for a, b in zip(answer, response, strict=False))
        return right / max(len(answer), len(response))

    def gold(self, prompt: Prompt) -> str:
        return prompt.info["answer"]

    def perturbed(self, prompt: Prompt) -> str:
        return prompt.info["answer"][1:]
