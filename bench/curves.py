"""Learning curves: the same run with every price of rollouts and every way to pay for the mismatch.

The task is `arithmetic` (expressions reduced line by line) for a Qwen3-shaped model of 3.2 M
parameters, warm-started by SFT until it solves part of it. Every run of a seed starts from the same
weights, draws the same prompts and makes the same number of updates; only what its row of
`VARIANTS` says differs. The learner is in float32, so that what is measured is the rollouts' price.
Runs go side by side in processes of their own, one thread each: they are small.

    python -m bench.curves [--steps 150] [--seeds 3] [--jobs 8] [--device auto]
                           [--out FOLDER] [--only NAME ...] [--change JSON]

writes `curves.json` (every curve of every run, the machine and the settings) into the folder;
`docs/tables.py` makes the tables and pictures of docs/results.md from it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from bench.harness import RESULTS, OneOf, SomeOf, here, merged, parser_of, print_table
from lowroll.config import RunConfig, from_mapping
from lowroll.runs.demo import CONFIG as DEMO
from lowroll.runs.demo import build_model, reward_of
from lowroll.runs.grpo import run
from lowroll.runs.sft import warm_start

MODEL: dict[str, Any] = {
    **DEMO,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}

SETTINGS: dict[str, Any] = {
    "env": [
        {
            "id": "arithmetic",
            "args": {"template": "{text}", "min_steps": 1, "max_steps": 3, "max_operand": 9},
        }
    ],
    "batch_size": 1024,
    "rollouts_per_example": 8,
    "algorithm": "grpo",
    "dtype": "float32",
    "loss": {"reduce": "token-mean"},
    "rollout": {"max_tokens": 48, "max_batch": 1024, "cache_tokens": 131072},
    "train": {
        "learning_rate": 4e-5,
        "warmup_steps": 5,
        "minibatches": 4,
        "weight_decay": 0.0,
        "tokens_per_microbatch": 16384,
    },
    "ckpt": {"interval": 10_000, "keep_last": 1},
    "sft": {
        "steps": 450,
        "batch_size": 128,
        "learning_rate": 1e-3,
        "warmup_steps": 20,
        "num_examples": 65536,
    },
}

# TBPO's bounds are on the geometric mean of a response's ratios. QaRL's 3e-4 belongs to its
# learning rate of 1e-6; the steps here are some hundred times as large, and so are the bounds.
BANDS: dict[str, Any] = {"eps_low": 0.03, "eps_high": 0.04, "tbpo": {"eps_negative": 0.07}}

VARIANTS: dict[str, dict[str, Any]] = {
    "bf16": {"rollout": {"weights": "bf16"}, "correction": "none"},
    "fp8 naive": {"rollout": {"weights": "fp8"}, "correction": "is", "force": True},
    "int4 naive": {"rollout": {"weights": "int4"}, "correction": "is", "force": True},
    "int4 uncorrected": {"rollout": {"weights": "int4"}, "correction": "none", "force": True},
    "int4 tis": {"rollout": {"weights": "int4"}, "correction": "tis"},
    "int4 acr": {"rollout": {"weights": "int4"}, "correction": "acr"},
    "int4 acr uaq": {
        "rollout": {"weights": "int4"},
        "correction": "acr",
        "train": {"uaq_scale": 1.5},
    },
    "int4 aligned tbpo": {
        "rollout": {"weights": "int4"},
        "correction": "tbpo",
        "train": {"forward": "aligned"},
        "loss": BANDS,
    },
    "bf16 noise": {"rollout": {"weights": "bf16"}, "correction": "acr", "noise": {}},
    "nvfp4": {"rollout": {"weights": "nvfp4"}, "correction": "acr"},
    "nvfp4 noise": {"rollout": {"weights": "nvfp4"}, "correction": "acr", "noise": {}},
}

CURVES = (
    "reward/mean",
    "mismatch/kl_k3",
    "mismatch/weight_max",
    "mismatch/ess",
    "policy/entropy",
    "rollout/length_mean",
    "optim/grad_norm",
    "weights/codes_flipped_fraction",
    "time/step",
    "time/generate",
    "time/learn",
)
HELD_OUT = 512


def settings(
    variant: str, seed: int, steps: int, folder: Path, device: str, change: Mapping[str, Any]
) -> RunConfig:
    """Return the run of a variant and a seed, as a user's YAML file would say it."""
    tree = merged(merged(SETTINGS, change), VARIANTS[variant])
    return placed(tree, variant, seed, steps, folder, device)


