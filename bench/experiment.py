"""Experiments of many runs: what `bench.curves`, `bench.sparse` and, in part, `bench.race` share.

An experiment has arms: settings that differ from common ones. Every run of a seed starts from the
same warm-started weights and draws the same prompts. Runs go side by side in processes of their own,
one thread each, spread over the GPUs. Each is stored as it ends, and none is made again that stands
there whole, with the same settings and steps. With `--seconds`, runs that are not done by then end
after the step that they are in, and are stored without scores.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bench.harness import RESULTS, OneOf, SomeOf, here, merged, parser_of, say
from lowroll.checkpoint.atomic_files import write_file
from lowroll.config import RunConfig, from_mapping
from lowroll.runs.grpo import run
from lowroll.runs.roles.devices import VISIBLE, visible

Found = dict[str, Any]
Runs = Sequence[Mapping[str, Any]]
SUMMED = "mean over the seeds (smallest to largest)"


def options(doc: str | None, arms: Iterable[str], **defaults: Any) -> argparse.ArgumentParser:
    """Return the options of every command that makes runs, and those of the defaults
    (`harness.parser_of`). change: JSON of settings that differ."""
    device = OneOf(("auto", "cpu", "cuda"), "auto")
    return parser_of(doc, out=RESULTS, device=device, only=SomeOf(arms), change="{}", **defaults)


@dataclass(frozen=True)
class Place:
    """What all runs of a command share: their steps, folder and device, and the settings that
    differ from the experiment's."""

    steps: int
    folder: Path
    device: str
    change: Mapping[str, Any]


@dataclass(frozen=True)
class Experiment:
    """An experiment: the name of its file, common settings, and what each arm changes.

    warm_start: writes the weights that all runs start from as `folder/model`, and returns what is
    recorded of them. teacher: the same of the teacher of arms with a `train.teacher`, whose path in
    the folder says how it is made. scores: the held-out scores of a model folder by a run's
    configuration and that of the first arm. curves: the metrics that are stored, with all of
    `families`. env: the environment of the problems in a folder, where the settings name none.
    before: what is recorded of a run's beginning. slowest: the arm that begins first, so that
    nothing waits for it at the end.
    """

    name: str
    settings: Mapping[str, Any]
    arms: Mapping[str, Mapping[str, Any]]
    warm_start: Callable[[Place], Found]
    scores: Callable[[RunConfig, RunConfig, Path], dict[str, float]]
    curves: tuple[str, ...]
    families: tuple[str, ...] = ()
    env: Callable[[Path], list[dict[str, Any]]] | None = None
    before: Callable[[RunConfig, Path], Found] | None = None
    teacher: Callable[[Place], Found] | None = None
    slowest: str = ""

    def options(
        self, doc: str | None, steps: int, seeds: int, jobs: int
    ) -> argparse.ArgumentParser:
        """Return the command's options. seconds: when runs end, done or not; work: the folder of
        models and logs, none of which stays without it."""
        counts = {"steps": steps, "seeds": seeds, "jobs": jobs, "first_seed": 0}
        return options(doc, self.arms, **counts, seconds=math.inf, work=Path)

    def config(self, arm: str, seed: int, place: Place) -> RunConfig:
        """Return the run of an arm and a seed, as a user's YAML file would say it."""
        tree = merged(merged(self.settings, place.change), self.arms[arm])
        if self.env is not None:
            tree.setdefault("env", self.env(place.folder))
        tree = merged(tree, own_settings(arm, seed, place))
        if teacher := tree["train"].get("teacher"):
            tree["train"]["teacher"] = str(place.folder / teacher)
        return from_mapping(tree)

    def train(
        self, arm: str, seed: int, gpu: int, *, place: Place, until: float = math.inf
    ) -> Found:
        """Make a run in a process of its own; return its curves and the scores of its final model.
        until: see `ending_by`."""
        began = time.monotonic()
        cfg = self.config(arm, seed, place)
        with alone(gpu, cfg):
            before = {} if self.before is None else self.before(cfg, place.folder / "model")
            with ending_by(until):
                result = run(cfg, overwrite=True)
            first = self.config(next(iter(self.arms)), seed, place)
            after = {} if result.signal else self.scores(cfg, first, result.folder / "final")
        return {
            "variant": arm,
            "seed": seed,
            "seconds": round(time.monotonic() - began, 1),
            **before,
            "after": after,
            "curves": recorded(result.records, self.curves, self.families),
        }

    def main(self, args: argparse.Namespace) -> list[Found]:
        """Make the runs that are missing; return all that stand in the file."""
        with tempfile.TemporaryDirectory() as scratch:
            folder = args.work or Path(scratch)
            folder.mkdir(parents=True, exist_ok=True)
            return self._measure(folder, args)

    def _measure(self, folder: Path, args: argparse.Namespace) -> list[Found]:
        began, path = time.monotonic(), args.out / f"{self.name}.json"
        place = Place(args.steps, folder, args.device, json.loads(args.change))
        before = self.warm_started(place)
        taught = any(self.arms[arm].get("train", {}).get("teacher") for arm in args.only)
        if self.teacher is not None and taught:
            before["teacher"] = self._once("teacher", self.teacher, place)
        say(f"warm start: {before}, {time.monotonic() - began:.0f} s")
        settings = merged(self.settings, place.change)
        about = made_here(args.device, steps=args.steps, settings=settings)
        runs = self.stored(path, about)
        have = {key(one) for one in runs if is_whole(one, args.steps)}
        seeds = range(args.first_seed, args.first_seed + args.seeds)
        wanted = [(arm, seed) for seed in seeds for arm in args.only]
        jobs = sorted(
            set(wanted) - have, key=lambda job: (job[0] != self.slowest, wanted.index(job))
        )
        until = time.time() + args.seconds - (time.monotonic() - began)
        work = partial(self.train, place=place, until=until)
        for last in side_by_side(work, jobs, args.jobs, until):
            runs = [one for one in runs if key(one) != key(last)]
            beside = {"warm_start": before, "device": about["machine"]["device"]}
            runs.append({**last, "arm": self.arms[last["variant"]], **beside})
            store(path, about, runs, self.arms)
            say(
                f"{len(runs)}: {last['variant']}, seed {last['seed']}, {last['seconds']} s, "
                f"{last['after']}, after {time.monotonic() - began:.0f} s"
            )
        return runs

    def warm_started(self, place: Place) -> Found:
        """Write the weights that all runs start from, unless they are in the folder; return what is
        recorded of them. ValueError where those in the folder are of other settings."""
        return self._once("warm", self.warm_start, place)

    def _once(self, name: str, make: Callable[[Place], Found], place: Place) -> Found:
        note, settings = place.folder / f"{name}.json", merged(self.settings, place.change)
        if note.is_file():
            stored: Found = json.loads(note.read_text())
            if stored.get("settings") != settings:
                raise ValueError(f"--work: {place.folder} has a model that other settings made")
            return dict(stored["found"])
        found = make(place)
        write_file(note, json.dumps({"settings": settings, "found": found}).encode())
        return found

    def stored(self, path: Path, about: Mapping[str, Any]) -> list[Found]:
        """Return the runs that the file has with these settings and as many steps."""
        if not path.is_file():
            return []
        record = json.loads(path.read_text())
        same = all(record[name] == about[name] for name in ("steps", "settings"))
        return [
            one for one in record["runs"] if same and one["arm"] == self.arms.get(one["variant"])
        ]


