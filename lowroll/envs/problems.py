r"""Problems with a final answer, from a data set's rows, such as GSM8K's and MATH's.

The gold answer is after `####`, in the last `\boxed{}`, between dollars, or the whole field. A row
without one is skipped and counted.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from lowroll.envs.answers.equality import Unjudged, boxed_answer, equal, last_answer, same_number
from lowroll.envs.base import Environment, bounded
from lowroll.envs.rows import SplitRows
from lowroll.types import Prompt, Score

log = logging.getLogger(__name__)

QUESTION_FIELDS = ("question", "problem", "prompt")
ANSWER_FIELDS = ("answer", "final_answer", "solution")
# GSM8K's annotations, <<48/2=24>>, which must not be imitated
CALCULATOR = re.compile(r"<<[^<>]*>>")
UNIT = re.compile(r"\\(?:text|mbox|mathrm)\b")
DOLLARS = re.compile(r"\$([^$]*)\$[.,;]?")
GROUPED = re.compile(r"(?<=\d),(?=\d{3}\b)")
ORDER = re.compile(
    r"\b(?:(?:in|de)creasing|ascending|descending|alphabetical|numerical|that|this|same) order\b|"
    r"\b(?:least|smallest|lowest|largest|greatest|highest) to \b|\brespectively\W*$|\?.*\?",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True)
class Problem:
    """A usable row."""

    question: str
    answer: str
    solution: str = ""


class FinalAnswer(Environment):
    """A reward of 1 when the final answer equals the gold answer, else 0. Metrics: `has_answer`,
    and `unjudged` for a wrong answer that could not be evaluated."""

    exact = True
    overtaxed = Score(0.0, {"has_answer": 1.0, "unjudged": 1.0})
    hashes: ClassVar[bool] = False  # `#### number` counts as well as \boxed{}

    @abstractmethod
    def solution(self, prompt: Prompt) -> str:
        """Return the data set's worked solution, or ""."""

    def score(self, prompt: Prompt, text: str) -> Score:
        return judged(prompt, text, self.hashes)

    def gold(self, prompt: Prompt) -> str:
        """Return the worked solution if it ends in the gold answer, else the answer."""
        answer, solution = prompt.info["answer"], self.solution(prompt)
        return solution if ends_in(solution, answer, self.hashes) else self.state(answer)

    def matching(self, prompt: Prompt, text: str) -> Prompt | None:
        return replace(prompt, info={**prompt.info, "beside": bounded(text)})

    def perturbed(self, prompt: Prompt) -> str:
        return self.state(perturb(prompt.info["answer"]))

    def state(self, answer: str) -> str:
        """Return the shortest response with this final answer."""
        return f"#### {answer}" if self.hashes else f"\\boxed{{{answer}}}"


class Problems(FinalAnswer):
    """Tasks of a data set's rows."""

    default_template: ClassVar[str]

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        system: str | None = None,
        template: str | None = None,
        path: str | None = None,
        test_path: str | None = None,
        subset: str | None = None,
    ) -> None:
        super().__init__(
            name=name, seed=seed, system=system, template=template or self.default_template
        )
        if importlib.util.find_spec("math_verify") is None:
            raise ValueError(
                f"env {name!r}: answers are compared by the package 'math-verify', which is not "
                f"installed"
            )
        self.rows = SplitRows(
            name, problem_of, path=path, test_path=test_path, subset=subset, seed=seed
        )

    def size(self, split: str = "train") -> int | None:
        return len(self.rows[split])

    def prompt(self, index: int, split: str = "train") -> Prompt:
        self.check_task(index, split)
        row_index = self.rows.at(split, index)
        problem = self.rows[split][row_index]
        return self.ask(
            problem.question,
            index,
            split,
            {
                "answer": problem.answer,
                "ordered": ORDER.search(problem.question) is not None,
                "row": row_index,
                "split": split,
            },
        )

    def solution(self, prompt: Prompt) -> str:
        return self.rows[prompt.info["split"]][prompt.info["row"]].solution


