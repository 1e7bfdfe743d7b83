"""Text of tokens: a stream says what the whole says, whatever its parts, and what the tokenizer
says."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lowroll.runs import demo
from lowroll.server.text import ResponseText, Vocabulary

TEXTS = ["naïve €5 日本語 🎉🎉", " a  b\n", "x�y", "ab aab ba", "", "é", "👩‍👩‍👧"]


def byte_level() -> Any:
    """Tokens of one to four bytes, which cut characters anywhere; special and added ones."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate(alphabet)}
    merges = []
    for word in ("日本", "🎉", "€5", "aab", "é "):
        pieces = [token for token, _ in pre_tokenizers.ByteLevel(False).pre_tokenize_str(word)]
        letters = list("".join(pieces))
        while len(letters) > 1:
            first, second, *rest = letters
            if first + second not in vocab:
                vocab[first + second] = len(vocab)
                merges.append((first, second))
            letters = [first + second, *rest]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool 日>", special=False)])
    return tokenizer


def sentence_piece() -> Any:
    """As Llama 2's and Mistral's: the first token loses its space, bytes stand for the unknown."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for piece in ["▁", "a", "b", "▁a", "▁ab", "aab", "n", "5", "日"]:
        vocab[piece] = len(vocab)
    merges = [("▁", "a"), ("▁a", "b")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


@cache
def vocabulary(kind: str) -> Vocabulary:
    made: dict[str, Callable[[], Any]] = {"bytes": byte_level, "pieces": sentence_piece}
    if kind == "demo":
        return Vocabulary(demo.build_tokenizer())
    return Vocabulary(transformers.PreTrainedTokenizerFast(tokenizer_object=made[kind]()))


KINDS = ("demo", "bytes", "pieces")


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Vocabulary, list[int], list[int]]:
    """A vocabulary, ids of it (of texts, or any, some unknown), and where a stream cuts them."""
    known = vocabulary(draw(st.sampled_from(KINDS)))
    size = len(known.tokenizer)
    anything = st.lists(st.integers(0, size + 2), max_size=90)
    texts = st.sampled_from(TEXTS).map(lambda text: known.encode(text, False))
    ids = [i for part in draw(st.lists(texts | anything, max_size=4)) for i in part]
    cuts = draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    return known, ids, sorted(cuts)


def streamed(shown: ResponseText, ids: list[int], cuts: list[int], stop: int | str | None) -> str:
    """What a stream of these parts says; the last part has the end."""
    text, start = "", 0
    for cut in cuts:
        if cut < len(ids) or stop is None:  # a stop comes with the token that it ends with
            text += shown.feed(ids[start:cut])
            start = cut
    return text + shown.end(ids[start:], stop)


@given(drawn(), st.lists(st.sampled_from(["ab", "b", "aab", "本", "�", "🎉🎉"]), max_size=3))
def test_a_stream_says_what_the_whole_says(
    case: tuple[Vocabulary, list[int], list[int]], stops: list[str]
) -> None:
    known, ids, cuts = case
    whole = ResponseText(known.decoder(), stops).end(ids, None)
    assert streamed(ResponseText(known.decoder(), stops), ids, cuts, None) == whole
    assert ResponseText(known.decoder()).end(ids, None) == whole


@given(drawn())
@example((vocabulary("bytes"), [0xE6 - 0x21] * 3, []))
def test_the_whole_is_what_the_tokenizer_says(
    case: tuple[Vocabulary, list[int], list[int]],
) -> None:
    known, ids, _ = case
    whole = ResponseText(known.decoder()).end(ids, None)
    if known is not vocabulary("pieces"):  # whose decoder takes back characters that it has shown
        assert whole == known.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_its_tokens(kind: str, text: str) -> None:
    known = vocabulary(kind)
    ids = known.encode(text, False)
    shown = ResponseText(known.decoder())
    parts = [shown.feed([token]) for token in ids]
    assert "".join(parts) + shown.end([], None) == text
    assert all("\ufffd" not in part for part in parts) or "\ufffd" in text
    names = b"".join(known.piece(token) for token in ids)
    assert kind == "pieces" or names.decode() == text


def test_a_space_after_the_prompt_is_kept() -> None:
    known = vocabulary("pieces")
    prompt, ids = known.encode("a b", False), known.encode("ab a", False)
    shown = ResponseText(known.decoder(prompt))
    assert shown.end(ids, None) == " ab a"
    assert ResponseText(known.decoder()).end(ids, None) == "ab a"


def ended_by(known: Vocabulary, ids: list[int], stops: list[str]) -> tuple[list[int], str | None]:
    """The ids up to the token that completes a stop string, as the engine ends a response."""
    for count in range(1, len(ids) + 1):
        text = known.decode(ids[:count])
        found = next((stop for stop in stops if stop in text), None)
        if found is not None:
            return ids[:count], found
    return ids, None


@given(drawn(), st.lists(st.sampled_from(["ab", "b", "aab", "本語", "🎉🎉", "ve €"]), min_size=1))
def test_a_stop_string_and_what_follows_is_never_shown(
    case: tuple[Vocabulary, list[int], list[int]], stops: list[str]
) -> None:
    known, ids, cuts = case
    if known is vocabulary("pieces"):
        ids = [i for i in ids if i > 255 or i < 128]  # of its bytes, those that say what they are
    ids, found = ended_by(known, ids, stops)
    cuts = [cut for cut in cuts if cut <= len(ids)]
    text = streamed(ResponseText(known.decoder(), stops), ids, cuts, found)
    assert text == streamed(ResponseText(known.decoder(), stops), ids, [], found)
    if found is not None:
        assert text == known.decode(ids).partition(found)[0]
    assert found is None or found not in text


def test_what_may_become_a_stop_string_is_held_back() -> None:
    known = vocabulary("demo")
    shown = ResponseText(known.decoder(), ["abc", "bd"])
    parts = [shown.feed([token]) for token in known.encode("xabab")]
    assert parts == ["x", "", "", "ab", ""]
    assert shown.end(known.encode("c"), "abc") == ""
    shown = ResponseText(known.decoder(), ["abc"])
    assert shown.feed(known.encode("ab")) == "" and shown.end([], None) == "ab"


def test_a_stop_that_came_before_min_tokens_is_text() -> None:
    known = vocabulary("demo")
    ids = known.encode("ab.ab")
    shown = ResponseText(known.decoder(), ["ab"])
    assert streamed(shown, ids, [2], "ab") == "ab."
    assert ResponseText(known.decoder(), ["ab"]).end(ids, "ab") == "ab."


def test_a_stop_id_is_not_text() -> None:
    known = vocabulary("demo")
    ids = known.encode("ab")
    assert ResponseText(known.decoder()).end(ids, ids[-1]) == "a"


def test_special_tokens_have_names_and_no_text() -> None:
    known = vocabulary("bytes")
    end = known.tokenizer.convert_tokens_to_ids("<|end|>")
    tool = known.tokenizer.convert_tokens_to_ids("<tool 日>")
    assert known.name(end) == "<|end|>" and known.name(10**6) == ""
    assert ResponseText(known.decoder()).end([tool, end, tool], None) == "<tool 日><tool 日>"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("token", [0x80, 0x41, 0xE3])
def test_long_nonsense_takes_time_by_its_length(kind: str, token: int) -> None:
    known = vocabulary(kind)
    shown = ResponseText(known.decoder(), ["stop"])
    began = time.process_time()
    for _ in range(4000):
        shown.feed([token])
    shown.end([], None)
    assert time.process_time() - began < 2


def test_half_of_a_surrogate_pair_is_no_text() -> None:
    with pytest.raises(ValueError, match="surrogate"):
        vocabulary("demo").encode("\ud800")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ["本語" * 60, "aé🎉 " * 40, "ab a " * 60])
def test_a_long_text_survives_its_tokens(kind: str, text: str) -> None:
    """Longer than what is decoded again with each token."""
    known = vocabulary(kind)
    shown = ResponseText(known.decoder())
    parts = [shown.feed([token]) for token in known.encode(text, False)]
    assert "".join(parts) + shown.end([], None) == text
