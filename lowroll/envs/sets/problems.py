r"""Sets of worded problems: the answer in the last `\boxed{}`, or after `####`.

AIME's "025" is the integer 25, AMC's 27.0 is 27, and OlympiadBench's several answers are a list
whose order does not count.
"""

from __future__ import annotations

from typing import Any, ClassVar

from lowroll.envs.answers import last_answer
from lowroll.envs.problems import (
    CALCULATOR,
    ORDER,
    as_text,
    ends_in,
    final_answer,
    judged,
    perturb,
)
from lowroll.envs.sets.held_out import HeldOut, Task
from lowroll.envs.sets.rows import column, text_of
from lowroll.types import Prompt, Score


class Boxed(HeldOut):
    r"""The last `\boxed{}` of a response is its answer."""

    hashes: ClassVar[bool] = False
    overtaxed = Score(0.0, {"has_answer": 1.0, "unjudged": 1.0})

    def convert(self, row: dict[str, Any], where: str) -> Task | None:
        """The question, its final answer, and a worked solution where there is one."""
        question = text_of(row, self.row, "question", where)
        key = column(row, self.row, "answer", where)
        given = row[key] if isinstance(row[key], list) else [row[key]]
        raw = [as_text(item, f"{where}: column {key!r}") for item in given]
        if key == "solution":
            answer = last_answer(raw[0], joined=False) or ""
        else:
            answer = ", ".join(filter(None, map(final_answer, raw)))
        solution = raw[0] if key == "solution" or "####" in raw[0] else row.get("solution")
        shown = CALCULATOR.sub("", solution).strip() if isinstance(solution, str) else ""
        ordered = ORDER.search(question) is not None
        return Task(question, {"answer": answer, "ordered": ordered}, shown) if answer else None

    def score(self, prompt: Prompt, text: str) -> Score:
        """1 or 0. A response without a final answer is wrong, and so is one that cannot be
        judged."""
        return judged(prompt, text, self.hashes)

    def gold(self, prompt: Prompt) -> str:
        """The worked solution where it ends in the gold answer, else the answer alone."""
        answer, solution = prompt.info["answer"], self.tasks[prompt.info["row"]].solution
        return solution if ends_in(solution, answer, self.hashes) else self.state(answer)

    def perturbed(self, prompt: Prompt) -> str:
        """The gold answer with one digit changed."""
        return self.state(perturb(prompt.info["answer"]))

    def state(self, answer: str) -> str:
        """The shortest response with this final answer."""
        return f"\\boxed{{{answer}}}"


class Hashed(Boxed):
    r"""`#### number` counts beside `\boxed{}`, and the last of them decides."""

    hashes = True

    def state(self, answer: str) -> str:
        """The answer after ####."""
        return f"#### {answer}"
