"""The aligned forward: the engine's arithmetic, a straight-through gradient, one quantization an
update, one digest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lowroll
from lowroll import Engine
from lowroll.model import hf, lora
from lowroll.model.learner_linear import LearnerLinear
from lowroll.model.transformer import Transformer
from lowroll.quant.formats import Format, QTensor
from lowroll.trainer import recompute
from lowroll.trainer import state as states
from lowroll.trainer.optim import Optimizer, OptimSettings
from lowroll.weights import aligned_forward
from lowroll.weights.publish import digest, publish, quantize_base, rollout_copy
from lowroll.weights.sync.update import WeightUpdate
from tests.fixtures.formats import FEW
from tests.fixtures.tensors import normal
from tests.fixtures.tiny import FAMILIES, hf_folder

FAMILY = "qwen3-tied-bias"
IDS = torch.randint(0, 67, (31,), generator=torch.Generator().manual_seed(0))
FORMATS = tuple(lowroll.formats())
DTYPES = {"bf16": torch.bfloat16}


def dtype_of(format: str) -> torch.dtype:
    """What the engine computes in on a CPU."""
    return DTYPES.get(format, torch.float32)


def hidden(model: Transformer) -> Tensor:
    return model(IDS, torch.arange(len(IDS)), model.causal([len(IDS)]))


@torch.no_grad()
def logits(model: Transformer) -> Tensor:
    return model.logits(hidden(model))


@torch.no_grad()
def nudge(model: Transformer, seed: int, size: float = 0.1) -> Transformer:
    for i, p in enumerate(model.trainable_parameters().values()):
        p += size * normal(*p.shape, seed=seed + i).to(p.dtype)
    return model


def learner(folder: Path, format: str, with_lora: bool = False) -> Transformer:
    model = hf.load(folder, dtype=dtype_of(format)).requires_grad_(True)
    if with_lora:
        lora.attach(quantize_base(model, format), rank=3, alpha=6.0, seed=1)
    return aligned_forward.align(model, format)


# -- forward ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("format", "with_lora"),
    [*((format, False) for format in FORMATS), *((format, True) for format in FEW)],
)
def test_linears_of_learner_and_engine_agree_bit_for_bit(
    folder: Path, format: str, with_lora: bool
) -> None:
    model = nudge(learner(folder, format, with_lora), 1)
    aligned_forward.refresh(model)
    rollout = rollout_copy(model, format, dtype_of(format))
    for (name, ours), (_, theirs) in zip(model.linears(), rollout.linears(), strict=True):
        x = normal(7, ours.in_features, seed=3).to(dtype_of(format)).requires_grad_()
        with torch.inference_mode():
            want = theirs(x.detach())
        assert torch.equal(ours(x).detach(), want), name
        with torch.no_grad():
            assert torch.equal(ours(x), want), name  # old log-probs see the same
        assert torch.equal(ours(x[:1]).detach(), theirs(x[:1].detach())), name
    assert torch.equal(logits(model), logits(rollout))


@pytest.mark.parametrize("family", FAMILIES)
def test_int8_learner_is_the_engine(tmp_path: Path, family: str) -> None:
    model = aligned_forward.align(
        hf.load(hf_folder(tmp_path / "m", family)).requires_grad_(True), "int8"
    )
    rollout = rollout_copy(model, "int8", torch.float32)
    assert torch.equal(logits(model), logits(rollout))
    plain = logits(hf.load(tmp_path / "m"))
    # random states, gates and routers turn rounding into other outputs, where trained ones do not
    bound = 2.0 if model.spec.delta or model.spec.mixture.scores else 0.3
    assert 0 < (logits(model) - plain).abs().max() < bound * plain.abs().max()


@pytest.mark.parametrize("format", ["fp32", "bf16"])
def test_in_the_models_own_floating_point_it_is_the_plain_forward(
    folder: Path, format: str
) -> None:
    """Values and every gradient, bitwise."""
    plain, model = (
        hf.load(folder, dtype=dtype_of(format)).requires_grad_(True),
        learner(folder, format),
    )
    out, again = hidden(plain), hidden(model)
    assert torch.equal(out, again)
    weights = normal(*out.shape).to(out.dtype)
    (out * weights).sum().backward()
    (again * weights).sum().backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


# -- backward --------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_the_gradient_passes_straight_through(format: str) -> None:
    """dX = dY What, dW = dY^T X, db = sum dY, with What the dequantized matrix: by hand."""
    linear = LearnerLinear(24, {"a": 10, "b": 6}, bias=True)
    with torch.no_grad():
        linear.weight.copy_(normal(16, 24, seed=1))
        linear.bias.copy_(normal(16, seed=2))
    linear.aligned = q = lowroll.quantize(linear.weight, format)
    x, grad = normal(5, 24, seed=3).requires_grad_(), normal(5, 16, seed=4)
    y = linear(x)
    y.backward(grad)
    assert torch.equal(y.detach(), q.linear(x.detach(), linear.bias.detach()))
    torch.testing.assert_close(x.grad, grad @ q.dequantize())
    torch.testing.assert_close(linear.weight.grad, grad.t() @ x.detach())
    torch.testing.assert_close(linear.bias.grad, grad.sum(0))


def test_with_a_frozen_base_only_inputs_and_adapters_learn() -> None:
    linear = LearnerLinear(24, {"a": 10}, bias=False)
    linear.set_weight(lowroll.quantize(normal(10, 24, seed=1), "int8"))
    linear.aligned = linear.weight
    x = normal(5, 24, seed=3).requires_grad_()
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.ones(5, 10) @ linear.weight.dequantize())


def test_the_gradient_of_a_whole_int8_model_points_where_the_dense_one_does(folder: Path) -> None:
    plain, model = hf.load(folder).requires_grad_(True), learner(folder, "int8")
    weights = normal(*hidden(plain).shape)
    for each in (plain, model):
        (hidden(each) * weights).sum().backward()
    for (name, p), (_, q) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert F.cosine_similarity(p.grad.flatten(), q.grad.flatten(), dim=0) > 0.95, name
        assert not torch.equal(p.grad, q.grad) or p.grad.abs().max() == 0, name


def test_recomputed_activations_change_nothing(folder: Path) -> None:
    whole, saved = learner(folder, "int8"), learner(folder, "int8")
    recompute.apply(saved, True)
    for each in (whole, saved):
        hidden(each).square().sum().backward()
    for (name, p), (_, q) in zip(whole.named_parameters(), saved.named_parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), name


# -- one quantization an update, and one digest ----------------------------------------------------


@pytest.mark.parametrize(
    ("format", "with_lora"),
    [*((format, False) for format in FORMATS), *((format, True) for format in FEW)],
)
def test_what_is_published_is_the_learners_own(
    folder: Path, format: str, with_lora: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = learner(folder, format, with_lora)
    engine = Engine(model, weights=format, device="cpu", cache_tokens=1024)
    assert engine.behavior.policy[0].digest == digest(model)
    for version in (1, 2):
        nudge(model, version)
        aligned_forward.refresh(model)
        with monkeypatch.context() as patch:  # publication may not quantize
            patch.setattr(Format, "quantize", lambda *_: pytest.fail("quantized twice"))
            tag = engine.update_weights(WeightUpdate.local(model, version))
        assert tag.policy[0].digest == digest(model)
        assert torch.equal(logits(model), logits(engine.model))
        own = {
            t.data_ptr() for _, linear in model.linears() for t in linear.aligned.tensors.values()
        }
        theirs = {
            t.data_ptr()
            for _, linear in engine.model.linears()
            for t in linear.weight.tensors.values()
        }
        assert own == theirs if with_lora else not own & theirs  # rollouts outlive the next update


@pytest.mark.parametrize("format", ["int8", "nvfp4"])
def test_what_the_codes_stand_for_is_multiplied_without_rounding_activations(
    folder: Path, format: str
) -> None:
    model, want = learner(folder, format), logits(quantize_base(hf.load(folder), format))
    codes = [linear.aligned for _, linear in model.linears()]
    rounded = logits(model)
    with aligned_forward.dequantized(model):
        got = logits(model)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    assert ((got - rounded).abs().max() > 1e-3) == (format == "int8")
    kept = [linear.aligned for _, linear in model.linears()]
    assert all(one is same for one, same in zip(codes, kept, strict=True))
    assert torch.equal(logits(model), rounded)


def test_codes_are_fixed_between_updates_and_follow_them(folder: Path) -> None:
    model = learner(folder, "int8")
    codes, places = (
        digest(model),
        [t.data_ptr() for _, x in model.linears() for t in x.aligned.tensors.values()],
    )
    with torch.no_grad():
        for _, linear in model.linears():
            linear.weight.mul_(1.7)
    assert digest(model) == codes  # masters moved, the forward did not
    aligned_forward.refresh(model)
    assert digest(model) != codes
    assert places == [t.data_ptr() for _, x in model.linears() for t in x.aligned.tensors.values()]
    fresh = [
        lowroll.quantize(linear.weight, "int8").tensors["codes"] for _, linear in model.linears()
    ]
    assert all(
        torch.equal(x.aligned.tensors["codes"], f)
        for (_, x), f in zip(model.linears(), fresh, strict=True)
    )
    plain = hf.load(folder)
    before = digest(plain)
    aligned_forward.refresh(plain)
    assert digest(plain) == before


def test_a_restored_learner_has_the_codes_of_its_weights(folder: Path) -> None:
    source = nudge(learner(folder, "int8"), 1)
    aligned_forward.refresh(source)
    optimizer = Optimizer(source.trainable_parameters(), OptimSettings())
    tensors, state = states.capture(source, optimizer)
    target = learner(folder, "int8")
    assert digest(target) != digest(source)
    states.restore(
        target, Optimizer(target.trainable_parameters(), OptimSettings()), tensors, state
    )
    assert digest(target) == digest(source) and torch.equal(logits(target), logits(source))


def test_a_dense_folder_comes_out(folder: Path, tmp_path: Path) -> None:
    """The masters are what is saved, and another format of the engine quantizes them."""
    model = nudge(learner(folder, "int8"), 1)
    hf.save(model, tmp_path / "saved")
    assert torch.equal(hf.load(tmp_path / "saved").blocks[0].qkv.weight, model.blocks[0].qkv.weight)
    other = rollout_copy(model, "fp32", torch.float32)
    assert torch.equal(other.blocks[0].qkv.weight.tensors["weight"], model.blocks[0].qkv.weight)
    publish(model, other)


def test_refusals(folder: Path) -> None:
    base = quantize_base(hf.load(folder), "int8")
    with pytest.raises(
        ValueError, match=r"blocks\.0\.qkv: the base is int8, and the forward is to be bf16"
    ):
        aligned_forward.align(base, "bf16")
    assert all(linear.aligned is None for _, linear in base.linears())
    model = learner(folder, "int8")
    with torch.no_grad():
        model.blocks[1].o.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"blocks\.1\.o\.weight: int8: .*non-finite"):
        aligned_forward.refresh(model)
    assert isinstance(model.blocks[1].o.aligned, QTensor)
