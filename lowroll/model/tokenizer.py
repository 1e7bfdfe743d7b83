"""The tokenizer and chat template of a model folder, through transformers. Loaded late: the import takes seconds."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's fast tokenizer. ValueError names the folder when there is none, it is damaged, or it brings code."""
    from transformers import AutoTokenizer

    folder = Path(folder)
    if not any((folder / name).is_file() for name in _VOCABULARIES):      # transformers would make an empty one
        raise ValueError(f"{folder}: no tokenizer here; looked for {', '.join(_VOCABULARIES)}")
    try:
        config = folder / "tokenizer_config.json"
        if config.is_file() and "auto_map" in json.loads(config.read_text(encoding="utf-8")):
            raise ValueError(f"auto_map in {config.name}: the tokenizer brings its own code, and lowroll runs none")
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except Exception as error:     # the tokenizers library raises bare Exceptions; the user needs one line
        raise ValueError(f"{folder}: no tokenizer could be loaded ({type(error).__name__}: "
                         f"{(str(error).splitlines() or [''])[0]})") from error


def eos_id(folder: str | Path) -> int | None:
    """The end-of-sequence id of the folder's tokenizer; None when it has none. ValueError as `load_tokenizer` says.

    It is read off the files where they say it: an engine that generates ids needs nothing else of the tokenizer, and
    importing transformers can take longer than loading the weights.
    """
    try:
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text(encoding="utf-8"))
        known = json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
        token = config["eos_token"]
        token = token["content"] if isinstance(token, dict) else token
        ids = [entry["id"] for entry in known if entry["content"] == token]
    except (OSError, ValueError, KeyError, TypeError):
        ids, config = [], {}                    # transformers may know better, or say what is wrong
    if len(ids) == 1 and isinstance(ids[0], int) and "auto_map" not in config:
        return ids[0]
    found = load_tokenizer(folder).eos_token_id
    return None if found is None else int(found)


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
        """Text of a response without special tokens, every space as it was generated."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
