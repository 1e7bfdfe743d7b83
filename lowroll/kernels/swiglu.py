"""SwiGLU's gate: silu(gate) * up, from the fused gate-up product (Shazeer 2020). Legend: T tokens, F intermediate."""
from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels.rows import Product, Rows, quantize_rows


def silu_mul(gate_up: Tensor | Product, rows: str | None = None) -> Tensor | Rows:
    """silu(gate) * up [T, F] of gate_up [T, 2F], dense or as codes ("int8" or "fp8").

    Differentiable when gate_up is a tensor and rows None.
    """
    if isinstance(gate_up, Product):
        gate_up = gate_up.dense()
    gate_TF, up_TF = gate_up.chunk(2, dim=-1)
    y_TF = F.silu(gate_TF) * up_TF
    return y_TF if rows is None else quantize_rows(y_TF, rows)
