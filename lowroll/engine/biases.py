"""The changes that the host makes to logits before each token: it adds a request's own bias and its
presence and frequency penalties, which go by the tokens of the response so far, and constrains it
to its grammar. Arithmetic alone, for the scheduler too: no torch."""

from __future__ import annotations

from collections import Counter

from lowroll.engine.sequence import DrawnPosition, Sequence


def needs_host(s: Sequence | DrawnPosition) -> bool:
    """Return whether the host changes the logits before each token: by a grammar, or as
    `is_biased`."""
    return s.group.grammar is not None or is_biased(s)


def is_biased(s: Sequence | DrawnPosition) -> bool:
    """Return whether the next logits depend on a bias, or on how often the response has a token."""
    r = s.request
    return bool(r.logit_bias or r.presence_penalty or r.frequency_penalty)


def biases_of(s: Sequence | DrawnPosition) -> dict[int, float]:
    """Return the bias that is added to each logit, by token id."""
    r, found = s.request, dict(s.request.logit_bias or ())
    if r.presence_penalty or r.frequency_penalty:
        for token, count in Counter(s.token_ids).items():
            less = (r.presence_penalty or 0) + (r.frequency_penalty or 0) * count
            found[token] = found.get(token, 0.0) - less
    return found
