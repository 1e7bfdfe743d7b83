"""The learner against independent computations: dense float64 log-probs, autograd through
materialised logits, a hand-written two-minibatch loop; and its promises: exact accumulation,
refusal of non-finite numbers, bitwise resume.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch

from lowroll.model import lora
from lowroll.model.spec import spec_from_config
from lowroll.trainer import recompute
from lowroll.trainer.loop import Trainer
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import PackedForward, TrainingDiverged, learn
from lowroll.transport.base import DeadlineExceeded
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.types import Batch, BehaviorTag, PolicySpan, Prompt, Rollout, Sample, Score
from tests.fixtures.learner import (
    CONFIG,
    TEMPERATURE,
    VOCAB,
    Probe,
    assert_close,
    dense_attention,
    dense_log_probs,
    frozen_log_probs,
    make_batch,
    settings,
    tiny_model,
)


def nearby(model, seed=3, size=0.02):
    """The model with slightly other weights."""
    other, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in other.parameters():
            p.add_(size * torch.randn(p.shape, generator=generator))
    return other


def run_learn(model, batch, learn_settings, reference=None, **optim):
    optimizer = Probe(
        model.trainable_parameters(), OptimSettings(**{"learning_rate": 1e-2} | optim)
    )
    metrics = learn(model, batch, optimizer, learn_settings, reference)
    return optimizer, metrics


def acr_objective(model, samples, proximal, cap=2.0, eps=0.2, kl_coef=0.0, reference=None):
    """ACR with GRPO's reduction, sequence by sequence, through materialised logits."""
    total = 0.0
    for s, lpo in zip(samples, proximal, strict=True):
        lpn, lpr = dense_log_probs(model, s), torch.tensor(s.rollout.logprobs)
        w, ratio, mask = (lpo - lpr).exp(), (lpn - lpo).exp(), torch.tensor(s.loss_mask).bool()
        high = (1 + eps) * (w / cap).clamp(min=1)
        A = torch.tensor(s.advantage)
        token = w.clamp(max=cap) * torch.minimum(
            ratio * A, torch.minimum(ratio.clamp(min=1 - eps), high) * A
        )
        if reference is not None:
            d = lpn - dense_log_probs(reference, s).detach()
            token = token - kl_coef * ((-d).exp() + d - 1)
        total = total + token[mask].mean()
    return total / len(samples)


def gradients(model, objective):
    params = model.trainable_parameters()
    grads = torch.autograd.grad(objective, list(params.values()))
    return {name: -g for name, g in zip(params, grads, strict=True)}


def test_packed_log_probs_match_dense_float64():
    model = tiny_model()
    batch, wide = make_batch(model), copy.deepcopy(model).double()
    for capacity in (1, 24, 10_000):
        trace = PackedForward(model, batch.samples, capacity, 3, TEMPERATURE).run([range(8)])
        for i, s in enumerate(batch.samples):
            assert torch.allclose(trace.log_probs[i].double(), dense_log_probs(wide, s), atol=2e-5)


