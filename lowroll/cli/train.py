"""`lowroll train FILE [a.b=c ...]`: learn from the batches of an orchestrator elsewhere."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING

from lowroll.cli.closing_lines import conclude
from lowroll.cli.settings import add_folder_options, add_role_settings, read_role
from lowroll.types import printable

if TYPE_CHECKING:
    from lowroll.config import RunConfig
    from lowroll.runs.roles.ranks import RankEnvironment


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
    from lowroll.runs.roles.local import die_with_parent
    from lowroll.runs.roles.ranks import RankEnvironment, launch_ranks

    die_with_parent()
    cfg = read_role("train", arguments)
    environment = RankEnvironment.read(cfg)
    if environment is not None and environment.size > 1:
        return learn(cfg, environment, arguments)
    if cfg.train.gpus > 1:
        flags = [f"--{name}" for name in ("resume", "overwrite") if getattr(arguments, name)]
        words = ["train", *arguments.settings, *flags]
        return conclude(launch_ranks(cfg, words, arguments.resume, arguments.overwrite))
    from lowroll.runs.roles.trainer import train

    return conclude(train(cfg, resume=arguments.resume, overwrite=arguments.overwrite))


def learn(cfg: RunConfig, own: RankEnvironment, arguments: argparse.Namespace) -> int:
    """Train as one of several ranks; return the exit code."""
    from lowroll.runs.roles import devices

    if cfg.device != "cpu" and (gpus := devices.visible()):
        os.environ |= devices.own_first(own.local, gpus)  # before CUDA is initialized
    from lowroll.parallel.ranks import RankLost
    from lowroll.runs.roles.rank_follower import follow
    from lowroll.runs.roles.ranks import LOST
    from lowroll.runs.roles.trainer import train

    try:
        if own.rank:
            follow(cfg, own)
            return 0
        return conclude(
            train(cfg, resume=arguments.resume, overwrite=arguments.overwrite, environment=own)
        )
    except RankLost as error:
        print(f"error: {printable(error, 4000)}", file=sys.stderr)
        return LOST
