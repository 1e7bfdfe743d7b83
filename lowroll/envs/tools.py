"""Python functions as a model's tools (docs/tools.md).

Schemas come from signatures, type hints and docstrings. Every failure is an answer to the model: an
unknown name, wrong arguments, an exception, a timeout, an unreadable call. Functions run in scoring
workers under their limits, and should be deterministic, as turns may repeat.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable, Sequence
from enum import Enum
from functools import cached_property
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from lowroll.envs.base import Environment
from lowroll.envs.return_values import Outcome, as_score, awaited
from lowroll.envs.time_limit import limited
from lowroll.tool_calls import typed
from lowroll.types import Message, Prompt, Score

Function = Callable[..., Any]
CALL_SECONDS = 5.0
MOST_OUTPUT = 2000  # characters of an answer
MOST_TURNS = 8
MALFORMED = "malformed"  # the id of an unreadable call; some templates want 9 characters


class ToolTimeout(BaseException):
    """A call's timeout; a BaseException, so that no tool swallows it."""


class Toolbox:
    """Functions by name. call_seconds: the time limit of a call; most_output: characters of an
    answer. ValueError names a non-function or a duplicate name."""

    def __init__(
        self,
        functions: Sequence[Function],
        call_seconds: float = CALL_SECONDS,
        most_output: int = MOST_OUTPUT,
    ) -> None:
        for argument_name, value in (("call_seconds", call_seconds), ("most_output", most_output)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{argument_name}: expected a positive number, got {value!r}")
        self.functions: dict[str, Function] = {}
        for function in functions:
            name = getattr(function, "__name__", None)
            if not callable(function) or name is None or name == "<lambda>":
                raise ValueError(f"tools: expected functions with a name, got {function!r}")
            if name in self.functions:
                raise ValueError(f"tools: two functions are called {name!r}")
            self.functions[name] = function
        self.call_seconds, self.most_output = call_seconds, int(most_output)

    @cached_property
    def schemas(self) -> tuple[dict[str, Any], ...]:
        """The JSON schemas for chat templates; ValueError names a function and its fault."""
        return tuple(_json_schema(function) for function in self.functions.values())

    def answer(self, said: Message) -> list[Message]:
        """Return the results of a turn's calls, in order, then errors of unreadable ones."""
        answers = [self._answer(call) for call in said.get("tool_calls", ())]
        for reason in said.get("ill_formed", ()):
            text = f"error: this tool call cannot be read: {reason}"
            answers.append(self._message(None, MALFORMED, text, "form"))
        return answers

    def _answer(self, call: dict[str, Any]) -> Message:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        failed: str | None = "call"
        try:
            text, failed = self._call(name, arguments), None
        except ToolTimeout:
            text = f"error: {name} took longer than {self.call_seconds:g} s"
        except _Refused as error:
            text = f"error: {error}"
        except (Exception, SystemExit) as error:
            text = f"error: {type(error).__name__}: {error}"
        return self._message(name, call["id"], text, failed)

    def _message(self, name: str | None, id: str, text: str, failed: str | None) -> Message:
        if len(text) > self.most_output:
            left_out = len(text) - self.most_output
            text = f"{text[: self.most_output]}... ({left_out} more characters)"
        text = text.encode("utf-8", "replace").decode()  # replaces lone surrogates
        message: Message = {"role": "tool", "tool_call_id": id, "content": text}
        if name is not None:
            message["name"] = name
        if failed is not None:
            message["failed"] = failed
        return message

    def _call(self, name: str, arguments: dict[str, Any]) -> str:
        function = self.functions.get(name)
        if function is None:
            raise _Refused(f"there is no tool {name!r}; there are: {', '.join(self.functions)}")
        arguments = typed(arguments, _text_parameters(function))
        try:
            inspect.signature(function).bind(**arguments)
        except TypeError as error:
            raise _Refused(f"{name}: {error}") from None
        with limited(self.call_seconds, ToolTimeout):
            value = function(**arguments)
            if inspect.isawaitable(value):
                value = awaited(_await_within(value, self.call_seconds))
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


class _Refused(ValueError):
    """A call that no function can take."""


def _text_parameters(function: Function) -> set[str]:
    hints = get_type_hints(function)
    names = inspect.signature(function).parameters
    return {name for name in names if _admits_text(hints.get(name, Any))}


def _admits_text(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return any(isinstance(value, str) for value in get_args(hint))
    if get_origin(hint) in (Union, UnionType):
        return any(map(_admits_text, get_args(hint)))
    return hint in (str, Any) or (isinstance(hint, type) and issubclass(hint, Enum))


async def _await_within(value: Any, seconds: float) -> Any:
    import asyncio

    try:
        return await asyncio.wait_for(value, seconds)
    except TimeoutError:
        raise ToolTimeout from None


def counts(messages: Sequence[Message]) -> dict[str, float]:
    """Count a conversation's calls: all, failed, unreadable."""
    calls = sum(len(message.get("tool_calls", ())) for message in messages)
    failed = sum(message.get("failed") == "call" for message in messages)
    ill_formed = sum(len(message.get("ill_formed", ())) for message in messages)
    return {
        "tool_calls": float(calls),
        "failed_tool_calls": float(failed),
        "ill_formed_tool_calls": float(ill_formed),
    }


class ToolEnvironment(Environment):
    """An environment with tools, until a turn calls nothing or after `max_turns` turns. Subclasses
    define `prompt`, and `score` of the last turn's text."""

    functions: Sequence[Function] = ()

    def __init__(
        self,
        *,
        name: str,
        seed: int = 0,
        system: str | None = None,
        template: str = "{text}",
        functions: Sequence[Function] | None = None,
        max_turns: int = MOST_TURNS,
        call_seconds: float = CALL_SECONDS,
        most_output: int = MOST_OUTPUT,
    ) -> None:
        super().__init__(name=name, seed=seed, system=system, template=template)
        self.max_turns = max_turns
        # functions of the class body are not methods
        plain_functions = [
            inspect.unwrap(f) for f in (self.functions if functions is None else functions)
        ]
        try:
            self.toolbox = Toolbox(plain_functions, call_seconds, most_output)
        except ValueError as error:
            raise ValueError(f"env {name!r}: {error}") from None

    @property
    def tools(self) -> tuple[dict[str, Any], ...]:  # type: ignore[override]
        return self.toolbox.schemas

    def respond(self, prompt: Prompt, messages: list[Message]) -> list[Message] | None:
        return self.toolbox.answer(messages[-1]) or None

    def score_conversation(self, prompt: Prompt, messages: list[Message]) -> Outcome:
        outcome = self.score(prompt, messages[-1]["content"])
        if inspect.isawaitable(outcome):
            return _later_with_counts(outcome, messages)
        return with_counts(outcome, messages)


def with_counts(outcome: object, messages: Sequence[Message]) -> Score:
    """Return a score with the counts of calls as metrics."""
    score = as_score(outcome)
    return Score(score.reward, counts(messages) | score.metrics)


async def _later_with_counts(outcome: Awaitable[object], messages: Sequence[Message]) -> Score:
    return with_counts(await outcome, messages)


def _json_schema(function: Function) -> dict[str, Any]:
    from transformers.utils import get_json_schema
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
    )

    try:
        return dict(get_json_schema(function))
    except (DocstringParsingException, TypeHintParsingException, NameError) as error:
        raise ValueError(
            f"tool {function.__name__!r}: {error}. A tool needs type hints, and a docstring that "
            "says what it does and, under 'Args:', what each argument is"
        ) from error
