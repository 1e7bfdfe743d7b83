"""Advantages of one prompt's rollouts from their rewards r_1..r_G, with the group as the baseline.

    grpo             A_i = (r_i - mean) / (std + eps), std with G-1     GRPO, arXiv 2402.03300 sec. 4.1; eps as in verl
    grpo_no_std      A_i = r_i - mean                                   Dr. GRPO, arXiv 2503.20783 sec. 3.2
    rloo             A_i = (r_i - mean) * G / (G-1)                     RLOO, arXiv 2402.14740: r_i - mean of the others
    gae              A_i = r_i                                          PPO: the critic's values are the baseline
    length_weighted  A_i = r_i - sum_j r_j len_j / sum_j len_j          Surogate's `length_weighted_mean`

Rules for all of them but `gae`:
1. A reward of None (a failed score) is left out, and its rollout gets 0.0.
2. Equal rewards give exactly 0.0.
3. A single rollout (G = 1) gets A = r (verl's convention). A larger group with only one scored
   reward gets 0.0.
4. The reward of a rollout that is masked or filtered later counts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

Rewards = Sequence[float | None]
Estimator = Callable[[Rewards, Sequence[int] | None], list[float]]


def grpo(
    rewards: Rewards, lengths: Sequence[int] | None = None, *, eps: float = 1e-6
) -> list[float]:
    """Return (r - mean) / (std + eps), std with ddof 1. Errors as `rloo`."""

    def normalise(scored: list[float]) -> list[float]:
        centred = _centre(scored)
        std = math.sqrt(math.fsum(c * c for c in centred) / (len(centred) - 1))
        return [c / (std + eps) for c in centred]

    return _estimate(rewards, normalise)


def grpo_no_std(rewards: Rewards, lengths: Sequence[int] | None = None) -> list[float]:
    """Return r - mean. Errors as `rloo`."""
    return _estimate(rewards, _centre)


def rloo(rewards: Rewards, lengths: Sequence[int] | None = None) -> list[float]:
    """Return r - mean of the others; `lengths` is ignored. ValueError for an empty group or a
    non-finite reward."""

    def leave_one_out(scored: list[float]) -> list[float]:
        return [c * len(scored) / (len(scored) - 1) for c in _centre(scored)]

    return _estimate(rewards, leave_one_out)


def length_weighted(rewards: Rewards, lengths: Sequence[int] | None = None) -> list[float]:
    """Return r - sum(r len) / sum(len). `lengths` are response lengths in tokens, one per reward.
    ValueError for lengths that are missing, of another count, negative, or zero for every scored
    rollout."""
    if lengths is None or len(lengths) != len(rewards):
        raise ValueError(
            f"lengths: one for each of the {len(rewards)} rewards is needed, got "
            f"{'none' if lengths is None else len(lengths)}"
        )
    if any(length < 0 for length in lengths):
        raise ValueError(f"lengths: a negative length in {list(lengths)}")
    scored_lengths = [
        length for reward, length in zip(rewards, lengths, strict=True) if reward is not None
    ]

    def subtract_weighted_mean(scored: list[float]) -> list[float]:
        total = sum(scored_lengths)
        if total == 0:
            raise ValueError("lengths: every scored rollout of the group is empty")
        baseline = math.fsum(r * n for r, n in zip(scored, scored_lengths, strict=True)) / total
        return [r - baseline for r in scored]

    return _estimate(rewards, subtract_weighted_mean)


def reward(rewards: Rewards, lengths: Sequence[int] | None = None) -> list[float]:
    """Return the reward itself, 0.0 for None. Errors as `rloo`."""
    _check_rewards(rewards)
    return [0.0 if r is None else float(r) for r in rewards]


TABLE: dict[str, Estimator] = {
    "grpo": grpo,
    "grpo_no_std": grpo_no_std,
    "rloo": rloo,
    "length_weighted": length_weighted,
    "gae": reward,
}


def _centre(scored: list[float]) -> list[float]:
    mean = math.fsum(scored) / len(scored)
    return [r - mean for r in scored]


def _check_rewards(rewards: Rewards) -> None:
    if not rewards:
        raise ValueError("rewards: the group is empty")
    for index, r in enumerate(rewards):
        if r is not None and not math.isfinite(r):
            raise ValueError(f"rewards[{index}] = {r} is not finite (a failed score is None)")


def _estimate(rewards: Rewards, estimate: Callable[[list[float]], list[float]]) -> list[float]:
    _check_rewards(rewards)
    scored = [float(r) for r in rewards if r is not None]
    if len(rewards) == 1:
        return scored or [0.0]
    if len(scored) < 2 or min(scored) == max(scored):
        return [0.0] * len(rewards)
    advantages = iter(estimate(scored))
    return [0.0 if r is None else next(advantages) for r in rewards]
