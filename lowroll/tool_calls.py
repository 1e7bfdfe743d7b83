"""Readers of tool calls in a model's turns, one for each format.

    hermes        <tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>     Qwen2.5, Qwen3, Hermes
    qwen3_coder   <tool_call><function=add><parameter=a>1</parameter></function></tool_call>
    llama3_json   {"name": "add", "parameters": {"a": 1}}    the whole turn; several with ";" between
    mistral       [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}], or add{"a": 1} and
                  add[ARGS]{"a": 1} behind the mark

An unreadable call is a sentence in `errors`, never an exception. The time is linear in the text.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn

from lowroll.types import Message

MOST_TEXT = 50_000  # characters read of a turn
MOST_CALLS = 32  # of a turn
MOST_NAME = 128  # characters of a tool's name or a call's id
MOST_DEPTH = 64  # of nested arguments

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_FUNCTION, _PARAMETER = "<function=", "<parameter="
_MISTRAL, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LLAMA = "<|python_tag|>"
_SPACE = " \t\r\n"
# special tokens of some tokenizers
_MARKS = {"hermes": _OPEN, "qwen3_coder": _OPEN, "llama3_json": _LLAMA, "mistral": _MISTRAL}
UNTYPED = frozenset(("qwen3_coder",))
WORDS = frozenset((_OPEN, _CLOSE, _MISTRAL, _ARGS, _CALL_ID, _LLAMA))


class IllFormed(ValueError):
    """A call that cannot be read, with the reason."""


@dataclass(frozen=True)
class ToolInvocation:
    """A tool's name and its JSON arguments. `id` is "" if the model wrote none."""

    name: str
    arguments: dict[str, Any]
    id: str = ""


@dataclass(frozen=True)
class Spoken:
    """A turn: the text before the first call, the calls, and errors of unreadable ones."""

    content: str
    calls: tuple[ToolInvocation, ...] = ()
    errors: tuple[str, ...] = ()

    def message(self, content: str) -> Message:
        """Return the turn as a chat message with all its text."""
        said: Message = {"role": "assistant", "content": content}
        if self.calls:
            said["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id or f"call{number:05d}",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for number, call in enumerate(self.calls)
            ]
        if self.errors:
            said["ill_formed"] = list(self.errors)
        return said


@dataclass
class _Found:
    calls: list[ToolInvocation] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    @property
    def full(self) -> bool:
        return len(self.calls) + len(self.errors) >= MOST_CALLS

    def add(self, read: Callable[[Any], ToolInvocation], source: Any) -> None:
        try:
            self.calls.append(read(source))
        except IllFormed as error:
            self.errors.append(str(error))


def format_of(template: str) -> str | None:
    """Return the format of calls in a chat template's source, or None."""
    if _MISTRAL in template:
        return "mistral"
    if _OPEN in template:
        return "qwen3_coder" if _FUNCTION in template else "hermes"
    if _LLAMA in template or ('"parameters"' in template and "ipython" in template):
        return "llama3_json"
    return None


def read(format: str, text: str) -> Spoken:
    """Split a turn's first `MOST_TEXT` characters. ValueError for an unknown format."""
    if format not in FORMATS:
        raise ValueError(f"tool calls: unknown format {format!r}; known: {', '.join(FORMATS)}")
    return FORMATS[format](text[:MOST_TEXT])


