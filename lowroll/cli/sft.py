"""`lowroll sft run.yaml [a.b=c ...]`: warm-start a model on demonstrations."""

from __future__ import annotations

import argparse

from lowroll.cli.closing_lines import conclude
from lowroll.cli.settings import (
    add_dry_run,
    add_folder_options,
    add_settings,
    read_settings,
    show,
)


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll sft",
        description=(
            'Supervised fine-tuning on the environments\' own demonstrations, or on a JSONL of {"messages": [...]} '
            "(sft.data). The settings are the section sft, and train for what both stages share."
        ),
    )
    add_settings(p)
    add_folder_options(p)
    add_dry_run(p, "model, data and memory")
    return p


def run(arguments: argparse.Namespace) -> int:
    cfg = read_settings(arguments, tell=False)
    if arguments.dry_run:
        from lowroll.runs.preflight import look_at_sft

        findings = look_at_sft(cfg, arguments.resume, arguments.overwrite)
        plan = [f"warm start of {cfg.model}; run folder {cfg.output_dir}"]
        return show(cfg, plan, findings, arguments.verbose)
    from lowroll.runs.sft import run_sft

    result = run_sft(cfg, resume=arguments.resume, overwrite=arguments.overwrite)
    return conclude(result)
