"""`lowroll diagnose RUN|MODEL`: attribute the mismatch to weights, kernels, KV and staleness."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lowroll.cli.settings import split

if TYPE_CHECKING:
    from lowroll.config import RunConfig
    from lowroll.runs.diagnose import Diagnosis


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll diagnose",
        description=(
            "Draw one batch and take the log-probs of its tokens four ways (engine decode, engine "
            "prefill, learner aligned, learner dense); print how much of the mismatch comes from "
            "weights, kernels, KV and staleness. Of a run, the newest checkpoint is taken."
        ),
    )
    p.add_argument(
        "source",
        nargs="+",
        metavar="RUN | MODEL | key=value",
        help="a run folder, or a model's folder or hub id; then dotted overrides such as "
        "rollout.kv=null",
    )
    p.add_argument(
        "--format", metavar="F", help="format of the rollout's weights (rollout.weights)"
    )
    p.add_argument(
        "--env",
        action="append",
        metavar="ID",
        help="an environment for the prompts; may be repeated",
    )
    p.add_argument(
        "--prompt",
        action="append",
        metavar="TEXT",
        default=[],
        help="a prompt instead; may be repeated",
    )
    p.add_argument(
        "--n", type=int, default=16, metavar="N", help="prompts of the environments (default 16)"
    )
    p.add_argument("--k", type=int, default=4, metavar="K", help="responses a prompt (default 4)")
    p.add_argument("--max-tokens", type=int, help="longest response (rollout.max_tokens)")
    p.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return p


def run(arguments: argparse.Namespace) -> int:
    cfg, folder = settings(arguments)
    for name in ("n", "k"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: must be at least 1, is {getattr(arguments, name)}")
    from lowroll.runs.diagnose import diagnose

    diagnosis = diagnose(cfg, folder, arguments.prompt, arguments.n, arguments.k)
    if arguments.json:
        print(json.dumps(diagnosis.as_json(), indent=1))
    else:
        show(diagnosis)
    return 0


def settings(arguments: argparse.Namespace) -> tuple[RunConfig, Path | None]:
    """Return the settings with the command's options, and the run folder of a run."""
    from lowroll.config import ConfigError, from_mapping, load

    options: dict[str, object] = {
        "force": True,  # no learning here could collapse
        "rollout.weights": arguments.format,
        "rollout.max_tokens": arguments.max_tokens,
        "env": [{"id": env} for env in arguments.env] if arguments.env else None,
    }
    sources, overrides = split(arguments.source)
    overrides = [
        f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None
    ] + overrides
    if len(sources) != 1:
        raise ConfigError(
            f"give one run folder or model, got {', '.join(sources) if sources else 'none'}"
        )
    config_file = Path(sources[0]) / "config.yaml"
    if config_file.is_file():
        return load(config_file, overrides), config_file.parent
    return from_mapping({"model": sources[0]}, overrides), None


def show(diagnosis: Diagnosis) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(
        "cause",
        "from -> to",
        "share",
        "kl_k1",
        "kl_k3",
        "mean |dlogp|",
        "max |dlogp|",
        "ESS",
        title=f"{diagnosis.model}: {diagnosis.format} rollouts, {diagnosis.num_tokens} tokens",
    )
    for part in (*diagnosis.parts, diagnosis.whole):
        if part is diagnosis.whole:
            table.add_section()
        table.add_row(
            part.cause,
            part.remark or f"{part.start} -> {part.stop}",
            f"{part.share:.0%}",
            f"{part.kl_k1:.3g}",
            f"{part.kl_k3:.3g}",
            f"{part.logp_diff_mean:.3g}",
            f"{part.logp_diff_max:.3g}",
            f"{part.ess:.4f}",
        )
    console = Console(width=None if sys.stdout.isatty() else 140)
    console.print(table)
    for note in diagnosis.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    console.print(diagnosis.reading, markup=False, highlight=False)
