"""reverse-text: write the text backwards, character by character.

Reward = 2 * LCS(response, target) / (len(response) + len(target)), LCS the length of the longest
common subsequence: 1 only for the target, no gain from padding. LCS is bit-parallel (Hyyro 2004,
"Bit-parallel LCS-length computation revisited").
"""

from __future__ import annotations

import string
from random import Random
from typing import Any

from lowroll.envs.base import GeneratedEnvironment, bounded
from lowroll.envs.rows import SplitRows
from lowroll.types import Prompt, Score

TEMPLATE = (
    "Reverse this text character by character and answer with the reversed text alone: {text}"
)


def lcs_length(a: str, b: str) -> int:
    """Return the LCS length of two strings in O(len(a) * len(b) / word size).

    The usual table has a row for each prefix of b. Here a row is an integer, whose bit i is 0 where
    the length grows between a[:i] and a[:i+1].
    """
    positions: dict[str, int] = {}  # of each character in a, as a set of bits
    for i, char in enumerate(a):
        positions[char] = positions.get(char, 0) | 1 << i
    ones = (1 << len(a)) - 1
    row = ones
    for char in b:
        match = row & positions.get(char, 0)
        # the sum's carry moves each 0 down to the lowest match among the ones below it, and `row -
        # match` restores the ones that the carry passed
        row = ((row + match) | (row - match)) & ones
    return len(a) - row.bit_count()


def lcs_ratio(a: str, b: str) -> float:
    """Return 2 * LCS / (len(a) + len(b)), in [0, 1]; 1 only for equal strings."""
    return 2 * lcs_length(a, b) / (len(a) + len(b)) if a or b else 1.0


class ReverseText(GeneratedEnvironment):
    """Generated words (`min_words`..`max_words` of `min_len`..`max_len` characters of `alphabet`),
    or texts in `field` of the JSONL files `path` and `test_path`."""

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        system: str | None = None,
        template: str = TEMPLATE,
        alphabet: str = string.ascii_lowercase,
        min_words: int = 1,
        max_words: int = 4,
        min_len: int = 2,
        max_len: int = 8,
        path: str | None = None,
        test_path: str | None = None,
        field: str = "text",
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        if not alphabet or any(char.isspace() for char in alphabet):
            raise ValueError(
                f"env {name!r}: alphabet must be characters other than white space, got "
                f"{alphabet!r}"
            )
        for kind, low, high in (("words", min_words, max_words), ("len", min_len, max_len)):
            if not (isinstance(low, int) and isinstance(high, int) and 1 <= low <= high):
                raise ValueError(
                    f"env {name!r}: need integers 1 <= min_{kind} <= max_{kind}, got {low!r} and "
                    f"{high!r}"
                )
        self.alphabet, self.field = alphabet, field
        self.words, self.lengths = (min_words, max_words), (min_len, max_len)
        self.rows: SplitRows[str] | None = None
        if path is not None or test_path is not None:
            self.rows = SplitRows(name, self._text, path=path, test_path=test_path, seed=seed)

    def size(self, split: str = "train") -> int | None:
        return None if self.rows is None else len(self.rows[split])

    def prompt(self, index: int, split: str = "train") -> Prompt:
        if self.rows is None:
            return super().prompt(index, split)
        self.check_task(index, split)
        text = self.rows[split][self.rows.at(split, index)]
        return self.ask(text, index, split, {"answer": text[::-1]})

    def task(self, rng: Random) -> tuple[str, dict[str, Any]]:
        words = [
            "".join(rng.choices(self.alphabet, k=rng.randint(*self.lengths)))
            for _ in range(rng.randint(*self.words))
        ]
        text = " ".join(words)
        return text, {"answer": text[::-1]}

    def score(self, prompt: Prompt, text: str) -> Score:
        response, answer = bounded(text).strip(), prompt.info["answer"]
        return Score(lcs_ratio(response, answer), {"exact": float(response == answer)})

    def gold(self, prompt: Prompt) -> str:
        return prompt.info["answer"]

    def perturbed(self, prompt: Prompt) -> str:
        return prompt.info["answer"][1:]

    def _text(self, row: dict[str, Any], where: str) -> str | None:
        if not isinstance(row.get(self.field), str):
            raise ValueError(
                f"{where}: field {self.field!r} must be a string, got {row.get(self.field)!r}"
            )
        return row[self.field].strip() or None
