"""A run with `rollout.exact`: in how many steps what was recorded is, bit for bit, what the learner
computes.

Prompts are read in pieces, rows wait for room, and micro-batches are small, so that few tokens have the
same neighbours on both sides. Rows are added to `exact.json`, of a GPU to `exact-gpu.json`.

    python -m bench.same_bits [--model smollm2] [--steps 200] [--device cpu] [--full] [--weights FORMAT]
                              [--microbatch TOKENS]
    python -m bench.same_bits --device cuda --shape qwen2.5-7b --env reverse_text

--shape: random weights of `bench.shapes` with the tokenizer and the vocabulary of --model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from bench.exact import FILES
from bench.harness import BASELINES, Row, finish, parser_of
from bench.shapes import SHAPES, random_model
from lowroll import run
from lowroll.config import from_mapping
from lowroll.metrics.record import read
from lowroll.model import hf
from lowroll.model.folder import resolve
from lowroll.model.spec import read_spec

EQUAL = "mismatch/logp_diff_max"


def prove(args: argparse.Namespace, folder: Path) -> list[Row]:
    """Run, and count the steps with the same bits."""
    model, name = resolve(args.model), args.shape or args.model
    if args.shape:
        sizes = {**SHAPES[args.shape], "vocab_size": read_spec(model).vocab_size}
        random = random_model(sizes, args.device)
        model = hf.save(random, folder / "model", tokenizer_from=model)
        del random
    tree = {
        "model": str(model),
        "device": args.device,
        "output_dir": str(folder / "run"),
        "env": [{"id": args.env}],
        "batch_size": 8,
        "rollouts_per_example": 4,
        "rollout": {
            "weights": args.weights,
            "exact": True,
            "max_tokens": 32,
            "prefill_chunk": 24,
            "max_batch": 5,
        },
        "train": {
            "max_steps": args.steps,
            "lora": not args.full,
            "learning_rate": 1e-6 if args.full else 1e-4,
            "tokens_per_microbatch": args.microbatch,
        },
        "ckpt": {"interval": args.steps},
    }
    records = read(run(from_mapping(tree)).folder)
    print(
        *(f"{r['step']}: reward {r['reward/mean']:.3f}, {EQUAL} {r[EQUAL]}" for r in records),
        sep="\n",
    )
    same = sum(record[EQUAL] == 0 for record in records)
    first, last = (
        statistics.mean(r["reward/mean"] for r in some) for some in (records[:10], records[-10:])
    )
    how = f"{name} {args.weights} {'full' if args.full else 'LoRA'}"
    return [
        Row(
            f"{how}: steps with the same bits on both sides, of {args.steps}",
            "steps",
            float(same),
            must=float(args.steps),
            goal="ours at least",
            note=f"reward of the first ten {first:.2f}, of the last {last:.2f}; no correction",
        )
    ]


def main() -> int:
    parser = parser_of(
        __doc__,
        out=BASELINES,
        model="smollm2",
        device="cpu",
        env="records",
        weights="int8_rotated",
        steps=200,
        microbatch=300,
        full=False,
    )
    parser.add_argument("--shape", choices=SHAPES)
    args = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = prove(args, Path(folder))
    file, title = (
        FILES.get(args.device, "exact-gpu"),
        f"rollout.exact ({time.monotonic() - began:.0f} s)",
    )
    return finish(title, file, rows, args.out)


if __name__ == "__main__":
    raise SystemExit(main())
