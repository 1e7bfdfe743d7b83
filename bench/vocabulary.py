"""A byte-level tokenizer as large as a real model's, for servers that are measured on random weights.

Its tokens are the bytes, and a space with one to four letters: as many as the model has rows for. A
text of such words is split into them again, so a prompt has as many tokens as it was made of.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_letters
from typing import Any

TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"
END = "<|endoftext|>"  # under this name AutoTokenizer adds none of its own to a Qwen


def tokenizer(vocab_size: int) -> Any:
    """Return a tokenizer with at most so many tokens, as transformers knows it. ValueError for less
    than 257."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 257:
        raise ValueError(f"vocab_size: {vocab_size} is less than the bytes and an end")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), vocab_size - 257))
    tokens = [END, *alphabet, *("".join(pair) for pair in merges)]
    vocab = {token: i for i, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token=END, pad_token=END)


def words(tokenizer: Any) -> Sequence[int]:
    """Return the ids of its words; of letters, where it has few."""
    known = tokenizer.backend_tokenizer.get_vocab_size(with_added_tokens=False)
    if known > 1000:
        return range(257, known)
    return [i for i in range(1, 257) if tokenizer.decode([i]) in set(ascii_letters)]


def _merges() -> Iterator[tuple[str, str]]:
    space = "\u0120"  # a space, as byte-level tokenizers write it
    for length in range(4):
        for letters in itertools.product(ascii_letters, repeat=length):
            for letter in ascii_letters:
                yield space + "".join(letters), letter


def write(folder: Path, config: dict[str, Any], chats: bool = False) -> Path:
    """Write a model's folder without weights: config.json and this tokenizer. chats: with a template
    for conversations."""
    folder.mkdir(parents=True, exist_ok=True)
    if chats:
        (folder / "chat_template.jinja").write_text(TEMPLATE)
    tokenizer(config["vocab_size"]).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
