"""Generalised advantage estimation for PPO (arXiv 1506.02438 eq. 16), for one response.

    delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1},   G_t = A_t + V_t

V_t is the critic's value of the state before token t; after the last token V = A = 0. A masked
token (such as a tool's answer) is no step, and is skipped. The critic's targets G are taken before
`whiten`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Mask = Sequence[int] | Sequence[bool]


def gae(
    rewards: Sequence[float],
    values: Sequence[float],
    mask: Mask | None = None,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[list[float], list[float]]:
    """Return (advantages, returns) of one response, one entry per token, 0.0 where the mask is 0.
    ValueError for lengths that differ, a non-finite entry that is not masked, or gamma or lam
    outside of [0, 1]."""
    if mask is None:
        mask = [1] * len(rewards)
    for name, entries in (("values", values), ("mask", mask)):
        if len(entries) != len(rewards):
            raise ValueError(f"{name}: {len(entries)} entries for {len(rewards)} rewards")
    for name, factor in (("gamma", gamma), ("lam", lam)):
        if not 0 <= factor <= 1:
            raise ValueError(f"{name}: {factor} must lie in [0, 1]")
    advantages = [0.0] * len(rewards)
    returns = [0.0] * len(rewards)
    next_advantage = next_value = 0.0
    unmasked_positions = [t for t, is_step in enumerate(mask) if is_step]
    for t in reversed(unmasked_positions):
        for name, entry in (("rewards", rewards[t]), ("values", values[t])):
            if not math.isfinite(entry):
                raise ValueError(f"{name}[{t}] = {entry} is not finite")
        delta = rewards[t] + gamma * next_value - values[t]
        advantages[t] = delta + gamma * lam * next_advantage
        returns[t] = advantages[t] + values[t]
        next_advantage, next_value = advantages[t], values[t]
    return advantages, returns


def place(reward: float, mask: Mask) -> list[float]:
    """Return token rewards: the response's score on the last unmasked token, else 0.0."""
    last_index = max((t for t, m in enumerate(mask) if m), default=-1)
    rewards = [0.0] * len(mask)
    if last_index >= 0:
        rewards[last_index] = reward
    return rewards


def whiten(advantages: Sequence[Sequence[float]], masks: Sequence[Mask]) -> list[list[float]]:
    """Return (A - mean) / sqrt(var + 1e-8) over the unmasked tokens of all responses, var with ddof
    1; 0.0 under the mask, and for one token or equal advantages. ValueError for lengths that
    differ, or a non-finite unmasked entry."""
    if [len(response) for response in advantages] != [len(mask) for mask in masks]:
        raise ValueError("masks: their lengths differ from those of the advantages")
    unmasked = [
        a
        for response, mask in zip(advantages, masks, strict=True)
        for a, m in zip(response, mask, strict=True)
        if m
    ]
    if not all(map(math.isfinite, unmasked)):
        raise ValueError("advantages: an unmasked entry is not finite")
    mean = scale = 0.0  # makes every advantage 0
    if len(unmasked) > 1 and min(unmasked) != max(unmasked):
        mean = math.fsum(unmasked) / len(unmasked)
        variance = math.fsum((a - mean) ** 2 for a in unmasked) / (len(unmasked) - 1)
        scale = 1 / math.sqrt(variance + 1e-8)
    return [
        [(a - mean) * scale if m else 0.0 for a, m in zip(response, mask, strict=True)]
        for response, mask in zip(advantages, masks, strict=True)
    ]
