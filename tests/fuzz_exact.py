"""Random engines and requests under `rollout.exact`, against the learner's score of what they drew.

    python -m tests.fuzz_exact --mixes 20000 [--first SEED]

A mix is an engine of a random page size, cache, batch, chunk and lookahead, over a random family, format
and adapter, and two calls of random requests. Every recorded log-prob must be the learner's, bit for bit;
the first that is not names the seed that repeats it.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from functools import cache
from pathlib import Path

import torch

from lowroll.model.transformer import Transformer
from lowroll.quant.table import low_bit
from tests.fixtures.exact import check, exact_model, format_of
from tests.fixtures.tiny import hf_folder

FAMILIES = ("qwen3", "llama-biases", "qwen2-tied", "mistral-mqa", "qwen3-moe")
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 64}


def main() -> int:
    parser = argparse.ArgumentParser(description="A fuzz of rollout.exact.")
    parser.add_argument("--mixes", type=int, default=20000)
    parser.add_argument("--first", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as home:

        @cache
        def model_of(family: str, format: str, adapter: bool) -> Transformer:
            folder = Path(home) / family
            if not folder.exists():
                hf_folder(folder, family, intermediate_size=128, **HEADS)
            return exact_model(folder, format, adapter)

        tokens = 0
        for seed in range(args.first, args.first + args.mixes):
            draw = random.Random(seed)
            torch.set_num_threads(draw.choice((1, 1, 2, 3)))
            format = draw.choice(("fp32", "mixed", *low_bit()))
            try:
                model = model_of(draw.choice(FAMILIES), format, draw.random() < 0.5)
                tokens += check(model, format_of(model), seed)
            except AssertionError:
                print(f"seed {seed}, {format}: a recorded log-prob is not the learner's")
                return 1
            except ValueError as error:
                if "which two parts of a fused matrix" not in str(error):
                    raise
            if (seed + 1 - args.first) % 500 == 0:
                print(f"{seed + 1 - args.first} mixes, {tokens} tokens: no difference", flush=True)
    print(f"{args.mixes} mixes, {tokens} tokens: no difference")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
