"""`lowroll export RUN OUT --as merged|adapter|rollout`: a run's checkpoint as a folder for others."""
from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="lowroll export", description=(
        "Write a run's newest checkpoint as a model folder. merged: one dense model, the learner's. adapter: the LoRA "
        "adapter in PEFT's format. rollout: the low-bit policy that the engine samples from, bit for bit and without "
        "noise; of a LoRA run it is the adapter, with its quantised base in OUT/base."))
    p.add_argument("run", metavar="RUN", type=Path, help="the run folder (output_dir)")
    p.add_argument("out", metavar="OUT", type=Path, help="the folder to write; it must not exist")
    p.add_argument("--as", dest="kind", required=True, choices=("merged", "adapter", "rollout"))
    p.add_argument("--step", type=int, metavar="N", help="the checkpoint of step N (default: the newest)")
    return p


def run(arguments: argparse.Namespace) -> int:
    from lowroll.export import export_run
    from lowroll.quant.formats import get_format
    done = export_run(arguments.run, arguments.out, arguments.kind, arguments.step)
    print(f"{done.folder}: {arguments.kind} of step {done.step}, linear weights {done.format} "
          f"({get_format(done.format).bits:g} bits)\n"
          f"weight files: {done.bytes / 1e6:.1f} MB; of the model at the start: {done.bytes_before / 1e6:.1f} MB\n"
          f"try it: lowroll generate --model {done.folder} --weights {done.format}")
    return 0
