"""`lowroll eval MODEL --suite math7`, or `lowroll eval run.yaml`: evaluate on held-out sets and
environments, dense and low-precision; with `--server URL` a served model."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
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
    from lowroll.runs.presets import Preset

ROOM = 1 << 20  # tokens: an evaluation packs no micro-batches
PROGRAM_SECONDS = 120  # for scorers that run programs on all test cases


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll eval",
        description=(
            "Evaluate a model on held-out sets and environments, with the dense weights and with "
            "the rollout precision, and with the dense cache and the rollouts', side by side. Give "
            "a model (a folder or a hub id) or a run's YAML file, or --server; and what to ask: "
            "--suite, --preset or --env, else the run's own environments. Responses are kept: the "
            "same command goes on where it was stopped."
        ),
    )
    add_settings(p)
    p.add_argument(
        "--model",
        help="a folder or a hub id; with a YAML file: instead of its model; with --server the "
        "name of a model that it serves",
    )
    add_server(p)
    p.add_argument(
        "--suite", metavar="NAME,...", help="sets: math7, ood, or by name, such as gsm8k,aime24"
    )
    p.add_argument(
        "--preset", metavar="NAME", help="sets and sampler as a paper has them, such as qerl"
    )
    p.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="[NAME=]FILE",
        help="a file in the place of a set's or environment's test split; may be repeated",
    )
    p.add_argument("--env", action="append", metavar="ID", help="an environment; may be repeated")
    p.add_argument("--n", type=int, metavar="N", help="examples of each (eval.num_examples)")
    p.add_argument(
        "--k", type=int, metavar="K", help="responses to an example (eval.rollouts_per_example)"
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
    p.add_argument(
        "--out",
        metavar="FOLDER",
        help="where responses, results and the page of failures go (default: a folder of "
        "outputs/eval for the model and how it is asked)",
    )
    return p


def run(arguments: argparse.Namespace) -> int:
    refuse_beside_server(arguments, "weights", "kv")
    run_preset = None
    if arguments.preset is not None:
        from lowroll.runs.presets import preset

        run_preset = preset(arguments.preset)
    cfg = settings(arguments, run_preset)
    responses_by_set = {}
    if run_preset is not None and arguments.k is None:
        responses_by_set = dict(run_preset.each)
    out_folder = None if arguments.out is None else Path(arguments.out)
    if arguments.server is not None:
        _ask_server(arguments, cfg, responses_by_set, out_folder)
        return 0
    caches = [cfg.rollout.cache.another(name) for name in _split_names(arguments.kv)]
    from lowroll.runs.evaluate import evaluate, place

    with place(cfg, responses_by_set, out_folder) as out:
        rows = evaluate(cfg, _formats(arguments.weights), caches, each=responses_by_set, out=out)
    show(rows, title(cfg), out)
    return 0


def _ask_server(
    arguments: argparse.Namespace, cfg: RunConfig, each: Mapping[str, int], given: Path | None
) -> None:
    from lowroll.runs.evaluate import evaluate_server, place
    from lowroll.runs.remote_model import reach

    server = reach(
        arguments.server,
        arguments.model,
        arguments.tokenizer,
        arguments.token_env,
        cfg.chat_template_kwargs,
    )
    with closing(server.engine), place(cfg, each, given, server) as out:
        rows = evaluate_server(cfg, server, each=each, out=out)
    show(rows, title(cfg, server.url), out)


def _formats(words: str | None) -> list[str]:
    """Return an option's formats and budgets. Consecutive bounds form one budget: of
    `int8,max_kl=0.02,max_bits=5` the last two."""
    formats: list[str] = []
    for word in _split_names(words):
        key, equals, _ = word.partition("=")
        follows_bound = bool(formats) and "=" in formats[-1]
        if equals and follows_bound and f"{key}=" not in formats[-1]:
            formats[-1] += f",{word}"
        else:
            formats.append(word)
    return list(dict.fromkeys(formats))


def _split_names(words: str | None) -> list[str]:
    return list(dict.fromkeys(words.split(","))) if words else []


def settings(arguments: argparse.Namespace, preset: Preset | None = None) -> RunConfig:
    """Return the settings with a preset's and the command's options. The positional arguments may
    begin with a model, which becomes `arguments.model`."""
    from lowroll.config import ConfigError, from_mapping

    files, overrides = split(arguments.settings)
    if files and not files[0].endswith((".yaml", ".yml")):
        if arguments.model is not None:
            raise ConfigError(f"{files[0]}: the model is named by --model too")
        arguments.model = files.pop(0)
    envs = _environments(arguments, preset)
    options: dict[str, object] = {
        "model": arguments.model if arguments.server is None else None,
        "eval.num_examples": arguments.n,
        "eval.rollouts_per_example": arguments.k,
        "eval.temperature": arguments.temperature,
        "rollout.max_tokens": arguments.max_tokens,
        # a given length replaces those of stages
        "stages": None if arguments.max_tokens is None and preset is None else [],
        "eval.env": envs or None,
    }
    option_overrides = [
        f"{key}={json.dumps(value)}" for key, value in options.items() if value is not None
    ]
    defaults = _before(arguments, preset, envs)
    # Later words override earlier ones.
    arguments.settings = [*files, *defaults, *overrides, *option_overrides]
    if any((files, arguments.train, arguments.orch)):
        return read_settings(arguments, tell=False)
    if not (envs and (arguments.model or arguments.server)):
        raise ConfigError(
            "give a run's YAML file, or a model and what to ask: --suite, --preset or --env "
            "(with --server no model is needed)"
        )
    # a server's model is not loaded here
    return from_mapping({"model": arguments.model or arguments.server}, arguments.settings)


def _before(
    arguments: argparse.Namespace, preset: Preset | None, envs: Sequence[Mapping[str, Any]]
) -> list[str]:
    from lowroll.envs.sets.table import PREFIX

    defaults: dict[str, object] = dict(preset.settings) if preset is not None else {}
    has_file = any(word.endswith((".yaml", ".yml")) for word in arguments.settings)
    if preset is not None or not (has_file or arguments.train):
        defaults["train.tokens_per_microbatch"] = ROOM
    ids = [env["id"] for env in envs]
    if any(id.startswith(PREFIX) for id in ids):
        defaults["eval.num_examples"] = None
    if f"{PREFIX}livecodebench" in ids:
        defaults["score.time_limit"] = PROGRAM_SECONDS
    return [f"{key}={json.dumps(value)}" for key, value in defaults.items()]


def _environments(arguments: argparse.Namespace, preset: Preset | None) -> list[dict[str, Any]]:
    set_names = arguments.suite
    if not set_names and preset is not None and not arguments.env:
        set_names = preset.sets
    envs: list[dict[str, Any]] = []
    if set_names:
        from lowroll.envs.sets.table import PREFIX, chosen

        envs += [{"id": PREFIX + item.name, "name": item.name} for item in chosen(set_names)]
    envs += [{"id": item} for item in arguments.env or ()]
    envs_by_name = {env.get("name", env["id"]): env for env in envs}
    for word in arguments.data:
        name, path = _name_and_file(word, list(envs_by_name))
        envs_by_name[name]["args"] = {"test_path": path}
    return envs


def _name_and_file(word: str, names: Sequence[str]) -> tuple[str, str]:
    name, equals, path = word.partition("=")
    if equals and name in names:
        return name, path
    if len(names) == 1:  # a file's name may have a "="
        return names[0], word
    if name not in names:
        known_names = ", ".join(names) or "nothing; add --suite or --env"
        raise ValueError(
            f"--data {word}: is for none of what is asked: write NAME=FILE ({known_names})"
        )
    return name, path


def title(cfg: RunConfig, server: str | None = None) -> str:
    evaluation, num_responses = cfg.eval, cfg.eval.rollouts_per_example
    sampling = (
        "greedy" if evaluation.temperature == 0 else f"sampled at T = {evaluation.temperature:g}"
    )
    responses = f"{num_responses} response{'s' * (num_responses > 1)} each"
    return f"{server or cfg.model}: {sampling}, {evaluation.most} held-out prompts, {responses}"


def show(rows: Sequence[dict[str, Any]], title: str = "", out: Path | None = None) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    from lowroll.runs.results import shown

    header, cells = shown(rows)
    table = Table(*(Column(name, overflow="fold") for name in header), title=title)
    for row in cells:
        table.add_row(*row)
    console = Console(width=None if sys.stdout.isatty() else 180)
    console.print(table)
    if out is not None:
        console.print(f"responses, results.json and failures.html: {out}", markup=False)
