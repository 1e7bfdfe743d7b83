"""The results of an evaluation: a row of metrics for each engine and environment, their table, and
the files beside the responses.

    results.json    the rows
    failures.html   the unsolved examples
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from lowroll.checkpoint.files import write_file
from lowroll.config import RunConfig
from lowroll.metrics.failures import Attempt, Failure, failure_page, transcript
from lowroll.orchestrator.eval_statistics import interval, pass_at_k
from lowroll.orchestrator.examples import Example, ExampleResponse
from lowroll.types import Score, ScoreError

AVERAGE = "average"
RESULTS = "results.json"
PAGE = "failures.html"
FOLDER = Path("outputs/eval")
# settings that do not affect responses
_ASIDE = ("output_dir", "name", "env", "train", "loss", "advantage", "ckpt", "score", "eval")


@dataclass(frozen=True)
class EngineAnswers:
    """One engine's answers to one environment. `won`: whether each example's majority answer is
    right, None if not counted."""

    env: str
    about: dict[str, str]
    examples: list[Example]
    won: list[bool] | None
    seconds: float
    left_out: int = 0  # examples whose prompt is too long

    @property
    def shares(self) -> dict[str, float]:
        """Return each example's share of solved responses, by id."""
        return {one.id: fmean(one.solved) for one in self.examples if one.solved}


