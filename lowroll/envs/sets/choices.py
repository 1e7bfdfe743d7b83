"""Sets of multiple choice: the last `Answer: X` of a response is its choice.

The gold label is mapped by position, as ARC has labels 1 to 4. Separate right and wrong options
(GPQA) are shuffled by the question's text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from random import Random
from typing import Any

from lowroll.envs.base import bounded
from lowroll.envs.sets.held_out import HeldOut, HeldOutTask
from lowroll.envs.sets.rows import column, text_of
from lowroll.types import Prompt, Score

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
ABSENT = "N/A"  # MMLU-Pro's filler
CHOICE = re.compile(
    r"\b[Aa](?:nswer|NSWER)[ \t]{0,4}(?:\*\*)?:(?:\*\*)?[ \t]{0,4}"
    r"(?:[*$(\[]|\\boxed\{|\\text\{|option ){0,3}([A-Z])(?![A-Za-z0-9'])"
)


class Choices(HeldOut):
    """A set of multiple choice: reward 1 when the last `Answer: X` is right, else 0."""

    def convert(self, row: dict[str, Any], where: str) -> HeldOutTask | None:
        question = text_of(row, self.row, "question", where)
        options, gold = (
            _shuffled_options(self, row, where)
            if self.row.shuffled
            else _listed_options(self, row, where)
        )
        if gold is None:
            return None
        if not gold < len(options) <= len(LETTERS):
            raise ValueError(f"{where}: {len(options)} options, and the right one is {gold + 1}")
        option_lines = "\n".join(
            f"{letter}) {text}"
            for letter, text in zip(LETTERS[: len(options)], options, strict=True)
        )
        info = {"answer": LETTERS[gold], "options": len(options)}
        return HeldOutTask(f"{question}\n\n{option_lines}", info)

    def score(self, prompt: Prompt, text: str) -> Score:
        gold, chosen = prompt.info["answer"], choice(text, prompt.info["options"])
        if "beside" in prompt.info:
            gold = choice(prompt.info["beside"], prompt.info["options"])
        right = chosen is not None and chosen == gold
        return Score(float(right), {"has_answer": float(chosen is not None)})

    def matching(self, prompt: Prompt, text: str) -> Prompt | None:
        return replace(prompt, info={**prompt.info, "beside": bounded(text)})

    def gold(self, prompt: Prompt) -> str:
        return f"Answer: {prompt.info['answer']}"

    def perturbed(self, prompt: Prompt) -> str:
        next_index = LETTERS.index(prompt.info["answer"]) + 1
        return f"Answer: {LETTERS[next_index % prompt.info['options']]}"


def choice(text: str, options: int) -> str | None:
    """Return the letter of the last `Answer: X`, if it is valid."""
    letters = CHOICE.findall(bounded(text))
    return letters[-1] if letters and letters[-1] in LETTERS[:options] else None


def _listed_options(env: Choices, row: dict[str, Any], where: str) -> tuple[list[str], int | None]:
    key = column(row, env.row, "options", where)
    options, labels = row[key], list(LETTERS)
    if isinstance(options, dict):  # ARC: {"text": [...], "label": [...]}
        labels = [str(label) for label in options.get("label", ())]
        options = options.get("text")
    if not isinstance(options, list) or not all(isinstance(option, str) for option in options):
        raise ValueError(f"{where}: column {key!r} must hold a list of texts")
    labels = labels[: len(options)]
    right_label = str(row[column(row, env.row, "answer", where)]).strip()
    if not right_label:
        return options, None
    if right_label not in labels or len(labels) < len(options):
        raise ValueError(f"{where}: answer {right_label!r} is none of the labels {labels}")
    kept_options = []
    kept_labels = []
    for label, option in zip(labels, options, strict=True):
        if option != ABSENT or label == right_label:
            kept_options.append(option)
            kept_labels.append(label)
    return kept_options, kept_labels.index(right_label)


def _shuffled_options(
    env: Choices, row: dict[str, Any], where: str
) -> tuple[list[str], int | None]:
    correct = text_of(row, env.row, "correct", where)
    wrong_options = [str(row[key]).strip() for key in env.row.columns["wrong"] if row.get(key)]
    if not wrong_options:
        raise ValueError(f"{where}: none of the columns {', '.join(env.row.columns['wrong'])}")
    order = list(range(1 + len(wrong_options)))
    Random(text_of(row, env.row, "question", where)).shuffle(order)
    return [[correct, *wrong_options][index] for index in order], order.index(0)
