"""The generators of the optional package reasoning-gym, such as "reasoning-gym/chain_sum".

Task `index` is the first draw (split, 0, index), (split, 1, index),... with a question of the
split. The scorer makes the item again and checks its digest, so no item data is sent.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import fields
from typing import Any

from lowroll.envs.base import Environment, bounded, split_of
from lowroll.envs.curriculum import Curriculum
from lowroll.envs.generator import LEVEL, Generator, RemoteGenerator, levels, source
from lowroll.types import Prompt, Score, nearest

SYSTEM = "Think step by step. Then give the final answer, and nothing else, between <answer> and </answer>."
MAX_DRAWS = 64
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
OPPOSITES = {"True": "False", "False": "True"}


class ReasoningGym(Environment):
    """A generator with its options; the last <answer>...</answer> is scored."""

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        generator: str,
        system: str | None = SYSTEM,
        template: str = "{text}",
        curriculum: bool | dict[str, Any] = False,
        **options: Any,
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        self.generator, self.options = generator, options
        self._at_level: dict[int | None, Generator | RemoteGenerator] = {}
        try:
            self.curriculum = _curriculum(curriculum, generator, options)
            self.items(None if self.curriculum is None else self.curriculum.start)
        except ValueError as error:
            raise ValueError(f"env {name!r}: {error}") from error

    def items(self, level: int | None) -> Generator | RemoteGenerator:
        """Return the items of a level; None: of the plain options."""
        if level not in self._at_level:
            options = self.options if level is None else {**self.options, LEVEL: level}
            self._at_level[level] = source(self.generator, options, self.seed)
        return self._at_level[level]

    def prompt(self, index: int, split: str = "train") -> Prompt:
        """Return a question; ValueError when the generator has too few."""
        self.check_task(index, split)
        number, level = index, None
        if self.curriculum is not None:
            number, level = divmod(index, self.curriculum.levels)
        items = self.items(level)
        for draw in range(MAX_DRAWS):
            question, answer = items.item(split, draw, number)
            # an empty answer is a generator's error
            if split_of(question) != split or answer == "":
                continue
            info: dict[str, Any] = {
                "item": [split, draw, number],
                "digest": _digest(question, answer),
                "answer": answer,
            }
            if level is not None:
                info["level"] = level
            return self.ask(question, index, split, info)
        raise ValueError(
            f"env {self.name!r}: no {split} task in {MAX_DRAWS} draws: too few different questions"
        )

    def score(self, prompt: Prompt, text: str) -> Score:
        """Return the generator's reward in [0, 1]; 0 without an answer tag. ValueError for a
        different item."""
        level = prompt.info.get("level")
        metrics = {} if level is None else {"level": float(level)}
        answers = ANSWER.findall(bounded(text))
        if not answers:
            return Score(0.0, {"has_answer": 0.0} | metrics)
        split, draw, index = prompt.info["item"]
        items = self.items(level)
        if _digest(*items.item(split, draw, index)) != prompt.info["digest"]:
            raise ValueError(
                f"{self.generator} does not make the item of {prompt.id} again: another version of "
                "reasoning-gym, or not reproducible"
            )
        reward = items.score(split, draw, index, answers[-1].strip())
        return Score(reward, {"has_answer": 1.0} | metrics)

    def gold(self, prompt: Prompt) -> str:
        return f"<answer>{self._answer(prompt)}</answer>"

    def perturbed(self, prompt: Prompt) -> str:
        answer = self._answer(prompt)
        if answer in OPPOSITES:
            return f"<answer>{OPPOSITES[answer]}</answer>"
        number = re.search(r"(\d)\d*(\.\d)?", answer)
        if number is None:
            return f"<answer>{answer[: len(answer) // 2]}</answer>"
        if number[2]:
            digit = f"77{number[1]}"
        else:
            digit = "8" if number[1] == "9" else str(int(number[1]) + 1)
        return f"<answer>{answer[: number.start()]}{digit}{answer[number.start() + 1 :]}</answer>"

    def _answer(self, prompt: Prompt) -> str:
        if prompt.info["answer"] is None:
            raise NotImplementedError(f"reasoning-gym/{self.generator} stores no answer")
        return prompt.info["answer"]


def _curriculum(
    asked: bool | dict[str, Any], generator: str, options: dict[str, Any]
) -> Curriculum | None:
    if asked is False or asked is None:
        return None
    if asked is not True and not isinstance(asked, dict):
        raise ValueError(f"curriculum: expected true or a mapping, got {asked!r}")
    settings = {} if asked is True else asked
    setting_names = [field.name for field in fields(Curriculum)]
    for key in settings:
        if key not in setting_names:
            raise ValueError(
                f"curriculum: no setting {key!r}{nearest(key, setting_names, repr)}; known: {', '.join(setting_names)}"
            )
    max_levels = levels(generator, options)
    if settings.get("levels", 1) > max_levels:
        raise ValueError(f"curriculum: levels: reasoning-gym/{generator} has {max_levels}")
    return Curriculum(**{"levels": max_levels, **settings})


def _digest(question: str, answer: str | None) -> str:
    return hashlib.sha256(f"{question}\n{answer}".encode()).hexdigest()[:16]
