"""How a measurement is taken, shown and kept.

A ratio counts only when both sides ran in turns in one process tree on one machine: `interleave`
runs A B A B ..., so that a slow minute of the machine hits both. The speed of a side is the median
of its rounds, the ratio is the median of the rounds' own ratios, and the spread is their smallest
and largest. What a row must reach stands in the row; a command ends with 1 when one does not.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import torch
from rich.console import Console
from rich.table import Table

import lowroll
from lowroll.engine.native import pick_device

BASELINES = Path(__file__).parent / "baselines"
RESULTS = Path(__file__).parent / "results"
KIND = ("gpu", "driver", "cpu", "torch", "lowroll")  # what rows of one file have in common


Goal = Literal["ratio at least", "ratio at most", "ours at least", "ours at most"]


@dataclass(frozen=True)
class Row:
    """One measurement, with the peer's when there is one.

    ratio: how many times better ours is than the peer, unless the name says otherwise; spread: its
    range over the rounds. goal: what `must` and `aim` are compared with. note: what a reader of the
    numbers must know, such as why the peer was not run; why a row misses its target stands in
    `bench.targets`. against: the peer's name, where there is a choice of peers.
    """

    name: str
    unit: str
    ours: float | None
    peer: float | None = None
    ratio: float | None = None
    spread: tuple[float, float] | None = None
    must: float | None = None
    aim: float | None = None
    goal: Goal = "ratio at least"
    note: str = ""
    against: str = ""

    @property
    def value(self) -> float | None:
        """What is compared with `must` and `aim`."""
        return self.ratio if self.goal.startswith("ratio") else self.ours

    def reaches(self, bound: float | None) -> bool:
        """Whether the value is on the right side of a bound; no bound is reached, and no value
        reaches none."""
        if bound is None:
            return True
        return self.value is not None and (
            self.value >= bound if self.goal.endswith("least") else self.value <= bound
        )

    @property
    def met(self) -> bool:
        return self.reaches(self.must)

    @property
    def verdict(self) -> str:
        """`met`, `missed` or `not run` of a row that must reach something; empty for others."""
        return (
            ""
            if self.must is None
            else "not run"
            if self.value is None
            else "met"
            if self.met
            else "missed"
        )


def interleave(
    contestants: Mapping[str, Callable[[], object]], rounds: int
) -> dict[str, list[float]]:
    """Seconds of every contestant in every round, run in turns. Warm them up before."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for i in range(rounds):
        for name, run in contestants.items():
            began = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - began)
            print(f"round {i + 1} of {rounds}, {name}: {seconds[name][-1]:.2f} s", file=sys.stderr)
    return seconds


def speed_row(
    name: str,
    amount: float,
    unit: str,
    ours: list[float],
    peer: list[float],
    must: float | None = None,
    aim: float | None = None,
) -> Row:
    """The row of two contestants' seconds for the same amount of work."""
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=True)]
    return Row(
        name,
        unit,
        amount / statistics.median(ours),
        amount / statistics.median(peer),
        statistics.median(ratios),
        (min(ratios), max(ratios)),
        must,
        aim,
    )


def machine() -> dict[str, Any]:
    """What the numbers depend on: processor, GPU, memory, threads, versions, and how busy the
    machine was."""
    about = {
        "cpu": _first("/proc/cpuinfo", "model name") or platform.processor(),
        "cores": os.cpu_count(),
        "memory": _first("/proc/meminfo", "MemTotal"),
        "system": f"{platform.system()} {platform.machine()}",
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "lowroll": lowroll.__version__,
    }
    if torch.cuda.is_available():
        line = next(iter(_lines("/proc/driver/nvidia/version")), "")
        driver = next(iter(re.findall(r"\d+\.\d+\.\d+", line)), "unknown")
        about |= {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}
    return about


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _first(path: str, key: str) -> str | None:
    return next(
        (line.split(":", 1)[1].strip() for line in _lines(path) if line.startswith(key)), None
    )


def settle(
    parser: argparse.ArgumentParser, device: str | torch.device, out: Path | None
) -> tuple[torch.device, Path]:
    """Where a command of `make bench-gpu` runs and writes: by default, into the baselines, which
    are a GPU's.

    The parser ends the command with one line when there is no such device, or a CPU would write
    there.
    """
    try:
        place = pick_device(device)
    except ValueError as error:
        parser.error(str(error))
    if out is None and place.type != "cuda":
        parser.error(
            f"--out: {BASELINES} holds the rows of a GPU and this run is on {place.type}; name "
            f"another folder"
        )
    return place, out or BASELINES


def write(name: str, rows: list[Row], folder: Path, **settings: Any) -> Path:
    """Store the rows with machine, date and settings as `folder/name.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    record = {
        "date": date.today().isoformat(),
        "machine": machine(),
        "settings": settings,
        "rows": [asdict(row) for row in rows],
    }
    path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def merge(name: str, rows: list[Row], folder: Path, **settings: Any) -> Path:
    """`write`, keeping what another part of the measurement stored: a row takes the place of one of
    its name.

    Rows of another kind of machine, or of other versions, are not kept: a file is one machine's.
    Parts may run at the same time, one on each GPU; the order is that of the names, with numbers by
    size.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        path, here, mine = folder / f"{name}.json", machine(), {row.name for row in rows}
        before = (
            json.loads(path.read_text())
            if path.is_file()
            else {"machine": here, "settings": {}, "rows": []}
        )
        if any(before["machine"].get(key) != here.get(key) for key in KIND):
            print(f"{path}: rows of another machine or version are left out", file=sys.stderr)
            before = {"settings": {}, "rows": []}
        kept = [read_row(row) for row in before["rows"] if row["name"] not in mine]
        ordered = sorted(
            kept + rows,
            key=lambda row: [
                (not part.isdigit(), int(part) if part.isdigit() else part)
                for part in re.findall(r"\d+|\D+", row.name)
            ],
        )
        return write(name, ordered, folder, **before["settings"] | settings)


def read_row(stored: Mapping[str, Any]) -> Row:
    """A row as `write` stored it."""
    spread = stored["spread"]
    return Row(**{**stored, "spread": None if spread is None else tuple(spread)})


def show(title: str, rows: list[Row]) -> bool:
    """Print the rows as a table. Returns whether every row reached what it must."""
    table = Table(title=title)
    for column in ("", "unit", "ours", "peer", "ratio", "spread", "must"):
        table.add_column(column, justify="left" if column in ("", "unit") else "right")
    for row in rows:
        spread = "" if row.spread is None else f"{row.spread[0]:.2f}-{row.spread[1]:.2f}"
        must = (
            "" if row.must is None else f"{row.must:g} {row.verdict.replace('missed', 'NOT met')}"
        )
        table.add_row(
            row.name,
            row.unit,
            number(row.ours),
            number(row.peer),
            "" if row.ratio is None else f"{row.ratio:.2f}x",
            spread,
            must,
        )
    console = Console()
    console.width = max(console.width, 110)
    console.print(table)
    for row in rows:
        if row.against:
            console.print(f"{row.name}: against {row.against}", highlight=False)
        if row.note:
            console.print(f"{row.name}: {row.note}", highlight=False)
    return all(row.met for row in rows)


def number(value: float | None) -> str:
    """A measured value for people; a dash for one that is missing."""
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
