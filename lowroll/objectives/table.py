"""The tables of algorithms and corrections (docs/algorithms.md), importable without torch.

An option of one function has its default there, and its section under `loss` in a configuration.
Defaults are those of the rows' sources; PPO's are verl's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MODES = ("seq-mean-token-mean", "token-mean", "constant", "seq-mean-token-sum")
RULES = (
    "token_k1",
    "token_k2",
    "token_k3",
    "seq_sum_k1",
    "seq_sum_k2",
    "seq_sum_k3",
    "seq_mean_k1",
    "seq_mean_k2",
    "seq_mean_k3",
    "seq_max_k2",
    "seq_max_k3",
)
CLIP: Mapping[str, Any] = {"eps_low": 0.2, "eps_high": 0.2, "dual_clip": None, "reduce": MODES[0]}
SEQUENCE_CLIP: Mapping[str, Any] = {"eps_low": 3e-4, "eps_high": 4e-4, "reduce": MODES[0]}
CAP = 2.0  # C, FlashRL's for GSM8K
BOUNDS = ("eps_low", "eps_high")
CLIPPED = "lowroll.objectives.clipped:clipped"
TIS = "lowroll.objectives.tis:tis"
_CLIPPED_TERM = "min(R A, clip(R, 1-el, 1+eh) A)"


@dataclass(frozen=True)
class ObjectiveRow:
    """A policy objective as data."""

    formula: str  # token term, to maximise
    source: str
    home: str = CLIPPED  # module:function
    log_probs: tuple[str, ...] = ("proximal",)  # besides the learner's
    options: Mapping[str, Any] = field(default_factory=lambda: CLIP)  # shared ones, with defaults
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments that are not options
    judge: str = ""  # module:function of the weights and rejections; "": none
    sequences: bool = False  # its ratio is a whole sequence's


@dataclass(frozen=True)
class Algorithm(ObjectiveRow):
    """A row of `ALGORITHMS`. `advantage` is a name in the table of `lowroll.advantages`."""

    advantage: str = "grpo"
    dynamic_sampling: bool = False  # draw again groups with equal rewards
    # for a sequence ratio: corrections that its function applies, and their options
    applies: Mapping[str, Mapping[str, Any]] | None = None

    @property
    def has_critic(self) -> bool:
        return self.advantage == "gae"


@dataclass(frozen=True)
class Correction(ObjectiveRow):
    """A row of `CORRECTIONS`. One of whole sequences combines with every algorithm."""

    takes: tuple[str, ...] = (*BOUNDS, "reduce")


ALGORITHMS: dict[str, Algorithm] = {
    "grpo": Algorithm(_CLIPPED_TERM, "arXiv 2402.03300 eq. 3"),
    "grpo_no_std": Algorithm(
        f"{_CLIPPED_TERM}, A without the std",
        "arXiv 2402.03300 eq. 3, 2503.20783 sec. 3.2",
        advantage="grpo_no_std",
    ),
    "dr_grpo": Algorithm(
        f"{_CLIPPED_TERM}, sum / (S max_length)",
        "arXiv 2503.20783 sec. 3.2",
        options={**CLIP, "reduce": "constant"},
        advantage="grpo_no_std",
    ),
    "rloo": Algorithm(
        f"{_CLIPPED_TERM}, sum over each sequence",
        "arXiv 2402.14740",
        options={**CLIP, "reduce": "seq-mean-token-sum"},
        advantage="rloo",
    ),
    "dapo": Algorithm(
        f"{_CLIPPED_TERM}, eh > el, mean over tokens",
        "arXiv 2503.14476 eq. 8",
        options={**CLIP, "eps_high": 0.28, "reduce": "token-mean"},
        dynamic_sampling=True,
    ),
    "gspo": Algorithm(
        "min(s A, clip(s, 1-el, 1+eh) A), s = exp(mean log R)",
        "arXiv 2507.18071",
        "lowroll.objectives.gspo:gspo",
        options=SEQUENCE_CLIP,
        sequences=True,
        applies={"tis": {"cap": CAP}, "decoupled": {}},
    ),
    "ppo": Algorithm(
        f"{_CLIPPED_TERM}, A a token's, mean over tokens",
        "arXiv 1707.06347 eq. 7, 1506.02438",
        options={**CLIP, "reduce": "token-mean"},
        advantage="gae",
    ),
}

CORRECTIONS: dict[str, Correction] = {
    "none": Correction(
        f"{_CLIPPED_TERM} on the sampler's tokens: the mismatch is ignored",
        "QuRL eq. 1",
    ),
    "is": Correction(
        "min(rho A, clip(rho, 1-el, 1+eh) A)",
        "QuRL eq. 3",
        log_probs=("behavior",),
    ),
    "decoupled": Correction(
        f"w {_CLIPPED_TERM}",
        "QuRL eq. 4, arXiv 2110.00641",
        TIS,
        ("proximal", "behavior"),
        fixed={"cap": math.inf},
    ),
    "tis": Correction(
        f"min(w, C) {_CLIPPED_TERM}",
        "QuRL eq. 5",
        TIS,
        ("proximal", "behavior"),
        {"cap": CAP, **CLIP},
    ),
    "acr": Correction(
        "min(w, C) min(R A, clip(R, 1-el, (1+eh)/r) A), r = min(1, C/w)",
        "QuRL eq. 9",
        "lowroll.objectives.acr:acr",
        ("proximal", "behavior"),
        {"cap": CAP, **CLIP},
    ),
    "tbpo": Correction(
        "w min(s A, clip(s, 1-el, 1+eh) A), and w clip(s, 1-el, 1+en) A for A < 0, w = exp(mean "
        "log w) in [1/C, C]",
        "QaRL sec. 3.2",
        "lowroll.objectives.tbpo:tbpo",
        ("proximal", "behavior"),
        {"cap": CAP, **SEQUENCE_CLIP},
        takes=("reduce",),
        sequences=True,
    ),
    "sparse": Correction(
        f"M w {_CLIPPED_TERM}, M = 0 for a sequence with any w < veto",
        "Sparse-RL eq. 5-7",
        "lowroll.objectives.sparse_rl:sparse",
        ("proximal", "behavior"),
        judge="lowroll.objectives.sparse_rl:judge_sparse",
    ),
    "aipo": Correction(
        "keep sg[rho (adv_tau A + teacher_tau (teacher - learner) - kl_tau log rho)] log pi",
        "arXiv 2505.24034, Surogate",
        "lowroll.objectives.aipo:aipo",
        ("behavior",),
        {"reduce": "token-mean"},
        takes=("reduce",),
    ),
    "ipo": Correction(
        "keep A sg[min(rho, ratio_cap)] log pi - kl_tau (log rho)^2, keep where |pi - b| <= width",
        "Surogate, prime-rl",
        "lowroll.objectives.ipo:ipo",
        ("behavior",),
        {"reduce": "token-mean"},
        takes=("reduce",),
    ),
    "reweight": Correction(
        f"keep v {_CLIPPED_TERM}, v from w, keep by rules on w",
        "verl, rollout correction",
        "lowroll.objectives.reweight:reweight",
        ("proximal", "behavior"),
        {"cap": CAP, **CLIP},
        judge="lowroll.objectives.reweight:judge",
    ),
}


def forms(algorithm: str) -> tuple[str, ...]:
    """Return the corrections that combine with an algorithm, except `none`."""
    applies = ALGORITHMS[algorithm].applies
    if applies is None:
        return tuple(name for name in CORRECTIONS if name != "none")
    return (*applies, *(name for name, row in CORRECTIONS.items() if row.sequences))


def pair(algorithm: str, correction: str) -> ObjectiveRow:
    """Return the correction's row with the algorithm's values of the options that it takes, or the
    algorithm's row if that `applies` the correction. ValueError for unknown names or an unsupported
    pair."""
    for kind, name, choices in (
        ("algorithm", algorithm, tuple(ALGORITHMS)),
        ("correction", correction, tuple(CORRECTIONS)),
    ):
        if name not in choices:
            raise ValueError(f"{kind}: unknown {name!r}; expected one of {', '.join(choices)}")
    base, corrected = ALGORITHMS[algorithm], CORRECTIONS[correction]
    if correction == "none":
        return base
    if correction not in forms(algorithm):
        *other_names, last_name = forms(algorithm)
        raise ValueError(
            f"correction: {correction!r} bounds single tokens and has no form under {algorithm}; "
            f"use {', '.join(other_names)} or {last_name}"
        )
    if base.applies is not None and correction in base.applies:
        # the algorithm's options win
        options = {**base.applies[correction], **base.options}
        return dataclasses.replace(
            base, log_probs=corrected.log_probs, options=options, fixed=corrected.fixed
        )
    shared = {name: base.options[name] for name in corrected.takes}
    return dataclasses.replace(corrected, options={**corrected.options, **shared})
