"""Structured outputs: the grammar (`engine.grammar`) of `response_format`, `structured_outputs`,
`guided_...`, or a `tool_choice` that requires a call.

JSON is written as Python writes it, `{"a": 1, "b": [2, 3]}`, since free white space could go on
forever.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowroll.server.limits import ServerState
from lowroll.server.protocol import (
    ChatRequest,
    Refused,
    StructuredOutputFields,
    Tool,
    refuse_engine_error,
    wrong_field,
)
from lowroll.tool_calls import MOST_CALLS

JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_ANY_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class CallSyntax:
    """The syntax of calls: `first` and `last` around all, `between` two, `open` and `close` around
    the JSON of each; `arguments` is the key of the arguments."""

    between: str
    first: str = ""
    last: str = ""
    open: str = ""
    close: str = ""
    arguments: str = "arguments"


_CALL_SYNTAX = {
    "hermes": CallSyntax("\n", open="<tool_call>", close="</tool_call>"),
    "llama3_json": CallSyntax("; ", arguments="parameters"),
    "mistral": CallSyntax(", ", first="[TOOL_CALLS]", last="]"),
}


@dataclass(frozen=True)
class OfferedTools:
    """The tools that a model may call, and the format of its calls (`lowroll.tool_calls`). several:
    more than one call in a turn. required: it must call one of these, without other text."""

    tools: Sequence[Tool]
    format: str
    several: bool
    required: Sequence[Tool] = ()


def offered_tools(state: ServerState, body: ChatRequest) -> OfferedTools | None:
    """Return the tools that the model may call; None with tool_choice "none". Refuse tools that
    cannot be shown, calls that cannot be read, and an unknown choice."""
    required = _required_tools(body)
    offered = None
    if body.tools and body.tool_choice != "none" and state.chat is not None:
        try:
            state.chat.check_tools()
            format = state.chat.tool_format
        except ValueError as error:
            raise wrong_field("tools", str(error)) from None
        offered = OfferedTools(body.tools, format, body.parallel_tool_calls, required)
    check_tool_names(body.tools)
    return offered


def _required_tools(body: ChatRequest) -> Sequence[Tool]:
    choice = body.tool_choice
    if choice in ("auto", "none"):
        return ()
    if choice == "required":
        if not body.tools:
            raise wrong_field("tool_choice", "required, and there are no tools")
        return body.tools
    named = choice if isinstance(choice, dict) else {}
    function = named.get("function")
    if named.get("type") != "function" or not isinstance(function, dict):
        raise wrong_field(
            "tool_choice",
            'auto, none, required or {"type": "function", "function": {"name": ...}}',
        )
    named_tools = [tool for tool in body.tools if tool.function.name == function.get("name")]
    if not named_tools:
        raise Refused("tool_choice: no tool has this name", "tool_choice.function.name")
    return named_tools


def check_tool_names(tools: Sequence[Tool]) -> None:
    seen_names = set[str]()
    for i, tool in enumerate(tools):
        name = tool.function.name
        if name in seen_names:
            raise wrong_field(f"tools[{i}].function.name", f"two tools are called {name!r}")
        seen_names.add(name)


async def grammar_of(
    state: ServerState, body: StructuredOutputFields, offered: OfferedTools | None = None
) -> tuple[str | None, dict[str, str]]:
    """Return the grammar of an answer, and the client's name of the field `grammar`; (None, {})
    where anything is allowed. Refuse two grammars, and an invalid one."""
    writers = _requested_grammars(body)
    if offered is not None and offered.required:
        writers["tool_choice"] = lambda: _call_grammar(state, offered)
    if not writers:
        return None, {}
    if len(writers) > 1:
        first_field, second_field, *_ = writers
        raise wrong_field(second_field, f"it does not go with {first_field}")
    ((field, write_grammar),) = writers.items()
    if "grammar" not in state.capabilities.sampler:
        raise wrong_field(field, "not supported by this engine", code="unsupported")

    def compiled() -> str:
        try:
            text = write_grammar()
            state.engine.compile_grammar(text)
        except ValueError as error:
            refuse_engine_error(error, {"grammar": field})
        return text

    return await state.run_in_worker(compiled), {"grammar": field}


def _requested_grammars(body: StructuredOutputFields) -> dict[str, Callable[[], str]]:
    writers: dict[str, Callable[[], str]] = {}
    response_format = body.response_format
    if response_format is not None and response_format.type == "json_object":
        writers["response_format"] = partial(_json_grammar, _ANY_OBJECT)
    elif response_format is not None and response_format.type == "json_schema":
        if response_format.json_schema is None:
            raise wrong_field("response_format.json_schema", "it goes with type json_schema")
        writers["response_format"] = partial(_json_grammar, response_format.json_schema.form)
    if (structured := body.structured_outputs) is not None:
        kinds = {
            "json": structured.form,
            "json_object": _ANY_OBJECT if structured.json_object else None,
            "regex": structured.regex,
            "choice": structured.choice,
            "grammar": structured.grammar,
        }
        writers |= _grammar_writers("structured_outputs.", kinds)
    kinds = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    return writers | _grammar_writers("guided_", kinds)


def _grammar_writers(prefix: str, kinds: dict[str, Any]) -> dict[str, Callable[[], str]]:
    return {
        f"{prefix}{kind}": partial(_WRITERS[kind], value)
        for kind, value in kinds.items()
        if value is not None
    }


def _json_grammar(schema: dict[str, Any]) -> str:
    return str(_import_matcher().grammar_from_json_schema(schema, overrides=JSON_OPTIONS))


def _regex_grammar(regex: str) -> str:
    return str(_import_matcher().grammar_from_regex(regex))


def _import_matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ValueError(
            "grammar: the server lacks llguidance: pip install 'lowroll[grammar]'"
        ) from None
    return LLMatcher


def _schema_grammar(schema: dict[str, Any] | str) -> str:
    if isinstance(schema, str):
        with suppress(ValueError, RecursionError):
            schema = json.loads(schema)
    if not isinstance(schema, dict):
        raise ValueError("grammar: expected a JSON schema, an object")
    return _json_grammar(schema)


def _choice_grammar(choice: list[str]) -> str:
    if not choice or "" in choice:
        raise ValueError("grammar: expected one text or more, none of them empty")
    return "start: " + " | ".join(map(json.dumps, choice))


_WRITERS: dict[str, Callable[[Any], str]] = {
    "json": _schema_grammar,
    "json_object": _schema_grammar,
    "regex": _regex_grammar,
    "choice": _choice_grammar,
    "grammar": str,
}


def _call_grammar(state: ServerState, offered: OfferedTools) -> str:
    syntax = _CALL_SYNTAX.get(offered.format)
    if syntax is None:
        raise ValueError(f"grammar: calls written as {offered.format} are the model's; use auto")
    assert state.vocabulary is not None
    tokens = {text: f"<[{token}]>" for token, text in state.vocabulary.marks.items()}

    def literal(text: str) -> str:
        return tokens.get(text, json.dumps(text)) if text else ""

    more_calls = (
        f"({literal(syntax.between)} call){{0,{MOST_CALLS - 1}}}" if offered.several else ""
    )
    open_list = '"["' if syntax.first else ""
    rules = [
        f"start: {literal(syntax.first)} {open_list} call {more_calls} {literal(syntax.last)}",
        f"call: {literal(syntax.open)} named {literal(syntax.close)}",
        "named: " + " | ".join(f"named{i}" for i in range(len(offered.required))),
    ]
    for i, tool in enumerate(offered.required):
        function = tool.function
        schema = (function.parameters or _ANY_OBJECT) | {"x-guidance": JSON_OPTIONS}
        call_head = f'{{"name": {json.dumps(function.name)}, "{syntax.arguments}": '
        rules.append(f'named{i}: {json.dumps(call_head)} arguments{i} "}}"')
        rules.append(f"arguments{i}: %json {json.dumps(schema)}")
    return "\n".join(rules)
