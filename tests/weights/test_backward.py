"""Input gradients in fp8: what they are, how far they are from dense ones by layer, and what stays as
it is."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import lowroll
from lowroll.model import lora
from lowroll.model.attention import varlen
from lowroll.model.learner_linear import LearnerLinear
from lowroll.model.logprobs import token_log_probs
from lowroll.model.transformer import Transformer, initialize
from lowroll.quant import fp8
from lowroll.trainer import recompute
from lowroll.weights import derived_tensors
from lowroll.weights.aligned_forward import align, transpose
from lowroll.weights.publish import quantize_base
from tests.fixtures.bands import EXPERTS, make_model
from tests.fixtures.tensors import normal

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "head_dim": 32}
LENGTHS = [40, 24]
Make = Callable[[Transformer], Transformer]


def apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def with_adapter(model: Transformer) -> Transformer:
    lora.attach(model, 4, 8.0)
    with torch.no_grad():
        for i, p in enumerate(model.trainable_parameters().values()):
            p += 0.05 * normal(*p.shape, seed=i)
    return model


MODELS: dict[str, Make] = {
    "full": lambda model: model,
    "lora": with_adapter,
    "lora on fp8": lambda model: with_adapter(quantize_base(model, "fp8")),
    "lora on nvfp4": lambda model: with_adapter(quantize_base(model, "nvfp4")),
}


def learner(kind: str, forward: str | None = None, backward: bool = False) -> Transformer:
    model = MODELS[kind](initialize(make_model(torch.float32, **SIZES), 0))
    if forward is not None:
        align(model, forward)
    return transpose(model) if backward else model


def gradients(model: Transformer, scale: float = 1.0) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probs of random tokens, and the gradient of their mean times scale by parameter."""
    draw = torch.Generator().manual_seed(1)
    ids, targets = (torch.randint(0, 96, (sum(LENGTHS),), generator=draw) for _ in range(2))
    places = torch.cat([torch.arange(length) for length in LENGTHS])
    hidden = model(ids, places, varlen(LENGTHS))
    found = token_log_probs(hidden, model.lm_head_weight, targets)[0]
    (found.mean() * scale).backward()
    return found.detach(), {n: p.grad.clone() for n, p in model.trainable_parameters().items()}


# -- one product -----------------------------------------------------------------------------------


def test_it_is_the_product_of_the_codes_by_hand() -> None:
    linear = LearnerLinear(24, {"a": 10, "b": 6}, bias=True)
    with torch.no_grad():
        linear.weight.copy_(normal(16, 24, seed=1))
        linear.bias.zero_()
    linear.transposed = q = lowroll.quantize(linear.weight.detach().t(), "fp8")
    x, grad = normal(5, 24, seed=3).requires_grad_(), normal(5, 16, seed=4)
    linear(x).backward(grad)
    scale = grad.abs().amax(1, keepdim=True) / 448
    rounded = (grad / scale).to(torch.float8_e4m3fn).float() * scale
    torch.testing.assert_close(x.grad, rounded @ q.dequantize().t())
    assert 0 < apart(x.grad, grad @ linear.weight.detach()) < 0.05
    assert torch.equal(linear.weight.grad, grad.t() @ x.detach())
    assert torch.equal(linear.bias.grad, grad.sum(0))


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_has_a_scale_of_its_own_without_a_floor(rows: int, dtype: torch.dtype) -> None:
    """A batch's mean makes gradients that activations never have."""
    transposed = lowroll.quantize(normal(24, 16, seed=1), "fp8")
    grad = normal(rows, 16, seed=2).to(dtype)
    sizes = torch.logspace(-9, 3, rows, base=10)[:, None].log2().round().exp2()
    found = fp8.gradient((grad * sizes).to(dtype), transposed)
    assert found.dtype == dtype
    assert torch.equal(found, (fp8.gradient(grad, transposed) * sizes).to(dtype))


def test_a_gradient_of_zeros_is_zero_and_one_that_is_not_finite_stays_so() -> None:
    transposed = lowroll.quantize(normal(24, 16, seed=1), "fp8")
    grad = torch.zeros(3, 16)
    grad[1, 3], grad[2, 5] = math.inf, math.nan
    found = fp8.gradient(grad, transposed)
    assert torch.equal(found[0], torch.zeros(24))
    assert not found[1].isfinite().any() and not found[2].isfinite().any()


