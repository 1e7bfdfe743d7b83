"""`lowroll export RUN OUT --as merged|adapter|rollout`: a run's checkpoint as a folder."""

from __future__ import annotations

import argparse
from pathlib import Path

_GAP_CAUSES = {
    "merged": "rounding the sums",
    "adapter": "on the model as it is named, not on the base it states",
}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll export",
        description=(
            "Write a run's newest checkpoint as a model folder. merged: one dense model, the "
            "learner's. adapter: the LoRA adapter in PEFT's format, for the base that it states. "
            "rollout: the low-bit policy that the engine samples from, bit for bit and without "
            "noise; of a LoRA run it is the adapter, with its quantized base in OUT/base."
        ),
    )
    p.add_argument(
        "run",
        metavar="RUN",
        type=Path,
        help="the run folder (output_dir), or an adapter folder (merged, rollout)",
    )
    p.add_argument("out", metavar="OUT", type=Path, help="the folder to write; it must not exist")
    p.add_argument("--as", dest="kind", required=True, choices=("merged", "adapter", "rollout"))
    p.add_argument(
        "--step", type=int, metavar="N", help="the checkpoint of step N (default: the newest)"
    )
    p.add_argument(
        "--push-to-hub",
        metavar="ORG/NAME",
        help="and put OUT there, with a card, as a private repository",
    )
    return p


def run(arguments: argparse.Namespace) -> int:
    from lowroll.quant.formats import get_format
    from lowroll.runs import hub
    from lowroll.runs.export import export_run

    hub.check(arguments.push_to_hub)
    exported = export_run(arguments.run, arguments.out, arguments.kind, arguments.step)
    subject = "an adapter" if exported.step is None else f"step {exported.step}"
    if exported.gap is None:
        gap = ""
    else:
        gap = f"\nfrom the learner, {_GAP_CAUSES[arguments.kind]}: {exported.gap}"
    print(
        f"{exported.folder}: {arguments.kind} of {subject}, linear weights {exported.format} "
        f"({get_format(exported.format).bits:g} bits){gap}\n"
        f"weight files: {exported.bytes / 1e6:.1f} MB; of the model at the start: "
        f"{exported.bytes_before / 1e6:.1f} MB\n"
        + (f"note: {exported.note}\n" if exported.note else "")
        + f"try it: lowroll generate --model {exported.folder} --weights {exported.format}"
    )
    if arguments.push_to_hub:
        url = hub.push(arguments.out, arguments.push_to_hub, arguments.run, arguments.kind)
        print(f"pushed: {url}")
    return 0
