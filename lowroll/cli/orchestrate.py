"""`lowroll orchestrate FILE [a.b=c ...]`: make the batches of a run for a trainer elsewhere."""

from __future__ import annotations

import argparse
import gc

from lowroll.cli.settings import add_role_settings, read_role


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll orchestrate",
        description=(
            "Draw prompts, have engines answer them, score the answers, and send batches to lowroll "
            "train. Engines are those of client.base_url, else those of lowroll serve that show "
            "themselves in the run folder (output_dir). Start again what has ended: it goes on."
        ),
    )
    add_role_settings(p, "orch.yaml")
    return p


YOUNGEST = 50_000  # new objects between two garbage collections; Python's default is 700


def run(arguments: argparse.Namespace) -> int:
    from lowroll.runs.roles.local import die_with_parent

    die_with_parent()
    cfg = read_role("orchestrate", arguments)
    from lowroll.runs.roles.orchestrator import orchestrate

    thresholds = gc.get_threshold()
    gc.set_threshold(YOUNGEST, *thresholds[1:])  # requests in flight are many live objects
    try:
        signal_number = orchestrate(cfg)
    finally:
        gc.set_threshold(*thresholds)
    return 128 + signal_number if signal_number else 0
