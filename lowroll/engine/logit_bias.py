"""The changes that the host makes to logits before each token. No torch, since the scheduler uses
it too."""

from __future__ import annotations

from collections import Counter

from lowroll.engine.sequence import DrawnPosition, Sequence


def needs_host(s: Sequence | DrawnPosition) -> bool:
    return s.group.grammar is not None or is_biased(s)


def is_biased(s: Sequence | DrawnPosition) -> bool:
    """Return whether a bias or a penalty changes the next logits."""
    request = s.request
    return bool(request.logit_bias or request.presence_penalty or request.frequency_penalty)


def biases_of(s: Sequence | DrawnPosition) -> dict[int, float]:
    """Return the addition to each token's next logit."""
    request, biases = s.request, dict(s.request.logit_bias or ())
    if request.presence_penalty or request.frequency_penalty:
        for token, count in Counter(s.token_ids).items():
            penalty = (request.presence_penalty or 0) + (request.frequency_penalty or 0) * count
            biases[token] = biases.get(token, 0.0) - penalty
    return biases
