"""Sparse-RL: importance weights for a sampler with a compressed cache, and rejection of what it
could not know.

    J = 1/G sum_i M_i 1/|o_i| sum_t xi_t min(R A, clip(R, 1 - eps_low, 1 + eps_high) A)          Sparse-RL eq. 5-7
    xi_t = exp(proximal - behavior),   M_i = 0 if any xi_t of the response is below 1e-4, else 1

The proximal log-probs are the learner's with its full context. A token that they find (nearly)
impossible means that the sampler lost what it needed: its response is rejected as a whole,
contributes 0 and stays in 1/G, and its reward stays in the group's baseline. Nothing here asks
where the mismatch comes from, low-bit weights serve as well. A KL term belongs to the kept
responses only; the trainer sees to it.

With `repair: mask`, which is not the paper's, a response is rejected from its first such token on
only: the tokens before it were drawn while the sampler still knew what it needed. They keep their
share 1/|o_i| of the whole response, so that a response that broke early counts for little, and the
fewer tokens it has left the more it is like a rejected one; broken at its first token it is one.
The KL term takes the same tokens.

Deviation: the paper's xi has no upper bound and neither has this one by default. Its released code
differs: xi capped at 1.5 (`xi_cap`), tokens outside of (.5, 1.5) masked (`token_rs`), weights
divided by their mean over the batch, the rejected tokens included (`normalize_xi`), and masked
tokens taken out of the denominators, which is not done here.
"""

from __future__ import annotations

import math

from torch import Tensor

from lowroll.objectives.correction import Bounds, CorrectionWeights, checked_bounds, correct, judge
from lowroll.objectives.reduce import Denominators
from lowroll.objectives.surrogate import ObjectiveInput, prepare


def sparse(
    *,
    learner: Tensor,
    proximal: Tensor,
    behavior: Tensor,
    advantages: Tensor,
    mask: Tensor,
    segments: Tensor | None = None,
    counts: Denominators | None = None,
    xi_cap: float | None = None,
    token_rs: Bounds | None = None,
    normalize_xi: bool = False,
    veto: float | None = 1e-4,
    repair: str | None = None,
    eps_low: float,
    eps_high: float,
    dual_clip: float | None,
    reduce: str,
    max_length: float | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """Return J to maximise and its statistics. Shapes as in `clipped`; `token_rs` are bounds (low,
    high) on xi; `repair` is None or "mask".

    With `normalize_xi`, `counts` must bring the sum of xi over the batch (`Objective.count`).
    """
    tokens = prepare(
        learner=learner,
        proximal=proximal,
        behavior=behavior,
        advantages=advantages,
        mask=mask,
        segments=segments,
    )
    verdict = judge_sparse(tokens, xi_cap=xi_cap, token_rs=token_rs, veto=veto, repair=repair)
    return correct(
        tokens,
        verdict,
        normalize=normalize_xi,
        counts=counts,
        eps_low=eps_low,
        eps_high=eps_high,
        dual_clip=dual_clip,
        reduce=reduce,
        max_length=max_length,
    )


def judge_sparse(
    tokens: ObjectiveInput,
    *,
    xi_cap: float | None = None,
    token_rs: Bounds | None = None,
    veto: float | None = 1e-4,
    repair: str | None = None,
) -> CorrectionWeights:
    """Weigh every token and say which are rejected, by the options of `sparse`."""
    reject = None
    if token_rs is not None:
        low, high = checked_bounds("token_rs", token_rs)
        reject = {"token_k1": (1 / high, 1 / low if low else math.inf)}  # k1's bounds are on 1 / xi
    cap = math.inf if xi_cap is None else xi_cap
    return judge(tokens, cap=cap, reject=reject, veto=veto, repair=repair)
