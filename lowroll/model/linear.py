"""The linear layer: a weight that is a Parameter or a QTensor, with an optional low-rank adapter
(`lowroll.model.adapter`). Fused matrices (qkv, gate-up) know the parts that checkpoints name.

Legend: `model`; F intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lowroll.kernels.batch_invariant import rows as invariant
from lowroll.kernels.fused.swiglu import silu_mul
from lowroll.kernels.launch import triton_supports
from lowroll.kernels.quantize.rows import Product, QuantizedRows, quantize_rows
from lowroll.kernels.training import swiglu_lora
from lowroll.kernels.training.swiglu_lora import Update, silu_mul_adapted
from lowroll.model import adapter as adapters
from lowroll.model.adapter import Adapter
from lowroll.model.recompute import remake
from lowroll.quant.formats import QTensor, get_format


class Linear(nn.Module):
    """A linear layer. `parts`: the rows of each stacked matrix, in order: {"q_proj": 512, ...}."""

    def __init__(
        self,
        in_features: int,
        parts: dict[str, int],
        bias: bool,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = dict(parts)
        rows = sum(parts.values())
        self.weight: nn.Parameter | QTensor = nn.Parameter(
            torch.empty(rows, in_features, device=device, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=dtype)) if bias else None
        # of a learner's forward (weights.aligned_forward)
        self.aligned: QTensor | None = None
        # of the gradient (weights.aligned_forward)
        self.transposed: QTensor | None = None
        self.adapter: Adapter | None = None
        self.exact = False

    def rows(self, part: str) -> slice:
        start = 0
        for name, size in self.parts.items():
            if name == part:
                return slice(start, start + size)
            start += size
        raise KeyError(part)

    def set_weight(self, weight: QTensor | nn.Parameter) -> None:
        """Replace the weight object, not its values."""
        del self.weight
        self.weight = weight
        self.aligned = self.transposed = None

    def quantized(self, format: str) -> QTensor:
        """Return the weight in a plain `format`: the learner's own codes, if any."""
        if self.aligned is not None and self.aligned.format == format:
            return self.aligned
        if not isinstance(self.weight, QTensor):
            return get_format(format).quantize(self.weight)
        if self.weight.format == format:
            return self.weight
        same_codes = self.weight.seen_as(format)
        if same_codes is not None:
            return same_codes.clone()
        return get_format(format).quantize(self.weight.dequantize())

    @property
    def codes(self) -> QTensor | None:
        """The codes of a forward in the format's own arithmetic, or None."""
        raise NotImplementedError

    @property
    def row_kind(self) -> str | None:
        """The kind of quantized rows that the layer reads, if any."""
        return None

    def read(self, x_TK: Tensor) -> Tensor | QuantizedRows:
        return x_TK if self.row_kind is None else quantize_rows(x_TK, self.row_kind)

    def after_swiglu(self, gate_up_TN: Tensor | Product) -> Tensor | Product:
        raise NotImplementedError

    def gate(self, gate_up_TN: Tensor | Product) -> Tensor | QuantizedRows:
        return (invariant.silu_mul if self.exact else silu_mul)(gate_up_TN, self.row_kind)

    def base_and_update(
        self, x_TK: Tensor | QuantizedRows
    ) -> tuple[Tensor | Product, Update | None]:
        """Return the product, and the adapter's update that it lacks, or None. On a device a reader
        adds the update, and its gradient is that of the sum (`kernels.training.swiglu_lora`)."""
        adapter = self.adapter
        if (
            adapter is None
            or not adapter.enabled
            or self.exact
            or not isinstance(x_TK, Tensor)
            or not triton_supports(x_TK)
            or not swiglu_lora.supports(adapter.rank, x_TK.dtype)
        ):
            return self(x_TK), None
        y_TN, low_TL, b_NL = self.adapted(adapter, x_TK, whole=False)
        return y_TN, Update(low_TL, b_NL, adapter.rank)

    def after_update(self, gate_up_TN: Tensor, update: Update) -> Tensor | Product:
        h_TF = silu_mul_adapted(gate_up_TN, update.low_TL, update.b_NL, update.rank)
        remake(h_TF, silu_mul_adapted, gate_up_TN, update.low_TL, update.b_NL, update.rank)
        return self(self.read(h_TF))

    def adapted(
        self, adapter: Adapter, x_TK: Tensor, whole: bool = True, update: Update | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return adapters.product(
            x_TK,
            self.weight,
            self.codes,
            self.transposed,
            self.bias,
            adapter,
            self.parts,
            whole,
            update,
            self.exact,
        )
