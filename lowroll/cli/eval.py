"""`lowroll eval run.yaml` or `lowroll eval --model M --env E`: pass@1 and avg@k, dense and
low-precision, under the dense and the rollouts' cache; with `--server URL` of what a server
serves."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from lowroll.cli.settings import (
    add_server,
    add_settings,
    read_settings,
    refuse_beside_server,
    split,
)

if TYPE_CHECKING:
    from lowroll.config import RunConfig


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll eval",
        description=(
            "Evaluate a model on the test split of its environments, with the dense weights and "
            "with the rollout precision, and with the dense cache and the rollouts', side by side. "
            "Give a run's YAML file, or --model and --env; or --server with either."
        ),
    )
    add_settings(p)
    p.add_argument(
        "--model",
        help="a folder or a hub id; with a YAML file: instead of its model; with --server the "
        "name of a model that it serves",
    )
    add_server(p)
    p.add_argument("--env", action="append", metavar="ID", help="an environment; may be repeated")
    p.add_argument("--n", type=int, metavar="N", help="examples an environment (eval.num_examples)")
    p.add_argument(
        "--k", type=int, metavar="K", help="rollouts an example (eval.rollouts_per_example)"
    )
    p.add_argument("--temperature", type=float, help="0 is greedy (eval.temperature)")
    p.add_argument("--max-tokens", type=int, help="longest response (rollout.max_tokens)")
    p.add_argument(
        "--weights",
        metavar="FORMAT,...",
        help="formats to compare (default: dense and rollout.weights, or "
        "where that is not set the model's own low-bit format)",
    )
    p.add_argument(
        "--kv",
        metavar="CACHE,...",
        help="caches to compare: dense, a policy with the options of rollout.kv that it has, fp8, "
        "or <policy>+fp8 (default: dense and rollout.kv)",
    )
    return p


def run(arguments: argparse.Namespace) -> int:
    refuse_beside_server(arguments, "weights", "kv")
    cfg = settings(arguments)
    if arguments.server is not None:
        from lowroll.runs.evaluate import evaluate_server
        from lowroll.runs.server import reach

        server = reach(arguments.server, arguments.model, arguments.tokenizer, arguments.token_env)
        with closing(server.engine):
            show(evaluate_server(cfg, server), title(cfg, server.url))
        return 0
    caches = [cfg.rollout.cache.another(name) for name in _listed(arguments.kv)]
    from lowroll.runs.evaluate import evaluate

    rows = evaluate(cfg, _listed(arguments.weights), caches)
    show(rows, title(cfg))
    return 0


def _listed(words: str | None) -> list[str]:
    """The words of an option, each once."""
    return list(dict.fromkeys(words.split(","))) if words else []


def settings(arguments: argparse.Namespace) -> RunConfig:
    """The run's settings with the command's options laid over them."""
    from lowroll.config import ConfigError, from_mapping

    options: dict[str, object] = {
        "model": arguments.model if arguments.server is None else None,
        "eval.num_examples": arguments.n,
        "eval.rollouts_per_example": arguments.k,
        "eval.temperature": arguments.temperature,
        "rollout.max_tokens": arguments.max_tokens,
        # one length, where one was asked for
        "stages": None if arguments.max_tokens is None else [],
        "eval.env": [{"id": env} for env in arguments.env] if arguments.env else None,
    }
    arguments.settings += [
        f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None
    ]
    files, overrides = split(arguments.settings)
    if any((files, arguments.train, arguments.orch)):
        return read_settings(arguments, tell=False)
    if not (arguments.env and (arguments.model or arguments.server)):
        raise ConfigError("give a run's YAML file, or --model and --env (--server and --env)")
    # of a server nobody reads the model: it is what is served
    return from_mapping({"model": arguments.model or arguments.server}, overrides)


def title(cfg: RunConfig, server: str | None = None) -> str:
    """What answered, how the responses were drawn, and to how many prompts."""
    drawn, each = cfg.eval, cfg.eval.rollouts_per_example
    how = "greedy" if drawn.temperature == 0 else f"sampled at T = {drawn.temperature:g}"
    responses = f"{each} response{'s' * (each > 1)} each"
    return f"{server or cfg.model}: {how}, {drawn.most} held-out prompts, {responses}"


def show(rows: Sequence[dict[str, Any]], title: str = "") -> None:
    """Print one row a format, cache and environment."""
    from rich.console import Console
    from rich.table import Column, Table

    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(*(Column(name, overflow="fold") for name in columns), title=title)
    for row in rows:
        table.add_row(*(_cell(row.get(name)) for name in columns))
    console = Console()
    console = console if console.is_terminal else Console(width=160)
    console.print(table)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else "-"
    return "-" if value is None else str(value)
