"""Metrics of an evaluation and their confidence intervals.

    pass@k = 1 - C(n - c, k) / C(n, k)   of n responses c are solved; unbiased (Chen et al. 2021,
                                         "Evaluating LLMs Trained on Code", eq. 1)
    avg@k  = the mean share of k responses that are solved
    maj@k  = the share of examples whose most frequent answer is right (Wang et al. 2022, "Self-Consistency")

Intervals are percentiles of a bootstrap over examples: the responses to one are not independent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import comb, floor
from random import Random
from statistics import fmean

RESAMPLES = 1000
LEVEL = 0.95


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the unbiased pass@k of n responses, of which c are solved."""
    if not 0 <= c <= n or not 1 <= k <= n:
        raise ValueError(
            f"pass_at_k: expected 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}"
        )
    return 1.0 - comb(n - c, k) / comb(n, k)


def majority(classes: Sequence[int | None]) -> int | None:
    """Return the most frequent class, the first seen of several. None does not vote."""
    counts = Counter(answer_class for answer_class in classes if answer_class is not None)
    return max(counts, key=counts.__getitem__) if counts else None


def interval(
    sets: Sequence[Sequence[float]],
    seed: int = 0,
    level: float = LEVEL,
    resamples: int = RESAMPLES,
) -> tuple[float, float]:
    """Return a bootstrap interval of the mean of the sets' means; values are resampled within their
    set. ValueError for an empty set."""
    if not sets or not all(sets):
        raise ValueError("interval: expected values, got an empty set")
    rng = Random(seed)
    means = [
        fmean(fmean(rng.choices(values, k=len(values))) for values in sets)
        for _ in range(resamples)
    ]
    return percentile(means, (1 - level) / 2), percentile(means, (1 + level) / 2)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the `share` quantile (0..1) of a non-empty sequence, interpolated linearly."""
    ordered = sorted(values)
    position = share * (len(ordered) - 1)
    lower_index = floor(position)
    upper_index = min(lower_index + 1, len(ordered) - 1)
    return ordered[lower_index] + (ordered[upper_index] - ordered[lower_index]) * (
        position - lower_index
    )
