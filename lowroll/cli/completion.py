"""`lowroll completion bash|zsh|fish`: a script that completes commands, options and settings."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

SHELLS = ("bash", "zsh", "fish")
BASH = """_lowroll() {
    local word="${COMP_WORDS[COMP_CWORD]}" words="%(commands)s" files=1
    if [ "$COMP_CWORD" -gt 1 ]; then
        case "${COMP_WORDS[1]}" in
%(cases)s
            *) words="" ;;
        esac
    else
        files=
    fi
    COMPREPLY=($(compgen -W "$words" -- "$word") ${files:+$(compgen -f -- "$word")})
    case "${COMPREPLY[0]}" in *=|*/) compopt -o nospace 2>/dev/null ;; esac
    [ ${#COMPREPLY[@]} -eq 1 ] && [ -d "${COMPREPLY[0]}" ] && compopt -o filenames 2>/dev/null
    return 0
}
complete -F _lowroll lowroll
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll completion",
        description=(
            "Print a script that completes lowroll's commands, options and settings. bash: eval "
            '"$(lowroll completion '
            'bash)" in ~/.bashrc. zsh: the same in ~/.zshrc, after compinit. fish: lowroll completion fish > '
            "~/.config/fish/completions/lowroll.fish"
        ),
    )
    p.add_argument("shell", choices=SHELLS)
    return p


def run(arguments: argparse.Namespace) -> int:
    print({"bash": bash, "zsh": zsh, "fish": fish}[arguments.shell](), end="")
    return 0


def bash() -> str:
    from lowroll.cli.main import COMMANDS

    words_by_command = {name: " ".join(word for word, _ in words(name)) for name in COMMANDS}
    cases = "\n".join(
        f'            {name}) words="{line}" ;;' for name, line in words_by_command.items()
    )
    return BASH % {"commands": " ".join((*COMMANDS, "--help", "--version")), "cases": cases}


def zsh() -> str:
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash()}"


def fish() -> str:
    from lowroll.cli.main import COMMANDS

    lines = [
        f"complete -c lowroll -n __fish_use_subcommand -f -a {name} -d {_quoted(summary)}"
        for name, summary in COMMANDS.items()
    ]
    for name in COMMANDS:
        for word, summary in words(name):
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {_quoted(word)}"
            lines.append(
                f"complete -c lowroll -n '__fish_seen_subcommand_from {name}' {kind} -d "
                f"{_quoted(summary)}"
            )
    return "\n".join(lines) + "\n"


def words(command: str) -> Iterator[tuple[str, str]]:
    """Yield (word, summary) of a command's options, the choices of its arguments and the keys of
    settings."""
    command_parser = importlib.import_module(f"lowroll.cli.{command}").parser()
    for action in command_parser._actions:
        summary = (action.help or "").split("; ")[0]
        choices = [] if action.option_strings else action.choices or []
        for word in (*action.option_strings, *map(str, choices)):
            if word.startswith("--") or word in choices:
                yield word, summary
        if action.dest == "settings":
            yield from ((f"{key}=", "a setting") for key in _value_keys())


def _value_keys() -> list[str]:
    """Return the dotted keys that take a value, of a list those of its first section:
    `env.0.id`."""
    from lowroll.config.build import known_keys
    from lowroll.config.resolve import RunConfig

    all_keys = known_keys(RunConfig)
    list_sections = {
        name for name, field in RunConfig.model_fields.items() if isinstance(field.default, tuple)
    }
    return [
        key.replace(".", ".0.", 1) if key.partition(".")[0] in list_sections else key
        for key in all_keys
        if not any(other.startswith(f"{key}.") for other in all_keys)
        and not key.startswith("eval.env.")  # a list inside a section
    ]


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
