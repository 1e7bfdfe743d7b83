"""LiveCodeBench: a response's last fenced block runs on public and private cases in the sandbox.

Private cases may have megabytes, so scoring workers read them from the file.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lowroll.envs.base import bounded
from lowroll.envs.data.files import Located, parse_object
from lowroll.envs.sets.held_out import HeldOut, HeldOutTask
from lowroll.envs.sets.livecodebench_tests import cases
from lowroll.envs.sets.rows import column, text_of
from lowroll.types import Prompt, Score

if TYPE_CHECKING:
    from lowroll.envs.sandbox import Case

CPU_SECONDS = 6.0  # CPU time of one case
TOTAL_SECONDS = 100.0  # of a program on all cases, within `score.time_limit`
PLACE = " place"  # key of a row for its byte offset in the file
STDIN = (
    "Write a Python program that solves the problem. It reads the input from standard input and "
    "writes the answer to standard output. Enclose the whole program in one block:\n"
    "```python\n# your program\n```"
)
STARTER = (
    "Solve the problem in Python by completing this code. Enclose the whole program in one block:\n"
    "```python\n{starter}\n```"
)


class Programs(HeldOut):
    """Reward 1 when the program passes every test case, else 0."""

    def located(self) -> Iterator[Located]:
        """Yield the files' rows with their places; ValueError without a file."""
        paths = sorted(glob.glob(self.test_path or ""))
        if not all(path.endswith(".jsonl") for path in paths or [""]):
            raise ValueError(
                f"env {self.name!r}: needs a file: fetch the .jsonl files of {self.row.path} and "
                f"name them, such as --data {self.row.name}='test*.jsonl' (the hub's own loader of "
                "this set is code, which lowroll does not run)"
            )
        for path in paths:
            with open(path, "rb") as file:
                offset = 0
                for number, line in enumerate(file, 1):
                    if line.strip():
                        where = f"{path}:{number}"
                        yield where, parse_object(line, where) | {PLACE: [path, offset]}
                    offset += len(line)

    def convert(self, row: dict[str, Any], where: str) -> HeldOutTask | None:
        question = text_of(row, self.row, "question", where)
        starter = row.get(column(row, self.row, "starter", where)) or ""
        column(row, self.row, "private", where)
        instructions = STARTER.replace("{starter}", starter.rstrip()) if starter.strip() else STDIN
        return HeldOutTask(f"{question}\n\n{instructions}", {"place": row[PLACE]})

    def score(self, prompt: Prompt, text: str) -> Score:
        from lowroll.envs.sandbox import SandboxLimits, last_block, run_cases

        source = last_block(bounded(text))
        if source is None:
            return Score(0.0, {"has_answer": 0.0, "passed": 0.0})
        limits = SandboxLimits(
            seconds=CPU_SECONDS, wall_seconds=1.5 * CPU_SECONDS, total_seconds=TOTAL_SECONDS
        )
        verdict = run_cases(source, self._cases(prompt), limits, stop_at_failure=True)
        return Score(float(verdict.all_passed), {"has_answer": 1.0, "passed": verdict.share})

    def gold(self, prompt: Prompt) -> str:
        raise NotImplementedError

    def perturbed(self, prompt: Prompt) -> str:
        raise NotImplementedError

    def _cases(self, prompt: Prompt) -> list[Case]:
        path, offset = prompt.info["place"]
        where = f"{path}, the row at byte {offset}"
        with open(path, "rb") as file:
            file.seek(offset)
            row = parse_object(file.readline(), where)
        try:
            test_cases = cases(self._of(row, "public")) + cases(self._of(row, "private"))
            name = json.loads(self._of(row, "metadata") or "{}").get("func_name")
            if not test_cases:
                raise ValueError("no test cases")
            return [_case(test_case, name) for test_case in test_cases]
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None

    def _of(self, row: dict[str, Any], role: str) -> str:
        (key,) = self.row.columns[role]
        return row.get(key) or ""


def _case(test_case: dict[str, Any], function_name: str | None) -> Case:
    from lowroll.envs.sandbox import Case

    if test_case["testtype"] == "stdin":
        return Case(test_case["input"], test_case["output"])
    lines = test_case["input"].splitlines()
    arguments = [json.loads(line) for line in lines if line.strip()]
    return Case(arguments, json.loads(test_case["output"]), function_name)
