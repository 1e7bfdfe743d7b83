"""The tokenizer and chat template of a model folder, through transformers. Loaded late: the import
takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lowroll.model.folder import MOST_TOKENIZER, read_json, regular
from lowroll.model.template import template
from lowroll.tool_calls import FORMATS, Message, format_of, read
from lowroll.types import printable

_VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_LARGE = (*_VOCABULARIES, "merges.txt", "chat_template.jinja")
_SMALL = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's fast tokenizer. ValueError names the folder when there is none, it is damaged,
    or it brings code."""
    from transformers import AutoTokenizer

    folder = Path(folder)
    # transformers would make an empty one
    if not any((folder / name).is_file() for name in _VOCABULARIES):
        raise ValueError(f"{folder}: no tokenizer here; looked for {', '.join(_VOCABULARIES)}")
    _check_files(folder)
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        tokenizer.decode(tokenizer.encode("a b"))
        return tokenizer
    except (
        Exception
    ) as error:  # the tokenizers library raises bare Exceptions; the user needs one line
        raise ValueError(
            f"{folder}: no tokenizer could be loaded ({type(error).__name__}: "
            f"{printable((str(error).splitlines() or [''])[0])})"
        ) from error


def _check_files(folder: Path) -> None:
    """ValueError names a file that is too large or no JSON, and the key of tokenizer_config.json
    that transformers would choke on later."""
    for name in _LARGE:
        if (folder / name).exists():
            regular(folder / name, MOST_TOKENIZER)
    small = {name: read_json(folder / name) for name in _SMALL if (folder / name).exists()}
    for name, content in small.items():
        if not isinstance(content, dict):
            raise ValueError(f"{folder / name}: expected a JSON object")
    path, config = folder / _SMALL[0], small.get(_SMALL[0], {})
    if "auto_map" in config:
        raise ValueError(
            f"{path}: auto_map: the tokenizer brings its own code, and lowroll runs none"
        )
    longest = config.get("model_max_length", 1)
    if longest is not None and (
        isinstance(longest, bool) or not isinstance(longest, int | float) or not longest >= 1
    ):
        raise ValueError(
            f"{path}: model_max_length: expected a positive number, got {printable(repr(longest))}"
        )
    for key, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if (
            key.endswith("_token")
            and not key.startswith("add_")
            and value is not None
            and not isinstance(text, str)
        ):
            raise ValueError(
                f"{path}: {printable(key)}: expected a token's text, got {printable(repr(value))}"
            )


def eos_id(folder: str | Path) -> int | None:
    """The end-of-sequence id of the folder's tokenizer; None when it has none. ValueError as
    `load_tokenizer` says.

    It is read off the files where they say it: an engine that generates ids needs nothing else of
    the tokenizer, and importing transformers can take longer than loading the weights.
    """
    try:
        config = read_json(Path(folder) / "tokenizer_config.json")
        known = read_json(Path(folder) / "tokenizer.json", MOST_TOKENIZER)["added_tokens"]
        token = config["eos_token"]
        token = token["content"] if isinstance(token, dict) else token
        ids = [entry["id"] for entry in known if entry["content"] == token]
    except (ValueError, KeyError, TypeError):
        ids, config = [], {}  # transformers may know better, or say what is wrong
    if len(ids) == 1 and isinstance(ids[0], int) and "auto_map" not in config:
        return ids[0]
    found = load_tokenizer(folder).eos_token_id
    return None if found is None else int(found)


class ChatTokenizer:
    """What the orchestrator and the SFT need of a tokenizer: chat in, ids out, and the way back to
    text.

    ValueError for a tokenizer without a chat template. Templates are rendered in a child with
    bounds (`model.template`). tool_format: how the model writes calls of tools (`tool_calls`); None:
    as the template shows it."""

    def __init__(self, tokenizer: Any, tool_format: str | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "tokenizer: it has no chat template (chat_template.jinja or tokenizer_config.json)"
            )
        self.tokenizer = tokenizer
        self._tool_format = tool_format

    @property
    def source(self) -> str:
        """The chat template's text."""
        source = self.tokenizer.get_chat_template()
        if not isinstance(source, str):
            raise ValueError(f"chat template: expected a text, got {printable(repr(source))}")
        return source

    def encode_chat(
        self,
        messages: list[dict[str, Any]],
        open_turn: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Ids of a conversation; open_turn: with the header that opens the assistant's turn; tools:
        JSON schemas of those that the model may call. ValueError says what the template objects to,
        and when it cannot show tools."""
        source = self.source
        if tools and "tools" not in source:
            raise ValueError(
                "chat template: it says nothing of `tools`, so this model cannot be shown any; take "
                "a model whose template does, or describe them in the prompt"
            )
        variables = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        text = template(source, tuple(variables.items())).render(messages, open_turn, tools)
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    @property
    def tool_format(self) -> str:
        """How the model writes calls of tools. ValueError when nothing says it."""
        found = self._tool_format or format_of(self.source)
        if found is None:
            raise ValueError(
                "chat template: it shows none of the known formats of tool calls; name one "
                f"(rollout.tool_call_parser: {', '.join(FORMATS)})"
            )
        return found

    def turn(self, token_ids: list[int], tools: bool = False) -> Message:
        """A response as a chat message, all of its text as its content; tools: with the calls that
        it makes, and why others are none (`tool_calls.Spoken.message`)."""
        content = self.decode(token_ids)
        if not tools:
            return {"role": "assistant", "content": content}
        # the marks of some formats are special tokens
        marked = str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        return read(self.tool_format, marked).message(content)

    def encode_response(self, text: str) -> list[int]:
        """Ids of an assistant turn, its end-of-sequence id included. ValueError when the tokenizer
        names none."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer: it has no end-of-sequence token (eos_token in tokenizer_config.json) "
                "to learn to stop with"
            )
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def decode(self, token_ids: list[int]) -> str:
        """Text of a response without special tokens, every space as it was generated."""
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
