"""INT8 W8A8 of rotated features, for activations with outliers.

    weights      w' = w H,   codes and scale of w' as in `quant.int8`
    activations  x' = x H,   codes and scale of x' as in `quant.int8`
    product      x' w'^T = x w^T, in the arithmetic of `quant.int8`

H is the blocked Hadamard matrix of `kernels.quantize.rotation`. In a pretrained model a few
channels hold most of a row's energy and leave the others few codes; rotation evens them out.

Legend: `quant`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowroll.kernels.quantize.rotation import rotate, width
from lowroll.kernels.quantize.rows import ROTATED
from lowroll.quant.formats import QTensor
from lowroll.quant.int8 import Int8
from lowroll.quant.scheme import INT8_TOKENS, Scheme, arguments


class Int8Rotated(Int8):
    name = ROTATED
    summary = "int8 after a Hadamard rotation of the features, in blocks: faithful to outliers"
    rows = ROTATED
    scheme = Scheme("int-quantized", arguments(8, "int", "channel"), INT8_TOKENS, rotated=True)
    unread = (
        "transformers does not read transform_config: it would load this folder and compute another "
        "model without a word"
    )

    def turned(self, w_NK: Tensor) -> Tensor:
        return rotate(w_NK)

    def rotation_width(self, num_in: int) -> int:
        return width(num_in)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return rotate(super().dequantize(q, torch.float32)).to(dtype)
