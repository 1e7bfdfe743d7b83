"""Calibration text as token ids: what `weights.awq` measures the loudness of channels on, and
`weights.gptq` what columns say together.

A `.jsonl` file holds one document a line, `{"text": "..."}` or `{"messages": [...]}` (through the
chat template); each gives its first `length` tokens. So do the responses that `lowroll eval` keeps
and the samples that a run writes: what a policy says itself is the text that its rollouts will see.
Any other file is one plain text, cut into pieces of `length`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from lowroll.envs.data.files import read_jsonl
from lowroll.model.tokenizer import ChatTokenizer

_CHARACTERS_PER_TOKEN = 32  # of a plain text no more is read than could be needed


def calibration_sequences(
    path: str | Path,
    tokenizer: Any,
    num_samples: int = 128,
    length: int = 512,
) -> list[list[int]]:
    """At most `num_samples` sequences of at most `length` token ids, in the file's order.

    tokenizer: a transformers tokenizer. ValueError names the file, and the line that has no text.
    """
    path = Path(path)
    for name, value in (("calibration samples", num_samples), ("calibration length", length)):
        if value < 1:
            raise ValueError(f"{name}: must be at least 1, is {value}")
    if not path.is_file():
        raise ValueError(f"calibration: {path}: no such file")
    if path.suffix == ".jsonl":
        rows = _from_lines(path, tokenizer, length)
    else:
        rows = _from_text(path, tokenizer, length, num_samples * length * _CHARACTERS_PER_TOKEN)
    sequences = list(islice((ids for ids in rows if ids), num_samples))
    if not sequences:
        raise ValueError(f"calibration: {path}: no text in it")
    return sequences


def _from_lines(path: Path, tokenizer: Any, length: int) -> Iterator[list[int]]:
    for where, row in read_jsonl(str(path)):
        text = row.get("text")
        if (drawn := _drawn(row)) is not None:
            chats = drawn
        elif isinstance(text, str):
            yield tokenizer.encode(text)[:length]
            continue
        elif isinstance(messages := row.get("messages"), list) and messages:
            chats = [messages]
        else:
            raise ValueError(
                f"calibration: {where}: expected a 'text' or a list of 'messages', found "
                f"{', '.join(sorted(row)) or 'nothing'}"
            )
        for chat in chats:
            try:
                yield ChatTokenizer(tokenizer).encode_chat(chat, open_turn=False)[:length]
            # of the template; of messages that are no objects
            except (ValueError, AttributeError) as error:
                raise ValueError(
                    f"calibration: {where}: messages: the chat template refuses them ({error})"
                ) from error


def _drawn(row: dict[str, Any]) -> list[list[Any]] | None:
    """The conversations in a line of `lowroll eval`'s responses (`runs.responses`), or of a run's
    samples; None: it is neither. A line that says something else about them has none."""
    prompt, responses = row.get("prompt"), row.get("responses")
    if row.get("kind") in ("asked", "scored", "batch"):
        return []
    if isinstance(responses, list) and isinstance(row.get("messages"), list):
        asked = row["messages"]
    elif isinstance(prompt, dict) and isinstance(prompt.get("messages"), list):
        asked, responses = prompt["messages"], [row]
    else:
        return None
    return [
        [*asked, *(one.get("messages") or [{"role": "assistant", "content": one.get("text", "")}])]
        for one in responses
        if isinstance(one, dict)
    ]


def _from_text(path: Path, tokenizer: Any, length: int, characters: int) -> Iterator[list[int]]:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(characters)
    except UnicodeDecodeError as error:
        raise ValueError(f"calibration: {path}: not UTF-8 text ({error})") from None
    ids = tokenizer.encode(text)
    yield from (ids[start : start + length] for start in range(0, len(ids), length))
