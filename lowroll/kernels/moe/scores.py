"""Scores that choose experts and weigh them.

    p = softmax(z), ranked by z        z: a router's logits, float32
    g = p of the chosen, over their sum if asked for

or, with `SigmoidRouting` (DeepSeek-AI 2024, arXiv 2412.19437, sections 2.1.2 and 4.2),

    p = sigmoid(z)
    chosen: the S largest p + c in the best groups, ranked by the sum of their two largest p + c
    g = a p of the chosen, over their sum if asked for

Legend: `kernels.moe`; G groups, e experts of a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowroll.kernels.launch import jit, tl

LEAST_SUM = 1e-20  # added to the sum of chosen sigmoids, as in transformers


@dataclass(frozen=True)
class SigmoidRouting:
    """Parameters of sigmoid scores. correction_E: c, float32, without a gradient. groups: of equal
    size; the `groups_kept` best stay. scale: a."""

    correction_E: Tensor
    groups: int = 1
    groups_kept: int = 1
    scale: float = 1.0


@dataclass(frozen=True)
class Routing:
    """Parameters of a router beside its matrix. choices: experts of a token. renormalize: divide a
    token's weights by their sum. bias_E: of the logits, learned. sigmoids: None for a softmax."""

    choices: int
    renormalize: bool
    bias_E: Tensor | None = None
    sigmoids: SigmoidRouting | None = None


def rank(logits_TE: Tensor, sigmoids: SigmoidRouting | None) -> Tensor:
    """Return the scores that choose experts, -inf where a group is out."""
    if sigmoids is None:
        return logits_TE
    ranked_TE = logits_TE.sigmoid() + sigmoids.correction_E
    if sigmoids.groups_kept == sigmoids.groups:
        return ranked_TE
    ranked_TGe = ranked_TE.unflatten(1, (sigmoids.groups, -1))
    scores_TG = ranked_TGe.topk(2, dim=-1).values.sum(-1)
    order_TG = scores_TG.sort(dim=-1, descending=True, stable=True).indices
    dropped_TG = torch.ones_like(scores_TG, dtype=torch.bool)
    dropped_TG.scatter_(1, order_TG[:, : sigmoids.groups_kept], False)
    return ranked_TGe.masked_fill(dropped_TG[..., None], -torch.inf).flatten(1)


def weigh(logits_TE: Tensor, experts_TS: Tensor, routing: Routing) -> Tensor:
    """Return the chosen experts' weights, from logits that include the bias."""
    if routing.sigmoids is None:
        weights_TS = logits_TE.softmax(dim=-1).gather(1, experts_TS)
        if routing.renormalize:
            weights_TS = weights_TS / weights_TS.sum(dim=-1, keepdim=True)
        return weights_TS
    weights_TS = logits_TE.gather(1, experts_TS).sigmoid()
    if routing.renormalize:  # sigmoids may all be 0
        weights_TS = weights_TS / (weights_TS.sum(dim=-1, keepdim=True) + LEAST_SUM)
    return weights_TS * routing.sigmoids.scale


# -- Triton ----------------------------------------------------------------------------------------


@jit
def keep_best_groups(
    ranked_e,
    offs_e,
    size,
    GROUPS: tl.constexpr,
    GROUPS_KEPT: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """Compute `rank` for one token. size: experts of a group."""
    offs_g = tl.arange(0, BLOCK_G)
    scores_g = tl.full((BLOCK_G,), float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own_e = tl.where(offs_e // size == group, ranked_e, float("-inf"))
        first = tl.max(own_e, 0)
        expert = tl.min(tl.where(own_e == first, offs_e, BLOCK_E), 0)
        second = tl.max(tl.where(offs_e == expert, float("-inf"), own_e), 0)
        scores_g = tl.where(offs_g == group, first + second, scores_g)
    kept_e = tl.zeros((BLOCK_E,), tl.int32)
    for _ in tl.static_range(GROUPS_KEPT):
        group = tl.min(tl.where(scores_g == tl.max(scores_g, 0), offs_g, BLOCK_G), 0)
        kept_e += (offs_e // size == group).to(tl.int32)
        scores_g = tl.where(offs_g == group, float("-inf"), scores_g)
    return tl.where(kept_e > 0, ranked_e, float("-inf"))
