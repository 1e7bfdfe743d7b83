"""A chat template at work, in a child process with bounds of time and memory
(`model.template_child`).

A template is a program that a model folder brings. jinja's sandbox keeps it from the machine, and
not from looping or from filling the memory, and one that behaves on a first conversation may do so
on the thousandth: every conversation is rendered in the child. A template has one child, which is
started with the first conversation and then stays; one that was ended is replaced.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowroll import machine
from lowroll.types import printable

SECONDS = 10.0  # for one conversation; about 0.0001 is usual
START_SECONDS = 60.0  # for the child to start, and to read the template; about 0.1 is usual
MEMORY_MB = 512
MOST_TEMPLATE = 1 << 20  # characters
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CHILD = Path(__file__).with_name("template_child.py")


class Ended(ValueError):
    """The child has ended."""


class Template:
    """`render` says what a conversation looks like to the model. For one thread at a time; others
    wait.

    variables: what the template may read beside the messages (special tokens)."""

    def __init__(self, source: str, variables: dict[str, str]) -> None:
        if len(source) > MOST_TEMPLATE:
            raise ValueError(
                f"chat template: {len(source):,} characters; {MOST_TEMPLATE:,} at most"
            )
        self.variables = variables
        self.setup = {
            "template": source,
            "variables": variables,
            "memory_mb": MEMORY_MB,
            "seconds": 2 * SECONDS,
        }
        self.child: subprocess.Popen[bytes] | None = None
        self.lock = threading.Lock()

    def render(
        self,
        messages: list[dict[str, Any]],
        open_turn: bool = True,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation; open_turn: with the header that opens the assistant's turn;
        tools: what the template is to show of them, JSON schemas; template_kwargs: further variables
        of the template, as JSON (`enable_thinking`).

        ValueError in one line for what the template raises, when it takes too long or too much
        memory, and for a variable that is not the caller's to set."""
        further = dict(template_kwargs or {})
        check_template_kwargs(further, self.variables)
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        asked = {
            "messages": messages,
            "add_generation_prompt": open_turn,
            "tools": list(tools) or None,
            "template_kwargs": further,
        }
        with self.lock:
            served = self.child is not None
            try:
                return self._text(asked)
            except Ended:
                if not served:
                    raise
            # it has served before: somebody else has ended it, and another one may do
            return self._text(asked)

    def _text(self, asked: dict[str, Any]) -> str:
        # also in a fork, where it is somebody else's
        if self.child is not None and self.child.poll() is not None:
            self._forget_child()
        if self.child is None:
            self.child = _start()
            self.end_child = weakref.finalize(self, _end, self.child)
            self._ask(self.setup, START_SECONDS)
        return str(self._ask(asked)["text"])

    def _ask(self, message: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        assert self.child is not None
        try:
            reply = _exchange(self.child, json.dumps(message).encode() + b"\n", seconds or SECONDS)
        except (
            BaseException
        ):  # an answer may still be on its way: nobody may take it for another one's
            self._forget_child()
            raise
        if "error" in reply:
            if message is self.setup:  # it has no template to render, and has ended
                self._forget_child()
            raise ValueError(f"chat template: {printable(reply['error'])}")
        return reply

    def _forget_child(self) -> None:
        self.end_child()
        self.child = None


def check_template_kwargs(given: Mapping[str, Any], special_tokens: Iterable[str] = ()) -> None:
    """ValueError names a variable that a chat template gets from elsewhere (the conversation, the
    tokenizer's special tokens), or that is no name."""
    for name in given:
        if name in RESERVED or name in special_tokens:
            raise ValueError(
                f"chat_template_kwargs: {printable(name)} is set from the conversation or the "
                "tokenizer, and cannot be set here"
            )
        if not name.isidentifier():
            raise ValueError(f"chat_template_kwargs: {printable(repr(name))} is no variable's name")


@lru_cache(maxsize=4)
def template(source: str, variables: tuple[tuple[str, str], ...]) -> Template:
    """The template with this source: those that are the same share a child."""
    return Template(source, dict(variables))


def _start() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-P", str(_CHILD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env=machine.kept_env("PYTHONPATH"),
        start_new_session=True,
        bufsize=0,
    )
    assert child.stdin is not None and child.stdout is not None
    for pipe in (child.stdin, child.stdout):
        os.set_blocking(pipe.fileno(), False)
    return child


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait(SECONDS)
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            pipe.close()


def _exchange(child: subprocess.Popen[bytes], request: bytes, seconds: float) -> dict[str, Any]:
    """The child's reply to a line."""
    until = time.monotonic() + seconds
    assert child.stdin is not None and child.stdout is not None
    to_child, from_child = child.stdin.fileno(), child.stdout.fileno()
    left, reply = memoryview(request), bytearray()
    with selectors.DefaultSelector() as ready:
        ready.register(from_child, selectors.EVENT_READ)
        ready.register(to_child, selectors.EVENT_WRITE)
        while not reply.endswith(b"\n"):
            events = ready.select(max(0.0, until - time.monotonic()))
            if not events:
                raise ValueError(
                    f"chat template: no text after {seconds:g} s; it loops, or does too much"
                )
            for key, _ in events:
                if key.fd == to_child:
                    left = _write(to_child, left)
                    if not left:
                        ready.unregister(to_child)
                elif not (piece := os.read(from_child, 1 << 20)):
                    raise Ended(
                        f"chat template: its process ended; it may use {MEMORY_MB} MB of memory"
                    )
                else:
                    reply += piece
    found: dict[str, Any] = json.loads(reply)
    return found


def _write(pipe: int, data: memoryview) -> memoryview:
    """Write a piece to the pipe and return what is left. The reader of the pipe notices a child
    that has ended."""
    try:
        return data[os.write(pipe, data) :]
    except BrokenPipeError:
        return data[:0]
