"""bf16 weights times few rows: `streamed.cu` where it beats cuBLAS, a choice of the shape and the bucket of rows.

Legend: M rows of activations, N out features, K in features.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowroll.kernels import streamed

ROWS = 64


def takes(x_MK: Tensor, weight_NK: Tensor) -> bool:
    """Is this product one that the streamed kernel does faster than cuBLAS?"""
    return (x_MK.shape[0] <= ROWS and weight_NK.dtype == torch.bfloat16 and weight_NK.is_contiguous()
            and weight_NK.data_ptr() % 16 == 0 and streamed.takes("bf16", x_MK, tuple(weight_NK.shape)))


def linear(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None = None,
           out_dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """x W^T + b: y_MN in `out_dtype` (bf16, or float32 for logits), sums in fp32. Without gradients."""
    if takes(x_MK, weight_NK):
        return streamed.linear("bf16", {"weight": weight_NK}, x_MK, weight_NK.shape[0], bias_N, out_dtype)
    return F.linear(x_MK, weight_NK, bias_N).to(out_dtype)
