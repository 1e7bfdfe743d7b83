"""A row's columns: prompt, gold answer, demonstration (docs/data.md).

They may be named (`reward_model.ground_truth` is a key inside one); otherwise the first usual name
with a value counts, so rows of TRL, verl, DAPO, GSM8K and MATH need no mapping.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime, time
from typing import Any

from lowroll.types import Message, nearest

PROMPTS = ("prompt", "question", "problem", "messages", "query", "instruction")
ANSWERS = (
    "reward_model.ground_truth",
    "answer",
    "expected_answer",
    "final_answer",
    "ground_truth",
    "solution",
)
COMPLETIONS = ("completion", "response", "messages")


@dataclass(frozen=True)
class DataTask:
    """A parsed row as JSON data. The prompt has no demonstration."""

    prompt: str | list[Message]
    answer: Any = None
    completion: str | None = None
    columns: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Columns:
    """The columns to use; None: the first usual one."""

    prompt: str | None = None
    answer: str | None = None
    completion: str | None = None

    def task(self, row: Mapping[str, Any], where: str) -> DataTask:
        """Parse a row. ValueError names the place, the wrong column and the present ones."""
        prompt_name, prompt_value = _find_column(row, self.prompt, PROMPTS, where, "prompt")
        if prompt_name is None:
            if null := [key for key in PROMPTS if key in row]:
                raise ValueError(f"{where}: column {null[0]!r} is null: drop the row, or fill it")
            raise ValueError(
                f"{where}: none of the columns {', '.join(PROMPTS)}; name one, as in prompt: "
                f"{next(iter(row), 'text')}; it has: {', '.join(row)}"
            )
        prompt = _parse_prompt(prompt_value, f"{where}: column {prompt_name!r}")
        _, answer_value = _find_column(row, self.answer, ANSWERS, where, "answer")
        completion_name, completion_value = _find_column(
            row, self.completion, COMPLETIONS, where, "completion"
        )
        completion = None
        if completion_name is not None:
            completion_where = f"{where}: column {completion_name!r}"
            completion = _parse_completion(completion_value, completion_where)
        if isinstance(prompt, list) and prompt[-1]["role"] == "assistant":
            prompt = prompt[:-1]
        if not prompt:
            raise ValueError(f"{where}: column {prompt_name!r}: nothing is asked in it")
        answer = plain(answer_value)
        if answer is ODD:
            raise ValueError(f"{where}: the answer must be text, a number or a list of such")
        return DataTask(prompt, answer, completion, _json_columns(row))


def _json_columns(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key in row if (value := plain(row[key])) is not ODD}


def _find_column(
    row: Mapping[str, Any], named: str | None, usual: Sequence[str], where: str, what: str
) -> tuple[str | None, Any]:
    if named is not None:
        return named, _value_at(row, named, where, what)
    for name in usual:
        column, _, inner_key = name.partition(".")
        value = row.get(column)
        if inner_key:
            value = value.get(inner_key) if isinstance(value, Mapping) else None
        if value is not None:
            return name, value
    return None, None


def _value_at(row: Mapping[str, Any], path: str, where: str, what: str) -> Any:
    if path in row:
        return row[path]
    value: Any = row
    for path_key in path.split("."):
        if not isinstance(value, Mapping) or path_key not in value:
            present_keys = [str(key) for key in (value if isinstance(value, Mapping) else row)]
            hint = nearest(path_key, present_keys, repr)
            raise ValueError(
                f"{where}: {what}: no column {path!r}{hint}; it has: {', '.join(present_keys)}"
            )
        value = value[path_key]
    return value


def _parse_prompt(value: Any, where: str) -> str | list[Message]:
    if isinstance(value, str):
        if not value.strip():
            raise ValueError(f"{where}: it is empty")
        return value
    if isinstance(value, list):
        if not value:
            raise ValueError(f"{where}: it is an empty list of messages")
        return [_parse_message(message, f"{where}: message {i}") for i, message in enumerate(value)]
    raise ValueError(
        f"{where}: must be a text or a list of chat messages, got {type(value).__name__}"
    )


def _parse_message(value: Any, where: str) -> Message:
    if not isinstance(value, Mapping) or not isinstance(value.get("role"), str):
        raise ValueError(f"{where}: must be {{role, content}}, got {str(value)[:80]!r}")
    content = _message_content(value, where)
    present_fields = {key: value[key] for key in value if value[key] is not None}
    return {**_json_columns(present_fields), "content": content}


def _message_content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping)]
        kinds = {part.get("type", "text") for part in parts}
        if len(parts) < len(content) or kinds - {"text"}:
            raise ValueError(f"{where}: only text can be asked, got parts of {sorted(kinds)}")
        return "".join(str(part.get("text") or "") for part in parts)
    if isinstance(content, str):
        return content
    has_only_calls = (
        content is None and message["role"] == "assistant" and message.get("tool_calls")
    )
    if not has_only_calls:
        raise ValueError(
            f"{where}: its content must be text, got {type(content).__name__} (only an "
            "assistant's message with tool_calls may have none)"
        )
    return ""


def _parse_completion(value: Any, where: str) -> str | None:
    if isinstance(value, str):
        return value
    prompt = _parse_prompt(value, where)
    last_message = prompt[-1]
    assert isinstance(last_message, dict)
    return last_message["content"] if last_message["role"] == "assistant" else None


ODD = object()


def plain(value: Any) -> Any:
    """Return JSON data, null for non-finite numbers, and ODD for anything else."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (str, int, float)):
        return value
    if isinstance(value, (datetime, date, time)):
        return value.isoformat()
    if isinstance(value, Mapping):
        json_values = {str(key): plain(inner) for key, inner in value.items()}
        return ODD if any(inner is ODD for inner in json_values.values()) else json_values
    if isinstance(value, (list, tuple)):
        items = [plain(inner) for inner in value]
        return ODD if any(item is ODD for item in items) else items
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return ODD
    return value
