"""A tokenizer.json through the tokenizers library alone, without transformers and torch, with the
methods that `ChatTokenizer` uses. transformers may read a folder differently; `runs.roles.trainer`
compares the two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowroll.model import tokenizer_trial
from lowroll.model.files import read_object, regular
from lowroll.types import printable

SPECIAL = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_TEMPLATE_FILE = "chat_template.jinja"


class FileTokenizer:
    """A tokenizer of a folder. ValueError names the missing or damaged file."""

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import AddedToken, Tokenizer

        folder = Path(folder)
        path = folder / "tokenizer.json"
        tokenizer_trial.attempt(path)
        config = read_object(folder / "tokenizer_config.json")
        if "auto_map" in config:
            raise ValueError(f"{folder}: auto_map: the tokenizer brings its own code")
        try:
            self.backend = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exceptions
            raise ValueError(f"{printable(path)}: {printable(error)}") from error
        self.backend.no_truncation()
        self.backend.no_padding()
        self.special_tokens_map = {
            name: text for name in SPECIAL if (text := _token_text(config.get(name))) is not None
        }
        known_texts = {token.content for token in self.backend.get_added_tokens_decoder().values()}
        missing = [text for text in self.special_tokens_map.values() if text not in known_texts]
        self.backend.add_special_tokens(
            [AddedToken(token_text, special=True) for token_text in missing]
        )
        self.chat_template = _read_template(folder, config)

    def get_chat_template(self) -> str:
        return str(self.chat_template)

    @property
    def eos_token_id(self) -> int | None:
        text = self.special_tokens_map.get("eos_token")
        return None if text is None else self.backend.token_to_id(text)

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text, add_special_tokens)}

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: object) -> str:
        """Return the text, with spaces unchanged."""
        return str(self.backend.decode(ids, skip_special_tokens=skip_special_tokens))


def _read_template(folder: Path, config: dict[str, Any]) -> str | None:
    if (folder / _TEMPLATE_FILE).exists():
        regular(folder / _TEMPLATE_FILE, 1 << 20)
        return (folder / _TEMPLATE_FILE).read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next(
            (entry.get("template") for entry in template if entry.get("name") == "default"), None
        )
    return template


def _token_text(token: object) -> str | None:
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