def shown(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the rows as a table: (head, cells), shares in percent, without empty columns."""
    about = [key for key in ("weights", "kv", "server", "model") if any(key in row for row in rows)]
    several = any((row.get("n") or 1) > 1 for row in rows)
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "set": lambda row: str(row["env"]),
        **{key: partial(_word, key) for key in about},
        "examples": partial(_number, "examples"),
        "k": partial(_number, "n"),
        "avg@k %": partial(_percent, "pass_at_1"),
        "95 %": lambda row: _bounds(row, "low", "high"),
        "pass@k %": partial(_percent, "pass_at_k"),
        "maj@k %": partial(_percent, "maj_at_k"),
        "difference": _difference,
        "reward": partial(_figures, "reward"),
        "tokens": partial(_number, "length_mean"),
        "cut %": partial(_percent, "truncated"),
        "no answer %": partial(_percent, "no_answer"),
        "unscored %": partial(_percent, "unscored"),
        "env failed": partial(_number, "env_failed"),
        "too long": partial(_number, "left_out"),
        "seconds": partial(_number, "seconds"),
    }
    idle = {} if several else {"k", "pass@k %", "maj@k %"}
    silent = {
        "-": ("difference", "maj@k %", "no answer %"),
        "0": ("too long", "env failed"),
        "0.0": ("unscored %",),
    }
    head, cells = [], []
    for name, cell in columns.items():
        column = [cell(row) for row in rows]
        said = {text for text in column if name not in silent.get(text, ())} - {"-"}
        if name not in idle and said:
            head.append(name)
            cells.append(column)
    return head, [list(line) for line in zip(*cells, strict=True)]


def _word(key: str, row: dict[str, Any]) -> str:
    return str(row.get(key, "-"))


def _number(key: str, row: dict[str, Any]) -> str:
    return "-" if row.get(key) is None else f"{row[key]:,.0f}"


def _figures(key: str, row: dict[str, Any]) -> str:
    return "-" if row.get(key) is None else f"{row[key]:.4g}"


def _percent(key: str, row: dict[str, Any]) -> str:
    return "-" if row.get(key) is None else f"{100 * row[key]:.1f}"


def _bounds(row: dict[str, Any], low: str, high: str) -> str:
    return f"{100 * row[low]:.1f} to {100 * row[high]:.1f}" if low in row else "-"


def _difference(row: dict[str, Any]) -> str:
    """Format a difference: "-1.2 (-3.0 to 0.5)", in percentage points."""
    if "difference" not in row:
        return "-"
    bounds = _bounds(row, "difference_low", "difference_high")
    return f"{100 * row['difference']:+.1f} ({bounds})"


def rows_of(measured: Sequence[EngineAnswers], seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each engine and environment, and an average over several environments.

    Keys: env, what answered, examples, n (responses to each), reward, pass_at_1 with its interval
    (low, high), avg_at_k, pass_at_k and maj_at_k with k = n, pass_at (by k), length_mean in tokens,
    truncated, no_answer and unscored (shares of responses), env_failed (conversations that failed
    in their environment), left_out, seconds; for every engine after the first also difference,
    difference_low and difference_high: its pass@1 less that of the first, paired by example.
    Intervals are 95 % percentiles of a bootstrap over examples.
    """
    sides: dict[tuple[str, ...], list[EngineAnswers]] = {}
    for one in measured:
        sides.setdefault(tuple(one.about.values()), []).append(one)
    first, *_ = sides.values()
    rows = []
    for side in sides.values():
        base = None if side is first else first
        for place, one in enumerate(side):
            rows.append(_row(one, seed) | _against([one], base and [base[place]], seed))
        if len(side) > 1:
            rows.append(_average(side, rows[-len(side) :], seed) | _against(side, base, seed))
    return rows


def _row(one: EngineAnswers, seed: int) -> dict[str, Any]:
    responses = [r for example in one.examples for r in example.responses]
    scored = [r.score for r in responses if isinstance(r.score, Score)]
    shares = list(one.shares.values())
    low, high = interval([shares], seed)
    n = max(len(example.responses) for example in one.examples)
    curve = {k: _pass_at(one.examples, k) for k in _powers(n)}
    told = [score.metrics["has_answer"] for score in scored if "has_answer" in score.metrics]
    return {
        "env": one.env,
        **one.about,
        "examples": len(one.examples),
        "n": n,
        "reward": fmean(fmean(example.rewards) for example in one.examples if example.rewards),
        "pass_at_1": fmean(shares),
        "low": low,
        "high": high,
        "avg_at_k": fmean(shares),
        "pass_at_k": curve[n],
        "maj_at_k": fmean(one.won) if one.won else None,
        "pass_at": curve,
        "length_mean": fmean(r.tokens for r in responses),
        "truncated": fmean(r.finish_reason == "length" for r in responses),
        "no_answer": 1 - fmean(told) if told else None,
        "unscored": 1 - len(scored) / len(responses),
        "env_failed": sum(r.failed is not None for r in responses),
        "left_out": one.left_out,
        "seconds": one.seconds,
    }


def _pass_at(examples: Sequence[Example], k: int) -> float | None:
    solved = [one.solved for one in examples if len(one.solved) >= k]
    if not solved:
        return None
    return fmean(pass_at_k(len(found), sum(found), k) for found in solved)


def _powers(n: int) -> list[int]:
    return sorted({n, *(1 << power for power in range(n.bit_length()))})


def _average(
    side: Sequence[EngineAnswers], rows: Sequence[dict[str, Any]], seed: int
) -> dict[str, Any]:
    low, high = interval([list(one.shares.values()) for one in side], seed)
    row: dict[str, Any] = {"env": AVERAGE, **side[0].about}
    for name in ("examples", "env_failed", "left_out", "seconds"):
        row[name] = sum(each[name] for each in rows)
    for name in ("pass_at_1", "avg_at_k", "pass_at_k", "maj_at_k"):
        values = [each[name] for each in rows]
        row[name] = None if None in values else fmean(values)
    return row | {"low": low, "high": high}


def _against(
    side: Sequence[EngineAnswers], base: Sequence[EngineAnswers] | None, seed: int
) -> dict[str, float]:
    """Return the difference to the first engine over examples that both scored; {} for the first."""
    if base is None:
        return {}
    sets = []
    for one, other in zip(side, base, strict=True):
        mine, theirs = one.shares, other.shares
        sets.append([mine[id] - theirs[id] for id in mine if id in theirs])
    low, high = interval(sets, seed)
    difference = fmean(fmean(values) for values in sets)
    return {"difference": difference, "difference_low": low, "difference_high": high}


def folder_of(
    cfg: RunConfig, each: Mapping[str, int], model: Path | None, server: str | None = None
) -> Path:
    """Return the default folder of an evaluation: the same model and settings share it and
    continue. Another or newer file in the model's folder makes it another model."""
    files: list[list[Any]] = []
    if model is not None:
        entries = sorted(os.scandir(model), key=lambda entry: entry.name)
        files = [[one.name, one.stat().st_size, one.stat().st_mtime_ns] for one in entries]
    tree = cfg.model_dump(mode="json")
    drawn = {key: value for key, value in tree.items() if key not in _ASIDE}
    sampler = {k: v for k, v in tree["eval"].items() if k not in ("env", "num_examples")}
    known = json.dumps([drawn, sampler, dict(each), files, server], sort_keys=True)
    name = Path(str(cfg.model)).name or "model"
    return FOLDER / f"{name}-{hashlib.sha256(known.encode()).hexdigest()[:8]}"


def leave(
    out: Path, cfg: RunConfig, measured: Sequence[EngineAnswers], rows: Sequence[dict[str, Any]]
) -> None:
    write_file(out / RESULTS, json.dumps({"rows": rows}, indent=1).encode())
    drawn = cfg.eval
    facts = [
        ("model", str(cfg.model)),
        ("sampler", f"temperature {drawn.temperature:g}, top-p {drawn.top_p:g}"),
        ("longest response", f"{cfg.rollout.max_tokens:,} tokens"),
        ("seed", str(cfg.seed)),
    ]
    title = f"Evaluation of {Path(str(cfg.model)).name}"
    text = failure_page(title, facts, shown(rows), failures(measured))
    write_file(out / PAGE, text.encode(errors="replace"))


def failures(measured: Sequence[EngineAnswers]) -> dict[str, list[Failure]]:
    """Return the unsolved examples of each environment, with the attempts of all engines."""
    found: dict[str, list[Failure]] = {}
    for name in dict.fromkeys(one.env for one in measured):
        sides = [one for one in measured if one.env == name]
        found[name] = [
            Failure(
                examples[0].prompt.id,
                examples[0].prompt.messages,
                examples[0].prompt.info,
                [_attempt(side, one) for side, one in zip(sides, examples, strict=True)],
            )
            for examples in zip(*(side.examples for side in sides), strict=True)
            if not all(r.solved for one in examples for r in one.responses)
        ]
    return found


def _attempt(side: EngineAnswers, example: Example) -> Attempt:
    wrong = next((one for one in example.responses if not one.solved), None)
    return Attempt(
        ", ".join(side.about.values()),
        sum(one.solved for one in example.responses),
        len(example.responses),
        None if wrong is None else _said(wrong),
        "" if wrong is None else _note(wrong),
    )


def _said(response: ExampleResponse) -> str:
    if response.messages is None:
        return response.text
    return transcript(response.messages)


def _note(response: ExampleResponse) -> str:
    score = response.score
    if isinstance(score, ScoreError):
        return f"no score: {score.kind}: {score.message}"
    if response.finish_reason == "length":
        return f"cut off after {response.tokens} tokens"
    metrics = score.metrics if isinstance(score, Score) else {}
    if metrics.get("has_answer") == 0:
        return "no final answer"
    if metrics.get("unjudged"):
        return "an answer that cannot be judged"
    return f"reward {score.reward:g}" if isinstance(score, Score) else ""
