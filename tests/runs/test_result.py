"""What a finished run looks like in a notebook: its result in three lines, however long it was."""

from __future__ import annotations

import signal
from pathlib import Path

from lowroll.runs.session import RunResult


def test_a_result_is_three_short_lines_whatever_the_run_recorded() -> None:
    records = [
        {
            "step": step,
            "reward/mean": 0.5,
            "optim/grad_norm": None,
            **{f"perf/{i}": 1.0 for i in range(90)},
        }
        for step in range(1, 2001)
    ]
    records[-1]["eval/gsm8k/reward"] = 0.25
    text = repr(RunResult(Path("outputs/my run"), records))
    first, last, more = text.splitlines()
    assert first == "RunResult('outputs/my run', step 2000, finished)"
    assert last == "  last step: reward/mean 0.5, eval/gsm8k/reward 0.25"
    assert ".records (2000)" in more and more.endswith("lowroll report 'outputs/my run'")
    assert max(map(len, text.splitlines())) <= 100


def test_a_result_says_how_a_run_ended() -> None:
    assert "stopped by signal 2)" in repr(RunResult(Path("out"), [], signal=signal.SIGINT))
    early = repr(RunResult(Path("out"), [{"step": 3, "sft/loss": 1.5}], ended="nothing to learn"))
    assert "step 3, nothing to learn)" in early and "sft/loss 1.5" in early
    assert "no step has been recorded" in repr(RunResult(Path("out"), []))
