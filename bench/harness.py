"""The harness of all benchmarks: options, turns and clocks, rows, and how rows are shown and stored.

The speed of a side is the median of its rounds, a ratio the median of the rounds' own ratios, and the
spread their smallest and largest (docs/benchmarks.md).
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from rich.console import Console
from rich.table import Table

import lowroll
from lowroll.model.device import pick_device

BASELINES = Path(__file__).parent / "baselines"
RESULTS = Path(__file__).parent / "results"
KIND = ("gpu", "driver", "cpu", "torch", "lowroll")  # what rows of one file have in common
T = TypeVar("T")

Goal = Literal["ratio at least", "ratio at most", "ours at least", "ours at most"]


@dataclass(frozen=True)
class Row:
    """One measurement, with the peer's when there is one.

    ratio: how many times better ours is than the peer, unless the name says otherwise; spread: its
    range over the rounds. goal: what `must` and `aim` are compared with. against: the peer's name,
    where there is a choice of peers. Why a row misses its target stands in `bench.targets`.
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
    date: str = ""  # of the measurement, put in when it is stored

    @property
    def value(self) -> float | None:
        return self.ratio if self.goal.startswith("ratio") else self.ours

    def reaches(self, bound: float | None) -> bool:
        """Tell if the value is on the right side of a bound; a missing value reaches no bound."""
        if bound is None or self.value is None:
            return bound is None
        return self.value >= bound if self.goal.endswith("least") else self.value <= bound

    @property
    def met(self) -> bool:
        return self.reaches(self.must)

    @property
    def verdict(self) -> str:
        """Return `met`, `missed` or `not run` for a row that must reach something, else nothing."""
        if self.must is None:
            return ""
        return "not run" if self.value is None else "met" if self.met else "missed"


def interleave(
    contestants: Mapping[str, Callable[[], object]], rounds: int, warm: int = 0
) -> dict[str, list[float]]:
    """Run contestants in turns; return the seconds of each in every round after the `warm` first."""

    def seconds(run: Callable[[], object]) -> float:
        began = time.perf_counter()
        run()
        return time.perf_counter() - began

    return in_turns(
        {name: partial(seconds, run) for name, run in contestants.items()}, rounds, warm
    )


def in_turns(
    sides: Mapping[str, Callable[[], T]], rounds: int, warm: int = 0, title: str = ""
) -> dict[str, list[T]]:
    """Run sides in turns; return what each said in every round after the `warm` first."""
    told: dict[str, list[T]] = {name: [] for name in sides}
    for i in range(warm + rounds):
        for name, run in sides.items():
            told[name].append(run())
            say(f"{title}round {i + 1} of {warm + rounds}, {name}: {told[name][-1]}")
    return {name: found[warm:] for name, found in told.items()}


def speed_row(
    name: str,
    amount: float,
    unit: str,
    ours: Sequence[float],
    peer: Sequence[float] | None,
    must: float | None = None,
    aim: float | None = None,
) -> Row:
    """Return the row of the seconds of two sides for the same work, or of ours alone."""
    speed = amount / statistics.median(ours)
    if peer is None:
        return Row(name, unit, speed, must=must, aim=aim)
    ratios = [theirs / mine for mine, theirs in zip(ours, peer, strict=True)]
    extent = min(ratios), max(ratios)
    other = amount / statistics.median(peer)
    return Row(name, unit, speed, other, statistics.median(ratios), extent, must, aim)


def less_row(name: str, unit: str, ours: float, peer: float | None, **about: Any) -> Row:
    """Return a row of which less is better."""
    return Row(name, unit, ours, peer, None if peer is None else peer / ours, **about)


def clock_rows(
    title: str,
    tokens: int,
    turns: Mapping[str, Sequence[Mapping[str, float]]],
    note: str = "",
    **bounds: float | None,
) -> list[Row]:
    """Return the rows of what `bench.worker.timed` said of ours and of the peer, where there is one:
    by the clock, which has bounds, and by the processor."""
    rows = []
    for what, unit, key, own in (
        ("clock", "tokens/s", "seconds", bounds),
        ("processor", "tokens/s of a core", "cpu", {}),
    ):
        ours, peer = ([turn[key] for turn in turns.get(side, ())] for side in ("ours", "peer"))
        row = speed_row(f"{title}: {what}", tokens, unit, ours, peer or None, **own)
        rows.append(replace(row, note=note))
    return rows


# -- clocks and processes --------------------------------------------------------------------------


def synchronize(device: torch.device) -> None:
    """Wait for the device; at once on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call; the device is waited for before and after it."""
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - began


