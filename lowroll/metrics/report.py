"""The report of a run folder: `report.html`, self-contained.

Model output is untrusted data: every text is escaped and cut, and the content policy forbids
requests and other scripts.
"""

from __future__ import annotations

import html
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from lowroll.checkpoint.atomic_files import read_file, write_file
from lowroll.metrics.live import duration, guard_words
from lowroll.metrics.names import METRICS, find
from lowroll.metrics.page import REPORT_FILE, escape, is_report, page
from lowroll.metrics.plots import (
    PLOTS,
    draw,
    evaluated,
    length_plot,
    reward_plot,
    series,
    silent,
)
from lowroll.metrics.record import ABOUT_FILE, LOST, read, spans
from lowroll.metrics.samples import sample_section

Record = dict[str, Any]
_MAX_CONFIG = 20_000
_MAX_EVENTS = 40
_HEADER_FACTS = (
    "model",
    "data",
    "env",
    "learning",
    "rollout",
    "correction",
    "device",
    "started",
    "versions",
    "machine",
)
_ROLLOUT_FACTS = ("rollout", "correction")
_EDGE_STEPS = 5  # steps averaged for a run's beginning or end


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of the run in `run_dir` to `out` (default `run_dir/report.html`) and return
    its path.

    FileNotFoundError when `run_dir` is not a folder, ValueError when `out` is another file or
    cannot be written. Damaged data is left out, with a note.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such run folder")
    out = run_dir / REPORT_FILE if out is None else Path(out)
    if out.exists() and not is_report(out):
        raise ValueError(
            f"{out}: it is there already and is no report of lowroll; name another file with --out"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(out.parent, os.W_OK):  # fails before the plots are drawn
        raise ValueError(f"{out.parent}: cannot be written to; name another file with --out")
    records = read(run_dir)
    notes = [] if records else ["no metrics yet: metrics.jsonl is absent or empty"]
    if lost_steps := [record["step"] for record in records if record.get(LOST)]:
        notes.append(
            f"metrics.jsonl: the records of {spans(lost_steps)} are lost (damaged or missing on "
            "disk); the curves have gaps there"
        )
    about = _read_about(run_dir, notes)
    supervised = _is_supervised(about, records)
    title = _run_title(run_dir, about, supervised)
    body = [
        _header_section(run_dir, title, about, records, supervised),
        _change_section(records, supervised, notes),
        _tiles_section(records),
        _plots(records, supervised, notes),
        _guard_section(records),
        "" if supervised else sample_section(run_dir, notes),
        _config_section(run_dir, notes),
        _glossary_section(records, notes),
        _notes(notes),
    ]
    write_file(out, page(escape(title, 200), "\n".join(body)).encode(errors="replace"))
    return out


def _read_about(run_dir: Path, notes: list[str]) -> Record:
    path = run_dir / ABOUT_FILE
    try:
        about = json.loads(read_file(path))
        if isinstance(about, dict):
            return about
        notes.append(f"{ABOUT_FILE} is not an object")
    except FileNotFoundError:
        notes.append(f"{ABOUT_FILE} is absent: the header shows the folder's name only")
    except (OSError, ValueError, RecursionError) as error:
        notes.append(f"{ABOUT_FILE} is unreadable: {error}")
    return {}


def _is_supervised(about: Record, records: Sequence[Record]) -> bool:
    if "command" in about:
        return about["command"] == "sft"
    return any("sft/loss" in record for record in records)


def _run_title(run_dir: Path, about: Record, supervised: bool) -> str:
    if not about.get("model"):
        return str(about.get("title") or run_dir.resolve().name)
    model = str(about["model"]).split(" (")[0]
    if supervised:
        return f"Supervised warm start of {model}"
    title = f"Reinforcement learning of {model}"
    if about.get("algorithm"):
        title = f"{str(about['algorithm']).upper()} of {model}"
    if about.get("env"):
        title += f" on {about['env']}"
    if about.get("rollout"):
        title += f", {str(about['rollout']).split(' weights')[0]} rollouts"
    return title


def _header_section(
    run_dir: Path, title: str, about: Record, records: Sequence[Record], supervised: bool
) -> str:
    omitted_names = ("title", "command", "algorithm", *(_ROLLOUT_FACTS if supervised else ()))
    facts = "".join(
        f"<dt>{escape(name.replace('_', ' '), 40)}</dt><dd>{escape(about[name], 300)}</dd>"
        for name in dict.fromkeys([*_HEADER_FACTS, *about])
        if about.get(name) and name not in omitted_names
    )
    name = about.get("title") or run_dir.resolve().name
    steps = [record["step"] for record in records]
    step_range = f"steps {steps[0]} to {steps[-1]}" if steps else "no steps"
    if num_lost := sum(bool(record.get(LOST)) for record in records):
        step_range += f", {num_lost} of their records lost"
    return (
        f"<header><h1>{escape(title, 200)}</h1><p class=sub>{escape(name, 200)}, {step_range}</p><dl>{facts}</dl>"
        "</header>"
    )


def _change_section(records: Sequence[Record], supervised: bool, notes: list[str]) -> str:
    rows = []

    def row(label: str, hint: str, metric: str, edge: int) -> None:
        steps, values = series(records, metric)
        if values:
            rows.append(
                f"<tr><th>{escape(label, 120)}<small>{escape(hint, 120)}</small></th>"
                f"{_before_and_after(steps, values, edge)}</tr>"
            )

    if supervised:
        row("loss on demonstrations", "negative log-prob, nats a token", "sft/loss", _EDGE_STEPS)
    held_out = evaluated(records)
    for metric, env, sampling in held_out:
        label, pass_at_1 = (
            f"{env}: held out, {sampling}",
            metric.removesuffix("reward") + "pass_at_1",
        )
        row(label, "mean reward", metric, 1)
        row(label, "share of right responses", pass_at_1, 1)
    row("training prompts, sampled", "mean reward", "reward/mean", _EDGE_STEPS)
    if records and not supervised and not held_out:
        notes.append("nothing was measured on held-out prompts: eval.interval was not set")
    header = "<tr><th></th><th>before</th><th>after</th></tr>"
    if not rows:
        return ""
    return f"<section class=wide><h2>Before and after</h2><table class=change>{header}{''.join(rows)}</table></section>"


def _before_and_after(steps: list[float], values: list[float], edge: int) -> str:
    """Return two cells: the means of the first and of the last `edge` values, at most half of them
    each."""
    edge = max(1, min(edge, len(values) // 2))
    before = _mean_cell(steps[:edge], values[:edge])
    after = _mean_cell(steps[-edge:], values[-edge:])
    if len(values) > 1:
        return before + after
    missing = "<td>not measured</td>"
    return before + missing if steps[0] < 1 else missing + after


def _mean_cell(steps: list[float], values: list[float]) -> str:
    mean = fmean(values)
    return f"<td class=num><b>{mean:.3f}</b><small>{_describe_steps(steps)}</small></td>"


def _describe_steps(steps: Sequence[float]) -> str:
    if steps[0] != steps[-1]:
        return f"steps {steps[0]:.0f} to {steps[-1]:.0f}"
    return f"after step {steps[0]:.0f}" if steps[0] else "before step 1"


def _last(values: Sequence[float]) -> float:
    return values[-1]


# metric, label, how its values become one, its format, and meaning
_TILES: tuple[
    tuple[str, str, Callable[[Sequence[float]], float], Callable[[float], str], str], ...
] = (
    ("mismatch/kl_k3", "mismatch KL", median, "{:.1e}".format, "median, nats"),
    ("mismatch/ess", "effective sample size", min, "{:.3f}".format, "lowest"),
    ("kv/saving_peak", "KV tokens saved", median, "{:.0%}".format, "median, at the peak"),
    ("correction/rejected_sequence_fraction", "responses rejected", fmean, "{:.1%}".format, "mean"),
    (
        "spread/sequence_std",
        "spread before learning",
        median,
        "{:.1e}".format,
        "nats, std over sequences",
    ),
    (
        "critic/explained_variance",
        "critic: explained variance",
        _last,
        "{:.3f}".format,
        "last step",
    ),
    ("perf/generate_tokens_per_second", "generation", median, "{:,.0f} tok/s".format, "median"),
    ("perf/learn_tokens_per_second", "learning", median, "{:,.0f} tok/s".format, "median"),
    ("rollout/tokens", "tokens generated", sum, "{:,.0f}".format, "in all"),
    ("sft/tokens", "tokens learnt from", sum, "{:,.0f}".format, "in all"),
    ("time/step", "time", sum, duration, "in all"),
    ("time/step", "time a step", median, "{:.2f} s".format, "median"),
    ("optim/skipped", "updates skipped", sum, "{:.0f}".format, "not finite"),
    ("reward/error_rate", "score errors", fmean, "{:.1%}".format, "of the rollouts"),
)
_REJECTED = "correction/rejected_sequence_fraction"


def _tiles_section(records: Sequence[Record]) -> str:
    has_weights = bool(series(records, "mismatch/weight_mean")[0])
    cells = [
        f"<div class=tile><span>{html.escape(label)}</span><b>{form(reduce(values))}</b>"
        f"<small>{html.escape(hint)}</small></div>"
        for name, label, reduce, form, hint in _TILES
        if (values := series(records, name)[1]) and (has_weights or name != _REJECTED)
    ]
    return f"<section class=tiles>{''.join(cells)}</section>" if cells else ""


def _plots(records: Sequence[Record], supervised: bool, notes: list[str]) -> str:
    figures: list[str] = []
    titles_by_reason: dict[str, list[str]] = {}
    for plot in (reward_plot(records), *PLOTS, length_plot(records)):
        if reason := silent(records, plot):
            titles_by_reason.setdefault(reason, []).append(plot.title)
            continue
        figures.append(
            f"<figure><figcaption><b>{html.escape(plot.title)}</b> {html.escape(plot.caption)}"
            f"</figcaption>{draw(records, plot)}</figure>"
        )
    if records and not supervised:
        notes += [
            f"not plotted, because {reason}: {', '.join(titles)}"
            for reason, titles in titles_by_reason.items()
        ]
    return f"<section class=plots>{''.join(figures)}</section>" if figures else ""


def _guard_section(records: Sequence[Record]) -> str:
    rows = []
    previous_words: list[str] = []
    for record in records:
        if record.get(LOST):
            continue
        words = guard_words(record)
        if record.get("guard/fallbacks") and "rollout/weight_bits" in record:
            words.append(f"this step's rollouts: {record['rollout/weight_bits']:g} bits a weight")
        if words != previous_words:
            rows.append(
                f"<tr><th>step {record['step']}</th><td>{html.escape(', '.join(words) or 'quiet')}</td></tr>"
            )
        previous_words = words
    if not rows:
        return ""
    num_omitted = len(rows) - _MAX_EVENTS
    omitted_note = f"<p>and {num_omitted} more changes</p>" if num_omitted > 0 else ""
    return f"<section><h2>Guard</h2><table>{''.join(rows[:_MAX_EVENTS])}</table>{omitted_note}</section>"


def _config_section(run_dir: Path, notes: list[str]) -> str:
    try:
        text = read_file(run_dir / "config.yaml").decode(errors="replace")
    except OSError as error:
        is_absent = isinstance(error, FileNotFoundError)
        notes.append(f"config.yaml is {'absent' if is_absent else f'unreadable: {error}'}")
        return ""
    return f"<details open><summary>Configuration</summary><pre>{escape(text, _MAX_CONFIG)}</pre></details>"


def _glossary_section(records: Sequence[Record], notes: list[str]) -> str:
    used_metrics = set()
    rows = []
    for name in sorted(set[str]().union(*records) - {"step"}):
        try:
            used_metrics.add(find(name).name)
        except ValueError as error:
            notes.append(str(error))
    for metric in METRICS:
        if metric.name not in used_metrics:
            continue
        values = [record[metric.name] for record in records if metric.name in record]
        value_text = "".join("null" if value is None else f"{value:.4g}" for value in values[-1:])
        rows.append(
            f"<tr><td><code>{html.escape(metric.name)}</code></td><td class=num>{value_text}</td>"
            f"<td>{html.escape(metric.unit)}</td><td>{html.escape(metric.meaning)}</td>"
            f"<td>{html.escape(metric.expect)}</td><td>{html.escape(metric.source)}</td></tr>"
        )
    header_row = "<tr><th>metric</th><th>last</th><th>unit</th><th>meaning</th><th>expect</th><th>source</th></tr>"
    if not rows:
        return ""
    return (
        f"<details><summary>What the metrics mean</summary><div class=wide><table>{header_row}{''.join(rows)}"
        "</table></div></details>"
    )


def _notes(notes: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(note, 600)}</li>" for note in notes)
    return f"<footer><ul>{items}</ul></footer>" if notes else ""
