"""Callable objectives: a row of `table` with its function and all options."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

from lowroll.objectives.ratios import TokenValues, as_floats, prepare
from lowroll.objectives.reduce import Denominators, aggregate, count
from lowroll.objectives.reweight import CorrectionWeights
from lowroll.objectives.table import ALGORITHMS, CORRECTIONS, ObjectiveRow, pair

GIVEN = ("tokens", "counts")  # parameters of a function that are not options


@cache
def _function(home: str) -> Callable[..., TokenValues]:
    function: Callable[..., TokenValues] = resolve_name(home)
    return function


@cache
def _parameters(home: str) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(_function(home)).parameters


@dataclass(frozen=True)
class Objective:
    """A policy objective."""

    name: str
    row: ObjectiveRow

    @property
    def function(self) -> Callable[..., TokenValues]:
        return _function(self.row.home)

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        return _parameters(self.row.home)

    @property
    def needs_proximal(self) -> bool:
        return "proximal" in self.row.log_probs

    @property
    def needs_behavior(self) -> bool:
        return "behavior" in self.row.log_probs

    @property
    def options(self) -> dict[str, Any]:
        """All options (eps_low, cap, reduce, ...) with their defaults."""
        own = {name: p.default for name, p in self.parameters.items() if name not in GIVEN}
        all_options = {**own, **self.row.options, "max_length": None}
        return {name: value for name, value in all_options.items() if name not in self.row.fixed}

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
        counts: Denominators | None = None,
        **options: Any,
    ) -> tuple[Tensor, dict[str, float]]:
        """Return J to maximise and its statistics, for [B, T] tensors or packed [N] with
        `segments`.

        counts: of the whole batch, where these tokens are a part of it. Log-probs that the row does
        not name are ignored. ValueError for missing log-probs or an unknown option.
        """
        options = {**self._complete(options), **self.row.fixed}
        mode, max_length = options.pop("reduce"), options.pop("max_length")
        # `bypass` compares the learner with the sampler itself
        reads_proximal = self.needs_proximal and not options.get("bypass")
        if reads_proximal and proximal is None:
            raise ValueError(f"proximal: objective {self.name} needs these log-probs")
        if self.needs_behavior and behavior is None:
            raise ValueError(f"behavior: objective {self.name} needs these log-probs")
        tokens = prepare(
            learner=learner,
            advantages=advantages,
            mask=mask,
            segments=segments,
            proximal=proximal if reads_proximal else None,
            behavior=behavior if self.needs_behavior else None,
            teacher=teacher if options.get("teacher_tau") else None,
        )
        # some functions divide by the batch's mean weight
        if "counts" in self.parameters:
            options["counts"] = counts
        value_N, statistics = self.function(tokens, **options)
        J = aggregate(value_N, tokens.sequences, mode=mode, counts=counts, max_length=max_length)
        return J, as_floats(statistics)

    def normalizes(self, **options: Any) -> bool:
        """Return whether `counts` must have the sum of the weights."""
        options = self._complete(options)
        return any(options.get(name) for name in ("normalize", "normalize_xi"))

    def needs_advantage(self, **options: Any) -> bool:
        """Return whether tokens with A = 0 have no gradient: not so with AIPO's KL or teacher."""
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
    ) -> CorrectionWeights | None:
        """Return the weights and rejections of these tokens; None if the objective never rejects
        for mismatch."""
        if not self.row.judge:
            return None
        judge: Callable[..., CorrectionWeights] = resolve_name(self.row.judge)
        tokens = prepare(
            learner=learner.detach(),
            proximal=proximal,
            behavior=behavior,
            mask=mask,
            segments=segments,
            # a verdict does not depend on them
            advantages=torch.zeros_like(learner, requires_grad=False),
        )
        all_options = self._complete(options)
        judge_parameters = inspect.signature(judge).parameters
        judge_options = {k: value for k, value in all_options.items() if k in judge_parameters}
        return judge(tokens, **judge_options)

    def count(
        self,
        *,
        mask: Tensor,
        segments: Tensor | None = None,
        proximal: Tensor | None = None,
        behavior: Tensor | None = None,
        **options: Any,
    ) -> Denominators:
        """Count the tokens and sequences by which the loss is divided. Counts of micro-batches and
        ranks add up. An objective that normalises its weights also needs `proximal`."""
        total = count(
            mask=mask, segments=segments, behavior=behavior if self.needs_behavior else None
        )
        if not self.normalizes(**options):
            return total
        if proximal is None or behavior is None:
            raise ValueError(
                f"proximal, behavior: objective {self.name} needs both to normalise its weights"
            )
        # the weights do not depend on the learner
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
        if unknown := options.keys() - self.options.keys():
            raise ValueError(
                f"{min(unknown)}: objective {self.name} has no such option; it has "
                f"{', '.join(self.options)}"
            )
        return {**self.options, **options}


def named(name: str) -> Objective:
    """Return the objective of a row. ValueError names the known ones."""
    rows: Mapping[str, ObjectiveRow] = {**ALGORITHMS, **CORRECTIONS}
    if name not in rows:
        raise ValueError(f"unknown objective {name!r}; known: {', '.join(rows)}")
    return Objective(name, rows[name])


def select(algorithm: str, correction: str = "none") -> Objective:
    """Combine an algorithm and a correction: `select("dapo", "acr")` is ACR with DAPO's bounds and
    average. ValueError for unknown names or an unsupported pair."""
    row = pair(algorithm, correction)
    return Objective(algorithm if correction == "none" else f"{algorithm}+{correction}", row)
