"""records: write a sentence about a person as JSON only.

    Karla, 65, is from Dublin. Write this as JSON with the keys name, age and city.
    {"name": "Karla", "age": 65, "city": "Dublin"}

Reward = (1 + right) / (1 + keys) of a response that is one JSON object: `right` counts right
values, `keys` the larger of requested and present keys. Any other text, also a fenced one, scores
0.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

from lowroll.envs.base import GeneratedEnvironment, bounded
from lowroll.types import Prompt, Score

TEMPLATE = "{text} Write this as JSON with the keys name, age and city."
NAMES = (
    "Anna Ben Clara David Elena Felix Grace Hugo Ines Jonas Karla Leo Maria Nora Oscar Paula Ruben "
    "Sofia Tom Vera"
).split()
CITIES = (
    "Athens Berlin Cairo Dublin Geneva Havana Lima London Madrid Milan Moscow Nairobi Oslo Paris "
    "Prague Rome Seoul Tokyo Vienna Warsaw"
).split()
SENTENCES = (
    "{name} is {age} years old and lives in {city}.",
    "{name}, {age}, is from {city}.",
    "In {city} lives {name}, who is {age}.",
)


class Records(GeneratedEnvironment):
    """Sentences with a name, an age of 18..80 and a city, in three forms."""

    def __init__(
        self, *, name: str, seed: int = 0, system: str | None = None, template: str = TEMPLATE
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)

    def task(self, rng: Random) -> tuple[str, dict[str, Any]]:
        answer = {
            "name": rng.choice(NAMES),
            "age": rng.randint(18, 80),
            "city": rng.choice(CITIES),
        }
        return rng.choice(SENTENCES).format(**answer), {"answer": answer}

    def score(self, prompt: Prompt, text: str) -> Score:
        answer = prompt.info["answer"]
        try:
            record = json.loads(bounded(text))
        except (ValueError, RecursionError):
            record = None
        if not isinstance(record, dict):
            return Score(0.0, {"json": 0.0, "exact": 0.0})
        right = sum(key in record and record[key] == value for key, value in answer.items())
        reward = (1 + right) / (1 + max(len(answer), len(record)))
        return Score(reward, {"json": 1.0, "exact": float(record == answer)})

    def gold(self, prompt: Prompt) -> str:
        return json.dumps(prompt.info["answer"])

    def perturbed(self, prompt: Prompt) -> str:
        answer = prompt.info["answer"]
        return json.dumps({**answer, "age": answer["age"] + 1})
