"""Texts of an engine: its tokenizer, and requests from texts."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import fields
from functools import cached_property
from pathlib import Path
from typing import Any

from lowroll.model.spec import ModelSpec
from lowroll.model.tokenizer import ChatTokenizer, eos_id, load_tokenizer, tokenizer_home
from lowroll.types import Request


class EngineTokenizer:
    """The tokenizer that was given, or else that of the model's folder, loaded when first asked."""

    def __init__(self, given: Any, folder: Path | None) -> None:
        self._given = given
        self._folder = folder

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer. ValueError for none."""
        if self._given is not None:
            return self._given
        if self._folder is None:
            raise ValueError(
                "tokenizer: the engine was made from a loaded model; pass Engine(..., "
                "tokenizer=...)"
            )
        return load_tokenizer(self._folder)

    @property
    def exists(self) -> bool:
        return self._given is not None or (
            self._folder is not None and (tokenizer_home(self._folder) / "tokenizer.json").is_file()
        )

    def eos_ids(self, spec: ModelSpec) -> set[int]:
        """Return the ids that end a response: the model's, and the tokenizer's."""
        ids = set(spec.eos_ids)
        if self.exists:
            if self._given is None and self._folder:
                tokenizer_eos_id = eos_id(self._folder)
            else:
                tokenizer_eos_id = self.tokenizer.eos_token_id
            if tokenizer_eos_id is not None:
                ids.add(tokenizer_eos_id)
        return ids

    def encode(self, text: str, chat: bool) -> list[int]:
        """Encode a text: with `chat` as a user's message in the chat template, else as it is."""
        if chat:
            return ChatTokenizer(self.tokenizer).encode_chat([{"role": "user", "content": text}])
        return [int(token) for token in self.tokenizer.encode(text)]

    def requests(
        self, given: str | Request | Sequence[Request | str], chat: bool, sampling: dict[str, Any]
    ) -> list[Request]:
        """Return requests as they are, and texts as requests with the fields of `sampling`.
        ValueError for anything else."""
        if isinstance(given, str | Request):
            given = [given]
        _check_given(given, sampling)
        return [
            item
            if isinstance(item, Request)
            else Request(prompt_ids=self.encode(item, chat), **sampling)
            for item in given
        ]


def _check_given(given: Any, sampling: Collection[str]) -> None:
    if not isinstance(given, list | tuple):
        raise ValueError(
            f"requests: expected a text, a Request or a list of them, got {type(given).__name__}"
        )
    for i, item in enumerate(given):
        if not isinstance(item, str | Request):
            raise ValueError(
                f"requests[{i}]: expected a text or a Request (token ids: "
                f"Request(prompt_ids=...)), got {type(item).__name__}"
            )
    if sampling and not any(isinstance(item, str) for item in given):
        raise ValueError(
            f"{', '.join(sampling)}: a Request says this itself; it is for prompts that are texts"
        )
    field_names = [field.name for field in fields(Request) if field.name != "prompt_ids"]
    for name in sampling:
        if name not in field_names:
            raise ValueError(
                f"{name}: a request has no such field; it has {', '.join(field_names)}"
            )
