"""The two kinds of layers: who makes which, and what an engine's refuse."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.model import hf, logprobs, lora
from lowroll.model.engine_linear import EngineLinear
from lowroll.model.experts import EngineExperts, EngineStack, LearnerExperts, LearnerStack
from lowroll.model.learner_linear import LearnerLinear
from lowroll.model.transformer import Transformer
from lowroll.weights.aligned_forward import align
from lowroll.weights.publish import beside, quantize_base, rollout_copy, rollout_load
from tests.fixtures.tiny import hf_folder


@pytest.fixture(scope="module", params=["qwen3", "qwen3-moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf_folder(tmp_path_factory.mktemp("models") / request.param, request.param)


def kinds(model: Transformer) -> set[type]:
    experts = {type(block.experts) for block in model.blocks if block.experts is not None}
    return {type(linear) for _, linear in model.linears()} | experts


def test_loading_makes_a_learner_and_publication_an_engine(folder: Path) -> None:
    master = hf.load(folder)
    mixture = bool(master.spec.mixture.num_experts)
    learner = {LearnerLinear} | ({LearnerStack, LearnerExperts} if mixture else set())
    engine = {EngineLinear} | ({EngineStack, EngineExperts} if mixture else set())
    assert kinds(master) == kinds(align(quantize_base(master, "int8"), "int8")) == learner
    assert kinds(lora.attach(master, 2, 4.0, lora.TARGETS[:4])) == learner
    rollout = rollout_copy(master, "int8", torch.float32)
    assert kinds(rollout) == kinds(beside(master, rollout, "nvfp4")) == engine
    assert kinds(rollout_load(folder, "int8", "cpu", torch.float32)) == engine


def test_both_kinds_have_the_same_names(folder: Path) -> None:
    """Names are those of checkpoints, of the optimizer's state and of digests."""
    master = hf.load(folder)
    rollout = rollout_copy(master, "int8", torch.float32)
    mine = [name for name, _ in master.named_parameters()]
    theirs = [name for name, _ in rollout.named_parameters()]
    stacked = [f"{name}.weight" for name, _ in rollout.linears()]
    assert [name for name in mine if name not in stacked] == theirs
    assert [name for name, _ in master.linears()] == [name for name, _ in rollout.linears()]


def test_an_engines_layer_wants_codes_and_no_gradient() -> None:
    linear = EngineLinear(8, {"a": 4}, bias=False)
    with pytest.raises(AssertionError, match="QTensor"):
        linear(torch.ones(2, 8))
    linear.set_weight(lowroll.quantize(torch.randn(4, 8), "int8"))
    x = torch.randn(2, 8)
    assert torch.equal(linear(x), linear.weight.linear(x)) and linear.row_kind is None
    with pytest.raises(ValueError, match="the engine's arithmetic has no gradient"):
        linear(x.requires_grad_())


def test_float32_logits_have_the_gradient_of_the_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose float32 product of half-precision matrices has no derivative."""

    def product(a: Tensor, b: Tensor) -> Tensor:
        return (a.float() @ b.float()).detach()

    monkeypatch.setattr(logprobs, "_wide", lambda x: True)
    monkeypatch.setattr(logprobs, "float32_product", product)
    hidden, weight = torch.randn(5, 8).bfloat16(), torch.randn(11, 8).bfloat16()
    ours = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    exact = [hidden.double().requires_grad_(), weight.double().requires_grad_()]
    slope = torch.randn(5, 11)
    logits = logprobs.logits(*ours)
    assert logits.dtype == torch.float32
    got = torch.autograd.grad((logits * slope).sum(), ours)
    want = torch.autograd.grad(((exact[0] @ exact[1].t()) * slope).sum(), exact)
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).abs().max() < 0.02 * b.abs().max()
