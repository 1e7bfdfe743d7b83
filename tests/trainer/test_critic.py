"""PPO with a critic: the rows of algorithms A5 through the learner's own path, a textbook step
through materialised logits as oracle, the limit in which it is REINFORCE, and the promises: bitwise
resume, refusals, a critic that learns.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from lowroll.model import hf
from lowroll.objectives.objective import select
from lowroll.objectives.table import CORRECTIONS
from lowroll.trainer import recompute
from lowroll.trainer.critic import Critic, CriticOutput, CriticSettings, explained_variance
from lowroll.trainer.loop import Trainer
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, TrainingDiverged, learn
from lowroll.transport.memory import MemoryRolloutChannel
from lowroll.types import Batch, BehaviorTag, PolicySpan, Prompt, Rollout, RunFailed, Sample, Score
from tests.fixtures.gae import NAMES, ROWS, VALUES
from tests.fixtures.learner import (
    TEMPERATURE,
    VOCAB,
    Probe,
    assert_close,
    dense_attention,
    dense_log_probs,
    frozen_log_probs,
    make_batch,
    tiny_model,
)
from tests.fixtures.runs import copy_stopped_after, fingerprint, settings, train

PLAIN = OptimSettings(1e-2, weight_decay=0.0, eps=1e-3, max_grad_norm=None)


def make_critic(
    seed: int = 5, head: float = 0.3, optim: OptimSettings = PLAIN, **options: Any
) -> Critic:
    critic = Critic(
        tiny_model(seed), optim, CriticSettings(**{"tokens_per_microbatch": 24} | options)
    )
    with torch.no_grad():
        critic.weight_D.copy_(
            head * torch.randn(len(critic.weight_D), generator=torch.Generator().manual_seed(seed))
        )
        critic.bias.fill_(head)
    return critic


def ppo_batch(policy: Any, num: int = 8, step: int = 1, seed: int = 0) -> Batch:
    """`num` prompts with one response each; the advantage is the reward, as the orchestrator leaves
    it."""
    batch = make_batch(policy, groups=num, size=1, step=step, seed=seed)
    for i, s in enumerate(batch.samples):
        s.reward = s.advantage = float(i % 3 == 0)
        s.score = Score(s.reward)
    return batch


def one_sample(mask: list[int], reward: float = 1.0) -> Sample:
    rollout = Rollout(
        [7, 9, 11, 13], [-1.0] * 4, "stop", BehaviorTag((PolicySpan(0, "d"),), "int8")
    )
    return Sample(Prompt("p", "e", []), [3, 4], rollout, "", Score(reward), reward, mask, 0, reward)


def dense_values(critic: Critic, sample: Sample) -> torch.Tensor:
    """V of the state before every response token, one sequence alone."""
    ids = torch.tensor(sample.prompt_ids + sample.rollout.token_ids)
    hidden = critic.body(ids, torch.arange(len(ids)), dense_attention)
    return hidden[len(sample.prompt_ids) - 1 : -1] @ critic.weight_D + critic.bias


def say(critic: Critic, sample: Sample, values: list[float]) -> None:
    """Choose a head under which the critic says exactly these values of the sample."""
    with torch.no_grad():
        critic.weight_D.zero_()
        critic.bias.zero_()
        ids = torch.tensor(sample.prompt_ids + sample.rollout.token_ids)
        hidden = critic.body(ids, torch.arange(len(ids)), dense_attention)[
            len(sample.prompt_ids) - 1 : -1
        ]
        critic.weight_D.copy_(
            torch.linalg.lstsq(
                hidden.double(), torch.tensor(values).double()[:, None], driver="gelsd"
            ).solution[:, 0]
        )


def learn_ppo(policy: Any, batch: Batch, critic: Critic) -> dict[str, float]:
    """One step of PPO, of one update without a correction."""
    optimizer = Optimizer(policy.trainable_parameters(), PLAIN)
    return learn(policy, batch, optimizer, LearnSettings(select("ppo")), critic=critic)


# The rows of A5


@pytest.mark.parametrize(NAMES, ROWS)
def test_the_rows_of_the_table_through_the_critic(gamma, lam, advantages, returns, whitened):
    sample, got = one_sample([1] * 4), {}
    for whiten in (False, True):
        critic = make_critic(gamma=gamma, lam=lam, whiten=whiten)
        say(critic, sample, VALUES)
        judged = critic.judge([sample], [[0]])
        assert judged.values[0].tolist() == pytest.approx(VALUES, abs=1e-5)
        assert judged.returns[0].tolist() == pytest.approx(returns, abs=2e-5)
        got[whiten] = judged.advantages[0].tolist()
    assert got[False] == pytest.approx(advantages, abs=2e-5) and got[True] == pytest.approx(
        whitened, abs=2e-4
    )


def test_a_masked_token_is_carried_over_and_the_reward_is_on_the_last_heard_one():
    critic, sample = make_critic(lam=0.95, whiten=False), one_sample([1, 1, 0, 1])
    say(critic, sample, [0.1, 0.2, 0.3, 0.4])
    judged = critic.judge([sample], [[0]])
    assert judged.advantages[0].tolist() == pytest.approx([0.8315, 0.77, 0, 0.6], abs=2e-5)
    assert judged.returns[0].tolist() == pytest.approx([0.9315, 0.97, 0, 1], abs=2e-5)
    sample.loss_mask = [1, 1, 1, 0]
    assert critic.judge([sample], [[0]]).returns[0].tolist()[2:] == pytest.approx([1, 0], abs=2e-5)


def test_the_value_loss_of_the_table_through_an_update():
    critic, sample = make_critic(), one_sample([1] * 4)
    say(critic, sample, [0.5, 1.2, -0.3, 0.4])
    record = critic.update(
        [sample],
        [0],
        CriticOutput({0: torch.tensor([0.1, 0.2, 0.3, 0.4])}, {}, {0: torch.ones(4)}, {}),
    )
    assert (record["critic/loss"], record["critic/clip_fraction"]) == pytest.approx(
        (0.29875, 0.25), abs=1e-5
    )
    assert (
        record["critic/value_mean"] == pytest.approx(0.45, abs=1e-5)
        and record["critic/return_mean"] == 1
    )


def test_whitening_is_over_the_tokens_of_the_whole_batch():
    critic, batch = make_critic(), ppo_batch(tiny_model())
    batch.samples[3].loss_mask = [0] * len(batch.samples[3].loss_mask)
    active = [i for i in range(8) if i != 3]
    whitened = critic.judge(batch.samples, [active]).advantages
    plain = make_critic(whiten=False).judge(batch.samples, [active]).advantages
    mask = torch.cat([torch.tensor(batch.samples[i].loss_mask) for i in active]).bool()
    raw, white = (torch.cat([rows[i] for i in active])[mask].double() for rows in (plain, whitened))
    assert torch.allclose(white, (raw - raw.mean()) / raw.std(), atol=1e-5)
    assert 3 not in whitened and len({len(s.rollout.token_ids) for s in batch.samples}) > 1


def test_explained_variance_by_hand():
    name = "critic/explained_variance"
    assert explained_variance([[1, 2], [3]], [[1, 2], [3]], [[1, 1], [1]]) == {name: 1.0}
    assert explained_variance([[5, 5], [5]], [[1, 2], [3]], [[1, 1], [1]]) == {
        name: pytest.approx(0)
    }
    # G 1, 2, 3 (variance 2/3), G - V 1, 1, 3 (variance 8/9), the masked 99 is not looked at
    assert explained_variance([[0, 99, 1], [0]], [[1, 99, 2], [3]], [[1, 0, 1], [1]])[
        name
    ] == pytest.approx(-1 / 3)
    assert (
        explained_variance([[0.1, 0.7]], [[1.0, 1 + 1e-9]], [[1, 1]])
        == {}
        == explained_variance([], [], [])
    )


@pytest.mark.parametrize(
    ("correction", "J", "g"),
    [
        ("decoupled", [1.32, 1.44, 6, 6, -1.08, -8, -4, 0.55], [1.32, 0, 0, 0, -1.08, -8, 0, 0.55]),
        (
            "tis",
            [1.32, 1.44, 2.4, 2.4, -1.08, -3.2, -1.6, 0.55],
            [1.32, 0, 0, 0, -1.08, -3.2, 0, 0.55],
        ),
        (
            "acr",
            [1.32, 1.44, 3.2, 6, -1.08, -3.2, -1.6, 0.55],
            [1.32, 0, 3.2, 0, -1.08, -3.2, 0, 0.55],
        ),
    ],
)
def test_the_corrections_multiply_the_advantage_of_each_token(correction, J, g):
    """The eight rows of A7, C = 2, as the tokens of one response: their advantages differ in sign,
    their mean is J."""
    behavior, proximal, current, A = (
        torch.tensor(column).double()
        for column in zip(
            (0.5, 0.6, 0.66, 1),
            (0.5, 0.6, 0.78, 1),
            (0.01, 0.05, 0.08, 1),
            (0.01, 0.05, 0.16, 1),
            (0.5, 0.6, 0.54, -1),
            (0.01, 0.05, 0.08, -1),
            (0.01, 0.05, 0.03, -1),
            (0.6, 0.3, 0.33, 1),
            strict=True,
        )
    )
    learner = current.log().requires_grad_()
    got, _ = select("ppo", correction)(
        learner=learner,
        proximal=proximal.log(),
        behavior=behavior.log(),
        advantages=A,
        mask=torch.ones(8),
        segments=torch.zeros(8, dtype=torch.int64),
    )
    got.backward()
    assert got.item() == pytest.approx(sum(J) / 8) and (learner.grad * 8).tolist() == pytest.approx(
        g
    )


# One step by hand


def gae_by_sums(reward, values, mask, gamma, lam):
    """A_t = sum_k (gamma lam)^k delta_{t+k} over the active tokens; zeros elsewhere."""
    steps = [t for t, m in enumerate(mask) if m]
    A = torch.zeros(len(mask), dtype=torch.float64)
    v = [float(values[t]) for t in steps] + [0.0]
    delta = [
        (reward if i + 1 == len(steps) else 0.0) + gamma * v[i + 1] - v[i]
        for i in range(len(steps))
    ]
    for i, t in enumerate(steps):
        A[t] = math.fsum((gamma * lam) ** k * d for k, d in enumerate(delta[i:]))
    return A


def textbook(policy, critic, batch, *, parts, gamma, lam, cap=2.0, eps=0.2, clip=0.5):
    """PPO with ACR in plain PyTorch, sequence by sequence; returns the first gradients and the
    losses of the parts."""
    samples = batch.samples
    masks = [torch.tensor(s.loss_mask).bool() for s in samples]
    with torch.no_grad():
        old = [dense_values(critic, s) for s in samples]
    A = [
        gae_by_sums(s.reward, v, s.loss_mask, gamma, lam) for s, v in zip(samples, old, strict=True)
    ]
    G = [a + v for a, v in zip(A, old, strict=True)]
    active = torch.cat([a[m] for a, m in zip(A, masks, strict=True)])
    A = [(a - active.mean()) / (active.var() + 1e-8).sqrt() for a in A]
    proximal = frozen_log_probs(policy, samples)
    actor_params, critic_params = (
        list(policy.trainable_parameters().values()),
        list(critic.params.values()),
    )
    adam = [
        torch.optim.AdamW(p, lr=1e-2, weight_decay=0.0, eps=1e-3)
        for p in (actor_params, critic_params)
    ]
    seen, losses = [], []
    for part in parts:
        num = sum(int(masks[i].sum()) for i in part)
        J = loss = 0.0
        for i in part:
            lpn, m = dense_log_probs(policy, samples[i]), masks[i]
            w, ratio = (
                (proximal[i] - torch.tensor(samples[i].rollout.logprobs)).exp(),
                (lpn - proximal[i]).exp(),
            )
            high = (1 + eps) * (w / cap).clamp(min=1)
            token = w.clamp(max=cap) * torch.minimum(
                ratio * A[i], torch.minimum(ratio.clamp(min=1 - eps), high) * A[i]
            )
            J = J + token[m].sum() / num
            v = dense_values(critic, samples[i])
            bounded = old[i] + (v - old[i]).clamp(-clip, clip)
            loss = loss + 0.5 * torch.maximum((v - G[i]) ** 2, (bounded - G[i]) ** 2)[m].sum() / num
        for a in adam:
            a.zero_grad()
        (-J).backward()
        loss.backward()
        seen.append([[p.grad.clone() for p in params] for params in (actor_params, critic_params)])
        losses.append((J.item(), loss.item()))
        for a in adam:
            a.step()
    return seen, losses


def test_a_step_follows_the_textbook():
    policy, critic = tiny_model(), make_critic(gamma=0.99, lam=0.9, value_clip=0.05)
    batch, twins = ppo_batch(policy), copy.deepcopy((policy, critic))
    optimizer = Probe(policy.trainable_parameters(), PLAIN)
    critic.optimizer = Probe(critic.params, PLAIN)
    metrics = learn(
        policy,
        batch,
        optimizer,
        LearnSettings(select("ppo", "acr"), minibatches=2, tokens_per_microbatch=24),
        critic=critic,
    )
    seen, losses = textbook(
        *twins, batch, parts=(range(4), range(4, 8)), gamma=0.99, lam=0.9, clip=0.05
    )
    for k, probe in enumerate((optimizer, critic.optimizer)):
        for update in (0, 1):
            for (name, got), want in zip(probe.seen[update].items(), seen[update][k], strict=True):
                gap = float((got - want).abs().max())
                assert gap < 1e-5 * max(1.0, float(want.abs().max())), (name, update)
    assert_close(policy.trainable_parameters(), twins[0].trainable_parameters(), atol=5e-5)
    assert_close(critic.params, twins[1].params, atol=5e-5)
    assert metrics["policy/objective"] == pytest.approx((losses[0][0] + losses[1][0]) / 2, abs=1e-5)
    assert metrics["critic/loss"] == pytest.approx((losses[0][1] + losses[1][1]) / 2, abs=1e-5)
    assert (
        metrics["policy/ratio_max"] > 1.01 and metrics["critic/clip_fraction"] > 0
    )  # both clips had work to do
    assert (
        metrics["critic/grad_norm"] > 0
        and metrics["critic/skipped"] == metrics["optim/skipped"] == 0
    )


@pytest.mark.parametrize("correction", ["none", "acr"])
def test_a_critic_that_says_zero_is_reinforce_with_the_reward(correction):
    policy = tiny_model()
    batch, twin = ppo_batch(policy), copy.deepcopy(policy)
    chosen = LearnSettings(select("ppo", correction), minibatches=2, tokens_per_microbatch=24)
    critic = Critic(tiny_model(5), PLAIN, CriticSettings(whiten=False))  # its head is made of zeros
    with_critic = learn(
        policy, batch, Optimizer(policy.trainable_parameters(), PLAIN), chosen, critic=critic
    )
    without = learn(twin, batch, Optimizer(twin.trainable_parameters(), PLAIN), chosen)
    assert all(
        torch.equal(p, q) for p, q in zip(policy.parameters(), twin.parameters(), strict=True)
    )
    assert {k: v for k, v in with_critic.items() if not k.startswith("critic/")} == without
    assert critic.weight_D.any() and with_critic["critic/explained_variance"] == pytest.approx(0)


def test_micro_batches_add_up_and_masked_samples_have_no_say():
    batch, policy = ppo_batch(tiny_model()), tiny_model()
    batch.samples[2].loss_mask, batch.samples[2].reward = (
        [0] * len(batch.samples[2].loss_mask),
        None,
    )
    states = []
    for capacity in (1, 24, 10_000):
        critic = make_critic(tokens_per_microbatch=capacity, value_clip=None)
        learn_ppo(copy.deepcopy(policy), batch, critic)
        states.append(critic.params)
    assert_close(states[0], states[2], atol=1e-5)
    assert_close(states[1], states[2], atol=1e-5)
    without = make_critic(value_clip=None)
    rest = Batch(1, [s for i, s in enumerate(batch.samples) if i != 2], TEMPERATURE)
    learn_ppo(copy.deepcopy(policy), rest, without)
    assert_close(without.params, states[2], atol=1e-5)


@pytest.mark.parametrize("size", [1, 8])
def test_a_critic_that_shares_prompts_learns_as_from_whole_sequences(size: int) -> None:
    policy = tiny_model()
    batch = make_batch(policy, size=size)
    for i, one in enumerate(batch.samples):
        one.reward = float(i % 3 == 0)
    outcomes, widths = [], []
    for share in (None, False):
        critic = make_critic(tokens_per_microbatch=4096, value_clip=None, share_prompts=share)
        read: list[int] = []
        critic.body.register_forward_pre_hook(
            lambda _, inputs, read=read: read.append(len(inputs[0]))
        )
        judged = critic.judge(batch.samples, [range(len(batch.samples))])
        learn_ppo(copy.deepcopy(policy), batch, critic)
        outcomes.append(({**critic.params}, judged))
        widths.append(read[0])
    (shared, judged), (whole, wanted) = outcomes
    repeated = sum(len(one.prompt_ids) for one in batch.samples) * (size - 1) // size
    assert widths[1] - widths[0] == repeated
    assert_close(shared, whole, atol=1e-5)
    for name in ("values", "advantages", "returns"):
        assert_close(getattr(judged, name), getattr(wanted, name), atol=1e-5)


def test_the_body_has_no_lm_head_and_bfloat16_learns_in_float32_masters():
    body = tiny_model(5, tie_word_embeddings=False).to(torch.bfloat16)
    critic = Critic(body, PLAIN)
    assert not any("lm_head" in name for name in critic.params) and body.lm_head is None
    policy = tiny_model()
    batch = ppo_batch(policy)
    for step in (1, 2):
        batch.step = step
        learn_ppo(policy, batch, critic)
    assert critic.weight_D.dtype == torch.float32 and critic.weight_D.any()
    for name, p in critic.params.items():
        if name.startswith("body."):
            assert p.dtype == torch.bfloat16 and torch.equal(
                p, critic.optimizer.masters[name].bfloat16()
            )
    again = Critic(tiny_model(6, tie_word_embeddings=False).to(torch.bfloat16), PLAIN)
    again.restore(*copy.deepcopy(critic.state()))
    assert all(torch.equal(again.params[name], p) for name, p in critic.params.items())
    assert again.optimizer.state()[1] == critic.optimizer.state()[1]


# Warm-up, refusals, state


def test_in_the_warm_up_only_the_critic_learns():
    policy, critic = tiny_model(), make_critic(warmup_steps=2)
    optimizer = Optimizer(
        policy.trainable_parameters(), OptimSettings(1e-2, "linear", total_steps=2)
    )
    before, rates = copy.deepcopy(policy.state_dict()), []
    for step in range(1, 5):
        held = {name: p.detach().clone() for name, p in critic.params.items()}
        metrics = learn(
            policy,
            ppo_batch(policy, step=step),
            optimizer,
            LearnSettings(select("ppo", "acr"), minibatches=2),
            critic=critic,
        )
        still = all(torch.equal(v, before[k]) for k, v in policy.state_dict().items())
        assert still == (step <= 2) and optimizer.num_steps == max(0, step - 2)
        assert any(not torch.equal(p, held[name]) for name, p in critic.params.items())
        assert (metrics["optim/update_norm"] == 0) == still and math.isfinite(
            metrics["policy/objective"]
        )
        assert metrics["mismatch/kl_k3"] > 0
        rates.append(metrics["optim/lr"])
    assert rates == [0.0, 0.0, 1e-2, 0.5e-2]  # the schedule begins when the policy does


@pytest.mark.parametrize(
    ("spoil", "error", "message"),
    [
        (
            lambda c, b: setattr(b.samples[0], "reward", None),
            ValueError,
            r"sample 0 \(p0\): reward",
        ),
        (lambda c, b: setattr(b.samples[0], "reward", math.nan), ValueError, "rewards"),
        (
            lambda c, b: c.bias.data.fill_(math.inf),
            RunFailed,
            r"critic: a value of sample 0 \(p0\) is not finite",
        ),
        (
            lambda c, b: setattr(c.body, "spec", tiny_model(vocab_size=VOCAB // 2).spec),
            ValueError,
            "leaves 0..31",
        ),
    ],
)
def test_a_batch_that_cannot_be_judged_changes_nothing(spoil, error, message):
    policy, critic = tiny_model(), make_critic()
    batch = ppo_batch(policy)
    spoil(critic, batch)
    optimizer = Optimizer(policy.trainable_parameters(), PLAIN)
    before = copy.deepcopy(
        ([p.data for p in policy.parameters()], [p.data for p in critic.params.values()])
    )
    with pytest.raises(error, match=message):
        learn(policy, batch, optimizer, LearnSettings(select("ppo")), critic=critic)
    after = [p.data for p in policy.parameters()], [p.data for p in critic.params.values()]
    assert all(
        torch.equal(a, b)
        for pair in zip(after, before, strict=True)
        for a, b in zip(*pair, strict=True)
    )
    assert optimizer.num_steps == critic.optimizer.num_steps == 0


def test_a_critic_that_diverges_is_refused_and_named():
    policy, critic = tiny_model(), make_critic()
    critic.weight_D.register_hook(lambda g: g * math.nan)
    before = {name: p.detach().clone() for name, p in critic.params.items()}
    optimizer = Optimizer(policy.trainable_parameters(), PLAIN)
    chosen = LearnSettings(select("ppo", "acr"), minibatches=2)
    assert learn(policy, ppo_batch(policy), optimizer, chosen, critic=critic)["critic/skipped"] == 2
    assert all(torch.equal(p, before[name]) for name, p in critic.params.items())
    with pytest.raises(TrainingDiverged, match="step 2: the critic's loss .*3 updates in a row"):
        learn(policy, ppo_batch(policy, step=2), optimizer, chosen, critic=critic)


def trainer_of(seed: int, with_critic: bool = True) -> Trainer:
    policy = tiny_model(seed)
    return Trainer(
        policy,
        Optimizer(policy.trainable_parameters(), PLAIN),
        LearnSettings(select("ppo", "acr"), minibatches=2),
        MemoryRolloutChannel(),
        lambda version: None,
        critic=make_critic(seed + 1, warmup_steps=1) if with_critic else None,
    )


def test_the_trainers_state_holds_the_critic_bitwise():
    batches = [ppo_batch(tiny_model(), step=step, seed=step) for step in range(1, 5)]
    whole, resumed = trainer_of(0), trainer_of(7)
    for k, batch in enumerate(batches):
        whole.channel.send(batch)
        if k == 2:
            resumed.restore(*copy.deepcopy(whole.state()))
        a = whole.step(whole.receive())
        if k >= 2:
            resumed.channel.send(batch)
            b = resumed.step(resumed.receive())
            assert {n: v for n, v in a.items() if not n.startswith(("time", "perf"))} == {
                n: v for n, v in b.items() if not n.startswith(("time", "perf"))
            }
    (tensors, state), (again, more) = whole.state(), resumed.state()
    assert (
        state == more
        and state["critic"]["num_updates"] == 8
        and state["optimizer"]["num_updates"] == 6
    )
    assert set(tensors) == {"model", "optimizer", "critic", "critic_optimizer"}
    assert all(
        torch.equal(t, again[file][name])
        for file, rows in tensors.items()
        for name, t in rows.items()
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t, s: s.pop("critic"), "trainer state: critic is missing"),
        (lambda t, s: t.pop("critic"), r"critic state: body\.\S+ is missing"),
        (lambda t, s: t["critic"].update(odd=torch.ones(1)), "critic state: odd is unknown"),
        (
            lambda t, s: t["critic"].update({"head.weight": torch.ones(3)}),
            r"critic state: head\.weight is torch\.float32",
        ),
    ],
)
def test_a_state_that_does_not_fit_is_refused(spoil, message):
    whole, other = trainer_of(0), trainer_of(7)
    whole.channel.send(ppo_batch(whole.model))
    whole.step(whole.receive())
    tensors, state = copy.deepcopy(whole.state())
    spoil(tensors, state)
    before = copy.deepcopy(other.state())
    with pytest.raises(ValueError, match=message):
        other.restore(tensors, state)
    after = other.state()
    assert after[1] == before[1] and all(
        torch.equal(t, before[0][file][name])
        for file, rows in after[0].items()
        for name, t in rows.items()
    )
    if "missing" in message and "body" not in message:
        with pytest.raises(ValueError, match="there, but the run has no critic"):
            trainer_of(0, with_critic=False).restore(*whole.state())


def test_the_batch_of_a_refused_critic_is_kept():
    trainer, kept = trainer_of(0), []
    trainer.save_offending = kept.append
    for step, factor in ((1, 1.0), (2, math.nan)):
        hook = trainer.critic.bias.register_hook(lambda g, factor=factor: g * factor)
        trainer.channel.send(ppo_batch(trainer.model, step=step))
        trainer.step(trainer.receive())
        hook.remove()
    assert [batch.step for batch in kept] == [2]


# It learns


@pytest.mark.slow
def test_the_critic_learns_to_tell_good_states_from_bad():
    """The reward is known from the prompt's last token; on prompts not seen before the values must
    follow it."""
    generator = torch.Generator().manual_seed(0)

    def sample(k: int) -> Sample:
        ids = torch.randint(2, VOCAB, (6,), generator=generator).tolist()
        ids[1] = 2 + ids[1] % 6
        rollout = Rollout(ids[2:], [-4.0] * 4, "stop", BehaviorTag((PolicySpan(0, "d"),), "int8"))
        reward = float(ids[1] % 2)
        return Sample(
            Prompt(f"p{k}", "e", []),
            ids[:2],
            rollout,
            "",
            Score(reward),
            reward,
            [1] * 4,
            k,
            reward,
        )

    policy, critic = (
        tiny_model(),
        Critic(tiny_model(5), OptimSettings(3e-3), CriticSettings(warmup_steps=40, lam=0.95)),
    )
    optimizer, seen = Optimizer(policy.trainable_parameters(), PLAIN), []
    for step in range(1, 41):
        metrics = learn(
            policy,
            Batch(step, [sample(k) for k in range(16)], 1.0),
            optimizer,
            LearnSettings(select("ppo"), minibatches=2),
            critic=critic,
        )
        seen.append(metrics["critic/explained_variance"])
    assert seen[0] == pytest.approx(0) and min(seen[-5:]) > 0.6
    held_out = [sample(k) for k in range(32)]
    values = critic.judge(held_out, [range(32)]).values
    good, bad = (
        torch.cat([values[k] for k, s in enumerate(held_out) if s.reward == r]).mean()
        for r in (1.0, 0.0)
    )
    assert good - bad > 0.6


# Whole runs


EARLY = """
from lowroll.envs import GeneratedEnvironment
from lowroll.types import Score