def store(path: Path, about: Found, runs: list[Found], order: Iterable[str]) -> None:
    """Write the finished runs, sorted by name in an order and by seed. The file has its old content
    or the new one at any time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(order)
    runs.sort(key=lambda one: (names.index(one["variant"]), one["seed"]))
    write_file(path, f"{json.dumps({**about, 'runs': runs})}\n".encode())


def key(one: Mapping[str, Any]) -> tuple[str, int]:
    """Return what tells runs of an experiment apart."""
    return one["variant"], one["seed"]


def is_whole(one: Mapping[str, Any], steps: int) -> bool:
    """Return whether a run made all of its steps and was evaluated."""
    return bool(one["after"]) and all(len(curve) == steps for curve in one["curves"].values())


def own_settings(name: str, seed: int, place: Place) -> dict[str, Any]:
    """Return the settings in which runs differ whatever their arm."""
    return {
        "model": str(place.folder / "model"),
        "output_dir": str(place.folder / f"{name.replace(' ', '-')}-{seed}"),
        "seed": seed,
        "device": place.device,
        "train": {"max_steps": place.steps},
    }


@contextmanager
def alone(gpu: int, cfg: RunConfig) -> Iterator[None]:
    """Use one thread and one GPU, and print into a file beside the run."""
    torch.set_num_threads(1)
    if cfg.device != "cpu" and torch.cuda.is_available():
        torch.cuda.init()  # so that the variable is for the run's own processes alone
        torch.cuda.set_device(gpu)
        if cfg.launcher != "none":
            os.environ[VISIBLE] = visible()[gpu]
    folder = Path(cfg.output_dir)
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        with redirect_stdout(log), redirect_stderr(log):
            yield


class NoStep(Exception):
    """A run had no step when its time was over."""


@contextmanager
def ending_by(until: float) -> Iterator[None]:
    """Have the run in this block finish its step and end at a time, as SIGTERM does. NoStep for one
    that has none then."""
    if until == math.inf:
        yield
        return

    def expire(*_: object) -> None:
        raise NoStep("the time was over before the first step")

    before = signal.signal(signal.SIGTERM, expire)  # until the run puts its own in this place
    timer = threading.Timer(until - time.time(), os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    try:
        yield
    finally:
        # a signal that comes after the run must neither fail it nor end the process
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        timer.cancel()
        timer.join()
        signal.signal(signal.SIGTERM, before)


def recorded(
    records: Sequence[Mapping[str, Any]], names: Sequence[str], families: tuple[str, ...] = ()
) -> dict[str, list[float | None]]:
    """Return the curves of these names, and of all metrics of these families that the run has."""
    own = {name for record in records for name in record if name.startswith(families)}
    return {
        name: [short(record.get(name)) for record in records] for name in (*names, *sorted(own))
    }


def short(value: object) -> float | None:
    """Return a number as it is stored, with five digits."""
    return None if value is None else float(f"{float(str(value)):.5g}")


def mean_of(one: Mapping[str, Any], name: str, count: int | None) -> float | None:
    """Return a curve's mean over the first `count` steps, the last -`count`, or all; None where
    nothing was recorded."""
    curve = one["curves"].get(name, [])
    part = curve[count:] if count is not None and count < 0 else curve[:count]
    known = [value for value in part if value is not None]
    return statistics.fmean(known) if known else None


def mean_over(name: str, count: int | None, form: str) -> Callable[[Runs], str]:
    """Return the column of the mean over runs of `mean_of`, in a format; `-` where no run has the
    curve."""

    def column(runs: Runs) -> str:
        found = [value for one in runs if (value := mean_of(one, name, count)) is not None]
        return format(statistics.fmean(found), form) if found else "-"

    return column


def table(columns: Mapping[str, Callable[[Runs], str]], runs: Runs) -> list[tuple[str, ...]]:
    """Return a line for each arm: its name, and what each column says of its runs."""
    return [(arm, *(of(own) for of in columns.values())) for arm, own in by_arm(runs).items()]


def spread(values: Sequence[float], form: str = ".3f") -> str:
    """Return the mean of the seeds, and their range where it is one, in a format; `-` for none."""
    if not values:
        return "-"
    mean, low, high = (format(of(values), form) for of in (statistics.fmean, min, max))
    return mean if low == high else f"{mean} ({low} to {high})"


def by_arm(runs: Runs) -> dict[str, list[Mapping[str, Any]]]:
    """Return the runs of each arm, in the order of their first ones."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for one in runs:
        found.setdefault(one["variant"], []).append(one)
    return found


