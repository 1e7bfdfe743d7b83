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
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lowroll.model import logprobs, lora
from lowroll.model.scaling import scale
from lowroll.model.spec import spec_from_config
from lowroll.model.transformer import Transformer
from lowroll.objectives import ALGORITHMS, CORRECTIONS, Objective, select
from lowroll.quant import dense
from lowroll.trainer import recompute
from lowroll.trainer.critic import Critic, CriticSettings
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.trainer.step import LearnSettings, learn
from lowroll.types import Batch, BehaviorTag, PolicySpan, Prompt, Rollout, Sample, Score
from lowroll.weights.aligned import align
from lowroll.weights.noise import Noise, share
from lowroll.weights.publish import quantize_base

VOCAB = 96
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
}
EXPERTS = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}
PAIRS = [
    (algorithm, correction)
    for algorithm, correction in itertools.product(ALGORITHMS, CORRECTIONS)
    if algorithm != "gspo" or correction in ("none", "tis", "decoupled", "tbpo")
]
BANDS = (
    "policy/clip_fraction_high",
    "policy/clip_fraction_low",
    "policy/dual_clip_fraction",
    "policy/band_masked_fraction",
)


@pytest.fixture(autouse=True)
def fickle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose order of sums depends on the number of rows."""

    def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
        cut = 1 + 7 * len(a_MK) % (b_KN.shape[0] - 1)
        return a_MK[:, :cut] @ b_KN[:cut] + a_MK[:, cut:] @ b_KN[cut:]

    def linear(x_MK: Tensor, w_NK: Tensor, bias_N: Tensor | None = None) -> Tensor:
        return product(x_MK, w_NK.t()) if bias_N is None else product(x_MK, w_NK.t()) + bias_N

    monkeypatch.setattr(torch.nn.functional, "linear", linear)
    monkeypatch.setattr(logprobs, "float32_product", product)


def make_model(dtype: torch.dtype, device: str = "cpu", **config: Any) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(spec_from_config(CONFIG | config))
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(
                1 + 0.1 * torch.randn(p.shape)
                if p.ndim == 1
                else torch.randn(p.shape) * p.shape[-1] ** -0.5
            )
    return model.to(device, dtype)


def make_batch(groups: int = 4, size: int = 3, longest: int = 12, prompt: int = 7) -> Batch:
    """A group without an advantage, responses of no advantage beside others, a response that is
    masked as a whole."""
    draw = torch.Generator().manual_seed(1)

    def integers(low: int, high: int, count: int) -> list[int]:
        return torch.randint(low, high, (count,), generator=draw).tolist()

    samples = []
    for group in range(groups):
        prompt_ids = integers(2, VOCAB, *integers(1, prompt, 1))
        for k in range(size):
            token_ids = integers(2, VOCAB, *integers(1, longest, 1))
            logprobs = (-4.5 + 0.5 * torch.randn(len(token_ids), generator=draw)).tolist()
            advantage = 0.0 if group == 1 or k == group % 3 and group != 2 else [1.5, -0.7][k % 2]
            mask = [int(t % 4 != 3 and (group, k) != (2, 0)) for t in range(len(token_ids))]
            samples.append(
                Sample(
                    Prompt(f"p{group}", "e", []),
                    prompt_ids,
                    Rollout(
                        token_ids, logprobs, "stop", BehaviorTag((PolicySpan(0, "d"),), "int8")
                    ),
                    "",
                    Score(1.0),
                    advantage,
                    mask,
                    group,
                    reward=float(k % 2),
                )
            )
    return Batch(1, samples, 0.9)


def with_adapter(model: Transformer) -> Transformer:
    """With an adapter that has learnt something."""
    lora.attach(model, 4, 8.0, lora.TARGETS[:4] if model.spec.num_experts else lora.TARGETS)
    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in model.trainable_parameters().values():
            p.add_(0.05 * torch.randn(p.shape, generator=draw).to(p.device))
    return model


def checkpointed(model: Transformer, share: bool | float = True) -> Transformer:
    return recompute.apply(model, share)


def noisy(model: Transformer) -> Transformer:
    share(model, Noise(11, 0.05))
    return model


# how a learner is made of a dense model
LEARNERS: dict[str, Callable[[Transformer], Transformer]] = {
    "full": lambda model: model,
    "lora": with_adapter,
    "lora on int8": lambda model: with_adapter(quantize_base(model, "int8")),
    "lora on nf4": lambda model: with_adapter(quantize_base(model, "nf4")),
    "aligned int8": lambda model: align(model, "int8"),
    "aligned nvfp4": lambda model: align(model, "nvfp4"),
    "aligned lora on int8": lambda model: align(with_adapter(quantize_base(model, "int8")), "int8"),
    "aligned lora on int4": lambda model: align(with_adapter(quantize_base(model, "int4")), "int4"),
    "scaled": lambda model: scale(model, 1.5),
    "noise": noisy,
    "checkpointed": checkpointed,
    "checkpointed in part": lambda model: checkpointed(model, 0.5),
    "scaled, noise, lora, checkpointed": lambda model: checkpointed(
        noisy(with_adapter(scale(model, 1.5)))
    ),
}


def measure(
    monkeypatch: pytest.MonkeyPatch,
    model: Transformer,
    batch: Batch,
    settings: LearnSettings,
    **more: Any,
) -> tuple[list[Tensor], dict[str, float]]:
    """ln R of every call of the objective, of micro-batches and of whole minibatches, and the
    metrics of the step."""
    seen, call = list[Tensor](), Objective.__call__

    def spied(self: Objective, **given: Any) -> Any:
        seen.append((given["learner"].detach() - given["proximal"]).cpu())
        return call(self, **given)

    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = Optimizer(model.trainable_parameters(), OptimSettings(0.0))
    with monkeypatch.context() as patch:
        patch.setattr(Objective, "__call__", spied)
        metrics = learn(model, batch, optimizer, settings, **more)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    return seen, metrics


def assert_one(seen: list[Tensor], metrics: dict[str, float], settings: LearnSettings) -> None:
    assert max(float(log_ratio_N.abs().max()) for log_ratio_N in seen if len(log_ratio_N)) == 0
    if settings.objective.needs_proximal:
        assert all(metrics[name] == 0 for name in BANDS if name in metrics)
        assert metrics["policy/ratio_mean"] == metrics["policy/ratio_max"] == 1


def settings_of(algorithm: str, correction: str, **more: Any) -> LearnSettings:
    objective = select(algorithm, correction)
    options = {"max_length": 16.0} if objective.options.get("reduce") == "constant" else {}
    more = {"minibatches": 3, "tokens_per_microbatch": 16, "options": options} | more
    return LearnSettings(objective, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("algorithm", "correction"), PAIRS)
def test_every_objective_at_unchanged_weights(
    monkeypatch: pytest.MonkeyPatch, algorithm: str, correction: str, dtype: torch.dtype
) -> None:
    model, critic = make_model(dtype), None
    if algorithm == "ppo":
        critic = Critic(make_model(dtype), OptimSettings(0.0), CriticSettings())
    settings = settings_of(algorithm, correction)
    assert_one(*measure(monkeypatch, model, make_batch(), settings, critic=critic), settings)


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
    heard = [[i for i in part if any(batch.samples[i].loss_mask)] for part in parts]
    judged = critic.judge(batch.samples, heard)
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
