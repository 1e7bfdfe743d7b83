"""Learning with bounded and 8-bit caches: the same run with every cache, and every way to
correct for what it forgets.

The task is `chain`: a running sum, carried for some 350 tokens through a table that stands in the
prompt alone. The model is Qwen3-shaped with 3.2 M parameters, and warm-started by SFT on
demonstrations that slip now and then: it knows the task and makes mistakes. Every run of a seed
starts from the same weights and draws the same prompts; only what its row of `ARMS` says differs.
Learner and rollouts are in float32, so that what is measured is the cache.

    python -m bench.sparse [--steps 40] [--seeds 3] [--jobs 12] [--device auto] [--only ARM ...]
                           [--out FOLDER] [--work FOLDER] [--change JSON]

merges each run into `sparse.json` of the folder as it ends, and makes no run again that stands there
with the same settings and steps; runs of others are replaced. `--work` keeps the warm-started
model, logs and run folders. `docs/tables.py` and `python -m bench.pictures` make the table and the
picture of docs/results.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from bench import subject
from bench.experiment import SUMMED, Experiment, Place, Runs, mean_of, mean_over, spread, table
from bench.harness import print_table
from lowroll.config import RunConfig
from lowroll.envs.chain import Chain
from lowroll.runs.assembly import environments
from lowroll.runs.demo import CONFIG as DEMO
from lowroll.runs.demo import build_model, reward_of

MODEL: dict[str, Any] = {
    **DEMO,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}

SETTINGS: dict[str, Any] = {
    "env": [
        {
            "id": "chain",
            "args": {
                "template": "{text}",
                "entries": 6,
                "max_amount": 3,
                "min_rounds": 16,
                "max_rounds": 16,
            },
        }
    ],
    "batch_size": 256,
    "rollouts_per_example": 8,
    "algorithm": "grpo",
    "correction": "none",
    "dtype": "float32",
    "loss": {"reduce": "token-mean"},
    "rollout": {"weights": "dense", "max_tokens": 400, "max_batch": 256, "cache_tokens": 131072},
    "train": {
        "learning_rate": 5e-5,
        "warmup_steps": 3,
        "minibatches": 2,
        "weight_decay": 0.0,
        "tokens_per_microbatch": 32768,
    },
    "ckpt": {"interval": 10_000, "keep_last": 1},
    "sft": {
        "steps": 400,
        "batch_size": 64,
        "learning_rate": 1e-3,
        "warmup_steps": 20,
        "num_examples": 12800,
    },
}
# Of the demonstrations' sums, so that a warm start that has learnt all there is to learn still
# solves a part of the tasks alone, and no digit is as improbable as what a cache forgets.
SLIP = 0.009

# A window of 32 queries sees a whole round, and so every amount of the table in use; the papers' 8
# and 7, and R-KV's mix of 0.1, are meant for texts whose tokens are words.
BOUNDS = {"budget": 208, "buffer": 32}
SNAPKV: dict[str, Any] = {"policy": "snapkv", **BOUNDS, "window": 32, "kernel": 3}
RKV: dict[str, Any] = {**SNAPKV, "policy": "rkv", "mix": 0.5}


def _arm(kv: dict[str, Any], correction: str, **changes: Any) -> dict[str, Any]:
    return {"rollout": {"kv": kv}, "correction": correction, **changes}


ARMS: dict[str, dict[str, Any]] = {
    "dense": {},
    "rkv naive": _arm(RKV, "none", force=True),
    "rkv sparse-rl": _arm(RKV, "sparse"),
    "rkv capped": _arm(RKV, "sparse", loss={"sparse": {"xi_cap": 1.5}}),
    "snapkv sparse-rl": _arm(SNAPKV, "sparse"),
    "rkv replay": _arm(RKV, "auto", train={"replay_kv": True}),
    "rkv repair": _arm(RKV, "sparse", loss={"sparse": {"repair": "mask"}}),
    "fp8 cache": _arm({"policy": "dense", "dtype": "fp8"}, "auto"),
    "streaming sparse-rl": _arm({"policy": "streaming", **BOUNDS}, "sparse"),
}

CURVES = (
    "reward/mean",
    "mismatch/kl_k3",
    "mismatch/weight_min",
    "mismatch/weight_max",
    "mismatch/ess",
    "policy/entropy",
    "rollout/length_mean",
    "optim/grad_norm",
    "time/step",
    "time/generate",
    "time/learn",
)
FAMILIES = ("kv/", "correction/")  # all metrics of these names are stored too
HELD_OUT = 256


def warm_start(place: Place) -> dict[str, Any]:
    """Write the warm-started model as `folder/model`; return what is recorded of it, with its
    held-out rewards."""
    folder = place.folder
    cfg = EXPERIMENT.config("dense", 0, replace(place, steps=10))
    data = demonstrated(cfg, folder / "demonstrations.jsonl")
    cfg = cfg.model_copy(update={"sft": cfg.sft.model_copy(update={"data": str(data)})})
    untrained = build_model(folder / "untrained", 0, MODEL)
    return {
        **subject.warm(cfg, str(untrained), folder),
        "dense": reward_of(cfg, folder / "model", "dense", count=HELD_OUT),
        "greedy": reward_of(cfg, folder / "model", "dense", 0.0, HELD_OUT),
    }


def demonstrated(cfg: RunConfig, path: Path) -> Path:
    """Write the demonstrations: gold responses in which a sum is off with probability SLIP, any
    other residue alike, and is carried on from there."""
    (env,) = environments.make(cfg.env, cfg.seed).values()
    assert isinstance(env, Chain)
    rng = Random(cfg.seed)
    with path.open("w") as file:
        for index in range(cfg.sft.num_examples):
            prompt, off, sums = env.prompt(index), 0, []
            for right in prompt.info["sums"]:
                off += rng.randrange(1, env.modulus) if rng.random() < SLIP else 0
                sums.append((right + off) % env.modulus)
            response = {"role": "assistant", "content": env.written(sums)}
            file.write(json.dumps({"messages": [*prompt.messages, response]}) + "\n")
    return path


def before(cfg: RunConfig, model: Path) -> dict[str, Any]:
    return {"before": {"own": reward_of(cfg, model, "dense", count=HELD_OUT)}}


def scores(cfg: RunConfig, dense: RunConfig, model: Path) -> dict[str, float]:
    """Return a model folder's held-out rewards: sampled and greedy with a dense cache, and sampled
    with the arm's own."""
    return {
        "dense": reward_of(dense, model, "dense", count=HELD_OUT),
        "greedy": reward_of(dense, model, "dense", 0.0, HELD_OUT),
        "own": reward_of(cfg, model, "dense", count=HELD_OUT),
    }


