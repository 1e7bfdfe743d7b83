"""The last lines that a command of a run prints."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowroll.runs.attempt import RunResult


def report_command(folder: Path) -> str:
    return f"lowroll report {shlex.quote(str(folder))}"


def conclude(result: RunResult) -> int:
    """Print where the trained weights are; return the exit code."""
    if result.signal:
        return 128 + result.signal
    if result.ended:
        print(f"the run ended before its last step: {result.ended}")
    print(f"trained weights: {result.folder / 'final'}\nplots: {report_command(result.folder)}")
    return 0
