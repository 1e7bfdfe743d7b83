"""Advantages from rewards: lists of floats, standard library only.

`TABLE[name](rewards, lengths)` estimates one group's advantages. `overlong` is DAPO's length
penalty; `gae`, `place` and `whiten` are for PPO.
"""

from lowroll.advantages.gae import gae, place, whiten
from lowroll.advantages.group import (
    TABLE,
    Estimator,
    grpo,
    grpo_no_std,
    length_weighted,
    rloo,
)
from lowroll.advantages.shaping import overlong

__all__ = [
    "TABLE",
    "Estimator",
    "gae",
    "grpo",
    "grpo_no_std",
    "length_weighted",
    "overlong",
    "place",
    "rloo",
    "whiten",
]