def test_the_gradient_is_that_of_the_materialised_objective():
    """Covers alignment, temperature, mask, weights, denominators, and the forward-only group
    without signal."""
    model = tiny_model()
    batch = make_batch(model)
    J = acr_objective(model, batch.samples, frozen_log_probs(model, batch.samples))
    want = gradients(model, J)
    optimizer, metrics = run_learn(model, batch, settings())
    assert_close(optimizer.seen[0], want, atol=2e-6)
    assert metrics["policy/objective"] == pytest.approx(J.item(), abs=1e-5)
    assert metrics["policy/ratio_max"] == metrics["policy/ratio_mean"] == 1.0
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in want.values()))
    assert metrics["optim/grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_bfloat16_learner_accumulates_in_float32_masters(device):
    model = tiny_model()
    batch = make_batch(model)
    want = gradients(
        model, acr_objective(model, batch.samples, frozen_log_probs(model, batch.samples))
    )
    half = copy.deepcopy(model).to(device, torch.bfloat16)
    optimizer, metrics = run_learn(half, batch, settings(), learning_rate=1e-4)
    a = torch.cat([want[n].flatten() for n in want])
    b = torch.cat([optimizer.seen[0][n].flatten().cpu() for n in want])
    assert b.dtype == torch.float32
    assert (
        float(torch.cosine_similarity(a, b, dim=0)) > 0.995
        and abs(float(b.norm() / a.norm()) - 1) < 0.05
    )
    assert metrics["optim/skipped"] == 0 and metrics["optim/update_norm"] > 0
    for name, p in half.trainable_parameters().items():
        assert p.dtype == torch.bfloat16 and torch.equal(p, optimizer.masters[name].bfloat16())


def test_activation_checkpointing_changes_no_bit_of_the_gradient():
    model = tiny_model()
    batch = make_batch(model)
    plain, _ = run_learn(copy.deepcopy(model), batch, settings())
    recompute.apply(model, True)
    spared, _ = run_learn(model, batch, settings())
    assert all(torch.equal(spared.seen[0][n], g) for n, g in plain.seen[0].items())


@pytest.mark.parametrize(
    ("algorithm", "correction", "options"),
    [
        ("grpo", "acr", {}),
        ("dapo", "tis", {}),
        ("dr_grpo", "none", {"max_length": 8}),
        ("rloo", "decoupled", {}),
        ("gspo", "none", {}),
        ("grpo", "is", {}),
        ("grpo", "tbpo", {}),
        ("dapo", "sparse", {"veto": 0.75}),
        (
            "grpo",
            "sparse",
            {"veto": 0.75, "xi_cap": 1.5, "token_rs": (0.7, 1.4), "normalize_xi": True},
        ),
        ("grpo_no_std", "aipo", {"reduce": "token-mean", "kl_tau": 0.1, "token_mask_high": 1.5}),
        ("grpo", "aipo", {"ratio_type": "sequence", "mode": "truncate"}),
        ("grpo_no_std", "ipo", {"signed": True, "width": 0.01, "kl_tau": 0.1}),
        (
            "dapo",
            "reweight",
            {"normalize": True, "weight": "sequence", "reject": {"token_k3": 0.05}},
        ),
        ("grpo", "reweight", {"bypass": True, "reject": {"seq_mean_k2": 0.05}}),
    ],
)
def test_micro_batches_add_up_to_the_big_batch(algorithm, correction, options):
    model = tiny_model()
    batch = make_batch(model)
    grads, metrics = [], []
    for capacity in (1, 24, 10_000):
        optimizer, m = run_learn(
            copy.deepcopy(model),
            batch,
            settings(
                algorithm, correction, options=options, tokens_per_microbatch=capacity, kl_coef=0.1
            ),
            reference=nearby(model),
        )
        grads.append(optimizer.seen[0])
        metrics.append(m)
    scale = max(float(g.abs().max()) for g in grads[-1].values())
    for k in (0, 1):
        # float32 sums in another order: processors differ in the last bits
        assert_close(grads[k], grads[-1], atol=4e-6 * max(1.0, scale))
        assert metrics[k] == pytest.approx(metrics[-1], abs=1e-5, rel=1e-5)


def test_statistics_cover_tokens_without_signal():
    model = tiny_model()
    batch = make_batch(model)
    _, metrics = run_learn(copy.deepcopy(model), batch, settings())
    d, w, entropy = [], [], []
    for s, lpo in zip(batch.samples, frozen_log_probs(model, batch.samples), strict=True):
        mask = torch.tensor(s.loss_mask).bool()
        log_w = (lpo - torch.tensor(s.rollout.logprobs))[mask]
        d += (-log_w).tolist()
        w += log_w.exp().tolist()
        hidden = model(
            torch.tensor(s.prompt_ids + s.rollout.token_ids),
            torch.arange(len(s.prompt_ids + s.rollout.token_ids)),
            dense_attention,
        )
        p = torch.softmax(hidden @ model.lm_head_weight.t() / TEMPERATURE, -1)[
            len(s.prompt_ids) - 1 : -1
        ][mask]
        entropy += (-(p * p.log()).sum(-1)).tolist()
    assert metrics["mismatch/kl_k1"] == pytest.approx(sum(d) / len(d), abs=1e-5)
    assert metrics["mismatch/weight_max"] == pytest.approx(max(w), abs=1e-4)
    assert metrics["policy/entropy"] == pytest.approx(sum(entropy) / len(entropy), abs=1e-5)
    assert metrics["correction/truncated_fraction"] == pytest.approx(sum(x > 2 for x in w) / len(w))


def test_two_minibatches_follow_the_textbook_loop():
    """lpo stays that of the parameters before the batch, so the second minibatch sees ratios other
    than 1."""
    model = tiny_model()
    batch, twin = make_batch(model), copy.deepcopy(model)
    _, metrics = run_learn(
        model, batch, settings(minibatches=2), weight_decay=0.0, max_grad_norm=None, eps=1e-3
    )
    proximal = frozen_log_probs(twin, batch.samples)
    adam = torch.optim.AdamW(
        twin.trainable_parameters().values(), lr=1e-2, weight_decay=0.0, eps=1e-3
    )
    for part in (slice(0, 4), slice(4, 8)):
        adam.zero_grad()
        (-acr_objective(twin, batch.samples[part], proximal[part])).backward()
        adam.step()
    assert_close(model.trainable_parameters(), twin.trainable_parameters(), atol=2e-5)
    assert metrics["policy/ratio_max"] > 1.01
    assert metrics["optim/lr"] == 1e-2


def test_kl_to_a_frozen_reference_pulls_the_gradient():
    model = tiny_model()
    reference = nearby(model)
    batch = make_batch(model)
    J = acr_objective(
        model,
        batch.samples,
        frozen_log_probs(model, batch.samples),
        kl_coef=0.5,
        reference=reference,
    )
    want = gradients(model, J)
    optimizer, metrics = run_learn(model, batch, settings(kl_coef=0.5), reference)
    assert_close(optimizer.seen[0], want, atol=2e-5)
    assert metrics["policy/objective"] == pytest.approx(J.item(), abs=1e-5)
    assert metrics["policy/kl_reference"] > 1e-3


def sparse_objective(
    model,
    samples,
    proximal,
    *,
    veto,
    kl_coef=0.0,
    reference=None,
    normalize=False,
    repair=None,
):
    """Sparse-RL sequence by sequence: a rejected response is neither learned from nor held to the
    reference. With a repair neither is what follows its first anomaly."""
    total, weights, num_rejected = 0.0, [], 0
    for s, lpo in zip(samples, proximal, strict=True):
        lpn, lpr, mask = (
            dense_log_probs(model, s),
            torch.tensor(s.rollout.logprobs),
            torch.tensor(s.loss_mask).bool(),
        )
        xi, ratio, A = (lpo - lpr).exp(), (lpn - lpo).exp(), torch.tensor(s.advantage)
        weights += xi[mask].tolist()
        before = torch.ones_like(mask)
        if float(xi[mask].min()) < veto:
            num_rejected += 1
            before = ((xi < veto) & mask).cumsum(0) == 0
            if repair is None:
                continue
        token = xi * torch.minimum(ratio * A, ratio.clamp(0.8, 1.2) * A)
        if reference is not None:
            d = lpn - dense_log_probs(reference, s).detach()
            token = token - kl_coef * ((-d).exp() + d - 1)
        total = total + token[mask & before].sum() / mask.sum()
    scale = len(weights) / sum(weights) if normalize else 1.0
    return total * scale / len(samples), num_rejected


@pytest.mark.parametrize("repair", [None, "mask"])
def test_a_rejected_response_is_out_of_the_objective_and_of_the_kl_term(repair):
    model = tiny_model()
    reference, batch = nearby(model), make_batch(model)
    J, num_rejected = sparse_objective(
        model,
        batch.samples,
        frozen_log_probs(model, batch.samples),
        veto=0.75,
        kl_coef=0.5,
        reference=reference,
        repair=repair,
    )
    assert 0 < num_rejected < 8
    want = gradients(model, J)
    options = {"veto": 0.75, "repair": repair}
    optimizer, metrics = run_learn(
        model, batch, settings("grpo", "sparse", kl_coef=0.5, options=options), reference
    )
    assert_close(optimizer.seen[0], want, atol=2e-5)
    assert metrics["policy/objective"] == pytest.approx(J.item(), abs=1e-5)
    left = metrics.get("correction/repaired_sequence_fraction", 0)
    assert metrics["correction/rejected_sequence_fraction"] + left == num_rejected / 8
    assert (left > 0) == (repair is not None)


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("correction", ["sparse", "tis"])
def test_whom_a_rejection_hits_is_told_where_the_cache_is_not_exact(correction, minibatches):
    """Of the policy before its first update; all else is as beside a dense cache, bit for bit."""
    model = tiny_model()
    batch = make_batch(model)
    proximal = frozen_log_probs(model, batch.samples)
    options = {"veto": 0.75} if correction == "sparse" else {}
    how = settings("grpo", correction, options=options, minibatches=minibatches)
    rewards = [float(i % 3) for i in range(8)]
    for sample, reward in zip(batch.samples, rewards, strict=True):
        sample.score = Score(reward)
    before = copy.deepcopy(model.state_dict())
    _, dense = run_learn(model, batch, how)
    model.load_state_dict(before)
    for sample in batch.samples[::2]:  # one would do
        behavior = replace(sample.rollout.behavior, kv_policy="rkv", kv_budget=4)
        sample.rollout = replace(sample.rollout, behavior=behavior)
    _, bounded = run_learn(model, batch, how)
    more = {name: bounded[name] for name in bounded.keys() - dense.keys()}
    assert {name: bounded[name] for name in dense} == dense

    masks = [torch.tensor(s.loss_mask).bool() for s in batch.samples]
    xis = [
        (lpo - torch.tensor(s.rollout.logprobs)).exp()[mask]
        for s, lpo, mask in zip(batch.samples, proximal, masks, strict=True)
    ]
    want = {"mismatch/weight_mean": torch.cat(xis).mean().item()}
    if correction == "sparse":
        low = [bool((xi < 0.75).any()) for xi in xis]
        assert 0 < sum(low) < 8
        lengths = [len(xi) for xi in xis]
        gone = [i for i in range(8) if low[i]]
        want |= {
            "correction/vetoed_fraction": (torch.cat(xis) < 0.75).float().mean().item(),
            "correction/rejected_length_ratio": fmean(lengths[i] for i in gone) / fmean(lengths),
            "correction/rejected_reward_gap": fmean(rewards[i] for i in gone) - fmean(rewards),
        }
    assert more == pytest.approx(want, abs=1e-5)


@pytest.mark.parametrize("capacity", [1, 24, 10_000])
def test_normalised_weights_know_the_mean_of_the_batch_before_the_first_micro_batch(capacity):
    model = tiny_model()
    batch = make_batch(model)
    J, _ = sparse_objective(
        model, batch.samples, frozen_log_probs(model, batch.samples), veto=0.75, normalize=True
    )
    want = gradients(model, J)
    optimizer, metrics = run_learn(
        model,
        batch,
        settings(
            "grpo",
            "sparse",
            tokens_per_microbatch=capacity,
            options={"veto": 0.75, "normalize_xi": True},
        ),
    )
    assert_close(optimizer.seen[0], want, atol=2e-6)
    assert metrics["policy/objective"] == pytest.approx(J.item(), abs=1e-5)
    assert metrics["correction/weight_mean"] == pytest.approx(1, abs=1e-5)


def test_aipo_learns_from_its_kl_where_there_is_no_advantage():
    """The group without an advantage has a gradient of its own: it may not be run forward only."""
    model = tiny_model()
    batch = make_batch(model)
    J = 0.0
    for s in batch.samples:
        lpn, lpr, mask = (
            dense_log_probs(model, s),
            torch.tensor(s.rollout.logprobs),
            torch.tensor(s.loss_mask).bool(),
        )
        log_ratio = (lpn - lpr).detach()
        J = J + (log_ratio.exp() * (s.advantage - 0.3 * log_ratio) * lpn)[mask].sum()
    J = J / sum(sum(s.loss_mask) for s in batch.samples)
    want = gradients(model, J)
    optimizer, metrics = run_learn(model, batch, settings("dapo", "aipo", options={"kl_tau": 0.3}))
    assert metrics["correction/rejected_fraction"] == 0
    assert_close(optimizer.seen[0], want, atol=2e-6)


class Spoken(torch.nn.Module):
    """Stands in for a model whose log-probs of the four response tokens are its parameter."""

    exact = can_share_prompts = False

    def __init__(self, log_probs):
        super().__init__()
        self.spec, self.device = spec_from_config(CONFIG), torch.device("cpu")
        self.lm_head_weight = torch.nn.Parameter(torch.tensor(log_probs))

    def forward(self, ids_T, pos_T, attend):
        return ids_T

    def trainable_parameters(self):
        return dict(self.named_parameters())

    def linears(self):
        return iter(())

    def causal(self, lengths):
        return None


A11 = [-1.2, -0.8, -3.0, -0.1]


@pytest.mark.parametrize(
    ("correction", "options", "seeds", "loss"),
    [
        ("aipo", {}, [0.40936538, 0.55258546, 0, 0], 0.2333267048),
        # teacher - learner = .2, -1, 2.5, -.4: rho (A + teacher_tau (teacher - learner)) on the two
        # kept tokens
        (
            "aipo",
            {"teacher_tau": 0.5},
            [0.81873075 * 0.6, 1.10517092 * 0, 0, 0],
            0.81873075 * 0.6 * 1.2 / 4,
        ),
        (
            "aipo",
            {"teacher_tau": 1.0, "adv_tau": 0.0},
            [0.81873075 * 0.2, -1.10517092, 0, 0],
            (0.81873075 * 0.2 * 1.2 - 1.10517092 * 0.8) / 4,
        ),
        ("ipo", {}, [0.40976538, 0.55238546, 0.005, -0.0048], None),
    ],
)
def test_the_rows_of_aipo_through_the_step(monkeypatch, correction, options, seeds, loss):
    monkeypatch.setattr(
        "lowroll.trainer.step.token_log_probs",
        lambda hidden, weight, targets, **more: (weight * 1, torch.zeros_like(weight)),
    )
    rollout = Rollout(
        [2, 3, 4, 5], [-1, -0.9, -0.5, -2.5], "stop", BehaviorTag((PolicySpan(0, "d"),), "int8")
    )
    sample = Sample(
        Prompt("p", "e", []), [7], rollout, "", Score(1.0), advantage=0.5, loss_mask=[1] * 4
    )
    learner, teacher = Spoken(A11), Spoken([-1.0, -1.8, -0.5, -0.5])
    optimizer = Probe(learner.trainable_parameters(), OptimSettings())
    metrics = learn(
        learner,
        Batch(1, [sample], 1.0),
        optimizer,
        settings("grpo_no_std", correction, options={"reduce": "token-mean"} | options),
        teacher=teacher,
    )
    assert [-4 * g for g in optimizer.seen[0]["lm_head_weight"].tolist()] == pytest.approx(
        seeds, rel=1e-6, abs=2e-7
    )
    if loss is not None:
        assert metrics["policy/objective"] == pytest.approx(-loss, rel=1e-6, abs=2e-7)
    if "teacher_tau" in options:
        with pytest.raises(ValueError, match="teacher: teacher_tau .* needs a teacher model"):
            learn(
                learner,
                Batch(1, [sample], 1.0),
                optimizer,
                settings("grpo_no_std", correction, options={"reduce": "token-mean"} | options),
            )


def test_the_teacher_is_another_model_and_stays_as_it_is():
    """Its log-probs at the sampling temperature, for every token; the group without an advantage
    learns from it too."""
    model = tiny_model()
    batch, teacher = make_batch(model), tiny_model(seed=5)
    before = {n: p.clone() for n, p in teacher.named_parameters()}
    J = 0.0
    for s in batch.samples:
        lpn, lpr, mask = (
            dense_log_probs(model, s),
            torch.tensor(s.rollout.logprobs),
            torch.tensor(s.loss_mask).bool(),
        )
        pull = s.advantage + 0.3 * (dense_log_probs(teacher, s) - lpn).detach()
        J = J + ((lpn - lpr).detach().exp() * pull * lpn)[mask].sum()
    want = gradients(model, J / sum(sum(s.loss_mask) for s in batch.samples))
    optimizer = Probe(model.trainable_parameters(), OptimSettings(learning_rate=1e-2))
    metrics = learn(
        model,
        batch,
        optimizer,
        settings("dapo", "aipo", options={"teacher_tau": 0.3}),
        teacher=teacher,
    )
    assert metrics["correction/rejected_fraction"] == 0
    assert_close(optimizer.seen[0], want, atol=2e-6)
    assert all(torch.equal(p, before[n]) for n, p in teacher.named_parameters())
    small = tiny_model(vocab_size=8)
    with pytest.raises(ValueError, match="leaves 0..7"):
        learn(
            model,
            batch,
            optimizer,
            settings("dapo", "aipo", options={"teacher_tau": 0.3}),
            teacher=small,
        )


def with_adapter(seed=0, b_scale=0.1):
    model = tiny_model()
    lora.attach(model, rank=4, alpha=8, targets=["q_proj", "v_proj", "down_proj"], seed=seed)
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            if not p.any():
                p.copy_(b_scale * torch.randn(p.shape))
    return model


def test_lora_moves_the_adapter_alone_and_its_reference_is_the_adapter_off():
    base, model = tiny_model(), with_adapter()
    batch = make_batch(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    trainable = {id(p) for p in model.trainable_parameters().values()}
    J = acr_objective(
        model, batch.samples, frozen_log_probs(model, batch.samples), kl_coef=0.5, reference=base
    )
    want = gradients(model, J)
    optimizer, metrics = run_learn(model, batch, settings(kl_coef=0.5))
    assert_close(optimizer.seen[0], want, atol=2e-5)
    assert metrics["policy/kl_reference"] > 1e-4
    moved = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert moved == {n for n, p in model.named_parameters() if id(p) in trainable}


def test_kl_without_a_reference_is_refused_before_any_change():
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="reference"):
        run_learn(model, make_batch(model), settings(kl_coef=0.1))
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_masked_and_failed_samples_count_in_the_denominator_only():
    model = tiny_model()
    batch = make_batch(model)
    for s in batch.samples[4:]:
        s.loss_mask = [0] * len(s.loss_mask)
    J = acr_objective(model, batch.samples[:4], frozen_log_probs(model, batch.samples[:4])) * 4 / 8
    want = gradients(model, J)
    optimizer, _ = run_learn(model, batch, settings())
    assert_close(optimizer.seen[0], want, atol=2e-6)


def test_a_batch_without_any_signal_is_a_zero_gradient():
    model = tiny_model()
    batch = make_batch(model)
    for s in batch.samples:
        s.loss_mask = [0] * len(s.loss_mask)
    before = copy.deepcopy(model.state_dict())
    _, metrics = run_learn(model, batch, settings(), weight_decay=0.0)
    assert (
        metrics["optim/grad_norm"] == 0
        and metrics["optim/skipped"] == 0
        and metrics["policy/objective"] == 0
    )
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def poison_advantage(batch, model, value):
    batch.samples[0].advantage = value


def poison_behavior(batch, model, value):
    batch.samples[0].rollout.logprobs[0] = value


def poison_gradient(batch, model, value):
    first = next(iter(model.trainable_parameters().values()))
    first.register_hook(
        lambda g: g.index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(value))
    )


