"""What processes of their own cost, and what overlapping brings.

    python -m bench.roles tiny --cpu                  2 cores: a thread for the engine, one for the learner
    python -m bench.roles qwen2.5-1.5b --batch 512 --tokens 256 --cache 300000
                                                      two GPUs: launcher=local gives each side one

MODEL is a folder, or the name of shapes that get random weights. Adapters learn, so that it is not the
time of a disk that is measured. The same run in one process, by
roles at level 0, by roles at level 1, and by two engines and two ranks of the learner that share two
GPUs at level 0: seconds of a step (the median, the first two left out), and how long engine and
learner were idle in it. Rows go to bench/baselines/roles.json.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from bench import vocabulary
from bench.harness import Row, finish, merged, parser_of, settle
from bench.shapes import SHAPES, TINY, random_model
from lowroll.metrics.record import read
from lowroll.model import hf

MODELS = {**SHAPES, "tiny": TINY}
WAYS: dict[str, dict[str, Any]] = {
    "process": {},
    "roles-0": {"launcher": "local"},
    "roles-1": {"launcher": "local", "asynchrony": {"max_async_level": 1}},
    "both-on-both": {"launcher": "local", "train": {"gpus": 2}, "rollout": {"engines": 2}},
}
COMPARED = (
    ("roles-0", "process", 0.95),
    ("roles-1", "roles-0", 1.6),
    ("roles-1", "process", None),
    ("both-on-both", "process", None),
)
WARM = 2  # steps that are left out


def settings(args: argparse.Namespace, out: Path) -> dict[str, Any]:
    return {
        "model": args.model,
        "output_dir": str(out),
        "device": "cpu" if args.cpu else "cuda",
        "env": [{"id": "reverse-text"}],
        "batch_size": args.batch,
        "rollouts_per_example": 8,
        "rollout": {"max_tokens": args.tokens, "cache_tokens": args.cache},
        "train": {"max_steps": args.steps, "learning_rate": 1e-5, "lora": True, "lora_rank": 16},
        "eval": {"interval": None},
    }


def measure(args: argparse.Namespace, way: str, out: Path) -> dict[str, float]:
    file = out.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(merged(settings(args, out), WAYS[way])))
    env = os.environ | ({"OMP_NUM_THREADS": "1"} if args.cpu else {})
    command = [sys.executable, "-m", "lowroll", "grpo", str(file), *args.settings]
    subprocess.run(command, check=True, env=env, stdout=sys.stderr)
    records = read(out)[WARM:]

    def median(name: str) -> float:
        return statistics.median(float(record.get(name) or 0.0) for record in records)

    step, draws, learns = median("time/step"), median("time/generate"), median("time/learn")
    return {
        "step_s": step,
        "generate_s": draws,
        "learn_s": learns,
        "engine_idle": max(0.0, 1 - draws / step),
        "learner_idle": max(0.0, 1 - learns / step),
    }


def rows_of(title: str, found: dict[str, dict[str, float]], on_gpus: bool) -> list[Row]:
    """Return a row a way over one process, and level 1 over level 0. On a CPU all share its cores,
    and nothing is demanded."""
    rows = []
    for way, over, must in COMPARED:
        ours, other = (found[name]["step_s"] for name in (way, over))
        said = ", ".join(f"{name} {value:.3g}" for name, value in found[way].items())
        name = f"{title}: {way} over {over}"
        demand = must if on_gpus else None
        rows.append(Row(name, "s a step", ours, other, other / ours, must=demand, note=said))
    return rows


def folder(args: argparse.Namespace, scratch: Path) -> str:
    """Return the model's folder: as given, or made of random weights."""
    if args.model not in MODELS:
        return str(args.model)
    made = vocabulary.write(scratch / args.model, MODELS[args.model], chats=True)
    learner = random_model(MODELS[args.model], "cpu" if args.cpu else "cuda:0")
    hf.write(hf.contents(learner), made, None)
    return str(made)


def main() -> int:
    parser = parser_of(__doc__, steps=8, batch=64, tokens=64, cache=16384, cpu=False)
    parser.add_argument("model")
    parser.add_argument("settings", nargs="*", help="key=value, for every way")
    args = parser.parse_intermixed_args()
    _, out = settle(parser, "cpu" if args.cpu else "cuda", args.out)
    title = f"{Path(args.model).name}, {args.batch} x {args.tokens} tokens"
    found = {}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as scratch:
        args.model = folder(args, Path(scratch))
        for way in WAYS:
            found[way] = measure(args, way, Path(scratch) / way)
            print(way, json.dumps(found[way]), flush=True)
    rows = rows_of(title, found, not args.cpu)
    given = {"steps": args.steps, "settings": args.settings}
    return finish("Roles", "roles", rows, out, **given)


if __name__ == "__main__":
    raise SystemExit(main())
