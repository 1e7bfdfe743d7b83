"""`lowroll demo`: build a tiny model and train it with INT8 rollouts, in a few minutes and without
a GPU."""

from __future__ import annotations

import argparse


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll demo",
        description=(
            "Build a small model and tokenizer, warm-start it, train it by GRPO with INT8 rollouts "
            "on reverse-text, and "
            "show what was learnt on held-out strings. Fails unless the held-out reward rose."
        ),
    )
    p.add_argument("--output-dir", default="outputs/demo", help="folder of the model and the run")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return p


def run(arguments: argparse.Namespace) -> int:
    from lowroll.runs.demo import main

    return int(
        main(output_dir=arguments.output_dir, seed=arguments.seed, device=arguments.device) or 0
    )