def poison_hidden(batch, model, value):
    model.register_forward_hook(lambda m, args, out: out.index_fill(1, torch.tensor(0), value))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize(
    "poison", [poison_advantage, poison_behavior, poison_gradient, poison_hidden]
)
def test_non_finite_numbers_never_reach_the_weights(poison, value):
    model = tiny_model()
    before = copy.deepcopy(model.state_dict())
    batch = make_batch(model)
    batch.samples[0].loss_mask[0] = 1
    poison(batch, model, value)
    _, metrics = run_learn(model, batch, settings())
    if metrics["optim/skipped"]:
        assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert all(v.isfinite().all() for v in model.state_dict().values())
    if poison is poison_behavior:  # a lost behaviour log-prob costs its token, not the step
        assert not metrics["optim/skipped"]
        assert metrics["correction/dropped_tokens"] == (0 if value == 1e38 else 1)
    elif not math.isfinite(value):
        assert metrics["optim/skipped"] == 1


@pytest.mark.parametrize("minibatches", [1, 4])
def test_three_refusals_in_a_row_stop_the_run_with_the_batch_saved(minibatches):
    model, saved = tiny_model(), []
    before = copy.deepcopy(model.state_dict())
    channel = MemoryRolloutChannel(capacity=8)
    trainer = Trainer(
        model,
        Optimizer(model.trainable_parameters(), OptimSettings()),
        settings(minibatches=minibatches),
        channel,
        lambda version: None,
        save_offending=saved.append,
    )
    for step in (1, 2, 3):
        batch = make_batch(model, step=step)
        for s in batch.samples:
            s.advantage = math.nan
        channel.send(batch)
    with pytest.raises(TrainingDiverged, match="step 3" if minibatches == 1 else "step 1"):
        for _ in range(3):
            assert trainer.step(trainer.receive())["optim/skipped"] == 1
    assert [b.step for b in saved] == ([1, 2, 3] if minibatches == 1 else [1])
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("capacity", [40, 4096])
def test_a_sample_is_learnt_from_at_the_temperature_that_it_was_drawn_at(capacity):
    """Log-probs of each against dense ones, and the gradient of a mixed batch is the sum of those of
    its parts."""
    model = tiny_model()
    batch = make_batch(model)
    for i in (1, 2, 5):
        batch.samples[i].temperature = 1.7
    forward = PackedForward(model, batch.samples, capacity, 16, batch.temperature)
    everything = [list(range(len(batch.samples)))]
    found = forward.run(everything).log_probs
    for i, sample in enumerate(batch.samples):
        own = 1.7 if i in (1, 2, 5) else batch.temperature
        want = dense_log_probs(model, sample, own).detach()
        torch.testing.assert_close(found[i], want, atol=5e-6, rtol=0)

    def gradient(portions, samples):
        model.zero_grad()
        replace(forward, samples=samples).run(portions, lambda packed, learner_N: learner_N.sum())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    mixed = gradient(everything, batch.samples)
    warm, cold = [1, 2, 5], [i for i in everything[0] if i not in (1, 2, 5)]
    parts = [gradient([part], batch.samples) for part in (warm, cold)]
    for whole, one, other in zip(mixed, *parts, strict=True):
        torch.testing.assert_close(whole, one + other, atol=1e-4, rtol=1e-5)
    named = [replace(s, temperature=s.temperature or batch.temperature) for s in batch.samples]
    same = gradient(everything, named)
    assert all(torch.equal(a, b) for a, b in zip(mixed, same, strict=True))


