"""The changes that the host makes to logits before each token: the request's own bias, its presence
and frequency penalties, and its grammar. No torch, since the scheduler uses it too."""

from __future__ import annotations

from collections import Counter

from lowroll.engine.sequence import DrawnPosition, Sequence


def needs_host(s: Sequence | DrawnPosition) -> bool:
    return s.group.grammar is not None or is_biased(s)


def is_biased(s: Sequence | DrawnPosition) -> bool:
    """Return whether the next logits depend on a bias, or on how often the response has a token."""
    r = s.request
    return bool(r.logit_bias or r.presence_penalty or r.frequency_penalty)


def biases_of(s: Sequence | DrawnPosition) -> dict[int, float]:
    r, found = s.request, dict(s.request.logit_bias or ())
    if r.presence_penalty or r.frequency_penalty:
        for token, count in Counter(s.token_ids).items():
            less = (r.presence_penalty or 0) + (r.frequency_penalty or 0) * count
            found[token] = found.get(token, 0.0) - less
    return found
