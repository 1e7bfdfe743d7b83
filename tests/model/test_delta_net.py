"""The gated delta net against transformers' of Qwen3-Next and of Qwen3.5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3_5TextConfig, Qwen3NextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from lowroll.model.delta_net import DeltaInputs, GatedDeltaNet, Recur, packed_recurrence
from lowroll.model.families.base import DeltaSpec
from lowroll.model.layers import ENGINE
from lowroll.model.recurrence import convolve, delta_rule, delta_step
from lowroll.quant.formats import get_format

FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
}
HIDDEN = 32
LENGTHS = [70, 1, 5, 70]
# heads of keys and of values, and their sizes
HEADS = [(2, 4, 16, 24), (4, 4, 8, 8), (1, 3, 16, 8)]


def pair(
    family: str, heads: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[GatedDeltaNet, nn.Module]:
    """Our net and transformers' with the same weights."""
    config_class, net_class = FAMILIES[family]
    key_heads, value_heads, key_dim, value_dim = heads
    config = config_class(
        hidden_size=HIDDEN,
        num_hidden_layers=4,
        linear_num_key_heads=key_heads,
        linear_num_value_heads=value_heads,
        linear_key_head_dim=key_dim,
        linear_value_head_dim=value_dim,
        linear_conv_kernel_dim=4,
        rms_norm_eps=1e-5,
    )
    theirs = net_class(config, 0)
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            p.copy_(torch.randn(p.shape) * (0.2 if p.ndim > 1 else 1.0))
            if name in ("norm.weight", "A_log", "dt_bias"):
                p.mul_(0.3).add_(0.5)
    theirs.to(dtype)
    grouped = family == "qwen3_next"
    ours = GatedDeltaNet(0, HIDDEN, DeltaSpec(*heads, 4, grouped), 1e-5, dtype=dtype)
    weights = dict(theirs.named_parameters())
    with torch.no_grad():
        for name, parts in names(ours).items():
            ours.get_parameter(name).copy_(torch.cat([weights[part] for part in parts]))
    return ours, theirs


def names(net: GatedDeltaNet) -> dict[str, list[str]]:
    """The checkpoint's names of each parameter."""
    linears = {"qkvz": net.qkvz, "o": net.o}
    return {
        "ba_weight": [f"{part}.weight" for part in net.sizes.rate_parts],
        "conv_weight": ["conv1d.weight"],
        "decay_log": ["A_log"],
        "dt_bias": ["dt_bias"],
        "norm_weight": ["norm.weight"],
    } | {
        f"{name}.weight": [f"{part}.weight" for part in linear.parts]
        for name, linear in linears.items()
    }


def close(found: Tensor, expected: Tensor, within: float = 1e-5) -> None:
    """Within this part of the greatest element."""
    atol = within * float(expected.detach().abs().max())
    torch.testing.assert_close(found, expected, atol=atol, rtol=0)


def run_theirs(net: nn.Module, x_TD: Tensor, lengths: list[int]) -> Tensor:
    return torch.cat([net(x[None])[0] for x in x_TD.split(lengths)])


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same_with_all_gradients(
    family: str, heads: tuple[int, int, int, int]
) -> None:
    ours, theirs = pair(family, heads)
    x_TD = torch.randn(sum(LENGTHS), HIDDEN, requires_grad=True)
    upstream_TD = torch.randn(sum(LENGTHS), HIDDEN)
    y_TD = ours(x_TD, packed_recurrence(LENGTHS))
    expected_TD = run_theirs(theirs, x_TD, LENGTHS)
    close(y_TD, expected_TD)

    parameters, weights = dict(ours.named_parameters()), dict(theirs.named_parameters())
    found = torch.autograd.grad(y_TD, [x_TD, *parameters.values()], upstream_TD)
    expected = torch.autograd.grad(expected_TD, [x_TD, *weights.values()], upstream_TD)
    close(found[0], expected[0])
    expected_by_name = dict(zip(weights, expected[1:], strict=True))
    assert names(ours).keys() == parameters.keys()
    for name, gradient in zip(parameters, found[1:], strict=True):
        # transformers' gradients of decays are those of differences of sums, and as exact
        within = 5e-5 if name in ("decay_log", "dt_bias") else 1e-5
        expected_N = torch.cat([expected_by_name[part] for part in names(ours)[name]])
        close(gradient, expected_N, within)


@pytest.mark.parametrize("family", FAMILIES)
def test_bfloat16_is_as_near_to_float32_as_transformers_is(family: str) -> None:
    ours, theirs = pair(family, HEADS[0], torch.bfloat16)
    x_TD = torch.randn(sum(LENGTHS), HIDDEN).bfloat16()
    with torch.no_grad():
        y_TD = ours(x_TD, packed_recurrence(LENGTHS))
        theirs_TD = run_theirs(theirs, x_TD, LENGTHS)
        exact_TD = run_theirs(theirs.float(), x_TD.float(), LENGTHS)
    assert y_TD.dtype == torch.bfloat16
    error, their_error = ((y - exact_TD).square().mean().sqrt() for y in (y_TD, theirs_TD))
    assert error < 1.1 * their_error


def stateful(states: dict[int, tuple[Tensor, Tensor]], lengths: list[int]) -> Recur:
    """A recurrence that continues states and keeps the new ones, as an engine's does."""

    def recur(layer: int, inputs: DeltaInputs) -> Tensor:
        conv_state, state = states.get(layer, (None, None))
        convolved_TC, conv_state = convolve(inputs.qkv_TC, inputs.weight_CK, lengths, conv_state)
        tokens = inputs.tokens(convolved_TC)
        if state is not None and max(lengths) == 1:
            o_THv, state = delta_step(*tokens, state)
        else:
            o_THv, state = delta_rule(*tokens, lengths, state)
        states[layer] = conv_state, state
        return o_THv

    return recur


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_of_a_prompt_and_steps_continue_a_sequence(family: str) -> None:
    ours, _ = pair(family, HEADS[0])
    x_SLD = torch.randn(3, 80, HIDDEN)
    whole_TD = ours(x_SLD.flatten(0, 1), packed_recurrence([80] * 3))
    states: dict[int, tuple[Tensor, Tensor]] = {}
    outputs = []
    for x in x_SLD.split([66, 2, 9, 1, 1, 1], dim=1):
        y_TD = ours(x.flatten(0, 1), stateful(states, [x.shape[1]] * 3))
        outputs.append(y_TD.unflatten(0, (3, -1)))
    found = torch.cat(outputs, dim=1).flatten(0, 1)
    close(found, whole_TD)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_computes_with_codes_what_a_learner_does_with_their_values(family: str) -> None:
    learner, _ = pair(family, HEADS[0])
    engine = GatedDeltaNet(0, HIDDEN, learner.sizes, 1e-5, layers=ENGINE)
    codes = get_format("q8_0")
    with torch.no_grad():
        for name, p in learner.named_parameters():
            module, _, last = name.rpartition(".")
            if last != "weight":
                engine.get_parameter(name).copy_(p)
                continue
            weight = codes.quantize(p)
            engine.get_submodule(module).set_weight(weight)
            p.copy_(weight.dequantize())
        x_TD = torch.randn(sum(LENGTHS), HIDDEN)
        recur = packed_recurrence(LENGTHS)
        found, expected = engine(x_TD, recur), learner(x_TD, recur)
    close(found, expected)


def test_value_heads_that_key_heads_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="linear_num_key_heads: 3 does not divide"):
        DeltaSpec(3, 4, 8, 8, 4)
