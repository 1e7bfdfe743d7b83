"""The shared arguments for a run's settings."""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lowroll.config import RunConfig
    from lowroll.runs.preflight import Findings

_OVERRIDE = re.compile(r"[A-Za-z_][\w.\[\]]*\s*=.*", re.DOTALL)


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add `run.yaml [a.b=c ...] [--train --infer --orch]`."""
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="run.yaml | key=value",
        help="the run's YAML file, then dotted overrides such as train.max_steps=20",
    )
    for name in ("train", "infer", "orch"):
        parser.add_argument(
            f"--{name}", metavar="FILE", help=f"the {name} file of the three-file form"
        )


def add_role_settings(parser: argparse.ArgumentParser, theirs: str) -> None:
    """Add `FILE [a.b=c ...]` of a role of a run."""
    parser.add_argument(
        "settings",
        nargs="+",
        metavar="FILE | key=value",
        help=f"run.yaml, or {theirs} of the three-file form, then dotted overrides",
    )


WAIT_S = 3600.0  # a trainer with its own file waits for the orchestrator's part
_POLL_S = 0.5


def read_role(
    role: Literal["serve", "orchestrate", "train"], arguments: argparse.Namespace
) -> RunConfig:
    """Return a role's settings. A trainer with only train.yaml waits for the orchestrator's.
    ConfigError for wrong settings, or after WAIT_S."""
    from lowroll.config.surogate.roles import NotThereYet, load_role

    files, overrides = split(arguments.settings)
    file = _one_file(files)
    deadline, announced = time.monotonic() + WAIT_S, False
    while True:
        try:
            return load_role(role, file, overrides)
        except NotThereYet as error:
            if time.monotonic() > deadline:
                raise
            if not announced:
                print(f"waiting for lowroll orchestrate: {error}", file=sys.stderr, flush=True)
                announced = True
            time.sleep(_POLL_S)


def add_folder_options(parser: argparse.ArgumentParser) -> None:
    """Add `--resume` and `--overwrite`."""
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint in output_dir"
    )
    parser.add_argument(
        "--overwrite",
        action="store_true",
        help="replace the run in output_dir; nothing that a run did not make is removed",
    )


def add_server(parser: argparse.ArgumentParser) -> None:
    """Add `--server URL`, `--token-env` and `--tokenizer`."""
    parser.add_argument(
        "--server",
        metavar="URL",
        help="ask a server that runs already, lowroll's or a vLLM, such as http://127.0.0.1:8000",
    )
    parser.add_argument(
        "--token-env",
        metavar="NAME",
        help="with --server: environment variable that holds its token, if it wants one",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="with --server: a folder or a hub id (default: that of the model that is served)",
    )


def refuse_beside_server(arguments: argparse.Namespace, *names: str) -> None:
    """Raise ValueError for options of a local model beside --server, or of a server without it."""
    if arguments.server is None:
        for name in ("tokenizer", "token_env"):
            if getattr(arguments, name) is not None:
                raise ValueError(f"--{name.replace('_', '-')}: is for --server")
        return
    for name in names:
        if getattr(arguments, name) is not None:
            raise ValueError(f"--{name}: the model at --server is loaded already; leave it out")


def split(words: list[str]) -> tuple[list[str], list[str]]:
    overrides = [word for word in words if _OVERRIDE.fullmatch(word)]
    return [word for word in words if word not in overrides], overrides


def read_settings(arguments: argparse.Namespace, tell: bool = True) -> RunConfig:
    """Load the settings of the arguments, or raise ConfigError. tell: print automatic choices."""
    from lowroll.config import ConfigError, load

    files, overrides = split(arguments.settings)
    role_files = {name: getattr(arguments, name) for name in ("train", "infer", "orch")}
    if any(role_files.values()):
        if files:
            raise ConfigError(
                f"{files[0]}: give either one YAML file or --train, --infer and --orch"
            )
        for name in ("train", "orch"):
            if not role_files[name]:
                raise ConfigError(f"--{name}: this file is required beside the others")
        from lowroll.config.surogate.read import load_surogate

        cfg = load_surogate(role_files["train"], role_files["infer"], role_files["orch"], overrides)
    else:
        cfg = load(_one_file(files), overrides)
    for note in cfg.notes if tell else ():
        print(note, file=sys.stderr)
    return cfg


def _one_file(files: Sequence[str]) -> str:
    from lowroll.config import ConfigError

    if len(files) == 1:
        return files[0]
    has_other_words = any(not word.endswith((".yaml", ".yml")) for word in files[1:])
    hint = "; a setting is one word with its value, such as train.max_steps=20"
    raise ConfigError(
        f"give one YAML file, got {', '.join(files) or 'none'}{hint if has_other_words else ''}"
    )


_COLUMNS = 98  # of a dry run's page


def add_dry_run(parser: argparse.ArgumentParser, looks_at: str) -> None:
    """Add `--dry-run` and its `--verbose`."""
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help=f"check {looks_at}, print whether it would start, its memory and the settings that "
        "are not defaults, and stop",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="with --dry-run: print every setting"
    )


def _changed_settings(cfg: RunConfig) -> str:
    from lowroll.config.document import dump_short

    identity = {"model": cfg.model, "output_dir": cfg.output_dir}
    changed = cfg.resolved().model_dump(mode="json", exclude_defaults=True)
    return dump_short(identity | changed, 60)  # breaks after a long word


def _as_comment(line: str) -> str:
    wrapped_lines = textwrap.wrap(
        line, _COLUMNS - 4, break_long_words=False, break_on_hyphens=False
    )
    return "# " + "\n#   ".join(wrapped_lines)


def show(cfg: RunConfig, plan: Sequence[str], found: Findings, verbose: bool = False) -> int:
    """Print a dry run as a loadable file: verdict and plan as comments over the settings.
    ValueError has a line for each problem."""
    verdict = "the run would start: nothing that would end it was found"
    if num_problems := len(found.problems):
        problems = f"{num_problems} problem{'s' * (num_problems > 1)}"
        verdict = f"the run would not start: {problems}, named at the end"
    settings = "every setting" if verbose else "what is not a default (--verbose: every setting)"
    for line in (verdict, *plan, *found.lines, f"{settings}:"):
        print(_as_comment(line))
    print(cfg.dump() if verbose else _changed_settings(cfg), end="", flush=True)
    for note in found.notes:
        print(note, file=sys.stderr)
    if found.problems:
        raise ValueError("\n".join(found.problems))
    return 0
