"""The residual stream, and the norm that reads it.

Legend: `model`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowroll.kernels.batch_invariant import rows as invariant
from lowroll.kernels.fused.norm import add_rms_norm
from lowroll.kernels.quantize.rows import Product, QuantizedRows

Stream = Tensor | Product  # the reader applies a low-bit product's scales


def dense(stream: Stream) -> Tensor:
    return stream.dense() if isinstance(stream, Product) else stream


class RMSNorm(nn.Module):
    """x / rms(x) * (weight + offset), with float32 statistics. `noise`
    (`weights.exploration_noise`) is added to the weight, in float32."""

    def __init__(
        self,
        size: int,
        eps: float,
        device: torch.device | str,
        dtype: torch.dtype,
        offset: float = 0.0,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.eps = eps
        self.offset = offset
        self.noise: Tensor | None = None
        self.exact = False

    def forward(self, x: Tensor) -> Tensor:
        normed = self.add(x, None)[1]
        assert isinstance(normed, Tensor)
        return normed

    def add(
        self, x_TD: Tensor, update_TD: Tensor | Product | None, rows: str | None = None
    ) -> tuple[Tensor, Tensor | QuantizedRows]:
        """Return (x + update, its norm) in one pass. rows: the kind of quantized rows of the norm;
        None: a plain tensor."""
        add = invariant.add_rms_norm if self.exact else add_rms_norm
        return add(x_TD, update_TD, self.gain, self.eps, rows)

    @property
    def gain(self) -> Tensor:
        if self.noise is not None:
            return self.weight.float() + (self.noise + self.offset)
        return self.weight.float() + self.offset if self.offset else self.weight