def placed(
    tree: Mapping[str, Any], name: str, seed: int, steps: int, folder: Path, device: str
) -> RunConfig:
    """Return settings with a run's own name, seed and place."""
    place = {
        "model": str(folder / "model"),
        "output_dir": str(folder / f"{name.replace(' ', '-')}-{seed}"),
        "seed": seed,
        "device": device,
        "train": {"max_steps": steps},
    }
    return from_mapping(merged(tree, place))


def warm_started(folder: Path, device: str, change: Mapping[str, Any]) -> dict[str, float]:
    """Write the warm-started model as `folder/model`; returns its held-out reward before
    training."""
    cfg = settings("bf16", 0, 10, folder, device, change)
    loss = warm_start(cfg, build_model(folder / "untrained", 0, MODEL), folder / "model")[
        "sft/loss"
    ]
    return {"sft_loss": loss, **rewards(cfg, folder / "model")}


def rewards(cfg: RunConfig, model: Path) -> dict[str, float]:
    """Return the mean reward of a model folder on held-out expressions, with its dense weights."""
    return {
        name: reward_of(cfg, model, "dense", temperature, HELD_OUT)
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0))
    }


def train(
    variant: str,
    seed: int,
    gpu: int,
    *,
    steps: int,
    folder: Path,
    device: str,
    change: Mapping[str, Any],
) -> dict[str, Any]:
    """Run in a process of its own; return its curves and what its final model reaches."""
    began = time.monotonic()
    cfg = settings(variant, seed, steps, folder, device, change)
    with alone(gpu, cfg):
        result = run(cfg)
        after = rewards(cfg, result.folder / "final")
    curves = {name: [short(record.get(name)) for record in result.records] for name in CURVES}
    shutil.rmtree(result.folder)
    return made(variant, seed, began, after=after, curves=curves)


@contextmanager
def alone(gpu: int, cfg: RunConfig) -> Iterator[None]:
    """Use one thread and one GPU, and print into a file beside the run."""
    torch.set_num_threads(1)
    if cfg.device != "cpu" and torch.cuda.is_available():
        torch.cuda.set_device(gpu)
    folder = Path(cfg.output_dir)
    with folder.with_name(f"{folder.name}.log").open("w") as log:
        with redirect_stdout(log), redirect_stderr(log):
            yield


def made(name: str, seed: int, began: float, **found: Any) -> dict[str, Any]:
    """Return what is stored of a run."""
    return {"variant": name, "seed": seed, "seconds": round(time.monotonic() - began, 1), **found}


def short(value: object) -> float | None:
    """Return a number as it is stored, with five digits."""
    return None if value is None else float(f"{float(str(value)):.5g}")


SUMMED = "mean over the seeds (smallest to largest)"
HEAD = (
    "variant",
    "reward, last 10 steps",
    "held out, dense weights",
    "KL, first 10 steps",
    "KL, last 10",
    "largest weight",
    "entropy, last 10",
)


