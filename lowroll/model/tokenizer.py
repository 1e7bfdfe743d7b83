"""The tokenizer and chat template of a model folder, through transformers, whose import takes
seconds.

Drawn tokens are never re-encoded: `encode_turn` adds the text that the template puts after a mark
in place of the assistant's text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lowroll.model import tokenizer_trial
from lowroll.model.files import MOST_TOKENIZER, read_json, read_object, regular
from lowroll.model.template import template
from lowroll.tool_calls import FORMATS, format_of, read
from lowroll.types import Message, Turn, printable

_VOCABULARY_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_LARGE_FILES = (*_VOCABULARY_FILES, "merges.txt", "chat_template.jinja")
_TURN_MARK, _NEXT_MARK = "LOWROLLMARK", "LOWROLLNEWS"
_EARLIER_MESSAGES: list[Message] = [{"role": "user", "content": "a"}]
_MARKED_TURN: list[Message] = [*_EARLIER_MESSAGES, {"role": "assistant", "content": _TURN_MARK}]
_SMALL_FILES = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(folder: str | Path) -> Any:
    """Load the folder's fast tokenizer, or that of an adapter's base. ValueError for one that is
    missing, damaged, or brings code."""
    from transformers import AutoTokenizer

    folder = tokenizer_home(folder)
    # transformers would make an empty one
    if not has_tokenizer(folder):
        raise ValueError(f"{folder}: no tokenizer here; looked for {', '.join(_VOCABULARY_FILES)}")
    _check_files(folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer_trial.attempt(folder / "tokenizer.json")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
        tokenizer.decode(tokenizer.encode("a b"))
        return tokenizer
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(
            f"{folder}: no tokenizer could be loaded ({type(error).__name__}: "
            f"{printable((str(error).splitlines() or [''])[0])})"
        ) from error


def tokenizer_home(folder: str | Path) -> Path:
    """Return the tokenizer's folder, for an adapter perhaps its base's."""
    folder = Path(folder)
    if not has_tokenizer(folder) and (folder / "adapter_config.json").is_file():
        from lowroll.model.adapter_base import base_of

        return Path(base_of(folder))
    return folder


def has_tokenizer(folder: Path) -> bool:
    return any((folder / name).is_file() for name in _VOCABULARY_FILES)


def _check_files(folder: Path) -> None:
    for name in _LARGE_FILES:
        if (folder / name).exists():
            regular(folder / name, MOST_TOKENIZER)
    contents = {
        name: read_object(folder / name) for name in _SMALL_FILES if (folder / name).exists()
    }
    path = folder / "tokenizer_config.json"
    config = contents.get(path.name, {})
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
        names_token = key.endswith("_token") and not key.startswith("add_")
        if names_token and value is not None and not isinstance(text, str):
            raise ValueError(
                f"{path}: {printable(key)}: expected a token's text, got {printable(repr(value))}"
            )


def eos_id(folder: str | Path) -> int | None:
    """Return the eos id of the folder's tokenizer, or None, from files if possible: importing
    transformers can take longer than loading the weights. Errors as `load_tokenizer`."""
    folder = tokenizer_home(folder)
    try:
        config = read_json(folder / "tokenizer_config.json")
        added_tokens = read_json(folder / "tokenizer.json", MOST_TOKENIZER)["added_tokens"]
        token = config["eos_token"]
        token = token["content"] if isinstance(token, dict) else token
        ids = [entry["id"] for entry in added_tokens if entry["content"] == token]
    except (ValueError, KeyError, TypeError):
        ids, config = [], {}
    if len(ids) == 1 and isinstance(ids[0], int) and "auto_map" not in config:
        return ids[0]
    eos = load_tokenizer(folder).eos_token_id
    return None if eos is None else int(eos)


class ChatTokenizer:
    """A tokenizer with a chat template, else ValueError.

    tool_format: how the model writes tool calls (`tool_calls`); None: as the template shows it.
    template_kwargs: template variables for every conversation.
    """

    def __init__(
        self,
        tokenizer: Any,
        tool_format: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise ValueError(
                "tokenizer: it has no chat template (chat_template.jinja or tokenizer_config.json)"
            )
        self.tokenizer = tokenizer
        self._tool_format = tool_format
        self.template_kwargs = dict(template_kwargs or {})

    @property
    def source(self) -> str:
        source = self.tokenizer.get_chat_template()
        if not isinstance(source, str):
            raise ValueError(f"chat template: expected a text, got {printable(repr(source))}")
        return source

    def encode_chat(
        self,
        messages: list[Message],
        open_turn: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int]:
        """Return a conversation's ids. Arguments and errors as `render`."""
        return self._encode(self.render(messages, open_turn, tools))

    def encode_turn(
        self, messages: list[Message], after: Turn, said: Message | None = None
    ) -> list[int]:
        """Return the ids that the template adds after a drawn turn for the following messages, up
        to the header of the next turn. A drawn end-of-turn token replaces the template's own. said:
        the turn as a message, if it has tool calls, which some templates need before a tool's
        answer."""
        text = self._behind_calls(messages, said) or self._behind([*_MARKED_TURN, *messages], True)
        eos = str(self.tokenizer.special_tokens_map.get("eos_token") or "")
        # so the text is tokenized as within a conversation
        end_tokens = [token for token in (self._end, eos) if token]
        if text.startswith(tuple(end_tokens)):
            ids = self._encode(text)
            is_drawn = isinstance(after.stop_reason, int) and self._is_special(after.stop_reason)
            return ids[1:] if is_drawn else ids
        if not eos:
            return self._encode(text)
        return self._encode(f"{eos}{text}")[1:]

    def check_turns(self) -> None:
        """Raise ValueError unless the template can continue a drawn turn: its text must show the
        messages that follow, and not depend on earlier turns."""
        next_message = {"role": "user", "content": _NEXT_MARK}
        earlier_turn = [*_EARLIER_MESSAGES, {"role": "assistant", "content": "b"}]
        in_short = self._behind([*_MARKED_TURN, next_message], True)
        in_long = self._behind([*earlier_turn, *_MARKED_TURN, next_message], True)
        if in_short != in_long or _NEXT_MARK not in in_short:
            raise ValueError(
                "chat template: what it puts behind an assistant's turn is another text in a longer "
                "conversation, so that a conversation of several turns cannot go on from the tokens "
                "that were drawn; use max_turns: 1, or another template"
            )

    def check_tools(self) -> None:
        if "tools" not in self.source:
            raise ValueError(
                "chat template: it says nothing of `tools`, so this model cannot be shown any; take "
                "a model whose template does, or describe them in the prompt"
            )

    @cached_property
    def _end(self) -> str:
        first_ids = self._encode(self._closing)[:1]
        if not first_ids or not self._is_special(first_ids[0]):
            return ""
        return self.tokenizer.decode(first_ids)

    @cached_property
    def _closing(self) -> str:
        return self._behind(_MARKED_TURN, False)

    def _behind_calls(self, messages: list[Message], said: Message | None) -> str:
        """Return the text after the turn `said`; "" without calls, or if it cannot be separated. A
        mark cannot stand in calls, so the turn is rendered alone."""
        if said is None or not said.get("tool_calls"):
            return ""
        turn = {"role": "assistant", "content": "", "tool_calls": said["tool_calls"]}
        conversation = [*_EARLIER_MESSAGES, turn]
        rendered_turn = self.render(conversation, False)
        rendered_all = self.render([*conversation, *messages], True)
        if self._end:
            turn_end = rendered_turn.rfind(self._end)
        else:
            turn_end = len(rendered_turn) - len(self._closing)
        if turn_end <= 0 or not rendered_all.startswith(rendered_turn[:turn_end]):
            return ""
        return rendered_all[turn_end:]

    def _is_special(self, token: int) -> bool:
        return bool(self.tokenizer.decode([token])) and not self.decode([token])

    def _behind(self, messages: list[Message], open_turn: bool) -> str:
        _, mark, suffix = self.render(messages, open_turn).partition(_TURN_MARK)
        if not mark:
            raise ValueError(
                "chat template: it does not show what an assistant said earlier, so that a "
                "conversation of several turns is not possible; use max_turns: 1, or another template"
            )
        return suffix

    def render(
        self,
        messages: list[Message],
        open_turn: bool,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation as `Template.render`. ValueError when the template cannot show
        tools."""
        if tools:
            self.check_tools()
        variables = {name: str(token) for name, token in self.tokenizer.special_tokens_map.items()}
        return template(self.source, tuple(variables.items())).render(
            messages, open_turn, tools, self.template_kwargs | dict(template_kwargs or {})
        )

    def _encode(self, text: str) -> list[int]:
        return [int(token) for token in self.tokenizer(text, add_special_tokens=False)["input_ids"]]

    @property
    def tool_format(self) -> str:
        """The format of the model's tool calls. ValueError when unknown."""
        call_format = self._tool_format or format_of(self.source)
        if call_format is None:
            raise ValueError(
                "chat template: it shows none of the known formats of tool calls; name one "
                f"(rollout.tool_call_parser: {', '.join(FORMATS)})"
            )
        return call_format

    def turn(self, token_ids: list[int], tools: bool = False) -> Message:
        """Convert a response to a chat message. tools: with calls, and why some are invalid."""
        content = self.decode(token_ids)
        if not tools:
            return {"role": "assistant", "content": content}
        # some formats' marks are special tokens
        marked = str(self.tokenizer.decode(token_ids, skip_special_tokens=False))
        return read(self.tool_format, marked).message(content)

    def encode_response(self, text: str) -> list[int]:
        """Return the ids of an assistant turn and its eos. ValueError without an eos."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError(
                "tokenizer: it has no end-of-sequence token (eos_token in tokenizer_config.json) "
                "to learn to stop with"
            )
        return [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]

    def decode(self, token_ids: list[int]) -> str:
        """Return the text without special tokens, spaces unchanged."""
        return str(
            self.tokenizer.decode(
                token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )
