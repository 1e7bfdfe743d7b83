"""Golden digests: what small runs through every room compute, bit for bit. A refactoring must leave
them as they are.

    python -m tests.goldens                     compare with those in tests/goldens/
    python -m tests.goldens --write             store them: numbers may change only with a reason in docs/LOG.md
    python -m tests.goldens --device cuda       tokens and log-probs of each format at 1, 24 and 256 rows
    python -m tests.goldens --against HEAD~3    what this machine computes there, and here

A run is three steps on a tiny model. Its digests: the tokens and log-probs of every rollout, the
reproducible metrics, the final weights. Floating-point products differ between processors and
versions of torch, so the stored digests carry the name of their machine; on another one,
`--against` compares two trees.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from lowroll import Engine, Request
from lowroll.metrics.record import reproducible
from lowroll.model import hf
from lowroll.transport.rollout_log import read_rollouts, rollout_files
from tests.fixtures.runs import copy_stopped_after
from tests.fixtures.tiny import hf_folder
from tests.fuzz_runs import GRADED, STEPS, TEMPLATES, build, merge, train

STORED = Path(__file__).with_name("goldens")
ROWS = (1, 24, 256)
FORMATS = ("fp32", "bf16", "int8", "fp8", "fp8_block", "int4", "int4_asym", "nvfp4", "mxfp4", "nf4")
ON_CUDA = ("bf16", "int8", "fp8", "fp8_block", "int4", "int4_asym", "nvfp4", "mxfp4", "nf4")
LORA = {
    "train": {"lora": True, "lora_rank": 3, "lora_target_modules": ["q_proj", "v_proj", "o_proj"]}
}
ALIGNED = {"train": {"forward": "aligned"}}
NOISE = {"noise": {"sigma_start": 0.02, "num_stages": 2}}

Digests = dict[str, dict[str, str]]  # case -> what -> SHA-256


def rollout(**settings: Any) -> dict[str, Any]:
    return {"rollout": settings}


RUNS: dict[str, list[dict[str, Any]]] = {
    "fp32 full": [rollout(weights="fp32"), {"train": {"minibatches": 2}}],
    "bf16 full bfloat16": [rollout(weights="bf16"), {"dtype": "bfloat16"}],
    "int8 full": [rollout(weights="int8"), {"correction": "acr"}],
    "int8 lora uaq": [rollout(weights="int8"), LORA, {"train": {"uaq_scale": 1.5}}],
    "fp8 tis": [rollout(weights="fp8"), {"correction": "tis"}],
    "int4 aligned": [rollout(weights="int4"), ALIGNED, {"correction": "tbpo"}],
    "nvfp4 lora noise": [rollout(weights="nvfp4"), LORA, NOISE],
    "nvfp4 lora aligned": [rollout(weights="nvfp4"), LORA, ALIGNED],
    "mxfp4 muon": [rollout(weights="mxfp4"), {"train": {"optimizer": "muon"}}],
    "nf4 shared noise": [
        rollout(weights="nf4"),
        merge({}, NOISE, {"noise": {"learner": "shared"}}),
        LORA,
    ],
    "ppo": [rollout(weights="int8"), {"algorithm": "ppo", "rollouts_per_example": 1}],
    "dapo dynamic sampling": [
        rollout(weights="fp8"),
        {"algorithm": "dapo", "dapo": {"dynamic_sampling": True, "max_rounds": 3}},
    ],
    "gspo reference": [rollout(weights="fp32"), {"algorithm": "gspo", "loss": {"kl_coef": 0.01}}],
    "rloo reweight": [rollout(weights="int8"), {"algorithm": "rloo", "correction": "reweight"}],
    "stages": [rollout(weights="int8"), {"stages": [{"step": 2, "max_tokens": 9}]}],
    "guard fallback": [
        rollout(weights="int4"),
        {"guard": {"action": "fallback", "ratio_above": 1.0001, "patience": 1}},
    ],
    "experts int8": [{"model": "experts"}, rollout(weights="int8"), {"train": {"minibatches": 2}}],
    "experts lora nvfp4": [{"model": "experts"}, rollout(weights="nvfp4"), LORA],
    "shared prompts in chunks": [
        rollout(weights="fp32", prefill_chunk=3, page_size=4, max_batch=5)
    ],
    "large batches": [
        rollout(
            weights="int4",
            large_batch_weights="int8",
            top_p=0.9,
            temperature=0.7,
            repetition_penalty=1.1,
        )
    ],
    "top-k and least tokens": [
        rollout(weights="fp8", top_k=20, min_tokens=2),
        {"correction": "sparse"},
    ],
    "adamw8bit ipo": [
        rollout(weights="int8"),
        {"train": {"optimizer": "adamw8bit"}, "correction": "ipo"},
    ],
}
RESUMED = ("int8 lora uaq", "ppo", "guard fallback", "experts int8")


def digest(parts: Iterable[bytes]) -> str:
    found = hashlib.sha256()
    for part in parts:
        found.update(struct.pack("<q", len(part)))
        found.update(part)
    return found.hexdigest()


def weights_in(folder: Path) -> Iterable[bytes]:
    """Name, type and bytes of every tensor of a model or adapter folder."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in sorted(file.keys()):
                tensor = file.get_tensor(name)
                yield f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode()
                yield tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def of_run(folder: Path, records: list[dict[str, Any]]) -> dict[str, str]:
    """The digests of a finished run."""
    samples = [
        sample
        for _, path in rollout_files(folder / "rollouts")
        for sample in read_rollouts(path).samples
    ]
    values = [
        (name, value) for record in records for name, value in sorted(reproducible(record).items())
    ]
    return {
        "tokens": digest(
            struct.pack(f"<{len(s.rollout.token_ids)}q", *s.rollout.token_ids) for s in samples
        ),
        "log-probs": digest(
            struct.pack(f"<{len(s.rollout.logprobs)}d", *s.rollout.logprobs) for s in samples
        ),
        "metrics": digest(json.dumps(pair).encode() for pair in values),
        "weights": digest(weights_in(folder / "final")),
    }


