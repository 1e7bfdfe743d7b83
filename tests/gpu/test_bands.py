"""On a CUDA device R is exactly 1 at unchanged weights: kernels with a gradient and without give
the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from lowroll.trainer.critic import Critic, CriticSettings
from lowroll.trainer.optim import OptimSettings
from tests.fixtures.bands import (
    CONFIG,
    EXPERTS,
    LEARNERS,
    assert_one,
    make_batch,
    make_model,
    measure,
    settings_of,
)

pytestmark = pytest.mark.gpu

SIZES = CONFIG | {"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
MANY = EXPERTS | {"num_experts": 8, "moe_intermediate_size": 128}
BATCH: dict[str, int] = {"groups": 6, "size": 4, "longest": 150, "prompt": 40}


@pytest.mark.parametrize("config", [{}, MANY], ids=["dense", "experts"])
@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_in_half_precision(
    monkeypatch: pytest.MonkeyPatch, learner: str, config: dict[str, Any]
) -> None:
    model = LEARNERS[learner](make_model(torch.bfloat16, "cuda", **SIZES | config))
    settings = settings_of("gspo", "tbpo", tokens_per_microbatch=400)
    seen, metrics = measure(monkeypatch, model, make_batch(**BATCH), settings)
    assert len(seen) > 2 * settings.minibatches
    assert_one(seen, metrics, settings)


@pytest.mark.parametrize("config", [{}, MANY], ids=["dense", "experts"])
@pytest.mark.parametrize("learner", ["full", "lora", "checkpointed", "noise"])
def test_learners_in_float32(
    monkeypatch: pytest.MonkeyPatch, learner: str, config: dict[str, Any]
) -> None:
    model = LEARNERS[learner](make_model(torch.float32, "cuda", **SIZES | config))
    settings = settings_of("gspo", "tbpo", tokens_per_microbatch=400)
    assert_one(*measure(monkeypatch, model, make_batch(**BATCH), settings), settings)


@pytest.mark.parametrize("learner", ["full", "lora", "aligned lora on int8"])
@pytest.mark.parametrize(("minibatches", "capacity"), [(1, 400), (2, 1), (3, 100_000), (6, 700)])
def test_budgets_and_minibatches(
    monkeypatch: pytest.MonkeyPatch, learner: str, minibatches: int, capacity: int
) -> None:
    """With one minibatch the weights are normalised, so that there is a proximal pass too."""
    model = LEARNERS[learner](make_model(torch.bfloat16, "cuda", **SIZES))
    more = {"minibatches": minibatches, "tokens_per_microbatch": capacity, "logprob_chunk": 300}
    settings = (
        settings_of("dapo", "reweight", **more, options={"normalize": True})
        if minibatches == 1
        else settings_of("gspo", "tbpo", **more)
    )
    assert_one(*measure(monkeypatch, model, make_batch(**BATCH), settings), settings)


@pytest.mark.parametrize("learner", ["full", "lora", "checkpointed"])
def test_long_sequences(monkeypatch: pytest.MonkeyPatch, learner: str) -> None:
    """Stacks of equal lengths, which have an attention kernel of their own."""
    model, batch = (
        LEARNERS[learner](make_model(torch.bfloat16, "cuda", **SIZES)),
        make_batch(groups=4, size=2),
    )
    for sample in batch.samples:
        sample.prompt_ids = (sample.prompt_ids * 300)[:100]
        sample.rollout.token_ids = (sample.rollout.token_ids * 1100)[
            : 1000 + 100 * (sample.group % 2)
        ]
        sample.rollout.logprobs, sample.loss_mask = (
            [x] * len(sample.rollout.token_ids) for x in (-4.0, 1)
        )
    settings = settings_of("gspo", "tbpo", minibatches=2, tokens_per_microbatch=4000)
    assert_one(*measure(monkeypatch, model, batch, settings), settings)


@pytest.mark.parametrize("warmup_steps", [0, 1])
def test_a_critic(monkeypatch: pytest.MonkeyPatch, warmup_steps: int) -> None:
    critic = Critic(
        make_model(torch.bfloat16, "cuda", **SIZES),
        OptimSettings(0.0),
        CriticSettings(warmup_steps=warmup_steps, value_clip=1e-6, tokens_per_microbatch=500),
    )
    with torch.no_grad():
        critic.weight_D.normal_(0, 0.1, generator=torch.Generator("cuda").manual_seed(0))
    settings = settings_of("ppo", "tbpo", tokens_per_microbatch=400)
    seen, metrics = measure(
        monkeypatch,
        make_model(torch.bfloat16, "cuda", **SIZES),
        make_batch(**BATCH),
        settings,
        critic=critic,
    )
    assert_one(seen, metrics, settings)
    assert metrics["critic/clip_fraction"] == 0
