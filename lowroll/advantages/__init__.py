"""Rewards in, advantages out: lists of floats, standard library only.

`TABLE[name](rewards, lengths)` estimates the advantages of one group; the rows of
`lowroll.objectives.table` name each algorithm's estimator; `overlong` is DAPO's length penalty.
`gae`, `place` and `whiten` are PPO's, which has a critic.
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
