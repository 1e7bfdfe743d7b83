"""The checked prompt of an environment, with named errors of a user's code."""

from __future__ import annotations

import json

from lowroll.envs.base import Environment
from lowroll.envs.data.files import no_text
from lowroll.envs.table import own_file
from lowroll.envs.user_errors import blamed
from lowroll.types import Prompt


def prompt_at(env: Environment, index: int, split: str = "train") -> Prompt:
    """Return a task. ValueError names the environment and the task, when its code raises or its
    prompt is invalid."""
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
    sent = json.loads(json.dumps(prompt.info))
    # JSON makes a list of a tuple, and text of other keys
    if changed := [
        key for key, value in prompt.info.items() if key not in sent or sent[key] != value
    ]:
        raise ValueError(
            f"{where}: info must be JSON data, and info[{changed[0]!r}], "
            f"{repr(prompt.info[changed[0]])[:60]}, would not come back as it is"
        )
    return prompt


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