def test_the_gap_is_told_by_age_where_the_orchestrator_says_the_learners_version():
    model = tiny_model()
    batch = make_batch(model)
    first = batch.samples[0].rollout
    spans = (PolicySpan(2, "d"), PolicySpan(4, "e", 1))
    first.behavior = replace(first.behavior, policy=spans)
    for sample in batch.samples[1:]:
        tag = sample.rollout.behavior
        sample.rollout.behavior = replace(tag, policy=(PolicySpan(4, "e"),))
    _, plain = run_learn(copy.deepcopy(model), batch, settings())
    assert not any("staleness" in name for name in plain)
    batch.stats["rollout/learner_version"] = 5.0
    _, told = run_learn(copy.deepcopy(model), batch, settings())
    assert {name: told[name] for name in plain} == plain
    ages = {n: told[f"mismatch/staleness_{n}/logp_diff_mean"] for n in (1, 3)}
    assert len([name for name in told if "staleness" in name]) == 4
    learner = dense_log_probs(model, batch.samples[0])[0].item()
    masked = not batch.samples[0].loss_mask[0]
    assert not masked and ages[3] == pytest.approx(abs(learner - first.logprobs[0]), abs=1e-5)


def test_bad_batches_are_refused_before_anything_changes():
    model = tiny_model()
    optimizer = Optimizer(model.trainable_parameters(), OptimSettings())
    for change, words in [
        (lambda b: b.samples.clear(), "samples"),
        (lambda b: setattr(b, "temperature", 0.0), "temperature"),
        (lambda b: setattr(b.samples[1], "temperature", math.inf), "sample 1 .*temperature"),
        (lambda b: b.samples[2].loss_mask.pop(), "sample 2 .*loss_mask"),
        (lambda b: b.samples[3].prompt_ids.append(VOCAB), "sample 3 .*prompt_ids"),
    ]:
        batch = make_batch(model)
        change(batch)
        with pytest.raises(ValueError, match=words):
            learn(model, batch, optimizer, settings())
    assert optimizer.num_steps == 0


