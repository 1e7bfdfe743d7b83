"""At unchanged weights R is exactly 1: on every token of every minibatch, under every setting that
the learner has.

The proximal pass and the updates must multiply the same rows in the same arithmetic. A product with
other rows beside it may be rounded otherwise, and in bfloat16 that is enough to close the narrow
bands of GSPO and TBPO. How far a processor's products depend on the number of rows is its own
affair, so here every product does (`fickle`).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch

from lowroll.objectives.table import ALGORITHMS, CORRECTIONS
from lowroll.quant import dense
from lowroll.trainer.critic import Critic, CriticSettings
from lowroll.trainer.optim import OptimSettings
from lowroll.weights.aligned_forward import align
from lowroll.weights.publish import quantize_base
from tests.fixtures.bands import (
    BANDS,
    EXPERTS,
    LEARNERS,
    assert_one,
    be_fickle,
    make_batch,
    make_model,
    measure,
    on_ranks,
    settings_of,
    with_adapter,
)
from tests.fixtures.ranks import together


@pytest.fixture(autouse=True)
def fickle(monkeypatch: pytest.MonkeyPatch) -> None:
    be_fickle(monkeypatch)


# Every correction under one algorithm, every algorithm without one and under that of the narrowest band
PAIRS = [
    *(("grpo", correction) for correction in CORRECTIONS),
    *itertools.product([name for name in ALGORITHMS if name != "grpo"], ["none", "tbpo"]),
]


@pytest.mark.slow
@pytest.mark.parametrize(("algorithm", "correction"), PAIRS)
def test_every_objective_at_unchanged_weights(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, correction: str
) -> None:
    """In bfloat16, whose products round most; objectives see log-probs in float32 in any case."""
    dtype = torch.bfloat16
    model, critic = make_model(dtype), None
    if algorithm == "ppo":
        critic = Critic(make_model(dtype), OptimSettings(0.0), CriticSettings())
    settings = settings_of(algorithm, correction)
    assert_one(*measure(monkeypatch, model, make_batch(), settings, critic=critic), settings)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("config", [{}, EXPERTS], ids=["dense", "experts"])
@pytest.mark.parametrize("learner", LEARNERS)
def test_every_learner_at_unchanged_weights(
    monkeypatch: pytest.MonkeyPatch, learner: str, config: dict[str, Any], dtype: torch.dtype
) -> None:
    model, settings = LEARNERS[learner](make_model(dtype, **config)), settings_of("gspo", "tbpo")
    seen, metrics = measure(monkeypatch, model, make_batch(), settings)
    assert len(seen) > 2 * settings.minibatches
    assert_one(seen, metrics, settings)


@pytest.mark.parametrize("minibatches", [1, 2, 4, 9])
@pytest.mark.parametrize("capacity", [1, 30, 100_000])
def test_every_budget_and_number_of_minibatches(
    monkeypatch: pytest.MonkeyPatch, minibatches: int, capacity: int
) -> None:
    settings = settings_of(
        "gspo", "tbpo", minibatches=minibatches, tokens_per_microbatch=capacity, logprob_chunk=50
    )
    seen, metrics = measure(monkeypatch, make_model(torch.bfloat16), make_batch(), settings)
    assert_one(seen, metrics, settings)


@pytest.mark.parametrize("warmup_steps", [0, 1])
@pytest.mark.parametrize("whiten", [False, True])
def test_a_critic_says_who_moves_before_anything_is_packed(
    monkeypatch: pytest.MonkeyPatch, warmup_steps: int, whiten: bool
) -> None:
    """Without whitening a fresh critic gives rewards of 0 no advantage, whatever the samples
    say."""
    critic = Critic(
        make_model(torch.bfloat16),
        OptimSettings(0.0),
        CriticSettings(warmup_steps=warmup_steps, whiten=whiten, tokens_per_microbatch=30),
    )
    seen, metrics = measure(
        monkeypatch,
        make_model(torch.bfloat16),
        make_batch(),
        settings := settings_of("ppo", "tbpo"),
        critic=critic,
    )
    assert_one(seen, metrics, settings)
    assert len(seen) == settings.minibatches or not warmup_steps


def test_a_critics_values_are_those_of_its_updates() -> None:
    """A band narrower than the rounding of bfloat16 clips nothing at unchanged weights."""
    batch, parts = make_batch(), [list(range(0, 4)), list(range(4, 8)), list(range(8, 12))]
    critic = Critic(make_model(torch.bfloat16), OptimSettings(0.0), CriticSettings(value_clip=1e-6))
    with torch.no_grad():
        critic.weight_D.copy_(
            0.1 * torch.randn(len(critic.weight_D), generator=torch.Generator().manual_seed(0))
        )
    active = [[i for i in part if any(batch.samples[i].loss_mask)] for part in parts]
    judged = critic.judge(batch.samples, active)
    for part in parts:
        assert critic.update(batch.samples, part, judged)["critic/clip_fraction"] == 0


@pytest.mark.parametrize(
    ("algorithm", "correction", "changes"),
    [
        ("gspo", "tbpo", {"kl_coef": 0.1}),
        ("dapo", "reweight", {"options": {"normalize": True}, "minibatches": 1}),
        ("dapo", "aipo", {"options": {"kl_tau": 0.1}}),
        ("dapo", "aipo", {"options": {"teacher_tau": 0.1}}),
    ],
)
@pytest.mark.parametrize("adapted", [False, True])
def test_terms_beside_the_objective(
    monkeypatch: pytest.MonkeyPatch,
    algorithm: str,
    correction: str,
    changes: dict[str, Any],
    adapted: bool,
) -> None:
    model, settings = make_model(torch.bfloat16), settings_of(algorithm, correction, **changes)
    other = copy.deepcopy(model).requires_grad_(False)
    seen, metrics = measure(
        monkeypatch,
        with_adapter(model) if adapted else model,
        make_batch(),
        settings,
        reference=None if adapted else other,
        teacher=other,
    )
    assert_one(seen, metrics, settings)
    if settings.kl_coef and not adapted:  # the reference is the learner itself, packed as it is
        assert metrics["policy/kl_reference"] == 0


def test_dense_codes_are_multiplied_alike_with_a_gradient_and_without(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Large matrices of a dense format have a packed copy on the CPU, which adds up in another
    order."""
    monkeypatch.setattr(dense, "PACK_FROM", 1)
    for format, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model, settings = make_model(dtype), settings_of("gspo", "tbpo")
        learner = align(with_adapter(quantize_base(model, format)), format)
        assert_one(*measure(monkeypatch, learner, make_batch(), settings), settings)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "learners"),
    [
        ("ranks:RankGroup", ["full", "aligned lora on int8", "scaled, noise, lora, checkpointed"]),
        ("sharding:Sharded", ["full", "aligned int8"]),
    ],
)
def test_every_rank_at_unchanged_weights(make: str, learners: list[str]) -> None:
    """The pass of the proximal policy deals to ranks what the updates will: with the micro-batches of
    one rank its products would have other rows."""
    for outcome in together(2, on_ranks, learners, make=f"lowroll.parallel.{make}"):
        for name in learners:
            largest, highest, mean, *clipped, calls = outcome[name]
            assert (largest, highest, mean) == (0.0, 1.0, 1.0), name
            assert clipped == [0.0] * len(BANDS) and calls > 3, name
