"""The results of an evaluation: rows of metrics, their table, and the files beside the responses.

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

from lowroll.checkpoint.atomic_files import write_file
from lowroll.config import RunConfig
from lowroll.metrics.failures import Attempt, Failure, failure_page
from lowroll.metrics.page import transcript
from lowroll.orchestrator.eval_statistics import interval, pass_at_k
from lowroll.orchestrator.examples import Example, ExampleResponse
from lowroll.types import Score, ScoreError

AVERAGE = "average"
RESULTS = "results.json"
PAGE = "failures.html"
FOLDER = Path("outputs/eval")
_IGNORED_SETTINGS = (
    "output_dir",
    "name",
    "env",
    "train",
    "loss",
    "advantage",
    "ckpt",
    "score",
    "eval",
)


@dataclass(frozen=True)
class EngineAnswers:
    """One engine's answers to one environment. won: the correctness of each example's majority
    answer."""

    env: str
    about: dict[str, str]
    examples: list[Example]
    won: list[bool] | None
    seconds: float
    left_out: int = 0  # prompts that are too long

    @property
    def shares(self) -> dict[str, float]:
        """Return each example's share of solved responses, by id."""
        return {example.id: fmean(example.solved) for example in self.examples if example.solved}


def shown(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return (column names, cells of each line), without uninformative columns."""
    engine_keys = [
        key for key in ("weights", "kv", "server", "model") if any(key in row for row in rows)
    ]
    columns: dict[str, Callable[[dict[str, Any]], str]] = {
        "set": lambda row: str(row["env"]),
        **{key: partial(_format, key, "") for key in engine_keys},
        "examples": partial(_format, "examples", ",.0f"),
        "k": partial(_format, "n", ",.0f"),
        "avg@k %": partial(_format_percent, "pass_at_1"),
        "95 %": lambda row: _format_bounds(row, "low", "high"),
        "pass@k %": partial(_format_percent, "pass_at_k"),
        "maj@k %": partial(_format_percent, "maj_at_k"),
        "difference": _format_difference,
        "reward": partial(_format, "reward", ".4g"),
        "tokens": partial(_format, "length_mean", ",.0f"),
        "cut %": partial(_format_percent, "truncated"),
        "no answer %": partial(_format_percent, "no_answer"),
        "unscored %": partial(_format_percent, "unscored"),
        "env failed": partial(_format, "env_failed", ",.0f"),
        "too long": partial(_format, "left_out", ",.0f"),
        "seconds": partial(_format, "seconds", ",.0f"),
    }
    if not any((row.get("n") or 1) > 1 for row in rows):
        for name in ("k", "pass@k %", "maj@k %"):  # need several responses to an example
            del columns[name]
    # Beside "-", the texts without problems.
    usual_texts = {"too long": "0", "env failed": "0", "unscored %": "0.0"}
    head, cells = [], []
    for name, format_cell in columns.items():
        column = [format_cell(row) for row in rows]
        if set(column) - {"-", usual_texts.get(name)}:
            head.append(name)
            cells.append(column)
    return head, [list(line) for line in zip(*cells, strict=True)]


def _format(key: str, spec: str, row: dict[str, Any]) -> str:
    return "-" if row.get(key) is None else format(row[key], spec)


def _format_percent(key: str, row: dict[str, Any]) -> str:
    return "-" if row.get(key) is None else f"{100 * row[key]:.1f}"


def _format_bounds(row: dict[str, Any], low: str, high: str) -> str:
    return f"{100 * row[low]:.1f} to {100 * row[high]:.1f}" if low in row else "-"


def _format_difference(row: dict[str, Any]) -> str:
    if "difference" not in row:
        return "-"
    bounds = _format_bounds(row, "difference_low", "difference_high")
    return f"{100 * row['difference']:+.1f} ({bounds})"


def rows_of(measured: Sequence[EngineAnswers], seed: int = 0) -> list[dict[str, Any]]:
    """Return a row for each engine and environment, and an average over several environments.

    Keys: env, the engine, examples, n (responses to each), reward, pass_at_1 with its interval
    (low, high), avg_at_k, pass_at_k and maj_at_k with k = n, pass_at (by k), length_mean in tokens,
    truncated, no_answer and unscored (shares of responses), env_failed (conversations), left_out,
    seconds; after the first engine also difference, difference_low and difference_high: its pass@1
    less the first's, paired by example. Intervals are 95 % percentiles of a bootstrap over
    examples.
    """
    answers_by_engine: dict[tuple[str, ...], list[EngineAnswers]] = {}
    for answers in measured:
        answers_by_engine.setdefault(tuple(answers.about.values()), []).append(answers)
    first, *others = answers_by_engine.values()
    rows = _rows_of_engine(first, None, seed)
    for engine_answers in others:
        rows += _rows_of_engine(engine_answers, first, seed)
    return rows


def _rows_of_engine(
    measured: Sequence[EngineAnswers], baseline: Sequence[EngineAnswers] | None, seed: int
) -> list[dict[str, Any]]:
    rows = []
    for position, answers in enumerate(measured):
        row = _make_row(answers, seed)
        if baseline is not None:
            row |= _paired_difference([answers], [baseline[position]], seed)
        rows.append(row)
    if len(measured) > 1:
        average = _average_row(measured, rows, seed)
        if baseline is not None:
            average |= _paired_difference(measured, baseline, seed)
        rows.append(average)
    return rows


def _make_row(one: EngineAnswers, seed: int) -> dict[str, Any]:
    responses = [response for example in one.examples for response in example.responses]
    scored = [response.score for response in responses if isinstance(response.score, Score)]
    shares = list(one.shares.values())
    low, high = interval([shares], seed)
    n = max(len(example.responses) for example in one.examples)
    curve = {k: _pass_at(one.examples, k) for k in _powers_of_two(n)}
    has_answer = [score.metrics["has_answer"] for score in scored if "has_answer" in score.metrics]
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
        "length_mean": fmean(response.tokens for response in responses),
        "truncated": fmean(response.finish_reason == "length" for response in responses),
        "no_answer": 1 - fmean(has_answer) if has_answer else None,
        "unscored": 1 - len(scored) / len(responses),
        "env_failed": sum(response.failed is not None for response in responses),
        "left_out": one.left_out,
        "seconds": one.seconds,
    }


def _pass_at(examples: Sequence[Example], k: int) -> float | None:
    solved = [example.solved for example in examples if len(example.solved) >= k]
    if not solved:
        return None
    return fmean(pass_at_k(len(outcomes), sum(outcomes), k) for outcomes in solved)


def _powers_of_two(n: int) -> list[int]:
    return sorted({n, *(1 << power for power in range(n.bit_length()))})


def _average_row(
    side: Sequence[EngineAnswers], rows: Sequence[dict[str, Any]], seed: int
) -> dict[str, Any]:
    low, high = interval([list(answers.shares.values()) for answers in side], seed)
    row: dict[str, Any] = {"env": AVERAGE, **side[0].about}
    for name in ("examples", "env_failed", "left_out", "seconds"):
        row[name] = sum(env_row[name] for env_row in rows)
    for name in ("pass_at_1", "avg_at_k", "pass_at_k", "maj_at_k"):
        values = [env_row[name] for env_row in rows]
        row[name] = None if None in values else fmean(values)
    return row | {"low": low, "high": high}


def _paired_difference(
    side: Sequence[EngineAnswers], base: Sequence[EngineAnswers], seed: int
) -> dict[str, float]:
    differences_by_env = []
    for answers, base_answers in zip(side, base, strict=True):
        shares, base_shares = answers.shares, base_answers.shares
        differences = [shares[id] - base_shares[id] for id in shares if id in base_shares]
        differences_by_env.append(differences)
    low, high = interval(differences_by_env, seed)
    difference = fmean(fmean(values) for values in differences_by_env)
    return {"difference": difference, "difference_low": low, "difference_high": high}


def folder_of(
    cfg: RunConfig, each: Mapping[str, int], model: Path | None, server: str | None = None
) -> Path:
    """Return an evaluation's default folder, by its settings and the model's files."""
    model_files: list[list[Any]] = []
    if model is not None:
        for entry in sorted(os.scandir(model), key=lambda entry: entry.name):
            status = entry.stat()
            model_files.append([entry.name, status.st_size, status.st_mtime_ns])
    tree = cfg.model_dump(mode="json")
    response_settings = {key: value for key, value in tree.items() if key not in _IGNORED_SETTINGS}
    sampler = {k: v for k, v in tree["eval"].items() if k not in ("env", "num_examples")}
    identity = [response_settings, sampler, dict(each), model_files, server]
    digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
    name = Path(str(cfg.model)).name or "model"
    return FOLDER / f"{name}-{digest[:8]}"


def leave(
    out: Path, cfg: RunConfig, measured: Sequence[EngineAnswers], rows: Sequence[dict[str, Any]]
) -> None:
    write_file(out / RESULTS, json.dumps({"rows": rows}, indent=1).encode())
    eval_cfg = cfg.eval
    facts = [
        ("model", str(cfg.model)),
        ("sampler", f"temperature {eval_cfg.temperature:g}, top-p {eval_cfg.top_p:g}"),
        ("longest response", f"{cfg.rollout.max_tokens:,} tokens"),
        ("seed", str(cfg.seed)),
    ]
    title = f"Evaluation of {Path(str(cfg.model)).name}"
    text = failure_page(title, facts, shown(rows), failures(measured))
    write_file(out / PAGE, text.encode(errors="replace"))


def failures(measured: Sequence[EngineAnswers]) -> dict[str, list[Failure]]:
    """Return the examples with an unsolved response, with all engines' attempts."""
    failures_by_env: dict[str, list[Failure]] = {answers.env: [] for answers in measured}
    for name, env_failures in failures_by_env.items():
        per_engine = [answers for answers in measured if answers.env == name]
        # All engines have the same examples in one order.
        for same_example in zip(*(side.examples for side in per_engine), strict=True):
            responses = [response for example in same_example for response in example.responses]
            if all(response.solved for response in responses):
                continue
            attempts = list(map(_summarize_attempt, per_engine, same_example))
            prompt = same_example[0].prompt
            env_failures.append(Failure(prompt.id, prompt.messages, prompt.info, attempts))
    return failures_by_env


def _summarize_attempt(side: EngineAnswers, example: Example) -> Attempt:
    unsolved = next((response for response in example.responses if not response.solved), None)
    return Attempt(
        ", ".join(side.about.values()),
        sum(response.solved for response in example.responses),
        len(example.responses),
        None if unsolved is None else _response_text(unsolved),
        "" if unsolved is None else _explain_failure(unsolved),
    )


def _response_text(response: ExampleResponse) -> str:
    if response.messages is None:
        return response.text
    return transcript(response.messages)


def _explain_failure(response: ExampleResponse) -> str:
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
