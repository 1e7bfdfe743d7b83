"""The gated delta net, which most layers of Qwen3-Next and Qwen3.5 have in place of attention.

    q, k, v = split(convolve(W_qkv x))        each head's q and k to unit length, q by 1 / sqrt(k) too
    decay = -exp(A_log) softplus(W_a x + dt_bias)                      beta = sigmoid(W_b x)
    y = W_o (rms_norm(delta_rule(q, k, v, decay, beta)) * weight * silu(W_z x))

(Yang et al. 2024, arXiv 2412.06464.) Convolution and rule have states, so they are an argument, as
attention is: the net calls `recur(layer, qkv_TC, decay_TH, beta_TH, weight_CK, heads) -> o_THv`. The
learner passes `packed_recurrence`. Everything between the products is float32.

Legend: T packed tokens, D hidden size, G key heads, H value heads, k key size, v value size, C
channels of q, k and v, K taps of the convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.quantize.rows import Product
from lowroll.model.layers import LEARNER, Layers
from lowroll.model.recurrence import convolve, delta_rule

UNIT_EPS = 1e-6  # added to the squared length of q and k


@dataclass(frozen=True)
class DeltaHeads:
    """The heads of a gated delta net. A key head serves consecutive value heads."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ValueError(
                f"linear_num_key_heads: {self.key_heads} does not divide linear_num_value_heads "
                f"{self.value_heads}"
            )

    @property
    def keys(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        return 2 * self.keys + self.values

    @property
    def values_per_key(self) -> int:
        """The value heads of a key head."""
        return self.value_heads // self.key_heads

    def split(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return q and k [T, H, k], float32, to unit length and q scaled, and v [T, H, v]."""
        q_TC, k_TC, v_TC = qkv_TC.split([self.keys, self.keys, self.values], dim=-1)
        q_TGk, k_TGk = (
            _to_unit_length(x_TC.float().unflatten(-1, (self.key_heads, self.key_dim)))
            for x_TC in (q_TC, k_TC)
        )
        return (
            (q_TGk * self.key_dim**-0.5).repeat_interleave(self.values_per_key, dim=1),
            k_TGk.repeat_interleave(self.values_per_key, dim=1),
            v_TC.unflatten(-1, (self.value_heads, self.value_dim)),
        )


Recur = Callable[[int, Tensor, Tensor, Tensor, Tensor, DeltaHeads], Tensor]


def packed_recurrence(lengths: Sequence[int]) -> Recur:
    """Return the recurrence over whole packed sequences of these lengths."""

    def recur(
        _layer: int,
        qkv_TC: Tensor,
        decay_TH: Tensor,
        beta_TH: Tensor,
        weight_CK: Tensor,
        heads: DeltaHeads,
    ) -> Tensor:
        convolved_TC, _ = convolve(qkv_TC, weight_CK, lengths)
        return delta_rule(*heads.split(convolved_TC), decay_TH, beta_TH, lengths)[0]

    return recur


class GatedDeltaNet(nn.Module):
    """The mixer of tokens of one layer. Parameters are uninitialized.

    grouped: the checkpoint's rows of in_proj_qkvz and of in_proj_ba stand by key head (Qwen3-Next),
    each with its q, k, v, z or b, a; else q, k, v, z and b, a are matrices (Qwen3.5). Weights keep
    the checkpoint's order of rows, so their parts are those of files and adapters.
    """

    def __init__(
        self,
        layer: int,
        hidden_size: int,
        heads: DeltaHeads,
        taps: int,
        norm_eps: float,
        grouped: bool,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        layers: Layers = LEARNER,
    ) -> None:
        super().__init__()
        self.layer = layer
        self.heads = heads
        self.norm_eps = norm_eps
        self.grouped = grouped
        if grouped:
            qkvz = {"in_proj_qkvz": heads.channels + heads.values}
            ba = {"in_proj_ba": 2 * heads.value_heads}
        else:
            qkvz = {"in_proj_qkv": heads.channels, "in_proj_z": heads.values}
            ba = {"in_proj_b": heads.value_heads, "in_proj_a": heads.value_heads}
        self.qkvz = layers.linear(hidden_size, qkvz, False, device, dtype)
        self.ba = layers.linear(hidden_size, ba, False, device, dtype)

        def vector(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))

        self.conv_weight = vector(heads.channels, 1, taps)  # conv1d.weight
        self.decay_log = vector(heads.value_heads)  # A_log
        self.dt_bias = vector(heads.value_heads)
        self.norm_weight = vector(heads.value_dim)  # norm.weight
        self.o = layers.linear(heads.values, {"out_proj": hidden_size}, False, device, dtype)

    def forward(self, x_TD: Tensor, recur: Recur) -> Tensor | Product:
        """Return what the layer adds to the residual stream [T, D]."""
        qkv_TC, z_THv, beta_TH, decay_TH = self.project(x_TD)
        weight_CK = self.conv_weight.squeeze(1)
        o_THv = recur(self.layer, qkv_TC, decay_TH, beta_TH, weight_CK, self.heads)
        gated_THv = self.norm_and_gate(o_THv, z_THv).to(x_TD.dtype)
        return self.o(self.o.read(gated_THv.flatten(1)))

    def project(self, x_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return qkv [T, C], the gate z [T, H, v], and beta and decay [T, H], float32."""
        heads = self.heads
        qkvz = _dense(self.qkvz(self.qkvz.read(x_TD)), x_TD.dtype)
        ba = _dense(self.ba(self.ba.read(x_TD)), x_TD.dtype)
        if self.grouped:
            values, count = heads.values_per_key * heads.value_dim, heads.values_per_key
            sizes = [heads.key_dim, heads.key_dim, values, values]
            *qkv, z = (
                x_TGe.flatten(1)
                for x_TGe in qkvz.unflatten(-1, (heads.key_heads, -1)).split(sizes, dim=-1)
            )
            qkv_TC = torch.cat(qkv, dim=-1)
            b_TH, a_TH = (
                x_TGe.flatten(1)
                for x_TGe in ba.unflatten(-1, (heads.key_heads, -1)).split([count, count], dim=-1)
            )
        else:
            qkv_TC, z = qkvz.split([heads.channels, heads.values], dim=-1)
            b_TH, a_TH = ba.chunk(2, dim=-1)
        decay_TH = -self.decay_log.float().exp() * F.softplus(a_TH.float() + self.dt_bias.float())
        z_THv = z.unflatten(-1, (heads.value_heads, heads.value_dim))
        return qkv_TC, z_THv, b_TH.float().sigmoid(), decay_TH

    def norm_and_gate(self, o_THv: Tensor, z_THv: Tensor) -> Tensor:
        """Return each head's norm times the gate, float32. The gain is the weight, not 1 + it."""
        o_THv = o_THv.float()
        inverse_rms_TH1 = (o_THv.square().mean(-1, keepdim=True) + self.norm_eps).rsqrt()
        return o_THv * inverse_rms_TH1 * self.norm_weight.float() * F.silu(z_THv.float())


def _to_unit_length(x: Tensor) -> Tensor:
    return x * (x.square().sum(-1, keepdim=True) + UNIT_EPS).rsqrt()


def _dense(y: Tensor | Product, dtype: torch.dtype) -> Tensor:
    return y.dense(dtype) if isinstance(y, Product) else y