def runs(chosen: Iterable[str]) -> Digests:
    """The digests of the runs of these names, of some after a resumption too."""
    found: Digests = {}
    with tempfile.TemporaryDirectory() as scratch:
        models = build(Path(scratch) / "models")
        graded = Path(scratch) / "graded.py"
        graded.write_text(GRADED)
        envs = [
            {"id": str(graded), "name": name, "args": {"template": template}}
            for name, template in TEMPLATES.items()
        ]
        for name in chosen:
            tree = merge(
                {
                    "model": "dense",
                    "seed": 7,
                    "device": "cpu",
                    "batch_size": 16,
                    "rollouts_per_example": 4,
                    "env": envs,
                    "rollout": {"max_tokens": 6},
                    "score": {"workers": 1},
                    "force": True,
                    "ckpt": {"interval": 1, "keep_last": None},
                    "eval": {"interval": 2, "num_examples": 3},
                    "train": {"max_steps": STEPS, "learning_rate": 1e-2},
                },
                *RUNS[name],
            )
            tree["model"] = str(models[tree["model"]])
            folder = Path(scratch) / name.replace(" ", "-")
            result = train(tree, folder)
            found[name] = of_run(folder, result.records)
            if name in RESUMED:
                copy_stopped_after(folder, 1, folder.with_suffix(".cut"))
                again = train(tree, folder.with_suffix(".cut"), resume=True)
                found[f"{name}, resumed"] = of_run(again.folder, again.records)
            print(name, flush=True)
    return found