def summary(runs: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return a row of HEAD for each variant: means over its seeds, ranges in parentheses."""
    rows = []
    for variant in dict.fromkeys(one["variant"] for one in runs):
        own = [one for one in runs if one["variant"] == variant]
        last = {
            name: [statistics.fmean(one["curves"][name][-10:]) for one in own]
            for name in ("reward/mean", "mismatch/kl_k3", "policy/entropy")
        }
        first_kl = [statistics.fmean(one["curves"]["mismatch/kl_k3"][:10]) for one in own]
        rows.append(
            (
                variant,
                spread(last["reward/mean"]),
                spread([one["after"]["sampled"] for one in own]),
                f"{statistics.fmean(first_kl):.1e}",
                f"{statistics.fmean(last['mismatch/kl_k3']):.1e}",
                f"{max(value for one in own for value in one['curves']['mismatch/weight_max']):.1f}",
                f"{statistics.fmean(last['policy/entropy']):.3f}",
            )
        )
    return rows


def spread(values: Sequence[float]) -> str:
    """Return mean, smallest and largest of the seeds."""
    return f"{statistics.fmean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def main() -> None:
    """Run every variant with every seed and store the curves."""
    args = options(__doc__, VARIANTS, steps=150, jobs=8).parse_args()
    console, began, runs, change = Console(width=120), time.monotonic(), [], json.loads(args.change)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        before = warm_started(folder, args.device, change)
        console.print(f"warm start: {before} in {time.monotonic() - began:.0f} s")
        work = partial(train, steps=args.steps, folder=folder, device=args.device, change=change)
        about = about_runs(args, merged(SETTINGS, change)) | {"before": before}
        jobs = [(name, seed) for seed in range(args.seeds) for name in args.only]
        for last in side_by_side(work, jobs, args.jobs):
            runs.append(last)
            console.print(
                f"{len(runs)} of {len(jobs)}: {last['variant']}, seed {last['seed']}, "
                f"{last['seconds']} s, {last['after']}"
            )
            seconds = round(time.monotonic() - began)
            store(args.out / "curves.json", about | {"seconds": seconds}, runs, VARIANTS)
    print_table(HEAD, summary(runs), SUMMED)
    console.print(f"{args.out / 'curves.json'}, {time.monotonic() - began:.0f} s")


def side_by_side(
    work: Callable[[str, int, int], dict[str, Any]], jobs: Sequence[tuple[str, int]], count: int
) -> Iterator[dict[str, Any]]:
    """What `work(name, seed, gpu)` returns for every job, as they finish: `count` at a time, each
    in a process of its own. The first error of a job is raised when the others have ended."""
    context, gpus = multiprocessing.get_context("spawn"), max(1, torch.cuda.device_count())
    with ProcessPoolExecutor(count, mp_context=context, max_tasks_per_child=1) as pool:
        waiting = [pool.submit(work, *job, i % gpus) for i, job in enumerate(jobs)]
        failed = []
        for done in as_completed(waiting):
            if (error := done.exception()) is None:
                yield done.result()
            else:
                failed.append(error)
                print(f"a run failed: {type(error).__name__}: {error}", file=sys.stderr)
    if failed:
        raise failed[0]


def options(
    doc: str | None, names: Sequence[str] | Mapping[str, Any], steps: int, jobs: int
) -> argparse.ArgumentParser:
    """Return the options of an experiment of many runs."""
    parser = parser_of(
        doc,
        out=RESULTS,
        steps=steps,
        seeds=3,
        jobs=jobs,
        device=OneOf(("auto", "cpu", "cuda"), "auto"),
        only=SomeOf(names),
    )
    parser.add_argument("--change", default="{}", help="JSON of settings that differ from SETTINGS")
    return parser


def about_runs(args: argparse.Namespace, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is stored beside the runs of an experiment."""
    about = here(steps=args.steps, settings=settings)
    return about | {"machine": {**about["machine"], "device": device_name(args.device)}}


def store(
    path: Path, about: Mapping[str, Any], runs: list[dict[str, Any]], order: Mapping[str, Any]
) -> None:
    """Write the finished runs, sorted by name and seed, so that a stopped command keeps them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    runs.sort(key=lambda one: (list(order).index(one["variant"]), one["seed"]))
    path.write_text(json.dumps({**about, "runs": runs}) + "\n")


def device_name(asked: str) -> str:
    """Return the GPUs of this machine, or cpu."""
    cuda = torch.cuda.is_available() and asked != "cpu"
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}" if cuda else "cpu"


if __name__ == "__main__":
    main()
