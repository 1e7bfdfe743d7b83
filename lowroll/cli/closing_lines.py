"""The last lines that a command of a run prints."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowroll.runs.session import RunResult


def conclude(result: RunResult) -> int:
    """Print where the trained weights are; return the exit code."""
    if result.signal:
        return 128 + result.signal
    if result.ended:
        print(f"the run ended before its last step: {result.ended}")
    plots = f"lowroll report {shlex.quote(str(result.folder))}"
    print(f"trained weights: {result.folder / 'final'}\nplots: {plots}")
    return 0
