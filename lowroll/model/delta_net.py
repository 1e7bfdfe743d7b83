"""The gated delta net, which most layers of Qwen3-Next and Qwen3.5 have in place of attention (Yang
et al. 2024, arXiv 2412.06464).

    q, k, v = split(convolve(W_qkv x))        each head's q and k to unit length, q by 1 / sqrt(k) too
    decay = -exp(A_log) softplus(W_a x + dt_bias)                      beta = sigmoid(W_b x)
    y = W_o (rms_norm(delta_rule(q, k, v, decay, beta)) * weight * silu(W_z x))

Convolution and rule have states, so they are an argument, `recur(layer, inputs) -> o_THv`.
Everything between the products is float32.

Legend: `model.recurrence`; D hidden size, G key heads, H value heads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.model.attention import Attend, AttentionInputs
from lowroll.model.families.base import DeltaSpec
from lowroll.model.layers import LEARNER, Layers
from lowroll.model.recurrence import convolve, delta_rule
from lowroll.model.residual_stream import Stream, dense

UNIT_EPS = 1e-6  # added to the squared length


def split_heads(sizes: DeltaSpec, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Cut convolved q, k and v into heads. Return normalized q and k [T, H, k], float32, with key
    heads repeated for their value heads, and v [T, H, v]."""
    keys = sizes.key_heads * sizes.key_dim
    q_TC, k_TC, v_TC = qkv_TC.split([keys, keys, sizes.values], dim=-1)
    key_shape = (sizes.key_heads, sizes.key_dim)
    q_TGk = _to_unit_length(q_TC.float().unflatten(-1, key_shape)) * sizes.key_dim**-0.5
    k_TGk = _to_unit_length(k_TC.float().unflatten(-1, key_shape))
    v_THv = v_TC.unflatten(-1, (sizes.value_heads, sizes.value_dim))
    repeats = sizes.value_heads // sizes.key_heads
    q_THk, k_THk = q_TGk.repeat_interleave(repeats, dim=1), k_TGk.repeat_interleave(repeats, dim=1)
    return q_THk, k_THk, v_THv


class DeltaInputs(NamedTuple):
    """The inputs of a recurrence: q, k and v before the convolution, decays (logarithms) and beta,
    float32, and the convolution's weight."""

    qkv_TC: Tensor
    decay_TH: Tensor
    beta_TH: Tensor
    weight_CK: Tensor
    sizes: DeltaSpec

    def tokens(self, convolved_TC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return the inputs of the delta rule."""
        return *split_heads(self.sizes, convolved_TC), self.decay_TH, self.beta_TH


Recur = Callable[[int, DeltaInputs], Tensor]


@dataclass(frozen=True)
class Mixing:
    """Attention, and recurrence in other layers."""

    attend: Attend
    recur: Recur

    def __call__(self, layer: int, inputs: AttentionInputs) -> Tensor:
        return self.attend(layer, inputs)


def packed_recurrence(lengths: Sequence[int]) -> Recur:
    """Return the recurrence over packed sequences."""

    def recur(_layer: int, inputs: DeltaInputs) -> Tensor:
        convolved_TC, _ = convolve(inputs.qkv_TC, inputs.weight_CK, lengths)
        return delta_rule(*inputs.tokens(convolved_TC), lengths)[0]

    return recur


class GatedDeltaNet(nn.Module):
    """A layer's token mixer, uninitialized. The matrix of b and a is never quantized: it is small,
    and decides how long a state remembers."""

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        sizes: DeltaSpec,
        norm_eps: float,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: Layers = LEARNER,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.sizes = sizes
        self.norm_eps = norm_eps
        self.qkvz = layers.linear(hidden_size, sizes.input_parts, False, device, dtype)

        def vector(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.ba_weight = vector(2 * sizes.value_heads, hidden_size)
        self.conv_weight = vector(sizes.channels, 1, sizes.taps)
        self.decay_log = vector(sizes.value_heads)
        self.dt_bias = vector(sizes.value_heads)
        self.norm_weight = vector(sizes.value_dim)
        self.o = layers.linear(sizes.values, {"out_proj": hidden_size}, False, device, dtype)

    def forward(self, x_TD: Tensor, recur: Recur) -> Stream:
        """Return the layer's update [T, D]."""
        qkv_TC, z_THv, beta_TH, decay_TH = self.project(x_TD)
        weight_CK = self.conv_weight.squeeze(1)
        o_THv = recur(self.layer, DeltaInputs(qkv_TC, decay_TH, beta_TH, weight_CK, self.sizes))
        gated_THv = self.norm_and_gate(o_THv, z_THv).to(x_TD.dtype)
        return self.o(self.o.read(gated_THv.flatten(1)))

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return qkv [T, C], the gate z [T, H, v], and beta and decay [T, H], float32."""
        sizes = self.sizes
        qkvz = dense(self.qkvz(self.qkvz.read(x_TD)))
        ba = F.linear(x_TD, self.ba_weight)
        if sizes.grouped:  # the checkpoint's order
            heads = sizes.value_heads // sizes.key_heads
            values = heads * sizes.value_dim
            q_TC, k_TC, v_TC, z_TC = _ungrouped(
                qkvz, sizes, [sizes.key_dim, sizes.key_dim, values, values]
            )
            qkv_TC = torch.cat([q_TC, k_TC, v_TC], dim=-1)
            b_TH, a_TH = _ungrouped(ba, sizes, [heads, heads])
        else:
            qkv_TC, z_TC = qkvz.split([sizes.channels, sizes.values], dim=-1)
            b_TH, a_TH = ba.chunk(2, dim=-1)
        decay_TH = -self.decay_log.float().exp() * F.softplus(a_TH.float() + self.dt_bias.float())
        z_THv = z_TC.unflatten(-1, (sizes.value_heads, sizes.value_dim))
        return qkv_TC, z_THv, b_TH.float().sigmoid(), decay_TH

    def norm_and_gate(self, o_THv: Tensor, z_THv: Tensor) -> Tensor:
        """Return each head's norm times the gate, float32. The gain is the weight, not 1 + it."""
        o_THv = o_THv.float()
        inverse_rms_TH1 = (o_THv.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        return o_THv * inverse_rms_TH1 * self.norm_weight.float() * F.silu(z_THv.float())


def _ungrouped(x_TN: Tensor, sizes: DeltaSpec, widths: list[int]) -> list[Tensor]:
    x_TGe = x_TN.unflatten(-1, (sizes.key_heads, -1))
    return [part.flatten(1) for part in x_TGe.split(widths, dim=-1)]


def _to_unit_length(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()