def side_by_side(
    work: Callable[[str, int, int], Found],
    jobs: Sequence[tuple[str, int]],
    count: int,
    until: float = math.inf,
) -> Iterator[Found]:
    """Yield what `work(name, seed, gpu)` returns for every job, as they finish: `count` at a time,
    each in a process of its own, and on the GPU of one that has ended. Raise the first error of a
    job when the others have ended, but not NoStep. until: when no more job begins.
    """
    context, gpus = multiprocessing.get_context("spawn"), max(1, torch.cuda.device_count())
    free, left = deque(i % gpus for i in range(count)), deque(jobs)
    gpu_of: dict[Future[Found], int] = {}
    failed: list[BaseException] = []
    with ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1) as pool:
        while left or gpu_of:
            if time.time() >= until:
                left.clear()
            while left and free:
                gpu = free.popleft()
                gpu_of[pool.submit(work, *left.popleft(), gpu)] = gpu
            for done in wait(gpu_of, return_when=FIRST_COMPLETED).done:
                free.append(gpu_of.pop(done))
                if (error := done.exception()) is None:
                    yield done.result()
                    continue
                say(f"a run failed: {type(error).__name__}: {error}")
                if not isinstance(error, NoStep):
                    failed.append(error)
    if failed:
        raise failed[0]


def made_here(device: str, **found: Any) -> Found:
    """Return what is stored beside the runs, with the date, the machine and all of its GPUs."""
    about = here(**found)
    about["machine"]["device"] = device_name(device)
    return about


def device_name(asked: str) -> str:
    """Return the GPUs of this machine, or cpu."""
    cuda = torch.cuda.is_available() and asked != "cpu"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else "cpu"