class Early(GeneratedEnvironment):
    def __init__(self, *, name, seed=0):
        super().__init__(name=name, seed=seed, template="{text}")

    def task(self, rng):
        return rng.choice("abcdef") + rng.choice("abcdef"), {}

    def score(self, prompt, text):
        return Score(sum(c < "n" for c in text) / max(len(text), 1))

    def gold(self, prompt):
        return "a"

    def perturbed(self, prompt):
        return "z"
"""


def ppo_run(model: Path, out: Path, **changes: Any) -> dict[str, Any]:
    """Two minibatches of single rollouts, rewarded by their share of characters before "n"."""
    (out.parent / "early.py").write_text(EARLY)
    tree = settings(
        model,
        out,
        algorithm="ppo",
        rollouts_per_example=1,
        train={"max_steps": 3, "warmup_steps": 1},
        env=[{"id": str(out.parent / "early.py"), "name": "early"}],
    )
    tree["critic"] = {"learning_rate": 1e-2, "warmup_steps": 1}
    for key, value in changes.items():
        tree[key] = {**tree[key], **value} if isinstance(tree.get(key), dict) else value
    return tree


@pytest.mark.slow
def test_three_steps_of_ppo_with_int8_rollouts_resume_bitwise(model, tmp_path):
    tree = ppo_run(model, tmp_path / "whole")
    result = train(tree)
    base, final = hf.load(model), hf.load(result.folder / "final")
    assert not torch.equal(base.embedding, final.embedding)
    for record in result.records:
        assert record["rollout/num_groups"] == record["rollout/num_samples"] == 8
        assert (
            record["critic/loss"] > 0
            and record["critic/grad_norm"] > 0
            and not record["critic/skipped"]
        )
        assert record["mismatch/kl_k3"] > 0 and "correction/acr_extended_fraction" in record
        assert (
            (record["optim/lr"] == 0) == (record["optim/grad_norm"] == 0) == (record["step"] == 1)
        )
    saved = result.folder / "checkpoints" / "step_000003"
    assert {"critic.safetensors", "critic_optimizer.safetensors"} <= {
        p.name for p in saved.iterdir()
    }
    assert "critic of the same model" in (result.folder / "about.json").read_text()
    whole = fingerprint(result.folder)
    assert "critic.safetensors" in whole
    for step in (1, 2):
        copy_stopped_after(result.folder, step, tmp_path / f"cut{step}")
        again = train({**tree, "output_dir": str(tmp_path / f"cut{step}")}, resume=True)
        assert fingerprint(again.folder) == whole
    with pytest.raises(ValueError, match=r"critic\.lam was 1\.0 and is 0\.9"):
        train({**tree, "critic": {**tree["critic"], "lam": 0.9}}, resume=True)


@pytest.mark.slow
def test_a_run_of_ppo_learns(model, tmp_path):
    """INT8 rollouts, ACR, four minibatches: the share of early letters grows, and the critic
    follows it."""
    result = train(
        ppo_run(
            model,
            tmp_path / "run",
            batch_size=32,
            ckpt={"interval": 100},
            critic={"warmup_steps": 3, "learning_rate": 5e-3},
            train={
                "max_steps": 28,
                "warmup_steps": 0,
                "learning_rate": 5e-3,
                "minibatches": 4,
                "lr_scheduler_type": "constant",
            },
        )
    )
    first, last = result.records[:4], result.records[-4:]
    assert all(
        after["reward/mean"] > before["reward/mean"] + 0.25 for before in first for after in last
    )
    assert all(abs(record["critic/value_mean"] - record["reward/mean"]) < 0.1 for record in last)


@pytest.mark.slow
@pytest.mark.parametrize("correction", [name for name in CORRECTIONS if name != "acr"])
def test_ppo_under_every_correction(model, tmp_path, correction):
    result = train(
        ppo_run(model, tmp_path / "run", correction=correction, force=True, train={"max_steps": 2})
    )
    assert [bool(record["optim/skipped"]) for record in result.records] == [False, False]
    assert result.records[1]["optim/update_norm"] > 0


@pytest.mark.slow
def test_ppo_with_an_adapter_an_aligned_forward_and_a_critic_of_its_own(model, tmp_path):
    result = train(
        ppo_run(
            model,
            tmp_path / "run",
            loss={"kl_coef": 0.01},
            critic={"model": str(model)},
            train={
                "max_steps": 2,
                "lora": True,
                "lora_rank": 4,
                "forward": "aligned",
                "activation_checkpointing": True,
            },
        )
    )
    assert (
        result.records[1]["optim/update_norm"] > 0
        and "policy/band_masked_fraction" in result.records[1]
    )
    with pytest.raises(ValueError, match="critic.model: .*adapter folder"):
        train(ppo_run(model, tmp_path / "next", critic={"model": str(result.folder / "final")}))


def test_a_critic_that_cannot_share_prompts_is_refused_where_they_are_to_be(model, tmp_path):
    import json
    import shutil

    from lowroll.config import from_mapping
    from lowroll.runs.assembly import models
    from lowroll.runs.assembly.compute import Compute

    other = shutil.copytree(model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    window = {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 0}
    config = {key: value for key, value in config.items() if key != "layer_types"} | window
    (other / "config.json").write_text(json.dumps(config))
    for share in (None, True):
        tree = ppo_run(
            model, tmp_path / "run", critic={"model": str(other)}, train={"share_prompts": share}
        )
        cfg = from_mapping(tree).resolved()
        if not share:
            critic = models.critic(cfg, Compute.of(cfg), models.tokenizer(model))
            assert not critic.body.can_share_prompts
            continue
        with pytest.raises(ValueError, match=r"train\.share_prompts: .* windows .*; write null"):
            models.critic(cfg, Compute.of(cfg), models.tokenizer(model))


def test_a_critic_with_another_tokenizer_is_refused(model, tmp_path):
    import shutil

    from transformers import AutoTokenizer

    shutil.copytree(model, tmp_path / "other")
    foreign = AutoTokenizer.from_pretrained(tmp_path / "other")
    foreign.add_tokens(["another"])
    foreign.save_pretrained(tmp_path / "other")
    with pytest.raises(
        ValueError, match=r"critic\.model: the vocabulary of .*other is not that of"
    ):
        train(ppo_run(model, tmp_path / "run", critic={"model": str(tmp_path / "other")}))


@pytest.mark.slow
def test_the_report_and_the_live_view_show_the_critic(model, tmp_path):
    from rich.console import Console

    from lowroll.metrics.live import LiveView
    from lowroll.metrics.report import write_report

    result = train(ppo_run(model, tmp_path / "run", train={"max_steps": 2}))
    page = write_report(result.folder).read_text()
    assert "Critic's loss" in page or "Critic&#x27;s loss" in page
    record = {**result.records[-1], "critic/explained_variance": 0.25, "critic/value_mean": 0.125}
    view = LiveView(2, "t", Console(force_terminal=False, width=200))
    view.step(record)
    assert "critic 0.25" in view.line() and "critic" not in LiveView(2, "t").line()
    console = Console(width=160, record=True, force_terminal=False, file=open("/dev/null", "w"))
    console.print(view)
    assert "explained 0.25" in (text := console.export_text()) and "value 0.125" in text


# The configuration


def test_what_has_no_meaning_with_a_critic_is_refused():
    from lowroll.config import ConfigError, from_mapping

    def line(**tree: Any) -> str:
        with pytest.raises(ConfigError) as error:
            from_mapping({"model": "m"} | tree)
        return str(error.value)

    ppo = {"algorithm": "ppo"}
    assert line(**ppo, dapo={"dynamic_sampling": True}) == (
        "config: dapo.dynamic_sampling: ppo learns from groups whose rewards are all equal too; "
        "write false or null"
    )
    assert line(**ppo, advantage="grpo") == (
        "config: advantage: grpo compares the rollouts of a prompt, and ppo's advantages are its "
        "critic's; write null"
    )
    assert line(advantage="gae") == "config: advantage: gae needs a critic; write algorithm: ppo"
    assert line(**ppo, critic={"warmup_steps": 5}, train={"max_steps": 5}) == (
        "config: critic.warmup_steps: critic.warmup_steps (5) leaves none of the 5 steps to the "
        "policy"
    )
    assert "critic.gamma: must be <= 1" in line(**ppo, critic={"gamma": 1.5})
    assert "critic.value_clip: must be > 0" in line(**ppo, critic={"value_clip": 0})
    assert (
        from_mapping({"model": "m"} | ppo | {"critic": {"value_clip": None}}).critic.value_clip
        is None
    )
    single = from_mapping({"model": "m", "rollouts_per_example": 1} | ppo)
    assert not any("rollouts_per_example" in note for note in single.notes)
    assert (
        "critic: no effect, the algorithm is grpo"
        in from_mapping({"model": "m", "critic": {"lam": 0.9}}).notes
    )


def test_the_section_reaches_the_critic(model, tmp_path):
    from lowroll.config import from_mapping
    from lowroll.runs.assembly import models, trainer
    from lowroll.runs.assembly.compute import Compute

    section = {
        "learning_rate": 3e-3,
        "weight_decay": 0.02,
        "max_grad_norm": 0.7,
        "value_clip": 0.4,
        "warmup_steps": 3,
        "gamma": 0.9,
        "lam": 0.8,
        "whiten": False,
    }
    tree = ppo_run(
        model,
        tmp_path / "run",
        critic=section,
        train={
            "max_steps": 10,
            "eps": 1e-6,
            "betas": [0.8, 0.9],
            "tokens_per_microbatch": 99,
            "activation_checkpointing": True,
            "share_prompts": False,
        },
    )
    cfg = from_mapping(tree).resolved()
    critic = models.critic(cfg, Compute.of(cfg), models.tokenizer(model))
    assert critic.settings == CriticSettings(
        gamma=0.9,
        lam=0.8,
        whiten=False,
        value_clip=0.4,
        warmup_steps=3,
        tokens_per_microbatch=99,
        share_prompts=False,
    )
    assert critic.optimizer.settings == OptimSettings(
        3e-3, weight_decay=0.02, max_grad_norm=0.7, betas=(0.8, 0.9), eps=1e-6
    )
    recomputed = recompute.apply(hf.load(model), True)
    assert critic.body.run_block == recomputed.run_block and not critic.weight_D.any()
    assert trainer.optim(cfg).total_steps == 7  # the policy's own steps
    other = from_mapping({**tree, "algorithm": "grpo", "rollouts_per_example": 4}).resolved()
    assert models.critic(other, Compute.of(other), models.tokenizer(model)) is None
    assert trainer.optim(other).total_steps == 10
