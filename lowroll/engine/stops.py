"""The end of a sample at a stop id or stop string."""

from __future__ import annotations

from collections.abc import Callable

from lowroll.engine.sequence import Sequence


def stop_reason(sequence: Sequence, decode: Callable[[list[int]], str] | None) -> int | str | None:
    """Return the stop id or stop string that the last token completed, if any. No stop lies within
    the first `min_tokens` tokens."""
    request = sequence.request
    if len(sequence.token_ids) <= request.min_tokens:
        return None
    if sequence.last_token in sequence.group.stop_ids:
        return sequence.last_token
    if request.stop_strings:
        assert decode is not None
        num_chars = max(len(text) for text in request.stop_strings)
        tail = _decode_tail(decode, sequence.token_ids, request.min_tokens, num_chars)
        return next((text for text in request.stop_strings if text in tail), None)
    return None


def _decode_tail(
    decode: Callable[[list[int]], str], token_ids: list[int], start: int, num_chars: int
) -> str:
    """Return the last `num_chars` characters of the text of token_ids[start:]. Decoding from the
    middle can spoil the first characters (a split UTF-8 sequence, a stripped space): hence the 4.
    """
    window = num_chars + 4
    while True:
        first_token = max(start, len(token_ids) - window)
        text = decode(token_ids[first_token:])
        if len(text) >= num_chars + 4 or first_token == start:
            return text
        window *= 2
