"""`lowroll <command>...`: find the command's module, parse its arguments, run it.

The exit codes are in docs/usage.md. LOWROLL_DEBUG=1 also shows the tracebacks of a user's errors.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, NoReturn

from lowroll.types import RunFailed, printable

if TYPE_CHECKING:
    from argparse import ArgumentParser

COMMANDS = {
    "grpo": "train a model by reinforcement learning with cheap rollouts",
    "sft": "warm-start a model on demonstrations",
    "eval": "measure a model on held-out sets and tasks, dense and low-precision side by side",
    "generate": "try a model at the terminal",
    "serve": "serve a low-bit model to OpenAI clients, or a run's engine",
    "orchestrate": "make the batches of a run whose engine and trainer are processes of their own",
    "train": "learn from the batches of lowroll orchestrate",
    "fetch": "get a small pretrained model, which settings then name: `model: smollm2`",
    "quantize": "write a dense model as a low-bit folder",
    "export": "write a run's checkpoint as a model folder: merged, adapter or the rollouts' exact "
    "policy",
    "diagnose": "say how much of the mismatch comes from weights, kernels, KV and staleness",
    "report": "write a run's page of plots",
    "demo": "build a tiny model and train it, in a few minutes and without a GPU",
    "doctor": "print what this machine has, which kernels run here, and why a faster one does not",
    "completion": "print a script that completes commands, options and settings in bash, zsh or "
    "fish",
}
# the Surogate document's command names
ALIASES = {"grpo-infer": "serve", "grpo-orch": "orchestrate", "grpo-train": "train"}
# what people may type for a command
MEANT = {
    "rl": "grpo",
    "run": "grpo",
    "ppo": "grpo run.yaml algorithm=ppo",
    "dapo": "grpo run.yaml algorithm=dapo",
    "gspo": "grpo run.yaml algorithm=gspo",
    "finetune": "sft",
    "evaluate": "eval",
    "test": "eval",
    "infer": "generate",
    "inference": "generate",
    "chat": "generate",
    "server": "serve",
    "api": "serve",
    "merge": "export RUN OUT --as merged",
    "convert": "quantize",
    "plot": "report",
    "check": "doctor",
    "env": "doctor",
    "download": "fetch",
    "pull": "fetch",
    "resume": "grpo run.yaml --resume",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help", "help"):
        if words[1:] and words[1] in COMMANDS:
            return main([words[1], "--help"])
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from lowroll import __version__

        print(f"lowroll {__version__}")
        return 0
    name = ALIASES.get(words[0], words[0])
    if name not in COMMANDS:
        print(
            f"error: unknown command {name!r}{_suggest_command(name, words[1:])}; commands: "
            f"{', '.join(COMMANDS)}",
            file=sys.stderr,
        )
        return 2
    try:
        command = importlib.import_module(f"lowroll.cli.{name}")
        parser = command.parser()
        parser.error = partial(refuse, parser)
        arguments, unknown = parser.parse_known_intermixed_args(words[1:])
        if unknown:
            raise ValueError(explain(unknown[0], words[1:], parser))
        return int(command.run(arguments) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as with `head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get("LOWROLL_DEBUG"):
            raise
        for line in (str(error) or type(error).__name__).splitlines():
            print(f"error: {printable(line, 4000)}", file=sys.stderr)
        return _exit_code(error)
    except RunFailed as error:
        print(f"error: {printable(error, 4000)}", file=sys.stderr)
        return 1


def _exit_code(error: Exception) -> int:
    from lowroll.checkpoint.atomic_files import is_disk_full, is_of_machine
    from lowroll.checkpoint.disk_space import NO_ROOM

    if not is_of_machine(error):
        return 2
    return NO_ROOM if is_disk_full(error) else 1


def refuse(parser: ArgumentParser, message: str) -> NoReturn:
    """Raise a one-line error, where argparse would print all options first."""
    raise ValueError(f"{message}; {parser.prog} --help says what it takes")


def _suggest_command(name: str, rest: Sequence[str]) -> str:
    if name.endswith((".yaml", ".yml")):
        return f" (did you mean lowroll grpo {' '.join((name, *rest))}?)"
    candidates = [MEANT[name]] if name in MEANT else get_close_matches(name, COMMANDS, n=1)
    return f" (did you mean {candidates[0]}?)" if candidates else ""


def explain(option: str, words: Sequence[str], parser: ArgumentParser) -> str:
    """Explain what to write instead of an unknown option."""
    name = option.lstrip("-").partition("=")[0]
    options = [word for action in parser._actions for word in action.option_strings]
    similar_options = get_close_matches(f"--{name}", options, n=1, cutoff=0.75)
    refusal = f"{option}: {parser.prog} has no such option"
    if similar_options:
        return f"{refusal} (did you mean {similar_options[0]}?)"
    takes_settings = any(action.dest == "settings" for action in parser._actions)
    if takes_settings and (advice := _explain_as_setting(option, words)):
        return f"{option}: {advice}"
    return f"{refusal}; {parser.prog} --help lists what there is"


def _explain_as_setting(option: str, words: Sequence[str]) -> str | None:
    from lowroll.config.build import known_keys, last_names
    from lowroll.config.foreign import explain as explain_key
    from lowroll.config.resolve import RunConfig

    name, equals, value = option.lstrip("-").partition("=")
    name = name.replace("-", "_")
    if advice := explain_key((name,)):
        return f"{advice}; a setting is written key=value"
    keys_by_last_name = last_names(RunConfig)
    if "." not in name and name not in keys_by_last_name:
        return None
    key = keys_by_last_name.get(name, name)
    inner_keys = [known for known in known_keys(RunConfig) if known.startswith(f"{key}.")]
    if inner_keys:
        return f"{key} is a section; a setting of it is written {inner_keys[0]}=..."
    if not equals:  # its value follows, unless that is a setting itself
        following_words = words[words.index(option) + 1 :] if option in words else []
        value = next((word for word in following_words[:1] if "=" not in word), "true")
    return f"a setting is written {key}={value}"


def usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lowroll <command> [options]",
            "",
            "commands:",
            *lines,
            "",
            "lowroll <command> --help explains a command.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