def decoding(device: str, formats: Iterable[str], rows: Iterable[int]) -> Digests:
    """The digests of what an engine draws: prompts of 3 to 40 tokens, a stop, shared prompts,
    several samples."""
    found: Digests = {}
    size = (
        dict(hidden_size=512, intermediate_size=1024, num_attention_heads=8, head_dim=64)
        if device == "cuda"
        else {"hidden_size": 64, "intermediate_size": 128}
    )
    with tempfile.TemporaryDirectory() as scratch:
        folder = hf_folder(Path(scratch) / "model", "qwen3", vocab_size=512, **size)
        for weights in formats:
            dtype = torch.float32 if weights == "fp32" else torch.bfloat16
            model = hf.load(folder, dtype=dtype, device=device)
            engine = Engine(model, weights=weights, cache_tokens=64 * max(rows) * 2)
            for count in rows:
                asked = [
                    Request(
                        id=str(i),
                        prompt_ids=[2 + (7 * i + k) % 500 for k in range(3 + 37 * (i % 2))],
                        max_tokens=24,
                        seed=i,
                        n=2 if count > 1 else 1,
                        temperature=0.8,
                        stop_ids=(5,),
                    )
                    for i in range((count + 1) // 2)
                ]
                groups = engine.generate(asked)
                drawn = [rollout for group in groups for rollout in group.rollouts]
                found[case(weights, count, device)] = {
                    "tokens": digest(
                        struct.pack(f"<{len(r.token_ids)}q", *r.token_ids) for r in drawn
                    ),
                    "log-probs": digest(
                        struct.pack(f"<{len(r.logprobs)}d", *r.logprobs) for r in drawn
                    ),
                }
            print(f"{weights} on {device}", flush=True)
    return found


def case(weights: str, count: int, device: str) -> str:
    return f"{weights}, {count} rows, {device}"


def cases(device: str) -> set[str]:
    """The names of what `compute` finds."""
    if device == "cuda":
        return {case(weights, count, device) for weights in ON_CUDA for count in ROWS}
    resumed = {f"{name}, resumed" for name in RESUMED}
    drawn = {case(weights, count, device) for weights in FORMATS for count in ROWS[:2]}
    return {*RUNS, *resumed, *drawn}


def compute(device: str) -> Digests:
    if device == "cuda":
        return decoding("cuda", ON_CUDA, ROWS)
    return runs(RUNS) | decoding("cpu", FORMATS, ROWS[:2])


def machine(device: str) -> str:
    """Return the name of what decides the bits of a product."""
    if device == "cuda":
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    described = (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    )
    names = [line.split(":")[1].strip() for line in described if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, torch {torch.__version__}"


def differences(before: Mapping[str, Mapping[str, str]], after: Digests) -> list[str]:
    """Return what differs, a line each."""
    lines = [
        f"{case}: {'gone' if case not in after else 'new'}"
        for case in sorted(before.keys() ^ after.keys())
    ]
    for case in sorted(before.keys() & after.keys()):
        other = [what for what in before[case] if before[case][what] != after[case].get(what)]
        if other:
            lines.append(f"{case}: other {', '.join(other)}")
    return lines


def at_commit(commit: str, device: str) -> Digests:
    """Compute a commit's digests, with its own tests, in a worktree of its own."""
    with tempfile.TemporaryDirectory() as scratch:
        tree, out = Path(scratch) / "tree", Path(scratch) / "digests.json"
        subprocess.run(
            ["git", "worktree", "add", "--detach", str(tree), commit], check=True, timeout=120
        )
        try:
            subprocess.run(
                [sys.executable, "-m", "tests.goldens", "--device", device, "--print", str(out)],
                cwd=tree,
                env={**os.environ, "PYTHONPATH": str(tree)},
                check=True,
                timeout=3600,
            )
            return dict(json.loads(out.read_text()))
        finally:
            subprocess.run(
                ["git", "worktree", "remove", "--force", str(tree)], check=True, timeout=120
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--write", action="store_true", help="store what is computed now")
    parser.add_argument(
        "--against", metavar="COMMIT", help="compare with what a commit computes on this machine"
    )
    parser.add_argument(
        "--print",
        metavar="FILE",
        type=Path,
        dest="out",
        help="write the digests to a file, and stop",
    )
    args = parser.parse_args()
    stored = STORED / f"{args.device}.json"
    compares = not (args.out or args.write or args.against)
    if compares and (there := json.loads(stored.read_text())["machine"]) != machine(args.device):
        print(f"stored on {there}: compare two trees here with --against COMMIT")
        return 2
    torch.set_num_threads(1)  # sums of a learner follow the number
    began = time.monotonic()
    found = compute(args.device)
    print(f"{len(found)} cases in {time.monotonic() - began:.0f} s on {machine(args.device)}")
    if args.out:
        args.out.write_text(json.dumps(found))
        return 0
    if args.write:
        STORED.mkdir(exist_ok=True)
        stored.write_text(
            json.dumps({"machine": machine(args.device), "digests": found}, indent=1) + "\n"
        )
        return 0
    if args.against:
        before = at_commit(args.against, args.device)
    else:
        before = json.loads(stored.read_text())["digests"]
    lines = differences(before, found)
    print("\n".join(lines) or "all the same")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
