"""Answers held to a form: from `response_format`, `structured_outputs`, `guided_...` or a `tool_choice`
that asks for a call to the grammar that the engine draws by (`engine.grammar`).

JSON is written as Python writes it, `{"a": 1, "b": [2, 3]}`: no other white space can be drawn, so
none goes on for ever.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lowroll.server.asks import Offer, refuse
from lowroll.server.body import Formed
from lowroll.server.errors import Refused
from lowroll.server.serving import Serving
from lowroll.tool_calls import MOST_CALLS

# as Python writes JSON: else white space could go on for ever
JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_OBJECT = {"type": "object"}
_MISTRAL = "[TOOL_CALLS]"


@dataclass(frozen=True)
class Written:
    """How a format writes calls: `first` and `last` around all, `between` two, `open` and `close`
    around the JSON of each, whose key of the arguments is `arguments`."""

    between: str
    first: str = ""
    last: str = ""
    open: str = ""
    close: str = ""
    arguments: str = "arguments"


_CALLS = {
    "hermes": Written("\n", open="<tool_call>", close="</tool_call>"),
    "llama3_json": Written("; ", arguments="parameters"),
    "mistral": Written(", ", first=_MISTRAL, last="]"),
}


async def grammar_of(
    serving: Serving, body: Formed, offer: Offer | None = None
) -> tuple[str | None, dict[str, str]]:
    """The grammar of an answer, None where anything is allowed, and the client's name of it. Refused
    names the field that asks for what cannot be."""
    found = _forms(body)
    if offer is not None and offer.calls:
        found["tool_choice"] = lambda: _of_calls(serving, offer)
    if not found:
        return None, {}
    if len(found) > 1:
        first, second, *_ = found
        raise Refused(f"{second}: it does not go with {first}", second)
    ((field, write),) = found.items()
    if "grammar" not in serving.capabilities.sampler:
        raise Refused(f"{field}: not supported by this engine", field, code="unsupported")

    def compiled() -> str:
        try:
            text = write()
            serving.loop.compile_grammar(text)
        except ValueError as error:
            refuse(error, {"grammar": field})
        return text

    return await serving.work(compiled), {"grammar": field}


def _forms(body: Formed) -> dict[str, Callable[[], str]]:
    """Fields that say what the answer must be, with what writes its grammar."""
    found: dict[str, Callable[[], str]] = {}
    asked = body.response_format
    if asked is not None and asked.type == "json_object":
        found["response_format"] = partial(_of_json, _OBJECT)
    elif asked is not None and asked.type == "json_schema":
        if asked.json_schema is None:
            field = "response_format.json_schema"
            raise Refused(f"{field}: it goes with type json_schema", field)
        found["response_format"] = partial(_of_json, asked.json_schema.form)
    if (structured := body.structured_outputs) is not None:
        kinds = {
            "json": structured.form,
            "json_object": _OBJECT if structured.json_object else None,
            "regex": structured.regex,
            "choice": structured.choice,
            "grammar": structured.grammar,
        }
        found |= _writers("structured_outputs.", kinds)
    kinds = {
        "json": body.guided_json,
        "regex": body.guided_regex,
        "choice": body.guided_choice,
        "grammar": body.guided_grammar,
    }
    return found | _writers("guided_", kinds)


def _writers(prefix: str, kinds: dict[str, Any]) -> dict[str, Callable[[], str]]:
    return {
        f"{prefix}{kind}": partial(_WRITERS[kind], value)
        for kind, value in kinds.items()
        if value is not None
    }


def _of_json(schema: dict[str, Any]) -> str:
    return str(_matcher().grammar_from_json_schema(schema, overrides=JSON_OPTIONS))


def _of_regex(regex: str) -> str:
    """Of what a regular expression, as Rust has them, matches whole."""
    return str(_matcher().grammar_from_regex(regex))


def _matcher() -> Any:
    try:
        from llguidance import LLMatcher
    except ImportError:
        raise ValueError(
            "grammar: the server lacks llguidance: pip install 'lowroll[grammar]'"
        ) from None
    return LLMatcher


def _of_schema(schema: dict[str, Any] | str) -> str:
    """The schema may be a text that is JSON."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            schema = ""
    if not isinstance(schema, dict):
        raise ValueError("grammar: expected a JSON schema, an object")
    return _of_json(schema)


def _of_choice(choice: list[str]) -> str:
    if not choice or "" in choice:
        raise ValueError("grammar: expected one text or more, none of them empty")
    return "start: " + " | ".join(map(json.dumps, choice))


_WRITERS: dict[str, Callable[[Any], str]] = {
    "json": _of_schema,
    "json_object": _of_schema,
    "regex": _of_regex,
    "choice": _of_choice,
    "grammar": str,
}


def _of_calls(serving: Serving, offer: Offer) -> str:
    """One call or several of the tools that are asked for, and nothing else."""
    written = _CALLS.get(offer.format)
    if written is None:
        raise ValueError(f"grammar: calls written as {offer.format} are the model's; use auto")
    assert serving.vocabulary is not None
    tokens = {text: f"<[{token}]>" for token, text in serving.vocabulary.marks.items()}

    def literal(text: str) -> str:
        """A mark that is a special token by its id, any other text as it stands."""
        return tokens.get(text, json.dumps(text)) if text else ""

    more = f"({literal(written.between)} call){{0,{MOST_CALLS - 1}}}" if offer.several else ""
    opened = '"["' if written.first else ""
    count = range(len(offer.calls))
    rules = [
        f"start: {literal(written.first)} {opened} call {more} {literal(written.last)}",
        f"call: {literal(written.open)} named {literal(written.close)}",
        f"named: {' | '.join(f'named{i}' for i in count)}",
    ]
    for i, tool in enumerate(offer.calls):
        function = tool.function
        schema = (function.parameters or _OBJECT) | {"x-guidance": JSON_OPTIONS}
        head = f'{{"name": {json.dumps(function.name)}, "{written.arguments}": '
        rules.append(f'named{i}: {json.dumps(head)} arguments{i} "}}"')
        rules.append(f"arguments{i}: %json {json.dumps(schema)}")
    return "\n".join(rules)