def make_trainer(model, channel, published=None):
    optimizer = Optimizer(
        model.trainable_parameters(),
        OptimSettings(
            learning_rate=1e-2, warmup_steps=3, lr_scheduler_type="cosine", total_steps=8
        ),
    )
    return Trainer(
        model,
        optimizer,
        settings(minibatches=2),
        channel,
        (lambda v: None) if published is None else published.append,
        deadline_s=0.05,
    )


@pytest.mark.slow
@pytest.mark.parametrize("build", [tiny_model, with_adapter])
@pytest.mark.parametrize("stop", [0, 1, 3])
def test_a_resumed_trainer_is_bitwise_the_uninterrupted_one(build, stop):
    channel = MemoryRolloutChannel(capacity=8)
    batches = [make_batch(tiny_model(), step=s, seed=s) for s in range(5)]
    whole = make_trainer(build(), channel)

    def advance(trainer, steps):
        for s in steps:
            channel.send(batches[s])
        return [
            {
                k: v
                for k, v in trainer.step(trainer.receive()).items()
                if not k.startswith(("time/", "perf/"))
            }
            for _ in steps
        ]

    advance(whole, range(stop))
    tensors, state = whole.state()
    tensors = {file: {k: t.clone() for k, t in named.items()} for file, named in tensors.items()}
    rest = advance(whole, range(stop, 5))

    resumed = make_trainer(build(seed=0), channel)
    advance(resumed, range(2))
    resumed.restore(tensors, state)
    assert advance(resumed, range(stop, 5)) == rest
    assert resumed.state()[1] == whole.state()[1]
    for file, named in whole.state()[0].items():
        for name, tensor in named.items():
            assert torch.equal(resumed.state()[0][file][name], tensor), name
    assert all(
        torch.equal(a, b)
        for a, b in zip(whole.model.parameters(), resumed.model.parameters(), strict=True)
    )


