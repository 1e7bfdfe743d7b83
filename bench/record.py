"""How a measurement is taken, shown and kept.

A ratio counts only when both sides ran in turns in one process tree on one machine: `interleave` runs A B A B ...,
so that a slow minute of the machine hits both. The speed of a side is the median of its rounds, the ratio is the
median of the rounds' own ratios, and the spread is their smallest and largest. What a row must reach stands in the
row; a command ends with 1 when one does not.
"""
from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import lowroll

BASELINES = Path(__file__).parent / "baselines"
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Row:
    """One comparison. `ratio` is how many times better ours is than the peer; `spread` its range over the rounds."""

    name: str
    unit: str
    ours: float
    peer: float
    ratio: float
    spread: tuple[float, float]
    must: float | None = None
    aim: float | None = None

    @property
    def met(self) -> bool:
        return self.must is None or self.ratio >= self.must


def interleave(contestants: Mapping[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every contestant in every round, run in turns. Warm them up before."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
            print(f"round {i + 1} of {rounds}, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    return seconds


def speed_row(name: str, amount: float, unit: str, ours: list[float], peer: list[float],
              must: float | None = None) -> Row:
    """The row of two contestants' seconds for the same amount of work."""
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=True)]
    return Row(name, unit, amount / statistics.median(ours), amount / statistics.median(peer),
               statistics.median(ratios), (min(ratios), max(ratios)), must)


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, memory, threads, versions, and how busy the machine was."""
    return {"cpu": _first("/proc/cpuinfo", "model name") or platform.processor(), "cores": os.cpu_count(),
            "memory": _first("/proc/meminfo", "MemTotal"), "system": f"{platform.system()} {platform.machine()}",
            "load": os.getloadavg()[0], "threads": torch.get_num_threads(), "python": platform.python_version(),
            "torch": torch.__version__, "transformers": version("transformers"), "lowroll": lowroll.__version__}


def _first(path: str, key: str) -> str | None:
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(key)), None)


def write(name: str, rows: list[Row], folder: Path, **settings: Any) -> Path:
    """Store the rows with machine, date and settings as `folder/name.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {"date": date.today().isoformat(), "machine": machine(), "settings": settings,
              "rows": [asdict(row) for row in rows]}
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def show(title: str, rows: list[Row]) -> bool:
    """Print the rows as a table. Returns whether every row reached what it must."""
    table = Table(title=title)
    for column in ("", "unit", "ours", "peer", "ratio", "spread", "must"):
        table.add_column(column, justify="left" if column in ("", "unit") else "right")
    for row in rows:
        low, high = row.spread
        must = "" if row.must is None else f"{row.must:g} {'met' if row.met else 'NOT met'}"
        table.add_row(row.name, row.unit, f"{row.ours:,.0f}", f"{row.peer:,.0f}", f"{row.ratio:.2f}x",
                      f"{low:.2f}-{high:.2f}", must)
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    return all(row.met for row in rows)
