"""Every objective against a brute-force oracle in float64.

The oracle walks over rows and tokens in plain Python and returns J and dJ/dlearner from the
formulas; where J is differentiable as it stands, its finite differences must agree as well.
"""

from __future__ import annotations

import math

import pytest
import torch

from lowroll.objectives.objective import named
from lowroll.objectives.table import MODES
from tests.fixtures.objectives import VARIANTS, batch_with_teacher, call

UNREACHED = {  # what a variant's options do not do
    "truncated_fraction": (
        "decoupled",
        "sparse",
        "sparse, dual clip",
        "aipo",
        "aipo, sequence",
        "reweight, bypass",
    ),
    "rejected_fraction": ("sparse, dual clip",),
    "rejected_sequence_fraction": (
        "sparse, dual clip",
        "aipo, truncated",
        "aipo, sequence",
        "ipo",
        "ipo, signed",
    ),
}

CLIP_FAMILY = ("grpo", "is", "decoupled", "tis", "acr", "gspo")

# The oracle


def outside(value, bounds):
    return not bounds[0] <= value <= bounds[1]


def rejected(rules, veto, repair, log_w, t):
    """Whether token t of a sequence with these log-weights is rejected by a rule or the veto, which
    a repair has look no further than t."""
    k = {
        "k1": [-x for x in log_w],
        "k2": [x * x / 2 for x in log_w],
        "k3": [math.exp(x) - 1 - x for x in log_w],
    }
    looked_at = log_w[: t + 1] if repair == "mask" else log_w
    if veto is not None and min(map(math.exp, looked_at)) < veto:
        return True
    for rule, bound in rules.items():
        level, _, estimator = rule.rpartition("_")
        values = k[estimator]
        value = {
            "token": values[t],
            "seq_sum": sum(values),
            "seq_mean": sum(values) / len(values),
            "seq_max": max(values),
        }[level]
        if estimator == "k1":
            value = math.exp(value)
        if outside(value, bound if estimator == "k1" else (0, bound)):
            return True
    return False


def surrogate(R, A, el, eh, dual):
    """Value and d/d(log R) of the clipped surrogate."""
    if A > 0 and R > 1 + eh:
        return (1 + eh) * A, 0.0
    if A < 0 and R < 1 - el:
        return (1 - el) * A, 0.0
    if A < 0 and dual is not None and R > dual:
        return dual * A, 0.0
    return R * A, R * A


def weight_of(name, options, log_w, t):
    """The weight of token t before it is normalised."""
    if name == "sparse":
        return min(math.exp(log_w[t]), options.get("xi_cap") or math.inf)
    if options.get("bypass"):
        return 1.0
    w = math.exp(sum(log_w) if options.get("weight") == "sequence" else log_w[t])
    if "icepop" in options:
        return 0.0 if outside(w, options["icepop"]) else w
    return min(w, options.get("cap", 2.0))


def clipped_token(name, o, move, gap, A, t):
    """(value, gradient) of token t under one clip, with the weight of a correction."""
    w = math.exp(gap[t])
    R = math.exp(sum(move) / len(move) if name == "gspo" else move[t])
    if name == "is":
        R *= w
    cap = o.get("cap", math.inf)
    above = (1 + o["eps_high"]) / (min(1, cap / w) if name == "acr" else 1) - 1
    value, gradient = surrogate(R, A[t], o["eps_low"], above, o.get("dual_clip"))
    scale = min(w, cap) if name in ("decoupled", "tis", "acr") else 1.0
    return scale * value, scale * gradient


def token(name, o, lpn, lpo, lpr, lpt, A, t):
    """(value, gradient) of token t of one sequence, before normalisation of the weights."""
    n = len(lpn)
    move, gap = ([a - b for a, b in zip(x, y, strict=True)] for x, y in ((lpn, lpo), (lpo, lpr)))
    if name == "tbpo":
        r, w = math.exp(sum(move) / n), math.exp(sum(gap) / n)
        w = min(max(w, 1 / o["cap"]), o["cap"])
        value, gradient = surrogate(r, A[t], o["eps_low"], o["eps_high"], 1 + o["eps_negative"])
        return w * value, w * gradient
    if name == "aipo":
        logs = [a - b for a, b in zip(lpn, lpr, strict=True)]
        ratios = [math.exp(x) for x in logs]
        low, high = o.get("token_mask_low", 0.125), o.get("token_mask_high", 8)
        geo = (o.get("geo_mask_low", 0.1), o.get("geo_mask_high", 10))
        ends = (o.get("sequence_mask_low", 0), o.get("sequence_mask_high", 100))
        truncate = o.get("mode") == "truncate"
        if (
            ratios[t] < low
            or (ratios[t] > high and not truncate)
            or outside(math.exp(sum(logs) / n), geo)
            or min(ratios) < ends[0]
            or max(ratios) > ends[1]
        ):
            return 0.0, 0.0
        scale = min(ratios[t], high) if truncate else ratios[t]
        if o.get("ratio_type") == "sequence":
            scale = min(math.exp(min(sum(logs), 10)), o["sequence_clip_high"]) / n
        advantage = (
            o.get("adv_tau", 1) * A[t]
            + o.get("teacher_tau", 0) * (lpt[t] - lpn[t])
            - o.get("kl_tau", 0) * logs[t]
        )
        return scale * advantage * lpn[t], scale * advantage
    if name == "ipo":
        log_ratio, moved = lpn[t] - lpr[t], math.exp(lpn[t]) - math.exp(lpr[t])
        far = abs(moved) > o["width"]
        if o.get("signed"):
            far = moved > o["width"] if A[t] > 0 else moved < -o["width"]
        pull = 0.0 if far else A[t] * min(math.exp(log_ratio), o["ratio_cap"])
        tau = o.get("kl_tau", 1e-3)
        return pull * lpn[t] - tau * log_ratio**2, pull - 2 * tau * log_ratio
    if name in CLIP_FAMILY:
        return clipped_token(name, o, move, gap, A, t)
    log_w = gap
    R = math.exp(move[t])
    if o.get("bypass"):
        log_w = [a - b for a, b in zip(lpn, lpr, strict=True)]
        R = math.exp(log_w[t])
    rules = o.get("reject", {})
    if "token_rs" in o:
        rules = {"token_k1": (1 / o["token_rs"][1], 1 / o["token_rs"][0])}
    if rejected(rules, o.get("veto"), o.get("repair"), log_w, t):
        return 0.0, 0.0
    v = weight_of(name, o, log_w, t)
    value, gradient = surrogate(R, A[t], o["eps_low"], o["eps_high"], o.get("dual_clip"))
    return v * value, v * gradient


