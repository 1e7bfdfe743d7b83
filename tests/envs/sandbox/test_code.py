"""The environment `code`, the shapes of tests that it reads, and what equal outputs are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lowroll.envs import make
from lowroll.envs.sandbox import (
    Case,
    SandboxError,
    SandboxMissing,
    cases_of,
    isolation,
    last_block,
    run,
    run_cases,
)
from lowroll.envs.sandbox.cases import SandboxLimits, same_text, same_value
from lowroll.envs.scorer_pool import ScorerPool
from lowroll.types import Score, ScoreError
from tests.fixtures.sandbox import missing

isolated = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a sandbox")
ADD = "a, b = map(int, input().split())\nprint(a + b)"
ROWS: list[dict[str, Any]] = [
    {  # TACO's and APPS's standard input
        "question": "Add two numbers.",
        "input_output": json.dumps({"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}),
        "solutions": json.dumps([ADD]),
    },
    {  # their functions
        "question": "Add two numbers.",
        "input_output": {"fn_name": "add", "inputs": [[1, 2], [3, 4]], "outputs": [[3], [7]]},
        "solutions": ["def add(a, b):\n    return a + b"],
    },
    {  # LiveCodeBench's functions
        "question_content": "Double a list.",
        "starter_code": "class Solution:\n    def double(self, x: List[int]) -> List[int]:",
        "public_test_cases": json.dumps(
            [{"input": "[1, 2]", "output": "[2, 4]", "testtype": "functional"}]
        ),
        "metadata": json.dumps({"func_name": "double"}),
        "solution": (
            "class Solution:\n    def double(self, x: List[int]):\n        return [2 * i for i in x]"
        ),
    },
    {  # open-r1's
        "problem": "Add two numbers.",
        "verification_info": {
            "language": "python",
            "test_cases": [{"input": "1 2", "output": "3", "type": "stdin_stdout"}],
        },
        "solution": f"Like this:\n```python\n{ADD}\n```",
    },
]


@pytest.fixture
def path(tmp_path: Path) -> str:
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, ROWS)))
    return str(file)


@isolated
@pytest.mark.parametrize("reward", ["share", "all"])
def test_gold_programs_are_accepted_and_perturbed_ones_are_not(path: str, reward: str) -> None:
    env = make("code", args={"path": path, "reward": reward})
    found = env.validate(4)
    assert found.ok and found.count == 4, found


@isolated
def test_the_pool_scores_programs_within_its_own_limits(path: str) -> None:
    env = make("code", args={"test_path": path})
    prompt = env.prompt(0, "test")
    half = "```python\nprint(3)\n```"
    texts = [env.gold(prompt), half, "no program", "```python\nprint(\n```", f"{half}\n```\n\n```"]
    with ScorerPool({"code": ("code", {"test_path": path}, 0)}, num_workers=1) as pool:
        scores = pool.score([(prompt, text) for text in texts])
    rewards = [score.reward for score in scores if isinstance(score, Score)]
    assert rewards == [1.0, 0.5, 0.0, 0.0, 0.0]
    last = scores[3]
    assert isinstance(last, Score) and last.metrics == {
        "passed": 0.0,
        "all_passed": 0.0,
        "timeouts": 0.0,
        "crashes": 0.0,
        "compile_error": 1.0,
        "has_program": 1.0,
    }


@isolated
def test_a_sandbox_that_fails_is_an_error_and_no_reward(path: str) -> None:
    broken = run.Isolation("broken", lambda size: ["/bin/sh", "-c", "echo no room >&2; exit 7"])
    with pytest.raises(SandboxError, match=r"broken: no room \(exit status 7\)"):
        run.run_in(broken, ADD, [Case("1 2", "3")], SandboxLimits())
    gone = run.Isolation("gone", lambda size: ["/no/such/program"])
    with pytest.raises(SandboxError, match="gone: it cannot be started"):
        run.run_in(gone, ADD, [Case("1 2", "3")], SandboxLimits())
    dies = run.Isolation("dies", lambda size: ["/bin/sh", "-c", "echo '{\"ready\": true}'; read x"])
    with pytest.raises(SandboxError, match="dies: it ended under the program"):
        run.run_in(dies, ADD, [Case("1 2", "3")], SandboxLimits())
    with pytest.raises(ValueError, match="there are none"):
        run_cases(ADD, [])


def test_without_isolation_nothing_runs_and_the_error_says_what_helps(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = run.Isolation("namespaces", lambda size: ["/bin/sh", "-c", "echo refused >&2; exit 1"])
    monkeypatch.setattr(isolation, "NAMESPACES", broken)
    settings = {"/proc/sys/kernel/unprivileged_userns_clone": "0"}
    monkeypatch.setattr(isolation, "_reads", settings.get)
    isolation.found.cache_clear()
    try:
        with pytest.raises(SandboxMissing, match="none is run: namespaces: refused.*sysctl kernel"):
            make("code", args={"path": path})
        settings.clear()
        settings["/proc/sys/kernel/apparmor_restrict_unprivileged_userns"] = "1"
        with pytest.raises(
            SandboxMissing, match="sysctl kernel.apparmor_restrict_unprivileged_userns=0"
        ):
            run_cases(ADD, [Case("1 2", "3")])
    finally:
        isolation.found.cache_clear()


@isolated
def test_a_worker_turns_a_broken_sandbox_into_an_error(path: str, tmp_path: Path) -> None:
    own = tmp_path / "own.py"
    own.write_text(
        "from lowroll.envs.code import Code\n"
        "from lowroll.envs import code\n"
        "from lowroll.envs.sandbox import SandboxError\n"
        "def broken(*given, **more): raise SandboxError('namespaces: no room')\n"
        "class Own(Code):\n"
        "    def score(self, prompt, text):\n"
        "        code.run_cases = broken\n"
        "        return super().score(prompt, text)\n"
    )
    prompt = make("code", name="own", args={"path": path}).prompt(0)
    with ScorerPool({"own": (str(own), {"path": path}, 0)}, num_workers=1) as pool:
        (error,) = pool.score([(prompt, "```python\nprint(3)\n```")])
    assert isinstance(error, ScoreError) and "no room" in error.message


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({}, "no tests in any of the fields tests, "),
        ({"tests": "["}, "field 'tests': not JSON"),
        ({"tests": {"inputs": [1], "outputs": []}}, "lists of one length"),
        ({"tests": 3}, "must be a list of {input, output}, or {inputs, outputs}, got int"),
        ({"tests": [{"input": 1}]}, r"field 'tests'\[0\]: must have 'input' and 'output'"),
        ({"tests": [{"input": "1", "output": "1", "type": "functional"}]}, "needs the function's"),
        ({"tests": [{"input": 1, "output": 1, "fn_name": "f"}]}, "must be a list"),
    ],
)
def test_tests_that_are_none_are_named(row: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^rows:7: .*{message}"):
        cases_of(row, "rows:7")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"reward": "some"}, "reward must be 'share' or 'all'"),
        ({"max_cases": 0}, "max_cases must be at least 1"),
        ({"limits": {"memory": 3}}, "limits has no 'memory'; known: seconds"),
        ({"limits": {"memory_mb": -3}}, "memory_mb must be a positive number"),
    ],
)
def test_bad_arguments_are_named(path: str, args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make("code", args={"path": path, **args})


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("none", None),
        ("```python\na\n```", "a\n"),
        ("```\na\n```\nand\n```py\nb\n```\n", "b\n"),
        ("````md\n```\na\n```\n````", "```\na\n```\n"),
        ("```python\na", None),
        ("  ```python\n  a\n  ```", "  a\n"),
        ("~~~\na\n~~~", "a\n"),
    ],
)
def test_the_last_closed_block_is_the_program(text: str, program: str | None) -> None:
    assert last_block(text) == program


@pytest.mark.parametrize(
    ("gold", "output", "equal"),
    [
        ("7", "7\n", True),
        ("7\n8", " 7 \r\n8\n\n", True),
        ("7 8", "7\n8", False),
        ("0.5", "0.50", True),
        ("1e3 x", "1000.0 x", True),
        ("1e3 x", "1000 x", False),
        ("1.0", "1", False),
        ("0011", "11", False),
        ("00000000", "0", False),
        ("1000", "1_000", False),
        ("1_000.0", "1000.0", False),
        ("1", "True", False),
        ("1", "+1", False),
        ("12", "１２", False),
        ("-0.50", "-.5", True),
        ("2.5e-1", "0.25", True),
        ("2.5", "2.5000001", False),
        ("inf", "Infinity", False),
        ("1e9999999999", "1e9999999998", False),
        ("1.0e1", "1.0E+1", True),
        ("7", "", False),
        ("yes", "Yes", False),
        ("nan", "nan", True),
        ("1", "1" + "0" * 10**6, False),
    ],
)
def test_outputs_are_equal_by_lines_words_and_numbers(gold: str, output: str, equal: bool) -> None:
    assert same_text(gold, output) is equal


@pytest.mark.parametrize(
    ("gold", "value", "equal"),
    [
        ([1, [2]], [1, [2]], True),
        ([1, 2], [2, 1], False),
        (0.3, 0.1 + 0.2, True),
        (10**17, 10**17 + 1, False),
        (1, 10**400, False),
        (0.5, 10**400, False),
        ({"a": 1.0}, {"a": 1}, True),
        ({"a": 1}, {"b": 1}, False),
        ("1", 1, False),
        (None, None, True),
        ("ab", ["a", "b"], False),
        (True, True, True),
        (1, True, False),
        (True, 1, False),
        (0.0, False, False),
        ([1, 0], [True, False], False),
    ],
)
def test_results_are_equal_as_data(gold: Any, value: Any, equal: bool) -> None:
    assert same_value(gold, value) is equal
