"""Sparse-RL: importance weights and rejections for a sampler with a compressed cache.

    J = 1/G sum_i M_i 1/|o_i| sum_t xi_t min(R A, clip(R, 1 - eps_low, 1 + eps_high) A)          Sparse-RL eq. 5-7
    xi_t = exp(proximal - behavior),   M_i = 0 if any xi_t of the response is below 1e-4, else 1

The proximal log-probs are the learner's with full context. A token that is nearly impossible under
them shows that the sampler lost needed context. Its response is rejected, but stays in 1/G and in
the group's baseline; a KL term leaves it out. `repair: mask`, not in the paper, rejects a response
only from its first such token on.

The paper's xi has no upper bound, nor has this default. The released code differs: xi capped at 1.5
(`xi_cap`), tokens outside of (.5, 1.5) masked (`token_rs`), weights divided by their mean over the
batch (`normalize_xi`), and masked tokens taken out of the denominators, which is not done here.
"""

from __future__ import annotations

import math

from lowroll.objectives.ratios import ObjectiveInput, TokenValues
from lowroll.objectives.reduce import Denominators
from lowroll.objectives.reweight import Bounds, CorrectionWeights, checked_bounds, correct, judge


def sparse(
    tokens: ObjectiveInput,
    *,
    counts: Denominators | None = None,
    xi_cap: float | None = None,
    token_rs: Bounds | None = None,
    normalize_xi: bool = False,
    veto: float | None = 1e-4,
    repair: str | None = None,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
) -> TokenValues:
    """Return token values and statistics. `token_rs` are bounds (low, high) on xi. With
    `normalize_xi`, `counts` must have the batch's sum of xi."""
    verdict = judge_sparse(tokens, xi_cap=xi_cap, token_rs=token_rs, veto=veto, repair=repair)
    return correct(
        tokens,
        verdict,
        normalize=normalize_xi,
        counts=counts,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
    )


def judge_sparse(
    tokens: ObjectiveInput,
    *,
    xi_cap: float | None = None,
    token_rs: Bounds | None = None,
    veto: float | None = 1e-4,
    repair: str | None = None,
) -> CorrectionWeights:
    """Return the weight xi of every token, and which tokens are rejected."""
    reject = None
    if token_rs is not None:
        low, high = checked_bounds("token_rs", token_rs)
        # k1's bounds are on behavior / proximal, which is 1 / xi
        lowest_inverse = 1 / high
        highest_inverse = 1 / low if low else math.inf
        reject = {"token_k1": (lowest_inverse, highest_inverse)}
    cap = math.inf if xi_cap is None else xi_cap
    return judge(tokens, cap=cap, reject=reject, veto=veto, repair=repair)
