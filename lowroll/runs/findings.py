"""Files of an evaluation beside its responses: `results.json`, the table's rows, and
`failures.html`, the unsolved examples."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowroll.checkpoint.files import write_file
from lowroll.config import RunConfig
from lowroll.metrics.failures import Attempt, Failure, failure_page, transcript
from lowroll.orchestrator.examples import Example, ExampleResponse
from lowroll.runs.comparison import EngineAnswers, shown
from lowroll.types import Score, ScoreError

RESULTS = "results.json"
PAGE = "failures.html"
FOLDER = Path("outputs/eval")
# settings that do not affect responses
_ASIDE = ("output_dir", "name", "env", "train", "loss", "advantage", "ckpt", "score", "eval")


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
    """Write both files, each atomically."""
    write_file(out / RESULTS, json.dumps({"rows": rows}, indent=1).encode())
    drawn = cfg.eval
    facts = [
        ("model", str(cfg.model)),
        ("sampler", f"temperature {drawn.temperature:g}, top-p {drawn.top_p:g}"),
        ("longest response", f"{cfg.rollout.max_tokens:,} tokens"),
        ("seed", str(cfg.seed)),
    ]
    title = f"Evaluation of {Path(str(cfg.model)).name}"
    text = failure_page(title, facts, shown(rows), _failures(measured))
    write_file(out / PAGE, text.encode(errors="replace"))


def _failures(measured: Sequence[EngineAnswers]) -> dict[str, list[Failure]]:
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
    """Return a response's text, or all turns after the prompt."""
    if response.messages is None:
        return response.text
    return transcript(response.messages)


def _note(response: ExampleResponse) -> str:
    """Return why a response is not solved, if known."""
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
