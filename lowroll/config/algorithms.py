"""What an algorithm's name stands for: a group advantage, a policy objective and its settings.

An *algorithm* says how rewards become advantages and how the token terms are clipped and averaged. A *correction* says
how the gap between the rollout policy (quantised, maybe truncated) and the learner is paid for. They combine freely:
`dapo` with `acr` is ACR's token term with DAPO's clip range and DAPO's token mean. Without a correction the
algorithm's own objective is used.

Defaults: GRPO and Dr. GRPO clip at 0.2; RLOO's leave-one-out baseline with the same clip; DAPO clips higher (0.28) and
averages over tokens (arXiv 2503.14476); GSPO clips the sequence ratio at 3e-4 / 4e-4 (arXiv 2507.18071). The
corrections are those of QuRL (Eq. 3-9): `is`, `decoupled`, `tis`, `acr`.
"""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """`advantage` and `objective` are names in the tables of `lowroll.advantages` and `lowroll.objectives`."""

    advantage: str
    objective: str
    eps_low: float
    eps_high: float
    reduce: str
    dynamic_sampling: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm("grpo", "grpo", 0.2, 0.2, "seq-mean-token-mean"),
    "grpo_no_std": Algorithm("grpo_no_std", "grpo", 0.2, 0.2, "seq-mean-token-mean"),
    "dr_grpo": Algorithm("grpo_no_std", "dr_grpo", 0.2, 0.2, "constant"),
    "rloo": Algorithm("rloo", "rloo", 0.2, 0.2, "seq-mean-token-mean"),
    "dapo": Algorithm("grpo", "dapo", 0.2, 0.28, "token-mean", dynamic_sampling=True),
    "gspo": Algorithm("grpo", "gspo", 3e-4, 4e-4, "seq-mean-token-mean"),
}

CORRECTIONS = ("none", "is", "decoupled", "tis", "acr")


def choose_correction(algorithm: str, weights: str) -> tuple[str, str]:
    """The correction that `auto` stands for, and why, for people."""
    if algorithm == "gspo":
        return "none", "gspo works on its own sequence-level ratio"
    if weights == "dense":
        return "none", "the rollouts use the learner's own weights"
    return "acr", f"the rollouts use {weights} weights, so the learner must pay for the mismatch (QuRL, Eq. 9)"
