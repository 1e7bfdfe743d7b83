"""The objectives by name, and how an algorithm and a correction make one of them.

An algorithm says which bounds and which reduction; a correction says what is done about the
sampler's mismatch. `select("dapo", "acr")` is the function of ACR with the bounds and the reduction
of DAPO. TBPO brings bounds of its own and AIPO and IPO have none: they take the reduction alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from lowroll.objectives.acr import acr
from lowroll.objectives.aipo import aipo
from lowroll.objectives.correction import Verdict, judge, reweight
from lowroll.objectives.dapo import dapo
from lowroll.objectives.decoupled import decoupled
from lowroll.objectives.dr_grpo import dr_grpo
from lowroll.objectives.grpo import grpo
from lowroll.objectives.gspo import gspo
from lowroll.objectives.ipo import ipo
from lowroll.objectives.naive_is import naive_is
from lowroll.objectives.ppo import ppo
from lowroll.objectives.reduce import Counts, count
from lowroll.objectives.rloo import rloo
from lowroll.objectives.sparse import judge_sparse, sparse
from lowroll.objectives.surrogate import prepare
from lowroll.objectives.tbpo import tbpo
from lowroll.objectives.tis import tis

INPUTS = ("learner", "proximal", "behavior", "teacher", "advantages", "mask", "segments", "counts")


@dataclass(frozen=True)
class Objective:
    """A policy objective: its function, which log-probs it needs, and options that differ from the
    function's own.

    `judge` (of those that reject tokens for their mismatch) gives the weights and what is kept from
    `prepare`'s tokens.
    """

    name: str
    function: Callable[..., tuple[Tensor, dict[str, float]]]
    needs_proximal: bool
    needs_behavior: bool
    formula: str
    source: str
    overrides: Mapping[str, Any] = field(default_factory=dict)
    judge: Callable[..., Verdict] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Every option that may be set (eps_low, cap, reduce, ...) with its default."""
        parameters = inspect.signature(self.function).parameters
        own = {name: p.default for name, p in parameters.items() if name not in INPUTS}
        return own | dict(self.overrides)

    def __call__(
        self,
        *,
        learner: Tensor,
        advantages: Tensor,
        mask: Tensor,
        proximal: Tensor | None = None,
        behavior: Tensor | None = None,
        teacher: Tensor | None = None,
        segments: Tensor | None = None,
        counts: Counts | None = None,
        **options: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Call the function with the log-probs that it needs; others may be given and are not
        looked at.

        ValueError for missing log-probs or for an option that this objective does not have.
        """
        options = self._complete(options)
        needed = {"proximal": proximal} if self.needs_proximal else {}
        needed |= {"behavior": behavior} if self.needs_behavior else {}
        for name, log_probs in needed.items():
            if log_probs is None:
                raise ValueError(f"{name}: objective {self.name} needs these log-probs")
        if "teacher" in inspect.signature(self.function).parameters:
            needed["teacher"] = teacher
        return self.function(
            learner=learner,
            advantages=advantages,
            mask=mask,
            segments=segments,
            counts=counts,
            **needed,
            **options,
        )

    def normalizes(self, **options: Any) -> bool:
        """Whether the weights are divided by their mean over the batch, so that `counts` must bring
        their sum."""
        options = self._complete(options)
        return any(options.get(name) for name in ("normalize", "normalize_xi"))

    def needs_advantage(self, **options: Any) -> bool:
        """Whether a token without an advantage is without a gradient: not so for AIPO with a KL or
        a teacher."""
        options = self._complete(options)
        return not any(options.get(name) for name in ("kl_tau", "teacher_tau"))

    def verdict(
        self,
        *,
        learner: Tensor,
        proximal: Tensor,
        behavior: Tensor,
        mask: Tensor,
        segments: Tensor | None = None,
        **options: Any,
    ) -> Verdict | None:
        """The weights and rejections of these tokens; None for an objective that rejects nothing
        for its mismatch."""
        if self.judge is None:
            return None
        tokens = prepare(
            learner=learner.detach(),
            proximal=proximal,
            behavior=behavior,
            mask=mask,
            segments=segments,
            advantages=torch.zeros_like(learner, requires_grad=False),
        )
        options = self._complete(options)
        wanted = inspect.signature(self.judge).parameters
        return self.judge(
            tokens, **{name: value for name, value in options.items() if name in wanted}
        )

    def count(
        self,
        *,
        mask: Tensor,
        segments: Tensor | None = None,
        proximal: Tensor | None = None,
        behavior: Tensor | None = None,
        **options: Any,
    ) -> Counts:
        """The denominators of these tokens under these options; add them up over micro-batches and
        ranks.

        `behavior` and `proximal` as the objective needs them: the first says which tokens are left
        out, both together the sum of the weights.
        """
        total = count(
            mask=mask, segments=segments, behavior=behavior if self.needs_behavior else None
        )
        if not self.normalizes(**options):
            return total
        if proximal is None or behavior is None:
            raise ValueError(
                f"proximal, behavior: objective {self.name} needs both to normalise its weights"
            )
        verdict = self.verdict(
            learner=proximal,
            proximal=proximal,
            behavior=behavior,
            mask=mask,
            segments=segments,
            **options,
        )
        assert verdict is not None
        return dataclasses.replace(total, weight_sum=verdict.weight_sum)

    def _complete(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Every option with its value. ValueError for one that this objective does not have."""
        if unknown := options.keys() - self.options.keys():
            raise ValueError(
                f"{min(unknown)}: objective {self.name} has no such option; it has "
                f"{', '.join(self.options)}"
            )
        return self.options | dict(options)


def _entry(
    name: str,
    function: Callable[..., tuple[Tensor, dict[str, float]]],
    formula: str,
    source: str,
    *,
    proximal: bool = True,
    behavior: bool = False,
    judge: Callable[..., Verdict] | None = None,
) -> Objective:
    return Objective(name, function, proximal, behavior, formula, source, judge=judge)


_CLIP = "min(R A, clip(R, 1-el, 1+eh) A)"

TABLE: dict[str, Objective] = {
    entry.name: entry
    for entry in (
        _entry("grpo", grpo, _CLIP, "arXiv 2402.03300 eq. 3"),
        _entry(
            "grpo_no_std",
            grpo,
            f"{_CLIP}, A without the std",
            "arXiv 2402.03300 eq. 3, 2503.20783 sec. 3.2",
        ),
        _entry("dr_grpo", dr_grpo, f"{_CLIP}, sum / (S max_length)", "arXiv 2503.20783 sec. 3.2"),
        _entry("rloo", rloo, f"{_CLIP}, sum over each sequence", "arXiv 2402.14740"),
        _entry("dapo", dapo, f"{_CLIP}, eh > el, mean over tokens", "arXiv 2503.14476 eq. 8"),
        _entry(
            "gspo", gspo, "min(s A, clip(s, 1-el, 1+eh) A), s = exp(mean log R)", "arXiv 2507.18071"
        ),
        _entry(
            "ppo",
            ppo,
            f"{_CLIP}, A a token's, mean over tokens",
            "arXiv 1707.06347 eq. 7, 1506.02438",
        ),
        _entry(
            "none", grpo, f"{_CLIP} on the sampler's tokens: the mismatch is ignored", "QuRL eq. 1"
        ),
        _entry(
            "is",
            naive_is,
            "min(rho A, clip(rho, 1-el, 1+eh) A)",
            "QuRL eq. 3",
            proximal=False,
            behavior=True,
        ),
        _entry("decoupled", decoupled, f"w {_CLIP}", "QuRL eq. 4, arXiv 2110.00641", behavior=True),
        _entry("tis", tis, f"min(w, C) {_CLIP}", "QuRL eq. 5", behavior=True),
        _entry(
            "acr",
            acr,
            "min(w, C) min(R A, clip(R, 1-el, (1+eh)/r) A), r = min(1, C/w)",
            "QuRL eq. 9",
            behavior=True,
        ),
        _entry(
            "tbpo",
            tbpo,
            "w min(s A, clip(s, 1-el, 1+eh) A), and w clip(s, 1-el, 1+en) A for A < 0, w = "
            "exp(mean "
            "log w) in [1/C, C]",
            "QaRL sec. 3.2",
            behavior=True,
        ),
        _entry(
            "sparse",
            sparse,
            f"M w {_CLIP}, M = 0 for a sequence with any w < veto",
            "Sparse-RL eq. 5-7",
            behavior=True,
            judge=judge_sparse,
        ),
        _entry(
            "aipo",
            aipo,
            "keep sg[rho (adv_tau A + teacher_tau (teacher - learner) - kl_tau log rho)] log pi",
            "arXiv 2505.24034, Surogate",
            proximal=False,
            behavior=True,
        ),
        _entry(
            "ipo",
            ipo,
            "keep A sg[min(rho, ratio_cap)] log pi - kl_tau (log rho)^2, keep where |pi - b| <= "
            "width",
            "Surogate, prime-rl",
            proximal=False,
            behavior=True,
        ),
        _entry(
            "reweight",
            reweight,
            f"keep v {_CLIP}, v from w, keep by rules on w",
            "verl, rollout correction",
            behavior=True,
            judge=judge,
        ),
    )
}

ALGORITHMS = ("grpo", "grpo_no_std", "dr_grpo", "rloo", "dapo", "gspo", "ppo")
CORRECTIONS = ("none", "is", "decoupled", "tis", "acr", "tbpo", "sparse", "aipo", "ipo", "reweight")

OWN_BOUNDS = ("tbpo", "aipo", "ipo")  # corrections that do not take the algorithm's clip


def select(algorithm: str, correction: str = "none") -> Objective:
    """The objective of an algorithm under a correction. ValueError for unknown names, or a pair
    that has no form."""
    if algorithm not in ALGORITHMS:
        raise ValueError(
            f"algorithm: unknown {algorithm!r}; expected one of {', '.join(ALGORITHMS)}"
        )
    if correction not in CORRECTIONS:
        raise ValueError(
            f"correction: unknown {correction!r}; expected one of {', '.join(CORRECTIONS)}"
        )
    base = TABLE[algorithm]
    if correction == "none":
        return base
    if algorithm == "gspo" and correction != "tbpo":
        if correction not in ("tis", "decoupled"):
            raise ValueError(
                f"correction: {correction!r} bounds single tokens and has no form under gspo; "
                "use tis, decoupled or tbpo"
            )
        return dataclasses.replace(
            base,
            name=f"gspo+{correction}",
            needs_behavior=True,
            overrides={"cap": math.inf} if correction == "decoupled" else {},
        )
    corrected = TABLE[correction]
    names = ("reduce",) if correction in OWN_BOUNDS else ("eps_low", "eps_high", "reduce")
    shared = {name: base.options[name] for name in names}
    return dataclasses.replace(corrected, name=f"{algorithm}+{correction}", overrides=shared)