@pytest.mark.parametrize("lost", ["model", "exp_avg", "exp_avg_sq", "num_steps", "num_updates"])
def test_every_part_of_the_state_matters(lost):
    """The resume test can fail: without any one part the next step gives other weights."""
    channel = MemoryRolloutChannel()
    batches = [make_batch(tiny_model(), step=s, seed=s) for s in range(3)]

    def next_weights(trainer):
        channel.send(batches[2])
        trainer.step(trainer.receive())
        return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])

    whole = make_trainer(tiny_model(), channel)
    for batch in batches[:2]:
        channel.send(batch)
        whole.step(whole.receive())
    tensors, state = copy.deepcopy(whole.state())
    want = next_weights(whole)
    for broken in (False, True):
        if broken and lost == "model":
            tensors["model"] = copy.deepcopy(tiny_model(seed=0).trainable_parameters())
        elif broken and lost.startswith("num"):
            state["optimizer"][lost] = 1
        elif broken:
            tensors["optimizer"] = {
                n: t * 0 if n.endswith(f".{lost}") else t for n, t in tensors["optimizer"].items()
            }
        resumed = make_trainer(tiny_model(seed=7), channel)
        resumed.restore(tensors, state)
        assert torch.equal(next_weights(resumed), want) != broken


def test_restore_refuses_the_state_of_another_model():
    channel = MemoryRolloutChannel()
    trainer, other = (
        make_trainer(tiny_model(), channel),
        make_trainer(tiny_model(hidden_size=16), channel),
    )
    tensors, state = other.state()
    before = copy.deepcopy(trainer.model.state_dict())
    with pytest.raises(ValueError, match=r"model state: .* expected"):
        trainer.restore(tensors, state)
    lost = dict(list(tensors["model"].items())[1:])
    with pytest.raises(ValueError, match="missing"):
        trainer.restore(tensors | {"model": lost}, state)
    assert all(torch.equal(v, before[k]) for k, v in trainer.model.state_dict().items())


