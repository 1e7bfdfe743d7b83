"""`lowroll demo`: build a tiny model and train it with INT8 rollouts, in a few minutes and without
a GPU; with --real, train a pretrained one."""

from __future__ import annotations

import argparse


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll demo",
        description=(
            "Build a small model and tokenizer, warm-start it, train it by GRPO with INT8 rollouts "
            "on reverse-text, and "
            "show what was learnt on held-out strings. Fails unless the held-out reward rose. With "
            "--real a pretrained model of 135 M parameters learns to answer in plain JSON."
        ),
    )
    p.add_argument(
        "--real", action="store_true", help="SmolLM2-135M-Instruct, after `lowroll fetch smollm2`"
    )
    p.add_argument(
        "--output-dir",
        help="folder of the model and the run (default outputs/demo, with --real outputs/demo-real)",
    )
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    return p


def run(arguments: argparse.Namespace) -> int:
    if arguments.real:
        from lowroll.runs.demo_real import main
    else:
        from lowroll.runs.demo import main

    folder_option = {} if arguments.output_dir is None else {"output_dir": arguments.output_dir}
    return int(main(**folder_option, seed=arguments.seed, device=arguments.device) or 0)
