"""Every generator of reasoning-gym, by name: "reasoning-gym/chain_sum" and a hundred more (an optional package).

A generator is a list of items that its seed determines. Task `index` is an item of a block of `BLOCK` items whose seed
is drawn from (seed, split, draw, block number); the draw is repeated until the question's hash lies in the split. The
scorer makes the item anew from those numbers, so whatever the generator keeps in it never has to cross a pipe.

Some of its scorers evaluate the response as Python or sympy source. For those the answer must be a sentence of a small
language (`LANGUAGES`) in which nothing but the task's own functions can be called; anything else is wrong, unread.
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any

from lowroll.envs.base import Environment, bounded, split_of
from lowroll.types import Prompt, Score

SYSTEM = "Think step by step. Then give the final answer, and nothing else, between <answer> and </answer>."
BLOCK = 256                # items of one generator instance: some prepare data for each item at construction
MAX_DRAWS = 64
ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)

LISTS = re.compile(r"[\w\s,'\"\[\]-]*")
SUMS = re.compile(r"[\d\s()+*/.-]*")
FUNCTIONS = "exp|log|sqrt|sin|cos|tan|cot|sec|csc|asin|acos|atan|sinh|cosh|tanh|erf|Abs|pi"
FORMULAS = re.compile(rf"(?>\d++(?:\.\d*+)?|\b(?:{FUNCTIONS}|[A-Za-z])\b|[\s()+*/^-])*+")
LANGUAGES = {              # generators whose scorer evaluates the answer, and what it may consist of
    "string_insertion": LISTS, "spiral_matrix": LISTS, "binary_matrix": LISTS, "n_queens": LISTS,
    "countdown": SUMS, "puzzle24": SUMS,
    "simple_integration": FORMULAS, "intermediate_integration": FORMULAS, "polynomial_multiplication": FORMULAS,
}
def _same_numbers(answer: str, item: dict[str, Any]) -> bool:
    return sorted(map(int, re.findall(r"\d{1,18}", answer))) == sorted(item["metadata"]["numbers"])


DEMANDS: dict[str, Callable[[str, dict[str, Any]], bool]] = {    # what a scorer of version 0.1.25 forgets to ask
    "game_of_life_halting": lambda answer, item: answer == item["answer"],   # it takes bool("False") for True
    "puzzle24": _same_numbers,         # it takes 24 out of any four numbers
}
OPPOSITES = {"True": "False", "False": "True"}


class ReasoningGym(Environment):
    """One generator; further arguments are its own options. The response's last <answer>...</answer> is scored."""

    def __init__(self, *, name: str, seed: int = 0, generator: str, system: str | None = SYSTEM,
                 template: str = "{text}", **options: Any) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        self.generator = generator
        self.options = self._checked(options)
        self._block = lru_cache(maxsize=8)(self._make_block)
        try:
            self._block("train", 0, 0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"env {name!r}: reasoning-gym refused the options: {error}") from error

    def _checked(self, options: dict[str, Any]) -> dict[str, Any]:
        try:
            from reasoning_gym.composite import DatasetSpec
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            raise ValueError(f"env {self.name!r}: needs the package 'reasoning-gym' "
                             "(pip install 'lowroll[envs]')") from error
        if self.generator not in DATASETS:
            from lowroll.envs.table import nearest

            raise ValueError(f"env {self.name!r}: reasoning-gym has no generator {self.generator!r}"
                             f"{nearest(self.generator, list(DATASETS))}")
        config = DATASETS[self.generator][1]
        known = [field.name for field in fields(config)] if is_dataclass(config) else []
        for key in options:
            if key not in known or key in ("seed", "size"):
                raise ValueError(f"env {self.name!r}: {self.generator} has no option {key!r}; known: "
                                 f"{', '.join(k for k in known if k not in ('seed', 'size'))}")
        if self.generator == "composite":
            parts = options.get("datasets")
            if not isinstance(parts, list) or not all(isinstance(part, dict) and "name" in part for part in parts):
                raise ValueError(f"env {self.name!r}: composite needs datasets: [{{name, weight, config}}, ...]")
            options = options | {"datasets": [DatasetSpec(**{"weight": 1.0, "config": {}} | part) for part in parts]}
        return options

    def _make_block(self, split: str, draw: int, block: int) -> Any:
        from reasoning_gym import create_dataset

        seed = self.rng(split, block, draw).getrandbits(31)    # some generators seed numpy, which takes 32 bits
        return create_dataset(self.generator, seed=seed, size=BLOCK, **self.options)

    def _item(self, split: str, draw: int, index: int) -> tuple[Any, dict[str, Any]]:
        block, offset = divmod(index, BLOCK)
        dataset = self._block(split, draw, block)
        return dataset, dataset[offset]

    def prompt(self, index: int, split: str = "train") -> Prompt:
        """Question number `index` of a split. ValueError when the generator has too few different questions."""
        self.rng(split, index)         # checks both
        for draw in range(MAX_DRAWS):
            _, item = self._item(split, draw, index)
            if split_of(item["question"]) == split:
                info = {"item": [split, draw, index], "answer": item["answer"]}
                return self.ask(item["question"], index, split, info)
        raise ValueError(f"env {self.name!r}: no {split} task in {MAX_DRAWS} draws: too few different questions")

    def score(self, prompt: Prompt, text: str) -> Score:
        """The generator's own reward, in [0, 1]; 0 without an answer tag."""
        found = ANSWER.findall(bounded(text))
        if not found:
            return Score(0.0, {"has_answer": 0.0})
        answer = found[-1].strip()
        dataset, item = self._item(*prompt.info["item"])
        source = item["metadata"].get("source_dataset", self.generator)     # a composite tells whose item it is
        language, demand = LANGUAGES.get(source), DEMANDS.get(source)
        if answer != item["answer"] and (language is not None and language.fullmatch(answer) is None
                                         or demand is not None and not demand(answer, item)):
            return Score(0.0, {"has_answer": 1.0})
        return Score(float(dataset.score_answer(answer, item)), {"has_answer": 1.0})

    def gold(self, prompt: Prompt) -> str:
        """The stored answer; NotImplementedError for the few generators that store none."""
        return f"<answer>{self._answer(prompt)}</answer>"

    def perturbed(self, prompt: Prompt) -> str:
        """The stored answer with its first digit changed (scorers round), negated, or without its first character."""
        answer = self._answer(prompt)
        if answer in OPPOSITES:
            return f"<answer>{OPPOSITES[answer]}</answer>"
        digit = re.search(r"\d", answer)
        if digit is None:
            return f"<answer>{answer[1:]}</answer>"
        wrong = "4" if digit[0] == "9" else str(int(digit[0]) + 1)
        return f"<answer>{answer[:digit.start()]}{wrong}{answer[digit.end():]}</answer>"

    def _answer(self, prompt: Prompt) -> str:
        if prompt.info["answer"] is None:
            raise NotImplementedError(f"reasoning-gym/{self.generator} stores no answer")
        return prompt.info["answer"]
