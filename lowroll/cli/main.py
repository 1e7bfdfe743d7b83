"""`lowroll <command> ...`: finds the command's module, reads its arguments, runs it.

Exit codes: 0 done, 1 a run that could not go on (one `error:` line) or a failure of the program (its traceback), 2
something that the user can mend (one `error:` line a problem), 130 interrupted. LOWROLL_DEBUG=1 shows the traceback of
the errors of exit code 2 too.
"""
from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from lowroll.types import RunFailed, printable

COMMANDS = {
    "grpo": "train a model by reinforcement learning with cheap rollouts",
    "sft": "warm-start a model on demonstrations",
    "eval": "measure pass@1 and avg@k, dense and low-precision side by side",
    "generate": "try a model at the terminal",
    "quantize": "write a dense model as a low-bit folder",
    "export": "write a run's checkpoint as a model folder: merged, adapter or the rollouts' exact policy",
    "diagnose": "say how much of the mismatch comes from weights, kernels, KV and staleness",
    "report": "write a run's page of plots",
    "demo": "build a tiny model and train it, in a few minutes and without a GPU",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0] in ("-h", "--help"):
        print(usage())
        return 0 if words else 2
    if words[0] == "--version":
        from lowroll import __version__
        print(f"lowroll {__version__}")
        return 0
    name = words[0]
    if name not in COMMANDS:
        from difflib import get_close_matches
        near = get_close_matches(name, COMMANDS, n=1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        print(f"error: unknown command {name!r}{hint}; commands: {', '.join(COMMANDS)}", file=sys.stderr)
        return 2
    command = importlib.import_module(f"lowroll.cli.{name}")
    arguments = command.parser().parse_intermixed_args(words[1:])
    try:
        return int(command.run(arguments) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:                      # the reader of our output went away, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        if os.environ.get("LOWROLL_DEBUG"):
            raise
        for line in (str(error) or type(error).__name__).splitlines():
            print(f"error: {printable(line, 4000)}", file=sys.stderr)
        return 2
    except RunFailed as error:
        print(f"error: {printable(error, 4000)}", file=sys.stderr)
        return 1


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {summary}" for name, summary in COMMANDS.items()]
    return "\n".join(["usage: lowroll <command> [options]", "", "commands:", *lines, "",
                      "lowroll <command> --help explains a command."])


if __name__ == "__main__":
    sys.exit(main())
