"""The objectives by name, and how an algorithm and a correction make one of them.

An algorithm says which bounds and which reduction; a correction says what is done about the sampler's mismatch.
`select("dapo", "acr")` is the function of ACR with the bounds and the reduction of DAPO.
"""
from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lowroll.objectives.acr import acr
from lowroll.objectives.dapo import dapo
from lowroll.objectives.decoupled import decoupled
from lowroll.objectives.dr_grpo import dr_grpo
from lowroll.objectives.grpo import grpo
from lowroll.objectives.gspo import gspo
from lowroll.objectives.naive_is import naive_is
from lowroll.objectives.reduce import Counts
from lowroll.objectives.rloo import rloo
from lowroll.objectives.tis import tis

INPUTS = ("learner", "proximal", "behavior", "advantages", "mask", "segments", "counts")


@dataclass(frozen=True)
class Objective:
    """A policy objective: its function, which log-probs it needs, and options that differ from the function's own."""

    name: str
    function: Callable[..., tuple[Tensor, dict[str, float]]]
    needs_proximal: bool
    needs_behavior: bool
    formula: str
    source: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """Every option that may be set (eps_low, cap, reduce, ...) with its default."""
        parameters = inspect.signature(self.function).parameters
        own = {name: p.default for name, p in parameters.items() if name not in INPUTS}
        return own | dict(self.overrides)

    def __call__(self, *, learner: Tensor, advantages: Tensor, mask: Tensor, proximal: Tensor | None = None,
                 behavior: Tensor | None = None, segments: Tensor | None = None, counts: Counts | None = None,
                 **options: Any) -> tuple[Tensor, dict[str, float]]:
        """Call the function with the log-probs that it needs; others may be given and are not looked at.

        ValueError for missing log-probs or for an option that this objective does not have.
        """
        unknown = options.keys() - self.options.keys()
        if unknown:
            raise ValueError(f"{min(unknown)}: objective {self.name} has no such option; it has "
                             f"{', '.join(self.options)}")
        needed = {"proximal": proximal} if self.needs_proximal else {}
        needed |= {"behavior": behavior} if self.needs_behavior else {}
        for name, log_probs in needed.items():
            if log_probs is None:
                raise ValueError(f"{name}: objective {self.name} needs these log-probs")
        return self.function(learner=learner, advantages=advantages, mask=mask, segments=segments, counts=counts,
                             **needed, **(self.options | options))


def _entry(name: str, function: Callable[..., tuple[Tensor, dict[str, float]]], formula: str, source: str, *,
           proximal: bool = True, behavior: bool = False) -> Objective:
    return Objective(name, function, proximal, behavior, formula, source)


_CLIP = "min(R A, clip(R, 1-el, 1+eh) A)"

TABLE: dict[str, Objective] = {entry.name: entry for entry in (
    _entry("grpo", grpo, _CLIP, "arXiv 2402.03300 eq. 3"),
    _entry("grpo_no_std", grpo, f"{_CLIP}, A without the std", "arXiv 2402.03300 eq. 3, 2503.20783 sec. 3.2"),
    _entry("dr_grpo", dr_grpo, f"{_CLIP}, sum / (S max_length)", "arXiv 2503.20783 sec. 3.2"),
    _entry("rloo", rloo, f"{_CLIP}, sum over each sequence", "arXiv 2402.14740"),
    _entry("dapo", dapo, f"{_CLIP}, eh > el, mean over tokens", "arXiv 2503.14476 eq. 8"),
    _entry("gspo", gspo, "min(s A, clip(s, 1-el, 1+eh) A), s = exp(mean log R)", "arXiv 2507.18071"),
    _entry("none", grpo, f"{_CLIP} on the sampler's tokens: the mismatch is ignored", "QuRL eq. 1"),
    _entry("is", naive_is, "min(rho A, clip(rho, 1-el, 1+eh) A)", "QuRL eq. 3", proximal=False, behavior=True),
    _entry("decoupled", decoupled, f"w {_CLIP}", "QuRL eq. 4, arXiv 2110.00641", behavior=True),
    _entry("tis", tis, f"min(w, C) {_CLIP}", "QuRL eq. 5", behavior=True),
    _entry("acr", acr, "min(w, C) min(R A, clip(R, 1-el, (1+eh)/r) A), r = min(1, C/w)", "QuRL eq. 9", behavior=True),
)}

ALGORITHMS = ("grpo", "grpo_no_std", "dr_grpo", "rloo", "dapo", "gspo")
CORRECTIONS = ("none", "is", "decoupled", "tis", "acr")


def select(algorithm: str, correction: str = "none") -> Objective:
    """The objective of an algorithm under a correction. ValueError for unknown names, or GSPO with "is" or "acr"."""
    if algorithm not in ALGORITHMS:
        raise ValueError(f"algorithm: unknown {algorithm!r}; expected one of {', '.join(ALGORITHMS)}")
    if correction not in CORRECTIONS:
        raise ValueError(f"correction: unknown {correction!r}; expected one of {', '.join(CORRECTIONS)}")
    base = TABLE[algorithm]
    if correction == "none":
        return base
    if algorithm == "gspo":
        if correction not in ("tis", "decoupled"):
            raise ValueError(f"correction: {correction!r} bounds single tokens and has no form under gspo; "
                             "use tis or decoupled")
        return dataclasses.replace(base, name=f"gspo+{correction}", needs_behavior=True,
                                   overrides={"cap": math.inf} if correction == "decoupled" else {})
    corrected = TABLE[correction]
    shared = {name: base.options[name] for name in ("eps_low", "eps_high", "reduce")}
    return dataclasses.replace(corrected, name=f"{algorithm}+{correction}", overrides=shared)