class Speech:
    """A turn that arrives in pieces. Text that may be a call is held back, and returned as text if
    it cannot be read as one."""

    def __init__(self, format: str) -> None:
        self.format = format
        self.text = ""
        self.given = 0

    def feed(self, piece: str) -> str:
        """Take the next piece and return the text that is certain."""
        self.text += piece
        return self._give(self._plain())

    def end(self) -> tuple[str, tuple[ToolInvocation, ...]]:
        """Return the rest of the text, and the calls."""
        calls = read(self.format, self.text).calls
        if not calls:
            return self._give(len(self.text)), ()
        return self._give(self._plain()), calls

    def _give(self, until: int) -> str:
        new = self.text[self.given : until]
        self.given = max(self.given, until)
        return new

    def _plain(self) -> int:
        text, mark = self.text, _MARKS[self.format]
        until = text.find(mark, self.given)
        if until < 0 and self.format == "llama3_json" and text.lstrip(_SPACE)[:1] in ("", "{"):
            return 0
        if until < 0:
            until = len(text) - overlap(text, mark)
        return len(text[:until].rstrip(_SPACE))


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of `text` that is a proper prefix of `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def typed(arguments: dict[str, Any], texts: Container[str]) -> dict[str, Any]:
    """Parse an `UNTYPED` format's values as JSON where possible. texts: parameters that may be a
    text."""
    return {
        key: _unquoted(value) if isinstance(value, str) and key not in texts else value
        for key, value in arguments.items()
    }


def texts(schema: dict[str, Any], names: Iterable[str]) -> set[str]:
    """Return the parameters among `names` that a tool's JSON schema lets be a text."""
    properties = schema.get("properties")
    known = properties if isinstance(properties, dict) else {}
    return {name for name in names if _admits_text(known.get(name))}


def _admits_text(schema: Any) -> bool:
    if not isinstance(schema, dict):
        return True
    if isinstance(schema.get("enum"), list):
        return any(isinstance(value, str) for value in schema["enum"])
    for some in ("anyOf", "oneOf"):
        if isinstance(schema.get(some), list):
            return any(map(_admits_text, schema[some]))
    kinds = schema.get("type", "string")
    return "string" in (kinds if isinstance(kinds, list) else [kinds])


def _unquoted(text: str) -> Any:
    try:
        return _json(text.strip())
    except IllFormed:
        return text


def _tagged(call: Callable[[str], ToolInvocation], text: str) -> Spoken:
    begin = text.find(_OPEN)
    if begin < 0:
        return Spoken(text)
    found, at = _Found(), begin
    while at >= 0 and not found.full:
        end = text.find(_CLOSE, at)
        found.add(call, text[at + len(_OPEN) : end if end >= 0 else None])
        at = text.find(_OPEN, end) if end >= 0 else -1
    return _spoken(text[:begin], found)


def _json_call(inside: str) -> ToolInvocation:
    value, rest = _first_json(inside)
    if rest.strip(_SPACE)[:1] not in ("", "<"):  # the end tag of the turn may follow
        raise IllFormed("not JSON: more follows behind it")
    return _call(value)


def _xml_call(inside: str) -> ToolInvocation:
    begin = inside.find(_FUNCTION)
    if begin < 0:
        raise IllFormed("a tool call needs <function=NAME> inside")
    name, closed, rest = inside[begin + len(_FUNCTION) :].partition(">")
    if not closed:
        raise IllFormed("<function= lacks its >")
    inner, ended, _ = rest.partition("</function>")
    if not ended:
        raise IllFormed("the call lacks its </function>")
    arguments: dict[str, Any] = {}
    for piece in inner.split(_PARAMETER)[1:]:
        key, closed, value = piece.partition(">")
        if not closed:
            raise IllFormed(f"{_PARAMETER} lacks its >")
        value = value.rpartition("</parameter>")[0] if "</parameter>" in value else value
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    return _call({"name": name.strip(), "arguments": arguments})


def _llama3_json(text: str) -> Spoken:
    before, marked, rest = text.partition(_LLAMA)
    if not marked:
        before, rest = "", text
    if not marked and not _begins_with_name(rest):
        return Spoken(text)
    found = _Found()
    while not found.full:
        try:
            value, rest = _first_json(rest)
        except IllFormed as error:
            found.errors.append(str(error))
            break
        found.add(_call, value)
        rest = rest.lstrip(_SPACE)
        if not rest.startswith(";"):
            break
        rest = rest[1:]
    return _spoken(before, found)


def _begins_with_name(text: str) -> bool:
    brace, inside = text.lstrip(_SPACE)[:1], text.lstrip(_SPACE)[1:].lstrip(_SPACE)
    return brace == "{" and inside.startswith(('"name"', '"type": "function"', '"parameters"'))


def _mistral(text: str) -> Spoken:
    before, marked, rest = text.partition(_MISTRAL)
    if not marked:
        return Spoken(text)
    found = _Found()
    for piece in rest.split(_MISTRAL):
        if found.full:
            break
        if piece.lstrip(_SPACE).startswith(("[", "{")):
            _take_list(piece, found)
        else:
            found.add(_named_call, piece)
    return _spoken(before, found)


def _take_list(piece: str, found: _Found) -> None:
    try:
        value, _ = _first_json(piece)
    except IllFormed as error:
        found.errors.append(str(error))
        return
    for one in value if isinstance(value, list) else [value]:
        if found.full:
            return
        found.add(_call, one)


def _named_call(piece: str) -> ToolInvocation:
    """Read NAME{...}, NAME[ARGS]{...} and NAME[CALL_ID]ID[ARGS]{...}."""
    brace = piece.find("{")
    if brace < 0:
        raise IllFormed("a tool call needs its arguments as a JSON object behind its name")
    name, _, id = piece[:brace].partition(_ARGS)[0].partition(_CALL_ID)
    arguments, _ = _first_json(piece[brace:])
    return _call({"name": name.strip(), "arguments": arguments, "id": id.strip()})


FORMATS: dict[str, Callable[[str], Spoken]] = {
    "hermes": partial(_tagged, _json_call),
    "qwen3_coder": partial(_tagged, _xml_call),
    "llama3_json": _llama3_json,
    "mistral": _mistral,
}


def _spoken(before: str, found: _Found) -> Spoken:
    return Spoken(before.strip(), tuple(found.calls), tuple(found.errors))


def _call(value: Any) -> ToolInvocation:
    if isinstance(value, dict) and isinstance(value.get("function"), dict):
        value = {"id": value.get("id"), **value["function"]}
    if not isinstance(value, dict):
        raise IllFormed("a tool call must be a JSON object with name and arguments")
    name = value.get("name")
    if not isinstance(name, str) or not 0 < len(name) <= MOST_NAME or not name.isprintable():
        raise IllFormed('a tool call needs "name", the name of a tool')
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):  # some models write a JSON text
        arguments = _json(arguments)
    if arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise IllFormed('"arguments" must be a JSON object')
    _check(arguments)
    id = value.get("id")
    if not isinstance(id, str) or len(id) > MOST_NAME or not id.isprintable():
        id = ""
    return ToolInvocation(name, arguments, id)


def _check(arguments: dict[str, Any]) -> None:
    if any(depth > MOST_DEPTH for depth in depths(arguments)):
        raise IllFormed(f"the arguments are nested more than {MOST_DEPTH} deep")
    try:
        json.dumps(arguments, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        raise IllFormed("the arguments hold half a surrogate pair, which is no text") from None


def depths(value: Any) -> Iterator[int]:
    """Yield the depth of each value, without recursion."""
    open = [(value, 1)]
    while open:
        inner, depth = open.pop()
        yield depth
        if depth <= MOST_DEPTH and isinstance(inner, dict | list):
            parts = inner.values() if isinstance(inner, dict) else inner
            open += [(part, depth + 1) for part in parts]


def _refuse(word: str) -> NoReturn:
    raise IllFormed(f"{word} is no JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        _refuse(digits[:40])
    return value


_DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def _first_json(text: str) -> tuple[Any, str]:
    text = text.lstrip(_SPACE)
    try:
        value, end = _DECODER.raw_decode(text)
    except json.JSONDecodeError as error:
        raise IllFormed(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise IllFormed("not JSON that can be read: nested too deep") from None
    except IllFormed:
        raise
    except ValueError:  # an integer of thousands of digits
        raise IllFormed("not JSON that can be read: a number is too long") from None
    return value, text[end:]


def _json(text: str) -> Any:
    value, rest = _first_json(text)
    if rest.strip(_SPACE):
        raise IllFormed("not JSON: more follows behind it")
    return value
