"""`lowroll train FILE [a.b=c ...]`: learn from the batches of an orchestrator elsewhere."""

from __future__ import annotations

import argparse

from lowroll.cli.ending import conclude
from lowroll.cli.settings import add_folder_options, add_role_settings, read_role


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll train",
        description=(
            "Learn from the batches that lowroll orchestrate sends, and broadcast the weights to "
            "the engines. The run folder (output_dir) holds the settings, metrics.jsonl, "
            "checkpoints and the logs."
        ),
    )
    add_role_settings(p, "train.yaml")
    add_folder_options(p)
    return p


def run(arguments: argparse.Namespace) -> int:
    from lowroll.runs.roles.parent import die_with_parent

    die_with_parent()
    cfg = read_role("train", arguments)
    from lowroll.runs.roles.train import train

    return conclude(train(cfg, resume=arguments.resume, overwrite=arguments.overwrite))