def release() -> None:
    """Give memory that nothing holds any more back to the device."""
    gc.collect()  # an engine and its scheduler hold each other
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def released() -> Iterator[None]:
    """Release memory afterwards, for another process or another engine."""
    try:
        yield
    finally:
        release()


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


@contextmanager
def running(
    module: str, *words: object, env: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[str]]:
    """Run a command with pipes to its input and output; kill it at the end."""
    command = [sys.executable, "-m", module, *map(str, words)]
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env)
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60.0)


# -- options ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OneOf:
    """An option that takes one of some words."""

    choices: Iterable[str]
    default: str | None = None


@dataclass(frozen=True)
class SomeOf:
    """An option that takes several of some words, by default all."""

    choices: Iterable[str]
    default: Sequence[str] | None = None


class _Joined(argparse.Action):
    """Stores the words of all values as one list."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: str | None = None) -> None:
        setattr(namespace, self.dest, [word for words in values for word in words])


def _some_of(known: Sequence[str], text: str) -> list[str]:
    """Return a word, or several with commas between them."""
    words = [text] if text in known else text.split(",")
    for word in words:
        if word not in known:
            expected = f"expected some of {', '.join(known)}"
            raise argparse.ArgumentTypeError(f"unknown {word!r}; {expected}")
    return words


def parser_of(
    about: str | None, *, out: Path | None = None, **defaults: Any
) -> argparse.ArgumentParser:
    """Return a parser with --out and an option for each default.

    An option has the type of its default: False is a switch, a list is numbers with commas between
    them, a type an option of that type that may be left out. about: the docstring of the command,
    whose beginning is shown.
    """
    parser = argparse.ArgumentParser(description=(about or "").partition("\n\n")[0])
    parser.add_argument("--out", type=Path, default=out)
    for name, default in defaults.items():
        options: dict[str, Any] = {"type": type(default), "default": default}
        if isinstance(default, type):
            options = {"type": default}
        elif default is False:
            options = {"action": "store_true"}
        elif isinstance(default, list):
            options["type"] = numbers
        elif isinstance(default, OneOf):
            options = {"choices": list(default.choices), "default": default.default}
        elif isinstance(default, SomeOf):
            known = list(default.choices)
            chosen = known if default.default is None else list(default.default)
            options = {"nargs": "*", "action": _Joined, "metavar": "NAME", "default": chosen}
            options["type"] = partial(_some_of, known)
        parser.add_argument(f"--{name.replace('_', '-')}", **options)
    return parser


def numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def device_of(parser: argparse.ArgumentParser, asked: str) -> torch.device:
    """Return the device that is asked for; the parser ends the command where there is none."""
    try:
        return pick_device(asked)
    except ValueError as error:
        parser.error(str(error))


def settle(
    parser: argparse.ArgumentParser, asked: str, out: Path | None
) -> tuple[torch.device, Path]:
    """Return where a command of `make bench-gpu` runs and writes; by default into the baselines.

    The parser ends the command where a CPU would write into the baselines, which are a GPU's.
    """
    device = device_of(parser, asked)
    if out is None and device.type != "cuda":
        parser.error(
            f"--out: {BASELINES} holds the rows of a GPU and this run is on {device.type}; name "
            f"another folder"
        )
    return device, out or BASELINES


def merged(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the leaves of `change` in place of its own."""
    out = dict(base)
    for key, value in change.items():
        nested = isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if nested else value
    return out


# -- what is stored --------------------------------------------------------------------------------


def machine() -> dict[str, Any]:
    """Return what the numbers depend on: processor, GPU, memory, threads, versions, and load."""
    about = {
        "cpu": _found_in("/proc/cpuinfo", r"^model name\s*:(.*)") or platform.processor(),
        "cores": os.cpu_count(),
        "memory": _found_in("/proc/meminfo", r"^MemTotal:(.*)"),
        "system": f"{platform.system()} {platform.machine()}",
        "load": os.getloadavg()[0],
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "lowroll": lowroll.__version__,
    }
    if torch.cuda.is_available():
        driver = _found_in("/proc/driver/nvidia/version", r"\A.*?(\d+\.\d+\.\d+)") or "unknown"
        about |= {"gpu": torch.cuda.get_device_name(), "driver": driver, "cuda": torch.version.cuda}
    return about


def _found_in(path: str, pattern: str) -> str | None:
    file = Path(path)
    found = re.search(pattern, file.read_text(), re.MULTILINE) if file.exists() else None
    return found[1].strip() if found else None