def oracle(variant, batch, mode, max_length=7):
    """(J, dJ/dlearner [B][T]); nothing of the package is used."""
    name, options = VARIANTS[variant]
    B, T = len(batch["mask"]), len(batch["mask"][0])
    columns = [[t for t in range(T) if row[t]] for row in batch["mask"]]
    tokens = sum(map(len, columns))
    scale = 1.0
    if options.get("normalize") or options.get("normalize_xi"):
        total = 0.0
        for b in range(B):
            log_w = [batch["lpo"][b][t] - batch["lpr"][b][t] for t in columns[b]]
            total += sum(weight_of(name, options, log_w, i) for i in range(len(log_w)))
        scale = tokens / total
    J, gradient = 0.0, [[0.0] * T for _ in range(B)]
    for b in range(B):
        inputs = [
            [batch[key][b][t] for t in columns[b]] for key in ("lpn", "lpo", "lpr", "lpt", "A")
        ]
        divisor = {
            "token-mean": tokens,
            "constant": B * max_length,
            "seq-mean-token-sum": B,
            "seq-mean-token-mean": B * len(columns[b]),
        }[mode]
        for i, t in enumerate(columns[b]):
            value, slope = token(name, options, *inputs, i)
            J += value * scale / divisor
            gradient[b][t] = slope * scale / divisor
    return J, gradient


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_against_the_oracle(variant, mode):
    name, options = VARIANTS[variant]
    fractions: dict[str, float] = {}
    for seed in range(8):
        batch = batch_with_teacher(seed)
        plain = {key: value.tolist() for key, value in batch.items()}
        learner = batch["lpn"].clone().requires_grad_()
        J, stats = call(name, batch, learner, reduce=mode, **options)
        J.backward()
        expected, gradient = oracle(variant, plain, mode)
        assert J.item() == pytest.approx(expected, rel=1e-11, abs=1e-14)
        torch.testing.assert_close(
            learner.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-11, atol=1e-14
        )
        for key, value in stats.items():
            fractions[key] = fractions.get(key, 0) + value
    dark = {key for key, value in fractions.items() if "fraction" in key and value == 0}
    allowed = {f"correction/{what}" for what, variants in UNREACHED.items() if variant in variants}
    allowed |= set() if name == "tbpo" or "dual_clip" in options else {"policy/dual_clip_fraction"}
    assert dark <= allowed, "a branch was never taken"


@pytest.mark.parametrize(
    "variant", [key for key, (name, _) in VARIANTS.items() if name not in ("aipo", "ipo")]
)
def test_the_gradient_is_the_slope_of_the_oracle(variant):
    plain = {key: value.tolist() for key, value in batch_with_teacher(2).items()}
    _, gradient = oracle(variant, plain, "seq-mean-token-mean")
    h = 1e-6
    for b in range(4):
        for t in range(6):
            centre, ends = plain["lpn"][b][t], []
            for step in (h, -h):
                plain["lpn"][b][t] = centre + step
                ends.append(oracle(variant, plain, "seq-mean-token-mean")[0])
            plain["lpn"][b][t] = centre
            assert gradient[b][t] == pytest.approx(
                (ends[0] - ends[1]) / (2 * h), rel=1e-6, abs=1e-8
            )


def test_tbpo_is_finer_than_half_precision():
    """A band of 3e-4 is far below bfloat16's spacing: the mean is taken in float64 of float32
    differences."""
    lpo = torch.full((1, 4096), -3.0)
    behind = named("tbpo")(
        learner=lpo + 3.9e-4,
        proximal=lpo,
        behavior=lpo,
        advantages=torch.ones_like(lpo),
        mask=torch.ones_like(lpo),
    )[1]
    beyond = named("tbpo")(
        learner=lpo + 4.1e-4,
        proximal=lpo,
        behavior=lpo,
        advantages=torch.ones_like(lpo),
        mask=torch.ones_like(lpo),
    )[1]
    assert (behind["policy/band_masked_fraction"], beyond["policy/band_masked_fraction"]) == (0, 1)