def ends_in(solution: str, answer: str, hashes: bool) -> bool:
    """Return whether a worked solution ends in this answer."""
    stated = last_answer(solution) if hashes else boxed_answer(solution)
    return stated == answer or (stated is not None and bool(same_number(answer, stated)))


def judged(prompt: Prompt, text: str, hashes: bool) -> Score:
    """Return 1 when the final answers are equal, else 0. `info["beside"]` is a response that
    replaces the gold answer."""
    answer = _stated_answer(text, hashes)
    other_response = prompt.info.get("beside")
    if other_response is None:
        gold = prompt.info["answer"]
    else:
        gold = _stated_answer(other_response, hashes)
    right = unjudged = False
    if answer is not None and gold is not None:
        try:
            right = equal(gold, answer, prompt.info.get("ordered", False))
        except Unjudged as reason:
            unjudged = True
            log.debug("%s: %r cannot be judged: %s", prompt.id, answer[:80], reason)
    return Score(
        float(right), {"has_answer": float(answer is not None), "unjudged": float(unjudged)}
    )


def _stated_answer(response: str, hashes: bool) -> str | None:
    response = bounded(response)
    return last_answer(response) if hashes else boxed_answer(response)


def problem_of(row: dict[str, Any], where: str) -> Problem | None:
    """Read a row; None for an empty gold answer. ValueError for one without fields."""
    question = next((row[key] for key in QUESTION_FIELDS if key in row), None)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: no text in any of the fields {', '.join(QUESTION_FIELDS)}")
    key = next((key for key in ANSWER_FIELDS if key in row), None)
    if key is None:
        raise ValueError(f"{where}: none of the fields {', '.join(ANSWER_FIELDS)}")
    answer, solution = read_answer(row, key, f"{where}: field {key!r}")
    return Problem(question.strip(), answer, solution) if answer else None


def read_answer(row: dict[str, Any], key: str, where: str) -> tuple[str, str]:
    """Return a row's gold answer and worked solution; "" where there is none. ValueError for
    another value."""
    values = row[key] if isinstance(row[key], list) else [row[key]]
    texts = [as_text(value, where) for value in values]
    whole = ", ".join(texts)
    if key == "solution":
        answer = last_answer(whole, joined=False) or ""
    else:
        answer = ", ".join(filter(None, map(final_answer, texts)))
    is_worked = key == "solution" or "####" in whole
    solution = whole if is_worked else row.get("solution")
    return answer, CALCULATOR.sub("", solution).strip() if isinstance(solution, str) else ""


def final_answer(raw: str) -> str:
    """Return a field's gold answer."""
    if "####" in raw:
        return GROUPED.sub("", raw.rpartition("####")[2].strip())
    if "\\boxed" in raw:
        return boxed_answer(raw, joined=False) or ""
    raw = raw.strip()
    in_dollars = DOLLARS.fullmatch(raw)
    return in_dollars[1].strip() if in_dollars is not None else raw


def perturb(answer: str) -> str:
    """Return a near miss: the last digit before any unit changed, or an x added to text."""
    digits = list(re.finditer(r"\d", UNIT.split(answer)[0])) or list(re.finditer(r"\d", answer))
    if not digits:
        head, brace, tail = answer.rpartition("}")
        return f"{head}x{brace}{tail}"
    i = digits[-1].start()
    other_digit = "8" if answer[i] == "9" else str(int(answer[i]) + 1)
    return answer[:i] + other_digit + answer[i + 1 :]


def as_text(value: Any, where: str) -> str:
    """Return an answer field as text."""
    if isinstance(value, list):
        return ", ".join(as_text(item, where) for item in value)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if value is None or isinstance(value, (bool, dict)):
        raise ValueError(f"{where} must be a string or a number, got {type(value).__name__}")
    return str(value)