def same_kind(one: Mapping[str, Any], other: Mapping[str, Any], *more: str) -> bool:
    """Return whether numbers of two machines may stand in one file: equal in KIND, and in `more`."""
    return all(one.get(key) == other.get(key) for key in (*KIND, *more))


def here(**found: Any) -> dict[str, Any]:
    return {"date": date.today().isoformat(), "machine": machine(), **found}


def merge(name: str, rows: Iterable[Row], folder: Path, **settings: Any) -> Path:
    """Write rows, with machine, date and settings, into `folder/name.json`; return its path.

    They take the place of the file's rows of the same names. The file's other rows stay, unless they
    are of another kind of machine or of other versions. Parts may run at the same time, one on each
    GPU.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path, record = folder / f"{name}.json", here(settings=settings)
    found = {row.name: replace(row, date=row.date or record["date"]) for row in rows}
    with (folder / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.is_file():
            before = json.loads(path.read_text())
            if not same_kind(before["machine"], record["machine"]):
                say(f"{path}: rows of another machine or version are left out")
            else:
                stored = (read_row(row) for row in before["rows"])
                dated = {row.name: replace(row, date=row.date or before["date"]) for row in stored}
                found, record["settings"] = dated | found, before["settings"] | settings
        record["rows"] = [asdict(found[name]) for name in sorted(found, key=_by_size)]
        path.write_text(json.dumps(record, indent=1) + "\n")
    return path


def _by_size(name: str) -> list[tuple[bool, int | str]]:
    parts = re.findall(r"\d+|\D+", name)
    return [(False, int(part)) if part.isdigit() else (True, part) for part in parts]


def read_row(stored: Mapping[str, Any]) -> Row:
    spread = stored["spread"]
    return Row(**{**stored, "spread": None if spread is None else tuple(spread)})


def columns_of(record: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Return our values of a stored record by the two parts of their rows' names, `NAME: COLUMN`."""
    found: dict[str, dict[str, float]] = {}
    for row in record["rows"]:
        name, column = row["name"].rsplit(": ", 1)
        found.setdefault(name, {})[column] = row["ours"]
    return found


def show(title: str, rows: list[Row]) -> bool:
    """Print the rows as a table; tell if every row reached what it must."""
    cells = []
    for row in rows:
        spread = "" if row.spread is None else f"{row.spread[0]:.2f}-{row.spread[1]:.2f}"
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}x"
        verdict = row.verdict.replace("missed", "NOT met")
        must = "" if row.must is None else f"{row.must:g} {verdict}"
        cells.append((row.name, row.unit, number(row.ours), number(row.peer), ratio, spread, must))
    print_table(("", "unit", "ours", "peer", "ratio", "spread", "must"), cells, title)
    for row in rows:
        for said in (row.against and f"against {row.against}", row.note):
            if said:
                print(f"{row.name}: {said}")
    return all(row.met for row in rows)


class Results:
    """The rows of a command, with their targets' demands, stored as they are measured, so that a
    stopped one keeps what it has.

    settings: what is stored beside them. folder: none where nothing is stored.
    """

    def __init__(self, name: str, folder: Path | None, **settings: Any) -> None:
        self.name, self.folder, self.settings = name, folder, settings
        self.rows: dict[str, Row] = {}

    def add(self, rows: Iterable[Row], **settings: Any) -> None:
        from bench.targets import aimed

        new = aimed(rows)
        self.rows |= {row.name: row for row in new}
        if self.folder is not None:
            merge(self.name, new, self.folder, **self.settings, **settings)

    def finish(self, title: str, complete: bool = True) -> int:
        """Show all rows, and name those that miss their target for no known reason; return the
        command's status."""
        from bench.targets import TARGETS, reason

        rows = list(self.rows.values())
        met = show(title, rows)
        named = {name for target in TARGETS for name in target.rows}
        for row in rows:
            if row.name in named and row.verdict == "missed" and not reason(row):
                print(f"{row.name}: missed; its reason is to be written into bench/targets.py")
        if self.folder is not None:
            print(self.folder / f"{self.name}.json")
        return 0 if met and complete else 1


def finish(title: str, name: str, rows: list[Row], folder: Path | None, **settings: Any) -> int:
    """Store and show rows; return the command's status, 0 where all reach what they must."""
    results = Results(name, folder, **settings)
    results.add(rows)
    return results.finish(title)


def print_table(head: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> None:
    table = Table(*head, title=title or None)
    for cells in rows:
        table.add_row(*cells)
    console = Console()
    console.width = max(console.width, 150)
    console.print(table)


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
