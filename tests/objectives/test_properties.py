"""TBPO, Sparse-RL, AIPO and the generic correction against a brute-force oracle in float64, and
what holds for all.

The oracle walks over rows and tokens in plain Python and returns J and dJ/dlearner from the
formulas; where J is differentiable as it stands, its finite differences must agree as well.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowroll.objectives.objective import named
from lowroll.objectives.reduce import Denominators
from lowroll.objectives.table import MODES
from tests.fixtures.objectives import pack, random_batch

WIDE = {"eps_low": 0.1, "eps_high": 0.15}
VARIANTS = {
    "tbpo": ("tbpo", {**WIDE, "eps_negative": 0.2, "cap": 1.3}),
    "sparse": ("sparse", {**WIDE, "veto": 0.25}),
    "sparse, released code": (
        "sparse",
        {**WIDE, "veto": 0.2, "xi_cap": 1.5, "token_rs": (0.5, 1.5), "normalize_xi": True},
    ),
    "sparse, dual clip": ("sparse", {**WIDE, "veto": None, "dual_clip": 1.5}),
    "sparse, repair": ("sparse", {**WIDE, "veto": 0.45, "xi_cap": 1.5, "repair": "mask"}),
    "aipo": (
        "aipo",
        {
            "token_mask_low": 0.4,
            "token_mask_high": 2.0,
            "geo_mask_low": 0.6,
            "geo_mask_high": 1.6,
            "sequence_mask_low": 0.1,
            "sequence_mask_high": 6.0,
            "kl_tau": 0.3,
            "adv_tau": 0.7,
            "teacher_tau": 0.2,
        },
    ),
    "aipo, truncated": (
        "aipo",
        {"mode": "truncate", "token_mask_low": 0.3, "token_mask_high": 1.4, "kl_tau": 0.1},
    ),
    "aipo, sequence": ("aipo", {"ratio_type": "sequence", "sequence_clip_high": 1.5}),
    "ipo": ("ipo", {"width": 0.15, "ratio_cap": 1.3, "kl_tau": 0.05}),
    "ipo, signed": ("ipo", {"width": 0.1, "ratio_cap": 1.2, "signed": True}),
    "reweight": (
        "reweight",
        {**WIDE, "cap": 1.5, "reject": {"token_k1": (0.4, 3.0), "seq_max_k3": 1.0}},
    ),
    "reweight, sequence": (
        "reweight",
        {
            **WIDE,
            "weight": "sequence",
            "cap": 1.5,
            "normalize": True,
            "veto": 0.15,
            "reject": {"seq_sum_k1": (0.1, 8.0), "seq_mean_k2": 0.9, "token_k3": 1.2},
        },
    ),
    "reweight, icepop": (
        "reweight",
        {
            **WIDE,
            "icepop": (0.6, 1.8),
            "normalize": True,
            "dual_clip": 1.5,
            "reject": {"seq_mean_k1": (0.6, 1.7), "seq_sum_k3": 3.0, "token_k2": 1.5},
        },
    ),
    "reweight, bypass": (
        "reweight",
        {
            **WIDE,
            "bypass": True,
            "reject": {"seq_mean_k3": 0.5, "seq_sum_k2": 4.0, "seq_max_k2": 2.0},
        },
    ),
}
UNREACHED = {  # what a variant's options do not do
    "truncated_fraction": (
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
NORMALISED = {
    key for key, (_, options) in VARIANTS.items() if options.keys() & {"normalize", "normalize_xi"}
}


def batch_of(seed, B=4, T=6):
    batch = random_batch(seed, B, T, spread=0.45)
    generator = torch.Generator().manual_seed(1000 + seed)
    return batch | {
        "lpt": batch["lpo"] + 0.5 * torch.randn(B, T, generator=generator, dtype=torch.float64)
    }


def call(variant, batch, learner=None, **options):
    name, own = VARIANTS[variant]
    return named(name)(
        learner=batch["lpn"] if learner is None else learner,
        proximal=batch["lpo"],
        behavior=batch["lpr"],
        teacher=batch["lpt"],
        advantages=batch["A"],
        mask=batch["mask"],
        **(own | {"reduce": "seq-mean-token-mean", "max_length": 7} | options),
    )


def counted(variant, batch, segments=None):
    name, own = VARIANTS[variant]
    return named(name).count(
        mask=batch["mask"], proximal=batch["lpo"], behavior=batch["lpr"], segments=segments, **own
    )


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
    fractions: dict[str, float] = {}
    for seed in range(8):
        batch = batch_of(seed)
        plain = {key: value.tolist() for key, value in batch.items()}
        learner = batch["lpn"].clone().requires_grad_()
        J, stats = call(variant, batch, learner, reduce=mode)
        J.backward()
        expected, gradient = oracle(variant, plain, mode)
        assert J.item() == pytest.approx(expected, rel=1e-11, abs=1e-14)
        torch.testing.assert_close(
            learner.grad, torch.tensor(gradient, dtype=torch.float64), rtol=1e-11, atol=1e-14
        )
        for key, value in stats.items():
            fractions[key] = fractions.get(key, 0) + value
    name, options = VARIANTS[variant]
    dark = {key for key, value in fractions.items() if "fraction" in key and value == 0}
    allowed = {f"correction/{what}" for what, variants in UNREACHED.items() if variant in variants}
    allowed |= set() if name == "tbpo" or "dual_clip" in options else {"policy/dual_clip_fraction"}
    assert dark <= allowed, "a branch was never taken"


@pytest.mark.parametrize(
    "variant", [key for key, (name, _) in VARIANTS.items() if name not in ("aipo", "ipo")]
)
def test_the_gradient_is_the_slope_of_the_oracle(variant):
    plain = {key: value.tolist() for key, value in batch_of(2).items()}
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


# Packed, micro-batched, masked


@settings(max_examples=30)
@given(
    seed=st.integers(0, 10_000),
    variant=st.sampled_from(sorted(VARIANTS)),
    mode=st.sampled_from(MODES),
)
def test_packed_equals_padded(seed, variant, mode):
    batch = batch_of(seed, B=3, T=5)
    batch["mask"][-1, 0] = True  # the last segment id must occur for S to be known without counts
    order = torch.randperm(int(batch["mask"].sum()), generator=torch.Generator().manual_seed(seed))
    if "repair" in VARIANTS[variant][1]:  # the tokens of a sequence come in their order
        order = batch["mask"].nonzero()[:, 1].argsort(stable=True)
    packed, segments = pack(batch, order)
    padded_learner, packed_learner = (
        batch["lpn"].clone().requires_grad_(),
        packed["lpn"].clone().requires_grad_(),
    )
    J_padded, stats_padded = call(variant, batch, padded_learner, reduce=mode)
    J_packed, stats_packed = call(variant, packed, packed_learner, reduce=mode, segments=segments)
    J_padded.backward()
    J_packed.backward()
    assert J_packed.item() == pytest.approx(J_padded.item(), rel=1e-12, abs=1e-14)
    assert stats_packed == pytest.approx(stats_padded, rel=1e-12, abs=1e-14)
    expected = pack(batch | {"lpn": padded_learner.grad}, order)[0]["lpn"]
    torch.testing.assert_close(packed_learner.grad, expected, rtol=1e-12, atol=1e-14)
    assert counted(variant, packed, segments).weight_sum == pytest.approx(
        counted(variant, batch).weight_sum
    )


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_micro_batches_sum_to_the_big_batch(variant, mode):
    batch = {
        key: value.float() if value.is_floating_point() else value
        for key, value in batch_of(5, 6, 9).items()
    }
    batch["mask"][2] = False
    batch["lpr"][1, batch["mask"][1].nonzero()[0, 0]] = -math.inf
    learner, micro = batch["lpn"].clone().requires_grad_(), batch["lpn"].clone().requires_grad_()
    whole, _ = call(variant, batch, learner, reduce=mode)
    whole.backward()
    parts = [slice(0, 1), slice(1, 4), slice(4, 6)]
    counts = sum(
        (counted(variant, {key: value[part] for key, value in batch.items()}) for part in parts),
        Denominators(0, 0),
    )
    assert (counts.num_tokens, counts.num_sequences) == (int(batch["mask"].sum()) - 1, 6)
    assert (counts.weight_sum > 0) == (variant in NORMALISED)
    total = 0.0
    for part in parts:
        J, _ = call(
            variant, {k: v[part] for k, v in batch.items()}, micro[part], reduce=mode, counts=counts
        )
        J.backward()
        total += J.item()
    assert total == pytest.approx(whole.item(), rel=1e-5, abs=1e-6)
    torch.testing.assert_close(micro.grad, learner.grad, rtol=1e-5, atol=1e-7)
    assert learner.grad.abs().sum() > 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("garbage", [math.nan, -math.inf, math.inf, 1e30])
def test_masked_entries_may_hold_anything(variant, garbage):
    results = []
    for fill in (-1.0, garbage):
        batch = batch_of(7)
        assert not batch["mask"].all()
        for key in ("lpn", "lpo", "lpr", "lpt", "A"):
            batch[key] = torch.where(batch["mask"], batch[key], fill)
        learner = batch["lpn"].requires_grad_()
        J, stats = call(variant, batch, learner)
        J.backward()
        assert (learner.grad[~batch["mask"]] == 0).all()
        results.append((J.item(), stats, learner.grad.tolist(), counted(variant, batch)))
    assert results[0] == results[1]


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("mode", MODES)
def test_an_empty_mask_gives_zero_and_zero_gradient(variant, mode):
    batch = batch_of(3)
    batch["mask"][:] = False
    learner = (batch["lpn"] + math.nan).requires_grad_()
    J, stats = call(variant, batch, learner, reduce=mode)
    J.backward()
    assert J.item() == 0
    assert torch.equal(learner.grad, torch.zeros_like(learner))
    assert all(math.isfinite(value) for value in stats.values())
    empty = {key: value[:0, 0] for key, value in batch.items()}
    J, _ = call(
        variant,
        empty,
        empty["lpn"].requires_grad_(),
        reduce=mode,
        segments=torch.zeros(0, dtype=torch.int64),
    )
    J.backward()
    assert J.item() == 0


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("missing", [math.nan, -math.inf, math.inf])
def test_a_token_without_a_behavior_is_dropped_and_counted(variant, missing):
    batch, without = batch_of(11), batch_of(11)
    row, column = batch["mask"].nonzero()[2].tolist()
    batch["lpr"][row, column] = missing
    without["mask"][row, column] = False
    learner = batch["lpn"].clone().requires_grad_()
    J, stats = call(variant, batch, learner)
    J.backward()
    expected, expected_stats = call(variant, without)
    assert J.item() == expected.item()
    assert learner.grad[row, column] == 0
    assert stats == expected_stats | {"correction/dropped_tokens": 1}
    assert counted(variant, batch) == counted(variant, without)


@pytest.mark.parametrize("variant", VARIANTS)
def test_extreme_ratios_stay_finite(variant):
    lpn, lpo, lpr = (
        torch.tensor([[-200.0, -1e-3]]),
        torch.tensor([[-1e-3, -200.0]]),
        torch.tensor([[-300.0, -1e-3]]),
    )
    lpn.requires_grad_()
    for sign in (1.0, -1.0):
        J, stats = call(
            variant,
            {
                "lpn": lpn,
                "lpo": lpo,
                "lpr": lpr,
                "lpt": lpo,
                "mask": torch.ones(1, 2),
                "A": torch.full((1, 2), sign),
            },
        )
        (gradient,) = torch.autograd.grad(J, lpn)
        assert (
            J.isfinite() and gradient.isfinite().all() and all(map(math.isfinite, stats.values()))
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_non_finite_learner_shows(variant):
    batch = batch_of(2)
    for row in range(4):
        batch["lpn"][row, batch["mask"][row].nonzero()[:, 0]] = math.nan
    assert call(variant, batch)[0].isnan()


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_the_learner_carries_gradient_and_halves_are_upcast(variant):
    batch = {k: v.requires_grad_() if v.is_floating_point() else v for k, v in batch_of(1).items()}
    call(variant, batch)[0].backward()
    assert batch["lpn"].grad is not None
    assert all(batch[key].grad is None for key in ("lpo", "lpr", "lpt", "A"))
    halves = {
        k: v.detach().bfloat16() if v.is_floating_point() else v for k, v in batch_of(4).items()
    }
    J, _ = call(variant, halves)
    assert J.dtype == torch.float32
    upcast = {k: v.float() if v.is_floating_point() else v for k, v in halves.items()}
    assert J.item() == call(variant, upcast)[0].item()


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
