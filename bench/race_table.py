"""The table of `bench.race`: what its sides reached, of the records that it stored."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from bench.experiment import by_arm, short, spread

COLUMNS = ("step", "seconds", "tokens", "reward", "kl", "score", "generate", "learn", "publish")
HEAD = (
    "side",
    "seconds to {score}",
    "tokens drawn to {score}",
    "first and last score",
    "one judge",
    "seconds a step, median and mean",
    "peak GB",
    "KL",
)


class Reached(NamedTuple):
    """When a run was at a score first: seconds of its steps, tokens that it had drawn, and steps."""

    seconds: float
    tokens: int
    step: int


def reached(records: Sequence[Mapping[str, Any]], score: float) -> Reached | None:
    """Return the first evaluation at or above the score, without interpolation; None without one."""
    seconds, tokens = 0.0, 0
    for record in records:
        seconds += record.get("seconds", 0.0)
        tokens += record.get("tokens", 0)
        if record.get("score") is not None and record["score"] >= score:
            return Reached(seconds, tokens, record["step"])
    return None


def columns(records: Sequence[Mapping[str, Any]]) -> dict[str, list[float | None]]:
    """Return records as lists, None where one lacks a value."""
    return {name: [short(record.get(name)) for record in records] for name in COLUMNS}


def records_of(run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the records that `columns` made lists of."""
    names = run["curves"]
    named = (dict(zip(names, row, strict=True)) for row in zip(*names.values(), strict=True))
    return [{name: value for name, value in row.items() if value is not None} for row in named]


def summary(runs: Sequence[Mapping[str, Any]], score: float) -> list[tuple[str, ...]]:
    """Return a row of HEAD for each side: means over its seeds, ranges in parentheses."""
    rows = []
    for side, own in by_arm(runs).items():
        ran = [run for run in own if "failed" not in run]
        if not ran:
            rows.append((side, f"not run: {own[0]['failed']}", *[""] * (len(HEAD) - 2)))
            continue
        curves = [records_of(run) for run in ran]
        found = [at for at in (reached(records, score) for records in curves) if at is not None]
        share = f", {len(found)} of {len(own)} runs"
        scores = [[one["score"] for one in records if "score" in one] for records in curves]
        first, last = ([each[i] for each in scores] for i in (0, -1))
        steps = [one["seconds"] for records in curves for one in records if one["step"] > 1]
        kl = [one["kl"] for records in curves for one in records if "kl" in one]
        rows.append(
            (
                side,
                spread([at.seconds for at in found], ",.0f") + share,
                spread([at.tokens for at in found], ",.0f"),
                f"{spread(first)}; {spread(last)}",
                spread([run["judged"] for run in ran]),
                f"{statistics.median(steps):.3g}; {statistics.fmean(steps):.3g}" if steps else "-",
                f"{max(run['peak_bytes'] for run in ran) / 1e9:.2f}",
                f"{statistics.fmean(kl):.1e}" if kl else "-",
            )
        )
    return rows