def test_the_trainer_publishes_growing_versions_and_refuses_replays():
    channel, published = MemoryRolloutChannel(capacity=8), []
    trainer = make_trainer(tiny_model(), channel, published)
    with pytest.raises(DeadlineExceeded, match="batch of rollouts"):
        trainer.step(trainer.receive())
    for step in (1, 2, 2):
        channel.send(make_batch(trainer.model, step=step))
    trainer.step(trainer.receive())
    trainer.step(trainer.receive())
    with pytest.raises(ValueError, match="batch of step 2: step 2 was already learned"):
        trainer.step(trainer.receive())
    assert published == [1, 2] and trainer.version == 2


def test_learning_raises_the_probability_of_rewarded_responses():
    model = tiny_model()
    batch = make_batch(model, noise=0.0)
    optimizer = Optimizer(
        model.trainable_parameters(), OptimSettings(learning_rate=3e-3, weight_decay=0.0)
    )
    good, bad = ([s for s in batch.samples if s.advantage * sign > 0] for sign in (1, -1))

    def gap():
        return sum(float(dense_log_probs(model, s).detach().mean()) for s in good) - sum(
            float(dense_log_probs(model, s).detach().mean()) for s in bad
        )

    before = gap()
    for _ in range(5):
        learn(model, batch, optimizer, settings(correction="none"))
    assert gap() > before + 1.0
