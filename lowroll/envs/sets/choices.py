"""Sets of multiple choice: the last `Answer: X` of a response is its choice.

The gold label is mapped by position, as ARC has labels 1 to 4. Separate right and wrong options
(GPQA) are shuffled by the question's text.
"""

from __future__ import annotations

import re
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
    """Multiple choice: reward 1 when the last `Answer: X` is right, else 0."""

    def convert(self, row: dict[str, Any], where: str) -> HeldOutTask | None:
        """Return the question with its options; None without a right one."""
        question = text_of(row, self.row, "question", where)
        options, gold = _apart(self, row, where) if self.row.shuffled else _given(self, row, where)
        if gold is None:
            return None
        if not gold < len(options) <= len(LETTERS):
            raise ValueError(f"{where}: {len(options)} options, and the right one is {gold + 1}")
        listed = "\n".join(
            f"{letter}) {text}"
            for letter, text in zip(LETTERS[: len(options)], options, strict=True)
        )
        info = {"answer": LETTERS[gold], "options": len(options)}
        return HeldOutTask(f"{question}\n\n{listed}", info)

    def score(self, prompt: Prompt, text: str) -> Score:
        """Return 1 or 0, and `has_answer`."""
        gold, chosen = prompt.info["answer"], choice(text, prompt.info["options"])
        if "beside" in prompt.info:
            gold = choice(prompt.info["beside"], prompt.info["options"])
        right = chosen is not None and chosen == gold
        return Score(float(right), {"has_answer": float(chosen is not None)})

    def gold(self, prompt: Prompt) -> str:
        return f"Answer: {prompt.info['answer']}"

    def perturbed(self, prompt: Prompt) -> str:
        place = LETTERS.index(prompt.info["answer"]) + 1
        return f"Answer: {LETTERS[place % prompt.info['options']]}"


def choice(text: str, options: int) -> str | None:
    """Return the letter of the last `Answer: X`; None without a valid one."""
    found = CHOICE.findall(bounded(text))
    return found[-1] if found and found[-1] in LETTERS[:options] else None


def _given(env: Choices, row: dict[str, Any], where: str) -> tuple[list[str], int | None]:
    key = column(row, env.row, "options", where)
    raw, labels = row[key], list(LETTERS)
    if isinstance(raw, dict):  # ARC: {"text": [...], "label": [...]}
        labels = [str(label) for label in raw.get("label", ())]
        raw = raw.get("text")
    if not isinstance(raw, list) or not all(isinstance(one, str) for one in raw):
        raise ValueError(f"{where}: column {key!r} must hold a list of texts")
    labels = labels[: len(raw)]
    right = str(row[column(row, env.row, "answer", where)]).strip()
    if not right:
        return raw, None
    if right not in labels or len(labels) < len(raw):
        raise ValueError(f"{where}: answer {right!r} is none of the labels {labels}")
    kept = [
        (label, one)
        for label, one in zip(labels, raw, strict=True)
        if one != ABSENT or label == right
    ]
    return [one for _, one in kept], [label for label, _ in kept].index(right)


def _apart(env: Choices, row: dict[str, Any], where: str) -> tuple[list[str], int | None]:
    """Return the options shuffled by the question's text, and the right one's position."""
    correct = text_of(row, env.row, "correct", where)
    wrong = [str(row[key]).strip() for key in env.row.columns["wrong"] if row.get(key)]
    if not wrong:
        raise ValueError(f"{where}: none of the columns {', '.join(env.row.columns['wrong'])}")
    order = list(range(1 + len(wrong)))
    Random(text_of(row, env.row, "question", where)).shuffle(order)
    return [[correct, *wrong][place] for place in order], order.index(0)
