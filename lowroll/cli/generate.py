"""`lowroll generate --model M` or `--server URL`: try a model at the terminal."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from typing import TYPE_CHECKING, Any

from lowroll.cli.settings import add_server, refuse_beside_server
from lowroll.quant.format_budget import is_budget
from lowroll.quant.table import DEFAULT, FORMATS

if TYPE_CHECKING:
    from lowroll.engine.base import Engine
    from lowroll.model.tokenizer import ChatTokenizer


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowroll generate",
        description=(
            "Sample responses from a model with the rollout engine, or from a server. Without "
            "--prompt it reads prompts line by line."
        ),
    )
    p.add_argument(
        "--model", help="a folder or a hub id; with --server the name of a model that it serves"
    )
    add_server(p)
    p.add_argument(
        "--weights",
        help=f"format of the linear weights: {', '.join(FORMATS)}; or a budget, such as max_kl=0.02 "
        f"(default: what the folder holds if it is low-bit, else {DEFAULT})",
    )
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), help="default: auto")
    p.add_argument(
        "--prompt",
        metavar="TEXT",
        help="what the user says; without it, a prompt is read from each line",
    )
    p.add_argument("--system", metavar="TEXT", help="a system message before the prompt")
    p.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="variables of the model's chat template, such as '{\"enable_thinking\": false}'",
    )
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
    refuse_beside_server(arguments, "weights", "device")
    template_kwargs = _template_kwargs(arguments.chat_template_kwargs)
    if arguments.server is not None:
        from lowroll.runs.remote_model import reach

        server = reach(
            arguments.server,
            arguments.model,
            arguments.tokenizer,
            arguments.token_env,
            template_kwargs,
        )
        with closing(server.engine):
            converse(server.engine, server.chat, arguments, f"{server.model} at {server.url}")
        return 0
    if arguments.model is None:
        raise ValueError("give --model, a folder or a hub id, or --server, an address")
    import lowroll
    from lowroll.model.tokenizer import ChatTokenizer

    weights, device = arguments.weights, arguments.device or "auto"
    if is_budget(weights):
        from lowroll.model.device import pick_device
        from lowroll.runs.format_search import of_model

        weights = of_model(arguments.model, weights, pick_device(device))
    engine = lowroll.Engine(arguments.model, weights=weights, device=device, max_batch=arguments.n)
    chat = ChatTokenizer(engine.tokenizer, template_kwargs=template_kwargs)
    converse(engine, chat, arguments, f"{engine.stats().weights} weights")
    return 0


def _template_kwargs(text: str | None) -> dict[str, Any]:
    try:
        kwargs = json.loads(text or "{}")
    except ValueError:
        kwargs = None
    if not isinstance(kwargs, dict):
        raise ValueError(
            "--chat-template-kwargs: expected a JSON object, such as '{\"enable_thinking\": false}'"
        )
    return kwargs


def converse(
    engine: Engine, chat: ChatTokenizer, arguments: argparse.Namespace, shown: str
) -> None:
    """Answer the prompt, or each line of input. shown: describes the model."""
    if arguments.prompt is not None:
        answer(engine, chat, arguments, arguments.prompt, shown)
        return
    for prompt in _read_prompts():
        try:
            answer(engine, chat, arguments, prompt, shown)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)


def answer(
    engine: Engine, chat: ChatTokenizer, arguments: argparse.Namespace, prompt: str, shown: str
) -> None:
    """Print the responses to one prompt, with speed and mean log-prob."""
    from lowroll.types import Request

    messages = [{"role": "system", "content": arguments.system}] if arguments.system else []
    messages.append({"role": "user", "content": prompt})
    ids = chat.encode_chat(messages)
    default_max_tokens = max(1, min(256, engine.capabilities.context_length - len(ids)))
    request = Request(
        prompt_ids=list(ids),
        n=arguments.n,
        max_tokens=arguments.max_tokens or default_max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        seed=arguments.seed,
    )
    started = time.monotonic()
    try:
        rollouts = engine.generate([request])[0].rollouts
    except ValueError as error:
        # the engine names a field, which is an option here
        field, colon, message = str(error).partition(":")
        if not (colon and field.startswith("requests[0].")):
            raise
        option = field.removeprefix("requests[0].").replace("_", "-")
        raise ValueError(f"--{option}:{message}") from None
    seconds = time.monotonic() - started
    for rollout in rollouts:
        text = chat.tokenizer.decode(rollout.token_ids, skip_special_tokens=True)
        # a model must not control the terminal
        print("".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text))
        length = len(rollout.token_ids)
        mean_log_prob = sum(rollout.logprobs) / max(1, length)
        print(
            f"  [{length} tokens, {rollout.finish_reason}, mean log-prob {mean_log_prob:.3f}]",
            file=sys.stderr,
        )
    total = sum(len(rollout.token_ids) for rollout in rollouts)
    print(
        f"  [{total / max(seconds, 1e-9):.1f} tokens/s, {shown}]",
        file=sys.stderr,
    )


def _read_prompts() -> Iterator[str]:
    """Yield prompts from the terminal until an empty line; from a pipe, every non-empty line."""
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
