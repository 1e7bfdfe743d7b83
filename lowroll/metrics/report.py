"""A run folder as one page: `report.html`, self-contained, no script, nothing fetched.

Reads `about.json`, `metrics.jsonl`, `config.yaml` and `rollouts/step_*.jsonl` as far as they exist and says what is
missing. Model output is data from a stranger: every text is escaped and cut, and the page's content policy forbids
scripts and requests.
"""
from __future__ import annotations

import html
import json
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowroll.metrics.live import duration, guard_words
from lowroll.metrics.names import METRICS, find
from lowroll.metrics.plots import PLOTS, Plot, draw, length_plot, present, reward_plot, series
from lowroll.metrics.record import ABOUT_FILE, read

Record = dict[str, Any]
REPORT_FILE = "report.html"
_HEAD = b'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>'       # of every page written here
_MAX_TEXT = 1200
_MAX_CONFIG = 20_000
_MAX_EVENTS = 40
_HEADER = ("model", "env", "algorithm", "rollout", "correction", "device", "started", "versions", "machine")


def write_report(run_dir: Path, out: Path | None = None) -> Path:
    """Write the page of the run in `run_dir` to `out` (default `run_dir/report.html`) and return its path.

    FileNotFoundError when `run_dir` is not a folder; ValueError when its metrics are unreadable, or when `out` is there
    and is no such page.
    """
    run_dir = Path(run_dir)
    if not run_dir.is_dir():
        raise FileNotFoundError(f"{run_dir}: no such run folder")
    records = read(run_dir)
    notes: list[str] = [] if records else ["no metrics yet: metrics.jsonl is absent or empty"]
    about = _read_about(run_dir, notes)
    body = [_header(run_dir, about, records), _headline(records), _plots(records, notes), _guard(records),
            _samples(run_dir, notes), _config(run_dir, notes), _glossary(records, notes), _notes(notes)]
    out = Path(out) if out is not None else run_dir / REPORT_FILE
    if out.exists() and not is_report(out):
        raise ValueError(f"{out}: it is there already and is no report of lowroll; name another file with --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    tmp = out.with_name(f".tmp-{out.name}")
    title = _text(about.get("title") or run_dir.resolve().name, 200)
    tmp.write_text(_PAGE.format(title=title, style=_STYLE, body="\n".join(body)), encoding="utf-8", errors="replace")
    os.replace(tmp, out)
    return out


def is_report(path: Path) -> bool:
    """Whether a file is a page that `write_report` wrote."""
    if not path.is_file():
        return False
    with path.open("rb") as file:
        head = file.read(2000)
    return head.startswith(_HEAD) and b"Content-Security-Policy" in head


def _read_about(run_dir: Path, notes: list[str]) -> Record:
    path = run_dir / ABOUT_FILE
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(about, dict):
            return about
        notes.append(f"{ABOUT_FILE} is not an object")
    except FileNotFoundError:
        notes.append(f"{ABOUT_FILE} is absent: the header shows the folder's name only")
    except ValueError as error:
        notes.append(f"{ABOUT_FILE} is unreadable: {error}")
    return {}


def _header(run_dir: Path, about: Record, records: Sequence[Record]) -> str:
    names = [name for name in _HEADER if about.get(name)]
    names += [name for name in about if name not in names and name != "title" and about[name]]
    facts = "".join(f"<dt>{html.escape(name.replace('_', ' '))}</dt><dd>{_text(about[name], 300)}</dd>"
                    for name in names)
    title = about.get("title") or run_dir.resolve().name
    span = f"steps {records[0]['step']} to {records[-1]['step']}" if records else "no steps"
    return f"<header><h1>{_text(title, 200)}</h1><p class=sub>{span}</p><dl>{facts}</dl></header>"


def _headline(records: Sequence[Record]) -> str:
    tiles: list[tuple[str, str, str]] = []

    def change(name: str, label: str) -> None:
        steps, values = series(records, name)
        if not values:
            return
        edge = max(1, min(5, len(values) // 4)) if not name.startswith("eval/") else 1
        first, last = statistics.fmean(values[:edge]), statistics.fmean(values[-edge:])
        if len(values) == 1:
            tiles.append((label, f"{last:.3f}", f"step {steps[0]:.0f}"))
            return
        span = f"step {steps[0]:.0f} to {steps[-1]:.0f}" if edge == 1 else f"first and last {edge} steps"
        tiles.append((label, f"{first:.3f} → {last:.3f}", span))

    def single(name: str, label: str, form: str, reduce: Any = statistics.median, hint: str = "median") -> None:
        if values := series(records, name)[1]:
            tiles.append((label, form.format(reduce(values)), hint))

    change("reward/mean", "reward")
    for name in sorted({name for record in records for name in record if re.fullmatch(r"eval/[^/]+/reward", name)}):
        change(name, f"held out: {name.split('/')[1]}")
    single("mismatch/kl_k3", "mismatch KL", "{:.1e}", hint="median, nats")
    single("mismatch/ess", "effective sample size", "{:.3f}", min, "lowest")
    single("spread/sequence_std", "spread before learning", "{:.1e}", hint="nats, std over sequences")
    change("critic/explained_variance", "critic: explained variance")
    single("perf/generate_tokens_per_second", "generation", "{:,.0f} tok/s")
    single("perf/learn_tokens_per_second", "learning", "{:,.0f} tok/s")
    single("rollout/tokens", "tokens generated", "{:,.0f}", sum, "in all")
    if seconds := series(records, "time/step")[1]:
        tiles.append(("time", duration(sum(seconds)), f"{statistics.median(seconds):.2f} s a step (median)"))
    single("optim/skipped", "updates skipped", "{:.0f}", sum, "not finite")
    single("reward/error_rate", "score errors", "{:.1%}", statistics.fmean, "of the rollouts")
    cells = "".join(f"<div class=tile><span>{html.escape(label)}</span><b>{html.escape(value)}</b>"
                    f"<small>{html.escape(hint)}</small></div>" for label, value, hint in tiles)
    return f"<section class=tiles>{cells}</section>" if tiles else ""


def _plots(records: Sequence[Record], notes: list[str]) -> str:
    figures, absent = [], []
    for plot in (reward_plot(records), *PLOTS, length_plot(records)):
        if present(records, plot):
            figures.append(_figure(records, plot))
        else:
            absent.append(plot.title)
    if absent and records:
        notes.append(f"not plotted, because this run recorded none of their metrics: {', '.join(absent)}")
    return f"<section class=plots>{''.join(figures)}</section>"


def _figure(records: Sequence[Record], plot: Plot) -> str:
    return (f"<figure><figcaption><b>{html.escape(plot.title)}</b> {html.escape(plot.caption)}</figcaption>"
            f"{draw(records, plot)}</figure>")


def _guard(records: Sequence[Record]) -> str:
    """Every step in which the guard's alarms or its measures are not those of the step before."""
    rows, before = [], list[str]()
    for record in records:
        words = guard_words(record)
        if record.get("guard/fallbacks") and "rollout/weight_bits" in record:
            words.append(f"this step's rollouts: {record['rollout/weight_bits']:g} bits a weight")
        if words != before:
            rows.append(f"<tr><th>step {record['step']}</th><td>{html.escape(', '.join(words) or 'quiet')}</td></tr>")
        before = words
    more = f"<p>and {len(rows) - _MAX_EVENTS} more changes</p>" if len(rows) > _MAX_EVENTS else ""
    return f"<section><h2>Guard</h2><table>{''.join(rows[:_MAX_EVENTS])}</table>{more}</section>" if rows else ""


def _samples(run_dir: Path, notes: list[str]) -> str:
    files = sorted((run_dir / "rollouts").glob("step_*.jsonl"))
    if not files:
        notes.append("no sample rollouts: rollouts/ is absent or empty")
        return ""
    chosen = list(dict.fromkeys([files[0], files[len(files) // 2], files[-1]]))
    parts = []
    for path in chosen:
        try:
            samples = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()[1:]]
            rows = "".join(_sample_row(label, sample) for label, sample in _pick(samples))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            notes.append(f"rollouts/{path.name} is unreadable: {error}")
            continue
        step = path.stem.removeprefix("step_").lstrip("0") or "0"
        parts.append(f"<h3>Step {html.escape(step)}</h3><table class=samples>{_SAMPLE_HEAD}{rows}</table>")
    return f"<section><h2>Sample rollouts</h2>{''.join(parts)}</section>" if parts else ""


def _pick(samples: list[Record]) -> list[tuple[str, Record]]:
    """Best, worst, and a score that failed if there is one."""
    scored = sorted((s for s in samples if s["score"]["type"] == "Score"), key=lambda s: float(s["score"]["reward"]))
    picked = [("best", scored[-1])] if scored else []
    picked += [("worst", scored[0])] if len(scored) > 1 else []
    return picked + [("no score", s) for s in samples if s["score"]["type"] != "Score"][:1]


def _sample_row(label: str, sample: Record) -> str:
    rollout, score, behavior = sample["rollout"], sample["score"], sample["rollout"]["behavior"]
    logprobs = [float(value) for value in rollout["logprobs"]]
    reward = f"{float(score['reward']):.3f}" if score["type"] == "Score" else f"{score['kind']}: {score['message']}"
    versions = sorted({span["version"] for span in behavior["policy"]})
    mean = f"{statistics.fmean(logprobs):.3f}" if logprobs else "-"
    facts = (f"<b>{_text(reward, 120)}</b><br>{len(logprobs)} tokens<br>{_text(rollout['finish_reason'], 20)}<br>"
             f"log-prob {mean}<br>advantage {float(sample['advantage']):+.2f}<br>"
             f"{_text(behavior['weights'], 20)} v{_text(', '.join(map(str, versions)), 40)}")
    prompt = "\n".join(f"{message.get('role', '?')}: {message.get('content', '')}"
                       for message in sample["prompt"]["messages"])
    return (f"<tr><th>{html.escape(label)}<small>{_text(sample['prompt']['env'], 40)}</small></th>"
            f"<td><pre>{_text(prompt)}</pre></td><td><pre>{_text(sample['text'])}</pre></td>"
            f"<td class=facts>{facts}</td></tr>")


def _config(run_dir: Path, notes: list[str]) -> str:
    path = run_dir / "config.yaml"
    if not path.exists():
        notes.append("config.yaml is absent")
        return ""
    text = path.read_text(encoding="utf-8", errors="replace")
    return f"<details><summary>Configuration</summary><pre>{_text(text, _MAX_CONFIG)}</pre></details>"


def _glossary(records: Sequence[Record], notes: list[str]) -> str:
    used, rows = set(), []
    for name in sorted({name for record in records for name in record if name != "step"}):
        try:
            used.add(find(name).name)
        except ValueError as error:
            notes.append(str(error))
    for metric in METRICS:
        if metric.name not in used:
            continue
        last = next((record[metric.name] for record in reversed(records) if metric.name in record), None)
        value = "" if "<" in metric.name else "null" if last is None else f"{last:.4g}"
        rows.append(f"<tr><td><code>{html.escape(metric.name)}</code></td><td class=num>{value}</td>"
                    f"<td>{html.escape(metric.unit)}</td><td>{html.escape(metric.meaning)}</td>"
                    f"<td>{html.escape(metric.expect)}</td><td>{html.escape(metric.source)}</td></tr>")
    head = "<tr><th>metric</th><th>last</th><th>unit</th><th>meaning</th><th>expect</th><th>source</th></tr>"
    return (f"<details open><summary>What the metrics mean</summary><table class=glossary>{head}{''.join(rows)}"
            "</table></details>") if rows else ""


def _notes(notes: Sequence[str]) -> str:
    return f"<footer><ul>{''.join(f'<li>{_text(note, 600)}</li>' for note in notes)}</ul></footer>" if notes else ""


def _text(value: object, limit: int = _MAX_TEXT) -> str:
    """Escaped, cut to `limit` characters, control characters made visible."""
    text = str(value)
    if len(text) > limit:
        text = f"{text[:limit]} … ({len(text) - limit} more characters)"
    text = "".join(c if c in "\n\t" or (c.isprintable() or c == " ") else f"\\x{ord(c):02x}" for c in text)
    return html.escape(text)


_SAMPLE_HEAD = "<tr><th></th><th>prompt</th><th>response</th><th>reward</th></tr>"
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<style>{style}</style></head><body><main>
{body}
</main></body></html>
"""
_STYLE = """
:root{color-scheme:light dark;--ink:#1d232b;--soft:#5d6876;--line:#dde2e8;--page:#fbfbfa;--card:#fff;--mark:#3b7dd8}
@media (prefers-color-scheme:dark){:root{--ink:#e4e7eb;--soft:#9aa5b1;--line:#333a43;--page:#15181c;--card:#1c2026}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:1180px;margin:0 auto;padding:32px 24px 64px}
h1{font-size:26px;margin:0;letter-spacing:-.01em}h2{font-size:19px;margin:36px 0 4px}
h3{font-size:14px;margin:18px 0 6px;color:var(--soft)}
.sub{margin:2px 0 16px;color:var(--soft)}
dl{display:grid;grid-template-columns:max-content 1fr;gap:2px 18px;margin:0;font-size:14px}
dt{color:var(--soft)}dd{margin:0;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(170px,1fr));gap:12px;margin:26px 0}
.tile{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:10px 14px;display:flex;
flex-direction:column}
.tile span,.tile small{color:var(--soft);font-size:12.5px}
.tile b{font-size:19px;font-weight:600;font-variant-numeric:tabular-nums;white-space:nowrap}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,520px),1fr));gap:16px}
figure{margin:0;background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px 6px}
figcaption{font-size:13px;color:var(--soft);margin-bottom:4px}figcaption b{color:var(--ink);font-size:15px}
svg{display:block;width:100%;height:auto;color:var(--ink)}svg text{font-family:inherit!important}
table{border-collapse:collapse;width:100%;font-size:13px}
th,td{text-align:left;vertical-align:top;padding:6px 10px;border-top:1px solid var(--line)}
th{font-weight:600;color:var(--soft)}th small{display:block;font-weight:400}
.samples td{width:40%}.samples td.facts{width:20%;min-width:130px;color:var(--soft)}.facts b{color:var(--ink)}
pre{margin:0;white-space:pre-wrap;overflow-wrap:anywhere;font:12.5px/1.45 ui-monospace,Menlo,Consolas,monospace}
code{font:12.5px ui-monospace,Menlo,Consolas,monospace;white-space:nowrap}
.num{font-variant-numeric:tabular-nums;white-space:nowrap}
details{margin-top:32px}summary{cursor:pointer;font-size:19px;font-weight:600;margin-bottom:8px}
details pre{background:var(--card);border:1px solid var(--line);border-radius:8px;padding:12px 14px}
footer{margin-top:32px;color:var(--soft);font-size:13px}footer ul{padding-left:18px;margin:0}
"""