# -- a whole model ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", MODELS)
def test_the_forward_stays_as_it_is(kind: str) -> None:
    """So do gradients that no product of theirs lies before."""
    (want, dense), (got, found) = (gradients(learner(kind, None, b)) for b in (False, True))
    assert torch.equal(got, want)
    for name in ("norm.weight", "blocks.3.down.weight", "blocks.3.down.adapter.b.down_proj"):
        if name in dense:
            assert torch.equal(found[name], dense[name])
    assert any(not torch.equal(found[name], dense[name]) for name in dense)


@pytest.mark.parametrize(
    ("forward", "bounds"), [(None, (0.06, 0.05, 0.045, 0.03)), ("fp8", (0.14,) * 4)]
)
@pytest.mark.parametrize("kind", ["full", "lora"])
def test_errors_by_layer(kind: str, forward: str | None, bounds: tuple[float, ...]) -> None:
    """Relative to dense gradients. Those of dX alone grow with the products that lie behind; what
    the forward rounds is another function in all layers, and more."""
    dense, found = (gradients(learner(kind, *both))[1] for both in ((None, False), (forward, True)))
    layers: list[list[float]] = [[], [], [], []]
    for name, want in dense.items():
        if name.startswith("blocks.") and "norm" not in name:
            layers[int(name.split(".")[1])].append(apart(found[name], want))
    means = [sum(errors) / len(errors) for errors in layers]
    assert all(bound / 3 < mean < bound for mean, bound in zip(means, bounds, strict=True)), means


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_it_does_not_depend_on_the_size_of_the_gradient(kind: str) -> None:
    large, small = (gradients(learner(kind, "fp8", True), scale)[1] for scale in (1.0, 2.0**-24))
    assert all(torch.equal(small[name] * 2.0**24, large[name]) for name in large)


@pytest.mark.parametrize("share", [True, 0.5])
@pytest.mark.parametrize("kind", ["full", "lora", "lora on nvfp4"])
def test_recomputation_changes_no_bit(kind: str, share: bool | float) -> None:
    forward = None if kind == "lora on nvfp4" else "fp8"
    kept, made_again = (
        gradients(recompute.apply(learner(kind, forward, True), s)) for s in (False, share)
    )
    assert torch.equal(kept[0], made_again[0])
    assert all(torch.equal(kept[1][name], made_again[1][name]) for name in kept[1])


# -- codes -----------------------------------------------------------------------------------------


def test_codes_follow_the_weights() -> None:
    model = learner("full", "fp8", True)
    with torch.no_grad():
        for _, linear in model.linears():
            linear.weight.mul_(1 + 0.1 * normal(*linear.weight.shape))
    before = {name: linear.transposed.tensors["weight"] for name, linear in model.linears()}
    derived_tensors.renew(model)
    for name, linear in model.linears():
        assert linear.transposed.tensors["weight"] is before[name]
        wanted = lowroll.quantize(linear.weight.detach().t(), "fp8")
        for key, tensor in wanted.tensors.items():
            assert torch.equal(linear.transposed.tensors[key], tensor)
        assert torch.equal(linear.aligned.dequantize(), linear.quantized("fp8").dequantize())
        assert torch.equal(
            linear.aligned.dequantize(), lowroll.quantize(linear.weight, "fp8").dequantize()
        )


@pytest.mark.parametrize("forward", [None, "fp8"])
def test_a_weight_that_is_not_finite_is_named(forward: str | None) -> None:
    model = learner("full", forward, True)
    with torch.no_grad():
        model.blocks[1].o.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match=r"blocks\.1\.o\.weight: fp8: .*non-finite"):
        derived_tensors.renew(model)
    with pytest.raises(ValueError, match=r"blocks\.1\.o\.weight: fp8: .*non-finite"):
        transpose(model)


def test_experts_have_none() -> None:
    model = make_model(torch.float32, **EXPERTS)
    with pytest.raises(ValueError, match=r"blocks\.0\.experts\.gate_up: .* no gradient in fp8"):
        transpose(model)
    assert all(linear.transposed is None for _, linear in model.linears())
