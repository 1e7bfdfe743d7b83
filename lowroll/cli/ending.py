"""What a command of a run says at its end."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lowroll.runs.attempt import RunResult


def conclude(result: RunResult) -> int:
    """Say where the trained weights are; returns the exit code."""
    if result.signal:
        return 128 + result.signal
    if result.ended:
        print(f"the run ended before its last step: {result.ended}")
    print(f"trained weights: {result.folder / 'final'}\nplots: lowroll report {result.folder}")
    return 0
