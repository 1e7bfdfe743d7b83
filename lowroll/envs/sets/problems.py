r"""Sets of worded problems: the answer in the last `\boxed{}`, or after `####`.

AIME's "025" is 25, AMC's 27.0 is 27; OlympiadBench's several answers are an unordered list.
"""

from __future__ import annotations

from typing import Any

from lowroll.envs.answers import last_answer
from lowroll.envs.problems import (
    CALCULATOR,
    ORDER,
    FinalAnswer,
    as_text,
    final_answer,
)
from lowroll.envs.sets.held_out import HeldOut, HeldOutTask
from lowroll.envs.sets.rows import column, text_of
from lowroll.types import Prompt


class Boxed(FinalAnswer, HeldOut):
    r"""The last `\boxed{}` of a response is its answer."""

    def convert(self, row: dict[str, Any], where: str) -> HeldOutTask | None:
        question = text_of(row, self.row, "question", where)
        key = column(row, self.row, "answer", where)
        values = row[key] if isinstance(row[key], list) else [row[key]]
        texts = [as_text(value, f"{where}: column {key!r}") for value in values]
        if key == "solution":  # a worked solution, which ends in the answer
            answer = last_answer(texts[0], joined=False) or ""
        else:
            answer = ", ".join(filter(None, map(final_answer, texts)))
        is_worked = key == "solution" or "####" in texts[0]
        solution = texts[0] if is_worked else row.get("solution")
        if not isinstance(solution, str):
            solution = ""
        if not answer:
            return None
        info = {"answer": answer, "ordered": ORDER.search(question) is not None}
        return HeldOutTask(question, info, CALCULATOR.sub("", solution).strip())

    def solution(self, prompt: Prompt) -> str:
        return self.tasks[prompt.info["row"]].solution


class Hashed(Boxed):
    r"""A set where the last of `#### number` and `\boxed{}` decides."""

    hashes = True
