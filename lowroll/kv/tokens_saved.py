"""The tokens that a cache policy saves against a dense cache for the same sequences i:

    saving = 1 - sum_i stored_i / sum_i dense_i        tokens of a layer and head

as `peak` (the most that a sample ever holds), `final` (after its last token), and `mean` (summed
over the response's tokens). A full cache counts as compacted; the last token counts, though its key
is never stored. A whole prompt is only on shared pages, and does not count in a peak.

Source: Sparse-RL's "Toks. saving", but for `dense`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowroll.kv.policy.base import CachePolicy


@dataclass(frozen=True)
class Stored:
    """Tokens in one sequence's cache, with their sum over its response, and its compactions."""

    peak: int
    final: int
    total: int
    evictions: int


def stored(kv: CachePolicy, prompt: int, response: int) -> Stored:
    """Return the tokens stored for a prompt and a response."""
    cached = peak = kv.after_prompt(prompt)
    # before the last token alone, nothing is evicted
    evictions = int(cached < prompt and response > 1)
    total = 0
    remaining = response
    while remaining:
        added = min(kv.room(cached), remaining)
        total += added * cached + added * (added + 1) // 2
        cached += added
        remaining -= added
        peak = max(peak, cached)
        if not kv.room(cached):
            kept = kv.kept(cached)
            total -= cached - kept
            cached = kept
            evictions += remaining > 1
    return Stored(peak, cached, total, evictions)


def saving(kv: CachePolicy, lengths: Iterable[tuple[int, int]]) -> dict[str, float]:
    """Return `saving_peak`, `saving_final`, `saving_mean`, and the mean `evictions` of a response.
    lengths: (prompt tokens, response tokens); without any, all are 0."""
    bounded: list[Stored] = []
    dense: list[Stored] = []
    for prompt, response in lengths:
        whole = prompt + response
        dense_total = response * prompt + response * (response + 1) // 2
        bounded.append(stored(kv, prompt, response))
        dense.append(Stored(whole, whole, dense_total, 0))
    return {
        "saving_peak": _saved_share(sum(s.peak for s in bounded), sum(s.peak for s in dense)),
        "saving_final": _saved_share(sum(s.final for s in bounded), sum(s.final for s in dense)),
        "saving_mean": _saved_share(sum(s.total for s in bounded), sum(s.total for s in dense)),
        "evictions": sum(s.evictions for s in bounded) / max(1, len(bounded)),
    }


def _saved_share(held: int, dense: int) -> float:
    return (dense - held) / dense if dense else 0.0
