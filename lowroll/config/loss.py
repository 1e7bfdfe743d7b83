"""The `loss:` section, with a subsection for each correction that has its own options.

Defaults of shared options are in `lowroll.objectives.table`; a test compares a subsection's with
its function in `lowroll.objectives`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, Strict

from lowroll.config.document import Path
from lowroll.config.section import NotNegative, Positive, Problem, Section, one_of
from lowroll.objectives.table import ALGORITHMS, BOUNDS, CORRECTIONS, MODES, RULES, forms, pair

Bounds = Annotated[tuple[NotNegative, Positive], Strict(False)]
Rule = Annotated[str, one_of(lambda: RULES)]
Reduce = Annotated[str, one_of(lambda: MODES)]


class TbpoConfig(Section):
    """TBPO. The other bounds are loss.eps_low and loss.eps_high, the cap loss.cap."""

    eps_negative: Positive = 7e-4  # A < 0: no gradient above 1 + this


class SparseConfig(Section):
    """Sparse-RL's weights xi and its rejection."""

    xi_cap: Positive | None = None  # cap of the weights
    token_rs: Bounds | None = None  # (low, high): tokens with xi outside are masked
    normalize_xi: bool = False  # divide by the batch's mean of xi (one more forward pass)
    veto: Positive | None = 1e-4  # a sequence with any xi below is rejected
    # mask: reject only from the first such token on
    repair: Literal["mask"] | None = None


class SurogateLoss(Section):
    """AIPO as Surogate's files spell it."""

    # of the coefficient: of a token, or of the whole response
    ratio_type: Literal["token", "sequence"] = "token"
    kl_tau: NotNegative = 0.0  # weight of the log-ratio to the sampler
    adv_tau: NotNegative = 1.0  # weight of the advantage
    teacher_tau: NotNegative = 0.0  # pull to the log-probs of train.teacher
    token_mask_low: NotNegative = 0.125  # tokens with lower ratios are masked
    token_mask_high: Positive = 8.0  # tokens with higher ratios are masked
    geo_mask_low: NotNegative = 0.1  # responses with lower geometric means are masked
    geo_mask_high: Positive = 10.0  # responses with higher ones are masked
    sequence_mask_low: NotNegative = 0.0  # responses with any lower ratio are masked
    sequence_mask_high: Positive = 100.0  # responses with any higher ratio are masked
    sequence_clip_high: Positive = 10.0  # ratio_type sequence: the cap of its ratio


class AipoConfig(SurogateLoss):
    """AIPO."""

    mode: Literal["mask", "truncate"] = "mask"  # for a token above token_mask_high


class IpoConfig(Section):
    """IPO; DPPO with signed: true and width: 0.1."""

    signed: bool = False  # test only the side that the advantage pushes to
    width: NotNegative = 0.2  # tokens whose probability moved further are masked
    ratio_cap: Positive = 7.38905609893065  # e^2
    kl_tau: NotNegative = 1e-3  # weight of the squared log-ratio to the sampler


class ReweightConfig(Section):
    """The generic correction: weights, capped at loss.cap, and rejection rules."""

    # of a token, of the whole response, or none
    weight: Literal["token", "sequence", "none"] = "token"
    icepop: Bounds | None = None  # (low, high): weights outside become 0; replaces the cap
    normalize: bool = False  # divide by the batch's mean weight (one more forward pass)
    # k1: (low, high) of sampler over learner; others: a bound
    reject: dict[Rule, NotNegative | Bounds] | None = None
    veto: Positive | None = None  # a sequence with any w below is rejected
    bypass: bool = False  # clip against the sampler, without weights


