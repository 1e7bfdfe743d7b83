"""What an algorithm's name stands for, and which correction goes with which rollouts.

An *algorithm* says how rewards become advantages and how the token terms are clipped and averaged.
A *correction* says how the gap between the rollout policy (quantized, maybe truncated) and the
learner is paid for. They combine freely: `dapo` with `acr` is ACR's token term with DAPO's clip
range and DAPO's token mean. GSPO's ratio belongs to a whole sequence, so the corrections that bound
single tokens (`is`, `acr`, `sparse`, `reweight`, `aipo`, `ipo`) have no form under it. TBPO brings
bounds of its own, AIPO and IPO have none: they take the algorithm's advantages and its average.

Defaults: GRPO, Dr. GRPO and RLOO clip at 0.2; DAPO clips higher (0.28) and averages over tokens
(arXiv 2503.14476); GSPO clips the sequence ratio at 3e-4 / 4e-4 (arXiv 2507.18071); PPO has a
critic in the place of the group, clips at 0.2 and averages over tokens (verl, which QuRL's runs
use). The corrections are those of QuRL (Eq. 3-9), QaRL (TBPO), Sparse-RL, AIPO (arXiv 2505.24034)
and verl (`reweight`). The tables of `lowroll.advantages` and `lowroll.objectives` say the same; a
test holds them together.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Algorithm:
    """Defaults of an algorithm. `advantage` is a name in the table of `lowroll.advantages`."""

    advantage: str
    eps_low: float
    eps_high: float
    reduce: str
    dynamic_sampling: bool = False


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm("grpo", 0.2, 0.2, "seq-mean-token-mean"),
    "grpo_no_std": Algorithm("grpo_no_std", 0.2, 0.2, "seq-mean-token-mean"),
    "dr_grpo": Algorithm("grpo_no_std", 0.2, 0.2, "constant"),
    "rloo": Algorithm("rloo", 0.2, 0.2, "seq-mean-token-sum"),
    "dapo": Algorithm("grpo", 0.2, 0.28, "token-mean", dynamic_sampling=True),
    "gspo": Algorithm("grpo", 3e-4, 4e-4, "seq-mean-token-mean"),
    "ppo": Algorithm("gae", 0.2, 0.2, "token-mean"),
}

DENSE = ("dense", "bf16", "fp32")  # rollout weights that are plain floating point
CAPPED = ("tis", "acr", "tbpo", "reweight")  # corrections that read loss.cap
TOKEN_LEVEL = (
    "is",
    "acr",
    "sparse",
    "reweight",
    "aipo",
    "ipo",
)  # corrections that gspo has no form for
CLIPLESS = ("aipo", "ipo")  # corrections that replace the clip
OWN_SECTION = ("tbpo", "sparse", "aipo", "ipo", "reweight")  # corrections with a section under loss


def bounds(algorithm: str, correction: str) -> tuple[float | None, float | None]:
    """The defaults of eps_low and eps_high; None under a correction that does not clip."""
    if correction in CLIPLESS:
        return None, None
    if correction == "tbpo":
        return 3e-4, 4e-4
    return ALGORITHMS[algorithm].eps_low, ALGORITHMS[algorithm].eps_high
