"""The tokenizer and chat template of a model folder, through transformers. Loaded late: the import takes seconds."""
from __future__ import annotations

from pathlib import Path
from typing import Any


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's fast tokenizer. ValueError names the folder when there is none, or when it brings code."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{folder}: no tokenizer could be loaded ({str(error).splitlines()[0]})") from None


class ChatTokenizer:
    """What the orchestrator and the SFT need of a tokenizer: chat in, ids out, and the way back to text."""

    def __init__(self, tokenizer: Any) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError("tokenizer: it has no chat template (chat_template.jinja or tokenizer_config.json)")
        self.tokenizer = tokenizer

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Ids of a conversation with the header that opens the assistant's turn."""
        ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        return [int(token) for token in ids]

    def encode_response(self, text: str) -> list[int]:
        """Ids of an assistant turn, its end-of-sequence id included."""
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def decode(self, token_ids: list[int]) -> str:
        """Text of a response without special tokens."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))
