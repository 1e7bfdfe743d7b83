"""Chat templates, rendered in a child process with bounds of time and memory
(`model.template_child`): jinja's sandbox does not prevent endless loops or memory use.
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
START_SECONDS = 60.0  # for the child's start; about 0.1 is usual
MEMORY_MB = 512
MOST_TEMPLATE = 1 << 20  # characters
RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_CHILD_SCRIPT = Path(__file__).with_name("template_child.py")


class Ended(ValueError):
    """An error for a child that has ended."""


class Template:
    """A chat template. variables: its special tokens."""

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
        """Render a conversation. open_turn: with the header of the assistant's turn; tools: JSON
        schemas; template_kwargs: further variables, as JSON (`enable_thinking`). ValueError in one
        line for the template's errors, a timeout or memory limit, and a reserved variable."""
        extra_variables = dict(template_kwargs or {})
        check_template_kwargs(extra_variables, self.variables)
        messages = [
            {key: value for key, value in message.items() if value is not None}
            for message in messages
        ]
        request = {
            "messages": messages,
            "add_generation_prompt": open_turn,
            "tools": list(tools) or None,
            "template_kwargs": extra_variables,
        }
        with self.lock:
            had_child = self.child is not None
            try:
                return self._text(request)
            except Ended:
                if not had_child:
                    raise
            # it worked before, so try another child
            return self._text(request)

    def _text(self, asked: dict[str, Any]) -> str:
        # also in a fork, where the child is another process's
        if self.child is not None and self.child.poll() is not None:
            self._forget_child()
        if self.child is None:
            self.child = _start_child()
            self.end_child = weakref.finalize(self, _end, self.child)
            self._ask(self.setup, START_SECONDS)
        return str(self._ask(asked)["text"])

    def _ask(self, message: dict[str, Any], seconds: float | None = None) -> dict[str, Any]:
        assert self.child is not None
        try:
            reply = _exchange(self.child, json.dumps(message).encode() + b"\n", seconds or SECONDS)
        except BaseException:  # a late answer must not be taken for the next
            self._forget_child()
            raise
        if "error" in reply:
            if message is self.setup:  # the child has ended
                self._forget_child()
            raise ValueError(f"chat template: {printable(reply['error'])}")
        return reply

    def _forget_child(self) -> None:
        self.end_child()
        self.child = None


def check_template_kwargs(given: Mapping[str, Any], special_tokens: Iterable[str] = ()) -> None:
    """Raise ValueError for a reserved or invalid name."""
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
    return Template(source, dict(variables))


def _start_child() -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-P", str(_CHILD_SCRIPT)],
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
    deadline = time.monotonic() + seconds
    assert child.stdin is not None and child.stdout is not None
    to_child, from_child = child.stdin.fileno(), child.stdout.fileno()
    remaining, reply = memoryview(request), bytearray()
    with selectors.DefaultSelector() as selector:
        selector.register(from_child, selectors.EVENT_READ)
        selector.register(to_child, selectors.EVENT_WRITE)
        while not reply.endswith(b"\n"):
            events = selector.select(max(0.0, deadline - time.monotonic()))
            if not events:
                raise ValueError(
                    f"chat template: no text after {seconds:g} s; it loops, or does too much"
                )
            for key, _ in events:
                if key.fd == to_child:
                    remaining = _write(to_child, remaining)
                    if not remaining:
                        selector.unregister(to_child)
                    continue
                piece = os.read(from_child, 1 << 20)
                if not piece:
                    raise Ended(
                        f"chat template: its process ended; it may use {MEMORY_MB} MB of memory"
                    )
                reply += piece
    message: dict[str, Any] = json.loads(reply)
    return message


def _write(pipe: int, data: memoryview) -> memoryview:
    """Write to the pipe and return the rest. The reader detects a dead child."""
    try:
        return data[os.write(pipe, data) :]
    except BrokenPipeError:
        return data[:0]
