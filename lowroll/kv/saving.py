"""The saving of a cache policy: the tokens that caches hold beside those of a dense cache.

Of sequences i, each a prompt and its response, with a cache after every token of the response,

    saving = 1 - sum_i stored_i / sum_i dense_i        tokens of a layer and head

counted at three places: `peak` (the most that a sample ever holds), `final` (after its last token),
and `mean` (stored and dense added up over the tokens of the response). A full cache counts as
compacted, since it is before the next token; the last token counts, though its key is never stored.
A prompt that is compacted holds all of itself only before the first response begins, on pages that
its samples share, and is not in a sample's peak.

Source: Sparse-RL's "Toks. saving". There the dense cache is that of a dense run on the same
prompts, whose responses have lengths of their own; a run does not have those, so `dense` here is
what the same responses would hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from lowroll.kv.policy.base import CachePolicy


@dataclass(frozen=True)
class Stored:
    """Tokens that one sequence's cache holds: at most, in the end, and added up over the tokens of
    its response; and how often it is compacted, its prompt's compaction included."""

    peak: int
    final: int
    total: int
    evictions: int


def stored(kv: CachePolicy, prompt: int, response: int) -> Stored:
    """Return the tokens stored for a prompt and a response of so many tokens under a policy."""
    cached = peak = kv.after_prompt(prompt)
    evictions = int(cached < prompt and response > 1)
    total, left = 0, response
    while left:
        more = min(kv.room(cached), left)
        total += more * cached + more * (more + 1) // 2
        cached, left = cached + more, left - more
        peak = max(peak, cached)
        if not kv.room(cached):
            total -= cached - kv.kept(cached)
            cached = kv.kept(cached)
            evictions += left > 1  # nothing makes room for the last token's key, never stored
    return Stored(peak, cached, total, evictions)


def saving(kv: CachePolicy, lengths: Iterable[tuple[int, int]]) -> dict[str, float]:
    """`saving_peak`, `saving_final` and `saving_mean` (see the top), and `evictions` a response, of
    prompts and responses of so many tokens; all 0 of none."""
    held, dense = [], []
    for prompt, response in lengths:
        whole = prompt + response
        every = response * prompt + response * (response + 1) // 2
        held.append(stored(kv, prompt, response))
        dense.append(Stored(whole, whole, every, 0))
    shares = {"saving_peak": "peak", "saving_final": "final", "saving_mean": "total"}
    saved = {
        name: _saved(sum(getattr(s, field) for s in held), sum(getattr(s, field) for s in dense))
        for name, field in shares.items()
    }
    return saved | {"evictions": sum(s.evictions for s in held) / max(1, len(held))}


def _saved(held: int, dense: int) -> float:
    return (dense - held) / dense if dense else 0.0
