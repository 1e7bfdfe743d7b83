"""Multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), uncompressed.

    q = W_q_b norm(W_q_a x)    or W_q x        of each head: numbers without positions, then rotated ones
    c, r = W_kv_a x                            the latent of keys and values; a rotated key of all heads
    k, v = W_kv_b norm(c)                      of each head, whose key is k and then r
    y = W_o attention(q, [k, r], v)

Caches hold keys and values, not the smaller latent. Shorter values are padded with zeros. A head's
numbers are laid out in pairs p, p + d / 2: half of those without positions, the firsts of rotated
pairs, the other half, the seconds.

Legend: `model`; d numbers of a head of q and k, r those of them that are rotated, v numbers of a
head of values, P wanted tokens.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowroll.kernels.quantize.rows import QuantizedRows
from lowroll.model.attention import Attend, AttentionInputs
from lowroll.model.layers import Layers
from lowroll.model.linear import Linear
from lowroll.model.residual_stream import RMSNorm, Stream, dense
from lowroll.model.spec import ModelSpec

NORM_EPS = 1e-6  # of the norms of latents, as in transformers


class LatentAttention(nn.Module):
    """A layer's attention, uninitialized."""

    def __init__(
        self,
        layer: int,
        spec: ModelSpec,
        device: torch.device | str,
        dtype: torch.dtype,
        layers: Layers,
    ) -> None:
        super().__init__()
        assert spec.latent is not None
        self.layer = layer
        self.sizes = spec.latent
        self.heads = spec.num_heads
        self.query_scale = spec.query_scale
        self.interleaved = spec.ropes[0].interleaved
        linears = {
            name: layers.linear(in_features, parts, False, device, dtype)
            for name, (parts, in_features) in spec.latent.matrices(
                spec.num_heads, spec.hidden_size
            ).items()
        }
        self.qkv_a = linears["qkv_a"]
        self.q_norm: RMSNorm | None = None
        self.q_b: Linear | None = None
        if spec.latent.query_rank:
            self.q_norm = RMSNorm(spec.latent.query_rank, NORM_EPS, device, dtype)
            self.q_b = linears["q_b"]
        self.kv_norm = RMSNorm(spec.latent.kv_rank, NORM_EPS, device, dtype)
        self.kv_b = linears["kv_b"]
        self.o = linears["o"]

    def forward(
        self,
        x_TD: Tensor | QuantizedRows,
        cos: Tensor,
        sin: Tensor,
        attend: Attend,
        wanted_P: Tensor | None = None,
    ) -> Stream:
        """Return the layer's update. cos, sin: of its rope, [T, 1, d/2]."""
        o_THd = attend(self.layer, self.project(x_TD, cos, sin))
        o_THv = o_THd[..., : self.sizes.value_dim]
        if wanted_P is not None:
            o_THv = o_THv[wanted_P]
        return self.o(self.o.read(o_THv.flatten(1)))

    def project(self, x_TD: Tensor | QuantizedRows, cos: Tensor, sin: Tensor) -> AttentionInputs:
        """Return q, k and v, all [T, H, d]."""
        sizes = self.sizes
        query_size = sizes.query_rank or self.heads * sizes.head_dim
        q, latent, k_rope = dense(self.qkv_a(x_TD)).split(
            [query_size, sizes.kv_rank, sizes.rope_dim], dim=1
        )
        if self.q_norm is not None and self.q_b is not None:
            q = _normed_product(q, self.q_norm, self.q_b)
        kv = _normed_product(latent, self.kv_norm, self.kv_b)
        q_nope, q_rope = q.unflatten(1, (self.heads, -1)).split(
            [sizes.nope_dim, sizes.rope_dim], dim=2
        )
        k_nope, v_THv = kv.unflatten(1, (self.heads, -1)).split(
            [sizes.nope_dim, sizes.value_dim], dim=2
        )
        q_THd = _laid_out(q_nope, self._rotate(q_rope, cos, sin))
        if self.query_scale != 1:
            q_THd = q_THd * self.query_scale
        k_T1r = self._rotate(k_rope[:, None], cos, sin)
        k_THd = _laid_out(k_nope, k_T1r.expand(-1, self.heads, -1))
        v_THd = F.pad(v_THv, (0, sizes.head_dim - sizes.value_dim))
        return AttentionInputs(q_THd, k_THd, v_THd)

    def _rotate(self, x_THr: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return rotated heads: the firsts of all pairs, then the seconds."""
        pairs = self.sizes.rope_dim // 2
        cos, sin = cos[..., :pairs], sin[..., :pairs]
        if self.interleaved:
            first, second = x_THr[..., 0::2], x_THr[..., 1::2]
        else:
            first, second = x_THr.chunk(2, dim=-1)
        rotated = [first * cos - second * sin, second * cos + first * sin]
        return torch.cat(rotated, dim=-1).to(x_THr.dtype)


def _laid_out(nope_THn: Tensor, rotated_THr: Tensor) -> Tensor:
    nope_halves, rotated_halves = nope_THn.chunk(2, dim=2), rotated_THr.chunk(2, dim=2)
    halves = zip(nope_halves, rotated_halves, strict=True)
    return torch.cat([part for half in halves for part in half], dim=2)


def _normed_product(x_TK: Tensor, norm: RMSNorm, linear: Linear) -> Tensor:
    return dense(linear(norm.add(x_TK.contiguous(), None, linear.row_kind)[1]))
