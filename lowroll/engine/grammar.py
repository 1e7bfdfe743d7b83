"""Responses constrained by a grammar, which bans ids before each token.

A grammar is Lark for `llguidance` (extra `grammar`), or the JSON that its `grammar_from_...`
functions make of a JSON schema, a regular expression or a choice.
"""

from __future__ import annotations

import logging
import math
from collections import OrderedDict
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from lowroll.model.attention import upload

log = logging.getLogger(__name__)

MOST_KEPT = 32  # grammars that stay compiled
MOST_TEXT = 1 << 18  # characters of one grammar
# a mask takes at most about 15 ms, by the library's documentation
STEP_ITEMS, STEP_FUEL, LEXER_STATES = 50_000, 200_000, 50_000


@dataclass
class _SampleState:
    matcher: Any
    consumed_ids: list[int] = field(default_factory=list)


class Grammar:
    """A compiled grammar with the state of each sample of one request."""

    def __init__(self, compiled: Any, eos_ids: Collection[int]) -> None:
        self._compiled = compiled
        self._eos_ids = frozenset(eos_ids)
        self._states: dict[int, _SampleState] = {}

    def allowed(self, sample: int, token_ids: Many[int], width: int) -> bytes:
        """Return a bit mask of the ids that may follow a sample's tokens, lowest first, in `width`
        bytes: the end-of-sequence ids where no other can."""
        state = self._advance(sample, token_ids)
        matcher = state.matcher
        has_consumed_all = len(state.consumed_ids) == len(token_ids)
        mask = b""
        if has_consumed_all and not matcher.is_error() and not matcher.is_stopped():
            mask = matcher.compute_bitmask()
        if matcher.is_error():  # computing the mask may have caused it
            error = _first_line(matcher.get_error())
            log.warning("a grammar cannot be followed further: %s", error)
        if not any(mask):
            mask = sum(1 << i for i in self._eos_ids).to_bytes(width, "little")
        return mask[:width].ljust(width, b"\0")

    def _advance(self, sample: int, token_ids: Many[int]) -> _SampleState:
        if sample not in self._states:
            self._states[sample] = _SampleState(self._compiled.deep_copy())
        state = self._states[sample]
        num_common = _common_prefix_len(state.consumed_ids, token_ids)
        num_too_many = len(state.consumed_ids) - num_common
        if num_too_many:
            state.matcher.rollback(num_too_many)
            del state.consumed_ids[num_common:]
        new_ids = list(token_ids[num_common:])
        if new_ids:
            num_accepted = state.matcher.try_consume_tokens(new_ids)
            state.consumed_ids += new_ids[:num_accepted]
        return state


class Grammars:
    """A thread-safe compiler of grammars for a tokenizer. ValueError says what is missing."""

    def __init__(self, tokenizer: Any, vocab_size: int, eos_ids: Collection[int]) -> None:
        if not eos_ids:
            raise ValueError("grammar: the model has no end-of-sequence token, so none could end")
        try:
            from llguidance.hf import from_tokenizer
        except ImportError:
            raise ValueError(
                "grammar: llguidance is not installed: pip install 'lowroll[grammar]'"
            ) from None

        self.eos_ids = sorted(eos_ids)
        if len(tokenizer) > vocab_size:
            raise ValueError(
                f"grammar: the tokenizer has {len(tokenizer)} tokens and the model {vocab_size}"
            )
        self._tokenizer = from_tokenizer(tokenizer, vocab_size, self.eos_ids)
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._lock = Lock()

    def compile(self, text: str) -> Grammar:
        """Compile a grammar. ValueError says where it is wrong."""
        with self._lock:
            compiled = self._kept.get(text)
        if compiled is None:
            compiled = self._compile(text)
        with self._lock:
            self._kept[text] = compiled
            self._kept.move_to_end(text)
            while len(self._kept) > MOST_KEPT:
                self._kept.popitem(last=False)
        return Grammar(compiled, self.eos_ids)

    def _compile(self, text: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if len(text) > MOST_TEXT:
            raise ValueError(f"grammar: {len(text):,} characters; {MOST_TEXT:,} at most")
        limits = LLParserLimits(
            step_max_items=STEP_ITEMS, step_lexer_fuel=STEP_FUEL, max_lexer_states=LEXER_STATES
        )
        compiled = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        if compiled.is_error():
            raise ValueError(f"grammar: {_first_line(compiled.get_error())}")
        return compiled


def held(logits_BV: Tensor, rows: Iterable[tuple[int, Grammar, int, Many[int]]]) -> Tensor:
    """Return float32 logits with -inf for ids that a row's grammar excludes; the input without such
    rows. rows: (row, grammar, sample, tokens of the response) of each of N rows."""
    vocab_size = logits_BV.shape[1]
    width = -(-vocab_size // 8)
    masks = bytearray()
    row_numbers: list[int] = []
    for row, grammar, sample, token_ids in rows:
        row_numbers.append(row)
        masks += grammar.allowed(sample, token_ids, width)
    if not row_numbers:
        return logits_BV
    device = logits_BV.device
    masks_NW = upload(torch.frombuffer(masks, dtype=torch.uint8).view(-1, width), device)
    shifts_8 = upload(torch.arange(8, dtype=torch.uint8), device)
    bits_NW8 = masks_NW[..., None] >> shifts_8 & 1
    allowed_NV = bits_NW8.bool().flatten(1)[:, :vocab_size]
    rows_N = upload(torch.tensor(row_numbers), device)
    logits_BV = logits_BV.float()
    held_NV = logits_BV[rows_N].masked_fill(~allowed_NV, -math.inf)
    return logits_BV.index_put((rows_N,), held_NV)


def _common_prefix_len(seen: Many[int], now: Many[int]) -> int:
    max_len = min(len(seen), len(now))
    if seen[:max_len] == now[:max_len]:
        return max_len
    return next(i for i in range(max_len) if seen[i] != now[i])


def _first_line(error: str) -> str:
    line = next(
        (raw_line.strip() for raw_line in error.splitlines() if raw_line.strip()), "not a grammar"
    )
    return line.removeprefix("Error: ")[:300]
