"""The common interface of the two interfaces of verifiers, as the environment uses it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Protocol

from lowroll.types import Message, Score


class TurnPending(BaseException):
    """verifiers' loop asks the model for a turn that is not drawn yet: `messages` are those before
    it. It is a BaseException, so that no environment takes it for an error of its own."""

    def __init__(self, messages: list[Message]) -> None:
        super().__init__("a turn that is not drawn yet")
        self.messages = messages


class VerifiersSource(Protocol):
    """An environment of verifiers. A task is what it calls one, opaque here."""

    max_turns: int
    has_tools: bool

    def tools(self) -> tuple[dict[str, Any], ...]:
        """Return the JSON schemas of the tools that the model may call."""

    def tasks(self, split: str) -> tuple[Iterator[Any], bool]:
        """Return the tasks of a split, and whether they are its own: otherwise a share is held
        out."""

    def endless(self) -> bool:
        """Return whether the tasks have no end."""

    def key(self, task: Any) -> str:
        """Return a text that identifies a task, the same in every process."""

    async def play(self, task: Any, turns: list[Message]) -> list[Message] | None:
        """Return the environment's messages after these turns of the assistant (without turns: the
        prompt); None when the exchange is over."""

    async def judge(self, task: Any, turns: list[Message]) -> Score:
        """Return the score of these turns."""


def refuse_missing(name: str, error: ImportError) -> ValueError:
    """Return an error about a package that is not installed, with the line that installs it."""
    lacking = (error.name or "").partition(".")[0]
    module = name.rpartition("/")[2].partition("@")[0].replace("-", "_").lower()
    if lacking == "verifiers":
        return ValueError(
            "it needs the package 'verifiers' (pip install 'lowroll[verifiers]'), and the "
            f"environment {name!r} beside it (prime env install {name})"
        )
    if lacking in ("", module) or lacking.endswith(module):
        return ValueError(
            f"no environment {name!r} is installed (prime env install {name}, or pip install the "
            f"package whose module is {module!r})"
        )
    return ValueError(f"environment {name!r} needs the module {lacking!r} (pip install {lacking})")


def text_of(content: Any) -> str:
    """Return a message's content as text. Raises ValueError for images and the like."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = [part if isinstance(part, dict) else part.model_dump() for part in content]
    if any(part.get("type") != "text" for part in parts):
        raise ValueError("a message holds more than text, which lowroll's models cannot read")
    return "\n".join(part["text"] for part in parts)


def plain(message: Any) -> Message:
    """Return a message of verifiers as the chat template has it."""
    given = message if isinstance(message, dict) else message.model_dump(exclude_none=True)
    said: Message = {"role": given["role"], "content": text_of(given.get("content"))}
    said |= {key: given[key] for key in ("name", "tool_call_id") if given.get(key)}
    if calls := given.get("tool_calls"):
        said["tool_calls"] = [
            {
                "type": "function",
                "id": call["id"],
                "function": {"name": call["name"], "arguments": _arguments(call["arguments"])},
            }
            for call in calls
        ]
    return said


def _arguments(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:  # a call that could not be read
        return text


def calls_of(turn: Message) -> list[dict[str, str]]:
    """Return the calls of a turn as verifiers has them."""
    return [
        {
            "id": call["id"],
            "name": call["function"]["name"],
            "arguments": json.dumps(call["function"]["arguments"]),
        }
        for call in turn.get("tool_calls", ())
    ]
