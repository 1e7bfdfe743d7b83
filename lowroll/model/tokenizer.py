"""The tokenizer and chat template of a model folder, through transformers. Loaded late: the import
takes seconds.

A conversation of several turns is never encoded again as a whole: what was drawn stays as it was
drawn, and `ChatTokenizer.encode_turn` says what follows it. It renders a short conversation with a
mark where the assistant's words stand, and takes what the template puts behind the mark. So a
template may do with earlier turns what it likes (strip their thoughts, say); what it puts behind a
turn may not depend on them, which `check_turns` asks before a run begins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from lowroll.model import tokenizer_trial
from lowroll.model.files import MOST_TOKENIZER, read_json, regular
from lowroll.model.template import template
from lowroll.tool_calls import FORMATS, format_of, read
from lowroll.types import Message, Turn, printable

_VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")
_LARGE = (*_VOCABULARIES, "merges.txt", "chat_template.jinja")
# a conversation to render, and what to look for in it
_MARK, _NEWS = "LOWROLLMARK", "LOWROLLNEWS"
_BEFORE: list[Message] = [{"role": "user", "content": "a"}]
_TURN: list[Message] = [*_BEFORE, {"role": "assistant", "content": _MARK}]
_SMALL = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")


def load_tokenizer(folder: str | Path) -> Any:
    """The folder's fast tokenizer; of an adapter folder without one, its base's. ValueError names the
    folder when there is none, it is damaged, or it brings code."""
    from transformers import AutoTokenizer

    folder = tokenizer_home(folder)
    # transformers would make an empty one
    if not has_tokenizer(folder):
        raise ValueError(f"{folder}: no tokenizer here; looked for {', '.join(_VOCABULARIES)}")
    _check_files(folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer_trial.attempt(folder / "tokenizer.json")
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


def tokenizer_home(folder: str | Path) -> Path:
    """Return the folder of a model folder's tokenizer: PEFT saves an adapter without one, and its
    base's is meant."""
    folder = Path(folder)
    if not has_tokenizer(folder) and (folder / "adapter_config.json").is_file():
        from lowroll.model.base import base_of

        return Path(base_of(folder))
    return folder


