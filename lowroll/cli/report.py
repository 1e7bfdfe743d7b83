"""`lowroll report RUN`: write a run's page of plots."""

from __future__ import annotations

import argparse
from pathlib import Path


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll report",
        description=(
            "Write one self-contained HTML page about a run: what changed, reward, entropy, "
            "mismatch, lengths, clipping, time, and sample rollouts to open and search."
        ),
    )
    p.add_argument("run", metavar="RUN", type=Path, help="the run folder (output_dir)")
    p.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        help="where to write the page (default: in the run folder)",
    )
    return p


def run(arguments: argparse.Namespace) -> int:
    if not arguments.run.is_dir():
        raise ValueError(f"{arguments.run}: no such run folder")
    if not any((arguments.run / name).is_file() for name in ("config.yaml", "metrics.jsonl")):
        raise ValueError(f"{arguments.run}: not a run folder (no config.yaml and no metrics.jsonl)")
    from lowroll.metrics.report import write_report

    print(write_report(arguments.run, arguments.out))
    return 0
