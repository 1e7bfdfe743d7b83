"""Learning curves on a pretrained model: the same run with every format of the rollouts, and every
correction.

The subject is SmolLM2-135M-Instruct after a short SFT on word problems (`bench.subject`), which solves
a part of them. Every run of a seed starts from the same weights, draws the same prompts and makes the
same number of updates; only what its row of `ARMS` says differs. On a GPU learner and engine compute
in bfloat16, with float32 masters.

    lowroll fetch smollm2
    python -m bench.curves [--steps 80] [--seeds 3] [--first-seed 0] [--jobs 6] [--device auto]
                           [--only ARM ...] [--out FOLDER] [--work FOLDER] [--seconds S] [--change JSON]

merges each run into `curves.json` of the folder as it ends, and makes no run again that stands there
with the same settings and steps. `--work` keeps the warm-started model, logs and run folders. A
warm start on a GPU does not repeat to the bit: new pairs of arms get seeds that no stored run has.
`bench.claims` compares the arms; `docs/tables.py` and `python -m bench.pictures` make the tables and
pictures of docs/results.md.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from bench import subject
from bench.experiment import SUMMED, Experiment, Place, Runs, mean_over, spread, table
from bench.harness import merged, print_table
from lowroll.config import RunConfig
from lowroll.runs.demo import metrics_of

SOURCE = "smollm2"
SETTINGS: dict[str, Any] = {
    "batch_size": 512,
    "rollouts_per_example": 8,
    "algorithm": "grpo",
    "loss": {"reduce": "token-mean"},
    "rollout": {"max_tokens": 160, "max_batch": 512, "cache_tokens": 131072},
    "train": {
        "learning_rate": 2e-5,
        "warmup_steps": 5,
        "minibatches": 2,
        "weight_decay": 0.0,
        "tokens_per_microbatch": 8192,
    },
    "ckpt": {"interval": 10_000, "keep_last": 1},
    "sft": {
        "steps": 40,
        "batch_size": 32,
        "learning_rate": 1e-4,
        "warmup_steps": 10,
        "num_examples": 1280,
    },
}

# TBPO's bounds are on the geometric mean of a response's ratios. QaRL's 3e-4 ("narrow") belongs to
# its learning rate of 1e-6; the steps here are larger, and so are the bounds.
BANDS: dict[str, Any] = {"eps_low": 0.03, "eps_high": 0.04, "tbpo": {"eps_negative": 0.07}}
NARROW: dict[str, Any] = {"eps_low": 3e-4, "eps_high": 4e-4, "tbpo": {"eps_negative": 7e-4}}
LORA: dict[str, Any] = {"lora": True, "lora_rank": 32, "lora_alpha": 64, "learning_rate": 2e-4}
ALIGNED: dict[str, Any] = {"forward": "aligned"}
FP8_LEARNER: dict[str, Any] = {"forward": "fp8", "backward": "fp8"}

# The teacher is the same model after a longer SFT, on all demonstrations. AIPO as published.
TEACHER: dict[str, Any] = {"sft": {"steps": 400, "num_examples": 4096}}
TEACHER_FOLDER = "teacher-{steps}-of-{num_examples}".format(**TEACHER["sft"])
AIPO: dict[str, Any] = {"algorithm": "grpo_no_std"}
TAUGHT: dict[str, Any] = {
    **AIPO,
    "loss": {"aipo": {"teacher_tau": 1.0}},
    "train": {"teacher": f"{TEACHER_FOLDER}/model"},
}


def _arm(weights: str, correction: str, **changes: Any) -> dict[str, Any]:
    return merged({"rollout": {"weights": weights}, "correction": correction}, changes)


def _stale(level: int, correction: str, **changes: Any) -> dict[str, Any]:
    """Return an arm of rollouts that lag exactly `level` steps behind, by processes of their own."""
    lag = {"max_async_level": level, "strict_async_level": True}
    return _arm("bf16", correction, launcher="local", asynchrony=lag, **changes)


ARMS: dict[str, dict[str, Any]] = {
    "bf16": _arm("bf16", "none"),
    "int8 naive": _arm("int8", "is", force=True),
    "int8 decoupled": _arm("int8", "decoupled"),
    "int8 tis": _arm("int8", "tis"),
    "int8 acr": _arm("int8", "acr"),
    "int8 acr uaq": _arm("int8", "acr", train={"uaq_scale": 1.5}),
    "int8_rotated acr": _arm("int8_rotated", "acr"),
    "fp8 naive": _arm("fp8", "is", force=True),
    "fp8 acr": _arm("fp8", "acr"),
    "fp8 learner tis": _arm("fp8", "tis", train=FP8_LEARNER),
    "int4 naive": _arm("int4", "is", force=True),
    "int4 tis": _arm("int4", "tis"),
    "int4 acr": _arm("int4", "acr"),
    "int4 aligned tbpo": _arm("int4", "tbpo", train=ALIGNED, loss=BANDS),
    "int4 aligned tbpo narrow": _arm("int4", "tbpo", train=ALIGNED, loss=NARROW),
    "int8_rotated aligned tbpo": _arm("int8_rotated", "tbpo", train=ALIGNED, loss=BANDS),
    "int8_rotated aligned tbpo exact": _arm(
        "int8_rotated", "tbpo", train=ALIGNED, loss=BANDS, rollout={"exact": True}
    ),
    "nvfp4 naive": _arm("nvfp4", "is", force=True),
    "nvfp4 acr": _arm("nvfp4", "acr"),
    "nvfp4 noise acr": _arm("nvfp4", "acr", noise={}),
    "bf16 lora": _arm("bf16", "none", train=LORA),
    "nvfp4 lora": _arm("nvfp4", "tis", train=LORA),
    "nvfp4 lora noise": _arm("nvfp4", "acr", train=LORA, noise={}),
    "bf16 ppo": _arm("bf16", "none", algorithm="ppo"),
    "bf16 dapo": _arm("bf16", "none", algorithm="dapo"),
    "bf16 muon": _arm("bf16", "none", train={"optimizer": "muon"}),
    "int8 aipo": _arm("int8", "aipo", **AIPO),
    "int8 aipo teacher": _arm("int8", "aipo", **TAUGHT),
    "bf16 stale 1 tis": _stale(1, "tis"),
    "bf16 stale 2 tis": _stale(2, "tis"),
    "bf16 stale 4 tis": _stale(4, "tis"),
    "bf16 stale 4 naive": _stale(4, "is", force=True),
    "bf16 stale 4 none": _stale(4, "none", force=True),
}

CURVES = (
    "reward/mean",
    "mismatch/kl_k3",
    "mismatch/weight_max",
    "mismatch/ess",
    "policy/entropy",
    "rollout/length_mean",
    "rollout/truncated_fraction",
    "optim/grad_norm",
    "weights/codes_flipped_fraction",
    "time/step",
    "time/generate",
    "time/learn",
)
HELD_OUT = 1024  # greedy
SAMPLED = 256  # with SAMPLES each
SAMPLES = 8


def warm_start(place: Place) -> dict[str, Any]:
    """Write the problems, and the warm-started model as `folder/model`; return what is recorded of
    it, with its held-out scores."""
    return _supervised(place, place.folder, place.change)


def teacher(place: Place) -> dict[str, Any]:
    """Do `warm_start` with the steps and demonstrations of TEACHER, into a folder of its own."""
    change = merged(place.change, TEACHER)
    return _supervised(place, place.folder / TEACHER_FOLDER, change)


def _supervised(place: Place, into: Path, change: Mapping[str, Any]) -> dict[str, Any]:
    subject.write_problems(place.folder, subject.SIZES)
    supervised = {**change, "env": subject.environment(place.folder, "sft")}
    cfg = EXPERIMENT.config("bf16", 0, replace(place, steps=10, change=supervised))
    found = subject.warm(cfg, SOURCE, into)
    cfg = EXPERIMENT.config("bf16", 0, replace(place, steps=10))
    return found | scores(cfg, cfg, into / "model")


def scores(cfg: RunConfig, first: RunConfig, model: Path) -> dict[str, float]:
    """Return a model folder's held-out scores: greedy with dense weights and in the rollouts' own
    format, and of SAMPLES sampled responses their mean and the share of problems that one solves."""
    greedy = metrics_of(cfg, model, "dense", 0.0, HELD_OUT)
    sampled = metrics_of(cfg, model, "dense", 1.0, SAMPLED, SAMPLES)
    own = metrics_of(cfg, model, cfg.rollout.weights, 0.0, HELD_OUT)
    found = {
        "greedy": greedy["reward"],
        "sampled": sampled["reward"],
        "pass@8": sampled["pass_at_k"],
        "own": own["reward"],
    }
    return {name: round(score, 4) for name, score in found.items()}


def by_start(runs: Runs) -> list[dict[str, Any]]:
    """Return the runs; those that started from other weights than the first are arms of their own."""
    first = runs[0]["warm_start"]["sha256"]
    return [
        {**one}
        if one["warm_start"]["sha256"] == first
        else {**one, "variant": f"{one['variant']}, later seeds"}
        for one in runs
    ]


def _after(score: str) -> Callable[[Runs], str]:
    """Return the column of a score: its mean and range over the runs that have it."""
    return lambda runs: spread([one["after"][score] for one in runs if one["after"]])


def _mean_after(score: str) -> Callable[[Runs], str]:
    return lambda runs: _after(score)(runs).split()[0]


def _steps(runs: Runs) -> str:
    steps = [len(one["curves"]["reward/mean"]) for one in runs]
    return f"{min(steps)} to {max(steps)}"


COLUMNS: dict[str, Callable[[Runs], str]] = {
    "runs": lambda runs: str(len(runs)),
    "steps": _steps,
    "held out, greedy": _after("greedy"),
    "in its own format": _mean_after("own"),
    "sampled": _mean_after("sampled"),
    "pass@8": _mean_after("pass@8"),
    "reward, first 10 steps": mean_over("reward/mean", 10, ".3f"),
    "last 10": mean_over("reward/mean", -10, ".3f"),
    "KL, first 10 steps": mean_over("mismatch/kl_k3", 10, ".1e"),
    "KL, last 10": mean_over("mismatch/kl_k3", -10, ".1e"),
    "ESS, last 10": mean_over("mismatch/ess", -10, ".2f"),
    "entropy, last 10": mean_over("policy/entropy", -10, ".3f"),
    "tokens a response": mean_over("rollout/length_mean", -10, ".0f"),
}
HEAD = ("arm", *COLUMNS)
summary = partial(table, COLUMNS)  # means over the seeds, ranges in parentheses
EXPERIMENT = Experiment(
    "curves", SETTINGS, ARMS, warm_start, scores, CURVES, env=subject.environment, teacher=teacher
)


def main() -> None:
    """Make the runs that are missing, and store the curves."""
    args = EXPERIMENT.options(__doc__, steps=80, seeds=3, jobs=6).parse_args()
    print_table(HEAD, summary(EXPERIMENT.main(args)), SUMMED)


if __name__ == "__main__":
    main()