def has_tokenizer(folder: Path) -> bool:
    """Return whether the folder has a tokenizer."""
    return any((folder / name).is_file() for name in _VOCABULARIES)


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
    """Return the end-of-sequence id of the folder's tokenizer; None when it has none. ValueError as
    `load_tokenizer` says.

    It is read off the files where they say it: an engine that generates ids needs nothing else of
    the tokenizer, and importing transformers can take longer than loading the weights.
    """
    folder = tokenizer_home(folder)
    try:
        config = read_json(folder / "tokenizer_config.json")
        known = read_json(folder / "tokenizer.json", MOST_TOKENIZER)["added_tokens"]
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
    """A tokenizer for the orchestrator and the SFT: chat in, ids out, and the way back to text.

    ValueError for a tokenizer without a chat template. Templates are rendered in a child with
    bounds (`model.template`). tool_format: how the model writes calls of tools (`tool_calls`); None:
    as the template shows it. template_kwargs: variables of the template for every conversation
    (`enable_thinking`)."""

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
        """The chat template's text."""
        source = self.tokenizer.get_chat_template()
        if not isinstance(source, str):
            raise ValueError(f"chat template: expected a text, got {printable(repr(source))}")
        return source

    def encode_chat(
        self,
        messages: list[Message],
        open_turn: bool = True,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Ids of a conversation; open_turn: with the header that opens the assistant's turn; tools:
        JSON schemas of those that the model may call; template_kwargs: variables of the template,
        over those of this tokenizer. ValueError says what the template objects to, and when it
        cannot show tools."""
        return self._encode(self.render(messages, open_turn, tools, template_kwargs))

    def encode_turn(
        self, messages: list[Message], after: Turn, said: Message | None = None
    ) -> list[int]:
        """Ids that the template puts behind a drawn turn for the messages that follow it, up to the
        header of the assistant's next turn. `said`: the turn as a message, where it has tool calls,
        which some templates ask for before they show a tool's answer.

        Where an end-of-turn token was drawn, it stands for the template's own, whichever it is; a
        turn that a stop string ended gets the template's. ValueError says what the template objects
        to."""
        text = self._behind_calls(messages, said) or self._behind([*_TURN, *messages], True)
        eos = str(self.tokenizer.special_tokens_map.get("eos_token") or "")
        # a special token first: the words behind it are cut as they are within a whole text
        for end in filter(None, (self._end, eos)):
            if text.startswith(end):
                ids = self._encode(text)
                return ids[1:] if self._is_end(after) else ids
        return self._encode(f"{eos}{text}")[1:] if eos else self._encode(text)

    def check_turns(self) -> None:
        """Raise ValueError unless the template can go on with a turn as it was drawn: what it puts
        behind one must be the same in every conversation, and show the messages that follow."""
        said = {"role": "user", "content": _NEWS}
        behind = [
            self._behind([*before, *_TURN, said], True)
            for before in ([], [*_BEFORE, {"role": "assistant", "content": "b"}])
        ]
        if behind[0] != behind[1] or _NEWS not in behind[0]:
            raise ValueError(
                "chat template: what it puts behind an assistant's turn is another text in a longer "
                "conversation, so that a conversation of several turns cannot go on from the tokens "
                "that were drawn; use max_turns: 1, or another template"
            )

    def check_tools(self) -> None:
        """Raise ValueError unless the template shows tools."""
        if "tools" not in self.source:
            raise ValueError(
                "chat template: it says nothing of `tools`, so this model cannot be shown any; take "
                "a model whose template does, or describe them in the prompt"
            )

    @cached_property
    def _end(self) -> str:
        """The special token that the template puts behind the assistant's words; "" for none."""
        first = self._encode(self._closing)[:1]
        return self.tokenizer.decode(first) if first and self._is_special(first[0]) else ""

    @cached_property
    def _closing(self) -> str:
        """The text that the template puts behind the last words of a conversation."""
        return self._behind(_TURN, False)

    def _behind_calls(self, messages: list[Message], said: Message | None) -> str:
        """Return the text that the template puts behind a turn with tool calls; "" for a turn
        without, and where it cannot be told apart from the rendering of the turn."""
        if said is None or not said.get("tool_calls"):
            return ""
        calls = [*_BEFORE, {"role": "assistant", "content": "", "tool_calls": said["tool_calls"]}]
        turn, whole = self.render(calls, False), self.render([*calls, *messages], True)
        cut = turn.rfind(self._end) if self._end else len(turn) - len(self._closing)
        return whole[cut:] if cut > 0 and whole.startswith(turn[:cut]) else ""

    def _is_end(self, turn: Turn) -> bool:
        """Return whether a turn ended with a token that stands for the template's end."""
        return isinstance(turn.stop_reason, int) and self._is_special(turn.stop_reason)

    def _is_special(self, token: int) -> bool:
        return bool(self.tokenizer.decode([token])) and not self.decode([token])

    def _behind(self, messages: list[Message], open_turn: bool) -> str:
        """Return the text that the template puts behind the mark. ValueError when the template
        drops the mark."""
        _, mark, behind = self.render(messages, open_turn).partition(_MARK)
        if not mark:
            raise ValueError(
                "chat template: it does not show what an assistant said earlier, so that a "
                "conversation of several turns is not possible; use max_turns: 1, or another template"
            )
        return behind

    def render(
        self,
        messages: list[Message],
        open_turn: bool,
        tools: Sequence[dict[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text of a conversation, as `encode_chat` encodes it."""
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
        """The format in which the model writes calls of tools. ValueError when nothing says it."""
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
