"""Random whole runs of three steps: resumed after any of them, with and without evaluation, bit for
bit the same.

    python -m tests.fuzz_runs --runs 100 --seed 1

A run draws one value for each part of the configuration (format, LoRA, optimiser, algorithm,
correction, minibatches, noise, scaling, aligned forward, critic, reference, stages, sampler, guard,
prefix sharing, limits of the engine, the cache's bound and its bits, replay, repair) on a tiny dense
or mixture model. What the configuration refuses is drawn again. A run's learner and rollouts may
not depend on being stopped, nor on being evaluated; where rollouts are float32 and plain, and the
learner sees the keys that they saw, the mismatch is rounding.

A difference names its seed: `python -m tests.fuzz_runs --runs 1 --seed <seed>` runs it again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import lowroll
from lowroll.config import from_mapping
from lowroll.metrics.record import reproducible
from lowroll.runs import demo
from lowroll.runs.session import RunResult
from tests.fixtures.learner import mixture
from tests.fixtures.runs import TINY, copy_stopped_after, fingerprint

STEPS = 3
DENSE = TINY | {
    "hidden_size": 64,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": DENSE,
    "experts": DENSE | mixture(4, 64) | {"model_type": "qwen3_moe"},
}
TEMPLATES = {"short": "{text}", "long": "write a word that sorts before this one: {text}"}
GRADED = '''
import string

from lowroll.envs import GeneratedEnvironment
from lowroll.types import Score


class Graded(GeneratedEnvironment):
    """Every response has a reward of its own, so that an untrained model learns."""

    def __init__(self, *, name, seed=0, template="{text}"):
        super().__init__(name=name, seed=seed, template=template)

    def task(self, rng):
        return "".join(rng.choices(string.ascii_lowercase, k=3)), {}

    def score(self, prompt, text):
        return Score(sum(ord(letter) % 7 for letter in text) / 100)

    def gold(self, prompt):
        return "".join(map(chr, range(97, 105)))

    def perturbed(self, prompt):
        return ""
'''


def merge(tree: dict[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    for change in changes:
        for key, value in change.items():
            nested = isinstance(value, Mapping) and isinstance(tree.get(key), Mapping)
            tree[key] = merge(dict(tree[key]), value) if nested else value
    return tree


def choices(
    rng: random.Random, envs: list[dict[str, Any]], targets: list[str]
) -> list[dict[str, Any]]:
    """One value for each part of a configuration."""
    algorithm = rng.choice(["grpo", "grpo", "dr_grpo", "rloo", "dapo", "gspo", "ppo"])
    correction = rng.choice(
        [
            "auto",
            "auto",
            "none",
            "is",
            "decoupled",
            "tis",
            "acr",
            "tbpo",
            "sparse",
            "ipo",
            "reweight",
        ]
    )
    lora = {"train": {"lora": True, "lora_rank": 3, "lora_target_modules": targets}}
    return [
        {"algorithm": algorithm, "correction": correction, "force": True},
        {
            "rollout": {
                "weights": rng.choice(
                    ["fp32", "fp32", "bf16", "int8", "fp8", "int4", "nvfp4", "mxfp4", "nf4"]
                )
            }
        },
        {"dtype": rng.choice(["float32", "float32", "bfloat16"])},
        rng.choice(
            [
                {},
                {},
                lora,
                {"train": {"forward": "aligned"}},
                merge({"train": {"forward": "aligned"}}, lora),
            ]
        ),
        {
            "train": {
                "minibatches": rng.choice([1, 2, 4]),
                "optimizer": rng.choice(["adamw", "adamw", "muon"]),
                "tokens_per_microbatch": rng.choice([80, 200, 4096]),
            }
        },
        rng.choice([{}, {}, {"train": {"uaq_scale": 1.5}}]),
        rng.choice(
            [
                {},
                {},
                {
                    "noise": {
                        "sigma_start": 0.02,
                        "num_stages": 2,
                        "learner": rng.choice(["clean", "shared"]),
                    }
                },
            ]
        ),
        rng.choice([{}, {}, {"loss": {"kl_coef": 0.01}}]),
        rng.choice(
            [
                {},
                {"rollout": {"top_p": 0.9}},
                {"rollout": {"top_k": 20, "min_tokens": 2}},
                {"rollout": {"temperature": 0.7, "repetition_penalty": 1.1}},
            ]
        ),
        rng.choice(
            [
                {},
                {"rollout": {"prefill_chunk": rng.choice([3, 8])}},
                {"rollout": {"max_batch": 5}},
                {"rollout": {"page_size": 4, "cache_tokens": 256}},
                {"rollout": {"large_batch_weights": "int8"}},
            ]
        ),
        rng.choice(
            [
                {},
                {},
                {
                    "guard": {
                        "action": rng.choice(["fallback", "tighten"]),
                        "ratio_above": 1.001,
                        "patience": 2,
                    }
                },
            ]
        ),
        rng.choice([{}, {}, {"stages": [{"step": 2, "max_tokens": 9}]}]),
        rng.choice([{}, {}, {"dapo": {"dynamic_sampling": True, "max_rounds": 3}}]),
        {
            "rollouts_per_example": 1
            if algorithm == "ppo" and rng.random() < 0.6
            else rng.choice([2, 4])
        },
        {"env": rng.choice([envs, envs[:1], envs[1:]])},
        {"train": {"lr_scheduler_type": rng.choice(["constant", "cosine"])}},
    ]


def cache(rng: random.Random) -> dict[str, Any]:
    """The rollouts' cache, and what a learner does about it; half of them are plain."""
    if rng.random() < 0.5:
        return {}
    policy = rng.choice(["dense", "streaming", "h2o", "snapkv", "rkv"])
    kv: dict[str, Any] = {"policy": policy}
    if policy != "dense":
        kv |= {"budget": rng.choice([6, 10, 200]), "buffer": rng.choice([1, 3])}
    if policy in ("snapkv", "rkv"):
        kv |= {"window": 3}
    if policy == "dense" or rng.random() < 0.3:
        kv["dtype"] = "fp8"
    replays = policy != "dense" and rng.random() < 0.5
    return {
        "rollout": {"kv": kv},
        "train": {"replay_kv": replays},
        "loss": {"sparse": {"veto": 0.5, "repair": rng.choice([None, "mask"])}},
    }


