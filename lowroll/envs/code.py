"""code: programs in Python, scored by hidden tests in a sandbox (docs/programs.md)."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

from lowroll.envs.base import Environment, bounded
from lowroll.envs.rows import SplitRows
from lowroll.envs.sandbox import (
    PRELUDE,
    Case,
    CaseResults,
    SandboxLimits,
    cases_of,
    isolation,
    last_block,
    run_cases,
)
from lowroll.types import Prompt, Score

QUESTION_FIELDS = ("question", "problem", "prompt", "question_content", "description")
SOLUTION_FIELDS = ("solution", "solutions", "canonical_solution")
TEMPLATE = (
    "{text}\nWrite a program in Python 3, with its standard library only. Think first, and put the "
    "whole program into one ```python block at the end."
)
CALLED = "It is called as the function {name}{where}."
READS = "It reads standard input and writes standard output."
KNOWN = {field.name: field.default for field in fields(SandboxLimits)}


@dataclass(frozen=True)
class CodeTask:
    """A usable row."""

    question: str
    cases: tuple[Case, ...]
    solution: str = ""


class Code(Environment):
    """Programs scored by hidden tests. docs/programs.md lists the metrics."""

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        system: str | None = None,
        template: str = TEMPLATE,
        path: str | None = None,
        test_path: str | None = None,
        subset: str | None = None,
        split: str = "train",
        test_split: str | None = None,
        held_out: float = 0.0,
        reward: str = "share",
        max_cases: int | None = None,
        limits: dict[str, float] | None = None,
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        if reward not in ("share", "all"):
            raise ValueError(f"env {name!r}: reward must be 'share' or 'all', got {reward!r}")
        if max_cases is not None and max_cases < 1:
            raise ValueError(f"env {name!r}: max_cases must be at least 1, got {max_cases}")
        self.exact = reward == "all"
        self.max_cases, self.limits = max_cases, _parse_limits(name, limits or {})
        self.rows = SplitRows(
            name,
            task_of,
            path=path,
            test_path=test_path,
            subset=subset,
            split=split,
            test_split=test_split,
            held_out=held_out,
            seed=seed,
        )
        isolation.found()

    def size(self, split: str = "train") -> int | None:
        return len(self.rows[split])

    def prompt(self, index: int, split: str = "train") -> Prompt:
        self.check_task(index, split)
        row_index = self.rows.at(split, index)
        task = self.rows[split][row_index]
        tests = [[case.input, case.output, case.fn_name] for case in task.cases[: self.max_cases]]
        return self.ask(
            task.question, index, split, {"tests": tests, "row": row_index, "split": split}
        )

    def score(self, prompt: Prompt, text: str) -> Score:
        """Score by the passed tests. SandboxError when the sandbox failed."""
        program = last_block(bounded(text))
        if program is None or not program.strip():
            return Score(0.0, _metrics(None))
        cases = [Case(*test) for test in prompt.info["tests"]]
        prelude = PRELUDE if cases[0].fn_name else ""
        verdict = run_cases(prelude + program, cases, self.limits, stop_at_failure=self.exact)
        reward = float(verdict.all_passed) if self.exact else verdict.share
        return Score(reward, _metrics(verdict))

    def gold(self, prompt: Prompt) -> str:
        return f"```python\n{self._solution(prompt)}\n```"

    def perturbed(self, prompt: Prompt) -> str:
        name = prompt.info["tests"][0][2]
        solution = self._solution(prompt)
        owner = "Solution." if "class Solution" in solution else ""
        override = f"{owner}{name} = lambda *given: ['another']" if name else "print('and more')"
        return f"```python\n{solution}\n{override}\n```"

    def _solution(self, prompt: Prompt) -> str:
        solution = self.rows[prompt.info["split"]][prompt.info["row"]].solution
        if not solution:
            raise NotImplementedError("this row has no solution")
        return solution


def _parse_limits(name: str, given: dict[str, float]) -> SandboxLimits:
    for key in given:
        if key not in KNOWN:
            raise ValueError(f"env {name!r}: limits has no {key!r}; known: {', '.join(KNOWN)}")
    try:
        return SandboxLimits(**given)  # type: ignore[arg-type]
    except ValueError as error:
        raise ValueError(f"env {name!r}: {error}") from None


def _metrics(verdict: CaseResults | None) -> dict[str, float]:
    if verdict is None:
        zeros = dict.fromkeys(("passed", "all_passed", "timeouts", "crashes", "compile_error"), 0.0)
        return {**zeros, "has_program": 0.0}
    count = len(verdict.results)
    return {
        "passed": verdict.share,
        "all_passed": float(verdict.all_passed),
        "timeouts": verdict.count("timeout") / count,
        "crashes": (verdict.count("crash") + verdict.count("output")) / count,
        "compile_error": float(verdict.count("compile") > 0),
        "has_program": 1.0,
    }


def task_of(row: dict[str, Any], where: str) -> CodeTask:
    """Read a row. ValueError for one without a task or tests."""
    question = next((row[key] for key in QUESTION_FIELDS if row.get(key)), None)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(
            f"{where}: no text in any of the fields {', '.join(QUESTION_FIELDS)} (there: "
            f"{', '.join(map(str, row))})"
        )
    cases = tuple(cases_of(row, where))
    names = {case.fn_name for case in cases}
    if len(names) > 1:
        raise ValueError(f"{where}: its tests are of several kinds: {sorted(map(str, names))}")
    name = names.pop()
    starter = row.get("starter_code")
    paragraphs = [question.strip()]
    if isinstance(starter, str) and starter.strip():
        paragraphs.append(f"Begin with\n```python\n{starter.strip()}\n```")
    if name is None:
        paragraphs.append(READS)
    else:
        class_hint = " of the class Solution" if "class Solution" in str(starter) else ""
        paragraphs.append(CALLED.format(name=name, where=class_hint))
    return CodeTask("\n".join(paragraphs), cases, _solution_of(row))


def _solution_of(row: dict[str, Any]) -> str:
    value = next((row[key] for key in SOLUTION_FIELDS if row.get(key)), "")
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, list):
        value = value[0] if value else ""
    if not isinstance(value, str):
        return ""
    return (last_block(value) or value).strip()
