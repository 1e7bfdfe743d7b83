"""Text from token ids, whole or streamed.

Unfinished characters and the possible beginning of a stop string are held back.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from lowroll.tool_calls import WORDS, overlap

if TYPE_CHECKING:
    from lowroll.model.tokenizer import ChatTokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_MIN_LOGPROB = -9999.0  # vLLM's minus infinity
_NUM_PROMPT_TOKENS = 8  # of the prompt, decoded with the first token
_WINDOW = 32  # least tokens that are decoded again with the next one


class TokenDecoder(Protocol):
    """An incremental decoder, whose text does not depend on how many tokens come together."""

    def feed(self, token_ids: Iterable[int]) -> str: ...

    def end(self) -> str:
        """Return the text that was held back. Feed nothing after it."""
        ...


class Vocabulary:
    """Encoding and decoding by a transformers tokenizer. Thread-safe."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.backend = tokenizer.backend_tokenizer
        added_tokens = self.backend.get_added_tokens_decoder()
        self.special = frozenset(i for i, token in added_tokens.items() if token.special)
        self.marks = {
            i: added_tokens[i].content for i in self.special if added_tokens[i].content in WORDS
        }
        self._bytes = type(self.backend.decoder).__name__ == "ByteLevel"
        self.longest = _longest_token(self.backend, self._bytes)
        self.piece = cache(self._piece)
        self.name = cache(self._name)
        self._lock = Lock()  # encoding changes a tokenizer's settings

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. ValueError for a lone surrogate, which JSON allows."""
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError("not a text in Unicode: it has half of a surrogate pair") from None
        with self._lock:
            ids = self.tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"]
        return [int(token) for token in ids]

    def fewest_tokens(self, text: str) -> int:
        """Return a lower bound of the text's tokens; 0 if there is none."""
        if self.longest == 0:
            return 0
        length = len(text.encode() if self._bytes else text)
        return -(-length // self.longest)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens))

    def decoder(self, prompt_ids: Sequence[int] = (), marks: bool = False) -> TokenDecoder:
        """Return a decoder of one response. It drops special tokens; marks: except those of tool
        calls."""
        if marks and self.marks:
            return _MarkedDecoder(self, prompt_ids)
        return _ByteDecoder(self) if self._bytes else _WindowDecoder(self, prompt_ids)

    def render_chat(
        self,
        chat: ChatTokenizer,
        messages: list[dict[str, Any]],
        open_turn: bool,
        tools: Sequence[dict[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
    ) -> str:
        with self._lock:
            return chat.render(messages, open_turn, tools, template_kwargs)

    def _name(self, token_id: int) -> str:
        return self.piece(token_id).decode("utf-8", "replace")

    def _piece(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text: the name of a special token, none for an
        unknown id."""
        token = self.backend.id_to_token(token_id)
        if token is None:
            return b""
        if not self._bytes or token_id in self.special:
            return self.decode([token_id], skip_special_tokens=False).encode()
        try:
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        except KeyError:  # an added token is literal text
            return str(token).encode()


def _longest_token(backend: Any, in_bytes: bool) -> int:
    """Return the most bytes (of a tokenizer of bytes) or characters of one token; 0 without a
    bound."""
    added_tokens = backend.get_added_tokens_decoder().values()
    if _may_shorten_text(backend, in_bytes, added_tokens):
        return 0
    words = backend.get_vocab(with_added_tokens=False)
    added_texts = (token.content for token in added_tokens)
    added_words = (text.encode() if in_bytes else text for text in added_texts)
    return max(map(len, [*words, *added_words]), default=0)


def _may_shorten_text(backend: Any, in_bytes: bool, added_tokens: Iterable[Any]) -> bool:
    if not in_bytes and not getattr(backend.model, "byte_fallback", False):
        return True
    lossy_types = ("Removed", "Whitespace", "Bert", "Punctuation")
    if any(word in repr(backend.pre_tokenizer) for word in lossy_types):
        return True
    if backend.normalizer is not None and not _keeps_length(backend.normalizer):
        return True
    return any(token.lstrip or token.rstrip or token.normalized for token in added_tokens)


def _keeps_length(normalizer: Any) -> bool:
    description = repr(normalizer)
    parts = description.removeprefix("Sequence(normalizers=[").removesuffix("])").split("), ")
    return all(
        part.startswith(("Prepend(", 'Replace(pattern=String(" "), content="▁"')) for part in parts
    )


@dataclass(frozen=True)
class TokenNames:
    vocabulary: Vocabulary | None
    as_ids: bool  # "token_id:5": two tokens may have one text

    def name(self, token_id: int) -> str:
        if self.as_ids or self.vocabulary is None:
            return f"token_id:{token_id}"
        return self.vocabulary.name(token_id)

    def bytes(self, token_id: int) -> list[int] | None:
        return None if self.vocabulary is None else list(self.vocabulary.piece(token_id))


def finite_logprob(logprob: float) -> float:
    return max(logprob, _MIN_LOGPROB)


def _byte_alphabet() -> dict[str, int]:
    """Return the bytes of the characters in GPT-2's tokens (openai/gpt-2, encoder.py)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(256 + i): byte for i, byte in enumerate(others)
    }


_BYTE_OF_CHAR = _byte_alphabet()


class _ByteDecoder:
    """A decoder of tokens that are independent bytes."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, token_ids: Iterable[int]) -> str:
        special = self.vocabulary.special
        ids = [i for i in token_ids if i not in special]
        return self.utf8.decode(b"".join(map(self.vocabulary.piece, ids)))

    def end(self) -> str:
        return self.utf8.decode(b"", final=True)


class _WindowDecoder:
    """A decoder of tokens whose text depends on those before, which it decodes again with each new
    one."""

    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self.decode = vocabulary.decode
        self.window = list(prompt_ids[-_NUM_PROMPT_TOKENS:])
        self.text = self.decode(self.window)
        self.shown = len(self.text)  # already emitted

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(self._next(token_id) for token_id in token_ids)

    def end(self) -> str:
        return self._show(len(self.text))

    def _next(self, token_id: int) -> str:
        self.window.append(token_id)
        self.text = self.decode(self.window)
        is_complete = not self.text.endswith(_REPLACEMENT)
        if len(self.window) >= 4 * _WINDOW and not is_complete:
            return self._give_up()
        new_text = self._show(len(self.text.rstrip(_REPLACEMENT)))
        if len(self.window) >= 2 * _WINDOW and is_complete:
            self._slide()
        return new_text

    def _show(self, until: int) -> str:
        new_text = self.text[self.shown : until]
        self.shown = max(self.shown, until)
        return new_text

    def _slide(self) -> None:
        for length in range(_WINDOW, _WINDOW - 4, -1):
            text = self.decode(self.window[-length:])
            if self.text.endswith(text):
                self.window, self.text, self.shown = self.window[-length:], text, len(text)
                return

    def _give_up(self) -> str:
        new_text = self._show(len(self.text))
        self.window, self.text, self.shown = [], "", 0
        return new_text


class _MarkedDecoder:
    def __init__(self, vocabulary: Vocabulary, prompt_ids: Sequence[int]) -> None:
        self.vocabulary = vocabulary
        self.inner = vocabulary.decoder(prompt_ids)

    def feed(self, token_ids: Iterable[int]) -> str:
        return "".join(map(self._next, token_ids))

    def end(self) -> str:
        return self.inner.end()

    def _next(self, token_id: int) -> str:
        mark = self.vocabulary.marks.get(token_id)
        if mark is None:
            return self.inner.feed([token_id])
        text_before, self.inner = self.inner.end(), self.vocabulary.decoder()
        return text_before + mark


class ResponseText:
    """The text of one response as it comes, cut at the stop that ended it."""

    def __init__(self, decoder: TokenDecoder, stop: Sequence[str] = ()) -> None:
        self.decoder = decoder
        self.stop = tuple(stop)
        self.decoded = 0  # characters, with those held back
        self._held = ""  # perhaps a stop string's beginning

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that the next tokens make final."""
        if not self.stop:
            return self._decode(token_ids)
        return "".join(self._release(self._decode([token])) for token in token_ids)

    def end(self, token_ids: Sequence[int], stop_reason: int | str | None) -> str:
        """Return the rest of the text. stop_reason: the id or text of the stop, which
        is cut off."""
        if stop_reason is None:
            return self.feed(token_ids) + self._rest()
        text = self.feed(token_ids[:-1])
        if isinstance(stop_reason, int):
            return text + self._rest()
        last_text = self._held + self._decode(token_ids[-1:]) + self.decoder.end()
        stop_at = last_text.find(stop_reason)  # missing when it contains special tokens
        return text + (last_text if stop_at < 0 else last_text[:stop_at])

    def _decode(self, token_ids: Sequence[int]) -> str:
        new_text = self.decoder.feed(token_ids)
        self.decoded += len(new_text)
        return new_text

    def _rest(self) -> str:
        rest, self._held = self._held + self.decoder.end(), ""
        return rest

    def _release(self, new: str) -> str:
        text = self._held + new
        num_held = max(overlap(text, stop) for stop in self.stop)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]