class LossConfig(Section):
    """The policy objective. null: the default of the algorithm or correction."""

    eps_low: NotNegative | None = None  # the ratio is clipped below 1 - this
    eps_high: NotNegative | None = None  # and above 1 + this
    # C of tis, acr, tbpo, reweight: the largest mismatch weight
    cap: Annotated[float, Field(ge=1)] | None = None
    # bound of the loss where A < 0, as a ratio
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    reduce: Reduce | None = None  # how tokens and responses are averaged
    kl_coef: NotNegative = 0.0  # weight of the KL to the frozen reference model
    kl_estimator: Literal["k1", "k2", "k3", "k3+"] = "k3"  # of that KL, from one sample
    tbpo: TbpoConfig = TbpoConfig()
    sparse: SparseConfig = SparseConfig()
    aipo: AipoConfig = AipoConfig()
    ipo: IpoConfig = IpoConfig()
    reweight: ReweightConfig = ReweightConfig()

    def options(self, algorithm: str, correction: str, max_tokens: int) -> dict[str, Any]:
        """Return the options of `objectives.objective.select(algorithm, correction)`, with every
        null filled in."""
        objective = pair(algorithm, correction)
        max_length = max_tokens if self.reduce == "constant" else None
        options: dict[str, Any] = {name: getattr(self, name) for name in objective.options}
        if correction in own_sections():
            options |= getattr(self, correction).model_dump()
        return options | {"max_length": max_length}


def own_sections() -> list[str]:
    return [name for name in CORRECTIONS if name in LossConfig.model_fields]


def without_dual_clip(algorithm: str, correction: str) -> str:
    """Return the correction or algorithm without a dual clip, or ""."""
    rows_by_name = {correction: CORRECTIONS[correction], algorithm: ALGORITHMS[algorithm]}
    return next((name for name, row in rows_by_name.items() if "dual_clip" not in row.options), "")


def loss_problems(algorithm: str, correction: str, loss: LossConfig) -> Iterator[Problem]:
    if correction not in ("none", *forms(algorithm)):
        yield (
            (("correction",), ("algorithm",)),
            f"{correction} bounds single tokens and has no form under {algorithm}; use auto, "
            f"{', '.join(forms(algorithm))} or none",
        )
    owner = without_dual_clip(algorithm, correction)
    if owner and loss.dual_clip is not None:
        key = "correction" if owner == correction else "algorithm"
        yield ((("loss", "dual_clip"), (key,)), f"{owner} has no dual clip; write null")
    for name in BOUNDS:
        if name not in CORRECTIONS[correction].options and getattr(loss, name) is not None:
            yield (("loss", name), ("correction",)), f"{correction} does not clip; write null"
    yield from _bounds_problems(loss)
    if loss.sparse.repair is not None and loss.sparse.veto is None:
        yield (
            (("loss", "sparse", "repair"), ("loss", "sparse", "veto")),
            "without a veto there is nothing to repair; write null",
        )
    for rule, bound in (loss.reweight.reject or {}).items():
        rule_path: Path = ("loss", "reweight", "reject", rule)
        if rule.endswith("k1") and not isinstance(bound, tuple):
            yield (rule_path,), "needs [low, high], bounds on sampler over learner"
        elif isinstance(bound, tuple) and not rule.endswith("k1"):
            yield (rule_path,), "needs one number, an upper bound"
        elif isinstance(bound, tuple) and bound[0] > bound[1]:
            yield (rule_path,), _swapped_bounds(bound)


def _bounds_problems(loss: LossConfig) -> Iterator[Problem]:
    for name in ("token_mask", "geo_mask", "sequence_mask"):
        low, high = getattr(loss.aipo, f"{name}_low"), getattr(loss.aipo, f"{name}_high")
        if low > high:
            yield (
                (("loss", "aipo", f"{name}_low"), ("loss", "aipo", f"{name}_high")),
                f"{name}_low ({low:g}) is more than {name}_high ({high:g})",
            )
    if (token_rs := loss.sparse.token_rs) and token_rs[0] > token_rs[1]:
        yield (("loss", "sparse", "token_rs"),), _swapped_bounds(token_rs)
    if (icepop := loss.reweight.icepop) and icepop[0] > icepop[1]:
        yield (("loss", "reweight", "icepop"),), _swapped_bounds(icepop)


def _swapped_bounds(bounds: tuple[float, float]) -> str:
    return f"the lower bound ({bounds[0]:g}) is more than the upper one ({bounds[1]:g})"


def loss_notes(correction: str, loss: LossConfig) -> Iterator[str]:
    """Yield changed sections that the correction does not use."""
    for name in own_sections():
        if name != correction and getattr(loss, name) != LossConfig.model_fields[name].default:
            yield f"loss.{name}: no effect, the correction is {correction}"
