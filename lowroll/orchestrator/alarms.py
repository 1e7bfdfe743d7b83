"""Numbers of a step that usually mean that something broke, though nothing raised.

A verifier that rejects everything, a chat template that changed or a stop token that went missing
all leave a run that goes on learning nothing. They show in one step's statistics.
"""

from __future__ import annotations

from collections.abc import Mapping

LIMITS = (  # (metric, value from which it is an alarm, what it may mean)
    (
        "reward/zero_std_fraction",
        0.8,
        "most groups give no signal; look at the scorer and at the difficulty",
    ),
    (
        "rollout/truncated_fraction",
        0.8,
        "most rollouts hit max_tokens; look at the stop tokens and the chat template",
    ),
    ("reward/error_rate", 0.02, "the scorer fails on some rollouts"),
)


def alarms(stats: Mapping[str, float]) -> list[str]:
    """Return one line for each limit that the statistics exceed."""
    return [
        f"{name} is {stats[name]:.3g} (alarm above {limit:g}): {meaning}"
        for name, limit, meaning in LIMITS
        if stats.get(name, 0.0) > limit
    ]
