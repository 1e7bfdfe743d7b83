"""The engine's linear layer.

Where the format's kernel takes quantized rows, the input's producer quantizes it (`row_kind`), and
the product's reader may apply the scales (`Product`).

Legend: `model`.
"""

from __future__ import annotations

from torch import Tensor

from lowroll.kernels.quantize.rows import Product, QuantizedRows
from lowroll.model.linear import Linear
from lowroll.quant.formats import QTensor, get_format


class EngineLinear(Linear):
    """A QTensor multiplied in its format's own arithmetic, without gradients. Call `set_weight`
    first."""

    @property
    def codes(self) -> QTensor:
        assert isinstance(self.weight, QTensor), "an engine's layer multiplies a QTensor"
        return self.weight

    @property
    def row_kind(self) -> str | None:
        codes = self.codes
        if self.adapter is not None or codes.device.type != "cuda":
            return None
        return get_format(codes.format).rows

    def forward(self, x_TK: Tensor | QuantizedRows) -> Tensor | Product:
        codes = self.codes
        if isinstance(x_TK, QuantizedRows):
            return get_format(codes.format).product(x_TK, codes, self.bias, self.exact)
        refuse_gradient(x_TK)
        if self.adapter is not None and self.adapter.enabled:
            return self.adapted(self.adapter, x_TK)[0]
        return codes.linear(x_TK, self.bias, self.exact)

    def after_swiglu(self, gate_up_TN: Tensor | Product) -> Tensor | Product:
        return self(self.gate(gate_up_TN))


def refuse_gradient(x: Tensor) -> None:
    if x.requires_grad:
        raise ValueError(
            "the engine's arithmetic has no gradient; a learner multiplies with the dequantized "
            "weights, or aligned (weights.aligned_forward)"
        )