def draw(seed: int, models: Mapping[str, Path], out: Path) -> dict[str, Any]:
    """The first valid configuration of a seed."""
    rng, kv_rng = random.Random(seed), random.Random(f"kv {seed}")
    graded = models["dense"].parent / "graded.py"
    graded.write_text(GRADED)
    envs = [
        {"id": str(graded), "name": name, "args": {"template": template}}
        for name, template in TEMPLATES.items()
    ]
    while True:
        name = rng.choice(["dense", "dense", "dense", "experts"])
        targets = ["q_proj", "v_proj", "o_proj"] + ["down_proj", "up_proj"] * (name == "dense")
        tree = merge(
            {
                "model": str(models[name]),
                "seed": seed,
                "device": "cpu",
                "batch_size": 16,
                "rollout": {"max_tokens": 6},
                "score": {"workers": 1},
                "ckpt": {"interval": 1, "keep_last": None},
                "eval": {"interval": 1, "num_examples": 3},
                "train": {"max_steps": STEPS, "learning_rate": 1e-2},
                "output_dir": str(out),
            },
            *choices(rng, envs, targets),
            cache(kv_rng),
        )
        try:
            from_mapping(tree)
            return tree
        except ValueError:
            continue


def train(tree: Mapping[str, Any], out: Path, resume: bool = False) -> RunResult:
    return lowroll.run(from_mapping({**tree, "output_dir": str(out)}), resume=resume)


def learnt(folder: Path, records: list[dict[str, Any]]) -> dict[str, str]:
    """Return what evaluation may not change."""
    prints = fingerprint(folder)
    kept = {name: prints[name] for name in prints if name.startswith(("step_", "final", "model"))}
    metrics = [
        {k: v for k, v in reproducible(r).items() if not k.startswith("eval/")} for r in records
    ]
    return kept | {"metrics": json.dumps(metrics, sort_keys=True)}


def exact(tree: Mapping[str, Any]) -> bool:
    """Return whether the learner sees the keys that the rollouts saw."""
    kv = tree["rollout"].get("kv", {"policy": "dense"})
    seen = kv["policy"] == "dense" or tree["train"]["replay_kv"]
    return seen and "dtype" not in kv


def differences(seed: int, models: Mapping[str, Path], folder: Path) -> list[str]:
    """Return what a seed's run does otherwise when it is resumed or not evaluated."""
    tree = draw(seed, models, folder / "whole")
    about = json.dumps({k: v for k, v in tree.items() if k not in ("output_dir", "score", "ckpt")})
    try:
        result = train(tree, folder / "whole")
    except Exception as error:
        return [f"{seed}: {type(error).__name__}: {error} in {about}"]
    found = []
    whole, step = fingerprint(result.folder), random.Random(seed).randint(1, STEPS - 1)
    copy_stopped_after(result.folder, step, folder / "cut")
    again = fingerprint(train(tree, folder / "cut", resume=True).folder)
    if again != whole:
        other = sorted(name for name in whole if whole[name] != again.get(name))
        found.append(f"{seed}: resumed after step {step}, not the same: {other}")
    blind = train({**tree, "eval": {"interval": None}}, folder / "blind")
    if learnt(blind.folder, blind.records) != learnt(result.folder, result.records):
        found.append(f"{seed}: without evaluation, not the same")
    plain = (
        tree["rollout"]["weights"] == "fp32"
        and tree["dtype"] == "float32"
        and not (
            {"top_p", "top_k", "repetition_penalty", "large_batch_weights"} & tree["rollout"].keys()
            or "noise" in tree
        )
        and exact(tree)
    )
    if plain and max(r["mismatch/kl_k3"] for r in result.records) > 1e-9:
        found.append(
            f"{seed}: a mismatch of {max(r['mismatch/kl_k3'] for r in result.records):.2g} nats"
        )
    return [f"{line} in {about}" for line in found]


def build(folder: Path) -> dict[str, Path]:
    return {name: demo.build_model(folder / name, 0, config) for name, config in MODELS.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    bad, began = 0, time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        models = build(Path(scratch) / "models")
        for done, seed in enumerate(range(args.seed, args.seed + args.runs), 1):
            folder = Path(scratch) / str(seed)
            for line in differences(seed, models, folder):
                bad += 1
                print(f"DIFFERENCE {line}", flush=True)
            shutil.rmtree(folder, ignore_errors=True)
            print(
                f"DONE {done} runs, {bad} differences, {time.monotonic() - began:.0f} s", flush=True
            )
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
