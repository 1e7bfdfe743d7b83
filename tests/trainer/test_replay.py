"""The learner on what a bounded cache held, against log-probs under a mask that is written out;
with all that a learner can be combined with."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

from lowroll.model import lora
from lowroll.model.evicted_attention import unpack_evictions
from lowroll.objectives.objective import select
from lowroll.trainer import recompute
from lowroll.trainer.critic import Critic
from lowroll.trainer.mismatch_probe import probe
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, PackedForward, learn
from lowroll.types import Batch, Evictions, Sample
from lowroll.weights.aligned_forward import align, refresh
from tests.fixtures.evictions import random_evictions, sees
from tests.fixtures.learner import TEMPERATURE, Probe, assert_close, make_batch, tiny_model
from tests.fixtures.policies import masked_attention


def settings(**more):
    return LearnSettings(
        select("grpo", "none"),
        **{"tokens_per_microbatch": 40, "logprob_chunk": 5, "replay_kv": True} | more,
    )


def bounded(batch: Batch) -> Batch:
    """The batch with evictions at random, recorded under a budget of 3 and a buffer of 2."""
    for i, sample in enumerate(batch.samples):
        fed = len(sample.prompt_ids) + len(sample.rollout.token_ids) - 1
        sample.rollout.evictions = random_evictions(
            fed, len(sample.prompt_ids), budget=3, buffer=2, seed=i
        )
        sample.rollout.behavior = dataclasses.replace(
            sample.rollout.behavior, kv_policy="recent", kv_budget=3
        )
    assert sum(len(s.rollout.evictions.after) for s in batch.samples) > 8
    return batch


def masked_log_probs(model, sample: Sample, temperature: float = TEMPERATURE):
    """log pi of every response token, one sequence alone, under its mask."""
    ids = torch.tensor(sample.prompt_ids + sample.rollout.token_ids)
    evictions = sample.rollout.evictions

    def attend(layer, inputs):
        q_THd, k_TGd, v_TGd, _ = inputs
        seen = sees(evictions, len(q_THd), layer, k_TGd.shape[1])
        return masked_attention(q_THd, k_TGd, v_TGd, seen)

    hidden = model(ids[:-1], torch.arange(len(ids) - 1), attend)
    logp = torch.log_softmax(hidden @ model.lm_head_weight.t() / temperature, -1)
    start, targets = len(sample.prompt_ids), torch.tensor(sample.rollout.token_ids)
    return logp[start - 1 :].gather(1, targets[:, None])[:, 0]


def wanted(model, batch, kl_coef=0.0, reference=None):
    """The gradient of -J of the plain policy gradient, whose ratio is 1; the reference is dense."""
    J = 0.0
    for s in batch.samples:
        lpn, mask = masked_log_probs(model, s), torch.tensor(s.loss_mask).bool()
        token = (lpn - lpn.detach()).exp() * s.advantage
        if reference is not None:
            bare = dataclasses.replace(s, rollout=dataclasses.replace(s.rollout, evictions=None))
            d = lpn - masked_log_probs(reference, bare).detach()
            token = token - kl_coef * ((-d).exp() + d - 1)
        J = J + token[mask].mean() / len(batch.samples)
    params = model.trainable_parameters()
    grads = torch.autograd.grad(J, list(params.values()), allow_unused=True)
    return {
        name: torch.zeros_like(p) if g is None else -g
        for (name, p), g in zip(params.items(), grads, strict=True)
    }


def gradient(model, batch, learn_settings=None, reference=None, **more):
    optimizer = Probe(model.trainable_parameters(), OptimSettings(learning_rate=1e-2))
    metrics = learn(model, batch, optimizer, learn_settings or settings(), reference, **more)
    return optimizer.seen[0], metrics


def test_log_probs_are_those_under_the_mask():
    model = tiny_model()
    batch = bounded(make_batch(model))
    for capacity in (1, 24, 10_000):
        forward = PackedForward(model, batch.samples, capacity, 3, TEMPERATURE, replay_kv=True)
        trace = forward.run([range(8)])
        dense = dataclasses.replace(forward, replay_kv=False).run([range(8)])
        gaps = []
        for i, s in enumerate(batch.samples):
            want = masked_log_probs(model, s)
            torch.testing.assert_close(trace.log_probs[i], want, rtol=0, atol=2e-5)
            gaps.append(float((dense.log_probs[i] - want.detach()).abs().max()))
        assert max(gaps) > 0.05


@pytest.mark.parametrize("kl_coef", [0.0, 0.5])
def test_the_gradient_is_that_under_the_mask_and_the_reference_stays_dense(kl_coef):
    model = tiny_model()
    reference = tiny_model(3) if kl_coef else None
    batch = bounded(make_batch(model))
    want = wanted(model, batch, kl_coef, reference)
    first, metrics = gradient(model, batch, settings(kl_coef=kl_coef), reference)
    assert_close(first, want, atol=5e-6)
    assert metrics["policy/ratio_max"] == 1.0
    # what the learner pays is measured: the rollouts' log-probs are noise around the dense ones
    assert metrics["mismatch/kl_k3"] > 0


def test_recorded_log_probs_leave_no_mismatch():
    model = tiny_model()
    batch = bounded(make_batch(model))
    for s in batch.samples:
        s.rollout.logprobs = masked_log_probs(model, s).tolist()
    replayed = probe(model, batch, settings()).spread
    dense = probe(model, batch, settings(replay_kv=False)).spread
    assert replayed["spread/token_std"] < 1e-5 < 1e-2 < dense["spread/token_std"]
    _, metrics = gradient(model, batch)
    assert metrics["mismatch/kl_k3"] < 1e-9


@pytest.mark.parametrize("extent", [True, 1.0, 0.5])
def test_remaking_changes_no_bit(extent):
    model = tiny_model()
    batch = bounded(make_batch(model))
    want, _ = gradient(copy.deepcopy(model), batch)
    got, _ = gradient(recompute.apply(model, extent), batch)
    for name, x in want.items():
        assert torch.equal(got[name], x), name


def test_off_is_bitwise_the_dense_learner_and_so_is_no_compaction():
    model = tiny_model()
    plain = make_batch(model)
    whole = {"replay_kv": False, "share_prompts": False}
    want, metrics = gradient(copy.deepcopy(model), plain, settings(**whole))
    batch = bounded(make_batch(model))
    never = make_batch(model)
    for s in never.samples:
        s.rollout.evictions = Evictions(2, 2)
    for other, on in ((batch, False), (never, True), (plain, True)):
        got, more = gradient(copy.deepcopy(model), other, settings(**whole | {"replay_kv": on}))
        assert {key: more[key] for key in metrics} == metrics
        assert all(torch.equal(got[name], x) for name, x in want.items())
    got, _ = gradient(model, batch)
    assert any(not torch.equal(got[name], x) for name, x in want.items())


def test_an_adapter_learns_under_the_mask():
    """With the base as the reference of a KL term: dense, and without the adapter."""
    model = lora.attach(tiny_model(), rank=4, alpha=8, targets=["q_proj", "v_proj"], seed=1)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    batch = bounded(make_batch(model))
    want = wanted(model, batch, 0.5, tiny_model())
    first, _ = gradient(model, batch, settings(kl_coef=0.5))
    assert_close(first, want, atol=5e-6)


def test_several_minibatches_have_a_ratio_of_one_until_the_weights_change():
    model = tiny_model()
    batch = bounded(make_batch(model))
    seen = []
    real = Optimizer.update

    class Still(Optimizer):
        def update(self, refuse=False):
            seen.append(real(self, refuse=True))
            return seen[-1]

    optimizer = Still(model.trainable_parameters(), OptimSettings(learning_rate=1e-2))
    metrics = learn(model, batch, optimizer, settings(minibatches=2))
    assert len(seen) == 2 and metrics["policy/ratio_max"] == 1.0


def test_an_aligned_learner_replays_too():
    model = align(tiny_model(), "int8")
    refresh(model)
    batch = bounded(make_batch(model))
    trace = PackedForward(model, batch.samples, 40, 5, TEMPERATURE, replay_kv=True).run([range(8)])
    for i, s in enumerate(batch.samples):
        with torch.no_grad():
            want = masked_log_probs(model, s)
        torch.testing.assert_close(trace.log_probs[i], want, rtol=0, atol=2e-2)  # codes flip
    gradient(model, batch)


def test_a_critic_stays_dense():
    model = tiny_model()
    values = []
    for batch in (make_batch(model), bounded(make_batch(model))):
        for s in batch.samples:
            s.reward = float(s.advantage)
        critic = Critic(tiny_model(4), OptimSettings(learning_rate=1e-3))
        ppo = LearnSettings(select("ppo", "none"), tokens_per_microbatch=40, replay_kv=True)
        optimizer = Optimizer(model.trainable_parameters(), OptimSettings(learning_rate=0.0))
        metrics = learn(model, batch, optimizer, ppo, critic=critic)
        values.append((metrics["critic/loss"], metrics["critic/grad_norm"]))
    assert values[0] == values[1]


@pytest.mark.parametrize(
    ("evictions", "message"),
    [
        (None, r"sample 3 \(p1\): rollout.evictions: missing, .* bounded \(recent\)"),
        (Evictions(5, 2), r"sample 3 \(p1\): rollout.evictions.layers, heads: 5 and 2"),
        (Evictions(2, 2, (9, 9)), r"rollout.evictions.after: \(9, 9\) do not ascend"),
        (Evictions(2, 2, (4,), b"abc"), r"rollout.evictions.numbers: not compressed"),
    ],
)
def test_a_batch_that_cannot_be_replayed_is_refused_before_any_work(evictions, message):
    model = tiny_model()
    batch = bounded(make_batch(model))
    batch.samples[3].rollout.evictions = evictions
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        gradient(model, batch)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    gradient(model, batch, settings(replay_kv=False))


def test_the_oracle_can_tell_a_mask_that_is_off_by_one():
    model = tiny_model()
    batch = bounded(make_batch(model))
    s = max(batch.samples, key=lambda s: len(s.rollout.evictions.after))
    right = masked_log_probs(model, s).detach()
    first = s.rollout.evictions
    s.rollout.evictions = random_evictions(
        unpack_evictions(first).shape[2] + 1, len(s.prompt_ids), budget=3, buffer=3
    )
    assert float((masked_log_probs(model, s).detach() - right).abs().max()) > 1e-2
