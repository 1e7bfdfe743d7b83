"""`lowroll generate --model M`: try a model at the terminal."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lowroll.quant.table import DEFAULT, FORMATS

if TYPE_CHECKING:
    from lowroll.engine.native import Engine


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll generate",
        description=(
            "Sample responses from a model with the rollout engine. Without --prompt it reads "
            "prompts line by line."
        ),
    )
    p.add_argument("--model", required=True, help="a folder or a hub id")
    p.add_argument(
        "--weights",
        help=f"format of the linear weights: {', '.join(FORMATS)} (default: what the folder holds "
        f"if it is low-bit, else {DEFAULT})",
    )
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    p.add_argument(
        "--prompt",
        metavar="TEXT",
        help="what the user says; without it, a prompt is read from each line",
    )
    p.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    p.add_argument(
        "--max-tokens", type=int, help="default: 256, or what the context leaves where that is less"
    )
    p.add_argument("--temperature", type=float, default=1.0, help="0 is greedy")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--n", type=int, default=1, help="responses a prompt")
    p.add_argument("--seed", type=int, default=0)
    return p


def run(arguments: argparse.Namespace) -> int:
    if arguments.n < 1:
        raise ValueError(f"--n: expected at least 1, got {arguments.n}")
    import lowroll

    engine = lowroll.Engine(
        arguments.model, weights=arguments.weights, device=arguments.device, max_batch=arguments.n
    )
    if arguments.prompt is not None:
        answer(engine, arguments, arguments.prompt)
        return 0
    for prompt in _lines():
        try:
            answer(engine, arguments, prompt)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
    return 0


def answer(engine: Engine, arguments: argparse.Namespace, prompt: str) -> None:
    """Print the responses to one prompt, with speed and mean log-prob."""
    import lowroll
    from lowroll.model.tokenizer import ChatTokenizer

    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages.append({"role": "user", "content": prompt})
    ids = ChatTokenizer(engine.tokenizer).encode_chat(messages)
    room = max(1, min(256, engine.spec.max_position - len(ids)))
    request = lowroll.Request(
        prompt_ids=list(ids),
        n=arguments.n,
        max_tokens=arguments.max_tokens or room,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    started = time.monotonic()
    rollouts = engine.generate([request])[0].rollouts
    seconds = time.monotonic() - started
    for rollout in rollouts:
        print(_printable(engine.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)))
        mean = sum(rollout.logprobs) / max(1, len(rollout.logprobs))
        length = len(rollout.token_ids)
        print(
            f"  [{length} tokens, {rollout.finish_reason}, mean log-prob {mean:.3f}]",
            file=sys.stderr,
        )
    total = sum(len(rollout.token_ids) for rollout in rollouts)
    print(
        f"  [{total / max(seconds, 1e-9):.1f} tokens/s, {engine.format.name} weights]",
        file=sys.stderr,
    )


def _printable(text: str) -> str:
    """The text without control characters: a model must not be able to steer the terminal."""
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


def _lines() -> Iterator[str]:
    """Prompts from the terminal until its end or an empty line; from a pipe, every line that holds
    something."""
    if not sys.stdin.isatty():
        yield from (line.strip() for line in sys.stdin if line.strip())
        return
    while True:
        try:
            line = input("> ").strip()
        except EOFError:
            return
        if not line:
            return
        yield line