REJECTED = "correction/rejected_sequence_fraction"
SAVED = "kv/saving_final"


def _after(score: str) -> Callable[[Runs], str]:
    return lambda runs: spread([one["after"][score] for one in runs])


def _last_rewards(runs: Runs) -> str:
    means = [mean_of(one, "reward/mean", -10) for one in runs]
    return spread([mean for mean in means if mean is not None])


COLUMNS: dict[str, Callable[[Runs], str]] = {
    "runs": lambda runs: str(len(runs)),
    "reward, last 10 steps": _last_rewards,
    "held out, dense cache": _after("dense"),
    "own cache, before": lambda runs: f"{fmean(one['before']['own'] for one in runs):.3f}",
    "own cache, after": _after("own"),
    "rejected": mean_over(REJECTED, None, ".3f"),
    "KL, first 10 steps": mean_over("mismatch/kl_k3", 10, ".1e"),
    "KL, last 10": mean_over("mismatch/kl_k3", -10, ".1e"),
    "entropy, last 10": mean_over("policy/entropy", -10, ".4f"),
    "tokens saved": mean_over(SAVED, None, ".2f"),
}
HEAD = ("arm", *COLUMNS)
summary = partial(table, COLUMNS)  # means over the seeds, ranges in parentheses
EXPERIMENT = Experiment(
    "sparse",
    SETTINGS,
    ARMS,
    warm_start,
    scores,
    CURVES,
    FAMILIES,
    before=before,
    slowest="rkv replay",
)


def main() -> None:
    """Make the runs that are missing, and store the curves."""
    args = EXPERIMENT.options(__doc__, steps=40, seeds=3, jobs=12).parse_args()
    print_table(HEAD, summary(EXPERIMENT.main(args)), SUMMED)


if __name__ == "__main__":
    main()
