"""Reward shaping before the group's statistics.

DAPO's soft overlong punishment (arXiv 2503.14476 eq. 13) of a response of n tokens, with a limit
L_max and a soft zone of L_cache tokens below it:

    n <= L_max - L_cache            0
    up to L_max                     ((L_max - L_cache) - n) / L_cache      from 0 to -1
    n > L_max                       -1
"""

from __future__ import annotations


def overlong(length: int, *, max_length: int, cache: int) -> float:
    """Return the penalty in [-1, 0] for a response of `length` tokens; `max_length` is L_max,
    `cache` L_cache. ValueError unless length >= 0 and 0 < cache <= max_length."""
    if length < 0:
        raise ValueError(f"length = {length} is negative")
    if not 0 < cache <= max_length:
        raise ValueError(f"cache = {cache} must lie in 1..max_length = {max_length}")
    excess = length - (max_length - cache)
    if excess <= 0:
        return 0.0
    return max(-excess / cache, -1.0)
