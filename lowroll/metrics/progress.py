"""Progress bars for phases. Silent without a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)


@contextmanager
def phases() -> Iterator[Callable[[str, int, int], None]]:
    """Show one bar a phase: `with phases() as on_phase:` then `on_phase(name, done, total)`."""
    bars: dict[str, TaskID] = {}
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    ) as view:

        def on_phase(name: str, done: int, total: int) -> None:
            if name not in bars:
                bars[name] = view.add_task(name, total=total)
            view.update(bars[name], completed=done, total=total)

        yield on_phase
