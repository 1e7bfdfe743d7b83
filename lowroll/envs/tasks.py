"""The checked prompt of an environment, with named errors of a user's code."""

from __future__ import annotations

import json

from lowroll.envs.base import Environment
from lowroll.envs.data.files import no_text
from lowroll.envs.table import own_file
from lowroll.envs.user_errors import blamed
from lowroll.types import Prompt


def prompt_at(env: Environment, index: int, split: str = "train") -> Prompt:
    """Return a task. ValueError names the environment, and file and line or the task, when its code
    raises or its prompt is not valid chat messages and JSON data."""
    with blamed(f"env {env.name!r}: prompt({index}, {split!r})", own_file(type(env))):
        prompt = env.prompt(index, split)
    if not isinstance(prompt, Prompt):
        raise ValueError(
            f"env {env.name!r}: prompt({index}, {split!r}) must return a Prompt (as self.ask "
            f"does), not {type(prompt).__name__}"
        )
    where = f"env {env.name!r}: prompt {prompt.id!r}"
    if not _are_messages(prompt.messages):
        raise ValueError(f"{where}: messages must be a list of {{role, content}} in text")
    try:
        json.dumps(vars(prompt), ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: {no_text(error)}") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{where}: info must be JSON data: {error}") from None
    if (fault := _non_json_part(prompt.info)) is not None:
        raise ValueError(
            f"{where}: info must be JSON data, and {fault} would not come back as it is"
        )
    return prompt


def _non_json_part(value: object) -> str | None:
    """Describe a part that JSON would change (a non-text key, a tuple), or return None."""
    if isinstance(value, tuple):
        return f"the tuple {str(value)[:60]}"
    children: list[object] = []
    if isinstance(value, list):
        children = value
    elif isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                return f"the key {key!r}"
        children = list(value.values())
    faults = map(_non_json_part, children)
    return next((fault for fault in faults if fault is not None), None)


def _are_messages(messages: object) -> bool:
    return (
        isinstance(messages, list)
        and bool(messages)
        and all(
            isinstance(message, dict)
            and all(isinstance(message.get(key), str) for key in ("role", "content"))
            for message in messages
        )
    )
