r"""Sets of worded problems: the answer in the last `\boxed{}`, or after `####`.

AIME's "025" is 25, AMC's 27.0 is 27; OlympiadBench's several answers are an unordered list.
"""

from __future__ import annotations

from typing import Any

from lowroll.envs.problems import ORDER, FinalAnswer, read_answer
from lowroll.envs.sets.held_out import HeldOut, HeldOutTask
from lowroll.envs.sets.rows import column, text_of
from lowroll.types import Prompt


class Boxed(FinalAnswer, HeldOut):
    r"""A set where the last `\boxed{}` of a response is its answer."""

    def convert(self, row: dict[str, Any], where: str) -> HeldOutTask | None:
        question = text_of(row, self.row, "question", where)
        key = column(row, self.row, "answer", where)
        answer, solution = read_answer(row, key, f"{where}: column {key!r}")
        if not answer:
            return None
        info = {"answer": answer, "ordered": ORDER.search(question) is not None}
        return HeldOutTask(question, info, solution)

    def solution(self, prompt: Prompt) -> str:
        return self.tasks[prompt.info["row"]].solution


class Hashed(Boxed):
    r"""A set where the last of `#### number` and `\boxed{}` decides."""

    hashes = True
